-- SPDX-License-Identifier: MIT
--- The folder of one training run: `config.json`, `metrics.jsonl` (per line an object with numbers of a step),
--- `media.jsonl` (images, texts, confusion matrices, histograms, profiles, warnings), `images/`, texts (`NAME.txt`),
--- `step-N.safetensors` (checkpoints), `report.html`, and, if the script wants them, `metrics.csv` and TensorBoard's
--- event files. Rank 0 writes these files.
---
--- A line is written with one call, so a process that is killed leaves whole lines; a crash of the machine may leave an
--- incomplete last line. A run that continues after step N removes that line, and moves all lines of later steps, which
--- it repeats, to `superseded.jsonl`; a line of step N, such as a validation loss, is moved there when its values are
--- logged again.
local buffers = require "moonshard.run.buffer"
local read_json = require("moonshard.core.json").decode
local ffi = require "ffi"
local json = require "moonshard.run.json"
local lfs = require "lfs"
local log = require "moonshard.core.log"
local regular = require "moonshard.io.regular"

ffi.cdef "int truncate(const char *, long); char *strerror(int); int flock(int, int);"

local M = { json = json }

-- ---- the folder ------------------------------------------------------------------------------------

---@class RunFolder
---@field path string  path of the folder
---@field note? string  why the folder is not in runs/
---@field texts? table<string, boolean>  names of the texts that a new run has written; nil: the run continues another
---@field again? {step: integer, from: integer, count: integer}  the lines of the step after which the run continues:
---   that step, the number of bytes before the lines, and their count
---@field taken? boolean  true: a later run of this process continues in this folder
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

-- Writes a text to a file and closes it. f, err: the results of opening it.
local function fill(path, text, f, err)
  if not f then return nil, err end
  local ok
  ok, err = f:write(text)
  local closed, why = f:close()
  if not (ok and closed) then return nil, ("cannot write '%s': %s"):format(path, err or why) end
  return true
end

-- Mode "wx", the default, fails if the file exists.
local function write(path, text, mode) return fill(path, text, regular.open(path, mode or "wx")) end

-- Writes a file; replaces an existing one atomically.
local function replace(path, text)
  local temporary = path .. ".tmp"
  local file, err = regular.create(path, temporary)
  if not file then return nil, err end
  local ok
  ok, err = fill(path, text, file)
  if ok then ok, err = os.rename(temporary, path) end
  if not ok then os.remove(temporary) end
  return ok, err
end

-- The files that a run writes under fixed names, and their names in messages. `x.tmp` is renamed to x when complete.
local OWN = { ["metrics.jsonl"] = "a run" }
for _, name in ipairs { "config.json", "config.json.tmp", "media.jsonl", "superseded.jsonl", "metrics.csv",
  "metrics.csv.tmp", "report.html", "samples.txt" } do OWN[name] = name end

-- What a new run in a folder would replace or append to; nil: nothing.
local function in_the_way(path)
  if lfs.symlinkattributes(path .. "/metrics.jsonl", "mode") then return OWN["metrics.jsonl"] end
  if lfs.attributes(path, "mode") ~= "directory" then return nil end
  local found
  for name in lfs.dir(path) do
    local what = OWN[name] or (name == "images" or name:find "^step%-%d+%.safetensors") and name
    if what and (not found or what < found) then found = what end
  end
  return found
end

local function config_text(config) return M.json(config, nil, { digits = 17, separator = ",\n " }) .. "\n" end

-- Makes a new folder in `top`, named by the next free number followed by `name`.
local function numbered(top, name)
  local ok, err = make(top)
  local highest, path = 0, top
  if ok then
    for entry in lfs.dir(top) do highest = math.max(highest, tonumber(entry:match "^(%d+)") or 0) end
    repeat                                              -- mkdir fails if another run has just made it
      highest = highest + 1
      path = ("%s/%03d%s"):format(top, highest, name)
      ok, err = lfs.mkdir(path)
    until ok or highest > 1e6 or lfs.attributes(path, "mode") == nil
  end
  if ok then return path end
  return nil, ("cannot make the folder '%s': %s"):format(path, err)
end

-- The folders in which this process records, by the device and inode of metrics.jsonl.
local open_here = setmetatable({}, { __mode = "v" })

local LOCK_EX, LOCK_NB, EAGAIN = 2, 4, 11

