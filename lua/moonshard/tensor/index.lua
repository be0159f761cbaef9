-- SPDX-License-Identifier: MIT
--- `t[key]` and `t[key] = v` for a list or a tensor as key. A list has an entry for each dimension, from the first on:
---
---   2, -1            the position 2, the last position; the result lacks that dimension, as with select
---   { 2, 5 }         the positions 2 to 5; { 2, 9, step = 3 } every third of 2 to 9; {} all
---   { at = { 4, 1 } }   the positions 4 and 1, in this order
---   "..."            as many whole dimensions as are missing
---   a bool tensor    a mask of as many dimensions as it has: the positions where it is true
---   an int64 tensor  (or int32) positions as data, which count from 0; they broadcast with those of other entries
---
--- Positions written in Lua count from 1, negative ones from the end. A tensor as key is a list with this one entry.
--- Entries that are numbers and ranges give a view; tensors and { at = … } copy.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local positions = require "moonshard.tensor.positions"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local methods, is_tensor, wrap = tensor.methods, tensor.is_tensor, tensor.wrap
local SLICE = engine.op "slice"

-- ---- reading a key --------------------------------------------------------------------------------

local function bad_entry(entry, d)
  opts.wrong(entry, "a position, { first, last }, { at = { … } } or a tensor", "index: entry for dimension %d", d)
end

-- Converts position v of dimension d, which has n elements: v counts from 1, or from the end if it is negative; the
-- result counts from 0.
local function place(v, n, d)
  if type(v) ~= "number" or v % 1 ~= 0 or v == 0 or v > n or v < -n then
    errors.raise("index: position %s is not inside dimension %d (%s)", tostring(v), d, n == 0 and "its size is 0"
      or ("expected 1 to %d, or -1 to -%d"):format(n, n))
  end
  return v > 0 and v - 1 or v + n
end

local function listed(entry, t, n, d)
  local list = {}
  for name in pairs(entry) do
    if name ~= "at" then errors.raise("index: unknown name %s in the entry for dimension %d (accepted: at)",
      errors.show(name), d) end
  end
  if not opts.is_plain(entry.at) then bad_entry(entry.at, d) end
  for k, v in ipairs(entry.at) do list[k] = place(v, n, d) end
  return create.tensor(list, { dtype = "int64", device = t.device })
end

