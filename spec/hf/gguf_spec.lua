-- SPDX-License-Identifier: MIT
--- GGUF files: those of PyPI's gguf are read, and written byte for byte; models go there and back.
local folders = require "spec.support.hf_folders"
local gguf_file = require "moonshard.hf.gguf_file"
local golden = require "spec.support.golden"
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
    gguf_file.put(file, t[1]:narrow(1, 1, 5), "float32")
    gguf_file.put(file, t:narrow(2, 1, 3), "float16")
    gguf_file.put(file, t:narrow(1, 1, 2), "bfloat16")
    gguf_file.put(file, t, "q8_0")
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

  it("has the tokenizer of a byte-level BPE", function()
    local from = folders.make "gpt2"
    ms.text.train_bpe("to be or not to be", { vocab_size = 260, special_tokens = { "<|end|>" } }):save(
      from .. "/tokenizer.json")
    local model = ms.hf.create { model_type = "gpt2", vocab_size = 264, n_embd = 16, n_layer = 1, n_head = 2 }
    model.family.folder = from
    ms.hf.save(model, folder .. "/t.gguf")
    local file = gguf_file.open(folder .. "/t.gguf")
    file:close()
    process.remove_folder(from)
    local values = file.values
    assert.are.equal("gpt2 gpt-2", values["tokenizer.ggml.model"] .. " " .. values["tokenizer.ggml.pre"])
    assert.are.same({ "<|end|>", 3, "[PAD263]", 5 }, { values["tokenizer.ggml.tokens"][1],
      values["tokenizer.ggml.token_type"][1], values["tokenizer.ggml.tokens"][264],
      values["tokenizer.ggml.token_type"][264] })
    assert.are.equal(264, #values["tokenizer.ggml.tokens"])
    assert.is_true(#values["tokenizer.ggml.merges"] > 0)
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

  it("never ends the process or loops when its bytes are wrong, and is named", function()
    local from = folders.make "llama"
    local path = folder .. "/x.gguf"
    ms.hf.save(ms.hf.load(from), path)
    process.remove_folder(from)
    local text, seed, failures = process.read(path), 11, 0
    local function random(n)
      seed = seed * 16807 % 2147483647
      return seed % n
    end
    for k = 1, 300 do
      local at = random(1400) + 1
      local head = text:sub(1, at - 1)
      local bad = k % 3 == 0 and head or head .. string.char(random(256)) .. text:sub(at + 1)
      process.write(path, bad)
      local ok, err = pcall(ms.hf.load, path)
      if not ok then
        failures = failures + 1
        assert.is_truthy(tostring(err):find(path, 1, true), err)
      end
    end
    assert.is_true(failures > 150)
  end)
end)
