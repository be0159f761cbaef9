-- SPDX-License-Identifier: MIT
--- Sparse tensors in coordinate form: `ms.sparse_coo(indices, values, shape)`. Column k of `indices` (int64 [D, N],
--- from 0) is the position of values[k]; values at equal positions are added (`coalesce` does so). values may have
--- dimensions after the first; in the shape these follow the D sparse dimensions.
---
--- A sparse tensor is an instance of a tensor class, with values and indices as its inner tensors, so scopes, keep and
--- release handle it like any tensor. The operators in `linear` and `of_sums` below, which map 0 to 0, run on the
--- values. Products and quotients with numbers, sums, differences, zero_ and moves between devices work, too; all other
--- operators raise an error.
local class = require "moonshard.tensor.class"
local create = require "moonshard.tensor.create"
local autograd = require "moonshard.autograd"
local functions = require "moonshard.autograd.function"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local Plain = tensor.Tensor

local lib, ffi = engine.lib, engine.ffi
local is_tensor, wrap = tensor.is_tensor, tensor.wrap
local setmetatable, rawget, rawset, type = setmetatable, rawget, rawset, type

local M = {}

---@class SparseTensor: Tensor
local Sparse = class.extend(Plain, "Tensor")
local methods, getters = Sparse.methods, {}
class.install(Sparse, methods, getters)

function Sparse:init(indices, values, shape, coalesced)
  rawset(self, "_indices", indices)
  rawset(self, "_values", values)
  rawset(self, "_shape", shape)
  rawset(self, "_coalesced", coalesced or false)
end

-- Values first: they determine dtype and device.
function Sparse:inner_tensors() return { self._values, self._indices } end
function Sparse.from_inner(list, like) return Sparse(list[2], list[1], like._shape, like._coalesced) end

local function is_sparse(x) return is_tensor(x) and x.id < 0 and x.is_sparse end
M.is_sparse = is_sparse

local function dims(t) return t._indices:size(1) end

-- ---- construction -------------------------------------------------------------------------------

local sizes = ffi.new "int64_t[8]"

local function fill_sizes(shape, n)
  for d = 1, n do sizes[d - 1] = shape[d] end
end

