-- SPDX-License-Identifier: MIT
--- State dict hooks and extra state of sharded models, in all types of state dicts (docs/semantics.md#state-dicts).
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function make(kind)
  local ms, nn, fsdp, _, quietly = load()
  local Inner = nn.Module:extend "Inner"
  function Inner:init()
    self.fc = nn.Linear(5, 3)
    self.seen = 0
  end
  function Inner:forward(x) return self.fc(x) end
  function Inner:get_extra_state() return { seen = self.seen } end
  function Inner:set_extra_state(value) self.seen = value.seen end
  ms.manual_seed(3)
  local inner = Inner()
  local model = nn.Sequential(inner, nn.Linear(3, 2))
  if kind == "fully_shard" then
    fsdp.fully_shard(inner)
    return fsdp.fully_shard(model), inner
  elseif kind == "FSDP" then
    model[1] = quietly(fsdp.FSDP, inner, { use_orig_params = true })
    return quietly(fsdp.FSDP, model, { use_orig_params = true }), inner
  end
  return model, inner
end

for world = 1, 3 do
  ranks.describe(world, ("state dict hooks over %d ranks"):format(world), function()
    for _, kind in ipairs { "fully_shard", "FSDP" } do
      it("run with every type, and rename what is loaded: " .. kind, function()
        local ms, _, fsdp = load()
        local model, inner = make(kind)
        inner.seen = 4
        inner:register_state_dict_post_hook(function(_, sd, prefix)
          assert.equal("1.", prefix)
          sd[prefix .. "old"], sd[prefix .. "fc.weight"] = sd[prefix .. "fc.weight"], nil
        end)
        for _, type in ipairs { "full", "sharded" } do
          local sd = fsdp.state_dict(model, { type = type })
          assert.is_nil(sd["1.fc.weight"])
          assert.same({ seen = 4 }, sd["1._extra_state"])
          local other, its = make(kind)
          ms.no_grad(function() for _, p in ipairs(other:parameters()) do p:mul_(2) end end)
          its:register_load_state_dict_pre_hook(function(_, given, prefix)
            given[prefix .. "fc.weight"], given[prefix .. "old"] = given[prefix .. "old"], nil
          end)
          local after
          its:register_load_state_dict_post_hook(function(_, missing, unexpected) after = #missing + #unexpected end)
          fsdp.load_state_dict(other, sd)
          assert.equal(0, after)
          assert.equal(4, its.seen)
          local want, got = fsdp.state_dict(model), fsdp.state_dict(other)
          assert.is_true(got["1.fc.weight"]:equal(want["1.old"]))
          assert.is_true(got["2.bias"]:equal(want["2.bias"]))
        end
      end)

      it("reach rank 0's state dict alone when it is broadcast, and extra states every rank: " .. kind, function(rank)
        local _, _, fsdp = load()
        local model, inner = make(kind)
        inner.seen = rank == 0 and 9 or 0
        local sd = fsdp.state_dict(model, { rank0_only = true })
        assert.equal(rank == 0, next(sd) ~= nil)
        local other, its = make(kind)
        its.seen = 1
        local calls = 0
        its:register_load_state_dict_pre_hook(function() calls = calls + 1 end)
        fsdp.load_state_dict(other, sd, { broadcast_from_rank0 = true })
        assert.equal(rank == 0 and 1 or 0, calls)
        assert.equal(9, its.seen)
      end)
    end

    it("of fully_shard's own methods run, too", function()
      local model, inner = make "fully_shard"
      inner.seen = 2
      local sd = model:state_dict()
      assert.same({ seen = 2 }, sd["1._extra_state"])
      local other, its = make "fully_shard"
      other:load_state_dict(sd)
      assert.equal(2, its.seen)
    end)

    it("that fail on one rank fail on all", function(rank)
      local _, _, fsdp = load()
      local model, inner = make "fully_shard"
      local sd = fsdp.state_dict(model)
      inner:register_load_state_dict_pre_hook(function() if rank == 0 then error("no", 0) end end)
      local ok, why = pcall(fsdp.load_state_dict, model, sd)
      assert.is_false(ok)
      assert.truthy(tostring(why):find "no")
    end)
  end)
end
