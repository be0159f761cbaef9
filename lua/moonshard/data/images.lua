-- SPDX-License-Identifier: MIT
--- Images in files, and grids of images. png.lua decodes and encodes PNG, jpeg.lua decodes JPEG.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local jpeg = require "moonshard.data.jpeg"
local opts = require "moonshard.core.opts"
local png = require "moonshard.data.png"
local raw = require "moonshard.data.raw"
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local tensor = require "moonshard.tensor"
local zlib = require "moonshard.data.zlib"
local ffi = engine.ffi

local M = {}

local CHANNELS = { gray = 1, gray_alpha = 2, rgb = 3, rgb_alpha = 4 }
local floor = math.floor

-- The file's pixels as they are, in planes.
local function planes(image)
  local t = raw.tensor("uint8", { image.height, image.width, image.channels }, image.pixels)
  if image.channels == 1 then return t:reshape(1, image.height, image.width) end
  local out = t:permute(3, 1, 2):contiguous()
  t:release()
  return out
end

-- The pixels with other channels or bits. background: the colour over which alpha is blended, from 0 to 255; nil: alpha
-- is dropped. ink: the 4 channels are inverted CMYK, the result has colours.
local function converted(image, channels, bits, background, ink)
  local n, from, pixels, most = image.width * image.height, image.channels, image.pixels, 2 ^ image.bits - 1
  local t, data = raw.tensor(bits == 16 and "int32" or "uint8", { channels, image.height, image.width })
  local out = ffi.cast(bits == 16 and "int32_t *" or "uint8_t *", data)
  local alpha_at = not ink and from % 2 == 0 and from - 1 or nil
  local colour = channels > 2
  local scale = most / 255
  local r0, g0, b0 = unpack(background or {})
  for k = 0, n - 1 do
    local at = k * from
    local r = pixels[at]
    local g, b, a = r, r, most
    if from > 2 then g, b = pixels[at + 1], pixels[at + 2] end
    if ink then
      local black = pixels[at + 3]
      r, g, b = floor(r * black / 255 + 0.5), floor(g * black / 255 + 0.5), floor(b * black / 255 + 0.5)
    elseif alpha_at then
      a = pixels[at + alpha_at]
      if background then
        r = floor((r * a + r0 * scale * (most - a)) / most + 0.5)
        g = floor((g * a + g0 * scale * (most - a)) / most + 0.5)
        b = floor((b * a + b0 * scale * (most - a)) / most + 0.5)
      end
    end
    if not colour and (from > 2 or background) then
      r = floor((19595 * r + 38470 * g + 7471 * b + 32768) / 65536)     -- ITU-R 601, as JPEG has it, in fixed point
    end
    if bits ~= image.bits then
      if bits == 16 then
        r, g, b, a = r * 257, g * 257, b * 257, a * 257
      else
        r, g, b, a = floor(r / 257 + 0.5), floor(g / 257 + 0.5), floor(b / 257 + 0.5), floor(a / 257 + 0.5)
      end
    end
    out[k] = r
    if colour then out[n + k], out[2 * n + k] = g, b end
    if channels % 2 == 0 then out[(channels - 1) * n + k] = a end
  end
  return t
end

-- The orientation in Exif data, which are a TIFF header and its first directory: 1 (upright) to 8.
local function orientation_of(exif)
  local little = exif and exif:sub(1, 4) == "II*\0"
  if not little and (not exif or exif:sub(1, 4) ~= "MM\0*") then return 1 end
  local function number(at, bytes)
    local part = exif:sub(at, at + bytes - 1)
    return #part == bytes and raw.little(little and part or part:reverse(), 1, bytes) or 0
  end
  local first = number(5, 4) + 1
  for k = 0, number(first, 2) - 1 do
    local at = first + 2 + 12 * k
    if at > #exif then break end
    if number(at, 2) == 0x112 then
      local value = number(at + 8, 2)
      return value >= 1 and value <= 8 and value or 1
    end
  end
  return 1
end

-- Whether rows and columns are exchanged first, and the dimensions that are reversed then.
local ORIENTATIONS = { [2] = { false, 3 }, [3] = { false, 2, 3 }, [4] = { false, 2 }, [5] = { true }, [6] = { true, 3 },
  [7] = { true, 2, 3 }, [8] = { true, 2 } }

local function upright(t, exif)
  local change = ORIENTATIONS[orientation_of(exif)]
  if not change then return t end
  local turned = change[1] and t:transpose(2, 3) or t
  if change[2] then turned = turned:flip(change[2], change[3]) end
  return turned:contiguous()
end

local MODES = { "gray", "gray_alpha", "rgb", "rgb_alpha", "unchanged" }
local function is_level(v) return type(v) == "number" and v >= 0 and v <= 255 end
local OPTIONS = { mode = opts.one_of(MODES, "unchanged"), apply_exif_orientation = false,
  bits = opts.option(opts.kind("8 or 16", function(v) return v == 8 or v == 16 end), 8),
  background = opts.kind("a number from 0 to 255, or a list of three", function(v)
    return is_level(v) or type(v) == "table" and #v == 3 and is_level(v[1]) and is_level(v[2]) and is_level(v[3])
  end) }

