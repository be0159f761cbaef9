-- SPDX-License-Identifier: MIT
--- Metrics of evaluations: each collects counts or sums on its rank, and `compute` adds them up over the ranks, so that
--- the result is that of all data, however they are distributed. EarlyStopping says when a value has stopped
--- improving.
---   local accuracy = ms.metrics.Accuracy()
---   for x, y in batches do accuracy:update(model(x), y) end
---   print(accuracy:compute())
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local methods = require "moonshard.core.methods"
local opts = require "moonshard.core.opts"
local plot = require "moonshard.plot"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local a_tensor, raise = tensor.a_tensor, errors.raise
local M = {}

-- ---- the base: a list of numbers that are added up over ranks --------------------------------------------

---@class Metric
---@field updates integer  batches since the last reset
local Metric = {}
Metric.__index = Metric
Metric.__name = "Metric"
function Metric:__tostring()
  local hint = self.name == "ConfusionMatrix" and "; its compute() and plot() show the counts" or ""
  return ("%s(%s%s)"):format(self.name, errors.count(self.updates, "update"), hint)
end

-- Makes a constructor of metrics. spec: its options; size(options): how many numbers it collects; count(self, sums,
-- ...): adds to them; result(self, sums): the value.
local function define(name, spec, size, count, result)
  spec.group = opts.any
  return function(given)
    local self = { name = name, options = opts(name, given, spec), _count = count, _result = result }
    setmetatable(self, Metric)
    self.n = size(self.options)
    self:reset()
    return self
  end
end

--- Forgets what was collected.
function Metric:reset()
  self.sums, self.updates = {}, 0
  for k = 1, self.n do self.sums[k] = 0 end
end

--- Adds a batch. The function that makes the metric documents the arguments.
---@param ... any  such as scores and classes
function Metric:update(...)
  local arguments, n = { ... }, select("#", ...)
  autograd.no_grad(function()
    scope.scope(function() self:_count(self.sums, unpack(arguments, 1, n)) end)
  end)
  self.updates = self.updates + 1
end

-- The list summed over the ranks of the metric's group.
local function over_ranks(self, list)
  if dist.world_size(self.options.group) == 1 then return list end
  local sums
  scope.scope(function()
    local all = create.tensor(list, { dtype = "float64" })
    dist.all_reduce(all, { group = self.options.group })
    sums = all:tolist()
  end)
  return sums
end

--- The value over all batches and ranks: a number, or a table of numbers. Every rank of the group calls it. Without
--- data it is nan, but counts are 0, and so are the precision, recall and F1 of a class and their "macro" mean. An item
--- that a loader repeats counts twice: give `pad = false` to data.DataLoader.
---@return number|number[]|number[][]
function Metric:compute() return self:_result(over_ranks(self, self.sums)) end

-- The counts of a confusion matrix as a plot.
local function picture(rows, o)
  local labels = o.labels or {}
  for k = 1, o.labels and 0 or #rows do labels[k] = tostring(k - 1) end
  local map = plot.heatmap(rows, { row_labels = labels, column_labels = labels, values = true, title = o.title,
    x_label = "predicted", y_label = "true", width = o.width, height = o.height })
  map.first = 0                                                     -- classes count from 0
  return map
end

-- The metatable of a confusion matrix's counts, for print.
local COUNTS = opts.printing { __tostring = function(rows) return (picture(rows, {}):text():gsub("\n$", "")) end }

local LABELS = { labels = opts.table, title = opts.string, width = opts.option(opts.whole_from(160), 640),
  height = opts.option(opts.whole_from(120), 360) }
--- The counts of a ConfusionMatrix as a plot, whose rows are the true classes: `save` writes it, `text` gives it as a
--- table for print. Every rank of the group calls it. Errors: another metric.
---@param given? { labels: string[], title: string, width: integer, height: integer }
---   labels: names of the classes (default: their ids); title: text above the plot; width: width of the SVG in pixels
---   (default: 640); height: height of the SVG in pixels (default: 360)
---@return Plot
function Metric:plot(given)
  local o = opts("plot", given, LABELS)
  if self.name ~= "ConfusionMatrix" then raise("plot: called on %s, expected a ConfusionMatrix", self.name) end
  return picture(self:compute(), o)
