-- SPDX-License-Identifier: MIT
--- nn.utils: clipping by the norm of all gradients.
local calls = require "moonshard.dist.calls"
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local opts = require "moonshard.core.opts"
local shards = require "moonshard.nn.module.shards"
local sparse = require "moonshard.autograd.sparse"
local tensor = require "moonshard.tensor"
local a_tensor = tensor.a_tensor

local lib, ffi = engine.lib, engine.ffi
local is_tensor = tensor.is_tensor

local M = {}

local room, ids = 0, nil         -- room: the size of the array of ids, which later calls reuse
local norm_options = { norm_type = 2, error_if_nonfinite = false }
local clip                       -- clip_at_once in the wrappers below

-- clip_grad_norm_ without the option error_if_nonfinite: one collective.
local function clip_at_once(params, max_norm, given)
  local order = given and opts("clip_grad_norm_", given, norm_options).norm_type or 2
  if is_tensor(params) then params = { params } end
  -- A list of tensors may have a metatable, but must hold its elements: # and ipairs see none in an nn.ParameterList.
  if not opts.is_plain(params) and not (type(params) == "table" and is_tensor(rawget(params, 1))) then
    opts.wrong(params, "a list of tensors" .. (type(params) == "table" and "; write model:parameters()" or ""),
      "clip_grad_norm_: argument 1")
  end
  opts.expect(max_norm, opts.number_from(0), "clip_grad_norm_: max_norm")
  for k = 1, #params do
    opts.expect(params[k], a_tensor, "clip_grad_norm_: parameter %d", k)
    if rawget(params[k], "_left") or rawget(params[k], "_stray") then shards.expect_trained(params[k], "clip_grad_norm_: parameter " .. k, "the list") end
  end
  params = tensor.flat(params)
  -- Replaces the leaves with sparse gradients by leaves whose gradient is the tensor of coalesced values.
  local stand_ins
  for k = 1, #params do
    local p = params[k]
    -- Reads the raw field, because reading p.grad would make an object for every dense gradient.
    local g = rawget(p, "_sparse")
    if g then
      local is_local = sparse.is_local(p)
      g = g:coalesce()
      p.grad = g
      local leaf = create.empty_like(g:values(), { requires_grad = true })
      leaf.grad = g:values()
      if is_local then
        sparse.set_local(p)
        sparse.set_local(leaf)
      end
      stand_ins = stand_ins or listing.copy(params)
      stand_ins[k] = leaf
    end
  end
  params = stand_ins or params
  local n = #params
  if n > room then
    room = 2 * n
    ids = ffi.new("ms_id[?]", room)
  end
  for k = 1, n do ids[k - 1] = params[k].id end
  local norm = lib.ms_clip_grad_norm(n, ids, max_norm, order)
  if norm == 0 then errors.fail_of(params) end
  return tensor.wrap(norm)
end

--- Raises if a norm of gradients is not finite. Every rank has the same norm and raises by itself.
---@param norm Tensor
---@param order number  the order of the norm
---@param who string  the function's name in messages
function M._refuse_nonfinite(norm, order, who)
  local value = norm:item()
  if value == value and value < math.huge then return end
  errors.raise("%s: The total norm of order %s for gradients from `parameters` is non-finite, so it cannot be clipped. "
    .. "To disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=false`",
    who, order == math.huge and "inf" or tostring(order))
end

--- Wraps clip(target, max_norm, given) so that it takes the option error_if_nonfinite: then the norm is computed first,
--- without a change of the gradients.
function M._checking_clip(fn)
  local function wrapper(target, max_norm, given)
    if not opts.is(given) or given.error_if_nonfinite == nil then return fn(target, max_norm, given) end
    local o = opts("clip_grad_norm_", given, norm_options)
    local order = { norm_type = o.norm_type }
    if o.error_if_nonfinite then
      M._refuse_nonfinite(fn(target, math.huge, order), o.norm_type, "clip_grad_norm_")
    end
    return fn(target, max_norm, order)
  end
  opts.original[wrapper] = opts.original[fn] or fn
  return wrapper
end

--- Multiplies all gradients by one factor so that their common norm over all ranks is at most max_norm. norm_type =
--- math.huge selects the maximum norm; max_norm = math.huge only computes the norm. Collective if parameters are
--- sharded.
---@param params Tensor|Tensor[]  those without a gradient are left out
---@param max_norm number  at least 0
---@param given? { norm_type: number, error_if_nonfinite: boolean }  error_if_nonfinite: a norm that is inf or nan is an
---   error, and the gradients keep their values (default: false: they become nan or 0)
---@return Tensor norm  before clipping: a plain 0-dim tensor, on the gradients' device if all have the same, else on the CPU
function M.clip_grad_norm_(params, max_norm, given)
  return clip(params, max_norm, given)
end

-- The group over which a parameter is sharded or, if it is not, replicated (by nn.DDP or a unit); nil if there is none.
local function group_of(p)
  local unit = rawget(p, "_unit") or rawget(p, "_flat")
  if not unit then return rawget(p, "_replicas") end
  local placed = unit.placed
  local group = placed and placed.group or unit.group
  if lib.ms_dist_size(group.id) > 1 then return group end
  return placed and placed.replicate or unit.replicates and unit.mesh():get_group(1) or nil
end

--- The first group over which one of the parameters is sharded or replicated; nil if there is none.
function M._group_of(params)
  for _, p in ipairs(type(params) ~= "table" and {} or is_tensor(params) and { params } or params) do
    local group = is_tensor(p) and group_of(p)
    if group then return group end
  end
end

-- The id of that group; 1, the group of this rank alone, if there is none.
local function first_group(params)
  local group = M._group_of(params)
  return group and group.id or 1
end

--- Whether other ranks hold shards or replicas of some of these parameters.
---@param params Tensor[]
---@return boolean
function M._has_peers(params) return M._group_of(params) ~= nil end

-- With calls.one, an error on one rank, such as a wrong argument, makes the first all-reduce of its peers' calls fail,
-- so the ranks need not exchange beforehand whether their arguments are right.
M._clip_grad_norm, M._first_group = clip_at_once, first_group
clip = M._checking_clip(calls.one(clip_at_once, first_group))

return M
