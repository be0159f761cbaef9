-- SPDX-License-Identifier: MIT
--- The training script as users start it: options, run folder, repeatable losses that agree between numbers of ranks,
--- resuming. train_errors_spec.lua: what is wrong with a call, and runs that end early.
local cjson = require "cjson"
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"
local training = require "spec.support.training"

local root = process.root
local TINY, train, metrics, losses = training.TINY, training.train, training.metrics, training.losses
local checkpoint, ok, sentences = training.checkpoint, training.ok, training.sentences
local folder

describe("scripts/train.lua", function()
  setup(function()
    folder = training.begin()
    ok(train(0, "alone", { "--steps", 20 }))
  end)
  teardown(function() process.remove_folder(folder) end)

  it("writes a line a step with the documented fields, and validation in lines of their own", function()
    ok(train(0, "fields", { "--steps", 4, "--eval-every", 2, "--sample", 20 }))
    local steps, validations = metrics "fields"
    assert.are.equal(4, #steps)
    for k, m in ipairs(steps) do
      assert.are.equal(k, m.step)
      for _, name in ipairs { "loss", "lr", "grad_norm", "tokens_per_second", "allocated" } do
        assert.is_true(type(m[name]) == "number" and m[name] > 0, name)
      end
    end
    assert.are.same({ 2, 4 }, { validations[1].step, validations[2].step })
    assert.is_true(validations[2].val_loss > 0)
    assert.matches("^%d%.%d%d%d%d%d%d%d%d$", steps[1].line:match '"loss": ([^,]+)')
    local config = cjson.decode(process.read(folder .. "/fields/config.json"))
    assert.are.equal(16, config.dim)
    assert.are.equal(1, config.ranks)
    assert.are.equal(1, config.seed)
    assert.are.equal("float32", config.dtype)
    assert.matches("step 2", process.read(folder .. "/fields/samples.txt"))
  end)

  it("learns", function()
    local list = losses "alone"
    assert.is_near(math.log(256), tonumber(list[1]), 0.1)
    assert.is_true(tonumber(list[20]) < tonumber(list[1]) - 0.5)
  end)

  it("prints lines without escape codes if there is no terminal, and a bar if there is one", function()
    local job = ok(train(0, "lines", { "--steps", 3, "--eval-every", 1 }))
    assert.is_nil(job.stdout:find "[\27\r]")
    assert.matches("\nstep 1/3  loss %d", job.stdout)
    job = ok(train(0, "bar", { "--steps", 3 }, { env = { MOONSHARD_PROGRESS = "bar" } }))
    assert.matches("\r%[#+%.*%] 3/3  loss %d", job.stdout)
  end)

  it("repeats every loss and the saved weights to the bit", function()
    ok(train(0, "again", { "--steps", 20 }))
    assert.are.same(losses "alone", losses "again")
    assert.is_true(checkpoint("alone", 20) == checkpoint("again", 20))
    ok(train(0, "threads", { "--steps", 20 }, { env = { OMP_NUM_THREADS = "1" } }))
    assert.are.same(losses "alone", losses "threads")
    assert.is_true(checkpoint("alone", 20) == checkpoint("threads", 20))
  end)

  it("resumes to the bit, from a checkpoint on the way and from a stopped run", function()
    ok(train(0, "saving", { "--steps", 20, "--save", 8 }))
    assert.is_true(checkpoint("alone", 20) == checkpoint("saving", 20))
    ok(train(0, "resumed", { "--resume", folder .. "/saving/step-000008.safetensors" }))
    assert.is_true(checkpoint("alone", 20) == checkpoint("resumed", 20))
    local all = losses "alone"
    assert.are.same({ unpack(all, 9) }, losses "resumed")
    ok(train(0, "stopped", { "--steps", 20, "--stop", 13 }))
    ok(train(0, "continued", { "--resume", folder .. "/stopped" }))
    assert.is_true(checkpoint("alone", 20) == checkpoint("continued", 20))
    ok(train(0, "path", { "--steps", 20, "--save", folder .. "/final.safetensors" }))
    assert.is_true(checkpoint("alone", 20) == process.read(folder .. "/final.safetensors"))
  end)

  it("refuses a checkpoint of which a bit differs, by its name", function()
    local text = process.read(folder .. "/alone/step-000020.safetensors")
    for _, at in ipairs { 20, math.floor(#text / 2), #text } do
      local flipped = string.char(bit.bxor(text:byte(at), 0x40))
      process.write(folder .. "/damaged.safetensors", text:sub(1, at - 1) .. flipped .. text:sub(at + 1))
      local job = train(0, "from-damaged", { "--resume", folder .. "/damaged.safetensors" })
      assert.are.equal(2, job.code, job.stdout)
      assert.matches("damaged%.safetensors", job.stderr)
      assert.is_nil(lfs.attributes(folder .. "/from-damaged", "mode"))
    end
  end)

  it("resumes to the bit with dropout, whose random numbers continue", function()
    ok(train(0, "drop", { "--steps", 10, "--dropout", 0.2, "--save", 4 }))
    ok(train(0, "drop-resumed", { "--resume", folder .. "/drop/step-000004.safetensors" }))
    assert.is_true(checkpoint("drop", 10) == checkpoint("drop-resumed", 10))
    assert.are_not.same(losses "alone", losses "drop")
  end)

  it("gives the same losses for any number of micro-batches", function()
    ok(train(0, "parts", { "--steps", 20, "--accumulate", 3 }))
    local whole, parts = losses "alone", losses "parts"
    for k = 1, 20 do assert.is_near(tonumber(whole[k]), tonumber(parts[k]), 1e-5 * tonumber(whole[k])) end
  end)

  it("trains in bfloat16", function()
    ok(train(0, "half", { "--steps", 20, "--dtype", "bfloat16" }))
    local whole, half = losses "alone", losses "half"
    assert.are_not.same(whole, half)
    for k = 1, 20 do assert.is_near(tonumber(whole[k]), tonumber(half[k]), 0.03 * tonumber(whole[k])) end
    -- The losses are not rounded to bfloat16, which has steps of 1/64 there.
    assert.is_near(tonumber(whole[1]), tonumber(half[1]), 5e-4 * tonumber(whole[1]))
    assert.are_not.equal(0, tonumber(half[1]) * 64 % 1)
  end)

  for world = 1, 4 do
    it(("gives the losses of a world of one over %d ranks"):format(world), function()
      local name = "world" .. world
      ok(train(world, name, { "--steps", 20, "--save", folder .. "/" .. name .. ".safetensors" }))
      local one, many = losses "alone", losses(name)
      assert.are.equal(20, #many)
      assert.is_near(tonumber(one[1]), tonumber(many[1]), 1e-6 * tonumber(one[1]))
      for k = 1, 20 do assert.is_near(tonumber(one[k]), tonumber(many[k]), 1e-5 * tonumber(one[k])) end
      -- Checks that a file is complete, whatever the number of ranks that wrote it.
      local tensors, metadata = ms.load(folder .. "/" .. name .. ".safetensors")
      local expected = ms.load(("%s/alone/step-000020.safetensors"):format(folder))
      local n = 0
      for key, t in ms.sorted_pairs(expected) do
        n = n + 1
        assert.are.equal(tostring(t.shape), tostring(tensors[key].shape))
        assert.is_true(t:allclose(tensors[key], { rtol = 1e-2, atol = 1e-3 }), key)
      end
      assert.is_true(n > 20)
      assert.are.equal("20", metadata.step)
    end)
  end

  it("begins with bitwise equal weights over 1, 2, 3, 4 ranks", function()
    -- A learning rate that float32 rounds to 0.
    for world = 1, 4 do ok(train(world, "init" .. world, { "--steps", 1, "--lr", 1e-60, "--weight-decay", 0 })) end
    local first = ms.load(("%s/init1/step-000001.safetensors"):format(folder))
    for world = 2, 4 do
      local other = ms.load(("%s/init%d/step-000001.safetensors"):format(folder, world))
      for key, t in ms.sorted_pairs(first) do
        if key:find "^model%." then assert.is_true(t:equal(other[key]), key) end
      end
    end
  end)

  it("repeats and resumes to the bit over two ranks", function()
    ok(train(2, "two", { "--steps", 20, "--save", 9 }))
    ok(train(2, "two-again", { "--steps", 20 }))
    assert.are.same(losses "two", losses "two-again")
    assert.is_true(checkpoint("two", 20) == checkpoint("two-again", 20))
    ok(train(2, "two-resumed", { "--resume", folder .. "/two/step-000009.safetensors" }))
    assert.is_true(checkpoint("two", 20) == checkpoint("two-resumed", 20))
  end)

  it("continues with another number of ranks from where it was", function()
    ok(train(1, "saved-by-one", { "--steps", 20, "--save", 10 }))
    ok(train(3, "resumed-by-three", { "--resume", folder .. "/saved-by-one/step-000010.safetensors" }))
    local one, three = losses "alone", losses "resumed-by-three"
    for k = 11, 20 do assert.is_near(tonumber(one[k]), tonumber(three[k - 10]), 1e-5 * tonumber(one[k])) end
  end)

  for _, n in ipairs { 0, 2 } do
    it(("continues in the run's own folder if --out names no other, over %d ranks"):format(math.max(n, 1)), function()
      local name = "own" .. n
      ok(train(0, name, { "--steps", 20, "--stop", 13, "--save", 8 }))
      local own = folder .. "/" .. name
      local job = ok(ranks.run(n, root .. "/scripts/train.lua", { args = {
        "--resume", own .. "/step-000008.safetensors", "--sample", 0, "--eval-every", 0 } }))
      assert.matches("run: [^\n]*/" .. name .. ", from step 8 of ", job.stdout)
      local one, all = losses "alone", losses(name)
      assert.are.equal(20, #all)
      for k = 1, 20 do assert.is_near(tonumber(one[k]), tonumber(all[k]), n == 0 and 0 or 1e-5 * tonumber(one[k])) end
      if n == 0 then assert.is_true(checkpoint("alone", 20) == checkpoint(name, 20)) end
      local config = cjson.decode(process.read(own .. "/config.json"))
      assert.are.same({ math.max(n, 1), 8, 1 }, { config.ranks, config.from_step, #config.sessions })
      assert.are.equal("", checkpoint(name, 13))        -- renamed to .superseded
    end)
  end

  it("prints nothing with --quiet, and writes tables and event files if asked to", function()
    for _, style in ipairs { "lines", "bar" } do
      local job = ok(train(0, "quiet-" .. style, { "--steps", 3, "--eval-every", 1, "--sample", 5, "--quiet", "--csv",
        "--tensorboard" }, { env = { MOONSHARD_PROGRESS = style } }))
      assert.are.equal("", job.stdout .. job.stderr)
    end
    local _, rows = process.read(folder .. "/quiet-bar/metrics.csv"):gsub("\n", "")
    assert.are.equal(1 + 3 + 3, rows)
    local events = 0
    for name in lfs.dir(folder .. "/quiet-bar") do events = events + (name:find "^events%.out%.tfevents%." and 1 or 0) end
    assert.are.equal(1, events)
  end)

  it("shares a batch that the ranks do not divide", function()
    ok(train(0, "five", { "--steps", 6, "--batch", 5 }))
    ok(train(3, "five-by-three", { "--steps", 6, "--batch", 5 }))
    local one, three = losses "five", losses "five-by-three"
    for k = 1, 6 do assert.is_near(tonumber(one[k]), tonumber(three[k]), 1e-5 * tonumber(one[k])) end
  end)

  it("reads llm.c's shards", function()
    local function shard(name, n)
      local parts = { "\136\216\52\1", "\1\0\0\0", string.char(n % 256, math.floor(n / 256), 0, 0), ("\0"):rep(1012) }
      for k = 1, n do parts[#parts + 1] = string.char(k * k % 251, k % 3) end
      process.write(folder .. "/shards/" .. name, table.concat(parts))
    end
    lfs.mkdir(folder .. "/shards")
    shard("t_train.bin", 900)
    shard("t_val.bin", 100)
    local job = ok(train(0, "tokens", { "--steps", 2, "--sample", 5, "--data", folder .. "/shards" }))
    assert.matches("900 tokens to train on, 100 to validate", job.stdout)
    local _, validations = metrics "tokens"
    assert.is_near(math.log(50257), validations[1].val_loss, 0.5)
    local function generate(prompt)
      return ranks.run(0, root .. "/scripts/generate.lua",
        { args = { "--from", folder .. "/tokens", "--length", 3, "--prompt", prompt } })
    end
    assert.matches("^5 17 %d+ %d+ %d+\n$", ok(generate "5 17").stdout)
    for _, prompt in ipairs { "the moon", "5 50257", "-1", "1.5" } do
      local wrong = generate(prompt)
      assert.are.equal(2, wrong.code)
      assert.matches("^generate: %-%-prompt: '%S+' is not a token id from 0 to 50256", wrong.stderr)
    end
  end)

  describe("on other data", function()
    setup(function()
      lfs.mkdir(folder .. "/other")
      process.write(folder .. "/other/c", sentences(350):gsub("moon", "sun "))
      lfs.mkdir(folder .. "/same-size")
      process.write(folder .. "/same-size/a", (sentences(400):gsub("moon", "noom")))
      process.write(folder .. "/same-size/b", sentences(100):upper())
      lfs.mkdir(folder .. "/moved")
      for _, name in ipairs { "a", "b" } do
        process.write(folder .. "/moved/" .. name, process.read(folder .. "/text/" .. name))
      end
    end)

    for _, n in ipairs { 0, 2 } do
      it(("fine-tunes the weights of a run with --from: its shape, a new optimizer and schedule, over %d ranks"):format(
        math.max(n, 1)), function()
        local name = "tuned" .. n
        local job = ok(ranks.run(n, root .. "/scripts/train.lua", { args = {
          "--from", folder .. "/alone", "--data", folder .. "/other", "--out", folder .. "/" .. name,
          "--steps", 6, "--batch", 4, "--sample", 0, "--warmup", 2, "--lr", 1e-60, "--weight-decay", 0 } }))
        assert.matches("run: [^\n]*, with the weights of " .. (folder .. "/alone/step-000020.safetensors"):gsub("%p",
          "%%%0"), job.stdout)
        local before, after = ms.load(folder .. "/alone/step-000020.safetensors"),
          ms.load(folder .. "/" .. name .. "/step-000006.safetensors")
        local moments = 0
        -- Steps of 1e-60 change nothing: these are the weights of the run.
        for key, t in ms.sorted_pairs(before) do
          if key:find "^model%." then
            assert.is_true(t:equal(after[key]), key)
          else
            moments = moments + 1
            assert.is_false(t:equal(after[key]), key)   -- the optimizer state is new
          end
        end
        assert.is_true(moments > 20)
        local steps = metrics(name)
        assert.are.same({ 1, 6 }, { steps[1].step, steps[6].step })
        assert.is_near(steps[1].lr * 2, steps[2].lr, 1e-66)       -- the run has a warm-up of its own
        local config = cjson.decode(process.read(folder .. "/" .. name .. "/config.json"))
        assert.are.equal(folder .. "/alone", config.from)
        assert.are.equal(16, config.dim)
      end)
    end

    it("learns there, from a lower loss than new weights have", function()
      ok(train(0, "tuned-well", { "--from", folder .. "/alone", "--data", folder .. "/other", "--steps", 20 }))
      local new, tuned = losses "alone", losses "tuned-well"
      assert.is_true(tonumber(tuned[1]) < tonumber(new[1]) - 0.5)
      assert.is_true(tonumber(tuned[20]) < tonumber(tuned[1]))
      ok(train(0, "tuned-on", { "--resume", folder .. "/tuned-well", "--data", folder .. "/other", "--steps", 22 }))
    end)

    it("refuses to resume a run: it names the run's data and those given", function()
      ok(train(0, "half-way", { "--steps", 20, "--stop", 5 }))
      for _, other in ipairs { "other", "same-size" } do
        local job = train(0, "refused", { "--resume", folder .. "/half-way", "--data", folder .. "/" .. other })
        assert.are.equal(2, job.code)
        local path, had, now =
          job.stderr:match("^train: %-%-resume: '([^']*)' was trained on '([^']*)' %(%d+ training tokens%), "
          .. "but %-%-data is '([^']*)' %(%d+ training tokens%); use %-%-from to train its weights on other data\n$")
        assert.are.same({ folder .. "/half-way/step-000005.safetensors", folder .. "/text", folder .. "/" .. other },
          { path, had, now })
      end
      -- the same data elsewhere
      ok(train(0, "half-moved", { "--resume", folder .. "/half-way", "--data", folder .. "/moved" }))
      assert.are.same({ unpack(losses "alone", 6) }, losses "half-moved")

      ok(train(0, "whole", { "--steps", 3, "--stop", 2, "--data", folder .. "/other" }))
      process.write(folder .. "/other/c", sentences(300))
      local args = { "--resume", folder .. "/whole", "--out", folder .. "/refused" }
      local job = ranks.run(0, root .. "/scripts/train.lua", { args = args })
      assert.matches("which has changed since; use %-%-from to train its weights on other data", job.stderr)
    end)
  end)

  -- LuaJIT's own heap grows by a table for each tensor, so this depends on the number of tensors, not on their size.
  local shapes = { tiny = TINY, ["the default's layers"] = { "--batch", 1, "--context", 32, "--sample", 0,
    "--eval-every", 0 } }
  for shape, given in ms.sorted_pairs(shapes) do it("keeps its memory flat without the collector: " .. shape, function()
    local script = ([[
      collectgarbage "stop"
      arg = { [0] = "%s/scripts/train.lua", %s }
      package.path = "%s/lua/?.lua;" .. package.path
      local runs = require "moonshard.run"
      -- No report is written: when its text becomes garbage depends on the time, not on the steps.
      require "moonshard.run.report".update = function() return math.huge end
      local start = runs.start
      runs.start = function(given)
        local run = start(given)
        local log = run.log
        run.log = function(self, values)                  -- called once per step
          log(self, values)
          if values.loss and (values.step == 300 or values.step == 500) then
            for line in io.lines "/proc/self/status" do
              local kib = line:match "^VmRSS:%%s*(%%d+)"
              if kib then print(("resident %%d, Lua's %%d"):format(kib, collectgarbage "count")) end
            end
          end
        end
        return run
      end
      dofile(arg[0])
    ]]):format(root, "@", root)
    local words = {}
    for _, a in ipairs(given) do words[#words + 1] = ("%q"):format(tostring(a)) end
    for _, a in ipairs { "--steps", "500", "--data", folder .. "/text", "--out", folder .. "/flat-" .. #given } do
      words[#words + 1] = ("%q"):format(a)
    end
    local job = ok(ranks.run(0, (script:gsub("@", function() return table.concat(words, ", ") end)), { timeout = 300 }))
    local steps = metrics("flat-" .. #given)
    assert.are.equal(500, #steps)
    assert.are.equal(steps[10].allocated, steps[500].allocated)
    -- Compares with step 300, because before it the JIT compiler still makes traces, whose number varies between runs.
    local before, lua_before, after, lua_after = job.stdout:match "resident (%d+), Lua's (%d+).*resident (%d+), Lua's (%d+)"
    local lua = lua_after - lua_before
    local grown = ("resident memory grew by %d KiB, Lua's heap by %d"):format(after - before, lua)
    assert.is_true(lua <= 2833, grown)
    assert.is_true(process.tool ~= nil or after - before - lua <= 1000, grown)
  end) end
end)

describe("fine-tuning with --lora", function()
  it("trains adapters alone, resumes to the bit, and gives its weights to --from and generate.lua", function()
    folder = training.begin()
    finally(function() process.remove_folder(folder) end)
    ok(train(0, "base", { "--steps", 30, "--lr", 0.01, "--data", folder .. "/text/a" }))
    local data = folder .. "/text/b"
    local given = { "--from", folder .. "/base", "--lora", 4, "--steps", 12, "--lr", 0.02, "--data", data }
    local job = ok(train(0, "tuned", given))
    local trained, all = job.stdout:match "adapters of rank 4: (%d+) of (%d+) parameters are trained"
    assert.is_true(tonumber(trained) < tonumber(all) / 3)
    local list = losses "tuned"
    assert.is_true(tonumber(list[12]) < tonumber(list[1]) - 1, table.concat(list, " "))
    local base, tuned = ms.load(folder .. "/base/step-000030.safetensors"),
      ms.load(folder .. "/tuned/step-000012.safetensors")
    local adapters = 0
    for name, t in ms.sorted_pairs(tuned) do
      if name:find "^model%..*lora_" then adapters = adapters + 1
      elseif name:find "^model%." then assert.is_true(t:equal(base[name]), name)
      else assert.matches("lora_[AB]", name) end
    end
    assert.are.equal(2 * 2 * 4, adapters)               -- of each block: qkv, proj and the two layers of the MLP

    ok(train(0, "stopped", { "--stop", 6, unpack(given) }))
    ok(train(0, "resumed", { "--resume", folder .. "/stopped", "--data", data }))
    assert.is_true(checkpoint("tuned", 12) == checkpoint("resumed", 12))
    ok(train(2, "ranks", given))
    for k, loss in ipairs(losses "ranks") do assert.near(tonumber(list[k]), tonumber(loss), 1e-4) end

    -- The losses of the first step are those of the merged weights.
    ok(train(0, "again", { "--from", folder .. "/tuned", "--steps", 1, "--data", data }))
    ok(train(0, "further", { "--from", folder .. "/tuned", "--lora", 2, "--steps", 1, "--data", data }))
    assert.near(tonumber(losses "again"[1]), tonumber(losses "further"[1]), 1e-5)
    assert.is_true(tonumber(losses "again"[1]) < tonumber(list[1]) - 1)
    ok(ranks.run(0, root .. "/scripts/generate.lua", { args = { "--from", folder .. "/tuned", "--length", 5 } }))

    job = train(0, "wrong", { "--lora", 4 })
    assert.are.equal(2, job.code)
    assert.matches("%-%-lora 4 needs the weights of a trained model: %-%-from RUN", job.stderr)
  end)
end)

describe("scripts/generate.lua", function()
  it("continues a prompt with a trained model, the same way each time", function()
    folder = training.begin()
    finally(function() process.remove_folder(folder) end)
    ok(train(0, "run", { "--steps", 5 }))
    local function generate(...)
      return ranks.run(0, root .. "/scripts/generate.lua",
        { args = { "--from", folder .. "/run", "--length", 30, ... } })
    end
    local a, b = ok(generate("--prompt", "the moon")), ok(generate("--prompt", "the moon"))
    assert.are.equal(a.stdout, b.stdout)
    assert.are.equal("the moon", a.stdout:sub(1, 8))
    assert.are.equal(8 + 30 + 1, #a.stdout)
    assert.are_not.equal(a.stdout, ok(generate("--prompt", "the moon", "--seed", 2)).stdout)
    local job = ranks.run(0, root .. "/scripts/generate.lua", { args = {} })
    assert.are.equal(2, job.code)
    assert.matches("%-%-model is missing, [^\n]*; or %-%-from", job.stderr)
    local long = ("the moon turns. "):rep(1000)         -- 16,000 bytes
    assert.are.equal(#long + 30 + 1, #ok(generate("--prompt", long)).stdout)
  end)
end)
