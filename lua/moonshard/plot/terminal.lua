-- SPDX-License-Identifier: MIT
--- Draws plots as lines of text: in braille and block characters, or in ASCII.
local axes = require "moonshard.plot.axis"
local bit = require "bit"

local M = {}

-- Replaces control characters, which a terminal would obey, by spaces.
local function clean(text) return (text:gsub("[%c\127]", " ")) end

--- Whether the locale's characters are UTF-8.
---@return boolean
function M.utf8()
  for _, name in ipairs { "LC_ALL", "LC_CTYPE", "LANG" } do
    local value = os.getenv(name)
    if value and value ~= "" then return value:lower():find "utf%-?8" ~= nil end
  end
  return false
end

-- ---- canvases: dots at integer coordinates from 0, row 0 on top ------------------------------------------------

local MARKS = "*o+x#@%&ABCDEFGHIJKLMNPQRSTUVWYZabcdefghijklmnpqrstuvwyz0123456789"

-- The character that draws series k: a different one for each of the first 66 series.
local function mark(k)
  k = (k - 1) % #MARKS + 1
  return MARKS:sub(k, k)
end

local BITS = { [0] = { [0] = 1, 8 }, { [0] = 2, 16 }, { [0] = 4, 32 }, { [0] = 64, 128 } }

-- With braille, a character shows 2 x 4 dots, which do not distinguish series. Without it, a character is one dot, and
-- each series has its own mark.
local function new_canvas(columns, rows, braille)
  local cells = {}
  local canvas = { wide = braille and 2 * columns or columns, high = braille and 4 * rows or rows }
  function canvas.dot(x, y, series)
    if x < 0 or y < 0 or x >= canvas.wide or y >= canvas.high then return end
    if braille then
      local at = math.floor(y / 4) * columns + math.floor(x / 2)
      cells[at] = bit.bor(cells[at] or 0, BITS[y % 4][x % 2])
    else
      cells[y * columns + x] = mark(series)
    end
  end
  function canvas.row(y)
    local out = {}
    for x = 0, columns - 1 do
      local cell = cells[y * columns + x]
      if braille and cell then cell = string.char(0xe2, 0xa0 + math.floor(cell / 64), 0x80 + cell % 64) end
      out[x + 1] = cell or " "
    end
    return (table.concat(out):gsub(" +$", ""))
  end
  return canvas
end

local function line(canvas, x0, y0, x1, y1, series)
  local steps = math.max(math.abs(x1 - x0), math.abs(y1 - y0), 1)
  for k = 0, steps do
    canvas.dot(math.floor(x0 + (x1 - x0) * k / steps + 0.5), math.floor(y0 + (y1 - y0) * k / steps + 0.5), series)
  end
end

local function draw(plot, canvas)
  local x_axis, y_axis = plot.x_axis, plot.y_axis
  local function across(v) return math.floor(x_axis:place(v) * (canvas.wide - 1) + 0.5) end
  local function down(v) return math.floor((1 - y_axis:place(v)) * (canvas.high - 1) + 0.5) end
  for n, s in ipairs(plot.series) do
    local last_x, last_y
    if plot.kind == "histogram" then
      for k, count in ipairs(s.counts) do
        local left, right = across(s.limits[k]), math.max(across(s.limits[k]), across(s.limits[k + 1]) - 1)
        if count > 0 and y_axis:shows(count) then
          for x = left, right do line(canvas, x, down(count), x, canvas.high - 1, n) end
        end
      end
    else
      for k = 1, #s.y do
        local x, y = s.x[k], s.y[k]
        if x_axis:shows(x) and y_axis:shows(y) then
          x, y = across(x), down(y)
          if plot.kind == "line" and last_x then line(canvas, last_x, last_y, x, y, n) else canvas.dot(x, y, n) end
          last_x, last_y = x, y
        else
          last_x = nil
        end
      end
    end
  end
end

local function put(row, at, text)                       -- row: a list of characters; text: ASCII
  for k = 1, #text do row[at + k - 1] = text:sub(k, k) end
end

