-- SPDX-License-Identifier: MIT
--- message(fn, …): calls fn(…), which must fail; returns the message without file and line.
local assert = require "luassert"

return function(fn, ...)
  local ok, text = pcall(fn, ...)
  assert.is_false(ok, "no error was raised")
  return (tostring(text):gsub("^[^\n]-:%d+: ", ""))
end
