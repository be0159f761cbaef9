-- SPDX-License-Identifier: MIT
--- Adafactor: stores the second moment of a matrix as one row and one column.
local opts = require "moonshard.core.opts"
local composed = require "moonshard.optim.composed"
local shards = require "moonshard.nn.module.shards"

local option = opts.option
local EPSILON = { float64 = 2 ^ -52, float32 = 2 ^ -23, float16 = 2 ^ -10, bfloat16 = 2 ^ -7 }

--- Adafactor (Shazeer & Stern 2018, without momentum, in PyTorch's form): the second moment of the last two dimensions
--- is the product of a column and a row of means; that of vectors is kept whole. A sharded parameter and its gradient
--- are gathered for the step, and every rank keeps the states of the whole parameter.
---@class Adafactor: Optimizer
---@overload fun(params: Tensor[]|table[], opts: { lr: number, beta2_decay: number, eps: table, d: number, weight_decay: number, maximize: boolean }): Adafactor
---   params: leaves, or groups { params = {…}, lr = …, … }; lr: the largest relative step (default: 1e-2); beta2_decay:
---   step k's squared gradients have the weight k^beta2_decay (default: -0.8); eps: { least root of the second moment, or
---   false for the dtype's epsilon, least root mean square of a parameter } (default: { false, 1e-3 }); d: limit of an
---   update's root mean square, to which larger updates are scaled down, at least 1 (default: 1); weight_decay: lr
---   times this times p is subtracted from p (default: 0); maximize: maximizes instead of minimizing (default: false)
local Adafactor = composed.define("Adafactor", { "row_var", "col_var", "variance" }, {
  lr = option(opts.number_from(0), 1e-2),
  beta2_decay = option(opts.kind("a number of at most 0", function(v) return type(v) == "number" and v <= 0 end), -0.8),
  eps = { false, 1e-3 }, d = option(opts.number_from(1), 1), weight_decay = option(opts.number_from(0), 0),
  maximize = false,
})

function Adafactor:_check_group(group)
  local least, norm = group.eps[1], group.eps[2]
  opts.need(least == false or type(least) == "number" and least >= 0, least, "false or a number from 0", "%s: eps[1]",
    self:class_name())
  opts.expect(norm, opts.number_from(0), "%s: eps[2]", self:class_name())
end

Adafactor._accept = Adafactor._refuse_flat

local function shape_of(p) return rawget(p, "_whole_shape") or p.shape end

-- Moves a moment towards `new` by `share` of the difference; a missing moment counts as 0.
local function lerp(moment, new, share) return moment and moment + (new - moment) * share or new * share end

local function means(g, dim, share, moment) return lerp(moment, (g * g):mean(dim, { keepdim = true }), share) end

function Adafactor._update(_, group, p, part, g, entry)
  local t, shape = entry.step + 1, shape_of(p)
  local double = part.dtype == "float64"
  local function wide(x) return double and x or x:float() end
  local whole = wide(shards.whole(p, part:detach():contiguous())):reshape(shape)
  g = wide(shards.whole(p, g:detach():contiguous())):reshape(shape)
  if group.maximize then g = -g end
  local share, least = t ^ group.beta2_decay, group.eps[1] or EPSILON[part.dtype]
  local numel = math.max(1, whole:numel())
  local alpha = math.max(group.eps[2], whole:norm():item() / math.sqrt(numel)) * math.min(group.lr, 1 / math.sqrt(t))
  local square
  if #shape > 1 then
    entry.row_var = means(g, -1, share, entry.row_var)
    entry.col_var = means(g, -2, share, entry.col_var)
    square = entry.row_var:matmul(entry.col_var) / entry.row_var:mean(-2, { keepdim = true }):clamp(least)
  else
    entry.variance = lerp(entry.variance, g * g, share)
    square = entry.variance
  end
  local update = square:clamp(least * least):rsqrt() * g
  local by = math.max(1, update:norm():item() / (math.sqrt(numel) * group.d))
  if group.weight_decay ~= 0 then part:mul_(1 - group.lr * group.weight_decay) end
  part:add_(shards.own(p, update):reshape(part.shape):to(part.dtype), { alpha = -alpha / by })
end

function Adafactor._keeps_whole() return true end

-- The whole parameter's shape, but row_var has size 1 in the last dimension and col_var in the one before it.
function Adafactor._state_shape(_, p, _, name)
  local shape = {}
  for k, n in ipairs(shape_of(p)) do shape[k] = n end
  if name == "row_var" then shape[#shape] = 1 elseif name == "col_var" then shape[#shape - 1] = 1 end
  return ("[%s]"):format(table.concat(shape, ", "))
end

return { Adafactor = Adafactor }
