-- SPDX-License-Identifier: MIT
--- Arrays in files: NumPy's npy and npz, and idx (the format of MNIST).
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
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
  if C_TYPES[row[1]] == row[2] then return (raw.tensor(row[1], shape, from)) end
  local t, data = raw.tensor(row[1], shape)
  local values, out = ffi.cast("const " .. row[2] .. " *", from), ffi.cast(C_TYPES[row[1]] .. " *", data)
  for k = 0, n - 1 do out[k] = values[k] end
  return t
end

-- ---- npy and npz -----------------------------------------------------------------------------------------

local MAGIC = "\147NUMPY"

local function npy(text, who, path)
  local function damaged(what) errors.raise("%s: '%s' %s", who, path, what) end
  if text:sub(1, 6) ~= MAGIC or #text < 12 then damaged "is not an npy file: it does not begin with its magic bytes" end
  local length, first = text:byte(9) + 256 * text:byte(10), 11
  if text:byte(7) > 1 then length, first = length + 65536 * text:byte(11) + 16777216 * text:byte(12), 13 end
  local header = text:sub(first, first + length - 1)
  local order, kind = header:match "'descr': '([<>|=])(%a%d+)'"
  local fortran, sizes = header:match "'fortran_order': (%a+)", header:match "'shape': %(([^)]*)%)"
  if not fortran or not sizes then damaged "has a header that is not NumPy's" end
  if not TYPES[kind] then
    damaged(("has elements of type %s, expected bool, int8 to int64, uint8 to uint32 or float16 to float64"):format(
      header:match "'descr': (.-), '" or "unknown"))
  end
  local shape, n = {}, 1
  for size in sizes:gmatch "%d+" do
    shape[#shape + 1] = tonumber(size)
    n = n * shape[#shape]
  end
  if #shape > engine.MAX_DIMS then damaged(("has %d dimensions, expected at most %d"):format(#shape, engine.MAX_DIMS)) end
  local at, bytes = first - 1 + length, n * TYPES[kind][3]
  if #text - at < bytes then damaged(("has %d bytes of elements, but its header gives %d"):format(#text - at, bytes)) end
  if fortran ~= "True" or #shape < 2 then return decode(text, at, kind, order == ">", shape) end
  local back, places = {}, {}
  for d = 1, #shape do back[d], places[d] = shape[#shape + 1 - d], #shape + 1 - d end
  return decode(text, at, kind, order == ">", back):permute(unpack(places)):contiguous()
end

--- Reads an array that NumPy saved. uint16 and uint32 become a wider type that tensors have. Errors:
--- element types that no dtype represents (uint64, complex numbers, strings, objects).
---@param path string  the file, also compressed by gzip
---@return Tensor  with the array's shape
function M.read_npy(path) return npy(zlib.read(path, "read_npy"), "read_npy", path) end

--- Reads the arrays that numpy.savez or savez_compressed saved.
---@param path string  the file
---@return table<string, Tensor>  by name
function M.read_npz(path)
  local arrays = {}
  for _, entry in ipairs(zlib.unzip(path, "read_npz")) do
    local name = entry.name:match "^(.*)%.npy$"
    if name then arrays[name] = npy(entry.text, "read_npz", path .. ": " .. entry.name) end
  end
  return arrays
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
  local shape, n = {}, 1
  for d = 1, dims do
    local a, b, c, e = text:byte(4 * d + 1, 4 * d + 4)
    shape[d] = ((a * 256 + b) * 256 + c) * 256 + e
    n = n * shape[d]
  end
  local bytes = n * TYPES[kind][3]
  if #text - 4 - 4 * dims < bytes then
    errors.raise("read_idx: '%s' has %d bytes of elements, but its header gives %d", path, #text - 4 - 4 * dims, bytes)
  end
  return decode(text, 4 + 4 * dims, kind, true, shape)
end

opts.fix(M, { "read_npy", "read_npz", "write_npy", "read_idx" })

return M
