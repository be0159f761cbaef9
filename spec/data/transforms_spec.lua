-- SPDX-License-Identifier: MIT
--- Transforms and the distributed sampler, compared with torchvision and PyTorch (spec/golden/data/make_data.py), and
--- the transforms that draw random numbers.
local cjson = require "cjson"
local ms = require "moonshard"
local process = require "spec.support.process"
local raises = require "spec.support.raises"
local data, transforms = ms.data, ms.data.transforms

local golden = cjson.decode(process.read(process.root .. "/spec/golden/data/data.json"))

local function image(shape, dtype)
  local list, n = {}, shape[1] * shape[2] * shape[3]
  for k = 0, n - 1 do list[k + 1] = k * 37 % 251 end
  return ms.tensor(list, { dtype = dtype }):reshape(shape)
end

describe("transforms", function()
  for k, case in ipairs(golden.transforms) do
    it(("%d: %s %s of %s is torchvision's"):format(k, case.name, cjson.encode(case.arguments), case.dtype), function()
      local x = image(case.shape, case.dtype)
      if case.scale ~= 1 then x = x / case.scale end
      local out = transforms[case.name](unpack(case.arguments))(x)
      local expected = ms.tensor(case.out, { dtype = "float64" }):reshape(case.out_shape)
      -- torchvision resizes uint8 in fixed point, which rounds some values otherwise, and truncates turned hues. Turned
      -- pixels are up to 2e-4 apart: the places from which they come are rounded.
      local room = (case.name == "Resize" or case.name == "ColorJitter") and case.dtype == "uint8" and 1 or 1e-3
      assert.are.equal(tostring(expected.shape), tostring(out.shape))
      assert.is_true((out:double() - expected):abs():max():item() <= room)
    end)
  end

  it("crop at random: at every place, with padding, to the given size", function()
    local x, seen, count = image({ 1, 4, 4 }, "float32"), {}, 0
    local crop = transforms.RandomCrop { 3, 2 }
    ms.manual_seed(1)
    for _ = 1, 200 do
      local y = crop(x)
      assert.are.equal("[1, 3, 2]", tostring(y.shape))
      local first = y:tolist()[1][1][1]
      if not seen[first] then count = count + 1 end
      seen[first] = true
    end
    assert.are.equal(6, count)
    local padded = transforms.RandomCrop(8, { padding = 2, fill = 9 })(x)
    assert.is_true(padded:equal(transforms.Pad(2, { fill = 9 })(x)))
  end)

  it("mirror with the given probability", function()
    local x = image({ 1, 2, 3 }, "uint8")
    assert.are.same({ { { 74, 37, 0 }, { 185, 148, 111 } } }, transforms.RandomHorizontalFlip(1)(x):tolist())
    assert.are.same({ { { 111, 148, 185 }, { 0, 37, 74 } } }, transforms.RandomVerticalFlip(1)(x):tolist())
    assert.is_true(transforms.RandomHorizontalFlip(0)(x):equal(x))
    local flip, n = transforms.RandomHorizontalFlip(), 0
    ms.manual_seed(1)
    for _ = 1, 1000 do
      if not flip(x):equal(x) then n = n + 1 end
    end
    assert.is_true(math.abs(n - 500) < 80, n)
  end)

  it("turn by an angle, counter-clockwise, and move and enlarge", function()
    local x = image({ 2, 3, 3 }, "uint8")
    assert.is_true(transforms.RandomRotation { 90, 90 } (x):equal(x:transpose(2, 3):flip(2)))
    assert.is_true(transforms.RandomRotation { -180, -180 } (x):equal(x:flip({ 2, 3 })))
    assert.is_true(transforms.RandomRotation(0)(x):equal(x))
    local wide = ms.zeros(1, 3, 5)
    wide[1][2][4] = 1                                              -- right of the middle: goes above it
    local turned = transforms.RandomRotation({ 90, 90 }, { fill = 7 })(wide)
    assert.are.same({ { { 7, 0, 1, 0, 7 }, { 7, 0, 0, 0, 7 }, { 7, 0, 0, 0, 7 } } }, turned:tolist())
    local seen = {}
    ms.manual_seed(1)
    for _ = 1, 60 do
      local y = transforms.RandomAffine(0, { translate = { 0.4, 0 } })(wide):squeeze(1)
      for k, v in ipairs(y[2]:tolist()) do
        if v == 1 then seen[k] = true end
      end
    end
    assert.are.same({ false, true, true, true, true }, { seen[1] or false, seen[2], seen[3], seen[4], seen[5] })
    local big = transforms.RandomAffine(0, { scale = { 3, 3 } })(image({ 1, 3, 3 }, "float32"))
    assert.are.same({ 148, 148 }, { big:min():item(), big:max():item() })     -- the pixel in the middle
  end)

  it("change brightness, contrast and saturation within the range of the dtype", function()
    local x = ms.tensor({ 0, 100, 200 }, { dtype = "uint8" }):reshape(3, 1, 1):expand(3, 1, 2):contiguous()
    local function jitter(o) return transforms.ColorJitter(o)(x):narrow(3, 1, 1):flatten():tolist() end
    assert.are.same({ 0, 150, 255 }, jitter { brightness = { 1.5, 1.5 } })
    local grey = 100 * 0.587 + 200 * 0.114
    local function toward(factor)
      local list = {}
      for k, v in ipairs { 0, 100, 200 } do list[k] = math.floor(v * factor + grey * (1 - factor) + 0.5) end
      return list
    end
    assert.are.same(toward(0), jitter { saturation = { 0, 0 } })
    assert.are.same(toward(0.5), jitter { saturation = { 0.5, 0.5 } })
    assert.are.same(toward(0.5), jitter { contrast = { 0.5, 0.5 } })       -- its pixels have one mean
    assert.is_true(transforms.ColorJitter {} (x):equal(x))
    local one, low, high = ms.full({ 1, 1, 1 }, 0.5), 1, 0
    ms.manual_seed(1)
    for _ = 1, 200 do
      local v = transforms.ColorJitter { brightness = 0.4 } (one):item()
      low, high = math.min(low, v), math.max(high, v)
    end
    assert.is_true(low >= 0.3 and low < 0.32 and high <= 0.7 and high > 0.68, ("%g %g"):format(low, high))
  end)

  it("erase a part, make grey, and apply others with the given probability", function()
    local x = ms.ones(3, 8, 8)
    ms.manual_seed(1)
    for _ = 1, 50 do
      local y = transforms.RandomErasing(1, { scale = { 0.1, 0.2 }, ratio = { 0.5, 2 }, value = 5 })(x)
      local rows, columns = y[1]:eq(5):any(2):sum():item(), y[1]:eq(5):any(1):sum():item()
      assert.are.equal(3 * rows * columns, y:eq(5):sum():item())       -- one rectangle in all channels
      assert.is_true(rows * columns >= 4 and rows * columns <= 16)
    end
    assert.is_true(transforms.RandomErasing(0)(x):equal(x))
    local colours = image({ 3, 2, 2 }, "uint8")
    assert.is_true(transforms.RandomGrayscale(1)(colours):equal(transforms.Grayscale(3)(colours)))
    assert.is_true(transforms.RandomGrayscale(0)(colours):equal(colours))
    local n, apply = 0, transforms.RandomApply({ function(t) return t + 1 end, function(t) return t * 2 end }, 0.3)
    for _ = 1, 500 do
      local v = apply(ms.ones(1, 1)):item()
      assert.is_true(v == 1 or v == 4)
      if v == 4 then n = n + 1 end
    end
    assert.is_true(math.abs(n - 150) < 45, n)
  end)

  it("refuse ranges and images that make no sense", function()
    for wanted, fn in pairs {
      ["RandomRotation: argument 1 is nil, expected a number from 0 or { low, high }"] = function() transforms.RandomRotation() end,
      ["RandomAffine: option 'scale': the least factor is a number (0), expected a number > 0"] = function()
        transforms.RandomAffine(0, { scale = { 0, 1 } })
      end,
      ["ColorJitter: option 'contrast': the least factor is a number (-1), expected a number from 0"] = function()
        transforms.ColorJitter { contrast = { -1, 1 } }
      end,
      ["ColorJitter: option 'hue' is a number (0.6), expected a number from -0.5 to 0.5"] = function()
        transforms.ColorJitter { hue = { 0, 0.6 } }
      end,
      ["ColorJitter: option 'hue' is a number (2), expected a number from -0.5 to 0.5"] = function()
        transforms.ColorJitter { hue = 2 }
      end,
      ["RandomAffine: option 'shear': along y is a table, expected a number from 0 or { low, high }"] = function()
        transforms.RandomAffine(0, { shear = { 0, 5, 9, 7 } })
      end,
      ["RandomAffine: option 'shear' is a table, expected a number from 0, { low, high } or { low x, high x, low y, high y }"] = function()
        transforms.RandomAffine(0, { shear = { 1, 2, 3 } })
      end,
      ["ColorJitter: the image has shape [4, 4], expected [..., 1 or 3, H, W]"] = function()
        transforms.ColorJitter {} (ms.ones(4, 4))
      end,
      ["Compose: argument 1 is a function, expected a list of functions"] = function()
        transforms.Compose(transforms.ToTensor())
      end,
      ["unknown name in data.transforms: 'Lambda'; a transform is a function: write function(x) ... end"] = function()
        return transforms.Lambda
      end,
    } do
      local ok, text = pcall(fn)
      assert.is_false(ok)
      assert.truthy(text:find(wanted, 1, true), text)
    end
  end)

  it("resize a random part, of any size of image", function()
    local crop = transforms.RandomResizedCrop(6, { scale = { 0.2, 1 } })
    for _, shape in ipairs { { 3, 20, 30 }, { 1, 2, 40 }, { 1, 1, 1 } } do
      local x = image(shape, "float32")
      for _ = 1, 20 do
        local y = crop(x)
        assert.are.equal(("[%d, 6, 6]"):format(shape[1]), tostring(y.shape))
        assert.is_true(y:min():item() >= -1e-3 and y:max():item() <= 250.001)
      end
    end
  end)

  it("run in a loader, with and without workers, with the same random numbers", function()
    local x = ms.randint(0, 256, { 12, 3, 10, 10 }):to "uint8"
    local augment = transforms.Compose { transforms.RandomCrop(8, { padding = 1 }), transforms.RandomHorizontalFlip(),
      transforms.ToTensor(), transforms.Normalize({ 0.5, 0.4, 0.3 }, 0.25) }
    local set = data.Dataset { size = 12, get = function(i) return augment(x[i]), i end }
    local sums = {}
    for workers = 0, 1 do
      local loader = data.DataLoader(set, { batch_size = 5, shuffle = true, seed = 2, workers = workers })
      local list = {}
      for images in loader:epoch() do list[#list + 1] = images:tolist() end
      loader:close()
      sums[workers] = list
    end
    assert.are.same(sums[0], sums[1])
  end)

  it("refuse what they cannot use, by name", function()
    local x = image({ 3, 4, 4 }, "uint8")
    raises("RandomCrop: the image has 4 x 4 pixels, expected at least 5 x 5", transforms.RandomCrop(5), x)
    raises("Normalize: the image has dtype uint8, expected floating point; use ToTensor first",
      transforms.Normalize(0.5, 0.5), x)
    raises("Normalize: argument 2 has 2 numbers, but the image has 3 channels", transforms.Normalize(0.5, { 1, 2 }),
      x:float())
    raises("Normalize: argument 2: number 1 is 0, expected a number other than 0", transforms.Normalize, 0.5, 0)
    raises("RandomVerticalFlip: argument 1 is a number (2), expected a number from 0 to 1", transforms.RandomVerticalFlip, 2)
    raises("Resize: size is a number (0), expected a whole number from 1", transforms.Resize, 0)
    raises("Pad: argument 1 is a table, expected one, two or four numbers", transforms.Pad, { 1, 2, 3 })
  end)
end)

describe("DistributedSampler", function()
  for _, case in ipairs(golden.samplers) do
    it(("of %d items for %d ranks%s is PyTorch's"):format(case.items, case.num_replicas, case.drop_last and ", drop_last"
      or ""), function()
      for rank, expected in ipairs(case.ranks) do
        local list = data.DistributedSampler(case.items,
          { num_replicas = case.num_replicas, rank = rank - 1, shuffle = false, drop_last = case.drop_last }):tolist()
        for k, i in ipairs(list) do list[k] = i - 1 end
        assert.are.same(expected, list)
      end
    end)
  end
end)
