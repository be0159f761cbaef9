-- SPDX-License-Identifier: MIT
--- Tensor classes: `ms.Tensor:extend("Name")`. An instance contains other tensors, its inner tensors. Every operation
--- runs on the 1st, 2nd … inner tensors of its arguments, and the results become an instance again.
---
---   local TwoTensor = ms.Tensor:extend "TwoTensor"
---   function TwoTensor:init(a, b) self.a, self.b = a, b end
---   function TwoTensor:inner_tensors() return { self.a, self.b } end
---
--- The engine has no tensor for an instance: its id is negative, and every engine call refuses it. Operations handle
--- instances only after such a refusal (the failure paths of tensor/init.lua), so they cost plain tensors nothing.
--- Gradients, hooks and lifetimes do not use operators and have methods here. Shape, dtype and device are those of the
--- first inner tensor.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local inner_tensors = require "moonshard.tensor.inner"
local tensor = require "moonshard.tensor"
local a_tensor = tensor.a_tensor
require "moonshard.tensor.ops"                  -- loaded first, because subclasses copy metamethods
require "moonshard.tensor.print"

local lib, args, a_in, a_out, a_i, a_f = engine.lib, engine.args, engine.a_in, engine.a_out, engine.a_i, engine.a_f
local Tensor, is_tensor, wrap = tensor.Tensor, tensor.is_tensor, tensor.wrap
local inner, rebuild, class_name = inner_tensors.inner, inner_tensors.rebuild, inner_tensors.class_name
local getmetatable, setmetatable, rawget, rawset, type, ipairs = getmetatable, setmetatable, rawget, rawset, type,
  ipairs

local M = { is_instance = inner_tensors.is_instance }

-- Makes an instance like t from fn(part) for each of its inner tensors.
local function map(t, fn)
  local list = inner(t)
  local out = {}
  for k = 1, #list do out[k] = fn(list[k], k) end
  return rebuild(out, t)
end
M.map = map

-- ---- operations ----------------------------------------------------------------------------------

local names = {}
-- An operator's name in scripts: add_ for add_scalar_, max for max_all.
local function name_of(number)
  local name = names[number]
  if not name then
    name = engine.ffi.string(lib.ms_op_at(number).name):gsub("_scalar", ""):gsub("_all$", "")
    names[number] = name
  end
  return name
end

-- An operator and its integer and floating-point arguments, copied from engine.args; the tensors are passed at each
-- run.
---@class TensorOperation
---@field name string  the operator's name in scripts
local Operation = { __name = "TensorOperation" }
Operation.__index = Operation
function Operation:__tostring() return "operation " .. self.name end

-- Runs the operator on a list of tensors. Returns its outputs and their number.
local function run(op, list)
  args.n_in, args.n_i, args.n_f = op.n_in, op.n_i, op.n_f
  for k = 1, op.n_in do a_in[k - 1] = list[k] ~= nil and list[k].id or 0 end
  for k = 1, op.n_i do a_i[k - 1] = op.i[k] end
  for k = 1, op.n_f do a_f[k - 1] = op.f[k] end
  tensor.call(op.number, list[1], list[2], list[3])
  local n, ids, out = args.n_out, {}, {}
  for j = 1, n do ids[j] = a_out[j - 1] end
  for j = 1, n do
    for k = 1, op.n_in do
      if list[k] ~= nil and list[k].id == ids[j] then out[j] = list[k] end
    end
    out[j] = out[j] or wrap(ids[j])
  end
  return out, n
end

