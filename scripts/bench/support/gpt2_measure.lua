-- SPDX-License-Identifier: MIT
--- Measures steps of GPT-2 on device cuda, for scripts/bench/gpt2: luajit gpt2_measure.lua SHAPE STEPS [MODE].
--- Prints `device NAME`, `step SECONDS` for each step, `peak BYTES` and the rate of a large product, `rate FLOPS`.
--- Modes: by-operator (with MOONSHARD_CUDA_SYNC=1) prints `operator NAME CALLS SECONDS` of one step instead. sharded
--- measures the step sharded by fully_shard, also over ranks (each with a batch of its own; several may share a GPU):
--- rank 0 prints `device`, `step` and `peak`. Without a GPU it prints `unavailable REASON` only.
local root = arg[0]:match "^(.*)scripts/bench/" or "./"
package.path = ("@lua/?.lua;@lua/?/init.lua;@scripts/bench/support/?.lua;"):gsub("@", root) .. package.path
local ms = require "moonshard"
local gpt2 = require "gpt2_step"
local name, steps, by_operator, sharded = arg[1], tonumber(arg[2]), arg[3] == "by-operator", arg[3] == "sharded"
local dist = ms.dist
if sharded then dist.init() end
local function say(...) if not sharded or dist.rank() == 0 then print(...) end end

if not ms.cuda.is_available() then
  say("unavailable " .. ms.cuda.why_unavailable())
  os.exit(0)
end
say("device " .. ms.cuda.device_name())
ms.manual_seed(1)
local step = sharded and gpt2.of(gpt2.sharded(name), gpt2.SHAPES[name]) or gpt2.new(name)
local function timed(fn)
  ms.cuda.synchronize()
  if sharded then dist.barrier() end
  local t = ms.time()
  fn()
  ms.cuda.synchronize()
  return ms.time() - t
end
for _ = 1, 3 do step() end                              -- warm-up: chooses algorithms, fills the memory pool

if by_operator then
  local profile = ms.profiler.profile(function()
    step()
    ms.cuda.synchronize()
  end)
  local rows = {}
  for _, r in ipairs(profile:key_averages()) do
    if r.category == "operator" or r.category == "optimizer" then
      local key = r.key:gsub("%s", "_")
      rows[#rows + 1] = ("operator %s %d %.9f"):format(key, r.count, r.self_cpu_time_total / 1e6)
    end
  end
  print(table.concat(rows, "\n"))
  return
end

ms.reset_peak_memory_stats "cuda"
for _ = 1, steps do say(("step %.9f"):format(timed(step))) end
say(("peak %d"):format(ms.memory_stats("cuda").peak_allocated))
if sharded then return end

local n = name == "tiny" and 64 or 8192
ms.scope(function()
  local a, b = ms.randn(n, n, { device = "cuda", dtype = "bfloat16" }), ms.randn(n, n, { device = "cuda", dtype = "bfloat16" })
  local best = math.huge
  for _ = 1, 10 do best = math.min(best, timed(function() ms.scope(function() a:matmul(b) end) end)) end
  print(("rate %.6e"):format(2 * n ^ 3 / best))
end)
