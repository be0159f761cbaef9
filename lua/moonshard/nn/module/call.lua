-- SPDX-License-Identifier: MIT
--- Module: calls and hooks.
---
--- A call is a scope: tensors made during it are released at its end, except those that it returns. Calls without hooks
--- pack no arguments and make no closures. Internal protocol: `_pre`, `_post` (of forward), `_before` and `_back` (of
--- backward) are lists of hooks, or false; `_hooked` is true if at least one of them is a list.
local autograd = require "moonshard.autograd"
local capture = require "moonshard.autograd.capture"
local captured = require "moonshard.autograd.capture.modules"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local Function = require "moonshard.autograd.function".Function
local opts = require "moonshard.core.opts"
local ranges = require "moonshard.core.ranges"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
local base = require "moonshard.nn.module.register"

local lib, ffi = engine.lib, engine.ffi
local raise, show, is_tensor = errors.raise, errors.kind, tensor.is_tensor
local Module, forward_of = base.Module, base.forward_of
local getmetatable, setmetatable, rawset = getmetatable, setmetatable, rawset
local type, select, pcall, error, ipairs, unpack = type, select, pcall, error, ipairs, unpack

-- ---- errors -------------------------------------------------------------------------------------

-- Adds to an operator's message the path of the module that ran it: "gpt.blocks.3.attn: matmul: …". `failing` describes
-- the message that is being raised, so that every enclosing call can extend the path. It is weak, so that it does not
-- keep the module alive.
local failing = setmetatable({}, { __mode = "v" })

