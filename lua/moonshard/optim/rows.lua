-- SPDX-License-Identifier: MIT
--- The engine's table of optimizers (kernels/formulas/optim), and checks of options against it.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local opts = require "moonshard.core.opts"

local lib, ffi = engine.lib, engine.ffi
local is_plain = opts.is_plain
local STATES = ffi.C.MS_OPTIM_STATES

local M = {}

-- Reads a row of the engine's table: name, names of the states, the states that are always kept (bit s - 1: state s),
-- options (in order), defaults (by name).
function M.read(row, kind)
  local out = { name = ffi.string(row.name), kind = kind, needed = row.needed, states = {}, options = {},
    defaults = {} }
  for s = 0, STATES - 1 do
    if row.states[s] ~= nil then out.states[s + 1] = ffi.string(row.states[s]) end
  end
  for k = 0, ffi.C.MS_OPTIM_OPTIONS - 1 do
    local o = row.options[k]
    if o.name == nil then break end
    local option = { name = ffi.string(o.name), at = o.at, count = o.count, low = o.low, below = o.below,
      later = o.later ~= 0 }
    out.options[k + 1] = option
    if o.count > 1 then
      out.defaults[option.name] = { o.value[0], o.value[1] }
    elseif o.count < 1 then
      out.defaults[option.name] = o.value[0] ~= 0
    else
      out.defaults[option.name] = o.value[0]
    end
    if option.name == "master_weights" then table.insert(out.states, "master") end
  end
  return out
end

--- A copy of options, or of those of a group (without its list of parameters). Pairs of numbers are copies, too.
---@param options table<string, any>
---@return table<string, any>
function M.copy(options)
  local out = {}
  for name, value in pairs(options) do          -- the order of pairs does not affect the copy
    if name ~= "params" then out[name] = is_plain(value) and listing.copy(value) or value end
  end
  return out
end

local function outside(o, v, low) return type(v) ~= "number" or v ~= v or v < low or v >= o.below end

-- The accepted numbers as text. low: the least one; may be minus infinity.
local function limits(o, low)
  return "a number" .. (low > -math.huge and (" from %g"):format(low) or "")
    .. (o.below < math.huge and (" to below %g"):format(o.below) or "")
end

local double_p, int_p, char_p = ffi.typeof "double *", ffi.typeof "int32_t *", ffi.typeof "char *"
local scratch = ffi.new "ms_optim_options"

--- Checks a group's options and writes them to the engine's struct. later: called after construction, when a script may
--- set some options below their least values, for example a negative learning rate.
---@param row table  the optimizer's row, made by M.read
---@param group table  a group with its options
---@param later? boolean  true: after construction
---@param into? ffi.cdata*  ms_optim_options
function M.check(row, group, later, into)
  if not into then
    into = scratch
    ffi.fill(into, ffi.sizeof(into))
  end
  into.kind = row.kind
  local base, options = ffi.cast(char_p, into), row.options
  for k = 1, #options do
    local o = options[k]
    local v, low = group[o.name], later and not o.later and -math.huge or o.low
    if o.count < 1 then
      opts.expect(v, opts.boolean, "%s: %s", row.name, o.name)
      ffi.cast(o.count == 0 and int_p or double_p, base + o.at)[0] = v and 1 or 0
    elseif o.count == 1 then
      if outside(o, v, low) then opts.wrong(v, limits(o, low), "%s: %s", row.name, o.name) end
      ffi.cast(double_p, base + o.at)[0] = v
    else
      if not is_plain(v) then opts.wrong(v, "a pair of numbers", "%s: %s", row.name, o.name) end
      for j = 1, 2 do
        if outside(o, v[j], low) then opts.wrong(v[j], limits(o, low), "%s: %s[%d]", row.name, o.name, j) end
        ffi.cast(double_p, base + o.at)[j - 1] = v[j]
      end
    end
  end
  if lib.ms_optim_check(into) ~= 0 then errors.fail() end
end

return M
