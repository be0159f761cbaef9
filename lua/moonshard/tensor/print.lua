-- SPDX-License-Identifier: MIT
--- tostring(t): one line that describes the tensor, then its values, in at most 20 lines.
local engine = require "moonshard.core.ffi"
local class = require "moonshard.core.class"
local dtypes = require "moonshard.core.dtypes"
local tensor = require "moonshard.tensor"
local read = require("moonshard.tensor.values").read

local lib, C = engine.lib, engine.ffi.C
local methods, Tensor = tensor.methods, tensor.Tensor

local MAX_LINES, MAX_COLUMNS, MAX_VALUES = 20, 10, 1000
local EDGE = 3                                          -- number of elements shown at each end of a shortened dimension

-- The positions shown of a dimension: all of them up to `most`, otherwise `edge` at each end, with 0 for the gap.
local function shown(size, most, edge)
  local list = {}
  if size <= most then
    for k = 1, size do list[k] = k end
  else
    for k = 1, edge do list[#list + 1] = k end
    list[#list + 1] = 0
    for k = size - edge + 1, size do list[#list + 1] = k end
  end
  return list
end

-- The number of lines that dimensions 1 … n take. lists: the positions shown, by dimension; a gap takes one line.
local function lines_of(lists, n)
  local lines = 1
  for d = n, 1, -1 do
    local gap = 0
    for _, j in ipairs(lists[d]) do
      if j == 0 then gap = 1 end
    end
    lines = (#lists[d] - gap) * lines + gap
  end
  return lines
end

-- The positions to show of dimensions 1 … n, so that they take at most `budget` lines: all of them; or up to EDGE at
-- each end, as many as fit; or only the beginning of outer dimensions.
local function rows_shown(shape, n, budget)
  for _, edge in ipairs { math.huge, EDGE, 2, 1 } do
    local lists = {}
    for d = 1, n do lists[d] = shown(shape[d], 2 * edge + 1, edge) end
    if lines_of(lists, n) <= budget then return lists end
  end
  local lists = {}
  for d = 1, n do lists[d] = shown(shape[d], 3, 1) end
  for d = 1, n do
    if shape[d] > 1 then lists[d] = { 1, 0 } end
    if lines_of(lists, n) <= budget then break end
  end
  return lists
end

-- Returns the function that formats a number of the tensor, the same way for all. Floats: as "3." if all are whole and
-- below 10^6; otherwise with 4 decimals, or with an exponent if some are very large or small, or of very different
-- sizes. kind: "bool", "int" or "float".
local function formatter(numbers, kind)
  if kind == "bool" then return function(v) return v ~= 0 and "true" or "false" end end
  if kind == "int" then
    return function(v) return type(v) == "number" and ("%d"):format(v) or tostring(v):match "^[^L]*" end
  end
  local largest, smallest, whole = 0, math.huge, true
  for _, v in ipairs(numbers) do
    local a = math.abs(v)
    if a < math.huge and a == a then
      if a > largest then largest = a end
      if a > 0 and a < smallest then smallest = a end
      if a % 1 ~= 0 then whole = false end
    end
  end
  local pattern = "%.4f"
  if largest >= 1e6 or (largest > 0 and (smallest < 1e-4 or largest / smallest > 1e7)) then pattern = "%.4e" end
  if whole and largest < 1e6 then pattern = "%g." end
  return function(v)
    if v ~= v then return "nan" end
    if v == math.huge then return "inf" elseif v == -math.huge then return "-inf" end
    return pattern:format(v)
  end
end

local function values_text(t, shape, dtype)
  local kind = dtype == C.MS_BOOL and "bool" or not dtypes.is_float(dtype) and "int" or "float"
  local ndim = #shape
  if ndim == 0 then
    local v = read(t)[0]
    return formatter({ v }, kind)(v)
  end
  -- A line shows the elements along the last dimension. Dimensions are shortened to fit.
  local lists = rows_shown(shape, ndim - 1, MAX_LINES - 2)
  lists[ndim] = shown(shape[ndim], MAX_COLUMNS, EDGE)
  -- A small tensor is read completely, a large one line by line.
  local all = methods.numel(t) <= MAX_VALUES and read(t) or nil
  local strides, step = {}, 1
  for d = ndim, 1, -1 do
    strides[d] = step
    step = step * shape[d]
  end
  local numbers, lines = {}, {}
  local function row_of(part, base)
    local row = {}
    local values = all or read(part)
    for k, j in ipairs(lists[ndim]) do
      row[k] = j > 0 and values[(all and base or 0) + j - 1] or false
      if row[k] then numbers[#numbers + 1] = row[k] end
    end
    return row
  end
  local function walk(d, part, base, open)
    if d == ndim then
      lines[#lines + 1] = { row = row_of(part, base), open = open, close = 0 }
      return
    end
    for k, j in ipairs(lists[d]) do
      if j == 0 then
        lines[#lines + 1] = { gap = d, close = 0 }
      else
        walk(d + 1, all and part or methods.select(part, 1, j), base + (j - 1) * strides[d], k == 1 and open + 1 or 1)
      end
    end
    lines[#lines].close = lines[#lines].close + 1
  end
  walk(1, t, 0, 1)
  local format, width = formatter(numbers, kind), 0
  for _, line in ipairs(lines) do
    for k, v in ipairs(line.row or {}) do
      line.row[k] = v and format(v) or "…"
      if v and #line.row[k] > width then width = #line.row[k] end
    end
  end
  local out = {}
  for k, line in ipairs(lines) do
    if line.gap then
      out[k] = (" "):rep(line.gap) .. "…"
    else
      for j, text in ipairs(line.row) do line.row[j] = text == "…" and text or (" "):rep(width - #text) .. text end
      out[k] = (" "):rep(ndim - line.open) .. ("["):rep(line.open) .. table.concat(line.row, ", ")
        .. ("]"):rep(line.close + 1) .. (k < #lines and "," or "")
    end
  end
  if #out > MAX_LINES - 1 then
    local cut = { unpack(out, 1, MAX_LINES - 2) }
    cut[#cut + 1] = "…"
    out = cut
  end
  return table.concat(out, "\n")
end

-- Runs fn, which makes views, with grad mode off and in its own scope. If fn fails, returns its error in parentheses.
local function quietly(fn, ...)
  local mode, handle = lib.ms_set_grad_mode(0), lib.ms_scope_open "tostring"
  local ok, result = pcall(fn, ...)
  lib.ms_scope_close(handle, nil, 0)
  lib.ms_set_grad_mode(mode)
  if not ok then return "(" .. tostring(result):gsub("^[^\n]-:%d+: ", "") .. ")" end
  return result
end

function Tensor.__tostring(t)
  local name = class.name(t)
  if t:is_released() then return name .. " (released)" end
  local info = tensor.info_of(t)
  local dtype, device, requires_grad, numel = info.dtype, info.device, info.requires_grad ~= 0, tonumber(info.numel)
  local shape = methods.size(t)
  local head = ("%s %s %s %s%s"):format(name, dtypes.name(dtype), tostring(shape), dtypes.device_name(device),
    requires_grad and ", requires_grad" or "")
  if bit.band(device, 255) == C.MS_META or numel == 0 then return head end
  return head .. "\n" .. quietly(values_text, t, shape, dtype)
end

return {}
