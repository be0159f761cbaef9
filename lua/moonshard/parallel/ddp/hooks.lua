-- SPDX-License-Identifier: MIT
--- Communication hooks for nn.DDP: fn(state, bucket). state is what the script registered with the hook: for the
--- built-in hooks that only reduce, the group to reduce over (nil: all ranks).
---
--- A hook is called with one bucket at a time. The bucket's fields: `flat` (the gradients, 1-d), `parameters`,
--- `gradients` (views of flat), `index` (from 1) and `last`. The hook returns nothing if it changed flat in place, a
--- tensor of flat's size, or an object whose wait() returns one of these, such as an asynchronous collective; backward
--- then continues without waiting. DDP does not divide a hook's result by the number of ranks.
local dist = require "moonshard.dist"
local opts = require "moonshard.core.opts"
local flat_of = require "moonshard.parallel.ddp.flat"

local M = {}

local function result_of(value)
  if type(value) == "table" and value.wait then return (value:wait()) end
  return value
end
--- Waits for a hook's return value and returns the reduced tensor, or nil if the hook changed the bucket in place.
---@param value any  what a hook returned
---@return Tensor?
M.result_of = result_of

-- After an error: waits until the collectives behind a hook's return value no longer use memory, and discards their
-- results.
local function drop(value)
  if type(value) ~= "table" then return end
  local own = rawget(value, "drop")
  if own then own(value) else result_of(value) end
end
M._drop = drop

--- The mean over ranks, which DDP also computes without a hook.
---@param group Group?  nil: all ranks
---@param bucket Bucket  flat (1-d gradients), parameters, gradients (views of flat), index (from 1), last
---@return Work
function M.allreduce_hook(group, bucket)
  return dist.all_reduce(flat_of("allreduce_hook", bucket), { group = group, async = true, op = "avg" })
end

local function compress(who, dtype)
  return function(group, bucket)
    local half = flat_of(who, bucket):to(dtype):div_(dist.world_size(group)):keep()
    local work = dist.all_reduce(half, { group = group, async = true })
    return {
      wait = function()
        work:wait()
        bucket.flat:copy_(half)
        half:release()
      end,
      drop = function()
        pcall(work.wait, work)
        half:release()
      end,
    }
  end
end

--- The mean over ranks, sent as float16: half the bytes of float32. Values beyond 65504 become infinite.
---@param group Group?  default: the world
---@param bucket Bucket  given by DDP; its gradients are replaced
---@type fun(group?: Group, bucket: Bucket): Work
M.fp16_compress_hook = compress("fp16_compress_hook", "float16")
--- The mean over ranks, sent as bfloat16: half the bytes of float32, with 8 bits of precision.
---@param group Group?  default: the world
---@param bucket Bucket  given by DDP; its gradients are replaced
---@type fun(group?: Group, bucket: Bucket): Work
M.bf16_compress_hook = compress("bf16_compress_hook", "bfloat16")

local function wrapper(dtype)
  return function(hook)
    return function(state, bucket)
      local whole = bucket.flat
      local half = whole:to(dtype):keep()
      bucket.flat = half
      local value = hook(state, bucket)
      return {
        wait = function()
          local out = result_of(value) or bucket.flat
          bucket.flat = whole
          whole:copy_(out)
          half:release()
        end,
        drop = function()
          pcall(drop, value)
          bucket.flat = whole
          half:release()
        end,
      }
    end
  end
end

--- Wraps a hook: runs it on the bucket cast to float16 and casts the result back.
---@param hook function  the hook to wrap
---@type fun(hook: fun(state: any, bucket: Bucket): any): fun(state: any, bucket: Bucket): any
M.fp16_compress_wrapper = wrapper "float16"
--- Wraps a hook: runs it on the bucket cast to bfloat16 and casts the result back.
---@param hook function  the hook to wrap
---@type fun(hook: fun(state: any, bucket: Bucket): any): fun(state: any, bucket: Bucket): any
M.bf16_compress_wrapper = wrapper "bfloat16"

--- Sends nothing: shows how much time a hook can save at most. The models of the ranks diverge.
function M.noop_hook() end

--- Runs hook, and steps the optimizers of a bucket's parameters after the last reduction of a backward, before backward
--- returns. make(params) returns an optimizer for a list of one parameter; each parameter keeps its optimizer when
--- buckets are rebuilt. The script must not call step() itself. params: the parameters to step (default: all).
---@param hook fun(state: any, bucket: table): any  reduces the gradients
---@param make fun(params: Parameter[]): Optimizer  called once for each parameter
---@param params? Parameter[]  the parameters to step (default: all)
---@return fun(state: any, bucket: table): any
function M.hook_then_optimizer(hook, make, params)
  opts.expect(hook, opts.fn, "hook_then_optimizer: argument 1")
  opts.need(opts.fn.test(make), make, "a function that makes an optimizer for a list of parameters",
    "hook_then_optimizer: argument 2")
  local steps = {}
  for _, p in ipairs(params or {}) do steps[p] = true end
  local optimizers = setmetatable({}, { __mode = "k" })
  return function(state, bucket)
    local value = hook(state, bucket)
    -- Steps after the last reduction, so that no parameter has been stepped if a reduction fails.
    bucket:on_end(function(ok)
      for k, p in ipairs(ok and bucket.parameters or {}) do
        if not params or steps[p] then
          optimizers[p] = optimizers[p] or make { p }
          bucket:give(k)
          optimizers[p]:step()
        end
      end
    end)
    return value
  end
end

for _, file in ipairs { "power_sgd", "local_sgd", "quantization", "zero" } do
  for name, value in pairs(require("moonshard.parallel.ddp." .. file)) do M[name] = value end
end

return M
