#!/usr/bin/env luajit
-- SPDX-License-Identifier: MIT
--- Fine-tunes a model of a Hugging Face folder, sharded over the ranks:
---   scripts/finetune --model FOLDER --data FILE       builds, and starts two ranks
---   mpirun -n 2 luajit scripts/finetune.lua --model FOLDER --data FILE
--- The loss counts completions and answers only; with the same seed every number of ranks takes the same steps.
local here = arg[0]:match "^(.*)/[^/]*$" or "."
package.path = ("%s/../lua/?.lua;%s/../lua/?/init.lua;%s"):format(here, here, package.path)

local cli = require "moonshard.run.cli"

-- ---- options ---------------------------------------------------------------------------------------

local OPTIONS = {
  -- name, kind, default, description
  { "model", "existing", nil, "folder of the model (config.json, weights, tokenizer), or a run of this script" },
  { "data", "existing", nil,
  "JSON lines of prompt and completion, messages, or text (.jsonl); of prompt, chosen and rejected for --dpo; or plain text" },
  { "validation", "existing", nil, "a file like --data to validate on (default: every twentieth of 20 examples or more)" },
  { "chat", "chat", nil, "the format of messages: " .. cli.formats() .. " (default: what the tokenizer's files say)" },
  { "epochs", "count", 1, "times that each example is seen, rounded up to whole steps" },
  { "steps", "count", nil, "optimizer steps, in place of --epochs" },
  { "length", "count", 512, "tokens of a row, into which several examples are packed" },
  { "batch", "count", 8, "rows per step, over all ranks; pairs with --dpo" },
  { "accumulate", "count", 1, "micro-batches per step and rank" },
  { "lora", "count", nil, "train adapters of this rank, at every matrix product of the model's layers, and leave the weights as they are" },
  { "lora-alpha", "positive", nil, "factor of the adapters, over their rank (default: twice the rank)" },
  { "lora-dropout", "share", 0, "dropout before the adapters" },
  { "int8", "flag", false, "with --lora: keep the layers' weights in int8; only the adapters are written at the end" },
  { "bf16", "flag", false, "with --lora: keep the weights, and compute, in bfloat16; the adapters stay float32" },
  { "dpo", "flag", false, "learn preferences (Rafailov et al. 2023) against the model as it is at the start" },
  { "beta", "positive", 0.1, "with --dpo: how strongly the model is held to the one at the start" },
  { "lr", "positive", nil, "highest learning rate (default, for large models: 2e-5; 2e-4 with --lora; 1e-6 and 1e-5 with --dpo)" },
  { "warmup", "share", 0.03, "share of the steps with linear warm-up, followed by cosine decay to a tenth" },
  { "weight-decay", "share", 0, "weight decay of AdamW, on matrices" },
  { "clip", "positive", 1, "maximum gradient norm" },
  { "seed", "whole", 1, "seed of the order of the examples, dropout and adapters" },
  { "dtype", cli.one_of("float32", "bfloat16"), "float32", "dtype of computation; weights and optimizer stay float32" },
  { "device", "text", "cpu", "device to compute on" },
  { "recompute", "flag", false, "compute each block again in backward, to save memory" },
  { "eval-every", "whole", nil, "steps between validations (default: four in all); 0: only at the end" },
  { "sample", "whole", 40, "tokens of an answer to a held-out example, written at each validation; 0: none" },
  { "save", "count", nil, "a checkpoint every so many steps (default: only when a signal asks for one)" },
  { "keep", "count", nil, "of the run's checkpoints, only so many stay, the latest ones (default: all)" },
  { "resume", "path", nil, "continue a run from its latest checkpoint; the options are those of the run" },
  { "out", "path", nil, "folder of the run (default: a new one in runs/); the model is written to OUT/model" },
  { "quiet", "flag", false, "print only errors" },
}

local given = cli.parse("finetune", "Fine-tunes a model of a Hugging Face folder, sharded over the ranks.", OPTIONS, arg)
local stop = function(...) cli.stop("finetune", ...) end

local ms = require "moonshard"
local nn, dist, fsdp, optim = ms.nn, ms.dist, ms.fsdp, ms.optim
local chats = require "moonshard.text.chat"
local checkpoints = require "moonshard.run.checkpoint"
local cjson = require "cjson"
local counted = require("moonshard.core.errors").count
local lfs = require "lfs"
local preferences = require "moonshard.hf.preferences"
local progress = require "moonshard.run.progress"
local run_folder = require "moonshard.run.folder"
local texts = require "moonshard.run.text"

