-- SPDX-License-Identifier: MIT
--- Reads config.json of a model's folder. A family asks for the keys that it knows; `finish` then refuses the keys that
--- nobody asked for, because an option that is ignored would change the results silently.
---   local c = Config.read "gpt2"
---   local dim = c:get("n_embd", Config.size)
---   c:only("scale_attn_weights", true)
---   c:finish()
local activations = require "moonshard.hf.activations"
local cjson = require "cjson"
local errors = require "moonshard.core.errors"
local json = require "moonshard.core.json"
local lfs = require "lfs"
local opts = require "moonshard.core.opts"
local regular = require "moonshard.io.regular"
local sorted_pairs = require("moonshard.tensor.util").sorted_pairs

---@class HFConfig
---@field path string  the file, for messages
---@field values table<string, any>  the keys of the file, or of an object in it
---@field folder? string  that of the file
---@field prefix string  of the keys in messages: "", or "text_config."
---@field asked table<string, boolean>  the keys that were asked for
local Config = {}
Config.__index = Config

local MOST = 16 * 2 ^ 20                                  -- bytes of config.json

--- A size or number of layers. A model beyond these bounds is not one that was trained.
Config.size = opts.kind("a whole number from 1 to 2^31", function(v)
  return type(v) == "number" and v % 1 == 0 and v >= 1 and v <= 2 ^ 31
end)
Config.layers = opts.kind("a whole number from 1 to 1024", function(v)
  return type(v) == "number" and v % 1 == 0 and v >= 1 and v <= 1024
end)
Config.head = opts.kind("a whole number from 1 to 65536", function(v)
  return type(v) == "number" and v % 1 == 0 and v >= 1 and v <= 65536
end)
Config.share = opts.kind("a number from 0 to 1", function(v) return type(v) == "number" and v >= 0 and v <= 1 end)
Config.positive = opts.kind("a number > 0", function(v) return type(v) == "number" and v > 0 and v < math.huge end)

Config.object = opts.kind("an object", function(v) return opts.is_plain(v) and v[1] == nil end)

Config.act = opts.one_of(errors.names(activations))

-- Keys that do not change what a model computes: names of tokens, initial values, options of generation and outputs.
local HARMLESS = {}
for name in ([[
  _attn_implementation _name_or_path add_prefix_space architectures attn_implementation auto_map bad_words_ids
  begin_suppress_tokens bos_token_id classifier_dropout cls_token_id decoder_start_token_id directionality
  do_sample dtype encoder_stride eos_token_id finetuning_task forced_bos_token_id forced_decoder_ids
  forced_eos_token_id gradient_checkpointing id2label init_std initializer_factor initializer_range
  is_encoder_decoder is_llama_config keys_to_ignore_at_inference label2id length_penalty mask_token_id max_length
  max_position_embeddings model_type n_ctx num_beam_groups num_beams num_labels num_return_sequences
  output_attentions output_hidden_states output_past pad_token_id pooler_fc_size pooler_num_attention_heads
  pooler_num_fc_layers pooler_size_per_head pooler_type prefix problem_type repetition_penalty return_dict
  sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
  torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id use_cache
  use_return_dict
]]):gmatch "%S+" do
  HARMLESS[name] = true
end

local function make(path, values, prefix)
  return setmetatable({ path = path, values = values, prefix = prefix or "", asked = {} }, Config)
end

