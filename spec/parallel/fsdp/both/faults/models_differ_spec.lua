-- SPDX-License-Identifier: MIT
--- Models that differ between ranks, refused when they are wrapped.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"
local dist, nn, fsdp = ms.dist, ms.nn, ms.fsdp

ranks.describe(4, "a model that differs between ranks", function(rank, world)
  local function linear(dtype) return function() return nn.Linear(4, 4):to(dtype) end end
  local function ordered(...)
    local names = { ... }
    return function()
      local m = nn.Identity()
      for _, name in ipairs(names) do m[name] = nn.Linear(2, 2) end
      return m
    end
  end

  -- What differs, the model of ranks 0 and 1, that of ranks 2 and 3, and the text about each.
  local cases = {
    { "in a shape", linear "float32", function() return nn.Linear(5, 4) end,
      "parameter 1 'weight' float32 [4, 4]", "parameter 1 'weight' float32 [4, 5]" },
    { "in a dtype", linear "float32", linear "float64",
      "parameter 1 'weight' float32 [4, 4]", "parameter 1 'weight' float64 [4, 4]" },
    { "in the number of parameters", linear "float32", function() return nn.Linear(4, 4, { bias = false }) end,
      "parameter 2 'bias' float32 [4]", "no parameter 2" },
    { "in the order of parameters", ordered("a", "b"), ordered("b", "a"),
      "parameter 1 'a.weight' float32 [2, 2]", "parameter 1 'b.weight' float32 [2, 2]" },
    { "in what is frozen", linear "float32", function()
      local m = nn.Linear(4, 4)
      m.bias:requires_grad_(false)
      return m
    end, "parameter 2 'bias' float32 [4]", "parameter 2 'bias' float32 [4], frozen" },
    { "in that one has no parameters", linear "float32", nn.Identity,
      "parameter 1 'weight' float32 [4, 4]", "no parameter 1" },
  }

  for _, who in ipairs { "fully_shard", "FSDP" } do
    for _, case in ipairs(cases) do
      it(("%s is refused by %s at the script's line, with both sides"):format(case[1], who), function()
        local m = case[rank < 2 and 2 or 3]()
        local at = debug.getinfo(1, "l").currentline + 1
        local ok, why = pcall(function() m = fsdp[who](m) end)
        assert.is_false(ok)
        local said = ("models_differ_spec.lua:%d: %s: the model differs between ranks: rank 0 has %s, rank 2 has %s")
          :format(at, who, case[4], case[5])
        assert.is_truthy(why:find(said, 1, true), why)
      end)
    end
  end

  it("may be refused by the setting that differs", function()
    local ok, why = pcall(fsdp.fully_shard, nn.Linear(4, 4), { reshard_after_forward = rank ~= 3 })
    assert.is_false(ok)
    assert.matches("rank 0 has reshard_after_forward = true, .*, rank 3 has reshard_after_forward = false", why)
  end)

  it("is compared with the ranks of both dimensions of a mesh", function()
    local mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } })
    local ok, why = pcall(fsdp.fully_shard, nn.Linear(rank < 2 and 4 or 5, 4), { mesh = mesh })
    assert.is_false(ok)
    assert.matches("rank 0 has parameter 1 .*, rank 2 has parameter 1", why)
  end)

  it("costs one small collective if the models are equal", function()
    for _, who in ipairs { "fully_shard", "FSDP" } do
      local m = nn.Linear(4, 4)
      local ledger = dist.record(function() fsdp[who](m) end)
      assert.are.equal(1, #ledger, who)
      assert.are.equal("all_gather", ledger[1].op)
    end
    assert.are.equal(4, world)
  end)
end)
