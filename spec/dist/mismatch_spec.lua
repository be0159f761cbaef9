-- SPDX-License-Identifier: MIT
--- Mismatched collectives: an error on every rank within 100 ms that names the ranks and their requests, before any
--- data moves; afterwards the ranks continue together. Each class of mismatch is tried with each collective.
local ranks = require "spec.support.ranks"
local sorted_pairs = require("moonshard.tensor.util").sorted_pairs
local patience = require("spec.support.process").patience

local N = 600                                          -- larger than a message sent with the ready flag; SMALL is not
local SMALL = 8

for world = 2, 4 do
  ranks.describe(world, ("mismatches on %d ranks"):format(world), function(rank)
    local ms, dist
    if rank then
      ms = require "moonshard"
      dist = ms.dist
    end
    local odd = rank == world - 1                       -- the rank whose request differs

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

    -- A request with blocks of rows x columns elements; columns nil: 1-d blocks.
    local function request(rows, dtype, columns)
      local o = { dtype = dtype or "float32" }
      local function shape(blocks) return { rows * blocks, columns } end
      local v = { t = ms.full(shape(1), rank + 1, o), many = ms.full(shape(world), rank + 1, o),
        many2 = ms.zeros(shape(world), o), list = {},
        op = "sum", root = 0 }
      for r = 1, world do v.list[r] = ms.full(shape(1), 7, o) end
      return v
    end

    local function first(t) return t:reshape(-1)[1]:item() end

    -- Runs fn, which must fail on all ranks at once. check(why) examines the message of one rank and returns the part
    -- that must be equal on all ranks; then all ranks are in step again. "At once" is 100 ms on an idle machine. Since
    -- this machine runs other processes and may preempt any rank, the limit is a second, and fn is tried up to five
    -- times.
    local function fails_at_once(fn, check)
      local least = math.huge
      for _ = 1, 5 do
        local begun = ms.time()
        local ok, why = pcall(fn)
        local seconds = ms.time() - begun
        if ok then error("no error was raised", 3) end
        dist.recover()
        local all = dist.all_gather_object { text = check(why), seconds = seconds }
        local slowest = 0
        for r = 1, world do
          if all[r].text ~= all[1].text then error(("ranks differ: %s | %s"):format(all[1].text, all[r].text), 3) end
          slowest = math.max(slowest, all[r].seconds)
        end
        least = math.min(least, slowest)
        if least < patience then return end
      end
      error(("the error took %.0f ms at best, expected less than %.0f"):format(least * 1e3, patience * 1e3), 3)
    end

    -- fn fails on all ranks with `pattern`, and the tensors of the request v are unchanged. Returns the message.
    local function fails(fn, pattern, v)
      local message
      fails_at_once(fn, function(why)
        message = why
        if not why:find(pattern) then error(("expected %s, got: %s"):format(pattern, why), 0) end
        if v and (first(v.t) ~= rank + 1 or first(v.many) ~= rank + 1 or first(v.many2) ~= 0) then
          error("data was moved before the error", 0)
        end
        return (why:gsub("^[^\n]-:%d+: ", "", 1))
      end)
      return message
    end

    -- Reasons why a rank's call is refused before anything is sent: by Lua, or by the engine.
    local function set(...)
      local list = {}
      for _, name in ipairs { ... } do list[name] = true end
      return list
    end
    local refusals = {
      ["its group"] = { spoil = function(v) v.group = 3 end, of = set(unpack(names)) },
      ["an option"] = { spoil = function(v) v.async = "yes" end, of = set "all_reduce" },
      ["a tensor"] = { spoil = function(v) v.t, v.many, v.list = "x", nil, "x" end,
        of = set("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
        "all_to_all") },
      ["its root"] = { spoil = function(v) v.root = world end, of = set("broadcast", "reduce", "gather", "scatter") },
      ["sizes"] = { spoil = function(v) v.many = ms.zeros(world + 1) end, of = set("all_gather", "reduce_scatter",
        "all_to_all") },
      ["a dtype"] = { spoil = function(v) v.t, v.many, v.op = v.t:to "int32", v.many:to "int32", "avg" end,
        of = set("all_reduce", "reduce_scatter", "reduce") },
      ["the device"] = { spoil = function(v) v.t, v.many = v.t:to "meta", v.many:to "meta" end,
        of = set("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "scatter", "all_to_all") },
    }

    -- fn is refused on rank `who`. The other ranks fail with its text at once; afterwards all are in step.
    local function refused(fn, who)
      who = who or world - 1
      local text
      fails_at_once(fn, function(why)
        local from_peer
        text, from_peer = why:gsub("^.-rank %d failed: ", "")
        if (from_peer == 0) ~= (rank == who) then
          error(("expected a failure of rank %d, got: %s"):format(who, why), 0)
        end
        local t = ms.full({ 4 }, 10 * (rank + 1))
        dist.all_reduce(t)
        if t[1]:item() ~= 5 * world * (world + 1) then
          error(("the sum combines different calls: %g"):format(t[1]:item()), 0)
        end
        return text
      end)
      return text
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
            assert.matches(("ranks? 0[, %%d]*: %s of %d float32"):format(name, name == "all_to_all" and n * world or n),
              why)
          end)

          it(size .. name .. " with another shape of the same count", function()
            local rows = n == SMALL and 2 or 20
            local v = request(odd and n / rows or rows, nil, odd and rows or n / rows)
            local why = fails(function() run(v) end, "the ranks ask for different things", v)
            local function shape(a, b)
              if name == "reduce_scatter" or name == "all_to_all" then a = a * world end        -- size of the input
              return (", shape %%[%d, %d%%]"):format(a, b)
            end
            assert.matches(("ranks? 0[, %%d]*: %s .*%s.*; rank %d: %s .*%s"):format(name, shape(rows, n / rows),
              world - 1, name, shape(n / rows, rows)), why)
            v = request(odd and n or n / rows, nil, not odd and rows or nil)                    -- 1-d
            fails(function() run(v) end, ("shape %%[%d%%]"):format((name == "reduce_scatter" or name == "all_to_all")
              and n * world or n), v)
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
          local line = debug.getinfo(1, "l").currentline + 3
          local why = fails(function()
            if odd then
              dist.all_reduce(v.many)
            else
              dist.broadcast(v.t, { src = 0 })
            end
          end, "the ranks ask for different things", v)
          assert.matches(("ranks? [%%d, ]+: broadcast of %d float32, root 0, at spec/dist/mismatch_spec%%.lua:%d"):format(n, line + 2), why)
          assert.matches(("rank %d: all_reduce of %d float32, sum, at spec/dist/mismatch_spec%%.lua:%d"):format(
            world - 1, n * world, line), why)
        end)

        for what, refusal in sorted_pairs(refusals) do
          if refusal.of[name] then
            it(("%s%s refused by one rank for %s fails on the others, and the next one is right"):format(size, name,
              what), function()
              local v = request(n)
              if odd then refusal.spoil(v) end
              refused(function() run(v) end)
            end)
          end
        end

        it(size .. name .. " in another group is a deadlock", function()
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
            ms.scope(function()                         -- closes the loop that the error left
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
      it("a rank that arrives after the error was published raises it", function()
        local v = request(N)
        local why = fails(function()
          if rank == 1 then require("spec.support.process").sleep(0.1) end
          if odd then dist.barrier() else dist.all_reduce(v.t) end
        end, "the ranks ask for different things", v)
        assert.matches(("; rank %d: barrier"):format(world - 1), why)
      end)
    end

    -- Calls other than plain collectives of tensors: a wrong call on one rank, a correct one on the others.
    local others = {
      all_gather_object = { function() dist.all_gather_object(print) end, function() dist.all_gather_object(1) end },
      broadcast_object = { function() dist.broadcast_object(1, { src = world }) end,
      function() dist.broadcast_object(1, { src = 0 }) end },
      new_group = { function() dist.new_group { 0, 0 } end, function() dist.new_group { 0, 1 } end },
      init_device_mesh = { function() dist.init_device_mesh("cpu", { world, 2 }) end,
      function() dist.init_device_mesh("cpu", { world, 1 }) end },
    }
    for name, calls in sorted_pairs(others) do
      it(name .. " refused by one rank fails on the others, and the next one is right", function()
        refused(calls[odd and 1 or 2])
        refused(calls[rank == 0 and 1 or 2], 0)
      end)
    end

    it("a send or a receive refused by one rank fails on its peer, and the next one is right", function()
      local to = world - 1
      for _, receives in ipairs { false, true } do
        local function exchange(bad)
          if rank == 0 then dist.send(ms.full({ 3 }, 5), to, { async = bad and not receives and 1 or nil }) end
          local t = ms.zeros(bad and receives and 4 or 3)
          if odd then dist.recv(t, 0, { group = bad and receives and 7 or nil }) end
          return t
        end
        local ok, why = pcall(exchange, true)
        if rank == 0 or odd then
          assert.is_false(ok)
          assert.are.equal((rank == 0) == receives, why:find("rank %d failed: ") ~= nil)
        end
        dist.recover()
        local t = exchange()
        if odd then assert.are.equal(5, t[3]:item()) end
      end
      dist.barrier()
    end)

    it("calls that every rank refuses do not disturb collectives in flight", function()
      local pair = rank - rank % 2
      local group
      for r = 0, world - 2, 2 do
        local made = dist.new_group { r, r + 1 }
        if r == pair then group = made end
      end
      for k = 1, 20 do
        local work
        if group then
          if rank % 2 == k % 2 then require("spec.support.process").sleep(1e-3) end
          local t = ms.ones(N)
          work = dist.all_reduce(t, { group = group, async = true })
          dist.all_reduce(ms.ones(N), { group = group })
        end
        assert.is_false((pcall(dist.all_reduce, "x")))
        assert.is_false((pcall(dist.new_group, { 0, world })))
        if work then work:wait() end
      end
      local t = ms.ones(2)
      dist.all_reduce(t)
      assert.are.equal(world, t[1]:item())
    end)

    it("a refused call does not affect groups without its rank, and a wrong call of a non-member affects no group",
      function()
      if world < 3 then return end
      local inner, outer = dist.new_group { 0, 1 }, dist.new_group { 1, 2 }
      for _ = 1, 5 do
        if rank == 0 then
          local _, why = pcall(dist.all_reduce, ms.ones(1, { dtype = "int32" }), { group = inner, op = "avg" })
          assert.matches("'avg' needs a floating%-point dtype", why)
        elseif rank == 1 then
          local _, why = pcall(dist.all_reduce, ms.ones(1), { group = inner })
          assert.matches("rank 0 failed: .*'avg' needs a floating%-point dtype", why)
        elseif rank == 2 then
          -- Rank 2 is not a member, so no rank waits for its calls.
          assert.is_false((pcall(dist.all_reduce, "x", { group = inner })))
          assert.is_false((pcall(dist.all_reduce, "x", { group = dist.self_group() })))
        end
        if rank == 1 or rank == 2 then
          local t = ms.full({ 1 }, rank)
          dist.all_reduce(t, { group = outer })
          assert.are.equal(3, t:item())
        end
        dist.recover()
        if rank == 0 or rank == 1 then
          local t = ms.full({ 1 }, rank + 1)
          dist.all_reduce(t, { group = inner })
          assert.are.equal(3, t:item())
        end
      end
      dist.barrier()
    end)

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

    it("an asynchronous collective reports it in wait", function()
      fails(function() dist.all_reduce(ms.ones(odd and N + 1 or N), { async = true }):wait() end,
        "the ranks ask for different things")
      fails(function()
        local t = ms.ones(odd and N + 1 or N)
        dist.all_reduce(t, { async = true })
        t:sum()
      end, "the ranks ask for different things")
    end)

    it("new_group with another list", function()
      fails(function() dist.new_group(odd and { 0 } or { 0, 1 }) end, "unit 'new_group 0, 1'")
    end)

    it("sends that face each other are a deadlock, and sizes of send and recv are compared", function()
      if world == 2 then
        fails(function() dist.send(ms.ones(4), 1 - rank) end, "deadlock: rank %d waits for rank %d")
        fails(function()
          if odd then dist.recv(ms.zeros(5), 0) else dist.send(ms.ones(4), 1) end
        end, "rank 0: send/recv of 4 float32 from rank 0.*rank 1: send/recv of 5 float32")
      end
    end)

    it("failed work of one rank reaches those that wait", function()
      local lib = require "moonshard.core.ffi".lib
      local least = math.huge
      for _ = 1, 5 do
        local begun = ms.time()
        if odd then
          lib.ms_dist_failed "a wheel came off"
        else
          local ok, why = pcall(dist.all_reduce, ms.ones(N))
          assert.is_false(ok)
          assert.matches(("rank %d failed: a wheel came off"):format(world - 1), why)
        end
        begun = ms.time() - begun
        dist.recover()
        least = math.min(least, math.max(unpack(dist.all_gather_object(begun))))
        if least < patience then break end
        dist.barrier()
      end
      assert.is_true(least < patience)
      -- The ranks' calls match again.
      local t = ms.ones(N)
      dist.all_reduce(t)
      assert.are.equal(world, t[N]:item())
      for _ = 1, 40 do dist.barrier() end
    end)
  end)
end
