-- SPDX-License-Identifier: MIT
--- fsdp: sharded data parallelism. `fsdp.fully_shard(module)` shards a module's parameters over the ranks, one unit per
--- call; the engine schedules gathers and reductions (runtime/shard).
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"

local calls = require "moonshard.dist.calls"
local classic = require "moonshard.parallel.fsdp.classic"
local fully_shard = require "moonshard.parallel.fsdp.fully_shard"
local module = require "moonshard.parallel.fsdp.module"
local policies = require "moonshard.parallel.fsdp.policies"
local optim_state = require "moonshard.parallel.fsdp.optim_state"
local state = require "moonshard.parallel.fsdp.state"
local checkpoint = require "moonshard.io.checkpoint"
local checkpoint_signals = require "moonshard.io.checkpoint_signals"
local checks = require "moonshard.parallel.fsdp.checks"

---@class moonshard.fsdp
local fsdp = {
  FSDP = classic.FSDP,
  fsdp_modules = classic.fsdp_modules,
  summon_full_params = require "moonshard.parallel.fsdp.summon".summon_full_params,
  wrap = require "moonshard.parallel.fsdp.wrap".public,
  MixedPrecision = policies.MixedPrecision,
  comm_hooks = require "moonshard.parallel.fsdp.comm_hooks".public,
  fully_shard = calls.several(fully_shard.fully_shard),
  register_fsdp_forward_method = module.register_fsdp_forward_method,
  FSDPModule = module.FSDPModule,
  UnshardHandle = module.UnshardHandle,
  share_comm_ctx = module.share_comm_ctx,
  DataParallelMeshDims = policies.DataParallelMeshDims,
  MixedPrecisionPolicy = policies.MixedPrecisionPolicy,
  CPUOffload = policies.CPUOffload,
  CPUOffloadPolicy = policies.CPUOffloadPolicy,
  Shard = policies.Shard,
  Replicate = policies.Replicate,
  state_dict = state.state_dict,
  load_state_dict = state.load_state_dict,
  optim_state_dict = optim_state.optim_state_dict,
  load_optim_state_dict = optim_state.load_optim_state_dict,
  save = calls.several(checkpoint.save),
  load = calls.several(checkpoint.load),
  catch_checkpoint_signals = checkpoint_signals.catch_checkpoint_signals,
  checkpoint_wanted = calls.several(checkpoint_signals.checkpoint_wanted),
  record = checks.record,
  check_sharded_parity = checks.check_sharded_parity,
}

return errors.closed(fsdp, "fsdp")
