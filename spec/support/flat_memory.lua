-- SPDX-License-Identifier: MIT
--- flat_memory(fn): 60 steps of fn(step) without garbage collection leave as many bytes allocated as 20 steps.
local assert = require "luassert"

return function(fn)
  local ms = require "moonshard"
  local at = {}
  collectgarbage()
  collectgarbage "stop"
  for step in ms.steps(60) do
    fn(step)
    if step == 20 or step == 60 then at[#at + 1] = ms.memory_stats("cpu").allocated end
  end
  collectgarbage "restart"
  assert.are.equal(at[1], at[2])
end
