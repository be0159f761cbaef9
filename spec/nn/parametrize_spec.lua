-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn
local utils = nn.utils

local message = require "spec.support.message"
local names = require "spec.support.names"
local ranks = require "spec.support.ranks"

local Symmetric = nn.Module:extend "Symmetric"
function Symmetric.forward(_, x) return x:triu() + x:triu(1):t() end

local Double = nn.Module:extend "Double"
function Double.forward(_, x) return x * 2 end
function Double.right_inverse(_, x) return x / 2 end

describe("a parametrization", function()
  local register, is_parametrized = utils.parametrize.register_parametrization, utils.parametrize.is_parametrized

  it("computes the parameter that forward uses and scripts read", function()
    local m = nn.Linear(3, 3)
    local original = m.weight
    assert.is_false(is_parametrized(m))
    assert.are.equal(m, register(m, "weight", Symmetric()))
    assert.is_true(is_parametrized(m) and is_parametrized(m, "weight"))
    assert.is_false(is_parametrized(m, "bias"))
    assert.are.equal("ParametrizedLinear", m:class_name())
    assert.is_true(m:isa(nn.Linear))
    assert.is_true(m.weight:equal(m.weight:t()))
    local x = ms.randn(2, 3)
    assert.is_true(m(x):equal(nn.F.linear(x, m.weight, m.bias)))
    assert.are.equal(original, m.parametrizations.weight.original)
    assert.are.equal("bias parametrizations.weight.original", names(m:named_parameters()))
    m(x):sum():backward()
    assert.are.equal(0, original.grad:tril(-1):abs():sum():item())
    assert.is_true(original.grad:triu():abs():sum():item() > 0)
  end)

  it("starts from the right inverse, and can then be assigned; further ones follow", function()
    local m = nn.Linear(2, 2)
    local before = m.weight:detach():clone()
    register(m, "weight", Double())
    assert.is_true(m.weight:equal(before))
    assert.is_true(m.parametrizations.weight.original:equal(before / 2))
    m.weight = ms.full({ 2, 2 }, 6)
    assert.are.same({ { 6, 6 }, { 6, 6 } }, m.weight:tolist())
    assert.are.same({ { 3, 3 }, { 3, 3 } }, m.parametrizations.weight.original:tolist())
    register(m, "weight", Double())
    assert.are.same({ { 12, 12 }, { 12, 12 } }, m.weight:tolist())
    m.weight = ms.ones(2, 2)
    assert.are.same({ { 0.25, 0.25 }, { 0.25, 0.25 } }, m.parametrizations.weight.original:tolist())
    register(m, "bias", Symmetric.extend(Double, "Other")())
    assert.are.equal("weight bias", names(m.parametrizations:named_children()))
  end)

  it("is removed with its value, or with the original", function()
    local m = nn.Linear(2, 2)
    register(m, "weight", Double())
    local value = m.weight:detach():clone()
    utils.parametrize.remove_parametrizations(m, "weight")
    assert.are.equal("Linear", m:class_name())
    assert.are.equal("bias weight", names(m:named_parameters()))
    assert.is_true(m.weight:isa(nn.Parameter) and m.weight:equal(value))
    assert.is_nil(m.parametrizations)
    register(m, "weight", Symmetric())
    utils.parametrize.remove_parametrizations(m, "weight", { leave_parametrized = false })
    assert.is_true(m.weight:equal(value))
  end)

  it("is removed so that an optimizer goes on training the parameter", function()
    local function trains(m, optimizer)
      local before = m.weight:detach():clone()
      optimizer:zero_grad()
      m(ms.ones(1, 2)):sum():backward()
      optimizer:step()
      assert.is_true(m.weight:ne(before):all():item())
    end
    local m = nn.Linear(2, 2)
    local own = register(m, "weight", Double()).parametrizations.weight.original
    local optimizer = ms.optim.SGD(m:parameters(), { lr = 0.1 })
    utils.parametrize.remove_parametrizations(m, "weight")
    assert.is_true(rawequal(own, m.weight))
    trains(m, optimizer)

    m = utils.weight_norm(nn.Linear(2, 2))
    own = m.parametrizations.weight.original1
    optimizer = ms.optim.SGD(m:parameters(), { lr = 0.1 })
    utils.prune.custom_from_mask(m, "weight", ms.ones(2, 2))
    utils.prune.remove(m, "weight")
    assert.are.equal("Linear", m:class_name())
    assert.is_true(rawequal(own, m.weight))
    trains(m, optimizer)

    -- A value of another shape than the original's is a new parameter.
    local Row = nn.Module:extend "Row"
    function Row.forward(_, v) return v:unsqueeze(1) end
    function Row.right_inverse(_, value) return value:select(1, 1) end
    m = register(nn.Linear(2, 1), "weight", Row())
    local value = m.weight:detach():clone()
    utils.parametrize.remove_parametrizations(m, "weight")
    assert.is_true(m.weight:isa(nn.Parameter) and m.weight.requires_grad and m.weight:equal(value))
  end)

  it("is saved, loaded and copied", function()
    local a, b = utils.weight_norm(nn.Linear(3, 2)), utils.weight_norm(nn.Linear(3, 2))
    b:load_state_dict(a:state_dict())
    local x = ms.randn(2, 3)
    assert.is_true(a(x):equal(b(x)))
    local copy = ms.deepcopy(a)
    assert.is_true(copy(x):equal(a(x)))
    ms.no_grad(function() a.parametrizations.weight.original0:mul_(2) end)
    assert.is_true(copy(x):equal(b(x)))
    assert.is_false(copy(x):equal(a(x)))
    assert.is_true(copy.weight:equal(b.weight))
  end)

  it("loads PyTorch's names", function()
    local m = utils.spectral_norm(nn.Linear(3, 2))
    m:load_state_dict({ bias = ms.zeros(2), ["parametrizations.weight.original"] = ms.ones(2, 3),
      ["parametrizations.weight.0._u"] = ms.ones(2) / 2 ^ 0.5, ["parametrizations.weight.0._v"] = ms.ones(3) / 3 ^ 0.5 },
      { count_from = 0 })
    assert.is_true(m:eval().weight:allclose(ms.full({ 2, 3 }, 1 / 6 ^ 0.5)))
  end)

  it("leaves nothing behind when forward fails", function()
    local m = utils.weight_norm(nn.Linear(3, 2))
    assert.is_false(pcall(m, ms.ones(2, 4)))
    assert.is_nil(rawget(m._slots, "weight"))
    assert.are.same({ 2, 2 }, { unpack(m(ms.ones(2, 3)).shape) })
  end)

  it("refuses other shapes, unknown names and what is no module", function()
    local Sum = nn.Module:extend "Sum"
    function Sum.forward(_, x) return x:sum() end
    local m = nn.Linear(3, 2)
    assert.are.equal("register_parametrization: Sum gives [] for 'weight' of shape [2, 3], expected a tensor of that shape",
      message(function() register(m, "weight", Sum()) end))
    assert.are.equal("Linear", m:class_name())
    assert.is_true(m.weight:isa(nn.Parameter))
    assert.are.equal("register_parametrization: Linear: unknown parameter 'wight'; did you mean 'weight'?",
      message(function() register(m, "wight", Double()) end))
    assert.are.equal("register_parametrization: argument 3 is a function, expected a module",
      message(function() register(m, "weight", print) end))
    assert.are.equal("remove_parametrizations: 'weight' of Linear is not parametrized",
      message(function() utils.parametrize.remove_parametrizations(m, "weight") end))
    register(m, "bias", (function()
      local Plain = nn.Module:extend "Plain"
      function Plain.forward(_, x) return x + 0 end
      return Plain()
    end)())
    assert.are.equal("parametrize: 'bias' cannot be set, because the parametrization Plain has no right_inverse",
      message(function() m.bias = ms.zeros(2) end))
    assert.are.equal("register_parametrization: parameter 'weight' of FSDPLinear is sharded; call this before fully_shard or fsdp.FSDP",
      message(function() register(ms.fsdp.fully_shard(nn.Linear(2, 2)), "weight", Double()) end))
  end)
end)

