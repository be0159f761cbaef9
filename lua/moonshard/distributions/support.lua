-- SPDX-License-Identifier: MIT
--- What parameters and values of distributions may be: each constraint tests a tensor, and says in messages what it
--- expected.
local capture = require "moonshard.autograd.capture"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local number_types = require "moonshard.tensor.number_types"
local tensor = require "moonshard.tensor"

local M = {}

---@class Constraint
---@field event_dims integer  how many of the last dimensions belong to one value
local Constraint = { __name = "Constraint" }
Constraint.__index = Constraint
function Constraint:__tostring() return self.text end

--- Which values of a tensor meet the constraint. Errors: a value with fewer dimensions than the constraint's.
---@param value Tensor|number  [..., event]
---@return Tensor  bool [...]
function Constraint:check(value)
  if type(value) == "number" then
    local like = self.like
    value = create.tensor(value, like and { dtype = like.dtype, device = like.device } or { dtype = "float64" })
  end
  if not tensor.is_tensor(value) then
    errors.raise("check: value is %s, expected a number or a tensor", errors.kind(value))
  end
  if value.ndim < self.event_dims then
    errors.raise("check: value has shape %s, expected at least %d dimension%s", tostring(value.shape), self.event_dims,
      self.event_dims == 1 and "" or "s")
  end
  return self.test(value.dtype == "bool" and value:long() or value)             -- bools count as 0 and 1
end
M.Constraint = Constraint

--- Makes a constraint.
---@param text string  what messages say after "expected", such as "a number > 0"
---@param event_dims integer  how many of the last dimensions belong to one value
---@param test fun(value: Tensor): Tensor  bool, without those dimensions
function M.new(text, event_dims, test)
  return setmetatable({ text = text, event_dims = event_dims, test = test }, Constraint)
end

local new = M.new

M.real = new("a number", 0, function(x) return x:eq(x) end)
M.positive = new("a number > 0", 0, function(x) return x:gt(0) end)
M.finite_positive = new("a finite number > 0", 0, function(x) return x:gt(0):logical_and(x:lt(math.huge)) end)
M.finite_nonnegative = new("a finite number from 0", 0, function(x) return x:ge(0):logical_and(x:lt(math.huge)) end)
M.nonnegative = new("a number from 0", 0, function(x) return x:ge(0) end)
M.probability = new("a number from 0 to 1", 0, function(x) return x:ge(0):logical_and(x:le(1)) end)
M.boolean = new("0 or 1", 0, function(x) return x:eq(0):logical_or(x:eq(1)) end)
M.count = new("a whole number from 0", 0, function(x) return x:ge(0):logical_and(x:eq(x:floor())) end)
M.reals = new("numbers", 1, function(x) return x:eq(x):all(-1) end)

--- Constraint of a vector of weights: a probability for each class, up to a common factor.
M.weights = new("numbers from 0 with a sum above 0", 1, function(x)
  return x:ge(0):all(-1):logical_and(x:sum(-1):gt(0)):logical_and(x:sum(-1):lt(math.huge))
end)

--- Constraint of a vector of logits: -inf masks a class.
M.logits = new("numbers below inf, at least one of them above -inf (-inf masks a class)", 1, function(x)
  return x:lt(math.huge):all(-1):logical_and(x:gt(-math.huge):any(-1))
end)

-- PyTorch's tolerance for a sum of probabilities, or the rounding errors of its terms, which are larger in half types.
local function slack(x)
  return math.max(1e-6, x:is_floating_point() and number_types.finfo(x.dtype).eps * x.shape[x.ndim] or 0)
end
M.simplex = new("numbers from 0 with the sum 1", 1, function(x)
  return x:ge(0):all(-1):logical_and((x:sum(-1) - 1):abs():lt(slack(x)))
end)

M.one_hot = new("one 1 and otherwise 0", 1, function(x)
  return x:eq(0):logical_or(x:eq(1)):all(-1):logical_and(x:sum(-1):eq(1))
end)

--- Constraint of numbers from low to high; both limits broadcast with the value.
function M.between(low, high)
  local within = new("a number from low to high", 0, function(x) return x:ge(low):logical_and(x:le(high)) end)
  within.like = low                     -- check converts a Lua number to its dtype and device
  return within
end

--- Constraint of class ids below n.
function M.id_below(n)
  return new(("a whole number from 0 to %d"):format(n - 1), 0, function(x)
    return x:ge(0):logical_and(x:lt(n)):logical_and(x:eq(x:floor()))
  end)
end

-- ---- messages ------------------------------------------------------------------------------------------

local LISTED = 8                        -- the largest number of elements that a message shows

local function text_of(values)
  if type(values) ~= "table" then return type(values) == "number" and ("%g"):format(values) or tostring(values) end
  local parts = {}
  for k = 1, math.min(#values, LISTED) do parts[k] = text_of(values[k]) end
  if #values > LISTED then parts[LISTED + 1] = "..." end
  return "[" .. table.concat(parts, ", ") .. "]"
end

--- Raises an error that names the first value that does not meet the constraint. Waits for the device; a captured step
--- is refused.
---@param label string  the value's name in messages
---@param value Tensor
---@param constraint Constraint
function M.verify(label, value, constraint)
  capture.refuse(label .. " is checked, which reads its values, and a captured step repeats its work without the "
    .. "script; make the distribution with validate_args = false")
  local met = constraint:check(value)
  if met:all():item() then return end
  local at = met:reshape(-1):long():argmin(1):item()                      -- from 0
  local position, rest = {}, at
  for d = #met.shape, 1, -1 do
    position[d] = rest % met.shape[d] + 1
    rest = math.floor(rest / met.shape[d])
  end
  local shown = value
  for _, k in ipairs(position) do shown = shown:select(1, k) end
  errors.raise("%s is %s%s, expected %s", label, text_of(shown:tolist()),
    position[1] and (" at [%s]"):format(table.concat(position, ", ")) or "", constraint.text)
end

return M
