-- SPDX-License-Identifier: MIT
--- PyTorch's other names of collectives, and several collectives at once.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

for world = 1, 4 do
  ranks.describe(world, ("PyTorch's names of collectives, over %d ranks"):format(world), function()
    it("are those functions", function(rank)
      local ms = require "moonshard"
      local dist = ms.dist
      assert.is_true(dist.is_available())
      assert.equal(dist.backend(), dist.get_backend())
      local all, part = ms.empty(2 * world), ms.empty(2)
      dist.all_gather_into_tensor(all, ms.full({ 2 }, rank))
      for r = 0, world - 1 do assert.same({ r, r }, all[{ { 2 * r + 1, 2 * r + 2 } }]:tolist()) end
      dist.reduce_scatter_tensor(part, all, { op = "sum" })
      assert.same({ world * rank, world * rank }, part:tolist())
      local mine, theirs = ms.arange(0, world) + 10 * rank, ms.empty(world, { dtype = "int64" })
      dist.all_to_all_single(theirs, mine)
      for r = 0, world - 1 do assert.equal(rank + 10 * r, theirs[r + 1]:item()) end
      dist.monitored_barrier()
      local group = dist.new_group(dist.group_ranks())
      dist.destroy_process_group(group)
      assert.matches("freed", message(function() dist.barrier(group) end))
    end)

    -- name, PyTorch's name, sizes of out and in for blocks of n elements
    for _, case in ipairs { { "all_gather", "all_gather_into_tensor", world, 1 },
      { "reduce_scatter", "reduce_scatter_tensor", 1, world }, { "all_to_all", "all_to_all_single", world, world } } do
      local plain, name, outs, ins = unpack(case)
      it(name .. " stands in errors and mismatches, and matches " .. plain, function(rank)
        local ms = require "moonshard"
        local dist = ms.dist
        local function call(who, n) return dist[who](ms.zeros(outs * n), ms.ones(ins * n)) end
        -- A list: pairs would go through it in another order on each rank.
        for _, wrong in ipairs {
          { ": out is nil, expected a tensor", function() dist[name](nil, ms.ones(ins)) end },
          { ": the input is a number (3), expected a tensor", function() dist[name](ms.ones(outs), 3) end },
          { ": unknown option 'grop'; did you mean 'group'?",
            function() dist[name](ms.ones(outs), ms.ones(ins), { grop = 1 }) end },
          { ": dtypes differ: out is int64",
            function() dist[name](ms.ones(outs, { dtype = "int64" }), ms.ones(ins)) end },
          { ": out is float32 [" .. 3 * outs + 1 .. "] cpu",
            function() dist[name](ms.ones(3 * outs + 1), ms.ones(3 * ins)) end },
        } do
          local text, fn = unpack(wrong)
          local why = message(fn)
          assert.equal(name .. ": ", why:match "^[%w_]+: ", why)
          assert.truthy(why:find(text, 1, true), why)
          dist.barrier()
        end
        if world > 1 then
          local why = message(function()
            if rank == 0 then call(name, 2) else dist.all_reduce(ms.ones(2)) end
          end)
          assert.matches("rank 0: " .. name .. " of %d+ float32", why)
          dist.recover()
          why = message(function() call(name, rank == 0 and 2 or 3) end)
          assert.matches("rank 0: " .. name .. " of %d+ float32", why)
          assert.is_nil(why:find(plain .. " of", 1, true))
          dist.recover()
        end
        call(rank == 0 and name or plain, 2)            -- the two names are one collective
        dist[name](ms.zeros(outs), ms.ones(ins), { async = true }):wait()
      end)
    end

    it("fill a list from one rank's", function(rank)
      local dist = require "moonshard.dist"
      local list = rank == world - 1 and { "a", { n = 2 }, false } or { 1, 2, 3, 4 }
      dist.broadcast_object_list(list, { src = world - 1 })
      assert.same({ "a", { n = 2 }, false }, list)
      assert.equal("broadcast_object_list: argument 1 is a number (3), expected a list of values",
        message(function() dist.broadcast_object_list(3, { src = 0 }) end))
    end)

    it("split a group by lists of its ranks", function(rank)
      local dist = require "moonshard.dist"
      local even, odd = {}, {}
      for r = 0, world - 1 do table.insert(r % 2 == 0 and even or odd, r) end
      local own = dist.split_group(odd[1] and { even, odd } or { even })
      assert.same(rank % 2 == 0 and even or odd, dist.group_ranks(own))
      local last = dist.split_group { { world - 1 } }
      if rank == world - 1 then assert.same({ rank }, dist.group_ranks(last)) else assert.is_nil(last) end
      assert.equal("split_group: rank 0 is in lists 1 and 2",
        message(function() dist.split_group { { 0 }, { 0 } } end))
      assert.equal(("split_group: a rank of list 1 is a number (%d), expected a rank of the parent, from 0 to %d")
        :format(world, world - 1), message(function() dist.split_group { { world } } end))
    end)
  end)

  ranks.describe(world, ("Several collectives at once, over %d ranks"):format(world), function()
    local function gradients(rank)
      local ms = require "moonshard"
      return { ms.full({ 2, 3 }, rank + 0.1), ms.full({}, rank), ms.empty(0, 2),
        ms.full({ 5 }, rank, { dtype = "float64" }), ms.arange(0, 6):reshape(2, 3):t():to "float32" * (rank + 1),
        ms.full({ 3 }, rank, { dtype = "int64" }) }
    end

    it("reduce many tensors as one, with the bits of one reduction each", function(rank)
      local ms = require "moonshard"
      local dist = ms.dist
      for _, op in ipairs { "sum", "avg", "max", "min", "prod" } do
        local packed, apart = gradients(rank), gradients(rank)
        if op == "avg" then packed[6], apart[6] = nil, nil end
        for _, t in ipairs(apart) do dist.all_reduce(t, { op = op }) end
        local calls = dist.record(function() dist.all_reduce_coalesced(packed, { op = op }) end)
        assert.equal(op == "avg" and 2 or 3, #calls)    -- one for each dtype
        for k, t in ipairs(packed) do
          assert.is_true(t:equal(apart[k]), ("%s of tensor %d"):format(op, k))
          assert.same(apart[k].shape, t.shape)
        end
      end
    end)

    it("reduce in the background, also in a scope that ends before", function(rank)
      local ms = require "moonshard"
      local t = ms.full({ 4 }, rank)
      local work = ms.scope(function() return ms.dist.all_reduce_coalesced({ t }, { async = true }) end)
      work:wait()
      assert.is_true(work:done())
      assert.same({ 0.5 * world * (world - 1) }, { t[4]:item() })
    end)

    it("reduce in the background for a script that polls", function(rank)
      local ms = require "moonshard"
      local t = ms.full({ 4 }, rank)
      local work = ms.dist.all_reduce_coalesced({ t }, { async = true })
      while not work:done() do end
      assert.same({ 0.5 * world * (world - 1) }, { t[4]:item() })
    end)

    it("exchange tensors with both neighbours, in any order", function(rank)
      local ms = require "moonshard"
      local dist = ms.dist
      if world == 1 then return end
      local right, left = (rank + 1) % world, (rank - 1) % world
      local got = ms.empty(3)
      local list = { dist.P2POp("irecv", got, left), dist.P2POp(dist.isend, ms.full({ 3 }, rank), right) }
      if rank % 2 == 0 then list[1], list[2] = list[2], list[1] end
      for _, work in ipairs(dist.batch_isend_irecv(list)) do work:wait() end
      assert.same({ left, left, left }, got:tolist())
      assert.equal("P2POp: argument 1 is 'gather', expected one of 'isend', 'irecv'",
        message(function() dist.P2POp("gather", got, 0) end))
    end)

    it("run beside each other in a block, and are complete after it", function(rank)
      local ms = require "moonshard"
      local dist = ms.dist
      local a, b, most = ms.full({ 2 }, rank), ms.full({ 3 }, 1), ms.full({ 1 }, rank)
      local all, part, first = ms.empty(world), ms.empty(1), ms.full({ 2 }, rank)
      local result, calls
      calls = dist.record(function()
        result = dist.coalescing_manager(function(c)
          c:all_reduce(a)
          c:all_gather(all, ms.full({ 1 }, rank))
          c:all_reduce(most, { op = "max" })
          c:all_reduce(b)
          c:reduce_scatter(part, ms.ones(world))
          c:broadcast(first, { src = world - 1 })
          return 7
        end)
      end)
      assert.equal(7, result)
      assert.equal(5, #calls)                           -- the two sums are one
      local sum = 0.5 * world * (world - 1)
      assert.same({ sum, sum }, a:tolist())
      assert.same({ world, world, world }, b:tolist())
      assert.equal(world - 1, most:item())
      assert.same({ world - 1, world - 1 }, first:tolist())
      assert.equal(world, part:item())
      for r = 0, world - 1 do assert.equal(r, all[r + 1]:item()) end
    end)

    it("complete what an error in the block leaves", function(rank)
      local ms = require "moonshard"
      local all = ms.empty(world)
      assert.matches("here", message(function()
        ms.dist.coalescing_manager(function(c)
          c:all_gather(all, ms.full({ 1 }, rank))
          error "here"
        end)
      end))
      for r = 0, world - 1 do assert.equal(r, all[r + 1]:item()) end
    end)
  end)
end
