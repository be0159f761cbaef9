-- SPDX-License-Identifier: MIT
--- Wrapping policies, manual wrapping, ignored modules and states (docs/semantics.md#ignored, #wrapping).
local ms = require "moonshard"
local nn, fsdp = ms.nn, ms.fsdp
local wrap = fsdp.wrap
local quietly = require "spec.support.wrapped".quietly
local raises = require "spec.support.raises"

local function FSDP(...) return quietly(fsdp.FSDP, ...) end

-- Names of the wrapped modules, "" the root.
local function wrapped_names(m)
  local names = {}
  for name, sub in m:named_modules() do
    if sub:isa(fsdp.FSDP) then names[#names + 1] = name end
  end
  return table.concat(names, " ")
end

local function five() return nn.Linear(5, 5) end

local function nested()
  return nn.Sequential(five(), five(), nn.Sequential(five(), five()))
end

describe("size_based_auto_wrap_policy", function()
  it("wraps modules with enough unwrapped elements, innermost first", function()
    local m = FSDP(nested(), { auto_wrap_policy = wrap.size_based_auto_wrap_policy { min_num_params = 40 } })
    assert.equal(" 3", wrapped_names(m))
    local all = FSDP(nested(), { auto_wrap_policy = wrap.size_based_auto_wrap_policy { min_num_params = 30 } })
    assert.equal(" 1 2 3.1 3.2", wrapped_names(all))
  end)

  it("does not wrap lists, but their elements", function()
    local Net = nn.Module:extend "Net"
    function Net:init() self.list = nn.ModuleList { five(), nn.Sequential(five(), five()) } end
    function Net:forward(x) return self.list[2](self.list[1](x)) end
    local m = FSDP(Net(), { auto_wrap_policy = wrap.size_based_auto_wrap_policy { min_num_params = 40 } })
    assert.equal(" list.2", wrapped_names(m))
    local listed = FSDP(Net(), { auto_wrap_policy = wrap.size_based_auto_wrap_policy { min_num_params = 40,
      exclude_wrap_modules = {} } })
    assert.equal(" list.2", wrapped_names(listed))        -- the rest of the list has 30 elements
    local lower = FSDP(Net(), { auto_wrap_policy = wrap.size_based_auto_wrap_policy { min_num_params = 31,
      exclude_wrap_modules = {} } })
    assert.equal(" list.2", wrapped_names(lower))
  end)

  it("does not go into multi-head attention", function()
    local m = FSDP(nn.Sequential(five(), nn.MultiheadAttention(4, 2)),
      { auto_wrap_policy = wrap.size_based_auto_wrap_policy { min_num_params = 1 } })
    assert.equal(" 1", wrapped_names(m))
    local free = FSDP(nn.Sequential(five(), nn.MultiheadAttention(4, 2)),
      { auto_wrap_policy = wrap.size_based_auto_wrap_policy { min_num_params = 1, force_leaf_modules = {} } })
    assert.truthy(wrapped_names(free):find("2", 1, true))
  end)

  it("counts without ignored modules", function()
    local model = nested()
    local m = FSDP(model, { auto_wrap_policy = wrap.size_based_auto_wrap_policy { min_num_params = 40 },
      ignored_modules = { model[3][1] } })
    assert.equal("", wrapped_names(m))
  end)
end)

describe("policies by class and by function", function()
  it("module_wrap_policy wraps instances of the classes, with the root's options", function()
    local m = FSDP(nested(), { auto_wrap_policy = wrap.module_wrap_policy { nn.Sequential }, backward_prefetch = "post",
      forward_prefetch = true })
    assert.equal(" 3", wrapped_names(m))
    assert.equal("post", rawget(m.module[3], "_fsdp").options.backward_prefetch)
    assert.is_true(rawget(m.module[3], "_fsdp").options.forward_prefetch)
  end)

  it("always_wrap_policy wraps every submodule", function()
    assert.equal(" 1 2 3 3.1 3.2", wrapped_names(FSDP(nested(), { auto_wrap_policy = wrap.always_wrap_policy })))
  end)

  it("transformer_auto_wrap_policy and lambda_auto_wrap_policy wrap the modules that they select", function()
    assert.equal(" 1 2 3.1 3.2", wrapped_names(FSDP(nested(),
      { auto_wrap_policy = wrap.transformer_auto_wrap_policy { nn.Linear } })))
    local lambda = wrap.lambda_auto_wrap_policy(function(m) return m:isa(nn.Sequential) end)
    assert.equal(" 3", wrapped_names(FSDP(nested(), { auto_wrap_policy = lambda })))
  end)

  it("or_policy wraps modules that any of its policies wraps", function()
    local policy = wrap.or_policy { wrap.module_wrap_policy { nn.Sequential },
      wrap.lambda_auto_wrap_policy(function(m) return m:isa(nn.Linear) end) }
    assert.equal(" 1 2 3 3.1 3.2", wrapped_names(FSDP(nested(), { auto_wrap_policy = policy })))
  end)

  it("custom_policy sets separate options for a module", function()
    local model = nested()
    local m = FSDP(model, { use_orig_params = true, auto_wrap_policy = wrap.custom_policy(function(sub)
      if sub == model[1] then return { backward_prefetch = "none" } end
      if sub == model[2] then return {} end
      return sub == model[3]
    end) })
    assert.equal(" 1 3", wrapped_names(m))
    assert.equal("none", rawget(model[1], "_fsdp").options.backward_prefetch)
    assert.equal("pre", rawget(model[3], "_fsdp").options.backward_prefetch)
  end)

  it("custom_policy refuses other answers", function()
    raises("The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned 3", FSDP,
      nested(),
      { auto_wrap_policy = wrap.custom_policy(function() return 3 end) })
  end)

  it("wraps a shared module once", function()
    for _, policy in ipairs { wrap.module_wrap_policy { nn.Linear },
      wrap.transformer_auto_wrap_policy { nn.Linear } } do
      local shared = five()
      local m = FSDP(nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)), { auto_wrap_policy = policy })
      assert.equal(2, #fsdp.fsdp_modules(m))
      assert.equal(m.module[1], m.module[3][1])
      assert.same({ 2, 5 }, { unpack(m(ms.ones(2, 5)).shape) })
    end
  end)

  it("refuses modules that are wrapped already", function()
    local model = nested()
    model[2] = FSDP(model[2])
    raises("FSDP auto wrapping requires modules to not already have FSDP applied but found 2 in\n" .. tostring(model),
      FSDP, model,
      { auto_wrap_policy = wrap.always_wrap_policy })
  end)

  it("wraps batch norms by themselves in full precision", function()
    for _, policy in ipairs { wrap.module_wrap_policy { nn.Linear }, function() return false end } do
      local model = nn.Sequential(five(), nn.BatchNorm1d(5), nn.Sequential(nn.BatchNorm1d(5)))
      local warnings, m = ms.catch_warnings(fsdp.FSDP, model,
        { auto_wrap_policy = policy, mixed_precision = fsdp.MixedPrecision { param_dtype = "float16" } })
      local said
      for _, text in ipairs(warnings) do
        said = said or text:find("batch norm submodules will be wrapped as separate", 1, true)
      end
      assert.truthy(said)
      local names = wrapped_names(m)
      assert.truthy(names:find(" 2", 1, true) and names:find("3.1", 1, true), names)
      assert.is_nil(rawget(model[2], "_fsdp").mixed_precision)
      assert.equal("float16", rawget(m, "_fsdp").mixed_precision.param_dtype)
    end
  end)
end)

describe("frozen parameters", function()
  local function lora()
    local model = nn.Sequential(nn.Sequential(five(), five()), five())
    for _, p in ipairs(model[1][1]:parameters()) do p.requires_grad = false end
    return model
  end

  it("together with trainable ones are an error in a flat parameter", function()
    raises("1 has both parameters with requires_grad=True and False. FSDP does not support wrapping such modules.\n"
      .. "The following parameters have requires_grad=True:\n['1.2.weight', '1.2.bias']\n"
      .. "The following parameters have requires_grad=False:\n['1.1.weight', '1.1.bias']", FSDP, lora(),
      { auto_wrap_policy = wrap.module_wrap_policy { nn.Sequential } })
  end)

  it("together with trainable ones give a warning with use_orig_params", function()
    local warnings = ms.catch_warnings(fsdp.FSDP, lora(),
      { use_orig_params = true, auto_wrap_policy = wrap.module_wrap_policy { nn.Sequential } })
    local said
    for _, text in ipairs(warnings) do
      said = said or text:find(
        "FSDP does not recommend wrapping such modules since the gradient memory usage will be higher than expected", 1,
        true)
    end
    assert.truthy(said)
  end)

  it("wrapped or ignored by themselves are fine", function()
    assert.equal(" 1 1.1 1.2 2", wrapped_names(FSDP(lora(), { auto_wrap_policy = wrap.always_wrap_policy })))
    local model = lora()
    assert.equal(" 1", wrapped_names(FSDP(model, { auto_wrap_policy = wrap.module_wrap_policy { nn.Sequential },
      ignored_states = model[1][1]:parameters() })))
  end)
end)

describe("enable_wrap", function()
  it("gives wrap its options; wrap's own options override them; outside, wrap does nothing", function()
    local layer = five()
    assert.equal(layer, wrap.wrap(layer))
    local a, b = quietly(wrap.enable_wrap, { backward_prefetch = "post" }, function()
      return wrap.wrap(five()), wrap.wrap(five(), { backward_prefetch = "none" })
    end)
    assert.is_true(a:isa(fsdp.FSDP))
    assert.equal("post", rawget(a, "_fsdp").options.backward_prefetch)
    assert.equal("none", rawget(b, "_fsdp").options.backward_prefetch)
    assert.equal(layer, wrap.wrap(layer))
  end)

  it("does not nest, and is left by an error", function()
    raises("You are already within an autowrap context and we currently do not supported nested autowrap.",
      wrap.enable_wrap, {}, function()
      wrap.enable_wrap({}, function() end)
    end)
    assert.has_error(function() wrap.enable_wrap({}, function() error("mine", 0) end) end, "mine")
    local layer = five()
    assert.equal(layer, wrap.wrap(layer))
  end)
end)

describe("ignored modules and states", function()
  local function managed_numel(m)
    local n = 0
    for _, sub in ipairs(fsdp.fsdp_modules(m)) do
      for _, p in ipairs(sub.params) do n = n + p:numel() end
    end
    return n
  end

  it("are left out, as modules, as parameters, with and without a policy", function()
    for _, policy in ipairs { false, wrap.module_wrap_policy { nn.Linear },
      wrap.size_based_auto_wrap_policy { min_num_params = 1 } } do
      for _, how in ipairs { "modules", "states as modules", "states as parameters" } do
        local model = nested()
        local options = { auto_wrap_policy = policy or nil }
        if how == "modules" then options.ignored_modules = { model[3] } end
        if how == "states as modules" then options.ignored_states = { model[3] } end
        if how == "states as parameters" then options.ignored_states = model[3]:parameters() end
        local m = FSDP(model, options)
        assert.equal(60, managed_numel(m))
        local optim = ms.optim.Adam(m:parameters(), { lr = 0.01 })
        for _ = 1, 3 do
          m(ms.ones(2, 5)):sum():backward()
          optim:step()
          optim:zero_grad()
        end
      end
    end
  end)

  it("keep an FSDP instance inside an ignored module", function()
    local model = nested()
    model[3][1] = FSDP(model[3][1])
    local m = FSDP(model, { ignored_modules = { model[3] } })
    assert.equal(60 + 30, managed_numel(m))
    assert.equal(" 3.1", wrapped_names(m))
  end)

  it("have messages for wrong use", function()
    local model = nested()
    raises("Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states.",
      FSDP, model,
      { ignored_modules = { model[1] }, ignored_states = { model[1] } })
    raises("ignored_states expects all nn.Parameter or all nn.Module list elements but got types [Linear, Parameter]",
      FSDP, model,
      { ignored_states = { model[1], model[2].weight } })
    raises("ignored_modules expects nn.Module list elements but got types [Parameter]", FSDP, model,
      { ignored_modules = { model[1].weight } })
    raises("`ignored_modules` should be an iterable of `nn.Module`s but got 3", FSDP, model, { ignored_modules = 3 })
    local inner = FSDP(five())
    raises("`ignored_modules` should not include FSDP modules", FSDP, nn.Sequential(inner),
      { ignored_modules = { inner } })
    local text
    for _, w in ipairs((ms.catch_warnings(fsdp.FSDP, model, { ignored_modules = { model } }))) do
      if w:find("^Trying to ignore the top%-level module passed into the FSDP constructor itself will result in all parameters being ignored") then
        text = w
      end
    end
    assert.truthy(text)
  end)
end)
