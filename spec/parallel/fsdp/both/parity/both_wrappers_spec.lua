-- SPDX-License-Identifier: MIT
--- fully_shard and fsdp.FSDP in one model: fully_shard treats FSDP instances as existing units; FSDP refuses modules
--- that fully_shard has sharded.
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net()
  local ms, nn = load()
  ms.manual_seed(0)
  return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 3))
end

local ADVICE = "Use one of the two for the whole model: fully_shard for the outer modules as well, or fsdp.FSDP instead of fully_shard; "
  .. "or exclude it with ignored_modules"

for world = 1, 3 do
  ranks.describe(world, ("fully_shard and FSDP together on %d ranks"):format(world), function()
    it("are refused if FSDP is the outer one, before anything is wrapped", function()
      local _, nn, fsdp, _, quietly = load()
      local model = net()
      fsdp.fully_shard(model[2][1])
      for _, options in ipairs { {}, { auto_wrap_policy = fsdp.wrap.module_wrap_policy { nn.Linear } },
        { ignored_modules = { model[3] } } } do
        local ok, message = pcall(quietly, fsdp.FSDP, model, options)
        assert.is_false(ok)
        assert.truthy(message:find("FSDP: submodule '2.1', FSDPLinear, is already sharded by fully_shard. " .. ADVICE,
          1, true), message)
        assert.equal("Linear", model[1]:class_name())
      end
      local ok, message = pcall(quietly, fsdp.FSDP, model[2][1])
      assert.is_false(ok)
      assert.truthy(message:find("FSDP: the module, FSDPLinear, is already sharded by fully_shard. " .. ADVICE, 1,
        true), message)
      -- Parameters shared by two modules are another error.
      local tied = net()
      tied[2][1].weight = tied[1].weight
      tied[1] = quietly(fsdp.FSDP, tied[1])
      raises("FSDP: parameter '2.1.weight' is shared with a module that is already wrapped; wrap one module that contains both modules", fsdp.FSDP, tied)
    end)

    it("train as the message suggests, with ignored fully_shard modules", function(rank)
      local ms, _, fsdp, _, quietly = load()
      local plain, model = net(), net()
      fsdp.fully_shard(model[2])
      model = quietly(fsdp.FSDP, model, { ignored_modules = { model[2] }, use_orig_params = true })
      for r = 0, world - 1 do (plain(ms.ones(2, 5) * (r + 1)):pow(2):sum() / world):backward() end
      model(ms.ones(2, 5) * (rank + 1)):pow(2):sum():backward()
      fsdp.check_sharded_parity(plain[2], model.module[2])
      fsdp.summon_full_params(model, { with_grads = true }, function()
        ms.testing.assert_close(model[1].weight.grad, plain[1].weight.grad)
        ms.testing.assert_close(model[3].bias.grad, plain[3].bias.grad)
      end)
    end)

    for _, pieces in ipairs { false, true } do
      it(("train if fully_shard is the outer one, use_orig_params = %s, with accumulated and clipped gradients"):format(
        tostring(pieces)), function(rank)
        local ms, nn, fsdp, _, quietly = load()
        local plain, model = net(), net()
        model[2] = quietly(fsdp.FSDP, model[2], { use_orig_params = pieces })
        fsdp.fully_shard(model)
        local a, b = ms.optim.AdamW(plain:parameters(), { lr = 0.01 }),
          ms.optim.AdamW(model:parameters(), { lr = 0.01 })
        for step = 1, 3 do
          for micro = 1, 2 do
            model:set_requires_gradient_sync(micro == 2)
            for r = 0, world - 1 do (plain(ms.ones(2, 5) * (r + step + micro)):pow(2):sum() / world):backward() end
            model(ms.ones(2, 5) * (rank + step + micro)):pow(2):sum():backward()
          end
          fsdp.check_sharded_parity(plain, model)
          ms.testing.assert_close(nn.utils.clip_grad_norm_(model:parameters(), 1),
            nn.utils.clip_grad_norm_(plain:parameters(), 1))
          a:step()
          b:step()
          fsdp.check_sharded_parity(plain, model)
          a:zero_grad()
          b:zero_grad()
        end
        -- Whole state dicts have the plain model's names and values, and load.
        local saved = fsdp.state_dict(model)
        local want = plain:state_dict()
        for name, t in ms.sorted_pairs(want) do ms.testing.assert_close(saved[name], t) end
        for name in ms.sorted_pairs(saved) do assert.is_truthy(want[name], name) end
        for _, t in ms.sorted_pairs(saved) do t:mul_(2) end
        ms.no_grad(function() for _, p in ipairs(plain:parameters()) do p:mul_(2) end end)
        fsdp.load_state_dict(model, saved)
        fsdp.check_sharded_parity(plain, model)
      end)
    end
  end)
end
