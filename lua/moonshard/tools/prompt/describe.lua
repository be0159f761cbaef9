-- SPDX-License-Identifier: MIT
--- What `? t` prints of a tensor: shape, dtype, device, placement, and how its values are distributed.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local sharded = require "moonshard.parallel.fsdp.sharded"
local utf8 = require("moonshard.plot.terminal").utf8

local lib = engine.lib
-- Copies of globals that a session may overwrite.
local table, math, tostring, pcall = table, math, tostring, pcall

local M = {}

local BINS, WIDTH = 10, 40

local function number(v) return ("%.4g"):format(v) end

-- The lines of a histogram of x, a floating point tensor of one dimension. finite: number of its finite values, which
-- lie from least to most; the others have been replaced by -inf, below all bins.
local function histogram(x, finite, least, most)
  if least == most then return { ("  all %s"):format(number(least)) } end
  local counts, above, largest = {}, finite, 0
  for k = 1, BINS do
    local next_above = k < BINS and x:ge(least + (most - least) * k / BINS):sum():item() or 0
    counts[k], above = above - next_above, next_above
    largest = math.max(largest, counts[k])
  end
  local bar, lines = utf8() and "█" or "#", {}
  for k = 1, BINS do
    local from, to = least + (most - least) * (k - 1) / BINS, least + (most - least) * k / BINS
    local n = counts[k] > 0 and math.max(1, math.floor(counts[k] / largest * WIDTH + 0.5)) or 0
    lines[k] = ("  %10s to %-10s %s %d"):format(number(from), number(to), bar:rep(n), counts[k])
  end
  return lines
end

local function values(part, lines)
  local x = part:detach():reshape(-1)
  if x.dtype == "bool" then
    local set = x:long():sum():item()
    lines[#lines + 1] = ("  true %d, false %d"):format(set, x:numel() - set)
    return
  end
  if x.dtype == "float16" or x.dtype == "bfloat16" then x = x:float() elseif x.dtype ~= "float32" then x = x:double() end
  local is_finite = x:isfinite()
  local finite, nan = is_finite:long():sum():item(), x:isnan():long():sum():item()
  local other = x:numel() - finite
  if other > 0 then lines[#lines + 1] = ("  not finite: %d nan, %d infinite"):format(nan, other - nan) end
  if finite == 0 then return end
  -- Values that are not finite must not count: each statement replaces them by a value that cannot change its result.
  local outside = is_finite:logical_not()
  local least = x:masked_fill(outside, math.huge):min():item()
  local most = x:masked_fill(outside, -math.huge):max():item()
  local mean = x:masked_fill(outside, 0):sum():item() / finite
  local deviation = math.sqrt(x:masked_fill(outside, mean):sub(mean):pow(2):sum():item() / finite)
  lines[#lines + 1] = ("  min %s, max %s, mean %s, standard deviation %s, zeros %d"):format(number(least), number(most),
    number(mean), number(deviation), x:eq(0):long():sum():item())
  -- Values that are not finite go below every bin, so that no comparison counts them.
  x = x:masked_fill(outside, -math.huge)
  for _, one in ipairs(histogram(x, finite, least, most)) do lines[#lines + 1] = one end
end

local function placement(t)
  if not sharded.is_sharded(t) or sharded.is_whole(t) then return "whole on this rank", t end
  local names, part = {}, t:to_local()
  for k, p in ipairs(t.placements) do names[k] = tostring(p) end
  return ("%s over %s, %d of %s here"):format(table.concat(names, ", "), errors.count(t.device_mesh:size(), "rank"),
    part:numel(), errors.count(t:numel(), "element")), part
end

--- The lines that `? t` prints.
---@param t Tensor
---@return string
function M.tensor(t)
  local lines = { (tostring(t):match "^[^\n]*") }
  if t:is_released() then return lines[1] end
  local mode, handle = lib.ms_set_grad_mode(0), lib.ms_scope_open "help"
  local ok, why = pcall(function()
    local text, part = placement(t)
    lines[2] = ("  placement: %s; %s"):format(text, errors.count(part:numel() * part:element_size(), "byte"))
    if part:numel() > 0 and part.device ~= "meta" and not part.is_sparse then values(part, lines) end
  end)
  lib.ms_scope_close(handle, nil, 0)
  lib.ms_set_grad_mode(mode)
  if not ok then lines[#lines + 1] = "  (" .. tostring(why):gsub("^[^\n]-:%d+: ", "") .. ")" end
  return table.concat(lines, "\n")
end

return M
