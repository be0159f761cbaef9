-- SPDX-License-Identifier: MIT
--- Convolutions over 1 to 3 dimensions, transposed ones and the padding modes of layers, forward and backward, compared
--- with PyTorch's results.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local golden_cases = require "spec.support.golden_cases"
local nn, F = ms.nn, ms.nn.F

-- A layer with the weights of make_conv.py, in x's dtype.
local function layer(kind, size_in, size_out, kernel, options)
  return function(x, ...)
    options = options or {}
    options.dtype = x.dtype
    local m = nn[kind](size_in, size_out, kernel, options)
    golden.phase, golden.dtype = 0, x.dtype
    ms.no_grad(function()
      m.weight:copy_(golden.wave(m.weight.shape, 0.2, 0, 1, 0.9))
      m.bias:copy_(golden.wave(m.bias.shape, 0.9))
    end)
    return m(x, ...)
  end
end

local cases = {
  conv1d = F.conv1d,
  conv1d_groups = function(x, w, b) return F.conv1d(x, w, b, { stride = 2, padding = 1, dilation = 2, groups = 2 }) end,
  conv1d_same = function(x, w) return F.conv1d(x, w, { padding = "same", dilation = 3 }) end,
  conv1d_unbatched = function(x, w) return F.conv1d(x, w, { padding = 2 }) end,
  conv2d_groups = function(x, w, b)
    return F.conv2d(x, w, b, { stride = { 2, 1 }, padding = { 0, 2 }, dilation = { 1, 2 }, groups = 2 })
  end,
  conv2d_far = function(x, w, b) return F.conv2d(x, w, b, { stride = 3, padding = 4 }) end,
  conv2d_depth = function(x, w, b) return F.conv2d(x, w, b, { stride = 2, padding = 1, groups = 4 }) end,
  conv2d_same = function(x, w) return F.conv2d(x, w, { padding = "same", dilation = { 1, 3 } }) end,
  conv2d_valid = function(x, w) return F.conv2d(x, w, { padding = "valid" }) end,
  conv3d = function(x, w, b) return F.conv3d(x, w, b, { padding = 1 }) end,
  conv3d_groups = function(x, w)
    return F.conv3d(x, w, { stride = { 2, 1, 2 }, padding = { 1, 0, 1 }, dilation = { 1, 2, 1 }, groups = 2 })
  end,
  conv3d_same = function(x, w) return F.conv3d(x, w, { padding = "same" }) end,
  conv_transpose1d = F.conv_transpose1d,
  conv_transpose1d_groups = function(x, w, b)
    return F.conv_transpose1d(x, w, b, { stride = 3, padding = 1, output_padding = 2, groups = 2, dilation = 2 })
  end,
  conv_transpose2d = function(x, w, b)
    return F.conv_transpose2d(x, w, b, { stride = 2, padding = 1, output_padding = 1 })
  end,
  conv_transpose2d_pairs = function(x, w)
    return F.conv_transpose2d(x, w, { stride = { 1, 3 }, padding = { 0, 1 }, output_padding = { 0, 2 },
      dilation = { 2, 1 } })
  end,
  conv_transpose2d_unbatched = function(x, w, b) return F.conv_transpose2d(x, w, b, { groups = 2 }) end,
  conv_transpose3d = function(x, w, b)
    return F.conv_transpose3d(x, w, b, { stride = { 2, 1, 2 }, padding = { 1, 0, 1 }, output_padding = { 1, 0, 0 } })
  end,
  output_size = function(x)
    return layer("ConvTranspose2d", 2, 3, 3, { stride = 2, padding = 1 })(x, { 6, 7 })
  end,
}
for _, mode in ipairs { "reflect", "replicate", "circular" } do
  cases["layer1d_" .. mode] = layer("Conv1d", 2, 3, 3, { padding = 2, padding_mode = mode })
  cases["layer2d_" .. mode] = layer("Conv2d", 2, 3, { 3, 2 }, { padding = { 1, 2 }, stride = 2, padding_mode = mode })
  cases["layer2d_same_" .. mode] = layer("Conv2d", 2, 1, { 2, 3 }, { padding = "same", padding_mode = mode })
  cases["layer3d_" .. mode] = layer("Conv3d", 1, 2, 2, { padding = 1, padding_mode = mode })
end

golden_cases("conv", cases)
