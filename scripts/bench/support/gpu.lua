-- SPDX-License-Identifier: MIT
--- Rates of device cuda: copies, kernels against the bytes they must move, products, launches, a step of GPT-2. Called
--- by scripts/gpu_check; `--quick` shrinks every size. A time is that of many calls and one wait, measured on the host;
--- the best of several.
local root = arg[0]:match "^(.*)scripts/bench/" or "./"
package.path = ("@lua/?.lua;@lua/?/init.lua;"):gsub("@", root) .. package.path
local ms = require "moonshard"
local nn, F = ms.nn, ms.nn.F
local quick = arg[1] == "--quick"
local device = "cuda"
if not ms.cuda.is_available() then
  io.stderr:write("gpu: ", ms.cuda.why_unavailable(), "\n")
  os.exit(1)
end
print(("%s%s"):format(ms.cuda.device_name(), quick and "; sizes for a try only" or ""))

local RUNS = quick and 1 or 5
--- Seconds per call: `calls` calls and one wait, best of RUNS after one warm-up.
local function time(calls, fn)
  local best = math.huge
  for run = 0, RUNS do
    ms.cuda.synchronize()
    local t = ms.time()
    ms.scope(function() for _ = 1, calls do ms.scope(fn) end end)
    ms.cuda.synchronize()
    t = (ms.time() - t) / calls
    if run > 0 or quick then best = math.min(best, t) end
  end
  return best
end
local function line(name, seconds, rate, unit)
  print(("%-44s %10.3f us%s"):format(name, seconds * 1e6, rate and ("  %9.1f %s"):format(rate, unit) or ""))
end

local n = quick and 4096 or 64 * 2 ^ 20                  -- elements: 256 MiB of float32
local calls = quick and 2 or 20
ms.manual_seed(1)
local x, y = ms.randn(n, { device = device }), ms.randn(n, { device = device })
local host = x:to "cpu"

local function bytes(name, moved, fn)
  local s = time(calls, fn)
  line(name, s, moved / s / 1e9, "GB/s")
end
bytes("host to device, pageable", 4 * n, function() x:copy_(host) end)
bytes("device to host, pageable", 4 * n, function() host:copy_(x) end)
bytes("device to device (read + written)", 8 * n, function() y:copy_(x) end)
bytes("add (read + written)", 12 * n, function() return x + y end)
bytes("gelu tanh", 8 * n, function() return F.gelu(x, { approximate = "tanh" }) end)
bytes("sum of all", 4 * n, function() return x:sum() end)
local wide = x:reshape(-1, quick and 64 or 1024)
bytes("transposed copy", 8 * n, function() return wide:t():contiguous() end)
bytes("bias added to rows", 8 * n, function() return wide + wide[1] end)
bytes("softmax of rows", 8 * n, function() return wide:softmax(-1) end)
local gain = ms.ones(wide.shape[2], { device = device })
bytes("layer norm of rows", 8 * n, function() return F.layer_norm(wide, { wide.shape[2] }, gain, gain) end)
local half = wide:bfloat16()
local half_gain = gain:bfloat16()
bytes("layer norm of rows, bfloat16", 4 * n, function() return F.layer_norm(half, { wide.shape[2] }, half_gain,
  half_gain) end)
x, y, host, wide, half = nil, nil, nil, nil, nil         -- luacheck: ignore
collectgarbage()
collectgarbage()

local small = ms.ones(16, { device = device })
line("a launch: add_ of 16 elements", time(quick and 50 or 5000, function() small:add_(1) end))

for _, case in ipairs(quick and { { "float32", 64 }, { "bfloat16", 64 } } or
    { { "float32", 4096 }, { "bfloat16", 1024 }, { "bfloat16", 4096 }, { "bfloat16", 8192 } }) do
  local dtype, size = unpack(case)
  ms.scope(function()
    local a, b = ms.randn(size, size, { device = device, dtype = dtype }),
      ms.randn(size, size, { device = device, dtype = dtype })
    local s = time(quick and 1 or 10, function() return a:matmul(b) end)
    line(("matmul %d %s"):format(size, dtype), s, 2 * size ^ 3 / s / 1e12, "TFLOP/s")
    local t = time(quick and 1 or 10, function() return F.linear(a, b) end)
    line(("linear %d %s"):format(size, dtype), t, 2 * size ^ 3 / t / 1e12, "TFLOP/s")
  end)
end
ms.scope(function()
  local heads, T, d = quick and 2 or 96, quick and 16 or 1024, quick and 8 or 64
  local q = ms.randn(heads, T, d, { device = device, dtype = "bfloat16" })
  local s = time(quick and 1 or 10, function() return F.scaled_dot_product_attention(q, q, q, { is_causal = true }) end)
  line(("attention %d heads, %d x %d, bfloat16"):format(heads, T, d), s, 4 * heads * T * T * d / s / 1e12, "TFLOP/s")
end)
ms.scope(function()
  local count = quick and 1000 or 124e6
  local p = nn.Parameter(ms.randn(count, { device = device }))
  p.grad = ms.randn(count, { device = device })
  local optimizer = ms.optim.AdamW({ p }, { lr = 1e-3 })
  optimizer:step()
  local s = time(quick and 1 or 10, function() optimizer:step() end)
  line(("AdamW over %d parameters"):format(count), s, 28 * count / s / 1e9, "GB/s")
end)

-- A step of GPT-2 124M (or a tiny one): forward, backward, clipping, AdamW.
local GPT = require "moonshard.models.gpt"
for _, dtype in ipairs { "float32", "bfloat16" } do
  local shape = quick and { vocab = 64, context = 16, layers = 1, heads = 2, dim = 16 }
    or { vocab = 50304, context = 1024, layers = 12, heads = 12, dim = 768 }
  local batch = quick and 2 or 8
  shape.device, shape.dtype = device, dtype
  local model = GPT(shape)
  local parameters = model:parameters()
  local optimizer = ms.optim.AdamW(parameters, { lr = 1e-4 })
  local ids = ms.randint(0, shape.vocab, { batch, shape.context }, { device = device })
  local s = time(quick and 1 or 5, function()
    local loss = model(ids, ids)
    loss:backward()
    nn.utils.clip_grad_norm_(parameters, 1)
    optimizer:step()
    optimizer:zero_grad()
  end)
  line(("GPT step, %d x %d tokens, %s"):format(batch, shape.context, dtype), s, batch * shape.context / s / 1e3,
    "K tokens/s")
  print(("  peak memory %.1f MiB"):format(ms.memory_stats(device).peak_allocated / 2 ^ 20))
end
