-- SPDX-License-Identifier: MIT
--- data.tokenizer: byte-pair encoding, compared with a plain loop that counts all pairs anew for every token.
local cjson = require "cjson"
local ms = require "moonshard"
local message = require "spec.support.message"
local process = require "spec.support.process"
local data = ms.data

-- The words of Sennrich et al.: low 5 times, lower 2, newest 6, widest 3.
local PAPER = ("low "):rep(5) .. ("lower "):rep(2) .. ("newest "):rep(6) .. ("widest "):rep(3)

-- The tokens from 256 on.
local function learned(tokenizer)
  local list = {}
  for id = 256, tokenizer.vocab_size - 1 do list[#list + 1] = tokenizer:decode { id } end
  return list
end

-- Words of lower-case letters with one space before each but the first: the pairs are counted anew for each token.
local function by_plain_loop(text, size)
  local words, found = {}, {}
  for word in text:gmatch " ?%l+" do
    local parts = {}
    for c in word:gmatch "." do parts[#parts + 1] = c end
    words[#words + 1] = parts
  end
  local ids = {}
  for id = 0, 255 do ids[string.char(id)] = id end
  for id = 256, size - 1 do
    local counts, best = {}, nil
    for _, parts in ipairs(words) do
      for k = 1, #parts - 1 do
        local key = ("%05d %05d"):format(ids[parts[k]], ids[parts[k + 1]])
        counts[key] = counts[key] or { n = 0, key = key, text = parts[k] .. parts[k + 1], a = parts[k], b = parts[k + 1] }
        counts[key].n = counts[key].n + 1
      end
    end
    for _, c in pairs(counts) do
      if c.n > 1 and (not best or c.n > best.n or c.n == best.n and c.key < best.key) then best = c end
    end
    if not best then break end
    found[#found + 1], ids[best.text] = best.text, id
    for _, parts in ipairs(words) do
      local k = 1
      while k < #parts do
        if parts[k] == best.a and parts[k + 1] == best.b then
          parts[k] = best.text
          table.remove(parts, k + 1)
        end
        k = k + 1
      end
    end
  end
  return found
end

describe("a tokenizer", function()
  local folder
  before_each(function() folder = process.temp_folder() end)
  after_each(function() process.remove_folder(folder) end)

  it("joins the most frequent pairs first, inside words", function()
    local tokenizer = data.train_tokenizer(PAPER, { vocab_size = 258 })
    assert.are.same({ "es", "est" }, learned(tokenizer))
    assert.are.same({ 119, 105, 100, 257 }, tokenizer:encode "widest":tolist())
    assert.are.equal("Tokenizer(258 tokens)", tostring(tokenizer))
  end)

  it("learns what a plain loop finds", function()
    local random, list = 7, {}
    for k = 1, 400 do                                    -- words of three letters, many of them repeated
      random = (random * 1103515245 + 12345) % 2 ^ 31
      list[k] = ("abcd"):sub(1 + random % 4, 1 + random % 4) .. (random % 3 == 0 and "ab" or "ca")
        .. ("xyz"):sub(1 + math.floor(random / 64) % 3, 1 + math.floor(random / 64) % 3)
    end
    for _, text in ipairs { PAPER, table.concat(list, " "), "aaaa aaaa aaa", "to be or not to be" } do
      local tokenizer = data.train_tokenizer(text, { vocab_size = 300 })
      assert.are.same(by_plain_loop(text, 300), learned(tokenizer))
    end
  end)

  it("ends before its size if no pair occurs twice, and learns from several texts together", function()
    assert.are.equal(256, data.train_tokenizer("abc", { vocab_size = 500 }).vocab_size)
    assert.are.same({ "ab" }, learned(data.train_tokenizer({ "ab", "ab" }, { vocab_size = 500 })))
  end)

  it("gives every text back, of any bytes and words of any length", function()
    local tokenizer = data.train_tokenizer(PAPER, { vocab_size = 270 })
    local bytes = {}
    for k = 0, 255 do bytes[k + 1] = string.char(k) end
    for _, text in ipairs { "", PAPER, table.concat(bytes), "  two  spaces\n\ttab 12 345,6!? ", ("newest"):rep(1000),
      "Zürich", " " } do
      local ids = tokenizer:encode(text)
      assert.are.equal("int64", ids.dtype)
      assert.are.equal(text, tokenizer:decode(ids))
      assert.are.equal(text, tokenizer:decode(ids:tolist()))
    end
    assert.is_true(#tokenizer:encode(PAPER):tolist() < #PAPER / 2)
  end)

  it("is the same after it was saved", function()
    local tokenizer = data.train_tokenizer(PAPER, { vocab_size = 270 })
    tokenizer:save(folder .. "/tokenizer.json")
    local other = data.tokenizer(folder .. "/tokenizer.json")
    assert.are.same(learned(tokenizer), learned(other))
    assert.are.same(tokenizer:encode(PAPER):tolist(), other:encode(PAPER):tolist())
  end)

  it("is refused after any byte of its merges or its checksum changed, and read without a checksum", function()
    local tokenizer = data.train_tokenizer(PAPER, { vocab_size = 270 })
    local path = folder .. "/tokenizer.json"
    tokenizer:save(path)
    local text, right = process.read(path), learned(tokenizer)
    for at = 1, #text do
      process.write(path, text:sub(1, at - 1) .. string.char(bit.bxor(text:byte(at), 1)) .. text:sub(at + 1))
      local ok, other = pcall(data.tokenizer, path)
      if ok then assert.are.same(right, learned(other)) else assert.is_truthy(other:find(path, 1, true)) end
    end
    local saved = cjson.decode(text)
    saved.sum = nil
    process.write(path, cjson.encode(saved))
    assert.are.same(right, learned(data.tokenizer(path)))
  end)

  it("writes shards that a corpus reads", function()
    local tokenizer = data.train_tokenizer(PAPER, { vocab_size = 270 })
    tokenizer:write_shard(folder .. "/train.bin", PAPER)
    tokenizer:write_shard(folder .. "/val.bin", "lower low")
    local corpus = data.corpus(folder, { vocab = tokenizer.vocab_size })
    assert.are.equal("tokens", corpus.kind)
    assert.are.equal(270, corpus.vocab)
    assert.are.equal(tokenizer:encode(PAPER):numel(), corpus.train_count)
    assert.are.equal(tokenizer:encode "lower low":numel(), corpus.validation_count)
    local ids = data.batches(corpus, { context = 4, batch = 1 }):train(1)
    assert.truthy(PAPER:find(tokenizer:decode(ids), 1, true))
  end)

  it("names what is wrong", function()
    local tokenizer = data.train_tokenizer(PAPER, { vocab_size = 257 })
    local path = folder .. "/file"
    assert.are.equal("train_tokenizer: option 'vocab_size' is missing", message(data.train_tokenizer, "a"))
    assert.matches("^train_tokenizer: option 'vocab_size' is a number %(100%), expected a whole number from 256",
      message(data.train_tokenizer, "a", { vocab_size = 100 }))
    assert.matches("^train_tokenizer: text 2 is a number %(3%), expected a string",
      message(data.train_tokenizer, { "a", 3 }, { vocab_size = 300 }))
    assert.are.equal("encode: the text is a number (1), expected a string", message(function() tokenizer:encode(1) end))
    assert.are.equal("decode: id 2 is 257, expected 0 to 256", message(function() tokenizer:decode { 1, 257 } end))
    assert.matches("^encode: self is a string", message(tokenizer.encode, "text"))
    assert.matches("^tokenizer: cannot read ", message(data.tokenizer, path))
    assert.matches("^save: cannot write ", message(function() tokenizer:save(folder .. "/none/file") end))
    process.write(path, "[]")
    assert.are.equal(("tokenizer: '%s' is not a tokenizer that Tokenizer:save wrote"):format(path),
      message(data.tokenizer, path))
    process.write(path, '{"format": "moonshard tokenizer 1", "merges": [[97, 98], [257, 3]]}')
    assert.are.equal(("tokenizer: '%s' is damaged: its token 257 is not the merge of two earlier ones"):format(path),
      message(data.tokenizer, path))
  end)
end)
