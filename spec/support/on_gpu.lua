-- SPDX-License-Identifier: MIT
--- on_gpu(seed): an `it` for tests on the GPU, or on the emulated one if there is no other. They run in a scope.

---@param seed? integer
return function(seed)
  return function(name, fn)
    local busted = require "busted"
    busted.it(name, function()
      local ms = require "moonshard"
      if not ms.cuda.is_available() then return busted.pending(ms.cuda.why_unavailable()) end
      if seed then ms.manual_seed(seed) end
      ms.scope(fn)
    end)
  end
end
