-- SPDX-License-Identifier: MIT
--- Collects all garbage. Compiled code holds objects that LuaJIT took for constants, sometimes a whole model, so it is
--- dropped first; objects freed by finalizers need a further cycle.
return function()
  jit.flush()
  for _ = 1, 3 do collectgarbage() end
end
