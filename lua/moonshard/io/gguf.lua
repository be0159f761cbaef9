-- SPDX-License-Identifier: MIT
--- GGUF files of version 2 and 3, as llama.cpp reads and writes them: values by key, and tensors of float32, float16,
--- bfloat16 and Q8_0 (blocks of 32 numbers: a float16 factor and 32 int8).
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local raw = require "moonshard.data.raw"
local regular = require "moonshard.io.regular"

local ffi = engine.ffi

local M = {}

local ALIGNMENT, BLOCK, BLOCK_BYTES = 32, 32, 34
local MOST_TENSORS, MOST_VALUES = 2 ^ 17, 2 ^ 16

-- Kinds of tensors by their number: name, and bytes of `per` elements.
local KINDS = { [0] = { name = "float32", bytes = 4, per = 1 }, [1] = { name = "float16", bytes = 2, per = 1 },
  [8] = { name = "q8_0", bytes = BLOCK_BYTES, per = BLOCK }, [30] = { name = "bfloat16", bytes = 2, per = 1 } }
-- Names of kinds that are not read, for messages.
local OTHERS = { [2] = "Q4_0", [3] = "Q4_1", [6] = "Q5_0", [7] = "Q5_1", [9] = "Q8_1", [10] = "Q2_K", [11] = "Q3_K",
  [12] = "Q4_K", [13] = "Q5_K", [14] = "Q6_K", [15] = "Q8_K", [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS",
  [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S", [22] = "IQ2_S", [23] = "IQ4_XS", [24] = "I8", [25] = "I16",
  [26] = "I32", [27] = "I64", [28] = "F64", [29] = "IQ1_M", [34] = "TQ1_0", [35] = "TQ2_0", [39] = "MXFP4",
  [40] = "NVFP4" }
local NUMBER_OF = {}
for number, kind in pairs(KINDS) do NUMBER_OF[kind.name] = number end

-- Types of values by their number: the C type of numbers.
local NUMBERS = { [0] = "uint8_t", "int8_t", "uint16_t", "int16_t", "uint32_t", "int32_t", "float", [10] = "uint64_t",
  [11] = "int64_t", [12] = "double" }
local U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9

-- ---- reading -------------------------------------------------------------------------------------

---@class GGUFFile
---@field values table<string, any>
---@field tensors table<string, { kind: table, shape: integer[], at: integer, bytes: integer }>
local File = {}
File.__index = File

local function bad(self, format, ...) errors.raise("hf: '%s': " .. format, self.path, ...) end

local function take(self, bytes, what)
  if bytes > self.size - self.at then bad(self, "%s is beyond the end of the file", what) end
  local text = bytes > 0 and self.file:read(bytes) or ""
  if #(text or "") ~= bytes then bad(self, "%s cannot be read", what) end
  self.at = self.at + bytes
  return text
end

local place, POINTERS = ffi.new "uint64_t[1]", {}
local halves = ffi.cast("uint32_t *", place)
for _, ctype in pairs(NUMBERS) do POINTERS[ctype] = ffi.typeof(ctype .. " *") end

local function number(self, ctype, what)
  local text = take(self, ffi.sizeof(ctype), what)
  ffi.copy(place, text, #text)
  -- LuaJIT takes some NaNs that it did not make for values of other types.
  local high = halves[ctype == "double" and 1 or 0] % 2 ^ 31
  if ctype == "float" and high > 0x7f800000 or ctype == "double" and high >= 0x7ff00000 then
    bad(self, "%s is %s, expected a number", what, ctype == "double" and "not finite" or "NaN")
  end
  return tonumber(ffi.cast(POINTERS[ctype], place)[0])
end

local function text_of(self, what)
  local n = number(self, "uint64_t", what)
  return take(self, n, what)
end

local function value_of(self, type_number, key, nested)
  if NUMBERS[type_number] then return number(self, NUMBERS[type_number], key) end
  if type_number == BOOL then return number(self, "uint8_t", key) ~= 0 end
  if type_number == STRING then return text_of(self, key) end
  if type_number ~= ARRAY or nested then bad(self, "key '%s' has the type %d, which GGUF lacks", key, type_number) end
  local of, n, list = number(self, "uint32_t", key), number(self, "uint64_t", key), {}
  if n > self.size then bad(self, "key '%s' has %g elements, more than the file has bytes", key, n) end
  for k = 1, n do list[k] = value_of(self, of, key, true) end
  return list
end

local function aligned(n, to) return math.ceil(n / to) * to end

local function read_tensor(self)
  local name = text_of(self, "the name of a tensor")
  local what = ("tensor '%s'"):format(name)
  local n_dims, shape, numel = number(self, "uint32_t", what), {}, 1
  if n_dims > 4 then bad(self, "%s has %d dimensions", what, n_dims) end
  for d = n_dims, 1, -1 do
    shape[d] = number(self, "uint64_t", what)
    numel = numel * shape[d]
  end
  local type_number = number(self, "uint32_t", what)
  local kind, at = KINDS[type_number], number(self, "uint64_t", what)
  if not kind then
    bad(self, "%s has type %s, but only F32, F16, BF16 and Q8_0 can be read", what,
      OTHERS[type_number] or ("%d"):format(type_number))
  end
  if n_dims > 0 and shape[n_dims] % kind.per ~= 0 then bad(self, "%s has rows of %d elements", what, shape[n_dims]) end
  self.tensors[name] = { kind = kind, shape = shape, at = at, bytes = numel / kind.per * kind.bytes }
end

--- Opens a file and reads all but its tensors.
---@param path string
---@return GGUFFile
function M.open(path)
  local file, why = regular.open(path, "rb")
  if not file then errors.raise("hf: cannot open '%s': %s", path, (tostring(why):gsub("^.-: ", ""))) end
  local self = setmetatable({ path = path, file = file, at = 0, size = file:seek "end", values = {}, tensors = {} }, File)
  file:seek("set", 0)
  local ok, err = pcall(function()
    if self.size < 24 or take(self, 4, "") ~= "GGUF" then bad(self, "this is no GGUF file") end
    local version = number(self, "uint32_t", "the version")
    if version ~= 2 and version ~= 3 then bad(self, "version %d of GGUF is not 2 or 3", version) end
    local n_tensors, n_values = number(self, "uint64_t", "the header"), number(self, "uint64_t", "the header")
    if n_tensors > MOST_TENSORS or n_values > MOST_VALUES then
      bad(self, "the header has %g tensors and %g keys", n_tensors, n_values)
    end
    for _ = 1, n_values do
      local key = text_of(self, "a key")
      self.values[key] = value_of(self, number(self, "uint32_t", key), key)
    end
    for _ = 1, n_tensors do read_tensor(self) end
    local to = self.values["general.alignment"] or ALIGNMENT
    if type(to) ~= "number" or to < 1 or to > 65536 then bad(self, "key 'general.alignment' is %s", errors.show(to)) end
    self.first = aligned(self.at, to)
    for name, t in pairs(self.tensors) do                  -- any order: one error is enough
      if self.first + t.at + t.bytes > self.size then bad(self, "tensor '%s' is beyond the end of the file", name) end
    end
  end)
  if ok then return self end
  file:close()
  return error(err, 0)
end

--- A tensor of the file; of Q8_0, in float32.
---@param name string
---@return Tensor
function File:read(name)
  local t = self.tensors[name]
  self.file:seek("set", self.first + t.at)
  self.at = self.first + t.at
  local kind, n = t.kind, t.bytes / t.kind.bytes
  local out, data = raw.tensor(kind.per == 1 and kind.name or "int8", kind.per == 1 and t.shape or { n, BLOCK }, nil)
  local factors, scale = nil, nil
  if kind.per > 1 then factors, scale = raw.tensor("float16", { n, 1 }, nil) end
  local to, done = ffi.cast("char *", data), 0
  while done < n do                                        -- in parts, so that the text of a large tensor is not made
    local now = math.min(n - done, 2 ^ 18)
    local part = ffi.cast("const char *", take(self, now * kind.bytes, name))
    if kind.per == 1 then
      ffi.copy(to + done * kind.bytes, part, now * kind.bytes)
    else
      for k = 0, now - 1 do
        ffi.copy(ffi.cast("char *", scale) + 2 * (done + k), part + k * BLOCK_BYTES, 2)
        ffi.copy(to + BLOCK * (done + k), part + k * BLOCK_BYTES + 2, BLOCK)
      end
    end
    done = done + now
  end
  if kind.per == 1 then return out end
  return (out:to "float32" * factors:to "float32"):reshape(t.shape)
end

function File:close() self.file:close() end

-- ---- writing -------------------------------------------------------------------------------------

local function bytes_of(ctype, value) return ffi.string(ffi.new(ctype .. "[1]", value), ffi.sizeof(ctype)) end
local function string_bytes(text) return bytes_of("uint64_t", #text) .. text end

-- The bytes of a value: { "u32", 3 }, { "f32", 0.5 }, { "string", "x" }, { "bool", true }, { "strings", list },
-- { "i32s", list }, { "f32s", list }.
local encoders = {
  u32 = function(v) return bytes_of("uint32_t", U32) .. bytes_of("uint32_t", v) end,
  f32 = function(v) return bytes_of("uint32_t", F32) .. bytes_of("float", v) end,
  bool = function(v) return bytes_of("uint32_t", BOOL) .. bytes_of("uint8_t", v and 1 or 0) end,
  string = function(v) return bytes_of("uint32_t", STRING) .. string_bytes(v) end,
}
local function list_encoder(of, encode)
  return function(list)
    local parts = { bytes_of("uint32_t", ARRAY), bytes_of("uint32_t", of), bytes_of("uint64_t", #list) }
    for k, v in ipairs(list) do parts[k + 3] = encode(v) end
    return table.concat(parts)
  end
end
encoders.strings = list_encoder(STRING, string_bytes)
encoders.f32s = list_encoder(F32, function(v) return bytes_of("float", v) end)
encoders.i32s = list_encoder(I32, function(v) return bytes_of("int32_t", v) end)

--- Writes the values and the list of tensors to a file that was opened for writing; `put` then writes the tensors, in
--- this order.
---@param file file*
---@param values { [1]: string, [2]: string, [3]: any }[]  key, type and value
---@param tensors { name: string, kind: string, shape: integer[] }[]
function M.begin(file, values, tensors)
  local at, parts = 0, { "GGUF", bytes_of("uint32_t", 3), bytes_of("uint64_t", #tensors),
    bytes_of("uint64_t", #values) }
  for _, v in ipairs(values) do
    parts[#parts + 1] = string_bytes(v[1])
    parts[#parts + 1] = encoders[v[2]](v[3])
  end
  for _, t in ipairs(tensors) do
    local kind, numel = KINDS[NUMBER_OF[t.kind]], 1
    parts[#parts + 1] = string_bytes(t.name) .. bytes_of("uint32_t", #t.shape)
    for d = #t.shape, 1, -1 do
      parts[#parts + 1] = bytes_of("uint64_t", t.shape[d])
      numel = numel * t.shape[d]
    end
    parts[#parts + 1] = bytes_of("uint32_t", NUMBER_OF[t.kind]) .. bytes_of("uint64_t", at)
    at = aligned(at + numel / kind.per * kind.bytes, ALIGNMENT)
  end
  local head = table.concat(parts)
  assert(file:write(head, ("\0"):rep(aligned(#head, ALIGNMENT) - #head)))
end

-- Q8_0: the largest of 32 numbers becomes 127 or -127; halves are rounded away from zero.
local function quantized(t)
  local x = t:to("float32"):reshape(-1, BLOCK)
  local factor = x:abs():amax(2, { keepdim = true }) / 127
  local inverse = factor:eq(0):to("float32"):add(factor):reciprocal() * factor:ne(0):to "float32"
  local scaled = x * inverse
  local q = ((scaled:abs() + 0.5):floor() * scaled:sign()):to "int8"
  return factor:to "float16", q
end

local function is_finite(t) return t:numel() == 0 or t:isfinite():all():item() end

-- Raises if the numbers that are written, or factors of them, are not finite.
local function check_finite(t, stored, kind, name)
  if is_finite(stored) then return end
  if not is_finite(t) then errors.raise("hf.save: tensor '%s' has NaN or an infinity", name) end
  errors.raise("hf.save: tensor '%s' has numbers of magnitude %g, more than %s holds", name, t:abs():max():item(), kind)
end

--- Writes one tensor. Errors: a number that is not finite, or that the kind cannot hold.
---@param file file*
---@param t Tensor  on the CPU
---@param kind string  "float32", "float16", "bfloat16" or "q8_0"
---@param name string  for messages
function M.put(file, t, kind, name)
  local bytes
  if kind == "q8_0" then
    local factor, q = quantized(t)
    check_finite(t, factor, kind, name)
    local n = q:size(1)
    local _, f = raw.contiguous(factor)
    local _, v = raw.contiguous(q)
    local out, data = raw.tensor("uint8", { n, BLOCK_BYTES }, nil)
    local to, from_f, from_v = ffi.cast("char *", data), ffi.cast("char *", f), ffi.cast("char *", v)
    for k = 0, n - 1 do
      ffi.copy(to + k * BLOCK_BYTES, from_f + 2 * k, 2)
      ffi.copy(to + k * BLOCK_BYTES + 2, from_v + BLOCK * k, BLOCK)
    end
    bytes = n * BLOCK_BYTES
    t = out
  else
    local stored = t:to(kind):contiguous()
    check_finite(t, stored, kind, name)
    t = stored
    bytes = t:numel() * t:element_size()
  end
  local kept, data = raw.contiguous(t)
  local from = ffi.cast("const char *", data)
  for at = 0, bytes - 1, 2 ^ 24 do assert(file:write(ffi.string(from + at, math.min(2 ^ 24, bytes - at)))) end
  assert(file:write(("\0"):rep(aligned(bytes, ALIGNMENT) - bytes)))
  return kept
end

M.BLOCK = BLOCK

return M
