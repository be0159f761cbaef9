-- SPDX-License-Identifier: MIT
--- nn.utils.clip_grad_norm_ on a GPU, against the CPU.
local ms = require "moonshard"
local on_gpu = require "spec.support.on_gpu"()
local clip = ms.nn.utils.clip_grad_norm_

--- Parameters with gradients on the CPU, and copies on these devices: shapes from one element to several blocks, and a
--- gradient that is not aligned to 16 bytes.
local function parameters(dtype, devices, sizes)
  local here, there = {}, {}
  for k, n in ipairs(sizes or { 1, 7, 768, 16384, 40001, 8, 4099 }) do
    for _, list in ipairs { here, there } do list[k] = ms.zeros(n, { dtype = dtype }):requires_grad_() end
    local device = devices[(k - 1) % #devices + 1]
    local given = ms.randn(n + 1, { dtype = dtype })
    local odd = k > 5
    local function grad(on)
      if odd then return given:clone():to(on):narrow(1, 2, n) end
      return given:narrow(1, 1, n):clone():to(on)
    end
    there[k] = ms.zeros(n, { dtype = dtype, device = device }):requires_grad_()
    here[k].grad, there[k].grad = grad "cpu", grad(device)
  end
  return here, there
end

local BOUND = { float32 = 1e-6, float64 = 1e-14, float16 = 1e-3, bfloat16 = 8e-3 }

describe("clip_grad_norm_ on a GPU", function()
  for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
    for _, p in ipairs { 2, 1, 3, 0.5, math.huge } do
      on_gpu(("scales as on the CPU: %s, norm %g"):format(dtype, p), function()
        ms.manual_seed(3)
        local here, there = parameters(dtype, { "cuda" })
        local want, got = clip(here, 0.5, { norm_type = p }), clip(there, 0.5, { norm_type = p })
        assert.are.equal("cuda:0", got.device)
        assert.are.equal(want.dtype, got.dtype)
        ms.testing.assert_close(got:cpu(), want, { rtol = 1e-6, atol = 0 })
        for k = 1, #here do
          ms.testing.assert_close(there[k].grad:cpu(), here[k].grad, { rtol = BOUND[dtype], atol = 1e-9 })
        end
      end)
    end
  end

  on_gpu("scales by a norm that is given, infinite gradients too", function()
    for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
      local here, there = parameters(dtype, { "cuda" })
      for _, list in ipairs { here, there } do
        for k = 3, 5 do list[k].grad:narrow(1, 9, 700):fill_(k == 4 and -math.huge or math.huge) end
        ms.nn.utils.clip_grads_with_norm_(list, 0.5, 10)
      end
      for k = 1, #here do
        assert.is_true(ms.allclose(there[k].grad:cpu(), here[k].grad, { rtol = BOUND[dtype], atol = 1e-9 }), dtype)
      end
    end
  end)

  on_gpu("has the CPU's norm of gradients with zeros, ones, infinities and NaN", function()
    for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
      for _, p in ipairs { 3, 0.5 } do
        for _, bad in ipairs { 0, math.huge, 0 / 0 } do
          local here, there = parameters(dtype, { "cuda" }, { 768, 7, 33 })
          for _, list in ipairs { here, there } do
            for k = 2, 3 do list[k].grad:fill_(bad) end
          end
          local want, got = clip(here, 0.5, { norm_type = p }), clip(there, 0.5, { norm_type = p })
          assert.is_true(ms.allclose(got:cpu(), want, { rtol = 1e-3, equal_nan = true }), ("%s %g %g"):format(dtype, p, bad))
        end
      end
    end
  end)

  on_gpu("has the CPU's norm of more gradients than a block has threads", function()
    local sizes = {}
    for k = 1, 300 do sizes[k] = k % 3 + 1 end
    for _, p in ipairs { 2, 3, math.huge } do
      local here, there = parameters("float32", { "cuda" }, sizes)
      local want, got = clip(here, 0.5, { norm_type = p }), clip(there, 0.5, { norm_type = p })
      assert.is_true(ms.allclose(got:cpu(), want, { rtol = 1e-6 }))
      for k = 1, #here do assert.is_true(ms.allclose(there[k].grad:cpu(), here[k].grad, { rtol = 1e-6 })) end
    end
    -- An infinity in any of them is found while they are unscaled.
    for _, bad in ipairs { 0, 1, 129, 257, 300 } do
      local _, there = parameters("float32", { "cuda" }, sizes)
      local kept = {}
      for k, t in ipairs(there) do
        if k == bad then t.grad:fill_(math.huge) end
        kept[k] = t.grad:clone()
      end
      local scaler, optimizer = ms.amp.ShardedGradScaler { init_scale = 2 }, ms.optim.SGD(there, { lr = 1 })
      scaler:scale(ms.ones(1, { device = "cuda" }))
      scaler:unscale_(optimizer)
      for k, t in ipairs(bad > 0 and {} or there) do assert.is_true(t.grad:cpu():equal((kept[k] / 2):cpu())) end
      scaler:step(optimizer)
      assert.are.equal(bad > 0, there[1]:detach():cpu():equal(ms.zeros(sizes[1])))
    end
  end)

  on_gpu("changes no gradient whose norm is small enough, or where only the norm is wanted", function()
    for _, limit in ipairs { 1e6, math.huge } do
      local here, there = parameters("float32", { "cuda" })
      clip(there, limit)
      for k = 1, #here do assert.is_true(there[k].grad:cpu():equal(here[k].grad)) end
    end
  end)

  on_gpu("makes all gradients NaN if one is", function()
    local _, there = parameters("float32", { "cuda" })
    there[4].grad[5] = 0 / 0
    local norm = clip(there, 1):item()
    assert.are_not.equal(norm, norm)
    for k = 1, #there do assert.is_true(there[k].grad:cpu():isnan():all():item()) end
  end)

  on_gpu("has one norm for gradients on several devices", function()
    local devices = ms.cuda.device_count() > 1 and { "cpu", "cuda:1", "cuda:0" } or { "cpu", "cuda:0" }
    local here, there = parameters("float32", devices)
    local want, got = clip(here, 0.5), clip(there, 0.5)
    assert.are.equal("cpu", got.device)
    ms.testing.assert_close(got, want, { rtol = 1e-6, atol = 0 })
    for k = 1, #here do ms.testing.assert_close(there[k].grad:cpu(), here[k].grad, { rtol = 1e-6, atol = 1e-9 }) end
  end)
end)

describe("an optimizer's step on a GPU", function()
  local optim = ms.optim
  for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
    for _, p in ipairs { 2, 1, math.huge } do
      on_gpu(("clips in the step with the bits of clip_grad_norm_ before it: %s, norm %g"):format(dtype, p), function()
        ms.manual_seed(4)
        local _, apart = parameters(dtype, { "cuda" })
        local a, one = optim.AdamW(apart, { lr = 0.1 }), {}
        for k, t in ipairs(apart) do one[k] = t:detach():clone():requires_grad_() end
        local b = optim.AdamW(one, { lr = 0.1 })
        for _ = 1, 2 do
          local before = {}
          for k, t in ipairs(apart) do before[k], one[k].grad = t.grad:clone(), t.grad end
          local got = b:step_clipped(0.5, { norm_type = p })
          for k, t in ipairs(one) do
            assert.is_true(t.grad:cpu():equal(before[k]:cpu()))
            apart[k].grad = before[k]
          end
          local want = clip(apart, 0.5, { norm_type = p })
          a:step()
          assert.are.equal("cuda:0", got.device)
          assert.is_true(got:cpu():equal(want:cpu()))
          for k, t in ipairs(one) do assert.is_true(t:detach():cpu():equal(apart[k]:detach():cpu())) end
        end
      end)
    end
  end

  on_gpu("clips in the step where parameters are on several devices", function()
    ms.manual_seed(5)
    local here, there = parameters("float32", { "cpu", "cuda" })
    local a, b = optim.SGD(here, { lr = 1 }), optim.SGD(there, { lr = 1 })
    local want, got = a:step_clipped(0.5), b:step_clipped(0.5)
    assert.are.equal("cpu", got.device)
    ms.testing.assert_close(got, want, { rtol = 1e-6, atol = 0 })
    for k = 1, #here do ms.testing.assert_close(there[k]:detach():cpu(), here[k]:detach(), { rtol = 1e-5, atol = 1e-7 }) end
  end)

  for _, name in ipairs { "SGD", "AdamW" } do
    for _, dtype in ipairs { "float16", "bfloat16" } do
      on_gpu(("steps masters with the CPU's bits: %s, %s"):format(name, dtype), function()
        ms.manual_seed(6)
        local here, there = {}, {}
        for k, n in ipairs { 1, 768, 40001 } do
          here[k] = ms.randn(n, { dtype = dtype }):requires_grad_()
          there[k] = here[k]:detach():to "cuda":requires_grad_()
        end
        local o = { lr = 1e-4, master_weights = true }
        local a, b = optim[name](here, o), optim[name](there, o)
        for _ = 1, 3 do
          for k, p in ipairs(here) do
            p.grad = ms.randn(p:numel(), { dtype = dtype })
            there[k].grad = p.grad:to "cuda"
          end
          a:step()
          b:step()
        end
        for k, p in ipairs(here) do
          assert.is_true(b:state_of(there[k]).master:cpu():equal(a:state_of(p).master))
          assert.is_true(there[k]:detach():cpu():equal(p:detach()))
        end
      end)
    end
  end
end)
