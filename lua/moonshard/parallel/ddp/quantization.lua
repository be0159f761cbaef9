-- SPDX-License-Identifier: MIT
--- Hooks that send gradients of nn.DDP as uint8 (docs/semantics.md#ddp-hooks): each rank quantizes its own gradients (x
--- is about scale * (q - zero)), gathers those of all ranks, and averages the dequantized values. A rank sends a
--- quarter of float32's bytes, but sends them to every other rank, so this is only faster for few ranks.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local opts = require "moonshard.core.opts"
local flat_of = require "moonshard.parallel.ddp.flat"

local M = {}

local EPS = 1.1920929e-07               -- the smallest scale: the machine epsilon of float32

-- Quantizes rows [R, n] to uint8 [R, n]; also returns [R, 2] with each row's scale and zero point. The range of a row
-- always contains 0.
local function quantize(rows)
  local low, high = rows:min(2), rows:max(2)
  low, high = low:clamp(nil, 0), high:clamp(0, nil)
  local scale = ((high - low) / 255):clamp(EPS, nil)
  local zero = (low / -scale + 0.5):clamp(0, 255):to("int64"):to(rows.dtype)
  local q = (rows / scale:unsqueeze(2) + (zero + 0.5):unsqueeze(2)):clamp(0, 255):to "uint8"
  local out = create.empty(rows:size(1), 2, { dtype = rows.dtype, device = rows.device })
  out:narrow(2, 1, 1):copy_(scale:unsqueeze(2))
  out:narrow(2, 2, 1):copy_(zero:unsqueeze(2))
  return q, out
end

local function begin(group, flat, row)
  local world, numel = dist.world_size(group), flat:numel()
  local n = math.ceil(numel / row)
  local work = flat.dtype == "float64" and flat or flat:to "float32"
  if n * row ~= numel then
    local padded = create.zeros(n * row, { dtype = work.dtype, device = work.device })
    padded:narrow(1, 1, numel):copy_(work)
    work = padded
  end
  local q, params = quantize(work:view(n, row))
  local run = {
    world = world, n = n, row = row, numel = numel, mine = q:keep(), my_params = params:keep(),
    all = create.empty(world * n, row, { dtype = "uint8", device = flat.device }):keep(),
    params = create.empty(world * n, 2, { dtype = params.dtype, device = flat.device }):keep(),
  }
  run.works = {
    dist.all_gather(run.params, run.my_params, { group = group, async = true }),
    dist.all_gather(run.all, run.mine, { group = group, async = true }),
  }
  return run
end

local function finish(run, flat)
  for _, work in ipairs(run.works) do work:wait() end
  local sum
  for r = 0, run.world - 1 do
    local params = run.params:narrow(1, r * run.n + 1, run.n)
    local part = (run.all:narrow(1, r * run.n + 1, run.n):to(params.dtype) - params:narrow(2, 2, 1)) * params:narrow(2,
      1, 1)
    if sum then sum:add_(part) else sum = part end
  end
  flat:copy_((sum / run.world):view(-1):narrow(1, 1, run.numel))
  for _, t in ipairs { run.mine, run.my_params, run.all, run.params } do t:release() end
end

local function hook_of(who, rows_of)
  return function(group, bucket, ...)
    local flat = flat_of(who, bucket)
    local row = rows_of(flat, ...)
    if flat:numel() == 0 then return end
    local run = autograd.no_grad(begin, group, flat, row)
    return {
      wait = function() autograd.no_grad(finish, run, flat) end,
      drop = function()
        for _, work in ipairs(run.works) do pcall(work.wait, work) end
      end,
    }
  end
end

--- The mean over ranks, sent as uint8 with one scale per bucket. Every rank gathers the bytes of all ranks.
---@param group Group?  default: the world
---@param bucket Bucket  given by DDP; its gradients are replaced
---@type fun(group?: Group, bucket: Bucket): any
M.quantization_pertensor_hook = hook_of("quantization_pertensor_hook",
  function(flat) return math.max(flat:numel(), 1) end)

--- The mean over ranks, sent as uint8 with one scale for every bucket_size elements (default: 512).
---@param group Group?  default: the world
---@param bucket Bucket  given by DDP; its gradients are replaced
---@param bucket_size integer?  elements that share a scale (default: 512)
---@type fun(group?: Group, bucket: Bucket, bucket_size?: integer): any
M.quantization_perchannel_hook = hook_of("quantization_perchannel_hook", function(_, bucket_size)
  local size = bucket_size or 512
  opts.need(opts.whole_from(1).test(size), bucket_size, "a whole number from 1",
    "quantization_perchannel_hook: argument 3")
  return size
end)

return M
