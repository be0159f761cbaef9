#!/usr/bin/env luajit
-- SPDX-License-Identifier: MIT
--- Continues a text with a trained model: luajit scripts/generate.lua --from RUN --prompt TEXT
local here = arg[0]:match "^(.*)/[^/]*$" or "."
package.path = ("%s/../lua/?.lua;%s/../lua/?/init.lua;%s"):format(here, here, package.path)

local cli = require "moonshard.run.cli"

local given = cli.parse("generate", "Generates text with a model trained by scripts/train.", {
  { "from", "path", nil, "folder of a run, or a checkpoint" },
  { "prompt", "text", nil,
  "beginning of the text (default: a newline); for a model of token files, ids separated by spaces" },
  { "length", "count", 500, "tokens to generate" },
  { "temperature", "number", 0.8, "temperature of the sampling; 0: always the most likely token" },
  { "seed", "whole", 1, "seed of the sampling" },
  { "quiet", "flag", false, "print only the text, and errors" },
}, arg)
if not given.from then cli.stop("generate", "--from is missing, expected a run's folder or a checkpoint") end
if given.temperature and given.temperature < 0 then
  cli.stop("generate", "--temperature is %g, expected 0 or more", given.temperature)
end

-- The text goes to stdout, progress to stderr.
require "moonshard.run.progress".new { stderr = true, silent = given.quiet or cli.launched() ~= 0 }
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
  local temperature = given.temperature or 0.8
  for id in model:stream(prompt, { max_new_tokens = given.length or 500, temperature = temperature,
    top_k = temperature > 0 and 0 or nil, seed = given.seed or 1 }) do
    io.stdout:write(between and " " or "", text.show({ id }, kind))
    io.stdout:flush()                                   -- shows the text while it is generated
    between = kind == "tokens"
  end
  io.stdout:write "\n"
end, function() return "while generating" end)
