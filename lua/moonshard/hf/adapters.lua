-- SPDX-License-Identifier: MIT
--- Adapters of nn.lora as PEFT has them: a folder with adapter_config.json and adapter_model.safetensors.
local agree = require "moonshard.parallel.fsdp.agree"
local Config = require "moonshard.hf.config"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local files = require "moonshard.io.files"
local folders = require "moonshard.hf.folders"
local json = require "moonshard.run.json"
local log = require "moonshard.core.log"
local lora = require("moonshard.nn.linear.lora").lora
local names = require "moonshard.hf.names"
local opts = require "moonshard.core.opts"
local regular = require "moonshard.io.regular"
local sorted_pairs = require("moonshard.tensor.util").sorted_pairs

local M = {}

local CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

-- Layers of a model by their names in files; transposed: the files have their weights as [in, out].
local function layers_of(model)
  local from_0, list = model:_names_from_0(), {}
  for name in model:named_parameters() do
    local layer = name:match "^(.+)%.weight$"
    if layer then
      local file, row = names.to_file(from_0[name], model.family.names)
      list[layer] = { file = file:match "^(.+)%.weight$", transposed = row and row.transposed or false }
    end
  end
  return list
end

local function key(file, part) return ("base_model.model.%s.lora_%s.weight"):format(file, part) end

