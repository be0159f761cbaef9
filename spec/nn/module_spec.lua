-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn

local names = require "spec.support.names"
local message = require "spec.support.message"

local function param(...) return nn.Parameter(ms.zeros(...)) end

local Block = nn.Module:extend("Block")
function Block:init(dim, given)
  self.norm = nn.LayerNorm(dim)
  self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
  self.gain = nn.Parameter(ms.ones(1))
  self:register_buffer("calls", ms.zeros(1, { dtype = "int64" }), { persistent = false })
  self.scale = given and given.scale or 1
end
function Block:forward(x)
  self.calls:add_(1)
  return x + self.ff(self.norm(x)) * self.gain * self.scale
end

describe("nn.Module classes", function()
  it("construct through init, inherit it, and know their names", function()
    local Big = Block:extend("Big")
    local b = Big(4)
    assert.are.equal("Big", b:class_name())
    assert.is_true(b:isa(Big))
    assert.is_true(b:isa(Block))
    assert.is_true(b:isa(nn.Module))
    assert.is_false(b:isa(nn.Linear))
    assert.are.equal(1, b.scale)
    local Called = Block:extend("Called")
    function Called:init() Block.init(self, 2, { scale = 3 }) end
    assert.are.equal(3, Called().scale)
  end)

  it("need nothing called first, not even an init", function()
    local Empty = nn.Module:extend("Empty")
    local e = Empty()
    assert.is_nil(e.anything)
    e.child = nn.ReLU()
    assert.are.equal("child", names(e:named_children()))
  end)

  it("raise an error if there is no forward", function()
    assert.are.equal("Empty has no forward, so it cannot be called", message(nn.Module:extend("Empty")()))
  end)
end)

describe("registration", function()
  it("follows the order of definition, own parameters before children's", function()
    assert.are.equal("gain norm.weight norm.bias ff.1.weight ff.1.bias ff.3.weight ff.3.bias",
      names(Block(2):named_parameters()))
    assert.are.equal(" norm ff ff.1 ff.2 ff.3", names(Block(2):named_modules()))
    assert.are.equal("norm ff", names(Block(2):named_children()))
    assert.are.equal("calls", names(Block(2):named_buffers()))
  end)

  it("keeps the position of a replaced element, and removes one set to nil", function()
    local m = nn.Module:extend("M")()
    m.a = param(1)
    m.b = param(2)
    m.c = param(3)
    local other = param(4)
    m.a = other
    assert.are.equal("a b c", names(m:named_parameters()))
    assert.are.equal(other, m:parameters()[1])
    m.b = nil
    assert.is_nil(m.b)
    assert.are.equal("a c", names(m:named_parameters()))
    m.b = param(2)
    assert.are.equal("a c b", names(m:named_parameters()))
  end)

  it("refuses anything else in a registered place", function()
    local m = nn.Module:extend("M")()
    m.layer = nn.ReLU()
    m.p = param(1)
    assert.are.equal("M: cannot assign a number (5) to module 'layer': a Module or nil expected",
      message(function() m.layer = 5 end))
    assert.are.equal("M: cannot assign a Tensor to parameter 'p': an nn.Parameter or nil expected",
      message(function() m.p = ms.zeros(1) end))
    assert.is_true(nn.Module.isa(m.layer, nn.ReLU))
  end)

  it("refuses the names of Module's methods", function()
    local m = nn.Module:extend("M")()
    for _, value in ipairs { nn.ReLU(), param(1), 5 } do
      assert.truthy(message(function() m.parameters = value end):find("'parameters' is a method of Module", 1, true))
    end
    assert.truthy(message(function() m:register_buffer("train", ms.zeros(1)) end):find("'train' is a method of Module",
      1, true))
  end)

  it("registers a module assigned over a plain field", function()
    local m = nn.Module:extend("M")()
    m.x = 5
    m.x = nn.ReLU()
    assert.are.equal("x", names(m:named_children()))
  end)

  it("replaces buffers by assignment", function()
    local m = nn.Module:extend("M")()
    m:register_buffer("b", ms.zeros(2))
    m.b = ms.ones(2)
    assert.are.equal("b", names(m:named_buffers()))
    assert.are.same({ 1, 1 }, m.b:tolist())
    assert.truthy(message(function() m.b = 3 end):find("buffer 'b'", 1, true))
  end)

  it("reserves a name for a parameter assigned later", function()
    local m = nn.Module:extend("M")()
    m:register_parameter("first", nil)
    m.second = param(1)
    assert.are.equal("second", names(m:named_parameters()))
    m.first = param(1)
    assert.are.equal("first second", names(m:named_parameters()))
  end)
end)

