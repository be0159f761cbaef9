-- SPDX-License-Identifier: MIT
--- Collects all garbage. LuaJIT's compiled code refers to objects that it treats as constants, sometimes a whole model,
--- so that code is dropped first. Objects that finalizers free need a further cycle.
return function()
  jit.flush()
  for _ = 1, 3 do collectgarbage() end
end
