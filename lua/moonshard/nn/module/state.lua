-- SPDX-License-Identifier: MIT
--- Module: modes (training, requires_grad), moving to devices and dtypes, and state dicts.
local capture = require "moonshard.autograd.capture"
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local base = require "moonshard.nn.module.register"
local no_grad = require "moonshard.autograd".no_grad
local Parameter = require "moonshard.nn.module.parameter".Parameter

local lib, raise, show, is_tensor = engine.lib, errors.raise, errors.kind, tensor.is_tensor
local Module, is_parameter, walk, join = base.Module, base.is_parameter, base.walk, base.join
local concat, insert, sort = table.concat, table.insert, table.sort

-- ---- modes, devices and dtypes ------------------------------------------------------------------

--- Sets the training mode of the module and its descendants, which dropout and batch norm use.
---@param mode? boolean  false: evaluation mode (default: true)
---@return Module self
function Module:train(mode)
  if mode == nil then mode = true end
  opts.expect(mode, opts.boolean, "train: argument 1")
  for _, m in ipairs(self:modules()) do m._slots.training = mode end
  capture.touch()
  return self
end

--- As train(false).
---@return Module self
function Module:eval() return self:train(false) end

--- Sets whether gradients of all parameters are computed.
---@param on? boolean  whether backward computes them (default: true)
---@return Module self
function Module:requires_grad_(on)
  if on == nil then on = true end
  opts.expect(on, opts.boolean, "requires_grad_: argument 1")
  -- Not parameters(), which leaves out those that fsdp.FSDP has put into a flat parameter.
  for _, m in ipairs(self:modules()) do
    for _, name in ipairs(rawget(m, "_params")) do
      local p = rawget(m, "_slots")[name]
      if p ~= nil then p:requires_grad_(on) end
    end
  end
  return self
end

--- Clears the gradients of all parameters: sets them to nil, or to 0 if set_to_none is false.
---@param given? { set_to_none: boolean }
---@return Module
function Module:zero_grad(given)
  local o = opts("zero_grad", given, { set_to_none = true })
  for _, p in ipairs(self:parameters()) do
    if p.id >= 0 then lib.ms_unit_drop_saved_grad(p.id) end
    if o.set_to_none then
      p.grad = nil
    elseif p.grad then
      local grad = p.grad
      if grad.requires_grad then                -- the gradient is part of a graph, where its value must not change
        p.grad = grad:detach():zero_()
      else
        grad:zero_()
      end
    end
  end
  return self
end

--- Calls fn on this module and its descendants, children first.
---@param fn fun(m: Module)  called with each module
---@return Module self
function Module:apply(fn)
  walk(self, "", {}, {}, {}, {})              -- raises if the module contains itself
  opts.expect(fn, opts.fn, "apply: argument 1")
  for _, child in ipairs(self:children()) do child:apply(fn) end
  fn(self)
  return self
end

-- Makes t refer to the data of `at`. For instances of a tensor class, makes each inner tensor of t refer to the data of
-- the same inner tensor of `at`.
local point
function point(t, at)
  local parts = tensor.inner(t)
  if parts then
    for k, part in ipairs(tensor.inner(at)) do point(parts[k], part) end
    return
  end
  if lib.ms_set_data(t.id, at.id) ~= 0 then errors.fail(t, at) end
end

-- Replaces the data of every parameter, its gradient and every buffer by change(t). The tensor objects stay the same,
-- so sharing is preserved. For sharded parameters whole(unit) is called once per unit; it returns a status.
local function convert(self, change, whole)
  no_grad(function()
    local units = {}
    for _, p in ipairs(self:parameters()) do
      local unit = lib.ms_unit_of(p.id < 0 and tensor.inner(p)[1].id or p.id)
      if unit ~= 0 then
        if not units[unit] then
          units[unit] = true
          errors.check(whole(unit), p)
          local owner = rawget(p, "_unit")
          -- The next gather searches for all-gather extensions again.
          if owner then owner.looked, owner.extensions = nil, nil end
        end
      else
        local grad = p.grad
        if grad then p.grad = nil end
        point(p, change(p))
        if grad then p.grad = change(grad) end
      end
    end
    for _, b in ipairs(self:buffers()) do point(b, change(b)) end
  end)
  return self
