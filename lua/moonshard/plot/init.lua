-- SPDX-License-Identifier: MIT
--- plot: plots of numbers and of images, as SVG and as text for the terminal.
local autograd = require "moonshard.autograd"
local axes = require "moonshard.plot.axis"
local errors = require "moonshard.core.errors"
local methods = require "moonshard.core.methods"
local opts = require "moonshard.core.opts"
local pictures = require "moonshard.run.pictures"
local svg = require "moonshard.plot.svg"
local tensor = require "moonshard.tensor"
local terminal = require "moonshard.plot.terminal"

local M = {}

-- ---- input ---------------------------------------------------------------------------------------------

local function plain_tensor(t, who)
  if t.placements then errors.raise("%s is sharded; pass t:full_tensor()", who) end
  return autograd.no_grad(function() return t:detach():to("cpu"):double():tolist() end)
end

-- The numbers of a list, or of a tensor of one dimension, as a list.
local function numbers(list, who)
  if tensor.is_tensor(list) then
    if #list.shape ~= 1 then errors.raise("%s has shape [%s], expected one dimension", who, table.concat(list.shape, ", ")) end
    return plain_tensor(list, who)
  end
  if not opts.is_plain(list) then opts.wrong(list, "a list of numbers or a tensor of one dimension", "%s", who) end
  for k = 1, #list do
    if type(list[k]) ~= "number" then opts.wrong(list[k], "a number (nan makes a gap)", "%s: element %d", who, k) end
  end
  return list
end

local SERIES = { x = true, y = true, label = true }

local function one_series(s, who)
  if tensor.is_tensor(s) or not opts.is_plain(s) or type(s[1]) == "number" then s = { y = s } end
  for name in pairs(s) do
    if not SERIES[name] then errors.raise("%s: unknown field '%s', expected x, y and label", who, tostring(name)) end
  end
  if s.y == nil then errors.raise("%s: 'y' is missing, expected a list of numbers", who) end
  local y, x = numbers(s.y, who .. ": 'y'"), {}
  if #y == 0 then errors.raise("%s: 'y' is empty, expected at least one number", who) end
  if s.x == nil then
    for k = 1, #y do x[k] = k end
  else
    x = numbers(s.x, who .. ": 'x'")
    if #x ~= #y then errors.raise("%s: the length of 'x' is %d, but the length of 'y' is %d", who, #x, #y) end
  end
  if s.label ~= nil then opts.expect(s.label, opts.string, "%s: 'label'", who) end
  return { x = x, y = y, label = s.label }
end

-- A list of series from one series or a list of them.
local function series_of(data, who)
  local list = {}
  if opts.is_plain(data) and data.y == nil and (type(data[1]) == "table" or tensor.is_tensor(data[1])) then
    for k = 1, #data do list[k] = one_series(data[k], ("%s: series %d"):format(who, k)) end
  else
    list[1] = one_series(data, who .. ": argument 1")
  end
  return list
end

local SCALE = opts.one_of({ "linear", "log" }, "linear")
local SCALES = { x_scale = SCALE, y_scale = SCALE }

local function options(who, given, more)
  local spec = { title = opts.string, x_label = opts.string, y_label = opts.string,
    width = opts.option(opts.whole_from(160), 640), height = opts.option(opts.whole_from(120), 360) }
  for name, kind in pairs(more or {}) do spec[name] = kind end
  return opts(who, given, spec)
end

local function names(list, count, who)
  if not list then return end
  if #list ~= count then errors.raise("%s has length %d, expected %d", who, #list, count) end
  for k = 1, #list do opts.expect(list[k], opts.string, "%s: element %d", who, k) end
end

-- ---- the plot --------------------------------------------------------------------------------------------

---@class Plot
---@field kind string  "line", "scatter", "histogram", "heatmap" or "images"
---@field first integer  the number that stands for the first row or column of a heat map where labels have no room
local Plot = {}
Plot.__index = Plot
Plot.__name = "Plot"

function Plot:__tostring()
  return ("Plot %s%s"):format(self.kind, self.options.title and " '" .. self.options.title .. "'" or "")
end

local function xy(kind, series, o)
  local xs, ys = {}, {}
  for k, s in ipairs(series) do
    xs[k], ys[k] = s.x, s.y
  end
  local y_axis = axes.of(o.y_scale, ys)
  local x_axis = axes.of(o.x_scale, xs)
  return setmetatable({ kind = kind, series = series, options = o, x_axis = x_axis, y_axis = y_axis }, Plot)
