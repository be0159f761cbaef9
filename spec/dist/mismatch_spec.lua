--- Collectives that don't match: an error on every rank within 100 ms, naming who asked for what, before a byte has
--- moved; afterwards the ranks go on together. Each class of mismatch against each collective.
local ranks = require "spec.support.ranks"
local patience = require("spec.support.process").patience

local N = 600                                          -- more than travels with the ready flag; SMALL does not
local SMALL = 8

for world = 2, 3 do
  ranks.describe(world, ("mismatches on %d ranks"):format(world), function(rank)
    local ms, dist
    if rank then
      ms = require "moonshard"
      dist = ms.dist
    end
    local odd = rank == world - 1                       -- the one that asks for something else

    -- What each collective does; v says how this rank's request differs.
    local collectives = {
      all_reduce = function(v) dist.all_reduce(v.t, { op = v.op, group = v.group, async = v.async }) end,
      all_gather = function(v) dist.all_gather(v.many, v.t, { group = v.group }) end,
      reduce_scatter = function(v) dist.reduce_scatter(v.t, v.many, { op = v.op, group = v.group }) end,
      broadcast = function(v) dist.broadcast(v.t, { src = v.root, group = v.group }) end,
      reduce = function(v) dist.reduce(v.t, { dst = v.root, op = v.op, group = v.group }) end,
      gather = function(v) dist.gather(v.t, { dst = v.root, group = v.group }) end,
      scatter = function(v) dist.scatter(v.t, rank == v.root and v.list or nil, { src = v.root, group = v.group }) end,
      all_to_all = function(v) dist.all_to_all(v.many, v.many2, { group = v.group }) end,
      barrier = function(v) dist.barrier(v.group) end,
    }
    local names = {}
    for name in pairs(collectives) do names[#names + 1] = name end
    table.sort(names)

    local function request(n, dtype)
      local o = { dtype = dtype or "float32" }
      local v = { t = ms.full({ n }, rank + 1, o), many = ms.full({ n * world }, rank + 1, o), many2 = ms.zeros(n * world, o), list = {},
        op = "sum", root = 0 }
      for r = 1, world do v.list[r] = ms.full({ n }, 7, o) end
      return v
    end

    -- Runs fn, which must fail everywhere at once with `pattern`; then everybody is in step again.
    -- At once is 100 ms on an idle machine; this one runs other things beside the specs and holds up anybody at any moment:
    -- within a second, or once more, up to five times.
    local function fails(fn, pattern, v)
      local least = math.huge
      for _ = 1, 5 do
        local begun = ms.time()
        local ok, why = pcall(fn)
        local seconds = ms.time() - begun
        if ok then error("no error", 2) end
        if not why:find(pattern) then error(("expected %s, got: %s"):format(pattern, why), 2) end
        if v then                                       -- no data moved
          if v.t[1]:item() ~= rank + 1 or v.many[1]:item() ~= rank + 1 or v.many2[1]:item() ~= 0 then error("data moved", 2) end
        end
        local all = dist.all_gather_object { why = (why:gsub("^[^\n]-:%d+: ", "", 1)), seconds = seconds }
        local slowest = 0
        for r = 1, world do
          if all[r].why ~= all[1].why then error(("ranks differ: %s | %s"):format(all[1].why, all[r].why), 2) end
          slowest = math.max(slowest, all[r].seconds)
        end
        least = math.min(least, slowest)
        if least < patience then return why end
      end
      error(("took %.0f ms at best"):format(least * 1e3), 2)
    end

    for _, n in ipairs { SMALL, N } do
      local size = n == SMALL and "small " or "large "
      for _, name in ipairs(names) do
        local run = collectives[name]

        it(size .. name .. " against another collective", function()
          for _, other in ipairs(names) do
            if other ~= name then
              local v = request(n)
              local why = fails(function()
                if odd then collectives[other](v) else run(v) end
              end, "the ranks ask for different things", v)
              assert.matches(("rank %d: %s"):format(world - 1, other), why)
            end
          end
        end)

        if name ~= "barrier" then
          it(size .. name .. " with another count", function()
            local v = request(odd and n + world or n)
            local why = fails(function() run(v) end, "the ranks ask for different things", v)
            assert.matches(("ranks? 0[, 1]*: %s of %d float32"):format(name, name == "all_to_all" and n * world or n), why)
          end)

          it(size .. name .. " with another dtype", function()
            local v = request(n, odd and "float64" or "float32")
            local why = fails(function() run(v) end, "the ranks ask for different things", v)
            assert.matches("float64", why)
          end)
        end

        if name == "all_reduce" or name == "reduce_scatter" or name == "reduce" then
          it(size .. name .. " with another reduction", function()
            local v = request(n)
            v.op = odd and "max" or "sum"
            local why = fails(function() run(v) end, "the ranks ask for different things", v)
            assert.matches(("rank %d: %s of %d float32, max"):format(world - 1, name, n), why)
          end)
        end

        if name == "broadcast" or name == "reduce" or name == "gather" or name == "scatter" then
          it(size .. name .. " with another root", function()
            local v = request(n)
            v.root = odd and 1 or 0
            local why = fails(function() run(v) end, "the ranks ask for different things", v)
            assert.matches(("rank %d: %s of %d float32,.- root 1"):format(world - 1, name, n), why)
          end)
        end

        it(size .. name .. " against another collective names both lines", function()
          local v = request(n)
          local first = debug.getinfo(1, "l").currentline + 3
          local why = fails(function()
            if odd then
              dist.all_reduce(v.many)
            else
              dist.broadcast(v.t, { src = 0 })
            end
          end, "the ranks ask for different things", v)
          assert.matches(("ranks? [%%d, ]+: broadcast of %d float32, root 0, at spec/dist/mismatch_spec%%.lua:%d"):format(n, first + 2), why)
          assert.matches(("rank %d: all_reduce of %d float32, sum, at spec/dist/mismatch_spec%%.lua:%d"):format(world - 1, n * world, first), why)
        end)

        it(size .. name .. " in another group is a circle of waiting ranks", function()
          local list = {}
          for r = 0, world - 1 do list[r + 1] = r end
          local a, b = dist.new_group(list), dist.new_group(list)
          local v = request(n)
          v.group = odd and a or b
          fails(function() run(v) end, "deadlock: rank %d waits for rank %d", v)
        end)

        it(size .. name .. " skipped by one rank: the step differs, or the next collective", function()
          local v = request(n)
          local why = fails(function()
            ms.scope(function()                         -- so that the loop left by the error is closed
              for step in ms.steps(5) do
                if not (odd and step == 3) then run(v) end
              end
            end)
          end, "the ranks ask for different things")
          assert.matches("step 3", why)
          assert.matches("step 4", why)
          fails(function()
            if not odd then run(v) end
            dist.broadcast(ms.zeros(n + 1), { src = 0 })
          end, name == "broadcast" and "different things" or "broadcast")
        end)
      end
    end

    if world > 2 then
      it("a rank that comes after the others have told meets their text", function()
        local v = request(N)
        local why = fails(function()
          if rank == 1 then require("spec.support.process").sleep(0.1) end
          if odd then dist.barrier() else dist.all_reduce(v.t) end
        end, "the ranks ask for different things", v)
        assert.matches("; rank 2: barrier", why)
      end)
    end

    it("the same collective from two lines is one collective", function()
      for _, n in ipairs { SMALL, N } do
        local a = ms.full({ n }, rank + 1)
        if rank == 0 then
          dist.broadcast(a, { src = 0 })
        else
          dist.broadcast(a, { src = 0 })
        end
        assert.are.equal(1, a[n]:item())
        local b = ms.full({ n }, rank + 1)
        if odd then dist.all_reduce(b) else
          dist.all_reduce(b) end
        assert.are.equal(world * (world + 1) / 2, b[n]:item())
        if odd then dist.barrier() else
          dist.barrier() end
        local all
        if odd then all = dist.all_gather_object(rank) else
          all = dist.all_gather_object(rank) end
        assert.are.same({ 0, world - 1 }, { all[1], all[world] })
      end
    end)

    it("an asynchronous collective reports it where it is waited for", function()
      fails(function() dist.all_reduce(ms.ones(odd and N + 1 or N), { async = true }):wait() end, "the ranks ask for different things")
      fails(function()
        local t = ms.ones(odd and N + 1 or N)
        dist.all_reduce(t, { async = true })
        t:sum()
      end, "the ranks ask for different things")
    end)

    it("new_group with another list", function()
      fails(function() dist.new_group(odd and { 0 } or { 0, 1 }) end, "unit 'new_group 0, 1'")
    end)

    it("sends that face each other are a circle, and sizes of send and recv are compared", function()
      if world == 2 then
        fails(function() dist.send(ms.ones(4), 1 - rank) end, "deadlock: rank %d waits for rank %d")
        fails(function()
          if odd then dist.recv(ms.zeros(5), 0) else dist.send(ms.ones(4), 1) end
        end, "rank 0: send/recv of 4 float32 from rank 0.*rank 1: send/recv of 5 float32")
      end
    end)

    it("an error published by one rank reaches those that wait", function()
      local lib = require "moonshard.ffi".lib
      local least = math.huge
      for _ = 1, 5 do
        local begun = ms.time()
        if odd then
          lib.ms_dist_publish_error("a wheel came off", lib.ms_dist_errors())
        else
          local ok, why = pcall(dist.all_reduce, ms.ones(N))
          assert.is_false(ok)
          assert.matches(("rank %d failed: a wheel came off"):format(world - 1), why)
        end
        least = math.min(least, math.max(unpack(dist.all_gather_object(ms.time() - begun))))
        if least < patience then break end
        dist.barrier()
      end
      assert.is_true(least < patience)
      -- And the ranks are in step again.
      local t = ms.ones(N)
      dist.all_reduce(t)
      assert.are.equal(world, t[N]:item())
      for _ = 1, 40 do dist.barrier() end
    end)

    it("all of it leaves the data right", function()
      local t = ms.full({ N }, rank + 1)
      dist.all_reduce(t)
      assert.are.equal(world * (world + 1) / 2, t[N]:item())
    end)
  end)
end
