-- SPDX-License-Identifier: MIT
--- Generated tokens: those of transformers, and what they do not depend on.
local folders = require "spec.support.hf_folders"
local golden = require "spec.support.golden"
local ms = require "moonshard"
local process = require "spec.support.process"

local cases, S = golden.load "generation", 8
local NONE = {}

local function model_of(name)
  local folder = folders.make(name, nil, cases)
  local model = ms.hf.load(folder)
  process.remove_folder(folder)
  return model, cases[name]
end

-- What the encoder of a model reads, or the ids that others continue; and options of the call.
local function source_of(name)
  if name ~= "whisper" then return folders.ids(S), {} end
  return folders.wave(78, { 2, 8, 24 }), { decoder_ids = ms.tensor({ { 1, 5 }, { 1, 9 } }, { dtype = "int64" }) }
end
local PROMPT = { t5 = 1, whisper = 2 }

describe("generate", function()
  local mask = ms.ones({ 2, S }, { dtype = "int64" })
  mask:narrow(1, 1, 1):narrow(2, 1, 3):zero_()

  for name in ms.sorted_pairs(cases) do
    it("gives the tokens of transformers: " .. name, function()
      local model, case = model_of(name)
      local runs = {
        greedy = { max_new_tokens = 50 },
        penalty = { max_new_tokens = 30, repetition_penalty = 1.4 },
        beams = { num_beams = 4 },
        beams_end = { num_beams = 4, eos_token_id = case.eos, num_return_sequences = 3 },
        beams_early = { num_beams = 4, eos_token_id = { case.eos }, early_stopping = true, length_penalty = 0.5 },
        beams_never = { num_beams = 4, eos_token_id = case.eos, early_stopping = "never", length_penalty = 2 },
        beams_penalty = { num_beams = 3, repetition_penalty = 1.3 },
        suppressed = { max_length = 24, suppress_tokens = { case.eos, 4 },
          begin_suppress_tokens = { 11, 15, 16, 19, 27 } },
        ngrams = { max_new_tokens = 30, no_repeat_ngram_size = 2, bad_words_ids = { { case.eos }, { 5, 6 } } },
        least = { max_new_tokens = 30, eos_token_id = case.eos, min_length = 18 },
        beams_rules = { num_beams = 3, no_repeat_ngram_size = 3, suppress_tokens = { case.eos }, eos_token_id = 7,
          min_new_tokens = 9 },
        padded = { attention_mask = mask },
        padded_beams = { max_new_tokens = 12, num_beams = 3, attention_mask = mask },
      }
      for run, o in ms.sorted_pairs(runs) do
        o.eos_token_id, o.pad_token_id = o.eos_token_id or NONE, 31
        local inputs, more = source_of(name)
        for key, value in pairs(more) do o[key] = value end
        if name == "whisper" then o.attention_mask = nil               -- no frame is padding
        elseif not o.attention_mask then o.attention_mask = ms.ones_like(mask) end
        local ids, prompt = model:generate(inputs, o), PROMPT[name] or S
        assert.are.same(case.texts[run], ids:narrow(2, prompt + 1, ids:size(2) - prompt):tolist(), run)
      end
      if PROMPT[name] then return end
      -- The same without a cache.
      local o = { max_new_tokens = 12, eos_token_id = NONE, use_cache = false }
      local _, new = model:generate(folders.ids(S), o)
      for r, row in ipairs(new) do assert.are.same({ unpack(case.texts.greedy[r], 1, 12) }, row) end
    end)
  end
end)

