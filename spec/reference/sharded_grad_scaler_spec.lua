--- The reference suite test_fsdp_sharded_grad_scaler (behaviour.md 1.4, 1.5): each test with its whole grid, at 2, 3 and 4 ranks
--- where it has ranks.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"

local function scaler_of(options)
  options.process_group = ms.dist.self_group()          -- a process group of one
  return ms.amp.ShardedGradScaler(options)
end

describe("TestShardGradScaler", function()
  it("test_grad_scaling", function()
    local scaler = scaler_of { init_scale = 2, enabled = true }
    local function t0() return ms.full({ 1 }, 4) end
    local function t1() return ms.full({ 1 }, 8) end
    local outputs = scaler:scale { t1(), { t0(), t1() }, { t0(), t1() } }
    assert.equal(16, outputs[1]:item())
    assert.equal(8, outputs[2][1]:item())
    assert.equal(16, outputs[2][2]:item())
    assert.equal(8, outputs[3][1]:item())
    assert.equal(16, outputs[3][2]:item())
    assert.equal(t1().device, scaler.scale_tensor.device)
  end)

  it("test_scaling_unscaling_sparse", function()
    local _ = ms.fsdp.FSDP                                          -- loaded: tensors that are not sharded are taken as they are
    local scaler = scaler_of { init_scale = 2, enabled = true }
    local inv_scale, found_inf = ms.full({ 1 }, 0.5), ms.full({ 1 }, 0)
    local function sparse(rows, cols, values, dtype)
      return ms.sparse_coo(ms.tensor({ rows, cols }, { dtype = "int64" }), ms.tensor(values, { dtype = dtype }), { 2, 3 })
    end
    local s = sparse({ 0, 1, 1 }, { 2, 0, 2 }, { 16, 32, 64 }, "float32")
    local s1 = s:clone()
    s1.grad = s:clone()
    local optimizer = ms.optim.SGD({ s1 }, { lr = 1 })
    found_inf:zero_()
    assert.equal(0, scaler:unscale_grads_(optimizer, inv_scale, found_inf)[s1.device]:item())
    assert.is_true(s1.grad:to_dense():equal((s / 2):to_dense()))

    s1.grad = sparse({ 0, 1, 1 }, { 2, 0, 2 }, { 16, 32, math.huge }, "float32")
    found_inf:zero_()
    assert.equal(1, scaler:unscale_grads_(optimizer, inv_scale, found_inf)[s1.device]:item())

    -- Each value is finite in float16, their sum at the same place is not. The suite's optimizer still has the tensor from before, whose
    -- gradient is infinite: here it has the new one.
    local half = sparse({ 1, 1, 1 }, { 0, 0, 2 }, { 2 ^ 15, 2 ^ 15, 1 }, "float16")
    half.grad = half:clone()
    found_inf:zero_()
    assert.equal(1, scaler:unscale_grads_(ms.optim.SGD({ half }, { lr = 1 }), inv_scale, found_inf)[half.device]:item())
    local fine = sparse({ 1, 1, 1 }, { 0, 1, 2 }, { 2 ^ 15, 2 ^ 15, 1 }, "float16")
    fine.grad = fine:clone()
    found_inf:zero_()
    assert.equal(0, scaler:unscale_grads_(ms.optim.SGD({ fine }, { lr = 1 }), inv_scale, found_inf)[fine.device]:item())
  end)

  it("test_inf_gradients_skip_optim_step", function()
    local scaler = scaler_of { init_scale = 2, enabled = true }
    local loss, t0 = ms.full({ 1 }, 4), ms.tensor { math.huge }
    t0.grad = t0:clone()
    local optimizer = ms.optim.SGD({ t0 }, { lr = 1 })
    scaler:scale(loss)
    assert.is_nil(scaler:step(optimizer))
    -- A step that is taken has a result.
    local t1 = ms.tensor { 1 }
    t1.grad = t1:clone()
    assert.is_true(scaler:step(ms.optim.SGD({ t1 }, { lr = 1 })))
  end)
end)

