-- SPDX-License-Identifier: MIT
--- One trace of all ranks: processes, clocks, flows, the rank that came last, memory by kind.
local cjson = require "cjson"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local script = [[
local ms = require "moonshard"
local nn, fsdp, dist = ms.nn, ms.fsdp, ms.dist
local model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
fsdp.fully_shard(model[1])
fsdp.fully_shard(model)
local optimizer = ms.optim.AdamW(model:parameters())
dist.barrier()
local p = ms.profiler.start()
for _ in ms.steps(3) do
  model(ms.ones(4, 64)):sum():backward()
  optimizer:step()
  optimizer:zero_grad()
end
for _ = 1, 300 do dist.barrier() end
if dist.rank() == dist.world_size() - 1 then
  local from = ms.time()
  while ms.time() - from < 0.3 do end                   -- longer than other work on the machine delays a rank
end
dist.all_reduce(ms.ones(100))
p:stop()
]]

-- Reads a trace whole: its events, the flows by id, and the collectives by group and number.
local function read(path)
  local trace = cjson.decode(process.read(path))
  local out = { events = trace.traceEvents, flows = {}, collectives = {}, names = {}, counters = 0, processes = {} }
  for _, e in ipairs(out.events) do
    if e.ph == "s" or e.ph == "f" then
      out.flows[e.id] = out.flows[e.id] or {}
      table.insert(out.flows[e.id], e)
    elseif e.ph == "X" and e.cat == "collective" and e.args.number then      -- those that succeeded
      local key = ("%s %d %d"):format(e.name, e.args.group, e.args.number)
      out.collectives[key] = out.collectives[key] or {}
      table.insert(out.collectives[key], e)
    elseif e.ph == "C" then
      out.counters = out.counters + 1
    elseif e.name == "process_name" then
      table.insert(out.processes, e.pid)
      out.names[e.pid] = e.args.name
    end
  end
  table.sort(out.processes)
  return out
end

