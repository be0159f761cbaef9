-- SPDX-License-Identifier: MIT
--- Compares runs: final and best values, the options that differ, curves; as text and as a page.
local cjson = require "cjson"
local read_json = require("moonshard.core.json").decode
local environment = require "moonshard.run.environment"
local escape = require("moonshard.plot.svg").escape
local folders = require "moonshard.run.folder"
local json = require "moonshard.run.json"
local page = require "moonshard.run.page"
local plot = require "moonshard.plot"
local utf8 = require "moonshard.run.text".utf8

local M = {}

local function config_of(path)
  local file = io.open(path .. "/config.json", "rb")
  local ok, config = pcall(read_json, file and file:read "*a" or "")
  if file then file:close() end
  return ok and type(config) == "table" and config or {}
end

-- A value with all its digits.
local function text_of(v)
  if v == nil then return "" end
  if type(v) == "table" then return (cjson.encode(v):gsub("\\/", "/")) end
  if type(v) == "number" then return (json({ v = v }, { "v" }, { digits = 17 }):match ": (.*)}") end
  return v == cjson.null and "null" or tostring(v)
end

local function columns_of(path, wanted)
  local series = {}
  for object in folders.lines(path .. "/metrics.jsonl") do
    for name, v in pairs(object) do
      local wants = type(name) == "string" and name ~= "step" and name ~= "time"
        and (wanted[name] or not next(wanted) and name:find "loss$")
      if wants then
        local s = series[name] or { x = {}, y = {} }
        series[name] = s
        s.x[#s.x + 1] = type(object.step) == "number" and object.step or #s.x + 1
        s.y[#s.y + 1] = type(v) == "number" and v or 0 / 0
      end
    end
  end
  return series
end

-- The values of an option as texts, one for each run. Fractions have five significant digits, or as many as distinguish
-- them; whole numbers have all, because seeds may differ in the last digit.
local function option_texts(runs, name)
  local values, whole, distinct = {}, {}, 0
  for k, run in ipairs(runs) do
    values[k] = run.config[name]
    local text = text_of(values[k])
    if not whole[text] then whole[text], distinct = true, distinct + 1 end
  end
  local texts
  for digits = 5, 17 do
    local seen, count = {}, 0
    texts = {}
    for k = 1, #runs do
      local v = values[k]
      local fraction = type(v) == "number" and v % 1 ~= 0
      texts[k] = fraction and ("%." .. digits .. "g"):format(v) or text_of(v)
      if not seen[texts[k]] then seen[texts[k]], count = true, count + 1 end
    end
    if count == distinct then break end
  end
  return texts
end

-- The names of the options in which the runs differ. `ranks` and `seed` count as options; the other facts about a run's
-- start (run/environment.lua), such as host and time, do not count, and neither does the option `out`.
local function options_that_differ(runs)
  local fact, names, list = { sessions = true, from_step = true, out = true }, {}, {}
  for _, name in ipairs(environment.names) do fact[name] = true end
  fact.ranks, fact.seed = nil, nil
  for _, run in ipairs(runs) do
    for name in pairs(run.config) do
      if type(name) == "string" and not fact[name] then names[name] = true end
    end
  end
  for name in pairs(names) do
    local first = text_of(runs[1].config[name])
    for _, run in ipairs(runs) do
      if text_of(run.config[name]) ~= first then
        list[#list + 1] = name
        break
      end
    end
  end
  table.sort(list)
  return list
end

-- The runs' names: those of their folders, or the whole paths of folders that have the same name.
local function run_names(paths)
  local names, count = {}, {}
  for k, path in ipairs(paths) do
    names[k] = path:match "([^/]+)/*$" or path
    count[names[k]] = (count[names[k]] or 0) + 1
  end
  for k, path in ipairs(paths) do
    if count[names[k]] > 1 then names[k] = path:match "^(.-)/*$" end
  end
  return names
end

local function more_is_better(name)
  return (name:find "acc" or name:find "_per_second$" or name == "mfu") and true or false
end

-- The last value of a series, and the best finite one with its step.
local function values_of(series, name)
  if not series then return nil end
  local more, best, at = more_is_better(name), nil, nil
  for k, v in ipairs(series.y) do
    local finite = v - v == 0
    if finite and (not best or v ~= best and (v > best) == more) then best, at = v, series.x[k] end
  end
  return series.y[#series.y], best, at
end

-- A function that gives what a run is sorted by, and whether the largest comes first: the run's name, the last or best
-- value of a metric, or an option. nil if there is no such column.
local function sort_key(c, column)
  if column == "run" then return function(run) return run.name end end
  for _, name in ipairs(c.metrics) do
    if column == name then return function(run) return (values_of(run.series[name], name)) end, more_is_better(name) end
    if column == "best " .. name then
      return function(run) return (select(2, values_of(run.series[name], name))) end, more_is_better(name)
    end
  end
  for _, name in ipairs(c.options) do
    if column == name then
      return function(run)
        local v = run.config[name]
        return type(v) == "number" and v or v ~= nil and text_of(v) or nil
      end
    end
  end
end

-- Sorts the runs by a column; those without a value in it come last. Equal ones keep their order.
local function sort(c, column)
  local key, descending = sort_key(c, column)
  if not key then
    local columns = { "run" }
    for _, name in ipairs(c.metrics) do
      columns[#columns + 1] = name
      columns[#columns + 1] = "best " .. name
    end
    for _, name in ipairs(c.options) do columns[#columns + 1] = name end
    error(("there is no column '%s' to sort by, expected one of: %s"):format(column, table.concat(columns, ", ")), 0)
  end
  local keys, place = {}, {}
  for k, run in ipairs(c.runs) do
    local v = key(run)
    if v == v then keys[run] = v end                    -- not nan
    place[run] = k
  end
  table.sort(c.runs, function(a, b)
    local x, y = keys[a], keys[b]
    if x == y then return place[a] < place[b] end
    if x == nil or y == nil then return y == nil end
    if type(x) ~= type(y) then return type(x) == "number" end
    if descending then return x > y end
    return x < y
  end)
end

--- Reads runs. Raises an error that names a folder without a run, a metric that no run has, or an unknown column.
---@param paths string[]  the runs' folders
---@param metrics string[]  names to compare; empty: those that end in "loss"
---@param column? string  the column to sort by (default: the last value of the first of `metrics`; if that is empty, of
---   val_loss, or of the first name in alphabetical order if there is no val_loss; the best run comes first)
---@return table comparison
function M.read(paths, metrics, column)
  local runs, wanted, names, has, names_of_paths = {}, {}, {}, {}, run_names(paths)
  for _, name in ipairs(metrics) do wanted[name] = true end
  for k, path in ipairs(paths) do
    if not folders.exists(path) then error(("'%s' contains no run"):format(path), 0) end
    runs[k] = { name = names_of_paths[k], config = config_of(path), series = columns_of(path, wanted) }
    for metric in pairs(runs[k].series) do has[metric] = true end
  end
  for name in pairs(has) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(metrics) do
    if not has[name] then error(("no run has the metric '%s'"):format(name), 0) end
  end
  local c = { runs = runs, metrics = names, options = options_that_differ(runs) }
  column = column or metrics[1] or has.val_loss and "val_loss" or names[1]
  if column then sort(c, column) end
  return c
end

local function summary(series, name)
  local last, best, at = values_of(series, name)
  return last and ("%.5g"):format(last) or "", best and ("%.5g at %d"):format(best, at) or ""
end

local function rows_of(c)
  local head = { "run" }
  for _, name in ipairs(c.metrics) do
    head[#head + 1] = name
    head[#head + 1] = "best " .. name
  end
  for _, name in ipairs(c.options) do head[#head + 1] = name end
  local rows, texts = { head }, {}
  for _, name in ipairs(c.options) do texts[name] = option_texts(c.runs, name) end
  for k, run in ipairs(c.runs) do
    local row = { run.name }
    for _, name in ipairs(c.metrics) do
      row[#row + 1], row[#row + 2] = summary(run.series[name], name)
    end
    for _, name in ipairs(c.options) do row[#row + 1] = texts[name][k] end
    rows[#rows + 1] = row
  end
  return rows
end

local function plots_of(c)
  local list = {}
  for _, name in ipairs(c.metrics) do
    local series = {}
    for _, run in ipairs(c.runs) do
      local s = run.series[name]
      if s then series[#series + 1] = { x = s.x, y = s.y, label = run.name } end
    end
    list[#list + 1] = plot.line(series, { title = name, x_label = "step" })
  end
  return list
end

local function characters(text) return select(2, text:gsub("[^\128-\191]", "")) end

local WIDEST = 40                                       -- characters of a cell

-- A value as the text of a cell: one line without control characters, at most WIDEST characters.
local function cell_of(text)
  text = utf8(text):gsub("[%c\127]", " ")
  if characters(text) <= WIDEST then return text end
  local at, n = 1, 0
  for from in text:gmatch "()[^\128-\191]" do
    n = n + 1
    if n > WIDEST - 3 then
      at = from
      break
    end
  end
  return text:sub(1, at - 1) .. "..."
end

-- Rows as lines with aligned columns, and their width.
local function aligned(rows)
  local widths, out, wide = {}, {}, 0
  for _, row in ipairs(rows) do
    for k, cell in ipairs(row) do
      row[k] = cell_of(cell)
      widths[k] = math.max(widths[k] or 0, characters(row[k]))
    end
  end
  for _, row in ipairs(rows) do
    local cells = {}
    for k, cell in ipairs(row) do cells[k] = cell .. (" "):rep(widths[k] - characters(cell)) end
    local line = table.concat(cells, "  "):gsub(" +$", "")
    out[#out + 1], wide = line .. "\n", math.max(wide, characters(line))
  end
  return table.concat(out), wide
end

-- The options as a table of their own, with a row for each.
local function options_of(c)
  local rows = { { "option" } }
  for _, run in ipairs(c.runs) do table.insert(rows[1], run.name) end
  for _, name in ipairs(c.options) do
    rows[#rows + 1] = { name, unpack(option_texts(c.runs, name)) }
  end
  return rows
end

local NARROW = 120                                      -- characters of a line that most terminals show

--- The comparison for a terminal. If the options would make the table too wide, they get a table of their own.
---@param c table  made by M.read
---@return string
function M.text(c)
  local text, wide = aligned(rows_of(c))
  if wide > NARROW and #c.options > 0 then
    text = aligned(rows_of { runs = c.runs, metrics = c.metrics, options = {} }) .. "\n" .. aligned(options_of(c))
  end
  local out = { text }
  for _, p in ipairs(plots_of(c)) do out[#out + 1] = "\n" .. p:text() end
  return table.concat(out)
end

local PAGE = debug.getinfo(1, "S").source:match "^@(.*)%.lua$" .. ".html"

--- The comparison as a page that needs no network.
---@param c table  made by M.read
---@return string
function M.html(c)
  local out = {}
  for k, row in ipairs(rows_of(c)) do
    local cells = {}
    for j, cell in ipairs(row) do
      local tag, scope = "td", ""
      if k == 1 then
        tag, scope = "th", ' scope="col"'
      elseif j == 1 then
        tag, scope = "th", ' scope="row"'
      end
      cells[j] = ("<%s%s>%s</%s>"):format(tag, scope, escape(cell), tag)
    end
    local before, after = k == 1 and "<thead>" or "", k == 1 and "</thead><tbody>" or ""
    out[#out + 1] = ("%s<tr>%s</tr>%s"):format(before, table.concat(cells), after)
  end
  local plots = {}
  for k, p in ipairs(plots_of(c)) do plots[k] = p:svg() end
  return page.text(PAGE, { rows = table.concat(out, "\n"), plots = table.concat(plots, "\n") })
end

return M
