-- SPDX-License-Identifier: MIT
--- Functions along a dimension on the (emulated) GPU, over all dtypes, over sizes at which kernels change (a thread, a
--- warp, a block or several blocks a line), and over layouts: dense, transposed, at an odd offset. Many numbers are
--- equal, and some are NaN. What a function refuses on the CPU it refuses there, too. Then copies, fills, conversions
--- and reads and writes by position, over all dtypes and over layouts whose dimensions cannot be merged; products; and
--- functions of rows, with gradients.
local ms = require "moonshard"
local process = require "spec.support.process"
local on_gpu = require "spec.support.on_gpu"(6)
local ops = require "moonshard.nn.ops"

-- Of layouts and positions, fewer cases run on g++'s kernels.
local all_cases = process.gpu == "ptx" or os.getenv "MOONSHARD_LONG" ~= nil

local F = ms.nn.F
local BOUNDS = { float16 = 4e-3, bfloat16 = 3e-2, float32 = 2e-5, float64 = 1e-11 }
local DTYPES = { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool" }
local SIZES = { { 1, 1 }, { 3, 70 }, { 70, 3 }, { 300, 5 }, { 2, 2100 }, { 2100, 2 }, { 1, 9000 },
  { 3, 2, 3, 2, 2, 3 }, { 40, 16 }, { 3, 0 } }
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
  sort = function(x, d) return x:sort(d), (x:sort(d, { descending = true })) end,
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

-- The results on the CPU and on the GPU, both nil if the operator refuses such tensors. None refuses float32.
local function both_same(what, got, dtype)
  assert.equal(got[1] == nil, got[2] == nil, what)
  assert(got[1] or dtype ~= "float32", what)
  if got[1] then same(what, got[1], got[2], dtype) end
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
                  assert(not want == not got and (want or dtype ~= "float32" or x:numel() == 0),
                    what .. ": " .. tostring(why))
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

-- Views of a tensor of 6 dimensions.
local VIEWS = {
  { "permuted", function(x) return x:permute(6, 3, 1, 5, 2, 4) end },
  { "cut", function(x) return x:narrow(6, 2, 4):narrow(3, 2, x:size(3) - 1):narrow(1, 2, x:size(1) - 1) end },
  { "turned", function(x) return x:permute(1, 2, 3, 4, 6, 5) end },
  { "dense", function(x) return x end },
}

--- Calls fn(x, ids, device) with the same numbers on both devices, in all views; compares the tensors that it returns.
local function on_both(dtype, name, fn)
  for _, shape in ipairs { { 3, 4, 3, 5, 2, 6 }, all_cases and { 2, 2, 2, 2, 3, 40 } or nil } do
    for _, view in ipairs(VIEWS) do
      ms.scope(function()
        local x, got = numbers(shape, dtype), {}
        for k, device in ipairs { "cpu", "cuda" } do
          got[k] = results(x:to(device):clone(), function(t) return fn(t, view[2], device) end)
        end
        both_same(("%s, %s"):format(name, view[1]), got, dtype)
      end)
    end
  end
end

local POSITIONS = {
  index_select = function(x, ids) return x:index_select(2, ids) end,
  index_add = function(x, ids, d) return x:index_add(d, ids, x:index_select(d, ids)) end,
  gather = function(x, _, d, all) return x:gather(d, all) end,
  scatter = function(x, _, d, all) return x:scatter(d, all, x:clone()) end,
  scatter_add = function(x, _, d, all) return x:scatter_add(d, all, x:clone()) end,
  prod = function(x, _, d, all) return x:scatter_reduce(d, all, x:clone(), "prod") end,
  amax = function(x, _, d, all) return x:scatter_reduce(d, all, x:clone(), "amax") end,
  amin = function(x, _, d, all) return x:scatter_reduce(d, all, x:clone(), "amin") end,
}

describe("in layouts of many dimensions, on a GPU #cuda", function()
  for _, dtype in ipairs(DTYPES) do
    on_gpu("copies, fills and conversions give the CPU's elements, " .. dtype, function()
      on_both(dtype, "contiguous", function(x, of) return of(x):contiguous() end)
      on_both(dtype, "fill", function(x, of) of(x):fill_(1) return x end)
      on_both(dtype, "copy", function(x, of)
        local y = x:clone()
        of(y):copy_(of(x:flip(6)))
        return y
      end)
      for _, other in ipairs(DTYPES) do
        on_both(dtype, "from " .. other, function(x, of)
          local y = ms.zeros_like(x, { dtype = other })
          of(y):copy_(of(x))
          return y, of(x):to(other)
        end)
      end
      on_both(dtype, "elementwise", function(x, of)
        local v = of(x)
        return v:eq(v:flip(1)), v:lt(1), ms.where(v:gt(0), v, v:flip(1)), v:masked_fill(v:eq(1), 0)
      end)
      on_both(dtype, "add", function(x, of) return of(x) + of(x:flip(1)) end)
    end)
    on_gpu("functions of whole tensors have the CPU's numbers, " .. dtype, function()
      for _, n in ipairs(all_cases and { 1, 7, 9, 10, 11, 12, 13, 14, 33, 40, 600, 5000 } or { 1, 600 }) do
        for skip = 1, 2 do
          for name, fn in pairs {
            nonzero = function(x) return x:nonzero() end,
            searchsorted = function(x)
              local sorted = x:sort()
              return sorted:searchsorted(x), sorted:searchsorted(x, { right = true })
            end,
            tril = function(x) return x:narrow(1, 1, math.floor(n / 7) * 7):reshape(-1, 7):tril(-1) end,
            triu = function(x) return x:reshape(1, -1):expand(5, n):triu(2) end,
            equal = function(x)
              local y = x:to "float32"
              local rows = x:expand(3, n)
              return ms.tensor { x:equal(x:clone()), x:equal(x:flip(1)), x:allclose(x), x:equal(y),
                y:allclose(x, { equal_nan = true }), x:allclose(y:narrow(1, 1, 1)), y:expand(3, n):equal(rows),
                rows:allclose(y:expand(3, n)), rows:allclose(rows, { equal_nan = true }),
                x:double():expand(3, n):allclose(rows, { equal_nan = true }), rows:equal(rows) }
            end,
            mixed = function(x)
              local y = ms.arange(0, n, { dtype = "float32", device = x.device })
              local one = x:narrow(1, 1, 1)
              return y + x, x * y, y - one, x:expand(5, n) + y, (x:expand(5, n):contiguous() * x), x * 2, one * y,
                y + one, one + y, y:add(one, { alpha = 2 }), y:add(x, { alpha = 2 }), x:expand(5, n):contiguous() + y
            end,
            ones = function(x) return ms.ones_like(x), ms.full({ n }, 3, { dtype = dtype, device = x.device }) end,
            arange = function(x)
              local y = ms.zeros({ n, 2 }, { dtype = dtype, device = x.device })
              local line = ms.arange(0, n, { dtype = dtype, device = x.device })
              y:select(2, 1):copy_(line)
              return y, line, ms.arange(0, n / 2, 0.5, { dtype = dtype, device = x.device })
            end,
            randint = function(x)
              ms.manual_seed(2)
              return ms.randint(0, 2, { n }, { dtype = dtype, device = x.device })
            end,
          } do
            local x, got = numbers({ n + 1 }, dtype), {}
            for k, device in ipairs { "cpu", "cuda" } do got[k] = results(x:to(device):narrow(1, skip, n), fn) end
            both_same(name .. " of " .. n, got, dtype)
          end
        end
      end
    end)
    on_gpu("products have the CPU's numbers, " .. dtype, function()
      for _, size in ipairs { { 3, 5, 2 }, { 70, 37, 67 }, { 1, 130, 4 } } do
        local m, k, n = unpack(size)
        local a, b = numbers({ 2, m, k }, dtype), numbers({ 2, k, n }, dtype)
        local c, line = numbers({ 2, m, n }, dtype), numbers({ n }, dtype)
        for turned = 0, 3 do
          local got = {}
          for at, device in ipairs { "cpu", "cuda" } do
            local x, y, z, w = a:to(device), b:to(device), c:to(device), line:to(device)
            if turned % 2 == 1 then x = x:transpose(2, 3):contiguous():transpose(2, 3) end
            if turned >= 2 then y = y:transpose(2, 3):contiguous():transpose(2, 3) end
            got[at] = results(x, function()
              return x:matmul(y), z:baddbmm(x, y), BOUNDS[dtype] and F.linear(x, y:select(1, 1):t(), w) or x,
                BOUNDS[dtype] and F.gelu_mlp(x * 0.1, y:select(1, 1):t() * 0.1, w, y:select(1, 2) * 0.1) or x
            end)
          end
          local what = ("products of %d x %d x %d, %d"):format(m, k, n, turned)
          both_same(what, got, dtype)
        end
      end
    end)
    for name, fn in pairs(POSITIONS) do
      on_gpu(("%s has the CPU's numbers in %s"):format(name, dtype), function()
        local shapes = { { 3, 70 }, { 5, 2100 }, { 3, 4, 3, 2 }, { 70, 3 }, { 2100, 5 } }
        for n = 1, all_cases and #shapes or 3 do
          local shape = shapes[n]
          for _, id in ipairs { "int64", "int32" } do
            for layout, of in pairs {
              dense = function(x) return x end,
              transposed = function(x) return x:dim() == 2 and x:t() or x:permute(4, 3, 1, 2) end,
              offset = function(x) return x:size(2) > 4 and x:narrow(2, 2, x:size(2) - 1) or x end,
            } do
              ms.scope(function()
                local x = numbers(shape, dtype)
                for d = 1, 2 do
                  local size, got = of(x):size(d), {}
                  local ids = ms.randint(0, math.min(size, of(x):size(2)), { 30 }):to(id)
                  local all = ms.randint(0, size, of(x).shape):to(id)
                  for k, device in ipairs { "cpu", "cuda" } do
                    got[k] = results(of(x:to(device)), function(t) return fn(t, ids:to(device), d, all:to(device)) end)
                  end
                  local what = ("%s of %s, %s, dimension %d"):format(name, table.concat(shape, " x "), layout, d)
                  both_same(what, got, dtype)
                end
              end)
            end
          end
        end
      end)
    end
  end
end)

-- Functions of rows x of n numbers, with weights w and b of n numbers, ids of columns and the gradient's shape.
local ROWS = {
  layer_norm = function(x, w, b, n) return F.layer_norm(x, { n }, w, b) end,
  ["layer_norm without weights"] = function(x, _, _, n) return F.layer_norm(x, { n }) end,
  ["layer_norm of a sum"] = function(x, w, b, n) return (F.layer_norm(x, { n }, w, b, { residual = x * 2 })) end,
  rms_norm = function(x, w, _, n) return F.rms_norm(x, { n }, w) end,
  batch_norm = function(x, w, b) return F.batch_norm(x, nil, nil, w, b, { training = true }) end,
  ["cross_entropy of rows"] = function(x, _, _, _, ids) return F.cross_entropy(x, ids, { reduction = "none" }) end,
  ["cross_entropy without a class"] = function(x, w, _, _, ids)
    return F.cross_entropy(x, ids, { weight = w:detach():abs(), ignore_index = 1, label_smoothing = 0.1 })
  end,
  ["sum of cross_entropy"] = function(x, _, _, _, ids)
    return F.cross_entropy(x, ids, { reduction = "sum", ignore_index = 1 })
  end,
  linear_cross_entropy = function(x, w, b, _, ids)
    return F.linear_cross_entropy(x, ms.stack({ w, b, w * 2 }), ids:remainder(3))
  end,
  softmax = function(x) return F.softmax(x, 2) end,
  log_softmax = function(x) return F.log_softmax(x, 1) end,
  gelu = function(x) return F.gelu(x, { approximate = "tanh" }) end,
  mse_loss = function(x) return F.mse_loss(x, x:flip(1)) end,
  ["squares of mse_loss"] = function(x) return F.mse_loss(x, x:flip(2), { reduction = "none" }) end,
  embedding = function(x, _, _, _, _, places) return F.embedding(places, x) end,
  rotary = function(x, _, _, n)
    if n % 2 == 1 then x = x:narrow(2, 1, n - 1) end
    return F.rotary_embedding(x:reshape(1, x:size(1), 1, -1))
  end,
  ["rotary of normalized rows"] = function(x, w, _, n)
    local kind = x.dtype == "float64" and "float64" or "float32"
    local angles = ms.arange(0, math.floor(n / 2), { dtype = kind }):unsqueeze(1)
    return ops.rotary(x:reshape(1, -1, 1, n), angles:cos():to(x.device), angles:sin():to(x.device), w, 1e-6)
  end,
}

describe("rows of numbers, on a GPU #cuda", function()
  for name, fn in pairs(ROWS) do
    for dtype in pairs(BOUNDS) do
      on_gpu(("%s and its gradients are the CPU's in %s"):format(name, dtype), function()
        -- Rows and whole tensors end at each place of a pack of 8 numbers.
        local shapes = { { 3, 6 }, { 33, 40 }, { 70, 266 }, { 3, 9 }, { 3, 10 }, { 3, 11 }, { 3, 12 }, { 3, 13 },
          { 3, 15 }, { 1100, 24 }, { 2, 2100 }, { 2, 9000 } }
        for k = 1, all_cases and #shapes or 3 do
          for skip = 1, all_cases and 2 or 1 do
            local m, n = unpack(shapes[k])
            local x, w = ms.randn { m, n + skip - 1 }, ms.randn { 2, n + skip - 1 }
            local ids, places, g, got = ms.randint(0, n, { m }), ms.randint(0, m, { 50 }), nil, {}
            for at, device in ipairs { "cpu", "cuda" } do
              local function leaf(t) return t:to(dtype):to(device):narrow(-1, skip, n):detach():requires_grad_(true) end
              local rows, weights, bias = leaf(x), leaf(w:select(1, 1)), leaf(w:select(1, 2))
              got[at] = results(rows, function()
                local y = fn(rows, weights, bias, n, ids:to(device), places:to(device))
                g = g or ms.randn(y.shape)
                y:backward(g:to(dtype):to(device))
                return y:detach(), rows.grad, weights.grad or y:detach(), bias.grad or y:detach()
              end)
            end
            local what = ("%s of %d x %d, from %d"):format(name, m, n, skip)
            both_same(what, got, dtype)
          end
        end
      end)
    end
  end
end)
