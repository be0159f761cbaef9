-- SPDX-License-Identifier: MIT
--- Models of Hugging Face's folders, in and out:
---   local model = ms.hf.load "llama/"
---   local logits = model(ids)
---   ms.hf.save(model, "tuned/")
--- The classes are in this folder: decoder.lua (families.lua has what differs between GPT-2, Llama and others),
--- bert.lua, vit.lua, clip.lua, t5.lua, whisper.lua. All are made of block.lua.
local adapters = require "moonshard.hf.adapters"
local agree = require "moonshard.parallel.fsdp.agree"
local Config = require "moonshard.hf.config"
local decoder = require "moonshard.hf.decoder"
local embeddings = require "moonshard.hf.embeddings"
local errors = require "moonshard.core.errors"
local families = require "moonshard.hf.families"
local folders = require "moonshard.hf.folders"
local names_of = require "moonshard.hf.names"
local generation = require "moonshard.text.generation"
local gguf = require "moonshard.hf.gguf"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local scores = require "moonshard.hf.scores"
local weights = require "moonshard.hf.weights"
local sorted_pairs = require("moonshard.tensor.util").sorted_pairs
local a_module = require("moonshard.nn.module.register").a_module

local M = {}

-- Rows of a model's class by `architectures` in config.json, and the usual one of each model_type:
-- { architecture, model_type, usual, names, prefix, repeats, build(config, kind) }. build returns the model and, if
-- they depend on the configuration, its names. prefix: files may have it or not. repeats: names of copies in old files.
local architectures, of_type = {}, {}

local function add(row)
  architectures[row.architecture] = row
  if row.usual then of_type[row.model_type] = row.architecture end
end

for model_type, family in sorted_pairs(families) do
  add { architecture = family.architecture, model_type = model_type, usual = true, names = family.names,
    prefix = family.prefix, build = function(config, kind)
      local o = family.options(config)
      o.name, o.dtype, o.device = family.architecture, kind.dtype, kind.device
      return decoder.CausalLM(o)
    end }
end
for _, name in ipairs { "bert", "vit", "clip", "t5", "whisper" } do
  for _, row in ipairs(require("moonshard.hf." .. name)) do add(row) end
end

local a_string = opts.string
local strings = opts.kind("a list of names", function(v) return type(v) == "table" and type(v[1]) == "string" end)

-- The class of a configuration: that of `architectures`, or the usual one of model_type.
local function architecture_of(config)
  local model_type = config:maybe("model_type", a_string)
  local list = config:maybe("architectures", strings)
  local name = list and list[1] or of_type[model_type]
  if not name then
    config:fail("model_type", "is %s, expected one of %s", errors.show(model_type), table.concat(errors.names(of_type),
      ", "))
  end
  if not architectures[name] then
    config:fail("architectures", "is %s, expected one of %s", errors.show(name), table.concat(errors.names(architectures),
      ", "))
  end
  if model_type and model_type ~= architectures[name].model_type then
    config:fail("model_type", "is '%s', expected '%s' for %s", model_type, architectures[name].model_type, name)
  end
  return name, architectures[name]
end

local DTYPES = opts.one_of { "float32", "float64", "bfloat16", "float16" }

local function build(config, o)
  local name, row = architecture_of(config)
  local dtype = o.dtype or config:maybe("dtype", DTYPES) or config:maybe("torch_dtype", DTYPES) or "float32"
  local ok, model, names = pcall(row.build, config, { dtype = dtype, device = o.device })
  if not ok then
    local why = tostring(model):gsub("^[^\n]-:%d+: ", "")
    if why:find(config.path, 1, true) then errors.raise("%s", why) end
    errors.raise("hf: '%s' describes a model that cannot be made: %s", config.path, why)
  end
  config:finish(o.ignore)
  model.config = config.values
  model.family = { architecture = name, names = names or row.names, prefix = row.prefix,
    repeats = row.repeats, text = config.text, dtype = dtype, save = M.save }
  names_of.remember(model)
  return model:eval()
end

local function read(folder, o)
  if folder:find "%.gguf$" then
    local model = gguf.load(folder, function(config)
      return build(Config.of(config, folder), { dtype = o.dtype, device = "meta", ignore = o.ignore })
    end, o.device, o.ignore)
    model.family.folder = folder
    return model
  end
  local config = Config.read(folder)
  local model = build(config, { dtype = o.dtype, device = "meta", ignore = o.ignore })
  model.family.folder = folder
  if folders.has(folder, "generation_config.json") then
    local saved = Config.read(folder, "generation_config.json")
    model.generation_config = saved.values
    generation._warn_of_lacking(saved.values, saved.path)
  end
  if o.device == "meta" then return model end
  model.family.device = o.device
  weights.load(model, folder)
  return model
end

