-- SPDX-License-Identifier: MIT
--- Prints hashes of results, a line each, to compare processors (scripts/test --arm64): of every operator and its
--- gradients, over its samples, in each dtype; and of each of 50 training steps of a small GPT. All NaN count as one:
--- an invalid operation gives a NaN with the sign bit on x86, without it on ARM.
local root = arg[1]
package.path = ("%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(root, root, root, package.path)
local ms = require "moonshard"
local F = require "moonshard.core.ffi"
local samples = require "spec.support.samples"
local ffi, lib = F.ffi, F.lib
local E = ffi.C

-- The bits of these are those of the machine's libraries. ms.linalg: LAPACK. In float64: libm, whose
-- error functions GCC compiles to fused multiply-adds on ARM.
local function is_foreign(name, dtype)
  return name:find "^linalg_" or dtype == E.MS_F64 and (name:find "^erf" or name == "trunc_normal_" or name == "gelu")
end

local word = ffi.new "union { double number; int32_t half[2]; }"
local function hash(h, list)
  for _, x in ipairs(list) do
    word.number = x
    local low, high = word.half[0], word.half[1]
    if x ~= x then low, high = 0, 0x7ff80000 end
    h = bit.tobit(bit.rol(bit.bxor(h, low), 5) * 31 + 7)
    h = bit.tobit(bit.rol(bit.bxor(h, high), 9) * 31 + 7)
  end
  return h
end

for _, op in ipairs(samples.operators()) do
  for _, dtype in ipairs { E.MS_F32, E.MS_BF16, E.MS_F16, E.MS_F64 } do
    local h, n = 1, 0
    for _, sample in ipairs(is_foreign(op.name, dtype) and {} or op.samples) do
      local scope = lib.ms_scope_open "bits"
      local result = samples.evaluate(op, sample, { values = samples.values(sample), dtype = dtype,
        need = op.differentiable and not op.inplace or nil })
      if result then
        n = n + 1
        for _, list in ipairs(result.out) do h = hash(h, list) end
        for k = 1, #sample.inputs do h = hash(h, result.grad[k] or {}) end
      end
      lib.ms_scope_close(scope, nil, 0)
    end
    local name = ffi.string(lib.ms_name_of(ffi.C.MS_NAME_DTYPE, dtype))
    if n > 0 then print(("%s %s, %d samples: %s"):format(op.name, name, n, bit.tohex(h))) end
  end
end

ms.manual_seed(3)
local model = require "moonshard.models.gpt" { vocab = 64, context = 32, dim = 48, heads = 3, layers = 2 }
local optimizer = ms.optim.AdamW(model:parameters(), { lr = 3e-3 })
local tokens = ms.randint(0, 64, { 4, 33 })
for step = 1, 50 do
  ms.scope(function()
    local loss = model(tokens:narrow(2, 1, 32), tokens:narrow(2, 2, 32))
    optimizer:zero_grad()
    loss:backward()
    optimizer:step()
    local h = 1
    for _, p in ipairs(model:parameters()) do h = hash(h, p:detach():reshape(-1):tolist()) end
    print(("GPT, step %d: loss %.9g, parameters %s"):format(step, loss:item(), bit.tohex(h)))
  end)
end
