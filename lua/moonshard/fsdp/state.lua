--- State dicts of sharded models and of their optimizers. Collective: every rank calls these alike.
local assign = require "moonshard.fsdp.assign"
local class = require "moonshard.class"
local errors = require "moonshard.errors"
local flat = require "moonshard.fsdp.flat"
local module = require "moonshard.fsdp.module"
local nn = require "moonshard.nn"
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.opts"
local sharded = require "moonshard.fsdp.sharded"
local create = require "moonshard.tensor_create"
local tensor = require "moonshard.tensor"
local writeback = require "moonshard.fsdp.writeback"

local M = {}

local TYPES = { "full", "sharded", "local" }

local function check_module(who, m)
  if not class.isa(m, nn.Module) then errors.raise("%s: argument 1 is %s, expected a module", who, errors.kind(m)) end
end

local function check_optimizer(who, optim)
  if type(optim) ~= "table" or type(optim.param_groups) ~= "table" then errors.raise("%s: argument 2 is %s, expected an optimizer", who, errors.kind(optim)) end
end

-- ---- models --------------------------------------------------------------------------------------

--- Every parameter and persistent buffer by name. "full": plain whole tensors (on every rank, or with rank0_only an
--- empty table on the others); "sharded": sharded tensors; "local": this rank's rows. The last two share storage.
---@param m table
---@param given? {type: string, offload_to_cpu: boolean, rank0_only: boolean}
---@return table<string, Tensor>
function M.state_dict(m, given)
  check_module("state_dict", m)
  local o = opts("state_dict", given, { type = opts.one_of(TYPES, "full"), offload_to_cpu = false, rank0_only = false })
  local dist = require "moonshard.dist"
  local mine = not o.rank0_only or dist.rank() == 0
  module.reshard_all(m)
  writeback.write_back_all(module.units_below(m))
  local names, values = m:_state()
  local sd, gathered = {}, {}
  for i, name in ipairs(names) do
    local t = values[i]
    local out
    if not sharded.is_sharded(t) then
      local dtype = rawget(t, "_original_dtype")        -- a buffer that is cast for computing
      out = dtype and dtype ~= t.dtype and t:detach():to(dtype) or t:detach()
    elseif o.type == "sharded" then
      out = rawget(t, "_pieces") and sharded.around(t, t:to_local():detach()) or t:detach()
    elseif o.type == "local" then
      out = t:to_local():detach()
    else
      out = gathered[t]
      if not out then
        out = t:full_tensor()
        gathered[t] = out
      end
      if not mine then out:release() end
    end
    if mine and not (o.type == "local" and flat.is_concealed(t)) then
      sd[name] = o.offload_to_cpu and not sharded.is_sharded(out) and out:to "cpu" or out
    end
  end
  if o.type == "local" and mine then
    for name, p in flat.parameters_below(m) do sd[name] = p:detach() end
  end
  return sd
end

-- t, whatever its type, as a sharded tensor like p; nil when it fits in no way.
local function like(p, t)
  local whole = rawget(p, "_whole_shape")
  if sharded.is_sharded(t) then
    if tostring(t.shape) ~= tostring(whole or p.shape) then return nil end
    if p.id < 0 or t.id < 0 then return t end               -- tensor classes: part by part
    local part = sharded.part_like(p, t)
    return rawget(p, "_pieces") and part:reshape(p:to_local().shape) or sharded.around(p, part)
  end
  local shape = tostring(t.shape)
  if whole and rawget(p, "_pieces") then
    local piece = p:to_local()
    if shape == tostring(whole) then return sharded.part_of(p, t):reshape(piece.shape) end
    return shape == tostring(piece.shape) and t or nil
  end
  if shape == tostring(p.shape) then return sharded.around(p, sharded.part_of(p, t)) end
  if shape == tostring(p:to_local().shape) then return sharded.around(p, t) end
end

-- Rank 0's tensors on every rank, one at a time; before them prepare(what there are, by name).
local function from_rank0(m, sd, prepare, fn)
  local dist = require "moonshard.dist"
  local names, values = m:_state()
  local given = {}
  if dist.rank() == 0 then
    for name, t in pairs(sd) do          -- order does not matter: looked up by name
      if tensor.is_tensor(t) then given[name] = { dtype = t.dtype, shape = { unpack(t.shape) } } end
    end
  end
  given = dist.broadcast_object(given, { src = 0 })
  prepare(given)
  for i, name in ipairs(names) do
    local g = given[name]
    if g then
      local t = dist.rank() == 0 and sd[name]:contiguous() or create.empty(g.shape, { dtype = g.dtype })
      dist.broadcast(t, { src = 0 })
      fn(name, values[i], t)
    end
  end
  return given
