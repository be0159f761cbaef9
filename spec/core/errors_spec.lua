-- SPDX-License-Identifier: MIT
--- Error messages: at the user's line, with the value that was passed and what was expected.
local ms = require "moonshard"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local class = require "moonshard.core.class"

local function line() return debug.getinfo(2, "l").currentline end
local function message(fn, ...)
  local ok, text = pcall(fn, ...)
  assert.is_false(ok)
  return text
end

describe("an error", function()
  it("is raised at the user's line", function()
    local at
    for _, fn in ipairs {
      function() at = line() local _ = ms.zeros(-1) end,
      function() at = line() local _ = ms.ones(2) + ms.ones(3) end,
      function() at = line() local _ = ms.ones(2):view(3) end,
      function() at = line() ms.no_grad(function() local _ = ms.ones(2):matmul(ms.ones(3)) end) end,
      function() at = line() local _ = ms.ones(2):narrow(1, 5, 1) end,
      function() at = line() ms.ones(2):backward() return 1 end,
      function() at = line() local _ = ms.no_such_name end,
    } do
      assert.matches("errors_spec%.lua:" .. "%d+: ", message(fn))
      assert.are.equal(at, tonumber(message(fn):match "errors_spec%.lua:(%d+): "))
    end
  end)

  it("has no position if Lua knows no line", function()
    assert.are.equal("zeros: size is -1, expected a whole number from 0", message(ms.zeros, -1))
  end)

  it("that a block of no_grad, scope and the like raises is passed on unchanged", function()
    local e = {}
    for _, block in ipairs { ms.no_grad, ms.enable_grad, ms.scope, ms.catch_warnings,
      function(fn) return ms.with_device("cpu", fn) end } do
      local ok, caught = pcall(block, function() error(e) end)
      assert.is_false(ok)
      assert.is_true(rawequal(e, caught))
    end
    assert.is_true(ms.is_grad_enabled())
  end)
end)

describe("an unknown name", function()
  it("is answered with the nearest one", function()
    assert.matches("unknown name in moonshard: 'tensr'; did you mean 'tensor'%?",
      message(function() return ms.tensr end))
    assert.matches("unknown name in testing: 'assert_clos'; did you mean 'assert_close'",
      message(function() return ms.testing.assert_clos end))
    assert.matches("unknown name in cuda: 'is_avail'", message(function() return ms.cuda.is_avail end))
    assert.are.equal("relu", errors.nearest("rleu", { "gelu", "relu", "tanh" }))
    assert.are.equal("learning_rate", errors.nearest("learning_rat", { "momentum", "learning_rate" }))
    assert.is_nil(errors.nearest("zzzzzz", { "relu", "tanh" }))
  end)
end)

describe("options", function()
  local spec = { lr = 1e-3, betas = { 0.9, 0.999 }, name = opts.string, params = opts.required,
    mode = opts.one_of({ "sum", "mean" }, "mean") }
  it("have defaults", function()
    local o = opts("test", { params = 1 }, spec)
    assert.are.equal(1e-3, o.lr)
    assert.are.equal("mean", o.mode)
    assert.is_nil(o.name)
    assert.are.equal(0.5, opts("test", { params = 1, lr = 0.5 }, spec).lr)
  end)
  it("are checked", function()
    local function given(t) return message(opts.check, "test", t, spec) end
    assert.are.equal("test: unknown option 'learning_rate'; did you mean 'lr'? (accepted: betas, lr, mode, name, params)", given { learning_rate = 1 })
    assert.are.equal("test: unknown option 'beta'; did you mean 'betas'? (accepted: betas, lr, mode, name, params)",
      given { beta = 1 })
    assert.are.equal("test: option 'lr' is a string ('x'), expected a number", given { lr = "x", params = 1 })
    assert.are.equal("test: option 'params' is missing", given {})
    assert.are.equal("test: option 'mode' is 'men', expected one of 'sum', 'mean'; did you mean 'mean'?",
      given { mode = "men", params = 1 })
    assert.are.equal("test: options are a number (3), expected a table; options are given by name: write { lr = 3 }",
      message(opts.check, "test", 3, spec))
    assert.are.equal("test: options are a boolean (true), expected a table", message(opts.check, "test", true, spec))
    assert.are.equal("test: options are a boolean (true), expected a table; write { on = true }",
      message(opts.check, "test", true, { on = false, rate = 1, any = opts.any }))
    assert.are.equal("test: options are a boolean (true), expected a table",
      message(opts.check, "test", true, { on = false, off = opts.boolean }))
  end)
  it("are distinguished from other arguments", function()
    assert.is_true(opts.is {})
    assert.is_true(opts.is { lr = 1 })
    assert.is_false(opts.is { 1, 2 })
    assert.is_false(opts.is(ms.ones(1)))
    assert.is_false(opts.is(ms.ones(1).shape))
    assert.is_false(opts.is "x")
    assert.are.same({ 2, { a = 1 } }, { opts.split(1, 2, { a = 1 }) })
    assert.are.same({ 2 }, { opts.split(1, 2, nil) })
  end)
end)

