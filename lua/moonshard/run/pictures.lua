-- SPDX-License-Identifier: MIT
--- Converts tensors to what a run records besides numbers: images as bytes, histograms, confusion matrices.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local autograd = require "moonshard.autograd"
local scope = require "moonshard.tensor.scope".scope
require "moonshard.autograd.methods"

local M = {}

local function check(t, who)
  if not tensor.is_tensor(t) then opts.wrong(t, "a tensor", "%s", who) end
  if t.placements then errors.raise("%s is sharded, and only rank 0 writes it; pass t:full_tensor()", who) end
  return t
end

-- All elements as a Lua list, row by row.
local function list_of(t)
  return autograd.no_grad(function()
    return scope(function() return t:detach():to "cpu":double():contiguous():reshape(-1):tolist() end)
  end)
end

--- An image as width, height, channels and bytes. t: [H, W], [1, H, W] or [3, H, W]; floating point from 0 (black) to
--- 1, other dtypes from 0 to 255.
---@param t Tensor
---@param who string  names the argument in errors
function M.image(t, who)
  local shape = check(t, who).shape
  local channels = #shape == 3 and shape[1] or 1
  if #shape < 2 or #shape > 3 or channels ~= 1 and channels ~= 3 or t:numel() == 0 then
    errors.raise("%s has shape [%s], expected [H, W], [1, H, W] or [3, H, W], not empty", who,
      table.concat(shape, ", "))
  end
  local height, width = shape[#shape - 1], shape[#shape]
  local scale = t.dtype:find "float" and 255 or 1
  local values, bytes, plane = list_of(t), {}, width * height
  for k = 0, plane - 1 do
    for c = 0, channels - 1 do
      local v = values[c * plane + k + 1] * scale + 0.5
      v = v == v and math.max(0, math.min(255, v)) or 0
      bytes[k * channels + c + 1] = string.char(math.floor(v))
    end
  end
  return width, height, channels, table.concat(bytes)
end

--- A histogram of the finite elements; nil if there are none.
---@param t Tensor
---@param bins integer  number of bins of equal width
---@param who string  names the argument in errors
---@return {min: number, max: number, count: integer, sum: number, squares: number, limits: number[], counts: integer[]}?
function M.histogram(t, bins, who)
  local values, least, most = list_of(check(t, who)), math.huge, -math.huge
  local h = { count = 0, sum = 0, squares = 0, limits = {}, counts = {} }
  for _, v in ipairs(values) do
    if v - v == 0 then
      least, most = math.min(least, v), math.max(most, v)
      h.count, h.sum, h.squares = h.count + 1, h.sum + v, h.squares + v * v
    end
  end
  if h.count == 0 then return nil end
  h.min, h.max = least, most
  local half = most / 2 - least / 2                     -- half the range: most - least could overflow
  for k = 1, bins do h.limits[k], h.counts[k] = k < bins and least * (1 - k / bins) + most * (k / bins) or most, 0 end
  for _, v in ipairs(values) do
    if v - v == 0 then
      local k = half > 0 and math.min(bins, math.floor((v / 2 - least / 2) / half * bins) + 1) or 1
      h.counts[k] = h.counts[k] + 1
    end
  end
  return h
end

local function classes_of(x, who, k)
  local list = tensor.is_tensor(x) and list_of(x) or x
  if type(list) ~= "table" then opts.wrong(x, "a tensor or a list of classes", "%s: argument %d", who, k) end
  for _, v in ipairs(list) do
    if type(v) ~= "number" or v % 1 ~= 0 or v < 0 or v > 9999 then
      errors.raise("%s: argument %d has the class %s, expected whole numbers from 0 to 9999", who, k, tostring(v))
    end
  end
  return list
end

--- A confusion matrix: counts[t + 1][p + 1] is how often class t (from 0) was predicted as p.
---@param targets Tensor|integer[]
---@param predictions Tensor|integer[]
---@param least integer  the least number of classes
---@param who string  names the caller in errors
---@return integer[][]
function M.confusion(targets, predictions, least, who)
  local t, p = classes_of(targets, who, 2), classes_of(predictions, who, 3)
  if #t ~= #p then errors.raise("%s: the number of targets is %d and that of predictions %d, expected equal numbers", who, #t, #p) end
  local n = least
  for k = 1, #t do n = math.max(n, t[k] + 1, p[k] + 1) end
  local counts = {}
  for i = 1, n do
    counts[i] = {}
    for j = 1, n do counts[i][j] = 0 end
  end
  for k = 1, #t do counts[t[k] + 1][p[k] + 1] = counts[t[k] + 1][p[k] + 1] + 1 end
  return counts
end

--- Draws a confusion matrix as a grey image with cells of 8 x 8 pixels; white: all counts of the row are in this cell.
---@param counts integer[][]
---@return integer width
---@return string pixels
function M.draw(counts)
  local rows = {}
  for i, row in ipairs(counts) do
    local sum, line = 0, {}
    for _, n in ipairs(row) do sum = sum + n end
    for j, n in ipairs(row) do line[j] = string.char(math.floor(sum > 0 and 255 * n / sum or 0)):rep(8) end
    rows[i] = table.concat(line):rep(8)
  end
  return 8 * #counts, table.concat(rows)
end

return M
