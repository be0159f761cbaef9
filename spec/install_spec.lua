-- SPDX-License-Identifier: MIT
--- `cmake --install`: library, plugins, header, pkg-config file and Lua modules are found by a plain luajit, a C
--- compiler and mpirun, without the source tree.
local lfs = require "lfs"
local process = require "spec.support.process"

local root = process.root
local build = process.build
local sanitized = process.read(build .. "/CMakeCache.txt"):find "\nMS_SANITIZE:STRING=[^\n]" ~= nil

describe("cmake --install", function()
  local folder, prefix
  -- The variables that a user sets for a prefix other than /usr/local.
  local env

  -- Runs a shell line in an empty folder; returns its output, or raises with its output.
  local function sh(line, code)
    local out = folder .. "/out"
    local child = process.start({ "sh", "-c", "cd " .. folder .. "/empty && " .. line },
      { stdout = out, stderr = out .. ".err", env = env })
    assert.are.equal(code or 0, child:wait(120) or child:stop(), process.read(out) .. process.read(out .. ".err"))
    return process.read(out)
  end

  -- CMake's record of what the user installed from this build folder; it is restored at the end.
  local kept = {}

  setup(function()
    for _, name in ipairs { "install_manifest.txt", "install_folders.txt" } do
      local path = build .. "/" .. name
      kept[path] = lfs.attributes(path) and process.read(path) or false
    end
    folder = process.temp_folder()
    prefix = folder .. "/prefix"
    lfs.mkdir(folder .. "/empty")
    env = { MOONSHARD_LIB = false }
    sh(("cmake --install %s --prefix %s"):format(build, prefix))
    local pc = sh(("find %s -name moonshard.pc"):format(prefix)):match "^(.*)/moonshard%.pc\n$"
    env = {
      MOONSHARD_LIB = false, PKG_CONFIG_PATH = pc, LD_LIBRARY_PATH = pc:match "^(.*)/pkgconfig$",
      LUA_PATH = ("%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua;;"):format(prefix, prefix),
    }
  end)

  teardown(function()
    for path, text in pairs(kept) do                    -- any order: the files are independent
      if text then process.write(path, text) else os.remove(path) end
    end
    process.remove_folder(folder)
  end)

  it("puts the Lua modules where luajit looks when the prefix is /usr/local", function()
    local path = sh "env -u LUA_PATH luajit -e 'print(package.path)'"
    assert.matches("/usr/local/share/lua/5%.1/%?/init%.lua", path)
    sh(("test -f %s/share/lua/5.1/moonshard/init.lua"):format(prefix))
  end)

  it("gives luajit the installed engine, not the source tree's", function()
    local out = sh [[luajit -e 'print(require("moonshard.core.ffi").path) print(require("moonshard").ones(2, 2):sum():item())']]
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

  -- Runs the generated script with a plugin that does not exist, whatever is built here.
  it("installs the rest if the CUDA plugin was not built", function()
    local script = process.read(build .. "/cmake_install.cmake"):gsub("/libmoonshard_cuda%.so", "/not-built%0")
    process.write(folder .. "/install.cmake", script)
    sh(("cmake -D CMAKE_INSTALL_PREFIX=%s/engine -P %s/install.cmake"):format(folder, folder))
    assert.matches("libmoonshard.so\n.*moonshard.pc\n$",
      sh(("cd %s/engine && find lib -name libmoonshard.so && find lib -name moonshard.pc"):format(folder)))
  end)

  it("is undone by the target uninstall: its files and the folders it made, nothing else", function()
    local there = folder .. "/undone"
    lfs.mkdir(there)
    lfs.mkdir(there .. "/include")                      -- not made by the installation, and empty after uninstalling
    local install = ("cmake --install %s --prefix %s"):format(build, there)
    local uninstall = ("cmake -D BUILD=%s -P %s/cmake/uninstall.cmake"):format(build, root)
    assert.matches(uninstall:gsub("%p", "%%%0") .. "\n",
      sh(("cd %s && ninja -t commands uninstall"):format(build)):gsub("/usr/bin/", ""))
    sh(install)
    sh(install)                                         -- a second time: the folders exist
    assert.matches("removed %d%d+ files", sh(uninstall .. " 2>&1"))
    assert.are.equal(there .. "/include\n", sh(("find %s -mindepth 1"):format(there)))
    assert.matches("nothing was installed", sh(uninstall .. " 2>&1", 1))

    sh(install)
    local lua = there .. "/share/lua/5.1/moonshard"
    process.write(lua .. "/mine.lua", "return 1\n")
    process.write(there .. "/include/mine.h", "\n")
    sh(("rm %s/init.lua"):format(lua))                  -- already removed
    sh(uninstall)
    assert.are.equal(("%s/include/mine.h\n%s/mine.lua\n"):format(there, lua),
      sh(("find %s -type f | sort"):format(there)))
  end)

  it("has one version, CMakeLists.txt's, in Lua, pkg-config, the library's name, the command, its manual page and the rock", function()
    local version = process.read(root .. "/CMakeLists.txt"):match "project%(moonshard VERSION (%d+%.%d+%.%d+)"
    local release = sh [[luajit -e 'print(require("moonshard").version)']]
    assert.is_true(release == version .. "\n" or release == version .. "-dev\n", release)
    assert.are.equal(version .. "\n", sh "pkg-config --modversion moonshard")
    local lib = sh "pkg-config --variable=libdir moonshard":sub(1, -2)
    assert.are.equal("libmoonshard.so." .. version .. "\n", sh(("readlink %s/libmoonshard.so.%s"):format(lib,
      version:match "^%d+")))
    local rockspec = process.read(("%s/scripts/packaging/moonshard-%s-1.rockspec"):format(root, version))
    assert.is_truthy(rockspec:find(('\nversion = "%s-1"\n'):format(version), 1, true), rockspec)
    assert.are.equal(release, sh(("env -u LUA_PATH %s/bin/moonshard version"):format(prefix)))
    assert.are.equal(1, select(2, sh(("zcat %s/share/man/man1/moonshard.1.gz"):format(prefix)):gsub('"Moonshard '
      .. release:sub(1, -2):gsub("%p", "%%%0") .. '"', "")))
    assert.is_truthy(process.read(root .. "/README.md"):find("\nVersion " .. version:match "^%d+%.%d+", 1, true))
    local changes = process.read(root .. "/CHANGELOG.md"):match "\n## ([^\n]*)"
    assert.are.equal(1, changes:find(version, 1, true), "the changelog's newest section is '" .. changes .. "'")
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
    local source = root .. "/scripts/examples/embed.c"
    local _, lines = process.read(source):gsub("\n", "")
    assert.is_true(lines <= 60)
    local flags = sanitized and "-fsanitize=address,undefined" or ""
    sh(("gcc -Wall -Wextra -Werror -std=c11 %s %s $(pkg-config --cflags --libs moonshard) -o embed"):format(flags,
      source))
    local losses = {}
    for loss in sh("env -u LD_PRELOAD ./embed"):gmatch "step %d+  loss ([%d.]+)\n" do
      losses[#losses + 1] = tonumber(loss)
    end
    assert.are.equal(3, #losses)
    assert.is_true(losses[3] < losses[1] and losses[3] < 0.1)
  end)
end)

-- Runs ranks and compiler tools as another user, who can read the tree and write only at home.
describe("a built source tree that cannot be written", function()
  local folder, tree, home

  setup(function()
    folder = process.temp_folder()
    tree, home = folder .. "/tree", folder .. "/home"
    for _, path in ipairs { tree, tree .. "/build", home, home .. "/text" } do lfs.mkdir(path) end
    process.write(home .. "/text/a", ("the moon shard turns slowly over a quiet sea "):rep(100))
    local copy = ("cd %s && cp -a CMakeLists.txt cmake lua moonshard.lua runtime scripts %s && cp -a %s/libmoonshard*.so* %s/moonshard_cdef.h %s/build"):format(
      root, tree, build, build, tree)
    assert.are.equal(0, os.execute(copy .. (" && touch %s/build/setup.engine && chmod -R a+rX,a-w %s"):format(tree,
      tree)))
  end)
  teardown(function()
    os.execute("chmod -R u+w " .. tree)
    process.remove_folder(folder)
  end)

  -- Root could write everywhere, so as root this user is `nobody`.
  local function run(line)
    local out = folder .. "/out"
    local words = { "sh", "-c", line }
    if require("posix.unistd").geteuid() == 0 then
      os.execute(("chmod 755 %s && chown -R 65534:65534 %s"):format(folder, home))
      words = { "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", unpack(words) }
    end
    local child = process.start(words, { stdout = out, stderr = out .. ".err",
      env = { HOME = home, MOONSHARD_LIB = false, MOONSHARD_BUILD = false } })
    return child:wait(100) or child:stop(), process.read(out), process.read(out .. ".err")
  end
  local options = " --steps 2 --dim 16 --heads 2 --layers 1 --context 16 --batch 4 --sample 20 --warmup 1 --data "
    .. "%s/text"

  it("trains, and prints that the run is in the home folder", function()
    local code, out, err = run(("cd %s && scripts/train" .. options):format(tree, home))
    assert.are.equal(0, code, out .. err)
    assert.matches("cannot make the folder 'runs': [^\n]*: the run's folder is in your home folder\nrun: "
      .. home:gsub("%p", "%%%0") .. "/moonshard%-runs/001%-", out)
    assert.matches("checkpoint: " .. home:gsub("%p", "%%%0") .. "/moonshard%-runs/001%-[^\n]*%.safetensors", out)
    assert.are.equal("", err)
    code, out = run(("cd %s && luajit %s/scripts/train.lua" .. options):format(home, tree, home))
    assert.are.equal(0, code, out)
    assert.matches("\nrun: runs/001%-", out)
  end)

  it("is not built again because CI made it with warnings as errors", function()
    local stub = folder .. "/bin"
    lfs.mkdir(stub)
    -- Stands in for cmake and ninja: builds nothing, and prints that it was called.
    for _, name in ipairs { "cmake", "ninja" } do
      process.write(stub .. "/" .. name, ("#!/bin/sh\necho %s \"$@\" >>%s/called\n"):format(name, stub))
    end
    local at = folder .. "/ours"
    os.execute(("chmod 755 %s/* && mkdir -p %s/build %s/spec/support && cp -a %s/CMakeLists.txt %s/runtime %s/scripts %s"):format(stub, at, at, tree, tree, tree, at))
    os.execute(("chmod -R u+w %s && cd %s && ln -s runtime kernels && touch build/build.ninja && echo MS_WERROR:BOOL=ON >build/CMakeCache.txt && touch build/setup.all"):format(at, at))
    local function called()
      os.remove(stub .. "/called")
      assert.are.equal(0, os.execute(("cd %s && PATH=%s:$PATH scripts/setup --no-install --engine >/dev/null"):format(
        at, stub)))
      return process.read(stub .. "/called")
    end
    assert.are.equal("ninja -C build moonshard transports moonshard_mpirun cdef\n", called())
    -- If a source is newer than the build, setup runs cmake, with warnings that are no errors.
    os.execute(("touch -d 'next hour' %s/CMakeLists.txt"):format(at))
    assert.matches("^cmake [^\n]*MS_WERROR=OFF", called())
  end)

  -- Stand-ins for cmake, ninja and dpkg-query, which finds no package.
  local function stubs(at)
    lfs.mkdir(at)
    process.write(at .. "/cmake", '#!/bin/sh\necho "cmake in $PWD"\n')
    process.write(at .. "/ninja", '#!/bin/sh\necho "ninja in $PWD"\n')
    process.write(at .. "/dpkg-query", "#!/bin/sh\nexit 1\n")
    os.execute("chmod 755 " .. at .. "/*")
  end

  it("is built anew where it was copied or moved to, and never from another tree", function()
    stubs(folder .. "/stubs")
    local at, other = folder .. "/copied", folder .. "/other"
    os.execute(("mkdir -p %s/build %s %s && cp -a %s/scripts %s/CMakeLists.txt %s"):format(at, other, folder .. "/outside",
      tree, tree, at))
    os.execute(("chmod -R u+w %s && cd %s && ln -s %s/runtime . && mkdir -p kernels cmake spec/support"):format(at, at, tree))
    local function setup(made_for, where)
      process.write(("%s/%s/CMakeCache.txt"):format(at, where), ("CMAKE_HOME_DIRECTORY:INTERNAL=%s\n"):format(made_for))
      process.write(("%s/%s/old.o"):format(at, where), "")
      process.write(("%s/%s/build.ninja"):format(at, where), "")
      local code = os.execute(("cd %s && PATH=%s/stubs:$PATH scripts/setup --no-install --engine --build %s >%s/said 2>&1")
        :format(at, folder, where, folder))
      return code, process.read(folder .. "/said"), lfs.attributes(("%s/%s/old.o"):format(at, where)) ~= nil
    end
    local code, said, kept = setup(at, "build")
    assert.are.same({ 0, true }, { code, kept }, said)
    for _, elsewhere in ipairs { other, folder .. "/gone" } do
      code, said, kept = setup(elsewhere, "build")
      assert.are.same({ 0, false }, { code, kept }, said)
      assert.matches("^setup: build/ was made for " .. elsewhere:gsub("%p", "%%%0") .. ": building it anew\n", said)
    end
    code, said, kept = setup(other, "../outside")
    assert.are.same({ true, true }, { code ~= 0, kept }, said)
    assert.matches("^setup: %.%./outside belongs to the tree " .. other:gsub("%p", "%%%0"), said)
  end)

  it("requires the specs' packages only where the specs are built", function()
    -- A setup that finds nothing lists all packages.
    local function missing(given)
      local _, _, err = run(("cd %s && PATH=%s/stubs:/nowhere /bin/bash scripts/setup --no-install %s"):format(tree, folder,
        given))
      return err
    end
    stubs(folder .. "/stubs")
    for _, name in ipairs { "bash", "dirname", "sed", "id" } do
      os.execute(("ln -sf $(command -v %s) %s/stubs/%s"):format(name, folder, name))
    end
    os.execute(("rm -f %s/stubs/cmake %s/stubs/ninja"):format(folder, folder))
    local all, engine = missing "", missing "--engine"
    for _, name in ipairs { "g++", "lua-busted", "lua-check", "lua-posix", "pkg-config" } do
      assert.is_truthy(all:find(" " .. name, 1, true), all)
      assert.is_nil(engine:find(" " .. name, 1, true), engine)
    end
    for _, name in ipairs { "gcc", "cmake", "luajit", "lua-cjson", "libdnnl-dev", "libpng16-16" } do
      assert.is_truthy(engine:find(" " .. name, 1, true), engine)
    end
  end)

  it("reports what is missing if it was not built", function()
    os.execute(("chmod u+w %s/build && mv %s/build/libmoonshard.so %s/build/kept && chmod a-w %s/build"):format(tree,
      tree, tree, tree))
    finally(function() os.execute(("chmod u+w %s/build && mv %s/build/kept %s/build/libmoonshard.so"):format(tree, tree,
      tree)) end)
    local code, _, err = run(("cd %s && scripts/train --steps 1"):format(home .. "/../tree"))
    assert.are.equal(1, code)
    assert.matches("^setup: build/ contains no engine and [^\n]* is not writable: make it writable, or build in a writable copy of this tree\n$", err)
  end)
end)
