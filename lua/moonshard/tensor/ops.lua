-- SPDX-License-Identifier: MIT
--- Elementwise arithmetic, functions and comparisons, matmul, selection by conditions, fills, copies, casts, and the
--- comparison of whole tensors. `a + b` is on the hot path: it checks types, calls the engine once and makes one table.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local create = require "moonshard.tensor.create"
local inner_tensors = require "moonshard.tensor.inner"
local scope = require "moonshard.tensor.scope"
local rows = require "moonshard.tensor.rows"
local tensor = require "moonshard.tensor"
local dtypes = require "moonshard.core.dtypes"

local lib = engine.lib
local op, a_in, a_i, a_f, args = engine.op, engine.a_in, engine.a_i, engine.a_f, engine.args
local Tensor, methods = tensor.Tensor, tensor.methods
local wrap, wrap_same, id_of, is_tensor = tensor.wrap, tensor.wrap_same, tensor.id_of, tensor.is_tensor
local call1, call1f, call2, call3 = tensor.call1, tensor.call1f, tensor.call2, tensor.call3
local fixed, type = opts.fixed, type

-- activations: the methods that nn.F also offers as functions, by name
local M = { activations = rows.activations }

local function bad_operand(who, x)
  opts.wrong(x, "a tensor or a number", "%s: operand", who)
end

-- ---- operators --------------------------------------------------------------------------------

local ADD, SUB, MUL, DIV, POW = op "add", op "sub", op "mul", op "div", op "pow"
local ADD_S, MUL_S, DIV_S, POW_S = op "add_scalar", op "mul_scalar", op "div_scalar", op "pow_scalar"
local RSUB_S, RDIV_S, RPOW_S, NEG = op "rsub_scalar", op "rdiv_scalar", op "rpow_scalar", op "neg"

function Tensor.__add(a, b)
  if type(b) == "number" then return wrap(call1f(ADD_S, a, b, "add")) end
  if type(a) == "number" then return wrap(call1f(ADD_S, b, a, "add")) end
  return wrap(call2(ADD, a, b, "add"))
end

function Tensor.__sub(a, b)
  if type(b) == "number" then return wrap(call1f(ADD_S, a, -b, "sub")) end
  if type(a) == "number" then return wrap(call1f(RSUB_S, b, a, "sub")) end
  return wrap(call2(SUB, a, b, "sub"))
end

function Tensor.__mul(a, b)
  if type(b) == "number" then return wrap(call1f(MUL_S, a, b, "mul")) end
  if type(a) == "number" then return wrap(call1f(MUL_S, b, a, "mul")) end
  return wrap(call2(MUL, a, b, "mul"))
end

function Tensor.__div(a, b)
  if type(b) == "number" then return wrap(call1f(DIV_S, a, b, "div")) end
  if type(a) == "number" then return wrap(call1f(RDIV_S, b, a, "div")) end
  return wrap(call2(DIV, a, b, "div"))
end

function Tensor.__pow(a, b)
  if type(b) == "number" then return wrap(call1f(POW_S, a, b, "pow")) end
  if type(a) == "number" then return wrap(call1f(RPOW_S, b, a, "pow")) end
  return wrap(call2(POW, a, b, "pow"))
end

function Tensor.__mod(a, b) return methods.remainder(a, b) end

-- Converts an operand of `..`: a tensor, which must have one element, becomes the text of its number.
local function joined(x)
  if not is_tensor(x) then return x end
  if x:numel() ~= 1 then
    errors.raise("concat: the tensor has %d elements, shape %s; expected 1 (tostring(t) gives the text of a larger one)",
      x:numel(), tostring(x.shape))
  end
  return (tostring(x:item()):gsub("LL$", ""))
end

function Tensor.__concat(a, b)
  a, b = joined(a), joined(b)
  for _, x in ipairs { a, b } do
    if type(x) ~= "string" and type(x) ~= "number" then
      opts.wrong(x, "a string, a number or a tensor", "concat: operand")
    end
  end
  return a .. b
end

function Tensor.__unm(a) return wrap(call1(NEG, a, "neg")) end

-- Reads the option alpha of add and sub, the factor of the second operand.
local function alpha_of(who, given) return opts(who, given, { alpha = 1 }).alpha end

