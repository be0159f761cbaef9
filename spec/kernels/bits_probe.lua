-- SPDX-License-Identifier: MIT
--- Prints a checksum of the bits of many operators' results: the same on every processor and for any number of threads
--- (spec/runtime/bits_spec.lua, scripts/test --arm64).
local root = arg[1]
package.path = ("%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(root, root, root, package.path)
local F = require "moonshard.core.ffi"
local samples = require "spec.support.samples"
local ffi, lib = F.ffi, F.lib
local E = ffi.C
local one = samples.one
lib.ms_rng_set(3, 0)

local function randn(dtype, ...)
  local shape = { ... }
  return one("randn_", { lib.ms_empty(dtype, 0, #shape, ffi.new("int64_t[?]", #shape, shape)) }, nil, { 0, 2 })
end

local function print_bits(name, id)
  local info = samples.info(id)
  local bytes = info.numel * lib.ms_dtype_size(info.dtype)
  local p, a, b = ffi.cast("const uint8_t *", lib.ms_data_ptr(id)), 1, 0
  for k = 0, bytes - 1 do
    a = (a + p[k]) % 65521
    b = (b + a) % 65521
  end
  print(("%s %d %08x"):format(name, info.numel, b * 65536 + a))
end

for _, dtype in ipairs { E.MS_F32, E.MS_BF16, E.MS_F16, E.MS_F64 } do
  local x, y = randn(dtype, 300, 259), randn(dtype, 300, 259)
  print_bits("randn", x)
  for name in ("exp log sqrt rsqrt sin cos relu silu tanh sigmoid gelu neg abs reciprocal"):gmatch "%S+" do
    -- In float64 most of these functions call libm, whose bits may depend on the CPU. Those that are chosen by "sq" and
    -- "re" do not: sqrt, rsqrt, relu, reciprocal.
    if dtype ~= E.MS_F64 or name:find "sq" or name:find "re" then
      print_bits(name, one(name, { (name == "log" or name:find "sqrt") and one("abs", { x }) or x }))
    end
  end
  for name in ("add sub mul div maximum minimum"):gmatch "%S+" do print_bits(name, one(name, { x, y })) end
  print_bits("transposed add", one("add", { one("transpose", { x }, { 0, 1 }), one("transpose", { y }, { 0, 1 }) }))
  for _, dims in ipairs { {}, { 0 }, { 1 } } do
    for name in ("sum mean"):gmatch "%S+" do print_bits(name, one(name, { x }, { 0, unpack(dims) })) end
    print_bits("var", one("var", { x }, { 0, unpack(dims) }))
    print_bits("norm", one("norm", { x }, { 0, unpack(dims) }, { 2 }))
    if dtype ~= E.MS_F64 and dims[1] then print_bits("logsumexp", one("logsumexp", { x }, { dims[1], 0 })) end
  end
  local long = randn(dtype, 400001)
  print_bits("long sum", one("sum", { long }))
  print_bits("long rand", one("rand_", { long }, nil, { 0, 1 }))
  if dtype ~= E.MS_F64 then print_bits("gelu tanh", one("gelu", { x }, { 1 })) end
end
