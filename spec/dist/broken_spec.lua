-- SPDX-License-Identifier: MIT
-- A broken group: what breaks it, who learns of it, and dist.recover.
local ranks = require "spec.support.ranks"

for _, layout in ipairs { { 2 }, { 4 }, { 2, "2" }, { 4, "2" } } do
  local world, nodes = layout[1], layout[2]
  ranks.describe(world, "a broken group" .. (nodes and ", between nodes" or ""),
    { env = { MOONSHARD_COMM_NODES = nodes } }, function(rank)
      local ms, nn, fsdp, dist
      lazy_setup(function()
        ms = require "moonshard"
        nn, fsdp, dist = ms.nn, ms.fsdp, ms.dist
        dist.init()
      end)
      local last = world - 1

      local function sum(group)
        local t = ms.full({ 600 }, rank + 1)
        dist.all_reduce(t, { group = group })
        return t[600]:item()
      end
      local all = world * (world + 1) / 2
      local function fails(pattern, fn, ...)
        local ok, why = pcall(fn, ...)
        assert.is_false(ok)
        assert.matches(pattern, tostring(why))
      end
      local function refused() return dist.all_reduce(rank == last and "x" or ms.ones(2)) end

      it("fails this and every later collective with the first error, until dist.recover", function()
        for _, first in ipairs { refused, function() dist.all_reduce(ms.ones(rank == last and 3 or 2)) end } do
          local reason = first == refused and "the tensor is a string %('x'%)" or "the ranks ask for different things"
          fails(reason, first)
          for try = 1, 3 do
            fails(reason, sum)
            if try > 1 then fails("an earlier error broke the group %(the world%); dist.recover%(%)", sum) end
            fails(reason, dist.all_reduce, ms.ones(2), { async = true })
          end
          dist.recover()
          assert.are.equal(all, sum())
        end
      end)

      it("is not one whose members all refuse a call, however often", function()
        for k = 1, 40 do
          fails("the tensor is a string", dist.all_reduce, "x")
          if k % 10 == 0 then assert.are.equal(all, sum()) end
        end
      end)

      it("is not one whose ranks all fail in the same work", function()
        local model = fsdp.fully_shard(nn.Linear(4, 4))
        for _ = 1, 3 do
          fails("columns", model, ms.ones(2, 5))
          model(ms.ones(2, 4)):sum():backward()
        end
      end)

      it("is not the world, if the error is in another group", function()
        local group = dist.new_group { 0, last }
        if rank == 0 or rank == last then
          fails("different things", dist.all_reduce, ms.ones(rank == last and 3 or 2), { group = group })
          fails("different things", sum, group)
        end
        assert.are.equal(all, sum())
        dist.recover()
        if rank == 0 or rank == last then assert.are.equal(world + 1, sum(group)) end
        dist.free_group(group)
      end)

      it("is every group of a rank whose forward failed, and dist.recover makes a forward right again", function()
        ms.manual_seed(1)
        local model = fsdp.fully_shard(nn.Linear(4, 4))
        local group = dist.new_group { 0, last }
        fails("its own", function()
          if rank == 0 then model:register_forward_pre_hook(function() error("its own", 0) end) end
          model(ms.ones(2, 4))
          sum()
        end)
        fails("its own", sum)
        if rank == 0 or rank == last then fails("its own", sum, group) end
        dist.recover()
        assert.are.equal(all, sum())
        if rank == 0 or rank == last then assert.are.equal(world + 1, sum(group)) end
        dist.free_group(group)
      end)

      it("ends collectives in the background at dist.recover", function()
        local t = ms.ones(600)
        local work = rank == 0 and dist.all_reduce(t, { async = true })
        dist.recover()
        assert.are.equal(all, sum())
        if work then fails("dist.recover", work.wait, work) end
        dist.barrier()
      end)

      it("is that of ranks that wait for one in dist.recover", function()
        if rank > 0 then fails("dist.recover", sum) end
        dist.recover()
        assert.are.equal(all, sum())
      end)

      it("fails receives, too, and only those", function()
        if rank == 0 then fails("boolean", dist.send, ms.ones(2), last, { async = 1 }) end
        if rank == last then fails("rank 0 failed: .*boolean", dist.recv, ms.ones(2), 0) end
        assert.are.equal(all, sum())
        dist.recover()
        local t = ms.ones(2) * (rank + 1)
        if rank == 0 then dist.send(t, last) end
        if rank == last then
          dist.recv(t, 0)
          assert.are.same({ 1, 1 }, t:tolist())
        end
      end)
    end)
end
