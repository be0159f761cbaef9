-- SPDX-License-Identifier: MIT
--- metrics.csv: a row for each line of metrics.jsonl, a column for each name. A new name adds a column, for which the
--- file is written again from metrics.jsonl; other rows are appended.
local folders = require "moonshard.run.folder"
local lib = require("moonshard.core.ffi").lib

local M = {}

local INTERVAL = 1                                      -- seconds between writes to the disk

---@class CsvFile
local Csv = {}
Csv.__index = Csv

local function cell(value)
  if type(value) == "number" then return ("%.9g"):format(value) end
  return ""                                             -- absent, or null: not a finite number
end

local cells = {}
local function write_row(file, object, columns)
  for k = 1, #columns do cells[k] = cell(object[columns[k]]) end
  return file:write(table.concat(cells, ",", 1, #columns), "\n")
end

local function quoted(name) return name:find '[",\n]' and '"' .. name:gsub('"', '""') .. '"' or name end

-- Writes the whole file, and keeps it open for more rows.
local function rebuild(self)
  if self.file then self.file:close() end
  local columns, known = { "step" }, { step = true }
  for object in folders.lines(self.folder .. "/metrics.jsonl") do
    local names = {}
    for name in pairs(object) do
      if not known[name] then
        known[name] = true
        names[#names + 1] = name
      end
    end
    table.sort(names)
    for _, name in ipairs(names) do columns[#columns + 1] = name end
  end
  self.columns, self.known = columns, known
  local path = self.folder .. "/metrics.csv"
  local file = assert(io.open(path .. ".tmp", "w"))
  file:setvbuf("full", 65536)
  local header = {}
  for k, name in ipairs(columns) do header[k] = quoted(name) end
  file:write(table.concat(header, ","), "\n")
  for object in folders.lines(self.folder .. "/metrics.jsonl") do write_row(file, object, columns) end
  file:flush()
  self.written = lib.ms_time()
  assert(os.rename(path .. ".tmp", path))
  self.file = file
end

--- Opens metrics.csv of a run's folder.
---@param folder string
---@return CsvFile
function M.open(folder)
  local self = setmetatable({ folder = folder }, Csv)
  rebuild(self)
  return self
end

--- Adds a row, after its line was written to metrics.jsonl.
---@param object table<string, any>
---@param names string[]  the names of the line
function Csv:row(object, names)
  for k = 1, #names do
    if not self.known[names[k]] then return rebuild(self) end
  end
  write_row(self.file, object, self.columns)
  -- If the process is killed, rows not yet written are restored from metrics.jsonl when the run continues.
  local now = lib.ms_time()
  if now - self.written >= INTERVAL then
    self.file:flush()
    self.written = now
  end
end

function Csv:close() self.file:close() end

return M
