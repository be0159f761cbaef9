-- SPDX-License-Identifier: MIT
--- Activations by their names in config.json.
require "moonshard.autograd.methods"
local F = require("moonshard.nn").F

local function gelu_tanh(x) return F.gelu(x, { approximate = "tanh" }) end

return {
  gelu = F.gelu, gelu_new = gelu_tanh, gelu_pytorch_tanh = gelu_tanh, relu = F.relu, silu = F.silu, swish = F.silu,
  tanh = F.tanh, quick_gelu = function(x) return x * (x * 1.702):sigmoid() end,
}
