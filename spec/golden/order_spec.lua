-- SPDX-License-Identifier: MIT
--- Sorting, searching, scans and elements by position, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"

local inf, nan = math.huge, 0 / 0
local function ids(list) return ms.tensor(list, { dtype = "int64" }) end
local function whole(t) return (t * 1.4):round() end            -- with equal elements
local rows, tie_ids = ids { 2, 0, 2 }, ids { { 0, 1, 1, 0, 2 }, { 2, 2, 1, 0, 0 } }
local function mask(t) return t:detach():gt(0.3) end

local function holes(t)                                         -- every fourth element is nan
  return t:masked_fill((ms.arange(t:numel()) % 4):eq(1):reshape(t.shape), nan)
end
local function filled(t) return t:nan_to_num { nan = 7 } end
local function pair(fn)                                         -- values and positions as one tensor
  return function(...)
    local values, at = fn(...)
    return ms.stack({ values, at:to(values.dtype) }, -1)
  end
end
local function written(t, key, v)
  local y = t * 1
  y[key] = v
  return y
end
local function second(fn) return function(...) return (select(2, fn(...))) end end

local cases = {
  sort = pair(function(t) return t:sort(2) end),
  sort_down = pair(function(t) return t:sort(1, { descending = true }) end),
  sort_equal = pair(function(t) return whole(t):sort() end),
  sort_equal_down = pair(function(t) return whole(t):sort { descending = true } end),
  sort_nan = function(t) return filled((holes(t):sort(2))) end,
  sort_nan_down = function(t) return filled((holes(t):sort(2, { descending = true }))) end,
  argsort = function(t) return t:argsort() end,
  msort = function(t) return t:msort() end,
  topk = pair(function(t) return t:topk(3) end),
  topk_smallest = pair(function(t) return t:topk(2, 1, { largest = false }) end),
  topk_nan = function(t) return filled((holes(t):topk(3))) end,
  kthvalue = pair(function(t) return t:kthvalue(2) end),
  kthvalue_first = pair(function(t) return t:kthvalue(3, 1, { keepdim = true }) end),
  median = function(t) return t:median() end,
  median_rows = pair(function(t) return t:median(2) end),
  median_columns = pair(function(t) return t:median(1, { keepdim = true }) end),
  median_nan = function(t) return filled((holes(t):median(1))) end,
  nanmedian = function(t) return holes(t):nanmedian() end,
  nanmedian_rows = function(t) return (holes(t):nanmedian(2)) end,
  mode = function(t) return (whole(t):mode()) end,
  mode_first = function(t) return (whole(t):mode(1, { keepdim = true })) end,
  quantile_all = function(t) return t:quantile(0.3) end,
  quantile_keepdim = function(t) return t:quantile(0.6, 1, { keepdim = true }) end,
  quantile_keepdim_all = function(t)
    return t:quantile(ms.tensor({ 0.25, 1 }, { dtype = t.dtype }), { keepdim = true })
  end,
  quantile_nan = function(t) return filled(holes(t):quantile(0.6, 1)) end,
  nanquantile = function(t) return holes(t):nanquantile(ms.tensor({ 0, 0.4 }, { dtype = t.dtype }), 2) end,
  unique = function(t) return whole(t):unique() end,
  unique_inverse = second(function(t) return whole(t):unique { return_inverse = true } end),
  unique_counts = second(function(t) return whole(t):unique { return_counts = true } end),
  unique_rows = function(t) return ms.cat({ t, t[{ { 1, 2 } }], t }):round():unique { dim = 1 } end,
  unique_rows_inverse = second(function(t)
    return ms.cat({ t, t[{ { 1, 2 } }], t }):round():unique { dim = 1, return_inverse = true }
  end),
  unique_columns_counts = second(function(t) return ms.cat({ t, t }, 2):unique { dim = 2, return_counts = true } end),
  unique_consecutive = function(t) return t:round():unique_consecutive() end,
  unique_consecutive_counts = second(function(t)
    return (t / 2):round():unique_consecutive { return_counts = true }
  end),
  unique_consecutive_inverse = second(function(t)
    return ms.cat({ t, t[{ { 3, 3 } }], t }):unique_consecutive { dim = 1, return_inverse = true }
  end),
  nonzero = function(t) return whole(t):nonzero() end,
  masked_select = function(t) return t:masked_select(t[1]:gt(0)) end,
  masked_scatter = function(t, s) return t:masked_scatter(t:gt(0), s) end,
  searchsorted = function(t, v) return ms.searchsorted((t:sort(2)), v) end,
  searchsorted_right = function(t)
    return ms.tensor({ -1, 0, 0, 1 }, { dtype = t.dtype }):searchsorted(whole(t), { right = true })
  end,
  bucketize = function(t) return whole(t):bucketize(ms.tensor({ -1, 0, 1 }, { dtype = t.dtype })) end,
  bucketize_right = function(t)
    return whole(t):bucketize(ms.tensor({ -1, 0, 1 }, { dtype = t.dtype }), { right = true })
  end,
  cumprod = function(t) return t:cumprod(2) end,
  cumprod_zeros = function(t) return t:cumprod(2) end,
  cummax = pair(function(t) return whole(t):cummax(2) end),
  cummin = pair(function(t) return t:cummin(1) end),
  logcumsumexp = function(t) return (t * 30):logcumsumexp(2) end,
  logcumsumexp_inf = function(t)
    return ms.cat({ ms.full({ 2 }, -inf, { dtype = t.dtype }), t }):logcumsumexp(1)[{ { 3, -1 } }]
  end,
  index_add = function(t, s) return t:index_add(1, rows, s, { alpha = -1.5 }) end,
  index_add_columns = function(t, s) return t:index_add(2, ids { 4, 1 }, s) end,
  index_copy = function(t, s) return t:index_copy(2, ids { 2, 0 }, s) end,
  index_fill = function(t) return t:index_fill(2, ids { 2, 0 }, 0.5) end,
  index_put = function(t, s) return t:index_put({ rows, ids { 1, 1, 3 } }, s) end,
  index_put_accumulate = function(t, s) return t:index_put({ rows }, s, { accumulate = true }) end,
  take = function(t) return t:take(ids { { 0, 23 }, { 5, 5 } }) end,
  put = function(t, s) return t:put(ids { { 3, 1 }, { 7, 0 } }, s) end,
  put_accumulate = function(t, s) return t:put(ids { 3, 3, 7 }, s, { accumulate = true }) end,
  scatter_add = function(t, s) return t:scatter_add(1, tie_ids, s) end,
  scatter_reduce_zeros = function(t, s) return t:scatter_reduce(1, tie_ids, s, "prod") end,
  scatter_reduce_ties = function(t, s)
    return t:round():scatter_reduce(1, tie_ids, s * 0, "amax")
      + t:scatter_reduce(1, tie_ids, s * 0 + t[{ { 1, 2 } }], "amin")
  end,
  unfold = function(t) return t:unfold(2, 3, 2) end,
  unfold_first = function(t) return t:unfold(1, 2, 1) end,
  read_mask = function(t) return t[mask(t)] end,
  read_row_mask = function(t) return t[{ {}, ms.tensor { true, false, true } }] end,
  read_ids = function(t) return t[rows] end,
  read_ids_last = function(t) return t[{ 1, {}, ids { { 3, 1 }, { 0, 0 } } }] end,
  read_two = function(t) return t[{ ids { 0, 1 }, {}, ids { { 3 }, { 1 } } }] end,
  read_beside = function(t) return t[{ {}, ids { 2, 0 }, { at = { 2, 4 } } }] end,
  read_mask_ids = function(t) return t[{ ms.tensor { true, false }, ids { 0, 2 } }] end,
  read_steps = function(t) return t[{ { 1, -1, step = 2 }, { 2, 5, step = 3 } }] end,
  write_part = function(t, s) return written(t, { { 1, 2 }, { 2, 4 } }, s) end,
  write_mask = function(t) return written(t, mask(t), 0.5) end,
  write_mask_values = function(t, s) return written(t, mask(t), s[{ { 1, mask(t):count_nonzero():item() } }]) end,
  write_ids = function(t, s) return written(t, ids { 2, 0 }, s[1]) end,
  write_two = function(t, s) return written(t, { ids { 0, 1 }, {}, { at = { 4, 2 } } }, s) end,
}
for _, how in ipairs { "linear", "lower", "higher", "midpoint", "nearest" } do
  cases["quantile_" .. how] = function(t)
    return t:quantile(ms.tensor({ 0.1, 0.5, 0.77 }, { dtype = t.dtype }), 2, { interpolation = how })
  end
end
for _, how in ipairs { "sum", "prod", "mean", "amax", "amin" } do
  cases["scatter_reduce_" .. how] = function(t, s) return t:scatter_reduce(1, tie_ids, s, how) end
  cases["scatter_reduce_" .. how .. "_alone"] = function(t, s)
    return t:scatter_reduce(1, tie_ids, s, how, { include_self = false })
  end
end

golden_cases("order", cases)