end

--- The plot as SVG: one element without scripts and references, light or dark as the reader's system prefers.
---@return string
function Plot:svg()
  if self.kind == "heatmap" then return svg.heatmap(self) end
  if self.kind == "images" then return svg.images(self) end
  return svg.xy(self)
end

--- The plot as lines of text: braille and blocks, or ASCII where the locale is not UTF-8.
---@param given? {columns: integer, rows: integer, ascii: boolean}
---   columns: width in characters; labels and values of a heat map for which this is too narrow are cut, numbered or
---   left out; rows: height of a line, scatter or histogram plot; ascii: use ASCII characters only
---@return string
function Plot:text(given)
  local o = opts("plot:text", given, { columns = opts.option(opts.whole_from(20), 72),
    rows = opts.option(opts.whole_from(3), 14), ascii = opts.boolean })
  local ascii = o.ascii
  if ascii == nil then ascii = not terminal.utf8() end
  if self.kind == "heatmap" then return terminal.heatmap(self, o.columns, ascii) end
  if self.kind == "images" then return terminal.images(self, o.columns, ascii) end
  return terminal.xy(self, o.columns, o.rows, ascii)
end

local FORMATS = { svg = true, html = true }               -- a browser shows an SVG element as a page, too

--- Writes the plot to an SVG file. Returns true, or nil and the reason. Errors: an extension of another format, such as
--- "png".
---@param path string  path of the file: FILE.svg, FILE.html for a page of the plot alone, or without an extension
---@return boolean? ok
---@return string? err
function Plot:save(path)
  opts.expect(path, opts.string, "plot:save: argument 1")
  local extension = path:match "[^/]%.([^./]*)$"
  if extension and not FORMATS[extension:lower()] then
    errors.raise("plot:save: '%s' has the extension '%s', but plots are saved as SVG: write .svg or .html; plot:text() is "
      .. "the plot as text", path, extension)
  end
  local file, err = io.open(path, "wb")
  if not file then return nil, err end
  local ok
  ok, err = file:write(self:svg())
  local closed, why = file:close()
  if ok and closed then return true end
  return nil, ("cannot write '%s': %s"):format(path, err or why)
end

-- ---- kinds ------------------------------------------------------------------------------------------------

--- Lines through points. Values that are not finite make gaps, and so do values on a logarithmic axis that are not
--- positive.
---@param data number[]|Tensor|table|table[]  numbers, a series { x = ..., y = ..., label = ... }, or a list of either
---@param given? {title: string, x_label: string, y_label: string, x_scale: string, y_scale: string, width: integer, height: integer}
---   title: text above the plot; x_label: label of the x axis; y_label: label of the y axis; x_scale: "linear" or
---   "log"; y_scale: "linear" or "log"; width: width of the SVG in pixels; height: height of the SVG in pixels
---@return Plot
function M.line(data, given)
  local o = options("plot.line", given, SCALES)
  return xy("line", series_of(data, "plot.line"), o)
end

--- Points. Values that an axis cannot show are left out.
---@param data number[]|Tensor|table|table[]  numbers, a series { x = ..., y = ..., label = ... }, or a list of either
---@param given? {title: string, x_label: string, y_label: string, x_scale: string, y_scale: string, width: integer, height: integer}
---   title: text above the plot; x_label: label of the x axis; y_label: label of the y axis; x_scale: "linear" or
---   "log"; y_scale: "linear" or "log"; width: width of the SVG in pixels; height: height of the SVG in pixels
---@return Plot
function M.scatter(data, given)
  local o = options("plot.scatter", given, SCALES)
  return xy("scatter", series_of(data, "plot.scatter"), o)
end