end

--- What was collected on all ranks, for a checkpoint, which any number of ranks can continue. Every rank of the group
--- calls it.
---@return { sums: number[], updates: integer }
function Metric:state_dict()
  local list = listing.copy(self.sums)
  list[#list + 1] = self.updates
  local sums = listing.copy(over_ranks(self, list))
  return { updates = table.remove(sums), sums = sums }
end

--- Continues from a state dict. Every rank of the group calls it.
---@param sd { sums: number[], updates: integer }
---   sums: what was collected on all ranks; updates: their batches since the last reset
function Metric:load_state_dict(sd)
  local who = self.name .. ": load_state_dict: "
  opts.expect(sd, opts.table, who .. "argument 1")
  opts.expect(sd.sums, opts.table, who .. "sums")
  opts.expect(sd.updates, opts.whole_from(0), who .. "updates")
  if #sd.sums ~= self.n then raise("%s%d sums, expected %d", who, #sd.sums, self.n) end
  self:reset()
  if dist.rank(self.options.group) ~= 0 then return end   -- only rank 0 continues the sums
  for k, value in ipairs(sd.sums) do self.sums[k] = opts.expect(value, opts.number, "%ssum %d", who, k) end
  self.updates = sd.updates
end

-- Floating-point predictions of the ids' shape as classes 0 and 1: they are probabilities of class 1.
local function over_threshold(who, given, ids, o)
  if o.classes and o.classes ~= 2 then
    raise("%s: predictions are %s %s, expected int64 classes of that shape, or scores [N, %d, ...]", who, given.dtype,
      tostring(given.shape), o.classes)
  end
  if given:numel() > 0 then
    local low, high = given:min():item(), given:max():item()
    if not (low >= 0 and high <= 1) then
      raise("%s: %g in predictions of shape %s, which are probabilities of class 1: expected numbers from 0 to 1; write "
        .. "sigmoid() for logits, long() for classes", who, low >= 0 and high or low, tostring(given.shape))
    end
    local others = ids:ne(0):logical_and(ids:ne(1)):logical_and(ids:ne(o.ignore_index or 0))
    if others:any():item() then
      local found = ids:masked_select(others)
      raise("%s: the targets have class %d, but predictions of shape %s are probabilities of class 1: expected targets "
        .. "0 and 1; for more classes pass scores [N, C, ...]", who, found:narrow(1, 1, 1):item(), tostring(given.shape))
    end
  end
  return given:gt(o.threshold)
end

-- The classes with the highest of scores [N, C, ...] or [C].
local function best_of(who, scores, classes)
  local dim = scores.ndim == 1 and 1 or 2
  local columns = scores:size(dim)
  if columns == 1 and dim == 2 then
    raise("%s: scores of shape %s have one class; expected a score for each class, or probabilities of class 1 of the "
      .. "classes' shape: write scores:squeeze(2):sigmoid() for logits", who, tostring(scores.shape))
  end
  if classes and columns ~= classes then
    raise("%s: scores of shape %s are for %d classes, but option 'classes' is %d", who, tostring(scores.shape), columns,
      classes)
  end
  return scores:argmax(dim)
end

-- The predicted classes, from scores [N, C, ...], or classes or probabilities of ids' shape, and the true ones, as flat
-- int64 tensors. o: the metric's options.
local function classes_of(who, given, ids, o)
  opts.expect(given, a_tensor, "%s: predictions", who)
  opts.expect(ids, a_tensor, "%s: classes", who)
  if ids.dtype:find "float" then
    raise("%s: classes are %s, expected int64; convert them by :long()", who, ids.dtype)
  end
  ids = ids:long()
  local predicted = given
  if given.ndim == ids.ndim + 1 then
    predicted = best_of(who, given, o.classes)
  elseif given.shape == ids.shape and given.dtype:find "float" then
    predicted = over_threshold(who, given, ids, o)
  end
  if predicted.shape ~= ids.shape then
    raise("%s: predictions of shape %s do not fit classes of shape %s; expected scores [N, C, ...] or classes [N, ...]",
      who, tostring(given.shape), tostring(ids.shape))
  end
  return predicted:reshape(-1):long(), ids:reshape(-1)
end

-- ---- classes ----------------------------------------------------------------------------------------------

local THRESHOLD = opts.option(opts.kind("a number from 0 to 1", function(v)
  return type(v) == "number" and v >= 0 and v <= 1
end), 0.5)
local ACCURACY = { top_k = opts.option(opts.whole_from(1), 1), ignore_index = opts.option(opts.whole, -100),
  threshold = THRESHOLD }
local accuracy = define("Accuracy", ACCURACY, function() return 2 end,
  function(self, sums, scores, ids)
    local k = self.options.top_k
    local predicted, truth, correct
    if k == 1 then
      predicted, truth = classes_of("Accuracy", scores, ids, self.options)
      correct = predicted:eq(truth)
    else
      opts.expect(scores, a_tensor, "Accuracy: scores")
      opts.expect(ids, a_tensor, "Accuracy: classes")
      if scores.ndim ~= 2 or ids.ndim ~= 1 or scores:size(1) ~= ids:size(1) then
        raise("Accuracy: scores of shape %s and classes of shape %s; top_k expects [N, C] and [N]",
          tostring(scores.shape), tostring(ids.shape))
      end
      truth = ids:long()
      local own = scores:gather(2, truth:clamp_min(0):unsqueeze(2))
      correct = scores:gt(own):long():sum(2):lt(k)            -- fewer than k classes score higher
    end
    local counts = truth:ne(self.options.ignore_index)
    sums[1] = sums[1] + correct:logical_and(counts):long():sum():item()
    sums[2] = sums[2] + counts:long():sum():item()
  end,
  function(_, sums) return sums[1] / sums[2] end)
--- The share of correct predictions. `update(predictions, ids)`: ids int64 [N, ...], from 0; predictions: scores
--- [N, C, ...], or int64 classes of ids' shape, or for two classes floating-point probabilities of class 1 of ids'
--- shape, as sigmoid gives them: those above `threshold` predict class 1. The accuracy of each class is
--- `Recall { classes = C, average = "none" }`. Errors: predictions of one column; probabilities outside of 0 to 1.
---@param given? { top_k: integer, ignore_index: integer, threshold: number, group: Group }
---   top_k: a prediction is correct if the true class is among the top_k highest scores [N, C] (default: 1);
---   ignore_index: class that does not count (default: -100); threshold: probability above which class 1 is predicted
---   (default: 0.5); group: the ranks that have the data (default: the world)
---@return Metric
function M.Accuracy(given) return accuracy(given) end

-- Adds predictions to the counts `sums` [n * n]: a row for each true class, a column for each predicted one.
local function add_confusion(self, sums, given, ids)
  local who, n = self.name, self.options.classes
  local predicted, truth = classes_of(who, given, ids, self.options)
  for _, list in ipairs { predicted, truth } do
    if list:numel() > 0 then
      local low, high = (list:min()):item(), (list:max()):item()
      if low < 0 or high >= n then
        raise("%s: the %s have class %d, expected classes from 0 to %d", who,
          rawequal(list, predicted) and "predictions" or "targets", low < 0 and low or high, n - 1)
      end
    end
  end
  for _, cell in ipairs((truth * n + predicted):tolist()) do sums[cell + 1] = sums[cell + 1] + 1 end
end

local CLASSES = opts.option(opts.whole_from(2), opts.required)

local confusionMatrix = define("ConfusionMatrix", { classes = CLASSES, threshold = THRESHOLD },
  function(o) return o.classes ^ 2 end, add_confusion,
  function(self, sums)
    local n, rows = self.options.classes, {}
    for i = 1, n do
      rows[i] = {}
      for j = 1, n do rows[i][j] = sums[(i - 1) * n + j] end
    end
    return setmetatable(rows, COUNTS)
  end)
--- Counts of predictions: `compute()[i][j]` is how often class i - 1 was predicted as class j - 1; print shows
--- them as a table. `update(predictions, ids)` as for Accuracy. `plot` shows the counts with the classes' names.
--- Errors: scores for another number of classes.
---@param given { classes: integer, threshold: number, group: Group }
---   classes: number of classes; threshold: as for Accuracy, with two classes (default: 0.5); group: the ranks that
---   have the data (default: the world)
---@return Metric
function M.ConfusionMatrix(given) return confusionMatrix(given) end

-- Precision, recall or F1 of each class from the counts, 0 where the denominator is 0; and the sizes of the classes.
local function scores_of(n, sums, how)
  local list, members = {}, {}
  for c = 1, n do
    local hits, predicted, own = sums[(c - 1) * n + c], 0, 0
    for k = 1, n do
      predicted, own = predicted + sums[(k - 1) * n + c], own + sums[(c - 1) * n + k]
    end
    local below = how == "precision" and predicted or how == "recall" and own or (predicted + own) / 2
    list[c], members[c] = below > 0 and hits / below or 0, own
  end
  return list, members
end

local function averaged(name, how)
  return define(name, { classes = CLASSES, threshold = THRESHOLD,
    average = opts.one_of({ "macro", "micro", "weighted", "none" }, "macro") },
    function(o) return o.classes ^ 2 end, add_confusion,
    function(self, sums)
      local n, average = self.options.classes, self.options.average
      local list, members = scores_of(n, sums, how)
      if average == "none" then return list end
      local total, weights = 0, 0
      if average == "micro" then
        for c = 1, n do total = total + sums[(c - 1) * n + c] end
        for _, count in ipairs(sums) do weights = weights + count end
        return total / weights
      end
      for c = 1, n do
        local weight = average == "weighted" and members[c] or 1
        total, weights = total + weight * list[c], weights + weight
      end
      return total / weights
    end)
end

local precision = averaged("Precision", "precision")
--- The share of a class's predictions that are correct. `update(predictions, ids)` as for Accuracy. average: "macro" is
--- the mean over classes, "weighted" the mean weighted by their members, "micro" the share of all predictions that are
--- correct, "none" a number for each class.
---@param given { classes: integer, average: "macro"|"micro"|"weighted"|"none", threshold: number, group: Group }
---   classes: number of classes; average: how the values of the classes are combined (default: "macro"); threshold: as
---   for Accuracy, with two classes (default: 0.5); group: the ranks that have the data (default: the world)
---@return Metric
function M.Precision(given) return precision(given) end
local recall = averaged("Recall", "recall")
--- The share of a class's members that were predicted as the class. Arguments as for Precision.
---@param given { classes: integer, average: "macro"|"micro"|"weighted"|"none", threshold: number, group: Group }
---   classes: number of classes; average, threshold: as for Precision; group: the ranks that have the data (default:
---   the world)
---@return Metric
function M.Recall(given) return recall(given) end
local f1 = averaged("F1", "f1")
--- The harmonic mean of precision and recall. Arguments as for Precision.
---@param given { classes: integer, average: "macro"|"micro"|"weighted"|"none", threshold: number, group: Group }
---   classes: number of classes; average, threshold: as for Precision; group: the ranks that have the data (default:
---   the world)
---@return Metric
function M.F1(given) return f1(given) end

-- ---- numbers ----------------------------------------------------------------------------------------------

local mean = define("Mean", {}, function() return 2 end, function(_, sums, value, weight)
  weight = weight == nil and 1 or opts.expect(weight, opts.number, "Mean: weight")
  local sum, n = value, 1
  if tensor.is_tensor(value) then sum, n = value:double():sum():item(), value:numel() end
  opts.expect(sum, opts.number, "Mean: value")
  sums[1], sums[2] = sums[1] + sum * weight, sums[2] + n * weight
end, function(_, sums) return sums[1] / sums[2] end)
--- The mean of numbers. `update(value, weight)`: value: a number, or a tensor, whose elements all count; weight: a
--- number, the weight of each of them (default: 1).
---@param given? { group: Group }
---   group: the ranks that have the data (default: the world)
---@return Metric
function M.Mean(given) return mean(given) end

local perplexity = define("Perplexity", {}, function() return 2 end, function(_, sums, loss, tokens)
  if tensor.is_tensor(loss) then loss = loss:item() end
  opts.expect(loss, opts.number, "Perplexity: loss")
  opts.expect(tokens, opts.whole_from(0), "Perplexity: number of tokens")
  sums[1], sums[2] = sums[1] + loss * tokens, sums[2] + tokens
end, function(_, sums) return math.exp(sums[1] / sums[2]) end)
--- e to the mean loss of a token. `update(loss, tokens)`: the mean loss of a batch in nats, and its number of tokens.
---@param given? { group: Group }
---   group: the ranks that have the data (default: the world)
---@return Metric
function M.Perplexity(given) return perplexity(given) end

local r2 = define("R2", {}, function() return 4 end, function(_, sums, predictions, targets)
  opts.expect(predictions, a_tensor, "R2: predictions")
  opts.expect(targets, a_tensor, "R2: targets")
  if predictions.shape ~= targets.shape then
    raise("R2: predictions have shape %s, targets have shape %s; expected equal shapes", tostring(predictions.shape),
      tostring(targets.shape))
  end
  local y, difference = targets:double(), targets:double() - predictions:double()
  sums[1], sums[2] = sums[1] + y:numel(), sums[2] + y:sum():item()
  sums[3], sums[4] = sums[3] + (y * y):sum():item(), sums[4] + (difference * difference):sum():item()
end, function(_, sums)
  return 1 - sums[4] / (sums[3] - sums[2] ^ 2 / sums[1])
end)
--- The coefficient of determination: 1 - (squared errors) / (squared deviations from the mean). `update(predictions,
--- targets)`: tensors of one shape.
---@param given? { group: Group }
---   group: the ranks that have the data (default: the world)
---@return Metric
function M.R2(given) return r2(given) end

-- ---- early stopping ---------------------------------------------------------------------------------------

---@class EarlyStopping
---@field best number  the value of the last improvement
---@field waited integer  updates since then
local EarlyStopping = {}
EarlyStopping.__index = EarlyStopping
EarlyStopping.__name = "EarlyStopping"

local STOPPING = { patience = opts.option(opts.whole_from(0), 5), min_delta = opts.option(opts.number_from(0), 0),
  mode = opts.one_of({ "min", "max" }, "min") }
--- Says when a validation value has stopped improving: `if stopping:update(loss) then break end`. Every rank must pass
--- the same value, as `compute` of a metric gives it.
---@param given? { patience: integer, min_delta: number, mode: "min"|"max" }
---   patience: number of updates in a row without improvement that stops (default: 5; 0 acts as 1); min_delta:
---   an improvement on `best` must be larger than this (default: 0); mode: "min" if lower is better (default), or
---   "max"
---@return EarlyStopping
function M.EarlyStopping(given)
  local o = opts("EarlyStopping", given, STOPPING)
  return setmetatable({ options = o, best = o.mode == "min" and math.huge or -math.huge, waited = 0 }, EarlyStopping)
end

--- Takes the next value. A nan counts as no improvement.
---@param value number|Tensor  a number, or a tensor of one element
---@return boolean stop  whether this is the `patience`-th update in a row without improvement, or a later one
---@return boolean improved  whether this value is better than `best` by more than `min_delta`
function EarlyStopping:update(value)
  if tensor.is_tensor(value) then value = value:item() end
  if type(value) ~= "number" then opts.wrong(value, "a number", "EarlyStopping: value") end
  local o = self.options
  local gain = o.mode == "min" and self.best - value or value - self.best
  local improved = gain > o.min_delta
  if improved then self.best, self.waited = value, 0 else self.waited = self.waited + 1 end
  return not improved and self.waited >= o.patience, improved
end

--- The state for a checkpoint.
---@return { best: number, waited: integer }
function EarlyStopping:state_dict() return { best = self.best, waited = self.waited } end
--- Continues from a state dict.
---@param sd { best: number, waited: integer }  best: the value of the last improvement; waited: updates since then
function EarlyStopping:load_state_dict(sd)
  opts.expect(sd, opts.table, "EarlyStopping: load_state_dict: argument 1")
  self.best = opts.expect(sd.best, opts.number, "EarlyStopping: load_state_dict: best")
  self.waited = opts.expect(sd.waited, opts.whole_from(0), "EarlyStopping: load_state_dict: waited")
end

function EarlyStopping:__tostring() return ("EarlyStopping(best %g, waited %d)"):format(self.best, self.waited) end

methods.guard(Metric, "metric")
methods.close(Metric)
methods.guard(EarlyStopping, "stopping")
methods.close(EarlyStopping)

return M