end

--- Loads a state dict of any type. With broadcast_from_rank0 only rank 0's is read (the others give `{}`). With assign, what is on meta
--- gets memory where the state dict's tensors are (the CPU's when they come from rank 0); the rest is copied, as without.
---@param m table
---@param sd table<string, Tensor>
---@param given? {strict: boolean, broadcast_from_rank0: boolean, assign: boolean}
---@return string[] missing, string[] unexpected
function M.load_state_dict(m, sd, given)
  check_module("load_state_dict", m)
  local o = opts("load_state_dict", given, { strict = true, broadcast_from_rank0 = false, assign = false })
  if type(sd) ~= "table" or tensor.is_tensor(sd) then errors.raise("load_state_dict: argument 2 is %s, expected a table of tensors", errors.kind(sd)) end
  module.reshard_all(m)
  local function prepare(device_of)
    if o.assign then assign.make_room(m, device_of, o.strict) end
    module.refuse_meta(m, o.assign and not o.strict and device_of or nil)
  end
  if not o.broadcast_from_rank0 then prepare(assign.devices(sd)) end
  writeback.write_back_all(module.units_below(m))
  local fitted = {}
  if o.broadcast_from_rank0 then
    from_rank0(m, sd, function(there)
      local device_of = {}
      for name in pairs(there) do device_of[name] = "cpu" end           -- order does not matter: looked up by name
      prepare(device_of)
    end, function(name, now, t) fitted[name] = sharded.is_sharded(now) and like(now, t) or t end)
    -- What rank 0 has and the model has not is said there.
    for name, t in pairs(sd) do
      if fitted[name] == nil then fitted[name] = t end
    end
  else
    local names, values = m:_state()
    for i, name in ipairs(names) do
      local t = sd[name]
      if tensor.is_tensor(t) and sharded.is_sharded(values[i]) then t = like(values[i], t) or t
      elseif tensor.is_tensor(t) and sharded.is_sharded(t) then t = t:full_tensor() end
      fitted[name] = t
    end
    for name, t in pairs(sd) do            -- order does not matter: a copy
      if fitted[name] == nil then fitted[name] = t end
    end
  end
  -- Flat parameters, of a state dict of type "local": they stand for what they are made of.
  no_grad(function()
    local taken = {}
    for name, p, unit in flat.parameters_below(m) do
      local t = fitted[name]
      if tensor.is_tensor(t) and tostring(t.shape) == tostring(p.shape) then
        p:copy_(t)
        fitted[name] = nil
        taken[unit] = true
      end
    end
    local names, values = m:_state()
    for i, name in ipairs(names) do
      local unit = rawget(values[i], "_unit")
      if unit and taken[unit] then fitted[name] = values[i]:detach() end
    end
  end)
  return nn.Module.load_state_dict(m, fitted, { strict = o.strict })
end

-- ---- optimizers ----------------------------------------------------------------------------------

-- What an optimizer's parameter is, by original names: itself, or what its flat parameter is made of. Each with the
-- part of a state tensor v of that parameter that is its own.
local function members_of(p, names)
  local unit = rawget(p, "_flat")
  if not unit then return names[p] and { { name = names[p], p = p, part = function(v) return v end } } or {} end
  local list = {}
  for k, original in ipairs(unit.originals) do
    local first, n = flat.place_of(original)
    list[k] = { name = names[original], p = original, part = function(v) return v:narrow(1, first, n) end }
  end
  return list
end

-- Names of a state's fields: gathers follow, every rank in one order.
local function keys_of(entry)
  local keys = {}
  for key in pairs(entry) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end

