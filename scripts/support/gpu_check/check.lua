-- SPDX-License-Identifier: MIT
--- The supervisor of scripts/gpu_check: runs the parts one after another, each as a process with a time limit, and
--- writes the results as they come. A part that hangs or crashes costs at most its own limit, and the parts after it
--- run unless it is vital; a process that even SIGKILL does not end (a call that hangs in the driver) is left behind.
local root = arg[0]:match "^(.*)scripts/support/gpu_check/" or "./"
package.path = ("@?.lua;@lua/?.lua;@lua/?/init.lua;@scripts/support/gpu_check/?.lua;@scripts/bench/support/?.lua;"):gsub("@", root) .. package.path
local cjson = require "cjson"
local process = require "spec.support.process"
local parts = require "parts"
local summary = require "summary"

local given = { device = "real", out = ".", limit = 470, part_limit = math.huge, specs = {} }
local k = 1
while arg[k] do
  local name = arg[k]:match "^%-%-(.*)$"
  if name == "list" then
    given.list = true
  elseif name then
    k = k + 1
    name = name:gsub("-", "_")
    given[name] = arg[k]
    if name:find "limit" then
      given[name] = tonumber(arg[k])
        or error(("gpu_check: --%s is '%s', expected a number of seconds"):format(name:gsub("_", "-"), arg[k]), 0)
    end
  else
    table.insert(given.specs, arg[k])
  end
  k = k + 1
end

local list = parts.list(given.device, given.specs)
if given.only then
  local chosen = {}
  for _, part in ipairs(list) do if part.name:find(given.only) then table.insert(chosen, part) end end
  if #chosen == 0 then
    local names = {}
    for n, part in ipairs(list) do names[n] = "  " .. part.name end
    io.stderr:write(("gpu_check: --only '%s' matches no part (it is a Lua pattern, which has no |); there are:\n%s\n"):format(
      given.only, table.concat(names, "\n")))
    os.exit(2)
  end
  list = chosen
end
if given.list then
  for _, part in ipairs(list) do print(("%4d s  %s"):format(part.limit, part.name)) end
  return
end

local jsonl, log_path = given.out .. "/gpu_check.jsonl", given.out .. "/gpu_check.log"
process.write(jsonl, "")
process.write(log_path, "")
local function append(path, text)
  local f = assert(io.open(path, "ab"))
  f:write(text)
  f:close()
end
local function note(record) append(jsonl, cjson.encode(record) .. "\n") end

-- Every descendant of a part inherits this variable, even one that has started a session of its own.
local MARK = "MOONSHARD_GPU_CHECK"
local function kill_all(mark)
  local found = io.popen(("grep -lzs '^%s=%s$' /proc/[0-9]*/environ"):format(MARK, mark))
  for path in found:lines() do process.kill(tonumber(path:match "%d+"), process.SIGKILL) end
  found:close()
end

--- Records the results that gpt2_measure.lua or peer_gpt2.py printed. Returns the reason after `unavailable`, if any.
local function note_step(step, text)
  text = "\n" .. text
  local best = math.huge
  for seconds in text:gmatch "\nstep (%S+)" do best = math.min(best, tonumber(seconds)) end
  if best < math.huge then
    note { rate = step.rate, seconds = best, value = step.tokens / best / 1e3, unit = "K tokens/s", bar = "step",
      torch = text:match "\nversion (%S+)", peak = tonumber(text:match "\npeak (%d+)") }
  end
  for name, calls, seconds in text:gmatch "\noperator (%S+) (%d+) (%S+)" do
    note { operator = name, calls = tonumber(calls), seconds = tonumber(seconds) }
  end
  return text:match "\nunavailable ([^\n]*)"
end

local begun = process.now()
local function left() return given.limit - (process.now() - begun) end

local function run(part, number)
  local record = { part = part.name, limit = math.min(part.limit, given.part_limit) }
  local why = part.missing and part.missing()
  if why then
    record.status, record.why = "not measured", why
    return record
  end
  if left() < 3 then
    record.status, record.why = "not run", "no time is left"
    return record
  end
  record.limit = math.min(record.limit, math.floor(left()))
  local mark = ("%d-%d"):format(process.pid(), number)
  local env = { [MARK] = mark, MOONSHARD_RATES = jsonl }
  for name, value in pairs(part.env or {}) do env[name] = value end
  local out = given.out .. "/.part"
  local child = process.start({ "sh", "-c", 'exec "$@" 2>&1', "sh", unpack(part.command) },
    { stdout = out, env = env })
  local code = child:wait(record.limit)
  if not code then
    kill_all(mark)
    if not child:wait(3) then record.why = "it did not end when it was killed" end
  end
  kill_all(mark)                                                    -- processes that the part left behind
  local text = process.read(out)
  os.remove(out)
  record.seconds = process.now() - child.begun
  record.seconds = math.floor(record.seconds * 100 + 0.5) / 100
  append(log_path, ("==== %s: %s after %g s\n%s\n"):format(part.name, code and "status " .. code or "stopped",
    record.seconds, text))
  local passed, failed = text:match ".*\n(%d+) passed, (%d+) failed"
  record.passed, record.failed = tonumber(passed), tonumber(failed)
  if not code then
    record.status = "timeout"
  elseif code == 0 then
    record.status = "passed"
  elseif code > 128 or part.spec and not passed then
    record.status = "crashed"
    record.why = code > 128 and "signal " .. code - 128 or "it ended before busted's last line"
  else
    record.status = "failed"
  end
  local unavailable = part.step and note_step(part.step, text)
  if unavailable then record.status, record.why = "not measured", unavailable end
  if record.status ~= "passed" or part.vital then record.last = text:sub(-600) end
  return record
end

note { device = given.device, time = os.date "!%Y-%m-%dT%H:%M:%SZ", limit = given.limit }
local bad, without = 0, nil
for number, part in ipairs(list) do
  local record
  if without then
    record = { part = part.name, limit = part.limit, status = "not run", why = without }
  else
    record = run(part, number)
    if part.vital and record.status ~= "passed" then without = ("'%s' %s"):format(part.name, record.status) end
  end
  note(record)
  if record.status ~= "passed" and record.status ~= "not measured" then bad = bad + 1 end
  print(("%6.1f s  %-12s %s%s%s"):format(process.now() - begun, record.status, part.name,
    record.passed and (", %d passed, %d failed"):format(record.passed, record.failed) or "",
    record.why and ": " .. record.why or ""))
  io.stdout:flush()
end

local text = summary.write(process.read(jsonl), process.read(parts.predictions()))
process.write(given.out .. "/gpu_check.md", text)
print("\n" .. text)
print(("gpu_check: %s, %d of %d parts failed or did not run"):format(given.out, bad, #list))
os.exit(bad == 0 and 0 or 1)
