-- SPDX-License-Identifier: MIT
--- The option `state` of run.start: what is saved beside a model and its optimizer, so that a run that is killed in the
--- middle of an epoch continues to the bits of an undisturbed one.
local ms = require "moonshard"
local process = require "spec.support.process"
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"

-- Trains for three epochs of six batches; with a number as third argument, every rank is killed after that step.
local JOB = [[
local ms = require "moonshard"
local nn, fsdp = ms.nn, ms.fsdp
ms.dist.init()
local out, kind, dies = arg[1], arg[2], tonumber(arg[3])
local rank, world = ms.dist.rank(), ms.dist.world_size()
local shard = {
  fully_shard = function(m) fsdp.fully_shard(m[1]) return fsdp.fully_shard(m) or m end,
  FSDP = function(m) return fsdp.FSDP(m) end,
  DDP = function(m) return nn.DDP(m) end,
}
ms.manual_seed(1)
local items = ms.data.TensorDataset(ms.rand(47, 4), ms.arange(0, 47))
local model = shard[kind](nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3)))
local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.05 })
ms.manual_seed(7 + rank)                                   -- other masks of the dropout on each rank
local loader = ms.data.DataLoader(items, { batch_size = 8 / world, shuffle = true, rank = rank, world = world })
local state = { loader = loader, schedule = ms.optim.lr_scheduler.reduce_on_plateau(optimizer, { patience = 1 }),
  scaler = ms.amp.GradScaler { init_scale = 256, growth_interval = 3 }, stopping = ms.metrics.EarlyStopping(),
  progress = { items = 0, best = math.huge, losses = {} } }
if kind ~= "FSDP" then state.ema = ms.optim.EMA(model:parameters(), { decay = 0.9, warmup = true }) end
local run = ms.run.start { out = out, model = model, optimizer = optimizer, state = state, quiet = true, resume = true }
local scaler, progress = state.scaler, state.progress
for epoch = loader.epochs + 1, 3 do
  for x, ids in loader:epoch() do
    local loss = model(x):pow(2):mean()
    scaler:scale(loss):backward()
    scaler:step(optimizer)
    scaler:update()
    optimizer:zero_grad()
    if state.ema then state.ema:update() end
    progress.items, progress.best = progress.items + x:size(1), math.min(progress.best, loss:item())
    run:log { loss = loss, first = ids:select(1, 1), items = progress.items, scale = scaler:get_scale(),
      lr = optimizer.param_groups[1].lr }
    if run.step % 4 == 0 then run:checkpoint() end
    if run.step == dies then
      require("ffi").cdef "int raise(int);"
      require("ffi").C.raise(9)
    end
  end
  table.insert(progress.losses, progress.best)
  state.schedule:step(1)
  state.stopping:update(1)
end
run:checkpoint()
run:finish()
]]

local function train(world, folder, kind, dies)
  return ranks.run(world, JOB, { args = { folder, kind, dies and tostring(dies) } })
end

