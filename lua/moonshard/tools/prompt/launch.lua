-- SPDX-License-Identifier: MIT
--- Starts the ranks of a prompt with mpirun, which runs in a session of its own, so that Ctrl-C reaches only the
--- prompt.
local ffi = require "ffi"
local engine = require "moonshard.core.ffi"
require "moonshard.tools.prompt.wire"                   -- declares moonshard_close

local M = {}

ffi.cdef [[
typedef struct { char opaque[512]; } moonshard_spawn;
int moonshard_actions_init(moonshard_spawn *) __asm__("posix_spawn_file_actions_init");
int moonshard_actions_destroy(moonshard_spawn *) __asm__("posix_spawn_file_actions_destroy");
int moonshard_actions_open(moonshard_spawn *, int, const char *, int, unsigned) __asm__("posix_spawn_file_actions_addopen");
int moonshard_actions_dup2(moonshard_spawn *, int, int) __asm__("posix_spawn_file_actions_adddup2");
int moonshard_attr_init(moonshard_spawn *) __asm__("posix_spawnattr_init");
int moonshard_attr_destroy(moonshard_spawn *) __asm__("posix_spawnattr_destroy");
int moonshard_attr_flags(moonshard_spawn *, short) __asm__("posix_spawnattr_setflags");
int moonshard_spawnp(int *, const char *, const moonshard_spawn *, const moonshard_spawn *, const char *const *,
  const char *const *) __asm__("posix_spawnp");
int moonshard_pipe(int *, int) __asm__("pipe2");
int moonshard_waitpid(int, int *, int) __asm__("waitpid");
int moonshard_kill(int, int) __asm__("kill");
int moonshard_getuid_of_process(void) __asm__("getuid");
int moonshard_file_exists(const char *, int) __asm__("access");
long moonshard_sysconf(int) __asm__("sysconf");
char *strerror(int);
extern char **environ;
]]
local C = ffi.C

local PER_CORE = 16         -- more ranks than this on each core would not start within minutes

--- The number of ranks that option --ranks gives; nil and a message if that is not a number of ranks
--- that can be started here.
---@param text string  the option's value
---@return integer?
---@return string? message
function M.world(text)
  local world = text:find "^%d+$" and tonumber(text)
  local cores = math.max(1, tonumber(C.moonshard_sysconf(84)))       -- _SC_NPROCESSORS_ONLN
  local most = math.min(1024, PER_CORE * cores)
  if not world or world < 1 then return nil, ("--ranks '%s' is not a whole number from 1"):format(text) end
  if world > most then
    return nil, ("--ranks %s: at most %d ranks are possible here: %d for each core, and no more than 1024"):format(text, most, PER_CORE)
  end
  local launched = ffi.new "ms_launch"
  engine.lib.ms_launcher(launched)
  if launched.name ~= nil and launched.name[0] ~= 0 then
    return nil, ("--ranks %s starts ranks, but %s has started this process: leave out one of the two"):format(text,
      ffi.string(launched.name))
  end
  return world
end

