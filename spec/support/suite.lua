-- SPDX-License-Identifier: MIT
--- Runs a spec file once more, by a busted of its own under other settings: all its tests must pass, and at least one.
local assert = require "luassert"
local process = require "spec.support.process"

---@param path string                       from the root of the tree
---@param env table<string, string|false>
---@param filter? string                    only tests whose names match it
---@param without? string|false             no tests whose names match it
return function(path, env, filter, without)
  local folder = process.temp_folder()
  local command = { "busted", process.root .. "/" .. path }
  if filter then table.insert(command, 2, "--filter=" .. filter) end
  if without then table.insert(command, 2, "--filter-out=" .. without) end
  local child = process.start(command, { stdout = folder .. "/out", stderr = folder .. "/err", env = env })
  local code = child:wait(400 * process.patience)
  if not code then child:stop(3) end
  local out = process.read(folder .. "/out")
  process.remove_folder(folder)
  assert.are.equal(0, code, out)
  assert.matches("\n[1-9]%d* passed, 0 failed\n$", out)
end
