-- SPDX-License-Identifier: MIT
--- Mistakes of first-time users that Lua would accept silently: tables of modules that are not registered, leaves in
--- plain fields, numbers of tensors in strings.
local ms = require "moonshard"
local nn = ms.nn
local message = require "spec.support.message"

local function warnings(init)
  local Net = nn.Module:extend "Net"
  Net.init = init
  return ms.catch_warnings(function()
    Net()
    Net()
  end)
end

describe("a field that parameters() does not see", function()
  local modules = "which parameters() does not see; use nn.ModuleList, nn.ModuleDict or nn.Sequential"
  local function plain(self)
    self.layers = {}
    for k = 1, 3 do self.layers[k] = nn.Linear(1, 1) end
  end

  it("is warned about once, whether its table was filled before or after it was assigned", function()
    local other = function(self) self.blocks = { a = nn.Identity() } end
    assert.are.same({ "Net: field 'layers' is a plain table of modules, " .. modules }, warnings(plain))
    assert.are.same({ "Net: field 'blocks' is a plain table of modules, " .. modules }, warnings(other))
    assert.are.same({}, warnings(other))
  end)

  it("may be a leaf tensor or a table of parameters", function()
    assert.are.same({ "Net: field 'scale' is a leaf tensor that parameters() does not list; wrap it in nn.Parameter" },
      warnings(function(self) self.scale = ms.ones(2, { requires_grad = true }) end))
    assert.are.same({ "Net: field 'gains' is a plain table of parameters, which parameters() does not list; use nn.ParameterList, nn.ParameterDict or one field each" },
      warnings(function(self) self.gains = { nn.Parameter(ms.ones(2)) } end))
  end)

  it("is no warning if the modules are also registered, or nothing is to be trained", function()
    assert.are.same({}, warnings(function(self)
      self.a = nn.Linear(1, 1)
      self.again = { self.a, self.a.weight }
      self.sizes = { 1, 2, { 3 } }
      self.constant = ms.ones(2)
      self.w = ms.ones(2, { requires_grad = true })
      self.w = nn.Parameter(self.w)
    end))
  end)
end)

