-- SPDX-License-Identifier: MIT
--- State dicts of sharded models. Collective: every rank of the model must make the same calls.
local agree = require "moonshard.parallel.fsdp.agree"
local assign = require "moonshard.parallel.fsdp.assign"
local errors = require "moonshard.core.errors"
local flat = require "moonshard.parallel.fsdp.flat"
local log = require "moonshard.core.log"
local materialize = require "moonshard.parallel.fsdp.materialize"
local module = require "moonshard.parallel.fsdp.module"
local Module = require "moonshard.nn.module".Module
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.core.opts"
local sharded = require "moonshard.parallel.fsdp.sharded"
local create = require "moonshard.tensor.create"
local tensor = require "moonshard.tensor"
local writeback = require "moonshard.parallel.fsdp.writeback"
local a_tensor = tensor.a_tensor

local M = {}

M.TYPES = { "full", "sharded", "local" }

--- The type in which t is returned if `kind` was requested: with no_shard all tensors are returned whole.
function M.kind_of(t, kind)
  local unit = rawget(t, "_unit")
  if kind == "full" or not unit or not sharded.is_replicated(unit) then return kind end
  log.warn_once "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned."
  return "full"
end

--- Whether a state dict of this type has whole tensors only: then all of them are copies.
function M.is_whole(m, kind)
  local units = module.units_below(m)
  for _, unit in ipairs(units) do
    if kind ~= "full" and not sharded.is_replicated(unit) then return false end
  end
  return kind == "full" or #units > 0
end

-- The parameters and buffers that instances of fsdp.FSDP below m ignore: they stay the script's own.
local function ignored_below(m)
  local set = {}
  for _, unit in ipairs(module.units_below(m)) do
    for p in pairs(unit.ignored_params or {}) do set[p] = true end
    for sub in pairs(unit.ignored_modules or {}) do
      for _, t in ipairs(materialize.own(sub)) do set[t] = true end
    end
  end
  return set
end

-- A tensor that is not sharded, as a state dict has it: in its original dtype if it is a buffer that was cast for
-- computation.
local function own_or_copy(t, copies)
  local dtype = rawget(t, "_original_dtype")
  if dtype and dtype ~= t.dtype then return t:detach():to(dtype) end
  return copies and t:detach():clone() or t:detach()
end

--- Returns every parameter and persistent buffer by name. "full": plain whole tensors; "sharded": sharded tensors;
--- "local": this rank's parts. Whole tensors are copies, but not those of ignored modules and parameters, nor those
--- beside sharded ones, unless they are cast or moved to the CPU. With rank0_only, ranks other than 0 get an empty
--- table. FSDP instances with no_shard always give whole tensors.
---@param m table  a model with sharded modules
---@param given? {type: string, offload_to_cpu: boolean, rank0_only: boolean}  type: "full", "sharded" or "local"; offload_to_cpu: tensors that are not sharded are moved to the CPU
---@return table<string, Tensor>
function M.state_dict(m, given)
  local groups, o = agree.begin("state_dict", m, given, { type = opts.one_of(M.TYPES, "full"), offload_to_cpu = false,
    rank0_only = false })
  local mine = not o.rank0_only or agree.is_first(groups)
  return agree.together(groups, function()
    m:_before_saving()
    module.reshard_all(m)
    writeback.write_back_all(module.units_below(m))
    local names, values = m:_state()
    local sd, gathered, copies, ignored = {}, {}, M.is_whole(m, o.type), ignored_below(m)
    for i, name in ipairs(names) do
      local t = values[i]
      local kind = M.kind_of(t, o.type)
      local out
      if not sharded.is_sharded(t) then
        out = gathered[t] or mine and own_or_copy(t, copies and not ignored[t])
        gathered[t] = out
      elseif kind == "sharded" then
        out = rawget(t, "_pieces") and sharded.around(t, t:to_local():detach()) or t:detach()
      elseif kind == "local" then
        out = t:to_local():detach()
      else
        out = gathered[t]
        if not out then
          out = t:full_tensor()
          gathered[t] = out
        end
        if not mine then out:release() end
      end
      if mine and not (kind == "local" and flat.is_concealed(t)) then
        sd[name] = o.offload_to_cpu and not sharded.is_sharded(out) and out:to "cpu" or out
      end
    end
    if o.type == "local" and mine then
      for name, p, unit in flat.parameters_below(m) do
        if not sharded.is_replicated(unit) then sd[name] = p:detach() end
      end
    end
    m:_after_saving(sd)
    return mine and sd or {}
  end)
