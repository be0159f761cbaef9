-- SPDX-License-Identifier: MIT
--- Device "cuda", on the emulated GPU if there is no other (MOONSHARD_CUDA, set by spec/support/helper.lua).
local ms = require "moonshard"
local collected = require "spec.support.collected"
local message = require "spec.support.message"
local process = require "spec.support.process"
local on_gpu = require "spec.support.on_gpu"()
local nn = ms.nn

local there = ms.cuda.is_available()
local many = ms.cuda.device_count() > 1
local emulated = there and ms.cuda.device_name():find "^emulated" ~= nil

describe("ms.cuda", function()
  it("gives the reason why there is no GPU", function()
    local why = "local ms = require 'moonshard' print(ms.cuda.is_available(), ms.cuda.device_count(), ms.cuda.why_unavailable())"
    local off = process.script(why, { MOONSHARD_CUDA = "off" })
    assert.are.equal("false\t0\tMOONSHARD_CUDA is off\n", off.stdout)
    -- Without a GPU the message names what is missing; with a GPU there is none.
    local real = process.script(why, { MOONSHARD_CUDA = "real" })
    assert.is_truthy(real.stdout:find "^true\t%d+\tnil\n$" or real.stdout:find "no NVIDIA driver is installed"
      or real.stdout:find "no CUDA device"
      or real.stdout:find "this build has no CUDA plugin" or real.stdout:find "driver is too old", real.stdout)
  end)

  for _, case in ipairs {
    { "a GPU older than compute capability 8.0", "sm_75",
      "emulated GPU has compute capability 7.5, moonshard needs 8.0 or newer" },
    { "a driver older than the plugin", "old_driver",
      "the NVIDIA driver is too old: it supports CUDA 12.4, the plugin was built with CUDA 13.0" },
  } do
    it(("starts with %s, and gives the reason why it is not used"):format(case[1]), function()
      local job = process.script([[
        local ms = require "moonshard"
        print(ms.cuda.is_available(), ms.cuda.why_unavailable())
        print(select(2, pcall(ms.zeros, 2, { device = "cuda" })))
        print(ms.ones(2):sum():item())]], { MOONSHARD_CUDA = "emulated", MOONSHARD_CUDA_PRETEND = case[2] })
      assert.are.equal(0, job.code, job.stderr)
      local lines = {}
      for line in job.stdout:gmatch "[^\n]+" do lines[#lines + 1] = line end
      assert.are.equal("false\t" .. case[3], lines[1])
      assert.is_truthy(lines[2]:find("device 'cuda:0' is not available: " .. case[3], 1, true), lines[2])
      assert.are.equal("2", lines[3])
    end)
  end

  it("uses a GPU beside one that is too old", function()
    local job = process.script([[
      local ms = require "moonshard"
      print(ms.ones(2, { device = "cuda:0" }):sum():item())
      print(select(2, pcall(ms.zeros, 2, { device = "cuda:1" })))]],
      { MOONSHARD_CUDA = "emulated", MOONSHARD_CUDA_PRETEND = "one_sm_75" })
    assert.matches("^2\n[^\n]*cuda:1: emulated GPU has compute capability 7%.5, moonshard needs 8%.0 or newer\n$",
      job.stdout)
  end)

  it("spreads the ranks of a node over its GPUs if no index is given", function()
    local where = [[
      local ms = require "moonshard"
      print(ms.cuda.current_device(), ms.zeros(1, { device = "cuda" }).device, ms.zeros(1):cuda().device,
        ms.zeros(1, { device = "cuda:0" }).device)
      ms.cuda.set_device(0)
      print(ms.zeros(1, { device = "cuda" }).device)]]
    for _, case in ipairs { { 0, 2, 0 }, { 1, 2, 1 }, { 2, 2, 0 }, { 3, 2, 1 }, { 3, 8, 3 }, { 1, 1, 0 } } do
      local job = process.script(where, { MOONSHARD_CUDA = "emulated", MOONSHARD_CUDA_DEVICES = tostring(case[2]),
        RANK = tostring(case[1]), WORLD_SIZE = "4", LOCAL_RANK = tostring(case[1]), LOCAL_WORLD_SIZE = "4" })
      assert.are.equal(("%d\tcuda:%d\tcuda:%d\tcuda:0\ncuda:0\n"):format(case[3], case[3], case[3]), job.stdout,
        job.stderr)
    end
  end)

  it("names the operator that a kernel's error comes from, with MOONSHARD_CUDA_SYNC=1", function()
    local source = [[
      local ms = require "moonshard"
      local table, ids = ms.zeros(4, 3, { device = "cuda" }), ms.tensor({ 1, 9 }, { dtype = "int64", device = "cuda" })
      local ok, message = pcall(ms.nn.F.embedding, ids, table)
      print(ok, message)
      print(select(2, pcall(ms.cuda.synchronize)))]]
    local job = process.script(source, { MOONSHARD_CUDA = "emulated", MOONSHARD_CUDA_SYNC = "1" })
    assert.matches("^false\t[^\n]*embedding%([^\n]*%[4, 3%][^\n]*%): embedding: id 9 is out of range, expected 0 or more and below 4", job.stdout)
    job = process.script(source, { MOONSHARD_CUDA = "emulated" })
    assert.matches("^true\t[^\n]*\n[^\n]*embedding: id 9 is out of range, expected 0 or more and below 4", job.stdout:gsub("\n +", " "))
  end)

  it("lists the work from which an error of a kernel may come, with shapes", function()
    local source = [[
      local ms = require "moonshard"
      local x = ms.ones(3, 4, { device = "cuda" })
      -- Leaves free blocks: after the failure a call must not fail at an allocation already.
      ms.scope(function() for _ = 1, 8 do local _ = x:exp() end end)
      print(x:sum():item())                              -- the calls above have ended
      local y = (x + x):to("bfloat16"):relu()
      print(select(2, pcall(ms.cuda.synchronize)))
      print(select(2, pcall(function() return x * 2 end)))]]
    local out = process.script(source, { MOONSHARD_CUDA = "emulated",
      MOONSHARD_EMULATOR = "fail:cudaStreamSynchronize:2:719" }).stdout
    local list = "relu%(bfloat16 %[3, 4%]%), cast%(float32 %[3, 4%]%), add%(float32 %[3, 4%], float32 %[3, 4%]%)%."
    assert.matches("^12\n[^\n]*cuda:0: cudaStreamSynchronize, [^\n]* %(CUDA error 719%); this process cannot use its GPUs any more%. "
      .. "The cause may be work that the GPU had not ended, newest first: " .. list, out)
    assert.not_matches("exp%(", out)
    assert.matches("\n[^\n]*mul_scalar%(float32 %[3, 4%] cuda:0%): cuda:0: ", out)
  end)

  it("names the operator and shapes of a launch that fails", function()
    local out = process.script([[
      local ms = require "moonshard"
      local x = ms.ones(3, 4, { device = "cuda" })
      print(select(2, pcall(function() return x + x end)))
      print((x + x):sum():item())]], { MOONSHARD_CUDA = "emulated", MOONSHARD_EMULATOR = "fail:cudaLaunchKernel:2:9" }).stdout
    assert.matches("add%(float32 %[3, 4%][^\n]*%): cuda:0: add, launching [^\n]*CUDA error 9%)\n24\n$", out)
  end)

  it("never selects the emulated GPU by default", function()
    local job = process.script("local ms = require 'moonshard' print(ms.cuda.is_available() and ms.cuda.device_name() or 'none')", { MOONSHARD_CUDA = false })
    assert.is_nil(job.stdout:find "emulated")
  end)

  on_gpu("runs gradcheck on a GPU", function()
    local x = ms.randn(7, { dtype = "float64", device = "cuda", requires_grad = true })
    assert.is_true(ms.testing.gradcheck(function(a) return a:tanh() end, x))
  end)

  on_gpu("counts, names and chooses devices", function()
    assert.is_nil(ms.cuda.why_unavailable())
    assert.is_true(ms.cuda.device_count() >= 1)
    assert.are.equal("string", type(ms.cuda.device_name()))
    assert.are.equal(0, ms.cuda.current_device())
    assert.matches("device 99 does not exist", message(ms.cuda.set_device, 99))
    assert.matches("device is 'cpu', expected a CUDA device", message(ms.cuda.set_device, "cpu"))
    ms.cuda.synchronize()
    if not many then return end
    ms.cuda.set_device(1)
    local t = ms.zeros(2, { device = "cuda" })
    ms.cuda.set_device(0)
    assert.are.equal("cuda:1", t.device)
    assert.are.equal("cuda:0", ms.zeros(2, { device = "cuda" }).device)
  end)

  on_gpu("may be the default device, and that of with_device", function()
    ms.with_device("cuda", function()
      assert.are.equal("cuda:0", ms.zeros(2).device)
      assert.are.equal("cuda:0", ms.tensor({ 1, 2 }).device)
      assert.are.equal("cuda:0", nn.Linear(2, 2).weight.device)
    end)
    assert.are.equal("cpu", ms.zeros(2).device)
    assert.matches("with_device: device 'cuda:99' is not available: the last CUDA device is cuda:%d",
      message(ms.with_device, "cuda:99", error))
  end)
end)

describe("tensors on cuda", function()
  on_gpu("keep their values when moved there and back, in every dtype and with strides", function()
    for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool" } do
      local x = ms.arange(0, 24, { dtype = dtype == "bool" and "int64" or dtype }):to(dtype):reshape(4, 6)
      for _, view in ipairs { x, x:t(), x:narrow(2, 2, 3), x:select(1, 2) } do
        local y = view:to "cuda"
        assert.are.equal("cuda:0", y.device)
        assert.are.equal(dtype, y.dtype)
        assert.is_true(y:to("cpu"):equal(view))
        assert.are.same(view:tolist(), y:tolist())
      end
      local z = x:to "cuda"
      assert.is_true(z:t():to("cpu"):equal(x:t()))
      local into = ms.zeros(6, 4, { dtype = dtype, device = "cuda" })
      into:t():copy_(x)
      assert.is_true(into:to("cpu"):t():equal(x))
    end
  end)

  on_gpu("can be printed, read and assigned", function()
    local t = ms.tensor({ { 1, 2 }, { 3, 4.5 } }, { device = "cuda" })
    assert.are.equal("Tensor float32 [2, 2] cuda:0\n[[1.0000, 2.0000],\n [3.0000, 4.5000]]", tostring(t))
    assert.are.equal(4.5, t[2][2]:item())
    t[1] = ms.tensor { 7, 8 }
    assert.are.same({ { 7, 8 }, { 3, 4.5 } }, t:tolist())
    assert.is_true(t:isfinite():all():item())
  end)

  on_gpu("hold the random numbers of the CPU, bit by bit (others: copies_spec)", function()
    ms.manual_seed(3)
    local whole = ms.randint(-50, 1000, { 4097 })
    ms.manual_seed(3)
    assert.is_true(ms.randint(-50, 1000, { 4097 }, { device = "cuda" }):to("cpu"):equal(whole))
  end)

  on_gpu("don't mix with the CPU's, and the error says which is where", function()
    local a, b = ms.zeros(2, 3), ms.zeros(2, 3, { device = "cuda" })
    assert.matches("add: tensors are on different devices: float32 %[2, 3%] cpu and, as argument 2, float32 %[2, 3%] cuda:0",
      message(function() return a + b end))
    assert.matches("device 'cuda:99' is not available", message(function() return a:to "cuda:99" end))
  end)

  on_gpu("take a single number from the CPU, with its gradient", function()
    local a = ms.randn({ 2, 3 }, { device = "cuda", requires_grad = true })
    local scale = ms.tensor(2.5, { requires_grad = true })
    local out = a * scale + ms.tensor(1)
    assert.are.equal("cuda:0", tostring(out.device))
    assert.is_true(out:to("cpu"):equal(a:detach():to("cpu") * 2.5 + 1))
    out:sum():backward()
    assert.are.equal("cpu", tostring(scale.grad.device))
    assert.is_true(math.abs(scale.grad:item() - a:detach():sum():item()) < 1e-5)
    assert.is_true((ms.tensor(1) / ms.full({ 2 }, 4, { device = "cuda" })):to("cpu"):equal(ms.full({ 2 }, 0.25)))
    assert.is_true(a:detach():gt(ms.tensor(0)):to("cpu"):equal(a:detach():to("cpu"):gt(0)))
    local b = ms.ones(3, { device = "cuda" })
    b:mul_(ms.tensor(3))
    assert.is_true(b:to("cpu"):equal(ms.full({ 3 }, 3)))
    -- A GPU tensor cannot be added in place to a CPU scalar, nor a CPU tensor with dimensions to a GPU tensor.
    assert.matches("add_: tensors are on different devices", message(function() return ms.tensor(1):add_(b:sum()) end))
    assert.matches("add: tensors are on different devices", message(function() return ms.ones(1) + b end))
  end)

  for _, dtype in ipairs { "float64", "float32", "bfloat16", "float16" } do
    on_gpu("add a table's rows to the gradient of a tied weight from the last product, bit for bit, " .. dtype, function()
      ms.manual_seed(3)
      local ids = ms.tensor({ 4, 1, 4, 2, 4 }, { dtype = "int64", device = "cuda" })
      local w, h = ms.randn(6, 70):to(dtype):to("cuda"), ms.randn(5, 70):to(dtype):to("cuda")
      local function gradient(table, weight)
        local y = nn.F.linear(nn.F.embedding(ids, table, { padding_idx = 2 }) * h, weight)
        return (y * y):sum():backward()
      end
      local tied, table, weight = w:clone():requires_grad_(), w:clone():requires_grad_(), w:clone():requires_grad_()
      gradient(tied, tied)
      gradient(table, weight)
      assert.is_true(tied.grad:equal(weight.grad + table.grad))
      assert.is_true(tied.grad:abs():sum():item() > 0)
    end)
  end

  for _, kernel in ipairs { 1, 3 } do
    on_gpu(("convolve more images than fit the buffer for their matrices with the same results, kernel %d x %d"):format(
      kernel, kernel), function()
      ms.manual_seed(4)
      local f64 = { dtype = "float64" }
      local x, w, b, g = ms.randn(7, 4, 5, 6, f64), ms.randn(6, 2, kernel, kernel, f64), ms.randn(6, f64),
        ms.randn(7, 6, 5, 6, f64)
      local o = { padding = kernel == 3 and 1 or 0, groups = 2 }
      local found = {}
      for _, device in ipairs { "cpu", "cuda" } do
        local leaves = {}
        for k, t in ipairs { x, w, b } do leaves[k] = t:to(device):clone():requires_grad_() end
        local y = nn.F.conv2d(leaves[1], leaves[2], leaves[3], o)
        y:backward(g:to(device))
        found[device] = { y:detach(), leaves[1].grad, leaves[2].grad, leaves[3].grad }
      end
      for k, t in ipairs(found.cuda) do
        ms.testing.assert_close(t:to("cpu"), found.cpu[k], { rtol = 1e-12, atol = 1e-12 })
      end
    end)
  end

  on_gpu("report an id out of range when the host next waits", function()
    local w = ms.zeros(5, 2, { device = "cuda" })
    local ids = ms.tensor({ 0, 7 }, { dtype = "int64", device = "cuda" })
    local y = nn.F.embedding(ids, w)
    assert.matches("embedding: id 7 is out of range, expected 0 or more and below 5; a kernel on cuda:0 found this",
      message(function() return y:tolist() end))
    assert.are.same({ { 0, 0 }, { 0, 0 } }, y:tolist())               -- the error is raised only once
    local logits = ms.zeros(2, 3, { device = "cuda" })
    local loss = nn.F.cross_entropy(logits, ms.tensor({ 1, 3 }, { dtype = "int64", device = "cuda" }))
    assert.matches("cross_entropy: id 3 is out of range, expected 0 or more and below 3", message(function() return loss:item() end))
    local picked = ms.zeros(3, { device = "cuda" }):index_select(1,
      ms.tensor({ -1 }, { dtype = "int64", device = "cuda" }))
    assert.matches("index: position %-1 is out of range, expected 0 or more and below 3", message(function() ms.cuda.synchronize() return picked end))
  end)

  on_gpu("are seen in the order of the calls, however far the host runs ahead", function()
    local x = ms.zeros(1000, { device = "cuda" })
    for k = 1, 200 do
      x:add_(1)
      local y = ms.full({ 1000 }, k, { device = "cuda" })              -- blocks return to the pool and are reused
      x:add_(y)
      y:release()
    end
    local host = ms.ones(1000)
    local z = host:to "cuda"
    -- The copy is already queued, and must get the old values.
    host:fill_(5)
    assert.are.equal(200 + 200 * 201 / 2, x[1]:item())
    assert.are.equal(1000, z:sum():item())
  end)

  on_gpu("count their bytes by device", function()
    collected()                                 -- leftovers of earlier tests are not counted
    local before = ms.memory_stats "cuda"
    local t = ms.zeros(1000, { device = "cuda" })
    assert.are.equal(before.allocated + 4000, ms.memory_stats("cuda").allocated)
    assert.is_true(ms.memory_stats("cuda").reserved >= 4000)
    ms.reset_peak_memory_stats "cuda"
    assert.are.equal(before.allocated + 4000, ms.memory_stats("cuda").peak_allocated)
    if many then assert.are.equal(0, ms.memory_stats("cuda:1").allocated) end
    t:release()
    assert.are.equal(before.allocated, ms.memory_stats("cuda").allocated)
    local cached = ms.memory_stats("cuda").reserved
    ms.empty_cache()
    assert.is_true(ms.memory_stats("cuda").reserved <= cached)
  end)

  on_gpu("go from one GPU to another", function()
    if not many then return end
    local x = ms.arange(0, 12, { dtype = "float32", device = "cuda:0" }):reshape(3, 4)
    local y = (x * 2):t():to "cuda:1"
    assert.are.equal("cuda:1", y.device)
    assert.is_true(y:to("cpu"):equal((x * 2):to("cpu"):t()))
    local w = ms.ones(3, { device = "cuda:0", requires_grad = true })
    local total = (w:to("cuda:1") * 3):sum()
    total:backward()
    assert.are.equal("cuda:0", w.grad.device)
    assert.are.same({ 3, 3, 3 }, w.grad:tolist())
  end)

  on_gpu("are saved and loaded", function()
    local path = os.tmpname()
    ms.save(path, { a = ms.arange(0, 6, { dtype = "float32", device = "cuda" }):reshape(2, 3):t() })
    local back = ms.load(path, { device = "cuda" })
    os.remove(path)
    assert.are.equal("cuda:0", back.a.device)
    assert.are.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, back.a:tolist())
  end)

  it("run out of memory with an error, and continue", function()
    if not there or not emulated then return pending "needs the small memory of the emulated GPU" end
    local job = process.script([[
      local ms = require "moonshard"
      local a = ms.zeros(100000, { device = "cuda" })
      print(pcall(function() local b = ms.zeros(2000000, { device = "cuda" }) return b end))
      a:release()
      print(ms.ones(100000, { device = "cuda" }):sum():item())]], { MOONSHARD_CUDA = "emulated", MOONSHARD_CUDA_MEMORY = "4194304" })
    assert.matches("^false\t[^\n]*: zeros: no memory for 8000000 bytes on cuda:0 " ..
      "%(more than the free memory of the device; 400000 bytes allocated, %d+ reserved%)\n100000\n$", job.stdout)
  end)

  it("cannot be read by the CPU's operators", function()
    if not there or not emulated then return pending "needs the emulated GPU" end
    local job = process.script([[
      local ms, ffi = require "moonshard", require "ffi"
      local a = ms.zeros(4, { device = "cuda" })
      ms.cuda.synchronize()
      io.stdout:write "before\n"
      io.stdout:flush()
      print(ffi.cast("float *", a:data_ptr())[0])]], require("spec.support.process").crash_env { MOONSHARD_CUDA = "emulated" })
    -- Where the CPU has protection keys the access crashes; elsewhere it is not detected.
    assert.is_truthy(job.stdout:find "^before\n")
    local cpus = io.open("/proc/cpuinfo")
    if cpus and cpus:read("*a"):find " ospke" then assert.are_not.equal(0, job.code) end
  end)
end)

