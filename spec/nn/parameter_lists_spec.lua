-- SPDX-License-Identifier: MIT
--- ParameterList, ParameterDict, and the removal of a container's elements.
local ms = require "moonshard"
local nn = ms.nn
local raises = require "spec.support.raises"

local names = require "spec.support.names"

describe("ParameterList", function()
  it("registers its parameters under their positions, and makes parameters of tensors", function()
    local p = nn.Parameter(ms.ones(2))
    local list = nn.ParameterList { p, ms.zeros(3) }
    assert.equal("1 2", names(list:named_parameters()))
    assert.equal(p, list[1])
    assert.equal(list[2], list[-1])
    assert.is_true(list[2]:isa(nn.Parameter) and list[2].requires_grad)
    assert.is_nil(list[3])
    assert.equal("ParameterList([2], [3])", tostring(list))
  end)

  it("grows, is visited in order, and loses only its last element", function()
    local list = nn.ParameterList()
    for n = 1, 11 do list:append(ms.ones(n)) end
    local seen = {}
    for i, p in list:each() do seen[i] = p:numel() end
    assert.are.same({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }, seen)
    list[-1] = nil
    assert.equal(10, list:len())
    list[2] = ms.ones(5)
    assert.equal(5, list[2]:numel())
    raises("ParameterList: assigning nil can only remove the last element, not element 2 of 10",
      function() list[2] = nil end)
    raises("ParameterList: position 12 is out of range for 10 elements", function() list[12] = ms.ones(1) end)
    raises("ParameterList: element 1 is a number (3), expected a tensor", function() list[1] = 3 end)
    raises("ParameterList: append: argument 1 is a number (3), expected a tensor", function() list:append(3) end)
  end)

  it("trains, and loads a state dict that counts from 0", function()
    local Net = nn.Module:extend "Net"
    function Net:init() self.parts = nn.ParameterList { ms.ones(2), ms.ones(2) } end
    function Net:forward(x) return (x * self.parts[1] + self.parts[2]):sum() end
    local net = Net()
    net(ms.tensor { 3, 4 }):backward()
    assert.are.same({ 3, 4 }, net.parts[1].grad:tolist())
    net:load_state_dict({ ["parts.0"] = ms.full({ 2 }, 5), ["parts.1"] = ms.full({ 2 }, 6) }, { count_from = 0 })
    assert.are.same({ { 5, 5 }, { 6, 6 } }, { net.parts[1]:tolist(), net.parts[2]:tolist() })
  end)

  it("refuses names, other values and calls", function()
    raises("ParameterList: parameters are numbered, got the key 'a'; use ParameterDict for names",
      function() return nn.ParameterList { a = ms.ones(1) } end)
    raises("ParameterList: argument 1 is a number (3), expected a list of parameters",
      function() return nn.ParameterList(3) end)
    raises("ParameterList has no forward, so it cannot be called", nn.ParameterList())
  end)
end)

describe("ParameterDict", function()
  it("keeps the order of pairs, and sorts a table by name", function()
    local dict = nn.ParameterDict { { "z", ms.ones(2) }, { "a", ms.ones(1) } }
    assert.are.same({ "z", "a" }, dict:keys())
    assert.equal("z a", names(dict:named_parameters()))
    assert.equal("a z", names(nn.ParameterDict({ z = ms.ones(2), a = ms.ones(1) }):named_parameters()))
    assert.equal("ParameterDict(z [2], a [1])", tostring(dict))
    dict.m = ms.zeros(3)
    dict.z = nil
    assert.equal("a m", names(dict:named_parameters()))
    assert.is_true(dict.m:isa(nn.Parameter))
  end)

  it("refuses what is no parameter, and names of methods", function()
    raises("ParameterDict: 'a' is a number (1), expected a tensor", function() return nn.ParameterDict { a = 1 } end)
    raises("ParameterDict: 'train' is a method of Module; choose another name for the parameter",
      function() return nn.ParameterDict { train = ms.ones(1) } end)
  end)
end)

describe("a module in place of a list of its parameters", function()
  for _, class in ipairs { "ParameterList", "ParameterDict", "Linear" } do
    it("is refused: " .. class, function()
      local module = class == "Linear" and nn.Linear(1, 1)
        or nn[class] { class == "ParameterDict" and { "w", ms.ones(2) } or ms.ones(2) }
      for _, p in ipairs(module:parameters()) do p.grad = ms.full(p.shape, 8) end
      local list = (" is a %s, expected a list of %%s; write model:parameters()"):format(class)
      local tensors = "argument 1" .. list:format "tensors"
      for name, rest in pairs { clip_grad_norm_ = { 1 }, clip_grad_value_ = { 1 }, clip_grads_with_norm_ = { 1, 1 },
        get_total_norm = {}, parameters_to_vector = {} } do
        raises(name .. ": " .. tensors, function() return nn.utils[name](module, unpack(rest)) end)
      end
      raises("SGD: argument 1" .. list:format "leaves or groups", function() return ms.optim.SGD(module) end)
      raises("SGD: params of group 1" .. list:format "leaves", function() return ms.optim.SGD { { params = module } } end)
      raises("EMA: argument 1" .. list:format "parameters", function() return ms.optim.EMA(module) end)
      for _, join in ipairs { "cat", "stack", "hstack" } do
        raises(("%s: argument 1 is a %s, expected a list of tensors"):format(join, class), function() ms[join](module) end)
      end
      raises(("grad: input is a %s, expected a tensor or a list of them"):format(class),
        function() return ms.grad(ms.ones(1), module) end)
      for _, p in ipairs(module:parameters()) do assert.equal(8, p.grad:max():item()) end
    end)
  end

  it("is refused also where a table has elements only by its metatable", function()
    raises("clip_grad_norm_: argument 1 is a table, expected a list of tensors; write model:parameters()",
      function() return nn.utils.clip_grad_norm_(setmetatable({}, { __index = { ms.ones(1) } }), 1) end)
    local plain = setmetatable({ nn.Parameter(ms.ones(1)) }, {})
    plain[1].grad = ms.full({ 1 }, 8)
    assert.equal(8, nn.utils.clip_grad_norm_(plain, 1):item())
  end)
end)

describe("pop", function()
  it("removes an element and returns it; the later ones move forward", function()
    for _, class in ipairs { nn.Sequential, nn.ModuleList } do
      local list = class(nn.ReLU(), nn.Tanh(), nn.GELU())
      assert.equal("GELU()", tostring(list:pop()))
      assert.equal("ReLU()", tostring(list:pop(1)))
      assert.equal(1, #list)
      assert.equal("Tanh()", tostring(list[1]))
      assert.equal("Tanh()", tostring(list:pop(-1)))
      raises(list:class_name() .. ": pop: position -1 is out of range for 0 elements", function() list:pop() end)
    end
  end)
end)
