-- SPDX-License-Identifier: MIT
--- Whole jobs: how they end when a rank fails, and how soon. What they print and leave behind: whole_jobs_spec.lua.
local ranks = require "spec.support.ranks"
local inject = require "spec.support.inject"
local process = require "spec.support.process"
local patience, within = process.patience, process.within

-- mark(what) in a script prints the time of an event; since(job, what) is the time from there to the job's end, without
-- the start of mpirun and its ranks.
local marks = [[
  local ms = require "moonshard"
  local dist = ms.dist
  local function mark(what)
    io.write(("@%s %.6f\n"):format(what, ms.time()))
    io.flush()
  end
  -- The time limit of what follows. The start of a job on a busy machine may take longer than a short one.
  local function limit(seconds) require "moonshard.core.ffi".lib.ms_dist_set_timeout(seconds) end
]]

local function since(job, what)
  local at = job.stdout:match("@" .. what .. " (%d+%.%d+)")
  if not at then error(("no mark '%s'; stdout: %s; stderr: %s"):format(what, job.stdout, job.stderr), 2) end
  return job.ended - tonumber(at)
end

describe("a job #mpi #timed", function()
  it("ends within 2 s with the traceback of the rank that raised", function()
    for _, peers in ipairs { "dist.all_reduce(t)", "while true do end" } do within(2, function()
      local job = ranks.run(3, marks .. [[
        local t = ms.ones(10)
        dist.all_reduce(t)
        if dist.rank() == 1 then
          mark "raise"
          error "boom on one"
        end
      ]] .. peers)
      assert.are.equal(1, job.code)
      assert.matches("boom on one", job.stderr)
      assert.matches("stack traceback:", job.stderr)
      assert.matches("in main chunk", job.stderr)
      assert.is_nil(job.stderr:find("all_reduce", 1, true))               -- the other ranks add nothing
      return since(job, "raise")
    end) end
  end)

  it("ends within 2 s when a rank raises during an asynchronous collective that no rank waits for", function()
    -- The engine thread of that rank may be waiting, copying or finished.
    for _, pause in ipairs { 0, 1, 4 } do within(2, function()
      local job = ranks.run(2, marks .. [[
        local ffi = require "ffi"
        ffi.cdef "int usleep(unsigned);"
        local t, u = ms.ones(3000000), ms.ones(3000000)
        dist.barrier()
        local w = dist.all_reduce(t, { async = true })
        local v = dist.all_gather(ms.empty(6000000), u, { async = true })
        if dist.rank() == 1 then
          ffi.C.usleep(1000 * ]] .. pause .. [[)
          mark "raise"
          error "boom on one"
        end
        dist.barrier()
      ]])
      assert.are.equal(1, job.code)
      assert.matches("boom on one", job.stderr)
      assert.is_nil(job.stderr:find("egmentation", 1, true))
      return since(job, "raise")
    end) end
  end)

  it("ends within 2 s, with the texts of all, when every rank raises", function() within(2, function()
    local job = ranks.run(3, marks .. [[
      dist.barrier()
      if dist.rank() == 0 then mark "raise" end
      dist.all_reduce(ms.ones(10 + dist.rank()))
    ]])
    assert.are.equal(1, job.code)
    assert.matches("rank 2: all_reduce of 12 float32", job.stderr)
    -- A rank that arrives much later than the others is named only in its own error.
    local all = job.stderr:find "rank 0: all_reduce of 10 float32, .- rank 1: all_reduce of 11 float32, .- rank 2: all_reduce of 12 float32"
    return all and since(job, "raise") or math.huge, job.stderr
  end) end)

  it("ends when a rank leaves with os.exit, with its code", function() within(2, function()
    local job = ranks.run(2, marks .. [[
      dist.barrier()
      if dist.rank() == 1 then
        mark "exit"
        os.exit(7)
      end
      dist.barrier()
    ]])
    assert.are.equal(7, job.code)
    assert.matches("rank 1: the script ended with status 7\n", job.stderr)
    return since(job, "exit")
  end) end)

  it("names a killed rank and ends within 1 s", function()
    for _, peers in ipairs { "dist.all_reduce(t)", "while true do end", "pcall(dist.all_reduce, t) while true do end",
                             "if dist.rank() == 0 then dist.all_reduce(t) end while true do end" } do
                               within(1, function()
      local job = ranks.run(3, marks .. [[
        local ffi = require "ffi"
        ffi.cdef "int kill(int, int); int getpid(void);"
        local t = ms.ones(1000)
        dist.all_reduce(t)
        if dist.rank() == 1 then
          mark "kill"
          ffi.C.kill(ffi.C.getpid(), 9)
        end
      ]] .. peers)
      assert.is_false(job.timed_out)
      assert.are_not.equal(0, job.code)
      -- On a stalled machine the job may end before a rank or mpirun has reported. That attempt does not count.
      local told = job.stderr:find "all_reduce: collective #2 of the world .-: rank 1 %(process %d+%) died"
        or not peers:find "all_reduce"
      local named = job.code == 128 + 9 and job.stderr:find "process rank 1 .- signal 9"        -- printed by mpirun
      return told and named and since(job, "kill") or math.huge, ("status %d, %s"):format(job.code, job.stderr)
    end) end
  end)

  it("reports a rank that never arrives, at the limit, and ends within 2 s", function()
    local script = marks .. [[
      local t = ms.ones(10)
      dist.barrier()
      dist.all_gather_object(1)
      limit(]] .. 0.5 * patience .. [[)
      if dist.rank() == 1 then while true do end end
      if dist.rank() == 0 then mark "wait" end
    ]]
    for _, wait in ipairs { "dist.all_reduce(t)", "dist.barrier()",
      "local w = dist.all_reduce(t, {async = true}) w:wait()",
                            "pcall(dist.all_reduce, t) while true do end",
                              "dist.all_reduce(t, {async = true}) while true do end" } do within(2.5, function()
      local job = ranks.run(3, script .. wait)
      assert.are.equal(1, job.code)
      assert.matches("collective #4 of the world", job.stderr)
      assert.matches("have passed and rank 1 has not arrived %(it is in no collective; its last one was all_gather .- "
        .. "at .-script%.lua:11 %(#3 of the world%)%)", job.stderr)
      assert.is_true(since(job, "wait") > 0.5)
      return since(job, "wait")
    end) end
  end)

  it("ends even if the absent rank, or the one that reports it, is stopped", function()
    for _, who in ipairs { 1, 2 } do within(3, function()
      local job = ranks.run(3, marks .. [[
        local ffi = require "ffi"
        ffi.cdef "int kill(int, int); int getpid(void);"
        dist.barrier()
        if dist.rank() == ]] .. who .. [[ then ffi.C.kill(ffi.C.getpid(), 19) end
        if dist.rank() == 1 then while true do end end
        if dist.rank() == 0 then mark "wait" end
        dist.barrier()
      ]], { env = { MOONSHARD_TIMEOUT = "1" } })
      assert.are.equal(1, job.code)
      assert.matches("rank 1 has not arrived", job.stderr)
      return since(job, "wait")
    end) end
  end)

  it("takes the limit as an option, and names several missing ranks", function() within(3, function()
    local job = ranks.run(4, marks .. [[
      dist.init { timeout = 1 }
      if dist.rank() % 2 == 1 then while true do end end
      if dist.rank() == 0 then mark "wait" end
      dist.reduce(ms.ones(3), { dst = 0 })
    ]])
    assert.matches("reduce: collective #1 of the world %(reduce of 3 float32, sum, root 0, at .-script%.lua:12%): 1%.%d s have passed and "
      .. "rank 1 has not arrived %(it is in no collective so far%); rank 3 has not arrived", job.stderr)
    return since(job, "wait")
  end) end)

  it("does not mistake a stopped job for one with an absent rank", function()
    local job = ranks.run(2, marks .. [[
      local ffi = require "ffi"
      ffi.cdef "int getpid(void); int usleep(unsigned);"
      local pids = dist.all_gather_object(ffi.C.getpid())
      limit(1)
      if dist.rank() == 1 then
        -- Both stop while rank 0 waits, for longer than the limit; rank 1 continues once it has seen that time has
        -- passed.
        for _ = 1, 20 do ffi.C.usleep(10000) end
        local begun = ms.time()
        os.execute(("(kill -STOP %d %d; sleep 1.5; kill -CONT %d %d) &"):format(pids[1], pids[2], pids[1], pids[2]))
        while ms.time() - begun < 1.5 do ffi.C.usleep(10000) end
      end
      dist.barrier()
      if dist.rank() == 0 then print "through" end
    ]])
    assert.are.equal(0, job.code, job.stderr)
    assert.are.equal("through\n", job.stdout)
  end)

  it("reports at once that a rank is at the end of its script", function() within(2, function()
    local job = ranks.run(2, marks .. [[
      dist.barrier()
      if dist.rank() == 1 then mark "end" end
      if dist.rank() == 0 then dist.all_reduce(ms.ones(2)) end
    ]])
    assert.are.equal(1, job.code)
    assert.matches("rank 1 has left: its script has ended", job.stderr)
    return since(job, "end")
  end) end)
end)