local function scaled(number, who, a, b, alpha)
  local ia, ib = id_of(a, who), id_of(b, who)
  args.n_in, args.n_i, args.n_f = 2, 0, 1
  a_in[0], a_in[1], a_f[0] = ia, ib, alpha
  return tensor.call(number, a, b)
end

local ADD_, SUB_, ADD_S_ = op "add_", op "sub_", op "add_scalar_"

-- t + sign * alpha * u; `number` is the operator for tensors that has this sign.
local function add_scaled(number, who, sign, t, u, alpha)
  if type(u) == "number" then return wrap(call1f(ADD_S, t, sign * u * alpha, who)) end
  return wrap(scaled(number, who, t, u, alpha))
end

-- Adds sign * alpha * u to t in place.
local function add_in_place(number, who, sign, t, u, given)
  local alpha = given == nil and 1 or alpha_of(who, given)
  if type(u) == "number" then
    call1f(ADD_S_, t, sign * u * alpha, who)
  elseif alpha == 1 then
    call2(number, t, u, who)
  else
    scaled(number, who, t, u, alpha)
  end
  return t
end

--- t + alpha * u, element by element; shapes broadcast, dtypes promote.
---@param u Tensor|number  broadcasts with t
---@param given? { alpha: number }  alpha: factor of u (default: 1)
---@return Tensor
function methods.add(t, u, given)
  if given == nil then return Tensor.__add(t, u) end
  return add_scaled(ADD, "add", 1, t, u, alpha_of("add", given))
end

--- t - alpha * u, element by element; shapes broadcast, dtypes promote.
---@param u Tensor|number  broadcasts with t
---@param given? { alpha: number }  alpha: factor of u (default: 1)
---@return Tensor
function methods.sub(t, u, given)
  if given == nil then return Tensor.__sub(t, u) end
  return add_scaled(SUB, "sub", -1, t, u, alpha_of("sub", given))
end

--- t + alpha * u in place. u broadcasts to t's shape; the result keeps t's dtype.
---@param u Tensor|number  broadcasts to t's shape
---@param given? { alpha: number }  alpha: factor of u (default: 1)
---@return Tensor self
function methods.add_(t, u, given) return add_in_place(ADD_, "add_", 1, t, u, given) end

--- t - alpha * u in place. u broadcasts to t's shape; the result keeps t's dtype.
---@param u Tensor|number  broadcasts to t's shape
---@param given? { alpha: number }  alpha: factor of u (default: 1)
---@return Tensor self
function methods.sub_(t, u, given) return add_in_place(SUB_, "sub_", -1, t, u, given) end

for _, name in ipairs { "mul", "div", "pow" } do
  local operator = Tensor["__" .. name]
  methods[name] = fixed(name, function(t, u)
    return operator(t, u)
  end)
end

-- Makes an in-place method whose argument is a tensor or a number.
local function in_place(name)
  local who, with_tensor, with_number = name .. "_", op(name .. "_"), op(name .. "_scalar_")
  methods[who] = fixed(who, function(t, u)
    if type(u) == "number" then call1f(with_number, t, u, who) else call2(with_tensor, t, u, who) end
    return t
  end)
end
in_place "mul"
in_place "div"

local POW_S_ = op "pow_scalar_"
--- t ^ u in place.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function methods.pow_(t, u)
  if type(u) == "number" then
    call1f(POW_S_, t, u, "pow_")
    return t
  end
  return methods.copy_(t, methods.pow(t, u))
end

-- ---- functions that the engine lists (kernels/rows/elementwise.def) -------------------------------

local E, bit_and = engine.ffi.C, bit.band

local function unary(name, number)
  methods[name] = fixed(name, function(t)
    return wrap(call1(number, t, name))
  end)
end

-- Makes an in-place method, from the engine's own in-place operator or by copying the result.
local function unary_in_place(name)
  local who, fn, number = name .. "_", methods[name], op(name .. "_")
  methods[who] = number < 0 and function(t) return methods.copy_(t, fn(t)) end or function(t)
    call1(number, t, who)
    return t
  end
end

local like_number

for _, name in ipairs { "add", "sub", "mul", "div", "pow" } do
  tensor.or_a_number[name], tensor.or_a_number[name .. "_"] = true, true
end

