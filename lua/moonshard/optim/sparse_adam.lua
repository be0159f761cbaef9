-- SPDX-License-Identifier: MIT
--- SparseAdam: Adam for the rows that a sparse gradient has.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local create = require "moonshard.tensor.create"
local sparse_coo = require "moonshard.autograd.sparse".sparse_coo
local composed = require "moonshard.optim.composed"

local option = opts.option

--- Adam (Kingma & Ba 2015) for dense parameters with sparse gradients, such as those of nn.Embedding with sparse =
--- true: only the rows of the gradient and their moments change.
---@class SparseAdam: Optimizer
---@overload fun(params: Tensor[]|table[], opts: { lr: number, betas: number[], eps: number, maximize: boolean }): SparseAdam
---   params: leaves, or groups { params = {…}, lr = …, … }; lr: learning rate (default: 1e-3); betas: decay of the
---   first and second moment, from 0 to below 1 (default: { 0.9, 0.999 }); eps: added to the root of the second moment
---   (default: 1e-8); maximize: maximizes instead of minimizing (default: false)
local SparseAdam = composed.define("SparseAdam", { "exp_avg", "exp_avg_sq" }, {
  lr = option(opts.positive, 1e-3), betas = { 0.9, 0.999 }, eps = option(opts.positive, 1e-8), maximize = false,
})
local below_one = opts.kind("a number from 0 to below 1", function(v) return type(v) == "number" and v >= 0 and v < 1 end)

function SparseAdam:_check_group(group)
  for k = 1, 2 do opts.expect(group.betas[k], below_one, "%s: betas[%d]", self:class_name(), k) end
end

function SparseAdam:_update(group, p, part, g, entry)
  if not g.is_sparse then
    errors.raise("%s: a parameter of shape %s has a dense gradient; use Adam, or a layer with sparse = true",
      self:class_name(), tostring(p.shape))
  end
  local t = entry.step + 1
  local b1, b2 = unpack(group.betas)
  entry.exp_avg = entry.exp_avg or create.zeros_like(part)
  entry.exp_avg_sq = entry.exp_avg_sq or create.zeros_like(part)
  g = g:coalesce()
  local rows, values = g:indices():select(1, 1), g:values()
  if rows:numel() == 0 then return end
  if group.maximize then values = -values end
  local m, v = entry.exp_avg:index_select(1, rows), entry.exp_avg_sq:index_select(1, rows)
  local dm, dv = (values - m) * (1 - b1), (values * values - v) * (1 - b2)
  local function at_rows(x) return sparse_coo(g:indices(), x, p.shape) end
  entry.exp_avg:add_(at_rows(dm))
  entry.exp_avg_sq:add_(at_rows(dv))
  local size = group.lr * math.sqrt(1 - b2 ^ t) / (1 - b1 ^ t)
  part:add_(at_rows((m + dm) / ((v + dv):sqrt() + group.eps)), { alpha = -size })
end

return { SparseAdam = SparseAdam }