describe("generate as transformers", function()
  local function ids_of(list) return ms.tensor(list, { dtype = "int64" }) end

  it("keeps the best beams of the step in which early_stopping ends a search", function()
    local _, new = model_of "llama":generate({ { 7, 10, 21, 11, 11, 15 } }, { early_stopping = true, num_beams = 4,
      num_return_sequences = 3, max_new_tokens = 5, eos_token_id = 2 })
    assert.are.same({ { 0, 0, 0, 0, 0 }, { 18, 28, 24, 23, 27 }, { 0, 0, 0, 0, 2 } }, new)
  end)

  it("fills beams with the token of the end where the padding token is 0", function()
    local model = model_of "llama"
    local o = { early_stopping = true, num_beams = 4, num_return_sequences = 4, max_new_tokens = 3, eos_token_id = 2 }
    for pad, want in pairs { [0] = 2, [31] = 31 } do
      o.pad_token_id = pad
      local ids, new = model:generate(ids_of { { 7, 10, 21, 11, 11, 15 } }, o)
      local short = 0
      for r, row in ipairs(new) do
        for k = #row + 1, ids:size(2) - 6 do
          short = short + 1
          assert.are.equal(want, ids:tolist()[r][6 + k])
        end
      end
      assert.is_true(short > 0)
    end
  end)

  it("masks the padding token, unless it ends texts", function()
    local model, o = model_of "gpt2", { max_new_tokens = 6, pad_token_id = 31, eos_token_id = NONE }
    local _, want = model:generate({ { 5, 6 }, { 3, 4, 5, 6, 7 } }, o)
    local ids = ids_of { { 31, 31, 31, 5, 6 }, { 3, 4, 5, 6, 7 } }
    local _, new = model:generate(ids, o)
    assert.are.same(want, new)
    o.eos_token_id = 31
    _, new = model:generate(ids, o)
    assert.are_not.same(want[1], new[1])
    o.eos_token_id = NONE
    assert.has_error(function() model:generate(ids_of { { 5, 6, 31 } }, o) end,
      "generate: row 1 has the padding token 31 after others; pad on the left, or pass option 'attention_mask'")
  end)
end)

describe("generate of an encoder and a decoder", function()
  it("draws by the seed, and says what is wrong", function()
    local model = model_of "t5"
    local o = { max_new_tokens = 6, temperature = 1, seed = 3, num_return_sequences = 2, eos_token_id = NONE }
    local ids, a = model:generate(folders.ids(S), o)
    assert.are.same({ 4, 7 }, { unpack(ids.shape) })
    assert.are.same(a, select(2, model:generate(folders.ids(S), o)))
    assert.are_not.same(a[1], a[2])
    local speech, more = source_of "whisper"
    more.max_new_tokens = 63
    for text, call in pairs {
      ["token ids %[2, T%]"] = { model, folders.ids(S), { decoder_ids = ms.ones(1, 2) } },
      ["use_cache = true"] = { model, folders.ids(S), { use_cache = false } },
      ["65 positions .* 64"] = { model_of "whisper", speech, more },
    } do
      local ok, message = pcall(model.generate, unpack(call))
      assert.is_false(ok)
      assert.matches(text, message)
    end
  end)
end)

-- After id k comes k + 1 (of 8) or, with a small probability, k + 2; whatever the cache.
local Next = ms.nn.Module:extend "Next"

function Next:forward(ids, given)
  self.longest = math.max(self.longest or 0, ids:size(2))
  if self.fails then error "no" end
  if given and given.cache then given.cache.length = given.cache.length + ids:size(2) end
  local rows = ids:unsqueeze(3):repeat_interleave(8, 3)
  local by = (ms.arange(8) - rows):remainder(8)
  local logits = ms.full({ ids:size(1), ids:size(2), 8 }, -1e9):masked_fill(by:eq(1), 2):masked_fill(by:eq(2), 0)
  return given and given.last and logits:narrow(2, ids:size(2), 1) or logits
end

local generate = ms.text.generate

