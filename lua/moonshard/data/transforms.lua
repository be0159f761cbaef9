-- SPDX-License-Identifier: MIT
--- transforms: functions that change images [channels, H, W], with torchvision's names. Each call makes such a
--- function; random ones draw from the generator of ms.manual_seed, which a loader seeds for each item.
---
---   local augment = transforms.Compose { transforms.RandomCrop(32, { padding = 4 }),
---     transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(0.5, 0.25) }
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local F = require "moonshard.nn.functional".F
local opts = require "moonshard.core.opts"
local cat, where = require "moonshard.tensor.shape".cat, require "moonshard.tensor.ops".where
local tensor = require "moonshard.tensor"

local floor, max, min = math.floor, math.max, math.min

local M = {}

local function uniform() return create.rand(1):item() end
-- A random whole number from low to high.
local function whole(low, high) return min(high, low + floor(uniform() * (high - low + 1))) end

local function image_of(x, who)
  opts.expect(x, tensor.a_tensor, "%s: image", who)
  if x.ndim < 2 then errors.raise("%s: the image has shape %s, expected [..., H, W]", who, tostring(x.shape)) end
  return x:size(-2), x:size(-1)
end

-- Height and width: one number for both, or a list of two.
local function pair(size, who)
  if opts.is_plain(size) then
    opts.need(#size == 2, size, "a whole number or { height, width }", "%s: size", who)
    return opts.expect(size[1], opts.whole_from(1), "%s: height", who), opts.expect(size[2], opts.whole_from(1),
      "%s: width", who)
  end
  opts.expect(size, opts.whole_from(1), "%s: size", who)
  return size, size
end

local function probability(p, who)
  if p == nil then return 0.5 end
  return opts.expect(p, opts.kind("a number from 0 to 1", function(v) return type(v) == "number" and v >= 0 and v <= 1
    end), "%s: argument 1", who)
end

--- Applies functions one after the other.
---@param list function[]  each from image to image
---@return fun(image: Tensor): Tensor
function M.Compose(list)
  opts.need(opts.is_plain(list), list, "a list of functions", "Compose: argument 1")
  for k, fn in ipairs(list) do opts.expect(fn, opts.fn, "Compose: function %d", k) end
  return function(x)
    for _, fn in ipairs(list) do x = fn(x) end
    return x
  end
end

--- Images of uint8 from 0 to 255 as floating point from 0 to 1; [H, W] becomes [1, H, W].
---@param dtype? string  default: the default dtype
---@return fun(image: Tensor): Tensor  other dtypes are converted without a change of their range
function M.ToTensor(dtype)
  if dtype ~= nil then opts.expect(dtype, opts.string, "ToTensor: argument 1") end
  local dtypes = require "moonshard.core.dtypes"
  return function(x)
    image_of(x, "ToTensor")
    if x.ndim == 2 then x = x:unsqueeze(1) end
    local to = dtype or dtypes.default_dtype()
    return x.dtype == "uint8" and x:to(to) / 255 or x:to(to)
  end
end

local function column(values, who, k, dtype)
  if type(values) == "number" then values = { values } end
  opts.need(type(values) == "table" and #values > 0, values,
    "a number, or a list of one number per channel; mean and std are given by position", "%s: argument %d", who, k)
  for j, v in ipairs(values) do opts.expect(v, opts.number, "%s: argument %d: number %d", who, k, j) end
  return create.tensor(values, { dtype = dtype }):reshape(#values, 1, 1)
end

--- Subtracts a mean and divides by a standard deviation, channel by channel.
---@param mean number|number[]  one for each channel, or one for all
---@param std number|number[]  the same, not 0
---@return fun(image: Tensor): Tensor  for images of floating point
function M.Normalize(mean, std)
  local who = "Normalize"
  column(mean, who, 1, "float32")
  column(std, who, 2, "float32")
  for k, v in ipairs(type(std) == "number" and { std } or std) do
    if v == 0 then errors.raise("Normalize: argument 2: number %d is 0, expected a number other than 0", k) end
  end
  return function(x)
    image_of(x, who)
    if not x.dtype:find "float" then
      errors.raise("Normalize: the image has dtype %s, expected floating point; use ToTensor first", x.dtype)
    end
    local m, s = column(mean, who, 1, x.dtype):to(x.device), column(std, who, 2, x.dtype):to(x.device)
    for k, t in ipairs { m, s } do
      local n, channels = t:size(1), x.ndim > 2 and x:size(-3) or 1
      if n ~= 1 and n ~= channels then
        errors.raise("Normalize: argument %d has %d numbers, but the image has %d channel%s", k, n, channels, channels == 1 and "" or "s")
      end
    end
    return (x - m) / s
  end
end

-- ---- padding, crops and flips ----------------------------------------------------------------------------

local function crop(x, top, left, height, width) return x:narrow(-2, top + 1, height):narrow(-1, left + 1, width) end

--- Pads an image.
---@param padding integer|integer[]  pixels on each side; or left and right, top and bottom; or left, top, right, bottom
---@param given? {fill: number}  fill: the value of the new pixels
---@return fun(image: Tensor): Tensor
function M.Pad(padding, given)
  local o = opts("Pad", given, { fill = 0 })
  local p = type(padding) == "number" and { padding } or opts.expect(padding, opts.table, "Pad: argument 1")
  for k, v in ipairs(p) do opts.expect(v, opts.whole_from(0), "Pad: number %d", k) end
  opts.need(#p == 1 or #p == 2 or #p == 4, padding, "one, two or four numbers", "Pad: argument 1")
  local left, top = p[1], p[2] or p[1]
  local right, bottom = p[3] or left, p[4] or top
  return function(x)
    local height, width = image_of(x, "Pad")
    local shape = {}
    for d = 1, x.ndim do shape[d] = x:size(d) end
    shape[x.ndim - 1], shape[x.ndim] = height + top + bottom, width + left + right
    return autograd.no_grad(function()
      local out = create.full(shape, o.fill, { dtype = x.dtype, device = x.device })
      crop(out, top, left, height, width):copy_(x)
      return out
    end)
  end
end

--- The middle of an image, which is padded with 0 if it is smaller.
---@param size integer|integer[]  one number for both sides, or { height, width }
---@return fun(image: Tensor): Tensor
function M.CenterCrop(size)
  local tall, wide = pair(size, "CenterCrop")
  return function(x)
    local height, width = image_of(x, "CenterCrop")
    local down, across = max(0, tall - height), max(0, wide - width)
    if down + across > 0 then
      x = M.Pad { floor(across / 2), floor(down / 2), math.ceil(across / 2), math.ceil(down / 2) } (x)
      height, width = image_of(x, "CenterCrop")
    end
    -- As torchvision: half of an odd number is rounded to the even one of its neighbours.
    local function half(n) return n % 4 == 3 and (n + 1) / 2 or floor(n / 2) end
    return crop(x, half(height - tall), half(width - wide), tall, wide)
  end
end

--- A random part of an image. Errors: the image is smaller than the part.
---@param size integer|integer[]  one number for both sides, or { height, width }
---@param given? {padding: integer|integer[], fill: number}
---   padding: pixels that are added before cropping, as Pad takes them; fill: their value
---@return fun(image: Tensor): Tensor
function M.RandomCrop(size, given)
  local tall, wide = pair(size, "RandomCrop")
  local o = opts("RandomCrop", given, { padding = opts.any, fill = 0 })
  local pad = o.padding and M.Pad(o.padding, { fill = o.fill })
  return function(x)
    if pad then x = pad(x) end
    local height, width = image_of(x, "RandomCrop")
    if height < tall or width < wide then
      errors.raise("RandomCrop: the image has %d x %d pixels, expected at least %d x %d", height, width, tall, wide)
    end
    return crop(x, whole(0, height - tall), whole(0, width - wide), tall, wide)
  end
end

local function flipped(x, d)
  local n = x:size(d)
  return x:index_select(d, create.arange(n - 1, -1, -1, { dtype = "int64", device = x.device }))
end

--- Mirrors an image left to right, at random.
---@param p? number  the probability, from 0 to 1 (default: 0.5)
---@return fun(image: Tensor): Tensor
function M.RandomHorizontalFlip(p)
  p = probability(p, "RandomHorizontalFlip")
  return function(x)
    image_of(x, "RandomHorizontalFlip")
    return uniform() < p and flipped(x, -1) or x
  end
end

--- Mirrors an image upside down, at random.
---@param p? number  the probability, from 0 to 1 (default: 0.5)
---@return fun(image: Tensor): Tensor
function M.RandomVerticalFlip(p)
  p = probability(p, "RandomVerticalFlip")
  return function(x)
    image_of(x, "RandomVerticalFlip")
    return uniform() < p and flipped(x, -2) or x
  end
end

-- ---- sizes -----------------------------------------------------------------------------------------------

-- Each of the `count` rows has the weights of the n input pixels in one output pixel (as PyTorch's interpolate with
-- align_corners = false).
local function weights(n, count, how)
  local scale, rows = n / count, {}
  for i = 0, count - 1 do
    local row = {}
    for j = 1, n do row[j] = 0 end
    if how == "nearest" then
      row[min(floor(i * scale), n - 1) + 1] = 1
    elseif how == "plain" then
      local at = max(scale * (i + 0.5) - 0.5, 0)
      local low = min(floor(at), n - 1)
      local part = at - low
      row[low + 1] = 1 - part
      row[min(low + 1, n - 1) + 1] = row[min(low + 1, n - 1) + 1] + part
    else                                                  -- a triangle filter over the pixels in output pixel i
      local wide = max(scale, 1)
      local middle, sum = scale * (i + 0.5), 0
      local first, last = max(floor(middle - wide + 0.5), 0), min(floor(middle + wide + 0.5), n)
      for j = first, last - 1 do
        local w = max(0, 1 - math.abs((j - middle + 0.5) / wide))
        row[j + 1], sum = w, sum + w
      end
      for j = first, last - 1 do row[j + 1] = row[j + 1] / sum end
    end
    rows[i + 1] = row
  end
  return rows
end

local cache, cached = {}, 0
local function matrix(n, count, how)
  local key = ("%d %d %s"):format(n, count, how)
  if not cache[key] then
    if cached >= 64 then cache, cached = {}, 0 end
    cache[key], cached = weights(n, count, how), cached + 1
  end
  return cache[key]
end

local INTERPOLATIONS = { "bilinear", "nearest" }

local function resized(x, height, width, how)
  local tall, wide = image_of(x, "Resize")
  if tall == height and wide == width then return x end
  return autograd.no_grad(function()
    local values = x.dtype == "float64" and x or x:float()
    local function weights_of(n, count)
      return create.tensor(matrix(n, count, how), { dtype = values.dtype }):to(x.device)
    end
    local out = weights_of(tall, height):matmul(values):matmul(weights_of(wide, width):t():contiguous())
    if x.dtype == "uint8" then out = (out + 0.5):clamp(0, 255) end
    return out:to(x.dtype)
  end)
end

--- Changes the size of an image.
---@param size integer|integer[]  { height, width }; or the shorter side, which keeps the ratio of the sides
---@param given? {interpolation: string, antialias: boolean}
---   interpolation: "bilinear" or "nearest"; antialias: averages over the pixels that fall into one when the image
---   becomes smaller, as torchvision does
---@return fun(image: Tensor): Tensor  uint8 is rounded
function M.Resize(size, given)
  local o = opts("Resize", given, { interpolation = opts.one_of(INTERPOLATIONS, "bilinear"), antialias = true })
  local tall, wide = pair(size, "Resize")
  local keep = not opts.is_plain(size)
  local how = o.interpolation == "nearest" and "nearest" or o.antialias and "antialias" or "plain"
  return function(x)
    local height, width = image_of(x, "Resize")
    if not keep then return resized(x, tall, wide, how) end
    if height <= width then return resized(x, size, floor(size * width / height), how) end
    return resized(x, floor(size * height / width), size, how)
  end
end

--- A part of an image at a random place, of random area and ratio of sides, resized. If none of 10 drawn parts fits,
--- it is the largest part in the middle that has a valid ratio.
---@param size integer|integer[]  one number for both sides, or { height, width }
---@param given? {scale: number[], ratio: number[], interpolation: string, antialias: boolean}
---   scale: least and largest share of the area; ratio: least and largest width over height; interpolation, antialias:
---   as for Resize
---@return fun(image: Tensor): Tensor
function M.RandomResizedCrop(size, given)
  local o = opts("RandomResizedCrop", given, { scale = { 0.08, 1 }, ratio = { 3 / 4, 4 / 3 },
    interpolation = opts.one_of(INTERPOLATIONS, "bilinear"), antialias = true })
  local tall, wide = pair(size, "RandomResizedCrop")
  local resize = M.Resize({ tall, wide }, { interpolation = o.interpolation, antialias = o.antialias })
  return function(x)
    local height, width = image_of(x, "RandomResizedCrop")
    for _ = 1, 10 do
      local area = height * width * (o.scale[1] + uniform() * (o.scale[2] - o.scale[1]))
      local low, high = math.log(o.ratio[1]), math.log(o.ratio[2])
      local ratio = math.exp(low + uniform() * (high - low))
      local w, h = floor(math.sqrt(area * ratio) + 0.5), floor(math.sqrt(area / ratio) + 0.5)
      if w >= 1 and h >= 1 and w <= width and h <= height then
        return resize(crop(x, whole(0, height - h), whole(0, width - w), h, w))
      end
    end
    local ratio = max(o.ratio[1], min(o.ratio[2], width / height))       -- the largest part that has a valid ratio
    local w, h = min(width, floor(height * ratio + 0.5)), min(height, floor(width / ratio + 0.5))
    return resize(crop(x, floor((height - h) / 2), floor((width - w) / 2), h, w))
  end
end

--- Converts colours to grey: 0.2989 red + 0.587 green + 0.114 blue.
---@param channels? 1|3  channels of the result (default: 1)
---@return fun(image: Tensor): Tensor  for images of 1 or 3 channels
function M.Grayscale(channels)
  channels = channels == nil and 1 or channels
  opts.need(channels == 1 or channels == 3, channels, "1 or 3", "Grayscale: argument 1")
  return function(x)
    image_of(x, "Grayscale")
    if x.ndim < 3 or x:size(-3) ~= 3 and x:size(-3) ~= 1 then
      errors.raise("Grayscale: the image has shape %s, expected [..., 1 or 3, H, W]", tostring(x.shape))
    end
    local shape = {}
    for d = 1, x.ndim do shape[d] = -1 end
    shape[x.ndim - 2] = channels
    if x:size(-3) == 1 then return x:expand(shape) end
    local values = x:float()
    local grey = values:narrow(-3, 1, 1) * 0.2989 + values:narrow(-3, 2, 1) * 0.587 + values:narrow(-3, 3, 1) * 0.114
    return grey:to(x.dtype):expand(shape)
  end
end

-- ---- rotations and affine maps ----------------------------------------------------------------------------

-- The range { low, high } that an argument or option gives: that list, or a number v for { -v, v }.
local function range(v, who, label)
  local list = type(v) == "number" and { -v, v } or v
  opts.need(opts.is_plain(list) and #list == 2 and type(list[1]) == "number" and type(list[2]) == "number"
    and list[1] <= list[2], v, "a number from 0 or { low, high }", "%s: %s", who, label)
  return list
end

local function between(list) return list[1] + uniform() * (list[2] - list[1]) end

-- The image turned by an angle in degrees, clockwise around its middle, slanted by two angles, enlarged by scale and
-- moved right and down by pixels. Each pixel is read at the place from which it comes: the inverse of torchvision's
-- matrix.
local function moved(x, who, move, o)
  local height, width = image_of(x, who)
  local shape = x.shape
  return autograd.no_grad(function()
    local values = x.dtype == "float64" and x or x:float()
    local turn, across, down = math.rad(move.angle), math.rad(move.shear_x), math.rad(move.shear_y)
    local a = math.cos(turn - down) / math.cos(down)
    local b = -a * math.tan(across) - math.sin(turn)
    local c = math.sin(turn - down) / math.cos(down)
    local d = math.cos(turn) - c * math.tan(across)
    a, b, c, d = d / move.scale, -b / move.scale, -c / move.scale, a / move.scale
    local ratio, right, below = height / width, 2 * move.right / width, 2 * move.down / height
    local theta = create.tensor({ { { a, b * ratio, -a * right - b * ratio * below },
      { c / ratio, d, -c / ratio * right - d * below } } }, { dtype = values.dtype }):to(x.device)
    local flat = values:reshape(1, -1, height, width)
    local n = flat:size(2)
    local grid = F.affine_grid(theta, { 1, n + 1, height, width })
    local inside = create.ones({ 1, 1, height, width }, { dtype = values.dtype, device = x.device })
    local out = F.grid_sample(cat({ flat, inside }, 2), grid, { mode = o.interpolation })
    -- As in torchvision, a pixel at the border is multiplied twice by the share of it that lies inside: grid_sample
    -- itself reads zeros outside.
    out = ((out:narrow(2, 1, n) - o.fill) * out:narrow(2, n + 1, 1) + o.fill):reshape(shape)
    if x.dtype == "uint8" then out = (out + 0.5):clamp(0, 255) end
    return out:to(x.dtype)
  end)
end

local TURN = { interpolation = opts.one_of({ "nearest", "bilinear" }, "nearest"), fill = 0 }

--- Turns an image around its middle by a random angle. It keeps its size.
---@param degrees number|number[]  the largest angle to both sides; or the least and the largest, counter-clockwise
---@param given? {interpolation: string, fill: number}
---   interpolation: "nearest" (default) or "bilinear"; fill: the value of pixels that come from outside
---@return fun(image: Tensor): Tensor  uint8 is rounded
function M.RandomRotation(degrees, given)
  local angles = range(degrees, "RandomRotation", "argument 1")
  local o = opts("RandomRotation", given, TURN)
  return function(x)
    local move = { angle = -between(angles), shear_x = 0, shear_y = 0, scale = 1, right = 0, down = 0 }
    return moved(x, "RandomRotation", move, o)
  end
end

-- The ranges of the two angles of option 'shear', which is one number, one range or two ranges.
local function shears(v, who)
  if v == nil then return { 0, 0 }, { 0, 0 } end
  opts.need(type(v) == "number" or opts.is_plain(v) and (#v == 2 or #v == 4), v,
    "a number from 0, { low, high } or { low x, high x, low y, high y }", "%s: option 'shear'", who)
  if type(v) == "number" or #v == 2 then return range(v, who, "option 'shear'"), { 0, 0 } end
  return range({ v[1], v[2] }, who, "option 'shear': along x"), range({ v[3], v[4] }, who, "option 'shear': along y")
end

--- Turns, slants, moves and enlarges an image at random. It keeps its size.
---@param degrees number|number[]  the largest angle to both sides; or the least and the largest, clockwise
---@param given? {translate: number[], scale: number[], shear: number|number[], interpolation: string, fill: number}
---   translate: the largest moves, to both sides, as shares of width and height (default: none); scale: least and
---   largest factor (default: { 1, 1 }); shear: the largest angle in degrees of a shear along x, to both sides; or the
---   least and the largest; or those along x, then those along y (default: none); interpolation: "nearest"
---   (default) or "bilinear"; fill: the value of pixels that come from outside
---@return fun(image: Tensor): Tensor  uint8 is rounded
function M.RandomAffine(degrees, given)
  local who = "RandomAffine"
  local angles = range(degrees, who, "argument 1")
  local o = opts(who, given, { translate = { 0, 0 }, scale = { 1, 1 }, shear = opts.any,
    interpolation = TURN.interpolation, fill = 0 })
  local scales, across, down = range(o.scale, who, "option 'scale'"), shears(o.shear, who)
  opts.need(scales[1] > 0, scales[1], "a number > 0", "%s: option 'scale': the least factor", who)
  opts.need(#o.translate == 2, o.translate, "two numbers", "%s: option 'translate'", who)
  for k, v in ipairs(o.translate) do
    opts.expect(v, opts.number_from(0), "%s: option 'translate': number %d", who, k)
  end
  return function(x)
    local height, width = image_of(x, who)
    local right, below = width * o.translate[1], height * o.translate[2]
    return moved(x, who, { angle = between(angles), shear_x = between(across), shear_y = between(down),
      scale = between(scales), right = floor(between { -right, right } + 0.5),
      down = floor(between { -below, below } + 0.5) }, o)
  end
end

-- ---- colours ----------------------------------------------------------------------------------------------

local function grey_of(x)
  if x.ndim < 3 or x:size(-3) ~= 3 then return x end
  return x:narrow(-3, 1, 1) * 0.2989 + x:narrow(-3, 2, 1) * 0.587 + x:narrow(-3, 3, 1) * 0.114
end

-- The image with its hues rotated by a share of the circle. From HSV to RGB: a channel is
-- max - chroma * clamp(min(k, 4 - k), 0, 1) with k = (hue + n) mod 6, where chroma is max - min of the pixel, hue
-- counts sixths of the circle and n is 5 for red, 3 for green, 1 for blue.
local function hue_turned(x, share)
  if x:size(-3) ~= 3 then return x end
  local red, green, blue = x:narrow(-3, 1, 1), x:narrow(-3, 2, 1), x:narrow(-3, 3, 1)
  local high, low = x:amax(-3, { keepdim = true }), x:amin(-3, { keepdim = true })
  local chroma = high - low
  local by = where(chroma:eq(0), 1, chroma)
  local hue = where(high:eq(red), (green - blue) / by,
    where(high:eq(green), (blue - red) / by + 2, (red - green) / by + 4)) + 6 * share
  local function channel(sixths)
    local k = (hue + sixths) % 6
    return high - chroma * k:minimum(4 - k):clamp(0, 1)
  end
  return cat({ channel(5), channel(3), channel(1) }, -3)
end

-- Each changes floating point values by a factor (1: no change), hue by a share of the circle of hues (0: no change).
local changes = {
  brightness = function(x, factor) return x * factor end,
  contrast = function(x, factor)
    return x * factor + grey_of(x):mean({ -3, -2, -1 }, { keepdim = true }) * (1 - factor)
  end,
  saturation = function(x, factor) return x * factor + grey_of(x) * (1 - factor) end,
  hue = hue_turned,
}
local ORDER = { "brightness", "contrast", "saturation", "hue" }

-- The range that option `name` gives: of factors or, for hue, of shares of the circle of hues. nil: no change.
local function factors_of(v, name, who)
  if v == nil then return nil end
  if type(v) == "number" and v >= 0 and name ~= "hue" then v = { max(0, 1 - v), 1 + v } end
  v = range(v, who, ("option '%s'"):format(name))
  if name == "hue" then
    opts.need(v[1] >= -0.5 and v[2] <= 0.5, v[2] > 0.5 and v[2] or v[1], "a number from -0.5 to 0.5", "%s: option 'hue'", who)
  else
    opts.need(v[1] >= 0, v[1], "a number from 0", "%s: option '%s': the least factor", who, name)
  end
  return v
end

--- Changes brightness, contrast, saturation and hue at random, in random order. Values stay from 0 to 1, those of uint8
--- from 0 to 255.
---@param given {brightness: number|number[], contrast: number|number[], saturation: number|number[], hue: number|number[]}
---   brightness: v for factors from 1 - v (at least 0) to 1 + v, or { low, high } (default: no change); contrast: as
---   brightness; saturation: as brightness; hue: v for turns from -v to v of the circle of colours, at most 0.5, or
---   { low, high } (default: no change)
---@return fun(image: Tensor): Tensor  for images [..., channels, H, W] of 1 or 3 channels; uint8 is rounded
function M.ColorJitter(given)
  local who = "ColorJitter"
  local o = opts(who, given, { brightness = opts.any, contrast = opts.any, saturation = opts.any, hue = opts.any })
  local factors = {}
  for _, name in ipairs(ORDER) do factors[name] = factors_of(o[name], name, who) end
  return function(x)
    image_of(x, who)
    if x.ndim < 3 or x:size(-3) ~= 3 and x:size(-3) ~= 1 then
      errors.raise("%s: the image has shape %s, expected [..., 1 or 3, H, W]", who, tostring(x.shape))
    end
    local list = { unpack(ORDER) }
    return autograd.no_grad(function()
      local values, bound = x.dtype == "float64" and x or x:float(), x.dtype == "uint8" and 255 or 1
      while #list > 0 do
        local name = table.remove(list, whole(1, #list))
        if factors[name] then values = changes[name](values, between(factors[name])):clamp(0, bound) end
      end
      if x.dtype == "uint8" then values = values + 0.5 end
      return values:to(x.dtype)
    end)
  end
end

--- Converts an image to grey, at random; it keeps its channels.
---@param p? number  the probability, from 0 to 1 (default: 0.1)
---@return fun(image: Tensor): Tensor  for images of 1 or 3 channels
function M.RandomGrayscale(p)
  p = probability(p or 0.1, "RandomGrayscale")
  local grey = { [1] = M.Grayscale(1), [3] = M.Grayscale(3) }
  return function(x)
    image_of(x, "RandomGrayscale")
    return uniform() < p and (grey[x.ndim > 2 and x:size(-3) or 0] or grey[3])(x) or x
  end
end

--- Overwrites a random part of an image (Zhong et al. 2017). To be applied after ToTensor.
---@param p? number  the probability, from 0 to 1 (default: 0.5)
---@param given? {scale: number[], ratio: number[], value: number}
---   scale: least and largest share of the area; ratio: least and largest height over width; value: the new value
---@return fun(image: Tensor): Tensor
function M.RandomErasing(p, given)
  p = probability(p, "RandomErasing")
  local o = opts("RandomErasing", given, { scale = { 0.02, 0.33 }, ratio = { 0.3, 3.3 }, value = 0 })
  return function(x)
    local height, width = image_of(x, "RandomErasing")
    if uniform() >= p then return x end
    for _ = 1, 10 do
      local area = height * width * between(o.scale)
      local ratio = math.exp(between { math.log(o.ratio[1]), math.log(o.ratio[2]) })
      local h, w = floor(math.sqrt(area * ratio) + 0.5), floor(math.sqrt(area / ratio) + 0.5)
      if h >= 1 and w >= 1 and h < height and w < width then
        return autograd.no_grad(function()
          local out = x:clone()
          crop(out, whole(0, height - h), whole(0, width - w), h, w):fill_(o.value)
          return out
        end)
      end
    end
    return x
  end
end

--- Applies functions one after the other, or none of them, at random.
---@param list function[]  each from image to image
---@param p? number  the probability, from 0 to 1 (default: 0.5)
---@return fun(image: Tensor): Tensor
function M.RandomApply(list, p)
  local all = M.Compose(list)
  p = probability(p, "RandomApply")
  return function(x) return uniform() < p and all(x) or x end
end

return errors.closed(M, "data.transforms")
