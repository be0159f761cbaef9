-- SPDX-License-Identifier: MIT
--- fsdp.FSDP: wraps a module and combines its parameters into one flat parameter, sharded over the ranks by element.
---
--- An instance is a module that contains the wrapped module, but adds nothing to its parameters' names. Fields, methods
--- and elements (`m[i]`) that the instance lacks are read from the wrapped module. In the engine an instance is a unit
--- with the flat layout (runtime/shard/views/classic.c).
local advice = require "moonshard.core.advice"
local alike = require "moonshard.parallel.fsdp.alike"
local autograd = require "moonshard.autograd"
local calls = require "moonshard.dist.calls"
local class = require "moonshard.core.class"
local context = require "moonshard.core.context"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local flat = require "moonshard.parallel.fsdp.flat"
local groups = require "moonshard.parallel.fsdp.groups"
local log = require "moonshard.core.log"
local materialize = require "moonshard.parallel.fsdp.materialize"
local module = require "moonshard.parallel.fsdp.module"
local ignored = require "moonshard.parallel.fsdp.ignored"
local hooks = require "moonshard.parallel.fsdp.comm_hooks"
local utils = require "moonshard.nn.utils"
local order = require "moonshard.parallel.fsdp.exec_order"
local policies = require "moonshard.parallel.fsdp.policies"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local states = require "moonshard.parallel.fsdp.state"
local summon = require "moonshard.parallel.fsdp.summon"
local switches = require "moonshard.parallel.fsdp.switches"
local wrap = require "moonshard.parallel.fsdp.wrap"
local writeback = require "moonshard.parallel.fsdp.writeback"
local wrapping = require "moonshard.nn.module.wrapping"
local Module = require "moonshard.nn.module".Module
local a_module = require("moonshard.nn.module.register").a_module

local lib, ffi, raise = engine.lib, engine.ffi, errors.raise
local C = ffi.C
local rawget, rawset, setmetatable, type, ipairs = rawget, rawset, setmetatable, type, ipairs

---@class FSDP: Module
---@field module Module          the wrapped module
---@field params Parameter[]     this unit's flat parameters: one or none
---@field comm_hook function?  set by register_comm_hook
---@field comm_hook_state any  set by register_comm_hook
local FSDP = Module:extend "FSDP"

FSDP._advice = advice.classic

local M = { FSDP = FSDP }

--- Whether x is an FSDP instance.
---@return boolean
function M.is_fsdp(x) return class.isa(x, FSDP) end

-- ---- options -------------------------------------------------------------------------------------

-- forward_prefetch. true or absent: when an instance's forward begins, it starts the gather of the instance that
-- followed it in the latest forward. This is the default because otherwise no gather would overlap with the script's
-- own computation. false: every instance is gathered when its forward begins.
--
-- limit_all_gathers. true: at most one instance is gathered early, so at most two besides the root are gathered at a
-- time, in forward and backward; unlike in PyTorch, the limit makes no thread wait. false: all later instances are
-- gathered at once.
local OPTIONS = {
  process_group = opts.any, sharding_strategy = opts.one_of(groups.STRATEGIES), cpu_offload = opts.any,
  auto_wrap_policy = opts.any,
  backward_prefetch = opts.one_of({ "pre", "post", "none" }, "pre"), mixed_precision = opts.any,
  ignored_modules = opts.any,
  ignored_states = opts.any, param_init_fn = opts.any, device_id = opts.any, sync_module_states = false,
  forward_prefetch = opts.boolean, limit_all_gathers = true, use_orig_params = false, device_mesh = opts.any,
  check_values = true,
}
-- The option with which auto_wrap_policy passes the enclosing instance's ignored modules and parameters.
local INNER = { ignored = opts.table }
for key, value in pairs(OPTIONS) do INNER[key] = value end
M.OPTIONS = OPTIONS

