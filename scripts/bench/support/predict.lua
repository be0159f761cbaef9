-- SPDX-License-Identifier: MIT
--- Predicts the time of launches on an H200 from the static table of the kernels and the null device's counts. A
--- prediction is not a measurement: it shows where time is spent, within a factor of 1.5 for kernels that move data.
---
--- The formula is fixed. A launch takes the longer of
---   bytes / (4.3 TB/s x min(1, bytes in flight on an SM / 20 KB)), and
---   flops / rate of the unit: 780 TF/s for halves by cuBLASLt, 250 TF/s for kernels with mma.sync (assumed: a
---   quarter of the peak, as FlashAttention-2's backward on an H100), 60 TF/s for float32, 67 TF/s for float64,
--- plus 0.6 us for each wait for memory, where one wait depends on the one before (at least one a launch). Bytes in
--- flight come from the static table, for the dtype class in which the launch touches most bytes; a grid that does
--- not fill the GPU has fewer. 20 KB at 4.3 TB/s over 132 SMs correspond to a latency of 0.6 us, so the first term
--- also covers the waits of a loop in which few threads read many parts one after the other.
local kernels = require "kernel_table"
local M = {}

local BANDWIDTH, LATENCY = 4.3e12, 0.6e-6
local RATE = { half = 780e12, mma = 250e12, float32 = 60e12, other = 67e12 }

-- Properties of kernels that their arguments do not show. WRITTEN: bytes read and written for each byte of
-- tensors. AdamW reads 12 bytes an element (parameter and gradient of bfloat16, two states of float32) and writes all
-- but the gradient, 10 bytes. The logits of a chunk are read twice, then overwritten by their gradient.
local WRITTEN = { ["optim: optim_kernel"] = 11 / 6, ["optim: clip_kernel"] = 2, ["loss: cross_chunk_kernel"] = 3 }
-- Kernels whose arguments include the logits, but that read only one id and one loss or one logit per row.
local ROWS = { ["loss: cross_total_kernel"] = true, ["loss: cross_rows_kernel"] = true }
-- Elements of a table that each thread of a kernel touches; the size of the table does not count.
local GATHER = { ["embedding: take_rows_kernel"] = 8, ["embedding: add_rows_kernel"] = 8, ["embedding: index_kernel"] = 1 }
-- How often the threads of a kernel wait for memory, if more than once a launch: a sort waits in each pass over its
-- entries, and for the counts of all blocks.
local WAITS = { ["embedding: sort_alone_kernel"] = function() return 8 end,
  ["embedding: sort_count_kernel"] = function() return 2 end,
  ["embedding: sort_place_kernel"] = function(l) return 3 + l.blocks / 4 end }
-- Kernels that receive the memory of all rows' losses, but join at most 64 totals a thread (loss.cu, total_parts).
local TOTALS = { ["loss: cross_join_kernel"] = true }
-- Bytes of a partial result that is not one number: norm_join_kernel reads a double and the index of its result.
local PART = { ["optim: norm_join_kernel"] = 12 }

--- Returns the number of bytes that a launch touches, and the class of most of them.
function M.bytes(l, base)
  local class = l.half >= l.float32 and l.half >= l.other and "half" or l.float32 >= l.other and "float32" or "other"
  local bytes = l.half + l.float32 + l.other
  if ROWS[base] then return l.other * 1.5, "other" end
  if GATHER[base] then bytes = 2 * GATHER[base] * l.blocks * l.threads * (class == "half" and 2 or 4) end
  return bytes * (WRITTEN[base] or 1), class
end

--- Seconds of one launch, and the lower bound (full bandwidth, full rate, no waits).
---@param l table     an entry of null_device.launches
---@param row table?  an entry of kernel_table.rows; nil for products, copies and fills
function M.seconds(l, row)
  local base = row and row.name:match "^[^<]*"
  local bytes, class = M.bytes(l, base)
  local rate = RATE[row and row.mma > 0 and "mma" or l.half > 0 and "half" or class]
  local least = math.max(bytes / BANDWIDTH, l.flops / rate)
  if not row then return least + LATENCY, least end
  local share, c = 1, row.classes[class == "other" and "float64" or class]
  for _, other in ipairs { "float32", "float64", "half" } do
    if not (c and c.flight > 0) then c = row.classes[other] end
  end
  if c and c.flight > 0 then
    local held = kernels.blocks_per_sm(l.threads, row.registers, row.shared + l.shared)
    local flight = c.flight * l.threads * math.min(held, l.blocks / kernels.SM.processors)
    share = math.min(1, flight / kernels.FLIGHT)
  end
  local waits = WAITS[base] and WAITS[base](l) or 1
  return math.max(bytes / (BANDWIDTH * share), l.flops / rate) + waits * LATENCY, least
end

--- Predicts a list of launches. Returns the total and rows { name, launches, bytes, flops, seconds, least } by operator
--- and by kernel, the longest first.
---@param launches table[]                of null_device.launches
---@param by_symbol table<string, table>  rows of the static table
function M.predict(launches, by_symbol)
  local total = { name = "all", launches = 0, bytes = 0, flops = 0, seconds = 0, least = 0 }
  local lists, found = { {}, {} }, { {}, {} }
  for _, l in ipairs(launches) do
    local row = by_symbol[l.kernel]
    local seconds, least = M.seconds(l, row)
    local bytes = M.bytes(l, row and row.name:match "^[^<]*")
    for k, name in ipairs { l.op ~= "" and l.op or l.kernel, row and row.name or l.kernel } do
      local r = found[k][name]
      if not r then
        r = { name = name, launches = 0, bytes = 0, flops = 0, seconds = 0, least = 0 }
        found[k][name] = r
        table.insert(lists[k], r)
      end
      for _, sum in ipairs(k == 1 and { r, total } or { r }) do
        sum.launches, sum.bytes, sum.flops = sum.launches + 1, sum.bytes + bytes, sum.flops + l.flops
        sum.seconds, sum.least = sum.seconds + seconds, sum.least + least
      end
    end
  end
  for _, list in ipairs(lists) do table.sort(list, function(a, b) return a.seconds > b.seconds end) end
  return total, lists[1], lists[2]
end

--- Counts launches that leave parts of the GPU idle: those that touch more than 1 MB with fewer blocks than there are
--- SMs, and those whose threads each combine more than 64 partial results. Also returns a line about each.
function M.narrow(launches, by_symbol)
  local few, alone, names = 0, 0, {}
  for _, l in ipairs(launches) do
    local row = by_symbol[l.kernel]
    if row then
      local bytes = M.bytes(l, row.name:match "^[^<]*")
      local is_few = bytes > 1e6 and l.blocks < kernels.SM.processors
      -- The null device does not know the dtype of scratch memory and counts it as float32; if the kernel loads no
      -- float32, it is float64.
      local c = row.classes.float32
      local parts = l.float32 / (PART[row.name:match "^[^<]*"] or c and c.flight > 0 and 4 or 8) + l.other / 8
      local is_alone = kernels.joins(row) and not TOTALS[row.name:match "^[^<]*"] and parts > 64 * l.blocks * l.threads
      if is_few then few = few + 1 end
      if is_alone then alone = alone + 1 end
      if is_few or is_alone then
        names[#names + 1] = ("%s (%s: %d x %d threads, %.1f MB)"):format(row.name, l.op, l.blocks, l.threads, bytes / 1e6)
      end
    end
  end
  return few, alone, names
end

return M
