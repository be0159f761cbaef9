-- SPDX-License-Identifier: MIT
--- The forms of PTX that access memory, synchronize or branch, for spec/cuda/ptx_forms_spec.lua: each is executed and
--- its effect compared with what the ISA says.
local M = {}

-- Loads and stores are executed as they occur; the others by the programs below.
local function accesses(form) return form:find "^ld%.[%w.]*%a%d+$" or form:find "^st%.[%w.]*%a%d+$" end
local WIDTH = {}
for _, t in ipairs { "b", "u", "s", "f" } do
  for _, n in ipairs { 1, 2, 4, 8 } do WIDTH[t .. 8 * n] = n end
end

--- PTX of an access: loads write what they loaded, zero or sign extended to 8 bytes, from `out` on; stores store words
--- of 8 bytes from `in` on. Elements lie at byte 32 of the memory. Shared memory is the driver's, local memory and
--- parameters are the kernel's.
local function program(form)
  local space = form:match "^%a+%.(%a+)[.%d]" or "generic"
  if not (" global shared local param "):find(" " .. space .. " ", 1, true) then
    space = form:match "%.(global)%." or "generic"
  end
  local t, n = form:match "%.(%a%d+)$", tonumber(form:match "%.v(%d)%.") or 1
  local out, names, loads = {}, {}, form:find "^ld" ~= nil
  local function add(text, ...) out[#out + 1] = "\t" .. text:format(...) end
  -- An integer may be loaded into a wider register, a wider one stored.
  local class = t:find "^f" and t or "b64"
  if space == "local" then add ".local .align 16 .b8 depot[64];" end
  add(".reg .b64 %%in, %%out, %%at, %%w;")
  for k = 1, n do
    names[k] = "%v" .. k
    add(".reg .%s %%v%d;", class, k)
  end
  add "ld.param.u64 %%in, [k_param_0];"
  add "ld.param.u64 %%out, [k_param_1];"
  local memory = loads and "[%in+32]" or "[%out+32]"
  local where = { global = memory, generic = memory, shared = "[%w+32]", ["local"] = "[%at+32]",
    param = "[k_param_2+32]" }
  if space == "shared" then add "mov.b64 %%w, 0;" end
  if space == "local" then add "mov.b64 %%at, depot;" end
  local list = n > 1 and "{" .. table.concat(names, ", ") .. "}" or names[1]
  if loads then
    if space == "local" then
      for k = 4, 7 do
        add("ld.global.b64 %%w, [%%in+%d];", 8 * k)
        add("st.local.b64 [%%at+%d], %%w;", 8 * k)
      end
    end
    add("%s %s, %s;", form, list, where[space])
    for k = 1, n do add("st.global.%s [%%out+%d], %s;", class, 8 * k - 8, names[k]) end
  else
    for k = 1, n do add("ld.global.%s %s, [%%in+%d];", class, names[k], 8 * k - 8) end
    add("%s %s, %s;", form, where[space], list)
    if space == "local" then
      for k = 0, 3 do
        add("ld.local.b64 %%w, [%%at+%d];", 32 + 8 * k)
        add("st.global.b64 [%%out+%d], %%w;", 32 + 8 * k)
      end
    end
  end
  add "ret;"
  return (".visible .entry k(\n\t.param .u64 k_param_0,\n\t.param .u64 k_param_1,\n\t.param .align 16 .b8 k_param_2[64]\n)\n{\n%s\n}\n")
    :format(table.concat(out, "\n")), space, t, n, loads
end

-- Memory of distinct bytes, half of them with a top bit.
local ACCESS = [[
#include "runtime.h"
#include <stdio.h>
static unsigned char pattern(int k) { return (unsigned char)(k * 37 + 0x91); }
static void load(const char *name, ptx_kernel *run, char space, int width, int n, int sign, int real)
{
    unsigned char in[64], shared[64];
    uint64_t out[8] = { 0 };
    for (int k = 0; k < 64; k++) in[k] = shared[k] = pattern(k);
    struct ptx_thread t = { .shared = (char *)shared };
    const void *const in_at = in, *const out_at = out, *const arguments[3] = { &in_at, &out_at, in };
    run(&t, arguments);
    for (int k = 0; k < n; k++) {
        uint64_t want = 0;
        memcpy(&want, in + 32 + k * width, width);
        if (sign && in[32 + k * width + width - 1] & 0x80 && width < 8) want |= ~(uint64_t)0 << 8 * width;
        if (out[k] != want) {
            printf("%s: word %d is %llx, expected %llx\n", name, k, (unsigned long long)out[k], (unsigned long long)want);
            return;
        }
    }
    printf("%s right 1\n", name);
}
static void store(const char *name, ptx_kernel *run, char space, int width, int n, int sign, int real)
{
    unsigned char in[64], shared[64] = { 0 }, out[64] = { 0 }, want[64] = { 0 };
    for (int k = 0; k < 64; k++) in[k] = pattern(k);
    struct ptx_thread t = { .shared = (char *)shared };
    const void *const in_at = in, *const out_at = out, *const arguments[3] = { &in_at, &out_at, out };
    run(&t, arguments);
    for (int k = 0; k < n; k++) memcpy(want + 32 + k * width, in + 8 * k, width);
    if (space == 'l') memcpy(want, out, 32), memcpy(want + 32 + n * width, out + 32 + n * width, 32 - n * width);
    if (memcmp(space == 's' ? shared : out, want, 64)) printf("%s: other bytes than expected\n", name);
    else printf("%s right 1\n", name);
}
]]


--- Programs: the forms that they execute, their bodies, and C that executes `run` and prints "right" or what differs.
local PROGRAMS = {
  {
    forms = "bra bra.uni ret call.uni mov.b64",                    -- sums the square roots of 1, 4, 9 ... until 36
    text = [[
.func  (.param .b64 func_retval0) root(
    .param .b64 root_param_0
)
{
    .reg .f64 %fd<3>;
    ld.param.f64 %fd1, [root_param_0];
    sqrt.rn.f64 %fd2, %fd1;
    st.param.f64 [func_retval0], %fd2;
    ret;
}
.visible .entry k(
    .param .u64 k_param_0
)
{
    .reg .b64 %rd<2>; .reg .f64 %fd<6>; .reg .pred %p<3>; .reg .b32 %r<4>;
    ld.param.u64 %rd1, [k_param_0];
    mov.f64 %fd1, 0d0000000000000000;
    mov.f64 %fd2, 0d3FF0000000000000;
    mov.f64 %fd5, 0d0000000000000000;
$L__BB0_1:
    add.rn.f64 %fd5, %fd5, 0d3FF0000000000000;
    mul.rn.f64 %fd2, %fd5, %fd5;
    setp.gt.f64 %p1, %fd2, 0d4042000000000000;
    @%p1 bra $L__BB0_3;
    {
    .param .b64 param0;
    st.param.f64 [param0], %fd2;
    .param .b64 retval0;
    call.uni (retval0), root, (param0);
    ld.param.f64 %fd3, [retval0];
    }
    add.rn.f64 %fd1, %fd1, %fd3;
    setp.lt.f64 %p2, %fd2, 0d4042000000000000;
    @!%p2 bra $L__BB0_2;
    bra.uni $L__BB0_1;
$L__BB0_2:
    mov.b64 {%r1, %r2}, %fd1;
    mov.b64 %fd1, {%r1, %r2};
    st.global.f64 [%rd1], %fd1;
    ret;
$L__BB0_3:
    st.global.f64 [%rd1], 0dBFF0000000000000;
    ret;
}]],
    c = [[double sum = 0; const void *at = &sum, *const arguments[1] = { &at };
      run(&(struct ptx_thread){ 0 }, arguments);
      puts(sum == 21 ? "right" : "not 21");]],
  },
  {
    forms = "atom.global.cas.b32 atom.global.and.b32 cvta.to.global.u64 cvta.shared.u64",
    text = [[
.visible .entry k(
    .param .u64 k_param_0
)
{
    .reg .b64 %rd<6>; .reg .b32 %r<6>;
    .shared .align 4 .b8 words[16];
    ld.param.u64 %rd1, [k_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    atom.global.cas.b32 %r1, [%rd2], 5, 6;
    atom.global.cas.b32 %r2, [%rd2], 5, 7;
    atom.global.and.b32 %r3, [%rd2+4], 12;
    st.global.u32 [%rd2+8], %r1;
    st.global.u32 [%rd2+12], %r2;
    st.global.u32 [%rd2+16], %r3;
    mov.u64 %rd3, words;
    cvta.shared.u64 %rd4, %rd3;
    st.u32 [%rd4+8], 77;
    ld.shared.u32 %r4, [words+8];
    st.global.u32 [%rd2+20], %r4;
    ret;
}]],
    c = [[uint32_t m[6] = { 5, 10 }, want[6] = { 6, 8, 5, 6, 10, 77 }, shared[4]; const void *at = m, *const arguments[1] = { &at };
      run(&(struct ptx_thread){ .shared = (char *)shared }, arguments);
      puts(memcmp(m, want, sizeof m) ? "other words" : "right");]],
  },
  {
    forms = "shfl.sync.bfly.b32 shfl.sync.idx.b32 shfl.sync.up.b32",
    text = [[
.visible .entry k(
    .param .u64 k_param_0,
    .param .u32 k_param_1,
    .param .u32 k_param_2
)
{
    .reg .b64 %rd<2>; .reg .b32 %r<6>; .reg .pred %p<4>;
    ld.param.u64 %rd1, [k_param_0];
    ld.param.u32 %r1, [k_param_1];
    ld.param.u32 %r2, [k_param_2];
    shfl.sync.bfly.b32 %r3|%p1, %r1, %r1, %r2, -1;
    shfl.sync.idx.b32 %r4|%p2, %r1, %r1, %r2, -1;
    shfl.sync.up.b32 %r5|%p3, %r1, %r1, %r2, -1;
    st.global.u32 [%rd1], %r3;
    st.global.u32 [%rd1+4], %r4;
    st.global.u32 [%rd1+8], %r5;
    selp.b32 %r3, 1, 0, %p1;
    selp.b32 %r4, 1, 0, %p2;
    selp.b32 %r5, 1, 0, %p3;
    st.global.u32 [%rd1+12], %r3;
    st.global.u32 [%rd1+16], %r4;
    st.global.u32 [%rd1+20], %r5;
    ret;
}]],
    -- The ISA's text: maxLane and minLane by c's segment mask and clamp. A lane without a source reads itself.
    c = [[for (uint32_t lane = 0; lane < 32; lane++) for (uint32_t b = 0; b < 32; b++) for (int s = 0; s < 6; s++) {
        uint32_t width = 32 >> s, mask = 32 - width, c[2] = { mask << 8 | 31, mask << 8 };
        for (int up = 0; up < 2; up++) {
          uint32_t got[6], j[3], valid[3], segment = c[up] >> 8 & 31, clamp = c[up] & 31;
          uint32_t most = (lane & segment) | (clamp & ~segment), least = lane & segment;
          j[0] = lane ^ b, valid[0] = j[0] <= most;
          j[1] = least | (b & ~segment), valid[1] = j[1] <= most;
          j[2] = lane - b, valid[2] = (int)j[2] >= (int)most;
          const void *at = got, *const arguments[3] = { &at, &b, &c[up] };
          run(&(struct ptx_thread){ .tid = lane, .machine = &mock }, arguments);
          for (int k = 0; k < 3; k++)
            if (got[3 + k] != valid[k] || got[k] != 1000 + (valid[k] ? j[k] : lane)) {
              printf("lane %u, b %u, c %x, form %d: %u, %u\n", lane, b, c[up], k, got[k], got[3 + k]);
              return;
            }
        }
      }
      puts("right");]],
  },
  {
    forms = [[bar.sync bar.warp.sync cp.async.cg.shared.global cp.async.commit_group cp.async.wait_group
      ldmatrix.sync.aligned.m8n8.x4.shared.b16 ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
      mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32]],
    text = [[
.visible .entry k(
    .param .u64 k_param_0
)
{
    .reg .b64 %rd<2>; .reg .b32 %r<12>; .reg .f32 %f<5>;
    ld.param.u64 %rd1, [k_param_0];
    bar.sync     0;
    bar.warp.sync     -1;
    mov.u32 %r1, 64;
    mov.u32 %r2, 8;
    cp.async.cg.shared.global [%r1+32], [%rd1+16], 16, %r2;
    cp.async.commit_group;
    cp.async.wait_group 3;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r1];
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r7, %r8, %r9, %r10}, [%r1+16];
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, 0f40000000;
    mov.f32 %f3, 0f40400000;
    mov.f32 %f4, 0f40800000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4},
      {%r3,%r4,%r5,%r6}, {%r7,%r8}, {%f1,%f2,%f3,%f4};
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f4,%f3,%f2,%f1},
      {%r6,%r5,%r4,%r3}, {%r10,%r9}, {%f1,%f2,%f3,%f4};
    st.global.f32 [%rd1], %f1;
    ret;
}]],
    c = [[char m[64], shared[256]; const void *at = m, *const arguments[1] = { &at };
      log_at = text; base = shared; global = m;
      run(&(struct ptx_thread){ .shared = shared, .machine = &mock }, arguments);
      float f; memcpy(&f, m, 4);
      snprintf(log_at, 64, " %g", f);
      const char *want = " barrier warp copy:96,16,16,8 commit wait:3 load:4,0,64 load:4,1,80"
        " mma:1,1,2,3,4,400,401,402,403,500,501 mma:0,101,102,103,104,403,402,401,400,503,502 204";
      if (strcmp(text, want)) printf("%s, expected %s\n", text, want); else puts("right");]],
  },
}