end

-- Converts t, which is whole, sharded, or this rank's part, to the form of p: a tensor sharded like p or, with
-- use_orig_params, this rank's 1-d piece. Returns nil if t's shape fits neither the whole parameter nor the part.
local function like(p, t)
  local whole = rawget(p, "_whole_shape")
  if sharded.is_sharded(t) then
    if tostring(t.shape) ~= tostring(whole or p.shape) then return nil end
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

--- Whether loading t into p must first gather t.
function M.is_gathered(p, t)
  if not tensor.is_tensor(t) or not sharded.is_sharded(t) then return false end
  return not sharded.is_sharded(p) or not sharded.is_part_of(p, t)
end

-- Checks that t, which may be whole, sharded, or this rank's part, fits `value`, one of the model's tensors. Returns
-- what is wrong, or nil.
local function check_fit(name, value, t)
  if not tensor.is_tensor(t) then
    return ("While copying '%s': a tensor expected, got %s."):format(name, errors.kind(t))
  end
  if (t.id < 0) ~= (value.id < 0) then
    return ("While copying '%s': %s expected, got %s."):format(name, errors.kind(value), errors.kind(t))
  end
  local whole, shape = tostring(rawget(value, "_whole_shape") or value.shape), tostring(t.shape)
  if shape == whole then return nil end
  if sharded.is_sharded(value) and not sharded.is_sharded(t) and shape == tostring(value:to_local().shape) then
    return nil
  end
  return ("size mismatch for %s: copying a param with shape %s from checkpoint, the shape in current model is %s."):format(name, shape, whole)
end

-- Describes rank 0's state dict to the other ranks, by name: shapes and dtypes of tensors, and the extra states
-- themselves.
local function describe(sd)
  local there = {}
  for name, t in pairs(sd) do
    if Module._is_extra(name) then
      there[name] = { extra = t }
    else
      opts.expect(t, a_tensor, "load_state_dict: '%s'", tostring(name))
      if sharded.is_sharded(t) or t.id < 0 then
        errors.raise("load_state_dict: with broadcast_from_rank0, '%s' is %s, expected a whole, plain tensor", tostring(name),
          t.id < 0 and errors.kind(t) or "sharded")
      end
      there[name] = { dtype = t.dtype, shape = { unpack(t.shape) }, text = tostring(t.shape) }
    end
  end
  return there
end

local function check_described(name, value, there)
  local whole = tostring(rawget(value, "_whole_shape") or value.shape)
  if there.text ~= whole then
    return ("size mismatch for %s: copying a param with shape %s from checkpoint, the shape in current model is %s."):format(name, there.text, whole)
  end
end

--- Broadcasts rank 0's tensor t as a whole tensor on the CPU. there: its shape and dtype.
function M.from_first(groups, t, there)
  local dist = require "moonshard.dist"
  t = t and t:to "cpu":contiguous() or create.empty(there.shape, { dtype = there.dtype, device = "cpu" })
  return agree.from_first(groups, t, function(value, src, group)
    dist.broadcast(value, { src = src, group = group })
    return value
  end)
end

