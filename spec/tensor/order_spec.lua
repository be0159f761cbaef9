-- SPDX-License-Identifier: MIT
--- Sorting and searching of many elements, of every dtype and layout, compared with Lua's own sort and plain loops.
local ms = require "moonshard"
local raises = require "spec.support.raises"

local nan = 0 / 0
local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

-- The positions that sort a list, stable, nan last; or from the largest on.
local function order_of(list, descending)
  local at = {}
  for k = 1, #list do at[k] = k end
  local function rank(v) return v ~= v and math.huge or v, v ~= v and 1 or 0 end
  table.sort(at, function(a, b)
    local x, x_nan = rank(list[a])
    local y, y_nan = rank(list[b])
    if x ~= y then return (x < y) ~= descending end
    if x_nan ~= y_nan then return (x_nan < y_nan) ~= descending end
    return a < b
  end)
  return at
end

local function check(x, d, descending, k)
  local values, at = x:sort(d, { descending = descending })
  local most, places
  if k then most, places = x:topk(k, d, { largest = descending }) end
  local n = x:size(d)
  local moved = x:transpose(d, -1):contiguous():double():cpu():reshape(-1, n)
  values = values:transpose(d, -1):contiguous():double():cpu():reshape(-1, n)
  at = at:transpose(d, -1):contiguous():cpu():reshape(-1, n)
  if k then
    most = most:transpose(d, -1):contiguous():double():cpu():reshape(-1, k)
    places = places:transpose(d, -1):contiguous():cpu():reshape(-1, k)
  end
  for row = 1, moved:size(1) do
    local list, v, p = moved[row]:tolist(), values[row]:tolist(), at[row]:tolist()
    local m, q = k and most[row]:tolist(), k and places[row]:tolist()
    for i, from in ipairs(order_of(list, descending)) do
      local same = v[i] == list[from] or (v[i] ~= v[i] and list[from] ~= list[from])
      if not same or p[i] ~= from - 1 then
        error(("row %d, element %d: %g at %d, expected %g at %d"):format(row, i, v[i], p[i], list[from], from - 1), 0)
      end
      if k and i <= k and (q[i] ~= from - 1 or m[i] ~= list[from] and m[i] == m[i]) then
        error(("row %d, %d of topk: %g at %d, expected %g at %d"):format(row, i, m[i], q[i], list[from], from - 1), 0)
      end
    end
  end
end

local devices = { "cpu" }
if ms.cuda.is_available() then devices[2] = "cuda" end

-- Numbers of a dtype, with equal ones; floats with nan, infinities and both zeros.
local function numbers(dtype, n)
  ms.manual_seed(n)
  if dtype == "bool" then return ms.rand(n):gt(0.5) end
  if dtype == "int64" then return ms.randint(-2 ^ 40, 2 ^ 40, { n }) end
  if not dtype:find "float" then return ms.randint(0, 100, { n }, { dtype = dtype }) end
  local x = (ms.randn(n) * 1000):to(dtype)
  for k, v in ipairs { nan, math.huge, -math.huge, 0, -0.0, nan, 5, 5 } do
    if k * 3 <= n then x[k * 3] = v end
  end
  return x
end

