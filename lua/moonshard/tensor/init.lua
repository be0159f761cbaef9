-- SPDX-License-Identifier: MIT
--- Tensors: the class, its fields, lifetimes. The other files of this folder add the rest: create.lua makes tensors,
--- values.lua reads them, print.lua prints them, and ops.lua, shape.lua, reduce.lua and others have the operations.
---
--- A tensor is `{ id = number }`; the engine assigns the id and checks it at every use. An unscoped tensor has an owner
--- with a C finalizer; a tensor that belongs to a scope has no finalizer.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local class = require "moonshard.core.class"
local dtypes = require "moonshard.core.dtypes"
local inner_tensors = require "moonshard.tensor.inner"
local misspelt = require "moonshard.core.misspelt"
local places = require "moonshard.core.places"
local opts = require "moonshard.core.opts"
local Shape = require "moonshard.tensor.sizes"

local lib, state, ffi, info = engine.lib, engine.state, engine.ffi, engine.info
local getmetatable, setmetatable, rawget, rawset, type, tonumber, ipairs =
  getmetatable, setmetatable, rawget, rawset, type, tonumber, ipairs

local Tensor, classes, inner = inner_tensors.Tensor, inner_tensors.classes, inner_tensors.inner
local methods = {}
rawset(Tensor, "methods", methods)

local M = { Tensor = Tensor, methods = methods, classes = classes, is_tensor = inner_tensors.is_tensor, inner = inner,
  rebuild = inner_tensors.rebuild, flat = inner_tensors.flat }

local fail = errors.fail

--- For opts.expect: accepts only tensors.
M.a_tensor = opts.kind("a tensor", M.is_tensor)

-- ---- lines that made tensors --------------------------------------------------------------------

-- The error "released with its scope" names the line that made the tensor, if that line was recorded. Finding a line
-- takes microseconds, makes kilobytes of garbage and ends JIT traces, so the number of recorded lines is limited: those
-- of the first 512 tensors, up to 256 more after each such error, and up to 16 whenever a script opens a scope or
-- begins a loop. Scopes and loops add 512 lines at most, and only while finding lines takes less than 3 % of the time.
-- MOONSHARD_DEBUG=info or detail removes the limit.
-- `ticks`: number of tensors until the next call of note; 0 while lines are recorded.
local ticks = 0
local sites_left, loops_left = 512, 512
local sites_always, history, anomaly = false, false, false
local spent, started = 0, lib.ms_time()

local function note(t)
  if history then places.mark() end
  if anomaly then lib.ms_anomaly_line(t.id, errors.user_line(3) or "an unknown line") end
  if sites_left > 0 or sites_always then
    local before = lib.ms_time()
    sites_left = sites_left - 1
    rawset(t, "_site", errors.user_line(3))
    spent = spent + (lib.ms_time() - before)
  end
  if sites_left <= 0 and not (sites_always or history or anomaly) then ticks = math.huge end
end
jit.off(note)

errors.on_release_error(function()
  sites_left = math.max(sites_left, 256)
  ticks = 0
end)

--- Called when a script begins a scope or a loop of steps: records the lines of its first tensors, up to a limit.
function M.record_first()
  if sites_left < 16 and loops_left > 0 and spent < 0.03 * (lib.ms_time() - started) then
    loops_left = loops_left - (16 - sites_left)
    sites_left = 16
    ticks = 0
  end
end

--- always: true records the source line of every tensor; false respects the limit.
function M.record_sites(always)
  sites_always = always
  ticks = 0
end

--- Sets whether the memory history is recorded, with the place in the script of every allocation.
function M.record_memory(on)
  history, ticks = on, 0
  lib.ms_memory_history(on and 1 or 0)
end

--- Makes nan and inf raise errors, which name lines of the script. what: 0: neither; 1: nan; 2: both.
function M.search_anomalies(what)
  anomaly, ticks = what > 0, 0
  lib.ms_set_anomaly(what)
end
do
  local level = os.getenv "MOONSHARD_DEBUG"
  if level == "info" or level == "detail" then M.record_sites(true) end
end

-- ---- owners and wrapping -----------------------------------------------------------------------

