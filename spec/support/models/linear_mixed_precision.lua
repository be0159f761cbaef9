-- SPDX-License-Identifier: MIT
--- LinearMixedPrecision: a Linear without bias, and a float64 buffer; in mixed precision its forward checks all dtypes.
--- Two in sequence are the nested model of PyTorch's suite: its units are the first layer and the root.
local assert = require "luassert"
local ms = require "moonshard"
local common = require "spec.support.models.common"
local engine = require "moonshard.core.ffi"
local module = require "moonshard.parallel.fsdp.module"
local wrapped = require "spec.support.wrapped"
local nn = ms.nn

local LinearMixedPrecision = nn.Module:extend("LinearMixedPrecision")

--- Buffers have distinct names, so that a lost or repeated prefix is detected.
function LinearMixedPrecision:init(buffer_name, kind)
  self.lin = nn.Linear(10, 10, { bias = false, dtype = kind and kind.dtype })
  self.buffer_name = buffer_name
  self:register_buffer(buffer_name, ms.randn(1, 2, { dtype = "float64" }))
  self.forwards = 0
end

-- policy: the MixedPrecision; full: the stored dtype; root: the outermost FSDP instance.
local function check(self, x, given)
  local low = given.policy.param_dtype or given.full
  assert.equal(low, x.dtype)
  assert.equal(low, self.lin.weight.dtype)
  assert.equal(given.policy.buffer_dtype or "float64", self[self.buffer_name].dtype)
  local active = 0
  for _, m in ipairs(ms.fsdp.fsdp_modules(given.root)) do
    local unit = module.unit_of(m)
    local whole = engine.lib.ms_unit_get_state(unit.handle).is_gathered ~= 0
    if whole then active = active + 1 end
    for _, p in ipairs(unit.originals) do assert.equal(whole and low or given.full, p.dtype) end
    -- The flat parameter, which the optimizer steps, keeps the stored dtype.
    for _, p in ipairs(m.params) do assert.equal(given.full, p.dtype) end
  end
  assert.is_true(active > 0)
end

function LinearMixedPrecision:forward(x)
  self.forwards = self.forwards + 1
  if self.given then check(self, x, self.given) end
  return self.lin(x)
end

local Nested = nn.Sequential:extend("NestedLinearMixedPrecision")
common.sum_model(Nested, { 4, 10 })

return {
  LinearMixedPrecision = LinearMixedPrecision,
  --- Options of `given` besides the common ones: dtype. When wrapped, the layers check the dtypes of their tensors.
  init = function(...)
    local o = common.options(...)
    if o.deterministic then ms.manual_seed(0) end
    local first, second = LinearMixedPrecision("buffer0", o), LinearMixedPrecision("buffer1", o)
    local model = common.place(Nested(first, second), o)
    common.rank_of(model, o)
    if not o.wrap_fsdp then return model end
    local options = common.fsdp_options(o)
    wrapped.replace(model, { first }, common.wrapper(o))
    local root = ms.fsdp.FSDP(model, options)
    if options.mixed_precision then
      local given = { policy = options.mixed_precision, full = o.dtype or "float32", root = root }
      first.given, second.given = given, given
    end
    return root
  end,
}
