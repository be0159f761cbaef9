-- SPDX-License-Identifier: MIT
--- The record of a run: what a script calls while it trains. Only rank 0 writes; on other ranks the calls check their
--- arguments and count steps.
local check = require "moonshard.run.check"
local checkpoints = require "moonshard.run.checkpoint"
local errors = require "moonshard.core.errors"
local folders = require "moonshard.run.folder"
local lib = require("moonshard.core.ffi").lib
local log = require "moonshard.core.log"
local methods = require "moonshard.core.methods"
local memory = require "moonshard.run.memory"
local opts = require "moonshard.core.opts"
local pictures = require "moonshard.run.pictures"
local png = require "moonshard.data.png"
local profiles = require "moonshard.run.profile"
local progress = require "moonshard.run.progress"
local reports = require "moonshard.run.report"
local task = require "moonshard.core.task"
local tensor = require "moonshard.tensor"
local utf8 = require "moonshard.run.text".utf8

---@class Run
---@field path string      the run's folder
---@field step integer     the last logged step; before the first log, the step after which the run continues
---@field total integer?   the number of steps
---@field bar Progress     the progress line
local Run = {}
Run.__index = Run
Run.__name = "Run"

function Run:__tostring() return ("Run '%s', step %d%s"):format(self.path, self.step, self.total and " of " .. self.total or "") end

local WARNING = { "step", "kind", "text" }

-- Raises for a call whose values would be lost: after finish, or after another run.start has taken the folder over.
local function need_open(self, who)
  if self.ended then errors.raise("%s: the run has ended; call it before run:finish", who) end
  if self.folder and self.folder.taken then
    errors.raise("%s: a later run.start continues this run; use the run that it returned", who)
  end
end

-- Records a warning of the library or of the script (ms.warn).
local function warned(self, message)
  self.folder:medium({ step = self.step, kind = "warning", text = utf8(message) }, WARNING)
end

--- Makes a record (Run) and starts its clock.
---@param fields table  the fields that run.start sets
---@return Run
local function new(fields)
  local self = setmetatable(fields, Run)
  -- Of the latest logged line: the names of its values in order and as a set, their number, and the table of values.
  self.order, self.known, self.count, self.object = {}, {}, 0, {}
  self.memory = memory.new(self.device, self.model, self.optimizer)
  self.first, self.next_memory = self.step, -math.huge
  self.began = lib.ms_time()
  self.next_report = self.began + 2
  self.mark = self.began                -- where the next step's time begins: the end of the latest log or other record
  if self.writes then log.follow(function(message) warned(self, message) end) end
  return self
end

-- Writes report.html. If that fails, the run continues.
local function report(self)
  local err
  self.next_report, err = reports.update(self.path)
  if err then log.warn_once(("run: report.html was not written: %s"):format(err)) end
end

-- ---- numbers -----------------------------------------------------------------------------------------

