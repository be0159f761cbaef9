-- SPDX-License-Identifier: MIT
--- Packages: the Debian packages, the container's recipe, `cmake --install` and the rock are each installed into a
--- Debian that holds nothing else, where two ranks then train.
local empty_root = require "spec.support.empty_root"
local lfs = require "lfs"
local process = require "spec.support.process"

local packaging = process.root .. "/scripts/packaging"

-- The recipe's stages: { image, from = name, { instruction, arguments }... }
local function stages(text)
  local list = {}
  for line in text:gsub("\\\n *", ""):gmatch "[^\n]+" do
    local word, rest = line:match "^(%u+)%s+(.*)$"
    if word == "FROM" then
      list[#list + 1] = { image = rest:match "%S+", name = rest:match " AS (%S+)" }
    elseif word then
      table.insert(list[#list], { word, rest })
    else
      assert(line:find "^#", "a line that is no instruction: " .. line)
    end
  end
  return list
end

-- A program of a user: ten steps of sharded training.
local program = [[
local ms = require "moonshard"
local nn, dist = ms.nn, ms.dist
ms.manual_seed(1)
local model = ms.fsdp.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.05 })
local x = ms.randn(16, 8)
local y = x:sum(2, { keepdim = true })
local first, last
for _ in ms.steps(10) do
  local loss = nn.F.mse_loss(model(x), y)
  loss:backward()
  optimizer:step()
  optimizer:zero_grad()
  last = loss:item()
  first = first or last
end
if dist.rank() == 0 then print(dist.world_size(), last < first, require("moonshard.core.ffi").path) end
]]

describe("packages", function()
  local folder, root, why
  local packages = process.root .. "/build/packages"
  local recipe = stages(process.read(packaging .. "/Dockerfile"))

  local function sh(line, env, limit)
    local out = folder .. "/out"
    env = env or {}
    env.LUA_PATH, env.LUA_CPATH, env.MOONSHARD_LIB = false, false, false
    local child = process.start({ "sh", "-c", ("cd '%s' && "):format(process.root) .. line },
      { stdout = out, stderr = out .. ".err", env = env })
    local code = child:wait(limit or 150) or child:stop()
    assert(code == 0, ("status %s of: %s\n%s%s"):format(code, line, process.read(out), process.read(out .. ".err")))
    return process.read(out)
  end

  setup(function()
    if process.tool then why = "is not run under sanitizers or valgrind" end
    if process.build ~= process.root .. "/build" then
      why = "packages are made of build/, and this run tests " .. process.build
    end
    if not lfs.attributes(process.root .. "/build/libmoonshard_mpi.so") then why = "this build has no MPI plugin" end
    if why then return end
    folder = process.temp_folder()
    root, why = empty_root(folder .. "/root")
    if not root then return end
    os.execute(("rm -rf '%s'"):format(packages))
    -- cpack asks file(1) of each of 400 files whether it is a library. With MAGIC naming a list of that one type,
    -- file(1) does not read its own list of 8 MB each time.
    process.write(folder .. "/magic", "0\tstring\t\\177ELF\tELF shared object\n")
    local env = { DEBFULLNAME = "A Packager", DEBEMAIL = "packager@example.org", MAGIC = folder .. "/magic" }
    for _, step in ipairs(recipe[1]) do
      if step[1] == "RUN" then
        sh(step[2], env, 300)
      end
    end
  end)
  teardown(function()
    if folder then os.execute(("rm -rf '%s'"):format(folder)) end
  end)

  local function it_possible(name, fn)
    it(name, function()
      if not root then return pending(why) end
      fn()
    end)
  end

  -- Trains as a user who has set no variable: with a program, alone and over two ranks, and by the command `moonshard`,
  -- whose other parts run, too.
  local function trains(engine)
    local home = "/home/moonshard/"
    process.write(root.path .. home .. "two.lua", program)
    local user = { user = "moonshard" }
    assert.matches("^1\ttrue\t" .. engine .. "\n$", (root:run("luajit two.lua", user)))
    local out, err = root:run("mpirun --oversubscribe -n 2 luajit two.lua", user)
    assert.matches("^2\ttrue\t" .. engine .. "\n$", out)
    assert.are.equal("", err)
    out, err = root:run("moonshard train --ranks 2 --steps 10 --layers 1 --dim 16 --heads 2 --context 16 --batch 4 --warmup 1 --sample 0",
      user)
    assert.matches("2 ranks.*\nstep +10/10 .*\ncheckpoint: runs/001%-%S+/step%-000010%.safetensors", out)
    assert.are.equal("", err)
    out = root:run("moonshard generate --from runs/001* --length 5 --quiet", user)
    assert.is_true(#out > 0)
    assert.matches("\n> 2\n", (root:run("echo \"ms.dist.world_size()\" | moonshard repl --ranks 2", user)))
    assert.matches("LuaJIT", (root:run("moonshard doctor || true", user)))
    root:run("rm -r runs two.lua", user)
  end

  -- No file of Moonshard is left outside of the users' folders.
  local function is_clean()
    assert.are.equal("", (root:run [[find / -xdev \( -path /home -o -path /proc -o -path /dev \) -prune -o -name "*moonshard*" -print]]))
  end

  it_possible("of Debian depend on the packages of the libraries and programs that they use", function()
    local version = process.read(process.root .. "/CMakeLists.txt"):match "project%(moonshard VERSION (%S+)"
    local function field(package, name)
      return sh(("dpkg-deb -f %s/%s_*.deb %s"):format(packages, package, name)):gsub("\n$", "")
    end
    local depends = field("moonshard", "Depends")
    for _, name in ipairs { "libc6 (>=", "libdnnl2 (>=", "libopenmpi3 (>=", "luajit", "lua-cjson", "lua-argparse",
      "lua-filesystem", "openmpi-bin" } do
      assert.is_truthy(depends:find(name, 1, true), name .. " is not in " .. depends)
    end
    local own = field("moonshard", "Version")
    local release = sh("luajit -e 'print(require(\"moonshard\").version)'"):gsub("\n", "")
    assert.are.equal(version, own:match "^[%d.]+")
    assert.are.equal(release:gsub("-", "~") .. "-1", own)
    assert.are.equal(("moonshard (= %s)"):format(own), field("libmoonshard-dev", "Depends"))
  end)

  it_possible("of Debian have no error of lintian", function()
    assert.are.equal("", sh(("lintian --fail-on none --allow-root %s/*.deb | grep '^E:' || true"):format(packages)))
  end)

  it_possible("of Debian are installed and run by the container's recipe, and leave nothing when they are removed", function()
    assert.are.equal(2, #recipe)
    assert.are.equal(recipe[1].image, recipe[2].image:gsub("%-slim$", ""))
    local user, at
    for _, step in ipairs(recipe[2]) do
      local word, rest = step[1], step[2]
      if word == "COPY" then
        local from, to = rest:match "^%-%-from=build /moonshard/(%S+) (/%S+/)$"
        sh(("cp %s '%s%s'"):format(from, root.path, to))
      elseif word == "RUN" then
        root:run(rest, { limit = 400 })
      elseif word == "USER" then
        user = rest
      elseif word == "WORKDIR" then
        at = rest
      elseif word == "CMD" then
        local out = root:run("moonshard " .. rest:match '^%["(%l+)"%]$', { user = user })
        assert.matches("^usage: moonshard COMMAND", out)
      else
        assert.are.same({ "ENTRYPOINT", '["moonshard"]' }, step)
      end
    end
    assert.are.same({ "moonshard", "/home/moonshard" }, { user, at })
    trains "/usr/share/lua/5%.1/%S+/libmoonshard%.so%.1"
    -- The GPU's plugin is found; a machine without a driver cannot use it.
    if lfs.attributes(process.root .. "/build/libmoonshard_cuda.so") then
      local ask = [[luajit -e "print(pcall(require(\"moonshard\").ones, 1, { device = \"cuda\" }))"]]
      assert.matches("no CUDA plugin .*moonshard%-cuda", (root:run(ask)))
      sh(("cp %s/moonshard-cuda_*.deb '%s/tmp/'"):format(packages, root.path))
      root:run "dpkg -i /tmp/moonshard-cuda_*.deb && rm /tmp/moonshard-cuda_*.deb"
      assert.is_nil(root:run(ask):find "no CUDA plugin")
      root:run "dpkg --purge moonshard-cuda"
    end
    root:run "dpkg --purge moonshard"
    is_clean()
  end)

  it_possible("of Debian let C programs find header and library", function()
    local at = folder .. "/dev"
    sh(("for p in moonshard libmoonshard-dev; do dpkg-deb -x %s/${p}_*.deb '%s'; done"):format(packages, at))
    sh(("gcc scripts/examples/embed.c $(pkg-config --cflags --libs moonshard) -o '%s/embed' && '%s/embed'"):format(at,
      at), { PKG_CONFIG_PATH = at .. "/usr/lib/pkgconfig", LD_LIBRARY_PATH = at .. "/usr/lib", PKG_CONFIG_ALLOW_SYSTEM_CFLAGS = "1",
        PKG_CONFIG_ALLOW_SYSTEM_LIBS = "1" })
  end)

  it_possible("are not needed: cmake --install into an empty root trains, and uninstalling leaves nothing", function()
    local env = { DESTDIR = root.path }
    local kept = {}                                     -- the record of the user's own installation
    for _, name in ipairs { "install_manifest.txt", "install_folders.txt" } do
      local path = process.root .. "/build/" .. name
      kept[path] = lfs.attributes(path) and process.read(path) or false
    end
    finally(function()
      for path, text in pairs(kept) do                  -- any order: the files are independent
        if text then process.write(path, text) else os.remove(path) end
      end
    end)
    sh("cmake --install build --prefix /usr/local", env)
    root:run "ldconfig"
    trains "/usr/local/share/lua/5%.1/%S+/libmoonshard%.so%.1"
    sh("cmake --build build --target uninstall", env)
    is_clean()
  end)

  it_possible("of LuaRocks train, and leave nothing when they are removed", function()
    local rocks = ("luarocks --lua-version 5.1 --tree '%s/usr/local'"):format(root.path)
    sh(rocks .. " make --deps-mode none scripts/packaging/*.rockspec")
    trains "/usr/local/share/lua/5%.1/%S+/lib/lua/5%.1/libmoonshard%.so%.1"
    sh(rocks .. " remove moonshard")
    is_clean()
  end)
end)
