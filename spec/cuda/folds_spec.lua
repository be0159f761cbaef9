-- SPDX-License-Identifier: MIT
--- Reductions (kernels/cuda/fold.h) and scans on the (emulated) GPU against float64 on the CPU: along rows, columns and
--- both, in one segment and in several, with lengths that are no multiple of 16 bytes, and views that are not aligned
--- to 16 bytes.
local ms = require "moonshard"
local gpu = require "spec.support.gpu_pair"

local bounds = { float64 = 1e-12, float32 = 1e-5, bfloat16 = 1e-2, float16 = 2e-3 }

local function on_gpu(name, fn)
  it(name, function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    ms.manual_seed(5)
    ms.scope(fn)
  end)
end

--- Few different values, so that extremes occur more than once, on the GPU and in float64 on the CPU.
local function draw(dtype, shape, skip)
  local host = (ms.randint(-40, 40, { gpu.numel(shape) + skip }):to "float32" / 16):to(dtype)
  local x64, x = gpu.pair(host, shape, skip, "float64")
  return x, x64
end

local function check(got, want, dtype, text)
  local g = got:to "cpu":to "float64"
  assert.same({ unpack(want.shape) }, { unpack(g.shape) }, text)
  local off = (g - want):norm():item() / math.max(want:norm():item(), 1e-3)
  assert.is_true(off <= bounds[dtype], ("%s: relative error %g"):format(text, off))
end

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

    on_gpu("keeps NaN, and its first position", function()
      for _, n in ipairs { 5, 2000 } do
        local x = ms.zeros(3, n)
        x:narrow(1, 2, 1):narrow(2, 4, 2):fill_(0 / 0)
        local y = x:to(dtype):to "cuda"
        local top, at = y:max(2)
        assert.same({ false, true, false }, top:isnan():to("cpu"):tolist())
        assert.same({ 0, 3, 0 }, at:to "cpu":tolist())
        local run = y:cumsum(2):to("float64"):to("cpu"):tolist()
        assert.are.equal(0, run[2][3])
        assert.is_true(run[2][4] ~= run[2][4] and run[2][n] ~= run[2][n])
        assert.are.equal(0, run[3][n])
      end
    end)
  end)
end
