-- SPDX-License-Identifier: MIT
--- The static table of the CUDA kernels (scripts/bench/gpu_kernels): what it reads from PTX, and the limits of kernels.
local lfs = require "lfs"
local process = require "spec.support.process"

local support = process.root .. "/scripts/bench/support/?.lua;"
local function load(name)
  local path = package.path
  package.path = support .. path
  local module = require(name)
  package.path = path
  return module
end
local kernels, ptx, known, predict = load "kernel_table", load "ptx", load "kernel_exceptions", load "predict"

local build = process.build

--- One kernel with this body, analysed.
local function analyse(body)
  return ptx.analyse((ptx.kernels((".visible .entry k(\n\t.param .u64 k_param_0\n)\n{\n%s\n}\n"):format(body))).k)
end

describe("the PTX of a kernel", function()
  for _, case in ipairs {
    { "one load", "ld.global.f32 %f1, [%rd1];", float32 = { 4, 4 } },
    { "two independent loads", "ld.global.f32 %f1, [%rd1];\nld.global.f32 %f2, [%rd2];\nadd.f32 %f3, %f1, %f2;",
      float32 = { 4, 8 } },
    { "a load that waits for another's result",
      "ld.global.f32 %f1, [%rd1];\nld.global.u64 %rd2, [%rd1+8];\nld.global.f32 %f2, [%rd2];", float32 = { 4, 4 } },
    { "a load after a use of the first, which ptxas moves upwards",
      "ld.global.f32 %f1, [%rd1];\nadd.f32 %f2, %f1, %f1;\nld.global.f32 %f3, [%rd2];", float32 = { 4, 8 } },
    { "a load that cannot pass a store",
      "ld.global.f32 %f1, [%rd1];\nst.global.f32 [%rd3], %f1;\nld.global.f32 %f3, [%rd2];", float32 = { 4, 4 } },
    { "a read-only load, which can pass a store", "ld.global.nc.f32 %f1, [%rd1];\nst.global.f32 [%rd3], %f1;\nld.global.nc.f32 %f3, [%rd2];",
      float32 = { 4, 8 } },
    { "loads of two blocks, the first unused in between",
      "ld.global.f32 %f1, [%rd1];\n@%p1 bra $L__BB0_2;\nld.global.f32 %f2, [%rd2];\n$L__BB0_2:\nadd.f32 %f3, %f1, %f2;",
      float32 = { 4, 8 } },
    { "loads of two blocks, the first used in between",
      "ld.global.f32 %f1, [%rd1];\nsetp.gt.f32 %p1, %f1, 0f0;\n@%p1 bra $L__BB0_2;\nld.global.f32 %f2, [%rd2];\n"
      .. "$L__BB0_2:\nret;", float32 = { 4, 4 } },
    { "a loop beside wider loads outside", "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\n$L__BB0_1:\n"
      .. "ld.global.f32 %f5, [%rd2];\nadd.f32 %f6, %f6, %f5;\n@%p1 bra $L__BB0_1;\nret;", float32 = { 4, 4 } },
    { "a loop, without the sum that is stored after it", "$L__BB0_1:\nld.global.u16 %rs1, [%rd2];\n"
      .. "cvt.f32.bf16 %f5, %rs1;\n@%p1 bra $L__BB0_1;\nst.global.f32 [%rd3], %f5;\nret;", half = { 2, 2 } },
    { "a loop that loads for its next round", "$L__BB0_1:\nadd.f32 %f6, %f6, %f5;\nld.global.f32 %f5, [%rd2];\n"
      .. "ld.global.f32 %f7, [%rd3];\nadd.s32 %r1, %r1, 1;\n@%p1 bra $L__BB0_1;\nret;", float32 = { 4, 8 } },
    { "loads through a vector of words that become floats",
      "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];\nmov.b32 %f1, %r1;", float32 = { 16, 16 } },
    { "loads through a vector of words that become halves",
      "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];\nmov.b32 {%rs1, %rs2}, %r1;", half = { 16, 16 } },
    { "loads that are wider than the stores",
      "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\nst.global.f32 [%rd2], %f1;", float32 = { 4, 16 } },
    { "scalars of halves and shared memory",
      "ld.global.u16 %rs1, [%rd1];\nld.shared.f32 %f1, [%r1];\nst.local.f32 [%rd2], %f1;", half = { 2, 2 } },
    { "asynchronous copies, of which one group may stay in flight", "cp.async.cg.shared.global [%r1], [%rd1], 16;\n"
      .. "cp.async.commit_group;\ncp.async.cg.shared.global [%r2], [%rd2], 16;\ncp.async.commit_group;\n"
      .. "cp.async.wait_group 1;\ncp.async.cg.shared.global [%r3], [%rd3], 16;\n"
      .. "st.global.v4.f32 [%rd4], {%f1, %f2, %f3, %f4};", float32 = { 16, 32 } },
  } do
    it("shows the width and the bytes in flight of " .. case[1], function()
      local classes = analyse(case[2]).classes
      for _, class in ipairs { "half", "float32" } do
        local c = classes[class]
        assert.same(case[class], c and { c.width, c.flight }, class)
      end
    end)
  end

  it("shows its matrix instructions, and its threads if it declares them", function()
    assert.equal(2, analyse(("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};\n"):rep(2)).mma)
    local text = ".visible .entry k(\n\t.param .u64 p\n)\n.maxntid 128, 1, 1\n{\nret;\n}\n"
    assert.equal(128, ptx.analyse(ptx.kernels(text).k).threads)
  end)
end)

