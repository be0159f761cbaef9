-- SPDX-License-Identifier: MIT
--- GGUF files: those of PyPI's gguf are read, and written byte for byte; models go there and back.
local data = require "spec.support.tokenizer_data"
local folders = require "spec.support.hf_folders"
local gguf_file = require "moonshard.io.gguf"
local golden = require "spec.support.golden"
local message = require "spec.support.message"
local ms = require "moonshard"
local process = require "spec.support.process"

local S = 8

describe("a GGUF file", function()
  local folder
  before_each(function() folder = process.temp_folder() end)
  after_each(function() process.remove_folder(folder) end)

  local function reference()
    local want = golden.load "gguf"
    return (want.file:gsub("%x%x", function(byte) return string.char(tonumber(byte, 16)) end)), want
  end

  local function numbers()
    local t = folders.wave(2, { 4, 64 })
    t:narrow(1, 2, 1):narrow(2, 1, 32):zero_()
    return t
  end

  it("of PyPI's gguf is read", function()
    local bytes, want = reference()
    process.write(folder .. "/a.gguf", bytes)
    local file = gguf_file.open(folder .. "/a.gguf")
    assert.are.same({ ["general.architecture"] = "llama", ["llama.block_count"] = 3, ["llama.flag"] = true,
      ["general.name"] = "né", ["llama.rope.freq_base"] = tonumber(require("ffi").new("float", 0.1)),
      ["tokenizer.ggml.tokens"] = { "a", "", "bc" }, ["tokenizer.ggml.token_type"] = { 1, -3, 1 } }, file.values)
    local t = numbers()
    assert.is_true(file:read "plain":equal(t[1]:narrow(1, 1, 5)))
    assert.is_true(file:read "half":equal(t:narrow(2, 1, 3):to "float16"))
    assert.is_true(file:read "brain":equal(t:narrow(1, 1, 2):to "bfloat16"))
    assert.is_true(folders.off(file:read "q8", want.q8) < 1e-8)
    file:close()
  end)

  it("is written as PyPI's gguf writes it", function()
    local t, path = numbers(), folder .. "/b.gguf"
    local file = assert(io.open(path, "wb"))
    gguf_file.begin(file, { { "general.architecture", "string", "llama" }, { "llama.block_count", "u32", 3 },
      { "llama.rope.freq_base", "f32", 0.1 }, { "llama.flag", "bool", true }, { "general.name", "string", "né" },
      { "tokenizer.ggml.tokens", "strings", { "a", "", "bc" } },
      { "tokenizer.ggml.token_type", "i32s", { 1, -3, 1 } } }, {
      { name = "plain", kind = "float32", shape = { 5 } }, { name = "half", kind = "float16", shape = { 4, 3 } },
      { name = "brain", kind = "bfloat16", shape = { 2, 64 } }, { name = "q8", kind = "q8_0", shape = { 4, 64 } } })
    gguf_file.put(file, t[1]:narrow(1, 1, 5), "float32", "plain")
    gguf_file.put(file, t:narrow(2, 1, 3), "float16", "half")
    gguf_file.put(file, t:narrow(1, 1, 2), "bfloat16", "brain")
    gguf_file.put(file, t, "q8_0", "q8")
    file:close()
    assert.is_true((reference()) == process.read(path))
  end)

  for _, name in ipairs { "gpt2", "llama", "llama_3.1", "llama_biases", "qwen2" } do
    it("takes a model, and gives it back: " .. name, function()
      local from, case = folders.make(name)
      local model, path = ms.hf.load(from), folder .. "/model.gguf"
      process.remove_folder(from)
      ms.hf.save(model, path)
      local back = ms.hf.load(path)
      assert.is_true(folders.off(back(folders.ids(S)), case.logits) < 1e-5)
      assert.are.equal(model.config.eos_token_id, back.config.eos_token_id)
      for _, dtype in ipairs { "float16", "bfloat16", "q8_0" } do
        ms.hf.save(model, path, { dtype = dtype })
        assert.is_true(folders.off(ms.hf.load(path)(folders.ids(S)), case.logits) < 0.1, dtype)
      end
    end)
  end

  describe("with a tokenizer", function()
    local cases = require("cjson").decode(data.read "cases.json")

    -- A folder with a tokenizer and a Llama of as many ids, which is written as folder/t.gguf.
    local function write(name, as, more)
      local from, t = process.temp_folder(), data.open(name)
      process.write(from .. "/" .. as, data.read(name))
      for file, text in pairs(more or {}) do process.write(from .. "/" .. file, text) end
      local model = ms.hf.create { model_type = "llama", vocab_size = t.vocab_size + 5, hidden_size = 16,
        intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2, eos_token_id = 7 }
      model.family.folder = from
      local warned = table.concat((ms.catch_warnings(ms.hf.save, model, folder .. "/t.gguf")), "\n")
      process.remove_folder(from)
      return warned, t
    end

    for _, row in ipairs {
      -- name, file, model and pre in the file
      { "gpt2", "tokenizer.json", "gpt2 gpt-2" }, { "llama3", "tokenizer.json", "gpt2 llama-bpe" },
      { "bpe", "tokenizer.model", "llama default" },
    } do
      local name, file = row[1], row[2]
      it("gives the same tokens: " .. name, function()
        local warned, t = write(name .. file:match "%.%w+$", file)
        assert.are.equal("", warned)
        local back = ms.text.tokenizer(folder .. "/t.gguf")
        for _, case in ipairs(cases[name].cases or cases[name]) do
          local ids, more = t:encode(case.text, { offsets = true })
          local got, places = back:encode(case.text, { offsets = true })
          assert.are.same(ids:tolist(), got:tolist(), case.text)
          if name == "bpe" then assert.are.same(more.offsets:tolist(), places.offsets:tolist(), case.text) end
          assert.are.equal(t:decode(ids), back:decode(ids))
        end
        local opened = gguf_file.open(folder .. "/t.gguf")
        opened:close()
        local values = opened.values
        local n = t.vocab_size + 5
        assert.are.equal(row[3], values["tokenizer.ggml.model"] .. " " .. values["tokenizer.ggml.pre"])
        assert.are.same({ n, n, ("[PAD%d]"):format(n - 1), 5 }, { #values["tokenizer.ggml.tokens"],
          #values["tokenizer.ggml.token_type"], values["tokenizer.ggml.tokens"][n], values["tokenizer.ggml.token_type"][n] })
        assert.are.equal(t.eos_id or 7, values["tokenizer.ggml.eos_token_id"])
      end)
    end

    it("keeps it on the way to another file, and to a folder", function()
      local _, t = write("llama3.json", "tokenizer.json", { ["tokenizer_config.json"] =
        '{"bos_token": "<s>", "eos_token": "<|end|>", "chat_template": "{{ hello }}"}' })
      local model = ms.hf.load(folder .. "/t.gguf")
      ms.hf.save(model, folder .. "/again.gguf")
      ms.hf.save(model, folder .. "/out")
      for _, path in ipairs { "/again.gguf", "/out" } do
        local back = ms.text.tokenizer(folder .. path)
        assert.are.same(t:encode("Hello<|end|>"):tolist(), back:encode("Hello<|end|>"):tolist())
      end
      -- PyPI's tokenizers number added tokens anew that stand before others and are not in the vocabulary.
      local file = require "cjson".decode(process.read(folder .. "/out/tokenizer.json"))
      assert.are.equal(t:id "<|end|>", file.model.vocab["<|end|>"])
      local back = ms.text.tokenizer(folder .. "/again.gguf")
      assert.are.same({ 0, 1 }, { back.bos_id, back.eos_id })
      local ok, err = pcall(back.apply_chat_template, back, { { role = "user", content = "a" } })
      assert.is_false(ok)
      assert.is_truthy(err:find("again.gguf", 1, true), err)
    end)

    it("gives a folder all that a chat needs", function()
      local chats = require "moonshard.text.chat"
      write("llama3.json", "tokenizer.json", { ["chat_template.jinja"] = chats.template "chatml",
        ["tokenizer_config.json"] = '{"bos_token": "<s>", "eos_token": "<|end|>"}' })
      local model = ms.hf.load(folder .. "/t.gguf")
      ms.hf.save(model, folder .. "/out")
      local back, t = ms.hf.load(folder .. "/out"), ms.text.tokenizer(folder .. "/out")
      assert.are.equal("llama", back.config.model_type)
      assert.are.same({ 1, 7 }, back.generation_config.eos_token_id)
      assert.are.same(model.config.eos_token_id, back.config.eos_token_id)
      assert.are.same({ 0, 1 }, { t.bos_id, t.eos_id })
      local messages = { { role = "user", content = "a" } }
      assert.are.equal(t:apply_chat_template(messages, { chat = "chatml", tokenize = false }),
        t:apply_chat_template(messages, { tokenize = false }))
    end)

    it("has none that llama.cpp lacks, and says so", function()
      for name, why in pairs { ["bert.json"] = "it is no BPE", ["roberta.json"] = "divided in a way that",
        ["clip.json"] = "divided in a way that", ["llama2.json"] = "merges do not follow",
        ["unigram.model"] = "no BPE" } do
        local warned = write(name, name:find "model$" and "tokenizer.model" or "tokenizer.json")
        assert.is_truthy(warned:find(why, 1, true), name .. ": " .. warned)
        local ok, err = pcall(ms.text.tokenizer, folder .. "/t.gguf")
        assert.is_false(ok)
        assert.is_truthy(err:find("t.gguf': key 'tokenizer.ggml.model' is 'none', expected 'gpt2' or 'llama'", 1, true),
          err)
      end
    end)
  end)

  it("is refused for models that llama.cpp computes differently", function()
    for name, text in pairs { mistral = "GGUF files of MistralForCausalLM are not supported", qwen2_window = "a window",
      llama_yarn = "the RoPE scaling yarn" } do
      local from = folders.make(name)
      local model = ms.hf.load(from)
      process.remove_folder(from)
      local ok, err = pcall(ms.hf.save, model, folder .. "/x.gguf")
      assert.is_false(ok)
      assert.is_truthy(err:find(text, 1, true), err)
    end
  end)

  local SMALL = {
    llama = { vocab_size = 32, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1,
      num_attention_heads = 2 },
    gpt2 = { vocab_size = 32, n_embd = 32, n_layer = 1, n_head = 2 },
  }
  SMALL.qwen2 = SMALL.llama
  local function small(kind, changes)
    local config = { model_type = kind }
    for key, value in pairs(SMALL[kind]) do config[key] = value end
    for key, value in pairs(changes or {}) do config[key] = value end
    return ms.hf.create(config)
  end

  for _, row in ipairs { { "llama", "hidden_act", "gelu", "silu" }, { "qwen2", "hidden_act", "relu", "silu" },
    { "gpt2", "activation_function", "gelu", "gelu_new" }, { "gpt2", "activation_function", "silu", "gelu_new" } } do
    local kind, key, act, means = unpack(row)
    it(("is refused for an activation that it cannot name: %s, %s"):format(kind, act), function()
      local text = message(ms.hf.save, small(kind, { [key] = act }), folder .. "/x.gguf")
      assert.is_truthy(text:find(("key '%s' of the model's configuration is '%s', but GGUF files of %s always mean '%s'")
        :format(key, act, kind, means), 1, true), text)
      ms.hf.save(small(kind, { [key] = means }), folder .. "/x.gguf")
    end)
  end

  -- Writes a small model's file again, with other values; returns the model.
  local function rewritten(kind, changes)
    local path, model = folder .. "/x.gguf", small(kind)
    ms.hf.save(model, path)
    local file, values, list, tensors = gguf_file.open(path), {}, {}, {}
    for key, value in pairs(changes) do file.values[key] = value end
    for key, v in ms.sorted_pairs(file.values) do
      local whole = type(v) == "number" and v % 1 == 0
      values[#values + 1] = { key, ({ number = whole and "u32" or "f32", string = "string", boolean = "bool" })[type(v)], v }
    end
    for name, t in ms.sorted_pairs(file.tensors) do
      list[#list + 1], tensors[#tensors + 1] = { name = name, kind = t.kind.name, shape = t.shape }, file:read(name)
    end
    file:close()
    local out = assert(io.open(path, "wb"))
    gguf_file.begin(out, values, list)
    for k, t in ipairs(tensors) do gguf_file.put(out, t, list[k].kind, list[k].name) end
    out:close()
    return model
  end

  for label, keys in ms.sorted_pairs { ["rope.scale_linear"] = {}, ["rope.scaling.factor"] = {},
    ["rope.scaling.type"] = { "none", "default" } } do
    it("turns positions as llama.cpp does: " .. label, function()
      local model = rewritten("llama", { ["llama." .. label] = keys[1] or 2, ["llama.rope.scale_linear"] = 2 })
      local want = small("llama", { rope_parameters = { rope_type = keys[2] or "linear", rope_theta = 10000,
        factor = not keys[2] and 2 or nil } })
      want:load_state_dict(model:state_dict())
      local ids = folders.ids(S)
      assert.is_true(ms.hf.load(folder .. "/x.gguf")(ids):allclose(want(ids), { atol = 1e-6 }))
    end)
  end

  for _, row in ipairs {
    { "llama.expert_count", 8, "is 8; only 0 is supported" }, { "llama.rope.dimension_count", 8, "is 8; only 16" },
    { "llama.attention.value_length", 8, "is 8; only 16" }, { "llama.attention.causal", false, "is false; only true" },
    { "llama.logit_scale", 0.5, "is 0.5; only 1" }, { "llama.rope.scaling.type", "yarn", "is 'yarn', expected" },
    { "llama.attention.sliding_window", 4, "is 4, which Moonshard does not know" },
    { "llama.final_logit_softcapping", 30, "is 30, which" }, { "llama.attention.clamp_kqv", 0.5, "is 0.5, which" },
    { "gpt2.attention.max_alibi_bias", 8, "is 8, which" }, { "gpt2.attention.scale", 0.5, "is 0.5, which" },
    { "gpt2.attention.head_count_kv", 1, "is 1; only 2" },
  } do
    local key, value, why = unpack(row)
    it(("is not read if '%s' changes what is computed"):format(key), function()
      rewritten(key:match "^%w+", { [key] = value })
      local text = message(ms.hf.load, folder .. "/x.gguf")
      assert.is_truthy(text:find(("/x.gguf': key '%s' %s"):format(key, why), 1, true), text)
      if why:find "which" then ms.hf.load(folder .. "/x.gguf", { ignore = { key } }) end
    end)
  end

  it("is not read if its weights are of another type, which is named", function()
    local file = assert(io.open(folder .. "/x.gguf", "wb"))
    gguf_file.begin(file, {}, { { name = "blk.0.ffn_up.weight", kind = "float32", shape = { 0 } } })
    file:close()
    local bytes = process.read(folder .. "/x.gguf")
    local at = select(2, bytes:find("ffn_up.weight", 1, true)) + 4 + 8
    process.write(folder .. "/x.gguf", bytes:sub(1, at) .. "\12" .. bytes:sub(at + 2))
    local text = message(ms.hf.load, folder .. "/x.gguf")
    assert.is_truthy(text:find("'blk.0.ffn_up.weight' has type Q4_K, but only F32, F16, BF16 and Q8_0 can be read", 1,
      true), text)
  end)

  it("keeps the tokens that end a text", function()
    for _, ids in ipairs { { 2 }, { 0, 2 }, { 3, 0, 2 } } do
      local model = small("llama", { eos_token_id = ids })
      ms.hf.save(model, folder .. "/x.gguf")
      assert.are.same(#ids > 1 and ids or ids[1], ms.hf.load(folder .. "/x.gguf").config.eos_token_id)
      model.generation_config = { eos_token_id = { 5, 6 } }        -- it goes before config.json
      ms.hf.save(model, folder .. "/x.gguf")
      assert.are.same({ 5, 6 }, ms.hf.load(folder .. "/x.gguf").config.eos_token_id)
    end
    local warned = ms.catch_warnings(ms.hf.save, small("llama", { eos_token_id = { 9, 8, 7, 6, 5 } }), folder .. "/x.gguf")
    assert.is_truthy(table.concat(warned):find("5 tokens end a text of the model, a GGUF file has 3: 6, 5 are left out",
      1, true))
  end)

  for _, row in ipairs { { 1e6, "float16" }, { 1e9, "q8_0" }, { 3.4e38, "bfloat16" }, { 0 / 0, "float32" },
    { 0 / 0, "q8_0" }, { math.huge, "float16" } } do
    local number, dtype = unpack(row)
    it(("is refused if a weight is %g and the matrices are %s"):format(number, dtype), function()
      local model = small "llama"
      model.model.layers[1].mlp.up.weight:detach():select(1, 3):narrow(1, 2, 1):fill_(number)
      local text = message(ms.hf.save, model, folder .. "/x.gguf", { dtype = dtype })
      assert.is_truthy(text:find("hf.save: tensor 'blk.0.ffn_up.weight' has ", 1, true), text)
      local is_finite = math.abs(number) < math.huge
      local why = is_finite and ("more than %s holds"):format(dtype) or "NaN or an infinity"
      assert.is_truthy(text:find(why, 1, true), text)
      assert.is_nil(require("lfs").attributes(folder .. "/x.gguf"))
      assert.is_nil(require("lfs").attributes(folder .. "/x.gguf.new"))
    end)
  end

  it("is refused for unmerged adapters, and has merged ones", function()
    local model = small "llama"
    local adapters = ms.nn.lora(model, { target = { "q", "v" }, rank = 4 })
    for _, layer in ipairs(adapters.layers) do layer.module.lora_B:detach():fill_(0.1) end
    local logits = model(folders.ids(S)):detach()
    local text = message(ms.hf.save, model, folder .. "/x.gguf")
    assert.is_truthy(text:find("lora_A', which its architecture lacks; of adapters, call merge() first", 1, true), text)
    adapters:merge()
    ms.hf.save(model, folder .. "/x.gguf")
    assert.is_true(ms.hf.load(folder .. "/x.gguf")(folders.ids(S)):allclose(logits, { atol = 1e-5 }))
  end)

  it("is refused for rotary positions that llama.cpp lacks: qwen2, llama3", function()
    local model = small("qwen2", { rope_parameters = { rope_type = "llama3", rope_theta = 10000, factor = 8,
      low_freq_factor = 1, high_freq_factor = 4, original_max_position_embeddings = 16 } })
    local text = message(ms.hf.save, model, folder .. "/x.gguf")
    assert.is_truthy(text:find("the RoPE scaling llama3", 1, true), text)
  end)
end)
