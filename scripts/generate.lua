#!/usr/bin/env luajit
-- SPDX-License-Identifier: MIT
--- Continues a text with a trained model: luajit scripts/generate.lua --from RUN --prompt TEXT. --model FOLDER: with
--- one of Hugging Face's folders; --chat: talks to it.
local here = arg[0]:match "^(.*)/[^/]*$" or "."
package.path = ("%s/../lua/?.lua;%s/../lua/?/init.lua;%s"):format(here, here, package.path)

local cli = require "moonshard.run.cli"

local given = cli.parse("generate", "Generates text with a model trained by scripts/train.", {
  { "from", "path", nil, "folder of a run, or a checkpoint" },
  { "model", "path", nil, "instead: a folder with config.json, model.safetensors and the tokenizer's files, or a GGUF file" },
  { "chat", "flag", false, "with --model: a conversation; each line of the input is a message" },
  { "format", "text", nil, "with --chat: the chat's format, such as chatml (default: what the tokenizer's files say)" },
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
    or "--from is missing, expected a run's folder or a checkpoint; or --model, a folder of Hugging Face's")
end
if (given.chat or given.system) and not given.model then cli.stop("generate", "--chat needs --model") end
if (given.system or given.format) and not given.chat then
  cli.stop("generate", "--%s needs --chat", given.system and "system" or "format")
end
if given.chat and given.prompt then
  cli.stop("generate", "--prompt has no effect with --chat, whose messages are the lines of the input")
end
if given.model then given.model = cli.model_folder("generate", given.model) end
if given.temperature and given.temperature < 0 then
  cli.stop("generate", "--temperature is %g, expected 0 or more", given.temperature)
end

-- The text goes to stdout, progress to stderr.
require "moonshard.run.progress".new { stderr = true, silent = given.quiet or cli.launched() ~= 0 }

local temperature = given.temperature or 0.8
local options = { max_new_tokens = given.length, temperature = temperature, seed = given.seed or 1 }
if temperature > 0 then options.top_k, options.top_p = given["top-k"] or 0, given["top-p"] end

-- Writes text as it arrives.
local function show(text)
  io.stdout:write(text)
  io.stdout:flush()
end

-- ---- models of folders -------------------------------------------------------------------------------------

local function converse(chat)
  while true do
    if not given.quiet then show "> " end
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
  if not ok then cli.stop("generate", "%s", cli.advice(result, "format")) end
  return result
end

local function use_folder()
  local ms = require "moonshard"
  local model, tokenizer = need(ms.hf.load, given.model), need(ms.text.tokenizer, given.model)
  if given.chat then
    options.system, options.chat = given.system, given.format
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
