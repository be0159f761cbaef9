-- SPDX-License-Identifier: MIT
--- Corpora and batches: the split into training and validation text, and the sequences of a step.
local ffi = require "ffi"
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local batches = require "moonshard.data.batches"
local lib = require("moonshard.core.ffi").lib
local count_model = require "moonshard.run.count_model"

local folder

local function write(name, text)
  process.write(folder .. "/" .. name, text)
  return folder .. "/" .. name
end

--- A shard of llm.c: 256 int32 of header, then 16-bit tokens.
local function shard(tokens, magic)
  local function little(n, bytes) return ffi.string(ffi.new("uint32_t[1]", n), bytes) end
  local parts = { little(magic or 20240520, 4), little(1, 4), little(#tokens, 4), ("\0"):rep(1024 - 12) }
  for _, t in ipairs(tokens) do parts[#parts + 1] = little(t, 2) end
  return table.concat(parts)
end

local function names(corpus)
  local list = {}
  for k, d in ipairs(corpus.documents) do list[k] = d.name end
  return list
end

--- A text that encodes its own positions, in 4 characters each.
local function numbered(n)
  local parts = {}
  for k = 0, n / 4 - 1 do parts[#parts + 1] = ("%04d"):format(k) end
  return table.concat(parts)
end

before_each(function() folder = process.temp_folder() end)
after_each(function() process.remove_folder(folder) end)

describe("a corpus", function()
  it("takes every regular file once, in byte order of names, and neither links nor folders", function()
    write("b", "bbb bbb bbb bbb")
    write("a", "aaa aaa aaa aaa a")
    write("B", "BBB BBB BBB BBB BB")
    write("copy-of-a", "aaa aaa aaa aaa a")
    write("same-size", "aaa aaa aaa aaa b")
    lfs.link("a", folder .. "/link", true)
    local corpus = ms.data.corpus(folder)
    assert.are.same({ "B", "a", "b", "same-size" }, names(corpus))
    assert.are.equal("text", corpus.kind)
    assert.are.equal(256, corpus.vocab)
    os.remove(folder .. "/link")
  end)

  it("refuses text in UTF-16 and UTF-32", function()
    for encoding, mark in pairs { ["UTF-16"] = "\255\254", ["UTF-32"] = "\255\254\0\0" } do
      write("a", mark .. ("a\0"):rep(20))
      assert.error_matches(function() ms.data.corpus(folder) end, ("corpus: '.*/a' is text in %s, expected UTF%%-8"):format(
        encoding:gsub("%-", "%%-")))
    end
  end)

  it("keeps the last tenth of each file for validation", function()
    write("a", ("a"):rep(90) .. ("A"):rep(10))
    write("b", ("b"):rep(19))
    local corpus = ms.data.corpus(folder)
    assert.are.equal(90 + 18, corpus.train_count)
    assert.are.equal(10 + 1, corpus.validation_count)
    local train = corpus:texts()[1]
    assert.are.equal(90, train.train)
    assert.are.equal("A", train.text:sub(91, 91))
  end)

  it("of the default folder has no link and no equal files, and divides all bytes into training and validation", function()
    local path = "/usr/share/common-licenses"
    if lfs.attributes(path, "mode") ~= "directory" then return pending "this system has no such folder" end
    local corpus = ms.data.corpus(path)
    local bytes, texts = 0, {}
    for _, d in ipairs(corpus:texts()) do
      assert.is_nil(texts[d.text])
      texts[d.text] = true
      bytes = bytes + #d.text
      assert.are.equal(math.floor(#d.text / 10), #d.text - d.train)
    end
    assert.are.equal(bytes, corpus.train_count + corpus.validation_count)
    for _, d in ipairs(corpus.documents) do assert.are.equal("file", lfs.symlinkattributes(d.path, "mode")) end
  end)

  it("of llm.c's shards reads their tokens; file names select those for validation", function()
    write("x_train_000.bin", shard { 5, 50256, 7, 8 })
    write("x_val_000.bin", shard { 1, 2, 3 })
    local corpus = ms.data.corpus(folder)
    assert.are.equal("tokens", corpus.kind)
    assert.are.equal(50257, corpus.vocab)
    assert.are.equal(4, corpus.train_count)
    assert.are.equal(3, corpus.validation_count)
    local ids, targets = batches.new(corpus, { context = 3, batch = 1 }):train(1)
    assert.are.same({ { 5, 50256, 7 } }, ids:tolist())
    assert.are.same({ { 50256, 7, 8 } }, targets:tolist())
  end)

  it("names invalid options", function()
    local function err(...) return select(2, pcall(ms.data.corpus, ...)) end
    assert.matches("there is no file or folder", err(folder .. "/none"))
    assert.are.equal(0, os.execute(("mkfifo '%s/pipe'"):format(folder)))
    assert.matches("pipe' is a named pipe, expected a file or folder", err(folder .. "/pipe"))
    os.remove(folder .. "/pipe")
    assert.matches("the number of training tokens in '.*' is 0, expected at least 2", err(folder))
    assert.matches("is not a token shard of llm.c", err(write("a.bin", "short")))
    assert.matches("gives 3 tokens, which need %d+ bytes, but the file has only", err(write("b.bin", shard({ 1, 2, 3 }):sub(1, -2))))
    os.remove(folder .. "/a.bin")
    write("b.bin", shard { 1, 2, 3 })
    write("c", "text text text")
    assert.matches("'.*c' contains text with a vocabulary of 256, but the files before it contain tokens with 50257", err(folder))
  end)
end)

describe("batches", function()
  local function corpus_of(text)
    return ms.data.corpus(write("text", text))
  end

  it("visit every window of an epoch once, and another order in the next", function()
    local b = batches.new(corpus_of(numbered(2000)), { context = 16, batch = 4, seed = 3 })
    local orders = {}
    for epoch = 0, 1 do
      local seen, order, lowest = {}, {}, math.huge
      for k = 0, b.epoch_length - 1 do
        local start = b:start(epoch * b.epoch_length + k)
        assert.is_nil(seen[start])
        seen[start] = true
        order[#order + 1] = start
        lowest = math.min(lowest, start)
        assert.is_true(start >= 0 and start + 16 + 1 <= 1800)
      end
      for start in pairs(seen) do assert.are.equal(0, (start - lowest) % 16) end
      orders[epoch] = table.concat(order, " ")
    end
    assert.are_not.equal(orders[0], orders[1])
  end)

  it("are permutations for every length", function()
    for n = 1, 70 do
      local seen = {}
      for j = 0, n - 1 do
        local k = lib.ms_shuffle(n, 1, 2, j, n)
        assert.is_true(k >= 0 and k < n and not seen[k])
        seen[k] = true
      end
    end
  end)

  it("depend on the seed and the step only", function()
    local corpus = corpus_of(numbered(2000))
    local a = batches.new(corpus, { context = 8, batch = 3, seed = 1 })
    local b = batches.new(corpus, { context = 8, batch = 3, seed = 1 })
    local c = batches.new(corpus, { context = 8, batch = 3, seed = 2 })
    for step = 1, 5 do a:train(step) end
    assert.are.same(a:train(40):tolist(), b:train(40):tolist())
    assert.are_not.same(a:train(40):tolist(), c:train(40):tolist())
  end)

  it("have as targets the tokens that follow", function()
    local b = batches.new(corpus_of(numbered(2000)), { context = 8, batch = 3 })
    local ids, targets, n = b:train(2)
    assert.are.equal(3, n)
    assert.are.equal("int64", ids.dtype)
    ids, targets = ids:tolist(), targets:tolist()
    for k = 1, 3 do
      for j = 1, 7 do assert.are.equal(ids[k][j + 1], targets[k][j]) end
    end
  end)

  for world = 1, 5 do
    for parts = 1, 2 do
      it(("are the same sequences in the same order over %d ranks in %d parts"):format(world, parts), function()
        local corpus = corpus_of(numbered(2000))
        local whole = batches.new(corpus, { context = 8, batch = 7 }):train(3):tolist()
        local k, total = 0, 0
        for rank = 0, world - 1 do
          local b = batches.new(corpus, { context = 8, batch = 7, rank = rank, world = world })
          for part = 1, parts do
            local ids, _, n = b:train(3, part, parts)
            total = total + n
            for j, row in ipairs(ids:tolist()) do
              k = k + 1
              assert.are.same(whole[k], row)
              assert.is_true(j <= n)
            end
          end
        end
        assert.are.equal(7, k)
        assert.are.equal(7, total)
      end)
    end
  end

  for _, case in ipairs { { 1, 16, 1 }, { 2, 16, 3 }, { 3, 10, 2 }, { 4, 64, 16 }, { 2, 3, 4 } } do
    local world, context, size = unpack(case)
    it(("score every validation token once, at its position: %d ranks, context %d"):format(world, context), function()
      local texts = { numbered(400), numbered(48):reverse(), numbered(1000):reverse(), "short file" }
      for k, text in ipairs(texts) do write("f" .. k, text) end
      local corpus = ms.data.corpus(folder)
      local scored, rounds = {}, {}
      for rank = 0, world - 1 do
        local b = batches.new(corpus, { context = context, batch = world, rank = rank, world = world })
        local n = 0
        for ids, targets in b:validation(size) do
          n = n + 1
          ids, targets = ids:tolist(), targets:tolist()
          assert.are.equal(size, #ids)
          for k = 1, size do
            local text = {}
            for j = 1, context do text[j] = string.char(ids[k][j]) end
            text = table.concat(text)
            for j = 1, context do
              if targets[k][j] >= 0 then
                -- The preceding tokens back to the beginning of the window, and the token itself.
                local piece = text:sub(1, j) .. string.char(targets[k][j])
                scored[#scored + 1] = { piece = piece, before = j }
              end
            end
          end
        end
        rounds[#rounds + 1] = n
      end
      for rank = 2, world do assert.are.equal(rounds[1], rounds[rank]) end
      -- Every validation token, with the half context before it, must be scored exactly once.
      local wanted = {}
      for _, text in ipairs(texts) do
        for at = #text - math.floor(#text / 10) + 1, #text do
          local before = math.min(math.floor(context / 2), at - 1)
          wanted[#wanted + 1] = text:sub(at - before, at)
        end
      end
      assert.are.equal(corpus.validation_count, #scored)
      assert.are.equal(#wanted, #scored)
      table.sort(wanted, function(a, b) return #a > #b end)
      for _, w in ipairs(wanted) do
        local found = false
        for k, s in ipairs(scored) do
          if s.piece:sub(-#w) == w then
            table.remove(scored, k)
            found = true
            break
          end
        end
        assert.is_true(found)
      end
    end)
  end

  it("refuse a batch smaller than the ranks, and a text shorter than the context", function()
    local corpus = corpus_of(numbered(100))
    assert.error_matches(function() batches.new(corpus, { context = 8, batch = 2, world = 3 }) end,
      "batches: option 'batch' is 2, expected at least one sequence for each of 3 ranks")
    assert.error_matches(function() batches.new(corpus, { context = 90, batch = 2 }) end,
      "90 training tokens are too few for a context of 90, expected at least 91")
    batches.new(corpus, { context = 89, batch = 1 }):train(1)
  end)
end)

describe("the n-gram model", function()
  it("gives log 256 without counts and the entropy of a fair coin for a fair coin", function()
    assert.is_near(math.log(256), count_model.loss({ { text = "ab", train = 0 } }, 0), 1e-12)
    local text = ("ab"):rep(5000)
    assert.is_near(math.log(2), count_model.loss({ { text = text, train = 9000 } }, 0), 1e-3)
    assert.is_true(count_model.loss({ { text = text, train = 9000 } }, 1) < 0.01)
    assert.is_nil(count_model.loss { { text = "ab", train = 2 } })
  end)

  it("computes Witten and Bell's estimate", function()
    -- Trained on "aab". Order 0: 2 of 3 tokens are "a", and there are 2 different ones. No token follows "b", so P(a |
    -- b) is P(a) = (2 + 2/256) / (3 + 2).
    assert.is_near(-math.log((2 + 2 / 256) / 5), count_model.loss({ { text = "aaba", train = 3 } }, 1), 1e-12)
    -- Trained on "aaba". After "a": one "a" and one "b", 2 different tokens. P(a | a) = (1 + 2 * P(a)) / (2 + 2).
    assert.is_near(-math.log((1 + 2 * (3 + 2 / 256) / 6) / 4), count_model.loss({ { text = "aabaa", train = 4 } }, 1),
      1e-12)
  end)
end)
