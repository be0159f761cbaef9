-- SPDX-License-Identifier: MIT
--- nn: modules, layers, functions (nn.F), initialisation (nn.init), utilities (nn.utils).
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"

---@class moonshard.nn
local nn = {
  Module = require "moonshard.nn.module".Module,
  Parameter = require "moonshard.nn.parameter".Parameter,
  F = require "moonshard.nn.functional".F,
  init = require "moonshard.nn.initial".init,
  utils = require "moonshard.nn.utils",
  ddp_hooks = require "moonshard.parallel.ddp.hooks",
}

for _, file in ipairs { "nn.containers", "nn.parameter_lists", "nn.reshaping", "nn.linear", "nn.int8", "nn.conv",
  "nn.pooling", "nn.padding", "nn.images",
  "nn.embedding", "nn.embedding_layers", "nn.norm", "nn.batch_norm", "nn.dropout", "nn.group_norm", "nn.layers",
  "nn.recurrent", "nn.activation", "nn.loss", "nn.attention", "nn.transformer", "nn.lora", "parallel.ddp" } do
  for name, layer in pairs(require("moonshard." .. file)) do nn[name] = layer end
end

for _, file in ipairs { "vectors", "weight_norms", "fuse", "quantize" } do
  for name, fn in pairs(require("moonshard.nn." .. file)) do nn.utils[name] = fn end
end
nn.utils.parametrize = errors.closed(require "moonshard.nn.parametrize", "nn.utils.parametrize")
nn.utils.prune = errors.closed(require "moonshard.nn.prune", "nn.utils.prune")
nn.utils.rnn = errors.closed(require "moonshard.nn.packed".rnn, "nn.utils.rnn")
for name, fn in pairs(require "moonshard.nn.patterns") do nn.init[name] = fn end

-- Reading an unknown name is an error that suggests the most similar one.
errors.closed(nn.F, "nn.F")
errors.closed(nn.init, "nn.init")
errors.closed(nn.utils, "nn.utils")

return errors.closed(nn, "nn")
