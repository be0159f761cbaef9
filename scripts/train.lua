#!/usr/bin/env luajit
-- SPDX-License-Identifier: MIT
--- Trains a byte-level GPT with parameters, gradients and optimizer state sharded over the ranks:
---   luajit scripts/train.lua                  one process
---   mpirun -n 2 luajit scripts/train.lua      two ranks; scripts/train does this after setting up
--- With the same seed and number of ranks, losses are bitwise equal. Runs with other numbers of ranks use the same
--- sequences and initial weights.
local here = arg[0]:match "^(.*)/[^/]*$" or "."
package.path = ("%s/../lua/?.lua;%s/../lua/?/init.lua;%s"):format(here, here, package.path)

local cli = require "moonshard.run.cli"
local lfs = require "lfs"

-- ---- options ---------------------------------------------------------------------------------------

local OPTIONS = {
  -- name, kind, default, description
  { "steps", "count", 1500, "optimizer steps" },
  { "batch", "count", 8, "sequences per step, over all ranks" },
  { "accumulate", "count", 1, "micro-batches per step and rank" },
  { "context", "count", 128, "tokens per sequence, and the model's context" },
  { "layers", "count", 4, "blocks" },
  { "heads", "count", 4, "attention heads" },
  { "dim", "count", 128, "size of the residual stream" },
  { "position", cli.one_of("alibi", "learned"), "alibi",
  "position encoding: by distance, or a learned table" },
  { "dropout", "share", 0, "dropout probability in training" },
  { "lr", "positive", 3e-3, "highest learning rate" },
  { "warmup", "whole", 50, "steps of linear warm-up, followed by cosine decay" },
  { "min-lr", "share", 0.1, "final learning rate, as a fraction of --lr" },
  { "weight-decay", "share", 0.1, "weight decay of AdamW, on matrices" },
  { "beta2", "share", 0.99, "AdamW's second decay rate" },
  { "clip", "positive", 1, "maximum gradient norm" },
  { "seed", "whole", 1, "seed of the weights, the order of the text, and samples" },
  { "dtype", cli.one_of("float32", "bfloat16"), "float32", "dtype of computation; weights and optimizer stay float32" },
  { "device", "text", "cpu", "device to compute on" },
  { "data", "list", "/usr/share/common-licenses", "text files, folders of them, llm.c's .bin shards" },
  { "out", "path", nil, "folder of the run (default: a new one in runs/; with --resume that of the checkpoint)" },
  { "save", "path", nil, "a number K: a checkpoint every K steps; a path: where the last checkpoint is written" },
  { "keep", "count", nil, "of the run's checkpoints, only so many stay, the latest ones (default: all)" },
  { "resume", "path", nil, "continue from a checkpoint, or from the latest one in a run's folder" },
  { "from", "path", nil,
  "fine-tune the weights of a checkpoint, or of the latest one in a run's folder, in a new run on other --data" },
  { "lora", "count", nil, "with --from: train low-rank adapters of this rank, and leave the weights as they are" },
  { "nan", cli.one_of("stop", "continue"), "stop",
  "after three losses in a row that are not finite: end with status 1, or continue" },
  { "stop", "count", nil, "end after this step, as if interrupted, with a checkpoint" },
  { "eval-every", "whole", nil, "steps between validations (default: a quarter of --steps); 0: only at the end" },
  { "sample", "whole", 500, "tokens the model writes at the end, a fifth of them at each validation" },
  { "temperature", "positive", 0.8, "temperature of the samples" },
  { "csv", "flag", false, "write metrics.csv, too" },
  { "tensorboard", "flag", false, "write TensorBoard's event files, too" },
  { "quiet", "flag", false, "print only errors" },
}
-- Options, and facts about the data, that a checkpoint stores. A resumed run uses these options unless they are given
-- again; the options in SHAPE cannot change.
local KEPT = { "steps", "batch", "accumulate", "context", "layers", "heads", "dim", "position", "dropout", "lr",
  "warmup", "min-lr", "weight-decay",
  "beta2", "clip", "seed", "dtype", "lora", "data", "vocab", "train-tokens", "data-fingerprint" }
local SHAPE = { "context", "layers", "heads", "dim", "position" }

local given = cli.parse("train", "Trains a byte-level GPT, sharded over the ranks.", OPTIONS, arg)