-- Replaces each flat parameter in a state dict of type "local" by its original parameters. Returns a list of pairs
-- { flat parameter, value }, and a state dict that has the current values of the original parameters.
local function take_flat(m, sd)
  local list, taken, rest = {}, {}, {}
  for name, t in pairs(sd) do rest[name] = t end
  for name, p, unit in flat.parameters_below(m) do
    local t = sd[name]
    if tensor.is_tensor(t) and tostring(t.shape) == tostring(p.shape) then
      list[#list + 1], rest[name], taken[unit] = { p, t }, nil, true
    end
  end
  local names, values = m:_state()
  for i, name in ipairs(names) do
    local unit = rawget(values[i], "_unit")
    if unit and taken[unit] then rest[name] = values[i]:detach() end
  end
  return list, rest
end

--- Loads a state dict of any type. With broadcast_from_rank0 only rank 0's state dict, which must have whole tensors,
--- is read (the others pass `{}`). With assign, the model's tensors on meta are first allocated on the devices of the
--- state dict's tensors (with broadcast_from_rank0: on the CPU). PyTorch counts the elements of containers from 0: load
--- its state dicts with count_from = 0. If one rank refuses the state dict, all ranks refuse it, before anything
--- changes; names that load_state_dict post hooks may edit are checked at the end.
---@param m table  a model with sharded modules
---@param sd table<string, Tensor>  a result of fsdp.state_dict, of any type
---@param given? {strict: boolean, broadcast_from_rank0: boolean, assign: boolean, count_from: 0|1}
---   broadcast_from_rank0: only rank 0's state dict is read
---@return string[] missing, string[] unexpected
function M.load_state_dict(m, sd, given)
  local groups, o = agree.begin("load_state_dict", m, given, { strict = true, broadcast_from_rank0 = false,
    assign = false, count_from = 1 }, sd)
  if o.broadcast_from_rank0 and #groups == 0 then groups = { (require "moonshard.dist").default_group() } end
  local reads = not o.broadcast_from_rank0 or agree.is_first(groups)
  local missing, unexpected, flats
  local function check(there, fits, device_of)
    if o.assign then assign.make_room(m, device_of, o.strict) end
    module.refuse_meta(m, o.assign and not o.strict and device_of or nil)
    missing, unexpected = m:_check_state(there, o, fits)
  end
  local there, reported = agree.agree(groups, function()
    module.reshard_all(m)
    writeback.write_back_all(module.units_below(m))
    Module._count_from(o.count_from)
    if not reads then return end
    m._expect_state(sd, "load_state_dict: argument 2")
    sd = m:_before_loading(sd, o.count_from)
    if o.broadcast_from_rank0 then
      local there = describe(sd)
      return there, there
    end
    flats, sd = take_flat(m, sd)
    check(sd, check_fit, assign.devices(sd))
    local names, values = m:_state()
    local gathered = {}
    for i, name in ipairs(names) do
      if M.is_gathered(values[i], sd[name]) then gathered[#gathered + 1] = name end
    end
    return nil, table.concat(gathered, ", ")
  end)
  if o.broadcast_from_rank0 then
    for _, what in pairs(reported) do there = what end         -- only one rank's entry is set
    local device_of = {}
    for name in pairs(there) do device_of[name] = "cpu" end
    check(there, check_described, device_of)
  else
    agree.same(reported, "load_state_dict: ranks differ in the parameters that are given with a different sharding")
  end
  agree.together(groups, no_grad, function()
    for _, entry in ipairs(flats or {}) do entry[1]:copy_(entry[2]) end
    local names, values = m:_state()
    for i, name in ipairs(names) do
      local now, t, received = values[i], reads and sd[name] or nil, nil
      if o.broadcast_from_rank0 then
        received = there[name] and M.from_first(groups, t, there[name])
        t = received
      end
      if t ~= nil then
        if sharded.is_sharded(now) then t = like(now, t) or t elseif sharded.is_sharded(t) then t = t:full_tensor() end
        now:copy_(t)
        if received and not reads then received:release() end
      end
    end
    m:_after_loading(function(name)
      if not o.broadcast_from_rank0 then return sd[name] end
      return there[name] and there[name].extra
    end, missing, unexpected, o.strict)
  end)
  return m._printed_names(missing, unexpected)
end

return M