local owner_t = ffi.typeof "ms_owner"
local owner_release = lib.ms_owner_release
local gc = ffi.gc

--- Attaches a finalizer to a tensor that has become unscoped, if it has none. Collects garbage if the engine asks for
--- it.
local function own(t)
  if t.id < 0 then
    for _, part in ipairs(inner(t)) do M.own(part) end
  elseif rawget(t, "_owner") == nil then
    local owner = owner_t()
    lib.ms_owner_init(owner, t.id)
    rawset(t, "_owner", gc(owner, owner_release))
  end
  if state.gc_wanted ~= 0 then
    collectgarbage()
    state.gc_wanted = 0
  end
end
M.own = own

--- Makes the Lua tensor for an id that the engine has just returned.
---@param id number  returned by the engine; not 0
---@return Tensor
local function wrap(id)
  if id < 0 then return inner_tensors.take(id) end                  -- an instance of a tensor class
  local t = setmetatable({ id = id }, Tensor)
  if state.scope == 0 then own(t) end
  ticks = ticks - 1
  if ticks < 0 then
    ticks = 0
    note(t)
  end
  return t
end
M.wrap = wrap

--- Like wrap, but raises the engine's error if the id is 0. The tensors after the id are only for the error message.
function M.wrap_new(id, ...)
  if id == 0 then fail(...) end
  return wrap(id)
end

--- Like wrap, for operators that may return their input t: returns t itself if the id is t's.
function M.wrap_same(id, t)
  if id == t.id then
    if anomaly then note(t) end
    return t
  end
  return wrap(id)
end

--- Makes an instance of cls for an id; cls is nn.Parameter or a class that extends it.
function M.wrap_as(cls, id)
  local t = setmetatable({ id = id }, cls)
  if state.scope == 0 or cls.__unscoped then own(t) end
  return t
end

M.or_a_number = {}          -- functions whose operands may also be numbers, by name: for the message about other values
local function not_a_tensor(x, who, what)
  local kind = M.or_a_number[who] and "a tensor or a number" or "a tensor"
  opts.wrong(x, kind, "%s: %s", who or "tensor", what or "argument")
end

--- The id of a tensor argument; raises for any other value. who, what: the function and the argument that the message
--- names.
---@param x any  the argument to check
---@param who? string  the function's name in messages
---@param what? string  the argument's name in messages
---@return number
local function id_of(x, who, what)
  local mt = getmetatable(x)
  if mt == Tensor or classes[mt] ~= nil then return x.id end
  return not_a_tensor(x, who, what)
end
M.id_of = id_of

-- ---- calling operators -------------------------------------------------------------------------

-- Called when an engine call has failed. If memory ran out, collects garbage, because unreachable unscoped tensors may
-- hold memory, and returns true: the call should be tried again.
local function collected()
  if lib.ms_error_code() ~= ffi.C.MS_ENOMEM then return false end
  collectgarbage()
  state.gc_wanted = 0
  return true
end
M.collected = collected

local refused_call = function() return false end

--- Registers fn(number, a, b, c), called when the engine has refused a call; fn returns true if it ran the call itself.
---@param fn fun(number: integer, a: Tensor?, b: Tensor?, c: Tensor?): boolean  number: the operator; a, b, c: its first arguments
function M.on_refused_call(fn) refused_call = fn end

-- Runs an operator of which an argument is an instance of a tensor class: by the class's dispatch, or on the inner
-- tensors. n: the number of tensors; f: the number that is the operator's last argument, or nil. Returns the result's
-- id; nil without instances.
local function by_inner(op, n, f, a, b, c)
  if not (a.id < 0 or b and b.id < 0 or c and c.id < 0) then return nil end
  local args, a_in = engine.args, engine.a_in
  args.n_in, args.n_i, args.n_f = n, 0, f and 1 or 0
  a_in[0], a_in[1], a_in[2] = a.id, b and b.id or 0, c and c.id or 0
  if f then engine.a_f[0] = f end
  refused_call(op, a, b, c)
  return engine.a_out[0]
end

local function again1(op, a)
  local made = by_inner(op, 1, nil, a)
  if made then return made end
  local id = collected() and lib.ms_call1(op, a.id) or 0
  return id ~= 0 and id or fail(a)
