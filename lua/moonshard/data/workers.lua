-- SPDX-License-Identifier: MIT
--- A loader's worker processes. Worker (k - 1) % n + 1 makes batch k, so the batches arrive in order. Each worker has
--- at most `prefetch` batches in flight, and each batch has a block of shared memory of its own.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local packing = require "moonshard.data.packing"
local processes = require "moonshard.data.processes"
local ffi, state = engine.ffi, engine.state

---@class Workers
---@field list table[]  the workers
---@field next integer  number of the batch that is handed out next
---@field asked integer  number of the last batch that a worker was asked for
local Workers = {}
Workers.__index = Workers

local M = {}

--- Starts the workers. given: the arguments of maker.new; count: number of workers; prefetch: batches in flight for
--- each; timeout: in seconds, 0: none.
function M.new(given, count, prefetch, timeout)
  local self = setmetatable({ list = {}, prefetch = prefetch, timeout = timeout }, Workers)
  self.message = ffi.new "moonshard_message"
  local bytes, store = packing.pack(given, "DataLoader", "the dataset")
  local setup = processes.block()
  setup:grow(bytes)
  store(setup.data)
  for k = 1, count do
    local slots = {}
    for j = 1, prefetch do slots[j] = processes.block() end
    self.list[k] = { slots = slots, pending = {} }
    self.list[k].process = processes.start(setup, setup.size, slots)
  end
  setup:close()
  return self
end

function Workers:close()
  for _, w in ipairs(self.list) do
    if w.process then processes.finish(w.process) end
    for _, slot in ipairs(w.slots) do slot:close() end
  end
  self.list = {}
end

-- Raises the error that worker k has ended, with the item that it was making.
local function ended(self, k, w)
  local pid, item = w.process.pid, w.slots[w.pending[1].slot].data
  local at = item ~= nil and tonumber(ffi.cast("double *", item)[0]) or 0
  local how = processes.ending(w.process)
  self:close()
  errors.raise("DataLoader: worker %d (process %d) %s%s", k, pid, how, at > 0
    and (" while it made item %d"):format(at) or "")
end

-- Waits for a worker's answer to the first of its pending requests.
local function await(self, k)
  local w, waited = self.list[k], 0
  while not processes.wait(w.process.fd, self.timeout > 0 and 100 or -1) do
    if state.interrupted ~= 0 then create.full({}, 0):release() end     -- an engine call raises the interrupt
    waited = waited + 0.1
    if self.timeout > 0 and waited >= self.timeout then
      local pid = w.process.pid
      self:close()
      errors.raise("DataLoader: worker %d (process %d) made no batch within %g s", k, pid, self.timeout)
    end
  end
  if not processes.receive(w.process.fd, self.message) then ended(self, k, w) end
  return table.remove(w.pending, 1)
end
jit.off(await)

local function ask(self, epoch, number, seed, positions)
  local k = (number - 1) % #self.list + 1
  local w, message = self.list[k], self.message
  local index = math.floor((number - 1) / #self.list) % self.prefetch + 1
  local slot, n = w.slots[index], positions and #positions or -1
  slot:grow(processes.HEAD + 8 * math.max(0, n))
  ffi.cast("double *", slot.data)[0] = 0
  local list = ffi.cast("double *", slot.data + processes.HEAD)
  for j = 1, n do list[j - 1] = positions[j] end
  message.kind, message.slot, message.epoch, message.number = processes.ASK, index, epoch, number
  message.seed, message.count = seed, n
  w.pending[#w.pending + 1] = { slot = index }
  -- If the worker has ended, await raises the error.
  processes.send(w.process.fd, message)
end

-- Receives and discards the answers to all pending requests.
local function drain(self)
  for k, w in ipairs(self.list) do
    while w.pending[1] do await(self, k) end
  end
end

-- Raises a worker's error. One that begins with a line of the script, such as an error in `collate`, is not changed.
local function failed(text)
  if text:find "^[^\n:]+:%d+: " then error(text, 0) end
  errors.raise("%s", text)
end

--- Batch k of a walk, as maker:batch and maker:block return it. Asks for the batches after it.
---@param walk table  with its epoch, from 0; batches that were asked for another walk are discarded
---@param k integer  from 1
---@param seed integer
---@param request fun(k: integer): integer[]|false|nil  the positions of a batch; false: a batch of a stream; nil: there is no such batch
---@return table?
function Workers:batch(walk, k, seed, request)
  if self.walk ~= walk or self.next ~= k then
    drain(self)
    self.walk, self.asked, self.last = walk, k - 1, nil
  end
  self.next = nil                                          -- an error makes the next call ask again
  while not self.last and self.asked < k - 1 + #self.list * self.prefetch do
    local positions = request(self.asked + 1)
    if positions == nil then
      self.last = self.asked
    else
      self.asked = self.asked + 1
      ask(self, walk.epoch, self.asked, seed, positions)
    end
  end
  if self.last and k > self.last then return nil end
  local number = (k - 1) % #self.list + 1
  local slot = self.list[number].slots[await(self, number).slot]
  local kind, size = self.message.kind, self.message.count
  if kind == processes.NO_BATCH then return nil end
  slot:follow(processes.HEAD + size)
  if kind == processes.FAILED then failed(ffi.string(slot.data + processes.HEAD, size)) end
  local batch = packing.unpack(slot.data + processes.HEAD, true)
  self.next = k + 1
  return batch
end

return M
