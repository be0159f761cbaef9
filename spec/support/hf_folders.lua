-- SPDX-License-Identifier: MIT
--- Folders of small models as transformers wrote them, made of spec/golden/data/hf.json: config.json, and
--- model.safetensors with the values that make_hf.py computes, too.
local cjson = require "cjson"
local golden = require "spec.support.golden"
local ms = require "moonshard"
local numel = require "spec.support.numel"
local process = require "spec.support.process"

local M = { cases = golden.load "hf" }

-- n numbers in (-1, 1), by the generator of Park and Miller.
local function values(k, n)
  local x, list = 1000 * k + 1, {}
  for i = 1, n do
    x = x * 16807 % 2147483647
    list[i] = 2 * x / 2147483647 - 1
  end
  return list
end

-- scales: pairs of a part of matrices' names and a factor.
local function filled(name, k, shape, scales)
  local list, factor = values(k, numel(shape)), 0.35
  for _, scale in ipairs(scales or {}) do
    if name:find(scale[1], 1, true) then factor = factor * scale[2] end
  end
  for i, u in ipairs(list) do
    if #shape > 1 then list[i] = factor * u else list[i] = (name:find "weight$" and 1 or 0) + 0.2 * u end
  end
  return ms.tensor(list, { dtype = "float64" }):to("float32"):reshape(shape)
end

--- The tensors of a case by their names in the file.
---@param cases? table  of another file than hf.json
function M.tensors(name, cases)
  local sd, case = {}, (cases or M.cases)[name]
  for k, row in ipairs(case.tensors) do sd[row[1]] = filled(row[1], k - 1, row[2], case.scales) end
  return sd
end

--- Writes the adapters of a case of peft.json, with changes to their configuration; returns the folder's path.
function M.adapter(case, changes)
  local folder, sd, config = process.temp_folder(), {}, {}
  for key, value in pairs(case.config) do config[key] = key ~= "base_model_name_or_path" and value or nil end
  for key, value in pairs(changes or {}) do config[key] = value end
  for k, row in ipairs(case.tensors) do sd[row[1]] = filled(row[1], k - 1, row[2]) end
  process.write(folder .. "/adapter_config.json", cjson.encode(config))
  ms.save(folder .. "/adapter_model.safetensors", sd)
  return folder
end

--- A tensor of numbers in (-1, 1), as make_hf.py's `values`.
function M.wave(k, shape)
  return ms.tensor(values(k, numel(shape)), { dtype = "float64" }):to("float32"):reshape(shape)
end

--- Writes a case's folder, with changes to its config.json; returns its path.
function M.make(name, changes, cases)
  local case, folder = (cases or M.cases)[name], process.temp_folder()
  local config = {}
  for key, value in pairs(case.config) do config[key] = value end
  for key, value in pairs(changes or {}) do config[key] = value end
  process.write(folder .. "/config.json", cjson.encode(config))
  ms.save(folder .. "/model.safetensors", M.tensors(name, cases), { metadata = { format = "pt" } })
  return folder, case
end

--- Token ids [2, n], as make_hf.py has them.
function M.ids(n, step) return (ms.arange(0, 2 * n, { dtype = "int64" }):reshape(2, n) * (step or 7) + 3):remainder(32) end

--- The largest difference of a tensor from a list of numbers.
function M.off(t, list) return (t:to("float64"):reshape(-1) - ms.tensor(list, { dtype = "float64" })):abs():max():item() end

return M
