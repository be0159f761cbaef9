-- SPDX-License-Identifier: MIT
--- Scores of a language model on a file: perplexity of texts and completions, accuracy at multiple choice.
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local examples = require "moonshard.text.examples"
local F = require("moonshard.nn").F
local generation = require "moonshard.text.generation"
local no_grad = require("moonshard.autograd").no_grad
local opts = require "moonshard.core.opts"
local pack = require("moonshard.text.packing").pack
local scope = require("moonshard.tensor.scope").scope
local tables = require "moonshard.data.tables"

local M = {}

--- The sum of the log-probabilities of each row's targets but those that are -100.
---@param model Module
---@param ids Tensor  int64 [B, T]
---@param targets Tensor  int64 [B, T]
---@return Tensor  float32 or float64 [B]
function M.log_probabilities(model, ids, targets)
  local logits = model(ids)
  if logits.dtype ~= "float64" then logits = logits:float() end
  local losses = F.cross_entropy(logits:flatten(1, 2), targets:flatten(), { reduction = "none" })
  return -losses:reshape(targets:size(1), targets:size(2)):sum(2)
end

local function evaluate(model, fn)
  local training = model.training
  model:eval()
  local ok, err = pcall(no_grad, fn)
  model:train(training)
  if not ok then error(err, 0) end
end

local function perplexity(model, list, o, world, path)
  local rows, sums = pack(list, { length = o.length, rank = dist.rank(), world = world }), { 0, 0 }
  if rows.cut > 0 then
    errors.raise("hf.score: '%s': %d examples are longer than option 'length', %d", path, rows.cut, o.length)
  end
  evaluate(model, function()
    for ids, given, n in rows:each(o.batch) do
      scope(function()
        local loss = model(ids, given)
        if n > 0 then sums = { sums[1] + loss:item() * n, sums[2] + n } end
      end)
    end
  end)
  local all = create.tensor(sums, { dtype = "float64" })
  if world > 1 then dist.all_reduce(all) end
  local sum, n = unpack(all:tolist())
  if sum ~= sum then errors.raise("hf.score: '%s': the mean loss is nan", path) end
  return { loss = sum / n, perplexity = math.exp(sum / n), tokens = n }
end

-- The answer's number, from 1, of an object with choices.
local function answer_of(object, where)
  local answer, seen = object.answer, {}
  for k, choice in ipairs(object.choices) do
    opts.expect(choice, opts.string, "%s: choice %d", where, k)
    if choice == "" then errors.raise("%s: choice %d is empty", where, k) end
    if seen[choice] then errors.raise("%s: choices %d and %d are equal", where, seen[choice], k) end
    seen[choice] = k
  end
  if seen[answer] then return seen[answer] end
  local fits = type(answer) == "number" and answer % 1 == 0 and answer >= 0 and answer < #object.choices
  opts.need(fits, answer, "the number of a choice, from 0, or its text", "%s: 'answer'", where)
  return answer + 1
end

local function choices(model, objects, lines, tokenizer, o, world, path)
  local list, questions = {}, {}
  for k, object in ipairs(objects) do
    local where = ("hf.score: '%s', line %d"):format(path, lines[k])
    opts.need(type(object) == "table" and opts.is_plain(object.choices) and #object.choices > 1, object,
      "an object with two 'choices' or more", "%s", where)
    opts.expect(object.prompt, opts.string, "%s: 'prompt'", where)
    questions[k] = { answer = answer_of(object, where), first = #list + 1, sizes = {} }
    for c, choice in ipairs(object.choices) do
      list[#list + 1] = examples.completion(tokenizer, object.prompt, choice)
      if list[#list].learned[1] then
        errors.raise("%s: nothing is before the first token of choice %d, so it has no probability; expected a longer "
          .. "'prompt'", where, c)
      end
      questions[k].sizes[c] = #choice
    end
  end
  local rows, sums = pack(list, { length = o.length, separate = true, rank = dist.rank(), world = world }), {}
  if rows.cut > 0 then
    errors.raise("hf.score: '%s': %d choices are, with their prompts, longer than option 'length', %d", path, rows.cut,
      o.length)
  end
  for k = 1, #list do sums[k] = 0 end
  for k, row in ipairs(rows._rows) do row.number = k end
  evaluate(model, function()
    for batch, counts in rows:_lists(o.batch) do
      scope(function()
        local ids, given = rows:_tensors(batch)
        local values = M.log_probabilities(model, ids, given.targets):tolist()
        for k, row in ipairs(counts and batch or {}) do sums[row.number] = values[k] end
      end)
    end
  end)
  local all = create.tensor(sums, { dtype = "float64" })
  if world > 1 then dist.all_reduce(all) end
  sums = all:tolist()
  for k, sum in ipairs(sums) do
    if sum ~= sum then errors.raise("hf.score: '%s': the log-probability of choice %d of all is nan", path, k) end
  end
  local right, normalized = 0, 0
  for _, q in ipairs(questions) do
    local best, best_normalized
    for c, size in ipairs(q.sizes) do
      local sum = sums[q.first + c - 1]
      if not best or sum > sums[q.first + best - 1] then best = c end
      if not best_normalized or sum / size > sums[q.first + best_normalized - 1] / q.sizes[best_normalized] then
        best_normalized = c
      end
    end
    right, normalized = right + (best == q.answer and 1 or 0), normalized + (best_normalized == q.answer and 1 or 0)
  end
  return { accuracy = right / #questions, accuracy_per_byte = normalized / #questions, questions = #questions }
end

--- Scores a language model on a file. Of a file as ms.text.examples reads it: loss, the mean in nats of the learned
--- tokens, perplexity and tokens. Of JSON lines { prompt, choices, answer }, where answer is the number of a choice,
--- from 0, or its text: accuracy, the share of questions whose answer has the highest probability; accuracy_per_byte,
--- where log-probabilities are divided by the choice's bytes; and questions. Collective: the ranks share the rows.
---@param model Module  a causal model of ms.hf.load, whole or sharded
---@param tokenizer TextTokenizer  the model's
---@param path string  of the file
---@param given? { length: integer, batch: integer, chat: string|table }
---   length: tokens of a row (default: 512, or the model's positions if these are fewer); batch: rows of a forward
---   (default: 8); chat: the format of messages
---@return { loss: number, perplexity: number, tokens: integer }|{ accuracy: number, accuracy_per_byte: number, questions: integer }
function M.score(model, tokenizer, path, given)
  local who = "hf.score"
  opts.need(type(model) == "table" and model.lm_head, model, "a language model of ms.hf.load", "%s: argument 1", who)
  generation._expect_causal(who, model)
  opts.expect(path, opts.string, "%s: the path", who)
  local o = opts(who, given, { length = opts.option(opts.whole_from(2), math.min(512, model.context or 512)),
    batch = opts.option(opts.whole_from(1), 8), chat = opts.any })
  if model.context and o.length > model.context then
    errors.raise("%s: option 'length' is %d, but the model has only %d positions", who, o.length, model.context)
  end
  local world = dist.world_size()
  if path:find "%.jsonl?$" then
    local objects, lines = tables._json_lines(path, who, false)
    if type(objects[1]) == "table" and objects[1].choices then
      return choices(model, objects, lines, tokenizer, o, world, path)
    end
  end
  local list = examples.read(path, tokenizer, { chat = o.chat })
  if list[1].chosen then errors.raise("%s: '%s' has preferences, which have no score of their own", who, path) end
  return perplexity(model, list, o, world, path)
end

return M
