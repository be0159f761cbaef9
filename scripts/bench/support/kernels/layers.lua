-- SPDX-License-Identifier: MIT
--- More cases of scripts/bench/kernels: layers, optimizers and transforms, as scripts call them.
---
--- A case: name, bytes, vector instructions of 16 elements of float32 (as in kernels/cpu.lua; a multiply-add is one),
--- run, and why it may take more than 1.5 times its limit.
local ms = require "moonshard"
local F = ms.nn.F
local M = {}

local EXP = 21
local ATTENTION = "exponentials between products; tiles on the diagonal are half masked"
local GROUPS = "images are copied to and from oneDNN's layouts for 32 channels a group"
local ALONE = "a channel alone: sums stay in memory, 8 elements of the kernel at a time"
local SMALL = "products of 64 rows: operands are packed as long as they are multiplied"
local FEW = "3 to 16 channels: oneDNN's layouts are for multiples of 16"
local AGAIN = "reads each channel again from L1"
local LINES = "5 passes and a transposition through L1, whose loads and stores are as many as their arithmetic"
local BLENDS = "all three cases of the sign, blended"
local SERIAL = "each time step needs the one before"
local SORT = "log2(n) passes over keys and positions"

--- quick: sizes for the format only.
function M.cases(quick)
  local list = {}
  local function case(name, bytes, ops, run, why)
    list[#list + 1] = { name = name, bytes = bytes, ops = ops, why = why, run = function()
      ms.scope(function() run() end)                                   -- what run returns must not leave the scope
    end }
  end
  -- The call, and its gradients; factor: of the forward's arithmetic.
  local function both(name, bytes, ops, leaves, call, why, factor)
    case(name, bytes, ops, function() ms.no_grad(call) end, why)
    for _, leaf in ipairs(leaves) do leaf:requires_grad_() end
    local y = call()
    local g = ms.randn(y.shape)
    case("backward of " .. name, 2 * bytes, (factor or 2) * ops, function()
      ms.grad(y, leaves, { grad_outputs = g, retain_graph = true })
    end, why)
  end

  -- ---- convolutions. Arithmetic: a multiply-add for each output, channel and element of the kernel
  local N = quick and 1 or 8
  for _, c in ipairs {
    -- dimensions, batch, channels, output channels, size, kernel, stride, groups
    { 1, N, 64, 64, 1024, 3, 1, 1, SMALL }, { 2, N, 64, 64, 32, 3, 1, 1 }, { 2, N, 64, 128, 32, 3, 2, 1, SMALL },
    { 2, N, 256, 64, 32, 1, 1, 1, SMALL }, { 2, N, 3, 64, 64, 7, 2, 1, FEW }, { 3, N / 4, 16, 16, 16, 3, 1, 1, FEW },
    { 2, N, 64, 64, 32, 3, 1, 64, ALONE }, { 2, N, 128, 128, 32, 3, 1, 4, GROUPS },
  } do
    local d, batch, channels, out, size, kernel, stride, groups, why = unpack(c, 1, 9)
    batch = math.max(1, batch)
    local shape, weight = { batch, channels }, { out, channels / groups }
    for k = 1, d do shape[2 + k], weight[2 + k] = size, kernel end
    local x, w = ms.randn(shape), ms.randn(weight)
    local outputs = batch * out * (size / stride) ^ d
    local how = (stride > 1 and ", stride " .. stride or "") .. (groups > 1 and (", %d groups"):format(groups) or "")
    both(("conv%dd %d to %d, kernel %d%s"):format(d, channels, out, kernel, how), 4 * (x:numel() + outputs),
      outputs * channels / groups * kernel ^ d / 16, { x, w }, function()
        return F["conv" .. d .. "d"](x, w, nil, { stride = stride, padding = math.floor(kernel / 2), groups = groups })
      end, why)
  end

  -- ---- attention. Arithmetic: two products and an exponential for each pair of a query and a key
  local B, T = quick and 1 or 4, quick and 32 or 256
  local function heads(t) return ms.randn(B, 12, t, 64) end
  local q, k, v, pairs_of = heads(T), heads(T), heads(T), B * 12 * T * T
  for _, causal in ipairs { false, true } do
    both(causal and "attention, causal" or "attention", 4 * 4 * q:numel(), pairs_of * (128 + EXP) / 16 * (causal and 0.5
      or 1), { q, k, v }, function() return F.scaled_dot_product_attention(q, k, v, { is_causal = causal }) end,
      ATTENTION, 2.5)
  end
  local one, keys, values = heads(1), heads(2 * T), heads(2 * T)
  case("attention, one query", 4 * 2 * keys:numel(), 0, function()
    ms.no_grad(function() return F.scaled_dot_product_attention(one, keys, values) end)
  end)

  -- ---- norms of images, losses
  local images, w, b = ms.randn(4 * N, 64, 32, 32), ms.randn(64), ms.randn(64)
  local n = images:numel()
  both("group_norm, 8 groups", 8 * n, 0.5 * n, { images, w, b }, function()
    return F.group_norm(images, 8, w, b)
  end, AGAIN)
  both("instance_norm", 8 * n, 0.5 * n, { images, w, b }, function()
    return F.instance_norm(images, nil, nil, w, b)
  end, AGAIN)
  local hidden, vocabulary = ms.randn(64 * N, 256):mul(1 / 16), ms.randn(2048, 256)
  local classes = ms.randint(0, 2048, { 64 * N })
  both("linear_cross_entropy", 4 * hidden:numel(), 64 * N * 2048 * (256 + EXP) / 16, { hidden, vocabulary }, function()
    return F.linear_cross_entropy(hidden, vocabulary, classes)
  end, nil, 3)
  local steps = quick and 16 or 256
  local log_probs = ms.randn(steps, N, 64):log_softmax(3)
  local lengths = {}
  for sample = 1, N do lengths[sample] = sample % 2 == 0 and 32 or 16 end
  local most = ms.full({ N }, steps, { dtype = "int64" })
  local targets = ms.randint(1, 64, { N, 32 })
  both("ctc_loss", 4 * log_probs:numel(), 65 * N * steps * 3 * (EXP + 27) / 16, { log_probs }, function()
    return F.ctc_loss(log_probs, targets, most, ms.tensor(lengths, { dtype = "int64" }):clamp(1, steps / 4))
  end, SERIAL)

  -- ---- optimizers: a float32 parameter, its gradient and its state, each read, and all but the gradient written
  local size = quick and 2 ^ 16 or 2 ^ 21
  for _, o in ipairs {
    { "SGD", 0, 2, { lr = 0.1 } }, { "SGD", 1, 4, { lr = 0.1, momentum = 0.9 }, " with momentum" },
    { "Adam", 2, 35 }, { "Adam", 3, 36, { amsgrad = true }, " with amsgrad" }, { "AdamW", 2, 36 }, { "NAdam", 2, 40 }, { "RAdam", 2, 45 }, { "Adamax", 2, 30 },
    { "RMSprop", 1, 30 }, { "Adagrad", 1, 28 }, { "Adadelta", 2, 50 }, { "Rprop", 2, 20, nil, nil, BLENDS }, { "ASGD", 1, 10 },
  } do
    local p = ms.nn.Parameter(ms.randn(size))
    local optimizer = ms.optim[o[1]]({ p }, o[4] or { lr = 1e-3 })
    p.grad = ms.randn(size)
    case(o[1] .. (o[5] or ""), (3 + 2 * o[2]) * 4 * size, o[3] * size / 16, function() optimizer:step() end, o[6])
  end
  local clipped = ms.nn.Parameter(ms.randn(size))
  clipped.grad = ms.randn(size)
  case("clip_grad_norm_", 12 * size, 2 * size / 16, function() ms.nn.utils.clip_grad_norm_({ clipped }, 1) end)

  -- ---- transforms: 5 n log2(n) operations, two a multiply-add
  local rows, length = quick and 8 or 512, 1024
  local complex, real = ms.randn(rows, length, 2), ms.randn(2 * rows, length)
  local fft_ops = rows * length * 10 * 5 / 2 / 16
  case("fft of 1024", 16 * rows * length, fft_ops, function() return ms.fft.fft(complex) end, LINES)
  case("rfft of 1024", 16 * rows * length, fft_ops, function() return ms.fft.rfft(real) end, LINES)
  case("fft of 1000", 16 * rows * length, fft_ops, function() return ms.fft.fft(complex:narrow(2, 1, 1000)) end, LINES)
  case("fft2 of 64 x 64", 16 * rows * length, fft_ops * 1.2, function()
    return ms.fft.fft2(complex:reshape(-1, 64, 64, 2))
  end, LINES)

  -- ---- order
  local x = ms.randn(2 * rows, length)
  local whole = ms.randint(0, 2 ^ 20, { 2 * rows, length })
  case("sort of int64", 24 * x:numel(), 0, function() return whole:sort(2) end, SORT)
  case("sort of rows", 16 * x:numel(), 0, function() return x:sort(1) end, SORT)
  case("median of all", 4 * x:numel(), 0, function() return x:median() end, SORT)
  case("cumsum of images", 8 * n, n / 4, function() return ms.no_grad(function() return images:cumsum(2) end) end,
    "adds in float64")
  return list
end

return M
