-- SPDX-License-Identifier: MIT
--- Encoders of texts and images of Hugging Face's folders: results equal to transformers'.
local cache = require "moonshard.text.generation.cache"
local cjson = require "cjson"
local ms = require "moonshard"
local folders = require "spec.support.hf_folders"
local names = require "moonshard.hf.names"
local process = require "spec.support.process"

local TOLERANCE = 1e-5
local S = 8

local function int64(list, ...) return ms.tensor(list, { dtype = "int64" }):reshape(...) end

-- The mask of make_hf.py's `padding`: the first text has 5 tokens.
local function padding()
  local mask = ms.ones({ 2, S }, { dtype = "int64" })
  mask:narrow(1, 1, 1):narrow(2, 6, S - 5):zero_()
  return mask
end

local function close(t, list, what) assert.is_true(folders.off(t, list) < TOLERANCE, what) end

local function close_to(x, y) assert.is_true(math.abs(x:item() - y) < TOLERANCE, "loss") end

local function pixels() return folders.wave(77, { 2, 3, 16, 16 }) end

-- Compares results, and leaves gradients of what the reference differentiated.
local kinds = {
  BertModel = function(model, case)
    local x, pooled = model(folders.ids(S), { attention_mask = padding() })
    x = x:narrow(2, 1, 5)
    close(x, case.hidden, "hidden")
    close(pooled, case.pooled, "pooled")
    x:square():sum():backward()
  end,
  BertHead = function(model, case)
    local mask, per_token = padding(), #case.labels > 2
    local logits = model(folders.ids(S), { attention_mask = mask })
    close(per_token and logits:narrow(2, 1, 5) or logits, case.logits, "logits")
    local labels = int64(case.labels, per_token and { 2, S } or { 2 })
    local loss = model(folders.ids(S), { attention_mask = mask, labels = labels })
    close_to(loss, case.loss)
    loss:backward()
  end,
  ViTModel = function(model, case)
    local x, pooled = model(pixels())
    close(x, case.hidden, "hidden")
    close(pooled, case.pooled, "pooled")
    x:square():sum():backward()
  end,
  ViTForImageClassification = function(model, case)
    close(model(pixels()), case.logits, "logits")
    local loss = model(pixels(), { labels = int64({ 1, 4 }, 2) })
    close_to(loss, case.loss)
    loss:backward()
  end,
  CLIPModel = function(model, case)
    local ids = folders.ids(S)
    close(model(ids), case.texts, "texts")
    close(model(nil, pixels()), case.images, "images")
    close(model(ids, pixels()), case.logits, "logits")
    local loss = model(ids, pixels(), { loss = true, attention_mask = ms.ones { 2, S } })
    close_to(loss, case.loss)
    loss:backward()
  end,
}
-- Models of an encoder and a decoder: results with labels, and greedy tokens with a cache.
local function seq2seq(model, case, inputs, mask)
  local labels = folders.ids(6, 5)
  labels:narrow(1, 1, 1):narrow(2, 5, 2):fill_(-100)
  local loss, memory = model(inputs, { labels = labels, attention_mask = mask })
  close_to(loss, case.loss)
  close(mask and memory:narrow(2, 1, 5) or memory, case.memory, "memory")
  local start = ms.full({ 2, 1 }, model.config.decoder_start_token_id, { dtype = "int64" })
  local rest = labels:narrow(2, 1, 5)
  local ids = ms.cat({ start, rest:masked_fill(rest:eq(-100), 0) }, 2)
  close(model(inputs, { decoder_ids = ids, attention_mask = mask }), case.logits, "logits")
  loss:backward()
  ms.no_grad(function()
    local store, now, out = cache.new(), start, {}
    for t = 1, 12 do
      local logits = model(nil, { memory = memory, decoder_ids = now, cache = store, last = 1, attention_mask = mask })
      now = logits:argmax(-1)
      out[t] = now
    end
    assert.are.same(case.greedy, ms.cat(out, 2):reshape(-1):tolist())
  end)
end

function kinds.T5ForConditionalGeneration(model, case) seq2seq(model, case, folders.ids(S), padding()) end
function kinds.WhisperForConditionalGeneration(model, case) seq2seq(model, case, folders.wave(78, { 2, 8, 24 })) end
function kinds.T5EncoderModel(model, case)
  local x = model(folders.ids(S), { attention_mask = padding() }):narrow(2, 1, 5)
  close(x, case.hidden, "hidden")
  x:square():sum():backward()
