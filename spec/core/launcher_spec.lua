-- SPDX-License-Identifier: MIT
--- Detection of the launcher from environment variables, by the engine and by the Lua modules that use it.
local engine = require "moonshard.core.ffi"
local launcher = require "moonshard.core.launcher"
local cli = require "moonshard.run.cli"
local progress = require "moonshard.run.progress"
local log = require "moonshard.core.log"
local ranks = require "spec.support.ranks"
local ffi = engine.ffi

ffi.cdef [[
int launcher_spec_set(const char *, const char *, int) __asm__("setenv");
int launcher_spec_unset(const char *) __asm__("unsetenv");
]]

local names = { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
  "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
  "SLURM_LOCALID",
  "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_MPI_TYPE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
  "MPI_LOCALNRANKS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MOONSHARD_PROGRESS" }

local function within(env, fn)
  local before = {}
  for _, name in ipairs(names) do
    before[name] = os.getenv(name) or false
    if env[name] then ffi.C.launcher_spec_set(name, env[name], 1) else ffi.C.launcher_spec_unset(name) end
  end
  local ok, why = pcall(fn)
  for name, value in pairs(before) do
    if value then ffi.C.launcher_spec_set(name, value, 1) else ffi.C.launcher_spec_unset(name) end
  end
  if not ok then error(why, 0) end
end

local function mpirun(rank, size, more)
  local env = { OMPI_COMM_WORLD_RANK = rank, OMPI_COMM_WORLD_SIZE = size, PMIX_RANK = rank }
  for name, value in pairs(more or {}) do env[name] = value end
  return env
end
local local_two = { OMPI_COMM_WORLD_LOCAL_RANK = "1", OMPI_COMM_WORLD_LOCAL_SIZE = "2" }
local step = { SLURM_STEP_ID = "0", SLURM_PROCID = "3", SLURM_STEP_NUM_TASKS = "5", SLURM_LOCALID = "1",
  SLURM_NODEID = "1",
  SLURM_STEP_TASKS_PER_NODE = "2(x2),1", PMIX_RANK = "3" }

-- Each case: a name, an environment, and the launcher, rank, world size, local rank and ranks on this node it gives.
local cases = {
  { "no launcher", {}, "", 0, 1, 0, 1 },
  { "mpirun", mpirun("3", "4", local_two), "mpirun", 3, 4, 1, 2 },
  { "mpirun with one rank", mpirun("0", "1", { OMPI_COMM_WORLD_LOCAL_SIZE = "1" }), "mpirun", 0, 1, 0, 1 },
  { "mpirun in an allocation of Slurm", mpirun("1", "2", step), "mpirun", 1, 2, 0, 0 },
  { "a step of srun", step, "srun", 3, 5, 1, 2 },
  { "a step of srun without its number of tasks", { SLURM_STEP_ID = "0", SLURM_PROCID = "1", SLURM_NTASKS = "2",
    PMI_RANK = "1" }, "srun", 1, 2, 0, 0 },
  { "a step of srun with one task", { SLURM_STEP_ID = "0", SLURM_PROCID = "0", SLURM_STEP_NUM_TASKS = "1",
    SLURM_NTASKS = "4" }, "", 0, 1, 0, 1 },
  { "a batch script of Slurm", { SLURM_JOB_ID = "7", SLURM_PROCID = "0", SLURM_NTASKS = "4" }, "", 0, 1, 0, 1 },
  { "PMIx alone", { PMIX_RANK = "2" }, "PMIx", 2, 0, 0, 0 },
  { "mpiexec", { PMI_RANK = "1", PMI_SIZE = "4", MPI_LOCALRANKID = "1", MPI_LOCALNRANKS = "2" }, "mpiexec", 1, 4, 1,
  2 },
  { "torchrun", { RANK = "5", WORLD_SIZE = "8", LOCAL_RANK = "1", LOCAL_WORLD_SIZE = "4" }, "torchrun", 5, 8, 1, 4 },
  { "torchrun with one rank", { RANK = "0", WORLD_SIZE = "1", LOCAL_RANK = "0", LOCAL_WORLD_SIZE = "1" }, "", 0, 1, 0,
  1 },
  { "another program that sets RANK", { RANK = "5", WORLD_SIZE = "8" }, "", 0, 1, 0, 1 },
}

