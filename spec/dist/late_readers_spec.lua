-- SPDX-License-Identifier: MIT
-- After an error that a script survives, ranks read each other's requests at any time, also after a fast rank has left
-- the call and makes its next ones. The delays are between the arrival of all ranks and the reading of their requests.
local ranks = require "spec.support.ranks"

for _, layout in ipairs { { 4 }, { 4, "0,0,1,1" } } do
  local world, nodes = layout[1], layout[2]
  ranks.describe(world, "ranks that read their peers' requests late" .. (nodes and ", between nodes" or ""),
    { env = { MOONSHARD_COMM_NODES = nodes } }, function()
      local ms = require "moonshard"
      local nn, dist = ms.nn, ms.dist
      local lib = require "moonshard.core.ffi".lib
      local rank = dist.rank()
      local x = ms.ones(2, 4)

      local failures, wrong
      local function guarded(fn, ...)
        local ok, why = pcall(fn, ...)
        if not ok then failures[#failures + 1] = tostring(why) end
        return ok
      end
      local function sum(v)
        local t = ms.full({ 1 }, v)
        dist.all_reduce(t)
        if t:item() ~= world * v then wrong = ("%g, not %g"):format(t:item(), world * v) end
      end
      local function refused() dist.all_reduce "x" end
      local function late(seconds) lib.ms_dist_set_delay(-1, seconds) end

      local model
      before_each(function()
        model = model or nn.DDP(nn.Linear(4, 4))
        failures, wrong = {}, nil
      end)
      after_each(function() late(0) end)

      local function succeeds(n)
        assert.is_nil(wrong)
        assert.are.equal(n, #failures, table.concat(failures, "\n"))
      end

      -- Each forward below fails on the ranks that are behind, and they publish the error. In each, another one of
      -- these ranks is the first to leave the call.
      it("combine no different calls, and the rank furthest ahead does not fail, whichever rank leaves a call first", function()
        -- First, an error after which another rank is the one furthest ahead.
        pcall(function()
          if rank == world - 1 then refused() end
          for _ = 1, 2 do pcall(sum, 1) end
        end)
        sum(2)
        guarded(function()
          if rank == 0 then
            late(0.05)
            refused()
          end
          guarded(function() model(x):sum():backward() end)
          for first = 1, world - 1 do
            late(rank == first and 0 or rank < first and 0.2 or 0.05)
            guarded(model, x)
          end
          late(0)
          for v = 3, 6 do guarded(sum, v) end
        end)
        guarded(sum, 7)
        if rank == 0 then succeeds(1) else assert.is_nil(wrong) end
      end)

      it("do not take a peer's next call for the one that they wait in", function()
        guarded(function()
          if rank == 0 then
            late(0.1)
            refused()
          end
          guarded(function() model(x):sum():backward() end)
          guarded(model, x)
          if rank == 1 then guarded(refused) else guarded(sum, 1) end
        end)
        guarded(sum, 2)
        late(0)
        for v = 3, 5 do guarded(sum, v) end
        assert.is_nil(wrong)
        -- Rank 0 fails twice: in its own refused call, and in the call that rank 1's refused call makes fail.
        if rank == 0 then succeeds(2) end
      end)

      it("do not fail where another rank at the same call is the one that the others wait for", function()
        guarded(function()
          if rank == 0 then refused() end
          guarded(function() model(x):sum():backward() end)
          if rank < world - 1 then error("the script's own error", 0) end
          for _ = 1, 3 do guarded(model, x) end
        end)
        if rank == 1 then late(0.05) end
        guarded(sum, 1)
        if rank == 1 then succeeds(2) else assert.is_nil(wrong) end
      end)
    end)
end
