-- SPDX-License-Identifier: MIT
--- Readers and writers of files: arrays, images, tables, sound.
local ms = require "moonshard"
local data = ms.data
local ffi = require "ffi"
local message = require "spec.support.message"
local png = require "moonshard.run.png"
local process = require "spec.support.process"
local raises = require "spec.support.raises"

-- io.BytesIO of numpy.savez_compressed(f, x = numpy.zeros(1000) + 1.5, n = numpy.int64(7)), by NumPy 2.
local SAVEZ =
  "504b03042d0000000800000021000cd55f72ffffffffffffffff05001400782e6e707901001000c01f0000000000007600000000000000ed" ..
  "c8b10e82301845e1baf214dd7e493ad48d18133636090b839369a084c10869898be1297c5947d04760e5dce5cb3d9fb2be56b7837aa9b7b4" ..
  "3e3641ce5a2e5d26464b378429b8e77d08adfff5c23da25f7becdde8d77f3c596b4d6af4acb72e51ff7d7344444444444444444444444444" ..
  "44c43dbb00504b03042d00000008000000210023b8f06cffffffffffffffff050014006e2e6e707901001000880000000000000046000000" ..
  "000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a176724" ..
  "16a402f91a9a3a0ab50a14012e7606080000504b01022d032d0000000800000021000cd55f7276000000c01f000005000000000000000000" ..
  "0000800100000000782e6e7079504b01022d032d00000008000000210023b8f06c46000000880000000500000000000000000000008001ad" ..
  "0000006e2e6e7079504b05060000000002000200660000002a0100000000"

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

local function npy(header, elements)
  header = header .. (" "):rep(63 - (#header + 10) % 64) .. "\n"
  return "\147NUMPY\1\0" .. string.char(#header, 0) .. header .. elements
end

describe("npy files", function()
  for _, dtype in ipairs { "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool" } do
    it("keep " .. dtype .. " of every shape", function()
      for _, shape in ipairs { {}, { 3 }, { 0, 2 }, { 2, 3, 4 } } do
        local t = (ms.rand(shape) * 3):to(dtype)
        data.write_npy(folder .. "/t.npy", t)
        local back = data.read_npy(folder .. "/t.npy")
        assert.are.equal(dtype, back.dtype)
        assert.are.equal(tostring(t.shape), tostring(back.shape))
        assert.is_true(back:equal(t))
      end
    end)
  end

  it("of NumPy are read in either byte order, by rows or columns, with widened types", function()
    local path = write("a.npy", npy("{'descr': '>i2', 'fortran_order': False, 'shape': (2, 3), }", "\255\253\255\254\255\255\0\0\0\1\0\2"))
    local t = data.read_npy(path)
    assert.are.equal("int16", t.dtype)
    assert.are.same({ { -3, -2, -1 }, { 0, 1, 2 } }, t:tolist())
    path = write("b.npy", npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }",
      "\0\0\0\0\0\0@@\0\0\128?\0\0\128@\0\0\0@\0\0\160@"))
    assert.are.same({ { 0, 1, 2 }, { 3, 4, 5 } }, data.read_npy(path):tolist())
  end)

  it("of savez_compressed are read by name", function()
    local path = write("z.npz", (SAVEZ:gsub("%x%x", function(h) return string.char(tonumber(h, 16)) end)))
    local arrays = data.read_npz(path)
    assert.are.equal(7, arrays.n:item())
    assert.are.equal("[1000]", tostring(arrays.x.shape))
    assert.are.equal(1500, arrays.x:sum():item())
    local text = process.read(path)
    path = write("cut.npz", text:sub(1, 60) .. "\0\0\0\0" .. text:sub(65))
    assert.is_false(pcall(data.read_npz, path))
  end)

  it("that are damaged, of another kind or not writable are errors with their path", function()
    local path = write("c.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", "1234"))
    raises(("read_npy: '%s' has 4 bytes of elements, but its header gives 24"):format(path), data.read_npy, path)
    path = write("d.npy", npy("{'descr': '<c8', 'fortran_order': False, 'shape': (1,), }", "12345678"))
    raises(("read_npy: '%s' has elements of type '<c8', expected bool, int8 to int64, uint8 to uint32 or float16 to float64")
      :format(path), data.read_npy, path)
    raises(("read_npy: cannot read %s/none: No such file or directory"):format(folder), data.read_npy, folder .. "/none")
    raises("write_npy: cannot write '/dev/full': No space left on device", data.write_npy, "/dev/full", ms.ones(2))
    raises("read_npy: unknown option 'dtype' (accepted: none)", data.read_npy, path, { dtype = "float32" })
    assert.are.equal("char device", require("lfs").attributes("/dev/full", "mode"))
  end)
end)

