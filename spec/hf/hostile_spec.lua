-- SPDX-License-Identifier: MIT
--- Damaged and hostile folders: an error that names the file and the key, before anything large is made.
local folders = require "spec.support.hf_folders"
local ms = require "moonshard"
local process = require "spec.support.process"

local NULL = require("cjson").null

describe("a model's folder", function()
  it("that is none is named, not its files", function()
    local folder = folders.make "llama"
    finally(function() process.remove_folder(folder) end)
    local model, none = ms.hf.load(folder), folder .. "/none"
    for _, call in ipairs { function() ms.hf.load(none) end, function() ms.hf.load_weights(model, none) end,
      function() ms.hf.load_adapter(model, none) end } do
      assert.has_error(call, "hf: there is no folder '" .. none .. "'")
    end
    local file = folder .. "/config.json"
    assert.has_error(function() ms.hf.load(file) end, ("hf: '%s' is a file, expected a model's folder"):format(file))
    assert.has_error(function() ms.hf.save(model, none .. "/a.gguf") end,
      ("hf.save: cannot write '%s/a.gguf': No such file or directory"):format(none))
  end)
end)

describe("a folder of a model", function()
  local folder
  after_each(function()
    if folder then process.remove_folder(folder) end
    folder = nil
  end)

  -- Loads; returns the message of the error, or nil.
  local function message()
    local ok, err = pcall(ms.hf.load, folder)
    return not ok and tostring(err) or nil
  end

  local function expect(text)
    local got = message()
    assert.is_truthy(got and got:find(text, 1, true), ("expected '%s' in '%s'"):format(text, tostring(got)))
    assert.is_truthy(got:find("hostile_spec.lua:%d+: ") or got:find "^[^\n]*: ", got)
  end

  for _, case in ipairs {
    -- case, changes, text of the error
    { "llama", { architectures = { "FooForCausalLM" } }, "key 'architectures' is 'FooForCausalLM', expected one of BertFor" },
    { "llama", { architectures = NULL, model_type = "foo" }, "key 'model_type' is 'foo', expected one of bert, " },
    { "llama", { model_type = "mistral" }, "key 'model_type' is 'mistral', expected 'llama' for LlamaForCausalLM" },
    { "llama", { hidden_size = "16" }, "key 'hidden_size' is '16', expected a whole number" },
    { "llama", { hidden_size = NULL }, "key 'hidden_size' is missing, expected a whole number" },
    { "llama", { hidden_size = { 16 } }, "key 'hidden_size' is a list, expected a whole number" },
    { "llama", { hidden_size = -4 }, "key 'hidden_size' is -4, expected a whole number" },
    { "llama", { hidden_size = 1e300 }, "key 'hidden_size' is 1e+300, expected a whole number" },
    { "llama", { vocab_size = 2 ^ 31, hidden_size = 2 ^ 31 }, "config.json' describes a model that cannot be made: " },
    { "llama", { head_dim = 2 ^ 30 }, "key 'head_dim' is 1073741824, expected a whole number from 1 to 65536" },
    { "llama", { head_dim = 3 }, "key 'head_dim' is 3, expected an even number" },
    { "llama", { num_hidden_layers = 1e6 }, "key 'num_hidden_layers' is 1000000, expected a whole number from 1 to 1024" },
    { "llama", { num_key_value_heads = 3 }, "key 'num_key_value_heads' is 3, expected a divisor of num_attention_heads, 4" },
    { "llama", { hidden_act = "xielu" }, "key 'hidden_act' is 'xielu', expected one of 'gelu'" },
    { "llama", { rope_parameters = { rope_type = "proportional", rope_theta = 1e4 } },
      "key 'rope_parameters.rope_type' is 'proportional', expected one of 'default', 'dynamic', 'linear', 'llama3'" },
    { "llama", { rope_parameters = { rope_type = "dynamic", rope_theta = 1e4, factor = 0.5 } },
      "key 'rope_parameters.factor' is 0.5, expected 1 or more" },
    { "phi3", { rope_scaling = { type = "longrope", short_factor = { 1 } }, rope_parameters = NULL },
      "key 'rope_scaling.short_factor' is a list, expected a list of 2 numbers > 0" },
    { "llama", { rope_parameters = { rope_type = "llama3", rope_theta = 1e4, factor = 8 } },
      "key 'rope_parameters.low_freq_factor' is missing" },
    { "llama", { rope_parameters = 3 }, "key 'rope_parameters' is 3, expected an object" },
    { "llama", { new_trick = "on" }, "key 'new_trick' is 'on', which Moonshard does not know" },
    { "llama", { quantization_config = { bits = 4 } }, "key 'quantization_config' is an object, which Moonshard does not" },
    { "llama", { dtype = "int4" }, "key 'dtype' is 'int4', expected one of 'float32'" },
    { "llama", { intermediate_size = 25 }, "'model.layers.0.mlp.gate_proj.weight' has shape [24, 16], expected [25, 16] by" },
    { "llama", { num_hidden_layers = 3 }, "model.safetensors' lacks 'model.layers.2." },
    { "llama", { pretraining_tp = 2 }, "key 'pretraining_tp' is 2; only 1 is supported" },
    { "llama", { partial_rotary_factor = 0.5 }, "key 'partial_rotary_factor' is 0.5; only 1 is supported" },
    { "gpt2", { scale_attn_by_inverse_layer_idx = true }, "key 'scale_attn_by_inverse_layer_idx' is true; only false is" },
    { "gpt2", { n_head = 3 }, "key 'n_embd' is 16, expected a multiple of n_head, 3" },
    { "gemma2", { layer_types = { "full_attention" } }, "key 'layer_types' has 1 elements, expected one for each of the 2" },
    { "gemma2", { layer_types = { "a", "b" } }, "key 'layer_types' is a list, expected a list of 'full_attention'" },
    { "bert", { position_embedding_type = "relative_key" }, "key 'position_embedding_type' is 'relative_key'; only" },
    { "bert_text", { problem_type = "regression" }, "key 'problem_type' is 'regression'; only" },
    { "vit", { patch_size = 5 }, "key 'image_size' is 16, expected a multiple of patch_size, 5" },
    { "t5", { relative_attention_num_buckets = 3 }, "key 'relative_attention_num_buckets' is 3, expected an even number" },
    { "clip", { text_config = NULL }, "key 'text_config' is missing" },
    { "clip", { vision_config = { hidden_size = "big" } }, "key 'vision_config.hidden_size' is 'big'" },
    { "whisper", { encoder_layerdrop = 0.1 }, "key 'encoder_layerdrop' is 0.1; only 0 is supported" },
  } do
    local key = next(case[2])
    it(("is refused for its configuration: %s, %s"):format(case[1], case[3]), function()
      folder = folders.make(case[1], case[2])
      expect(case[3])
      assert.is_truthy(message():find(folder, 1, true), key)
    end)
  end

  it("is read without keys that the caller knows not to matter", function()
    folder = folders.make("llama", { new_trick = "on" })
    assert.are.equal("HFCausalLM", ms.hf.load(folder, { ignore = { "new_trick" } }):class_name())
  end)

  local function write(name, text) process.write(folder .. "/" .. name, text) end

  for _, case in ipairs {
    { "config.json", "", "config.json' is not valid JSON" },
    { "config.json", "[1]", "config.json' is not an object of JSON" },
    { "config.json", "{\"a\": 1", "config.json' is not valid JSON" },
    { "config.json", "{\n\"a\": 1,\n}", "config.json' is not valid JSON: line 3: expected a key in quotes but found '}' at character 11" },
    { "config.json", ("["):rep(1e5), "config.json' is not valid JSON" },
    { "config.json", nil, "cannot open '" },
    { "model.safetensors", nil, "has neither model.safetensors nor model.safetensors.index.json" },
    { "model.safetensors", "short", "model.safetensors" },
    { "model.safetensors", ("\255"):rep(64), "model.safetensors" },
  } do
    it(("is refused for its files: %s, %s"):format(case[1], case[3]), function()
      folder = folders.make "llama"
      os.remove(folder .. "/" .. case[1])
      if case[2] then write(case[1], case[2]) end
      expect(case[3])
    end)
  end

  for _, case in ipairs {
    { "{}", "key 'weight_map' is missing, expected an object" },
    { "[]", "key 'weight_map' is missing, expected an object" },
    { '{"weight_map": {}}', "key 'weight_map' is an empty list or object, expected" },
    { '{"weight_map": null}', "key 'weight_map' is null, expected an object" },
    { '{"weight_map": {"a": null}}', "key 'weight_map.a' is null, expected the name of a file" },
    { '{"weight_map": {"a": 1}}', "key 'weight_map.a' is 1, expected the name of a file in this folder" },
    { '{"weight_map": {"a": "../b.safetensors"}}', "key 'weight_map.a' is '../b.safetensors', expected the name of a file" },
    { '{"weight_map": {"a": "/etc/b.safetensors"}}', "key 'weight_map.a' is '/etc/b.safetensors', expected the name" },
    { '{"weight_map": {"a": "b.safetensors"}}', "b.safetensors" },
    { '{"weight_map": {"a": "pytorch_model-1.bin"}}', "is the index of a model in several files" },
    { '{"weight_map": {"a": "c.safetensors"}}', "key 'weight_map.a' names 'c.safetensors', which lacks this tensor" },
    { "{", "model.safetensors.index.json' is not valid JSON" },
  } do
    it("is refused for its index: " .. case[1], function()
      folder = folders.make "llama"
      assert(os.rename(folder .. "/model.safetensors", folder .. "/c.safetensors"))
      write("model.safetensors.index.json", case[1])
      expect(case[2])
      local ok, err = pcall(ms.load, folder .. "/model.safetensors.index.json")
      assert.is_false(ok)
      assert.is_truthy(err:find(case[2], 1, true), err)
    end)
  end

  it("is refused if two names that the configuration ties have different tensors", function()
    folder = folders.make "llama_3.1"
    local tensors = folders.tensors "llama_3.1"
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    ms.save(folder .. "/model.safetensors", tensors)
    expect "'model.embed_tokens.weight' differs from 'lm_head.weight', but config.json ties them"
  end)
end)