local function binary(name, with_tensor)
  local with_number = op(name .. "_scalar")
  tensor.or_a_number[name] = true
  methods[name] = fixed(name, with_number < 0 and function(t, u)
    if not is_tensor(u) then u = like_number(u, t, name) end
    if not is_tensor(t) then t = like_number(t, u, name) end
    return wrap(call2(with_tensor, t, u, name))
  end or function(t, u)
    if type(u) == "number" then return wrap(call1f(with_number, t, u, name)) end
    if type(u) == "boolean" then return wrap(call1f(with_number, t, u and 1 or 0, name)) end
    return wrap(call2(with_tensor, t, u, name))
  end)
end

-- Functions of two tensors that PyTorch also has in place.
local IN_PLACE = { fmod = true, remainder = true, atan2 = true, hypot = true, copysign = true, xlogy = true,
  floor_divide = true, bitwise_and = true, bitwise_or = true, bitwise_xor = true, logical_and = true,
  logical_or = true, logical_xor = true }

local function binary_in_place(name)
  local who, fn = name .. "_", methods[name]
  methods[who] = fixed(who, function(t, u)
    return methods.copy_(t, fn(t, u))
  end)
end

for number = 0, lib.ms_op_count() - 1 do
  local row = lib.ms_op_at(number)
  local flags, name = row.flags, engine.ffi.string(row.name)
  if bit_and(flags, E.MS_OP_METHOD) ~= 0 and not rows.made[name] then
    if row.inputs == 2 then
      binary(name, number)
      if IN_PLACE[name] then binary_in_place(name) end
    else
      unary(name, number)
      if bit_and(flags, E.MS_OP_DIFFERENTIABLE) ~= 0 then unary_in_place(name) end
    end
    if bit_and(flags, E.MS_OP_ACTIVATION) ~= 0 then M.activations[name] = methods[name] end
  end
end

-- ---- functions with options -----------------------------------------------------------------------

local GELU = op "gelu"
--- GELU (Hendrycks & Gimpel 2016), element by element: `t * Phi(t)`, where Phi is the normal distribution function.
--- approximate = "tanh" selects GPT-2's formula, `t/2 (1 + tanh(sqrt(2/pi) (t + 0.044715 t^3)))`. Errors: a dtype that
--- is not floating point.
---@param given? { approximate: "none"|"tanh" }
---@return Tensor
function methods.gelu(t, given)
  local approximate = given ~= nil and opts("gelu", given,
    { approximate = opts.one_of({ "none", "tanh" }, "none") }).approximate
  if approximate ~= "tanh" then return wrap(call1(GELU, t, "gelu")) end
  a_i[0] = 1
  return wrap(tensor.call1_with(GELU, t, "gelu", 1))
end

local CLAMP, CLAMP_ = op "clamp", op "clamp_"
local BOUND = opts.kind("a number or a tensor", function(v) return type(v) == "number" or is_tensor(v) end)
local BOUNDS = { min = BOUND, max = BOUND }
-- The limits low and high, of which at least one is not nil.
local function bounds(who, low, high)
  if opts.is(low) then
    local o = opts(who, low, BOUNDS)
    low, high = o.min, o.max
  end
  if (low ~= nil and not BOUND.test(low)) or (high ~= nil and not BOUND.test(high)) then
    errors.raise("%s: bounds are %s and %s, expected numbers, tensors or nil", who, errors.kind(low), errors.kind(high))
  end
  if low == nil and high == nil then errors.raise("%s: neither a minimum nor a maximum was given", who) end
  return low, high
end
local function clamp(number, who, t, low, high)
  a_f[0], a_f[1] = low or -math.huge, high or math.huge
  return tensor.call1_with(number, t, who, 0, 2)
end
local function clamp_between(t, low, high)
  if low ~= nil then t = methods.maximum(t, low) end
  return high ~= nil and methods.minimum(t, high) or t
end

--- Limits each element to [low, high]; to high where it is below low. nan remains nan, and a limit that is nan gives
--- nan. Limits that are tensors broadcast with t, dtypes promote, and the gradient goes to whichever was taken; an
--- element equal to such a limit shares it with the limit.
---@param low? number|Tensor|{ min: number|Tensor, max: number|Tensor }  nil: no lower limit; or both limits by name
---@param high? number|Tensor  nil: no upper limit
---@return Tensor
function methods.clamp(t, low, high)
  low, high = bounds("clamp", low, high)
  if is_tensor(low) or is_tensor(high) then return scope.run("clamp", clamp_between, t, low, high) end
  return wrap(clamp(CLAMP, "clamp", t, low, high))
