-- SPDX-License-Identifier: MIT
--- Objects that hold parameters and were made before a model was sharded: they do the same as in one process, or say
--- at their next use what to make again.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local message = require "spec.support.message"

local function net()
  local ms, nn = load()
  ms.manual_seed(1)
  return nn.Sequential(nn.Linear(3, 5, { bias = false }), nn.Tanh(), nn.Linear(5, 4, { bias = false }))
end

-- How the model is sharded, and whether this replaces the parameters that a script has listed before.
local WAYS = {
  { "fully_shard", function(m) return load().fsdp.fully_shard(m) end },
  { "use_orig_params", function(m) return load().fsdp.FSDP(m, { use_orig_params = true }) end },
  { "full_shard", function(m) return load().fsdp.FSDP(m) end, true },
  { "shard_grad_op", function(m) return load().fsdp.FSDP(m, { sharding_strategy = "shard_grad_op" }) end, true },
  { "no_shard", function(m) return load().fsdp.FSDP(m, { sharding_strategy = "no_shard" }) end, true },
}

local OPTIMIZERS = { "SGD", "AdamW", "Adafactor", "LAMB", "Muon", "Rprop", "LBFGS" }

local function step(m, opt, rank)
  local ms = load()
  opt:step(function()
    m:zero_grad()
    local loss = (m(ms.ones(4, 3) * (1 + (rank or 0))) - 1):pow(2):mean()
    loss:backward()
    return loss
  end)
end

local function assert_same(want, m)
  local ms, _, fsdp = load()
  for name, t in ms.sorted_pairs(fsdp.state_dict(m)) do ms.testing.assert_close(t, want:state_dict()[name]) end
end

local REPLACED = "parameter 1, '1.weight', was replaced by a flat parameter of fsdp.FSDP; make %s after wrapping, of the "
  .. "wrapped model's parameters()"

for _, world in ipairs { 2, 4 } do
  ranks.describe(world, ("objects made before a model is sharded over %d ranks"):format(world), function()
    for _, way in ipairs(WAYS) do
      for _, name in ipairs(OPTIMIZERS) do
        for _, stepped in ipairs { false, true } do
          it(("%s, %s: %s"):format(name, stepped and "after a step" or "new", way[1]), function()
            local ms, _, _, _, quietly = load()
            local want, m = net(), net()
            local options = { lr = 0.1, momentum = name == "SGD" and 0.9 or nil }
            local its_opt, opt = ms.optim[name](want:parameters(), options), ms.optim[name](m:parameters(), options)
            if stepped then
              step(want, its_opt)
              step(m, opt)
            end
            m = quietly(way[2], m)
            local text = way[3] and ("%s: " .. REPLACED):format(name, "the optimizer")
              or name == "LBFGS" and "LBFGS: parameter 1 is sharded; LBFGS only works on whole parameters"
              or stepped and name ~= "Adafactor" and name .. ": parameter 1 was sharded after the optimizer had made "
              .. "its state; make the optimizer after sharding, and load the state with fsdp.load_optim_state_dict"
            if text then
              local before = load().fsdp.state_dict(m)
              for _ = 1, 2 do assert.equal(text, message(step, m, opt)) end
              for key, t in ms.sorted_pairs(load().fsdp.state_dict(m)) do assert.is_true(t:equal(before[key])) end
            else
              for _ = 1, 3 do
                step(want, its_opt)
                step(m, opt)
              end
              assert_same(want, m)
            end
          end)
        end
      end

      it("an optimizer whose state is loaded after sharding: " .. way[1], function()
        local ms, _, fsdp, _, quietly = load()
        local want, m = net(), net()
        local AdamW, options = ms.optim.AdamW, { lr = 0.1 }
        local its_opt, opt = AdamW(want:parameters(), options), AdamW(m:parameters(), options)
        step(want, its_opt)
        step(m, opt)
        m = quietly(way[2], m)
        if way[3] then opt = AdamW(m:parameters(), options) end
        fsdp.load_optim_state_dict(m, opt, fsdp.optim_state_dict(want, its_opt))
        step(want, its_opt)
        step(m, opt)
        assert_same(want, m)
      end)

      it("a schedule, a gradient scaler, and lists of parameters to clip: " .. way[1], function()
        local ms, nn, _, _, quietly = load()
        local m = net()
        local list = m:parameters()
        local opt = ms.optim.SGD(list, { lr = 0.1 })
        local schedule, scaler = ms.optim.lr_scheduler.exponential(opt, { gamma = 0.5 }), ms.amp.GradScaler()
        m = quietly(way[2], m)
        local function scaled()
          opt:zero_grad()
          scaler:scale(m(ms.ones(2, 3)):pow(2):mean()):backward()
          scaler:step(opt)
          scaler:update()
        end
        local uses = {
          { "lr_scheduler.exponential: step: the optimizer: ", "the optimizer and its schedule",
            function() schedule:step() end },
          { "clip_grad_norm_: ", "the list", function() nn.utils.clip_grad_norm_(list, 1) end },
          { "clip_grad_value_: ", "the list", function() nn.utils.clip_grad_value_(list, 1) end },
          { "clip_grads_with_norm_: ", "the list", function() nn.utils.clip_grads_with_norm_(list, 1, 2) end },
          { "SGD: ", "the optimizer", function() opt:step_clipped(1) end },
          { "SGD: zero_grad: ", "the optimizer", function() opt:zero_grad() end },
        }
        m(ms.ones(2, 3)):pow(2):mean():backward()
        for _, use in ipairs(uses) do
          if way[3] then assert.equal((use[1] .. REPLACED):format(use[2]), message(use[3])) else use[3]() end
        end
        assert.equal(way[3] ~= nil, not pcall(scaled))
        assert.equal(way[3] ~= nil, not pcall(ms.optim.AdamW, list, { lr = 1 }))
      end)

      it("averages: " .. way[1], function()
        local ms, _, _, _, quietly = load()
        local m = net()
        local list = m:parameters()
        local average, averaged = ms.optim.EMA(list, { decay = 0.5 }), ms.optim.swa_utils.AveragedModel(m)
        average:update()
        averaged:update_parameters(m)
        local before, its = average:state_dict().averages[1]:clone(), averaged.module[1].weight:clone()
        m = quietly(way[2], m)
        local text = way[3] and "EMA: " .. REPLACED:format "the EMA"
          or "EMA: parameter 1 was sharded after its average had been made; make the EMA after sharding"
        assert.equal(text, message(average.update, average))
        assert.equal(text, message(average.apply, average, function() end))
        assert.equal(text, message(average.load_state_dict, average, average:state_dict()))
        assert.equal(("update_parameters: parameter '%s' is sharded; use optim.EMA, with mean = true for the mean"):format(
          way[3] and "flat_param" or "1.weight"), message(averaged.update_parameters, averaged, m))
        assert.is_true(before:equal(average:state_dict().averages[1]) and its:equal(averaged.module[1].weight))
        local after = ms.optim.EMA(m:parameters(), { mean = true })
        after:update()
        after:update()
      end)

      it("a ZeroRedundancyOptimizer: " .. way[1], function()
        local ms, _, _, _, quietly = load()
        local m = net()
        local opt = ms.optim.ZeroRedundancyOptimizer(m:parameters(), { optimizer_class = ms.optim.SGD, lr = 0.1 })
        m = quietly(way[2], m)
        m(ms.ones(2, 3)):pow(2):mean():backward()
        local replaced = REPLACED:gsub(" 1,", " 1 of group 1,"):format "the optimizer"
        assert.equal("ZeroRedundancyOptimizer: " .. (way[3] and replaced
          or "parameter 1 of group 1 was sharded after the optimizer had been made; make an ordinary optimizer after sharding"),
          message(opt.step, opt))
      end)
    end

    it("a parameter that the script assigned, and that was copied or taken in at the first forward", function()
      local ms, nn, fsdp = load()
      for _, pieces in ipairs { false, true } do
        local m = net()
        if pieces then m = fsdp.FSDP(m, { use_orig_params = true }) else fsdp.fully_shard(m) end
        local old = m:parameters()
        m[1].weight = nn.Parameter(ms.ones(5, 3))
        local new = m:parameters()
        local opts = { ms.optim.SGD(old, { lr = 1 }), ms.optim.SGD(new, { lr = 1 }) }
        m(ms.ones(2, 3)):sum():backward()
        local dead, live = opts[pieces and 2 or 1], opts[pieces and 1 or 2]
        assert.matches(pieces and "parameter 1, '1.weight', was copied into the parameter that it had replaced"
          or "parameter 1, '1.weight', was replaced by the parameter that the script assigned to its field",
          message(dead.step, dead))
        live:step()
      end
    end)
  end)
