-- SPDX-License-Identifier: MIT
--- GPU memory that another process maps (CUDA IPC), by which ranks on one GPU read each other's tensors.
local ms = require "moonshard"
local F = require "moonshard.core.ffi"
local tensor = require "moonshard.tensor"
local process = require "spec.support.process"
local ffi, lib = F.ffi, F.lib

--- Starts a process that opens a shared tensor of 5000 float32 as t and runs the script; `shared` are a handle and an
--- offset. `wait()` of the script waits for the spec's call of `go`. modes: of its emulated GPU.
local function peer(folder, shared, script, modes)
  process.write(folder .. "/peer.lua", ([[
    io.stdout:setvbuf "no"
    local ms = require "moonshard"
    local process = require "spec.support.process"
    local F = require "moonshard.core.ffi"
    local handle = F.ffi.new "uint8_t[64]"
    for k = 0, 63 do handle[k] = tonumber(arg[1]:sub(2 * k + 1, 2 * k + 2), 16) end
    local shape = F.ffi.new("int64_t[1]", 5000)
    local function open(h)
      local id = F.lib.ms_cuda_open(0, h or handle, tonumber(arg[2]), F.ffi.C.MS_F32, 1, shape)
      if id == 0 then return nil, F.ffi.string(F.lib.ms_error()) end
      return require("moonshard.tensor").wrap(id)
    end
    local function wait()
      while process.read "%s/go" == "" do process.sleep(0.002) end
    end
    local function maps()
      return select(2, process.read("/proc/self/maps"):gsub("moonshard_emulated_gpu", ""))
    end
    %s]]):format(folder, script))
  return process.start({ "sh", "-c", 'cd "$0" && exec luajit "$@"', process.root, folder .. "/peer.lua", unpack(shared) },
    { stdout = folder .. "/out", stderr = folder .. "/err", env = modes and { MOONSHARD_EMULATOR = modes } })
end

