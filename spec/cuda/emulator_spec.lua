-- SPDX-License-Identifier: MIT
--- The modes of the emulated GPU (MOONSHARD_EMULATOR): each finds faults that pass unnoticed without it, or makes a
--- CUDA function fail.
local process = require "spec.support.process"
local it_built = require "spec.support.it_built"("libmoonshard_cuda_planted.so", "this build has no emulated GPU")

local build = process.build
local planted = build .. "/libmoonshard_cuda_planted.so"

--- Runs a script with these modes of the emulated GPU.
local function run(source, modes, words, env)
  env = process.crash_env(env)
  env.MOONSHARD_CUDA, env.MOONSHARD_EMULATOR = "emulated", modes
  return process.script(source, env, { args = words })
end

--- Runs a program of spec/support/cuda/planted.cpp: "right", "wrong" (its result), or the emulator's message.
local function result(program, modes)
  local job = run([[
    local ffi = require "ffi"
    ffi.cdef "int planted(const char *name);"
    print(ffi.load(arg[1]).planted(arg[2]))]], modes, { planted, program })
  local printed = job.stdout:match "^(%d)\n$"
  assert.are_not.equal("2", printed, program)
  if printed then return printed == "0" and "right" or "wrong" end
  return job.stderr:match "emulated GPU: [^\n]*" or ("status %s, %s"):format(job.code, job.stderr)
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
      "two_halves, block 0, thread 0: waits with mask ffffffff for lane 16, which does not take part: a GPU would hang" },
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
    for _, program in ipairs { "pinned_in_time", "pageable", "shuffle", "static_48k", "dynamic_limits", "launch_limits",
      "aligned", "mma", "ldmatrix", "cp_async", "cp_async_groups" } do
      for _, modes in ipairs { "", "seed:1" .. all, "seed:2" .. all } do
        assert.are.equal("right", result(program, modes), program .. " in " .. modes)
      end
    end
  end)

  it_built("tensor adds products as an A100 and an H100 do, and otherwise rounds their exact sum once", function()
    assert.are.equal("right", result("sums_exact", ""))
    assert.are.equal("right", result("sums_a100", "tensor:a100"))
    assert.are.equal("right", result("sums_h100", "tensor:h100,seed:1"))
    for _, modes in ipairs { "tensor:a100", "tensor:h100" } do assert.are.equal("right", result("mma", modes)) end
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

  it_built("late reads pinned memory late, and a copy to the device waits for that", function()
    local job = run([[
      local ms = require "moonshard"
      local F = require "moonshard.core.ffi"
      assert(ms.cuda.is_available())
      local plugin = require("spec.support.cuda_table").open()
      local p = F.ffi.new "void *[1]"
      assert(plugin.host_alloc(4000, p) == 0)
      local t = require("moonshard.tensor").wrap(F.lib.ms_from_pointer(p[0], F.ffi.C.MS_F32, 1,
        F.ffi.new("int64_t[1]", 1000)))
      t:fill_(1)
      local x = ms.empty(1000, { device = "cuda" })
      x:copy_(t)
      t:fill_(2)
      print(x:sum():item())
      plugin.host_free(p[0])]], "late")
    assert.are.equal("1000\n", job.stdout, job.stderr)
  end)

  -- Each of these CUDA functions fails once, in an expression whose value is otherwise 2000. Some functions are called
  -- only together with others, or only through the plugin's table.
  local SUM = "(ms.ones(1000, { device = 'cuda' }) + 1):sum():item()"
  local TO_OTHER = "ms.full({ 1000 }, 2, { device = 'cuda:0' }):to('cuda:1'):sum():item()"
  local ASYNC = "asynchronous()"
  for _, case in ipairs {
    { "cudaSetDevice", SUM }, { "cudaDeviceGetStreamPriorityRange", SUM }, { "cudaStreamCreateWithPriority", SUM },
    { "cudaHostAlloc", SUM }, { "cudaLaunchHostFunc", "paused()" },
    { "cudaHostGetDevicePointer", SUM }, { "cudaMalloc", SUM }, { "cudaLaunchKernel", SUM, 1, "launching" }, { "cudaMemcpyAsync", SUM },
    { "cudaStreamSynchronize", SUM }, { "cudaMemsetAsync", "(ms.zeros(1000, { device = 'cuda' }) + 2):sum():item()" },
    { "cudaPointerGetAttributes", "(ms.full({ 1000 }, 2):to 'cuda'):sum():item()" },
    { "cudaEventCreateWithFlags", TO_OTHER }, { "cudaEventRecord", TO_OTHER }, { "cudaStreamWaitEvent", TO_OTHER },
    { "cudaEventCreateWithFlags", ASYNC }, { "cudaEventRecord", ASYNC }, { "cudaStreamWaitEvent", ASYNC },
    { "cudaGetDeviceProperties", "#ms.cuda.device_name(0) > 5 and 2000", 2 },
    { "cudaMallocHost", "pinned()" }, { "cudaEventQuery", "event 'done'" },
    { "cudaEventSynchronize", "event 'wait'" }, { "cudaFuncSetAttribute", "attention()" },
  } do
    local call, expression, n, named = unpack(case, 1, 4)
    it_built(("fail makes %s fail in %s, with an error in Lua, and the next call is right or refused"):format(call,
      expression), function()
      local source = ([[
        local ms = require "moonshard"
        local F = require "moonshard.core.ffi"
        local ffi, lib = F.ffi, F.lib
        local tensor = require "moonshard.tensor"
        local function check(status)
          if tonumber(status) ~= 0 then error(ffi.string(lib.ms_error()), 0) end
        end
        local function plugin()
          check(lib.ms_cuda_synchronize(0))
          return require("spec.support.cuda_table").open()
        end
        local function asynchronous()                           -- luacheck: ignore
          local x = ms.zeros(1000, { device = "cuda" })
          check(lib.ms_copy_async(tensor.id_of(x), tensor.id_of(ms.full({ 1000 }, 2))))
          return x:sum():item()
        end
        local function pinned()                                 -- luacheck: ignore
          local p = ffi.new "void *[1]"
          check(plugin().host_alloc(64, p))
          plugin().host_free(p[0])
          return 2000
        end
        local function paused()                                 -- luacheck: ignore
          check(plugin().pause(0, 0, 0))
          return 2000
        end
        local function attention()                              -- luacheck: ignore
          local x = ms.full({ 1, 125, 8 }, 2, { dtype = "bfloat16", device = "cuda" })
          return ms.nn.F.scaled_dot_product_attention(x, x, x):to("float32"):sum():item()
        end
        local function event(name)                              -- luacheck: ignore
          local e, t = ffi.new "void *[1]", plugin()
          check(t.record(0, 0, e))
          local status = name == "wait" and t.wait(e[0]) or name == "done" and math.min(t.done(e[0]), 0)
          t.drop(e[0])
          check(status)
          return 2000
        end
        for _ = 1, 3 do
          print(pcall(function() return ms.scope(function() return %s end) end))
          collectgarbage()
          collectgarbage()
          print(ms.memory_stats("cuda:0").allocated + ms.memory_stats("cuda:1").allocated, ms.ones(2):sum():item())
        end]]):format(expression)
      local once = run(source, ("fail:%s:%d:1"):format(call, n or 1))
      assert.are.equal(0, once.code, once.stderr)
      assert.matches(("^false\t[^\n]*cuda:%%d: [^\n]*%s[^\n]* %%(CUDA error 1%%)\n0\t2\ntrue\t2000\n0\t2\ntrue\t2000\n0\t2\n$")
        :format(named or call), once.stdout)
      local kept = run(source, ("fail:%s:%d:719"):format(call, n or 1))
      assert.are.equal(0, kept.code, kept.stderr)
      assert.matches("^" .. ("false\t[^\n]*cuda:%d: [^\n]+ %(CUDA error 719%); this process cannot use its GPUs any "
        .. "more[^\n]*\n0\t2\n"):rep(3) .. "$", kept.stdout)
    end)
  end

  -- Functions whose caller cannot fail, or that are called to learn why there is no GPU.
  for _, case in ipairs {
    { "cudaFree", "a line on stderr", [[
        local x = ms.ones(1000, { device = "cuda" })
        x:release()
        ms.empty_cache()
        print(ms.full({ 1000 }, 2, { device = "cuda" }):sum():item())]], "^2000\n$",
      "moonshard: cuda:0: cudaFree of 0x%x+: invalid argument %(CUDA error 1%)\n" },
    { "cudaGraphExecDestroy", "a line on stderr", [[
        local step, y = ms.capture(function(x) return x * 3 - 1 end, { warmup = 0 }), nil
        for _ = 1, 3 do y = step(ms.full({ 1000 }, 1, { device = "cuda" })) end
        step:release()
        print(y:sum():item())]], "^2000\n$",
      "moonshard: cuda:0: cudaGraphExecDestroy of 0x%x+: invalid argument %(CUDA error 1%)\n" },
    { "cudaGetDeviceCount", "the reason why there is no GPU",
      "print(ms.cuda.is_available(), ms.cuda.why_unavailable(), ms.ones(2):sum():item())",
      "^false\tthere is no CUDA device: invalid argument\t2\n$" },
    { "cudaGetDeviceProperties", "a GPU whose age is unknown, which is tried", "print(" .. SUM .. ")", "^2000\n$" },
    { "cudaDriverGetVersion", "the driver's own reason", "print(ms.cuda.why_unavailable())",
      "^there is no CUDA device: [^\n]+\n$", nil, { MOONSHARD_CUDA_PRETEND = "old_driver" } },
  } do
    local call, what, source, out, err, env = unpack(case, 1, 6)
    it_built(("fail of %s gives %s"):format(call, what), function()
      local job = run("local ms = require 'moonshard'\n" .. source, ("fail:%s:1:1"):format(call), nil, env)
      assert.are.equal(0, job.code, job.stderr)
      assert.matches(out, job.stdout)
      if err then assert.matches(err, job.stderr) else assert.are.equal("", job.stderr) end
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
