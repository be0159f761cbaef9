-- SPDX-License-Identifier: MIT
--- How scripts see the parameters of an FSDP unit: as one flat parameter; or, with use_orig_params, as the original
--- parameters, which are this rank's 1-d pieces while their module does not run.
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local Parameter = require "moonshard.nn.module.parameter".Parameter
local sharded = require "moonshard.parallel.fsdp.sharded"
local shards = require "moonshard.nn.module.shards"
local tensor = require "moonshard.tensor"

local lib = engine.lib
local setters = tensor.setters
local rawget, rawset, getmetatable, setmetatable = rawget, rawset, getmetatable, setmetatable

local M = {}

--- Whether the unit's whole parameters are visible: its module runs, or summon_full_params has made them whole.
---@return boolean
local function is_open(unit) return (unit.inside or 0) > 0 or unit.summoned == true end
M.is_open = is_open

-- ---- one flat parameter --------------------------------------------------------------------------

local function flat_hidden(p) return is_open(rawget(p, "_flat")) end
local function original_hidden(p) return not is_open(rawget(p, "_unit")) end

--- The unit's flat parameter. Listings contain it in place of the original parameters, except while these are visible.
---@return Parameter
function M.flat_parameter(unit)
  local id = lib.ms_unit_flat(unit.handle)
  if id == 0 then errors.fail() end
  return setmetatable({ id = id, _flat = unit, _hidden = flat_hidden }, Parameter)
end

--- With use_orig_params there is no flat parameter. Returns this rank's part of all parameters, and of their gradients,
--- as one tensor.
---@return Parameter
function M.pieces_as_one(unit)
  local id = lib.ms_unit_flat(unit.handle)
  if id == 0 then errors.fail() end
  local p = setmetatable({ id = id }, Parameter)
  if engine.state.scope == 0 then tensor.own(p) end
  return p
end

--- Makes p, which the engine has just sharded, belong to the unit's flat parameter.
function M.adopt(p, unit, name)
  sharded.adopt(p, unit)
  rawset(p, "_hidden", original_hidden)
  shards.leave(p, name, "was replaced by a flat parameter of fsdp.FSDP")
end

--- Before a root's forward: trains or freezes a flat parameter with its original parameters, whichever of the two the
--- script has changed. Raises if the original parameters differ.
function M.follow(unit)
  local module = unit.modules[1]                        -- held weakly: a replaced module may have been collected
  local flat = module and rawget(module, "_slots").flat_param
  if not flat then return end
  local first, own = unit.originals[1].requires_grad, flat.requires_grad
  for _, place in ipairs(unit.places) do
    if place[3].requires_grad ~= first then
      errors.raise("FSDP: parameter '%s' %s and '%s' does not, but a flat parameter is trained or frozen as a whole; give "
        .. "fsdp.FSDP use_orig_params = true", (first and unit.places[1] or place)[4], "requires grad",
        (first and place or unit.places[1])[4])
    end
  end
  if first ~= own then
    local now = first
    if first == unit.trains then now = own end
    flat.requires_grad = now
    for _, p in ipairs(unit.originals) do p.requires_grad = now end
  end
  unit.trains = flat.requires_grad
end

-- ---- pieces --------------------------------------------------------------------------------------

local own_getters, own_setters = {}, {}

-- The gradient of this rank's piece; inside summon_full_params, the whole gradient, which exists only with its option
-- with_grads.
function own_getters.grad(p)
  if rawget(p, "_unit").summoned then return rawget(p, "_whole_grad") end
  return sharded.Sharded.methods.to_local(p).grad
end

function own_setters.grad(p, g)
  if rawget(p, "_whole_grad") then
    if g == nil then
      rawset(p, "_whole_grad", nil)
      rawset(p, "_grad_cleared", true)
    elseif g ~= p._whole_grad then
      p._whole_grad:copy_(g)
    end
    return
  end
  sharded.Sharded.methods.to_local(p).grad = g
end

function own_setters.requires_grad(p, on)
  setters.requires_grad(p, on)
  sharded.Sharded.methods.to_local(p).requires_grad = on
end

local classes = setmetatable({}, { __mode = "k" })

local function class_for(cls)
  local pieces = classes[cls]
  if pieces then return pieces end
  pieces = tensor.subclass(rawget(cls, "__name"), cls)
  local methods = rawget(pieces, "methods")
  methods.to_local, methods.full_tensor = sharded.Sharded.methods.to_local, sharded.Sharded.methods.full_tensor
  function methods.requires_grad_(p, on)
    own_setters.requires_grad(p, on ~= false)
    return p
  end
  tensor.install(pieces, methods, own_getters, own_setters)
  classes[cls] = pieces
  return pieces
end

--- Makes p, which the engine has just sharded, behave as this rank's piece while its module does not run.
function M.adopt_piece(p, unit)
  shards.note()
  rawset(p, "_unit", unit)
  rawset(p, "_pieces", true)
  rawset(p, "_grad", nil)
  setmetatable(p, class_for(getmetatable(p)))
end

-- ---- listings for state dicts --------------------------------------------------------------------

--- Whether p is an original parameter that listings replace by its unit's flat parameter.
function M.is_concealed(p) return rawget(p, "_hidden") == original_hidden end

--- Iterates over the flat parameters of m and its descendants; gives the name and the unit of each, too.
function M.parameters_below(m)
  local names, values, k = {}, {}, 0
  for name, sub in m:named_modules() do
    local unit = rawget(sub, "_fsdp")
    local p = unit and unit.classic and rawget(sub, "_slots").flat_param
    if p then names[#names + 1], values[#values + 1] = (name == "" and "" or name .. ".") .. "flat_param", p end
  end
  return function()
    k = k + 1
    return names[k], values[k], values[k] and rawget(values[k], "_flat")
  end
end

--- Maps parameters of m and its descendants to their names before wrapping; the first name if there are several.
function M.names_below(m)
  local names, values = m:_state()
  local name_of = {}
  for k = #names, 1, -1 do name_of[values[k]] = names[k] end
  return name_of
end

--- The position of p in this rank's part of its flat parameter: first element (from 1) and number of elements.
function M.place_of(p)
  local first = lib.ms_unit_flat_offset(p.id)
  if first < 0 then errors.fail(p) end
  return first + 1, sharded.Sharded.methods.to_local(p):numel()
end

--- The unit of p if p is a parameter or the flat parameter of an FSDP instance, else nil.
function M.unit_of(p)
  local unit = tensor.is_tensor(p) and (rawget(p, "_unit") or rawget(p, "_flat"))
  return unit and unit.classic and unit or nil
end

function M.is_parameter(p) return class.isa(p, Parameter) end

return M
