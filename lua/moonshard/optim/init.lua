--- optim: SGD, Adam, AdamW over the engine's fused step, and learning rate schedules.
local errors = require "moonshard.errors"

---@class moonshard.optim
local optim = {
  lr_scheduler = require "moonshard.optim.lr_scheduler",
}
for name, class in pairs(require "moonshard.optim.optimizer") do optim[name] = class end

errors.closed(optim.lr_scheduler, "optim.lr_scheduler")

return errors.closed(optim, "optim")