local ms = require "moonshard"
local nn, dist, fsdp, optim, data = ms.nn, ms.dist, ms.fsdp, ms.optim, ms.data
local GPT = require "moonshard.models.gpt"
local checkpoints = require "moonshard.run.checkpoint"
local count_model = require "moonshard.run.count_model"
local progress = require "moonshard.run.progress"
local run_folder = require "moonshard.run.folder"
local state = require "moonshard.io.files"
local text = require "moonshard.run.text"

-- SIGUSR1: save a checkpoint and continue; SIGUSR2, SIGTERM: save a checkpoint and exit with status 75, or with 1 if
-- the weights are not finite
fsdp.catch_checkpoint_signals()

local started = ms.time()
progress.new { silent = given.quiet or cli.launched() ~= 0 }           -- shows progress until run.start takes over
local stop = function(...) cli.stop("train", ...) end

local function open_checkpoint(option)
  if not given[option] then return nil end
  local file, err = run_folder.find_checkpoint(given[option])
  if not file then stop("--%s: %s", option, err) end
  local ok, opened = pcall(checkpoints.open, file)
  if not ok then stop("--%s: %s", option, opened) end
  return opened
end

-- A resumed run takes the options of its checkpoint, a fine-tuning run only the model's shape.
local function resolve(resumed, tuned)
  local config = {}
  for _, o in ipairs(OPTIONS) do
    local name = o[1]
    config[name] = given[name]
    if config[name] == nil and resumed then config[name] = resumed.config[name] end
    if config[name] == nil then config[name] = o[3] end
  end
  local source = resumed or tuned
  for _, name in ipairs(source and SHAPE or {}) do
    if given[name] == nil then config[name] = source.config[name] end
    if config[name] ~= source.config[name] then
      stop("--%s %s, but '%s' was trained with %s: the shape of a trained model cannot change", name, config[name],
        source.path, source.config[name])
    end
  end
  if type(config.data) == "string" then config.data = { config.data } end
  config["eval-every"] = given["eval-every"] or math.max(1, math.floor(config.steps / 4))
  if config.dim % config.heads ~= 0 then stop("--dim %d is not a multiple of --heads %d", config.dim, config.heads) end
  if resumed and resumed.step >= config.steps then
    stop("'%s' was saved after step %d of %d: nothing is left to do (--from trains its weights in a new run)",
      resumed.path, resumed.step, config.steps)
  end
  return config
end

if given.resume and given.from then stop "--resume continues a run and --from begins a new one: give only one of them" end
local resumed, tuned = open_checkpoint "resume", open_checkpoint "from"
if given.lora and not tuned and not (resumed and resumed.config.lora == given.lora) then
  stop("--lora %d needs the weights of a trained model: --from RUN", given.lora)
end
local config = resolve(resumed, tuned)
local device_ok, device_error = pcall(ms.set_default_device, config.device)
if not device_ok then stop("--device: %s", device_error) end
if ms.default_device() == "meta" then stop "--device: tensors on meta have no values to train with" end
local save_every, save_path = tonumber(config.save), config.save
if save_every then
  save_path = nil
  if save_every < 1 or save_every % 1 ~= 0 then
    stop("--save %s: expected a whole number of steps from 1, or a path", config.save)
  end
elseif save_path and lfs.attributes(save_path, "mode") == "directory" then
  stop("--save %s is a folder, expected a file", save_path)
elseif save_path and lfs.attributes(save_path:match "^(.*/)[^/]*$" or ".", "mode") ~= "directory" then
  stop("--save %s: its folder does not exist", save_path)
elseif save_path and cli.launched() == 0 then           -- fail now, not at the end of the training
  local writable, err = pcall(function() state.saver(save_path, {}):abort() end)
  if not writable then stop("--save: the checkpoint cannot be written: %s", (tostring(err):gsub("^.-save: ", ""))) end
end

-- ---- the job: ranks, text, run folder --------------------------------------------------------------

dist.init()
local rank, world = dist.rank(), dist.world_size()
if config.batch < world * config.accumulate then
  stop("--batch is %d, expected at least %d (ranks) * %d (--accumulate)", config.batch, world, config.accumulate)
end
local found, corpus = pcall(data.corpus, config.data)
if not found then stop("--data: %s", (tostring(corpus):gsub("^corpus: ", ""))) end
if corpus.train_count <= config.context then
  stop("--data: %d training tokens are too few for a context of %d, expected at least %d", corpus.train_count,
    config.context, config.context + 1)
