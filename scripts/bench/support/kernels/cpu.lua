-- SPDX-License-Identifier: MIT
--- The cases of scripts/bench/kernels: every kernel of the CPU, its bytes and its arithmetic.
---
--- A case: name, bytes per element of x, vector instructions of arithmetic per 16 elements of float32 (all lanes of one
--- instruction of AVX-512, 2 of AVX2), operator, inputs, integers, numbers, and why it may take more than 1.5 times its
--- limit. Loads and stores are not counted. A double counts 2; 16 divisions or roots take 10 cycles, that is 20
--- instructions of AVX-512, 10 pairs of AVX2. NONE: no bound by arithmetic is known.
--- gradient: measures backward of the call, which starts with this gradient.
local M = { NONE = false }

local EXP, LOG, PHILOX = 21, 27, 43                                    -- PHILOX: for each of the four words of a block
local CHAIN = "a chain of dependent multiply-adds and divisions"      -- of which Zen 2 keeps about five in flight
local HALF = "rows pass through a float32 buffer in L1"
local TURNED = "reads along columns, a cache line for 16 elements"
local TWICE = "reads each row again from L1"
local WIDEN = "adds in float64"
local ACCUMULATORS = "reads and writes accumulators in L1 for each row"
local PACKED = "AVX2 packs 32 numbers to bytes in five shuffles"
local SCALAR = "only AVX-512 converts 64-bit integers; else an element at a time"
local PRODUCTS = "GCC 12 shuffles for products of 32 x 32 to 64 bits, in 512-bit vectors multiplies 64-bit numbers"
local LIBM = "libm's function, an element at a time: training seldom needs it"
local DOUBLE = "libm's functions: float64 serves gradient checks"
local SCATTERED = "an element at a time, wherever its index points"
local SERIAL = "each element waits for the one before, an addition's latency in float64"

