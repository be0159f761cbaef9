-- SPDX-License-Identifier: MIT
--- Arrays in files: NumPy's npy and npz, and idx (the format of MNIST).
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
local zip = require "moonshard.data.zip"
local zlib = require "moonshard.data.zlib"
local ffi = engine.ffi

local M = {}

-- Maps the name of an element type to the dtype of the tensor, the C type of the elements in the file and their bytes.
-- Types that tensors do not have are converted to a wider one.
local TYPES = {
  f8 = { "float64", "double", 8 }, f4 = { "float32", "float", 4 }, f2 = { "float16", "uint16_t", 2 },
  i8 = { "int64", "int64_t", 8 }, i4 = { "int32", "int32_t", 4 }, i2 = { "int16", "int16_t", 2 },
  i1 = { "int8", "int8_t", 1 }, u4 = { "int64", "uint32_t", 4 }, u2 = { "int32", "uint16_t", 2 },
  u1 = { "uint8", "uint8_t", 1 }, b1 = { "bool", "uint8_t", 1 },
}
local C_TYPES = { float64 = "double", float32 = "float", float16 = "uint16_t", int64 = "int64_t", int32 = "int32_t",
  int16 = "int16_t", int8 = "int8_t", uint8 = "uint8_t", bool = "uint8_t" }

local function swapped(text, bytes, at, n)
  local from, to = ffi.cast("const uint8_t *", text) + at, ffi.new("uint8_t[?]", math.max(1, n * bytes))
  for k = 0, n * bytes - 1 do to[k] = from[k - k % bytes + bytes - 1 - k % bytes] end
  return to
end

-- A tensor of the elements that begin at byte `at` (from 0) of text. kind: the name of a row of TYPES. big: the bytes
-- are in big-endian order.
local function decode(text, at, kind, big, shape)
  local row, n = TYPES[kind], 1
  for _, size in ipairs(shape) do n = n * size end
  local from = ffi.cast("const uint8_t *", text) + at
  if big and row[3] > 1 then from = swapped(text, row[3], at, n) end
  if C_TYPES[row[1]] == row[2] and kind ~= "b1" then return (raw.tensor(row[1], shape, from)) end
  local t, data = raw.tensor(row[1], shape)
  local values, out = ffi.cast("const " .. row[2] .. " *", from), ffi.cast(C_TYPES[row[1]] .. " *", data)
  if kind == "b1" then
    for k = 0, n - 1 do out[k] = values[k] ~= 0 and 1 or 0 end
  else
    for k = 0, n - 1 do out[k] = values[k] end
  end
  return t
end

-- What is wrong with a shape of elements of a type, if the file has `available` bytes of them; nil: nothing.
local function shape_fault(shape, kind, available)
  if #shape > engine.MAX_DIMS then return ("has %d dimensions, expected at most %d"):format(#shape, engine.MAX_DIMS) end
  local bytes, product = TYPES[kind][3], TYPES[kind][3]
  for _, size in ipairs(shape) do bytes, product = bytes * size, product * math.max(size, 1) end
  if product > 2 ^ 62 then return "has a shape of 2^62 bytes or more" end
  if available < bytes then return ("has %.0f bytes of elements, but its header gives %.0f"):format(available, bytes) end
end

-- ---- npy and npz -----------------------------------------------------------------------------------------

local MAGIC = "\147NUMPY"

