--- behaviour.md 2.2, SkipModule and SkipModel: nested Linears without bias, wrapped by `wrap`; linear_skip is taken out of the
--- tree while the outer one is wrapped, so that it stays unmanaged.
local ms = require "moonshard"
local nn = ms.nn

local no_bias = { bias = false }

local SkipModule = nn.Module:extend("SkipModule")
function SkipModule:init() self.lin = nn.Linear(10, 10, no_bias) end
function SkipModule:forward(x) return self.lin(x) end

local NestedLinear = nn.Module:extend("NestedLinear")
function NestedLinear:init(fsdp_wrap)
  local wrap = ms.fsdp.wrap.wrap
  self.nested_linear = fsdp_wrap and wrap(nn.Linear(10, 10, no_bias)) or nn.Linear(10, 10, no_bias)
end
function NestedLinear:forward(x) return self.nested_linear(x) end

local SkipModel = nn.Module:extend("SkipModel")
function SkipModel:init(double_nest)
  self.linear = nn.Linear(10, 10, no_bias)
  self.linear_skip = SkipModule()
  self.nested_linear = ms.fsdp.wrap.wrap(NestedLinear(double_nest))
end
function SkipModel:forward(x) return self.nested_linear(self.linear_skip(self.linear(x))) end

return {
  SkipModule = SkipModule, NestedLinear = NestedLinear, SkipModel = SkipModel,
  --- A SkipModel in FSDP whose linear_skip is no part of any unit. options: fsdp.FSDP's.
  init = function(double_nest, options)
    local FSDP, wrap = ms.fsdp.FSDP, ms.fsdp.wrap
    local inner = { wrapper_cls = FSDP }
    for key, value in ms.sorted_pairs(options or {}) do inner[key] = value end
    local model = wrap.enable_wrap(inner, function() return SkipModel(double_nest) end)
    local skip = model.linear_skip
    model.linear_skip = nil
    model = FSDP(model, options)
    model.module.linear_skip = skip
    return model
  end,
}
