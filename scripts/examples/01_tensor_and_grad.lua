-- SPDX-License-Identifier: MIT
--- 1. Tensors and gradients.   luajit scripts/examples/01_tensor_and_grad.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"

-- A tensor has a shape, a dtype and a device. Positions in Lua count from 1.
local a = ms.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
print(a)
print("sums of the rows:", table.concat(a:sum(2):tolist(), " "))
print("a row, doubled:", table.concat((a[2] * 2):tolist(), " "))
print("its transposed shape:", a:t().shape)

-- Operators on a tensor that requires a gradient are recorded on the tape; backward goes through the tape.
local x = ms.tensor({ 1, 2, 3 }, { requires_grad = true })
local y = (x * x):sum()                                 -- y = 1 + 4 + 9
y:backward()
print("y:", y:item())
print("dy/dx = 2x:", table.concat(x.grad:tolist(), " "))

-- Gradients accumulate until they are cleared.
x.grad = nil
(x ^ 3):sum():backward()
print("d(x^3)/dx = 3x^2:", table.concat(x.grad:tolist(), " "))

-- A scope releases the tensors made in it, except those it returns; memory does not wait for the garbage collector.
local before = ms.memory_stats("cpu").allocated
local norm = ms.scope(function()
  local big = ms.ones(1000, 1000)
  return (big * big):sum():sqrt()
end)
print("norm of a million ones:", norm:item())
print("bytes left after the scope, of 8 million:", ms.memory_stats("cpu").allocated - before)
