-- SPDX-License-Identifier: MIT
--- FSDPModule: the methods that fully_shard adds to a module. The class of a sharded module is generated from the
--- module's class ("FSDPLinear" extends Linear) and calls forward between the unit's hooks.
local advice = require "moonshard.core.advice"
local alike = require "moonshard.parallel.fsdp.alike"
local arguments = require "moonshard.parallel.fsdp.arguments"
local assign = require "moonshard.parallel.fsdp.assign"
local autograd = require "moonshard.autograd"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local calls = require "moonshard.dist.calls"
local class = require "moonshard.core.class"
local comm_hooks = require "moonshard.parallel.fsdp.comm_hooks"
local context = require "moonshard.core.context"
local extensions = require "moonshard.parallel.fsdp.extensions"
local Module = require "moonshard.nn.module".Module
local opts = require "moonshard.core.opts"
local replaced = require "moonshard.parallel.fsdp.replaced"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local lib, ffi = engine.lib, engine.ffi
local C = ffi.C
local handlers = autograd.handlers
local is_tensor, wrap = tensor.is_tensor, tensor.wrap
local rawget, rawset, setmetatable, type, next = rawget, rawset, setmetatable, type, next
local pcall, error, select, unpack, ipairs = pcall, error, select, unpack, ipairs

local M = {}

--- One unit: `modules` (usually one), its engine handle, and settings that are kept until the engine knows the root.
---@class FSDPUnit
---@field handle number  the engine's handle
---@field modules table[]  the modules passed to fully_shard, or the fsdp.FSDP instance
---@field last boolean?   value of set_is_last_backward before lazy initialization

--- The unit of a module, or nil.
local function unit_of(m) return rawget(m, "_fsdp") end
M.unit_of = unit_of

-- ---- lazy initialisation -------------------------------------------------------------------------

