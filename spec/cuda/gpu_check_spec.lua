-- SPDX-License-Identifier: MIT
--- scripts/gpu_check on the emulated GPU: it continues if one of its parts fails or hangs; its summary.
local cjson = require "cjson"
local lfs = require "lfs"
local process = require "spec.support.process"

local build = process.build

local folder
before_each(function() folder = process.temp_folder() end)
after_each(function() process.remove_folder(folder) end)

--- Runs gpu_check with these words; returns its exit code, its output, and the records of gpu_check.jsonl: a list, and
--- parts by name.
local function check(words, env)
  env = env or {}
  if not env.MOONSHARD_BUILD then env.MOONSHARD_BUILD = build end
  local child = process.start({ "sh", "-c", 'cd "$0" && exec scripts/gpu_check --device emulated --out "$@"',
    process.root, folder .. "/out", unpack(words) }, { stdout = folder .. "/text", stderr = folder .. "/err", env = env })
  local code = child:wait(100)
  local list, parts = {}, {}
  for line in process.read(folder .. "/out/gpu_check.jsonl"):gmatch "[^\n]+" do
    local record = cjson.decode(line)
    table.insert(list, record)
    if record.part then parts[record.part:match "[^/]*$"] = record end
  end
  return code, process.read(folder .. "/text") .. process.read(folder .. "/err"), list, parts, child.seconds
end

--- Writes a spec file with one test, whose body is given, into the temporary folder; returns its path.
local function spec(name, body)
  process.write(("%s/%s_spec.lua"):format(folder, name), ([[
    local process = require "spec.support.process"
    describe("x", function() it("y", function() %s end) end)]]):format(body))
  return ("%s/%s_spec.lua"):format(folder, name)
end

local function it_built(name, fn)
  it(name, function()
    if not lfs.attributes(build .. "/libmoonshard_cuda_emulated.so") then
      return pending "this build has no emulated GPU"
    end
    if process.tool then return pending "has time limits that are too short under sanitizers and valgrind" end
    fn()
  end)
end

