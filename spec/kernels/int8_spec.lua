-- SPDX-License-Identifier: MIT
--- int8_linear: products with a weight of int8 that has a scale for each row. Few rows are dot products
--- (kernels/cpu/product/gemm_few.c); more rows are converted while packing (gemm.c).
local F = require "moonshard.core.ffi"
local ms = require "moonshard"
local ffi, lib = F.ffi, F.lib
local int8_linear = ms.nn.F.int8_linear

local TOLERANCE = { float32 = 2e-6, float64 = 1e-14, bfloat16 = 2 ^ -8, float16 = 2 ^ -10 }
local ROWS = { 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 40 }
-- { k, n }: depths below, at and beside a vector, above a part, above a block; columns that fill no tile, several
-- blocks.
local SIZES = { { 1, 1 }, { 1, 5 }, { 15, 3 }, { 16, 6 }, { 17, 7 }, { 31, 50 }, { 128, 48 }, { 100, 97 }, { 700, 53 },
  { 1100, 17 }, { 17, 1001 }, { 2100, 60 } }

local function bits(t)
  t = t:contiguous()
  return ffi.string(lib.ms_data_ptr(t.id), t:numel() * t:element_size())
end

local function weight(n, k)
  return ms.randint(-127, 128, { n, k }):to "int8", ms.rand(n) * 0.02 + 0.001
end

-- got against a b (+ bias), which are float64; errors are relative to the sum of the terms' absolute values.
local function compare(got, a, b, bias, what)
  local want, terms = a:matmul(b), a:abs():matmul(b:abs())
  if bias then want = want + bias end
  local away = ((got:double() - want):abs() / (want:abs():maximum(terms / 8) + 1e-30)):max():item()
  if not (away <= TOLERANCE[got.dtype]) then error(("%s: off by %.3g"):format(what, away)) end
end

local function wide(w, scale) return w:double() * scale:double():unsqueeze(2) end

describe("int8_linear:", function()
  before_each(function() ms.manual_seed(3) end)

  for dtype in pairs(TOLERANCE) do
    it(("x (scale w)^T + b in %s, and its gradients, are those of the float64 product"):format(dtype), function()
      for _, size in ipairs(SIZES) do
        local k, n = unpack(size)
        for _, m in ipairs(ROWS) do
          ms.scope(function()
            local w, scale = weight(n, k)
            local x, b = ms.randn(m, k):to(dtype):requires_grad_(true), ms.randn(n):to(dtype):requires_grad_(true)
            local what, all = ("%d x %d x %d"):format(m, n, k), wide(w, scale)
            local y = int8_linear(x, w, scale, b)
            assert.are.equal(dtype, y.dtype)
            compare(y:detach(), x:detach():double(), all:t(), b:detach():double(), what)
            compare(int8_linear(x, w, scale):detach(), x:detach():double(), all:t(), nil, what .. " without bias")
            local g = ms.randn(m, n):to(dtype)
            y:backward(g)
            compare(x.grad, g:double(), all, nil, what .. ", gradient of x")
            compare(b.grad:unsqueeze(1), ms.ones(1, m, { dtype = "float64" }), g:double(), nil, what .. ", gradient of b")
          end)
        end
      end
    end)

    it(("takes views in %s, and scales of any dtype"):format(dtype), function()
      ms.no_grad(function()
        for _, m in ipairs { 1, 3, 16, 33 } do
          local k, n = 75, 229
          local w, scale = weight(n + 2, k + 9)
          local x = ms.randn(k + 3, m + 1):to(dtype):t():narrow(1, 2, m):narrow(2, 3, k)
          local part, of = w:narrow(1, 2, n):narrow(2, 4, k), scale:narrow(1, 2, n)
          compare(int8_linear(x, part, of), x:double(), wide(part, of):t(), nil, "transposed x, w with gaps")
          local turned = w:t():narrow(1, 2, n % k):narrow(2, 1, k)
          local short = scale:narrow(1, 1, n % k)
          compare(int8_linear(x, turned, short), x:double(), wide(turned, short):t(), nil, "transposed w")
          local spread = ms.randn(m, 2 * k):to(dtype):view(m, k, 2):select(3, 2)
          local every = ms.rand(2 * n):view(n, 2):select(2, 1)
          compare(int8_linear(spread, part, every), spread:double(), wide(part, every):t(), nil, "x, scale with gaps")
          for _, kind in ipairs { "float64", "bfloat16", "float16" } do
            compare(int8_linear(x, part, of:to(kind)), x:double(), wide(part, of:to(kind)):t(), nil, kind)
          end
          compare(int8_linear(x:view(1, m, k), part, of):view(m, n), x:double(), wide(part, of):t(), nil, "3-d")
        end
      end)
    end)

    it(("gives the same bits in %s with any number of threads; few rows, whatever is beside them"):format(dtype), function()
      local threads = lib.ms_num_threads()
      local ok, message = pcall(function()
        for _, size in ipairs { { 333, 400 }, { 1500, 101 }, { 1100, 520 }, { 300, 1290 } } do
          local k, n = unpack(size)
          local w, scale = weight(n, k)
          local x, many = ms.randn(16, k):to(dtype), ms.randn(200, k):to(dtype):requires_grad_(true)
          local first
          for _, t in ipairs { 1, 2, 5 } do
            ms.set_num_threads(t)
            local y = int8_linear(many, w, scale)
            many.grad = nil
            y:sum():backward()
            local all = bits(int8_linear(x, w, scale)) .. bits(y) .. bits(many.grad)
            first = first or all
            assert(all == first, ("other bits with %d threads"):format(t))
          end
          local y = int8_linear(x, w, scale)
          for _, m in ipairs(dtype == "float64" and {} or { 1, 2, 5, 11 }) do
            assert(bits(int8_linear(x:narrow(1, 4, m), w, scale)) == bits(y:narrow(1, 4, m)), ("%d rows"):format(m))
          end
        end
      end)
      ms.set_num_threads(threads)
      assert(ok, message)
    end)
  end

  it("propagates NaN and infinity, also where the weight is 0", function()
    local w, scale = ms.zeros(3, 21, { dtype = "int8" }), ms.ones(3)
    w[{ 2, 3 }] = -127
    for _, m in ipairs { 2, 20 } do
      local x = ms.ones(m, 21)
      x[{ 1, 3 }] = math.huge
      x[{ 2, 4 }] = 0 / 0
      local y = int8_linear(x, w, scale)
      assert.is_true(y[{ 1, 1 }]:isnan():item())
      assert.are.equal(-math.huge, y[{ 1, 2 }]:item())
      assert.is_true(y:select(1, 2):isnan():all():item())
    end
  end)

  it("runs in bfloat16 under autocast, and in captured steps", function()
    local w, scale = weight(20, 32)
    local x = ms.randn(3, 32)
    ms.amp.autocast("bfloat16", function()
      assert.are.equal("bfloat16", int8_linear(x, w, scale).dtype)
    end)
    local step = ms.capture(function(t) return int8_linear(t, w, scale) end)
    for _ = 1, 3 do
      x:normal_()
      assert.is_true(step(x):equal(int8_linear(x, w, scale)))
    end
  end)
end)
