-- SPDX-License-Identifier: MIT
--- The parameters that nn.DDP reduces: found when a module is wrapped, and looked at again at each forward that records
--- a graph, because a script may freeze, unfreeze, convert, add or replace parameters later
--- (docs/semantics.md#ddp-construction).
local checks = require "moonshard.parallel.ddp.checks"
local errors = require "moonshard.core.errors"
local Embedding = require "moonshard.nn.embedding.embedding".Embedding

local info_of = require "moonshard.tensor".info_of
local raise = errors.raise
local ipairs, rawget = ipairs, rawget

local M = {}

---@class DDPParams
---@field all Parameter[]  those that DDP handles, in order of registration
---@field names string[]  their names
---@field others table<Parameter, boolean>  ignored and sharded ones, as keys
---@field ignored table<string, boolean>  names of ignored parameters and buffers, and of sharded parameters
---@field sharded string?  name of the first sharded one
---@field late table<Parameter, boolean>  those whose gradients are sparse, and complete only at the end of backward

--- Finds the parameters. Units reduce sharded ones (fsdp.fully_shard, fsdp.FSDP).
---@param m Module  the wrapped module
---@return DDPParams
function M.find(m)
  local found = { all = {}, names = {}, others = {}, ignored = {}, late = {} }
  for _, name in ipairs(m._ddp_params_and_buffers_to_ignore or {}) do found.ignored[name] = true end
  for _, sub in ipairs(m:modules()) do
    if sub:isa(Embedding) and sub.sparse then found.late[sub.weight] = true end
    for _, name in ipairs(sub._params) do
      local p = sub._slots[name]
      if p ~= nil and (rawget(p, "_unit") ~= nil or rawget(p, "_flat") ~= nil) then found.others[p] = true end
    end
  end
  for name, p in m:named_parameters() do
    if found.others[p] then found.ignored[name], found.sharded = true, found.sharded or name end
    if found.ignored[name] then
      found.others[p] = true
    else
      if p.id < 0 then
        raise("DDP: parameter '%s' is a %s, expected a plain tensor; DDP does not reduce gradients of tensor classes", name, p:class_name())
      end
      found.all[#found.all + 1], found.names[#found.names + 1] = p, name
    end
  end
  return found
end

--- The module's buffers that DDP broadcasts: persistent or not, without ignored ones.
---@param m Module
---@param ignored table<string, boolean>
---@return Tensor[] buffers, string[] names
function M.buffers(m, ignored)
  local list, names = {}, {}
  for name, b in m:named_buffers() do
    if not ignored[name] then list[#list + 1], names[#names + 1] = b, name end
  end
  return list, names
end

--- Remembers how the module's parameters are now, for M.changed.
function M.note(st, m)
  local seen = { params = m:parameters(), trained = {}, dtype = {}, device = {}, tables = {}, keys = {}, values = {},
    lists = {}, sizes = {} }
  local function watch(t, key)
    local at = #seen.tables + 1
    seen.tables[at], seen.keys[at], seen.values[at] = t, key, rawget(t, key) or false
  end
  for _, sub in ipairs(m:modules()) do
    for _, list in ipairs { sub._params, sub._children } do
      local at = #seen.lists + 1
      seen.lists[at], seen.sizes[at] = list, #list
      for _, name in ipairs(list) do watch(sub._slots, name) end
    end
    for k = 1, #sub + 1 do watch(sub, k) end            -- the elements of a container
  end
  for k, p in ipairs(seen.params) do
    local info = info_of(p)
    seen.trained[k], seen.dtype[k], seen.device[k] = info.requires_grad, info.dtype, info.device
  end
  st.seen = seen
end

--- Whether the module has other parameters than at the last call of M.note, or others of them are trained, or a dtype
--- or device differs. Called at each forward: lists nothing.
---@return boolean
function M.changed(st)
  local seen = st.seen
  local tables, keys, values, lists, sizes = seen.tables, seen.keys, seen.values, seen.lists, seen.sizes
  for k = 1, #tables do
    if (rawget(tables[k], keys[k]) or false) ~= values[k] then return true end
  end
  for k = 1, #lists do
    if #lists[k] ~= sizes[k] then return true end
  end
  local params, trained, dtype, device = seen.params, seen.trained, seen.dtype, seen.device
  for k = 1, #params do
    local info = info_of(params[k])
    if info.requires_grad ~= trained[k] or info.dtype ~= dtype[k] or info.device ~= device[k] then return true end
  end
  return false
end

--- Finds the parameters of a module that has changed. Raises if one that is trained was not there when the module was
--- wrapped: its values may differ between the ranks.
---@return DDPParams
function M.find_again(st, m)
  local found = M.find(m)
  for k, p in ipairs(found.all) do
    if p.requires_grad and not st.known[p] then
      raise("DDP: parameter '%s' was added or replaced after the module was wrapped, so its values may differ between the ranks and its "
        .. "gradient is not reduced; wrap the module again: nn.DDP(module)", found.names[k])
    end
  end
  checks.devices(found.all)
  return found
end

--- Says for messages what has happened to the first parameter that has changed.
---@return string
function M.what_changed(st, found)
  local seen, at = st.seen, {}
  for k, p in ipairs(seen.params) do at[p] = k end
  for k, p in ipairs(found.all) do
    local info, old = info_of(p), at[p]
    local how = not old and "added" or info.requires_grad < seen.trained[old] and "frozen"
      or info.requires_grad > seen.trained[old] and "unfrozen"
      or (info.dtype ~= seen.dtype[old] or info.device ~= seen.device[old]) and "converted"
    if how then return ("parameter '%s' was %s"):format(found.names[k], how) end
  end
  return "a parameter was removed"
end

--- Raises on all ranks unless their parameters and buffers have the same names, shapes and dtypes in the same order,
--- and the same parameters are trained. Collective.
---@param found DDPParams
function M.check_same(st, m, found)
  local params, buffers = {}, {}
  for k, p in ipairs(found.all) do
    params[k] = { found.names[k], tostring(p.shape), p.dtype,
      not p.requires_grad and "frozen" or st.delayed and st.delayed.has[p] and "delayed" or "trained" }
  end
  local list, names = M.buffers(m, found.ignored)
  for k, b in ipairs(list) do buffers[k] = { names[k], tostring(b.shape), b.dtype, "" } end
  checks.same_model(params, buffers, st.group)
end

return M
