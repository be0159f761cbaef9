-- SPDX-License-Identifier: MIT
--- lua/moonshard/models/unet.lua compared with PyTorch's U-Net on the same weights, and what it refuses.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local raises = require "spec.support.raises"
local UNet = require "moonshard.models.unet"

-- Sines of the position between low and high, as in cases.py.
local function wave(shape, offset, low, high, freq)
  golden.phase, golden.dtype = 0, "float64"
  return golden.wave(shape, offset, (low + high) / 2, (high - low) / 2, freq)
end

-- Fills every parameter as make_unet.py does.
local function fill(model)
  local k = 0
  ms.no_grad(function()
    for name, p in model:named_parameters() do
      local a = p.ndim > 1 and 1 / math.sqrt(p:numel() / p:size(1)) or 0.1
      local c = p.ndim == 1 and name:find "weight$" and 1 or 0
      p:copy_(wave(p.shape, 1.3 * k + 0.5, c - a, c + a, 0.37))
      k = k + 1
    end
  end)
end

local function small(up, dtype)
  return UNet { channels = 2, classes = 3, widths = { 4, 6, 8 }, up = up, dtype = dtype }
end

describe("golden U-Net", function()
  local reference = golden.load "unet"
  for up, case in ms.sorted_pairs(reference.cases) do
    it("has PyTorch's names and logits, in evaluation and in training: " .. up, function()
      local model = small(up, "float64")
      local names = {}
      for name in model:named_parameters() do names[#names + 1] = name end
      assert.are.equal(#case.names, #names)
      for k, theirs in ipairs(case.names) do assert.are.equal(golden.our_name(theirs), names[k]) end
      fill(model)
      local x = wave({ 2, 2, 13, 10 }, 0.2, -1, 1, 0.13)
      golden.close_list("evaluation", case.outputs[1], model:eval()(x), 1e-8, 1e-10)
      golden.close_list("training", case.outputs[2], model:train()(x), 1e-8, 1e-10)
    end)
  end

  it("learns to mark the bright half of an image", function()
    ms.manual_seed(1)
    local model = small "transposed"
    local x = ms.rand(2, 2, 8, 8)
    local marks = x:narrow(2, 1, 1):squeeze(2):gt(0.5):long()
    local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.01 })
    local first, last
    for _ in ms.steps(20) do
      local loss = ms.nn.F.cross_entropy(model(x), marks)
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      first, last = first or loss:item(), loss:item()
    end
    assert.is_true(last < 0.7 * first, ("%g, then %g"):format(first, last))
  end)

  it("refuses images that are too small, and widths that make no stages", function()
    raises("UNet: images have shape [1, 2, 3, 8], expected [B, 2, H, W] with H and W from 4", small "bilinear",
      ms.rand(1, 2, 3, 8))
    raises("UNet: option 'widths' is a table, expected a list of at least 2 numbers of channels", UNet, { widths = { 4 } })
  end)
end)
