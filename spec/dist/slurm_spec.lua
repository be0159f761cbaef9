-- SPDX-License-Identifier: MIT
--- Under Slurm: the meaning of its variables alone and, if slurmctld, slurmd, munged and root are available, real jobs
--- by srun on a cluster of one node that the spec starts.
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"

describe("Slurm's variables", function()
  local who = [[
    local ms = require "moonshard"
    print(ms.dist.rank(), ms.dist.world_size(), ms.dist.backend())
  ]]

  it("of a batch script or an allocation, without srun, mean one process", function()
    local job = ranks.run(0, who, { env = { SLURM_JOB_ID = "7", SLURM_NTASKS = "4", SLURM_PROCID = "0",
      SLURM_NODEID = "0" } })
    assert.are.equal("0\t1\tself\n", job.stdout, job.stderr)
  end)

  it("of a step of one task mean one process", function()
    local job = ranks.run(0, who, { env = { SLURM_STEP_ID = "0", SLURM_STEP_NUM_TASKS = "1", SLURM_NTASKS = "4",
      SLURM_PROCID = "0" } })
    assert.are.equal("0\t1\tself\n", job.stdout, job.stderr)
  end)

  it("of a step whose tasks cannot find each other are an error that names the option", function()
    local job = ranks.run(0, who, { env = { SLURM_STEP_ID = "0", SLURM_STEP_NUM_TASKS = "2", SLURM_PROCID = "1",
      SLURM_MPI_TYPE = "none" } })
    assert.are.equal(1, job.code)
    assert.matches("script%.lua:2: dist%.init: srun started this process without PMIx or PMI, by which ranks find each other %(MPI type 'none'%); "
      .. "use srun %-%-mpi=pmix", job.stderr)
  end)

  it("of a step over PMI, which Debian's Open MPI does not know, are an error that names the option", function()
    local job = ranks.run(0, who, { env = { SLURM_STEP_ID = "0", SLURM_STEP_NUM_TASKS = "2", SLURM_PROCID = "1",
      SLURM_MPI_TYPE = "pmi2", PMI_RANK = "1", PMI_SIZE = "2" } })
    assert.are.equal(1, job.code)
    assert.matches("script%.lua:2: dist%.init: this Open MPI cannot connect ranks over PMI %(srun %-%-mpi=pmi2%); use srun %-%-mpi=pmix\n",
      job.stderr)
  end)

  it("share the cores of a node among its tasks", function()
    for list, share in pairs { ["1"] = 1, ["4"] = 4, ["2(x3),4"] = 2, ["1,4"] = 4, ["1(x2),4(x2)"] = 4 } do
      local node = ({ ["1"] = 0, ["4"] = 0, ["2(x3),4"] = 2, ["1,4"] = 1, ["1(x2),4(x2)"] = 3 })[list]
      local job = ranks.run(0, [[
        local ms = require "moonshard"
        local file = io.popen "nproc"
        print(require("moonshard.core.ffi").lib.ms_num_threads(), file:read "*n")
      ]], { env = { SLURM_STEP_ID = "0", SLURM_PROCID = "0", SLURM_STEP_NUM_TASKS = list == "1" and "1" or "10",
        SLURM_STEP_TASKS_PER_NODE = list, SLURM_NODEID = node, OMP_NUM_THREADS = false, MOONSHARD_THREADS = false } })
      local threads, cpus = job.stdout:match "(%d+)\t(%d+)"
      assert.are.equal(math.max(1, math.floor(cpus / share)), tonumber(threads), list)
    end
  end)
end)

-- ---- a cluster of one node --------------------------------------------------------------------------

local function shell(command) return os.execute("(" .. command .. ") >/dev/null 2>&1") == 0 end

local function missing()
  if not shell "test \"$(id -u)\" = 0" then return "not root" end
  for _, program in ipairs { "srun", "slurmctld", "slurmd", "munged", "hostname" } do
    if not shell("command -v " .. program .. " || command -v /usr/sbin/" .. program) then
      return program .. " is not installed"
    end
  end
end

local conf = [[
ClusterName=spec
SlurmctldHost=@host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=@/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmix
SlurmctldPort=@port1
SlurmdPort=@port2
SlurmctldPidFile=@/ctld.pid
SlurmdPidFile=@/d.pid
SlurmdSpoolDir=@/spool
StateSaveLocation=@/state
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldLogFile=@/ctld.log
SlurmdLogFile=@/d.log
NodeName=@host NodeAddr=127.0.0.1 CPUs=@cpus State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4 State=UP
]]