-- Runs the operator on the 1st, 2nd … inner tensors of the instances in list; plain tensors are passed to each run.
local function run_inner(op, list)
  local first, parts, count = nil, {}, nil
  for k = 1, op.n_in do
    local p = list[k] ~= nil and inner(list[k])
    if p then
      parts[k] = p
      if first == nil then
        first, count = list[k], #p
      elseif #p ~= count then
        errors.raise("%s: %s has %d inner tensor%s, but %s has %d; their numbers must be equal", op.name,
          class_name(first), count, count == 1 and "" or "s", class_name(list[k]), #p)
      end
    end
  end
  if not first then return run(op, list) end
  local in_place = bit.band(lib.ms_op_at(op.number).flags, engine.ffi.C.MS_OP_INPLACE) ~= 0
  if in_place and not parts[1] then
    errors.raise("%s: a plain tensor cannot be changed in place by a %s", op.name, class_name(first))
  end
  local results, n = {}, 0
  for k = 1, count do
    local each = {}
    for j = 1, op.n_in do
      if parts[j] then each[j] = parts[j][k] else each[j] = list[j] end
    end
    results[k], n = run(op, each)
  end
  if in_place then return { list[1] }, 1 end
  local out = {}
  for j = 1, n do
    local mine = {}
    for k = 1, count do mine[k] = results[k][j] end
    -- An operator that has nothing to do returns its arguments, the inner tensors: the result is then the instance.
    for i = 1, op.n_in do
      local same = parts[i] ~= nil
      for k = 1, count do same = same and rawequal(parts[i][k], mine[k]) end
      if same then out[j] = list[i] end
    end
    out[j] = out[j] or rebuild(mine, first)
  end
  return out, n
end

-- For dispatch functions: op(…) runs the operator, on plain tensors or on the inner tensors of instances.
function Operation:__call(...)
  local out, n = run_inner(self, { ... })
  return unpack(out, 1, n)
end

local function dispatch(op, list)
  for k = 1, op.n_in do
    local own = list[k] ~= nil and list[k].id < 0 and getmetatable(list[k]).dispatch
    if own then
      local out = { own(op, unpack(list, 1, op.n_in)) }
      for j = 1, #out do
        if not is_tensor(out[j]) then
          errors.raise("%s: dispatch of %s returned %s, expected a tensor", class_name(list[k]), op.name,
            errors.kind(out[j]))
        end
      end
      return out, #out
    end
  end
  return run_inner(op, list)
end

-- Stores ids of the results in engine.a_out, by which wrap later finds the objects. A plain tensor is stored under a
-- new negative id, so that wrap returns the same object.
local function hand_over(out, n, list, n_in)
  for j = 1, n do
    local t = out[j]
    local id = t.id
    local given = id >= 0
    if given then
      id = inner_tensors.new_id()
    else
      for k = 1, n_in do given = given or rawequal(list[k], t) end
    end
    if not given or t.id >= 0 then inner_tensors.hand_over(id, t) end
    a_out[j - 1] = id
  end
  args.n_out = n
end

-- Called when the engine has refused the call in engine.args. If its arguments include an instance, runs the operator
-- (by the class's dispatch, or else on inner tensors) and returns true; otherwise returns false. a, b, c: the first
-- arguments, if the caller has them.
tensor.on_refused_call(function(number, a, b, c)
  local list, found = {}, false
  local n_in = args.n_in
  for k = 1, n_in do
    local id = a_in[k - 1]
    if id < 0 then
      list[k] = inner_tensors.take(id)
      found = true
    elseif id > 0 then
      list[k] = a and a.id == id and a or b and b.id == id and b or c and c.id == id and c
        or setmetatable({ id = id }, Tensor)
    end
  end
  if not found then return false end
  local op = setmetatable({ number = number, name = name_of(number), n_in = n_in, n_i = args.n_i, n_f = args.n_f,
    i = {}, f = {} }, Operation)
  for k = 1, op.n_i do op.i[k] = a_i[k - 1] end
  for k = 1, op.n_f do op.f[k] = a_f[k - 1] end
  local out, n = dispatch(op, list)
  hand_over(out, n, list, n_in)
  return true
end)

-- ---- the class -----------------------------------------------------------------------------------

---@class InnerTensor: Tensor
local Instance = tensor.subclass "Tensor"
local methods = Instance.methods
local own_getters, own_setters = {}, {}

-- Fields are searched in `more`, then in own_getters, then in the getters of plain tensors.
local function install(cls, own_methods, more)
  tensor.install(cls, own_methods, more and setmetatable(more, { __index = own_getters }) or own_getters, own_setters)
end

local function construct(cls, ...)
  local self = inner_tensors.new_object(cls)
  local init = cls.init
  if not init then errors.raise("%s: a tensor class must define init(…), which sets its fields", cls.__name) end
  init(self, ...)
  inner(self)
  return self
end

--- Makes a class of tensors that consist of other tensors. init(…) sets the fields of an instance; inner_tensors()
--- returns its inner tensors, whose number must not change. An operation runs on the 1st, 2nd … inner tensors of its
--- arguments, and from_inner(list, like), or else `Name(unpack(list))`, makes an instance from the results. A class
--- that defines dispatch(op, …) runs operations itself. Shape, dtype and device are those of the first inner tensor.
---@param base table  ms.Tensor or a class that extends it
---@param name string  name of the class
---@return table class
local function extend(base, name)
  if type(name) ~= "string" or name == "" then opts.wrong(name, "a class name", "extend: argument 1") end
  if base ~= Tensor and not base.__isa[Instance] then
    errors.raise("extend: %s is not a class of tensors with inner tensors; extend ms.Tensor", base.__name)
  end
  local cls = tensor.subclass(name, base == Tensor and Instance or base)
  rawset(cls, "__construct", construct)
  install(cls, cls.methods)
  return cls
end
rawset(Tensor, "extend", extend)
rawset(Instance, "extend", extend)

-- Maps a tensor class to the class of its parameters, whose instances belong to both that class and nn.Parameter.
local parameter_classes = setmetatable({}, { __mode = "k" })

--- The class of parameters made from instances of cls.
function M.parameter_class(cls, Parameter)
  cls = rawget(cls, "__plain_class") or cls
  local made = parameter_classes[cls]
  if not made then
    made = tensor.subclass(cls.__name, cls)
    for ancestor in pairs(Parameter.__isa) do made.__isa[ancestor] = true end
    rawset(made, "__param", true)
    rawset(made, "__plain_class", cls)
    install(made, made.methods)
    parameter_classes[cls] = made
  end
  return made
end

-- ---- fields --------------------------------------------------------------------------------------

--- An instance made of the inner tensors' gradients, nil if none has one; an inner tensor without a gradient gets one
--- of zeros. Returns the same object as long as the gradients stay the same.
function own_getters.grad(t)
  local list = inner(t)
  local grads, any = {}, false
  for k = 1, #list do
    grads[k] = list[k].grad or false
    any = any or grads[k]
  end
  if not any then
    rawset(t, "_grad", nil)
    return nil
  end
  for k = 1, #list do
    if not grads[k] then
      list[k].grad = require("moonshard.tensor.create").zeros_like(list[k])
      grads[k] = list[k].grad
    end
  end
  local seen = rawget(t, "_grad")
  local same = seen ~= nil
  if same then
    for k, g in ipairs(inner(seen)) do same = same and rawequal(g, grads[k]) end
  end
  if not same then
    seen = rebuild(grads, t)
    rawset(t, "_grad", seen)
  end
  return seen
end

function own_setters.grad(t, g)
  local list, parts = inner(t), nil
  if g ~= nil then
    opts.expect(g, a_tensor, "grad: value")
    parts = inner(g)
    if not parts or #parts ~= #list then
      errors.raise("grad: the gradient of a %s must be an instance of a tensor class with %d inner tensor%s, got %s",
        class_name(t), #list, #list == 1 and "" or "s", errors.kind(g))
    end
  end
  for k = 1, #list do list[k].grad = parts and parts[k] or nil end
  rawset(t, "_grad", g)
end

function own_getters.requires_grad(t) return inner(t)[1].requires_grad end
function own_setters.requires_grad(t, on)
  for _, part in ipairs(inner(t)) do part.requires_grad = on end
end

-- ---- methods that are not operators -------------------------------------------------------------

function methods.item(t) return inner(t)[1]:item() end
function methods.tolist(t) return inner(t)[1]:tolist() end
function methods.data_ptr(t) return inner(t)[1]:data_ptr() end
function methods.detach(t) return map(t, function(part) return part:detach() end) end

local function each(name)
  methods[name] = function(t, ...)
    for _, part in ipairs(inner(t)) do part[name](part, ...) end
    return t
  end
end
each "release"
each "keep"
each "requires_grad_"

function methods.is_released(t) return inner(t)[1]:is_released() end

local Handles = { __name = "Handle" }
Handles.__index = Handles
function Handles:remove()
  for _, handle in ipairs(self) do handle:remove() end
end

--- Lets backward call fn(grad) for the gradient of each inner tensor. What fn returns, if anything, replaces it.
function methods.register_hook(t, fn)
  local handles = setmetatable({}, Handles)
  for k, part in ipairs(inner(t)) do handles[k] = part:register_hook(fn) end
  return handles
end

--- Lets a backward call fn(t) once, after it has added the gradients of all inner tensors.
function methods.register_post_accumulate_grad_hook(t, fn)
  opts.expect(fn, opts.fn, "register_post_accumulate_grad_hook: hook")
  local handles, list = setmetatable({}, Handles), inner(t)
  local landed, n = {}, 0                       -- the inner tensors that got gradients in this backward; their number
  local self = setmetatable({ t }, { __mode = "v" })
  for k, part in ipairs(list) do
    handles[k] = part:register_post_accumulate_grad_hook(function()
      if landed[k] then landed, n = {}, 0 end   -- the backward before did not reach all of them
      landed[k], n = true, n + 1
      if n < #list then return end
      landed, n = {}, 0
      if self[1] then fn(self[1]) end
    end)
  end
  return handles
end

function own_getters.is_leaf(t) return inner(t)[1].is_leaf end

M.Instance, M.install, M.extend = Instance, install, extend
return M
