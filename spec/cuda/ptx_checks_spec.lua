-- SPDX-License-Identifier: MIT
--- The checks of translated kernels (MOONSHARD_CUDA=ptx, MOONSHARD_EMULATOR=check,compare): each finds a fault that is
--- planted into a kernel's PTX, and nothing in the kernel as it is.
local process = require "spec.support.process"
local planted = require "spec.support.cuda.ptx.planted"

-- Scripts whose kernels are changed: small ones, which gcc compiles in a second.
local COPY = "print(ms.arange(6000):to 'float32':reshape(60, 100):to 'cuda':t():contiguous():to 'cpu':sum():item())"
local SUM = "print(ms.ones({ 3, 5000 }):to 'cuda':sum(2):to 'cpu')"
local HALVES = COPY:gsub("float32", "bfloat16")
local NEGATIVE = "print((ms.arange(6000) - 7000):to 'int64':reshape(60, 100):to 'cuda':t():contiguous():to 'cpu':sum():item())"
local PRODUCT = "local x = ms.ones({ 20, 20 }, { dtype = 'int64', device = 'cuda' }) print(x:matmul(x):to 'cpu')"
local DOTS = "local x = ms.ones({ 20, 20 }):to 'cuda' print(x:matmul(x):to 'cpu')"
local FLASH = [[
  ms.manual_seed(1)
  local x = {}
  for k = 1, 3 do x[k] = ms.randn { 1, 1, 200, 64 }:to 'bfloat16':to 'cuda':requires_grad_(true) end
  local out = ms.nn.F.scaled_dot_product_attention(x[1], x[2], x[3])
  out:backward(out:detach())
  print(x[1].grad:to 'cpu':sum():item())]]
-- The first allocation's handle is asked for, so other processes may write it.
local EMPTY = "local _ = ms.ones(1):to 'cuda' print(ms.empty({ 60, 100 }, { device = 'cuda' }):t():contiguous():to 'cpu':sum():item())"

-- What a library writes is not known; here a stand-in of cuBLASLt.
local USED = [[
  local a, b = ms.ones({ 32, 32 }):to 'cuda', ms.empty({ 60, 100 }, { device = 'cuda' })
  b = nil
  collectgarbage()
  collectgarbage()
  print(a:matmul(a):to 'cpu':sum():item())
]]

local function run(source, folder, log)
  local env = process.crash_env {}
  env.MOONSHARD_CUDA, env.MOONSHARD_EMULATOR = "ptx", "check,compare"
  env.MOONSHARD_PTX_FOLDER, env.MOONSHARD_PTX_LAUNCHED = folder, log
  if source:find(USED, 1, true) then env.MOONSHARD_CUBLAS, env.LD_LIBRARY_PATH = "on", process.build .. "/standin" end
  return process.script("local ms = require 'moonshard'\n" .. source, env)
end

