-- SPDX-License-Identifier: MIT
--- What to write instead of a method that only another front end of data parallelism has: fully_shard, fsdp.FSDP and
--- nn.DDP share few methods, so a script that changes from one to another calls some that the new one lacks.
local M = {}

-- Makes a table of names (separated by spaces) one of single names.
local function by_name(rows)
  local out = {}
  for names, text in pairs(rows) do
    for name in names:gmatch "%S+" do out[name] = text end
  end
  return out
end

local NORM = "write nn.utils.clip_grad_norm_(model:parameters(), max_norm)"
local STATE = "write fsdp.state_dict(model, { type = ... }), with type 'full', 'sharded' or 'local'"
local OPTIMIZER = "write fsdp.optim_state_dict(model, optimizer) and fsdp.load_optim_state_dict(model, optimizer, state)"
local NO_SYNC = "write model:no_sync(function() ... end) around the micro-batches that are not reduced"
-- Methods of modules of fully_shard that change nothing but the speed of PyTorch's implementation.
local TUNING = "set_force_sum_reduction_for_comms set_allocate_memory_from_process_group_for_comm set_symm_mem_for_comm "
  .. "set_separate_reduce_scatter_group set_post_optim_event"
local STATES = {
  ["state_dict_type set_state_dict_type get_state_dict_type sharded_state_dict local_state_dict full_state_dict"] = STATE,
  ["optim_state_dict full_optim_state_dict sharded_optim_state_dict optim_state_dict_to_load load_optim_state_dict "
    .. "scatter_full_optim_state_dict shard_full_optim_state_dict flatten_sharded_optim_state_dict rekey_optim_state_dict"] = OPTIMIZER,
}

local function with_states(rows)
  for names, text in pairs(STATES) do rows[names] = text end
  return by_name(rows)
end

--- For modules to which fully_shard was applied.
M.fully_shard = with_states {
  no_sync = "write model:set_requires_gradient_sync(false) before the micro-batches that are not reduced, and "
    .. "model:set_requires_gradient_sync(true) before the last",
  clip_grad_norm_ = NORM,
  register_comm_hook = "write model:set_all_reduce_hook(fn), or model:set_custom_reduce_scatter(fn)",
  join = "fully_shard has none: every rank must run the same number of batches, as with data.DataLoader",
  summon_full_params = "write parameter:full_tensor(), or model:unshard() and model:reshard()",
  fsdp_modules = "walk model:modules(), and test m:isa(fsdp.FSDPModule)",
  check_is_root = "the module whose forward runs first is the root",
  _unshard = "write model:unshard()",
}

--- For fsdp.FSDP instances.
M.classic = with_states {
  ["set_requires_gradient_sync set_is_last_backward set_requires_all_reduce"] = NO_SYNC,
  ["unshard reshard summon_full_params"] = "write fsdp.summon_full_params(model, function() ... end)",
  ["set_reshard_after_forward set_reshard_after_backward"] =
    "write fsdp.FSDP's option sharding_strategy: 'full_shard' reshards after forward, 'shard_grad_op' does not",
  set_modules_to_forward_prefetch = "write fsdp.FSDP's option forward_prefetch",
  ["set_modules_to_backward_prefetch set_unshard_in_backward"] = "write fsdp.FSDP's option backward_prefetch",
  ["set_gradient_divide_factor set_reduce_scatter_divide_factor set_all_reduce_hook set_custom_reduce_scatter"] =
    "write model:register_comm_hook(state, hook)",
  join = "fsdp.FSDP has none: every rank must run the same number of batches, as with data.DataLoader",
  fsdp_modules = "write fsdp.fsdp_modules(model)",
  [TUNING] = "leave it out",
}

--- For nn.DDP instances.
M.ddp = with_states {
  ["set_requires_gradient_sync set_is_last_backward set_requires_all_reduce"] = NO_SYNC,
  clip_grad_norm_ = NORM,
  ["unshard reshard summon_full_params _unshard set_reshard_after_forward set_reshard_after_backward set_unshard_in_backward "
    .. "set_modules_to_forward_prefetch set_modules_to_backward_prefetch"] =
    "leave it out: every rank of DDP has whole parameters",
  ["set_gradient_divide_factor set_reduce_scatter_divide_factor set_all_reduce_hook set_custom_reduce_scatter _register_comm_hook "
    .. "register_builtin_comm_hook _register_builtin_comm_hook"] = "write model:register_comm_hook(state, hook)",
  _set_static_graph = "write nn.DDP's option static_graph",
  [TUNING] = "leave it out",
  check_is_root = "leave it out: every instance of DDP is a root",
}
for names in pairs(STATES) do
  for name in names:gmatch "%S+" do
    M.ddp[name] = name:find "optim" and "write optimizer:state_dict(): every rank of DDP has the whole state"
      or "write model:state_dict(): every rank of DDP has whole parameters"
  end
end

--- For modules that none of them wraps.
M.plain = by_name {
  no_sync = "wrap the model first: nn.DDP(model), or fsdp.FSDP(model); after fully_shard, write model:set_requires_gradient_sync(false)",
  ["join register_comm_hook check_is_root"] = "wrap the model first: nn.DDP(model), or fsdp.FSDP(model)",
  ["set_requires_gradient_sync set_is_last_backward set_requires_all_reduce unshard reshard set_reshard_after_forward "
    .. "set_reshard_after_backward set_modules_to_forward_prefetch set_modules_to_backward_prefetch set_gradient_divide_factor "
    .. "set_all_reduce_hook set_custom_reduce_scatter set_unshard_in_backward set_reduce_scatter_divide_factor " .. TUNING] = "call fsdp.fully_shard(model) first",
  summon_full_params = "the parameters of a module that is not sharded are whole",
  clip_grad_norm_ = NORM,
}

return M
