-- SPDX-License-Identifier: MIT
--- Layers that are made of other operators: what golden/layers_spec.lua does not compare, which is randomness, state,
--- printing and errors.
local ms = require "moonshard"
local nn, F = ms.nn, ms.nn.F
local collected = require "spec.support.collected"
local message = require "spec.support.message"
local raises = require "spec.support.raises"

local names = require "spec.support.names"

describe("group_norm and instance_norm", function()
  -- By definition, from other operators. groups: nil for instance_norm.
  local function defined(x, groups, w, b)
    local N, C = x:size(1), x:size(2)
    local rows = x:reshape(N, groups or C, -1)
    local away = rows - rows:mean(3, { keepdim = true })
    local y = (away / (away:square():mean(3, { keepdim = true }) + 1e-5):sqrt()):reshape(N, C, -1)
    if w then y = y * w:reshape(1, C, 1) end
    if b then y = y + b:reshape(1, C, 1) end
    return y:reshape(x.shape)
  end
  local function call(x, groups, w, b)
    if groups then return F.group_norm(x, groups, w, b) end
    return F.instance_norm(x, nil, nil, w, b)
  end

  it("give the weight and the bias a gradient of 0 for empty inputs", function()
    for _, shape in ipairs { { 0, 6, 5 }, { 2, 6, 0 } } do
      for _, groups in ipairs { 3, false } do
        local w, b = ms.ones(6, { requires_grad = true }), ms.ones(6, { requires_grad = true })
        local y = call(ms.ones(unpack(shape)), groups, w, b)
        assert.are.same(shape, { unpack(y.shape) })
        y:sum():backward()
        assert.are.same({ 0, 0 }, { w.grad:abs():sum():item(), b.grad:abs():sum():item() })
      end
    end
  end)

  for _, groups in ipairs { 1, 3, false } do
    for _, shape in ipairs { { 4, 6, 5, 1 }, { 2, 6, 3, 7 }, { 1, 6, 40, 2 } } do
      it(("are what they are defined to be, for any of weight and bias and any dtype: %s groups, [%s]"):format(groups or "C",
        table.concat(shape, ", ")), function()
        ms.manual_seed(3)
        local o = { dtype = "float64", requires_grad = true }
        local x, w, b = ms.randn(shape[1], shape[2], shape[3], shape[4], o), ms.randn(6, o), ms.randn(6, o)
        for _, given in ipairs { {}, { w, nil }, { nil, b }, { w, b } } do
          local got, want = call(x, groups, given[1], given[2]), defined(x, groups, given[1], given[2])
          ms.testing.assert_close(got, want, { rtol = 1e-9, atol = 1e-9 })
          local leaves, g = { x, given[1] or given[2], given[1] and given[2] }, ms.randn_like(x)
          local a, c = ms.grad(got, leaves, { grad_outputs = g }), ms.grad(want, leaves, { grad_outputs = g })
          for k in ipairs(leaves) do ms.testing.assert_close(a[k], c[k], { rtol = 1e-8, atol = 1e-8 }) end
          for _, types in ipairs { { "float32", "float32" }, { "bfloat16", "bfloat16" }, { "bfloat16", "float32" },
            { "float16", "float16" } } do
            local function as(t, dtype) return t and t:detach():to(dtype) end
            local y = call(as(x, types[1]), groups, as(given[1], types[2]), as(given[2], types[2]))
            local most = (types[1] .. types[2]):find "16" and 0.06 or 1e-5
            ms.testing.assert_close(y:double(), want:detach(), { rtol = most, atol = most })
          end
        end
      end)
    end
  end
end)