--- Writes the adapters of nn.lora as PEFT reads them: adapter_config.json and adapter_model.safetensors. Collective if
--- the model is sharded; else rank 0 writes. Errors: adapters of an Embedding, or other parameters that are trained.
---@param adapters LoRA  of a model of ms.hf.load
---@param folder string  is made if it does not exist
function M.save(adapters, folder)
  local who, model = "hf.save_adapter", type(adapters) == "table" and adapters.model
  opts.need(model and adapters.layers and model.family, adapters, "the adapters of a model of ms.hf.load",
    "%s: argument 1", who)
  opts.expect(folder, opts.string, "%s: the folder", who)
  local layers, targets, transposed = layers_of(model), {}, false
  local groups = agree.groups_of(model)
  agree.together(groups, function()
    local sd, list = adapters:state_dict(), {}
    local alpha = sd.lora_alpha:item()
    sd.lora_alpha = nil
    for name, t in sorted_pairs(sd) do
      local layer, part = name:match "^(.+)%.lora_([AB])$"
      local of = layers[layer]
      if not of or not of.file then
        errors.raise("%s: '%s' is no adapter of a layer with a weight, which PEFT's file could name", who, name)
      end
      list[#list + 1] = { name = key(of.file, part), t = t }
      targets[of.file:match "[^.]+$"], transposed = true, transposed or of.transposed
    end
    if not agree.is_first(groups) then return end
    folder = folders.path(folder)
    folders.make(folder)
    local declared = {}
    for k, e in ipairs(list) do declared[k] = { name = e.name, dtype = e.t.dtype, shape = e.t.shape } end
    local saver = files.saver(folder .. "/" .. WEIGHTS, declared, { format = "pt" })
    for _, e in ipairs(list) do saver:write(e.name, e.t:to "cpu":contiguous()) end
    saver:commit()
    folders.write(folder .. "/" .. CONFIG, json({ peft_type = "LORA", task_type = "CAUSAL_LM", inference_mode = true,
      base_model_name_or_path = model.family.folder, r = adapters.rank, lora_alpha = alpha, lora_dropout = 0,
      bias = "none",
      target_modules = errors.names(targets), fan_in_fan_out = transposed }) .. "\n")
  end)
end

-- Refuses what changes the result of adapters and is not there; true: any value that is off is accepted.
local OFF = { "alpha_pattern", "rank_pattern", "use_dora", "use_rslora", "modules_to_save", "layers_to_transform",
  "trainable_token_indices", "use_qalora", "lora_bias", "alora_invocation_tokens", "target_parameters",
  "layer_replication", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config" }
-- Values of init_lora_weights with which PEFT changes the weights of the model, too.
local CHANGES_WEIGHTS = { "pissa", "olora", "corda", "loftq", "lora_ga" }

local function expect_off(config, name)
  local value = config:maybe(name, opts.any)
  if value and value ~= false and not (type(value) == "table" and next(value) == nil) then
    config:fail(name, "is %s, which Moonshard does not have", errors.show(value))
  end
end

-- What a model's folder is called: its last part, without the "model" in the folder of a run; nil if that says nothing.
local function last_part(path)
  local name = ("/" .. folders.path(path)):gsub("/model$", ""):match "[^/]*$"
  return name ~= "" and name ~= "." and name ~= ".." and name or nil
end

-- Warns if the adapters were trained for another model, whose layers may have the same shapes. As PEFT, it goes on:
-- only the names are known, and a folder may have been renamed.
local function compare_base(model, config, folder)
  local base, own = config:maybe("base_model_name_or_path", opts.any), model.family.folder
  if type(base) ~= "string" or not own or regular.same(base, own) then return end
  local trained, given = last_part(base), last_part(own)
  if not trained or not given or trained == given then return end
  log.warn(("hf.load_adapter: '%s' has adapters for the model '%s', but gets '%s': are these the same weights?"):format(
    folder, base, own))
end

-- Whether a layer's name in files is among target_modules, as PEFT reads it.
local function is_target(file, targets)
  for _, name in ipairs(targets) do
    if file == name or file:sub(-#name - 1) == "." .. name then return true end
  end
  return false
end

--- Gives a model the adapters of a folder that PEFT wrote, or ms.hf.save_adapter: it is frozen, and its layers have
--- adapters with the folder's values. To be called before the model is sharded. Warns if the folder names another model
--- than the one that is given. Errors: kinds of adapters other than
--- LoRA; options that change their result and that Moonshard lacks; tensors that do not fit, are missing, or have a
--- number that is not finite.
---@param model Module  of ms.hf.load
---@param folder string  with adapter_config.json and adapter_model.safetensors; or that of a run of scripts/finetune, which has one
---@return LoRA
function M.load(model, folder)
  local who = "hf.load_adapter"
  opts.need(type(model) == "table" and model.family, model, "a model of ms.hf.load", "%s: argument 1", who)
  opts.expect(folder, opts.string, "%s: the folder", who)
  folder = folders.path(folder)
  if folders.has(folder .. "/adapter", CONFIG) then folder = folder .. "/adapter" end
  local run = folder:match "^(.*)/adapter$"
  if run and model.family.folder == run .. "/model" then
    errors.raise("%s: '%s' has the adapters of '%s' already: they belong to the model that the run began with", who,
      model.family.folder, folder)
  end
  local config = Config.read(folder, CONFIG)
  config:only("peft_type", "LORA")
  config:only("bias", "none")
  for _, name in ipairs(OFF) do expect_off(config, name) end
  local start = config:maybe("init_lora_weights", opts.any)
  for _, name in ipairs(CHANGES_WEIGHTS) do
    if type(start) == "string" and start:sub(1, #name) == name then
      config:fail("init_lora_weights", "is '%s', which changes the model's weights, too; PEFT's save_pretrained with "
        .. "path_initial_model_for_weight_conversion writes adapters without that", start)
    end
  end
  compare_base(model, config, folder)
  local rank = config:get("r", Config.size)
  local alpha, reader = config:get("lora_alpha", opts.positive), files.reader(folder .. "/" .. WEIGHTS)
  -- Which layers must have adapters: those that a list names. A text is a pattern of Python's, which is not read.
  local targets, missing = config:maybe("target_modules", opts.any), {}
  local targeted = opts.is_plain(targets) and type(targets[1]) == "string"
    and not config:maybe("exclude_modules", opts.any)
  local state, used = { lora_alpha = create.tensor(alpha, { dtype = "float64" }) }, {}
  local ok, err = pcall(function()
    for layer, of in sorted_pairs(layers_of(model)) do
      for _, part in ipairs { "A", "B" } do
        local name = of.file and key(of.file, part)
        if name and reader:has(name) then
          if targeted and not is_target(of.file, targets) then
            errors.raise("%s: '%s' has '%s', whose layer is not among target_modules in %s", who, reader.path, name, CONFIG)
          end
          local t = reader:read(name)
          local has = t:size(part == "A" and 1 or t.ndim)
          if has ~= rank then config:fail("r", "is %d, but '%s' of '%s' has rank %d", rank, name, reader.path, has) end
          if not t:isfinite():all():item() then
            errors.raise("%s: '%s': '%s' has NaN or an infinity", who, reader.path, name)
          end
          used[name], state[layer .. ".lora_" .. part] = true, t
        elseif name and (targeted and is_target(of.file, targets)
            or reader:has(key(of.file, part == "A" and "B" or "A"))) then
          missing[#missing + 1] = name
        end
      end
    end
    if #missing > 0 then
      table.sort(missing)
      errors.raise("%s: '%s' has no '%s'%s", who, reader.path, missing[1], #missing > 1
        and (", and lacks %d more tensors of the layers in target_modules"):format(#missing - 1) or "")
    end
    for _, name in ipairs(reader.names) do
      if not used[name] then errors.raise("%s: '%s': the model has no layer for '%s'", who, reader.path, name) end
    end
    if #reader.names == 0 then errors.raise("%s: '%s' has no tensor", who, reader.path) end
  end)
  reader:close()
  if not ok then error(err, 0) end
  return lora(model, { state = state })
end

return M
