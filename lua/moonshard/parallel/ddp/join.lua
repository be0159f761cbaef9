-- SPDX-License-Identifier: MIT
--- DDP's join: training when ranks have different numbers of inputs (docs/semantics.md#ddp-join).
---
--- Inside a join, every forward that a backward will follow first announces that its rank is still active. Ranks that
--- have finished receive this and take part in the collectives of the active ranks: buffers, buckets of zeros in the
--- same order, and the map of used parameters. When no rank is active any more, all ranks get the model of the last
--- active rank.
local context = require "moonshard.core.context"
local autograd = require "moonshard.autograd"
local pieces = require "moonshard.dist.pieces"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"

local no_grad = autograd.no_grad
local pcall, error, ipairs = pcall, error, ipairs

local M = {}

-- Each rank sends five numbers, 1 or 0: whether it is active, reduces gradients, rebuilds buckets, broadcasts buffers,
-- and sends a map of used parameters.
local FIELDS = 5
local SKEWED = 1000                     -- iterations without an input after which a rank warns

local function bit(x) return x and 1 or 0 end

--- Exchanges what the next iteration will send: active ranks announce it, all ranks receive it. Collective over the
--- ranks of the wrapper.
local function agree(st, active, synced)
  local all
  no_grad(function()
    local mine = create.tensor({
      bit(active), bit(active and synced), bit(active and synced and st.rebuild_due()),
        bit(active and synced and st.broadcast_buffers),
      bit(active and synced and (st.find_unused or (st.static and not st.expected))),
    }, { dtype = "int32", device = "cpu" })
    local out = create.empty(FIELDS * st.world, { dtype = "int32", device = "cpu" })
    dist.all_gather(out, mine, { group = st.group })
    all = out:tolist()
    mine:release()
    out:release()
  end)
  local ranks, info = dist.group_ranks(st.group), { active = 0 }
  for r = 0, st.world - 1 do
    if all[FIELDS * r + 1] == 1 then
      info.active = info.active + 1
      -- The model of the highest rank is kept if several ranks finish together.
      info.last = ranks[r + 1]
      if not info.source then
        info.source = ranks[r + 1]                      -- the lowest active rank is the source of broadcasts
        info.synced, info.rebuilds, info.buffers, info.map = all[FIELDS * r + 2] == 1, all[FIELDS * r + 3] == 1,
          all[FIELDS * r + 4] == 1,
          all[FIELDS * r + 5] == 1
      end
    end
  end
  local join = st.join
  if info.active > 0 then join.last = info.last end
  join.divisor = join.divide_by_initial_world_size and st.world or math.max(info.active, 1)
  if join.throw_on_early_termination and info.active > 0 and info.active < st.world then
    join.symmetric = true  -- every rank raises this error by itself
    errors.raise "Detected at least one rank that exhausted inputs. Throwing across all ranks."
  end
  return info
end

--- Announces a forward of an active rank. Returns the rank that broadcasts buffers and determines the order of buckets.
---@return integer? source
function M.notify(st, synced) return agree(st, true, synced).source end

-- Takes part in one iteration of the active ranks, without an input of its own.
local function shadow(st, info)
  if info.rebuilds then st.rebuild(info.source) end
  st.make_buckets()
  if info.buffers then st.sync_buffers(info.source) end
  if not info.synced then return end
  local used = info.map and st.skip_unused and st.used_by_others()
  for _, b in ipairs(st.buckets) do
    if not used or st.some_used(b, used) then
      b.whole:zero_()
      b:launch(st.group, st.join.divisor, st.hook, st.hook_state)
    end
  end
  if info.map and not used then st.used_by_others() end
  for _, b in ipairs(st.buckets) do
    if b.launched then b:finish(st.hook) end
  end
  for _, b in ipairs(st.buckets) do
    b:ended(true)
    b:reset()
  end
  st.synced_backwards = st.synced_backwards + 1
end

local function shadow_all(st)
  local count = 0
  while true do
    local info = agree(st, false)
    if info.active == 0 then return end
    no_grad(shadow, st, info)
    count = count + 1
    if count == SKEWED then
      log.warn(("Detected uneven input skew of greater than %d. This means that rank %d has at least %d fewer inputs than other currently-active "
        .. "ranks. This level of skew could lead to performance degradation during training."):format(SKEWED,
        dist.rank(st.group), SKEWED))
    end
  end
end

-- Makes buckets, parameters, buffers and the static graph equal on all ranks at the end of a join.
local function settle(st, model)
  local ranks = dist.group_ranks(st.group)
  local last = st.join.last or ranks[#ranks]
  no_grad(function()
    if st.rebuild_due() then st.rebuild(last) end
    pieces.broadcast(model, st.group, nil, last)
  end)
  if st.static and st.synced_backwards > 0 then
    local known
    if dist.rank() == last then
      known = { expected = {}, used = {} }
      for k, p in ipairs(st.params) do
        known.expected[k], known.used[k] = st.expected[k] or 0, bit(not st.static_used or st.static_used[p])
      end
    end
    known = dist.broadcast_object(known, { src = last, group = st.group })
    if not st.expected then
      st.expected, st.static_used = {}, {}
      for k, p in ipairs(st.params) do
        if known.expected[k] > 0 then st.expected[k] = known.expected[k] end
        st.static_used[p] = known.used[k] == 1
      end
    end
  end
end

--- Runs fn as the body of a join. st: the wrapper's state. model: the tensors that must be equal on all ranks
--- afterwards.
function M.run(st, options, model, fn)
  if st.join then errors.raise "join: this module is already inside a join" end
  st.join = options
  local function leave(ok, ...)
    local message = ...
    if ok then
      ok, message = pcall(function()
        shadow_all(st)
        settle(st, model)
      end)
    end
    local symmetric = st.join.symmetric
    st.join = nil
    if ok then return ... end
    -- Active ranks must learn of the error: they wait for this rank's next iteration.
    if st.world > 1 and not symmetric then engine.lib.ms_dist_failed(tostring(message)) end
    st.abandon()
    error(message, 0)
  end
  return leave(pcall(context.block, "join", fn))
end

return M
