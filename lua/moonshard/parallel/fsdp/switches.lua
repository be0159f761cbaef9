-- SPDX-License-Identifier: MIT
--- Environment variables that change the behaviour of FSDP instances (docs/semantics.md#switches). They are read when
--- an instance is made; "1" turns a switch on.
---
---   FSDP_USE_FULL_PREC_IN_EVAL    parameters, gradients and buffers are not cast while the module is in eval mode
---   FSDP_SKIP_WRITEBACK_CHECK     parameters that a script replaced are not detected
---   FSDP_USE_FAKE_ALL_GATHER      nothing is gathered, to measure how much time gathers take
---   FSDP_USE_FAKE_REDUCE          nothing is reduced, to measure how much time reductions take
---
--- FSDP_USE_UNSAFE_SETATTR has no effect, because a gather does not assign to fields of a module.
local log = require "moonshard.core.log"

local M = {}

local SWITCHES = {
  { "full_precision_in_eval", "FSDP_USE_FULL_PREC_IN_EVAL" },
  { "skip_writeback_check", "FSDP_SKIP_WRITEBACK_CHECK",
    "Since FSDP_SKIP_WRITEBACK_CHECK=1, FSDP will not check for parameter or gradient writeback. "
    .. "Changing parameter or gradient storages may lead to silent correctness errors." },
  { "fake_all_gather", "FSDP_USE_FAKE_ALL_GATHER",
    "Since FSDP_USE_FAKE_ALL_GATHER=1, FSDP will not execute all-gather ops. "
    .. "Your training will be incorrect, but can reveal how much time spent on all-gather ops." },
  { "fake_reduce", "FSDP_USE_FAKE_REDUCE", "Since FSDP_USE_FAKE_REDUCE=1, FSDP will not execute reduce-scatter ops. "
    .. "Your training will be incorrect, but can reveal how much time spent on reduce-scatter ops." },
}

local warned = {}

--- Whether each switch is on, by name. Warns once about each that is on and can make results wrong.
---@return table<string, boolean>
function M.read()
  local on = {}
  for _, switch in ipairs(SWITCHES) do
    local name, variable, warning = switch[1], switch[2], switch[3]
    on[name] = os.getenv(variable) == "1"
    if on[name] and warning and not warned[name] then
      warned[name] = true
      log.warn(warning)
    end
  end
  return on
end

return M