-- Records what a program asks for.
local MOCK = [[
#include "runtime.h"
#include <stdio.h>
static char text[1024], *log_at = text, *base, *global;
#define NOTE(...) log_at += sprintf(log_at, " " __VA_ARGS__)
static void barrier(int line) { NOTE("barrier"); }
static void warp_barrier(uint32_t mask, int line) { NOTE("warp"); }
static uint32_t from_lane(uint32_t mask, uint32_t value, int from, int line) { return 1000 + from; }
static void copy(void *to, const void *from, int bytes, int read, int line)
{
    NOTE("copy:%d,%d,%d,%d", (int)((char *)to - base), (int)((char *)from - global), bytes, read);
}
static void commit(void) { NOTE("commit"); }
static void wait(int left) { NOTE("wait:%d", left); }
static void load_matrices(int n, int transposed, uint32_t *r, const void *row, int line)
{
    NOTE("load:%d,%d,%d", n, transposed, (int)((char *)row - base));
    for (int k = 0; k < n; k++) r[k] = 400 + 100 * transposed + k;
}
static void mma(int bf16, float *d, const uint32_t *a, const uint32_t *b, int line)
{
    NOTE("mma:%d,%g,%g,%g,%g,%u,%u,%u,%u,%u,%u", bf16, d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1]);
    for (int k = 0; k < 4; k++) d[k] += 100;
}
static const struct ptx_machine mock = { barrier, warp_barrier, from_lane, mma, load_matrices, copy, commit, wait };
]]
function M.covers(form)
  if accesses(form) then return true end
  for _, p in ipairs(PROGRAMS) do
    if (" " .. p.forms .. " "):gsub("%s+", " "):find(" " .. form .. " ", 1, true) then return true end
  end
  return false
