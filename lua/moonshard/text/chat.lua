-- SPDX-License-Identifier: MIT
--- Messages to tokens, as the model's chat format says: TextTokenizer:apply_chat_template.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local formats = require "moonshard.text.chat_formats"
local opts = require "moonshard.core.opts"
local tokenizer = require "moonshard.text.tokenizer"

local M = {}

local TextTokenizer = tokenizer.TextTokenizer
local WHO = "apply_chat_template"

local EXAMPLE = [[{ message = function(m) return "<|" .. m.role .. "|>\n", m.content, "</s>\n" end, reply = "<|assistant|>\n", stops = { "</s>" } }]]

local function names()
  local list = {}
  for name in pairs(formats.FORMATS) do list[#list + 1] = ("'%s'"):format(name) end
  table.sort(list)
  return table.concat(list, ", ")
end

-- The format that the tokenizer's files name; an error if they name none that is known.
local function format_of_files(self, who)
  local template = self._o.chat_template
  local advice = ("pass option 'chat': %s, or a table such as %s"):format(names(), EXAMPLE)
  if not template then errors.raise("%s: the tokenizer's files have no chat template; %s", who, advice) end
  -- In a string of Jinja a line's end is written as such, or as "\n".
  local name = formats.TEMPLATES[(template.text:gsub("\n", "\\n"))]
  if name then return formats.FORMATS[name] end
  local like = ""
  for _, mark in ipairs(formats.MARKS) do
    if template.text:find(mark[1], 1, true) then
      like = (" (it has '%s', as '%s')"):format(mark[1], mark[2])
      break
    end
  end
  errors.raise("%s: the chat template of '%s' is a Jinja program that Moonshard does not know%s; read it and %s", who,
    template.file, like, advice)
end

local FIELDS = { message = opts.option(opts.fn, opts.required), reply = "", stops = opts.option(opts.table, {}),
  merges = opts.any, takes_turns = false, system = opts.string }

--- A chat format: by its name, a table, or, for nil, what the tokenizer's files say.
---@param self TextTokenizer
---@param chat string|table|nil
---@param who string  the function that errors name
---@return table
function M.format(self, chat, who)
  if chat == nil then return format_of_files(self, who) end
  if opts.is(chat) then return opts(who .. ": option 'chat'", chat, FIELDS) end
  local format = formats.FORMATS[chat]
  opts.need(format, chat, names() .. ", or a table", "%s: option 'chat'", who)
  return format
end

--- The Jinja template of a format, for chat_template.jinja in a model's folder; nil for a format that has no name.
---@param chat string|table
---@return string?
function M.template(chat)
  for text, name in pairs(formats.TEMPLATES) do
    if name == chat then return text end
  end
end

local ROLES = { system = true, user = true, assistant = true }

-- Checks messages; returns them as the format shows them.
local function turns(format, messages, who)
  opts.need(opts.is_plain(messages) and #messages > 0, messages, "a list of { role, content }", "%s: argument 1", who)
  local list = {}
  for k, m in ipairs(messages) do
    opts.need(opts.is_plain(m), m, "a table { role, content }", "%s: message %d", who, k)
    opts.need(ROLES[m.role], m.role, "'system', 'user' or 'assistant'", "%s: role of message %d", who, k)
    opts.expect(m.content, opts.string, "%s: content of message %d", who, k)
    list[k] = m
  end
  if list[1].role == "system" and format.merges ~= nil then
    if not format.merges then
      errors.raise("%s: message 1 is of the system, but this format has no system messages", who)
    end
    if not (list[2] and list[2].role == "user") then
      errors.raise("%s: message 1 is of the system, so message 2 must be the user's, with which this format merges it", who)
    end
    list[2] = { role = "user", content = format.merges(list[1].content, list[2].content) }
    table.remove(list, 1)
  elseif format.system and list[1].role ~= "system" then
    table.insert(list, 1, { role = "system", content = format.system })
  end
  for k, m in ipairs(format.takes_turns and list or {}) do
    if m.role ~= (k % 2 == 1 and "user" or "assistant") then
      errors.raise("%s: in this format user and assistant take turns, and the user begins, but turn %d is of the %s", who,
        k, m.role)
    end
  end
  return list
end

-- The length of the beginning of an answer's last part that the model writes itself: its end token.
local function written(after, format, of)
  for _, stop in ipairs(format.stops) do
    if after:sub(1, #stop) == stop then return #stop end
  end
  local at, to = after:find(of.eos, 1, true)
  return of.eos ~= "" and at and to or 0
end

--- The text of a chat, and which bytes of it the assistant wrote.
---@return string text
---@return integer[][] ranges  first and last byte of each answer, with the token that ends it
function M.render(self, format, messages, reply, who)
  local function token(id) return id and self:token(id) or "" end
  local of = { bos = token(self.bos_id), eos = token(self.eos_id) }
  local parts, ranges, n = {}, {}, 0
  local list = turns(format, messages, who)
  for k, m in ipairs(list) do
    local three = { format.message(m, k, of) }
    for part = 1, 3 do
      parts[#parts + 1] = opts.expect(three[part], opts.string, "%s: result %d of the format's function 'message'", who,
        part)
    end
    local before, content, after = unpack(three)
    if m.role == "assistant" then
      ranges[#ranges + 1] = { n + #before + 1, n + #before + #content + written(after, format, of) }
    end
    n = n + #before + #content + #after
  end
  if reply then parts[#parts + 1] = format.reply end
  return table.concat(parts), ranges
end

--- The tokens of a chat, in the format on which the model was trained: that of the tokenizer's files
--- (tokenizer_config.json or chat_template.jinja), if their template is one that Moonshard knows, or option 'chat':
--- "chatml", "qwen2", "qwen2.5", "llama2", "llama3", "gemma", "mistral", or a table { message = function(m, k, of),
--- reply, stops }, whose function returns the texts before a message's content, the content, and after it. Errors: an
--- unknown template; roles that the format does not have.
---@param messages { role: "system"|"user"|"assistant", content: string }[]  the chat, at least one message
---@param given? { chat: string|table, add_generation_prompt: boolean, tokenize: boolean, assistant_mask: boolean }  chat: the format; add_generation_prompt: ends with the beginning of an answer (default false); tokenize: false returns the text (default true); assistant_mask: also says which tokens the assistant wrote (default false)
---@return Tensor|string ids  int64 [n], ids from 0; the text, with tokenize = false
---@return Tensor? mask  bool [n]: tokens of answers, with those that end them
function TextTokenizer:apply_chat_template(messages, given)
  opts.need(getmetatable(self) == TextTokenizer, self, "a tokenizer (call it with a colon)", "%s: self", WHO)
  local o = opts(WHO, given,
    { chat = opts.any, add_generation_prompt = false, tokenize = true, assistant_mask = false })
  local text, ranges = M.render(self, M.format(self, o.chat, WHO), messages, o.add_generation_prompt, WHO)
  if not o.tokenize then return text end
  if not o.assistant_mask then return self:encode(text, { special = false }) end
  local ids, more = self:encode(text, { special = false, offsets = true })
  local mask, at = {}, 1
  for k, range in ipairs(more.offsets:tolist()) do
    while ranges[at] and ranges[at][2] < range[1] do at = at + 1 end
    mask[k] = ranges[at] ~= nil and range[2] >= ranges[at][1] and range[1] <= ranges[at][2]
  end
  return ids, create.tensor(mask, { dtype = "bool" })
end

return M
