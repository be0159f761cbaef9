-- SPDX-License-Identifier: MIT
--- Tensor classes: an instance runs every operation on each of its inner tensors.
local ms = require "moonshard"
local nn, optim, dist = ms.nn, ms.optim, ms.dist

local TwoTensor = ms.Tensor:extend "TwoTensor"
function TwoTensor:init(a, b) self.a, self.b = a, b end
function TwoTensor:inner_tensors() return { self.a, self.b } end

local failure = require "spec.support.message"

-- fn of an instance gives what fn gives for each inner tensor.
local function same(fn, a, b)
  local got = { fn(TwoTensor(a, b)) }
  local first, second = { fn(a) }, { fn(b) }
  assert.are.equal(#first, #got)
  for k = 1, #got do
    assert.is_true(got[k]:isa(TwoTensor))
    assert.is_true(got[k].a:equal(first[k]))
    assert.is_true(got[k].b:equal(second[k]))
  end
end

local function pair() return ms.randn(3, 4), ms.randn(3, 4) end

describe("an instance of a tensor class", function()
  before_each(function() ms.manual_seed(3) end)

  it("is a tensor of the shape, dtype and device of its first inner one", function()
    local t = TwoTensor(pair())
    assert.is_true(ms.is_tensor(t) and t:isa(TwoTensor) and t:isa(ms.Tensor))
    assert.is_false(t:isa(nn.Parameter))
    assert.are.equal("TwoTensor", t:class_name())
    assert.are.equal("[3, 4]", tostring(t.shape))
    assert.are.equal("float32", t.dtype)
    assert.are.equal("cpu", t.device)
    assert.are.equal(2, t.ndim)
    assert.are.equal(12, t:numel())
    assert.are.equal(4, t:size(-1))
    assert.is_true(t.is_leaf and t:is_contiguous())
    assert.are.equal(t.a:data_ptr(), t:data_ptr())
    assert.matches("^TwoTensor float32 %[3, 4%] cpu\n%[%[", tostring(t))
    t.note = "mine"
    assert.are.equal("mine", t.note)
  end)

  local functions = {
    ["t + 1"] = function(t) return t + 1 end, ["2 - t"] = function(t) return 2 - t end,
      ["-t"] = function(t) return -t end,
    ["t * t"] = function(t) return t * t end, ["t / 2"] = function(t) return t / 2 end,
      ["t ^ 2"] = function(t) return t ^ 2 end,
    ["add with alpha"] = function(t) return t:add(t, { alpha = 3 }) end, ["exp"] = function(t) return t:exp() end,
    ["relu"] = function(t) return t:relu() end, ["gelu tanh"] = function(t) return t:gelu { approximate = "tanh" } end,
    ["clamp"] = function(t) return t:clamp(0, 1) end, ["view"] = function(t) return t:view(4, 3) end,
    ["reshape"] = function(t) return t:reshape { 2, -1 } end, ["flatten"] = function(t) return t:flatten() end,
    ["transpose"] = function(t) return t:transpose(1, 2) end, ["t"] = function(t) return t:t() end,
    ["select"] = function(t) return t:select(1, 2) end, ["t[i]"] = function(t) return t[2] end,
    ["narrow"] = function(t) return t:narrow(2, 2, 2) end, ["unsqueeze"] = function(t) return t:unsqueeze(1) end,
    ["expand"] = function(t) return t:unsqueeze(1):expand(2, 3, 4) end, ["tile"] = function(t) return t:tile(2, 1) end,
    ["split"] = function(t) return unpack(t:split(2, 2)) end, ["chunk"] = function(t) return unpack(t:chunk(2)) end,
    ["sum"] = function(t) return t:sum() end, ["mean along"] = function(t) return t:mean(1, { keepdim = true }) end,
    ["max"] = function(t) return t:max(1) end, ["max of all"] = function(t) return t:max() end,
      ["norm"] = function(t) return t:norm() end,
    ["std"] = function(t) return t:std(2) end, ["softmax"] = function(t) return t:softmax(2) end,
    ["cumsum"] = function(t) return t:cumsum(1) end, ["gt"] = function(t) return t:gt(0) end,
    ["matmul"] = function(t) return t:matmul(t:t()) end,
      ["plain matmul"] = function(t) return ms.ones(2, 3):matmul(t) end,
    ["plain + t"] = function(t) return ms.ones(3, 4) + t end, ["cat"] = function(t) return ms.cat({ t, t }, 2) end,
    ["cat with plain"] = function(t) return ms.cat({ ms.ones(1, 4), t, t, t, ms.zeros(2, 4) }) end,
    ["stack"] = function(t) return ms.stack { t, t } end, ["where"] = function(t) return ms.where(t:gt(0), t, 0) end,
    ["masked_fill"] = function(t) return t:masked_fill(t:gt(0), 7) end, ["tril"] = function(t) return t:tril() end,
    ["clone"] = function(t) return t:clone() end, ["detach"] = function(t) return t:detach() end,
    ["to"] = function(t) return t:to "float64" end, ["half"] = function(t) return t:half() end,
    ["zeros_like"] = function(t) return ms.zeros_like(t) end, ["full_like"] = function(t) return ms.full_like(t, 3) end,
    ["index_select"] = function(t) return t:index_select(1, ms.tensor({ 0, 2 }, { dtype = "int64" })) end,
    ["linear"] = function(t) return nn.F.linear(ms.ones(2, 4), t) end,
      ["layer_norm"] = function(t) return nn.F.layer_norm(t, 4) end,
    ["mse_loss"] = function(t) return nn.F.mse_loss(t, ms.zeros(3, 4)) end,
    ["embedding"] = function(t) return nn.F.embedding(ms.tensor({ 2, 0 }, { dtype = "int64" }), t) end,
    ["deepcopy"] = function(t) return ms.deepcopy(t) end,
    ["a Function"] = function(t)
      return ms.Function { forward = function(_, x) return x * 3 end, backward = function(_, g) return g * 3 end }(t)
    end,
    ["a module"] = function(t) return nn.Sequential(nn.ReLU(), nn.Identity())(t) end,
    ["a scope"] = function(t) return ms.scope(function() return t * 2 + 1 end) end,
    -- in place
    ["add_"] = function(t) return t:clone():add_(1) end, ["mul_ by itself"] = function(t) return t:clone():mul_(t) end,
    ["zero_"] = function(t) return t:clone():zero_() end,
      ["copy_ a plain one"] = function(t) return t:clone():copy_(ms.ones(4)) end,
    ["copy_"] = function(t) return ms.zeros_like(t):copy_(t) end,
      ["masked_fill_"] = function(t) return t:clone():masked_fill_(t:gt(0), 0) end,
    ["relu_"] = function(t) return t:clone():relu_() end, ["fill_"] = function(t) return t:clone():fill_(2) end,
    ["constant_"] = function(t) return nn.init.constant_(t:clone(), 5) end,
    ["t[i] = v"] = function(t) t = t:clone(); t[1] = 4; return t end,
  }
  for name, fn in ms.sorted_pairs(functions) do
    it("runs on its inner tensors: " .. name, function() same(fn, pair()) end)
  end

  it("returns itself if there is nothing to do, and after changes in place", function()
    local t = TwoTensor(pair())
    assert.is_true(rawequal(t, t:to "float32"))
    assert.is_true(rawequal(t, t:contiguous()))
    assert.is_true(rawequal(t, t:add_(1)))
    assert.is_true(rawequal(t, t:copy_(t)))
    local a = t.a
    t:mul_(2)
    assert.is_true(rawequal(a, t.a))
  end)

  it("compares all inner tensors and reads the first", function()
    local a, b = pair()
    local t, u = TwoTensor(a, b), TwoTensor(a:clone(), b:clone())
    assert.is_true(t:equal(u) and t:allclose(u))
    u.b[1][1] = 100
    assert.is_false(t:equal(u))
    assert.is_false(t:allclose(u))
    assert.matches("inner tensor 2", failure(ms.testing.assert_close, t, u))
    assert.matches("got a TwoTensor, expected a Tensor", failure(ms.testing.assert_close, t, a))
    assert.are.equal(1, TwoTensor(ms.tensor(1), ms.tensor(2)):item())
    assert.are.same({ 1 }, TwoTensor(ms.ones(1), ms.zeros(1)):tolist())
  end)

  it("names instances that do not match", function()
    local Three = ms.Tensor:extend "Three"
    function Three:init(...) self.list = { ... } end
    function Three:inner_tensors() return { unpack(self.list) } end
    local a, b = pair()
    local t = TwoTensor(a, b)
    assert.are.equal("add: TwoTensor has 2 inner tensors, but Three has 3; their numbers must be equal",
      failure(function() return t + Three(a, a, a) end))
    assert.are.equal("add_: a plain tensor cannot be changed in place by a TwoTensor", failure(a.add_, a, t))
    assert.matches("^add: shapes %[3, 4%] and %[5%]", failure(function() return t + ms.ones(5) end))
    assert.matches("pass its inner tensors", failure(ms.checkpoint, function(x) return x end, t))
    assert.matches("save its inner tensors", failure(ms.save, "/nowhere/x", { t = t }))
    local hooked = nn.Identity()
    hooked:register_full_backward_hook(function() end)
    assert.matches("full backward hook sees plain tensors only; value 1 is a TwoTensor", failure(hooked, t))
    local Empty = ms.Tensor:extend "Empty"
    assert.matches("Empty: a tensor class must define init", failure(Empty))
    function Empty.init() end
    assert.matches("Empty: a tensor class must define inner_tensors", failure(Empty))
    function Empty.inner_tensors() return {} end
    assert.matches("expected a list of at least one tensor", failure(Empty))
    assert.matches("expected a class name", failure(ms.Tensor.extend, ms.Tensor))
    assert.matches("extend ms.Tensor", failure(nn.Parameter.extend, nn.Parameter, "X"))
  end)

  it("keeps and releases its inner tensors with scopes", function()
    local t, kept, inside
    t = ms.scope(function()
      inside = TwoTensor(pair())
      kept = (inside * 3):keep()
      return { deep = inside * 2 }
    end)
    assert.is_true(inside:is_released() and inside.b:is_released())
    assert.is_false(t.deep.b:is_released())
    assert.is_false(kept.b:is_released())
    assert.matches("released", tostring(inside))
    assert.matches("tensor was released", failure(function() return inside + 1 end))
    kept:release()
    assert.is_true(kept.a:is_released() and kept.b:is_released())
    local m = nn.Identity()
    ms.scope(function() m.extra = TwoTensor(pair()) end)
    assert.is_false(m.extra.b:is_released())
  end)

  it("extends classes further, and may make its results itself", function()
    local Tagged = TwoTensor:extend "Tagged"
    function Tagged:init(a, b, tag)
      TwoTensor.init(self, a, b)
      self.tag = tag
    end
    function Tagged.from_inner(list, like) return Tagged(list[1], list[2], like.tag) end
    local t = Tagged(ms.ones(2), ms.zeros(2), "x")
    assert.is_true(t:isa(TwoTensor) and t:isa(Tagged))
    local u = (t + 1):view(2, 1)
    assert.are.equal("x", u.tag)
    assert.are.equal("Tagged", u:class_name())
    assert.are.same({ { 1 }, { 1 } }, u.b:tolist())
  end)

  it("nests", function()
    local t = TwoTensor(TwoTensor(ms.ones(2), ms.zeros(2)), TwoTensor(ms.full({ 2 }, 5), ms.full({ 2 }, 6)))
    local u = t * 2
    assert.are.same({ 12, 12 }, u.b.b:tolist())
    assert.is_false(u:equal(t))
    assert.is_true(u:equal(t + t))
  end)
end)

describe("a class with dispatch", function()
  -- A tensor stored as bfloat16 that computes in float32: results are plain tensors.
  local Packed, seen = nil, {}
  before_each(function()
    seen = {}
    Packed = ms.Tensor:extend "Packed"
    function Packed:init(t) self.data = t:bfloat16() end
    function Packed:inner_tensors() return { self.data } end
    function Packed.dispatch(op, ...)
      seen[#seen + 1] = op.name
      local list = { ... }
      if op.name == "mul_" then
        op(list[1].data)
        return list[1]
      end
      for k = 1, select("#", ...) do
        if ms.is_tensor(list[k]) and list[k]:isa(Packed) then list[k] = list[k].data:float() end
      end
      return op(unpack(list, 1, select("#", ...)))
    end
  end)

  it("runs operations itself, under the names that scripts use", function()
    local p = Packed(ms.tensor { 1, 2, 3 })
    assert.are.equal("bfloat16", p.dtype)
    local out = p + 1
    assert.are.equal("float32", out.dtype)
    assert.is_false(out:isa(Packed))
    assert.are.same({ 2, 3, 4 }, out:tolist())
    assert.are.same({ 2, 4, 6 }, (ms.tensor { 1, 2, 3 } + p):tolist())
    assert.are.equal(6, p:sum():item())
    local values, places = p:max(1)
    assert.are.same({ 3, 2 }, { values:item(), places:item() })
    assert.are.same({ 14 }, nn.F.linear(ms.tensor { 1, 2, 3 }, p:unsqueeze(1)):tolist())
    assert.is_true(rawequal(p, p:mul_(2)))
    assert.are.same({ 2, 4, 6 }, p.data:tolist())
    assert.are.equal("add add sum max unsqueeze mul_", table.concat(seen, " "))
  end)

  it("raises if it returns something else", function()
    Packed.dispatch = function() return 1 end
    assert.matches("dispatch of add returned a number", failure(function() return Packed(ms.ones(1)) + 1 end))
  end)

  it("may run the operation on the inner tensors", function()
    local Counted, n = TwoTensor:extend "Counted", 0
    function Counted.dispatch(op, ...)
      n = n + 1
      return op(...)
    end
    local t = Counted(ms.ones(2), ms.zeros(2)) + 1
    assert.is_true(t:isa(Counted))
    assert.are.same({ 1, 1 }, t.b:tolist())
    assert.are.equal(1, n)
  end)
end)

describe("gradients of tensor classes", function()
  it("are instances of the inner gradients, one object until they change", function()
    local t = TwoTensor(ms.tensor { 1, 2 }, ms.tensor { 3, 4 }):requires_grad_()
    assert.is_true(t.requires_grad and t.a.requires_grad and t.b.requires_grad)
    assert.is_nil(t.grad);
    (t * t):sum():backward()
    assert.is_true(t.grad:isa(TwoTensor))
    assert.are.same({ 2, 4 }, t.grad.a:tolist())
    assert.are.same({ 6, 8 }, t.grad.b:tolist())
    assert.is_true(rawequal(t.grad, t.grad))
    t.grad = nil
    assert.is_nil(t.a.grad)
    t.grad = TwoTensor(ms.ones(2), ms.zeros(2))
    assert.are.same({ 1, 1 }, t.a.grad:tolist())
    assert.matches("the gradient of a TwoTensor must be an instance of a tensor class with 2 inner tensors, got a Tensor",
      failure(function() t.grad = ms.ones(2) end))
  end)

  it("pass plain parts that both share, once", function()
    local x = ms.tensor({ 1, 2 }, { requires_grad = true })
    local h = x * 3
    local loss = (h * TwoTensor(ms.ones(2), ms.full({ 2 }, 10))):sum()
    loss:backward()
    assert.are.same({ 33, 33 }, x.grad:tolist())
  end)

  it("come from ms.grad too", function()
    local t = TwoTensor(ms.tensor { 1, 2 }, ms.tensor { 3, 4 }):requires_grad_()
    local x = ms.tensor({ 1, 1 }, { requires_grad = true })
    local grads = ms.grad((t * x):sum(), { t, x })
    assert.are.same({ 1, 1 }, grads[1].b:tolist())
    assert.are.same({ 4, 6 }, grads[2]:tolist())
    assert.is_nil(t.grad)
  end)

  it("run hooks", function()
    local t, n, seen = TwoTensor(ms.ones(2), ms.ones(2)):requires_grad_(), 0, nil
    t:register_hook(function(g) return g * 10 end)
    local handle = t:register_post_accumulate_grad_hook(function(p) n, seen = n + 1, p end)
    t:sum():backward()
    assert.are.equal(1, n)
    assert.is_true(rawequal(seen, t))
    assert.are.same({ 10, 10 }, t.grad.b:tolist())
    handle:remove()
    t:sum():backward()
    assert.are.equal(1, n)
  end)

  it("run a hook after all inner tensors have gradients, though an earlier backward did not reach all", function()
    local t, n = TwoTensor(ms.ones(2), ms.ones(2)):requires_grad_(), 0
    t:register_post_accumulate_grad_hook(function() n = n + 1 end)
    t.a:sum():backward()
    assert.are.equal(0, n)
    for k = 1, 2 do
      t:sum():backward()
      assert.are.equal(k, n)
    end
  end)
end)

-- ---- modules and optimizers -----------------------------------------------------------------------

local function mlp()
  ms.manual_seed(11)
  return nn.Sequential(nn.Linear(8, 32, { bias = false }), nn.ReLU(), nn.Linear(32, 8, { bias = false }))
end

local function with_two(model)
  for _, m in ipairs(model:modules()) do
    if m:isa(nn.Linear) then m.weight = nn.Parameter(TwoTensor(m.weight, m.weight:detach():clone())) end
  end
  return model
end

describe("parameters of tensor classes", function()
  it("are parameters and instances, their inner tensors the leaves", function()
    local w = nn.Parameter(TwoTensor(ms.ones(2, 2), ms.zeros(2, 2)))
    assert.is_true(w:isa(nn.Parameter) and w:isa(TwoTensor))
    assert.are.equal("TwoTensor", w:class_name())
    assert.is_true(w.requires_grad and w.is_leaf and w.a:isa(nn.Parameter))
    assert.is_false((w * 2):isa(nn.Parameter))
    assert.is_false(nn.Parameter(TwoTensor(ms.ones(1), ms.ones(1)), { requires_grad = false }).requires_grad)
    local m = nn.Linear(2, 2)
    m.weight = w
    assert.is_true(rawequal(w, m:parameters()[1]))
    local copy = ms.deepcopy(m)
    assert.is_true(copy.weight:isa(TwoTensor) and copy.weight:isa(nn.Parameter) and copy.weight.is_leaf)
    assert.is_false(rawequal(copy.weight.a, w.a))
    assert.is_true(copy.weight:equal(w))
  end)

  it("move with their modules, from meta too", function()
    local model = ms.with_device("meta", function() return with_two(mlp()) end)
    assert.are.equal("meta", model[1].weight.device)
    local w = model[1].weight
    model:to_empty "cpu"
    assert.is_true(rawequal(w, model[1].weight))
    for _, p in ipairs(model:parameters()) do nn.init.trunc_normal_(p) end
    assert.are.equal("cpu", w.b.device)
    assert.is_false(w.a:equal(w.b))
    model:to "float64"
    assert.are.equal("float64", w.b.dtype)
    assert.are.equal("[2, 8]", tostring(model(ms.randn(2, 8, { dtype = "float64" })).b.shape))
    local sd = model:state_dict()
    assert.is_true(sd["1.weight"]:isa(TwoTensor))
    local other = with_two(mlp()):double()
    other:load_state_dict(sd)
    assert.is_true(other[1].weight:equal(w))
  end)

  local makers = {
    { "Adam", function(p) return optim.Adam(p, { lr = 1e-2 }) end },
    { "AdamW with amsgrad", function(p) return optim.AdamW(p, { lr = 1e-2, amsgrad = true }) end },
    { "SGD with momentum", function(p) return optim.SGD(p, { lr = 1e-2, momentum = 0.9 }) end },
  }
  for _, row in ipairs(makers) do
    it("train as plain ones: " .. row[1], function()
      local plain = mlp()
      local two = with_two(ms.deepcopy(plain))
      local optimizers = { row[2](plain:parameters()), row[2](two:parameters()) }
      ms.manual_seed(43)
      local x, target = ms.randn(4, 8), ms.randn(4, 8)
      for step = 1, 10 do
        local losses = {}
        for k, model in ipairs { plain, two } do
          losses[k] = nn.F.mse_loss(model(x), target)
          losses[k]:backward()
        end
        assert.are.equal(losses[1]:item(), losses[2].a:item())
        assert.are.equal(losses[1]:item(), losses[2].b:item())
        for i = 1, 3, 2 do
          ms.testing.assert_close(two[i].weight.grad.b, plain[i].weight.grad)
        end
        local norm, norms = nn.utils.clip_grad_norm_(plain:parameters(), math.huge),
          nn.utils.clip_grad_norm_(two:parameters(), math.huge)
        ms.testing.assert_close(norms, norm * math.sqrt(2))
        for _, optimizer in ipairs(optimizers) do
          assert.is_true(optimizer:step())
          optimizer:zero_grad { set_to_none = step % 2 == 0 }
        end
        for i = 1, 3, 2 do
          assert.is_true(two[i].weight.a:equal(plain[i].weight))
          assert.is_true(two[i].weight.b:equal(plain[i].weight))
        end
      end
      -- The state is an instance; another optimizer continues from it.
      local state = optimizers[2]:state_dict()
      local name = row[1]:match "^SGD" and "momentum_buffer" or "exp_avg"
      assert.is_true(state.state[2][name]:isa(TwoTensor))
      assert.are.equal(10, state.state[1].step)
      local again = row[2](two:parameters())
      again:load_state_dict(state)
      assert.is_true(again:state_of(two[3].weight)[name]:equal(state.state[2][name]))
    end)
  end

  it("count in the norm of gradients", function()
    local w = nn.Parameter(TwoTensor(ms.zeros(1), ms.zeros(1)))
    w.grad = TwoTensor(ms.tensor { 3 }, ms.tensor { 4 })
    assert.are.equal(5, nn.utils.clip_grad_norm_({ w }, 1):item())
    ms.testing.assert_close(w.grad.b, ms.tensor { 0.8 }, { rtol = 1e-5 })
  end)
end)

describe("collectives", function()
  it("run on the inner tensors of instances", function()
    local t = TwoTensor(ms.ones(2), ms.zeros(2))
    local _, entries = nil, dist.record(function()
      dist.all_reduce(t)
      dist.all_reduce(t, { async = true }):wait()
      dist.broadcast(t, { src = 0 })
      dist.all_gather(ms.zeros_like(t), t)
    end)
    assert.are.equal(8, #entries)
    assert.matches("a Tensor and a TwoTensor do not match", failure(dist.all_gather, ms.zeros(2), t))
    assert.matches("a TwoTensor and a Tensor do not match", failure(dist.all_gather, ms.zeros_like(t), t.a))
  end)
end)
