-- SPDX-License-Identifier: MIT
--- dist: gathers Lua values on one rank or scatters them from it, by all_gather_object and broadcast_object; makes
--- groups of neighbouring ranks.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

-- Adds the functions to the module `dist`.
return function(dist)
  local function options(who, given, key)
    local o = opts(who, given, { [key] = opts.required, group = opts.any })
    opts.expect(o[key], opts.whole_from(0), "%s: option '%s'", who, key)
    local ranks = dist.group_ranks(o.group)
    for k, rank in ipairs(ranks) do
      if rank == o[key] then return o, ranks, k end
    end
    return errors.raise("%s: option '%s' is %d, expected a rank of the group", who, key, o[key])
  end

  --- Gathers a Lua value from every rank on rank dst. Errors: functions and userdata, which cannot be sent.
  ---@param value any  nil, booleans, numbers, strings, tensors on the CPU, tables of them
  ---@param given { dst: integer, group: Group }  dst: a rank of the world
  ---@return any[]?  on rank dst: the value of the group's rank r at index r + 1; nil on the other ranks
  function dist.gather_object(value, given)
    local o = options("gather_object", given, "dst")
    local list = dist.all_gather_object(value, { group = o.group })
    return dist.rank() == o.dst and list or nil
  end

  --- Rank src passes a list with one Lua value per rank; each rank gets its value. Errors: functions and userdata,
  --- which cannot be sent; a list of another length.
  ---@param list any[]?  on rank src: the value of the group's rank r at index r + 1; nil on the other ranks
  ---@param given { src: integer, group: Group }  src: a rank of the world
  ---@return any
  function dist.scatter_object_list(list, given)
    if given == nil and opts.is(list) then list, given = nil, list end
    local o, ranks = options("scatter_object_list", given, "src")
    local sent
    if dist.rank() == o.src then
      -- A wrong list must fail on every rank, so the error's text is sent in place of the values.
      if type(list) == "table" and #list == #ranks then
        sent = { values = list }
      else
        sent = { why = ("scatter_object_list: argument 1 is %s on rank %d, the source, expected a list of %d values")
          :format(type(list) == "table" and "a list of " .. #list or errors.kind(list), o.src, #ranks) }
      end
    end
    sent = dist.broadcast_object(sent, { src = o.src, group = o.group })
    if sent.why then errors.raise("%s", sent.why) end
    return sent.values[dist.rank(o.group) + 1]
  end

  --- Makes groups of neighbouring ranks: the first `size` ranks, the next ones, and so on. Collective over the world.
  ---@param size integer  ranks in a group; a divisor of the number of ranks
  ---@return Group own  this rank's group
  ---@return Group[] all  all groups, in order
  function dist.new_subgroups(size)
    opts.expect(size, opts.whole_from(1), "new_subgroups: argument 1")
    local world, own, all = dist.world_size(), nil, {}
    if world % size ~= 0 then
      errors.raise("new_subgroups: argument 1 is %d, expected a divisor of the number of ranks, %d", size, world)
    end
    for first = 0, world - 1, size do
      local ranks = {}
      for k = 1, size do ranks[k] = first + k - 1 end
      local group = dist.new_group(ranks)
      all[#all + 1] = group
      if dist.rank(group) then own = group end
    end
    return own, all
  end

  opts.fix(dist, { "new_subgroups" })
end