describe("models on cuda", function()
  on_gpu("take a GPT's step as on the CPU, in float32 and bfloat16", function()
    local GPT = require "moonshard.models.gpt"
    for _, dtype in ipairs { "float32", "bfloat16" } do
      local function step(device)
        ms.manual_seed(9)
        local model = GPT { vocab = 40, context = 16, layers = 2, heads = 2, dim = 16 }
        model:to(device, dtype)
        local ids = ms.randint(0, 40, { 3, 16 }):to(device)
        local targets = ms.randint(0, 40, { 3, 16 }):to(device)
        local loss = model(ids, targets)
        loss:backward()
        local grads = {}
        for name, p in model:named_parameters() do grads[#grads + 1] = { name, p.grad:to "cpu" } end
        return loss:item(), grads
      end
      local a, ga = step "cpu"
      local b, gb = step "cuda"
      local coarse = dtype == "bfloat16"
      assert.is_near(a, b, coarse and 0.05 or 1e-5)
      for k, g in ipairs(ga) do
        local scale = math.max(g[2]:float():abs():max():item(), 1e-3)
        local off = (g[2]:float() - gb[k][2]:float()):abs():max():item()
        assert.is_true(off <= (coarse and 0.05 or 1e-5) * scale + (coarse and 1e-3 or 1e-6),
          ("%s %s: off by %g of %g"):format(dtype, g[1], off, scale))
      end
    end
  end)
end)
