-- SPDX-License-Identifier: MIT
--- Embedding: looks up rows of a table by id.
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local initial = require "moonshard.nn.initial"
local sparse = require "moonshard.autograd.sparse"
local init = initial.init
local Module = require "moonshard.nn.module".Module
local parameter = require "moonshard.nn.module.parameter"
local a_tensor = require "moonshard.tensor".a_tensor

local raise, empty, Parameter = errors.raise, parameter.empty, parameter.Parameter

local pretrained                       -- the weight of the module that from_pretrained makes

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
  if pretrained then
    self.weight, pretrained = pretrained, nil
    return
  end
  self.weight = empty({ n, d }, { dtype = o.dtype, device = o.device })
  self:reset_parameters()
end

-- Makes an instance of `base`, or of the class that stands before the weights: scripts write Class:from_pretrained(w),
-- too. spec: the options, with `freeze`.
function Embedding._from_pretrained(base, spec, first, ...)
  local cls, weights, given = base, first, ...
  if class.is_class(first) then cls, weights, given = first, ... end
  local o = opts("from_pretrained", given, spec)
  opts.expect(weights, a_tensor, "from_pretrained: argument 1")
  if weights.ndim ~= 2 then raise("from_pretrained: the weights have shape %s, expected 2 dimensions", tostring(weights.shape)) end
  if not weights:is_floating_point() then raise("from_pretrained: the weights are %s, expected floating point", weights.dtype) end
  pretrained, o.freeze = Parameter(weights, { requires_grad = not o.freeze }), nil
  local ok, made = pcall(cls, weights:size(1), weights:size(2), o)
  pretrained = nil
  if not ok then error(made, 0) end
  return made
end

local PRETRAINED = { freeze = true, padding_idx = opts.whole, sparse = false }

--- An Embedding whose weight shares the memory of a tensor. By default it is frozen: it gets no gradient. The row of
--- padding_idx keeps its values.
---@param weights Tensor  [n, d], floating point
---@param given? { freeze: boolean, padding_idx: integer, sparse: boolean }
---   freeze: the weight does not require a gradient (default: true); padding_idx: row that gets no gradient, from 0;
---   negative from the end; sparse: the weight's gradient is a sparse tensor
---@return Embedding
function Embedding.from_pretrained(weights, given, more)
  return Embedding._from_pretrained(Embedding, PRETRAINED, weights, given, more)
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
  return embedding(slots.weight, ids, slots.padding_idx)
end

function Embedding:extra_repr()
  return ("%d x %d%s"):format(self.n, self.d, self.padding_idx and (", padding_idx %d"):format(self.padding_idx) or "")
end

return { Embedding = Embedding }
