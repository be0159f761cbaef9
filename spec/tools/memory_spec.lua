-- SPDX-License-Identifier: MIT
--- ms.memory_report: live memory and that of the peak by line, module and kind; its text and its page.
local browser = require "spec.support.browser"
local cjson = require "cjson"
local collected = require "spec.support.collected"
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local nn = ms.nn

local function line() return debug.getinfo(2, "l").currentline end
local function row(rows, name)
  for _, r in ipairs(rows) do
    if r.name == name or r.name:find(name .. "$") then return r end
  end
end
local function here(report, at) return row(report.lines, "memory_spec.lua:" .. at) end

describe("memory_report", function()
  before_each(function()
    ms.record_memory_history(false)
    collected()
    ms.record_memory_history()
  end)
  after_each(function() ms.record_memory_history(false) end)

  it("counts live bytes and blocks by the line that made them", function()
    local kept, at = {}, nil
    for k = 1, 3 do kept[k] = ms.zeros(1000) at = line() end
    local one, other = ms.ones(10), line()
    local report = ms.memory_report { device = "cpu" }
    assert.are.same({ 12000, 3 }, { here(report, at).bytes, here(report, at).blocks })
    assert.are.same({ 40, 1 }, { here(report, other).bytes, here(report, other).blocks })
    kept[2]:release()
    one:release()
    report = ms.memory_report { device = "cpu" }
    assert.are.same({ 8000, 2 }, { here(report, at).bytes, here(report, at).blocks })
    assert.are.equal(0, here(report, other).bytes)
    kept[1]:release()
    kept[3]:release()
  end)

  it("has the whole stack of the script, without the library", function()
    local function inner() return (ms.zeros(7)) end
    local function outer() return (inner()) end
    local kept = outer()
    local found
    for _, s in ipairs(ms.memory_report { device = "cpu" }.stacks) do
      if s.bytes == 28 then found = s end
    end
    local text = table.concat(found.lines, " ")
    assert.matches("memory_spec.lua:%d+ %(outer%) %S*memory_spec.lua:%d+ %(inner%)$", text)
    assert.is_nil(text:find("lua/moonshard", 1, true))
    assert.are.equal("other", found.kind)
    kept:release()
  end)

  it("is quoted by the error of an allocation that fails: the lines that hold most", function()
    for _, device in ipairs { "cpu", ms.cuda.is_available() and "cuda" or nil } do
      local large, at = ms.zeros(4e6, { device = device }), line()
      local small, other = { ms.ones(1e6, { device = device }), ms.ones(1e6, { device = device }) }, line()
      local ok, why = pcall(function() return ms.zeros(2 ^ 41, { device = device }) end)
      assert.is_false(ok)
      assert.matches(("no memory for %%d+ bytes on %s.*; most is held by %%S*memory_spec.lua:%d %%(15.26 MiB in 1 block, "
        .. "mostly empty%%), %%S*memory_spec.lua:%d %%(7.63 MiB in 2 blocks, mostly empty%%)"):format(device, at, other), why)
      large:release()
      for _, t in ipairs(small) do t:release() end
    end
    ms.record_memory_history(false)
    local _, why = pcall(function() return ms.zeros(2 ^ 41) end)
    assert.not_matches("held by", why)
  end)

  it("keeps what was live at the peak", function()
    local first, at_first = ms.zeros(1000), line()
    ms.reset_peak_memory_stats "cpu"
    local at_high, at_low
    ms.scope(function()
      local _ = ms.zeros(5000) at_high = line()
    end)
    first:release()
    ms.scope(function()
      local _ = ms.zeros(2000) at_low = line()
    end)
    local report = ms.memory_report { device = "cpu" }
    assert.are.equal(ms.memory_stats("cpu").peak_allocated, report.peak)
    assert.are.same({ 4000, 1, 0 }, { here(report, at_first).peak_bytes, here(report, at_first).peak_blocks,
      here(report, at_first).bytes })
    assert.are.same({ 20000, 0 }, { here(report, at_high).peak_bytes, here(report, at_high).bytes })
    assert.is_nil(here(report, at_low))
    ms.reset_peak_memory_stats "cpu"
    assert.is_nil(here(ms.memory_report { device = "cpu" }, at_high))
  end)

  it("adds up to the allocator's counts now and at the peak, whatever is allocated and freed", function()
    local base, live = ms.memory_report { device = "cpu" }, {}
    local unknown = base.allocated - base.recorded
    ms.reset_peak_memory_stats "cpu"
    local random = 7
    local function below(n)
      random = (random * 16807) % 2147483647
      return random % n
    end
    for step = 1, 2000 do
      if #live > 0 and below(2) == 0 then
        table.remove(live, 1 + below(#live)):release()
      else
        local n = 1 + below(3000)
        if below(2) == 0 then live[#live + 1] = ms.zeros(n) else live[#live + 1] = ms.ones(n):exp() end
      end
      if step % 100 == 0 then
        if step % 700 == 0 then ms.reset_peak_memory_stats "cpu" end
        local report = ms.memory_report { device = "cpu" }
        assert.are.equal(report.allocated - unknown, report.recorded)
        assert.are.equal(ms.memory_stats("cpu").peak_allocated, report.peak)
        assert.are.equal(report.peak - unknown, report.peak_recorded)
      end
    end
    for _, t in ipairs(live) do t:release() end
    collected()
    assert.are.equal(base.recorded, ms.memory_report({ device = "cpu" }).recorded)
  end)

  it("names modules and kinds", function()
    local function kinds()
      local out = {}
      for _, r in ipairs(ms.memory_report({ device = "cpu" }).kinds) do out[r.name] = r.bytes end
      return out
    end
    local before = kinds()                       -- other specs' tensors may still be there
    local net = nn.Sequential(nn.Linear(10, 20), nn.GELU())
    local optimizer = ms.optim.AdamW(net:parameters())
    local at_backward, at_step
    ms.reset_peak_memory_stats "cpu"
    for _ in ms.steps(2) do
      local loss = net(ms.ones(300, 10)):sum()
      loss:backward() at_backward = line()
      optimizer:step() at_step = line()
    end
    local report = ms.memory_report { device = "cpu" }
    local now = kinds()
    local function bytes(kind) return (now[kind] or 0) - (before[kind] or 0) end
    assert.are.same({ 880, 880, 1760, 0 }, { bytes "parameters", bytes "gradients", bytes "optimizer",
      bytes "gathered" })
    assert.are.equal(880, here(report, at_backward).bytes)
    assert.are.equal(1760, here(report, at_step).bytes)
    assert.is_true(row(report.modules, "2 %(GELU%)").peak_bytes >= 24000)
    -- The live bytes of the Linear: the gradients of its parameters, made by the backward of its operators.
    assert.are.equal(880, row(report.modules, "1 %(Linear%)").bytes)
    local sum = 0
    for _, r in ipairs(report.kinds) do sum = sum + r.bytes end
    assert.are.equal(report.allocated, sum)
  end)

  it("does not take the allocations of a hook's backward for its own", function()
    local w, at_hook = ms.ones(100, 100):requires_grad_(), nil
    local y = w:mul(2)
    y:register_hook(function(g)
      local _ = g:sum() at_hook = line()
    end)
    local loss = y:mul(3):sum()
    loss:backward() local at = line()
    local report = ms.memory_report { device = "cpu" }
    assert.are.equal(40000, here(report, at).bytes)
    local hook = here(report, at_hook)
    assert.is_true(hook == nil or hook.bytes + hook.peak_bytes <= 8)
    w:release()
  end)

  it("records nothing while it is off, and reports that", function()
    ms.record_memory_history(false)
    local kept, at = ms.zeros(3000), line()
    local report = ms.memory_report { device = "cpu" }
    assert.is_nil(here(report, at))
    assert.is_true(report.allocated - report.recorded >= 12000)
    assert.matches("\nnot recorded: .* at the peak, .* now", tostring(report))
    kept:release()
  end)

  it("tells a script without a history how to record one, and shows no peaks by kind", function()
    local job = ranks.run(0, "local ms = require 'moonshard' x = ms.zeros(1000) print(ms.memory_report())")
    assert.are.equal(0, job.code, job.stderr)
    assert.matches("^MemoryReport of cpu: 3.91 KiB now, 3.91 KiB at the peak\n", job.stdout)
    assert.matches("\nother +%- +3.91 KiB\n", job.stdout)
    assert.matches("ms.record_memory_history%(%) records the lines of allocations that follow it", job.stdout)
  end)

  it("prints as a table", function()
    local kept, at = ms.zeros(300000), line()
    local text = tostring(ms.memory_report { device = "cpu" })
    assert.matches("^MemoryReport of cpu: [%d.]+ %w+ now, [%d.]+ %w+ at the peak\nkind +at the peak +now\n", text)
    assert.matches("memory_spec.lua:" .. at .. " +1.14 MiB +1.14 MiB  1 block, mostly", text)
    kept:release()
  end)

  it("refuses wrong arguments by name", function()
    local function says(pattern, fn, given)
      assert.matches(pattern, select(2, pcall(function()
        fn(given)
      end)))
    end
    says("memory_spec.lua:%d+: memory_report: unknown option 'file'", ms.memory_report, { file = "x" })
    says("memory_report: option 'html' is a number %(3%), expected a path", ms.memory_report, { html = 3 })
    says("memory_report: option 'html' is a string %(''%), expected a path", ms.memory_report, { html = "" })
    says("memory_report: .*'gpu'", ms.memory_report, { device = "gpu" })
    says("memory_report: cannot write '.*/none/m.html': .*No such file or directory",
      ms.memory_report, { html = process.temp_folder() .. "/none/m.html" })
    says("record_memory_history: argument is a string %('all'%), expected a boolean", ms.record_memory_history, "all")
  end)

  it("changes no number that a script computes", function()
    local function train()
      ms.manual_seed(3)
      local net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
      local optimizer, losses = ms.optim.Adam(net:parameters(), { lr = 0.01 }), {}
      for step in ms.steps(5) do
        local loss = net(ms.randn(4, 8)):pow(2):mean()
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
        losses[step] = loss:item()
      end
      return losses
    end
    local with = train()
    ms.record_memory_history(false)
    assert.are.same(train(), with)
  end)

  local function data_of(path)
    return cjson.decode((process.read(path):match '<script type="application/json" id="data">(.-)</script>'))
  end

  it("writes a page with a tree of frames for now and the peak", function()
    local path = process.temp_folder() .. "/m.html"
    local odd = assert(load("local f = ... return (f(12345))", "@</script><script>console.error('name')</script>.lua"))
    local kept = odd(ms.zeros)
    ms.memory_report { device = "cpu", html = path }
    assert.is_nil(lfs.attributes(path .. ".tmp"))
    local data = data_of(path)
    local function check(node)
      local sum = 0
      for _, child in ipairs(node.children or {}) do sum = sum + check(child) end
      if node.children then assert.are.equal(node.bytes, sum) end
      return node.bytes
    end
    assert.are.equal(ms.memory_stats("cpu").allocated, check(data.graphs[1].root))
    assert.are.equal(ms.memory_report({ device = "cpu" }).peak, check(data.graphs[2].root))
    assert.is_nil(process.read(path):find "https?://")
    kept:release()
  end)

  local check = browser.is_there and it or pending
  check("writes a page that Chromium shows without an error" .. browser.missing, function()
    local path = process.temp_folder() .. "/m.html"
    local odd = assert(load("local f = ... return (f(1000000))", "@</script><script>console.error('name')</script>.lua"))
    local kept = { odd(ms.zeros) }
    local net = nn.Sequential(nn.Linear(100, 200), nn.ReLU())
    for _ in ms.steps(1) do net(ms.ones(300, 100)):sum():backward() end
    ms.memory_report { device = "cpu", html = path }
    local dom, console = browser.open(path)
    assert.are.equal("", console)
    local frames = {}
    for n in dom:gmatch 'data%-frames="(%d+)"' do frames[#frames + 1] = tonumber(n) end
    assert.are.equal(2, #frames)
    assert.is_true(frames[1] >= 3 and frames[2] > frames[1])
    assert.are.equal(frames[1] + frames[2], select(2, dom:gsub('<button type="button"', "")))
    for _, text in ipairs { "Memory of cpu, rank 0", "Now: ", "At the peak: ", "parameters: ", "2 (ReLU)",
      "&lt;/script&gt;" } do
      assert.is_truthy(dom:find(text, 1, true), text)
    end
    kept[1]:release()
  end)
end)

local job_script = [[
local ms = require "moonshard"
local nn, fsdp, dist = ms.nn, ms.fsdp, ms.dist
ms.set_default_device(os.getenv "DEVICE" or "cpu")
ms.record_memory_history()
local net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
fsdp.fully_shard(net[1])
fsdp.fully_shard(net)
local optimizer = ms.optim.AdamW(net:parameters())
for _ in ms.steps(3) do
  net(ms.ones(8, 64)):sum():backward()                  -- line 10
  optimizer:step()                                      -- line 11
end
local report = ms.memory_report { html = arg[1] }
local function find(rows, pattern) for _, r in ipairs(rows) do if r.name:find(pattern) then return r end end end
local function bytes(kind) return find(report.kinds, kind).bytes end
local function of_line(n) return find(report.lines, ":" .. n .. "$").bytes end
print(dist.rank(), bytes "parameters", bytes "gradients", bytes "optimizer", find(report.kinds, "gathered").peak_bytes,
  of_line(10), of_line(11), report.recorded == report.allocated, report.peak_recorded == report.peak)
]]

describe("memory_report over ranks", function()
  for _, world in ipairs { 1, 2, 4 } do
    it(("has every byte of %d ranks' sharded training"):format(world), function()
      local folder = process.temp_folder()
      local job = ranks.run(world, job_script, { args = { folder .. "/m.html" } })
      assert.are.equal(0, job.code, job.stderr)
      local shard = 2 * 65 * 64 * 4 / world
      for rank = 0, world - 1 do
        local whole = world > 1 and 2 * 65 * 64 * 4 or 0
        assert.truthy(job.stdout:find(table.concat({ rank, shard, shard, 2 * shard, whole, shard, 2 * shard, "true",
          "true" }, "\t"), 1, true), job.stdout)
        assert.is_truthy(lfs.attributes(folder .. (world > 1 and "/m.rank" .. rank .. ".html" or "/m.html")))
      end
    end)
  end

  it("counts the memory of the emulated GPU", function()
    local job = ranks.run(2, job_script, { env = { MOONSHARD_CUDA = "emulated", DEVICE = "cuda" },
      args = { process.temp_folder() .. "/m.html" } })
    assert.are.equal(0, job.code, job.stderr)
    for rank = 0, 1 do
      assert.matches(table.concat({ rank, 16640, 16640, 33280, 33280, 16640, 33280, "true", "true" }, "\t"), job.stdout)
    end
  end)
end)
