-- SPDX-License-Identifier: MIT
--- fsdp.FSDP trains as one process does, under every strategy, with one flat parameter per unit and with the original
--- parameters.
local ranks = require "spec.support.ranks"

local MODELS = { "net", "nested_wrapped_module", "non_uniform_req_grad", "mlp_stack", "exec_order", "transformer_lm" }

local function compare(def, rank, world, options, steps)
  local wrapped = require "spec.support.wrapped"
  require("spec.support.sharded_parity").compare_with(function(model)
    return wrapped.quietly(wrapped.fsdp, def, model, options)
  end, def, rank, world, steps)
end

for world = 1, 4 do
  ranks.describe(world, ("FSDP on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        for _, name in ipairs(MODELS) do
          -- A flat parameter has one requires_grad, so it cannot combine frozen and trained parameters.
          if pieces or name ~= "non_uniform_req_grad" then
            it(("trains %s, %s, use_orig_params = %s"):format(name, strategy, tostring(pieces)), function(rank)
              compare(require("spec.support.models." .. name), rank, world,
                { sharding_strategy = strategy, use_orig_params = pieces }, 3)
            end)
          end
        end

        it(("trains a module that is used twice, one that is not used and a tied weight, %s, use_orig_params = %s"):format(strategy, tostring(pieces)),
          function(rank)
            local ms = require "moonshard"
            local Twice = ms.nn.Module:extend "Twice"
            function Twice:init(kind)
              self.once, self.again, self.never = ms.nn.Linear(5, 5, kind), ms.nn.Linear(5, 5, kind),
                ms.nn.Linear(5, 5, kind)
              self.tied = ms.nn.Linear(5, 5, kind)
              self.tail = ms.nn.Linear(5, 5, kind)
              self.tail.weight = self.tied.weight
            end
            function Twice:forward(x)
              return self.tail(self.tied(self.again(self.once(self.again(x):tanh()):tanh())))
            end
            compare({
              make = function(kind) return Twice(kind) end,
              units = function(m) return { m.once, m.again, m.never } end,
              optim = function(params) return ms.optim.SGD(params, { lr = 1e-2, momentum = 0.9 }) end,
              loss = function(m, r, step, golden) return m(golden.x_of({ 3, 5 }, r, step)):sum() end,
            }, rank, world, { sharding_strategy = strategy, use_orig_params = pieces }, 3)
          end)
      end
    end
  end)
end
