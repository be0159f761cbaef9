-- SPDX-License-Identifier: MIT
--- Child processes for specs: starts them with output files of their own, observes and ends them. io.popen gives only
--- one pipe, no exit by signal and no time-out; this file uses posix_spawn and waitpid through the FFI.
local ffi = require "ffi"

ffi.cdef [[
typedef struct { char opaque[256]; } spec_file_actions;
int  spec_actions_init(spec_file_actions *) __asm__("posix_spawn_file_actions_init");
int  spec_actions_destroy(spec_file_actions *) __asm__("posix_spawn_file_actions_destroy");
int  spec_actions_addopen(spec_file_actions *, int, const char *, int, unsigned) __asm__("posix_spawn_file_actions_addopen");
int  spec_spawnp(int *, const char *, const spec_file_actions *, const void *, const char *const *, const char *const *)
     __asm__("posix_spawnp");
int  spec_waitpid(int, int *, int) __asm__("waitpid");
int  spec_kill(int, int) __asm__("kill");
int  spec_getpid(void) __asm__("getpid");
int  spec_getppid(void) __asm__("getppid");
char *spec_mkdtemp(char *) __asm__("mkdtemp");
char *spec_strerror(int) __asm__("strerror");
typedef struct { long sec, nsec; } spec_timespec;
int  spec_nanosleep(const spec_timespec *, spec_timespec *) __asm__("nanosleep");
int  spec_clock(int, spec_timespec *) __asm__("clock_gettime");
extern char **environ;
]]
local C = ffi.C

-- Whether the engine uses fused multiply-adds: not at MOONSHARD_ISA = v1 or v2, nor on a processor that lacks them.
local function has_fma()
  local isa = os.getenv "MOONSHARD_ISA"
  if isa == "v1" or isa == "v2" then return false end
  local f = io.open "/proc/cpuinfo"
  local flags = f and f:read "*a":match "\nflags%s*:([^\n]*)"
  if f then f:close() end
  return not flags or flags:find " fma" ~= nil
end

local process = {
  -- MOONSHARD_CUDA of children that run the emulated GPU: its kernels are those of g++, or of nvcc (docs/launching.md).
  gpu = os.getenv "MOONSHARD_CUDA" == "ptx" and "ptx" or "emulated",
  SIGINT = 2, SIGKILL = 9, SIGTERM = 15,
  -- Factor for every time limit in the specs. scripts/test sets it under sanitizers and valgrind, which slow everything
  -- down. Without fused multiply-adds the engine computes them in software, many times slower.
  patience = tonumber(os.getenv "MOONSHARD_SPEC_PATIENCE") or has_fma() and 1 or 8,
  -- "sanitize", "tsan" or "valgrind" if scripts/test runs the specs under one of these, whose own data count as
  -- resident memory.
  tool = os.getenv "MOONSHARD_TOOL",
}

--- Environment (added to `env`) of a process that a spec crashes on purpose, so that sanitizers do not report it.
function process.crash_env(env)
  env = env or {}
  for _, name in ipairs { "ASAN_OPTIONS", "TSAN_OPTIONS" } do
    env[name] = (os.getenv(name) or "") .. ":handle_segv=0"
  end
  return env
end

--- Environment (with `changes`) of an mpirun that a spec starts: it may run as root, and start more ranks than there
--- are cores; ranks are not bound to cores. mpirun reads these settings; the engine sets the settings that ranks read.
---@param changes? table<string, string|false>
---@return table<string, string|false>
function process.mpirun_env(changes)
  local env = { OMPI_ALLOW_RUN_AS_ROOT = "1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = "1",
    OMPI_MCA_rmaps_base_oversubscribe = "1", OMPI_MCA_hwloc_base_binding_policy = "none",
    -- Keeps mpirun from looking for devices, which would take it 20 ms of CPU time.
    HWLOC_PLUGINS_PATH = "/nonexistent", HWLOC_COMPONENTS = "-linuxio" }
  for name, value in pairs(changes or {}) do env[name] = value end
  return env
end

