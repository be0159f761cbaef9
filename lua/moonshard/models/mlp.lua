-- SPDX-License-Identifier: MIT
--- MLP: linear layers with an activation, and optionally dropout, between them.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"

---@class MLP: Sequential
---@overload fun(sizes: integer[], opts?: { activation: string, dropout: number, bias: boolean, dtype: string, device: string }): MLP
---   sizes: features of the input, of each hidden layer, and of the output; activation: the name of a layer of nn
---   without arguments (default: "ReLU"); dropout: probability after each activation (default: 0); bias: the linear
---   layers have a bias (default: true)
local MLP = nn.Sequential:extend "MLP"

function MLP:init(sizes, given)
  local o = opts("MLP", given, { activation = "ReLU", dropout = 0, bias = true, dtype = opts.string, device = opts.any })
  opts.need(opts.is_plain(sizes) and #sizes >= 2, sizes, "a list of at least two sizes", "MLP: argument 1")
  local activation = rawget(nn, o.activation)
  if not activation then
    errors.raise("MLP: option 'activation' is %s, expected the name of a layer, such as 'ReLU'", errors.show(o.activation))
  end
  nn.Sequential.init(self)
  for k = 2, #sizes do
    self:append(nn.Linear(sizes[k - 1], sizes[k], { bias = o.bias, dtype = o.dtype, device = o.device }))
    if k < #sizes then
      self:append(activation())
      if o.dropout > 0 then self:append(nn.Dropout(o.dropout)) end
    end
  end
end

return MLP
