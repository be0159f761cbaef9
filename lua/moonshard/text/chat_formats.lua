-- SPDX-License-Identifier: MIT
--- Chats as the text that a model was trained on. A format is a table:
---   message   (m, k, of): the text before message m's content, the content, the text after it
---   reply     the text with which an answer begins
---   stops     texts, each one token, that end an answer
---   merges?   (system, content): the first user message with the system message in it, for formats without a system's
---             turn; false: system messages are refused
---   takes_turns?  user and assistant alternate, and the user begins
---   system?   the system message of chats that begin with another
--- of: { bos, eos }: the tokenizer's tokens, "" where there is none.
local M = {}

-- White space as Jinja's trim and strip see it, which is that of Unicode.
local SPACE = {}
for _, c in ipairs { "\t", "\n", "\v", "\f", "\r", "\28", "\29", "\30", "\31", " ", "\194\133", "\194\160",
  "\225\154\128", "\226\128\168", "\226\128\169", "\226\128\175", "\226\129\159", "\227\128\128" } do SPACE[c] = true end
for k = 0, 10 do SPACE["\226\128" .. string.char(128 + k)] = true end

local function trim(s)
  local first, last = 1, #s
  local function space(from, to) return first <= last and SPACE[s:sub(from, to)] end
  while true do
    local n = space(first, first) and 1 or space(first, first + 1) and 2 or space(first, first + 2) and 3
    if not n then break end
    first = first + n
  end
  while true do
    local n = space(last, last) and 1 or space(last - 1, last) and 2 or space(last - 2, last) and 3
    if not n then break end
    last = last - n
  end
  return s:sub(first, last)
end

local function chatml(m) return "<|im_start|>" .. m.role .. "\n", m.content, "<|im_end|>\n" end

local function chatml_with(system)
  return { message = chatml, reply = "<|im_start|>assistant\n", stops = { "<|im_end|>" }, system = system }
end

local function llama2(m, _, of)
  if m.role == "user" then return of.bos .. "[INST] ", trim(m.content), " [/INST]" end
  return " ", trim(m.content), " " .. of.eos
end

local function llama3(m, k, of)
  return (k == 1 and of.bos or "") .. "<|start_header_id|>" .. m.role .. "<|end_header_id|>\n\n", trim(m.content),
    "<|eot_id|>"
end

local function gemma(m, k, of)
  local role = m.role == "assistant" and "model" or m.role
  return (k == 1 and of.bos or "") .. "<start_of_turn>" .. role .. "\n", trim(m.content), "<end_of_turn>\n"
end

local function mistral(m, k, of)
  local bos = k == 1 and of.bos or ""
  if m.role == "user" then return bos .. "[INST] ", m.content, " [/INST]" end
  return bos, m.content, of.eos
end

M.FORMATS = {
  chatml = chatml_with(),
  qwen2 = chatml_with "You are a helpful assistant.",
  ["qwen2.5"] = chatml_with "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
  llama2 = { message = llama2, reply = "", stops = {}, takes_turns = true,
    merges = function(system, content) return "<<SYS>>\n" .. system .. "\n<</SYS>>\n\n" .. content end },
  llama3 = { message = llama3, reply = "<|start_header_id|>assistant<|end_header_id|>\n\n", stops = { "<|eot_id|>" } },
  gemma = { message = gemma, reply = "<start_of_turn>model\n", stops = { "<end_of_turn>" }, takes_turns = true,
    merges = false },
  mistral = { message = mistral, reply = "", stops = {}, takes_turns = true, merges = false },
}

-- The parts of Jinja templates that come back.
local TURNS = "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
local CHATML = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

local function qwen(system)
  return "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n"
    .. system .. "<|im_end|>\\n' }}{% endif %}" .. CHATML
end

--- The templates of models that the formats serve, as their files have them. A template that differs in a character is
--- another one: what it does can be seen only by reading it.
M.TEMPLATES = {
  ["{% for message in messages %}" .. CHATML] = "chatml",
  [qwen(M.FORMATS.qwen2.system)] = "qwen2",
  [qwen(M.FORMATS["qwen2.5"].system)] = "qwen2.5",
  ["{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    .. TURNS .. "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"] = "llama2",
  ["{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"] = "llama3",
  ["{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    .. TURNS .. "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"] = "gemma",
  ["{{ bos_token }}{% for message in messages %}" .. TURNS
    .. "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"] = "mistral",
}

--- Texts by which a template is recognized that is not in the table, to name the format that may serve it.
M.MARKS = { { "by Alibaba Cloud", "qwen2.5" }, { "<|im_start|>", "chatml" }, { "<|start_header_id|>", "llama3" },
  { "<start_of_turn>", "gemma" }, { "<<SYS>>", "llama2" }, { "[INST]", "mistral" } }

return M
