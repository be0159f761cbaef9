-- SPDX-License-Identifier: MIT
--- Wrong calls of methods of objects: with a dot instead of a colon, and by unknown names.
local ms = require "moonshard"
local nn, optim, data, metrics = ms.nn, ms.optim, ms.data, ms.metrics

local model = nn.Linear(2, 1)
local optimizer = optim.AdamW(model:parameters(), { lr = 0.1 })
local schedule = optim.lr_scheduler.step(optimizer, { step_size = 1 })
local loader = data.DataLoader({ 1, 2, 3 }, { batch_size = 2 })
local accuracy, stopping = metrics.Accuracy(), metrics.EarlyStopping()
local scaler = ms.amp.GradScaler { enabled = false }
local plot = ms.plot.line { 1, 2 }

local function message(fn)
  local where = debug.getinfo(fn, "S")
  local ok, text = pcall(fn)
  assert.is_false(ok)
  local line, rest = text:match "^[^:]*methods_spec%.lua:(%d+): (.*)$"
  assert(line, text)
  assert.is_true(where.linedefined <= tonumber(line) and tonumber(line) <= where.lastlinedefined)
  return rest
end

describe("a method that is called with a dot", function()
  for wanted, fn in pairs {
    ["step: called on nil; write optimizer:step()"] = function() optimizer.step() end,
    ["zero_grad: called on nil; write optimizer:zero_grad()"] = function() optimizer.zero_grad() end,
    ["step: called on a number (0.5); write schedule:step()"] = function() schedule.step(0.5) end,
    ["epoch: called on nil; write loader:epoch()"] = function() loader.epoch() end,
    ["update: called on a Tensor; write metric:update()"] = function() accuracy.update(ms.ones(2)) end,
    ["update: called on a number (1); write stopping:update()"] = function() stopping.update(1) end,
    ["eval: called on nil; write model:eval()"] = function() model.eval() end,
    ["train: called on a boolean (false); write model:train()"] = function() model.train(false) end,
    ["state_dict: called on nil; write model:state_dict()"] = function() model.state_dict() end,
    ["load_state_dict: called on a table; write model:load_state_dict()"] = function() model.load_state_dict {} end,
    ["scale: called on a Tensor; write scaler:scale()"] = function() scaler.scale(ms.ones(1)) end,
    ["svg: called on nil; write plot:svg()"] = function() plot.svg() end,
  } do
    it("is an error that writes the call: " .. wanted, function() assert.are.equal(wanted, message(fn)) end)
  end
  it("is none on an instance of a subclass, or as the method of a base class", function()
    local Net = nn.Linear:extend "Net"
    function Net:eval()
      self.evaluated = true
      return nn.Module.eval(self)
    end
    local net = Net(1, 1)
    net:eval()
    assert.is_true(net.evaluated)
    assert.is_false(net.training)
    assert.is_nil(optim.Optimizer.zero_grad(optimizer))
  end)
end)

describe("an unknown method", function()
  for wanted, fn in pairs {
    ["unknown method 'zero_gradd' of AdamW; did you mean 'zero_grad'?"] = function() optimizer:zero_gradd() end,
    ["unknown method 'get_lr' of LRScheduler; did you mean 'get_last_lr'?"] = function() schedule:get_lr() end,
    ["unknown method 'len' of DataLoader; did you mean 'size'?"] = function() loader:len() end,
    ["unknown method 'result' of Metric; did you mean 'compute'?"] = function() accuracy:result() end,
    ["unknown method 'step' of EarlyStopping; it has load_state_dict, state_dict, update"] = function() stopping:step() end,
    ["unknown method 'statedict' of Linear; did you mean 'state_dict'?"] = function() model:statedict() end,
    ["unknown method 'len' of TensorDataset; did you mean 'size'?"] = function() data.TensorDataset(ms.ones(2)):len() end,
    ["unknown method 'show' of Plot; did you mean 'text'?"] = function() plot:show() end,
    ["unknown method 'updatescale' of GradScaler; did you mean 'update'?"] = function() scaler:updatescale() end,
  } do
    it("is an error with the nearest one, or with all: " .. wanted, function() assert.are.equal(wanted, message(fn)) end)
  end
  it("is no error as a field that is only read", function()
    for _, object in ipairs { optimizer, schedule, loader, accuracy, stopping, model, scaler, plot } do
      assert.is_nil(object.stepp)
      assert.is_nil(object.no_such_field)
    end
    local called
    if model.hook then model:hook() else called = false end
    assert.is_false(called)
  end)
end)

