-- SPDX-License-Identifier: MIT
--- Steps for spec/support/walk.lua: functions of each element, and the plain loops that they are compared with.
--- What they do with nan and infinities is PyTorch's. Functions of the C library compute what Lua's do not.
local ffi = require "ffi"
local ms = require "moonshard"
local walk = require "spec.support.walk"

ffi.cdef [[
double sin(double); double cos(double); double tan(double); double erf(double); double erfc(double);
double lgamma(double); double log1p(double); double expm1(double); double asinh(double); double acosh(double);
double atanh(double); double exp2(double); double log2(double); double fmod(double, double);
double hypot(double, double); double copysign(double, double); double rint(double); double trunc(double);
double atan2(double, double); double pow(double, double);
]]
local C = ffi.load "m"
local F = ms.nn.F
local inf, nan, abs, floor, exp, log = math.huge, 0 / 0, math.abs, math.floor, math.exp, math.log
local pick, shape, text = walk.pick, walk.shape, walk.text
local broadcast, two_shapes = walk.broadcast, walk.two_shapes

local ALL = { "float32", "float64", "float16", "bfloat16" }
local WHOLE = { "int8", "int16", "int32", "int64", "uint8" }

-- ---- functions of an element --------------------------------------------------------------------------

local function clamp(x, low, high) return x ~= x and x or math.max(low, math.min(high, x)) end
local function sign(x) return x > 0 and 1 or x < 0 and -1 or 0 end
local function sigmoid(x) return 1 / (1 + exp(-x)) end
local function softplus(x) return x > 20 and x or C.log1p(exp(x)) end

-- name -> { loop, near, off, call }: near and off as for walk.differs (default 4 and 0); call: the function, if it is
-- not the method of that name.
local unary = {
  neg = { function(x) return -x end }, abs = { abs }, exp = { exp }, log = { log }, sqrt = { math.sqrt },
  rsqrt = { function(x) return 1 / math.sqrt(x) end }, tanh = { math.tanh },
  asin = { math.asin }, acos = { math.acos, 4, 1 }, atan = { math.atan }, sinh = { math.sinh }, cosh = { math.cosh },
  asinh = { C.asinh }, acosh = { C.acosh, 4, 0.1 }, atanh = { C.atanh }, exp2 = { C.exp2 }, expm1 = { C.expm1 },
  log1p = { C.log1p }, log2 = { C.log2 }, log10 = { math.log10 }, erf = { C.erf },
  sin = { C.sin, 4, 0.1 }, cos = { C.cos, 4, 0.1 }, tan = { C.tan, 8, 0.1 },
  erfc = { C.erfc, 16 }, lgamma = { C.lgamma, 8, 50 },
  floor = { floor }, ceil = { math.ceil }, trunc = { C.trunc }, round = { C.rint },
  frac = { function(x) return x - C.trunc(x) end }, sign = { sign },
  reciprocal = { function(x) return 1 / x end }, square = { function(x) return x * x end },
  relu = { function(x) return x ~= x and x or math.max(x, 0) end }, sigmoid = { sigmoid },
  silu = { function(x) return x / (1 + exp(-x)) end },
  softsign = { function(x) return x / (1 + abs(x)) end },
  logsigmoid = { function(x) return (x < 0 and x or x ~= x and x or 0) - C.log1p(exp(-abs(x))) end },
  hardsigmoid = { function(x) return clamp(x + 3, 0, 6) / 6 end, 4, 1 },
  hardswish = { function(x) return x * clamp(x + 3, 0, 6) / 6 end, 4, 1 },
  mish = { function(x) return x * math.tanh(softplus(x)) end, 8 },
  gelu = { function(x) return x * (0.5 * (1 + C.erf(x / math.sqrt(2)))) end, 8, 1 },
  isnan = { function(x) return x ~= x end }, isinf = { function(x) return abs(x) == inf end },
  isfinite = { function(x) return x - x == 0 end }, logical_not = { function(x) return x == 0 end },
  nan_to_num = { function(x) return x ~= x and 7 or x == inf and 3 or x == -inf and -3 or x end, 4, 0,
    function(t) return t:nan_to_num { nan = 7, posinf = 3, neginf = -3 } end },
  clamp = { function(x) return clamp(x, -1, 2) end, 4, 0, function(t) return t:clamp(-1, 2) end },
  clamp_min = { function(x) return clamp(x, 0.5, inf) end, 4, 0, function(t) return t:clamp_min(0.5) end },
  ["^ 2"] = { function(x) return x ^ 2 end, 4, 0, function(t) return t ^ 2 end },
  ["^ 3"] = { function(x) return x ^ 3 end, 4, 0, function(t) return t ^ 3 end },
  ["^ 0"] = { function() return 1 end, 4, 0, function(t) return t ^ 0 end },
  ["^ 0.5"] = { function(x) return math.sqrt(x) end, 4, 0, function(t) return t ^ 0.5 end },
  ["^ -1.5"] = { function(x) return C.pow(x, -1.5) end, 4, 0, function(t) return t ^ -1.5 end },
  ["2 ^"] = { function(x) return C.pow(2, x) end, 4, 0, function(t) return 2 ^ t end },
  ["+ 1.5"] = { function(x) return x + 1.5 end, 4, 1.5, function(t) return t + 1.5 end },
  ["3 -"] = { function(x) return 3 - x end, 4, 3, function(t) return 3 - t end },
  ["* -0.5"] = { function(x) return x * -0.5 end, 4, 0, function(t) return t * -0.5 end },
  ["/ 4"] = { function(x) return x / 4 end, 4, 0, function(t) return t / 4 end },
  ["1 /"] = { function(x) return 1 / x end, 4, 0, function(t) return 1 / t end },
  ["/ 0"] = { function(x) return x / 0 end, 4, 0, function(t) return t / 0 end },
  ["> 0.5"] = { function(x) return x > 0.5 end, 4, 0, function(t) return t:gt(0.5) end },
  ["== 0"] = { function(x) return x == 0 end, 4, 0, function(t) return t:eq(0) end },
  ["~= 1"] = { function(x) return x ~= 1 end, 4, 0, function(t) return t:ne(1) end },
  leaky_relu = { function(x) return x > 0 and x or 0.25 * x end, 4, 0, function(t) return F.leaky_relu(t, 0.25) end },
  elu = { function(x) return x > 0 and x or C.expm1(x) end, 4, 0, F.elu },
  selu = { function(x)
    return 1.0507009873554804934193349852946 * (x > 0 and x or 1.6732632423543772848170429916717 * C.expm1(x))
  end, 8, 0, F.selu },
  celu = { function(x) return x > 0 and x or C.expm1(x) end, 4, 0, F.celu },
  relu6 = { function(x) return clamp(x, 0, 6) end, 4, 0, F.relu6 },
  hardtanh = { function(x) return clamp(x, -1, 1) end, 4, 0, F.hardtanh },
  softplus = { softplus, 4, 0, F.softplus },
  tanhshrink = { function(x) return x - math.tanh(x) end, 8, 1, F.tanhshrink },
  hardshrink = { function(x) return (x > 0.5 or x < -0.5 or x ~= x) and x or 0 end, 4, 0, F.hardshrink },
  threshold = { function(x) return (x > 0.25 or x ~= x) and x or -2 end, 4, 0,
    function(t) return F.threshold(t, 0.25, -2) end },
  logit = { function(x) return log(x / (1 - x)) end, 8, 1 },
  prelu = { function(x) return x > 0 and x or 0.25 * x end, 4, 0,
    function(t) return F.prelu(t, ms.full({ 1 }, 0.25, { dtype = t.dtype })) end },
  ["clamp by nan"] = { function() return nan end, 4, 0, function(t) return t:clamp(nan, 1) end },
  softshrink = { function(x)
    return x > 0.5 and x - 0.5 or x < -0.5 and x + 0.5 or x ~= x and x or 0
  end, 4, 0.5, F.softshrink },
}

