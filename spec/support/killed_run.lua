-- SPDX-License-Identifier: MIT
--- A training run that is killed with SIGKILL at random moments and continued, until it ends. For the spec of ms.run
--- and scripts/bench/run.
local process = require "spec.support.process"
local cjson = require "cjson"
local run = require("moonshard").run

local M = {}

-- An epoch has 20 batches and a checkpoint comes every 25 steps, so most come in the middle of an epoch. The job also
-- writes the number of each step that it has logged to a second file, so that lost lines are detected.
local JOB = [[
local ms = require "moonshard"
ms.manual_seed(3)
local model = ms.nn.Sequential(ms.nn.Linear(8, 32), ms.nn.Tanh(), ms.nn.Linear(32, 1))
local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.01 })
local loader = ms.data.DataLoader(ms.data.TensorDataset(ms.rand(320, 8)), { batch_size = 16, shuffle = true })
local schedule = ms.optim.lr_scheduler.cosine_warm_restarts(optimizer, { T_0 = 30 })
local run = ms.run.start { out = OUT, resume = true, total = STEPS, model = model, optimizer = optimizer, samples = 16,
  state = { loader = loader, schedule = schedule }, sinks = { "csv", "tensorboard" } }
local note = assert(io.open(OUT .. ".note", "w"))
for step in ms.steps(STEPS, { from = run.step + 1 }) do
  local loss = model(loader:next() + ms.rand(16, 8)):sub(1):pow(2):mean()
  loss:backward()
  optimizer:step()
  schedule:step()
  optimizer:zero_grad()
  run:log { loss = loss }
  note:seek "set"
  note:write(("%09d"):format(step))
  note:flush()
  if step % 25 == 0 then
    run:checkpoint()
    run:histogram("weight", model[1].weight)
  end
end
run:checkpoint()
run:finish()
]]

-- The steps and losses of metrics.jsonl; raises if a complete line is not an object, or a step is missing or repeated.
local function losses(out)
  local list = {}
  for line in process.read(out .. "/metrics.jsonl"):gmatch "([^\n]*)\n" do
    local ok, object = pcall(cjson.decode, line)
    if not ok then error(("metrics.jsonl: line %d is not valid JSON: %s"):format(#list + 1, line), 0) end
    local wanted = #list + 1
    if object.step ~= wanted then error(("metrics.jsonl: line %d has step %d, expected %d"):format(wanted, object.step, wanted), 0) end
    list[#list + 1] = line:match '"loss": ([^,]+)'
  end
  return list
end

-- Checks that report.html is whole, and can be written anew, after a kill at any moment.
local function check_report(out)
  local text = process.read(out .. "/report.html")
  if text ~= "" and text:sub(-8) ~= "</html>\n" then error("report.html is incomplete: it does not end with </html>", 0) end
  assert(run.report(out))
end

local function start(file, out)
  return process.start({ "luajit", file }, { stdout = out .. ".out", stderr = out .. ".err",
    env = { LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;;"):gsub("@", process.root), OMP_NUM_THREADS = "1" } })
end

--- Trains given.steps steps without kills, then again with kills. Returns the number of kills that found the job
--- running, and the number of lines moved to superseded.jsonl. Raises at the first fault.
---@param given {folder: string, steps: integer, kills: integer, random: function, after: function}
---   random: returns a number from 0 to 1; after: called after each kill of a run that has logged lines, with the
---   run's folder and the number of kills
---@return integer kills
---@return integer superseded
function M.run(given)
  local function job(name)
    local out = given.folder .. "/" .. name
    process.write(out .. ".lua", ("local OUT, STEPS = %q, %d\n"):format(out, given.steps) .. JOB)
    return out, out .. ".lua"
  end
  local whole, file = job "whole"
  local child = start(file, whole)
  if child:wait(120) ~= 0 then error(process.read(whole .. ".err"), 0) end
  local wanted = losses(whole)
  assert(#wanted == given.steps)

  local out
  out, file = job "killed"
  local kills, done = 0, false
  while not done do
    os.remove(out .. ".note")
    child = start(file, out)
    if kills < given.kills then
      -- Three of four kills wait until the process has changed metrics.jsonl; the others may come while it starts.
      if given.random() < 0.75 then
        local size = #process.read(out .. "/metrics.jsonl")
        while #process.read(out .. "/metrics.jsonl") == size and not child:poll() do process.sleep(0.001) end
      end
      process.sleep(given.random() * 0.05)
      process.kill(child.pid, process.SIGKILL)
    end
    local code = child:wait(120)
    done = code == 0
    if code == 128 + process.SIGKILL then
      kills = kills + 1
    elseif code ~= 0 then
      error(("the run ended with status %s after %d kills: %s"):format(tostring(code), kills, process.read(out .. ".err")), 0)
    end
    local there = process.read(out .. "/metrics.jsonl") ~= "" and losses(out) or {}
    if there[1] then check_report(out) end
    if there[1] and code ~= 0 and given.after then given.after(out, kills) end
    local noted = tonumber(process.read(out .. ".note")) or 0
    if #there < noted then error(("step %d was logged, but metrics.jsonl ends with step %d"):format(noted, #there), 0) end
    for k, loss in ipairs(there) do
      if loss ~= wanted[k] then error(("step %d has loss %s, but %s in the undisturbed run"):format(k, loss, wanted[k]), 0) end
    end
  end
  if #losses(out) ~= given.steps then error(("metrics.jsonl has %d lines for %d steps"):format(#losses(out), given.steps), 0) end
  local _, rows = process.read(out .. "/metrics.csv"):gsub("\n", "")
  if rows ~= given.steps + 1 then error(("metrics.csv has %d rows for %d steps"):format(rows - 1, given.steps), 0) end
  local _, superseded = process.read(out .. "/superseded.jsonl"):gsub("\n", "")
  return kills, superseded
end

return M
