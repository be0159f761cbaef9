-- SPDX-License-Identifier: MIT
--- Products of vectors, matrices and tensors, computed by matmul, reshape and permute, and distances between rows.
--- Those that have intermediate results run in a scope, which releases them.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
require "moonshard.tensor.rearrange"

local methods, id_of, dimension, a_tensor = tensor.methods, tensor.id_of, tensor.dimension, tensor.a_tensor

local M = {}

local function check_dims(who, t, what, n)
  opts.expect(t, a_tensor, "%s: %s", who, what)
  if #t.shape ~= n then
    errors.raise("%s: the %s has shape %s, expected %d dimension%s", who, what, tostring(t.shape), n, n > 1 and "s" or "")
  end
end

--- The product of each element of a vector with each element of another. Errors: a tensor that is not 1-d.
---@param u Tensor  [M]
---@return Tensor  [N, M] if t has shape [N]
function methods.outer(t, u)
  check_dims("outer", t, "first vector", 1)
  check_dims("outer", u, "second vector", 1)
  return scope.run("outer", function() return methods.unsqueeze(t, 2) * methods.unsqueeze(u, 1) end)
end

--- The sum of the products of two vectors' elements. Errors: tensors that are not 1-d, different sizes or dtypes, bool.
---@param u Tensor  of t's shape and dtype
---@return Tensor  [] of t's dtype
function methods.dot(t, u)
  check_dims("dot", t, "first vector", 1)
  check_dims("dot", u, "second vector", 1)
  if t:numel() ~= u:numel() then
    errors.raise("dot: the vectors have %d and %d elements, expected equal numbers", t:numel(), u:numel())
  end
  return methods.matmul(t, u)
end

--- The product of a matrix and a vector. Errors: other than 2 and 1 dimensions, different inner sizes or dtypes.
---@param v Tensor  [M]
---@return Tensor  [N] if t has shape [N, M]
function methods.mv(t, v)
  check_dims("mv", t, "matrix", 2)
  check_dims("mv", v, "vector", 1)
  return methods.matmul(t, v)
end

local SCALES = { beta = 1, alpha = 1 }
local HALF = { float16 = true, bfloat16 = true }
local function add_product(who, t, a, b, given, n)
  local o = opts(who, given, SCALES)
  id_of(t, who)
  check_dims(who, a, "first factor", n)
  check_dims(who, b, "second factor", n)
  return scope.run(who, function()
    local half = HALF[a.dtype] and a.dtype == b.dtype and a.dtype
    if half then a, b = methods.float(a), methods.float(b) end             -- the sum, too, is rounded once only
    local out = methods.matmul(a, b)
    if o.alpha ~= 1 then out = out * o.alpha end
    if o.beta ~= 0 then out = out + (o.beta == 1 and t or (half and methods.float(t) or t) * o.beta) end
    return half and (o.beta == 0 or t.dtype == half) and methods.to(out, half) or out
  end)
end

--- beta * t + alpha * (a x b), the product of matrices. With beta = 0 t's values are not read.
---@param a Tensor  [N, K]
---@param b Tensor  [K, M]
---@param given? { beta: number, alpha: number }  beta: factor of t; alpha: factor of the product (default: 1 each)
---@return Tensor  [N, M], to which t broadcasts
function methods.addmm(t, a, b, given) return add_product("addmm", t, a, b, given, 2) end

--- beta * t + alpha * (a x b), for each matrix of a batch. With beta = 0 t's values are not read.
---@param a Tensor  [B, N, K]
---@param b Tensor  [B, K, M]
---@param given? { beta: number, alpha: number }  beta: factor of t; alpha: factor of the product (default: 1 each)
---@return Tensor  [B, N, M], to which t broadcasts
function methods.baddbmm(t, a, b, given) return add_product("baddbmm", t, a, b, given, 3) end

