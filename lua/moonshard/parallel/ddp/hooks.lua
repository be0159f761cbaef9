-- SPDX-License-Identifier: MIT
--- Communication hooks for nn.DDP: fn(state, bucket). state is the group to reduce over, nil for all ranks.
---
--- A hook sees one bucket after the other: `flat` (the gradients, 1-d), `parameters`, `gradients` (views of flat),
--- `index` (from 1), `last`. It returns nothing (it changed flat), a tensor of flat's size, or what has a wait() that
--- gives one of them, such as an asynchronous collective: then backward goes on meanwhile. DDP divides nothing itself.
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local flat_of = require "moonshard.parallel.ddp.flat"

local raise = errors.raise

local M = {}

-- What a hook returned, waited for: a tensor, or nil for bucket.flat itself.
local function result_of(value)
  if type(value) == "table" and value.wait then return (value:wait()) end
  return value
end
--- What a hook's result comes to: waits for what has a wait(), and gives the tensor it holds, or nil where the bucket
--- itself was changed.
---@param value any  what a hook returned
---@return Tensor?
M.result_of = result_of

--- The mean over ranks, as without a hook.
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
    return { wait = function()
      work:wait()
      bucket.flat:copy_(half)
      half:release()
    end }
  end
end

--- The mean over ranks, sent as float16: half the bytes of float32. Values beyond 65504 become infinite.
---@type fun(group?: Group, bucket: Bucket): Work
M.fp16_compress_hook = compress("fp16_compress_hook", "float16")
--- The mean over ranks, sent as bfloat16: half the bytes of float32, with 8 bits of precision.
---@type fun(group?: Group, bucket: Bucket): Work
M.bf16_compress_hook = compress("bf16_compress_hook", "bfloat16")

local function wrapper(dtype)
  return function(hook)
    return function(state, bucket)
      local whole = bucket.flat
      local half = whole:to(dtype):keep()
      bucket.flat = half
      local value = hook(state, bucket)
      return { wait = function()
        local out = result_of(value) or bucket.flat
        bucket.flat = whole
        whole:copy_(out)
        half:release()
      end }
    end
  end
end

--- Another hook on the bucket cast to float16, its result cast back.
---@type fun(hook: fun(state: any, bucket: Bucket): any): fun(state: any, bucket: Bucket): any
M.fp16_compress_wrapper = wrapper "float16"
--- Another hook on the bucket cast to bfloat16, its result cast back.
---@type fun(hook: fun(state: any, bucket: Bucket): any): fun(state: any, bucket: Bucket): any
M.bf16_compress_wrapper = wrapper "bfloat16"

--- Sends nothing: the upper bound of what a hook could save. Ranks drift apart.
function M.noop_hook() end

--- hook, and when a bucket's result is there the optimizer's step for its parameters, before backward returns.
--- make(params) gives an optimizer for a list of one parameter: each has its own, which stays its own when buckets are
--- built again. A step of the script's own would be a second one. params: which ones are stepped (all).
---@param hook fun(state: any, bucket: table): any
---@param make fun(params: Parameter[]): Optimizer
---@param params? Parameter[]
---@return fun(state: any, bucket: table): any
function M.hook_then_optimizer(hook, make, params)
  if type(hook) ~= "function" then raise("hook_then_optimizer: argument 1 is %s, expected a function",
    errors.kind(hook)) end
  if type(make) ~= "function" then
    raise("hook_then_optimizer: argument 2 is %s, expected a function that makes an optimizer for a list of parameters",
      errors.kind(make))
  end
  local steps = nil
  for _, p in ipairs(params or {}) do
    steps = steps or {}
    steps[p] = true
  end
  local optimizers = setmetatable({}, { __mode = "k" })
  return function(state, bucket)
    local value = hook(state, bucket)
    return { wait = function()
      local out = result_of(value)
      if out ~= nil and out ~= bucket.flat then bucket.flat:copy_(out:reshape(-1)) end
      for k, p in ipairs(bucket.parameters) do
        if not params or steps and steps[p] then
          optimizers[p] = optimizers[p] or make { p }
          bucket:give(k)
          optimizers[p]:step()
        end
      end
    end }
  end
end

-- These have files of their own.
for _, file in ipairs { "power_sgd", "local_sgd", "quantization", "zero" } do
  -- order does not matter: a copy
  for name, value in pairs(require("moonshard.parallel.ddp." .. file)) do M[name] = value end
end

return M
