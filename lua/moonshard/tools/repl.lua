-- SPDX-License-Identifier: MIT
--- The prompt: `scripts/repl`, or `luajit -i -e 'require "moonshard"'`.
--- Prints the values of expressions. After an error the session and its tensors remain. Ctrl-C returns to the prompt.
--- Tab completes names, fields and file names if readline is installed. `? name` shows documentation.
local ffi = require "ffi"
local engine = require "moonshard.core.ffi"
local lines = require "moonshard.tools.prompt.line"

local lib, state = engine.lib, engine.state
-- Copies of globals that a session may overwrite.
local io, jit, package, os = io, jit, package, os
local pcall, require, getmetatable, setmetatable = pcall, require, getmetatable, setmetatable
local rawget, rawset = rawget, rawset

local M = {
  show = require("moonshard.tools.prompt.show").show,
  compile = lines.compile, execute = lines.execute, settle = lines.settle,
  complete = require("moonshard.tools.prompt.complete").complete,
  help = require("moonshard.tools.prompt.help").help,
}

-- Waits for a line from a terminal or for Ctrl-C. A terminal delivers one line per read, so Lua has no other buffered.
-- The flag that Ctrl-C sets is polled ten times a second: a signal just before a read does not interrupt the read.
M.input = ffi.new("struct { int fd; short events, revents; }", 0, 1)
local function wait_for_line(prompt, session)
  if ffi.C.moonshard_is_terminal(0) == 0 then return end
  repeat
    if session.idle and session:idle(function() io.stdout:write "\n" end) then
      io.stdout:write(prompt)
      io.stdout:flush()
    end
  until state.interrupted ~= 0 or ffi.C.moonshard_wait(M.input, 1, 100) > 0
end

local function plain_reader(prompt, _, session)
  if state.interrupted ~= 0 then                        -- interrupted since the last line, while nothing ran
    state.interrupted = 0
    M.settle()
    return "", true
  end
  io.stdout:write(prompt)
  io.stdout:flush()
  wait_for_line(prompt, session)
  local line = state.interrupted == 0 and io.read "*l" or nil
  if line == nil and state.interrupted ~= 0 then        -- Ctrl-C ends the read, not the session
    state.interrupted = 0
    M.settle()
    io.stdout:write "\n"
    return "", true
  end
  return line
end

-- The functions that M.run calls to complete, run and explain input in this process. In a prompt over ranks it calls
-- those of a Session (session.lua) instead.
local alone = {
  complete = function(_, text) return M.complete(text) end,
  has = function(_, name) return rawget(_G, name) ~= nil end,
  execute = function(_, _, chunk) M.execute(chunk) end,
  explain = function(_, name)
    local _, page_or_error = pcall(M.help, name)
    io.stdout:write(lines.text_of(page_or_error), "\n")
  end,
}

-- Recognises exit, quit, restart and help, unless the session has a global with that name. Returns "leave", "restart"
-- (of ranks), or "help" and the name to explain; nil for other input.
local function command_of(line, session)
  local word, rest = line:match "^%s*(%a+)%s*(.-)%s*;?%s*$"
  if word ~= "exit" and word ~= "quit" and word ~= "help" and word ~= "restart" or session:has(word) then return nil end
  if word ~= "help" then
    if rest ~= "" and not rest:find "^%(%s*%)$" then return nil end
    if word == "restart" then return session.restart and word or nil end
    return "leave"
  end
  local name = rest:match "^%((.*)%)$" or rest
  name = name:match "^%s*(.-)%s*$":gsub("^([\"'])(.*)%1$", "%2")
  return name:find "^[%w_.:*]*$" and "help" or nil, name
end

-- Whether a line of a paste continues the line before it, although that is complete: neither a statement nor an
-- expression begins so.
local function continues(line)
  return line:find "^%s*[.:+*/%%^]" ~= nil or line:find "^%s*and%f[^%w_]" ~= nil or line:find "^%s*or%f[^%w_]" ~= nil
