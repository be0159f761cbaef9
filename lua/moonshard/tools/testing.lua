-- SPDX-License-Identifier: MIT
--- testing: comparison with tolerances by dtype, and comparison of gradients with finite differences.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local read = require("moonshard.tensor.values").read
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local autograd = require "moonshard.autograd"
local close = require "moonshard.autograd.close"
local scope = require "moonshard.tensor.scope"

local M = { assert_close = close.assert_close }

-- Returns the floating point tensors among the results of fn.
local function outputs(fn, inputs)
  local list = {}
  for _, out in ipairs { fn(unpack(inputs)) } do
    if tensor.is_tensor(out) and dtypes.is_float(tensor.info_of(out).dtype) then list[#list + 1] = out end
  end
  return list
end

--- Compares backward with central differences, and raises at the first difference.
---@param fn fun(...): Tensor  called with the inputs; its floating point results are checked
---@param inputs Tensor[]  float64; those that require grad are checked
---@param given? { eps: number, rtol: number, atol: number }
---   eps: step of the differences; rtol: relative tolerance; atol: absolute tolerance
---@return true
function M.gradcheck(fn, inputs, given)
  local o = opts("gradcheck", given, { eps = 1e-6, rtol = 1e-3, atol = 1e-5 })
  opts.expect(fn, opts.fn, "gradcheck: argument 1")
  if tensor.is_tensor(inputs) then inputs = { inputs } end
  if type(inputs) ~= "table" then opts.wrong(inputs, "a list of tensors", "gradcheck: argument 2") end
  for k, t in ipairs(inputs) do
    if tensor.is_tensor(t) and t.requires_grad and t.dtype ~= "float64" then
      errors.raise("gradcheck: input %d is %s, expected float64", k, t.dtype)
    end
  end
  scope.scope(function()
    -- A random weighting of the outputs reduces the Jacobian to one gradient that depends on every element.
    local weights
    local function total()
      local list = outputs(fn, inputs)
      if #list == 0 then errors.raise "gradcheck: the function returned no floating point tensor, expected at least one" end
      weights = weights or (function()
        local w = {}
        for k, out in ipairs(list) do w[k] = create.rand(out.shape, { dtype = "float64" }):to(out.device) + 0.5 end
        return w
      end)()
      local sum
      for k, out in ipairs(list) do
        local part = (out:double() * weights[k]):sum()
        sum = sum and sum + part or part
      end
      return sum
    end
    local wanted = {}
    for _, t in ipairs(inputs) do
      if tensor.is_tensor(t) and t.requires_grad then wanted[#wanted + 1] = t end
    end
    if #wanted == 0 then errors.raise "gradcheck: no input requires grad, expected at least one" end
    local grads = autograd.grad(total(), wanted, { allow_unused = true })
    autograd.no_grad(function()
      for k, t in ipairs(wanted) do
        local shape, n = t.shape, t:numel()
        local analytic = grads[k] and read(grads[k])
        local original = read(t)
        local values = t:detach():contiguous()
        local flat = values:view(n)
        local direct = values:data_ptr() == t:data_ptr()
        for j = 0, n - 1 do
          local function at(v)
            local x
            flat[j + 1] = v
            if not direct then t:detach():copy_(values) end
            scope.scope(function() x = total():item() end)
            return x
          end
          local up, down = at(original[j] + o.eps), at(original[j] - o.eps)
          at(original[j])
          local numeric = (up - down) / (2 * o.eps)
          local mine = analytic and analytic[j] or 0
          local fits = math.abs(mine - numeric) <= o.atol + o.rtol * math.abs(numeric)
          if not fits then
            errors.raise("gradcheck: input %d %s at %s: backward gives %.9g, finite differences %.9g", k, tostring(shape),
              close.place(j, shape), mine, numeric)
          end
        end
      end
    end)
  end)
  return true
end

return M
