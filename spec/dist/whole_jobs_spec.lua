-- SPDX-License-Identifier: MIT
--- Whole jobs: what they print, which settings they refuse, and what they leave behind. How they end when a rank fails,
--- and how soon: jobs_spec.lua.
local ffi = require "ffi"
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"
local patience = process.patience

ffi.cdef [[
int open(const char *, int, ...);
int close(int);
void *mmap(void *, size_t, int, int, int, long);
int munmap(void *, size_t);
]]

describe("a whole job #mpi", function()
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
    -- A process in another root has the files under other paths, of the same names.
    local folder = process.temp_folder()
    for k, path in ipairs(leftovers) do
      open[k] = ffi.C.open(folder .. path:match "/[^/]+$", 0x42, ffi.new("int", 0x180))
    end
    check(true)
    for k = 1, #leftovers do ffi.C.close(open[k]) end
    process.remove_folder(folder)
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

  it("leaves the word to a script that says what is wrong with its options", function()
    for _, before in ipairs { "", "require 'moonshard'.dist.barrier()" } do
      local job = ranks.run(2, before .. " require 'moonshard.run.cli'.stop('tune', 'no file')")
      assert.are.equal(2, job.code, job.stderr)
      assert.are.equal("tune: no file\n", (job.stderr:gsub("%-%-%-.*", "")))         -- mpirun's own text is framed
    end
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
      MOONSHARD_CUDA = { "one of real, emulated, ptx, null, off", "yes" },
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
    local job = ranks.run(0, "scripts/train.lua", { env = { MOONSHARD_THREADS = "abc" } })
    assert.are.equal(2, job.code)
    assert.are.equal("moonshard: MOONSHARD_THREADS is 'abc', expected a whole number from 1 to 1e9\n", job.stderr)
    for _, value in ipairs { "inf", "1e3", "" } do
      job = ranks.run(0, [[ require "moonshard".dist.init() ]], { env = { MOONSHARD_TIMEOUT = value } })
      assert.are.equal(0, job.code, job.stderr)
    end
    for _, timeout in ipairs { "0/0", "-1", "0" } do
      job = ranks.run(0, ("require 'moonshard'.dist.init { timeout = %s }"):format(timeout))
      assert.matches("dist.init: option 'timeout' is .-, expected a number > 0", job.stderr)
    end
  end)
end)
