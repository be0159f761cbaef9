-- SPDX-License-Identifier: MIT
--- fully_shard reduces gradients where backward wrote them, without packing: uneven rows, empty parts, transposed and
--- later dimensions, on any number of ranks, with and without access to peers' memory, and whatever the script does
--- with the gradients meanwhile.
local ranks = require "spec.support.ranks"

for _, case in ipairs {
  { 2 }, { 3 }, { 4 },
  { 3, ", staged", MOONSHARD_COMM_MAP = "refuse" },
  { 4, " of two nodes", MOONSHARD_COMM_NODES = "2" },
} do
  local world, env = case[1], { MOONSHARD_COMM_MAP = case.MOONSHARD_COMM_MAP,
    MOONSHARD_COMM_NODES = case.MOONSHARD_COMM_NODES }
  ranks.describe(world, ("gradients in place on %d ranks%s"):format(world, case[2] or ""), { env = env }, function(rank)
    local ms, nn, fsdp
    if rank then
      ms = require "moonshard"
      nn, fsdp = ms.nn, ms.fsdp
    end

    -- Rows that no number of ranks divides, a table of one row, and a weight used transposed (its gradient is not
    -- contiguous).
    local function make()
      ms.manual_seed(3)
      local Model = nn.Module:extend "Odd"
      function Model:init()
        self.a = nn.Linear(24, 61, { dtype = "float64" })
        self.turned = nn.Parameter(ms.randn(61, 23, { dtype = "float64" }))
        self.row = nn.Parameter(ms.randn(1, 23, { dtype = "float64" }))
        self.b = nn.Linear(23, 71, { dtype = "float64" })
      end
      function Model:forward(x)
        local h = self.a(x):tanh():matmul(self.turned)
        return self.b((h + self.row):tanh())
      end
      return Model()
    end
    local function input(r)
      ms.manual_seed(50 + r)
      return ms.randn(5, 24, { dtype = "float64" })
    end

    -- The mean of the gradients of all ranks' inputs, added in rank order.
    local function expected()
      local model = make()
      for r = 0, world - 1 do model(input(r)):pow(2):sum():backward() end
      local out = {}
      for name, p in model:named_parameters() do out[name] = p.grad / world end
      return out
    end
    local function check(model, factor)
      local want = expected()
      for name, p in model:named_parameters() do
        local whole = p.grad:full_tensor()
        assert.is_true((whole - want[name] * (factor or 1)):abs():max():item() < 1e-12, name)
      end
    end

    it("the mean of gradients is that of one process", function()
      local model = fsdp.fully_shard(make())
      model(input(rank)):pow(2):sum():backward()
      check(model)
    end)

    it("packed gradients of parameters sharded along a later dimension are reduced with unpacked ones", function()
      local model = fsdp.fully_shard(make(), { shard_placement_fn = function(name)
        if name == "a.weight" then return fsdp.Shard(2) end
      end })
      model(input(rank)):pow(2):sum():backward()
      check(model)
    end)

    it("a gradient that the script keeps and overwrites while it is reduced was read before", function()
      local lib = require "moonshard.core.ffi".lib
      local model = make()
      fsdp.fully_shard(model.b)
      fsdp.fully_shard(model)
      local kept
      for _, p in ipairs { model.b.weight } do
        p:register_hook(function(g)
          kept = g:keep()
        end)
      end
      local h = model.a:register_forward_hook(function(_, _, out)
        -- This gradient arrives after the reduction of b's gradients has started.
        out:register_hook(function()
          if kept then kept:zero_() end
        end)
      end)
      lib.ms_dist_set_delay(-1, 0.03)
      model(input(rank)):pow(2):sum():backward()
      lib.ms_dist_set_delay(-1, 0)
      h:remove()
      assert.is_truthy(kept)
      check(model)
    end)

    it("accumulated gradients are reduced with the last ones", function()
      local model = fsdp.fully_shard(make())
      model:set_requires_gradient_sync(false)
      model(input(rank)):pow(2):sum():backward()
      model:set_requires_gradient_sync(true)
      model(input(rank)):pow(2):sum():backward()
      check(model, 2)
    end)
  end)
end