describe("GroupNorm", function()
  it("has PyTorch's parameters and formula", function()
    local m = nn.GroupNorm(2, 4)
    assert.equal("weight bias", names(m:named_parameters()))
    local x = ms.rand(3, 4, 5)
    ms.testing.assert_close(m(x), F.group_norm(x, 2))
    assert.equal("", names(nn.GroupNorm(2, 4, { affine = false }):named_parameters()))
    assert.equal("GroupNorm(2 groups of 4, eps 1e-05, affine)", tostring(m))
  end)

  it("gives a result that may be changed in place under autograd", function()
    local x = ms.rand(3, 4, 5):requires_grad_()
    for _, m in ipairs { nn.GroupNorm(2, 4), nn.InstanceNorm1d(4) } do
      m(x):relu_():sum():backward()
      assert.are.same({ 3, 4, 5 }, { unpack(x.grad.shape) })
    end
  end)

  it("refuses groups and weights that do not fit", function()
    raises("GroupNorm: argument 2, num_channels, is 5, expected a multiple of num_groups (2)", nn.GroupNorm, 2, 5)
    raises("group_norm: the input has shape [2, 3, 4], expected a number of channels that num_groups, 2, divides",
      F.group_norm, ms.ones(2, 3, 4), 2)
    raises("group_norm: weight has shape [3], expected [4], one element for each channel", F.group_norm,
      ms.ones(2, 4, 4), 2, ms.ones(3))
    raises("group_norm: Expected more than 1 value per channel when training, got input size [1, 4]",
      F.group_norm, ms.ones(1, 4), 4)
  end)

  it("takes an empty batch", function()
    assert.are.same({ 0, 4, 5 }, { unpack(nn.GroupNorm(2, 4)(ms.ones(0, 4, 5)).shape) })
  end)
end)

describe("InstanceNorm", function()
  it("has no state by default, and PyTorch's names with it", function()
    assert.is_nil(next(nn.InstanceNorm2d(3):state_dict()))
    local m = nn.InstanceNorm1d(3, { affine = true, track_running_stats = true })
    assert.equal("weight bias", names(m:named_parameters()))
    assert.equal("running_mean running_var num_batches_tracked", names(m:named_buffers()))
    assert.equal("InstanceNorm1d(3, eps 1e-05, momentum 0.1, affine, running stats)", tostring(m))
  end)

  it("uses the running statistics in evaluation only", function()
    local m, x = nn.InstanceNorm1d(2, { track_running_stats = true }), ms.rand(4, 2, 6) * 3 + 1
    ms.testing.assert_close(m(x), F.instance_norm(x))
    m:eval()
    local mean = x:mean(3):mean(1) * 0.1
    ms.testing.assert_close(m.running_mean, mean)
    local var = x:var(3):mean(1) * 0.1 + 0.9
    ms.testing.assert_close(m(x), (x - mean:reshape(1, 2, 1)) / (var:reshape(1, 2, 1) + 1e-5):sqrt())
    m:reset_running_stats()
    assert.are.same({ 0, 0 }, m.running_mean:tolist())
  end)

  it("takes one sample without a batch", function()
    local x = ms.rand(3, 5, 4)
    ms.testing.assert_close(nn.InstanceNorm2d(3)(x), nn.InstanceNorm2d(3)(x:unsqueeze(1)):squeeze(1))
  end)

  it("of volumes is that of their voxels in a row", function()
    local given = { affine = true, track_running_stats = true }
    local volume, row, x = nn.InstanceNorm3d(3, given), nn.InstanceNorm1d(3, given), ms.rand(2, 3, 4, 5, 6)
    for _, training in ipairs { true, false } do
      ms.testing.assert_close(volume:train(training)(x), row:train(training)(x:reshape(2, 3, -1)):reshape(x.shape))
    end
    ms.testing.assert_close(volume.running_var, row.running_var)
    ms.testing.assert_close(volume(x)[2], volume(x[2]))
    raises("expected 4D or 5D input (got 3D input)", volume, ms.ones(2, 3, 4))
  end)

  it("refuses other shapes", function()
    raises("expected 3D or 4D input (got 2D input)", nn.InstanceNorm2d(3), ms.ones(3, 4))
    raises("InstanceNorm1d: expected input's size at dimension 2 to match num_features (3), but got: 2",
      nn.InstanceNorm1d(3, { affine = true }), ms.ones(1, 2, 5))
    raises("Expected more than 1 spatial element when training, got input size [2, 3, 1]", F.instance_norm,
      ms.ones(2, 3, 1))
    raises("Expected running_mean and running_var to be defined when use_input_stats is false", F.instance_norm,
      ms.ones(2, 3, 4), { use_input_stats = false })
  end)
end)