end

--- clamp in place.
---@param low? number|Tensor|{ min: number|Tensor, max: number|Tensor }  nil: no lower limit; or both limits by name
---@param high? number|Tensor  nil: no upper limit
---@return Tensor self
function methods.clamp_(t, low, high)
  low, high = bounds("clamp_", low, high)
  if is_tensor(low) or is_tensor(high) then return methods.copy_(t, methods.clamp(t, low, high)) end
  clamp(CLAMP_, "clamp_", t, low, high)
  return t
end

-- ---- products -------------------------------------------------------------------------------------

local MATMUL = op "matmul"
--- Matrix product over the last two dimensions: [..., N, K] x [..., K, M] gives [..., N, M]; leading dimensions
--- broadcast. A vector on the left is treated as a row, on the right as a column, and its added dimension is removed
--- from the result; two vectors give their dot product. Errors: different inner sizes, dtypes or devices.
---@param u Tensor  [K], [K, M] or [..., K, M]
---@return Tensor
function methods.matmul(t, u) return wrap(call2(MATMUL, t, u, "matmul")) end

-- ---- selection by conditions and limits ---------------------------------------------------------

-- Converts a number or boolean to a tensor with the other operand's dtype and device.
function like_number(x, other, who)
  if type(x) ~= "number" and type(x) ~= "boolean" then bad_operand(who, x) end
  if other and type(x) == "number" and x % 1 ~= 0 and not dtypes.is_float(tensor.info_of(other).dtype) then
    errors.raise("%s: %s is not a whole number, but the tensor is %s %s", who, tostring(x), other.dtype,
      tostring(other.shape))
  end
  if other and type(x) == "number" and x ~= 0 and x ~= 1 and other.dtype == "bool" then
    errors.raise("%s: %s is out of range for bool %s; cast the tensor first", who, tostring(x), tostring(other.shape))
  end
  return create.tensor(x, other and { dtype = other.dtype, device = other.device } or nil)
end

local WHERE = op "where"
--- Elements of a where cond is true, of b elsewhere; all three broadcast. Errors: cond is not bool.
---@param cond Tensor  bool
---@param a Tensor|number  broadcasts with cond
---@param b Tensor|number  broadcasts with cond
---@return Tensor
function M.where(cond, a, b)
  if not is_tensor(a) then a = like_number(a, is_tensor(b) and b or nil, "where") end
  if not is_tensor(b) then b = like_number(b, a, "where") end
  return wrap(call3(WHERE, cond, a, b, "where"))
end
--- Elements of t where cond is true, of u elsewhere: `ms.where(cond, t, u)`.
---@param cond Tensor  bool, of a shape that broadcasts with t
---@param u Tensor|number  broadcasts with t
---@return Tensor
function methods.where(t, cond, u) return M.where(cond, t, u) end

local function masked_fill(number, who, t, mask, value)
  if is_tensor(value) then
    if value:numel() ~= 1 then errors.raise("%s: the value has shape %s, expected one element", who, tostring(value.shape)) end
    value = value:item()
  end
  if type(value) == "boolean" then value = value and 1 or 0 end
  opts.expect(value, opts.number, "%s: value", who)
  args.n_in, args.n_i, args.n_f = 2, 0, 1
  a_in[0], a_in[1], a_f[0] = id_of(t, who), id_of(mask, who, "mask"), value
  return tensor.call(number, t, mask)
end

-- Whether a value gets a gradient, or may be an int64 that no number holds.
local function stays_a_tensor(t, value)
  if not is_tensor(value) or value:numel() ~= 1 then return false end
  if value.requires_grad then return dtypes.is_float(tensor.info_of(t).dtype) end
  return value.dtype == "int64" and t.dtype == "int64"
end

local MASKED_FILL, MASKED_FILL_ = op "masked_fill", op "masked_fill_"
--- value where mask is true, t's own elements elsewhere.
---@param mask Tensor  bool, of a shape that broadcasts to t's
---@param value number|boolean|Tensor  a tensor must have one element; it gets the gradient of the filled elements
---@return Tensor
function methods.masked_fill(t, mask, value)
  if stays_a_tensor(t, value) then
    id_of(mask, "masked_fill", "mask")
    return M.where(mask, methods.to(methods.reshape(value, {}), t.dtype), t)
  end
  return wrap(masked_fill(MASKED_FILL, "masked_fill", t, mask, value))
