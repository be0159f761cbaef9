-- SPDX-License-Identifier: MIT
--- One job of a sweep of failing allocations (spec/support/starved.lua): appends a line "rank, n, outcome,
--- message" for each n to FOLDER/outcomes.
---
---   starve_job.lua SCENARIO malloc|pool FOLDER fork FIRST STRIDE
---     one process, forked for each n, so that each run starts before the engine's lists have grown
---   starve_job.lua SCENARIO malloc|pool FOLDER loop CULPRIT STRIDE
---     several ranks: one n after the other in one job, failing on the culprit rank
---   starve_job.lua SCENARIO malloc|pool FOLDER once CULPRIT N
---     several ranks: only allocation N fails, in the job's first steps
---
--- malloc: memory that the engine gets from the C library (fail_malloc.c is preloaded). pool: memory of tensors. One
--- allocation fails, the next succeeds. Outcomes: same (the bits of an undisturbed run), error (an error with a
--- message, and the same bits when the run is repeated), or a description of the fault.
local ffi = require "ffi"
local ms = require "moonshard"
local starved = require "spec.support.starved"

ffi.cdef [[
long fail_malloc(long);
int  starve_fork(void) __asm__("fork");
int  starve_wait(int, int *, int) __asm__("waitpid");
void starve_exit(int) __asm__("_exit");
]]
local lib = require "moonshard.core.ffi".lib
local name, kind, folder, mode, which, number = arg[1], arg[2], arg[3], arg[4], tonumber(arg[5]), tonumber(arg[6])
local rank, world = ms.dist.rank(), ms.dist.world_size()
local run = starved.scenarios[name]

local function arm(n)
  if kind == "malloc" then return tonumber(ffi.C.fail_malloc(n)) end
  return lib.ms_fail_allocation(n)
end

-- Runs the scenario, and makes allocation n fail if `armed`. Returns the outcome, the error's text, the seconds, and
-- whether allocation n was reached.
local function attempt(n, armed, want, place)
  local begun = ms.time()
  if armed then arm(n) end
  local ok, result = pcall(run, ms, rank, place, world)
  local left = armed and arm(0)
  local seconds = ms.time() - begun
  local hit = not armed or left == 0
  if ok then
    local bits = starved.bits(result)
    return bits == want and "same" or "WRONG BITS", "", seconds, hit
  end
  return "error", tostring(result):match "^[^\n]*", seconds, hit
end

-- Appends with one write, because mpirun mixes pieces of what different ranks print.
local outcomes = assert(io.open(folder .. "/outcomes", "a"))
outcomes:setvbuf "full"
local function report(n, outcome, message)
  outcomes:write(("%d\t%d\t%s\t%s\n"):format(rank, n, outcome, message))
  outcomes:flush()
end

local function clean(message)
  return message:find "no memory for %d+ bytes" and not message:find "s have passed"
end

local function fresh(k)
  local place = ("%s/%d"):format(folder, k)
  if rank == 0 then require("lfs").mkdir(place) end
  return place
end

if mode == "fork" then
  -- Loads the modules of the scenarios here, once. Compiling would take longer than the few steps of a run do.
  local _ = { ms.nn.utils.clip_grad_norm_, ms.nn.init.normal_, ms.nn.F.dropout, ms.fsdp.save, ms.optim.AdamW }
  jit.off()
  local status = ffi.new "int[1]"
  local n, last = which, false
  local want
  -- The undisturbed run is in a child process, too, so that the parent's state does not change.
  local pipe = folder .. "/want"
  local function child(fn)
    io.stdout:flush()
    local pid = ffi.C.starve_fork()
    if pid == 0 then
      local ok, message = pcall(fn)
      if not ok then io.stderr:write(tostring(message), "\n") end
      io.stdout:flush()
      ffi.C.starve_exit(ok and 0 or 9)
    end
    ffi.C.starve_wait(pid, status, 0)
    return status[0]
  end
  local function write(path, text)
    local f = assert(io.open(path, "w"))
    f:write(text)
    f:close()
  end
  if child(function() write(pipe, starved.bits(run(ms, rank, fresh(0), world))) end) ~= 0 then os.exit(1) end
  want = assert(io.open(pipe)):read "*a"
  while not last do
    local code = child(function()
      local outcome, message, _, hit = attempt(n, true, want, fresh(n))
      if not hit then write(folder .. "/last", "") end
      if outcome == "error" then
        if not clean(message) then outcome = "UNCLEAR ERROR" end
        local ok, result = pcall(run, ms, rank, fresh(-n), world)
        if not ok then outcome, message = "FAILS AFTERWARDS", message .. " | " .. tostring(result) end
        if ok and starved.bits(result) ~= want then outcome = "WRONG BITS AFTERWARDS" end
      end
      report(n, outcome, message)
    end)
    if code ~= 0 then report(n, "CRASH", "status " .. code) end
    last = io.open(folder .. "/last") ~= nil
    n = n + number
  end
  os.exit(0)
end

local want = starved.bits(run(ms, rank, fresh(0), world))
local n, step, more = mode == "once" and number or 1, number, true
while more do
  local outcome, message, seconds, hit = attempt(n, rank == which, want, fresh(n))
  ms.dist.recover()
  if outcome == "error" then
    -- An error outside of forward and backward may not reach the peers. They then see that the culprit calls another
    -- collective than they do.
    if not (clean(message) or rank ~= which and message:find "the ranks ask for different things") then
      outcome = "UNCLEAR ERROR"
    end
  end
  if seconds > 10 then outcome = "WAITED" end
  local failed = false
  for _, one in ipairs(ms.dist.all_gather_object(outcome ~= "same")) do failed = failed or one end
  if failed then
    local ok, result = pcall(run, ms, rank, fresh(-n), world)
    if not ok then outcome, message = "FAILS AFTERWARDS", message .. " | " .. tostring(result) end
    if ok and starved.bits(result) ~= want then outcome = "WRONG BITS AFTERWARDS" end
  end
  report(n, outcome, message)
  more = mode == "loop" and ms.dist.all_gather_object(hit)[which + 1]
  n = n + step
end
