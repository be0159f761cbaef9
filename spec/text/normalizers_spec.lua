-- SPDX-License-Identifier: MIT
--- Normalizers and decoders of tokenizer.json on texts in which random tokenizers once differed from tokenizers 0.23.
local cjson = require "cjson"
local ffi = require "ffi"
local ms = require "moonshard"
local process = require "spec.support.process"

if not (pcall(ffi.load, "libpcre2-8.so.0") and pcall(ffi.load, "libutf8proc.so.2")) then
  return pending "this system has no PCRE2 or no utf8proc"
end

local VOWEL, ACUTE = "\224\165\128", "\204\129"             -- marks of categories Mc and Mn
local LIGATURE, JOINER = "\239\172\134", "\226\128\141"

describe("tokenizer.json", function()
  local folder, t
  before_each(function() folder = process.temp_folder() end)
  after_each(function() process.remove_folder(folder) end)

  local function open_with(normalizer)
    process.write(folder .. "/tokenizer.json", cjson.encode { normalizer = normalizer,
      decoder = { type = "Metaspace", replacement = "▁", prepend_scheme = "always" },
      model = { type = "Unigram", unk_id = 0, vocab = { { "<unk>", 0 }, { "a", -1 }, { "b", -1 }, { "s", -1 }, { "t", -1 },
        { JOINER, -1 }, { "▁▁a▁", -1 } } } })
    t = ms.text.tokenizer(folder)
  end

  local function has(text, want, offsets)
    local ids, more = t:encode(text, { offsets = true })
    assert.are.same({ want, offsets }, { ids:tolist(), more.offsets:tolist() })
  end

  it("leaves out all marks by StripAccents, those of Mn by BertNormalizer", function()
    open_with { type = "StripAccents" }
    has("a" .. VOWEL .. "b" .. ACUTE, { 1, 2 }, { { 1, 1 }, { 5, 5 } })
    open_with { type = "BertNormalizer" }
    has("a" .. VOWEL .. "b" .. ACUTE, { 1, 0, 2 }, { { 1, 1 }, { 2, 4 }, { 5, 5 } })
  end)

  it("has the offsets of the character that NFKC divides, also beside another", function()
    open_with { type = "NFKC" }
    has(LIGATURE .. JOINER, { 3, 4, 5 }, { { 1, 3 }, { 1, 3 }, { 4, 6 } })
    has("a" .. ACUTE .. "b", { 0, 2 }, { { 1, 1 }, { 4, 4 } })
  end)

  it("decodes the first token of Metaspace without spaces", function()
    open_with(nil)
    assert.are.equal("a  a a", t:decode { 6, 6, 1 })
    local stream = t:stream()
    assert.are.equal("a  a a", stream:push(6) .. stream:push(6) .. stream:push(1) .. stream:finish())
  end)
end)
