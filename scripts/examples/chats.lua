-- SPDX-License-Identifier: MIT
--- What chapter 11 of the tutorial fine-tunes: base/, a small Llama with random weights in a folder of Hugging Face,
--- and chats.jsonl, what it should say. luajit scripts/examples/chats.lua [FOLDER]
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local folder = arg[1] or "."

local function write(name, text)
  local file = assert(io.open(folder .. "/" .. name, "w"))
  file:write(text)
  file:close()
end

-- Chats of two questions each.
local capitals = { { "France", "Paris" }, { "Italy", "Rome" }, { "Spain", "Madrid" }, { "Norway", "Oslo" },
  { "Greece", "Athens" }, { "Cuba", "Havana" }, { "Kenya", "Nairobi" }, { "Peru", "Lima" } }
local asked = { "What is the capital of %s?", "Name the capital of %s.", "%s: its capital?" }
local function turn(k, question)
  local country, city = unpack(capitals[k])
  return ('{"role": "user", "content": "%s"}, {"role": "assistant", "content": "The capital of %s is %s."}')
    :format(asked[question]:format(country), country, city)
end
local lines = {}
for first = 1, #capitals do
  for second = 1, #capitals do
    lines[#lines + 1] = ('{"messages": [%s, %s]}\n'):format(turn(first, second % 3 + 1), turn(second, first % 3 + 1))
  end
end
local text = table.concat(lines)
write("chats.jsonl", text)

-- The model, and a tokenizer that is learned from the chats.
ms.manual_seed(1)
local model = ms.hf.create { architectures = { "LlamaForCausalLM" }, model_type = "llama", vocab_size = 400, hidden_size = 64,
  intermediate_size = 128, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2 }
ms.hf.save(model, folder .. "/base")
ms.text.train_bpe(text, { vocab_size = 400, special_tokens = { "<|endoftext|>", "<|im_start|>", "<|im_end|>" } })
  :save(folder .. "/base/tokenizer.json")
write("base/tokenizer_config.json", '{"eos_token": "<|endoftext|>"}')
print(#lines .. " chats")
