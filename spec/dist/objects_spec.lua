-- SPDX-License-Identifier: MIT
local ranks = require "spec.support.ranks"
local message = require "spec.support.message"

for world = 1, 3 do
  ranks.describe(world, ("values of one rank, over %d ranks"):format(world), function()
    local last = world - 1

    it("are gathered on rank dst alone", function(rank)
      local dist = require "moonshard.dist"
      local list = dist.gather_object({ rank = rank }, { dst = last })
      if rank ~= last then return assert.is_nil(list) end
      assert.equal(world, #list)
      for r = 0, last do assert.equal(r, list[r + 1].rank) end
    end)

    it("are scattered by rank src, also within a group", function(rank)
      local dist = require "moonshard.dist"
      local list = {}
      for r = 0, last do list[r + 1] = "for " .. r end
      assert.equal("for " .. rank, dist.scatter_object_list(rank == last and list or nil, { src = last }))
      local backwards = {}
      for r = 0, last do backwards[r + 1] = last - r end
      local group = dist.new_group(backwards)
      assert.equal("for " .. rank, dist.scatter_object_list(rank == 0 and list or nil, { src = 0, group = group }))
    end)

    it("of another number are an error on every rank, and so are other ranks", function(rank)
      local dist = require "moonshard.dist"
      local said = message(function()
        dist.scatter_object_list(rank == 0 and { 1, 2, 3, 4 } or nil, { src = 0 })
      end)
      assert.equal(("scatter_object_list: argument 1 is a list of 4 on rank 0, the source, expected a list of %d values")
        :format(world), said)
      assert.equal(("gather_object: option 'dst' is %d, expected a rank of the group"):format(world),
        message(function() dist.gather_object(1, { dst = world }) end))
      assert.equal("gather_object: option 'dst' is missing", message(function() dist.gather_object(1) end))
    end)

    it("have groups of neighbours", function(rank)
      local dist = require "moonshard.dist"
      for size = 1, world do
        if world % size == 0 then
          local own, all = dist.new_subgroups(size)
          assert.equal(world / size, #all)
          assert.equal(size, dist.world_size(own))
          assert.equal(rank % size, dist.rank(own))
          assert.equal(all[math.floor(rank / size) + 1], own)
        end
      end
      assert.equal(("new_subgroups: argument 1 is %d, expected a divisor of the number of ranks, %d"):format(world + 1, world),
        message(function() dist.new_subgroups(world + 1) end))
    end)
  end)
end

describe("PyTorch's names of dist that are not there", function()
  it("are errors that say what to write", function()
    local dist = require "moonshard.dist"
    assert.equal("unknown name in moonshard.dist: 'get_rank'; use dist.rank()",
      message(function() return dist.get_rank end))
    assert.matches("^unknown name in moonshard.dist: 'TCPStore'; use dist.broadcast_object",
      message(function() return dist.TCPStore end))
  end)
end)