-- SIGUSR1: save a checkpoint and continue; SIGUSR2, SIGTERM: save a checkpoint and exit with status 75
fsdp.catch_checkpoint_signals()
progress.new { silent = given.quiet or cli.launched() ~= 0 }

local started, resumed = ms.time(), nil
if given.resume then
  local file, err = run_folder.find_checkpoint(given.resume)
  if not file and lfs.attributes(given.resume .. "/model/config.json", "mode") then
    stop("--resume: the run has ended, and its model is '%s/model'; --model '%s' trains that further", given.resume,
      given.resume)
  end
  if not file then stop("--resume: %s; --save N writes one every N steps, and SIGUSR1 and SIGTERM ask for one", err) end
  local ok, opened = pcall(checkpoints.open, file)
  if not ok then stop("--resume: %s", opened) end
  resumed = opened
  if not resumed.config.model then stop("--resume: '%s' is no run of scripts/finetune", given.resume) end
end
local config = {}
for _, o in ipairs(OPTIONS) do
  local name = o[1]
  config[name] = resumed and resumed.config[name]
  if given[name] ~= nil then
    if resumed and name ~= "resume" and name ~= "quiet" and config[name] ~= given[name] then
      stop("--%s cannot change in a resumed run", name)
    end
    config[name] = given[name]
  end
  if config[name] == nil then config[name] = o[3] end
end
for option, needed in pairs { ["lora-alpha"] = "lora", ["lora-dropout"] = "lora", int8 = "lora", bf16 = "lora",
  beta = "dpo" } do
  if given[option] and not config[needed] then stop("--%s has no effect without --%s", option, needed) end
end
if config.int8 and config.bf16 then stop "--int8 and --bf16 are both given, expected one of them" end
if config.bf16 then config.dtype = "bfloat16" end
for _, name in ipairs { "model", "data" } do
  if not config[name] then stop("--%s is missing, expected %s", name, name == "model" and "a model's folder" or "a file") end
end
if lfs.attributes(config.model, "mode") == "file" then
  stop("--model: '%s' is a file, expected a model's folder%s", config.model, config.model:find "%.gguf$"
    and (("; ms.hf.save(ms.hf.load '%s', 'folder/') makes one of it"):format(config.model)) or "")
elseif lfs.attributes(config.model .. "/adapter_config.json", "mode")
  and not lfs.attributes(config.model .. "/config.json", "mode") then
  stop("--model: '%s' has only adapters; ms.hf.save(ms.hf.load(FOLDER, { adapter = '%s' }), 'merged/') adds them to the model that they are for, in FOLDER, and '--model merged' trains both",
    config.model, config.model)
end
local device_ok, device_error = pcall(ms.set_default_device, config.device)
if not device_ok then stop("--device: %s", device_error) end

dist.init()
local rank, world = dist.rank(), dist.world_size()
if config.batch < world * config.accumulate then
  stop("--batch is %d, expected at least %d (ranks) * %d (--accumulate)", config.batch, world, config.accumulate)
end

-- Calls fn; its error ends the script with one line, which names the option.
local function try(option, fn, ...)
  local ok, result = pcall(fn, ...)
  if not ok then stop("--%s: %s", option, cli.advice(result)) end
  return result
end

-- ---- examples --------------------------------------------------------------------------------------

local tokenizer = try("model", ms.text.tokenizer, config.model)
local examples, held = try("data", ms.text.examples, config.data, tokenizer, { chat = config.chat }), nil
if config.validation then
  held = try("validation", ms.text.examples, config.validation, tokenizer, { chat = config.chat })
elseif #examples >= 20 then
  local kept = {}
  held = {}
  for k, example in ipairs(examples) do table.insert(k % 20 == 0 and held or kept, example) end
  examples = kept
end
for _, option in ipairs { "data", "validation" } do
  local list = option == "data" and examples or held
  if list and (list[1].chosen ~= nil) ~= config.dpo then
    stop("--%s has %s", option, config.dpo and "no pairs of 'chosen' and 'rejected', which --dpo needs"
      or "pairs of 'chosen' and 'rejected': give --dpo")
  end
