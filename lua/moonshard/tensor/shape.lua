-- SPDX-License-Identifier: MIT
--- Shapes: views, splitting, joining, repeating, triangles, indexing.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local create = require "moonshard.tensor.create"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local whole = require "moonshard.tensor.rows".whole

local op, a_in, a_i, args = engine.op, engine.a_in, engine.a_i, engine.args
local methods, getters = tensor.methods, tensor.getters
local wrap, wrap_same, id_of, is_tensor = tensor.wrap, tensor.wrap_same, tensor.id_of, tensor.is_tensor
local position, dimension, info_of = tensor.position, tensor.dimension, tensor.info_of
local call1_with = tensor.call1_with
local type, select, unpack = type, select, unpack
local new_table = require "table.new"
local a_tensor = tensor.a_tensor

local M = {}

--- Writes sizes, given as numbers or one table, to engine.a_i, from index `at` on.
---@return integer n
local function sizes(who, at, first, ...)
  if type(first) == "table" and not is_tensor(first) then
    local n = #first
    if n == 0 then opts.none(who, first) end
    tensor.check_count(who, n)
    for k = 1, n do a_i[at + k - 1] = whole(first[k], who, "size " .. k) end
    return n
  end
  if first == nil then return 0 end
  a_i[at] = whole(first, who, "size 1")
  local n = select("#", ...)
  tensor.check_count(who, n + 1)
  for k = 1, n do a_i[at + k] = whole((select(k, ...)), who, "size") end
  return n + 1
end

-- ---- views --------------------------------------------------------------------------------------

local VIEW, RESHAPE, EXPAND, TRANSPOSE, PERMUTE = op "view", op "reshape", op "expand", op "transpose", op "permute"
local NARROW, SELECT, SQUEEZE, UNSQUEEZE = op "narrow", op "select", op "squeeze", op "unsqueeze"

--- The same elements in another shape, without copying. Errors: the number of elements differs; strides that would need
--- a copy (see reshape).
---@param ... integer|integer[]  sizes, as numbers or one list; one of them may be -1 and is then computed
---@return Tensor  shares t's storage
function methods.view(t, ...) return wrap_same(call1_with(VIEW, t, "view", sizes("view", 0, ...)), t) end

--- The same elements in another shape: a view if t's strides allow it, otherwise a copy. Errors: the number of elements
--- differs.
---@param ... integer|integer[]  sizes, as numbers or one list; one of them may be -1 and is then computed
---@return Tensor
function methods.reshape(t, ...) return wrap_same(call1_with(RESHAPE, t, "reshape", sizes("reshape", 0, ...)), t) end

--- Repeats dimensions of size 1 without copying; new dimensions may be added in front. Errors: a size other than 1
--- would change.
---@param ... integer|integer[]  sizes, as numbers or one list; -1 keeps a size
---@return Tensor  shares t's storage; an element occurs at several positions
function methods.expand(t, ...) return wrap_same(call1_with(EXPAND, t, "expand", sizes("expand", 0, ...)), t) end
for _, name in ipairs { "expand", "view" } do
  methods[name .. "_as"] = function(t, u)
    opts.expect(u, a_tensor, "%s_as: argument 1", name)
    return methods[name](t, u.shape)
  end
end

