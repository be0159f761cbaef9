-- SPDX-License-Identifier: MIT
-- ms.doctor and scripts/doctor: every line is good, slow or broken, and a fault is named with its remedy.
local cjson = require "cjson"
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"

local folder = process.temp_folder()
local root = process.root

-- Runs a shell command; returns its status and what it wrote on stdout and stderr.
local function sh(command, env)
  local out = folder .. "/out"
  local child = process.start({ "sh", "-c", "exec 2>&1; " .. command }, { stdout = out, env = env })
  local code = child:wait(60)
  child:stop()
  return code, process.read(out)
end

local function luajit(script)
  return ("env 'LUA_PATH=%s/lua/?.lua;%s/lua/?/init.lua;;' luajit '%s'"):format(root, root, script)
end

-- The lines of one check in a process of its own: text with "state subject: text -> remedy" for each.
local function check_in(where, module, name, env)
  local script = folder .. "/check.lua"
  process.write(script, ([[
    local check = require("moonshard.tools.doctor.%s").%s
    check(function(state, subject, text, remedy) print(state .. " " .. subject .. ": " .. text .. " -> " .. tostring(remedy)) end)
  ]]):format(module, name))
  return sh(where:format(luajit(script)), env)
end

local function read_cores()
  return require("moonshard.tools.doctor.read").count(process.read "/proc/self/status":match "Cpus_allowed_list:%s*(%S+)")
end

local mounts = os.execute "unshare -m true 2>/dev/null" == 0

-- The shell command that runs `command` where a tmpfs of this size is mounted on a folder.
local function with_tmpfs(at, size, command)
  return ("unshare -m sh -c \"mount -t tmpfs -o size=%s none '%s' && %s\""):format(size, at, command)
end

teardown(function() process.remove_folder(folder) end)

