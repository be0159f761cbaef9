-- SPDX-License-Identifier: MIT
--- The calls of a model, one for each token: what it is given, and how ranks stay together.
local create = require "moonshard.tensor.create"
local scope = require("moonshard.tensor.scope").scope
local shape = require "moonshard.tensor.shape"

local M = {}

---@class Steps
---@field model Module
---@field o table  options of generate
---@field rows table[]  of rows.lua
---@field cache Cache?  nil: the model is given all tokens each time
---@field source table?  of an encoder-decoder: { inputs, mask }, what the encoder reads
---@field groups Group[]  of the ranks that generate together
---@field done boolean  this rank needs no further token
local Steps = {}
Steps.__index = Steps

function M.new(o)
  o.done = false
  return setmetatable(o, Steps)
end

-- A tensor of lists of ids, padded on the left or right, and their longest length.
local function padded(self, lists, right, multiple)
  local T, out = 0, {}
  for _, list in ipairs(lists) do T = math.max(T, #list) end
  if multiple then T = math.min(math.ceil(T / multiple) * multiple, self.model.context or math.huge) end
  for r, list in ipairs(lists) do
    local row = {}
    for k = 1, T do row[k] = list[right and k or k - T + #list] or self.o.pad end
    out[r] = row
  end
  return create.tensor(out, { dtype = "int64", device = self.device }), T
end

-- The tokens of each row from number `from` on, at most `most` of the last ones.
local function tails(rows, from, most)
  local lists = {}
  for r, row in ipairs(rows) do
    local list = {}
    for k = math.max(from, #row.ids - most + 1), #row.ids do list[#list + 1] = row.ids[k] end
    lists[r] = list
  end
  return lists
end

-- Calls the model. That of an encoder-decoder reads its source at the first call, and remembers what it made of it.
local function call(self, ids, o)
  local source = self.source
  if not source then return self.model(ids, o) end
  local logits, memory = self.model(not source.memory and source.inputs or nil, { memory = source.memory,
    attention_mask = source.mask, decoder_ids = ids, cache = o.cache, last = o.last })
  if not source.memory then source.memory = memory:keep() end
  return logits
end

-- A call whose result is not needed, on a rank that is done.
local function accompany(self)
  local source, ids = self.source, create.zeros({ 1, 1 }, { dtype = "int64", device = self.device })
  if not source then return self.model(ids) end
  return self.model(nil, { memory = source.memory:narrow(1, 1, 1), decoder_ids = ids,
    attention_mask = source.mask and source.mask:narrow(1, 1, 1) })
end

-- The logits of the next token by a model without a cache: [rows, V]. Padding on the right changes nothing in a causal
-- model; to a multiple of 32, so that shapes are few.
local function whole(self)
  local lists = tails(self.rows, 1, self.model.context or math.huge)
  local logits, parts = self.model((padded(self, lists, true, 32))), {}
  for r, list in ipairs(lists) do parts[r] = logits:select(1, r):narrow(1, #list, 1) end
  return #parts == 1 and parts[1] or shape.cat(parts, 1)
end

-- Makes the mask and the positions of the tokens in the cache and of those that will follow. Rows of one length need
-- none.
local function place(self, lists, T)
  self:forget()
  self.pads = nil
  for _, list in ipairs(lists) do
    if #list < T then self.pads = {} end
  end
  if not self.pads then return nil end
  for r, list in ipairs(lists) do self.pads[r] = T - #list end
  return self:positions_of(T)
end

function Steps:forget()
  if self.mask then self.mask:release() end
  self.mask = nil
end

-- Positions [rows, T] of the last T of `past + T`, counted from each row's first token.
function Steps:positions_of(T)
  local past = self.cache.length
  local pads = create.tensor(self.pads, { dtype = "int64", device = self.device }):unsqueeze(2)
  return (create.arange(past, past + T, { dtype = "int64", device = self.device }) - pads):clamp(0)
end

-- [rows, n]: where there is a token. Made for more positions than are there, and cut.
function Steps:mask_of(n)
  if not self.mask or self.mask:size(2) < n then
    self:forget()
    local kind = { dtype = "int64", device = self.device }
    local pads = create.tensor(self.pads, kind):unsqueeze(2)
    self.mask = create.arange(0, 2 * n, kind):ge(pads):keep()
  end
  return self.mask:narrow(2, 1, n)
end

-- Whether the next tokens are beyond the position from which Phi-3 turns all keys by other angles, those in the cache
-- as well.
local function turns_otherwise(self)
  local last, longest = self.model.renewed_beyond, self.cache.length + 1
  if not last or self.cache.length == 0 or self.cache.length > last then return false end
  for _, row in ipairs(self.rows) do longest = math.max(longest, #row.ids) end
  return longest > last
end

-- The logits of the next token: [rows, V].
local function forward(self)
  local cache = self.cache
  if not cache then return whole(self) end
  local context = self.model.context
  local ids, T, positions
  if context and cache.length + 1 > context or turns_otherwise(self) then cache:release() end
  if cache.length > 0 and self.started then
    ids, T = padded(self, tails(self.rows, 1, 1))
    positions = self.pads and self:positions_of(1)
  else
    -- The cache of an earlier call holds the beginning of the only text.
    local most = context and (self.started and math.floor(context / 2) or context)
    local lists = tails(self.rows, cache.length + 1, most or math.huge)
    ids, T = padded(self, lists)
    if cache.length == 0 then positions = place(self, lists, T) end
  end
  self.started = true
  local mask = self.pads and self:mask_of(cache.length + T) or nil
  return call(self, ids, { cache = cache, last = 1, attention_mask = mask, positions = positions }):select(2, 1)
end

-- Makes row r a copy of the former row from[r], in the cache, too.
---@param from integer[]
function Steps:reorder(from)
  if self.cache then self.cache:reorder(from) end
  local source = self.source
  if source and source.mask then
    local rows = create.tensor(from, { dtype = "int64", device = self.device }) - 1
    local mask = source.mask:index_select(1, rows):keep()
    if source.own_mask then source.mask:release() end
    source.mask, source.own_mask = mask, true
  end
  if self.pads then
    local pads = {}
    for r, k in ipairs(from) do pads[r] = self.pads[k] end
    self.pads = pads
    self:forget()
  end
end

-- Repeats each row n times, after its text has been read once.
function Steps:repeated(n)
  if n > 1 then self.copies = n end
end

local function copies(self, logits)
  local n, rows, from = self.copies, {}, {}
  self.copies = nil
  for r, row in ipairs(self.rows) do
    for k = 0, n - 1 do
      local copy = {}
      for key, value in pairs(row) do copy[key] = value end
      copy.ids, copy.sample = {}, k
      for j = 1, #row.ids do copy.ids[j] = row.ids[j] end
      rows[#rows + 1], from[#from + 1] = copy, r
    end
  end
  self.rows = rows
  self:reorder(from)
  return logits:repeat_interleave(n, 1)
end

-- Whether all ranks are done.
local function all_done(self)
  if #self.groups == 0 then return self.done end
  local dist = require "moonshard.dist"
  return scope(function()
    local open = create.tensor({ self.done and 0 or 1 }, { dtype = "int64", device = self.device })
    for _, group in ipairs(self.groups) do dist.all_reduce(open, { op = "max", group = group }) end
    return open:item() == 0
  end)
end

--- Calls the model once, and choose(logits) with its logits, float32 [rows, V] on the CPU. A rank that is done calls it
--- for the others' sake. Returns the result of choose; nil when all ranks are done.
---@param choose fun(logits: Tensor): any
function Steps:step(choose)
  while not all_done(self) do
    if not self.done then
      return scope(function()
        local logits = forward(self):to("cpu"):float()
        if self.copies then logits = copies(self, logits) end
        return choose(logits:contiguous())
      end)
    end
    scope(function() accompany(self) end)
  end
end

--- Releases the tensors.
function Steps:close()
  self:forget()
  if self.cache and self.own_cache then self.cache:release() end
  local source = self.source
  if source and source.memory then source.memory:release() end
  if source and source.own_mask then source.mask:release() end
end

return M