--- The Kronecker product: t with each element replaced by its product with u. Errors: more than 4 dimensions.
---@param u Tensor  of t's dtype; a tensor of fewer dimensions gets some of size 1 in front
---@return Tensor  its sizes are the products of the tensors' sizes
function methods.kron(t, u)
  id_of(t, "kron")
  opts.expect(u, a_tensor, "kron: argument 1")
  local n = math.max(#t.shape, #u.shape)
  if n > 4 then errors.raise("kron: shapes %s and %s; at most 4 dimensions are supported", tostring(t.shape), tostring(u.shape)) end
  local a, b, out = {}, {}, {}
  for k = 1, n do
    local size_a, size_b = t.shape[k - n + #t.shape] or 1, u.shape[k - n + #u.shape] or 1
    a[2 * k - 1], a[2 * k], b[2 * k - 1], b[2 * k] = size_a, 1, 1, size_b
    out[k] = size_a * size_b
  end
  if n == 0 then return t * u end
  return scope.run("kron", function()
    return methods.reshape(methods.reshape(t, a) * methods.reshape(u, b), out)
  end)
end

-- The dimensions of t, from 1, that are not in list.
local function divide(t, list)
  local summed, kept = {}, {}
  for _, d in ipairs(list) do summed[d] = true end
  for d = 1, #t.shape do
    if not summed[d] then kept[#kept + 1] = d end
  end
  return kept
end

local function sizes_of(t, list)
  local sizes, product = {}, 1
  for k, d in ipairs(list) do
    sizes[k] = t.shape[d]
    product = product * sizes[k]
  end
  return sizes, product
end

local function joined(a, b)
  local out = { unpack(a) }
  for _, v in ipairs(b) do out[#out + 1] = v end
  return out
end

local function permuted(t, order) return #order < 2 and t or methods.permute(t, order) end

--- Sums products over dimensions of both tensors. Errors: sizes that differ.
---@param u Tensor  of t's dtype
---@param dims? integer|integer[][]
---   a number: how many of t's last and of u's first dimensions (default: 2); or two lists, the dimensions of t and
---   those of u, from 1; negative from the end
---@return Tensor  the other dimensions of t, then those of u
function methods.tensordot(t, u, dims)
  id_of(t, "tensordot")
  opts.expect(u, a_tensor, "tensordot: argument 1")
  local of_t, of_u = {}, {}
  if type(dims) == "table" then
    if type(dims[1]) ~= "table" or type(dims[2]) ~= "table" or #dims[1] ~= #dims[2] then
      local function text(list) return opts.is_plain(list) and ("a list of %d"):format(#list) or errors.kind(list) end
      errors.raise("tensordot: dimensions are %s and %s, expected a number or two lists of the same length", text(dims[1]),
        text(dims[2]))
    end
    for k, d in ipairs(dims[1]) do of_t[k] = dimension(t, d, "tensordot") + 1 end
    for k, d in ipairs(dims[2]) do of_u[k] = dimension(u, d, "tensordot") + 1 end
  else
    local n = opts.expect(dims == nil and 2 or dims, opts.whole_from(0), "tensordot: number of dimensions")
    if n > math.min(#t.shape, #u.shape) then
      errors.raise("tensordot: shapes %s and %s, expected at least %d dimension%s in both", tostring(t.shape), tostring(u.shape), n,
        n == 1 and "" or "s")
    end
    for k = 1, n do of_t[k], of_u[k] = #t.shape - n + k, k end
  end
  for k = 1, #of_t do
    if t.shape[of_t[k]] ~= u.shape[of_u[k]] then
      errors.raise("tensordot: sizes differ: dimension %d of %s and dimension %d of %s", of_t[k], tostring(t.shape),
        of_u[k], tostring(u.shape))
    end
  end
  return scope.run("tensordot", function()
    local rest_t, rest_u = divide(t, of_t), divide(u, of_u)
    local rows, n_rows = sizes_of(t, rest_t)
    local columns, n_columns = sizes_of(u, rest_u)
    local _, inner = sizes_of(t, of_t)
    local a = methods.reshape(permuted(t, joined(rest_t, of_t)), n_rows, inner)
    local b = methods.reshape(permuted(u, joined(of_u, rest_u)), inner, n_columns)
    return methods.reshape(methods.matmul(a, b), joined(rows, columns))
  end)
end

--- The distance between each row of t and each row of u: the p-norm of their difference. Errors: rows of different
--- sizes.
---@param u Tensor  [..., R, M]; leading dimensions broadcast
---@param p? number  the exponent, at least 0; math.huge: the largest difference; 0: the number of differences
---   (default: 2)
---@return Tensor  [..., P, R] if t has shape [..., P, M]
function methods.cdist(t, u, p)
  id_of(t, "cdist")
  opts.expect(u, a_tensor, "cdist: argument 1")
  p = opts.expect(p == nil and 2 or p, opts.number_from(0), "cdist: p")
  if #t.shape < 2 or #u.shape < 2 or t.shape[#t.shape] ~= u.shape[#u.shape] then
    errors.raise("cdist: shapes %s and %s, expected [..., P, M] and [..., R, M]", tostring(t.shape), tostring(u.shape))
  end
  return scope.run("cdist", function()
    local d = methods.unsqueeze(t, -2) - methods.unsqueeze(u, -3)
    if p == 0 then return methods.to(methods.sum(methods.ne(d, 0), -1), t.dtype) end
    return methods.norm(d, p, -1)
  end)
end

--- The cross product of vectors with 3 elements. Errors: a dimension of another size.
---@param u Tensor  broadcasts with t
---@param d? integer  the vectors' dimension, from 1; negative from the end (default: the first of size 3)
---@return Tensor
function methods.cross(t, u, d)
  id_of(t, "cross")
  opts.expect(u, a_tensor, "cross: argument 1")
  local at = d ~= nil and dimension(t, d, "cross") + 1 or nil
  for k = 1, #t.shape do
    if not at and t.shape[k] == 3 then at = k end
  end
  at = at and at - #t.shape - 1                 -- from the end, because shapes broadcast
  if not at or t.shape[at + #t.shape + 1] ~= 3 or u.shape[at + #u.shape + 1] ~= 3 then
    errors.raise("cross: shapes %s and %s, expected size 3 in %s", tostring(t.shape), tostring(u.shape),
      d ~= nil and ("dimension %d of both"):format(d)
        or "the same dimension of both (default: the first of size 3 in the first tensor)")
  end
  return scope.run("cross", function()
    local function turned(x, by) return methods.roll(x, by, at) end
    return turned(t, -1) * turned(u, -2) - turned(t, -2) * turned(u, -1)
  end)
end

-- ---- einsum ---------------------------------------------------------------------------------------

-- One label for each dimension: letters, and for "..." numbers that count dimensions from the end.
local function labels_of(text, ndim, k)
  local list = {}
  local letters = text:gsub("%.%.%.", "")
  if letters:find "[^%a]" or select(2, text:gsub("%.%.%.", "")) > 1 then
    errors.raise("einsum: '%s' of the equation must consist of letters and at most one '...'", text)
  end
  local others = ndim and ndim - #letters or 0
  if ndim and (others < 0 or others > 0 and not text:find("...", 1, true)) then
    errors.raise("einsum: '%s' names %d dimension%s, but tensor %d has %d", text, #letters, #letters == 1 and "" or "s", k,
      ndim)
  end
  local at = 1
  while at <= #text do
    if text:sub(at, at) == "." then
      for n = others, 1, -1 do list[#list + 1] = n end
      at = at + 3
    else
      list[#list + 1] = text:sub(at, at)
      at = at + 1
    end
  end
  return list
end

local function place_of(list, label)
  for k, other in ipairs(list) do
    if other == label then return k end
  end
end

-- An operand is { t = tensor, labels = list }. Takes diagonals of labels that occur twice.
local function without_repeats(operand)
  local t, labels = operand.t, { unpack(operand.labels) }
  local k = 1
  while k <= #labels do
    local first = place_of(labels, labels[k])
    if first < k then
      if t.shape[first] ~= t.shape[k] then
        errors.raise("einsum: label '%s' has sizes %d and %d, expected equal sizes", labels[k], t.shape[first], t.shape[k])
      end
      t = methods.diagonal(t, 0, first, k)
      labels[#labels + 1] = labels[k]
      table.remove(labels, k)
      table.remove(labels, first)
      k = 1
    else
      k = k + 1
    end
  end
  return { t = t, labels = labels }
end

-- Returns the operand's tensor, summed over labels that are not in `wanted`, with its dimensions in the order of
-- `wanted`; and the sizes of all labels in `wanted`: 1 for those that the operand lacks.
local function ordered(operand, wanted)
  local t, labels, sums = operand.t, {}, {}
  for k, label in ipairs(operand.labels) do
    if place_of(wanted, label) then labels[#labels + 1] = label else sums[#sums + 1] = k end
  end
  if #sums > 0 then t = methods.sum(t, sums) end
  local order, sizes = {}, {}
  for k, label in ipairs(wanted) do
    local at = place_of(labels, label)
    if at then order[#order + 1] = at end
    sizes[k] = at and t.shape[at] or 1
  end
  return permuted(t, order), sizes
end

-- Multiplies two operands and sums over labels that are not in `wanted`, a set.
local function contracted(a, b, wanted)
  local shared, inner, left, right = {}, {}, {}, {}
  for _, label in ipairs(a.labels) do
    if place_of(b.labels, label) then
      table.insert(wanted[label] and shared or inner, label)
    elseif wanted[label] then
      left[#left + 1] = label
    end
  end
  for _, label in ipairs(b.labels) do
    if wanted[label] and not place_of(a.labels, label) then right[#right + 1] = label end
  end
  local ta, sa = ordered(a, joined(joined(shared, left), inner))
  local tb, sb = ordered(b, joined(joined(shared, inner), right))
  local na, nl, ni = #shared, #left, #inner
  local function product(list, first, last)
    local n = 1
    for k = first, last do n = n * list[k] end
    return n
  end
  local batch_a, batch_b, out, wide_a, wide_b = {}, {}, {}, {}, {}
  for k = 1, na do
    batch_a[k], batch_b[k], out[k] = sa[k], sb[k], sa[k] == 1 and sb[k] or sa[k]
  end
  for k = 1, ni do                              -- a size of 1 becomes that of the other operand
    local one, other = sa[na + nl + k], sb[na + k]
    wide_a[k] = one == 1 and other or one
    wide_b[k] = wide_a[k]
  end
  local rows, columns, depth = product(sa, na + 1, na + nl), product(sb, na + ni + 1, #sb), product(wide_a, 1, ni)
  local full_a = joined({ unpack(sa, 1, na + nl) }, wide_a)
  local full_b = joined(joined({ unpack(sb, 1, na) }, wide_b), { unpack(sb, na + ni + 1) })
  if #full_a > 0 then ta = methods.expand(ta, full_a) end
  if #full_b > 0 then tb = methods.expand(tb, full_b) end
  local y = methods.matmul(methods.reshape(ta, joined(batch_a, { rows, depth })),
    methods.reshape(tb, joined(batch_b, { depth, columns })))
  y = methods.reshape(y, joined(out, joined({ unpack(sa, na + 1, na + nl) }, { unpack(sb, na + ni + 1) })))
  return { t = y, labels = joined(shared, joined(left, right)) }
end

-- Reads the equation: the labels of each operand and of the result.
local function parse(equation, list)
  local text = opts.expect(equation, opts.string, "einsum: equation"):gsub("%s", "")
  local inputs, result = text:match "^(.-)%->(.*)$"
  inputs = inputs or text
  local operands, count, widest = {}, {}, 0
  for part in (inputs .. ","):gmatch "([^,]*)," do
    local k = #operands + 1
    if not list[k] then break end
    operands[k] = { t = list[k], labels = labels_of(part, #list[k].shape, k) }
    for _, label in ipairs(operands[k].labels) do
      count[label] = (count[label] or 0) + 1
      if type(label) == "number" then widest = math.max(widest, label) end
    end
  end
  local parts = select(2, inputs:gsub(",", "")) + 1
  if parts ~= #list then errors.raise("einsum: the number of operands is %d in the equation, but that of tensors is %d", parts, #list) end
  local wanted = {}
  if result then
    local letters, dots = result:gsub("%.%.%.", "")
    wanted = labels_of(result, dots > 0 and #letters + widest or nil)
  else
    for n = widest, 1, -1 do wanted[#wanted + 1] = n end
    local once = {}
    for label, n in pairs(count) do             -- in any order: sorted below
      if n == 1 and type(label) == "string" then once[#once + 1] = label end
    end
    table.sort(once)
    wanted = joined(wanted, once)
  end
  for k, label in ipairs(wanted) do
    if not count[label] then errors.raise("einsum: label '%s' of the result is in no operand", label) end
    if place_of(wanted, label) < k then errors.raise("einsum: label '%s' is in the result twice", label) end
  end
  return operands, wanted
end

local function check_sizes(operands)
  local sizes = {}
  for _, operand in ipairs(operands) do
    for k, label in ipairs(operand.labels) do
      local size = operand.t.shape[k]
      if sizes[label] and sizes[label] ~= size and sizes[label] ~= 1 and size ~= 1 then
        errors.raise("einsum: %s has sizes %d and %d, expected equal sizes",
          type(label) == "number" and "a dimension of '...'" or ("label '%s'"):format(label), sizes[label], size)
      end
      if not sizes[label] or sizes[label] == 1 then sizes[label] = size end
    end
  end
end

--- Sums products of tensors, as Einstein's notation describes it: `ms.einsum("bik,bkj->bij", a, b)`. A letter names a
--- dimension; dimensions with the same letter have one index; letters that do not follow `->` are summed over; `...`
--- stands for dimensions without a letter. More than two tensors are multiplied from left to right.
---@param equation string  without `->`, the result has the dimensions of `...`, then the letters that occur once, in
---   alphabetical order
---@param ... Tensor  one for each operand of the equation, of one dtype and device
---@return Tensor
function M.einsum(equation, ...)
  local list = { ... }
  if #list == 1 and opts.is_plain(list[1]) then list = list[1] end
  for k = 1, math.max(#list, 1) do opts.expect(list[k], a_tensor, "einsum: tensor %d", k) end
  local operands, result = parse(equation, list)
  check_sizes(operands)
  return scope.run("einsum", function()
    local so_far = without_repeats(operands[1])
    for k = 2, #operands do
      local wanted = {}
      for _, label in ipairs(result) do wanted[label] = true end
      for later = k + 1, #operands do
        for _, label in ipairs(operands[later].labels) do wanted[label] = true end
      end
      so_far = contracted(so_far, without_repeats(operands[k]), wanted)
    end
    return (ordered(so_far, result))
  end)
end

--- The p-norm of t - u.
---@param u Tensor  broadcasts with t
---@param p? number  the exponent (default: 2)
---@return Tensor  []
function methods.dist(t, u, p)
  id_of(t, "dist")
  opts.expect(u, a_tensor, "dist: argument 1")
  return scope.run("dist", function() return methods.norm(t - u, p or 2) end)
end

--- t, where slices along d whose p-norm exceeds max_norm are scaled down to that norm.
---@param p number  the exponent, above 0
---@param d integer  from 1; negative from the end
---@param max_norm number  the limit, from 0
---@return Tensor
function methods.renorm(t, p, d, max_norm)
  local at = dimension(t, d, "renorm") + 1
  opts.expect(p, opts.positive, "renorm: p")
  opts.expect(max_norm, opts.number_from(0), "renorm: limit")
  local others = {}
  for k = 1, #t.shape do others[#others + 1] = k ~= at and k or nil end
  return scope.run("renorm", function()
    local norm = #others > 0 and methods.norm(t, p, others, { keepdim = true }) or methods.abs(t)
    local factor = max_norm / (norm + 1e-7)
    return t * methods.where(factor, methods.gt(norm, max_norm), methods.detach(factor) * 0 + 1)
  end)
end
--- renorm in place.
---@param p number  the exponent, above 0
---@param d integer  from 1; negative from the end
---@param max_norm number  the limit, from 0
---@return Tensor self
function methods.renorm_(t, p, d, max_norm) return methods.copy_(t, methods.renorm(t, p, d, max_norm)) end

opts.fix(methods, { "dist", "renorm", "renorm_" })
opts.fix(methods, { "outer", "dot", "mv", "kron", "tensordot", "cdist", "cross" })

return M
