-- SPDX-License-Identifier: MIT
--- Functions along a dimension on the (emulated) GPU, over all dtypes, over sizes at which kernels change (a thread, a
--- warp, a block or several blocks a line), and over layouts: dense, transposed, at an odd offset. Many numbers are
--- equal, and some are NaN. What a function refuses on the CPU it refuses there, too.
local ms = require "moonshard"
local on_gpu = require "spec.support.on_gpu"(6)

local BOUNDS = { float16 = 4e-3, bfloat16 = 3e-2, float32 = 2e-5, float64 = 1e-11 }
local DTYPES = { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool" }
local SIZES = { { 1, 1 }, { 3, 70 }, { 70, 3 }, { 300, 5 }, { 2, 2100 }, { 2100, 2 }, { 1, 9000 },
  { 3, 2, 3, 2, 2, 3 } }
local LAYOUTS = {
  dense = function(x) return x end,
  transposed = function(x) return x:dim() == 2 and x:t() or x:permute(6, 3, 1, 5, 2, 4) end,
  offset = function(x) return x:size(2) > 2 and x:narrow(2, 2, x:size(2) - 1) or x end,
}
local FUNCTIONS = {
  sum = function(x, d) return x:sum(d) end,
  prod = function(x, d) return x:clamp(-1, 1):prod(d) end,
  mean = function(x, d) return x:mean(d) end,
  max = function(x, d) return x:max(d) end,
  min = function(x, d) return x:min(d) end,
  argmax = function(x, d) return x:argmax(d) end,
  argmin = function(x, d) return x:argmin(d) end,
  any = function(x, d) return x:any(d) end,
  all = function(x, d) return x:all(d) end,
  norm = function(x, d) return x:norm(2, d), x:norm(1, d), x:norm(3, d), x:norm(math.huge, d), x:norm(0, d) end,
  logsumexp = function(x, d) return x:logsumexp(d) end,
  softmax = function(x, d) return x:softmax(d), x:log_softmax(d) end,
  var = function(x, d) return x:var(d) end,
  cumsum = function(x, d) return x:cumsum(d) end,
  cumprod = function(x, d) return x:clamp(-1, 1):cumprod(d) end,
  cummax = function(x, d) return x:cummax(d) end,
  cummin = function(x, d) return x:cummin(d) end,
  logcumsumexp = function(x, d) return x:logcumsumexp(d) end,
  sort = function(x, d) return x:sort(d, false), (x:sort(d, true)) end,
  topk = function(x, d) return x:topk(math.min(3, x:size(d)), d) end,
}

local function results(x, fn, d)
  local out = { pcall(fn, x, d) }
  if not out[1] then return nil, tostring(out[2]) end
  return { unpack(out, 2) }
end

local function numbers(shape, dtype, nans)
  local x = ms.randint(dtype == "uint8" and 0 or -3, 4, shape)
  if dtype == "bool" then return x:gt(1) end
  x = x:to(dtype)
  if nans then x:masked_fill_(ms.rand(shape):lt(0.02), 0 / 0) end
  return x
end

local function same(name, want, got, dtype)
  assert.equal(#want, #got, name)
  for k, w in ipairs(want) do
    local g = got[k]:to "cpu"
    assert.same({ w.dtype, unpack(w.shape) }, { g.dtype, unpack(g.shape) }, name)
    local ok = w:is_floating_point() and
      ms.allclose(g, w, { rtol = BOUNDS[w.dtype], atol = BOUNDS[dtype] or 1e-5, equal_nan = true })
    if not w:is_floating_point() then ok = w:equal(g) end
    assert.is_true(ok, ("%s, result %d"):format(name, k))
  end
end

describe("along a dimension, on a GPU #cuda", function()
  for name, fn in pairs(FUNCTIONS) do
    for _, dtype in ipairs(DTYPES) do
      on_gpu(("%s has the CPU's numbers in %s"):format(name, dtype), function()
        for _, nans in ipairs(BOUNDS[dtype] and { false, true } or { false }) do
          for _, shape in ipairs(SIZES) do
            ms.scope(function()
              local x = numbers(shape, dtype, nans)
              local there = x:to "cuda"
              for layout, of in pairs(LAYOUTS) do
                for d = 1, #shape do
                  local want = results(of(x), fn, d)
                  local got, why = results(of(there), fn, d)
                  local what = ("%s of %s, %s, dimension %d%s"):format(name, table.concat(shape, " x "), layout, d,
                    nans and ", with NaN" or "")
                  assert(not want == not got, what .. ": " .. tostring(why))
                  if want then same(what, want, got, dtype) end
                end
              end
            end)
          end
        end
      end)
    end
  end
end)