--- rows, cols: the shape of x. t: the tensors by name (scripts/bench/kernels makes them). isa: the kernels' level.
function M.cases(t, rows, cols, isa)
  local list, DIV = {}, isa == "v4" and 20 or 10
  local function case(name, bytes, ops, op, inputs, i, f, why)
    list[#list + 1] = { name = name, bytes = bytes, ops = ops, op = op, inputs = inputs, i = i, f = f, why = why }
  end
  -- Operands of 8 bytes have half as many elements, so that all tensors have about the same bytes.
  local function wide(name, bytes, ops, ...) case(name, bytes / 2, ops and ops / 2, ...) end
  local x, y, p, h, k, d, e = t.x, t.y, t.positive, t.h, t.k, t.d, t.e

  -- ---- copies, fills, casts
  case("clone", 8, 0, "clone", { x })
  case("clone bfloat16", 4, 0, "clone", { h })
  case("copy of every second column", 12, 0, "contiguous", { t.halves }, nil, nil, "picks pairs apart by shuffles")
  case("transposed contiguous", 8, 0, "contiguous", { t.turned }, nil, nil, TURNED)
  case("transposed contiguous bfloat16", 4, 0, "contiguous", { t.turned_half }, nil, nil, TURNED)
  case("permuted contiguous [0,2,1]", 8, 0, "contiguous", { t.permuted }, nil, nil, TURNED)
  case("fill_", 4, 0, "fill_", { t.target }, nil, { 1 })
  case("zero_", 4, 0, "zero_", { t.target })
  case("arange_", 4, 4, "arange_", { t.line }, nil, { 0, 1 }, "through float64, 64 numbers at a time: made once")
  for _, c in ipairs {
    { "float32", x, { "bfloat16", 6, 6 }, { "float16", 6, 12 }, { "int32", 8, 6 }, { "uint8", 5, 8 },
      { "bool", 5, 2 } },
    { "bfloat16", h, { "float32", 6, 1 }, { "float16", 4, 14 } },
    { "float16", t.q, { "float32", 6, 6 }, { "bfloat16", 4, 12 } },
    { "bool", t.mask, { "float32", 5, 2 } },
    { "float32", t.x_half, { "float64", 12, 2 }, { "int64", 12, 6 } }, { "bfloat16", t.h_half, { "float64", 10, 4 } },
    { "float64", d, { "float32", 12, 2 }, { "bfloat16", 10, 8 } },
    { "int64", t.whole, { "float32", 12, 6 }, { "int32", 12, 2 } },
  } do
    for at = 3, #c do
      local to, add = c[at], (c[2] == d or c[2] == t.x_half or c[2] == t.h_half or c[2] == t.whole) and wide or case
      add(("cast %s to %s"):format(c[1], to[1]), to[2], to[3], "cast", { c[2] }, { t.dtype[to[1]] }, nil,
        (c[2] == h or c[2] == t.q or to[1]:find "float16") and HALF or to[1] == "uint8" and PACKED
          or c[2] == t.whole and to[1] == "float32" and isa ~= "v4" and SCALAR)
    end
  end
  case("cat of two", 16, 0, "cat", { x, y }, { 0 })
  case("tril", 8, 0, "tril", { x })

  -- ---- elementwise: an operator's arithmetic in float32
  for name, ops in pairs {
    neg = 1, abs = 1, relu = 1, sign = 3, floor = 1, ceil = 1, trunc = 1, round = 1, frac = 2, exp = EXP,
    silu = EXP + DIV + 1, sigmoid = EXP + DIV + 1,
    tanh = EXP + DIV + 14, reciprocal = DIV, expm1 = EXP + LOG + 2 * DIV, erf = EXP + 26, erfc = 2 * EXP + 2 * DIV + 46,
    sin = 44, cos = 44, tan = 44 + DIV, softsign = DIV + 2, hardsigmoid = DIV + 3, hardswish = DIV + 4,
    logsigmoid = EXP + LOG + DIV + 8, mish = 2 * EXP + LOG + 3 * DIV + 12,
  } do case(name, 8, ops, name, { x }, nil, nil, ops >= EXP and CHAIN) end
  for name, ops in pairs { log = LOG, sqrt = DIV, rsqrt = 2 * DIV, log1p = LOG + DIV + 6 } do
    case(name, 8, ops, name, { p }, nil, nil, ops >= EXP and CHAIN)
  end
  case("erfinv", 8, LOG + 2 * DIV + 45, "erfinv", { t.inside }, nil, nil, CHAIN)
  for name in ("exp2 log2 log10 asin acos atan sinh cosh asinh acosh atanh lgamma digamma"):gmatch "%S+" do
    case(name, 8, M.NONE, name, { name == "acosh" and t.above or name:find "^a" and t.inside or p }, nil, nil, LIBM)
  end
  case("gelu", 8, EXP + 34, "gelu", { x }, nil, nil, CHAIN)
  case("gelu, tanh form", 8, EXP + DIV + 8, "gelu", { x }, { 1 }, nil, CHAIN)
  case("leaky_relu", 8, 3, "leaky_relu", { x }, nil, { 0.01 })
  case("elu", 8, EXP + LOG + 2 * DIV + 6, "elu", { x }, nil, { 1, 1 }, CHAIN)
  case("softplus", 8, EXP + LOG + 2 * DIV + 10, "softplus", { x }, nil, { 1, 20 }, CHAIN)
  case("clamp", 8, 6, "clamp", { x }, nil, { -1, 1 })
  for name, ops in pairs { mul_scalar = 1, add_scalar = 1, div_scalar = DIV, rdiv_scalar = DIV } do
    case(name, 8, ops, name, { x }, nil, { 3 })
  end
  case("pow_scalar 2", 8, 1, "pow_scalar", { x }, nil, { 2 })
  case("pow_scalar 1.5", 8, M.NONE, "pow_scalar", { p }, nil, { 1.5 }, LIBM)
  for name, ops in pairs { add = 1, sub = 1, mul = 1, div = DIV, maximum = 3, minimum = 3, copysign = 2 } do
    case(name, 12, ops, name, { x, y })
  end
  case("logaddexp", 12, EXP + LOG + DIV + 14, "logaddexp", { x, y }, nil, nil, CHAIN)
  for name in ("pow fmod atan2 hypot"):gmatch "%S+" do
    case(name, 12, M.NONE, name, { p, p }, nil, nil, LIBM)
  end
  case("binary_cross_entropy", 12, 2 * LOG + DIV + 14, "binary_cross_entropy", { t.share, t.share }, nil, nil, CHAIN)
  case("add_ in place", 12, 1, "add_", { t.target, y })
  case("add a row", 8, 1, "add", { x, t.w })
  case("add a column", 8, 1, "add", { x, t.column })
  case("add transposed", 12, 1, "add", { x, t.turned }, nil, nil,
    "an operand that lies across the rows of the result is turned in tiles first")
  case("addcmul", 16, 3, "addcmul", { x, y, y }, nil, { 0.5 })
  case("lerp", 12, 8, "lerp", { x, y }, nil, { 0.3 })
  case("eq", 9, 2, "eq", { x, y })
  case("gt a number", 5, 2, "gt_scalar", { x }, nil, { 0.5 })
  case("where", 13, 2, "where", { t.mask, x, y })
  case("masked_fill", 9, 2, "masked_fill", { x, t.mask }, nil, { 0 })
  case("logical_and", 3, 2, "logical_and", { t.mask, t.mask })
  case("isfinite", 5, 2, "isfinite", { x })
  case("add bfloat16", 6, 8, "add", { h, k }, nil, nil, HALF)
  case("relu bfloat16", 4, 8, "relu", { h }, nil, nil, HALF)
  case("gelu bfloat16, tanh form", 4, EXP + DIV + 15, "gelu", { h }, { 1 }, nil, HALF)
  case("silu bfloat16", 4, EXP + DIV + 8, "silu", { h }, nil, nil, HALF)
  wide("add float64", 24, 2, "add", { d, e })
  wide("exp float64", 16, M.NONE, "exp", { d }, nil, nil, DOUBLE)
  wide("add int64", 24, 2, "add", { t.whole, t.whole })
  for name, ops in pairs { relu = 2, tanh = 3, sigmoid = 3, silu = EXP + DIV + 6, gelu = 2 * EXP + 38 } do
    case("backward of " .. name, 12, ops, name, { t.leaf }, nil, nil, ops >= EXP and CHAIN)
    list[#list].gradient = y
  end

  -- ---- reductions, scans
  for name, ops in pairs { sum = 1, mean = 1, amax = 3, amin = 3, prod = 1 } do
    case(name .. " of all", 4, ops, name, { x })
    case(name .. " over rows", 4, ops, name, { x }, { 0, 0 }, nil, ACCUMULATORS)
    case(name .. " over columns", 4, ops, name, { x }, { 0, 1 })
  end
  case("sum over columns bfloat16", 2, 8, "sum", { h }, { 0, 1 }, nil, HALF)
  case("sum over rows bfloat16", 2, 2, "sum", { h }, { 0, 0 }, nil, HALF)
  wide("sum over columns float64", 8, 2, "sum", { d }, { 0, 1 })
  case("var over columns", 4, 4, "var", { x }, { 0, 1 }, { 1 }, TWICE)
  case("var over rows", 8, 4, "var", { x }, { 0, 0 }, { 1 }, ACCUMULATORS)
  case("norm over columns", 4, 2, "norm", { x }, { 0, 1 }, { 2 })
  case("norm of all", 4, 2, "norm", { x }, { 0 }, { 2 })
  case("any", 1, 2, "any", { t.mask_none }, nil, nil, "bools are widened to int64")
  case("argmax of all", 4, 3, "argmax", { x }, nil, nil, TWICE)
  case("argmax over columns", 4, 3, "argmax", { x }, { 1, 0 }, nil, TWICE)
  case("argmax over rows", 4, 3, "argmax", { x }, { 0, 0 }, nil, TWICE)
  case("max over columns", 4, 3, "max", { x }, { 1, 0 }, nil, TWICE)
  case("logsumexp over columns", 4, EXP + 4, "logsumexp", { x }, { 1, 0 }, nil, TWICE)
  case("logsumexp over rows", 8, EXP + 4, "logsumexp", { x }, { 0, 0 }, nil, TWICE)
  case("cumsum over columns", 8, 8, "cumsum", { x }, { 1 }, nil, SERIAL)
  case("cumsum over rows", 8, 4, "cumsum", { x }, { 0 }, nil, WIDEN)
  case("cumprod over columns", 8, 8, "cumprod", { x }, { 1 }, nil, SERIAL)
  case("cummax over columns", 16, 8, "cummax", { x }, { 1 }, nil, SERIAL)
  case("logcumsumexp over columns", 8, M.NONE, "logcumsumexp", { x }, { 1 }, nil, DOUBLE)

  -- ---- rows
  for _, type in ipairs { { "", 4, x, y, t.w, t.b, t.stats, t.lse }, { " bfloat16", 2, h, k, t.w_half, t.b_half, t.stats, t.lse } } do
    local name, size, a, g, w, b, stats, lse = unpack(type)
    local half, why = size == 2 and 8 or 0, size == 2 and HALF or nil    -- half: conversions
    case("softmax" .. name, 2 * size, EXP + 5 + half, "softmax", { a }, { 1 }, nil, why or CHAIN)
    case("log_softmax" .. name, 2 * size, EXP + 5 + half, "log_softmax", { a }, { 1 }, nil, why or CHAIN)
    case("softmax_backward" .. name, 3 * size, 4 + half, "softmax_backward", { g, a }, { 1 }, nil, why)
    case("log_softmax_backward" .. name, 3 * size, EXP + 3 + half, "log_softmax_backward", { g, a }, { 1 }, nil, why)
    case("layer_norm" .. name, 2 * size, 8 + half, "layer_norm", { a, w, b }, { 1 }, { 1e-5 }, why)
    case("rms_norm" .. name, 2 * size, 5 + half, "rms_norm", { a, w }, { 1 }, { 1e-5 }, why)
    case("add_layer_norm" .. name, 4 * size, 9 + half, "add_layer_norm", { a, g, w, b }, { 1 }, { 1e-5 }, why)
    case("layer_norm_backward" .. name, 3 * size, 15 + half, "layer_norm_backward", { g, a, w, stats }, { 1, 7 }, { 1e-5 }, why)
    case("rms_norm_backward" .. name, 3 * size, 12 + half, "rms_norm_backward", { g, a, w, stats }, { 1, 3 }, { 1e-5 }, why)
    case("cross_entropy" .. name, size, EXP + 4 + half / 2, "cross_entropy", { a, t.ids }, { 1, -100 }, { 0 }, why or CHAIN)
    case("cross_entropy_backward" .. name, 2 * size, EXP + 4 + half, "cross_entropy_backward",
      { size == 2 and t.one_half or t.one, a, t.ids, w, lse }, { 1, -100 }, { 0 }, why or CHAIN)
  end
  case("softmax over rows", 8, EXP + 5, "softmax", { x }, { 0 }, nil, "three passes over strips of 64 columns; exponentials twice")
  wide("softmax float64", 16, M.NONE, "softmax", { d }, { 1 }, nil, DOUBLE)
  wide("layer_norm float64", 16, 16, "layer_norm", { d, t.w_wide, t.w_wide }, { 1 }, { 1e-5 }, TWICE)
  case("mse_loss", 8, 3, "mse_loss", { x, y }, { 1 })
  case("mse_loss_backward", 12, 2, "mse_loss_backward", { t.one, x, y }, { 1, 1 })
  case("batch_norm of rows", 8, 14, "batch_norm", { x, t.w, t.b }, { 1 }, { 1e-5 }, WIDEN)
  case("batch_norm of images", 12, 8, "batch_norm", { t.images, t.channels, t.channels }, { 1 }, { 1e-5 })
  case("batch_norm_backward of images", 20, 10, "batch_norm_backward",
    { t.images, t.images, t.channels, t.channels, t.channels, t.channels, t.channels }, { 1, 7 }, { 1e-5 })

  -- ---- random numbers
  case("dropout", 8, PHILOX + 3, "dropout", { x }, nil, { 0.1 }, PRODUCTS)
  case("dropout bfloat16", 4, PHILOX + 10, "dropout", { h }, nil, { 0.1 }, PRODUCTS, PRODUCTS)
  case("rand_", 4, 2 * PHILOX + 4, "rand_", { t.target }, nil, nil, PRODUCTS)
  case("randn_", 4, 2 * PHILOX + (LOG + DIV + 30) / 2, "randn_", { t.target }, nil, { 0, 1 }, PRODUCTS)
  case("randint_", 8, M.NONE, "randint_", { t.whole_target }, nil, { 0, 1000 }, "integers by a 64-bit product each")
  case("trunc_normal_", 4, M.NONE, "trunc_normal_", { t.target }, nil, { 0, 1, -2, 2 }, "an inverse of erf in float64; at a model's start")

  -- ---- by position
  case("embedding", 8, 0, "embedding", { t.table, t.ids })
  case("embedding_backward", 8, 1, "embedding_backward", { x, t.ids }, { -1, cols })
  case("index_select of rows", 8, 0, "index_select", { x, t.row_ids }, { 0 })
  case("index_select of columns", 8, 0, "index_select", { x, t.ids_of_columns }, { 1 }, nil, SCATTERED)
  case("scatter_add_ of rows", 12, 1, "scatter_add_", { t.target, t.row_positions, x }, { 0 }, nil,
    "rows wherever their index points: nothing is fetched ahead")
  case("gather of rows", 8, 0, "gather", { x, t.row_positions }, { 0 })
  case("gather", 16, 0, "gather", { x, t.positions }, { 1 }, nil, SCATTERED)
  case("scatter_", 16, 0, "scatter_", { t.target, t.positions, x }, { 1 }, nil, SCATTERED)
  case("scatter_add_", 20, 1, "scatter_add_", { t.target, t.positions, x }, { 1 }, nil, SCATTERED)
  case("nonzero", 5, 2, "nonzero", { t.mask }, { rows }, nil, "each place depends on the count before")
  case("searchsorted in 1024", 12, M.NONE, "searchsorted", { t.sorted, x }, nil, nil, "ten dependent steps an element")
  case("sort of columns", 12, M.NONE, "sort", { x }, { 1 }, nil, "log2(n) passes")
  case("topk 8", 4, 2, "topk", { x }, { 1, 8 }, nil, "heaps of the best so far")

  -- ---- pictures
  local SHORT = "rows of 32 elements, with the positions of the maxima"
  local GATHERS = "a gather an element of the first pass"
  local twice, half = { t.side * 2, t.side * 2, 0, 0 }, { 0.5, 0.5 }
  case("max_pool 2 x 2", 7, 12, "max_pool", { t.images }, { 2, 0, 0, 0, 2, 2, 2, 2, 0, 0, 1, 1 }, nil, SHORT)
  case("max_pool 3 x 3", 16, 40, "max_pool", { t.images }, { 2, 0, 0, 0, 3, 3, 1, 1, 1, 1, 1, 1 }, nil, SHORT)
  case("avg_pool 2 x 2", 5, 4, "avg_pool", { t.images }, { 2, 0, 0, 0, 2, 2, 2, 2, 0, 0, 1, 1 }, nil, SHORT)
  case("resample nearest, twice", 20, 8, "resample", { t.images }, { 2, 0, 0, unpack(twice) }, half, GATHERS)
  case("resample linear, twice", 20, 20, "resample", { t.images }, { 2, 2, 0, unpack(twice) }, half, GATHERS)
  return list
end

return M