describe("a for loop over what a model lists", function()
  local model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

  it("visits the elements, as ipairs does", function()
    for _, name in ipairs { "parameters", "buffers", "modules", "children" } do
      local list, seen = model[name](model), {}
      for x in list do seen[#seen + 1] = x end
      assert.is_true(#list > 1 and #seen == #list, name)
      for k, x in ipairs(list) do assert.is_true(rawequal(x, seen[k])) end
      assert.are.equal(#list, #{ unpack(list) })
    end
    for _ in nn.Identity():parameters() do error "there is none" end
  end)

  it("may be left, nested and repeated, and elements may be equal", function()
    local list, pairs_seen = model:parameters(), 0
    for p in list do
      if p then break end
    end
    for _ in list do
      for _ in list do pairs_seen = pairs_seen + 1 end
    end
    assert.are.equal(#list * #list, pairs_seen)
    list[#list + 1] = list[1]
    local n = 0
    for _ in list do n = n + 1 end
    assert.are.equal(#list, n)
  end)

  it("is an error that says what to write for tensors, datasets and loaders", function()
    local data = ms.data
    local wanted = {
      { function() for _ in ms.ones(2) do assert(false, "no error") end end, "for i = 1, t:size(1) do local row = t[i]" },
      { function() for _ in nn.Parameter(ms.ones(2)) do assert(false, "no error") end end, "for i = 1, t:size(1) do local row = t[i]" },
      { function() for _ in data.TensorDataset(ms.ones(2)) do assert(false, "no error") end end, "for i = 1, dataset:size() do" },
      { function() for _ in data.DataLoader({ 1, 2 }, {}) do assert(false, "no error") end end, "for x, y in loader:epoch() do" },
    }
    for _, w in ipairs(wanted) do assert.matches(w[2], message(w[1]), 1, true) end
  end)

  it("prints what it visits", function()
    assert.are.equal("(1): Linear(2 -> 3, bias)\n(2): BatchNorm1d(3, eps 1e-05, momentum 0.1, affine, running stats)\n"
      .. "(3): Linear(3 -> 1, bias)", tostring(model:children()))
    assert.are.equal("{}", tostring(nn.Identity():parameters()))
  end)

  it("leaves a list of parameters one that optimizers, scopes and copies take", function()
    local list = model:parameters()
    assert.are.equal("SGD(1 group, 6 parameters, lr 0.1)", tostring(ms.optim.SGD(list, { lr = 0.1 })))
    local kept = ms.scope(function() return ms.scope(function() return model:buffers() end) end)
    assert.is_false(kept[1]:is_released())
    assert.are.equal(6, #ms.deepcopy(list))
    assert.are.equal(4, #ms.grad(model(ms.ones(4, 2)):sum(), { list[1], list[2], list[5], list[6] }))
  end)
end)

describe("nn.Sequential", function()
  it("passes on what a child returns as Lua's calls do, and drops what the next child does not take", function()
    local gru, linear, x = nn.GRU(3, 4), nn.Linear(4, 1), ms.randn(5, 2, 3)
    local y, h = gru(x)
    assert.is_true(linear(y):equal(nn.Sequential(gru, linear)(x)))
    assert.is_true(linear(gru(x)):equal(nn.Sequential(gru, linear)(x)))
    local again = nn.GRU(4, 4)
    assert.is_true((again(y, h)):equal((nn.Sequential(gru, again)(x))))
    assert.are.equal(2, select("#", nn.Sequential(nn.Identity(), gru)(x)))
    local First = nn.Module:extend "First"                           -- for a second GRU that begins with zeros
    function First:forward(out, _) return out end                    -- luacheck: ignore 212
    assert.is_true((again(y)):equal((nn.Sequential(gru, First(), again)(x))))
  end)
end)

describe("what load_state_dict returns", function()
  it("prints as in PyTorch", function()
    local model = nn.Linear(2, 1)
    local sd = model:state_dict()
    local missing, unexpected = model:load_state_dict(sd)
    assert.are.equal("<All keys matched successfully> no unexpected keys", tostring(missing) .. " " .. tostring(unexpected))
    sd.bias, sd.other, sd.more = nil, sd.bias, sd.bias
    missing, unexpected = model:load_state_dict(sd, { strict = false })
    assert.are.equal("missing keys: ['bias'] unexpected keys: ['more', 'other']",
      tostring(missing) .. " " .. tostring(unexpected))
    assert.are.same({ "bias" }, missing)
    sd.other, sd.more = nil, nil
    missing, unexpected = model:load_state_dict(sd, { strict = false })
    assert.are.equal("missing keys: ['bias'] no unexpected keys", tostring(missing) .. " " .. tostring(unexpected))
    sd.bias, sd.other = ms.ones(1), ms.ones(1)
    missing, unexpected = model:load_state_dict(sd, { strict = false })
    assert.are.equal("no missing keys unexpected keys: ['other']", tostring(missing) .. " " .. tostring(unexpected))
  end)
end)

describe("a mistake with a model or its adapters", function()
  local model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
  local lora = nn.lora(model, { rank = 2, target = "1" })
  local packed = nn.utils.rnn.pack_sequence { ms.ones(3, 4) }
  for wanted, fn in ms.sorted_pairs {
    ["lora: unknown option 'r'; did you mean 'rank'?"] = function() nn.lora(model, { r = 4, target = "2" }) end,
    ["lora: unknown option 'target_modules'; did you mean 'target'?"] = function()
      nn.lora(model, { rank = 4, target_modules = "2" })
    end,
    ["the object of nn.lora cannot be called; call the model"] = function() lora(ms.ones(1, 4)) end,
    ["parameters: called on nil; write lora:parameters()"] = function() lora.parameters() end,
    ["print(lora) shows their number"] = function() lora:print_trainable_parameters() end,
    ["unknown method 'clone' of Sequential; write ms.deepcopy(model)"] = function() model:clone() end,
    ["unknown method 'save' of Sequential; write ms.save(path, model:state_dict())"] = function() model:save "x" end,
    ["expected a table of tensors; write model:state_dict()"] = function() model:load_state_dict(model) end,
    ["expected a table of tensors; write ms.load(path)"] = function() model:load_state_dict "model.safetensors" end,
    ["linear: input is a PackedSequence, expected a tensor; its rows are packed.data"] = function() model[2](packed) end,
    ["unknown name in nn: 'pad_sequence'; did you mean nn.utils.rnn.pad_sequence?"] = function()
      return nn.pad_sequence
    end,
    ["unknown name in moonshard: 'DataLoader'; did you mean data.DataLoader?"] = function() return ms.DataLoader end,
  } do
    it("is named with what to write: " .. wanted, function() assert.matches(wanted, message(fn), 1, true) end)
  end
end)

describe("a method initialize", function()
  local function made(base, init)
    local Net = base:extend "Net"
    function Net.initialize() end
    Net.init = init
    return ms.catch_warnings(function() Net(2, 2):initialize() end)
  end

  it("is warned about where a class has no constructor", function()
    assert.are.same({ "Net: Net(...) does not call Net:initialize; the constructor of a Module is init: function Net:init(...)" },
      made(nn.Module))
    assert.are.same({}, made(nn.Module, function(self) self:initialize() end))
    assert.are.same({}, made(nn.Linear))
  end)
end)

describe("a tensor of one element", function()
  it("is concatenated to a string as its number", function()
    assert.are.equal("loss 1.5", "loss " .. ms.full({ 1 }, 1.5))
    assert.are.equal("2 steps", ms.tensor(2, { dtype = "int64" }) .. " steps")
    assert.are.equal("3true", 3 .. ms.ones(1):gt(0))
    assert.are.equal("1 and 2", ms.ones(1) .. " and " .. nn.Parameter(ms.full({ 1 }, 2)))
  end)
end)

describe("forward of an instance", function()
  it("can be called with a colon, or as a value with the module as argument", function()
    local m = nn.Linear(2, 2)
    local x = ms.ones(1, 2)
    assert.is_true(m:forward(x):equal(m(x)))
    assert.is_true(m.forward(m, x):equal(m(x)))
    assert.are.equal(m.forward, m.forward)
    assert.is_nil(nn.ModuleList({}).forward)
  end)

  it("may be replaced in the instance", function()
    local m = nn.Linear(2, 2)
    local before = m.forward
    m.forward = function(self, x) return before(self, x) * 2 end
    local x = ms.ones(1, 2)
    assert.is_true(m(x):equal(before(m, x) * 2))
  end)
end)

describe("what a message suggests", function()
  it("for % is right: division, and a cast to whole numbers", function()
    local t = ms.arange(0, 7)
    assert.are.same({ 0, 1, 2, 0, 1, 2, 0 }, (t - (t / 3):long() * 3):tolist())
  end)
end)

describe("cuda and cpu of a module", function()
  it("move the module as m:to does", function()
    local m = nn.Linear(2, 2)
    assert.are.equal(m, m:cuda())
    assert.are.equal("cuda:0", m.weight.device)
    assert.are.equal("cpu", m:cpu().weight.device)
    assert.are.equal("cuda:0", m:cuda(0).weight.device)
  end)
end)

describe("what Lua does with a tensor without asking it", function()
  local t, u = ms.tensor { 1, 3 }, ms.tensor { 1, 3 }

  it("is what the table of docs/lua.md says, and the line it gives instead works", function()
    assert.are.equal(0, #t)
    assert.are.equal(2, t:size(1))
    for _ in ipairs(t) do error "entered" end
    assert.is_false(t == u)
    assert.is_false(rawequal(t, 2))
    assert.is_true(t:equal(u))
    assert.are.same({ true, true }, t:eq(u):tolist())
    assert.are.same({ false, false }, t:eq(2):tolist())
    assert.matches("attempt to compare table with number", select(2, pcall(function() return t < 2 end)))
    assert.are.same({ true, false }, t:lt(2):tolist())
    assert.is_true(t:gt(2) and true)
    assert.is_false(t:gt(2):all():item())
    assert.are.same({ false, false }, t:eq(0):tolist())
    assert.are.same({ 5, 0 }, ms.where(ms.tensor { true, false }, ms.full({ 2 }, 5), ms.zeros(2)):tolist())
  end)
end)
