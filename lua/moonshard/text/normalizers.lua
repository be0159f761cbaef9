-- SPDX-License-Identifier: MIT
--- Normalizers: they change a piece of text before it is divided into words. A normalizer is fn(piece): piece.
local base64 = require "moonshard.core.base64"
local charsmaps = require "moonshard.text.charsmap"
local engine = require "moonshard.core.ffi"
local opts = require "moonshard.core.opts"
local pieces = require "moonshard.text.pieces"
local regexes = require "moonshard.text.regex"
local splitters = require "moonshard.text.splitters"
local unicode = require "moonshard.text.unicode"

local M = {}

local function is_ascii(s) return engine.lib.ms_text_ascii(s, #s) == 1 end

-- A normalizer that replaces characters one by one: fn(code, char) returns the new text, or nil for the same one.
-- leads: a set of Lua's patterns, the first bytes of characters that may change.
local function by_character(leads, fn)
  return function(piece)
    local s, changes = piece.s, {}
    local at = s:find(leads)
    while at do
      local stop = pieces.char_end(s, at)
      local char = s:sub(at, stop)
      local new = (#char > 1 or char:byte() < 128) and fn(unicode.code(s, at, stop), char)
      if new and new ~= char then changes[#changes + 1] = { at, stop, new, at } end
      at = s:find(leads, stop + 1)
    end
    return pieces.change(piece, changes)
  end
end

local function chars_of(s)
  local list, at = {}, 1
  while at <= #s do
    local stop = pieces.char_end(s, at)
    list[#list + 1] = { at, stop, s:sub(at, stop) }
    at = stop + 1
  end
  return list
end

-- The characters that combine are normalized together. New ones count as coming from their character; where
-- characters were composed, the first counts as coming from the first character, the others from the last ones.
local function normal_form(form)
  return function(node)
    local clusters, composes = splitters.regex_of(node, "type", [[\X]]), form:sub(-1) == "C"
    return function(piece)
      if is_ascii(piece.s) then return piece end
      local changes = {}
      splitters.each(clusters, piece.s, function(i, j, matches)
        local cluster = piece.s:sub(i, j)
        if not matches or is_ascii(cluster) then return end
        local normal = unicode.normal(cluster, form, node.who)
        if normal == cluster then return end
        local old, new, single = chars_of(cluster), chars_of(normal), {}
        for k, c in ipairs(old) do single[k] = unicode.normal(c[3], form, node.who) end
        if table.concat(single) == normal then
          for k, c in ipairs(old) do changes[#changes + 1] = { i + c[1] - 1, i + c[2] - 1, single[k], i + c[1] - 1 } end
          return
        end
        changes[#changes + 1] = { i, j, "", i }
        for k, c in ipairs(new) do
          local from = k == 1 and 1 or composes and math.max(k, #old - #new + k) or k
          local of = old[math.min(from, #old)]
          changes[#changes + 1] = { j + 1, j, c[3], i + of[1] - 1 }
        end
      end)
      return pieces.change(piece, changes)
    end
  end
end

local function lowercase(node)
  local high = by_character("[A-Z\194-\244]", function(code, char)
    if code < 128 then return char:lower() end
    return unicode.lower(code, node.who)
  end)
  return function(piece)
    if is_ascii(piece.s) then
      if not piece.s:find "%u" then return piece end
      return { s = piece.s:lower(), at = piece.at, first = piece.first, last = piece.last, plain = piece.plain }
    end
    return high(piece)
  end
end

-- Leaves out marks: those of categories that begin with `category`.
local function strip_marks(node, category)
  local high = by_character("[\204-\244]", function(code)
    return code >= 0x300 and unicode.category(code, node.who):find(category, 1, true) == 1 and "" or nil
  end)
  return function(piece) return is_ascii(piece.s) and piece or high(piece) end
end

local kinds = { NFC = normal_form "NFC", NFD = normal_form "NFD", NFKC = normal_form "NFKC", NFKD = normal_form "NFKD",
  Lowercase = lowercase, StripAccents = function(node) return strip_marks(node, "M") end }

function kinds.Prepend(node)
  local text = node:get("prepend", opts.string, true)
  return function(piece) return #piece.s > 0 and pieces.change(piece, { { 1, 0, text, 1 } }) or piece end
end

function kinds.Replace(node)
  local pattern, is_regex = node:pattern "pattern"
  local content = node:get("content", opts.string, true)
  local regex = splitters.regex_of(node, "pattern", is_regex and pattern or regexes.literal(pattern))
  local plain, new = pattern:gsub("%p", "%%%0"), content:gsub("%%", "%%%%")
  return function(piece)
    if piece.plain and not is_regex then return { s = piece.s:gsub(plain, new), at = 0, plain = true } end
    if piece.plain then
      local s, out = piece.s, {}
      splitters.each(regex, s, function(i, j, matches) out[#out + 1] = matches and content or s:sub(i, j) end)
      return { s = table.concat(out), at = 0, plain = true }
    end
    local changes = {}
    splitters.each(regex, piece.s, function(i, j, matches)
      if matches then changes[#changes + 1] = { i, j, content, j } end
    end)
    return pieces.change(piece, changes)
  end
end

function kinds.Strip(node)
  local left, right = node:get("strip_left", opts.boolean) ~= false, node:get("strip_right", opts.boolean) ~= false
  local spaces = splitters.regex_of(node, "type", [[\A\s+|\s+\z]])
  return function(piece)
    local i, j = 1, #piece.s
    splitters.each(spaces, piece.s, function(a, b, matches)
      if matches and a == 1 and left then i = b + 1 end
      if matches and b == #piece.s and right then j = a - 1 end
    end)
    return pieces.part(piece, i, j)
  end
end

-- BERT's: control characters are left out, white space becomes spaces, Chinese characters become words.
local function is_chinese(c)
  return c >= 0x4e00 and c <= 0x9fff or c >= 0x3400 and c <= 0x4dbf or c >= 0x20000 and c <= 0x2a6df
    or c >= 0x2a700 and c <= 0x2b73f or c >= 0x2b740 and c <= 0x2b81f or c >= 0x2b920 and c <= 0x2ceaf
    or c >= 0xf900 and c <= 0xfaff or c >= 0x2f800 and c <= 0x2fa1f
end

local SPACE = { [9] = true, [10] = true, [13] = true, [0x85] = true, [0x2028] = true, [0x2029] = true }

function kinds.BertNormalizer(node)
  local who = node.who
  local lower = node:get("lowercase", opts.boolean) ~= false
  local strip = node:get("strip_accents", opts.boolean)
  local list = {}
  if node:get("clean_text", opts.boolean) ~= false then
    list[1] = by_character("[%z\1-\31\127\194-\244]", function(code)
      if code == 9 or code == 10 or code == 13 then return " " end
      if code < 32 or code == 127 or code == 0xfffd then return "" end
      local category = unicode.category(code, who)
      if category == "Cc" or category == "Cf" or category == "Co" then return "" end
      return (category == "Zs" or SPACE[code]) and " " or nil
    end)
  end
  if node:get("handle_chinese_chars", opts.boolean) ~= false then
    local pad = by_character("[\227-\240]", function(code, char) return is_chinese(code) and " " .. char .. " " or nil end)
    list[#list + 1] = function(piece) return is_ascii(piece.s) and piece or pad(piece) end
  end
  if strip or strip == nil and lower then
    list[#list + 1] = kinds.NFD(node)
    list[#list + 1] = strip_marks(node, "Mn")               -- fewer than those of StripAccents
  end
  if lower then list[#list + 1] = lowercase(node) end
  return function(piece)
    for _, fn in ipairs(list) do piece = fn(piece) end
    return piece
  end
end

function kinds.Precompiled(node)
  local map, why = charsmaps.new(base64.decode(node:get("precompiled_charsmap", opts.string, true)))
  if not map then node:fail("precompiled_charsmap", why) end
  local clusters = splitters.regex_of(node, "type", [[\X]])
  -- Bytes of characters that the map may change alone, or that may join the one before.
  local touched = { "[\128-\255\r" }
  for c = 1, 127 do
    local char = string.char(c)
    if map:find(char) then touched[#touched + 1] = "%" .. char end
  end
  touched = (table.concat(touched) .. "]"):gsub("%%(%w)", "%1")
  return function(piece)
    local s, changes = piece.s, {}
    local at = s:find(touched)
    if not at then return piece end
    -- New characters count as coming from the old ones in order, those that remain from the last one.
    local function replace(i, j, new)
      if new == s:sub(i, j) then return end
      local old = chars_of(s:sub(i, j))
      changes[#changes + 1] = { i, j, "", i }
      for k, c in ipairs(chars_of(new)) do
        changes[#changes + 1] = { j + 1, j, c[3], i + old[math.min(k, #old)][1] - 1 }
      end
    end
    local done = 0
    while at do
      local i, j = clusters:find(s, math.max(at - 1, done + 1))
      if not i then break end
      local new = j - i < 5 and map:find(s:sub(i, j))
      if new then replace(i, j, new) end
      for _, c in ipairs(new and {} or chars_of(s:sub(i, j))) do
        new = map:find(c[3])
        if new then replace(i + c[1] - 1, i + c[2] - 1, new) end
      end
      done = j
      at = s:find(touched, done + 1)
    end
    return pieces.change(piece, changes)
  end
end

--- The normalizer of a node of tokenizer.json; nil for none.
---@param node? table
---@return (fun(piece: table): table)?
function M.read(node)
  if not node then return nil end
  local kind = node:get("type", opts.string, true)
  if kind == "Sequence" then
    local list = {}
    for _, of in ipairs(node:list("normalizers", true)) do list[#list + 1] = M.read(of) end
    return #list > 0 and function(piece)
      for _, fn in ipairs(list) do piece = fn(piece) end
      return piece
    end or nil
  end
  if not kinds[kind] then node:fail("type", ("is '%s', which Moonshard does not have"):format(kind)) end
  return kinds[kind](node)
end

return M
