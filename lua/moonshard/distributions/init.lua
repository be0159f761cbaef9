-- SPDX-License-Identifier: MIT
--- distributions: random variables with their densities, moments and divergences, under PyTorch's names.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"

---@class moonshard.distributions
local distributions = { Distribution = require "moonshard.distributions.distribution" }
for _, file in ipairs { "normal", "uniform", "bernoulli", "categorical", "location", "gamma",
  "multivariate", "composed", "kl" } do
  for name, value in pairs(require("moonshard.distributions." .. file)) do
    if name:sub(1, 1) ~= "_" then distributions[name] = value end
  end
end
require("moonshard.distributions.divergences")(distributions)

return errors.closed(distributions, "distributions")
