-- SPDX-License-Identifier: MIT
--- summon_full_params: makes the parameters of FSDP instances whole, in the stored dtype, for a script to read and
--- write (docs/semantics.md#summon). Collective.
local calls = require "moonshard.dist.calls"
local class = require "moonshard.core.class"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local module = require "moonshard.parallel.fsdp.module"
local Module = require "moonshard.nn.module".Module
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.core.opts"
local sharded = require "moonshard.parallel.fsdp.sharded"
local tensor = require "moonshard.tensor"
local replaced = require "moonshard.parallel.fsdp.writeback"
local a_module = require("moonshard.nn.module.register").a_module

local lib, raise = engine.lib, errors.raise
local rawset, ipairs, pcall, error = rawset, ipairs, pcall, error

local M = {}

-- The units of the FSDP instances among m and its descendants, in module order; without recurse, only m's own.
local function units_of(m, recurse)
  local list = {}
  for _, unit in ipairs(recurse and module.units_below(m) or { module.unit_of(m) }) do
    if unit.classic then list[#list + 1] = unit end
  end
  return list
end

-- Checks everything before anything is gathered.
local function check(units, o)
  local function unsupported(...) raise("%s is not supported yet", (...)) end
  if o.rank0_only and o.writeback then unsupported "writeback=true and rank0_only=true" end
  for _, unit in ipairs(units) do
    if o.offload_to_cpu and unit.placed.strategy == "no_shard" then unsupported "offload_to_cpu=true and NO_SHARD" end
    if o.with_grads and (o.offload_to_cpu or not unit.options.use_orig_params) then
      unsupported(("with_grads=true, use_orig_params=%s, offload_to_cpu=%s"):format(
        tostring(unit.options.use_orig_params), tostring(o.offload_to_cpu)))
    end
  end
  for _, unit in ipairs(units) do
    if lib.ms_unit_get_state(unit.handle).is_idle == 0 then raise "Cannot manually unshard parameters during forward/backward" end
  end
end

-- Gives each original parameter a copy of its whole gradient: gathered from the pieces' gradients or, if it was not
-- reduced, this rank's own.
local function show_grads(units)
  for _, unit in ipairs(units) do
    for _, p in ipairs(unit.originals) do
      local id = lib.ms_unit_full(p.id, 1)
      if id ~= 0 then
        lib.ms_keep(id)
        rawset(p, "_whole_grad", setmetatable({ id = id }, tensor.Tensor))
      elseif lib.ms_error_code() ~= 0 then
        errors.fail(p)
      end
    end
  end
end

local function drop_grads(units)
  for _, unit in ipairs(units) do
    for _, p in ipairs(unit.originals) do
      local whole = rawget(p, "_whole_grad")
      rawset(p, "_whole_grad", nil)
      if whole then lib.ms_release(whole.id) end
    end
  end
end

-- Removes the whole gradients. With writeback or no_shard, first copies the script's changes to the pieces' gradients.
local function hide_grads(units, writeback)
  for _, unit in ipairs(units) do
    local back = writeback or unit.placed.strategy == "no_shard"
    for _, p in ipairs(unit.originals) do
      local whole = rawget(p, "_whole_grad")
      rawset(p, "_whole_grad", nil)
      local piece = p:to_local()
      if whole then
        local grad = back and piece.grad
        if grad and grad:numel() == whole:numel() then      -- grad was whole already, because it was not reduced
          grad:copy_(whole:reshape(grad.shape))
        elseif grad and piece:numel() > 0 then
          local s = sharded.shard_info(p)
          grad:copy_(whole:reshape(-1):narrow(1, tonumber(s.first) + 1, tonumber(s.here)):reshape(piece.shape))
        end
        lib.ms_release(whole.id)
      elseif back and rawget(p, "_grad_cleared") then
        piece.grad = nil
      end
      rawset(p, "_grad_cleared", nil)
    end
  end
end

local function close(units, done, o, show, ok, ...)
  local message
  if o.with_grads and show and done == #units then
    local hidden, text = pcall(no_grad, hide_grads, units, o.writeback)
    if not hidden then message = text end
  end
  for k = done, 1, -1 do
    units[k].summoned = nil
    if lib.ms_unit_unsummon(units[k].handle, o.writeback and show and 1 or 0) ~= 0 then
      message = message or errors.last()
    end
  end
  if not ok then error((...), 0) end
  if message then error(message, 0) end
  return ...
end

-- Gathers the parameters. With calls.several an error of this function reaches all ranks; fn is called outside of it,
-- because an error of fn affects only this rank.
local open = calls.several(function(m, given, fn)
  opts.expect(m, a_module, "summon_full_params: argument 1")
  opts.expect(fn, opts.fn, "summon_full_params: the last argument")
  local o = opts("summon_full_params", given,
    { recurse = true, writeback = true, rank0_only = false, offload_to_cpu = false, with_grads = false })
  local units = units_of(m, o.recurse)
  check(units, o)
  replaced.write_back_all(units)
  local show = not o.rank0_only or (require "moonshard.dist").rank() == 0
  local done = 0
  for k, unit in ipairs(units) do
    if lib.ms_unit_summon(unit.handle, show and (o.offload_to_cpu and 2 or 1) or 0) ~= 0 then
      local text = errors.last()
      return close(units, done, { writeback = false }, false, false, text)
    end
    done = k
    unit.summoned = show or nil
  end
  if o.with_grads then
    local ok, text = pcall(show_grads, units)
    if not ok then
      drop_grads(units)
      return close(units, done, { writeback = false }, show, false, text)
    end
  end
  return units, o, show
end, function(m) return not class.isa(m, Module) or #units_of(m, true) > 0 end)

--- Runs fn while the parameters of FSDP instances are whole, under their original names and shapes, in the stored
--- dtype. Collective. Errors: writeback with rank0_only; offload_to_cpu with no_shard; with_grads without
--- use_orig_params or with offload_to_cpu; a call during forward or backward.
---@param m Module  a module with FSDP instances, or an instance
---@param given? { recurse: boolean, writeback: boolean, rank0_only: boolean, offload_to_cpu: boolean, with_grads: boolean }
---   recurse: includes instances below m; writeback: puts changes into the shards; rank0_only: parameters are whole
---   only on rank 0; offload_to_cpu: whole parameters are on the CPU; with_grads: gathers gradients, too
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.summon_full_params(m, given, fn, ...)
  if opts.fn.test(given) then return M.summon_full_params(m, nil, given, fn, ...) end
  local units, o, show = open(m, given, fn)
  return close(units, #units, o, show, pcall(context.block, "summon_full_params", fn, ...))
end

return M