-- Invalid environments: the variables, the launcher, and the reason.
local broken = {
  { mpirun(nil, "4"), "mpirun", "OMPI_COMM_WORLD_RANK is not set, expected a rank from 0 to 3" },
  { mpirun("4", "4"), "mpirun", "OMPI_COMM_WORLD_RANK is '4', expected a rank from 0 to 3" },
  { mpirun("-1", "4"), "mpirun", "OMPI_COMM_WORLD_RANK is '-1', expected a rank from 0 to 3" },
  { mpirun("0", "0"), "mpirun", "OMPI_COMM_WORLD_SIZE is '0', expected a number of ranks above 0" },
  { mpirun("0", "two"), "mpirun", "OMPI_COMM_WORLD_SIZE is 'two', expected a number of ranks above 0" },
  { mpirun("0", "4", { OMPI_COMM_WORLD_LOCAL_SIZE = "5" }), "mpirun",
    "OMPI_COMM_WORLD_LOCAL_SIZE is '5', expected the number of ranks on this node, from 1 to the job's number of ranks" },
  { mpirun("0", "4", { OMPI_COMM_WORLD_LOCAL_RANK = "2", OMPI_COMM_WORLD_LOCAL_SIZE = "2" }), "mpirun",
    "OMPI_COMM_WORLD_LOCAL_RANK is '2', expected a rank from 0 to 1" },
  { { PMIX_RANK = "x" }, "PMIx", "PMIX_RANK is 'x', expected a rank" },
  { { RANK = "9", WORLD_SIZE = "8", LOCAL_RANK = "1" }, "torchrun", "RANK is '9', expected a rank from 0 to 7" },
}

describe("the environment of a process", function()
  for _, case in ipairs(cases) do
    local what, env, name, rank, world, local_rank, local_world = unpack(case)
    it(("with the variables of %s means %s, rank %d of %d"):format(what, name == "" and "no launcher" or name, rank, world),
      function()
      within(env, function()
        local out = ffi.new "ms_launch"
        engine.lib.ms_launcher(out)
        assert.are.same({ name, rank, world, local_rank, local_world, "" }, { ffi.string(out.name), out.rank, out.world,
          out.local_rank, out.local_world, ffi.string(out.reason) })
        assert.are.equal(name, launcher().name)
        local ranks_known = world > 0 and world or rank + 1
        assert.are.same({ rank, ranks_known }, { cli.launched() })
        assert.are.same({ rank, ranks_known }, { log.rank() })
        if name ~= "" then assert.are.equal("lines", progress.style()) end
      end)
    end)
  end

  for _, case in ipairs(broken) do
    local env, name, reason = unpack(case)
    it(("is refused where %s"):format(reason), function()
      within(env, function()
        local launch = launcher()
        assert.are.same({ name, reason, 0, 1 }, { launch.name, launch.reason, launch.rank, launch.world })
      end)
    end)
  end

  it("makes dist.init report why the variables are invalid", function()
    local job = ranks.run(0, 'require("moonshard").dist.init()', { env = mpirun("4", "4") })
    assert.are.equal(1, job.code)
    assert.matches("script%.lua:1: dist%.init: OMPI_COMM_WORLD_RANK is '4', expected a rank from 0 to 3", job.stderr)
  end)

  it("of torchrun is an error that names the remedy, because its ranks would not meet", function()
    local job = ranks.run(0, [[
      local dist = require("moonshard").dist
      print(pcall(dist.init))
      dist.init { backend = "self" }
      print(dist.world_size())
    ]], { env = { RANK = "1", WORLD_SIZE = "2", LOCAL_RANK = "1", LOCAL_WORLD_SIZE = "2" } })
    assert.matches("dist%.init: torchrun started this process as rank 1 of 2, but ranks connect over MPI; use mpirun or srun",
      job.stdout)
    assert.matches("\n1\n$", job.stdout)
  end)
end)
