-- SPDX-License-Identifier: MIT
--- `index.json` of a sharded checkpoint: functions that write it, check it, and decide whether a folder is a
--- checkpoint.
---
--- The text begins with `{"sum":"<16 digits>",`: the XXH64 of the whole text, computed with zeros in place of these
--- digits. Format 1, of earlier versions, has no checksum of the index, and one hash per file instead of checksums
--- within files.
local cjson = require "cjson"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local util = require "moonshard.tensor.util"

local lib, ffi = engine.lib, engine.ffi

local M = {}

local FORMATS = { ["moonshard checkpoint 1"] = 1, ["moonshard checkpoint 2"] = 2 }
M.FORMAT = "moonshard checkpoint 2"
M.NAME = "index.json"

-- ---- JSON ----------------------------------------------------------------------------------------

-- Encodes x as JSON, with all digits of numbers and with sorted keys. A table with an element 1, or without elements,
-- is a list.
local function json(x)
  if type(x) == "number" then
    if x ~= x or x == math.huge or x == -math.huge then
      errors.raise("save: %s cannot be stored in an index", tostring(x))
    end
    return ("%.17g"):format(x)
  end
  if type(x) == "boolean" then return tostring(x) end
  if type(x) == "string" then return cjson.encode(x) end
  if type(x) ~= "table" or getmetatable(x) ~= nil then
    errors.raise("save: %s cannot be stored in an index", errors.kind(x))
  end
  local parts, count = {}, 0
  for key in pairs(x) do                                  -- order does not matter: counted
    count = count + 1
    if type(key) ~= "string" and not (type(key) == "number" and x[1] ~= nil) then
      errors.raise("save: a table with the key %s cannot be stored in an index, expected strings or 1 to n as keys",
        errors.show(key))
    end
  end
  if x[1] ~= nil or count == 0 then
    if #x ~= count then
      errors.raise("save: a list of %d elements with %d other keys cannot be stored in an index", #x, count - #x)
    end
    for k, v in ipairs(x) do parts[k] = json(v) end
    return "[" .. table.concat(parts, ",") .. "]"
  end
  for k, v in util.sorted_pairs(x) do parts[#parts + 1] = cjson.encode(k) .. ":" .. json(v) end
  return "{" .. table.concat(parts, ",\n") .. "}"
end

local BEFORE, ZEROS = '{"sum":"', ("0"):rep(16)

local function sum_of(text)
  local digits = ffi.new "char[17]"
  lib.ms_file_sum(text, #text, digits)
  return ffi.string(digits)
end
M.sum_of = sum_of

--- Puts the checksum at the beginning of an object's text.
---@param body string
---@return string
function M.seal(body)
  local rest = '",\n' .. body:sub(2)
  return BEFORE .. sum_of(BEFORE .. ZEROS .. rest) .. rest
end

---@param index table
---@return string
function M.text(index) return M.seal(json(index)) end

-- Whether a text begins with its correct checksum.
local function sealed(text)
  local sum = text:sub(#BEFORE + 1, #BEFORE + 16)
  return text:sub(1, #BEFORE) == BEFORE and sum == sum_of(BEFORE .. ZEROS .. text:sub(#BEFORE + 17))
end

-- ---- names ---------------------------------------------------------------------------------------

--- The name of a rank's file. `id`, 16 digits, is part of it if the file is written beside another checkpoint.
---@param rank integer
---@param id? string
function M.file_name(rank, id) return ("rank-%05d%s.safetensors"):format(rank, id and "-" .. id or "") end

local function is_file_name(name, rank)
  if type(name) ~= "string" then return false end
  return name == M.file_name(rank, name:match("^rank%-%d%d%d%d%d%-(" .. ("%x"):rep(16) .. ")%.safetensors$"))
end

--- Whether the name of a file contains the 16 random digits of a save beside another checkpoint.
---@param name string
function M.is_beside(name)
  local id = ("%x"):rep(16)
  return name:match("^rank%-%d%d%d%d%d%-" .. id .. "%.safetensors$") ~= nil or name:match("^index%.json%.tmp%-" .. id
    .. "$") ~= nil
end

-- ---- reading -------------------------------------------------------------------------------------

local out, n = ffi.new "char *[1]", ffi.new "double[1]"

-- The text of a folder's index; nil and the reason if it cannot be read.
local function read(dir, who)
  if lib.ms_file_get(dir .. "/" .. M.NAME, who, out, n) ~= 0 then return nil, errors.last() end
  local text = ffi.string(out[0], n[0])
  lib.ms_file_free(out[0])
  return text
end

local function bad(dir, format, ...)
  errors.raise("load: '%s' is not a valid checkpoint: " .. format, dir, ...)
end

local function need(ok, dir, ...)
  if not ok then bad(dir, ...) end
end
M.bad = bad

local function whole_number(x, least) return type(x) == "number" and x % 1 == 0 and x >= least and x < 2 ^ 53 end

-- Raises unless the pieces of a tensor cover it without gap or overlap.
local function check_pieces(dir, name, entry, world)
  local total = 1
  for d, size in ipairs(entry.shape) do
    if not whole_number(size, 0) then bad(dir, "tensor '%s': size %d is %s", name, d, tostring(size)) end
    total = total * size
  end
  if type(entry.pieces) ~= "table" or #entry.pieces == 0 then bad(dir, "tensor '%s' has no pieces", name) end
  local dim, at = nil, 0
  for k, piece in ipairs(entry.pieces) do
    if type(piece) ~= "table" or #piece ~= 4 then
      bad(dir, "piece %d of tensor '%s' is not a list of 4 numbers", k, name)
    end
    for i = 1, 4 do
      if not whole_number(piece[i], i == 1 and 1 or 0) then
        bad(dir, "piece %d of tensor '%s' has %s at %d", k, name, tostring(piece[i]), i)
      end
    end
    dim = dim or piece[2]
    if piece[1] > world then bad(dir, "piece %d of tensor '%s' is in file %d of %d", k, name, piece[1], world) end
    if piece[2] ~= dim or dim > math.max(#entry.shape, 0) then
      bad(dir, "piece %d of tensor '%s' is cut along dimension %d", k, name, piece[2])
    end
    if piece[3] ~= at then
      bad(dir, "piece %d of tensor '%s' begins at %d, but the piece before it ends at %d", k, name, piece[3], at)
    end
    at = at + piece[4]
  end
  local size = dim == 0 and total or entry.shape[dim]
  if at ~= size then bad(dir, "the pieces of tensor '%s' end at element %d of %d", name, at, size) end
end

local function is_option(x)
  if type(x) ~= "table" then return type(x) == "number" or type(x) == "boolean" or type(x) == "string" end
  for k, v in pairs(x) do                                 -- order does not matter: checks each value
    if type(k) ~= "number" or type(v) ~= "number" and type(v) ~= "boolean" and type(v) ~= "string" then return false end
  end
  return true
end

local function check_optimizer(dir, optimizer)
  if type(optimizer) ~= "table" then bad(dir, "its optimizer is %s, expected an object", errors.kind(optimizer)) end
  local state, groups = optimizer.state, optimizer.param_groups
  if type(state) ~= "table" then bad(dir, "the optimizer's state is %s, expected an object", errors.kind(state)) end
  for name, numbers in util.sorted_pairs(state) do
    need(type(name) == "string" and type(numbers) == "table", dir,
      "the optimizer's state of %s is %s, expected an object", errors.show(name), errors.kind(numbers))
    for key, v in util.sorted_pairs(numbers) do
      need(type(v) == "number" or type(v) == "boolean", dir, "%s of '%s' is %s, expected a number", errors.show(key),
        name, errors.kind(v))
    end
  end
  need(type(groups) == "table" and #groups > 0, dir, "param_groups is %s, expected a list of groups",
    errors.kind(groups))
  for g, group in ipairs(groups) do
    need(type(group) == "table" and type(group.params) == "table", dir,
      "group %d of param_groups has no list of params", g)
    for key, value in util.sorted_pairs(group) do
      if type(key) ~= "string" then bad(dir, "group %d of param_groups is a list, expected an object", g) end
      if not is_option(value) then bad(dir, "option '%s' of group %d is %s", key, g, errors.kind(value)) end
    end
    for k, name in ipairs(group.params) do
      need(type(name) == "string", dir, "parameter %d of group %d is %s, expected a name", k, g, errors.kind(name))
    end
  end
end

local function check_files(dir, index)
  need(type(index.files) == "table" and type(index.tensors) == "table", dir, "index.json lacks files or tensors")
  need(whole_number(index.world, 1) and index.world == #index.files, dir, "index.json lists %s files for %s ranks", #index.files,
    tostring(index.world))
  for k, file in ipairs(index.files) do
    if type(file) ~= "table" then bad(dir, "file %d is %s", k, errors.kind(file)) end
    if not is_file_name(file.name, k - 1) then bad(dir, "file %d is named %s", k, errors.show(file.name)) end
    if not whole_number(file.bytes, 8) then bad(dir, "file '%s' has %s bytes", file.name, tostring(file.bytes)) end
    need(type(file.hash) == "string" and file.hash:match "^%x+$" and #file.hash == 16, dir,
      "file '%s' has the hash %s", file.name, errors.show(file.hash))
  end
end

--- Reads and checks the index of a checkpoint; adds `version`, and `fingerprint` for comparison between ranks.
---@param dir string
---@param verify boolean  compare its checksum
---@return table
function M.read(dir, verify)
  local text, why = read(dir, "load")
  if not text then errors.raise_text(why) end
  local ok, index = pcall(cjson.decode, text)
  if not ok or type(index) ~= "table" then bad(dir, "index.json is not valid JSON: %s", tostring(index)) end
  local version = FORMATS[index.format]
  if not version then bad(dir, "its format is %s, expected '%s'", errors.show(index.format), M.FORMAT) end
  -- An index of format 2 or with the field `sum` must have a correct checksum: damage to one of the two does not
  -- disable the check.
  if verify and (version > 1 or index.sum ~= nil) and not (version > 1 and sealed(text)) then
    bad(dir, "index.json is damaged: its checksum differs")
  end
  check_files(dir, index)
  for name, entry in util.sorted_pairs(index.tensors) do
    need(type(entry) == "table" and type(entry.shape) == "table" and type(entry.dtype) == "string", dir,
      "tensor '%s' lacks its shape or dtype", name)
    check_pieces(dir, name, entry, index.world)
  end
  need(index.aliases == nil or type(index.aliases) == "table", dir, "aliases are %s, expected an object",
    errors.kind(index.aliases))
  for name, first in util.sorted_pairs(index.aliases or {}) do
    need(type(first) == "string", dir, "the alias %s is %s, expected a name", errors.show(name), errors.kind(first))
  end
  if index.optimizer ~= nil then check_optimizer(dir, index.optimizer) end
  index.version, index.fingerprint = version, sum_of(text)
  return index
end

-- ---- folders that may be replaced ------------------------------------------------------------------

local ENOENT = 2

-- The text after the last colon, because lfs puts the path before it.
function M.reason(text) return text:match ": ([^:]+)$" or text end

--- The names in a folder, sorted; nil and the reason if it cannot be read.
---@param path string
---@return string[]? names, string? why
function M.entries_in(path)
  if lib.ms_folder_list(path, "save", out, n) ~= 0 then return nil, errors.last() end
  local names = {}
  for name in ffi.string(out[0], n[0]):gmatch "[^/]+" do names[#names + 1] = name end
  lib.ms_file_free(out[0])
  table.sort(names)
  return names
end

-- The files that an index lists, by name. Returns nil if the folder is not a checkpoint of Moonshard, and the reason if
-- the index cannot be read. Does not check the rest of the index.
local function listed_in(path)
  local text, why = read(path, "save")
  if not text then return nil, why end
  local ok, index = pcall(cjson.decode, text)
  if not ok or type(index) ~= "table" or not FORMATS[index.format] or type(index.files) ~= "table" then return nil end
  local names, bytes = { [M.NAME] = true }, 0
  for _, file in ipairs(index.files) do
    if type(file) ~= "table" or type(file.name) ~= "string" then return nil end
    names[file.name] = true
    bytes = bytes + (tonumber(file.bytes) or 0)
  end
  for _, name in ipairs(type(index.replaces) == "table" and index.replaces or {}) do names[name] = true end
  return names, bytes
end

--- Examines a path to which a checkpoint is to be written. Returns nil and the reason if it must not be replaced: only
--- a checkpoint that contains no foreign files, or an empty folder, may be; the path need not exist.
---@param path string
---@return table<string, boolean>? names, number|string bytes_or_reason
function M.replaceable(path)
  local lfs = require "lfs"
  local mode, why, code = lfs.symlinkattributes(path, "mode")
  if not mode and code == ENOENT then return {}, 0 end
  if not mode then return nil, ("save: cannot access '%s': %s"):format(path, M.reason(why)) end
  if mode ~= "directory" then return nil, ("save: '%s' is not a folder"):format(path) end
  local there
  there, why = M.entries_in(path)
  if not there then return nil, why end
  local foreign, begun = nil, true
  for _, name in ipairs(there) do begun = begun and M.is_beside(name) end
  if begun then return {}, 0 end
  mode, why, code = lfs.symlinkattributes(path .. "/" .. M.NAME, "mode")
  if not mode and code ~= ENOENT then
    return nil, ("save: cannot access '%s/%s': %s"):format(path, M.NAME, M.reason(why))
  end
  local listed, bytes
  if mode == "file" then listed, bytes = listed_in(path) end
  if not listed then
    return nil, bytes or (
      "save: the folder '%s' exists and is not a checkpoint: it contains '%s'; move that away, or choose another folder"):format(path, there[1])
  end
  for _, name in ipairs(there) do
    mode, why = lfs.symlinkattributes(path .. "/" .. name, "mode")
    if not mode then return nil, ("save: cannot access '%s/%s': %s"):format(path, name, M.reason(why)) end
    if not foreign and not (mode == "file" and (listed[name] or M.is_beside(name))) then foreign = name end
  end
  if foreign then
    return nil, ("save: the checkpoint '%s' contains '%s', which its index does not list; move that away, or choose another folder"):format(path, foreign)
  end
  return listed, bytes
end

return M