-- The fields of an npy header, a dictionary in Python's notation: strings as they are, the rest as text; nil if it is
-- not such a dictionary of exactly the three fields.
local function fields_of(header)
  local fields, count, at = {}, 0, header:match "^%s*{()"
  while at do
    local key, after = header:match([=[^%s*(['"].-['"])%s*:%s*()]=], at)
    if not key then
      at = header:match("^%s*}%s*()", at)
      break
    end
    local value, stop = header:match("^(%b())()", after)
    if not value then value, stop = header:match("^(%b[])()", after) end
    if not value then value, stop = header:match("^(%a+)()", after) end
    if not value then
      local _
      _, value, stop = header:match([=[^(['"])(.-)%1()]=], after)
    end
    key = key:sub(1, 1) == key:sub(-1) and key:sub(2, -2)
    if not value or not key or fields[key] then return nil end
    fields[key], count = value, count + 1
    at = header:match("^%s*,()", stop) or header:match("^%s*()}", stop)
  end
  local whole = at and at > #header and count == 3
  return whole and fields.descr and fields.fortran_order and fields.shape and fields or nil
end

-- The sizes in a tuple such as "(3,)"; nil if one is not a whole number from 0. Python 2 wrote "3L".
local function sizes_of(tuple)
  local shape, inside = {}, tuple:match "^%((.*)%)$"
  if not inside then return nil end
  for part in (inside:gsub(",%s*$", "") .. ","):gmatch "([^,]*)," do
    local size = part:match "^%s*(%d+)L?%s*$"
    if not size and not (part:match "^%s*$" and inside:match "^%s*$") then return nil end
    shape[#shape + 1] = tonumber(size)
  end
  return shape
end

-- The tensor in the text of an npy file; nil and what is wrong with the file.
local function npy(text)
  if text:sub(1, 6) ~= MAGIC or #text < 12 then return nil, "is not an npy file: it does not begin with its magic bytes" end
  local version = text:byte(7)
  if version < 1 or version > 3 then return nil, ("is of version %d of the format, expected 1 to 3"):format(version) end
  local first = version > 1 and 13 or 11
  local length = raw.little(text, 9, first - 9)
  local fields = #text >= first - 1 + length and fields_of(text:sub(first, first + length - 1))
  local shape = fields and sizes_of(fields.shape)
  local fortran = fields and ({ True = true, False = false })[fields.fortran_order]
  if not shape or fortran == nil then return nil, "has a header that is not NumPy's" end
  local order, kind = fields.descr:match "^([<>|=])(%a%d+)$"
  if not TYPES[kind] then
    return nil, ("has elements of type '%s', expected bool, int8 to int64, uint8 to uint32 or float16 to float64"):format(
      fields.descr)
  end
  local at = first - 1 + length
  local fault = shape_fault(shape, kind, #text - at)
  if fault then return nil, fault end
  if not fortran or #shape < 2 then return decode(text, at, kind, order == ">", shape) end
  local back, places = {}, {}
  for d = 1, #shape do back[d], places[d] = shape[#shape + 1 - d], #shape + 1 - d end
  return decode(text, at, kind, order == ">", back):permute(unpack(places)):contiguous()
end

--- Reads an array that NumPy saved. uint16 and uint32 become a wider type that tensors have. Errors:
--- element types that no dtype represents (uint64, complex numbers, strings, objects); a damaged header.
---@param path string  the file, also compressed by gzip
---@return Tensor  with the array's shape
function M.read_npy(path)
  local t, why = npy(zlib.read(path, "read_npy"))
  if not t then errors.raise("read_npy: '%s' %s", path, why) end
  return t
end

-- Why arrays could not be read, by the table that read_npz returned and their names.
local left_out = setmetatable({}, { __mode = "k" })

-- The metatable of a result that lacks arrays of the file; like that of the columns in tables.lua.
M._Arrays = { __tensors = true }
function M._Arrays.__index(arrays, name)
  local why = left_out[arrays] and left_out[arrays][name]
  if why then errors.raise("%s", why) end
end

--- Reads the arrays that numpy.savez or savez_compressed saved. Arrays of element types that no dtype represents do not
--- block the others: a warning names them, and reading such a name of the result is an error. Errors: a damaged archive
--- or array; an array that option 'names' asks for and that cannot be read.
---@param path string  the file, also compressed by gzip
---@param given? {names: string[]}  names: reads only these arrays (default: all)
---@return table<string, Tensor>  by name
function M.read_npz(path, given)
  local o = opts("read_npz", given, { names = opts.table })
  local text = zlib.read(path, "read_npz")
  local entries, fault = zip.entries(text)
  if not entries then errors.raise("read_npz: '%s' %s", path, fault) end
  local of, names = {}, {}
  for _, entry in ipairs(entries) do
    local name = entry.name:match "^(.*)%.npy$"
    if name then of[name], names[#names + 1] = entry, name end
  end
  local arrays, missing, list = {}, {}, {}
  for _, name in ipairs(o.names or names) do
    if not of[name] then errors.raise("read_npz: '%s': %s", path, errors.unknown("array", name, names)) end
    local bytes, why = zip.contents(text, of[name], "read_npz")
    if bytes then arrays[name], why = npy(bytes) end
    if why then
      missing[name] = ("read_npz: '%s': array '%s' %s"):format(path, name, why)
      if o.names then errors.raise("%s", missing[name]) end
      if not bytes and why:find "^is damaged" then
        errors.raise("%s; option 'names' reads the others", missing[name])
      end
      list[#list + 1] = ("'%s' %s"):format(name, why)
    end
  end
  if not list[1] then return arrays end
  log.warn(("read_npz: '%s': arrays that cannot be read: %d: %s%s"):format(path, #list,
    table.concat(list, "; ", 1, math.min(3, #list)), #list > 3 and "; ..." or ""))
  left_out[arrays] = missing
  return setmetatable(arrays, M._Arrays)
end

local DESCR = { float64 = "<f8", float32 = "<f4", float16 = "<f2", int64 = "<i8", int32 = "<i4", uint8 = "|u1",
  bool = "|b1", int16 = "<i2", int8 = "|i1" }

--- Writes a tensor for numpy.load. Errors: bfloat16, which NumPy does not have; a file that cannot be written.
---@param path string  the file; an existing one is replaced
---@param t Tensor  of any shape and device
function M.write_npy(path, t)
  raw.expect_tensor(t, "write_npy: argument 2")
  local there, data = raw.contiguous(t)
  local descr = DESCR[there.dtype]
  if not descr then errors.raise("write_npy: argument 2 has dtype %s, which NumPy does not have", there.dtype) end
  local sizes = table.concat(there.shape, ", ")
  local header = ("{'descr': '%s', 'fortran_order': False, 'shape': (%s%s), }"):format(descr, sizes,
    there.ndim == 1 and "," or "")
  header = header .. (" "):rep(63 - (#header + 10) % 64) .. "\n"
  local bytes = there:numel() * there:element_size()
  raw.write(path, "write_npy", { MAGIC, "\1\0", string.char(#header % 256, math.floor(#header / 256)), header,
    ffi.string(data, bytes) })
  if there ~= t then there:release() end
end

-- ---- idx -------------------------------------------------------------------------------------------------

local IDX = { [8] = "u1", [9] = "i1", [11] = "i2", [12] = "i4", [13] = "f4", [14] = "f8" }

--- Reads an idx file, such as those of MNIST.
---@param path string  the file, also compressed by gzip
---@return Tensor  of the file's shape; uint8 for MNIST's images and labels
function M.read_idx(path)
  local text = zlib.read(path, "read_idx")
  local zero, also, code, dims = text:byte(1, 4)
  local kind = zero == 0 and also == 0 and IDX[code]
  if not kind or not dims or dims > engine.MAX_DIMS or #text < 4 + 4 * dims then
    errors.raise("read_idx: '%s' is not an idx file, or its header is incomplete", path)
  end
  local shape = {}
  for d = 1, dims do
    local a, b, c, e = text:byte(4 * d + 1, 4 * d + 4)
    shape[d] = ((a * 256 + b) * 256 + c) * 256 + e
  end
  local fault = shape_fault(shape, kind, #text - 4 - 4 * dims)
  if fault then errors.raise("read_idx: '%s' %s", path, fault) end
  return decode(text, 4 + 4 * dims, kind, true, shape)
end

opts.fix(M, { "read_npy", "write_npy", "read_idx" })

return M
