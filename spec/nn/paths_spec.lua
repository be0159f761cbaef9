-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn

local message = require "spec.support.message"
local names = require "spec.support.names"

local function model() return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())) end

describe("buffers by path", function()
  it("are found below children, and persistent or not", function()
    local m = model()
    assert.are.equal(m[2][1].running_mean, m:get_buffer "2.1.running_mean")
    assert.are.equal(m[2][1].running_var, m[2][1]:get_buffer "running_var")
    m[1]:register_buffer("calls", ms.zeros(1), { persistent = false })
    assert.are.equal(m[1].calls, m:get_buffer "1.calls")
  end)

  it("are no parameters, and unknown ones are errors with the nearest name", function()
    assert.are.equal("get_buffer: BatchNorm1d: unknown buffer 'running_men'; did you mean 'running_mean'?",
      message(function() model():get_buffer "2.1.running_men" end))
    assert.are.equal("get_buffer: Linear: unknown buffer 'weight'",
      message(function() model():get_buffer "1.weight" end))
    for _, path in ipairs { "", ".a", "a.", "a..b" } do
      assert.are.equal(("get_buffer: argument 1 is a string ('%s'), expected names separated by dots"):format(path),
        message(function() model():get_buffer(path) end))
    end
  end)
end)

describe("add_module", function()
  it("registers a child under a name, also by its other name", function()
    local m = nn.Module:extend "Net"()
    local a, b = nn.ReLU(), nn.Tanh()
    assert.are.equal(m, m:add_module("a", a))
    m:register_module("b", b)
    assert.are.equal("a b", names(m:named_children()))
    assert.are.equal(a, m.a)
    m:add_module("a", b)                                -- replaces, and keeps the place
    assert.are.equal(b, m.a)
  end)

  it("appends to lists, and replaces their elements, by position", function()
    local m = nn.Sequential(nn.ReLU())
    m:add_module("2", nn.Tanh()):add_module("1", nn.GELU())
    assert.are.equal("1 2", names(m:named_children()))
    assert.is_true(m[1]:isa(nn.GELU))
    assert.are.equal("Sequential: add_module: children are numbered, got the name 'conv'; use append, or ModuleDict for names",
      message(function() m:add_module("conv", nn.ReLU()) end))
    assert.are.equal("Sequential: assignment: position 4 is out of range for 2 elements",
      message(function() m:add_module("4", nn.ReLU()) end))
  end)

  it("refuses what is no module, and names of other fields, of methods, and with dots", function()
    local m = nn.Linear(1, 1)
    m.scale = 2
    assert.are.equal("add_module: argument 2 is a number (3), expected a module",
      message(function() m:add_module("a", 3) end))
    assert.are.equal("add_module: argument 1 is a number (1), expected a string",
      message(function() m:add_module(1, nn.ReLU()) end))
    assert.are.equal("add_module: Linear already has a field 'scale'",
      message(function() m:add_module("scale", nn.ReLU()) end))
    assert.are.equal("add_module: Linear already has a field 'weight'",
      message(function() m:add_module("weight", nn.ReLU()) end))
    assert.truthy(message(function() m:add_module("parameters", nn.ReLU()) end):find("is a method of Module", 1, true))
    assert.are.equal("register module: name 'a.b' contains a dot",
      message(function() m:add_module("a.b", nn.ReLU()) end))
    assert.are.equal("", names(m:named_children()))
  end)
end)

describe("set_submodule", function()
  it("replaces and adds modules below", function()
    local m = model()
    local new = nn.Tanh()
    m:set_submodule("2.2", new)
    assert.are.equal(new, m[2][2])
    m:set_submodule("2.3", nn.GELU())
    assert.are.equal(3, #m[2])
    m:set_submodule("1.extra", nn.ReLU())
    assert.are.equal("1 1.extra 2 2.1 2.2 2.3", (names(m:named_modules()):gsub("^ ", "")))
  end)

  it("with strict only replaces", function()
    local m = model()
    m:set_submodule("2.2", nn.Tanh(), { strict = true })
    assert.is_true(m[2][2]:isa(nn.Tanh))
    assert.are.equal("get_submodule: Sequential '2': unknown child '3'",
      (message(function() m:set_submodule("2.3", nn.ReLU(), { strict = true }) end):gsub(";.*", "")))
    assert.are.equal(2, #m[2])
  end)

  it("refuses a module that contains the place", function()
    local m = model()
    assert.truthy(message(function() m:set_submodule("2.2", m) end):find("contains this one", 1, true))
  end)
end)

describe("full backward pre-hooks", function()
  it("see and replace the gradients of the results, before full backward hooks see them", function()
    local m = nn.Linear(2, 2)
    local order = {}
    m:register_full_backward_hook(function(_, _, grad_out) order[#order + 1] = "hook " .. grad_out[1]:sum():item() end)
    m:register_full_backward_pre_hook(function(mod, grad_out)
      assert.are.equal(m, mod)
      assert.are.equal(1, grad_out.n)
      order[#order + 1] = "second " .. grad_out[1]:sum():item()
    end)
    m:register_full_backward_pre_hook(function(_, grad_out)
      order[#order + 1] = "first " .. grad_out[1]:sum():item()
      return grad_out[1] * 10
    end, { prepend = true })
    local x = ms.ones(3, 2, { requires_grad = true })
    m(x):sum():backward()
    assert.are.same({ "first 6", "second 60", "hook 60" }, order)
    assert.is_true(m.bias.grad:equal(ms.full({ 2 }, 30)))
    assert.is_true(x.grad:allclose((m.weight:detach():sum(1) * 10):expand(3, 2)))
  end)

  it("get nil for results without a gradient, and may fill them", function()
    local Two = nn.Module:extend "Two"
    function Two.forward(_, x) return x * 2, x * 3, x:argmax(2) end
    local m, seen = Two(), nil
    local handle = m:register_full_backward_pre_hook(function(_, g)
      seen = { g.n, g[1] ~= nil, g[2] ~= nil, g[3] ~= nil }
      return { n = 3, g[1], g[1] * 100, nil }
    end)
    local x = ms.ones(1, 2, { requires_grad = true })
    local a = m(x)
    a:sum():backward()
    assert.are.same({ 3, true, false, false }, seen)
    assert.are.same({ { 302, 302 } }, x.grad:tolist())
    handle:remove()
    x.grad = nil
    a = m(x)
    a:sum():backward()
    assert.are.same({ { 2, 2 } }, x.grad:tolist())
  end)

  it("do nothing without gradients, and a wrong number of them is an error", function()
    local m = nn.Linear(1, 1)
    m:register_full_backward_pre_hook(function() return { n = 2 } end)
    ms.no_grad(function() m(ms.ones(1, 1)) end)
    assert.are.equal("Linear: a full backward pre-hook returned 2 gradients, expected 1",
      message(function() m(ms.ones(1, 1)):sum():backward() end))
  end)
end)
