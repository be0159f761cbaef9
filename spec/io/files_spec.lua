-- SPDX-License-Identifier: MIT
--- Tensors in files: load returns what save wrote; a file is complete or absent; nothing in a bad file is trusted.
local ffi = require "ffi"
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local state = require "moonshard.io.files"

local folder

local function path(name) return folder .. "/" .. name end

local function write(name, text)
  process.write(path(name), text)
  return path(name)
end

local function read(name) return process.read(path(name)) end

--- A safetensors file with this header and this much data.
local function file(header, bytes, length)
  return ffi.string(ffi.new("uint64_t[1]", length or #header), 8) .. header .. ("\0"):rep(bytes or 0)
end

describe("safetensors files", function()
  before_each(function() folder = process.temp_folder() end)
  after_each(function() process.remove_folder(folder) end)

  it("return every dtype, shape and metadata that was saved", function()
    local tensors = {
      scalar = ms.tensor(2.5),
      empty = ms.tensor({}, { dtype = "float32" }),
      weights = ms.tensor({ { 1, -2, 3.5 }, { 4, 5e-30, -0.125 } }),
      double = ms.tensor({ 1 / 3, math.huge }, { dtype = "float64" }),
      half = ms.tensor({ 0.5, -1024 }, { dtype = "float16" }),
      brain = ms.tensor({ 1, 256, -0.375 }, { dtype = "bfloat16" }),
      ids = ms.tensor({ 1, -2, 2 ^ 40 }, { dtype = "int64" }),
      small = ms.tensor({ 7, -8 }, { dtype = "int32" }),
      bytes = ms.tensor({ 0, 127, 255 }, { dtype = "uint8" }),
      flags = ms.tensor { true, false, true },
    }
    local metadata = { format = "ms", text = 'quote " back\\slash \n tab\t \1 é 漢 😀' }
    ms.save(path "all", tensors, { metadata = metadata })
    local got, got_metadata = ms.load(path "all")
    assert.are.same(metadata, got_metadata)
    local n = 0
    for name, t in ms.sorted_pairs(tensors) do
      n = n + 1
      assert.are.equal(t.dtype, got[name].dtype)
      assert.are.same(t:tolist(), got[name]:tolist())
      assert.are.equal(tostring(t.shape), tostring(got[name].shape))
    end
    assert.are.equal(10, n)
    assert.are.same({ "all" }, process.names(folder))
  end)

  it("return tables of tensors, numbers, strings and booleans as they were saved", function()
    local model = ms.nn.Sequential(ms.nn.Linear(2, 3), ms.nn.Linear(3, 1))
    local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
    model(ms.ones(1, 2)):sum():backward()
    optimizer:step()
    optimizer:zero_grad()
    local shared = ms.arange(3)
    local saved = { model = model:state_dict(), optimizer = optimizer:state_dict(), epoch = 3, lr = 0.1,
      best = -math.huge, worst = 0 / 0, name = 'caf\195\169 \0 "x"', done = false, empty = {},
      list = { 1, { shared, shared }, "three" }, [-7] = true, [0.5] = "half", ["a.b"] = ms.ones(1), a = { b = ms.ones(2) } }
    ms.save(path "c", saved, { metadata = { note = "n" } })
    local c, metadata = ms.load(path "c")
    assert.are.same({ note = "n" }, metadata)
    for _, name in ipairs { "epoch", "lr", "best", "name", "done", -7, 0.5 } do
      assert.are.equal(saved[name], c[name])
    end
    assert.is_true(c.worst ~= c.worst)
    assert.are.same({}, c.empty)
    assert.are.equal("three", c.list[3])
    assert.are.same({ 0, 1, 2 }, c.list[2][1]:tolist())
    assert.are.equal(c.list[2][1], c.list[2][2])                  -- one tensor stays one
    assert.are.same({ { 1 }, { 1, 1 } }, { c["a.b"]:tolist(), c.a.b:tolist() })
    local other = ms.nn.Sequential(ms.nn.Linear(2, 3), ms.nn.Linear(3, 1))
    other:load_state_dict(c.model)
    local continued = ms.optim.AdamW(other:parameters())
    continued:load_state_dict(c.optimizer)
    for _, m in ipairs { model, other } do m(ms.ones(1, 2)):sum():backward() end
    optimizer:step()
    continued:step()
    assert.is_true(other[1].weight:equal(model[1].weight))
    local own = { own = {} }
    own.own.again = own
    assert.error_matches(function() ms.save(path "c", own) end, "save: 'own.again' is a table that contains itself")
  end)

  it("whose table does not fit their tensors are refused", function()
    for _, text in ipairs { "", "1", "null", '{"t":"w"}', '{"k":["a"],"v":[]}', '{"k":["a"],"v":[{"t":"none"}]}',
      '{"k":["a"],"v":[{"n":"x"}]}', '{"k":[{"n":"nan"}],"v":[true]}', '{"k":["a"],"v":[null]}', ("["):rep(2000) } do
      ms.save(path "t", { w = ms.ones(1) }, { metadata = { ["moonshard.tree"] = text } })
      assert.error_matches(function() ms.load(path "t") end, "the metadata 'moonshard.tree' is damaged, or does not fit the tensors of the file")
      assert.are.equal(1, ms.load(path "t", { names = { "w" } }).w:item())
    end
  end)

  it("give the tensors under a prefix, and their metadata is no table of options", function()
    local model = ms.nn.Linear(2, 1)
    ms.save(path "p", { model = model:state_dict(), step = 1 }, { metadata = { note = "n" } })
    local other = ms.nn.Linear(2, 1)
    other:load_state_dict(ms.load(path "p", { prefix = "model." }))
    assert.is_true(other.weight:equal(model.weight))
    assert.error_matches(function() ms.load(path "p", { prefix = "modle." }) end,
      "no tensor whose name begins with 'modle.'; its first name is 'model.bias'")
    assert.error_matches(function() ms.load(path "p", { prefix = "a", names = {} }) end,
      "options 'names' and 'prefix' exclude each other")
  end)

  it("of other programs are read", function()
    local header = '{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header = header .. (" "):rep(-#header % 8)
    write("theirs", file(header) .. ffi.string(ffi.new("float[2]", 1.5, -2), 8))
    local got, metadata = ms.load(path "theirs")
    assert.are.same({ 1.5, -2 }, got.x:tolist())
    assert.are.same({ a = "b" }, metadata)
  end)

  it("are read by other programs: the format's header and data, the checksums as one more metadata text", function()
    ms.save(path "ours", { x = ms.tensor { 1.5, -2 } }, { metadata = { a = "b" } })
    local text = read "ours"
    local length = text:byte(1) + 256 * text:byte(2)
    local header = require("cjson").decode(text:sub(9, 8 + length))
    assert.are.same({ dtype = "F32", shape = { 2 }, data_offsets = { 0, 8 } }, header.x)
    assert.are.equal("b", header.__metadata__.a)
    local hex = ("%x"):rep(16)
    assert.matches("^xxh64 1048576 " .. hex .. " " .. hex .. "$", header.__metadata__["moonshard.sums"])
    assert.are.equal(ffi.string(ffi.new("float[2]", 1.5, -2), 8), text:sub(9 + length))
    assert.are.same({ a = "b" }, select(2, ms.load(path "ours")))
  end)

  it("of the previous version, without checksums, are read", function()
    local got, metadata = ms.load(process.root .. "/spec/golden/data/before_sums/file.safetensors")
    assert.are.same({ 1.5, -2 }, got.x:tolist())
    assert.are.same({ true }, got.y:tolist())
    assert.are.same({ a = "b" }, metadata)
  end)

  it("have checksums that do not count in another program's copy of the metadata", function()
    ms.save(path "ours", { x = ms.tensor { 1.5, -2 } }, { metadata = { a = "b" } })
    local header = read("ours"):match("^........(.-)%s*$"):match "^{.*}"
    header = header:gsub("%s", ""):gsub("xxh641048576", "xxh64 1048576 ")
    write("theirs", file(header) .. ffi.string(ffi.new("float[2]", 3, 4), 8))
    local got, metadata = ms.load(path "theirs")
    assert.are.same({ 3, 4 }, got.x:tolist())
    assert.are.same({ a = "b" }, metadata)
    local mark = ("\t\r"):rep(4)
    for _, case in ipairs {
      { '{"__metadata__":{"moonshard.sums":" "}' .. mark .. "}", 0 }, { '{"__metadata__":{"moonshard.sums":""}' .. mark
      .. "}", 0 },
      { '{"__metadata__":{"moonshard.sums":"xxh64 1048576 0"},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
      .. mark .. "}", 1 },
      { '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}' .. mark .. "}", 1 },
    } do
      write("short", file(case[1], case[2]))
      assert.error_matches(function() ms.load(path "short") end,
        "is damaged: its header is not the one that was written")
      assert.are.same({}, select(2, ms.load(path "short", { verify = false })))
    end
    assert.error_matches(function() ms.save(path "ours", {}, { metadata = { ["moonshard.sums"] = "x" } }) end,
      "this name is reserved for the file's checksums")
  end)

  it("align the data and put wide elements first", function()
    ms.save(path "mixed", { a = ms.tensor({ 1, 2, 3 }, { dtype = "uint8" }),
      b = ms.tensor({ 1 }, { dtype = "float64" }) })
    local text = read "mixed"
    assert.are.equal(0, (8 + text:byte(1) + 256 * text:byte(2)) % 8)
    assert.matches('"a":{"dtype":"U8","shape":%[3%],"data_offsets":%[8,11%]}', text)
  end)

  it("hold transposed and narrowed tensors in row-major order", function()
    local t = ms.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
    ms.save(path "views", { t = t:t(), n = t:narrow(2, 2, 2) })
    local got = ms.load(path "views")
    assert.are.same({ { 1, 4 }, { 2, 5 }, { 3, 6 } }, got.t:tolist())
    assert.are.same({ { 2, 3 }, { 5, 6 } }, got.n:tolist())
  end)

  it("give single tensors and rows of them", function()
    ms.save(path "rows", { a = ms.tensor { 9 }, b = ms.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } } })
    assert.are.same({ 9 }, ms.load(path "rows", { names = { "a" } }).a:tolist())
    assert.is_nil(ms.load(path "rows", { names = { "a" } }).b)
    local reader = state.reader(path "rows")
    assert.are.same({ { 3, 4 }, { 5, 6 } }, reader:read("b", 2, 2):tolist())
    assert.are.equal("[0, 2]", tostring(reader:read("b", 4, 0).shape))
    assert.has_error(function() reader:read("b", 2, 3) end)
    local ok, err = pcall(reader.read, reader, "bb")
    assert.is_false(ok)
    assert.matches("unknown tensor 'bb'; did you mean '[ab]'", err)
    reader:close()
  end)

  it("replace the target of a link; the link stays", function()
    ms.save(path "target", { x = ms.tensor { 1 } })
    lfs.mkdir(path "sub")
    assert.is_true(lfs.link("../target", path "sub/link", true))
    ms.save(path "sub/link", { x = ms.tensor { 2 } })
    assert.are.equal("../target", lfs.symlinkattributes(path "sub/link", "target"))
    assert.are.equal(2, ms.load(path "target").x:item())
    assert.are.same({ "sub", "target" }, process.names(folder))
    assert.are.same({ "link" }, process.names(path "sub"))
    os.remove(path "target")
    assert.error_matches(function() ms.save(path "sub/link", { x = ms.tensor { 3 } }) end,
      "is a symbolic link whose target cannot be reached: No such file")
    os.remove(path "sub/link")
    lfs.rmdir(path "sub")
  end)

  it("replace only files, not a device or a pipe", function()
    ms.save(path "tensors", { x = ms.tensor { 1 } })
    ms.save(path "tensors", { x = ms.tensor { 2 } })
    assert.are.equal(0, os.execute("mkfifo '" .. path "pipe" .. "'"))
    for _, name in ipairs { path "pipe", folder } do
      local ok, err = pcall(ms.save, name, { x = ms.tensor { 1 } })
      assert.is_false(ok)
      assert.truthy(err:find(("save: '%s' exists and is not a regular file"):format(name), 1, true), err)
    end
    assert.are.equal("named pipe", lfs.attributes(path "pipe", "mode"))
    assert.error_matches(function() ms.load(path "pipe") end, "load: '.*pipe' is not a regular file")
    os.remove(path "pipe")
  end)

  it("have a name: a path that is empty or ends like a folder is refused", function()
    ms.save(path "tensors", { x = ms.tensor { 1 } })
    local before = process.names(folder)
    for _, name in ipairs { path "new/", path "new//", path "tensors/", folder .. "/" } do
      for who, call in pairs { save = function() ms.save(name, { x = ms.tensor { 2 } }) end,
        load = function() ms.load(name) end } do
        local ok, err = pcall(call)
        assert.is_false(ok)
        assert.truthy(err:find(("%s: '%s' ends in '/', like a folder; expected the name of a file"):format(who, name), 1,
          true), err)
      end
    end
    assert.error_matches(function() ms.save("", {}) end, "save: the path is empty")
    assert.error_matches(function() ms.load "" end, "load: the path is empty")
    assert.are.same(before, process.names(folder))
    assert.are.equal(1, ms.load(path "tensors").x:item())
  end)

  it("lose the temporary files of killed saves with the next one of this name, and no other file", function()
    local at = path "swept"
    process.write(path "script.lua", ([[
      package.path = "%s/lua/?.lua;%s/lua/?/init.lua;" .. package.path
      local saver = require("moonshard.io.files").saver(arg[1], {})
      for name in require("lfs").dir(arg[2]) do
        if name:find("swept.tmp-", 1, true) then io.write(name, "\n") end
      end
      io.flush()
      io.open(arg[3]):read()                              -- reading from a pipe: waits
      saver:abort()
    ]]):format(process.root, process.root))
    assert.are.equal(0, os.execute("mkfifo '" .. path "wait" .. "'"))
    local child = process.start({ "luajit", path "script.lua", at, folder, path "wait" }, { stdout = path "out" })
    local limit = process.now() + 60
    while not process.read(path "out"):find "\n" and process.now() < limit do process.sleep(0.01) end
    local left = process.read(path "out"):match "[^\n]+"
    assert.matches("^swept%.tmp%-%x+%-%x+%-" .. child.pid .. "%-%d+$", left)
    local function like(pattern, by) return path((left:gsub(pattern, by))) end
    local other = { like("^swept", "other"), like("%-%x+%-(%d+%-%d+)$", "-0123456789abcdef-%1"), like("%-%d+$", ""),
      like("$", "x"), path "swept.tmp-0123456789abcdef" }
    for _, name in ipairs(other) do process.write(name, "mine") end
    local folder_like = like("%.tmp%-%x%x%x%x", ".tmp-0000")
    lfs.mkdir(folder_like)
    ms.save(at, { x = ms.tensor { 1 } })
    assert.are.equal("file", lfs.attributes(path(left), "mode"))              -- the process that writes it is running
    process.kill(child.pid, 9)
    child:wait(10)
    ms.save(at, { x = ms.tensor { 2 } })
    assert.is_nil(lfs.attributes(path(left)))
    assert.are.equal("directory", lfs.attributes(folder_like, "mode"))
    for _, name in ipairs(other) do assert.are.equal("mine", process.read(name)) end
    assert.are.equal(2, ms.load(at).x:item())
  end)

  it("have no zero byte in their path or metadata, where the rest would be lost", function()
    ms.save(path "short", { x = ms.tensor { 1 } })
    for _, case in ipairs {
      { function() ms.save(path "short\0er", { x = ms.tensor { 2 } }) end, "save: the path .- contains a zero byte" },
      { function() ms.load(path "short\0er") end, "load: the path .- contains a zero byte" },
      { function() ms.save(path "short", {}, { metadata = { a = "b\0c" } }) end,
      "save: metadata \"a\" contains a zero byte" },
      { function() ms.fsdp.save(path "short\0er", ms.nn.Linear(1, 1)) end,
      "save: the folder's path .- contains a zero byte" },
    } do
      local ok, err = pcall(case[1])
      assert.is_false(ok)
      assert.matches(case[2], err)
    end
    assert.are.equal(1, ms.load(path "short").x:item())
  end)

  it("do not change the old file if writing fails", function()
    ms.save(path "f", { x = ms.tensor { 1 } })
    local before = read "f"
    assert.has_error(function() ms.save(path "f", { x = ms.empty(2, { device = "meta" }) }) end)
    local both = { { name = "x", dtype = "float32", shape = { 1 } }, { name = "y", dtype = "float32", shape = { 1 } } }
    local saver = state.saver(path "f", both)
    saver:write("x", ms.tensor { 2 })
    local ok, err = pcall(saver.commit, saver)
    assert.is_false(ok)
    assert.matches("tensor 'y' was declared but not written", err)
    assert.are.equal(before, read "f")
    assert.are.same({ "f" }, process.names(folder))
    ok, err = pcall(ms.save, folder .. "/nowhere/f", { x = ms.tensor { 1 } })
    assert.is_false(ok)
    assert.matches("save: cannot create '.*': No such file or directory", err)
  end)

  it("refuse tensors that differ from their declaration, and duplicate names", function()
    local saver = state.saver(path "f", { { name = "x", dtype = "float32", shape = { 2 } } })
    assert.error_matches(function() saver:write("x", ms.tensor { 1 }) end, "but was declared as float32 %[2%]")
    assert.error_matches(function() saver:write("z", ms.tensor { 1 }) end, "tensor 'z' was not declared")
    saver:abort()
    local twice = { { name = "x", dtype = "float32", shape = { 1 } }, { name = "x", dtype = "float32", shape = { 1 } } }
    saver = state.saver(path "f", twice)
    assert.error_matches(function() saver:write("x", ms.tensor { 1 }) end, "'x' was declared twice")
    saver:abort()
    assert.are.same({}, process.names(folder))
  end)

  local one = '"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
  local bad = {
    { "a file of 7 bytes", "1234567", "7 bytes, at least 8" },
    { "a header longer than the file", file("{}", 0, 3), "the header has 3 bytes, the file 10" },
    { "a header of 2^63 bytes", ("\255"):rep(7) .. "\127{}", "the header has" },
    { "an empty header", file "", "expected '{' first" },
    { "a blank before '{'", file " {}", "expected '{' first" },
    { "something after the end", file "{}x", "unexpected text after" },
    { "bytes that are no UTF-8", file '{"\255":1}', "invalid UTF%-8" },
    { "an overlong form", file '{"\192\128":1}', "invalid UTF%-8" },
    { "a surrogate in UTF-8", file '{"\237\160\128":1}', "invalid UTF%-8" },
    { "a lone surrogate escape", file '{"\\ud800x":{}}', "lone surrogate" },
    { "a zero byte in a name", file '{"\\u0000":{}}', "zero byte" },
    { "a control character", file '{"\n":{}}', "control character" },
    { "a tensor twice", file("{" .. one .. "," .. one .. "}", 4), "tensor 'x' occurs twice" },
    { "a field twice", file('{"x":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
    "a field occurs twice" },
    { "metadata twice", file '{"__metadata__":{"a":"1","a":"2"}}', "metadata 'a' occurs twice" },
    { "metadata that is no string", file '{"__metadata__":{"a":1}}', "expected a string" },
    { "deeper nesting", file('{"x":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}}', 4),
    "expected a whole number" },
    { "an unknown field", file('{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"y":1}}', 4),
    "an unknown field" },
    { "a missing field", file('{"x":{"dtype":"F32","shape":[1]}}', 4), "lacks" },
    { "a dtype without name", file('{"x":{"dtype":"","shape":[4],"data_offsets":[0,4]}}', 4), "a dtype has no name" },
    { "a fraction", file('{"x":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', 4), "fraction" },
    { "a negative number", file('{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', 4), "not negative" },
    { "a number with a leading 0", file('{"x":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}', 4),
    "a leading 0" },
    { "a number beyond 2^63", file('{"x":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}}', 4),
    "too large" },
    { "nine dimensions", file('{"x":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}', 1),
    "more than 8 dimensions" },
    { "a shape that overflows", file('{"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}', 4),
    "too large" },
    { "an overflow behind a 0", file('{"x":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}}'),
    "too large" },
    { "offsets in the wrong order", file('{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', 4),
    "are outside of the" },
    { "offsets beyond the data", file("{" .. one .. "}", 3), "are outside of the 3 bytes" },
    { "a size that is not the shape's", file('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4),
      "has 4 bytes, but float32 %[2%] needs 8" },
    { "a gap", file('{"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2), "begins at byte 1" },
    { "an overlap", file(
    '{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', 3),
      "begins at byte 1" },
    { "a tail", file("{" .. one .. "}", 5), "end at byte 4, but the data ends at 5" },
    { "no closing brace", file("{" .. one, 4), "expected ',' or '}'" },
    { "a list as header", file "[]", "expected '{' first" },
    { "a dtype that is no string", file('{"x":{"dtype":4,"shape":[1],"data_offsets":[0,4]}}', 4), "expected a string" },
    { "a shape that is no list", file('{"x":{"dtype":"F32","shape":1,"data_offsets":[0,4]}}', 4),
    "shape is not an array" },
    { "three offsets", file('{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}', 4),
    "data_offsets needs two numbers" },
    { "one offset", file('{"x":{"dtype":"F32","shape":[1],"data_offsets":[0]}}', 4), "data_offsets needs two numbers" },
    { "an exponent", file('{"x":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', 4), "exponent" },
    { "a tensor that is a list", file('{"x":["F32",[1],[0,4]]}', 4), "entry is not an object" },
    { "metadata that is a list", file '{"__metadata__":["a"]}', "__metadata__ is not an object" },
    { "a comma before the end", file("{" .. one .. ",}", 4), "expected" },
    { "an escape that is none", file '{"\\x":1}', "escape" },
    { "a header cut inside a string", file '{"x', "a string does not end" },
    { "a name of 1025 bytes", file('{"' .. ("n"):rep(1025) .. '":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
      "1025 bytes, at most 1024" },
  }
  local said = {}
  for _, case in ipairs(bad) do
    it("are refused with " .. case[1], function()
      write("bad", case[2])
      local ok, err = pcall(ms.load, path "bad")
      assert.is_false(ok)
      assert.matches("^load: '[^']*bad' is not a valid safetensors file: ", err)
      assert.matches(case[3], err)
      local text = err:match "safetensors file: (.*)"
      assert.is_nil(said[text], case[1] .. " and " .. tostring(said[text]))
      said[text] = case[1]
    end)
  end

  it("are refused in more than 40 ways, each with a message of its own", function() assert.is_true(#bad > 40) end)

  it("are refused with any one byte changed, of header or data, and cut anywhere", function()
    ms.save(path "good", { x = ms.tensor { { 1, 2 } }, y = ms.tensor { true } }, { metadata = { k = "v" } })
    local good = read "good"
    local seed = 12345
    for at = 1, #good do
      for k = 1, 2 do                                     -- first a changed bit, then another byte
        seed = (seed * 1103515245 + 12345) % 2 ^ 31
        local random = math.floor(seed / 65536)
        local byte = k == 1 and bit.bxor(good:byte(at), bit.lshift(1, random % 8))
          or (good:byte(at) + 1 + random % 255) % 256
        write("changed", good:sub(1, at - 1) .. string.char(byte) .. good:sub(at + 1))
        assert.is_false((pcall(ms.load, path "changed")), ("byte %d as %d"):format(at, byte))
      end
      write("cut", good:sub(1, at - 1))
      assert.is_false((pcall(ms.load, path "cut")))
    end
  end)

  it("are verified block by block: tensors of a name and rows are given where only others are damaged", function()
    local rows = 600000                                   -- of 4 bytes: three blocks, the last one partial
    ms.save(path "blocks", { a = ms.arange(rows, { dtype = "float32" }), b = ms.ones(3) })
    local text = read "blocks"
    local first = #text - 12 - 4 * rows
    local function damaged(at)
      write("damaged", text:sub(1, at - 1) .. string.char((text:byte(at) + 128) % 256) .. text:sub(at + 1))
    end
    damaged(first + 2 ^ 20 + 5)                           -- in the second block of a
    local damage = "is damaged: tensor 'a' is not what was written %(the checksum of its block 2 differs%)"
    assert.error_matches(function() ms.load(path "damaged") end, damage)
    assert.are.same({ 1, 1, 1 }, ms.load(path "damaged", { names = { "b" } }).b:tolist())
    local reader = state.reader(path "damaged")
    assert.are.same({ 9, 10 }, reader:read("a", 10, 2):tolist())
    assert.are.same({ rows - 1 }, reader:read("a", rows, 1):tolist())
    assert.error_matches(function() reader:read("a", 2 ^ 18 - 1, 5) end, damage)
    assert.error_matches(function() reader:read("a", 3e5, 1) end, damage)
    reader:close()
    assert.is_false(ms.load(path "damaged", { verify = false }).a:equal(ms.arange(rows, { dtype = "float32" })))
    for _, at in ipairs { first + 1, #text - 12, #text } do
      damaged(at)
      assert.error_matches(function() ms.load(path "damaged") end, "is damaged: tensor '[ab]'")
    end
  end)

  it("with types that tensors lack give the other tensors and name these", function()
    local header, at = {}, 0
    local function add(name, dtype, bytes)
      header[#header + 1] = ('"%s":{"dtype":"%s","shape":[2],"data_offsets":[%d,%d]}'):format(name, dtype, at, at + bytes)
      at = at + bytes
    end
    local foreign = { "F8_E4M3", "F8_E5M2", "F4", "U16", "U32", "U64", "C64", "A_TYPE_OF_A_LATER_VERSION" }
    for k, dtype in ipairs(foreign) do add("x." .. dtype, dtype, k) end
    add("w", "F32", 8)
    local f = write("others", file("{" .. table.concat(header, ",") .. "}", at))
    local warnings, tensors, metadata = ms.catch_warnings(ms.load, f)
    assert.are.same({ 0, 0 }, tensors.w:tolist())
    assert.is_nil(next(tensors, next(tensors)))
    assert.are.same({}, metadata)
    assert.are.equal(1, #warnings)
    local begin = "load: '%s': tensors left out, because Moonshard's tensors do not have their dtype: 8: "
    assert.are.equal(1, warnings[1]:find(begin:format(f), 1, true))
    for _, dtype in ipairs(foreign) do
      assert.is_truthy(warnings[1]:find(("'x.%s' (%s)"):format(dtype, dtype:sub(1, 23)), 1, true), warnings[1])
    end
    for _, dtype in ipairs(foreign) do
      assert.error_matches(function() ms.load(f, { names = { "w", "x." .. dtype } }) end,
        ("load: '[^']*/others': tensor 'x.%s' has dtype %s, which Moonshard's tensors do not have"):format(dtype, dtype:sub(1, 23)))
    end
    assert.are.same({}, (ms.catch_warnings(ms.load, f, { names = { "w" } })))
    assert.are.same({}, (ms.catch_warnings(ms.load, f, { prefix = "w" })))
    assert.is_false(pcall(ms.load, write("cut", file("{" .. table.concat(header, ",") .. "}", at - 1))))
  end)

  it("of other programs give bools of 0 and 1 for any bytes", function()
    local header = '{"x":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}'
    local t = ms.load(write("bools", file(header) .. "\0\1\255")).x
    assert.are.equal(2, t:sum():item())
    assert.are.same({ 0, 1, 1 }, t:int():tolist())
  end)

  it("that are missing, or folders, are named as such", function()
    assert.error_matches(function() ms.load(path "none") end, "load: cannot open '.*none': No such file or directory")
    assert.error_matches(function() ms.load(folder) end, "is not a regular file")
  end)
end)
