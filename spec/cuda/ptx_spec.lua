-- SPDX-License-Identifier: MIT
--- The kernels' PTX, translated to C and run on the emulated GPU (MOONSHARD_CUDA=ptx, spec/support/cuda/ptx).
local ffi = require "ffi"
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

describe("CUDA's mathematical library #cuda", function()
  it("is within 2 units in the last place of the host's", function()
    if not io.open(process.build .. "/libmoonshard_cuda.so") then return pending "not built: needs nvcc" end
    local folder, random = process.build .. "/ptx/functions", math.random
    assert.equal(0, os.execute(("luajit '%sprepare.lua' '%s'"):format(here, folder)))
    local functions = 0
    for line in io.lines(folder .. "/index") do
      local name, library = line:match "^of_(%S+) .* (%S+)$"
      local type_of = name:find "[^r]f$" and "float" or "double"
      local two = name:find "^atan2" or name:find "^hypot" or name:find "^pow"
      ffi.cdef(('%s spec_host_%s(%s%s) __asm__("%s"); void spec_cuda_%s(void *, void *const *) __asm__("kernel");'):format(
        type_of, name, type_of, two and ", " .. type_of or "", name, name))
      local host, cuda = ffi.C["spec_host_" .. name], ffi.load(("%s/%s.so"):format(folder, library))["spec_cuda_" .. name]
      local thread, x, y = ffi.new "uint64_t[32]", ffi.new(type_of .. "[2]"), ffi.new(type_of .. "[2]")
      local to, from = ffi.new("void *[1]", y), ffi.new("void *[1]", x)
      local arguments = ffi.new("void *[2]", to, from)
      local bits = ffi.cast(type_of == "float" and "int32_t *" or "int64_t *", y)
      local function check(a, b)
        x[0], x[1] = a, b
        cuda(thread, arguments)
        y[1] = two and host(x[0], x[1]) or host(x[0])
        if y[0] == y[1] or (y[0] ~= y[0] and y[1] ~= y[1]) then return end
        local off = math.abs(tonumber(bits[0] - bits[1]))
        if off > 2 then
          error(("%s(%.17g, %.17g) is %.17g, the host's %.17g"):format(name, x[0], x[1], y[0], y[1]))
        end
      end
      for _ = 1, 3000 do
        local sign = random() < 0.5 and -1 or 1
        check(sign * math.exp((random() - 0.5) * 20), sign * math.exp((random() - 0.5) * 6))
        check(sign * random(), random() * 4)
        check(sign * random() * 700, random())
      end
      for _, special in ipairs { 0, -0.0, 1, -1, math.huge, -math.huge } do check(special, 0.5) end
      functions = functions + 1
    end
    assert.is_true(functions >= 36, functions)
  end)
end)
