-- SPDX-License-Identifier: MIT
--- Reads and writes the weights of a model's folder: model.safetensors, or the files of model.safetensors.index.json.
--- A rank reads the bytes of its own shards only; a tensor that is transposed or sharded along columns is read whole,
--- one at a time. Writing gathers one tensor at a time, and the first rank writes it.
local agree = require "moonshard.parallel.fsdp.agree"
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local files = require "moonshard.io.files"
local lfs = require "lfs"
local log = require "moonshard.core.log"
local module = require "moonshard.parallel.fsdp.module"
local names = require "moonshard.hf.names"
local no_grad = require("moonshard.autograd").no_grad
local placement = require "moonshard.io.placement"
local scope = require "moonshard.tensor.scope"
local sharded = require "moonshard.parallel.fsdp.sharded"
local shards = require "moonshard.io.shards"
local task = require "moonshard.core.task"

local M = {}

local INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

local function exists(path) return lfs.attributes(path, "mode") ~= nil end

-- The files with a folder's weights, opened, and the file and name of each tensor.
local function open(folder)
  local path, parts = folder .. "/" .. INDEX, nil
  if exists(folder .. "/" .. SINGLE) then
    path = folder .. "/" .. SINGLE
    parts = { { name = SINGLE, path = path } }
  elseif exists(path) then
    parts = shards.read(path)
  else
    if not exists(folder) then errors.raise("hf: there is no folder '%s'", folder) end
    local old = exists(folder .. "/pytorch_model.bin") or exists(folder .. "/pytorch_model.bin.index.json")
    errors.raise("hf: '%s' has neither %s nor %s%s", folder, SINGLE, INDEX,
      old and "; `scripts/convert pytorch_model.bin model.safetensors` makes it of the file of torch.save" or "")
  end
  local readers, where = {}, {}
  local ok, err = pcall(function()
    for k, part in ipairs(parts) do
      local reader = files.reader(part.path)
      readers[k] = reader
      if part.names then shards.check(path, part, function(name) return reader:has(name) end) end
      for _, name in ipairs(part.names or reader.names) do where[name] = reader end
    end
  end)
  if ok then return path, readers, where end
  for _, reader in ipairs(readers) do reader:close() end
  return error(err, 0)
end

--- Whether a folder has files of weights, and these have a tensor.
---@param folder string
---@param name string
---@return boolean
function M.has(folder, name)
  local ok, _, readers, where = pcall(open, folder)
  for _, reader in ipairs(ok and readers or {}) do reader:close() end
  return ok and where[name] ~= nil
end

-- Tensors that old versions of transformers wrote and that are no weights.
local function is_constant(name)
  return name:find "rotary_emb%.inv_freq$" or name:find "%.attn%.bias$" or name:find "%.masked_bias$"
    or name:find "position_ids$" or name:find "predictions%.decoder%.bias$" or name:find "lm_head%.decoder%.bias$"
end