end
local packing = { length = config.length, batch = config.batch, seed = config.seed, rank = rank, world = world }
local make = config.dpo and preferences.new or ms.text.pack
local rows = try("data", make, examples, packing)
local validation = held and try("validation", make, held, packing)
local steps = config.steps or math.ceil(config.epochs * rows.count / config.batch)
if resumed then
  local had = resumed.config["data-tokens"]
  if had ~= rows.tokens then
    stop("--resume: '%s' was trained on %d tokens, but --data '%s' has %d: it has changed since", given.resume, had,
      config.data, rows.tokens)
  end
  if resumed.step > steps then stop("--resume: '%s' has taken more than %d steps", given.resume, steps) end
  local result = given.resume .. (config.int8 and "/adapter" or "/model")
  if resumed.step < steps and lfs.attributes(result, "mode") == "directory" then
    stop("--resume: the run has ended, and its result is '%s'; --resume '%s' goes back to step %d", result, resumed.path,
      resumed.step)
  end
end
-- Whether there is a validation after a step; without --eval-every, four at equal distances.
local function validates(step)
  local every = config["eval-every"]
  if step == steps then return true end
  if every then return every > 0 and step % every == 0 end
  return math.floor(4 * step / steps) > math.floor(4 * (step - 1) / steps)
end

-- ---- model, sharding, optimizer --------------------------------------------------------------------

ms.manual_seed(config.seed)
-- No rank ever holds the whole model: each reads its own shards. Weights become int8 before they are sharded, though.
local model = try("model", ms.hf.load, config.model,
  { dtype = config.bf16 and "bfloat16" or "float32", device = config.int8 and config.device or "meta" })
if not model.stream then stop("--model: %s is no causal language model", model.family.architecture) end
if model.context and config.length > model.context then
  stop("--length is %d, but the model of --model has only %d positions", config.length, model.context)
end
-- Every token must have a row of the model's table.
local function check_ids(option, list)
  local vocabulary = model.config.vocab_size
  for k, example in ipairs(list or {}) do
    for _, e in ipairs(config.dpo and { example.chosen, example.rejected } or { example }) do
      for _, id in ipairs(e.ids) do
        if id >= vocabulary then
          stop("--%s: %s %d has token %d ('%s') of the tokenizer, but the model of --model has only %d tokens",
            option, example.line and "line" or "example", example.line or k, id, tokenizer:token(id), vocabulary)
        end
      end
    end
  end
end
check_ids("data", examples)
check_ids("validation", held)
local function is_in_layer(name, m) return name:find "layers%." and (m:isa(nn.Linear) or m:isa(nn.Int8Linear)) end
if config.int8 then nn.Int8Linear.convert_linear(model, { target = is_in_layer }) end
local adapters = config.lora and try("lora", nn.lora, model, { rank = config.lora, dropout = config["lora-dropout"],
  alpha = config["lora-alpha"] or 2 * config.lora, target = is_in_layer, dtype = config.bf16 and "float32" or nil })
model:train()
local numbers = 0
for _, p in ipairs(model:parameters()) do numbers = numbers + p:numel() end
local precision = config.dtype ~= "float32" and fsdp.MixedPrecisionPolicy { param_dtype = config.dtype,
  reduce_dtype = "float32" } or nil
for _, layer in ipairs(model.model.layers) do fsdp.fully_shard(layer, { mp_policy = precision }) end
fsdp.fully_shard(model, { mp_policy = precision })
if not config.int8 then try("model", ms.hf.load_weights, model) end
model.model.recompute = config.recompute

local matrices, vectors = {}, {}
for _, p in ipairs(adapters and adapters:parameters() or model:parameters()) do
  table.insert(p.ndim >= 2 and matrices or vectors, p)
end
local lr = config.lr or (config.dpo and 1e-6 or 2e-5) * (config.lora and 10 or 1)
local groups = { { params = matrices } }
if #vectors > 0 then groups[2] = { params = vectors, weight_decay = 0 } end
local optimizer = optim.AdamW(groups, { lr = lr, weight_decay = config["weight-decay"] })
-- The reference of --dpo is the model before the first step, also in a resumed run.
if config.dpo then
  rows:remember(model)
  if validation then validation:remember(model) end
end
local first = 0
if resumed then
  resumed:load_model(model)
  resumed:load_training(model, optimizer)
  resumed:close()
  first = resumed.step
