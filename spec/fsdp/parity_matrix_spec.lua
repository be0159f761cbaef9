--- FSDP = DDP = one process: every model of the zoo, strategy, dtype, with and without offload and original parameters.
local ranks = require "spec.support.ranks"

local MODELS = { "nested_wrapped_module", "always_wrap_nested_wrapped_module", "non_uniform_req_grad", "mixture_of_experts",
  "transformer_with_shared_params" }

for world = 2, 4 do
  for _, name in ipairs(MODELS) do
    ranks.describe(world, ("%s on %d ranks"):format(name, world), function()
      for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
        for _, dtype in ipairs { "float32", "float16", "bfloat16" } do
          for _, offload in ipairs { false, true } do
            for _, pieces in ipairs { false, true } do
              -- One flat parameter has one requires_grad.
              if pieces or name ~= "non_uniform_req_grad" then
                it(("trains as DDP and one process do: %s, %s, offload = %s, use_orig_params = %s"):format(strategy, dtype, tostring(offload),
                  tostring(pieces)), function()
                  local experts = name == "mixture_of_experts"
                  require("spec.support.parity").check(require("spec.support.models." .. name), {
                    strategy = strategy, dtype = dtype, cpu_offload = offload, use_orig_params = pieces,
                    -- Its expert is another one on every rank; unwrapped it reduces the rest itself.
                    reference = experts and require "spec.support.models.dummy_ddp".DummyDDP or nil,
                    one_process = not experts,
                    save_model = not experts,
                  })
                end)
              end
            end
          end
        end
      end
    end)
  end
end
