-- SPDX-License-Identifier: MIT
--- Gradient scalers on a GPU, which decides by itself whether a step is skipped, against the CPU.
local engine = require "moonshard.core.ffi"
local ms = require "moonshard"
local on_gpu = require "spec.support.on_gpu"()
local optim, amp = ms.optim, ms.amp

-- Multiples of 1/16: the CPU's steps count subnormal numbers as 0, and float16 has large ones.
local function draw(n, dtype) return (ms.randint(-40, 40, { n }):to "float32" / 16):to(dtype) end

-- Leaves on the CPU and copies of them on the GPU.
local function leaves(dtype)
  local here, there = {}, {}
  for k, n in ipairs { 1, 7, 768, 40001 } do
    here[k] = draw(n, dtype):requires_grad_()
    there[k] = here[k]:detach():to "cuda":requires_grad_()
  end
  return here, there
end

-- Gives both the same gradients; that of the second leaf is `bad` somewhere, unless it is nil. One is not aligned.
local function give(here, there, bad)
  for k, p in ipairs(here) do
    local g = draw(p:numel() + 1, p.dtype)
    if k == 2 and bad then g[4] = bad end
    p.grad = g:narrow(1, k == 3 and 2 or 1, p:numel()):clone()
    there[k].grad = k == 3 and g:to "cuda":narrow(1, 2, p:numel()) or p.grad:to "cuda"
  end
end

local function same(a, b, what) assert.is_true(a:detach():cpu():equal(b:detach():cpu()), what) end