describe("dropout of channels", function()
  before_each(function() ms.manual_seed(11) end)

  it("sets whole channels to 0 and scales the others", function()
    for _, case in ipairs { { nn.Dropout1d(0.25), { 100, 20, 4 } }, { nn.Dropout2d(0.25), { 100, 20, 2, 2 } },
      { nn.Dropout3d(0.25), { 100, 20, 2, 2, 1 } } } do
      local y = case[1](ms.ones(case[2])):reshape(100, 20, 4)
      local dropped = y:eq(0):to "float32"
      ms.testing.assert_close(dropped:mean(3), dropped:select(3, 1))
      assert.is_true(math.abs(dropped:mean():item() - 0.25) < 0.03)
      assert.is_true(math.abs(y:max():item() - 4 / 3) < 1e-6)
    end
  end)

  it("passes the gradients of the channels that remain", function()
    local x = ms.ones(1, 8, 3):requires_grad_(true)
    local y = nn.Dropout1d()(x)
    y:sum():backward()
    assert.is_true(x.grad:equal(y:detach()))
  end)

  it("returns its input in evaluation", function()
    local x = ms.ones(2, 3, 4)
    for _, class in ipairs { nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout } do
      assert.equal(x, class(0.5):eval()(x))
      assert.equal(x, class(0)(x))
    end
    local volumes = x:unsqueeze(1)
    assert.equal(volumes, nn.Dropout3d():eval()(volumes))
    assert.equal("AlphaDropout(0.5)", tostring(nn.AlphaDropout()))
  end)

  it("refuses other shapes and probabilities", function()
    raises("dropout1d: Expected 2D or 3D input, but received a 4D input", nn.Dropout1d(), ms.ones(1, 1, 1, 1))
    raises("dropout3d: Expected 4D or 5D input, but received a 3D input", nn.Dropout3d(), ms.ones(1, 1, 1))
    raises("dropout2d: Expected 3D or 4D input, but received a 2D input", nn.Dropout2d(), ms.ones(1, 1))
    assert.truthy(message(nn.Dropout2d, 2):find("has to be between 0 and 1, but got 2", 1, true))
  end)
end)

describe("AlphaDropout", function()
  it("keeps mean 0 and variance 1, and two values for equal inputs", function()
    ms.manual_seed(3)
    local y = nn.AlphaDropout(0.3)(ms.randn(100000))
    assert.is_true(math.abs(y:mean():item()) < 0.02)
    assert.is_true(math.abs(y:std():item() - 1) < 0.02)
    -- a = 1 / sqrt((1.758^2 * 0.5 + 1) * 0.5) = 0.8864, and 1.758 * a * 0.5 = 0.7792
    local two = nn.AlphaDropout(0.5)(ms.zeros(1000))
    assert.is_true(math.abs(two:max():item() - 0.7792) < 1e-4 and math.abs(two:min():item() + 0.7792) < 1e-4)
    assert.equal(0, F.alpha_dropout(ms.ones(4), 1):abs():sum():item())
  end)
end)

describe("padding layers", function()
  it("take one number for all sides, or all of them", function()
    assert.are.same({ 1, 4, 5 }, { unpack(nn.ZeroPad2d(1)(ms.ones(1, 2, 3)).shape) })
    assert.are.same({ 1, 2, 6 }, { unpack(nn.ConstantPad1d({ 1, 2 }, 3)(ms.ones(1, 2, 3)).shape) })
    assert.are.same({ { 5, 1, 1 } }, nn.ConstantPad2d({ 1, 0, 0, 0 }, 5)(ms.ones(1, 2)):tolist())
    assert.are.same({ { 1 } }, nn.ZeroPad2d(-1)(ms.ones(3, 3)):tolist())
    assert.equal("ConstantPad1d([1, 2], value 3)", tostring(nn.ConstantPad1d({ 1, 2 }, 3)))
    assert.equal("ZeroPad2d([1, 1, 1, 1])", tostring(nn.ZeroPad2d(1)))
  end)

  it("keep the dtype", function()
    assert.equal("int64", F.pad(ms.ones(2, { dtype = "int64" }), { 1, 1 }).dtype)
    assert.equal("bfloat16", F.pad(ms.ones(2, { dtype = "bfloat16" }), { 1, 1 }).dtype)
  end)

  it("refuse lists that do not fit", function()
    raises("ZeroPad2d: argument 1, the padding, is a table, expected a whole number or a list of 4", nn.ZeroPad2d,
      { 1, 2 })
    raises("ConstantPad1d: argument 2, the value, is nil, expected a number", nn.ConstantPad1d, 1)
    raises("pad: 4 sizes for 1 dimension, expected at most two for each", F.pad, ms.ones(3), { 1, 1, 1, 1 })
    raises("pad: -2 and -2 elements at dimension 1 of size 3 give a negative size", F.pad, ms.ones(3), { -2, -2 })
    raises("pad: argument 2 is a table, expected a list of an even number of sizes", F.pad, ms.ones(3), { 1 })
  end)
end)

