-- SPDX-License-Identifier: MIT
--- Files that numpy, Pillow, pandas, sox, PyTorch and safetensors wrote (fixtures/make.py), and damaged copies of them.
local ms = require "moonshard"
local fixtures = require "spec.support.fixtures"
local message = require "spec.support.message"
local process = require "spec.support.process"

-- Compares a result with the one in expected.json: tensors, strings, numbers, and tables of these.
local function same(expected, got, tolerance, path)
  if type(expected) == "table" and expected.dtype then
    assert.are.same({ expected.dtype, expected.shape }, { got.dtype, got.shape }, path)
    local t = got:reshape(-1)
    for k, value in ipairs(expected.values) do
      local x, at = t[k]:item(), ("%s, value %d"):format(path, k)
      if value == "nan" then
        assert.is_true(x ~= x, at)
      elseif expected.dtype == "int64" then               -- JSON's numbers are not exact beyond 2^53: as the nearest
        assert.are.equal(value, tonumber(x), at)
      else
        local want, found = type(value) == "boolean" and (value and 1 or 0) or value, x
        if type(found) == "boolean" then found = found and 1 or 0 end
        assert.is_true(math.abs(want - found) <= tolerance, ("%s: %s, expected %s"):format(at, found, want))
      end
    end
  elseif type(expected) == "table" then
    for key, value in pairs(expected) do same(value, got[key], tolerance, path .. "." .. key) end
    for key in pairs(got) do assert.is_truthy(expected[key] ~= nil, ("%s has a value %s"):format(path, key)) end
  else
    assert.are.equal(expected, got, path)
  end
end

describe("files of other programs", function()
  for name, e in pairs(fixtures.expected) do
    if e.reader ~= "convert" and e.reader ~= "refused" then
      it("are read with the values of those: " .. name, function()
        local got = fixtures.read(e.reader, fixtures.folder .. "/" .. name, e.options)
        same(e.result, got, e.tolerance, name)
      end)
    end
  end

  it("keep int64 beyond 2^53", function()
    local id, rest = ms.data.read_csv(fixtures.folder .. "/table.csv", { dtype = { id = "int64" } }).id, {}
    -- 2^53 + 1, -2^63 and 2^63 - 1, each less its power of 2
    for k, half in ipairs { 2 ^ 52, -2 ^ 62, 2 ^ 62 } do rest[k] = (id[k] - half - half):item() end
    assert.are.same({ 1, 0, -1 }, rest)
    assert.are.equal(1, (ms.data.read_npz(fixtures.folder .. "/stored.npz").n[1] - 2 ^ 53):item())
  end)

  it("that ms.load does not read say what to write", function()
    for name, e in pairs(fixtures.expected) do
      if e.reader == "refused" then
        local text = message(ms.load, fixtures.folder .. "/" .. name)
        assert.is_truthy(text:find(name, 1, true) and text:find(e.result, 1, true), text)
      end
    end
    assert.matches("names 'model%-00001%-of%-00002.safetensors', which is not in its folder",
      message(ms.load, fixtures.folder .. "/model.safetensors.index.json"))
    assert.matches("torch.save%(torch.jit.load%(FILE%).state_dict%(%)", message(ms.load, fixtures.folder .. "/script.pt"))
    assert.matches("scripts/convert FILE", message(ms.load, fixtures.folder .. "/state.pt"))
    assert.matches("read_npz", message(ms.load, fixtures.folder .. "/stored.npz"))
    assert.matches("read_npy", message(ms.load, fixtures.folder .. "/scalar.npy"))
  end)

  it("that are cut or have flipped bits give the same values or an error with their path, and no other memory", function()
    local folder = process.temp_folder()
    local job = process.script([[
      local fixtures = require "spec.support.fixtures"
      local function peak() return tonumber(io.open("/proc/self/status"):read("*a"):match "VmHWM:%s*(%d+)") end
      for name, e in pairs(fixtures.expected) do
        if e.damage and e.reader ~= "convert" then fixtures.read(e.reader, fixtures.folder .. "/" .. name, e.options) end
      end
      local before = peak()
      local faults, count = fixtures.sweep(arg[1])
      print(("%d copies, %d faults"):format(count, #faults))
      for k = 1, math.min(#faults, 20) do print(faults[k]) end
      print(peak() - before < 512 * 1024 and "memory is bounded" or ("peak memory grew by %d KiB"):format(peak() - before))
    ]], nil, { args = { folder } })
    process.remove_folder(folder)
    assert.are.equal("", job.stderr)
    assert.matches("^%d%d%d%d+ copies, 0 faults\nmemory is bounded\n$", job.stdout)
    assert.are.equal(0, job.code)
  end)
end)