for _, device in ipairs(devices) do
  describe("sort and topk on " .. device, function()
    for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
      "bool" } do
      local known = pcall(ms.zeros, 1, { dtype = dtype })
      if known then
        for _, n in ipairs { 1, 2, 17, 600, 5000 } do
          it(("order %d elements of %s, stable, nan last"):format(n, dtype), function()
            for _, descending in ipairs { false, true } do
              check(numbers(dtype, n):to(device), 1, descending, math.min(n, 40))
            end
          end)
        end
      end
    end

    it("take lines of any dimension and strides", function()
      local x = numbers("float32", 4 * 30 * 7):reshape(4, 30, 7):to(device)
      for d = 1, 3 do
        check(x, d, true, 3)
        check(x:transpose(1, 3), d, false, 2)
        check(x[{ {}, { 2, 29, step = 3 } }], d, true, 1)
      end
    end)

    it("keep the order of a line of equal elements", function()
      check(ms.ones(3000, { device = device }), 1, false, 7)
      check(ms.ones(3000, { dtype = "int64", device = device }), 1, true, 7)
    end)

    it("take nothing", function()
      local v, at = ms.zeros(0, 3, { device = device }):sort(1)
      assert.are.same({ 0, 3 }, { v:size(1), at:size(2) })
      v, at = ms.zeros(4, 3, { device = device }):topk(0, 2)
      assert.are.same({ 4, 0, 0 }, { v:size(1), v:size(2), at:numel() })
    end)

    it("order nearly sorted and reversed lines, whose best elements come last", function()
      check(ms.arange(9000):to(device), 1, true, 5)
      check(ms.arange(9000):flip(1):float():to(device), 1, false, 5)
    end)
  end)

  describe("nonzero and masks on " .. device, function()
    it("find every element of large tensors", function()
      ms.manual_seed(3)
      local x = ms.rand(40000, { device = device }):gt(0.7)
      local expected = {}
      for k, v in ipairs(x:tolist()) do
        if v then expected[#expected + 1] = k - 1 end
      end
      assert.are.same(expected, x:nonzero():squeeze(2):tolist())
      local y = ms.arange(40000, { device = device })
      assert.are.same(expected, y[x]:tolist())
      y[x] = -1
      assert.are.equal(#expected, y:eq(-1):sum():item())
    end)
  end)

  describe("scans on " .. device, function()
    it("of long lines give the results of a loop", function()
      ms.manual_seed(5)
      local x = (ms.rand(2, 3000, { dtype = "float64" }) + 0.5):to(device)
      local list = x:tolist()
      local best, at = x:cummax(2)
      local product, logs = x:cumprod(2):tolist(), x:logcumsumexp(2):tolist()
      best, at = best:tolist(), at:tolist()
      for row = 1, 2 do
        local p, s, m, k = 1, 0, -1, 0
        for n, v in ipairs(list[row]) do
          p, s = p * v, s + math.exp(v)
          if v >= m then m, k = v, n - 1 end
          assert.are.equal(m, best[row][n])
          assert.are.equal(k, at[row][n])
          assert.is_true(math.abs(product[row][n] - p) <= 1e-11 * p)
          assert.is_true(math.abs(logs[row][n] - math.log(s)) <= 1e-12 * math.log(s) + 1e-12)
        end
      end
    end)

    it("of long lines have the gradients that the CPU's have", function()
      for _, name in ipairs { "cumprod", "logcumsumexp", "cummax", "cummin" } do
        ms.manual_seed(6)
        local a = ms.rand(3, 400, { dtype = "float64" }) + 0.5
        local g = ms.randn(3, 400, { dtype = "float64" })
        local x, y = a:clone():requires_grad_(true), a:to(device):clone():detach():requires_grad_(true);
        (x[name](x, 2)):backward(g);
        (y[name](y, 2)):backward(g:to(device))
        ms.testing.assert_close(x.grad, y.grad:cpu(), { rtol = 1e-9, atol = 1e-9 })
      end
    end)

    it("keep nan, and infinities", function()
      local x = ms.tensor({ 1, nan, 3 }, { device = device })
      local v, at = x:cummax()
      assert.are.same({ false, true, true }, v:isnan():tolist())
      assert.are.same({ 0, 1, 1 }, at:tolist())
      local y = ms.tensor({ -math.huge, -math.huge, 0, math.huge, 1 }, { device = device }):logcumsumexp():tolist()
      assert.are.same({ -math.huge, -math.huge, 0, math.huge, math.huge }, y)
    end)
  end)
end

describe("sort on several threads", function()
  it("gives what one thread gives, for a long line and for many", function()
    local threads = ms.num_threads()
    finally(function() ms.set_num_threads(threads) end)
    ms.manual_seed(9)
    for _, x in ipairs { ms.randn(200000), ms.randn(150000):double(), ms.randint(0, 50, { 200000 }),
      ms.randn(300, 700) } do
      ms.set_num_threads(1)
      local v, at = x:sort(-1, { descending = true })
      local top, top_at = x:topk(20)
      ms.set_num_threads(3)
      local w, bt = x:sort(-1, { descending = true })
      local top3, top3_at = x:topk(20)
      assert.is_true(v:equal(w) and at:equal(bt) and top:equal(top3) and top_at:equal(top3_at))
      assert.is_true(x:gather(-1, at):equal(v))
      assert.is_true(v[{ "...", { 1, 20 } }]:equal(top))
      ms.set_num_threads(threads)
    end
  end)
end)

describe("searches", function()
  it("agree with counting, in every dtype", function()
    for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8" } do
      ms.manual_seed(2)
      local edges = ms.randint(0, 60, { 30 }, { dtype = dtype }):sort()
      local x = ms.randint(0, 60, { 500 }, { dtype = dtype })
      local below = edges:unsqueeze(1):lt(x:unsqueeze(2)):sum(2)
      local upto = edges:unsqueeze(1):le(x:unsqueeze(2)):sum(2)
      assert.is_true(edges:searchsorted(x):equal(below))
      assert.is_true(x:bucketize(edges, { right = true }):equal(upto))
      assert.is_true(edges:searchsorted(x, { side = "right", out_int32 = true }):equal(upto:int()))
      local shuffled = edges:flip(1)
      assert.is_true(shuffled:searchsorted(x, { sorter = shuffled:argsort() }):equal(below))
    end
    assert.are.equal(2, ms.tensor { 1, 2, 3 }:searchsorted(2.5):item())
  end)
end)

describe("wrong arguments of order", function()
  for _, case in ipairs {
    { function(x) x:topk(7) end, "topk: k is 7, expected 0 to 4, the size of dimension 2 of float32 [3, 4] cpu" },
    { function(x) x:topk(-1) end, "topk: k is a number (-1), expected a whole number from 0" },
    { function(x) x:kthvalue(5) end, "kthvalue: k is a number (5), expected a whole number from 1 to 4" },
    { function(x) x:sort(3) end,
      "sort: dimension 3 is out of range for a tensor of 2 dimensions (expected -2 to 2 except 0)" },
    { function(x) x:quantile(1.5) end,
      "quantile: q is a number (1.5), expected a number from 0 to 1 or a tensor of them" },
    { function(x) x:long():quantile(0.5) end, "quantile: the tensor is int64 [3, 4], expected float32 or float64" },
    { function(x) x:bucketize(ms.zeros(2, 2)) end,
      "bucketize: the boundaries have shape [2, 2], expected one dimension" },
    { function(x) ms.zeros(3):searchsorted(x:long()) end,
      "searchsorted: boundaries and numbers must have the same dtype, got float32 [3] cpu and int64 [3, 4] cpu" },
    { function(x) x[{ { 2, 5 } }] = 0 end, "index: positions 2 to 5 are not a range of dimension 1, which has size 3" },
    { function(x) return x[{ 4 }] end, "index: position 4 is not inside dimension 1 (expected 1 to 3, or -1 to -3)" },
    { function(x) return x[{ {}, 1, 1 }] end, "index: entries for 3 dimensions, but the tensor has 2, shape [3, 4]" },
    { function(x) return x[ms.tensor { true }] end,
      "index: the mask has shape [1], expected the sizes of the tensor, [3, 4], from dimension 1 on" },
    { function(x) return x[x] end,
      "index: the tensor for dimension 1 is float32 [3, 4], expected bool (a mask) or int64 (positions from 0)" },
    { function(x) return x[{ ids { 0, 3 }, ids { 0, 0 } }] end,
      "index: position 3 is not inside dimension 1 (positions in tensors count from 0: expected 0 to 2)" },
    { function(x) return x[{ { 1, 2, 3 } }] end,
      "index: the entry for dimension 1 has 3 elements, expected { first, last }; to select single positions write { at = { … } }" },
    { function(x) x[{ 1 }] = ms.zeros(3) end,
      "index: the value has shape [3], which does not broadcast to the shape of the indexed part, [4]" },
    { function(x) x[{ 1 }] = "a" end, "index: value is a string ('a'), expected a number or a tensor" },
    { function(x) return x[true] end,
      "index: key is a boolean (true), expected a position, a list of positions and ranges, or a tensor" },
    { function(x) x:index_add(1, ids { 0 }, ms.zeros(2, 4)) end,
      "index_add: the source is float32 [2, 4], expected float32 [1, 4]" },
    { function(x) x:masked_scatter(x:gt(-1), ms.zeros(2)) end,
      "masked_scatter: the size of the source is 2, expected at least 12, the number of true elements of the mask" },
  } do
    it("are errors: " .. case[2], function() raises(case[2], case[1], ms.zeros(3, 4)) end)
  end
end)

describe("parts of a tensor", function()
  it("are views for numbers and ranges", function()
    local x = ms.arange(12):reshape(3, 4)
    local part = x[{ { 2, 3 }, { 1, 4, step = 2 } }]
    part:fill_(-1)
    assert.are.same({ { 0, 1, 2, 3 }, { -1, 5, -1, 7 }, { -1, 9, -1, 11 } }, x:tolist())
    assert.are.equal(7, x[{ 2, -1 }]:item())
    assert.are.same({ 1, 5, 9 }, x[{ "...", 2 }]:tolist())
    assert.are.same({ 0, 4 }, { x[{ { 3, 2 } }]:size(1), x[{ { 3, 2 } }]:size(2) })
  end)

  it("are written through views, in any order of dimensions", function()
    local x = ms.zeros(3, 4, 5)
    local y = x:permute(3, 1, 2)
    y[{ ids { 0, 4 }, {}, { at = { 1, -1 } } }] = ms.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
    assert.are.same({ { 1, 2, 3 }, { 4, 5, 6 } }, y[{ ids { 0, 4 }, {}, ids { 0, 3 } }]:tolist())
    assert.are.equal(21, x:sum():item())
    y[y:eq(0)] = 1
    assert.are.equal(21 + 54, x:sum():item())
    local z = ms.zeros(4, 3)
    z:t()[ms.eye(3, 4):eq(1)] = ms.tensor { 1, 2, 3 }
    assert.are.same({ { 1, 0, 0 }, { 0, 2, 0 }, { 0, 0, 3 }, { 0, 0, 0 } }, z:tolist())
  end)

  it("take bools, other dtypes and a value of one element", function()
    local x = ms.zeros(2, 2, { dtype = "bool" })
    x[{ 1 }] = true
    assert.are.same({ { true, true }, { false, false } }, x:tolist())
    local y = ms.zeros(2, 2)
    y[x] = ids { 3 }
    y[{ { at = { 2 } } }] = ids { 4, 5 }
    assert.are.same({ { 3, 3 }, { 4, 5 } }, y:tolist())
  end)

  it("refuse a recorded change of a leaf", function()
    local x = ms.zeros(3, { requires_grad = true })
    assert.is_false(pcall(function() x[x:detach():eq(0)] = 1 end))
    ms.no_grad(function() x[x:eq(0)] = 1 end)
    assert.are.equal(3, x:sum():item())
  end)
end)

describe("cumsum and argmax", function()
  it("sum along any dimension as along the last, in every layout", function()
    for _, shape in ipairs { { 3, 5 }, { 7, 1 }, { 1, 9 }, { 5, 1030 }, { 2, 600, 3 }, { 4, 3, 2, 5 } } do
      local whole = ms.randn(unpack(shape)):mul(10)
      for _, dtype in ipairs { "float32", "float64", "bfloat16", "int64" } do
        for _, x in ipairs { whole:to(dtype), whole:to(dtype):transpose(1, 2) } do
          for d = 1, #shape do
            local last = x:transpose(d, #shape):contiguous():cumsum(#shape):transpose(d, #shape)
            assert.is_true(x:cumsum(d):equal(last), ("%s, dimension %d"):format(dtype, d))
          end
        end
      end
    end
  end)

  it("find the first largest element and the first NaN at every position", function()
    for n = 1, 200, 7 do
      local high, undefined = ms.zeros(n, n), ms.zeros(n, n)
      for k = 1, n do
        high[{ k, { k, -1 } }] = 1
        undefined[{ k, { k, -1 } }] = 0 / 0
      end
      local expected = {}
      for k = 1, n do expected[k] = k - 1 end
      assert.are.same(expected, high:argmax(2):tolist())
      assert.are.same(expected, undefined:argmax(2):tolist())
      assert.are.same(expected, (-high):double():argmin(2):tolist())
    end
  end)
end)
