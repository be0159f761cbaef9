-- SPDX-License-Identifier: MIT
--- Pooling over the last one to three dimensions: converts arguments to lists and calls the operators. nn.F and the
--- layers pass `who`, the function's or layer's name in messages, and `dims`, the number of dimensions to pool.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local args, a_in, a_out, a_i = engine.args, engine.a_in, engine.a_out, engine.a_i
local a_tensor, call, id_of, raise, wrap = tensor.a_tensor, tensor.call, tensor.id_of, errors.raise, tensor.wrap
local info_of = tensor.info_of
local op_max_pool, op_avg_pool = engine.op "max_pool", engine.op "avg_pool"

local M = {}

-- ---- arguments ------------------------------------------------------------------------------------

--- A list of `dims` whole numbers from `low` on: v for each dimension, or a copy of the list v.
---@param who string
---@param what string  what messages call v
---@return integer[]
function M.sizes_of(who, what, v, dims, low)
  local list = {}
  local good = type(v) == "number" or opts.is_plain(v) and #v == dims
  for d = 1, good and dims or 0 do
    list[d] = type(v) == "number" and v or v[d]
    good = good and type(list[d]) == "number" and list[d] % 1 == 0 and list[d] >= low
  end
  if not good then
    opts.wrong(v, dims == 1 and ("a whole number from %d"):format(low)
      or ("a whole number from %d, or a list of %d of them"):format(low, dims), "%s: %s", who, what)
  end
  return list
end
local sizes_of = M.sizes_of

local specs = {
  max = { stride = opts.any, padding = opts.any, dilation = opts.any, ceil_mode = false, return_indices = false },
  avg = { stride = opts.any, padding = opts.any, ceil_mode = false, count_include_pad = true,
    divisor_override = opts.whole },
  avg1d = { stride = opts.any, padding = opts.any, ceil_mode = false, count_include_pad = true },
  power = { stride = opts.any, ceil_mode = false },
  unpool = { stride = opts.any, padding = opts.any, output_size = opts.any },
  ["unpool layer"] = { stride = opts.any, padding = opts.any },
}

--- The options of a pooling, with kernel, stride, padding and dilation as lists.
---@param kind "max"|"avg"|"power"|"unpool"|"unpool layer"  the options that are accepted
---@param stride any  the stride; nil: that of the options, else the kernel's size; or the options in place of `given`
function M.arguments(who, kind, dims, kernel, stride, given)
  stride, given = opts.shift(who, stride, given)
  local o = opts(who, given, specs[kind == "avg" and dims == 1 and "avg1d" or kind])
  if stride ~= nil and o.stride ~= nil then raise("%s: the stride is given twice, as argument and as option", who) end
  o.kernel = sizes_of(who, "the kernel's size", kernel, dims, 1)
  stride = stride == nil and o.stride or stride
  o.stride = stride == nil and o.kernel or sizes_of(who, "option 'stride'", stride, dims, 1)
  o.padding = sizes_of(who, "option 'padding'", o.padding == nil and 0 or o.padding, dims, 0)
  o.dilation = sizes_of(who, "option 'dilation'", o.dilation == nil and 1 or o.dilation, dims, 1)
  for d = 1, dims do
    if o.padding[d] > math.floor(((o.kernel[d] - 1) * o.dilation[d] + 1) / 2) then
      raise("%s: pad should be at most half of effective kernel size, but got pad=%d, kernel_size=%d and dilation=%d", who,
        o.padding[d], o.kernel[d], o.dilation[d])
    end
  end
  if o.divisor_override == 0 then raise("%s: option 'divisor_override' is 0, expected a number other than 0", who) end
  return o
end

--- The sizes of an adaptive pooling's output as a list of numbers and of false, which keeps the input's size.
function M.output_sizes(who, size, dims)
  local list = {}
  local good = type(size) == "number" or opts.is_plain(size) and #size == dims
  for d = 1, good and dims or 0 do
    list[d] = type(size) == "number" and size or size[d]
    good = good and (list[d] == false or opts.whole_from(0).test(list[d]))
  end
  opts.need(good, size, dims == 1 and "a whole number from 0"
    or ("a whole number from 0, or a list of %d of them, where false keeps the input's size"):format(dims),
    "%s: the output's size", who)
  return list
end

-- Raises unless x is a floating point tensor with `dims` dimensions, none of size 0, and one or two before them.
local function check_input(who, x, dims)
  opts.expect(x, a_tensor, "%s: argument 1", who)
  local n = x.ndim
  if n ~= dims + 1 and n ~= dims + 2 then
    raise("%s: the input has shape %s, expected %d dimensions, or %d without a batch", who, tostring(x.shape), dims + 2,
      dims + 1)
  end
  for d = n - dims + 1, n do
    if x:size(d) == 0 then raise("%s: the input %s has no elements along dimension %d", who, tostring(x.shape), d) end
  end
  if not dtypes.is_float(info_of(x).dtype) then
    raise("%s: the input is %s, expected a floating-point dtype; cast it first", who, x.dtype)
  end
end