end
--- masked_fill in place.
---@param mask Tensor  bool, of a shape that broadcasts to t's
---@param value number|boolean|Tensor  a tensor must have one element
---@return Tensor self
function methods.masked_fill_(t, mask, value)
  if stays_a_tensor(t, value) then
    return methods.copy_(t, methods.masked_fill(t, mask, value))
  end
  masked_fill(MASKED_FILL_, "masked_fill_", t, mask, value)
  return t
end

-- ---- filling, copying, casting ----------------------------------------------------------------------

local FILL_ = op "fill_"

--- Sets every element to v, cast to t's dtype.
---@param v number|boolean|Tensor  a tensor must have one element
---@return Tensor self
function methods.fill_(t, v)
  if type(v) == "boolean" then v = v and 1 or 0 end
  if type(v) ~= "number" then
    if not is_tensor(v) then bad_operand("fill_", v) end
    return methods.copy_(t, v)
  end
  call1f(FILL_, t, v, "fill_")
  return t
end

local CONTIGUOUS = op "contiguous"
--- t with its elements row by row in memory: t itself if it is contiguous, otherwise a copy.
---@return Tensor
function methods.contiguous(t)
  id_of(t, "contiguous")
  if tensor.info_of(t).is_contiguous ~= 0 then return t end
  return wrap(call1(CONTIGUOUS, t, "contiguous"))
end

local CAST, TO_DEVICE = op "cast", op "to_device"

local function with_int(number, who, t, i)
  a_i[0] = i
  return wrap_same(tensor.call1_with(number, t, who, 1), t)
end

local function cast(t, dtype)
  id_of(t, "to")
  if tensor.info_of(t).dtype == dtype then return t end
  return with_int(CAST, "to", t, dtype)
end

