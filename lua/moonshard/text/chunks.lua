-- SPDX-License-Identifier: MIT
--- Encodes texts by SentencePiece's models without offsets, chunk by chunk: a chunk is spaces and the characters up to
--- the next space. No token crosses the beginning of a chunk, because none has the sign of a space after another text;
--- so a chunk's tokens depend on the chunk alone, and are remembered. Where that does not hold, `add` says so, and the
--- text is encoded as a whole: a chunk that the map of characters joins to the next one, or that has a user-defined
--- token.
local bit = require "bit"
local ffi = require("moonshard.core.ffi").ffi
local abs, band, bxor, rol, rshift = math.abs, bit.band, bit.bxor, bit.rol, bit.rshift

local SPACE = 32
local LONGEST = 255                                     -- bytes of a chunk that is remembered, also normalized
local MOST = 2 ^ 18                                     -- slots of a memory, half of which are used

local M = {}

-- ---- remembered chunks ----------------------------------------------------------------------------------

-- A hash table of chunks by their bytes, without strings of Lua. A slot's data are in `words`, from `at` on: the chunk's
-- bytes, its ids, and the scores of its steps, of both a multiple of 4: a loop of LuaJIT's costs more than three additions.
-- texts: the normalized chunk by `at`, if its ids can depend on what is before it.
local SLOTS = ffi.typeof "struct { int32_t hash, at; float gap; uint8_t size, n, steps, chars; } [?]"
local WORDS, float_p, byte_p = ffi.typeof "int32_t[?]", ffi.typeof "float *",
  ffi.typeof "const uint8_t *"

ffi.cdef "int moonshard_same_bytes(const void *, const void *, size_t) __asm__(\"memcmp\");"
local same_bytes = ffi.C.moonshard_same_bytes

local Memory = {}
Memory.__index = Memory

local function new_memory(size)
  local self = setmetatable({ used = 0, at = 0, size = size, room = 16 * size, texts = {} }, Memory)
  self.slots = ffi.new(SLOTS, size)
  self.words = ffi.new(WORDS, self.room)
  return self
end

local function is_same(slot, words, bytes, from, size, hash)
  return slot.hash == hash and slot.size == size and same_bytes(words + slot.at, bytes + from, size) == 0
end

-- The slot of a chunk, which may be empty.
local function slot_of(slots, words, last, bytes, from, size, hash)
  local k = band(hash, last)
  while slots[k].size ~= 0 and not is_same(slots[k], words, bytes, from, size, hash) do k = band(k + 1, last) end
  return k
end

-- A memory with twice the slots and the same chunks; an empty one beyond MOST.
function Memory:larger()
  if self.size >= MOST then return new_memory(1024) end
  local to, last = new_memory(2 * self.size), 2 * self.size - 1
  to.room, to.words, to.at, to.used, to.texts = self.room, self.words, self.at, self.used, self.texts
  for k = 0, self.size - 1 do
    if self.slots[k].size ~= 0 then
      local at = band(self.slots[k].hash, last)
      while to.slots[at].size ~= 0 do at = band(at + 1, last) end
      to.slots[at] = self.slots[k]
    end
  end
  return to
end

