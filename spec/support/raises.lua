--- raises(message, fn, …): fn(…) fails with exactly this message, behind file and line.
local assert = require "luassert"

return function(message, fn, ...)
  local ok, text = pcall(fn, ...)
  assert.is_false(ok)
  assert.equal(message, (tostring(text):gsub("^[^\n]-:%d+: ", "")))
end
