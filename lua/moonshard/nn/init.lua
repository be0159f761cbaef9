--- nn: modules, layers, functions (nn.F), initialisation (nn.init), utilities (nn.utils).
local errors = require "moonshard.errors"

---@class moonshard.nn
local nn = {
  Module = require "moonshard.nn.module".Module,
  Parameter = require "moonshard.nn.parameter".Parameter,
  F = require "moonshard.nn.functional".F,
  init = require "moonshard.nn.initial".init,
  utils = require "moonshard.nn.utils",
}

for _, file in ipairs { "containers", "linear", "embedding", "norm", "batch_norm", "dropout", "activation", "loss", "attention",
  "transformer" } do
  for name, layer in pairs(require("moonshard.nn." .. file)) do nn[name] = layer end
end

-- An unknown name is an error that knows the nearest one.
local function guard(t, what)
  return setmetatable(t, { __index = function(_, name)
    if type(name) ~= "string" or name:sub(1, 1) == "_" then return nil end
    local names = {}
    for known in pairs(t) do names[#names + 1] = known end
    table.sort(names)
    errors.raise("%s", errors.unknown("name in " .. what, name, names))
  end })
end
guard(nn.F, "nn.F")
guard(nn.init, "nn.init")
guard(nn.utils, "nn.utils")

return guard(nn, "nn")