describe("generate", function()
  it("takes the likeliest token, also of models that take ids alone", function()
    for _, o in ipairs { {}, { use_cache = false }, { temperature = 0 } } do
      o.max_new_tokens = 6
      local ids, new = generate(Next(), ms.tensor({ 3 }, { dtype = "int64" }), o)
      assert.are.same({ 3, 4, 5, 6, 7, 0, 1 }, ids:tolist())
      assert.are.same({ { 4, 5, 6, 7, 0, 1 } }, new)
    end
  end)

  it("forbids the last one of bad_words_ids also where the others are the whole text", function()
    for words, want in pairs { [{ { 3, 4 } }] = 5, [{ { 0, 3, 4 } }] = 4, [{ { 3, 3, 4 }, { 4 } }] = 5 } do
      local _, new = generate(Next(), { { 3 } }, { bad_words_ids = words, max_new_tokens = 1 })
      assert.are.same({ { want } }, new)
    end
  end)

  it("draws by the seed alone, with the model's probabilities", function()
    local model = Next()
    local o = { max_new_tokens = 2000, temperature = 1, seed = 5 }
    local _, a = generate(model, { { 0 } }, o)
    ms.rand(7)
    local _, b = generate(model, { { 0 } }, o)
    assert.are.same(a, b)
    local _, c = generate(model, { { 0 } }, { max_new_tokens = 2000, do_sample = true, seed = 6 })
    assert.are_not.same(a, c)
    local two, before = 0, 0
    for _, id in ipairs(a[1]) do
      local by = (id - before) % 8
      assert.is_true(by == 1 or by == 2)
      if by == 2 then two = two + 1 end
      before = id
    end
    assert.is_near(1 / (1 + math.exp(2)), two / 2000, 0.03)
    -- Without a seed, the numbers are those of the generator.
    ms.manual_seed(3)
    local _, d = generate(model, { { 0 } }, { do_sample = true })
    local _, e = generate(model, { { 0 } }, { do_sample = true })
    ms.manual_seed(3)
    local _, f = generate(model, { { 0 } }, { do_sample = true })
    assert.are.same(d, f)
    assert.are_not.same(d, e)
  end)

  it("draws a row as it does alone, and each sample of a text by its own numbers", function()
    local model = model_of "mistral"
    local o = { do_sample = true, temperature = 2, top_k = 20, top_p = 0.9, seed = 11, eos_token_id = NONE }
    local texts = { { 3, 4, 5, 6, 7 }, { 9 }, { 1, 2, 3 } }
    local _, all = generate(model, texts, o)
    for r, text in ipairs(texts) do
      local _, one = generate(model, { text }, o)
      assert.are.same(one[1], all[r])
    end
    local ids = model:generate(texts, { max_new_tokens = 1, pad_token_id = 8 })
    assert.are.same({ 8, 8, 8, 8, 9 }, { unpack(ids:tolist()[2], 1, 5) })
    o.num_return_sequences = 3
    local _, many = generate(model, texts, o)
    assert.are.equal(9, #many)
    for r = 1, 3 do
      assert.are.same(all[r], many[3 * r - 2])
      assert.are_not.same(many[3 * r - 2], many[3 * r - 1])
      assert.are_not.same(many[3 * r - 1], many[3 * r])
    end
  end)

  it("restores the model's modes, also after an error", function()
    local model = ms.nn.Sequential(Next(), ms.nn.Dropout(0.1))
    model[2]:eval()
    generate(model, { { 0 } }, { use_cache = false })
    assert.are.same({ true, true, false }, { model.training, model[1].training, model[2].training })
    model[1].fails = true
    assert.has_error(function() generate(model, { { 0 } }, { use_cache = false }) end)
    assert.are.same({ true, true, false }, { model.training, model[1].training, model[2].training })
    assert.is_true(ms.is_grad_enabled())
  end)

  it("needs the memory of its cache, and leaves none behind", function()
    local model = model_of "llama"
    local o = { max_new_tokens = 5, do_sample = true, eos_token_id = NONE }
    local function after()
      generate(model, { { 0 } }, o)
      collectgarbage()
      collectgarbage()
      return ms.memory_stats("cpu").allocated
    end
    local before = after()
    o.max_new_tokens = 200
    assert.are.equal(before, after())
  end)

  it("allocates a cache of a fixed length once, with the same tokens", function()
    local model = model_of "mistral"
    local o = { max_new_tokens = 45, eos_token_id = NONE }
    local _, new = generate(model, { { 5, 6, 7 } }, o)
    o.cache_length = 48
    assert.are.same(new, select(2, generate(model, { { 5, 6, 7 } }, o)))
    local held = {}
    for _ in ms.text.stream(model, { 5, 6, 7 }, o) do
      collectgarbage()
      collectgarbage()
      held[#held + 1] = ms.memory_stats("cpu").allocated
    end
    for k = 3, 44 do assert.are.equal(held[2], held[k]) end
    o.cache_length = 47
    assert.has_error(function() generate(model, { { 5, 6, 7 }, { 1 } }, o) end,
      "generate: cache_length is 47, expected at least 48: the longest text has 3 tokens, and max_new_tokens is 45")
  end)
end)

describe("generate of Phi-3", function()
  it("turns all positions anew beyond its first context, those in the cache as well", function()
    local folder = folders.make("phi3_short", { original_max_position_embeddings = 12 })
    local model = ms.hf.load(folder)
    process.remove_folder(folder)
    local function alone(list, n)
      local all = { unpack(list) }
      for _ = 1, n do all[#all + 1] = model(ms.tensor({ all }, { dtype = "int64" }), { last = 1 }):argmax(-1):item() end
      return { unpack(all, #list + 1) }
    end
    local list = folders.ids(S):select(1, 1):tolist()
    local want = alone(list, 12)
    local _, new = model:generate({ list }, { max_new_tokens = 12, eos_token_id = NONE })
    assert.are.same(want, new[1])
    -- The longest row's position counts.
    _, new = model:generate({ list, { 3, 1, 4 } }, { max_new_tokens = 12, eos_token_id = NONE })
    assert.are.same(want, new[1])
    -- A cache that an earlier call left continues beyond.
    local store = require("moonshard.text.generation.cache").new()
    local generation = require "moonshard.text.generation"
    for _, part in ipairs { { 0, 3 }, { 6, 6 } } do
      local from, n, text, got = part[1], part[2], { unpack(list) }, {}
      for k = 1, from do text[#text + 1] = want[k] end
      for id in generation._stream("chat", model, text, { max_new_tokens = n, eos_token_id = NONE }, store) do
        got[#got + 1] = id
      end
      assert.are.same({ unpack(want, from + 1, from + n) }, got)
    end
  end)
end)

describe("stream", function()
  it("gives the tokens of generate, one by one", function()
    local model = model_of "gemma2"
    for _, o in ipairs { { max_new_tokens = 9, eos_token_id = NONE }, { temperature = 1.5, seed = 2 } } do
      local _, new = model:generate({ { 5, 6, 7 } }, o)
      local list = {}
      for id in model:stream({ 5, 6, 7 }, o) do list[#list + 1] = id end
      assert.are.same(new[1], list)
    end
  end)
end)

describe("the filters of sampling", function()
  local sample = require "moonshard.text.generation.sample"
  local raw = require "moonshard.data.raw"
  local ffi = require "ffi"

  -- The tokens that plain formulas keep, the likeliest ones first.
  local function kept(p, o)
    local order, out, mass = {}, {}, 0
    for k = 1, #p do order[k] = k end
    table.sort(order, function(a, b) return p[a] > p[b] or p[a] == p[b] and a < b end)
    local least = o.top_k > 0 and p[order[math.min(o.top_k, #p)]] or 0
    for _, k in ipairs(order) do
      if p[k] >= least then
        out[#out + 1] = k
        mass = mass + p[k]
      end
    end
    local sum, n = 0, 0
    while n < #out and (n == 0 or sum < o.top_p * mass - 1e-12) do
      n = n + 1
      sum = sum + p[out[n]]
    end
    local list = {}
    for k = 1, n do
      if p[out[k]] >= o.min_p * p[order[1]] then list[#list + 1] = out[k] - 1 end
    end
    table.sort(list)
    return list
  end

  local shapes = {
    peaked = function(k, n) return math.exp(-k * 20 / n) end,
    flat = function() return 1 end,
    steps = function(k) return 2 ^ -math.floor(k / 30) end,
    random = function(k) return ((k * 7919) % 1009 + 1) / 1009 end,
  }
  for shape, value in ms.sorted_pairs(shapes) do
    it("keep the tokens of the plain formulas: " .. shape, function()
      for _, n in ipairs { 1, 2, 33, 500 } do
        local p = {}
        for k = 1, n do p[k] = value(k, n) end
        local held, data = raw.contiguous(ms.tensor(p, { dtype = "float32" }))
        p = held:tolist()
        for _, o in ipairs { { top_k = 0, top_p = 1, min_p = 0 }, { top_k = 5, top_p = 1, min_p = 0 },
          { top_k = 0, top_p = 0.6, min_p = 0 }, { top_k = 40, top_p = 0.5, min_p = 0 },
          { top_k = 0, top_p = 1, min_p = 0.3 },
          { top_k = 30, top_p = 0.9, min_p = 0.25 }, { top_k = 1, top_p = 0, min_p = 1 } } do
          local want, seen, list = kept(p, o), {}, {}
          -- Each token that is kept has a part of the numbers from 0 to 1.
          local total = 0
          for _, id in ipairs(want) do total = total + p[id + 1] end
          local at = 0
          for _, id in ipairs(want) do
            local u = (at + p[id + 1] / 2) / total
            at = at + p[id + 1]
            local got = sample.draw(ffi.cast("float *", data), n, o, u)
            if not seen[got] then list[#list + 1] = got end
            seen[got] = true
          end
          assert.are.same(want, list)
          assert.are.equal(want[1], sample.draw(ffi.cast("float *", data), n, o, 0))
          assert.are.equal(want[#want], sample.draw(ffi.cast("float *", data), n, o, 1))
        end
      end
    end)
  end
end)

describe("scores that are not finite", function()
  local sample = require "moonshard.text.generation.sample"
  local ffi = require "ffi"

  -- A tensor of these numbers in which `bits` stand in place of the number at `at`, from 0. LuaJIT takes NaNs whose first
  -- 13 bits are ones for values of other types.
  local function with_bits(numbers, at, bits)
    local t = ms.tensor(numbers, { dtype = "float32" })
    local data = ffi.cast("int32_t *", t:data_ptr())
    data[at] = bits
    return t, ffi.cast("float *", data)
  end

  it("pass through the repetition penalty, which changes a token once", function()
    for _, bits in ipairs { -1, -2, 0x7fc00000, 0x7fffffff, -0x400000, -0x800000, 0x7f800000 } do
      local scores = with_bits({ { 1, -1, 3, 0 }, { -2, 5, 6, 7 } }, 2, bits)
      sample.penalize_(scores, { { ids = { 0, 1, 2, 1 } }, { ids = { 3 } } }, 2)
      local values = scores:tolist()
      assert.are.same({ 0.5, -2 }, { values[1][1], values[1][2] })
      assert.are.same({ -2, 5, 6, 3.5 }, values[2])
      local v = bits == -0x800000 and -math.huge or bits == 0x7f800000 and math.huge
      assert.is_true(v and values[1][3] == v or not v and values[1][3] ~= values[1][3])
      assert.are.equal(0, values[1][4])
    end
  end)

  it("are no probabilities: none is drawn", function()
    for _, jit_mode in ipairs { "on", "off" } do
      jit[jit_mode](sample.draw, true)
      for _, bits in ipairs { -1, -2, 0x7fc00000, 0x7fffffff, -0x400000, -0x800000, 0x7f800000 } do
        for at = 0, 99, 33 do
          local list = {}
          for k = 1, 100 do list[k] = 0.01 end
          local t, q = with_bits(list, at, bits)
          for _, top_p in ipairs { 1, 0.9 } do
            assert.is_nil(sample.draw(q, 100, { top_k = 50, top_p = top_p, min_p = 0 }, 0.5))
          end
          t:release()
        end
      end
    end
    jit.on(sample.draw, true)
  end)

  it("are an error when a token is chosen, also of a model whose weights are not finite", function()
    local model = Next()
    local forward = model.forward
    model.forward = function(...)
      local logits = forward(...)
      ffi.cast("int32_t *", logits:data_ptr())[1] = -1
      return logits
    end
    for _, o in ipairs { { do_sample = true }, { do_sample = true, repetition_penalty = 2 }, {}, { num_beams = 2 } } do
      local ok, message = pcall(generate, model, { { 0 } }, o)
      assert.is_false(ok)
      assert.matches("generate: the logits of row 1 are not finite", message, 1, true)
    end
    local ok, message = pcall(generate, Next(), { { 0 } }, { temperature = 1e-300 })
    assert.is_false(ok)
    assert.matches("generate: temperature 1e%-300 is too small", message)
    ok, message = pcall(generate, Next(), { { 0 }, { 1 } }, { suppress_tokens = { 0, 1, 2, 3, 4, 5, 6, 7 } })
    assert.is_false(ok)
    assert.matches("generate: no token of row 1 is allowed", message, 1, true)
  end)
end)

describe("generate of models.GPT", function()
  it("with a cache gives the tokens of whole texts, also beyond the context", function()
    for _, position in ipairs { "learned", "alibi" } do
      ms.manual_seed(2)
      local gpt = require "moonshard.models.gpt" { vocab = 20, context = 24, layers = 2, heads = 2, dim = 16,
        position = position, init_std = 0.5 }
      for _, texts in ipairs { { { 1, 2, 3 } }, { { 1, 2, 3, 4, 5, 6 }, { 7 } } } do
        local _, a = gpt:generate(texts, { max_new_tokens = 15 })
        local _, b = gpt:generate(texts, { max_new_tokens = 15, use_cache = false })
        assert.are.same(a, b)
        local _, long = gpt:generate(texts, { max_new_tokens = 60 })
        assert.are.equal(60, #long[1])
        -- After the context is full, the text goes on from its last half.
        local half = { unpack(long[1], 24 - #texts[1] + 2 - 12, 24 - #texts[1] + 1) }
        if #texts == 1 then
          local _, again = gpt:generate({ half }, { max_new_tokens = 10 })
          assert.are.same(again[1], { unpack(long[1], 24 - #texts[1] + 2, 24 - #texts[1] + 11) })
        end
      end
      assert.is_true(gpt.training)
    end
  end)
end)

describe("a text ends", function()
  local letters = {}
  for k = 0, 25 do letters[k] = string.char(97 + k) end
  local tokenizer = { decode = function(_, ids)
    local list = {}
    for k, id in ipairs(ids) do list[k] = letters[id] end
    return table.concat(list)
  end }
  -- After token k comes k + 1.
  local After = ms.nn.Module:extend "After"
  function After.forward(_, ids) return ms.nn.F.one_hot((ids + 1):remainder(26), 26):float() end

  local function new_of(o)
    o.use_cache = false
    return select(2, generate(After(), { { 0 }, { 20 } }, o))
  end

  it("with a token of eos_token_id, one of the model's configuration, or max_new_tokens", function()
    assert.are.same({ { 1, 2, 3 }, { 21, 22, 23, 24 } }, new_of { eos_token_id = { 3, 24 } })
    assert.are.same({ { 1, 2 }, { 21, 22 } }, new_of { eos_token_id = 3, max_new_tokens = 2 })
    local ids = generate(After(), { { 0 }, { 20 } }, { eos_token_id = { 3, 22 }, pad_token_id = 9, use_cache = false })
    assert.are.same({ { 0, 1, 2, 3 }, { 20, 21, 22, 9 } }, ids:tolist())
    local model = After()
    model.config = { eos_token_id = { 2 } }
    assert.are.same({ { 1, 2 } }, select(2, generate(model, { { 0 } }, { use_cache = false })))
  end)

  it("with a stop text, also one that begins in one token and ends in another", function()
    local o = { stop_strings = { "ef", "xyz" }, tokenizer = tokenizer }
    assert.are.same({ { 1, 2, 3, 4, 5 }, { 21, 22, 23, 24, 25 } }, new_of(o))
    o.stop_strings = "d"
    assert.are.same({ 1, 2, 3 }, new_of(o)[1])
    o.stop_strings = {}
    assert.are.equal(20, #new_of(o)[1])
    o.stop_strings = "abc"                               -- the prompt is no part of it
    assert.are.equal(20, #new_of(o)[1])
  end)

  it("in a beam, too", function()
    local model = model_of "llama"
    local names = { decode = function(_, ids) return table.concat(ids, ",") .. "," end }
    local o = { num_beams = 3, eos_token_id = NONE, max_new_tokens = 8 }
    local _, free = model:generate({ { 3, 4, 5 } }, o)
    o.stop_strings, o.tokenizer = ("%d,%d,"):format(free[1][2], free[1][3]), names
    local _, stopped = model:generate({ { 3, 4, 5 } }, o)
    assert.is_truthy((table.concat(stopped[1], ",") .. ","):find(o.stop_strings, 1, true) or #stopped[1] == 8)
  end)
end)

describe("wrong calls of generate", function()
  local ids = ms.tensor({ { 1, 2 }, { 3, 4 } }, { dtype = "int64" })
  for _, row in ipairs {
    { { top_k = 3, do_sample = false }, "options of sampling, but do_sample is false" },
    { { temperature = 0, do_sample = true }, "temperature 0 is no sampling" },
    { { num_beams = 2, do_sample = true }, "beams are not sampled" },
    { { num_return_sequences = 2 }, "there are only num_beams, 1" },
    { { stop_strings = "x" }, "stop_strings need option 'tokenizer'" },
    { { max_tokens = 3 }, "unknown option 'max_tokens'" },
    { { top_p = 1.5 }, "a number from 0 to 1" },
    { { stop_strings = { "a", "" } }, "option 'stop_strings': text 2 is empty" },
    { { early_stopping = "now" }, "true, false or 'never'" },
    { { attention_mask = ms.tensor { { 1, 1 }, { 1, 0 } } }, "row 2 of the attention_mask is padded on the right" },
    { { attention_mask = ms.tensor { { 1, 1 }, { 0, 0 } } }, "row 2 of the attention_mask has no token" },
    { {}, "int64 %[T%] or %[B, T%]", ms.ones(2, 2) },
    { {}, "a list of at least one id", { {} } },
    { {}, "token 1 of row 1 is a string %('1'%), expected a whole number", { { "1" } } },
  } do
    it("name what is wrong, at the script's line: " .. row[2], function()
      local ok, err = pcall(function() return (generate(Next(), row[3] or ids, row[1])) end)
      assert.is_false(ok)
      assert.matches(row[2], err)
      assert.matches("^[^:]*generation_spec.lua:%d+: ", err)
    end)
  end
end)

describe("generation_config.json", function()
  it("has the defaults of calls that say nothing else", function()
    local folder = folders.make("llama", nil, cases)
    finally(function() process.remove_folder(folder) end)
    process.write(folder .. "/generation_config.json", [[{ "do_sample": true, "temperature": 1.5, "top_k": 7,
      "top_p": null, "eos_token_id": [19, 4], "max_new_tokens": 9, "transformers_version": "5.24.0" }]])
    local model, plain = ms.hf.load(folder), model_of "llama"
    local texts = { { 3, 4, 5 }, { 9 } }
    local function check(given, same)
      same.eos_token_id = { 19, 4 }
      local _, got = model:generate(texts, given)
      local _, want = plain:generate(texts, same)
      assert.are.same(want, got)
    end
    check({ seed = 1 }, { seed = 1, temperature = 1.5, top_k = 7, max_new_tokens = 9 })
    check({ seed = 1, top_k = 3, max_new_tokens = 4 }, { seed = 1, temperature = 1.5, top_k = 3, max_new_tokens = 4 })
    check({ do_sample = false }, { max_new_tokens = 9 })
    check({ temperature = 0 }, { max_new_tokens = 9 })
    check({ num_beams = 2 }, { num_beams = 2, max_new_tokens = 9 })
    ms.hf.save(model, folder .. "/out")
    assert.are.equal(7, ms.hf.load(folder .. "/out").generation_config.top_k)
  end)

  it("has what a call may not choose, its length, and warns of what generate lacks", function()
    local folder = folders.make("llama", nil, cases)
    finally(function() process.remove_folder(folder) end)
    local plain = model_of "llama"
    local function load(text)
      process.write(folder .. "/generation_config.json", text)
      return ms.catch_warnings(ms.hf.load, folder)
    end
    local _, want = plain:generate({ { 3, 4, 5 } }, { suppress_tokens = { 1, 8 }, begin_suppress_tokens = { 3, 9 },
      no_repeat_ngram_size = 3, max_new_tokens = 9, eos_token_id = NONE })
    local list, model = load [[{ "suppress_tokens": [1, 8], "begin_suppress_tokens": [3, 9], "max_length": 12,
      "no_repeat_ngram_size": 3, "eos_token_id": [], "typical_p": 1.0, "num_beam_groups": 1, "diversity_penalty": 0.0,
      "forced_eos_token_id": null, "lang_to_id": { "<|en|>": 3 }, "return_timestamps": false }]]
    assert.are.same({}, list)
    assert.are.same(want, select(2, model:generate { { 3, 4, 5 } }))
    assert.are.equal(2, #select(2, model:generate({ { 3, 4, 5 } }, { max_new_tokens = 2 }))[1])
    assert.has_error(function() model:generate({ { 1, 2, 3 } }, { max_length = 3 }) end,
      "generate: max_length is 3, expected more than the 3 tokens of the longest text; or give max_new_tokens")
    list, model = load '{ "typical_p": 0.9, "forced_eos_token_id": 2, "num_beams": 3, "num_return_sequences": 2 }'
    assert.are.equal(2, #model:generate { { 3, 4, 5 } }:tolist())
    local n = 0
    for _ in model:stream({ 3, 4, 5 }, { max_new_tokens = 4, eos_token_id = NONE }) do n = n + 1 end
    assert.are.equal(4, n)
    assert.are.equal(2, #list)
    assert.matches("generation_config.json': key 'forced_eos_token_id' is 2, which generate lacks", list[1])
    assert.matches("key 'typical_p' is 0.9", list[2])
  end)
end)
