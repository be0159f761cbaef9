-- SPDX-License-Identifier: MIT
--- Steps `from` to `to` on batches of `width` columns that are equal on all ranks, so that an unsharded model trains
--- alike.
return function(model, optim, from, to, width)
  local ms = require "moonshard"
  for step = from, to do
    ms.scope(function() model(ms.ones(2, width) * step):sum():backward() end)
    optim:step()
    optim:zero_grad()
  end
end