end

--- The results of the loads and stores among these forms: C to run.
function M.accesses(forms, function_of)
  local parts, calls = { ACCESS }, {}
  for n, form in ipairs(forms) do
    local text, space, t, count, loads = program(form)
    parts[#parts + 1] = function_of(text, "access_" .. n)
    calls[n] = ("%s(\"%s\", access_%d, '%s', %d, %d, %d, %d);"):format(loads and "load" or "store", form, n, space:sub(1, 1),
      WIDTH[t], count, t:find "^s" and 1 or 0, t:find "^f" and 1 or 0)
  end
  parts[#parts + 1] = "int main(void)\n{\n" .. table.concat(calls, "\n") .. "\n}"
  return parts
end
M.accessing = accesses

--- The results of the programs: C to run.
function M.programs(function_of)
  local parts, calls = { MOCK }, {}
  for n, p in ipairs(PROGRAMS) do
    parts[#parts + 1] = function_of("\n" .. p.text .. "\n", "run_" .. n)
    parts[#parts + 1] = ("#define run run_%d\nstatic void program_%d(void)\n{\n%s\n}\n#undef run"):format(n, n, p.c)
    calls[n] = ('printf("%d: "); program_%d();'):format(n, n)
  end
  parts[#parts + 1] = "int main(void)\n{\n" .. table.concat(calls, "\n") .. "\n}"
  return parts, #PROGRAMS
end

return M