local launched = {}
--- The kernels that a script launches.
local function kernels_of(source)
  if launched[source] then return launched[source] end
  local log = os.tmpname()
  local job = run(source, nil, log)
  assert.are.equal(0, job.code, job.stderr)
  local list = {}
  local all = planted.kernels()
  for line in io.lines(log) do
    for _, k in ipairs(all) do
      if line == k.symbol .. " " .. k.module then list[#list + 1] = k end
    end
  end
  os.remove(log)
  launched[source] = list
  return list
end

--- The message of a script, one of whose kernels is changed: that whose symbol has the pattern, and whose body
--- `change` changes; change returns nil if it finds nothing to change.
local function message(source, pattern, change, rest)
  for _, k in ipairs(kernels_of(source)) do
    local _, body = planted.ptx_of(k)
    local changed = k.symbol:find(pattern) and (rest and body or change(body))
    if changed then
      local folder = os.tmpname()
      os.remove(folder)
      planted.plant(folder, k, not rest and changed or nil, rest and rest(k.rest))
      local job = run(source, folder)
      os.execute(("rm -r '%s'"):format(folder))
      return job.stderr:match "emulated GPU: [^\n]*" or ("status %s: %s%s"):format(job.code, job.stdout, job.stderr)
    end
  end
  error "no kernel can be changed so"
end

--- Replaces the n-th match of a pattern; nil if there is none.
local function replace(pattern, by, n)
  return function(body)
    local count = 0
    local changed = body:gsub(pattern, function(...)
      count = count + 1
      if count ~= (n or 1) then return end
      local whole = { ... }
      return type(by) == "function" and by(...) or (by:gsub("%%(%d)", function(k) return whole[tonumber(k)] end))
    end)
    return count >= (n or 1) and changed or nil
  end
end
-- Predicates an instruction, so that threads up to 5 skip it.
local function skip(instruction)
  return ("{ .reg .pred %%pq; .reg .b32 %%rq; mov.u32 %%rq, %%tid.x; setp.gt.s32 %%pq, %%rq, 5; @%%pq %s }"):format(instruction)
end
local STORE = "(st%.global%.%w+[%w.]*%s+%[%%rd%d+)(%+?%d*%])"

describe("the checks of translated kernels find #cuda", function()
  local cases = {
    { "a store beyond an allocation", COPY, "", replace(STORE, "%1+1048576]"), "bytes at 0x%x+, .*allocation" },
    { "a store behind a tensor in its block", SUM, "join_kernel", replace("(st%.global%.f32%s+%[%%rd%d+)%]", "%1+64]"),
      "but behind the tensor that lies there" },
    { "blocks that write one half of a word", HALVES, "", replace("(mov%.u32%s+%%r%d+), %%ctaid%.x;", "%1, 0;"),
      "writes .*, which block %d+ accesses in line %d+" },
    { "a store at an odd address", COPY, "", replace(STORE, "%1+1]"), "not a multiple of" },
    { "a store beyond a thread's own memory", PRODUCT, "product", replace("(st%.local[%w.]*%s+%[%%rd%d+)", "%1+40000"),
      "bytes at .*local" },
    { "a copy from an address that 16 does not divide", FLASH, "flash",
      replace("(cp%.async%.c[ag][%w.]*%s+%[%%r%d+%], %[%%rd%d+)", "%1+8"), "not a multiple of 16" },
    { "a matrix at an address that 16 does not divide", FLASH, "flash", replace("(ldmatrix[^;]*%[%%r%d+)", "%1+8"),
      "not a multiple of 16" },
    { "copies that no group ends", FLASH, "flash", replace("cp%.async%.commit_group;", ""), "copies without having waited" },
    { "a barrier of a warp that is missing", FLASH, "flash", replace("bar%.warp%.sync[^;]*;", ""),
      "of shared memory, which thread %d+ accesses in line %d+, with no barrier between" },
    { "a store beyond shared memory", SUM, "", replace("(st%.shared[%w.]*%s+%[%%r%d+)%]", "%1+400000]"),
      "bytes at %d+ of shared memory, which has %d+" },
    { "a store to shared memory by an instruction for global memory", SUM, "",
      replace("st%.shared(%.%w+)%s+%[(%%r%d+)%]([^;]*;)",
        "{ .reg .b64 %%gq; cvt.u64.u32 %%gq, %2; cvta.shared.u64 %%gq, %%gq; st.global%1 [%%gq]%3 }"),
      "an instruction for global memory accesses byte %d+ of shared memory" },
    { "threads that write one word", COPY, "", replace("(mov%.u32%s+%%r%d+), %%tid%.x;", "%1, 0;"),
      "writes .*, which thread %d+ accesses in line %d+" },
    { "blocks that write one word", COPY, "", replace("(mov%.u32%s+%%r%d+), %%ctaid%.x;", "%1, 0;"),
      "writes global memory at 0x%x+, which block %d+ accesses in line %d+" },
    { "a missing wait for a copy", FLASH, "", replace("cp%.async%.wait_group%s+%d;", ""), "copies without having waited" },
    { "shared memory that is not written", SUM, "", replace("st%.shared[^;]*;", ""), "of shared memory, not written before" },
    { "a barrier that some threads skip", SUM, "", replace("ld%.param", function() return skip "bar.sync 0;" .. " ld.param" end),
      "a GPU would hang" },
    { "a shuffle that some lanes skip", SUM, "", replace("(shfl%.sync[^;]*;)", skip), "lane %d does not take part" },
    { "a product that some lanes skip", FLASH, "flash", replace("(mma%.sync[^;]*;)", skip), "lane %d does not take part" },
    { "a store behind the variables of shared memory", SUM, "dense_rows", replace("(st%.shared[%w.]*%s+%[%%r%d+)", "%1+64"),
      "bytes at %d+ of shared memory, which has %d+" },
    { "a register that is not written", DOTS, "product", function(body)
      return (body:gsub("mov%.f32%s+%%f%d+, 0f00000000;", ""))
    end, "leaves %x+ at byte" },
    { "an integer that is too large by 1", NEGATIVE, "",
      replace("(st%.global%.u64%s+)(%[[^%]]+%]), (%%rd%d+);", "add.s64 %3, %3, 1; %1%2, %3;"), "leaves %x+ at byte" },
    { "a result that is not that of g++'s kernel", COPY, "", replace("st%.global[^;]*;", ""),
      "leaves %x+ at byte %d+ of an allocation of %d+, g%+%+'s kernel %x+" },
    { "too many registers", SUM, "", nil, "threads of 260 registers, sm_80 has 65536", function(rest)
      return (rest:gsub("^(%S+ %d+) %d+ %d+ %d+", "%1 0 260 260"))
    end },
    { "too many threads", SUM, "", nil, "threads, the kernel is compiled for 16", function(rest)
      return (rest:gsub("^(%S+ %d+) %d+", "%1 16"))
    end },
    { "too much shared memory", SUM, "", nil, "60000 bytes of static shared memory", function(rest)
      return (rest:gsub("^(%S+) %d+", "%1 60000"))
    end },
  }

  for _, case in ipairs(cases) do
    local name, source, pattern, change, expected, rest = unpack(case, 1, 6)
    it(name, function()
      if not planted.built() then return pending "not built: needs nvcc" end
      assert.matches(expected, message(source, pattern, change, rest))
    end)
  end

  -- As nvcc 11.8 did to the loops of fill_kernel in the parent of 7fe41b40.
  it("a loop without its stores, by the first specs", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    local k
    for _, one in ipairs(kernels_of "print(ms.ones({ 40 }, { device = 'cuda' }):to 'cpu')") do
      if one.symbol:find "fill_kernel" then k = one end
    end
    local folder = os.tmpname()
    os.remove(folder)
    local _, body = planted.ptx_of(k)
    planted.plant(folder, k, (body:gsub("st%.global[^;]*;", "")))
    local said = process.output(("MOONSHARD_CUDA=ptx MOONSHARD_PTX_FOLDER='%s' busted spec/cuda/copies_spec.lua 2>&1"):format(folder))
    os.execute(("rm -r '%s'"):format(folder))
    assert.matches("[1-9]%d* failed%s*$", said)
  end)

  it("a kernel that has no translation: it never runs as g++ compiled it", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    assert.matches("kernel .- of .- has no translation with parameters of these bytes: %d+",
      message(COPY, "", nil, function() return false end))
    for _, k in ipairs(planted.kernels()) do assert.matches(" %x+$", k.rest) end
  end)

  it("global memory that is read before it is written, also in a block that was used before", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    for _, source in ipairs { EMPTY, USED .. EMPTY } do
      assert.matches("bytes of global memory at 0x%x+, not written since their allocation", run(source).stderr)
    end
  end)

  -- Fibers alone miss some of these: threads finish their copies before they meet. MOONSHARD_LONG: all barriers.
  it("each barrier that is missing in attention in tiles", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    local tried = 0
    for _, k in ipairs(kernels_of(FLASH)) do
      local _, body = planted.ptx_of(k)
      local _, barriers = body:gsub("bar%.sync", "")
      if k.symbol:find "flash" then
        for n = 1, os.getenv "MOONSHARD_LONG" and barriers or math.min(barriers, 1) do
          local found = message(FLASH, k.symbol, replace("bar%.sync[^;]*;", "", n))
          assert.matches("emulated GPU: attention.*, block %d+, thread %d+: line %d+: %a+ byte %d+ of shared memory, ", found)
          tried = tried + 1
        end
      end
    end
    assert.is_true(tried >= 2)
  end)
end)
