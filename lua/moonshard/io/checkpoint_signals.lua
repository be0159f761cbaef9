-- SPDX-License-Identifier: MIT
--- Checkpoints on request: the signals that ask a job to save one.
local engine = require "moonshard.core.ffi"
local create = require "moonshard.tensor.create"
local no_grad = require "moonshard.autograd".no_grad

local lib, ffi = engine.lib, engine.ffi

local M = {}

local agreed
local signalled = ffi.new "double[1]"
-- A SIGUSR1 to the whole job reaches ranks at different times. A rank that agreed to a peer's signal before it received
-- its own ignores its own if that arrives before owed_until, within GRACE seconds.
local owed_until, GRACE = 0, 2

--- From now on SIGUSR1 (save a checkpoint and continue), SIGUSR2 and SIGTERM (save a checkpoint and exit with status
--- 75) are recorded for checkpoint_wanted. mpirun and srun forward the first two to all ranks. If mpirun is terminated
--- or interrupted, it kills its ranks 2 s later (twice odls_base_sigkill_timeout), which counts as SIGTERM at once.
---@param on? boolean  false: the signals terminate the process again
function M.catch_checkpoint_signals(on)
  lib.ms_catch_checkpoint_signals(on == false and 0 or 1)
  owed_until = 0
end

--- Whether a rank has received a signal since the last call. Returns "go_on" (SIGUSR1), "stop" (SIGUSR2, SIGTERM) or nil
--- (none), the same on every rank. Collective: call it once per step.
---@return "go_on"|"stop"|nil
function M.checkpoint_wanted()
  local dist = require "moonshard.dist"
  local mine = lib.ms_checkpoint_signal(signalled)
  if dist.world_size() > 1 then
    if mine == 1 and signalled[0] < owed_until then mine, owed_until = 0, 0 end
    local own = mine
    agreed = agreed or create.zeros(1, { dtype = "int32", device = "cpu" }):keep()
    no_grad(function() agreed:fill_(mine) end)
    dist.all_reduce(agreed, { op = "max" })
    mine = agreed:item()
    if mine == 1 and own == 0 then owed_until = lib.ms_time() + GRACE end
  end
  return mine == 1 and "go_on" or mine == 2 and "stop" or nil
end

return M
