-- SPDX-License-Identifier: MIT
--- Backend "nccl" on the emulated GPU, with the stand-in for NCCL (spec/support/cuda/nccl.cpp): how it starts, what
--- it computes, and how jobs end when NCCL or a rank fails. Every collective in every dtype: collectives_spec.lua.
local lfs = require "lfs"
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"
local it_built = require "spec.support.it_built"("standin/libnccl_standin.so.2",
  "this build has no emulated GPU: there is no g++")

local build = process.build

--- Runs a job over NCCL's stand-in. given: further variables, such as MOONSHARD_NCCL_STANDIN for its faults.
local function job(n, script, given)
  local env = { MOONSHARD_CUDA = process.gpu, MOONSHARD_BACKEND = "nccl" }
  for name, value in pairs(given or {}) do env[name] = value end
  return ranks.run(n, script, { env = env, timeout = 60 * process.patience })
end

describe("backend nccl #cuda", function()
  it_built("is chosen by dist.init and by MOONSHARD_BACKEND, and moves tensors of GPUs", function()
    local script = [[
      local ms = require "moonshard"
      local dist = ms.dist
      dist.init(%s)
      local t = ms.full({ 1000 }, dist.rank() + 1, { device = "cuda" })
      dist.all_reduce(t)
      local all = ms.zeros(4)
      dist.all_gather(all, ms.full({ 2 }, dist.rank()))
      if dist.rank() == 1 then print(dist.backend(), t.device, t:sum():item(), table.concat(all:tolist(), " ")) end
    ]]
    for _, case in ipairs { { '{ backend = "nccl" }', "" }, { "", "nccl" } } do
      local done = job(2, script:format(case[1]), { MOONSHARD_BACKEND = case[2] })
      assert.are.equal(0, done.code, done.stderr)
      assert.are.equal("nccl\tcuda:1\t3000\t0 0 1 1\n", done.stdout)
    end
  end)

  it_built("says why it cannot be used", function()
    local script = 'require("moonshard").dist.init()'
    for _, case in ipairs {
      { { MOONSHARD_CUDA = "off" }, "dist%.init: backend 'nccl': device 'cuda:0' is not available: MOONSHARD_CUDA is off" },
      { { MOONSHARD_NCCL_STANDIN = "version:22703" }, "dist%.init: %S+ is NCCL 2%.27%.3, expected 2%.28 or newer" },
      { { MOONSHARD_NCCL_STANDIN = "version:2708" }, "dist%.init: %S+ is NCCL 2%.7%.8, expected 2%.28 or newer" },
      { { MOONSHARD_NCCL_STANDIN = "duplicates", MOONSHARD_CUDA_DEVICES = "1" },
        "dist%.init: ncclCommInitRankConfig: invalid usage .-: Duplicate GPU detected" },
      { { MOONSHARD_BACKEND = "gloo" }, "dist%.init: backend 'gloo' is unknown, expected one of 'auto', 'mpi', 'nccl', 'self'" },
    } do
      local done = job(2, script, case[1])
      assert.are.equal(1, done.code)
      assert.matches("script%.lua:1: " .. case[2], done.stderr)
    end
    if lfs.attributes(build .. "/libmoonshard_cuda_null.so") then
      local done = job(2, script, { MOONSHARD_CUDA = "null" })
      assert.matches("script%.lua:1: dist%.init: NCCL cannot use the null device", done.stderr)
    end
  end)

  it("loads the NCCL that is installed, and has its functions", function()
    if process.tool then return pending "sanitizers and valgrind cannot check the installed NCCL" end
    local folder = process.temp_folder()
    process.write(folder .. "/script.lua", ([[
      local ffi = require "ffi"
      ffi.cdef "typedef struct { int version; const char *name; int (*init)(const void *, char *, size_t); } head;"
      ffi.cdef "extern head ms_transport_table;"
      local text = ffi.new "char[1000]"
      local rc = ffi.load(%q).ms_transport_table.init(ffi.new "char[65536]", text, 1000)
      io.write(rc, " ", ffi.string(text))
    ]]):format(build .. "/libmoonshard_nccl.so"))
    local function load(env)
      local child = process.start({ "luajit", folder .. "/script.lua" }, { stdout = folder .. "/out",
        stderr = folder .. "/err", env = env })
      child:wait(60 * process.patience)
      return process.read(folder .. "/out"), process.read(folder .. "/err")
    end
    local found, err = load { MOONSHARD_CUDA = false }
    local missing = load { MOONSHARD_CUDA = false, MOONSHARD_NCCL = "/nonexistent/libnccl.so.2" }
    local other = load { MOONSHARD_CUDA = false, MOONSHARD_NCCL = build .. "/libmoonshard_nccl.so" }
    process.remove_folder(folder)
    assert.matches("^%-1 %S+/libmoonshard_nccl%.so has no function ncclGetVersion, expected NCCL 2%.28 or newer$", other)
    assert.matches("^%-1 NCCL cannot be loaded %(MOONSHARD_NCCL%): /nonexistent/libnccl%.so%.2: cannot open", missing)
    if found:find "is neither in the loader's path nor" then return pending(found) end
    assert.are.equal("0 ", found, err)
  end)

  it_built("finds calls that do not match on the CPU, before they are queued", function()
    local done = job(2, [[
      local ms = require "moonshard"
      local dist = ms.dist
      local function cuda(n) return ms.ones(n, { device = "cuda" }) end
      for k, fn in ipairs {
        function(r) dist.all_reduce(cuda(10 + r)) end,
        function(r) if r == 0 then dist.all_reduce(cuda(5)) else dist.broadcast(cuda(5), { src = 0 }) end end,
        function(r) dist.all_reduce(r == 0 and cuda(7) or ms.ones(7)) end,
      } do
        local ok, why = pcall(fn, dist.rank())
        if dist.rank() == 0 then print(k, ok, why) end
        dist.recover()
      end
      local t = cuda(100)
      dist.all_reduce(t)
      print(t:sum():item())
    ]])
    assert.are.equal(0, done.code, done.stderr)
    assert.matches("1\tfalse\t.-: the ranks ask for different things; rank 0: all_reduce of 10 float32, sum, at .-; "
      .. "rank 1: all_reduce of 11 float32", done.stdout)
    assert.matches("2\tfalse\t.-; rank 0: all_reduce of 5 float32, sum, at .-; rank 1: broadcast of 5 ", done.stdout)
    assert.matches("3\tfalse\t.-; rank 0: all_reduce of 7 float32, sum, at [^;]-, between GPUs; "
      .. "rank 1: all_reduce of 7 float32, sum, at [^;]-, in CPU memory or on another GPU", done.stdout)
    assert.are.equal(2, select(2, done.stdout:gsub("\n?200\n", "")))
  end)
end)

