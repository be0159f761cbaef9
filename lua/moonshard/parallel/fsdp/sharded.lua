-- SPDX-License-Identifier: MIT
--- Sharded tensors: parameters of a unit, their gradients, and the results of clone, detach and to on these.
---
--- Shape, numel and dtype are those of the whole tensor; the values are this rank's part, `to_local()`. Operations that
--- make sense on a part alone (fills, in-place arithmetic with numbers, copies, comparisons with an equally sharded
--- tensor) run on it. All others raise an error, which mostly names to_local and full_tensor as remedies. While its
--- module runs, a parameter is whole and behaves as an ordinary tensor.
local calls = require "moonshard.dist.calls"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local groups = require "moonshard.parallel.fsdp.groups"
local initial = require "moonshard.nn.initial"
local policies = require "moonshard.parallel.fsdp.policies"
local shards = require "moonshard.nn.module.shards"
local tensor = require "moonshard.tensor"
local tensor_class = require "moonshard.tensor.class"

local lib, ffi = engine.lib, engine.ffi
local C = ffi.C
local Tensor, getters, setters = tensor.Tensor, tensor.getters, tensor.setters
local rawget, rawset, getmetatable, setmetatable, type = rawget, rawset, getmetatable, setmetatable, type

local M = {}

local info = ffi.new "ms_shard_info"

---@class Sharded: Tensor
---@field placements Placement[]  one for each dimension of the mesh
---@field device_mesh table  the ranks over which the tensor is sharded
local Sharded = tensor.subclass "Tensor"
local methods = Sharded.methods

-- Classes of sharded parameters, by the class before sharding.
local parameter_classes = setmetatable({}, { __mode = "k" })

--- Whether x is a parameter of a unit (also while it is whole: see is_whole) or a tensor with such a parameter's
--- placement. An instance of a tensor class is sharded if its inner tensors are.
---@return boolean
function M.is_sharded(x)
  if type(x) ~= "table" then return false end
  if rawget(x, "_unit") ~= nil or rawget(x, "_of") ~= nil then return true end
  local id = rawget(x, "id")
  return id ~= nil and id < 0 and M.is_sharded(tensor.inner(x)[1])
end

