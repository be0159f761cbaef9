-- SPDX-License-Identifier: MIT
--- nn: modules, layers, functions (nn.F), initialisation (nn.init), utilities (nn.utils).
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"

---@class moonshard.nn
local nn = {
  Module = require "moonshard.nn.module".Module,
  Parameter = require "moonshard.nn.module.parameter".Parameter,
  F = require "moonshard.nn.functional".F,
  init = require "moonshard.nn.initial".init,
  utils = require "moonshard.nn.utils",
  ddp_hooks = require "moonshard.parallel.ddp.hooks",
}

for _, file in ipairs { "nn.module.containers", "nn.module.parameter_lists", "nn.module.reshaping", "nn.linear.linear",
  "nn.linear.bilinear", "nn.linear.int8", "nn.linear.lora", "nn.conv.layers", "nn.pooling.layers", "nn.images.padding",
  "nn.images.layers", "nn.embedding.embedding", "nn.embedding.layers", "nn.norm.layer_norm", "nn.norm.batch_norm",
  "nn.norm.group_norm", "nn.dropout.layers", "nn.recurrent.layers", "nn.activation.layers", "nn.loss.layers",
  "nn.attention.attention", "nn.attention.transformer", "parallel.ddp" } do
  for name, layer in pairs(require("moonshard." .. file)) do nn[name] = layer end
end

for _, file in ipairs { "utils.vectors", "utils.weight_norms", "utils.fuse", "linear.quantize" } do
  for name, fn in pairs(require("moonshard.nn." .. file)) do nn.utils[name] = fn end
end
nn.utils.parametrize = errors.closed(require "moonshard.nn.utils.parametrize", "nn.utils.parametrize")
nn.utils.prune = errors.closed(require "moonshard.nn.utils.prune", "nn.utils.prune")
nn.utils.rnn = errors.closed(require "moonshard.nn.recurrent.packed".rnn, "nn.utils.rnn")
for name, fn in pairs(require "moonshard.nn.initial.patterns") do nn.init[name] = fn end

-- Reading an unknown name is an error that suggests the most similar one.
errors.closed(nn.F, "nn.F")
errors.closed(nn.init, "nn.init")
errors.closed(nn.utils, "nn.utils")

return errors.closed(nn, "nn")
