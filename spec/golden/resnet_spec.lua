-- SPDX-License-Identifier: MIT
--- ResNet-18 and ResNet-50 compared with torchvision's on the same weights: names, logits in training, and in
--- evaluation with the statistics of that batch.
local ms = require "moonshard"
local golden = require "spec.support.golden"

-- As `noise` of make_resnet.py, (17 i² + 7919 i + 101 k) modulo 10007, from whole numbers that float64 holds exactly; in
-- place, because ResNet-50 has 25 million of them.
local function noise(n, k)
  local i = ms.arange(0, n, { dtype = "float64" })
  return (i * 17):add_(7919):mul_(i):add_(101 * k):remainder_(10007):div_(10007):sub_(0.5)
end

-- As `fill` of make_resnet.py.
local function fill(model)
  local k = 0
  ms.no_grad(function()
    for name, p in model:named_parameters() do
      local c, a = 0, 0.1
      if p.ndim > 1 then a = math.sqrt(24 * p:size(1) / p:numel()) elseif name:find "weight$" then c = 1 end
      ms.scope(function() p:copy_(noise(p:numel(), k):mul_(a):add_(c):reshape(p.shape)) end)
      k = k + 1
    end
  end)
  return model
end

local reference = golden.load "resnet"

describe("golden ResNet", function()
  for _, case in ipairs {
    { 18, "float64", 1e-8 }, { 18, "float32", 1e-4 }, { 50, "float32", 1e-4 },
  } do
    local depth, dtype, tolerance = unpack(case)
    local expected = reference.cases[tostring(depth)]
    it(("has torchvision's names and logits: %d layers in %s, to %g"):format(depth, dtype, tolerance), function()
      ms.scope(function()
        local m = require "moonshard.models.resnet" { depth = depth, classes = 10, dtype = dtype }
        for kind, iterator in pairs { parameters = m.named_parameters, buffers = m.named_buffers } do
          local names = {}
          for name in iterator(m) do names[#names + 1] = name end
          for k, name in ipairs(expected[kind]) do assert.are.equal(golden.our_name(name), names[k]) end
          assert.are.equal(#expected[kind], #names)
        end
        fill(m)
        local x = (noise(3 * 3 * 64 * 64, 999) * 4):reshape(3, 3, 64, 64):to(dtype)
        ms.no_grad(function()
          golden.close_list("training", expected.training, m(x), tolerance, 2 * tolerance)
          m:eval()
          golden.close_list("evaluation", expected.evaluation, m(x), tolerance, 2 * tolerance)
          local last = m.layer4[#m.layer4].bn2.running_var
          golden.close_list("variance", expected.variance, last:narrow(1, 1, 16), tolerance, 0)
        end)
      end)
    end)
  end
end)