describe("weight_norm and spectral_norm", function()
  it("keep the weight's value at first, and are removed with it", function()
    local m, x = nn.Linear(4, 3), ms.randn(2, 4)
    local before = m(x)
    utils.weight_norm(m)
    assert.are.same({ 3, 1 }, { unpack(m.parametrizations.weight.original0.shape) })
    assert.is_true(m(x):allclose(before))
    assert.are.equal("remove_spectral_norm: 'weight' of ParametrizedLinear has no SpectralNorm as its last parametrization",
      message(function() utils.remove_spectral_norm(m) end))
    utils.remove_weight_norm(m)
    assert.are.equal("Linear", m:class_name())
    assert.is_true(m(x):allclose(before))
    utils.weight_norm(m, "weight", { dim = -1 })
    assert.are.same({ 1, 4 }, { unpack(m.parametrizations.weight.original0.shape) })
    assert.are.equal("weight_norm: option 'dim' is 3, expected a dimension of a weight of shape [4, 4]",
      message(function() utils.weight_norm(nn.Linear(4, 4), { dim = 3 }) end))
    assert.truthy(message(function() utils.weight_norm(nn.ReLU()) end):find("unknown parameter 'weight'", 1, true))
  end)

  it("divide by the largest singular value", function()
    ms.manual_seed(3)
    local m = utils.spectral_norm(nn.Linear(6, 4), { n_power_iterations = 200 })
    m(ms.ones(1, 6))
    m:eval()
    local w = m.weight:detach()
    local largest = 0                                   -- of w w^T, by a power iteration of its own
    local v = ms.ones(4)
    for _ = 1, 500 do
      local next_v = w:matmul(w:t()):mv(v)
      largest = next_v:norm():item() / v:norm():item()
      v = next_v / next_v:norm()
    end
    assert.near(1, largest, 1e-4)
    local u = m.parametrizations.weight[1]._u:clone()
    m(ms.ones(1, 6))                                    -- evaluation does not continue the iteration
    assert.is_true(u:equal(m.parametrizations.weight[1]._u))
    local conv = utils.spectral_norm(nn.ConvTranspose2d(2, 5, 3))
    assert.are.same({ 5 }, { unpack(conv.parametrizations.weight[1]._u.shape) })
  end)
end)

