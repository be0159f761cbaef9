-- SPDX-License-Identifier: MIT
--- Metrics: against plain counting, over batches and over ranks.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"
local refuses = require "spec.support.raises"
local metrics, dist = ms.metrics, ms.dist

local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

describe("metrics", function()
  local SCORES = { { 0.1, 0.7, 0.2 }, { 0.5, 0.3, 0.2 }, { 0.2, 0.3, 0.5 }, { 0.4, 0.35, 0.25 } }

  it("Accuracy counts scores, classes, the k highest scores, and leaves ignored classes out", function()
    local a = metrics.Accuracy()
    a:update(ms.tensor(SCORES), ids { 1, 0, 1, 1 })
    assert.are.equal(0.5, a:compute())
    a:update(ids { 2, 2 }, ids { 2, -100 })
    assert.are.equal(0.6, a:compute())
    a:reset()
    assert.is_true(a:compute() ~= a:compute())
    local top = metrics.Accuracy { top_k = 2 }
    top:update(ms.tensor(SCORES), ids { 1, 2, 1, 1 })
    assert.are.equal(0.75, top:compute())
  end)

  it("Precision, Recall and F1 follow from the confusion matrix", function()
    local truth, guess = ids { 0, 0, 1, 1, 1, 2 }, ids { 0, 1, 1, 1, 2, 2 }
    local function of(name, options)
      options.classes = 3
      local m = metrics[name](options)
      m:update(guess, truth)
      return m:compute()
    end
    assert.are.same({ { 1, 1, 0 }, { 0, 2, 1 }, { 0, 0, 1 } }, of("ConfusionMatrix", {}))
    local matrix = metrics.ConfusionMatrix { classes = 2 }
    matrix:update(ms.tensor({ 0, 1, 1 }, { dtype = "int64" }), ms.tensor({ 0, 1, 0 }, { dtype = "int64" }))
    local text = "true\n0  1  1\n1  0  1\n   0  1\npredicted\nfrom 0 to 1"
    assert.are.equal(text .. "\n", matrix:plot():text { ascii = true })
    assert.are.equal(text, tostring(matrix:compute()))
    assert.are.equal("ConfusionMatrix(1 update; its compute() and plot() show the counts)", tostring(matrix))
    assert.is_truthy(matrix:plot { labels = { "cat", "dog" } }:svg():find("dog", 1, true))
    assert.has_error(function() metrics.Mean():plot() end, "plot: called on Mean, expected a ConfusionMatrix")
    assert.are.same({ 1, 2 / 3, 0.5 }, of("Precision", { average = "none" }))
    assert.are.same({ 0.5, 2 / 3, 1 }, of("Recall", { average = "none" }))
    assert.are.same({ 2 / 3, 2 / 3, 2 / 3 }, of("F1", { average = "none" }))
    assert.are.equal(4 / 6, of("F1", { average = "micro" }))
    assert.is_true(math.abs(of("Precision", { average = "weighted" }) - (2 * 1 + 3 * 2 / 3 + 0.5) / 6) < 1e-12)
    assert.is_true(math.abs(of("Recall", {}) - (0.5 + 2 / 3 + 1) / 3) < 1e-12)
  end)

  it("a confusion matrix is a plain table for files, ranks and plots", function()
    local matrix = metrics.ConfusionMatrix { classes = 2 }
    matrix:update(ids { 0, 1 }, ids { 0, 0 })
    local rows, path = matrix:compute(), os.tmpname()
    ms.save(path, { counts = rows })
    assert.are.same({ { 1, 1 }, { 0, 0 } }, ms.load(path).counts)
    os.remove(path)
    assert.are.same({ { { 1, 1 }, { 0, 0 } } }, dist.all_gather_object(rows, { group = dist.self_group() }))
    assert.are.equal("@@@@\n    \nfrom 0 to 1\n", ms.plot.heatmap(rows):text { ascii = true })
    assert.are.same({ { 1, 1 }, { 0, 0 } }, ms.tensor(rows):tolist())
  end)

  it("a confusion matrix numbers classes from 0 where their names have no room", function()
    local matrix, names = metrics.ConfusionMatrix { classes = 10 }, {}
    for k = 1, 10 do names[k] = "class of kind " .. k end
    matrix:update(ids { 3 }, ids { 9 })
    local text = matrix:plot { labels = names }:text { ascii = true }
    assert.is_truthy(text:find("\n9  0  0  0  1  0  0  0  0  0  0\n   0  1  2  3  4  5  6  7  8  9\n", 1, true), text)
    assert.is_truthy(text:find("\n0 class of kind 1  1 class of kind 2", 1, true), text)
    assert.is_truthy(text:find("9 class of kind 10\n", 1, true), text)
  end)

  it("takes floating-point predictions of the classes' shape as probabilities of class 1", function()
    local function of(name, options, predictions, truth)
      local m = metrics[name](options)
      m:update(predictions, truth or ids { 1, 1, 0 })
      return m:compute()
    end
    for _, dtype in ipairs { "float32", "float64", "bfloat16" } do
      assert.are.equal(1, of("Accuracy", {}, ms.tensor({ 0.9, 0.8, 0.2 }, { dtype = dtype })))
    end
    assert.are.equal(1, of("Accuracy", {}, ms.tensor { { 0.9 }, { 0.2 } }, ids { { 1 }, { 0 } }))
    assert.are.equal(2 / 3, of("Accuracy", { threshold = 0.8 }, ms.tensor({ 0.9, 0.8, 0.2 }, { dtype = "float64" })))
    assert.are.equal(0.5, of("Accuracy", { ignore_index = 7 }, ms.tensor { 0.9, 0.8, 0.2 }, ids { 0, 1, 7 }))
    assert.are.same({ { 1, 0 }, { 0, 2 } }, of("ConfusionMatrix", { classes = 2 }, ms.tensor { 0.9, 0.8, 0.2 }))
    assert.are.same({ { 1, 0 }, { 1, 1 } },
      of("ConfusionMatrix", { classes = 2, threshold = 0.85 }, ms.tensor { 0.9, 0.8, 0.2 }))
    for _, name in ipairs { "Precision", "Recall", "F1" } do
      assert.are.same({ 1, 1 }, of(name, { classes = 2, average = "none" }, ms.tensor { 0.9, 0.8, 0.2 }))
    end
  end)

  it("Mean, Perplexity and R2 weigh batches by their sizes", function()
    local mean, perplexity, r2 = metrics.Mean(), metrics.Perplexity(), metrics.R2()
    mean:update(ms.tensor { 1, 2, 3 })
    mean:update(6, 3)
    assert.are.equal(4, mean:compute())
    perplexity:update(math.log(2), 10)
    perplexity:update(ms.tensor(math.log(8)), 10)
    assert.is_true(math.abs(perplexity:compute() - 4) < 1e-6)
    r2:update(ms.tensor { 1, 2 }, ms.tensor { 1, 3 })
    r2:update(ms.tensor { 3, 5 }, ms.tensor { 2, 6 })
    assert.is_true(math.abs(r2:compute() - (1 - 3 / 14)) < 1e-12)
  end)

  it("refuse what does not fit", function()
    refuses("Accuracy: predictions of shape [2] do not fit classes of shape [3]; expected scores [N, C, ...] or classes "
      .. "[N, ...]", function() metrics.Accuracy():update(ids { 0, 1 }, ids { 0, 1, 1 }) end)
    refuses("F1: the targets have class 3, expected classes from 0 to 2", function()
      metrics.F1 { classes = 3 }:update(ids { 0, 1 }, ids { 0, 3 })
    end)
    for text, call in pairs {
      ["Accuracy: 2 in predictions of shape [2], which are probabilities of class 1: expected numbers from 0 to 1; write "
        .. "sigmoid() for logits, long() for classes"] = { "Accuracy", {}, ms.tensor { 2, 0.5 }, ids { 0, 1 } },
      ["F1: -1 in predictions of shape [2], which are probabilities of class 1: expected numbers from 0 to 1; write "
        .. "sigmoid() for logits, long() for classes"] = { "F1", { classes = 2 }, ms.tensor { 1, -1 }, ids { 0, 1 } },
      ["Accuracy: the targets have class 3, but predictions of shape [3] are probabilities of class 1: expected "
        .. "targets 0 and 1; for more classes pass scores [N, C, ...]"] = { "Accuracy", {}, ms.rand(3), ids { 0, 3, -100 } },
      ["F1: the targets have class -2, but predictions of shape [3] are probabilities of class 1: expected "
        .. "targets 0 and 1; for more classes pass scores [N, C, ...]"] = { "F1", { classes = 2 }, ms.rand(3), ids { 1, -2, 0 } },
      ["Recall: predictions are float32 [2], expected int64 classes of that shape, or scores [N, 3, ...]"] =
        { "Recall", { classes = 3 }, ms.rand(2), ids { 0, 1 } },
      ["Accuracy: scores of shape [2, 1] have one class; expected a score for each class, or probabilities of class 1 of "
        .. "the classes' shape: write scores:squeeze(2):sigmoid() for logits"] = { "Accuracy", {}, ms.rand(2, 1), ids { 0, 1 } },
      ["ConfusionMatrix: scores of shape [2, 9] are for 9 classes, but option 'classes' is 10"] =
        { "ConfusionMatrix", { classes = 10 }, ms.rand(2, 9), ids { 0, 1 } },
      ["Accuracy: option 'threshold' is a number (2), expected a number from 0 to 1"] =
        { "Accuracy", { threshold = 2 }, ms.rand(2), ids { 0, 1 } },
    } do
      refuses(text, function() metrics[call[1]](call[2]):update(call[3], call[4]) end)
    end
    refuses("F1: option 'classes' is missing", function() metrics.F1() end)
    refuses("Mean: load_state_dict: 3 sums, expected 2", function()
      metrics.Mean():load_state_dict { sums = { 1, 2, 3 }, updates = 1 }
    end)
    refuses("R2: predictions have shape [2], targets have shape [2, 1]; expected equal shapes", function()
      metrics.R2():update(ms.ones(2), ms.ones(2, 1))
    end)
  end)
end)

