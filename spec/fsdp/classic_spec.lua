--- fsdp.FSDP trains as one process does, under every strategy, with one flat parameter a unit and with the original ones.
local ranks = require "spec.support.ranks"

local MODELS = { "net", "nested_wrapped_module", "non_uniform_req_grad", "mlp_stack", "exec_order", "transformer_lm" }

local function load()
  local ms = require "moonshard"
  return ms, ms.fsdp, require "spec.support.golden", require "spec.support.wrapped"
end

-- Steps of def's training on a reference that sees every rank's batch, and on its twin.
local function compare(def, rank, world, options, steps)
  local ms, fsdp, golden, wrapped = load()
  golden.phase = 0
  local function make()
    local model = def.make { dtype = "float64" }
    golden.fill(model)
    return model
  end
  local reference, model = make(), make()
  model = wrapped.quietly(wrapped.fsdp, def, model, options)
  fsdp.check_sharded_parity(reference, model)
  local reference_optim, optim = def.optim(reference:parameters()), def.optim(model:parameters())
  for step = 0, steps - 1 do
    ms.scope(function()
      local want
      for r = 0, world - 1 do
        local loss = def.loss(reference, r, step, golden)
        if r == rank then want = loss:item() end
        ;(loss / world):backward()
      end
      local loss = def.loss(model, rank, step, golden)
      assert.near(want, loss:item(), 1e-9 * math.max(1, math.abs(want)))
      loss:backward()
    end)
    fsdp.check_sharded_parity(reference, model)
    reference_optim:step()
    optim:step()
    fsdp.check_sharded_parity(reference, model)
    reference_optim:zero_grad()
    optim:zero_grad()
  end
end

for world = 1, 4 do
  ranks.describe(world, ("FSDP on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        for _, name in ipairs(MODELS) do
          -- One flat parameter has one requires_grad.
          if pieces or name ~= "non_uniform_req_grad" then
            it(("trains %s, %s, use_orig_params = %s"):format(name, strategy, tostring(pieces)), function(rank)
              compare(require("spec.support.models." .. name), rank, world, { sharding_strategy = strategy, use_orig_params = pieces }, 3)
            end)
          end
        end

        it(("trains a module that is used twice, one that is not used and a tied weight, %s, use_orig_params = %s"):format(strategy, tostring(pieces)),
          function(rank)
            local ms = load()
            local Twice = ms.nn.Module:extend "Twice"
            function Twice:init(kind)
              self.once, self.again, self.never = ms.nn.Linear(5, 5, kind), ms.nn.Linear(5, 5, kind), ms.nn.Linear(5, 5, kind)
              self.tied = ms.nn.Linear(5, 5, kind)
              self.tail = ms.nn.Linear(5, 5, kind)
              self.tail.weight = self.tied.weight
            end
            function Twice:forward(x) return self.tail(self.tied(self.again(self.once(self.again(x):tanh()):tanh()))) end
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