end
if config.batch > corpus.train_count then
  stop("--batch %d is more than the %d training tokens", config.batch, corpus.train_count)
end
config.vocab, config["train-tokens"], config["data-fingerprint"] = corpus.vocab, corpus.train_count,
  corpus:fingerprint()
if tuned and tuned.config.vocab ~= corpus.vocab then
  stop("--data has a vocabulary of %d, but '%s' was trained with %d", corpus.vocab, tuned.path, tuned.config.vocab)
end
if resumed then                         -- a resumed run must continue on the same data
  local had = resumed.config
  local other = had.vocab ~= corpus.vocab or had["train-tokens"] ~= corpus.train_count
    or had["data-fingerprint"] and had["data-fingerprint"] ~= config["data-fingerprint"]
  local function described(list, tokens)
    return ("'%s' (%d training tokens)"):format(table.concat(type(list) == "table" and list or { tostring(list) },
      "', '"), tokens)
  end
  if other then
    stop("--resume: '%s' was trained on %s, but --data is %s%s; use --from to train its weights on other data",
      resumed.path,
      described(had.data, had["train-tokens"]), described(config.data, corpus.train_count), given.data and ""
        or ", which has changed since")
  end
end
local batches = data.batches(corpus, { context = config.context, batch = config.batch, seed = config.seed, rank = rank,
  world = world })

-- ---- model, sharding, optimizer --------------------------------------------------------------------

ms.manual_seed(config.seed)
local model = GPT {
  vocab = config.vocab, context = config.context, layers = config.layers, heads = config.heads, dim = config.dim,
  position = config.position, dropout = config.dropout, tie = false,
  recompute = config.device ~= "cpu",   -- on a GPU memory is scarcer than time
}
if tuned then                           -- adapters that were trained with the weights become part of them
  local adapters = tuned.config.lora and model:adapters(tuned.config.lora)
  tuned:load_model(model)
  tuned:close()
  if adapters then
    adapters:merge():remove()
    model:requires_grad_(true)
  end
end
local adapters = config.lora and model:adapters(config.lora)
local numbers = 0
for _, p in ipairs(model:parameters()) do numbers = numbers + p:numel() end

-- Each block is a unit: gathered before its forward and backward, resharded after them.
local precision = config.dtype ~= "float32" and fsdp.MixedPrecisionPolicy { param_dtype = config.dtype,
  reduce_dtype = "float32" } or nil
for _, block in ipairs(model.blocks) do fsdp.fully_shard(block, { mp_policy = precision }) end
fsdp.fully_shard(model, { mp_policy = precision })

