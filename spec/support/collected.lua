-- SPDX-License-Identifier: MIT
--- Collects what nobody holds, all of it: code that LuaJIT has compiled holds what it took for a constant, a whole
--- model at times, and what a finalizer lets go of goes a cycle later.
return function()
  jit.flush()
  for _ = 1, 3 do collectgarbage() end
end
