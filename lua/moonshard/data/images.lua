-- SPDX-License-Identifier: MIT
--- Grids of images, and images in files: PNG through libpng's simplified interface, JPEG through TurboJPEG. Both of
--- these report errors as texts; the libraries' older interfaces use longjmp, which would skip Lua's frames.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local tensor = require "moonshard.tensor"
local ffi = engine.ffi

ffi.cdef [[
typedef struct {
  void *opaque; uint32_t version, width, height, format, flags, colormap_entries, warning_or_error; char message[64];
} moonshard_png;
int moonshard_png_begin(moonshard_png *, const void *, size_t) __asm__("png_image_begin_read_from_memory");
int moonshard_png_finish(moonshard_png *, const void *, void *, int32_t, void *) __asm__("png_image_finish_read");
int moonshard_png_write(moonshard_png *, void *, size_t *, int, const void *, int32_t, const void *)
  __asm__("png_image_write_to_memory");
void moonshard_png_free(moonshard_png *) __asm__("png_image_free");
void *moonshard_jpeg_new(void) __asm__("tjInitDecompress");
int moonshard_jpeg_header(void *, const char *, unsigned long, int *, int *, int *, int *)
  __asm__("tjDecompressHeader3");
int moonshard_jpeg_read(void *, const char *, unsigned long, void *, int, int, int, int, int) __asm__("tjDecompress2");
const char *moonshard_jpeg_error(void *) __asm__("tjGetErrorStr2");
int moonshard_jpeg_free(void *) __asm__("tjDestroy");
]]

local M = {}

local ALPHA, COLOUR = 1, 2                                -- bits of a PNG format
local MODES = { "gray", "gray_alpha", "rgb", "rgb_alpha", "unchanged" }
local CHANNELS = { gray = 1, gray_alpha = 2, rgb = 3, rgb_alpha = 4 }
local PNG_FORMATS = { 0, ALPHA, COLOUR, COLOUR + ALPHA }  -- by number of channels
local JPEG_FORMATS = { [1] = 6, [3] = 0 }                 -- TJPF_GRAY, TJPF_RGB
local JPEG_GRAY, JPEG_CMYK = 3, 3                         -- TJSAMP_GRAY; TJCS_CMYK, which YCCK follows

local function planes(pixels, height, width, channels)
  local t = raw.tensor("uint8", { height, width, channels }, pixels)
  if channels == 1 then return t:reshape(1, height, width) end
  local out = t:permute(3, 1, 2):contiguous()
  t:release()
  return out
end

local function png_library(who) return raw.library({ "libpng16.so.16", "png16" }, "libpng16-16", who) end

local function read_png(text, path, mode)
  local png, image = png_library "read_image", ffi.new "moonshard_png"
  image.version = 1
  local function check(ok)
    if ok ~= 0 then return end
    local why = ffi.string(image.message)
    png.moonshard_png_free(image)
    errors.raise("read_image: '%s': %s", path, why)
  end
  check(png.moonshard_png_begin(image, text, #text))
  local format = image.format
  local channels = CHANNELS[mode] or 1 + format % 2 + (math.floor(format / 2) % 2) * 2
  image.format = PNG_FORMATS[channels]
  local pixels = ffi.new("uint8_t[?]", image.width * image.height * channels)
  local background = ffi.new("uint8_t[3]", 255, 255, 255)
  check(png.moonshard_png_finish(image, background, pixels, 0, nil))
  return planes(pixels, image.height, image.width, channels)
end

local function read_jpeg(text, path, mode)
  local jpeg = raw.library({ "libturbojpeg.so.0", "turbojpeg" }, "libturbojpeg0", "read_image")
  local reader = ffi.gc(jpeg.moonshard_jpeg_new(), jpeg.moonshard_jpeg_free)
  local numbers = ffi.new "int[4]"                        -- width, height, subsampling, colour space
  local function check(status)
    -- For a truncated file the library makes an image with grey parts and returns a failure.
    if status ~= 0 then errors.raise("read_image: '%s': %s", path, ffi.string(jpeg.moonshard_jpeg_error(reader))) end
  end
  check(jpeg.moonshard_jpeg_header(reader, text, #text, numbers, numbers + 1, numbers + 2, numbers + 3))
  local channels = CHANNELS[mode] or numbers[2] == JPEG_GRAY and 1 or 3
  if numbers[3] >= JPEG_CMYK then errors.raise("read_image: '%s' is a JPEG in CMYK or YCCK, expected grey or RGB", path) end
  if not JPEG_FORMATS[channels] then
    errors.raise("read_image: option 'mode' is '%s', but '%s' is a JPEG, which has no alpha channel", mode, path)
  end
  local width, height = numbers[0], numbers[1]
  local pixels = ffi.new("uint8_t[?]", width * height * channels)
  check(jpeg.moonshard_jpeg_read(reader, text, #text, pixels, width, width * channels, height, JPEG_FORMATS[channels],
    0))
  return planes(pixels, height, width, channels)
end

--- Reads a PNG or JPEG. Needs Debian's libpng16-16 or libturbojpeg0. Errors: a damaged file; other formats.
---@param path string  the file
---@param given? {mode: string}
---   mode: "gray", "gray_alpha", "rgb", "rgb_alpha" (JPEG: without alpha), or "unchanged": as the file is (default)
---@return Tensor  uint8 [channels, height, width]
function M.read_image(path, given)
  local o = opts("read_image", given, { mode = opts.one_of(MODES, "unchanged") })
  local text = raw.read(path, "read_image")
  if text:sub(1, 4) == "\137PNG" then return read_png(text, path, o.mode) end
  if text:sub(1, 2) == "\255\216" then return read_jpeg(text, path, o.mode) end
  errors.raise("read_image: '%s' is neither a PNG nor a JPEG", path)
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
  local png, image = png_library "write_png", ffi.new "moonshard_png"
  image.version, image.height, image.width, image.format = 1, rows:size(1), rows:size(2), PNG_FORMATS[rows:size(3)]
  local room = ffi.new("size_t[1]", math.ceil(rows:numel() * 1.2) + image.height + 4096)      -- more than deflate needs
  local buffer = ffi.new("char[?]", room[0])
  local ok = png.moonshard_png_write(image, buffer, room, 0, engine.lib.ms_data_ptr(rows.id), 0, nil)
  local why = ffi.string(image.message)
  png.moonshard_png_free(image)
  rows:release()
  if ok == 0 then errors.raise("write_png: '%s': %s", path, why) end
  raw.write(path, "write_png", { ffi.string(buffer, room[0]) })
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