--- Reads FOLDER/config.json, or another file of the folder.
---@param folder string
---@param name? string
---@return HFConfig
function Config.read(folder, name)
  local path = folder .. "/" .. (name or "config.json")
  local file, why = regular.open(path, "rb")
  if not file then
    local mode = lfs.attributes(folder, "mode")
    if mode ~= "directory" then
      errors.raise(mode and "hf: '%s' is a file, expected a model's folder" or "hf: there is no folder '%s'", folder)
    end
    errors.raise("hf: cannot open '%s': %s", path, tostring(why):gsub("^.-: ", ""))
  end
  local text = file:read(MOST + 1) or ""
  file:close()
  if #text > MOST then errors.raise("hf: '%s' has more than %d bytes", path, MOST) end
  local ok, values = pcall(json.decode, text)
  if not ok then errors.raise("hf: '%s' is not valid JSON: %s", path, tostring(values)) end
  if not opts.is_plain(values) or values[1] ~= nil then errors.raise("hf: '%s' is not an object of JSON", path) end
  local config = make(path, values)
  config.text, config.folder = text, folder
  return config
end

--- The options of a model as a table, as config.json has them.
---@param values table<string, any>
---@param path? string  the file that they come from, for messages
---@return HFConfig
function Config.of(values, path) return make(path or "config", values) end

--- Raises an error about a key, after the file's and the key's name.
function Config:fail(key, format, ...)
  errors.raise("hf: '%s': key '%s%s' " .. format, self.path, self.prefix, key, ...)
end

--- The value of a key. Without a default the key must be there; null is as good as absent.
---@param key string
---@param kind table  a kind of moonshard.core.opts
---@param default? any
---@return any
function Config:get(key, kind, default)
  self.asked[key] = true
  local value = self.values[key]
  if value == nil or value == cjson.null then
    if default ~= nil then return default end
    self:fail(key, "is missing, expected %s", kind.text)
  end
  if not kind.test(value) then self:fail(key, "is %s, expected %s", json.show(value), kind.text) end
  return value
end

--- The value of a key that may be absent or null.
---@param absent? any  the value of an absent key, not of null
---@return any?
function Config:maybe(key, kind, absent)
  self.asked[key] = true
  if self.values[key] == nil then return absent end
  if self.values[key] == cjson.null then return nil end
  return self:get(key, kind)
end

--- Refuses all values of a key but one; a key that is absent or null has it.
---@param key string
---@param value any
function Config:only(key, value)
  self.asked[key] = true
  local v = self.values[key]
  if v ~= nil and v ~= cjson.null and v ~= value then
    self:fail(key, "is %s; only %s is supported", json.show(v), json.show(value))
  end
end

--- The row of a table of n tokens that lookups give no gradient, that of pad_token_id, as in transformers; or nil.
---@param n integer
---@param default? integer  of a file without the key
---@return integer?
function Config:padding_row(n, default)
  local id = self.values.pad_token_id
  if id == nil then id = default end
  return type(id) == "number" and id % 1 == 0 and id >= -n and id < n and id or nil
end

--- The number of classes of a classifier.
function Config:labels()
  self:only("problem_type", "single_label_classification")
  local names, n = self:maybe("id2label", Config.object), 0
  for _ in pairs(names or {}) do n = n + 1 end
  return self:get("num_labels", Config.size, n > 0 and n or 2)
end

--- The object under a key, to be read and finished like the whole; nil if the key is absent or null.
---@param key string
---@return HFConfig?
function Config:part(key)
  local values = self:maybe(key, Config.object)
  return values and make(self.path, values, self.prefix .. key .. ".")
end

--- Marks keys as known whose values do not matter to the model at hand.
function Config:ignore(...)
  for _, key in ipairs { ... } do self.asked[key] = true end
end

--- Refuses keys that no family asked for, unless their values say that something is off.
---@param ignored? string[]  further keys to leave out
function Config:finish(ignored)
  self:ignore(unpack(ignored or {}))
  for key, value in sorted_pairs(self.values) do
    local off = value == cjson.null or value == false or value == 0 or type(value) == "table" and next(value) == nil
    if not self.asked[key] and not HARMLESS[key] and not off then
      self:fail(key, "is %s, which Moonshard does not know; if it does not change the results, write "
        .. "ms.hf.load(folder, { ignore = { '%s' } })", json.show(value), key)
    end
  end
end

return Config
