-- SPDX-License-Identifier: MIT
--- Errors and early ends of the training script: wrong options, losses that are not finite, folders that cannot be
--- written, signals.
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"
local training = require "spec.support.training"

local root = process.root
local TINY, train, metrics = training.TINY, training.train, training.metrics
local checkpoint, ok = training.checkpoint, training.ok
local folder

describe("scripts/train.lua, when it cannot continue,", function()
  setup(function()
    folder = training.begin()
    ok(train(0, "alone", { "--steps", 20 }))
  end)
  teardown(function() process.remove_folder(folder) end)

  local wrong = {
    { { "--stpes", 3 }, "unknown option '%-%-stpes'.*[Dd]id you mean '%-%-steps'" },
    { { "--learning_rate", 3 }, "unknown option '%-%-learning_rate'. Did you mean '%-%-lr'%? %(train" },
    { { "--tokens", 3 }, "unknown option '%-%-tokens' %(train" },
    { { "--steps", "many" }, "'many' is not a whole number from 1" },
    { { "--dtype", "float8" }, "'float8' is unknown, expected one of float32, bfloat16" },
    { { "--heads", 3 }, "%-%-dim 16 is not a multiple of %-%-heads 3" },
    { { "--device", "cuda:9" }, "%-%-device: set_default_device: device 'cuda:9' is not available" },
    { { "--device", "gpu" }, "%-%-device: .*unknown device 'gpu'" },
    { { "--save", "/nowhere/at/all" }, "%-%-save /nowhere/at/all: its folder does not exist" },
    { { "--out", "" }, "%-%-out: the path is empty" },
    { { "--save", "" }, "%-%-save: the path is empty" },
    { { "--save", "/tmp" }, "%-%-save /tmp is a folder, expected a file" },
    { { "--save", "/proc/none" }, "%-%-save: the checkpoint cannot be written: cannot create '/proc/none" },
    { { "--device", "meta" }, "tensors on meta have no values to train with" },
    { { "--batch", 1000000000000 }, "%-%-batch 1000000000000 is more than the %d+ training tokens" },
    { { "--data", "/nowhere/at/all" }, "there is no file or folder '/nowhere/at/all'" },
    { { "--resume", "/nowhere/at/all" }, "there is no file or folder '/nowhere/at/all'" },
    { { "--nan", "ignore" }, "'ignore' is unknown, expected one of stop, continue" },
    { { "--from", "/nowhere/at/all" }, "%-%-from: there is no file or folder '/nowhere/at/all'" },
    { { "--from", "a", "--resume", "b" }, "%-%-resume continues a run and %-%-from begins a new one" },
    { { "--context", 100000 }, "training tokens are too few for a context of 100000" },
  }
  for _, case in ipairs(wrong) do
    it(("reports what is wrong with %s %s, once, and ends with status 2"):format(unpack(case[1])), function()
      local job = train(0, "wrong", case[1])
      assert.are.equal(2, job.code)
      assert.matches("^train: [^\n]*" .. case[2] .. "[^\n]*\n$", job.stderr)
    end)
  end

  it("tries --save's folder without touching what is in it", function()
    process.write(folder .. "/tried.safetensors.probe", "mine")
    local job = train(0, "tried", { "--steps", 1, "--save", folder .. "/tried.safetensors" })
    assert.are.equal(0, job.code, job.stderr)
    assert.are.equal("mine", process.read(folder .. "/tried.safetensors.probe"))
    assert.are.equal(0, os.execute(("mkfifo '%s/tried.pipe'"):format(folder)))
    job = train(0, "tried-pipe", { "--steps", 1, "--save", folder .. "/tried.pipe" })
    assert.matches("tried.pipe' exists and is not a regular file", job.stderr)
    os.remove(folder .. "/tried.pipe")
  end)

  it("refuses to write over another run, and to change a checkpoint's shape", function()
    local job = train(0, "alone", { "--steps", 1 })
    assert.matches("already contains a run", job.stderr)
    job = train(0, "wider", { "--resume", folder .. "/alone", "--dim", 32 })
    assert.matches("%-%-dim 32, but '.*' was trained with 16", job.stderr)
    job = train(0, "done", { "--resume", folder .. "/alone" })
    assert.matches("nothing is left to do", job.stderr)
  end)

  it("prints an error of the command line once over two ranks", function()
    local job = train(2, "wrong", { "--stpes", 3 })
    assert.are.equal(2, job.code)
    local _, n = job.stderr:gsub("unknown option", "")
    assert.are.equal(1, n)
  end)

  it("ends on every rank when rank 0 cannot write", function()
    process.within(10, function()
      local job = train(2, "never", { "--out", "/proc/none", "--steps", 1000 })
      assert.are.equal(2, job.code)
      assert.matches("train: cannot make the folder '/proc/none'", job.stderr)
      return job.seconds
    end)
  end)

  -- Makes the weights infinite: the loss of step 2 is the first that is not finite.
  for _, n in ipairs { 0, 2 } do
    it(("names the first step whose loss is not finite, and ends at the third without a checkpoint, over %d ranks"):format(math.max(n, 1)), function()
      local name = "lost" .. n
      local job = train(n, name, { "--steps", 9, "--lr", 1e30, "--warmup", 0, "--sample", 10, "--eval-every", 1,
        "--save", 1 })
      assert.are.equal(1, job.code, job.stdout)
      local _, said = job.stdout:gsub("the loss is not finite", "")
      assert.are.equal(1, said)
      local first = tonumber(job.stdout:match "step (%d+): the loss is not finite %(%-?[in][na][fn]%); a smaller")
      assert.matches(("train: the loss was not finite in steps %d to %d: ended without a checkpoint; the metrics are in %%S+ %%(%%-%%-nan continue would continue%%)")
        :format(first, first + 2), job.stderr)
      assert.are.equal(first + 2, #metrics(name))
      assert.matches("no checkpoint: the weights are not finite", job.stdout)
      assert.is_nil(job.stdout:find("writes:", 1, true))
      for step = 1, 9 do
        local path = ("%s/%s/step-%06d.safetensors"):format(folder, name, step)
        for key, t in ms.sorted_pairs(step < first and lfs.attributes(path) and ms.load(path) or {}) do
          assert.are.equal(t:numel(), t:isfinite():sum():item(), key)
        end
        assert.is_true(step < first or lfs.attributes(path) == nil, path)
      end
      assert.is_nil(lfs.attributes(folder .. "/" .. name .. "/samples.txt"))
    end)
  end

  it("continues if asked to with losses that are not finite, to an end without a checkpoint", function()
    local job = ok(train(0, "lost-on", { "--steps", 9, "--lr", 1e30, "--warmup", 0, "--sample", 10, "--nan",
      "continue" }))
    assert.are.equal(9, #metrics "lost-on")
    assert.matches("train: the weights are not finite after step 9: no checkpoint and no samples", job.stderr)
    job = train(0, "lost-late", { "--steps", 2, "--lr", 1e30, "--warmup", 0 })
    assert.are.equal(1, job.code)                       -- fewer than three in a row, but weights that must not be saved
    assert.matches("train: the weights are not finite after step 2", job.stderr)
    assert.are.equal("", checkpoint("lost-late", 2))
    job = ranks.run(0, root .. "/scripts/generate.lua", { args = { "--from", folder .. "/lost-late" } })
    assert.matches("there is no checkpoint", job.stderr)
  end)

  it("ends with an error if generated text cannot be written", function()
    local output, code = process.shell(("luajit '%s/scripts/generate.lua' --from '%s/alone' --length 3 2>&1 >/dev/full"):format(
      root, folder))
    assert.are.equal(1, code)
    assert.matches("generate: the text cannot be written: No space left on device\n", output)
  end)

  it("refuses to generate text with weights that are not finite", function()
    local path = folder .. "/alone/step-000020.safetensors"
    local model = require("moonshard.models.gpt") { vocab = 256, context = 16, layers = 2, heads = 2, dim = 16,
      position = "alibi", tie = false }
    local checkpoints = require "moonshard.run.checkpoint"
    local opened = checkpoints.open(path)
    opened:load_model(model)
    assert.is_true(checkpoints.finite(model))
    ms.no_grad(function() model:parameters()[3]:fill_(0 / 0) end)
    assert.is_false(checkpoints.finite(model))
    opened:close()
    local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
    checkpoints.save(folder .. "/nan.safetensors", model, optimizer, opened.config, 20)
    local job = ranks.run(0, root .. "/scripts/generate.lua", { args = { "--from", folder .. "/nan.safetensors" } })
    assert.are.equal(2, job.code)
    assert.matches("generate: %-%-from: the weights of '.*nan.safetensors' are not finite", job.stderr)
  end)

  it("refuses a folder that already contains a checkpoint's name, before it trains", function()
    lfs.mkdir(folder .. "/full")
    lfs.mkdir(folder .. "/full/step-000002.safetensors")
    local job = train(0, "full", { "--steps", 2 })
    assert.are.equal(2, job.code)
    assert.matches("^train: '[^\n]*full' already contains step%-000002%.safetensors; [^\n]*\n$", job.stderr)
  end)

  it("ends on Ctrl-C with one line and status 130, within 1 s", function() process.within(1, function()
    if lfs.attributes(folder .. "/interrupted") then process.remove_folder(folder .. "/interrupted") end
    local out = folder .. "/interrupted.out"
    local words = { "luajit", root .. "/scripts/train.lua", "--data", folder .. "/text", "--out", folder
      .. "/interrupted", "--steps", "100000" }
    for _, a in ipairs(TINY) do words[#words + 1] = tostring(a) end
    local child = process.start(words, { stdout = out, stderr = out .. ".err" })
    local deadline = process.now() + 60 * process.patience
    while not process.read(out):find "step +1/" and process.now() < deadline do process.sleep(0.01) end
    assert.matches("step +1/", process.read(out))
    process.kill(child.pid, process.SIGINT)
    local before = process.now()
    assert.are.equal(130, child:wait(30) or child:stop())
    assert.matches("^\ntrain: interrupted in step %d+ of 100000; the run's metrics are in .*/interrupted\n$",
      process.read(out .. ".err"))
    return process.now() - before
  end) end)

  for _, n in ipairs { 0, 2 } do
    it(("writes a checkpoint on SIGUSR1 and continues, on SIGUSR2 and ends with status 75, over %d ranks"):format(
      math.max(n, 1)), function()
      local name = "signalled" .. n
      local out = folder .. "/" .. name .. ".out"
      local words = n > 0 and { "mpirun", "-n", tostring(n) } or {}
      for _, a in ipairs { "luajit", root .. "/scripts/train.lua", "--data", folder .. "/text", "--out", folder .. "/"
        .. name, "--steps", "100000" } do
        words[#words + 1] = a
      end
      for _, a in ipairs(TINY) do words[#words + 1] = tostring(a) end
      local child = process.start(words, { stdout = out, stderr = out .. ".err", env = process.mpirun_env() })
      local function await(pattern)
        local deadline = process.now() + 100 * process.patience
        while not process.read(out):find(pattern) and process.now() < deadline and not child:poll() do
          process.sleep(0.01)
        end
        local found = process.read(out):match(pattern)
        assert.is_truthy(found, process.read(out) .. process.read(out .. ".err"))
        return found
      end
      local SIGUSR1, SIGUSR2 = 10, 12
      await "step +1/"
      process.kill(child.pid, SIGUSR1)
      local first = await "step (%d+): checkpoint: "
      process.kill(child.pid, SIGUSR2)
      assert.are.equal(75, child:wait(100) or child:stop())
      local last
      for step in process.read(out):gmatch "step (%d+): checkpoint: " do last = step end
      assert.is_true(tonumber(last) > tonumber(first))
      for _, step in ipairs { first, last } do assert.is_true(#checkpoint(name, tonumber(step)) > 1000) end
      local job = ok(train(n, name .. "-on", { "--resume", folder .. "/" .. name, "--steps", tonumber(last) + 2,
        "--warmup", 3 }))
      assert.matches(("from step %s of "):format(last), job.stdout)
    end)
  end
end)