describe("a method that only another front end of data parallelism has", function()
  local fsdp = ms.fsdp
  local made = {}
  setup(function()
    ms.catch_warnings(function()
      made = { ["fully_shard"] = fsdp.fully_shard(nn.Linear(2, 2)), ["fsdp.FSDP"] = fsdp.FSDP(nn.Linear(2, 2)),
        ["nn.DDP"] = nn.DDP(nn.Linear(2, 2)), ["a plain module"] = nn.Linear(2, 2) }
    end)
  end)
  -- Calls a method by its name in a chunk, because only a call in source text is told from a read.
  local function call(object, name)
    return select(2, pcall(assert(loadstring(("local m = ... m:%s(function() end)"):format(name))), object))
  end

  it("is an error that says what to write, for every method of the others", function()
    local checked = 0
    for _, owner in ipairs { fsdp.FSDPModule, fsdp.FSDP, nn.DDP } do
      for name, value in ms.sorted_pairs(owner) do
        if type(value) == "function" and not name:find "^_" and not nn.Module[name] then
          for kind, m in ms.sorted_pairs(made) do
            if getmetatable(m)[name] == nil then        -- m[name] would count as a field of the script's own
              assert.matches(("unknown method '%s' of %s; %%l"):format(name, m:class_name()), call(m, name),
                kind .. ":" .. name)
              checked = checked + 1
            end
          end
        end
      end
    end
    assert.is_true(checked > 50, checked)
  end)

  for _, case in ipairs {
    { "fully_shard", "no_sync", "FSDPLinear; write model:set_requires_gradient_sync(false) before the micro-batches" },
    { "fully_shard", "clip_grad_norm_", "FSDPLinear; write nn.utils.clip_grad_norm_(model:parameters(), max_norm)" },
    { "fully_shard", "summon_full_params", "FSDPLinear; write parameter:full_tensor(), or model:unshard()" },
    { "fully_shard", "set_state_dict_type", "FSDPLinear; write fsdp.state_dict(model, { type = ... })" },
    { "fsdp.FSDP", "set_requires_gradient_sync", "FSDP; write model:no_sync(function() ... end) around" },
    { "fsdp.FSDP", "set_reshard_after_forward", "FSDP; write fsdp.FSDP's option sharding_strategy" },
    { "nn.DDP", "set_requires_gradient_sync", "DDP; write model:no_sync(function() ... end) around" },
    { "nn.DDP", "clip_grad_norm_", "DDP; write nn.utils.clip_grad_norm_(model:parameters(), max_norm)" },
    { "nn.DDP", "_set_static_graph", "DDP; write nn.DDP's option static_graph" },
    { "nn.DDP", "full_optim_state_dict", "DDP; write optimizer:state_dict()" },
    { "nn.DDP", "parametrs", "DDP; did you mean 'parameters'?" },
    { "a plain module", "no_sync", "Linear; wrap the model first: nn.DDP(model), or fsdp.FSDP(model)" },
    { "a plain module", "unshard", "Linear; call fsdp.fully_shard(model) first" },
  } do
    local kind, name, text = unpack(case)
    it(("is an error on %s: %s"):format(kind, name), function()
      local got = call(made[kind], name)
      assert.truthy(got:find(("unknown method '%s' of %s"):format(name, text), 1, true), got)
    end)
  end

  it("is no error where a script only tests for it", function()
    local m = made.fully_shard
    local called
    if m.no_sync then m:no_sync(function() end) else called = false end
    assert.is_false(called)
  end)
end)

describe("a field that modules may have", function()
  it("is looked for once: later reads by the library do not ask who reads", function()
    local errors = require "moonshard.core.errors"
    local is_library, asked = errors.is_library, 0
    local net = nn.Sequential(nn.Linear(2, 2, { bias = false }), nn.Tanh())
    local function use()
      net(ms.ones(1, 2)):sum():backward()
      return net:parameters(), net:state_dict(), net:modules()
    end
    use()
    errors.is_library = function(level)                -- luacheck: ignore
      asked = asked + 1
      return is_library(level + 1)
    end
    local ok, why = pcall(use)
    errors.is_library = is_library
    assert.is_true(ok, why)
    assert.are.equal(0, asked)
  end)
end)

describe("a schedule", function()
  it("says the learning rates of the next step", function()
    local s = optim.lr_scheduler.step(optim.SGD({ { params = { nn.Parameter(ms.ones(1)) }, lr = 1 },
      { params = { nn.Parameter(ms.ones(1)) }, lr = 2 } }, { lr = 1 }), { step_size = 1, gamma = 0.5 })
    s:step()
    assert.are.same({ 0.5, 1 }, s:get_last_lr())
  end)
end)

describe("options", function()
  for wanted, fn in pairs {
    ["Conv2d: options are a number (1), expected a table; options are given by name"] = function() nn.Conv2d(3, 4, 3, 1) end,
    ["DataLoader: unknown option 'num_workers'; did you mean 'workers'?"] = function()
      data.DataLoader({ 1 }, { num_workers = 1 })
    end,
    ["argmax: unknown option 'dim'; a dimension is given by position, before the options (accepted: keepdim)"] = function()
      ms.ones(2):argmax { dim = 1 }
    end,
    ["random_split: the fractions add up to 0.9, expected 1"] = function() data.random_split({ 1, 2 }, { 0.5, 0.4 }) end,
    ["Accuracy: classes are float32, expected int64; convert them by :long()"] = function()
      metrics.Accuracy():update(ms.rand(2, 3), ms.ones(2))
    end,
  } do
    it("in PyTorch's form say what to write: " .. wanted, function()
      assert.are.equal(wanted, message(fn):sub(1, #wanted))
    end)
  end
end)

describe("a class of datasets", function()
  it("needs no init, and its methods may be defined after it", function()
    local Numbers = data.Dataset:extend "Numbers"
    assert.are.equal("Numbers: the class of a dataset must define size() and get(i)", message(function() Numbers() end))
    function Numbers.size() return 3 end
    assert.are.equal("Numbers: the class of a dataset must define get(i)", message(function() Numbers() end))
    function Numbers.get(_, i) return i * 10 end
    assert.are.equal(30, Numbers()[3])
    local Sized, Got = data.Dataset:extend "Sized", data.Dataset:extend "Got"
    function Sized:init() self.name = "sized" end
    function Sized.size() return 3 end
    function Got:init() self.name = "got" end
    function Got.get() return 1 end
    assert.are.equal("Sized: the class of a dataset must define get(i)", message(function() local _ = Sized()[1] end))
    assert.are.equal("Got: the class of a dataset must define size()", message(function() local _ = data.DataLoader(Got()):size() end))
  end)
end)
