-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn
local F = nn.F
local close = ms.testing.assert_close
local message = require "spec.support.message"

local f64 = { dtype = "float64" }

-- The convolution by definition, element by element. o: stride, padding {top, left, bottom, right}, dilation, groups.
local function by_hand(x, w, b, o)
  local X, W, B = x:tolist(), w:tolist(), b and b:tolist()
  local N, H, V = x:size(1), x:size(3), x:size(4)
  local O, C, KH, KW = w:size(1), w:size(2), w:size(3), w:size(4)
  local p, s, d = o.padding, o.stride, o.dilation
  local OH = math.floor((H + p[1] + p[3] - d[1] * (KH - 1) - 1) / s[1]) + 1
  local OW = math.floor((V + p[2] + p[4] - d[2] * (KW - 1) - 1) / s[2]) + 1
  local out = {}
  for n = 1, N do
    out[n] = {}
    for k = 1, O do
      local group = math.floor((k - 1) / (O / o.groups))
      out[n][k] = {}
      for i = 1, OH do
        out[n][k][i] = {}
        for j = 1, OW do
          local sum = B and B[k] or 0
          for c = 1, C do
            for a = 1, KH do
              for e = 1, KW do
                local row = X[n][group * C + c][(i - 1) * s[1] - p[1] + (a - 1) * d[1] + 1]
                local v = row and row[(j - 1) * s[2] - p[2] + (e - 1) * d[2] + 1]
                if v then sum = sum + v * W[k][c][a][e] end
              end
            end
          end
          out[n][k][i][j] = sum
        end
      end
    end
  end
  return ms.tensor(out, f64)
end

describe("conv2d", function()
  before_each(function() ms.manual_seed(5) end)

  for _, case in ipairs {
    { "plain", {}, { 1, 1 }, { 0, 0, 0, 0 }, { 1, 1 }, 1 },
    { "strided", { stride = 2 }, { 2, 2 }, { 0, 0, 0, 0 }, { 1, 1 }, 1 },
    { "padded", { padding = 1 }, { 1, 1 }, { 1, 1, 1, 1 }, { 1, 1 }, 1 },
    { "padded beyond the kernel", { padding = 4, stride = 3 }, { 3, 3 }, { 4, 4, 4, 4 }, { 1, 1 }, 1 },
    { "dilated", { dilation = 2 }, { 1, 1 }, { 0, 0, 0, 0 }, { 2, 2 }, 1 },
    { "with a pair of everything", { stride = { 2, 1 }, padding = { 0, 2 }, dilation = { 1, 2 } }, { 2, 1 },
    { 0, 2, 0, 2 }, { 1, 2 }, 1 },
    { "in groups", { groups = 2 }, { 1, 1 }, { 0, 0, 0, 0 }, { 1, 1 }, 2 },
    { "by depth", { groups = 4, padding = 1, stride = 2 }, { 2, 2 }, { 1, 1, 1, 1 }, { 1, 1 }, 4 },
    { "to the same size", { padding = "same" }, { 1, 1 }, { 1, 0, 1, 1 }, { 1, 1 }, 1 },
    { "dilated to the same size", { padding = "same", dilation = { 1, 3 } }, { 1, 1 }, { 1, 1, 1, 2 }, { 1, 3 }, 1 },
    { "valid", { padding = "valid" }, { 1, 1 }, { 0, 0, 0, 0 }, { 1, 1 }, 1 },
  } do
    local name, given, stride, padding, dilation, groups = unpack(case)
    it("is the definition's sum: " .. name, function()
      local o = { stride = stride, padding = padding, dilation = dilation, groups = groups }
      local x, w, b = ms.randn(2, 4, 7, 8, f64), ms.randn(8, 4 / groups, 3, 2, f64), ms.randn(8, f64)
      for _, bias in ipairs { b, false } do
        local expected = by_hand(x, w, bias or nil, o)
        close(F.conv2d(x, w, bias or nil, given), expected, { rtol = 1e-10, atol = 1e-10 })
        close(F.conv2d(x:float(), w:float(), bias and bias:float() or nil, given), expected:float(),
          { rtol = 1e-4, atol = 1e-4 })
      end
      close(F.conv2d(x[1], w, b, given), by_hand(x:narrow(1, 1, 1), w, b, o)[1], { rtol = 1e-10, atol = 1e-10 })
    end)
  end

  it("of half types rounds once", function()
    local x, w, b = ms.randn(2, 4, 7, 8), ms.randn(8, 4, 3, 3), ms.randn(8)
    for _, dtype in ipairs { "bfloat16", "float16" } do
      local y = F.conv2d(x:to(dtype), w:to(dtype), b:to(dtype))
      local exact = F.conv2d(x:to(dtype):double(), w:to(dtype):double(), b:to(dtype):double())
      assert.are.equal(dtype, y.dtype)
      close(y:double(), exact, { rtol = dtype == "float16" and 2 ^ -10 or 2 ^ -7, atol = 1e-5 })
    end
  end)

  it("does not depend on the number of threads", function()
    local x, w = ms.randn(3, 8, 20, 20), ms.randn(16, 8, 3, 3)
    local function all(n)
      local before = ms.num_threads()
      ms.set_num_threads(n)
      local a, c = x:clone():requires_grad_(true), w:clone():requires_grad_(true)
      local y = F.conv2d(a, c, { padding = 1 })
      ;(y * y):sum():backward()
      ms.set_num_threads(before)
      return y:detach(), a.grad, c.grad
    end
    local y1, a1, c1 = all(1)
    local y2, a2, c2 = all(2)
    assert.is_true(y1:equal(y2) and a1:equal(a2) and c1:equal(c2))
  end)
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
