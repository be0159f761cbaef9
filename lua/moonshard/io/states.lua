-- SPDX-License-Identifier: MIT
--- The option `state` of checkpoints: what is saved beside a model and its optimizer, by name. An entry is an object
--- with state_dict and load_state_dict, such as a schedule, a loader or a scaler, or a table of numbers, strings and
--- booleans, such as { best = 0.9 }, whose contents loading replaces.
local cjson = require "cjson"
local read_json = require("moonshard.core.json").decode
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local sharded = require "moonshard.parallel.fsdp.sharded"
local sorted_pairs = require "moonshard.tensor.util".sorted_pairs
local trees = require "moonshard.io.tree"

local M = {}

--- Averages made by optim.EMA, whose state has tensors of the parameters' shapes.
M.averages = opts.kind("averages made by optim.EMA",
  function(v) return type(v) == "table" and rawget(v, "_averages") ~= nil end)

-- Whether x has a method. Objects of the library raise for a name that they lack.
local function has(x, name)
  local ok, method = pcall(function() return x[name] end)
  return ok and opts.fn.test(method)
end

local function is_object(x) return type(x) == "table" and has(x, "state_dict") and has(x, "load_state_dict") end

local an_entry = opts.kind("an object with state_dict and load_state_dict, or a table of numbers, strings and booleans",
  function(v) return opts.is_plain(v) or is_object(v) end)

local an_option = opts.kind("a table of objects by name, such as { loader = loader }",
  function(v) return opts.is_plain(v) and v[1] == nil end)

-- Raises for an optimizer whose state is distributed: it would be saved without the other ranks' parts.
local function check_optimizer(who, name, object)
  local ok, groups = pcall(function() return object.param_groups end)
  for _, group in ipairs(ok and type(groups) == "table" and groups or {}) do
    for _, p in ipairs(group.params) do
      if sharded.is_sharded(p) then
        errors.raise("%s: option 'state': '%s' is an optimizer of sharded parameters, of which only this rank's part "
          .. "would be saved; put the parameters into the model and into a group of its optimizer", who, name)
      end
    end
  end
end

--- Raises unless every entry can be saved.
---@param who string  the function's name in messages
---@param state? table<string, any>  the option
function M.check(who, state)
  if state == nil then return end
  opts.expect(state, an_option, "%s: option 'state'", who)
  for name, value in sorted_pairs(state) do
    if type(name) ~= "string" or not name:find "^[%w_][%w_-]*$" then
      errors.raise("%s: option 'state': the name is %s, expected letters, digits, _ and -, not - at the beginning", who,
        errors.show(name))
    end
    opts.expect(value, an_entry, "%s: option 'state': '%s'", who, name)
    if is_object(value) then
      check_optimizer(who, name, value)
    else
      local ok, err = pcall(trees.flatten, { [name] = value })
      if not ok then errors.raise("%s: option 'state': %s", who, (tostring(err):gsub("^.-save: ", ""))) end
    end
  end
end

-- This rank's text; if the ranks' texts differ, as counters of each rank's own items do, the list of all of them.
local function of_all_ranks(text)
  local all = dist.world_size() > 1 and dist.all_gather_object(text) or { text }
  for _, other in ipairs(all) do
    if other ~= all[1] then return cjson.encode(all) end
  end
  return text
end

-- This rank's text in what of_all_ranks returned; rank 0's if the number of ranks is another one now.
local function of_this_rank(text)
  if text:sub(1, 1) ~= "[" then return text end
  local all = read_json(text)
  return #all == dist.world_size() and all[dist.rank() + 1] or all[1]
end

--- The contents of every entry. Collective. Of averages, only the number of updates: their tensors are saved as the
--- parameters are.
---@param who string  the function's name in messages
---@param state? table<string, any>  the option
---@return table<string, Tensor> tensors  by the name of the entry and the path in it, such as "buffer.1"; those of rank
---   0 are to be saved
---@return string text  the rest of the contents, of every rank
function M.contents(who, state)
  local values = {}
  for name, x in sorted_pairs(state or {}) do
    local value = x
    if M.averages.test(x) then value = { updates = x.updates } elseif is_object(x) then value = x:state_dict() end
    values[name] = opts.expect(value, opts.table, "%s: the result of state_dict of '%s'", who, name)
  end
  local tensors, text = trees.flatten(values)
  for name, t in sorted_pairs(tensors) do
    if sharded.is_sharded(t) then
      errors.raise("%s: option 'state': '%s' is sharded; only the tensors of the model can be sharded", who, name)
    end
    opts.need(t.id >= 0, t, "a plain tensor", "%s: option 'state': '%s'", who, name)
  end
  return tensors, of_all_ranks(text)
end

--- The contents of every entry as text, for checkpoints whose only tensors are those of the model and the
--- optimizer. Collective.
---@param who string  the function's name in messages
---@param state? table<string, any>  the option
---@return string? text  nil without the option
function M.text(who, state)
  if not state then return nil end
  M.check(who, state)
  for name, x in sorted_pairs(state) do
    if M.averages.test(x) then errors.raise("%s: option 'state': '%s' has averages; give them as option 'ema'", who, name) end
  end
  local tensors, text = M.contents(who, state)
  local name = errors.names(tensors)[1]
  if name then
    errors.raise("%s: option 'state': '%s' is a tensor; register it as a buffer of the model, or save it with ms.save", who,
      name)
  end
  return text
end

--- The contents of every entry of a checkpoint, by name; nil and the reason if it lacks an entry of the option.
---@param path string  the checkpoint
---@param state? table<string, any>  the option
---@param text? string  what contents returned
---@param tensors? table<string, Tensor>  by name; those that the text names are looked up
---@return table<string, table>? values
---@return string? reason
function M.read(path, state, text, tensors)
  local values = text and trees.unflatten(tensors or {}, of_this_rank(text), path) or {}
  for name in sorted_pairs(state or {}) do
    if values[name] == nil then
      local names = errors.names(values)
      return nil, ("the checkpoint '%s' has no state of '%s' (it has: %s); leave it out of option 'state' while loading")
        :format(path, name, #names > 0 and table.concat(names, ", ") or "none")
    end
  end
  return values
end

--- Gives the entries their contents; warns of contents without an entry. Errors name the entry.
---@param who string  the function's name in messages
---@param path string  the checkpoint
---@param state? table<string, any>  the option
---@param values table<string, table>  what read returned
function M.restore(who, path, state, values)
  state = state or {}
  local unused = {}
  for _, name in ipairs(errors.names(values)) do
    if state[name] == nil then unused[#unused + 1] = name end
  end
  if #unused > 0 and log.rank() == 0 then
    log.warn(("%s: the checkpoint '%s' has states that option 'state' lacks: %s"):format(who, path,
      table.concat(unused, ", ")))
  end
  for name, x in sorted_pairs(state) do
    if is_object(x) and not M.averages.test(x) then
      local ok, err = pcall(x.load_state_dict, x, values[name])
      if not ok then
        errors.raise("%s: state of '%s' in '%s': %s", who, name, path, (tostring(err):gsub("^[^\n]-:%d+: ", "")))
      end
    elseif opts.is_plain(x) then
      for key in pairs(x) do x[key] = nil end           -- the order does not matter
      for key, value in pairs(values[name]) do x[key] = value end
    end
  end
end

return M
