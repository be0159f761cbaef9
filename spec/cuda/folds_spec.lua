-- SPDX-License-Identifier: MIT
--- Reductions (kernels/cuda/fold.h) and scans on the (emulated) GPU against float64 on the CPU: along rows, columns and
--- both, in one segment and in several, with lengths that are no multiple of 16 bytes, and views that are not aligned
--- to 16 bytes.
local ms = require "moonshard"
local gpu = require "spec.support.gpu_pair"
local on_gpu = require "spec.support.on_gpu"(5)

local bounds = { float64 = 1e-12, float32 = 1e-5, bfloat16 = 1e-2, float16 = 2e-3 }

--- Few different values, so that extremes occur more than once, on the GPU and in float64 on the CPU.
local function draw(dtype, shape, skip)
  local host = (ms.randint(-40, 40, { gpu.numel(shape) + skip }):to "float32" / 16):to(dtype)
  local x64, x = gpu.pair(host, shape, skip, "float64")
  return x, x64
end

local function check(got, want, dtype, text) gpu.near(got, want, bounds[dtype], text) end

for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64" } do
  describe("on a GPU a reduction of " .. dtype, function()
    for _, case in ipairs {
      { { 7 }, 1, 0 }, { { 8 }, 1, 3 }, { { 40000 }, 1, 0 }, { { 40001 }, 1, 1 },
      { { 5, 300 }, 2, 0 }, { { 5, 301 }, 2, 1 }, { { 70, 33 }, 2, 0 }, { { 3, 20000 }, 2, 0 },
      { { 300, 264 }, 1, 0 }, { { 300, 264 }, 1, 2 }, { { 300, 265 }, 1, 0 }, { { 40, 16 }, 1, 0 },
      { { 600, 1032 }, 1, 0 }, { { 4, 50, 24 }, 2, 0 }, { { 4, 50, 24 }, 1, 0 }, { { 3, 5, 7 }, 2, 0 },
    } do
      local shape, dim, skip = unpack(case)
      on_gpu(("along dimension %d of %s, from element %d"):format(dim, table.concat(shape, " x "), skip), function()
        local x, x64 = draw(dtype, shape, skip)
        for name, fold in pairs {
          sum = function(t) return t:sum(dim) end, mean = function(t) return t:mean(dim) end,
          ["sum of all"] = function(t) return t:sum() end,
          variance = function(t) return t:var(dim) end, norm = function(t) return t:norm(2, dim) end,
          ["norm of 1"] = function(t) return t:norm(1, dim) end, ["norm of 3"] = function(t) return t:norm(3, dim) end,
          maximum = function(t) return (t:max(dim)) end, minimum = function(t) return (t:min(dim)) end,
          logsumexp = function(t) return t:logsumexp(dim) end,
        } do
          check(fold(x), fold(x64), dtype, name)
        end
        for _, name in ipairs { "argmax", "argmin" } do
          assert.is_true(x[name](x, dim):to "cpu":equal(x64[name](x64, dim)), name)
        end
        check(x:cumsum(dim), x64:cumsum(dim), dtype, "cumsum")
        x, x64 = x:detach():requires_grad_(true), x64:detach():requires_grad_(true)
        x:cumsum(dim):backward(x:detach())
        x64:cumsum(dim):backward(x64:detach())
        check(x.grad, x64.grad, dtype, "gradient of cumsum")
      end)
    end
    on_gpu("gives norms of infinite numbers and of 0", function()
      local x = ms.randn(40, 24):to(dtype)
      x[3][1], x[4][2], x[5][3], x[6][3] = math.huge, -math.huge, 0, math.huge
      for _, t in ipairs { x, x:t(), x:narrow(2, 2, 21) } do
        for _, power in ipairs { 0.5, 1, 3, 4, -0.5, -3, math.huge, -math.huge } do
          for dim = 1, 2 do
            local want, got = t:double():norm(power, dim), t:to "cuda":norm(power, dim):to "cpu":double()
            assert.is_true(got:allclose(want, { rtol = 2 * bounds[dtype] }), "power " .. power)
          end
        end
      end
    end)
  end)
end

describe("on a GPU, products", function()
  for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
    on_gpu("have gradients where one factor, two or none are zeros, in every place of a pack: " .. dtype, function()
      local host = ms.rand(18, 17) + 0.5
      for k = 1, 17 do host:narrow(1, k, 1):narrow(2, k, 1):fill_(0) end
      host:narrow(1, 17, 1):narrow(2, 3, 1):fill_(0)
      for _, view in ipairs { function(x) return x end, function(x) return x:t():contiguous():t() end } do
        local grads = {}
        for k, device in ipairs { "cpu", "cuda" } do
          local x = view(host:to(dtype):to(device)):detach():requires_grad_(true)
          x:prod(2):backward(ms.arange(1, 19):to(dtype):to(device))
          grads[k] = x.grad:to "cpu":to "float64"
        end
        assert.is_true(ms.allclose(grads[1], grads[2], { rtol = dtype:find "16" and 1e-2 or 1e-6 }))
      end
    end)
  end
end)

describe("on a GPU, elements by position", function()
  -- Lines of one element to many; the emulated GPU sorts where lines are few and have many elements.
  for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8" } do
    for _, case in ipairs { { 3000, 1 }, { 700, 3 }, { 40, 300 }, { 5, 2 } } do
      local n, lines = unpack(case)
      on_gpu(("are put, added and reduced in the order of the CPU: %s, %d x %d"):format(dtype, n, lines), function()
        local function values(k, m) return ms.randint(0, 9, { k, m }):to(dtype) end
        local base, from = values(50, lines), values(n, lines)
        local ids, one = ms.randint(0, 50, { n, lines }), ms.randint(0, 50, { n })
        local here, there = {}, {}
        for list, device in pairs { [here] = "cpu", [there] = "cuda" } do
          local function on(t) return t:to(device) end
          list[1] = on(base):clone():scatter_(1, on(ids), on(from))
          list[2] = on(base):clone():scatter_add_(1, on(ids), on(from))
          list[3] = on(base):clone():t():contiguous():scatter_add_(2, on(ids):t(), on(from):t())
          list[4] = on(base):scatter_reduce(1, on(ids), on(from), "amax")
          if dtype:find "float" then
            local x = on(base):clone():requires_grad_()
            x:index_select(1, on(one)):backward(on(from))
            list[5] = x.grad
          end
        end
        for k = 1, #here do assert.is_true(there[k]:cpu():equal(here[k]), "result " .. k) end
      end)
    end
  end

  on_gpu("raise a position out of range where they are sorted", function()
    local x, ids = ms.zeros(10, { device = "cuda" }), ms.zeros(3000, { dtype = "int64" })
    ids:narrow(1, 2000, 1):fill_(10)
    x:scatter_add_(1, ids:to "cuda", ms.ones(3000, { device = "cuda" }))
    local ok, text = pcall(function() return x:cpu() end)
    assert.is_false(ok)
    assert.is_truthy(tostring(text):find("10 is out of range, expected 0 or more and below 10", 1, true), text)
  end)
end)
