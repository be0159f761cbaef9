-- SPDX-License-Identifier: MIT
--- ms.cuda: functions for GPUs; the first use loads the CUDA plugin.
---
--- The engine runs operators on one compute stream of a device, in the order of their calls, and overlaps copies and
--- collectives on streams of its own. Streams, events and graphs have PyTorch's names, so that scripts need no change:
--- the work of all streams runs in the order of the calls, which is one of the orders that PyTorch allows.
local autograd = require "moonshard.autograd"
local amp = require "moonshard.amp"
local capture = require "moonshard.autograd.capture"
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local gpus = require "moonshard.tensor.gpus"
local memory = require "moonshard.tools.memory"
local opts = require "moonshard.core.opts"
local random = require "moonshard.tensor.random"
local ranges = require "moonshard.core.ranges"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"

local lib, checked_device = engine.lib, gpus.checked
local M = {}

for name, fn in pairs(gpus.functions) do M[name] = fn end

--- Seeds the generator, which is one for all devices: ms.manual_seed.
---@param seed integer  a whole number
function M.manual_seed(seed) random.manual_seed(seed) end

-- ---- memory ---------------------------------------------------------------------------------------

-- A field of ms.memory_stats of a device; 0 if i is nil and there is no device.
local function stat(field, i, who)
  if i == nil and lib.ms_cuda_count() == 0 then return 0 end
  return util.memory_stats(("cuda:%d"):format(checked_device(i, who)))[field]
end

--- The bytes that tensors hold on a device; 0 if there is no CUDA device and i is nil.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
---@return integer
function M.memory_allocated(i) return stat("allocated", i, "cuda.memory_allocated") end

--- The most bytes that tensors held since the script began or the peak was reset; 0 if there is no CUDA
--- device and i is nil.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
---@return integer
function M.max_memory_allocated(i) return stat("peak_allocated", i, "cuda.max_memory_allocated") end

--- The bytes that the allocator has taken from a device; 0 if there is no CUDA device and i is nil.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
---@return integer
function M.memory_reserved(i) return stat("reserved", i, "cuda.memory_reserved") end

--- The most bytes that the allocator had taken since the script began or the peak was reset; 0 if there is no CUDA
--- device and i is nil.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
---@return integer
function M.max_memory_reserved(i) return stat("peak_reserved", i, "cuda.max_memory_reserved") end

--- Sets the peaks of a device's memory to the current use.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
function M.reset_peak_memory_stats(i)
  util.reset_peak_memory_stats(("cuda:%d"):format(checked_device(i, "cuda.reset_peak_memory_stats")))
end

--- The memory of a device by kind, line and module, as text: ms.memory_report.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
---@return string
function M.memory_summary(i)
  return tostring(memory.memory_report { device = ("cuda:%d"):format(checked_device(i, "cuda.memory_summary")) })
end

--- Returns to the devices the reserved memory that no tensor uses.
function M.empty_cache() util.empty_cache() end

-- ---- events and streams -----------------------------------------------------------------------------

--- A point in a device's work.
---@class CudaEvent
local Event = class.new "CudaEvent"

---@param given? { enable_timing: boolean }
---   enable_timing: record waits for the device and reads the clock, for elapsed_time (default: false)
function Event:init(given) self._timed = opts("cuda.Event", given, { enable_timing = false }).enable_timing end

--- Places the event after the work queued so far.
function Event:record()
  self._device = checked_device(nil, "CudaEvent:record")
  if not self._timed then return end
  M.synchronize(self._device)
  self._time = lib.ms_time()
end

--- Waits until the work before the event is done.
function Event:synchronize()
  if self._device then M.synchronize(self._device) end
end

--- The time from this event to a later one, in milliseconds. Errors: an event without enable_timing, or not recorded.
---@param last CudaEvent  recorded after this one
---@return number
function Event:elapsed_time(last)
  opts.need(class.isa(last, Event), last, "an event (cuda.Event)", "elapsed_time: argument 1")
  for k, event in ipairs { self, last } do
    if not event._time then
      errors.raise("elapsed_time: event %d %s", k, event._timed and "was not recorded"
        or "has no time; write cuda.Event { enable_timing = true }")
    end
  end
  return 1000 * (last._time - self._time)
end

M.Event = Event

--- A queue of work. Work of all streams of a device runs in the order of the calls.
---@class CudaStream
local Stream = class.new "CudaStream"

---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
function Stream:init(i) self.device = checked_device(i, "cuda.Stream") end

--- Waits until the stream's work is done.
function Stream:synchronize() M.synchronize(self.device) end

--- Lets later work of this stream wait for another stream's work so far. Has no effect: on one device work runs in the
--- order of the calls, and copies between devices wait for both devices.
---@param other CudaStream  a stream
function Stream.wait_stream(_, other)
  opts.need(class.isa(other, Stream), other, "a stream (cuda.Stream)", "wait_stream: argument 1")
