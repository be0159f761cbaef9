-- SPDX-License-Identifier: MIT
--- Products of up to 16 rows with a weight whose rows are contiguous, and of a matrix with up to 16 columns
--- (kernels/cpu/product/gemm_few.c).
local F = require "moonshard.core.ffi"
local ms = require "moonshard"
local ffi, lib = F.ffi, F.lib

local TOLERANCE = { float32 = 2e-6, float64 = 1e-14, bfloat16 = 2 ^ -8, float16 = 2 ^ -10 }
local ROWS = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17 }
-- { k, n }: depths below, at and beside a vector, and above a part; columns that fill no tile, several blocks.
local SIZES = { { 1, 1 }, { 1, 5 }, { 15, 3 }, { 16, 6 }, { 17, 7 }, { 31, 50 }, { 128, 48 }, { 100, 97 }, { 700, 53 },
  { 1100, 17 }, { 17, 1001 } }

local function bits(t)
  t = t:contiguous()
  return ffi.string(lib.ms_data_ptr(t.id), t:numel() * t:element_size())
end

-- x [m, k] times w [n, k], in float64, without a product.
local function expected(x, w, bias)
  local y = (x:double():unsqueeze(2) * w:double():unsqueeze(1)):sum(3)
  return bias and y + bias:double() or y
end

local function compare(got, want, x, w, what)
  local terms = (x:double():abs():unsqueeze(2) * w:double():abs():unsqueeze(1)):sum(3)
  local away = ((got:double() - want):abs() / (want:abs():maximum(terms / 8) + 1e-30)):max():item()
  if not (away <= TOLERANCE[got.dtype]) then error(("%s: off by %.3g"):format(what, away)) end
end

