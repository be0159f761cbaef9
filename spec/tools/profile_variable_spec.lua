-- SPDX-License-Identifier: MIT
--- MOONSHARD_PROFILE: a profile of a whole job, without a change of its script.
local cjson = require "cjson"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local script = [[
  local ms = require "moonshard"
  local nn, fsdp = ms.nn, ms.fsdp
  local model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
  fsdp.fully_shard(model)
  for step in ms.steps(2) do model(ms.ones(1, 64)):sum():backward() end
  %s
]]

describe("MOONSHARD_PROFILE", function()
  for _, ending in ipairs { "", "os.exit(0, true)", "os.exit(0)" } do
    it(("writes a file when the script ends %s"):format(ending == "" and "by itself" or "by " .. ending), function()
      local path = process.temp_folder() .. "/t.json"
      local job = ranks.run(0, script:format(ending), { env = { MOONSHARD_PROFILE = path } })
      assert.are.equal(0, job.code, job.stderr)
      assert.matches("profile: .*t.json, %d+ ranges", job.stderr)
      assert.matches("FSDP::all_gather", process.read(path))
    end)
  end

  -- The ranks that a trace has, and the number of its events.
  local function processes(path)
    local events, list = cjson.decode(process.read(path)).traceEvents, {}
    for _, e in ipairs(events) do
      if e.name == "process_name" then list[#list + 1] = e.pid end
    end
    table.sort(list)
    return list, #events
  end

  it("writes one for all ranks, and replaces that of an earlier job", function()
    local path = process.temp_folder() .. "/t.json"
    for _ = 1, 2 do
      local job = ranks.run(2, script:format "", { env = { MOONSHARD_PROFILE = path } })
      assert.are.equal(0, job.code, job.stderr)
      assert.are.same({ 0, 1 }, processes(path))
    end
    local lfs = require "lfs"
    assert.is_nil(lfs.attributes((path:gsub("json$", "rank0.json"))))
  end)

  it("writes one for each rank that never joins the job", function()
    local path = process.temp_folder() .. "/t.json"
    local job = ranks.run(2, "require('moonshard').ones(3):exp()", { env = { MOONSHARD_PROFILE = path } })
    assert.are.equal(0, job.code, job.stderr)
    for rank = 0, 1 do assert.are.same({ rank }, processes((path:gsub("json$", "rank" .. rank .. ".json")))) end
    assert.is_nil(require("lfs").attributes(path))
  end)

  it("writes the file of a script that fails, and of the rank whose error ends a job", function()
    local path = process.temp_folder() .. "/t.json"
    local failing = script:format "if ms.dist.rank() == ms.dist.world_size() - 1 then error 'on purpose' end ms.dist.barrier()"
    for _, world in ipairs { 0, 2 } do
      local job = ranks.run(world, failing, { env = { MOONSHARD_PROFILE = path } })
      assert.are_not.equal(0, job.code)
      assert.matches("on purpose", job.stderr)
      local list, n = processes(path)
      assert.are.equal(math.max(world - 1, 0), list[#list])
      assert.is_true(n > 20)
    end
  end)

  it("reports at once a file that cannot be written", function()
    local job = ranks.run(0, script:format "print 'trained'",
      { env = { MOONSHARD_PROFILE = process.temp_folder() .. "/none/t.json" } })
    assert.are_not.equal(0, job.code)
    assert.matches("MOONSHARD_PROFILE: cannot write .*/none/t.json: No such file or directory", job.stderr)
    local pipe = process.temp_folder() .. "/pipe"
    assert.are.equal(0, os.execute(("mkfifo '%s'"):format(pipe)))
    job = ranks.run(0, script:format "print 'trained'", { env = { MOONSHARD_PROFILE = pipe } })
    assert.matches("MOONSHARD_PROFILE: cannot write .*/pipe: it is a named pipe", job.stderr)
    local ok, err = pcall(function() require("moonshard").profiler.profile(function() end):export_chrome_trace(
      pipe) end)
    assert.is_false(ok)
    assert.matches("profiler: cannot write '.*/pipe': No such device or address", err)
    assert.is_nil(job.stdout:find("trained", 1, true))
  end)

  it("does not interfere with a script that uses the profiler", function()
    local folder = process.temp_folder()
    local own = ("ms.profiler.profile(function() model(ms.ones(1, 64)) end):export_chrome_trace %q"):format(folder
      .. "/own.json")
    local job = ranks.run(0, script:format(own), { env = { MOONSHARD_PROFILE = folder .. "/t.json" } })
    assert.are.equal(0, job.code, job.stderr)
    local function gathers(file) return select(2, process.read(folder .. file):gsub('"FSDP::all_gather"', "")) end
    assert.are.equal(1, gathers "/own.json")
    assert.are.equal(3, gathers "/t.json")
  end)
end)
