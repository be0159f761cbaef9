-- SPDX-License-Identifier: MIT
--- it_built(file, why): an `it` for tests that need this file of the build folder; why: the reason if it is missing.
local process = require "spec.support.process"

---@param file string
---@param why string
return function(file, why)
  local built = require("lfs").attributes(process.build .. "/" .. file) ~= nil
  return function(name, fn)
    local busted = require "busted"
    busted.it(name, function()
      if not built then return busted.pending(why) end
      fn()
    end)
  end
end
