-- SPDX-License-Identifier: MIT
--- nn.DDP: every rank holds the whole model; gradients are averaged over ranks while backward runs
--- (docs/semantics.md#ddp).
---
--- When a parameter's gradient has arrived, it is copied into the flat buffer of its bucket. A bucket is reduced on the
--- communication queue when it and all earlier buckets are complete, so every rank issues the same collectives in the
--- same order. At the end of the outermost backward the results are copied back. Whether a backward does so depends on
--- the forward that recorded its graph (reducer.lua).
---
--- Unused parameters are found at the end of backward instead of by a search of the graph, so outputs that the loss
--- does not use and checkpointed regions need no special case.
local advice = require "moonshard.core.advice"
local autograd = require "moonshard.autograd"
local pieces = require "moonshard.dist.pieces"
local calls = require "moonshard.dist.calls"
local capture = require "moonshard.autograd.capture"
local checks = require "moonshard.parallel.ddp.checks"
local context = require "moonshard.core.context"
local create = require "moonshard.tensor.create"
local delays = require "moonshard.parallel.ddp.delayed"
local dist = require "moonshard.dist"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local join = require "moonshard.parallel.ddp.join"
local listing = require "moonshard.core.listing"
local low_precision = require "moonshard.parallel.ddp.precision"
local opts = require "moonshard.core.opts"
local parameters = require "moonshard.parallel.ddp.params"
local reducer = require "moonshard.parallel.ddp.reducer"
local wrapping = require "moonshard.nn.module.wrapping"
local base = require "moonshard.nn.module"
local a_module = base.a_module

local set_buckets, make_buckets, forget = reducer.set_buckets, reducer.make_buckets, reducer.forget
local finish, tell, take_over, hook_outputs = reducer.finish, reducer.tell, reducer.take_over, reducer.hook_outputs
local start_used_map, used_anywhere, GRAPH_CHANGED = reducer.start_used_map, reducer.used_anywhere,
  reducer.GRAPH_CHANGED
local raise, no_grad = errors.raise, autograd.no_grad
local rawget, rawset, type, ipairs, pcall, error = rawget, rawset, type, ipairs, pcall, error

--- Wraps a module that every rank holds whole: all ranks start with rank 0's parameters and buffers, and backward
--- computes the mean of all ranks' gradients (docs/semantics.md#ddp). Fields that DDP lacks are read from the module.
--- Errors: parameters or buffers that differ between ranks in name, order, shape, dtype or in what is frozen; in a
--- later forward, trained parameters that were added or replaced after the module was wrapped.
---@class DDP: Module
---@field module Module  the wrapped module
---@overload fun(m: Module, opts?: { process_group: Group, bucket_cap_mb: number, find_unused_parameters: boolean, gradient_as_bucket_view: boolean, broadcast_buffers: boolean, static_graph: boolean, device_ids: integer[], device_mesh: DeviceMesh, init_sync: boolean, skip_all_reduce_unused_params: boolean, mixed_precision: MixedPrecision, delay_all_reduce_named_params: (string|table)[], param_to_hook_all_reduce: Parameter }): DDP
---   m: equal on all ranks; bucket_cap_mb: size of a bucket of gradients in MiB; find_unused_parameters: some
---   parameters may receive no gradient; gradient_as_bucket_view: gradients are views of the buckets;
---   broadcast_buffers: a forward begins with rank 0's buffers; static_graph: every iteration uses the same
---   parameters, each the same number of times; device_ids: at most one element; ignored; device_mesh: a mesh of one
---   dimension, given instead of process_group; init_sync: false: the script guarantees equal models on all ranks;
---   skip_all_reduce_unused_params: with find_unused_parameters: a bucket is not reduced if no rank used any of its
---   parameters; mixed_precision: forward and backward run on copies of the parameters in param_dtype;
---   delay_all_reduce_named_params: names, or pairs of name and parameter, whose gradients are reduced together;
---   param_to_hook_all_reduce: its gradient's arrival starts that reduction
local DDP = base.Module:extend("DDP")
wrapping.read_through(DDP)

-- ---- construction --------------------------------------------------------------------------------

local OPTIONS = {
  process_group = dist._a_group, bucket_cap_mb = opts.option(opts.positive, 25), find_unused_parameters = false,
  gradient_as_bucket_view = false, broadcast_buffers = true,
  static_graph = false, device_ids = opts.table, device_mesh = opts.any, init_sync = true,
  skip_all_reduce_unused_params = false,
  mixed_precision = opts.any, delay_all_reduce_named_params = opts.table, param_to_hook_all_reduce = opts.any,
}

local function buffers_of(m, st) return (parameters.buffers(m, st.ignored)) end

-- Takes the trained ones of these parameters for reduction, and begins anew. After the first iteration, buckets are
-- rebuilt in the order in which gradients arrived, so one bucket for each dtype and device suffices until then. With
-- find_unused_parameters buckets are not rebuilt.
local function arrange(st, found)
  local params, names, number, late, order = {}, {}, {}, {}, {}
  for k, p in ipairs(found.all) do
    if p.requires_grad and not (st.delayed and st.delayed.has[p]) then
      local at = #params + 1
      params[at], names[at], number[p] = p, found.names[k], at
      if found.late[p] then late[#late + 1] = at end
    end
  end
  st.params, st.names, st.number, st.ignored = params, names, number, found.ignored
  st.late, st.is_late = late, found.late
  st.static = st.options.static_graph and #params > 0
  st.find_unused = st.options.find_unused_parameters and not st.static and #params > 0
  st.skip_unused = st.options.skip_all_reduce_unused_params and st.find_unused
  st.synced_backwards, st.rebuilt, st.counts, st.arrival, st.expected, st.static_used = 0, false, {}, {}, nil, nil
  for k = #params, 1, -1 do order[#order + 1] = params[k] end
  set_buckets(st, order, st.find_unused and st.limits or { math.huge })
  if st.delayed then st.delayed:prepare(st.reduce_dtype) end
end

--- Units reduce sharded parameters of the module (fsdp.fully_shard, fsdp.FSDP); DDP handles the others.
function DDP:init(m, given)
  opts.expect(m, a_module, "DDP: argument 1")
  local o = opts("DDP", given, OPTIONS)
  if o.device_ids and #o.device_ids > 1 then raise("device_ids can only be nil or contain a single element.") end
  local group = o.process_group
  if o.device_mesh ~= nil then
    if group ~= nil then raise "Cannot specify both process_group and device_mesh arguments." end
    local is_mesh = type(o.device_mesh) == "table" and type(o.device_mesh.get_group) == "function"
    if not is_mesh then opts.wrong(o.device_mesh, "a device mesh", "DDP: option 'device_mesh'") end
    if o.device_mesh.ndim ~= 1 then raise("Only 1D device mesh is supported, but got %s.", tostring(o.device_mesh)) end
    group = o.device_mesh:get_group(1)
  end
  local world = dist.world_size(group)
  if not dist.rank(group) then raise("DDP: this rank is not a member of %s", tostring(group)) end

  local policy, found = low_precision.check(o.mixed_precision), parameters.find(m)
  local delayed = delays.resolve(m, o.delay_all_reduce_named_params, o.param_to_hook_all_reduce, found.late)
  checks.devices(found.all)
  local st = {
    group = group, world = world, options = o, delayed = delayed, known = {}, has_hook = {}, hooked = {},
    limits = { math.min(pieces.MIB, o.bucket_cap_mb * pieces.MIB), o.bucket_cap_mb * pieces.MIB },
    as_view = o.gradient_as_bucket_view, broadcast_buffers = o.broadcast_buffers, ignored = found.ignored,
    sync = true, armed = false, started = false, used = {}, marked = {}, has_local = false,
  }
  if o.init_sync then parameters.check_same(st, m, found) end
  local trained
  for _, p in ipairs(found.all) do
    st.known[p], trained = true, trained or p.requires_grad
  end
  if not trained then
    if found.sharded then
      raise("DDP: parameter '%s' is already sharded, and there is no other parameter for DDP to reduce", found.sharded)
    end
    raise("DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.")
  end
  self.module = m
  rawget(self, "_slots").training = m.training
  st.weak = setmetatable({ st }, { __mode = "v" })
  rawset(self, "_ddp", st)
  if policy then
    st.low = low_precision.new(m, policy, found.others)
    st.reduce_dtype = function(p) return st.low:reduce_dtype(p) end
    if policy.buffer_dtype then low_precision.cast_buffers(buffers_of(m, st), policy.buffer_dtype) end
  end
  if o.init_sync then
    no_grad(function()
      local all = listing.copy(found.all)
      for _, b in ipairs(buffers_of(m, st)) do all[#all + 1] = b end
      pieces.broadcast(all, group)
    end)
  end
  arrange(st, found)
  parameters.note(st, m)
  reducer.hook_parameters(st, found.all)
  local replicas = world > 1 and (group or dist.default_group()) or nil
  for k, p in ipairs(found.all) do
    rawset(p, "_replicas", replicas)
    errors.check(engine.lib.ms_set_name(p.id, found.names[k]), p)
  end
end

DDP.init = calls.several(DDP.init)

-- ---- forward -------------------------------------------------------------------------------------

local function check_prior(st)
  if not st.waiting then return end
  local indices, names = {}, {}
  for k, p in ipairs(st.params) do
    if not st.marked[p] then indices[#indices + 1], names[#names + 1] = k, st.names[k] end
  end
  local rank = dist.rank(st.group)
  if st.delayed and #indices == 0 then
    raise("Expected to have finished reduction in the prior iteration before starting a new one. On rank %d no gradient arrived at "
      .. "param_to_hook_all_reduce ('%s'), so those of delay_all_reduce_named_params were not reduced.", rank,
      st.delayed.hook_name)
  end
  if st.static then
    raise(GRAPH_CHANGED .. " Parameter indices which did not receive grad for rank %d: %s", "used", "unused", rank,
      table.concat(indices, " "))
  end
  raise("Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has "
    .. "parameters that were not used in producing loss. You can enable unused parameter detection by passing the option "
    .. "`find_unused_parameters = true` to `nn.DDP`, and by making sure all `forward` function outputs participate in calculating loss. "
    .. "Parameters which did not receive grad for rank %d: %s. Parameter indices which did not receive grad for rank %d: %s", rank,
    table.concat(names, ", "), rank, table.concat(indices, " "))
end

local function rebuild_due(st)
  return not st.rebuilt and not st.find_unused and st.synced_backwards > 0 and #st.params > 0
end

-- Rebuilds the buckets once, before the second iteration, in the order in which gradients arrived on rank `source`
-- (default: the group's first).
local function rebuild(st, source)
  if not rebuild_due(st) then return end
  capture.refuse "DDP orders its buckets in its second iteration; capture the step with warmup = 2"
  st.rebuilt = true
  -- With static_graph, the parameters that got no gradient are appended, so that they have a bucket, too.
  if st.static then
    for k = #st.params, 1, -1 do
      if not st.counts[k] and not st.is_late[st.params[k]] then st.arrival[#st.arrival + 1] = k end
    end
  end
  for k = #st.arrival + 1, #st.params do st.arrival[k] = 0 end         -- make the list equally long on all ranks
  local order = create.tensor(st.arrival, { dtype = "int64", device = "cpu" })
  dist.broadcast(order, { src = source or dist.group_ranks(st.group)[1], group = st.group })
  local params = {}
  for _, index in ipairs(order:tolist()) do params[#params + 1] = st.params[index] end
  st.arrival = {}
  set_buckets(st, params, st.limits)
end

-- Wrappers that have run a forward outside of no_sync, as keys. If a backward fails before it reaches a parameter of a
-- wrapper whose forward awaits a backward, the peers must learn of the error: they wait in the reductions.
local waiting = setmetatable({}, { __mode = "k" })
local expects = false

local function expect(st)
  waiting[st] = true
  if expects then return end
  expects = true
  autograd.at_end(function() end, function(message)
    for other in pairs(waiting) do
      if other.armed and not other.queued then return tell(other, message) end
    end
  end, true)
end

-- Enables the reduction after a forward outside of no_sync. Where parameters may be unused and no output requires a
-- gradient, unused parameters are reduced at once.
local function prepare(st, ...)
  forget(st)
  if #st.params == 0 and not st.delayed then return end  -- all are frozen now
  st.armed = true
  expect(st)
  if not hook_outputs(st, true, ...) and (st.find_unused or st.static) then no_grad(finish, st) end
end

local function synced(st, ok, ...)
  local message = ...
  if ok then ok, message = pcall(prepare, st, ...) end
  if not ok then
    tell(st, message)
    error(message, 0)
  end
  return ...
end

local function run(st, module, ...)
  if st.low then return st.low:forward(module, ...) end
  return module(...)
end

local function local_only(st, ...)
  hook_outputs(st, false, ...)
  return ...
end

-- Follows changes of the module's parameters.
local function refresh(st, module)
  if not parameters.changed(st) then return end
  local found = parameters.find_again(st, module)
  if st.join then raise "DDP: parameters were frozen, unfrozen or converted inside join, in which ranks that have finished take no part" end
  capture.refuse "parameters of DDP were frozen, unfrozen or converted; capture the step after a step without capture"
  if st.options.init_sync then
    local ok, why = pcall(parameters.check_same, st, module, found)
    if not ok then
      error(("%s; on this rank, %s after the module was wrapped"):format(why, parameters.what_changed(st, found)), 0)
    end
  end
  arrange(st, found)
  parameters.note(st, module)
  reducer.hook_parameters(st, found.all)
end

-- The communication of a forward outside of no_sync, before the module runs.
local begin = calls.several(function(st, module)
  check_prior(st)
  local source = st.join and join.notify(st, true)
  no_grad(function()
    refresh(st, module)
    rebuild(st, source)
    make_buckets(st)
    if st.delayed and #st.delayed.buckets == 0 then st.delayed:prepare(st.reduce_dtype) end
    if st.broadcast_buffers then pieces.broadcast(buffers_of(module, st), st.group, nil, source) end
  end)
end, function(st) return st.world > 1 and not (st.join and st.join.symmetric) end)

-- For a captured step: its repetitions make the reductions of the recording, so the wrapper must not have changed.
local function note_state(st, list)
  if st.join or st.overlapped then
    raise "captured step: it runs DDP inside join, or with an optimizer that steps during backward; repetitions would not run their Lua code"
  end
  local function changed()
    raise "captured step: no_sync, join or a communication hook of DDP was used after the step was recorded; capture the step again"
  end
  for _, name in ipairs { "sync", "join", "hook", "buckets", "lists" } do list.element(st, name, changed) end
  if st.waiting then raise "captured step: its backward did not reach all parameters of DDP, so their gradients were not reduced" end
  list.always(function() reducer.unmark(st) end)
end

function DDP:forward(...)
  local st = rawget(self, "_ddp")
  local module = self._slots.module
  if not autograd.is_grad_enabled() then return run(st, module, ...) end
  if not st.sync then
    if parameters.changed(st) then
      local found = parameters.find_again(st, module)
      reducer.hook_parameters(st, found.all)
    end
    if st.join then join.notify(st, false) end
    return local_only(st, run(st, module, ...))
  end
  take_over(st)
  capture.note(st, note_state)
  begin(st, module)
  return synced(st, pcall(run, st, module, ...))
end

local join_options = calls.several(function(st, given, fn)
  local o = opts("join", given, { divide_by_initial_world_size = true, enable = true,
    throw_on_early_termination = false })
  opts.expect(fn, opts.fn, "join: argument")
  if o.enable and st.delayed then raise("join: not supported with the option delay_all_reduce_named_params") end
  return o
end)

--- Runs fn, in which ranks may run different numbers of iterations (forward and backward). A rank that has finished
--- takes part in the collectives of the others until all have finished; then all ranks get the model of the last one.
--- Other collectives of the script inside fn must match on all ranks; a forward without a backward must be inside
--- no_grad.
---@param given? { divide_by_initial_world_size: boolean, enable: boolean, throw_on_early_termination: boolean }
---   divide_by_initial_world_size: false: divides gradients by the number of active ranks; enable: false: only calls
---   fn; throw_on_early_termination: raises on every rank as soon as one has finished before another
---@param fn function  called without arguments
---@return any  the results of fn
function DDP:join(given, fn)
  if fn == nil and opts.fn.test(given) then given, fn = nil, given end
  local o = join_options(rawget(self, "_ddp"), given, fn)
  if not o.enable then return fn() end
  local st = rawget(self, "_ddp")
  local module = self._slots.module
  st.rebuild_due = function() return rebuild_due(st) end
  st.rebuild = function(source) rebuild(st, source) end
  st.make_buckets = function() make_buckets(st) end
  st.abandon = function() reducer.abandon(st) end
  st.sync_buffers = function(source) pieces.broadcast(buffers_of(module, st), st.group, nil, source) end
  st.used_by_others = function()
    st.used = {}
    start_used_map(st)
    return used_anywhere(st)
  end
  st.some_used = reducer.some_used
  local model = buffers_of(module, st)
  for name, p in module:named_parameters() do
    if not st.ignored[name] then model[#model + 1] = p end
  end
  return join.run(st, o, model, fn)
end

local function leave(st, before, ...)
  st.sync = before
  return context.results(...)
end

--- Runs fn without reducing the gradients of forwards inside it: gradients accumulate on each rank until the next
--- backward of a forward outside. Until then optimizers and clip_grad_norm_ refuse them.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function DDP:no_sync(fn, ...)
  opts.expect(fn, opts.fn, "no_sync: argument 1")
  local st = rawget(self, "_ddp")
  local before = st.sync
  st.sync = false
  return leave(st, before, pcall(context.block, "no_sync", fn, ...))
end

--- Registers hook(state, bucket), which reduces each bucket instead of DDP. bucket has the fields flat (the gradients,
--- 1-d), parameters, gradients (views of flat), index (from 1) and last. The hook returns nothing if it changed flat in
--- place, a tensor of flat's size, or an object whose wait() returns one of these.
---@param state any  given to hook
---@param hook fun(state: any, bucket: Bucket): any  called once per bucket
function DDP:register_comm_hook(state, hook)
  local st = rawget(self, "_ddp")
  if not opts.fn.test(hook) then raise("Communication hook must be callable.") end
  if st.hook then raise("register_comm_hook or register_builtin_comm_hook can only be called once.") end
  if st.started then raise("Communication hook can only be registered before calling backward.") end
  st.hook, st.hook_state = hook, state
end

DDP._advice = advice.ddp
rawset(DDP, "__deepcopy", function() raise("DDP does not support deepcopy; copy its module and wrap the copy") end)

return { DDP = DDP }