describe("gpu_check", function()
  it_built("continues after spec files that hang, crash and fail", function()
    local code, text, _, parts = check { "--part-limit", "3",
      spec("hang", ([[
        require("ffi").cdef "int spec_signal(int, void *) __asm__(\"signal\");"
        require("ffi").C.spec_signal(15, require("ffi").cast("void *", 1))
        process.write("%s/pid", process.start({ "setsid", "sleep", "1000" }).pid)
        while true do end]]):format(folder)),
      spec("crash", "process.kill(process.pid(), 11)"), spec("fail", "assert.is_true(false)"), spec("good", "") }
    assert.are.equal(1, code, text)
    assert.are.equal("timeout", parts["hang_spec.lua"].status)
    assert.are.equal("crashed", parts["crash_spec.lua"].status)
    assert.same({ "failed", 0, 1 }, { parts["fail_spec.lua"].status, parts["fail_spec.lua"].passed,
      parts["fail_spec.lua"].failed })
    assert.same({ "passed", 1, 0 }, { parts["good_spec.lua"].status, parts["good_spec.lua"].passed,
      parts["good_spec.lua"].failed })
    assert.is_true(parts["hang_spec.lua"].seconds >= 3)
    assert.is_false(process.runs(tonumber(process.read(folder .. "/pid"))), "a process of the hanging part is left")
    assert.matches("good_spec.lua | passed", process.read(folder .. "/out/gpu_check.md"))
    assert.matches("3 of 4 parts failed or did not run", text)
  end)

  it_built("keeps the limit of all parts together", function()
    local hang = "while true do end"
    local code, text, _, parts, seconds = check { "--limit", "5", spec("first", hang), spec("second", hang),
      spec("third", "") }
    assert.are.equal(1, code, text)
    assert.same({ "timeout", "not run" }, { parts["first_spec.lua"].status, parts["third_spec.lua"].status })
    assert.matches("no time is left", parts["third_spec.lua"].why)
    assert.is_true(seconds < 10 * process.patience, seconds)
  end)

  it_built("keeps the rates that were measured before a part fails", function()
    local rates = {}
    local function names(list)
      for _, r in ipairs(list) do if r.rate then table.insert(rates, r.rate) end end
    end
    local code, text, list = check({ "--only", "^rates: memory$" })
    assert.are.equal(0, code, text)
    names(list)
    assert.is_true(#rates >= 4, text)
    local whole = #rates
    rates = {}
    code, text, list = check({ "--only", "^rates: memory$" }, { MOONSHARD_EMULATOR = "fail:cudaMemcpyAsync:9:719" })
    names(list)
    assert.are.equal(1, code, text)
    assert.is_true(#rates > 0 and #rates < whole, text)
    assert.matches("CUDA error 719", list[#list].last)
  end)

  it_built("reads the steps of the benchmark, also over ranks, and the operators", function()
    local code, text, list = check { "--only", "^GPT" }
    assert.are.equal(0, code, text)
    local steps, operators = {}, {}
    for _, r in ipairs(list) do
      if r.rate then
        steps[r.rate] = r.value * r.seconds * 1e3                   -- tokens
      elseif r.operator then operators[r.operator] = r.calls end
    end
    local step = "step of GPT-2 tiny, bfloat16"
    for name, tokens in pairs { [step] = 32, [step .. ", fully_shard in a world of one"] = 32,
      [step .. ", fully_shard, 2 ranks"] = 64 } do
      assert.near(tokens, steps[name] or 0, 1e-6, name .. "\n" .. text)
      steps[name] = nil
    end
    assert.is_nil(next(steps))
    assert.is_true(operators.linear >= 3 and operators.gelu_mlp == 1 and operators["AdamW.step"] == 1, text)
  end)

  it_built("trains over two ranks", function()
    local code, text, _, parts = check { "--only", "^training, 2 ranks$" }
    assert.are.equal(0, code, text)
    assert.are.equal("passed", parts["training, 2 ranks"].status)
  end)

  it_built("stops if there is no device, and lists what it did not run", function()
    local code, text, list, parts = check({ "--only", "^[mr]" }, { MOONSHARD_EMULATOR = "fail:cudaGetDeviceCount:1:100" })
    assert.are.equal(1, code, text)
    assert.are.equal("failed", parts.machine.status)
    assert.matches("there is no CUDA device", parts.machine.last)
    assert.is_true(#list >= 5, #list)
    for k = 3, #list do
      assert.same({ "not run", "'machine' failed" }, { list[k].status, list[k].why })
    end
  end)

  it_built("refuses a pattern that chooses no part, and names the parts", function()
    local text = process.shell(("cd '%s' && MOONSHARD_BUILD='%s' scripts/gpu_check --device emulated --out '%s' --only 'machine|training' 2>&1; echo $?")
      :format(process.root, build, folder))
    assert.matches("gpu_check: %-%-only 'machine|training' matches no part .*\n  machine\n.*\n  training\n.*\n2\n$", text)
  end)

  it("reads the times of kernels that ncu prints among the program's output", function()
    process.write(folder .. "/ncu", [[#!/bin/sh
cat <<'CSV'
==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Block Size","Metric Name","Metric Unit","Metric Value"
"0","7","_Z1kPf","(256, 1, 1)","gpu__time_duration.sum","nsecond","1,500"
"1","7","_Z1kPf","(256, 1, 1)","gpu__time_duration.sum","nsecond","2500"
"2","7","_Z1l","(32, 1, 1)","gpu__time_duration.sum","nsecond","10.5"
CSV
]])
    os.execute(("chmod +x '%s/ncu'"):format(folder))
    local line = ("cd '%s' && PATH='%s':$PATH MOONSHARD_RATES='%s/rates' luajit scripts/support/gpu_check/kernels.lua"):format(
      process.root, folder, folder)
    assert.are.equal(0, os.execute(line .. " >/dev/null"))
    local found = {}
    for text in io.lines(folder .. "/rates") do
      local r = cjson.decode(text)
      found[r.kernel] = { r.launches, r.seconds }
    end
    assert.are.equal(2, found._Z1kPf[1])
    assert.near(2e-6, found._Z1kPf[2], 1e-12)
    assert.near(10.5e-9, found._Z1l[2], 1e-15)
    process.write(folder .. "/ncu", "#!/bin/sh\necho '==ERROR== no permission'\nexit 1\n")
    assert.are_not.equal(0, os.execute(line .. " 2>/dev/null"))
  end)

  it_built("refuses unknown options and values", function()
    for _, case in ipairs { { "--device", "gpu", "%-%-device is 'gpu', expected real, emulated or null" },
      { "--fast", nil, "unknown option '%-%-fast'" }, { "--limit", nil, "%-%-limit needs a value" } } do
      local code, text = check { case[1], case[2] }
      assert.are.equal(2, code, text)
      assert.matches(case[3], text)
    end
  end)

  it("shows predictions, PyTorch's times and bars beside the measurements, and lists what was not measured", function()
    local path = package.path
    package.path = process.root .. "/scripts/support/gpu_check/?.lua;" .. path
    local summary = require "summary"
    package.path = path
    local text = summary.write([[
      {"device":"real","time":"T"}
      {"part":"compute-sanitizer memcheck","status":"not measured","why":"compute-sanitizer is not installed"}
      {"rate":"copy on the device","seconds":1e-4,"value":4000,"unit":"GB/s"}
      {"rate":"add","seconds":2e-4,"value":3000,"unit":"GB/s","bar":"copy"}
      {"rate":"linear","seconds":1e-4,"value":700,"unit":"TFLOP/s","bar":"products"}
      {"rate":"linear","seconds":3e-4,"torch":"2"}
      {"rate":"linear","seconds":0.98e-4,"torch":"2"}
      {"rate":"matmul","seconds":1e-4,"value":700,"unit":"TFLOP/s","bar":"products"}
      {"rate":"only in PyTorch","seconds":1e-6,"torch":"2"}
      {"operator":"linear","calls":2,"seconds":2e-6}
      {"kernel":"_Zk","launches":2,"seconds":3e-6}
      {"kernel":"_Zl","launches":6,"seconds":1e-6}
      {"torn":]], cjson.encode { cases = { add = 1e-4 }, symbols = { _Zk = "rows: k", _Zl = "rows: k" },
      gpt2 = { seconds = 0.05, operators = { { name = "linear", seconds = 1e-6 } }, kernels = { { name = "rows: k", launches = 10, seconds = 1e-5 },
        { name = "rows: m", launches = 1, seconds = 1e-6 } } } })
    for _, line in ipairs {
      "| compute-sanitizer memcheck | not measured |  | compute-sanitizer is not installed |",
      "| add | 200.0 | 3000.0 GB/s | 100.0 | 2.00 | not measured |  | 0.75 of the copy rate; target 0.85 missed |",
      "| linear | 100.0 | 700.0 TFLOP/s |  |  | 98.0 | 0.98 | 0.98 of PyTorch's rate; target 0.95 met |",
      "| matmul | 100.0 | 700.0 TFLOP/s |  |  | not measured |  | not measured |",
      "| only in PyTorch | not measured |  |  |  | 1.0 |  |  |",
      "| linear | 2 | 2.0 | 1.0 | 2.00 |",
      "| rows: k | 10 | 1.5 | 1.0 | 1.50 |",
      "| rows: m | 1 | not measured | 1.0 |  |",
    } do
      assert.is_truthy(text:find(line, 1, true), line .. "\nis not in\n" .. text)
    end
  end)

  it("runs from its archive where there is no LuaJIT, no compiler and no package", function()
    if process.tool then return pending "is not run under sanitizers or valgrind" end
    for _, name in ipairs { "libmoonshard_cuda.so", "libmoonshard_cuda_null.so", "libmoonshard_mpi.so" } do
      if not lfs.attributes(build .. "/" .. name) then return pending("this build has no " .. name) end
    end
    local from, tools = folder .. "/build", folder .. "/tools"
    lfs.mkdir(from)
    lfs.mkdir(tools)
    for _, name in ipairs { "libmoonshard.so", "libmoonshard_mpi.so", "libmoonshard_cuda.so", "libmoonshard_cuda_null.so",
      "libmoonshard_probe.so", "moonshard_cdef.h" } do
      lfs.link(build .. "/" .. name, from .. "/" .. name, true)
    end
    process.write(from .. "/results.txt", "")
    process.write(from .. "/predictions.json", cjson.encode { cases = { ["some kernel"] = 1e-4 } })
    for word in ("bash sh cat grep ls mkdir rm env date sed tr head dirname mktemp id"):gmatch "%S+" do
      assert.are.equal(0, os.execute(("ln -s \"$(command -v %s)\" '%s/%s'"):format(word, tools, word)))
    end
    assert.are.equal(0, os.execute(("cd '%s' && MOONSHARD_BUILD='%s' scripts/bundle --gpu --folder '%s/there'"):format(
      process.root, from, folder)))
    local bytes = tonumber((process.shell(("tar -C '%s' -cz there | wc -c"):format(folder))))
    assert.is_true(bytes > 2 ^ 20 and bytes <= 45 * 2 ^ 20, bytes)
    -- The results were made after the plugin, also where the archive's copies are unpacked.
    local parts = process.shell(("/usr/bin/env -i PATH='%s' HOME=/tmp '%s/there/scripts/gpu_check' --list"):format(tools, folder))
    assert.is_truthy(parts:find("results beside the PTX executor's", 1, true), parts)
    assert.is_nil(parts:find("results of the PTX executor", 1, true), parts)
    local child = process.start({ "/usr/bin/env", "-i", "PATH=" .. tools, "HOME=/tmp", folder
      .. "/there/scripts/gpu_check", "--device", "null", "--out", folder .. "/out" },
      { stdout = folder .. "/text", stderr = folder .. "/err" })
    assert.are.equal(0, child:wait(60), process.read(folder .. "/text") .. process.read(folder .. "/err"))
    local text = process.read(folder .. "/out/gpu_check.md")
    assert.is_truthy(text:find("| machine | passed |", 1, true), text)
    assert.matches("\ncuda:0 null device", text)
    assert.is_truthy(text:find("| some kernel | not measured |  | 100.0 |", 1, true), text)
    local listed = process.read(folder .. "/out/gpu_check.log")
    assert.matches("null device", listed)
    os.execute(("rm -rf '%s/there'"):format(folder))
  end)
end)
