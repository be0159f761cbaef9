#!/usr/bin/env luajit
-- SPDX-License-Identifier: MIT
--- Rates of device cuda, for scripts/gpu_check: copies, products, attention, kernels against the bytes that they must
--- move, and steps of small models. The host measures many calls followed by one synchronisation; the best of several
--- such times counts.
---
---   luajit scripts/bench/support/gpu.lua [--group NAME] [--quick]   measures; --quick: tiny sizes
---   MOONSHARD_CUDA=null luajit scripts/bench/support/gpu.lua --predict FILE
---
--- Each result is a line, and a line of JSON appended to the file $MOONSHARD_RATES. --predict writes predicted times
--- (scripts/bench/support/predict.lua) instead, for a step of GPT-2 and for the cases that neither the host nor
--- the bus limits; it needs nvcc but no GPU.
--- peer_gpu.py has the same cases in PyTorch.
local root = arg[0]:match "^(.*)scripts/bench/" or "./"
package.path = ("@lua/?.lua;@lua/?/init.lua;@scripts/bench/support/?.lua;"):gsub("@", root) .. package.path
local cjson = require "cjson"
local ms = require "moonshard"
local nn, F = ms.nn, ms.nn.F

local group, quick, file = nil, false, nil
local at = 1
while arg[at] do
  if arg[at] == "--quick" then quick = true
  elseif arg[at] == "--group" then group, at = arg[at + 1], at + 1
  elseif arg[at] == "--predict" then file, at = arg[at + 1], at + 1
  else error("gpu.lua: unknown option '" .. arg[at] .. "'", 0) end
  at = at + 1
end
if not ms.cuda.is_available() then
  io.stderr:write("gpu: ", ms.cuda.why_unavailable(), "\n")
  os.exit(1)
end
ms.manual_seed(1)

local function on(dtype, grad) return { device = "cuda", dtype = dtype, requires_grad = grad } end
local BF16, F32 = "bfloat16", "float32"

-- ---- cases: group, name, what a call moves or computes, make (makes the tensors and returns the call) ----

local cases = {}
local function case(in_group, name, what, make)
  what.group, what.name, what.make = in_group, name, make
  table.insert(cases, what)
end

local n = quick and 4096 or 64 * 2 ^ 20                  -- without --quick 256 MiB of float32, above any cache
local C = quick and 64 or 1024
local function rows(dtype) return ms.randn(n / C, C, on(dtype)) end

case("memory", "host to device, pageable", { bytes = 4 * n, unpredicted = true }, function()
  local x, host = rows(F32), ms.randn(n / C, C)
  return function() x:copy_(host) end
end)
case("memory", "device to host, pageable", { bytes = 4 * n, unpredicted = true }, function()
  local x, host = rows(F32), ms.empty(n / C, C)
  return function() host:copy_(x) end
end)
case("memory", "copy on the device", { bytes = 8 * n }, function()
  local x, y = rows(F32), rows(F32)
  return function() y:copy_(x) end
end)
case("memory", "launch of add_, 16 elements", { calls = 2000, unpredicted = true }, function()
  local small = ms.ones(16, on(F32))
  return function() small:add_(1) end
end)

for _, size in ipairs(quick and { 64 } or { 4096, 8192 }) do
  case("products", ("matmul %d, bfloat16"):format(size), { flops = 2 * size ^ 3, bar = "products" }, function()
    local a, b = ms.randn(size, size, on(BF16)), ms.randn(size, size, on(BF16))
    return function() return a:matmul(b) end
  end)
end
case("products", "matmul 4096, float32", { flops = 2 * (quick and 64 or 4096) ^ 3 }, function()
  local size = quick and 64 or 4096
  local a, b = ms.randn(size, size, on(F32)), ms.randn(size, size, on(F32))
  return function() return a:matmul(b) end
end)
-- The linear layers of GPT-2 124M, on 8 x 1024 tokens (--quick: tiny ones).
local M = quick and 32 or 8192
for _, s in ipairs { { 768, 2304 }, { 768, 768 }, { 768, 3072 }, { 3072, 768 }, { 768, 50304 } } do
  local K, N = s[1], s[2]
  local k, m = quick and 16 or K, quick and 24 or N
  case("products", ("linear 8192 x %d x %d, bfloat16"):format(K, N), { flops = 2 * M * k * m, bar = "products" },
    function()
      local x, w = ms.randn(M, k, on(BF16)), ms.randn(m, k, on(BF16))
      local bias = N < 50304 and ms.randn(m, on(BF16)) or nil
      return function() return F.linear(x, w, bias) end
    end)
end

