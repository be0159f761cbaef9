-- SPDX-License-Identifier: MIT
--- Replaced parameters of an FSDP instance with use_orig_params (docs/semantics.md#writeback). A tensor that a script
--- assigns in place of a parameter is copied into the shard at the next forward, state dict or summon_full_params. It
--- is an error if this happens between a forward that leaves the parameters gathered and its backward, which would use
--- the old values.
local autograd = require "moonshard.autograd"
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local Parameter = require "moonshard.nn.module.parameter".Parameter
local sharded = require "moonshard.parallel.fsdp.sharded"
local shards = require "moonshard.nn.module.shards"
local tensor = require "moonshard.tensor"

local lib, raise = engine.lib, errors.raise
local rawget, ipairs, pairs, select = rawget, ipairs, pairs, select

local M = {}

local function sizes(p) return tostring(p.shape) end

--- Copies tensors that replaced parameters into the shard, and assigns the parameters to their fields again.
function M.write_back(unit)
  for _, place in ipairs(unit.places) do
    local m, name, p = place[1], place[2], place[3]
    local now = rawget(m, "_slots")[name]
    if now ~= p then
      local piece = p:to_local()
      if tensor.is_tensor(now) and rawget(now, "_unit") then
        raise("parameter '%s' was replaced by another parameter of the model after it was wrapped; share parameters before wrapping",
          place[4])
      end
      local fits = class.isa(now, Parameter) and (sizes(now) == sizes(piece)
        or sizes(now) == tostring(rawget(p, "_whole_shape")))
      if not fits then
        raise("Cannot writeback when the parameter shape changes\nExpects %s but got %s", sizes(piece),
          tensor.is_tensor(now) and sizes(now) or errors.show(now))
      end
      autograd.no_grad(function()
        if sizes(now) == sizes(piece) then piece:copy_(now) else piece:copy_(sharded.part_of(p,
          now:detach()):reshape(piece.shape)) end
      end)
      m[name] = p
      shards.leave(now, place[4], "was copied into the parameter that it had replaced")
      -- Vacate the old gathered values.
      if lib.ms_unit_get_state(unit.handle).is_gathered ~= 0 then errors.check(lib.ms_unit_reshard(unit.handle)) end
    end
  end
end

--- Calls M.write_back for each unit in the list with use_orig_params, unless FSDP_SKIP_WRITEBACK_CHECK was set to 1.
--- Called before state dicts, before summon_full_params, and before a root's forward, which gathers some units early.
function M.write_back_all(units)
  for _, unit in ipairs(units) do
    if unit.replaces and not unit.switches.skip_writeback_check then M.write_back(unit) end
  end
end

local function check(units)
  for _, unit in ipairs(units) do
    if unit.classic and lib.ms_unit_get_state(unit.handle).is_gathered ~= 0 then
      for _, place in ipairs(unit.places) do
        if rawget(place[1], "_slots")[place[2]] ~= place[3] then
          raise "FSDP does not support changing the parameters between forward and backward"
        end
      end
    end
  end
end

local function each_output(v, fn, seen)
  if tensor.is_tensor(v) then
    if v.requires_grad and not v.is_leaf then fn(v) end
  elseif opts.may_hold_tensors(v) and not seen[v] then
    seen[v] = true
    for _, x in pairs(v) do each_output(x, fn, seen) end
  end
end

--- Returns a root's outputs unchanged. When their backward begins, raises if parameters below the root that stayed
--- gathered have been replaced.
function M.watch(units, ...)
  for k = 1, select("#", ...) do
    each_output((select(k, ...)), function(t) t:register_hook(function() check(units) end) end, {})
  end
  return ...
end

return M