-- Opens metrics.jsonl and locks it until it is closed or the process ends, so that no two processes record one run.
-- Child processes do not inherit the file (mode "e"). On a file system without locks, the file is not locked.
local function open_metrics(self, mode)
  local path = self.path .. "/metrics.jsonl"
  local file, err = regular.open(path, mode .. "e")
  if not file then return nil, err end
  self.metrics = file
  local at = lfs.attributes(path)
  local key = at and ("%s:%s"):format(at.dev, at.ino) or path
  local before = open_here[key]
  -- `before` is an earlier record of this process in the same folder, for example of a script that is run again.
  if before then
    before:close()
    before.taken = true
  end
  local function taken() return ffi.C.flock(buffers.fileno(file), LOCK_EX + LOCK_NB) ~= 0 and ffi.errno() == EAGAIN end
  if taken() then collectgarbage() end                  -- a record that this process has dropped may still be open
  if taken() then
    file:close()
    return nil, ("another process is recording the run '%s'"):format(self.path)
  end
  open_here[key] = self
  self.line = buffers.new()
  return self
end

--- Makes the run's folder: `path`; or, in runs/, the next free number followed by `name`; or in ~/moonshard-runs if
--- runs/ cannot be written (the folder's `note` then gives the reason).
---@param path? string  path of the folder (default: a new folder in runs/)
---@param name string  part of the new folder's name
---@param config table  the value of every option
---@return RunFolder? folder
---@return string? err
function M.new(path, name, config)
  local note
  if path then
    local what = in_the_way(path)
    if what then
      return nil, ("'%s' already contains %s; give another folder as 'out', or omit 'out'"):format(path, what)
    end
    local ok, err = make(path)
    if not ok then return nil, ("cannot make the folder '%s': %s"):format(path, err) end
  else
    local home, err_home = os.getenv "HOME", nil
    path, note = numbered("runs", name)
    if not path and home and home ~= "" then  -- the working directory may belong to another user, or be read-only
      path, err_home = numbered(home .. "/moonshard-runs", name)
    end
    if not path then return nil, ("%s%s; give a folder as 'out'"):format(note, err_home and ", and " .. err_home or "") end
  end
  local self = setmetatable({ path = path, note = note, failed = {}, texts = {} }, Folder)
  -- Opens metrics.jsonl first, because this file makes the folder a run: a run that is killed before config.json is
  -- written can be continued.
  local ok, err = open_metrics(self, "wx")
  if not ok then return nil, err end
  ok, err = write(path .. "/config.json", config_text(config))
  if ok then return self end
  self:close()
  os.remove(path .. "/metrics.jsonl")
  os.remove(path .. "/config.json")
  return nil, err
end

--- Whether a folder contains a run.
function M.exists(path) return lfs.attributes(path .. "/metrics.jsonl", "mode") == "file" end

--- Iterates over the JSON objects in a file of a run, one per line. Skips lines that are not objects, and an incomplete
--- last line.
---@param path string  path of metrics.jsonl or media.jsonl
---@return fun(): table?, integer?  the object, and the number of bytes up to the end of its line
function M.lines(path)
  local file, err = regular.open(path, "rb")
  if not file then error(err, 0) end
  local at = 0
  return function()
    while true do
      local line = file:read "*L"
      if not line or line:sub(-1) ~= "\n" then
        file:close()
        return nil
      end
      at = at + #line
      local ok, object = pcall(read_json, line)
      if ok and type(object) == "table" then return object, at end
    end
  end
end

-- The bytes of a file from an offset on.
local function rest_of(path, from)
  local file = assert(io.open(path, "rb"))
  file:seek("set", from)
  local rest = file:read "*a" or ""
  file:close()
  return rest
end

-- Appends `part` to superseded.jsonl, and truncates the file `path` to `keep` bytes. Returns true, or nil and the
-- reason.
local function set_aside(self, path, keep, part)
  local ok, err = write(self.path .. "/superseded.jsonl", part, "a")
  if not ok then return nil, err end
  if ffi.C.truncate(path, keep) == 0 then return true end
  return nil, ("cannot truncate '%s': %s"):format(path, ffi.string(ffi.C.strerror(ffi.errno())))
end

-- Moves the lines of steps after `step` to superseded.jsonl, and removes an incomplete last line. Returns the last
-- object that stays, and the lines of `step`: the number of bytes before them and their count; nil if there are none.
local function cut(self, name, step)
  local path = self.path .. "/" .. name
  if not lfs.attributes(path, "mode") then return nil end
  local keep, last, again = 0, nil, nil
  for object, after in M.lines(path) do
    if type(object.step) == "number" and object.step > step then break end
    if object.step == step then
      again = again or { step = step, from = keep, count = 0 }
      again.count = again.count + 1
    end
    keep, last = after, object
  end
  local rest = rest_of(path, keep)
  if rest ~= "" then assert(set_aside(self, path, keep, rest:match "^(.*\n)" or "")) end
  return last, again
end

--- Opens a run's folder to continue after a step. The new config replaces the old one, whose facts about its own start
--- are appended to the list `sessions` of the new one.
---@param path string  path of a run's folder
---@param step integer  the last step that is kept
---@param config table  the value of every option
---@param facts string[]  the names in config that describe a start
---@return RunFolder
function M.continue(path, step, config, facts)
  local self = setmetatable({ path = path, failed = {} }, Folder)
  for name in pairs(OWN) do assert(regular.check(path .. "/" .. name)) end       -- in any order, before any change
  local opened, err = open_metrics(self, "a")
  if not opened then error(err, 0) end
  local file = regular.open(path .. "/config.json", "rb")
  local ok, old = pcall(read_json, file and file:read "*a" or "{}")
  if file then file:close() end
  if not ok or type(old) ~= "table" then old = {} end
  local sessions, session = type(old.sessions) == "table" and old.sessions or {}, {}
  for _, name in ipairs(facts) do session[name] = old[name] end
  sessions[#sessions + 1] = session
  config.sessions = sessions
  assert(replace(path .. "/config.json", config_text(config)))
  for name in lfs.dir(path) do                          -- rename checkpoints of steps that will be repeated
    if name:find "^report%.html%.%d+%.tmp$" then os.remove(path .. "/" .. name) end      -- left by a process that was killed
    local later = tonumber(name:match "^step%-(%d+)%.safetensors$")
    if later and later > step then
      assert(os.rename(path .. "/" .. name, ("%s/%s.superseded"):format(path, name)))
    end
  end
  self.last, self.again = cut(self, "metrics.jsonl", step)
  cut(self, "media.jsonl", step)
  return self
end

-- What comes before the value of each name in a line, for the first name of a line and for later ones.
local firsts, nexts = {}, {}
setmetatable(firsts, { __index = function(t, name)
  t[name] = "{" .. M.json({ [name] = 0 }):match '^{(.*)0}$'
  return t[name]
end })
setmetatable(nexts, { __index = function(t, name)
  t[name] = ", " .. firsts[name]:sub(2)
  return t[name]
end })

-- Writes the lines in a buffer. While the disk is full they wait there, up to 1 MiB of them.
local function append(self, buffer, file)
  local ok, err, lost = buffer:write(file)
  if lost then buffer:text "\n" end                     -- ends a line of which only a part was written
  if not ok then log.warn_once(("run: cannot write to '%s': %s"):format(self.path, err)) end
end

-- Whether a name is one of those that a run adds to the script's values of a new step (record.lua).
local function is_own(name)
  return name == "time" or name == "allocated" or name == "mfu" or name:find "^memory_" or name:find "s_per_second$"
end

-- Whether an object has all names of an earlier line, whose JSON is `text`, except those for which is_own is true.
-- False if that line is damaged.
local function repeats(object, text)
  local ok, old = pcall(read_json, text)
  if not ok or type(old) ~= "table" then return false end
  for name in pairs(old) do
    if object[name] == nil and not is_own(name) then return false end
  end
  return true
end

-- Moves to superseded.jsonl those lines of the step after which the run continues whose values the script logs again,
-- for example because it validates after the loop. The other lines of that step stay. Returns whether any line moved.
local function supersede(self, object)
  local again, path = self.again, self.path .. "/metrics.jsonl"
  local moved, kept, keep, k = {}, {}, again.from, 0
  for text in rest_of(path, again.from):gmatch "[^\n]*\n" do
    if text:sub(1, 1) == "{" then k = k + 1 end
    if k <= again.count and repeats(object, text) then
      moved[#moved + 1] = text
    elseif moved[1] then
      kept[#kept + 1] = text                            -- follows a line that moves, so it is written again
    else
      keep = keep + #text
    end
  end
  if not moved[1] then return false end
  local ok, err = set_aside(self, path, keep, table.concat(moved))
  if not ok then log.warn_once(("run: cannot move lines of step %d from '%s' to superseded.jsonl: %s"):format(object.step, path, err)) end
  if not ok then return false end
  again.count = again.count - #moved
  self.line:text(table.concat(kept))
  return true
end

--- Appends a line to metrics.jsonl. Returns whether earlier lines of the same step were superseded: the run continues
--- after that step, and the script has logged their values again.
---@param object table<string, number>  values by name; those that are not finite become null
---@param names string[]  the names to write, in order; each has a value
---@return boolean replaced
function Folder:metric(object, names)
  local line, replaced = self.line, false
  if self.again then
    if object.step == self.again.step then replaced = supersede(self, object) else self.again = nil end
  end
  for k = 1, #names do
    local name = names[k]
    local value = object[name]
    line:text(k == 1 and firsts[name] or nexts[name])
    if value - value == 0 then line:number(value) else line:text "null" end
  end
  line:text "}\n"
  append(self, line, self.metrics)
  return replaced
end

-- Returns ok. If it is false, warns, once for each file `name`: a file that cannot be written, for example because the
-- disk is full, does not end the run.
local function written(self, name, ok, err)
  if ok then return true end
  if not self.failed[name] then log.warn_once(("run: cannot write '%s' in '%s': %s"):format(name, self.path, err)) end
  self.failed[name] = true
  return false
end

--- Appends a line to media.jsonl.
---@param object table  step, kind, name, and the values of this kind
---@param names string[]  the names to write, in order
function Folder:medium(object, names)
  if not self.media then
    local err
    self.media, err = regular.open(self.path .. "/media.jsonl", "ae")
    if not self.media then return written(self, "media.jsonl", false, err) end
    self.medium_line = buffers.new()
  end
  self.medium_line:text(M.json(object, names) .. "\n")
  append(self, self.medium_line, self.media)
end

--- Writes a file in the folder of the run; one with that name is replaced. Returns false after a warning if it cannot
--- be written.
---@param name string  name of the file, with at most one folder before it
---@param text string  its contents
---@return boolean ok
function Folder:put(name, text)
  local into = name:match "^(.*)/"
  local path, ok, err = self.path .. "/" .. name, true, nil
  if into then
    local folder = self.path .. "/" .. into
    if lfs.symlinkattributes(folder, "mode") == "link" then
      ok, err = false, ("'%s' is a symbolic link, expected a folder"):format(folder)
    else
      ok, err = make(folder)
    end
  end
  if ok then ok, err = replace(path, text) end
  return written(self, into or name, ok, err)
end

--- Appends a text to the file NAME.txt of the folder. A new run does not append to a file that another run made.
---@param step integer  the step that the text belongs to
---@param text string  the text
---@param name? string  name of the file, without .txt (default: "samples")
function Folder:sample(step, text, name)
  name = (name or "samples") .. ".txt"
  local texts = self.texts
  local is_first = texts and not texts[name]            -- then an existing file is not this run's
  local ok, err = write(self.path .. "/" .. name, ("---- step %d ----\n%s\n"):format(step, text), is_first and "wx" or "a")
  if ok and texts then texts[name] = true end
  written(self, name, ok, err)
end

function Folder:close()
  if self.metrics and self.line.n > 0 then append(self, self.line, self.metrics) end
  for _, name in ipairs { "metrics", "media" } do
    if self[name] then self[name]:close() end
    self[name] = nil
  end
end

--- The path of a run's checkpoint after a step.
function M.checkpoint_name(folder, step) return ("%s/step-%06d.safetensors"):format(folder, step) end

-- The steps of the checkpoints in a folder, in order, and their files by step.
local function checkpoints_in(path)
  local steps, names = {}, {}
  for name in lfs.dir(path) do
    local step = tonumber(name:match "^step%-(%d+)%.safetensors$")
    if step then steps[#steps + 1], names[step] = step, name end
  end
  table.sort(steps)
  return steps, names
end

--- Removes the checkpoints of a run, except the latest ones and the one that was just written.
---@param path string  path of the run's folder
---@param keep integer  number of those that stay
---@param newest string  path of the one that was just written, wherever it is
function M.remove_checkpoints(path, keep, newest)
  local steps, names = checkpoints_in(path)
  for k = 1, #steps - keep do
    local file = path .. "/" .. names[steps[k]]
    if lfs.attributes(file, "mode") == "file" and not regular.same(file, newest) then os.remove(file) end
  end
end

--- The checkpoint for a path: the path itself if it is a file, or the latest checkpoint in a run's folder.
---@param path string  path of a file or of a run's folder
---@return string? file
---@return string? err
function M.find_checkpoint(path)
  local mode = lfs.attributes(path, "mode")
  if not mode then return nil, ("there is no file or folder '%s'"):format(path) end
  if mode ~= "directory" then return path end
  local steps, names = checkpoints_in(path)
  if not steps[1] then return nil, ("there is no checkpoint (step-N.safetensors) in '%s'"):format(path) end
  return path .. "/" .. names[steps[#steps]]
end

return M