--- The source tree of this file, as an absolute path.
process.root = (function()
  local source = debug.getinfo(1, "S").source:sub(2)
  if source:sub(1, 1) ~= "/" then source = require("lfs").currentdir() .. "/" .. source end
  return (source:gsub("/%./", "/"):match "^(.*)/spec/support/process%.lua$")
end)()

--- The build folder (MOONSHARD_BUILD, or build in the source tree), as an absolute path.
process.build = (function()
  local path = os.getenv "MOONSHARD_BUILD" or "build"
  return path:sub(1, 1) == "/" and path or process.root .. "/" .. path
end)()

local clock = ffi.new "spec_timespec"
--- Seconds, monotonic, the same clock in every process of the machine.
function process.now()
  C.spec_clock(1, clock)
  return tonumber(clock.sec) + tonumber(clock.nsec) * 1e-9
end

local pause = ffi.new "spec_timespec"
function process.sleep(seconds)
  pause.sec = math.floor(seconds)
  pause.nsec = (seconds % 1) * 1e9
  C.spec_nanosleep(pause, nil)
end

--- Checks a time limit on a machine that may preempt any process at any moment: calls fn up to five times, until one
--- call takes less than the limit. fn returns the seconds that it measured (or math.huge and a reason, if the event did
--- not happen in time). Assertions that do not depend on time belong in fn.
---@param limit number  seconds, times the patience
---@param fn fun(): number, string?
function process.within(limit, fn)
  local least, last = math.huge, nil
  for _ = 1, 5 do
    local seconds, why = fn()
    least, last = math.min(least, seconds), why
    if least < limit * process.patience then return end
  end
  error(("took %.3f s at best, the limit is %g s%s"):format(least, limit * process.patience, last and ": " .. last
    or ""), 2)
end

function process.pid()
  return C.spec_getpid()
end

--- The process id of the parent: on a rank, that of mpirun or its daemon, which is equal on all ranks of the node.
function process.parent()
  return C.spec_getppid()
end

--- Whether a process with this id exists (zombies included).
function process.exists(pid)
  return C.spec_kill(pid, 0) == 0
end

--- Whether a process is running or stopped; false for a zombie.
function process.runs(pid)
  local state = process.read(("/proc/%d/stat"):format(pid)):match ".*%) (%a)"
  return state ~= nil and state ~= "Z" and state ~= "X"
end

function process.kill(pid, signal)
  return C.spec_kill(pid, signal) == 0
end

