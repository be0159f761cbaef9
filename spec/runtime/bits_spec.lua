-- SPDX-License-Identifier: MIT
--- Equal bits for any number of threads and, except for products by oneDNN, on any processor.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

-- Prints a line per operator: its name and a hash of its outputs and gradients. Inputs are large enough for several
-- threads, and most rows have 701 elements, so that the code for the elements after the last whole vector runs, too.
local script = [[
  local ms = require "moonshard"
  local samples = require "spec.support.samples"
  local F = require "moonshard.core.ffi"
  local ffi, lib = F.ffi, F.lib

  local function hash(id)
    local about = samples.info(id)
    if about.numel == 0 then return 0 end
    local flat = samples.one("contiguous", { id })
    local bytes = ffi.cast("const uint8_t *", lib.ms_data_ptr(flat))
    local h = 0
    for k = 0, about.numel * lib.ms_dtype_size(about.dtype) - 1 do
        h = bit.tobit(bit.bxor(bit.rol(h, 5), bytes[k]) + 0x9e3779b) end
    return h
  end

  local function random(dtype, shape, positive)
    local t = samples.tensor(dtype, {}, { 0 })
    t = samples.one("clone", { samples.one("expand", { t }, shape) })
    return samples.one(positive and "rand_" or "randn_", { t }, nil, positive and { 0.1, 2 } or { 0, 1 })
  end

  local big, table_, row = { 150, 701 }, { 701, 150 }, { 701 }
  local cases = {
    { "add", { big, row } }, { "mul", { big, big } }, { "div", { big, big } }, { "gelu", { big } },
    { "gelu", { big }, { 1 } },
    { "silu", { big } }, { "tanh", { big } }, { "exp", { big } }, { "sigmoid", { big } }, { "log", { big }, positive = true },
    { "sqrt", { big }, positive = true }, { "sum", { big } }, { "sum", { big }, { 0, 0 } }, { "sum", { big }, { 0, 1 } }, { "mean", { big } },
    { "prod", { { 3, 701 } }, { 0, 1 } }, { "var", { big }, { 0, 1 } }, { "var", { big }, { 0 } }, { "norm", { big }, nil, { 2 } },
    { "softmax", { big }, { 1 } }, { "softmax", { big }, { 0 } }, { "log_softmax", { big }, { 1 } },
    { "logsumexp", { big }, { 1 } },
    { "layer_norm", { big, row, row }, { 1 }, { 1e-5 } }, { "layer_norm", { { 330, 2100 }, { 2100 }, { 2100 } }, { 1 }, { 1e-5 } },
    { "rms_norm", { big, row }, nil, { 1e-5 } }, { "cumsum", { big }, { 1 } },
    { "conv2d", { { 2, 8, 17, 33 }, { 8, 1, 3, 3 } }, { 1, 1, 1, 1, 1, 1, 1, 1, 8 } },
    { "avg_pool", { { 2, 3, 40, 33 } }, { 2, 0, 0, 0, 3, 3, 2, 2, 1, 1, 1, 1 } },
    { "max_pool", { { 2, 3, 40, 33 } }, { 2, 0, 0, 0, 3, 3, 2, 2, 1, 1, 1, 1 } },
    { "resample", { { 2, 3, 40, 33 } }, { 2, 2, 0, 70, 50, 0, 0 }, { 40 / 70, 33 / 50 } },
    { "fft_complex", { { 37, 60, 2 } }, { 1, 0 }, { 1 } }, { "fft_real", { { 37, 64 } }, { 1 }, { 1 } },
    { "mse_loss", { big, big }, { 1 } }, { "dropout", { big }, nil, { 0.3 } }, { "randn_", { big }, nil, { 0, 1 } },
    { "rand_", { big }, nil, { 0, 1 } }, { "matmul", { big, table_ }, product = true }, { "linear", { big, { 64, 701 }, { 64 } }, product = true },
    { "attention", { { 2, 3, 130, 64 }, { 2, 3, 130, 64 }, { 2, 3, 130, 64 } }, { 1 }, product = true },
  }
  for _, case in ipairs(cases) do
    for _, dtype in ipairs { ffi.C.MS_F32, ffi.C.MS_F64, ffi.C.MS_BF16 } do
      if lib.ms_op_find(case[1]) >= 0 then
        ms.manual_seed(11)
        local scope = lib.ms_scope_open "case"
        local inputs = {}
        local in_place = case[1]:find "_$"
        for k, shape in ipairs(case[2]) do
          inputs[k] = random(dtype, shape, case.positive)
          if not in_place then lib.ms_set_requires_grad(inputs[k], 1) end
        end
        local out, code, text = samples.call(case[1], inputs, case[3], case[4])
        local word = text
        if out then
          word = ("%08x"):format(bit.band(hash(out[1]), 0xffffffff) % 2 ^ 32)
          if samples.info(out[1]).requires_grad then
            samples.backward({ out[1] }, { random(dtype, samples.info(out[1]).shape) })
            for k, id in ipairs(inputs) do
              local g = lib.ms_get_grad(id)
              word = word .. (g ~= 0 and (" %08x"):format(hash(g) % 2 ^ 32) or " -")
            end
          end
        end
        print(("%s %s %s %s %s"):format(case.product and "product" or "plain", case[1],
          ffi.string(lib.ms_name_of(ffi.C.MS_NAME_DTYPE, dtype)), table.concat(case[3] or {}, ","), word))
        lib.ms_scope_close(scope, nil, 0)
      end
    end
  end
]] .. ("arg = { %q } dofile(%q)"):format(process.root, process.root .. "/spec/kernels/bits_probe.lua")

local function bits(env)
  local r = ranks.run(nil, script, { env = env })
  if r.code ~= 0 then error(r.stderr, 0) end
  assert.is_true(#r.stdout > 2000)
  return r.stdout
end

local function differences(a, b, keep)
  local list, other = {}, {}
  for line in b:gmatch "[^\n]+" do other[line] = true end
  for line in a:gmatch "[^\n]+" do
    if not other[line] and keep(line) then list[#list + 1] = line end
  end
  return table.concat(list, "\n")
end

describe("bits", function()
  local reference
  setup(function() reference = bits { OMP_NUM_THREADS = "1" } end)

  it("do not depend on the number of threads", function()
    assert.are.equal("", differences(bits { OMP_NUM_THREADS = "2" }, reference, function() return true end))
  end)

  it("depend on the processor's instructions only in products", function()
    for _, isa in ipairs { "v1", "v3" } do
      assert.are.equal("", differences(bits { OMP_NUM_THREADS = "1", MOONSHARD_ISA = isa }, reference, function(line)
        return not line:find "^product"
      end))
    end
  end)
end)
