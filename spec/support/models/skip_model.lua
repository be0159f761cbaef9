-- SPDX-License-Identifier: MIT
--- SkipModule and SkipModel: nested Linears without bias, wrapped by ms.fsdp.wrap; linear_skip is removed from the tree
--- while the SkipModel itself is wrapped, so that no unit manages it.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn, dist = ms.nn, ms.dist

local no_bias = { bias = false }

local SkipModule = nn.Module:extend("SkipModule")
function SkipModule:init() self.lin = nn.Linear(10, 10, no_bias) end
--- No unit casts linear_skip to low precision, so forward casts it to compute_dtype.
function SkipModule:forward(x)
  if not self.compute_dtype then return self.lin(x) end
  return ms.amp.autocast(self.compute_dtype, function() return self.lin(x) end)
end

local NestedLinear = nn.Module:extend("NestedLinear")
function NestedLinear:init() self.nested_linear = ms.fsdp.wrap.wrap(nn.Linear(10, 10, no_bias)) end
function NestedLinear:forward(x) return self.nested_linear(x) end

local SkipModel = nn.Module:extend("SkipModel")
function SkipModel:init()
  self.linear = nn.Linear(10, 10, no_bias)
  self.linear_skip = SkipModule()
  self.nested_linear = ms.fsdp.wrap.wrap(NestedLinear())
end
function SkipModel:forward(x) return self.nested_linear(self.linear_skip(self.linear(x))) end

common.sum_model(SkipModel, { 1, 10 })

-- The sum of ten numbers of both signs has too few correct digits in a half dtype to be compared.
function SkipModel.get_loss(_, _, output) return output:pow(2):sum() end

--- The script reduces gradients of parameters that no unit manages.
function SkipModel:run_backward(loss)
  loss:backward()
  if not self.wrapped then return end
  for _, p in ipairs(self.linear_skip:parameters()) do dist.all_reduce(p.grad, { op = "avg" }) end
end

--- A SkipModel in FSDP whose linear_skip belongs to no unit. options: for fsdp.FSDP.
local function wrapped(options)
  local FSDP, wrap = ms.fsdp.FSDP, ms.fsdp.wrap
  local inner = { wrapper_cls = FSDP }
  for key, value in ms.sorted_pairs(options or {}) do inner[key] = value end
  local model = wrap.enable_wrap(inner, SkipModel)
  local skip = model.linear_skip
  model.linear_skip = nil
  model = FSDP(model, options)
  model.module.linear_skip, model.module.wrapped = skip, true
  local policy = options and options.mixed_precision
  skip.compute_dtype = policy and policy.param_dtype
  return model
end

return {
  init = function(...)
    local o = common.options(...)
    if o.deterministic then ms.manual_seed(0) end
    local model
    if o.wrap_fsdp then
      model = wrapped(common.fsdp_options(o))
    else
      model = common.place(SkipModel(), o)
      local skip = model.linear_skip
      model.linear_skip = nil
      model.linear_skip = skip                      -- listed last, as in a model that removes it and assigns it again
    end
    common.rank_of(o.wrap_fsdp and model.module or model, o)
    return model
  end,
}
