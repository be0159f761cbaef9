-- SPDX-License-Identifier: MIT
--- Nodes that a script records: functions with their own backward, and checkpoints (regions whose forward runs again
--- during backward). Backward reports both as events (autograd/init.lua).
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local scope = require "moonshard.tensor.scope"
local create = require "moonshard.tensor.create"
local autograd = require "moonshard.autograd"

local lib, ffi, state = engine.lib, engine.ffi, engine.state
local is_tensor = tensor.is_tensor
local select, pcall, error, setmetatable, unpack = select, pcall, error, setmetatable, unpack
local handlers, event_tensors, new_key, drop_key, restore =
  autograd.handlers, autograd.event_tensors, autograd.new_key, autograd.drop_key, autograd.restore

local M = {}

-- ---- custom functions --------------------------------------------------------------------------------

---@class FunctionContext
---@field needs_grad boolean[]  for each argument of forward: whether its gradient is needed
local Context = { __name = "FunctionContext" }
Context.__index = Context

--- To be called in forward: keeps tensors for backward. Errors in backward: a saved tensor was changed in place.
---@param ... Tensor  inputs, results or intermediate tensors
function Context:save(...)
  local saved, versions = { n = select("#", ...) }, {}
  for k = 1, saved.n do
    local t = select(k, ...)
    if t ~= nil then
      tensor.id_of(t, "ctx:save", ("argument %d"):format(k))
      local same = t:detach():keep()                    -- detach: an output must not own its own node
      saved[k] = same
      versions[k] = tensor.info_of(same).version
    end
  end
  self._saved, self._versions = saved, versions
end

--- To be called in forward. With false, backward receives nil instead of zeros for a result that received no gradient.
---@param on boolean  initially true
function Context:set_materialize_grads(on)
  opts.expect(on, opts.boolean, "set_materialize_grads: argument")
  self._no_zeros = not on
end

--- To be called in backward: returns the tensors that were passed to save.
---@return Tensor ...
function Context:saved()
  local saved = self._saved
  if not saved then return end
  for k = 1, saved.n do
    if saved[k] and tensor.info_of(saved[k]).version ~= self._versions[k] then
      errors.raise("saved tensor %d (%s) was changed in place after it was saved for backward", k,
        tostring(saved[k].shape))
    end
  end
  return unpack(saved, 1, saved.n)
end

local function drop_context(entry)
  local saved = entry.ctx._saved
  if not saved then return end
  for k = 1, saved.n do
    if saved[k] then saved[k]:release() end
  end
end

local in_ids, out_ids = ffi.new("ms_id[?]", 64), ffi.new("ms_id[?]", 64)

local function pack(...) return { n = select("#", ...), ... } end

-- Records a node with the inputs and outputs of forward.
local function record(def, ctx, args, outs)
  local n_in = args.n
  if n_in > 64 or outs.n > 64 then
    errors.raise("Function: %d arguments and %d results, expected at most 64 of each", n_in, outs.n)
  end
  for k = 1, n_in do in_ids[k - 1] = is_tensor(args[k]) and args[k].id or 0 end
  -- looks_of[k]: shape and options of result k, for the zeros that backward gets if that result receives no gradient
  local m, looks_of = 0, { n = outs.n }
  for k = 1, outs.n do
    local t = outs[k]
    if is_tensor(t) then
      looks_of[k] = { t.shape, { dtype = t.dtype, device = t.device } }
      for j = 1, n_in do
        if rawequal(t, args[j]) then
          t = t:detach()                                -- an input that forward returns needs a second id
          outs[k] = t
        end
      end
      out_ids[m] = t.id
      m = m + 1
    end
  end
  local key = new_key { def = def, ctx = ctx, n_in = n_in, outs = looks_of, drop = drop_context }
  if lib.ms_function_record(key, n_in, in_ids, m, out_ids) ~= 0 then
    drop_key(key)
    errors.fail()
  end
end

