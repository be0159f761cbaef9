-- SPDX-License-Identifier: MIT
--- The models of spec/support/models with shards on the CPU and computation on a GPU (the emulated one if there is no
--- other): FSDP trains as DDP and one process do on that device, however the module gets there.
local ranks = require "spec.support.ranks"

local function zoo(name) return require("spec.support.models." .. name) end

-- Models with convolutions or batch norms are not included. `once`: with one strategy only, because attention is slow
-- on the emulator.
local MODELS = {
  { "nested_wrapped_module" },
  { "always_wrap_nested_wrapped_module" },
  { "non_uniform_req_grad", pieces_only = true },
  { "mixture_of_experts", reference = function(m) return zoo "dummy_ddp".DummyDDP(m) end, save_model = false,
    one_process = function()
    return zoo "mixture_of_experts".alone(require("moonshard").dist.default_group(), "no_fsdp", "before",
      { deterministic = true, device = "cuda:0" })
  end },
  { "transformer_with_shared_params", kinks = true, given = { add_bn = false }, once = true },
  { "mlp", kinks = true },
  { "mlp_stack", kinks = true },
  { "double_linear", kinks = true },
  { "net", kinks = true },
  { "exec_order", kinks = true },
  { "transformer", loss_dtype = "float32", once = true },
  { "nested_model", kinks = true },
  { "dummy_model", kinks = true },
  { "linear_mixed_precision" },
}

ranks.describe(2, "a model with CPU offload and computation on a GPU #cuda", function()
  -- Combinations of strategies, dtypes, ways onto the device and use_orig_params alternate.
  for turn, model in ipairs(MODELS) do
    for k, strategy in ipairs { "full_shard", not model.once and (turn % 2 == 0 and "shard_grad_op" or "no_shard")
      or nil } do
      local dtype = turn % 4 == 0 and k == 2 and "bfloat16" or "float32"
      local mode = ({ "before", "after", "never" })[(turn + k) % 3 + 1]
      local pieces = model.pieces_only or (turn + k) % 2 == 0
      it(("%s trains as DDP and one process do: %s, %s, moved %s, use_orig_params = %s"):format(model[1], strategy,
        dtype, mode, tostring(pieces)), function()
        require("spec.support.parity").check(zoo(model[1]), {
          strategy = strategy, dtype = dtype, cpu_offload = true, use_orig_params = pieces, device = "cuda:0",
          device_init_mode = mode,
          reference = model.reference, num_iters = model.once and 1, one_process = not model.once
          and (model.one_process or true),
          save_model = model.save_model, given = model.given,
          loss_dtype = model.loss_dtype, kinks = model.kinks,
        })
      end)
    end
  end
end)
