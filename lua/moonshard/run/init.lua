-- SPDX-License-Identifier: MIT
--- run: the record of a training run in a folder, and its progress. Every rank makes the same calls; rank 0 writes, and
--- writes its own values. Only `run.start`, `Run:checkpoint` and `Run:profile` are collective.
local a_module = require("moonshard.nn.module.register").a_module
local check = require "moonshard.run.check"
local calls = require "moonshard.dist.calls"
local checkpoints = require "moonshard.run.checkpoint"
local cjson = require "cjson"
local csv = require "moonshard.run.csv"
local dtypes = require "moonshard.core.dtypes"
local environment = require "moonshard.run.environment"
local errors = require "moonshard.core.errors"
local events = require "moonshard.run.events"
local folders = require "moonshard.run.folder"
local gpus = require("moonshard.tensor.gpus").functions
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local progress = require "moonshard.run.progress"
local rates = require "moonshard.run.rate"
local record = require "moonshard.run.record"
local reports = require "moonshard.run.report"
local states = require "moonshard.io.states"

local M = {}

-- ---- starting ----------------------------------------------------------------------------------------

local function device_text(name)
  if not name:find "^cuda" then return (name:gsub(":0$", "")) end
  local ok, model = pcall(gpus.device_name, name)
  return ok and ("%s (%s)"):format(name, model:match "^(.-) %(" or model) or name
end

-- Makes or opens the run's folder, on rank 0. Also returns the step to continue after and the checkpoint to load.
local function open(o, config)
  local exists = o.out and folders.exists(o.out)
  if not (o.resume and exists) then
    local first = o.first or 0
    config.from_step = first
    local folder, err = folders.new(o.out, o.name ~= "" and "-" .. o.name or "", config)
    if not folder then error(err, 0) end
    return folder, first
  end
  local file, first
  if not o.first and o.model then
    file = folders.find_checkpoint(o.out)
    if file then
      local opened = checkpoints.open(file)
      first = opened.step
      opened:state(o.state)
      opened:close()
    end
  end
  first = o.first or first or 0
  config.from_step = first
  return folders.continue(o.out, first, config, environment.names), first, file
end

-- Loads a checkpoint of this run. Collective.
local load = calls.several(function(file, o)
  local opened = checkpoints.open(file)
  opened:load_model(o.model)
  if o.optimizer then
    opened:load_training(o.model, o.optimizer)
    opened:load_options(o.optimizer)
  end
  opened:load_state(o.model, o.state)
  opened:close()
end)

local function elements(model)
  local n = 0
  for _, p in ipairs(model:parameters()) do n = n + p:numel() end
  return n
end

local SINKS = { csv = true, tensorboard = true }

-- Raises for invalid options. Called before a folder is made, so that an error leaves none behind.
local function check_options(o)
  if o.name:find "[/%c\127]" then
    errors.raise("run.start: option 'name' is %s, expected a name without slash and control characters",
      ("%q"):format(o.name))
  end
  if o.out == "" then errors.raise "run.start: option 'out' is empty, expected a folder; omit it for a new one in runs/" end
  if o.resume and not o.out then errors.raise "run.start: option 'resume' needs option 'out', the folder of the run" end
  if o.model ~= nil then opts.expect(o.model, a_module, "run.start: option 'model'") end
  local optimizer = o.optimizer
  if optimizer ~= nil and not (type(optimizer) == "table" and optimizer.state_of and optimizer.param_groups) then
    opts.wrong(optimizer, "an optimizer", "run.start: option 'optimizer'")
  end
  if o.state and not (o.model and optimizer) then
    errors.raise "run.start: option 'state' needs options 'model' and 'optimizer', with which it is saved"
  end
  states.check("run.start", o.state)
  check.config("run.start", o.config)
  dtypes.number(o.dtype, "run.start: option 'dtype'")
end

