-- SPDX-License-Identifier: MIT
--- fully_shard leaves parameters without a gradient out of a reduction. It is an error if ranks leave out different
--- ones: with equal sizes, one parameter's gradient would be added silently to another's.
local ranks = require "spec.support.ranks"

for world = 2, 4 do
  ranks.describe(world, ("absent gradients on %d ranks"):format(world), function(rank)
    local ms, nn, fsdp, dist
    if rank then
      ms = require "moonshard"
      nn, fsdp, dist = ms.nn, ms.fsdp, ms.dist
    end

    local function make(d, n)
      ms.manual_seed(1)
      local Branches = nn.Module:extend "Branches"
      function Branches:init()
        for k = 1, n do self["way" .. k] = nn.Linear(d, d, { bias = false, dtype = "float64" }) end
      end
      function Branches:forward(x, ways)
        local sum
        for _, k in ipairs(ways) do
          local y = self["way" .. k](x)
          sum = sum and sum + y or y
        end
        return sum
      end
      return Branches()
    end
    local function input(d, r)
      ms.manual_seed(20 + r)
      return ms.randn(3, d, { dtype = "float64" })
    end
    -- Checks, after a failure, that the gradients of the next backward are those of one process.
    local function goes_on(model, d, n)
      dist.recover()
      model:zero_grad()
      local plain = make(d, n)
      for r = 0, world - 1 do plain(input(d, r), { 2, 1 }):pow(2):sum():backward() end
      model(input(d, rank), { 2, 1 }):pow(2):sum():backward()
      for name, p in plain:named_parameters() do
        local q = model:get_parameter(name)
        assert.equal(p.grad == nil, q.grad == nil, name)
        if p.grad then assert.is_true((q.grad:full_tensor() - p.grad / world):abs():max():item() < 1e-12, name) end
      end
    end

    for _, d in ipairs { 3, 48 } do         -- small gradients are packed and sent at once; large ones are read in place
      it(("of other parameters of the same sizes on one rank: an error on all, %d wide"):format(d), function()
        local model = fsdp.fully_shard(make(d, 3))
        local ok, message = pcall(function() model(input(d, rank), rank == 1 and { 1, 2 }
          or { 1, 3 }):sum():backward() end)
        assert.is_false(ok)
        assert.matches("the ranks ask for different things", message)
        assert.matches("rank 1: reduce_scatter of %d+ float64, avg, unit 'root', no gradient of 'way3.weight'", message)
        assert.matches("0[, 23]*: reduce_scatter of %d+ float64, avg, unit 'root', no gradient of 'way2.weight'", message)
        assert.matches("all ranks must train the same parameters of a unit, and, if fully_shard made it, use the same ones in one backward$",
          message)
        goes_on(model, d, 3)
      end)

      it(("of the same parameters on all ranks are none, %d wide"):format(d), function()
        local model = fsdp.fully_shard(make(d, 3))
        model(input(d, rank), { 1, 3 }):sum():backward()
        assert.is_nil(model.way2.weight.grad)
        goes_on(model, d, 3)
      end)
    end

    it("of many: some are named, the others counted", function()
      local model = fsdp.fully_shard(make(2, 40))
      local first, last = {}, {}
      for k = 1, 20 do first[k], last[k] = k, k + 20 end
      local ok, message = pcall(function() model(input(2, rank), rank == 0 and first or last):sum():backward() end)
      assert.is_false(ok)
      assert.matches("no gradient of 'way21.weight', [^;]* and %d+ more", message)
      goes_on(model, 2, 40)
    end)

    it("repeatedly: each error fails one backward on every rank, and no correct one", function()
      local model = fsdp.fully_shard(make(3, 3))
      for _ = 1, 4 do
        assert.is_false(pcall(function() model(input(3, rank), rank == 0 and { 1 }
          or { 1, 2, 3 }):sum():backward() end))
        goes_on(model, 3, 3)
      end
    end)

    if world == 4 then
      it("in different replicas of a mesh: an error on all", function()
        local mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } })
        local model = fsdp.fully_shard(make(3, 2), { mesh = mesh })
        local ok, message = pcall(function() model(input(3, rank), rank < 2 and { 1 } or { 2 }):sum():backward() end)
        assert.is_false(ok)
        assert.matches("all_reduce of %d+ float64, avg, unit 'root', no gradient of 'way[12].weight'", message)
        goes_on(model, 3, 2)
      end)
    end
  end)
end