end

for world = 1, 4 do
  ranks.describe(world, ("optimizers that need whole parameters, over %d ranks"):format(world), function(rank)
    for _, name in ipairs { "Adafactor", "LAMB" } do
      it(name .. " refuses a flat parameter, whatever the strategy", function()
        local ms, _, fsdp, _, quietly = load()
        for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
          local m = quietly(fsdp.FSDP, net(), { sharding_strategy = strategy })
          assert.equal(name .. ": parameter 1 is a flat parameter, which concatenates several parameters; give fsdp.FSDP "
            .. "use_orig_params = true", message(ms.optim[name], m:parameters(), { lr = 0.1 }))
        end
      end)
    end

    it("LBFGS minimizes the mean of the ranks' losses where every rank has the parameters, and refuses parts", function()
      local ms, nn, fsdp, _, quietly = load()
      for _, search in ipairs { "none", "strong_wolfe" } do
        local options = { max_iter = 5, line_search_fn = search ~= "none" and search or nil }
        local want = net()
        local its_opt = ms.optim.LBFGS(want:parameters(), options)
        for _ = 1, 2 do
          its_opt:step(function()
            its_opt:zero_grad()
            local loss = 0
            for r = 0, world - 1 do loss = (want(ms.ones(4, 3) * (1 + r)) - 1):pow(2):mean() / world + loss end
            loss:backward()
            return loss
          end)
        end
        for _, wrap in ipairs {
          function(m) return fsdp.FSDP(m, { sharding_strategy = "no_shard" }) end,
          function(m) return fsdp.FSDP(m, { sharding_strategy = "no_shard", use_orig_params = true }) end,
          nn.DDP,
        } do
          local m = quietly(wrap, net())
          local opt = ms.optim.LBFGS(m:parameters(), options)
          for _ = 1, 2 do step(m, opt, rank) end
          for key, t in ms.sorted_pairs(fsdp.state_dict(m)) do
            ms.testing.assert_close(t, want:state_dict()[key], { rtol = 1e-3, atol = 1e-4 })
          end
        end
      end
      for _, wrap in ipairs { fsdp.fully_shard, world > 1 and fsdp.FSDP or nil } do
        assert.equal("LBFGS: parameter 1 is sharded; LBFGS only works on whole parameters",
          message(ms.optim.LBFGS, quietly(wrap, net()):parameters()))
      end
    end)
  end)
end
