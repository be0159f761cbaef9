-- SPDX-License-Identifier: MIT
--- Groups, asynchronous works, meshes, the record of collectives.
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"
local patience = process.patience

ranks.describe(4, "groups of 4 ranks #timed", function(rank, world)
  local ms, dist, lib
  if rank then
    ms = require "moonshard"
    dist = ms.dist
    lib = require "moonshard.core.ffi".lib
  end

  it("number their members in ascending order; others are no members", function()
    local g = dist.new_group { 3, 1 }
    assert.are.equal(({ [1] = 0, [3] = 1 })[rank], dist.rank(g))
    assert.are.equal(2, dist.world_size(g))
    assert.are.same({ 1, 3 }, dist.group_ranks(g))
    assert.are.equal("Group(ranks 1, 3)", tostring(g))
    if dist.rank(g) then
      local t = ms.tensor { rank }
      dist.all_reduce(t, { group = g })
      assert.are.equal(4, t:item())
      dist.broadcast(t:fill_(rank), { src = 3, group = g })     -- src is a rank of the world, not of the group
      assert.are.equal(3, t:item())
    else
      local ok, why = pcall(dist.all_reduce, ms.ones(1), { group = g })
      assert.is_false(ok)
      assert.matches(("all_reduce: rank %d is not a member of this group"):format(rank), why)
      assert.is_false((pcall(dist.barrier, g)))
    end
    local ok, why = pcall(dist.broadcast, ms.ones(1), { src = 0, group = dist.rank(g) and g or dist.self_group() })
    if rank ~= 0 then
      assert.is_false(ok)
      assert.matches("broadcast: rank 0 is not a member of the group", why)
    end
  end)

  it("are freed: thousands more than fit at a time, of all sizes, with correct results in between", function()
    local function resident()
      collectgarbage()
      collectgarbage()
      return tonumber(process.read "/proc/self/statm":match "^%d+ (%d+)") * 4096
    end
    local live, before = {}, nil
    for k = 1, 3000 do
      local list = {}
      for r = 0, world - 1 do
        if (k + r) % 3 ~= 0 or r == k % world then list[#list + 1] = r end
      end
      live[#live + 1] = dist.new_group(list)
      if #live > 5 then dist.free_group(table.remove(live, k % 5 + 1)) end
      if k % 100 == 0 then
        for _, g in ipairs(live) do
          if dist.rank(g) then
            local t = ms.full({ 300 }, rank + 1)
            dist.all_reduce(t, { group = g })
            local sum = 0
            for _, r in ipairs(dist.group_ranks(g)) do sum = sum + r + 1 end
            assert.are.equal(sum, t[300]:item())
          end
        end
      end
      if k == 500 then before = resident() end
    end
    for _, g in ipairs(live) do dist.free_group(g) end
    local grown = resident() - before
    -- A sanitizer keeps freed memory for a while, and qemu what it has translated.
    assert.is_true(grown < 2 ^ 20 or process.tool ~= nil, ("%d bytes more"):format(grown))
  end)

  it("that are freed wait for collectives in flight, and raise on later use", function()
    local list = {}
    for r = 0, world - 1 do list[r + 1] = r end
    for n = 1, 20 do
      local g = dist.new_group(list)
      local works, t = {}, {}
      for k = 1, n do
        t[k] = ms.full({ 5000 }, rank + k)
        works[k] = dist.all_reduce(t[k], { group = g, async = true })
      end
      local m = n == 20 and ms.fsdp.fully_shard(ms.nn.Linear(4, 4), { mesh = dist.mesh_from_group(g) })
      dist.free_group(g)
      for k = 1, n do
        assert.is_true(works[k]:done())
        assert.are.equal(world * (world - 1) / 2 + k * world, t[k][5000]:item())
      end
      for _, use in ipairs { function() dist.all_reduce(t[1], { group = g }) end, function() dist.rank(g) end,
        function() dist.world_size(g) end, function() dist.group_ranks(g) end, function() dist.barrier(g) end,
        function() dist.all_gather_object(1, { group = g }) end, function() dist.free_group(g) end,
        function()
          if not m then dist.barrier(g) end
          dist.barrier()                                -- a rank that fails early would end its peers' collectives
          m(ms.ones(1, 4))
        end } do
        local ok, why = pcall(use)
        assert.is_false(ok)
        assert.matches("was freed by dist.free_group", why)
      end
      assert.are.equal("Group(freed)", tostring(g))
    end
    for _, bad in ipairs { dist.default_group(), dist.self_group(), 3, false } do
      local ok, why = pcall(dist.free_group, bad or nil)
      assert.is_false(ok)
      assert.matches("dist.free_group: ", why)
    end
    dist.barrier()
  end)

  it("are freed by all or by none", function()
    local a, b = dist.new_group { 0, 1 }, dist.new_group { 0, 1 }
    local _, why = pcall(dist.free_group, rank == 0 and a or b)
    assert.matches("the ranks ask for different things", why)
    local numbers = {}
    for number in why:gmatch "free_group of group (%d+) %(ranks 0, 1%)" do numbers[number] = true end
    assert.is_true(numbers[tostring(a.id)] and numbers[tostring(b.id)], why)
    dist.recover()
    _, why = pcall(dist.free_group, rank == 1 and "a" or a)
    assert.matches(rank == 1 and "the group is a string" or "rank 1 failed: .*the group is a string", why)
    dist.recover()
    dist.free_group(a)
    if rank < 2 then
      local t = ms.ones(1)
      dist.all_reduce(t, { group = b })
      assert.are.equal(2, t:item())
    end
    dist.free_group(b)
  end)

  it("compare with ==, the world and self among them", function()
    local g = dist.new_group { 0, 1, 2, 3 }
    assert.is_true(g == g and g ~= dist.default_group() and dist.self_group() ~= dist.default_group())
    assert.is_true(dist.default_group() == dist.default_group())
    assert.are.equal(1, dist.world_size(dist.self_group()))
    assert.are.equal(0, dist.rank(dist.self_group()))
    local t = ms.tensor { rank }
    dist.all_reduce(t, { group = dist.self_group() })
    assert.are.equal(rank, t:item())
  end)

  it("refuse invalid lists", function()
    for _, bad in ipairs { { {}, "0 ranks given, expected 1 to 4, the size of the world" },
      { { 0, 4 }, "rank 4 is not in the world of 4 ranks" },
      { { 1, 1 }, "rank 1 is listed twice" }, { { 0.5 }, "entry 1 is a number (0.5)" } } do
      local ok, why = pcall(dist.new_group, bad[1])
      assert.is_false(ok)
      assert.matches(bad[2], why, 1, true)
    end
  end)

  it("work side by side, in any interleaving of groups and streams", function()
    local low, high = dist.new_group { 0, 1 }, dist.new_group { 2, 3 }
    local mine = rank < 2 and low or high
    local works, tensors = {}, {}
    for k = 1, 60 do
      local t = ms.full({ 10 * k }, rank + k)
      local o = { group = k % 3 > 0 and mine or nil, async = k % 2 == 0 or nil }
      if k % 5 == 0 then
        local out = ms.empty(10 * k * (o.group and 2 or 4))
        works[k] = dist.all_gather(out, t, o) or false
        tensors[k] = out
      else
        works[k] = dist.all_reduce(t, o) or false
        tensors[k] = t
      end
    end
    for k = 60, 1, -1 do
      if works[k] then works[k]:wait() end
      local members = k % 3 > 0 and (rank < 2 and { 0, 1 } or { 2, 3 }) or { 0, 1, 2, 3 }
      local sum = 0
      for _, r in ipairs(members) do sum = sum + r + k end
      if k % 5 == 0 then
        for place, r in ipairs(members) do assert.are.equal(r + k, tensors[k][(place - 1) * 10 * k + 1]:item()) end
      else
        assert.are.equal(sum, tensors[k][10 * k]:item())
      end
    end
  end)

  it("keep a tensor alive while a collective uses it, whatever the script does", function()
    lib.ms_dist_set_delay(-1, 0.02)
    local pending = 0
    for _ = 1, 5 do
      local out = ms.empty(4000)
      local work
      ms.scope(function()
        local t = ms.full({ 1000 }, rank)
        work = dist.all_gather(out, t, { async = true })
      end)                                                      -- releases t
      for _ = 1, 20 do ms.full({ 1000 }, -1) end                -- would get t's memory if it were free
      if not work:done() then pending = pending + 1 end
      work:wait()
      for r = 0, 3 do assert.are.equal(r, out[r * 1000 + 1000]:item()) end
    end
    lib.ms_dist_set_delay(-1, 0)
    -- Otherwise the test shows nothing: a rank that was preempted may find the work complete.
    assert.is_true(pending > 0)
  end)

  it("let an operator wait for its inputs, and a writer for pending reads", function()
    local delay, least = 0.02 * patience, math.huge
    lib.ms_dist_set_delay(-1, delay)
    for _ = 1, 5 do
      local t = ms.full({ 1000 }, 1)
      local begun = ms.time()
      dist.all_reduce(t, { async = true })
      least = math.min(least, ms.time() - begun)
      assert.are.equal(4, (t * 1)[1]:item())                    -- reading waits
      assert.is_true(ms.time() - begun >= delay)
      local out = ms.zeros(4000)
      dist.all_gather(out, t, { async = true })
      t:zero_()                                                 -- waits until every peer has read it
      assert.are.equal(4, out[4000]:item())
    end
    lib.ms_dist_set_delay(-1, 0)
    -- Issuing does not wait (unless a rank was preempted just then).
    assert.is_true(least < delay)
  end)

  it("keep a fast rank from overwriting what a slow one still reads", function()
    for _, slow in ipairs { 0, 3 } do
      for _, async in ipairs { false, true } do
        lib.ms_dist_set_delay(-1, rank == slow and 0.03 or 0)
        local function complete(w) if w then w:wait() end end
        local o = { async = async or nil }
        local n = 5000
        local mine, all, block, whole = ms.full({ n }, rank + 1), ms.empty(4 * n), ms.empty(n),
          ms.full({ 4 * n }, rank + 1)
        complete(dist.all_gather(all, mine, o))
        mine:zero_()
        complete(dist.reduce_scatter(block, whole, o))
        whole:zero_()
        local source = ms.full({ n }, rank + 1)
        complete(dist.broadcast(source, { src = 1, async = o.async }))
        local copy = source:clone()
        source:zero_()
        local t = ms.full({ n }, rank + 1)
        complete(dist.all_reduce(t, o))
        local sum = t:clone()
        t:zero_()                                               -- no peer writes into it any more
        dist.barrier()
        for r = 0, 3 do assert.are.equal((r + 1) * n, all:narrow(1, r * n + 1, n):sum():item()) end
        assert.are.equal(10 * n, block:sum():item())
        assert.are.equal(2 * n, copy:sum():item())
        assert.are.equal(10 * n, sum:sum():item())
        assert.are.equal(0, t:sum():item())
      end
    end
    lib.ms_dist_set_delay(-1, 0)
  end)

  it("add up in rank order", function()
    -- 1e8 + 1 - 1e8 + 1: 1 in this order, 2 or 0 in others (float32).
    local v = ({ 1e8, 1, -1e8, 1 })[rank + 1]
    for _, n in ipairs { 1, 1000 } do
      local t = ms.full({ n }, v)
      dist.all_reduce(t)
      assert.are.equal(1, t[n]:item())
      local out = ms.empty(n)
      dist.reduce_scatter(out, ms.full({ 4 * n }, v))
      assert.are.equal(1, out[n]:item())
      t:fill_(v)
      dist.reduce(t, { dst = 2 })
      assert.are.equal(rank == 2 and 1 or v, t[1]:item())
    end
  end)

  it("overlap: a delayed collective and concurrent work take as long as the longer one", function()
    -- The time in units of the delay: 1 is perfect overlap, 2 is none.
    local least = math.huge
    for run = 0, 5 do                                           -- longer runs are less sensitive to preemption
      local delay = 0.05 * patience * 2 ^ math.floor(run / 2)
      lib.ms_dist_set_delay(1, delay)
      local t = ms.ones(1000)
      dist.barrier()
      local begun = ms.time()
      local work = dist.all_reduce(t, { async = true })
      while ms.time() - begun < delay do work:done() end
      work:wait()
      local slowest = math.max(unpack(dist.all_gather_object((ms.time() - begun) / delay)))
      least = math.min(least, slowest)
      if least < 1.8 then break end
    end
    lib.ms_dist_set_delay(1, 0)
    if least >= 1.8 then error(("%.2f delays"):format(least)) end
  end)

  it("dist.record: what was issued, in order, then the results", function()
    local g = dist.new_group { 0, 1, 2, 3 }
    local list, a, b = dist.record(function()
      dist.all_gather(ms.empty(40), ms.ones(10), { group = g })
      dist.reduce_scatter(ms.empty(2, { dtype = "bfloat16" }), ms.ones(8, { dtype = "bfloat16" }),
        { async = true }):wait()
      dist.barrier()
      local inner = dist.record(function() dist.all_reduce(ms.ones(3)) end)
      assert.are.equal(1, #inner)
      dist.broadcast(ms.ones(5), { src = 2 })
      return nil, "b"
    end)
    assert.is_nil(a)
    assert.are.equal("b", b)
    local function entry(op, dtype, i, o, bytes, group)
      return { op = op, dtype = dtype, input_numel = i, output_numel = o, bytes = bytes, group = group
        or dist.default_group() }
    end
    assert.are.same({
      entry("all_gather", "float32", 10, 40, 160, g), entry("reduce_scatter", "bfloat16", 8, 2, 16),
        entry("barrier", "uint8", 0, 0, 0),
      entry("all_reduce", "float32", 3, 3, 12), entry("broadcast", "float32", 5, 5, 20),
    }, list)
    assert.is_true(list[1].group == g)
    local ok, why = pcall(dist.record, function() error("inside", 0) end)
    assert.is_false(ok)
    assert.are.equal("inside", why)
    assert.are.same({}, (dist.record(function() end)))
  end)

  it("meshes: a group for every line", function()
    local mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } })
    assert.are.equal(2, mesh.ndim)
    assert.are.equal(4, mesh:size())
    assert.are.equal(2, mesh:size "shard")
    assert.are.equal(math.floor(rank / 2), mesh:rank "replicate")
    assert.are.equal(rank % 2, mesh:rank(2))
    assert.are.equal(rank % 2, mesh:rank(-1))
    local row = math.floor(rank / 2) * 2
    assert.are.same({ row, row + 1 }, dist.group_ranks(mesh:get_group "shard"))
    assert.are.same({ rank % 2, rank % 2 + 2 }, dist.group_ranks(mesh:get_group(1)))
    assert.are.equal(mesh.shard, mesh["shard"])
    assert.are.equal(1, mesh.shard.ndim)
    assert.are.equal(rank % 2, mesh.shard:rank())
    assert.is_true(mesh.shard:get_group() == mesh:get_group "shard")
    assert.are.equal("DeviceMesh(cpu, [replicate = 2, shard = 2])", tostring(mesh))
    local t = ms.tensor { rank }
    dist.all_reduce(t, { group = mesh:get_group "shard" })
    assert.are.equal(2 * row + 1, t:item())
    assert.has_error(function() mesh:get_group "shrd" end)
    assert.has_error(function() dist.init_device_mesh("cpu", { 3, 2 }) end)
    local line = dist.init_device_mesh("cpu", { 4 })
    assert.is_true(line:get_group() == dist.default_group())
    local of = dist.mesh_from_group({ mesh:get_group(1), mesh:get_group(2) }, { names = { "r", "s" } })
    assert.are.equal(rank % 2, of:rank "s")
    assert.are.equal(world, of:size())
  end)

  it("unknown names and options are errors with the nearest one", function()
    local ok, why = pcall(function() return dist.all_reduse end)
    assert.is_false(ok)
    assert.matches("all_reduce", why)
    ok, why = pcall(dist.all_reduce, ms.ones(1), { grup = dist.default_group() })
    assert.is_false(ok)
    assert.matches("unknown option 'grup'; did you mean 'group'%?", why)
    ok, why = pcall(dist.all_reduce, ms.ones(1), { group = 3 })
    assert.is_false(ok)
    assert.matches("the group is a number", why)
  end)

  it("tensors made before dist.init, foreign memory and views of both give correct results", function()
    local ffi = require "ffi"
    local n = 300001
    local memory = ffi.new("float[?]", n)
    for i = 0, n - 1 do memory[i] = rank + i % 7 end
    local t = ms.from_pointer(memory, { n })
    dist.all_reduce(t)
    for _, i in ipairs { 0, 1, 77777, n - 1 } do assert.are.equal(6 + 4 * (i % 7), memory[i]) end
    -- The memory is foreign on one rank only; the other ranks' tensors are staged as well.
    local mixed = rank == 2 and ms.from_pointer(memory, { n }) or ms.full({ n }, 1)
    mixed:fill_(1)
    local out = ms.empty(4 * n)
    dist.all_gather(out, mixed)
    assert.are.equal(4 * n, out:sum():item())
    dist.all_reduce(mixed, { op = "avg" })
    assert.are.equal(1, mixed[n]:item())
  end)
end)

describe("ranks on different nodes that wait for each other in different groups", function()
  it("end at the limit, with a message that says where each of them waits", function()
    local job = ranks.run(2, [[
      local ms = require "moonshard"
      local dist, t = ms.dist, ms.ones(1)
      local pair = dist.new_group { 0, 1 }
      dist.barrier()
      if dist.rank() == 0 then
        dist.all_reduce(t, { group = pair })
      else
        local till = ms.time() + 0.5
        while ms.time() < till do end                   -- so that rank 0's limit ends first
        dist.all_reduce(t)
      end
    ]], { env = { MOONSHARD_COMM_NODES = "2", MOONSHARD_TIMEOUT = "1" } })
    assert.equal(1, job.code)
    assert.matches("collective #1 of ranks 0, 1 %(all_reduce of 1 float32, sum, at [^)]-%): 1%.%d s have passed and "
      .. "rank 1 has not arrived %(it is on another node, waiting for %d%.%d s in all_reduce of 1 float32, sum, at [^(]- "
      .. "%(#%d+ of the world%)%)", job.stderr)
  end)
end)
