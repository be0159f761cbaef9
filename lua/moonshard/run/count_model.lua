-- SPDX-License-Identifier: MIT
--- A byte n-gram model with Witten-Bell smoothing. Training prints its loss on the same split next to the network's
--- loss, as a baseline.
---
--- P(s | c) = (count(c s) + distinct(c) * P(s | shorter c)) / (count(c) + distinct(c)), ending with 1/256 (Witten and
--- Bell 1991, method C), where s is the next byte, and c is the last `order` bytes, then the last order - 1, and so on.
local task = require "moonshard.core.task"

local M = {}

--- The loss in nats per byte over all validation bytes, each predicted from the preceding bytes of its own file; counts
--- come from the training bytes only.
---@param documents {text: string, train: integer}[]  whole texts, and the number of bytes of each that are for training
---@param order? integer  at most 5, so that a context and a byte fit one exact number (default: 5)
---@return number? nats  nil if there are no validation bytes
function M.loss(documents, order)
  order = order or 5
  -- For each order k from 0: counts[k] maps context * 256 + byte to its count; totals[k] and distinct[k] map a context
  -- to the sum of its counts and to the number of different bytes that follow it.
  local counts, totals, distinct = {}, {}, {}
  for k = 0, order do counts[k], totals[k], distinct[k] = {}, {}, {} end

  local total, before = 0, 0
  for _, d in ipairs(documents) do total = total + d.train end
  task.report("counting", 0, total)
  for _, d in ipairs(documents) do
    for at = 1, d.train do
      local byte, context, scale = d.text:byte(at), 0, 1
      for k = 0, math.min(order, at - 1) do
        if k > 0 then
          context = context + d.text:byte(at - k) * scale
          scale = scale * 256
        end
        local key = context * 256 + byte
        local seen = counts[k][key]
        counts[k][key] = (seen or 0) + 1
        totals[k][context] = (totals[k][context] or 0) + 1
        if not seen then distinct[k][context] = (distinct[k][context] or 0) + 1 end
      end
      if at % 65536 == 0 then task.report("counting", before + at, total) end
    end
    before = before + d.train
  end

  task.report("counting", total, total)
  local sum, n = 0, 0
  for _, d in ipairs(documents) do
    for at = d.train + 1, #d.text do
      local byte, context, scale, p = d.text:byte(at), 0, 1, 1 / 256
      for k = 0, math.min(order, at - 1) do
        if k > 0 then
          context = context + d.text:byte(at - k) * scale
          scale = scale * 256
        end
        local times = totals[k][context]
        if not times then break end
        local kinds = distinct[k][context]
        p = ((counts[k][context * 256 + byte] or 0) + kinds * p) / (times + kinds)
      end
      sum, n = sum - math.log(p), n + 1
    end
  end
  return n > 0 and sum / n or nil
end

return M
