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
      local out = transforms[case.name](unpack(case.arguments))(image(case.shape, case.dtype))
      local expected = ms.tensor(case.out, { dtype = "float64" }):reshape(case.out_shape)
      -- PyTorch resizes uint8 in fixed point, which rounds some values otherwise.
      local room = case.name == "Resize" and case.dtype == "uint8" and 1 or 2e-4
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
