-- SPDX-License-Identifier: MIT
--- Images in files: PNG and JPEG, their channels, depths, alpha and orientation. Files of Pillow: fixtures_spec.lua.
local ms = require "moonshard"
local data = ms.data
local ffi = require "ffi"
local fixtures = require "spec.support.fixtures"
local log = require "moonshard.core.log"
local message = require "spec.support.message"
local png = require "moonshard.data.png"
local process = require "spec.support.process"
local raises = require "spec.support.raises"
local zlib = require "moonshard.data.zlib"

ffi.cdef [[
void *spec_jpeg_new(void) __asm__("tjInitCompress");
int spec_jpeg_drop(void *) __asm__("tjDestroy");
void spec_jpeg_free(unsigned char *) __asm__("tjFree");
int spec_jpeg_write(void *, const void *, int, int, int, int, unsigned char **, unsigned long *, int, int, int)
  __asm__("tjCompress2");
]]


local folder

local function write(name, text)
  process.write(folder .. "/" .. name, text)
  return folder .. "/" .. name
end

before_each(function() folder = process.temp_folder() end)
after_each(function() process.remove_folder(folder) end)

-- fn(...) must fail with a message that begins with the text.
local function begins(text, fn, ...) assert.are.equal(text, message(fn, ...):sub(1, #text)) end

local function be(n)
  local function byte(k) return math.floor(n / 256 ^ k) % 256 end
  return string.char(byte(3), byte(2), byte(1), byte(0))
end
local function chunk(name, bytes)
  local text = name .. bytes
  return be(#bytes) .. text .. be(zlib.crc(text, 1, #text, "png"))
end

-- A PNG of one row of samples, each of depth / 8 bytes, without compression. kind: the colour type; extra: chunks
-- before the pixels.
local function row_of(width, depth, kind, samples, extra)
  local bytes, a, b = "\0" .. samples, 1, 0
  for k = 1, #bytes do
    a = (a + bytes:byte(k)) % 65521
    b = (b + a) % 65521
  end
  local size = string.char(#bytes % 256, math.floor(#bytes / 256))
  local other = string.char(255 - #bytes % 256, 255 - math.floor(#bytes / 256))
  return "\137PNG\r\n\26\n" .. chunk("IHDR", be(width) .. be(1) .. string.char(depth, kind, 0, 0, 0)) .. (extra or "")
    .. chunk("IDAT", "\120\1\1" .. size .. other .. bytes .. be(b * 65536 + a)) .. chunk("IEND", "")
end

local function list(t) return t:reshape(-1):tolist() end

describe("images", function()
  for channels = 1, 4 do
    it(("of %d channels are the same after PNG"):format(channels), function()
      local t = ms.randint(0, 256, { channels, 5, 7 }):to "uint8"
      data.write_png(folder .. "/a.png", t)
      assert.is_true(data.read_image(folder .. "/a.png"):equal(t))
    end)
  end

  it("of another encoder are read, as colours too", function()
    local path = write("b.png", png.encode(2, 1, 1, "\10\200", "png"))
    assert.are.same({ { { 10, 200 } } }, data.read_image(path):tolist())
    local row = { { 10, 200 } }
    assert.are.same({ row, row, row }, data.read_image(path, { mode = "rgb" }):tolist())
  end)

  it("of floating point are written from 0 to 1", function()
    data.write_png(folder .. "/c.png", ms.tensor { { -1, 0, 0.5 }, { 1, 2, 0.25 } })
    assert.are.same({ { { 0, 0, 128 }, { 255, 255, 64 } } }, data.read_image(folder .. "/c.png"):tolist())
  end)

  it("in JPEG are read in colours and grey", function()
    local found, jpeg = pcall(ffi.load, "libturbojpeg.so.0")
    if not found then return pending "this system has no TurboJPEG" end
    local width, height = 16, 8
    local pixels = ffi.new("unsigned char[?]", 3 * width * height)
    for k = 0, width * height - 1 do pixels[3 * k], pixels[3 * k + 1], pixels[3 * k + 2] = 200, 100, 50 end
    local out, size = ffi.new "unsigned char *[1]", ffi.new "unsigned long[1]"
    local writer = jpeg.spec_jpeg_new()
    assert.are.equal(0, jpeg.spec_jpeg_write(writer, pixels, width, 0, height, 0, out, size, 0, 95, 0))
    assert.are.equal(0, jpeg.spec_jpeg_drop(writer))
    local text = ffi.string(out[0], size[0])
    jpeg.spec_jpeg_free(out[0])
    local path = write("d.jpg", text)
    local t = data.read_image(path)
    assert.are.equal("[3, 8, 16]", tostring(t.shape))
    for c, expected in ipairs { 200, 100, 50 } do
      assert.is_true((t:select(1, c):float() - expected):abs():max():item() <= 3, c)
    end
    assert.are.equal("[1, 8, 16]", tostring(data.read_image(path, { mode = "gray" }).shape))
    local cut = write("e.jpg", text:sub(1, -40))
    begins(("read_image: '%s': "):format(cut), data.read_image, cut)
  end)

  it("that are damaged, of another kind or not writable are errors with their path", function()
    local path = write("f.png", png.encode(2, 1, 1, "\10\200", "spec"):sub(1, 50))
    begins(("read_image: '%s': "):format(path), data.read_image, path)
    path = write("g.bmp", "BM")
    raises(("read_image: '%s' is neither a PNG nor a JPEG"):format(path), data.read_image, path)
    raises("write_png: cannot write '/dev/full': No space left on device", data.write_png, "/dev/full", ms.ones(2, 2))
    raises("write_png: argument 2 has shape [5, 2, 2], expected [H, W] or [channels, H, W] with 1 to 4 channels, not empty",
      data.write_png, folder .. "/h.png", ms.ones(5, 2, 2))
  end)

  it("make a grid", function()
    local one = ms.ones(1, 1, 2)
    local grid = data.make_grid({ one, one * 2, one * 3 }, { nrow = 2, padding = 1 })
    assert.are.equal("[3, 5, 7]", tostring(grid.shape))
    local border = { 0, 0, 0, 0, 0, 0, 0 }
    assert.are.same({ border, { 0, 1, 1, 0, 2, 2, 0 }, border, { 0, 3, 3, 0, 0, 0, 0 }, border },
      grid:select(1, 2):tolist())
    grid = data.make_grid(ms.tensor { { { { -1, 3 } } } }, { padding = 0, normalize = true })
    assert.are.same({ { 0, 1 } }, grid:select(1, 1):tolist())
    raises("make_grid: argument 1 is uint8, expected floating point images for option 'normalize'", data.make_grid,
      ms.zeros(1, 1, 2, 2, { dtype = "uint8" }), { normalize = true })
  end)

  it("name the Debian package of a library that is missing", function()
    local raw = require "moonshard.data.raw"
    raises("read_image needs the library libnone.so.7, which is missing: install Debian's package libnone7", raw.library,
      { "libnone.so.7" }, "libnone7", "read_image")
  end)
end)

describe("PNG", function()
  -- 0, 257, 2570, 25700, 65535 and 130, which is nearer to 257 than to 0
  local deep = "\0\0\1\1\10\10\100\100\255\255\0\130"

  it("of 16 bits is scaled to 8, or kept, whatever gamma the file has", function()
    for _, gamma in ipairs { "", chunk("gAMA", be(45455)), chunk("gAMA", be(100000)), chunk("sRGB", "\0") } do
      local path = write("a.png", row_of(6, 16, 0, deep, gamma))
      assert.are.same({ 0, 1, 10, 100, 255, 1 }, list(data.read_image(path)))
      local t = data.read_image(path, { bits = 16 })
      assert.are.equal("int32", t.dtype)
      assert.are.same({ 0, 257, 2570, 25700, 65535, 130 }, list(t))
      assert.are.same({ 0, 1, 10, 100, 255, 1 }, list(data.read_image(path, { mode = "rgb" }):select(1, 3)))
      path = write("b.png", row_of(3, 8, 0, "\0\100\255", gamma))
      assert.are.same({ 0, 100, 255 }, list(data.read_image(path)))
      assert.are.same({ 0, 25700, 65535 }, list(data.read_image(path, { bits = 16 })))
    end
    raises("read_image: option 'bits' is a number (12), expected 8 or 16", data.read_image, "a.png", { bits = 12 })
  end)

  it("of colours becomes grey by the weights of ITU-R 601", function()
    local path = write("a.png", row_of(4, 8, 2, "\255\0\0\0\255\0\0\0\255\10\20\30"))
    assert.are.same({ 76, 150, 29, 18 }, list(data.read_image(path, { mode = "gray" })))
    local deeper = data.read_image(path, { mode = "gray", bits = 16 })
    assert.are.same({ 76 * 257, 150 * 257, 29 * 257, 18 * 257 }, list(deeper))
    assert.are.same({ 76, 150, 29, 18, 255, 255, 255, 255 }, list(data.read_image(path, { mode = "gray_alpha" })))
  end)

  it("with alpha drops it, or is blended over a background", function()
    local path = write("a.png", row_of(3, 8, 6, "\100\150\200\255\100\150\200\0\100\150\200\51"))
    local function read(given) return list(data.read_image(path, given)) end
    assert.are.same({ 100, 100, 100, 150, 150, 150, 200, 200, 200 }, read { mode = "rgb" })
    assert.are.same({ 100, 255, 224, 150, 255, 234, 200, 255, 244 }, read { mode = "rgb", background = 255 })
    assert.are.same({ 100, 10, 28, 150, 20, 46, 200, 30, 64 }, read { background = { 10, 20, 30 } })
    assert.are.same({ 141, 0, 28 }, read { mode = "gray", background = 0 })
    assert.are.equal(4, data.read_image(path):size(1))
    path = write("b.png", row_of(2, 16, 4, "\100\100\255\255\100\100\0\0"))
    assert.are.same({ 25700, 65535 }, read { mode = "gray", background = 255, bits = 16 })
    assert.are.same({ 100, 100 }, read { mode = "gray" })
    raises("read_image: options 'background' and 'mode' 'rgb_alpha' exclude each other", data.read_image, path,
      { mode = "rgb_alpha", background = 0 })
    raises("read_image: option 'background' is a number (256), expected a number from 0 to 255, or a list of three", data.read_image,
      path, { background = 256 })
  end)

  it("is refused with a checksum that differs in any chunk, an unknown chunk, or a header that PNG lacks", function()
    local text = row_of(3, 8, 0, "\0\100\255", chunk("tEXt", "by me"))
    for name, copy in pairs { tEXt = text:gsub("by me", "by mf"), IDAT = text:gsub("\100", "\101"), IEND = text:sub(1, -2) .. "\0" } do
      local path = write("a.png", copy)
      raises(("read_image: '%s': it is damaged: the checksum of its chunk %s differs"):format(path, name), data.read_image, path)
    end
    local path = write("b.png", row_of(3, 8, 0, "\0\100\255", chunk("ABCD", "")))
    raises(("read_image: '%s': it has a chunk ABCD, which PNG does not have"):format(path), data.read_image, path)
    path = write("c.png", row_of(3, 5, 0, "\0\100\255"))
    raises(("read_image: '%s': it has a header that PNG does not have"):format(path), data.read_image, path)
    path = write("d.png", row_of(1e9, 8, 0, "\0\100\255"))
    raises(("read_image: '%s': it has 1000000000 x 1 pixels, expected less than 2^28"):format(path), data.read_image, path)
    path = write("d.png", row_of(1e8, 8, 0, "\0\100\255"))
    raises(("read_image: '%s': it is damaged: its compressed data are invalid or incomplete"):format(path), data.read_image, path)
    path = write("e.png", row_of(2, 8, 3, "\0\1", chunk("PLTE", "\1\2\3")))
    raises(("read_image: '%s': it is damaged: its palette lacks a colour"):format(path), data.read_image, path)
  end)
end)

describe("JPEG", function()
  local text = process.read(fixtures.folder .. "/rgb.jpg")

  -- Reads a text; returns the image's bytes and the warnings.
  local function read(copy, given)
    local warnings, t = log.catch_warnings(data.read_image, write("a.jpg", copy), given)
    return fixtures.bytes(t), warnings
  end

  it("with bytes between its segments, of an unknown revision or with others after it gives the same image", function()
    local clean = read(text)
    local tables = text:find("\255\219", 1, true)
    local cases = { ["extraneous bytes"] = text:sub(1, -3) .. ("\17"):rep(20) .. text:sub(-2),
      ["extraneous byte"] = text:sub(1, tables - 1) .. "\17\34\51" .. text:sub(tables),
      ["unknown JFIF revision"] = text:gsub("JFIF%z.", "JFIF\0\9") }
    for words, copy in pairs(cases) do
      local got, warnings = read(copy)
      assert.is_true(got == clean, words)
      assert.are.equal(1, #warnings)
      assert.is_truthy(warnings[1]:find(("read_image: '%s/a.jpg': "):format(folder), 1, true) and warnings[1]:find(words, 1, true),
        warnings[1])
    end
    local got, warnings = read(text .. "other bytes")
    assert.is_true(got == clean)
    assert.are.equal(0, #warnings)
  end)

  it("that is cut, or claims more pixels than its bytes can have, is refused", function()
    local path = write("b.jpg", text:sub(1, -3))
    raises(("read_image: '%s': it is incomplete: it has no end"):format(path), data.read_image, path)
    local at = text:find("\255\192", 1, true)
    path = write("c.jpg", text:sub(1, at + 4) .. "\250\250\250\250" .. text:sub(at + 9))
    raises(("read_image: '%s': it is damaged: its %d bytes are too few for 64250 x 64250 pixels"):format(path, #text),
      data.read_image, path)
  end)

  it("may have any channels and 16 bits", function()
    local t = data.read_image(write("d.jpg", text))
    assert.is_true(data.read_image(folder .. "/d.jpg", { bits = 16 }):equal(t:int() * 257))
    local with = data.read_image(folder .. "/d.jpg", { mode = "rgb_alpha" })
    assert.is_true(with:narrow(1, 1, 3):equal(t))
    assert.are.equal(255, with:select(1, 4):min():item())
    assert.are.equal(1, data.read_image(fixtures.folder .. "/cmyk.jpg", { mode = "gray" }):size(1))
  end)

  it("and PNG are turned as their Exif data say, only by option", function()
    local upright = data.read_image(fixtures.folder .. "/turned1.jpg")
    for orientation = 1, 8 do
      local path = ("%s/turned%d.jpg"):format(fixtures.folder, orientation)
      assert.is_true(data.read_image(path):equal(upright))
    end
    local function exif(value, order)
      local function number(n, bytes)
        local s = be(n):sub(-bytes)
        return order == "MM" and s or s:reverse()
      end
      return order .. number(42, 2) .. number(8, 4) .. number(1, 2) .. number(0x112, 2) .. number(3, 2) .. number(1, 4)
        .. number(value, 2) .. "\0\0" .. number(0, 4)
    end
    for _, order in ipairs { "II", "MM" } do
      local path = write("e.png", row_of(3, 8, 0, "\1\2\3", chunk("eXIf", exif(6, order))))
      assert.are.same({ { { 1, 2, 3 } } }, data.read_image(path):tolist())
      assert.are.same({ { { 1 }, { 2 }, { 3 } } }, data.read_image(path, { apply_exif_orientation = true }):tolist())
      path = write("f.png", row_of(3, 8, 0, "\1\2\3", chunk("eXIf", exif(9, order):sub(1, 20))))
      assert.are.same({ { { 1, 2, 3 } } }, data.read_image(path, { apply_exif_orientation = true }):tolist())
    end
  end)
end)