describe("idx files", function()
  it("are read, also compressed", function()
    local text = "\0\0\8\2\0\0\0\2\0\0\0\3" .. "\1\2\3\4\5\255"
    local expected = { { 1, 2, 3 }, { 4, 5, 255 } }
    local path = write("images", text)
    assert.are.same(expected, data.read_idx(path):tolist())
    assert.are.equal(0, os.execute(("gzip -k '%s'"):format(path)))
    assert.are.same(expected, data.read_idx(path .. ".gz"):tolist())
    assert.are.same({ 258, -2 }, data.read_idx(write("int", "\0\0\12\1\0\0\0\2\0\0\1\2\255\255\255\254")):tolist())
    path = write("short", text:sub(1, -2))
    raises(("read_idx: '%s' has 5 bytes of elements, but its header gives 6"):format(path), data.read_idx, path)
  end)
end)

describe("images", function()
  for channels = 1, 4 do
    it(("of %d channels are the same after PNG"):format(channels), function()
      local t = ms.randint(0, 256, { channels, 5, 7 }):to "uint8"
      data.write_png(folder .. "/a.png", t)
      assert.is_true(data.read_image(folder .. "/a.png"):equal(t))
    end)
  end

  it("of another encoder are read, as colours too", function()
    local path = write("b.png", png(2, 1, 1, "\10\200"))
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
    local path = write("f.png", png(2, 1, 1, "\10\200"):sub(1, 50))
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

describe("CSV files", function()
  it("give columns by name: numbers as tensors, texts as lists", function()
    local columns, names = data.read_csv(write("a.csv", '\239\187\191x,name,y\r\n1,"a, ""b""",\r\n-2.5,c,3e2\r\n\r\n'))
    assert.are.same({ "x", "name", "y" }, names)
    assert.are.same({ 1, -2.5 }, columns.x:tolist())
    assert.are.same({ 'a, "b"', "c" }, columns.name)
    assert.is_true(columns.y[1]:item() ~= columns.y[1]:item())
    assert.are.equal(300, columns.y[2]:item())
  end)

  it("without header give columns by position", function()
    local by_name = data.read_csv(write("j.csv", "price,size\n1,2"))
    raises("read_csv: no column 'pice'; did you mean 'price'?", function() return by_name.pice end)
    raises("read_csv: no column 'weight', expected one of 'price', 'size'", function() return by_name.weight end)
    raises("read_csv: no column 1", function() return by_name[1] end)
    local kept = ms.scope(function() return data.read_csv(write("j.csv", "price,size\n1,2")) end)
    assert.are.same({ 1 }, kept.price:tolist())
    local path = write("k.safetensors", "")
    ms.save(path, kept)
    assert.are.same({ 2 }, ms.load(path).size:tolist())
    local loader = data.DataLoader(data.Dataset { size = 1, get = function(i) return kept.price[i] end },
      { batch_size = 1, workers = 1 })
    for x in loader:epoch() do assert.are.same({ 1 }, x:tolist()) end
    loader:close()
    local columns = data.read_csv(write("b.csv", "1;2\n3;4"), { header = false, separator = ";", dtype = "int64" })
    assert.are.same({ 1, 3 }, columns[1]:tolist())
    assert.are.equal("int64", columns[2].dtype)
  end)

  it("give ids of classes, from 0, and their names", function()
    local path = write("iris.csv", "species,width,size\nsetosa,1,10\nvirginica,2,9\n,3,\nsetosa,4,10\n")
    local columns, names, classes = data.read_csv(path, { classes = { "species", "size" } })
    assert.are.same({ "species", "width", "size" }, names)
    assert.are.equal("int64", columns.species.dtype)
    assert.are.same({ 0, 1, -100, 0 }, columns.species:tolist())          -- -100: the field is empty
    assert.are.same({ 1, 0, -100, 1 }, columns.size:tolist())
    assert.are.same({ species = { "setosa", "virginica" }, size = { "9", "10" } }, classes)
    assert.are.same({ 1, 2, 3, 4 }, columns.width:tolist())
    local loss = ms.nn.F.cross_entropy(ms.zeros(4, 2), columns.species)
    assert.is_true(math.abs(loss:item() - math.log(2)) < 1e-6)
    -- Another file, read with the same list of classes: it has rows of one class only.
    local other = write("other.csv", "size,species,width\n9,virginica,2\n")
    columns = data.read_csv(other, { classes = classes })
    assert.are.same({ 1 }, columns.species:tolist())
    assert.are.same({ 0 }, columns.size:tolist())
    local same
    columns, names, same = data.read_csv(write("g.csv", "b;1\na;2\n;3"), { header = false, separator = ";", classes = { [1] = { "b", "", "a" } } })
    assert.are.same({ 0, 2, 1 }, columns[1]:tolist())                     -- a class with an empty name
    assert.are.same({ { "b", "", "a" } }, same)
    assert.are.same({}, names)
    assert.are.same({ 0, 0 }, data.read_csv(write("h.csv", "7\n7"), { header = false, classes = { 1 } })[1]:tolist())
    assert.are.same({}, data.read_csv(write("i.csv", "a"), { classes = { "a" } }).a:tolist())
  end)

  it("with classes that do not fit are errors that name column and line", function()
    local path = write("j.csv", "species,n\ncat,1\nfrog,2\n")
    raises(("read_csv: '%s', column 'species', line 3: 'frog' is not a class, expected one of 'cat', 'dog'"):format(path), data.read_csv, path,
      { classes = { species = { "cat", "dog" } } })
    local many = {}
    for k = 1, 11 do many[k] = "c" .. k end
    raises(("read_csv: '%s', column 'species', line 2: 'cat' is not a class, expected one of "):format(path)
      .. "'c1', 'c2', 'c3', 'c4', 'c5', 'c6', 'c7', 'c8', 'c9', 'c10', ... (11 classes)", data.read_csv, path,
      { classes = { species = many } })
    raises(("read_csv: option 'classes': '%s' has no column 'specis'; did you mean 'species'?"):format(path), data.read_csv, path,
      { classes = { "specis" } })
    raises(("read_csv: option 'classes': '%s' has no column 1"):format(path), data.read_csv, path, { classes = { 1 } })
    raises("read_csv: option 'classes': class 2 of column 'species' is a number (1), expected a string", data.read_csv, path,
      { classes = { species = { "cat", 1 } } })
    raises("read_csv: option 'classes' is a string ('species'), expected a table", data.read_csv, path, { classes = "species" })
  end)

  it("of numbers that an integer dtype cannot hold are errors that name column and line", function()
    local path = write("k.csv", "n,price\n1,2\n3,5.637\n")
    raises(("read_csv: '%s', column 'price', line 3: '5.637' is not a whole number, but option 'dtype' is 'int64'; without "
      .. "it columns of numbers are floating point"):format(path), data.read_csv, path, { dtype = "int64" })
    for _, case in ipairs { { "300", "uint8", "outside of 0 to 255" }, { "-129", "int8", "outside of -128 to 127" },
      { "", "int32", "not a whole number" }, { "nan", "int16", "not a whole number" } } do
      path = write("l.csv", "1,0\n2," .. case[1])
      raises(("read_csv: '%s', column 2, line 2: '%s' is %s, but option 'dtype' is '%s'; without it columns of numbers are "
        .. "floating point"):format(path, case[1], case[3], case[2]), data.read_csv, path, { dtype = case[2], header = false })
    end
    raises("read_csv: unknown dtype 'integer'", data.read_csv, path, { dtype = "integer" })
    assert.are.same({ 0, 255 }, data.read_csv(write("m.csv", "0\n255"), { dtype = "uint8", header = false })[1]:tolist())
  end)

  it("with a fault are errors with the line", function()
    local path = write("c.csv", 'a,b\n"1\n2",3\n4\n')
    raises(("read_csv: '%s', line 4: fields: 1, expected 2, as in line 1"):format(path), data.read_csv, path)
    path = write("d.csv", 'a\n"1')
    raises(("read_csv: '%s', line 2: a quoted field does not end"):format(path), data.read_csv, path)
    path = write("e.csv", 'a\n"1"2')
    raises(("read_csv: '%s', line 2: text after a quoted field, expected a separator or the end of the line"):format(path), data.read_csv, path)
  end)
end)

describe("lines", function()
  it("of text and of JSON are read, with the line of a fault", function()
    assert.are.same({ "a", "", "b" }, data.read_lines(write("a.txt", "a\r\n\nb")))
    local list = data.read_json_lines(write("b.jsonl", '{"x": [1, 2]}\n\n"y"\n'))
    assert.are.same({ { x = { 1, 2 } }, "y" }, list)
    local path = write("c.jsonl", '1\n{"x": }\n')
    begins(("read_json_lines: '%s', line 2: "):format(path), data.read_json_lines, path)
  end)
end)

describe("WAV files", function()
  local function wav(format, channels, bits, samples)
    local function le(n, bytes)
      local s = ""
      for _ = 1, bytes do
        s = s .. string.char(n % 256)
        n = math.floor(n / 256)
      end
      return s
    end
    return "RIFF" .. le(36 + #samples, 4) .. "WAVEfmt " .. le(16, 4) .. le(format, 2) .. le(channels, 2) .. le(8000, 4)
      .. le(8000 * channels * bits / 8, 4) .. le(channels * bits / 8, 2) .. le(bits, 2) .. "data" .. le(#samples, 4) .. samples
  end

  it("give samples from -1 to 1 and their rate", function()
    local t, rate = data.read_wav(write("a.wav", wav(1, 2, 16, "\0\0\0\128\255\127\0\64")))
    assert.are.equal(8000, rate)
    assert.are.same({ { 0, 32767 / 32768 }, { -1, 0.5 } }, t:tolist())
    assert.are.same({ { -1, 0, 0.5 } }, data.read_wav(write("b.wav", wav(1, 1, 8, "\0\128\192"))):tolist())
    assert.are.same({ { -1, 0.5 } }, data.read_wav(write("c.wav", wav(1, 1, 24, "\0\0\128\0\0\64"))):tolist())
    local floats = ffi.string(ffi.new("float[2]", 0.25, -3), 8)
    assert.are.same({ { 0.25, -3 } }, data.read_wav(write("d.wav", wav(3, 1, 32, floats))):tolist())
    local path = write("e.wav", wav(2, 1, 4, "\0"))
    raises(("read_wav: '%s' has samples of format 2 with 4 bits, expected PCM (1) of 8, 16, 24 or 32 bits or floating "
      .. "point (3) of 32 or 64"):format(path),
      data.read_wav, path)
  end)
end)