local function with_path(self, e)
  if type(e) ~= "string" then return e end
  if e ~= failing.text then
    local head, rest = e:match "^([^\n]-:%d+: )(.*)$"
    if not head then head, rest = "", e end
    local op = rest:match "^([%w_]+): "
    if not op or lib.ms_op_find(op) < 0 then return e end
    failing.head, failing.rest, failing.inner = head, rest, self
  end
  local path = self:class_name():gsub("^FSDP", ""):lower()
  if failing.inner ~= self then
    local found
    for name, m in self:named_modules() do
      if m == failing.inner then found = name break end
    end
    if not found then return e end              -- not registered below self: keep the path found so far
    path = path .. "." .. found
  end
  -- If the path is the operator's own name, the message keeps it once: not "linear: linear: …". A class whose name says
  -- more than the operator's gives its own: "CrossEntropyLoss: …", "BatchNorm1d: …".
  local named = failing.inner == self and failing.rest:match "^([%w_]+): "
  if named and named:gsub("_", "") == path then
    failing.text = failing.head .. failing.rest
  elseif named and named:gsub("_", "") == path:gsub("^sync", ""):gsub("loss$", ""):gsub("%dd$", "") then
    failing.text = failing.head .. self:class_name() .. failing.rest:sub(#named + 1)
  else
    failing.text = failing.head .. path .. ": " .. failing.rest
  end
  return failing.text
end

-- ---- calls --------------------------------------------------------------------------------------

local open, close, abandon = scope.open, scope.close, scope.abandon

local function finish(self, handle, ok, ...)
  if not ok then
    abandon(handle)
    error(with_path(self, (...)), 0)
  end
  close(handle, ...)
  return ...
end

local function no_forward(self) raise("%s has no forward, so it cannot be called", self:class_name()) end

local hooked_body               -- runs forward between its hooks

local recorded = false          -- a captured step is being recorded
capture.on_change(function(on) recorded = on end)

local function call(self, ...)
  if self._hooked then
    return finish(self, open(self._scope), pcall(hooked_body, self, { n = select("#", ...), ... }))
  end
  return finish(self, open(self._scope), pcall(forward_of(self) or no_forward, self, ...))
end

-- While a profile records, each call is a range whose name has the path from the outermost module: "blocks.1.attn
-- (Attention)".
local outermost
local paths_from = setmetatable({}, { __mode = "k" })       -- outermost -> module -> path

local function range_name(self)
  if self == outermost then return self:class_name() end
  local paths = paths_from[outermost]
  if not paths then
    paths = setmetatable({}, { __mode = "k" })
    paths_from[outermost] = paths
  end
  if paths[self] == nil then                                -- this is the first call, or a module was added
    -- remains false if the module is not registered
    paths[self] = false
    for path, m in outermost:named_modules() do paths[m] = path end
  end
  -- The path of a module inside a wrapper is that of the wrapper, which may be the outermost module.
  local path = paths[self] or ""
  return path ~= "" and ("%s (%s)"):format(path, self:class_name()) or self:class_name()
end

local function left_module(is_outermost, ...)
  if is_outermost then outermost = nil end
  return context.results(...)
end

local function profiled_call(self, ...)
  local is_outermost = not outermost
  if is_outermost then outermost = self end
  return left_module(is_outermost, pcall(ranges.module, range_name(self), call, self, ...))
end

local profiled = false
ranges.on_change(function(on)
  if on == profiled then return end
  profiled = on
  outermost = nil                                           -- a coroutine that was not resumed may have left it set
  paths_from = setmetatable({}, { __mode = "k" })           -- modules may have moved since
end)

function Module.__call(self, ...)
  if recorded then captured.note(self) end
  if profiled then return profiled_call(self, ...) end
  if self._hooked then return call(self, ...) end
  return finish(self, open(self._scope), pcall(forward_of(self) or no_forward, self, ...))
end

Module.__runs_forward = Module.__call

-- ---- hooks --------------------------------------------------------------------------------------

-- A hook's result as a list: a plain table with a field n or [1] is a list, anything else a single value.
local function as_list(value)
  if type(value) == "table" and getmetatable(value) == nil and (value.n ~= nil or value[1] ~= nil) then
    if not value.n then value.n = #value end
    return value
  end
  return { n = 1, value }
end

local function pack(...) return { n = select("#", ...), ... } end

local ids = ffi.new("ms_id[?]", engine.MAX_IN)

-- Writes the ids of the tensors among values to the array `ids`; 0 for other values.
local function fill_ids(self, values)
  if values.n > engine.MAX_IN then
    raise("%s: a full backward hook supports at most %d inputs or outputs, got %d", self:class_name(), engine.MAX_IN,
      values.n)
  end
  for k = 1, values.n do
    local id = is_tensor(values[k]) and values[k].id or 0
    if id < 0 then
      raise("%s: a full backward hook sees plain tensors only; value %d is %s", self:class_name(), k, show(values[k]))
    end
    ids[k - 1] = id
  end
end

-- Replaces the tensors among the values by those whose ids the engine returned.
local function take_ids(values)
  local out = { n = values.n }
  for k = 1, values.n do
    local v = values[k]
    if ids[k - 1] ~= 0 and is_tensor(v) and v.id ~= ids[k - 1] then v = tensor.wrap(ids[k - 1]) end
    out[k] = v
  end
  return out
end

-- Runs full backward pre-hooks with the gradients of a call's results. ctx.at[k]: the number of the result to which the
-- k-th gradient belongs.
local function before_backward(ctx, ...)
  local self, grads = ctx.module, { n = ctx.n }
  for k, at in ipairs(ctx.at) do grads[at] = (select(k, ...)) end
  for _, hook in ipairs(self._before or {}) do
    local changed = hook.fn(self, grads)
    if changed ~= nil then
      local list = as_list(changed)
      if list.n ~= grads.n then
        raise("%s: a full backward pre-hook returned %d gradient%s, expected %d", self:class_name(), list.n,
          list.n == 1 and "" or "s", grads.n)
      end
      grads = list
    end
  end
  local out = {}
  for k, at in ipairs(ctx.at) do out[k + 2] = grads[at] end
  return unpack(out, 1, #ctx.at + 2)
end

local watch = Function {
  forward = function(ctx, self, n_and_at, ...)
    ctx.module, ctx.n, ctx.at = self, n_and_at.n, n_and_at
    ctx:set_materialize_grads(false)
    return ...
  end,
  backward = before_backward,
}

-- Records an identity node around the results that need gradients; its backward runs the pre-hooks.
local function watched(self, out)
  local at, tensors = { n = out.n }, {}
  for k = 1, out.n do
    local t = out[k]
    if is_tensor(t) and t.requires_grad then
      if t.id < 0 then
        raise("%s: a full backward pre-hook sees plain tensors only; result %d is %s", self:class_name(), k, show(t))
      end
      at[#at + 1], tensors[#tensors + 1] = k, t
    end
  end
  if #at == 0 then return out end
  local new = pack(watch(self, at, unpack(tensors)))
  for k, place in ipairs(at) do out[place] = new[k] end
  return out
end

hooked_body = function(self, args)
  local pre, post, back, before = self._pre, self._post, self._back, self._before
  if recorded then captured.refuse_hooks(self) end
  if pre then
    for i = 1, #pre do
      local changed = pre[i].fn(self, args)
      if changed ~= nil then args = as_list(changed) end
    end
  end
  local token
  if back then
    fill_ids(self, args)
    token = lib.ms_module_hook_inputs(back.key, args.n, ids)
    if token == 0 then errors.fail() end
    args = take_ids(args)
  end
  local out = pack((forward_of(self) or no_forward)(self, unpack(args, 1, args.n)))
  if token then
    fill_ids(self, out)
    errors.check(lib.ms_module_hook_outputs(token, out.n, ids))
    out = take_ids(out)
  end
  if before then out = watched(self, out) end
  if post then
    for i = 1, #post do
      local bare = out
      if out.n <= 1 then bare = out[1] end
      local changed = post[i].fn(self, args, bare)
      if changed ~= nil then out = as_list(changed) end
    end
  end
  return unpack(out, 1, out.n)
end

-- Runs full backward hooks, when the gradients of a call's inputs have been computed.
autograd.handlers[ffi.C.MS_EV_MODULE_BACKWARD] = function(entry, event)
  local self = entry and entry[1]
  local back = self and self._back
  if not back then return nil, 0 end
  local all = autograd.event_tensors(event)
  local grad_in, grad_out = { n = event.n_first }, { n = event.n - event.n_first }
  for k = 1, grad_in.n do grad_in[k] = all[k] end
  for k = 1, grad_out.n do grad_out[k] = all[grad_in.n + k] end
  local changed = false
  for i = 1, #back do
    local result = back[i].fn(self, grad_in, grad_out)
    if result ~= nil then
      local list = as_list(result)
      if list.n ~= grad_in.n then
        raise("%s: a full backward hook returned %d gradient%s, expected %d", self:class_name(), list.n,
          list.n == 1 and "" or "s", grad_in.n)
      end
      grad_in, changed = list, true
    end
  end
  if changed then return grad_in, grad_in.n end
  return nil, 0
end

---@class ModuleHandle
local Handle = { __name = "Handle" }
Handle.__index = Handle

-- A copied module needs its own key, so that the engine's events reach the copy.
function Module._renew_key(self)
  self._back.key = autograd.new_key(setmetatable({ self }, { __mode = "v" }))
end

-- Lists of hooks are replaced, never changed, so that a hook may register and remove hooks while they run.
local function replace(self, list, hooks)
  local before = self[list]
  if #hooks == 0 then
    if list == "_back" and before then autograd.drop_key(before.key) end
    rawset(self, list, false)
  else
    if list == "_back" then
      hooks.key = before and before.key or autograd.new_key(setmetatable({ self }, { __mode = "v" }))
    end
    rawset(self, list, hooks)
  end
  rawset(self, "_hooked", (self._pre or self._post or self._back or self._before) and true or false)
end

--- Removes the hook. Idempotent.
function Handle:remove()
  local m = self.module
  if not m then return end
  self.module = nil
  local left = {}
  for _, hook in ipairs(m[self.list] or {}) do
    if hook ~= self.hook then left[#left + 1] = hook end
  end
  replace(m, self.list, left)
end

local function register(self, list, who, fn, given)
  local o = opts(who, given, { prepend = false })
  opts.expect(fn, opts.fn, "%s: hook", who)
  local hook, hooks = { fn = fn }, {}
  if o.prepend then hooks[1] = hook end
  for _, h in ipairs(self[list] or {}) do hooks[#hooks + 1] = h end
  if not o.prepend then hooks[#hooks + 1] = hook end
  replace(self, list, hooks)
  return setmetatable({ module = self, list = list, hook = hook }, Handle)
end

--- Registers fn(module, args), called before forward. What fn returns, if anything, replaces the arguments.
---@param fn fun(m: Module, args: table): any  args is a list with its length in n
---@param given? { prepend: boolean }  prepend: calls fn before the hooks that are registered already
---@return ModuleHandle
function Module:register_forward_pre_hook(fn, given)
  return register(self, "_pre", "register_forward_pre_hook", fn, given)
end

--- Registers fn(module, args, out), called after forward. What fn returns, if anything, replaces the output. out is a
--- list only if forward returned several values.
---@param fn fun(m: Module, args: table, out: any): any  args is a list with its length in n
---@param given? { prepend: boolean }  prepend: calls fn before the hooks that are registered already
---@return ModuleHandle
function Module:register_forward_hook(fn, given) return register(self, "_post", "register_forward_hook", fn, given) end

--- Registers fn(module, grad_in, grad_out), called when the gradients of the inputs have been computed. What fn
--- returns, if anything, replaces grad_in.
---@param fn fun(m: Module, grad_in: table, grad_out: table): any  grad_in and grad_out are lists with their lengths in n
---@param given? { prepend: boolean }  prepend: calls fn before the hooks that are registered already
---@return ModuleHandle
function Module:register_full_backward_hook(fn, given)
  return register(self, "_back", "register_full_backward_hook", fn, given)
end

--- Registers fn(module, grad_out), called before the gradients of the inputs are computed. What fn returns, if
--- anything, replaces grad_out.
---@param fn fun(m: Module, grad_out: table): any
---   grad_out is a list with its length in n; nil for results that are no tensors or got no gradient
---@param given? { prepend: boolean }  prepend: calls fn before the hooks that are registered already
---@return ModuleHandle
function Module:register_full_backward_pre_hook(fn, given)
  return register(self, "_before", "register_full_backward_pre_hook", fn, given)
end

return Module