describe("srun #mpi #timed", function()
  local folder, why
  local function read(command)
    local f = io.popen(command)
    local text = f:read "*l"
    f:close()
    return text
  end

  setup(function()
    why = missing()
    if why then return end
    folder = process.temp_folder()
    local port = 20000 + process.pid() % 20000
    local function path(text) return (text:gsub("@host", (read "hostname")):gsub("@cpus",
      (read "nproc --all")):gsub("@port1", port)
      :gsub("@port2", port + 1):gsub("@", folder)) end
    process.write(folder .. "/slurm.conf", path(conf))
    local begin = path [[
      export PATH=$PATH:/usr/sbin
      mkdir -p @/spool @/state && chmod 755 @ &&
      head -c 1024 /dev/urandom > @/key && chmod 400 @/key &&
      munged --force --socket=@/munge.socket --key-file=@/key --pid-file=@/munge.pid --log-file=@/munge.log \
        --seed-file=@/seed &&
      slurmctld -f @/slurm.conf && slurmd -f @/slurm.conf &&
      for i in $(seq 100); do SLURM_CONF=@/slurm.conf sinfo -h -o %T | grep -q idle && exit 0; sleep 0.1; done; exit 1]]
    if not shell(begin) then
      why = "Slurm does not start here: " .. (process.read(folder .. "/d.log")
        .. process.read(folder .. "/ctld.log")):sub(-300)
    end
  end)

  teardown(function()
    if not folder then return end
    for _, name in ipairs { "d.pid", "ctld.pid", "munge.pid" } do
      local pid = tonumber((process.read(folder .. "/" .. name)))
      if pid then
        process.kill(pid, process.SIGTERM)
        for _ = 1, 300 do
          if not process.exists(pid) then break end
          process.sleep(0.01)
        end
      end
    end
    process.remove_folder(folder)
  end)

  -- Runs the script as two tasks by srun, with further options of srun. Returns what ranks.run returns.
  local function srun(script, options)
    local file = folder .. "/script.lua"
    process.write(file, script)
    local args = { "-n", "2" }
    for _, o in ipairs(options or {}) do args[#args + 1] = o end
    -- A preloaded sanitizer is for the ranks, not for srun.
    local preload = os.getenv "LD_PRELOAD"
    for _, a in ipairs { "env", "LD_PRELOAD=" .. (preload or ""), "luajit", file } do args[#args + 1] = a end
    local begun = process.now()
    local child = process.start({ "srun", unpack(args) }, { stdout = folder .. "/out", stderr = folder .. "/err",
      env = {
      SLURM_CONF = folder .. "/slurm.conf", OMPI_COMM_WORLD_SIZE = false, LD_PRELOAD = false,
      LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;@/?.lua;;"):gsub("@", process.root) } })
    if not child:wait(180) then child:stop(2) end
    return { code = child.code, stdout = process.read(folder .. "/out"), stderr = process.read(folder .. "/err"),
      ended = begun + child.seconds }
  end

  it("starts the same script, and shares memory among its ranks", function()
    if why then return pending(why) end
    local job = srun [[
      local ms = require "moonshard"
      local dist = ms.dist
      local t = ms.ones(100000) * (dist.rank() + 1)
      dist.all_reduce(t)
      local all = dist.all_gather_object { dist.rank(), dist.world_size(), dist.local_rank(), dist.backend(),
        t[1]:item() }
      if dist.rank() == 0 then for _, x in ipairs(all) do print(unpack(x)) end end
    ]]
    assert.are.equal(0, job.code, job.stderr)
    assert.are.equal("0\t2\t0\tmpi\t3\n1\t2\t1\tmpi\t3\n", job.stdout)
    assert.are.equal("", job.stderr)                    -- no tensor is staged
  end)

  it("trains the same numbers as mpirun", function()
    if why then return pending(why) end
    local script = [[
      local ms = require "moonshard"
      local nn, fsdp, optim = ms.nn, ms.fsdp, ms.optim
      ms.manual_seed(1)
      local model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
      fsdp.fully_shard(model)
      local optimizer = optim.AdamW(model:parameters(), { lr = 0.02 })
      for step in ms.steps(5) do
        local x = ms.rand(16, 8)
        local loss = nn.F.mse_loss(model(x), x:select(2, 1):unsqueeze(2))
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
        if ms.dist.rank() == 0 then print(("%.9g"):format(loss:item())) end
      end
    ]]
    local job = srun(script)
    assert.are.equal(0, job.code, job.stderr)
    assert.are.equal(ranks.run(2, script).stdout, job.stdout)
  end)

  it("ends within 2 s when a rank raises or is killed, whatever the others do", function()
    if why then return pending(why) end
    for _, how in ipairs { "error 'boom'", "ffi.C.kill(ffi.C.getpid(), 9)" } do
      for _, peers in ipairs { "dist.barrier()", "while true do end" } do process.within(2, function()
        local job = srun([[
          local ms = require "moonshard"
          local dist = ms.dist
          local ffi = require "ffi"
          ffi.cdef "int kill(int, int); int getpid(void);"
          dist.barrier()
          if dist.rank() == 1 then
            io.write(("@event %.6f\n"):format(ms.time()))
            io.flush()
            ]] .. how .. [[

          end
        ]] .. peers)
        assert.are_not.equal(0, job.code)
        if how:find "boom" then assert.matches("boom", job.stderr) end
        return job.ended - tonumber(job.stdout:match "@event (%S+)")
      end) end
    end
  end)

  it("without PMIx is reported", function()
    if why then return pending(why) end
    local job = srun([[ require("moonshard").dist.rank() ]], { "--mpi=none" })
    assert.are.equal(1, job.code)
    assert.matches("use srun %-%-mpi=pmix", job.stderr)
  end)
end)
