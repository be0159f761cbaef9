-- SPDX-License-Identifier: MIT
--- Every collective on 1 to 4 ranks, in place, staged, over several simulated nodes, and by NCCL's stand-in on the
--- emulated GPU: odd and empty sizes, every dtype, both ways of waiting, compared with sums in Lua.
local ranks = require "spec.support.ranks"

local DTYPES = { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool" }
local REDUCTIONS = { "sum", "max", "min", "prod" }

-- Element i (from 1) of the input of rank `rank`; small, so that sums are exact in every dtype.
local function value(rank, i, dtype)
  local v = (rank * 7 + i * 3) % 11 - 5
  if dtype == "bool" then return v % 2 == 0 and 1 or 0 end
  return dtype == "uint8" and v + 5 or v
end

local function values(rank, first, n, dtype)
  local list = {}
  for i = 1, n do list[i] = value(rank, first + i, dtype) end
  return list
end

local function combine(op, dtype, a, b)
  local v
  if op == "sum" then v = a + b elseif op == "prod" then v = a * b elseif op == "max" then
    v = math.max(a, b) else v = math.min(a, b) end
  if dtype == "bool" then return v > 0 and 1 or 0 end
  return dtype == "uint8" and v % 256 or v
end

local function reduced(op, world, first, n, dtype)
  local list = values(0, first, n, dtype)
  for r = 1, world - 1 do
    for i = 1, n do list[i] = combine(op, dtype, list[i], value(r, first + i, dtype)) end
  end
  return list
end

local function concat(lists)
  local out = {}
  for _, list in ipairs(lists) do
    for _, v in ipairs(list) do out[#out + 1] = v end
  end
  return out
end

for _, case in ipairs {
  { 1 }, { 2 }, { 3 }, { 4 },
  { 3, ", staged", MOONSHARD_COMM_MAP = "refuse" },
  { 2, " of two nodes", MOONSHARD_COMM_NODES = "2" },
  { 3, " of two nodes in turn", MOONSHARD_COMM_NODES = "0,1,0" },
  { 4, " of two nodes", MOONSHARD_COMM_NODES = "2" },
  { 4, " of three nodes, out of order", MOONSHARD_COMM_NODES = "2,0,1,0" },
  { 2, " over NCCL #cuda", device = "cuda" },
  { 3, " over NCCL #cuda", device = "cuda" },
  { 4, " of two nodes over NCCL #cuda", MOONSHARD_COMM_NODES = "2", device = "cuda" },
} do
  local world, env = case[1], { MOONSHARD_COMM_MAP = case.MOONSHARD_COMM_MAP,
    MOONSHARD_COMM_NODES = case.MOONSHARD_COMM_NODES, MOONSHARD_CUDA = case.device and "emulated",
    MOONSHARD_BACKEND = case.device and "nccl" }
  ranks.describe(world, ("collectives on %d ranks%s"):format(world, case[2] or ""), { env = env }, function(rank)
    local ms, dist
    if rank then
      ms = require "moonshard"
      dist = ms.dist
      if case.device and ms.cuda.is_available() then ms.set_default_device(case.device) end
    end
    local sizes, dtypes = { 0, 1, world - 1, world, 3 * world + 1, 999 }, DTYPES
    if case[2] then sizes, dtypes = { 0, 1, 3 * world + 1, 999 }, { "float32", "bfloat16", "int64", "bool" } end

    local function tensor(list, dtype)
      if #list == 0 then return ms.empty(0, { dtype = dtype }) end
      local given = {}
      for i, v in ipairs(list) do
        if dtype == "bool" then given[i] = v == 1 else given[i] = v end
      end
      return ms.tensor(given, { dtype = dtype })
    end

    local function check(t, want)
      local got = t:reshape(-1):tolist()
      assert.are.equal(#want, #got)
      for i = 1, #want do
        local g = got[i]
        if type(g) == "boolean" then g = g and 1 or 0 end
        if g ~= want[i] then error(("element %d is %s, expected %s"):format(i, tostring(g), tostring(want[i])), 2) end
      end
    end

    -- Calls fn(n, dtype, opts, finish) for every combination.
    local function each(fn)
      for _, dtype in ipairs(dtypes) do
        for _, n in ipairs(sizes) do
          for _, async in ipairs { false, true } do
            fn(n, dtype, { async = async or nil }, function(work)
              assert.are.equal(async, work ~= nil)
              if work then
                work:wait()
                assert.is_true(work:done())
              end
            end)
          end
        end
      end
    end

    it("all_gather puts them in rank order", function()
      each(function(n, dtype, o, finish)
        local out, lists = ms.empty(n * world, { dtype = dtype }), {}
        finish(dist.all_gather(out, tensor(values(rank, 0, n, dtype), dtype), o))
        for r = 0, world - 1 do lists[r + 1] = values(r, 0, n, dtype) end
        check(out, concat(lists))
      end)
    end)

    for _, op in ipairs(REDUCTIONS) do
      it("all_reduce by " .. op, function()
        each(function(n, dtype, o, finish)
          local t = tensor(values(rank, 0, n, dtype), dtype)
          finish(dist.all_reduce(t, { op = op, async = o.async }))
          check(t, reduced(op, world, 0, n, dtype))
        end)
      end)

      it("reduce_scatter gives rank r block r, by " .. op, function()
        each(function(n, dtype, o, finish)
          local out = ms.empty(n, { dtype = dtype })
          finish(dist.reduce_scatter(out, tensor(values(rank, 0, n * world, dtype), dtype),
            { op = op, async = o.async }))
          check(out, reduced(op, world, rank * n, n, dtype))
        end)
      end)
    end

    it("broadcast, reduce, gather and scatter with every root", function()
      each(function(n, dtype, o, finish)
        for root = 0, world - 1 do
          local mine = values(rank, 0, n, dtype)
          local t = tensor(mine, dtype)
          finish(dist.broadcast(t, { src = root, async = o.async }))
          check(t, values(root, 0, n, dtype))

          t = tensor(mine, dtype)
          finish(dist.reduce(t, { dst = root, async = o.async }))
          check(t, rank == root and reduced("sum", world, 0, n, dtype) or mine)

          local list, work = dist.gather(tensor(mine, dtype), { dst = root, async = o.async })
          finish(work)
          assert.are.equal(rank == root, list ~= nil)
          for r = 0, list and world - 1 or -1 do check(list[r + 1], values(r, 0, n, dtype)) end

          local parts
          if rank == root then
            parts = {}
            for r = 0, world - 1 do parts[r + 1] = tensor(values(root, r, n, dtype), dtype) end
          end
          t = ms.empty(n, { dtype = dtype })
          finish(dist.scatter(t, parts, { src = root, async = o.async }))
          check(t, values(root, rank, n, dtype))
        end
      end)
    end)

    it("all_to_all sends block r to rank r", function()
      each(function(n, dtype, o, finish)
        local out, lists = ms.empty(n * world, { dtype = dtype }), {}
        finish(dist.all_to_all(out, tensor(values(rank, 0, n * world, dtype), dtype), o))
        for r = 0, world - 1 do lists[r + 1] = values(r, rank * n, n, dtype) end
        check(out, concat(lists))
      end)
    end)

    if world > 1 then
      it("send and recv around a ring", function()
        local to, from = (rank + 1) % world, (rank - 1) % world
        each(function(n, dtype, o, finish)
          local t, got = tensor(values(rank, 0, n, dtype), dtype), ms.empty(n, { dtype = dtype })
          if o.async then
            local sending = dist.send(t, to, o)
            finish(dist.recv(got, from, o))
            finish(sending)
          elseif rank == 0 then
            dist.send(t, to)
            dist.recv(got, from)
          else
            dist.recv(got, from)
            dist.send(t, to)
          end
          check(got, values(from, 0, n, dtype))
        end)
      end)
    end

    it("avg divides by the ranks and needs a floating-point dtype", function()
      local t = ms.tensor { rank, 2 * rank }
      dist.all_reduce(t, { op = "avg" })
      check(t, { (world - 1) / 2, world - 1 })
      local ok, why = pcall(dist.all_reduce, ms.ones(3, { dtype = "int32" }), { op = "avg" })
      assert.is_false(ok)
      assert.matches("all_reduce: 'avg' needs a floating%-point dtype, the tensor is int32", why)
    end)

    it("half types are added up in float32 and rounded once", function()
      -- float16 has no 2048 + 1 and bfloat16 no 256 + 1, so accumulation in the half type would lose each 1.
      for _, dtype in ipairs { "float16", "bfloat16" } do
        local big = dtype == "float16" and 2048 or 256
        local t = ms.full({ 5000 }, rank == 0 and big or 1, { dtype = dtype })
        dist.all_reduce(t)
        local exact = ms.tensor({ big + world - 1 }):to(dtype):item()
        assert.are.equal(exact, t[1]:item())
        assert.are.equal(exact, t[5000]:item())
      end
    end)

    it("takes views as inputs and outputs", function()
      local whole = ms.arange(0, 12, { dtype = "float32" }):reshape(3, 4)
      local view = whole:t()                                -- 4 x 3, not contiguous
      assert.is_false(view:is_contiguous())
      local out = ms.zeros(4 * world, 3)
      dist.all_gather(out, view)
      for r = 0, world - 1 do assert.is_true(out:narrow(1, 4 * r + 1, 4):equal(view:contiguous())) end
      local target = ms.zeros(3, 4)
      target:copy_(whole)
      dist.all_reduce(target:t())
      assert.is_true(target:equal(whole * world))
      if world > 1 then
        local ok, why = pcall(dist.all_reduce, target:t(), { async = true })
        assert.is_false(ok)
        assert.matches("must be contiguous", why)
      end
    end)

    it("works in place on this rank's block", function()
      local n = 5
      local all = ms.zeros(n * world)
      local mine = all:narrow(1, rank * n + 1, n)
      mine:fill_(rank + 1)
      dist.all_gather(all, mine)
      for r = 0, world - 1 do assert.are.equal(r + 1, all[r * n + n]:item()) end
      dist.reduce_scatter(mine, all)
      assert.are.equal((rank + 1) * world, mine[1]:item())
      if world > 1 then
        local other = all:narrow(1, (rank + 1) % world * n + 1, n)
        local ok, why = pcall(dist.all_gather, all, other)
        assert.is_false(ok)
        assert.matches("all_gather: out and in overlap; a call in place must pass this rank's own block", why)
      end
    end)

    it("refuses sizes and dtypes that don't fit, before anything is sent", function()
      local x = ms.ones(4)
      local function refuses(pattern, fn, ...)
        local ok, why = pcall(fn, ...)
        assert.is_false(ok)
        assert.matches(pattern, why)
      end
      local where = x.device
      refuses(("all_gather: out must have in's number of elements times the number of ranks: out is float32 %%[7%%] %s, in is float32 %%[4%%] %s, for ")
        :format(where, where) .. world
        .. " rank", dist.all_gather,
        ms.ones(7), x)
      refuses("reduce_scatter: dtypes differ: out is float64", dist.reduce_scatter,
        ms.ones(1, { dtype = "float64" }), ms.ones(world))
      refuses("broadcast: option 'src' is missing", dist.broadcast, x)
      refuses("broadcast: rank 9 is not a member", dist.broadcast, x, { src = 9 })
      refuses("all_reduce: option 'op' is 'mean', expected one of", dist.all_reduce, x, { op = "mean" })
      refuses("all_reduce: the tensor is a number %(3%), expected a tensor", dist.all_reduce, 3)
      refuses("send: rank " .. rank .. " is this rank itself", dist.send, x, rank)
      dist.barrier()
    end)

    it("bumps the version of what it writes", function()
      local x = ms.ones(3):requires_grad_(true)
      local y = x * 2
      local z = (y * y):sum()
      dist.all_reduce(y:detach())
      assert.has_error(function() z:backward() end)
    end)

    it("transfers Lua values, also nested, shared and cyclic tables", function()
      local shared = { 1, 2 }
      local v = { rank = rank, list = { true, false, "text\0with zero", math.huge }, a = shared, b = shared,
        t = ms.tensor({ rank, 1 }, { device = "cpu" }) }
      v.self = v
      local all = dist.all_gather_object(v)
      assert.are.equal(world, #all)
      for r = 0, world - 1 do
        local got = all[r + 1]
        assert.are.equal(r, got.rank)
        assert.are.same({ true, false, "text\0with zero", math.huge }, got.list)
        assert.are.equal(got.a, got.b)
        assert.are.equal(got, got.self)
        assert.are.same({ r, 1 }, got.t:tolist())
      end
      assert.are.same({ nil, nil }, { dist.all_gather_object(nil)[1] })
      assert.are.equal(("x"):rep(100000) .. 0, dist.broadcast_object(("x"):rep(100000) .. rank, { src = 0 }))
      assert.are.equal(world - 1, dist.broadcast_object(rank, { src = world - 1 }))
      local ok, why = pcall(dist.all_gather_object, { deep = { print } })
      assert.is_false(ok)
      assert.matches("all_gather_object: the value%.deep%[1%] is a function", why)
    end)
  end)
end
