-- SPDX-License-Identifier: MIT
--- Steps for spec/support/walk.lua: functions along a dimension, and functions of several tensors that are not computed
--- element by element, with the plain loops that they are compared with.
local ffi = require "ffi"
local ms = require "moonshard"
local walk = require "spec.support.walk"

local F = ms.nn.F
local inf, nan, abs, exp, log = math.huge, 0 / 0, math.abs, math.exp, math.log
local pick, below, shape, text = walk.pick, walk.below, walk.shape, walk.text
local broadcast, two_shapes = walk.broadcast, walk.two_shapes

local ALL = { "float32", "float64", "float16", "bfloat16" }
local WHOLE = { "int8", "int16", "int32", "int64", "uint8" }

local function larger(a, b) return (a ~= a or a > b) and a or b end
local function smaller(a, b) return (a ~= a or a < b) and a or b end

-- ---- functions along a dimension -----------------------------------------------------------------------

local function less(a, b) return a < b or b ~= b and a == a end          -- nan is above all numbers

local function sorted(list, descending)
  local order = {}
  for k = 1, #list do order[k] = k end
  table.sort(order, function(i, j)
    local a, b = list[i], list[j]
    if descending then a, b = b, a end
    if less(a, b) then return true elseif less(b, a) then return false end
    return i < j
  end)
  local out = {}
  for k, i in ipairs(order) do out[k] = list[i] end
  return out, order
end

local function sum(list)
  local s = 0
  for _, x in ipairs(list) do s = s + x end
  return s
end
local function extreme(list, better)
  local at = 1
  for k = 2, #list do
    if list[at] == list[at] and (list[k] ~= list[k] or better(list[k], list[at])) then at = k end
  end
  return list[at], at
end
local function above(a, b) return a > b end
local function under(a, b) return a < b end
local function largest(list) return (extreme(list, above)) end
local function running(list, step)
  local out = {}
  for k, x in ipairs(list) do out[k] = k == 1 and x or step(out[k - 1], x) end
  return out