describe("classes", function()
  it("inherit, construct and name themselves", function()
    local A = class "A"
    function A:init(x) self.x = x end
    function A:twice() return 2 * self.x end
    function A.__len() return 7 end
    local B = A:extend "B"
    local b = B(4)
    assert.are.equal(8, b:twice())
    assert.is_true(b:isa(B) and b:isa(A))
    assert.is_false(A(1):isa(B))
    assert.are.equal("B", b:class_name())
    assert.are.equal("B", tostring(b))
    assert.are.equal("class B", tostring(B))
    function B.init(self, x) A.init(self, x + 1) end
    assert.are.equal(5, B(4).x)
    assert.are.equal(A.__len, B.__len)
  end)
end)

describe("a misspelt method of a tensor", function()
  local t = ms.ones(2)
  it("is an error with the nearest name, at the script's line", function()
    local here = debug.getinfo(1, "l").currentline
    local ok, text = pcall(function() return t:sofmax(1) end)
    assert.is_false(ok)
    assert.are.equal(("spec/core/errors_spec.lua:%d: unknown method 'sofmax' of a tensor; did you mean 'softmax'?"):format(
      here + 1), text)
    ok, text = pcall(function() t:exp():reshap { 2 } end)
    assert.is_false(ok)
    assert.matches("'reshap' of a tensor; did you mean 'reshape'?", text, 1, true)
    ok, text = pcall(function() ms.nn.Parameter(t):sofmax "x" end)
    assert.is_false(ok)
    assert.matches("did you mean 'softmax'?", text, 1, true)
  end)
  it("suggests the class's own methods, too", function()
    local Two = ms.Tensor:extend "MisspeltTwo"
    function Two:init(a) self.a = a end
    function Two:inner_tensors() return { self.a } end
    function Two.halfway_there() return 1 end
    assert.are.equal(1, Two(t):halfway_there())
    local ok, text = pcall(function() return Two(t):halfway_ther() end)
    assert.is_false(ok)
    assert.matches("did you mean 'halfway_there'?", text, 1, true)
  end)
  it("is no error as a field that is only read, or read before it is called", function()
    assert.is_nil(t.sofmax)
    local asked = 0
    if t.sofmax then t:sofmax() else asked = asked + 1 end
    local name = "sofmax"
    if not t[name] then asked = asked + 1 end
    assert.are.equal(2, asked)
  end)
  it("is Lua's own error if no name is similar", function()
    local ok, text = pcall(function() return t:zqxwvkjzq() end)
    assert.is_false(ok)
    assert.matches("attempt to call method 'zqxwvkjzq' (a nil value)", text, 1, true)
  end)
end)

describe("a field that PyTorch's tensors have and these do not", function()
  local p = ms.nn.Parameter(ms.ones(2))
  local advice = {
    data = "write t:copy_(values), t:clamp_(...) and the like inside of ms.no_grad(function() ... end) to change elements, t:detach() to read them",
    is_cuda = "write t.device ~= 'cpu'", nbytes = "write t:numel() * t:element_size()",
    require_grad = "did you mean 'requires_grad'?", requries_grad = "did you mean 'requires_grad'?",
  }
  for name, hint in pairs(advice) do
    it("cannot be assigned or read, and the error says what to write: " .. name, function()
      local wanted = ("a tensor has no field '%s'; %s"):format(name, hint)
      local here = debug.getinfo(1, "l").currentline
      local ok, text = pcall(function() p[name] = ms.zeros(2) end)
      assert.is_false(ok)
      assert.are.equal(("spec/core/errors_spec.lua:%d: %s"):format(here + 1, wanted), text)
      ok, text = pcall(function() return ms.ones(2)[name] end)
      assert.is_false(ok)
      assert.matches(wanted, text, 1, true)
      assert.are.same({ 1, 1 }, p:tolist())
    end)
  end
  local several = "a function of several results returns them beside each other: "
  local read = {
    values = several .. "values, indices = t:max(2)", indices = several .. "values, indices = t:max(2)",
    S = several .. "U, S, Vh = ms.linalg.svd(t)", shap = "did you mean 'shape'?", dtpye = "did you mean 'dtype'?",
    devices = "did you mean 'device'?",
  }
  for name, hint in pairs(read) do
    it("cannot be read, if it is of a result or a slip, until a script sets it: " .. name, function()
      local t = ms.ones(2)
      local ok, text = pcall(function() return t[name] end)
      assert.is_false(ok)
      assert.matches(("a tensor has no field '%s'; %s"):format(name, hint), text, 1, true)
      assert.is_false(pcall(function() return t[name] or 3 end))
      t[name] = 3
      assert.are.equal(3, t[name])
    end)
  end
  it("is a method of a sparse tensor: values", function()
    local sparse = ms.sparse_coo(ms.zeros(1, 1, { dtype = "int64" }), ms.ones(1), { 1 })
    assert.are.same({ 1 }, sparse:values():tolist())
  end)
  it("may be a field of a tensor class", function()
    local Boxed = ms.Tensor:extend "BoxedData"
    function Boxed:init(t) self.data = t end
    function Boxed:inner_tensors() return { self.data } end
    assert.are.same({ 1, 1 }, Boxed(p).data:tolist())
  end)
  it("leaves all other names to scripts", function()
    local t = ms.ones(2)
    for _, name in ipairs { "mark", "share", "grads", "name", "rank", "dims", "value" } do assert.is_nil(t[name]) end
    t.mark, t.requires, t.dataset = 1, 2, 3
    assert.are.same({ 1, 2, 3 }, { t.mark, t.requires, t.dataset })
  end)
end)