-- Applies a function to instances of tensor classes: once per inner tensor; the results become instances.
local apply
local function apply_inner(def, like, args)
  local outs, count = {}, #tensor.inner(like)
  for k = 1, count do
    local each = {}
    for j = 1, args.n do
      local parts = is_tensor(args[j]) and tensor.inner(args[j])
      if parts and #parts ~= count then
        errors.raise("Function: arguments have %d and %d inner tensors, expected equal numbers", count, #parts)
      end
      if parts then each[j] = parts[k] else each[j] = args[j] end
    end
    outs[k] = pack(apply(def, unpack(each, 1, args.n)))
  end
  local results = { n = outs[1].n }
  for j = 1, results.n do
    results[j] = outs[1][j]
    if is_tensor(results[j]) then
      local mine = {}
      for k = 1, count do mine[k] = outs[k][j] end
      results[j] = tensor.rebuild(mine, like)
    end
  end
  return unpack(results, 1, results.n)
end

function apply(def, ...)
  local args = { n = select("#", ...), ... }
  for k = 1, args.n do
    if is_tensor(args[k]) and args[k].id < 0 then return apply_inner(def, args[k], args) end
  end
  local ctx = setmetatable({ needs_grad = {} }, Context)
  local any = false
  for k = 1, args.n do
    local t = args[k]
    local needs = state.grad_mode ~= 0 and is_tensor(t) and tensor.info_of(t).requires_grad ~= 0
    ctx.needs_grad[k] = needs
    any = any or needs
  end
  local mode = lib.ms_set_grad_mode(0)
  local outs = pack(restore(mode, pcall(def.forward, ctx, ...)))
  if any then
    record(def, ctx, args, outs)
  elseif ctx._saved then
    drop_context { ctx = ctx }
  end
  return unpack(outs, 1, outs.n)
end

handlers[ffi.C.MS_EV_FUNCTION] = function(entry, event)
  if not entry then error("moonshard: internal error: the context of a function was released", 0) end
  local came, outs = event_tensors(event), entry.outs
  local grads, m = {}, 0
  for k = 1, outs.n do                          -- indexed by result; nil for results that are not tensors
    if outs[k] then
      m = m + 1
      grads[k] = came[m]
      if not came[m] and not entry.ctx._no_zeros then grads[k] = create.zeros(outs[k][1], outs[k][2]) end
    end
  end
  local results = pack(entry.def.backward(entry.ctx, unpack(grads, 1, outs.n)))
  for k = entry.n_in + 1, results.n do
    if results[k] ~= nil then
      errors.raise("Function: backward returned %d gradients, expected %d, as many as forward has arguments",
        results.n, entry.n_in)
    end
  end
  for k = 1, entry.n_in do
    local g = results[k]
    if g ~= nil and not is_tensor(g) then
      errors.raise("Function: backward returned %s for argument %d, expected a gradient or nil", errors.kind(g), k)
    end
    if not entry.ctx.needs_grad[k] then results[k] = nil end
  end
  return results, entry.n_in
end

--- Makes a function with its own backward, called as `f(…)`. backward receives a gradient for each result of forward
--- (zeros if none arrived, nil if the result is not a tensor) and returns a gradient or nil for each argument of
--- forward. `ctx.needs_grad[i]` says whether argument i needs a gradient; scripts may add fields to ctx whose names do
--- not begin with `_`.
---@param def { forward: fun(ctx: FunctionContext, ...): any, backward: fun(ctx: FunctionContext, ...): any }
---   forward: computes the results, without recording; backward: computes gradients of the arguments
---@return fun(...): any
function M.Function(def)
  local o = opts("Function", def, { forward = opts.fn, backward = opts.fn })
  local missing = not o.forward and "forward" or not o.backward and "backward"
  if missing then errors.raise("Function: option '%s' is missing, expected a function", missing) end
  return function(...) return apply(o, ...) end
end

-- ---- checkpoints ---------------------------------------------------------------------------------------

local function looks(t) return t.dtype .. " " .. tostring(t.shape) end

local rng = ffi.new "double[2]"

local function leave_region(region, mode, ...)
  lib.ms_checkpoint_end(region)
  return restore(mode, ...)
end

--- Runs fn(…) without keeping what its backward needs; backward runs fn again, with the same random numbers (Chen et
--- al. 2016). Errors in backward: the second run makes different tensors.
---@param fn function  a function or module; called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.checkpoint(fn, ...)
  for k = 1, select("#", ...) do
    local x = select(k, ...)
    if is_tensor(x) and x.id < 0 then
      errors.raise("checkpoint: argument %d is %s, but instances of tensor classes cannot be arguments; pass its inner tensors and make the instance inside the function",
        k, errors.kind(x))
    end
  end
  if not opts.fn.test(fn) then opts.wrong(fn, "a function or a module", "checkpoint: argument 1") end
  if state.grad_mode == 0 then return fn(...) end
  local args = pack(...)
  lib.ms_rng_get(rng, rng + 1)
  local entry = { fn = fn, args = args, seed = rng[0], offset = rng[1], autocast = state.autocast,
    around = autograd.around() }
  local mode, region = lib.ms_set_grad_mode(0), lib.ms_checkpoint_begin()
  local outs = pack(leave_region(region, mode, pcall(scope.run, "checkpoint", fn, ...)))
  local n_in, m, any = args.n, 0, false
  if n_in > 63 or outs.n > 64 then
    errors.raise("checkpoint: %d arguments and %d results, expected at most 63 arguments and 64 results", n_in, outs.n)
  end
  -- Keeps the arguments, with which backward runs fn again, until the node is freed.
  local kept = {}
  for k = 1, n_in do
    local t = args[k]
    in_ids[k - 1] = 0
    if is_tensor(t) then
      in_ids[k - 1] = t.id
      local same = t:detach():keep()
      kept[#kept + 1] = same
      args[k] = { same = same, requires_grad = tensor.info_of(t).requires_grad ~= 0 }
      any = any or args[k].requires_grad
    else
      args[k] = { value = t }
    end
  end
  entry.drop = function()
    for _, t in ipairs(kept) do t:release() end
  end
  -- fn may use parameters. If no argument requires grad, a new leaf that requires grad is added as an argument, so that
  -- the engine records the node.
  if not any then
    local leaf = create.zeros(1, { requires_grad = true })
    in_ids[n_in] = leaf.id
    args[n_in + 1] = {}
    args.n = n_in + 1
  end
  entry.outs, entry.looks, entry.n_outs = {}, {}, outs.n
  for k = 1, outs.n do
    local t = outs[k]
    if is_tensor(t) then
      for j = 1, n_in do
        if in_ids[j - 1] == t.id then
          t = t:detach()
          outs[k] = t
        end
      end
      out_ids[m] = t.id
      m = m + 1
      entry.outs[m], entry.looks[m] = k, looks(t)
    end
  end
  local key = new_key(entry)
  if lib.ms_checkpoint_record(key, args.n, in_ids, m, out_ids) ~= 0 then
    drop_key(key)
    entry.drop()
    errors.fail()
  end
  return unpack(outs, 1, outs.n)
end

handlers[ffi.C.MS_EV_RECOMPUTE] = function(entry, _, run)
  if not entry then error("moonshard: internal error: the function of a checkpoint was released", 0) end
  local args, detached = { n = entry.args.n }, ffi.new("ms_id[?]", math.max(entry.args.n, 1))
  for k = 1, args.n do
    local a = entry.args[k]
    if a.same then
      args[k] = a.same:detach()
      if a.requires_grad then
        args[k]:requires_grad_()
        detached[k - 1] = args[k].id
      end
    else
      args[k] = a.value
    end
  end
  if lib.ms_checkpoint_inputs(run, args.n, detached) ~= 0 then errors.fail() end
  lib.ms_rng_get(rng, rng + 1)
  local seed, offset = rng[0], rng[1]
  lib.ms_rng_set(entry.seed, entry.offset)
  local mode, autocast = lib.ms_set_grad_mode(1), lib.ms_set_autocast(entry.autocast)
  local ok, outs = pcall(function()
    if entry.around then return pack(entry.around(entry.fn, unpack(args, 1, args.n))) end
    return pack(entry.fn(unpack(args, 1, args.n)))
  end)
  lib.ms_set_grad_mode(mode)
  lib.ms_set_autocast(autocast)
  lib.ms_rng_set(seed, offset)
  if not ok then error(outs, 0) end
  if outs.n ~= entry.n_outs then
    errors.raise("checkpoint: the number of results was %d when the function was recomputed, but %d in the forward; "
      .. "both must be the same", outs.n, entry.n_outs)
  end
  local list, any = {}, false
  for m, k in ipairs(entry.outs) do
    if not is_tensor(outs[k]) then
      errors.raise("checkpoint: result %d was %s when the function was recomputed, but a tensor in the forward; both must be the same",
        k, errors.kind(outs[k]))
    end
    if looks(outs[k]) ~= entry.looks[m] then
      errors.raise("checkpoint: result %d was %s when the function was recomputed, but %s in the forward; both must be the same",
        k, looks(outs[k]), entry.looks[m])
    end
    list[m] = outs[k]
    any = any or tensor.info_of(outs[k]).requires_grad ~= 0
  end
  -- The function is recomputed only if a gradient has arrived. Without this error the gradient would be lost.
  if not any then
    errors.raise "checkpoint: no result of the recomputed function has a graph, so no gradient passes through it; the function must do the same as in the forward"
  end
  return list, #entry.outs
end

return M
