-- SPDX-License-Identifier: MIT
--- What mutants.lua changes: single instructions of the kernels that nvcc compiled.
local M = {}

--- Kinds of mutants: { name, pattern of an instruction, its change }.
local FLIP = { lt = "le", le = "lt", gt = "ge", ge = "gt", eq = "ne", ne = "eq" }
local WIDTH = { ["8"] = 1, ["16"] = 2, ["32"] = 4, ["64"] = 8 }
M.KINDS = {
  { "store", "st%.[gsn][%w.]*%s+[^;]*;", function() return "" end },
  { "barrier", "bar%.[%w.]*sync%s+[^;]*;", function() return "" end },
  { "wait", "cp%.async%.wait_group%s+%d+;", function() return "" end },
  { "predicate", "setp%.%a%a%.%w+", function(text)
    local by = FLIP[text:sub(6, 7)]
    return by and text:sub(1, 5) .. by .. text:sub(8)
  end },
  { "address", "[ls][dt]%.[gs][%w.]*%.%a%d+%s+[^;]*%[%%%a+%d+[^%]]*%][^;]*;", function(text)
    local width = WIDTH[text:match "%.%a(%d+)%s"]
    return (text:gsub("%[(%%%a+%d+)%+?(%-?%d*)%]", function(register, plus)
      return ("[%s+%d]"):format(register, (tonumber(plus) or 0) + width)
    end))
  end },
  { "mask", "[as][nh][dlr]%.[bu]32%s+[^;]*, %d+;", function(text)
    return (text:gsub(", (%d+);$", function(n)
      return (", %d;"):format(tonumber(n) == 0 and 1 or math.floor(tonumber(n) / 2))
    end))
  end },
  { "order", "sub%.[rsf][^;]*;", function(text)
    return (text:gsub("^(%S+%s+%S+,) ([^,]+), ([^;]+);", "%1 %3, %2;"))
  end },
}

