--- `cmake --install`: library, plugins, header, pkg-config file and Lua modules where a plain luajit, a C compiler and
--- mpirun find them, with nothing of the source tree in sight.
local process = require "spec.support.process"

local root = process.root
local build = os.getenv "MOONSHARD_BUILD" or "build"
if build:sub(1, 1) ~= "/" then build = root .. "/" .. build end
local sanitized = process.read(build .. "/CMakeCache.txt"):find "\nMS_SANITIZE:STRING=[^\n]" ~= nil

describe("cmake --install", function()
  local folder, prefix
  local env                                                         -- what a user sets for a prefix other than /usr/local

  -- Runs a shell line in an empty folder; its output, or an error with all it said.
  local function sh(line, code)
    local out = folder .. "/out"
    local child = process.start({ "sh", "-c", "cd " .. folder .. "/empty && " .. line }, { stdout = out, stderr = out .. ".err", env = env })
    assert.are.equal(code or 0, child:wait(120) or child:stop(), process.read(out) .. process.read(out .. ".err"))
    return process.read(out)
  end

  setup(function()
    folder = process.temp_folder()
    prefix = folder .. "/prefix"
    require("lfs").mkdir(folder .. "/empty")
    env = { MOONSHARD_LIB = false }
    sh(("cmake --install %s --prefix %s"):format(build, prefix))
    local pc = sh(("find %s -name moonshard.pc"):format(prefix)):match "^(.*)/moonshard%.pc\n$"
    env = {
      MOONSHARD_LIB = false, PKG_CONFIG_PATH = pc, LD_LIBRARY_PATH = pc:match "^(.*)/pkgconfig$",
      LUA_PATH = ("%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua;;"):format(prefix, prefix),
    }
  end)

  teardown(function() process.remove_folder(folder) end)

  it("puts the Lua modules where luajit looks when the prefix is /usr/local", function()
    local path = sh "env -u LUA_PATH luajit -e 'print(package.path)'"
    assert.matches("/usr/local/share/lua/5%.1/%?/init%.lua", path)
    sh(("test -f %s/share/lua/5.1/moonshard/init.lua"):format(prefix))
  end)

  it("gives luajit the installed engine, not the source tree's", function()
    local out = sh [[luajit -e 'print(require("moonshard.ffi").path) print(require("moonshard").ones(2, 2):sum():item())']]
    assert.matches("^" .. prefix:gsub("%p", "%%%0") .. "/share/", out)
    assert.matches("\n4\n$", out)
  end)

  it("works when the prefix has been moved", function()
    local there = folder .. "/moved"
    assert(os.rename(prefix, there))
    finally(function() assert(os.rename(there, prefix)) end)
    local line = [[LUA_PATH="%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua" luajit -e 'print(require("moonshard").zeros(3):numel())']]
    assert.are.equal("3\n", sh(line:format(there, there)))
  end)

  it("finds its MPI plugin under mpirun", function()
    process.write(folder .. "/empty/two.lua", [[
      local ms = require "moonshard"
      local t = ms.ones(1)
      ms.dist.all_reduce(t)
      if ms.dist.rank() == 0 then print(t:item()) end
    ]])
    env.OMPI_ALLOW_RUN_AS_ROOT, env.OMPI_ALLOW_RUN_AS_ROOT_CONFIRM, env.OMPI_MCA_rmaps_base_oversubscribe = 1, 1, 1
    assert.are.equal("2\n", sh "mpirun -n 2 luajit two.lua")
  end)

  it("lets a C program of 60 lines without Lua train an MLP through pkg-config", function()
    local source = root .. "/scripts/examples/07_embed.c"
    local _, lines = process.read(source):gsub("\n", "")
    assert.is_true(lines <= 60)
    local flags = sanitized and "-fsanitize=address,undefined" or ""
    sh(("gcc -Wall -Wextra -Werror -std=c11 %s %s $(pkg-config --cflags --libs moonshard) -o embed"):format(flags, source))
    local losses = {}
    for loss in sh("env -u LD_PRELOAD ./embed"):gmatch "step %d+  loss ([%d.]+)\n" do losses[#losses + 1] = tonumber(loss) end
    assert.are.equal(3, #losses)
    assert.is_true(losses[3] < losses[1] and losses[3] < 0.1)
  end)
end)