end

local function again1f(op, a, f)
  local made = by_inner(op, 1, f, a)
  if made then return made end
  local id = collected() and lib.ms_call1f(op, a.id, f) or 0
  return id ~= 0 and id or fail(a)
end

local function again2(op, a, b)
  local made = by_inner(op, 2, nil, a, b)
  if made then return made end
  local id = collected() and lib.ms_call2(op, a.id, b.id) or 0
  return id ~= 0 and id or fail(a, b)
end

--- Calls an operator with one tensor.
function M.call1(op, a, who)
  local id = lib.ms_call1(op, id_of(a, who))
  if id == 0 then id = again1(op, a) end
  return id
end

--- Calls an operator with one tensor and one number.
function M.call1f(op, a, f, who)
  local id = lib.ms_call1f(op, id_of(a, who), f)
  if id == 0 then id = again1f(op, a, f) end
  return id
end

--- Calls an operator with two tensors.
function M.call2(op, a, b, who)
  local id = lib.ms_call2(op, id_of(a, who), id_of(b, who))
  if id == 0 then id = again2(op, a, b) end
  return id
end

--- Calls an operator with three tensors; the last may be absent.
function M.call3(op, a, b, c, who)
  local ia, ib, ic = id_of(a, who), id_of(b, who), 0
  if c ~= nil then ic = id_of(c, who) end
  local id = lib.ms_call3(op, ia, ib, ic)
  if id == 0 then
    id = by_inner(op, c == nil and 2 or 3, nil, a, b, c) or collected() and lib.ms_call3(op, ia, ib, ic) or 0
    if id == 0 then fail(a, b, c) end
  end
  return id
end

--- Calls an operator with the arguments in engine.args. Returns the id of its first output; those of all outputs are in
--- engine.a_out. a, b, c: the first tensors of the call, for error messages and for instances of tensor classes among
--- them.
function M.call(op, a, b, c)
  local args = engine.args
  if lib.ms_call_op(op, args) ~= 0 and not refused_call(op, a, b, c)
    and not (collected() and lib.ms_call_op(op, args) == 0) then
    fail(a, b, c)
  end
  return engine.a_out[0]
end

--- Calls an operator with one tensor and the first n_i integers of engine.a_i and n_f numbers of engine.a_f, which the
--- caller has set.
function M.call1_with(op, a, who, n_i, n_f)
  local args = engine.args
  args.n_in, args.n_i, args.n_f = 1, n_i, n_f or 0
  engine.a_in[0] = id_of(a, who)
  return M.call(op, a)
end

-- ---- fields ------------------------------------------------------------------------------------

M.Shape = Shape

-- Cached, because reading an array field of a struct makes an object each time.
local info_shape, info_stride = info.shape, info.stride

--- The engine's description of t: one struct, valid until the next call of this function.
local function info_of(t)
  if lib.ms_tensor_info(t.id, info) ~= 0 then
    if t.id < 0 then return M.info_of(inner(t)[1]) end
    fail(t)
  end
  return info
end
M.info_of = info_of

local function sizes_of(n, array)
  local shape = setmetatable({}, Shape)
  for d = 1, n do shape[d] = tonumber(array[d - 1]) end
  return shape
end

local getters, setters = {}, {}
M.getters, M.setters = getters, setters

function getters.shape(t)
  info_of(t)
  return sizes_of(info.ndim, info_shape)
end
function getters.ndim(t) return info_of(t).ndim end
function getters.dtype(t) return dtypes.name(info_of(t).dtype) end
function getters.device(t) return dtypes.device_name(info_of(t).device) end
function getters.requires_grad(t) return info_of(t).requires_grad ~= 0 end
function getters.is_leaf(t) return info_of(t).is_leaf ~= 0 end
function getters.is_sparse(t)
  info_of(t)
  return false
end

-- A sparse gradient is kept in the leaf's field `_sparse`, not in the engine (autograd/sparse.lua).
local function drop_sparse(t)
  local g = rawget(t, "_sparse")
  if not g then return end
  rawset(t, "_sparse", nil)
  if state.scope ~= 0 then
    for _, part in ipairs(inner(g)) do lib.ms_adopt(part.id) end
  end
