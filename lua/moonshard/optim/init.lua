-- SPDX-License-Identifier: MIT
--- optim: optimizers over the engine's fused step, others composed of tensor functions, optimizers with distributed
--- state, averages of parameters, and learning rate schedules.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local hooks = require "moonshard.optim.hooks"
local methods = require "moonshard.core.methods"

---@class moonshard.optim
local optim = {
  lr_scheduler = require "moonshard.optim.lr_scheduler",
}
for _, file in ipairs { "optimizer", "muon", "adafactor", "sparse_adam", "lamb", "lbfgs", "zero", "averages" } do
  for name, class in pairs(require("moonshard.optim." .. file)) do optim[name] = class end
end

for _, cls in ipairs { optim.Optimizer, optim.LBFGS, optim.ZeroRedundancyOptimizer } do
  hooks.around(cls)
  methods.guard(cls, "optimizer")
end

errors.closed(optim.lr_scheduler, "optim.lr_scheduler")
errors.closed(optim.swa_utils, "optim.swa_utils")

return errors.closed(optim, "optim")
