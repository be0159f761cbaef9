-- SPDX-License-Identifier: MIT
--- metrics.csv: a row for each line of metrics.jsonl, a column for each name. A row is appended; but the
--- file is written again from metrics.jsonl if a name is new, which adds a column, or if the row replaces others.
local buffers = require "moonshard.run.buffer"
local folders = require "moonshard.run.folder"
local lib = require("moonshard.core.ffi").lib
local log = require "moonshard.core.log"
local regular = require "moonshard.io.regular"

local M = {}

local INTERVAL = 1                                      -- seconds between writes to the disk
local PART = 65536                                      -- bytes per write of a whole file

---@class CsvFile
local Csv = {}
Csv.__index = Csv

-- A value that is not a finite number is null in metrics.jsonl, and empty in metrics.csv.
local function put_row(buffer, object, columns)
  for k = 1, #columns do
    local value = object[columns[k]]
    if k > 1 then buffer:text "," end
    if type(value) == "number" and value - value == 0 then buffer:number(value) end
  end
  buffer:text "\n"
end

local function quoted(name) return name:find '[",\n]' and '"' .. name:gsub('"', '""') .. '"' or name end

local function columns_of(folder)
  local columns, known = { "step" }, { step = true }
  for object in folders.lines(folder .. "/metrics.jsonl") do
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
  return columns, known
end

-- Writes the whole file. Returns it, open for more rows; or nil and the reason.
local function write_all(self, path)
  local file, err = regular.create(path, path .. ".tmp")
  if not file then return nil, err end
  local buffer, header, ok = self.buffer, {}, true
  for k, name in ipairs(self.columns) do header[k] = quoted(name) end
  buffer.n = 0
  buffer:text(table.concat(header, ",") .. "\n")
  for object in folders.lines(self.folder .. "/metrics.jsonl") do
    put_row(buffer, object, self.columns)
    if ok and buffer.n >= PART then ok, err = buffer:write(file) end
  end
  if ok then ok, err = buffer:write(file) end
  if ok then ok, err = os.rename(path .. ".tmp", path) end
  if ok then return file end
  file:close()
  os.remove(path .. ".tmp")
  return nil, err
end

-- Stops writing the file, for example because the disk is full. The run goes on without it; a resumed run writes the
-- whole file again.
local function give_up(self, err)
  if self.file then self.file:close() end
  self.file = nil
  log.warn_once(("run: metrics.csv of '%s' is no longer written: %s"):format(self.folder, err))
end

local function rebuild(self)
  if self.file then self.file:close() end
  self.columns, self.known = columns_of(self.folder)
  self.written = lib.ms_time()
  local err
  self.file, err = write_all(self, self.folder .. "/metrics.csv")
  if not self.file then give_up(self, err) end
end

--- Opens metrics.csv of a run's folder.
---@param folder string
---@return CsvFile
function M.open(folder)
  local self = setmetatable({ folder = folder, buffer = buffers.new() }, Csv)
  rebuild(self)
  return self
end

-- If the process is killed, rows not yet written are restored from metrics.jsonl when the run continues.
local function flush(self)
  local ok, err, lost = self.buffer:write(self.file)
  if lost then give_up(self, err) end
  return ok, err
end

--- Adds a row, after its line was written to metrics.jsonl.
---@param object table<string, any>
---@param names string[]  the names of the line
---@param now number  seconds (ms_time)
---@param replaced boolean  whether the line replaces others
function Csv:row(object, names, now, replaced)
  if not self.file then return end
  if replaced then return rebuild(self) end
  for k = 1, #names do
    if not self.known[names[k]] then return rebuild(self) end
  end
  put_row(self.buffer, object, self.columns)
  if now - self.written >= INTERVAL then
    self.written = now
    flush(self)
  end
end

function Csv:close()
  if not self.file then return end
  local ok, err = flush(self)
  if self.file and not ok then return give_up(self, err) end
  if self.file then self.file:close() end
end

return M
