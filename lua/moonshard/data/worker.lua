-- SPDX-License-Identifier: MIT
--- The program of a worker process (processes.lua): makes the batches that the loader asks for, one after the other.
--- usage: luajit worker.lua SLOTS BYTES PARENT PATH CPATH
local slots_count, bytes, parent = tonumber(arg[1]), tonumber(arg[2]), tonumber(arg[3])
package.path, package.cpath = arg[4], arg[5]

local engine = require "moonshard.core.ffi"
local processes = require "moonshard.data.processes"
local ffi = engine.ffi

if not processes.follow_parent(parent) then os.exit(0) end
engine.lib.ms_set_num_threads(1)                          -- the workers share the cores
-- A worker has its rank's environment. A second process that joined the job as this rank would make the job hang.
require("moonshard.dist.calls").not_a_rank = "a worker of a DataLoader"

local slots = {}
for k = 1, slots_count do slots[k] = processes.block(processes.SLOTS + k - 1) end

-- The loader's maker, or why it cannot be made here.
local ready, maker = pcall(function()
  require "moonshard.data"
  local packing, makers = require "moonshard.data.packing", require "moonshard.data.maker"
  local setup = processes.block(processes.SETUP)
  setup:follow(bytes)
  local given = packing.unpack(setup.data, false)
  given.setup = setup                                     -- tensors of the dataset are in its memory
  return makers.new(given)
end)

local message = ffi.new "moonshard_message"

local function positions_in(slot)
  local list = ffi.cast("double *", slot.data + processes.HEAD)
  local positions = {}
  for k = 1, message.count do positions[k] = list[k - 1] end
  return positions
end

-- The batch that a message asks for, packed; nil: there is none.
local function packed(slot)
  if not ready then error("a worker cannot make the dataset: " .. tostring(maker), 0) end
  maker.seed, maker.progress = message.seed, ffi.cast("double *", slot.data)
  local batch
  if message.count >= 0 then
    batch = maker:batch(message.epoch, positions_in(slot))
  else
    batch = maker:block(maker, message.epoch, message.number - 1)
  end
  if not batch then return nil end
  return require "moonshard.data.packing".pack(batch, "DataLoader", "the batch")
end

local function answer(slot)
  local run = ready and require "moonshard.tensor.scope".run
  local ok, size, store
  if run then
    run("DataLoader worker", function()
      ok, size, store = pcall(packed, slot)
      if not ok or not size then return end
      slot:grow(processes.HEAD + size)
      store(slot.data + processes.HEAD)
    end)
  else
    ok, size = pcall(packed, slot)
  end
  if ok then
    message.kind, message.count = size and processes.BATCH or processes.NO_BATCH, size or 0
    return
  end
  local text = tostring(size)
  slot:grow(processes.HEAD + #text)
  ffi.copy(slot.data + processes.HEAD, text, #text)
  message.kind, message.count = processes.FAILED, #text
end

while processes.receive(processes.SOCKET, message) do
  local slot = slots[message.slot]
  slot:follow(processes.HEAD + 8 * math.max(0, message.count))
  answer(slot)
  if not processes.send(processes.SOCKET, message) then break end
end
os.exit(0)