describe("a module below itself", function()
  it("is refused where it is assigned", function()
    local line = "module_spec.lua:%d+: "
    local net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity()))
    local list, dict = nn.ModuleList { net }, nn.ModuleDict { { "net", net } }
    for text, fn in pairs {
      ["Sequential: cannot make the module its own child 'me'"] = function() net.me = net end,
      ["Sequential: cannot make the module its own child '3'"] = function() net:append(net) end,
      ["Sequential: cannot make the module its own child '1'"] = function() net:insert(1, net) end,
      ["Sequential: cannot make the module its own child '%-?3'"] = function() net[3] = net end,
      ["Sequential: cannot make ModuleList its child 'list': that module contains this one"] =
        function() net.list = list end,
      ["Sequential: cannot make ModuleDict its child '2': that module contains this one"] =
        function() net[2]:append(dict) end,
    } do
      local ok, text_of = pcall(fn)
      assert.is_false(ok, text)
      assert.matches(line .. text, text_of)
    end
    assert.are.equal(4, #net:modules())
  end)

  it("that replaced an element of a list is an error of every listing, never a stack overflow", function()
    local net = nn.Sequential(nn.Identity(), nn.Identity())
    net[1] = net                                        -- Lua does not report the assignment of an existing element
    for _, fn in ipairs { net.modules, net.parameters, net.state_dict, net.named_modules, net.train, net.float,
      function(m) m:apply(function() end) end } do
      local ok, text_of = pcall(fn, net)
      assert.is_false(ok)
      assert.matches("Sequential: the module contains itself, as '1'", text_of, 1, true)
    end
    assert.are.equal("Sequential(\n  (1): Sequential(which contains this one)\n  (2): Identity()\n)", tostring(net))
  end)
end)

