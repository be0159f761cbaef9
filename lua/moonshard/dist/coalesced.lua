-- SPDX-License-Identifier: MIT
--- dist: several collectives at once. Reductions of many small tensors become one, and transfers run beside each other.
local autograd = require "moonshard.autograd"
local calls = require "moonshard.dist.calls"
local create = require "moonshard.tensor.create"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local reductions = { "sum", "avg", "max", "min", "prod" }

-- Reductions of packed tensors that may still run; they have the methods of one Work.
local Packed = { __name = "Work" }
Packed.__index = Packed

-- Copies the packed results to the tensors and frees the pack.
local function unpack_results(pack)
  autograd.no_grad(function()
    local at = 1
    for _, t in ipairs(pack.list) do
      local n = t:numel()
      t:copy_(pack.flat:narrow(1, at, n):view(t.shape))
      at = at + n
    end
  end)
  pack.flat:release()
end

function Packed:wait()
  for k = 1, #self do
    local pack = self[k]
    if pack.work then pack.work:wait() end
    if not pack.copied then
      pack.copied = true
      unpack_results(pack)
    end
  end
end

-- Whether all reductions have ended. If so, copies their results, so a script may poll instead of calling wait.
function Packed:done()
  for k = 1, #self do
    local pack = self[k]
    if not pack.copied and not pack.work:done() then return false end
  end
  self:wait()
  return true
end

function Packed:__tostring() return ("Work(all_reduce, %s)"):format(self:done() and "done" or "under way") end

