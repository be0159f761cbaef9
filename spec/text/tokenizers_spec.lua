-- SPDX-License-Identifier: MIT
--- ms.text.tokenizer: each kind of tokenizer.json, compared with PyPI's tokenizers; other files of the same tokens.
local cjson = require "cjson"
local data = require "spec.support.tokenizer_data"
local ffi = require "ffi"
local message = require "spec.support.message"
local ms = require "moonshard"
local process = require "spec.support.process"

local golden = cjson.decode(data.read "cases.json")
local KINDS = { "gpt2", "llama3", "qwen2", "roberta", "llama2", "clip", "bert", "bert_cased", "t5" }
local has_pcre = pcall(ffi.load, "libpcre2-8.so.0")
local has_forms = pcall(ffi.load, "libutf8proc.so.2")
local NORMALIZES = { qwen2 = true, clip = true, bert = true, bert_cased = true }

local rounded = ffi.new "float[1]"

local function open(kind) return data.open(kind .. ".json") end
local function flat(t) return t:flatten():tolist() end
local function read(kind) return cjson.decode(data.read(kind .. ".json")) end

describe("tokenizer.json", function()
  if not has_pcre then return pending "this system has no PCRE2" end
  for _, kind in ipairs(KINDS) do
    describe("of " .. kind, function()
      if NORMALIZES[kind] and not has_forms then return pending "this system has no utf8proc" end
      local t
      lazy_setup(function() t = open(kind) end)

      it("gives the ids, offsets and texts of the reference", function()
        for _, case in ipairs(golden[kind].cases) do
          local ids, more = t:encode(case.text, { offsets = true })
          assert.are.same(case.ids, flat(ids), case.text)
          assert.are.same(case.offsets, flat(more.offsets), case.text)
          assert.are.same(case.ids, flat((t:encode(case.text))), case.text)
          if not case.decoded:find("\239\191\189", 1, true) then
            assert.are.equal(case.decoded, t:decode(case.ids), case.text)
          end
        end
      end)

      it("gives the ids and types of a pair", function()
        local ids, more = t:encode("Hello world", { pair = "the Software" })
        assert.are.same(golden[kind].pair.ids, flat(ids))
        assert.are.same(golden[kind].pair.types, flat(more.types))
      end)

      it("streams whole characters, which together are the text", function()
        for _, case in ipairs(golden[kind].cases) do
          local stream, parts = t:stream(), {}
          for k, id in ipairs(case.ids) do
            parts[k] = stream:push(id)
            local is_text = not case.decoded:find("\239\191\189", 1, true)
            assert.is_nil(is_text and (parts[k]:find "^[\128-\191]" or parts[k]:find "[\194-\244]$") or nil, case.text)
          end
          parts[#parts + 1] = stream:finish()
          assert.are.equal(t:decode(case.ids), table.concat(parts), case.text)
        end
      end)
    end)
  end
end)

describe("a stream", function()
  if not has_pcre then return pending "this system has no PCRE2" end
  local names = { "unigram.model", "bpe.model" }
  for _, kind in ipairs(KINDS) do names[#names + 1] = kind .. ".json" end
  for _, name in ipairs(names) do
    it("gives the text of decode, whatever the ids are: " .. name, function()
      if NORMALIZES[name:match "^[%w_]+"] and not has_forms then return pending "this system has no utf8proc" end
      local t, seed = data.open(name), 1
      local function random(n)
        seed = seed * 16807 % 2147483647
        return seed % n
      end
      local signs = {}                                    -- pieces that are spaces
      for id = 0, t.vocab_size - 1 do
        if (t:token(id) or "x"):gsub("\226\150\129", ""):gsub(" ", "") == "" then signs[#signs + 1] = id end
      end
      for k = 1, 300 do
        local ids, stream, parts = {}, t:stream(), {}
        for at = 1, 1 + k % 12 do
          ids[at] = #signs > 0 and random(2) == 0 and signs[1 + random(#signs)] or random(t.vocab_size)
          parts[at] = stream:push(ids[at])
        end
        parts[#parts + 1] = stream:finish()
        assert.are.equal(t:decode(ids), table.concat(parts), table.concat(ids, " "))
      end
    end)
  end
end)

-- Without offsets, words and chunks are remembered, and texts are divided in another way.
describe("a text without offsets", function()
  if not has_pcre then return pending "this system has no PCRE2" end
  local PARTS = { " ", "  ", "   ", "\n", "\t", "\n    ", "\227\128\128", "\226\150\129", " \226\150\129", "\194\160",
    "e\204\129", "\204\129", " \204\129", "A\204\138", "\239\172\129", "\194\189", "\226\128\139", "\0", "\255",
    "\226\150", "<mask>", "<s>", "tool", "deal", "the", "Software", " to", " deal", " without", ",", ".", "'s", "12",
    " 345", "(", ")", "restriction", " limitation", "\228\189\160", "\240\159\152\128", "zzzzzz", "####", "    x",
    ("and "):rep(70), ("ab"):rep(150) }
  local function text_of(seed, n)
    local parts = {}
    for k = 1, n do
      seed = seed * 16807 % 2147483647
      parts[k] = PARTS[1 + seed % #PARTS]
    end
    return table.concat(parts)
  end
  local names = { "unigram.model", "bpe.model" }
  for _, kind in ipairs(KINDS) do names[#names + 1] = kind .. ".json" end
  for _, name in ipairs(names) do
    it("has the same tokens: " .. name, function()
      if NORMALIZES[name:match "^[%w_]+"] and not has_forms then return pending "this system has no utf8proc" end
      local t = data.open(name)
      for k = 1, 200 do
        -- In long texts a unigram model's sums are large, and rounding decides between ways.
        local text = text_of(k, k % 100 == 0 and 1000 or k % 9)
        for _, parse in ipairs { false, true } do
          local want = t:encode(text, { offsets = true, parse = parse })
          for _ = 1, 2 do
            local got = t:encode(text, { parse = parse })
            if want:numel() ~= got:numel() or got:numel() > 0 and not want:equal(got) then
              assert.are.same({ text, flat(want) }, { text, flat(got) })
            end
          end
        end
      end
    end)
  end
end)

describe("models in the engine", function()
  local vocabulary = require "moonshard.text.vocabulary"
  local SIGN = "\226\150\129"

  local function single(x)
    rounded[0] = x
    return rounded[0]
  end

  local function text_of(seed, n)
    local words = {}
    for k = 1, n do
      seed = seed * 16807 % 2147483647
      words[k] = ("abc"):sub(1 + seed % 3) .. ("aabcca"):sub(1 + seed % 5, 1 + seed % 7) .. ("c"):rep(seed % 4)
        .. (k % 50 == 0 and "zy" or k % 70 == 0 and ("abcab"):rep(40) or "")
    end
    return SIGN .. table.concat(words, SIGN)
  end

  -- Tokens of several characters score as these do, but for the sixth digit.
  local function tokens()
    local ids, scores, n = {}, {}, 0
    for token in ("a b c _ aa ab ba bc aab bca _a _bc ccc abcab"):gsub("_", SIGN):gmatch "%S+" do
      ids[token] = n
      scores[n], n = single(-5.4321 * #token:gsub(SIGN, "s") + (n % 5 - 2) * 1e-5), n + 1
    end
    return ids, scores
  end

  -- The best way in plain Lua; all sums lose what SentencePiece takes off.
  local function best_way(ids, scores, text)
    local best, from, last, unknown = { [0] = 0 }, {}, {}, 0
    for _, id in pairs(ids) do unknown = math.min(unknown, scores[id]) end
    unknown = single(unknown - 10)
    local at, n = 0, #text
    while at < n do
      if best[at] < -1e5 then
        local off = best[at]
        for k = at, math.min(n, at + 20) do best[k] = best[k] and single(best[k] - off) end
      end
      local size, single_char = text:byte(at + 1) > 127 and 3 or 1, false
      local function offer(stop, score, id)
        score = single(best[at] + score)
        if not best[stop] or score > best[stop] then best[stop], from[stop], last[stop] = score, at, id end
      end
      for stop = at + 1, math.min(n, at + 8) do
        local id = ids[text:sub(at + 1, stop)]
        if id then offer(stop, scores[id], id) end
        single_char = single_char or id and stop == at + size
      end
      if not single_char then offer(at + size, unknown, 99) end
      at = at + size
    end
    local way = {}
    while n > 0 do
      if not (last[n] == 99 and way[#way] == 99) then way[#way + 1] = last[n] end
      n = from[n]
    end
    local forward = {}
    for k = 1, #way do forward[k] = way[#way + 1 - k] end
    return forward
  end

  it("find the best way, where rounding decides, and beyond the sum that SentencePiece takes off", function()
    local ids, scores = tokens()
    local model = vocabulary.new { ids = ids, scores = scores, unknown = 99, single = true, cut = SIGN }
    for _, n in ipairs { 0, 1, 30, 12000 } do
      local text = n == 0 and "" or text_of(3, n)
      local got, sum = model:chunk(text, 0)
      local want = best_way(ids, scores, text)
      assert.are.equal(#want, got.n)
      for k, id in ipairs(want) do assert.are.equal(id, got[k], k) end
      assert.is_true(n < 12000 or #text > 2 ^ 17 and sum > -1e5 - 100)
    end
  end)

  it("join pairs as they were learned, in short and long words", function()
    local ids, scores = tokens()
    local list, merges = {}, {}
    for token, id in pairs(ids) do list[#list + 1] = { token, id } end
    table.sort(list, function(a, b) return scores[a[2]] > scores[b[2]] end)
    for rank, e in ipairs(list) do
      for at = 1, #e[1] - 1 do
        local first, second = ids[e[1]:sub(1, at)], ids[e[1]:sub(at + 1)]
        for _, value in ipairs(first and second and { first, second, rank, e[2] } or {}) do
          merges[#merges + 1] = value
        end
      end
    end
    -- Searches all pairs for each join.
    local function joined(text)
      local parts = {}
      for c in text:gmatch "[%z\1-\127\192-\255][\128-\191]*" do
        local id = ids[c] or 99
        if id == 99 and parts[#parts] and parts[#parts][1] == 99 then
          parts[#parts][2] = parts[#parts][2] + #c
        else
          parts[#parts + 1] = { id, #c }
        end
      end
      while true do
        local least, at
        for k = 1, #parts - 1 do
          for m = 1, #merges, 4 do
            if merges[m] == parts[k][1] and merges[m + 1] == parts[k + 1][1] and merges[m + 2] < (least or 1e9) then
              least, at = merges[m + 2], { k, merges[m + 3] }
            end
          end
        end
        if not least then return parts end
        local k = at[1]
        parts[k] = { at[2], parts[k][2] + parts[k + 1][2] }
        table.remove(parts, k + 1)
      end
    end
    for _, cut in ipairs { false, SIGN } do
      for _, o in ipairs { { scores = scores, joins = true }, { merges = merges } } do
        local model = vocabulary.new { ids = ids, scores = o.scores, joins = o.joins, merges = o.merges, unknown = 99,
          single = true, cut = cut or nil }
        for _, n in ipairs { 0, 1, 30, 120 } do
          local text = n == 0 and "" or text_of(5, n)
          local got, want = model:chunk(text, 0), joined(text)
          assert.are.equal(#want, got.n)
          for k = 1, #want do assert.are.same(want[k], { got[k], got.sizes[k] }) end
        end
      end
    end
  end)
end)

describe("SentencePiece's model", function()
  if not has_pcre then return pending "this system has no PCRE2" end
  for _, kind in ipairs { "unigram", "bpe" } do
    it("of " .. kind .. " gives the ids and texts of the reference", function()
      local t = data.open(kind .. ".model")
      for _, case in ipairs(golden[kind]) do
        assert.are.same(case.ids, flat((t:encode(case.text, { parse = false }))), case.text)
        local ids, more = t:encode(case.text, { parse = false, offsets = true })
        assert.are.same(case.ids, flat(ids), case.text)
        assert.are.same(case.offsets, flat(more.offsets), case.text)
        if not case.decoded:find("\239\191\189", 1, true) then assert.are.equal(case.decoded, t:decode(case.ids)) end
      end
      assert.are.same({ 1, 2 }, { t.bos_id, t.eos_id })
      assert.are.same({ 2 }, flat((t:encode "</s>")))
    end)
  end

  it("makes each byte that is no UTF-8 U+FFFD, as the reference", function()
    for _, kind in ipairs { "unigram", "bpe" } do
      local t = data.open(kind .. ".model")
      -- Alone, cut short, overlong, surrogates, above U+10FFFF.
      for text, n in pairs { ["\255"] = 1, ["\226\130"] = 2, ["\192\175"] = 2, ["\224\128\128"] = 3,
        ["\237\160\128"] = 3, ["\240\130\130\172"] = 4, ["\244\144\128\128"] = 4, ["\245\128\128\128"] = 4 } do
        local want = flat((t:encode("a" .. ("\239\191\189"):rep(n) .. "the")))
        assert.are.same(want, flat((t:encode("a" .. text .. "the"))), kind)
        assert.are.same(want, flat((t:encode("a" .. text .. "the", { offsets = true }))), kind)
      end
    end
  end)

  it("with equal or empty pieces, or scores that are no numbers, is an error that names them", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    local path, right = folder .. "/tokenizer.model", data.read "bpe.model"
    local function field(number, text) return string.char(number * 8 + 2, #text) .. text end
    local function score(...) return string.char(2 * 8 + 5, ...) end
    local token = data.open("bpe.model"):token(300)
    for expected, piece in pairs {
      ["piece %d+ is empty"] = score(0, 0, 128, 63),
      ["pieces 300 and %d+ are both '" .. token .. "'"] = field(1, token) .. score(0, 0, 128, 63),
      ["pieces 1 and %d+ are both '<s>'"] = field(1, "<s>") .. string.char(3 * 8, 3),
      ["piece %d+ %('zq'%) has the score inf"] = field(1, "zq") .. score(0, 0, 128, 127),
      ["piece %d+ %('zq'%) has the score %-?nan"] = field(1, "zq") .. score(0, 0, 192, 127),
    } do
      process.write(path, right .. field(1, piece))
      local text = message(ms.text.tokenizer, path)
      assert.matches("^tokenizer: '" .. path:gsub("%p", "%%%0") .. "' is damaged, or no model of SentencePiece: " .. expected,
        text)
    end
    process.write(path, right .. field(1, field(1, "<s>") .. score(0, 0, 128, 63)))      -- another one of text is no fault
    assert.is_table(ms.text.tokenizer(path))
  end)

  it("that is truncated is an error; the folder says which tokens it adds", function()
    local folder = process.temp_folder()
    local path, right = folder .. "/tokenizer.model", data.read "bpe.model"
    for k = 1, 40 do
      process.write(path, right:sub(1, math.floor((#right - 1) * k / 40)))
      assert.matches("^tokenizer: '" .. path:gsub("%p", "%%%0") .. "' is ", message(ms.text.tokenizer, folder))
    end
    process.write(path, right)
    process.write(folder .. "/tokenizer_config.json", '{"add_bos_token": true, "eos_token": "the"}')
    local t = ms.text.tokenizer(folder)
    assert.are.equal(1, t:encode("a")[1]:item())
    process.remove_folder(folder)
  end)
end)

describe("a tokenizer of ms.text", function()
  if not has_pcre then return pending "this system has no PCRE2" end
  local folder
  before_each(function() folder = process.temp_folder() end)
  after_each(function() process.remove_folder(folder) end)

  local function write(name, text)
    process.write(folder .. "/" .. name, text)
    return folder .. "/" .. name
  end

  -- The bytes of each token of gpt2.json, by id, without the special one.
  local function tokens()
    local t, list = open "gpt2", {}
    for id = 1, t.vocab_size - 1 do list[id] = t:token(id) end
    return list
  end

  it("gives bytes back that are no UTF-8", function()
    for _, t in ipairs { open "gpt2", open "llama2" } do
      for _, text in ipairs { "\255", "a\128b", "\194", "x\244\143\191 \237\160\128y", "\224\128\128\244\144\128\128",
        ("\200"):rep(300) } do
        assert.are.equal(text, t:decode(t:encode(text)))
        local ids, more = t:encode(text, { offsets = true })
        assert.are.same(flat((t:encode(text))), flat(ids))
        assert.are.equal(ids:numel(), more.offsets.shape[1])
      end
    end
  end)

  it("is read from vocab.json and merges.txt", function()
    local saved = read "gpt2"
    local lines = { "#version: 0.2" }
    for _, pair in ipairs(saved.model.merges) do lines[#lines + 1] = table.concat(pair, " ") end
    write("vocab.json", (cjson.encode(saved.model.vocab):gsub("\\/", "/")))
    write("merges.txt", table.concat(lines, "\n") .. "\n")
    local t = ms.text.tokenizer(folder)
    for _, case in ipairs(golden.gpt2.cases) do
      if not case.text:find "<|end|>" then assert.are.same(case.ids, flat((t:encode(case.text))), case.text) end
    end
  end)

  it("is read from a file of tiktoken", function()
    local digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    local function line(token, id)
      local code = token:gsub("..?.?", function(s)
        local a, b, c = s:byte(1, 3)
        local n, out = a * 65536 + (b or 0) * 256 + (c or 0), ""
        for k = 3, 0, -1 do
          local digit = math.floor(n / 64 ^ k) % 64 + 1
          out = out .. (3 - k > #s and "=" or digits:sub(digit, digit))
        end
        return out
      end)
      return code .. " " .. id
    end
    local encoded = {}
    for id, token in ipairs(tokens()) do encoded[id] = line(token, id) end
    local path = write("a.tiktoken", table.concat(encoded, "\n") .. "\n")
    local t = ms.text.tokenizer(path, { pattern = "gpt2", special_tokens = { ["<|end|>"] = 0 } })
    for _, case in ipairs(golden.gpt2.cases) do assert.are.same(case.ids, flat((t:encode(case.text))), case.text) end
    -- Many pairs a token: a token of k z for each k to 60.
    for byte = 0, 255 do encoded[byte + 1] = line(string.char(byte), byte) end
    for k = 2, 60 do encoded[255 + k] = line(("z"):rep(k), 254 + k) end
    process.write(path, table.concat(encoded, "\n", 1, 315) .. "\n")
    t = ms.text.tokenizer(path, { pattern = "gpt2" })
    assert.are.same({ 286, 286, 290 }, flat((t:encode(("z"):rep(100)))))
    assert.are.same({ 97, 257, 97, 255, 314 }, flat((t:encode("azzza\255" .. ("z"):rep(60)))))
    process.write(path, "IQ== 0\n!!! 1\n")
    assert.are.equal(("tokenizer: '%s': line 2 is not a token in base 64 and its rank"):format(path),
      message(ms.text.tokenizer, path))
    process.write(path, "IQ== 0\n")
    assert.are.equal(("tokenizer: '%s' has no token for byte 0"):format(path), message(ms.text.tokenizer, path))
  end)

  it("is read from the file of Tokenizer:save", function()
    local merges = "[[122,122],[121,121],[256,256],[257,257],[258,258],[259,259],[260,260],[261,261],[262,262],"
      .. "[263,263],[264,264],[32,115],[104,101],[108,108],[195,169],[265,265]]"
    local right = ('{"format":"moonshard tokenizer 1","merges":%s,"sum":"8cba8c9b9dd531f2"}'):format(merges)
    local path = write("own.json", right)
    local t = ms.text.tokenizer(path)
    assert.are.same({ 83, 268, 267, 101, 269, 115, 32, 49, 50, 51, 52, 53, 267, 268, 269, 115, 33 },
      flat((t:encode "She sells 12345 shells!")))
    assert.are.same({ 266, 266, 266, 266, 264, 260, 258 }, flat((t:encode(("z"):rep(300)))))       -- cut after 256
    local text = " \n\t été \200" .. ("y"):rep(300)
    assert.are.equal(text, t:decode(t:encode(text)))
    write("own.json", (right:gsub(',"sum".-"}', "}")))                   -- version 1.0
    assert.are.equal(272, ms.text.tokenizer(path).vocab_size)
    for change, expected in pairs {
      ["is damaged: its checksum differs"] = right:gsub("122,122", "122,123"),
      ["is not a tokenizer that Tokenizer:save wrote"] = right:gsub("tokenizer 1", "tokenizer 2"),
      ["is damaged: its token 257 is not the merge of two earlier ones"] =
        '{"format": "moonshard tokenizer 1", "merges": [[97, 98], [257, 3]]}',
    } do
      write("own.json", expected)
      assert.are.equal(("tokenizer: '%s' %s"):format(path, change), message(ms.text.tokenizer, path))
    end
  end)

  it("has the names of version 1.0 in ms.data, too", function()
    assert.are.equal(ms.text.train_bpe, ms.data.train_tokenizer)
    assert.are.equal(ms.text.tokenizer, ms.data.tokenizer)
  end)

  it("writes shards that a corpus reads", function()
    local text = ("low lower newest widest "):rep(9)
    local t = ms.text.train_bpe(text, { vocab_size = 270 })
    t:write_shard(folder .. "/train.bin", text)
    t:write_shard(folder .. "/val.bin", "lower low")
    local corpus = ms.data.corpus(folder, { vocab = t.vocab_size })
    assert.are.equal("tokens", corpus.kind)
    assert.are.same({ t:encode(text):numel(), t:encode "lower low":numel() },
      { corpus.train_count, corpus.validation_count })
    local ids = ms.data.batches(corpus, { context = 4, batch = 1 }):train(1)
    assert.truthy(text:find(t:decode(ids), 1, true))
  end)

  it("encodes long texts, and after a text for which there was no memory", function()
    local t = data.open "unigram.model"
    assert.are.equal("encode: a text of 67108865 bytes is too long for offsets; divide it",
      message(t.encode, t, ("a"):rep(2 ^ 26 + 1), { offsets = true }))
    assert.are.equal(0, t:encode((" "):rep(2 ^ 27)):numel())
    assert.are.equal(t:encode(("ab "):rep(300)):numel(), t:encode(("ab "):rep(30000)):numel() / 100)
  end)

  it("encodes long words as short ones", function()
    local t, word = open "llama2", ("abcde"):rep(30)
    local long, short = t:encode(word, { special = false }), t:encode(word:sub(1, 60), { special = false })
    assert.are.same(short:tolist(), long[{ { 1, short:numel() } }]:tolist())
    assert.are.equal(5001, #flat((t:encode(("\1"):rep(5000), { special = false }))))
  end)

  it("reads special tokens in a text, or does not", function()
    local t = open "gpt2"
    assert.are.same({ 0 }, flat((t:encode "<|end|>")))
    assert.are.equal("<|end|>", t:decode(t:encode("<|end|>", { parse = false })))
    assert.are.equal("", t:decode { 0 })
    assert.are.equal("<|end|>", t:decode({ 0 }, { special = true }))
    assert.are.equal(0, t:id "<|end|>")
    assert.is_nil(t:id "no token")
  end)

  it("makes batches", function()
    local t = open "bert"
    local texts = { "the software", "the", "the software the software the" }
    local ids, mask = t:encode_batch(texts, { pad_id = 0 })
    for k, text in ipairs(texts) do
      local row = t:encode(text)
      assert.are.same(flat(row), flat(ids[k][{ { 1, row:numel() } }]))
      assert.are.equal(row:numel(), mask[k]:sum():item())
    end
    local left, left_mask = t:encode_batch(texts, { pad_id = 0, side = "left" })
    local width = left.shape[2]
    assert.are.equal(3, left[2][width]:item())
    assert.are.equal(0, left[2][1]:item())
    assert.is_false(left_mask[2][1]:item())
    ids, mask = t:encode_batch(texts, { pad_id = 0, max_length = 4, multiple = 8 })
    assert.are.same({ 3, 8 }, ids.shape)
    assert.are.same({ 4, 3, 4 }, mask:sum(2):tolist())
    assert.are.equal(3, ids[3][4]:item())
    assert.are.same({ 1, 2 }, (t:encode_batch({ "" })).shape)
  end)

  it("makes batches of pairs as the reference", function()
    local t, batches = open "bert", golden.pair_batches
    for most, want in ms.sorted_pairs(batches.rows) do
      local ids, mask, types = t:encode_batch(batches.texts, { pad_id = 0, max_length = tonumber(most) })
      assert.are.same(want.ids, ids:tolist(), most)
      assert.are.same(want.mask, mask:to("int64"):tolist(), most)
      assert.are.same(want.types, types:tolist(), most)
    end
    local ids, _, types = t:encode_batch({ { "the", "software" }, "the" }, { pad_id = 0, side = "left" })
    assert.are.same({ 0, 1, 1 }, { types[1][1]:item(), types[1][ids:size(2)]:item(), types[1][ids:size(2) - 1]:item() })
    assert.are.same(0, types[2]:sum():item())
    assert.matches("encode_batch: text 1 is a table, expected a string or two", message(t.encode_batch, t, { { "a" } }))
    assert.matches("the second of text 1 is a number", message(t.encode_batch, t, { { "a", 1 } }))
    assert.matches("option 'max_length' is 2, but the template adds 3 tokens",
      message(t.encode_batch, t, { { "a", "b" } }, { max_length = 2 }))
  end)

  it("names the tokens of a folder", function()
    write("tokenizer.json", data.read "roberta.json")
    write("tokenizer_config.json", '{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}')
    local t = ms.text.tokenizer(folder)
    assert.are.same({ 0, 2, 1 }, { t.bos_id, t.eos_id, t.pad_id })
    local ids, mask = t:encode_batch { "", "a b" }
    assert.are.same({ 0, 2, 1 }, flat(ids[1][{ { 1, 3 } }]))
    assert.are.equal(2, mask[1]:sum():item())
  end)

  it("is learned as the reference learns it", function()
    local text = process.read(process.root .. "/LICENSE")
    local t = ms.text.train_bpe({ text }, { vocab_size = 300, special_tokens = { "<|end|>" } })
    local path = folder .. "/tokenizer.json"
    t:save(path)
    local other = ms.text.tokenizer(path)
    for _, o in ipairs { t, other } do
      assert.are.equal("TextTokenizer(300 tokens)", tostring(o))
      assert.are.equal(text, o:decode(o:encode(text)))
      assert.are.same(golden.learned, flat((o:encode "the Software<|end|>")))
    end
    assert.are.equal(257, ms.text.train_bpe("", { vocab_size = 500, special_tokens = { "<s>" } }).vocab_size)
  end)

  it("names what is wrong in a file", function()
    local right = read "bert"
    local function wrong(change, expected)
      local saved = read(type(expected) == "table" and expected[1] or "bert")
      change(saved)
      local path = write("tokenizer.json", cjson.encode(saved))
      assert.are.equal(("tokenizer: '%s': %s"):format(path, type(expected) == "table" and expected[2] or expected),
        message(ms.text.tokenizer, path))
    end
    assert.is_table(right.model)
    wrong(function(s) s.model = nil end, "model is missing")
    wrong(function(s) s.model.type = "Markov" end, "model.type is 'Markov', which Moonshard does not have")
    wrong(function(s) s.model.vocab.the = -1 end,
      "model.vocab.the is a number (-1), expected a whole number from 0 to 2^24 - 1")
    wrong(function(s) s.model.unk_token = "?!" end, "model.unk_token is '?!', which vocab lacks")
    wrong(function(s) s.normalizer = { type = "Upper" } end, "normalizer.type is 'Upper', which Moonshard does not have")
    wrong(function(s) s.pre_tokenizer = {} end, "pre_tokenizer.type is missing")
    wrong(function(s) s.added_tokens[2] = "x" end, "added_tokens[2] is a string ('x'), expected an object or a list")
    wrong(function(s) s.post_processor.single[1].SpecialToken.id = "?" end,
      "post_processor.single[1].SpecialToken.id is '?', which special_tokens lacks")
    wrong(function(s) s.model.merges[3] = { "Q", "nope" } end,
      { "gpt2", "model.merges[3] joins 'Q' and 'nope', of which the second is not in the vocabulary" })
    wrong(function(s) s.model.merges[1] = "ab" end, { "gpt2", "model.merges[1] is not a pair of tokens" })
    wrong(function(s) s.pre_tokenizer.pretokenizers[1].pattern.Regex = "(a" end, { "llama3",
      "pre_tokenizer.pretokenizers[1].pattern is no regular expression: missing closing parenthesis at byte 2" })
    wrong(function(s) s.normalizer.normalizers[1].precompiled_charsmap = "////fwAA" end,
      { "t5", "normalizer.normalizers[1].precompiled_charsmap is damaged: its trie has no end" })
    wrong(function(s) s.model.vocab[4] = { "a" } end, { "t5", "model.vocab[4][2] is missing" })
    wrong(function(s) s.model.unk_id = 999999 end, { "t5", "model.unk_id is 999999, but vocab ends before" })
    wrong(function(s) s.model.dropout = 0.1 end,
      { "gpt2", "model.dropout is a number (0.1), which Moonshard does not have" })
  end)

  it("reads a truncated file with an error that names it", function()
    local text = data.read "gpt2.json"
    local path = folder .. "/tokenizer.json"
    for k = 0, 20 do
      process.write(path, text:sub(1, math.floor((#text - 2) * k / 20)))
      assert.matches("^tokenizer: '" .. path:gsub("%p", "%%%0") .. "'", message(ms.text.tokenizer, path))
    end
    assert.matches("^tokenizer: cannot read ", message(ms.text.tokenizer, folder .. "/none"))
    os.remove(path)
    assert.are.equal(("tokenizer: folder '%s' has no tokenizer.json, vocab.json, tokenizer.tiktoken, tokenizer.model or spiece.model"):format(folder),
      message(ms.text.tokenizer, folder))
  end)

  it("has no text for ids that fill up a model's vocabulary", function()
    local t = open "gpt2"
    assert.are.equal(t:decode { 1, 5 }, t:decode { 1, t.vocab_size, 5, t.vocab_size + 7 })
    assert.are.equal("", t:stream():push(t.vocab_size))
  end)

  it("refuses wrong calls", function()
    local t = open "gpt2"
    assert.are.equal("encode: the text is a number (1), expected a string", message(t.encode, t, 1))
    assert.matches("^encode: self is a string", message(t.encode, "text"))
    assert.matches("^encode: unknown option 'offset'; did you mean 'offsets'", message(t.encode, t, "a", { offset = true }))
    assert.are.equal(("decode: id 2 is -1, expected a token's, 0 to %d"):format(t.vocab_size - 1),
      message(t.decode, t, { 1, -1 }))
    assert.are.equal("encode_batch: the texts have different lengths and the tokenizer has no pad_id: pass option 'pad_id'",
      message(t.encode_batch, t, { "a", "the Software" }))
    assert.are.equal("encode_batch: text 2 is a number (1), expected a string", message(t.encode_batch, t, { "a", 1 }))
    assert.are.equal("train_bpe: option 'vocab_size' is missing", message(ms.text.train_bpe, "a"))
    assert.matches("^train_bpe: option 'pattern' is no regular expression: ",
      message(ms.text.train_bpe, "a", { vocab_size = 300, pattern = "(" }))
  end)
end)
