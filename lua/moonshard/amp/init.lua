-- SPDX-License-Identifier: MIT
--- amp: mixed precision. `autocast` chooses dtypes by operation; gradient scalers keep float16 gradients from
--- vanishing.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local scaler = require "moonshard.amp.grad_scaler"

---@class moonshard.amp
return errors.closed({
  autocast = require "moonshard.amp.autocast".autocast,
  GradScaler = scaler.GradScaler,
  ShardedGradScaler = scaler.ShardedGradScaler,
}, "amp")
