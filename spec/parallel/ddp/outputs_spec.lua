-- SPDX-License-Identifier: MIT
--- Forwards that return no plain tensors: a distribution, an object with a metatable, a function. The gradients are
--- those of one process with all ranks' rows.
local ranks = require "spec.support.ranks"

local Known, Other = { __tensors = true }, {}

-- What a forward returns for y, and the tensor in it.
local forms = {
  { name = "a tensor", wrap = function(_, y) return y end, tensor_of = function(out) return out end },
  { name = "a distribution", wrap = function(ms, y) return ms.distributions.Normal(y, 1) end,
    tensor_of = function(out) return out.loc end },
  { name = "an object whose metatable has __tensors", tensor_of = function(out) return out[1].y end,
    wrap = function(_, y) return setmetatable({ { y = y } }, Known) end },
  { name = "another object with a metatable", tensor_of = function(out) return out.y end,
    wrap = function(_, y) return setmetatable({ y = y:keep() }, Other) end },
  { name = "a function", wrap = function(_, y)
    y:keep()
    return function() return y end
  end, tensor_of = function(out) return out() end },
}

ranks.describe(2, "a wrapped forward that returns #mpi", function()
  for _, form in ipairs(forms) do
    local function net_of(ms)
      local Net = ms.nn.Module:extend "OutputsSpecNet"
      function Net:init() self.used, self.unused = ms.nn.Linear(2, 2), ms.nn.Linear(1, 1) end
      function Net:forward(x) return form.wrap(ms, self.used(x)) end
      ms.manual_seed(3)
      return Net()
    end
    local function gradients(model, x, whole)
      for _ = 1, 2 do                                   -- the second iteration of a static graph is another one
        model:zero_grad()
        form.tensor_of(model(x)):pow(2):mean():backward()
      end
      local list = {}
      for _, name in ipairs { "used.weight", "used.bias" } do
        local g = model:get_parameter(name).grad
        list[#list + 1] = (whole and g:full_tensor() or g):clone()
      end
      return list
    end
    local function compare(ms, right, got)
      for k = 1, #right do ms.testing.assert_close(got[k], right[k]) end
    end
    local function rows(ms, from, count) return ms.arange(8):float():reshape(4, 2):narrow(1, from, count) end

    for _, options in ipairs { { find_unused_parameters = true }, { static_graph = true } } do
      it(("%s: DDP with %s"):format(form.name, (next(options))), function(rank)
        local ms = require "moonshard"
        ms.catch_warnings(function()
          local right = gradients(net_of(ms), rows(ms, 1, 4))
          compare(ms, right, gradients(ms.nn.DDP(net_of(ms), options), rows(ms, 1 + 2 * rank, 2)))
        end)
      end)
    end

    it(form.name .. ": fully_shard", function(rank)
      local ms = require "moonshard"
      local model = ms.fsdp.fully_shard(net_of(ms), { reshard_after_forward = true })
      local x = rows(ms, 1 + 2 * rank, 2)
      compare(ms, gradients(net_of(ms), rows(ms, 1, 4)), gradients(model, x, true))
    end)
  end
end)