end
local schedule = optim.lr_scheduler.cosine(optimizer, { steps = steps, warmup = math.floor(config.warmup * steps),
  min_factor = 0.1 })
local base = {}
for k = 1, #groups do base[k] = lr end
schedule:load_state_dict { step = first, base_lrs = base }

-- ---- the run and its output ------------------------------------------------------------------------

local trained_from
local run = try("out", ms.run.start, {
  name = "finetune", config = config, total = steps, out = resumed and (resumed.path:match "^(.*)/[^/]*$" or ".")
    or config.out, resume = resumed ~= nil, first = first, model = model, optimizer = optimizer, tokens = config.batch
    * config.length, dtype = config.dtype, quiet = config.quiet,
  line = function(m)
    return ("loss %.4f  lr %.2e  norm %.2f  %.1f K tokens/s  %.0f s left"):format(m.loss, m.lr, m.grad_norm,
      m.tokens_per_second / 1e3, (ms.time() - trained_from) / (m.step - first) * (steps - m.step))
  end,
})
local function say(...) run:say(...) end
say("%s of %.1f M parameters; %d rank%s, %s", model.family.architecture, numbers / 1e6, world, world == 1 and "" or "s",
  config.dtype)
if adapters then say("adapters of rank %d: %d of %d parameters are trained", config.lora, adapters:count()) end
say("%s: %s; %s to validate; %s of %d", counted(#examples, "example"), tostring(rows), held and #held
  or "none (fewer than 20, and no --validation)", counted(steps, "step"), config.batch)
if rows.cut > 0 then
  say("%s longer than --length %d, and lose%s end", rows.cut == 1 and "1 example is" or rows.cut .. " examples are",
    config.length, rows.cut == 1 and "s its" or " their")
end
if #rows.lost > 0 then
  local one, lines = #rows.lost == 1, {}
  for k = 1, math.min(5, #rows.lost) do lines[k] = examples[rows.lost[k]].line end
  say("%s nothing: no completion or message of the assistant in --length %d (line%s %s%s of --data)",
    one and "1 example teaches" or #rows.lost .. " examples teach", config.length, one and "" or "s",
    table.concat(lines, ", "), #rows.lost > #lines and ", …" or "")
end
if not tokenizer.eos_id then say "the tokenizer has no token that ends texts, so the model does not learn to end them" end
say("run: %s%s", run.path, resumed and (", from step %d"):format(first) or "")

-- ---- parts of a step -------------------------------------------------------------------------------

local function sum_over_ranks(...)
  local t = ms.tensor({ ... }, { dtype = "float64" })
  if world > 1 then dist.all_reduce(t) end
  return unpack(t:tolist())
end

-- The mean loss of a micro-batch, over its n learned tokens or pairs.
local function loss_of(ids, options)
  if config.dpo then return preferences.loss(model, ids, options, config.beta) end
  return model(ids, options)
end

local function train(step)
  local sum = 0
  for part = 1, config.accumulate do
    if config.accumulate > 1 then model:set_requires_gradient_sync(part == config.accumulate) end
    local ids, options, n, total = rows:step(step, part, config.accumulate)
    local loss = loss_of(ids, options)
    -- Every learned token of the step has the same weight. The factor world cancels the mean over ranks.
    local weighted = loss * (n / total * world)
    weighted:backward()
    sum = sum + (n > 0 and loss:item() * n / total or 0)
  end
  local norm = optimizer:step_clipped(config.clip):item()
  optimizer:zero_grad()
  local now = schedule.last_lr[1]
  schedule:step()
  return (sum_over_ranks(sum)), norm, now
end

local function validate(step)
  model:eval()
  local sum, count, right = 0, 0, 0
  ms.no_grad(function()
    for ids, options, n in validation:each() do
      ms.scope(function()
        local loss, better = loss_of(ids, options)
        if n > 0 then sum, right = sum + loss:item() * n, right + (better or 0) end
      end)
      count = count + n
    end
  end)
  model:train()
  sum, count, right = sum_over_ranks(sum, count, right)
  local mean = sum / count
  if config.dpo then
    run:log { step = step, val_loss = mean, val_accuracy = right / count }
    return ("validation %.4f, %.0f %% of %d pairs are ordered rightly"):format(mean, 100 * right / count, count)
  end
  run:log { step = step, val_loss = mean, perplexity = math.exp(mean) }
  return ("validation %.4f nats/token, perplexity %.2f"):format(mean, math.exp(mean))
end

local ends = { tokenizer.eos_id }                        -- tokens that end an answer
local known, chat = pcall(chats.format, tokenizer, config.chat, "finetune")
for _, text in ipairs(known and chat.stops or {}) do
  local id = tokenizer:id(text)
  if id ~= tokenizer.eos_id then ends[#ends + 1] = id end
end

-- What the model writes, most likely tokens only, after the beginning of the first held-out example: what is not
-- learned of it, or its first tokens.
local function sample()
  local example, prompt, learns = held[1].chosen or held[1], {}, 1
  while not example.learned[learns] do learns = learns + 1 end
  for k = 1, math.min(learns > 1 and learns - 1 or 8, #example.ids - 1) do prompt[k] = example.ids[k] end
  local _, new = model:generate({ prompt }, { max_new_tokens = config.sample, eos_token_id = ends })
  local text = ("%s [%s]"):format(tokenizer:decode(prompt), tokenizer:decode(new[1]))
  run:text("samples", text)
  say("  writes: %s", (texts.printable(text):gsub("%s+", " ")))
end

-- ---- training --------------------------------------------------------------------------------------

local kept, step_now = {}, first
for _, o in ipairs(OPTIONS) do
  if o[1] ~= "resume" and o[1] ~= "quiet" then kept[o[1]] = config[o[1]] end
end
kept["data-tokens"] = rows.tokens

-- Writes the text that a function makes of a file's own, nil for one that does not exist.
local function rewrite(path, make_text)
  local file = io.open(path)
  local old = file and file:read "*a"
  if file then file:close() end
  file = assert(io.open(path, "w"))
  file:write(make_text(old))
  file:close()
end

local function hand_on()
  if adapters then
    ms.hf.save_adapter(adapters, run.path .. "/adapter")
    say("adapters: %s/adapter", run.path)
    if config.int8 then return end
    adapters:merge()
  end
  ms.hf.save(model, run.path .. "/model")
end

-- The model's folder says in which chat format it was trained, and what ends its answers.
local function describe(folder)
  rewrite(folder .. "/chat_template.jinja", function() return chats.template(config.chat) end)
  rewrite(folder .. "/generation_config.json", function(old)
    local generation = old and cjson.decode(old) or {}
    generation.eos_token_id = ends
    return cjson.encode(generation) .. "\n"
  end)
end

cli.run("finetune", function()
  if validation and first == 0 then say("step 0: %s", validate(0)) end
  for step in ms.steps(steps, { from = first + 1 }) do
    step_now, trained_from = step, trained_from or ms.time()
    local loss, norm, now = train(step)
    run:log { step = step, loss = loss, lr = now, grad_norm = norm }
    if loss ~= loss or not checkpoints.finite(model) then
      run:finish()
      if rank == 0 then io.stderr:write(("finetune: the loss of step %d is not finite: ended without a model; a smaller --lr may help\n"):format(step)) end
      dist.finalize()
      os.exit(1, true)
    end
    if validation and validates(step) then
      say("step %d: %s", step, validate(step))
      if config.sample > 0 then sample() end
    end
    local wanted = fsdp.checkpoint_wanted()
    if step < steps and (wanted or config.save and step % config.save == 0) then
      say("step %d: checkpoint: %s", step, run:checkpoint { config = kept, keep = config.keep })
      if wanted == "stop" then
        say("saved by a signal; go on with --resume %s", run.path)
        run:finish()
        dist.finalize()
        os.exit(75, true)
      end
    end
  end
  run.bar:finish()
  local written, err = pcall(hand_on)
  if not written then                                   -- --resume then only writes the model
    if adapters and not config.int8 then adapters:unmerge() end
    say("checkpoint: %s", run:checkpoint { config = kept })
    error(err, 0)
  end
  if config.chat and rank == 0 and not config.int8 then describe(run.path .. "/model") end
  say("%s; %.1f s in total", config.int8 and "the model stays as it was" or ("model: %s/model"):format(run.path),
    ms.time() - started)
  run:finish()
end, function() return ("in step %d of %d; the run's metrics are in %s"):format(step_now, steps, run.path) end)
