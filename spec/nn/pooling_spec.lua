-- SPDX-License-Identifier: MIT
--- Pooling: what golden/pooling_spec.lua does not compare, which is special numbers, equal elements, sizes, printing
--- and errors.
local ms = require "moonshard"
local nn, F = ms.nn, ms.nn.F
local raises = require "spec.support.raises"

local nan, inf = 0 / 0, math.huge

describe("max_pool2d", function()
  it("takes the first of equal elements, and gives it the gradient", function()
    local x = ms.ones(1, 1, 4, 4):requires_grad_()
    local y, at = F.max_pool2d(x, 2, { return_indices = true })
    assert.are.same({ { { { 0, 2 }, { 8, 10 } } } }, at:tolist())
    y:sum():backward()
    assert.are.same({ { { { 1, 0, 1, 0 }, { 0, 0, 0, 0 }, { 1, 0, 1, 0 }, { 0, 0, 0, 0 } } } }, x.grad:tolist())
  end)

  it("keeps NaN, as the last of a window, and -inf", function()
    local x = ms.tensor { { { 1, nan, -inf, -inf }, { nan, 5, -inf, -inf } } }
    local y, at = F.max_pool2d(x, 2, { return_indices = true })
    assert.is_true(y[{ 1, 1, 1 }]:isnan():item() ~= 0)
    assert.are.equal(-inf, y[{ 1, 1, 2 }]:item())
    assert.are.same({ { { 4, 2 } } }, at:tolist())
  end)

  it("adds up the gradients of windows that overlap, in the same bits for any number of threads", function()
    local x = ms.randn(2, 8, 33, 31)
    local grads = {}
    for _, threads in ipairs { 1, 2 } do
      local before = ms.get_num_threads()
      ms.set_num_threads(threads)
      local leaf = x:clone():requires_grad_()
      F.max_pool2d(leaf, 3, 1, { padding = 1 }):pow(2):sum():backward()
      grads[#grads + 1] = leaf.grad
      ms.set_num_threads(before)
    end
    assert.is_true(grads[1]:equal(grads[2]))
  end)

  it("takes an image without a batch, and an empty batch", function()
    local x = ms.rand(3, 6, 4)
    assert.is_true(F.max_pool2d(x, 2):equal(F.max_pool2d(x:unsqueeze(1), 2):squeeze(1)))
    assert.are.same({ 0, 3, 3, 2 }, { unpack(F.max_pool2d(ms.rand(0, 3, 6, 4), 2).shape) })
  end)

  it("takes the stride as argument or as option", function()
    local x = ms.rand(1, 5, 5)
    assert.is_true(F.max_pool2d(x, 3, 1):equal(F.max_pool2d(x, 3, { stride = 1 })))
    assert.is_true(F.max_pool2d(x, 3, { 1, 2 }):equal(F.max_pool2d(x, { 3, 3 }, { stride = { 1, 2 } })))
    raises("max_pool2d: the stride is given twice, as argument and as option", F.max_pool2d, x, 3, 1, { stride = 2 })
  end)

  it("names what does not fit", function()
    local x = ms.rand(1, 1, 4, 4)
    raises("max_pool2d: argument 1 is a table, expected a tensor", F.max_pool2d, {}, 2)
    raises("max_pool2d: the input has shape [4, 4], expected 4 dimensions, or 3 without a batch", F.max_pool2d,
      ms.rand(4, 4), 2)
    raises("max_pool2d: the kernel's size is nil, expected a whole number from 1, or a list of 2 of them", F.max_pool2d, x)
    raises("max_pool2d: option 'stride' is a number (0), expected a whole number from 1, or a list of 2 of them",
      F.max_pool2d, x, 2, 0)
    raises("max_pool2d: pad should be at most half of effective kernel size, but got pad=2, kernel_size=2 and dilation=1",
      F.max_pool2d, x, 2, { padding = 2 })
    raises("max_pool2d: windows of size 5 do not fit the padded input, which has size 4 along dimension 3; input [1, 1, 4, 4]",
      F.max_pool2d, x, 5)
    raises("max_pool2d: the input is int64, expected a floating-point dtype; cast it first", F.max_pool2d, x:long(), 2)
    raises("max_pool2d: the input [1, 1, 0, 4] has no elements along dimension 3", F.max_pool2d, ms.rand(1, 1, 0, 4), 2)
    raises("max_pool2d: unknown option 'pading'; did you mean 'padding'? (accepted: ceil_mode, dilation, padding, return_indices, stride)",
      F.max_pool2d, x, 2, { pading = 1 })
    raises("avg_pool2d: option 'divisor_override' is 0, expected a number other than 0", F.avg_pool2d, x, 2,
      { divisor_override = 0 })
  end)
end)

describe("adaptive pooling", function()
  it("covers the input by windows that may overlap", function()
    local x = ms.tensor { { 1, 2, 3, 4, 5 } }
    assert.are.same({ { 2, 4 } }, F.adaptive_avg_pool1d(x, 2):tolist())
    local y, at = F.adaptive_max_pool1d(x, 2, { return_indices = true })
    assert.are.same({ { 3, 5 } }, y:tolist())
    assert.are.same({ { 2, 4 } }, at:tolist())
  end)

  it("keeps the sizes that are false, and accepts size 0", function()
    assert.are.same({ 1, 2, 3, 5 }, { unpack(F.adaptive_max_pool2d(ms.rand(1, 2, 4, 5), { 3, false }).shape) })
    assert.are.same({ 1, 2, 0, 0 }, { unpack(F.adaptive_avg_pool2d(ms.rand(1, 2, 4, 5), 0).shape) })
    raises("adaptive_avg_pool2d: the output's size is a table, expected a whole number from 0, or a list of 2 of them, where false keeps the input's size",
      F.adaptive_avg_pool2d, ms.rand(1, 2, 4, 5), { 3, -1 })
  end)
end)

describe("max_unpool2d", function()
  it("inverts max_pool2d except for the elements that were not chosen", function()
    local x = ms.rand(2, 3, 4, 6)
    local y, at = F.max_pool2d(x, 2, { return_indices = true })
    local back = F.max_unpool2d(y, at, 2)
    assert.are.same({ 2, 3, 4, 6 }, { unpack(back.shape) })
    assert.is_true(F.max_pool2d(back, 2):equal(y))
    assert.is_true(back:eq(0):logical_or(back:eq(x)):all():item() ~= 0)
  end)

  it("refuses positions of another shape or dtype", function()
    raises("max_unpool2d: the positions are float32 of shape [1, 2, 2], expected int64 of the input's shape [1, 2, 2]",
      F.max_unpool2d, ms.rand(1, 2, 2), ms.rand(1, 2, 2), 2)
  end)
end)

describe("pooling layers", function()
  it("do what their functions do", function()
    local x1, x, x3 = ms.rand(2, 3, 9) + 0.1, ms.rand(2, 3, 9, 8) + 0.1, ms.rand(1, 2, 5, 6, 7) + 0.1
    for _, case in ipairs {
      { nn.MaxPool1d(3, 2), F.max_pool1d, x1, 3, 2 },
      { nn.MaxPool2d(3, { padding = 1 }), F.max_pool2d, x, 3, { padding = 1 } },
      { nn.MaxPool3d(2), F.max_pool3d, x3, 2 }, { nn.AvgPool1d(2), F.avg_pool1d, x1, 2 },
      { nn.AvgPool2d({ 3, 2 }, 2), F.avg_pool2d, x, { 3, 2 }, 2 },
      { nn.AvgPool3d(2, { divisor_override = 3 }), F.avg_pool3d, x3, 2, { divisor_override = 3 } },
      { nn.AdaptiveAvgPool1d(4), F.adaptive_avg_pool1d, x1, 4 },
      { nn.AdaptiveAvgPool2d { 2, false }, F.adaptive_avg_pool2d, x, { 2, false } },
      { nn.AdaptiveAvgPool3d(2), F.adaptive_avg_pool3d, x3, 2 },
      { nn.AdaptiveMaxPool1d(4), F.adaptive_max_pool1d, x1, 4 },
      { nn.AdaptiveMaxPool2d(3), F.adaptive_max_pool2d, x, 3 },
      { nn.AdaptiveMaxPool3d { 2, 3, 4 }, F.adaptive_max_pool3d, x3, { 2, 3, 4 } },
      { nn.LPPool1d(2, 3), F.lp_pool1d, x1, 2, 3 }, { nn.LPPool2d(2, 3, 1), F.lp_pool2d, x, 2, 3, 1 },
      { nn.LPPool3d(1, 2), F.lp_pool3d, x3, 1, 2 },
    } do
      local layer, fn = case[1], case[2]
      assert.is_true(layer(case[3]):equal(fn(unpack(case, 3))), tostring(layer))
    end
  end)

  it("return indices for the inverse layers", function()
    for _, case in ipairs { { nn.MaxPool1d(2, { return_indices = true }), nn.MaxUnpool1d(2), ms.rand(1, 2, 7) },
      { nn.MaxPool2d(2, { return_indices = true }), nn.MaxUnpool2d(2), ms.rand(1, 2, 7, 6) },
      { nn.MaxPool3d(2, { return_indices = true }), nn.MaxUnpool3d(2), ms.rand(1, 2, 5, 6, 7) } } do
      local y, at = case[1](case[3])
      local size = { unpack(case[3].shape, 3) }
      local back = case[2](y, at, size)
      assert.are.same({ unpack(case[3].shape) }, { unpack(back.shape) })
      assert.is_true((case[1](back)):equal(y))
    end
  end)

  it("print their sizes", function()
    assert.equal("MaxPool2d(kernel 3, stride 2, padding 1)", tostring(nn.MaxPool2d(3, 2, { padding = 1 })))
    assert.equal("MaxPool1d(kernel 3, stride 3, dilation 2, ceil mode, with indices)",
      tostring(nn.MaxPool1d(3, { dilation = 2, ceil_mode = true, return_indices = true })))
    assert.equal("AvgPool2d(kernel 2x3, stride 2x3, padding not counted, divisor 5)",
      tostring(nn.AvgPool2d({ 2, 3 }, { count_include_pad = false, divisor_override = 5 })))
    assert.equal("AdaptiveAvgPool2d(2xsame)", tostring(nn.AdaptiveAvgPool2d { 2, false }))
    assert.equal("LPPool2d(power 2, kernel 3, stride 3)", tostring(nn.LPPool2d(2, 3)))
    assert.equal("MaxUnpool2d(kernel 2, stride 2)", tostring(nn.MaxUnpool2d(2)))
  end)
end)
