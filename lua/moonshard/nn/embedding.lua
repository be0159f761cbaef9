-- SPDX-License-Identifier: MIT
--- Embedding: looks up rows of a table by id.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local initial = require "moonshard.nn.initial"
local sparse = require "moonshard.autograd.sparse"
local init = initial.init
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.parameter".empty

local raise = errors.raise

--- Looks up rows of weight, [n, d], by ids from 0. The row of padding_idx is initialised with zeros and receives no
--- gradient. With {sparse = true} the weight's gradient is a sparse tensor of the rows that were looked up (dense if
--- the weight is sharded).
---@class Embedding: Module
---@field weight Parameter  [n, d]
---@overload fun(n: integer, d: integer, opts?: { padding_idx: integer, sparse: boolean, dtype: string, device: string }): Embedding
---   padding_idx: row that starts as zeros and gets no gradient, from 0; negative from the end; sparse: the weight's
---   gradient is a sparse tensor
local Embedding = Module:extend("Embedding")

---@param n integer  number of rows; ids are 0 to n - 1
---@param d integer  size of a row
function Embedding:init(n, d, given)
  local o = opts("Embedding", given, { padding_idx = opts.number, sparse = false, dtype = opts.string,
    device = opts.any })
  opts.expect(n, opts.whole, "Embedding: argument 1, the number of rows,")
  opts.expect(d, opts.whole, "Embedding: argument 2, the size of a row,")
  local pad = o.padding_idx
  if pad then
    if pad < 0 then pad = n + pad end
    if pad < 0 or pad >= n then
      raise("Embedding: padding_idx %d is out of range for %d row%s", o.padding_idx, n, n == 1 and "" or "s")
    end
  end
  self.n, self.d, self.padding_idx, self.sparse = n, d, pad, o.sparse
  self.weight = empty({ n, d }, { dtype = o.dtype, device = o.device })
  self:reset_parameters()
end

--- Initialises the rows again: normal(0, 1), zeros in the row of padding_idx.
function Embedding:reset_parameters()
  init.normal_(self.weight)
  if self.padding_idx then initial.zero_row_(self.weight, self.padding_idx) end
end

local embedding = ops.embedding
local sparse_embedding = sparse.embedding(embedding)
---@param ids Tensor  int64 or int32 […]
---@return Tensor  […, d]
function Embedding:forward(ids)
  local slots = self._slots
  if slots.sparse and sparse.takes(slots.weight) then return sparse_embedding(slots.weight, ids, slots.padding_idx) end
  return embedding(ids, slots.weight, slots.padding_idx)
end

function Embedding:extra_repr()
  return ("%d x %d%s"):format(self.n, self.d, self.padding_idx and (", padding_idx %d"):format(self.padding_idx) or "")
end

return { Embedding = Embedding }
