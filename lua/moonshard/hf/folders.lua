-- SPDX-License-Identifier: MIT
--- The small files of a model's folder: config.json, the index of its weights, and what belongs to its tokenizer.
local cjson = require "cjson"
local errors = require "moonshard.core.errors"
local json = require "moonshard.run.json"
local lfs = require "lfs"
local log = require "moonshard.core.log"
local regular = require "moonshard.io.regular"
local texts = require "moonshard.text.files"
local weights = require "moonshard.hf.weights"

local M = {}

-- Files that say how text becomes ids, and how a model generates; a saved model needs the same ones.
local COPIED = { "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
  "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
  "generation_config.json", "chat_template.jinja", "preprocessor_config.json", "processor_config.json" }

--- A folder's path without "/" at its end.
---@param path string
---@return string
function M.path(path) return (path:gsub("(.)/+$", "%1")) end

--- The folder of a model, as texts.model_folder says.
function M.model(path, who) return texts.model_folder(M.path(path), who) end

--- Whether a folder has a file.
---@param path string  the folder's
---@param name string
---@return boolean
function M.has(path, name) return lfs.attributes(path .. "/" .. name, "mode") == "file" end

--- Makes a folder, if there is none.
---@param path string
function M.make(path)
  if lfs.attributes(path, "mode") == "directory" then return end
  local ok, why = lfs.mkdir(path)
  if not ok then errors.raise("hf.save: cannot make the folder '%s': %s", path, why) end
end

local function read(path)
  local file = regular.open(path, "rb")
  if not file then return nil end
  local text = file:read "*a"
  file:close()
  return text
end

-- Raises why a file cannot be written, which is written under another name, `new`, at first.
function M.cannot_write(path, new, why)
  why = tostring(why)
  local at = why:sub(1, #new + 2) == new .. ": " and #new + 3 or 1
  errors.raise("hf.save: cannot write '%s': %s", path, why:sub(at))
end

local function write(path, text)
  local new = path .. ".new"
  local file, why = regular.create(path, new)
  if not file then M.cannot_write(path, new, why) end
  local ok
  ok, why = file:write(text)
  local closed, also = file:close()
  if not ok or not closed then M.cannot_write(path, new, why or also) end
  ok, why = os.rename(new, path)
  if not ok then M.cannot_write(path, new, why) end
end

-- Keys that transformers refuses to read as a whole number: 10000 must be 10000.0.
local FLOATS = { "theta$", "factor$", "eps$", "epsilon$", "softcapping$", "range$", "std$", "prob$", "pdrop$", "drop$",
  "dropout$", "dropout_prob$", "rate$", "scale_init_value$" }

local function as_float(key, digits, stop)
  for _, pattern in ipairs(FLOATS) do
    if key:find(pattern) then return ('"%s": %s.0%s'):format(key, digits, stop) end
  end
end

-- A copy with a text in place of JSON's null, which the writer lacks.
local NULL = "\1null"
local function with_text_for_null(values)
  local copy = {}
  for key, value in pairs(values) do                      -- any order: it is a copy
    copy[key] = type(value) == "table" and with_text_for_null(value) or value == cjson.null and NULL or value
  end
  return copy
end

-- config.json: the text that was read, so that every key is kept, with the dtype of the parameters now.
local function config_text(model)
  local text, dtype = model.family.text, model:parameters()[1].dtype
  if not text then
    local values = with_text_for_null(model.config)
    values.architectures, values.dtype = { model.family.architecture }, dtype
    local made = json(values, nil, { digits = 17, separator = ",\n  " })
    return made:gsub('"([%w_]+)": (%-?%d+)([,}%s])', as_float):gsub('"\\u0001null"', "null") .. "\n"
  end
  return (text:gsub('("t?o?r?c?h?_?dtype"%s*:%s*)"[%w]*"', function(key) return key .. '"' .. dtype .. '"' end))
end

M.write = write

local function write_object(path, values) write(path, json(values, nil, { separator = ",\n  " }) .. "\n") end

-- Writes what a GGUF file has beside the weights: its tokenizer, the names of special tokens, the chat template, and
-- the tokens that end a text.
local function unpack_gguf(model, folder, from)
  local c = model.config
  write_object(folder .. "/generation_config.json", { bos_token_id = c.bos_token_id, eos_token_id = c.eos_token_id })
  local ok, t = pcall(texts.open, from)
  local why = t
  if ok then ok, why = pcall(t.save, t, folder .. "/tokenizer.json") end
  if not ok then log.warn(("hf.save: the folder gets no tokenizer: %s"):format(why)) end
  if type(t) ~= "table" then return end
  local values = { tokenizer_class = ok and "PreTrainedTokenizerFast" or nil }
  for name, id in pairs { bos_token = t.bos_id, eos_token = t.eos_id, pad_token = t.pad_id } do
    values[name] = t:token(id)
  end
  write_object(folder .. "/tokenizer_config.json", values)
  local template = t._o.chat_template
  if template then write(folder .. "/chat_template.jinja", template.text) end
end

--- Writes what belongs to new weights, and removes files of weights that a model saved there before had.
---@param model Module
---@param folder string
---@param index? table  of the weights
---@param written table<string, boolean>  the weights' files
function M.finish(model, folder, index, written)
  if index then write(folder .. "/" .. weights.INDEX, json(index) .. "\n") end
  for name in lfs.dir(folder) do
    local is_weights = name == weights.SINGLE or name == weights.INDEX or name:find "^model%-%d+%-of%-%d+%.safetensors$"
    if is_weights and not written[name] then os.remove(folder .. "/" .. name) end
  end
  write(folder .. "/config.json", config_text(model))
  local from = model.family.folder
  if from and from:find "%.gguf$" then unpack_gguf(model, folder, from) end
  for _, name in ipairs(from and from ~= folder and COPIED or {}) do
    local text = read(from .. "/" .. name)
    if text then write(folder .. "/" .. name, text) end
  end
end

return M
