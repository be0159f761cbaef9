-- SPDX-License-Identifier: MIT
--- Edge cases of tensor methods with PyTorch's answers: empty tensors, a missing dimension, NaN, infinities, strides,
--- overlaps, positions from both ends.
local ms = require "moonshard"

local T, inf, nan = ms.tensor, math.huge, 0 / 0
local function ints(list) return T(list, { dtype = "int64" }) end
local function half(list, dtype) return T(list, { dtype = dtype or "float16" }) end

local failure = require "spec.support.message"

-- Values as text, so that NaN, -0 and shapes can be compared.
local function text(x)
  if ms.is_tensor(x) then return tostring(x.shape) .. " " .. text(x:tolist()) end
  if type(x) == "table" then
    local out = {}
    for k = 1, #x do out[k] = text(x[k]) end
    return "{" .. table.concat(out, " ") .. "}"
  end
  if x ~= x then return "nan" end
  if type(x) == "number" then return ("%.6g"):format(x) end
  return tostring(x)
end

local empty, none = ms.zeros(0), ms.zeros(0, 3)
local m = T { { 1, 2, 3 }, { 4, 5, 6 } }
local dot = T(5)
local bad = T { 1, nan, 3 }

--- Groups of { description, a function without arguments, its value as text (shape and elements) }; an error is written
--- as "error: pattern".
local groups = {
  ["nothing at all"] = {
    { "sum", function() return empty:sum() end, "[] 0" },
    { "prod", function() return empty:prod() end, "[] 1" },
    { "mean", function() return empty:mean() end, "[] nan" },
    { "all", function() return empty:all() end, "[] true" },
    { "any", function() return empty:any() end, "[] false" },
    { "std", function() return empty:std() end, "[] nan" },
    { "var of one", function() return T({ 3 }):var() end, "[] nan" },
    { "var of one, uncorrected", function() return T({ 3 }):var { correction = 0 } end, "[] 0" },
    { "norm", function() return empty:norm() end, "[] 0" },
    { "norm inf", function() return empty:norm(inf) end, "error: no elements" },
    { "max", function() return empty:max() end, "error: no elements" },
    { "argmax", function() return empty:argmax() end, "error: no elements" },
    { "max of no columns", function() return (ms.zeros(3, 0):max(2)) end, "error: no elements" },
    { "max of no rows along columns", function() return (none:max(2)) end, "[0] {}" },
    { "sum of rows", function() return none:sum(1) end, "[3] {0 0 0}" },
    { "sum of columns", function() return none:sum(2) end, "[0] {}" },
    { "mean of rows", function() return none:mean(1) end, "[3] {nan nan nan}" },
    { "all of rows", function() return none:bool():all(1) end, "[3] {true true true}" },
    { "prod of rows, kept", function() return none:prod(1, { keepdim = true }) end, "[1, 3] {{1 1 1}}" },
    { "logsumexp", function() return none:logsumexp(1) end, "[3] {-inf -inf -inf}" },
    { "softmax", function() return none:softmax(1) end, "[0, 3] {}" },
    { "cumsum", function() return none:cumsum(1) end, "[0, 3] {}" },
    { "matmul", function() return ms.zeros(2, 0):matmul(ms.zeros(0, 3)) end, "[2, 3] {{0 0 0} {0 0 0}}" },
    { "matmul of no rows", function() return none:matmul(ms.zeros(3, 2)) end, "[0, 2] {}" },
    { "cat with", function() return ms.cat { empty, T { 1 } } end, "[1] {1}" },
    { "cat of", function() return ms.cat { none, ms.ones(1, 3) } end, "[1, 3] {{1 1 1}}" },
    { "stack", function() return ms.stack { empty, empty } end, "[2, 0] {{} {}}" },
    { "split", function() return #none:split(2) end, "1" },
    { "chunk", function() return #none:chunk(3) end, "1" },
    { "view", function() return none:view(3, 0) end, "[3, 0] {{} {} {}}" },
    { "view of -1 beside 0", function() return none:view(-1, 0) end, "error: %-1" },
    { "reshape to -1", function() return none:reshape(-1) end, "[0] {}" },
    { "flatten", function() return none:flatten() end, "[0] {}" },
    { "expand", function() return ms.zeros(1, 3):expand(0, 3) end, "[0, 3] {}" },
    { "tile no times", function() return T({ 1, 2 }):tile(0) end, "[0] {}" },
    { "narrow", function() return m:narrow(1, 3, 0) end, "[0, 3] {}" },
    { "index_select", function() return m:index_select(1, ms.zeros(0, { dtype = "int64" })) end, "[0, 3] {}" },
    { "gather", function() return m:gather(1, ms.zeros(0, 3, { dtype = "int64" })) end, "[0, 3] {}" },
    { "where", function() return ms.where(none:bool(), none, 1) end, "[0, 3] {}" },
    { "equal", function() return empty:equal(empty) end, "true" },
    { "equal of other shapes", function() return empty:equal(none) end, "false" },
    { "allclose", function() return empty:allclose(empty) end, "true" },
    { "tolist", function() return ms.zeros(2, 0):tolist() end, "{{} {}}" },
    { "a table", function() return T { {}, {} } end, "[2, 0] {{} {}}" },
    { "item", function() return empty:item() end, "error: element" },
    { "tril", function() return ms.zeros(0, 0):tril() end, "[0, 0] {}" },
    { "arange", function() return ms.arange(0) end, "[0] {}" },
    { "in place", function() return ms.zeros(0):add_(1):mul_(ms.zeros(0)) end, "[0] {}" },
    { "eye", function() return ms.eye(0) end, "[0, 0] {}" },
    { "backward", function()
      local t = ms.zeros(0, 3, { requires_grad = true })
      ;(t * 2):sum():backward()
      return t.grad
    end, "[0, 3] {}" },
  },
  ["no dimensions"] = {
    { "sum along dimension 1", function() return dot:sum(1) end, "[] 5" },
    { "sum from the end", function() return dot:sum(-1) end, "[] 5" },
    { "sum along dimension 2", function() return dot:sum(2) end, "error: out of range" },
    { "max along", function() local v, i = dot:max(1) return ms.stack { v, i } end, "[2] {5 0}" },
    { "argmax", function() return dot:argmax() end, "[] 0" },
    { "softmax", function() return dot:softmax(1) end, "[] 1" },
    { "log_softmax", function() return dot:log_softmax() end, "[] 0" },
    { "logsumexp", function() return dot:logsumexp(1) end, "[] 5" },
    { "cumsum", function() return dot:cumsum(1) end, "[] 5" },
    { "norm", function() return T(-5):norm() end, "[] 5" },
    { "var", function() return dot:var() end, "[] nan" },
    { "t", function() return dot:t() end, "[] 5" },
    { "transpose", function() return dot:transpose(1, -1) end, "[] 5" },
    { "permute", function() return dot:permute {} end, "[] 5" },
    { "squeeze", function() return dot:squeeze() end, "[] 5" },
    { "squeeze(1)", function() return dot:squeeze(1) end, "[] 5" },
    { "unsqueeze", function() return dot:unsqueeze(1):unsqueeze(-1) end, "[1, 1] {{5}}" },
    { "flatten", function() return dot:flatten() end, "[1] {5}" },
    { "view", function() return dot:view(1, 1) end, "[1, 1] {{5}}" },
    { "reshape to it", function() return T({ 7 }):reshape {} end, "[] 7" },
    { "view to it", function() return T({ { 7 } }):view {} end, "[] 7" },
    { "expand", function() return dot:expand(2, 2) end, "[2, 2] {{5 5} {5 5}}" },
    { "expand to itself", function() return dot:expand {} end, "[] 5" },
    { "tile", function() return dot:tile(3) end, "[3] {5 5 5}" },
    { "stack", function() return ms.stack { dot, dot } end, "[2] {5 5}" },
    { "cat", function() return ms.cat { dot, dot } end, "error: 0%-dim" },
    { "select", function() return dot:select(1, 1) end, "error: select" },
    { "t[1]", function() return dot[1] end, "error: select" },
    { "narrow", function() return dot:narrow(1, 1, 1) end, "error: narrow" },
    { "matmul", function() return dot:matmul(dot) end, "error: at least one dimension" },
    { "all", function() return T(true):all(1) end, "[] true" },
    { "gather", function() return dot:gather(1, ints(0)) end, "[] 5" },
    { "index_select", function() return dot:index_select(1, ints { 0 }) end, "[] 5" },
    { "masked_fill", function() return dot:masked_fill(T(true), 1) end, "[] 1" },
    { "masked_fill by a larger mask", function() return dot:masked_fill(T { true, false }, 1) end, "[2] {1 5}" },
    { "copy_ into it", function() return T(0):copy_(T { 3 }) end, "error: broadcast" },
    { "tolist", function() return dot:tolist() end, "5" },
    { "full", function() return ms.full({}, 2) end, "[] 2" },
    { "zeros of no sizes", function() return ms.zeros {} end, "[] 0" },
  },
  ["NaN and infinity"] = {
    { "sum", function() return bad:sum() end, "[] nan" },
    { "max", function() return bad:max() end, "[] nan" },
    { "min", function() return bad:min() end, "[] nan" },
    { "max along", function() local v, i = bad:max(1) return ms.stack { v, i } end, "[2] {nan 1}" },
    { "argmax", function() return bad:argmax() end, "[] 1" },
    { "argmin", function() return T({ nan, -inf }):argmin() end, "[] 0" },
    { "clamp with crossed bounds", function() return T({ 0, 5 }):clamp(3, 1) end, "[2] {1 1}" },
    { "equal", function() return bad:equal(bad) end, "false" },
    { "allclose", function() return bad:allclose(bad) end, "false" },
    { "allclose, equal_nan", function() return bad:allclose(bad, { equal_nan = true }) end, "true" },
    { "allclose of infinities", function() return T({ inf, -inf }):allclose(T { inf, -inf }) end, "true" },
    { "allclose of unlike infinities", function() return T({ inf }):allclose(T { -inf }) end, "false" },
    { "allclose of a number and an infinity", function() return T({ 1 }):allclose(T { inf }) end, "false" },
    { "allclose broadcasts", function() return ms.ones(2, 3):allclose(T(1)) end, "true" },
    { "isfinite of integers", function() return ints({ 1 }):isfinite() end, "[1] {true}" },
    { "softmax with -inf", function() return T({ -inf, 0 }):softmax() end, "[2] {0 1}" },
    { "softmax of -inf", function() return T({ -inf, -inf }):softmax() end, "[2] {nan nan}" },
    { "softmax with inf", function() return T({ inf, 0 }):softmax() end, "[2] {nan nan}" },
    { "logsumexp of -inf", function() return T({ -inf, -inf }):logsumexp() end, "[] -inf" },
    { "logsumexp with inf", function() return T({ inf, 1 }):logsumexp() end, "[] inf" },
    { "norm", function() return bad:norm() end, "[] nan" },
    { "norm inf of NaN", function() return bad:norm(inf) end, "[] nan" },
    { "norm 0", function() return T({ -3, 0, 2 }):norm(0) end, "[] 2" },
    { "norm of large numbers in float16", function() return half({ 300, 400 }):norm() end, "[] 500" },
    { "gelu", function() return T({ inf, 1000, -1000 }):gelu() end, "[3] {inf 1000 -0}" },
    { "division of integers by 0", function() return ints({ 1, 0 }) / ints { 0, 0 } end, "[2] {inf nan}" },
    { "sum of float16 in float32", function() return ms.ones(4096, { dtype = "float16" }):sum() end, "[] 4096" },
    { "prod", function() return T({ inf, 0 }):prod() end, "[] nan" },
    { "var of infinities", function() return T({ inf, 1 }):var() end, "[] nan" },
    { "cast of NaN to bool", function() return T({ nan, 0, -0.5 }):bool() end, "[3] {true false true}" },
    { "any of NaN", function() return T({ nan }):any() end, "[] true" },
  },
  ["dimensions and sizes"] = {
    { "sum of a list", function() return ms.ones(2, 3, 4):sum { 1, -1 } end, "[3] {8 8 8}" },
    { "sum kept", function() return m:sum(-2, { keepdim = true }) end, "[1, 3] {{5 7 9}}" },
    { "sum named twice", function() return m:sum { 1, -2 } end, "error: named twice" },
    { "sum of dimension 0", function() return m:sum(0) end, "error: whole number other than 0" },
    { "sum of dimension 1.5", function() return m:sum(1.5) end, "error: whole number other than 0" },
    { "mean of a list, kept", function() return m:mean({ 1, 2 }, { keepdim = true }) end, "[1, 1] {{3.5}}" },
    { "std of a list", function() return m:std { 1, 2 } end, "[] 1.87083" },
    { "var, corrected by 2", function() return T({ 1, 2, 3, 4 }):var { correction = 2 } end, "[] 2.5" },
    { "var, corrected by as many", function() return T({ 1, 2 }):var { correction = 2 } end, "[] inf" },
    { "norm of a list", function() return m:norm(2, { 1, 2 }) end, "[] 9.53939" },
    { "norm kept, p left out", function() return m:norm(nil, 2, { keepdim = true }) end,
    "[2, 1] {{3.74166} {8.77496}}" },
    { "all of a list", function() return m:gt(0):all { 1, 2 } end, "[] true" },
    { "any kept", function() return m:gt(5):any(2, { keepdim = true }) end, "[2, 1] {{false} {true}}" },
    { "prod along", function() return m:prod(2) end, "[2] {6 120}" },
    { "max, kept", function() local v, i = m:max(2, { keepdim = true }) return ms.cat({ v, i }, 2) end,
    "[2, 2] {{3 2} {6 2}}" },
    { "min along", function() local v, i = m:min(1) return ms.stack { v, i } end, "[2, 3] {{1 2 3} {0 0 0}}" },
    { "argmax of the last", function() return m:argmax() end, "[2] {2 2}" },
    { "argmax kept", function() return m:argmax(1, { keepdim = true }) end, "[1, 3] {{1 1 1}}" },
    { "max of ties gives the first", function() local _, i = T({ 2, 3, 3 }):max(1) return i end, "[] 1" },
    { "cumsum along", function() return m:cumsum(1) end, "[2, 3] {{1 2 3} {5 7 9}}" },
    { "cumsum of bools", function() return T({ true, true, false }):cumsum() end, "[3] {1 2 2}" },
    { "softmax of the first", function() return ms.zeros(2, 2):softmax(1) end, "[2, 2] {{0.5 0.5} {0.5 0.5}}" },
    { "transpose from the end", function() return m:transpose(-1, 1) end, "[3, 2] {{1 4} {2 5} {3 6}}" },
    { "permute", function() return ms.zeros(2, 3, 4):permute(3, 1, -2).shape end, "{4 2 3}" },
    { "permute by a table", function() return ms.zeros(2, 3, 4):permute({ 2, 3, 1 }).shape end, "{3 4 2}" },
    { "permute with one missing", function() return m:permute(1) end, "error: permute" },
    { "permute with one twice", function() return m:permute(1, 1) end, "error: permute" },
    { "t of three dimensions", function() return ms.zeros(2, 3, 4):t() end, "error: at most 2" },
    { "unsqueeze behind the last", function() return m:unsqueeze(3).shape end, "{2 3 1}" },
    { "unsqueeze from the end", function() return m:unsqueeze(-1).shape end, "{2 3 1}" },
    { "unsqueeze too far", function() return m:unsqueeze(4) end, "error: out of range" },
    { "squeeze several", function() return ms.zeros(1, 2, 1, 3, 1):squeeze(1, -1).shape end, "{2 1 3}" },
    { "squeeze what is longer", function() return m:squeeze(1).shape end, "{2 3}" },
    { "flatten a part", function() return ms.zeros(2, 3, 4, 5):flatten(2, -2).shape end, "{2 12 5}" },
    { "flatten from the end", function() return ms.zeros(2, 3, 4):flatten(-2).shape end, "{2 12}" },
    { "reshape by -1", function() return m:reshape(-1, 2).shape end, "{3 2}" },
    { "reshape by a table", function() return m:reshape({ 3, -1 }).shape end, "{3 2}" },
    { "reshape to what does not fit", function() return m:reshape(4, 2) end, "error: reshape" },
    { "reshape with two unknown", function() return m:reshape(-1, -1) end, "error: %-1" },
    { "view across strides", function() return m:t():view(6) end, "error: view" },
    { "reshape across strides", function() return m:t():reshape(6) end, "[6] {1 4 2 5 3 6}" },
    { "view of strides that allow it", function() return ms.arange(12):view(3, 4):narrow(2, 1, 2):view(3, 2, 1) end,
      "[3, 2, 1] {{{0} {1}} {{4} {5}} {{8} {9}}}" },
    { "expand -1", function() return T({ { 1 }, { 2 } }):expand(-1, 2) end, "[2, 2] {{1 1} {2 2}}" },
    { "expand in front", function() return T({ 1, 2 }):expand(2, -1) end, "[2, 2] {{1 2} {1 2}}" },
    { "expand what is longer", function() return m:expand(2, 6) end, "error: expand" },
    { "expand by a new -1", function() return T({ 1 }):expand(-1, 1) end, "error: expand" },
    { "narrow from the end", function() return m:narrow(-1, -2, 2) end, "[2, 2] {{2 3} {5 6}}" },
    { "narrow too far", function() return m:narrow(2, 2, 3) end, "error: exceed size" },
    { "select from the end", function() return m:select(-1, -1) end, "[2] {3 6}" },
    { "select too far", function() return m:select(1, 3) end, "error: out of range" },
    { "t[-1]", function() return m[-1] end, "[3] {4 5 6}" },
    { "t[0]", function() return m[0] end, "error: out of range" },
    { "split unevenly", function() return #ms.arange(7):split(3) end, "3" },
    { "split by sizes", function() return ms.arange(5):split({ 2, 0, 3 })[3] end, "[3] {2 3 4}" },
    { "split by wrong sizes", function() return ms.arange(5):split({ 2, 2 }) end, "error: add up" },
    { "split along the last", function() return m:split(2, -1)[2] end, "[2, 1] {{3} {6}}" },
    { "split many", function() return ms.arange(100):split(1)[100] end, "[1] {99}" },
    { "chunk gives fewer", function() return #ms.arange(5):chunk(4) end, "3" },
    { "chunk of 0", function() return m:chunk(0) end, "error: at least 1" },
    { "cat along the last", function() return ms.cat({ m, m }, -1).shape end, "{2 6}" },
    { "cat of shapes that do not fit", function() return ms.cat { m, ms.zeros(2, 2) } end, "error: all sizes except that of dimension 1" },
    { "cat of none", function() return ms.cat {} end, "error: the list is empty" },
    { "cat of many", function() local l = {} for k = 1, 200 do l[k] = T { k } end return ms.cat(l):sum() end,
    "[] 20100" },
    { "stack along a new last", function() return ms.stack({ T { 1, 2 }, T { 3, 4 } }, -1) end,
    "[2, 2] {{1 3} {2 4}}" },
    { "stack of many", function() local l = {} for k = 1, 100 do l[k] = T { k, 0 } end return ms.stack(l, 2).shape end,
    "{2 100}" },
    { "stack of different shapes", function() return ms.stack { T { 1 }, T { 1, 2 } } end, "error: shapes must be equal" },
    { "tile with fewer", function() return m:tile(2).shape end, "{2 6}" },
    { "tile with more", function() return T({ 1, 2 }):tile(2, 1, 2) end, "[2, 1, 4] {{{1 2 1 2}} {{1 2 1 2}}}" },
    { "tril above", function() return ms.ones(2, 3):tril(1) end, "[2, 3] {{1 1 0} {1 1 1}}" },
    { "triu below", function() return ms.ones(3, 3):triu(-1) end, "[3, 3] {{1 1 1} {1 1 1} {0 1 1}}" },
    { "tril of a transpose", function() return m:t():tril() end, "[3, 2] {{1 0} {2 5} {3 6}}" },
    { "triu of a row", function() return T({ 1, 2 }):triu() end, "error: 2 dimensions" },
    { "size(0)", function() return m:size(0) end, "error: whole number" },
    { "size(3)", function() return m:size(3) end, "error: out of range" },
    { "arange of fractions", function() return ms.arange(0, 1, 0.1):numel() end, "10" },
    { "arange backwards", function() return ms.arange(3, 0, -1) end, "[3] {3 2 1}" },
    { "arange of a dtype", function() return ms.arange(3, { dtype = "float64" }).dtype end, "float64" },
    { "eye of two sizes", function() return ms.eye(2, 3) end, "[2, 3] {{1 0 0} {0 1 0}}" },
    { "randint of one number", function() return ms.randint(7, 8, { 2, 1 }) end, "[2, 1] {{7} {7}}" },
    { "full of a boolean", function() return ms.full({ 2 }, true) end, "[2] {true true}" },
    { "zeros of a negative size", function() return ms.zeros(2, -1) end, "error: expected a whole number from 0" },
    { "nine dimensions", function() return ms.zeros(1, 1, 1, 1, 1, 1, 1, 1, 1) end, "error: at most 8" },
  },
  ["positions in tensors"] = {
    { "index_select", function() return m:index_select(2, ints { 2, 0, 2 }) end, "[2, 3] {{3 1 3} {6 4 6}}" },
    { "index_select of a transpose", function() return m:t():index_select(1, ints { 2 }) end, "[1, 2] {{3 6}}" },
    { "index_select beyond", function() return m:index_select(1, ints { 2 }) end, "error: 2" },
    { "index_select below", function() return m:index_select(1, ints { -1 }) end, "error: %-1" },
    { "index_select by numbers", function() return m:index_select(1, T { 0 }) end, "error: int64" },
    { "gather", function() return m:gather(2, ints { { 2, 2 }, { 0, 1 } }) end, "[2, 2] {{3 3} {4 5}}" },
    { "gather of fewer rows", function() return m:gather(1, ints { { 1, 0 } }) end, "[1, 2] {{4 2}}" },
    { "gather of more columns", function() return m:gather(1, ints { { 1, 0, 0, 0 } }) end, "error: gather" },
    { "gather beyond", function() return m:gather(2, ints { { 3 } }) end, "error: 3" },
    { "scatter_", function() return ms.zeros(2, 3):scatter_(2, ints { { 2 }, { 0 } }, T { { 7 }, { 8 } }) end,
    "[2, 3] {{0 0 7} {8 0 0}}" },
    { "scatter_ of a number", function() return ms.zeros(2, 3):scatter_(2, ints { { 2 }, { 0 } }, 1) end,
    "[2, 3] {{0 0 1} {1 0 0}}" },
    { "scatter_ into a transpose", function() return ms.zeros(3, 2):t():scatter_(2, ints { { 2 }, { 0 } }, 1) end,
    "[2, 3] {{0 0 1} {1 0 0}}" },
    { "scatter_ of another dtype", function() return ms.zeros(1):scatter_(1, ints { 0 }, ints { 1 }) end,
    "error: int64" },
    { "scatter_ beyond", function() return ms.zeros(2):scatter_(1, ints { 2 }, 1) end, "error: 2" },
    { "scatter_add_", function() return ms.zeros(2):scatter_add_(1, ints { 1, 1, 0 }, T { 1, 2, 4 }) end, "[2] {4 3}" },
    { "scatter leaves its tensor alone", function() local z = ms.zeros(2) z:scatter(1, ints { 0 }, 1) return z end,
    "[2] {0 0}" },
    { "masked_fill", function() return m:masked_fill(m:gt(2), 0) end, "[2, 3] {{1 2 0} {0 0 0}}" },
    { "masked_fill by a row", function() return m:masked_fill(T { true, false, false }, -1) end,
    "[2, 3] {{-1 2 3} {-1 5 6}}" },
    { "masked_fill with a 0-dim tensor", function() return m:masked_fill(m:gt(2), T(9)) end,
    "[2, 3] {{1 2 9} {9 9 9}}" },
    { "masked_fill by numbers", function() return m:masked_fill(m, 0) end, "error: bool" },
    { "masked_fill with a boolean", function() return T({ false, false }):masked_fill(T { true, false }, true) end,
    "[2] {true false}" },
    { "masked_fill_ by a larger mask", function() return T({ 1 }):masked_fill_(T { true, false }, 0) end,
    "error: broadcast" },
    { "where of three shapes", function() return ms.where(T { { true }, { false } }, T { 1, 2 }, T(0)) end,
    "[2, 2] {{1 2} {0 0}}" },
    { "where of two numbers", function() return ms.where(T { true, false }, 1, 0) end, "[2] {1 0}" },
    { "where by numbers", function() return ms.where(m, m, m) end, "error: bool" },
    { "t[i] = number", function() local t = m:clone() t[2] = 0 return t end, "[2, 3] {{1 2 3} {0 0 0}}" },
    { "t[i] = row", function() local t = m:clone() t[-1] = T { 7, 8, 9 } return t end, "[2, 3] {{1 2 3} {7 8 9}}" },
    { "t[i] = what does not fit", function() local t = m:clone() t[1] = T { 1, 2 } end, "error: broadcast" },
    { "t[i][j] = number", function() local t = m:clone() t[1][2] = 9 return t end, "[2, 3] {{1 9 3} {4 5 6}}" },
  },
  ["memory that is shared"] = {
    { "a view sees changes", function() local t = m:clone() local v = t:t() t:mul_(2) return v end,
    "[3, 2] {{2 8} {4 10} {6 12}}" },
    { "changes go through views", function() local t = m:clone() t:narrow(2, 2, 1):zero_() return t end,
    "[2, 3] {{1 0 3} {4 0 6}}" },
    { "copy_ forwards over itself", function() local t = ms.arange(5) t:narrow(1, 2,
    4):copy_(t:narrow(1, 1, 4)) return t end, "[5] {0 0 1 2 3}" },
    { "copy_ backwards over itself", function() local t = ms.arange(5) t:narrow(1, 1,
    4):copy_(t:narrow(1, 2, 4)) return t end, "[5] {1 2 3 4 4}" },
    { "add_ of a shifted self", function() local t = ms.arange(5) t:narrow(1, 2,
    4):add_(t:narrow(1, 1, 4)) return t end, "[5] {0 1 3 5 7}" },
    { "add_ of its transpose", function() local t = T { { 1, 2 }, { 3, 4 } } t:add_(t:t()) return t end,
    "[2, 2] {{2 5} {5 8}}" },
    { "add_ of itself, and of its first row", function() local t = m:clone() t:add_(t) return t:add_(t[1]) end,
    "[2, 3] {{4 8 12} {10 14 18}}" },
    { "copy_ of its transpose", function() local t = T { { 1, 2 }, { 3, 4 } } return t:copy_(t:t()) end,
    "[2, 2] {{1 3} {2 4}}" },
    { "copy_ of its second elements", function() local t = ms.arange(6) t:narrow(1, 1, 3):copy_(t:view(3, 2):select(2, 2))
    return t end, "[6] {1 3 5 3 4 5}" },
    { "mul_ by its first element", function() local t = T { 2, 3, 4 } t:mul_(t[1]) return t end, "[3] {4 6 8}" },
    { "add_ into an expanded one", function() return T({ 1 }):expand(3):add_(1) end, "error: clone%(%) it" },
    { "copy_ into an expanded one", function() return T({ 1 }):expand(3):copy_(T { 1, 2, 3 }) end,
    "error: clone%(%) it" },
    { "fill_ of an expanded one", function() return T({ 1 }):expand(3):fill_(2) end, "error: clone%(%) it" },
    { "masked_fill_ of an expanded one", function() return T({ 1 }):expand(3):masked_fill_(T { true, false, true },
    2) end, "error: clone%(%) it" },
    { "contiguous gives itself", function() return rawequal(m, m:contiguous()) end, "true" },
    { "contiguous of a transpose", function() return m:t():contiguous():stride() end, "{2 1}" },
    { "clone of a transpose", function() return m:t():clone() end, "[3, 2] {{1 4} {2 5} {3 6}}" },
    { "detach shares", function() local t = m:clone() t:detach():zero_() return t:sum() end, "[] 0" },
    { "copy_ broadcasts and casts", function() return ms.zeros(2, 2, { dtype = "int64" }):copy_(T { 1.7, -1.7 }) end,
    "[2, 2] {{1 -1} {1 -1}}" },
    { "copy_ of what is larger", function() return ms.zeros(2):copy_(ms.zeros(2, 2)) end, "error: broadcast" },
  },
}

for group, rows in ms.sorted_pairs(groups) do
  describe("of " .. group, function()
    for _, row in ipairs(rows) do
      it(row[1], function()
        local pattern = row[3]:match "^error: (.*)$"
        if pattern then
          assert.matches(pattern, failure(row[2]))
        else
          assert.are.equal(row[3], text(row[2]()))
        end
      end)
    end
  end)
end

-- ---- gradients at edges ---------------------------------------------------------------------------

local function grad(values, fn, dtype)
  local x = T(values, { dtype = dtype, requires_grad = true })
  fn(x):sum():backward()
  return x.grad
end

describe("gradients at edges", function()
  local rows = {
    { "prod with one zero", { 2, 0, 3 }, function(x) return x:prod() end, "[3] {0 6 0}" },
    { "prod with two zeros", { 0, 0, 3 }, function(x) return x:prod() end, "[3] {0 0 0}" },
    { "max shares among ties", { 1, 3, 3 }, function(x) return x:max() end, "[3] {0 0.5 0.5}" },
    { "max along goes to the first", { 1, 3, 3 }, function(x) return (x:max(1)) end, "[3] {0 1 0}" },
    { "maximum shares among ties", { 1, 3 }, function(x) return x:maximum(T { 1, 2 }) end, "[2] {0.5 1}" },
    { "relu at 0", { -1, 0, 1 }, function(x) return x:relu() end, "[3] {0 0 1}" },
    { "abs at 0", { -1, 0, 1 }, function(x) return x:abs() end, "[3] {-1 0 1}" },
    { "clamp passes at its bounds", { -1, 0, 1, 2 }, function(x) return x:clamp(0, 1) end, "[4] {0 1 1 0}" },
    { "sqrt at 0", { 0, 4 }, function(x) return x:sqrt() end, "[2] {inf 0.25}" },
    { "pow 0", { 0, 2 }, function(x) return x ^ 0 end, "[2] {0 0}" },
    { "pow 2 at 0", { 0 }, function(x) return x ^ 2 end, "[1] {0}" },
    { "pow of a tensor at exponent 0", { 0, 3 }, function(x) return x ^ T { 0, 0 } end, "[2] {0 0}" },
    { "norm of zeros", { 0, 0 }, function(x) return x:norm() end, "[2] {0 0}" },
    { "norm inf shares", { -3, 3, 1 }, function(x) return x:norm(inf) end, "[3] {-0.5 0.5 0}" },
    { "where hides the other branch", { 0, 4 }, function(x) return ms.where(x:gt(1), x:log(), 0) end,
    "[2] {nan 0.25}" },
    { "masked_fill stops", { 1, 2 }, function(x) return x:masked_fill(T { true, false }, 9) * 3 end, "[2] {0 3}" },
    { "expand sums", { 1, 2 }, function(x) return x:expand(3, 2) end, "[2] {3 3}" },
    { "index_select sums", { 1, 2 }, function(x) return x:index_select(1, ints { 1, 1, 1 }) end, "[2] {0 3}" },
    { "gather sums", { 1, 2 }, function(x) return x:gather(1, ints { 0, 0 }) end, "[2] {2 0}" },
    { "t[i]", { 1, 2 }, function(x) return x[2] * 5 end, "[2] {0 5}" },
    { "cast to half and back", { 1, 2 }, function(x) return x:half():float() * 3 end, "[2] {3 3}" },
    { "cumsum", { 1, 2, 3 }, function(x) return x:cumsum() end, "[3] {3 2 1}" },
    { "logsumexp with -inf", { -inf, 0 }, function(x) return x:logsumexp() end, "[2] {0 1}" },
    { "std of a list of one", { 5 }, function(x) return x:std { correction = 0 } end, "[1] {0}" },
    { "mean along", { 1, 2 }, function(x) return x:mean(1) end, "[2] {0.5 0.5}" },
    { "a fraction of itself", { 2, 4 }, function(x) return x / x end, "[2] {0 0}" },
  }
  for _, row in ipairs(rows) do
    it(row[1], function() assert.are.equal(row[4], text(grad(row[2], row[3])):gsub("%-0([ }])", "0%1")) end)
  end
end)

-- ---- printing ---------------------------------------------------------------------------------------

describe("printing", function()
  local rows = {
    { ms.tensor(2.5), "Tensor float32 [] cpu\n2.5000" },
    { ms.tensor({ 1, 2 }), "Tensor float32 [2] cpu\n[1., 2.]" },
    { ms.tensor({ 1, 2 }, { dtype = "int64" }), "Tensor int64 [2] cpu\n[1, 2]" },
    { ms.tensor { { true }, { false } }, "Tensor bool [2, 1] cpu\n[[ true],\n [false]]" },
    { ms.tensor({ 1.5, -2 }, { dtype = "bfloat16" }), "Tensor bfloat16 [2] cpu\n[ 1.5000, -2.0000]" },
    { ms.tensor { nan, inf, -inf, 1 }, "Tensor float32 [4] cpu\n[ nan,  inf, -inf,   1.]" },
    { ms.tensor { 1e-9, 1 }, "Tensor float32 [2] cpu\n[1.0000e-09, 1.0000e+00]" },
    { ms.zeros(0, 3), "Tensor float32 [0, 3] cpu" },
    { ms.zeros(2, { device = "meta" }), "Tensor float32 [2] meta" },
    { ms.zeros(1, { requires_grad = true }), "Tensor float32 [1] cpu, requires_grad\n[0.]" },
    { ms.arange(125):view(5, 5, 5),
      "Tensor int64 [5, 5, 5] cpu\n[[[  0,   1,   2,   3,   4],\n  …\n  [ 20,  21,  22,  23,  24]],\n …\n"
      .. " [[100, 101, 102, 103, 104],\n  …\n  [120, 121, 122, 123, 124]]]" },
    { ms.arange(12):view(3, 4):t()[2], "Tensor int64 [3] cpu\n[1, 5, 9]" },
  }
  for k, row in ipairs(rows) do
    it(("says what a tensor is and holds (%d)"):format(k), function() assert.are.equal(row[2], tostring(row[1])) end)
  end

  it("keeps to 20 lines of 10 numbers, whatever the shape, and leaves no tensors", function()
    for _, shape in ipairs { { 100, 3 }, { 5, 5, 5 }, { 2, 3, 4, 5 }, { 30, 30, 30 }, { 4, 4, 4, 4, 4, 4, 4, 4 },
      { 2, 2, 2, 2, 2, 2, 2, 2 }, { 19, 1 }, { 1000, 1000 }, { 20, 2, 2, 2, 2 },
      { 20, 2, 2 }, { 6, 3, 2 }, { 1, 100, 1 }, { 40, 1, 1, 1 }, { 100000 }, { 7, 7, 7, 3, 3, 3 } } do
      local t = ms.zeros(shape)
      collectgarbage "stop"                     -- leftovers of other specs would be collected during the test
      local before = ms.memory_stats().live_tensors
      local out = tostring(t)
      local after = ms.memory_stats().live_tensors
      collectgarbage "restart"
      assert.are.equal(before, after)
      if #shape < 6 then assert.are.equal(select(2, out:gsub("%[", "")), select(2, out:gsub("%]", ""))) end
      local lines, values = 0, 0
      for line in out:gmatch "[^\n]+" do
        lines = lines + 1
        local _, n = line:gsub("0%.", "")
        if lines > 1 then values = values + n end
        assert.is_true(n <= 10)
      end
      assert.is_true(lines <= 20, out)
      assert.is_true(values > 0, out)
    end
  end)
end)

-- ---- what is refused ----------------------------------------------------------------------------------

describe("refused with the reason:", function()
  local ffi = require "ffi"
  local rows = {
    { "a number for a pointer", function() ms.from_pointer(5, { 2 }) end,
    "from_pointer: argument 1 is a number %(5%), expected an FFI pointer" },
    { "no pointer", function() ms.from_pointer(nil, { 2 }) end, "pointer is NULL" },
    { "a negative size of memory", function() ms.from_pointer(ffi.new "float[4]", { -2 }) end, "size is %-2, expected a whole number from 0" },
    { "with_device without a function", function() ms.with_device "meta" end,
    "with_device: argument 2 is nil, expected a function" },
    { "an unknown device", function() ms.with_device("gpu", print) end, "unknown device 'gpu'" },
    { "full_like with a string", function() ms.full_like(m, "x") end, "full_like: value is a string" },
    { "two dtypes", function() m:to("float32", "float16") end,
    "to: arguments are 'float32' and 'float16', expected a device and a dtype" },
    { "rand of integers", function() ms.rand(2, { dtype = "int64" }) end, "^rand: needs a floating%-point dtype, got int64" },
    { "randint beyond the dtype", function() ms.randint(0, 1000, { 2 }, { dtype = "uint8" }) end,
    "^randint: 0 to 999 is out of range for uint8" },
    { "item of a tensor without values", function() ms.zeros(1, { device = "meta" }):item() end,
    "device meta has no values" },
    { "a move of a tensor without values", function() ms.zeros(1, { device = "meta" }):to "cpu" end,
    "^to: .* no data to move; use to_empty" },
    { "two devices", function() return ms.zeros(1, { device = "meta" }) + m end, "different devices" },
    { "gradients of gradients", function() ms.grad(m, m, { create_graph = true }) end,
    "create_graph: gradients of gradients are not supported" },
    { "a comparison by <", function() return m < m end, "tensors cannot be compared" },
    { "an assignment to shape", function() m.shape = {} end, "'shape' cannot be assigned" },
    { "an assignment to a method's name", function() m.add = 1 end, "'add' is a method of tensors" },
    { "gradients of integers", function() ints({ 1 }):requires_grad_() end, "int64 cannot require gradients" },
    { "a deep copy of a result", function() ms.deepcopy(ms.ones(1, { requires_grad = true }) * 2) end,
    "only leaves can be copied" },
  }
  for _, row in ipairs(rows) do
    it(row[1], function() assert.matches(row[3], failure(row[2])) end)
  end

  it("with_device passes arguments and results and ends with its function", function()
    local device, a, b = ms.with_device("meta", function(x) return ms.zeros(1).device, x, nil end, 7)
    assert.are.same({ "meta", 7 }, { device, a })
    assert.is_nil(b)
    assert.are.equal("no", select(2, pcall(ms.with_device, "meta", function() error("no", 0) end)))
    assert.are.equal("cpu", ms.default_device())
  end)
end)
