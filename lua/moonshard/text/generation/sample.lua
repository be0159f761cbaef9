-- SPDX-License-Identifier: MIT
--- Choosing the next token by its logits: the processors of transformers in their order, which is repetition penalty,
--- temperature, top_k, top_p, min_p. All filters keep a token if its probability reaches a threshold, which is found
--- without sorting, as in a radix sort. Rows are chosen one by one on the CPU, so that a row's tokens do not depend on
--- the batch.
local bit = require "bit"
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local raw = require "moonshard.data.raw"
local rshift, lshift, min = bit.rshift, bit.lshift, math.min
local ffi, lib = engine.ffi, engine.lib

local M = {}

-- The 31 bits of a float that is not negative are ordered as the floats are: three digits, the highest first.
local DIGITS = { { shift = 21, width = 10 }, { shift = 10, width = 11 }, { shift = 0, width = 10 } }
local sums = ffi.new "double[2049]"

local ids, room = ffi.new "int32_t[1]", 1              -- the tokens that a filter has kept, in order

-- Keeps those tokens whose digits from bit `shift` on are at least `least`; returns their number.
local function keep(bits, n, shift, least)
  local m = 0
  for k = 0, n - 1 do
    local i = ids[k]
    ids[m] = i
    m = m + 1 - rshift(rshift(bits[i], shift) - least, 31)         -- no branch: half of them would be predicted wrongly
  end
  return m
end

-- Adds the weights of the tokens for each value of a digit. prefix: the digits above, of which no token has less; those
-- with more are added elsewhere.
local function weigh(bits, q, n, digit, prefix)
  local shift, last, from = digit.shift, lshift(1, digit.width) - 1, lshift(prefix, digit.width)
  ffi.fill(sums, ffi.sizeof(sums))
  for k = 0, n - 1 do
    local i = ids[k]
    local d = min(rshift(bits[i], shift) - from, last + 1)
    sums[d] = sums[d] + (q and q[i] or 1)
  end
  return last
end

-- Among the n tokens: the largest threshold so that those which reach it weigh `target`; the weight of those above it;
-- and the number of those that reach it, which remain. `q`: weights; nil: each token weighs 1. Thresholds are bits.
local function threshold(bits, q, n, target)
  local prefix, above = 0, 0
  for _, digit in ipairs(DIGITS) do
    local d, lowest = weigh(bits, q, n, digit, prefix), 0
    while d > 0 and above + sums[d] < target do
      if sums[d] > 0 then lowest = d end
      above, d = above + sums[d], d - 1
    end
    -- By rounding, all values together can weigh less than the target.
    if above + sums[d] < target or sums[d] == 0 then d, above = lowest, above - sums[lowest] end
    prefix = lshift(prefix, digit.width) + d
    n = keep(bits, n, digit.shift, prefix)
  end
  return prefix, above, n
end

-- The number of values at a threshold that are kept, the first ones, so that all that are kept weigh `target`.
local function ties(value, above, target) return math.max(1, math.ceil((target - above) / value - 1e-9)) end

local as_float = ffi.new "union { int32_t bits; float value; }"

local INFINITY = 0x7f800000                            -- bits of it; those of NaNs are above, or have the sign

-- The sum of all probabilities, and the bits of the largest one. Nothing if one is not finite: its bits tell, because
-- LuaJIT takes some NaNs that it did not make for values of other types.
local function sum_and_best(q, bits, n)
  local total, best = 0, 0
  for i = 0, n - 1 do
    local b = bits[i]
    if b < 0 or b >= INFINITY then return nil end
    total = total + q[i]
    if b > best then best = b end
  end
  return total, best
end

-- The first of the n tokens at which the sum of q exceeds `most`, or the last one with a probability; and the sum.
-- floor, allowed: so many of the tokens at this threshold count.
local function walk(q, bits, n, most, floor, allowed)
  local sum, id = 0, nil
  for k = 0, n - 1 do
    local i = ids[k]
    if bits[i] ~= floor or allowed > 0 then
      if bits[i] == floor then allowed = allowed - 1 end
      if q[i] > 0 then
        id, sum = i, sum + q[i]
        if sum > most then break end
      end
    end
  end
  return id, sum
end

--- A token of a row, drawn from what the filters keep.
---@param q ffi.cdata*  float[n], the probabilities of all tokens
---@param n integer
---@param o { top_k: integer, top_p: number, min_p: number }
---@param u number  in [0, 1]: which token is drawn
---@return integer? id  from 0; nil if the numbers are not finite
function M.draw(q, n, o, u)
  local bits = ffi.cast("int32_t *", q)
  local total, best = sum_and_best(q, bits, n)
  if not total or total == 0 then return nil end
  if n > room then ids, room = ffi.new("int32_t[?]", n), n end
  for i = 0, n - 1 do ids[i] = i end
  local floor, allowed, _ = 0, n, nil
  if o.top_k > 0 and o.top_k < n then
    _, _, n = threshold(bits, nil, n, o.top_k)
    _, total = walk(q, bits, n, math.huge, -1, 0)
  end
  if o.top_p < 1 then
    local target = math.max(o.top_p * total, 1e-30)
    local at, above, left = threshold(bits, q, n, target)
    floor, n, as_float.bits = at, left, at
    allowed = ties(as_float.value, above, target)
  end
  if o.min_p > 0 then
    as_float.bits = best
    as_float.value = o.min_p * as_float.value
    if as_float.bits > floor then
      floor, allowed = as_float.bits, n
      n = keep(bits, n, 0, floor)
    end
  end
  _, total = walk(q, bits, n, math.huge, floor, allowed)
  return (walk(q, bits, n, u * total, floor, allowed))