-- The environment of this process with changes (name -> text, or false to remove the variable), as a list of
-- "name=text".
local function environment(changes)
  local list, k = {}, 0
  while C.environ[k] ~= nil do
    local entry = ffi.string(C.environ[k])
    if changes[entry:match "^[^=]*"] == nil then list[#list + 1] = entry end
    k = k + 1
  end
  for name, value in pairs(changes) do
    if value then list[#list + 1] = name .. "=" .. value end
  end
  return list
end

local function strings(list)
  local array = ffi.new("const char *[?]", #list + 1)
  for k, text in ipairs(list) do array[k - 1] = text end
  return array
end

-- The changes of mpirun's environment and its first arguments. As in scripts/train: mpirun may run as root and start
-- more ranks than cores; ranks are not bound to cores; and libmoonshard_mpirun.so (runtime/comm/job/mpirun.c) is
-- preloaded, unless LD_PRELOAD is already set, or the library is missing.
local function settings()
  local env = { OMPI_MCA_rmaps_base_oversubscribe = "1", OMPI_MCA_hwloc_base_binding_policy = "none",
    OMPI_MCA_odls_base_sigkill_timeout = "0" }
  if C.moonshard_getuid_of_process() == 0 then
    env.OMPI_ALLOW_RUN_AS_ROOT, env.OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = "1", "1"
  end
  local preload = os.getenv "LD_PRELOAD"
  local arguments = {}
  if preload and preload ~= "" then                     -- passed on to the ranks, such as a sanitizer
    env.LD_PRELOAD = false
    arguments = { "-x", "LD_PRELOAD=" .. preload }
  end
  local folder, library = engine.path:match "^(.*/)", nil
  for _, place in ipairs { "moonshard/", "" } do         -- in an installation, or in a build folder
    local path = folder .. place .. "libmoonshard_mpirun.so"
    if not library and C.moonshard_file_exists(path, 4) == 0 then library = path end
  end
  if library and #arguments == 0 then env.LD_PRELOAD = library end
  return env, arguments
end

---@class Launcher
---@field pid integer   process id of mpirun
---@field out integer   descriptor from which mpirun's output is read; -1: closed
---@field code integer?  mpirun's exit status (after a signal: 128 + the number of the signal); nil: mpirun runs

local Launcher = {}
Launcher.__index = Launcher

local SETSID = 0x80                                       -- POSIX_SPAWN_SETSID

-- Starts a program in a session of its own, without input. Returns its process id, or nil and the reason.
local function spawn(words, env, output)
  local actions, attributes, pid = ffi.new "moonshard_spawn", ffi.new "moonshard_spawn", ffi.new "int[1]"
  C.moonshard_actions_init(actions)
  C.moonshard_actions_open(actions, 0, "/dev/null", 0, 0)
  for fd = 1, 2 do C.moonshard_actions_dup2(actions, output, fd) end
  C.moonshard_attr_init(attributes)
  C.moonshard_attr_flags(attributes, SETSID)
  local list = environment(env)
  local failed = C.moonshard_spawnp(pid, words[1], actions, attributes, strings(words), strings(list))
  C.moonshard_actions_destroy(actions)
  C.moonshard_attr_destroy(attributes)
  if failed ~= 0 then return nil, ffi.string(C.strerror(failed)) end
  return pid[0]
end

--- Starts `command` on `world` ranks. Returns nil and a message if mpirun cannot be started.
---@param world integer
---@param command string[]
---@return Launcher?
---@return string? message
function M.start(world, command)
  local env, words = settings()
  table.insert(words, 1, "mpirun")
  words[#words + 1], words[#words + 2] = "-n", tostring(world)
  for _, word in ipairs(command) do words[#words + 1] = word end
  local ends = ffi.new "int[2]"
  if C.moonshard_pipe(ends, 0x80000) ~= 0 then
    return nil, "a pipe for mpirun's output cannot be made: " .. ffi.string(C.strerror(ffi.errno()))
  end
  local pid, why = spawn(words, env, ends[1])
  C.moonshard_close(ends[1])
  if pid then return setmetatable({ pid = pid, out = ends[0] }, Launcher) end
  C.moonshard_close(ends[0])
  return nil, ("mpirun cannot be started (%s); more than one rank needs Open MPI"):format(why)
end

local status = ffi.new "int[1]"
--- Whether mpirun has ended; its exit status is then in `code`.
function Launcher:ended()
  if not self.code and C.moonshard_waitpid(self.pid, status, 1) == self.pid then
    local signal = bit.band(status[0], 127)
    self.code = signal == 0 and bit.band(bit.rshift(status[0], 8), 255) or 128 + signal
  end
  return self.code ~= nil
end

function Launcher:kill(signal)
  if not self.code then C.moonshard_kill(self.pid, signal) end
end

function Launcher:close()
  if self.out >= 0 then C.moonshard_close(self.out) end
  self.out = -1
end

return M
