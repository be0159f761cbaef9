-- SPDX-License-Identifier: MIT
--- Names that collectives of units have in the record, in the profile and in errors.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"
local dist, nn, fsdp = ms.dist, ms.nn, ms.fsdp

ranks.describe(2, "a collective of a unit", function()
  it("is labelled with the module's path, that of the root with root", function()
    local m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp.fully_shard(m[1])
    fsdp.fully_shard(m)
    local seen = {}
    for _, c in ipairs(dist.record(function()
      m(ms.ones(2, 4)):sum():backward()
      m[2].weight:full_tensor()
    end)) do
      seen[#seen + 1] = c.op .. " " .. c.unit
    end
    assert.are.same({ "all_gather root", "all_gather 1", "all_gather 1", "reduce_scatter root", "reduce_scatter 1",
      "all_gather root" }, seen)
  end)
end)