local function step_of(name, f)
  return { name, function()
    local dtype, sizes = pick(ALL), shape()
    local t, values = walk.tensor(dtype, sizes)
    local want = {}
    for k, x in ipairs(values) do want[k] = f[1](x) end
    local got = (f[4] or t[name])(t)
    return walk.differs(walk.flat(got), want, got.dtype, f[2] or 4, f[3] or 0),
      ("of %s"):format(text(t))
  end }
end

-- ---- functions of two elements -----------------------------------------------------------------------

local function remainder(a, b)
  local m = C.fmod(a, b)
  if m ~= 0 and (m < 0) ~= (b < 0) then m = m + b end
  return m
end
local function larger(a, b) return (a ~= a or a > b) and a or b end
local function smaller(a, b) return (a ~= a or a < b) and a or b end

-- name -> { loop, near, off, call }, as above; off: a number, or "sum" for |a| + |b|.
local binary = {
  ["+"] = { function(a, b) return a + b end, 4, 0, function(a, b) return a + b end },
  ["-"] = { function(a, b) return a - b end, 4, 0, function(a, b) return a - b end },
  ["*"] = { function(a, b) return a * b end, 4, 0, function(a, b) return a * b end },
  ["/"] = { function(a, b) return a / b end, 4, 0, function(a, b) return a / b end },
  ["^"] = { C.pow, 8, 0, function(a, b) return a ^ b end },
  fmod = { C.fmod }, remainder = { remainder }, maximum = { larger }, minimum = { smaller },
  atan2 = { C.atan2 }, hypot = { C.hypot },
  copysign = { function(a, b) return b == b and C.copysign(a, b) or walk.ANY end },
  xlogy = { function(a, b) return b ~= b and b or a == 0 and 0 or a * log(b) end },
  eq = { function(a, b) return a == b end }, ne = { function(a, b) return a ~= b end },
  lt = { function(a, b) return a < b end }, le = { function(a, b) return a <= b end },
  gt = { function(a, b) return a > b end }, ge = { function(a, b) return a >= b end },
  logical_and = { function(a, b) return a ~= 0 and b ~= 0 end },
  logical_or = { function(a, b) return a ~= 0 or b ~= 0 end },
  logical_xor = { function(a, b) return (a ~= 0) ~= (b ~= 0) end },
  logaddexp = { function(a, b)
    if a == b and abs(a) == inf then return a end
    return larger(a, b) + C.log1p(exp(-abs(a - b)))
  end, 4, 1 },
}
local whole_binary = {
  ["+"] = { function(a, b) return a + b end, call = function(a, b) return a + b end },
  ["-"] = { function(a, b) return a - b end, call = function(a, b) return a - b end },
  ["*"] = { function(a, b) return a * b end, call = function(a, b) return a * b end },
  maximum = { function(a, b) return a > b and a or b end }, minimum = { function(a, b) return a < b and a or b end },
  eq = { function(a, b) return a == b end }, lt = { function(a, b) return a < b end },
  ge = { function(a, b) return a >= b end },
  bitwise_and = { bit.band }, bitwise_or = { bit.bor }, bitwise_xor = { bit.bxor },
}

