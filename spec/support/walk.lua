-- SPDX-License-Identifier: MIT
--- A seeded walk over public functions of tensors: random shapes (0-dim, empty, broadcast), layouts, dtypes and values
--- (NaNs with payload bits, infinities, zeros of both signs, tiny and huge numbers), compared with plain loops over
--- Lua's numbers (walk_elements.lua, walk_lists.lua). Runs in a process of its own, which a fault may crash.
local ffi = require "ffi"
local ms = require "moonshard"

local walk = {}

-- Of each floating-point dtype: the distance of 1 to the next number, the largest and the smallest normal number, and
-- how NaNs are poked into memory.
local FLOATS = {
  float64 = { eps = 2 ^ -52, most = 1.7976931348623157e308, least = 2 ^ -1022, bits = "uint64_t *",
    nans = { 0xffffffffffffffffULL, 0x7ff8000000000001ULL, 0xfff8000000000000ULL, 0xfffe123456789abcULL } },
  float32 = { eps = 2 ^ -23, most = 3.4028234663852886e38, least = 2 ^ -126, bits = "uint32_t *",
    nans = { 0xffffffff, 0x7fc00001, 0xffc00000, 0xffd63412 } },
  bfloat16 = { eps = 2 ^ -7, most = 3.3895313892515355e38, least = 2 ^ -126, bits = "uint16_t *",
    nans = { 0xffff, 0x7fc1, 0xffc0, 0xffd6 } },
  float16 = { eps = 2 ^ -10, most = 65504, least = 2 ^ -14, bits = "uint16_t *",
    nans = { 0xffff, 0x7e01, 0xfe00, 0xfed6 } },
}
walk.FLOATS = FLOATS

-- ---- random choices -------------------------------------------------------------------------------

local seed
-- Park and Miller's generator, independent of the engine's.
function walk.uniform()
  seed = seed * 16807 % 2147483647
  return (seed - 1) / 2147483646