-- scripts/bench/jobs disturbs 200 jobs, at random moments.
describe("a disturbed job #mpi #timed", function()
  local limit = 0.5
  for _, how in ipairs(inject.kinds) do
    for _, where in ipairs(inject.places) do
      local place = ({ start = "at the start", collective = "in a collective", compute = "in compute",
        after = "after the last collective" })[where]
      it(("names a rank that is %s %s, and ends"):format(how, place), function() within(0.3, function()
        local r = inject.run { world = 2, victim = 1, how = how, where = where, limit = limit, delay = where == "start"
          and 0.03 or 0.01 }
        assert.is_false(r.timed_out)
        assert.are_not.equal(0, r.code)
        assert.are.same({}, r.left)
        -- A peer is reported as computing only if it has been observed to compute.
        if where == "after" then assert.is_nil(r.stderr:find("computes, reads", 1, true), r.stderr) end
        return r.named and math.max(r.named - (how == "killed" and 0 or limit), r.gone - 0.7) or math.huge, r.stderr
      end) end)
    end
  end

  it("waits at the end of the script for a rank that computes, reads or writes, with a message", function()
    for _, work in ipairs {
      "local a = ms.ones(100, 100) while ms.time() - begun < 0.7 do a:matmul(a) end",
      "local a = ms.ones(3700, 3700) a:matmul(a)",                        -- a single call, longer than the limit
      "local f = io.open('/dev/null', 'w') f:setvbuf 'no' while ms.time() - begun < 0.7 do f:write 'x' end",
      "local f = io.open '/dev/zero' f:setvbuf 'no' while ms.time() - begun < 0.7 do f:read(1) end",
      "os.execute 'sleep 0.7'",
    } do
      local job = ranks.run(2, marks .. [[
        dist.barrier()
        limit(0.5)
        local begun = ms.time()
        if dist.rank() == 1 then ]] .. work .. " end")
      assert.are.equal(0, job.code, work .. ": " .. job.stderr)
      assert.matches("rank 0: has waited [01] s at the end of the script: rank 1 %(process %d+%) computes, reads or writes\n", job.stderr)
    end
  end)

  it("waits at the start for a rank that computes", function()
    local job = ranks.run(2, [[
      local ms = require "moonshard"
      local begun, a = ms.time(), ms.ones(100, 100)
      while os.getenv "PMIX_RANK" == "1" and ms.time() - begun < 0.7 do a:matmul(a) end
      ms.dist.init()
      require "moonshard.core.ffi".lib.ms_dist_set_timeout(60)
      ms.dist.barrier()
    ]], { env = { MOONSHARD_TIMEOUT = "0.2" } })
    assert.are.equal(0, job.code, job.stderr)
    assert.matches("rank 0: dist.init has waited 0 s: rank 1 %(process %d+%) has not called dist.init yet, but computes, reads or writes\n", job.stderr)
  end)

  it("names a rank that ended before the others reached dist.init", function() within(1.5, function()
    local job = ranks.run(2, [[
      local ms = require "moonshard"
      if os.getenv "PMIX_RANK" == "1" then
        io.write(("@end %.6f\n"):format(ms.time()))
        return
      end
      local begun = ms.time()
      while ms.time() - begun < 0.3 do end
      ms.dist.init()
    ]])
    assert.are.equal(1, job.code, job.stderr)
    -- dist.init says so, or, if mpirun ends rank 0 before it does, the handler of mpirun's signal.
    assert.matches("rank 0: .-rank 1 .-ended before it joined the job", job.stderr)
    return since(job, "end")
  end) end)

  it("names a rank that ended before the others loaded the engine", function()
    local job = ranks.run(2, [[
      if os.getenv "PMIX_RANK" == "1" then os.exit(0) end
      os.execute "sleep 0.5"
      require "moonshard".dist.init { timeout = 0.5 }
    ]], { mpirun = { "--mca", "odls_base_sigkill_timeout", "0" } })       -- else mpirun waits 2 s before it ends, too
    assert.are.equal(1, job.code, job.stderr)
    assert.matches("rank 0: dist.init: [01]%.%d s have passed and rank 1 ended before it joined the job", job.stderr)
  end)
end)

