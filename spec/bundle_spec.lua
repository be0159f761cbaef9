-- SPDX-License-Identifier: MIT
--- scripts/bundle: the packed folder runs where there is nothing but a Linux kernel.
local lfs = require "lfs"
local process = require "spec.support.process"

local build = process.build

describe("the bundle", function()
  local folder, bundle

  --- Runs a shell line; returns its exit code, output and errors.
  local function sh(line, env)
    local child = process.start({ "sh", "-c", line }, { stdout = folder .. "/out", stderr = folder .. "/err",
      env = env })
    local code = child:wait(100) or child:stop()
    return code, process.read(folder .. "/out"), process.read(folder .. "/err")
  end
  local function it_possible(name, fn)
    it(name, function()
      if process.tool then return pending "is not run under sanitizers or valgrind" end
      if not bundle then return pending "this build has no MPI plugin" end
      fn()
    end)
  end

  setup(function()
    folder = process.temp_folder()
    if process.tool or not lfs.attributes(build .. "/libmoonshard_mpi.so") then return end
    lfs.mkdir(folder .. "/root")
    for _, name in ipairs { "proc", "dev", "tmp" } do lfs.mkdir(folder .. "/root/" .. name) end
    local code, _, err = sh(("cd '%s' && scripts/bundle '%s/b.tar.gz' && tar -C '%s/root' -xzf '%s/b.tar.gz'"):format(
      process.root, folder, folder, folder), { MOONSHARD_BUILD = build })
    assert.are.equal(0, code, err)
    bundle = folder .. "/root/moonshard"
  end)
  teardown(function()
    if folder then os.execute(("rm -rf '%s'"):format(folder)) end
  end)

  it_possible("is no larger than 25 MiB when packed", function()
    assert.is_true(lfs.attributes(folder .. "/b.tar.gz", "size") <= 25 * 2 ^ 20)
  end)

  it_possible("trains on two ranks in a root that holds nothing else, with its own C library", function()
    process.write(folder .. "/root/two.lua", [[
      local ms = require "moonshard"
      local nn = ms.nn
      ms.dist.init()
      ms.manual_seed(1)
      local model = ms.fsdp.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
      local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.05 })
      local x = ms.randn(16, 8)
      local y = x:sum(2, { keepdim = true })
      local first, last
      for _ = 1, 30 do
        ms.scope(function()
          local loss = nn.F.mse_loss(model(x), y)
          loss:backward()
          optimizer:step()
          optimizer:zero_grad()
          last = loss:item()
          first = first or last
        end)
      end
      if ms.dist.rank() == 0 then
        print(ms.dist.world_size(), last < first / 2, require("moonshard.core.ffi").path)
        for line in io.lines "/proc/self/maps" do
          local library = line:match "(/%S*libc%.so[^%s]*)$"
          if library then print(library) break end
        end
      end]])
    process.write(folder .. "/empty.sh", [[
      cd "$1" && mount --rbind /proc proc && mount --rbind /dev dev && mount -t tmpfs none tmp || exit 99
      PATH=$PATH:/usr/sbin
      exec env -i "$(command -v chroot)" . /moonshard/bin/mpirun --allow-run-as-root --oversubscribe -n 2 luajit two.lua]])
    local code, out, err = sh(("unshare --user --map-root-user --mount sh '%s/empty.sh' '%s/root' || unshare --mount sh '%s/empty.sh' '%s/root'"):format(
      folder, folder, folder, folder))
    if err:find "unshare failed" or code == 99 then return pending "there are no mount namespaces here" end
    assert.are.equal(0, code, err)
    assert.are.equal("2\ttrue\t/moonshard/lib/libmoonshard.so\n/moonshard/lib/libc/libc.so.6\n", out)
    assert.are.equal("", err)
  end)

  it_possible("uses the machine's C library on request, and exports no library path", function()
    local script = [[-e 'require "moonshard".ones(1) print(os.getenv "LD_LIBRARY_PATH") print(io.open("/proc/self/maps"):read("*a"):match("/%S*libc%.so[^%s]*"))']]
    local _, out, err = sh(("'%s/bin/luajit' %s"):format(bundle, script), { LD_LIBRARY_PATH = false, LUA_PATH = false })
    assert.are.equal(("nil\n%s/lib/libc/libc.so.6\n"):format(bundle), out, err)
    _, out, err = sh(("MOONSHARD_LIBC=host '%s/bin/luajit' %s"):format(bundle, script), { LD_LIBRARY_PATH = false })
    assert.matches("^nil\n/[^\n]*libc", out, err)
    assert.is_nil(out:find(bundle, 1, true), out)
  end)

  it_possible("runs specs with its own busted", function()
    process.write(folder .. "/one_spec.lua", [[describe("x", function() it("y", function()
      assert.are.equal(3, require("moonshard").ones(3):sum():item()) end) end)]])
    local _, out, err = sh(("cd '%s' && '%s/bin/busted' -o plainTerminal '%s/one_spec.lua'"):format(folder, bundle,
      folder))
    assert.matches("1 success", out, err)
  end)

  it_possible("contains the licence of every package whose files it contains, and no GNU readline", function()
    local packages = {}
    for package in process.read(bundle .. "/notices/README"):gmatch "\n([a-z0-9.+-]+) [^\n]*, source " do
      packages[package] = true
      assert.is_true(#process.read(bundle .. "/notices/" .. package) > 100, package)
    end
    for _, name in ipairs { "luajit", "libdnnl2", "openmpi-bin", "libc6", "libstdc++6", "lua-busted", "lua-cjson" } do
      assert.is_true(packages[name], name)
    end
    assert.is_true(#process.read(bundle .. "/LICENSE") > 100)
    local _, out = sh(("find '%s' -name 'libreadline*'"):format(bundle))
    assert.are.equal("", out)
  end)
end)