function process.temp_folder()
  local name = (os.getenv "TMPDIR" or "/tmp") .. "/moonshard-spec-XXXXXX"
  local buffer = ffi.new("char[?]", #name + 1, name)
  if C.spec_mkdtemp(buffer) == nil then
    error("mkdtemp " .. name .. ": " .. ffi.string(C.spec_strerror(ffi.errno())))
  end
  return ffi.string(buffer)
end

--- The names in a folder that have a pattern (default: all), sorted.
function process.names(folder, pattern)
  local names = {}
  for name in require("lfs").dir(folder) do
    if name ~= "." and name ~= ".." and name:find(pattern or "") then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end

function process.remove_folder(path)
  local lfs = require "lfs"
  for _, name in ipairs(process.names(path)) do
    local inside = path .. "/" .. name
    if lfs.symlinkattributes(inside, "mode") == "directory" then
      process.remove_folder(inside) else os.remove(inside) end
  end
  lfs.rmdir(path)
end

function process.read(path)
  local f = io.open(path, "rb")
  if not f then return "" end
  local text = f:read "*a"
  f:close()
  return text or ""                                                 -- nil: a file of /proc whose process has just ended
end

--- What a command of the shell prints.
function process.output(command)
  local f = assert(io.popen(command))
  local text = f:read "*a"
  f:close()
  return text
end

function process.write(path, text)
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
end

--- The output of a shell's command line, run in the root of the repository, and its exit status.
---@return string, integer
function process.shell(line)
  local pipe = assert(io.popen(("cd '%s' && { %s; } 2>&1; echo \" status $?\""):format(process.root, line)))
  local output, status = pipe:read "*a":match "^(.*) status (%d+)\n$"
  pipe:close()
  return output, tonumber(status)
end

local function strings(list)
  local array = ffi.new("const char *[?]", #list + 1)
  for i, s in ipairs(list) do array[i - 1] = s end
  array[#list] = nil
  return array
end

--- This process's environment with `changes` (name -> string, or false to remove it), as an array.
local function environment(changes)
  local list, i = {}, 0
  while C.environ[i] ~= nil do
    local entry = ffi.string(C.environ[i])
    local name = entry:match "^[^=]*"
    if changes[name] == nil then list[#list + 1] = entry end
    i = i + 1
  end
  for name, value in pairs(changes) do
    if value then list[#list + 1] = name .. "=" .. tostring(value) end
  end
  return list
end

local Child = {}
Child.__index = Child

--- Starts argv[1] with argv. opts: stdin, stdout, stderr (files; stdin defaults to /dev/null), env (changes).
function process.start(argv, opts)
  opts = opts or {}
  local actions = ffi.new "spec_file_actions"
  C.spec_actions_init(actions)
  local write = 0x241                                               -- O_WRONLY | O_CREAT | O_TRUNC
  C.spec_actions_addopen(actions, 0, opts.stdin or "/dev/null", 0, 0)
  if opts.stdout then C.spec_actions_addopen(actions, 1, opts.stdout, write, 0x1b6) end
  if opts.stderr then C.spec_actions_addopen(actions, 2, opts.stderr, write, 0x1b6) end
  local pid = ffi.new "int[1]"
  local env = environment(opts.env or {})
  local rc = C.spec_spawnp(pid, argv[1], actions, nil, strings(argv), strings(env))
  C.spec_actions_destroy(actions)
  if rc ~= 0 then error(("cannot start %s: %s"):format(argv[1], ffi.string(C.spec_strerror(rc))), 2) end
  return setmetatable({ pid = pid[0], begun = process.now() }, Child)
end

local status = ffi.new "int[1]"
--- Exit status once the process has ended (128 + signal if a signal ended it), nil while it runs.
function Child:poll()
  if self.code == nil and C.spec_waitpid(self.pid, status, 1) == self.pid then
    local s = status[0]
    local signal = s % 128
    self.code = signal == 0 and math.floor(s / 256) % 256 or 128 + signal
    self.seconds = process.now() - self.begun
  end
  return self.code
end

--- Waits up to `limit` seconds, times process.patience. Returns the exit status, or nil if the process still runs.
function Child:wait(limit)
  local deadline = process.now() + limit * process.patience
  local nap = 0.0002
  while not self:poll() do
    if process.now() > deadline then return nil end
    process.sleep(nap)
    nap = math.min(nap * 1.5, 0.005)
  end
  return self.code
end

--- Ends the process: first with SIGTERM, then with SIGKILL.
function Child:stop(patience)
  if not self:poll() then
    process.kill(self.pid, process.SIGTERM)
    if not self:wait(patience or 2) then
      process.kill(self.pid, process.SIGKILL)
      self:wait(5)
    end
  end
  return self.code
end

--- Runs a Lua script in a process of its own, from the root of the source tree.
---@param source string
---@param env? table<string, string|false>
---@param opts? { args: string[]?, launcher: string[]? }  launcher: the words before luajit
---@return { code: integer, stdout: string, stderr: string }
function process.script(source, env, opts)
  local given, folder = opts or {}, process.temp_folder()
  process.write(folder .. "/script.lua", source)
  local command = { "sh", "-c", 'cd "$0" && exec "$@"', process.root }
  for _, list in ipairs { given.launcher or {}, { "luajit", folder .. "/script.lua" }, given.args or {} } do
    for _, word in ipairs(list) do command[#command + 1] = word end
  end
  local child = process.start(command, { stdout = folder .. "/out", stderr = folder .. "/err", env = env })
  local code = child:wait(120) or child:stop()
  local job = { code = code, stdout = process.read(folder .. "/out"), stderr = process.read(folder .. "/err") }
  process.remove_folder(folder)
  return job
end

return process
