-- SPDX-License-Identifier: MIT
--- A rank of a prompt over ranks: runs the lines that the prompt's process (session.lua) sends, and sends back their
--- results. What a line prints goes to the prompt through a socket of its own. This process ends with the prompt's.
local bit = require "bit"
local ffi = require "ffi"
local engine = require "moonshard.core.ffi"
local dist = require "moonshard.dist"
local line = require "moonshard.tools.prompt.line"
local wire = require "moonshard.tools.prompt.wire"

local lib, state = engine.lib, engine.state
-- Copies of globals that a session may overwrite.
local io, os, table, package, unpack = io, os, table, package, unpack
local tonumber, loadfile, require, error, rawset = tonumber, loadfile, require, error, rawset
local exit = os.exit

ffi.cdef [[
int moonshard_dup2(int, int) __asm__("dup2");
int moonshard_open(const char *, int) __asm__("open");
int moonshard_fcntl(int, int, long) __asm__("fcntl");
int moonshard_getpid(void) __asm__("getpid");
]]

local M = {}

-- Connects this process's output to the prompt and its input to /dev/null, because only the prompt reads the terminal.
local function redirect(name, rank)
  local output = wire.connect(name)
  if not output or not output:send("output", rank) then error("the prompt has ended", 0) end
  io.stdout:flush()
  for fd = 1, 2 do
    -- F_DUPFD_CLOEXEC: the old output stays open, because mpirun closes rank 0's input as soon as its output is closed.
    ffi.C.moonshard_fcntl(fd, 1030, 3)
    ffi.C.moonshard_dup2(output.fd, fd)
  end
  output:close()
  io.stdout:setvbuf "line"
  local null = ffi.C.moonshard_open("/dev/null", 0)
  ffi.C.moonshard_dup2(null, 0)
  ffi.C.moonshard_close(null)
end

-- Has the kernel send SIGTERM when the prompt's process ends, because a rank that runs a line reads no message. Nothing
-- is sent on this connection, because every event on its socket would send the signal.
local function end_with_prompt(name)
  local life = wire.connect(name)
  if not life then error("the prompt has ended", 0) end
  local SETFL, SETOWN, SETSIG, ASYNC, TERM = 4, 8, 10, 0x2000, 15
  ffi.C.moonshard_fcntl(life.fd, SETOWN, ffi.C.moonshard_getpid())
  ffi.C.moonshard_fcntl(life.fd, SETSIG, TERM)
  ffi.C.moonshard_fcntl(life.fd, SETFL, bit.bor(2, ASYNC))
end

-- Shortens the error of a collective that failed because a peer has ended its line; returns other texts as they are. If
-- this rank runs the line alone, the text says that a collective would wait forever.
local function explained(text, rank, alone)
  local before, call, rest = text:match "^(.-)rank %d+ failed: ([%w_]+)(: collective #.* has ended its line at the prompt)$"
  if not call then return text end
  if not alone then return before .. call .. rest end
  return ("%s%s: this line runs on rank %d alone, where a collective would wait for the other ranks forever; enter it without @%d")
    :format(before, call, rank, rank)
end

local compile = {
  line = function(text) return line.compile(text) end,
  file = function(text) return loadfile(text) end,
  help = function(text) return function() return require("moonshard.tools.prompt.help").help(text) end end,
}

-- Runs a line, on this rank alone if `alone` is set. ended: 1 + the number of lines that all ranks have ended. Returns
-- whether the line succeeded, its results or its error's message, and the lines of the traceback.
local function run(rank, ended, kind, text, alone)
  -- A line that one rank runs alone is not counted. Meanwhile this rank counts one line less, so that its peers, which
  -- do not run the line, count as having ended it.
  lib.ms_dist_set_lines(alone and ended - 1 or ended)
  local chunk, message = compile[kind](text)
  if not chunk then return false, message, "" end
  local shown, failure, trace = {}, nil, ""
  local ok = line.execute(chunk, {
    result = function(one) shown[#shown + 1] = one end,
    failure = function(why, lines) failure, trace = why, table.concat(lines, "\n") end,
  })
  if ok then return true, table.concat(shown, "\n"), "" end
  if alone then return false, explained(failure, rank, true), trace end
  -- Before this rank counts the line as ended: peers that wait for it raise the reason.
  lib.ms_dist_failed(failure)
  return false, explained(failure, rank, false), trace
end

--- Joins the job, connects to the prompt and runs its lines. Returns when the prompt ends.
---@param name string  the name of the prompt's socket
function M.serve(name)
  dist.init()
  local rank, world = dist.rank(), dist.world_size()
  local control = wire.connect(name)
  if not control then error("the prompt has ended", 0) end
  end_with_prompt(name)
  redirect(name, rank)
  -- A rank that ends would leave the others waiting; the prompt ends them all and says who ended first.
  os.exit = function(code, close)                                                            -- luacheck: ignore
    control:send("exit", tonumber(code) or (code == false and 1 or 0))
    exit(code, close)
  end
  lib.ms_catch_sigint(1)
  rawset(_G, "ms", package.loaded.moonshard)
  lib.ms_dist_set_lines(1)
  control:send("hello", rank, world)
  while true do
    local message = control:wait()
    local kind = message and message[1]
    if not message or kind == "leave" then return end
    if kind == "run" then
      local ended, alone = tonumber(message[2]), message[5] == "alone"
      local ok, text, trace = run(rank, ended, message[3], message[4], alone)
      io.stdout:flush()
      io.stderr:flush()
      lib.ms_dist_set_lines(alone and ended or ended + 1)
      control:send("done", ok and 1 or 0, text, trace)
    elseif kind == "recover" then
      state.interrupted = 0                                          -- drops a Ctrl-C that came after the line ended
      lib.ms_dist_recover(nil, 0)
      control:send "recovered"
    elseif kind == "complete" then
      control:send("names", unpack(require("moonshard.tools.prompt.complete").complete(message[2])))
    end
  end
end

return M
