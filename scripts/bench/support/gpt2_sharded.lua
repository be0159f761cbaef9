-- SPDX-License-Identifier: MIT
--- Counts launches, copies and waits of a step of GPT-2 124M, sharded by fully_shard with float32 master weights, on
--- the null device, in one process or over ranks: luajit gpt2_sharded.lua BUILD. Rank 0 prints lines "WORD NUMBER".
local root = arg[0]:match "^(.*)scripts/bench/" or "./"
package.path = ("@lua/?.lua;@lua/?/init.lua;@scripts/bench/support/?.lua;"):gsub("@", root) .. package.path
local ms = require "moonshard"
local gpt2, null = require "gpt2_step", require "null_device"

local there, why = null.open(arg[1])
ms.dist.init()
local first = ms.dist.rank() == 0
if not there then
  if first then print("unavailable " .. why) end
  return
end
local step = gpt2.of(gpt2.sharded())
step()
step()
ms.reset_peak_memory_stats "cuda"
null.reset()
step()
local count, memory = null.count(), ms.memory_stats "cuda"
if first then
  for _, word in ipairs { "launches", "products", "copies", "waits" } do print(word .. " " .. count[word]) end
  print(("tohost %d\ntodevice %d\nondevice %d"):format(count.to_host, count.to_device, count.on_device))
  print("peak " .. memory.peak_allocated)
end
