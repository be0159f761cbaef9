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

-- What collectives call, of sizes, offsets and dtypes that few of them have.
describe("on a GPU a list of", function()
  local engine = require "moonshard.core.ffi"
  local ffi, lib = engine.ffi, engine.lib
  local SIZES = { 1, 8, 515, 4096, 4098, 9001 }            -- a block takes 4,096 elements
  local FLOATS = { "float32", "float16", "bfloat16" }
  local table_of = require("spec.support.cuda_table").open
  local function code(dtype)
    return ffi.C["MS_" .. dtype:upper():gsub("FLOAT", "F"):gsub("UINT", "U"):gsub("INT", "I")]
  end
  --- The same n numbers on both devices, from `skip` elements on.
  local function numbers(dtype, n, skip)
    local host = ms.randint(dtype == "uint8" and 0 or -3, 4, { n + skip }):to(dtype)
    return host:narrow(1, skip + 1, n), host:to "cuda":narrow(1, skip + 1, n)
  end
  local function at(t) return ffi.cast("char *", lib.ms_data_ptr(t.id)) end

  on_gpu("copies, conversions and zeros has the CPU's elements", function()
    local pairs_of = { { "int16", "int16" }, { "uint8", "uint8" }, { "float64", "float64" } }
    for _, to in ipairs(FLOATS) do
      for _, from in ipairs(FLOATS) do pairs_of[#pairs_of + 1] = { to, from } end
    end
    local sizes = {}
    for n = 17, 25 do sizes[#sizes + 1] = n end              -- rests of packs
    for k, skips in ipairs { { 0, 1 }, { 1, 0 }, { 0, 0 }, { 1, 1 } } do
      if k == 3 then for _, n in ipairs(SIZES) do sizes[#sizes + 1] = n end end
      local list, want, got, n = ffi.new("spec_copy[?]", #pairs_of * #sizes), {}, {}, 0
      for _, size in ipairs(sizes) do
        for _, pair in ipairs(pairs_of) do
          local to, from = unpack(pair)
          local host, there = numbers(from, size, skips[1])
          local out = ms.ones(size + skips[2], { dtype = to, device = "cuda" }):narrow(1, skips[2] + 1, size)
          local zeros = (size + k) % 5 == 0
          list[n] = { at(out), zeros and ffi.cast("char *", 0) or at(there), size, code(to), code(from) }
          n = n + 1
          want[n], got[n] = zeros and host:to(to) * 0 or host:to(to), { out, there }
        end
      end
      assert.are.equal(0, table_of().copy_all(0, 0, n, list))
      for i = 1, n do same(want[i], got[i][1], ("copy %d from %d to %d"):format(i, unpack(skips))) end
    end
  end)

  on_gpu("parts has the sums, products and extremes of up to 9 ranks", function()
    for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
      "bool" } do
      local wide = dtype:find "16" and dtype ~= "int16" and "float32" or dtype
      for how, fold in pairs {
        [0] = function(a, x) return dtype == "bool" and a:logical_or(x) or a + x end,
        [2] = function(a, x) return dtype == "bool" and a:logical_or(x) or a:maximum(x) end,
        [3] = function(a, x) return dtype == "bool" and a:logical_and(x) or a:minimum(x) end,
        [4] = function(a, x) return dtype == "bool" and a:logical_and(x) or a * x end,
      } do
        for _, ranks in ipairs { 1, 2, 5, 9 } do
          local skip, n_dst = ranks % 2, ranks == 5 and 3 or 1
          local parts = { 4100, 3, 9001 }
          local src, dst = ffi.new("const char *[?]", 3 * ranks), ffi.new("char *[?]", 3 * n_dst)
          local want, got, sources = {}, {}, {}
          for p, n in ipairs(parts) do
            local all
            for r = 1, ranks do
              local host, there = numbers(dtype, n, skip)
              src[(p - 1) * ranks + r - 1] = at(there)
              sources[#sources + 1] = there
              host = host:to(wide)
              all = all and fold(all, host) or host
            end
            all = ms.cat({ all:to(dtype), ms.zeros(p * 5, { dtype = dtype }) }, 1)
            for d = 1, n_dst do
              want[#want + 1] = all
              got[#want] = ms.ones(n + p * 5 + skip, { dtype = dtype, device = "cuda" }):narrow(1, skip + 1, n + p * 5)
              dst[(p - 1) * n_dst + d - 1] = at(got[#want])
            end
          end
          local numel, zeros = ffi.new("int64_t[3]", parts), ffi.new("int64_t[3]", { 5, 10, 15 })
          local r = ffi.new("spec_reduction", code(dtype), how, ranks, n_dst, 3, 1, numel, zeros, src, dst)
          assert.are.equal(0, table_of().reduce(0, 0, r))
          assert.are.equal(3 * ranks, #sources)               -- they live until now
          for k = 1, #want do same(want[k], got[k], ("%s, reduction %d of %d, part %d"):format(dtype, how, ranks, k)) end
        end
      end
    end
  end)

  on_gpu("sums is divided, scaled and rounded as on the CPU", function()
    for _, pair in ipairs { { "float32", "float32" }, { "float32", "float16" }, { "float32", "bfloat16" },
      { "float16", "float32" }, { "bfloat16", "float32" }, { "float16", "float16" }, { "bfloat16", "bfloat16" },
      { "float64", "float64" } } do
      local from, to = unpack(pair)
      for n = 17, 25 do
        for skip = 0, 1 do
          for _, factors in ipairs { { 1, 1 }, { 3, 1 }, { 1, 0.3 }, { 3, 0.3 } } do
            local host, there = numbers(from, n, skip)
            local out = ms.ones(n + skip, { dtype = to, device = "cuda" }):narrow(1, skip + 1, n)
            local f = ffi.new("spec_finish", at(out), at(there), code(to), code(from), n, factors[1], factors[2])
            assert.are.equal(0, table_of().finish(0, 0, f))
            local wide = from == "float64" and from or "float32"
            local want = host:to(wide)
            if factors[1] ~= 1 then want = want / factors[1] end
            if factors[2] ~= 1 then want = want * factors[2] end
            same(want:to(to), out, ("%s to %s, %d from %d"):format(from, to, n, skip))
          end
        end
      end
    end
  end)

  on_gpu("elements is multiplied, at any offset, in several blocks", function()
    for _, dtype in ipairs { "float32", "float16", "bfloat16", "float64" } do
      for _, n in ipairs { 5, 16, 23, 12288, 30011 } do
        for skip = 0, 1 do
          local host, there = numbers(dtype, n, skip)
          assert.are.equal(0, table_of().scale(0, code(dtype), at(there), n, 0.3))
          -- The factor is rounded to the type in which is computed.
          local wide = dtype == "float64" and dtype or "float32"
          same((host:to(wide) * 0.3):to(dtype), there, ("%s, %d from %d"):format(dtype, n, skip))
        end
      end
    end
  end)
end)
