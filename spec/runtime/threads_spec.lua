-- SPDX-License-Identifier: MIT
--- Loops over the threads of a rank: the caller does not wait for a suspended thread.
local ffi = require "ffi"
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"

ffi.cdef [[
long spec_ptrace(long request, int tid, void *, void *) __asm__("ptrace");
int spec_wait_thread(int, int *, int) __asm__("waitpid");
int spec_fork(void) __asm__("fork");
void spec_exit_now(int) __asm__("_exit");
]]
local ATTACH, DETACH, WALL, ENOSYS = 16, 17, 0x40000000, 38

local function threads_of(pid)
  local list = {}
  for name in lfs.dir(("/proc/%d/task"):format(pid)) do
    if tonumber(name) and tonumber(name) ~= pid then list[#list + 1] = tonumber(name) end
  end
  return list
end

local function work()
  local a = ms.ones(300, 300)
  local sum = (a + a):sum():item() + a:matmul(a):sum():item()
  return sum + ms.ones(64, 2048):softmax(-1):sum():item()
end

describe("loops over threads", function()
  it("end while the other threads are stopped", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    local script = folder .. "/script.lua"
    process.write(script, ([[
      package.path = "%s/?.lua;" .. package.path
      local ms, process, lfs = require "moonshard", require "spec.support.process", require "lfs"
      ms.set_num_threads(3)
      io.stdout:setvbuf "line"
      local a = ms.ones(300, 300)
      print((a + a):sum():item())
      local function wait_for(name)
        while not lfs.attributes("%s/" .. name) do process.sleep(0.005) end
      end
      wait_for "go"
      for _ = 1, 20 do print((a + a):sum():item(), a:matmul(a):sum():item()) end
      wait_for "end"                                    -- a process with traced threads cannot end
    ]]):format(process.root, folder))
    local out = folder .. "/out"
    local child = process.start({ "luajit", script }, { stdout = out, stderr = out .. ".err" })
    local limit = process.now() + 30 * process.patience
    while process.read(out) == "" and process.now() < limit and not child:poll() do process.sleep(0.01) end
    local stopped, traces = {}, true
    for _, tid in ipairs(threads_of(child.pid)) do
      if ffi.C.spec_ptrace(ATTACH, tid, nil, nil) == 0 then
        ffi.C.spec_wait_thread(tid, ffi.new "int[1]", WALL)
        stopped[#stopped + 1] = tid
      else traces = ffi.errno() ~= ENOSYS end
    end
    process.write(folder .. "/go", "")
    while select(2, process.read(out):gsub("\n", "")) < 21 and process.now() < limit do process.sleep(0.01) end
    local text = process.read(out)
    for _, tid in ipairs(stopped) do ffi.C.spec_ptrace(DETACH, tid, nil, nil) end
    process.write(folder .. "/end", "")
    assert.are.equal(0, child:wait(10) or child:stop(), process.read(out .. ".err"))
    if not traces then pending "qemu has no ptrace" end
    assert.is_true(#stopped >= 2, "no thread could be stopped")
    assert.are.equal("180000\n" .. ("180000\t27000000\n"):rep(20), text)
  end)

  it("give the same results with any number of threads, changed at any time, and in a forked process", function()
    local before = ms.num_threads()
    finally(function() ms.set_num_threads(before) end)
    ms.set_num_threads(1)
    local expected = work()
    for _, n in ipairs { 2, 7, 3, 40, 1, 2 } do
      ms.set_num_threads(n)
      for _ = 1, 20 do assert.are.equal(expected, work()) end
    end
    local pid = ffi.C.spec_fork()
    if pid == 0 then
      local ok, sum = pcall(work)
      ffi.C.spec_exit_now(ok and sum == expected and 0 or 1)
    end
    local status = ffi.new "int[1]"
    assert.are.equal(pid, ffi.C.spec_wait_thread(pid, status, 0))
    assert.are.equal(0, status[0])
  end)
end)