local function metrics_of(folder)
  local text = process.read(folder .. "/metrics.jsonl")
  local list = {}
  for line in text:gmatch "[^\n]+" do
    list[#list + 1] = line:match '"step": %d+' .. line:match '"first".-"scale": [^,}]+'
  end
  return list
end

describe("the state of a run", function()
  local cases = { { 1, "fully_shard" }, { 2, "fully_shard" }, { 4, "fully_shard" }, { 2, "FSDP" }, { 2, "DDP" } }
  for _, case in ipairs(cases) do
    local world, kind = unpack(case)
    it(("that was killed in an epoch continues to the bits of an undisturbed one: %s over %d ranks"):format(kind, world),
      function()
        local folder = process.temp_folder()
        finally(function() process.remove_folder(folder) end)
        local whole, killed = folder .. "/whole", folder .. "/killed"
        local job = train(world, whole, kind)
        assert.are.equal(0, job.code, job.stderr)
        assert.are_not.equal(0, train(world, killed, kind, 10).code)     -- in epoch 2; the last checkpoint is of step 8
        job = train(world, killed, kind)
        assert.are.equal(0, job.code, job.stderr)

        local wanted = metrics_of(whole)
        assert.are.equal(18, #wanted)
        assert.are.same(wanted, metrics_of(killed))
        local a, a_meta = ms.load(whole .. "/step-000018.safetensors")
        local b, b_meta = ms.load(killed .. "/step-000018.safetensors")
        assert.are.same(a_meta, b_meta)
        -- Ranks with states of their own, of the random generator and of `progress`, are all in the file.
        assert.are.equal(world > 1, a_meta.random:find "ranks" ~= nil)
        assert.are.equal(world > 1, a_meta.state:sub(1, 1) == "[")
        local averages = 0
        for name, t in ms.sorted_pairs(a) do
          assert.is_true(t:equal(b[name]), name)
          if name:find "^state%.ema%." then averages = averages + 1 end
        end
        assert.are.equal(kind == "FSDP" and 0 or 4, averages)
      end)
  end

  it("is continued by another number of ranks", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    local whole, killed = folder .. "/whole", folder .. "/killed"
    assert.are.equal(0, train(1, whole, "fully_shard").code)
    train(2, killed, "fully_shard", 10)
    local averages = ms.load(killed .. "/step-000008.safetensors", { prefix = "state.ema." })
    assert.are.equal(4, averages["1.weight"]:size(2))
    local job = train(4, killed, "fully_shard")
    assert.are.equal(0, job.code, job.stderr)
    -- The items of a step are the same on any number of ranks; rank 0 counts its own.
    local function steps(list, first, last)
      local out = {}
      for k = first, last do out[#out + 1] = list[k]:match '"first": %d+' end
      return out
    end
    local one, other = metrics_of(whole), metrics_of(killed)
    assert.are.same(steps(one, 1, 17), steps(other, 1, 17))
    assert.are.equal("8", (one[1]:match '"items": (%d+)'))
    assert.are.equal(tostring(8 * 4 + 9 * 2), (other[17]:match '"items": (%d+)'))
  end)
end)

describe("options of an optimizer in a run", function()
  local folder
  before_each(function() folder = process.temp_folder() end)
  after_each(function() process.remove_folder(folder) end)

  local function start(lr)
    local model = ms.nn.Linear(2, 1)
    local optimizer = ms.optim.AdamW(model:parameters(), { lr = lr or 0.5 })
    local run = ms.run.start { out = folder .. "/run", resume = true, model = model, optimizer = optimizer, quiet = true }
    return run, optimizer
  end

  -- A run with a checkpoint after three steps; step(optimizer) is called in each.
  local function saved(make)
    local run, optimizer = start()
    local step = make(optimizer)
    for _ = 1, 3 do
      run:log { loss = 1 }
      step()
    end
    run:checkpoint()
    run:finish()
    return optimizer.param_groups[1].lr
  end

  it("have the values that the script gave them", function()
    saved(function(optimizer)
      local group = optimizer.param_groups[1]
      return function() group.lr, group.betas = group.lr / 2, { 0.5, 0.75 } end
    end)
    local resumed = start()
    resumed:log { loss = 1 }
    resumed:checkpoint()
    resumed:finish()
    local run, optimizer = start(0.25)
    assert.are.equal(0.0625, optimizer.param_groups[1].lr)
    assert.are.same({ 0.5, 0.75 }, optimizer.param_groups[1].betas)
    run:finish()
  end)

  it("are those of the resumed script if they were not changed", function()
    saved(function() return function() end end)
    local run, optimizer = start(0.25)
    assert.are.equal(0.25, optimizer.param_groups[1].lr)
    run:finish()
  end)

  it("have the initial learning rate for a schedule that is made after the start", function()
    local function schedule_of(optimizer) return ms.optim.lr_scheduler.exponential(optimizer, { gamma = 0.5 }) end
    local lr = saved(function(optimizer)
      local schedule = schedule_of(optimizer)
      return function() schedule:step() end
    end)
    local run, optimizer = start()
    assert.are.equal(lr, optimizer.param_groups[1].lr)
    local schedule = schedule_of(optimizer)
    for _ = 1, run.step do schedule:step() end
    assert.are.equal(lr, optimizer.param_groups[1].lr)
    run:finish()
  end)
end)

describe("option 'state' of run.start", function()
  local folder
  before_each(function() folder = process.temp_folder() end)
  after_each(function() process.remove_folder(folder) end)

  local function parts(n)
    local model = ms.nn.Linear(2, 1)
    local optimizer = ms.optim.SGD(model:parameters(), { lr = 0.1 })
    local loader = ms.data.DataLoader(ms.data.TensorDataset(ms.rand(n or 8, 2)))
    return model, optimizer, loader
  end

  local function start(state, n)
    local model, optimizer, loader = parts(n)
    state.loader = loader
    return ms.run.start { out = folder .. "/run", resume = true, model = model, optimizer = optimizer, state = state,
      quiet = true }, state
  end

  -- A run with a checkpoint after step 1.
  local function saved(state)
    local run = start(state)
    run:log { loss = 1 }
    run:checkpoint()
    run:finish()
  end

  it("restores tables of values, also those that are not finite, and objects of the script", function()
    local object = { n = 3 }
    function object:state_dict() return { n = self.n, list = ms.tensor { 1, 2 } } end
    function object:load_state_dict(sd) self.n, self.list = sd.n, sd.list end
    saved { best = { loss = -math.huge, texts = { "a\0b", "\195\188" }, [3] = false }, object = object }
    local best, other = { loss = 0, old = 1 }, setmetatable({}, { __index = object })
    start({ best = best, object = other }):finish()
    assert.are.same({ loss = -math.huge, texts = { "a\0b", "\195\188" }, [3] = false }, best)
    assert.are.equal(3, rawget(other, "n"))
    assert.are.same({ 1, 2 }, other.list:tolist())
  end)

  it("may gain entries after the start", function()
    saved {}
    local run, state = start {}
    state.more = { n = 5 }
    run:log { loss = 1 }
    run:checkpoint()
    run:finish()
    local more = {}
    start({ more = more }):finish()
    assert.are.same({ n = 5 }, more)
  end)

  it("is refused if an entry cannot be saved, before a folder is made", function()
    local model, optimizer = parts()
    local function refused(text, state, with)
      raises("run.start: option 'state'" .. text, ms.run.start, { out = folder .. "/none", model = model,
        optimizer = with ~= false and optimizer or nil, state = state })
      assert.is_nil(require("lfs").attributes(folder .. "/none"))
    end
    local wanted = "expected an object with state_dict and load_state_dict, or a table of numbers, strings and booleans"
    refused(": 'step' is a number (3), " .. wanted, { step = 3 })
    refused(": 'metric' is a function, " .. wanted, { metric = ms.metrics.Accuracy })
    refused(": 'best.fn' is a function, expected a tensor, a number, a string, a boolean or a table of these",
      { best = { fn = print } })
    refused(": the name is 'a b', expected letters, digits, _ and -, not - at the beginning", { ["a b"] = {} })
    refused(" is a table, expected a table of objects by name, such as { loader = loader }", { {} })
    refused(" needs options 'model' and 'optimizer', with which it is saved", { best = {} }, false)
    local sharded = ms.fsdp.fully_shard(ms.nn.Linear(2, 2))
    refused(": 'other' is an optimizer of sharded parameters, of which only this rank's part would be saved; put the "
      .. "parameters into the model and into a group of its optimizer",
      { other = ms.optim.SGD(sharded:parameters(), { lr = 1 }) })
  end)

  it("names an entry that the checkpoint lacks, and what it has", function()
    saved { best = { n = 1 } }
    local path = folder .. "/run/step-000001.safetensors"
    raises(("run.start: the checkpoint '%s' has no state of 'schedule' (it has: best, loader); leave it out of option "
      .. "'state' while loading"):format(path), start, { schedule = {} })
    start({ best = {} }):finish()                        -- the refused start has changed nothing
  end)

  it("warns of what the checkpoint has and the option lacks", function()
    saved { best = { n = 1 }, more = {} }
    local warnings, run = ms.catch_warnings(start, {})
    run:finish()
    assert.are.same({ ("run.start: the checkpoint '%s/run/step-000001.safetensors' has states that option 'state' lacks: "
      .. "best, more"):format(folder) }, warnings)
  end)

  it("names the entry whose state does not fit", function()
    saved {}
    raises(("run.start: state of 'loader' in '%s/run/step-000001.safetensors': DataLoader: load_state_dict: the state is of "
      .. "a dataset of size 8, but this one has size 9"):format(folder), start, {}, 9)
  end)

  it("refuses tensors that are sharded, and averages that it cannot write by rows", function()
    local model, optimizer = parts()
    local other = ms.fsdp.fully_shard(ms.nn.Linear(2, 2))
    local run = ms.run.start { out = folder .. "/sharded", model = model, optimizer = optimizer, quiet = true,
      state = { other = other } }
    raises("run:checkpoint: option 'state': 'other.bias' is sharded; only the tensors of the model can be sharded",
      run.checkpoint, run)
    run:finish()
    local classic = ms.fsdp.FSDP(ms.nn.Linear(2, 2))
    run = ms.run.start { out = folder .. "/classic", model = classic, quiet = true,
      optimizer = ms.optim.SGD(classic:parameters(), { lr = 1 }), state = { ema = ms.optim.EMA(classic:parameters()) } }
    raises("run:checkpoint: option 'state': 'ema' has averages of a model that is not sharded by rows over all ranks; "
      .. "fsdp.save, with its option 'ema', saves them", run.checkpoint, run)
    run:finish()
    run = ms.run.start { out = folder .. "/foreign", model = model, optimizer = optimizer, quiet = true,
      state = { ema = ms.optim.EMA { ms.nn.Parameter(ms.ones(2)) } } }
    raises("run:checkpoint: option 'state': 'ema': parameter 1 of the averages is not a parameter of the model", run.checkpoint, run)
    run:finish()
  end)
end)