describe("listings", function()
  it("list a shared tensor once, state_dict under every name", function()
    local m = nn.Module:extend("M")()
    m.a = nn.Linear(2, 2, { bias = false })
    m.b = nn.Linear(2, 2, { bias = false })
    m.b.weight = m.a.weight
    m.c = m.a
    assert.are.equal("a.weight", names(m:named_parameters()))
    assert.are.equal(" a b", names(m:named_modules()))
    local keys = {}
    for key in ms.sorted_pairs(m:state_dict()) do keys[#keys + 1] = key end
    assert.are.same({ "a.weight", "b.weight", "c.weight" }, keys)
  end)

  it("are snapshots", function()
    local m = Block(2)
    local seen = 0
    for name in m:named_parameters() do
      seen = seen + 1
      m[("extra%d"):format(seen)] = param(1)
      assert.is_nil(name:match "^extra")
    end
    assert.are.equal(7, seen)
  end)

  it("take a prefix and recurse", function()
    local m = Block(2)
    assert.are.equal("gain", names(m:named_parameters { recurse = false }))
    assert.are.equal("p.gain", names(m:named_parameters { prefix = "p", recurse = false }))
    assert.are.equal(1, #m:parameters { recurse = false })
  end)

  it("find modules and parameters by path", function()
    local m = Block(2)
    assert.are.equal(m.ff[3], m:get_submodule "ff.3")
    assert.are.equal(m, m:get_submodule "")
    assert.are.equal(m.ff[1].weight, m:get_parameter "ff.1.weight")
    assert.truthy(message(function() m:get_submodule "nrm" end):find("did you mean 'norm'?", 1, true))
    assert.truthy(message(function() m:get_parameter "ff.1.wieght" end):find("did you mean 'weight'?", 1, true))
  end)
end)

describe("containers", function()
  it("keep their children as array elements", function()
    local list = nn.ModuleList { nn.ReLU(), nn.Tanh() }
    assert.are.equal(2, #list)
    assert.are.equal(list[2], list[-1])
    local n = 0
    for i, m in ipairs(list) do
      n = n + 1
      assert.are.equal(list[i], m)
    end
    assert.are.equal(2, n)
    local sigmoid = nn.Sigmoid()
    list:append(sigmoid):insert(1, nn.Identity())
    assert.are.equal(4, #list)
    assert.are.equal(sigmoid, list[4])
    list[-1] = nn.GELU()
    assert.are.equal("GELU", list[4]:class_name())
    list[2] = nn.SiLU()
    list[5] = nn.ReLU()
    assert.are.equal("1 2 3 4 5", names(list:named_children()))
    assert.are.equal("SiLU", list:get_submodule("2"):class_name())
  end)

  it("take arguments or a table alike", function()
    assert.are.equal(2, #nn.Sequential { nn.ReLU(), nn.Tanh() })
    assert.are.equal(2, #nn.ModuleList(nn.ReLU(), nn.Tanh()))
    assert.are.equal(0, #nn.ModuleList {})
  end)

  it("say which element is no module", function()
    assert.are.equal("Sequential: element 2 is a number (3), expected a module",
      message(function() return nn.Sequential(nn.ReLU(), 3) end))
    local list = nn.Sequential(nn.ReLU())
    list[1] = 7
    assert.truthy(message(function() return list:parameters() end):find("element 1", 1, true))
  end)

  it("call one after the other, with several values too", function()
    local Pair = nn.Module:extend("Pair")
    function Pair.forward(_, a, b) return b, a end
    local a, b = nn.Sequential(Pair(), Pair(), Pair())(1, 2)
    assert.are.same({ 2, 1 }, { a, b })
  end)

  it("pass on and return all that a child gives, however many values they are called with", function()
    local Both, Sum = nn.Module:extend "Both", nn.Module:extend "Sum"
    function Both.forward(_, x, y) return x, x + 1, y end
    function Sum.forward(_, x, y) return x + (y or 0) end
    local function results(net, ...) return select("#", net(...)), net(...) end
    local x = ms.ones(1)
    for _, inputs in ipairs { { x }, { x, x } } do
      local n, first, second = results(nn.Sequential(nn.Identity(), Both()), unpack(inputs))
      assert.are.same({ 3, 1, 2 }, { n, first:item(), second:item() })
    end
    local n, sum = results(nn.Sequential(nn.Identity(), Both(), Sum(), nn.Identity()), x)
    assert.are.same({ 1, 3 }, { n, sum:item() })
    -- Inputs that a layer returns among its results stay alive.
    ms.scope(function()
      local Twice = nn.Module:extend "Twice"
      function Twice.forward(_, t) return t * 2, t end
      local doubled, kept = nn.Sequential(Sum(), Twice())(x)
      assert.are.same({ 2, 1 }, { doubled:item(), kept:item() })
    end)
  end)

  it("keep a dictionary's order", function()
    local d = nn.ModuleDict { { "z", nn.ReLU() }, { "a", nn.Tanh() } }
    assert.are.equal("z a", names(d:named_children()))
    assert.are.equal("Tanh", d.a:class_name())
    assert.are.equal("a z", names(nn.ModuleDict { z = nn.ReLU(), a = nn.Tanh() }:named_children()))
    assert.are.equal("ModuleList has no forward, so it cannot be called", message(nn.ModuleList {}))
  end)
end)

describe("printing", function()
  it("shows layers on a line and trees below", function()
    assert.are.equal("Linear(8 -> 16, bias)", tostring(nn.Linear(8, 16)))
    assert.are.equal("Linear(8 -> 16)", tostring(nn.Linear(8, 16, { bias = false })))
    assert.are.equal([[
Block(
  (norm): LayerNorm(2, eps 1e-05, weight, bias)
  (ff): Sequential(
    (1): Linear(2 -> 8, bias)
    (2): GELU()
    (3): Linear(8 -> 2, bias)
  )
)]], tostring(Block(2)))
  end)

  it("starts with the class name, for every layer", function()
    for _, m in ipairs { nn.Linear(1, 1), nn.Embedding(2, 3), nn.LayerNorm(2), nn.RMSNorm(2), nn.Dropout(0.1),
      nn.Identity(), nn.ReLU(),
      nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Sequential(), nn.ModuleList {}, nn.ModuleDict {},
        nn.CrossEntropyLoss(),
      nn.MSELoss(), nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.Conv2d(1, 1, 1), nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2),
      nn.TransformerDecoderLayer(4, 2), nn.Transformer { d_model = 4, nhead = 2 } } do
      assert.are.equal(m:class_name() .. "(", tostring(m):sub(1, #m:class_name() + 1))
    end
  end)
end)

describe("names", function()
  it("that do not exist are errors with the nearest one", function()
    assert.truthy(message(function() return nn.Linaer end):find("did you mean 'Linear'?", 1, true))
    assert.truthy(message(function() return nn.F.rleu end):find("did you mean 'relu'?", 1, true))
    assert.truthy(message(function() return nn.Linear(1, 2, { bais = false }) end):find("did you mean 'bias'?", 1,
      true))
  end)
end)

describe("modes", function()
  it("reach every module", function()
    local m = Block(2)
    assert.is_true(m.training)
    assert.are.equal(m, m:eval())
    assert.is_false(m.ff[2].training)
    assert.are.equal(m, m:train())
    assert.is_true(m.ff[2].training)
  end)

  it("apply goes children first", function()
    local order = {}
    Block(2):apply(function(x) order[#order + 1] = x:class_name() end)
    assert.are.equal("LayerNorm Linear GELU Linear Sequential Block", table.concat(order, " "))
  end)

  it("apply reaches a module with two names once", function()
    local m, n = nn.Module:extend("M")(), 0
    m.a = nn.ReLU()
    m.b = m.a
    m:apply(function() n = n + 1 end)
    assert.are.equal(2, n)
    assert.are.equal("apply: argument 1 is a number (3), expected a function", message(function() m:apply(3) end))
  end)

  it("requires_grad_ reaches parameters", function()
    local m = Block(2):requires_grad_(false)
    for _, p in ipairs(m:parameters()) do assert.is_false(p.requires_grad) end
  end)

  it("zero_grad clears to nil, or to zeros", function()
    local m = nn.Linear(2, 1)
    m(ms.ones(1, 2)):sum():backward()
    local grad = m.weight.grad
    m:zero_grad { set_to_none = false }
    assert.are.equal(grad, m.weight.grad)
    assert.are.same({ { 0, 0 } }, m.weight.grad:tolist())
    m:zero_grad()
    assert.is_nil(m.weight.grad)
  end)

  it("to changes dtypes, but keeps parameter objects and sharing", function()
    local m = Block(2)
    m.again = m.gain
    local p, counts = m.gain, m.calls
    assert.are.equal(m, m:to("float64"))
    assert.are.equal(p, m.gain)
    assert.are.equal("float64", m.gain.dtype)
    assert.are.equal("float64", m.ff[1].weight.dtype)
    assert.are.equal("int64", counts.dtype)
    assert.is_true(m.gain.requires_grad)
    assert.are.equal("float32", m:float().gain.dtype)
  end)

  it("to_empty brings a module from meta", function()
    local m = nn.Linear(3, 2, { device = "meta" })
    assert.are.equal("meta", m.weight.device)
    local p = m.weight
    m:to_empty("cpu")
    assert.are.equal("cpu", m.weight.device)
    assert.are.equal(p, m.weight)
    m:reset_parameters()
    assert.are.same({ 1, 2 }, { unpack(m(ms.ones(1, 3)).shape) })
  end)
end)

describe("state", function()
  it("is saved and loaded", function()
    local a, b = Block(2), Block(2)
    local sd = a:state_dict()
    assert.is_nil(sd.calls)
    assert.is_false(sd.gain.requires_grad)
    local missing, unexpected = b:load_state_dict(sd)
    assert.are.same({}, missing)
    assert.are.same({}, unexpected)
    for name, p in a:named_parameters() do assert.is_true(p:equal(b:get_parameter(name))) end
    ms.no_grad(function() a.gain:fill_(7) end)
    assert.are.equal(7, sd.gain:item())
    assert.are.equal(1, b.gain:item())
  end)

  it("is refused whole when something does not fit", function()
    local m = nn.Linear(2, 1)
    local before = m.weight:tolist()
    local sd = { weight = ms.zeros(1, 2), bias = ms.zeros(3), extra = ms.zeros(1) }
    local text = message(function() m:load_state_dict(sd) end)
    assert.truthy(text:find("Error(s) in loading state_dict for Linear:", 1, true))
    assert.truthy(text:find('Unexpected key(s) in state_dict: "extra". ', 1, true))
    assert.truthy(text:find("size mismatch for bias: copying a param with shape [3] from checkpoint, " ..
      "the shape in current model is [1].", 1, true))
    assert.are.same(before, m.weight:tolist())
    text = message(function() m:load_state_dict { extra = ms.zeros(1) } end)
    assert.are.equal('Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: "weight", "bias". \n\t'
      .. 'Unexpected key(s) in state_dict: "extra". ', text)
    text = message(function() m:load_state_dict {} end)
    assert.truthy(text:find('Missing key(s) in state_dict: "weight", "bias". ', 1, true))
  end)

  it("reports what strict would refuse", function()
    local m = nn.Linear(2, 1)
    local missing, unexpected = m:load_state_dict({ weight = ms.ones(1, 2), other = ms.ones(1) }, { strict = false })
    assert.are.same({ "bias" }, missing)
    assert.are.same({ "other" }, unexpected)
    assert.are.same({ { 1, 1 } }, m.weight:tolist())
  end)

  it("gives its own tensors to the parameters with assign", function()
    local m = nn.Linear(2, 1)
    local old, w = m.weight, ms.ones(1, 2, { dtype = "float64" })
    m:load_state_dict({ weight = w, bias = ms.zeros(1, { dtype = "float64" }) }, { assign = true })
    assert.are_not.equal(old, m.weight)
    assert.are.equal("float64", m.weight.dtype)
    assert.is_true(m.weight:isa(nn.Parameter))
    w:fill_(3)
    assert.are.same({ { 3, 3 } }, m.weight:tolist())
  end)

  it("copies deeply and keeps sharing", function()
    local m = Block(2)
    m.tied = m.gain
    local c = ms.deepcopy(m)
    assert.are_not.equal(m.gain, c.gain)
    assert.are.equal(c.gain, c.tied)
    assert.are.equal("Block", c:class_name())
    ms.no_grad(function() c.gain:fill_(5) end)
    assert.are.equal(1, m.gain:item())
    assert.are.same({ 3, 2 }, { unpack(c(ms.ones(3, 2)).shape) })
  end)

  it("copies hooks, and the copy's run for the copy", function()
    local m, seen = nn.Linear(2, 2), {}
    m:register_forward_pre_hook(function(self) seen[#seen + 1] = self end)
    m:register_forward_hook(function(self) seen[#seen + 1] = self end)
    m:register_full_backward_hook(function(self) seen[#seen + 1] = self end)
    local c = ms.deepcopy(m)
    c(ms.ones(1, 2):requires_grad_(true)):sum():backward()
    for k = 1, 3 do assert.are.equal(c, seen[k]) end
    m(ms.ones(1, 2):requires_grad_(true)):sum():backward()
    assert.are.equal(6, #seen)
    assert.are.equal(m, seen[6])
  end)
end)
