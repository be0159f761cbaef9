-- SPDX-License-Identifier: MIT
--- Times each kernel of a step of GPT-2 124M with ncu, and appends the mean by kernel to $MOONSHARD_RATES. The model is
--- cut to two layers, because ncu takes milliseconds for each launch; shapes stay as in the whole model.
local process = require "spec.support.process"
local cjson = require "cjson"

local folder = process.temp_folder()
process.write(folder .. "/step.lua", [[
  package.path = arg[1] .. "/scripts/bench/support/?.lua;" .. package.path
  local ms = require "moonshard"
  require("gpt2_step").of(require "moonshard.models.gpt" { vocab = 50304, context = 1024, layers = 2, heads = 12,
    dim = 768, device = "cuda", dtype = "bfloat16" })()
  ms.cuda.synchronize()]])
local child = process.start({ "sh", "-c", [[exec ncu --metrics gpu__time_duration.sum --csv --print-units base \
  --clock-control none --kernel-name-base mangled --target-processes all luajit "$0/step.lua" "$1"]], folder,
  process.root }, { stdout = folder .. "/csv", stderr = folder .. "/err" })
local code = child:wait(600)
local times, columns = {}, nil
for line in process.read(folder .. "/csv"):gmatch "[^\n]+" do
  local fields = {}
  for field in line:gmatch '"([^"]*)"' do fields[#fields + 1] = field end
  if fields[1] == "ID" then
    columns = {}
    for k, name in ipairs(fields) do columns[name] = k end
  elseif columns and #fields >= columns["Metric Value"] then
    local name = fields[columns["Kernel Name"]]
    local t = times[name] or { launches = 0, seconds = 0 }
    times[name] = t
    t.launches = t.launches + 1
    t.seconds = t.seconds + tonumber((fields[columns["Metric Value"]]:gsub(",", ""))) * 1e-9
  end
end
if code ~= 0 or not next(times) then
  io.stderr:write(process.read(folder .. "/csv"):sub(-2000), process.read(folder .. "/err"):sub(-2000))
  process.remove_folder(folder)
  os.exit(1)
end
process.remove_folder(folder)
local out = assert(io.open(os.getenv "MOONSHARD_RATES" or "/dev/stdout", "ab"))
for name, t in pairs(times) do
  out:write(cjson.encode { kernel = name, launches = t.launches, seconds = t.seconds / t.launches }, "\n")
  print(("%10.1f us %6d  %s"):format(t.seconds / t.launches * 1e6, t.launches, name))
end
out:close()
