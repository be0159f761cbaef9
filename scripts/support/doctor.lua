-- SPDX-License-Identifier: MIT
-- The part of scripts/doctor that runs under LuaJIT.
local here = arg[0]:match "^(.*)/[^/]*$" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)

local as_json, folder = false, nil
for _, word in ipairs(arg) do
  if word == "--json" then
    as_json = true
  elseif word:sub(1, 1) == "-" or folder then
    io.stderr:write(("doctor: unexpected argument '%s'\nusage: scripts/doctor [--json] [FOLDER]\n"):format(word))
    os.exit(2)
  else
    folder = word
  end
end

local ok, ms = pcall(require, "moonshard")
if not ok then
  local why = tostring(ms):match "[^\n]*":gsub("^moonshard: ", "")
  local variable = why:match "^(MOONSHARD_[%u_]+) is "
  local remedy = variable and ("correct or unset %s"):format(variable) or "scripts/setup"
  if as_json then
    local quoted = why:gsub('[%c"\\]', function(c) return ("\\u%04x"):format(c:byte()) end)
    local entry = ('{"remedy": "%s", "state": "broken", "subject": "engine", "text": "%s"}'):format(remedy, quoted)
    print(('{"broken": 1, "lines": [%s], "slow": 0}'):format(entry))
  else
    print(("broken  engine          %s\n                        -> %s"):format(why, remedy))
  end
  os.exit(1)
end

local report = ms.doctor { folder = folder or ".", report = not as_json and print or nil }
print(as_json and require("moonshard.run.json")({ lines = report.lines, slow = report.slow, broken = report.broken })
  or report.summary)
os.exit(report.broken > 0 and 1 or 0, true)
