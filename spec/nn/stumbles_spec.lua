-- SPDX-License-Identifier: MIT
--- Mistakes of first-time users that Lua would accept silently: tables of modules that are not registered, leaves in
--- plain fields, numbers of tensors in strings.
local ms = require "moonshard"
local nn = ms.nn

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
