-- SPDX-License-Identifier: MIT
--- Readers and writers of files: arrays, tables, sound. Files of other programs: fixtures_spec.lua.
local ms = require "moonshard"
local data = ms.data
local ffi = require "ffi"
local message = require "spec.support.message"
local fixtures = require "spec.support.fixtures"
local log = require "moonshard.core.log"
local process = require "spec.support.process"
local raises = require "spec.support.raises"
local zlib = require "moonshard.data.zlib"

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

local folder

local function write(name, text)
  process.write(folder .. "/" .. name, text)
  return folder .. "/" .. name
end

before_each(function() folder = process.temp_folder() end)
after_each(function() process.remove_folder(folder) end)

local function le(n, bytes) return ffi.string(ffi.new("uint64_t[1]", n), bytes) end

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

describe("npy headers", function()
  local four = ("\0"):rep(16)
  it("may have fields in any order, with either quotes and other spaces", function()
    for _, header in ipairs { '{"descr": "<f4", "fortran_order": False, "shape": (2, 2), }',
      "{'shape':(2,2),'fortran_order':False,'descr':'<f4'}",
      "{ 'descr' : '<f4' , 'fortran_order' : True , 'shape' : (2L, 2L,) }" } do
      local t = data.read_npy(write("a.npy", npy(header, four)))
      assert.are.equal("[2, 2]", tostring(t.shape))
    end
    local path = write("b.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", four))
    assert.are.equal(0, data.read_npy(path).ndim)
  end)

  for _, case in ipairs {
    { "'descr': '<f4', 'fortran_order': False, 'shape': (-2, 2)", "has a header that is not NumPy's" },
    { "'descr': '<f4', 'fortran_order': False, 'shape': (2.0, 2)", "has a header that is not NumPy's" },
    { "'descr': '<f4', 'fortran_order': False, 'shape': (2, , 2)", "has a header that is not NumPy's" },
    { "'descr': '<f4', 'fortran_order': False", "has a header that is not NumPy's" },
    { "'descr': '<f4', 'fortran_order': Nope, 'shape': (2, 2)", "has a header that is not NumPy's" },
    { "'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), 'more': 1", "has a header that is not NumPy's" },
    { "'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999999999999)", "has a shape of 2^62 bytes or more" },
    { "'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 1, 1, 1, 1, 1, 1)", "has 9 dimensions, expected at most 8" },
    { "'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (2, 2)",
      "has elements of type '[('x', '<f4')]', expected bool, int8 to int64, uint8 to uint32 or float16 to float64" },
  } do
    it("are refused: " .. case[1], function()
      local path = write("a.npy", npy("{" .. case[1] .. "}", four))
      raises(("read_npy: '%s' %s"):format(path, case[2]), data.read_npy, path)
    end)
  end

  it("give bools of 0 and 1 for any bytes", function()
    local t = data.read_npy(write("a.npy", npy("{'descr': '|b1', 'fortran_order': False, 'shape': (3,)}", "\0\1\255")))
    assert.are.equal(2, t:sum():item())
  end)
end)