--- Makes a sparse tensor in coordinate form: values[k] is at the position in column k of indices, all other elements
--- are 0; values at equal positions are added. Errors: positions outside of the shape.
---@param indices Tensor  int64 [D, N], from 0
---@param values Tensor  [N, …]
---@param shape integer[]  the D sizes of the positions, then those of a value
---@param given? { dtype: string, device: string, requires_grad: boolean }
---@return SparseTensor
function M.sparse_coo(indices, values, shape, given)
  local who = "sparse_coo"
  if type(indices) == "table" and not is_tensor(indices) then indices = create.tensor(indices, { dtype = "int64" }) end
  if type(values) == "table" and not is_tensor(values) then values = create.tensor(values) end
  tensor.id_of(indices, who, "indices")
  tensor.id_of(values, who, "values")
  if type(shape) ~= "table" or is_tensor(shape) then opts.wrong(shape, "a table of sizes", "%s: shape", who) end
  local o = opts(who, given, { dtype = opts.string, device = opts.string, requires_grad = false })
  if indices.ndim ~= 2 or indices.dtype ~= "int64" then
    errors.raise("%s: indices are %s %s, expected int64 [dimensions, values]", who, indices.dtype,
      tostring(indices.shape))
  end
  local d, n = indices:size(1), indices:size(2)
  if values.ndim < 1 or values:size(1) ~= n then
    errors.raise("%s: values have shape %s, expected [%d, ...], a value for each position of the indices", who,
      tostring(values.shape), n)
  end
  local whole = setmetatable({ unpack(shape) }, tensor.Shape)
  if #whole ~= d + values.ndim - 1 or d < 1 then
    errors.raise("%s: shape %s has %d dimension%s, expected %d for the indices (at least 1) and %d for each value", who,
      tostring(whole), #whole, #whole == 1 and "" or "s", d, values.ndim - 1)
  end
  tensor.check_count(who, #whole)
  for k = 1, #whole do
    opts.need(opts.whole_from(0).test(whole[k]) and whole[k] <= 2 ^ 53, whole[k], "a whole number from 0 to 2^53",
      "%s: size %d", who, k)
    if k > d and whole[k] ~= values:size(k - d + 1) then
      errors.raise("%s: size %d of shape %s is %d, expected that of dimension %d of the values, %d", who, k,
        tostring(whole), whole[k], k - d + 1, values:size(k - d + 1))
    end
  end
  local t = autograd.no_grad(function()
    values, indices = values:detach(), indices:detach()
    if o.dtype then values = values:to(o.dtype) end
    if o.device then values = values:to(o.device) end
    fill_sizes(whole, d)
    local here = indices:to "cpu"
    if lib.ms_sparse_coalesce(here.id, sizes, nil, nil) ~= 0 then errors.fail(indices) end
    return Sparse(indices:to(values.device), values, whole)
  end)
  if o.requires_grad then t._values.requires_grad = true end
  return t
end

-- ---- properties ---------------------------------------------------------------------------------

function getters.is_sparse() return true end
function getters.shape(t) return setmetatable({ unpack(t._shape) }, tensor.Shape) end
function getters.ndim(t) return #t._shape end
function getters.grad(t) return rawget(t, "_sparse") or rawget(t, "_dense") end

function methods.dim(t) return #t._shape end
function methods.size(t, d)
  if d == nil then return getters.shape(t) end
  local n = #t._shape
  local at = type(d) == "number" and d % 1 == 0 and (d > 0 and d or d < 0 and d + n + 1) or 0
  if at < 1 or at > n then
    errors.raise("size: dimension %s is out of range; the tensor has %d dimension%s, shape %s", errors.show(d), n,
      n == 1 and "" or "s", tostring(getters.shape(t)))
  end
  return t._shape[at]
end
function methods.numel(t)
  local n = 1
  for _, size in ipairs(t._shape) do n = n * size end
  return n
end
methods.nelement = methods.numel
function methods.is_contiguous() return false end
--- Whether coalesce has put the positions in row-major order, each once; false for positions as they were given.
---@return boolean
function methods.is_coalesced(t) return t._coalesced end

--- The positions; before coalesce, as they were given.
---@return Tensor  int64 [D, N], from 0
function methods.indices(t) return t._indices end
--- The values; before coalesce, several of them may belong to the same position.
---@return Tensor  [N, …]
function methods.values(t) return t._values end

for _, name in ipairs { "item", "data_ptr", "stride", "view", "reshape", "select" } do
  methods[name] = function() errors.raise("%s: the tensor is sparse; call to_dense() first", name) end
end

-- ---- coalescing and conversion ------------------------------------------------------------------

local pair = ffi.new "ms_id[2]"

-- Expands index [N] to the shape of values [N, …].
local function spread(index, values)
  local shape = { index:numel() }
  for k = 2, values.ndim do shape[k] = 1 end
  return index:view(shape):expand(values.shape)
end

--- Returns the same tensor with every position once, in row-major order; values of equal positions are added in their
--- dtype.
---@return SparseTensor
function methods.coalesce(t)
  if t._coalesced then return t end
  return autograd.no_grad(function()
    local d = dims(t)
    fill_sizes(t._shape, d)
    local here = t._indices:to "cpu":contiguous()
    if lib.ms_sparse_coalesce(here.id, sizes, pair, pair + 1) ~= 0 then errors.fail(t) end
    local unique, places = wrap(pair[0]):to(t.device), wrap(pair[1]):to(t.device)
    local shape = t._values.shape
    shape[1] = unique:size(2)
    local sums = create.zeros(shape, { dtype = t.dtype, device = t.device })
    if t._values:numel() > 0 then sums:scatter_add_(1, spread(places, t._values), t._values) end
    return Sparse(unique, sums, t._shape, true)
  end)
end

--- t as a dense tensor; values at equal positions are added.
---@return Tensor
function methods.to_dense(t)
  return autograd.no_grad(function()
    local d, cells, shape = dims(t), 1, { 1 }
    for k = 1, d do cells = cells * t._shape[k] end
    local place
    for k = 1, d do
      local index = t._indices[k]
      place = place and place * t._shape[k] + index or index
    end
    shape[1] = cells
    for k = d + 1, #t._shape do shape[#shape + 1] = t._shape[k] end
    local out = create.zeros(shape, { dtype = t.dtype, device = t.device })
    if t._values:numel() > 0 then out:scatter_add_(1, spread(place, t._values), t._values) end
    return out:view(t._shape)
  end)
end

function methods.tolist(t) return methods.to_dense(t):tolist() end

local plain_equal, plain_allclose = Plain.methods.equal, Plain.methods.allclose
local function dense(x) return is_sparse(x) and x:to_dense() or x end
function methods.equal(t, u) return plain_equal(dense(t), dense(u)) end
function methods.allclose(t, u, given) return plain_allclose(dense(t), dense(u), given) end

-- ---- operations ----------------------------------------------------------------------------------

local function with_values(t, values, coalesced)
  return Sparse(t._indices, values, t._shape, coalesced == nil and t._coalesced or coalesced)
end

-- Operators that run on the values: linear ones also when positions repeat; the others need coalesced values.
local linear, of_sums = {}, {}
for _, name in ipairs { "neg", "cast", "clone" } do linear[name] = true end
for _, name in ipairs { "abs", "sign", "sqrt", "relu", "sin", "tanh" } do of_sums[name] = true end

local function sum(t, u)
  return Sparse(shapes.cat({ t._indices, u._indices }, 2), shapes.cat { t._values, u._values }, t._shape, false)
end

local function refuse(name, why)
  errors.raise("%s: %s; call to_dense() first", name, why or "not supported for sparse tensors")
end

local function add(op, a, b, factor)
  if is_sparse(a) and is_sparse(b) then
    if getters.shape(a) ~= getters.shape(b) then
      refuse(op.name, ("the sparse tensors have different shapes, %s and %s"):format(tostring(a.shape), tostring(b.shape)))
    end
    return sum(a, factor == 1 and b or b * factor)
  end
  return op(dense(a), dense(b))
end

function Sparse.dispatch(op, a, b)
  local name = op.name
  if linear[name] then
    if name == "clone" then return Sparse(a._indices:clone(), op(a._values), a._shape, a._coalesced) end
    return with_values(a, op(a._values))
  elseif of_sums[name] then
    a = a:coalesce()
    return with_values(a, op(a._values))
  elseif name == "to_device" then
    return Sparse(op(a._indices), op(a._values), a._shape, a._coalesced)
  elseif name == "mul" or name == "div" then
    local factor = b
    if factor == nil then return with_values(a, op(a._values)) end              -- the factor is a number
    if is_sparse(a) and not is_sparse(factor) and factor.ndim == 0 then return with_values(a, op(a._values, factor)) end
    if name == "mul" and is_sparse(factor) and not is_sparse(a) and a.ndim == 0 then
      return with_values(factor, op(a, factor._values))
    end
    return refuse(name, "a sparse tensor can only be multiplied or divided by a number or a 0-dim tensor")
  elseif name == "mul_" or name == "div_" then
    if not is_sparse(a) or b ~= nil and (is_sparse(b) or b.ndim ~= 0) then
      refuse(name, "a sparse tensor can only be multiplied or divided by a number or a 0-dim tensor")
    end
    op(a._values, b)
    return a
  elseif name == "zero_" then
    op(a._values)
    return a
  elseif name == "add" and b ~= nil then
    return add(op, a, b, op.f[1] or 1)
  elseif name == "sub" and b ~= nil then
    return add(op, a, b, -(op.f[1] or 1))
  elseif (name == "add_" or name == "sub_") and b ~= nil and not is_sparse(a) then
    op(a, b:to_dense())
    return a
  elseif name == "add_" and b ~= nil and is_sparse(b) then
    local both = add(op, a, b, op.f[1] or 1)
    M.replace(a, both)
    return a
  elseif name == "sum" and op.n_i == 0 then
    return op(a._values)
  end
  return refuse(name)
end

--- Gives t the contents of u. If t was kept beyond its scope, u's inner tensors are kept, too.
function M.replace(t, u)
  for _, part in ipairs { u._indices, u._values } do
    if rawget(t._values, "_owner") then part:keep() end
  end
  rawset(t, "_indices", u._indices)
  rawset(t, "_values", u._values)
  rawset(t, "_coalesced", u._coalesced)
end

-- ---- sparse gradients ---------------------------------------------------------------------------

local function keep_grad(t, g)
  rawset(t, "_sparse", g and g:keep())
end

-- Makes g the gradient of t, a dense or sparse leaf.
local function become_grad(g, t)
  if t.is_leaf == false then
    errors.raise("grad: the tensor is the result of an operator; only leaves have a grad")
  end
  if g.shape ~= t.shape or g.dtype ~= t.dtype or g.device ~= t.device then
    errors.raise("grad: value is %s %s %s, expected %s %s %s", g.dtype, tostring(g.shape), g.device, t.dtype,
      tostring(t.shape), t.device)
  end
  if rawget(t, "_sparse") == g then return end
  if t.id >= 0 then t.grad = nil end
  keep_grad(t, g)
end
methods._become_grad = become_grad

rawset(Sparse, "__newindex", function(t, key, value)
  if key == "grad" then
    rawset(t, "_sparse", nil)
    rawset(t, "_dense", nil)
    if value == nil then return end
    if is_sparse(value) then return become_grad(value, t) end
    tensor.id_of(value, "grad", "value")
    if value.shape ~= t.shape then
      errors.raise("grad: value has shape %s, but the tensor has %s", tostring(value.shape), tostring(t.shape))
    end
    rawset(t, "_dense", value:keep())
    return
  elseif key == "requires_grad" then
    t._values.requires_grad = value
    return
  end
  return Plain.__newindex(t, key, value)
end)

--- Marks the gradient of a leaf, sparse or not, as this rank's own, which optimizers and clip_grad_norm_ refuse.
---@param t Tensor
function M.set_local(t)
  local g = rawget(t, "_sparse")
  if g then rawset(g, "_rank_local", true) else errors.check(lib.ms_grad_set_local(t.id, 1), t) end
end

--- Whether a leaf has a sparse gradient that set_local has marked.
---@param t Tensor
---@return boolean
function M.is_local(t)
  local g = rawget(t, "_sparse")
  return g ~= nil and rawget(g, "_rank_local") == true
end

--- Raises if the gradient of a leaf, sparse or not, has not been reduced.
---@param t Tensor
function M.expect_reduced(t)
  if t.id >= 0 and lib.ms_unit_check_reduced(t.id) ~= 0 then errors.fail(t) end
  if M.is_local(t) then
    errors.raise "the sparse gradient of a parameter of nn.DDP has not been reduced; run a backward outside of no_sync first"
  end
end

--- Adds a sparse gradient to the grad of a dense leaf; that grad may be sparse, dense or nil.
---@param t Tensor  a dense leaf
---@param g SparseTensor  of t's shape
function M.accumulate(t, g)
  autograd.no_grad(function()
    local now = t.grad
    if now == nil then
      keep_grad(t, g)
    elseif is_sparse(now) then
      t.grad = now + g
    else
      now:add_(g)
    end
  end)
end

-- Removes the dense gradients that with_dense_grads set, so that the sparse ones are the leaves' gradients again.
local function restore(changed, ...)
  for k = #changed, 1, -1 do lib.ms_set_grad(changed[k].id, 0) end
  return context.results(...)
end

--- Runs fn(…) while all sparse gradients of these leaves are replaced by dense ones, because the engine reads only
--- dense gradients.
---@param leaves Tensor[]  dense leaves, whose gradients may be sparse
---@param fn function  called with the arguments that follow
function M.with_dense_grads(leaves, fn, ...)
  local changed
  for k = 1, #leaves do
    local g = rawget(leaves[k], "_sparse")
    if g and leaves[k].id >= 0 then
      changed = changed or {}
      local whole = g:to_dense()
      if lib.ms_set_grad(leaves[k].id, whole.id) ~= 0 then errors.fail(leaves[k]) end
      if M.is_local(leaves[k]) then lib.ms_grad_set_local(leaves[k].id, 1) end
      changed[#changed + 1] = leaves[k]
    end
  end
  if not changed then return fn(...) end
  return restore(changed, pcall(fn, ...))
end

-- ---- embeddings ----------------------------------------------------------------------------------

local function embedding_backward(ctx, g)
  local ids = ctx:saved()
  local w = ctx.weight
  local n, d = ids:numel(), w:size(2)
  local flat = ids:reshape(1, n)
  local values = g:reshape(n, d)
  if ctx.padding then values = values:masked_fill(flat:reshape(n, 1):eq(ctx.padding), 0) end
  if flat.dtype ~= "int64" then flat = flat:long() end
  M.accumulate(w, Sparse(flat:clone(), values:to(w.dtype), w.shape))
end

--- Whether w may have a sparse gradient: leaves may, unless they are sharded, because units reduce dense gradients.
---@param w Tensor  the table of an embedding
---@return boolean
function M.takes(w) return w.id >= 0 and tensor.info_of(w).is_leaf ~= 0 and lib.ms_unit_of(w.id) == 0 end

--- Makes a function that looks up rows of w and has a sparse gradient. look(w, ids, padding): the engine's operator.
function M.embedding(look)
  return functions.Function {
    forward = function(ctx, w, ids, padding)
      ctx.weight, ctx.padding = w, padding
      ctx:save(ids)
      return look(w, ids, padding)
    end,
    backward = embedding_backward,
  }
end

-- ---- printing ------------------------------------------------------------------------------------

rawset(Sparse, "__tostring", function(t)
  if t:is_released() then return "Tensor (released)" end
  local head = ("Tensor %s %s %s, sparse, %s%s%s"):format(t.dtype, tostring(t.shape), t.device,
    errors.count(t._values:size(1), "value"), t._coalesced and "" or ", not coalesced",
    t.requires_grad and ", requires_grad" or "")
  local function rows(part) return tostring(part):match "\n(.*)$" end
  local indices, values = rows(t._indices), rows(t._values:detach())
  if not indices or not values then return head end
  local lines = {}
  for line in (indices .. "\n" .. values):gmatch "[^\n]+" do lines[#lines + 1] = line end
  if #lines > 20 then lines = { unpack(lines, 1, 19) } lines[20] = "…" end
  return head .. "\n" .. table.concat(lines, "\n")
end)

-- ---- plain tensors ---------------------------------------------------------------------------------

--- t itself, which is dense already. SparseTensor:to_dense converts a sparse tensor.
---@return Tensor
function Plain.methods.to_dense(t)
  tensor.id_of(t, "to_dense")
  return t
end

--- A sparse tensor with the elements that are not 0. No gradient. Waits for the device.
---@return SparseTensor
function Plain.methods.to_sparse(t)
  tensor.id_of(t, "to_sparse")
  return autograd.no_grad(function()
    local there = t:detach()
    return M.sparse_coo(there:nonzero():t(), there[there:ne(0)], there.shape)
  end)
end

M.Sparse = Sparse
return M
