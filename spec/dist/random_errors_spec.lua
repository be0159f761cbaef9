-- SPDX-License-Identifier: MIT
-- Random programs of collectives with errors: calls that one rank or all refuse, calls that differ, errors of a script
-- between calls, collectives in the background, several groups. Each ends with dist.recover. A call that succeeds has
-- the right result, no rank waits forever, and after dist.recover every group is whole.
local ranks = require "spec.support.ranks"

-- scripts/test --long runs 10,000 programs.
local PROGRAMS, EACH = unpack(os.getenv "MOONSHARD_LONG" and { 2000, 100 } or { 60, 20 })

local KINDS = { "all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "object", "pair", "step" }
local FAULTS = { "a refused call", "another size", "another dtype", "another collective", "one more call, refused",
  "an error of the script", "a call that all refuse", "another group" }

-- A program: a list of calls, what is wrong on which rank at which of them, and whether a rank that catches an error
-- goes on with the next call or leaves the program.
local function generate(seed, world, groups, nodes)
  math.randomseed(seed)
  for _ = 1, 5 do math.random() end
  local random = math.random
  local program = { seed = seed, leaves = random(nodes and 8 or 2) == 1, calls = {}, faults = {} }
  for k = 1, random(2, 7) do
    local members = groups[random(#groups)]
    program.calls[k] = { id = 10 * (seed % 1000) + k, kind = KINDS[random(#KINDS)], group = members,
      root = members.ranks[random(#members.ranks)], size = ({ 4, 600, 70000 })[random(3)],
      async = random(3) == 1, waits = random(3), from = random(0, world - 1), to = random(0, world - 2) }
  end
  for _ = 1, random(0, 2) do
    -- Between nodes, ranks that wait for each other in different groups are found only if one is in dist.recover.
    local kind = FAULTS[random(nodes and #FAULTS - 1 or #FAULTS)]
    if kind ~= "an error of the script" or not nodes or random(4) == 1 then
      program.faults[random(#program.calls)] = { kind = kind, rank = random(0, world - 1) }
    end
  end
  return program
end

for _, layout in ipairs { { 2 }, { 3 }, { 4 }, { 2, "2" }, { 4, "2" } } do
  local world, nodes = layout[1], layout[2]
  ranks.describe(world, "random programs with errors" .. (nodes and ", between nodes" or ""),
    { env = { MOONSHARD_COMM_NODES = nodes } }, function()
      local ms = require "moonshard"
      local nn, fsdp, dist = ms.nn, ms.fsdp, ms.dist
      local rank = dist.rank()

      local groups, sharded
      local function prepare()
        if groups then return end
        groups = { { group = dist.default_group(), ranks = dist.group_ranks() } }
        for _, list in ipairs { { 0, 1 }, { 0, world - 1 }, { 1, world - 1 } } do
          if world > 2 then groups[#groups + 1] = { group = dist.new_group(list), ranks = list } end
        end
        ms.manual_seed(1)
        sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for k = 1, 2 do fsdp.fully_shard(sharded[k]) end
        fsdp.fully_shard(sharded)
      end

      local wrong
      local function expect(want, got, what)
        if want ~= got then wrong = wrong or ("%s: %s instead of %s"):format(what, tostring(got), tostring(want)) end
      end

      -- Makes a call, and returns the work and a function that checks the result.
      local function make(call, size, dtype, kind, group)
        local n, me = #call.group.ranks, dist.rank(call.group.group)
        local id, o, ops = call.id, { dtype = dtype }, { group = group, async = call.async or nil }
        local function full(blocks, v) return ms.full({ blocks * size }, v, o) end
        local function ends(t, want)
          return function()
            expect(want, t[1]:item(), kind)
            expect(want, t[t:numel()]:item(), kind)
          end
        end
        if kind == "all_reduce" then
          local t = full(1, id * 8 + me)
          return dist.all_reduce(t, ops), ends(t, n * id * 8 + n * (n - 1) / 2)
        elseif kind == "broadcast" then
          local t = full(1, rank == call.root and id or -1)
          ops.src = call.root
          return dist.broadcast(t, ops), ends(t, id)
        elseif kind == "all_gather" then
          local t = full(n, -1)
          return dist.all_gather(t, full(1, id * 8 + me), ops), function()
            for k = 0, n - 1 do expect(id * 8 + k, t[k * size + 1]:item(), kind) end
          end
        elseif kind == "reduce_scatter" then
          local t = full(1, -1)
          return dist.reduce_scatter(t, full(n, id), ops), ends(t, n * id)
        elseif kind == "barrier" then
          dist.barrier(group)
        elseif kind == "object" then
          for _, got in ipairs(dist.all_gather_object(id, { group = group })) do expect(id, got, kind) end
        end
      end

      local function pair(call, size)
        local to = call.to < call.from and call.to or call.to + 1
        if rank == call.from then return dist.send(ms.full({ size }, call.id), to) end
        if rank ~= to then return end
        local t = ms.full({ size }, -1)
        dist.recv(t, call.from)
        expect(call.id, t[size]:item(), "recv")
      end

      local function step(size)
        sharded(ms.ones(2, size and 5 or 4)):sum():backward()
        sharded:zero_grad()
      end

      local works
      local function run(call, fault)
        local member = call.kind == "step" or dist.rank(call.group.group) ~= nil
        local mine = fault and (fault.rank == rank or fault.kind == "a call that all refuse") and fault.kind
        if mine == "an error of the script" then error("the script's own error", 0) end
        if call.kind == "step" then return step(mine) end
        if mine == "one more call, refused" then pcall(dist.all_reduce, "x") end
        if call.kind == "pair" then return pair(call, mine and call.size + 1 or call.size) end
        if not member then return end
        if mine == "a refused call" or mine == "a call that all refuse" then
          return dist.all_reduce("x", { group = call.group.group })
        end
        local size = mine == "another size" and call.size + 1 or mine == "another group" and call.size + 2 or call.size
        local kind = mine == "another collective" and (call.kind == "all_gather" and "all_reduce" or "all_gather")
          or call.kind
        local group, other = call.group.group, groups[#groups].group
        if mine == "another group" and dist.rank(other) then
          group, call = other, setmetatable({ async = false }, { __index = call })
        end
        local work, check = make(call, size, mine == "another dtype" and "int64" or nil, kind, group)
        if work and call.waits < 3 then works[#works + 1] = { work = work, check = check } end
        if not work and check then check() end
      end

      local function wait_for_works()
        for _, w in ipairs(works) do
          w.work:wait()
          w.check()
        end
        works = {}
      end

      local known = { "different things", "rank %d failed: ", "deadlock: ", "dist%.recover", "a string %('x'%)",
        "own error", "expected", "shapes", "columns",
        "is not a member", "must have in's", "must have out's" }
      local function one(program)
        works, wrong = {}, nil
        local failed
        local function try(fn, ...)
          local ok, why = pcall(fn, ...)
          if ok then return true end
          failed = failed or tostring(why)
          local found
          for _, pattern in ipairs(known) do found = found or failed:find(pattern) end
          if not found then wrong = wrong or "error: " .. failed end
        end
        for k, call in ipairs(program.calls) do
          local fault = program.faults[k]
          local ok = try(run, call, fault)
          if ok and call.waits == 1 then ok = try(wait_for_works) end
          local own = fault and fault.kind == "an error of the script" and fault.rank == rank
          local alike = fault and fault.kind == "a call that all refuse"
          -- A rank that has skipped a call must not go on: its next call would be taken for that one.
          if not ok and (program.leaves or own) and not alike then break end
        end
        try(wait_for_works)
        dist.recover()
        if failed and not next(program.faults) then wrong = wrong or "without a fault: " .. failed end
        for k, g in ipairs(groups) do
          if dist.rank(g.group) then
            local t = ms.full({ 3 }, program.seed % 1000 * 8 + k)
            dist.all_reduce(t, { group = g.group })
            expect(#g.ranks * (program.seed % 1000 * 8 + k), t[3]:item(), "after dist.recover")
          end
        end
        sharded(ms.ones(2, 4)):sum():backward()
        sharded:zero_grad()
        if wrong then
          local said = {}
          for k, call in ipairs(program.calls) do
            local fault = program.faults[k]
            said[k] = ("%s of group %d%s%s"):format(call.kind, call.group.group.id, call.async and ", async" or "",
              fault and (", %s on rank %d"):format(fault.kind, fault.rank) or "")
          end
          error(("seed %d: %s\n%s"):format(program.seed, wrong, table.concat(said, "\n")), 0)
        end
      end

      for first = 1, PROGRAMS, EACH do
        it(("have right results only, and end (seeds %d to %d)"):format(first, first + EACH - 1), function()
          prepare()
          for seed = first, first + EACH - 1 do one(generate(seed, world, groups, nodes)) end
        end)
      end
    end)
end
