-- SPDX-License-Identifier: MIT
--- dist: PyTorch's other names of functions that dist has, and functions that are one or two calls of these.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

-- Adds the functions to the module `dist`. collective(name, op, has_op): the function that runs the engine's collective
-- `op` with two tensors; messages use the name.
return function(dist, collective)
  local C = engine.ffi.C
  local all_gather = collective("all_gather_into_tensor", C.MS_DIST_ALL_GATHER_INTO_TENSOR)
  local reduce_scatter = collective("reduce_scatter_tensor", C.MS_DIST_REDUCE_SCATTER_TENSOR, true)
  local all_to_all = collective("all_to_all_single", C.MS_DIST_ALL_TO_ALL_SINGLE)

  --- Whether collectives can be used: always, since they are part of the library.
  ---@return boolean
  function dist.is_available() return true end

  --- dist.backend by PyTorch's name.
  ---@return "self"|"mpi"|"nccl"
  function dist.get_backend() return dist.backend() end

  --- Leaves the job (dist.finalize) or frees a group (dist.free_group).
  ---@param group? Group  a result of dist.new_group; nil: the whole job
  function dist.destroy_process_group(group)
    if group == nil then return dist.finalize() end
    return dist.free_group(group)
  end

  --- dist.all_gather by PyTorch's name.
  ---@param out Tensor  as many elements as all inputs together, of input's dtype
  ---@param input Tensor  of the same size on every rank
  ---@param given? { group: Group, async: boolean }
  ---@return Work?  only with async
  function dist.all_gather_into_tensor(out, input, given) return all_gather(out, input, given) end

  --- dist.reduce_scatter by PyTorch's name.
  ---@param out Tensor  as many elements as a block, of input's dtype
  ---@param input Tensor  of the same shape on every rank
  ---@param given? { op: "sum"|"avg"|"max"|"min"|"prod", group: Group, async: boolean }
  ---@return Work?  only with async
  function dist.reduce_scatter_tensor(out, input, given) return reduce_scatter(out, input, given) end

  --- dist.all_to_all by PyTorch's name.
  ---@param out Tensor  of input's shape and dtype
  ---@param input Tensor  a block along dimension 1 for each rank
  ---@param given? { group: Group, async: boolean }
  ---@return Work?  only with async
  function dist.all_to_all_single(out, input, given) return all_to_all(out, input, given) end

  --- dist.send with async: returns at once.
  ---@param t Tensor  any shape; read in place, so it must not change before the work is complete
  ---@param dst integer  a rank of the world
  ---@return Work
  function dist.isend(t, dst) return dist.send(t, dst, { async = true }) end

  --- dist.recv with async: returns at once.
  ---@param t Tensor  written; its values are valid when the work is complete
  ---@param src integer  a rank of the world
  ---@return Work
  function dist.irecv(t, src) return dist.recv(t, src, { async = true }) end

  --- dist.barrier by PyTorch's name: as every collective, it names a rank that does not arrive within the timeout of
  --- dist.init.
  ---@param group? Group  default: the world
  function dist.monitored_barrier(group) return dist.barrier(group) end

  --- Copies the values of rank src's list to the list of every rank.
  ---@param list any[]  read on rank src; filled on the other ranks
  ---@param given { src: integer, group: Group }  src: a rank of the world
  function dist.broadcast_object_list(list, given)
    opts.need(opts.is_plain(list), list, "a list of values", "broadcast_object_list: argument 1")
    local values = dist.broadcast_object(list, given)
    if values == list then return end
    for key in pairs(list) do list[key] = nil end
    for key, value in pairs(values) do list[key] = value end
  end

  --- Makes a group of each list of ranks. Collective over the world; every rank must pass the same lists.
  ---@param lists integer[][]  ranks, by their numbers in the parent, from 0; no rank is in two lists
  ---@param given? { parent: Group }  parent: the group to split (default: the world)
  ---@return Group?  this rank's group; nil if it is in no list
  function dist.split_group(lists, given)
    local o = opts("split_group", given, { parent = opts.any })
    opts.need(opts.is_plain(lists), lists, "a list of lists of ranks", "split_group: argument 1")
    local members, seen, own = dist.group_ranks(o.parent), {}, nil
    for k, list in ipairs(lists) do
      opts.need(opts.is_plain(list), list, "a list of ranks", "split_group: list %d", k)
      for _, rank in ipairs(list) do
        opts.need(members[(tonumber(rank) or -1) + 1] ~= nil, rank,
          ("a rank of the parent, from 0 to %d"):format(#members - 1), "split_group: a rank of list %d", k)
        if seen[rank] then errors.raise("split_group: rank %d is in lists %d and %d", rank, seen[rank], k) end
        seen[rank] = k
      end
    end
    for _, list in ipairs(lists) do
      local of_world = {}
      for j, rank in ipairs(list) do of_world[j] = members[rank + 1] end
      local group = dist.new_group(of_world)
      if dist.rank(group) then own = group end
    end
    return own
  end

  opts.fix(dist, { "is_available", "get_backend", "destroy_process_group", "monitored_barrier" })
end
