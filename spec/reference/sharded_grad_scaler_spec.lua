-- SPDX-License-Identifier: MIT
--- The reference suite test_fsdp_sharded_grad_scaler: each test over ranks with its whole grid at 2, 3 and 4 ranks, on
--- the CPU and on a GPU (the emulated one if there is no other). amp/grad_scaler_spec has the tests of one rank.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"

local function named(...)
  local out = {}
  for k = 1, select("#", ...) do out[k] = (select(k, ...)) or "none" end
  return table.concat(out, "_")
end

-- The default scale overflows in the first steps of the model with use_orig_params.
local function scales(pieces, mixed)
  local first = { init_scale = pieces and 2 ^ 11 or nil }
  -- In float16 the gradients overflow at scales 2^16 and 2^15: both steps are skipped and no parameter changes. Those
  -- cases run one more step.
  if mixed and not pieces then return { { first, steps = 0 }, { { init_scale = 2 ^ 8 } } } end
  return { { first } }
end

local function parity(offload, strategy, mixed, pieces, device)
  local check = require "spec.support.parity".check
  local model = require("spec.support.models." .. (pieces and "non_uniform_req_grad" or "nested_wrapped_module"))
  -- A model made on the CPU for the CPU is moved neither before nor after it is wrapped.
  local moves = device ~= "cpu" or os.getenv "MOONSHARD_LONG"
  local modes = { "after", moves and "before" or nil }
  if offload then modes[#modes + 1] = "never" end
  for _, mode in ipairs(modes) do
    for _, scale in ipairs(scales(pieces, mixed)) do
      check(model, {
        strategy = strategy or nil, dtype = mixed and "float16" or "float32", use_orig_params = pieces and true,
        cpu_offload = offload,
        device_init_mode = mode, device = device, scaler = scale[1], steps = scale.steps,
      })
    end
  end
end

-- On the emulated GPU an iteration takes 0.4 s of each rank, so there the grid of found_inf is distributed over the
-- numbers of ranks, and each of its tests has 3 iterations: skipped, taken, skipped. So each kind of step follows the
-- other. A real GPU runs all of it.
local function emulated(device) return device ~= "cpu" and os.getenv "MOONSHARD_CUDA" ~= "real" end

local function is_run(world, device, pieces, offload)
  if not emulated(device) then return true end
  if world == 2 then return pieces ~= offload end
  return pieces == offload and pieces == (world == 3)
end

local function found_inf(pieces, offload, device, rank)
  local zoo = require "spec.support.models.transformer_with_shared_params"
  local group = ms.dist.default_group()
  local function build() return zoo.init(group, "no_fsdp", "before", { deterministic = true, device = device }) end
  local reference = ms.nn.DDP(build(), { process_group = group })
  local model = ms.fsdp.FSDP(build(), {
    use_orig_params = pieces, cpu_offload = offload,
    auto_wrap_policy = ms.fsdp.wrap.module_wrap_policy { ms.nn.TransformerEncoderLayer, ms.nn.TransformerDecoderLayer },
  })
  local home = offload and "cpu" or device
  for _, p in ipairs(model:parameters()) do assert.equal(home, p.device) end
  local cases = {
    { reference, ms.optim.Adam(reference:parameters(), { lr = 1e-2 }), ms.amp.GradScaler { init_scale = 2 } },
    { model, ms.optim.Adam(model:parameters(), { lr = 1e-2 }), ms.amp.ShardedGradScaler { init_scale = 2 } },
  }
  ms.manual_seed(42 + rank + 1)
  for iteration = 0, emulated(device) and 2 or 9 do
    local should_find_inf = iteration % 2 == 0
    local losses = {}
    for _, case in ipairs(cases) do
      local m, optimizer, scaler = unpack(case)
      local input = m.module:get_input(device)
      optimizer:zero_grad()
      local scaled = scaler:scale(m.module:get_loss(input, m(unpack(input))))
      assert.equal(device, scaler.scale_tensor.device)
      losses[#losses + 1] = scaled:detach()
      scaled:backward()
      local before, params = {}, {}
      for _, p in ipairs(m:parameters()) do
        -- A piece may be empty on this rank, and then cannot change.
        if p.grad and p:numel() > 0 then
          params[#params + 1] = p
          before[#params] = p:detach():clone()
        end
      end
      if m == model then assert.equal(home, params[1].grad.device) end
      if should_find_inf and (m == reference or rank == 0) then params[1].grad:fill_(math.huge) end
      scaler:step(optimizer)
      local scale = scaler:get_scale()
      scaler:update()
      assert.equal(should_find_inf and scale * scaler:get_backoff_factor() or scale, scaler:get_scale())
      assert.is_true(#params > 0)
      for k, p in ipairs(params) do assert.equal(should_find_inf, p:equal(before[k])) end
    end
    assert.equal(cases[1][3]:get_scale(), cases[2][3]:get_scale())
    -- The suite compares the losses of the first iteration every time.
    ms.testing.assert_close(losses[2], losses[1], { rtol = 1.3e-6, atol = 1e-5 })
  end
end

for _, device in ipairs { "cpu", "cuda:0" } do
  for world = 2, 4 do
    ranks.describe(world, ("TestShardedGradScalerParityWithDDP on %d ranks, %s"):format(world, device), function()
      for _, offload in ipairs { true, false } do
        for _, strategy in ipairs { "shard_grad_op", false } do
          for _, mixed in ipairs { "mixed_precision", false } do
            for _, pieces in ipairs { "use_orig_params", false } do
              it("test_fsdp_ddp_parity_with_grad_scaler_" .. named(offload and "offload_true" or "offload_false",
                strategy, mixed, pieces), function()
                parity(offload, strategy, mixed, pieces, device)
              end)
            end
          end
        end
      end

      for _, pieces in ipairs { false, true } do
        for _, offload in ipairs { true, false } do
          if is_run(world, device, pieces, offload) then
            it(("test_sharded_grad_scaler_found_inf, use_orig_params = %s, offload = %s"):format(tostring(pieces),
              tostring(offload)), function(rank)
              found_inf(pieces, offload, device, rank)
            end)
          end
        end
      end
    end)
  end
end
