-- SPDX-License-Identifier: MIT
--- In-place changes of gathered parameters: those that stay gathered after forward, that unshard() gathered, or that a
--- hook sees inside a forward. Changes are written to the shards, or raise an error; they are never lost.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net(dtype)
  local ms, nn = load()
  ms.manual_seed(5)
  return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4, { bias = false })):to(dtype or "float64")
end

local function probe(model, ...)
  local args = { ... }
  return load().no_grad(function() return model(unpack(args)) end)
end

local function input(dtype) return load().ones(2, 3, { dtype = dtype or "float64" }) end

-- Ways to change a layer's weight in place.
local CHANGES = {
  ["mul_"] = function(layer) layer.weight:mul_(2) end,
  ["a view's add_"] = function(layer) layer.weight:reshape(-1):narrow(1, 3, 7):add_(1) end,
  ["copy_"] = function(layer) layer.weight:copy_(layer.weight:clone():neg()) end,
  ["detach():fill_"] = function(layer) layer.weight:detach():fill_(0.5) end,
  ["reset_parameters"] = function(layer)
    load().manual_seed(8)
    layer:reset_parameters()
  end,
}
-- Ways to leave a layer gathered.
local LEFT = {
  ["a forward without gradients"] = function(model) probe(model, input()) end,
  ["a forward of the layer"] = function(model)
    model(input()):sum():backward()
    probe(model[2], load().ones(2, 5, { dtype = "float64" }))
  end,
  ["unshard()"] = function(model) model[2]:unshard() end,
}
-- Operations that read the shards, or vacate the gathered parameters.
local READ = {
  ["reshard()"] = function(model) model[2]:reshard() end,
  ["full_tensor()"] = function(model) model[2].weight:full_tensor() end,
  ["to_local()"] = function(model) model[2].weight:to_local() end,
  ["state_dict"] = function(model) model:state_dict() end,
  ["an optimizer's step"] = function(model)
    for _, p in ipairs(model:parameters()) do p.grad = nil end
    load().optim.SGD(model:parameters(), { lr = 1 }):step()
  end,
  ["a step of training"] = function(model) model(input()):sum():backward() end,
  ["set_reshard_after_forward"] = function(model)
    model[2]:set_reshard_after_forward(true)
    probe(model, input())
  end,
}