end

local is_dtype = {}
for _, name in ipairs(dtypes.names) do is_dtype[name] = true end

--- Moves parameters and buffers to a device and converts floating point ones to a dtype; a tensor as argument gives its
--- own device and dtype.
---@param ... string|Tensor|{ device: string, dtype: string }
---   name of a device, name of a dtype, a table with both names, or a tensor whose device and dtype to take
---@return Module
function Module:to(...)
  local device, dtype
  for i = 1, select("#", ...) do
    local x = select(i, ...)
    if is_tensor(x) then
      device, dtype = x.device, x.dtype
    elseif is_dtype[x] then
      dtype = x
    elseif opts.is(x) then
      local o = opts("to", x, { device = opts.string, dtype = opts.string })
      device, dtype = o.device or device, o.dtype or dtype
    elseif x ~= nil then
      device = dtypes.canonical_device(x, "to")
    end
  end
  if dtype and not dtypes.is_float(dtypes.number(dtype, "to")) then
    raise("to: a module can only be converted to floating point dtypes, got '%s'", dtype)
  end
  return convert(self, function(t)
    local x = t:detach()
    if device then x = x:to(device) end
    if dtype and dtypes.is_float(dtypes.number(x.dtype)) then x = x:to(dtype) end
    return x
  end, function(unit)
    return lib.ms_unit_to(unit, device and dtypes.device(device, "to") or -1, dtype and dtypes.number(dtype, "to")
      or -1, 1)
  end)
end

--- Moves parameters and buffers to a GPU: as `to("cuda")` or `to("cuda:" .. index)`.
---@param index? integer  from 0
---@return Module
function Module:cuda(index)
  opts.need(index == nil or opts.whole_from(0).test(index), index, "a whole number from 0", "cuda: device")
  return self:to(index and "cuda:" .. index or "cuda")
end

--- Moves parameters and buffers to the CPU.
---@return Module
function Module:cpu() return self:to("cpu") end

--- Casts floating point parameters and buffers to float32.
---@return Module self
function Module:float() return self:to("float32") end
--- Casts floating point parameters and buffers to float64.
---@return Module self
function Module:double() return self:to("float64") end
--- Casts floating point parameters and buffers to float16.
---@return Module self
function Module:half() return self:to("float16") end
--- Casts floating point parameters and buffers to bfloat16.
---@return Module self
function Module:bfloat16() return self:to("bfloat16") end

--- Gives parameters and buffers uninitialised memory on a device, for example if they are on "meta".
---@param device string|{ device: string }  "cpu", "cuda", "cuda:1" or "meta"
---@return Module
function Module:to_empty(device)
  if opts.is(device) then device = opts("to_empty", device, { device = opts.required }).device end
  local number = dtypes.device(device, "to_empty")
  return convert(self, function(t) return create.empty_like(t, { device = device }) end,
    function(unit) return lib.ms_unit_to(unit, number, -1, 0) end)
end

-- ---- state --------------------------------------------------------------------------------------

local function is_persistent(m, name) return not (m._transient and m._transient[name]) end