end

-- Wraps a reader: the lines of a paste, which readline returns as one text, are returned one after the other. Ctrl-C
-- drops those that have not been returned.
local function one_by_one(read)
  local pasted, sigints = {}, 0
  return function(prompt, before, session)
    if state.sigints ~= sigints then pasted = {} end
    if pasted[1] then return table.remove(pasted, 1), false, pasted[1] ~= nil end
    local text, given_up = read(prompt, before, session)
    if not text or not text:find "\n" then return text, given_up, false end
    sigints = state.sigints
    for line in (text:gsub("%s+$", "") .. "\n"):gmatch "(.-)\n" do
      if pasted[1] and continues(line) then
        pasted[#pasted] = pasted[#pasted] .. "\n" .. line
      else
        pasted[#pasted + 1] = line
      end
    end
    return table.remove(pasted, 1), false, pasted[1] ~= nil
  end
end

--- Ends every rank of a job, because all ranks would read from the same terminal.
function M.refuse_ranks()
  local dist = require "moonshard.dist"
  local world = dist.world_size()
  if world == 1 then return end
  if dist.rank() == 0 then
    io.stderr:write(("repl: this prompt is for one process, and this is a job of %d ranks: start scripts/repl --ranks %d\n"):format(
      world, world))
  end
  dist.barrier()                                        -- mpirun ends all ranks as soon as one has ended
  os.exit(2, true)
end

--- Reads and runs input and prints results, until the end of the input or a command that leaves.
---@param given? {quiet: boolean, session: Session}  session: the ranks that run the input; nil: this process
function M.run(given)
  local session = given and given.session or alone
  if session == alone then M.refuse_ranks() end
  local reader = require "moonshard.tools.prompt.readline"
  local read = one_by_one(reader and reader(M, session) or plain_reader)
  if not (given and given.quiet) then
    io.stdout:write(("Moonshard on %s (%s)%s: the library is ms. ? for help, Ctrl-D to leave.\n"):format(_VERSION
      and jit.version or "Lua", jit.arch, session.world and (", %d ranks"):format(session.world) or ""))
  end
  lib.ms_catch_sigint(1)
  if rawget(_G, "ms") == nil then rawset(_G, "ms", package.loaded.moonshard) end
  local text, target
  while true do
    local line, given_up, more_follow = read(text and ">> " or "> ", text, session)
    if line == nil then break end
    local command, name = nil, nil
    if not text and not given_up then command, name = command_of(line, session) end
    if command == "leave" then break end
    if given_up then
      text = nil
    elseif line == "" and not text then                 -- nothing to do
      text = nil
    elseif text then
      text = line == "" and text .. "\n" or text .. "\n" .. line
    elseif command == "restart" then
      session:restart()
    elseif command == "help" or line:match "^%s*%?" then
      session:explain(name or line:match "^%s*%?(.*)$")
    else
      target, text = nil, line
      if session.world and line:find "^%s*@" then target, text = session:target(line) end
    end
    if text then
      local chunk, message, more = M.compile(text)
      if chunk then
        session:execute(text, chunk, target)
        text = nil
      elseif not more then
        io.stdout:write(message, "\n")
        text = nil
      elseif line == "" and not more_follow and text:match "\n\n\n$" then -- three empty lines discard an unfinished statement
        io.stdout:write(message, "\n")
        text = nil
      end
    end
  end
  io.stdout:write "\n"
  lib.ms_catch_sigint(0)
end

--- Makes M.run replace LuaJIT's loop under `luajit -i`, as soon as LuaJIT reads _PROMPT for its first prompt.
function M.take_over()
  if getmetatable(_G) ~= nil then return end
  setmetatable(_G, { __index = function(globals, key)
    if key ~= "_PROMPT" then return nil end
    setmetatable(globals, nil)
    M.run()
    os.exit(0, true)
  end })
end

return M
