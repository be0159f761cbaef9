-- SPDX-License-Identifier: MIT
--- Convolutions beside what golden/conv_spec.lua compares: large ones, layers, dimensions, errors.
local ms = require "moonshard"
local nn = ms.nn
local F = nn.F
local close = ms.testing.assert_close
local message = require "spec.support.message"

local f64 = { dtype = "float64" }

-- In float32 these are large enough for oneDNN's kernels.
describe("large convolutions", function()
  -- Images, channels, sizes, channels of the output, kernel, stride, padding, dilation, groups.
  local cases = {
    { "of parts of 64 channels", 10, 64, { 16, 16 }, 200, { 3, 3 }, 1, 1, 1 },
    { "with channels that fill no vector", 3, 70, { 19, 17 }, 100, { 3, 2 }, 2, 1, 2 },
    { "of 3 x 3 without padding", 5, 64, { 17, 15 }, 96, { 3, 3 }, 1, 0, 1 },
    { "of pictures of one channel", 17, 1, { 28, 28 }, 32, { 3, 3 }, 1, 1, 1 },
    { "of pictures of three channels", 4, 3, { 41, 40 }, 130, { 7, 7 }, 2, 3, 1 },
    { "with a kernel of size 1", 4, 130, { 14, 14 }, 150, { 1, 1 }, 1, 0, 1 },
    { "with a kernel of size 1 that skips pixels", 9, 64, { 17, 16 }, 200, { 1, 1 }, 2, 0, 1 },
    { "of images too large to be copied at once", 11, 33, { 64, 64 }, 64, { 1, 3 }, 1, 0, 1 },
    { "over sequences", 4, 64, { 300 }, 80, { 5 }, 1, 2, 1 },
    { "over volumes", 2, 16, { 9, 9, 9 }, 33, { 3, 3, 3 }, 1, 1, 1 },
    { "over volumes, with a kernel of size 1", 2, 96, { 9, 8, 7 }, 97, { 1, 1, 1 }, 2, 0, 1 },
    { "in 3 groups", 5, 96, { 16, 15 }, 192, { 3, 3 }, 1, 1, 1, 3 },
    { "in 2 groups, with a kernel of size 1", 9, 64, { 33, 32 }, 160, { 1, 1 }, 2, 0, 1, 2 },
    { "in groups that fill no vector", 5, 72, { 16, 15 }, 144, { 3, 3 }, 1, 1, 1, 3 },
  }

  -- The output, and the gradients of x, w and b.
  local function all(f, threads, options, x, w, b)
    local before = ms.num_threads()
    ms.set_num_threads(threads)
    local leaves = {}
    for i, t in ipairs { x, w, b } do leaves[i] = t:clone():requires_grad_(true) end
    local y = f(leaves[1], leaves[2], leaves[3], options)
    y:backward(y:detach() * 0.5)
    ms.set_num_threads(before)
    return { y:detach(), leaves[1].grad, leaves[2].grad, leaves[3].grad }
  end

  for _, case in ipairs(cases) do
    local name, n, size_in, sizes, size_out, kernel, stride, padding, dilation = unpack(case)
    local groups = case[10] or 1
    for _, kind in ipairs { "conv", "conv_transpose" } do
      it(("%s: are float64's up to rounding, with equal bits for 1 and 3 threads (%s%dd)"):format(name, kind, #sizes),
        function()
          ms.manual_seed(7)
          local channels = kind == "conv" and { size_out, size_in } or { size_in, size_out }
          local x, b = ms.randn(n, size_in, unpack(sizes)), ms.randn(size_out)
          local w = ms.randn(channels[1], channels[2] / groups, unpack(kernel))
          local f = F[kind .. #sizes .. "d"]
          local options = { stride = stride, padding = padding, dilation = dilation, groups = groups }
          local one, three = all(f, 1, options, x, w, b), all(f, 3, options, x, w, b)
          local exact = all(f, 2, options, x:double(), w:double(), b:double())
          for k, what in ipairs { "output", "gradient of x", "gradient of w", "gradient of b" } do
            assert.is_true(one[k]:equal(three[k]), what)
            local most = exact[k]:abs():max():item()
            assert.is_true((one[k]:double() - exact[k]):abs():max():item() < 4e-6 * most, what)
          end
        end)
    end
  end
end)

describe("Conv2d", function()
  before_each(function() ms.manual_seed(6) end)

  it("has PyTorch's parameters and initialisation", function()
    local m = nn.Conv2d(6, 32, { 3, 5 }, { groups = 2 })
    assert.are.same({ 32, 3, 3, 5 }, { unpack(m.weight.shape) })
    assert.are.same({ 32 }, { unpack(m.bias.shape) })
    local bound = 1 / math.sqrt(3 * 3 * 5)
    for _, p in ipairs(m:parameters()) do
      local most = p:detach():abs():max():item()
      assert.is_true(most <= bound and most > 0.85 * bound)
    end
    assert.are.equal(1, #nn.Conv2d(1, 1, 3, { bias = false }):parameters())
  end)

  it("convolves, and learns", function()
    local m = nn.Conv2d(3, 4, 3, { stride = 2, padding = 1 })
    local x = ms.randn(2, 3, 8, 8)
    local y = m(x)
    assert.are.same({ 2, 4, 4, 4 }, { unpack(y.shape) })
    close(y, F.conv2d(x, m.weight, m.bias, { stride = 2, padding = 1 }))
    y:sum():backward()
    close(m.bias.grad, ms.full({ 4 }, 32))
    assert.are.same({ 4, 4, 4 }, { unpack(m(x[1]).shape) })
  end)

  it("prints what it is", function()
    assert.are.equal("Conv2d(3 -> 8, kernel 3, bias)", tostring(nn.Conv2d(3, 8, 3)))
    assert.are.equal("Conv2d(4 -> 8, kernel 3x5, stride 2, padding 1x2, dilation 2, groups 4)",
      tostring(nn.Conv2d(4, 8, { 3, 5 }, { stride = 2, padding = { 1, 2 }, dilation = 2, groups = 4, bias = false })))
    assert.are.equal("Conv2d(3 -> 8, kernel 3, padding same, bias)", tostring(nn.Conv2d(3, 8, 3, { padding = "same" })))
  end)

  it("names arguments that do not fit", function()
    assert.are.equal("in_channels must be divisible by groups, got in_channels=3 and groups=2 instead",
      message(nn.Conv2d, 3, 4, 3, { groups = 2 }))
    assert.are.equal("out_channels must be divisible by groups, got out_channels=3 and groups=2 instead",
      message(nn.Conv2d, 4, 3, 3, { groups = 2 }))
    assert.are.equal("groups must be a positive integer, got 0", message(nn.Conv2d, 4, 3, 3, { groups = 0 }))
    assert.truthy(message(nn.Conv2d, 4, 3, "3"):find("expected a whole number or a pair", 1, true))
    assert.truthy(message(nn.Conv2d, 4, 3, 3, { padding = "sane" }):find(
      "Invalid padding string 'sane', should be one of 'valid', 'same'", 1, true))
    assert.truthy(message(nn.Conv2d, 4, 3, 3, { padding = "same", stride = 2 })
      :find("padding='same' is not supported for strided convolutions", 1, true))
    local m = nn.Conv2d(3, 4, 3)
    assert.truthy(message(m, ms.zeros(2, 5, 8, 8)):find(
      "Given groups=1, weight of size [4, 3, 3, 3], expected input[2, 5, 8, 8] to have 3 channels, "
      .. "but got 5 channels instead", 1, true))
    assert.truthy(message(m, ms.zeros(2, 3, 2, 8)):find(
      "Calculated padded input size per channel: (2 x 8). Kernel size: (3 x 3). "
      .. "Kernel size can't be greater than actual input size", 1, true))
    assert.are.equal("Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: [3, 8]",
      message(m, ms.zeros(3, 8)))
  end)
end)

describe("convolutions over 1 to 3 dimensions", function()
  before_each(function() ms.manual_seed(7) end)

  it("are those of images where a dimension has size 1", function()
    local x, w, b = ms.randn(2, 4, 9, f64), ms.randn(6, 2, 3, f64), ms.randn(6, f64)
    local flat = F.conv2d(x:unsqueeze(3), w:unsqueeze(3), b, { stride = { 1, 2 }, padding = { 0, 1 }, groups = 2 })
    close(F.conv1d(x, w, b, { stride = 2, padding = 1, groups = 2 }), flat:squeeze(3))
    close(F.conv3d(x:reshape(2, 4, 1, 1, 9), w:reshape(6, 2, 1, 1, 3), b,
      { stride = { 1, 1, 2 }, padding = { 0, 0, 1 }, groups = 2 }), flat:unsqueeze(3))
  end)

  it("sum over the depth of the kernel", function()
    local x, w = ms.randn(2, 3, 5, 4, 6, f64), ms.randn(4, 3, 2, 3, 2, f64)
    local y = F.conv3d(x, w, { dilation = { 2, 1, 1 } })
    for d = 1, 3 do
      local expected = F.conv2d(x:select(3, d), w:select(3, 1)) + F.conv2d(x:select(3, d + 2), w:select(3, 2))
      close(y:select(3, d), expected, { rtol = 1e-12, atol = 1e-12 })
    end
  end)

  -- <conv(x), y> = <x, transposed(y)> for all x and y.
  for d, case in ipairs {
    { { 2, 4, 9 }, { 6, 2, 3 }, { stride = 2, padding = 1, dilation = 2, groups = 2 } },
    { { 2, 4, 7, 6 }, { 6, 2, 3, 2 }, { stride = { 2, 1 }, padding = { 1, 0 }, groups = 2 } },
    { { 1, 3, 4, 5, 4 }, { 2, 3, 2, 3, 2 }, { stride = { 1, 2, 2 }, padding = { 1, 1, 0 } } },
  } do
    it(("are adjoint to the transposed ones, over %d dimensions"):format(d), function()
      local shape, kernel, o = unpack(case)
      local x, w = ms.randn(shape, f64), ms.randn(kernel, f64)
      local y = F[("conv%dd"):format(d)](x, w, o)
      local g = ms.randn(y.shape, f64)
      local back = { stride = o.stride, padding = o.padding, dilation = o.dilation, groups = o.groups,
        output_padding = {} }
      local function at(v, k) return type(v) == "table" and v[k] or v or 0 end
      for k = 1, d do                                     -- elements at the end that no position of the kernel reads
        local reach = (shape[k + 2] + 2 * at(o.padding, k) - at(o.dilation or 1, k) * (kernel[k + 2] - 1) - 1)
        back.output_padding[k] = reach % at(o.stride, k)
      end
      local z = F[("conv_transpose%dd"):format(d)](g, w, back)
      assert.are.same(shape, { unpack(z.shape) })
      close((z * x):sum(), (y * g):sum(), { rtol = 1e-10, atol = 1e-10 })
    end)
  end

  it("of half types round once, transposed ones too", function()
    local x, w = ms.randn(2, 4, 7, 8), ms.randn(4, 4, 3, 3)
    for _, name in ipairs { "conv2d", "conv_transpose2d" } do
      for _, dtype in ipairs { "bfloat16", "float16" } do
        local low, b = { x:to(dtype), w:to(dtype) }, ms.randn(4):to(dtype)
        local y = F[name](low[1], low[2], b, { stride = 2 })
        local exact = F[name](low[1]:double(), low[2]:double(), b:double(), { stride = 2 })
        assert.are.equal(dtype, y.dtype)
        close(y:double(), exact, { rtol = dtype == "float16" and 2 ^ -10 or 2 ^ -7, atol = 1e-5 })
      end
    end
  end)

  it("have PyTorch's parameters and initialisation", function()
    for name, case in pairs {
      Conv1d = { { 32, 3, 5 }, 5, 15 }, Conv3d = { { 32, 3, 2, 3, 2 }, { 2, 3, 2 }, 36 },
      ConvTranspose1d = { { 6, 16, 5 }, 5, 80 }, ConvTranspose2d = { { 6, 16, 3, 2 }, { 3, 2 }, 96 },
      ConvTranspose3d = { { 6, 16, 2, 2, 2 }, 2, 128 },
    } do
      local m = nn[name](6, 32, case[2], { groups = 2 })
      assert.are.same(case[1], { unpack(m.weight.shape) })
      assert.are.same({ 32 }, { unpack(m.bias.shape) })
      local bound = 1 / math.sqrt(case[3])
      for _, p in ipairs(m:parameters()) do
        local most = p:detach():abs():max():item()
        assert.is_true(most <= bound and most > 0.8 * bound, name)
      end
    end
  end)

  it("print what they are", function()
    assert.are.equal("Conv1d(3 -> 8, kernel 5, padding 2, circular, bias)",
      tostring(nn.Conv1d(3, 8, 5, { padding = 2, padding_mode = "circular" })))
    assert.are.equal("Conv3d(3 -> 8, kernel 1x3x3, padding 0x1x1)",
      tostring(nn.Conv3d(3, 8, { 1, 3, 3 }, { padding = { 0, 1, 1 }, bias = false })))
    assert.are.equal("ConvTranspose2d(8 -> 4, kernel 3, stride 2, padding 1, output padding 1, bias)",
      tostring(nn.ConvTranspose2d(8, 4, 3, { stride = 2, padding = 1, output_padding = 1 })))
  end)

  it("learn", function()
    local m = nn.Sequential(nn.Conv1d(1, 4, 3, { padding = "same", padding_mode = "circular" }), nn.Tanh(),
      nn.ConvTranspose1d(4, 1, 2, { stride = 2 }))
    local optimizer = ms.optim.Adam(m:parameters(), { lr = 0.02 })
    local x = ms.rand(8, 1, 6)
    local target = F.conv_transpose1d(x, ms.ones(1, 1, 2), { stride = 2 })
    local first, last
    for _ = 1, 100 do
      local loss = F.mse_loss(m(x), target)
      optimizer:zero_grad()
      loss:backward()
      optimizer:step()
      first, last = first or loss:item(), loss:item()
    end
    assert.is_true(last < 0.05 * first, ("%g, then %g"):format(first, last))
  end)

  for _, case in ipairs {
    { function() return F.conv1d(ms.ones(3), ms.ones(1, 3, 2)) end,
      "Expected 2D (unbatched) or 3D (batched) input to conv1d, but got input of size: [3]" },
    { function() return F.conv1d(ms.ones(1, 3, 2), ms.ones(1, 3, 3)) end,
      "Calculated padded input size per channel: (2). Kernel size: (3). Kernel size can't be greater than actual input size" },
    { function() return F.conv3d(ms.ones(1, 3, 2, 2, 2), ms.ones(1, 3, 2, 2)) end,
      "conv3d: the weight must be [out, in / groups, depth, height, width]" },
    { function() return F.conv1d(ms.ones(1, 3, 2), ms.ones(1, 3, 2), { stride = { 1, 2 } }) end,
      "conv1d: option 'stride' is a table, expected a whole number" },
    { function() return F.conv2d(ms.ones(1, 3, 2, 2), ms.ones(1, 3, 2, 2), { strides = 2 }) end,
      "conv2d: unknown option 'strides'" },
    { function() return F.conv2d(ms.ones(1, 3, 2, 2), ms.ones(1, 3, 2, 2), { stride = 0 }) end,
      "conv2d: the stride must be from 1 to 2147483647, got 0" },
    { function() return F.conv_transpose2d(ms.ones(1, 3, 4, 4), ms.ones(4, 3, 2, 2)) end,
      "weight of size [4, 3, 2, 2], expected input[1, 3, 4, 4] to have 4 channels" },
    { function() return F.conv_transpose1d(ms.ones(1, 3, 4), ms.ones(3, 1, 2), { output_padding = 1 }) end,
      "output padding must be at least 0 and smaller than either stride or dilation, but got output_padding 1, stride 1" },
    { function() return F.conv_transpose1d(ms.ones(1, 3, 2), ms.ones(3, 1, 2), { padding = 3 }) end,
      "dimension 3 of the input [1, 3, 2] gives no valid output size" },
    { function() return F.conv_transpose1d(ms.ones(1, 3, 2), ms.ones(3, 1, 2), ms.ones(2)) end,
      "the bias must be [1], got [2]" },
    { function() return F.conv_transpose2d(ms.ones(1, 3, 4, 4), ms.ones(3, 3, 2, 2), { padding = "same" }) end,
      "conv_transpose2d: option 'padding' is a string ('same'), expected a whole number or a pair of them" },
    { function() return nn.ConvTranspose2d(1, 1, 2, { padding_mode = "reflect" }) end,
      "ConvTranspose2d: option 'padding_mode' is 'reflect', expected 'zeros'" },
    { function() return nn.ConvTranspose1d(1, 1, 3, { stride = 2 })(ms.ones(1, 1, 4), { 11 }) end,
      "output size 11 of spatial dimension 1, expected a size from 9 to 10 for the input [1, 1, 4]" },
    { function() return nn.ConvTranspose1d(1, 1, 3)(ms.ones(1, 1, 4), { 1, 2 }) end,
      "argument 2, the output size, is a table, expected a list of 1 size, or of all sizes of the output" },
    { function() return nn.Conv1d(1, 1, 3, { padding = 4, padding_mode = "reflect" })(ms.ones(1, 1, 4)) end,
      "Padding size should be less than the corresponding input dimension, but got: padding (4, 4) at dimension 3 of input [1, 1, 4]" },
    { function() return nn.Conv1d(1, 1, 3, { padding_mode = "mirror" }) end,
      "option 'padding_mode' is 'mirror', expected" },
    { function() return nn.Conv1D(1, 1, 3) end, "did you mean 'Conv1d'" },
    { function() return F.conv_transposed2d(1, 1, 3) end, "did you mean 'conv_transpose2d'" },
  } do
    it("name what does not fit: " .. case[2], function()
      local text = message(case[1])
      assert.truthy(text:find(case[2], 1, true), text)
    end)
  end
end)