-- Remembers a chunk's ids; returns the memory, which may be a larger one. text: the normalized chunk.
local function remember(self, bytes, from, size, hash, ids, text)
  if self.used >= self.size / 2 then self = self:larger() end
  local k = slot_of(self.slots, self.words, self.size - 1, bytes, from, size, hash)
  local slot, steps, head = self.slots[k], ids.steps or {}, math.ceil(size / 4)
  local n = math.ceil(math.max(ids.n, 1) / 4) * 4
  local need = head + n + math.ceil(#steps / 4) * 4
  if self.at + need > self.room then
    self.room = 2 * self.room + need
    local words = ffi.new(WORDS, self.room)
    ffi.copy(words, self.words, 4 * self.at)
    self.words = words
  end
  slot.hash, slot.at, slot.size, slot.n, slot.steps = hash, self.at, size, ids.n, #steps
  slot.chars = #text:gsub("[\128-\191]", "")
  slot.gap, self.texts[self.at] = ids.gap or math.huge, ids.gap and text
  local at = self.words + self.at
  ffi.copy(at, bytes + from, size)
  for j = 1, ids.n do at[head + j - 1] = ids[j] end
  local scores = ffi.cast(float_p, at + head + n)
  for j, score in ipairs(steps) do scores[j - 1] = score end
  self.at, self.used = self.at + need, self.used + 1
  return self
end

-- ---- encoding -------------------------------------------------------------------------------------------

local Chunks = {}
Chunks.__index = Chunks

--- o.model: chunk(word, sum) gives ids, and the sum of scores after them; remember(word) gives ids for other sums, as
--- Unigram:remember says. o.maps(chunk, is_space): the normalized chunk; whether it ends in a space; whether a space
--- after it changes it. o.sign: of a space; o.prefix: a text begins with it; o.squeezes: of several spaces one remains.
function M.new(o) return setmetatable({ _o = o, _memory = new_memory(1024) }, Chunks) end

-- Adds ids to a list.
local function put(list, ids)
  local n, count = list.n, ids.n
  local buffer = n + count > list.room and list:reserve(count) or list.ids
  for k = 1, count do buffer[n + k - 1] = ids[k] end
  list.n = n + count
end

local rounded = ffi.new "float[1]"
local function single(x)
  rounded[0] = x
  return rounded[0]
end

-- The rest of more than four ids, and of scores.
local function copy(to, ids, n)
  for k = 4, n - 1 do to[k] = ids[k] end
end

local function add_scores(sum, scores, n)
  for k = 4, n - 1 do sum = single(sum + scores[k]) end
  return sum
end

-- Adds the ids of remembered chunks to a list, from byte `at` of n on, up to one that is not remembered or whose ids
-- depend on the sum of scores. Returns where that is, its end, its hash, the sum, and the normalized chunk if it is
-- remembered.
local function add_known(list, memory, bytes, at, n, sum, reach)
  local slots, words, last = memory.slots, memory.words, memory.size - 1
  local buffer, room, count = list.ids, list.room - 4, list.n
  local stop, hash, text
  while at < n do
    stop, hash = at + 1, 1
    while stop < n and bytes[stop] == SPACE do stop, hash = stop + 1, hash + 1 end
    while stop < n and bytes[stop] ~= SPACE do
      hash, stop = bxor(rol(hash, 5), bytes[stop]), stop + 1
    end
    hash = bxor(hash, rshift(hash, 15))
    local size, k = stop - at, band(hash, last)
    if not is_same(slots[k], words, bytes, at, size, hash) then
      k = slot_of(slots, words, last, bytes, at, size, hash)
      if slots[k].size == 0 then break end
    end
    local slot = slots[k]
    -- As Unigram:remember says: each of the characters may have rounded both sums by 2^-24 of them.
    if slot.gap <= slot.chars * 2 ^ -23 * (slot.chars * reach + abs(sum)) then
      text = memory.texts[slot.at]
      break
    end
    local m = slot.n
    if count + m > room then
      list.n = count
      buffer = list:reserve(m + 4)
      room = list.room - 4
    end
    local ids = words + slot.at + rshift(size + 3, 2)
    buffer[count], buffer[count + 1], buffer[count + 2], buffer[count + 3] = ids[0], ids[1], ids[2], ids[3]
    if m > 4 then copy(buffer + count, ids, m) end
    if slot.steps > 0 then
      local scores = ffi.cast(float_p, ids + band(m + 3, -4))
      sum = single(single(single(single(sum + scores[0]) + scores[1]) + scores[2]) + scores[3])
      if slot.steps > 4 then sum = add_scores(sum, scores, slot.steps) end
    end
    count, at = count + m, stop
  end
  list.n = count
  return at, stop, hash, sum, text
end

--- Adds the tokens of a text to a list; returns false, and adds none, if it must be encoded as a whole.
---@param list table  ids, n, room, reserve(more)
---@param s string
---@param defined? table  finds tokens that a user has defined
---@return boolean
function Chunks:add(list, s, defined)
  local o = self._o
  local model, sign, before = o.model, o.sign, list.n
  local bytes, n, at = ffi.cast(byte_p, s), #s, 0
  -- pending: what is normalized and not encoded yet, because the next chunk might continue it.
  local pending, is_space, seen, sum = "", o.squeezes, false, 0
  while at < n do
    -- A text's first chunk is remembered, too, if it begins without a space, as no other does.
    local inside, stop, hash, new = pending == "" and (seen or at == 0 and bytes[0] ~= SPACE), at, nil, nil
    if inside then
      at, stop, hash, sum, new = add_known(list, self._memory, bytes, at, n, sum, model.reach)
      if at == n then break end
      if at > 0 or new then is_space, seen = false, true end
    else
      while stop < n and bytes[stop] == SPACE do stop = stop + 1 end
      while stop < n and bytes[stop] ~= SPACE do stop = stop + 1 end
    end
    local ids
    if new then
      ids, sum = model:chunk(new, sum)
      put(list, ids)
    else
      local ends, goes_on
      new, ends, goes_on = o.maps(s:sub(at + 1, stop), is_space)
      if goes_on or defined and defined:finds(new) then
        list.n = before
        return false
      end
      if new ~= "" then
        is_space = ends
        if not seen and o.prefix then new = sign .. new end
        seen = true
      end
      local begins = new:sub(1, #sign) == sign
      if pending ~= "" and begins and pending:sub(-#sign) ~= sign then
        ids, sum = model:chunk(pending, sum)
        put(list, ids)
        pending = ""
      end
      if pending ~= "" or not begins or new:sub(-#sign) == sign then
        pending = pending .. new
      elseif inside and stop - at <= LONGEST and #new <= LONGEST then
        self._memory = remember(self._memory, bytes, at, stop - at, hash, model:remember(new), new)
        stop = at                                       -- once more: now it is known
      else
        ids, sum = model:chunk(new, sum)
        put(list, ids)
      end
    end
    at = stop
  end
  while o.squeezes and #pending > 0 and pending:sub(-#sign) == sign do pending = pending:sub(1, -1 - #sign) end
  if pending ~= "" then put(list, (model:chunk(pending, sum))) end
  return true
end

return M
