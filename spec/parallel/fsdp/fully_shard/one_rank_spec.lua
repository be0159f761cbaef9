-- SPDX-License-Identifier: MIT
--- fully_shard's arguments, classes, messages (docs/semantics.md#fully-shard) and sharded tensors, on one rank.
local ms = require "moonshard"
local nn, fsdp = ms.nn, ms.fsdp

local failure = require "spec.support.message"

describe("fully_shard", function()
  it("gives the module a class that is its own and FSDPModule, and returns it", function()
    local m = nn.Linear(3, 2)
    assert.equal(m, fsdp.fully_shard(m))
    assert.equal("FSDPLinear", m:class_name())
    assert.is_true(m:isa(nn.Linear))
    assert.is_true(m:isa(fsdp.FSDPModule))
    assert.is_true(m.weight:isa(nn.Parameter))
    assert.matches("^FSDPLinear%(3 %-> 2, bias%)", tostring(m))
    assert.is_false(nn.Linear(3, 2):isa(fsdp.FSDPModule))
  end)

  it("calls a class's own forward and hooks", function()
    local m = fsdp.fully_shard(nn.Linear(3, 2))
    local seen = 0
    m:register_forward_hook(function() seen = seen + 1 end)
    local out = m(ms.ones(1, 3))
    assert.equal(1, seen)
    assert.same({ 1, 2 }, { unpack(out.shape) })
  end)

  it("passes tensors inside tables, other values and nils through", function()
    local Net = nn.Module:extend "Net"
    function Net:init() self.w = nn.Parameter(ms.ones(2)) end
    function Net:forward(t, text, nothing, deep)
      assert.is_nil(nothing)
      return { sum = (t.x * self.w):sum(), list = { deep.a.b * 2 } }, nil, text
    end
    local m = fsdp.fully_shard(Net())
    local x = ms.ones(2, { requires_grad = true })
    local y = ms.ones(1)
    local out, none, text = m({ x = x }, "text", nil, { a = { b = y } })
    assert.is_nil(none)
    assert.equal("text", text)
    assert.same({ 2 }, out.list[1]:tolist())
    out.sum:backward()
    assert.same({ 1, 1 }, x.grad:tolist())
    assert.same({ 1, 1 }, m.w.grad:to_local():tolist())
  end)

  it("refuses containers without forward, a second call, and arguments that are no module", function()
    assert.equal("fully_shard does not support containers that do not implement forward: "
      .. tostring(nn.ModuleList { nn.Linear(2, 2) }),
      failure(fsdp.fully_shard, nn.ModuleList { nn.Linear(2, 2) }))
    local m = fsdp.fully_shard(nn.Linear(2, 2))
    assert.equal("Each distinct composable distributed API can only be applied to a module once.",
      failure(fsdp.fully_shard, m))
    assert.matches("expected a module or a list of modules", failure(fsdp.fully_shard, 3))
    assert.matches("unknown option 'reshard'.*reshard_after_forward", failure(fsdp.fully_shard, nn.Linear(2, 2),
      { reshard = true }))
  end)

  it("refuses scalar and non-contiguous parameters", function()
    local m = nn.Linear(2, 2)
    m.scale = nn.Parameter(ms.tensor(1))
    assert.equal("fully_shard doesn't support scalar parameters. Change scale to a 1D tensor with numel equal to 1.",
      failure(fsdp.fully_shard, m))
    local n = nn.Linear(2, 2)
    n.turned = nn.Parameter(ms.ones(2, 3):t())
    assert.matches("^FSDP does not support non%-contiguous parameters yet: ", failure(fsdp.fully_shard, n))
    assert.equal("Linear", n:class_name())      -- nothing was changed
    n(ms.ones(1, 2))
  end)

  it("names valid values of reshard_after_forward", function()
    assert.equal("If passing reshard_after_forward as an int, it should be a factor of 1, not 3",
      failure(fsdp.fully_shard, nn.Linear(2, 2), { reshard_after_forward = 3 }))
    assert.equal("reshard_after_forward should be a bool or an int representing the group size to reshard to, not 'yes'",
      failure(fsdp.fully_shard, nn.Linear(2, 2), { reshard_after_forward = "yes" }))
    local m = fsdp.fully_shard(nn.Linear(2, 2))
    assert.equal("reshard_after_forward should be a bool, got number", failure(m.set_reshard_after_forward, m, 1))
  end)

  it("checks meshes, placements and prefetch lists", function()
    assert.equal("fully_shard expects a 1D or 2D DeviceMesh but got 3", failure(fsdp.fully_shard, nn.Linear(2, 2),
      { mesh = 3 }))
    assert.matches("^Shard dim 3 is invalid for 2D tensor: %[2, 2%]",
      failure(fsdp.fully_shard, nn.Linear(2, 2, { bias = false }),
        { shard_placement_fn = function() return fsdp.Shard(3) end }))
    fsdp.fully_shard(nn.Linear(2, 2), { shard_placement_fn = function(_, p) return fsdp.Shard(-p.ndim) end })
    local m = fsdp.fully_shard(nn.Linear(2, 2))
    assert.matches("^Expects FSDPModule but got Linear: Linear%(2 %-> 2", failure(m.set_modules_to_forward_prefetch, m,
      { nn.Linear(2, 2) }))
  end)

  it("keeps ignored parameters and those of nested units out", function()
    local m = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    m.extra = nn.Parameter(ms.ones(4))
    fsdp.fully_shard(m[1])
    fsdp.fully_shard(m, { ignored_params = { m.extra } })
    assert.is_nil(m.extra.placements)
    assert.equal("Shard(1)", tostring(m[1].weight.placements[1]))
    ms.testing.assert_close(m.extra * 1, ms.ones(4))
  end)

  it("refuses a parameter that another unit manages", function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    m[2].weight = m[1].weight
    fsdp.fully_shard(m[1])
    assert.equal("Parameter '2.weight' is shared with a parameter already managed by another FSDP group. For shared/tied parameters, "
      .. "use fully_shard([module_a, module_b]) to place them in the same FSDP group.", failure(fsdp.fully_shard, m))
  end)

  it("refuses a deep copy", function()
    local m = fsdp.fully_shard(nn.Linear(2, 2))
    assert.equal("FSDP does not support deepcopy. Please use state dict for serialization.", failure(ms.deepcopy, m))
    assert.equal("FSDP does not support deepcopy. Please use state dict for serialization.",
      failure(ms.deepcopy, nn.Sequential(m)))
  end)

  it("requires the root's forward first", function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fsdp.fully_shard(m[1])
    fsdp.fully_shard(m)
    m[1](ms.ones(1, 2))
    assert.equal("FSDP state has already been lazily initialized for 1\nFSDP requires running forward through the root module first",
      failure(m, ms.ones(1, 2)))
  end)

  it("requires one module as its root", function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, { bias = false }))
    fsdp.fully_shard { m[1], m[2] }
    for _ = 1, 2 do
      assert.equal("FSDP requires a single root module but got (FSDPLinear(2 -> 2, bias), FSDPLinear(2 -> 2))",
        failure(m, ms.ones(1, 2)))
    end
    fsdp.fully_shard(m)
    m(ms.ones(1, 2)):sum():backward()
  end)

  it("names parameters still on meta, and the function to call", function()
    local m = ms.with_device("meta", function() return nn.Sequential(nn.Linear(2, 2),
      nn.Linear(2, 2, { bias = false })) end)
    fsdp.fully_shard(m[1])
    fsdp.fully_shard(m)
    m[2]:to_empty "cpu"
    assert.equal("FSDP parameters should be materialized from meta device before training, but the following were still on meta device: "
      .. "['1.weight', '1.bias']\nFor example, call module.to_empty(device) to materialize to device and call module.reset_parameters() on each "
      .. "module to initialize values.", failure(m, ms.ones(1, 2)))
  end)

  it("names the parameters on meta of the first unit only, and no name in part", function()
    local m = ms.with_device("meta", function()
      local layers = {}
      for k = 1, 60 do layers[k] = nn.Sequential(nn.Linear(1, 1)) end
      return nn.Sequential(nn.Identity(), nn.Sequential(unpack(layers)), nn.Linear(1, 1))
    end)
    fsdp.fully_shard(m[2])
    fsdp.fully_shard(m[3])
    fsdp.fully_shard(m)
    local text, names = failure(m, ms.ones(1, 1)):match "on meta device: (%[(.-)%])\n"
    local listed, more = {}, names:match " and (%d+) more$"
    for name in names:gmatch "'([^']+)'" do
      listed[#listed + 1] = name
      assert.matches("^2%.%d+%.1%.%a+$", name)
    end
    assert.equal(("['%s' and %s more]"):format(table.concat(listed, "', '"), more), text)
    assert.equal(120, #listed + tonumber(more))
    m[2]:to_empty "cpu"
    assert.matches("%['3%.weight', '3%.bias'%]", failure(m, ms.ones(1, 1)))
  end)

  it("runs registered methods as forward", function()
    local Net = nn.Module:extend "Net"
    function Net:init() self.lin = nn.Linear(2, 2) end
    function Net:forward(x) return self.lin(x) end
    function Net:twice(x) return self.lin(self.lin(x)) end
    local m = Net()
    fsdp.register_fsdp_forward_method(m, "twice")                        -- not an FSDPModule: no effect
    assert.has_error(function() fsdp.fully_shard(m); fsdp.register_fsdp_forward_method(m, "thrice") end)
    local sharded_error = failure(m.twice, m, ms.ones(1, 2))
    assert.matches("is sharded; use to_local%(%)", sharded_error)
    fsdp.register_fsdp_forward_method(m, "twice")
    m:twice(ms.ones(1, 2)):sum():backward()
    assert.is_truthy(m.lin.weight.grad)
  end)
end)

describe("a sharded parameter", function()
  local m
  before_each(function()
    ms.manual_seed(4)
    m = fsdp.fully_shard(nn.Linear(3, 2))
  end)

  it("refuses operators by name and suggests an alternative", function()
    for _, fn in ipairs { function() return m.weight + 1 end, function() return m.weight:sum() end,
      function() return ms.ones(2, 3) * m.weight end,
      function() return m.weight:tolist() end, function() return m.weight:t() end } do
      local message = failure(fn)
      assert.matches("weight' is sharded", message)
      assert.matches("to_local%(%)", message)
      assert.matches("full_tensor%(%)", message)
    end
  end)

  it("has a grad that is sharded like it, assignable and clearable", function()
    m(ms.ones(1, 3)):sum():backward()
    local g = m.weight.grad
    assert.same({ 2, 3 }, { unpack(g.shape) })
    assert.matches("sharded", failure(function() return g + 1 end))
    assert.same({ { 1, 1, 1 }, { 1, 1, 1 } }, g:full_tensor():tolist())
    local other = g:clone()
    ms.no_grad(function() other:mul_(3) end)
    m.weight.grad = other
    assert.same({ { 3, 3, 3 }, { 3, 3, 3 } }, m.weight.grad:to_local():tolist())
    m.weight.grad = nil
    assert.is_nil(m.weight.grad)
  end)

  it("can be frozen", function()
    m.weight.requires_grad = false
    m(ms.ones(1, 3)):sum():backward()
    assert.is_nil(m.weight.grad)
    assert.is_truthy(m.bias.grad)
    m.weight:requires_grad_()
    m(ms.ones(1, 3)):sum():backward()
    assert.is_truthy(m.weight.grad)
  end)

  it("moves with its module", function()
    m:double()
    assert.equal("float64", m.weight.dtype)
    assert.equal("float64", m.weight:to_local().dtype)
    m(ms.ones(1, 3, { dtype = "float64" })):sum():backward()
    assert.equal("float64", m.weight.grad.dtype)
  end)

  it("keeps its fields and its place in listings", function()
    m.weight.mine = "x"
    assert.equal("x", m.weight.mine)
    local names = {}
    for name in m:named_parameters() do names[#names + 1] = name end
    assert.same({ "weight", "bias" }, names)
  end)
end)
