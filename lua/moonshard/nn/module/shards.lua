-- SPDX-License-Identifier: MIT
--- Whole tensors and this rank's parts of them, for code that computes with whole parameters whether they are sharded
--- or not. All functions also take parameters that are not sharded.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local tensor = require "moonshard.tensor"

local lib, ffi, C = engine.lib, engine.ffi, engine.ffi.C
local rawget, rawset = rawget, rawset

local M = {}

local info = ffi.new "ms_shard_info"

--- Whether a parameter is sharded.
function M.is_sharded(p) return rawget(p, "_unit") ~= nil end

--- The tensor that has a parameter's values on this rank: p itself if it is not sharded.
---@return Tensor
function M.part_of(p) return rawget(p, "_unit") and p:to_local() or p end

--- The shape of the whole parameter.
---@return integer[]
function M.shape_of(p) return rawget(p, "_whole_shape") or p.shape end

--- Gathers the whole of t, which has the form of this rank's part of p, into a new tensor. Returns t itself if p is not
--- sharded. Collective for a sharded p.
---@return Tensor
function M.whole(p, t)
  if not rawget(p, "_unit") then return t end
  local id = lib.ms_unit_gather_like(p.id, t.id)
  return tensor.wrap_new(id, p)
end

--- This rank's part of a tensor of p's full shape: one-dimensional in the flat layout, all of it if p is not sharded.
---@return Tensor
function M.own(p, whole)
  if not rawget(p, "_unit") then return whole end
  if lib.ms_unit_shard_info(p.id, info) ~= 0 then errors.fail(p) end
  local first, here = tonumber(info.first), tonumber(info.here)
  if info.layout == C.MS_LAYOUT_FLAT then return whole:reshape(-1):narrow(1, first + 1, here) end
  return whole:narrow(info.dim + 1, first + 1, here)
end

--- Whether each rank has only a part of p: a parameter, or a flat parameter of fsdp.FSDP.
---@return boolean
function M.is_cut(p)
  local unit = rawget(p, "_unit") or rawget(p, "_flat")
  return unit ~= nil and not (unit.classic and unit.placed.strategy == "no_shard")
end

-- ---- objects made before sharding -------------------------------------------------------------------

local changes = 0

--- A number that increases when parameters are sharded or left: optimizers look at theirs again when it has changed.
function M.changes() return changes end

--- Declares that parameters have been sharded.
function M.note() changes = changes + 1 end

--- Declares that the model trains another tensor in place of p from now on.
---@param p Tensor
---@param name string  p's name in the model
---@param how string  continues "parameter 1, 'weight', "
function M.leave(p, name, how)
  rawset(p, "_left", ("'%s', %s"):format(name, how))
  changes = changes + 1
end

local strays = 0

local function version_of(t) return tensor.info_of(t).version end

--- Declares that p is a part of a sharded model, but is neither sharded nor reduced.
---@param p Tensor
---@param name string  p's name in the model
function M.stray(p, name)
  strays = strays + 1
  rawset(p, "_stray", name)
  p:register_post_accumulate_grad_hook(function(q) rawset(q, "_landed", version_of(q.grad)) end)
end

--- Whether there are such parameters.
function M.has_strays() return strays > 0 end

--- Raises if p is no longer trained, or its gradient is only this rank's: as backward left it.
---@param p Tensor
---@param who string  names the function and the parameter in messages
---@param object string  what has to be made again
function M.expect_trained(p, who, object)
  local left, name = rawget(p, "_left"), rawget(p, "_stray")
  if left then errors.raise("%s, %s; make %s after wrapping, of the wrapped model's parameters()", who, left, object) end
  if name and not rawget(p, "_unit") and p.grad and version_of(p.grad) == rawget(p, "_landed") then
    errors.raise("%s, '%s', came into the model after it had been sharded, and is neither sharded nor reduced: its gradient is "
      .. "this rank's own; build the model before it is sharded, or all-reduce the gradient", who, name)
  end
end

--- Reshards p's unit if it is gathered and idle: a change of this rank's part has made the gathered copy of p stale.
function M.drop_gathered(p)
  local unit = lib.ms_unit_of(p.id)
  if unit ~= 0 and lib.ms_unit_get_state(unit).is_gathered ~= 0 and lib.ms_unit_get_state(unit).is_idle ~= 0 then
    errors.check(lib.ms_unit_reshard(unit), p)
  end
end

return M