--- Bars for the number of values in bins of equal width. Values that are not finite do not count.
---@param values number[]|Tensor  the values
---@param given? {bins: integer, title: string, x_label: string, y_label: string, width: integer, height: integer}
---   bins: number of bins; title: text above the plot; x_label: label of the x axis; y_label: label of the y axis;
---   width: width of the SVG in pixels; height: height of the SVG in pixels
---@return Plot
function M.histogram(values, given)
  local o = options("plot.histogram", given, { bins = opts.option(opts.whole_from(1), 30) })
  local list, finite = numbers(values, "plot.histogram: argument 1"), {}
  for k = 1, #list do
    if list[k] - list[k] == 0 then finite[#finite + 1] = list[k] end
  end
  if #finite == 0 then errors.raise "plot.histogram: argument 1 has no finite number" end
  local axis, counts, limits = axes.of("linear", { finite }), {}, {}
  for k = 1, o.bins do counts[k] = 0 end
  for k = 0, o.bins do limits[k + 1] = axis.low * (1 - k / o.bins) + axis.high * (k / o.bins) end
  for k = 1, #finite do
    local bin = math.min(o.bins, math.floor(axis:place(finite[k]) * o.bins) + 1)
    counts[bin] = counts[bin] + 1
  end
  o.x_scale, o.y_scale = "linear", "linear"
  local plot = xy("histogram", { { x = limits, y = counts, counts = counts, limits = limits } }, o)
  plot.y_axis = axes.of("linear", { counts, { 0 } })
  return plot
end

--- Cells coloured by their values: row 1 on top. A cell that is not finite stays empty.
---@param rows number[][]|Tensor  rows of equal length, or a tensor of two dimensions
---@param given? {row_labels: string[], column_labels: string[], values: boolean, title: string, x_label: string, y_label: string, width: integer, height: integer}
---   row_labels: texts left of the rows; column_labels: texts below the columns; values: write each cell's value into
---   it, for few cells such as a confusion matrix's; title: text above the plot; x_label: what the columns are;
---   y_label: what the rows are; width: width of the SVG in pixels; height: height of the SVG in pixels
---@return Plot
function M.heatmap(rows, given)
  local who = "plot.heatmap"
  local o = opts(who, given, { title = opts.string, row_labels = opts.table, column_labels = opts.table, values = false,
    x_label = opts.string, y_label = opts.string, width = opts.option(opts.whole_from(160), 640),
    height = opts.option(opts.whole_from(120), 360) })
  if tensor.is_tensor(rows) then
    if #rows.shape ~= 2 then
      errors.raise("%s: argument 1 has shape [%s], expected two dimensions", who, table.concat(rows.shape, ", "))
    end
    rows = plain_tensor(rows, who .. ": argument 1")
  end
  if not opts.is_plain(rows) then opts.wrong(rows, "a list of rows or a tensor of two dimensions", "%s: argument 1", who) end
  local lists = {}
  for k = 1, #rows do
    lists[k] = numbers(rows[k], ("%s: row %d"):format(who, k))
    if #lists[k] ~= #lists[1] then errors.raise("%s: row %d has length %d, but row 1 has length %d", who, k, #lists[k], #lists[1]) end
  end
  if #lists == 0 or #lists[1] == 0 then errors.raise("%s: argument 1 is empty, expected at least one cell", who) end
  names(o.row_labels, #lists, who .. ": option 'row_labels'")
  names(o.column_labels, #lists[1], who .. ": option 'column_labels'")
  return setmetatable({ kind = "heatmap", first = 1, rows = lists, options = o, y_axis = axes.of("linear", lists) }, Plot)
end

--- Images in a grid.
---@param list Tensor[]  [H, W], [1, H, W] or [3, H, W]; floating point from 0 to 1, other dtypes from 0 to 255
---@param given? {columns: integer, labels: string[], title: string, width: integer, height: integer}
---   columns: images in a row (default: about as many as rows); labels: one text for each image; title: text above the
---   grid; width: width of the SVG in pixels; height: height of the SVG in pixels
---@return Plot
function M.images(list, given)
  local who = "plot.images"
  local o = opts(who, given, { title = opts.string, labels = opts.table, columns = opts.whole_from(1),
    width = opts.option(opts.whole_from(160), 640), height = opts.option(opts.whole_from(120), 360) })
  if not opts.is_plain(list) or #list == 0 then opts.wrong(list, "a list of at least one tensor", "%s: argument 1", who) end
  names(o.labels, #list, who .. ": option 'labels'")
  local drawn = {}
  for k, t in ipairs(list) do
    if not tensor.is_tensor(t) then opts.wrong(t, "a tensor", "%s: image %d", who, k) end
    local width, height, channels, pixels = pictures.image(t, ("%s: image %d"):format(who, k))
    drawn[k] = { width = width, height = height, channels = channels, pixels = pixels, label = o.labels and o.labels[k] }
  end
  return setmetatable({ kind = "images", list = drawn, options = o,
    columns = math.min(#drawn, o.columns or math.ceil(math.sqrt(#drawn))) }, Plot)
end

methods.guard(Plot, "plot")
methods.close(Plot)

return M
