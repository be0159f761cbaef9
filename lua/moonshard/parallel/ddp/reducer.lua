-- SPDX-License-Identifier: MIT
--- Reduces DDP's gradients during backward: fills buckets as gradients arrive, starts the reductions of complete ones,
--- and copies the results back at the end of the outermost backward (docs/semantics.md#ddp). `st` is the state of one
--- DDP wrapper, made by its constructor.
---
--- The forward that recorded a graph decides whether its gradients are reduced, whatever ran since. Its outputs have
--- hooks. A backward that reaches an output of a forward outside of no_sync arms the wrapper: gradients that arrive
--- later are reduced. In a backward that only reaches outputs of forwards inside no_sync they stay on this rank. A
--- forward outside of no_sync also arms the wrapper when it runs, for graphs with other outputs than those that it
--- returned. Until a gradient is reduced it is marked in the engine, and optimizers and clipping refuse it.
local autograd = require "moonshard.autograd"
local buckets = require "moonshard.parallel.ddp.buckets"
local capture = require "moonshard.autograd.capture"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local hooks = require "moonshard.parallel.ddp.hooks"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local pieces = require "moonshard.dist.pieces"
local tensor = require "moonshard.tensor"

local set_local = require "moonshard.autograd.sparse".set_local
local raise, no_grad, is_tensor = errors.raise, autograd.no_grad, tensor.is_tensor
local ipairs, pcall, error, rawget, select, type, next = ipairs, pcall, error, rawget, select, type, next

-- ---- buckets -------------------------------------------------------------------------------------

-- Makes the buckets that st.lists describes. If there is no memory for them, this rank has none, and tries again at its
-- next forward; the other ranks may have theirs already.
local function make_buckets(st)
  if not st.lists then return end
  st.buckets = buckets.build(st.lists, st.reduce_dtype)
  st.lists, st.place = nil, {}                  -- place: parameter -> { bucket, position in it }
  for _, b in ipairs(st.buckets) do
    for k, p in ipairs(b.parameters) do st.place[p] = { b, k } end
  end
end

local function set_lists(st, lists)
  local old = st.buckets
  st.buckets, st.place, st.lists = {}, {}, lists
  buckets.free(old or {})
  make_buckets(st)
end

local function set_buckets(st, order, limits) set_lists(st, pieces.assign(order, limits, st.reduce_dtype)) end

-- ---- backward ------------------------------------------------------------------------------------

local MARKED_TWICE = "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
  .. "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not shared across multiple "
  .. "concurrent forward-backward passes. 2) Reused parameters in multiple reentrant backward passes, or in several backwards of one forward. "
  .. "Parameter %d ('%s') was ready already."

local function launch_ready(st)
  if st.skip_unused and not st.map_known then return end       -- the map of used parameters is not known yet
  local list = st.buckets
  while st.next <= #list and list[st.next].pending == 0 do
    local b = list[st.next]
    st.next = st.next + 1
    if not b.skipped then b:launch(st.group, st.join and st.join.divisor or st.world, st.hook, st.hook_state) end
  end
end

local function mark_ready(st, p)
  local b, k = st.place[p][1], st.place[p][2]
  st.marked[p] = true
  b:take(k, p)
  b.pending = b.pending - 1
  if b.pending == 0 then launch_ready(st) end
end

local function forget(st)
  for _, b in ipairs(st.buckets) do b:reset() end
  if st.delayed then st.delayed:forget() end
  st.next, st.marked, st.waiting, st.armed, st.queued, st.left, st.map_known = 1, {}, false, false, false, nil, false
end

local function mark_local(st, p)
  if st.world == 1 then return end
  st.has_local = true
  set_local(p)
end

-- Marks the gradients of parameters whose arrival is not seen.
local function mark_late(st)
  for _, k in ipairs(st.late) do
    local p = st.params[k]
    if p.grad then
      st.used[p] = true
      mark_local(st, p)
    end
  end
end

--- Takes back all marks, before a captured step that reduces all gradients is repeated.
local function unmark(st)
  if not st.has_local then return end
  st.has_local = false
  for _, p in ipairs(st.hooked) do errors.check(engine.lib.ms_grad_set_local(p.id, 0), p) end
end

-- Copies the results back into the gradients. The gradient of a parameter that no rank used does not change.
local function put_back(st, b, used)
  for k, p in ipairs(b.parameters) do
    if not used or used[p] then b:give(k, st.as_view) end
  end
end

-- Whether a parameter was used since the last reduction. A parameter whose gradient has been cleared since, for example
-- after a failed backward, does not count as used.
local function is_used(st, p) return st.used[p] and p.grad ~= nil end

-- Starts the all-reduce of the map of used parameters; used_anywhere waits for the result.
local function start_used_map(st)
  local list = {}
  for k, p in ipairs(st.params) do list[k] = is_used(st, p) and 1 or 0 end
  st.used_map = create.tensor(list, { dtype = "int32", device = "cpu" }):keep()
  st.used_work = dist.all_reduce(st.used_map, { group = st.group, async = true })
end

local function used_anywhere(st)
  st.used_work:wait()
  local out = {}
  for k, count in ipairs(st.used_map:tolist()) do out[st.params[k]] = count > 0 end
  st.used_map:release()
  st.used_map, st.used_work = nil, nil
  return out
end

local function some_used(b, used)
  for _, p in ipairs(b.parameters) do
    if used[p] then return true end
  end
  return false
end

-- Tells the failure to peers that wait in the collectives of this iteration.
local function tell(st, message)
  if st.world > 1 then engine.lib.ms_dist_failed(tostring(message)) end
end

-- Gives up an iteration: waits for reductions in flight. If there were any, makes new buffers, because a failed
-- collective may still write to the old ones, and their next use would raise its error again.
local function abandon(st)
  local lists, launched = {}, false
  if st.overlapped then st.overlapped.drop() end
  for k, b in ipairs(st.buckets) do
    lists[k], launched = b.parameters, launched or b.launched
    if b.launched and b.work then pcall(hooks._drop, b.work) end
  end
  for _, b in ipairs(st.delayed and st.delayed.launched and st.delayed.buckets or {}) do
    launched = true
    if b.work then pcall(hooks._drop, b.work) end
  end
  forget(st)
  if st.synced_backwards == 0 then st.arrival, st.counts = {}, {} end      -- the order of arrival is incomplete
  if launched then
    if not st.lists then pcall(no_grad, set_lists, st, lists) end
    if st.delayed then pcall(no_grad, st.delayed.prepare, st.delayed, st.reduce_dtype) end
  end
end

-- After a failed backward: tells the error to peers that wait for the reductions, and gives up the iteration.
local function fail(st, message)
  if st.armed then tell(st, message) end
  abandon(st)
end

-- static_graph: the first iteration counts how often each parameter's gradient arrives, and reduces all gradients at
-- the end. In later iterations a parameter is ready when its gradient has arrived that number of times; an unused
-- parameter is ready from the start.
local GRAPH_CHANGED =
  "Your training graph has changed in this iteration, e.g., one parameter is %s in first iteration, but then got %s in the "
  .. "second iteration. this is not compatible with static_graph set to true."

local function mark_static_unused(st)
  if st.left then return end
  st.left = {}
  for k, p in ipairs(st.params) do
    st.left[k] = st.expected[k]
    if not st.expected[k] and not st.is_late[p] then mark_ready(st, p) end
  end
end

local function static_arrived(st, k, p)
  if not st.expected then
    st.counts[k] = (st.counts[k] or 0) + 1
    return
  end
  if not st.expected[k] then
    raise(GRAPH_CHANGED .. " Parameter %d ('%s') is used now.", "unused", "used", k, st.names[k])
  end
  mark_static_unused(st)
  st.left[k] = st.left[k] - 1
  if st.left[k] < 0 then raise(MARKED_TWICE, k, st.names[k]) end
  if st.left[k] == 0 then mark_ready(st, p) end
end

local UNUSED_NONE = "find_unused_parameters=true was specified in DDP constructor, but did not find any unused parameters in the forward "
  .. "pass. This flag costs an extra collective every iteration, and buckets wait until the end of backward. If your model indeed never has any unused "
  .. "parameters in the forward pass, consider turning this flag off. Note that this warning may be a false positive if your model has "
  .. "flow control causing later iterations to have unused parameters."

local function finish_now(st)
  st.queued = false
  if not st.armed then return end
  for _, k in ipairs(st.late) do
    local p = st.params[k]
    if not st.marked[p] and (p.grad or not st.find_unused) then
      if st.synced_backwards == 0 then st.arrival[#st.arrival + 1] = k end
      st.used[p] = true
      mark_ready(st, p)
    end
  end
  local first_static = st.static and not st.expected
  if first_static then
    for _, p in ipairs(st.params) do
      if not st.marked[p] then mark_ready(st, p) end
    end
  elseif st.static then
    mark_static_unused(st)
  end
  local used = st.static_used
  if st.skip_unused then
    start_used_map(st)
    used = used_anywhere(st)
    for _, b in ipairs(st.buckets) do b.skipped = not some_used(b, used) end
    st.map_known = true
  end
  if st.find_unused then
    local unused = 0
    for k = #st.params, 1, -1 do
      local p = st.params[k]
      if not st.marked[p] then
        unused = unused + 1
        mark_ready(st, p)
      end
    end
    launch_ready(st)
    if unused == 0 and st.synced_backwards == 0 then log.warn(UNUSED_NONE) end
  end
  -- Incomplete buckets may be completed by another backward.
  if st.next <= #st.buckets or st.delayed and not st.delayed.launched then return mark_late(st) end
  if st.find_unused and not st.skip_unused or first_static then
    start_used_map(st)
    used = used_anywhere(st)
  end
  if first_static then st.expected, st.static_used = st.counts, used end
  no_grad(function()
    for _, b in ipairs(st.buckets) do
      if not b.skipped then
        b:finish(st.hook)
        put_back(st, b, used)
        if st.overlapped and st.overlapped.after then st.overlapped.after(b) end
      end
    end
    if st.delayed then st.delayed:finish() end
    for _, b in ipairs(st.buckets) do b:ended(true) end
    if st.overlapped then st.overlapped.finish(st.buckets) end
  end)
  st.synced_backwards = st.synced_backwards + 1
  st.used = {}
  forget(st)
end

-- Called at the end of the outermost backward. With find_unused_parameters or static_graph, also called after a forward
-- if none of its outputs requires a gradient.
local function finish(st)
  local ok, message = pcall(finish_now, st)
  if not ok then
    fail(st, message)
    error(message, 0)
  end
end

-- outputs_only: an output was reached, but no parameter yet.
local function finish_later(st, outputs_only)
  st.started = true
  if not outputs_only then st.waiting = true end
  if st.queued then return end
  st.queued = true
  autograd.at_end(function() finish(st) end, function(message) fail(st, message) end)
end

-- A gradient of p has arrived. Whether it is reduced in this backward.
local function is_reduced(st, p)
  mark_local(st, p)
  local now = autograd.run_number()
  if st.armed and (st.local_run ~= now or st.synced_run == now) then return true end
  if st.world > 1 then
    capture.refuse "it leaves gradients of DDP unreduced, as in no_sync; run such steps without ms.capture"
  end
  return false
end

-- Called when the gradient of a parameter has arrived. One without a number was frozen until the last forward outside
-- of no_sync; the next such forward gives it a bucket.
local function arrived(st, p)
  local k = st.number[p]
  st.used[p] = true
  if not is_reduced(st, p) or not k then return end
  if st.marked[p] and not st.static then raise(MARKED_TWICE, k, st.names[k]) end
  finish_later(st)
  if st.synced_backwards == 0 and not st.counts[k] then st.arrival[#st.arrival + 1] = k end
  if st.static then return static_arrived(st, k, p) end
  mark_ready(st, p)
end

-- Called when the gradient of a delayed parameter, or of param_to_hook_all_reduce, has arrived.
local function delayed_arrived(st, p)
  if not is_reduced(st, p) then return end
  finish_later(st)
  st.delayed:arrived(p, st.group, st.world)
end

-- Maps a parameter to the wrapper that handles its gradient; if there are several wrappers, the last whose forward ran
-- or whose output a backward reached. Keys and values are weak references (a value is st.weak), so the table keeps
-- neither parameters nor wrappers alive.
local owner = setmetatable({}, { __mode = "k" })
local last_owner

local function take_over(st)
  if last_owner == st.weak then return end
  last_owner = st.weak
  for _, p in ipairs(st.hooked) do owner[p] = st.weak end
end

--- Hooks those of these parameters that are trained and have no hook yet.
---@param params Parameter[]
local function hook_parameters(st, params)
  local weak, hooked = st.weak, st.hooked
  local function hook(p, fn)
    local k = #hooked + 1
    hooked[k], st.has_hook[p] = p, true
    autograd.register_engine_hook(p, function()
      local alive = weak[1]
      if alive and owner[alive.hooked[k]] == weak then no_grad(fn, alive, alive.hooked[k]) end
    end)
  end
  local delayed = st.delayed
  local has = delayed and delayed.has or {}
  for _, p in ipairs(params) do
    if p.requires_grad and not st.has_hook[p] then hook(p, has[p] and delayed_arrived or arrived) end
  end
  if delayed and not st.hooks_delayed and not has[delayed.hook] then hook(delayed.hook, delayed_arrived) end
  st.hooks_delayed = true
  last_owner = nil
  take_over(st)
end

-- Called when a gradient has reached an output of a forward; synced: the forward was outside of no_sync.
local function reached(st, synced)
  if not autograd.accumulates() then return end
  local now = autograd.run_number()
  if not synced then
    if st.local_run ~= now and #st.late > 0 then autograd.at_end(function() mark_late(st) end) end
    st.local_run = now
    return
  end
  st.synced_run = now
  take_over(st)
  if not st.armed then                                  -- the forward's gradients, or a later one's, have been reduced
    if st.join then
      raise "DDP: inside join, a forward was followed by a second backward, in which ranks that have finished take no part"
    end
    forget(st)
    st.armed = true
  end
  if st.find_unused or st.static or #st.late > 0 then finish_later(st, true) end
end

-- Calls fn on each tensor in v that requires a gradient, also inside tables and objects. Returns whether there was one,
-- or v has an object or a function, in which there may be one.
local function each_tensor(v, fn, seen)
  if is_tensor(v) then
    if v.id < 0 then
      local found = false
      for _, part in ipairs(tensor.flat { v }) do found = each_tensor(part, fn, seen) or found end
      return found
    end
    if v.requires_grad then fn(v) end
    return v.requires_grad
  end
  if type(v) ~= "table" then return type(v) == "function" end
  if rawget(v, "_slots") then return true end           -- a module
  if seen[v] then return false end
  seen[v] = true
  local found = not opts.may_hold_tensors(v)
  for _, x in next, v do found = each_tensor(x, fn, seen) or found end
  return found
end

--- Hooks the outputs of a forward. Returns whether one requires a gradient, or may.
---@param synced boolean  whether the forward was outside of no_sync
local function hook_outputs(st, synced, ...)
  local found, seen, name = false, {}, synced and "on_synced" or "on_local"
  local hook = st[name] or function() reached(st, synced) end
  st[name] = hook
  local function register(t)
    if not t.is_leaf then autograd.register_engine_hook(t, hook) end
  end
  for k = 1, select("#", ...) do found = each_tensor((select(k, ...)), register, seen) or found end
  return found
end

return {
  set_buckets = set_buckets, make_buckets = make_buckets, forget = forget, start_used_map = start_used_map,
  used_anywhere = used_anywhere, some_used = some_used, tell = tell, fail = fail, abandon = abandon, finish = finish,
  take_over = take_over, hook_parameters = hook_parameters, hook_outputs = hook_outputs, unmark = unmark,
  GRAPH_CHANGED = GRAPH_CHANGED,
}
