-- SPDX-License-Identifier: MIT
--- LAMB: Adam with steps in proportion to the norm of each parameter.
local create = require "moonshard.tensor.create"
local opts = require "moonshard.core.opts"
local composed = require "moonshard.optim.composed"
local shards = require "moonshard.nn.module.shards"

local option = opts.option

--- LAMB (You et al. 2020, algorithm 2) for large batches: the step of Adam, with its weight decay, is multiplied by the
--- norm of the parameter and divided by the norm of the step. The norms are those of whole parameters; ranks add the
--- squares of their parts.
---@class LAMB: Optimizer
---@overload fun(params: Tensor[]|table[], opts: { lr: number, betas: number[], eps: number, weight_decay: number, maximize: boolean }): LAMB
---   params: leaves, or groups { params = {…}, lr = …, … }; lr: learning rate (default: 1e-3); betas: decay of the
---   first and second moment, from 0 to below 1 (default: { 0.9, 0.999 }); eps: added to the root of the second moment
---   (default: 1e-6); weight_decay: this times p is added to the step (default: 0); maximize: maximizes instead of
---   minimizing (default: false)
local LAMB = composed.define("LAMB", { "exp_avg", "exp_avg_sq" }, {
  lr = option(opts.number_from(0), 1e-3), betas = { 0.9, 0.999 }, eps = option(opts.positive, 1e-6),
  weight_decay = option(opts.number_from(0), 0), maximize = false,
})
local below_one = opts.kind("a number from 0 to below 1", function(v) return type(v) == "number" and v >= 0 and v < 1 end)

function LAMB:_check_group(group)
  for k = 1, 2 do opts.expect(group.betas[k], below_one, "%s: betas[%d]", self:class_name(), k) end
end

LAMB._accept = LAMB._refuse_flat

-- x, step: this rank's parts of a parameter and of its step. Returns the norms of the whole parameter and whole step.
local function norms(p, x, step)
  local squares = create.tensor({ (x * x):sum():item(), (step * step):sum():item() }, { dtype = "float64",
    device = "cpu" })
  local unit = rawget(p, "_unit")
  if unit and shards.is_cut(p) then
    (require "moonshard.dist").all_reduce(squares, { group = unit.placed and unit.placed.group or unit.group })
  end
  local list = squares:tolist()
  return math.sqrt(list[1]), math.sqrt(list[2])
end

function LAMB._update(_, group, p, part, g, entry)
  local t, b1, b2 = entry.step + 1, group.betas[1], group.betas[2]
  local function wide(x) return part.dtype == "float64" and x or x:float() end
  if g.is_sparse then g = g:to_dense() end
  g = wide(g)
  if group.maximize then g = -g end
  local m, v = entry.exp_avg or g * 0, entry.exp_avg_sq or g * 0
  m:mul_(b1):add_(g, { alpha = 1 - b1 })
  v:mul_(b2):add_(g * g, { alpha = 1 - b2 })
  entry.exp_avg, entry.exp_avg_sq = m, v
  local x = wide(part:detach())
  local step = m / (1 - b1 ^ t) / ((v / (1 - b2 ^ t)):sqrt() + group.eps)
  if group.weight_decay ~= 0 then step = step + x * group.weight_decay end
  local norm, step_norm = norms(p, x, step)
  local trust = norm > 0 and step_norm > 0 and norm / step_norm or 1
  part:add_(step:to(part.dtype), { alpha = -group.lr * trust })
end

return { LAMB = LAMB }