-- The times between the first and the last rank's end of each barrier, in us, sorted.
local function spreads(trace)
  local list = {}
  for key, all in pairs(trace.collectives) do
    local first, last = math.huge, -math.huge
    for _, e in ipairs(all) do first, last = math.min(first, e.ts + e.dur), math.max(last, e.ts + e.dur) end
    if key:find "^barrier" then list[#list + 1] = last - first end
  end
  table.sort(list)
  return list
end

-- Every flow leads from the rank that arrived last to each other member, and lies within ranges of its collective.
local function check_flows(trace, world)
  local collectives, flows = 0, 0
  for _, all in pairs(trace.collectives) do
    collectives = collectives + 1
    assert.are.equal(all[1].args.ranks, #all)
  end
  for _, ends in pairs(trace.flows) do
    flows = flows + 1
    assert.are.equal(world, #ends)
    local from
    for _, e in ipairs(ends) do
      if e.ph == "s" then
        assert.is_nil(from)
        from = e
      end
    end
    assert.is_truthy(from)
    local seen = {}
    for _, e in ipairs(ends) do
      assert.is_nil(seen[e.pid])
      seen[e.pid] = true
      assert.are.equal(from.name, e.name)
    end
    for key, all in pairs(trace.collectives) do
      if key:find("^" .. from.name) then
        for _, e in ipairs(all) do
          if e.pid == from.pid and e.tid == from.tid and e.ts == from.ts then
            assert.are.equal(from.pid, e.args.last_rank)
            from.found = true
          end
        end
      end
    end
    assert.is_true(from.found)
  end
  assert.are.equal(collectives, flows)
  return flows
end

describe("a trace of all ranks", function()
  for _, world in ipairs { 1, 2, 4 } do
    it(("is one file, with a process for each of %d"):format(world), function()
      local path = process.temp_folder() .. "/t.json"
      local job = ranks.run(world, script .. "print(p:export_chrome_trace(arg[1]))", { args = { path } })
      assert.are.equal(0, job.code, job.stderr)
      assert.are.equal((path .. "\n"):rep(world), job.stdout)
      local trace = read(path)
      assert.are.equal(world, #trace.processes)
      for rank = 0, world - 1 do assert.matches("^rank " .. rank .. " %(.+%)$", trace.names[rank]) end
      assert.is_true(trace.counters > 10 * world)
      if world == 1 then return end
      assert.is_true(check_flows(trace, world) > 300)
      local list = spreads(trace)
      assert.are.equal(300, #list)
      io.write(("        barriers of %d ranks end within %.1f us of each other (median; least %.1f)\n"):format(world,
        list[150], list[1]))
      -- Other work on the machine delays ranks, but not in every barrier; clocks would differ in every one.
      assert.is_true(list[30] < (process.tool and 5000 or 50), list[30])
    end)
  end

  it("names the rank that came last, and by how much, with bytes and unit", function()
    local path = process.temp_folder() .. "/t.json"
    local job = ranks.run(4, script .. "p:export_chrome_trace(arg[1])", { args = { path } })
    assert.are.equal(0, job.code, job.stderr)
    local units, found = {}, 0
    for _, all in pairs(read(path).collectives) do
      for _, e in ipairs(all) do
        assert.are.equal(e.name, e.args.op)
        if e.args.unit then units[e.args.unit] = e.args.bytes end
        if e.name == "all_reduce" then
          found = found + 1
          assert.are.equal(3, e.args.last_rank)
          assert.are.equal(400, e.args.bytes)
          assert.is_true(e.args.last_after_us > 20000 and e.args.first_waited_us >= e.args.last_after_us)
        end
      end
    end
    assert.are.equal(4, found)
    assert.are.same({ ["root"] = 4 * 64 * 65, ["1"] = 4 * 64 * 65 }, units)
  end)

  it("has the memory of each kind when it changes", function()
    local path = process.temp_folder() .. "/t.json"
    local job = ranks.run(2, script .. "p:export_chrome_trace(arg[1])", { args = { path } })
    assert.are.equal(0, job.code, job.stderr)
    local most, last = {}, {}
    for _, e in ipairs(read(path).events) do
      if e.ph == "C" then
        assert.are.equal("memory", e.name)
        last[e.pid] = e.args
        for kind, bytes in pairs(e.args) do
          assert.is_true(bytes >= 0)
          most[kind] = math.max(most[kind] or 0, bytes)
        end
      end
    end
    local whole = 2 * 4 * 64 * 65                       -- two layers of float32, of which each rank has half
    assert.are.equal(whole / 2, last[0].parameters)
    assert.are.equal(whole, last[1].optimizer)          -- two states
    assert.are.equal(0, last[1].gradients)              -- zero_grad has dropped them
    assert.are.equal(whole / 2, most.gradients)
    assert.are.equal(whole, most.gathered)
    assert.is_true(most.other > 0)
  end)

  it("replaces the file of an earlier export, and adds nothing to it", function()
    local path = process.temp_folder() .. "/t.json"
    local job = ranks.run(2, script .. [[
      p:export_chrome_trace(arg[1])
      p:export_chrome_trace(arg[1])
    ]], { args = { path } })
    assert.are.equal(0, job.code, job.stderr)
    assert.are.same({ 0, 1 }, read(path).processes)
    process.write(path, "not a trace")
    job = ranks.run(2, script .. "p:export_chrome_trace(arg[1])", { args = { path } })
    assert.are.equal(0, job.code, job.stderr)
    assert.are.same({ 0, 1 }, read(path).processes)
  end)

  it("is one file of each path that the ranks pass, and of one rank with all_ranks = false", function()
    local folder = process.temp_folder()
    local job = ranks.run(2, script .. [[
      local rank = dist.rank()
      p:export_chrome_trace(arg[1] .. "/rank" .. rank .. ".json")
      if rank == 1 then p:export_chrome_trace(arg[1] .. "/alone.json", { all_ranks = false }) end
    ]], { args = { folder } })
    assert.are.equal(0, job.code, job.stderr)
    assert.are.same({ 0 }, read(folder .. "/rank0.json").processes)
    assert.are.same({ 1 }, read(folder .. "/rank1.json").processes)
    assert.are.same({ 1 }, read(folder .. "/alone.json").processes)
  end)

  it("raises on every rank if one passes a wrong argument or cannot write", function()
    local folder = process.temp_folder()
    local job = ranks.run(2, script .. [[
      local rank = dist.rank()
      local function try(path)
        local ok, err = pcall(p.export_chrome_trace, p, path)
        print(rank, ok, (err:match "export_chrome_trace: argument 1.*" or err:match "profiler: cannot.*" or err))
        dist.recover()
      end
      if rank == 1 then try(3) else try(arg[1] .. "/t.json") end
      if rank == 1 then try(arg[1] .. "/none/t.json") else try(arg[1] .. "/t.json") end
      p:export_chrome_trace(arg[1] .. "/whole.json")
    ]], { args = { folder } })
    assert.are.equal(0, job.code, job.stderr)
    for rank = 0, 1 do
      assert.truthy(job.stdout:find(rank .. "\tfalse\texport_chrome_trace: argument 1 is a number (3), expected a path",
        1, true), job.stdout)
      assert.truthy(job.stdout:find(("%d\tfalse\tprofiler: cannot write '%s/none/t.json': No such file or directory"):format(rank,
        folder), 1, true), job.stdout)
    end
    assert.are.same({ 0, 1 }, read(folder .. "/whole.json").processes)
  end)

  it("draws no flow of a collective that a member did not record", function()
    local path = process.temp_folder() .. "/t.json"
    local job = ranks.run(2, [[
      local ms = require "moonshard"
      local dist, profiler = ms.dist, ms.profiler
      dist.barrier()
      local p = dist.rank() == 0 and profiler.start()
      for _ = 1, 5 do dist.barrier() end
      p = p or profiler.start()
      for _ = 1, 5 do dist.barrier() end
      p:stop()
      p:export_chrome_trace(arg[1])
    ]], { args = { path } })
    assert.are.equal(0, job.code, job.stderr)
    local trace, flows = read(path), 0
    for _, ends in pairs(trace.flows) do
      flows = flows + 1
      assert.are.equal(2, #ends)
    end
    assert.are.equal(5, flows)
    for _, all in pairs(trace.collectives) do assert.are.equal(#all == 2, all[1].args.last_rank ~= nil) end
  end)

  it("has no flow of a collective that failed, and those after it", function()
    local path = process.temp_folder() .. "/t.json"
    local job = ranks.run(2, [[
      local ms = require "moonshard"
      local dist = ms.dist
      dist.barrier()
      local p = ms.profiler.start()
      for _ = 1, 5 do dist.barrier() end
      local ok, err = pcall(dist.all_reduce, dist.rank() == 1 and "none" or ms.ones(3))
      print(dist.rank(), ok, (err:match "all_reduce: .*"))
      dist.recover()
      for _ = 1, 5 do dist.barrier() end
      p:stop()
      p:export_chrome_trace(arg[1])
    ]], { args = { path } })
    assert.are.equal(0, job.code, job.stderr)
    assert.matches("1\tfalse\tall_reduce: the tensor is a string", job.stdout)
    local trace = read(path)
    -- Ten barriers of the world, group 0, and the all_reduce of dist.recover, which has a group of its own.
    assert.are.equal(11, check_flows(trace, 2))
    for key in pairs(trace.collectives) do
      assert.is_truthy(key:find "^barrier 0 " or key:find "^all_reduce [1-9]", key)
    end
  end)

  local preloads = process.tool and pending or it       -- a sanitizer's library is preloaded, too
  preloads("puts nodes on one clock, whose clocks differ in time and speed", function()
    local folder = process.temp_folder()
    local shim = folder .. "/clock.so"
    assert.are.equal(0, os.execute(("cc -O1 -shared -fPIC -o %s %s/spec/support/other_clock.c"):format(shim, process.root)))
    local path = folder .. "/t.json"
    local job = ranks.run(4, script:gsub("p:stop%(%)", [[
      dist.barrier()
      local from = ms.time()
      while ms.time() - from < 0.5 do end
      for _ = 1, 300 do dist.barrier() end
      p:stop()
      p:export_chrome_trace(arg[1])
    ]]), { args = { path }, mpirun = { "-x", "LD_PRELOAD=" .. shim },
      env = { MOONSHARD_COMM_NODES = "2", OTHER_CLOCK = "2" } })
    assert.are.equal(0, job.code, job.stderr)
    local trace = read(path)
    assert.are.same({ 0, 1, 2, 3 }, trace.processes)
    local list = spreads(trace)
    assert.are.equal(601, #list)
    io.write(("        barriers of two nodes end within %.1f us of each other (median; least %.1f)\n"):format(list[300],
      list[1]))
    assert.is_true(list[60] < 100, list[60])            -- the clocks differ by 5 s and drift by 500 us in this time
  end)
end)
