-- SPDX-License-Identifier: MIT
--- Shared by Linear and convolutions: checks their sizes and initialises weight and bias.
local opts = require "moonshard.core.opts"
local init = require "moonshard.nn.initial".init

local M = {}

--- Raises if one of the sizes is not a whole number from 0.
---@param who string  the layer's name in messages
function M.check_sizes(who, size_in, size_out)
  opts.expect(size_in, opts.whole_from(0), "%s: argument 1, the size of its input,", who)
  opts.expect(size_out, opts.whole_from(0), "%s: argument 2, the size of its output,", who)
end

--- Fills weight and bias with uniform numbers in +-1/sqrt(inputs).
---@param m Module  has the fields weight and bias
---@param inputs integer  the fan-in: elements of the weight at one position of its first dimension
function M.reset(m, inputs)
  init.kaiming_uniform_(m.weight, { a = math.sqrt(5) })
  if m.bias then
    local bound = inputs > 0 and 1 / math.sqrt(inputs) or 0
    init.uniform_(m.bias, -bound, bound)
  end
end

return M
