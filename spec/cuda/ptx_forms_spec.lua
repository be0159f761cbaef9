-- SPDX-License-Identifier: MIT
--- The semantics of PTX: every form of instruction that nvcc made of the kernels is executed with edge values, and its
--- results are those of a second implementation (spec/support/cuda/ptx/reference.h). A form without a row fails.
local process = require "spec.support.process"
local planted = require "spec.support.cuda.ptx.planted"

--- Rows: pattern of the form; types of the result and of the operands, where T is the form's last type; the result by
--- reference.h. a, b, c, d: the operands, exact; N: bits of T; cc: the carry.
local ROWS = {
  { "add%.[su]%d+", "T T T", "a + b" }, { "sub%.[su]%d+", "T T T", "a - b" },
  { "mul%.lo%.[su]%d+", "T T T", "(U)a * (U)b" }, { "mad%.lo%.[su]%d+", "T T T T", "(U)a * (U)b + (U)c" },
  { "mul%.hi%.s%d+", "T T T", "a * b >> N" }, { "mul%.hi%.u%d+", "T T T", "(U)a * (U)b >> N" },
  { "mul%.wide%.[su]%d+", "W T T", "a * b" },
  -- The ISA leaves a division by 0 open, and its overflow.
  { "div%.[su]%d+", "T T T", "a / b", "b != 0 && !(b == -1 && a == -((I)1 << (N - 1)))" },
  { "rem%.[su]%d+", "T T T", "a % b", "b != 0 && b != -1" },
  { "neg%.s%d+", "T T", "-a" }, { "abs%.s%d+", "T T", "a < 0 ? -a : a" },
  { "min%.[su]%d+", "T T T", "a < b ? a : b" }, { "max%.[su]%d+", "T T T", "a < b ? b : a" },
  { "and%.%a+%d*", "T T T", "a & b" }, { "or%.%a+%d*", "T T T", "a | b" }, { "xor%.%a+%d*", "T T T", "a ^ b" },
  { "not%.b%d+", "T T", "~a" }, { "not%.pred", "T T", "!a" },
  { "shl%.b%d+", "T T u32", "shifted(a, b, N, 1)" }, { "shr%.[subf]%d+", "T T u32", "shifted(a, b, N, 0)" },
  { "clz%.b%d+", "u32 T", "leading(a, N)" },
  { "bfi%.b64", "T T T u32 u32", "inserted(a, b, c, d)" }, { "prmt%.b32", "T T T T", "permuted(a, b, c)" },
  { "selp%.[sub]%d+", "T T T pred", "c ? a : b" }, { "selp%.f%d+", "R R R pred", "c ? a : b" },
  { "mov%.[sub]%d+", "T T", "a" }, { "mov%.f%d+", "R R", "a" }, { "mov%.pred", "T T", "a" },
  -- With a carry: the exact sum; its 33rd bit is the next carry.
  { "add%.cc%.u32", "carry T T", "a + b" }, { "addc%.cc%.u32", "carry T T", "a + b + cc" },
  { "addc%.u32", "T T T", "a + b + cc" }, { "sub%.cc%.u32", "borrow T T", "a - b" },
  { "subc%.cc%.u32", "borrow T T", "a - b - cc" }, { "subc%.u32", "T T T", "a - b - cc" },
  { "mad%.lo%.cc%.u32", "carry T T T", "(a * b & 0xffffffff) + c" },
  { "madc%.lo%.cc%.u32", "carry T T T", "(a * b & 0xffffffff) + c + cc" },
  { "madc%.hi%.cc%.u32", "carry T T T", "(a * b >> 32) + c + cc" },
  { "madc%.hi%.u32", "T T T T", "(a * b >> 32) + c + cc" },
  -- Numbers.
  { "add%.rn%.f%d+", "T T T", "T(sum(a, b))" }, { "sub%.rn%.f%d+", "T T T", "T(sum(a, -b))" },
  { "mul%.rn%.f%d+", "T T T", "T(a * b)" }, { "div%.rn%.f%d+", "T T T", "T(a / b)" },
  { "rcp%.rn%.f%d+", "T T", "T(1 / a)" }, { "sqrt%.rn%.f%d+", "T T", "T(sqrtq(a))" },
  { "fma%.rn%.f%d+", "T T T T", "T(sum(a * b, c))" }, { "fma%.rz%.f32", "T T T T", "to_f32_rz(sum(a * b, c))" },
  { "add%.rz%.f32", "T T T", "to_f32_rz(sum(a, b))" },
  { "neg%.f32", "b32 b32", "a ^ 0x80000000" }, { "neg%.f64", "b64 b64", "a ^ (U)1 << 63" },
  { "abs%.f32", "b32 b32", "a & 0x7fffffff" }, { "abs%.f64", "b64 b64", "a & ~((U)1 << 63)" },
  { "copysign%.f32", "b32 b32 b32", "(b & 0x7fffffff) | (a & 0x80000000)" },
  { "copysign%.f64", "b64 b64 b64", "(b & ~((U)1 << 63)) | (a & (U)1 << 63)" },
  { "min%.f%d+", "T T T", "T(least_of(a, b, 0))" }, { "max%.f%d+", "T T T", "T(least_of(a, b, 1))" },
  { "ex2%.approx%.f32", "T T", "to_f32(exp2q(a))" }, { "ex2%.approx%.ftz%.f32", "T T", "to_f32(flushed(exp2q(flushed(a))))" },
  { "rcp%.approx%.ftz%.f32", "T T", "to_f32(flushed(1 / flushed(a)))" },
  { "rsqrt%.approx%.ftz%.f32", "T T", "to_f32(flushed(1 / sqrtq(flushed(a))))" },
  { "div%.approx%.f32", "T T T", "to_f32(fabsq(b) > 0x1p126Q && !isinfq(b) ? 0 * a * b : a / b)" },
  { "div%.approx%.ftz%.f32", "T T T",
    "to_f32(flushed(fabsq(b) > 0x1p126Q && !isinfq(b) ? 0 * flushed(a) * b : flushed(a) / flushed(b)))" },
  { "rcp%.approx%.ftz%.f64", "T T", "to_f64(flushed64(1 / flushed64(a)))" },
  { "rsqrt%.approx%.ftz%.f64", "T T", "to_f64(flushed64(1 / sqrtq(flushed64(a))))" },
  -- Conversions. In "cvt.s16.s8" S is the last type, D the one before.
  { "cvt%.[su]%d+%.[su]%d+", "D S", "a" },
  { "cvt%.rzi%.[su]%d+%.f%d+", "D S", "saturated(truncq(a), N, SIGN, ZERO)" },
  { "cvt%.rni%.[su]%d+%.f%d+", "D S", "saturated(rintq(a), N, SIGN, ZERO)" },
  { "cvt%.rn%.f%d+%.[su]%d+", "D S", "D((Q)a)" }, { "cvt%.rn%.f32%.f64", "D S", "to_f32(a)" },
  { "cvt%.f64%.f32", "D S", "to_f64(a)" },
  { "cvt%.rzi%.f%d+%.f%d+", "D S", "D(truncq(a))" }, { "cvt%.rni%.f%d+%.f%d+", "D S", "D(rintq(a))" },
  { "cvt%.rmi%.f%d+%.f%d+", "D S", "D(floorq(a))" }, { "cvt%.rpi%.f%d+%.f%d+", "D S", "D(ceilq(a))" },
  { "cvt%.f32%.f16", "b32 b16", "to_f32(of_half(a))" },
  { "cvt%.rn%.bf16%.f32", "b16 f32", "half(a, 7, -126, 127)" },
  { "cvt%.rn%.f16%.f32", "b16 f32", "half(a, 10, -14, 15)" },
  { "cvt%.rn%.bf16x2%.f32", "b32 f32 f32", "half(b, 7, -126, 127) | half(a, 7, -126, 127) << 16" },
  { "cvt%.rn%.f16x2%.f32", "b32 f32 f32", "half(b, 10, -14, 15) | half(a, 10, -14, 15) << 16" },
  -- Comparisons.
  { "setp%.eq%.[sub]%d+", "pred T T", "a == b" }, { "setp%.ne%.[sub]%d+", "pred T T", "a != b" },
  { "setp%.lt%.[su]%d+", "pred T T", "a < b" }, { "setp%.le%.[su]%d+", "pred T T", "a <= b" },
  { "setp%.gt%.[su]%d+", "pred T T", "a > b" }, { "setp%.ge%.[su]%d+", "pred T T", "a >= b" },
  { "setp%.nan%.f%d+", "pred T T", "isnanq(a) || isnanq(b)" }, { "setp%.num%.f%d+", "pred T T", "!isnanq(a) && !isnanq(b)" },
}
for name, c in pairs { eq = "==", ne = "!=", lt = "<", le = "<=", gt = ">", ge = ">=" } do
  local nan = "isnanq(a) || isnanq(b)"
  ROWS[#ROWS + 1] = { "setp%." .. name .. "%.f%d+", "pred T T", ("!(%s) && a %s b"):format(nan, c) }
  ROWS[#ROWS + 1] = { "setp%." .. name .. "u%.f%d+", "pred T T", ("%s || a %s b"):format(nan, c) }
end

local BITS = { pred = 1 }
for _, t in ipairs { "b", "u", "s", "f" } do
  for _, n in ipairs { 8, 16, 32, 64 } do BITS[t .. n] = n end
end
local function register(t) return t == "pred" and "pred" or t:find "^f" and t or "b" .. math.max(BITS[t], 16) end

--- The row of a form, with its types and the C of its result: { types, c, unless }; nil if there is none.
local function row_of(form)
  local last, before = form:match "%.(%w+)$", form:match "%.(%w+)%.%w+$"
  for _, row in ipairs(ROWS) do
    if form:find("^" .. row[1] .. "$") then
      local of = { T = last, S = last, D = before }
      if last:find "^[su]%d" then of.W = last:sub(1, 1) .. 2 * BITS[last] end
      if last ~= "pred" then of.R = "b" .. BITS[last] end
      local types = {}
      for t in row[2]:gmatch "%S+" do types[#types + 1] = of[t] or t end
      local into = BITS[types[1]] and types[1] or "u32"
      local c = row[3]:gsub("%f[%w]([TD])%(", function(t) return "to_" .. of[t] .. "(" end)
      c = c:gsub("%f[%w]N%f[%W]", BITS[row[3]:find "saturated" and into or last])
      c = c:gsub("SIGN", into:find "^s" and 1 or 0):gsub("ZERO", (into:find "64" or last == "f64") and 0 or 1)
      return { types = types, c = c, when = (row[4] or "1"):gsub("N", BITS[last] or 1), into = into }
    end
  end
end

--- PTX that reads operands from words of 8 bytes, executes the form, and writes its result and its carry.
local function program(form, row)
  local out, names = {}, {}
  local function add(text, ...) out[#out + 1] = "\t" .. text:format(...) end
  add ".reg .b64 %%in, %%out;"
  add ".reg .b32 %%flag, %%carry;"
  for k, t in ipairs(row.types) do
    names[k] = ("%%v%d"):format(k)
    add(".reg .%s %s;", register(k == 1 and row.into or t), names[k])
  end
  add ".reg .pred %%p;"
  add "ld.param.u64 %%in, [k_param_0];"
  add "ld.param.u64 %%out, [k_param_1];"
  for k = 2, #row.types do
    local t = row.types[k]
    if t == "pred" then
      add("ld.global.b32 %%flag, [%%in+%d];", 8 * k - 16)
      add("setp.ne.s32 %s, %%flag, 0;", names[k])
    else
      add("ld.global.%s %s, [%%in+%d];", register(t):gsub("f", "b"), names[k], 8 * k - 16)
    end
  end
  local borrows = form:find "^sub"
  if form:find "c%." then                                          -- sets the carry, or the borrow, to the fifth word
    add "ld.global.b32 %%flag, [%%in+32];"
    add(borrows and "sub.cc.u32 %%carry, 0, %%flag;" or "add.cc.u32 %%carry, %%flag, -1;")
  end
  add("%s %s;", form, table.concat(names, ", "))
  add(borrows and "subc.u32 %%carry, 0, 0;" or "addc.u32 %%carry, 0, 0;")
  if row.into == "pred" then
    add("selp.b32 %%flag, 1, 0, %s;", names[1])
    add "st.global.b32 [%%out], %%flag;"
  else
    add("st.global.b%d [%%out], %s;", math.max(BITS[row.into], 16), names[1])
  end
  add "st.global.b32 [%%out+8], %%carry;"
  add "ret;"
  return (".visible .entry k(\n\t.param .u64 k_param_0,\n\t.param .u64 k_param_1\n)\n{\n%s\n}\n"):format(table.concat(out, "\n"))
end

--- C that gives a form's expected result and carry for words of operands; false if the ISA leaves the result open.
local function expected(n, form, row)
  local out = { ("static int expected_%d(const uint64_t *in, uint64_t *out)\n{"):format(n) }
  local function add(text, ...) out[#out + 1] = "    " .. text:format(...) end
  for k = 2, #row.types do
    local t, name = row.types[k], ("abcd"):sub(k - 1, k - 1)
    if t:find "^f" then add("Q %s = q_of_%s(in[%d]);", name, t, k - 2)
    elseif t == "pred" then add("I %s = in[%d] != 0;", name, k - 2)
    else add("I %s = (%sint%d_t)in[%d];", name, t:find "^s" and "" or "u", BITS[t], k - 2) end
  end
  add "I cc = (I)in[4];"
  add("(void)cc;")
  add("if (!(%s)) return 0;", row.when)
  local kind = row.types[1]
  if BITS[kind] and BITS[kind] > 1 then
    add("out[0] = (uint64_t)(%s)%s;", row.c, kind == "b64" and "" or (" & ((U)1 << %d) - 1"):format(math.max(BITS[kind], 16)))
    if kind:find "[su]8" then out[#out] = ("    out[0] = (uint16_t)(%sint8_t)(%s);"):format(kind:sub(1, 1) == "u" and "u" or "", row.c) end
  elseif kind == "pred" then
    add("out[0] = (%s) ? 1 : 0;", row.c:gsub("^~", "!"))
  else
    add("I exact = %s;", row.c)
    add "out[0] = (uint32_t)exact;"
    add("out[1] = %s;", kind == "carry" and "(uint64_t)(exact >> 32 & 1)" or "exact < 0 ? 0xffffffff : 0")
  end
  -- Without .cc the carry, or borrow, remains.
  if form:find "c%." and not form:find "%.cc%." then add("out[1] = in[4] ? %s : 0;", form:find "^sub" and "0xffffffff" or "1") end
  add "return 1;\n}\n"
  return table.concat(out, "\n")
end

--- Compiles and runs C made of these parts; its lines.
local function output_of(parts, libraries)
  local name = os.tmpname()
  process.write(name .. ".c", table.concat(parts, "\n"))
  local text = process.shell(("gcc -std=gnu11 -O1 -ffp-contract=off -fno-strict-aliasing -fwrapv -w -I'%s' -o %s %s.c %s -lm && %s")
    :format(planted.source, name, name, libraries or "", name))
  if not os.getenv "KEEP" then os.remove(name .. ".c") end
  os.remove(name)
  return text
end

local function function_of(text, name)
  local kernels = planted.translator().translate(text, "made.ptx")
  local c = kernels[1].c:gsub("#include[^\n]*\n", ""):gsub("#define DYNAMIC[^\n]*\n", "")
  return (c:gsub("void kernel%(", "static void " .. name .. "("))
end

--- { form = how often it occurs in the kernels }
local function occurring()
  local out = {}
  for _, file in ipairs(planted.lines(("ls %s/ptx/*.opcodes"):format(process.build))) do
    for line in io.lines(file) do
      local form, n = line:match "^(%S+) (%d+)$"
      out[form] = (out[form] or 0) + tonumber(n)
    end
  end
  return out
end

-- Approximations: their exact value and the ISA's bound, in units of the last place for `ulps`, else as a share. Of a
-- double only the upper 32 bits are read and given: 2^-20 for them, 2^-20 for the error.
local APPROXIMATE = {
  { "ex2.approx.f32", "exp2q(a)", "0x1p-22" }, { "ex2.approx.ftz.f32", "exp2q(a)", "0x1p-22" },
  { "rcp.approx.ftz.f32", "1 / a", "ulps 1" }, { "rsqrt.approx.ftz.f32", "1 / sqrtq(fabsq(a))", "exp2q(-22.4Q)" },
  { "div.approx.f32", "a / b", "ulps 2" }, { "div.approx.ftz.f32", "a / b", "ulps 2" },
  { "rcp.approx.ftz.f64", "1 / a", "0x1p-19" }, { "rsqrt.approx.ftz.f64", "1 / sqrtq(fabsq(a))", "0x1p-19" },
}
-- Executes a form on random operands from 1/64 to 64, without errors and with those of two seeds: how many of 4000
-- results are outside of the bound, how many of each seed's differ from the rounded ones, and how many from the other's.
local PERTURBED = [[
typedef Q exact_value(Q a, Q b);
static double operand(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return ldexp(1 + (double)(*state >> 40) * 0x1p-24, (int)(*state >> 33 & 127) % 12 - 6);
}
static void perturbed(const char *name, ptx_kernel *run, exact_value *exact, Q share, Q ulps, int wide)
{
    int outside = 0, changed[3] = { 0 }, apart = 0;
    struct ptx_thread t[3] = { { .perturbed = 0 }, { .perturbed = 3 }, { .perturbed = 5 } };
    uint64_t state = 1;
    for (int k = 0; k < 4000; k++) {
        double in[2] = { operand(&state), operand(&state) };
        uint64_t words[2] = { 0 }, out[3][2];
        for (int i = 0; i < 2; i++) {
            float narrow = (float)in[i];
            if (wide) words[i] = to_f64(in[i]) & ~(uint64_t)0xffffffff;
            else memcpy(&words[i], &narrow, 4);
        }
        Q want = exact((wide ? q_of_f64 : q_of_f32)(words[0]), (wide ? q_of_f64 : q_of_f32)(words[1]));
        for (int s = 0; s < 3; s++) {
            const void *const in_at = words, *const out_at = out[s], *const arguments[2] = { &in_at, &out_at };
            out[s][0] = 0;
            run(&t[s], arguments);
            Q off = fabsq((wide ? q_of_f64 : q_of_f32)(out[s][0]) - want);
            outside += off > share * fabsq(want) + ulps * scalbnq(1, ilogbq(want) - 23);
            changed[s] += out[s][0] != out[0][0];
        }
        apart += out[1][0] != out[2][0];
    }
    printf("%s %d %d %d %d\n", name, outside, changed[1], changed[2], apart);
}
]]

local LISTS = { pred = 0, f32 = 2, f64 = 3 }

describe("the PTX of the kernels #cuda", function()
  local forms, missing, results = {}, {}, {}
  local others = require "spec.support.cuda.ptx.memory_forms"

  setup(function()
    if not planted.built() then return end
    assert.is_true(planted.prepare())
    local rows = {}
    for form in pairs(occurring()) do
      local row = row_of(form)
      if row then rows[#rows + 1] = { form, row }
      elseif not others.covers(form) then missing[#missing + 1] = form end
    end
    table.sort(rows, function(a, b) return a[1] < b[1] end)
    local parts, list = { '#include "runtime.h"\n#include "edges.h"' }, {}
    for n, r in ipairs(rows) do
      local form, row = r[1], r[2]
      parts[#parts + 1] = function_of(program(form, row), "form_" .. n)
      parts[#parts + 1] = expected(n, form, row)
      local kinds = {}
      for k = 2, #row.types do kinds[k - 1] = LISTS[row.types[k]] or 1 end
      list[n] = ('test(&(struct form){ "%s", form_%d, expected_%d, %d, { %s }, %d }, %d);'):format(form, n, n, #kinds,
        table.concat(kinds, ", "), row.into == "f64" and 1 or 0, form:find "c%." and 2 or 1)
      forms[n] = form
    end
    parts[#parts + 1] = "int main(void)\n{\n" .. table.concat(list, "\n") .. "\n}"
    for line in output_of(parts, "-lquadmath"):gmatch "[^\n]+" do results[line:match "^%S+"] = line end
  end)

  it("has no instruction without a row here", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    table.sort(missing)
    assert.equal("", table.concat(missing, " "))
  end)
  it("computes what the ISA says", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    assert.is_true(#forms > 200)
    local wrong = {}
    for _, form in ipairs(forms) do
      if not (results[form] or ""):find " right [1-9]" then wrong[#wrong + 1] = results[form] or form .. " gave nothing" end
    end
    assert.equal("", table.concat(wrong, "\n"))
  end)
  it("approximates within the ISA's bounds, with errors drawn from a seed", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    local occurs, listed = occurring(), {}
    local parts, calls = { '#include "runtime.h"\n#include "reference.h"\n#include <stdio.h>', PERTURBED }, {}
    for n, case in ipairs(APPROXIMATE) do
      local form, exact, bound = unpack(case)
      listed[form] = true
      parts[#parts + 1] = function_of(program(form, row_of(form)), "approximate_" .. n)
      parts[#parts + 1] = ("static Q exact_%d(Q a, Q b) { return %s; }"):format(n, exact)
      local ulps = bound:match "ulps (%d)"
      calls[n] = ('perturbed("%s", approximate_%d, exact_%d, %s, %s, %d);'):format(form, n, n, ulps and 0 or bound, ulps or 0,
        form:find "f64" and 1 or 0)
    end
    for form in pairs(occurs) do assert.is_true(not form:find "approx" or listed[form], form) end
    parts[#parts + 1] = "int main(void)\n{\n" .. table.concat(calls, "\n") .. "\n}"
    local seen = 0
    for form, outside, first, second, apart in output_of(parts, "-lquadmath"):gmatch "(%S+) (%d+) (%d+) (%d+) (%d+)" do
      seen = seen + 1
      assert.equal("0", outside, form)
      for _, n in ipairs { first, second, apart } do assert.is_true(tonumber(n) > 1500, form .. " " .. n) end
    end
    assert.equal(#APPROXIMATE, seen)
  end)
  it("accesses memory as the ISA says", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    local list, want = {}, {}
    for form in pairs(occurring()) do
      if others.accessing(form) then list[#list + 1] = form end
    end
    table.sort(list)
    for k, form in ipairs(list) do want[k] = form .. " right 1\n" end
    assert.equal(table.concat(want), output_of(others.accesses(list, function_of)))
  end)
  it("branches, calls, synchronizes and exchanges as the ISA says", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    local parts, n = others.programs(function_of)
    local want = {}
    for k = 1, n do want[k] = k .. ": right\n" end
    assert.equal(table.concat(want), output_of(parts))
  end)
end)