describe("products of few rows:", function()
  before_each(function() ms.manual_seed(3) end)

  for dtype in pairs(TOLERANCE) do
    it(("x W^T + b in %s is the sum of products"):format(dtype), function()
      ms.no_grad(function()
        for _, size in ipairs(SIZES) do
          local k, n = unpack(size)
          for _, m in ipairs(ROWS) do
            ms.scope(function()
              local x, w, b = ms.randn(m, k):to(dtype), ms.randn(n, k):to(dtype), ms.randn(n):to(dtype)
              local what = ("%d x %d x %d"):format(m, n, k)
              compare(ms.nn.F.linear(x, w, b), expected(x, w, b), x, w, what)
              compare(x:matmul(w:t()), expected(x, w), x, w, what .. " without bias")
              compare(w:matmul(x:t()):t(), expected(x, w), x, w, what .. " transposed")
            end)
          end
        end
      end)
    end)

    it(("takes views in %s: transposed x, rows with gaps, offsets, one repeated row"):format(dtype), function()
      ms.no_grad(function()
        for _, m in ipairs { 1, 3, 8, 16 } do
          local k, n = 75, 229
          local w = ms.randn(n + 2, k + 9):to(dtype):narrow(1, 2, n):narrow(2, 4, k)
          local x = ms.randn(k + 3, m + 1):to(dtype):t():narrow(1, 2, m):narrow(2, 3, k)
          compare(x:matmul(w:t()), expected(x, w), x, w, "transposed x")
          compare(w:matmul(x:t()):t(), expected(x, w), x, w, "transposed product")
          local same = w:narrow(1, 3, 1):expand(n, k)
          compare(x:matmul(same:t()), expected(x, same), x, same, "a repeated row of W")
          local spread = ms.randn(m, 2 * k):to(dtype):view(m, k, 2):select(3, 2)
          compare(spread:matmul(w:t()), expected(spread, w), spread, w, "x with gaps")
        end
      end)
    end)

    it(("gives a row in %s the same bits with other rows beside it and with any number of threads"):format(dtype), function()
      local threads = lib.ms_num_threads()
      local ok, message = pcall(ms.no_grad, function()
        for _, size in ipairs { { 333, 400 }, { 1500, 101 } } do
          local k, n = unpack(size)
          local x, w, first, first_beside = ms.randn(16, k):to(dtype), ms.randn(n, k):to(dtype), nil, nil
          local beside = w:t():contiguous()                       -- columns are contiguous
          for _, t in ipairs { 1, 2, 5 } do
            ms.set_num_threads(t)
            local y = x:matmul(w:t())
            first = first or bits(y)
            assert(bits(y) == first, ("other bits with %d threads"):format(t))
            local same = x:matmul(beside)
            first_beside = first_beside or bits(same)
            assert(bits(same) == first_beside, ("other bits of x W with %d threads"):format(t))
            compare(same, expected(x, w), x, w, "x W")
            for _, m in ipairs { 1, 2, 5, 11 } do
              local some = x:narrow(1, 4, m):matmul(w:t())
              assert(bits(some) == bits(y:narrow(1, 4, m)), ("%d rows, %d threads"):format(m, t))
            end
          end
        end
      end)
      ms.set_num_threads(threads)
      assert(ok, message)
    end)
  end

  -- With AVX2 and AVX-512, more rows of a large weight have tiles of their own: the rows' bits are those of fewer rows.
  for dtype in pairs(TOLERANCE) do
    it(("gives a row in %s the same bits beside few and many other rows, of a large weight"):format(dtype), function()
      ms.no_grad(function()
        for _, size in ipairs { { 1701, 520 }, { 700, 1001 } } do
          ms.scope(function()
            local k, n = unpack(size)
            local x, w, b = ms.randn(16, k):to(dtype), ms.randn(n, k):to(dtype), ms.randn(n):to(dtype)
            local y = ms.nn.F.linear(x, w, b)
            local exact = x:double():matmul(w:double():t()) + b:double()
            assert.is_true(y:double():allclose(exact, { rtol = 4 * TOLERANCE[dtype], atol = 60 * TOLERANCE[dtype] }))
            for _, m in ipairs { 1, 4, 5, 6, 8, 9, 12, 13 } do
              local some = ms.nn.F.linear(x:narrow(1, 17 - m, m), w, b)
              assert(bits(some) == bits(y:narrow(1, 17 - m, m)), ("%d rows, %d x %d"):format(m, n, k))
            end
          end)
        end
      end)
    end)
  end

  -- Layers on one input in one call, as a model without gradients computes queries, keys and values.
  for dtype in pairs(TOLERANCE) do
    it(("are those of each layer, side by side, in %s"):format(dtype), function()
      local ops, threads = require "moonshard.nn.ops", ms.get_num_threads()
      ms.no_grad(function()
        for _, case in ipairs { { 1, 576, { 576, 192, 192 } }, { 3, 33, { 7, 1, 50 } }, { 8, 520, { 700, 1001 } },
          { 16, 64, { 48 } }, { 40, 17, { 5, 9, 33, 2 } }, { 0, 4, { 3, 2 } } } do
          local m, k, sizes = unpack(case)
          local x, layers, single = ms.randn(m, k):to(dtype), {}, {}
          for j, n in ipairs(sizes) do
            layers[j] = { weight = ms.randn(n, k):to(dtype), bias = j ~= 2 and ms.randn(n):to(dtype) or nil }
            single[j] = ms.nn.F.linear(x, layers[j].weight, layers[j].bias)
          end
          for _, t in ipairs { 1, 2, 3 } do
            ms.set_num_threads(t)
            assert(bits(ops.linear_parts(x, layers)) == bits(ms.cat(single, 2)), ("%d rows, %d threads"):format(m, t))
          end
          ms.set_num_threads(threads)
        end
      end)
    end)
  end

  it("propagates NaN and infinity, and does not read beyond the weight", function()
    local x, w = ms.ones(2, 21), ms.ones(3, 21)
    w[{ 1, 21 }] = 0 / 0
    w[{ 2, 1 }] = math.huge
    local y = x:matmul(w:t())
    assert.is_true(y[{ 1, 1 }]:isnan():item())
    assert.are.equal(math.huge, y[{ 2, 2 }]:item())
    assert.are.equal(21, y[{ 1, 3 }]:item())
  end)

  it("of nothing are nothing, or the bias", function()
    local b = ms.randn(5)
    assert.are.same({ 0, 5 }, { unpack(ms.nn.F.linear(ms.ones(0, 3), ms.ones(5, 3), b).shape) })
    assert.are.same(b:tolist(), ms.nn.F.linear(ms.ones(1, 0), ms.ones(5, 0), b):select(1, 1):tolist())
    assert.are.same({ 2, 0 }, { unpack(ms.ones(2, 3):matmul(ms.ones(0, 3):t()).shape) })
  end)
end)
