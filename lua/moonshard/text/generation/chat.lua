-- SPDX-License-Identifier: MIT
--- Conversations with a model: ms.text.chat.
local caches = require "moonshard.text.generation.cache"
local errors = require "moonshard.core.errors"
local generation = require "moonshard.text.generation"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local templates = require "moonshard.text.chat"
local a_module = require("moonshard.nn.module.register").a_module

---@class TextChat
---@field messages { role: string, content: string }[]  the conversation so far; a script may change it
local TextChat = { __name = "TextChat" }
TextChat.__index = TextChat

local ACCEPTED = { chat = opts.any, system = opts.string }
for name, kind in pairs(generation._accepted) do ACCEPTED[name] = kind end

--- Begins a conversation, in the format of apply_chat_template. Answers end with the format's tokens, or those of
--- eos_token_id. A conversation beyond the model's positions loses its beginning, the system's message with it. Special
--- tokens in a message become tokens, not text, as in transformers, so that it can end its turn: refuse a message of
--- others of which tokenizer:encode(text) is not the same with parse = false.
---@param model Module  a causal language model that was trained on chats
---@param tokenizer TextTokenizer  the model's
---@param given? GenerateOptions  those of text.stream, and chat: the format (default: what the tokenizer's files say);
---   system: the system's message, with which the conversation begins. max_new_tokens: of an answer (default 512)
---@return TextChat
local function chat(model, tokenizer, given)
  opts.expect(model, a_module, "chat: the model")
  generation._expect_causal("chat", model)
  opts.need(type(tokenizer) == "table" and tokenizer.apply_chat_template, tokenizer, "a tokenizer of ms.text.tokenizer",
    "chat: argument 2")
  given = given or {}
  opts.need(opts.is(given), given, "options by name", "chat: argument 3")
  local o = { max_new_tokens = 512, num_beams = 1, num_return_sequences = 1, tokenizer = tokenizer }
  for key, value in pairs(given) do o[key] = value end
  local eos_list = generation._complete("chat", model, o, ACCEPTED).eos_list
  o.chat, o.system = nil, nil
  local format = templates.format(tokenizer, given.chat, "chat")
  local ends = { tokenizer.eos_id }
  for _, id in ipairs(eos_list) do ends[#ends + 1] = id end
  for _, stop in ipairs(format.stops) do
    local id = tokenizer:id(stop)
    if not id then errors.raise("chat: the format ends answers with '%s', which is no token of this tokenizer", stop) end
    ends[#ends + 1] = id
  end
  if #ends == 0 then
    log.warn(("chat: nothing ends an answer before its %d tokens: the format, the tokenizer and the model name no "
      .. "token that does; pass option 'eos_token_id'"):format(o.max_new_tokens))
  end
  o.eos_token_id = ends
  local self = setmetatable({ _model = model, _tokenizer = tokenizer, _options = o, _chat = given.chat,
    _system = given.system, _cache = caches.new(given.cache_length), _known = {} }, TextChat)
  return self:reset()
end

--- Forgets the conversation, except for the message of the system.
---@return TextChat self
function TextChat:reset()
  self._open = nil
  self.messages = { self._system and { role = "system", content = self._system } or nil }
  return self
end

-- Leaves in the cache what it has in common with the new text.
local function keep_prefix(self, ids)
  local cache, n = self._cache, 0
  local most = math.min(cache.length, #ids - 1)
  while n < most and self._known[n + 1] == ids[n + 1] do n = n + 1 end
  local context = self._model.context
  if context and #ids + self._options.max_new_tokens > context or not cache:truncate(n) then cache:release() end
end

--- Says something: appends the user's message, and yields the answer's text in pieces, as it is generated. The answer
--- is appended, too, when it has ended, or what there is of it if the loop is left.
---@param text string  the user's message
---@return fun(): string?  for loops
function TextChat:pieces(text)
  opts.need(getmetatable(self) == TextChat, self, "a chat (call it with a colon)", "chat:pieces: self")
  opts.expect(text, opts.string, "chat:pieces: the message")
  local messages, o = self.messages, self._options
  if self._open then self._open() end                    -- the loop over the last answer was left
  messages[#messages + 1] = { role = "user", content = text }
  local ok, ids = pcall(self._tokenizer.apply_chat_template, self._tokenizer, messages, { chat = self._chat,
    add_generation_prompt = true })
  if not ok then
    messages[#messages] = nil
    error(ids, 0)
  end
  ids = ids:tolist()
  keep_prefix(self, ids)
  local known, ends = {}, {}
  for k, id in ipairs(ids) do known[k] = id end
  for _, id in ipairs(o.eos_token_id) do ends[id] = true end
  self._known = known
  local next_id = generation._stream("chat", self._model, { ids }, o, self._cache)
  local decoder, parts, ended = self._tokenizer:stream(), {}, false
  function self._open()
    ended, self._open = true, nil
    messages[#messages + 1] = { role = "assistant", content = table.concat(parts) }
  end
  return function()
    while not ended do
      local done, id = pcall(next_id)
      if not done then                                  -- the message was not answered
        messages[#messages], ended, self._open = nil, true, nil
        error(id, 0)
      end
      local piece
      if id then
        known[#known + 1] = id
        piece = not ends[id] and decoder:push(id) or ""
      else
        piece = decoder:finish()
      end
      parts[#parts + 1] = piece
      if not id then self._open() end
      if piece ~= "" then return piece end
    end
  end
end

--- Says something and returns the answer.
---@param text string  the user's message
---@return string
function TextChat:say(text)
  local parts = {}
  for piece in self:pieces(text) do parts[#parts + 1] = piece end
  return table.concat(parts)
end

function TextChat:__tostring() return ("TextChat(%s)"):format(errors.count(#self.messages, "message")) end

return chat
