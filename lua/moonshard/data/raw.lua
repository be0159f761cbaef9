-- SPDX-License-Identifier: MIT
--- What the readers and writers of files share: whole files as text, tensors of bytes, and libraries that are loaded on
--- first use.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local dtypes = require "moonshard.core.dtypes"
local tensor = require "moonshard.tensor"
local autograd = require "moonshard.autograd"
local lfs = require "lfs"
local ffi, lib = engine.ffi, engine.lib

local M = {}

local LARGEST = 2 ^ 31 - 1024                              -- bytes of a string of LuaJIT

--- The contents of a file. Errors: it cannot be read.
---@param path string
---@param who string  the function that errors name
---@return string
function M.read(path, who)
  opts.expect(path, opts.string, "%s: path", who)
  local file, why = io.open(path, "rb")
  if not file then errors.raise("%s: cannot read %s", who, why) end
  local size = lfs.attributes(path, "size") or 0
  if lfs.attributes(path, "mode") == "file" and size > LARGEST then
    file:close()
    errors.raise("%s: '%s' has %.0f bytes, more than the 2 GiB that it can read", who, path, size)
  end
  local text, failure = file:read "*a"
  file:close()
  if not text then errors.raise("%s: cannot read '%s': %s", who, path, failure) end    -- for example, it is a folder
  return text
end

--- The whole number without sign in bytes of a text that begin at byte `at`, the least significant first. Bytes after
--- the text's end count as 0.
---@param text string
---@param at integer  from 1
---@param bytes integer
---@return integer
function M.little(text, at, bytes)
  local n = 0
  for k = bytes, 1, -1 do n = n * 256 + (text:byte(at + k - 1) or 0) end
  return n
end

-- Byte order marks, those of 4 bytes first.
local MARKS = { { "\255\254\0\0", "UTF-32" }, { "\0\0\254\255", "UTF-32" }, { "\255\254", "UTF-16" },
  { "\254\255", "UTF-16" } }

--- The encoding of a text that begins with the byte order mark of UTF-16 or UTF-32; nil for other texts.
---@param text string
---@return string?
function M.marked_encoding(text)
  for _, mark in ipairs(MARKS) do
    if text:sub(1, #mark[1]) == mark[1] then return mark[2] end
  end
end

--- Writes a file. Errors: it cannot be written; a file that was written in part is removed.
---@param path string
---@param who string
---@param parts string[]  the contents
function M.write(path, who, parts)
  local file, why = io.open(path, "wb")
  if not file then errors.raise("%s: cannot write %s", who, why) end
  local ok, failure = true, nil
  for _, part in ipairs(parts) do
    if ok then ok, failure = file:write(part) end
  end
  local closed, at_close = file:close()
  if ok and closed then return end
  if lfs.attributes(path, "mode") == "file" then os.remove(path) end       -- a device file stays
  errors.raise("%s: cannot write '%s': %s", who, path, failure or at_close)
end

local sizes = ffi.new("int64_t[?]", engine.MAX_DIMS)

--- A new tensor on the CPU, with a copy of the bytes at `pointer`, which are in row-major order.
---@param dtype string
---@param shape integer[]
---@param pointer ffi.cdata*  may be nil: then the tensor is not filled
---@return Tensor
---@return ffi.cdata* data  the tensor's memory
function M.tensor(dtype, shape, pointer)
  local number, n = dtypes.number(dtype, "read"), 1
  for d, size in ipairs(shape) do
    sizes[d - 1] = size
    n = n * size
  end
  local t = tensor.wrap_new(lib.ms_empty(number, ffi.C.MS_CPU, #shape, sizes))
  local data = lib.ms_data_ptr(t.id)
  if pointer ~= nil and n > 0 then ffi.copy(data, pointer, n * lib.ms_dtype_size(number)) end
  return t, data
end

--- A contiguous tensor on the CPU with t's values, and its memory.
---@param t Tensor
---@return Tensor
---@return ffi.cdata* data
function M.contiguous(t)
  local there = autograd.no_grad(function() return t:detach():to("cpu"):contiguous() end)
  return there, lib.ms_data_ptr(there.id)
end

--- Returns t. Raises unless it is a tensor that is not sharded.
function M.expect_tensor(t, label)
  opts.expect(t, tensor.a_tensor, "%s", label)
  if t.placements then errors.raise("%s is sharded; pass t:full_tensor()", label) end
  return t
end

local loaded = {}
--- A library that is loaded on first use. Errors: it is missing; the message names its Debian package.
---@param names string[]  file names of the library
---@param package string  its Debian package
---@param who string
---@return table
function M.library(names, package, who)
  if loaded[package] then return loaded[package] end
  for _, name in ipairs(names) do
    local ok, found = pcall(ffi.load, name)
    if ok then
      loaded[package] = found
      return found
    end
  end
  errors.raise("%s needs the library %s, which is missing: install Debian's package %s", who, names[1], package)
end

return M