end

--- Lets later work of this stream wait for an event. Has no effect, for the reasons of wait_stream.
---@param event CudaEvent  an event
function Stream.wait_event(_, event)
  opts.need(class.isa(event, Event), event, "an event (cuda.Event)", "wait_event: argument 1")
end

--- Records an event on this stream.
---@param event? CudaEvent  default: a new one
---@return CudaEvent
function Stream.record_event(_, event)
  event = event or Event()
  opts.need(class.isa(event, Event), event, "an event (cuda.Event)", "record_event: argument 1")
  event:record()
  return event
end

M.Stream = Stream

--- The stream of a device on which operators run.
---@param i? integer|string  an index from 0, or "cuda:1" (default: the current device)
---@return CudaStream
function M.current_stream(i) return Stream(i) end

--- Runs fn(…). The stream changes nothing: work of all streams runs in the order of the calls.
---@param s CudaStream  a stream
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.stream(s, fn, ...)
  opts.need(class.isa(s, Stream), s, "a stream (cuda.Stream)", "cuda.stream: argument 1")
  opts.expect(fn, opts.fn, "cuda.stream: argument 2")
  return fn(...)
end

-- ---- graphs -----------------------------------------------------------------------------------------

--- Work that is recorded once, by cuda.graph, and repeated.
---@class CUDAGraph
local Graph = class.new "CUDAGraph"

--- Repeats the recorded work: it reads the tensors that the function read, which a script fills by copy_, and its
--- results are in the tensors that cuda.graph returned. Errors: nothing was recorded.
function Graph:replay()
  if not self._step then errors.raise "CUDAGraph:replay: nothing was recorded; call cuda.graph(graph, fn) first" end
  local new = { self._step() }
  autograd.no_grad(function()
    for k, t in pairs(self._results) do t:copy_(new[k]) end
  end)
  for k in pairs(self._results) do new[k]:release() end
end

--- Frees the recording.
function Graph:reset()
  if self._step then self._step:release() end
  self._step, self._results = nil, nil
end

M.CUDAGraph = Graph

--- Runs fn and records its work in a graph, by ms.capture, whose rules and errors apply. Unlike PyTorch's recording,
--- this call also does the work once.
---@param graph CUDAGraph  gets the recording
---@param fn fun(): any  called without arguments
---@return any  the results of fn: tensors that every replay writes
function M.graph(graph, fn)
  opts.need(class.isa(graph, Graph), graph, "a graph (cuda.CUDAGraph)", "cuda.graph: argument 1")
  opts.expect(fn, opts.fn, "cuda.graph: argument 2")
  local step = capture.capture(fn, { warmup = 0 })
  local out, results = { step() }, {}
  for k, t in pairs(out) do
    if tensor.is_tensor(t) then results[k] = t:keep() end
  end
  graph:reset()
  graph._step, graph._results = step, results
  return unpack(out, 1, table.maxn(out))
end

-- ---- ranges -----------------------------------------------------------------------------------------

local open = {}                                         -- the ranges that range_push began
local allocated = engine.ffi.new "double[1]"

local nvtx = {}

--- Begins a range of the profiler; the innermost one ends with range_pop.
---@param name string  name of the range
---@return integer depth  the number of ranges that were open before
function nvtx.range_push(name)
  opts.expect(name, opts.string, "range_push: argument 1")
  local from = lib.ms_range_open(allocated)
  open[#open + 1] = { name = name, from = from, allocated = allocated[0] }
  return #open - 1
end

--- Ends the range that range_push began last. Errors: none is open.
---@return integer depth  the number of ranges that are still open
function nvtx.range_pop()
  local range = table.remove(open)
  if not range then errors.raise "range_pop: no range is open; range_push begins one" end
  if range.from ~= 0 then
    lib.ms_range_close(range.from, range.allocated, engine.ffi.C.MS_RANGE_USER, range.name, "")
  end
  return #open
end

--- Marks a moment as an empty range of the profiler.
---@param name string  name of the mark
function nvtx.mark(name)
  opts.expect(name, opts.string, "mark: argument 1")
  ranges.user(name, function() end)
end

--- Runs fn(…) as a range of the profiler: profiler.record_function.
---@param name string  name of the range
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function nvtx.range(name, fn, ...)
  opts.expect(name, opts.string, "range: argument 1")
  opts.expect(fn, opts.fn, "range: argument 2")
  return ranges.user(name, fn, ...)
end

M.nvtx = errors.closed(nvtx, "cuda.nvtx")
--- ms.amp: autocast and gradient scalers, the same for all devices.
M.amp = amp

return errors.closed(M, "cuda")
