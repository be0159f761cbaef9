-- SPDX-License-Identifier: MIT
--- A prompt over ranks that a launcher has started: `mpirun -n 4 scripts/repl`. Rank 0 starts the prompt's process,
--- which is no rank. mpirun reads the terminal, passes on what it reads to rank 0's input, a pipe, and ends the job at
--- Ctrl-C. So the prompt's process sets the terminal to deliver every key at once, and Ctrl-C as a byte instead of an
--- interrupt. mpirun cannot be kept from reading: Open MPI 4.1.4 reads as a background process, too, and is stopped by
--- the kernel. If mpirun has no terminal, lines are read from the pipe, without editing.
local bit = require "bit"
local ffi = require "ffi"
local engine = require "moonshard.core.ffi"
local dist = require "moonshard.dist"
local launch = require "moonshard.tools.prompt.launch"
local wire = require "moonshard.tools.prompt.wire"

local C = ffi.C

ffi.cdef [[
int moonshard_getppid(void) __asm__("getppid");
typedef struct {
  unsigned input, output, control, local; unsigned char line, keys[32]; unsigned speed[2];
} moonshard_termios;
int moonshard_tcgetattr(int, moonshard_termios *) __asm__("tcgetattr");
int moonshard_tcsetattr(int, int, const moonshard_termios *) __asm__("tcsetattr");
int moonshard_readlink(const char *, char *, size_t) __asm__("readlink");
void *moonshard_on_signal(int, void *) __asm__("signal");
]]

local M = {}

--- What the launcher of this process says of its job; nil if no launcher has started it, or the job has one rank.
---@return ms_launch?
function M.job()
  local launched = ffi.new "ms_launch"
  engine.lib.ms_launcher(launched)
  if ffi.string(launched.name) == "" or launched.world == 1 then return nil end
  return launched
end

local function link(path)
  local buffer = ffi.new "char[200]"
  local n = C.moonshard_readlink(path, buffer, 200)
  return n > 0 and ffi.string(buffer, n) or ""
end

-- Reads /proc/PID/stat. Returns the process's name, parent, process group and its terminal's foreground process group,
-- as strings; nil if there is no such process.
local function stat(pid)
  local file = io.open(("/proc/%s/stat"):format(pid))
  local text = file and file:read "*a" or ""
  if file then file:close() end
  local name, parent, group, foreground = text:match "%((.*)%) %S (%S+) (%S+) %S+ %S+ (%S+)"
  return name, parent, group, foreground
end

local launchers = { mpirun = true, mpiexec = true, orterun = true, prterun = true }

-- Whether mpirun, from which this process descends, has a terminal as input and output and is in its foreground.
local function has_terminal()
  local pid = C.moonshard_getppid()
  local name, parent, group, foreground = stat(pid)
  while name and not launchers[name] and tonumber(parent) > 1 do
    pid = parent
    name, parent, group, foreground = stat(pid)
  end
  local terminal = io.open "/dev/tty"
  if not launchers[name] or group ~= foreground or not terminal then return false end
  terminal:close()
  for fd = 0, 1 do
    local to = link(("/proc/%s/fd/%d"):format(pid, fd))
    if not (to:find "^/dev/pts/" or to:find "^/dev/tty") then return false end
  end
  return true
end

-- Changes of the environment that remove the launcher's variables, which would make the prompt's process a rank.
local function without_launcher()
  local changes, k = {}, 0
  while C.environ[k] ~= nil do
    local name = ffi.string(C.environ[k]):match "^[^=]*"
    for _, pattern in ipairs { "^OMPI_", "^PMIX?_", "^SLURM_", "^MPI_LOCAL", "^RANK$", "^LOCAL_RANK$" } do
      if name:find(pattern) then changes[name] = false end
    end
    k = k + 1
  end
  return changes
end

--- On each rank: joins the job, and rank 0 starts `command` as the prompt's process, with a socket's name, the number
--- of ranks, and "terminal" or "pipe" as further arguments. Returns the socket's name once the process listens. Ends
--- the job if it has ranks on several machines.
---@param command string[]
---@return string
function M.begin(command)
  dist.init()
  local rank, world = dist.rank(), dist.world_size()
  local here = io.open "/proc/sys/kernel/random/boot_id"
  local hosts = dist.all_gather_object(here and here:read "*l" or "")
  if here then here:close() end
  for r = 2, world do
    if hosts[r] ~= hosts[1] then
      if rank == 0 then
        io.stderr:write(("repl: the prompt is for ranks on one machine, but rank %d is not on the machine of rank 0\n"):format(r - 1))
      end
      dist.barrier()                                    -- the launcher ends all ranks as soon as one has ended
      os.exit(2, true)
    end
  end
  local name, why
  if rank == 0 then
    local words, terminal = {}, has_terminal() and "/dev/tty" or nil
    for k, word in ipairs(command) do words[k] = word end
    name = wire.fresh_name()
    for _, word in ipairs { name, world, terminal and "terminal" or "pipe" } do words[#words + 1] = tostring(word) end
    local pid
    pid, why = launch.spawn(words, without_launcher(), { output = terminal, apart = "group" })
    if not pid then name = "" end
  end
  name = dist.broadcast_object(name, { src = 0 })
  if name == "" then error("rank 0 cannot start the prompt's process" .. (why and ": " .. why or ""), 0) end
  local limit = engine.lib.ms_time() + 30
  while engine.lib.ms_time() < limit do
    local probe = wire.connect(name)
    if probe then
      probe:close()
      return name
    end
    C.moonshard_wait(nil, 0, 10)
  end
  error("the prompt's process did not answer within 30 s", 0)
end

local SIGTTOU, ISIG, ICANON, ECHO = 22, 1, 2, 8

--- Called in the prompt's process: makes the terminal deliver each key at once, without echo, and Ctrl-C as a byte
--- instead of an interrupt. Returns a function that restores the terminal.
---@return fun()
function M.take_terminal()
  local before, now = ffi.new "moonshard_termios", ffi.new "moonshard_termios"
  -- A process in the background may set the terminal only if it ignores this signal.
  C.moonshard_on_signal(SIGTTOU, ffi.cast("void *", 1))
  if C.moonshard_tcgetattr(1, before) ~= 0 then return function() end end
  ffi.copy(now, before, ffi.sizeof(now))
  now["local"] = bit.band(now["local"], bit.bnot(ISIG + ICANON + ECHO))
  C.moonshard_tcsetattr(1, 0, now)
  return function() C.moonshard_tcsetattr(1, 0, before) end
end

return M
