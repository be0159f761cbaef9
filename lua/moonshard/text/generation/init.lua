-- SPDX-License-Identifier: MIT
--- Generates tokens with a language model: ms.text.generate and ms.text.stream, and model:generate of the models that
--- have it. A model takes ids [B, T] and gives logits [B, T, vocab]. With a cache (the default) it takes the options
--- `cache`, `attention_mask`, `positions` and `last` that hf/decoder.lua describes; with use_cache = false any causal
--- model will do. `model.context`: positions that it has at most; longer texts go on from the second half of them.
local agree = require "moonshard.parallel.fsdp.agree"
local autograd = require "moonshard.autograd"
local beams = require "moonshard.text.generation.beams"
local cjson = require "cjson"
local caches = require "moonshard.text.generation.cache"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local json = require "moonshard.core.json"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local rows_of = require "moonshard.text.generation.rows"
local sample = require "moonshard.text.generation.sample"
local steps = require "moonshard.text.generation.steps"
local task = require "moonshard.core.task"
local a_module = require("moonshard.nn.module.register").a_module
local is_tensor = require("moonshard.tensor").is_tensor
local sorted_pairs = require("moonshard.tensor.util").sorted_pairs

local M = {}

---@alias GenerateOptions table  options of text.generate

-- ---- options ------------------------------------------------------------------------------------

local a_share = opts.kind("a number from 0 to 1", function(v) return type(v) == "number" and v >= 0 and v <= 1 end)
local a_id = opts.whole_from(0)
local some_ids = opts.kind("a token id or a list of them", function(v)
  if type(v) ~= "table" then return a_id.test(v) end
  for _, id in ipairs(v) do
    if not a_id.test(id) then return false end
  end
  return opts.is_plain(v)
end)
local lists_of_ids = opts.kind("a list of lists of token ids", function(v)
  if not opts.is_plain(v) then return false end
  for _, list in ipairs(v) do
    if type(list) ~= "table" or #list == 0 or not some_ids.test(list) then return false end
  end
  return true
end)
local strings = opts.kind("a text or a list of texts", function(v)
  if type(v) == "string" then return v ~= "" end
  if type(v) ~= "table" then return false end
  for _, s in ipairs(v) do
    if type(s) ~= "string" or s == "" then return false end
  end
  return opts.is_plain(v)
end)

local SPEC = {
  max_new_tokens = opts.whole_from(1), max_length = opts.whole_from(1), min_new_tokens = opts.whole_from(0),
  min_length = opts.whole_from(0), suppress_tokens = some_ids, begin_suppress_tokens = some_ids,
  no_repeat_ngram_size = opts.option(opts.whole_from(0), 0), bad_words_ids = lists_of_ids,
  do_sample = opts.boolean, temperature = opts.number_from(0), top_k = opts.whole_from(0), top_p = a_share,
  min_p = a_share, repetition_penalty = opts.option(opts.positive, 1), num_beams = opts.option(opts.whole_from(1), 1),
  length_penalty = 1, early_stopping = opts.any,
  num_return_sequences = opts.option(opts.whole_from(1), 1), eos_token_id = some_ids, pad_token_id = a_id,
  stop_strings = strings, tokenizer = opts.any, seed = opts.whole, attention_mask = opts.any, use_cache = true,
  cache_length = opts.whole_from(1),
}

local function list_of(v) return type(v) == "table" and v or { v } end

-- Keys of generation_config.json that change what transformers generates, and that generate lacks, with the value at
-- which they do nothing; false: without a value.
local LACKING = {
  constraints = false, diversity_penalty = 0, dola_layers = false, encoder_no_repeat_ngram_size = 0,
  encoder_repetition_penalty = 1, epsilon_cutoff = 0, eta_cutoff = 0, exponential_decay_length_penalty = false,
  force_words_ids = false, forced_bos_token_id = false, forced_decoder_ids = false, forced_eos_token_id = false,
  guidance_scale = 1, max_time = false, num_beam_groups = 1, penalty_alpha = 0, remove_invalid_values = false,
  renormalize_logits = false, return_timestamps = false, sequence_bias = false, token_healing = false, top_h = false,
  typical_p = 1, watermarking_config = false,
}

