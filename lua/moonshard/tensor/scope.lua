-- SPDX-License-Identifier: MIT
--- Scopes release the tensors that are made inside them. `ms.scope(fn)`, `ms.steps(n)` and module calls (`scope.run`)
--- open scopes. The engine keeps the chains of open scopes, one chain per coroutine.
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local lib, state, ffi = engine.lib, engine.state, engine.ffi
local Tensor, classes, own = tensor.Tensor, tensor.classes, tensor.own
local getmetatable, type, pcall, select, error, next = getmetatable, type, pcall, select, error, next
-- Locals, because module calls often run in LuaJIT's interpreter, where looking a function of the library up is slow.
local open_scope, close_scope = lib.ms_scope_open, lib.ms_scope_close

local M = {}

-- ---- results of scopes --------------------------------------------------------------------------

-- Other objects that scopes returned or M.keep got: tensors in them are released with their scope, and errors about
-- such a tensor look for it here.
local opaque = setmetatable({}, { __mode = "k" })

-- Appends the tensors in a result to list: value itself, or those in plain tables (without a metatable) and in objects
-- whose metatable has `__tensors`, such as distributions.
local function gather(value, list, seen)
  if type(value) ~= "table" then return end
  local mt = getmetatable(value)
  if mt == Tensor or (mt ~= nil and classes[mt]) then
    if value.id >= 0 then
      list[#list + 1] = value
    else
      for _, part in ipairs(tensor.flat { value }) do list[#list + 1] = part end
    end
  elseif not opts.may_hold_tensors(value) then
    opaque[value] = true
  elseif not seen[value] then
    seen[value] = true
    -- The order does not matter: all tensors are kept.
    for _, v in next, value do gather(v, list, seen) end
  end
end

local MOST = 1e5                       -- tables that a search for a released tensor visits

-- Whether t is in value or in tables of it. seen: the tables that were visited; seen.n: their number.
local function holds(value, t, seen)
  if rawequal(value, t) then return true end
  if type(value) ~= "table" or seen[value] or seen.n > MOST then return false end
  seen[value], seen.n = true, seen.n + 1
  for _, v in next, value do
    if holds(v, t, seen) then return true end
  end
  return false
end

errors.explain_release(function(t)
  local seen = { n = 0 }
  for object in next, opaque do
    if holds(object, t, seen) then
      return "; it is in an object with a metatable: scopes and ms.keep find tensors in plain tables, and in objects whose metatable has __tensors = true"
    end
  end
  return ""
end)

local one = ffi.new "ms_id[1]"

local function close_many(handle, list)
  local ids = ffi.new("ms_id[?]", math.max(#list, 1))
  for k = 1, #list do ids[k - 1] = list[k].id end
  close_scope(handle, ids, #list)
  if state.scope == 0 then
    for k = 1, #list do own(list[k]) end
  end
end

-- Closes a scope but keeps the results a, …
local function close(handle, a, ...)
  if select("#", ...) == 0 then
    if type(a) ~= "table" then return close_scope(handle, nil, 0) end
    if getmetatable(a) == Tensor then
      one[0] = a.id
      close_scope(handle, one, 1)
      if state.scope == 0 then own(a) end
      return
    end
  end
  local list, seen = {}, {}
  gather(a, list, seen)
  for k = 1, select("#", ...) do gather((select(k, ...)), list, seen) end
  close_many(handle, list)
end

local function finish(handle, ok, ...)
  if not ok then
    close_scope(handle, nil, 0)
    error((...), 0)
  end
  close(handle, ...)
  return ...
end

--- Runs fn(…) in its own scope, which is closed when fn returns (its results are kept) or fails. The name is shown in
--- errors and must outlive the call: a literal or a class's name.
---@param name string  shown in errors
---@param fn function  called with the arguments that follow
function M.run(name, fn, ...) return finish(open_scope(name), pcall(fn, ...)) end

--- Opens a scope; close it with M.close(handle, results…).
function M.open(name) return open_scope(name) end

M.close = close

--- Closes a scope and all scopes inside it, after an error.
function M.abandon(handle) close_scope(handle, nil, 0) end

--- Runs fn(…). Every tensor made inside is released when fn returns or fails, except parameters, those that `keep` took
--- out of the scope, and those that fn returns, also inside plain tables and objects whose metatable has
--- `__tensors = true`.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.scope(fn, ...)
  if type(fn) ~= "function" then opts.expect(fn, opts.fn, "scope: argument") end
  tensor.record_first()
  return finish(open_scope "ms.scope", pcall(fn, ...))
end

--- Takes all tensors in x out of their scopes, as t:keep() does for one: they live until release() or the collector.
--- `best = ms.keep(ms.deepcopy(model:state_dict()))` keeps a copy of the weights beyond a step. Errors: a module or
--- another object, whose tensors belong to it already.
---@generic T
---@param x T  a tensor, or a table that has tensors, also in its tables
---@return T x
function M.keep(x)
  local mt = type(x) == "table" and getmetatable(x)
  if not (mt == Tensor or mt and classes[mt] or opts.may_hold_tensors(x)) then
    opts.wrong(x, "a tensor or a table of tensors" .. (errors.kind(x) == "a table"
      and ", whose metatable has __tensors = true, if it has one" or ""), "keep: argument 1")
  end
  local list = {}
  gather(x, list, {})
  for k = 1, #list do list[k]:keep() end
  return x
end

-- ---- steps --------------------------------------------------------------------------------------

-- `loops` maps the number of a chain of scopes, the scopes of a coroutine, to its loops (ms.steps, loader:epoch) whose
-- last step may be open. A loop that break or an error left stays in the list; a loop that still runs is recognised
-- by its state, which is a local of a frame on the stack.
local current_chain = 0
local loops = { [0] = {} }

local function runs_on_stack(loop)
  for level = 3, 1e6 do
    local info = debug.getinfo(level, "f")
    if not info then return false end
    for k = 1, 1e6 do
      local name, value = debug.getlocal(level, k)
      if not name then break end
      if value == loop then return true end
    end
  end
end

-- The names of the scopes of iterations, for errors. They are changed while the scope of a loop that was left closes.
local STEPS, EPOCH, LEFT = ffi.new("char[64]", "ms.steps"), ffi.new("char[64]", "loader:epoch"), ffi.new("char[64]",
  "the last step of a loop that break or an error left")

-- Closes the step scopes of loops that were left by break, return or an error.
local function close_left(list)
  for k = 1, #list do
    if lib.ms_scope_is_open(list[k].scope) == 0 or not runs_on_stack(list[k]) then
      ffi.copy(STEPS, LEFT, 64)
      ffi.copy(EPOCH, LEFT, 64)
      lib.ms_scope_close(list[k].scope, nil, 0)         -- also closes the scopes inside it
      ffi.copy(STEPS, "ms.steps")
      ffi.copy(EPOCH, "loader:epoch")
      for j = #list, k, -1 do list[j] = nil end
      return
    end
  end
end

local function next_step(loop, step)
  lib.ms_scope_close(loop.scope, nil, 0)
  if step >= loop.last then
    loop.scope = 0
    local list = loop.list
    for k = #list, 1, -1 do
      local top = list[k]
      list[k] = nil
      if top == loop then break end
    end
    if loop.outermost then lib.ms_dist_set_step(-1) end
    return nil
  end
  loop.scope = lib.ms_scope_open(loop.name)
  if loop.outermost then lib.ms_dist_set_step(step + 1) end     -- ranks compare their steps in collectives
  return step + 1
end

-- Steps of `ms.steps(n, fn)` are profiler ranges, like those of the iterator; if loops are nested, only steps of the
-- outermost loop are ranges.
local stepping, allocated = false, ffi.new "double[1]"

local function left_step(from, before, step, ok, ...)
  stepping = false
  lib.ms_range_close(from, before, ffi.C.MS_RANGE_STEP, ("step %d"):format(step), "")
  if not ok then error((...), 0) end
end

local function run_step(outermost, fn, step)
  local from = outermost and not stepping and lib.ms_range_open(allocated) or 0
  if from == 0 then
    finish(lib.ms_scope_open "ms.steps", pcall(fn, step))
    return
  end
  stepping = true
  left_step(from, allocated[0], step, pcall(finish, lib.ms_scope_open "ms.steps", pcall(fn, step)))
end

--- `for step in ms.steps(n) do … end`: each iteration is a scope. `ms.steps(n, fn)` calls fn(step) in a scope, which is
--- closed after an error, too. If a loop is left by break, return or an error, the scope of its last step stays open
--- until an enclosing scope ends or the next loop of steps begins, because Lua does not tell that a loop was left:
--- tensors made until then are released with it, unless they are kept. `ms.steps(n, fn)` and ms.scope(fn) around the
--- loop have no such gap.
---@param n integer  the last step; math.huge: no end
---@param given? fun(step: integer)|{ from: integer }  from: the first step (default: 1)
---@param fn? fun(step: integer)  called for each step
---@return fun(): integer?  the iterator; nothing if fn is given
function M.steps(n, given, fn)
  if opts.fn.test(given) then given, fn = nil, given end
  if type(n) ~= "number" then opts.wrong(n, "a number of steps", "steps: argument 1") end
  if n ~= n or n % 1 ~= 0 and n ~= math.huge then opts.wrong(n, "a whole number of steps", "steps: argument 1") end
  local o = opts("steps", given, { from = 1 })
  if o.from % 1 ~= 0 then opts.wrong(o.from, "a whole number", "steps: option 'from'") end
  if fn ~= nil then opts.expect(fn, opts.fn, "steps: the last argument") end
  tensor.record_first()
  local list = loops[current_chain]
  if #list > 0 then close_left(list) end
  if fn then
    for step = o.from, n do run_step(#list == 0 and current_chain == 0, fn, step) end
    return
  end
  local loop = { scope = 0, name = STEPS, last = n, list = list, outermost = #list == 0 and current_chain == 0 }
  list[#list + 1] = loop
  return next_step, loop, o.from - 1
end

--- An iterator whose iterations are scopes, as those of M.steps: each begins with begin(), whose results are the loop's
--- values. If the first of them is nil, the loop ends. Errors name the scope loader:epoch.
---@param begin fun(): any
---@return fun(): any
---@return table
function M.each(begin)
  local step, loop, n = M.steps(math.huge)
  loop.name = EPOCH
  local function values(first, ...)
    if first == nil then
      loop.last = n
      step(loop, n)
      n = nil
    end
    return first, ...
  end
  return function()
    if not n then return nil end                          -- called again after its end
    n = step(loop, n)
    return values(begin())
  end, loop
end

--- Whether a loop of M.each still runs: its state, which M.each returned, is a local of a frame on the stack.
---@param loop table
---@return boolean
function M.is_running(loop) return runs_on_stack(loop) == true end

--- For the prompt and for specs: closes the step loops that a line or a test left open, with the scopes inside them.
function M.close_all_left()
  local list = loops[current_chain]
  if list[1] then
    lib.ms_scope_close(list[1].scope, nil, 0)
    for k = #list, 1, -1 do list[k] = nil end
  end
end

-- ---- coroutines ---------------------------------------------------------------------------------

-- Each coroutine has its own chain of scopes, so a scope that is open across a yield does not own tensors of other
-- coroutines. It also has its own modes (grad, autocast, and those of context.lua), so a no_grad that is open across a
-- yield does not affect other coroutines. A chain is made at the first resume and freed when the coroutine ends or is
-- collected.
local chain_t = ffi.typeof "struct { int n, grad_mode, autocast; }"
local chains = setmetatable({}, { __mode = "k" })
local modes = setmetatable({}, { __mode = "k" })         -- by coroutine: its modes of context.lua
local resume, status, create, yield = coroutine.resume, coroutine.status, coroutine.create, coroutine.yield

local function free_chain(c)
  if c.n > 0 then
    lib.ms_chain_free(c.n)
    loops[c.n] = nil
    c.n = 0
  end
end

local function back(co, c, chain_before, grad_mode, autocast, before, ...)
  lib.ms_chain_switch(chain_before)
  modes[co] = context.copy()
  context.set(before)
  c.grad_mode, c.autocast = state.grad_mode, state.autocast
  if c.grad_mode ~= grad_mode then lib.ms_set_grad_mode(grad_mode) end
  if c.autocast ~= autocast then lib.ms_set_autocast(autocast) end
  current_chain = chain_before
  if status(co) == "dead" then
    free_chain(c)
    chains[co], modes[co] = nil, nil
  end
  return ...
end

local function resume_in_chain(co, ...)
  local c = type(co) == "thread" and chains[co]
  if not c then
    if type(co) ~= "thread" or status(co) ~= "suspended" then return resume(co, ...) end
    c = chain_t(lib.ms_chain_new(), state.grad_mode, state.autocast)
    if c.n < 0 then errors.fail() end
    ffi.gc(c, free_chain)
    chains[co] = c
    loops[c.n] = {}
  end
  local chain_before, before = lib.ms_chain_switch(c.n), context.copy()
  before.block = context.now.block
  if modes[co] then context.set(modes[co]) end
  context.now.block = nil
  current_chain = c.n
  local grad_mode, autocast = state.grad_mode, state.autocast
  if c.grad_mode ~= grad_mode then lib.ms_set_grad_mode(c.grad_mode) end
  if c.autocast ~= autocast then lib.ms_set_autocast(c.autocast) end
  return back(co, c, chain_before, grad_mode, autocast, before, resume(co, ...))
end

if not debug.getregistry()["moonshard.coroutines"] then
  debug.getregistry()["moonshard.coroutines"] = true
  coroutine.resume = resume_in_chain                    -- luacheck: ignore 122
  function coroutine.yield(...)                         -- luacheck: ignore 122
    context.check_yield()
    return yield(...)
  end
  function coroutine.wrap(fn)                           -- luacheck: ignore 122
    local co = create(fn)
    return function(...) return context.results(resume_in_chain(co, ...)) end
  end
end

return M
