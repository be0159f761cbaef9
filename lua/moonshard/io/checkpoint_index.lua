-- SPDX-License-Identifier: MIT
--- `index.json` of a sharded checkpoint: functions that write it, check it, and decide whether a folder is a
--- checkpoint.
---
--- The text begins with `{"sum":"<16 digits>",`: the XXH64 of the whole text, computed with zeros in place of these
--- digits. Format 1, of earlier versions, has no checksum of the index, and one hash per file instead of checksums
--- within files.
local cjson = require "cjson"
local read_json = require("moonshard.core.json").decode
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local files = require "moonshard.io.files"
local tensor = require "moonshard.tensor"
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
      errors.raise("save: %s cannot be stored in index.json, expected a finite number", tostring(x))
    end
    return ("%.17g"):format(x)
  end
  if type(x) == "boolean" then return tostring(x) end
  if type(x) == "string" then return cjson.encode(x) end
  if not opts.is_plain(x) then
    errors.raise("save: %s cannot be stored in index.json, expected a number, boolean, string or table%s", errors.kind(x),
      tensor.is_tensor(x) and "; pass averages as the option 'ema', or register the tensor as a buffer of the model" or "")
  end
  local parts, count = {}, 0
  for key in pairs(x) do
    count = count + 1
    if type(key) ~= "string" and not (type(key) == "number" and x[1] ~= nil) then
      errors.raise("save: a table with the key %s cannot be stored in index.json, expected strings or 1 to n as keys",
        errors.show(key))
    end
  end
  if x[1] ~= nil or count == 0 then
    if #x ~= count then
      errors.raise("save: a list of length %d that also has other keys (%d) cannot be stored in index.json, expected no other keys",
        #x, count - #x)
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
---@param body string  JSON of the object, without a checksum
---@return string
function M.seal(body)
  local rest = '",\n' .. body:sub(2)
  return BEFORE .. sum_of(BEFORE .. ZEROS .. rest) .. rest
end

---@param index table  the contents of index.json
---@return string
function M.text(index) return M.seal(json(index)) end

-- Whether a text begins with its correct checksum.
local function sealed(text)
  local sum = text:sub(#BEFORE + 1, #BEFORE + 16)
  return text:sub(1, #BEFORE) == BEFORE and sum == sum_of(BEFORE .. ZEROS .. text:sub(#BEFORE + 17))
end

-- ---- names ---------------------------------------------------------------------------------------

--- The name of a rank's file. `id`, 16 digits, is part of it if a save moves the file into the folder of an older
--- checkpoint.
---@param rank integer  from 0
---@param id? string  16 hexadecimal digits
function M.file_name(rank, id) return ("rank-%05d%s.safetensors"):format(rank, id and "-" .. id or "") end

local BESIDE = "^rank%-(%d%d%d%d%d)%-(" .. ("[0-9a-f]"):rep(16) .. ")%.safetensors$"

local function is_file_name(name, rank)
  if type(name) ~= "string" then return false end
  return name == M.file_name(rank, select(2, name:match(BESIDE)))
end

-- Whether a save, with any number of ranks, writes a file of this name.
local function is_name(name)
  return name == M.NAME or type(name) == "string" and is_file_name(name, tonumber(name:match "^rank%-(%d+)") or -1)
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
    need(whole_number(size, 0), dir, "tensor '%s': size %d is %s, expected a whole number", name, d, tostring(size))
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
        bad(dir, "piece %d of tensor '%s': its number %d is %s, expected a whole number from %d", k, name, i,
          tostring(piece[i]), i == 1 and 1 or 0)
      end
    end
    dim = dim or piece[2]
    if piece[1] > world then
      bad(dir, "piece %d of tensor '%s' is in file %d, but there are %d files", k, name, piece[1], world)
    end
    if piece[2] ~= dim or dim > math.max(#entry.shape, 0) then
      bad(dir, "piece %d of tensor '%s' is cut along dimension %d, expected the dimension of piece 1, at most %d", k, name,
        piece[2], #entry.shape)
    end
    if piece[3] ~= at then
      bad(dir, "piece %d of tensor '%s' begins at %d, but the piece before it ends at %d", k, name, piece[3], at)
    end
    at = at + piece[4]
  end
  local size = dim == 0 and total or entry.shape[dim]
  if at ~= size then bad(dir, "the pieces of tensor '%s' end at position %d, expected %d", name, at, size) end
end

local function is_option(x)
  if type(x) ~= "table" then return type(x) == "number" or type(x) == "boolean" or type(x) == "string" end
  for k, v in pairs(x) do
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
      if not is_option(value) then
        bad(dir, "option '%s' of group %d is %s, expected a number, boolean, string or list", key, g, errors.kind(value))
      end
    end
    for k, name in ipairs(group.params) do
      need(type(name) == "string", dir, "parameter %d of group %d is %s, expected a name", k, g, errors.kind(name))
    end
  end
end

local function check_files(dir, index)
  need(type(index.files) == "table" and type(index.tensors) == "table", dir,
    "index.json lacks the list 'files' or the object 'tensors'")
  need(whole_number(index.world, 1) and index.world == #index.files, dir,
    "index.json lists %s files for %s ranks, expected one for each", #index.files, tostring(index.world))
  for k, file in ipairs(index.files) do
    if type(file) ~= "table" then bad(dir, "entry %d of files is %s, expected an object", k, errors.kind(file)) end
    need(is_file_name(file.name, k - 1), dir, "file %d is named %s, expected '%s'", k, errors.show(file.name),
      M.file_name(k - 1))
    need(whole_number(file.bytes, 8), dir, "file '%s' has %s bytes, expected a whole number from 8", file.name,
      tostring(file.bytes))
    need(type(file.hash) == "string" and file.hash:match "^%x+$" and #file.hash == 16, dir,
      "file '%s' has the hash %s, expected 16 hexadecimal digits", file.name, errors.show(file.hash))
  end
end

--- Reads and checks the index of a checkpoint; adds `version`, and `fingerprint` for comparison between ranks.
---@param dir string  the folder of the checkpoint
---@param verify boolean  compare its checksum
---@return table
function M.read(dir, verify)
  local text, why = read(dir, "load")
  if not text then errors.raise_text(why) end
  local ok, index = pcall(read_json, text)
  if not ok or type(index) ~= "table" then bad(dir, "index.json is not valid JSON: %s", tostring(index)) end
  local version = FORMATS[index.format]
  if not version then bad(dir, "its format is %s, expected '%s'", errors.show(index.format), M.FORMAT) end
  -- An index of format 2 must have a correct checksum. One of format 1 has none; if it has the field `sum`, damage has
  -- changed its format.
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
  need(index.ema == nil or type(index.ema) == "table" and whole_number(index.ema.updates, 0), dir,
    "ema is %s, expected an object with the number of updates", errors.kind(index.ema))
  index.version, index.fingerprint = version, sum_of(text)
  return index
end

--- Checks the header of file r against the index.
function M.check_file(dir, index, r, reader)
  local function shape_of(entry, piece)
    local shape = { unpack(entry.shape) }
    if piece[2] > 0 then shape[piece[2]] = piece[4] end
    return shape
  end
  for name, entry in util.sorted_pairs(index.tensors) do
    for _, piece in ipairs(entry.pieces) do
      if piece[1] == r then
        if not reader:has(name) then bad(dir, "file '%s' lacks tensor '%s'", index.files[r].name, name) end
        local shape, dtype = reader:info(name)
        local want, count = shape_of(entry, piece), 1
        for _, size in ipairs(shape) do count = count * size end
        local fits = piece[2] == 0 and count == piece[4] or table.concat(shape, ",") == table.concat(want, ",")
        if not fits or dtype ~= entry.dtype then
          bad(dir, "tensor '%s' in file '%s' is %s [%s], but %s [%s] in the index", name, index.files[r].name, dtype,
            table.concat(shape, ", "), entry.dtype, table.concat(want, ", "))
        end
      end
    end
  end
end

-- ---- folders that may be replaced ------------------------------------------------------------------

local ENOENT = 2

-- The text after the last colon, because lfs puts the path before it.
function M.reason(text) return text:match ": ([^:]+)$" or text end

--- The names in a folder, sorted; nil and the reason if it cannot be read.
---@param path string  the folder
---@return string[]? names, string? why
function M.entries_in(path)
  if lib.ms_folder_list(path, "save", out, n) ~= 0 then return nil, errors.last() end
  local names = {}
  for name in ffi.string(out[0], n[0]):gmatch "[^/]+" do names[#names + 1] = name end
  lib.ms_file_free(out[0])
  table.sort(names)
  return names
end

local AWAY = "; move the folder away, or save to another one"

-- Whether a file's contents have the hash that an index of format 1 lists; such an index has no checksum of its own.
local function is_hashed(path, file)
  local ok, reader = pcall(files.reader, path .. "/" .. file.name)
  if not ok then return false end
  local read_whole, hash = pcall(reader.fetch, reader, true)
  reader:close()
  return read_whole and hash == file.hash
end

-- The names, as keys, of the index, of the files that it lists and of those that it replaces; the bytes of the listed
-- files. The index must have the right checksum or, in format 1, the right hash of every file. Returns nil if the
-- folder is not a checkpoint of Moonshard; with the reason if its index cannot be read, has a wrong checksum or has a
-- name that no save gives to a file, or if a hash differs. Does not check the rest of the index.
local function listed_in(path, at)
  local text, why = read(path, "save")
  if not text then return nil, why end
  local ok, index = pcall(read_json, text)
  if not ok or type(index) ~= "table" or not FORMATS[index.format] or type(index.files) ~= "table" then return nil end
  local first = FORMATS[index.format] == 1
  if not first and not sealed(text) then
    return nil, ("save: the index.json in '%s' is damaged: its checksum differs, so its list of files is not reliable"
      .. AWAY):format(at)
  end
  local names, bytes = { [M.NAME] = true }, 0
  for k, file in ipairs(index.files) do
    local name = type(file) == "table" and file.name
    if not is_file_name(name, k - 1) then
      return nil, ("save: the index.json in '%s' lists %s, which is not the name of a checkpoint file" .. AWAY):format(at,
        errors.show(name))
    end
    if first and not is_hashed(path, file) then
      return nil, ("save: '%s' in '%s' is not the file that its index.json lists: its hash differs" .. AWAY):format(name,
        at)
    end
    names[name] = true
    bytes = bytes + (tonumber(file.bytes) or 0)
  end
  for _, name in ipairs(type(index.replaces) == "table" and index.replaces or {}) do
    if not is_name(name) then
      return nil, ("save: the index.json in '%s' has %s under 'replaces', which is not the name of a checkpoint file"
        .. AWAY):format(at, errors.show(name))
    end
    names[name] = true
  end
  return names, bytes
end

-- A save that replaces files inside a folder puts the 16 random digits of its temporary folder into their names.
-- Returns a table from the digits of each temporary folder beside the path to whether its save has ended.
local function moves_beside(at)
  local parent, name, ended = at:match "^(.*)/([^/]*)$", at:match "[^/]*$", {}
  for _, entry in ipairs(M.entries_in(parent .. "/") or {}) do
    local left = lib.ms_folder_left(entry, name)
    if left ~= ffi.C.MS_LEFT_NOT then
      ended[entry:match "%.%l+%-(%x+)%-%x+%-%d+%-%d+$"] = left ~= ffi.C.MS_LEFT_RUNS
    end
  end
  return ended
end

--- Examines the path of a checkpoint to write; nil and the reason if it must not be replaced. It may be a checkpoint
--- with only its own files, an empty folder, or not exist. A file is the checkpoint's own if an index with the right
--- checksum lists it, or if its name has the random digits of a temporary folder beside the path: a save that
--- replaces files inside this folder put it there.
---@param path string  absolute
---@param at? string  where the folder belongs, if it is elsewhere at the moment
---@return string[]? names, number|string bytes_or_reason, string[]? unused  files that such saves left behind
function M.replaceable(path, at)
  local lfs = require "lfs"
  at = at or path
  local function mode_of(file)
    local mode, why, code = lfs.symlinkattributes(file, "mode")
    if not mode and code ~= ENOENT then return nil, ("save: cannot access '%s': %s"):format(file, M.reason(why)) end
    return mode
  end
  local mode, why = mode_of(path)
  if why then return nil, why end
  if not mode then return {}, 0, {} end
  if mode ~= "directory" then return nil, ("save: '%s' is not a folder"):format(at) end
  local there, moving
  there, why = M.entries_in(path)
  if not there then return nil, why end
  -- Look for running saves before reading the index. A save that ends in between is then in the index.
  for _, name in ipairs(there) do
    if name:match(BESIDE) then moving = moving or moves_beside(at) end
  end
  mode, why = mode_of(path .. "/" .. M.NAME)
  if why then return nil, why end
  local listed, bytes
  if mode == "file" then listed, bytes = listed_in(path, at) end
  if mode == "file" and not listed and bytes then return nil, bytes end
  local own, unused = {}, {}
  for _, name in ipairs(there) do
    mode, why = mode_of(path .. "/" .. name)
    if why then return nil, why end
    local ended = moving and moving[select(2, name:match(BESIDE))]
    if mode == "file" and listed and listed[name] then own[#own + 1] = name
    elseif mode == "file" and ended then unused[#unused + 1] = name
    elseif mode and not (mode == "file" and ended == false) then
      return nil, (listed and "save: the checkpoint '%s' contains '%s', which its index does not list"
        or "save: the folder '%s' exists and is not a checkpoint: it contains '%s'"):format(at, name) .. AWAY
    end
  end
  return own, bytes or 0, unused
end

return M