local NONE = { reduction = "none" }
local function huber(a, b)
  local d = abs(a - b)
  return d < 1 and 0.5 * d * d or d - 0.5
end
-- Losses, element by element: both tensors have one shape.
local losses = {
  mse_loss = { function(a, b) return (a - b) ^ 2 end, 8 }, l1_loss = { function(a, b) return abs(a - b) end },
  smooth_l1_loss = { huber, 8 }, huber_loss = { huber, 8 },
  soft_margin_loss = { function(a, b)
    local z = -a * b
    return (z > 0 and z or z ~= z and z or 0) + C.log1p(exp(-abs(z)))
  end, 8, 1 },
  kl_div = { function(a, b) return (b == 0 and 0 or b < 0 and nan or b * log(b)) - b * a end, 8, 1 },
  binary_cross_entropy_with_logits = { function(a, b)
    local small = C.log1p(exp(-abs(a)))
    return b * (small + (a < 0 and -a or a ~= a and a or 0)) + (1 - b) * (small + (a > 0 and a or a ~= a and a or 0))
  end, 8, 1 },
  poisson_nll_loss = { function(a, b) return exp(a) - b * a end, 8, 1 },
}

local function step_of_loss(name, f)
  return { name, function()
    local dtype, sizes = pick { "float32", "float64" }, shape()
    local a, x = walk.tensor(dtype, sizes)
    local b, y = walk.tensor(dtype, sizes)
    local want, off = {}, 0
    for k = 1, #x do
      want[k] = f[1](x[k], y[k])
      for _, v in ipairs { x[k], y[k], x[k] * y[k] } do if abs(v) < inf then off = math.max(off, abs(v)) end end
    end
    return walk.differs(walk.flat(F[name](a, b, NONE)), want, dtype, f[2] or 4, off), ("of %s and %s"):format(text(a), text(b))
  end }
end

local function step_of_two(name, f)
  return { name, function()
    local dtype, sizes, a_sizes, b_sizes = pick(ALL), two_shapes()
    local a, x = walk.tensor(dtype, a_sizes)
    local b, y = walk.tensor(dtype, b_sizes)
    local want = {}
    broadcast(sizes, { a_sizes, b_sizes }, function(k, i, j) want[k] = f[1](x[i], y[j]) end)
    local got = (f[4] or a[name])(a, b)
    return walk.differs(walk.flat(got), want, got.dtype, f[2] or 4, f[3] or 0),
      ("of %s and %s"):format(text(a), text(b))
  end }
end

local BITS = { int8 = 8, int16 = 16, int32 = 32, int64 = 64, uint8 = 8 }
-- A whole number (an int64_t) as the dtype stores it.
local function wrapped(v, dtype)
  local bits = BITS[dtype]
  if bits == 64 then return v end
  v = bit.band(v, bit.lshift(1LL, bits) - 1)
  if dtype ~= "uint8" and v >= bit.lshift(1LL, bits - 1) then v = v - bit.lshift(1LL, bits) end
  return v
end

local function step_of_wholes(name, f)
  return { name .. " of whole numbers", function()
    local dtype, sizes, a_sizes, b_sizes = pick(WHOLE), two_shapes()
    local a, x = walk.tensor(dtype, a_sizes)
    local b, y = walk.tensor(dtype, b_sizes)
    local want = {}
    broadcast(sizes, { a_sizes, b_sizes }, function(k, i, j)
      local v = f[1](ffi.cast("int64_t", x[i]), ffi.cast("int64_t", y[j]))
      want[k] = type(v) == "cdata" and wrapped(v, dtype) or v
    end)
    local got = (f.call or a[name])(a, b)
    return walk.differs(walk.flat(got), want, got.dtype), ("of %s and %s"):format(text(a), text(b))
  end }
end

-- ---- all ------------------------------------------------------------------------------------------------

local cases = {}
for _, part in ipairs { { unary, step_of }, { binary, step_of_two }, { losses, step_of_loss },
  { whole_binary, step_of_wholes } } do
  for name, f in ms.sorted_pairs(part[1]) do cases[#cases + 1] = part[2](name, f) end
end
return cases