describe("layers joined for evaluation", function()
  it("compute what a convolution and a batch norm compute, or a linear layer and one", function()
    local x = ms.randn(4, 2, 5, 5)
    local function check(layer, bn, input, fuse)
      bn(layer(input))
      ms.no_grad(function()
        nn.init.uniform_(bn.weight, 0.5, 2)
        nn.init.normal_(bn.bias)
      end)
      layer:eval()
      bn:eval()
      local one = fuse(layer, bn)
      assert.is_true(one(input):allclose(bn(layer(input)), { rtol = 1e-4, atol = 1e-5 }))
      assert.are.equal(layer:class_name(), one:class_name())
    end
    check(nn.Conv2d(2, 3, 3, { bias = false }), nn.BatchNorm2d(3), x, utils.fuse_conv_bn_eval)
    check(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), x, utils.fuse_conv_bn_eval)
    check(nn.ConvTranspose2d(2, 3, 3), nn.BatchNorm2d(3), x, utils.fuse_conv_bn_eval)
    check(nn.Linear(5, 3), nn.BatchNorm1d(3), ms.randn(8, 5), utils.fuse_linear_bn_eval)
    assert.are.equal("fuse_linear_bn_eval: a layer is in training mode; call eval() on both",
      message(function() utils.fuse_linear_bn_eval(nn.Linear(2, 3), nn.BatchNorm1d(3)) end))
    assert.are.equal("fuse_linear_bn_eval: the first layer has 2 outputs and the second 3 channels, expected equal numbers",
      message(function() utils.fuse_linear_bn_eval(nn.Linear(2, 2):eval(), nn.BatchNorm1d(3):eval()) end))
  end)
end)