local function named(...)
  local out = {}
  for k = 1, select("#", ...) do out[k] = (select(k, ...)) or "none" end
  return table.concat(out, "_")
end

for world = 2, 4 do
  ranks.describe(world, ("TestShardedGradScalerParityWithDDP on %d ranks"):format(world), function()
    for _, offload in ipairs { true, false } do
      for _, strategy in ipairs { "shard_grad_op", false } do
        for _, mixed in ipairs { "mixed_precision", false } do
          for _, pieces in ipairs { "use_orig_params", false } do
            it("test_fsdp_ddp_parity_with_grad_scaler_" .. named(offload and "offload_true" or "offload_false", strategy, mixed, pieces), function()
              local parity = require "spec.support.parity"
              -- The default scale would overflow in the first steps.
              local model = pieces and "non_uniform_req_grad" or "nested_wrapped_module"
              local modes = { "after", "before" }
              if offload then modes[3] = "never" end
              for _, mode in ipairs(modes) do
                parity.check(require("spec.support.models." .. model), {
                  strategy = strategy or nil, dtype = mixed and "float16" or "float32", use_orig_params = pieces and true, cpu_offload = offload,
                  device_init_mode = mode, scaler = { init_scale = pieces and 2 ^ 11 or nil },
                })
              end
            end)
          end
        end
      end
    end

    for _, pieces in ipairs { false, true } do
      for _, offload in ipairs { true, false } do
        it(("test_sharded_grad_scaler_found_inf, use_orig_params = %s, offload = %s"):format(tostring(pieces), tostring(offload)), function(rank)
          local zoo = require "spec.support.models.transformer_with_shared_params"
          local group = ms.dist.default_group()
          local function build() return zoo.init(group, "no_fsdp", "before", { deterministic = true }) end
          local reference = ms.nn.DDP(build(), { process_group = group })
          local model = ms.fsdp.FSDP(build(), {
            use_orig_params = pieces, cpu_offload = offload,
            auto_wrap_policy = ms.fsdp.wrap.module_wrap_policy { ms.nn.TransformerEncoderLayer, ms.nn.TransformerDecoderLayer },
          })
          local cases = {
            { reference, ms.optim.Adam(reference:parameters(), { lr = 1e-2 }), ms.amp.GradScaler { init_scale = 2 } },
            { model, ms.optim.Adam(model:parameters(), { lr = 1e-2 }), ms.amp.ShardedGradScaler { init_scale = 2 } },
          }
          ms.manual_seed(42 + rank + 1)
          for iteration = 0, 9 do
            local should_find_inf = iteration % 2 == 0
            local losses = {}
            for _, case in ipairs(cases) do
              local m, optimizer, scaler = unpack(case)
              local input = m.module:get_input(ms.default_device())
              optimizer:zero_grad()
              local scaled = scaler:scale(m.module:get_loss(input, m(unpack(input))))
              losses[#losses + 1] = scaled:item()
              scaled:backward()
              local before, params = {}, {}
              for _, p in ipairs(m:parameters()) do
                -- A piece may be empty on this rank: it cannot change.
                if p.grad and p:numel() > 0 then
                  params[#params + 1] = p
                  before[#params] = p:detach():clone()
                end
              end
              if should_find_inf and (m == reference or rank == 0) then params[1].grad:fill_(math.huge) end
              local scale = scaler:get_scale()
              scaler:step(optimizer)
              scaler:update()
              assert.equal(should_find_inf and scale * scaler:get_backoff_factor() or scale, scaler:get_scale())
              assert.is_true(#params > 0)
              for k, p in ipairs(params) do assert.equal(should_find_inf, p:equal(before[k])) end
            end
            if iteration == 0 then assert.near(losses[1], losses[2], 1e-5 * math.abs(losses[1])) end
          end
        end)
      end
    end
  end)
end
