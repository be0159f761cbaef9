-- SPDX-License-Identifier: MIT
--- Names of parameters, here and in Hugging Face's files: tables of pairs, read in both directions. A pair fits a name
--- that begins with it; "#" stands for a number. The first pair that fits is replaced; other names are equal in both.
local errors = require "moonshard.core.errors"
local sharded = require "moonshard.parallel.fsdp.sharded"

local M = {}

local function pattern_of(text) return "^" .. text:gsub("[%.%-]", "%%%0"):gsub("#", "(%%d+)") end

local function replaced(name, from, to)
  local first, last, a, b = name:find(pattern_of(from))
  if not first then return nil end
  local numbers, k = { a, b }, 0
  return to:gsub("#", function()
    k = k + 1
    return numbers[k]
  end) .. name:sub(last + 1)
end

--- A name here, with layers counted from 0, as files have it; and the pair that fits it.
---@param name string
---@param pairs_of { [1]: string, [2]: string, transposed: boolean? }[]
---@return string
---@return table?
function M.to_file(name, pairs_of)
  for _, row in ipairs(pairs_of) do
    local theirs = replaced(name, row[1], row[2])
    if theirs then return theirs, row end
  end
  return name, nil
end

--- What a model has to read or write: each tensor once, in the order of the model. Parameters that it did not have
--- when it was made, such as those of adapters, are in the second list, with the modules that own them.
---@param model Module  of ms.hf.load
---@param pairs_of? table  the names of another kind of files (default: those of the model's family)
---@return { name: string, file: string, old: string, others: string[], t: Tensor, shape: integer[], transposed: boolean }[]
---   name: here; file: in files; old: in files that lack that one; others: of the same tensor in files that repeat it
---@return { name: string, owner: Module }[] added
function M.entries(model, pairs_of)
  local from_0, list, seen = model:_names_from_0(), {}, {}
  local own, values, owners = model:_state()
  local known, added = model.family.known, {}
  for k, name in ipairs(own) do
    local t = values[k]
    local file, row = M.to_file(from_0[name], pairs_of or model.family.names)
    local e = seen[t]
    if known and not known[name] then
      added[#added + 1] = { name = name, owner = owners[k][1] }
    elseif e then
      e.others[#e.others + 1] = file
    else
      local whole = rawget(t, "_whole_shape") or t.shape
      local shape, transposed = { unpack(whole) }, row and row.transposed and #whole == 2 or false
      if transposed then shape = { whole[2], whole[1] } end
      if row and row.scalar then shape = {} end
      e = { name = name, file = file, old = row and row.old, others = {}, t = t, shape = shape, transposed = transposed,
        is_sharded = sharded.is_sharded(t) }
      seen[t], list[#list + 1] = e, e
    end
  end
  return list, added
end

--- What a model has to write: `entries` without those of merged adapters. Raises if the model has other parameters that
--- its architecture lacks.
---@param model Module  of ms.hf.load
---@param pairs_of? table  the names of another kind of files (default: those of the model's family)
---@return table[]  as of `entries`
function M.to_save(model, pairs_of)
  local entries, added = M.entries(model, pairs_of)
  for _, e in ipairs(added) do
    if not e.owner.lora_merged then
      errors.raise("hf.save: the model has '%s', which its architecture lacks; of adapters, call merge() first, or save "
        .. "them alone", e.name)
    end
  end
  return entries
end

--- Remembers the names of a new model's tensors.
---@param model Module
function M.remember(model)
  local known = {}
  for _, name in ipairs((model:_state())) do known[name] = true end
  model.family.known = known
end

return M