local parameters, matrices, vectors = model:parameters(), {}, {}
for _, p in ipairs(adapters and adapters:parameters() or parameters) do
  local list = p.ndim >= 2 and matrices or vectors
  list[#list + 1] = p
end
local optimizer = optim.AdamW({ { params = matrices }, { params = vectors, weight_decay = 0 } },
  { lr = config.lr, betas = { 0.9, config.beta2 }, weight_decay = config["weight-decay"] })

local first = 0
if resumed then
  resumed:load_model(model)
  resumed:load_training(model, optimizer)
  resumed:close()
  first = resumed.step
end
local schedule = optim.lr_scheduler.cosine(optimizer, { steps = math.max(config.steps, config.warmup),
  warmup = config.warmup, min_factor = config["min-lr"] })
schedule:load_state_dict { step = first, base_lrs = { config.lr, config.lr } }

-- ---- the run and its output ---------------------------------------------------------------------------

local config_out = { parameters = numbers, ["validation-tokens"] = corpus.validation_count }
for name, value in pairs(config) do config_out[name] = value end      -- any order: keys are sorted when written
-- A resumed run continues in its own folder, unless --out is another one.
local out, continues = config.out, false
if resumed then
  local own = resumed.path:match "^(.*)/[^/]*$" or "."
  local at = run_folder.exists(own) and lfs.attributes(own)
  local there = at and lfs.attributes(out or own)
  continues = there ~= nil and there ~= false and at.dev == there.dev and at.ino == there.ino
  if continues then out = own end
end
local sinks = {}
for _, name in ipairs { "csv", "tensorboard" } do
  if config[name] then sinks[#sinks + 1] = name end
end
-- Floating-point operations per token, forward and backward: 6 for each parameter, and those of attention's products.
local flops = 6 * numbers + 12 * config.layers * config.dim * config.context
local last, trained_from = math.min(config.stop or config.steps, config.steps), nil
local opened, run = pcall(ms.run.start, {
  name = ("dim%d-layers%d-seed%d"):format(config.dim, config.layers, config.seed), config = config_out,
  total = config.steps, out = out, resume = continues, first = first, model = model, optimizer = optimizer,
  tokens = config.batch * config.context, flops = flops, dtype = config.dtype, sinks = sinks, quiet = config.quiet,
  line = function(m)
    return ("loss %.4f  lr %.2e  norm %.2f  %.1f K tokens/s  %.0f s left"):format(m.loss, m.lr, m.grad_norm,
      m.tokens_per_second / 1e3, (ms.time() - trained_from) / (m.step - first) * (last - m.step))
  end,
})
if not opened then stop("%s", (tostring(run):gsub("^.-run%.start: ", ""):gsub("'out'", "--out"))) end
local function say(...) run:say(...) end
local unit = corpus.kind == "text" and "byte" or "token"

local function s(n) return n == 1 and "" or "s" end
say("GPT of %.2f M parameters: %d layer%s of %d, %d head%s, context %d; %d rank%s, %s", numbers / 1e6, config.layers,
  s(config.layers), config.dim,
  config.heads, s(config.heads), config.context, world, s(world), config.dtype)
say("text: %d file%s, %d %ss to train on, %d to validate; a step has %d sequence%s of %d", #corpus.documents,
  s(#corpus.documents), corpus.train_count, unit, corpus.validation_count, config.batch, s(config.batch),
    config.context)
if adapters then say("adapters of rank %d: %d of %d parameters are trained", config.lora, adapters:count()) end
if run.note then say("%s: the run's folder is in your home folder", run.note) end
say("run: %s%s", run.path, resumed and (", from step %d of %s"):format(first, resumed.path)
  or tuned and (", with the weights of %s"):format(tuned.path) or "")

-- ---- parts of a step -----------------------------------------------------------------------------------

local function sum_over_ranks(x)
  if world == 1 then return x end
  local t = ms.tensor({ x }, { dtype = "float64" })
  dist.all_reduce(t)
  return t:item()
end

--- One optimizer step; the loss is the mean over all sequences, summed in float64.
local function train(step)
  local sum = 0
  for part = 1, config.accumulate do
    -- Each rank sums its own gradients, unreduced; only the last micro-batch reduces them over the ranks.
    if config.accumulate > 1 then model:set_requires_gradient_sync(part == config.accumulate) end
    local ids, targets, sequences = batches:train(step, part, config.accumulate)
    local loss = model(ids, targets)
    -- A micro-batch is weighted by its share of the step's sequences, so that uneven shares are exact. The factor world
    -- cancels the mean that the reduction of gradients takes over ranks.
    local weight = sequences / config.batch
    local scaled = weight * world == 1 and loss or loss * (weight * world)
    scaled:backward()
    sum = sum + loss:item() * weight
  end
  local norm = optimizer:step_clipped(config.clip):item()
  optimizer:zero_grad()
  local lr = schedule.last_lr[1]
  schedule:step()
  return sum_over_ranks(sum), norm, lr
end

--- Loss in nats per token over the whole validation split.
local function validate()
  model:eval()
  local sum, next_batch = 0, batches:validation()
  ms.no_grad(function()
    repeat
      local more = ms.scope(function()
        local ids, targets = next_batch()
        if not ids then return false end
        local logits = model(ids):float():reshape(-1, config.vocab)
        sum = sum + nn.F.cross_entropy(logits, targets:reshape(-1), { reduction = "sum" }):item()
        return true
      end)
    until not more
  end)
  model:train()
  return sum_over_ranks(sum) / corpus.validation_count
end

local prompt = corpus.kind == "text" and "\n" or "\0"
local function write_sample(n)
  local _, new = model:generate({ text.bytes(prompt) }, { max_new_tokens = n, temperature = config.temperature,
    top_k = 0, seed = config.seed })
  local sample = text.show(new[1], corpus.kind)
  run:text("samples", sample)
  return sample
end

local kept = {}
for _, name in ipairs(KEPT) do kept[name] = config[name] end
local function save(path) return run:checkpoint { path = path, config = kept, keep = config.keep } end

-- ---- training --------------------------------------------------------------------------------------------

local metrics = {}                      -- metrics of the current step; the table is reused
local step_now = first
local value
local NAN_STEPS = 3
local nan_steps, nan_announced = 0, false               -- nan_steps: consecutive losses that were not finite

local function is_finite(x) return x - x == 0 end

-- Does not save weights that are not finite: such a checkpoint would be the latest of the run, from which it resumes.
local function save_if_finite(step)
  if checkpoints.finite(model) then return save() end
  say("step %d: no checkpoint: the weights are not finite", step)
end

-- Called on all ranks: ends the script with a status, and saves nothing. Rank 0 prints the reason, if one is given.
local function end_unfinished(status, format, ...)
  run:finish()
  if format and rank == 0 then io.stderr:write("train: ", format:format(...), "\n") end
  dist.finalize()
  os.exit(status, true)
end

local function after_first_step() return trained_from and ms.time() - trained_from or 0 end

-- Whether a step is profiled, for the report: the fifth step of this process, and each step that a validation follows.
local function profiled(step)
  return step == first + 5 or config["eval-every"] > 0 and step % config["eval-every"] == 0
end

cli.run("train", function()
  for step in ms.steps(last, { from = first + 1 }) do
    step_now = step
    trained_from = trained_from or ms.time()
    local loss, norm, lr
    if profiled(step) then loss, norm, lr = run:profile(train, step) else loss, norm, lr = train(step) end
    nan_steps = is_finite(loss) and 0 or nan_steps + 1
    if nan_steps == 1 and not nan_announced then
      nan_announced = true
      say("step %d: the loss is not finite (%g); a smaller --lr or --clip may help", step, loss)
    end
    metrics.step, metrics.loss, metrics.lr, metrics.grad_norm = step, loss, lr, norm
    run:log(metrics)
    if nan_steps == NAN_STEPS and config.nan == "stop" then
      end_unfinished(1, "the loss was not finite in steps %d to %d: ended without a checkpoint; the metrics are in %s (--nan continue would continue)",
        step - NAN_STEPS + 1, step, run.path)
    end
    local final = step == last
    if corpus.validation_count > 0 and (final or config["eval-every"] > 0 and step % config["eval-every"] == 0) then
      value = validate()
      run:log { step = step, val_loss = value }
      if not final then
        say("step %d: validation %.4f nats/%s after %.1f s", step, value, unit, after_first_step())
        local n = math.floor(config.sample / 5)
        if n > 0 and is_finite(value) then
          say("  writes: %s", (text.printable(write_sample(n)):gsub("%s+", " ")))
        end
      end
    end
    local wanted = fsdp.checkpoint_wanted()
    if wanted and not final then
      local where = save_if_finite(step)
      if where then say("step %d: checkpoint: %s", step, where) end
      -- 75: "try again later" in sysexits.h; --resume continues from here
      if wanted == "stop" then end_unfinished(where and 75 or 1) end
    elseif save_every and step % save_every == 0 and not final then
      save_if_finite(step)
    end
  end
  run.bar:finish()

  local trained = after_first_step()
  local texts = rank == 0 and corpus.kind == "text" and corpus.train_count < 2 ^ 25 and corpus:texts() or nil
  if value then
    local counted = texts and count_model.loss(texts, 5)
    say("validation %.4f nats/%s%s; %.1f s since the first step", value, unit,
      counted and (" (an order-5 byte n-gram model of the same split: %.4f)"):format(counted) or "", trained)
  end
  if not checkpoints.finite(model) then
    end_unfinished(config.nan == "stop" and 1 or 0,
      "the weights are not finite after step %d: no checkpoint and no samples; the metrics are in %s",
      last, run.path)
  end
  local where = save(save_path)
  if config.sample > 0 then
    local sample = write_sample(config.sample)
    say("%d %ss at temperature %g:\n%s", config.sample, unit, config.temperature,
      corpus.kind == "text" and text.printable(sample) or sample)
    if texts then
      local known, total = text.known_words(sample, text.words_of(texts))
      say("words of the sample that occur in the corpus: %d of %d (%.1f %%)", known, total,
        total > 0 and 100 * known / total or 0)
    end
  end
  say("checkpoint: %s; %.1f s in total", where, ms.time() - started)
  run:finish()
end, function() return ("in step %d of %d; the run's metrics are in %s"):format(step_now, config.steps, run.path) end)
