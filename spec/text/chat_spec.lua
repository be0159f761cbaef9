-- SPDX-License-Identifier: MIT
--- apply_chat_template: the formats beside the models' own Jinja templates, rendered by jinja2.
local cjson = require "cjson"
local ffi = require "ffi"
local message = require "spec.support.message"
local formats = require "moonshard.text.chat_formats".FORMATS
local ms = require "moonshard"
local process = require "spec.support.process"

if not pcall(ffi.load, "libpcre2-8.so.0") then return pending "this system has no PCRE2" end

local DATA = process.root .. "/spec/golden/data/"
local golden = cjson.decode(process.read(DATA .. "chats.json"))
local TOKENS = { bos_token = "<s>", eos_token = "</s>" }
local HELLO = { { role = "user", content = "Hello" } }

-- A model's folder whose tokenizer_config.json has a chat template; files: others of the folder, by name.
local function folder_of(template, files)
  local folder = process.temp_folder()
  local config = { bos_token = TOKENS.bos_token, eos_token = TOKENS.eos_token, chat_template = template }
  process.write(folder .. "/tokenizer.json", process.read(DATA .. "tokenizers/llama2.json"))
  process.write(folder .. "/tokenizer_config.json", cjson.encode(config))
  for name, text in pairs(files or {}) do process.write(folder .. "/" .. name, text) end
  return folder
end

local function text_of(t, messages, given)
  local o = { tokenize = false }
  for key, value in pairs(given or {}) do o[key] = value end
  return t:apply_chat_template(messages, o)
end

describe("apply_chat_template", function()
  it("has the formats that docs/data.md lists, with their end tokens and messages of the system", function()
    local listed = {}
    for name, stop, system in process.read(process.root .. "/docs/data.md"):gmatch "\n| `([%l%d.]+)` | [^\n]- | ([^\n]-) | ([^\n]-) |" do
      listed[name] = true
      local format = formats[name]
      assert.are.equal(format.stops[1] or "eos_id", (stop:match "`([^`]*)`$":gsub("\\|", "|")))
      assert.are.equal(format.system, system:match "^by default: (.*)$")
      assert.are.equal(format.merges == false, system == "is refused")
      assert.are.equal(type(format.merges) == "function", system:find "in the first message" ~= nil)
    end
    for name in pairs(formats) do assert.is_true(listed[name], name) end
  end)

  for name, case in ms.sorted_pairs(golden.formats) do
    it("renders chats as the template of " .. name, function()
      local t = ms.text.tokenizer(folder_of(case.template))
      for k, messages in ipairs(golden.chats) do
        for prompt = 0, 1 do
          local given = { add_generation_prompt = prompt == 1 }
          local right = case.texts[2 * k - 1 + prompt]
          if right == cjson.null or right == "" then    -- Llama 2's leaves a system message out that stands alone
            assert.has.errors(function() text_of(t, messages, given) end)
          else
            assert.are.equal(right, text_of(t, messages, given))
            given.chat = name
            assert.are.equal(right, text_of(t, messages, given))
          end
        end
      end
    end)
  end

  it("trims the white space of Unicode, as Jinja does, in linear time", function()
    local t = ms.text.tokenizer(folder_of())
    local content = "\194\160\226\128\131hi" .. (" "):rep(20000) .. "\227\128\128"
    assert.are.equal("<start_of_turn>user\nhi<end_of_turn>\n",
      (text_of(t, { { role = "user", content = content } }, { chat = "gemma" }):gsub("^<s>", "")))
  end)

  it("reads a template from its own file, or from a list, with lines' ends in its strings", function()
    local jinja = golden.formats.chatml.template:gsub("\\n", "\n")
    local right = "<|im_start|>user\nHello<|im_end|>\n"
    local other = ms.text.tokenizer(folder_of("{{ other }}", { ["chat_template.jinja"] = jinja }))
    assert.are.equal(right, text_of(other, HELLO))
    local list = ms.text.tokenizer(folder_of {
      { name = "tools", template = "{{ x }}" }, { name = "default", template = jinja },
    })
    assert.are.equal(right, text_of(list, HELLO))
  end)

  it("gives the tokens of the text, and those that the assistant wrote", function()
    local t = ms.text.tokenizer(folder_of(golden.formats.llama2.template))
    local chat = { HELLO[1], { role = "assistant", content = "the Software" }, { role = "user", content = "more" },
      { role = "assistant", content = "a" } }
    local ids, mask = t:apply_chat_template(chat, { assistant_mask = true })
    assert.are.same(t:encode(text_of(t, chat), { special = false }):tolist(), ids:tolist())
    local wrote = {}
    for k, id in ipairs(ids:tolist()) do
      if mask:tolist()[k] then wrote[#wrote + 1] = t:token(id) end
    end
    assert.are.equal("▁the▁Software▁</s>▁a▁</s>", table.concat(wrote))
  end)

  it("says which tokens end an answer, but not what follows them", function()
    local t = ms.text.tokenizer(folder_of())
    local _, mask = t:apply_chat_template({ HELLO[1], { role = "assistant", content = "a" } }, { assistant_mask = true,
      chat = { message = function(m) return m.role, m.content, "</s>END" end, stops = { "</s>" } } })
    local learned = mask:tolist()
    assert.is_false(learned[#learned])
  end)

  it("takes a format of the script's own", function()
    local t = ms.text.tokenizer(folder_of "{{ other }}")
    local own = { message = function(m, k, of) return k .. m.role .. ":", m.content, of.eos end, reply = "R" }
    assert.are.equal("1user:Hello</s>R", text_of(t, HELLO, { chat = own, add_generation_prompt = true }))
  end)

  local t
  lazy_setup(function() t = ms.text.tokenizer(folder_of "{{ '<|im_start|>' + tools }}") end)
  for label, case in ms.sorted_pairs {
    ["an unknown template"] = { HELLO, nil, "tokenizer_config%.json' is a Jinja program .* %(it has '<|im_start|>', as 'chatml'%)" },
    ["an unknown format"] = { HELLO, "gema", "option 'chat' is a string %('gema'%), expected 'chatml', 'gemma'" },
    ["a format without a function"] = { HELLO, { reply = "x" }, "option 'chat': option 'message' is missing" },
    ["a function that returns one text"] = { HELLO, { message = function() return "x" end }, "result 2 of the format's function 'message' is nil" },
    ["a role that does not exist"] = { { { role = "human", content = "x" } }, "chatml", "role of message 1 is a string %('human'%)" },
    ["a message without content"] = { { { role = "user" } }, "chatml", "content of message 1 is nil, expected a string" },
    ["no message"] = { {}, "chatml", "argument 1 is an empty list" },
    ["turns that do not alternate"] = { { HELLO[1], HELLO[1] }, "gemma", "turn 2 is of the user" },
    ["a system message where there is none"] = { { { role = "system", content = "x" } }, "mistral", "no system messages" },
  } do
    it("refuses " .. label, function()
      local text = message(function() text_of(t, case[1], { chat = case[2] }) end)
      assert.is_truthy(text:find(case[3]), text)
    end)
  end
end)