--- The tensor on another device, in another dtype, or with device and dtype of another tensor; t itself if nothing
--- changes. Errors: an unknown dtype or device; a device that does not exist.
---@param what string|Tensor|{ device: string, dtype: string, non_blocking: boolean }  name of a dtype, name of a device, a table with one or both, or a tensor whose dtype and device to take
---@param and_dtype? string|{ non_blocking: boolean }  a dtype if the first argument is a device, a device if it is a dtype
---@param given? { non_blocking: boolean }  also in place of the second argument. non_blocking: accepted for PyTorch's
---   scripts, without effect: copies of pinned memory to a GPU are always queued (see pin_memory)
---@return Tensor
function methods.to(t, what, and_dtype, given)
  local dtype, device
  if type(and_dtype) == "table" and given == nil then and_dtype, given = nil, and_dtype end
  if given ~= nil then opts("to", given, { non_blocking = false }) end
  local function take(name)
    if name == nil then return end
    if type(name) == "string" and dtypes.numbers[name] then dtype = name else device = name end
  end
  if is_tensor(what) then
    dtype, device = what.dtype, what.device
  elseif type(what) == "table" then
    local o = opts("to", what, { device = opts.string, dtype = opts.string, non_blocking = false })
    dtype, device = o.dtype, o.device
  elseif type(what) ~= "string" then
    opts.wrong(what, "a dtype, a device or a tensor", "to: argument")
  else
    take(what)
    if and_dtype ~= nil then
      if type(and_dtype) ~= "string" or (dtypes.numbers[and_dtype] ~= nil) == (dtype ~= nil) then
        errors.raise("to: arguments are %s and %s, expected a device and a dtype", errors.show(what),
          errors.show(and_dtype))
      end
      take(and_dtype)
    end
  end
  if device and dtype == nil and not device:match "^cpu" and not device:match "^cuda" and not device:match "^meta" then
    local names = { "cpu", "cuda", "meta" }
    for _, name in ipairs(dtypes.names) do names[#names + 1] = name end
    errors.raise("to: %s", errors.unknown("dtype or device", device, names))
  end
  if device then
    local number = dtypes.device(device, "to")
    if tensor.info_of(t).device ~= number then t = with_int(TO_DEVICE, "to", t, number) end
  end
  if dtype then t = cast(t, dtypes.number(dtype, "to")) end
  return t
end

--- Pins the memory of a tensor of the CPU for copies to a GPU, and returns the tensor, not a copy of it. Only memory of
--- 256 KiB and more is pinned, and only if there is a GPU; the driver stages all other copies. A copy of pinned
--- memory to a GPU is queued: it does not wait for the GPU, and what changes or reuses the memory waits for the copy.
--- The memory stays pinned when the tensor is released, and new tensors of its size use it again. Errors: a tensor on
--- another device.
---@return Tensor
function methods.pin_memory(t)
  if lib.ms_pin(id_of(t, "pin_memory")) ~= 0 then errors.fail() end
  return t
end

--- Whether the tensor is on the CPU in pinned memory (see pin_memory).
---@return boolean
function methods.is_pinned(t) return lib.ms_is_pinned(id_of(t, "is_pinned")) ~= 0 end

local casts = {
  float = "float32", double = "float64", half = "float16", bfloat16 = "bfloat16", long = "int64", int = "int32",
  bool = "bool", short = "int16", char = "int8", byte = "uint8",
}
for name, dtype in pairs(casts) do
  local number = dtypes.numbers[dtype]
  methods[name] = fixed(name, function(t)
    return cast(t, number)
  end)
end

--- The tensor in CPU memory; t itself if it is there.
---@return Tensor
function methods.cpu(t) return methods.to(t, "cpu") end
--- The tensor on the current CUDA device; t itself if it is there. Errors: no CUDA device (ms.cuda.why_unavailable
--- gives the reason).
---@return Tensor
function methods.cuda(t) return methods.to(t, "cuda") end
--- The name of the dtype; with an argument, the tensor converted to that dtype.
---@param dtype? string  such as "float32"
---@return string|Tensor
function methods.type(t, dtype)
  id_of(t, "type")
  return dtype == nil and t.dtype or cast(t, dtypes.number(dtype, "type"))
end

-- ---- comparisons of whole tensors ---------------------------------------------------------------

local out1 = engine.ffi.new "double[1]"
-- Converts a 0-dim result to a Lua boolean, and releases the result if it is a plain tensor.
local function truth(id)
  if id < 0 then  -- an instance of a tensor class is true if all its inner tensors are
    local parts = tensor.flat { inner_tensors.take(id) }
    for k = 1, #parts do
      if not parts[k]:item() then return false end
    end
    return true
  end
  local status = lib.ms_item(id, out1)
  if status ~= 0 then errors.fail() end
  lib.ms_release(id)
  return out1[0] ~= 0
end

local EQUAL, ALLCLOSE = op "equal", op "allclose"

--- Whether both tensors have the same shape and the same elements.
---@param u Tensor  of t's dtype and device
---@return boolean
function methods.equal(t, u) return truth(call2(EQUAL, t, u, "equal")) end

local ALLCLOSE_OPTIONS = { rtol = opts.option(opts.number_from(0), 1e-5), atol = opts.option(opts.number_from(0), 1e-8),
  equal_nan = false }

--- Whether |t - u| <= atol + rtol * |u| for all elements.
---@param u Tensor  of t's shape
---@param given? { rtol: number, atol: number, equal_nan: boolean }
---   rtol: relative tolerance; atol: absolute tolerance; equal_nan: two nan are close
---@return boolean
function methods.allclose(t, u, given)
  local o = opts("allclose", given, ALLCLOSE_OPTIONS)
  args.n_in, args.n_i, args.n_f = 2, 0, 3
  a_in[0], a_in[1] = id_of(t, "allclose"), id_of(u, "allclose")
  a_f[0], a_f[1], a_f[2] = o.rtol, o.atol, o.equal_nan and 1 or 0
  return truth(tensor.call(ALLCLOSE, t, u))
end

opts.fix(methods, { "pow_", "clamp", "clamp_", "matmul", "masked_fill", "fill_",
  "contiguous", "cpu", "cuda", "equal" })
opts.fix(M, { "where" })
methods.mm, methods.bmm = methods.matmul, methods.matmul
methods.true_divide = methods.div

--- The index of the CUDA device of t; -1 if it is on the CPU or on meta.
---@return integer
function methods.get_device(t)
  id_of(t, "get_device")
  return tonumber(t.device:match "^cuda:(%d+)$" or -1)
end

return M
