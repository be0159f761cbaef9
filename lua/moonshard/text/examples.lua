-- SPDX-License-Identifier: MIT
--- Texts to fine-tune on, as tokens, and which of them are learned.
local errors = require "moonshard.core.errors"
local chat = require "moonshard.text.chat"
local opts = require "moonshard.core.opts"
local tables = require "moonshard.data.tables"
local zlib = require "moonshard.data.zlib"
local TextTokenizer = require("moonshard.text.tokenizer").TextTokenizer

local M = {}

local WHO = "examples"

-- Tokens of `text`; learned are those that have a byte in one of the ranges, all without ranges.
local function tokens(tokenizer, text, special, ranges)
  local ids, more = tokenizer:encode(text, { special = special, offsets = true })
  local of, learned, at = ids:tolist(), {}, 1
  for k, range in ipairs(more.offsets:tolist()) do
    while ranges and ranges[at] and ranges[at][2] < range[1] do at = at + 1 end
    learned[k] = not ranges or ranges[at] ~= nil and range[2] >= range[1] and range[2] >= ranges[at][1]
  end
  return { ids = of, learned = learned }
end

-- Ends an example with the token that ends texts, which the model has to learn, also where the tokenizer has added it.
local function ended(example, tokenizer)
  local n = #example.ids
  if tokenizer.eos_id then
    if example.ids[n] ~= tokenizer.eos_id then n = n + 1 end
    example.ids[n], example.learned[n] = tokenizer.eos_id, true
  end
  return example
end

local function of_text(tokenizer, text) return ended(tokens(tokenizer, text, true), tokenizer) end

--- An example whose second part is learned.
function M.completion(tokenizer, prompt, completion)
  local text = prompt .. completion
  return tokens(tokenizer, text, true, { { #prompt + 1, #text } })
end

local function of_completion(tokenizer, prompt, completion)
  return ended(M.completion(tokenizer, prompt, completion), tokenizer)
end

local function of_messages(tokenizer, messages, format, who)
  local text, ranges = chat.render(tokenizer, format, messages, false, who)
  return tokens(tokenizer, text, false, ranges)
end

-- The messages of a prompt, a string or messages, and its answer.
local function with_answer(prompt, answer)
  local list = {}
  for k, m in ipairs(prompt) do list[k] = m end
  for _, m in ipairs(type(answer) == "table" and answer or { { role = "assistant", content = answer } }) do
    list[#list + 1] = m
  end
  return list
end

local FORMS = "'text', 'messages', 'prompt' and 'completion', or 'prompt', 'chosen' and 'rejected'"

-- Keys that say what an object is, beside 'prompt'.
local KINDS = { { "text" }, { "messages" }, { "completion" }, { "chosen", "rejected" } }

-- Raises if an object has keys of two kinds, of which one would be used.
local function expect_one_kind(o, where)
  local first
  for _, kind in ipairs(KINDS) do
    local own
    for _, key in ipairs(kind) do own = own or o[key] ~= nil and key end
    if own and first then errors.raise("%s has both '%s' and '%s', expected one of %s", where, first, own, FORMS) end
    first = first or own
  end
  if o.prompt ~= nil and (first == "text" or first == "messages") then
    errors.raise("%s has both '%s' and 'prompt', expected one of %s", where, first, FORMS)
  end
end

-- The example of one object; of preferences, its two: { chosen, rejected }.
local function of_object(tokenizer, o, format_of, where)
  expect_one_kind(o, where)
  local function answer(key)
    if type(o.prompt) == "table" or type(o[key]) == "table" then
      local prompt = type(o.prompt) == "table" and o.prompt or o.prompt and { { role = "user", content = o.prompt } } or {}
      return of_messages(tokenizer, with_answer(prompt, o[key]), format_of(), where)
    end
    opts.expect(o.prompt, opts.string, "%s: 'prompt'", where)
    opts.expect(o[key], opts.string, "%s: '%s'", where, key)
    return of_completion(tokenizer, o.prompt, o[key])
  end
  if o.chosen ~= nil and type(o.chosen) ~= type(o.rejected) and type(o.prompt) ~= "table" then
    errors.raise("%s: 'chosen' is %s, and 'rejected' is %s, expected two strings or two lists of messages", where,
      errors.kind(o.chosen), errors.kind(o.rejected))
  end
  if o.chosen ~= nil then return { chosen = answer "chosen", rejected = answer "rejected" } end
  if o.messages ~= nil then return of_messages(tokenizer, o.messages, format_of(), where) end
  if o.completion ~= nil then return answer "completion" end
  if o.text ~= nil then return of_text(tokenizer, opts.expect(o.text, opts.string, "%s: 'text'", where)) end
  errors.raise("%s has none of %s", where, FORMS)
end

--- Reads texts to fine-tune on. A file of JSON lines (.jsonl, .json) has an object a line: { text }, all of whose
--- tokens are learned; { prompt, completion }, strings or messages, of which the completion is learned; { messages },
--- of which the assistant's are learned; or { prompt, chosen, rejected }, for a loss on preferences. Any other file is one
--- text. Texts end with the tokenizer's eos_id; messages are tokens as TextTokenizer:apply_chat_template makes them.
--- Errors: an object without these keys; the message says which line.
---@param path string  of the file
---@param tokenizer TextTokenizer  makes the tokens
---@param given? { chat: string|table }  chat: the format of messages (default: what the tokenizer's files say)
---@return { ids: integer[], learned: boolean[], line: integer }[]  of preferences: { chosen, rejected, line }, the first
---   two such tables; line: number of the line in a file of JSON lines
function M.read(path, tokenizer, given)
  opts.expect(path, opts.string, "%s: the path", WHO)
  opts.need(getmetatable(tokenizer) == TextTokenizer, tokenizer, "a tokenizer", "%s: argument 2", WHO)
  local o = opts(WHO, given, { chat = opts.any })
  if not path:find "%.jsonl?$" then return { of_text(tokenizer, zlib.read_text(path, WHO)) } end
  local format
  local function format_of()
    if format then return format end
    format = chat.format(tokenizer, o.chat, WHO)
    for _, stop in ipairs(format.stops) do
      if not tokenizer:id(stop) then
        errors.raise("%s: the format ends answers with '%s', which is no token of this tokenizer", WHO, stop)
      end
    end
    return format
  end
  local list = {}
  local objects, lines = tables._json_lines(path, WHO, false)
  for k, object in ipairs(objects) do
    local where = ("%s: '%s', line %d"):format(WHO, path, lines[k])
    opts.need(type(object) == "table", object, "an object", "%s", where)
    if #object > 0 then errors.raise("%s is a list, expected an object in each line", where) end
    list[k] = of_object(tokenizer, object, format_of, where)
    list[k].line = lines[k]
    if (list[k].chosen ~= nil) ~= (list[1].chosen ~= nil) then
      errors.raise("%s is %s, the first one is not", where, list[k].chosen and "a preference" or "no preference")
    end
  end
  if #list == 0 then errors.raise("%s: '%s' has no object", WHO, path) end
  return list
end

return M
