-- SPDX-License-Identifier: MIT
--- A program in a terminal of its own: writes keys and reads its output until a text appears.
local ffi = require "ffi"
local process = require "spec.support.process"
local stdlib, unistd, fcntl = require "posix.stdlib", require "posix.unistd", require "posix.fcntl"
local poll, wait, signal = require "posix.poll", require "posix.sys.wait", require "posix.signal"

pcall(ffi.cdef, "int spec_ioctl(int, unsigned long, int) __asm__(\"ioctl\");")
pcall(ffi.cdef, "int spec_ioctl_size(int, unsigned long, const unsigned short *) __asm__(\"ioctl\");")
local TIOCSCTTY, TIOCSWINSZ = 0x540E, 0x5414

local Pty = {}
Pty.__index = Pty

--- Starts a program; environment entries are added to those of this process.
---@param command string[]
---@param environment? table<string, string>
function Pty.start(command, environment)
  local master = assert(fcntl.open and stdlib.openpt(fcntl.O_RDWR + fcntl.O_NOCTTY))
  assert(stdlib.grantpt(master))
  assert(stdlib.unlockpt(master))
  local name = assert(stdlib.ptsname(master))
  local pid = assert(unistd.fork())
  if pid == 0 then
    unistd.setpid("s")
    local slave = fcntl.open(name, fcntl.O_RDWR)
    ffi.C.spec_ioctl(slave, TIOCSCTTY, 0)
    for fd = 0, 2 do unistd.dup2(slave, fd) end
    unistd.close(master)
    for k, v in pairs(environment or {}) do stdlib.setenv(k, v) end
    unistd.execp(command[1], { [0] = command[1], unpack(command, 2) })
    unistd._exit(127)
  end
  return setmetatable({ master = master, pid = pid, text = "" }, Pty)
end

---@param columns integer
function Pty:resize(columns)
  local size = ffi.new("unsigned short[4]", 24, columns, 0, 0)
  assert(ffi.C.spec_ioctl_size(self.master, TIOCSWINSZ, size) == 0)
end

function Pty:type(text)
  assert(unistd.write(self.master, text))
end

--- Waits for output and adds it to self.text. Returns false if there was no output or the program ended.
---@param seconds number
function Pty:read(seconds)
  if poll.rpoll(self.master, math.ceil(seconds * 1000)) ~= 1 then return false end
  local part = unistd.read(self.master, 4096)
  if not part or part == "" then return false end
  self.text = self.text .. part
  return true
end

--- The output up to and including `wanted`; nil and the output if it does not appear.
---@param wanted string  plain text
---@param seconds? number
function Pty:expect(wanted, seconds)
  local limit = process.now() + (seconds or 10) * process.patience
  repeat
    local _, last = self.text:find(wanted, 1, true)
    if last then
      local before = self.text:sub(1, last)
      self.text = self.text:sub(last + 1)
      return before
    end
    if not self:read(0.05) and not self.ended then
      local pid, how, status = wait.wait(self.pid, wait.WNOHANG)
      if pid == self.pid then self.ended = ("%s, %s"):format(how, status) end
    end
  until process.now() > limit
  return nil, ("'%s' was not printed within %.0f s; printed instead: %s (the program %s)"):format(wanted, (seconds or 10) * process.patience, self.text,
    self.ended and "ended: " .. self.ended or "is still running, waiting in " .. (process.read(("/proc/%d/wchan"):format(self.pid)) or "?"))
end

--- Waits until the program ends; kills it after `seconds` (5). Returns its exit status or signal and how it ended, or
--- nil and a reason if it was killed here, or if `expect` has already seen its end.
function Pty:finish(seconds)
  local limit = process.now() + (seconds or 5) * process.patience
  if self.ended then
    unistd.close(self.master)
    return nil, self.ended
  end
  while process.now() < limit do
    if poll.rpoll(self.master, 0) == 1 then unistd.read(self.master, 4096) end
    local pid, how, status = wait.wait(self.pid, wait.WNOHANG)
    if pid == self.pid then
      unistd.close(self.master)
      return status, how
    end
    process.sleep(0.01)
  end
  signal.kill(self.pid, signal.SIGKILL)
  wait.wait(self.pid)
  unistd.close(self.master)
  return nil, "still running"
end

return Pty
