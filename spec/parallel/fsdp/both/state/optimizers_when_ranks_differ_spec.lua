-- SPDX-License-Identifier: MIT
--- State dicts of optimizers when ranks differ: in the order of parameters, in the parameters they hold, in the state
--- dicts they load.
local ranks = require "spec.support.ranks"
local kinds = require "spec.support.state_kinds"
local load = require("spec.support.wrapped").load
local message = require "spec.support.message"

local function part(p) return p.placements and p:to_local() or p end

-- This rank's order: odd ranks reverse it. Parameters without elements on this rank are left out.
local function own_order(rank)
  return function(params)
    local list = {}
    for _, p in ipairs(params) do
      if part(p):numel() > 0 then table.insert(list, rank % 2 == 0 and #list + 1 or 1, p) end
    end
    return list
  end
end

-- The state of the unsharded model after the same steps.
local function whole_state(steps)
  local _, _, fsdp = load()
  local model, optim = kinds.make({ "whole", function(m) return m end }, 1)
  kinds.train(model, optim, 1, steps)
  return fsdp.optim_state_dict(model, optim), model
end

local function assert_state(want, got)
  local ms = load()
  local names = {}
  for name, entry in ms.sorted_pairs(want.state) do
    names[name] = true
    for key, v in ms.sorted_pairs(entry) do
      local mine = got.state[name][key]
      if ms.is_tensor(v) then ms.testing.assert_close(mine, v) else assert.equal(v, mine) end
    end
  end
  for name in pairs(got.state) do assert.is_true(names[name], name) end
end

for world = 1, 4 do
  ranks.describe(world, ("an optimizer's state on %d ranks"):format(world), function()
    for k, kind in ipairs(kinds.kinds(world)) do
      it("equals the unsharded model's for any order of parameters on the ranks, and loads elsewhere: " .. kind[1],
        function(rank)
        local ms, _, fsdp = load()
        local want, whole = whole_state(2)
        local model, optim = kinds.make(kind, 1, own_order(rank))
        kinds.train(model, optim, 1, 2)
        local osd = fsdp.optim_state_dict(model, optim)
        assert_state(want, osd)
        local cut = fsdp.optim_state_dict(model, optim, { type = "sharded" })
        local seen = { state = {} }
        for name, entry in ms.sorted_pairs(cut.state) do
          seen.state[name] = {}
          for key, v in ms.sorted_pairs(entry) do
            seen.state[name][key] = ms.is_tensor(v) and v.placements and v:full_tensor() or v
          end
        end
        assert_state(want, seen)
        -- The state is loaded into models sharded in two other ways, and into this one from local parts, with another
        -- order of parameters.
        local all = kinds.kinds(world)
        local ways = { { all[(k + world) % #all + 1], osd }, { all[(k + 4) % #all + 1], cut },
          { kind, fsdp.optim_state_dict(model, optim, { type = "local" }) } }
        for _, way in ipairs(ways) do
          local other, its_optim = kinds.make(way[1], 2, own_order(rank + 1))
          fsdp.load_optim_state_dict(other, its_optim, way[2])
          assert_state(want, fsdp.optim_state_dict(other, its_optim))
          fsdp.load_state_dict(other, whole:state_dict())
          kinds.train(other, its_optim, 3, 3)
        end
      end)
    end

    for _, kind in ipairs { kinds.KINDS[2], kinds.KINDS[3], kinds.KINDS[7] } do
      it("is restored from rank 0 alone: " .. kind[1], function(rank)
        local ms, _, fsdp = load()
        local want = whole_state(2)
        local model, optim = kinds.make(kind, 1)
        kinds.train(model, optim, 1, 2)
        local osd = fsdp.optim_state_dict(model, optim, { rank0_only = true })
        if rank > 0 then assert.same({}, osd) end
        local other, its_optim = kinds.make(kind, 2, own_order(rank))
        its_optim.param_groups[1].lr = 5
        fsdp.load_optim_state_dict(other, its_optim, osd, { broadcast_from_rank0 = true })
        assert_state(want, fsdp.optim_state_dict(other, its_optim))
        assert.equal(1 / 3, its_optim.param_groups[1].lr)
        ms.dist.barrier()
      end)

      it("loads without groups, and the optimizer keeps its options: " .. kind[1], function()
        local _, _, fsdp = load()
        local want = whole_state(2)
        for _, broadcasts in ipairs { false, true } do
          local model, optim = kinds.make(kind, 1)
          kinds.train(model, optim, 1, 1)
          optim.param_groups[1].lr = 0.125
          fsdp.load_optim_state_dict(model, optim, { state = want.state }, { broadcast_from_rank0 = broadcasts })
          assert_state(want, fsdp.optim_state_dict(model, optim))
          assert.equal(0.125, optim.param_groups[1].lr)
        end
      end)
    end

    it("may be empty, of some parameters, or have values that are no tensors", function()
      local ms, nn, fsdp = load()
      for _, kind in ipairs { kinds.KINDS[3], kinds.KINDS[7] } do
        local model, optim = kinds.make(kind, 1)
        local empty = fsdp.optim_state_dict(model, optim)
        assert.same({}, empty.state)
        kinds.train(model, optim, 1, 1)
        fsdp.load_optim_state_dict(model, optim, empty)
        assert.same({}, fsdp.optim_state_dict(model, optim).state)
      end
      -- Parameter 1 is frozen, so it has no state.
      for _, shard in ipairs { function(m) return fsdp.FSDP(m, { use_orig_params = true }) end, fsdp.fully_shard } do
        local function make()
          ms.manual_seed(0)
          local m = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
          m[1].weight.requires_grad = false
          m = select(2, ms.catch_warnings(shard, m))
          return m, ms.optim.SGD(m:parameters(), { lr = 0.1, momentum = 0.5 })
        end
        local model, optim = make()
        kinds.train(model, optim, 1, 2)
        local osd = fsdp.optim_state_dict(model, optim)
        assert.is_nil(osd.state["1.weight"])
        assert.equal("1.weight", osd.param_groups[1].params[1])
        local other, its_optim = make()
        fsdp.load_optim_state_dict(other, its_optim, osd)
        assert_state(osd, fsdp.optim_state_dict(other, its_optim))
      end
    end)

    it("is saved and loaded with the model's for parameters of a tensor class", function()
      local ms, nn, fsdp = load()
      local Two = ms.Tensor:extend "Two"
      function Two:init(a, b) self.a, self.b = a, b end
      function Two:inner_tensors() return { self.a, self.b } end
      local function make(seed, sharded)
        ms.manual_seed(seed)
        local layer = nn.Linear(4, 6)
        layer.weight = nn.Parameter(Two(layer.weight:detach():clone(), layer.weight:detach() * 2))
        if sharded then fsdp.fully_shard(layer) end
        return layer, ms.optim.Adam(layer:parameters(), { lr = 0.1 })
      end
      local function step(layer, optim)
        layer(Two(ms.ones(2, 4), ms.ones(2, 4) * 3)):sum():backward()
        optim:step()
        optim:zero_grad()
      end
      local whole, its_optim = make(1)
      local model, optim = make(1, true)
      step(whole, its_optim)
      step(model, optim)
      for _, kind in ipairs { "full", "sharded", "local" } do
        local other, other_optim = make(2, true)
        fsdp.load_state_dict(other, fsdp.state_dict(model, { type = kind }))
        fsdp.load_optim_state_dict(other, other_optim, fsdp.optim_state_dict(model, optim, { type = kind }))
        local sd, osd = fsdp.state_dict(other), fsdp.optim_state_dict(other, other_optim)
        local want = its_optim:state_of(whole.weight)
        for _, inner in ipairs { "a", "b" } do
          ms.testing.assert_close(sd.weight[inner], whole.weight[inner]:detach())
          ms.testing.assert_close(osd.state.weight.exp_avg[inner], want.exp_avg[inner])
        end
      end
      local text = message(fsdp.load_state_dict, model, { weight = ms.ones(6, 4), bias = ms.ones(6) })
      assert.truthy(text:find("While copying 'weight': a Two expected, got a Tensor.", 1, true), text)
    end)

    if world > 1 then
      it("is refused on every rank if one lacks the state of a parameter", function(rank)
        local ms, nn, fsdp, dist = load()
        for _, case in ipairs {
          { lacks = 1, text = "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but some ranks are "
            .. "missing some of those states\nRank 1 is missing states for the parameters: ['1.bias', '2.weight']" },
          { lacks = 0, text = "optim_state_dict: rank 0 is missing states that other ranks have, for the parameters: ['1.bias', '2.weight']" },
        } do
          local model = fsdp.fully_shard(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8)))
          local params = model:parameters()
          local optim = ms.optim.Adam(rank == case.lacks and { params[1], params[4] } or params, { lr = 0.1 })
          model(ms.ones(2, 5)):sum():backward()
          optim:step()
          for _, kind in ipairs { "full", "sharded", "local" } do
            assert.equal(case.text, message(fsdp.optim_state_dict, model, optim, { type = kind }))
          end
          assert.equal(case.text, message(fsdp.save, "/nowhere/at/all", model, optim))
          local one = ms.ones(1)
          dist.all_reduce(one)
          assert.equal(world, one:item())
        end
        -- The same parameters, but other fields in their states.
        local model = fsdp.fully_shard(nn.Linear(5, 8))
        local optim = ms.optim.Adam(model:parameters(), { lr = 0.1, amsgrad = rank == 1 })
        model(ms.ones(2, 5)):sum():backward()
        optim:step()
        assert.equal("optim_state_dict: ranks have different states of 'weight': exp_avg float32, exp_avg_sq float32, step on rank 0; "
          .. "exp_avg float32, exp_avg_sq float32, max_exp_avg_sq float32, step on rank 1",
          message(fsdp.optim_state_dict, model, optim))
      end)
    end

    local function bad_states(osd)
      local ms = load()
      local function changed(fn)
        local copy = { state = {}, param_groups = {} }
        for name, entry in pairs(osd.state) do
          copy.state[name] = {}
          for key, v in pairs(entry) do copy.state[name][key] = v end
        end
        for g, group in ipairs(osd.param_groups) do
          copy.param_groups[g] = { unpack(group) }
          for key, v in pairs(group) do copy.param_groups[g][key] = v end
        end
        fn(copy)
        return copy
      end
      local W = "first.weight"
      return {
        { 3, "argument 3 is a number (3), expected a table with state and param_groups" },
        { {}, "argument 3 is a table, expected a table with state and param_groups" },
        { ms.ones(1), "argument 3 is a Tensor, expected a table with state and param_groups" },
        { ms.nn.Linear(2, 2), "argument 3 is a Linear, expected a table with state and param_groups" },
        { changed(function(s) s.param_groups = ms.ones(2) end), "param_groups is a Tensor, expected a list of groups" },
        { changed(function(s) s.param_groups[1] = ms.ones(2) end),
        "group 1 is a Tensor, expected a group {params = {names}}" },
        { changed(function(s) s.param_groups[1].params = ms.ones(2) end),
        "group 1 is a table, expected a group {params = {names}}" },
        { changed(function(s) s.param_groups[1].betas = ms.ones(2) end),
        "betas is a Tensor, expected a pair of numbers" },
        { changed(function(s) s.state[W] = ms.ones(2) end), "state of 'first.weight' is a Tensor, expected a table" },
        { { state = 1 }, "argument 3 is a table, expected a table with state and param_groups" },
        { changed(function(s) s.param_groups = 7 end), "param_groups is a number (7), expected a list of groups" },
        { changed(function(s) s.param_groups[1] = "x" end),
        "group 1 is a string ('x'), expected a group {params = {names}}" },
        { changed(function(s) s.param_groups[1].params = nil end),
        "group 1 is a table, expected a group {params = {names}}" },
        { changed(function(s) s.param_groups[1].params = { 1, 2 } end),
          "parameter 1 of group 1 is a number (1), expected a name; use fsdp.optim_state_dict, because "
          .. "an optimizer's own state_dict() has positions instead of names" },
        { changed(function(s) s.param_groups[1].params = { W } end), "the state dict has no parameter 'first.bias'" },
        { changed(function(s) s.state[1] = {} end), "state has the key 1, expected names of parameters" },
        { changed(function(s) s.state[W] = 3 end), "state of 'first.weight' is a number (3), expected a table" },
        { changed(function(s) s.state[W][1] = 3 end),
        "state of 'first.weight' has the key 1, expected names of fields" },
        { changed(function(s) s.state[W].exp_avg = ms.ones(2, 2) end),
        "'exp_avg' of 'first.weight' has shape [2, 2], but the parameter has shape [7, 5]" },
        { changed(function(s) s.state[W].exp_avg = "x" end),
        "exp_avg of parameter 1 is a string ('x'), expected a tensor" },
        { changed(function(s) s.state[W].exp_avg = nil end),
        "has no exp_avg in the state; was the state made by another optimizer?" },
        { changed(function(s) s.state[W].step = -1 end),
        "step of parameter 1 is a number (-1), expected a number from 0" },
        { changed(function(s) s.param_groups[1].lr = "fast" end), "lr is a string ('fast'), expected a number" },
      }
    end

    it("that is malformed on one rank is refused by all, and nothing changes", function(rank)
      local ms, _, fsdp, dist = load()
      local model, optim = kinds.make(kinds.KINDS[7], 1)
      kinds.train(model, optim, 1, 1)
      local osd, before = fsdp.optim_state_dict(model, optim), kinds.contents(model, optim)
      osd.param_groups[1].lr = 9
      local flat, flat_optim = kinds.make(kinds.KINDS[2], 1)
      local mixed = { state = fsdp.optim_state_dict(model, optim).state }
      mixed.state["first.weight"].exp_avg = 3
      local said = message(fsdp.load_optim_state_dict, flat, flat_optim, mixed)
      assert.truthy(said:find(
        "'exp_avg' of 'first.bias' is a Tensor, but for another parameter of the same flat parameter it is a number (3)",
        1, true), said)
      for k, case in ipairs(bad_states(osd)) do
        local culprit = k % world
        local text = message(fsdp.load_optim_state_dict, model, optim, rank == culprit and case[1] or osd)
        assert.truthy(text:find(case[2], 1, true), text)
        if rank ~= culprit then assert.truthy(text:find((" (on rank %d)"):format(culprit), 1, true), text) end
        -- The faulty state on rank 0, which broadcasts it.
        text = message(fsdp.load_optim_state_dict, model, optim, rank == 0 and case[1] or osd,
          { broadcast_from_rank0 = true })
        assert.truthy(text:find(case[2], 1, true), text)
        dist.recover()
        local one = ms.ones(1)
        dist.all_reduce(one)
        assert.equal(world, one:item())
      end
      assert.equal(before, kinds.contents(model, optim))
      local sharded = fsdp.optim_state_dict(model, optim, { type = "sharded" })
      assert.truthy(message(fsdp.load_optim_state_dict, model, optim, sharded, { broadcast_from_rank0 = true })
        :find("with broadcast_from_rank0, '", 1, true))
      -- One rank passes an optimizer of another model.
      local foreign = ms.optim.AdamW { ms.nn.Parameter(ms.ones(2)) }
      for _, call in ipairs { fsdp.optim_state_dict, function(m, o) return fsdp.load_optim_state_dict(m, o,
        osd) end } do
        local text = message(call, model, rank == 0 and foreign or optim)
        assert.truthy(text:find("parameter 1 of group 1 does not belong to the module", 1, true), text)
        text = message(call, model, rank == 0 and 3 or optim)
        assert.truthy(text:find("argument 2 is a number (3), expected an optimizer", 1, true), text)
      end
      -- One rank passes another first argument or option.
      for _, case in ipairs {
        { function(m) return fsdp.state_dict(m) end, "state_dict: argument 1 is a number (3), expected a module" },
        { function(m) return fsdp.load_state_dict(m, {}) end,
        "load_state_dict: argument 1 is a number (3), expected a module" },
        { function(m) return fsdp.optim_state_dict(m, optim) end,
        "optim_state_dict: argument 1 is a number (3), expected a module" },
        { function(m) return fsdp.load_optim_state_dict(m, optim, osd) end,
        "load_optim_state_dict: argument 1 is a number (3), expected a module" },
        { function(_, o) return fsdp.state_dict(model, o) end, "state_dict: unknown option 'x'" },
        { function(_, o) return fsdp.load_state_dict(model, {}, o) end, "load_state_dict: unknown option 'x'" },
        { function(_, o) return fsdp.optim_state_dict(model, optim, o) end, "optim_state_dict: unknown option 'x'" },
        { function(_, o) return fsdp.load_optim_state_dict(model, optim, osd, o) end,
        "load_optim_state_dict: unknown option 'x'" },
      } do
        local text = message(case[1], rank == world - 1 and 3 or model, rank == world - 1 and { x = 1 } or {})
        assert.truthy(text:find(case[2], 1, true), text)
        dist.recover()
        local one = ms.ones(1)
        dist.all_reduce(one)
        assert.equal(world, one:item())
      end
      if world > 1 then
        local text = message(fsdp.optim_state_dict, model, optim, { type = rank == 0 and "full" or "local" })
        assert.equal("optim_state_dict: ranks ask for different types: rank 0: full; rank 1: local", text)
      end
      assert.equal(before, kinds.contents(model, optim))
    end)
  end)
end