end
function walk.below(n) return math.floor(walk.uniform() * n) end
function walk.pick(list) return list[1 + walk.below(#list)] end
local uniform, below, pick = walk.uniform, walk.below, walk.pick

local SPECIAL = { 0 / 0, math.huge, -math.huge, 0, -1 / math.huge, 1, -1, 0.5, -0.5, 1e-4, -1e-6, 1e5, -3e4, 3e9,
  -1e30 }

-- A number: in 2 of 5 cases a special one (never with `tame`), else one of ordinary size or a whole number.
local function number(tame)
  local kind = uniform()
  if kind < 0.4 and not tame then return pick(SPECIAL) end
  if kind < 0.6 then return below(11) - 5 end
  return math.sqrt(-2 * math.log(1 - uniform())) * math.cos(2 * math.pi * uniform()) * pick { 0.1, 1, 1, 10 }
end

local WHOLES = { int8 = 7, int16 = 15, int32 = 31, int64 = 53, uint8 = 8 }
-- A whole number that the dtype holds, small or at the ends of its range.
local function whole(dtype)
  local top = 2 ^ WHOLES[dtype]
  local v = uniform() < 0.2 and pick { top - 1, dtype == "uint8" and 0 or -top + 1, top - 2 } or below(11) - 5
  return dtype == "uint8" and math.abs(v) or v
end

--- Sizes: 0 to 3 dimensions, now and then an empty one.
function walk.shape()
  local sizes = {}
  for d = 1, pick { 0, 1, 1, 2, 2, 3 } do sizes[d] = uniform() < 0.06 and 0 or 1 + below(5) end
  return sizes
end

--- A shape that broadcasts with `sizes`: some leading dimensions are left out, some sizes are 1.
function walk.narrower(sizes)
  local out = {}
  for d = 1 + (uniform() < 0.3 and below(#sizes + 1) or 0), #sizes do
    out[#out + 1] = uniform() < 0.25 and 1 or sizes[d]
  end
  return out
end

function walk.numel(sizes)
  local n = 1
  for _, size in ipairs(sizes) do n = n * size end
  return n
end

-- ---- broadcasting ---------------------------------------------------------------------------------

--- Visits the elements of a result of shape `sizes` with the positions in operands of the given shapes, from 1.
function walk.broadcast(sizes, shapes, visit)
  local n, index = walk.numel(sizes), {}
  for d = 1, #sizes do index[d] = 0 end
  for k = 1, n do
    local at = {}
    for o, own in ipairs(shapes) do
      local place, lead = 0, #sizes - #own
      for d = 1, #own do place = place * own[d] + (own[d] == 1 and 0 or index[lead + d]) end
      at[o] = place + 1
    end
    visit(k, unpack(at))
    for d = #sizes, 1, -1 do
      index[d] = index[d] + 1
      if index[d] < sizes[d] then break end
      index[d] = 0
    end
  end
end

--- Two operands' shapes, and that of the result.
function walk.two_shapes()
  local sizes = walk.shape()
  local a, b = sizes, walk.narrower(sizes)
  if uniform() < 0.5 then a, b = b, a end
  return sizes, a, b
end

-- ---- tensors ----------------------------------------------------------------------------------------

--- The elements as a flat list, in row-major order.
function walk.flat(t, list)
  list = list or {}
  if ms.is_tensor(t) then t = t:tolist() end
  if type(t) ~= "table" then list[#list + 1] = t else for _, v in ipairs(t) do walk.flat(v, list) end end
  return list
end

local function value(dtype, tame)
  if dtype == "bool" then return uniform() < 0.5 end
  if FLOATS[dtype] then return number(tame) end
  return whole(dtype)
end

--- A tensor of random values in a random layout, and its values as numbers (as the dtype rounds them).
---@param tame? boolean  no special values
function walk.tensor(dtype, sizes, tame)
  local back, order, layout = {}, {}, pick { "rows", "rows", "columns", "apart" }
  for d = 1, #sizes do
    back[d] = layout == "columns" and sizes[#sizes + 1 - d] or sizes[d]
    order[d] = #sizes + 1 - d
  end
  if layout == "apart" then back[#back + 1] = 2 end
  local values = {}
  for k = 1, walk.numel(back) do values[k] = value(dtype, tame) end
  local t = ms.tensor(values, { dtype = dtype })
  local float = FLOATS[dtype]
  if float and #values > 0 then
    local bits = ffi.cast(float.bits, t:data_ptr())
    for k, v in ipairs(values) do
      if v ~= v then bits[k - 1] = pick(float.nans) end
    end
  end
  t = t:reshape(back)
  if layout == "columns" and #sizes > 1 then t = t:permute(order) end
  if layout == "apart" then t = t:select(#back, 1 + below(2)) end
  return t, walk.flat(t)
end

-- ---- comparison ---------------------------------------------------------------------------------------

walk.ANY = {}           -- as what a loop gives: the element is not compared

--- A tensor as one line.
function walk.text(t) return (tostring(t):gsub("\n", " ")) end

local function show(v) return type(v) == "number" and ("%.9g"):format(v) or tostring(v) end

--- Whether `got`, an element of this dtype, is `want` after rounding. near: how many units in the last place it may be
--- off; off: the same in units of the last place of `off`, for results of cancellation (default: 0).
local function right(got, want, dtype, near, off)
  if want == walk.ANY then return true end
  if type(want) == "boolean" or type(got) == "boolean" then return got == want end
  if want ~= want or got ~= got then return want ~= want and got ~= got end
  local float = FLOATS[dtype]
  if got == want or not float then return got == want end
  if math.abs(want) == math.huge then return false end
  if math.abs(got) == math.huge then return got * want > 0 and math.abs(want) >= float.most * (1 - near * float.eps) end
  return math.abs(got - want) <= near * float.eps * (math.abs(want) + off) + float.least * (float.eps + 0x1p-20)
end

--- Compares elements; returns nil, or what differs.
function walk.differs(got, want, dtype, near, off)
  if #got ~= #want then return ("%d elements, the loop has %d"):format(#got, #want) end
  for k = 1, #want do
    if not right(got[k], want[k], dtype, near or 0, off or 0) then
      return ("element %d is %s, the loop gives %s"):format(k, show(got[k]), show(want[k]))
    end
  end
end

-- ---- the walk ------------------------------------------------------------------------------------------

--- Runs `count` steps from a seed: each calls one of `cases`, a list of { name, step }, where step() returns nil, or
--- what differs and what it did. Prints the differences, at most one a name, and "walked".
function walk.run(cases, first, count)
  local told = {}
  for k = first, first + count - 1 do
    for at, case in ipairs(cases) do
      seed = (k * 7919 + at * 104729) % 2147483646 + 1
      for _ = 1, 3 do uniform() end
      ms.scope(function()
        local ok, differs, call = pcall(case[2])
        if not ok then differs, call = "error: " .. tostring(differs), "" end
        if differs and not told[case[1]] then
          told[case[1]] = true
          print(("%s, seed %d: %s; %s"):format(case[1], k, differs, call))
        end
      end)
    end
  end
  print "walked"
end

return walk
