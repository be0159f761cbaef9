-- SPDX-License-Identifier: MIT
--- message(fn, …): fn(…) fails; what it says, without file and line.
local assert = require "luassert"

return function(fn, ...)
  local ok, text = pcall(fn, ...)
  assert.is_false(ok)
  return (tostring(text):gsub("^[^\n]-:%d+: ", ""))
end
