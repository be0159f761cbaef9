-- SPDX-License-Identifier: MIT
--- The modes of the emulated GPU (MOONSHARD_EMULATOR): each finds a fault that passes unseen without it.
local process = require "spec.support.process"

local build = os.getenv "MOONSHARD_BUILD" or "build"
if build:sub(1, 1) ~= "/" then build = process.root .. "/" .. build end
local planted = build .. "/libmoonshard_cuda_planted.so"

local folder
setup(function() folder = process.temp_folder() end)
teardown(function() process.remove_folder(folder) end)

--- Runs a script with these modes of the emulated GPU.
local function run(source, modes, ...)
  process.write(folder .. "/script.lua", source)
  local env = process.crash_env { MOONSHARD_CUDA = "emulated", MOONSHARD_EMULATOR = modes }
  local child = process.start({ "sh", "-c", 'cd "$0" && exec luajit "$@"', process.root, folder .. "/script.lua", ... },
    { stdout = folder .. "/out", stderr = folder .. "/err", env = env })
  local code = child:wait(60)
  return { code = code, stdout = process.read(folder .. "/out"), stderr = process.read(folder .. "/err") }
end

--- Runs a program of spec/support/cuda/planted.cpp: "right", "wrong" (its result), or the emulator's message.
local function result(program, modes)
  local job = run([[
    local ffi = require "ffi"
    ffi.cdef "int planted(const char *name);"
    print(ffi.load(arg[1]).planted(arg[2]))]], modes, planted, program)
  local printed = job.stdout:match "^(%d)\n$"
  assert.are_not.equal("2", printed, program)
  if printed then return printed == "0" and "right" or "wrong" end
  return job.stderr:match "emulated GPU: [^\n]*" or ("status %s, %s"):format(job.code, job.stderr)
end

local function it_built(name, fn)
  it(name, function()
    if not require("lfs").attributes(planted) then return pending "this build has no emulated GPU" end
    fn()
  end)
end

local all = ",late,chunks,warps,shared,align"

describe("the emulated GPU, in its mode", function()
  for _, fault in ipairs {
    { "seed", "threads", "finds a thread that relies on the one before it" },
    { "seed", "blocks", "finds a block that relies on the one before it" },
    { "seed", "barrier", "finds a missing barrier" },
    { "seed", "streams", "finds a stream that does not wait for another" },
    { "late", "pinned", "finds a pinned source that is written before its copy" },
    { "warps", "without_reader", "finds a lane outside its mask",
      "without_me, block 0, thread 31: __shfl_xor_sync: lane 31 is outside its mask 7fffffff" },
    { "warps", "source_outside_mask", "finds a lane that reads one outside its mask",
      "half_warp, block 0, thread 8: __shfl_down_sync: lane 8 reads lane 16, outside its mask 0000ffff" },
    { "warps", "width", "finds a width that is no power of two",
      "sum_of_warp, block 0, thread 0: __shfl_xor_sync: width 12, expected a power of two up to 32" },
    { "warps", "lane_stays_away", "finds a lane that a mask names and that does not come",
      "two_halves, block 0, thread 0: waits with mask ffffffff for lane 16, which does not take part: it would hang" },
    { "shared", "old_shared", "finds a block that reads another block's shared memory" },
    { "shared", "static_50k", "finds static shared memory above 48 KiB", "takes_shared, block 0, thread %d+: " ..
      "%d+ bytes of static shared memory, the limit is 49152" },
    { "align", "float4", "finds a float4 at a multiple of 4", "reads_vector, block 0, thread 0: 16 bytes at address " ..
      "0x%x+4, which is not a multiple of 16" },
    { "align", "uint4", "finds a uint4 at a multiple of 8", "16 bytes at address 0x%x+8," },
    { "align", "int2", "finds an int2 at a multiple of 4", "8 bytes at address 0x%x+4," },
    { "align", "ushort4", "finds a ushort4 at a multiple of 2", "8 bytes at address 0x%x+2," },
  } do
    local mode, program, name, text = unpack(fault)
    it_built(("%s %s"):format(mode, name), function()
      assert.are.equal("right", result(program, ""))
      for seed = 1, mode == "seed" and 3 or 1 do
        local found = result(program, mode == "seed" and "seed:" .. seed or mode)
        if text then assert.matches(text, found) else assert.are.equal("wrong", found) end
      end
    end)
  end

  it_built("finds nothing in a program without a fault", function()
    for _, program in ipairs { "pinned_in_time", "pageable", "shuffle", "static_48k", "dynamic_limits", "aligned",
      "mma", "ldmatrix", "cp_async", "cp_async_groups" } do
      for _, modes in ipairs { "", "seed:1" .. all, "seed:2" .. all } do
        assert.are.equal("right", result(program, modes), program .. " in " .. modes)
      end
    end
  end)

  it_built("always finds a copy to shared memory that is read before its wait", function()
    for _, modes in ipairs { "", "seed:1" .. all } do
      assert.are.equal("wrong", result("cp_async_without_wait", modes))
    end
  end)

  it_built("chunks cuts small blocks from one allocation, as on a GPU", function()
    local source = [[
      local ms = require "moonshard"
      local a = ms.ones(4, { device = "cuda" })
      local b = ms.ones(4, { device = "cuda" })
      local ffi = require "ffi"
      local function at(t) return tonumber(ffi.cast("intptr_t", t:data_ptr())) end
      print(at(b) - at(a), (a + b):sum():item())]]
    local apart = tonumber(run(source, "").stdout:match "^(%d+)\t8\n$")
    assert.is_true(apart >= 4096, apart)
    assert.are.equal("256\t8\n", run(source, "chunks").stdout)
  end)

  -- Error 2 (out of memory) fails one call; an error from 700 on stays, as after a fault of a kernel.
  for _, call in ipairs { "cudaSetDevice", "cudaStreamCreateWithFlags", "cudaHostAlloc", "cudaHostGetDevicePointer",
    "cudaMalloc", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize" } do
    it_built("fail makes " .. call .. " fail, with an error in Lua, and the next call is right or refused", function()
      local source = [[
        local ms = require "moonshard"
        for _ = 1, 3 do
          print(pcall(function() return (ms.ones(1000, { device = "cuda" }) + 1):sum():item() end))
        end]]
      local once = run(source, ("fail:%s:1:1"):format(call))
      assert.are.equal(0, once.code, once.stderr)
      assert.matches("^false\t[^\n]*cuda:0: [^\n]+ %(CUDA error 1%)\ntrue\t2000\ntrue\t2000\n$", once.stdout)
      local kept = run(source, ("fail:%s:1:719"):format(call))
      assert.are.equal(0, kept.code, kept.stderr)
      assert.matches("^" .. ("false\t[^\n]*cuda:0: [^\n]+ %(CUDA error 719%)[^\n]*\n"):rep(3) .. "$", kept.stdout)
    end)
  end

  it_built("refuses a word that it does not know, by name", function()
    for _, modes in ipairs { "sed:7", "seed:", "seed:x", "late,,align", "fail:cudaMaloc:1:2", "fail:cudaMalloc:0:2",
      "fail:cudaMalloc:1", "Late" } do
      local job = run("require('moonshard').ones(1, { device = 'cuda' })", modes)
      assert.are.equal(2, job.code, modes)
      assert.is_truthy(job.stderr:find(("MOONSHARD_EMULATOR is '%s': '"):format(modes), 1, true), job.stderr)
    end
  end)
end)