--- Warns of keys of generation_config.json that generate lacks.
---@param saved table<string, any>
---@param path string  of the file
function M._warn_of_lacking(saved, path)
  for key, off in sorted_pairs(LACKING) do
    local v = saved[key]
    if v and v ~= cjson.null and v ~= off then
      log.warn_once(("'%s': key '%s' is %s, which generate lacks: its texts may differ from those of transformers"):format(
        path, key, json.show(v)))
    end
  end
end

local OF_SAMPLING = { do_sample = true, temperature = true, top_k = true, top_p = true, min_p = true }

-- The options, and those of the model's generation_config.json that a call leaves out. Those of sampling count if the
-- call samples, or says nothing about it and the file samples.
local function with_saved(model, given)
  local saved = type(model.generation_config) == "table" and model.generation_config or {}
  local filters = (given.temperature or 0) > 0 or given.top_k or given.top_p or given.min_p
  local sampled = given.do_sample
  if sampled == nil and given.temperature ~= 0 then
    sampled = filters or saved.do_sample == true and (given.num_beams or 1) == 1
  end
  local o = {}
  for key in pairs(SPEC) do
    local v = saved[key]
    if key == "max_new_tokens" and given.max_length or key == "min_new_tokens" and given.min_length then v = nil end
    if given[key] ~= nil then v = given[key] elseif OF_SAMPLING[key] and not sampled or v == cjson.null then v = nil end
    o[key] = v
  end
  return o
end

-- Raises for a model of ms.hf.load that does not continue texts, such as BERT and T5.
function M._expect_causal(who, model)
  if model.family and not model.stream then
    errors.raise("%s: %s is no causal language model%s", who, model.family.architecture, model.generate
      and "; model:generate(inputs) gives what it says to inputs" or "")
  end
end

-- The options with their defaults, which are those of transformers. accepted: those that may be given.
local function complete(who, model, given, accepted)
  local texts = given and given.stop_strings
  for k, text in ipairs(type(texts) == "table" and texts or { texts }) do
    if text == "" then errors.raise("%s: option 'stop_strings': text %d is empty", who, k) end
  end
  opts(who, given, accepted or SPEC)
  local o = opts(who, with_saved(model, given or {}), SPEC)
  o.who = who
  if o.temperature == 0 then
    if o.do_sample then errors.raise("%s: temperature 0 is no sampling; pass do_sample = false", who) end
    o.do_sample, o.temperature = false, nil
  end
  local filters = o.temperature or o.top_k or o.top_p or o.min_p
  if o.do_sample == nil then o.do_sample = filters ~= nil end
  if filters and not o.do_sample then
    errors.raise("%s: temperature, top_k, top_p and min_p are options of sampling, but do_sample is false", who)
  end
  o.temperature, o.top_k, o.top_p, o.min_p = o.temperature or 1, o.top_k or 50, o.top_p or 1, o.min_p or 0
  if o.early_stopping == nil then o.early_stopping = false end
  opts.need(type(o.early_stopping) == "boolean" or o.early_stopping == "never", o.early_stopping,
    "true, false or 'never'", "%s: option 'early_stopping'", who)
  if o.num_beams > 1 and o.do_sample then errors.raise("%s: beams are not sampled; pass do_sample = false", who) end
  if not o.do_sample and o.num_return_sequences > o.num_beams then
    errors.raise("%s: num_return_sequences is %d, but without sampling there are only num_beams, %d", who,
      o.num_return_sequences, o.num_beams)
  end
  if o.num_beams > 1 and not o.use_cache then errors.raise("%s: beams need use_cache = true", who) end
  local config = type(model.config) == "table" and model.config or {}
  local function of_config(key)
    local v = config[key]
    return some_ids.test(v) and v or nil
  end
  o.eos, o.eos_list = {}, list_of(o.eos_token_id or of_config "eos_token_id" or {})
  for _, id in ipairs(o.eos_list) do o.eos[id] = true end
  local pad = o.pad_token_id or of_config "pad_token_id"
  o.pad = pad or o.eos_list[1] or 0
  o.padding = not o.eos[pad] and pad or nil
  for _, key in ipairs { "suppress_tokens", "begin_suppress_tokens" } do o[key] = o[key] and list_of(o[key]) end
  o.stop_strings = o.stop_strings and list_of(o.stop_strings) or {}
  if #o.stop_strings > 0 and not o.tokenizer then errors.raise("%s: stop_strings need option 'tokenizer'", who) end
  if o.do_sample and not o.seed then o.seed = math.floor(create.rand({}, { dtype = "float64" }):item() * 2 ^ 53) end
  return o
