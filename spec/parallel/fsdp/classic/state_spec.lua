-- SPDX-License-Identifier: MIT
--- State dicts of FSDP models and of their optimizers: full, sharded, local; loaded by any number of ranks
--- (docs/semantics.md#state-dicts).
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function plain_model(seed)
  local ms, nn = load()
  ms.manual_seed(seed or 0)
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first = nn.Linear(5, 7)
    self.block = nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 1))
    self.tied = nn.Linear(7, 7, { bias = false })
    self.tied.weight = self.block[1].weight
    self:register_buffer("scale", ms.full({ 3 }, 2))
    self:register_buffer("scratch", ms.zeros(2), { persistent = false })
  end
  function Net:forward(x) return self.block(self.tied(self.first(x))) end
  return Net()
end

local function model_of(options, seed)
  local _, _, fsdp, _, quietly = load()
  local net = plain_model(seed)
  return quietly(function()
    net.first = fsdp.FSDP(net.first, options)
    return fsdp.FSDP(net, options)
  end)
end

local function keys(t)
  local list = {}
  for key in pairs(t) do list[#list + 1] = key end
  table.sort(list)
  return table.concat(list, " ")
end

local function train(model, optim, steps, rank)
  local ms = load()
  for step = 1, steps do
    ms.manual_seed(100 * step + rank)
    model(ms.rand(3, 5)):sum():backward()
    optim:step()
    optim:zero_grad()
  end
end

local function equal_states(a, b)
  assert.equal(keys(a), keys(b))
  for key, t in pairs(a) do assert.is_true(t:equal(b[key]), key) end
end

for world = 1, 4 do
  ranks.describe(world, ("state dicts of FSDP on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        local options = { sharding_strategy = strategy, use_orig_params = pieces }
        local what = ("%s, use_orig_params = %s"):format(strategy, tostring(pieces))

        it("have the keys and values of the unwrapped model: " .. what, function()
          local plain, model = plain_model(), model_of(options)
          equal_states(plain:state_dict(), model:state_dict())
        end)

        it("are saved and loaded: " .. what, function(rank)
          local ms, _, fsdp = load()
          for _, kind in ipairs { "full", "sharded", "local" } do
            local model = model_of(options)
            local optim = ms.optim.Adam(model:parameters(), { lr = 0.01 })
            train(model, optim, 2, rank)
            local saved = {}
            for key, t in pairs(fsdp.state_dict(model, { type = kind })) do saved[key] = t:clone() end
            local full = model:state_dict()
            local other = model_of(options, 9)
            local missing, unexpected = fsdp.load_state_dict(other, saved)
            assert.same({ {}, {} }, { missing, unexpected })
            equal_states(full, other:state_dict())
            -- Both models compute the same output.
            local x = ms.ones(2, 5)
            assert.is_true(model(x):equal(other(x)))
          end
        end)

        it("load into an unwrapped model, and from one: " .. what, function()
          local _, _, fsdp = load()
          local model, plain = model_of(options, 4), plain_model(5)
          plain:load_state_dict(model:state_dict())
          equal_states(plain:state_dict(), model:state_dict())
          local other = model_of(options, 6)
          fsdp.load_state_dict(other, plain:state_dict())
          equal_states(plain:state_dict(), other:state_dict())
        end)

        it("are on rank 0 only on request, and are loaded from it by all: " .. what, function(rank)
          local _, _, fsdp = load()
          local model, plain = model_of(options, 4), plain_model(4)
          local sd = fsdp.state_dict(model, { rank0_only = true, offload_to_cpu = true })
          if rank == 0 then equal_states(plain:state_dict(), sd) else assert.equal("", keys(sd)) end
          local other = model_of(options, 7)
          fsdp.load_state_dict(other, sd, { broadcast_from_rank0 = true })
          equal_states(plain:state_dict(), other:state_dict())
        end)

        it("of optimizers are those of the unwrapped model: " .. what, function(rank)
          local ms, _, fsdp = load()
          local plain, model = plain_model(), model_of(options)
          local reference = ms.optim.AdamW(plain:parameters(), { lr = 0.01, amsgrad = true })
          local optim = ms.optim.AdamW(model:parameters(), { lr = 0.01, amsgrad = true })
          for step = 1, 2 do
            for r = 0, world - 1 do
              ms.manual_seed(100 * step + r)
              ;(plain(ms.rand(3, 5)):sum() / world):backward()
            end
            reference:step()
            reference:zero_grad()
          end
          train(model, optim, 2, rank)
          local sd, want = fsdp.optim_state_dict(model, optim), fsdp.optim_state_dict(plain, reference)
          assert.equal(keys(want.state), keys(sd.state))
          for name, entry in pairs(want.state) do
            for key, v in pairs(entry) do
              if ms.is_tensor(v) then ms.testing.assert_close(sd.state[name][key], v) else assert.equal(v,
                sd.state[name][key]) end
            end
          end
          assert.equal(0.01, sd.param_groups[1].lr)
          assert.equal(#want.param_groups[1].params, #sd.param_groups[1].params)
          -- Another model that loads it continues as this one does.
          local other = model_of(options, 3)
          fsdp.load_state_dict(other, model:state_dict())
          local other_optim = ms.optim.AdamW(other:parameters(), { lr = 0.5, amsgrad = true })
          fsdp.load_optim_state_dict(other, other_optim, sd)
          train(model, optim, 2, rank)
          train(other, other_optim, 2, rank)
          equal_states(model:state_dict(), other:state_dict())
        end)
      end
    end

    it("carry over between strategies, views and fully_shard", function(rank)
      local ms, _, fsdp = load()
      local model = model_of { sharding_strategy = "full_shard" }
      local optim = ms.optim.Adam(model:parameters(), { lr = 0.01 })
      train(model, optim, 2, rank)
      local sd, osd = model:state_dict(), fsdp.optim_state_dict(model, optim)
      for _, make in ipairs {
        function() return model_of({ sharding_strategy = "no_shard" }, 5) end,
        function() return model_of({ use_orig_params = true }, 5) end,
        function()
          local net = plain_model(5)
          fsdp.fully_shard(net.first)
          return fsdp.fully_shard(net)
        end,
      } do
        local other = make()
        local other_optim = ms.optim.Adam(other:parameters(), { lr = 0.3 })
        fsdp.load_state_dict(other, sd)
        fsdp.load_optim_state_dict(other, other_optim, osd)
        local again = fsdp.optim_state_dict(other, other_optim)
        for name, entry in pairs(osd.state) do
          for key, v in pairs(entry) do
            if ms.is_tensor(v) then assert.is_true(v:equal(again.state[name][key]), name .. " " .. key) end
          end
        end
        equal_states(sd, fsdp.state_dict(other))
      end
    end)

    it("of type sharded have the mesh and its placements; of no_shard they are full", function()
      local ms, nn, fsdp, dist, quietly = load()
      local meshes = { { {}, 1 }, { { device_mesh = dist.init_device_mesh("cpu", { world }, { names = { "dp" } }) },
        1 } }
      if world == 4 then
        local grid = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } })
        meshes[3] = { { sharding_strategy = "hybrid_shard", device_mesh = grid }, 2 }
        meshes[4] = { { sharding_strategy = "hybrid_shard_zero2",
          process_group = { grid:get_group(2), grid:get_group(1) } }, 2 }
      end
      for _, case in ipairs(meshes) do
        local options, ndim = case[1], case[2]
        for _, pieces in ipairs { false, true } do
          options.use_orig_params = pieces
          local model = quietly(fsdp.FSDP, nn.Linear(4, 4), options)
          local t = fsdp.state_dict(model, { type = "sharded" }).weight
          -- With a world of one rank the strategy is no_shard.
          assert.equal(world > 1, t.placements ~= nil)
          if world > 1 then
            assert.equal(ndim, t.device_mesh.ndim)
            assert.equal(world, t.device_mesh:size())
            assert.equal(t.device_mesh, options.device_mesh or t.device_mesh)
            assert.equal(t.device_mesh, t:clone().device_mesh)
            assert.equal(ndim == 2 and "Replicate() Shard(1)" or "Shard(1) nil", tostring(t.placements[1]) .. " "
              .. tostring(t.placements[2]))
          end
        end
      end
      for _, pieces in ipairs { false, true } do
        local model = quietly(fsdp.FSDP, nn.Linear(4, 4), { sharding_strategy = "no_shard", use_orig_params = pieces })
        local optim = ms.optim.Adam(model:parameters())
        model(ms.ones(2, 4)):sum():backward()
        optim:step()
        for _, kind in ipairs { "sharded", "local" } do
          local warned, sd, osd = ms.catch_warnings(function()
            return fsdp.state_dict(model, { type = kind }), fsdp.optim_state_dict(model, optim, { type = kind })
          end)
          assert.equal("When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", warned[1])
          assert.equal("bias weight", keys(sd))
          assert.same({ 4, 4 }, { unpack(sd.weight.shape) })
          assert.is_nil(sd.weight.placements)
          assert.same({ 4, 4 }, { unpack(osd.state.weight.exp_avg.shape) })
          assert.is_nil(osd.state.weight.exp_avg.placements)
          assert.is_true(sd.weight:equal(fsdp.state_dict(model).weight))
        end
      end
    end)

    it("that one rank refuses are refused by all, and nothing changes", function(rank)
      local ms, nn, fsdp, dist, quietly = load()
      for _, pieces in ipairs { false, true, "rows" } do
        local model = pieces == "rows" and fsdp.fully_shard(nn.Linear(4, 6))
          or quietly(fsdp.FSDP, nn.Linear(4, 6), { use_orig_params = pieces })
        local before, good = fsdp.state_dict(model), { weight = ms.ones(6, 4), bias = ms.ones(6) }
        local cut = fsdp.state_dict(fsdp.fully_shard(nn.Linear(4, 6)), { type = "sharded" })
        for k, case in ipairs {
          { 3, "argument 2 is a number (3), expected a table of tensors" },
          { { weight = good.weight }, 'Missing key(s) in state_dict: "bias"' },
          { { weight = good.weight, bias = good.bias, [7] = good.bias }, 'Unexpected key(s) in state_dict: "7"' },
          { { weight = good.bias, bias = good.bias },
          "size mismatch for weight: copying a param with shape [6] from checkpoint" },
          { { weight = good.weight, bias = 3 }, "'bias'" },
          { { weight = good.weight, bias = cut.bias }, "", true },
        } do
          local culprit = k % world
          for _, given in ipairs { {}, { broadcast_from_rank0 = true } } do
            if case[3] and not given.broadcast_from_rank0 then goto continue end
            local bad = rank == (given.broadcast_from_rank0 and 0 or culprit)
            local ok, text = pcall(fsdp.load_state_dict, model, bad and case[1] or good, given)
            assert.is_false(ok)
            assert.truthy(text:find(case[2], 1, true), text)
            local one = ms.ones(1)
            dist.all_reduce(one)
            assert.equal(world, one:item())
            ::continue::
          end
        end
        if world > 1 then
          -- Rank 0's tensors would have to be gathered, those of the other ranks not.
          local mixed = rank == 0 and cut or good
          local other = pieces == "rows" and quietly(fsdp.FSDP, nn.Linear(4, 6)) or model
          local _, text = pcall(fsdp.load_state_dict, other, mixed)
          assert.truthy(text:find(
            "ranks differ in the parameters that are given with a different sharding: rank 0: bias, weight; rank 1: none",
            1, true)
            or text:find("rank 0: weight, bias; rank 1: none", 1, true), text)
        end
        equal_states(before, fsdp.state_dict(model))
      end
    end)

    it("have messages for what does not fit", function(rank)
      local ms, _, fsdp = load()
      local model = model_of {}
      local sd = model:state_dict()
      sd["first.bias"] = nil
      local ok, message = pcall(fsdp.load_state_dict, model, sd)
      assert.is_false(ok)
      assert.truthy(message:find('Missing key(s) in state_dict: "first.bias"', 1, true), message)
      local optim = ms.optim.Adam(model:parameters(), { lr = 0.01 })
      train(model, optim, 1, rank)
      local osd = fsdp.optim_state_dict(model, optim)
      osd.state["block.1.bias"].step = 7
      ok, message = pcall(fsdp.load_optim_state_dict, model, optim, osd)
      assert.is_false(ok)
      assert.truthy(message:find(
        "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype", 1, true))
    end)
  end)
end
