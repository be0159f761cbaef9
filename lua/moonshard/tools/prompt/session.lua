-- SPDX-License-Identifier: MIT
--- A prompt over ranks, seen from the process that owns the terminal. It is no rank of the job, so it survives a rank
--- that dies. A line runs on all ranks, or on one (`@2 x`); the prompt returns when they have replied. If a rank fails,
--- the others are interrupted. After each line the ranks recover, so that their next collectives match.
local ffi = require "ffi"
local engine = require "moonshard.core.ffi"
local launch = require "moonshard.tools.prompt.launch"
local line = require "moonshard.tools.prompt.line"
local merge = require "moonshard.tools.prompt.merge"
local wire = require "moonshard.tools.prompt.wire"

local lib, state, C = engine.lib, engine.state, ffi.C
ffi.cdef [[
long moonshard_read_of_prompt(int, void *, size_t) __asm__("read");
int moonshard_group_of(int) __asm__("getpgid");
]]
local SIGINT, SIGTERM, SIGKILL = 2, 15, 9

local START = 120           -- seconds that the ranks may take to start
local HOLD = 1.0            -- seconds that a printed line waits for the other ranks' line
local FOLLOW = 0.1          -- seconds after a rank's error until the others are interrupted
local PATIENCE = 1.0        -- seconds after an interrupt until ranks that have not returned are named

---@class RankOfPrompt
---@field rank integer      from 0
---@field control Channel?  for lines and replies; nil: not connected yet
---@field output Channel?   for what it prints; nil: not connected yet
---@field pid integer?      its process id; nil: not connected yet
---@field exit string?      the status that the rank gave os.exit; nil: it has not called os.exit

---@class Session
---@field world integer  number of ranks
---@field ranks table<integer, RankOfPrompt>?  nil: the job has ended
local Session = {}
Session.__index = Session

local M = {}

local function say(text)
  io.stdout:write(text, "\n")
  io.stdout:flush()
end

-- ---- connections ----------------------------------------------------------------------------------

-- The kinds of connection by their first message. A third kind (end_with_prompt in rank.lua) sends none and stays
-- pending.
local connect = {
  output = function(rank, channel, session)
    rank.output = channel
    session.out:add(rank.rank, channel.left, lib.ms_time())          -- output that arrived with the message
  end,
  hello = function(rank, channel) rank.control, rank.pid = channel, channel.pid end,
}

function Session:accept()
  local channel = wire.accept(self.listening)
  if channel then self.pending[channel.fd] = channel end
end

function Session:greet(channel)
  local open = channel:fill()
  local message = channel:next()
  if not message and open then return end
  self.pending[channel.fd] = nil
  local rank = message and self.ranks[tonumber(message[2])]
  if rank and connect[message[1]] then
    connect[message[1]](rank, channel, self)
    if message[1] == "hello" then self.greeted = self.greeted + 1 end
  else
    channel:close()
  end
end

local buffer = ffi.new "char[65536]"

-- Reads what mpirun prints: its own messages, and those of ranks that have not connected yet.
function Session:read_launcher()
  local n = tonumber(C.moonshard_read_of_prompt(self.launcher.out, buffer, 65536))
  if n <= 0 then return self.launcher:close() end
  self.complaints = (self.complaints .. ffi.string(buffer, n)):sub(-20000)
end