describe("a scaler on a GPU", function()
  local BAD = { [1] = math.huge, [3] = 0 / 0, [4] = -math.huge, [8] = math.huge }  -- by step
  for _, case in ipairs {
    { "GradScaler", "SGD", "float32", { lr = 0.1 } },
    { "GradScaler", "SGD", "float64", { lr = 0.1, momentum = 0.9 } },
    { "GradScaler", "AdamW", "float32", { lr = 0.1 } },
    { "GradScaler", "AdamW", "bfloat16", { lr = 0.1, master_weights = true } },
    { "GradScaler", "RAdam", "float32", { lr = 0.1 } },
    { "ShardedGradScaler", "Adam", "bfloat16", { lr = 0.1, amsgrad = true } },
    { "ShardedGradScaler", "SGD", "float16", { lr = 0.125 } },
    { "ShardedGradScaler", "RMSprop", "float32", { lr = 0.1, momentum = 0.5 } },
  } do
    local scaler, name, dtype, given = unpack(case)
    on_gpu(("skips steps with the bits, states and scales of the CPU: %s, %s, %s"):format(scaler, name, dtype), function()
      ms.manual_seed(7)
      local here, there = leaves(dtype)
      local a, b = optim[name](here, given), optim[name](there, given)
      local o = { init_scale = 8, growth_interval = 2, growth_factor = 3, backoff_factor = 0.3 }
      local s, t = amp[scaler](o), amp[scaler](o)
      for step = 1, 9 do
        s:scale(ms.ones(1))
        t:scale(ms.ones(1, { device = "cuda" }))
        give(here, there, BAD[step])
        if step % 3 == 0 then
          s:unscale_(a)
          t:unscale_(b)
        end
        s:step(a)
        t:step(b)
        s:update()
        t:update()
        for k, p in ipairs(here) do
          same(p, there[k], "parameter")
          if not BAD[step] then same(p.grad, there[k].grad, "gradient") end
        end
        if step > 6 then assert.are.same(s:state_dict(), t:state_dict()) end  -- before, only the next step reads counts
      end
      for k, p in ipairs(here) do
        local want, got = a:state_of(p), b:state_of(there[k])
        assert.are.equal(5, want.step)
        for key, value in pairs(want) do
          if key == "step" then assert.are.equal(value, got.step) else same(value, got[key], key) end
        end
      end
    end)
  end

  on_gpu("counts no step that it has skipped, and keeps no state of a first one", function()
    local here, there = leaves "float32"
    local o, scaler = optim.AdamW(there), amp.GradScaler { init_scale = 4 }
    scaler:scale(ms.ones(1, { device = "cuda" }))
    give(here, there, math.huge)
    assert.is_true(scaler:step(o))
    scaler:update()
    assert.is_nil(o:state_of(there[1]))
    for step = 1, 3 do
      give(here, there, step == 2 and math.huge or nil)
      scaler:step(o)
      scaler:update()
      assert.are.equal(step == 1 and 1 or step - 1, o:state_of(there[1]).step)
    end
    give(here, there, math.huge)
    scaler:step(o)
    scaler:update()
    assert.are.equal(2, o:state_dict().state[1].step)
    assert.are.equal(0.5, scaler:get_scale())
    o:load_state_dict(o:state_dict())
    assert.are.equal(2, o:state_of(there[1]).step)
  end)

  on_gpu("lets the host decide for an optimizer with hooks, and for gradients on several devices", function()
    local here, there = leaves "float32"
    local o, scaler = optim.SGD(there, { lr = 1 }), amp.GradScaler { init_scale = 4 }
    local steps = 0
    o:register_step_post_hook(function() steps = steps + 1 end)
    scaler:scale(ms.ones(1, { device = "cuda" }))
    give(here, there, math.huge)
    assert.is_nil(scaler:step(o))
    scaler:update()
    give(here, there)
    assert.is_true(scaler:step(o))
    scaler:update()
    assert.are.equal(1, steps)
    local mixed = { here[1], there[2], there[3], there[4] }
    local both = optim.SGD(mixed, { lr = 1 })
    give(here, there, math.huge)
    assert.is_nil(scaler:step(both))
    scaler:update()
    assert.are.equal(1, scaler:get_scale())
  end)

  on_gpu("does not grow beyond float32", function()
    local here, there = leaves "float32"
    local o, scaler = optim.SGD(there, { lr = 0 }), amp.GradScaler { init_scale = 2 ^ 127, growth_interval = 1 }
    scaler:scale(ms.zeros(1, { device = "cuda" }))
    for _ = 1, 2 do
      give(here, there)
      scaler:step(o)
      scaler:update()
    end
    assert.are.equal(2 ^ 127, scaler:get_scale())
  end)

  on_gpu("may be used between repetitions of a captured step", function()
    local SKIPS = { [3] = true, [7] = true, [9] = true }    -- 3 and 9 are not captured, 7 is
    local function trainer(p)
      local o = optim.Adam({ p }, { lr = 0.125 })
      local scaler = amp.GradScaler { init_scale = 8, growth_interval = 3 }
      return function(x)
        scaler:scale((p * x):sum()):backward()
        scaler:step(o)
        scaler:update()
        o:zero_grad()
      end, scaler
    end
    ms.manual_seed(3)
    local here = draw(100, "float32"):requires_grad_()
    local there = here:detach():to "cuda":requires_grad_()
    local step, want = trainer(here)
    local eager, scaler = trainer(there)
    local captured = ms.capture(eager)
    for k = 1, 12 do
      local x = draw(100, "float32")
      if SKIPS[k] then x[1] = math.huge end
      step(x)
      local fn = k % 3 == 0 and eager or captured
      fn(x:to "cuda")
      same(here, there, "parameter after step " .. k)
    end
    assert.are.same(want:state_dict(), scaler:state_dict())
    captured:release()
  end)

  for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
    on_gpu("unscales gradients through C as the CPU does, " .. dtype, function()
      for _, n in ipairs { 5, 2050, 40001 } do
        for first = 1, 2 do                              -- the second is not aligned
          for stop = 0, 1 do
            for _, bad in ipairs { 0, math.huge } do
              local given, out = {}, {}
              for k = 1, 3 do given[k] = draw(n + 1, dtype) end
              if bad > 0 then given[2][3] = bad end
              for at, device in ipairs { "cpu", "cuda" } do
                local g, ids = {}, engine.ffi.new "ms_id[3]"
                for k = 1, 3 do
                  g[k] = given[k]:clone():to(device):narrow(1, first, n)
                  ids[k - 1] = g[k].id
                end
                local inverse, found = ms.full({}, 0.5, { device = device }), ms.zeros({}, { device = device })
                assert.are.equal(0, engine.lib.ms_unscale_gradients(3, ids, inverse.id, found.id, stop))
                g[4] = found
                out[at] = g
              end
              assert.are.equal(bad > 0 and 1 or 0, out[1][4]:item())
              for k = 1, 4 do same(out[1][k], out[2][k], ("gradient %d of %d"):format(k, n)) end
            end
          end
        end
      end
    end)
  end

  for _, device in ipairs { "cpu", "cuda" } do
    it("adapts the scale through C on " .. device, function()
      if device == "cuda" and not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
      ms.scope(function()
        local function adapted(scale, found, on)
          local s, f = ms.full({}, scale, { device = device }), ms.full({}, found, { device = on or device })
          local status = engine.lib.ms_adapt_scale(s.id, f.id, 0.5, 2)
          return status == 0 and s:item() or engine.ffi.string(engine.lib.ms_error())
        end
        assert.are.equal(16, adapted(8, 0))
        assert.are.equal(4, adapted(8, 2))
        assert.are.equal(2 ^ 127, adapted(2 ^ 127, 0))
        assert.matches("update: found_inf is .*meta.*, expected one float32 element", adapted(8, 0, "meta"))
      end)
    end)
  end
end)
