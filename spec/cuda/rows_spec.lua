-- SPDX-License-Identifier: MIT
--- Norms, softmax and cross-entropy on the (emulated) GPU against float64 on the CPU: rows that a warp or a whole block
--- computes, rows whose length is no multiple of 16 bytes, and views that begin at odd elements.
local ms = require "moonshard"
local gpu = require "spec.support.gpu_pair"
local on_gpu = require "spec.support.on_gpu"(7)
local F = ms.nn.F

local bounds = { float64 = 1e-12, float32 = 2e-5, bfloat16 = 1e-2, float16 = 2e-3 }

--- Random numbers of a dtype on the GPU, from `skip` elements into their storage, and the same in float64 on the CPU.
local function draw(dtype, shape, skip, requires)
  local twin, there = gpu.pair(ms.randn(gpu.numel(shape) + skip):to(dtype), shape, skip, "float64")
  if requires then
    there, twin = there:detach():requires_grad_(true), twin:detach():requires_grad_(true)
  end
  return there, twin
end

local function check(got, want, dtype, text) gpu.near(got, want, bounds[dtype], text) end

describe("a kernel of rows", function()
  for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64" } do
    -- 1,024 rows of 264 are enough for one warp per row. Only bfloat16 tests this. Sums of 1,100 rows have 35 segments.
    local many = dtype == "bfloat16" and 1024 or 33
    for _, case in ipairs { { 3, 7, 0 }, { 70, 33, 1 }, { 2, 777, 3 }, { 37, 768, 0 }, { 2, 5001, 1 },
      { many, 264, 0 }, { 1100, 1027, 0 } } do
      local rows, n, skip = unpack(case)
      local what = ("of %d x %d %s, from element %d"):format(rows, n, dtype, skip)

      on_gpu("normalizes rows " .. what, function()
        local x, x64 = draw(dtype, { rows, n }, skip, true)
        local w, w64 = draw(dtype, { n }, 0, true)
        local b, b64 = draw(dtype, { n }, skip, true)
        local g, g64 = draw(dtype, { rows, n }, skip)
        local y, y64 = F.layer_norm(x, { n }, w, b), F.layer_norm(x64, { n }, w64, b64)
        check(y, y64, dtype, "layer_norm")
        y:backward(g)
        y64:backward(g64)
        for name, pair in pairs { dx = { x, x64 }, dw = { w, w64 }, db = { b, b64 } } do
          check(pair[1].grad, pair[2].grad, dtype, name)
        end
        local z, z64 = x:detach():requires_grad_(true), x64:detach():requires_grad_(true)
        F.rms_norm(z, w:detach()):backward(g)
        F.rms_norm(z64, w64:detach()):backward(g64)
        check(z.grad, z64.grad, dtype, "dx of rms_norm")
      end)

      on_gpu("makes the softmax " .. what, function()
        for _, name in ipairs { "softmax", "log_softmax" } do
          for dim = rows <= 70 and n <= 777 and 1 or 2, 2 do
            local x, x64 = draw(dtype, { rows, n }, skip, true)
            local g, g64 = draw(dtype, { rows, n }, 1)
            local y, y64 = F[name](x, dim), F[name](x64, dim)
            check(y, y64, dtype, name)
            y:backward(g)
            y64:backward(g64)
            check(x.grad, x64.grad, dtype, "gradient of " .. name)
          end
        end
      end)

      on_gpu("makes the cross-entropy " .. what, function()
        local x, x64 = draw(dtype, { rows, n }, skip, true)
        local w, w64 = draw(dtype, { n }, skip)
        w, w64 = w:abs(), w64:abs()
        local ids = ms.randint(0, n, { rows }, { dtype = "int64" })
        for _, options in ipairs { {}, { label_smoothing = 0.1 }, { label_smoothing = 0.1, weight = true } } do
          local smooth, weighted = options.label_smoothing, options.weight
          x.grad, x64.grad = nil, nil
          local loss = F.cross_entropy(x, ids:to "cuda", { label_smoothing = smooth, weight = weighted and w or nil })
          local loss64 = F.cross_entropy(x64, ids, { label_smoothing = smooth, weight = weighted and w64 or nil })
          check(loss, loss64, dtype, "loss")
          loss:backward()
          loss64:backward()
          check(x.grad, x64.grad, dtype, "its gradient")
        end
      end)
    end
  end

  for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64" } do
    for _, case in ipairs { { 3, 7, 0 }, { 70, 33, 1 }, { 2, 5001, 3 }, { 37, 768, 0 } } do
      local rows, n, skip = unpack(case)
      on_gpu(("normalizes sums of %d x %d %s, from element %d"):format(rows, n, dtype, skip), function()
        local function norms(x, r, w, b)
          local y, h = F.layer_norm(x, { n }, w, b, { residual = r })
          local z, k = F.rms_norm(y, w, { residual = h })
          return y, h, z, k
        end
        local inputs, twins = {}, {}
        for k, shape in ipairs { { rows, n }, { rows, n }, { n }, { n } } do
          inputs[k], twins[k] = draw(dtype, shape, k == 4 and 0 or skip, true)
        end
        local g, g64 = draw(dtype, { rows, n }, skip)
        local got, want = { norms(unpack(inputs)) }, { norms(unpack(twins)) }
        for k, name in ipairs { "layer_norm", "its sum", "rms_norm", "the second sum" } do
          check(got[k], want[k], dtype == "bfloat16" and "bfloat16" or dtype, name)
        end
        -- The sums have gradients besides those of the norms.
        local all, all64 = got[3] * g + got[4] * g + got[2], want[3] * g64 + want[4] * g64 + want[2]
        all:sum():backward()
        all64:sum():backward()
        for k, name in ipairs { "dx", "dr", "dw", "db" } do check(inputs[k].grad, twins[k].grad, dtype, name) end
        assert.is_true(inputs[1].grad:cpu():equal(inputs[2].grad:cpu()))
        -- Only the sum, or only the norm, is used.
        for which = 1, 2 do
          for _, t in ipairs(inputs) do t.grad = nil end
          for _, t in ipairs(twins) do t.grad = nil end
          select(which, F.layer_norm(inputs[1], { n }, inputs[3], inputs[4], { residual = inputs[2] })):backward(g)
          select(which, F.layer_norm(twins[1], { n }, twins[3], twins[4], { residual = twins[2] })):backward(g64)
          check(inputs[1].grad, twins[1].grad, dtype, "dx of one output")
          check(inputs[2].grad, twins[2].grad, dtype, "dr of one output")
        end
      end)
    end
  end

  for _, dtype in ipairs { "float32", "bfloat16", "float64" } do
    on_gpu("adds a norm's gradient to that of a residual connection, of " .. dtype, function()
      for _, norm in ipairs { function(x) return F.layer_norm(x, { 136 }) end, F.rms_norm } do
        local x, x64 = draw(dtype, { 5, 136 }, 0, true)
        local g, g64 = draw(dtype, { 5, 136 }, 0)
        local heard = 0
        -- The hook sees the whole gradient of a tensor that both branches use.
        local function step(t, gradient)
          local inner = t * 1
          inner:register_hook(function(total)
            heard = heard + 1
            return total * 2
          end)
          local y = inner + norm(inner) * 3
          y:backward(gradient)
        end
        step(x, g)
        step(x64, g64)
        assert.are.equal(2, heard)
        check(x.grad, x64.grad, dtype, "gradient")
        -- A leaf that both branches use, twice: the second backward adds to the first one's gradient.
        for _ = 1, 2 do
          x:add(norm(x)):backward(g)
          x64:add(norm(x64)):backward(g64)
        end
        check(x.grad, x64.grad, dtype, "gradient of a leaf")
      end
    end)
  end

  on_gpu("keeps infinities and NaN of logits", function()
    local inf, nan = math.huge, 0 / 0
    for _, row in ipairs { { -inf, 1, 2 }, { inf, 1, 2 }, { nan, 1, 2 }, { 1, nan, -inf } } do
      local x = ms.tensor { row }
      local ids = ms.tensor({ 1 }, { dtype = "int64" })
      local want = F.cross_entropy(x, ids):item()
      local got = F.cross_entropy(x:to "cuda", ids:to "cuda"):item()
      assert.is_true(got == want or (got ~= got and want ~= want) or math.abs(got - want) < 1e-6, got .. " " .. want)
      for _, name in ipairs { "softmax", "log_softmax" } do
        local host, device = F[name](x, 2):tolist()[1], F[name](x:to "cuda", 2):to("cpu"):tolist()[1]
        for k = 1, 3 do
          local a, b = host[k], device[k]
          assert.is_true(a == b or (a ~= a and b ~= b) or math.abs(a - b) < 1e-6, name .. " " .. a .. " " .. b)
        end
      end
    end
  end)
end)