local function share(t)
  local handle, offset = ffi.new "uint8_t[64]", ffi.new "double[1]"
  assert.are.equal(0, tonumber(lib.ms_cuda_share(tensor.id_of(t), handle, offset)), ffi.string(lib.ms_error()))
  local hex = {}
  for k = 0, 63 do hex[#hex + 1] = ("%02x"):format(handle[k]) end
  return { table.concat(hex), ("%d"):format(offset[0]) }
end

describe("memory of a GPU", function()
  it("is read and written by another process in place", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    local folder = process.temp_folder()
    local t = ms.arange(0, 5000, { dtype = "float32", device = "cuda" })
    local child = peer(folder, share(t), [[
      local t = assert(open())
      print(t:sum():item())
      t:mul_(2)
      ms.cuda.synchronize()
      print(open(F.ffi.new "uint8_t[64]") == nil)
    ]])
    local code = child:wait(60)
    assert.are.equal("", process.read(folder .. "/err"))
    assert.are.equal(0, code)
    assert.are.equal("12497500\ntrue\n", process.read(folder .. "/out"))
    process.remove_folder(folder)
    assert.are.equal(2 * 12497500, t:sum():item())
  end)

  --- Shares a tensor, and releases it while a process has it open. Returns the process, and a function that counts the
  --- bytes that are still held. Meanwhile the tensor's address is not used again.
  local function released(folder, script)
    collectgarbage()
    collectgarbage()
    local before = ms.memory_stats("cuda").allocated
    local t = ms.arange(0, 5000, { dtype = "float32", device = "cuda" })
    local function address(x) return tonumber(ffi.cast("intptr_t", x:data_ptr())) end
    local at = address(t)
    local child = peer(folder, share(t), script)
    local deadline = process.now() + 60 * process.patience
    while process.read(folder .. "/out") == "" and not child:poll() and process.now() < deadline do
      process.sleep(0.002)
    end
    t:release()
    ms.scope(function()
      for _ = 1, 20 do
        assert.are_not.equal(at, address(ms.full({ 5000 }, 7, { device = "cuda" })))
      end
      ms.cuda.synchronize()
    end)
    return child, function()
      ms.empty_cache()
      return ms.memory_stats("cuda").allocated - before
    end
  end

  it("is not used again before the other process has released its tensor, and then unmapped", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    local folder = process.temp_folder()
    local child, held = released(folder, [[
      ms.ones(1, { device = "cuda" })
      local before = maps()
      local t, same = assert(open()), assert(open())
      print(t:sum():item())
      wait()
      print(t:sum():item())
      local y = t * 2
      t:release()
      print(same:sum():item())
      same:release()
      print(maps() - before, y:sum():item())
      print(select(2, open()))
    ]])
    assert.are.equal(20000, held())
    process.write(folder .. "/go", "go")
    assert.are.equal(0, child:wait(60), process.read(folder .. "/err"))
    assert.are.equal("12497500\n12497500\n12497500\n0\t24995000\n"
      .. "cuda_open: no process of this network namespace shares this memory any more\n", process.read(folder .. "/out"))
    assert.are.equal(0, held())
    process.remove_folder(folder)
  end)

  it("is mapped after a failure to map it, and a failure to unmap it is a line on stderr", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    if os.getenv "MOONSHARD_CUDA" == "real" then return pending "only the emulated GPU fails on demand" end
    local folder = process.temp_folder()
    local t = ms.arange(0, 5000, { dtype = "float32", device = "cuda" })
    local script = [[
      local t, why = open()
      print(why)
      t = t or assert(open())
      print(t:sum():item())
      t:release()
      ms.cuda.synchronize()]]
    local child = peer(folder, share(t), script, "fail:cudaIpcOpenMemHandle:1:1")
    assert.are.equal(0, child:wait(60), process.read(folder .. "/err"))
    assert.matches("^cuda:0: cudaIpcOpenMemHandle[^\n]* mapping memory of another process: [^\n]* %(CUDA error 1%)\n12497500\n$",
      process.read(folder .. "/out"))
    child = peer(folder, share(t), script, "fail:cudaIpcCloseMemHandle:1:1")
    assert.are.equal(0, child:wait(60), process.read(folder .. "/err"))
    assert.are.equal("nil\n12497500\n", process.read(folder .. "/out"))
    assert.matches("moonshard: cuda:0: cudaIpcCloseMemHandle of 0x%x+: [^\n]* %(CUDA error 1%)\n",
      process.read(folder .. "/err"))
    process.remove_folder(folder)
  end)

  it("is used again after the other process was killed", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    local folder = process.temp_folder()
    local child, held = released(folder, "local t = assert(open()) print(t:sum():item()) wait()")
    assert.are.equal(20000, held())
    process.kill(child.pid, process.SIGKILL)
    child:wait(10)
    assert.are.equal(0, held())
    process.remove_folder(folder)
  end)

  it("cannot be shared by a process that has it open, and is not freed to the driver", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    local folder = process.temp_folder()
    local child, held = released(folder, [[
      local t = assert(open())
      print(tonumber(F.lib.ms_cuda_share(require("moonshard.tensor").id_of(t), handle, F.ffi.new "double[1]")))
      print(F.ffi.string(F.lib.ms_error()))
      wait()
      print(t:sum():item())]])
    assert.are.equal(20000, held())
    process.write(folder .. "/go", "go")
    assert.are.equal(0, child:wait(60), process.read(folder .. "/err"))
    assert.matches("^[1-9]%d*\ncuda_share: [^\n]* is in memory of another process; only that process can share it\n12497500\n$",
      process.read(folder .. "/out"))
    process.remove_folder(folder)
  end)

  it("is shared completely, or an error gives the reason", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    local handle, offset = ffi.new "uint8_t[64]", ffi.new "double[1]"
    for _, t in ipairs { ms.ones(3), ms.ones(3, 4, { device = "cuda" }):t() } do
      assert.are_not.equal(0, tonumber(lib.ms_cuda_share(tensor.id_of(t), handle, offset)))
      assert.matches("expected a contiguous tensor with memory on cuda", ffi.string(lib.ms_error()))
    end
  end)
end)