-- Packs the tensors of a list, in order: one pack for each dtype and device. The field `flat` of a pack has the values
-- of its tensors in one tensor.
local function packs_of(list)
  local packs, by_kind = setmetatable({}, Packed), {}
  for k, t in ipairs(list) do
    opts.expect(t, tensor.a_tensor, "all_reduce_coalesced: element %d of the list", k)
    for _, part in ipairs(tensor.inner(t) or { t }) do
      local kind = part.dtype .. part.device
      local pack = by_kind[kind]
      if not pack then
        pack = { list = {} }
        by_kind[kind], packs[#packs + 1] = pack, pack
      end
      pack.list[#pack.list + 1] = part
    end
  end
  autograd.no_grad(function()
    for _, pack in ipairs(packs) do
      local total, at, first = 0, 1, pack.list[1]
      for _, t in ipairs(pack.list) do total = total + t:numel() end
      pack.flat = create.empty(total, { dtype = first.dtype, device = first.device }):keep()
      for _, t in ipairs(pack.list) do
        pack.flat:narrow(1, at, t:numel()):view(t.shape):copy_(t)
        at = at + t:numel()
      end
    end
  end)
  return packs
end

-- Adds the functions to the module `dist`.
return function(dist)
  --- Reduces every tensor of the list over ranks, in place: one all_reduce for all tensors of a dtype and device. The
  --- results have the bits of one all_reduce for each, except by NCCL.
  ---@param list Tensor[]  of the same shapes and dtypes on every rank
  ---@param given? { op: "sum"|"avg"|"max"|"min"|"prod", group: Group, async: boolean }
  ---   async: the tensors get their results in the work's wait, or when its done returns true
  ---@return Work?  only with async
  function dist.all_reduce_coalesced(list, given)
    local o = opts("all_reduce_coalesced", given, { op = opts.one_of(reductions, "sum"), group = opts.any,
      async = false })
    opts.need(opts.is_plain(list), list, "a list of tensors", "all_reduce_coalesced: argument 1")
    local packs = packs_of(list)
    for _, pack in ipairs(packs) do
      pack.work = dist.all_reduce(pack.flat, { op = o.op, group = o.group, async = true })
    end
    if o.async then return packs end
    packs:wait()
  end

  --- A send or receive for dist.batch_isend_irecv.
  ---@param op "isend"|"irecv"|function  its name, or dist.isend or dist.irecv
  ---@param t Tensor  read or written
  ---@param peer integer  a rank of the world
  ---@return table
  function dist.P2POp(op, t, peer)
    if op == dist.isend then op = "isend" elseif op == dist.irecv then op = "irecv" end
    opts.expect(op, opts.one_of { "isend", "irecv" }, "P2POp: argument 1")
    opts.expect(t, tensor.a_tensor, "P2POp: argument 2")
    opts.expect(peer, opts.whole_from(0), "P2POp: argument 3")
    return { op = op, tensor = t, peer = peer }
  end

  --- Starts sends and receives at once, so that ranks that exchange tensors do not deadlock, whatever the order.
  ---@param list table[]  results of dist.P2POp
  ---@return Work[]  one for each, in order
  function dist.batch_isend_irecv(list)
    opts.need(opts.is_plain(list), list, "a list of results of dist.P2POp", "batch_isend_irecv: argument 1")
    for k, p in ipairs(list) do
      opts.need(type(p) == "table" and (p.op == "isend" or p.op == "irecv"), p, "a result of dist.P2POp",
        "batch_isend_irecv: element %d", k)
    end
    local works = {}
    for k, p in ipairs(list) do works[k] = dist[p.op](p.tensor, p.peer) end
    return works
  end

  --- The collectives of dist.coalescing_manager.
  ---@class Coalescing
  local Coalescing = { __name = "Coalescing" }
  Coalescing.__index = Coalescing

  local function start(self, name, a, b, given)
    given = given or {}
    given.group, given.async = given.group or self._group, true
    local works = self._works
    works[#works + 1] = b == nil and dist[name](a, given) or dist[name](a, b, given)
  end

  --- As dist.all_reduce: reductions with the same op, dtype and device become one.
  ---@param t Tensor  of the same shape and dtype on every rank
  ---@param given? { op: "sum"|"avg"|"max"|"min"|"prod" }
  function Coalescing:all_reduce(t, given)
    local op = opts("all_reduce", given, { op = opts.one_of(reductions, "sum") }).op
    opts.expect(t, tensor.a_tensor, "all_reduce: the tensor")
    self._sums[op] = self._sums[op] or {}
    table.insert(self._sums[op], t)
  end

  --- As dist.all_gather.
  ---@param out Tensor  as many elements as all inputs together, of input's dtype
  ---@param input Tensor  of the same size on every rank
  function Coalescing:all_gather(out, input, more)
    opts("all_gather", more, {})
    start(self, "all_gather", out, input)
  end

  --- As dist.reduce_scatter.
  ---@param out Tensor  as many elements as a block, of input's dtype
  ---@param input Tensor  of the same shape on every rank
  ---@param given? { op: "sum"|"avg"|"max"|"min"|"prod" }
  function Coalescing:reduce_scatter(out, input, given)
    start(self, "reduce_scatter", out, input, opts("reduce_scatter", given, { op = opts.one_of(reductions, "sum") }))
  end

  --- As dist.broadcast.
  ---@param t Tensor  of the same shape and dtype on every rank
  ---@param given { src: integer }  src: a rank of the world
  function Coalescing:broadcast(t, given)
    start(self, "broadcast", t, nil, opts("broadcast", given, { src = opts.required }))
  end

  local function finish(self, ok, ...)
    local failed, why = not ok, (...)
    local function attempt(fn, ...)
      local fine, message = pcall(fn, ...)
      if not fine and not failed then failed, why = true, message end
    end
    if ok then
      for _, op in ipairs(reductions) do
        if self._sums[op] then
          attempt(dist.all_reduce_coalesced, self._sums[op], { op = op, group = self._group })
        end
      end
    end
    -- Waits after an error, too, because running works read and write tensors of the script.
    for _, work in ipairs(self._works) do attempt(work.wait, work) end
    if failed then error(why, 0) end
    return ...
  end

  --- Runs fn(c) and completes the collectives that fn starts by c's methods, all_reduce, all_gather, reduce_scatter and
  --- broadcast: they run beside each other, and all_reduces of the same op, dtype and device become one. The results
  --- are in the tensors when this function returns.
  ---@param fn fun(c: Coalescing): any  every rank starts the same collectives, in the same order
  ---@param given? { group: Group }
  ---@return any  the results of fn
  function dist.coalescing_manager(fn, given)
    opts.expect(fn, opts.fn, "coalescing_manager: argument 1")
    local o = opts("coalescing_manager", given, { group = opts.any })
    local c = setmetatable({ _group = o.group, _works = {}, _sums = {} }, Coalescing)
    return finish(c, pcall(fn, c))
  end

  for _, name in ipairs { "all_reduce_coalesced", "batch_isend_irecv", "coalescing_manager" } do
    dist[name] = calls.several(dist[name])
  end
end