-- With MOONSHARD_CUDNN=off, and in predictions, attention runs on our own kernels.
local own = (file or os.getenv "MOONSHARD_CUDNN" == "off") and ", own kernels" or ""
for _, s in ipairs { { 64, 1024, 96 }, { 64, 8192, 12 }, { 128, 1024, 48 }, { 128, 8192, 6 } } do
  local D, T, H = s[1], s[2], s[3]
  local d, t, h = quick and 8 or D, quick and 16 or T, quick and 2 or H
  local name = ("attention %d x %d x %d, causal, bfloat16"):format(H, T, D)
  case("attention", name .. own, { flops = 2 * h * t * t * d, bar = own == "" and "attention" or "attention_forward" },
    function()
    local q, k, v = ms.randn(1, h, t, d, on(BF16)), ms.randn(1, h, t, d, on(BF16)), ms.randn(1, h, t, d, on(BF16))
    return function()
      return ms.no_grad(function() return F.scaled_dot_product_attention(q, k, v, { is_causal = true }) end)
    end
  end)
  case("attention", name .. ", with backward" .. own, { flops = 7 * h * t * t * d,
    bar = own == "" and "attention" or "attention_backward" }, function()
    local function leaf() return ms.randn(1, h, t, d, on(BF16, true)) end
    local q, k, v, g = leaf(), leaf(), leaf(), ms.randn(1, h, t, d, on(BF16))
    return function() F.scaled_dot_product_attention(q, k, v, { is_causal = true }):backward(g) end
  end)
end

case("kernels", "add, float32", { bytes = 12 * n, bar = "copy" }, function()
  local x, y = rows(F32), rows(F32)
  return function() return x + y end
end)
case("kernels", "transposed copy, float32", { bytes = 8 * n, bar = "copy" }, function()
  local x = rows(F32)
  return function() return x:t():contiguous() end
end)
case("kernels", "sum of all, float32", { bytes = 4 * n, bar = "copy" }, function()
  local x = rows(F32)
  return function() return x:sum() end
end)
for _, dtype in ipairs { F32, BF16 } do
  local size = dtype == F32 and 4 or 2
  local function named(text) return text .. ", " .. dtype end
  case("kernels", named "gelu tanh", { bytes = 2 * size * n, bar = "copy" }, function()
    local x = rows(dtype)
    return function() return F.gelu(x, { approximate = "tanh" }) end
  end)
  case("kernels", named "bias added to rows", { bytes = 2 * size * n, bar = "copy" }, function()
    local x, b = rows(dtype), ms.randn(C, on(dtype))
    return function() return x + b end
  end)
  case("kernels", named "column sums", { bytes = size * n, bar = "copy_backward" }, function()
    local x = rows(dtype)
    return function() return x:sum(1) end
  end)
  case("kernels", named "softmax of rows", { bytes = 2 * size * n, bar = "copy" }, function()
    local x = rows(dtype)
    return function() return x:softmax(-1) end
  end)
  case("kernels", named "dropout", { bytes = 2 * size * n, bar = "copy" }, function()
    local x = rows(dtype)
    return function() return F.dropout(x, 0.1, { training = true }) end
  end)
  case("kernels", named "layer norm", { bytes = 2 * size * n, bar = "copy" }, function()
    local x, w, b = rows(dtype), ms.ones(C, on(dtype)), ms.zeros(C, on(dtype))
    return function() return F.layer_norm(x, { C }, w, b) end
  end)
  case("kernels", named "layer norm with backward", { bytes = 5 * size * n, bar = "copy_backward" }, function()
    local x, w, b = ms.randn(n / C, C, on(dtype, true)), ms.ones(C, on(dtype, true)), ms.zeros(C, on(dtype, true))
    local g = rows(dtype)
    return function() F.layer_norm(x, { C }, w, b):backward(g) end
  end)
end
local V = quick and 64 or 50304
case("kernels", "cross-entropy 8192 x 50304 with backward, bfloat16", { bytes = 6 * M * V, bar = "copy_backward" },
  function()
    local x, ids = ms.randn(M, V, on(BF16, true)), ms.randint(0, V, { M }, { device = "cuda" })
    return function() F.cross_entropy(x, ids):backward() end
  end)
case("kernels", "embedding 8192 of 50304 x 768 with backward, bfloat16", { bytes = 2 * 768 * (4 * M + V) }, function()
  local w, ids = ms.randn(V, 768, on(BF16, true)), ms.randint(0, V, { M }, { device = "cuda" })
  local g = ms.randn(M, 768, on(BF16))
  return function() F.embedding(ids, w):backward(g) end
end)
local count = quick and 1000 or 124e6
case("kernels", "AdamW, 124e6 parameters, float32", { bytes = 28 * count, bar = "copy" }, function()
  local p = nn.Parameter(ms.randn(count, on(F32)))
  p.grad = ms.randn(count, on(F32))
  local optimizer = ms.optim.AdamW({ p }, { lr = 1e-3 })
  return function() optimizer:step() end
end)

