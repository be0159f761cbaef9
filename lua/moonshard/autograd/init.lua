-- SPDX-License-Identifier: MIT
--- Autograd: backward, ms.grad, hooks, and whether operations record a graph. backward advances the engine's run
--- (ms_run) and answers its events, such as calls of hooks. Functions with their own backward and checkpoints are in
--- autograd/function.lua.
local capture = require "moonshard.autograd.capture"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local places = require "moonshard.core.places"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local Instance = require "moonshard.tensor.class".Instance
local create = require "moonshard.tensor.create"
local log = require "moonshard.core.log"

local lib, ffi, state = engine.lib, engine.ffi, engine.state
local Tensor, methods, is_tensor, id_of, wrap = tensor.Tensor, tensor.methods, tensor.is_tensor, tensor.id_of,
  tensor.wrap
local type, pcall, error, setmetatable = type, pcall, error, setmetatable

local M = {}

local around
--- The function in which backward recomputes checkpointed regions: around(fn, …) must call fn(…). nil: fn is called
--- directly.
---@return fun(fn: function, ...)?
function M.around() return around end
--- Sets the function in which backward recomputes the checkpointed regions recorded from now on. Returns the previous
--- one.
---@param fn? fun(fn: function, ...)  around: must call fn(…); nil: fn is called directly
function M.set_around(fn)
  local before = around
  around = fn
  return before
end

local DONE, EVENT = ffi.C.MS_RUN_DONE, ffi.C.MS_RUN_EVENT

-- ---- keys -----------------------------------------------------------------------------------------

-- Events identify hooks, functions and checkpoints by keys. The engine reports keys whose owners it has freed.
local by_key, next_key = {}, 0
local dead = ffi.new "double[64]"

local function drop_dead()
  while true do
    local n = lib.ms_dead_keys(dead, 64)
    for k = 0, n - 1 do
      local entry = by_key[dead[k]]
      by_key[dead[k]] = nil
      if entry and entry.drop then entry:drop() end
    end
    if n < 64 then return end
  end
end

local since = 0
--- Keeps an entry under a new key until the engine has freed the key's owner.
---@param entry table  passed to the handler of the key's events
---@return number key
function M.new_key(entry)
  since = since + 1
  if since >= 256 then
    since = 0
    drop_dead()
  end
  next_key = next_key + 1
  by_key[next_key] = entry
  return next_key
end

function M.drop_key(key) by_key[key] = nil end

-- ---- runs -----------------------------------------------------------------------------------------

-- handlers[kind](entry, event, run) returns answers (tensors or nil) and their number.
local handlers = {}
M.handlers = handlers

local answer_ids = ffi.new("ms_id[?]", 256)

local function event_tensors(event)
  local list = { n = event.n }
  for k = 1, event.n do
    local id = event["in"][k - 1]
    if id ~= 0 then list[k] = setmetatable({ id = id }, Tensor) end
  end
  return list
end
M.event_tensors = event_tensors

local function abort(run, message)
  lib.ms_run_abort(run, tostring(message))
  error(message, 0)
end

local function handle(run, event)
  local handler = handlers[event.kind]
  if not handler then error(("moonshard: no handler for event %d"):format(event.kind), 0) end
  local answers, n = handler(by_key[event.key], event, run)
  n = n or 0
  local ids = answer_ids
  if n > 256 then ids = ffi.new("ms_id[?]", n) end
  for k = 1, n do
    local t = answers[k]
    if t == nil then ids[k - 1] = 0 else ids[k - 1] = id_of(t, "backward", "result " .. k) end
  end
  if lib.ms_run_answer(run, ids, n) ~= 0 then errors.fail() end
end

-- The text of the run's failure. If a step that is being captured refused a hook, the text gives the hook's definition.
local function failure(event)
  local text = errors.last()
  if not capture.active() or not text:find("captured step: it calls", 1, true) then return text end
  local entry = by_key[event.key] or {}
  local hooks = entry[1] and entry[1]._back
  return (text:gsub(", which", capture.place(entry.fn or hooks and hooks[1].fn) .. "%0", 1))
end