describe("PixelShuffle", function()
  it("prints its factor, and refuses other channels", function()
    assert.equal("PixelShuffle(2)", tostring(nn.PixelShuffle(2)))
    raises("pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of upscale_factor, but input.size(-3)=6 is not divisible by 4",
      nn.PixelShuffle(2), ms.ones(1, 6, 2, 2))
  end)
end)

describe("Bilinear", function()
  it("is uniform in +-1/sqrt(in1) at first, and prints its sizes", function()
    ms.manual_seed(2)
    local m = nn.Bilinear(100, 5, 4)
    assert.equal("weight bias", names(m:named_parameters()))
    assert.are.same({ 4, 100, 5 }, { unpack(m.weight.shape) })
    local high = m.weight:detach():abs():max():item()
    assert.is_true(high <= 0.1 and high > 0.095)
    assert.equal("Bilinear(100 x 5 -> 4, bias)", tostring(m))
    assert.is_nil(nn.Bilinear(1, 1, 1, { bias = false }).bias)
  end)

  it("refuses inputs that do not fit", function()
    raises("bilinear: inputs of shapes [2, 3] and [3, 2], weight [4, 3, 2]: expected [..., 3] and [..., 2] of the same leading sizes",
      F.bilinear, ms.ones(2, 3), ms.ones(3, 2), ms.ones(4, 3, 2))
  end)
end)

describe("gumbel_softmax", function()
  it("draws each class as often as softmax says, and gives the logits a gradient", function()
    ms.manual_seed(1)
    local logits = ms.tensor { math.log(0.5), math.log(0.3), math.log(0.2) }:requires_grad_()
    local drawn = F.gumbel_softmax(logits:expand(20000, 3), { hard = true, tau = 0.7 })
    assert.is_true(drawn:eq(0):logical_or((drawn - 1):abs():lt(1e-6)):all():item())
    ms.testing.assert_close(drawn:detach():mean(1), ms.tensor { 0.5, 0.3, 0.2 }, { rtol = 0, atol = 0.02 })
    drawn:select(2, 1):mean():backward()
    assert.is_true(logits.grad[1]:item() > 0 and logits.grad[2]:item() < 0)
  end)

  it("gives soft draws that add up to 1, and refuses a temperature of 0", function()
    ms.testing.assert_close(F.gumbel_softmax(ms.randn(3, 4), { dim = 1 }):sum(1), ms.ones(4))
    raises("gumbel_softmax: option 'tau' is a number (0), expected a number > 0", F.gumbel_softmax, ms.ones(2), { tau = 0 })
  end)
end)

describe("functions made of other operators", function()
  it("release their intermediate results", function()
    local x, image = ms.rand(2, 4, 5), ms.rand(1, 4, 2, 2)
    local w, forms = ms.ones(4), ms.rand(3, 5, 5)
    collected()
    local before = ms.memory_stats("cpu").live_tensors
    local kept = { F.group_norm(x, 2, w, w), F.instance_norm(x, nil, nil, w, w), F.dropout1d(x), F.dropout2d(image),
      F.alpha_dropout(x), F.pad(x, { 1, 1, 1, 1 }), F.pixel_shuffle(image, 2), F.bilinear(x, x, forms) }
    assert.equal(before + #kept, ms.memory_stats("cpu").live_tensors)
  end)
end)