--- Reads a model from a folder that transformers wrote, or ms.hf.save: config.json, and model.safetensors or the files
--- of its index. The class is that of `architectures` in config.json. As in transformers, the model is in evaluation
--- mode; model:train() turns dropout on. A path that ends in .gguf is a file of llama.cpp (Llama, Qwen2, GPT-2). On
--- "meta" no weights are read: shard the model, then call ms.hf.load_weights, and no rank holds it whole. Errors: an
--- architecture, or an option in config.json, that Moonshard lacks; damaged files; the message names the file and the
--- key.
---@param folder string  with config.json and the weights; or that of a run of scripts/finetune, which has one
---@param given? { dtype: string, device: string, ignore: string[], adapter: string }
---   dtype: of the parameters (default: that of config.json); device: of the parameters (default: "cpu"); ignore: keys
---   of config.json, or of a GGUF file, that do not matter; adapter: a folder of adapters, which are added to the
---   weights (not on "meta")
---@return Module
function M.load(folder, given)
  opts.expect(folder, opts.string, "hf.load: the folder")
  local o = opts("hf.load", given, { dtype = DTYPES, device = opts.string, ignore = opts.table, adapter = opts.string })
  opts.need(not (o.adapter and o.device == "meta"), o.device, "a device with the weights to which adapters are added",
    "hf.load: option 'device'")
  local model = read(folders.model(folder, "hf.load"), o)
  if not o.adapter then return model end
  local trained = {}
  for _, p in ipairs(model:parameters()) do trained[p] = p.requires_grad end
  adapters.load(model, o.adapter):merge():remove()
  for p, is_trained in pairs(trained) do p:requires_grad_(is_trained) end      -- in any order: each on its own
  return model
end

--- Reads the weights of a folder into a model that has its names and shapes. Collective if the model is sharded: each
--- rank then reads its own shards from the files. Parameters on "meta" get memory on the default device, or on that where
--- they were sharded for.
---@param model Module  of ms.hf.load or ms.hf.create
---@param folder? string  (default: the folder that the model was made of)
---@return Module model
function M.load_weights(model, folder)
  opts.expect(model, a_module, "hf.load_weights: argument 1")
  opts.need(model.family and model.family.names, model, "a model of ms.hf.load", "hf.load_weights: argument 1")
  weights.load(model, folders.model(folder or model.family.folder or "", "hf.load_weights"))
  return model
end

-- Initial weights as transformers draws them: normal, with biases of 0; norms keep theirs.
local function draw(model)
  local std = model.config.initializer_range or model.config.init_std or 0.02
  for _, m in ipairs(model:modules()) do
    if m:isa(nn.Linear) or m:isa(nn.Embedding) or m:isa(nn.Conv1d) or m:isa(nn.Conv2d) then
      nn.init.normal_(m.weight, 0, std)
      if m.bias then nn.init.zeros_(m.bias) end
    end
  end
  return model
end

--- Makes a model with random weights: normal with the standard deviation initializer_range, 0.02 without, and biases of
--- 0. It is in evaluation mode.
---@param config table<string, any>  as config.json has it, with `architectures` or `model_type`
---@param given? { dtype: string, device: string, ignore: string[] }  ignore: keys that do not matter
---@return Module
function M.create(config, given)
  opts.expect(config, opts.table, "hf.create: the configuration")
  local o = opts("hf.create", given, { dtype = DTYPES, device = opts.string, ignore = opts.table })
  local model = build(Config.of(config), o)
  return o.device == "meta" and model or draw(model)
end

local GGUF_DTYPES = opts.one_of { "float32", "float16", "bfloat16", "q8_0" }
local bytes_of = { KB = 1e3, MB = 1e6, GB = 1e9 }
local file_size = opts.kind("a number of bytes, or a text such as '5GB'", function(v)
  if type(v) == "string" then return bytes_of[v:match "^%d+(%u%u)$"] ~= nil end
  return type(v) == "number" and v >= 1
end)

--- Writes a model to a folder, as transformers reads it: config.json, model.safetensors or several files with an index,
--- and the tokenizer's files of the folder that the model was read from. Collective if the model is sharded: tensors are
--- gathered and written one at a time, by rank 0. Else rank 0 writes. A path that ends in .gguf: one file for
--- llama.cpp, of Llama, Qwen2 and GPT-2, with the tokenizer if llama.cpp has its kind: byte-level BPE, or
--- SentencePiece's BPE in tokenizer.model.
---@param model Module  of ms.hf.load or ms.hf.create
---@param folder string  is made if it does not exist
---@param given? { max_shard_size: number|string, dtype: "float32"|"float16"|"bfloat16"|"q8_0" }
---   max_shard_size: bytes of a file of weights, or a text such as "200MB" (default: "5GB"); dtype: of the matrices in a
---   GGUF file (default: the model's)
function M.save(model, folder, given)
  opts.expect(model, a_module, "hf.save: argument 1")
  opts.need(model.family and model.family.names, model, "a model of ms.hf.load", "hf.save: argument 1")
  opts.expect(folder, opts.string, "hf.save: the folder")
  local o = opts("hf.save", given, { max_shard_size = opts.option(file_size, "5GB"), dtype = GGUF_DTYPES })
  local most = o.max_shard_size
  if type(most) == "string" then most = tonumber(most:match "^%d+") * bytes_of[most:match "%u%u$"] end
  for name, p in model:named_parameters() do
    if p.device == "meta" then
      errors.raise("hf.save: parameter '%s' is on meta and has no values; call ms.hf.load_weights first", name)
    end
  end
  if folder:find "%.gguf$" then return gguf.save(model, folder, o.dtype) end
  opts.need(o.dtype == nil, o.dtype, "none; it is for files that end in .gguf", "hf.save: option 'dtype'")
  local groups = agree.groups_of(model)
  local mine = agree.is_first(groups)
  agree.together(groups, function()
    folder = folders.path(folder)
    if mine then folders.make(folder) end
    local index, written = weights.save(model, folder, most, mine)
    if mine then folders.finish(model, folder, index, written) end
  end)
end

M.save_adapter, M.load_adapter = adapters.save, adapters.load
M.mean_pool, M.contrastive_loss, M.score = embeddings.mean_pool, embeddings.contrastive_loss, scores.score

return errors.closed(M, "hf")