-- Returns the names, the values and the owners ({ module, field }) of all parameters and persistent buffers, module by
-- module, parameters first; a shared one occurs under each of its names. Flat parameters are omitted.
function Module._state(self)
  local names, modules = {}, {}
  walk(self, "", nil, names, modules, {})
  local out, values, owners = {}, {}, {}
  for i, m in ipairs(modules) do
    for _, list in ipairs { "_params", "_buffers" } do
      for _, name in ipairs(m[list]) do
        local value = m._slots[name]
        if value ~= nil and (list == "_params" and not rawget(value, "_flat") or list == "_buffers"
          and is_persistent(m, name)) then
          out[#out + 1], values[#values + 1] = join(names[i], name), value
          owners[#owners + 1] = { m, name }
        end
      end
    end
  end
  return out, values, owners
end

--- Every parameter and persistent buffer, under each of its names: detached tensors that share storage with the module;
--- and extra states.
---@return table<string, Tensor>
function Module:state_dict()
  self:_before_saving()
  local names, values = self:_state()
  local sd = {}
  for i, name in ipairs(names) do sd[name] = values[i]:detach() end
  return self:_after_saving(sd)
end

-- Maps names of this model to names in which containers count from 0: "net.1.weight" -> "net.0.weight".
function Module._names_from_0(self)
  local prefixes, modules, is_position = {}, {}, {}
  walk(self, "", nil, prefixes, modules, {})
  for k, m in ipairs(modules) do
    for i in ipairs(m) do is_position[join(prefixes[k], tostring(i))] = true end
    for _, name in ipairs(m._counted and m._params or {}) do is_position[join(prefixes[k], name)] = true end
  end
  local from_0 = {}
  for _, list in ipairs { (self:_state()), (self:_extras()) } do
    for _, name in ipairs(list) do
      local path, parts = "", {}
      for part in name:gmatch "[^.]+" do
        path = join(path, part)
        parts[#parts + 1] = is_position[path] and ("%d"):format(tonumber(part) - 1) or part
      end
      from_0[name] = concat(parts, ".")
    end
  end
  return from_0
end

-- The state dict with this model's names. count_from: 0 or 1, the number of the first element of a container in sd's
-- names. Unknown names are renumbered, too, so that none equals a name of the model.
function Module._renamed(self, sd, count_from)
  if count_from == 1 then return sd end
  local out, taken = {}, {}
  for name, key in pairs(self:_names_from_0()) do
    out[name] = sd[key]
    taken[key] = true
  end
  for key, t in pairs(sd) do
    if not taken[key] then
      out[type(key) == "string" and key:gsub("%f[^%z.]%d+%f[%z.]", function(n) return ("%d"):format(n + 1) end)
        or key] = t
    end
  end
  return out
end

-- The number of names that only one of the two tables has.
local function lacking(known, sd)
  local n = 0
  for name in pairs(known) do
    if sd[name] == nil then n = n + 1 end
  end
  for name in pairs(sd) do
    if not known[name] then n = n + 1 end
  end
  return n
end

-- A hint for the case that names do not match because the state dict counts from 0 and this model from 1; otherwise
-- nil.
local function counts_from_0(self, known, sd)
  local from_0, example = self:_names_from_0(), nil
  local other = {}
  for name, key in pairs(from_0) do other[key] = name end
  for name in pairs(sd) do
    if not known[name] and other[name] and (example == nil or name < example) then example = name end
  end
  if not example or lacking(other, sd) >= lacking(known, sd) then return nil end
  return ("The state dict counts the elements of containers from 0 (it has \"%s\", the model \"%s\"): load it with { count_from = 0 }.")
    :format(example, other[example])
end

local function check_fit(name, value, t)
  if not is_tensor(t) then return ("While copying '%s': a tensor expected, got %s."):format(name, show(t)) end
  if tostring(t.shape) ~= tostring(value.shape) then
    return ("size mismatch for %s: copying a param with shape %s from checkpoint, the shape in current model is %s.")
      -- _whole_shape: set for a piece of an FSDP instance's parameter.
      :format(name, tostring(t.shape), tostring(rawget(value, "_whole_shape") or value.shape))
  end
end

--- Compares a state dict with the model; raises if an entry is no tensor or has another shape, or, with strict, if the
--- names do not match, unless hooks may edit the names. o: the options strict and count_from.
---@param fits? fun(name: string, value: Tensor, t: any): string?  what is wrong with t for value, or nil
---@return string[] missing, string[] unexpected
function Module._check_state(self, sd, o, fits)
  fits = fits or check_fit
  local names, values = self:_state()
  local known, missing, unexpected, wrong = {}, {}, {}, {}
  for i, name in ipairs(names) do
    known[name] = true
    if sd[name] == nil then missing[#missing + 1] = name else wrong[#wrong + 1] = fits(name, values[i], sd[name]) end
  end
  for _, name in ipairs((self:_extras())) do
    known[name] = true
    if sd[name] == nil then missing[#missing + 1] = name end
  end
  for name in pairs(sd) do
    if not known[name] then unexpected[#unexpected + 1] = tostring(name) end
  end
  sort(unexpected)
  local hint = o.count_from == 1 and #unexpected > 0 and counts_from_0(self, known, sd) or nil
  local later = self:_edits_names()                     -- post hooks edit the names, then _after_loading raises
  for k, fault in ipairs(o.strict and not later and Module._name_faults(missing, unexpected) or {}) do
    insert(wrong, k, fault)
  end
  if #wrong > 0 then
    wrong[#wrong + 1] = hint
    self:_refuse_state(wrong)
  end
  if hint then log.warn("load_state_dict: " .. hint) end
  return missing, unexpected
end

--- Checks the option count_from and returns it.
function Module._count_from(n)
  if n ~= 0 and n ~= 1 then opts.wrong(n, "0 or 1", "load_state_dict: option 'count_from'") end
  return n
end

-- Raises if sd has a whole tensor for a sharded parameter whose unit is not gathered.
local function refuse_whole(self, sd)
  local names, values = self:_state()
  for k, name in ipairs(names) do
    local t, unit = sd[name], rawget(values[k], "_unit") and lib.ms_unit_of(values[k].id) or 0
    local is_whole = is_tensor(t) and not rawget(t, "_unit") and not rawget(t, "_of")
    if is_whole and unit ~= 0 and lib.ms_unit_get_state(unit).is_gathered == 0 then
      raise("load_state_dict: parameter '%s' is sharded over ranks, but the state dict has a whole tensor; use fsdp.load_state_dict(model, state_dict), which every rank calls",
        name)
    end
  end
end

--- Loads a state dict by copying; with assign, its tensors replace the module's. Everything is checked before anything
--- changes, but for one thing: load_state_dict post hooks may edit the lists of names, so these are checked after them.
--- State dicts of PyTorch count the elements of containers from 0 (their "net.0.weight" is "net.1.weight" here): load
--- them with count_from = 0. Errors: different shapes; with strict, missing or unknown names.
---@param sd table<string, Tensor>  tensors by name
---@param given? { strict: boolean, assign: boolean, count_from: 0|1 }
---@return string[] missing  prints as "<All keys matched successfully>" if both lists are empty
---@return string[] unexpected
function Module:load_state_dict(sd, given)
  local o = opts("load_state_dict", given, { strict = true, assign = false, count_from = 1 })
  Module._expect_state(sd, "load_state_dict: argument 1")
  return self:_load(self:_before_loading(sd, Module._count_from(o.count_from)), o)
end

--- Loads a state dict that _before_loading has returned. o: the options strict, assign and count_from.
---@return string[] missing, string[] unexpected
function Module._load(self, sd, o)
  local missing, unexpected = self:_check_state(sd, o)
  if not o.assign then refuse_whole(self, sd) end
  local names, values, owners = self:_state()
  no_grad(function()
    local taken = {}                          -- old tensor -> new tensor, to preserve sharing
    for i, name in ipairs(names) do
      local t, now = sd[name], values[i]
      if t ~= nil then
        if not o.assign then
          now:copy_(t)
        else
          local new = taken[now]
          if not new then
            new = t:detach()
            if is_parameter(now) then new = Parameter(new, { requires_grad = now.requires_grad }) end
            taken[now] = new
          end
          local m, field = owners[i][1], owners[i][2]
          m[field] = new
        end
      end
    end
  end)
  self:_after_loading(function(name) return sd[name] end, missing, unexpected, o.strict)
  return Module._printed_names(missing, unexpected)
end

opts.fix(Module, { "state_dict" })

return Module