local function listed(list)
  return table.concat(list, ", ", 1, math.min(#list, 8)) .. (#list > 8 and (" and %d more"):format(#list - 8) or "")
end

-- Raises if a file has two different tensors where the model has one under two names.
local function check_tied(where, a, b)
  local same = scope.run("compare", function() return where[a]:read(a):equal(where[b]:read(b)) end)
  if not same then
    errors.raise("hf: '%s': '%s' differs from '%s', but config.json ties them; set its key 'tie_word_embeddings' to false",
      where[a].path, a, b)
  end
end

-- Finds each entry's tensor; raises if one is missing or has another shape.
local function match(model, entries, path, where)
  local prefix, repeats, used, missing = model.family.prefix, model.family.repeats, {}, {}
  local function find(name)
    if where[name] then return name end
    if not prefix then return nil end
    local other = name:sub(1, #prefix) == prefix and name:sub(#prefix + 1) or prefix .. name
    return where[other] and other
  end
  for _, e in ipairs(entries) do
    local found = find(e.file) or e.old and find(e.old)
    for _, other in ipairs(e.others) do
      local same = find(other)
      if same then used[same] = true end
      if found and same then check_tied(where, found, same) end
      found = found or same
    end
    if not found then
      missing[#missing + 1] = "'" .. e.file .. "'"
    else
      e.found, used[found] = found, true
      local reader = where[found]
      if reader.others[found] then
        errors.raise("hf: '%s': '%s' is %s, a dtype that Moonshard's tensors do not have", reader.path, found,
          reader.others[found])
      end
      local shape, dtype = reader:info(found)
      if table.concat(shape, ",") ~= table.concat(e.shape, ",") then
        errors.raise("hf: '%s': '%s' has shape [%s], expected [%s] by config.json", reader.path, found,
          table.concat(shape, ", "), table.concat(e.shape, ", "))
      end
      e.dtype = dtype
    end
  end
  if missing[1] then errors.raise("hf: '%s' lacks %s", path, listed(missing)) end
  local unused = {}
  for name in pairs(where) do
    if not used[name] and not is_constant(name) and not (repeats and repeats[name]) then unused[#unused + 1] = "'" .. name .. "'" end
  end
  table.sort(unused)
  if unused[1] and log.rank() == 0 then
    log.warn(("hf: '%s': tensors that the model does not have are left out: %s"):format(path, listed(unused)))
  end
end

-- Reads one entry, or requests that the next fetch reads it.
local function read(e, reader)
  local part = (e.is_sharded and e.t:to_local() or e.t):detach()
  local shared = placement.is_shared(e.t)
  if e.transposed then
    local whole = reader:read(e.found):transpose(1, 2)
    part:copy_((shared and whole or sharded.part_of(e.t, whole)):reshape(part.shape))
    return
  end
  local numel = 1
  for _, n in ipairs(e.shape) do numel = numel * n end
  local stored = { dtype = e.dtype, shape = e.shape, pieces = { { 1, 0, 0, numel } } }
  local finish = placement.plan({ reader }, e.found, stored, { place = placement.of(e.t), part = part, like = e.t,
    shared = shared })
  if finish then
    reader:fetch()
    finish()
  end
end

-- Gives a model on meta memory, and what the files lack its initial values.
local function make_room(model, added)
  local is_on_meta = false
  for _, p in ipairs(model:parameters()) do is_on_meta = is_on_meta or p.device == "meta" end
  if not is_on_meta then return end
  model:to_empty(model.family.device or dtypes.default_device())
  local done = {}
  for _, e in ipairs(added) do
    if not done[e.owner] then e.owner:reset_parameters() end
    done[e.owner] = true
  end
end

--- Reads the weights of a folder into a model, which may be sharded in any way; what is on meta gets memory first.
---@param model Module  of ms.hf.load or ms.hf.create
---@param folder string
function M.load(model, folder)
  local groups = agree.groups_of(model)
  agree.agree(groups, function()
    local path, readers, where = open(folder)
    local ok, err = pcall(function()
      module.reshard_all(model)
      local entries, added = names.entries(model)
      match(model, entries, path, where)
      no_grad(function()
        make_room(model, added)
        for k, e in ipairs(entries) do
          task.report("loading", k - 1, #entries)
          scope.run("load", read, e, where[e.found])
        end
        for _, reader in ipairs(readers) do reader:fetch() end
        task.report("loading", #entries, #entries)
      end)
    end)
    for _, reader in ipairs(readers) do reader:close() end
    if not ok then error(err, 0) end
  end)
end

-- ---- writing -------------------------------------------------------------------------------------

-- Divides the entries into files of at most `most` bytes, or one tensor.
local function divide(entries, most)
  local parts, bytes, total = {}, math.huge, 0
  for _, e in ipairs(entries) do
    local size = e.t:element_size()
    for _, n in ipairs(e.shape) do size = size * n end
    total = total + size
    if bytes + size > most then parts[#parts + 1], bytes = {}, 0 end
    table.insert(parts[#parts], e)
    bytes = bytes + size
  end
  return parts, total
end

-- The whole tensor of an entry, as files have it. Collective if it is sharded.
local function whole_of(e)
  local t = e.is_sharded and e.t:full_tensor() or e.t:detach()
  if e.transposed then t = t:transpose(1, 2) end
  if #e.shape == 0 then t = t:reshape(e.shape) end
  return t:to "cpu":contiguous()
end

local function write_part(path, part, mine)
  files.sort(part, function(e) return e.t.dtype end)
  local declared = {}
  for k, e in ipairs(part) do declared[k] = { name = e.file, dtype = e.t.dtype, shape = e.shape } end
  local saver = mine and files.saver(path, declared, { format = "pt" })
  local ok, err = pcall(function()
    for _, e in ipairs(part) do
      scope.run("save", function()
        if not mine and not e.is_sharded then return end
        local whole = whole_of(e)
        if saver then saver:write(e.file, whole) end
      end)
    end
    if saver then saver:commit() end
  end)
  if ok then return end
  if saver then saver:abort() end
  error(err, 0)
end

--- Writes a model's weights to a folder. Collective if the model is sharded; else rank 0 writes.
---@param model Module
---@param folder string
---@param most number  bytes of a file
---@param mine boolean  this rank writes
---@return table? index  the contents of the index; nil if there is one file
---@return table<string, boolean> written  names of the files
function M.save(model, folder, most, mine)
  module.reshard_all(model)
  local parts, total = divide(names.to_save(model), most)
  local index, written = { metadata = { total_size = total }, weight_map = {} }, {}
  no_grad(function()
    for k, part in ipairs(parts) do
      local name = #parts == 1 and SINGLE or ("model-%05d-of-%05d.safetensors"):format(k, #parts)
      task.report("saving", k - 1, #parts)
      written[name] = true
      for _, e in ipairs(part) do index.weight_map[e.file] = name end
      write_part(folder .. "/" .. name, part, mine)
    end
    task.report("saving", #parts, #parts)
  end)
  if #parts == 1 then return nil, written end
  written[INDEX] = true
  return index, written
end

M.INDEX, M.SINGLE = INDEX, SINGLE

return M