--- Whether every rank of the unit holds the whole parameters (FSDP's no_shard), so that nothing need be gathered.
function M.is_replicated(unit) return unit.classic and unit.placed.strategy == "no_shard" end

-- The parameter whose placement t has; for an instance of a tensor class, the parameter of its first inner tensor.
local parameter_of
function parameter_of(t)
  if t.id < 0 then return parameter_of(tensor.inner(t)[1]) end
  return rawget(t, "_of") or t
end

local function shard_info(t)
  if lib.ms_unit_shard_info(parameter_of(t).id, info) ~= 0 then errors.fail(t) end
  return info
end

-- Whether t is currently whole and therefore an ordinary tensor.
local is_whole
function is_whole(t)
  if t.id < 0 then return is_whole(tensor.inner(t)[1]) end
  return rawget(t, "_of") == nil and tensor.info_of(t).sharded == 0
end

-- ---- parts ---------------------------------------------------------------------------------------

--- This rank's part as a plain tensor. For a parameter the result is the leaf that optimizers step, the same object at
--- every call until the parameter gets another local tensor.
---@return Tensor
function methods.to_local(t)
  local id = rawget(t, "_of") and t._local.id or lib.ms_unit_local(t.id)
  if id == 0 then errors.fail(t) end
  local part = rawget(t, "_local")
  if part == nil or part.id ~= id then
    part = setmetatable({ id = id }, Tensor)
    rawset(t, "_local", part)
  end
  return part
end

--- Gathers the whole tensor; it is detached and has the stored dtype. Collective.
---@return Tensor
function methods.full_tensor(t)
  local of = rawget(t, "_of")
  return tensor.wrap_new(of and lib.ms_unit_gather_like(of.id, t._local.id) or lib.ms_unit_full(t.id, 0), t)
end
methods.full_tensor = calls.several(methods.full_tensor)

-- Extends fn(p, t) to instances of tensor classes: calls it on the inner tensors and rebuilds an instance like t.
local function by_inner(fn)
  return function(p, t)
    if p.id >= 0 then return fn(p, t) end
    local parts, inner = {}, tensor.inner(t)
    for k, part in ipairs(tensor.inner(p)) do parts[k] = fn(part, inner[k]) end
    return tensor.rebuild(parts, t)
  end
end

-- Makes a sharded tensor with p's placement from this rank's part.
local around = by_inner(function(p, part)
  local id = lib.ms_unit_stand_in(p.id, dtypes.number(part.dtype))
  if id == 0 then errors.fail(p) end
  local t = setmetatable({ id = id, _of = p, _local = part }, Sharded)
  if engine.state.scope == 0 then tensor.own(t) end
  return t
end)

-- ---- fields --------------------------------------------------------------------------------------

local own_getters, own_setters = {}, {}

local function mesh_of(unit) return unit.classic and groups.mesh_of(unit) or unit.mesh() end

-- One placement per dimension of the mesh; in a mesh of two dimensions, the first one is that of the replicas.
function own_getters.placements(t)
  local unit, shard = rawget(parameter_of(t), "_unit"), policies.Shard(shard_info(t).dim + 1)
  if mesh_of(unit).ndim == 2 then return { policies.Replicate(), shard } end
  return { M.is_replicated(unit) and policies.Replicate() or shard }
end
-- The device of the values: offloaded shards are on the CPU, whatever the compute device.
function own_getters.device(t) return is_whole(t) and getters.device(t) or methods.to_local(t).device end
function own_getters.device_mesh(t) return mesh_of(rawget(parameter_of(t), "_unit")) end

-- Drops the tensor that represented a gradient that no longer exists: the innermost scope releases it; outside of
-- scopes, the garbage collector does.
local function forget_grad(t)
  local seen = rawget(t, "_grad")
  if not seen then return end
  rawset(t, "_grad", nil)
  if engine.state.scope ~= 0 then lib.ms_adopt(seen.id) else tensor.own(seen) end
end

-- The local part has the gradient; scripts see it with the shape of the whole tensor.
function own_getters.grad(t)
  if rawget(t, "_of") then return nil end
  local part = methods.to_local(t)
  local g = part.grad
  if not g then
    forget_grad(t)
    return nil
  end
  local seen = rawget(t, "_grad")
  if not seen or seen._local ~= g then
    forget_grad(t)
    local id = lib.ms_unit_stand_in(t.id, dtypes.number(g.dtype))
    if id == 0 then errors.fail(t) end
    lib.ms_keep(id)
    seen = setmetatable({ id = id, _of = t, _local = g }, Sharded)
    rawset(t, "_grad", seen)
  end
  return seen
end

function own_setters.grad(t, g)
  if rawget(t, "_of") then errors.raise("grad: this sharded tensor is not a parameter; only parameters can be given a grad") end
  if g ~= nil and M.is_sharded(g) then g = methods.to_local(g) end
  if g == nil and t.id >= 0 then lib.ms_unit_drop_saved_grad(t.id) end
  methods.to_local(t).grad = g
  forget_grad(t)
end

function own_setters.requires_grad(t, on)
  setters.requires_grad(t, on)
  if rawget(t, "_of") == nil then methods.to_local(t).requires_grad = on end
end

tensor.install(Sharded, methods, own_getters, own_setters)

-- ---- operations on this rank's part -------------------------------------------------------------

function methods.requires_grad_(t, on)
  own_setters.requires_grad(t, on ~= false)
  return t
end

local base = Tensor.methods

-- Makes an in-place method. It changes the whole tensor while the parameter is gathered, otherwise this rank's part if
-- `accepts` returns true for the arguments. Other calls raise the error that operators raise for sharded tensors.
local function in_place(name, accepts)
  methods[name] = function(t, ...)
    if is_whole(t) or not accepts(...) then return base[name](t, ...) end
    base[name](methods.to_local(t), ...)
    return t
  end
end

local function always() return true end
local function number_first(x) return type(x) == "number" end
in_place("zero_", always)
in_place("fill_", number_first)
for _, name in ipairs { "add_", "sub_", "mul_", "div_" } do in_place(name, number_first) end

-- Whether t and u are sharded in the same way: over equally many ranks, along the same dimension, with the same part on
-- this rank.
local function alike(t, u)
  if not M.is_sharded(u) then return false end
  local a = shard_info(t)
  local layout, world, dim, first, here, rows, row_numel, outer = a.layout, a.world, a.dim, a.first, a.here, a.rows,
    a.row_numel, a.outer
  local b = shard_info(u)
  return b.layout == layout and b.world == world and b.dim == dim and b.first == first and b.here == here
    and b.rows == rows
    and b.row_numel == row_numel and b.outer == outer
end

local function with_alike(name, gives_self)
  methods[name] = function(t, u, ...)
    if is_whole(t) then
      if M.is_sharded(u) and not is_whole(u) then
        errors.raise("%s: argument 1 is sharded, but this parameter is gathered at the moment; pass full_tensor() of argument 1, or use to_local() of both",
          name)
      end
      return base[name](t, u, ...)
    end
    if not alike(t, u) then
      errors.raise("%s: the tensor, shape %s, is sharded; use to_local() for this rank's part or full_tensor() for the whole, or pass a tensor with the same sharding, not %s",
        name, tostring(t.shape), errors.kind(u))
    end
    local result = base[name](methods.to_local(t), methods.to_local(u), ...)
    if gives_self then return t end
    return result
  end
end
with_alike("copy_", true)
with_alike("equal", false)
with_alike("allclose", false)

for _, name in ipairs { "clone", "detach" } do
  methods[name] = function(t)
    if is_whole(t) then return base[name](t) end
    return around(parameter_of(t), base[name](methods.to_local(t)):detach())
  end
end

function methods.to(t, ...)
  if is_whole(t) then return base.to(t, ...) end
  return around(parameter_of(t), methods.to_local(t):detach():to(...))
end

for name, dtype in pairs { float = "float32", double = "float64", half = "float16", bfloat16 = "bfloat16",
  long = "int64" } do

  methods[name] = function(t) return methods.to(t, dtype) end
end

-- ---- printing and initialisation -----------------------------------------------------------------

local plain_tostring = Tensor.__tostring

local function described(t)
  if lib.ms_is_alive(t.id) == 0 or is_whole(t) then return plain_tostring(t) end
  local s = shard_info(t)
  local first, here, rows = tonumber(s.first), tonumber(s.here), tonumber(s.rows)
  local what = s.dim == 0 and "rows" or ("positions along dimension %d:"):format(s.dim + 1)
  local at = here > 0 and (", %s %d-%d of %d"):format(what, first + 1, first + here, rows)
    or (", no rows of %d"):format(rows)
  local whole = tensor.info_of(t)
  local head = ("%s %s %s %s%s%s"):format(getmetatable(t).__name, dtypes.name(whole.dtype), tostring(t.shape),
    methods.to_local(t).device, whole.requires_grad ~= 0 and ", requires_grad" or "", at)
  local values = plain_tostring(methods.to_local(t)):match "\n(.*)$"
  return values and head .. "\n" .. values or head
end
rawset(Sharded, "__tostring", described)

--- Lets nn.init give a shard the random numbers of its position in the whole tensor.
initial.on_sharded(function(t)
  if not M.is_sharded(t) or is_whole(t) then return nil end
  local s = shard_info(t)
  local place, runs, apart = tonumber(s.first * s.row_numel), nil, nil
  if s.dim > 0 then runs, apart = tonumber(s.outer), tonumber(s.rows * s.row_numel) end
  return t:to_local(), place, runs, apart
end)

--- This rank's part of a whole tensor, for the placement of p: a view if `whole` is contiguous.
M.part_of = by_inner(function(p, whole)
  local s = shard_info(p)
  local first, here = tonumber(s.first), tonumber(s.here)
  if s.layout == C.MS_LAYOUT_FLAT then return whole:reshape(-1):narrow(1, first + 1, here) end
  return whole:narrow(s.dim + 1, first + 1, here)
end)

-- ---- parameters ----------------------------------------------------------------------------------

local function class_for(cls)
  local sharded = parameter_classes[cls]
  if not sharded then
    sharded = tensor.subclass(rawget(cls, "__name"), cls)
    sharded.__isa[Sharded] = true
    local own_methods = rawget(sharded, "methods")
    for name, method in pairs(methods) do own_methods[name] = method end
    tensor.install(sharded, own_methods, own_getters, own_setters)
    rawset(sharded, "__tostring", described)
    parameter_classes[cls] = sharded
  end
  return sharded
end

--- Makes p, which the engine has just sharded, a sharded parameter of unit.
function M.adopt(p, unit)
  rawset(p, "_unit", unit)
  shards.note()
  if p.id < 0 then
    for _, part in ipairs(tensor.inner(p)) do M.adopt(part, unit) end
    return
  end
  rawset(p, "_grad", nil)
  setmetatable(p, class_for(getmetatable(p)))
end

-- ---- tensor classes ------------------------------------------------------------------------------

-- A sharded parameter of a tensor class is an instance with sharded inner tensors; so is its gradient.
local instances = tensor_class.Instance.methods

--- This rank's part as an instance of the tensor class. For a parameter, calls return the same object as long as its
--- inner parts are the same.
function instances.to_local(t)
  local parts, seen = {}, rawget(t, "_local")
  local same = seen ~= nil
  for k, part in ipairs(tensor.inner(t)) do
    if not M.is_sharded(part) then errors.raise("to_local: this %s is not sharded", t:class_name()) end
    parts[k] = part:to_local()
    same = same and rawequal(tensor.inner(seen)[k], parts[k])
  end
  if same then return seen end
  seen = tensor.rebuild(parts, t)
  rawset(t, "_local", seen)
  return seen
end

--- Gathers the whole tensor, detached. Collective.
function instances.full_tensor(t)
  return tensor_class.map(t, function(part)
    if not M.is_sharded(part) then errors.raise("full_tensor: this %s is not sharded", t:class_name()) end
    return part:full_tensor()
  end)
end

--- Copies the inner tensors of u to those of a sharded t, one by one.
function instances.copy_(t, u)
  if not M.is_sharded(t) or is_whole(t) or not tensor.is_tensor(u) or u.id >= 0 then return base.copy_(t, u) end
  for k, part in ipairs(tensor.inner(t)) do part:copy_(tensor.inner(u)[k]) end
  return t
end

for _, name in ipairs { "placements", "device_mesh" } do
  tensor.getters[name] = function(t)
    if t.id < 0 and M.is_sharded(t) then return own_getters[name](tensor.inner(t)[1]) end
  end
end

-- A text of the data that determine where each rank's part of p is. In a flat parameter these are the shapes of all its
-- parameters, in order, and p's number among them.
local function plan_of(p)
  local unit, s = rawget(p, "_unit"), shard_info(p)
  if s.layout ~= C.MS_LAYOUT_FLAT then
    return table.concat({ "rows", s.world, s.dim, tonumber(s.rows), tonumber(s.row_numel), tonumber(s.outer) }, " ")
  end
  if not unit.plan then
    local parts = { "flat", s.world, tostring(unit.options.use_orig_params), unit.made_with }
    for _, q in ipairs(unit.originals) do parts[#parts + 1] = tostring(rawget(q, "_whole_shape")) end
    unit.plan = table.concat(parts, " ")
  end
  local at = 1
  while unit.originals[at] ~= p do at = at + 1 end
  return unit.plan .. " at " .. at
end

--- The unit whose placement t has.
function M.unit_of(t) return rawget(parameter_of(t), "_unit") end

-- The ranks that p is sharded over.
local function group_of(p)
  local unit = rawget(p, "_unit")
  return unit.placed and unit.placed.group or unit.group
end

--- Whether the sharded tensor t is sharded like p on every rank, so that a rank's part of t is its part for p. The
--- result is equal on all ranks.
---@return boolean
function M.is_part_of(p, t)
  local of = parameter_of(t)
  return of == p or group_of(of) == group_of(p) and plan_of(of) == plan_of(p)
end

--- This rank's part, for p, of a sharded tensor t: t's own part if p is sharded in the same way. Otherwise gathers the
--- whole tensor first, which is collective.
---@return Tensor  placed like p:to_local()
function M.part_like(p, t)
  if M.is_part_of(p, t) then return t:to_local() end
  return M.part_of(p, t:full_tensor())
end

M.Sharded = Sharded
M.shard_info = shard_info
M.is_whole = is_whole
M.around = around

return M