end
local function without_nan(list)
  local out = {}
  for _, x in ipairs(list) do if x == x then out[#out + 1] = x end end
  return out
end
local function log_sum_exp(list)
  local most = largest(list) or -inf
  if abs(most) == inf then return most end
  local s = 0
  for _, x in ipairs(list) do s = s + exp(x - most) end
  return most + log(s)
end
local function softmax(list)
  local most, s, out = largest(list), 0, {}
  for k, x in ipairs(list) do out[k] = exp(x - most) s = s + out[k] end
  for k in ipairs(list) do out[k] = out[k] / s end
  return out
end
local function variance(list, correction)
  local mean, s = sum(list) / #list, 0
  for _, x in ipairs(list) do s = s + (x - mean) ^ 2 end
  return s / math.max(0, #list - (correction or 1))
end
local function p_norm(p)
  return function(list)
    local s = 0
    for _, x in ipairs(list) do
      if p == 0 then s = s + (x ~= 0 and 1 or 0) else s = s + abs(x) ^ p end
    end
    return p == 0 and s or s ^ (1 / p)
  end
end
local function of_abs(list)
  local out = {}
  for k, x in ipairs(list) do out[k] = abs(x) end
  return out
end

-- name -> { loop over the list, call(t, dim), near, off, options }. The loop returns a number, or a list as long as its
-- argument. off: an allowance for cancellation, in parts of the sum of all |x|. needs: least number of elements.
-- whole: the result is a position. tame: without special values.
local along = {
  sum = { sum, function(t, d) return t:sum(d) end, 8, 1 },
  mean = { function(list) return sum(list) / #list end, function(t, d) return t:mean(d) end, 8, 1 },
  prod = { function(list)
    local p = 1
    for _, x in ipairs(list) do p = p * x end
    return p
  end, function(t, d) return t:prod(d) end, 16, 0, tame = true },
  nansum = { function(list) return sum(without_nan(list)) end, function(t, d) return t:nansum(d) end, 8, 1 },
  nanmean = { function(list) return sum(without_nan(list)) / #without_nan(list) end,
    function(t, d) return t:nanmean(d) end, 8, 1 },
  amax = { largest, function(t, d) return t:amax(d) end, needs = 1 },
  amin = { function(list) return (extreme(list, under)) end, function(t, d) return t:amin(d) end, needs = 1 },
  max = { largest, function(t, d) return (t:max(d)) end, needs = 1 },
  min = { function(list) return (extreme(list, under)) end, function(t, d) return (t:min(d)) end, needs = 1 },
  ["the place of max"] = { function(list) return select(2, extreme(list, above)) - 1 end,
    function(t, d) return (select(2, t:max(d))) end, needs = 1 },
  argmax = { function(list) return select(2, extreme(list, above)) - 1 end,
    function(t, d) return t:argmax(d) end, needs = 1 },
  argmin = { function(list) return select(2, extreme(list, under)) - 1 end,
    function(t, d) return t:argmin(d) end, needs = 1 },
  any = { function(list)
    for _, x in ipairs(list) do if x ~= 0 then return true end end
    return false
  end, function(t, d) return t:bool():any(d) end },
  all = { function(list)
    for _, x in ipairs(list) do if x == 0 then return false end end
    return true
  end, function(t, d) return t:bool():all(d) end },
  count_nonzero = { p_norm(0), function(t, d) return t:count_nonzero(d) end },
  ["norm 1"] = { p_norm(1), function(t, d) return t:norm(1, d) end, 8 },
  ["norm 2"] = { p_norm(2), function(t, d) return t:norm(2, d) end, 8, tame = true },
  ["norm 3"] = { p_norm(3), function(t, d) return t:norm(3, d) end, 16, tame = true },
  ["norm 0"] = { p_norm(0), function(t, d) return t:norm(0, d) end },
  ["norm inf"] = { function(list) return largest(of_abs(list)) end, function(t, d) return t:norm(inf, d) end, needs = 1 },
  ["norm -inf"] = { function(list) return (extreme(of_abs(list), under)) end,
    function(t, d) return t:norm(-inf, d) end, needs = 1 },
  var = { variance, function(t, d) return t:var(d) end, 16, 1, tame = true, needs = 2 },
  std = { function(list) return math.sqrt(variance(list, 0)) end,
    function(t, d) return t:std(d, { correction = 0 }) end, 16, 1, tame = true, needs = 1 },
  logsumexp = { log_sum_exp, function(t, d) return t:logsumexp(d) end, 8, 1 },
  softmax = { softmax, function(t, d) return t:softmax(d) end, 100 },
  log_softmax = { function(list)
    local all, most, out = 0, largest(list), {}
    for _, x in ipairs(list) do all = all + exp(x - most) end
    for k, x in ipairs(list) do out[k] = x - most - log(all) end
    return out
  end, function(t, d) return t:log_softmax(d) end, 8, 1 },
  cumsum = { function(list) return running(list, function(a, b) return a + b end) end,
    function(t, d) return t:cumsum(d) end, 16, 1 },
  cumprod = { function(list) return running(list, function(a, b) return a * b end) end,
    function(t, d) return t:cumprod(d) end, 16, 0, tame = true },
  cummax = { function(list) return running(list, larger) end, function(t, d) return (t:cummax(d)) end },
  cummin = { function(list) return running(list, smaller) end, function(t, d) return (t:cummin(d)) end },
  sort = { sorted, function(t, d) return (t:sort(d)) end },
  ["sort descending"] = { function(list) return sorted(list, true) end,
    function(t, d) return (t:sort(d, { descending = true })) end },
  median = { function(list)
    if #without_nan(list) < #list then return nan end
    return sorted(list)[math.floor((#list + 1) / 2)]
  end, function(t, d) return (t:median(d)) end, needs = 1 },
  nanmedian = { function(list)
    list = without_nan(list)
    return sorted(list)[math.floor((#list + 1) / 2)] or nan
  end, function(t, d) return (t:nanmedian(d)) end, needs = 1 },
  kthvalue = { function(list) return sorted(list)[1] end, function(t, d) return (t:kthvalue(1, d)) end, needs = 1 },
  topk = { function(list) return sorted(list, true)[1] end,
    function(t, d) return (t:topk(1, d)):squeeze(d) end, needs = 1 },
  flip = { function(list)
    local out = {}
    for k = 1, #list do out[k] = list[#list + 1 - k] end
    return out
  end, function(t, d) return t:flip(d) end },
}

-- Calls visit(list, base, stride) for every list of t's values along dimension d.
local function lists_along(values, sizes, d, visit)
  local inner, n = 1, sizes[d] or 1
  for k = d + 1, #sizes do inner = inner * sizes[k] end
  local outer = 1
  for k = 1, d - 1 do outer = outer * sizes[k] end
  for o = 0, outer - 1 do
    for i = 0, inner - 1 do
      local list = {}
      for k = 0, n - 1 do list[k + 1] = values[(o * n + k) * inner + i + 1] end
      visit(list, (o * n) * inner + i, inner, o * inner + i + 1)
    end
  end
end

local function step_along(name, f, dtypes)
  return { name, function()
    local dtype, sizes = pick(dtypes or ALL), shape()
    local t, values = walk.tensor(dtype, sizes, f.tame)
    local d = 1 + below(math.max(#sizes, 1))
    if (sizes[d] or 1) < (f.needs or 0) then return nil end
    local want, off = {}, 0
    for _, x in ipairs(values) do if abs(x) < inf then off = off + abs(x) end end
    lists_along(values, sizes, d, function(list, base, stride, at)
      local result = f[1](list)
      if type(result) == "table" then
        for k, x in ipairs(result) do want[base + (k - 1) * stride + 1] = x end
      else
        want[at] = result
      end
    end)
    local got = f[2](t, d)
    return walk.differs(walk.flat(got), want, got.dtype, f[3] or 2, (f[4] or 0) * off),
      ("along %d of %s"):format(d, text(t))
  end }
end

-- ---- whole numbers along a dimension ----------------------------------------------------------------------

local function exactly(step, first)
  return function(list)
    local s = first
    for _, x in ipairs(list) do s = step(s, ffi.cast("int64_t", x)) end
    return s
  end
end
local function add(a, b) return a + b end
local function times(a, b) return a * b end

local whole_along = {
  sum = { exactly(add, 0LL), function(t, d) return t:sum(d) end },
  prod = { exactly(times, 1LL), function(t, d) return t:prod(d) end },
  max = { largest, function(t, d) return (t:max(d)) end, needs = 1 },
  min = { function(list) return (extreme(list, under)) end, function(t, d) return (t:min(d)) end, needs = 1 },
  argmax = { along.argmax[1], function(t, d) return t:argmax(d) end, needs = 1 },
  argmin = { along.argmin[1], function(t, d) return t:argmin(d) end, needs = 1 },
  any = { along.any[1], function(t, d) return t:any(d) end }, all = { along.all[1], function(t, d) return t:all(d) end },
  cumsum = { function(list)
    local out, s = {}, 0LL
    for k, x in ipairs(list) do
      s = s + ffi.cast("int64_t", x)
      out[k] = s
    end
    return out
  end, function(t, d) return t:cumsum(d) end },
  cummax = { along.cummax[1], along.cummax[2] },
  sort = { sorted, along.sort[2] }, median = { along.median[1], along.median[2], needs = 1 },
  topk = { along.topk[1], along.topk[2], needs = 1 },
}

local function step_of_wholes_along(name, f)
  local step = step_along(name, f, WHOLE)
  return { name .. " of whole numbers", step[2] }
end

-- ---- others ---------------------------------------------------------------------------------------------

-- name -> a step. Each makes its inputs and returns as a step does.
local others = {}

function others.where()
  local dtype, sizes, a_sizes, b_sizes = pick(ALL), two_shapes()
  local a, x = walk.tensor(dtype, a_sizes)
  local b, y = walk.tensor(dtype, b_sizes)
  local mask, m = walk.tensor("bool", walk.narrower(sizes))
  local want = {}
  broadcast(sizes, { a_sizes, b_sizes, mask.shape }, function(k, i, j, l)
    if m[l] then want[k] = x[i] else want[k] = y[j] end
  end)
  return walk.differs(walk.flat(ms.where(mask, a, b)), want, dtype), text(mask) .. text(a) .. text(b)
end

function others.masked_fill()
  local sizes = shape()
  local t, x = walk.tensor("float32", sizes)
  local mask, m = walk.tensor("bool", walk.narrower(sizes))
  local want, v = {}, pick { 2, inf, nan, -0.5 }
  broadcast(sizes, { sizes, mask.shape }, function(k, i, l) want[k] = m[l] and v or x[i] end)
  return walk.differs(walk.flat(t:masked_fill(mask, v)), want, "float32"), text(mask) .. text(t)
end

others["masked_fill with a large whole number"] = function()
  local v = pick { 9007199254740993LL, -4611686018427387905LL }
  local t, x = walk.tensor("int64", { 1 + below(4) })
  local mask, m = walk.tensor("bool", t.shape)
  local want = {}
  for k in ipairs(x) do
    if m[k] then want[k] = v else want[k] = x[k] end
  end
  t:masked_fill_(mask, ms.tensor(v))
  return walk.differs(walk.flat(t), want, "int64"), text(mask) .. text(t)
end

function others.lerp()
  local dtype, sizes, a_sizes, b_sizes = pick(ALL), two_shapes()
  local a, x = walk.tensor(dtype, a_sizes, true)
  local b, y = walk.tensor(dtype, b_sizes, true)
  local want, largest_of_all = {}, 0
  broadcast(sizes, { a_sizes, b_sizes }, function(k, i, j)
    want[k] = x[i] + 0.25 * (y[j] - x[i])
    largest_of_all = math.max(largest_of_all, abs(x[i]), abs(y[j]))
  end)
  return walk.differs(walk.flat(a:lerp(b, 0.25)), want, dtype, 4, largest_of_all), text(a) .. text(b)
end

function others.matmul()
  local dtype, n, m, k = pick(ALL), below(5), below(5), below(5)
  local a, x = walk.tensor(dtype, { n, k })
  local b, y = walk.tensor(dtype, { k, m })
  local want, off = {}, 0
  for i = 0, n - 1 do
    for j = 0, m - 1 do
      local s = 0
      for l = 0, k - 1 do
        local p = x[i * k + l + 1] * y[l * m + j + 1]
        s = s + p
        if abs(p) < inf then off = off + abs(p) end
      end
      want[i * m + j + 1] = s
    end
  end
  -- Sums of products beyond the largest float32 depend on their order.
  for at, v in ipairs(want) do if off > 1e38 and v == v then want[at] = walk.ANY end end
  return walk.differs(walk.flat(a:matmul(b)), want, dtype, 8, off), text(a) .. text(b)
end

function others.index_select()
  local n, m = below(5), 1 + below(4)
  local t, x = walk.tensor("bfloat16", { m, n })
  local ids, want = {}, {}
  for k = 1, below(6) do
    ids[k] = below(m)
    for j = 1, n do want[(k - 1) * n + j] = x[ids[k] * n + j] end
  end
  return walk.differs(walk.flat(t:index_select(1, ms.tensor(ids, { dtype = "int64" }))), want, "bfloat16"), text(t)
end

function others.gather()
  local n, m = 1 + below(5), 1 + below(4)
  local t, x = walk.tensor("float16", { m, n })
  local rows, want = {}, {}
  for i = 1, m do
    rows[i] = {}
    for j = 1, 3 do
      rows[i][j] = below(n)
      want[#want + 1] = x[(i - 1) * n + rows[i][j] + 1]
    end
  end
  return walk.differs(walk.flat(t:gather(2, ms.tensor(rows, { dtype = "int64" }))), want, "float16"), text(t)
end

function others.scatter_add()
  local n, ids, want, off = 1 + below(5), {}, {}, 0
  local t, x = walk.tensor("float32", { n })
  local source, y = walk.tensor("float32", { below(6) })
  for k, v in ipairs(x) do want[k] = v end
  for k, v in ipairs(y) do
    ids[k] = below(n)
    want[ids[k] + 1] = want[ids[k] + 1] + v
    if abs(v) < inf then off = off + abs(v) end
  end
  for _, v in ipairs(x) do if abs(v) < inf then off = off + abs(v) end end
  local got = t:scatter_add(1, ms.tensor(ids, { dtype = "int64" }), source)
  return walk.differs(walk.flat(got), want, "float32", 8, off),
    text(t) .. text(source)
end

function others.unique()
  local dtype = pick(ALL)
  local t, x = walk.tensor(dtype, { below(12) })
  local want, list = {}, sorted(x)
  for k, v in ipairs(list) do
    if k == 1 or v ~= list[k - 1] then want[#want + 1] = v end            -- every nan is an element of its own
  end
  return walk.differs(walk.flat((t:unique())), want, dtype), text(t)
end

function others.searchsorted()
  local t, x = walk.tensor("float32", { below(8) })
  local v, y = walk.tensor("float32", { below(6) })
  local list, want = sorted(without_nan(x)), {}
  for k, one in ipairs(y) do
    want[k] = #list
    for j = #list, 1, -1 do
      if list[j] >= one then want[k] = j - 1 end
    end
  end
  return walk.differs(walk.flat(ms.searchsorted(ms.tensor(list), v)), want, "int64"), text(t) .. text(v)
end

function others.diff()
  local dtype = pick(ALL)
  local t, x = walk.tensor(dtype, { 1 + below(6) })
  local want, off = {}, 0
  for k = 1, #x - 1 do
    want[k] = x[k + 1] - x[k]
  end
  for _, v in ipairs(x) do if abs(v) < inf then off = math.max(off, abs(v)) end end
  return walk.differs(walk.flat(t:diff()), want, dtype, 2, off), text(t)
end

function others.cat()
  local dtype, n, want, list = pick(ALL), below(4), {}, {}
  for k = 1, 1 + below(4) do
    local t, x = walk.tensor(dtype, { below(4), n })
    list[k] = t
    for _, v in ipairs(x) do want[#want + 1] = v end
  end
  return walk.differs(walk.flat(ms.cat(list, 1)), want, dtype), ("of %d tensors with %d columns"):format(#list, n)
end

function others.cast()
  local from, to = pick(ALL), pick(ALL)
  local t, x = walk.tensor(from, shape())
  return walk.differs(walk.flat(t:to(to)), x, to, 0.51), ("%s of %s"):format(to, text(t))
end

others["cast to whole numbers"] = function()
  local from, to, want = pick(ALL), pick(WHOLE), {}
  local t, x = walk.tensor(from, shape())
  for k, v in ipairs(x) do                                                -- others are undefined
    want[k] = abs(v) < 100 and (to ~= "uint8" or v >= 0) and (v < 0 and math.ceil(v) or math.floor(v)) + 0 or walk.ANY
  end
  return walk.differs(walk.flat(t:to(to)), want, to), ("%s of %s"):format(to, text(t))
end

function others.max_pool()
  local n = 2 + below(6)
  local t, x = walk.tensor(pick(ALL), { 1, n })
  local want = {}
  for k = 1, math.floor(n / 2) do want[k] = larger(x[2 * k - 1], x[2 * k]) end
  return walk.differs(walk.flat(F.max_pool1d(t, 2)), want, t.dtype), text(t)
end

function others.pad()
  local dtype, n, v = pick(ALL), 1 + below(5), pick { nan, inf, -2, 0 }
  local t, x = walk.tensor(dtype, { n })
  local want, before = {}, below(3)
  for _ = 1, before do want[#want + 1] = v end
  for k = 1, n do want[#want + 1] = x[k] end
  return walk.differs(walk.flat(F.pad(t, { before, 0 }, { value = v })), want, dtype), text(t)
end

function others.tril()
  local n, m, k = 1 + below(4), 1 + below(4), below(5) - 2
  local t, x = walk.tensor(pick(ALL), { n, m })
  local want = {}
  for i = 0, n - 1 do
    for j = 0, m - 1 do want[i * m + j + 1] = j - i <= k and x[i * m + j + 1] or 0 end
  end
  return walk.differs(walk.flat(t:tril(k)), want, t.dtype), text(t)
end

others["an operation in place"] = function()
  local dtype, sizes = pick(ALL), shape()
  local t, x = walk.tensor(dtype, sizes)
  local u, y = walk.tensor(dtype, walk.narrower(sizes))
  local want = {}
  local name = pick { "add_", "sub_", "mul_", "div_", "copy_" }
  local f = ({ add_ = add, sub_ = function(a, b) return a - b end, mul_ = times, div_ = function(a, b) return a / b end,
    copy_ = function(_, b) return b end })[name]
  broadcast(sizes, { sizes, u.shape }, function(k, i, j) want[k] = f(x[i], y[j]) end)
  t[name](t, u)
  return walk.differs(walk.flat(t), want, dtype, 4), name .. text(u)
end

-- ---- all ------------------------------------------------------------------------------------------------

local cases = {}
for _, part in ipairs { { along, step_along }, { whole_along, step_of_wholes_along },
  { others, function(name, step) return { name, step } end } } do
  for name, f in ms.sorted_pairs(part[1]) do cases[#cases + 1] = part[2](name, f) end
end
return cases
