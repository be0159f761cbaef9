-- SPDX-License-Identifier: MIT
--- The addresses on which the processes of a job on one host listen.
local process = require "spec.support.process"
local patience = process.patience

local build = process.build

describe("on one host #mpi", function()
  local has_ss = os.execute "command -v ss >/dev/null" == 0

  -- The addresses that process `pid` listens on.
  local function listening(pid)
    local found = {}
    local pipe = io.popen "ss -Htlnp"
    for line in pipe:lines() do
      if line:find(("pid=%d,"):format(pid), 1, true) then found[#found + 1] = line:match "^%S+ +%S+ +%S+ +(%S+)" end
    end
    pipe:close()
    return found
  end

  local function only_loopback(pid, what)
    local addresses = listening(pid)
    assert.is_true(#addresses > 0, what)
    for _, address in ipairs(addresses) do
      assert.is_truthy(address:find "^127%.0%.0%.1[:%%]" or address:find "^%[::1%]:" or address:find "%%lo:", what
        .. " listens on " .. address)
    end
  end

  it("mpirun listens on loopback only, under scripts/train and by itself", function()
    if not has_ss then return pending "the program ss is not installed" end
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    process.write(folder .. "/text", ("a few words to learn from\n"):rep(200))
    local train = { process.root .. "/scripts/train", "--no-install" }
    for word in ("--ranks 2 --steps 100000 --dim 16 --heads 2 --layers 1 --context 16 --batch 4 --sample 0 --warmup 1"):gmatch "%S+" do
      train[#train + 1] = word
    end
    for _, word in ipairs { "--data", folder .. "/text", "--out", folder .. "/run" } do train[#train + 1] = word end
    -- mpirun with the shim, without ranks of moonshard: it listens on loopback only.
    process.write(folder .. "/wait.sh", "echo step 1/; sleep 60\n")
    local shim = { "mpirun", "-n", "2", "sh", folder .. "/wait.sh" }
    -- Without the shim, rank 0 binds mpirun's sockets to loopback when the library is loaded.
    process.write(folder .. "/wait.lua",
      ("package.path = %q require 'moonshard'.dist.barrier() print 'step 1/' io.flush() os.execute 'sleep 60'"):format(
      ("@/lua/?.lua;@/lua/?/init.lua;@/?.lua;"):gsub("@", process.root)))
    local plain = { "mpirun", "-n", "2", "luajit", folder .. "/wait.lua" }
    for k, words in ipairs { train, shim, plain } do
      local env = process.mpirun_env { LD_PRELOAD = k == 2 and build .. "/libmoonshard_mpirun.so" or nil }
      if k > 1 or not process.tool then
        local out = ("%s/%d"):format(folder, k)
        local child = process.start(words, { stdout = out, stderr = out .. ".err", env = env })
        local deadline = process.now() + 60 * patience
        while not process.read(out):find "step +1/" and process.now() < deadline and not child:poll() do
          process.sleep(0.02)
        end
        local said = process.read(out) .. process.read(out .. ".err")
        local ok, why = pcall(only_loopback, child.pid, table.concat(words, " ", 1, 4))
        child:stop()
        if not ok then error(tostring(type(why) == "table" and why.message or why) .. "\n" .. said, 0) end
      end
    end
  end)
end)
