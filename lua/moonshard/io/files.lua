-- SPDX-License-Identifier: MIT
--- Tensors in files: `ms.save(path, tensors, {metadata})`, `ms.load(path, {device, names, prefix, verify})`. The format
--- is safetensors, which other programs can read, too; tree.lua converts tables that also have other values. A save
--- either writes the complete file to disk or changes nothing. A load checks the whole header before it uses the file,
--- and verifies the checksums in it (runtime/io/read.c).
local engine = require "moonshard.core.ffi"
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local formats = require "moonshard.io.formats"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local shards = require "moonshard.io.shards"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"
local task = require "moonshard.core.task"
local trees = require "moonshard.io.tree"

local ffi, lib = engine.ffi, engine.lib

local M = {}

-- ---- writing -------------------------------------------------------------------------------------

---@class Saver
---@field _saver ffi.cdata*  the engine's saver; nil after commit or abort
local Saver = {}
Saver.__index = Saver

local function declare(saver, name, dtype, shape)
  local sizes = ffi.new("int64_t[?]", math.max(#shape, 1))
  for d = 1, #shape do sizes[d - 1] = shape[d] end
  if lib.ms_saver_declare(saver, name, dtype, #shape, sizes) ~= 0 then errors.fail() end
end

--- Sorts a list of entries (with `name` and a dtype) into the order in which a file contains them, so that it can be
--- written sequentially: large elements first, then by name.
---@param list table[]  entries; sorted in place
---@param dtype_of fun(e: table): string  the dtype of an entry
function M.sort(list, dtype_of)
  local width = {}
  for _, e in ipairs(list) do width[e] = lib.ms_dtype_size(dtypes.number(dtype_of(e), "save")) end
  table.sort(list, function(a, b)
    if width[a] ~= width[b] then return width[a] > width[b] end
    return a.name < b.name
  end)
end

--- A file that is written one tensor at a time, so that at most one tensor must be whole in memory. Declare all
--- entries, then call `write` for each and `commit`; on an error call `abort`, which has no effect after commit.
---@param path string  path of the file
---@param entries {name: string, dtype: string, shape: integer[]}[]  the tensors that will be written
---@param metadata? table<string, string>  stored in the header
---@return Saver
function M.saver(path, entries, metadata)
  if path:find("%z") then errors.raise("save: the path %s contains a zero byte", ("%q"):format(path)) end
  for _, e in ipairs(entries) do
    if e.name:find("%z") then errors.raise("save: the name %s contains a zero byte", ("%q"):format(e.name)) end
  end
  local saver = lib.ms_saver_new(path)
  if saver == nil then errors.fail() end
  local self = setmetatable({ _saver = ffi.gc(saver, lib.ms_saver_abort) }, Saver)
  for key, value in util.sorted_pairs(metadata or {}) do
    opts.need(type(key) == "string" and type(value) == "string", value, "strings as keys and values; values of other kinds can be saved beside the tensors",
      "save: metadata %s", errors.show(key))
    if key:find("%z") or value:find("%z") then
      errors.raise("save: metadata %s contains a zero byte", ("%q"):format(key))
    end
    if lib.ms_saver_metadata(self._saver, key, value) ~= 0 then errors.fail() end
  end
  for _, e in ipairs(entries) do declare(self._saver, e.name, dtypes.number(e.dtype, "save"), e.shape) end
  return self
end

---@param name string  a declared name
---@param t Tensor  of the declared dtype and shape
function Saver:write(name, t)
  if lib.ms_saver_write(self._saver, name, t.id) ~= 0 then errors.fail(t) end
end

--- Completes the file, under its path. Returns 16 hexadecimal digits that identify its contents.
---@return string
function Saver:commit()
  local digits = ffi.new "char[17]"
  if lib.ms_saver_commit(self._saver) ~= 0 then
    local text = errors.last()
    self:abort()
    errors.raise_text(text)
  end
  lib.ms_saver_sum(self._saver, digits)
  self:abort()
  return ffi.string(digits)
end

function Saver:abort()
  if self._saver then lib.ms_saver_abort(ffi.gc(self._saver, nil)) end
  self._saver = nil
end

--- Writes tensors to a safetensors file, from the calling rank. The table may also have numbers, strings, booleans and
--- tables of these and of tensors, such as { model = model:state_dict(), epoch = 3 }: load returns the same table, and
--- the name of a tensor in the file is its path, such as "model.weight". The file appears complete or not at all.
--- Errors: a sharded tensor (use fsdp.save); a path that cannot be written.
---@param path string  path of the file
---@param tensors table<string, any>  tensors by name, or tables of them and of numbers, strings and booleans
---@param given? { metadata: table<string, string> }  metadata: strings that load returns
function M.save(path, tensors, given)
  if type(path) ~= "string" then
    errors.raise("save: path is %s, expected a string%s", errors.kind(path),
      type(path) == "table" and (path.state_dict and "; write ms.save(path, model:state_dict())"
        or "; write ms.save(path, tensors)") or "")
  end
  -- Columns of a CSV file have a metatable without __name; the metatables of classes have one.
  local meta = type(tensors) == "table" and getmetatable(tensors)
  if not opts.is_plain(tensors) and not (meta and rawget(meta, "__tensors") and not rawget(meta, "__name")) then
    errors.raise("save: tensors are %s, expected a table of name -> tensor%s", errors.kind(tensors),
      type(tensors) == "table" and tensors.state_dict and "; write ms.save(path, model:state_dict())" or "")
  end
  local o = opts("save", given, { metadata = opts.table })
  local metadata = o.metadata
  if not trees.is_flat(tensors) then
    metadata = {}
    for key, value in pairs(o.metadata or {}) do metadata[key] = value end
    tensors, metadata[trees.KEY] = trees.flatten(tensors)
  end
  local entries = {}
  for name, t in util.sorted_pairs(tensors) do
    opts.need(t.id >= 0, t, "a plain tensor; save its inner tensors under separate names", "save: '%s'", name)
    entries[#entries + 1] = { name = name, dtype = t.dtype, shape = t.shape }
  end
  M.sort(entries, function(e) return e.dtype end)
  local saver = M.saver(path, entries, metadata)
  local ok, err = pcall(function()
    for k, e in ipairs(entries) do
      task.report("saving", k - 1, #entries)
      saver:write(e.name, tensors[e.name])
    end
    saver:commit()
    task.report("saving", #entries, #entries)
  end)
  if not ok then
    saver:abort()
    error(err, 0)
  end
end

-- ---- reading -------------------------------------------------------------------------------------

---@class Reader
---@field metadata table<string, string>  the strings stored with the tensors
---@field names string[]        of the tensors that can be read, in byte order
---@field others table<string, string>  the dtypes of the other tensors, by name
local Reader = {}
Reader.__index = Reader

--- Opens a safetensors file and checks its header; `read` returns single tensors or rows of them.
---@param path string  path of the file
---@param given? {verify: boolean}  verify: compare the checksums, if the file has them (default: true)
---@return Reader
function M.reader(path, given)
  opts.expect(path, opts.string, "load: path")
  if path:find("%z") then errors.raise("load: the path %s contains a zero byte", ("%q"):format(path)) end
  local loader = lib.ms_loader_open(path, given and given.verify == false and 0 or 1)
  if loader == nil then
    local text = errors.last()
    local advice = text:find("is not a valid safetensors file", 1, true) and formats.advice(path)
    if advice then errors.raise("load: '%s' %s", path, advice) end
    errors.raise_text(text)
  end
  local self = setmetatable({ path = path, _loader = ffi.gc(loader, lib.ms_loader_close), metadata = {}, names = {},
    others = {} }, Reader)
  local k, more = 0, ffi.new "const char *[1]"
  local key = lib.ms_loader_metadata(loader, k, more)
  while key ~= nil do
    self.metadata[ffi.string(key)], k = ffi.string(more[0]), k + 1
    key = lib.ms_loader_metadata(loader, k, more)
  end
  k = 0
  local name = lib.ms_loader_name(loader, k, more)
  while name ~= nil do
    name, k = ffi.string(name), k + 1
    if more[0] ~= nil then self.others[name] = ffi.string(more[0]) else self.names[#self.names + 1] = name end
    name = lib.ms_loader_name(loader, k, more)
  end
  return self
end

local function position(self, name)
  local k = lib.ms_loader_find(self._loader, name)
  if k < 0 then errors.raise("load: '%s': %s", self.path, errors.unknown("tensor", name, self.names)) end
  return k
end

---@param name string  name of a tensor
---@return boolean
function Reader:has(name) return lib.ms_loader_find(self._loader, name) >= 0 end

--- Reads the tensor `name`; or `count` rows of its first dimension, beginning with row `first` (from 1).
---@param name string  name of a tensor
---@param first? integer  first row, from 1 (default: the whole tensor)
---@param count? integer  number of rows
---@return Tensor
function Reader:read(name, first, count)
  return tensor.wrap_new(lib.ms_loader_read(self._loader, position(self, name), (first or 1) - 1, count or -1))
end

--- Requests `count` elements of tensor `name`, from element `first` (from 0) on. fetch reads them into `target`
--- (contiguous, same dtype), from its element `at` on.
---@param target Tensor  contiguous, of the stored dtype
function Reader:want(name, first, count, target, at)
  errors.check(lib.ms_loader_want(self._loader, position(self, name), first, count, target.id, at), target)
end

--- The 16 hexadecimal digits that identify the file's contents, as Saver:commit returned them; nil if the file has no
--- checksums, or was opened with verify = false.
---@return string?
function Reader:sum()
  local sum = ffi.string(lib.ms_loader_sum(self._loader))
  return sum ~= "" and sum or nil
end

--- Reads everything requested. With whole, reads the complete file once and, if it has no checksums, returns its XXH64.
---@param whole? boolean  true: reads the complete file
---@return string?  nil without whole; "" if the file has checksums
function Reader:fetch(whole)
  local digits = whole and ffi.new "char[17]" or nil
  if lib.ms_loader_fetch(self._loader, digits) ~= 0 then errors.fail() end
  return digits and ffi.string(digits) or nil
end

--- The shape and dtype of a tensor.
---@param name string  name of a tensor
---@return integer[] shape
---@return string dtype
function Reader:info(name)
  local info = ffi.new "ms_info"
  if lib.ms_loader_info(self._loader, position(self, name), info) ~= 0 then errors.fail() end
  local shape = {}
  for d = 1, info.ndim do shape[d] = tonumber(info.shape[d - 1]) end
  return shape, ffi.string(lib.ms_name_of(ffi.C.MS_NAME_DTYPE, info.dtype))
end

function Reader:close()
  if self._loader then lib.ms_loader_close(ffi.gc(self._loader, nil)) end
  self._loader = nil
end

-- Names the tensors that begin with a prefix and have a dtype that tensors lack, in a warning.
local function warn_of_others(reader, prefix)
  local list = {}
  for name, dtype in util.sorted_pairs(reader.others) do
    if name:sub(1, #prefix) == prefix then list[#list + 1] = ("'%s' (%s)"):format(name, dtype) end
  end
  if not list[1] then return end
  log.warn(("load: '%s': tensors left out, because Moonshard's tensors do not have their dtype: %d: %s%s"):format(
    reader.path, #list, table.concat(list, ", ", 1, math.min(#list, 8)), #list > 8 and ", ..." or ""))
end

-- The names to read: those given, those that begin with a prefix, or all.
local function chosen(reader, o)
  if not o.names then warn_of_others(reader, o.prefix or "") end
  if not o.prefix then return o.names or reader.names end
  if o.names then errors.raise "load: options 'names' and 'prefix' exclude each other" end
  local names = {}
  for _, name in ipairs(reader.names) do
    if name:sub(1, #o.prefix) == o.prefix then names[#names + 1] = name end
  end
  if #names == 0 then
    errors.raise("load: '%s' has no tensor whose name begins with '%s'; %s", reader.path, o.prefix,
      reader.names[1] and "its first name is " .. errors.show(reader.names[1]) or "it has no tensors at all")
  end
  return names
end

-- Reads the tensors of an index from its files.
local function load_shards(path, o)
  local tensors, metadata, wanted, known = {}, {}, o.names and {}, {}
  for _, name in ipairs(o.names or {}) do wanted[name] = true end
  for _, part in ipairs(shards.read(path)) do
    local names, prefix = {}, o.prefix or ""
    for _, name in ipairs(part.names) do
      known[#known + 1] = name
      if (not wanted or wanted[name]) and name:sub(1, #prefix) == prefix then names[#names + 1] = name end
      if wanted then wanted[name] = nil end
    end
    local reader = M.reader(part.path, { verify = false })
    local ok, err = pcall(shards.check, path, part, function(name) return reader:has(name) end)
    reader:close()
    if not ok then error(err, 0) end
    if #names > 0 then
      local some, about = M.load(part.path, { device = o.device, verify = o.verify, prefix = o.prefix,
        names = o.names and names })
      for name, t in pairs(some) do tensors[name] = t end                  -- any order: names are distinct
      for key, value in pairs(about) do metadata[key] = value end
    end
  end
  local left = wanted and next(wanted)
  if left then errors.raise("load: '%s': %s", path, errors.unknown("tensor", left, known)) end
  return tensors, metadata
end

--- Reads a safetensors file: the table that save wrote, or tensors by name; or the files of an index, such as
--- `model.safetensors.index.json`, as one. Tensors of a dtype that Moonshard's tensors
--- lack, such as F8_E4M3 and U16, are left out, and a warning names them. Errors: a file whose header or checksums show
--- damage; a name that the file does not contain, or whose dtype tensors lack.
---@param path string  path of the file
---@param given? { device: string, names: string[], prefix: string, verify: boolean }
---   device: device of the tensors (default: "cpu"); names: reads only these tensors; prefix: reads only the tensors
---   whose names begin with it, under the rest of their names, such as "model." of a run's checkpoint; verify: compares
---   the checksums, if the file has them (default: true)
---@return table<string, any> tensors
---@return table<string, string> metadata  ignored if it is passed on as options, as in
---   model:load_state_dict(ms.load(path))
function M.load(path, given)
  local o = opts("load", given, { device = opts.string, names = opts.table, prefix = opts.string, verify = true })
  if type(path) == "string" and shards.is_index(path) then
    local tensors, metadata = load_shards(path, o)
    opts.result(metadata)
    return tensors, metadata
  end
  local reader = M.reader(path, o)
  local tensors, metadata = {}, reader.metadata
  local ok, err = pcall(function()
    local names, skip = chosen(reader, o), o.prefix and #o.prefix or 0
    for k, name in ipairs(names) do
      task.report("loading", k - 1, #names)
      local t = reader:read(name)
      tensors[name:sub(skip + 1)] = o.device and t:to(o.device) or t
    end
    task.report("loading", #names, #names)
  end)
  reader:close()
  if not ok then error(err, 0) end
  local tree = metadata[trees.KEY]
  metadata[trees.KEY] = nil
  if tree and not o.names and not o.prefix then tensors = trees.unflatten(tensors, tree, path) end
  opts.result(metadata)
  return tensors, metadata
end

return M
