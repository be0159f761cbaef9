-- SPDX-License-Identifier: MIT
--- The folder of one training run: `config.json` (the value of every option), `metrics.jsonl` (one object per line),
--- `samples.txt`, `step-N.safetensors`. Rank 0 writes it; on other ranks the folder object does nothing.
local lfs = require "lfs"

local M = {}

-- ---- JSON: cjson writes 14 digits and refuses NaN --------------------------------------------------

local escapes = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\t"] = "\\t", ["\r"] = "\\r" }

local function escaped(c) return escapes[c] or ("\\u%04x"):format(c:byte()) end

local formats = {}                                      -- indexed by number of digits
local function text_of(value, digits)
  local kind = type(value)
  if kind == "number" then
    if value ~= value or value == math.huge or value == -math.huge then return "null" end
    if value % 1 == 0 and math.abs(value) < 2 ^ 53 then return ("%.0f"):format(value) end
    if digits >= 15 then                                -- the shortest text that reads back as this number
      for n = 15, 16 do
        local short = ("%." .. n .. "g"):format(value)
        if tonumber(short) == value then return short end
      end
    end
    formats[digits] = formats[digits] or ("%%.%dg"):format(digits)
    return formats[digits]:format(value)
  elseif kind == "string" then
    return '"' .. value:gsub('[%c"\\]', escaped) .. '"'
  elseif kind == "boolean" then
    return tostring(value)
  elseif kind == "table" and (value[1] ~= nil or next(value) == nil) then
    local parts = {}
    for k, v in ipairs(value) do parts[k] = text_of(v, digits) end
    return "[" .. table.concat(parts, ", ") .. "]"
  end
  error(("run_folder: cannot write %s as JSON"):format(kind), 0)
end

-- One line is written per step. To reduce garbage, quoted names are cached and one table is reused for the pieces of a
-- line.
local quoted = setmetatable({}, { __index = function(t, name)
  local text = text_of(name)
  t[name] = text
  return text
end })
local pieces = {}

--- A flat table as one JSON object, in the order of `names` or of the sorted keys. Numbers have 9 digits, enough to
--- distinguish float32 values, or the given number of digits; NaN and infinity become null.
---@param object table  values by name: numbers, strings, booleans
---@param names? string[]  the names to write, in order (default: all, sorted)
---@param given? {digits: integer, separator: string}
---@return string
function M.json(object, names, given)
  if not names then
    names = {}
    for name in pairs(object) do names[#names + 1] = name end
    table.sort(names)
  end
  local digits, separator = given and given.digits or 9, given and given.separator or ", "
  local n = 1
  pieces[1] = "{"
  for k = 1, #names do
    local name, value = names[k], object[names[k]]
    if value ~= nil then
      if n > 1 then pieces[n + 1], n = separator, n + 1 end
      pieces[n + 1], pieces[n + 2], pieces[n + 3] = quoted[name], ": ", text_of(value, digits)
      n = n + 3
    end
  end
  pieces[n + 1] = "}"
  return table.concat(pieces, "", 1, n + 1)
end

-- ---- the folder ------------------------------------------------------------------------------------

---@class RunFolder
---@field path string  of the folder
---@field note? string  why the folder is not in runs/
local Folder = {}
Folder.__index = Folder

local function make(path)
  local at = ""
  for part in (path .. "/"):gmatch "([^/]*)/" do
    at = at .. part .. "/"
    if part ~= "" and lfs.attributes(at, "mode") ~= "directory" then
      local ok, err = lfs.mkdir(at)
      if not ok and lfs.attributes(at, "mode") ~= "directory" then return nil, err end
    end
  end
  return true
end

-- Mode "x" does not replace a file and does not wait for a pipe.
local function write(path, text)
  local f, err = io.open(path, "wx")
  if not f then return nil, err end
  f:write(text)
  f:close()
  return true
end

-- Makes a new folder in `top`, named by the next free number followed by `name`.
local function numbered(top, name)
  local ok, err = make(top)
  local highest, path = 0, top
  if ok then
    for entry in lfs.dir(top) do highest = math.max(highest, tonumber(entry:match "^(%d+)") or 0) end
    repeat                                              -- mkdir fails if another run has used the number
      highest = highest + 1
      path = ("%s/%03d%s"):format(top, highest, name)
      ok, err = lfs.mkdir(path)
    until ok or highest > 1e6 or lfs.attributes(path, "mode") == nil
  end
  if ok then return path end
  return nil, ("cannot make the folder '%s': %s"):format(path, err)
end

--- Makes the run's folder: `path`; or, in runs/, the next free number followed by `name`; or in ~/moonshard-runs if
--- runs/ cannot be written (the folder's `note` then gives the reason).
---@param path? string  of the folder (default: a new folder in runs/)
---@param name string  part of the new folder's name
---@param config table  the value of every option
---@return RunFolder? folder
---@return string? err
function M.new(path, name, config)
  local note
  if path then
    for _, file in ipairs { "metrics.jsonl", "config.json", "samples.txt" } do
      if lfs.symlinkattributes(path .. "/" .. file, "mode") then
        local what = file == "metrics.jsonl" and "a run" or file
        return nil, ("'%s' already contains %s; give another folder as --out, or omit --out"):format(path, what)
      end
    end
    local ok, err = make(path)
    if not ok then return nil, ("cannot make the folder '%s': %s"):format(path, err) end
  else
    local home, err_home = os.getenv "HOME", nil
    path, note = numbered("runs", name)
    if not path and home and home ~= "" then  -- the working directory may belong to another user, or be read-only
      path, err_home = numbered(home .. "/moonshard-runs", name)
    end
    if not path then return nil, ("%s%s; give a folder as --out"):format(note, err_home and ", and " .. err_home or "") end
  end
  local self = setmetatable({ path = path, note = note }, Folder)
  local ok, err = write(path .. "/config.json", M.json(config, nil, { digits = 17, separator = ",\n " }) .. "\n")
  if not ok then return nil, err end
  self.metrics, err = io.open(path .. "/metrics.jsonl", "wx")
  if not self.metrics then return nil, err end
  self.metrics:setvbuf "line"
  return self
end

--- A folder object for ranks that write nothing.
function M.none() return setmetatable({}, Folder) end

--- Appends a line to metrics.jsonl.
---@param object table  values by name
---@param names string[]  the names to write, in order
function Folder:metric(object, names)
  if self.metrics then self.metrics:write(M.json(object, names), "\n") end
end

--- Appends a text generated by the model to samples.txt.
function Folder:sample(step, text)
  if not self.path then return end
  local f = assert(io.open(self.path .. "/samples.txt", "a"))
  f:write(("---- step %d ----\n%s\n"):format(step, text))
  f:close()
end

--- Name of the checkpoint after a step.
function M.checkpoint_name(folder, step) return ("%s/step-%06d.safetensors"):format(folder, step) end

--- The checkpoint for a path: the path itself if it is a file, or the latest checkpoint in a run's folder.
---@param path string  of a file or of a run's folder
---@return string? file
---@return string? err
function M.find_checkpoint(path)
  local mode = lfs.attributes(path, "mode")
  if not mode then return nil, ("there is no file or folder '%s'"):format(path) end
  if mode ~= "directory" then return path end
  local best
  for name in lfs.dir(path) do
    local step = tonumber(name:match "^step%-(%d+)%.safetensors$")
    if step and (not best or step > best) then best = step end
  end
  if not best then return nil, ("there is no checkpoint (step-N.safetensors) in '%s'"):format(path) end
  return M.checkpoint_name(path, best)
end

return M