--- The units of m and its descendants in module order, each once.
local function units_below(m)
  local list, seen = {}, {}
  for _, sub in ipairs(m:modules()) do
    local u = unit_of(sub)
    if u and not seen[u] then
      seen[u] = true
      list[#list + 1] = u
    end
  end
  return list
end
M.units_below = units_below

-- Sets names relative to the root: of parameters, and of units (for records, reports and errors).
local function name_all(root)
  local names = {}
  for name, m in root:named_modules() do
    local u = unit_of(m)
    if u then
      names[u] = names[u] or {}
      table.insert(names[u], name)
    end
  end
  for _, u in ipairs(units_below(root)) do
    u.path = table.concat(names[u], ", ")
    if lib.ms_unit_set_name(u.handle, u.path) ~= 0 then errors.fail() end
  end
  local listed, values = root:_state()
  -- If a tensor has several names, the first one is kept.
  for k = #listed, 1, -1 do tensor.set_name(values[k], listed[k]) end
end

local function lazy_init(unit)
  if #unit.modules > 1 then
    local shown = {}
    for k, m in ipairs(unit.modules) do shown[k] = tostring(m) end
    errors.raise("FSDP requires a single root module but got (%s)", table.concat(shown, ", "))
  end
  local list = units_below(unit.modules[1])
  local handles, fresh = ffi.new("double[?]", #list), true
  for k, u in ipairs(list) do
    handles[k - 1] = u.handle
    fresh = fresh and lib.ms_unit_get_state(u.handle).started == 0
  end
  if not fresh then
    for name, m in unit.modules[1]:named_modules() do
      local u = unit_of(m)
      -- Refuse initialised units, which cannot get another root, except an fsdp.FSDP instance below its own root: a
      -- script may wrap a module around that instance again.
      local state = u and lib.ms_unit_get_state(u.handle)
      if u and state.started ~= 0 and not (u.classic and state.root ~= u.handle) then
        errors.raise("FSDP state has already been lazily initialized for %s\nFSDP requires running forward through the root module first", name)
      end
    end
  end
  for _, u in ipairs(list) do
    if not u.classic then replaced.take_in(u) end
  end
  name_all(unit.modules[1])
  alike.check_replicas(list)
  if lib.ms_unit_lazy_init(unit.handle, #list, handles) ~= 0 then errors.fail() end
  for _, u in ipairs(list) do
    extensions.look(u)
    if u.last ~= nil then
      lib.ms_unit_set(u.handle, C.MS_UNIT_IS_LAST_BACKWARD, u.last and 1 or 0)
      u.last = nil
    end
    if u.on_lazy_init then u.on_lazy_init(u, unit) end
  end
end
M.lazy_init = lazy_init

-- ---- calls ---------------------------------------------------------------------------------------

local function pack(...) return { n = select("#", ...), ... } end

-- depth: number of nested calls of sharded modules. incomplete: units with several modules that have not all run in the
-- current pass.
local depth, incomplete = 0, {}

-- Called before the forward of one module of a unit with several. Returns true if the forward belongs to a pass; false
-- if it recomputes a checkpointed region.
local function begin(unit)
  local began = lib.ms_unit_begin_pass(unit.handle)
  if began == 1 then
    local waiting = {}
    for _, other in ipairs(unit.modules) do waiting[other] = true end
    unit.waiting = waiting
    incomplete[unit] = true
  end
  return began >= 0
end

-- Called after the forward of one module of a unit with several. The last module of the unit ends the pass.
local function ran(unit, m)
  local waiting = unit.waiting
  if not waiting then return end
  waiting[m] = nil
  if next(waiting) then return end
  unit.waiting, incomplete[unit] = nil, nil
  if lib.ms_unit_end_pass(unit.handle, 0) ~= 0 then errors.fail() end
end

local one = ffi.new "ms_id[1]"

local function pre_forward(unit, n, ids)
  if lib.ms_unit_pre_forward(unit.handle, n, ids) ~= 0 then errors.fail() end
  unit.inside = (unit.inside or 0) + 1
end

local function post_forward(unit, n, ids)
  unit.inside = unit.inside - 1
  if lib.ms_unit_post_forward(unit.handle, n, ids) ~= 0 then errors.fail() end
end

-- t, or the tensor by which the engine replaced t.
local function taken(t) return one[0] == t.id and t or wrap(one[0]) end

local function after(self, unit, part, ...)
  local out = ...
  if select("#", ...) == 1 and is_tensor(out) and out.id >= 0 then
    one[0] = out.id
    post_forward(unit, 1, one)
    out = taken(out)
    if part then ran(unit, self) end
    return out
  end
  out = pack(...)
  post_forward(unit, arguments.flatten(out))
  arguments.rebuild(out)
  if part then ran(unit, self) end
  return unpack(out, 1, out.n)
end

-- Runs forward between the unit's two hooks. The common case, one tensor in and one out, allocates no tables.
local function between(self, unit, forward, ...)
  if lib.ms_unit_get_state(unit.handle).started == 0 then lazy_init(unit) end
  if unit.replaces == nil then replaced.check(unit) end
  if depth == 1 and lib.ms_dist_size(0) > 1 and autograd.is_grad_enabled() then replaced.look(self, unit) end
  local part = #unit.modules > 1 and begin(unit)
  local extended = extensions.any
  if not unit.looked then extensions.look(unit) end
  if unit.extensions then extensions.gather(unit) end
  local x = ...
  if select("#", ...) == 1 and is_tensor(x) and x.id >= 0 then
    one[0] = x.id
    pre_forward(unit, 1, one)
    x = taken(x)
    if extended then extensions.prefetch(unit) end
    return after(self, unit, part, forward(self, x))
  end
  local args = pack(...)
  pre_forward(unit, arguments.flatten(args))
  arguments.rebuild(args)
  if extended then extensions.prefetch(unit) end
  return after(self, unit, part, forward(self, unpack(args, 1, args.n)))
end

-- At the end of the outermost call, ends the passes of units whose modules have not all run. Does not communicate.
-- Returns the text of an error, if there was one.
local function end_passes(failed)
  local message
  for unit in pairs(incomplete) do
    local names = {}
    for _, m in ipairs(unit.modules) do
      if unit.waiting[m] then names[#names + 1] = m:class_name() end
    end
    if not failed and not unit.warned and autograd.is_grad_enabled() then
      unit.warned = true
      log.warn(("%d of the %d modules passed to fully_shard did not run forward before backward, which is error-prone since FSDP "
        .. "post-forward/pre-backward logic will not run for these modules. We recommend passing only modules that run forward together. "
        .. "Modules that did not run forward: [%s]"):format(#names, #unit.modules, table.concat(names, ", ")))
    end
    unit.waiting = nil
    if lib.ms_unit_end_pass(unit.handle, failed and 1 or 0) ~= 0 then message = message or errors.last() end
  end
  incomplete = {}
  return message
end

local function finish(unit, before, s, ok, ...)
  depth = depth - 1
  if not ok then
    -- Undo this call's entry, but keep the text of the error.
    if (unit.inside or 0) > before then
      unit.inside = before
      lib.ms_unit_forward_failed(unit.handle)
    end
    if depth == 0 and next(incomplete) then end_passes(true) end
    scope.abandon(s)
    -- Peers must learn of the error: they wait for this rank in gathers that it will not join. Inside a run, the end of
    -- the run tells them.
    if depth == 0 and engine.state.run_depth == 0 then lib.ms_dist_failed(tostring((...))) end
    error((...), 0)
  end
  local message = depth == 0 and next(incomplete) and end_passes(false)
  if message then
    scope.abandon(s)
    error(message, 0)
  end
  scope.close(s, ...)
  return ...
end

local function call_between(self, unit, forward, ...)
  depth = depth + 1
  return finish(unit, unit.inside or 0, scope.open(rawget(self, "_scope")),
    pcall(context.block, "the forward of a sharded module", between, self, unit, forward, ...))
end
M.call_between = call_between

-- ---- the class -----------------------------------------------------------------------------------

--- The class of modules that fully_shard was called on: `m:isa(fsdp.FSDPModule)` is true for them. Its methods control
--- gathering and reducing.
---@class FSDPModule
local FSDPModule = class.new "FSDPModule"
M.FSDPModule = FSDPModule

local generated = setmetatable({}, { __mode = "k" })

--- The class of sharded modules of class cls: "FSDP<name>", which extends both cls and FSDPModule.
function M.class_for(cls)
  local fsdp_class = generated[cls]
  if fsdp_class then return fsdp_class end
  local base_call = cls.__call
  fsdp_class = class.new("FSDP" .. rawget(cls, "__name"), cls)
  fsdp_class.__isa[FSDPModule] = true
  rawset(fsdp_class, "_advice", advice.fully_shard)
  for name, method in pairs(FSDPModule) do
    if type(method) == "function" and name:sub(1, 2) ~= "__" then rawset(fsdp_class, name, method) end
  end
  rawset(fsdp_class, "__call", function(self, ...)
    return call_between(self, unit_of(self), base_call, ...)
  end)
  rawset(fsdp_class, "__deepcopy", function()
    errors.raise "FSDP does not support deepcopy. Please use state dict for serialization."
  end)
  generated[cls] = fsdp_class
  return fsdp_class
end

---@return boolean
function M.is_fsdp_module(x) return class.isa(x, FSDPModule) end

-- ---- methods -------------------------------------------------------------------------------------

--- What `unshard { async = true }` returns.
---@class UnshardHandle
local Handle = class.new "UnshardHandle"
M.UnshardHandle = Handle

--- Waits until the parameters are gathered.
function Handle:wait()
  if self.unit then
    if self.unit.extensions then extensions.gather(self.unit)
    elseif lib.ms_unit_wait(self.unit.handle) ~= 0 then errors.fail() end
    self.unit = nil
  end
end

--- Gathers this module's parameters, without those of its descendants. Collective. With async, returns a handle to wait
--- on.
---@param given? {async: boolean}
function FSDPModule:unshard(given)
  local o = opts("unshard", given, { async = false })
  local unit = unit_of(self)
  if not unit.looked then extensions.look(unit) end
  if unit.extensions then extensions.gather(unit, o.async)
  elseif lib.ms_unit_unshard(unit.handle, o.async and 1 or 0) ~= 0 then errors.fail() end
  if o.async then return setmetatable({ unit = unit }, Handle) end
end

FSDPModule.unshard = calls.several(FSDPModule.unshard)

--- Reshards: vacates the gathered parameters.
function FSDPModule:reshard()
  if lib.ms_unit_reshard(unit_of(self).handle) ~= 0 then errors.fail() end
end

-- Vacates gathered parameters, because state dicts are saved from shards and loaded into shards.
local function reshard_all(m)
  for _, u in ipairs(units_below(m)) do
    if lib.ms_unit_reshard(u.handle) ~= 0 then errors.fail() end
  end
end
M.reshard_all = reshard_all

--- Returns sharded tensors by name, which share storage with the parameters; fsdp.state_dict supports other types.
---@param ... any  options are an error
---@return table<string, Tensor>
function FSDPModule:state_dict(...)
  reshard_all(self)
  return Module.state_dict(self, ...)
end

-- Refuses to load into parameters on meta, where values would be lost without an error. given: a state dict; the
-- parameters that it lacks may stay on meta (nil: no parameter may).
local function refuse_meta(m, given)
  for name, p in m:named_parameters() do
    if (rawget(p, "_unit") or rawget(p, "_flat")) and p.device:find "^meta" and not (given and given[name] == nil) then
      errors.raise("load_state_dict: parameter '%s' is on meta and has no memory to load into; call to_empty(device) first", name)
    end
  end
end
M.refuse_meta = refuse_meta

--- Loads a state dict by copying, also with `assign`: the parameters of a unit stay parts of one block of memory. For a
--- unit on meta, `assign` allocates that block.
---@param sd table<string, Tensor>  tensors sharded like the model's own; fsdp.load_state_dict takes any type
---@param given? {strict: boolean, assign: boolean, count_from: 0|1}
function FSDPModule:load_state_dict(sd, given)
  local o = opts("load_state_dict", given, { strict = true, assign = false, count_from = 1 })
  reshard_all(self)
  Module._expect_state(sd, "load_state_dict: argument 1")
  sd = self:_before_loading(sd, Module._count_from(o.count_from))
  if o.assign then assign.make_room(self, assign.devices(sd), o.strict) end
  refuse_meta(self, o.assign and not o.strict and sd or nil)
  return self:_load(sd, { strict = o.strict, assign = false, count_from = o.count_from })
end

local function boolean(who, x)
  opts.expect(x, opts.boolean, "%s: argument", who)
  return x
end

local function set_all(self, who, what, value, given)
  local o = opts(who, given, { recurse = true })
  local units = o.recurse and units_below(self) or { unit_of(self) }
  for _, u in ipairs(units) do
    if lib.ms_unit_set(u.handle, what, value and 1 or 0) ~= 0 then errors.fail() end
  end
end

--- Sets whether backward reduces gradients (and all-reduces them over replicas). While it does not, gradients
--- accumulate in the unit and `grad` does not change, so zero_grad and optimizers do not see them. The next backward
--- that reduces puts their sum into `grad`.
---@param on boolean  initially true
---@param given? {recurse: boolean}  recurse: applies to the units of descendants, too (default: true)
function FSDPModule:set_requires_gradient_sync(on, given)
  set_all(self, "set_requires_gradient_sync", C.MS_UNIT_SYNC, boolean("set_requires_gradient_sync", on), given)
  set_all(self, "set_requires_gradient_sync", C.MS_UNIT_ALL_REDUCE, on, given)
end

--- For a 2-d mesh: sets whether backward also all-reduces reduced gradients over the replicas. While it does not, they
--- accumulate in the unit, reduced over its shard group, and `grad` does not change. With a 1-d mesh there is no
--- all-reduce.
---@param on boolean  initially true
---@param given? {recurse: boolean}  recurse: applies to the units of descendants, too (default: true)
function FSDPModule:set_requires_all_reduce(on, given)
  set_all(self, "set_requires_all_reduce", C.MS_UNIT_ALL_REDUCE, boolean("set_requires_all_reduce", on), given)
end

handlers[C.MS_EV_ALL_REDUCE] = function(entry, event)
  local unit = entry and entry.unit
  if unit and unit.all_reduce_hook then unit.all_reduce_hook(setmetatable({ id = event["in"][0] }, tensor.Tensor)) end
  return nil, 0
end

--- Registers fn(t), called with this module's reduced gradients: t is one 1-d tensor of this rank's parts, after the
--- reduce-scatter and the all-reduce over replicas, if any. fn changes t in place, equally on every rank. nil removes
--- the hook.
---@param fn fun(t: Tensor)?  changes t in place
function FSDPModule:set_all_reduce_hook(fn)
  if fn ~= nil then opts.expect(fn, opts.fn, "set_all_reduce_hook: hook") end
  local unit = unit_of(self)
  unit.all_reduce_key = unit.all_reduce_key or autograd.new_key(setmetatable({ unit = unit }, { __mode = "v" }))
  unit.all_reduce_hook = fn
  errors.check(lib.ms_unit_set(unit.handle, C.MS_UNIT_ALL_REDUCE_HOOK, fn and unit.all_reduce_key or 0))
end

--- Replaces the reduce-scatter of this module's gradients: fn(output, input, { op, group }) fills output, this rank's
--- block, with the reduction of every rank's input, as dist.reduce_scatter does. It is called in backward, on every rank.
--- nil restores the reduce-scatter.
---@param fn fun(output: Tensor, input: Tensor, how: { op: "avg"|"sum", group: Group })?
---   output: 1-d, to be filled; input: 1-d, a block for each rank of the group; op: "sum" if
---   set_gradient_divide_factor was called: the result is divided afterwards
function FSDPModule:set_custom_reduce_scatter(fn)
  local unit = unit_of(self)
  if fn == nil then return comm_hooks.set(unit, nil, nil) end
  opts.expect(fn, opts.fn, "set_custom_reduce_scatter: argument")
  comm_hooks.set(unit, function(_, input, output)
    fn(output, input, { op = unit.divides and "sum" or "avg", group = unit.group })
  end, nil)
end

--- Sets whether parameters are resharded after forward and gathered again for backward (true saves memory, false saves
--- an all-gather).
---@param on boolean  replaces fully_shard's option
---@param given? { recurse: boolean }  recurse: applies to the units of descendants, too (default: true)
function FSDPModule:set_reshard_after_forward(on, given)
  if type(on) ~= "boolean" then errors.raise("reshard_after_forward should be a bool, got %s", type(on)) end
  set_all(self, "set_reshard_after_forward", C.MS_UNIT_RESHARD_AFTER_FORWARD, on, given)
end

--- Sets whether parameters are resharded after backward. While false, the next forward gathers nothing and computes
--- with the old values even after an optimizer's step, until a reshard.
---@param on boolean  initially true
---@param given? { recurse: boolean }  recurse: applies to the units of descendants, too (default: true)
function FSDPModule:set_reshard_after_backward(on, given)
  set_all(self, "set_reshard_after_backward", C.MS_UNIT_RESHARD_AFTER_BACKWARD,
    boolean("set_reshard_after_backward", on), given)
end

--- With false, the next backward is not the last of the step: its end does not wait for the reductions, and keeps the
--- order in which the units' forwards ran for the backward that follows.
---@param on boolean  initially true
function FSDPModule:set_is_last_backward(on)
  local unit = unit_of(self)
  local last = boolean("set_is_last_backward", on)
  if lib.ms_unit_get_state(unit.handle).started == 0 then
    unit.last = last
  else
    errors.check(lib.ms_unit_set(unit.handle, C.MS_UNIT_IS_LAST_BACKWARD, last and 1 or 0))
  end
end

--- Divides gradients by x instead of the number of ranks.
---@param x number  above 0
function FSDPModule:set_gradient_divide_factor(x)
  opts.expect(x, opts.number, "set_gradient_divide_factor: argument")
  unit_of(self).divides = true
  if lib.ms_unit_set(unit_of(self).handle, C.MS_UNIT_DIVIDE_FACTOR, x) ~= 0 then errors.fail() end
end

--- Deprecated name of set_gradient_divide_factor.
---@param x number  above 0
function FSDPModule:set_reduce_scatter_divide_factor(x)
  log.warn_once "set_reduce_scatter_divide_factor is deprecated; use set_gradient_divide_factor"
  return self:set_gradient_divide_factor(x)
end

--- Has no effect: gradients are always summed, and then divided once.
---@param on boolean  ignored
function FSDPModule.set_force_sum_reduction_for_comms(_, on)
  boolean("set_force_sum_reduction_for_comms", on)
end

--- Has no effect: collectives need no memory of a special kind.
---@param on boolean  ignored
function FSDPModule.set_allocate_memory_from_process_group_for_comm(_, on)
  boolean("set_allocate_memory_from_process_group_for_comm", on)
end

--- Has no effect: ranks of a node read each other's memory without a special allocator.
---@param backend? string  ignored
function FSDPModule.set_symm_mem_for_comm(_, backend)
  opts.need(backend == nil or type(backend) == "string", backend, "a string or nil", "set_symm_mem_for_comm: argument")
end

--- Has no effect: gathers and reductions always run in separate queues.
---@param on boolean  ignored
function FSDPModule.set_separate_reduce_scatter_group(_, on) boolean("set_separate_reduce_scatter_group", on) end

--- With false, backward uses the parameters without gathering them.
---@param on boolean  initially true
function FSDPModule:set_unshard_in_backward(on)
  errors.check(lib.ms_unit_set(unit_of(self).handle, C.MS_UNIT_UNSHARD_IN_BACKWARD, boolean("set_unshard_in_backward",
    on) and 1 or 0))
end

local function set_prefetch(self, who, backward, list)
  opts.need(opts.is_plain(list), list, "a list of modules", "%s: argument", who)
  local handles = ffi.new("double[?]", math.max(#list, 1))
  for k, m in ipairs(list) do
    if not M.is_fsdp_module(m) then errors.raise("Expects FSDPModule but got %s: %s", errors.show(m), tostring(m)) end
    handles[k - 1] = unit_of(m).handle
  end
  if lib.ms_unit_set_prefetch(unit_of(self).handle, backward, #list, handles) ~= 0 then errors.fail() end
end

--- To be called after the optimizer's step, on every rank. States that parameters do not change before the next
--- forward, so the first gather of that forward starts at once. Applies to one forward.
---@param event? nil  to be left out: PyTorch takes an event here; the call itself marks the end of the step
function FSDPModule:set_post_optim_event(event)
  opts.need(event == nil, event, "no argument; the call itself marks the end of the optimizer's step",
    "set_post_optim_event: argument")
  if lib.ms_unit_gather_first(unit_of(self).handle) ~= 0 then errors.fail() end
end

--- Sets the modules whose gathers start with this module's forward; by default the engine chooses.
---@param list table[]  sharded modules
function FSDPModule:set_modules_to_forward_prefetch(list)
  set_prefetch(self, "set_modules_to_forward_prefetch", 0, list)
end

--- Sets the modules whose gathers start with this module's backward.
---@param list table[]  sharded modules
function FSDPModule:set_modules_to_backward_prefetch(list)
  set_prefetch(self, "set_modules_to_backward_prefetch", 1, list)
end

--- Accepted for scripts of PyTorch with several roots, as in pipelines: all units of a process share the engine's
--- queues already.
---@param modules table[]  sharded modules
function M.share_comm_ctx(modules)
  opts.need(opts.is_plain(modules), modules, "a list of sharded modules", "share_comm_ctx: argument 1")
  for k, m in ipairs(modules) do
    opts.need(M.is_fsdp_module(m), m, "a module to which fully_shard was applied", "share_comm_ctx: entry %d", k)
  end
end

--- Makes another method gather before it runs and reshard afterwards, as forward does.
---@param m table  a module to which fully_shard was applied
---@param name string  name of the method
function M.register_fsdp_forward_method(m, name)
  if not class.isa(m, Module) then opts.wrong(m, "a module", "register_fsdp_forward_method: argument 1") end
  if not M.is_fsdp_module(m) then return end
  local method = m[name]
  if type(method) ~= "function" then errors.raise("%s does not have a method %s", m:class_name(), tostring(name)) end
  m[name] = function(self, ...) return call_between(self, unit_of(self), method, ...) end
end

return M
