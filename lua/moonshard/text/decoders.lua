-- SPDX-License-Identifier: MIT
--- Decoders: from tokens to text. A decoder is fn(tokens): tokens, whose concatenation is the text.
local bytes = require "moonshard.text.byte_level"
local opts = require "moonshard.core.opts"
local regexes = require "moonshard.text.regex"
local splitters = require "moonshard.text.splitters"

local M = {}

local kinds = {}

-- A decoder that changes each token: fn(token, k) returns the new one.
local function each(fn)
  return function(tokens)
    local out = {}
    for k, token in ipairs(tokens) do out[k] = fn(token, k) end
    return out
  end
end

local function plain(s) return (s:gsub("%p", "%%%0")) end

function kinds.ByteLevel() return each(function(token) return bytes.of(token) or token end) end
function kinds.Fuse() return function(tokens) return { table.concat(tokens) } end end

function kinds.ByteFallback()
  return each(function(token)
    local hex = #token == 6 and token:match "^<0x(%x%x)>$"
    return hex and string.char(tonumber(hex, 16)) or token
  end)
end

function kinds.Replace(node)
  local pattern, is_regex = node:pattern "pattern"
  local content = node:get("content", opts.string, true)
  local regex = splitters.regex_of(node, "pattern", is_regex and pattern or regexes.literal(pattern))
  return each(function(token)
    local out = {}
    splitters.each(regex, token, function(i, j, matches) out[#out + 1] = matches and content or token:sub(i, j) end)
    return table.concat(out)
  end)
end

function kinds.Strip(node)
  local sign = node:get("content", opts.string, true)
  local from, to = node:get("start", opts.whole_from(0)) or 0, node:get("stop", opts.whole_from(0)) or 0
  return each(function(token)
    for _ = 1, from do
      if token:sub(1, #sign) ~= sign then break end
      token = token:sub(#sign + 1)
    end
    for _ = 1, to do
      if token:sub(-#sign) ~= sign then break end
      token = token:sub(1, -#sign - 1)
    end
    return token
  end)
end

function kinds.Metaspace(node)
  local sign = node:get("replacement", opts.string, true)
  local scheme = node:one_of("prepend_scheme", { "always", "never", "first" }) or "always"
  local prepends = scheme ~= "never" and node:get("add_prefix_space", opts.boolean) ~= false
  return each(function(token, k)
    return (token:gsub(plain(sign), k == 1 and prepends and "" or " "))      -- of the first token, all, as in tokenizers
  end)
end

local CLEAN = { { " .", "." }, { " ?", "?" }, { " !", "!" }, { " ,", "," }, { " ' ", "'" }, { " n't", "n't" },
  { " 'm", "'m" }, { " do not", " don't" }, { " 's", "'s" }, { " 've", "'ve" }, { " 're", "'re" } }

local function clean(token)
  for _, pair in ipairs(CLEAN) do token = token:gsub(plain(pair[1]), pair[2]) end
  return token
end

function kinds.WordPiece(node)
  local prefix, cleans = node:get("prefix", opts.string) or "##", node:get("cleanup", opts.boolean) ~= false
  return each(function(token, k)
    if k > 1 then token = token:sub(1, #prefix) == prefix and token:sub(#prefix + 1) or " " .. token end
    return cleans and clean(token) or token
  end)
end

function kinds.BPEDecoder(node)
  local suffix = plain(node:get("suffix", opts.string) or "</w>")
  return function(tokens)
    local out = {}
    for k, token in ipairs(tokens) do out[k] = token:gsub(suffix, k < #tokens and " " or "") end
    return out
  end
end

--- The decoder of a node of tokenizer.json. Without a node, tokens are words with spaces between them.
---@param node? table
---@return fun(tokens: string[]): string[]
---@return boolean is_bytes  the decoder is ByteLevel
function M.read(node)
  if not node then return function(tokens) return { table.concat(tokens, " ") } end, false end
  local kind = node:get("type", opts.string, true)
  if kind == "Sequence" then
    local list = {}
    for _, of in ipairs(node:list("decoders", true)) do list[#list + 1] = M.read(of) end
    return function(tokens)
      for _, fn in ipairs(list) do tokens = fn(tokens) end
      return tokens
    end, false
  end
  if not kinds[kind] then node:fail("type", ("is '%s', which Moonshard does not have"):format(kind)) end
  return kinds[kind](node), kind == "ByteLevel"
end

return M