describe("the kernels' sources", function()
  --- The lines on which the branch of an `if constexpr`, or of an if in it, is a loop or a switch without braces. Where
  --- the condition is false, nvcc 13.0 drops not only the branch, but also a loop with `#pragma unroll` after it.
  local function unbraced(text)
    local lines = {}
    for at, rest in text:gmatch "()if constexpr (%b()[^{;]*)" do
      local branch = rest:gsub("^%b()%s*", ""):gsub("^if %b()%s*", "")
      if branch:match "^for " or branch:match "^while " or branch:match "^switch " then
        lines[#lines + 1] = select(2, text:sub(1, at):gsub("\n", "")) + 1
      end
    end
    return lines
  end

  it("have braces around loops and switches after `if constexpr`", function()
    assert.same({ 1, 3 }, unbraced "if constexpr (A)\n  for (;;) f();\nif constexpr (f(A)) if (n == 8) switch (k) {}\n")
    assert.same({}, unbraced "if constexpr (A) {\n  for (;;) f();\n}\nif constexpr (A) f(); for (;;) g();")
    local files = 0
    for name in io.popen("cd '" .. process.root .. "' && find kernels/cuda kernels/formulas -type f"):lines() do
      files = files + 1
      assert.same({}, unbraced(process.read(process.root .. "/" .. name)), name)
    end
    assert.is_true(files > 40, files)
  end)
end)

describe("the static table", function()
  for _, case in ipairs {
    { 256, 32, 0, 8 }, { 256, 33, 0, 6 }, { 256, 84, 1024, 2 }, { 256, 255, 0, 1 }, { 1024, 64, 0, 1 },
    { 1, 16, 0, 32 }, { 128, 40, 48 * 1024, 4 }, { 256, 16, 100 * 1024, 2 },
  } do
    it(("counts %d threads of %d registers and %d bytes of shared memory: %d blocks"):format(unpack(case)), function()
      assert.equal(case[4], kernels.blocks_per_sm(case[1], case[2], case[3]))
    end)
  end

  local function row(change)
    local r = { name = "rows: softmax_rows_kernel<float>", registers = 32, stack = 0, spills = 0, threads = 256, blocks = 8,
      classes = { float32 = { width = 16, flight = 16 }, half = { width = 16, flight = 16 } } }
    for k, v in pairs(change) do r[k] = v end
    return r
  end
  it("names each limit that a kernel fails", function()
    assert.same({}, kernels.failures(row {}))
    assert.same({ "spills" }, kernels.failures(row { spills = 8 }))
    assert.same({}, kernels.failures(row { stack = 16 }))
    assert.same({ "stack" }, kernels.failures(row { name = "norm: norm_kernel<float>", stack = 16 }))
    assert.same({ "width half" }, kernels.failures(row { classes = { half = { width = 8, flight = 16 } } }))
    assert.same({ "flight float32" }, kernels.failures(row { classes = { float32 = { width = 16, flight = 8 } } }))
    assert.same({}, kernels.failures(row { exact = true, classes = { float32 = { width = 4, flight = 4 } } }))
  end)
  it("separates new failures from exceptions that no longer fail", function()
    local new, gone = kernels.against({ row { spills = 8 } }, { ["rows: softmax_rows_kernel"] = "stack" })
    assert.same({ "rows: softmax_rows_kernel: spills" }, new)
    assert.same({ "rows: softmax_rows_kernel: stack" }, gone)
  end)

  it("holds all kernels to their limits, except the known exceptions", function()
    if process.tool then return pending "is not run under sanitizers or valgrind" end
    local rows, why = kernels.rows(process.root .. "/", build)
    if not rows then return pending("not measured: " .. why) end
    local new, gone = kernels.against(rows, known)
    assert.same({}, new, "these kernels fail a limit; mend them")
    assert.same({}, gone, "these limits are met now; remove them from kernel_exceptions.lua")
    assert.is_true(#rows > 100, #rows)
  end)

  it("finds no empty kernel", function()
    if process.tool then return pending "is not run under sanitizers or valgrind" end
    local rows, why = kernels.rows(process.root .. "/", build)
    if not rows then return pending("not measured: " .. why) end
    local function stores(body) return body:find "%f[%w]st%." or body:find "%f[%w]atom%." or body:find "%f[%w]red%." end
    assert.is_nil(stores(ptx.kernels(".visible .entry k(\n\t.param .u64 p\n)\n{\nret;\n}\n").k))
    local count = 0
    for name in lfs.dir(build .. "/sm_90") do
      for kernel, body in pairs(name:match "%.ptx$" and ptx.kernels(process.read(build .. "/sm_90/" .. name)) or {}) do
        count = count + 1
        assert.is_truthy(stores(body), name .. ": " .. kernel)
      end
    end
    assert.is_true(count > 100, count)
  end)

  it("shows matrix instructions in every kernel of attention", function()
    if process.tool then return pending "is not run under sanitizers or valgrind" end
    local rows, why = kernels.rows(process.root .. "/", build)
    if not rows then return pending("not measured: " .. why) end
    local found = {}
    for _, r in ipairs(rows) do
      local name = r.name:match "^flash[%w_]*: (flash_[%w_]*kernel)"
      if name then
        assert.is_true(r.mma > 0, r.name)
        found[name] = (found[name] or 0) + 1
      end
    end
    for _, name in ipairs { "flash_kernel", "flash_queries_kernel", "flash_keys_kernel" } do
      assert.is_true((found[name] or 0) >= 4, name)            -- two types, heads of up to 64 and 128
    end
  end)
end)

describe("the prediction of a launch", function()
  --- Seconds of a launch of 256 threads a block, without the first wait for memory (0.6 us).
  local function seconds(launch, row)
    local l = { kernel = "k", op = "", blocks = 10000, threads = 256, shared = 0, half = 0, float32 = 0, other = 0,
      flops = 0 }
    for k, v in pairs(launch) do l[k] = v end
    return (predict.seconds(l, row)) - 0.6e-6
  end
  local function row(name, flight, mma)
    return { name = name, registers = 32, shared = 0, mma = mma or 0, classes = { half = { width = 2, flight = flight },
      float32 = { width = 4, flight = 16 } } }
  end
  for _, case in ipairs {
    { "the whole bandwidth for enough bytes in flight", { half = 4.3e9 }, row("a: b", 16), 1e-3 },
    { "half of the bandwidth for half of these bytes", { half = 4.3e9 }, row("a: b", 10e3 / 2048), 2e-3 },
    { "less bandwidth for a grid that leaves processors idle", { half = 4.3e9, blocks = 66 }, row("a: b", 20e3 / 256), 2e-3 },
    { "less bandwidth for blocks that fill the shared memory", { half = 4.3e9, shared = 200 * 1024 }, row("a: b", 5e3 / 256), 4e-3 },
    { "the bytes in flight of the dtype class of which it touches most", { half = 1e6, float32 = 4.299e9 }, row("a: b", 1), 1e-3 },
    { "the rate of the unit for products", { half = 1e6, flops = 780e9 }, nil, 1e-3 },
    { "the rate of mma.sync for kernels that use it", { half = 1e6, flops = 250e9 }, row("a: b", 16, 1), 1e-3 },
    { "the bandwidth for products that move more than they compute", { half = 4.3e9, flops = 1e9 }, nil, 1e-3 },
  } do
    it("takes " .. case[1], function() assert.near(case[4], seconds(case[2], case[3]), 1e-6) end)
  end
end)
