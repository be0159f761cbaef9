-- SPDX-License-Identifier: MIT
--- Copies, fills, random fills and elementwise loops on the (emulated) GPU against the CPU, to the bit: transposes of
--- whole and partial tiles, rows of odd lengths, and views that are not aligned to 16 bytes.
local ms = require "moonshard"
local gpu = require "spec.support.gpu_pair"
local on_gpu = require "spec.support.on_gpu"(11)
local F = ms.nn.F

--- The same numbers on the CPU and on the GPU, from `skip` elements into their storages.
local function draw(dtype, shape, skip)
  return gpu.pair(ms.randint(-100, 100, { gpu.numel(shape) + skip }):to(dtype), shape, skip)
end

local function same(want, got, text)
  assert.are.equal("cuda:0", tostring(got.device))
  assert.is_true(want:equal(got:to "cpu"), text)
end

local DTYPES = { "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8" }

describe("on a GPU a copy of", function()
  for _, dtype in ipairs(DTYPES) do
    on_gpu("a transposed view has the CPU's elements, " .. dtype, function()
      for _, shape in ipairs { { 64, 64 }, { 16, 16 }, { 128, 200 }, { 65, 130 }, { 31, 77 }, { 8, 1000 },
        { 3, 72, 136 }, { 2, 3, 40, 24 } } do
        for skip = 0, 1 do
          local a, b = draw(dtype, shape, skip)
          for first = 1, #shape - 1 do
            same(a:transpose(first, #shape):contiguous(), b:transpose(first, #shape):contiguous(),
              ("%s, dimension %d, from %d"):format(table.concat(shape, " x "), first, skip))
          end
        end
      end
    end)

    on_gpu("part of a tensor, into part of a tensor, has the CPU's elements, " .. dtype, function()
      for _, case in ipairs { { 5, 64, 16, 32 }, { 5, 64, 3, 32 }, { 7, 33, 1, 20 }, { 9, 4096, 8, 2048 },
        { 600, 3, 0, 2 } } do
        local rows, columns, from, n = unpack(case)
        local a, b = draw(dtype, { rows, columns }, 0)
        local x, y = draw(dtype, { rows, columns }, 0)
        local u, v = x:narrow(2, from + 1, n), y:narrow(2, from + 1, n)
        u:copy_(a:narrow(2, 1, n))
        v:copy_(b:narrow(2, 1, n))
        same(x, y, table.concat(case, " "))
        u:fill_(3)
        v:fill_(3)
        same(x, y, table.concat(case, " ") .. ", filled")
        x:fill_(7)
        y:fill_(7)
        same(x, y, table.concat(case, " ") .. ", all filled")
      end
    end)
  end
end)

describe("on a GPU an elementwise loop has the CPU's bits", function()
  for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64" } do
    on_gpu("for aligned, misaligned and broadcast operands, " .. dtype, function()
      for _, n in ipairs { 1, 7, 8, 9, 264, 1000, 2049 } do
        for skip = 0, 2 do
          local text = ("%d elements from %d"):format(n, skip)
          local a, x = draw(dtype, { n }, skip)
          local b, y = draw(dtype, { n }, 0)
          same(a * b, x * y, text)
          same(a:gt(b), x:gt(y), text)
          same(a:to "bfloat16", x:to "bfloat16", text)
          same(a:add(b, { alpha = 0.5 }), x:add(y, { alpha = 0.5 }), text)
          assert.are.equal(a:equal(b), x:equal(y), text)
          assert.is_true(x:equal(x:clone()))
          assert.is_false(x:allclose(x + 1))
        end
        local a, x = draw(dtype, { 5, n }, 0)
        local row, gpu_row = draw(dtype, { n }, 0)
        local column, gpu_column = draw(dtype, { 5, 1 }, 0)
        same(a + row, x + gpu_row, n .. " columns and a row")
        same(a - column, x - gpu_column, n .. " columns and a column")
        same(a:t() * row:unsqueeze(2), x:t() * gpu_row:unsqueeze(2), n .. " rows of a transposed view")
        same(a:tril(-1), x:tril(-1), n .. " columns, lower triangle")
        same(ms.where(a:gt(row), a, column), ms.where(x:gt(gpu_row), x, gpu_column), n .. " columns, where")
      end
    end)
  end
end)

describe("on a GPU exp of float64", function()
  -- It is the device's library's. CUDA's gives 0 from -745 down, the CPU's the smallest number until -745.13.
  on_gpu("is within a unit in the last place, and where it is subnormal within the smallest number", function()
    local x = ms.linspace(-746, -700, 2000, { dtype = "float64" })
    local want = x:exp()
    local off = (want - x:to "cuda":exp():to "cpu"):abs()
    assert.is_true((off - want * 2.3e-16):max():item() <= 5e-324)
  end)
end)

describe("on a GPU random numbers have the CPU's bits", function()
  for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64" } do
    on_gpu("from any element on, " .. dtype, function()
      for _, n in ipairs { 1, 2, 7, 8, 17, 1031 } do
        for skip = 0, 3 do
          local text = ("%d elements from %d"):format(n, skip)
          local a, b = ms.zeros(n + skip, { dtype = dtype }), ms.zeros(n + skip, { dtype = dtype, device = "cuda" })
          for _, name in ipairs { "uniform_", "normal_" } do
            ms.manual_seed(3)
            ms.nn.init[name](a:narrow(1, skip + 1, n))
            ms.manual_seed(3)
            ms.nn.init[name](b:narrow(1, skip + 1, n))
            -- In float64 logarithm, sine and cosine are those of the device's library (formulas/draws.h).
            if dtype == "float64" and name == "normal_" then
              local off = ((a - b:to "cpu"):abs() / a:abs():clamp(1e-300)):max():item()
              assert.is_true(off <= 1e-15, ("%s of %s: relative error %g"):format(name, text, off))
              b:copy_(a)
            else
              same(a, b, name .. " of " .. text)
            end
          end
          ms.manual_seed(5)
          local want = F.dropout(a:narrow(1, skip + 1, n), 0.4, { training = true })
          ms.manual_seed(5)
          same(want, F.dropout(b:narrow(1, skip + 1, n), 0.4, { training = true }), "dropout of " .. text)
        end
      end
    end)
  end
end)
