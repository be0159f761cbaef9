-- SPDX-License-Identifier: MIT
--- Analyses the PTX of kernels: the width of their accesses to global memory, and the bytes they load before they wait.
---
--- The second number is an estimate. A GPU issues a thread's instructions in order; a load does not stop the thread,
--- the first instruction that needs its result does. Within a basic block ptxas moves loads upwards, but not before
--- what their address needs, and not before a store, an atomic or a barrier (except .nc loads). So every instruction
--- has a level: the number of waits before it can be issued. The loads of one level are in flight together; the
--- loads of the last level stay in flight into the next block. The estimate of a kernel is the largest sum over the
--- blocks of its loops that load from global memory, or over all blocks where no loop does. Where blocks meet, the
--- predecessor with more in flight counts, and a loop is analysed twice, so that loads for its next iteration count.
--- Caches, and what ptxas moves between blocks, are left out.
local M = {}

local BYTES = { b8 = 1, u8 = 1, s8 = 1, b16 = 2, u16 = 2, s16 = 2, f16 = 2, bf16 = 2, b32 = 4, u32 = 4, s32 = 4,
  f32 = 4, b64 = 8, u64 = 8, s64 = 8, f64 = 8, b128 = 16 }
--- The classes of data: halves, float32 and doubles. The class of untyped words that are loaded follows from the first
--- instruction that uses them. A vector of untyped words that is only stored may be of any class; a single untyped word
--- is an index or a pointer.
M.CLASSES = { "half", "float32", "float64" }
local OF_TYPE = { b16 = "half", u16 = "half", s16 = "half", f16 = "half", bf16 = "half", f32 = "float32",
  f64 = "float64" }

-- Returns the bytes of an access to global memory, its class (one of M.CLASSES; "any": may be any of them; nil: a
-- single word without a type) and its kind ("load", "store", "async"). An address without a state space is generic; in these kernels it comes from a table in global memory.
local function access(op)
  if op:find "^cp%.async%.c[ag]%.shared" then return nil, "any", "async" end
  local kind = op:match "^ld" and "load" or op:match "^st" and "store"
  if not kind or op:find "%.param" or op:find "%.shared" or op:find "%.local" or op:find "%.const" then return end
  local n, element = tonumber(op:match "%.v(%d)" or 1), op:match "%.(%a+%d+)$"
  if not BYTES[element] then return end
  return n * BYTES[element], OF_TYPE[element] or (n > 1 or element == "b128") and "any" or nil, kind
end

