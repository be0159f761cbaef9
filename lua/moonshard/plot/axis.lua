-- SPDX-License-Identifier: MIT
--- The axes of a plot: ranges of values, positions from 0 to 1, and ticks at round numbers.
local M = {}

---@class PlotAxis
---@field low number  the value at position 0
---@field high number  the value at position 1
---@field log boolean  true: logarithmic
local Axis = {}
Axis.__index = Axis

local function finite(v) return v - v == 0 end

--- Whether the axis can show a value: it must be finite, and on a logarithmic axis above 0.
---@param v number
---@return boolean
function Axis:shows(v) return finite(v) and (not self.log or v > 0) end

--- The position of a value: 0 at the low end, 1 at the high end.
---@param v number
---@return number
function Axis:place(v)
  if self.log then return (math.log(v) - math.log(self.low)) / (math.log(self.high) - math.log(self.low)) end
  return (v / 2 - self.low / 2) / (self.high / 2 - self.low / 2)         -- halved: high - low may overflow
end

local LEAST, MOST = 1e-290, 1.7e308                     -- the least range and the largest value that can have ticks

-- An axis from the least to the greatest value; low > high: there are no values. A range of 0, or one no wider than
-- rounding errors, is widened.
local function new(scale, low, high)
  local self = setmetatable({ log = scale == "log" }, Axis)
  if low > high then low, high = self.log and 1 or 0, self.log and 10 or 1 end
  if self.log then
    if high - low <= 1e-12 * high then
      low, high = math.max(low / 2, 5e-324), math.min(math.max(1.5 * high, LEAST), MOST)
    end
  elseif high / 2 - low / 2 <= math.max(0.5e-12 * math.max(math.abs(low), math.abs(high)), LEAST) then
    local around = low == 0 and 1 or math.max(math.abs(low) / 2, 4 * LEAST)
    low, high = math.max(low - around, -MOST), math.min(high + around, MOST)
  end
  self.low, self.high = low, high
  return self
end

--- An axis for some values; values that it cannot show are ignored.
---@param scale "linear"|"log"
---@param lists number[][]
---@return PlotAxis
function M.of(scale, lists)
  local low, high, log = math.huge, -math.huge, scale == "log"
  for _, list in ipairs(lists) do
    for k = 1, #list do
      local v = list[k]
      if finite(v) and (not log or v > 0) then low, high = math.min(low, v), math.max(high, v) end
    end
  end
  return new(scale, low, high)
end

local function linear_ticks(low, high, count)
  local raw = math.max(LEAST, math.min((high / 2 - low / 2) / count * 2, MOST))
  local power = 10 ^ math.floor(math.log10(raw))
  local part = raw / power * (1 - 1e-9)                 -- rounding may make a range such as 0.002 a little longer
  local step = math.min((part <= 1 and 1 or part <= 2 and 2 or part <= 5 and 5 or 10) * power, 1e308)
  local ticks = {}
  for k = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) do ticks[#ticks + 1] = k * step end
  return ticks, step
end

local function log_ticks(low, high, count)
  local first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
  local ticks = {}
  if last - first >= 2 then
    for k = first, last, math.ceil((last - first + 1) / count) do ticks[#ticks + 1] = 10 ^ k end
    return ticks
  end
  for k = first - 1, last do
    for _, digit in ipairs { 1, 2, 5 } do
      local v = digit * 10 ^ k
      if v >= low * (1 - 1e-9) and v <= high * (1 + 1e-9) then ticks[#ticks + 1] = v end
    end
  end
  if #ticks >= 2 then return ticks end
  if high - low <= LEAST then return { low, high } end
  return linear_ticks(low, high, count)
end

--- A number as a label, with just enough decimals that numbers `step` apart have different labels.
---@param v number
---@param step? number  nil: 6 significant digits; 4 in exponent notation
---@return string
function M.label(v, step)
  if v == 0 then return "0" end
  local size = math.abs(v)
  if size >= 1e6 or size < 1e-4 then
    local digits = step and math.max(1, math.ceil(math.log10(size) - math.log10(step) - 1e-9) + 1) or 4
    local text = ("%%.%dg"):format(math.min(15, digits)):format(v)
    return (text:gsub("e([+-])0*(%d)", function(sign, digit) return (sign == "-" and "e-" or "e") .. digit end))
  end
  if not step then return ("%.6g"):format(v) end
  local decimals = math.min(15, math.max(0, math.ceil(-math.log10(step) - 1e-9)))
  return ("%%.%df"):format(decimals):format(v)
end

--- Values to mark on the axis, in order, and their labels.
---@param count integer  approximate number of ticks
---@return number[] ticks
---@return string[] labels
function Axis:ticks(count)
  local ticks, step = (self.log and log_ticks or linear_ticks)(self.low, self.high, math.max(1, count))
  local labels = {}
  for k, v in ipairs(ticks) do labels[k] = M.label(v, step) end
  return ticks, labels
end

return M
