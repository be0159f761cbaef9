-- SPDX-License-Identifier: MIT
--- Functions of nn.F for embeddings: bags of rows, rotary positions. Each runs in a scope, which releases its
--- intermediate results.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local shape = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"

local a_tensor, raise = tensor.a_tensor, errors.raise
local M = {}

local bag_spec = { mode = opts.one_of({ "sum", "mean", "max" }, "mean"), padding_idx = opts.whole, per_sample_weights = opts.kind("a tensor",
  tensor.is_tensor) }

-- Reduces the rows that were looked up, [B, L, d], along dimension 2. pad: id whose rows do not count, or nil.
local function reduced(rows, ids, mode, pad)
  if ids:size(2) == 0 then return rows:sum(2) end
  if pad == nil then
    if mode == "max" then return (rows:max(2)) end
    return mode == "sum" and rows:sum(2) or rows:mean(2)
  end
  local counts = ids:ne(pad):unsqueeze(3)
  if mode == "max" then
    local highest = rows:masked_fill(counts:logical_not(), -math.huge):max(2)
    return highest:masked_fill(counts:any(2):logical_not(), 0)
  end
  counts = counts:to(rows.dtype)
  local sum = (rows * counts):sum(2)
  return mode == "sum" and sum or sum / counts:sum(2):clamp_min(1)
end

--- Looks up the rows of each bag of ids in w and reduces them to one. The rows of padding_idx do not count and get no
--- gradient; an empty bag gives zeros.
---@param ids Tensor  int64 [B, L], from 0
---@param w Tensor  [n, d]
---@param given? { mode: "sum"|"mean"|"max", padding_idx: integer, per_sample_weights: Tensor }
---   mode: how the rows of a bag become one (default: "mean"); padding_idx: row that does not count, from 0; negative
---   from the end; per_sample_weights: [B, L], factors of the rows, only with "sum"
---@return Tensor  [B, d]
function M.embedding_bag(ids, w, given)
  local o = opts("embedding_bag", given, bag_spec)
  opts.expect(ids, a_tensor, "embedding_bag: ids")
  opts.expect(w, a_tensor, "embedding_bag: weight")
  if ids.ndim ~= 2 then
    raise("embedding_bag: ids have shape %s, expected [B, L]: a row for each bag", tostring(ids.shape))
  end
  local factors, pad = o.per_sample_weights, o.padding_idx
  if factors ~= nil and o.mode ~= "sum" then
    raise("embedding_bag: per_sample_weights was not nil. per_sample_weights is only supported for mode='sum' (got mode='%s')",
      o.mode)
  end
  if factors ~= nil and factors.shape ~= ids.shape then
    raise("embedding_bag: per_sample_weights has shape %s, expected the shape of ids, %s", tostring(factors.shape),
      tostring(ids.shape))
  end
  if pad and pad < 0 then pad = w:size(1) + pad end
  return scope.scope(function()
    local rows = ops.embedding(w, ids, pad)
    if factors ~= nil then rows = rows * factors:unsqueeze(3) end
    return reduced(rows, ids, o.mode, pad)
  end)
end

local rotary_spec = { base = opts.option(opts.positive, 10000), offset = opts.option(opts.whole_from(0), 0),
  interleaved = false }

--- Rotary positions (Su et al. 2021): rotates pairs of features by the position times base^(-2 i / d), so that the
--- product of a query and a key depends on the distance of their positions. The pairs are the features i and i + d / 2,
--- as in Llama, or with interleaved 2 i and 2 i + 1. Errors: an odd number of features.
---@param x Tensor  [..., T, d], such as the queries or keys of attention, [B, heads, T, d]
---@param given? { base: number, offset: integer, interleaved: boolean }
---   base: base of the powers in the angles (default: 10000); offset: position of the first time step (default: 0);
---   interleaved: pairs adjacent features (default: false)
---@return Tensor  of x's shape and dtype
function M.rotary_embedding(x, given)
  local o = opts("rotary_embedding", given, rotary_spec)
  opts.expect(x, a_tensor, "rotary_embedding: argument 1")
  if x.ndim < 2 or x:size(-1) % 2 ~= 0 then
    raise("rotary_embedding: the input has shape %s, expected [..., T, d] with an even d", tostring(x.shape))
  end
  local T, half, sizes = x:size(-2), x:size(-1) / 2, { unpack(x.shape) }
  return scope.scope(function()
    -- Large angles rounded to float16 or bfloat16 would be off by radians, so they are float32 at least.
    local kind = { dtype = x.dtype == "float64" and "float64" or "float32", device = x.device }
    local rates = (create.arange(half, kind) * (-math.log(o.base) / half)):exp()
    local angles = (create.arange(T, kind) + o.offset):unsqueeze(2) * rates
    local cos, sin = angles:cos(), angles:sin()
    if not o.interleaved then return ops.rotary(x, cos, sin) end
    sizes[#sizes], sizes[#sizes + 1] = half, 2
    local parts = x:reshape(sizes):split(1, -1)
    local a, b = parts[1]:squeeze(-1), parts[2]:squeeze(-1)
    return shape.stack({ a * cos - b * sin, b * cos + a * sin }, -1):reshape(x.shape):to(x.dtype)
  end)
end

return M
