-- SPDX-License-Identifier: MIT
--- Checkpoints of a training run: one safetensors file with the weights (`model.NAME`), the optimizer's state
--- (`optim.NAME.exp_avg` ...), tensors of the option `state` (`state.ENTRY.PATH`) and, as metadata, everything else
--- that the next step depends on. Tensors are whole, so any number of ranks can read the file. Rank 0 writes one tensor
--- at a time, so no rank has all of them in memory, except for models that are saved as whole state dicts (is_by_rows).
require "moonshard.autograd.methods"
local read_json = require("moonshard.core.json").decode
local autograd = require "moonshard.autograd"
local calls = require "moonshard.dist.calls"
local classic = require "moonshard.parallel.fsdp.classic"
local create = require "moonshard.tensor.create"
local generator = require "moonshard.tensor.random"
local optim_states = require "moonshard.parallel.fsdp.optim_state"
local scope = require "moonshard.tensor.scope".scope
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"
local dist = require "moonshard.dist"
local run_folder = require "moonshard.run.folder"
local errors = require "moonshard.core.errors"
local state = require "moonshard.io.files"
local extras = require "moonshard.io.states"
local states = require "moonshard.parallel.fsdp.state"
local schedules = require "moonshard.optim.schedule"
local task = require "moonshard.core.task"
local trees = require "moonshard.io.tree"

local M = {}

--- This rank's rows of a parameter; the parameter itself if it is not sharded.
local function local_part(p) return p.placements and p:to_local() or p end

-- Rows are distributed to ranks in blocks of ceil(rows / ranks), as in fully_shard; the last blocks may be smaller or
-- empty. Returns the size of a block, and this rank's first row (from 0) and number of rows.
local function block_of(rows)
  local size = math.ceil(rows / dist.world_size())
  local first = math.min(rows, dist.rank() * size)
  return size, first, math.min(rows, first + size) - first
end

--- Gathers a tensor of this shape from `part`, the rows of each rank; returns `part` if `sharded` is false. Collective.
local function whole(part, shape, sharded)
  if not sharded or dist.world_size() == 1 then return part end
  local size, _, here = block_of(shape[1])
  local padded, all = { unpack(shape) }, { unpack(shape) }
  padded[1], all[1] = size, size * dist.world_size()
  local mine = create.zeros(padded, { dtype = part.dtype })
  if here > 0 then mine:narrow(1, 1, here):copy_(part) end
  local gathered = create.empty(all, { dtype = part.dtype })
  dist.all_gather(gathered, mine)
  return gathered:narrow(1, 1, shape[1])
end

-- Whether the rows of each sharded parameter are distributed over all ranks: only then a rank's rows can be read and
-- written alone. Models with instances of the class FSDP (flat parameters), over meshes, or sharded along another
-- dimension are saved and loaded as whole state dicts, which rank 0 holds in memory.
local function is_by_rows(model)
  for _, m in ipairs(model:modules()) do
    if classic.is_fsdp(m) then return false end
  end
  for _, p in model:named_parameters() do
    local placements = p.placements
    if placements and (#placements > 1 or tostring(placements[1]) ~= "Shard(1)"
      or p.device_mesh:size() ~= dist.world_size()) then return false end
  end
  return true
end

