-- SPDX-License-Identifier: MIT
--- scripts/finetune.lua as users start it: from a model's folder and a file to a tuned folder, alone and over ranks.
local cjson = require "cjson"
local ffi = require "ffi"
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

if not pcall(ffi.load, "libpcre2-8.so.0") then return pending "this system has no PCRE2" end

local folder

-- A small Llama with a tokenizer and the files of data.
local function make()
  folder = process.temp_folder()
  local base = folder .. "/base"
  lfs.mkdir(base)
  ms.text.train_bpe(("Number twice is "):rep(20) .. "0123456789", { vocab_size = 280, special_tokens = { "<|end|>",
    "<|im_start|>", "<|im_end|>" } }):save(base .. "/tokenizer.json")
  process.write(base .. "/tokenizer_config.json", '{"eos_token": "<|end|>"}')
  ms.manual_seed(3)
  ms.hf.save(ms.hf.create { architectures = { "LlamaForCausalLM" }, model_type = "llama", vocab_size = 280,
    hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 1,
    intermediate_size = 24 }, base)
  os.execute(("cp -r '%s' '%s/few'"):format(base, folder))
  ms.hf.save(ms.hf.create { architectures = { "LlamaForCausalLM" }, model_type = "llama", vocab_size = 20,
    hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 24 }, folder .. "/few")
  local files = { pc = {}, chat = {}, dpo = {} }
  for k = 1, 40 do
    files.pc[k] = ('{"prompt": "Number %d:", "completion": " twice is %d"}'):format(k, 2 * k)
    files.chat[k] = cjson.encode { messages = { { role = "user", content = "Number " .. k },
      { role = "assistant", content = "twice is " .. 2 * k } } }
    files.dpo[k] = ('{"prompt": "Number %d:", "chosen": " twice is %d", "rejected": " %d, or so"}'):format(k, 2 * k, k)
  end
  for name, lines in pairs(files) do process.write(("%s/%s.jsonl"):format(folder, name), table.concat(lines, "\n")) end
end