--- `{state = {[name] = {step, exp_avg, …}}, param_groups = {{params = {names}, lr = …}}}`, whole tensors.
---@param m table
---@param optim table
---@param given? {type: string, rank0_only: boolean, offload_to_cpu: boolean}
function M.optim_state_dict(m, optim, given)
  check_module("optim_state_dict", m)
  check_optimizer("optim_state_dict", optim)
  local o = opts("optim_state_dict", given, { type = opts.one_of(TYPES, "full"), rank0_only = false, offload_to_cpu = false })
  local dist = require "moonshard.dist"
  local mine = not o.rank0_only or dist.rank() == 0
  local names, plain = flat.names_below(m), optim:state_dict()
  local out, position = { state = {}, param_groups = {} }, 0
  for g, group in ipairs(optim.param_groups) do
    local listed = {}
    for k, p in ipairs(group.params) do
      position = position + 1
      local members = members_of(p, names)
      if #members == 0 then errors.raise("optim_state_dict: parameter %d of group %d does not belong to the module", k, g) end
      local entry = plain.state[position]
      for _, member in ipairs(members) do
        listed[#listed + 1] = member.name
        if entry then
          local whole = {}
          for _, key in ipairs(keys_of(entry)) do
            local v = entry[key]
            if tensor.is_tensor(v) and v.ndim > 0 and sharded.is_sharded(member.p) then
              v = member.part(v)
              if o.type ~= "local" then v = sharded.around(member.p, v) end
              if o.type == "full" then v = v:full_tensor() end
            end
            whole[key] = v
          end
          if mine then out.state[member.name] = whole end
        end
      end
    end
    local copy = {}
    for key, value in pairs(plain.param_groups[g]) do copy[key] = value end   -- order does not matter: a copy
    copy.params = listed
    out.param_groups[g] = copy
  end
  return mine and out or {}
end

-- This rank's part of a state tensor of member, of whatever type the state is.
local function part_for(member, key, v)
  if not sharded.is_sharded(member.p) then return sharded.is_sharded(v) and v:full_tensor() or v end
  local piece = member.p:to_local()
  local shape, whole = tostring(v.shape), tostring(rawget(member.p, "_whole_shape") or member.p.shape)
  if sharded.is_sharded(v) and shape == whole then return sharded.part_like(member.p, v):reshape(piece.shape) end
  if shape == whole then return sharded.part_of(member.p, v):reshape(piece.shape) end
  if shape == tostring(piece.shape) then return v end
  return errors.raise("load_optim_state_dict: '%s' of '%s' has shape %s, the parameter %s", key, member.name, shape, whole)
end

-- The state of an optimizer's parameter, put together from that of its members; nil when none has any.
local function assemble(p, members, state)
  local entry
  for _, member in ipairs(members) do
    local given = state[member.name] or {}
    for _, key in ipairs(keys_of(given)) do
      local v = given[key]
      entry = entry or {}
      if tensor.is_tensor(v) and v.ndim > 0 then
        local part = part_for(member, key, v)
        if not rawget(p, "_flat") then
          entry[key] = part
        else
          entry[key] = entry[key] or create.zeros_like(p, { dtype = v.dtype })
          member.part(entry[key]):copy_(part)
        end
      else
        local before = entry[key]
        local a, b = tensor.is_tensor(v) and v:item() or v, tensor.is_tensor(before) and before:item() or before
        if before ~= nil and a ~= b then
          errors.raise("All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype: "
            .. "'%s' is %s and %s", key, tostring(b), tostring(a))
        end
        entry[key] = v
      end
    end
  end
  return entry
end

--- Loads what optim_state_dict gave, on any number of ranks.
---@param m table
---@param optim table
---@param sd table
function M.load_optim_state_dict(m, optim, sd, given)
  check_module("load_optim_state_dict", m)
  check_optimizer("load_optim_state_dict", optim)
  opts("load_optim_state_dict", given, {})
  if type(sd) ~= "table" or type(sd.state) ~= "table" or type(sd.param_groups) ~= "table" then
    errors.raise("load_optim_state_dict: argument 3 is %s, expected {state, param_groups}", errors.kind(sd))
  end
  local names = flat.names_below(m)
  local by_name = {}
  for _, group in ipairs(sd.param_groups) do
    for _, name in ipairs(group.params) do by_name[name] = group end
  end
  no_grad(function()
    local plain, position = { state = {}, param_groups = {} }, 0
    for g, group in ipairs(optim.param_groups) do
      local listed, from = {}, nil
      for _, p in ipairs(group.params) do
        position = position + 1
        listed[#listed + 1] = position
        local members = members_of(p, names)
        for _, member in ipairs(members) do
          if not by_name[member.name] then errors.raise("load_optim_state_dict: the state has no parameter '%s'", tostring(member.name)) end
          from = from or by_name[member.name]
        end
        if #members == 0 then errors.raise("load_optim_state_dict: the state has no parameter 'nil'") end
        plain.state[position] = assemble(p, members, sd.state)
      end
      local copy = {}
      for key, value in pairs(from or {}) do copy[key] = value end   -- order does not matter: a copy
      copy.params = listed
      plain.param_groups[g] = copy
    end
    optim:load_state_dict(plain)
  end)
end

return M
