-- SPDX-License-Identifier: MIT
--- Steps `from` to `to` on batches of `width` columns that every rank has alike, so that a model that is not sharded
--- trains as well.
return function(model, optim, from, to, width)
  local ms = require "moonshard"
  for step = from, to do
    ms.scope(function() model(ms.ones(2, width) * step):sum():backward() end)
    optim:step()
    optim:zero_grad()
  end
end