describe("EarlyStopping", function()
  it("stops at the update without improvement number `patience`, and continues from its state", function()
    local s = metrics.EarlyStopping { patience = 2, min_delta = 0.1 }
    assert.are.same({ false, true }, { s:update(1) })
    assert.are.same({ false, false }, { s:update(0.95) })
    local t = metrics.EarlyStopping { patience = 2, min_delta = 0.1 }
    t:load_state_dict(s:state_dict())
    assert.are.same({ true, false }, { t:update(0 / 0) })
    assert.are.same({ false, true }, { s:update(0.8) })
    assert.are.same({ false, false }, { s:update(0.8) })      -- an improvement begins another count
    assert.are.same({ true, false }, { s:update(0.8) })
    for patience = 0, 1 do
      local up = metrics.EarlyStopping { mode = "max", patience = patience }
      assert.is_false((up:update(1)))
      assert.is_true((up:update(1)))
    end
  end)
end)

for _, n in ipairs { 2, 3 } do
  ranks.describe(n, "metrics over ranks", function(rank, world)
    it("are those of all data, also where ranks have different numbers of batches", function()
      local a, c = metrics.Accuracy(), metrics.ConfusionMatrix { classes = 2 }
      for k = 0, rank do
        a:update(ids { 0, 1 }, ids { 0, k % 2 })
        c:update(ids { 0, 1 }, ids { 0, k % 2 })
      end
      local hits, total = 0, 0
      for r = 0, world - 1 do
        for k = 0, r do
          hits, total = hits + 1 + k % 2, total + 2
        end
      end
      assert.are.equal(hits / total, a:compute())
      local m = c:compute()
      assert.are.equal(total, m[1][1] + m[1][2] + m[2][1] + m[2][2])
      assert.are.equal(hits, m[1][1] + m[2][2])
    end)
    it("are the numbers of one process with the data of all", function()
      local made = {
        { metrics.Accuracy { top_k = 2 }, metrics.Accuracy { top_k = 2, group = dist.self_group() }, "classes" },
        { metrics.Precision { classes = 3 }, metrics.Precision { classes = 3, group = dist.self_group() }, "classes" },
        { metrics.Recall { classes = 3 }, metrics.Recall { classes = 3, group = dist.self_group() }, "classes" },
        { metrics.F1 { classes = 3, average = "none" }, metrics.F1 { classes = 3, average = "none", group = dist.self_group() },
          "classes" },
        { metrics.R2(), metrics.R2 { group = dist.self_group() }, "numbers" },
        { metrics.Perplexity(), metrics.Perplexity { group = dist.self_group() }, "losses" },
        { metrics.Mean(), metrics.Mean { group = dist.self_group() }, "losses" },
      }
      for r = 0, world - 1 do
        ms.manual_seed(5 + r)
        local count = 4 + r
        local scores, classes, values = ms.randn(count, 3), ms.randint(0, 3, { count }), ms.randn(count)
        local data = { classes = { scores, classes }, numbers = { values, values + 0.3 * ms.randn(count) },
          losses = { values:abs():sum():item(), count } }
        for _, m in ipairs(made) do
          m[2]:update(unpack(data[m[3]]))
          if r == rank then m[1]:update(unpack(data[m[3]])) end
        end
      end
      for k, m in ipairs(made) do
        local one, all = m[2]:compute(), m[1]:compute()
        if type(one) == "number" then one, all = { one }, { all } end
        for j = 1, #one do assert.near(one[j], all[j], 1e-12, tostring(k)) end
      end
    end)
    it("continue from their state, which is that of all ranks", function()
      local a, b = metrics.Accuracy(), metrics.Accuracy()
      a:update(ids { 0, 1, 1 }, ids { 0, rank, 0 })
      local sd = a:state_dict()
      assert.are.same({ world + 1, 3 * world, world }, { sd.sums[1], sd.sums[2], sd.updates })
      b:load_state_dict(sd)
      a:update(ids { rank }, ids { 0 })
      b:update(ids { rank }, ids { 0 })
      assert.are.equal(a:compute(), b:compute())
    end)
    it("of one rank's group stay on that rank", function()
      local a = metrics.Mean { group = dist.self_group() }
      a:update(rank)
      assert.are.equal(rank, a:compute())
    end)
  end)
end
