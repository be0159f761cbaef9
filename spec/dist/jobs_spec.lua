-- SPDX-License-Identifier: MIT
--- Whole jobs: how they start, and how they end when a rank fails.
local ffi = require "ffi"
local ranks = require "spec.support.ranks"
local inject = require "spec.support.inject"
local process = require "spec.support.process"
local patience, within = process.patience, process.within

ffi.cdef [[
int open(const char *, int, ...);
int close(int);
void *mmap(void *, size_t, int, int, int, long);
int munmap(void *, size_t);
]]

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

  it("ends normally, also after finalize", function()
    for _, last in ipairs { "", "dist.finalize()" } do
      local job = ranks.run(2, [[
        local dist = require "moonshard.dist"
        local ms = require "moonshard"
        local w = dist.all_reduce(ms.ones(100000), { async = true })        -- no rank waits for it
        if dist.rank() == 0 then io.write "fine" end
      ]] .. last)
      assert.are.equal(0, job.code, job.stderr)
      assert.are.equal("fine", job.stdout)
      assert.are.equal("", job.stderr)
    end
    local job = ranks.run(2, [[
      local ms = require "moonshard"
      ms.dist.barrier()
      ms.dist.finalize()
      print(pcall(ms.dist.barrier))
    ]])
    assert.matches("dist%.finalize has already been called", job.stdout)
  end)

  it("leaves nothing under /dev/shm", function()
    local lfs = require "lfs"
    local script = [[
      print("pid " .. require "spec.support.process".pid())
      io.flush()
      require "moonshard".dist.barrier()
    ]]
    for how, job in pairs {
      killed = ranks.run(2, script .. "os.exit(3)"),
      ended = ranks.run(2, script, { env = { MOONSHARD_COMM_MAP = "refuse-all" } }),
    } do
      local pids = 0
      -- other jobs of this machine have files there, too
      for pid in job.stdout:gmatch "pid (%d+)" do
        pids = pids + 1
        for name in lfs.dir "/dev/shm" do
          assert.is_nil(name:find(("moonshard-control-%d-"):format(pid), 1, true), how .. ": " .. name)
        end
      end
      assert.are.equal(2, pids)
    end
  end)

  it("removes what killed jobs left in shared memory, but nothing in use and no foreign file", function()
    local unistd = require "posix.unistd"
    local host = process.read("/proc/sys/kernel/hostname"):match "^[^.\n]+"
    local segment = ("vader_segment.%s.%d.5bec%d.0"):format(host, unistd.geteuid(), process.pid())
    local function exists(path)
      local f = io.open(path)
      if f then f:close() end
      return f ~= nil
    end
    local made = {}                                       -- a test can have only one `finally`
    finally(function() for _, path in ipairs(made) do os.remove(path) end end)
    local script = [[ require "moonshard".dist.barrier() ]]
    local leftovers = { "/dev/shm/" .. segment, "/tmp/" .. segment,
      ("/tmp/moonshard-control-%d-abcDE1"):format(process.pid()) }
    local foreign = { "/tmp/moonshard-control-notes", ("/tmp/moonshard-control-%d-abcDE1.txt"):format(process.pid()),
      ("/dev/shm/vader_segment.other.%d.5bec%d.0"):format(unistd.geteuid(), process.pid()) }
    local open, mapping = {}, {}
    for k, path in ipairs(leftovers) do
      open[k] = ffi.C.open(path, 0x42, ffi.new("int", 0x180))
      made[#made + 1] = path
    end
    for _, path in ipairs(foreign) do
      process.write(path, "")
      made[#made + 1] = path
    end
    local function check(left)
      ranks.run(2, script)
      for _, path in ipairs(leftovers) do assert.are.equal(left, exists(path), path) end
      for _, path in ipairs(foreign) do assert.is_true(exists(path), path) end
    end
    -- Leftovers that are open, then only mapped; another job on this machine may clean up as well, at any moment.
    check(true)
    for k = 1, #leftovers do
      mapping[k] = ffi.C.mmap(nil, 4096, 0, 1, open[k], 0)
      ffi.C.close(open[k])
    end
    check(true)
    for k = 1, #leftovers do ffi.C.munmap(mapping[k], 4096) end
    check(false)
  end)

  it("leaves nothing after mpirun was killed, once the next job has started", function()
    local lfs = require "lfs"
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    process.write(folder .. "/script.lua", ("package.path = %q "):format(("@/lua/?.lua;@/lua/?/init.lua;@/?.lua;"):gsub("@", process.root)) .. [[
      require "moonshard".dist.barrier()
      print("job " .. os.getenv "PMIX_NAMESPACE" .. " pid " .. require "spec.support.process".pid())
      io.flush()
      while true do end
    ]])
    local out = folder .. "/out"
    local child = process.start({ "mpirun", "-n", "2", "luajit", folder .. "/script.lua" },
      { stdout = out, stderr = out .. ".err", env = process.mpirun_env() })
    local deadline = process.now() + 60 * patience
    while select(2, process.read(out):gsub("job %d+ pid %d+\n", "")) < 2 and process.now() < deadline do
      process.sleep(0.01)
    end
    process.kill(child.pid, process.SIGKILL)
    child:wait(10)
    local job = tonumber(process.read(out):match "job (%d+)")
    for pid in process.read(out):gmatch "pid (%d+)" do
      while process.runs(tonumber(pid)) and process.now() < deadline do process.sleep(0.01) end
      assert.is_false(process.runs(tonumber(pid)), "rank " .. pid .. " outlives mpirun")
    end
    ranks.run(2, [[ require "moonshard".dist.barrier() ]])
    for name in lfs.dir "/dev/shm" do assert.is_nil(name:find(("%%.%x%%.%%d+$"):format(job)), name) end
  end)

  it("runs where /dev/shm is tiny", function()
    if os.execute "unshare -m true 2>/dev/null" ~= 0 then return pending "this user may not make mount namespaces" end
    for _, map in ipairs { false, "refuse-all" } do
      local job = ranks.run(2, [[
        local ms = require "moonshard"
        local t = ms.ones(300000)
        ms.dist.all_reduce(t)
        io.write(t[7]:item())
      ]], { env = { MOONSHARD_COMM_MAP = map }, through = { "unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /dev/shm && exec \"$@\"", "sh" } })
      assert.are.equal(0, job.code, job.stderr)
      assert.are.equal("22", job.stdout)
      assert.is_nil(job.stderr:find "vader")
    end
    local job = ranks.run(2, [[ require "moonshard".dist.barrier() ]], { env = { TMPDIR = "/dev/shm" },
      through = { "unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /dev/shm && exec \"$@\"", "sh" } })
    assert.are.equal(1, job.code)
    assert.matches("neither /dev/shm nor /dev/shm has room for MPI's shared memory, 5 MB for each rank of this node",
      job.stderr)
  end)

  it("is a world of one without a launcher", function()
    local job = ranks.run(0, [[
      local ms = require "moonshard"
      local dist = ms.dist
      local t = ms.tensor { 1, 2 }
      dist.all_reduce(t)
      local w = dist.all_reduce(t, { async = true })
      w:wait()
      print(dist.rank(), dist.world_size(), dist.local_rank(), dist.backend(), t[2]:item(), w:done())
    ]])
    assert.are.equal("0\t1\t0\tself\t2\ttrue\n", job.stdout)
  end)

  it("reports that fewer ranks met than the launcher started", function()
    local job = ranks.run(0, [[
      local ms = require "moonshard"
      print(pcall(ms.dist.init, { backend = "mpi" }))
      ms.dist.init { backend = "self" }
      print(ms.dist.world_size())
    ]], { env = { OMPI_COMM_WORLD_SIZE = "2", OMPI_COMM_WORLD_RANK = "0" } })
    assert.matches("dist%.init: mpirun started 2 ranks, but only 1 connected over 'mpi'", job.stdout)
    assert.matches("\n1\n$", job.stdout)
  end)
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

  it("lets independent scripts end at any time", function()
    local job = ranks.run(2, [[
      local ms = require "moonshard"
      if os.getenv "PMIX_RANK" == "1" then return end
      local begun = ms.time()
      while ms.time() - begun < 0.3 do end
      io.write "done"
    ]])
    assert.are.equal(0, job.code, job.stderr)
    assert.are.equal("done", job.stdout)
    assert.are.equal("", job.stderr)
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

  it("prints an error once, with its rank", function()
    for what, rule in pairs {
      nothing = { "error(nil)", "the script ended with status 1" },
      table = { "error {}", "%(error object is not a string%)" },
      text = { "error 'boom'", "[^\n]*script%.lua:3: boom\nstack traceback:\n" },
      -- A sanitizer needs address space for its report of the exit.
      memory = not process.tool and { [[
        local ffi = require "ffi"
        ffi.cdef "int setrlimit(int, const uint64_t *);"
        ffi.C.setrlimit(9, ffi.new("uint64_t[2]", 0, 0))                  -- leaves no address space
        local t = {}
        while true do t[#t + 1] = ("x"):rep(1e6) .. #t end]], "not enough memory" } or nil,
      interrupt = { [[
        local ffi = require "ffi"
        ffi.cdef "int kill(int, int); int getpid(void);"
        ffi.C.kill(ffi.C.getpid(), 2)
        for _ = 1, 1e3 do os.time() end]], "[^\n]*interrupted!\nstack traceback:\n" },
    } do
      local job = ranks.run(3, ([[
        local dist = require "moonshard".dist
        dist.barrier() if dist.rank() == 1 then
        %s end
        dist.barrier()
      ]]):format(rule[1]))
      assert.are.equal(1, job.code, what)
      local ours = job.stderr:gsub("%-%-%-.*", "")                        -- mpirun's own text comes last, or is framed
      assert.matches("^rank 1: " .. rule[2], ours == "" and job.stderr:match "\n(rank 1: .*)" or ours, what .. ": "
        .. job.stderr)
      assert.are.equal(1, select(2, ("\n" .. job.stderr):gsub("\nrank %d: ", "")), what .. ": " .. job.stderr)
    end
    -- All ranks raise the same error: one of them prints it.
    local job = ranks.run(3, "require 'moonshard'.dist.barrier() error 'boom'")
    assert.are.equal(1, select(2, job.stderr:gsub("rank %d: [^\n]*script%.lua:1: boom\n", "")), job.stderr)
    assert.are.equal(1, select(2, job.stderr:gsub("boom", "")), job.stderr)
  end)

  it("prints each collective if MOONSHARD_DEBUG asks for it", function()
    for level, printed in pairs { off = 0, info = 2, detail = 2 } do
      local job = ranks.run(2, [[ local ms = require "moonshard" ms.dist.all_reduce(ms.ones(3)) ]],
        { env = { MOONSHARD_DEBUG = level } })
      assert.are.equal(0, job.code, job.stderr)
      local _, n = job.stderr:gsub("rank %d: dist: collective %d+ of group 0: all_reduce of 3 float32", "")
      assert.are.equal(printed, n, level .. ": " .. job.stderr)
    end
  end)

  it("refuses invalid settings by name", function()
    for name, rule in pairs {
      MOONSHARD_TIMEOUT = { "a number of seconds above 0", "abc", "-1", "nan", "0", "1x", " " },
      MOONSHARD_THREADS = { "a whole number from 1 to 1e9", "abc", "-1", "nan", "0", "1.5" },
      MOONSHARD_DEBUG = { "one of off, info, detail", "1", "Info" },
      MOONSHARD_LOG = { "fsdp", "all" },
      MOONSHARD_ISA = { "one of v1, v2, v3, v4", "avx2", "v9" },
      MOONSHARD_PROGRESS = { "one of bar, lines", "none" },
      MOONSHARD_CUDA = { "one of real, emulated, null, off", "yes" },
      MOONSHARD_COMM_MAP = { "one of refuse, refuse-all", "no" },
      MOONSHARD_COMM_NODES = { "a number of nodes, or the node number of every rank, separated by commas", "two", "-1" },
    } do
      for k = 2, #rule do
        local job = ranks.run(0, [[ require "moonshard".dist.init() ]], { env = { [name] = rule[k] } })
        assert.are.equal(1, job.code, name)
        assert.is_truthy(job.stderr:find(("moonshard: %s is '%s', expected %s\n"):format(name, rule[k], rule[1]), 1,
          true), job.stderr)
      end
    end
    for _, value in ipairs { "inf", "1e3", "" } do
      local job = ranks.run(0, [[ require "moonshard".dist.init() ]], { env = { MOONSHARD_TIMEOUT = value } })
      assert.are.equal(0, job.code, job.stderr)
    end
    for _, timeout in ipairs { "0/0", "-1", "0" } do
      local job = ranks.run(0, ("require 'moonshard'.dist.init { timeout = %s }"):format(timeout))
      assert.matches("dist.init: option 'timeout' is .-, expected a number > 0", job.stderr)
    end
  end)
end)

describe("over simulated nodes #mpi #timed", function()
  it("a mismatch, a published error and an absence reach every rank", function() within(3, function()
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
      if rank == 3 then
        dist.barrier()
        lib.ms_dist_publish_error("lost", lib.ms_dist_errors())
      else
        -- A rank gets the error also when it is just leaving the barrier.
        try(function()
          dist.barrier()
          dist.all_reduce(ms.ones(1000))
        end, "rank 3 failed: lost")
      end
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
