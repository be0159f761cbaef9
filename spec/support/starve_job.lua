-- SPDX-License-Identifier: MIT
--- One job of a sweep of failing allocations (spec/support/starved.lua): prints a line "rank, n, outcome, message" for
--- each n.
---
---   starve_job.lua SCENARIO malloc|pool FOLDER fork FIRST STRIDE
---     one process, a fork for each n: all lists are empty in each
---   starve_job.lua SCENARIO malloc|pool FOLDER loop CULPRIT STRIDE
---     ranks: n by n in one job, failing on one of them
---   starve_job.lua SCENARIO malloc|pool FOLDER once CULPRIT N
---     ranks: that one, in the job's first steps
---
--- malloc: the C library's, where the engine calls it (fail_malloc.c is preloaded). pool: tensors' memory. One
--- allocation fails, the next succeeds. Outcomes: same (the undisturbed bits), error (a clean one, and the bits
--- afterwards), or what is wrong.
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

-- Outcome of a run in which allocation n fails on the culprit rank. hit: whether there were n allocations.
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

local function report(n, outcome, message)
  io.stdout:write(("%d\t%d\t%s\t%s\n"):format(rank, n, outcome, message))
  io.stdout:flush()
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

-- The other ranks get the error at their next collective, and all meet at the same place again.
local function meet()
  for _ = 1, 4 do
    if pcall(ms.dist.barrier) then return end
  end
  ms.dist.barrier()
end

local want = starved.bits(run(ms, rank, fresh(0), world))
local n, step, more = mode == "once" and number or 1, number, true
while more do
  meet()
  local outcome, message, seconds, hit = attempt(n, rank == which, want, fresh(n))
  meet()
  if outcome == "error" then
    -- A peer may have continued past the error outside of forward and backward; its next operation differs.
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