--- Starts a run, or continues one, and returns its record. Collective.
---
--- The folder gets `config.json` (`config` and facts: version, commit, host, processor, ranks, devices, threads,
--- command, time, seed, packages, from_step; a name in `config` replaces a fact), `metrics.jsonl`, `media.jsonl`,
--- `report.html` (the run as a page, written periodically and at the end), and checkpoints. A run that was killed loses
--- at most its last line. With `resume`, a run in `out` continues in the same files: after the step of its latest
--- checkpoint, which is loaded, over any number of ranks, into `model`, `optimizer` and `state`; or after step `first`.
--- Lines of later steps move to `superseded.jsonl`, and so does a line of the step itself when its values are logged
--- again. Errors: a folder that contains a run, without `resume`; a run that another process is recording; files that a
--- new run would replace; a folder that cannot be made.
---@param given? {name: string, config: table, total: integer, out: string, resume: boolean, first: integer, model: Module, optimizer: table, state: table<string, any>, tokens: number, samples: number, flops: number, dtype: string, sinks: string[], quiet: boolean, line: function}
---   name: part of the folder's name in runs/; config: options to record; total: number of steps; out: the folder
---   (default: a new one in runs/); resume: continue the run in `out` if there is one; first: steps taken before, for
---   scripts that load their own checkpoints; model: the model, for checkpoints and memory by kind; optimizer: the
---   optimizer of `model`; state: what else a resumed run continues, by name: objects with state_dict and
---   load_state_dict, such as a schedule, a DataLoader, a GradScaler, optim.EMA or metrics.EarlyStopping, and tables of
---   numbers, strings and booleans, such as { best = 0.9 }; tokens: tokens per step over all ranks, for the rate;
---   samples: samples per step over all ranks, for models without tokens; flops: floating point operations per token
---   or sample, for the MFU (default: 6 per parameter of `model`); dtype: dtype of computation, for the MFU; sinks:
---   outputs besides metrics.jsonl, of "csv" and "tensorboard"; quiet: print nothing; line: function that returns the
---   text of a step from its metrics and the seconds left
---@return Run
function M.start(given)
  local o = opts("run.start", given, { name = "", config = opts.table, total = opts.whole_from(1), out = opts.string,
    resume = false, first = opts.whole_from(0), model = opts.any, optimizer = opts.any, state = opts.table,
    tokens = opts.positive, samples = opts.positive, flops = opts.positive, dtype = "float32", sinks = opts.table,
    quiet = false, line = opts.fn })
  check_options(o)
  local wanted = {}
  for _, name in ipairs(o.sinks or {}) do
    if not SINKS[name] then
      errors.raise("run.start: option 'sinks' has %s, expected 'csv' or 'tensorboard'", errors.show(name))
    end
    wanted[name] = true
  end
  local rank, world = log.rank()
  local dist = world > 1 and require "moonshard.dist" or nil
  if dist and not dist.is_initialized() then dist.init() end
  local device = dtypes.default_device()
  local devices = dist and dist.all_gather_object(device_text(device)) or { device_text(device) }
  local facts, config = environment.facts(devices), {}
  for name, value in pairs(facts) do config[name] = value end
  for name, value in pairs(o.config or {}) do config[name] = value end

  local fields = { total = o.total, model = o.model, optimizer = o.optimizer, state = o.state, config = o.config or {},
    device = device, line = o.line, writes = rank == 0, earlier = 0 }
  if o.optimizer then fields.options = checkpoints.options(o.optimizer) end
  local opened = {}
  if rank == 0 then
    local ok, folder, first, file = pcall(open, o, config)
    if ok then
      fields.folder, fields.earlier = folder, folder.last and tonumber(folder.last.time) or 0
      opened = { path = folder.path, note = folder.note, first = first, file = file }
    else
      opened = { err = tostring(folder) }
    end
  end
  if dist then opened = dist.broadcast_object(opened, { src = 0 }) end
  if opened.err then errors.raise("run.start: %s", opened.err) end
  if opened.file then load(opened.file, o) end
  fields.path, fields.note, fields.step, fields.loaded = opened.path, opened.note, opened.first, opened.file

  local items = o.tokens or o.samples
  fields.items, fields.rate_name = items, o.tokens and "tokens_per_second" or "samples_per_second"
  local flops = o.flops or items and o.model and 6 * elements(o.model)
  if items and flops and flops > 0 then
    fields.flops, fields.peak = items * flops, rates.of(facts, o.dtype, dist)
    fields.forget_peak = function() rates.forget(facts, o.dtype) end
  end
  if rank == 0 and wanted.csv then fields.csv = csv.open(fields.path) end
  if rank == 0 and wanted.tensorboard then fields.events = assert(events.open(fields.path, fields.step + 1)) end
  fields.bar = progress.new { total = o.total, first = fields.step, silent = rank ~= 0 or o.quiet }
  return record.new(fields)
end

--- The lines of a run's metrics, in order, each a table of values by name; a value that was not finite is nan.
---@param path string  path of a run's folder
---@return table<string, number>[]
function M.metrics(path)
  opts.expect(path, opts.string, "run.metrics: argument 1")
  if not folders.exists(path) then errors.raise("run.metrics: '%s' contains no run", path) end
  local list = {}
  for object in folders.lines(path .. "/metrics.jsonl") do
    for name, value in pairs(object) do
      if value == cjson.null then object[name] = 0 / 0 end
    end
    list[#list + 1] = object
  end
  return list
end

--- Writes `report.html` of a run's folder again, for example after the run was killed. Returns its path, or nil and the
--- reason.
---@param path string  path of a run's folder
---@return string? file
---@return string? err
function M.report(path)
  opts.expect(path, opts.string, "run.report: argument 1")
  if not folders.exists(path) then errors.raise("run.report: '%s' contains no run", path) end
  return reports.write(path)
end

return M