end

-- Returns the same object as long as the leaf has the same gradient.
function getters.grad(t)
  local id = lib.ms_get_grad(t.id)
  if id == 0 then
    local other = rawget(t, "_sparse") or rawget(t, "_retained")     -- a sparse gradient, or one of retain_grad
    if other then return other end
    if lib.ms_is_alive(t.id) == 0 then info_of(t) end
    return nil
  end
  local g = rawget(t, "_grad")
  if g == nil or g.id ~= id then
    g = setmetatable({ id = id }, Tensor)
    rawset(t, "_grad", g)
  end
  if state.scope == 0 then own(g) end
  return g
end

function setters.grad(t, g)
  if g ~= nil and M.id_of(g, "grad", "value") < 0 and g.is_sparse then return g:_become_grad(t) end
  drop_sparse(t)
  local old = rawget(t, "_grad")
  if old and state.scope == 0 then own(old) end         -- the script may still use the old gradient
  if lib.ms_set_grad(t.id, g == nil and 0 or id_of(g, "grad", "value")) ~= 0 then fail(t, g) end
  rawset(t, "_grad", g)
end

function setters.requires_grad(t, on)
  opts.expect(on, opts.boolean, "requires_grad: value")
  if lib.ms_set_requires_grad(t.id, on and 1 or 0) ~= 0 then fail(t) end
end

-- Defines how fields of a class's instances are read: methods first, then getters (own_getters before those of plain
-- tensors), then t[i]. Other names are fields that the script set; misspelt.field refuses some. tensor/index.lua
-- handles lists and tensors as keys.
local function install(cls, own_methods, own_getters, own_setters)
  rawset(cls, "__index", function(t, key)
    local method = own_methods[key]
    if method ~= nil then return method end
    local getter = own_getters and own_getters[key] or getters[key]
    if getter ~= nil then return getter(t) end
    if type(key) == "number" then return own_methods.select(t, 1, key) end
    if type(key) ~= "string" then return own_methods._item(t, key) end
    if key:sub(1, 1) ~= "_" then
      if t.id >= 0 then misspelt.field(key, true) end   -- tensor classes may have any fields
      misspelt.look(cls, key, own_methods, 2)
    end
    return nil
  end)
  if own_setters then
    rawset(cls, "__newindex", function(t, key, value)
      local setter = own_setters[key]
      if setter then return setter(t, value) end
      return Tensor.__newindex(t, key, value)
    end)
  end
end
M.install = install
install(Tensor, methods)

function Tensor.__newindex(t, key, value)
  local setter = setters[key]
  if setter ~= nil then return setter(t, value) end
  if type(key) == "number" then return methods._set_item(t, key, value) end
  if type(key) ~= "string" then return methods._set_part(t, key, value) end
  if getters[key] ~= nil then errors.raise("a tensor's '%s' cannot be assigned", key) end
  if methods[key] ~= nil then errors.raise("'%s' is a method of tensors; choose another name for your field", key) end
  if t.id >= 0 then misspelt.field(key, false) end
  rawset(t, key, value)
end

function Tensor.__lt()
  errors.raise("tensors cannot be compared with <, <=, > or >=: use lt, le, gt or ge, which return a tensor, or item()")
end
Tensor.__le = Tensor.__lt

--- A class of tensors that extends the plain one, such as nn.Parameter. M.wrap_as makes its instances.
function M.subclass(name, base)
  base = base or Tensor
  local cls = class.new(name, base)
  local own_methods = setmetatable({}, { __index = base.methods })
  rawset(cls, "methods", own_methods)
  install(cls, own_methods)
  classes[cls] = cls
  return cls
end

function Tensor.__construct()
  errors.raise("Tensor: the class cannot be called; make tensors with ms.tensor, ms.zeros and similar functions")
end

-- ---- methods: properties, values, lifetime ------------------------------------------------------

--- Whether t is an instance of a class or of a class that extends it.
---@param cls table  such as ms.Tensor or nn.Parameter
---@return boolean
function methods.isa(t, cls) return class.isa(t, cls) end
--- The name of t's class.
---@return string
function methods.class_name(t) return class.name(t) end

