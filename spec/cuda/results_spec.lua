-- SPDX-License-Identifier: MIT
--- What operators on a GPU compute, written to a file (MOONSHARD_CUDA_RESULTS) and compared between devices
--- (scripts/support/gpu_check/results.lua).
local process = require "spec.support.process"
local planted = require "spec.support.cuda.ptx.planted"
local results = dofile(process.root .. "/scripts/support/gpu_check/results.lua")

local SCRIPT = [[
  local ms = require "moonshard"
  ms.manual_seed(3)
  local x = ms.randn { 9, 300 }
  for _, d in ipairs { "float32", "bfloat16", "float16" } do
    local g = x:to(d):to "cuda"
    g:sum(2):mul_(2)
    g:softmax(2):t():contiguous():add(1)
    print((g * g):sum():item())
  end]]

local folder
before_each(function() folder = process.temp_folder() end)
after_each(function() process.remove_folder(folder) end)

--- Writes what the script's operators compute on a device.
local function write(name, device, env)
  env = process.crash_env(env)
  env.MOONSHARD_CUDA, env.MOONSHARD_CUDA_RESULTS = device, folder .. "/" .. name
  env.MOONSHARD_EMULATOR = false                                     -- `compare` finds the changed kernel before us
  local job = process.script(SCRIPT, env)
  assert.are.equal(0, job.code, job.stderr)
  return folder .. "/" .. name
end

describe("the comparison of operators' results", function()
  local LINES = { "sum 01 | float32 2 aa 0000803f00000040", "mul 02 | bfloat16 1x2 bb 803f0040 | int32 - cc 07000000",
    "copy 03 | bfloat16 1 dd 803f" }
  --- Compares these lines with some in which a pattern is replaced.
  local function compare(pattern, by)
    process.write(folder .. "/a", ("kernel exact add\nkernel approximate mma\nkernel exact copy\n%s by 1 1\n%s by 3 2\n%s\n"):format(unpack(LINES)))
    process.write(folder .. "/b", (table.concat(LINES, "\n"):gsub(pattern, by)) .. "\n")
    local counts, list, kernels = results.compare(folder .. "/a", folder .. "/b", true)
    local out = { ("%d, %d"):format(counts.compared, counts.alone) }
    for k, o in ipairs(list) do
      out[k + 1] = ("%s (%s), %d, %.3g, %s, %s"):format(o.op, o.by, o.calls, o.error, o.beyond and "beyond" or "close", o.first)
    end
    for _, k in ipairs(kernels) do
      if k.other > 0 then out[#out + 1] = k.symbol .. " differs" end
    end
    return table.concat(out, "; ")
  end

  for _, case in ipairs {
    { "nothing in equal files", "$^", "", "3, 0" },
    { "nothing in another order", "(sum[^\n]*)\n(mul[^\n]*)", "%2\n%1", "3, 0" },
    { "a float32 number", "aa 0000803f", "ab 0000c03f",
      "3, 0; sum (add), 1, 0.25, beyond, output 1, float32 2: element 1 is 1.5, expected 1; add differs" },
    { "the last bit of an exact kernel", "aa 0000803f", "ab 0100803f",
      "3, 0; sum (add), 1, 5.96e-08, beyond, output 1, float32 2: element 1 is 1.0000001192092896, expected 1; add differs" },
    { "an element of an exact kernel that the file does not have", "aa", "ab",
      "3, 0; sum (add), 1, 0, beyond, output 1, float32 2: signs of zeros differ, or elements that the file does not have; add differs" },
    { "a rounding of an approximate kernel's number", "bb 803f0040", "bd 813f0040",
      "3, 0; mul (copy, mma), 1, 0.00391, close, output 1, bfloat16 1x2: element 1 is 1.0078125, expected 1; mma differs; copy differs" },
    { "a wrong integer", "cc 07", "cd 08", "3, 0; mul (copy, mma), 1, 0.143, beyond, output 2, int32 -: element 1 is 8, expected 7; mma differs; copy differs" },
    { "a wrong bit of a copy", "dd 803f", "de 813f",
      "3, 0; copy (none), 1, 0.00781, beyond, output 1, bfloat16 1: element 1 is 1.0078125, expected 1" },
    { "a NaN", "aa 0000803f", "ab 0000c07f",
      "3, 0; sum (add), 1, inf, beyond, output 1, float32 2: element 1 is nan, expected 1; add differs" },
    { "no counterpart of a call whose inputs differ", "02 (| bfloat16 1x2) bb 80", "03 %1 bd 81", "2, 1" },
    { "no counterpart of another operator", "mul", "div", "2, 1" },
    { "no counterpart of another shape", "1x2", "2x1", "2, 1" },
  } do
    local name, pattern, by, expected = unpack(case)
    it("finds " .. name, function() assert.equal(expected, (compare(pattern, by):gsub("%-nan", "nan"))) end)
  end
end)

describe("the results of operators #cuda", function()
  it("have the same bits on the emulated GPU and on the executor of PTX, and show a changed kernel", function()
    if not planted.built() then return pending "not built: needs nvcc" end
    assert.is_true(planted.prepare())
    local expected = write("ptx", "ptx", { MOONSHARD_PTX_LAUNCHED = folder .. "/ptx" })
    results.name_kernels(expected)
    local counts, list, kernels = results.compare(expected, write("emulated", "emulated"), true)
    assert.is_true(counts.compared >= 3 * 6, counts.compared)
    assert.same({ 0, {} }, { counts.alone, list })
    assert.is_true(#kernels >= 6, #kernels)
    for _, k in ipairs(kernels) do assert.is_true(k.same > 0, k.symbol) end
    -- A kernel of softmax that adds instead of subtracting.
    local softmax
    for _, k in ipairs(planted.kernels()) do
      if k.symbol:find "softmax_rows_kernelIf" then softmax = k end
    end
    local _, body = planted.ptx_of(softmax)
    local changed, times = body:gsub("sub%.rn%.f32", "add.rn.f32", 1)
    assert.equal(1, times)
    planted.plant(folder .. "/changed", softmax, changed)
    counts, list = results.compare(expected, write("planted", "ptx", { MOONSHARD_PTX_FOLDER = folder .. "/changed" }), true)
    assert.is_true(counts.compared > 0 and counts.alone > 0)         -- what follows has other inputs
    assert.equal(1, #list)
    assert.same({ "softmax", true }, { list[1].op, list[1].beyond })
    assert.matches("softmax_rows_kernelIf", list[1].by)
  end)
end)
