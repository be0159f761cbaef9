-- SPDX-License-Identifier: MIT
--- distributions: random variables with their densities, moments and divergences, under PyTorch's names.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"

---@class moonshard.distributions
local distributions = { Distribution = require "moonshard.distributions.distribution" }
for _, file in ipairs { "normal", "uniform", "bernoulli", "categorical", "kl" } do
  for name, value in pairs(require("moonshard.distributions." .. file)) do distributions[name] = value end
end
require("moonshard.distributions.divergences")(distributions)

return errors.closed(distributions, "distributions")
