-- SPDX-License-Identifier: MIT
--- amp: mixed precision. `autocast` chooses dtypes by operation; gradient scalers keep float16 gradients from
--- vanishing.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local autocast = require "moonshard.amp.autocast"
local scaler = require "moonshard.amp.grad_scaler"

---@class moonshard.amp
return errors.closed({
  autocast = autocast.autocast,
  is_autocast_enabled = autocast.is_autocast_enabled,
  custom_fwd = autocast.custom_fwd,
  custom_bwd = autocast.custom_bwd,
  GradScaler = scaler.GradScaler,
  ShardedGradScaler = scaler.ShardedGradScaler,
}, "amp")
