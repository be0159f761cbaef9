-- SPDX-License-Identifier: MIT
--- Losses as modules: functions of nn.F whose options are fixed in the constructor.
local opts = require "moonshard.core.opts"
local functional = require "moonshard.nn.functional"
local ops = require "moonshard.nn.ops"
local Module = require "moonshard.nn.module".Module

--- F.cross_entropy as a module: logits [N, C], [C] or [N, C, …], and class ids from 0 or probabilities of the logits'
--- shape.
---@class CrossEntropyLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", ignore_index: integer, label_smoothing: number, weight: Tensor }): CrossEntropyLoss
local CrossEntropyLoss = Module:extend("CrossEntropyLoss")

function CrossEntropyLoss:init(given)
  local o = opts("CrossEntropyLoss", given, functional.ce_options)
  if o.weight then self:register_buffer("weight", o.weight) end
  self.reduction, self.ignore_index, self.label_smoothing = o.reduction, o.ignore_index, o.label_smoothing
end

function CrossEntropyLoss:forward(logits, ids)
  local slots = self._slots
  return functional.cross_entropy(logits, ids, slots.weight, slots.reduction, slots.ignore_index, slots.label_smoothing)
end

function CrossEntropyLoss:extra_repr() return self.reduction end

--- F.mse_loss as a module: the squared differences of two tensors of one shape.
---@class MSELoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none" }): MSELoss
local MSELoss = Module:extend("MSELoss")

function MSELoss:init(given)
  self.reduction = opts("MSELoss", given, { reduction = functional.reduction }).reduction
end

function MSELoss:forward(a, b) return ops.mse_loss(a, b, self._slots.reduction) end

function MSELoss:extra_repr() return self.reduction end

return { CrossEntropyLoss = CrossEntropyLoss, MSELoss = MSELoss }
