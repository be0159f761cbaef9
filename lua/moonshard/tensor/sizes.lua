-- SPDX-License-Identifier: MIT
--- The class of t.shape: the list of a tensor's sizes. Shapes are compared by their sizes and printed as [2, 3].
local errors = require "moonshard.core.errors"
local misspelt = require "moonshard.core.misspelt"

local Shape = { __name = "Shape" }

function Shape.__tostring(s) return "[" .. table.concat(s, ", ") .. "]" end

function Shape.__eq(a, b)
  if #a ~= #b then return false end
  for d = 1, #a do
    if a[d] ~= b[d] then return false end
  end
  return true
end

function Shape.__concat(a, b) return tostring(a) .. tostring(b) end

-- Called for keys that the list lacks. Gives nil, because scripts may compute a dimension and test whether it exists;
-- but raises where the script has a literal 0 or negative number, such as Python's shape[-1].
function Shape.__index(_, d)
  if type(d) ~= "number" or d > 0 or not misspelt.is_literal(d, 2) then return nil end
  if d == 0 then errors.raise "shape[0]: dimensions count from 1: the first size is shape[1]" end
  errors.raise("shape[%d]: write size(%d), which counts from the end", d, d)
end

return Shape