--- The instructions of a body that match a kind: { from, to (behind it), old, new, line (of the body) }; new is nil
--- where the change would be none.
function M.candidates(body, kind)
  local out, line, at = {}, 1, 1
  for from, to in body:gmatch("()" .. kind[2] .. "()") do
    local old = body:sub(from, to - 1)
    local new = kind[3](old)
    local _, n = body:sub(at, from - 1):gsub("\n", "")
    line, at = line + n, from
    out[#out + 1] = { from = from, to = to, old = old, new = new ~= old and new or nil, line = line }
  end
  return out
end

--- Which lines of a kernel's body ran: { [line of the body] = boolean }.
---@param c string  the kernel's C, with a mark for each block and for each predicated instruction
---@param first integer  the body's first line in the file
---@param n integer  lines of the body
---@param marks string  a byte for each line of the file
function M.lines_run(c, first, n, marks)
  local blocks, alone, out, runs = {}, {}, {}, false
  for before, at in c:gmatch "([^R])RAN%((%d+)%)" do
    (before == "\n" and blocks or alone)[tonumber(at)] = marks:byte(tonumber(at) + 1) == 1
  end
  for line = 1, n do
    local at = first + line - 1
    if blocks[at] ~= nil then runs = blocks[at] end
    if alone[at] ~= nil then out[line] = alone[at] else out[line] = runs end
  end
  return out
end

--- The lines of a body that may run after position `at`, over all branches.
local function reachable(body, at)
  local labels, seen, todo, out = {}, {}, { at }, {}
  for from, name in body:gmatch "()([%$%w_]+):" do labels[name] = from end
  while #todo > 0 do
    local from = table.remove(todo)
    for start, line in body:sub(from):gmatch "()([^\n]*)\n" do
      local here = from + start - 1
      if here > from and seen[here] then break end
      seen[here], out[#out + 1] = true, line
      local target = line:match "bra[%.uni]*%s+([%$%w_]+);"
      if target then todo[#todo + 1] = labels[target] end
      if (target or line:find "^%s*ret;") and not line:find "@" then break end
    end
  end
  return out
end

-- Changes that no launch shows: { module and kernel, instruction, text that ends before it, text behind it, why }.
local EQUIVALENT = {
  { "", "^setp%.[en][qe]%.s64", "and%.b64%s+[^;]*, %-4294967296;%s*$", "", "of numbers below 2^32 either division is right" },
  -- A half type as float32, for NCCL: what follows the last element is the end of a block of scratch memory.
  { "^optim _Z%d+finish_kernelI%dms_%w+fE", "^setp%.ge%.s64", "", "^[^\n]*\n[^\n]* bra [^\n]*\n%s*st%.global%.u32",
    "nothing lies behind the last element" },
  { "^embedding _Z12index_kernel", "^setp%.le%.s64", "_%d+:%s*$", "^[^;]*;%s*@%%p%d+ bra [^;]*;%s*ld%.param",
    "a line has a position, or nothing is launched" },
  { "^attention _Z%d+attend_kernel", "^setp%.ge%.s64", "setp%.lt%.s64[^;]*, 0;%s*$", "", "a pack begins before its row's end" },
  { "^flash_backward _Z20flash_queries.*ELb0E", "^setp%.gt%.s32", "", "^[^;]*;%s*mov%.pred%s+%%p%d+, %-1;",
    "the loop with masks gives the same where nothing is masked" },
  { "^norm ", "^setp%.gt%.s64", "", "^%s+%S+ %S+ %-1;", "no pack begins before its row" },
  { "^rotary ", "^setp%.gt%.s64", "", "^%s+%S+ %S+ %-1;", "no pack begins before its row" },
  { "^embedding ", "^setp%.gt%.s64", "", "^%s+%S+ %S+ %-1;", "no pack begins before its row" },
  { "^attention _Z22attend_backward", "^setp%.gt%.s64", "", "^%s+%S+ %S+ %-1;", "what is read before a row is not stored" },
  { "^batch_norm _Z9bn_kernel", "^setp%.ge%.s64", "shl%.b64[^;]*, 3;%s*mul[^;]*;%s*mul[^;]*;%s*$", "", "nothing of a pack behind the end is read" },
  { "^norm _Z17norm_parts_kernel", "^setp%.ge%.s64", "setp%.ge%.s64[^;]*;%s*$", "", "nothing of a pack behind the end is read" },
  { "^norm _Z19norm_measure_kernel", "^setp%.ge%.u64", "_%d+:%s*$", "", "a pack begins in its row" },
  { "", "^setp%.lt%.f32", "abs%.f32[^;]*;%s*$", "^%s+%S+ %S+ 0f4086232B;", "exp of 708.4 is right by either formula" },
  { "", "^setp%.lt%.s32", "or%.b32[^;]*, 1072693248;%s*mov%.b64[^;]*;%s*$", "^%s+%S+ %S+ 1073127583;",
    "log is right at sqrt(2) from either side" },
  { "^product _Z14product_kernel", "^shr%.u32", "add%.s32%s+%%r%d+, %%r%d+, %d+;%s*shr%.s32[^;]*, 31;%s*$", "",
    "a thread's number is not negative" },
  { "^norm _Z16norm_join_kernel", "^setp%.ge%.s64", "or%.pred[^;]*;%s*$", "", "a segment that is not there adds nothing" },
  { "^norm ", "^sub%.s64", "sub%.s64[^;]*;%s*$", "^%s*and%.b64[^;]*, 2048;", "a round behind the end adds nothing" },
  { "^random _Z%d+draw_kernel", "^and%.b32[^;]*, 255;", "shr%.u32[^;]*, 23;%s*$", "", "a uniform number is below 2" },
  { "", "^setp%.lt%.f32", "", "^%s+%S+ %S+ 0f3F3504F3;", "log has the same bits at sqrt(1/2) from either side" },
  { "", "^setp%.gt%.f64", "", "^%s+%S+ %S+ 0d8000000000000000;%s*mov%.f64[^;]*0d7FF0000000000000;",
    "exp of 0 is computed elsewhere" },
  { "", "^setp%.gt%.s32", "add%.s64[^;]*, %-8;%s*add%.s32[^;]*, %-1;%s*$", "^%s+%S+ %S+ 1;",
    "the quotient by the first dimension is 0" },
  { "", "^setp%.l[te]%.u32", "shl%.b32[^;]*, 1;%s*$", "^%s+%S+ %S+ %d*[13579];", "an even number is compared with an odd one" },
  { "", "^setp%.lt%.s64", "add%.s64[^;]*, 2048;%s*$", "", "a round behind the end adds nothing" },
  { "", "^setp%.lt%.f", "", "^%s+%S+ %S+ 0[fd]0+;%s*neg%.f[^;]*;%s*selp%.f[^;]*;%s*add%.rn", "the sum of a number and -0 is that of 0" },
  { "^norm _Z16norm_rows_kernel", "^setp%.gt%.s64", "add%.s64[^;]*, [1-7];%s*$", "", "behind a row's end the gradient is 0" },
  { "^norm _Z16norm_dots_kernel", "^setp%.l[te]%.s64", "and%.b32[^;]*, 2040;%s*cvt[^;]*;%s*$", "", "a round behind the end adds nothing" },
  { "^reduce _Z%d+scan_", "^setp%.ge%.u64", "add%.s64[^;]*, %-%d;%s*$", "", "backwards no element is behind the line" },
  { "^product _Z11gelu_kernel", "^setp%.[en][qe]%.s64", "and%.b64[^;]*, 15;%s*$", "", "all its memory begins at 256 bytes" },
  { "^optim _Z13choose_kernel", "^setp%.l[te]%.s32", "add%.s64[^;]*, %-1;%s*$", "", "every number of steps has its factors" },
  { "^reduce _Z11join_kernelIl", "^setp%.lt%.s64", "", "^[^;]*;%s*ld%.global%.u64", "what lies behind the last part is not read" },
}

--- Why a mutant (mutants.lua) computes the same; nil if it may differ.
function M.changes_nothing(m)
  if m.kind == "barrier" and m.old:find "^bar%.sync" then
    -- Threads of a block exchange by shared memory alone: racecheck sees no conflict in global memory.
    for _, line in ipairs(reachable(m.body .. "\n", #m.body - #m.after + 1)) do
      if line:find "%.shared" or line:find "call" then return end
    end
    return "no shared memory is accessed behind it"
  end
  local x, y = m.after:match "^%s+%S+, (%S+), (%S+);"
  if m.kind == "predicate" and x and m.old:find "%.[lg][te]%." then
    local of = {}                                    -- what a register is taken from
    for to, p, q in m.after:sub(1, 300):gmatch "selp%.%w+%s+(%S+), (%S+), (%S+), " do
      if (p == x and q == y) or (p == y and q == x) or p == y and of[q] == x then
        return "of two equal numbers either is taken"
      end
      of[to] = q
    end
  end
  local before, number = m.before:sub(-400), m.after:match "^%s+%S+, %%(rd%d+), "
  if number and (m.old == "setp.le.s64" or m.old == "setp.gt.s64")
    and before:find("add%.s64%s+%%" .. number .. ", %%rd%d+, 8;") and m.after:sub(1, 600):find "and%.b64[^;]*, 15;" then
    return "a pack that ends with its row may be read one by one"
  end
  if m.old == "setp.lt.s64" and y == "0" and m.before:find("add%.s64%s+%%rd%d+, %" .. x .. ", 8;") and m.after:find "^[^\n]*\n[^\n]*\n%s*or%.pred" then
    return "a pack that begins with its row may be read one by one"
  end
  -- Not so those of unfolded images, and of lanes past a row's end.
  if number and m.old == "setp.ge.u64" and m.before:find("add%.s64%s+%%rd%d+, %%" .. number .. ", 8;")
    and m.kernel.module ~= "columns" and not m.kernel.symbol:find "norm_rows" then
    return "a pack begins in its row"
  end
  -- A part ends at the number of all, and nothing is launched, or the thread has returned, where it would begin there.
  if x and y:find "^%%" and m.old:find "^setp%.[lg][te]%.s64" then
    local sum = before:match(("min%%.s64%%s+%%%s, (%%S+), "):format(y))
    if sum and before:find(("add%%.s64%%s+%%%s, %%%s, "):format(sum, x)) then return "no part is empty" end
  end
  local difference = m.kind == "order" and m.new:match "^sub%.rn%.f%d+%s+(%%fd?%d+),"
  local square = difference and m.after:match(("^%%s*mul%%.rn%%.f%%d+%%s+%%S+, %%%s, %%%s;()"):format(difference, difference))
  if square and not m.after:find("%" .. difference .. "%f[%D]", square) then return "the difference is squared" end
  for _, e in ipairs(EQUIVALENT) do
    local kernel = m.kernel.module .. " " .. m.kernel.symbol
    if kernel:find(e[1]) and m.old:find(e[2]) and before:find(e[3]) and m.after:find(e[4]) then return e[5] end
  end
end

return M