describe("npz files", function()
  -- An archive of stored files: { name, contents } of each.
  local function archive(files)
    local parts, directory, sums, at = {}, {}, {}, 0
    for k, f in ipairs(files) do
      local kind = #f[1] .. f[2]
      local sum = sums[kind] or le(zlib.crc(f[2], 1, #f[2], "spec"), 4) .. le(#f[2], 4) .. le(#f[2], 4) .. le(#f[1], 2)
      sums[kind] = sum
      parts[k] = "PK\3\4\20\0\0\0\0\0\0\0\0\0" .. sum .. "\0\0" .. f[1] .. f[2]
      directory[k] = "PK\1\2\20\0\20\0\0\0\0\0\0\0\0\0" .. sum .. ("\0"):rep(12) .. le(at, 4) .. f[1]
      at = at + #parts[k]
    end
    local list, n = table.concat(directory), #files
    local wide = n > 65535 and "PK\6\6" .. le(44, 8) .. le(45, 2) .. le(45, 2) .. ("\0"):rep(8) .. le(n, 8) .. le(n, 8)
      .. le(#list, 8) .. le(at, 8) .. "PK\6\7" .. ("\0"):rep(4) .. le(at + #list, 8) .. le(1, 4) or ""
    local short = le(math.min(n, 65535), 2)
    return table.concat(parts) .. list .. wide .. "PK\5\6\0\0\0\0" .. short .. short .. le(#list, 4) .. le(at, 4) .. "\0\0"
  end

  local one = npy("{'descr': '<i4', 'fortran_order': False, 'shape': (1,), }", "\7\0\0\0")

  it("may have more than 65,535 entries", function()
    local files = {}
    for k = 1, 66000 do files[k] = { ("%d"):format(k), "" } end
    files[40], files[66001] = { "a.npy", one }, { "b.npy", one }
    local arrays = data.read_npz(write("many.npz", archive(files)))
    assert.are.same({ 7, 7 }, { arrays.a:item(), arrays.b:item() })
  end)

  it("whose directory lost entries are refused", function()
    local text = archive { { "a.npy", one }, { "b.npy", one } }
    local path = write("few.npz", text:sub(1, -15) .. "\1\0\1\0" .. text:sub(-10))
    raises(("read_npz: '%s' is damaged: its directory has more files than it says"):format(path), data.read_npz, path)
    path = write("twice.npz", archive { { "a.npy", one }, { "a.npy", one } })
    raises(("read_npz: '%s' has two files of the name 'a.npy'"):format(path), data.read_npz, path)
  end)

  it("with arrays of other types give the rest, a warning, and an error where one is used", function()
    local path = fixtures.folder .. "/mixed.npz"
    local warnings, arrays = log.catch_warnings(data.read_npz, path)
    assert.are.equal(1, #warnings)
    for _, text in ipairs { path, "arrays that cannot be read: 3", "'names' has elements of type '<U2'", "'objects'", "'complex'" } do
      assert.is_truthy(warnings[1]:find(text, 1, true), warnings[1])
    end
    assert.are.equal("[3, 4]", tostring(arrays.x.shape))
    assert.is_nil(arrays.unknown)
    begins(("read_npz: '%s': array 'names' has elements of type '<U2', expected bool"):format(path), function() return arrays.names end)
    assert.are.same({}, (log.catch_warnings(data.read_npz, path, { names = { "x" } })))
    begins(("read_npz: '%s': array 'objects' has elements of type '|O', "):format(path), data.read_npz, path, { names = { "objects" } })
    raises(("read_npz: '%s': unknown array 'none'"):format(path), data.read_npz, path, { names = { "none" } })
  end)

  it("with a damaged array name it, and option 'names' reads the others", function()
    local text = archive { { "a.npy", one }, { "b.npy", one } }
    local at = text:find("\7", 1, true)
    local path = write("a.npz", text:sub(1, at - 1) .. "\6" .. text:sub(at + 1))
    raises(("read_npz: '%s': array 'a' is damaged: its checksum differs; option 'names' reads the others"):format(path),
      data.read_npz, path)
    assert.are.equal(7, data.read_npz(path, { names = { "b" } }).b:item())
    raises(("read_npz: '%s': array 'a' is damaged: its checksum differs"):format(path), data.read_npz, path, { names = { "a" } })
  end)
end)

describe("files that gzip compressed", function()
  it("may have several members and zeros between and after them, but nothing else", function()
    write("part", "1,2\n")
    assert.are.equal(0, os.execute(("gzip -n '%s/part'"):format(folder)))
    local member = process.read(folder .. "/part.gz")
    local function read(text) return data.read_lines(write("all.gz", text)) end
    assert.are.same({ "1,2", "1,2", "1,2" }, read(member .. member .. ("\0"):rep(600) .. member .. "\0"))
    local path = folder .. "/all.gz"
    for _, text in ipairs { member .. "more", member .. member:sub(1, -2), member:sub(1, -9) .. "\0" .. member:sub(-7), "", "1,2\n" } do
      begins(("read_lines: '%s' "):format(path), read, text)
    end
  end)
end)

describe("files of every kind", function()
  for name, e in pairs(fixtures.expected) do
    if e.reader:find "^read_" and e.damage and not e.checksums then
      it("may be compressed by gzip: " .. name, function()
        local source, path = fixtures.folder .. "/" .. name, folder .. "/copy.gz"
        assert.are.equal(0, os.execute(("gzip -c '%s' > '%s'"):format(source, path)))
        local right = fixtures.bytes(fixtures.read(e.reader, source, e.options))
        assert.is_true(right == fixtures.bytes(fixtures.read(e.reader, path, e.options)))
      end)
    end
  end
end)

describe("text in UTF-16 or UTF-32", function()
  for name, text in pairs { ["UTF-16"] = "\255\254a\0,\0", ["UTF-16 of the other order"] = "\254\255\0a\0,",
    ["UTF-32"] = "\255\254\0\0a\0\0\0", ["UTF-16 without mark"] = "a\0,\0b\0", ["UTF-16 without mark, of the other order"] = "\0a\0," } do
    it("is an error that says so: " .. name, function()
      local kind, path = name:match "^UTF%-%d+", write("a.txt", text)
      for _, reader in ipairs { "read_csv", "read_json_lines", "read_lines" } do
        raises(("%s: '%s' is text in %s, expected UTF-8; `iconv -f %s -t UTF-8 FILE` converts it"):format(reader, path, kind, kind),
          data[reader], path)
      end
    end)
  end
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

  it("without a dtype are refused if float64 would round their whole numbers", function()
    for _, text in ipairs { "9007199254740993", "-9007199254740995", "12345678901234567891", "9007199254740993.0" } do
      local path = write("r.csv", "id\n1\n" .. text .. "\n")
      begins(("read_csv: '%s', column 'id', line 3: '%s' is not exact as float64; option 'dtype' \"int64\""):format(path, text),
        data.read_csv, path)
      assert.are.equal(tonumber(text), data.read_csv(path, { dtype = "float64" }).id[2]:item())
    end
    local exact = data.read_csv(write("r.csv", "id\n9007199254740992\n36893488147419103232\n")).id
    assert.are.same({ 2 ^ 53, 2 ^ 65 }, exact:double():tolist())
  end)

  it("keep int64 exactly, in all columns or in one", function()
    local path = write("n.csv", "id,x\n9007199254740993,1\n-9223372036854775808,2\n9223372036854775807,3\n+007.0,4\n1e3,5\n")
    local columns = data.read_csv(path, { dtype = "int64" })
    local rest = {}
    for k, part in ipairs { 2 ^ 52, -2 ^ 62, 2 ^ 62, 0, 0 } do rest[k] = tonumber((columns.id[k] - part - part):item()) end
    assert.are.same({ 1, 0, -1, 7, 1000 }, rest)
    assert.are.equal("int64", columns.x.dtype)
    columns = data.read_csv(path, { dtype = { id = "int64", x = "float64" } })
    assert.are.same({ "int64", "float64" }, { columns.id.dtype, columns.x.dtype })
    assert.are.equal("float32", data.read_csv(path, { dtype = { id = "int64" } }).x.dtype)
    for text, why in pairs { ["9223372036854775808"] = "is outside of -9223372036854775808 to 9223372036854775807",
      ["-9223372036854775809"] = "is outside of -9223372036854775808 to 9223372036854775807",
      ["1e19"] = "is not exact; write all its digits", ["0.5"] = "is not a whole number" } do
      path = write("o.csv", "id\n" .. text)
      begins(("read_csv: '%s', column 'id', line 2: '%s' %s, but option 'dtype' is 'int64'"):format(path, text, why), data.read_csv,
        path, { dtype = "int64" })
    end
    path = write("p.csv", "id,name\n1,a\n")
    raises(("read_csv: '%s', column 'name', line 2: 'a' is not a number, but option 'dtype' makes it a column of int64"):format(path),
      data.read_csv, path, { dtype = { name = "int64" } })
    raises(("read_csv: option 'dtype': '%s' has no column 'di'; did you mean 'id'?"):format(path), data.read_csv, path,
      { dtype = { di = "int64" } })
  end)

  it("take numbers in decimal notation only", function()
    local columns = data.read_csv(write("q.csv", "a,b,c,d,e\n0x10,0b11,1.2.3,5LL,1\n1,1,1,1,-Inf\n"))
    assert.are.same({ "0x10", "1" }, columns.a)
    assert.are.same({ "0b11", "1" }, columns.b)
    assert.are.same({ "1.2.3", "1" }, columns.c)
    assert.are.same({ "5LL", "1" }, columns.d)
    assert.are.same({ 1, -math.huge }, columns.e:tolist())
  end)

  it('skip empty lines, but not those with ""', function()
    local columns = data.read_csv(write("r.csv", 'id\n1\n""\n\n\r\n3'))
    assert.are.equal(3, columns.id:numel())
    assert.is_true(columns.id[2]:item() ~= columns.id[2]:item())
    assert.are.same({ "a", "", "b" }, data.read_csv(write("s.csv", 'name\na\n""\n\nb\n')).name)
  end)

  it("take words for missing values by option", function()
    local path = write("t.csv", "n,name,kind\nNA,NA,a\n1,\"null\",N/A\nNaN,x,b\n?,None,a\n")
    assert.are.same({ "NA", "1", "NaN", "?" }, data.read_csv(path).n)
    assert.are.same({ "NA", "null", "x", "None" }, data.read_csv(path, { missing = false }).name)
    local columns = data.read_csv(path, { missing = { "NA", "NaN", "?" } })
    assert.are.equal(1, columns.n:nansum():item())
    assert.are.same({ "", "null", "x", "None" }, columns.name)
    columns = data.read_csv(path, { missing = true, classes = { "kind" } })
    assert.are.same({ "", "1", "", "?" }, columns.n)
    assert.are.same({ "", "", "x", "" }, columns.name)
    assert.are.same({ 0, -100, 1, 0 }, columns.kind:tolist())
    assert.are.same({ "NA" }, select(2, data.read_csv(write("u.csv", "NA\n1\n"), { missing = true })))
    raises("read_csv: option 'missing' is a string ('NA'), expected a boolean or a list of strings", data.read_csv, path,
      { missing = "NA" })
    raises("read_csv: option 'missing': word 1 is a number (0), expected a string", data.read_csv, path, { missing = { 0 } })
  end)

  it("may have 20,000 columns", function()
    local names, row = {}, {}
    for k = 1, 20000 do names[k], row[k] = "c" .. k, tostring(k) end
    local columns, found = data.read_csv(write("v.csv", table.concat(names, ",") .. "\n" .. table.concat(row, ",")))
    assert.are.same({ 20000, 20000 }, { #found, columns.c20000:item() })
  end)

  it("with a fault are errors with the line", function()
    local path = write("w.csv", "a\n1\n\0002\n")
    raises(("read_csv: '%s', line 3: a zero byte, which text does not have"):format(path), data.read_csv, path)
    path = write("c.csv", 'a,b\n"1\n2",3\n4\n')
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

  it("may begin with the byte order mark of UTF-8", function()
    assert.are.same({ "a", "b" }, data.read_lines(write("a.txt", "\239\187\191a\nb")))
    assert.are.same({ { x = 1 }, 2 }, data.read_json_lines(write("a.jsonl", '\239\187\191{"x": 1}\n2')))
  end)

  it("have the numbers of JSON, and none else", function()
    for text, value in pairs { ["0"] = 0, ["-0"] = 0, ["10"] = 10, ["-1.5"] = -1.5, ["1e5"] = 1e5, ["1E+2"] = 100,
      ["0.25e-1"] = 0.025, ["9007199254740992"] = 2 ^ 53, ["18014398509481984"] = 2 ^ 54 } do
      local path = write("n.jsonl", ('{"a. -.5": "5. 01 NaN \\" 0x1", "n": %s}'):format(text))
      assert.are.equal(value, data.read_json_lines(path)[1].n)
      assert.are.same({ { value, value } }, data.read_json_lines(write("n.jsonl", ("[%s,%s]"):format(text, text))))
    end
    for _, text in ipairs { "NaN", "nan", "-NaN", "Infinity", "-Infinity", "inf", "0x10", "0X1", "01", "-01", "00",
      "+1", ".5", "-.5", "5.", "-5.", "5.e3", "0.", "1e", "1e+", "-", "--1", "1.2.3", "1_000", "5LL",
      "9007199254740993", "-9223372036854775809" } do
      for _, form in ipairs { "%s", '{"a": %s}', '["5.", %s, 1]', '{"b": "x", "a": [1, %s]}' } do
        local path = write("n.jsonl", form:format(text))
        local why = message(data.read_json_lines, path)
        assert.is_truthy(why:find(("read_json_lines: '%s', line 1: "):format(path), 1, true), text .. ": " .. why)
      end
    end
    local path = write("n.jsonl", '\n{"id": 9007199254740993}')
    raises(("read_json_lines: '%s', line 2: 9007199254740993 at character 8 is not exact as a number, whose whole numbers are exact "
      .. "to 2^53; { exact = false } rounds it"):format(path), data.read_json_lines, path)
    assert.are.equal(2 ^ 53, data.read_json_lines(path, { exact = false })[1].id)
  end)
end)

describe("WAV files", function()
  local function wav(format, channels, bits, samples)
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
    local short = write("f.wav", wav(1, 1, 16, "\0\0\1\0"):sub(1, -2))
    raises(("read_wav: '%s' has 3 bytes of samples, but its header gives 4"):format(short), data.read_wav, short)
    local streamed = wav(1, 1, 16, "\0\0\0\64"):gsub("data....", "data\255\255\255\255")     -- a size that was not known
    assert.are.same({ { 0, 0.5 } }, data.read_wav(write("g.wav", streamed)):tolist())
    local path = write("e.wav", wav(2, 1, 4, "\0"))
    raises(("read_wav: '%s' has samples of format 2 with 4 bits, expected PCM (1) of 8, 16, 24 or 32 bits or floating "
      .. "point (3) of 32 or 64"):format(path),
      data.read_wav, path)
  end)
end)
