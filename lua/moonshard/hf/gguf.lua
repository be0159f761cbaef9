-- SPDX-License-Identifier: MIT
--- Models in GGUF files, for llama.cpp and from it: Llama, Qwen2 and GPT-2. A file has the options under keys of its
--- own, and the tokenizer; Llama's rotary pairs are features 2 i and 2 i + 1 there, i and i + d / 2 here.
local agree = require "moonshard.parallel.fsdp.agree"
local Config = require "moonshard.hf.config"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local files = require "moonshard.io.gguf"
local folders = require "moonshard.hf.folders"
local log = require "moonshard.core.log"
local module = require "moonshard.parallel.fsdp.module"
local lfs = require "lfs"
local names = require "moonshard.hf.names"
local no_grad = require("moonshard.autograd").no_grad
local opts = require "moonshard.core.opts"
local regular = require "moonshard.io.regular"
local scope = require "moonshard.tensor.scope"
local texts = require "moonshard.text.files"
local tokenizers = require "moonshard.text.gguf"

local M = {}

local NAMES = {
  { "model.embed.", "token_embd." }, { "model.positions.", "position_embd." }, { "model.norm.", "output_norm." },
  { "lm_head.", "output." },
}
for _, pair in ipairs { { "attn_norm.", "attn_norm." }, { "attn.q.", "attn_q." }, { "attn.k.", "attn_k." },
  { "attn.v.", "attn_v." }, { "attn.qkv.", "attn_qkv." }, { "attn.out.", "attn_output." }, { "mlp_norm.", "ffn_norm." },
  { "mlp.gate.", "ffn_gate." }, { "mlp.up.", "ffn_up." }, { "mlp.down.", "ffn_down." } } do
  NAMES[#NAMES + 1] = { "model.layers.#." .. pair[1], "blk.#." .. pair[2] }
end

-- Options: key in config.json, key in the file after the architecture's name, type. Those of Llama are those of Qwen2.
local LLAMA = {
  { "num_hidden_layers", "block_count", "u32" }, { "max_position_embeddings", "context_length", "u32" },
  { "hidden_size", "embedding_length", "u32" }, { "intermediate_size", "feed_forward_length", "u32" },
  { "num_attention_heads", "attention.head_count", "u32" }, { "num_key_value_heads", "attention.head_count_kv", "u32" },
  { "rms_norm_eps", "attention.layer_norm_rms_epsilon", "f32" },
}
-- act: the key of the activation, and the values that are what llama.cpp computes; the file does not name it.
local SILU = { key = "hidden_act", means = "'silu'", silu = true, swish = true }
local GELU = { key = "activation_function", means = "'gelu_new', with tanh", gelu_new = true, gelu_pytorch_tanh = true }
local KINDS = {
  LlamaForCausalLM = { name = "llama", keys = LLAMA, act = SILU, pairs = true },
  Qwen2ForCausalLM = { name = "qwen2", keys = LLAMA, act = SILU },
  GPT2LMHeadModel = { name = "gpt2", act = GELU, keys = {
    { "n_layer", "block_count", "u32" }, { "n_positions", "context_length", "u32" },
    { "n_embd", "embedding_length", "u32" }, { "n_head", "attention.head_count", "u32" },
    { "n_inner", "feed_forward_length", "u32" }, { "layer_norm_epsilon", "attention.layer_norm_epsilon", "f32" },
  } },
}
local ARCHITECTURES = {}
for architecture, kind in pairs(KINDS) do ARCHITECTURES[kind.name] = architecture end

-- The order of a projection's rows in the file, or back.
local function reordered(t, heads, back)
  local sizes, half = t.shape, t:size(1) / heads / 2
  local parts = back and t:reshape(heads, half, 2, -1) or t:reshape(heads, 2, half, -1)
  return parts:transpose(2, 3):reshape(sizes)
end

-- The number of heads whose rows are reordered; nil: the tensor is as here.
local function pairs_of(kind, name, o)
  if not kind.pairs then return nil end
  return name:find "attn_q%." and o.heads or name:find "attn_k%." and o.kv_heads or nil
end

-- ---- writing -------------------------------------------------------------------------------------

local NONE = { { "tokenizer.ggml.model", "string", "none" } }     -- ids only; without it llama.cpp refuses the file

-- The tokenizer of the folder or file that the model was read from; none if it has none, or if llama.cpp has none of
-- its kind. SentencePiece's file comes before tokenizer.json, which has merges instead of scores.
local function tokenizer_values(model)
  local from = model.family.folder
  local pieces = from and from .. "/tokenizer.model"
  local path = from and (lfs.attributes(pieces, "mode") == "file" and pieces or from:find "%.gguf$" and from
    or texts.find(from))
  if not path then return NONE end
  local ok, t = pcall(texts.open, path)
  local values, why = nil, t
  if ok then values, why = tokenizers.values(t, model.lm_head.weight.shape[1]) end
  if not values then log.warn(("hf.save: the GGUF file gets no tokenizer: %s"):format(why)) end
  return values or NONE
end

local BOS = "tokenizer.ggml.bos_token_id"
-- Keys of the tokens at which llama.cpp ends a text.
local ENDS = { "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id" }

-- Writes the tokens that end a text: the tokenizer's, then those at which generation from the folder ends.
local function add_ends(model, values, has)
  local saved = type(model.generation_config) == "table" and model.generation_config.eos_token_id
  local ids, list, seen = saved, {}, {}
  if type(ids) ~= "number" and type(ids) ~= "table" then ids = model.config.eos_token_id end
  if has[ENDS[1]] then list[1], seen[has[ENDS[1]]] = has[ENDS[1]], true end
  for _, id in ipairs(type(ids) == "table" and ids or { ids }) do
    if type(id) == "number" and not seen[id] then list[#list + 1], seen[id] = id, true end
  end
  for k, key in ipairs(ENDS) do
    if list[k] and not has[key] then values[#values + 1] = { key, "u32", list[k] } end
  end
  if #list > #ENDS then
    log.warn(("hf.save: %d tokens end a text of the model, a GGUF file has %d: %s are left out"):format(#list, #ENDS,
      table.concat(list, ", ", #ENDS + 1)))
  end
end

local FILE_TYPES = { float32 = 0, float16 = 1, q8_0 = 7, bfloat16 = 32 }

local function values_of(model, kind, dtype)
  local o, config, name = model.model.options, model.config, kind.name
  local values = { { "general.architecture", "string", name }, { "general.file_type", "u32", FILE_TYPES[dtype] } }
  local own = { num_hidden_layers = o.layers, n_layer = o.layers, hidden_size = o.dim, n_embd = o.dim,
    intermediate_size = o.mlp_dim, n_inner = o.mlp_dim, num_attention_heads = o.heads, n_head = o.heads,
    num_key_value_heads = o.kv_heads, rms_norm_eps = o.norm.eps, layer_norm_epsilon = o.norm.eps,
    n_positions = o.learned, max_position_embeddings = config.max_position_embeddings or 2048 }
  for _, row in ipairs(kind.keys) do values[#values + 1] = { name .. "." .. row[2], row[3], own[row[1]] } end
  values[#values + 1] = { name .. ".vocab_size", "u32", o.vocab }
  if o.rotary then
    values[#values + 1] = { name .. ".rope.freq_base", "f32", o.rotary.base }
    values[#values + 1] = { name .. ".rope.dimension_count", "u32", o.rotary.d }
    values[#values + 1] = { name .. ".attention.key_length", "u32", o.head_dim }
    values[#values + 1] = { name .. ".attention.value_length", "u32", o.head_dim }
    if o.rotary.kind == "linear" then
      values[#values + 1] = { name .. ".rope.scaling.type", "string", "linear" }
      values[#values + 1] = { name .. ".rope.scaling.factor", "f32", o.rotary.factor }
    end
  end
  local has = {}
  for _, value in ipairs(tokenizer_values(model)) do values[#values + 1], has[value[1]] = value, value[3] end
  local bos = config.bos_token_id
  if type(bos) == "number" and not has[BOS] then values[#values + 1] = { BOS, "u32", bos } end
  add_ends(model, values, has)
  return values
end

-- The factors of Llama 3.1's scaling, by which llama.cpp divides the angles.
local function rotary_factors(model)
  local o, list = model.model.options.rotary, {}
  for k, rate in ipairs(model.model.rates[false]) do list[k] = o.base ^ (-2 * (k - 1) / o.d) / rate end
  return create.tensor(list, { dtype = "float32" })
end

--- Writes a model. Collective if it is sharded; rank 0 writes.
---@param model Module
---@param path string
---@param dtype? string  of matrices (default: that of the model)
function M.save(model, path, dtype)
  local kind = KINDS[model.family.architecture]
  if not kind then
    errors.raise("hf.save: GGUF files of %s are not supported, only of %s", model.family.architecture,
      table.concat(errors.names(KINDS), ", "))
  end
  local o = model.model.options
  if not kind.act[o.act] then
    errors.raise("hf.save: key '%s' of the model's configuration is '%s', but GGUF files of %s always mean %s",
      kind.act.key, o.act, kind.name, kind.act.means)
  end
  local scaling = o.rotary and o.rotary.kind
  local is_lost = scaling == "yarn" or scaling == "longrope" or scaling == "dynamic"
    or scaling == "llama3" and kind.name ~= "llama"
  if is_lost or o.window then
    errors.raise("hf.save: GGUF files with %s are not supported", o.window and "a window" or "the RoPE scaling " .. scaling)
  end
  dtype = dtype or model:parameters()[1].dtype
  local groups = agree.groups_of(model)
  local mine = agree.is_first(groups)
  module.reshard_all(model)
  local entries, list = names.to_save(model, NAMES), {}
  for k, e in ipairs(entries) do
    local matrix = #e.shape == 2 and e.file ~= "position_embd.weight"
    local as = matrix and dtype or "float32"
    if as == "q8_0" and e.shape[2] % files.BLOCK ~= 0 then as = "float16" end
    list[k] = { name = e.file, kind = as, shape = e.shape, entry = e }
  end
  if scaling == "llama3" then
    list[#list + 1] = { name = "rope_freqs.weight", kind = "float32", shape = { o.rotary.d / 2 } }
  end
  agree.together(groups, function()
    local new, file = path .. ".new", nil
    local function write()
      if mine then
        local why
        file, why = regular.create(path, new)
        if not file then folders.cannot_write(path, new, why) end
        files.begin(file, values_of(model, kind, dtype), list)
      end
      for _, item in ipairs(list) do
        scope.run("save", function()
          local e = item.entry
          local t = not e and rotary_factors(model) or e.is_sharded and e.t:full_tensor() or e.t:detach()
          if not mine then return end
          local heads = e and pairs_of(kind, e.file, o)
          t = t:to "cpu"
          files.put(file, heads and reordered(t, heads) or t, item.kind, item.name)
        end)
      end
      if not mine then return end
      local closed = file
      file = nil
      assert(closed:close())
      local ok, why = os.rename(new, path)
      if not ok then folders.cannot_write(path, new, why) end
    end
    local ok, err = pcall(no_grad, write)
    if ok then return end
    if file then
      file:close()
      os.remove(new)
    end
    error(err, 0)
  end)
end

-- ---- reading -------------------------------------------------------------------------------------

local ROPE = opts.one_of { "none", "linear" }
-- Keys of an architecture that do not change what llama.cpp computes.
local HARMLESS = { "vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.original_context_length",
  "rope.scaling.finetuned", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon" }
-- The only value of keys that change it.
local ONLY = { expert_count = 0, ["attention.causal"] = true, logit_scale = 1, embedding_scale = 1, residual_scale = 1,
  ["rope.scaling.attn_factor"] = 1 }

-- What llama.cpp turns heads of d features by. A file without a type has the linear one; `scale_linear` is an old name.
local function rope_of(c, name, d, file)
  local base, factors = c:get(name .. "rope.freq_base", opts.number, 10000), file.tensors["rope_freqs.weight"]
  local factor, old = c:maybe(name .. "rope.scaling.factor", opts.number), c:maybe(name .. "rope.scale_linear", opts.number)
  local kind = c:get(name .. "rope.scaling.type", ROPE, "linear")
  c:only(name .. "rope.dimension_count", d)
  factor = kind == "linear" and (factor or old) or 1
  if factor == 0 then factor = 1 end
  if not factors then
    return { rope_type = factor == 1 and "default" or "linear", rope_theta = base, factor = factor ~= 1 and factor or nil }
  end
  if factor ~= 1 then c:fail(name .. "rope.scaling.factor", "is %g, beside 'rope_freqs.weight'", factor) end
  local list = file:read("rope_freqs.weight"):tolist()
  return { rope_type = "longrope", rope_theta = base, short_factor = list, long_factor = list, attention_factor = 1 }
end

-- The configuration in a file's keys. As of a folder, a key that is not known is refused, because it might change the
-- results, unless its value says that something is off, or `ignore` has it.
local function config_of(file, ignore)
  local architecture = ARCHITECTURES[file.values["general.architecture"]]
  if not architecture then
    errors.raise("hf: '%s': key 'general.architecture' is %s, expected one of %s", file.path,
      errors.show(file.values["general.architecture"]), table.concat(errors.names(ARCHITECTURES), ", "))
  end
  local kind, own = KINDS[architecture], {}
  local name = kind.name .. "."
  for key, value in pairs(file.values) do               -- any order: it is a copy
    if key:sub(1, #name) == name then own[key] = value end
  end
  local c = Config.of(own, file.path)
  local out = { architectures = { architecture }, model_type = kind.name,
    tie_word_embeddings = file.tensors["output.weight"] == nil }
  for _, row in ipairs(kind.keys) do out[row[1]] = c:get(name .. row[2], opts.number) end
  local embed = file.tensors["token_embd.weight"]
  if not embed then errors.raise("hf: '%s' lacks 'token_embd.weight'", file.path) end
  out.vocab_size = embed.shape[1]
  local ends = {}
  for _, key in ipairs(ENDS) do ends[#ends + 1] = file.values[key] end
  out.bos_token_id, out.eos_token_id = file.values[BOS], #ends > 1 and ends or ends[1]
  local d = (out.hidden_size or out.n_embd) / (out.num_attention_heads or out.n_head)
  if kind.name == "gpt2" then
    c:only(name .. "attention.key_length", d)
    c:only(name .. "attention.head_count_kv", out.n_head)
  else
    if kind.name == "llama" then
      out.attention_bias = file.tensors["blk.0.attn_q.bias"] ~= nil
      out.mlp_bias = file.tensors["blk.0.ffn_down.bias"] ~= nil
    end
    out.head_dim = c:maybe(name .. "attention.key_length", opts.number)
    d = out.head_dim or d
    out.rope_parameters = rope_of(c, name, d, file)
  end
  c:only(name .. "attention.value_length", d)
  for key, value in pairs(ONLY) do c:only(name .. key, value) end        -- in any order: one error is enough
  for _, key in ipairs(HARMLESS) do c:ignore(name .. key) end
  c:finish(ignore)
  return out, kind
end

--- Reads a model.
---@param path string
---@param build fun(config: table): Module  makes the model on meta
---@param device? string
---@param ignore? string[]  keys that do not matter
---@return Module
function M.load(path, build, device, ignore)
  local file = files.open(path)
  local ok, model = pcall(function()
    local config, kind = config_of(file, ignore)
    local m = build(config)
    local entries, used = names.entries(m, NAMES), { ["rope_freqs.weight"] = true }
    for _, e in ipairs(entries) do
      local t = file.tensors[e.file]
      used[e.file] = true
      if not t then errors.raise("hf: '%s' lacks '%s'", path, e.file) end
      if table.concat(t.shape, ",") ~= table.concat(e.shape, ",") then
        errors.raise("hf: '%s': '%s' has shape [%s], expected [%s]", path, e.file, table.concat(t.shape, ", "),
          table.concat(e.shape, ", "))
      end
    end
    for _, name in ipairs(errors.names(file.tensors)) do
      if not used[name] then errors.raise("hf: '%s' has '%s', which the model lacks", path, name) end
    end
    m:to_empty(device or "cpu")
    no_grad(function()
      for _, e in ipairs(entries) do
        scope.run("load", function()
          local t, heads = file:read(e.file), pairs_of(kind, e.file, m.model.options)
          e.t:detach():copy_(heads and reordered(t, heads, true) or t)
        end)
      end
    end)
    return m
  end)
  file:close()
  if not ok then error(model, 0) end
  return model
end

return M
