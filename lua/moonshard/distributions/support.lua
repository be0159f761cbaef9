-- SPDX-License-Identifier: MIT
--- What parameters and values of distributions may be: each constraint tests a tensor, and says in messages what it
--- expected.
local errors = require "moonshard.core.errors"

local M = {}

---@class Constraint
---@field event_dims integer  how many of the last dimensions belong to one value
local Constraint = { __name = "Constraint" }
Constraint.__index = Constraint
function Constraint:__tostring() return self.text end

--- Which values of a tensor meet the constraint.
---@param value Tensor  [..., event]
---@return Tensor  bool [...]
function Constraint:check(value) return self.test(value) end
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
M.nonnegative = new("a number from 0", 0, function(x) return x:ge(0) end)
M.probability = new("a number from 0 to 1", 0, function(x) return x:ge(0):logical_and(x:le(1)) end)
M.boolean = new("0 or 1", 0, function(x) return x:eq(0):logical_or(x:eq(1)) end)
M.count = new("a whole number from 0", 0, function(x) return x:ge(0):logical_and(x:eq(x:floor())) end)
M.reals = new("numbers", 1, function(x) return x:eq(x):all(-1) end)

--- Constraint of a vector of weights: a probability for each class, up to a common factor.
M.weights = new("numbers from 0 with a sum above 0", 1, function(x)
  return x:ge(0):all(-1):logical_and(x:sum(-1):gt(0)):logical_and(x:sum(-1):lt(math.huge))
end)

local SLACK = 1e-6                      -- PyTorch's tolerance for a sum of probabilities
M.simplex = new("numbers from 0 with the sum 1", 1, function(x)
  return x:ge(0):all(-1):logical_and((x:sum(-1) - 1):abs():lt(SLACK))
end)

M.one_hot = new("one 1 and otherwise 0", 1, function(x)
  return x:eq(0):logical_or(x:eq(1)):all(-1):logical_and(x:sum(-1):eq(1))
end)

--- Constraint of numbers from low to high; both limits broadcast with the value.
function M.between(low, high)
  return new("a number from low to high", 0, function(x) return x:ge(low):logical_and(x:le(high)) end)
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

--- Raises an error that names the first value that does not meet the constraint. Waits for the device.
---@param label string  the value's name in messages
---@param value Tensor
---@param constraint Constraint
function M.verify(label, value, constraint)
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