end

--- Changes the scores of the tokens that each row has as its repetition penalty says (Keskar et al. 2019).
---@param scores Tensor  [rows, V]
---@param rows { ids: integer[] }[]  the tokens so far, from 0
---@param penalty number
function M.penalize_(scores, rows, penalty)
  local longest, lists = 0, {}
  for _, row in ipairs(rows) do longest = math.max(longest, #row.ids) end
  for r, row in ipairs(rows) do
    lists[r] = {}
    for k = 1, longest do lists[r][k] = row.ids[k] or row.ids[1] end
  end
  local at = create.tensor(lists, { dtype = "int64" })
  local had = scores:gather(2, at)
  scores:scatter_(2, at, (had * penalty):where(had:lt(0), had / penalty))
end

-- The tokens after which the row's last n tokens would be ones that it has already.
local function repeating(tokens, n)
  local list, last = {}, #tokens - n + 1
  for k = 0, last - 1 do
    local j = 1
    while j < n and tokens[k + j] == tokens[last + j] do j = j + 1 end
    if j == n then list[#list + 1] = tokens[k + n] end
  end
  return list
end

-- The tokens that would complete a list of bad_words_ids. A single token that ends texts is none of them.
local function completing(tokens, o)
  local list = {}
  for _, word in ipairs(o.bad_words_ids or {}) do
    local n = #word
    local j = 1
    while j < n and word[j] == tokens[#tokens - n + 1 + j] do j = j + 1 end
    if j == n and not (n == 1 and o.eos[word[1]]) then list[#list + 1] = word[n] end
  end
  return list
end

--- Makes the scores of tokens that a row may not have next -infinity.
---@param scores Tensor  float32 [rows, V] on the CPU, contiguous
---@param rows { ids: integer[], prompt: integer }[]
---@param o table  options of generate
function M.forbid_(scores, rows, o)
  local V, data = scores:size(2), ffi.cast("float *", scores:data_ptr())
  for r, row in ipairs(rows) do
    local at, new = data + (r - 1) * V, #row.ids - row.prompt
    local function forbid(list)
      for _, id in ipairs(list or {}) do
        if id < V then at[id] = -math.huge end
      end
    end
    forbid(o.suppress_tokens)
    if new == 0 then forbid(o.begin_suppress_tokens) end
    if new < o.min_new_tokens then forbid(o.eos_list) end
    if o.no_repeat_ngram_size > 0 then forbid(repeating(row.ids, o.no_repeat_ngram_size)) end
    forbid(completing(row.ids, o))
  end
end

--- The likeliest token of each row. Errors: its score is not finite; a NaN counts as the largest.
---@param scores Tensor  float32 [rows, V] on the CPU, contiguous
---@param who string
---@return integer[]
function M.likeliest(scores, who)
  local chosen, bits, V = scores:argmax(2):tolist(), ffi.cast("int32_t *", scores:data_ptr()), scores:size(2)
  for r, id in ipairs(chosen) do
    local b = bits[(r - 1) * V + id]
    if b == bit.bor(INFINITY, bit.lshift(1, 31)) then
      errors.raise("%s: no token of row %d is allowed: its logits are all -inf, by the options that forbid tokens", who, r)
    elseif bit.band(b, INFINITY) == INFINITY then
      errors.raise("%s: the logits of row %d are not finite", who, r)
    end
  end
  return chosen
end

--- The next token of each row.
---@param logits Tensor  float32 [rows, V] on the CPU, contiguous, may be overwritten
---@param rows { ids: integer[], prompt: integer, sample: integer }[]  sample: number of the row among those of the same
---   text, from 0
---@param o table  options of generate
---@return integer[]
function M.choose(logits, rows, o)
  local V = logits:size(2)
  if o.repetition_penalty ~= 1 then M.penalize_(logits, rows, o.repetition_penalty) end
  M.forbid_(logits, rows, o)
  if not o.do_sample then return M.likeliest(logits, o.who) end
  local held, data = raw.contiguous((o.temperature == 1 and logits or logits / o.temperature):softmax(2))
  local q, out = ffi.cast("float *", data), {}
  for r, row in ipairs(rows) do
    -- A random number follows from the seed, the number of tokens before it, and the number of the sample.
    out[r] = M.draw(q + (r - 1) * V, V, o, lib.ms_hash_share(o.seed, #row.ids, 3 + row.sample))
    if not out[r] then
      M.likeliest(logits, o.who)
      errors.raise("%s: temperature %g is too small: the logits of row %d, divided by it, are not finite", o.who,
        o.temperature, r)
    end
  end
  held:release()
  return out
end

return M
