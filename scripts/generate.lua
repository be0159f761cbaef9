#!/usr/bin/env luajit
-- SPDX-License-Identifier: MIT
--- Continues a text with a model's folder, or talks to it: luajit scripts/generate.lua --model FOLDER --prompt TEXT, or
--- --chat. --from RUN: with a model of scripts/train.
local here = arg[0]:match "^(.*)/[^/]*$" or "."
package.path = ("%s/../lua/?.lua;%s/../lua/?/init.lua;%s"):format(here, here, package.path)

local cli = require "moonshard.run.cli"

local given = cli.parse("generate", "Continues a text with a model's folder or a run of scripts/train, or talks to it.", {
  { "model", "existing", nil,
  "a folder with config.json, model.safetensors and the tokenizer's files; a run of scripts/finetune; or a GGUF file" },
  { "adapter", "existing", nil, "with --model: a folder of adapters, which are added to the weights" },
  { "from", "path", nil, "instead: a run of scripts/train, or a checkpoint of one" },
  { "chat", "format", nil, "with --model: a conversation; each line of the input is a message. The format is one of "
    .. cli.formats() .. " (default: what the tokenizer's files say)" },
  { "system", "text", nil, "with --chat: the message of the system" },
  { "prompt", "text", nil,
  "beginning of the text (default: a newline); for a model of token files, ids separated by spaces" },
  { "length", "count", 500, "tokens to generate" },
  { "temperature", "number", 0.8, "temperature of the sampling; 0: always the most likely token" },
  { "top-k", "whole", 0, "draws from so many likeliest tokens; 0: from all" },
  { "top-p", "share", 1, "draws from the likeliest tokens that have this probability together" },
  { "seed", "whole", 1, "seed of the sampling" },
  { "quiet", "flag", false, "print only the text, and errors" },
}, arg)
if (given.from == nil) == (given.model == nil) then
  cli.stop("generate", given.from and "--from and --model exclude each other"
    or "--model is missing, expected a model's folder; or --from, a run of scripts/train or a checkpoint")
end
for option, needed in pairs { chat = "model", adapter = "model", system = "chat" } do      -- any of the errors
  if given[option] and not given[needed] then cli.stop("generate", "--%s needs --%s", option, needed) end
end
if given.chat and given.prompt then
  cli.stop("generate", "--prompt has no effect with --chat, whose messages are the lines of the input")
end
if given.temperature and given.temperature < 0 then
  cli.stop("generate", "--temperature is %g, expected 0 or more", given.temperature)
end

-- The text goes to stdout, progress to stderr.
local progress = require "moonshard.run.progress"
progress.new { stderr = true, silent = given.quiet or cli.launched() ~= 0 }

local temperature = given.temperature or 0.8
local options = { max_new_tokens = given.length, temperature = temperature, seed = given.seed or 1 }
if temperature > 0 then options.top_k, options.top_p = given["top-k"] or 0, given["top-p"] end

-- Writes text as it arrives.
local function show(text)
  io.stdout:write(text)
  local ok, err = io.stdout:flush()
  if not ok then error("the text cannot be written: " .. err, 0) end
end

-- ---- models of folders -------------------------------------------------------------------------------------

local function converse(chat)
  local asks = not given.quiet and progress.is_terminal(0)
  while true do
    if asks then show "> " end
    local line = io.read()
    if not line then break end
    if line:find "%S" then
      for piece in chat:pieces(line) do show(piece) end
      show "\n"
    end
  end
end

-- The result of fn(…), or the end of the script with its error.
local function need(fn, ...)
  local ok, result = pcall(fn, ...)
  if ok then return result end
  cli.stop("generate", "%s", (cli.advice(result):gsub("ms%.hf%.load%(FOLDER, { adapter = ('.-') }%)",
    "--model FOLDER --adapter %1")))
end

local function use_folder()
  local ms = require "moonshard"
  local model = need(ms.hf.load, given.model, { adapter = given.adapter })
  if not model.stream then
    cli.stop("generate", "--model: %s is no causal language model", model.family.architecture)
  end
  local tokenizer = need(ms.text.tokenizer, given.model)
  if given.chat then
    options.system, options.chat = given.system, given.chat ~= true and given.chat or nil
    return converse(need(ms.text.chat, model, tokenizer, options))
  end
  options.max_new_tokens = options.max_new_tokens or 500
  local prompt = given.prompt or ""
  local ids, decoder = tokenizer:encode(prompt), tokenizer:stream()
  if ids:numel() == 0 then cli.stop("generate", "--prompt is missing, expected a text") end
  show(prompt)
  for id in model:stream(ids, options) do show(decoder:push(id)) end
  show(decoder:finish() .. "\n")
end

if given.model then
  cli.run("generate", use_folder, function() return "while generating" end)
  return
end

-- ---- models of scripts/train -------------------------------------------------------------------------------

local GPT = require "moonshard.models.gpt"
local checkpoints = require "moonshard.run.checkpoint"
local run_folder = require "moonshard.run.folder"
local text = require "moonshard.run.text"

local file, err = run_folder.find_checkpoint(given.from)
if not file then cli.stop("generate", "--from: %s", err) end
local ok, checkpoint = pcall(checkpoints.open, file)
if not ok then cli.stop("generate", "--from: %s", checkpoint) end
local c = checkpoint.config
local model = GPT { vocab = c.vocab, context = c.context, layers = c.layers, heads = c.heads, dim = c.dim,
  position = c.position, tie = false }
local adapters = c.lora and model:adapters(c.lora)
checkpoint:load_model(model)
checkpoint:close()
if adapters then adapters:merge() end
if not checkpoints.finite(model) then cli.stop("generate", "--from: the weights of '%s' are not finite", file) end
model:eval()

local kind = c.vocab == 256 and "text" or "tokens"
local prompt = {}
if kind == "text" then
  prompt = text.bytes(given.prompt and given.prompt ~= "" and given.prompt or "\n")
else
  for word in (given.prompt or ""):gmatch "%S+" do
    local id = tonumber(word)
    if not id or id % 1 ~= 0 or id < 0 or id >= c.vocab then
      cli.stop("generate", "--prompt: '%s' is not a token id from 0 to %d; this model was trained on token files",
        word, c.vocab - 1)
    end
    prompt[#prompt + 1] = id
  end
  if #prompt == 0 then prompt[1] = 0 end
end
cli.run("generate", function()
  io.stdout:write(given.prompt or "")
  local between = kind == "tokens" and #(given.prompt or "") > 0
  options.max_new_tokens = options.max_new_tokens or 500
  for id in model:stream(prompt, options) do
    show((between and " " or "") .. text.show({ id }, kind))
    between = kind == "tokens"
  end
  io.stdout:write "\n"
end, function() return "while generating" end)
