-- SPDX-License-Identifier: MIT
--- 3. A custom layer, and a function with its own backward.   luajit scripts/examples/03_custom_layer.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn = ms.nn

-- Assigning parameters and modules to fields registers them: they are listed, moved, sharded and saved.
local Gated = nn.Module:extend "Gated"

function Gated:init(dim)
  self.value = nn.Linear(dim, dim)
  self.gate = nn.Linear(dim, dim)
  self.scale = nn.Parameter(ms.ones(dim))
end

function Gated:forward(x)
  return self.value(x) * self.gate(x):sigmoid() * self.scale
end

ms.manual_seed(1)
local layer = Gated(4)
print(layer)
for name, p in layer:named_parameters() do print(name, p.shape) end
print("output:", layer(ms.ones(2, 4)).shape)

-- Rounding has no useful gradient; this function passes the gradient through unchanged.
local round = ms.Function {
  forward = function(_, x) return (x + 0.5):long():to(x.dtype) end,
  backward = function(_, grad) return grad end,
}
local x = ms.tensor({ 0.2, 1.7, 2.5 }, { requires_grad = true })
local y = round(x)
print("rounded:", table.concat(y:tolist(), " "))
local weighted = y * ms.tensor { 1, 10, 100 }
weighted:sum():backward()
print("gradient:", table.concat(x.grad:tolist(), " "))
