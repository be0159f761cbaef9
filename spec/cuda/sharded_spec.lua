-- SPDX-License-Identifier: MIT
--- Collectives and fully_shard with tensors on a GPU: ranks share the emulated one (or a real one), and data go through
--- CPU memory. node_suites_spec trains there as one process does.
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"
local own = "cuda:" .. require "moonshard".cuda.current_device()  -- this rank's GPU, one of the two that ranks share

for _, world in ipairs { 1, 2, 4 } do
  ranks.describe(world, ("collectives of tensors on cuda, %d ranks #cuda"):format(world), function()
    it("give the same results as on the CPU", function(rank)
      local ms, _, dist = load()
      if not ms.cuda.is_available() then return end
      local function both(name, fn)
        local a, b = fn "cpu", fn "cuda"
        assert.are.equal(own, b.device, name)
        assert.is_true(b:to("cpu"):equal(a), name)
      end
      for _, n in ipairs { 1, 33, 50000 } do
        for _, dtype in ipairs { "float32", "bfloat16", "int64" } do
          local function mine(device, count)
            return (ms.arange(0, count, { dtype = "float32" }):to(dtype) * (rank + 1)):to(dtype):to(device)
          end
          both("all_reduce", function(device)
            local t = mine(device, n)
            dist.all_reduce(t)
            return t
          end)
          both("all_gather", function(device)
            local out = ms.zeros(n * world, { dtype = dtype, device = device })
            dist.all_gather(out, mine(device, n))
            return out
          end)
          both("reduce_scatter", function(device)
            local out = ms.zeros(n, { dtype = dtype, device = device })
            dist.reduce_scatter(out, mine(device, n * world))
            return out
          end)
          both("broadcast", function(device)
            local t = mine(device, n)
            dist.broadcast(t, { src = world - 1 })
            return t
          end)
          both("all_to_all", function(device)
            local out = ms.zeros(n * world, { dtype = dtype, device = device })
            dist.all_to_all(out, mine(device, n * world))
            return out
          end)
        end
      end
    end)

    it("can be waited for later, and later operators wait automatically", function(rank)
      local ms, _, dist = load()
      if not ms.cuda.is_available() then return end
      for round = 1, 5 do
        local x = ms.full({ 30000 }, rank + round, { device = "cuda" })
        local out = ms.zeros(30000 * world, { device = "cuda" })
        x:mul_(2)                                                     -- queued: the collective must see this
        local work = dist.all_gather(out, x, { async = true })
        x:fill_(-1)                                                   -- and must not see this
        local sum = (out + 0):sum():item()
        local want = 0
        for r = 0, world - 1 do want = want + 2 * (r + round) * 30000 end
        assert.are.equal(want, sum)
        if work then work:wait() end
      end
    end)
  end)

  ranks.describe(world, ("fully_shard on cuda, %d ranks #cuda"):format(world), function()
    it("copies state to the CPU on request, and loads rank 0's from there", function(rank)
      local ms, nn, _, fsdp = load()
      if not ms.cuda.is_available() then return end
      local function make(seed)
        ms.manual_seed(seed)
        local model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)):to "cuda"
        model[3] = select(2, ms.catch_warnings(fsdp.fully_shard, model[3]))
        fsdp.fully_shard(model)
        return model, ms.optim.Adam(model:parameters(), { lr = 0.1 })
      end
      local model, optimizer = make(1)
      model(ms.ones(2, 6, { device = "cuda" })):sum():backward()
      optimizer:step()
      local there, here = fsdp.optim_state_dict(model, optimizer),
        fsdp.optim_state_dict(model, optimizer, { offload_to_cpu = true })
      for name, entry in pairs(there.state) do
        assert.equal(own, entry.exp_avg.device)
        assert.equal("cpu", here.state[name].exp_avg.device)
        assert.is_true(here.state[name].exp_avg:equal(entry.exp_avg:to "cpu"))
      end
      local whole, offloaded = fsdp.state_dict(model), fsdp.state_dict(model, { offload_to_cpu = true })
      for name, t in pairs(whole) do
        assert.same({ own, "cpu" }, { t.device, offloaded[name].device })
        assert.is_true(offloaded[name]:equal(t:to "cpu"), name)
      end
      for _, offload in ipairs { false, true } do
        local given = { rank0_only = true, offload_to_cpu = offload }
        local sd, osd = fsdp.state_dict(model, given), fsdp.optim_state_dict(model, optimizer, given)
        if rank > 0 then assert.same({ {}, {} }, { sd, osd }) end
        local other, second = make(2)
        fsdp.load_state_dict(other, sd, { broadcast_from_rank0 = true })
        fsdp.load_optim_state_dict(other, second, osd, { broadcast_from_rank0 = true })
        for name, t in pairs(fsdp.state_dict(other)) do assert.is_true(t:equal(whole[name]), name) end
        for name, entry in pairs(fsdp.optim_state_dict(other, second).state) do
          assert.equal(own, entry.exp_avg_sq.device)
          assert.is_true(entry.exp_avg_sq:equal(there.state[name].exp_avg_sq), name)
          assert.equal(1, entry.step)
        end
      end
    end)

    it("divides gradients by a factor, also in a reduction that a function of the script sees", function(rank)
      local ms, nn, dist, fsdp = load()
      if not ms.cuda.is_available() then return end
      local sum = 0
      for r = 1, dist.world_size() do sum = sum + 2 * r end
      for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
        for _, n in ipairs { 300, 3001 } do                           -- packed, and sent in place
          for _, device in ipairs { "cpu", "cuda" } do
            local model = nn.Linear(n, 3):to(dtype):to(device)
            fsdp.fully_shard(model)
            model:set_gradient_divide_factor(8)
            model:set_all_reduce_hook(function() end)                 -- so one rank calls a collective, too
            model(ms.full({ 2, n }, rank + 1, { dtype = dtype, device = device })):sum():backward()
            assert.is_true(model.weight.grad:full_tensor():eq(sum / 8):all():item(), device .. n)
            assert.is_true(model.bias.grad:full_tensor():eq(2 * dist.world_size() / 8):all():item(), device .. n)
          end
        end
      end
    end)

    it("keeps its shards on the module's device, and moves them", function()
      local ms, nn, _, fsdp = load()
      if not ms.cuda.is_available() then return end
      local model = fsdp.fully_shard(nn.Linear(8, 8))
      assert.are.equal("cpu", model.weight:to_local().device)
      local before = model.weight:full_tensor():clone()
      model:to "cuda"
      assert.are.equal(own, model.weight:to_local().device)
      assert.is_true(model.weight:full_tensor():to("cpu"):equal(before))
      local loss = model(ms.ones(2, 8, { device = "cuda" })):sum()
      loss:backward()
      assert.are.equal(own, model.weight.grad:to_local().device)
      model:to "cpu"
      assert.is_true(model.weight:full_tensor():equal(before))
    end)
  end)
end
