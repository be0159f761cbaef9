-- SPDX-License-Identifier: MIT
--- One rank of a gang: `luajit worker.lua JOB`, started by ranks.lua under mpirun.
--- Loads the spec file once more, but runs only the tests of one ranks.describe, in the order of the job. After each
--- test it writes a JSON line to its own file and waits on the board until every rank has finished that test.
local job_path = arg[1]
local job = dofile(job_path)
package.path = ("%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(job.root, job.root, job.root, package.path)

local cjson = require "cjson"
local process = require "spec.support.process"
local board = require "spec.support.board"

local rank = tonumber(os.getenv "OMPI_COMM_WORLD_RANK" or "0")
local world = job.world
local shared = board.open(job.folder .. "/board")
local me = shared.rank[rank]
me.pid = process.pid()
local log = assert(io.open(("%s/rank%d.jsonl"):format(job.folder, rank), "a"))
local current = 0

local function say(line)
  log:write(cjson.encode(line), "\n")
  log:flush()
end

-- The frames of the spec itself: from `level` down to where this file called it.
local function frames_of(level)
  local frames = {}
  for line in debug.traceback("", level + 1):gmatch "[^\n]+" do
    if line:find "spec/support/worker%.lua" then break end
    if line:find "%.lua:%d+" and not line:find "/luassert/" then frames[#frames + 1] = line end
  end
  return table.concat(frames, "\n")
end

-- A rank that calls os.exit during a test first records the call, because busted sees only that the rank has ended.
local exit = os.exit
os.exit = function(code, close)                                      -- luacheck: ignore
  say { test = current, left = ("os.exit(%s)\n%s"):format(tostring(code), frames_of(2)) }
  exit(code, close)
end

-- ---- the spec file, read for the tests of one ranks.describe ------------------------------------

local target                                    -- { tests, setup, teardown } once found
local path = {}                                 -- names of the enclosing describes
local context                                   -- innermost describe inside the target
local env = setmetatable({}, { __index = _G })
local Pending = {}

local function key(name)
  return table.concat(path, "\1") .. "\1" .. name
end

local function describe(name, body)
  path[#path + 1] = name
  local outer = context
  if outer then
    context = { parent = outer, before_each = {}, after_each = {} }
  end
  if context then
    body()
  else
    pcall(body)                                 -- the busted process reports errors of other describes
  end
  context = outer
  path[#path] = nil
end

local function ranks_describe(n, name, opts, body)
  if type(opts) == "function" then body = opts end
  path[#path + 1] = name
  if n == world and table.concat(path, "\1") == job.describe then
    target = { tests = {}, setup = {}, teardown = {} }
    context = { before_each = {}, after_each = {} }
    body(rank, world)
    context = nil
  end
  path[#path] = nil
end

local function hook(list)
  return function(fn)
    if context then
      table.insert(list == "setup" and target.setup or list == "teardown" and target.teardown or context[list], fn)
    end
  end
end

for _, name in ipairs { "describe", "context", "insulate", "expose" } do env[name] = describe end
for _, name in ipairs { "it", "test", "spec" } do
  env[name] = function(title, body)
    if context then target.tests[key(title)] = { body = body, context = context } end
  end
end
for _, name in ipairs { "setup", "strict_setup", "lazy_setup" } do env[name] = hook "setup" end
for _, name in ipairs { "teardown", "strict_teardown", "lazy_teardown" } do env[name] = hook "teardown" end
env.before_each, env.after_each = hook "before_each", hook "after_each"
env.pending = function(message, body)
  -- pending() declares a pending test in a describe, and ends the test inside a test.
  if current > 0 then error(setmetatable({ message = message }, Pending), 0) end
  return body
end
env.randomize = function() end
local finalizers
env.finally = function(fn) table.insert(finalizers, fn) end

env.assert = require "luassert"
env.spy, env.stub, env.mock, env.match = require "luassert.spy", require "luassert.stub", require "luassert.mock",
  require "luassert.match"
env.assert:set_parameter("TableErrorHighlightColor", "none")

package.loaded["spec.support.ranks"] = {
  describe = ranks_describe,
  run = function() error "ranks.run inside a rank: start jobs from an ordinary test" end,
  rank = rank, world = world,
}

-- ---- running ------------------------------------------------------------------------------------

local function each(list, context_, down)
  if not context_ then return end
  if down then each(list, context_.parent, down) end
  for _, fn in ipairs(context_[list]) do fn() end
  if not down then each(list, context_.parent, down) end
end

local function trace(err)
  if getmetatable(err) == Pending then return err end
  if type(err) == "table" and not (getmetatable(err) or {}).__tostring then err = cjson.encode(err) end
  return { text = tostring(err), frames = frames_of(3) }
end

local function run(test)
  finalizers = {}
  -- Models that a test makes without a seed are equal on all ranks, whatever earlier tests did.
  if package.loaded.moonshard then package.loaded.moonshard.manual_seed(current) end
  local begun = process.now()
  local ok, err = xpcall(function()
    each("before_each", test.context, true)
    test.body(rank, world)
  end, trace)
  for i = #finalizers, 1, -1 do
    local fine, why = xpcall(finalizers[i], trace)
    if not fine and ok then ok, err = fine, why end
  end
  local fine, why = xpcall(each, trace, "after_each", test.context, false)
  if not fine and ok then ok, err = fine, why end
  local line = { test = current, seconds = process.now() - begun, ok = ok }
  if not ok and getmetatable(err) == Pending then
    line.ok, line.pending = true, tostring(err.message or "pending")
  elseif not ok then
    line.message, line.frames = err.text, err.frames
  end
  return line
end

local function all_have_finished(k)
  for r = 0, world - 1 do
    if shared.rank[r].done < k then return false end
  end
  return true
end
jit.off(all_have_finished)

-- Waits until every rank has finished test k. If one failed, the busted process ends the gang.
local function agree(k)
  local nap = 0
  while true do
    if all_have_finished(k) then
      local failed = false
      for r = 0, world - 1 do failed = failed or shared.rank[r].failed == k end
      if not failed then return end
    end
    if shared.stop ~= 0 or not process.exists(shared.parent) then exit(1) end
    process.sleep(nap)
    nap = math.min(nap + 2e-5, 5e-4)
  end
end
jit.off(agree)

-- Specs of NCCL and of nodes run other specs with their ranks on a GPU.
local device = os.getenv "MOONSHARD_SPEC_DEVICE"
if device then require("moonshard").set_default_device(device) end

local chunk, load_error = loadfile(job.spec)
local ok, err = false, load_error
if chunk then
  setfenv(chunk, env)
  ok, err = xpcall(chunk, trace)
  if not ok then err = err.text .. "\n" .. err.frames end
end
if not target then
  err = ok and "this ranks.describe was not reached when the rank loaded the file" or tostring(err)
elseif ok then
  err = nil
end

for k = job.first, #job.tests do
  current = k
  me.since = process.now()
  me.begun = k
  local line
  local test = target and target.tests[job.tests[k]]
  if err then
    line = { test = k, ok = false, message = "loading the spec: " .. err }
  elseif not test then
    line = { test = k, ok = false,
      message = "the rank did not find this test in the file: names must be the same on every rank" }
  else
    if k == job.first then
      for _, fn in ipairs(target.setup) do
        local fine, why = xpcall(fn, trace)
        if not fine then line = { test = k, ok = false, message = "setup: " .. why.text, frames = why.frames } end
      end
    end
    line = line or run(test)
  end
  say(line)
  if not line.ok then me.failed = k end
  me.done = k
  agree(k)
  local moonshard = package.loaded.moonshard
  if moonshard and package.loaded["moonshard.dist"] and moonshard.dist.is_initialized() then moonshard.dist.recover() end
end
current = 0
if target then
  for _, fn in ipairs(target.teardown) do fn() end
end
log:close()
exit(0, true)
