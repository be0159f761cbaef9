-- SPDX-License-Identifier: MIT
--- The machine code of the kernels has what their PTX has (spec/support/cuda/ptx/machine.lua).
local process = require "spec.support.process"
local machine = require "spec.support.cuda.ptx.machine"

local function lines(text) return text:gmatch "[^\n]+" end

local PTX = [[
.func  (.param .b64 func_retval0) slow
(
 .param .b64 slow_param_0
)
;
.visible .entry k(
 .param .u64 k_param_0
)
{
 .reg .b32  %r<5>;
 ld.param.u64  %rd1, [k_param_0];
 @%p1 st.global.u32  [%rd1], %r1;
 st.global.v2.f32  [%rd1+8], {%f1, %f2};
 st.shared.u32  [%r2], %r1;
 bar.sync  0;
 // begin inline asm
 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
 cp.async.cg.shared.global [%r1], [%rd1], 16;
 { cp.async.commit_group; }
 cp.async.wait_group 0;
 atom.global.cas.b32  %r1, [%rd1], %r2, %r3;
 st.param.f64  [param0], %fd1;
 call.uni (retval0),
 slow,
 (
 param0
 );
 ret;
}
.visible .entry plain()
{
 st.f64  [%rd1], %fd1;
 ret;
}
.func  (.param .b64 func_retval0) slow(
 .param .b64 slow_param_0
)
{
 .local .align 8 .b8  __local_depot1[40];
 st.local.u32  [%rd1], %r1;
 ret;
}
]]
local SASS = [[
  Function : k
 .headerflags @"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000fe20000000800 */
        /*0010*/              @!P0 STG.E desc[UR4][R2.64], R5 ;           /* 0x00000a00ff017b82 */
        /*0020*/                   STG.E.64 desc[UR4][R2.64+0x8], R6 ;    /* 0x00000a00ff017b82 */
        /*0030*/                   STS [R2], R5 ;                         /* 0x00000a00ff017b82 */
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;          /* 0x00000a00ff017b82 */
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;  /* 0x00000a00ff017b82 */
        /*0060*/                   HFMA2.MMA R3, -RZ, RZ, 0, 0 ;          /* 0x00000a00ff017b82 */
        /*0070*/                   LDGSTS.E.BYPASS.128 [R3], [R2.64] ;    /* 0x00000a00ff017b82 */
        /*0080*/                   LDGDEPBAR ;                            /* 0x00000a00ff017b82 */
        /*0090*/                   DEPBAR.LE SB0, 0x0 ;                   /* 0x00000a00ff017b82 */
        /*00a0*/                   ATOMG.E.CAS.STRONG.GPU PT, R4, [R2], R4, R5 ; /* 0x00000a00ff017b82 */
        /*00b0*/                   STL [R1], R5 ;                         /* 0x00000a00ff017b82 */
  Function : plain
        /*0000*/                   ST.E.64 desc[UR4][R2.64], R6 ;         /* 0x00000a00ff017b82 */
]]

describe("the count of machine instructions", function()
  local ptx = machine.of_ptx(lines(PTX))
  --- The faults and differences of kernel `name` if its machine code is changed.
  local function compared(name, pattern, by)
    local found = machine.of_machine(lines((SASS:gsub(pattern or "^$", by or ""))))
    local faults, others = machine.compare(ptx[name], found[name])
    return table.concat(faults, ", ") .. "; " .. table.concat(others, ", ")
  end

  it("finds nothing in code that has what its PTX has, and local memory that the PTX declares", function()
    assert.equal("; ", compared "k")
    assert.equal("; ", compared "plain")
  end)
  for _, case in ipairs {
    { "a missing store", "plain", "ST%.E", "LD.E", "store 1 -> 0; " },
    { "a missing barrier", "k", "BAR%.SYNC", "NOP", "barrier 1 -> 0; " },
    { "a missing product", "k", "HMMA", "NOP", "mma 1 -> 0; " },
    { "a missing wait", "k", "%sDEPBAR%.LE", " NOP", "wait 1 -> 0; " },
    { "a missing atomic", "k", "ATOMG", "LDG", "atomic 1 -> 0; " },
    { "an atomic too many", "plain", "ST%.E%.64", "RED.E.ADD", "store 1 -> 0, atomic 0 -> 1; " },
    { "a spill", "plain", "ST%.E%.64 desc%[UR4%]%[R2%.64%]", "ST.E.64 ;\n /*0010*/ STL [R1]", "1 spills; " },
    { "an unrolled loop, which is none", "k", "STS %[R2%]", "STS [R2] ;\n /*0031*/ STS [R2+4]", "; shared store 1 -> 2" },
  } do
    local name, kernel, pattern, by, expected = unpack(case)
    it("tells of " .. name, function() assert.equal(expected, compared(kernel, pattern, by)) end)
  end
end)

describe("the machine code of the plugin #cuda", function()
  -- `luajit spec/support/cuda/ptx/machine.lua` compares all kernels, which takes minutes.
  it("stores, synchronizes and multiplies where the PTX of norms and of attention does, and does not spill", function()
    if process.tool then return pending "is not run under sanitizers or valgrind" end
    if not io.open(process.build .. "/libmoonshard_cuda.so") then return pending "not built: needs nvcc" end
    if not machine.tool() then return pending "there is no cuobjdump" end
    local said = process.output "luajit spec/support/cuda/ptx/machine.lua norm flash"
    for line in lines(said) do assert.is_nil(line:match "^FAULT.*") end
    local compared, faulty = said:match "(%d+) kernels compared, (%d+) faults"
    assert.equal("0", faulty)
    assert.is_true(tonumber(compared) > 40, compared)
  end)
end)
