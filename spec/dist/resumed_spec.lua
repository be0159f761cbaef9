-- SPDX-License-Identifier: MIT
-- After an error that a script survives, the ranks' next collectives match, wherever in the script each rank met it.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

-- 3 ranks of a node, and nodes of one rank each, take ways that the layouts before them have, too: scripts/test --long.
local layouts = { { 2 }, { 4 }, { 3, "0,1,0" }, { 4, "2" }, { 3 }, { 2, "2" } }

for number, layout in ipairs(layouts) do
  if number > 4 and not os.getenv "MOONSHARD_LONG" then break end
  local world, nodes = layout[1], layout[2]
  ranks.describe(world, "after an error that fails different calls on the ranks" .. (nodes and ", between nodes" or ""),
    { env = { MOONSHARD_COMM_NODES = nodes } }, function()
      local ms = require "moonshard"
      local nn, fsdp, dist = ms.nn, ms.fsdp, ms.dist
      local lib = require "moonshard.core.ffi".lib
      local rank = dist.rank()

      local sharded
      local function model()
        if not sharded then
          ms.manual_seed(1)
          sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
          for k = 1, 2 do fsdp.fully_shard(sharded[k]) end
          fsdp.fully_shard(sharded)
        end
        return sharded
      end
      local x = ms.ones(2, 4)

      -- Sums 10, 100, … over the ranks, each in a call that survives its error. Returns the number of calls that
      -- failed. A call that succeeds has the right sum.
      local function sums(reduce)
        local failed, succeeded = 0, 0
        for k = 1, 6 do
          local t = ms.full({ 1 }, 10 ^ k)
          local ok = pcall(reduce, t)
          if ok then
            succeeded = succeeded + 1
            assert.are.equal(world * 10 ^ k, t:item())
          else
            failed = failed + 1
          end
        end
        assert.is_true(succeeded > 0)
        return failed
      end

      local function all_reduce(t) dist.all_reduce(t) end
      local function async(t)
        local work = dist.all_reduce(t, { async = true })
        work:wait()
      end
      local function in_two_groups(t)
        dist.all_reduce(t)
        dist.barrier()
      end

      -- What fails on rank `bad`; the other ranks make the same call without an error, or do something else. `lost`: how
      -- many of the following calls fail on every rank.
      local cases = {
        ["a refused call that communicates nothing on the peers"] = { lost = 1, function(bad)
          dist.init_device_mesh("cpu", bad and { world + 1 } or { world })
        end },
        ["a call that only one rank makes"] = { lost = 1, function(bad)
          if bad then dist.all_reduce "x" end
        end },
        ["two calls that only one rank makes"] = { lost = 2, function(bad)
          if bad then
            pcall(dist.all_reduce, "x")
            dist.all_reduce "y"
          end
        end },
        ["a scaler's call that only one rank makes"] = { lost = 1, function(bad)
          local scaler = ms.amp.ShardedGradScaler()
          if bad then scaler:unscale_(ms.optim.SGD(nn.Linear(2, 2):parameters(), { lr = 0.1 })) end
        end },
        ["an error of the script between forward and backward"] = { lost = 1, function(bad)
          local y = model()(x)
          if bad then error("the script's own error", 0) end
          y:sum():backward()
        end },
        ["item() of several elements between forward and backward"] = { lost = 1, function(bad)
          local y = model()(x)
          if bad then y:item() end
          y:sum():backward()
        end },
        ["a backward from several elements"] = { lost = 0, function(bad)
          local y = model()(x)
          if bad then y:backward() else y:sum():backward() end
        end },
        ["no memory for the start of a backward"] = { lost = 0, function(bad)
          local y = model()(x):sum()
          if bad then lib.ms_fail_allocation(1) end
          local ok, why = pcall(y.backward, y)
          lib.ms_fail_allocation(0)
          if not ok then error(why, 0) end
        end },
        ["a forward on one rank"] = { lost = 0, function(bad)
          model()(bad and ms.ones(2, 5) or x):sum():backward()
        end },
      }
      for what, case in ms.sorted_pairs(cases) do
        for name, reduce in ms.sorted_pairs { all_reduce = all_reduce, ["asynchronous all_reduce"] = async,
          ["two groups in turn"] = in_two_groups } do
          it(what .. " costs every rank the same calls (" .. name .. ")", function()
            model()
            for _, bad in ipairs { 0, world - 1 } do
              pcall(case[1], rank == bad)
              assert.are.equal(case.lost, sums(reduce))
              model()(x):sum():backward()
              assert.are.equal(0, sums(reduce))
            end
          end)
        end
      end

      it("a failed step costs only the rest of the step where the ranks agree on it afterwards", function()
        for _, bad in ipairs { 0, world - 1 } do
          for step = 1, 3 do
            local ok = pcall(function()
              local loss = model()(x):sum()
              if step == 2 and rank == bad then lib.ms_fail_allocation(1) end
              loss:backward()
              dist.all_reduce(loss:detach())
            end)
            lib.ms_fail_allocation(0)
            assert.are.equal(step ~= 2, ok)
            local failed = ms.full({ 1 }, ok and 0 or 1)
            dist.all_reduce(failed)
            assert.are.equal(ok and 0 or world, failed:item())
          end
        end
      end)

      it("a step with a refused call of one rank costs every rank that step, where its pcall holds the step", function()
        local refused = {
          function() dist.all_reduce "x" end,
          function() dist.init_device_mesh("cpu", { world + 1 }) end,
          function() dist.broadcast(ms.ones(1), { src = world }) end,
        }
        for _, refuse in ipairs(refused) do
          for _, bad in ipairs { 0, world - 1 } do
            local got = {}
            for step = 1, 5 do
              pcall(function()
                if rank == bad and step == 2 then refuse() end
                local t = ms.full({ 1 }, step)
                dist.all_reduce(t)
                dist.barrier()
                got[step] = t:item() / world
              end)
            end
            assert.are.same({ 1, nil, 3, 4, 5 }, got)
          end
        end
      end)

      -- A rank that is behind waits for its neighbours' messages, while they wait for it in the all_reduce. Between nodes
      -- such cycles are not found.
      if not nodes then
        local function plainly(fn) fn() end
        -- Functions that call their argument once, so that a later line of it is a later call.
        for place, around in ms.sorted_pairs { ["a loop"] = plainly, ["a loop in ms.scope"] = ms.scope,
          ["a loop in ms.no_grad"] = ms.no_grad, ["a loop in ms.catch_warnings"] = ms.catch_warnings } do
          it("an error of the script before sends and receives in the background costs at most the next step, too: "
            .. place, function()
            local right, left = (rank + 1) % world, (rank - 1) % world
            for _, bad in ipairs { 0, world - 1 } do
              around(function()
                for step = 1, 6 do
                  local ok = pcall(function()
                    if rank == bad and step == 2 then error("the script's own error", 0) end
                    local got = ms.zeros(1)
                    local sent = dist.send(ms.full({ 1 }, 10 * step + rank), right, { async = true })
                    local received = dist.recv(got, left, { async = true })
                    sent:wait()
                    received:wait()
                    assert.are.equal(10 * step + left, got:item())
                  end)
                  local flag = ms.tensor { step, ok and 0 or 1 }
                  local agreed = pcall(dist.all_reduce, flag)
                  if agreed then assert.are.equal(world * step, flag[1]:item()) end
                  assert.is_true(step == 2 or step == 3 or (agreed and flag[2]:item() == 0), "step " .. step)
                end
              end)
            end
          end)
        end
      end

      if world == 4 then
        it("a model's first gathers after an error match although only some of its ranks used another group", function()
          local pair = dist.new_group { 0, 3 }
          local mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } })
          pcall(function()
            if rank == 1 then nn.DDP "x" end
            dist.barrier()
          end)
          dist.barrier()
          local m = fsdp.FSDP(nn.Linear(4, 4), { sharding_strategy = "hybrid_shard", device_mesh = mesh })
          if rank % 3 == 0 then dist.all_reduce(ms.ones(1), { group = pair }) end
          m(x):sum():backward()
          dist.free_group(pair)
        end)
      end

      -- A rank behind the others waits in one group while they wait for it in another. Cycles over several nodes are
      -- not found.
      if world > 2 and not nodes then
        it("an error before a step with calls in a group and in the world costs only that step", function()
          local pair = dist.new_group { 0, 1 }
          for _, fail in ipairs { function() dist.all_reduce "x" end,
            function() error("the script's own error", 0) end } do
            for _, bad in ipairs { 0, 1, world - 1 } do
              for step = 1, 5 do
                local ok = pcall(function()
                  if rank == bad and step == 2 then fail() end
                  if rank < 2 then dist.all_reduce(ms.ones(1), { group = pair }) end
                  dist.all_reduce(ms.ones(1))
                end)
                local flag = ms.tensor { step, ok and 0 or 1 }
                local agreed = pcall(dist.all_reduce, flag)
                if agreed then assert.are.equal(world * step, flag[1]:item()) end
                assert.is_true(step == 2 or (ok and agreed and flag[2]:item() == 0), "step " .. step)
              end
            end
          end
          dist.free_group(pair)
        end)

        it("an error in the world does not shift the calls of a group whose other member does not know of it", function()
          local group = dist.new_group { 0, world - 1 }
          for _, bad in ipairs { 0, world - 1 } do
            for step = 1, 4 do
              for turn = 1, 3 do
                pcall(function()
                  if rank == bad and step == 2 and turn == 1 then dist.all_reduce "x" end
                  if rank == 0 or rank == world - 1 then
                    local t = ms.full({ 1 }, 10 * step + turn)
                    dist.all_reduce(t, { group = group })
                    assert.are.equal(2 * (10 * step + turn), t:item())
                  end
                end)
              end
              -- All ranks make this call in every iteration, but one rank skips it in one iteration.
              local t = ms.full({ 1 }, step)
              local ok = pcall(dist.all_reduce, t)
              assert.are.equal(ok and world * step or step, t:item())
              assert.is_true(ok or step == 2)
            end
          end
          dist.free_group(group)
        end)
      end

      -- Ways to shard a model, for loops of a step inside pcall and a collective in which the ranks agree whether the
      -- step succeeded.
      local kinds = {
        fully_shard = function(m)
          for k = 1, 2 do fsdp.fully_shard(m[k]) end
          return fsdp.fully_shard(m)
        end,
        FSDP = function(m) return fsdp.FSDP(m) end,
        DDP = function(m) return nn.DDP(m) end,
        ["fully_shard on a mesh of two dimensions"] = world == 4 and function(m)
          return fsdp.fully_shard(m, { mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } }) })
        end or nil,
      }
      for kind, wrap in ms.sorted_pairs(kinds) do
        for _, place in ipairs { "before the forward", "before the backward", "after the backward" } do
          it("an error of the script " .. place .. " of " .. kind .. " costs at most the next step, too", function()
            for _, bad in ipairs { 0, world - 1 } do
              ms.manual_seed(1)
              local m = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
              local agreed = {}
              for step = 1, 6 do
                local function here(at)
                  if step == 2 and rank == bad and at == place then error("the script's own error", 0) end
                end
                local ok = pcall(function()
                  here "before the forward"
                  local loss = m(x):sum()
                  here "before the backward"
                  loss:backward()
                  here "after the backward"
                end)
                local flag = ms.tensor { step, ok and 0 or 1 }
                agreed[step] = pcall(dist.all_reduce, flag)
                if agreed[step] then assert.are.equal(world * step, flag[1]:item()) end
                assert.is_true(step == 2 or step == 3 or (agreed[step] and flag[2]:item() == 0))
              end
            end
          end)
        end
      end

      -- Ways to write the steps of an epoch.
      local loops = {
        ["for ... in ms.steps(n)"] = function(fn) for step in ms.steps(5) do fn(step) end end,
        ["ms.steps(n, fn)"] = function(fn) ms.steps(5, fn) end,
        ["while"] = function(fn)
          local step = 0
          while step < 5 do
            step = step + 1
            fn(step)
          end
        end,
      }
      for how, loop in ms.sorted_pairs(loops) do
        it("an error of the script in one step of each epoch costs that step, where steps are written as " .. how, function()
          ms.manual_seed(1)
          local m = nn.DDP(nn.Linear(4, 4))
          for epoch = 1, 2 do
            local lost = {}
            loop(function(step)
              local ok = pcall(function()
                local y = m(x)
                if step == 2 and rank == world - 1 then error("the script's own error", 0) end
                y:sum():backward()
                for _, got in ipairs(dist.all_gather_object(step)) do assert(got == step) end
              end)
              local flag = ms.tensor { epoch * 10 + step, ok and 0 or 1 }
              local agreed = pcall(dist.all_reduce, flag)
              if agreed then assert.are.equal(world * (epoch * 10 + step), flag[1]:item()) end
              if not (agreed and flag[2]:item() == 0) then lost[#lost + 1] = step end
            end)
            assert.are.same({ 2 }, lost)
          end
        end)
      end

      it("two loops of equal bounds in one step are distinguished", function()
        ms.manual_seed(1)
        local m = nn.DDP(nn.Linear(4, 4))
        local function sum(id)
          local t = ms.full({ 1 }, id)
          dist.all_reduce(t)
          assert.are.equal(world * id, t:item())
        end
        local lost, failures, mixed = {}, {}, nil
        for step = 1, 4 do
          local function guarded(fn)
            local ok, why = pcall(fn)
            if not ok then failures[#failures + 1] = tostring(why) end
            if not ok and tostring(why):find "Expected objects" then mixed = why end
            return ok
          end
          local ok = guarded(function()
            for i = 1, 3 do
              if rank == 0 and step == 2 and i == 2 then dist.all_reduce "x" end
              guarded(function()
                m(x):sum():backward()
                for j = 1, 2 do sum(step * 1000 + i * 100 + j) end
              end)
              for _ = 1, 2 do
                for _ = 1, 3 do guarded(function() m(x):sum():backward() end) end
              end
            end
            sum(step * 1000)
          end)
          local agreed = guarded(function() sum(step * 10000) end)
          if not (ok and agreed) then lost[#lost + 1] = step end
        end
        assert.is_nil(mixed)
        assert.are.same({ 2 }, lost)
        -- Rank 0 waits for the ranks that are behind, whose failed calls are published several times.
        if rank == 0 then assert.are.equal(1, #failures, table.concat(failures, "; ")) end
      end)

      it("a loop that ranks begin at different indices loses only the step of the error", function()
        local first, last = -3 * rank, 6
        for _, ends in ipairs { last, last + first } do
          local n, lost = 0, {}
          for _ = first, ends do
            n = n + 1
            local t = ms.full({ 1 }, n)
            local ok = pcall(function()
              if n == 2 and rank == 1 then dist.all_reduce "x" end
              dist.all_reduce(t)
            end)
            if ok then assert.are.equal(world * n, t:item()) else lost[#lost + 1] = n end
            if n == 6 then break end
          end
          assert.are.same({ 2 }, lost)
        end
      end)

      it("a call behind an asynchronous one that a peer refused is not combined with the peer's next call", function()
        for step = 1, 5 do
          pcall(function()
            if rank == 1 and step == 2 then dist.all_reduce "x" end
            local a, b = ms.full({ 1 }, step * 10 + 1), ms.full({ 1 }, step * 10 + 2)
            local work = dist.all_reduce(a, { async = true })
            local ok = pcall(dist.all_reduce, b)
            if ok then assert.are.equal(world * (step * 10 + 2), b:item()) end
            work:wait()
          end)
          local c = ms.full({ 1 }, step * 10 + 3)
          local ok = pcall(dist.all_reduce, c)
          assert.is_true(ok or step <= 3)
          if ok then assert.are.equal(world * (step * 10 + 3), c:item()) end
        end
      end)

      it("an error of the script before a save costs only the calls of that step", function()
        local folder = ("/tmp/moonshard-resumed-%d"):format(process.parent())
        for _, bad in ipairs { 0, world - 1 } do
          local agreed
          for step = 1, 4 do
            local ok = pcall(function()
              if step == 2 and rank == bad then error("the script's own error", 0) end
              fsdp.save(folder, model())
            end)
            local flag = ms.tensor { step, ok and 0 or 1 }
            agreed = pcall(dist.all_reduce, flag)
            if agreed then assert.are.equal(world * step, flag[1]:item()) end
          end
          assert.is_true(agreed)
        end
        if rank == 0 then process.remove_folder(folder) end
      end)

      it("the same call in the two parts of an if matches at once", function()
        local function differ()
          local ok = pcall(dist.all_reduce, ms.ones(1), { op = rank == 0 and "max" or "sum" })
          assert.is_false(ok)
        end
        local t = ms.ones(1)
        differ()
        if rank == 0 then
          local kept = function() return t end
          dist.all_reduce(kept())
        else
          dist.all_reduce(t)
        end
        assert.are.equal(world, t:item())
        local function returns()
          if rank == world - 1 then
            dist.all_reduce(t)
            return
          end
          dist.all_reduce(t)
        end
        differ()
        returns()
        assert.are.equal(world * world, t:item())
        for step = 1, 2 do
          t:fill_(1)
          differ()
          for _ = 1, 2 do
            if rank == 1 then
              dist.all_reduce(t)
              break
            elseif step == 1 then
              dist.all_reduce(t)
              break
            else
              dist.all_reduce(t)
            end
            if step == 2 then break end
          end
          assert.are.equal(world, t:item())
        end
      end)

      it("a value that a call of the library gathers is not mixed with one of the script", function()
        local ok, why = pcall(function()
          if rank == 1 then return dist.all_gather_object(5) end
          return nn.DDP(nn.Linear(2, 2))
        end)
        assert.is_false(ok)
        assert.matches("the ranks ask for different things", tostring(why), 1, true)
        assert.are.equal(0, sums(all_reduce))
        assert.are.same(world, #dist.all_gather_object(5))
      end)

      it("a mismatch in a group fails once on its members, and on the ranks that wait for them", function()
        if world ~= 4 then return end
        local mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } })
        local m = fsdp.fully_shard(nn.Linear(4, 4), { mesh = mesh })
        m(x):sum():backward()
        for _ = 1, 2 do
          local y = m(x)
          -- Ranks 2 and 3 have no collective with 0 and 1 here: a late one would meet the error in its forward.
          dist.barrier()
          local ok = pcall(function()
            if rank == 1 then error("the script's own error", 0) end
            y:sum():backward()
          end)
          assert.is_false(ok)
          assert.are.equal(1, sums(function(t) dist.all_reduce(t) end))
          m(x):sum():backward()
        end
      end)
    end)
end
