-- SPDX-License-Identifier: MIT
--- Runs a job in which one rank, the victim, is killed, stopped or loops at a chosen place, and observes the job.
---
---   local inject = require "spec.support.inject"
---   local r = inject.run { world = 2, victim = 1, how = "killed", where = "compute", limit = 1, delay = 0.02 }
---   r.code, r.named, r.gone, r.left      exit status; seconds; seconds; a list of leftovers
---
--- The victim signals itself by a kernel timer, so the signal may arrive at any instruction. `named`: seconds from the
--- injection until the job's stderr names the victim; if the victim stops or loops before its peers wait, from the
--- moment when the first of them waits, because their time limit begins there. `gone`: seconds from the naming to the
--- end of mpirun.
local process = require "spec.support.process"

local inject = {
  places = { "start", "collective", "compute", "after" },
  kinds = { "killed", "stopped", "looping" },
}

local script = [[
  local where, how, victim, delay, folder = arg[1], arg[2], tonumber(arg[3]), tonumber(arg[4]), arg[5]
  local rank = tonumber(os.getenv "OMPI_COMM_WORLD_RANK")
  local ffi = require "ffi"
  ffi.cdef "typedef struct { void *value; int signo, notify; char pad[48]; } inject_event;"
  ffi.cdef "typedef struct { long every, every_ns, first, first_ns; } inject_timer;"
  ffi.cdef "int timer_create(int, inject_event *, void **); int timer_settime(void *, int, const inject_timer *, void *); int getpid(void);"
  ffi.cdef "typedef struct { long sec, nsec; } inject_time; int clock_gettime(int, inject_time *); int nanosleep(const inject_time *, void *);"
  local function now()
    local t = ffi.new "inject_time"
    ffi.C.clock_gettime(1, t)
    return tonumber(t.sec) + tonumber(t.nsec) * 1e-9
  end
  local function mark(what)
    local f = io.open(("%s/%s%d"):format(folder, what, rank), "w")
    f:write(("%.6f %d %s"):format(now(), ffi.C.getpid(), os.getenv "PMIX_NAMESPACE"))
    f:close()
  end
  local function loop() while true do end end
  local function begin()                      -- returns at once, except in a victim that must loop
    if rank ~= victim then return end
    if how == "looping" then
      local till = now() + delay
      while now() < till do end
      mark "injected"
      loop()
    end
    local event, timer = ffi.new("inject_event", { signo = how == "killed" and 9 or 19 }), ffi.new "void *[1]"
    ffi.C.timer_create(1, event, timer)
    mark "armed"
    ffi.C.timer_settime(timer[0], 0, ffi.new("inject_timer", { first = math.floor(delay), first_ns = math.max(1, delay % 1 * 1e9) }), nil)
  end
  mark "pid"
  if where == "start" then begin() end
  local ms = require "moonshard"
  local dist = ms.dist
  mark "wait"
  -- On a busy machine a correct start may take longer than a short limit.
  dist.init(where ~= "start" and { timeout = 60 } or nil)
  local t, a = ms.ones(20000), ms.ones(100, 100)
  dist.barrier()
  require("moonshard.core.ffi").lib.ms_dist_set_timeout(tonumber(os.getenv "MOONSHARD_TIMEOUT"))
  if where == "start" then
    while how ~= "looping" do dist.all_reduce(t) end
  elseif where == "collective" then
    begin()
    mark "wait"
    while true do dist.all_reduce(t) end
  elseif where == "compute" then
    begin()
    mark "wait"
    while true do
      for _ = 1, 20 do ms.scope(function() return a:matmul(a):sum():item() end) end
      dist.all_reduce(t)
    end
  end
  begin()
  if rank == victim then loop() end
  mark "wait"
]]

local function mark_of(folder, what, rank)
  local at, pid, job = process.read(("%s/%s%d"):format(folder, what, rank)):match "^(%S+) (%d+) (%d+)$"
  return tonumber(at), tonumber(pid), tonumber(job)
end

-- Whether a text names this rank, except at the beginning of a line, where the rank that wrote the line is named.
local function names(text, rank)
  return ("\n" .. text):gsub("\nrank %d+: ", "\n"):find(("rank %d[^%%d]"):format(rank)) ~= nil
end

-- Files of these processes and this job under /dev/shm, selected by name, because other jobs have files there, too.
local function segments(pids, job)
  local lfs, found = require "lfs", {}
  for name in lfs.dir "/dev/shm" do
    local mine = job and name:find(("%%.%x%%.%%d+$"):format(job))
    for _, pid in pairs(pids) do mine = mine or name:find(("moonshard-control-%d-"):format(pid), 1, true) end
    if mine then found[#found + 1] = "/dev/shm/" .. name end
  end
  return found
end

---@param o { world: integer, victim: integer, how: string, where: string, limit: number, delay: number, command: string[]? }
function inject.run(o)
  local folder = process.temp_folder()
  process.write(folder .. "/script.lua", script)
  local env = process.mpirun_env { MOONSHARD_TIMEOUT = tostring(o.limit),
    LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;;"):gsub("@", process.root) }
  local argv = { "mpirun", "-n", tostring(o.world), "luajit", folder .. "/script.lua", o.where, o.how,
    tostring(o.victim),
    tostring(o.delay), folder }
  for i, word in ipairs(o.command or {}) do table.insert(argv, i, word) end
  local child = process.start(argv, { stdout = folder .. "/stdout", stderr = folder .. "/stderr", env = env })
  local r = { stderr = "" }
  local named_at
  local patience = o.limit + 20
  while not child:poll() and process.now() - child.begun < patience do
    local text = process.read(folder .. "/stderr")
    if #text > #r.stderr then
      r.stderr = text
      if not named_at and names(text, o.victim) then named_at = process.now() end
    end
    process.sleep(0.001)
  end
  local ended = process.now()
  r.timed_out = child.code == nil
  if r.timed_out then child:stop(3) end
  r.code = child.code
  r.stderr = process.read(folder .. "/stderr")
  if not named_at and names(r.stderr, o.victim) then named_at = ended end

  local at, pids, job = nil, {}, nil
  for rank = 0, o.world - 1 do
    local _, pid, its_job = mark_of(folder, "pid", rank)
    pids[rank], job = pid, its_job or job
    local wait = mark_of(folder, "wait", rank)
    if o.how ~= "killed" and rank ~= o.victim and wait then at = math.min(at or wait, wait) end
  end
  local armed = mark_of(folder, "armed", o.victim)
  local injected = armed and armed + o.delay or mark_of(folder, "injected", o.victim)
  if injected and named_at then
    r.named = named_at - math.max(injected, at or 0)
    r.gone = ended - named_at
  end
  r.left = {}
  for _, pid in pairs(pids) do
    local till = process.now() + 1
    while process.runs(pid) and process.now() < till do process.sleep(0.002) end
    if process.runs(pid) then r.left[#r.left + 1] = "process " .. pid end
  end
  for _, name in ipairs(segments(pids, job)) do r.left[#r.left + 1] = name end
  for _, pid in pairs(pids) do process.kill(pid, process.SIGKILL) end
  process.remove_folder(folder)
  return r
end

return inject
