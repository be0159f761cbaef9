-- SPDX-License-Identifier: MIT
--- cuDNN's flash attention (kernels/cuda/attention/cudnn.cu). cuDNN compiles the engine's graphs for an H200 on a
--- machine without a GPU: the library is real, the driver is a stand-in, the device is a file of properties. On the
--- emulated GPU a stand-in for cuDNN computes the graphs (spec/support/cuda/cudnn).
local lfs = require "lfs"
local process = require "spec.support.process"
local it_built = require "spec.support.it_built"("standin/libcudnn_standin.so.9",
  "this build has no emulated GPU: there is no g++")

local here = process.root .. "/spec/support/cuda/cudnn"

describe("cuDNN's flash attention", function()
  local folder, missing

  --- The output of `plans` for a kind, with 8 x 12 heads of 1024 x `size`. driver: folder of the driver (default: the
  --- stand-in's).
  local function plan(kind, size, causal, driver)
    return (process.shell(("LD_LIBRARY_PATH='%s:/usr/local/cuda/lib:/usr/local/cuda/lib64' '%s/plans' '%s/h200.json' %s 8 12 1024 %d %d")
      :format(driver or folder, folder, here, kind, size, causal and 1 or 0)))
  end

  setup(function()
    folder = process.temp_folder()
    missing = process.shell(("'%s/driver.sh' '%s'"):format(here, folder))
    if missing == "" then
      missing = process.shell(("g++ -std=c++20 -O1 -Wall -Wextra -Werror -I'%s/kernels' '%s/plans.cpp' -o '%s/plans' -ldl")
        :format(process.root, here, folder))
      assert.are.equal("", missing)
      if plan("forward", 64, true):find "libcudnn%.so%.9: cannot open" then missing = "cuDNN is not installed" end
    end
  end)
  teardown(function() process.remove_folder(folder) end)

  local function it_installed(name, fn)
    it(name, function()
      if missing ~= "" then return pending("not measured: " .. missing) end
      if process.tool then return pending "is not run under sanitizers or valgrind" end
      fn()
    end)
  end

  local scores = 2 * 8 * 12 * 1024 ^ 2
  for _, case in ipairs {
    { "forward", 64, true, 2 ^ 20 }, { "forward", 64, false, 2 ^ 20 }, { "forward", 128, true, 2 ^ 20 },
    -- The backward, which gives the same bits each time, has a workspace for the scores in half precision.
    { "backward", 64, true, scores + 2 ^ 20, scores }, { "backward", 64, false, scores + 2 ^ 20, scores },
    { "backward", 128, true, scores + 2 ^ 20, scores },
  } do
    local kind, size, causal, most, least = unpack(case, 1, 5)
    local name = ("%s, heads of %d%s"):format(kind, size, causal and ", causal" or "")
    it_installed("has a plan for an H200: " .. name, function()
      local text = plan(kind, size, causal)
      local bytes = tonumber(text:match "^plan (%d+)\n$")
      assert.is_truthy(bytes, text)
      assert.is_true(bytes <= most and bytes >= (least or 0), text)
    end)
  end

  it_installed("is refused for heads that are not a multiple of 8, and without a driver", function()
    assert.matches("^refused none of 0 engines is deterministic and has a plan", plan("forward", 65, true))
    if not process.shell "ldconfig -p":find("libcuda.so.1", 1, true) then
      assert.matches("^refused", plan("forward", 64, true, "/"))
    end
  end)
end)

local build = process.build
local library = build .. "/standin/libcudnn_standin.so.9"

describe("attention by the stand-in for cuDNN", function()
  --- What a script prints on the emulated GPU, with `attend`, the stand-in's counts and `plant`.
  local function script(source, env)
    if not lfs.attributes(library) then return nil end
    local given = { MOONSHARD_CUDA = process.gpu, MOONSHARD_CUDNN = "on", LD_LIBRARY_PATH = build .. "/standin" }
    for name, value in pairs(env or {}) do given[name] = value end
    local job = process.script(([[
      local ms, ffi = require "moonshard", require "ffi"
      ffi.cdef "struct cudnn_counts { double plans, runs; } *cudnn_standin_counts(); int *cudnn_standin_planted();"
      local standin = ffi.load "%s"
      local counts = standin.cudnn_standin_counts()
      local function plant(status) standin.cudnn_standin_planted()[0] = status end      -- luacheck: ignore
      --- The largest relative error against float64 on the CPU, of the output and the gradients of q, k and v.
      local function attend(B, H, T, S, D, options, dtype)                              -- luacheck: ignore
        ms.manual_seed(5)
        local host, got, want = {}, {}, {}
        for k, n in ipairs { T, S, S, T } do host[k] = ms.randn({ B, n, H, D }):to(dtype or "bfloat16"):transpose(2, 3) end
        for _, side in ipairs { { got, "cuda", dtype or "bfloat16" }, { want, "cpu", "float64" } } do
          local x = {}
          for k = 1, 3 do
            x[k] = host[k]:to(side[2]):to(side[3]):detach()
            x[k].requires_grad = true
          end
          local given = {}
          for name, value in pairs(options or {}) do given[name] = value end
          given.attn_mask = given.attn_mask and given.attn_mask:to(side[2])
          local out = ms.nn.F.scaled_dot_product_attention(x[1], x[2], x[3], given)
          out:backward(host[4]:to(side[2]):to(side[3]))
          side[1][1] = out:detach()
          for k = 1, 3 do side[1][k + 1] = x[k].grad end
        end
        local most = 0
        for k = 1, 4 do
          local e = ((got[k]:to("cpu"):to "float64" - want[k]):norm() / want[k]:norm()):item()
          if not (e <= most) then most = e end
        end
        return most, got
      end
      %%s]]):format(library):format(source), given)
    assert.are.equal(0, job.code, job.stderr)
    return job.stdout, job.stderr
  end
  it_built("is right, in every mode of the emulated GPU", function()
    for _, modes in ipairs { "", "seed:1,late,chunks,warps,shared,align" } do
      local out = script([[
        print(attend(2, 3, 70, 70, 64, { is_causal = true }), attend(1, 2, 33, 65, 32), attend(1, 1, 40, 24, 128),
          attend(2, 1, 65, 65, 8, { is_causal = true, scale = 0.3 }, "float16"), counts.plans, counts.runs)]],
        { MOONSHARD_EMULATOR = modes })
      local list = {}
      for word in out:gmatch "%S+" do list[#list + 1] = tonumber(word) end
      for k = 1, 4 do assert.is_true(list[k] < 6e-3, out) end
      assert.same({ 8, 8 }, { list[5], list[6] }, "a plan and a run for each forward and backward")
    end
  end)

  it_built("makes one plan for a shape, and repeats bit by bit", function()
    assert.are.equal("2\t6\ttrue\n", (script [[
      local _, first = attend(1, 2, 40, 40, 64, { is_causal = true })
      local same = true
      for _ = 1, 2 do
        local _, again = attend(1, 2, 40, 40, 64, { is_causal = true })
        for k = 1, 4 do same = same and again[k]:to "cpu":equal(first[k]:to "cpu") end
      end
      print(counts.plans, counts.runs, same)]]))
  end)

  it_built("leaves to the engine's own kernels what it cannot compute, and what it refuses", function()
    local out, err = script [[
      local right = true
      local function check(...) right = right and attend(...) < 8e-3 end
      check(1, 1, 40, 40, 64, { attn_mask = ms.rand({ 40, 40 }):gt(0.3):logical_or(ms.eye(40, 40):to "bool") })
      check(1, 1, 40, 40, 64, {}, "float32")
      print(counts.plans, counts.runs)
      plant(3000)
      check(1, 1, 40, 40, 64)
      plant(0)
      check(1, 1, 40, 40, 64)
      print(counts.plans, counts.runs, right)]]
    assert.are.equal("0\t0\n2\t0\ttrue\n", out, err)
  end)

  it_built("names a failure of the library", function()
    local out = script [[
      plant(5000)
      print(pcall(attend, 1, 1, 40, 40, 64))]]
    assert.matches("^false\t.*attention: cuda:0: cuDNN: cudnnBackendExecute failed with status 5000: the stand%-in refuses the call", out)
  end)

  it_built("is not used with MOONSHARD_CUDNN=off, nor for more than 64 shapes; then a line says so", function()
    assert.are.equal("0\t0\n", (script("attend(1, 1, 40, 40, 64) print(counts.plans, counts.runs)",
      { MOONSHARD_CUDNN = "off" })))
    local out, err = script [[
      for T = 1, 40 do attend(1, 1, T, 8, 8) end
      print(counts.plans)]]
    assert.are.equal("64\n", out)
    assert.matches("attention has asked cuDNN for 64 plans .*; further shapes use Moonshard's own kernels", err)
  end)
end)
