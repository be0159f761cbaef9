-- SPDX-License-Identifier: MIT
--- scripts/convert: files of torch.save as safetensors. PyTorch wrote the files (spec/golden/data/make_torch_save.py).
local cjson = require "cjson"
local ms = require "moonshard"
local fixtures = require "spec.support.fixtures"
local process = require "spec.support.process"

local FILES = process.root .. "/spec/golden/data/torch_save.json"
local folder

local function convert(words) return { process.shell("python3 scripts/convert " .. words) } end

-- Writes the file that PyTorch made and returns its path.
local function saved(name)
  local path = ("%s/%s.pt"):format(folder, name)
  process.write(folder .. "/text", cjson.decode(process.read(FILES)).files[name])
  assert.are.equal(0, select(2, process.shell(("base64 -d '%s/text' > '%s'"):format(folder, path))))
  return path
end

local function python(code, ...)
  process.write(folder .. "/program.py", code)
  assert.are.same({ "", 0 }, { process.shell(("python3 '%s/program.py' '%s'"):format(folder, table.concat({ ... }, "' '"))) })
end

local function refuses(wanted, path)
  assert.are.same({ ("scripts/convert: %s\n"):format(wanted), 1 }, convert(("'%s' '%s/out'"):format(path, folder)))
  assert.is_nil(io.open(folder .. "/out"))
end

before_each(function() folder = process.temp_folder() end)
after_each(function() process.remove_folder(folder) end)