--- Merges dimensions first to last into one. A view if the strides allow it, otherwise a copy.
---@param first? integer  from 1; negative from the end (default: 1)
---@param last? integer   from 1; negative from the end (default: the last dimension)
---@return Tensor
function methods.flatten(t, first, last)
  id_of(t, "flatten")
  local n = info_of(t).ndim
  if n == 0 then return methods.reshape(t, 1) end
  local a, b = dimension(t, first or 1, "flatten"), dimension(t, last or -1, "flatten")
  if a > b then errors.raise("flatten: first dimension %d comes after the last, %d", first, last) end
  local shape = methods.size(t)
  local out, joined = {}, 1
  for d = 1, n do
    if d < a + 1 or d > b + 1 then
      out[#out + 1] = shape[d]
    else
      joined = joined * shape[d]
      if d == b + 1 then out[#out + 1] = joined end
    end
  end
  return methods.reshape(t, out)
end

--- Swaps two dimensions, without copying.
---@param d1 integer  from 1; negative from the end
---@param d2 integer  from 1; negative from the end
---@return Tensor  shares t's storage
function methods.transpose(t, d1, d2)
  a_i[0], a_i[1] = position(d1, "transpose"), position(d2, "transpose")
  return wrap(call1_with(TRANSPOSE, t, "transpose", 2))
end

--- The transpose of a matrix, without copying; a tensor of fewer dimensions returns itself. Errors: more than 2
--- dimensions.
---@return Tensor  shape [B, A] if t has shape [A, B]
function methods.t(t)
  id_of(t, "t")
  local n = info_of(t).ndim
  if n > 2 then
    errors.raise("t: the tensor has %d dimensions, shape %s, expected at most 2; transpose(d1, d2) swaps two "
      .. "dimensions of any tensor", n, tostring(t.shape))
  end
  if n < 2 then return t end
  return methods.transpose(t, 1, 2)
end

function getters.T(t) return methods.t(t) end
function getters.mT(t)
  local n = info_of(t).ndim
  if n < 2 then errors.raise("mT: the shape is %s; at least 2 dimensions expected", tostring(t.shape)) end
  return methods.transpose(t, -2, -1)
end

--- The dimensions in another order, without copying.
---@param ... integer|integer[]  for each dimension of the result, the dimension of t; each of t's dimensions once
---@return Tensor  shares t's storage
function methods.permute(t, ...)
  local n = sizes("permute", 0, ...)
  for k = 0, n - 1 do a_i[k] = position(tonumber(a_i[k]), "permute") end
  return wrap(call1_with(PERMUTE, t, "permute", n))
end

-- Converts a position along a dimension of the given size (from 1, negative from the end) to one from 0. last: 1 also
-- allows the position after the last element.
local function index(i, size, who, last)
  whole(i, who, "position")
  local at = i > 0 and i - 1 or i + size
  if i == 0 or at < 0 or at >= size + (last or 0) then
    errors.raise("%s: position %d is out of range for size %d%s", who, i, size, i == 0 and ": positions count from 1" or "")
  end
  return at
end

--- Elements start to start + length - 1 along d, without copying. Errors: a range that exceeds the size.
---@param d integer  from 1; negative from the end
---@param start integer   position of the first one, from 1; negative from the end
---@param length integer  may be 0
---@return Tensor  shares t's storage; its size along d is length
function methods.narrow(t, d, start, length)
  id_of(t, "narrow")
  local at = dimension(t, d, "narrow")
  local size = tonumber(engine.info.shape[at])
  whole(length, "narrow", "length")
  if length < 0 then opts.wrong(length, "a whole number from 0", "narrow: length") end
  local first = index(start, size, "narrow", length == 0 and 1 or 0)
  if first + length > size then
    errors.raise("narrow: %d elements from position %d exceed size %d", length, start, size)
  end
  a_i[0], a_i[1], a_i[2] = at, first, length
  return wrap(call1_with(NARROW, t, "narrow", 3))
end

--- Element i along d, without that dimension and without copying; `t[i]` is `t:select(1, i)`. Errors: i is out of
--- range.
---@param d integer  from 1; negative from the end
---@param i integer  from 1; negative from the end
---@return Tensor  shares t's storage
function methods.select(t, d, i)
  id_of(t, "select")
  local at = dimension(t, d, "select")
  a_i[0], a_i[1] = at, index(i, tonumber(engine.info.shape[at]), "select")
  return wrap(call1_with(SELECT, t, "select", 2))
end

--- Assigns t[i] = v.
function methods._set_item(t, i, v)
  local part = methods.select(t, 1, i)
  if is_tensor(v) then methods.copy_(part, v) else methods.fill_(part, v) end
end

--- Removes dimensions of size 1: all of them, or those of the given dimensions that have size 1.
---@param ... integer|integer[]  dimensions, from 1; negative from the end (default: all)
---@return Tensor  shares t's storage
function methods.squeeze(t, ...)
  local n = sizes("squeeze", 0, ...)
  for k = 0, n - 1 do a_i[k] = position(tonumber(a_i[k]), "squeeze") end
  return wrap_same(call1_with(SQUEEZE, t, "squeeze", n), t)
end

local UNFOLD = op "unfold"
--- Windows of neighbours along d, without copying; the elements of a window are the result's last dimension. Errors: a
--- window larger than the dimension.
---@param d integer  from 1; negative from the end
---@param size integer  elements of a window
---@param step integer  distance of the first elements of neighbouring windows, at least 1
---@return Tensor  shares t's storage
function methods.unfold(t, d, size, step)
  id_of(t, "unfold")
  local at = dimension(t, d, "unfold")
  local n = tonumber(engine.info.shape[at])
  if whole(size, "unfold", "size") < 0 or size > n then
    errors.raise("unfold: size is %d, expected 0 to %d, the size of dimension %d", size, n, d)
  end
  if whole(step, "unfold", "step") < 1 then errors.raise("unfold: step is %d, expected at least 1", step) end
  a_i[0], a_i[1], a_i[2] = at, size, step
  return wrap(call1_with(UNFOLD, t, "unfold", 3))
end

--- Adds a dimension of size 1.
---@param d integer  its position in the result, from 1; -1: after the last dimension
---@return Tensor  shares t's storage
function methods.unsqueeze(t, d)
  id_of(t, "unsqueeze")
  local n = info_of(t).ndim
  local at = position(d, "unsqueeze")
  if at < 0 then at = at + n + 1 end
  if at < 0 or at > n then errors.raise("unsqueeze: dimension %d is out of range; the result has %d dimension%s", d, n + 1, n == 0 and "" or "s") end
  a_i[0] = at
  return wrap(call1_with(UNSQUEEZE, t, "unsqueeze", 1))
end

local AS_STRIDED = op "as_strided"
--- A view of any elements of a contiguous tensor; several places of the view may be one element, whose gradients are
--- added. Errors: a tensor that is not contiguous, places outside of it.
---@param size integer[]  the sizes of the view
---@param stride integer[]  by how many elements of t neighbours along each dimension are apart
---@param offset? integer  the first element, from 0 (default: 0); counts from t's first element; in PyTorch, from the
---   first element of the storage
---@return Tensor  a view
function methods.as_strided(t, size, stride, offset)
  opts.expect(size, opts.table, "as_strided: sizes")
  opts.expect(stride, opts.table, "as_strided: strides")
  local n = #size
  if #stride ~= n then errors.raise("as_strided: the number of sizes is %d and that of strides %d, expected equal numbers", n, #stride) end
  tensor.check_count("as_strided", n)
  a_i[0] = opts.expect(offset == nil and 0 or offset, opts.whole_from(0), "as_strided: offset")
  for k = 1, n do
    a_i[k] = opts.expect(size[k], opts.whole_from(0), "as_strided: size %d", k)
    a_i[n + k] = opts.expect(stride[k], opts.whole_from(0), "as_strided: stride %d", k)
  end
  return wrap(call1_with(AS_STRIDED, t, "as_strided", 1 + 2 * n))
end

-- ---- splitting ----------------------------------------------------------------------------------

local SPLIT = op "split"
local MAX_PIECES = 20                           -- sizes are integer arguments of the operator, which has at most 24

--- Splits t along d into pieces, without copying. Errors: listed sizes whose sum differs from the size of d.
---@param size integer|integer[]  size of each piece (the last may be smaller), or a list of sizes
---@param d? integer  from 1; negative from the end (default: 1)
---@return Tensor[]  they share t's storage
function methods.split(t, size, d)
  id_of(t, "split")
  local at = dimension(t, d or 1, "split")
  local total = tonumber(engine.info.shape[at])
  local sizes_given, count = type(size) == "table"
  if sizes_given then
    local sum = 0
    count = #size
    for k = 1, count do
      if whole(size[k], "split", "size") < 0 then errors.raise("split: the size of piece %d is %d, expected a whole number from 0", k, size[k]) end
      sum = sum + size[k]
    end
    if sum ~= total then
      errors.raise("split: sizes %s add up to %d, but dimension %d has size %d",
        tostring(setmetatable({ unpack(size) }, tensor.Shape)), sum, d or 1, total)
    end
  else
    if whole(size, "split", "size") <= 0 then errors.raise("split: size is %d, expected a whole number from 1", size) end
    count = math.max(math.ceil(total / size), 1)
  end
  local out = new_table(count, 0)
  -- The operator split reads a single size as that of every piece, and refuses 0: narrow makes a single piece.
  if count > MAX_PIECES or count == 1 then
    local first = 0
    for k = 1, count do
      local piece = sizes_given and size[k] or math.min(size, total - first)
      a_i[0], a_i[1], a_i[2] = at, first, piece
      out[k] = wrap(call1_with(NARROW, t, "split", 3))
      first = first + piece
    end
    return out
  end
  a_i[0] = at
  for k = 1, count do a_i[k] = sizes_given and size[k] or math.min(size, total - (k - 1) * size) end
  call1_with(SPLIT, t, "split", count + 1)
  local n = args.n_out
  for k = 1, n do out[k] = engine.a_out[k - 1] end
  for k = 1, n do out[k] = wrap_same(out[k], t) end
  return out
end

--- Splits t along d into n pieces of equal size, without copying. The last piece may be smaller, and there may be fewer
--- pieces.
---@param n integer  at least 1
---@param d? integer  from 1; negative from the end (default: 1)
---@return Tensor[]  they share t's storage
function methods.chunk(t, n, d)
  id_of(t, "chunk")
  if whole(n, "chunk", "number of pieces") <= 0 then
    errors.raise("chunk: number of pieces is %d, expected at least 1", n)
  end
  local total = tonumber(engine.info.shape[dimension(t, d or 1, "chunk")])
  return methods.split(t, math.max(1, math.ceil(total / n)), d)
end

--- All slices along d, without that dimension and without copying.
---@param d? integer  from 1; negative from the end (default: 1)
---@return Tensor[]  they share t's storage
function methods.unbind(t, d)
  id_of(t, "unbind")
  local out = {}
  for k = 1, methods.size(t, d or 1) do out[k] = methods.select(t, d or 1, k) end
  return out
end

-- ---- joining ------------------------------------------------------------------------------------

local CAT, STACK, TILE = op "cat", op "stack", op "tile"

local function join(number, who, list, d)
  if type(list) ~= "table" or is_tensor(list) then opts.wrong(list, "a list of tensors", "%s: argument 1", who) end
  local n = #list
  if n == 0 then
    opts.need(opts.is_plain(list), list, "a list of tensors", "%s: argument 1", who)
    errors.raise("%s: the list is empty, expected at least one tensor", who)
  end
  args.n_in, args.n_i, args.n_f = n, 1, 0
  for k = 1, n do a_in[k - 1] = id_of(list[k], who, "element " .. k) end
  a_i[0] = position(d or 1, who)
  return wrap(tensor.call(number, list[1], list[2], list[3]))
end

--- Concatenates tensors along d, by copying. Errors: different sizes except along d, different dtypes or devices; an
--- empty list.
---@param list Tensor[]  equal sizes except along d; one dtype and device
---@param d? integer  from 1; negative from the end (default: 1)
---@return Tensor
function M.cat(list, d)
  local n = type(list) == "table" and #list or 0
  if n <= engine.MAX_IN then return join(CAT, "cat", list, d) end
  local parts = {}
  for first = 1, n, engine.MAX_IN do
    local part = {}
    for k = first, math.min(n, first + engine.MAX_IN - 1) do part[#part + 1] = list[k] end
    parts[#parts + 1] = join(CAT, "cat", part, d)
  end
  return M.cat(parts, d)
end

--- Joins tensors of one shape along a new dimension, by copying. Errors: different shapes, dtypes or devices; an empty
--- list.
---@param list Tensor[]  one shape, dtype and device
---@param d? integer  position of the new dimension (default: 1)
---@return Tensor
function M.stack(list, d)
  local n = type(list) == "table" and #list or 0
  if n <= engine.MAX_IN then return join(STACK, "stack", list, d) end
  local rows = {}
  for k = 1, n do rows[k] = methods.unsqueeze(list[k], d or 1) end
  return M.cat(rows, d)
end

--- Repeats the whole tensor along its dimensions.
---@param ... integer|integer[]  number of repetitions for each dimension; additional numbers add dimensions in front
---@return Tensor
function methods.tile(t, ...) return wrap(call1_with(TILE, t, "tile", sizes("tile", 0, ...))) end
methods["repeat"] = methods.tile

-- ---- by index: ids inside tensors are 0-based -----------------------------------------------------

local function with_index(number, who, t, d, idx, src)
  args.n_in, args.n_i, args.n_f = src and 3 or 2, 1, 0
  a_in[0], a_in[1] = id_of(t, who), id_of(idx, who, "index")
  if src then a_in[2] = id_of(src, who, "source") end
  a_i[0] = position(d, who)
  return tensor.call(number, t, idx, src)
end

local INDEX_SELECT, SCATTER_ = op "index_select", op "scatter_"

--- The elements of t along d at the positions in idx, in that order, copied. Errors: an id outside of 0 to size - 1.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64 [n]; ids from 0
---@return Tensor  its size along d is n
function methods.index_select(t, d, idx)
  if id_of(t, "index_select") >= 0 and info_of(t).ndim == 0 then
    return methods.reshape(methods.index_select(methods.reshape(t, 1), d, idx), {})
  end
  return wrap(with_index(INDEX_SELECT, "index_select", t, d, idx))
end

--- Writes src along d at the positions in idx: `t[i][idx[i][j]] = src[i][j]` for d = 2. If a position occurs twice, one
--- of the values remains. Errors: an id outside of 0 to size - 1.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64, of as many dimensions as t; ids from 0
---@param src Tensor|number  at least of idx's shape, of t's dtype
---@return Tensor self
function methods.scatter_(t, d, idx, src)
  if type(src) == "number" then
    id_of(t, "scatter_")
    id_of(idx, "scatter_", "index")
    src = methods.expand(create.tensor(src, { dtype = t.dtype, device = t.device }), idx.shape)
  end
  with_index(SCATTER_, "scatter_", t, d, idx, src)
  return t
end

--- As scatter_, on a copy.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64, of as many dimensions as t; ids from 0
---@param src Tensor|number  at least of idx's shape, of t's dtype
---@return Tensor
function methods.scatter(t, d, idx, src) return methods.scatter_(methods.clone(t), d, idx, src) end

opts.fix(methods, { "flatten", "transpose", "t", "narrow", "select", "unfold", "unsqueeze", "split", "chunk",
  "index_select", "scatter_" })
opts.fix(M, { "cat", "stack" })

return M
