-- SPDX-License-Identifier: MIT
--- ms.text.chat, and scripts/generate with a model's folder.
local ffi = require "ffi"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

if not pcall(ffi.load, "libpcre2-8.so.0") then return pending "this system has no PCRE2" end

local tokenizer = ms.text.train_bpe("to be or not to be that is the question", { vocab_size = 280,
  special_tokens = { "<|im_start|>", "<|im_end|>" } })

local function random_model(window)
  ms.manual_seed(3)
  local model = ms.hf.create { model_type = "mistral", vocab_size = tokenizer.vocab_size, hidden_size = 32,
    intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2,
    sliding_window = window or 4096 }
  for _, p in ipairs(model:parameters()) do
    if p.ndim == 2 then ms.nn.init.normal_(p, 0, 0.4) end
  end
  return model
end

local OPTIONS = { chat = "chatml", system = "Be brief.", max_new_tokens = 15, seed = 1, temperature = 1, top_k = 0 }

local function options(more)
  local o = {}
  for key, value in pairs(OPTIONS) do o[key] = value end
  for key, value in pairs(more or {}) do o[key] = value end
  return o
end

describe("a chat", function()
  it("answers as a text that is generated after the chat's messages, with or without what its cache holds", function()
    for _, window in ipairs { 4096, 9 } do
      local model = random_model(window)
      local chat = ms.text.chat(model, tokenizer, options())
      local messages = { { role = "system", content = "Be brief." } }
      for turn = 1, 4 do
        local text = ("to be %d"):format(turn)
        messages[#messages + 1] = { role = "user", content = text }
        local ids = tokenizer:apply_chat_template(messages, { chat = "chatml", add_generation_prompt = true })
        local stop = tokenizer:id "<|im_end|>"
        local _, new = model:generate(ids, { max_new_tokens = 15, seed = 1, temperature = 1, top_k = 0,
          eos_token_id = stop })
        if new[1][#new[1]] == stop then new[1][#new[1]] = nil end
        local answer = tokenizer:decode(new[1])
        if turn % 2 == 0 then
          local parts = {}
          for piece in chat:pieces(text) do parts[#parts + 1] = piece end
          assert.are.equal(answer, table.concat(parts))
        else
          assert.are.equal(answer, chat:say(text))
        end
        messages[#messages + 1] = { role = "assistant", content = answer }
        assert.are.same(messages, chat.messages)
      end
      -- A script may go back and say something else.
      chat.messages = { messages[1] }
      local first = chat:say "to be 1"
      assert.are.equal(messages[3].content, first)
      -- A loop that is left keeps the part of the answer.
      local part = chat:pieces "to be 2"()
      chat:say "to be 3"
      assert.are.equal(part, chat.messages[5].content)
      assert.are.equal("TextChat(1 message)", tostring(chat:reset()))
    end
  end)

  it("warns if nothing ends its answers", function()
    local bare = ms.text.train_bpe("to be", { vocab_size = 256 })
    local format = { message = function(m) return m.role .. ": ", m.content, "\n" end }
    local list, chat = ms.catch_warnings(ms.text.chat, random_model(), bare,
      options { chat = format, max_new_tokens = 3 })
    assert.matches("nothing ends an answer before its 3 tokens", list[1])
    assert.are.equal(3, #bare:encode(chat:say "be"):tolist())
    assert.are.equal(0, #(ms.catch_warnings(ms.text.chat, random_model(), bare, options { chat = format,
      eos_token_id = 3 })))
  end)

  it("refuses wrong calls, and leaves the conversation as it was", function()
    local model = random_model()
    local t5 = ms.hf.create { model_type = "t5", vocab_size = 280, d_model = 8, d_kv = 4, d_ff = 8, num_layers = 1,
      num_heads = 2 }
    for _, row in ipairs {
      { function() ms.text.chat(t5, tokenizer, options()) end, "chat: T5ForConditionalGeneration is no causal language" },
      { function() ms.text.chat(model, tokenizer) end, "no chat template" },
      { function() ms.text.chat(model, tokenizer, { chat = "llama3" }) end, "'<|eot_id|>', which is no token" },
      { function() ms.text.chat(model, tokenizer, options { top = 3 }) end, "unknown option 'top'" },
      { function() ms.text.chat(model, tokenizer, options { sytem = "x" }) end, "unknown option 'sytem'; did you mean 'system'? (accepted: attention_mask, bad_words_ids, begin_suppress_tokens, cache_length, chat, " },
      { function() ms.text.chat(model, tokenizer, options { system = 3 }) end, "chat: option 'system' is a number (3), expected a string" },
      { function() ms.text.chat(model, {}) end, "a tokenizer" },
      { function() ms.text.chat(model, tokenizer, options()):say(3) end, "the message is a number" },
    } do
      local ok, err = pcall(row[1])
      assert.is_false(ok)
      assert.is_truthy(err:find(row[2], 1, true), err)
      assert.matches("conversation_spec.lua:%d+: ", err)
    end
  end)
end)

describe("scripts/generate.lua --model", function()
  it("continues a prompt, and talks, without prompts where the input is no terminal", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    ms.hf.save(random_model(), folder)
    tokenizer:save(folder .. "/tokenizer.json")
    local function generate(o, ...)
      o.args = { "--model", folder, ... }
      return ranks.run(0, process.root .. "/scripts/generate.lua", o)
    end
    local a = generate({}, "--prompt", "to be", "--length", 8, "--temperature", 0)
    assert.are.equal(0, a.code, a.stderr)
    local _, new = ms.hf.load(folder):generate(tokenizer:encode "to be", { max_new_tokens = 8 })
    local decoder, parts = tokenizer:stream(), { "to be" }
    for _, id in ipairs(new[1]) do parts[#parts + 1] = decoder:push(id) end
    assert.are.equal(table.concat(parts) .. decoder:finish() .. "\n", a.stdout)
    local b = generate({}, "--chat")
    assert.are.equal(2, b.code)
    assert.matches("no chat template; pass %-%-chat with one of 'chatml'.*[a-z0-9.]'\n$", b.stderr)
    assert.are.equal(2, generate({}, "--from", folder).code)
    local c = generate({ stdin = "to be\n\nor not\n" }, "--chat", "chatml", "--length", 5, "--temperature", 0)
    assert.are.equal(0, c.code, c.stderr)
    local chat = ms.text.chat(ms.hf.load(folder), tokenizer, { chat = "chatml", max_new_tokens = 5 })
    assert.are.equal(chat:say "to be" .. "\n" .. chat:say "or not" .. "\n", c.stdout)
  end)
end)