--- A plot with two axes. Several series are drawn with different marks.
---@param plot Plot
---@param columns integer
---@param rows integer
---@param ascii boolean
---@return string
function M.xy(plot, columns, rows, ascii)
  local braille = not ascii and #plot.series == 1
  local y_ticks, y_labels = plot.y_axis:ticks(math.max(2, math.floor(rows / 4)))
  local x_ticks, x_labels = plot.x_axis:ticks(math.max(2, math.floor(columns / 16)))
  local longest = 1
  for _, label in ipairs(y_labels) do longest = math.max(longest, #label) end
  local wide = math.max(8, columns - longest - 2)
  local canvas = new_canvas(wide, rows, braille)
  draw(plot, canvas)
  local out, o = {}, plot.options
  out[1] = o.title and clean(o.title)
  local keys = {}
  for k, s in ipairs(plot.series) do
    if s.label then keys[#keys + 1] = (braille and "" or mark(k) .. " ") .. clean(s.label) end
  end
  for k, key in ipairs(keys) do                         -- as many keys in a line as there is room for
    if k > 1 and #out[#out] + 3 + #key <= columns then key = table.remove(out) .. "   " .. key end
    out[#out + 1] = key
  end
  if o.y_label then out[#out + 1] = clean(o.y_label) end
  local at = {}
  for k, v in ipairs(y_ticks) do at[math.floor((1 - plot.y_axis:place(v)) * (rows - 1) + 0.5)] = y_labels[k] end
  local bar, corner, across = "│", "└", "─"
  if ascii then bar, corner, across = "|", "+", "-" end
  for y = 0, rows - 1 do
    out[#out + 1] = (" "):rep(longest - #(at[y] or "")) .. (at[y] or "") .. " " .. bar .. canvas.row(y)
  end
  out[#out + 1] = (" "):rep(longest + 1) .. corner .. across:rep(wide)
  local row, free = {}, 1
  for k = 1, longest + 2 + wide do row[k] = " " end
  for k, v in ipairs(x_ticks) do
    local label = x_labels[k]
    local from = math.floor(longest + 3 + plot.x_axis:place(v) * (wide - 1) - #label / 2 + 0.5)
    from = math.max(1, math.min(from, #row - #label + 1))
    if from >= free then
      put(row, from, label)
      free = from + #label + 1
    end
  end
  out[#out + 1] = table.concat(row):gsub(" +$", "")
  if o.x_label then out[#out + 1] = (" "):rep(math.max(0, #row - #o.x_label)) .. clean(o.x_label) end
  return table.concat(out, "\n") .. "\n"
end

local BLOCKS, LETTERS = { " ", "░", "▒", "▓", "█" }, { " ", ".", ":", "-", "=", "+", "*", "#", "%", "@" }

local function shade(ramp, axis, v)
  if not axis:shows(v) then return "?" end
  return ramp[math.floor(math.max(0, math.min(1, axis:place(v))) * (#ramp - 1) + 0.5) + 1]
end

-- The rows as shades, at most `columns` characters wide: of cells that share a character, the first one is shown.
local function shades(rows, axis, columns, ascii)
  local ramp = ascii and LETTERS or BLOCKS
  local stride = math.max(1, math.ceil(2 * #rows[1] / columns))
  local wide, out = 2 * #rows[1] <= columns and 2 or 1, {}
  if wide == 1 then stride = math.max(1, math.ceil(#rows[1] / columns)) end
  for i = 1, #rows, wide == 2 and stride or 2 * stride do    -- a character is twice as high as wide
    local cells = {}
    for j = 1, #rows[1], stride do
      cells[#cells + 1] = shade(ramp, axis, rows[i][j]):rep(wide)
    end
    out[#out + 1] = table.concat(cells)
  end
  return out
end

-- The number of characters of a text in UTF-8.
local function characters(text) return #(text:gsub("[\128-\191]", "")) end

local function right(text, wide) return (" "):rep(wide - characters(text)) .. text end

local function widest(texts)
  local wide = 0
  for _, text in ipairs(texts or {}) do wide = math.max(wide, characters(text)) end
  return wide
end

-- The first `wide` characters of a text in UTF-8.
local function cut(text, wide)
  local n = 0
  for at = 1, #text do
    local byte = text:byte(at)
    if byte < 128 or byte > 191 then n = n + 1 end
    if n > wide then return text:sub(1, at - 1) end
  end
  return text
end

-- The labels, cut to `wide` characters; nil if that makes different ones equal.
local function abbreviated(labels, wide)
  local list, whole = {}, {}
  for k, label in ipairs(labels) do
    list[k] = cut(label, wide)
    if whole[list[k]] and whole[list[k]] ~= label then return nil end
    whole[list[k]] = label
  end
  return list
end

-- The cells as lines. names: labels left of the rows; rule: labels below the columns (nil: none); wide: characters of a
-- column; ramp: shades in place of values (nil: values).
local function grid(plot, names, rule, wide, ramp)
  local out, left = {}, widest(names)
  for i, row in ipairs(plot.rows) do
    local cells = { right(names and names[i] or "", left) }
    for j, v in ipairs(row) do
      cells[j + 1] = ramp and shade(ramp, plot.y_axis, v):rep(wide) or right(axes.label(v), wide)
    end
    out[i] = table.concat(cells, " ")
  end
  if rule then
    local cells = { right("", left) }
    for j, label in ipairs(rule) do cells[j + 1] = right(label, wide) end
    out[#out + 1] = table.concat(cells, " ")
  end
  return out
end

-- Numbers in place of labels, and lines that say which label each stands for.
local function numbered(labels, first, columns)
  local ids, legend = {}, {}
  for k, label in ipairs(labels or {}) do
    ids[k] = ("%d"):format(first + k - 1)
    local key = ids[k] .. " " .. label
    if label == ids[k] then
      key = nil
    elseif #legend > 0 and characters(legend[#legend]) + 2 + characters(key) <= columns then
      key = table.remove(legend) .. "  " .. key
    end
    legend[#legend + 1] = key
  end
  return labels and ids, legend
end

local function cleaned(labels)
  local list = {}
  for k, label in ipairs(labels or {}) do list[k] = clean(label) end
  return labels and list
end

local LEAST = 3                         -- the least number of characters that a label is cut to

-- The cells as lines with labels, values or both, and the lines of a legend. If they are wider than `columns`, column
-- labels are abbreviated; if that does not suffice, numbers replace all labels; then shades replace the values; finally
-- the cells are shades without labels. The third result is the width that numbered labels and cells of full width need,
-- if that is more than `columns`; otherwise nil.
local function labelled(plot, columns, ascii)
  local o, rows = plot.options, plot.rows
  local names, rule, count, ramp = cleaned(o.row_labels), cleaned(o.column_labels), #rows[1], ascii and LETTERS or BLOCKS
  local shaded, wide = not o.values and ramp or nil, 2
  for _, row in ipairs(o.values and rows or {}) do
    for _, v in ipairs(row) do wide = math.max(wide, #axes.label(v)) end
  end
  local room = math.floor((columns - widest(names)) / count) - 1
  if room >= math.max(wide, math.min(LEAST, widest(rule))) then
    local short = abbreviated(rule or {}, room)
    if short then return grid(plot, names, rule and short, math.max(wide, widest(short)), shaded), {} end
  end
  local ids, legend = numbered(names, plot.first, columns)
  local below, more = numbered(rule, plot.first, columns)
  if table.concat(legend) ~= table.concat(more) then
    if legend[1] then table.insert(legend, 1, "rows:") end
    if more[1] then legend[#legend + 1] = "columns:" end
    for _, key in ipairs(more) do legend[#legend + 1] = key end
  end
  local left, needed = widest(ids), nil
  wide = math.max(wide, widest(below))
  if left + (wide + 1) * count > columns then
    needed, wide, shaded = left + (wide + 1) * count, math.max(1, widest(below)), ramp
  end
  if left + (wide + 1) * count <= columns then return grid(plot, ids, below, wide, shaded), legend, needed end
  return shades(rows, plot.y_axis, columns, ascii), {}, needed
end

--- Cells shaded by their values, from low to high; a cell that is not finite is a question mark. Labels and values that
--- need more than `columns` characters are cut, numbered or left out; a line at the end says which width shows them.
---@param plot Plot
---@param columns integer
---@param ascii boolean
---@return string
function M.heatmap(plot, columns, ascii)
  local o, out, legend, needed = plot.options
  if o.values or o.row_labels or o.column_labels then
    out, legend, needed = labelled(plot, columns, ascii)
  else
    out, legend = shades(plot.rows, plot.y_axis, columns, ascii), {}
  end
  if o.x_label then
    local label = clean(o.x_label)
    out[#out + 1] = right(label, math.max(characters(out[#out]), characters(label)))
  end
  if o.y_label then table.insert(out, 1, clean(o.y_label)) end
  if o.title then table.insert(out, 1, clean(o.title)) end
  for _, key in ipairs(legend) do out[#out + 1] = key end
  out[#out + 1] = ("from %s to %s"):format(axes.label(plot.y_axis.low), axes.label(plot.y_axis.high))
  if needed then out[#out + 1] = ("columns = %d shows more"):format(needed) end
  return table.concat(out, "\n") .. "\n"
end

--- Images side by side, as shades of grey.
---@param plot Plot
---@param columns integer
---@param ascii boolean
---@return string
function M.images(plot, columns, ascii)
  local out, grey = { plot.options.title and clean(plot.options.title) }, axes.of("linear", { { 0, 255 } })
  local each = math.max(1, math.floor((columns + 2) / plot.columns) - 2)
  for first = 1, #plot.list, plot.columns do
    local drawn, most = {}, 0
    for k = first, math.min(#plot.list, first + plot.columns - 1) do
      local image, rows = plot.list[k], {}
      for y = 0, image.height - 1 do
        rows[y + 1] = {}
        for x = 0, image.width - 1 do
          local sum, at = 0, (y * image.width + x) * image.channels
          for c = 1, image.channels do sum = sum + image.pixels:byte(at + c) end
          rows[y + 1][x + 1] = sum / image.channels
        end
      end
      local lines = shades(rows, grey, each, ascii)
      local wide = #(lines[1]:gsub("[\128-\191]", ""))    -- characters, not bytes
      if image.label then
        local label = clean(image.label):sub(1, wide)
        table.insert(lines, 1, label .. (" "):rep(wide - #label))
      end
      lines.blank, most = (" "):rep(wide), math.max(most, #lines)
      drawn[#drawn + 1] = lines
    end
    for y = 1, most do
      local parts = {}
      for k, lines in ipairs(drawn) do parts[k] = lines[y] or lines.blank end
      out[#out + 1] = (table.concat(parts, "  "):gsub(" +$", ""))
    end
    if first + plot.columns <= #plot.list then out[#out + 1] = "" end
  end
  return table.concat(out, "\n") .. "\n"
end

return M