describe("over simulated nodes #mpi #timed", function()
  it("a mismatch, failed work and an absence reach every rank", function() within(3, function()
    local job = ranks.run(4, marks .. [[
      local lib = require "moonshard.core.ffi".lib
      local rank = dist.rank()
      local function try(fn, pattern)
        local begun = ms.time()
        local ok, why = pcall(fn)
        if ok or not why:find(pattern) then error(tostring(why)) end
        io.write(("@told after %.6f: %s\n"):format(ms.time() - begun, why:gsub("\n.*", "")))
      end
      try(function() dist.all_reduce(ms.ones(1000), { op = rank == 3 and "max" or "sum" }) end,
        "rank 3: all_reduce of 1000 float32, max")
      dist.recover()
      if rank == 3 then
        dist.barrier()
        lib.ms_dist_failed "lost"
      else
        -- A rank gets the error also when it is just leaving the barrier.
        try(function()
          dist.barrier()
          dist.all_reduce(ms.ones(1000))
        end, "rank 3 failed: lost")
      end
      dist.recover()
      local t = ms.ones(1000)
      dist.all_reduce(t)
      if t[1]:item() ~= 4 then error "wrong" end
      if rank == 0 then print "through" end
      limit(]] .. patience .. [[)
      if rank == 2 then while true do end end
      if rank == 0 then mark "wait" end
      dist.all_reduce(t)
    ]], { env = { MOONSHARD_COMM_NODES = "2" } })
    assert.matches("through\n", job.stdout, job.stderr)
    assert.matches("rank 2 has not arrived", job.stderr)
    -- The error comes within a second, with a text that names all ranks. A rank that arrives late is missing in the
    -- text; such an attempt does not count.
    local _, all = job.stdout:gsub(
      "ranks 0, 1, 2: all_reduce of 1000 float32, sum, [^\n]- rank 3: all_reduce of 1000 float32, max", "")
    local latest, told = 0, 0
    for seconds in job.stdout:gmatch "@told after (%S+):" do latest, told = math.max(latest, seconds), told + 1 end
    assert.are.equal(4 + 3, told)
    return all == 4 and latest < patience and since(job, "wait") or math.huge, job.stdout
  end) end)
end)
