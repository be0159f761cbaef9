-- SPDX-License-Identifier: MIT
--- Weights gathered as int8 with block scales: about half of bfloat16's bytes, and losses within 2 % of bfloat16's.
--- The number of rows must be divisible by the number of ranks. mpirun -n 2 luajit scripts/examples/int8_gather.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local dist, fsdp, GPT = ms.dist, ms.fsdp, require "moonshard.models.gpt"
local STEPS, BLOCK = tonumber(arg[1]) or 40, 128
-- Quantizes this rank's rows: bytes with 128 for zero, and one scale for each block.
local function pre(self)
  local blocks = self:reshape(-1, BLOCK)
  local scales = (blocks:abs():max(2) / 127):clamp(1e-12, 1):bfloat16()
  local bytes = (blocks / scales:float():unsqueeze(2) + 128.5):clamp(1, 255):to "uint8"
  return { bytes:reshape(self.shape), scales }
end

-- Dequantizes the bytes of all ranks. `out` is the tensor that the first gather returned; nil in that gather.
local function post(_, outputs, _, dtype, out)
  local bytes, scales = outputs[1], outputs[2]:float()
  local whole = ((bytes:float() - 128):reshape(-1, BLOCK) * scales:unsqueeze(2)):reshape(bytes.shape):to(dtype)
  if not out then return whole, { whole } end
  out:copy_(whole)
end

local function train(int8)
  ms.manual_seed(1)
  local model = GPT { vocab = 256, context = 64, layers = 2, heads = 2, dim = 128, position = "alibi" }
  local policy = { mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16", reduce_dtype = "float32" } }
  for _, m in ipairs { model.blocks[1], model.blocks[2], model } do fsdp.fully_shard(m, policy) end
  for _, p in ipairs(model:parameters()) do
    local part = p:to_local()
    if int8 and p.ndim == 2 then part.fsdp_pre_all_gather, part.fsdp_post_all_gather = pre, post end
  end
  local optimizer = ms.optim.AdamW(model:parameters(), { lr = 3e-4 })
  local schedule = ms.optim.lr_scheduler.linear_warmup(optimizer, { steps = 40 })
  local batches = ms.data.batches(ms.data.corpus { "/usr/share/common-licenses" },
    { context = 64, batch = 8, seed = 1, rank = dist.rank(), world = dist.world_size() })
  local losses, bytes = {}, 0
  for step in ms.steps(STEPS) do
    local gathers, loss = dist.record(function() return model(batches:train(step)) end)
    for _, e in ipairs(gathers) do bytes = bytes + e.bytes end
    loss:backward()
    ms.nn.utils.clip_grad_norm_(model:parameters(), 1)
    optimizer:step() optimizer:zero_grad() schedule:step()
    for _, value in ipairs(dist.all_gather_object(loss:item())) do
      losses[step] = (losses[step] or 0) + value / dist.world_size()
    end
  end
  return losses, bytes / STEPS
end
local half, half_bytes = train(false)
local int8, int8_bytes = train(true)
if dist.rank() == 0 then
  local apart = 0
  for k = 1, STEPS do apart = math.max(apart, math.abs(int8[k] / half[k] - 1)) end
  for k = 20, STEPS, 20 do print(("step %d  loss %.4f with bfloat16, %.4f with int8"):format(k, half[k], int8[k])) end
  print(("losses differ by at most %.2f %% over %d steps; bytes gathered per forward: %d with bfloat16, %d with int8")
    :format(100 * apart, STEPS, half_bytes, int8_bytes))
end
