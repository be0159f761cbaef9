-- SPDX-License-Identifier: MIT
--- Specs over several ranks, inside one ordinary busted process.
---
---   local ranks = require "spec.support.ranks"
---   ranks.describe(4, "all_reduce", function(rank, world)        -- rank is nil where busted registers the tests
---     before_each(function() … end)                              -- on every rank, as are setup, teardown, finally
---     it("sums over ranks", function(rank, world) … end)         -- the same names on every rank
---   end)
---
--- The tests are ordinary `it`s. The first one starts a gang, `mpirun -n 4 luajit worker.lua`. Every rank runs the
--- tests in order and writes the result of each to its own file; after each test the ranks synchronise on a board
--- (board.lua). The busted process watches. If a rank fails, dies, exits or hangs during a test, that test fails with a
--- message; the gang is ended (at most `grace` seconds after a rank has failed) and started again with the next test. A
--- message that several ranks report is shown once.
---
---   ranks.run(2, "script.lua" or text or function, opts)         -- a whole job: code, stdout, stderr, seconds
local process = require "spec.support.process"
local board = require "spec.support.board"
local busted = require "busted"

local ranks = {
  timeout = tonumber(os.getenv "MOONSHARD_SPEC_TIMEOUT") or 180,    -- seconds after which a test counts as hanging
  grace = 1.0,  -- seconds that the other ranks may continue after one has failed
}