local function pull_events(run, event)
  while true do
    places.mark()
    local ok, message = pcall(handle, run, event)
    if not ok then abort(run, message) end
    local s = lib.ms_run_next(run, event)
    if s == DONE then return end
    if s ~= EVENT then
      local text = failure(event)
      lib.ms_run_abort(run, nil)
      errors.raise_text(text)
    end
  end
end

-- Events may be nested, because a hook may run a backward. Each depth has its own event struct and records the
-- coroutine that advances its run.
local events, pullers, depth = {}, {}, 0
local running, status = coroutine.running, coroutine.status

--- Aborts runs that cannot continue because their coroutine is dead.
---@param all? boolean  true: aborts every run (at the prompt, after an error)
function M.abort_left(all)
  for d = 1, depth do
    local puller = pullers[d]
    local co = puller.co[1]
    if all or (puller.in_coroutine and (co == nil or status(co) == "dead")) then
      lib.ms_run_abort(puller.run, nil)
      depth = d - 1
      log.warn("an unfinished backward was aborted: the coroutine that called it, or the line at the prompt, ended "
        .. "while a hook, an ms.Function or a checkpoint ran")
      return
    end
  end
end

-- Callbacks to be called at the end of the outermost backward: { done, failed, stays = boolean }.
local ending

--- Calls done() when the outermost active backward ends, or failed(message) if it fails. With `stays`, they are also
--- called after every later backward.
---@param done fun()  called without arguments
---@param failed? fun(message: any)  called with the error if the backward fails
---@param stays? boolean  true: called after every later backward, too
function M.at_end(done, failed, stays)
  ending = ending or {}
  ending[#ending + 1] = { done, failed, stays = stays }
end

-- Returns the list of callbacks; only those with `stays` are kept for the next backward.
local function take_ending()
  local list = ending
  ending = nil
  for k = 1, #list do
    if list[k].stays then
      ending = ending or {}
      ending[#ending + 1] = list[k]
    end
  end
  return list
end

-- temporary: whether to leave out callbacks with `stays`.
local function end_all(which, message, temporary)
  if depth > 0 or not ending then return end
  local list = take_ending()
  for k = 1, #list do
    if list[k][which] and not (temporary and list[k].stays) then list[k][which](message) end
  end
end

-- Runs so far that were not nested in another; whether the next run is that of ms.grad.
local outermost, collects_next = 0, false
--- The number of the outermost active run.
---@return integer
function M.run_number() return outermost end
--- Whether the innermost active run adds gradients to the grad fields of leaves, as backward does and ms.grad does not.
---@return boolean
function M.accumulates() return depth == 0 or not pullers[depth].collects end

--- Advances a run to its end and handles its events. run is NULL if the engine failed to create it. tensors: for error
--- messages.
local function pull(run, tensors)
  local collects = collects_next
  collects_next = false
  if depth == 0 then outermost = outermost + 1 end
  if run == nil then
    local _, message = pcall(errors.fail_of, tensors)
    end_all(2, message, collects)
    error(message, 0)
  end
  local event = events[depth + 1]
  if not event then
    event = ffi.new "ms_event"
    events[depth + 1] = event
    pullers[depth + 1] = { co = setmetatable({}, { __mode = "v" }) }
  end
  local s = lib.ms_run_next(run, event)
  if s == EVENT then
    local mine = depth + 1
    local puller, co = pullers[mine], running()
    puller.run, puller.in_coroutine, puller.co[1], puller.collects = run, co ~= nil, co, collects
    depth = mine
    local ok, message = pcall(pull_events, run, event)
    depth = mine - 1
    if not ok then
      end_all(2, message, collects)
      error(message, 0)
    end
  elseif s ~= DONE then
    local text = failure(event)
    lib.ms_run_abort(run, nil)
    end_all(2, text, collects)
    errors.raise_text(text)
  end
  places.mark()
end
M.pull = pull

-- The options of backward. create_graph is among them for an error that says why it is refused.
local backward_options = { retain_graph = false, create_graph = false }

local function retains(given)
  local o = opts("backward", given, backward_options)
  if o.create_graph then
    errors.raise("backward: create_graph: gradients of gradients are not supported; omit the option")
  end
  return o.retain_graph
end

local root1, grad1 = ffi.new "ms_id[1]", ffi.new "ms_id[1]"

--- Computes the gradients of t with respect to all leaves that it depends on, and adds them to their grad. Errors: t
--- has no graph; t has several elements and grad is missing; an earlier backward has freed the graph.
---@param grad? Tensor  the gradient of t, of its shape; 1 for a t of one element
---@param given? { retain_graph: boolean, create_graph: boolean }
---   retain_graph: keeps the graph for another backward; create_graph: not supported: an error
function methods.backward(t, grad, given)
  if given == nil and grad ~= nil and opts.is(grad) then grad, given = nil, grad end
  local retain = given ~= nil and retains(given)
  root1[0] = id_of(t, "backward")
  grad1[0] = grad ~= nil and id_of(grad, "backward", "gradient") or 0
  if depth > 0 then M.abort_left() end
  local run = lib.ms_backward(1, root1, grad1, retain and 1 or 0)
  pull(run, { t, grad })
  lib.ms_run_free(run)
  drop_dead()
  if ending then end_all(1) end
end

-- Takes a tensor or a list of tensors. Returns the ids of its plain tensors (an instance of a tensor class stands for
-- its inner tensors), their number, these tensors, and the given tensors as a list.
local function id_list(x, who, what)
  if is_tensor(x) then x = { x } end
  if type(x) ~= "table" or #x == 0 and not opts.is_plain(x) then
    opts.wrong(x, "a tensor or a list of them", "%s: %s", who, what)
  end
  for k = 1, #x do id_of(x[k], who, what) end
  local list = tensor.flat(x)  -- instances of tensor classes are replaced by their inner tensors
  local ids = ffi.new("ms_id[?]", math.max(#list, 1))
  for k = 1, #list do ids[k - 1] = list[k].id end
  return ids, #list, list, x
end

-- The ids of the gradients of roots; 0 if a root has none. The gradient of an instance is an instance, or one tensor
-- that is the gradient of each of its inner tensors.
local function grad_ids(grads, roots, n, who)
  local ids, at = ffi.new("ms_id[?]", math.max(n, 1)), 0
  for k = 1, #roots do
    local g = grads and grads[k]
    if g ~= nil then id_of(g, who, "gradient " .. k) end
    local parts, own = tensor.flat { roots[k] }, g and tensor.flat { g }
    for j = 1, #parts do
      if own then ids[at] = (own[j] or own[1]).id end
      at = at + 1
    end
  end
  return ids
end

--- As methods.backward, for several roots at once.
---@param roots Tensor[]  tensors with a graph
---@param grads? Tensor[]  one for each root, of its shape; nil for roots of one element
---@param given? { retain_graph: boolean, create_graph: boolean }
---   retain_graph: keeps the graph for another backward; create_graph: not supported: an error
function M.backward(roots, grads, given)
  local retain = retains(given)
  local ids, n, list, given_roots = id_list(roots, "backward", "root")
  local gids = grad_ids(grads, given_roots, n, "backward")
  local run = lib.ms_backward(n, ids, gids, retain and 1 or 0)
  pull(run, list)
  lib.ms_run_free(run)
  drop_dead()
  if ending then end_all(1) end
end

--- Runs backward on all inner tensors at once. grad: an instance, or a tensor that is the gradient of each of them.
function Instance.methods.backward(t, grad, given)
  if given == nil and grad ~= nil and opts.is(grad) then grad, given = nil, grad end
  local list, grads = tensor.inner(t), nil
  if grad ~= nil then
    opts.expect(grad, tensor.a_tensor, "backward: gradient")
    grads = tensor.inner(grad)
    if not grads then
      grads = {}
      for k = 1, #list do grads[k] = grad end
    end
  end
  return M.backward(list, grads, given)
end

--- Returns the gradients of outputs with respect to inputs, without changing grad fields. Errors: an output of several
--- elements without a gradient in grad_outputs; an input that no output depends on, unless allow_unused is set (its
--- gradient is then nil); create_graph, which is not supported.
---@param outputs Tensor|Tensor[]  roots of the graph
---@param inputs Tensor|Tensor[]  tensors that require grad
---@param given? { grad_outputs: Tensor|Tensor[], retain_graph: boolean, allow_unused: boolean, create_graph: boolean }
---   grad_outputs: one for each output, of its shape; 1 for an output of one element; allow_unused: an input that no
---   output depends on gets nil; create_graph: not supported: an error
---@return Tensor[]  one for each input
function M.grad(outputs, inputs, given)
  local o = opts("grad", given, { grad_outputs = opts.any, retain_graph = false, allow_unused = false,
    create_graph = false })
  if o.create_graph then
    errors.raise("grad: create_graph: gradients of gradients are not supported; omit the option")
  end
  local roots, n, list, given_roots = id_list(outputs, "grad", "output")
  local wanted, m, _, given_inputs = id_list(inputs, "grad", "input")
  local grads = grad_ids(is_tensor(o.grad_outputs) and { o.grad_outputs } or o.grad_outputs, given_roots, n, "grad")
  local run = lib.ms_grad(n, roots, grads, m, wanted, o.retain_graph and 1 or 0, o.allow_unused and 1 or 0)
  collects_next = true
  pull(run, list)
  end_all(1, nil, true)                                 -- of a backward that a hook ran
  local found, out, at = {}, {}, 0
  for k = 1, m do
    local id = lib.ms_run_result(run, k - 1)
    found[k] = id ~= 0 and wrap(id) or nil
  end
  for k = 1, #given_inputs do
    local parts = tensor.inner(given_inputs[k])
    if not parts then
      at = at + 1
      out[k] = found[at]
    else
      local leaves, any, mine = tensor.flat(parts), false, {}
      for j = 1, #leaves do
        mine[j] = found[at + j] or false
        any = any or mine[j]
      end
      at = at + #leaves
      for j = 1, #leaves do mine[j] = mine[j] or create.zeros_like(leaves[j]) end
      if any then out[k] = tensor.rebuild(mine, given_inputs[k]) end
    end
  end
  lib.ms_run_free(run)
  drop_dead()
  return out
end

-- ---- modes ------------------------------------------------------------------------------------------

local function restore(mode, ...)
  lib.ms_set_grad_mode(mode)
  return context.results(...)
end

--- Runs fn(…) without recording a graph.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.no_grad(fn, ...)
  opts.expect(fn, opts.fn, "no_grad: argument")
  return restore(lib.ms_set_grad_mode(0), pcall(fn, ...))
end

--- no_grad by another name of PyTorch's: tensors made inside may be used in a graph afterwards.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.inference_mode(fn, ...)
  opts.expect(fn, opts.fn, "inference_mode: argument")
  return restore(lib.ms_set_grad_mode(0), pcall(fn, ...))
end

--- Runs fn(…) recording a graph, also inside no_grad.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.enable_grad(fn, ...)
  opts.expect(fn, opts.fn, "enable_grad: argument")
  return restore(lib.ms_set_grad_mode(1), pcall(fn, ...))
end

--- Whether operations record a graph now.
---@return boolean
function M.is_grad_enabled() return state.grad_mode ~= 0 end

--- Sets whether operations record a graph from now on.
---@param on boolean  false: nothing is recorded
---@return boolean  the previous setting
function M.set_grad_enabled(on) return lib.ms_set_grad_mode(on and 1 or 0) ~= 0 end

--- Sets whether gradients of this leaf are computed. Errors: a tensor that is not a leaf; a dtype that is not floating
--- point.
---@param on? boolean  whether backward computes them (default: true)
---@return Tensor self
function methods.requires_grad_(t, on)
  if on ~= nil then opts.expect(on, opts.boolean, "requires_grad_: argument 1") end
  if lib.ms_set_requires_grad(id_of(t, "requires_grad_"), on == false and 0 or 1) ~= 0 then errors.fail(t) end
  return t
end

-- ---- hooks ------------------------------------------------------------------------------------------

local Handle = { __name = "Handle" }
Handle.__index = Handle
--- Removes the hook. Idempotent.
function Handle:remove()
  if self.handle then
    lib.ms_hook_remove(self.handle)
    self.handle = nil
    by_key[self.key] = nil
  end
end
M.Handle = Handle

-- after: 0 before the gradient is used, 1 after it has been added to the leaf's grad.
local function hook(after, who, t, fn)
  id_of(t, who)
  opts.expect(fn, opts.fn, "%s: hook", who)
  local key = M.new_key { fn = fn, tensor = setmetatable({ t }, { __mode = "v" }) }
  local handle_number = lib.ms_register_hook(t.id, key, after)
  if handle_number == 0 then
    by_key[key] = nil
    errors.fail(t)
  end
  return setmetatable({ handle = handle_number, key = key }, Handle)
end

-- Registers the hook of retain_grad, after all others of t.
local function retain(t)
  local here = setmetatable({ t }, { __mode = "v" })        -- the hook must not keep t alive
  rawset(t, "_retains", hook(0, "retain_grad", t, function(grad)
    if not here[1] then return end
    local before = rawget(here[1], "_retained")
    rawset(here[1], "_retained", (before and before + grad or methods.clone(methods.detach(grad))):keep())
  end))
end

--- Calls fn(grad) each time the gradient of t has been computed; a tensor that fn returns replaces it. Errors: t does
--- not require a gradient.
---@param fn fun(grad: Tensor): Tensor?  grad is of t's shape
---@return Handle  its remove() removes the hook
function methods.register_hook(t, fn)
  local added = hook(0, "register_hook", t, fn)
  local kept = rawget(t, "_retains")
  if kept then
    kept:remove()
    retain(t)
  end
  return added
end

--- Makes backward keep the gradient of a tensor that is not a leaf in its field grad, as the tensor's hooks leave it,
--- added up over backwards. A leaf keeps its gradient anyway. Errors: t does not require a gradient.
function methods.retain_grad(t)
  id_of(t, "retain_grad")
  if not t.requires_grad then errors.raise("retain_grad: the tensor does not require a gradient") end
  if not t.is_leaf and not rawget(t, "_retains") then retain(t) end
end

-- The set of hooks whose only effect is work of the engine: captured steps repeat that work without calling them.
local engine_only = setmetatable({}, { __mode = "k" })
--- As register_post_accumulate_grad_hook for a leaf, and as register_hook for other tensors, for a hook whose only
--- effect is work of the engine, which a captured step repeats.
function M.register_engine_hook(t, fn)
  engine_only[fn] = true
  return t.is_leaf and t:register_post_accumulate_grad_hook(fn) or t:register_hook(fn)
end

--- Calls fn(p) each time the gradient of this leaf has been added to its grad. Errors: a tensor that is not a leaf or
--- does not require a gradient.
---@param fn fun(p: Tensor)  p is the leaf
---@return Handle  its remove() removes the hook
function methods.register_post_accumulate_grad_hook(t, fn)
  return hook(1, "register_post_accumulate_grad_hook", t, fn)
end

handlers[ffi.C.MS_EV_TENSOR_HOOK] = function(entry, event)
  if not entry then return nil, 0 end
  if capture.active() and not engine_only[entry.fn] then capture.refuse_hook("a tensor hook", entry.fn) end
  local grad = setmetatable({ id = event["in"][0] }, Tensor)
  local result = entry.fn(grad)
  if result == nil then return nil, 0 end
  if not is_tensor(result) then
    errors.raise("register_hook: the hook returned %s, expected a gradient or nothing", errors.kind(result))
  end
  return { result }, 1
end

handlers[ffi.C.MS_EV_LEAF_HOOK] = function(entry, event)
  if not entry then return nil, 0 end
  if capture.active() and not engine_only[entry.fn] then capture.refuse_hook("a leaf hook", entry.fn) end
  local id = event["in"][0]
  local t = entry.tensor[1]
  if not t or t.id ~= id then t = setmetatable({ id = id }, Tensor) end
  entry.fn(t)
  return nil, 0
end

M.restore = restore
M.drop_dead = drop_dead
opts.fix(methods, { "register_hook", "retain_grad" })

return M