-- ---- groups and numbers ---------------------------------------------------------------------------

ranks.describe(4, "backend nccl over 4 ranks #cuda", { env = { MOONSHARD_CUDA = process.gpu, MOONSHARD_BACKEND = "nccl" } },
  function(rank, world)
    local ms, dist
    if rank then
      ms = require "moonshard"
      dist = ms.dist
    end
    local function present() return ms.cuda.is_available() end

    it("has a communicator for each group, split from the world's", function()
      if not present() then return pending(ms.cuda.why_unavailable()) end
      local pairs_of = { dist.new_group { 0, 2 }, dist.new_group { 1, 3 }, dist.new_group { 2, 3, 0 } }
      for round = 1, 3 do
        local mine = pairs_of[rank % 2 + 1]
        local t = ms.full({ 5000 }, rank + round, { device = "cuda" })
        dist.all_reduce(t, { group = mine })
        assert.are.equal(rank % 2 == 0 and 2 + 2 * round or 4 + 2 * round, t[5000]:item())
        if rank ~= 1 then
          local out = ms.zeros(6, { device = "cuda" })
          dist.all_gather(out, ms.full({ 2 }, rank, { device = "cuda" }), { group = pairs_of[3] })
          assert.are.same({ 0, 0, 2, 2, 3, 3 }, out:tolist())
        end
        local all = ms.full({ 3 }, 1, { device = "cuda" })
        dist.all_reduce(all)
        assert.are.same({ 4, 4, 4 }, all:tolist())
      end
      for _, g in ipairs(pairs_of) do dist.free_group(g) end
      local again = dist.new_group { 3, 1 }
      if rank % 2 == 1 then
        local t = ms.full({ 2 }, rank, { device = "cuda" })
        dist.broadcast(t, { src = 3, group = again })
        assert.are.same({ 3, 3 }, t:tolist())
      end
    end)

    it("queues collectives of several groups and streams in the order of the script", function()
      if not present() then return pending(ms.cuda.why_unavailable()) end
      local halves, mates = { dist.new_group { 0, 1 }, dist.new_group { 2, 3 } },
        { dist.new_group { 0, 2 }, dist.new_group { 1, 3 } }
      local half, mate = halves[rank < 2 and 1 or 2], mates[rank % 2 + 1]
      for round = 1, 10 do
        local a, b, c = ms.full({ 20000 }, rank + 1, { device = "cuda" }), ms.full({ 300 }, rank, { device = "cuda" }),
          ms.zeros(4 * 700, { device = "cuda" })
        local works = {}
        works[1] = dist.all_reduce(a, { group = half, async = true })
        works[2] = dist.all_gather(c, ms.full({ 700 }, rank + round, { device = "cuda" }), { async = true })
        works[3] = dist.all_reduce(b, { group = mate, async = true })
        local d = ms.full({ 10 }, 1, { device = "cuda" })
        dist.all_reduce(d)
        for k = 3, 1, -1 do works[k]:wait() end
        assert.are.equal(rank < 2 and 3 or 7, a[20000]:item())
        assert.are.equal(rank % 2 == 0 and 2 or 4, b[300]:item())
        assert.are.equal(4, d[10]:item())
        for r = 0, world - 1 do assert.are.equal(r + round, c[700 * r + 700]:item()) end
      end
    end)

    it("adds half types in float32, and rounds once", function()
      if not present() then return pending(ms.cuda.why_unavailable()) end
      ms.manual_seed(5 + rank)
      for _, dtype in ipairs { "bfloat16", "float16" } do
        for _, op in ipairs { "sum", "avg" } do
          local t = ms.randn(4 * 1001):to(dtype)
          local wide, there = t:float(), t:to "cuda"
          dist.all_reduce(wide, { op = op })
          dist.all_reduce(there, { op = op })
          -- One unit in the last place, where NCCL's order of the sum in float32 rounds to the other neighbour.
          local last = { rtol = dtype == "bfloat16" and 2 ^ -8 or 2 ^ -11, atol = 1e-6 }
          ms.testing.assert_close(there:cpu():float(), wide, last)
          local part = ms.empty(1001, { dtype = dtype, device = "cuda" })
          dist.reduce_scatter(part, t:to "cuda", { op = op })
          ms.testing.assert_close(part:cpu():float(), wide:narrow(1, 1001 * rank + 1, 1001), last)
        end
      end
    end)

    it("divides after the sum: means, and gradients by a factor, of each dtype", function()
      if not present() then return pending(ms.cuda.why_unavailable()) end
      for _, dtype in ipairs { "float32", "float64" } do
        for first = 1, 2 do                             -- the second is not aligned
          local t = ms.full({ 1002 }, 3 * rank, { dtype = dtype, device = "cuda" }):narrow(1, first, 1001)
          dist.all_reduce(t, { op = "avg" })
          assert.is_true(t:eq(4.5):all():item())
        end
      end
      -- NCCL may add half types as they are if they are the reduction's dtype.
      local fsdp, nn = ms.fsdp, ms.nn
      for _, dtype in ipairs { "bfloat16", "float16", "float32" } do
        local model = nn.Linear(7, 5):to "cuda"
        fsdp.fully_shard(model, { mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = dtype, reduce_dtype = dtype } })
        model:set_gradient_divide_factor(8)
        model(ms.full({ 2, 7 }, rank + 1, { device = "cuda" })):sum():backward()
        assert.is_true(model.weight.grad:full_tensor():eq(2 * 10 / 8):all():item())     -- two rows, and the ranks' sum
      end
    end)
  end)
