-- SPDX-License-Identifier: MIT
--- FSDP trains as DDP and one process do: every model of spec/support/models, every strategy and dtype, with and
--- without offload and use_orig_params, on 2, 3 and 4 ranks; the hybrid strategies on 4, as 2 replicas of 2 shards. All
--- combinations are tested (see `all`), except frozen and trained parameters in one flat parameter (`pieces_only`).
local ranks = require "spec.support.ranks"

local function zoo(name) return require("spec.support.models." .. name) end
local function finds_unused(m) return require("moonshard").nn.DDP(m, { find_unused_parameters = true }) end

-- units: how many FSDP instances a model's init makes in float32. Models not included: DummyDDP wraps a reference;
-- LinearWithSleep and SaveForwardInputsModel are for timings and casts.
local MODELS = {
  { "nested_wrapped_module", units = 3 },
  { "always_wrap_nested_wrapped_module", units = 8 },
  { "non_uniform_req_grad", units = 3, pieces_only = true },
  { "module_with_delay", units = 3 },
  -- The expert differs between ranks. The unwrapped model reduces the gradients of the other parameters itself.
  { "mixture_of_experts", units = 2, reference = function(m) return zoo "dummy_ddp".DummyDDP(m) end, save_model = false,
    one_process = function()
    return zoo "mixture_of_experts".alone(require("moonshard").dist.default_group(), "no_fsdp", "before",
      { deterministic = true })
  end },
  { "transformer_with_shared_params", units = 5, kinks = true },
  { "mlp", units = 1, kinks = true },
  { "mlp_stack", units = 3, kinks = true },
  { "double_linear", units = 2, kinks = true },
  { "double_linear", title = "double_linear without its second", units = 2, kinks = true,
    given = { use_second_linear = false }, reference = finds_unused },
  { "skip_model", units = 3, unmanaged = "linear_skip" },
  { "net", units = 2, kinks = true },
  { "exec_order", units = 2, kinks = true },
  { "transformer", units = 2, loss_dtype = "float32" },
  { "nested_model", units = 6, kinks = true },
  { "dummy_model", units = 7, kinks = true },
  { "linear_mixed_precision", units = 2 },
}

-- On 3 ranks, by which few sizes can be divided, every combination runs, and on 4 those of hybrid_shard. Elsewhere each
-- model, strategy and dtype has one of its combinations of offload and use_orig_params, in turn, so that each of these
-- meets each model, each strategy and each dtype: other numbers of ranks change only the sizes of shards and which of
-- them are empty, and 3 ranks have empty shards and others. MOONSHARD_LONG=1 (scripts/test --long) runs all
-- combinations on every number of ranks; so do the specs that run this one on a GPU.
local all = os.getenv "MOONSHARD_LONG" or os.getenv "MOONSHARD_SPEC_DEVICE"

local function options_of(model, world, strategy, turn)
  local list = {}
  for _, offload in ipairs { false, true } do
    if not model.pieces_only then list[#list + 1] = { offload, false } end
    list[#list + 1] = { offload, true }
  end
  if all or world == 3 or strategy == "hybrid_shard" then return list end
  return { list[turn % #list + 1] }
end

for world = 2, 4 do
  local strategies = { "full_shard", "shard_grad_op", "no_shard", world == 4 and "hybrid_shard" or nil, world == 4
    and "hybrid_shard_zero2" or nil }
  -- One gang for all models: starting the ranks costs as much as training some of them.
  ranks.describe(world, ("on %d ranks"):format(world), function()
    local mesh
    setup(function()
      if world == 4 then
        mesh = require("moonshard").dist.init_device_mesh("cpu", { 2, 2 }, { names = { "dp_replicate", "dp_shard" } })
      end
    end)
    for m, model in ipairs(MODELS) do
      for s, strategy in ipairs(strategies) do
        for d, dtype in ipairs { "float32", "float16", "bfloat16" } do
          for _, options in ipairs(options_of(model, world, strategy, m + s + d + world)) do
            local offload, pieces = options[1], options[2]
            it(("%s trains as DDP and one process do: %s, %s, offload = %s, use_orig_params = %s"):format(model.title
              or model[1], strategy, dtype, tostring(offload), tostring(pieces)), function()
              require("spec.support.parity").check(zoo(model[1]), {
                strategy = strategy, dtype = dtype, cpu_offload = offload, use_orig_params = pieces,
                device_mesh = strategy:find "^hybrid" and mesh,
                reference = model.reference, one_process = model.one_process or true, save_model = model.save_model,
                given = model.given,
                loss_dtype = model.loss_dtype, unmanaged = model.unmanaged, kinks = model.kinks, units = model.units,
              })
            end)
          end
        end
      end
    end
  end)
end