local PREFETCH = { pre = C.MS_PREFETCH_PRE, post = C.MS_PREFETCH_POST, none = C.MS_PREFETCH_NONE }

local function number_of(dtype) return dtype and dtypes.number(dtype) or -1 end

-- ---- parameters of an instance ------------------------------------------------------------------

-- The parameters of m and of its descendants, except ignored ones and those of FSDP instances. Returns values and names
-- without duplicates, and every place that contains one of them: { module, field, parameter, name }. Raises for a
-- parameter that an FSDP instance already has.
local function managed(m, ignored_modules, ignored_params)
  local params, names, places, seen, visited = {}, {}, {}, {}, {}
  local function visit(sub, prefix)
    if visited[sub] or ignored_modules[sub] then return end
    visited[sub] = true
    for _, name in ipairs(sub._params) do
      local p = sub._slots[name]
      if p ~= nil and not ignored_params[p] then places[#places + 1] = { sub, name, p, prefix .. name } end
      if p ~= nil and not seen[p] and not ignored_params[p] then
        seen[p] = true
        if rawget(p, "_unit") then
          raise("FSDP: parameter '%s' is shared with a module that is already wrapped; wrap one module that contains both modules", prefix .. name)
        end
        params[#params + 1], names[#names + 1] = p, prefix .. name
      end
    end
    local child_names, children = sub:_child_list()
    for k, child in ipairs(children) do
      if not M.is_fsdp(child) then visit(child, sub._wraps and prefix or prefix .. child_names[k] .. ".") end
    end
  end
  if not M.is_fsdp(m) then visit(m, "") end
  return params, names, places
end

-- Refuses modules sharded by fully_shard: no_sync, precision and hooks of an enclosing FSDP instance would not apply to
-- them.
local function refuse_fully_sharded(m, ignored_modules)
  for name, sub in m:named_modules() do
    local unit = module.unit_of(sub)
    if unit and not unit.classic and not ignored_modules[sub] then
      raise("FSDP: %s, %s, is already sharded by fully_shard. Use one of the two for the whole model: fully_shard for the outer modules as well, or fsdp.FSDP "
        .. "instead of fully_shard; or exclude it with ignored_modules",
        name == "" and "the module" or ("submodule '%s'"):format(name), sub:class_name())
    end
  end
end

-- ---- construction --------------------------------------------------------------------------------

local function engine_unit(self, o, placed, params, names, on)
  local ids = ffi.new("ms_id[?]", math.max(#params, 1))
  for k, p in ipairs(params) do
    tensor.set_name(p, names[k])
    rawset(p, "_whole_shape", p.shape)
    ids[k - 1] = p.id
  end
  local precision = o.mixed_precision or {}
  local options = groups.fill(ffi.new("ms_unit_options"), placed)
  options.layout = C.MS_LAYOUT_FLAT
  options.views = o.use_orig_params and C.MS_VIEWS_PIECES or C.MS_VIEWS_FLAT
  options.backward_prefetch = PREFETCH[o.backward_prefetch]
  options.keep_low_precision_grads = precision.keep_low_precision_grads and 1 or 0
  options.reshard_after_forward = groups.RESHARDS[placed.strategy] and -1 or 0
  options.param_dtype = number_of(precision.param_dtype)
  options.reduce_dtype = number_of(precision.reduce_dtype)     -- default: param_dtype, the dtype of the gradients
  options.output_dtype = -1
  options.device = #params > 0 and dtypes.device(params[1].device, "FSDP") or -1
  options.offload = o.cpu_offload and o.cpu_offload.offload_params and 2 or 0
  local handle = lib.ms_unit_new(self._slots.module:class_name(), #params, ids, options)
  if handle == 0 then errors.fail() end
  if o.forward_prefetch == false then errors.check(lib.ms_unit_set(handle, C.MS_UNIT_FORWARD_PREFETCH, 0)) end
  if on.fake_all_gather then errors.check(lib.ms_unit_set(handle, C.MS_UNIT_FAKE_GATHER, 1)) end
  if on.fake_reduce then errors.check(lib.ms_unit_set(handle, C.MS_UNIT_FAKE_REDUCE, 1)) end
  if not o.limit_all_gathers then errors.check(lib.ms_unit_set(handle, C.MS_UNIT_LIMIT_GATHERS, 0)) end
  return handle
end

-- Checks that a root and the instances below it have equal options where these must be equal, and equal groups with the
-- hybrid strategies.
local function check_alike(root)
  local first, hybrid
  for _, unit in ipairs(module.units_below(root.modules[1])) do
    if unit.classic then
      first = first or unit
      for _, name in ipairs { "use_orig_params", "limit_all_gathers" } do
        if unit.options[name] ~= first.options[name] then
          raise("Expects one homogeneous value for %s but got both %s and %s", name, tostring(first.options[name]),
            tostring(unit.options[name]))
        end
      end
      if groups.HYBRID[unit.placed.strategy] then
        hybrid = hybrid or unit
        for k, where in ipairs { "intra-node", "inter-node" } do
          if unit.placed.given[k] ~= hybrid.placed.given[k] then
            raise("Some instances use a hybrid sharding strategy, but %s process groups do not match", where)
          end
        end
      end
    end
  end
end

-- For the environment variable FSDP_USE_FULL_PREC_IN_EVAL: a root, and the instances below it, use full precision while
-- they are in eval mode.
local function set_precision(root)
  if lib.ms_unit_get_state(root.handle).root ~= root.handle then return end
  for _, unit in ipairs(module.units_below(root.modules[1])) do
    local full = unit.classic and not unit.modules[1].training
    if unit.mixed_precision and (unit.full_precision or false) ~= full then
      errors.check(lib.ms_unit_set(unit.handle, C.MS_UNIT_FULL_PRECISION, full and 1 or 0))
      unit.full_precision = full
      if unit.mixed_precision.buffer_dtype then
        local inside = materialize.modules(rawget(unit.modules[1], "_slots").module, unit.ignored_modules, M.is_fsdp)
        materialize.cast_buffers(inside, not full and unit.mixed_precision.buffer_dtype or nil)
      end
    end
  end
end

local function on_lazy_init(unit, root)
  if unit == root then order.start(unit, unit.modules[1]) end
  if unit.mixed_precision and unit.mixed_precision.buffer_dtype then
    local inside = materialize.modules(rawget(unit.modules[1], "_slots").module, unit.ignored_modules, M.is_fsdp)
    materialize.cast_buffers(inside, unit.mixed_precision.buffer_dtype)
  end
  local precision = unit.mixed_precision
  if precision and (unit == root and precision.cast_root_forward_inputs or precision.cast_forward_inputs) then
    errors.check(lib.ms_unit_set(unit.handle, C.MS_UNIT_CAST_FORWARD_INPUTS, 1))
  end
end

--- Wraps a module: its parameters become one flat parameter, which is sharded over the ranks by element;
--- auto_wrap_policy wraps submodules first. sharding_strategy: "full_shard" (shards parameters, gradients and the
--- optimizer's state), "shard_grad_op" (as full_shard, but parameters stay whole after forward), "no_shard" (as DDP),
--- "hybrid_shard" and "hybrid_shard_zero2" (shard inside a group, replicate between groups). use_orig_params keeps the
--- original names and parameters. sync_module_states sends rank 0's parameters and buffers to all ranks. Collective
--- (docs/semantics.md#classic). Errors: with auto_wrap_policy, a module that is wrapped already; modules that differ
--- between ranks, also in their initial values (raised on every rank).
---@param m Module  the module to wrap
---@param given? { process_group: Group|Group[], sharding_strategy: "full_shard"|"shard_grad_op"|"no_shard"|"hybrid_shard"|"hybrid_shard_zero2", cpu_offload: boolean|CPUOffload, auto_wrap_policy: fun(m: Module, recurse: boolean, remaining: integer): boolean, backward_prefetch: "pre"|"post"|"none", mixed_precision: MixedPrecision, ignored_modules: Module[], ignored_states: Parameter[]|Module[], param_init_fn: fun(m: Module), device_id: integer|string, sync_module_states: boolean, forward_prefetch: boolean, limit_all_gathers: boolean, use_orig_params: boolean, device_mesh: DeviceMesh, check_values: boolean }
---   sharding_strategy: default "full_shard"; cpu_offload: keeps shards on the CPU; auto_wrap_policy: selects the
---   submodules that become instances of their own; backward_prefetch: when backward starts the next gather: before the
---   current unit ("pre"), after it ("post"), or when the next unit needs it ("none"); mixed_precision: dtypes of
---   computation, reductions and buffers; ignored_modules: keep their parameters whole; ignored_states: parameters or
---   modules that stay whole; param_init_fn: initializes modules on meta; device_id: device to which parameters on the
---   CPU are moved; sync_module_states: starts from rank 0's parameters and buffers; device_mesh: a mesh of one
---   dimension, or { replicate, shard }, given instead of process_group; forward_prefetch: false: forward gathers no
---   instance ahead; limit_all_gathers: at most one instance is gathered ahead; use_orig_params: keeps the original
---   names and parameters; check_values: initial values that differ between ranks are an error, unless
---   sync_module_states is set (default: true)
function FSDP:init(m, given)
  opts.expect(m, a_module, "FSDP: argument 1")
  local inner = given ~= nil and opts.is(given) and given.ignored ~= nil
  local o = opts("FSDP", given, inner and INNER or OPTIONS)
  opts.need(o.mixed_precision == nil or policies.is_precision(o.mixed_precision), o.mixed_precision,
    "an fsdp.MixedPrecision", "FSDP: option 'mixed_precision'")
  if type(o.cpu_offload) == "boolean" then o.cpu_offload = policies.CPUOffload { offload_params = o.cpu_offload } end
  opts.need(o.cpu_offload == nil or policies.is_classic_offload(o.cpu_offload), o.cpu_offload,
    "true, false or an fsdp.CPUOffload", "FSDP: option 'cpu_offload'")
  local placed = groups.resolve(o, inner)
  if m.forward == nil then
    log.warn_once("FSDP will not all-gather parameters for containers that do not implement forward: " .. tostring(m))
  end
  local ignored_modules, ignored_params
  if inner then ignored_modules, ignored_params = o.ignored[1], o.ignored[2] else ignored_modules,
    ignored_params = ignored.resolve(m, o, M.is_fsdp) end
  refuse_fully_sharded(m, ignored_modules)
  if o.auto_wrap_policy ~= nil then
    local options = {}
    for key, value in pairs(given) do options[key] = value end
    options.auto_wrap_policy, options.ignored_modules, options.ignored_states = nil, nil, nil
    options.process_group, options.device_mesh = o.device_mesh == nil and placed.given or nil, o.device_mesh
    options.ignored = { ignored_modules, ignored_params }
    wrap.auto_wrap(m, o, options, ignored_modules, ignored_params, function(sub, with) return FSDP(sub, with) end)
  end
  local inside = materialize.modules(m, ignored_modules, M.is_fsdp)
  local device = materialize.device(inside, o.device_id, ignored_params)
  materialize.from_meta(inside, o.param_init_fn, device)
  materialize.move(inside, device, o.device_id)
  local params, names, places = managed(m, ignored_modules, ignored_params)
  alike.check("FSDP", ("sharding_strategy = %s"):format(placed.strategy), { params = params, names = names,
    owner = m:class_name(), values = o.check_values and not o.sync_module_states }, placed.group, placed.replicate)
  if o.sync_module_states then
    materialize.sync(inside, placed.replicate and { placed.group, placed.replicate } or { placed.group },
      ignored_params)
  end
  rawget(self, "_slots").module = m
  rawget(self, "_kind").module = "module"
  table.insert(rawget(self, "_children"), "module")
  -- Copies the list elements, so that ipairs over the instance visits the wrapped module's children.
  for i, child in ipairs(m) do rawset(self, i, child) end
  rawget(self, "_slots").training = m.training
  local on = switches.read()
  local handle = engine_unit(self, o, placed, params, names, on)
  local unit = {
    classic = true, switches = on, handle = handle, modules = setmetatable({ self }, { __mode = "v" }), placed = placed,
    options = o, mixed_precision = o.mixed_precision, on_lazy_init = on_lazy_init, originals = params,
    places = places, replaces = o.use_orig_params or nil, made_with = params[1] and params[1].dtype, trains = params[1] and params[1].requires_grad,
    ignored_modules = ignored_modules, ignored_params = ignored_params,
    owner = ffi.gc(ffi.new("ms_unit_owner", { unit = handle }), lib.ms_unit_owner_release),
    checks_order = (require "moonshard.dist").debug_level() == "detail", sync = true,
  }
  rawset(self, "_fsdp", unit)
  for k, p in ipairs(params) do (o.use_orig_params and flat.adopt_piece or flat.adopt)(p, unit, names[k]) end
  if #params > 0 and not o.use_orig_params then self:register_parameter("flat_param", flat.flat_parameter(unit)) end
end

-- ---- fields of the wrapped module ---------------------------------------------------------------

local getters = {}

function getters.comm_hook(self) return module.unit_of(self).comm_hook end
function getters.comm_hook_state(self) return module.unit_of(self).comm_hook_state end
function getters.params(self)
  local unit = module.unit_of(self)
  if unit.options.use_orig_params and #unit.originals > 0 then return { flat.pieces_as_one(unit) } end
  return { rawget(self, "_slots").flat_param }
end

wrapping.read_through(FSDP, function(self, name)
  local getter = getters[name]
  if getter then return getter(self), true end
end)

function FSDP:forward(...) return self._slots.module(...) end

function FSDP:_assign(name, value)
  local unit = rawget(self, "_fsdp")
  if unit and name == "comm_hook" then return hooks.set(unit, value, unit.comm_hook_state) end
  if unit and name == "comm_hook_state" then return hooks.set(unit, unit.comm_hook, value) end
  if unit and flat.is_parameter(value) then
    raise("FSDP: parameter '%s' was assigned to the instance, which does not pass it to the module that it wraps; assign it to that "
      .. "module, the field 'module', before wrapping", tostring(name))
  end
  return Module._assign(self, name, value)
end

-- Initialises a root before its first forward. If a rank has no memory for it, the others must learn of it, because the
-- peers wait in the forward. Every rank raises all other errors by itself.
local function start(unit)
  check_alike(unit)
  local ok, message = pcall(module.lazy_init, unit)
  if ok then return end
  if tostring(message):find("no memory for ", 1, true) then lib.ms_dist_failed(tostring(message)) end
  error(message, 0)
end

rawset(FSDP, "__call", function(self, ...)
  local unit = module.unit_of(self)
  if lib.ms_unit_get_state(unit.handle).started == 0 then start(unit) end
  if unit.summoned then raise "expected to be in states ['idle'] but current state is 'summon_full_params'" end
  local looks = unit.options.use_orig_params and not unit.switches.skip_writeback_check
  local is_root = lib.ms_unit_get_state(unit.handle).root == unit.handle
  if is_root then
    unit.below = unit.below or module.units_below(self)
    for _, below in ipairs(unit.below) do
      if below.classic then flat.follow(below) end
    end
    writeback.write_back_all(unit.below)
  elseif looks then
    writeback.write_back(unit)
  end
  if unit.switches.full_precision_in_eval then set_precision(unit) end
  if unit.hook_built_in then hooks.refresh(unit) end
  if unit.order then order.check(unit, self) end
  if looks and unit.placed.strategy ~= "no_shard" and autograd.is_grad_enabled() and is_root then
    return writeback.watch(unit.below, module.call_between(self, unit, Module.__call, ...))
  end
  return module.call_between(self, unit, Module.__call, ...)
end)
rawset(FSDP, "__runs_forward", FSDP.__call)

--- Calls fn on this module and its descendants, children first, with whole parameters; changes made by fn are kept.
--- Collective.
---@param fn fun(m: Module)  called with each module
---@return FSDP
function FSDP:apply(fn)
  local unit = module.unit_of(self)
  if lib.ms_unit_get_state(unit.handle).is_idle == 0 then
    raise("expected to be in states ['idle'] but current state is '%s'", unit.summoned and "summon_full_params"
      or "forward_backward")
  end
  summon.summon_full_params(self, { recurse = false }, Module.apply, self, fn)
  return self
end

rawset(FSDP, "__deepcopy", function()
  raise "FSDP does not support deepcopy. Please use state dict for serialization."
end)

-- ---- roots ---------------------------------------------------------------------------------------

--- Whether this is the outermost instance. The first instance on which this is called, or whose forward runs, becomes
--- the root.
---@return boolean
function FSDP:check_is_root()
  local unit = module.unit_of(self)
  if lib.ms_unit_get_state(unit.handle).started == 0 then module.lazy_init(unit) end
  return lib.ms_unit_get_state(unit.handle).root == unit.handle
end

--- As fsdp.state_dict, for this instance: by default whole tensors under their original names. Collective.
---@param given? { type: "full"|"sharded"|"local", offload_to_cpu: boolean, rank0_only: boolean }
---@return table<string, Tensor>
function FSDP:state_dict(given) return states.state_dict(self, given) end

--- As fsdp.load_state_dict, for this instance. Collective.
---@param sd table<string, Tensor>  a result of fsdp.state_dict, of any type
---@param given? { strict: boolean, broadcast_from_rank0: boolean, assign: boolean, count_from: 0|1 }
---   broadcast_from_rank0: only rank 0's state dict is read
---@return string[] missing
---@return string[] unexpected
function FSDP:load_state_dict(sd, given) return states.load_state_dict(self, sd, given) end

FSDP.set_post_optim_event = module.FSDPModule.set_post_optim_event

--- Gathers this instance's parameters, without those of nested instances, before its forward. Collective. With async,
--- returns a handle to wait on; the forward also waits.
---@param given? {async: boolean}
function FSDP:_unshard(given)
  local unit = module.unit_of(self)
  if unit.replaces and not unit.switches.skip_writeback_check then writeback.write_back(unit) end
  return module.FSDPModule.unshard(self, given)
end

-- The units of an instance and its descendants; raises if it is not the root.
local function units_of_root(self, message)
  if not self:check_is_root() then raise("%s", message) end
  return module.units_below(self)
end

--- Registers hook(state, grad, output), which reduces the gradients of this instance and of nested ones. grad is the
--- whole flat gradient, padded; the hook writes this rank's part of the result to output. Without output (no_shard), it
--- reduces grad in place.
---@param state any  given to hook
---@param hook fun(state: any, grad: Tensor, output: Tensor?)  writes the result to output, or into grad
function FSDP:register_comm_hook(state, hook)
  local units = units_of_root(self, "register_comm_hook can only be called on a root instance.")
  for _, unit in ipairs(units) do
    if unit.classic then
      if groups.HYBRID[unit.placed.strategy] then
        raise("Communication hook is not supported for hybrid strategies: %s", unit.placed.strategy)
      end
      if unit.comm_hook ~= nil then raise "A communication hook is already registered" end
    end
  end
  if not opts.fn.test(hook) then raise("The communication hook must be callable but got %s", errors.show(hook)) end
  for _, unit in ipairs(units) do
    if unit.classic then hooks.set(unit, hook, state) end
  end
end

local function set_sync(unit, on)
  unit.sync = on
  errors.check(lib.ms_unit_set(unit.handle, C.MS_UNIT_SYNC, on and 1 or 0))
  -- Parameters that stay gathered after forward remain so until a backward that reduces.
  if not groups.RESHARDS[unit.placed.strategy] then
    errors.check(lib.ms_unit_set(unit.handle, C.MS_UNIT_RESHARD_AFTER_BACKWARD, on and 1 or 0))
  end
end

local function restore_sync(units, before, ...)
  for k, unit in ipairs(units) do set_sync(unit, before[k]) end
  return context.results(...)
end

--- Runs fn. Backwards during the call accumulate whole, unreduced gradients in the parameters' grad; the next backward
--- outside reduces them together with its own. An optimizer must not use them before that, unless the strategy is
--- no_shard.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function FSDP:no_sync(fn, ...)
  opts.expect(fn, opts.fn, "no_sync: argument")
  local units = units_of_root(self,
    "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module.")
  local classic, before = {}, {}
  for _, unit in ipairs(units) do
    if unit.classic then
      classic[#classic + 1], before[#before + 1] = unit, unit.sync
      set_sync(unit, false)
    end
  end
  return restore_sync(classic, before, pcall(context.block, "no_sync", fn, ...))
end

local HALF = { float16 = true, bfloat16 = true }

-- The dtype to which gradients of these dtypes are promoted.
local function promoted(dtypes_seen)
  local names = {}
  for name in pairs(dtypes_seen) do names[#names + 1] = name end
  if #names == 0 then return nil end
  if dtypes_seen.float64 then return "float64" end
  if #names == 1 and HALF[names[1]] then return names[1] end
  return "float32"
end

--- Multiplies all gradients by one factor so that their total norm over all ranks is at most max_norm.
---@param max_norm number  at least 0
---@param given? { norm_type: number, error_if_nonfinite: boolean }  as of nn.utils.clip_grad_norm_
---@return Tensor norm  the norm before scaling
function FSDP:clip_grad_norm_(max_norm, given)
  units_of_root(self, "`clip_grad_norm_()` should only be called on the root FSDP instance")
  local params, seen = self:parameters(), {}
  for _, p in ipairs(params) do
    local g = p.grad
    if g then seen[g.dtype] = true end
  end
  local norm = utils._clip_grad_norm(params, max_norm, given)
  local dtype = promoted(seen)
  if not dtype then
    log.warn_once(("Called FSDP.clip_grad_norm_() on rank %d with no gradients -- returning the total norm in the default dtype float32")
      :format((require "moonshard.dist").rank()))
    dtype = "float32"
  end
  return norm.dtype == dtype and norm or norm:to(dtype)
end

FSDP.init = calls.several(FSDP.init)
FSDP.clip_grad_norm_ = utils._checking_clip(calls.one(FSDP.clip_grad_norm_, function(self)
  return M.is_fsdp(self) and utils._first_group(self:parameters()) or 1
end))

--- The FSDP instances among m and its descendants, parents before children; with root_only, only instances that no
--- other instance contains.
---@param m Module  the module to search, with its descendants
---@param given? { root_only: boolean }  root_only: only instances that no other one contains
---@return FSDP[]
function M.fsdp_modules(m, given)
  opts.expect(m, a_module, "fsdp_modules: argument 1")
  local o = opts("fsdp_modules", given, { root_only = false })
  local list, below = {}, {}
  for _, sub in ipairs(m:modules()) do
    if M.is_fsdp(sub) and not (o.root_only and below[sub]) then
      list[#list + 1] = sub
      if o.root_only then
        for _, inner in ipairs(sub:modules()) do below[inner] = true end
      end
    end
  end
  return list
end

return M