describe("scripts/convert", function()
  it("refuses words that it does not know", function()
    assert.are.same({ "scripts/convert: unknown option '--kye'; --help lists the options\n", 1 }, convert "--kye a b")
    assert.are.equal(2, convert("a")[2])
    assert.matches("^usage: scripts/convert ", convert("--help")[1])
  end)

  for _, name in ipairs { "zip", "before_1.6" } do
    it("writes tensors of every kind, views and nested tables, of a file of form " .. name, function()
      local pt, out = saved(name), folder .. "/out"
      assert.are.same({ "scripts/convert: left out what is not a tensor (3): list.1, epoch, type\n", 0 },
        convert(("'%s' '%s'"):format(pt, out)))
      local tensors = ms.load(out)
      assert.are.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, tensors["model.w"]:tolist())
      assert.are.equal("bfloat16", tensors["model.half"].dtype)
      assert.are.same({ { 0, 1, 2 }, { 3, 4, 5 } }, tensors["model.half"]:tolist())
      assert.are.equal(3, tensors["model.n"]:item())
      assert.are.equal("[0, 2]", tostring(tensors["model.empty"].shape))
      assert.are.equal("int16", tensors["model.part"].dtype)
      assert.are.same({ { { 1, 5, 9 }, { 13, 17, 21 } }, { { 2, 6, 10 }, { 14, 18, 22 } } },
        tensors["model.part"]:tolist())
      assert.are.same({ { 0, 1, 2 }, { 0, 1, 2 } }, tensors["model.row"]:tolist())
      assert.are.same({ true, false }, tensors["list.0"]:tolist())
      assert.are.same({ "", 0 }, convert(("--key model '%s' '%s'"):format(pt, out)))
      assert.are.equal(3, ms.load(out).n:item())
      assert.are.same({ ("scripts/convert: '%s' has no entry 'net' (entries: model, list, epoch, type)\n"):format(pt), 1 },
        convert(("--key net '%s' '%s'"):format(pt, out)))
    end)
  end

  it("says why a file cannot be read or written", function()
    local function file(name, text)
      process.write(folder .. "/" .. name, text)
      return folder .. "/" .. name
    end
    local unreadable = "'%s' cannot be read as a file of torch.save: "
    local bad = file("bad.pt", "this is no file of torch.save")
    refuses(unreadable:format(bad) .. "it begins neither as a zip archive nor as a file of PyTorch before 1.6", bad)
    local pt = saved "zip"
    local short = file("short.pt", process.read(pt):sub(1, 900))
    refuses(unreadable:format(short) .. "File is not a zip file", short)
    local old = file("old.pt", process.read(saved "before_1.6"):sub(1, 300))
    refuses(unreadable:format(old) .. "pickle data was truncated", old)
    refuses(("there is no file '%s/none'"):format(folder), folder .. "/none")
    assert.are.same({ ("scripts/convert: '%s' is not a regular file\n"):format(folder), 1 },
      convert(("'%s' '%s'"):format(pt, folder)))
    assert.are.same({ ("scripts/convert: cannot write '%s/none/a': No such file or directory\n"):format(folder), 1 },
      convert(("--key model '%s' '%s/none/a'"):format(pt, folder)))
    local complex, wide, module = saved "complex", saved "uint16", saved "module"
    refuses("'z' is ComplexFloat; ms.load cannot read such tensors", complex)
    refuses("'0' is uint16; ms.load cannot read such tensors", wide)
    refuses(("there is no tensor in '%s', but an object of torch.nn.modules.activation.ReLU; save its state_dict()")
      :format(module), module)
  end)

  it("finds a changed byte of the zip's storages", function()
    local pt = saved "zip"
    python([[
import sys, zipfile
text = bytearray(open(sys.argv[1], "rb").read())
at = text.find(bytes([0, 0, 0, 0, 0, 0, 128, 63, 0, 0, 0, 64]))       # 0, 1 and 2 in float32
text[at + 9] ^= 1
open(sys.argv[1], "wb").write(text)
]], pt)
    local out = convert(("--key model '%s' '%s/out'"):format(pt, folder))
    assert.matches("^scripts/convert: a storage of '[^']*/zip.pt' cannot be read: Bad CRC%-32 for file '[^']*data/0'\n$",
      out[1])
    assert.is_nil(io.open(folder .. "/out"))
  end)

  it("gives the same tensors or an error with the path for a file that is cut or has flipped bits", function()
    local out = folder .. "/right"
    local source = fixtures.folder .. "/state.pt"
    assert.are.same({ "", 0 }, convert(("'%s' '%s'"):format(source, out)))
    local tensors = ms.load(out)
    for name, e in pairs(fixtures.expected["state.pt"].result) do
      assert.are.same({ e.dtype, e.shape }, { tensors[name].dtype, tensors[name].shape })
    end
    assert.are.equal(1, (tensors.ids - 2 ^ 53):item())
    assert.are.same({ 0.5, -2 }, tensors.half:tolist())
    python([[
import os, sys
folder, source, right = sys.argv[1:]
code = compile(open("scripts/convert").read(), "scripts/convert", "exec")
text, right = open(source, "rb").read(), open(right, "rb").read()
copies = [text[:n] for n in range(0, len(text), 7)]
for mask in 255, 1:
    copies += [text[:at] + bytes([text[at] ^ mask]) + text[at + 1:] for at in range(0, len(text), 11)]
copy, out = folder + "/copy.pt", folder + "/converted"
for k, data in enumerate(copies):
    if os.path.exists(copy):
        os.remove(copy)
    open(copy, "wb").write(data)
    sys.argv = ["convert", copy, out]
    try:
        exec(code, {"__name__": "__main__"})
        if open(out, "rb").read() != right:
            print("other values in copy", k)
    except SystemExit as e:
        if copy not in str(e.code):
            print("copy", k, e.code)
]], folder, source, out)
  end)

  it("leaves tensors out that ms.load cannot read, and names them", function()
    local out = folder .. "/out"
    assert.are.same({ "scripts/convert: left out tensors that ms.load cannot read (4): 'small' (float8_e4m3fn), 'u16' (uint16), "
      .. "'u32' (uint32), 'wave' (ComplexFloat)\n", 0 }, convert(("'%s/others.pt' '%s'"):format(fixtures.folder, out)))
    local names = {}
    for name in pairs(ms.load(out)) do names[#names + 1] = name end
    table.sort(names)
    assert.are.same({ "flag", "half", "ids", "weight" }, names)
  end)

  it("says what to write for files that it does not convert", function()
    local files = fixtures.folder
    refuses(("'%s/torch.safetensors' is a file of safetensors, which ms.load(\"%s/torch.safetensors\") reads as it is"):format(
      files, files), files .. "/torch.safetensors")
    refuses(("'%s/script.pt' cannot be read as a file of torch.save: it is a TorchScript program; in PyTorch, write "
      .. "torch.save(torch.jit.load(FILE).state_dict(), 'new.pt') and convert new.pt"):format(files), files .. "/script.pt")
    refuses(("'%s/model.safetensors.index.json' is text in JSON, such as the index of a model in several files: convert "
      .. "each of the files that it lists under weight_map"):format(files), files .. "/model.safetensors.index.json")
    refuses(("'%s/stored.npz' cannot be read as a file of torch.save: it is an archive of NumPy, which ms.data.read_npz "
      .. "reads"):format(files), files .. "/stored.npz")
  end)

  it("runs no code that a file names", function()
    local pt, trace = folder .. "/evil.pt", folder .. "/trace"
    python([[
import os, pickle, sys
class Evil:
    def __reduce__(self):
        return os.system, ("touch '%s'" % sys.argv[2],)
with open(sys.argv[1], "wb") as f:
    for value in (0x1950a86a20f9469cfc6c, 1001, {}, Evil(), []):
        pickle.dump(value, f, 2)
]], pt, trace)
    refuses(("there is no tensor in '%s', but an object of posix.system; save its state_dict()"):format(pt), pt)
    assert.is_nil(io.open(trace))
  end)
end)
