-- SPDX-License-Identifier: MIT
--- State dicts of the optimizers of sharded models, by parameter names. Collective: every rank of the model must make
--- the same calls.
---
--- Ranks may pass parameters to their optimizers in different orders, and may leave out parameters of which they have
--- no elements. Therefore all ranks first exchange what they have, and then communicate in the model's order.
local agree = require "moonshard.parallel.fsdp.agree"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local flat = require "moonshard.parallel.fsdp.flat"
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.core.opts"
local sharded = require "moonshard.parallel.fsdp.sharded"
local state = require "moonshard.parallel.fsdp.state"
local tensor = require "moonshard.tensor"
local is_plain = opts.is_plain
local sorted_pairs = require "moonshard.tensor.util".sorted_pairs

local M = {}

local function check_optimizer(who, optim)
  opts.need(type(optim) == "table" and type(optim.param_groups) == "table", optim, "an optimizer", "%s: argument 2",
    who)
end

-- Returns the first name of each of the model's parameters, in order, and maps from names to parameters and back.
local function listing(m)
  local all, values = m:_state()
  local name_of, names, by_name = flat.names_below(m), {}, {}
  for k, name in ipairs(all) do
    if name_of[values[k]] == name then names[#names + 1], by_name[name] = name, values[k] end
  end
  return names, by_name, name_of
end

-- The model's parameters that belong to an optimizer's parameter: the parameter itself or, if it is a flat
-- parameter, those that form it. Each entry's part(v) is the part of a state tensor v that belongs to that parameter.
local function members_of(p, name_of)
  local unit = rawget(p, "_flat")
  if not unit then return name_of[p] and { { name = name_of[p], p = p, part = function(v) return v end } } or {} end
  local list = {}
  for k, original in ipairs(unit.originals) do
    local first, n = flat.place_of(original)
    list[k] = { name = name_of[original], p = original, part = function(v) return v:narrow(1, first, n) end }
  end
  return list
end

-- Calls fn(position, parameter, members_of(parameter), number of its group) for each parameter of the optimizer. Raises
-- for a parameter that is not the model's.
local function each_parameter(who, optim, name_of, fn)
  local position = 0
  for g, group in ipairs(optim.param_groups) do
    for k, p in ipairs(group.params) do
      position = position + 1
      local members = members_of(p, name_of)
      if #members == 0 then errors.raise("%s: parameter %d of group %d does not belong to the module", who, k, g) end
      fn(position, p, members, g)
    end
  end
end

--- Whether an optimizer keeps a state of the model's parameter p whole on every rank, in a shape of its own.
---@param optim table  an optimizer
---@param p Tensor  a parameter of the model
---@param key string  name of the state
function M.keeps_whole(optim, p, key)
  local unit = rawget(p, "_unit")
  if unit and unit.classic and not unit.options.use_orig_params then return false end  -- optim steps the flat parameter
  return optim._keeps_whole ~= nil and optim:_keeps_whole(key)
end

-- Whether each rank has only a part of a state.
local function is_cut(optim, p, key, v)
  return tensor.is_tensor(v) and v.ndim > 0 and sharded.is_sharded(p) and not M.keeps_whole(optim, p, key)
end

-- ---- saving --------------------------------------------------------------------------------------

local function signature(fields)
  local parts = {}
  for key, field in sorted_pairs(fields) do parts[#parts + 1] = field.dtype and key .. " " .. field.dtype or key end
  return table.concat(parts, ", ")
end

-- This rank's report to the others: the type that it asks for (kind), the fields of each parameter's state (the dtype
-- of a sharded field, the value of a scalar), and the names of parameters that have no elements on this rank. group:
-- the optimizer's group of each parameter.
local function describe(optim, names, by_name, entries, kind, group)
  local reported = { type = kind, fields = {}, empty = {}, group = group }
  for _, name in ipairs(names) do
    local p, entry = by_name[name], entries[name]
    if entry then
      local fields = {}
      for key, v in pairs(entry) do
        if is_cut(optim, p, key, v) then fields[key] = { dtype = v.dtype }
        elseif not tensor.is_tensor(v) then fields[key] = { value = v }
        else fields[key] = { value = v.ndim == 0 and v:item() or nil } end
      end
      reported.fields[name] = fields
    end
    if sharded.is_sharded(p) and p:to_local():numel() == 0 then reported.empty[name] = true end
  end
  return reported
end

-- The report as one string, without its list `empty` and values of fields: if it is equal on all ranks, reports need
-- not be exchanged.
local function summary(names, own)
  local parts = { own.type }
  for _, name in ipairs(names) do
    parts[#parts + 1] = ("%s %s %s"):format(name, own.group[name] or "-", own.fields[name]
      and signature(own.fields[name]) or "-")
  end
  return table.concat(parts, "\n")
end

-- The reports of all ranks, by rank; only this rank's if all are equal.
local function compare(groups, own, summaries)
  local me = (require "moonshard.dist").rank()
  for _, text in pairs(summaries) do
    if text ~= summaries[me] then return agree.gather(groups, own) end
  end
  return { [me] = own }
end

-- The state fields of each parameter, by name, as the first rank that has any reports them. Raises if ranks ask for
-- different types or have different states of a sharded parameter. Also raises if a rank that has elements of a
-- parameter lacks a state that the first rank has, or if the first rank has elements of a sharded parameter but lacks a
-- state that another rank has.
local function common_fields(names, by_name, reported)
  local ranks, types = {}, {}
  for rank, t in pairs(reported) do ranks[#ranks + 1], types[rank] = rank, t.type end
  table.sort(ranks)
  agree.same(types, "optim_state_dict: ranks ask for different types")
  local fields, missing, lacks = {}, {}, {}
  local first = reported[ranks[1]]
  for _, name in ipairs(names) do
    local has
    for _, rank in ipairs(ranks) do
      local mine = reported[rank].fields[name]
      if mine and not has then has = rank end
      if mine and sharded.is_sharded(by_name[name]) and signature(mine) ~= signature(reported[has].fields[name]) then
        errors.raise("optim_state_dict: ranks have different states of '%s': %s on rank %d; %s on rank %d", name,
          signature(reported[has].fields[name]), has, signature(mine), rank)
      end
    end
    fields[name] = has and reported[has].fields[name]
    for _, rank in ipairs(ranks) do
      if has and not reported[rank].fields[name] and not reported[rank].empty[name] then
        if first.fields[name] then
          missing[rank] = missing[rank] or {}
          table.insert(missing[rank], name)
        elseif rank == ranks[1] and sharded.is_sharded(by_name[name]) then
          lacks[#lacks + 1] = name
        end
      end
    end
  end
  if next(missing) then
    local text = "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but some ranks are missing some "
      .. "of those states"
    for _, rank in ipairs(ranks) do
      if missing[rank] then
        text = ("%s\nRank %d is missing states for the parameters: ['%s']"):format(text, rank,
          table.concat(missing[rank], "', '"))
      end
    end
    errors.raise("%s", text)
  end
  if #lacks > 0 then
    errors.raise("optim_state_dict: rank %d is missing states that other ranks have, for the parameters: ['%s']", ranks[1],
      table.concat(lacks, "', '"))
  end
  return fields
end

-- Adds to this rank's groups the parameters that it left out because it has no elements of them.
local function complete(listed, names, group, empty, reported)
  for _, name in ipairs(names) do
    if empty[name] and not group[name] then
      -- In any order: the ranks that have the parameter have it in the same group.
      for _, other in pairs(reported) do group[name] = group[name] or other.group[name] end
      local list = listed[group[name]]
      if list then list[#list + 1] = name end
    end
  end
end

-- Converts the state of p to the requested type. part: this rank's state tensor, or nil if the rank has no elements;
-- mine: whether this rank returns the state dict (with rank0_only the other ranks only take part in the gather).
local function converted(p, part, dtype, o, mine)
  local kind = state.kind_of(p, o.type)
  if kind == "local" then return part end
  part = part or create.zeros_like(p:to_local(), { dtype = dtype })
  local v = sharded.around(p, part)
  if kind == "sharded" then return v end
  local whole = v:full_tensor()
  if not mine then whole:release() end
  return mine and o.offload_to_cpu and whole:to "cpu" or whole
end

--- Returns `{state = {[name] = {step, exp_avg, …}}, param_groups = {{params = {names}, lr = …}}}` with whole tensors,
--- sharded tensors or this rank's parts, depending on type; whole tensors are copies. With rank0_only all other ranks
--- get an empty table. FSDP instances with no_shard always give whole tensors.
---@param m table  the model whose parameters optim steps
---@param optim table  an optimizer of optim
---@param given? {type: string, rank0_only: boolean, offload_to_cpu: boolean}  type: "full", "sharded" or "local"; offload_to_cpu: whole tensors are moved to the CPU
function M.optim_state_dict(m, optim, given)
  local groups, o = agree.begin("optim_state_dict", m, given, { type = opts.one_of(state.TYPES, "full"),
    rank0_only = false, offload_to_cpu = false })
  local names, by_name, name_of = listing(m)
  local entries, listed, group = {}, {}, {}
  local plain
  local own, summaries = agree.agree(groups, function()
    check_optimizer("optim_state_dict", optim)
    plain = optim:state_dict()
    for g in ipairs(optim.param_groups) do listed[g] = {} end
    each_parameter("optim_state_dict", optim, name_of, function(position, _, members, g)
      for _, member in ipairs(members) do
        table.insert(listed[g], member.name)
        group[member.name] = g
        local entry = plain.state[position]
        if entry then
          local own = {}
          for key, v in pairs(entry) do own[key] = is_cut(optim, member.p, key, v) and member.part(v) or v end
          entries[member.name] = own
        end
      end
    end)
    local own = describe(optim, names, by_name, entries, o.type, group)
    return own, summary(names, own)
  end)
  local reported = compare(groups, own, summaries)
  local mine = not o.rank0_only or agree.is_first(groups)
  local fields, out = common_fields(names, by_name, reported), { state = {}, param_groups = {} }
  complete(listed, names, group, own.empty, reported)
  local copies = state.is_whole(m, o.type)
  agree.together(groups, function()
    for _, name in ipairs(names) do
      local entry, p, whole = entries[name], by_name[name], nil
      if entry or fields[name] and sharded.is_sharded(p) then
        whole = {}
        for key, field in sorted_pairs(fields[name]) do
          if field.dtype then
            whole[key] = converted(p, entry and entry[key], field.dtype, o, mine)
          elseif entry then
            local v = entry[key]
            local moved = o.offload_to_cpu and tensor.is_tensor(v) and v:to "cpu" or v
            whole[key] = copies and tensor.is_tensor(v) and rawequal(moved, v) and v:clone() or moved
          else
            whole[key] = field.value
          end
        end
      end
      if entry or o.type ~= "local" then out.state[name] = mine and whole or nil end
    end
  end)
  for g in ipairs(listed) do
    local copy = {}
    for key, value in pairs(plain.param_groups[g]) do copy[key] = value end
    copy.params = listed[g]
    out.param_groups[g] = copy
  end
  return mine and out or {}
end

-- ---- loading -------------------------------------------------------------------------------------

local WHO = "load_optim_state_dict"

-- The saved groups by the names of their parameters. Nil if the state dict has no groups; the optimizer then keeps its
-- options.
local function groups_by_name(sd)
  if sd.param_groups == nil then return nil end
  if not is_plain(sd.param_groups) then opts.wrong(sd.param_groups, "a list of groups", "%s: param_groups", WHO) end
  local by_name = {}
  for g, group in ipairs(sd.param_groups) do
    opts.need(is_plain(group) and is_plain(group.params), group, "a group {params = {names}}", "%s: group %d", WHO, g)
    for k, name in ipairs(group.params) do
      if type(name) ~= "string" then
        opts.wrong(name,
          "a name; use fsdp.optim_state_dict, because an optimizer's own state_dict() has positions instead of names",
          "%s: parameter %d of group %d", WHO, k, g)
      end
      by_name[name] = group
    end
  end
  return by_name
end

-- Checks the state of one parameter in a state dict. p: the model's parameter with that name, or nil; whole_only: the
-- state must not be sharded; optim: the optimizer, which itself checks the shapes of states that it keeps whole.
local function check_entry(optim, name, entry, p, whole_only)
  if type(name) ~= "string" then
    errors.raise("%s: state has the key %s, expected names of parameters", WHO, errors.show(name))
  end
  if not is_plain(entry) then opts.wrong(entry, "a table", "%s: state of '%s'", WHO, name) end
  for key, v in pairs(entry) do
    if type(key) ~= "string" then
      errors.raise("%s: state of '%s' has the key %s, expected names of fields", WHO, name, errors.show(key))
    end
    if tensor.is_tensor(v) and v.ndim > 0 and not (p and M.keeps_whole(optim, p, key)) then
      local whole = p and tostring(rawget(p, "_whole_shape") or p.shape)
      if p and (v.id < 0) ~= (p.id < 0) then
        errors.raise("%s: '%s' of '%s' is %s, but the parameter is %s", WHO, key, name, errors.kind(v), errors.kind(p))
      end
      local fits = not p or tostring(v.shape) == whole
        or not whole_only and sharded.is_sharded(p) and not sharded.is_sharded(v)
        and tostring(v.shape) == tostring(p:to_local().shape)
      if not fits then
        errors.raise("%s: '%s' of '%s' has shape %s, but the parameter has shape %s", WHO, key, name, tostring(v.shape), whole)
      end
      if whole_only and (sharded.is_sharded(v) or v.id < 0) then
        errors.raise("%s: with broadcast_from_rank0, '%s' of '%s' is %s, expected a whole, plain tensor", WHO, key, name,
          v.id < 0 and errors.kind(v) or "sharded")
      end
    end
  end
end

local function check_state(optim, sd, by_name, whole_only)
  if not is_plain(sd) or not is_plain(sd.state) then
    opts.wrong(sd, "a table with state and param_groups", "%s: argument 3", WHO)
  end
  for name, entry in pairs(sd.state) do check_entry(optim, name, entry, by_name[name], whole_only) end
end

-- Describes rank 0's state dict to the other ranks: its groups, the shapes and dtypes of tensors, and the values of all
-- other fields and of 0-dim tensors.
local function state_to_send(sd)
  local reported = { param_groups = sd.param_groups, state = {} }
  for name, entry in pairs(sd.state) do
    local fields = {}
    for key, v in pairs(entry) do
      if not tensor.is_tensor(v) then fields[key] = { value = v }
      elseif v.ndim == 0 then fields[key] = { value = v:to "cpu" }
      else fields[key] = { dtype = v.dtype, shape = { unpack(v.shape) } } end
    end
    reported.state[name] = fields
  end
  return reported
end

-- This rank's part of a state tensor v, which may be of any type, for parameter p.
local function part_for(optim, p, key, v)
  if M.keeps_whole(optim, p, key) then return v end
  if not sharded.is_sharded(p) then return sharded.is_sharded(v) and v:full_tensor() or v end
  local piece = p:to_local()
  if sharded.is_sharded(v) then return sharded.part_like(p, v):reshape(piece.shape) end
  if tostring(v.shape) == tostring(rawget(p, "_whole_shape") or p.shape) then
    return sharded.part_of(p, v):reshape(piece.shape)
  end
  return v
end

-- This rank's parts of all state tensors, by name and field. sd: the state dict; nil on ranks that read none. reported:
-- rank 0's description of its state dict, or nil.
local function parts_of(groups, optim, names, by_name, sd, reported)
  local parts = {}
  for _, name in ipairs(names) do
    local entry, own = reported and reported.state[name] or not reported and sd.state[name], {}
    for key, v in sorted_pairs(entry or {}) do
      local sent = reported and v.dtype
      if reported and not sent then
        own[key] = v.value
      elseif sent then
        local mine = sd and sd.state[name][key]
        local whole = state.from_first(groups, mine, v)
        own[key] = part_for(optim, by_name[name], key, whole)
        if not mine and not rawequal(own[key], whole) then
          own[key] = own[key]:clone()
          whole:release()
        end
      else
        own[key] = tensor.is_tensor(v) and v.ndim > 0 and part_for(optim, by_name[name], key, v) or v
      end
    end
    parts[name] = entry and own
  end
  return parts
end

local function same_scalar(key, before, v)
  local a, b = tensor.is_tensor(v) and v:item() or v, tensor.is_tensor(before) and before:item() or before
  if before ~= nil and a ~= b then
    errors.raise("All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype: "
      .. "'%s' is %s and %s", key, tostring(b), tostring(a))
  end
end

-- Assembles the state of an optimizer's parameter p from the states of members_of(p); nil if these have none.
local function assemble(p, members, parts)
  local entry
  for _, member in ipairs(members) do
    for key, v in sorted_pairs(parts[member.name] or {}) do
      entry = entry or {}
      local cut, before = tensor.is_tensor(v) and v.ndim > 0, entry[key]
      if before ~= nil and cut ~= (tensor.is_tensor(before) and before.ndim > 0) then
        errors.raise("%s: '%s' of '%s' is %s, but for another parameter of the same flat parameter it is %s", WHO, key,
          member.name, errors.kind(v), errors.kind(before))
      end
      if not cut then
        same_scalar(key, before, v)
        entry[key] = v
      elseif not rawget(p, "_flat") then
        entry[key] = v
      else
        entry[key] = before or create.zeros_like(p, { dtype = v.dtype })
        member.part(entry[key]):copy_(v)
      end
    end
  end
  return entry
end

-- Builds the state dict, indexed by position, that the optimizer itself can load.
local function positional(optim, name_of, saved_groups, parts)
  local plain, from = { state = {}, param_groups = {} }, {}
  for g in ipairs(optim.param_groups) do plain.param_groups[g] = { params = {} } end
  each_parameter(WHO, optim, name_of, function(position, p, members, g)
    table.insert(plain.param_groups[g].params, position)
    for _, member in ipairs(members) do
      if saved_groups and not saved_groups[member.name] then
        errors.raise("%s: the state dict has no parameter '%s'", WHO, member.name)
      end
      from[g] = from[g] or saved_groups and saved_groups[member.name]
    end
    plain.state[position] = assemble(p, members, parts)
  end)
  for g, group in ipairs(plain.param_groups) do
    for key, value in pairs(from[g] or {}) do
      if key ~= "params" then group[key] = value end
    end
  end
  return plain
end

local function load(groups, m, optim, sd, broadcasts)
  local names, by_name, name_of = listing(m)
  local reads = not broadcasts or agree.is_first(groups)
  if not reads then sd = nil end
  local reported
  local _, all = agree.agree(groups, function()
    check_optimizer(WHO, optim)
    each_parameter(WHO, optim, name_of, function() end)
    if not reads then return end
    check_state(optim, sd, by_name, broadcasts)
    groups_by_name(sd)
    if broadcasts then return nil, state_to_send(sd) end
    local gathered = {}
    for _, name in ipairs(names) do
      for key, v in sorted_pairs(sd.state[name] or {}) do
        if state.is_gathered(by_name[name], v) then gathered[#gathered + 1] = ("'%s' of '%s'"):format(key, name) end
      end
    end
    return nil, table.concat(gathered, ", ")
  end)
  if broadcasts then
    -- Only the rank that reads the state dict has reported a value.
    for _, what in pairs(all) do reported = what end
  else
    agree.same(all, WHO .. ": ranks differ in the states that are sharded differently from their parameters")
  end
  no_grad(function()
    local parts = agree.together(groups, function()
      return parts_of(groups, optim, names, by_name, sd, reported)
    end)
    local take = agree.agree(groups, function()
      local plain = positional(optim, name_of, groups_by_name(reported or sd), parts)
      if optim._prepare_load then return optim:_prepare_load(plain) end
      return function() optim:load_state_dict(plain) end
    end)
    agree.together(groups, take)
  end)
end

--- Loads a state dict made by optim_state_dict, of any type, on any number of ranks. With broadcast_from_rank0 only
--- rank 0's state dict is read (the others pass `{}`). Without param_groups the optimizer keeps its options. If one
--- rank refuses the state dict, all ranks refuse it, before anything changes.
---@param m table  the model whose parameters optim steps
---@param optim table  an optimizer of optim
---@param sd table  a result of fsdp.optim_state_dict, of any type
---@param given? {broadcast_from_rank0: boolean}  broadcast_from_rank0: only rank 0's state dict is read
function M.load_optim_state_dict(m, optim, sd, given)
  local groups, o = agree.begin(WHO, m, given, { broadcast_from_rank0 = false }, sd)
  if o.broadcast_from_rank0 and #groups == 0 then groups = { (require "moonshard.dist").default_group() } end
  load(groups, m, optim, sd, o.broadcast_from_rank0)
end

--- Loads a state dict whose tensors are this rank's parts, without communication: if it fails on one rank, the caller
--- must make the others fail, too.
function M.load_parts(m, optim, sd) load({}, m, optim, sd, false) end

return M