-- The part of t in a range of dimension d: a view. axis: the dimension's number in the tensor that was indexed.
local function ranged(t, d, entry, axis)
  local n, first, last, step = t.shape[d], entry[1], entry[2], 1
  for name, v in pairs(entry) do
    if name == "step" then
      step = opts.expect(v, opts.whole_from(1), "index: step in dimension %d", axis)
    elseif type(name) ~= "number" then
      errors.raise("index: unknown name %s in the entry for dimension %d (accepted: step)", errors.show(name), axis)
    elseif name ~= 1 and name ~= 2 then
      errors.raise("index: the entry for dimension %d has %d elements, expected { first, last }; to select single "
        .. "positions write { at = { … } }", axis, #entry)
    end
  end
  if first == nil and last == nil then first, last = 1, n end
  if type(first) ~= "number" or type(last) ~= "number" or first % 1 ~= 0 or last % 1 ~= 0 then bad_entry(entry, axis) end
  local from, to = first < 0 and first + n or first - 1, last < 0 and last + n or last - 1
  -- { 3, 2 } is empty, as a loop from 3 to 2 is.
  if from < 0 or to >= n or to < from - 1 then
    errors.raise("index: positions %d to %d are not a range of dimension %d, which has size %d%s", first, last, axis, n,
      first == 0 and ": positions count from 1" or "")
  end
  local count = math.floor((to - from) / step) + 1
  local a_i = engine.a_i
  a_i[0], a_i[1], a_i[2], a_i[3] = d - 1, from, count, step
  return wrap(tensor.call1_with(SLICE, t, "index", 4))
end

local function check_ids(entry, t, d, axis, whole)
  if entry.dtype == "int64" or entry.dtype == "int32" then return 1 end
  if entry.dtype ~= "bool" then
    errors.raise("index: the tensor for dimension %d is %s %s, expected bool (a mask) or int64 (positions from 0)", axis,
      entry.dtype, tostring(entry.shape))
  end
  local n = #entry.shape
  for k = 1, n do
    if entry.shape[k] ~= t.shape[d + k - 1] then
      errors.raise("index: the mask has shape %s, expected the sizes of the tensor, %s, from dimension %d on",
        tostring(entry.shape), tostring(whole), axis)
    end
  end
  return n
end

-- Applies the entries that give views. Returns the view, and for each other entry { d, tensor, dims, axis }: the tensor
-- indexes `dims` dimensions, the first of which is dimension d of the view and dimension `axis` of t.
local function start(t, key)
  if is_tensor(key) then key = { key } end
  if not opts.is_plain(key) then
    opts.wrong(key, "a position, a list of positions and ranges, or a tensor", "index: key")
  end
  local count, used = #key, 0
  for k = 1, count do
    local entry = key[k]
    if entry ~= "..." then used = used + (is_tensor(entry) and entry.dtype == "bool" and #entry.shape or 1) end
  end
  local n = #t.shape
  for name in pairs(key) do
    if type(name) ~= "number" then
      errors.raise("index: the key has a field named %s, expected a list with an entry for each dimension", errors.show(name))
    end
  end
  if used > n then
    local only_numbers = used == count
    for k = 1, count do only_numbers = only_numbers and type(key[k]) == "number" end
    errors.raise("index: entries for %d dimension%s, but the tensor has %d, shape %s%s", used, used == 1 and "" or "s", n, tostring(t.shape),
      only_numbers and "; for a list of positions along the first dimension write x[{ { at = list } }]" or "")
  end
  local d, axis, whole, others = 1, 1, t.shape, {}
  for k = 1, count do
    local entry = key[k]
    if entry == "..." then
      d, axis, used = d + n - used, axis + n - used, n
    elseif type(entry) == "number" then
      t = methods.select(t, d, place(entry, t.shape[d], axis) + 1)
      axis = axis + 1
    elseif is_tensor(entry) then
      local dims = check_ids(entry, t, d, axis, whole)
      others[#others + 1] = { d, entry, dims, axis }
      d, axis = d + dims, axis + dims
    elseif not opts.is_plain(entry) then
      bad_entry(entry, axis)
    elseif entry.at ~= nil then
      others[#others + 1] = { d, listed(entry, t, t.shape[d], axis), 1, axis }
      d, axis = d + 1, axis + 1
    else
      t = ranged(t, d, entry, axis)
      d, axis = d + 1, axis + 1
    end
  end
  return t, others
end

-- ---- positions as data ----------------------------------------------------------------------------

local function check_inside(ids, n, d)
  if ids.device ~= "cpu" or ids:numel() == 0 then return end
  local low, high = ids:min():item(), ids:max():item()
  if low < 0 or high >= n then
    errors.raise("index: position %d is not inside dimension %d (%s)", low < 0 and low or high, d,
      n == 0 and "its size is 0" or ("positions in tensors count from 0: expected 0 to %d"):format(n - 1))
  end
end

-- Joins entries for several dimensions into one. Returns a view of t, the first of its dimensions that the entries
-- index, their number, and positions as if these dimensions were one.
local function joined(t, others)
  local list, dims, axes = {}, {}, {}
  for _, other in ipairs(others) do
    if other[2].dtype == "bool" then
      for k, ids in ipairs(positions.coordinates(other[2])) do
        list[#list + 1], dims[#dims + 1], axes[#axes + 1] = ids, other[1] + k - 1, other[4] + k - 1
      end
    else
      list[#list + 1], dims[#dims + 1], axes[#axes + 1] = other[2], other[1], other[4]
    end
  end
  local shape, size, n = positions.joint_shape("index", list), {}, #dims
  for k, d in ipairs(dims) do size[k] = t.shape[d] end
  local first, adjacent, places = dims[1], dims[n] - dims[1] == n - 1, {}
  if not adjacent then
    for k = 1, n do places[k] = k end
    t, first = methods.movedim(t, dims, places), 1
  end
  local all, total = nil, 1
  for k = 1, n do total = total * size[k] end
  for k = 1, n do
    local ids = methods.to(list[k], "int64")
    check_inside(ids, size[k], axes[k])
    local outside = methods.logical_or(methods.lt(ids, 0), methods.ge(ids, size[k]))
    all = all and all * size[k] + ids or ids
    -- A position outside of its own dimension must not become a position inside the joint one. check_inside does not
    -- read positions on a GPU; there, the kernel refuses `total`.
    all = methods.masked_fill(methods.expand(all, shape), methods.expand(outside, shape), total)
  end
  return t, first, n, all
end

-- Returns a view of t, the first of the dimensions that the entries index, their number, and positions (of any shape)
-- in these dimensions taken as one.
local function one_dimension(t, others)
  if #others == 1 then
    local d, entry, dims = unpack(others[1])
    if entry.dtype ~= "bool" then return t, d, 1, entry end
    return t, d, dims, methods._true_positions(entry)
  end
  return joined(t, others)
end

-- The sizes of t with those of dimensions [d, d + dims) replaced by the sizes in `by`.
local function replaced(t, d, dims, by)
  local out = {}
  for k = 1, d - 1 do out[k] = t.shape[k] end
  for k = 1, #by do out[#out + 1] = by[k] end
  for k = d + dims, #t.shape do out[#out + 1] = t.shape[k] end
  return out
end

-- t with dimensions [d, d + dims) merged into one. by: methods.view or methods.reshape.
local function merged(by, t, d, dims)
  if dims == 1 then return t end
  local n = 1
  for k = d, d + dims - 1 do n = n * t.shape[k] end
  return by(t, replaced(t, d, dims, { n }))
end

local function read(t, key)
  local others
  t, others = start(t, key)
  if #others == 0 then return t end
  local d, dims, ids
  t, d, dims, ids = one_dimension(t, others)
  local out = methods.index_select(merged(methods.reshape, t, d, dims), d, methods.reshape(ids, -1))
  return methods.reshape(out, replaced(t, d, dims, ids.shape))
end

-- ---- writing --------------------------------------------------------------------------------------

local function value_for(t, v)
  if type(v) == "boolean" then v = v and 1 or 0 end
  if type(v) == "number" then
    if v % 1 ~= 0 and not methods.is_floating_point(t) then
      errors.raise("index: %s is not a whole number, but the tensor is %s", tostring(v), t.dtype)
    end
    return create.tensor(v, { dtype = t.dtype, device = t.device })
  end
  if not is_tensor(v) then opts.wrong(v, "a number or a tensor", "index: value") end
  return methods.to(v, t.device, t.dtype)
end

local function fitting(v, shape)
  local size = setmetatable({ unpack(shape) }, tensor.Shape)
  local lead = #v.shape - #size
  local fits = true
  for k = 1, #v.shape do
    fits = fits and (v.shape[k] == 1 or (k > lead and v.shape[k] == size[k - lead]))
  end
  if not fits then
    errors.raise("index: the value has shape %s, which does not broadcast to the shape of the indexed part, %s", tostring(v.shape),
      tostring(size))
  end
  for _ = 1, lead do v = methods.select(v, 1, 1) end
  return methods.expand(v, size)
end

-- Writes to t as a whole, so that the graph records the change: all elements of t are replaced by those of a copy with
-- v put at, or added to, the key's positions.
local function write_recorded(t, key, v, accumulate)
  local numbers = methods.reshape(create.arange(t:numel(), { device = t.device }), t.shape)
  local at = read(numbers, key)
  v = methods.reshape(fitting(v, at.shape), -1)
  local put = accumulate and methods.scatter_add or methods.scatter
  local flat = put(methods.reshape(t, -1), 1, methods.reshape(at, -1), v)
  methods.copy_(t, methods.reshape(flat, t.shape))
end

local function write(t, key, v, accumulate)
  if is_tensor(key) and key.dtype == "bool" and not accumulate and key.shape == t.shape
    and (type(v) ~= "table" or is_tensor(v) and v:numel() == 1 and not v.requires_grad) then
    local value = v
    if is_tensor(v) then value = v:item() end
    if type(value) ~= "number" and type(value) ~= "boolean" and not is_tensor(v) then value_for(t, v) end
    if not errors.is_int64(value) then return methods.masked_fill_(t, key, value) end
  end
  v = value_for(t, v)
  if engine.state.grad_mode ~= 0 and (t.requires_grad or v.requires_grad) then
    return write_recorded(t, key, v, accumulate)
  end
  local whole, others = start(t, key)
  if #others == 0 then
    v = fitting(v, whole.shape)
    return accumulate and methods.add_(whole, v) or methods.copy_(whole, v)
  end
  local d, dims, ids
  whole, d, dims, ids = one_dimension(whole, others)
  local shape = replaced(whole, d, dims, ids.shape)
  v = methods.reshape(fitting(v, shape), replaced(whole, d, dims, { ids:numel() }))
  local put = accumulate and methods.index_add_ or methods.index_copy_
  ids, v = methods.reshape(ids, -1), methods.contiguous(v)
  local ok, part = pcall(merged, methods.view, whole, d, dims)
  if ok then return put(part, d, ids, v) end
  part = put(merged(methods.reshape, whole, d, dims), d, ids, v)
  methods.copy_(whole, methods.reshape(part, whole.shape))   -- the dimensions could not be merged without a copy
end

--- t[key] for a list or a tensor as key.
function methods._item(t, key) return scope.run("index", read, t, key) end
--- t[key] = v for a list or a tensor as key.
function methods._set_part(t, key, v) scope.run("index", write, t, key, v) end

local function index_put(who, t, key, v, given)
  local accumulate = opts(who, given, { accumulate = false }).accumulate
  if not opts.is_plain(key) or #key == 0 then opts.wrong(key, "a list of at least one tensor", "%s: argument 1", who) end
  for k = 1, #key do opts.expect(key[k], tensor.a_tensor, "%s: positions of dimension %d", who, k) end
  scope.run(who, write, t, key, v, accumulate)
  return t
end

--- `t[indices] = v`, or adds v; if a position occurs several times, every element of v for it is added.
---@param indices Tensor[]  for each dimension, from the first on: int64 positions from 0, or a mask; they broadcast
---@param v Tensor|number  broadcasts to the shape of `t[indices]`
---@param given? { accumulate: boolean }  accumulate: adds (default: false, v replaces)
---@return Tensor self
function methods.index_put_(t, indices, v, given)
  tensor.id_of(t, "index_put_")
  return index_put("index_put_", t, indices, v, given)
end
--- index_put_ on a copy.
---@param indices Tensor[]  for each dimension, from the first on: int64 positions from 0, or a mask; they broadcast
---@param v Tensor|number  broadcasts to the shape of `t[indices]`
---@param given? { accumulate: boolean }  accumulate: adds (default: false, v replaces)
---@return Tensor
function methods.index_put(t, indices, v, given) return index_put("index_put", methods.clone(t), indices, v, given) end

return {}
