-- SPDX-License-Identifier: MIT
--- ms.run: the record of a run in a folder: what it writes, what it refuses, how it continues.
local cjson = require "cjson"
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local folder
local function path(name) return folder .. "/" .. name end
local function read(name) return process.read(path(name)) end

local function start(given)
  given.quiet = true
  return ms.run.start(given)
end

-- A linear model of two inputs, trained for some steps with a checkpoint after one of them.
local function train(name, from_to, given)
  ms.manual_seed(3)
  local model = ms.nn.Linear(2, 1)
  local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
  local o = { out = path(name), model = model, optimizer = optimizer, samples = 4, total = 10, resume = true }
  for key, value in pairs(given or {}) do o[key] = value end
  local run = start(o)
  for step in ms.steps(from_to.to, { from = run.step + 1 }) do
    local loss = model(ms.rand(4, 2)):sub(1):pow(2):mean()
    loss:backward()
    optimizer:step()
    run:log { loss = loss }
    optimizer:zero_grad()
    if step == from_to.checkpoint then run:checkpoint() end
  end
  run:finish()
  return run
end

local function losses(name)
  local list = {}
  for k, m in ipairs(ms.run.metrics(path(name))) do list[k] = { m.step, m.loss } end
  return list
end

describe("a run", function()
  setup(function() folder = process.temp_folder() end)
  teardown(function() process.remove_folder(folder) end)

  it("records what was started: options, versions, commit, place, time", function()
    local run = start { out = path "facts", config = { lr = 0.1, nested = { a = { 1, 2 } }, host = "mine" } }
    run:finish()
    local config = cjson.decode(read "facts/config.json")
    assert.are.equal(0.1, config.lr)
    assert.are.same({ a = { 1, 2 } }, config.nested)
    assert.are.equal("mine", config.host)               -- the script's own value replaces the machine's
    assert.are.equal(ms.version, config.version)
    assert.are.same({ 1, 0, ms.num_threads() }, { config.ranks, config.from_step, config.threads })
    assert.are.same({ "cpu" }, config.devices)
    assert.are.equal(ms.get_rng_state()[1], config.seed)
    assert.matches("^%d%d%d%d%-%d%d%-%d%dT%d%d:%d%d:%d%dZ$", config.time)
    assert.is_string(config.command)
    assert.is_string(config.packages.luajit)
    assert.are.equal("2.1.0", config.packages.cjson and cjson._VERSION == config.packages.cjson and "2.1.0")
  end)

  it("names the commit of a git tree, of a worktree, of packed references; none elsewhere", function()
    local commit = require "moonshard.run.environment".commit
    assert.are.equal(0, os.execute(([[cd '%s' && mkdir tree && cd tree && git init -q . && mkdir -p a/b
      git -c user.name=a -c user.email=a commit -q --allow-empty -m x && git worktree add -q ../worktree 2>&1]])
      :format(folder)))
    local p = io.popen(("git -C '%s/tree' rev-parse HEAD"):format(folder))
    local id = p:read "*l"
    p:close()
    assert.are.equal(40, #id)
    assert.are.equal(id, commit(path "tree/a/b"))
    assert.are.equal(id, commit(path "worktree"))
    assert.are.equal(0, os.execute(("git -C '%s/tree' pack-refs --all"):format(folder)))
    assert.are.equal(id, commit(path "tree"))
    assert.are.equal(id, commit(path "worktree"))
    assert.is_nil(commit "/proc")
  end)

  it("writes a line a step, with time, rate, utilization and memory", function()
    local run = train("lines", { to = 3 })
    assert.are.equal(3, run.step)
    local list = ms.run.metrics(path "lines")
    assert.are.equal(3, #list)
    local first = list[1]
    for _, name in ipairs { "time", "loss", "samples_per_second", "mfu", "allocated", "memory_resident" } do
      assert.is_true(first[name] > 0, name)
    end
    -- Three float32 parameters and their gradients; AdamW keeps two tensors for each.
    assert.are.same({ 12, 12, 24 }, { first.memory_parameters, first.memory_gradients, first.memory_optimizer })
    assert.is_true(list[1].time < list[2].time and list[2].time < list[3].time)
  end)

  it("measures the machine's rate once, and keeps it", function()
    lfs.mkdir(path "cache")
    local function rate()
      local job = ranks.run(2, [[
        local ms = require "moonshard"
        local rates = require "moonshard.run.rate"
        local drawn = ms.get_rng_state()
        local facts = { host = "h", processor = "p", devices = { "cpu", "cpu" }, ranks = 2, threads = 1 }
        local rate = rates.of(facts, "float32", ms.dist)
        local after = ms.get_rng_state()
        assert(drawn[1] == after[1] and drawn[2] == after[2])
        if ms.dist.rank() == 0 then print(("%.8g"):format(rate)) end
      ]], { env = { XDG_CACHE_HOME = path "cache" } })
      assert.are.equal(0, job.code, job.stderr)
      return tonumber(job.stdout)
    end
    local first = rate()
    assert.is_true(first > 1e6)
    assert.is_near(first, rate(), 1e-6 * first)
    process.write(path "cache/moonshard/rates.json", '{"h, p, cpu+cpu, float32, 2 ranks, 1 threads": 1234567}')
    assert.are.equal(1234567, rate())
    process.write(path "cache/moonshard/rates.json", "damaged")
    assert.is_true(rate() > 1e6)
  end)

  it("forgets a rate that the run exceeds, and says so in the report", function()
    lfs.mkdir(path "busy")
    local job = ranks.run(0, ([[
      local ms = require "moonshard"
      local run = ms.run.start { out = %q, samples = 1, flops = 1, quiet = true }
      local file = os.getenv "XDG_CACHE_HOME" .. "/moonshard/rates.json"
      local key = io.open(file):read "*a":match '"(.-)": '
      run:finish()
      local rates = io.open(file, "w")
      rates:write('{"other": 5, "' .. key .. '": 0.001}')
      rates:close()
      run = ms.run.start { out = %q, samples = 1, flops = 1, quiet = true }
      run:log { loss = 1 }
      run:finish()
      io.write(io.open(file):read "*a")
    ]]):format(path "busy/one", path "busy/two"), { env = { XDG_CACHE_HOME = path "busy" } })
    assert.are.equal(0, job.code, job.stderr)
    assert.are.same({ other = 5 }, cjson.decode(job.stdout))
    assert.matches('"kind": "warning", "text": "the MFU is above 1: this machine was busy when its rate of matrix '
      .. "products was measured %(0.001 FLOP/s%)", read "busy/two/media.jsonl")
  end)

  it("writes values that are not finite as null, and reads them as nan", function()
    local run = start { out = path "nan" }
    run:log { loss = 0 / 0, flag = true }
    run:log { loss = 1, step = 5 }
    run:log { val_loss = ms.tensor { 2 }, step = 5 }
    run:finish()
    assert.matches('"flag": 1, "loss": null', read "nan/metrics.jsonl")
    local list = ms.run.metrics(path "nan")
    assert.is_true(list[1].loss ~= list[1].loss)
    assert.are.same({ 1, 5, 5 }, { list[1].step, list[2].step, list[3].step })
    assert.are.equal(2, list[3].val_loss)
    assert.is_nil(list[3].allocated)                    -- a second line of a step has the script's values alone
  end)

  it("refuses what it cannot record, at the script's line", function()
    local run = start { out = path "refused" }
    run:log { step = 4 }
    local model, ring = ms.nn.Linear(2, 1), {}
    ring.a = ring
    local ended = start { out = path "ended" }
    ended:finish()
    ended:finish()                                      -- changes nothing
    local cases = {
      { function() run:log { step = 3 } end, "run:log: step is 3, expected a whole number from 4 to 9007199254740991" },
      { function() run:log { step = 2 ^ 53 } end, "run:log: step is .*, expected a whole number from 4 to" },
      { function() run:log { note = "x" } end, "run:log: 'note' is a string %('x'%), expected a number" },
      { function() run:log(3) end, "run:log: argument 1 is a number %(3%), expected a table of numbers" },
      { function() run:image("a b", ms.ones(2, 2)) end, "run:image: the name is 'a b', expected letters" },
      { function() run:image("a", ms.ones(2, 2, 2)) end, "has shape %[2, 2, 2%], expected %[H, W%]" },
      { function() run:text("../a", "x") end, "run:text: the name is '../a', expected" },
      { function() run:text("a", 3) end, "run:text: argument 2 is a number" },
      { function() run:histogram("a", { 1 }) end, "run:histogram: argument 2 is a table, expected a tensor" },
      { function() run:confusion("a", { 1 }, { 1, 2 }) end, "run:confusion: the number of targets is 1 and that of predictions 2, expected equal numbers" },
      { function() run:confusion("a", { -1 }, { 1 }) end, "argument 2 has the class %-1" },
      { function() run:checkpoint() end, "give 'model' and 'optimizer' to run.start" },
      { function() start { out = path "refused" } end, "already contains a run; give another folder as 'out'" },
      { function() start { resume = true } end, "option 'resume' needs option 'out'" },
      { function() start { out = path "x", sinks = { "cvs" } } end, "'sinks' has 'cvs', expected 'csv' or" },
      { function() start { out = "/proc/none" } end, "cannot make the folder '/proc/none'" },
      { function() start { outt = "x" } end, "unknown option 'outt'; did you mean 'out'" },
      { function() start { out = "" } end, "option 'out' is empty, expected a folder" },
      { function() start { name = "a\nb" } end, "expected a name without slash and control characters" },
      { function() start { out = path "x", model = {} } end, "option 'model' is a table, expected a module" },
      { function() start { out = path "x", optimizer = model } end, "option 'optimizer' is a Linear, expected an optimizer" },
      { function() start { out = path "x", dtype = "float99" } end, "option 'dtype': unknown dtype 'float99'" },
      { function() start { out = path "x", config = { a = { b = print } } } end, "option 'config'%.a%.b is a function" },
      { function() start { out = path "x", config = { a = { 1, model } } } end, "option 'config'%.a%[2%] is a Linear" },
      { function() start { out = path "x", config = { a = { 1, x = 2 } } } end, "'config'%.a has the key 'x', expected only names" },
      { function() start { out = path "x", config = { a = { [5] = 2 } } } end, "'config'%.a has the key 5, expected only names" },
      { function() start { out = path "x", config = { 1 } } end, "option 'config' is a list, expected a table" },
      { function() start { out = path "x", config = ring } end, "option 'config'%.a contains itself" },
      { function() run:log { ["a\27[31m"] = 1 } end, "run:log: the name is .*, expected UTF%-8 text without control" },
      { function() run:log { ["\255"] = 1 } end, "run:log: the name is .*, expected UTF%-8 text" },
      { function() run:log { [""] = 1 } end, 'run:log: the name is "", expected' },
      { function() run:log { 1 } end, "run:log: the name is 1, expected" },
      { function() ended:log { loss = 1 } end, "run:log: the run has ended; call it before run:finish" },
      { function() ended:image("a", ms.ones(2, 2)) end, "run:image: the run has ended" },
      { function() ended:profile(print) end, "run:profile: the run has ended" },
      { function() ms.run.metrics "/proc" end, "run.metrics: '/proc' contains no run" },
    }
    for _, case in ipairs(cases) do
      local ok, err = pcall(case[1])
      assert.is_false(ok)
      assert.matches("^[^\n]*run_spec%.lua:%d+: ", err)
      assert.matches(case[2], err)
    end
    run:log { loss = 1 }                                -- the run still works
    assert.are.equal(5, run.step)
    assert.is_nil(lfs.attributes(path "x"))             -- nothing was made
    run:finish()
  end)

  it("is recorded by one process at a time, and may be continued after that has ended", function()
    process.write(path "busy.lua", ([[
      local ms, ffi = require "moonshard", require "ffi"
      local run = ms.run.start { out = %q, resume = true, quiet = true, sinks = { "csv" } }
      run:log { loss = 1 }
      os.execute "sleep 100 >/dev/null 2>&1 & echo $! >%s; mv %s %s"
      ffi.cdef "unsigned sleep(unsigned);"
      ffi.C.sleep(100)
    ]]):format(path "busy", path "pid.new", path "pid.new", path "pid"))
    local first = process.start({ "luajit", path "busy.lua" }, { stdout = "/dev/null", stderr = path "busy.err",
      env = { LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;;"):gsub("@", process.root) } })
    finally(function()
      first:stop()
      os.execute("kill " .. read "pid")
    end)
    local limit = process.now() + 30 * process.patience
    while not lfs.attributes(path "pid") and process.now() < limit and not first:poll() do process.sleep(0.01) end
    assert.is_truthy(lfs.attributes(path "pid"), read "busy.err")
    local ok, err = pcall(start, { out = path "busy", resume = true })
    assert.is_false(ok)
    assert.matches("run.start: another process is recording the run '.*busy'", err)
    assert.are.equal(1, #ms.run.metrics(path "busy"))
    process.kill(first.pid, process.SIGKILL)
    first:wait(10)
    local run = start { out = path "busy", resume = true, first = 1 }    -- though a child of the killed process runs
    run:log { loss = 2 }
    run:finish()
    assert.are.equal(2, #ms.run.metrics(path "busy"))
  end)

  it("is taken over by a later start in the same process, as at a prompt", function()
    local before = start { out = path "taken" }
    before:log { loss = 1 }
    local run = start { out = path "taken", resume = true, first = 1 }
    local ok, err = pcall(before.log, before, { loss = 3 })
    assert.is_false(ok)
    assert.matches("run:log: a later run.start continues this run", err)
    run:log { loss = 2 }
    run:finish()
    assert.are.equal(2, #ms.run.metrics(path "taken"))
  end)

  it("may be started again after its record was dropped without an end", function()
    for k = 1, 5 do
      local run = start { out = path "dropped", resume = true, first = k - 1 }
      run:log { loss = k }
      run = nil                                         -- luacheck: ignore 311
      start({ out = path("between" .. k) }):finish()    -- the library releases the dropped record
    end
    assert.are.equal(5, #ms.run.metrics(path "dropped"))
  end)

  it("continues where a start was killed before its first line", function()
    assert(lfs.mkdir(path "early"))
    process.write(path "early/metrics.jsonl", "")       -- config.json is written after it
    local run = start { out = path "early", resume = true }
    run:log { loss = 1 }
    run:finish()
    assert.are.equal(1, #ms.run.metrics(path "early"))
    assert.are.equal(ms.version, cjson.decode(read "early/config.json").version)
  end)

  it("counts the bins of a histogram whose range is beyond the largest number", function()
    local run = start { out = path "wide", sinks = { "tensorboard" } }
    run:histogram("w", ms.tensor({ -1e308, 1e308, 0 }, { dtype = "float64" }), { bins = 2 })
    run:histogram("none", ms.full({ 2 }, 0 / 0))
    run:finish()
    assert.are.same({ 1, 2 }, cjson.decode(read "wide/media.jsonl").counts)
  end)

  it("records warnings, also those before it began, and none after it has ended", function()
    local job = ranks.run(2, ([[
      local ms = require "moonshard"
      ms.dist.init()
      ms.warn("early on rank " .. ms.dist.rank())
      local run = ms.run.start { out = %q, quiet = true }
      run:log { loss = 1 }
      ms.warn("during on rank " .. ms.dist.rank())
      ms.catch_warnings(ms.warn, "caught")
      run:finish()
      ms.warn "late"
    ]]):format(path "warned"))
    assert.are.equal(0, job.code, job.stderr)
    local texts = {}
    for line in io.lines(path "warned/media.jsonl") do
      local m = cjson.decode(line)
      texts[#texts + 1] = ("%s %d %s"):format(m.kind, m.step, m.text)
    end
    assert.are.same({ "warning 0 early on rank 0", "warning 1 during on rank 0" }, texts)
    assert.matches("warning: late", job.stderr)
  end)

  it("records images, texts, counts and distributions", function()
    local run = start { out = path "media" }
    run:log { step = 7, loss = 1 }
    run:image("in/put", ms.tensor { { 0, 0.5, 1 }, { 2, -1, 0 / 0 } })
    run:text("story", "caf\195\169 \255 x")
    local counts = run:confusion("digits", { 0, 1, 1, 2 }, ms.tensor({ 0, 1, 2, 2 }, { dtype = "int64" }),
      { labels = { "a", "b", "c" } })
    run:histogram("weights", ms.tensor { 0, 1, 2, 3, 1 / 0 }, { bins = 3 })
    run:finish()
    assert.are.same({ { 1, 0, 0 }, { 0, 1, 1 }, { 0, 0, 1 } }, counts)
    local media = {}
    for line in io.lines(path "media/media.jsonl") do
      local m = cjson.decode(line)
      assert.are.equal(7, m.step)
      media[m.kind] = m
    end
    assert.are.same({ "in/put", "images/in_put-000007.png", 3, 2 },
      { media.image.name, media.image.file, media.image.width, media.image.height })
    local png = read("media/" .. media.image.file)
    assert.are.equal("\137PNG\r\n\26\n\0\0\0\13IHDR\0\0\0\3\0\0\0\2\8\0\0\0\0", png:sub(1, 29))
    assert.are.same({ { { 0, 128, 255 }, { 255, 0, 0 } } }, ms.data.read_image(path("media/" .. media.image.file)):tolist())
    assert.are.equal("caf\195\169 \239\191\189 x", media.text.text)
    assert.are.equal("---- step 7 ----\ncaf\195\169 \255 x\n", read "media/story.txt")
    assert.are.same(counts, media.confusion.counts)
    assert.are.same({ 1, 1, 2 }, media.histogram.counts)
    assert.are.same({ 1, 2, 3 }, media.histogram.limits)
    assert.are.equal(4, media.histogram.count)
  end)

  it("writes a table for spreadsheets, with a column for each name", function()
    local run = start { out = path "csv", sinks = { "csv" } }
    run:log { loss = 1.5 }
    run:log { ["a,b"] = 0 / 0, step = 1 }
    run:log { loss = 0.25 }
    run:finish()
    local lines = {}
    for line in io.lines(path "csv/metrics.csv") do lines[#lines + 1] = line end
    assert.are.equal(4, #lines)
    assert.matches('^step,.*"a,b"', lines[1])
    assert.matches("^1,.*,1.5,", lines[2])
    assert.matches("^2,", lines[4])
    local again = start { out = path "csv", first = 1, resume = true, sinks = { "csv" } }
    again:finish()
    local kept = read "csv/metrics.csv"
    local _, n = kept:gsub("\n", "")
    assert.are.equal(3, n)
  end)

  it("continues after its last checkpoint with the losses of an undisturbed run", function()
    train("whole", { to = 10 })
    train("parts", { to = 7, checkpoint = 4 })
    local run = train("parts", { to = 10, checkpoint = 4 })
    assert.are.equal(path "parts/step-000004.safetensors", run.loaded)
    assert.are.same(losses "whole", losses "parts")
    local config = cjson.decode(read "parts/config.json")
    assert.are.equal(4, config.from_step)
    assert.are.same({ 1, 0 }, { #config.sessions, config.sessions[1].from_step })
    local superseded = {}
    for line in io.lines(path "parts/superseded.jsonl") do superseded[#superseded + 1] = cjson.decode(line).step end
    assert.are.same({ 5, 6, 7 }, superseded)
    local last = 0
    for _, m in ipairs(ms.run.metrics(path "parts")) do
      assert.is_true(m.time > last)                     -- the time continues, too
      last = m.time
    end
  end)

  it("keeps one line of a value that is logged again for the step after which it continues", function()
    local function validated(value, given)
      local run = train("validated", { to = 6, checkpoint = 6 }, given)
      local again = start { out = path "validated", resume = true, first = run.step, sinks = { "csv" } }
      if value then
        again:log { step = 6, validation_loss = value }
        again:log { step = 6, accuracy = value / 2 }
      end
      again:finish()
      return again
    end
    local function found()
      local list = {}
      for _, m in ipairs(ms.run.metrics(path "validated")) do
        if m.step == 6 then
          list[#list + 1] = ("%s %s %s"):format(m.loss and "loss" or "", m.validation_loss or "", m.accuracy or "")
        end
      end
      return list
    end
    validated(4)
    assert.are.same({ "loss  ", " 4 ", "  2" }, found())
    validated(8)                                        -- restarts the finished run
    assert.are.same({ "loss  ", " 8 ", "  4" }, found())
    validated()                                         -- what is not logged again stays
    assert.are.same({ "loss  ", " 8 ", "  4" }, found())
    local _, rows = read "validated/metrics.csv":gsub("\n", "")
    assert.are.equal(1 + 6 + 2, rows)
    local set_aside = {}
    for line in io.lines(path "validated/superseded.jsonl") do
      local m = cjson.decode(line)
      set_aside[#set_aside + 1] = { m.step, m.validation_loss or m.accuracy }
    end
    assert.are.same({ { 6, 4 }, { 6, 2 } }, set_aside)
  end)

  it("keeps a value that was logged with others", function()
    local run = start { out = path "together" }
    run:log { loss = 1, validation_loss = 2 }
    run:finish()
    run = start { out = path "together", resume = true, first = 1 }
    run:log { step = 1, validation_loss = 3 }
    run:log { step = 2, loss = 4 }
    run:finish()
    local list = ms.run.metrics(path "together")
    assert.are.same({ 1, 1, 2 }, { list[1].step, list[2].step, list[3].step })
    assert.are.same({ 1, 2, 3 }, { list[1].loss, list[1].validation_loss, list[2].validation_loss })
    assert.is_nil(lfs.attributes(path "together/superseded.jsonl"))
  end)

  it("begins again where a killed run had no checkpoint", function()
    train("none", { to = 5 })
    train("none", { to = 10 })
    assert.are.same(losses "whole", losses "none")
  end)

  it("drops an incomplete last line, and skips damaged ones", function()
    train("torn", { to = 6, checkpoint = 4 })
    local text = read "torn/metrics.jsonl"
    process.write(path "torn/metrics.jsonl", (text:gsub("\n", "\nnot json\n", 1)) .. '{"step": 7, "lo')
    assert.are.equal(6, #ms.run.metrics(path "torn"))
    train("torn", { to = 10 })
    assert.are.same(losses "whole", losses "torn")
  end)

  it("keeps the latest checkpoints, the one just written whatever its name, and folders that look like one", function()
    local model = ms.nn.Linear(2, 1)
    local run = start { out = path "few", model = model, optimizer = ms.optim.SGD(model:parameters(), { lr = 1 }) }
    lfs.mkdir(path "few/step-000000.safetensors")
    for _ = 1, 4 do
      run:log { loss = 1 }
      run:checkpoint { keep = 2 }
    end
    local first = run:checkpoint { path = path "few/step-000001.safetensors", keep = 1 }
    local names = {}
    for name in lfs.dir(path "few") do names[#names + 1] = name:match "^step.*" end
    table.sort(names)
    assert.are.same({ "step-000000.safetensors", "step-000001.safetensors", "step-000004.safetensors" }, names)
    assert.is_truthy(ms.load(first))
    run:finish()
  end)

  it("sets aside checkpoints of the steps that it repeats", function()
    train("branch", { to = 8, checkpoint = 8 })
    local run = start { out = path "branch", resume = true, first = 3 }
    run:finish()
    assert.is_nil(lfs.attributes(path "branch/step-000008.safetensors"))
    assert.is_truthy(lfs.attributes(path "branch/step-000008.safetensors.superseded"))
  end)

  it("continues with one warning if the disk is full", function()
    local run = start { out = path "full" }
    run.folder.metrics:close()
    run.folder.metrics = assert(io.open("/dev/full", "w"))
    local warnings = ms.catch_warnings(function() run:log { loss = 1 } end)
    assert.matches("run: cannot write to '.*full': No space left on device", warnings[1])
    run.folder.metrics = assert(io.open(path "full/metrics.jsonl", "w"))
    run:log { loss = 2 }
    run:finish()
    local list = ms.run.metrics(path "full")
    assert.are.same({ 1, 2 }, { list[1].loss, list[2].loss })            -- the first line was written later
  end)

  it("goes on with one warning without pictures and texts that the disk has no room for", function()
    local run = start { out = path "media_full" }
    run:log { loss = 1 }
    assert(lfs.mkdir(path "media_full/digit.txt"))
    assert(lfs.mkdir(path "media_full/media.jsonl"))
    process.write(path "media_full/images", "")         -- a file in the folder's place
    local warnings = ms.catch_warnings(function()
      for _ = 1, 3 do
        run:image("digit", ms.ones(2, 2))
        run:text("digit", "seven")
        run:histogram("weight", ms.ones(2))
      end
    end)
    assert.are.equal(3, #warnings)
    assert.matches("run: cannot write 'images' in '.*media_full': ", warnings[1])
    assert.matches("run: cannot write 'digit.txt' in", warnings[2])
    assert.matches("run: cannot write 'media.jsonl' in", warnings[3])
    run:log { loss = 2 }
    run:finish()
    assert.are.equal(2, #ms.run.metrics(path "media_full"))
  end)

  it("goes on without its CSV and event files where these cannot be written", function()
    local run = start { out = path "sinks", sinks = { "csv", "tensorboard" } }
    run:log { loss = 1 }
    for _, sink in ipairs { run.csv, run.events } do
      sink.file:close()
      sink.file, sink.written = assert(io.open("/dev/full", "w")), 0     -- the next row is written at once
      sink.buffer:text(("x"):rep(2 ^ 20))
    end
    local warnings = ms.catch_warnings(function() run:log { loss = 2 } end)
    assert.are.equal(2, #warnings)
    assert.matches("run: metrics.csv of '.*sinks' is no longer written: No space left on device", warnings[1])
    assert.matches("run: the event file '.*' is no longer written: No space left on device", warnings[2])
    run:log { loss = 3, other = 1 }
    run:finish()
    assert.are.equal(3, #ms.run.metrics(path "sinks"))
    start({ out = path "sinks", resume = true, first = 3, sinks = { "csv" } }):finish()
    assert.are.equal(4, select(2, read "sinks/metrics.csv":gsub("\n", "")))            -- with a line of names
  end)

  for _, world in ipairs { 2, 3 } do
    it(("is the same call on each of %d ranks, and continues a run of one"):format(world), function()
      local name = "world" .. world
      train(name, { to = 6, checkpoint = 4 })
      local job = ranks.run(world, ([[
        local ms = require "moonshard"
        local model = ms.nn.Linear(2, 1)
        ms.fsdp.fully_shard(model)
        local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
        local run = ms.run.start { out = %q, model = model, optimizer = optimizer, samples = 4, total = 10,
          resume = true }
        for step in ms.steps(10, { from = run.step + 1 }) do
          local loss = model(ms.rand(4, 2)):sub(1):pow(2):mean()
          loss:backward()
          optimizer:step()
          optimizer:zero_grad()
          run:log { loss = loss, rank = ms.dist.rank() }
        end
        run:checkpoint()
        run:text("a", "b")
        run:finish()
        local ok, err = pcall(ms.run.start, { out = %q })
        assert(not ok and err:find "already contains a run", err)
      ]]):format(path(name), path(name)))
      assert.are.equal(0, job.code, job.stderr)
      local one, many = losses "whole", losses(name)
      assert.are.equal(10, #many)
      for k = 1, 10 do
        assert.are.equal(one[k][1], many[k][1])
        assert.is_near(one[k][2], many[k][2], 1e-5)
      end
      assert.are.equal(0, ms.run.metrics(path(name))[10].rank)
      local config = cjson.decode(read(name .. "/config.json"))
      assert.are.same({ world, world, 1 }, { config.ranks, #config.devices, config.sessions[1].ranks })
      assert.is_truthy(lfs.attributes(path(name .. "/step-000010.safetensors")))
      assert.are.equal("---- step 10 ----\nb\n", read(name .. "/a.txt"))
      local _, lines = job.stdout:gsub("step +%d+/10", "")
      assert.are.equal(6, lines)
    end)
  end
end)
