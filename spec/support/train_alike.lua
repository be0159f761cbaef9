-- SPDX-License-Identifier: MIT
--- Trains steps `from` to `to` on batches of `width` columns that are equal on all ranks, so that a sharded and an
--- unsharded model train alike.
return function(model, optim, from, to, width)
  local ms = require "moonshard"
  for step = from, to do
    ms.scope(function() model(ms.ones(2, width) * step):sum():backward() end)
    optim:step()
    optim:zero_grad()
  end
end