-- Arguments and environment for n ranks of `command`. A preloaded sanitizer is meant for the ranks, not for mpirun.
local function launch(n, command, opts)
  local argv, env = { "mpirun", "-n", tostring(n) }, process.mpirun_env(opts.env)
  local preload = os.getenv "LD_PRELOAD"
  if preload then
    if env.LD_PRELOAD == nil then env.LD_PRELOAD = false end
    argv[#argv + 1] = "-x"
    argv[#argv + 1] = "LD_PRELOAD=" .. preload
  end
  for _, a in ipairs(opts.mpirun or {}) do argv[#argv + 1] = a end
  for _, a in ipairs(command) do argv[#argv + 1] = a end
  return argv, env
end

-- ---- one gang -----------------------------------------------------------------------------------

local Gang = {}
Gang.__index = Gang

local function start_gang(batch, first)
  local self = setmetatable({ world = batch.world, folder = process.temp_folder() }, Gang)
  self.board = board.open(self.folder .. "/board")
  self.board.parent = process.pid()
  local job = { "return {" }
  for _, name in ipairs { "spec", "describe" } do job[#job + 1] = ("%s = %q,"):format(name, batch[name]) end
  job[#job + 1] = ("root = %q, folder = %q, world = %d, first = %d, tests = {"):format(process.root, self.folder,
    self.world, first)
  for _, name in ipairs(batch.tests) do job[#job + 1] = ("%q,"):format(name) end
  job[#job + 1] = "}}"
  process.write(self.folder .. "/job.lua", table.concat(job, "\n"))
  -- Without this setting, mpirun takes a second longer to end the remaining ranks.
  local opts = { env = batch.opts.env, mpirun = { "--mca", "odls_base_sigkill_timeout", "0",
    unpack(batch.opts.mpirun or {}) } }
  local argv, env = launch(self.world, { "luajit", process.root .. "/spec/support/worker.lua", self.folder
    .. "/job.lua" }, opts)
  self.child = process.start(argv, { stdout = self.folder .. "/stdout", stderr = self.folder .. "/stderr", env = env })
  return self
end

-- Kills the ranks first: mpirun then cleans up its files under /dev/shm and /tmp.
function Gang:stop()
  self.board.stop = 1
  self.killed = true
  if not self.child:poll() then
    for r = 0, self.world - 1 do
      local pid = self.board.rank[r].pid
      if pid > 0 then process.kill(pid, process.SIGKILL) end
    end
    if not self.child:wait(3) then self.child:stop(1) end
  end
end

function Gang:forget()
  self:stop()
  board.close(self.board)
  process.remove_folder(self.folder)
end

-- The JSON lines that the ranks wrote for test k, by rank.
function Gang:lines(k)
  local cjson = require "cjson"
  local found = {}
  for r = 0, self.world - 1 do
    for line in process.read(("%s/rank%d.jsonl"):format(self.folder, r)):gmatch "[^\n]+" do
      local ok, entry = pcall(cjson.decode, line)
      if ok and entry.test == k and not (found[r] and found[r].left) then found[r] = entry end
    end
  end
  return found
end

local function tail(text, n)
  local lines = {}
  for line in text:gmatch "[^\n]+" do
    -- Removes mpirun's lines of dashes, and its texts about ranks that this process killed.
    if not (line:find "^%-%-%-" or line:find "^Primary job +terminated" or line:find "^a non%-zero exit code. Per user"
        or line:find "^mpirun noticed that process rank %d+ .* signal 9 ") then
      lines[#lines + 1] = line
    end
  end
  return table.concat(lines, "\n", math.max(1, #lines - n + 1))
end

-- The failure to report for test k, once the gang has finished the test or has been stopped. If no rank failed: nil,
-- and the text of a rank in which the test is pending.
function Gang:verdict(k, reason)
  local lines, groups, order, bad = self:lines(k), {}, {}, reason ~= nil
  local stderr = process.read(self.folder .. "/stderr")
  local culprit, how = stderr:match "process rank (%d+) with PID %d+ on node %S+ ([^\n]*)"
  if not culprit then
    culprit, how = stderr:match "Process name: %[%[%d+,%d+%],(%d+)%]%s+Exit code:%s+(%d+)"
    if how then how = "exit status " .. how end
  end
  culprit = tonumber(culprit)
  if culprit and self.killed and how:find "signal 9 " and not (self.dead and self.dead[culprit]) then culprit = nil end
  for r = 0, self.world - 1 do
    local line, weight = lines[r], 1
    local text
    if line and line.left then
      text = "left the test by " .. line.left
    elseif line and line.pending then
      text, weight = "pending: " .. line.pending, 3
    elseif line and line.ok and self.dead and self.dead[r] then
      text = "passed the test, then died"
    elseif line and line.ok then
      text, weight = "passed", 3
    elseif line then
      text = line.message
      if line.frames and line.frames ~= "" then text = text .. "\n" .. line.frames end
    elseif self.dead and self.dead[r] or culprit == r then
      text = "died" .. (culprit == r and how ~= "" and ": " .. how or "")
    elseif self.board.rank[r].begun < k then
      text, weight = "had not begun the test", 2
    else
      text, weight = ("was still inside the test after %.1f s"):format(process.now() - self.board.rank[r].since),
        reason and 1 or 2
    end
    bad = bad or weight < 3
    local same = text:gsub("0x%x+", "0x"):gsub("after [%d.]+ s$", "")      -- addresses and times differ between ranks
    if not groups[same] then
      groups[same] = { weight = weight, text = text }
      order[#order + 1] = groups[same]
    end
    table.insert(groups[same], r)
  end
  if not bad then
    for _, group in ipairs(order) do
      if group.text:find "^pending: " then return nil, group.text:sub(10) end
    end
    return nil
  end
  table.sort(order, function(a, b)
    if a.weight ~= b.weight then return a.weight < b.weight end
    return a[1] < b[1]
  end)
  local told = {}
  for _, group in ipairs(order) do
    local who = #group == self.world and ("all %d ranks"):format(self.world)
      or ("rank%s %s of %d"):format(#group > 1 and "s" or "", table.concat(group, ", "), self.world)
    told[#told + 1] = who .. ": " .. group.text
  end
  if reason then table.insert(told, 1, reason) end
  local said = tail(stderr, 30)
  if said ~= "" then told[#told + 1] = "stderr of the ranks:\n" .. said end
  return table.concat(told, "\n")
end

-- Watches until the result of test k is known. Returns "passed"; or "failed" once the gang has ended, with a reason
-- unless a rank failed or died. The time limit counts from the moment when the last rank has begun the test, so it does
-- not include the start of the gang.
function Gang:watch(k, timeout)
  local b, n = self.board, self.world
  local nap, failed_at = 0, nil
  local watched = process.now()
  while true do
    -- Polls before it reads the board: if the gang has ended, all that the ranks wrote is then on it.
    local ended = self.child:poll()
    local done, failed, begun, since = 0, false, 0, nil
    for r = 0, n - 1 do
      local slot = b.rank[r]
      if slot.done >= k then done = done + 1 end
      if slot.failed == k then failed = true end
      if slot.begun >= k then
        begun = begun + 1
        since = math.max(since or slot.since, slot.since)
      end
    end
    if begun < n then since = nil end
    if done == n and not failed then return "passed" end
    local now = process.now()
    if failed then
      failed_at = failed_at or now
      if done == n or now - failed_at > self.grace or ended then
        self:stop()
        return "failed"
      end
    end
    if ended then return "failed", ("the gang ended with status %d during this test"):format(ended) end
    self.dead = {}
    for r = 0, n - 1 do
      local slot = b.rank[r]
      -- Reads slot.done after process.exists: a rank that has finished the last test may end at any moment.
      if slot.pid > 0 and not process.exists(slot.pid) and slot.done < k then self.dead[r] = true end
    end
    if next(self.dead) then
      self.child:wait(3)                    -- so that mpirun reports how the rank died
      self:stop()
      return "failed"
    end
    local start = math.max(timeout, ranks.timeout * process.patience)
    if not failed and (since and now - since > timeout or not since and now - watched > start) then
      self:stop()
      return "failed", since and ("not every rank finished within %g s"):format(timeout)
        or ("not every rank began within %g s"):format(start)
    end
    process.sleep(nap)
    nap = math.min(nap + 2e-5, 1e-3)
  end
end
jit.off(Gang.watch)

-- ---- busted's side ------------------------------------------------------------------------------

local element_now, parent_now, describe_now
busted.subscribe({ "describe", "start" }, function(element)
  describe_now = element
  return nil, true
end)
busted.subscribe({ "test", "start" }, function(element, parent)
  element_now, parent_now = element, parent
  return nil, true
end)

local function names_to(element)
  local names, file = {}, nil
  while element do
    if element.descriptor == "file" then
      file = element.name
      break
    end
    table.insert(names, 1, element.name)
    element = busted.parent(element)
  end
  return names, file
end

local batches = setmetatable({}, { __mode = "k" })

local function new_batch(parent, info)
  local names, file = names_to(parent)
  local batch = { world = info.world, opts = info.opts, tests = {}, index = {}, spec = file, element = parent }
  batch.describe = table.concat(names, "\1", 1, info.depth)
  local prefix, seen = table.concat(names, "\1") .. "\1", {}
  for _, child in ipairs(busted.children(parent)) do
    if child.descriptor == "it" then
      if seen[child.name] then error(("two tests named '%s' in one ranks.describe"):format(child.name), 0) end
      seen[child.name] = true
      table.insert(batch.tests, prefix .. child.name)
      batch.index[child] = #batch.tests
    end
  end
  return batch
end

-- The function that every `it` in a ranks.describe runs.
local function run_test(info)
  local element, parent = element_now, parent_now
  local batch = batches[parent]
  if not batch or (batch.last or 0) >= batch.index[element] then      -- the first test, or the suite is repeated
    batch = new_batch(parent, info)
    batches[parent] = batch
  end
  local k = batch.index[element]
  batch.last = k
  batch.gang = batch.gang or start_gang(batch, k)
  local gang = batch.gang
  gang.grace = (info.opts.grace or ranks.grace) * process.patience
  local outcome, reason = gang:watch(k, (info.opts.timeout or ranks.timeout) * process.patience)
  local message, pending = gang:verdict(k, reason)
  if outcome == "passed" and k == #batch.tests then
    -- The last test also covers the gang's end: finalizers, MPI_Finalize, exit status.
    local code = gang.child:wait(info.opts.timeout or ranks.timeout)
    if code ~= 0 then
      gang:stop()
      message = (code and ("after the last test the gang ended with status %d"):format(code) or
        "after the last test the gang did not end") .. "\n" .. tail(process.read(gang.folder .. "/stderr"), 30)
    end
  end
  if outcome ~= "passed" or k == #batch.tests then
    gang:forget()
    batch.gang = nil
  end
  if message or outcome ~= "passed" then
    busted.fail(("%s:%d: %s"):format(element.trace.short_src, element.trace.currentline, message or reason or "failed"),
      0)
  end
  if pending then element.env.pending(pending) end
end

--- Declares tests of n ranks. opts: timeout (seconds per test), env (changes), mpirun (further arguments), grace.
---@param n integer
---@param name string
---@param opts table?
---@param body fun(rank: integer?, world: integer)
function ranks.describe(n, name, opts, body)
  if type(opts) == "function" then opts, body = {}, opts end
  if n < 1 or n > board.max then error(("ranks.describe: %d ranks; 1 to %d are possible"):format(n, board.max), 2) end
  return busted.describe(name, function()
    local env = getfenv(body)               -- busted's environment; assignments in it belong to this describe
    local info = { world = n, opts = opts, depth = #(names_to(describe_now)) }
    for _, alias in ipairs { "it", "test", "spec" } do
      env[alias] = function(title, fn)
        if type(fn) ~= "function" then error(("it: argument 2 is %s, expected a function"):format(tostring(fn)), 2) end
        return busted.it(title, function() run_test(info) end)
      end
    end
    local on_ranks = function() end
    for _, hook in ipairs { "before_each", "after_each", "setup", "teardown", "strict_setup", "strict_teardown",
                            "lazy_setup", "lazy_teardown" } do
      env[hook] = on_ranks
    end
    body(nil, n)
  end)
end


-- ---- whole jobs ---------------------------------------------------------------------------------

--- Runs a whole script: under mpirun with n ranks, or as one plain process when n is 0 or nil.
--- script: a file of the source tree ("scripts/train.lua"), text, or a function without upvalues.
--- opts: args (array), env (changes), timeout (300 s), stdin (text), mpirun (further arguments), command (instead of
--- luajit), through (words before the whole command). A file runs as users run it; text and functions find `require
--- "moonshard"` through LUA_PATH.
--- `ended` is on the clock of process.now and ms.time.
---@return { code: integer, stdout: string, stderr: string, seconds: number, ended: number, timed_out: boolean }
function ranks.run(n, script, opts)
  opts = opts or {}
  local folder = process.temp_folder()
  local env = {}
  for k, v in pairs(opts.env or {}) do env[k] = v end
  local file = script
  if type(script) == "function" or not script:find "^[^\n]+%.lua$" then
    file = folder .. "/script.lua"
    process.write(file, type(script) == "function" and string.dump(script) or script)
    if env.LUA_PATH == nil then
      env.LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;@/?.lua;;"):gsub("@", process.root)
    end
  end
  if opts.stdin then process.write(folder .. "/stdin", opts.stdin) end
  local command = { opts.command or "luajit", file }
  for _, a in ipairs(opts.args or {}) do command[#command + 1] = tostring(a) end
  if n and n > 0 then command, env = launch(n, command, { env = env, mpirun = opts.mpirun }) end
  for i, word in ipairs(opts.through or {}) do table.insert(command, i, word) end
  local child = process.start(command, {
    stdin = opts.stdin and folder .. "/stdin", stdout = folder .. "/stdout", stderr = folder .. "/stderr", env = env })
  local result = { timed_out = not child:wait(opts.timeout or 300) }
  if result.timed_out then child:stop(3) end
  result.code, result.seconds, result.ended = child.code, child.seconds, child.begun + (child.seconds or 0)
  result.stdout, result.stderr = process.read(folder .. "/stdout"), process.read(folder .. "/stderr")
  process.remove_folder(folder)
  return result
end

return ranks