--- Waits up to ms milliseconds and reads what has arrived.
function Session:poll(ms)
  local fds, handlers = { self.listening }, { [self.listening] = function() self:accept() end }
  local function add(fd, handler)
    fds[#fds + 1] = fd
    handlers[fd] = handler
  end
  for fd, channel in pairs(self.pending) do add(fd, function() self:greet(channel) end) end
  for r, rank in pairs(self.ranks) do
    local control, output = rank.control, rank.output
    if control and not control.closed then
      add(control.fd, function()
        if not control:fill() then self.gone[#self.gone + 1] = r end
      end)
    end
    if output and not output.closed then
      add(output.fd, function()
        local text = output:read()
        if text and text ~= "" then self.out:add(r, text, lib.ms_time()) end
      end)
    end
  end
  if self.launcher and self.launcher.out >= 0 then add(self.launcher.out, function() self:read_launcher() end) end
  for fd in pairs(wire.poll(fds, ms)) do handlers[fd]() end
end

-- Reads what the ranks had printed before they replied.
function Session:drain()
  for r, rank in pairs(self.ranks) do
    local text = rank.output and rank.output:read()
    while text and text ~= "" do
      self.out:add(r, text, lib.ms_time())
      text = rank.output:read()
    end
  end
end

-- ---- start and end --------------------------------------------------------------------------------

function Session:reset()
  self.ranks, self.all, self.pending, self.gone, self.complaints = {}, {}, {}, {}, ""
  self.greeted, self.lines = 0, 1
  for r = 0, self.world - 1 do
    self.ranks[r] = { rank = r }
    self.all[r + 1] = r
  end
  self.out = merge.output(self.all, HOLD, say)
end

--- Waits until every rank has connected. Returns false and a reason if they do not.
function Session:await()
  local until_time = lib.ms_time() + START
  while self.greeted < self.world do
    self:poll(20)
    local why = self.launcher and self.launcher:ended() and "mpirun has ended"
      or #self.gone > 0 and merge.names(self.gone) .. " ended"
      or state.interrupted ~= 0 and "interrupted"
      or lib.ms_time() > until_time and ("%d of %d ranks connected within %d s"):format(self.greeted, self.world, START)
    if why then
      state.interrupted = 0
      if self.launcher and self.launcher.out >= 0 then self:poll(100) end
      local text = self.complaints
      self:finish(0)
      return false, text:gsub("%s+$", "") .. (text ~= "" and "\n" or "") .. why
    end
  end
  if self.complaints ~= "" then say((self.complaints:gsub("%s+$", ""))) end
  self.complaints = ""
  return true
end

-- Waits until the job has ended; if it has not after `seconds`, ends it by signals. Afterwards there are no ranks.
function Session:finish(seconds)
  local until_time = lib.ms_time() + seconds
  local function running()
    if self.launcher then return not self.launcher:ended() end
    for _, rank in pairs(self.ranks) do
      if rank.control and not rank.control.closed then return true end
    end
    return false
  end
  local signals = { SIGTERM, SIGKILL }
  while running() do
    self:poll(10)
    if lib.ms_time() > until_time then
      local signal = table.remove(signals, 1)
      if not signal then break end
      for _, rank in pairs(self.ranks) do
        if rank.pid and not rank.control.closed then C.moonshard_kill(rank.pid, signal) end
      end
      if self.launcher then self.launcher:kill(signal) end
      until_time = lib.ms_time() + 3
    end
  end
  self:poll(0)
  self:drain()
  self.out:tick(lib.ms_time())
  for _, rank in pairs(self.ranks) do
    for _, kind in ipairs { "control", "output" } do
      if rank[kind] then rank[kind]:close() end
    end
  end
  if self.launcher then self.launcher:close() end
  for _, channel in pairs(self.pending) do channel:close() end
  C.moonshard_close(self.listening)
  self.ranks = nil
end

--- Ends the ranks.
function Session:leave()
  if not self.ranks then return end
  for _, rank in pairs(self.ranks) do rank.control:send "leave" end
  self:finish(5)
end

-- How a rank ended, from its messages and mpirun's.
local function manner(rank, text)
  if rank.exit then return ("called os.exit (status %s)"):format(rank.exit) end
  local signal, name = text:match "exited on signal (%d+) %((.-)%)"
  if signal then return ("died: signal %s (%s)"):format(signal, name) end
  local code = text:match "Exit code:%s+(%d+)"
  return code and ("ended with status %s"):format(code) or "died"
end

-- After a rank has ended: lets the job end, names the rank, and says how to continue.
function Session:bury()
  local first, kept = self.gone[1], {}
  self:take({}, {})
  for r, rank in pairs(self.ranks) do
    if rank.exit then first = r end                     -- os.exit ended the job, even if peers were gone first
  end
  -- Shows what the ranks have printed so far, and keeps what they print from here on: it is about the end of the job.
  self:drain()
  self.out:tick(lib.ms_time())
  self.out = merge.output(self.all, HOLD, function(text) kept[#kept + 1] = text end)
  for _, rank in pairs(self.ranks) do
    if not rank.control.closed then rank.control:send "leave" end
  end
  local ranks = self.ranks
  self:finish(3)
  local text = table.concat(kept, "\n") .. "\n" .. self.complaints
  local named = text:match "process rank (%d+) with PID" or text:match "rank (%d+) %(process %d+%) died"
  if named and not ranks[first].exit and ranks[tonumber(named)] then first = tonumber(named) end
  line.settle()
  say(("rank %d (process %d) %s. The job has ended with it: the variables and tensors of all ranks are gone.")
    :format(first, ranks[first].pid, manner(ranks[first], text)))
  say(("Enter restart to start %d new ranks, or exit to leave."):format(self.world))
end

-- Runs the files that were given, on ranks that have connected.
function Session:run_files()
  for _, file in ipairs(self.files) do
    if self.ranks then self:exchange("file", file) end
  end
end

--- Starts the ranks. Returns false and a reason if that fails.
function Session:start()
  self:reset()
  local name = wire.fresh_name()
  self.listening = wire.listen(name)
  local command = {}
  for k, word in ipairs(self.command) do command[k] = word end
  command[#command + 1] = name
  local why
  self.launcher, why = launch.start(self.world, command)
  if not self.launcher then
    C.moonshard_close(self.listening)
    self.ranks = nil
    return false, why
  end
  local ok
  ok, why = self:await()
  if ok then self:run_files() end
  return ok, why
end

-- ---- lines ----------------------------------------------------------------------------------------

-- Handles the messages that have arrived. running: the ranks whose reply is awaited; the value is "ended" for those
-- that the prompt has interrupted because another rank has failed, else true.
function Session:take(replies, running)
  for r, rank in pairs(self.ranks) do
    local message = rank.control:next()
    while message do
      local kind = message[1]
      if kind == "exit" then
        rank.exit = message[2]
      else
        replies[r] = message
        if kind == "done" then
          replies[r] = { ok = message[2] == "1", text = message[3], trace = message[4], ended = running[r] == "ended" }
        end
        running[r] = nil
      end
      message = rank.control:next()
    end
  end
end

local function failed(replies)
  for _, reply in pairs(replies) do
    if reply.ok == false then return true end
  end
  return false
end

local function sorted(set)
  local list = {}
  for r in pairs(set) do list[#list + 1] = r end
  table.sort(list)
  return list
end

-- Sends a signal to a rank and to the programs that it runs: mpirun makes each rank a process group.
local function signal_rank(pid, signal)
  C.moonshard_kill(C.moonshard_group_of(pid) == pid and -pid or pid, signal)
end

-- Sends a message to some ranks and collects their replies (Reply for a line, otherwise the reply's fields). Returns
-- nil if a rank has ended.
---@param targets integer[]
---@return table<integer, table>? replies
---@return boolean? signalled  whether a rank may have got a signal
function Session:ask(targets, ...)
  local running, replies = {}, {}
  local failed_at, signalled_at, interrupted, named = nil, nil, false, false
  for _, r in ipairs(targets) do
    running[r] = true
    self.ranks[r].control:send(...)
  end
  local function interrupt(mark, signal)
    signalled_at = signalled_at or lib.ms_time()
    for r in pairs(running) do
      signal_rank(self.ranks[r].pid, signal)
      running[r] = mark
    end
  end
  while next(running) do
    self:poll(20)
    self:take(replies, running)
    local now = lib.ms_time()
    if #self.gone > 0 then break end
    if interrupted then self.out:hurry() end
    self.out:tick(now, running)
    failed_at = failed_at or failed(replies) and now or nil
    if state.interrupted ~= 0 then
      state.interrupted, interrupted = 0, true
      interrupt(true, named and SIGKILL or SIGINT)
    elseif failed_at and not signalled_at and now - failed_at > FOLLOW then
      interrupt("ended", SIGINT)
    elseif signalled_at and not named and now - signalled_at > PATIENCE and next(running) then
      named = true
      say(("%s not returned yet from a long operator or another program; %s Ctrl-C ends the ranks"):format(
        merge.names(sorted(running)) .. (next(running, next(running)) and " have" or " has"),
        interrupted and "a second" or "a"))
    end
  end
  if #self.gone > 0 then return nil end
  self:drain()
  if interrupted then self.out:hurry() end
  self.out:tick(lib.ms_time())
  return replies, signalled_at ~= nil
end

--- Runs a line or a file, or explains a name, on all ranks or on one, and prints the results.
---@param kind "line"|"file"|"help"
---@param text string
---@param only? integer  the only rank that runs it
function Session:exchange(kind, text, only)
  if not self.ranks then
    say(("there are no ranks: enter restart to start %d ranks, or exit to leave"):format(self.world))
    return
  end
  local targets = only and { only } or self.all
  self.out = merge.output(targets, HOLD, say)
  local replies, signalled = self:ask(targets, "run", self.lines, kind, text, only and "alone" or "all")
  if not replies then return self:bury() end
  if not only then self.lines = self.lines + 1 end
  self.out = merge.output(self.all, HOLD, say)
  if not self:ask(self.all, "recover") then return self:bury() end
  if signalled then line.settle() end
  for _, one in ipairs(merge.replies(replies, targets)) do say(one) end
end

--- Looks for a rank that has ended, and prints what ranks print, while the prompt waits for input. Returns whether
--- something was printed; `before` is called once, before the first text.
---@param before fun()
function Session:idle(before)
  if not self.ranks then return false end
  self:poll(0)
  local printed = false
  self.out.print = function(text)
    if not printed then before() end
    printed = true
    say(text)
  end
  if #self.gone > 0 then
    before()
    printed = true
    self.out.print = say
    self:bury()
  else
    self.out:tick(lib.ms_time())
    self.out.print = say
  end
  return printed
end

--- Names that complete a text, as rank 0 knows them.
function Session:complete(text)
  if not self.ranks then return {} end
  local replies = self:ask({ 0 }, "complete", text)
  if not replies then return {} end                     -- a rank has ended; `idle` will report it
  table.remove(replies[0], 1)
  return replies[0]
end

--- Whether the session has a global of this name.
function Session:has(name)
  for _, known in ipairs(self:complete(name)) do
    if known == name then return true end
  end
  return false
end

-- ---- what the loop of the prompt calls (repl.lua) ---------------------------------------------------

function Session:execute(text, _, only) self:exchange("line", text, only) end

function Session:explain(name)
  if self.ranks then return self:exchange("help", name) end
  local _, page_or_error = pcall(require("moonshard.tools.prompt.help").help, name)
  say(line.text_of(page_or_error))
end

--- The rank and the rest of a line such as "@2 x". Prints what is wrong and returns nil if the line has no rest or if
--- there is no such rank.
function Session:target(text)
  local rank, rest = text:match "^%s*@%s*(%d+)%s*(.*)$"
  if not rank or tonumber(rank) >= self.world or rest == "" then
    say(("%s: expected a rank from 0 to %d and a line for it, as in: @%d x"):format(text, self.world - 1, self.world - 1))
    return nil, nil
  end
  if not self.warned then
    say(("(on rank %s alone: collectives are refused, because the other ranks do not run the line)"):format(rank))
    self.warned = true
  end
  return tonumber(rank), rest
end

--- Ends the remaining ranks and starts new ones; says why if that is impossible.
function Session:restart()
  self:leave()
  local ok, why = self:start()
  if not ok then say("restart: " .. why) end
end

--- Starts a prompt over new ranks: runs `command` on each, with a socket's name appended.
---@param world integer
---@param command string[]
---@param files string[]  files to run first
---@return Session?
---@return string? message
function M.start(world, command, files)
  local session = setmetatable({ world = world, command = command, files = files }, Session)
  lib.ms_catch_sigint(1)
  local ok, why = session:start()
  if not ok then return nil, why end
  return session
end

return M