-- Raises unless at least one window fits.
local function check_fit(who, x, dims, o)
  for d = 1, dims do
    local size = x:size(x.ndim - dims + d) + 2 * o.padding[d]
    local window = (o.kernel[d] - 1) * o.dilation[d] + 1
    if size + (o.ceil_mode and o.stride[d] - 1 or 0) < window then
      raise("%s: windows of size %s do not fit the padded input, which has size %d along dimension %d; input %s", who,
        window, size, x.ndim - dims + d, tostring(x.shape))
    end
  end
end

-- ---- operators --------------------------------------------------------------------------------------

local FLOOR, CEIL, ADAPTIVE = 0, 1, 2

-- Sets the operator's integer arguments (kernels/rows/spatial/pooling.h) from the options o of a pooling, or from the
-- output's sizes of an adaptive one.
local function set(dims, o, sizes)
  a_i[0], a_i[1] = dims, sizes and ADAPTIVE or o.ceil_mode and CEIL or FLOOR
  a_i[2], a_i[3] = o and o.count_include_pad and 1 or 0, o and o.divisor_override or 0
  for d = 1, dims do
    if sizes then
      a_i[3 + d] = sizes[d]
    else
      a_i[3 + d], a_i[3 + dims + d] = o.kernel[d], o.stride[d]
      a_i[3 + 2 * dims + d], a_i[3 + 3 * dims + d] = o.padding[d], o.dilation[d]
    end
  end
  args.n_in, args.n_i, args.n_f = 1, 4 + dims * (sizes and 1 or 4), 0
end

-- The largest elements; with `indices` also their positions, which otherwise only backward keeps.
local function largest(who, x, indices)
  a_in[0] = id_of(x, who)
  local y = call(op_max_pool, x)
  if indices then return wrap(y), wrap(a_out[1]) end
  if y > 0 then engine.lib.ms_release(a_out[1]) end
  return wrap(y)
end

local function mean(who, x)
  a_in[0] = id_of(x, who)
  return wrap(call(op_avg_pool, x))
end

function M.max_pool(who, x, dims, o)
  check_input(who, x, dims)
  check_fit(who, x, dims, o)
  set(dims, o)
  return largest(who, x, o.return_indices)
end

function M.avg_pool(who, x, dims, o)
  check_input(who, x, dims)
  check_fit(who, x, dims, o)
  set(dims, o)
  return mean(who, x)
end

-- The sizes of the output for this input, and whether all are 1.
local function sizes_for(who, x, dims, size)
  check_input(who, x, dims)
  local out, one = {}, true
  for d = 1, dims do
    out[d] = size[d] or x:size(x.ndim - dims + d)
    one = one and out[d] == 1
  end
  return out, one
end

function M.adaptive_max_pool(who, x, dims, size, indices)
  set(dims, nil, (sizes_for(who, x, dims, size)))
  return largest(who, x, indices)
end

local last = { { -1 }, { -2, -1 }, { -3, -2, -1 } }
function M.adaptive_avg_pool(who, x, dims, size)
  local out, one = sizes_for(who, x, dims, size)
  if one then return x:mean(last[dims], { keepdim = true }) end
  set(dims, nil, out)
  return mean(who, x)
end

--- (sum of x^p over each window)^(1/p). As in PyTorch, the sum is the mean times the number of elements of a whole
--- window, also for a window that ceil_mode cuts; a negative sum gives NaN unless 1/p is a whole number.
function M.lp_pool(who, x, p, dims, o)
  check_input(who, x, dims)
  opts.expect(p, opts.positive, "%s: argument 2, the power,", who)
  local n = 1
  for d = 1, dims do n = n * o.kernel[d] end
  o = { kernel = o.kernel, stride = o.stride, padding = o.padding, dilation = o.dilation, ceil_mode = o.ceil_mode,
    count_include_pad = true }
  return scope.scope(function()
    local y = M.avg_pool(who, x:pow(p), dims, o)
    return ((y:sign() * y:abs():relu()) * n):pow(1 / p)
  end)
end

--- Writes each element of x to its position in a plane of zeros. o.output_size: the sizes of a plane, or the whole
--- shape; nil: the sizes that follow from kernel, stride and padding.
function M.max_unpool(who, x, indices, dims, o)
  check_input(who, x, dims)
  opts.expect(indices, a_tensor, "%s: argument 2, the positions,", who)
  if indices.dtype ~= "int64" or indices.shape ~= x.shape then
    raise("%s: the positions are %s of shape %s, expected int64 of the input's shape %s", who, indices.dtype,
      tostring(indices.shape), tostring(x.shape))
  end
  local size = o.output_size
  if size ~= nil then
    if opts.is_plain(size) and #size > dims then size = { unpack(size, #size - dims + 1) } end
    size = sizes_of(who, "option 'output_size'", size, dims, 1)
  end
  local flat, out, plane = {}, {}, 1
  for d = 1, x.ndim - dims do flat[d], out[d] = x:size(d), x:size(d) end
  for d = 1, dims do
    local n = size and size[d]
      or (x:size(x.ndim - dims + d) - 1) * o.stride[d] - 2 * o.padding[d] + o.kernel[d]
    plane, out[#out + 1] = plane * n, n
  end
  local at = #flat + 1
  return scope.scope(function()
    flat[at] = x:numel() == 0 and 0 or -1
    local from, to = x:reshape(flat), indices:reshape(flat)
    flat[at] = plane
    return create.zeros(flat, { dtype = x.dtype, device = x.device }):scatter(-1, to, from):reshape(out)
  end)
end

return M
