-- SPDX-License-Identifier: MIT
--- optim: SGD, Adam, AdamW over the engine's fused step, optimizers with distributed state, and learning rate
--- schedules.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"

---@class moonshard.optim
local optim = {
  lr_scheduler = require "moonshard.optim.lr_scheduler",
}
for _, file in ipairs { "optimizer", "zero" } do

  for name, class in pairs(require("moonshard.optim." .. file)) do optim[name] = class end
end

errors.closed(optim.lr_scheduler, "optim.lr_scheduler")

return errors.closed(optim, "optim")
