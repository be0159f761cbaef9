-- SPDX-License-Identifier: MIT
--- ms.text.examples and ms.text.pack: what is learned, and that packing changes no loss and no gradient.
local cjson = require "cjson"
local ffi = require "ffi"
local message = require "spec.support.message"
local ms = require "moonshard"
local process = require "spec.support.process"

if not pcall(ffi.load, "libpcre2-8.so.0") then return pending "this system has no PCRE2" end

local folder, tokenizer

-- The examples of a file with these lines.
local function examples(lines, given, name)
  local path = folder .. "/" .. (name or "data.jsonl")
  process.write(path, lines)
  return ms.text.examples(path, tokenizer, given)
end

local function tokenizer_json()
  tokenizer:save(folder .. "/tokenizer.json")
  return process.read(folder .. "/tokenizer.json")
end

-- The text of the tokens that are learned.
local function learned(example)
  local ids = {}
  for k, id in ipairs(example.ids) do
    if example.learned[k] then ids[#ids + 1] = id end
  end
  return tokenizer:decode(ids, { special = true })
end

setup(function()
  folder = process.temp_folder()
  tokenizer = ms.text.train_bpe(("question answer user assistant "):rep(9), { vocab_size = 300, special_tokens = { "<|end|>" } })
  tokenizer.eos_id = 0
end)
teardown(function() process.remove_folder(folder) end)

describe("ms.text.examples", function()
  it("learns completions, answers, or whole texts, each with its end", function()
    local list = examples [[
{"prompt": "question 1:", "completion": "answer 1"}
{"text": "question"}
]]
    assert.are.equal("answer 1<|end|>", learned(list[1]))
    assert.are.equal("question 1:answer 1<|end|>", tokenizer:decode(list[1].ids, { special = true }))
    assert.are.equal("question<|end|>", learned(list[2]))
    assert.are.equal(2, #list)
  end)

  it("learns the end that the tokenizer adds, too", function()
    local file, path = cjson.decode(tokenizer_json()), folder .. "/ends.json"
    file.post_processor = { type = "TemplateProcessing", single = { { Sequence = { id = "A", type_id = 0 } },
      { SpecialToken = { id = "<|end|>", type_id = 0 } } }, pair = {}, special_tokens = { ["<|end|>"] = { id = "<|end|>",
      ids = { 0 }, tokens = { "<|end|>" } } } }
    process.write(path, cjson.encode(file))
    local own = tokenizer
    tokenizer = ms.text.tokenizer(path)
    tokenizer.eos_id = 0
    local example = examples('{"prompt": "question ", "completion": "answer"}')[1]
    assert.are.equal(" answer<|end|>", learned(example))
    assert.are.equal("question answer<|end|>", tokenizer:decode(example.ids, { special = true }))
    tokenizer = own
  end)

  it("learns what the assistant says", function()
    local list = examples([[
{"prompt": [{"role": "user", "content": "question"}], "completion": "answer"}
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
]], { chat = "mistral" })
    assert.are.equal("answer<|end|>", learned(list[1]))
    assert.are.equal("b<|end|>", learned(list[2]))
    assert.are.equal("[INST] a [/INST]b", tokenizer:decode(list[2].ids))
  end)

  it("reads pairs of a chosen and a rejected answer", function()
    local pair = examples([[{"prompt": "question:", "chosen": "answer", "rejected": "no"}]])[1]
    assert.are.same({ "answer<|end|>", "no<|end|>" }, { learned(pair.chosen), learned(pair.rejected) })
  end)

  it("takes another file as one text", function()
    assert.are.equal("a question<|end|>", learned(examples("a question", nil, "data.txt")[1]))
    assert.are.equal("a question<|end|>", learned(examples("\239\187\191a question", nil, "data.txt")[1]))
    assert.are.equal("a<|end|>", learned(examples("\239\187\191{\"text\": \"a\"}\n")[1]))
  end)

  for label, row in ms.sorted_pairs {
    ["an object after empty lines"] = { '\n{"text": "a"}\n\n{"a": 1}', "line 4 has none of 'text', 'messages'" },
    ["no JSON"] = { '\n{"text": "a}', "line 2: " },
    ["an object without text"] = { '{"a": 1}', "line 1 has none of 'text', 'messages'" },
    ["a text that is none"] = { '{"text": 1}', "line 1: 'text' is a number (1), expected a string" },
    ["a null"] = { '{"prompt": null, "completion": "x"}', "line 1: 'prompt' is null, expected a string" },
    ["a text and a completion"] = { '{"text": "a", "prompt": "b", "completion": "c"}',
      "line 1 has both 'text' and 'completion'" },
    ["a text and a prompt"] = { '{"text": "a", "prompt": "b"}', "line 1 has both 'text' and 'prompt'" },
    ["messages and a pair"] = { '{"messages": [], "prompt": "a", "chosen": "b", "rejected": "c"}',
      "line 1 has both 'messages' and 'chosen'" },
    ["a list and a string"] = { '{"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"}',
      "line 1: 'chosen' is a table, and 'rejected' is a string ('c'), expected two" },
    ["a completion without prompt"] = { '{"completion": "x"}', "line 1: 'prompt' is nil, expected a string" },
    ["a list"] = { '[{"text": "a"}]', "line 1 is a list, expected an object in each line" },
    ["a list over several lines"] = { '[\n{"text": "a"}\n]', "; expected one JSON value in each line" },
    ["a number"] = { "1", "line 1 is a number (1), expected an object" },
    ["no object"] = { "\n", "has no object" },
    ["pairs beside texts"] = { '{"text": "a"}\n{"prompt": "a", "chosen": "b", "rejected": "c"}', "line 2 is a preference, the first one is not" },
    ["a format whose end the tokenizer lacks"] = { '{"messages": [{"role": "user", "content": "x"}]}', "the format ends answers with '<|im_end|>'", "chatml" },
    ["messages without a format"] = { '{"messages": [{"role": "user", "content": "x"}]}', "the tokenizer's files have no chat template" },
  } do
    it("refuses " .. label, function()
      local text = message(examples, row[1], row[3] and { chat = row[3] })
      assert.is_truthy(text:find(row[2], 1, true), text)
    end)
  end
end)

describe("ms.text.pack", function()
  local function sample()
    local lines = {}
    for k = 1, 23 do
      lines[k] = ('{"prompt": "question %d ", "completion": "%s"}'):format(k, ("answer "):rep(k % 5 + 1))
    end
    return examples(table.concat(lines, "\n"))
  end

  -- The mean loss of all learned tokens, their number, and the gradients of a small model.
  local function measured(model, rows)
    model:zero_grad()
    local sum, count = 0, 0
    for ids, given, n in rows:each(4) do
      local loss = model(ids, given) * n
      loss:backward()
      sum, count = sum + loss:item(), count + n
    end
    local grads = {}
    for name, p in model:named_parameters() do grads[name] = p.grad:clone() end
    return sum / count, count, grads
  end

  it("changes no loss and no gradient", function()
    ms.manual_seed(1)
    local model = ms.hf.create { architectures = { "LlamaForCausalLM" }, model_type = "llama", vocab_size = 300,
      hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 1,
      intermediate_size = 24 }
    model:to "float64"
    local list = sample()
    local packed, alone = ms.text.pack(list, { length = 96 }), ms.text.pack(list, { length = 96, separate = true })
    assert.is_true(packed.count < 12 and alone.count == 23)
    assert.are.equal(packed.learned, alone.learned)
    local loss, n, grads = measured(model, packed)
    local right, also, expected = measured(model, alone)
    assert.are.equal(n, also)
    assert.is_true(math.abs(loss - right) < 1e-9)
    for name, g in pairs(grads) do assert.is_true((g - expected[name]):abs():max():item() < 1e-6, name) end
  end)

  it("continues a long text in further rows, and cuts other examples", function()
    local list = examples('{"text": "' .. ("question "):rep(50) .. '"}')
    local n = #list[1].ids
    local rows = ms.text.pack(list, { length = 16 })
    assert.are.same({ n - 1, 0 }, { rows.learned, rows.cut })   -- every token but the first is predicted
    local seen = {}
    for ids, given in rows:each(1) do
      for t, target in ipairs(given.targets:flatten():tolist()) do
        if target ~= -100 then seen[#seen + 1] = { ids:flatten():tolist()[t], target } end
      end
    end
    assert.are.equal(n - 1, #seen)
    local cut = ms.text.pack(sample(), { length = 8, batch = 2 })
    assert.is_true(cut.cut > 0)
  end)

  it("takes each row once an epoch, and the same steps for every number of ranks", function()
    local list = sample()
    local whole = ms.text.pack(list, { length = 64, batch = 4, seed = 3 })
    local parts = {}
    for rank = 0, 2 do parts[rank] = ms.text.pack(list, { length = 64, batch = 4, seed = 3, rank = rank, world = 3 }) end
    local seen = {}
    for step = 1, whole.count do
      local ids, _, n, total = whole:step(step)
      local all, sum = {}, 0
      for rank = 0, 2 do
        for part = 1, 2 do
          local some, _, here, same = parts[rank]:step(step, part, 2)
          assert.are.equal(total, same)
          sum = sum + here
          for _, row in ipairs(some and some:tolist() or {}) do all[#all + 1] = table.concat(row, " ") end
        end
      end
      local right = {}
      for k, row in ipairs(ids:tolist()) do right[k] = table.concat(row, " ") end
      assert.are.same({ right, n }, { all, sum })
      for _, key in ipairs(right) do seen[key] = (seen[key] or 0) + 1 end
    end
    for _, times in pairs(seen) do assert.are.equal(4, times) end       -- 4 epochs
  end)

  it("leaves examples out that lose all that they teach", function()
    local list = examples '{"prompt": "question answer user assistant answer", "completion": "x"}\n{"prompt": "a", "completion": "b"}'
    local rows = ms.text.pack(list, { length = 4 })
    assert.are.same({ 1, 1, 1 }, { rows.cut, #rows.lost, rows.count })
  end)

  it("leaves out, and counts, examples that teach nothing", function()
    local rows = ms.text.pack({ { ids = { 1, 2, 3 }, learned = { false, false, false } },
      { ids = { 4, 5 }, learned = { false, true } } }, { length = 8 })
    assert.are.same({ 0, 1, 1, 1 }, { rows.cut, #rows.lost, rows.learned, rows.count })
  end)

  it("refuses rows that learn nothing", function()
    for _, case in ipairs {
      { '{"prompt": "question answer user assistant", "completion": "x"}', "of 1 example: rows of 2 tokens end before it; it needs %d+ or more$" },
      { '{"prompt": "question", "completion": ""}', "of 1 example: no completion, and no message of the assistant, has a token$" },
    } do
      local list = examples(case[1])
      if case[2]:find "no completion" then list[1].learned = { false } end     -- a tokenizer without a token that ends texts
      local text = message(ms.text.pack, list, { length = 2 })
      assert.matches("^pack: nothing is learned " .. case[2], text)
      local needed = tonumber(text:match "needs (%d+)")
      if needed then
        assert.is_false(pcall(ms.text.pack, list, { length = needed - 1 }))
        assert.are.equal(1, ms.text.pack(list, { length = needed }).learned)
      end
    end
  end)
end)
