-- SPDX-License-Identifier: MIT
--- Draws plots as SVG: one element without scripts or references, light or dark as the reader's system prefers.
local axes = require "moonshard.plot.axis"
local base64 = require "moonshard.core.base64"
local png = require "moonshard.data.png"
local utf8 = require "moonshard.run.text".utf8

local M = {}

local STYLE = [[<style>
.plot { font: 12px system-ui, sans-serif; --ink: #1f2328; --faint: #59636e; --grid: #e6e8eb; --ground: #ffffff }
.plot .c1 { --c: #2563c9 } .plot .c2 { --c: #c2410c } .plot .c3 { --c: #15803d } .plot .c4 { --c: #7e3fb0 }
.plot .c5 { --c: #b4236a } .plot .c6 { --c: #0e7490 } .plot .c7 { --c: #a16207 } .plot .c8 { --c: #57606a }
@media (prefers-color-scheme: dark) {
.plot { --ink: #e6edf3; --faint: #9198a1; --grid: #2a3038; --ground: #0f1319 }
.plot .c1 { --c: #6ea8fe } .plot .c2 { --c: #ff9b6a } .plot .c3 { --c: #5fd08a } .plot .c4 { --c: #c39bf0 }
.plot .c5 { --c: #f58ab8 } .plot .c6 { --c: #56c8de } .plot .c7 { --c: #e3b341 } .plot .c8 { --c: #a8b1bb } }
.plot .ground { fill: var(--ground) } .plot text { fill: var(--faint) }
.plot .title { fill: var(--ink); font-size: 14px; font-weight: 600 } .plot .key { fill: var(--ink) }
.plot .grid { stroke: var(--grid) }
.plot .line { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-linejoin: round }
.plot .r1 { stroke-dasharray: 7 3 } .plot .r2 { stroke-dasharray: 2 3 } .plot .r3 { stroke-dasharray: 9 3 2 3 }
.plot .points { fill: var(--c); fill-opacity: .75 } .plot .bars { fill: var(--c); fill-opacity: .85 }
</style>]]

--- Escapes text for XML contents and attributes. Invalid UTF-8 and the control characters that XML forbids become
--- U+FFFD.
---@param text string
---@return string
function M.escape(text)
  text = utf8(text):gsub("[&<>\"']",
    { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;", ["'"] = "&#39;" })
  return (text:gsub("[%z\1-\8\11\12\14-\31]", "\239\191\189"))
end

local function element(out, format, ...) out[#out + 1] = format:format(...) end

local function text(out, class, anchor, x, y, content)
  element(out, '<text class="%s" text-anchor="%s" x="%.1f" y="%.1f">%s</text>', class, anchor, x, y, M.escape(content))
end

-- Begins a picture. height: its height in pixels (default: the option `height`).
local function begin(plot, kind, height)
  local o = plot.options
  local out = {}
  height = height or o.height
  element(out, '<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" aria-label="%s" viewBox="0 0 %d %d" '
    .. 'width="%d" height="%d">', M.escape(o.title or kind), o.width, height, o.width, height)
  out[2] = STYLE
  element(out, '<rect class="ground" width="%d" height="%d"/>', o.width, height)
  if o.title then text(out, "title", "start", 16, 24, o.title) end
  return out
end

-- The points of a line as pixels. Of the points in one column of pixels, only the first, the lowest, the highest and
-- the last are drawn: the picture is the same. Calls `emit` with "M" (move to) or "L" (line to) and the coordinates.
local function trace(series, x_axis, y_axis, box, emit)
  local column, first, least, most, last
  local down = false
  local function put(p)
    emit(down and "L" or "M", p[1], p[2])
    down = true
  end
  local function flush()
    if not column then return end
    put(first)
    local a, b = least, most
    if a[3] > b[3] then a, b = b, a end
    if a ~= first and a ~= last then put(a) end
    if b ~= first and b ~= last and b ~= a then put(b) end
    if last ~= first then put(last) end
    column = nil
  end
  for k = 1, #series.y do
    local x, y = series.x[k], series.y[k]
    if x_axis:shows(x) and y_axis:shows(y) then
      local p = { box.left + x_axis:place(x) * box.width, box.bottom - y_axis:place(y) * box.height, k }
      local at = math.floor(p[1])
      if at ~= column then
        flush()
        column, first, least, most = at, p, p, p
      end
      last = p
      if p[2] < least[2] then least = p end
      if p[2] > most[2] then most = p end
    else
      flush()
      down = false
    end
  end
  flush()
end

local draw = {}

function draw.line(out, series, class, x_axis, y_axis, box)
  local path = {}
  trace(series, x_axis, y_axis, box, function(pen, x, y) path[#path + 1] = ("%s%.1f %.1f"):format(pen, x, y) end)
  -- A point between gaps is a line of length 0; the round cap makes it visible.
  element(out, '<path class="line %s" stroke-linecap="round" data-points="%d" d="%s"/>', class, #series.y,
    (table.concat(path):gsub("(M(%S+ [%d.-]+))%f[M%z]", "%1L%2")))
end

function draw.scatter(out, series, class, x_axis, y_axis, box)
  element(out, '<g class="points %s" data-points="%d">', class, #series.y)
  for k = 1, #series.y do
    local x, y = series.x[k], series.y[k]
    if x_axis:shows(x) and y_axis:shows(y) then
      element(out, '<circle cx="%.1f" cy="%.1f" r="2.5"/>', box.left + x_axis:place(x) * box.width,
        box.bottom - y_axis:place(y) * box.height)
    end
  end
  element(out, "</g>")
end

function draw.histogram(out, series, class, x_axis, y_axis, box)
  element(out, '<g class="bars %s" data-points="%d">', class, #series.y)
  for k, count in ipairs(series.counts) do
    local left, right = x_axis:place(series.limits[k]) * box.width, x_axis:place(series.limits[k + 1]) * box.width
    local height = y_axis:shows(count) and y_axis:place(count) * box.height or 0
    element(out, '<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f"><title>%s to %s: %d</title></rect>', box.left + left,
      box.bottom - height, math.max(1, right - left - 1), height, axes.label(series.limits[k]),
      axes.label(series.limits[k + 1]), count)
  end
  element(out, "</g>")
end

-- The CSS classes of series k: one of eight colours, and for lines one of four patterns.
local function class_of(k)
  local round = math.floor((k - 1) / 8) % 4
  return ("c%d"):format((k - 1) % 8 + 1) .. (round > 0 and " r" .. round or "")
end

-- The legend: a key for each series, in lines of at most `width` pixels. Returns the keys with their places, and the
-- height of the legend. It has no keys if no series has a label.
local function keys_of(plot, width)
  local keys, x, y, named = {}, 16, 0, false
  for k, s in ipairs(plot.series) do
    named = named or s.label ~= nil
    local label = s.label or "series " .. k
    local wide = 34 + 7 * #label
    if x > 16 and x + wide - 16 > width then x, y = 16, y + 18 end
    keys[k] = { label = label, x = x, y = y }
    x = x + wide
  end
  return named and keys or {}, named and y + 20 or 20
end

--- A plot with two axes: lines, points or bars.
---@param plot Plot
---@return string
function M.xy(plot)
  local o, x_axis, y_axis = plot.options, plot.x_axis, plot.y_axis
  local keys, high = keys_of(plot, o.width)
  local height = o.height + high - 20             -- the plot keeps its height if the legend has several lines
  local out = begin(plot, plot.kind .. " plot", height)
  local y_ticks, y_labels = y_axis:ticks(math.max(2, math.floor(o.height / 60)))
  local x_ticks, x_labels = x_axis:ticks(math.max(2, math.floor(o.width / 90)))
  local longest = 1
  for _, label in ipairs(y_labels) do longest = math.max(longest, #label) end
  local top = 16 + (o.title and 24 or 0) + (keys[1] and high or 0) + (o.y_label and 18 or 0)
  local box = { left = 24 + 7 * longest, bottom = height - (o.x_label and 48 or 30) }
  box.width, box.height = math.max(1, o.width - 20 - box.left), math.max(1, box.bottom - top)
  for k, key in ipairs(keys) do
    local y = key.y + (o.title and 46 or 22)
    element(out, '<path class="line %s" style="stroke-width: 3" d="M%d %.1fh14"/>', class_of(k), key.x, y - 3.5)
    text(out, "key", "start", key.x + 18, y, key.label)
  end
  if o.y_label then text(out, "label", "start", 16, top - 10, o.y_label) end
  if o.x_label then text(out, "label", "end", box.left + box.width, height - 10, o.x_label) end
  for k, v in ipairs(y_ticks) do
    local y = box.bottom - y_axis:place(v) * box.height
    element(out, '<path class="grid" d="M%.1f %.1fh%.1f"/>', box.left, y, box.width)
    text(out, "tick", "end", box.left - 8, y + 4, y_labels[k])
  end
  for k, v in ipairs(x_ticks) do
    local x = box.left + x_axis:place(v) * box.width
    element(out, '<path class="grid" d="M%.1f %.1fv5"/>', x, box.bottom)
    text(out, "tick", "middle", x, box.bottom + 18, x_labels[k])
  end
  for k, s in ipairs(plot.series) do draw[plot.kind](out, s, class_of(k), x_axis, y_axis, box) end
  out[#out + 1] = "</svg>\n"
  return table.concat(out, "\n")
end

-- Five colours of viridis, from low to high.
local COLOURS = { { 68, 1, 84 }, { 59, 82, 139 }, { 33, 145, 140 }, { 94, 201, 98 }, { 253, 231, 37 } }

local function colour(place)
  local at = math.max(0, math.min(1, place)) * 4
  local k = math.min(3, math.floor(at))
  local a, b, part = COLOURS[k + 1], COLOURS[k + 2], at - k
  local byte = {}
  for c = 1, 3 do byte[c] = math.floor(a[c] + (b[c] - a[c]) * part + 0.5) end
  return ("#%02x%02x%02x"):format(byte[1], byte[2], byte[3])
end

-- Writes the values into the cells: dark on bright colours, bright on dark ones.
local function values_of(plot, out, left, top, width, height)
  for i, row in ipairs(plot.rows) do
    for j, v in ipairs(row) do
      if plot.y_axis:shows(v) then
        element(out, '<text style="fill: %s" text-anchor="middle" x="%.1f" y="%.1f">%s</text>',
          plot.y_axis:place(v) > 0.6 and "#1f2328" or "#ffffff", left + (j - 0.5) * width,
          top + (i - 0.5) * height + 4, axes.label(v))
      end
    end
  end
end

-- The height of the labels below columns of `width` pixels; and whether the labels are slanted: they are if one is
-- wider than its column. most: the largest height of slanted labels.
local function room_of(labels, width, most)
  if not labels then return 16, false end
  local longest = 0
  for _, label in ipairs(labels) do longest = math.max(longest, 7 * #label) end
  if longest <= width then return 34, false end
  return math.min(most, 24 + longest * math.sin(math.rad(35))), true
end

--- Cells coloured by their values; a cell that is not finite stays empty.
---@param plot Plot
---@return string
function M.heatmap(plot)
  local o, out, axis = plot.options, begin(plot, "heat map"), plot.y_axis
  local top, left = 16 + (o.title and 24 or 0) + (o.y_label and 18 or 0), 16
  for _, label in ipairs(o.row_labels or {}) do left = math.max(left, 24 + 7 * #label) end
  local columns = #plot.rows[1]
  local width = (o.width - left - 84) / columns
  local below, slanted = room_of(o.column_labels, width, o.height / 3)
  local height = (o.height - top - below - (o.x_label and 18 or 0)) / #plot.rows
  element(out, '<g class="cells" data-points="%d">', #plot.rows * columns)
  for i, row in ipairs(plot.rows) do
    for j, v in ipairs(row) do
      if axis:shows(v) then
        element(out, '<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"><title>row %d, column %d: %s</title>'
          .. '</rect>', left + (j - 1) * width, top + (i - 1) * height, width, height, colour(axis:place(v)), i, j,
          axes.label(v))
      end
    end
  end
  element(out, "</g>")
  if o.y_label then text(out, "label", "start", 16, top - 8, o.y_label) end
  if o.x_label then text(out, "label", "end", left + columns * width, o.height - 10, o.x_label) end
  if o.values then values_of(plot, out, left, top, width, height) end
  for i, label in ipairs(o.row_labels or {}) do text(out, "tick", "end", left - 8, top + (i - 0.5) * height + 4, label) end
  for j, label in ipairs(o.column_labels or {}) do
    local x, y = left + (j - 0.5) * width, top + #plot.rows * height + 18
    if slanted then
      element(out, '<text class="tick" text-anchor="end" transform="translate(%.1f %.1f) rotate(-35)">%s</text>', x + 4, y - 4,
        M.escape(label))
    else
      text(out, "tick", "middle", x, y, label)
    end
  end
  local bar = #plot.rows * height / 32
  for k = 0, 31 do
    element(out, '<rect x="%d" y="%.1f" width="12" height="%.1f" fill="%s"/>', o.width - 72, top + (31 - k) * bar,
      bar + 0.5, colour((k + 0.5) / 32))
  end
  local ticks, labels = axis:ticks(5)
  for k, v in ipairs(ticks) do
    text(out, "tick", "start", o.width - 54, top + 32 * bar * (1 - axis:place(v)) + 4, labels[k])
  end
  out[#out + 1] = "</svg>\n"
  return table.concat(out, "\n")
end

--- Images in a grid, with their captions.
---@param plot Plot
---@return string
function M.images(plot)
  local o, out = plot.options, begin(plot, "images")
  local top, columns = 16 + (o.title and 24 or 0), plot.columns
  local side, lines = (o.width - 32) / columns, math.ceil(#plot.list / columns)
  local high = (o.height - top - 8) / lines
  for k, image in ipairs(plot.list) do
    local x, y = 16 + (k - 1) % columns * side, top + math.floor((k - 1) / columns) * high
    local bytes = png.encode(image.width, image.height, image.channels, image.pixels, "plot:svg")
    element(out, '<image x="%.1f" y="%.1f" width="%.1f" height="%.1f" style="image-rendering: pixelated" '
      .. 'href="data:image/png;base64,%s"><title>%s</title></image>', x, y, math.max(1, side - 8),
      math.max(1, high - (o.labels and 22 or 8)), base64.encode(bytes),
      M.escape(image.label or "image " .. k))
    if image.label then text(out, "tick", "middle", x + side / 2 - 4, y + high - 6, image.label) end
  end
  out[#out + 1] = "</svg>\n"
  return table.concat(out, "\n")
end

return M