local function sorted(t)
  local names = {}
  for name in pairs(t) do names[#names + 1] = name end
  table.sort(names)
  return names
end

local function same(expected, model)
  local ms, _, fsdp = load()
  local sd = fsdp.state_dict(model)
  for name, p in expected:named_parameters() do ms.testing.assert_close(sd[name], p:detach()) end
end

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("parameters changed while they are whole, on %d ranks"):format(world), function(rank)
    for _, left in ipairs(sorted(LEFT)) do
      it(("are kept by fully_shard, whole through %s"):format(left), function()
        local ms, _, fsdp = load()
        for _, change in ipairs(sorted(CHANGES)) do
          for _, read in ipairs(sorted(READ)) do
            local model, plain = net(), net()
            fsdp.fully_shard(model[2], { reshard_after_forward = false })
            fsdp.fully_shard(model)
            LEFT[left](model)
            ms.no_grad(function()
              CHANGES[change](model[2])
              CHANGES[change](plain[2])
            end)
            READ[read](model)
            local ok, text = pcall(same, plain, model)
            assert.is_true(ok, ("%s, %s: %s"):format(change, read, tostring(text)))
            ms.testing.assert_close(probe(model, input()), probe(plain, input()))
          end
        end
      end)
    end

    it("are kept if columns are sharded, and if reshard_after_forward is a number of ranks", function()
      local ms, _, fsdp = load()
      for _, options in ipairs { { shard_placement_fn = function(_, p) return fsdp.Shard(p.ndim) end },
        { reshard_after_forward = world } } do
        if not options.shard_placement_fn or world < 3 then            -- 3 does not divide 4 columns
          ms.catch_warnings(function()
            local model = ms.nn.Linear(4, 3):double()
            local plain = ms.nn.Linear(4, 3):double()
            plain:load_state_dict(model:state_dict())
            fsdp.fully_shard(model, options.shard_placement_fn and { shard_placement_fn = function(_, p)
              return p.ndim == 2 and fsdp.Shard(2) or nil
            end } or options)
            model:unshard()
            ms.no_grad(function()
              model.weight:mul_(3)
              plain.weight:mul_(3)
            end)
            model:reshard()
            same(plain, model)
          end)
        end
      end
    end)

    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        it(("are kept by FSDP where a hook inside of the forward changes them: %s, use_orig_params = %s"):format(
          strategy, tostring(pieces)), function()
          local ms, _, fsdp, _, quietly = load()
          local inner, plain = net(), net()
          local model = quietly(function()
            inner[2] = fsdp.FSDP(inner[2], { sharding_strategy = strategy, use_orig_params = pieces })
            return fsdp.FSDP(inner, { sharding_strategy = strategy, use_orig_params = pieces })
          end)
          local function clamp(m) ms.no_grad(function() m.weight:clamp_ { max = 0.1 } end) end
          for _, m in ipairs { inner[2].module, plain[2] } do m:register_forward_pre_hook(clamp) end
          for _, grad in ipairs(pieces and { false } or { false, true }) do
            for _, m in ipairs { model, plain } do
              if grad then m(input()):sum():backward() else probe(m, input()) end
            end
            same(plain, model)
          end
        end)
      end
    end

    it("keep all digits of unchanged elements when gathered in low precision", function()
      local ms, _, fsdp = load()
      local model, before = net "float32", net "float32"
      local policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16" }
      fsdp.fully_shard(model[2], { mp_policy = policy, reshard_after_forward = false })
      fsdp.fully_shard(model, { mp_policy = policy })
      probe(model, input "float32")
      ms.no_grad(function()
        model[2].weight:reshape(-1):narrow(1, 4, 6):fill_(1.5)
        before[2].weight:reshape(-1):narrow(1, 4, 6):fill_(1.5)
      end)
      model[2]:reshard()
      assert.is_true(model[2].weight:full_tensor():equal(before[2].weight:detach()))
    end)

    it("are an error where the shard was changed too, or an extension made the whole", function()
      -- With one rank, the gathered parameter is the shard.
      if world == 1 then return end
      local ms, _, fsdp = load()
      local model = net()
      fsdp.fully_shard(model[2], { reshard_after_forward = false })
      fsdp.fully_shard(model)
      local part = model[2].weight:to_local()
      probe(model, input())
      ms.no_grad(function()
        model[2].weight:mul_(2)
        part:mul_(3)
      end)
      assert.matches("^fsdp: parameter '2.weight' was changed in place while it was whole, and so was the shard",
        message(model, input()))
      model(input()):sum():backward()
      -- An optimizer's step vacates stale gathered parameters: nothing can be written into them.
      probe(model, input())
      ms.optim.SGD(model:parameters(), { lr = 0.1 }):step()
      assert.matches("is sharded", message(function() return model[2].weight:sum() end))

      local layer = ms.nn.Linear(3, 4)
      fsdp.fully_shard(layer, { reshard_after_forward = false })
      local local_part = layer.weight:to_local()
      function local_part:fsdp_pre_all_gather() return { self }, nil end
      function local_part.fsdp_post_all_gather(_, outputs, _, _, out)
        if out then return end
        return outputs[1], { outputs[1] }
      end
      layer:unshard()
      ms.no_grad(function() layer.weight:mul_(2) end)
      layer:reshard()
      assert.matches("^fsdp: parameter 'weight' was changed in place while it was whole; its whole value comes from an all%-gather extension",
        message(layer, ms.ones(1, 3)))
    end)

    for _, strategy in ipairs { "full_shard", "shard_grad_op" } do
      it("are dropped if summon_full_params writes nothing back, on all ranks alike: " .. strategy, function()
        local ms, _, fsdp, _, quietly = load()
        if world == 1 then return end
        for _, options in ipairs { { writeback = false }, { writeback = false, rank0_only = true } } do
          local inner, plain = net(), net()
          local model = quietly(function()
            inner[2] = fsdp.FSDP(inner[2], { sharding_strategy = strategy })
            return fsdp.FSDP(inner, { sharding_strategy = strategy })
          end)
          local function spoil()
            fsdp.summon_full_params(model, options, function()
              if options.rank0_only and rank ~= 0 then return end
              ms.no_grad(function()
                inner[1].weight:detach():copy_(ms.zeros(5, 3))
                inner[2].module.weight:mul_(0)
              end)
            end)
          end
          spoil()
          same(plain, model)
          -- A change between a forward and its backward is kept, too, if the root or all parameters stayed gathered.
          for _ = 1, 2 do
            plain(input()):sum():backward()
            local loss = model(input()):sum()
            spoil()
            loss:backward()
            fsdp.check_sharded_parity(plain, model)
          end
          same(plain, model)
        end
      end)
    end
  end)
end
