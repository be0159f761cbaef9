-- SPDX-License-Identifier: MIT
--- SaveForwardInputsModel: two Linears in sequence. The model and both layers record the dtypes of their inputs.
local ms = require "moonshard"
local nn = ms.nn

local SaveForwardInputs = nn.Module:extend("SaveForwardInputs")

--- seen: receives the dtype of the latest input by module. Option of `given`: cast_forward_inputs (casts x to the weight's
--- dtype).
function SaveForwardInputs:init(seen, given)
  self.linear = nn.Linear(100, 100)
  self.seen, self.casts = seen, given and given.cast_forward_inputs
end

function SaveForwardInputs:forward(x)
  self.seen[self] = x.dtype
  return self.linear(self.casts and x:to(self.linear.weight.dtype) or x)
end

local SaveForwardInputsModel = nn.Module:extend("SaveForwardInputsModel")

function SaveForwardInputsModel:init(seen, given)
  self.c1, self.c2 = SaveForwardInputs(seen, given), SaveForwardInputs(seen, given)
  self.seen = seen
end

function SaveForwardInputsModel:forward(x)
  self.seen[self] = x.dtype
  return self.c2(self.c1(x))
end

return { SaveForwardInputsModel = SaveForwardInputsModel }