end
kinds.RobertaModel = kinds.BertModel
for _, suffix in ipairs { "MaskedLM", "SequenceClassification", "TokenClassification" } do
  kinds["BertFor" .. suffix], kinds["RobertaFor" .. suffix] = kinds.BertHead, kinds.BertHead
end

describe("an encoder of transformers", function()
  local folder, case
  after_each(function()
    if folder then process.remove_folder(folder) end
    folder = nil
  end)

  for name, row in ms.sorted_pairs(folders.cases) do
    local run = kinds[row.config.architectures[1]]
    if run then
      it("has its results and gradients, and is written as it was read: " .. name, function()
        folder, case = folders.make(name)
        local model = ms.hf.load(folder)
        run(model, case)
        local norms, n = {}, 0
        for _, t in ipairs(case.tensors) do norms[t[1]] = t[3] end
        for _, e in ipairs(names.entries(model)) do
          if norms[e.file] ~= cjson.null and e.t.requires_grad then
            n = n + 1
            assert.is_truthy(e.t.grad, e.file)
            local norm = e.t.grad:norm():item()
            assert.is_true(math.abs(norm - norms[e.file]) < 2e-6 * math.max(5, norms[e.file]), e.file)
          end
        end
        assert.is_true(n > 3)
        ms.hf.save(model, folder .. "/out")
        local want, got = ms.load(folder .. "/model.safetensors"), ms.load(folder .. "/out/model.safetensors")
        for key, t in pairs(want) do assert.is_true(t:equal(got[key]), key) end
        for key in pairs(got) do assert.is_truthy(want[key], key) end
      end)
    end
  end

  it("has a bias of its own where the head is not tied, which old files have by another name", function()
    local config = { model_type = "bert", vocab_size = 32, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 1,
      num_attention_heads = 4, tie_word_embeddings = false, architectures = { "BertForMaskedLM" } }
    folder = process.temp_folder()
    local model, file = ms.hf.create(config), folder .. "/out/model.safetensors"
    ms.no_grad(function() model.decoder.bias:normal_() end)
    ms.hf.save(model, folder .. "/out")
    local ids, t = folders.ids(S), ms.load(file)
    assert.is_true(t["cls.predictions.decoder.bias"]:equal(model.decoder.bias))
    assert.are.equal(0, t["cls.predictions.bias"]:abs():sum():item())
    assert.is_true(ms.hf.load(folder .. "/out")(ids):equal(model(ids)))
    t["cls.predictions.bias"], t["cls.predictions.decoder.bias"] = t["cls.predictions.decoder.bias"], nil
    ms.save(file, t)
    assert.is_true(ms.hf.load(folder .. "/out")(ids):equal(model(ids)))
  end)

  it("has the head that a file of T5 1.1 has, though its configuration ties it", function()
    folder = folders.make "t5_gated"
    local t, ids = ms.load(folder .. "/model.safetensors"), folders.ids(S)
    t["lm_head.weight"] = t["shared.weight"] * 2
    ms.save(folder .. "/model.safetensors", t)
    local model = ms.hf.load(folder)
    assert.is_true(model.lm_head.weight:equal(t["lm_head.weight"]))
    ms.hf.save(model, folder .. "/out")
    assert.is_true(ms.hf.load(folder .. "/out")(ids, { decoder_ids = ids }):equal((model(ids, { decoder_ids = ids }))))
  end)

  it("takes T5's dense_act_fn and is_gated_act before feed_forward_proj, as transformers", function()
    folder = folders.make("t5_gated", { feed_forward_proj = "relu", dense_act_fn = "silu", is_gated_act = true })
    local mlp = ms.hf.load(folder).encoder.layers[1].mlp
    assert.are.same({ "silu", true }, { mlp.act, mlp.gate ~= nil })
  end)

  for _, name in ipairs { "bert", "roberta", "llama", "gemma" } do
    it("gives the row of pad_token_id no gradient: " .. name, function()
      folder = folders.make(name, { pad_token_id = 3 })
      local model = ms.hf.load(folder)
      model = model.model or model
      model(ms.tensor({ { 5, 3, 9, 7 } }, { dtype = "int64" })):square():sum():backward()
      local norms = (model.words or model.embed).weight.grad:norm({ dim = 2 }):tolist()
      assert.are.equal(0, norms[4])
      assert.is_true(norms[6] > 0)
    end)
  end
end)