-- Steps of models so small that the host's time counts. peer_gpu.py gives PyTorch's eager steps for both kinds.
for _, layers in ipairs { 2, 12 } do
  for _, kind in ipairs { "step", "captured step" } do
    case("steps", ("%s of an MLP of %d layers of 32, batch 8"):format(kind, layers), { calls = 500, unpredicted = true },
      function()
        return ms.with_device("cuda", function()
          local list = {}
          for k = 1, layers do
            list[#list + 1] = nn.Linear(32, 32)
            if k < layers then list[#list + 1] = nn.ReLU() end
          end
          local model = nn.Sequential(list)
          local optimizer = ms.optim.AdamW(model:parameters(), { lr = 1e-3 })
          local function step(x, y)
            optimizer:zero_grad()
            local loss = F.mse_loss(model(x), y)
            loss:backward()
            optimizer:step()
            return loss:detach()
          end
          if kind ~= "step" then step = ms.capture(step) end
          local x, y = ms.randn(8, 32):keep(), ms.randn(8, 32):keep()
          return function() return step(x, y) end
        end)
      end)
  end
end

-- ---- predictions ----

if file then
  local kernels, null, predict = require "kernel_table", require "null_device", require "predict"
  local build = os.getenv "MOONSHARD_BUILD" or "build"
  if build:sub(1, 1) ~= "/" then build = root .. build end
  local table_of, why = kernels.rows(root, build)
  if not table_of then error("gpu: no prediction: " .. why, 0) end
  local opened, closed = null.open(build)
  if not opened then error("gpu: no prediction: " .. closed, 0) end
  local out = { cases = {}, symbols = {}, device = "H200" }
  local function predicted(fn)
    local by_symbol, launches = null.watch(table_of, fn)
    return predict.predict(launches, by_symbol)
  end
  for _, row in ipairs(table_of) do out.symbols[row.symbol] = row.name end
  for _, c in ipairs(cases) do
    if not c.unpredicted then
      ms.scope(function()
        local fn = c.make()
        out.cases[c.name] = predicted(function() ms.scope(fn) end).seconds
      end)
      collectgarbage()
    end
  end
  local total, by_op, by_kernel = predicted(require("gpt2_step").new())
  out.gpt2 = { seconds = total.seconds, operators = by_op, kernels = by_kernel }
  local f = assert(io.open(file, "w"))
  f:write(cjson.encode(out), "\n")
  f:close()
  return
end

-- ---- measurements ----

local RUNS = quick and 1 or 5
--- Seconds per call: `calls` calls and one wait, best of RUNS after one warm-up. Fewer calls if one takes long.
local function time(calls, fn)
  local best = math.huge
  for run = 0, RUNS do
    ms.cuda.synchronize()
    local t = ms.time()
    for _ = 1, run == 0 and 1 or calls do ms.scope(fn) end
    ms.cuda.synchronize()
    t = ms.time() - t
    if run == 0 then
      calls = math.max(1, math.min(calls, math.floor(0.2 / t)))
      best = quick and t or best
    else
      best = math.min(best, t / calls)
    end
  end
  return best
end

print(("%s%s"):format(ms.cuda.device_name(), quick and "; reduced sizes" or ""))
local sink = os.getenv "MOONSHARD_RATES"
local measured = 0
for _, c in ipairs(cases) do
  if not group or c.group == group then
    local seconds
    ms.scope(function() seconds = time(quick and 2 or c.calls or 20, c.make()) end)
    local amount, unit = nil, nil
    if c.bytes then amount, unit = c.bytes / 1e9, "GB/s"
    elseif c.flops then amount, unit = c.flops / 1e12, "TFLOP/s" end
    print(("%-62s %12.1f us%s"):format(c.name, seconds * 1e6, amount and ("  %9.1f %s"):format(amount / seconds, unit)
      or ""))
    io.stdout:flush()
    if sink then
      local f = assert(io.open(sink, "ab"))
      f:write(cjson.encode { rate = c.name, seconds = seconds, value = amount and amount / seconds, unit = unit,
        bar = c.bar }, "\n")
      f:close()
    end
    measured = measured + 1
    collectgarbage()
    collectgarbage()
  end
end
if measured == 0 then
  error(("gpu.lua: --group is '%s', expected memory, products, attention, kernels or steps"):format(group), 0)
end