-- Runs the script over n ranks (0: without mpirun) into folder/out.
local function tune(n, out, options)
  local words = options.quiet ~= false and { "--quiet" } or {}
  local fixed = { model = folder .. "/base", data = folder .. "/pc.jsonl", out = folder .. "/" .. out, length = 48,
    batch = 2, epochs = 2, lr = 1e-2 }
  if options.resume then fixed = {} end
  for name, value in pairs(options) do fixed[name] = value end
  for name, value in ms.sorted_pairs(fixed) do
    if value then words[#words + 1] = "--" .. name end
    if value and value ~= true then words[#words + 1] = tostring(value) end
  end
  return ranks.run(n, process.root .. "/scripts/finetune.lua", { args = words })
end

local function ok(job) assert.are.equal(0, job.code, job.stderr .. job.stdout) end

-- The values of a metric, in order.
local function values(out, name)
  local list = {}
  for line in process.read(("%s/%s/metrics.jsonl"):format(folder, out)):gmatch "[^\n]+" do
    list[#list + 1] = cjson.decode(line)[name]
  end
  return list
end

local function weights(out) return ms.load(("%s/%s/model/model.safetensors"):format(folder, out)) end

local function same_bits(a, b)
  for name, t in pairs(a) do assert.is_true(t:eq(b[name]):all():item(), name) end
end

describe("scripts/finetune.lua", function()
  setup(make)
  teardown(function() process.remove_folder(folder) end)

  it("learns completions, and writes a folder that loads", function()
    ok(tune(0, "alone", { save = 5 }))
    ok(tune(0, "kept", { save = 1, keep = 2, steps = 6 }))
    local steps = {}
    for name in lfs.dir(folder .. "/kept") do steps[#steps + 1] = tonumber(name:match "^step%-(%d+)") end
    table.sort(steps)
    assert.are.same({ 4, 5 }, steps)
    local found = values("alone", "perplexity")
    assert.is_true(found[#found] < 0.3 * found[1])
    assert.is_truthy(process.read(folder .. "/alone/samples.txt"):find("%[.+%]"))
    local model = ms.hf.load(folder .. "/alone/model")
    assert.are.equal(280, model(ms.zeros({ 1, 3 }, { dtype = "int64" })):size(3))
    assert.is_truthy(ms.text.tokenizer(folder .. "/alone/model").eos_id)
  end)

  it("takes the same steps over ranks, in micro-batches and with activations computed again", function()
    local right = values("alone", "loss")
    for _, case in ipairs { { "two", 2, {} }, { "parts", 0, { accumulate = 2 } }, { "again", 2, { recompute = true } } } do
      ok(tune(case[2], case[1], case[3]))
      local found = values(case[1], "loss")
      assert.are.equal(#right, #found)
      for k, loss in ipairs(found) do assert.is_near(right[k], loss, 2e-4, case[1]) end
    end
  end)

  it("resumes with the bits of a run that was not interrupted", function()
    os.execute(("cp -r '%s/alone' '%s/resumed'"):format(folder, folder))
    for name in lfs.dir(folder .. "/resumed") do
      local step = tonumber(name:match "^step%-(%d+)%.safetensors$")
      if step and step > 5 then os.remove(folder .. "/resumed/" .. name) end
    end
    assert.matches("the run has ended, and its result is '[^\n]*/resumed/model'; %-%-resume '[^\n]*/step%-000005.safetensors' goes back to step 5",
      tune(0, "", { resume = folder .. "/resumed" }).stderr)
    process.remove_folder(folder .. "/resumed/model")
    ok(tune(0, "", { resume = folder .. "/resumed" }))
    same_bits(weights "alone", weights "resumed")
  end)

  it("goes on only with the data that it began with", function()
    process.remove_folder(folder .. "/alone/model")
    local job = tune(0, "", { resume = folder .. "/alone", quiet = true })
    assert.are.equal(0, job.code, job.stderr)
    same_bits(weights "alone", weights "resumed")
    local right = process.read(folder .. "/pc.jsonl")
    process.write(folder .. "/pc.jsonl", right:gsub("\n.*", ""))
    local message = tune(0, "", { resume = folder .. "/alone" }).stderr
    process.write(folder .. "/pc.jsonl", right)
    assert.matches("it has changed since", message)
  end)

  it("trains adapters over ranks, whose merged folder and PEFT's are the same model", function()
    ok(tune(2, "lora", { lora = 3, data = folder .. "/chat.jsonl", chat = "chatml", dtype = "bfloat16" }))
    local found = values("lora", "val_loss")
    assert.is_true(found[#found] < found[1])
    local model, ids = ms.hf.load(folder .. "/base"), ms.arange(0, 8, { dtype = "int64" }):reshape(1, 8)
    ms.hf.load_adapter(model, folder .. "/lora/adapter")
    local tokenizer = ms.text.tokenizer(folder .. "/lora/model")
    assert.are.equal("<|im_start|>user\na<|im_end|>\n", tokenizer:apply_chat_template({ { role = "user", content = "a" } },
      { tokenize = false }))
    assert.is_true((model(ids) - ms.hf.load(folder .. "/lora/model")(ids)):abs():max():item() < 1e-5)
  end)

  it("trains adapters beside int8 weights, which fit the model in float32", function()
    ok(tune(2, "int8", { lora = 3, int8 = true }))
    local found = values("int8", "val_loss")
    assert.is_true(found[#found] < found[1])
    local model = ms.hf.load(folder .. "/base")
    ms.hf.load_adapter(model, folder .. "/int8/adapter"):merge()
    ms.hf.save(model, folder .. "/int8/model")
    ok(tune(0, "next", { model = folder .. "/int8/model", steps = 1 }))
    assert.is_near(found[#found], values("next", "val_loss")[1], 0.05)
  end)

  it("validates four times at equal distances, says that few examples leave none, and what a run that has ended is", function()
    local lines = process.read(folder .. "/pc.jsonl")
    process.write(folder .. "/nineteen.jsonl", (lines:gsub("\n", "\0", 19):gsub("%z", "\n", 18):gsub("%z.*", "")))
    local job = tune(0, "few_examples", { data = folder .. "/nineteen.jsonl", validation = folder .. "/pc.jsonl", steps = 10 })
    ok(job)
    local steps = {}
    for line in process.read(folder .. "/few_examples/metrics.jsonl"):gmatch "[^\n]+" do
      local object = cjson.decode(line)
      if object.val_loss then steps[#steps + 1] = object.step end
    end
    assert.are.same({ 0, 3, 5, 8, 10 }, steps)
    assert.matches("%-%-resume: the run has ended, and its model is '[^\n]*/few_examples/model'; %-%-model '",
      tune(0, "", { resume = folder .. "/few_examples" }).stderr)
    os.remove(folder .. "/few_examples/model/config.json")
    assert.matches("there is no checkpoint [^\n]*; %-%-save N writes one", tune(0, "", { resume = folder .. "/few_examples" }).stderr)
    assert.matches("; none %(fewer than 20, and no %-%-validation%) to validate;", tune(0, "no_validation",
      { data = folder .. "/nineteen.jsonl", steps = 1, quiet = false }).stdout)
  end)

  it("says what is wrong before any rank ends the job", function()
    for _ = 1, 4 do
      local job = tune(2, "wrong", { int8 = true })
      assert.are.equal(2, job.code)
      assert.matches("finetune: %-%-int8 has no effect without %-%-lora\n", job.stderr)
    end
  end)

  it("takes a run's folder for its model's, and says what an adapter's is", function()
    ok(tune(0, "of_run", { model = folder .. "/alone", steps = 1 }))
    assert.are.equal(280, ms.hf.load(folder .. "/alone/", { device = "meta" }).config.vocab_size)
    assert.is_truthy(ms.text.tokenizer(folder .. "/alone").eos_id)
    assert.matches("finetune: %-%-model: '[^\n]*/lora/adapter' has only adapters; ms%.hf%.save%(ms%.hf%.load%(",
      tune(0, "of_adapter", { model = folder .. "/lora/adapter", lora = 2 }).stderr)
    for _, name in ipairs { "/of_int8", "/of_int8/adapter" } do lfs.mkdir(folder .. name) end
    process.write(folder .. "/of_int8/metrics.jsonl", "")
    process.write(folder .. "/of_int8/adapter/adapter_config.json", "{}")
    assert.matches("'[^\n]*/of_int8' is the folder of a run that has written adapters alone: give the model that they are for, and '[^\n]*/of_int8/adapter' as adapter",
      tune(0, "of_adapters", { model = folder .. "/of_int8" }).stderr)
    local job = ranks.run(0, process.root .. "/scripts/generate.lua", { args = { "--model", folder .. "/lora/adapter",
      "--prompt", "a" } })
    assert.matches("^generate: [^\n]*/lora/adapter' has only adapters; %-%-model FOLDER %-%-adapter '", job.stderr)
  end)

  it("refuses a model that continues no texts, as generation does", function()
    local t5 = folder .. "/t5"
    os.execute(("cp -r '%s/base' '%s'"):format(folder, t5))
    ms.hf.save(ms.hf.create { model_type = "t5", vocab_size = 280, d_model = 8, d_kv = 4, d_ff = 8, num_layers = 1,
      num_heads = 2 }, t5)
    local text = ": %-%-model: T5ForConditionalGeneration is no causal language model\n$"
    assert.matches("^finetune" .. text, tune(0, "of_t5", { model = t5 }).stderr)
    local job = ranks.run(0, process.root .. "/scripts/generate.lua", { args = { "--model", t5, "--prompt", "hi" } })
    assert.are.same({ 2, "" }, { job.code, job.stdout })
    assert.matches("^generate" .. text, job.stderr)
  end)

  it("says after SIGTERM how to go on", function()
    local out = folder .. "/ended"
    local pipe = io.popen(("luajit '%s/scripts/finetune.lua' --model '%s/base' --data '%s/pc.jsonl' --length 48 "
      .. "--batch 2 --steps 100000 --out '%s' 2>&1 & p=$!; while ! grep -qs grad_norm '%s/metrics.jsonl' && kill -0 $p; do "
      .. "sleep 0.1; done; kill -TERM $p; wait $p; echo status $?"):format(process.root, folder, folder, out, out))
    local text = pipe:read "*a"
    pipe:close()
    assert.is_truthy(text:find("\nsaved by a signal; go on with --resume " .. out .. "\n", 1, true), text)
    assert.matches("\nstatus 75\n$", text)
  end)

  it("trains adapters of float32 beside weights in bfloat16", function()
    ok(tune(2, "bf16", { lora = 3, bf16 = true }))
    local found = values("bf16", "val_loss")
    assert.is_true(found[#found] < found[1])
    local dtypes = {}
    for _, t in pairs(ms.load(folder .. "/bf16/model/model.safetensors")) do dtypes[t.dtype] = true end
    assert.are.same({ bfloat16 = true }, dtypes)
    for _, t in pairs(ms.load(folder .. "/bf16/adapter/adapter_model.safetensors")) do
      assert.are.equal("float32", t.dtype)
    end
    ok(tune(0, "after_bf16", { model = folder .. "/bf16/model", steps = 1 }))
    assert.is_near(found[#found], values("after_bf16", "val_loss")[1], 0.05)
  end)

  it("counts and names the lines of examples that teach nothing", function()
    local long = ('{"prompt": "%s", "completion": " twice"}'):format(("Number "):rep(60))
    local lines = { "", long, '{"prompt": "Number 1:", "completion": " twice is 2"}' }
    local function said()
      process.write(folder .. "/lost.jsonl", table.concat(lines, "\n"))
      local job = tune(0, "lost" .. #lines, { data = folder .. "/lost.jsonl", quiet = false, sample = 0 })
      ok(job)
      return job.stdout
    end
    local text = said()
    assert.matches("1 example is longer than %-%-length 48, and loses its end\n", text)
    assert.matches("1 example teaches nothing: [^\n]* in %-%-length 48 %(line 2 of %-%-data%)\n", text)
    for k = 4, 9 do lines[k] = long end
    assert.matches("7 examples teach nothing: [^\n]* %(lines 2, 4, 5, 6, 7, … of %-%-data%)\n", said())
  end)

  it("learns preferences, beginning at ln 2", function()
    ok(tune(2, "dpo", { dpo = true, data = folder .. "/dpo.jsonl" }))
    local found, right = values("dpo", "val_loss"), values("dpo", "val_accuracy")
    assert.is_near(math.log(2), found[1], 1e-6)
    assert.is_near(math.log(2), values("dpo", "loss")[1], 1e-6)
    assert.is_true(found[#found] < 0.3)
    assert.are.equal(1, right[#right])
  end)

  for label, case in ms.sorted_pairs {
    ["no model"] = { { model = "/nowhere" }, "^finetune: %-%-model: there is no file or folder '/nowhere'" },
    ["a GGUF file"] = { function()
      process.write(folder .. "/a.gguf", "GGUF")
      return { model = folder .. "/a.gguf" }
    end, "^finetune: %-%-model: '[^\n]*/a.gguf' is a file, expected a model's folder; ms.hf.save%(ms.hf.load '" },
    ["an unknown format of chats"] = { { chat = "alpaca" }, "^finetune: %-%-chat: 'alpaca' is unknown, expected chatml, gemma, " },
    ["no data"] = { { data = "/nowhere.jsonl" }, "^finetune: %-%-data: [^\n]*/nowhere.jsonl" },
    ["texts for preferences"] = { { dpo = true }, "^finetune: %-%-data has no pairs of 'chosen' and 'rejected'" },
    ["rows without a learned token"] = { { length = 2 }, "^finetune: %-%-data: pack: nothing is learned of 38 examples: rows of 2 tokens" },
    ["a model with fewer tokens than its tokenizer"] = { function() return { model = folder .. "/few" } end,
      "^finetune: %-%-data: line 1 has token %d+ %('[^']*'%) of the tokenizer, but the model of %-%-model has only 20 tokens" },
    ["an option without effect"] = { { beta = 0.2 }, "%-%-beta has no effect without %-%-dpo" },
    ["a batch smaller than its parts"] = { { accumulate = 3 }, "%-%-batch is 2, expected at least 1 %(ranks%) %* 3" },
    ["messages without a format"] = { function() return { data = folder .. "/chat.jsonl" } end, "have no chat template; pass %-%-chat with one of 'chatml', 'gemma'" },
  } do
    it("refuses " .. label .. " in one line, with status 2", function()
      local options = type(case[1]) == "function" and case[1]() or case[1]
      local job = tune(0, "wrong", options)
      assert.are.equal(2, job.code, job.stderr)
      assert.matches(case[2], job.stderr)
      assert.matches("^[^\n]*\n$", job.stderr)
    end)
  end
end)