describe("functional_call", function()
  local call = utils.stateless.functional_call

  it("uses other tensors once, and gives them gradients", function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    local before = m[1].weight
    local w = ms.ones(2, 2, { requires_grad = true })
    local mean = ms.zeros(2)
    local y = call(m, { ["1.weight"] = w, ["2.running_mean"] = mean }, ms.randn(4, 2))
    y:pow(3):sum():backward()
    assert.is_not_nil(w.grad)
    assert.is_nil(before.grad)
    assert.are.equal(before, m[1].weight)
    assert.are_not.equal(0, mean:abs():sum():item())    -- the replacement is updated, not the module's buffer
    assert.are.equal(0, m[2].running_mean:abs():sum():item())
  end)

  it("replaces a shared parameter under all its names, and restores all after an error", function()
    local m = nn.Sequential(nn.Linear(2, 2, { bias = false }), nn.Linear(2, 2, { bias = false }))
    m[2].weight = m[1].weight
    assert.are.same({ { 4, 4 } }, call(m, { ["1.weight"] = ms.ones(2, 2) }, ms.ones(1, 2)):tolist())
    local before = m[1].weight
    assert.is_false(pcall(call, m, { ["1.weight"] = ms.ones(2, 2) }, ms.ones(1, 3)))
    assert.are.equal(before, m[1].weight)
    assert.are.equal(before, m[2].weight)
  end)

  it("refuses unknown names and other shapes", function()
    local m = nn.Linear(2, 2)
    assert.are.equal("functional_call: unknown name 'wight'; did you mean 'weight'?",
      message(function() call(m, { wight = ms.ones(2, 2) }, ms.ones(1, 2)) end))
    assert.are.equal("functional_call: 'weight' has shape [3], expected [2, 2]",
      message(function() call(m, { weight = ms.ones(3) }, ms.ones(1, 2)) end))
    assert.are.equal("functional_call: 'weight' is sharded, and cannot be replaced",
      message(function() call(ms.fsdp.fully_shard(nn.Linear(2, 2)), { weight = ms.ones(2, 2) }, ms.ones(1, 2)) end))
  end)
end)

describe("clip_grads_with_norm_", function()
  it("does with a norm what clip_grad_norm_ does with its own", function()
    local function grads()
      ms.manual_seed(1)
      local m = nn.Linear(4, 3)
      m(ms.ones(2, 4)):pow(2):sum():backward()
      return m:parameters()
    end
    local a, b, c = grads(), grads(), grads()
    local norm = utils.clip_grad_norm_(a, 0.5)
    utils.clip_grads_with_norm_(b, 0.5, utils.get_total_norm { b[1].grad, b[2].grad })
    utils.clip_grads_with_norm_(c, 0.5, norm:item())
    for k = 1, 2 do
      assert.is_true(a[k].grad:allclose(b[k].grad))
      assert.is_true(a[k].grad:allclose(c[k].grad))
    end
    local before = a[1].grad:clone()
    utils.clip_grads_with_norm_(a, 10, 0.5)             -- below the limit, gradients do not change
    assert.is_true(a[1].grad:equal(before))
    assert.are.equal("clip_grads_with_norm_: total_norm is a boolean (true), expected a number or a tensor of one element",
      message(function() utils.clip_grads_with_norm_(a, 1, true) end))
  end)
end)

for world = 1, 3 do
  ranks.describe(world, ("parametrized layers over %d ranks"):format(world), function()
    local shard = {
      fully_shard = function(ms_, m) return ms_.fsdp.fully_shard(m) end,
      FSDP = function(ms_, m)
        local model
        ms_.catch_warnings(function() model = ms_.fsdp.FSDP(m, { use_orig_params = true }) end)
        return model
      end,
    }
    for _, kind in ipairs { "fully_shard", "FSDP" } do
      it("train as in one process: " .. kind, function()
        local mine = require "moonshard"
        local function make()
          mine.manual_seed(2)
          local m = mine.nn.Sequential(mine.nn.Linear(5, 4), mine.nn.Tanh(), mine.nn.Linear(4, 3))
          mine.nn.utils.weight_norm(m[1])
          mine.nn.utils.spectral_norm(m[3])
          return m
        end
        local reference, model = make(), shard[kind](mine, make())
        local optims = { mine.optim.Adam(reference:parameters(), { lr = 0.05 }),
          mine.optim.Adam(model:parameters(), { lr = 0.05 }) }
        for step = 1, 5 do
          local losses = {}
          for k, m in ipairs { reference, model } do
            mine.manual_seed(step)
            mine.scope(function()
              local loss = m(mine.randn(6, 5)):pow(2):mean()
              loss:backward()
              losses[k] = loss:item()
            end)
            optims[k]:step()
            optims[k]:zero_grad()
          end
          assert.near(losses[1], losses[2], 1e-5)
        end
        local sd = mine.fsdp.state_dict(model)
        for name, t in pairs(reference:state_dict()) do
          assert.is_true(sd[name]:allclose(t, { rtol = 1e-4, atol = 1e-5 }), name)
        end
      end)
    end
  end)
end
