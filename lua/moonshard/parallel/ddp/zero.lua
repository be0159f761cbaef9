-- SPDX-License-Identifier: MIT
--- Hooks of nn.DDP that step a ZeroRedundancyOptimizer before backward returns. Each rank steps its own parameters, one
--- bucket at a time, and broadcasts them while later work continues (docs/semantics.md#ddp-hooks).
---
--- PyTorch's hooks skip the steps of the first iterations, until buckets are final. Here the rank that steps a
--- parameter does not depend on the bucket, so every iteration makes a step, with the same results as step() after
--- backward.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local dist = require "moonshard.dist"

local raise = errors.raise
local rawget, type, ipairs = rawget, type, ipairs

local M = {}

local function make(who, interleaved)
  return function(hook, ddp, zero)
    if not opts.fn.test(hook) then opts.wrong(hook, "a communication hook", "%s: argument 1", who) end
    local st = type(ddp) == "table" and rawget(ddp, "_ddp")
    if not st then opts.wrong(ddp, "a module wrapped in nn.DDP", "%s: argument 2", who) end
    opts.need(type(zero) == "table" and zero._step_overlapped, zero, "a ZeroRedundancyOptimizer", "%s: argument 3", who)
    if not zero._overlaps then
      raise "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=true` to use this hook properly"
    end
    local ranks, others = dist.group_ranks(st.group), zero._ranks
    if table.concat(ranks, " ") ~= table.concat(others, " ") then
      raise("%s: the optimizer is sharded over ranks %s, expected those over which DDP reduces gradients, %s", who,
        table.concat(others, ", "), table.concat(ranks, ", "))
    end
    -- Called by DDP: `after` when the gradients of one bucket are reduced, `finish` when those of all buckets are, `drop`
    -- after a failed backward.
    local overlapped = {
      after = interleaved and function(bucket) zero:_step_overlapped(bucket.parameters) end or nil,
      finish = function(buckets)
        for _, b in ipairs(buckets) do zero:_step_overlapped(b.parameters) end
        zero:_end_overlapped()
      end,
      drop = function() zero:_drop_overlapped() end,
    }
    return function(state, bucket)
      if st.join then raise("%s: not supported inside join, because finished ranks take no optimizer steps", who) end
      st.overlapped = overlapped
      return hook(state, bucket)
    end
  end
end

--- Makes a hook that runs another hook and, when all gradients are reduced, the steps of zero, an
--- optim.ZeroRedundancyOptimizer with overlap_with_ddp: it broadcasts the parameters of one bucket while it steps those
--- of the next. The script must not call step() itself.
---@param hook function  reduces the gradients
---@param ddp DDP  the module in nn.DDP
---@param zero ZeroRedundancyOptimizer  made with overlap_with_ddp
---@type fun(hook: fun(state: any, bucket: Bucket): any, ddp: DDP, zero: ZeroRedundancyOptimizer): fun(state: any, bucket: Bucket): any
M.hook_with_zero_step = make("hook_with_zero_step", false)

--- As hook_with_zero_step, but steps a bucket's parameters as soon as its own gradients are reduced.
---@param hook function  reduces the gradients
---@param ddp DDP  the module in nn.DDP
---@param zero ZeroRedundancyOptimizer  made with overlap_with_ddp
---@type fun(hook: fun(state: any, bucket: Bucket): any, ddp: DDP, zero: ZeroRedundancyOptimizer): fun(state: any, bucket: Bucket): any
M.hook_with_zero_step_interleaved = make("hook_with_zero_step_interleaved", true)

return M