-- The names of a line, in order: step, time, the script's names, then the run's own. Returns the list of the last line
-- if the names are the same.
local function names_of(self, values, object)
  local known, n, same = self.known, 0, true
  for name in pairs(object) do
    n = n + 1
    same = same and known[name]
  end
  if same and n == self.count then return self.order end
  local own, added = {}, {}
  for name in pairs(object) do
    if name ~= "step" and name ~= "time" then
      local list = values[name] ~= nil and own or added
      list[#list + 1] = name
    end
  end
  table.sort(own)
  table.sort(added)
  local order = { "step", "time" }
  for _, names in ipairs { own, added } do
    for _, name in ipairs(names) do order[#order + 1] = name end
  end
  known = {}
  for _, name in ipairs(order) do known[name] = true end
  self.order, self.known, self.count = order, known, n
  return order
end

local LAST_STEP = 2 ^ 53 - 1                            -- from 2^53 on, doubles do not hold every whole number

local fine = {}                                         -- names that were checked before
local function check_value(name, value)
  if not check.is_name(name) then
    local shown = type(name) == "string" and ("%q"):format(name) or errors.show(name)
    errors.raise("run:log: the name is %s, expected UTF-8 text without control characters, not empty", shown)
  end
  fine[name] = true
  if type(value) == "number" then return end
  if type(value) == "boolean" or tensor.is_tensor(value) and value:numel() == 1 then return end
  opts.wrong(value, "a number or a tensor of one element; run:text records texts", "run:log: '%s'", name)
end

local function number_of(name, value)
  if type(value) ~= "boolean" then value = value:item() end
  opts.need(type(value) ~= "cdata", value, "a number", "run:log: '%s'", name)
  if type(value) == "boolean" then return value and 1 or 0 end
  return value
end

-- The text printed for a line, if run.start was given no `line` function.
local function default_line(self, object, values, left)
  local parts = {}
  for _, name in ipairs(self.order) do
    if values[name] ~= nil and name ~= "step" then
      table.insert(parts, name == "loss" and 1 or #parts + 1, ("%s %.4g"):format(name, object[name]))
    end
  end
  local rate = object[self.rate_name]
  parts[#parts + 1] = rate and ("%.3g %s/s"):format(rate, (self.rate_name:match "^%a+"))
  parts[#parts + 1] = left and progress.duration(left) .. " left"
  return table.concat(parts, "  ")
end

--- Appends a line to metrics.jsonl: the values, the seconds since the start (`time`) and, for a new step, the rate of
--- tokens or samples, the MFU, and the memory: `allocated`, and at most once a second its parts by kind.
---@param values table<string, number|Tensor>  by name; `step` is the step they belong to (default: the next one); rank 0's values are written
function Run:log(values)
  if type(values) ~= "table" or getmetatable(values) then opts.wrong(values, "a table of numbers", "run:log: argument 1") end
  if self.ended or self.folder and self.folder.taken then need_open(self, "run:log") end
  local step = values.step or self.step + 1
  if type(step) ~= "number" or step % 1 ~= 0 or step < self.step or step > LAST_STEP then
    errors.raise("run:log: step is %s, expected a whole number from %d to %d", errors.show(step), self.step, LAST_STEP)
  end
  for name, value in pairs(values) do
    if not fine[name] or type(value) ~= "number" then check_value(name, value) end
  end
  local is_new = step > self.step
  self.step = step
  if not self.writes then return end
  local now, object = lib.ms_time(), self.object
  for name in pairs(object) do object[name] = nil end
  object.step, object.time = step, now - self.began + self.earlier
  if is_new then
    local spent = now - self.mark
    if self.items then object[self.rate_name] = self.items / spent end
    if self.peak then object.mfu = self.flops / spent / self.peak end
    object.allocated = self.memory:allocated()
    if now >= self.next_memory then
      self.memory:sample(object)
      local after = lib.ms_time()
      self.next_memory = after + math.max(1, 200 * (after - now))      -- at most 0.5 % of the time
    end
  end
  for name, value in pairs(values) do
    object[name] = type(value) == "number" and value or number_of(name, value)
  end
  local names = names_of(self, values, object)
  local replaced = self.folder:metric(object, names)
  if self.csv then self.csv:row(object, names, now, replaced) end
  if self.events then self.events:scalars(step, object, names) end
  if is_new and self.bar:wants(step, now) then
    local left = self.total and (now - self.began) / (step - self.first) * math.max(0, self.total - step)
    self.bar:step(step, now, self.line and self.line(object, left) or default_line(self, object, values, left))
  end
  if now >= self.next_report then report(self) end
  self.mark = lib.ms_time()
end

-- ---- other records -------------------------------------------------------------------------------------

local function check_name(self, name, who)
  need_open(self, who)
  opts.expect(name, opts.string, "%s: argument 1", who)
  if not name:find "^[%w_][%w_./-]*$" then
    errors.raise("%s: the name is '%s', expected letters, digits and _ . - /, with a letter, a digit or _ first", who,
      name)
  end
  return (name:gsub("/", "_"))
end

local IMAGE = { "step", "kind", "name", "file", "width", "height" }

--- Records an image, as a PNG file in `images/`.
---@param name string  name of the series of images; letters, digits and _ . - /
---@param t Tensor  [H, W], [1, H, W] or [3, H, W]; floating point from 0 to 1, other dtypes from 0 to 255
function Run:image(name, t)
  local file = check_name(self, name, "run:image")
  if not self.writes then return end
  local width, height, channels, pixels = pictures.image(t, "run:image: argument 2")
  local text = png.encode(width, height, channels, pixels, "run:image")
  local path = ("images/%s-%06d.png"):format(file, self.step)
  if not self.folder:put(path, text) then return end
  self.folder:medium({ step = self.step, kind = "image", name = name, file = path, width = width, height = height },
    IMAGE)
  if self.events then self.events:image(self.step, name, width, height, channels, text) end
  self.mark = lib.ms_time()
end

local PROFILE = { "step", "kind", "ranks", "layers", "waits" }

local function record_profile(self, summary, ...)
  local dist = select(2, log.rank()) > 1 and require "moonshard.dist" or nil
  local summaries = dist and dist.all_gather_object(summary) or { summary }
  if self.writes then
    local ranks, layers, waits = profiles.join(summaries)
    self.folder:medium({ step = self.step + 1, kind = "profile", ranks = ranks, layers = layers, waits = waits }, PROFILE)
  end
  return ...
end

--- Runs fn(...), usually one training step, and records where its time went on every rank: forward, backward, optimizer
--- and communication that the script waited for; by layer, and by unit of sharding. Collective. Recording makes a step
--- slower by some percent, so profile single steps; not the first ones, which also allocate memory and choose
--- algorithms. The time of an operator on a GPU is the time of its launch.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function Run:profile(fn, ...)
  opts.expect(fn, opts.fn, "run:profile: argument 1")
  need_open(self, "run:profile")
  return record_profile(self, profiles.measure(fn, ...))
end

local TEXT = { "step", "kind", "name", "text" }

--- Records a text, also in a file `NAME.txt`.
---@param name string  name of the series of texts; letters, digits and _ . - /
---@param text string  bytes that are not UTF-8 become U+FFFD, except in the file
function Run:text(name, text)
  local file = check_name(self, name, "run:text")
  opts.expect(text, opts.string, "run:text: argument 2")
  if not self.writes then return end
  self.folder:sample(self.step, text, file)
  self.folder:medium({ step = self.step, kind = "text", name = name, text = utf8(text) }, TEXT)
  if self.events then self.events:text(self.step, name, utf8(text)) end
  self.mark = lib.ms_time()
end

local CONFUSION = { "step", "kind", "name", "labels", "counts" }

--- Records a confusion matrix. Returns its counts on rank 0: counts[t + 1][p + 1] is how often
--- class t was predicted as class p.
---@param name string  name of the series; letters, digits and _ . - /
---@param targets Tensor|integer[]  the classes, from 0
---@param predictions Tensor|integer[]  the predicted classes, as many as targets
---@param given? {labels: string[]}  labels: names of the classes
---@return integer[][]? counts
function Run:confusion(name, targets, predictions, given)
  check_name(self, name, "run:confusion")
  local o = opts("run:confusion", given, { labels = opts.table })
  if not self.writes then return nil end
  local counts = pictures.confusion(targets, predictions, o.labels and #o.labels or 1, "run:confusion")
  self.folder:medium({ step = self.step, kind = "confusion", name = name, labels = o.labels, counts = counts },
    CONFUSION)
  if self.events then
    local width, pixels = pictures.draw(counts)
    self.events:image(self.step, name, width, width, 1, png.encode(width, width, 1, pixels, "run:confusion"))
  end
  self.mark = lib.ms_time()
  return counts
end

local HISTOGRAM = { "step", "kind", "name", "min", "max", "count", "sum", "limits", "counts" }

--- Records the distribution of a tensor's finite elements.
---@param name string  name of the series; letters, digits and _ . - /
---@param t Tensor  not sharded
---@param given? {bins: integer}  bins: number of bins of equal width
function Run:histogram(name, t, given)
  check_name(self, name, "run:histogram")
  local o = opts("run:histogram", given, { bins = opts.option(opts.whole_from(1), 30) })
  if not self.writes then return end
  local h = pictures.histogram(t, o.bins, "run:histogram: argument 2")
  if h then
    h.step, h.kind, h.name = self.step, "histogram", name
    self.folder:medium(h, HISTOGRAM)
    if self.events then self.events:histogram(self.step, name, h) end
  end
  self.mark = lib.ms_time()
end

--- Saves the model, the optimizer, the random generator and the `state` of run.start after the current step, for
--- `resume`. Options of the optimizer that the script has changed since run.start, such as the learning rate, are
--- saved, too. Collective.
---@param given? {path: string, config: table, keep: integer}
---   path: path of the file (default: `step-N.safetensors` in the folder); config: options to store (default: the
---   run's); keep: of the checkpoints in the folder, only so many stay, the latest ones, and this one
---   (default: all)
---@return string path
function Run:checkpoint(given)
  local o = opts("run:checkpoint", given, { path = opts.string, config = opts.table, keep = opts.whole_from(1) })
  check.config("run:checkpoint", o.config)
  if not (self.model and self.optimizer) then
    errors.raise "run:checkpoint: the run does not know what to save; give 'model' and 'optimizer' to run.start"
  end
  local path = o.path or folders.checkpoint_name(self.path, self.step)
  if self.events then self.events:flush() end           -- a resumed run continues from here
  checkpoints.save(path, self.model, self.optimizer, o.config or self.config, self.step,
    { state = self.state, began = self.options })
  if o.keep and self.writes then folders.remove_checkpoints(self.path, o.keep, path) end
  if self.writes and lib.ms_time() >= self.next_report - 12 then report(self) end    -- at most every 3 seconds
  self.mark = lib.ms_time()
  return path
end

--- Prints lines, without breaking the progress line.
---@param format string  for string.format, with the arguments that follow
---@param ... any  arguments of format
function Run:say(format, ...) self.bar:say(select("#", ...) > 0 and format:format(...) or format) end

-- If the mean MFU of the run is above 1, the machine's rate was measured too low: warns, and forgets the rate, so that
-- the next run measures it again.
local function check_peak(self)
  local steps, seconds = self.step - self.first, lib.ms_time() - self.began
  if not self.peak or self.flops * steps / seconds <= self.peak then return end
  warned(self, ("the MFU is above 1: this machine was busy when its rate of matrix products was measured (%.3g "
    .. "FLOP/s), or option 'flops' is too large; the next run measures the rate again"):format(self.peak))
  self.forget_peak()
end

--- Ends the run: closes its files and the progress line, and writes its `report.html`.
function Run:finish()
  self.bar:finish()
  if self.writes then
    check_peak(self)
    task.shown_by(nil)
    log.follow(nil)
    self.folder:close()
    if self.csv then self.csv:close() end
    if self.events then self.events:close() end
    report(self)
  end
  self.writes, self.ended = false, true
end

methods.guard(Run, "run")
methods.close(Run)

return { new = new }