-- Parses one instruction: { op, to = { registers written }, from = { registers read }, … }; nil if the text has none.
local function instruction(text)
  text = text:gsub("^{%s*", ""):gsub(";.*$", "")
  local guard, rest = text:match "^@!?(%%[%w_]+)%s+(.*)$"
  local op, operands = (rest or text):match "^([%w_.:]+)%s*(.*)$"
  if not op then return end
  local i = { op = op, to = {}, from = { guard }, guard = guard, target = op:find "^bra" and operands:match "%$[%w_]+" }
  -- The destination: the first operand, or the registers of the first pair of braces.
  local first = operands:match "^{.-}" or operands:match "^[^,]*"
  if op:find "^st" or op:find "^bra" or op:find "^bar" or op:find "^cp%." or op:find "^call" or op:find "^red" then
    first = ""
  end
  for r in first:gmatch "%%[%a_]+%d+" do i.to[#i.to + 1] = r end
  for r in operands:sub(#first + 1):gmatch "%%[%a_]+%d+" do i.from[#i.from + 1] = r end
  i.bytes, i.class, i.kind = access(op)
  if i.kind == "async" then i.bytes = tonumber(operands:match "%],%s*(%d+)") or 16 end
  i.number = tonumber(operands:match "^%d+")
  -- The class that the untyped operands must have for this instruction.
  if op == "mov.b32" and first:find "^%%f%d" then i.makes = "float32"
  elseif op == "mov.b64" and first:find "^%%fd%d" then i.makes = "float64"
  elseif op == "mov.b32" and first:find "^{%s*%%rs" or op:find "^cvt%.u16" or op:find "^prmt" or op:find "^mma"
    or op:find "^sh[lr]%.[bu]32" and operands:find " 16$" or op == "and.b32" and operands:find "%-65536$"
    or op:find "x2$" then
    i.makes = "half"
  elseif op:find "^mov%.[bu]%d" then i.copies = first:match "%%[%a_]+%d+" end
  return i
end

-- Determines the class of loads of untyped words. If a kernel has typed vectors of halves, its vectors of untyped words
-- are not halves. Returns whether it has typed vectors of halves.
local function classify(blocks)
  local uses, typed = {}, false
  for _, b in ipairs(blocks) do
    for _, i in ipairs(b) do
      typed = typed or i.class == "half" and i.op:find "%.v%d" ~= nil
      for _, r in ipairs(i.from) do
        uses[r] = uses[r] or {}
        table.insert(uses[r], i)
      end
    end
  end
  local function class(r, depth)
    for _, i in ipairs(uses[r] or {}) do
      local found = i.makes and not (typed and i.makes == "half") and i.makes or i.copies and depth < 4 and class(i.copies, depth + 1)
      if found then return found end
    end
  end
  for _, b in ipairs(blocks) do
    for _, i in ipairs(b) do
      if i.kind == "load" and (not i.class or i.class == "any") then
        i.class = class(i.to[1] or "", 0) or i.class
      end
    end
  end
  return typed
end

-- Divides a kernel's text into basic blocks with `next`, the indices of their successors.
local function blocks_of(body)
  local blocks, at, of_label = {}, nil, {}
  local function open()
    at = { n = #blocks + 1, next = {} }
    blocks[at.n] = at
  end
  open()
  for line in body:gmatch "[^\n]+" do
    line = line:match "^%s*(.-)%s*$"
    local label = line:match "^(%$[%w_]+):"
    if label then
      if #at > 0 or at.labelled then open() end
      at.labelled, of_label[label] = true, at
    elseif line:find "^[%a@{]" and line:find ";" then
      local i = instruction(line)
      if i then
        at[#at + 1] = i
        if i.op:find "^bra" or i.op:find "^brx" or i.op == "ret" or i.op == "exit" or i.op:find "^trap" then open() end
      end
    end
  end
  for k, b in ipairs(blocks) do
    local last = b[#b]
    if last and last.target and of_label[last.target] then b.next[1] = of_label[last.target].n end
    local ends = last and not last.guard and (last.target or last.op == "ret" or last.op == "exit")
    if not ends and blocks[k + 1] then b.next[#b.next + 1] = k + 1 end
  end
  return blocks
end

-- Marks the blocks that lie on a cycle: the strongly connected components (Tarjan).
local function mark_loops(blocks)
  local index, low, on, stack, count = {}, {}, {}, {}, 0
  local function visit(v)
    count = count + 1
    index[v], low[v], on[v] = count, count, true
    stack[#stack + 1] = v
    for _, w in ipairs(blocks[v].next) do
      if not index[w] then
        visit(w)
        low[v] = math.min(low[v], low[w])
      elseif on[w] then
        low[v] = math.min(low[v], index[w])
      end
      if w == v then blocks[v].loop = true end
    end
    if low[v] < index[v] then blocks[v].loop = true end
    if low[v] == index[v] then
      local more = stack[#stack] ~= v
      repeat
        local w = table.remove(stack)
        on[w] = false
        if more then blocks[w].loop = true end
      until w == v
    end
  end
  for v = 1, #blocks do if not index[v] then visit(v) end end
end

local ORDERED = { bar = true, barrier = true, atom = true, red = true, call = true, membar = true, fence = true }

-- Analyses one block. pending: the loads in flight at its entry, { register = bytes }. Returns the most bytes in
-- flight, and the loads in flight at its end. For asynchronous copies the number of their group stands for the
-- register.
local function pass(b, pending, counts)
  local level, sum, floor, top = {}, { [0] = 0 }, 0, 0
  local loads, groups = {}, {}
  for r, bytes in pairs(pending) do
    if type(r) == "number" then groups[r] = bytes
    else
      level[r] = 1
      sum[0] = sum[0] + bytes
    end
  end
  local function total_of_groups()
    local n = 0
    for _, bytes in pairs(groups) do n = n + bytes end
    return n
  end
  local async = total_of_groups()
  for _, i in ipairs(b) do
    local at = 0
    for _, r in ipairs(i.from) do at = math.max(at, level[r] or 0) end
    for _, r in ipairs(i.to) do if pending[r] then at = math.max(at, 1) end end     -- written by a pending load
    if i.kind and not i.op:find "%.nc" then at = math.max(at, floor) end
    if i.kind == "async" then
      if counts(i) then groups[0] = (groups[0] or 0) + i.bytes end
      async = math.max(async, total_of_groups())
    elseif i.op:find "^cp%.async%.commit" then
      local older = {}
      for g, bytes in pairs(groups) do older[g + 1] = bytes end
      groups = older
    elseif i.op:find "^cp%.async%.wait" then
      for g in pairs(groups) do if g > (i.number or 0) then groups[g] = nil end end
    elseif i.kind == "store" or ORDERED[i.op:match "^%a+"] then
      floor = math.max(floor, at)
    end
    top = math.max(top, at)
    local load = i.kind == "load"
    if load and counts(i) then
      sum[at] = (sum[at] or 0) + i.bytes
      loads[#loads + 1] = { i.to[1] or i, at, i.bytes }
    end
    for _, r in ipairs(i.to) do level[r] = load and at + 1 or at end
  end
  local most = 0
  for _, bytes in pairs(sum) do most = math.max(most, bytes) end
  local out = groups
  if top == 0 then for r, bytes in pairs(pending) do if type(r) ~= "number" then out[r] = bytes end end end
  for _, l in ipairs(loads) do if l[2] == top then out[l[1]] = l[3] end end
  return most + async, out
end

local function total(pending)
  local sum = 0
  for _, bytes in pairs(pending) do sum = sum + bytes end
  return sum
end

-- Bytes in flight of one thread for accesses of one class.
local function in_flight(blocks, counts, hot)
  local before = {}
  for n = 1, #blocks do before[n] = {} end
  local most = 0
  for _ = 1, 2 do
    for n, b in ipairs(blocks) do
      local bytes, after = pass(b, before[n], counts)
      if hot(b) then most = math.max(most, bytes) end
      for _, to in ipairs(b.next) do
        -- Loads issued before a loop are in flight only in the loop's first iteration.
        if hot(b) and total(after) > total(before[to]) then before[to] = after end
      end
    end
  end
  return most
end

--- Analyses the body of one kernel.
---@param text string  the kernel's text, from M.kernels
---@return table
---   parameters: sizes of the parameters in bytes; threads: number of threads of a block, if the kernel declares it;
---   mma: number of mma instructions; classes: for each of M.CLASSES that the kernel loads or stores, width (bytes of
---   the widest load or, if less, of the widest store) and flight (bytes that a thread has in flight)
function M.analyse(text)
  local blocks = blocks_of(text)
  mark_loops(blocks)
  local typed = classify(blocks)
  local sizes = {}
  for element, rest in text:match "^%(.-\n%)":gmatch "%.param[^,\n]-%.(%a+%d+)%s+([^,\n]*)" do
    sizes[#sizes + 1] = BYTES[element] * tonumber(rest:match "%[(%d+)%]" or 1)
  end
  local threads = text:match "%.maxntid (%d+)" or text:match "%.reqntid (%d+)"
  local result = { mma = 0, classes = {}, threads = tonumber(threads), parameters = sizes }
  for _, b in ipairs(blocks) do
    for _, i in ipairs(b) do
      if i.op:find "^mma%." or i.op:find "^wgmma%.mma" then result.mma = result.mma + 1 end
    end
  end
  -- Whether data is loaded in a loop. If so, code outside of loops is not counted, for example the store of a sum.
  local looped = false
  for _, b in ipairs(blocks) do
    for _, i in ipairs(b) do looped = looped or b.loop and i.class and i.kind ~= "store" and i.kind ~= nil end
  end
  local function hot(b) return b.loop or not looped end
  for _, class in ipairs(M.CLASSES) do
    local function counts(i) return i.class == class or i.class == "any" and not (typed and class == "half") end
    local own = false
    for _, b in ipairs(blocks) do
      for _, i in ipairs(b) do own = own or hot(b) and i.class == class end
    end
    local widest = {}
    for _, b in ipairs(blocks) do
      for _, i in ipairs(b) do
        if i.kind and counts(i) and hot(b) then
          local kind = i.kind == "store" and "store" or "load"
          widest[kind] = math.max(widest[kind] or 0, i.bytes)
        end
      end
    end
    if own and next(widest) then
      result.classes[class] = { width = math.min(widest.load or 16, widest.store or 16),
        flight = in_flight(blocks, counts, hot) }
    end
  end
  return result
end

--- The kernels of a PTX file: { mangled name = text from its parameters to its end }.
function M.kernels(text)
  local out = {}
  for name, head, body in text:gmatch "%.entry ([%w_$]+)(%(.-)\n{\n(.-)\n}\n" do out[name] = head .. "\n" .. body end
  return out
end

return M
