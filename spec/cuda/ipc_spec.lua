-- SPDX-License-Identifier: MIT
--- GPU memory that another process maps (CUDA IPC), by which ranks on one GPU read each other's tensors.
local ms = require "moonshard"
local F = require "moonshard.core.ffi"
local tensor = require "moonshard.tensor"
local process = require "spec.support.process"
local ffi, lib = F.ffi, F.lib

describe("memory of a GPU", function()
  it("is read and written by another process in place", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    local folder = process.temp_folder()
    local t = ms.arange(0, 5000, { dtype = "float32", device = "cuda" })
    local handle, offset = ffi.new "uint8_t[64]", ffi.new "double[1]"
    assert.are.equal(0, tonumber(lib.ms_cuda_share(tensor.id_of(t), handle, offset)), ffi.string(lib.ms_error()))
    local hex = {}
    for k = 0, 63 do hex[#hex + 1] = ("%02x"):format(handle[k]) end
    process.write(folder .. "/peer.lua", [[
      local ms = require "moonshard"
      local F = require "moonshard.core.ffi"
      local handle = F.ffi.new "uint8_t[64]"
      for k = 0, 63 do handle[k] = tonumber(arg[1]:sub(2 * k + 1, 2 * k + 2), 16) end
      local shape = F.ffi.new("int64_t[1]", 5000)
      local id = F.lib.ms_cuda_open(0, handle, tonumber(arg[2]), F.ffi.C.MS_F32, 1, shape)
      if id == 0 then error(F.ffi.string(F.lib.ms_error()), 0) end
      local t = require("moonshard.tensor").wrap(id)
      print(t:sum():item())
      t:mul_(2)
      ms.cuda.synchronize()
      local full = F.ffi.new "uint8_t[64]"
      print(F.lib.ms_cuda_open(0, full, 0, F.ffi.C.MS_F32, 1, shape) == 0)
    ]])
    local argv = { "sh", "-c", 'cd "$0" && exec luajit "$@"', process.root, folder .. "/peer.lua", table.concat(hex),
      ("%d"):format(offset[0]) }
    local child = process.start(argv,
      { stdout = folder .. "/out", stderr = folder .. "/err" })
    local code = child:wait(60)
    assert.are.equal("", process.read(folder .. "/err"))
    assert.are.equal(0, code)
    assert.are.equal("12497500\ntrue\n", process.read(folder .. "/out"))
    process.remove_folder(folder)
    assert.are.equal(2 * 12497500, t:sum():item())
  end)

  it("is shared completely, or an error gives the reason", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    local handle, offset = ffi.new "uint8_t[64]", ffi.new "double[1]"
    for _, t in ipairs { ms.ones(3), ms.ones(3, 4, { device = "cuda" }):t() } do
      assert.are_not.equal(0, tonumber(lib.ms_cuda_share(tensor.id_of(t), handle, offset)))
      assert.matches("is not a contiguous tensor with memory on cuda", ffi.string(lib.ms_error()))
    end
  end)
end)
