-- SPDX-License-Identifier: MIT
--- nn: modules, layers, functions (nn.F), initialisation (nn.init), utilities (nn.utils).
local errors = require "moonshard.errors"

---@class moonshard.nn
local nn = {
  Module = require "moonshard.nn.module".Module,
  Parameter = require "moonshard.nn.parameter".Parameter,
  F = require "moonshard.nn.functional".F,
  init = require "moonshard.nn.initial".init,
  utils = require "moonshard.nn.utils",
  ddp_hooks = require "moonshard.nn.ddp_hooks",
}

for _, file in ipairs { "containers", "linear", "conv", "embedding", "norm", "batch_norm", "dropout", "activation",
  "loss", "attention",
  "transformer", "ddp" } do
  for name, layer in pairs(require("moonshard.nn." .. file)) do nn[name] = layer end
end

-- An unknown name is an error that knows the nearest one.
errors.closed(nn.F, "nn.F")
errors.closed(nn.init, "nn.init")
errors.closed(nn.utils, "nn.utils")

return errors.closed(nn, "nn")
