-- SPDX-License-Identifier: MIT
--- DDP's hooks that step a ZeroRedundancyOptimizer before backward returns: each rank steps its own parameters of one
--- bucket after the other and sends them out under what comes next (docs/semantics.md#ddp-hooks).
---
--- PyTorch's leave out the steps of the first iterations, until buckets are what they stay. Here a parameter's rank
--- does not depend on its bucket, so all iterations step, and the numbers are those of step() after backward.
local errors = require "moonshard.core.errors"
local dist = require "moonshard.dist"

local raise, show = errors.raise, errors.kind
local rawget, type, ipairs = rawget, type, ipairs

local M = {}

local function make(who, interleaved)
  return function(hook, ddp, zero)
    if type(hook) ~= "function" then raise("%s: argument 1 is %s, expected a communication hook", who, show(hook)) end
    local st = type(ddp) == "table" and rawget(ddp, "_ddp")
    if not st then raise("%s: argument 2 is %s, expected a module in nn.DDP", who, show(ddp)) end
    if type(zero) ~= "table" or not zero._step_overlapped then
      raise("%s: argument 3 is %s, expected a ZeroRedundancyOptimizer", who, show(zero))
    end
    if not zero._overlaps then
      raise "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=true` to use this hook properly"
    end
    local ranks, others = dist.group_ranks(st.group), zero._ranks
    if table.concat(ranks, " ") ~= table.concat(others, " ") then
      raise("%s: the optimizer is spread over ranks %s, and DDP's gradients are reduced over ranks %s", who,
        table.concat(others, ", "),
        table.concat(ranks, ", "))
    end
    -- What DDP calls when gradients are in their places: `after` a bucket's, `finish` when all are. `drop`: backward
    -- failed.
    local overlapped = {
      after = interleaved and function(bucket) zero:_step_overlapped(bucket.parameters) end or nil,
      finish = function(buckets)
        for _, b in ipairs(buckets) do zero:_step_overlapped(b.parameters) end
        zero:_end_overlapped()
      end,
      drop = function() zero:_drop_overlapped() end,
    }
    return function(state, bucket)
      if st.join then raise("%s: ranks that are through take no steps, so there is no join", who) end
      st.overlapped = overlapped
      return hook(state, bucket)
    end
  end
end

--- A hook that runs another one, and when all gradients are reduced the steps of zero, an
--- optim.ZeroRedundancyOptimizer with overlap_with_ddp: the parameters of one bucket are sent while those of the next
--- are stepped. The script calls no step() of its own.
---@type fun(hook: (fun(state: any, bucket: Bucket): any), ddp: DDP, zero: ZeroRedundancyOptimizer): fun(state: any, bucket: Bucket): any
---@type fun(hook: fun(state: any, bucket: Bucket): any, ddp: DDP, zero: ZeroRedundancyOptimizer): fun(state: any, bucket: Bucket): any
M.hook_with_zero_step = make("hook_with_zero_step", false)

--- hook_with_zero_step, with a bucket's step as soon as its own gradients are reduced.
---@type fun(hook: (fun(state: any, bucket: Bucket): any), ddp: DDP, zero: ZeroRedundancyOptimizer): fun(state: any, bucket: Bucket): any
---@type fun(hook: fun(state: any, bucket: Bucket): any, ddp: DDP, zero: ZeroRedundancyOptimizer): fun(state: any, bucket: Bucket): any
M.hook_with_zero_step_interleaved = make("hook_with_zero_step_interleaved", true)

return M
