-- SPDX-License-Identifier: MIT
--- Compares functions with PyTorch's numbers, forward and backward, in float64 and float32. A file of cases has, for
--- each name, the inputs, the output, its gradient and the gradients of the inputs; spec/golden/data/cases.py writes
--- them.
local busted = require "busted"
local ms = require "moonshard"
local golden = require "spec.support.golden"

local function compare(case, fn, dtype, rtol, atol)
  local inputs = {}
  for i, list in ipairs(case.inputs) do
    inputs[i] = ms.tensor(list, { dtype = dtype }):reshape(case.input_shapes[i]):requires_grad_(true)
  end
  local out = fn(unpack(inputs))
  assert(table.concat(case.output_shape, ",") == table.concat(out.shape, ","), "shape " .. tostring(out.shape))
  golden.close_list("output", case.output, out, rtol, atol)
  if not case.grad_output then return end
  out:backward(ms.tensor(case.grad_output, { dtype = dtype }):reshape(case.output_shape))
  for i, list in ipairs(case.input_grads) do
    golden.close_list("gradient " .. i, list, inputs[i].grad or ms.zeros(inputs[i].shape), rtol, atol * 10)
  end
end

--- Describes the tests of a file of cases.
---@param file string  a file of spec/golden/data, without ".json"
---@param functions table<string, function>  by name of the case; called with the inputs
---@param same_as? table<string, string>  functions that are compared with another function's case
return function(file, functions, same_as)
  local reference = golden.load(file)
  busted.describe("golden " .. file, function()
    busted.it("have no case that the spec leaves out", function()
      local unknown = {}
      for name in ms.sorted_pairs(reference.cases) do
        if not functions[name] then unknown[#unknown + 1] = name end
      end
      assert(#unknown == 0, table.concat(unknown, " "))
    end)
    for name, fn in ms.sorted_pairs(functions) do
      local case = reference.cases[same_as and same_as[name] or name]
      for _, kind in ipairs { { "float64", 1e-10, 1e-12 }, { "float32", 2e-5, 2e-6 } } do
        busted.it(("give PyTorch's output and gradients: %s in %s"):format(name, kind[1]), function()
          compare(assert(case, ("%s.json has no case '%s'"):format(file, name)), fn, unpack(kind))
        end)
      end
    end
  end)
end
