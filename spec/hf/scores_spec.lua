-- SPDX-License-Identifier: MIT
--- ms.hf.score beside sums of log-probabilities that a plain loop takes.
local ffi = require "ffi"
local message = require "spec.support.message"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

if not pcall(ffi.load, "libpcre2-8.so.0") then return pending "this system has no PCRE2" end

local function model_of(dtype)
  ms.manual_seed(5)
  local model = ms.hf.create { architectures = { "LlamaForCausalLM" }, model_type = "llama", vocab_size = 256,
    hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 24 }
  return model:to(dtype or "float64")
end

local tokenizer = ms.text.train_bpe("", { vocab_size = 256 })

-- The log-probabilities of the tokens of `answer` after `prompt`, one at a time.
local function right(model, prompt, answer)
  local ids, sum = tokenizer:encode(prompt .. answer), 0
  local logits = model(ids:unsqueeze(1)):select(1, 1):log_softmax(-1):tolist()
  local list = ids:tolist()
  for k = #prompt + 1, #list do sum = sum + logits[k - 1][list[k] + 1] end
  return sum
end

describe("ms.hf.score", function()
  local folder
  setup(function() folder = process.temp_folder() end)
  teardown(function() process.remove_folder(folder) end)
  local function file(text)
    process.write(folder .. "/data.jsonl", text)
    return folder .. "/data.jsonl"
  end

  it("gives the perplexity of completions", function()
    local model = model_of()
    local list = { { "to be ", "or not" }, { "that is", " the question" }, { "a", "b" } }
    local lines, sum, n = {}, 0, 0
    for k, row in ipairs(list) do
      lines[k] = ('{"prompt": "%s", "completion": "%s"}'):format(row[1], row[2])
      sum, n = sum - right(model, row[1], row[2]), n + #row[2]
    end
    local score = ms.hf.score(model, tokenizer, file(table.concat(lines, "\n")), { length = 24, batch = 2 })
    assert.are.equal(n, score.tokens)
    assert.is_near(sum / n, score.loss, 1e-9)
    assert.is_near(math.exp(sum / n), score.perplexity, 1e-6)
  end)

  it("chooses the answer with the highest probability, whole and per byte", function()
    local model = model_of()
    local options, lines, plain, per_byte = { "is", " was it so", "!", " be" }, {}, 0, 0
    for k = 1, 8 do
      local prompt, best, best_per = ("case %d:"):format(k), 1, 1
      local sums = {}
      for c, option in ipairs(options) do
        sums[c] = right(model, prompt, option)
        if sums[c] > sums[best] then best = c end
        if sums[c] / #option > sums[best_per] / #options[best_per] then best_per = c end
      end
      local answer = k % 4 + 1
      plain, per_byte = plain + (best == answer and 1 or 0), per_byte + (best_per == answer and 1 or 0)
      lines[k] = ('{"prompt": "%s", "choices": ["%s"], "answer": %s}'):format(prompt, table.concat(options, '", "'),
        k % 2 == 0 and answer - 1 or '"' .. options[answer] .. '"')
    end
    local score = ms.hf.score(model, tokenizer, file(table.concat(lines, "\n")), { batch = 3 })
    assert.are.same({ accuracy = plain / 8, accuracy_per_byte = per_byte / 8, questions = 8 }, score)
  end)

  it("reads rows of the model's positions, and refuses a model that continues no texts, and NaN", function()
    local small = ms.hf.create { model_type = "gpt2", vocab_size = 256, n_embd = 8, n_layer = 1, n_head = 2,
      n_positions = 64 }
    local path = file '{"text": "ab"}'
    assert.are.equal(1, ms.hf.score(small, tokenizer, path).tokens)
    assert.are.equal("hf.score: option 'length' is 65, but the model has only 64 positions",
      message(ms.hf.score, small, tokenizer, path, { length = 65 }))
    ms.nn.init.constant_(small.model.embed.weight, 0 / 0)
    assert.matches("hf.score: '.*': the mean loss is nan$", message(ms.hf.score, small, tokenizer, path))
    local t5 = ms.hf.create { model_type = "t5", vocab_size = 256, d_model = 8, d_kv = 4, d_ff = 8, num_layers = 1,
      num_heads = 2 }
    assert.matches("hf.score: T5ForConditionalGeneration is no causal language model", message(ms.hf.score, t5, tokenizer,
      path))
  end)

  for label, row in ms.sorted_pairs {
    ["one choice"] = { '{"prompt": "a", "choices": ["b"], "answer": 0}', "line 1 is" },
    ["an answer that is no choice"] = { '{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "'answer' is a number (2), expected the number of a choice" },
    ["an empty choice"] = { '{"prompt": "a", "choices": ["b", ""], "answer": 0}', "line 1: choice 2 is empty" },
    ["equal choices"] = { '{"prompt": "a", "choices": ["b", "c", "b"], "answer": 0}', "line 1: choices 1 and 3 are equal" },
    ["a choice after nothing"] = { '{"prompt": "", "choices": ["b", "c"], "answer": 0}', "nothing is before the first token of choice 1" },
    ["a completion that is too long"] = { '{"prompt": "aaaaaaaaaaaa", "completion": "b"}\n{"text": "ab"}', "1 examples are longer than option 'length', 8" },
    ["preferences"] = { '{"prompt": "a", "chosen": "b", "rejected": "c"}', "has preferences" },
    ["a question that is too long"] = { '{"prompt": "aaaa", "choices": ["b", "cdefgh"], "answer": 0}', "1 choices are, with their prompts, longer than option 'length', 8" },
  } do
    it("refuses " .. label, function()
      local text = message(ms.hf.score, model_of "float32", tokenizer, file(row[1]), { length = 8 })
      assert.is_truthy(text:find(row[2], 1, true), text)
    end)
  end
end)

for _, n_ranks in ipairs { 1, 2, 3 } do
  ranks.describe(n_ranks, ("embeddings over %d ranks #mpi"):format(n_ranks), function()
    it("contrast a batch over ranks as one process does with all of it", function()
      local dist = ms.dist
      local world, rank = dist.world_size(), dist.rank()
      local n = 2
      ms.manual_seed(7)
      local all, encoder = ms.randn(world * n, 6, { dtype = "float64" }), ms.nn.Linear(6, 4, { dtype = "float64" })
      local others = ms.randn(world * 2 * n, 6, { dtype = "float64" })
      for _, given in ipairs { { temperature = 0.3 }, { temperature = 0.3, symmetric = true } } do
        local m = given.symmetric and n or 2 * n
        local function own(t, size) return t:narrow(1, rank * size + 1, size) end
        encoder:zero_grad()
        ms.hf.contrastive_loss(encoder(own(all, n)), encoder(own(others, m)), given):backward()
        local g = encoder.weight.grad:clone()
        dist.all_reduce(g, { op = "avg" })
        -- One process: rows of a to those of b, which every rank has.
        encoder:zero_grad()
        local function unit(t) return t / (t * t):sum(2, { keepdim = true }):sqrt() end
        local a, b = unit(encoder(all)), unit(encoder(others:narrow(1, 1, world * m)))
        local logits = a:matmul(b:t()) / 0.3
        local targets = {}
        for k = 0, world * n - 1 do targets[k + 1] = math.floor(k / n) * m + k % n end
        targets = ms.tensor(targets, { dtype = "int64" })
        local loss = ms.nn.F.cross_entropy(logits, targets)
        if given.symmetric then loss = (loss + ms.nn.F.cross_entropy(logits:t(), targets)) / 2 end
        loss:backward()
        assert.is_true((g - encoder.weight.grad):abs():max():item() < 1e-12)
      end
    end)

    it("pool over tokens, and leave padding out", function()
      local x = ms.arange(0, 12, { dtype = "float64" }):reshape(2, 3, 2)
      local pooled = ms.hf.mean_pool(x, ms.tensor { { 1, 1, 0 }, { 0, 0, 0 } })
      assert.are.same({ { 1, 2 }, { 0, 0 } }, pooled:tolist())
      assert.are.same({ { 2, 3 }, { 8, 9 } }, ms.hf.mean_pool(x):tolist())
    end)
  end)
end