--- Reads a PNG or JPEG. JPEG needs Debian's libturbojpeg0. Samples are what the file stores: no gamma or colour profile
--- is applied. Grey of colours is 0.299 R + 0.587 G + 0.114 B. A JPEG in CMYK or YCCK becomes RGB. What a JPEG decoder
--- warns of is a warning. Errors: a damaged or incomplete file, of PNG also one whose checksums differ; other formats.
---@param path string  the file, also compressed by gzip
---@param given? {mode: string, bits: integer, background: number|number[], apply_exif_orientation: boolean}
---   mode: "gray", "gray_alpha", "rgb", "rgb_alpha", or "unchanged": the channels of the file (default); bits: 8
---   (default) or 16: int32 from 0 to 65535; samples of the other depth are scaled by 257; background: the grey, or the
---   red, green and blue, from 0 to 255, over which an image with alpha is blended, for modes without alpha (default:
---   alpha is dropped); apply_exif_orientation: turns the image as its Exif data say (default: false)
---@return Tensor  uint8, or int32 of 16 bits, [channels, height, width]
function M.read_image(path, given)
  local o = opts("read_image", given, OPTIONS)
  if o.background and o.mode:find "alpha" then
    errors.raise("read_image: options 'background' and 'mode' '%s' exclude each other", o.mode)
  end
  local text, image, why = zlib.read(path, "read_image"), nil, nil
  local is_jpeg = jpeg.is(text)
  if is_jpeg then
    image, why = jpeg.decode(text, path, "read_image", o.mode:find "gray" ~= nil)
  elseif png.is(text) then
    image, why = png.decode(text, "read_image")
  else
    errors.raise("read_image: '%s' is neither a PNG nor a JPEG", path)
  end
  if not image then errors.raise("read_image: '%s': it %s", path, why) end
  local ink = is_jpeg and image.channels == 4
  local channels = CHANNELS[o.mode] or ink and 3 or image.channels
  if o.background and channels % 2 == 0 then channels = channels - 1 end
  local background = type(o.background) == "number" and { o.background, o.background, o.background } or o.background
  local as_is = channels == image.channels and o.bits == 8 and image.bits == 8
  local t = as_is and planes(image) or converted(image, channels, o.bits, background, ink)
  return o.apply_exif_orientation and upright(t, image.exif) or t
end

-- An image as uint8 [H, W, C] on the CPU.
local function bytes_of(t, who)
  raw.expect_tensor(t, who)
  local shape = tostring(t.shape)
  if t.ndim == 2 then t = t:unsqueeze(1) end
  local channels = t.ndim == 3 and t:size(1) or 0
  if channels < 1 or channels > 4 or t:numel() == 0 then
    errors.raise("%s has shape %s, expected [H, W] or [channels, H, W] with 1 to 4 channels, not empty", who, shape)
  end
  return autograd.no_grad(function()
    t = t:detach():to "cpu"
    if t.dtype:find "float" then t = (t:float():clamp(0, 1) * 255 + 0.5):to "uint8" end
    if t.dtype ~= "uint8" then errors.raise("%s has dtype %s, expected uint8 or floating point", who, t.dtype) end
    return t:permute(2, 3, 1):contiguous()
  end)
end

--- Writes an image as PNG. Needs Debian's libpng16-16. Errors: a file that cannot be written.
---@param path string  the file; an existing one is replaced
---@param t Tensor  [H, W] or [channels, H, W] with 1 to 4 channels (grey; grey, alpha; RGB; RGB, alpha); uint8, or
---   floating point from 0 to 1
function M.write_png(path, t)
  opts.expect(path, opts.string, "write_png: path")
  local rows = bytes_of(t, "write_png: argument 2")
  local text = png.encode(rows:size(2), rows:size(1), rows:size(3), engine.lib.ms_data_ptr(rows.id), "write_png")
  rows:release()
  raw.write(path, "write_png", { text })
end

--- Images side by side in a grid, as torchvision's make_grid.
---@param images Tensor|Tensor[]  [n, channels, H, W], or a list of [channels, H, W] of one shape
---@param given? {nrow: integer, padding: integer, pad_value: number, normalize: boolean}
---   nrow: images in a row; padding: pixels around each image; pad_value: the value of these pixels; normalize: maps
---   floating point values linearly so that the smallest of all images becomes 0 and the largest 1
---@return Tensor  [channels, height, width]; 3 channels if the images have 1
function M.make_grid(images, given)
  local o = opts("make_grid", given, { nrow = opts.option(opts.whole_from(1), 8),
    padding = opts.option(opts.whole_from(0), 2), pad_value = 0, normalize = false })
  if not tensor.is_tensor(images) then
    opts.need(opts.is_plain(images) and images[1] ~= nil, images, "a tensor or a list of tensors", "make_grid: argument 1")
    images = require "moonshard.tensor.shape".stack(images)
  end
  raw.expect_tensor(images, "make_grid: argument 1")
  if images.ndim ~= 4 or images:size(1) == 0 then
    errors.raise("make_grid: argument 1 has shape %s, expected [n, channels, H, W] with n at least 1",
      tostring(images.shape))
  end
  return autograd.no_grad(function()
    local all = images:detach()
    if o.normalize then
      if not all.dtype:find "float" then
        errors.raise("make_grid: argument 1 is %s, expected floating point images for option 'normalize'", all.dtype)
      end
      local low, high = (all:min()):item(), (all:max()):item()
      all = (all - low) / math.max(high - low, 1e-5)    -- as torchvision: equal values become 0
    end
    if all:size(2) == 1 then all = all:expand(-1, 3, -1, -1) end
    local n, channels, height, width = unpack(all.shape)
    local columns = math.min(o.nrow, n)
    local rows = math.ceil(n / columns)
    local tall, wide = height + o.padding, width + o.padding
    local grid = create.full({ channels, rows * tall + o.padding, columns * wide + o.padding }, o.pad_value,
      { dtype = all.dtype, device = all.device })
    for k = 0, n - 1 do
      grid:narrow(2, math.floor(k / columns) * tall + o.padding + 1, height)
        :narrow(3, k % columns * wide + o.padding + 1, width):copy_(all:select(1, k + 1))
    end
    return grid
  end)
end

opts.fix(M, { "write_png" })

return M
