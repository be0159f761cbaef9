-- SPDX-License-Identifier: MIT
--- Shared by Linear and Conv2d: the check of their sizes, and the draw of weight and bias.
local opts = require "moonshard.core.opts"
local init = require "moonshard.nn.initial".init

local M = {}

--- Raises unless both are whole numbers.
---@param who string
function M.check_sizes(who, size_in, size_out)
  opts.expect(size_in, opts.whole_from(0), "%s: argument 1, the size of its input,", who)
  opts.expect(size_out, opts.whole_from(0), "%s: argument 2, the size of its output,", who)
end

--- Draws weight and bias, uniform in +-1/sqrt(inputs of an output).
---@param m Module
---@param inputs integer
function M.reset(m, inputs)
  init.kaiming_uniform_(m.weight, { a = math.sqrt(5) })
  if m.bias then
    local bound = inputs > 0 and 1 / math.sqrt(inputs) or 0
    init.uniform_(m.bias, -bound, bound)
  end
end

return M