--- Raises if a tensor cannot have n dimensions.
function M.check_count(who, n)
  if n > engine.MAX_DIMS then
    errors.raise("%s: %d sizes; at most %d dimensions are supported", who, n, engine.MAX_DIMS)
  end
end

--- Converts a dimension in Lua (from 1, negative from the end) to the engine's numbering (from 0, negative from the
--- end).
local function position(d, who)
  if type(d) ~= "number" or d % 1 ~= 0 or d == 0 then
    opts.wrong(d, "a whole number other than 0 (dimensions count from 1, negative ones from the end)", "%s: dimension", who)
  end
  return d > 0 and d - 1 or d
end
M.position = position

local function dimension(t, d, who)
  info_of(t)
  local at, n = position(d, who), info.ndim
  if at < 0 then at = at + n end
  if at < 0 or at >= n then
    errors.raise("%s: dimension %d is out of range; the tensor has %d dimension%s, shape %s", who, d, n, n == 1 and "" or "s",
      tostring(sizes_of(n, info_shape)))
  end
  return at
end
M.dimension = dimension

--- The size along d; without d, all sizes.
---@param d? integer  from 1; negative from the end
---@return integer|integer[]  a list that prints as [2, 3]
function methods.size(t, d)
  id_of(t, "size")
  if d == nil then return getters.shape(t) end
  return tonumber(info_shape[dimension(t, d, "size")])
end

--- The distance in elements between neighbours along d; without d, all distances.
---@param d? integer  from 1; negative from the end
---@return integer|integer[]
function methods.stride(t, d)
  id_of(t, "stride")
  if d == nil then
    info_of(t)
    return sizes_of(info.ndim, info_stride)
  end
  return tonumber(info_stride[dimension(t, d, "stride")])
end

--- The number of elements.
---@return integer
function methods.numel(t)
  id_of(t, "numel")
  return tonumber(info_of(t).numel)
end

--- The number of dimensions, as the field ndim.
---@return integer
function methods.dim(t)
  id_of(t, "dim")
  return getters.ndim(t)
end

--- Whether the elements are in memory row by row, without gaps.
---@return boolean
function methods.is_contiguous(t)
  id_of(t, "is_contiguous")
  return info_of(t).is_contiguous ~= 0
end

--- The size of one element in bytes.
---@return integer
function methods.element_size(t)
  id_of(t, "element_size")
  return lib.ms_dtype_size(info_of(t).dtype)
end

--- The address of the first element; valid while the tensor's storage exists (see ms.from_pointer). Read floating-point
--- elements that may be nan with item or tolist: LuaJIT's FFI takes some NaNs for values of other types. Errors: a meta
--- tensor.
---@return integer
function methods.data_ptr(t)
  local p = lib.ms_data_ptr(id_of(t, "data_ptr"))
  if p == nil and (lib.ms_is_alive(t.id) == 0 or info_of(t).numel > 0) then fail(t) end
  return tonumber(ffi.cast("uintptr_t", p))
end

--- Releases the tensor now instead of at the end of its scope. Its memory is freed when no graph, view or gradient
--- needs it. Later operations on the tensor raise errors.
function methods.release(t)
  lib.ms_release(id_of(t, "release"))
end

--- Whether the tensor was released, by release() or at the end of its scope.
---@return boolean
function methods.is_released(t) return lib.ms_is_alive(id_of(t, "is_released")) == 0 end

--- Removes the tensor from its scope: it lives until release() is called or the garbage collector frees it.
---@return Tensor self
function methods.keep(t)
  if lib.ms_keep(id_of(t, "keep")) ~= 0 then fail(t) end
  own(t)
  return t
end

--- A tensor on the same storage, outside of the graph: no gradient flows through it.
---@return Tensor
function methods.detach(t)
  return M.wrap_new(lib.ms_detach(id_of(t, "detach")), t)
end

--- Sets the name shown in errors ("blocks.0.weight").
function M.set_name(t, name)
  if t.id < 0 then
    for _, part in ipairs(inner(t)) do M.set_name(part, name) end
    return
  end
  if lib.ms_set_name(t.id, name) ~= 0 then fail(t) end
end

opts.fix(methods, { "numel", "detach" })
methods.nelement = methods.numel

return M