end

M._complete, M._accepted = complete, SPEC

-- ---- modes --------------------------------------------------------------------------------------

local function restore(training, ok, ...)
  for _, m in ipairs(training) do m.training = true end
  if not ok then error((...), 0) end
  return ...
end

-- Runs fn(…) with the model in evaluation mode and without gradients. modules: all of it.
local function evaluating(model, modules, fn, ...)
  local training = {}
  for _, m in ipairs(modules) do
    if m.training then training[#training + 1] = m end
  end
  if #training > 0 then model:eval() end
  return restore(training, pcall(autograd.no_grad, fn, ...))
end

-- ---- generating ---------------------------------------------------------------------------------

-- What a generation works on. The rows are texts; those of num_return_sequences follow each other.
local function begin(who, model, ids, given, groups, cache, source)
  if not source then M._expect_causal(who, model) end
  local o = complete(who, model, given)
  if source and not o.use_cache then errors.raise("%s: an encoder-decoder needs use_cache = true", who) end
  local rows, device = rows_of(who, ids, o.attention_mask, not source and o.padding or nil)
  local width, context = rows[1].width, source and model.options.context
  if not o.max_new_tokens and o.max_length and o.max_length <= width then
    errors.raise("%s: max_length is %d, expected more than the %s of the longest text; or give max_new_tokens", who,
      o.max_length, errors.count(width, "token"))
  end
  o.max_new_tokens = o.max_new_tokens or o.max_length and o.max_length - width or 20
  o.min_new_tokens = o.min_new_tokens or math.max(0, (o.min_length or 0) - width)
  if context and width + o.max_new_tokens > context then
    errors.raise("%s: %d positions are more than the model has, %d; give less max_new_tokens", who,
      width + o.max_new_tokens, context)
  end
  if o.cache_length then
    local longest = 0
    for _, row in ipairs(rows) do longest = math.max(longest, row.prompt) end
    if longest + o.max_new_tokens > o.cache_length then
      errors.raise("%s: cache_length is %d, expected at least %d: the longest text has %s, and max_new_tokens is %d", who,
        o.cache_length, longest + o.max_new_tokens, errors.count(longest, "token"), o.max_new_tokens)
    end
  end
  return steps.new { model = model, o = o, rows = rows, device = device, groups = groups, source = source,
    cache = o.use_cache and (cache or caches.new(o.cache_length)) or nil, own_cache = cache == nil }
end

-- Whether the tokens of a row, of which the first `prompt` were given, end with a token or text that ends it.
local function ends(o, ids, prompt)
  if o.eos[ids[#ids]] then return true end
  if #o.stop_strings == 0 then return false end
  local longest, tail = 0, {}
  for _, s in ipairs(o.stop_strings) do longest = math.max(longest, #s) end
  -- A few tokens more, because the first one's text may lack its space.
  for k = math.max(prompt + 1, #ids - longest - 8), #ids do tail[#tail + 1] = ids[k] end
  local text = o.tokenizer:decode(tail, { special = true })
  for _, s in ipairs(o.stop_strings) do
    if text:find(s, 1, true) then return true end
  end
  return false
end

-- One token more for each row; nil after the last one, of all ranks.
local function advance(run)
  return run:step(function(logits)
    local o, open = run.o, false
    local chosen = sample.choose(logits, run.rows, o)
    for r, row in ipairs(run.rows) do
      if row.done then
        chosen[r] = o.pad
      else
        row.ids[#row.ids + 1] = chosen[r]
        row.done = #row.ids - row.prompt >= o.max_new_tokens or ends(o, row.ids, row.prompt)
        open = open or not row.done
      end
    end
    run.done = not open
    return chosen
  end)
end

-- The rows as a tensor, and the new tokens of each.
local function result_of(run, rows, one)
  local longest, new, out = 0, {}, {}
  for r, row in ipairs(rows) do
    longest, new[r] = math.max(longest, #row.ids - row.prompt), {}
    for k = row.prompt + 1, #row.ids do new[r][k - row.prompt] = row.ids[k] end
  end
  for r, row in ipairs(rows) do
    local list = {}
    for k = 1, row.width - row.prompt do list[k] = row.padding and row.padding[k] or run.o.pad end
    for _, id in ipairs(row.ids) do list[#list + 1] = id end
    for k = #list + 1, row.width + longest do list[k] = run.fill or run.o.pad end
    out[r] = list
  end
  return create.tensor(one and #out == 1 and out[1] or out, { dtype = "int64", device = run.device }), new
end

local function generate(model, ids, given, groups, source)
  local run = begin("generate", model, ids, given, groups, nil, source)
  return evaluating(model, model:modules(), function()
    local rows
    if run.o.num_beams > 1 then
      rows = beams.search(run, ends)
    else
      run:repeated(run.o.num_return_sequences)
      local n, most = 0, run.o.max_new_tokens
      repeat
        task.report("generating", n, most)
        n = n + 1
      until not advance(run)
      task.report("generating", most, most)
      rows = run.rows
    end
    run:close()
    return result_of(run, rows, is_tensor(ids) and ids.ndim == 1)
  end)
end

--- Generates tokens after those given. Options have the names of transformers, and its defaults, unless the model's
--- generation_config.json says otherwise. The model's modes come back afterwards. Rows do not depend on each other: a
--- row has the tokens that it has alone, except with dynamic RoPE and LongRoPE, where the longest row sets the angles
--- of all once it is beyond the original context, as in transformers. A text that reaches the model's last position
--- (model.context) goes on from its last half; its beginning is forgotten. Collective if the model is sharded: each
--- rank generates for its own ids, which may differ in number and length, and takes part until the last one ends.
---@param model Module  a causal language model
---@param ids Tensor|integer[][]  int64 [T] or [B, T], padded on the left; or a list of token lists
---@param given? { max_new_tokens: integer, max_length: integer, min_new_tokens: integer, min_length: integer, suppress_tokens: integer[], begin_suppress_tokens: integer[], no_repeat_ngram_size: integer, bad_words_ids: integer[][], do_sample: boolean, temperature: number, top_k: integer, top_p: number, min_p: number, repetition_penalty: number, num_beams: integer, length_penalty: number, early_stopping: boolean|"never", num_return_sequences: integer, eos_token_id: integer|integer[], pad_token_id: integer, stop_strings: string|string[], tokenizer: TextTokenizer, seed: integer, attention_mask: Tensor, use_cache: boolean, cache_length: integer }
---   max_new_tokens: default 20; max_length: instead, with the tokens given, those of the longest row; min_new_tokens:
---   no text ends before (default 0); min_length: as max_length; suppress_tokens: are never chosen;
---   begin_suppress_tokens: are not chosen first; no_repeat_ngram_size: so many tokens never follow each other twice in
---   a row (default 0: off); bad_words_ids: lists of tokens that never follow each other; do_sample: draws tokens
---   instead of taking the likeliest (default: true if one of the next four is given); temperature: divides the logits,
---   0: the likeliest token (default 1); top_k: draws from so many tokens, 0: from all (default 50); top_p: draws from
---   the likeliest tokens that have this probability together (default 1); min_p: draws from tokens with this share of
---   the largest probability (default 0); repetition_penalty: above 1 makes tokens that the text has less likely
---   (default 1); num_beams: width of a beam search (default 1); length_penalty: beams are compared by score / length ^
---   this (default 1); early_stopping: true: a search ends when num_beams texts have ended; "never": when no longer
---   text can be better (default false: a guess between them); num_return_sequences: texts for each row (default 1);
---   eos_token_id: tokens that end a text (default: those of the model's configuration; {}: none); pad_token_id: fills
---   rows; stop_strings: end a text as soon as it has one; tokenizer: for stop_strings; seed: of the random numbers
---   (default: drawn from the generator of ms.manual_seed); attention_mask: [B, T], 0 where a row is padded (default: of
---   a tensor, where it begins with the model's pad_token_id, unless that ends texts); use_cache:
---   false: for models that take ids alone (default true); cache_length: positions of keys and values to allocate at
---   once, at least those of the longest text and of the new tokens (default: the cache grows)
---@return Tensor ids  int64 [B * num_return_sequences, T + new], the given tokens and the new ones, padded on the right;
---   [T + new] for ids [T] and one text
---@return integer[][] new  the new tokens of each row, with the one that ended it
function M.generate(model, ids, given)
  opts.expect(model, a_module, "generate: the model")
  local groups = agree.groups_of(model)
  if #groups == 0 then return generate(model, ids, given, groups) end
  return agree.together(groups, generate, model, ids, given, groups)
end

-- Generates with an encoder-decoder. ids: what the decoder begins with; source: { inputs, mask }.
function M._generate_from(source, model, ids, given)
  local groups = agree.groups_of(model)
  if #groups == 0 then return generate(model, ids, given, groups, source) end
  return agree.together(groups, generate, model, ids, given, groups, source)
end

-- Streams a text. cache: nil, or that of an earlier call, whose tokens the text begins with.
function M._stream(who, model, ids, given, cache)
  opts.expect(model, a_module, "%s: the model", who)
  if type(ids) == "table" and not is_tensor(ids) and type(ids[1]) == "number" then ids = { ids } end
  local groups = agree.groups_of(model)
  local run
  -- A stream has one beam, whatever the model's generation_config.json says.
  if opts.is(given or {}) then
    local o = { num_beams = 1, num_return_sequences = 1 }
    for key, value in pairs(given or {}) do o[key] = value end
    given = o
  end
  local function one()
    run = run or begin(who, model, ids, given, groups, cache)
    if #run.rows > 1 or run.o.num_beams > 1 or run.o.num_return_sequences > 1 then
      errors.raise("%s: one text at a time; text.generate takes batches, beams and several samples", who)
    end
    run.modules = run.modules or model:modules()
    local chosen = evaluating(model, run.modules, advance, run)
    if not chosen then run:close() end
    return chosen and chosen[1]
  end
  return function()
    if #groups == 0 then return one() end
    return agree.together(groups, one)
  end
end

--- As generate, for one text, token by token: `for id in model:stream(ids, opts) do ... end`. On a sharded model all
--- ranks read to the end, or leave the loop after the same token.
---@param model Module  a causal language model
---@param ids Tensor|integer[]  int64 [T] or [1, T], or a list of tokens
---@param given? GenerateOptions  the options of text.generate, without num_beams and num_return_sequences
---@return fun(): integer?
function M.stream(model, ids, given) return M._stream("stream", model, ids, given) end

return M