describe("ms.doctor", function()
  it("finds nothing broken on a machine that runs these specs, and has a remedy for all that is not good", function()
    local told = {}
    local report = ms.doctor { folder = folder, report = function(line) told[#told + 1] = line end }
    local subjects, count = {}, { good = 0, slow = 0, broken = 0 }
    for k, line in ipairs(report.lines) do
      assert.are.equal(line, told[k])
      count[line.state] = count[line.state] + 1
      subjects[line.subject] = true
      assert.are.equal(line.state ~= "good", line.remedy ~= nil, tostring(line))
      assert.matches("%S", line.text)
    end
    assert.are.equal(#told, #report.lines)
    for _, subject in ipairs { "processor", "threads", "products", "memory", "copies", "limits", "clock", "LuaJIT",
      "/dev/shm", "MPI", "network", "CUDA libraries", "disk" } do
      assert.is_true(subjects[subject], subject)
    end
    assert.are.equal(count.slow, report.slow)
    assert.are.equal(0, count.broken, tostring(report))
    assert.are.equal(0, report.broken)
    assert.matches("all_reduce of 64 bytes [%d.]+ us, of 16 MiB [%d.]+ %a+/s", tostring(report):gsub("%s+", " "))
    assert.matches(("%d checks: %%d+ good, %%d+ slow, 0 broken$"):format(#report.lines), tostring(report))
  end)

  it("names a folder that does not exist", function()
    local disk = require "moonshard.tools.doctor.disk"
    local state, text
    disk.check(function(s, _, t) state, text = s, t end, folder .. "/nowhere")
    assert.are.equal("broken", state)
    assert.matches("there is no folder '.*/nowhere'", text)
    assert.has_error(function() ms.doctor { folders = "." } end)
  end)

  it("names a full disk", function()
    if not mounts then return pending "this user may not make mount namespaces" end
    lfs.mkdir(folder .. "/full")
    process.write(folder .. "/disk.lua", ([[
      require("moonshard.tools.doctor.disk").check(function(state, _, text, remedy) print(state, text, remedy) end, "%s/full")
    ]]):format(folder))
    local _, out = sh(with_tmpfs(folder .. "/full", "1m", luajit(folder .. "/disk.lua")))
    assert.matches("^broken\t.*/full: tmpfs mounted on .*/full, 1%.05 MB of 1%.05 MB free; .*No space left.*\tfree some space", out)
  end)

  it("names a folder on a file system that is mounted read-only, which more room does not help", function()
    if not mounts then return pending "this user may not make mount namespaces" end
    lfs.mkdir(folder .. "/only")
    process.write(folder .. "/only.lua", ([[
      require("moonshard.tools.doctor.disk").check(function(state, _, text, remedy) print(state, text, remedy) end, "%s/only")
    ]]):format(folder))
    local _, out = sh(with_tmpfs(folder .. "/only", "1m,ro", luajit(folder .. "/only.lua")))
    assert.matches("^broken\t.*Read%-only file system\tname a folder in which this user can write files", out)
  end)

  it("names a tiny /dev/shm, and a machine with no room for MPI's shared memory at all", function()
    if not mounts then return pending "this user may not make mount namespaces" end
    local tiny = with_tmpfs("/dev/shm", "64k", "%s")
    local _, out = check_in(tiny, "job", "shared_memory")
    assert.matches("^slow /dev/shm: %S+ %S+ free; MPI's shared memory is put into .* %-> mount a tmpfs", out)
    _, out = check_in(tiny, "job", "shared_memory", { TMPDIR = "/dev/shm" })
    assert.matches("^broken /dev/shm: .* and /dev/shm has no room .* %-> mount a tmpfs", out)
  end)

  it("names one thread where there are more cores", function()
    local _, out = check_in("%s", "machine", "threads", { MOONSHARD_THREADS = "1" })
    local allowed = process.read "/proc/self/status":match "Cpus_allowed_list:%s*(%S+)"
    if not allowed:find "%D" then return pending "there is one core" end
    assert.matches("^slow threads: 1 of %d+ cores %-> unset MOONSHARD_THREADS, which is 1", out)
    local first = allowed:match "^%d+"
    _, out = check_in("taskset -c " .. first .. " %s", "machine", "threads", { MOONSHARD_THREADS = false,
      OMP_NUM_THREADS = false })
    assert.matches("^slow threads: 1 of 1 cores; this process is bound to 1 of the machine's %d+ cores %-> ", out)
  end)

  it("names kernels for fewer instructions than the processor has", function()
    local _, out = check_in("%s", "machine", "processor", { MOONSHARD_ISA = "v1" })
    assert.matches("^slow processor: .*kernels for x86%-64%-v1", out)
  end)

  it("names LuaJIT without its compiler", function()
    local script = folder .. "/off.lua"
    process.write(script, [[
      jit.off()
      require("moonshard.tools.doctor.machine").luajit(function(...) print(...) end)
    ]])
    local _, out = sh(luajit(script))
    assert.matches("^slow\tLuaJIT\t.*its compiler is off", out)
  end)
end)

describe("scripts/doctor", function()
  it("ends with status 1 and a remedy where there is no mpirun", function()
    local bin = process.temp_folder()
    for _, name in ipairs { "bash", "sh", "luajit", "timeout", "env", "dirname" } do
      local path = io.popen("command -v " .. name):read "*l"
      lfs.link(path, bin .. "/" .. name, true)
    end
    local code, out = sh(("'%s/scripts/doctor' '%s'"):format(root, bin), { PATH = bin })
    assert.are.equal(1, code, out)
    assert.matches("broken%s+MPI%s+there is no mpirun in the PATH\n%s+%-> apt%-get install openmpi%-bin", out)
    assert.matches("checks: .* 1 broken\n$", out)
    os.remove(bin .. "/luajit")
    code, out = sh(("'%s/scripts/doctor'"):format(root), { PATH = bin })
    assert.are.equal(1, code)
    assert.matches("broken%s+LuaJIT%s+there is no luajit in the PATH\n%s+%-> scripts/setup", out)
    process.remove_folder(bin)
  end)

  it("names in one run what a container lacks: /dev/shm, room on the disk, cores", function()
    lfs.mkdir(folder .. "/small")
    if sh(("unshare -m sh -c 'mount -t tmpfs none \"%s/small\" && mknod \"%s/small/null\" c 1 3'"):format(folder,
      folder)) ~= 0 then return pending "this user may not make devices in a mount namespace" end
    process.write(folder .. "/container", ([[
      set -e
      mount -t tmpfs -o size=1m none '%s/small'
      mount -t tmpfs none /dev                          # without /dev/shm
      for node in "null 1 3" "zero 1 5" "random 1 8" "urandom 1 9" "tty 5 0"; do
        set -- $node
        mknod -m 666 /dev/$1 c $2 $3
      done
      ln -s /proc/self/fd /dev/fd
      mkdir /dev/pts
      mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts
      ln -s pts/ptmx /dev/ptmx
      MOONSHARD_THREADS=1 exec '%s/scripts/doctor' '%s/small'
    ]]):format(folder, root, folder))
    local code, out = sh(("unshare -m sh '%s/container'"):format(folder))
    assert.are.equal(1, code, out)
    assert.matches("slow%s+/dev/shm%s+cannot be written; MPI's shared memory is put into /%S+\n%s+%-> mount a tmpfs", out)
    assert.matches("%f[%w]%w+%s+MPI%s+[^\n]*2 ranks: ", out)  -- MPI works nevertheless, though slow if others run
    assert.matches("broken%s+disk%s.*No space%s+left.*\n%s+%-> free some space", out)
    if read_cores() > 1 then assert.matches("slow%s+threads%s+1 of %d+ cores\n%s+%-> unset MOONSHARD_THREADS", out) end
    assert.matches("checks: .* 1 broken\n$", out)
  end)

  it("prints a JSON object on request", function()
    local code, out = sh(("'%s/scripts/doctor' --json '%s'"):format(root, folder))
    assert.are.equal(0, code, out)
    local report = cjson.decode(out)
    assert.are.equal(0, report.broken)
    assert.are.equal("processor", report.lines[1].subject)
    assert.matches("kernels for x86%-64", report.lines[1].text)
  end)

  it("names an engine that cannot be loaded, also as JSON", function()
    local code, out = sh(("'%s/scripts/doctor'"):format(root), { MOONSHARD_LIB = "/nowhere/libmoonshard.so" })
    assert.are.equal(1, code)
    assert.matches("^broken%s+engine%s+MOONSHARD_LIB is '/nowhere/libmoonshard.so'.*\n%s+%-> correct or unset MOONSHARD_LIB\n$", out)
    code, out = sh(("'%s/scripts/doctor' --json"):format(root), { MOONSHARD_LIB = "/nowhere/libmoonshard.so" })
    assert.are.equal(1, code)
    assert.matches("^MOONSHARD_LIB is", cjson.decode(out).lines[1].text)
    code, out = sh(("'%s/scripts/doctor'"):format(root), { MOONSHARD_THREADS = "many" })
    assert.are.equal(1, code)
    assert.matches("MOONSHARD_THREADS is 'many', expected.*\n%s+%-> correct or unset MOONSHARD_THREADS\n$", out)
  end)

  it("refuses an unknown option", function()
    local code, out = sh(("'%s/scripts/doctor' --jsn"):format(root))
    assert.are.equal(2, code)
    assert.matches("unexpected argument '%-%-jsn'", out)
  end)
end)
