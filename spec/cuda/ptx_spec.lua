-- SPDX-License-Identifier: MIT
--- The kernels' PTX, translated to C and run on the emulated GPU (MOONSHARD_CUDA=ptx, spec/support/cuda/ptx).
local process = require "spec.support.process"

local here = process.root .. "/spec/support/cuda/ptx/"
local function translate(body, parameters)
  local path = package.path
  package.path = here .. "?.lua;" .. path
  local translator = require "translate"
  package.path = path
  local text = (".version 9.0\n\n.visible .entry k(\n\t%s\n)\n{\n%s\n}\n"):format(parameters or ".param .u64 k_param_0", body)
  return translator.translate(text, "made.ptx")
end

describe("the translator of PTX", function()
  it("gives a kernel's parameters and static shared memory", function()
    local found = translate("\t.shared .align 8 .b8 x[24];\n\tret;", ".param .u32 a,\n\t.param .align 8 .b8 b[40]")
    assert.equal(1, #found)
    assert.same({ { 4, 40 }, 24 }, { found[1].sizes, found[1].shared })
  end)
  for _, case in ipairs {
    { "an opcode", "\t.reg .b32 %r<2>;\n\tpopc.b32 %r0, %r1;", "made%.ptx:%d+: instruction 'popc%.b32' is unknown" },
    { "a modifier of a load", "\t.reg .b32 %r<2>;\n\tld.global.L1::no_allocate.u32 %r0, [%r1];", "made%.ptx:%d+: instruction 'ld" },
    { "a register", "\tadd.s32 %r0, %r1, 1;", "made%.ptx:%d+: operand '%%r1' is unknown" },
    { "another barrier", "\tbar.sync 1;", "made%.ptx:%d+: bar%.sync: only barrier 0" },
  } do
    it("names file and line of " .. case[1] .. " that it does not know", function()
      local ok, message = pcall(translate, case[2])
      assert.is_false(ok)
      assert.matches(case[3], message)
    end)
  end
end)

describe("the translated kernels #cuda", function()
  local function built() return io.open(process.build .. "/libmoonshard_cuda.so") ~= nil end
  it("give the bits of the emulated GPU, and the checks find no fault", function()
    if not built() then return pending "not built: needs nvcc" end
    local script = os.tmpname()
    process.write(script, ([[
      package.path = "%s/lua/?.lua;%s/lua/?/init.lua;" .. package.path
      local ms = require "moonshard"
      ms.manual_seed(3)
      local x = ms.randn { 9, 37 }
      for _, d in ipairs { "float32", "float64", "bfloat16" } do
        local g = x:to(d):to "cuda"
        for _, y in ipairs { g:sum(2), g:softmax(2), g:t():contiguous() } do print(y:to "cpu":to "float64") end
      end
    ]]):format(process.root, process.root))
    local texts = {}
    for k, mode in ipairs { "emulated", "ptx", "ptx MOONSHARD_EMULATOR=check,compare,seed:5" } do
      texts[k] = process.shell(("MOONSHARD_PTX_LAUNCHED=%s.log MOONSHARD_CUDA=%s luajit %s"):format(script, mode, script))
    end
    os.remove(script)
    local launched = process.read(script .. ".log")
    os.remove(script .. ".log")
    assert.is_true(select(2, launched:gsub("kernel", "")) >= 10)
    assert.matches("Tensor float64 %[37, 9%]", texts[1])
    assert.equal(texts[1], texts[2])
    assert.equal(texts[1], texts[3])
  end)
end)
