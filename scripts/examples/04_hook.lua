-- SPDX-License-Identifier: MIT
--- 4. Hooks: observing and changing a model's computation. luajit scripts/examples/04_hook.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn = ms.nn

ms.manual_seed(1)
local model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

-- A forward hook is called after the forward of its layer, with the layer, its inputs and its output.
local handles = {}
for name, m in model:named_children() do
  handles[#handles + 1] = m:register_forward_hook(function(module, _, out)
    print(("layer %s, %s: output %s"):format(name, module:class_name(), tostring(out.shape)))
  end)
end

-- A hook on a tensor gets its gradient in backward; its return value replaces the gradient.
local x = ms.ones(2, 3)
x.requires_grad = true
local hidden = model[1](x)
hidden:register_hook(function(grad)
  print("gradient of the hidden layer:", grad.shape)
  return grad * 0
end)
local loss = model[3](model[2](hidden)):sum()
loss:backward()
print("zeroed on its way to the input:", x.grad:abs():sum():item() == 0)

-- A hook on a parameter runs when the parameter's gradient is complete.
model[3].weight:register_post_accumulate_grad_hook(function(p) print("landed:", p.grad.shape) end)
for _, handle in ipairs(handles) do handle:remove() end
model:zero_grad()
model(ms.ones(2, 3)):sum():backward()
