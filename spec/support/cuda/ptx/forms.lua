-- SPDX-License-Identifier: MIT
--- The forms of PTX instructions (opcode, modifiers and types) that compute a register from registers, as C expressions
--- with the semantics of the PTX ISA. a, b, c stand for the operands; the functions are in runtime.h.
local M = {}

--- { opcode = { to = type of the result, from = { types of the operands }, c = expression, sets_carry = boolean } }
M.FORMS = {}

-- Defines forms. opcode: T is replaced by each of types, also in the types of operands and in the expression.
local function form(opcode, types, to, from, c)
  for t in (types == "" and "-" or types):gmatch "%S+" do
    local list = {}
    for f in from:gmatch "%S+" do list[#list + 1] = f == "T" and t or f end
    local function with(text) return (text:gsub("%f[%w]T%f[%W]", t)) end
    M.FORMS[with(opcode)] = { to = with(to), from = list, c = with(c) }
  end
end

local INTS, WIDE = "s16 u16 s32 u32 s64 u64", { s16 = "s32", u16 = "u32", s32 = "s64", u32 = "u64" }
local BITS = "b16 b32 b64"
local ALL = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"
local REAL = "f32 f64"

-- Integers. They wrap around (-fwrapv).
form("add.T", INTS, "T", "T T", "a + b")
form("sub.T", INTS, "T", "T T", "a - b")
form("mul.lo.T", "s32 u32 s64 u64", "T", "T T", "a * b")
form("mul.lo.T", "s16 u16", "T", "T T", "(u32)a * (u32)b")
form("mul.hi.T", "s32 u32 s64 u64", "T", "T T", "mul_hi_T(a, b)")
for t, w in pairs(WIDE) do form("mul.wide." .. t, "", w, t .. " " .. t, ("(%s)a * (%s)b"):format(w, w)) end
form("mad.lo.T", "s32 u32 s64 u64", "T", "T T T", "a * b + c")
form("div.T", "s32 u32 s64 u64", "T", "T T", "div_T(a, b)")
form("rem.T", "s32 u32 s64 u64", "T", "T T", "rem_T(a, b)")
form("neg.T", "s16 s32 s64", "T", "T", "-a")
form("abs.T", "s16 s32 s64", "T", "T", "a < 0 ? -a : a")
form("min.T", INTS, "T", "T T", "a < b ? a : b")
form("max.T", INTS, "T", "T T", "a > b ? a : b")
form("and.T", BITS .. " pred", "T", "T T", "a & b")
form("or.T", BITS .. " pred", "T", "T T", "a | b")
form("xor.T", BITS .. " pred", "T", "T T", "a ^ b")
form("not.T", BITS, "T", "T", "~a")
form("not.pred", "", "pred", "pred", "!a")
form("shl.b16", "", "b16", "b16 u32", "b > 15 ? 0 : (u32)a << b")
form("shl.b32", "", "b32", "b32 u32", "b > 31 ? 0 : a << b")
form("shl.b64", "", "b64", "b64 u32", "b > 63 ? 0 : a << b")
form("shr.T", "u16 b16", "T", "T u32", "b > 15 ? 0 : a >> b")
form("shr.T", "u32 b32", "T", "T u32", "b > 31 ? 0 : a >> b")
form("shr.T", "u64 b64", "T", "T u32", "b > 63 ? 0 : a >> b")
form("shr.s16", "", "s16", "s16 u32", "a >> (b > 15 ? 15 : b)")
form("shr.s32", "", "s32", "s32 u32", "a >> (b > 31 ? 31 : b)")
form("shr.s64", "", "s64", "s64 u32", "a >> (b > 63 ? 63 : b)")
form("clz.T", "b32 b64", "u32", "T", "clz_T(a)")
form("bfi.b64", "", "b64", "b64 b64 u32 u32", "bfi_b64(a, b, c, d)")
form("prmt.b32", "", "b32", "b32 b32 b32", "prmt(a, b, c)")
form("selp.T", ALL, "T", "T T pred", "c ? a : b")
form("mov.T", ALL .. " pred", "T", "T", "a")
-- The carry flag is the variable cc.
form("add.cc.u32", "", "u32", "u32 u32", "add_cc(&cc, a, b, 0)")
form("addc.cc.u32", "", "u32", "u32 u32", "add_cc(&cc, a, b, cc)")
form("addc.u32", "", "u32", "u32 u32", "a + b + cc")
form("sub.cc.u32", "", "u32", "u32 u32", "sub_cc(&cc, a, b, 0)")
form("subc.cc.u32", "", "u32", "u32 u32", "sub_cc(&cc, a, b, cc)")
form("subc.u32", "", "u32", "u32 u32", "a - b - cc")
form("mad.lo.cc.u32", "", "u32", "u32 u32 u32", "add_cc(&cc, a * b, c, 0)")
form("madc.lo.cc.u32", "", "u32", "u32 u32 u32", "add_cc(&cc, a * b, c, cc)")
form("madc.hi.cc.u32", "", "u32", "u32 u32 u32", "add_cc(&cc, mul_hi_u32(a, b), c, cc)")
form("madc.hi.u32", "", "u32", "u32 u32 u32", "mul_hi_u32(a, b) + c + cc")

-- Floating point. A NaN that float32 arithmetic makes is 0x7fffffff.
form("add.rn.T", REAL, "T", "T T", "nan_T(a + b)")
form("sub.rn.T", REAL, "T", "T T", "nan_T(a - b)")
form("mul.rn.T", REAL, "T", "T T", "nan_T(a * b)")
form("div.rn.T", REAL, "T", "T T", "nan_T(a / b)")
form("rcp.rn.T", REAL, "T", "T", "nan_T(1 / a)")
form("fma.rn.f32", "", "f32", "f32 f32 f32", "nan_f32(__builtin_fmaf(a, b, c))")
form("fma.rn.f64", "", "f64", "f64 f64 f64", "__builtin_fma(a, b, c)")
form("sqrt.rn.f32", "", "f32", "f32", "nan_f32(__builtin_sqrtf(a))")
form("sqrt.rn.f64", "", "f64", "f64", "__builtin_sqrt(a)")
form("add.rz.f32", "", "f32", "f32 f32", "nan_f32(add_rz(a, b))")
form("fma.rz.f32", "", "f32", "f32 f32 f32", "nan_f32(fma_rz(a, b, c))")
form("neg.T", REAL, "T", "T", "-a")
form("abs.f32", "", "f32", "f32", "__builtin_fabsf(a)")
form("abs.f64", "", "f64", "f64", "__builtin_fabs(a)")
form("copysign.f32", "", "f32", "f32 f32", "__builtin_copysignf(b, a)")
form("copysign.f64", "", "f64", "f64 f64", "__builtin_copysign(b, a)")
form("min.T", REAL, "T", "T T", "min_T(a, b)")
form("max.T", REAL, "T", "T T", "max_T(a, b)")
-- Their errors by the ISA: ex2 2^-22 and rsqrt 2^-22.4 of the result, rcp 1 ulp, div 2 ulp. ex2 of an integer is exact:
-- CUDA's tanh and erf of double, accurate to 2 ulp, take it for the power of two that scales their exponential.
form("ex2.approx.f32", "", "f32", "f32", "approx(t, (f32)exp2(a), exp2(a), a == rint(a) ? 0 : 0x1p-22, 0)")
form("ex2.approx.ftz.f32", "", "f32", "f32", "ftz(approx(t, (f32)exp2(ftz(a)), exp2(ftz(a)), a == rint(a) ? 0 : 0x1p-22, 0))")
form("rcp.approx.ftz.f32", "", "f32", "f32", "ftz(approx(t, 1 / ftz(a), 1 / (f64)ftz(a), 0, 1))")
form("rsqrt.approx.ftz.f32", "", "f32", "f32", "ftz(approx(t, (f32)(1 / sqrt(ftz(a))), 1 / sqrt(ftz(a)), 1.51 * 0x1p-23, 0))")
form("div.approx.f32", "", "f32", "f32 f32", "approx(t, div_approx(a, b), (f64)a / b, 0, 2)")
form("div.approx.ftz.f32", "", "f32", "f32 f32", "ftz(approx(t, div_approx(ftz(a), ftz(b)), (f64)ftz(a) / ftz(b), 0, 2))")
form("rcp.approx.ftz.f64", "", "f64", "f64", "approx_high(t, 1 / high_f64(a))")
form("rsqrt.approx.ftz.f64", "", "f64", "f64", "approx_high(t, 1 / sqrt(high_f64(a)))")

-- Comparisons. The unordered ones are true if an operand is NaN.
local ORDERED = { eq = "a == b", ne = "a != b && a == a && b == b", lt = "a < b", le = "a <= b", gt = "a > b", ge = "a >= b" }
local UNORDERED = { equ = "!(a < b || a > b)", neu = "!(a == b)", ltu = "!(a >= b)", leu = "!(a > b)",
  gtu = "!(a <= b)",
  geu = "!(a < b)", num = "a == a && b == b", nan = "a != a || b != b" }
for name, c in pairs(ORDERED) do
  form("setp." .. name .. ".T", INTS, "pred", "T T", name == "ne" and "a != b" or c)
  form("setp." .. name .. ".T", REAL, "pred", "T T", c)
end
form("setp.eq.T", BITS, "pred", "T T", "a == b")
form("setp.ne.T", BITS, "pred", "T T", "a != b")
for name, c in pairs(UNORDERED) do form("setp." .. name .. ".T", REAL, "pred", "T T", c) end

-- Conversions.
local BYTE = "s8 u8 " .. INTS
for to in BYTE:gmatch "%S+" do
  form("cvt." .. to .. ".T", BYTE, to, "T", "a")
  if to:find "[us][136]" then
    for from in REAL:gmatch "%S+" do
      for mode, round in pairs { rzi = "trunc", rni = "rint", rmi = "floor", rpi = "ceil" } do
        form(("cvt.%s.%s.%s"):format(mode, to, from), "", to, from,
          ("%s_of(%s(a), %s)"):format(to, round, (from == "f64" or to:find "64") and 1 or 0))
      end
    end
  end
end
form("cvt.rn.f32.T", BYTE .. " f64", "f32", "T", "(f32)a")
form("cvt.rn.f64.T", BYTE, "f64", "T", "(f64)a")
M.FORMS["cvt.rn.f32.f64"].c = "nan_f32((f32)a)"
form("cvt.f64.f32", "", "f64", "f32", "a")
for mode, f in pairs { rzi = "trunc", rni = "rint", rmi = "floor", rpi = "ceil" } do
  form(("cvt.%s.f32.f32"):format(mode), "", "f32", "f32", ("nan_f32(%sf(a))"):format(f))
  form(("cvt.%s.f64.f64"):format(mode), "", "f64", "f64", f .. "(a)")
end
form("cvt.f32.f16", "", "f32", "b16", "f32_of(a)")
form("cvt.rn.f16.f32", "", "b16", "f32", "f16_of(a)")
form("cvt.rn.bf16.f32", "", "b16", "f32", "bf16_of(a)")
form("cvt.rn.f16x2.f32", "", "b32", "f32 f32", "f16_of(b) | (u32)f16_of(a) << 16")
form("cvt.rn.bf16x2.f32", "", "b32", "f32 f32", "bf16_of(b) | (u32)bf16_of(a) << 16")

-- Addresses: a generic address is the CPU's; an address of shared memory counts from the start of the block's.
form("cvta.to.global.u64", "", "u64", "u64", "a")
form("cvta.global.u64", "", "u64", "u64", "a")
form("cvta.to.local.u64", "", "u64", "u64", "a")
form("cvta.local.u64", "", "u64", "u64", "a")
form("cvta.shared.u64", "", "u64", "u64", "a + (u64)t->shared")
form("cvta.to.shared.u64", "", "u64", "u64", "a - (u64)t->shared")

return M