-- The persistent buffers of a model: a list of names and tensors.
local function buffers_of(model)
  local parameters, list = {}, {}
  for _, p in model:named_parameters() do parameters[p] = true end
  local names, values = model:_state()
  for k, t in ipairs(values) do
    if not parameters[t] then list[#list + 1] = { name = names[k], tensor = t } end
  end
  return list
end

-- The contents of a checkpoint as whole tensors, on rank 0 alone; empty lists on the other ranks.
local function whole_contents(model, optimizer)
  local whole_there = { type = "full", rank0_only = true, offload_to_cpu = true }
  local list, steps = {}, {}
  local function add(name, t) list[#list + 1] = { name = name, part = t:detach(), shape = t.shape, sharded = false } end
  for name, t in util.sorted_pairs(states.state_dict(model, whole_there)) do
    if not model._is_extra(name) then add("model." .. name, t) end
  end
  for name, entry in util.sorted_pairs(optim_states.optim_state_dict(model, optimizer, whole_there).state or {}) do
    for key, value in util.sorted_pairs(entry) do
      if not tensor.is_tensor(value) then
        steps[key .. " of " .. name] = value
      elseif value.ndim == 0 then
        steps[key .. " of " .. name] = value:item()
      else
        add(("optim.%s.%s"):format(name, key), value)
      end
    end
  end
  return list, steps
end

--- Returns the tensors of a checkpoint (name, this rank's part, shape of the whole), and the numbers of the optimizer's
--- state. The order is the same on every rank; of a model that is saved whole, only rank 0 has tensors.
local function contents(model, optimizer)
  if not is_by_rows(model) then return whole_contents(model, optimizer) end
  model:_before_saving()
  local list, steps, position = {}, {}, {}
  for _, group in ipairs(optimizer.param_groups) do
    for _, p in ipairs(group.params) do position[#position + 1] = p end
  end
  local sd = optimizer:state_dict()
  local optimizer_state = {}
  for k, p in ipairs(position) do optimizer_state[p] = sd.state[k] end
  for name, p in model:named_parameters() do
    local sharded = p.placements ~= nil
    list[#list + 1] = { name = "model." .. name, part = local_part(p):detach(), shape = p.shape, sharded = sharded }
    for key, value in util.sorted_pairs(optimizer_state[p] or {}) do
      if not tensor.is_tensor(value) then
        steps[key .. " of " .. name] = value
      elseif value.ndim == 0 then
        steps[key .. " of " .. name] = value:item()
      else
        local kept = optim_states.keeps_whole(optimizer, p, key)           -- whole on every rank
        list[#list + 1] = { name = ("optim.%s.%s"):format(name, key), part = value,
          shape = kept and value.shape or p.shape, sharded = sharded and not kept }
      end
    end
  end
  for _, b in ipairs(buffers_of(model)) do
    list[#list + 1] = { name = "model." .. b.name, part = b.tensor:detach(), shape = b.tensor.shape, sharded = false }
  end
  return list, steps
end

-- Calls fn(name in the file, parameter, its average) for each average of an optim.EMA among `objects`, the entries of
-- the option `state`; in the same order on every rank.
local function each_average(who, model, objects, fn)
  local names
  for entry, ema in util.sorted_pairs(objects or {}) do
    if extras.averages.test(ema) then
      if not is_by_rows(model) then
        errors.raise("%s: option 'state': '%s' has averages of a model that is not sharded by rows over all ranks; "
          .. "fsdp.save, with its option 'ema', saves them", who, entry)
      end
      if not names then
        names = {}
        for name, p in model:named_parameters() do names[p] = name end
      end
      for k, p in ipairs(ema._params) do
        if not names[p] then
          errors.raise("%s: option 'state': '%s': parameter %d of the averages is not a parameter of the model", who, entry, k)
        end
        fn(("state.%s.%s"):format(entry, names[p]), p, ema._averages[k])
      end
    end
  end
end

-- Appends the tensors of the option `state` to the list of contents; returns the rest as text.
local function add_state(list, model, objects)
  if not objects then return nil end
  local who = "run:checkpoint"
  extras.check(who, objects)
  local tensors, text = extras.contents(who, objects)
  for name, t in util.sorted_pairs(tensors) do
    list[#list + 1] = { name = "state." .. name, part = t:detach(), shape = t.shape, sharded = false }
  end
  each_average(who, model, objects, function(name, p, average)
    list[#list + 1] = { name = name, part = average, shape = p.shape, sharded = p.placements ~= nil }
  end)
  return text
end

-- The state of rank 0's random generator; with those of all ranks if they differ, as after ms.manual_seed(rank).
local function random_states()
  local mine = generator.get_rng_state()
  local all, differ = dist.world_size() > 1 and dist.all_gather_object(mine) or { mine }, false
  for _, other in ipairs(all) do differ = differ or other[1] ~= all[1][1] or other[2] ~= all[1][2] end
  return { seed = all[1][1], offset = all[1][2], ranks = differ and all or nil }
end

-- ---- options of the optimizer ----------------------------------------------------------------------

-- A value of an option as text, for comparison; nil if it cannot be saved.
local function text_of(value)
  local ok, tensors, text = pcall(trees.flatten, { value })
  return ok and next(tensors) == nil and text or nil
end

--- The options of an optimizer's groups, as texts.
---@param optimizer table
---@return table<string, string>[]
function M.options(optimizer)
  local list = {}
  for g, group in ipairs(optimizer.param_groups) do
    list[g] = {}
    for name, value in pairs(group) do
      if name ~= "params" then list[g][name] = text_of(value) end
    end
  end
  return list
end

-- The options that the script has changed since M.options returned `began`, by group, as text; nil if there are none. A
-- changed learning rate comes with the group's initial one, for schedules that are made after loading.
local function changed_options(optimizer, began)
  local now, changed, any = M.options(optimizer), {}, false
  for g, group in ipairs(optimizer.param_groups) do
    changed[g] = {}
    for name, text in pairs(now[g]) do
      if began[g] and text ~= began[g][name] then changed[g][name], any = group[name], true end
    end
    if changed[g].lr ~= nil then changed[g].initial_lr = schedules.initial_lr(group) end
  end
  return any and select(2, trees.flatten(changed)) or nil
end

local save = calls.several(function(path, model, optimizer, o)
  autograd.no_grad(function()
    scope(function()
      local list, numbers = contents(model, optimizer)
      local text = add_state(list, model, o.objects)
      state.sort(list, function(e) return e.part.dtype end)
      local random = random_states()
      local saver
      if dist.rank() == 0 then
        local entries = {}
        for k, e in ipairs(list) do entries[k] = { name = e.name, dtype = e.part.dtype, shape = e.shape } end
        local exact = { digits = 17 }
        saver = state.saver(path, entries, {
          step = ("%d"):format(o.step),
          config = run_folder.json(o.config, nil, exact),
          options = o.began and changed_options(optimizer, o.began),
          state = text,
          optimizer = run_folder.json(numbers, nil, exact),
          random = run_folder.json(random, nil, exact),
          extra_state = run_folder.json(model:_extra_states(), nil, exact),
        })
      end
      for k, e in ipairs(list) do
        task.report("saving", k - 1, #list)
        scope(function()
          local t = whole(e.part, e.shape, e.sharded)
          if saver then saver:write(e.name, t) end
        end)
      end
      if saver then saver:commit() end
      task.report("saving", #list, #list)
    end)
  end)
  dist.barrier()                                        -- another rank may read the file next
end)

--- Writes a checkpoint. Collective.
---@param path string  path of the file
---@param model Module  sharded or whole
---@param optimizer table  an optimizer of the model's parameters
---@param config table  the options that a resumed run needs
---@param step integer  number of steps taken
---@param more? { state: table<string, any>, began: table<string, string>[] }  state: the option of run.start; began: what
---   M.options returned when the run began
function M.save(path, model, optimizer, config, step, more)
  more = more or {}
  save(path, model, optimizer, { config = config, step = step, objects = more.state, began = more.began })
end

--- Whether all weights are finite on all ranks. Collective.
---@param model Module  sharded or whole
---@return boolean
M.finite = calls.several(function(model)
  local bad = 0
  autograd.no_grad(function()
    for _, p in model:named_parameters() do
      scope(function() bad = bad + local_part(p):detach():isfinite():logical_not():sum():item() end)
    end
    scope(function()
      local t = create.tensor({ bad }, { dtype = "float64" })
      dist.all_reduce(t)
      bad = t:item()
    end)
  end)
  return bad == 0
end)

---@class Checkpoint
---@field step integer  number of steps taken
---@field config table  the options of the run
local Checkpoint = {}
Checkpoint.__index = Checkpoint

--- Opens a file and checks that it is a checkpoint.
---@param path string  path of the file
---@return Checkpoint
function M.open(path)
  local reader = state.reader(path)
  local meta = reader.metadata
  local self = setmetatable({ path = path, reader = reader, step = tonumber(meta.step) }, Checkpoint)
  local ok, config = pcall(read_json, meta.config or "")
  if not self.step or not ok or type(config) ~= "table" then
    error(("checkpoint '%s' has no step or no configuration: it is not a checkpoint of ms.run or scripts/train")
      :format(path), 0)
  end
  self.config = config
  return self
end

local function read_into(reader, name, target, shape, sharded)
  local found = reader:info(name)
  if table.concat(found, ",") ~= table.concat(shape, ",") then
    error(("checkpoint '%s': '%s' has shape [%s], the model's is [%s]"):format(reader.path, name,
      table.concat(found, ", "), table.concat(shape, ", ")), 0)
  end
  if not sharded then
    target:copy_(reader:read(name))
    return
  end
  local _, first, here = block_of(shape[1])
  if here > 0 then target:copy_(reader:read(name, first + 1, here)) end
end

-- The extra states by name; those that the file lacks keep the model's values.
local function extra_states(self, model)
  local there, out = read_json(self.reader.metadata.extra_state or "{}"), {}
  local names, modules = model:_extras()
  for k, name in ipairs(names) do
    out[name] = there[name]
    if out[name] == nil then out[name] = modules[k]:get_extra_state() end
  end
  return out
end

-- The whole state of a model, read by rank 0: tensors and extra states by name.
local function read_model(self, model)
  local sd = dist.rank() == 0 and extra_states(self, model) or {}
  for _, entry in ipairs(dist.rank() == 0 and self.reader.names or {}) do
    local name = entry:match "^model%.(.+)$"
    if name then sd[name] = self.reader:read(entry) end
  end
  return sd
end

-- The whole state of the model's optimizer, read by rank 0: entries by name.
local function read_optimizer(self, numbers)
  local by_name = {}
  local function set(name, key, value)
    by_name[name] = by_name[name] or {}
    by_name[name][key] = value
  end
  for _, entry in ipairs(dist.rank() == 0 and self.reader.names or {}) do
    local name, key = entry:match "^optim%.(.+)%.([^.]+)$"
    if name then set(name, key, self.reader:read(entry)) end
  end
  for key, value in pairs(dist.rank() == 0 and numbers or {}) do
    local field, name = key:match "^(.-) of (.*)$"
    set(name, field, value)
  end
  return dist.rank() == 0 and { state = by_name } or {}
end

--- Sets a model's parameters, persistent buffers and extra states, whether it is sharded or whole. Collective.
---@param model Module  with the shapes of the checkpoint
Checkpoint.load_model = calls.several(function(self, model)
  if not is_by_rows(model) then
    return autograd.no_grad(function()
      scope(function() states.load_state_dict(model, read_model(self, model), { broadcast_from_rank0 = true }) end)
    end)
  end
  autograd.no_grad(function()
    local done, total = 0, #model:parameters()
    for name, p in model:named_parameters() do
      task.report("loading", done, total)
      scope(function() read_into(self.reader, "model." .. name, local_part(p):detach(), p.shape,
        p.placements ~= nil) end)
      done = done + 1
    end
    for _, b in ipairs(buffers_of(model)) do
      local name = "model." .. b.name
      -- Checkpoints of version 1.0 have no buffers.
      if self.reader:has(name) then
        scope(function() read_into(self.reader, name, b.tensor:detach(), b.tensor.shape, false) end)
      end
    end
    local extra = extra_states(self, model)
    model:_after_loading(function(name) return extra[name] end, {}, {})
    task.report("loading", total, total)
  end)
end)

--- Sets an optimizer's state and the state of the random generator. Collective.
---@param model Module  with the shapes of the checkpoint
---@param optimizer table  an optimizer of the model's parameters
Checkpoint.load_training = calls.several(function(self, model, optimizer)
  local numbers = read_json(self.reader.metadata.optimizer)
  local random = read_json(self.reader.metadata.random)
  local own = random.ranks and #random.ranks == dist.world_size() and random.ranks[dist.rank() + 1]
  generator.set_rng_state(own or { random.seed, random.offset })
  if not is_by_rows(model) then
    return autograd.no_grad(function()
      scope(function()
        optim_states.load_optim_state_dict(model, optimizer, read_optimizer(self, numbers),
          { broadcast_from_rank0 = true })
      end)
    end)
  end
  local names = {}
  for name, p in model:named_parameters() do names[p] = name end
  autograd.no_grad(function()
    scope(function()
      local sd = optimizer:state_dict()
      local k = 0
      for _, group in ipairs(optimizer.param_groups) do
        for _, p in ipairs(group.params) do
          k = k + 1
          local name, part, s = names[p], local_part(p), {}
          for key, value in pairs(numbers) do
            local field, of = key:match "^(.-) of (.*)$"
            if of == name then s[field] = value end
          end
          local prefix = ("optim.%s."):format(name)
          for _, entry in ipairs(self.reader.names) do
            if entry:sub(1, #prefix) == prefix and not entry:sub(#prefix + 1):find(".", 1, true) then
              local key = entry:sub(#prefix + 1)
              local kept, shape, dtype = optim_states.keeps_whole(optimizer, p, key), self.reader:info(entry)
              local t = create.zeros(kept and shape or part.shape, { dtype = dtype })
              read_into(self.reader, entry, t, kept and shape or p.shape, p.placements ~= nil and not kept)
              s[key] = t
            end
          end
          sd.state[k] = next(s) and s or nil
        end
      end
      optimizer:load_state_dict(sd)
    end)
  end)
end)

--- What the checkpoint has for the option `state`. Raises if it lacks an entry.
---@param objects? table<string, any>
---@return table<string, table> contents  by name of the entry
function Checkpoint:state(objects)
  local tensors = setmetatable({}, { __index = function(list, name)
    list[name] = self.reader:read("state." .. name)
    return list[name]
  end })
  local values, err = extras.read(self.path, objects, self.reader.metadata.state, tensors)
  return values or error(err, 0)
end

--- Restores the objects and tables of the option `state` from the checkpoint.
---@param model Module  with the shapes of the checkpoint
---@param objects? table<string, any>
function Checkpoint:load_state(model, objects)
  local contents_of = self:state(objects)
  autograd.no_grad(function()
    each_average("run.start", model, objects, function(name, p, average)
      scope(function() read_into(self.reader, name, average, p.shape, p.placements ~= nil) end)
    end)
  end)
  for name, x in util.sorted_pairs(objects or {}) do
    if extras.averages.test(x) then x.updates = contents_of[name].updates end
  end
  extras.restore("run.start", self.path, objects, contents_of)
end

--- Sets the options of the optimizer's groups that the script had changed since it began the run.
---@param optimizer table
function Checkpoint:load_options(optimizer)
  local text = self.reader.metadata.options
  for g, changed in ipairs(text and trees.unflatten({}, text, self.path) or {}) do
    local group = optimizer.param_groups[g]
    for name, value in pairs(group and changed or {}) do
      if group[name] ~= nil then group[name] = value end
    end
    if group and changed.initial_lr then schedules.continue(group, changed.initial_lr) end
  end
end

function Checkpoint:close() self.reader:close() end

return M
