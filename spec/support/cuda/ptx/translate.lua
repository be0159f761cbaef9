-- SPDX-License-Identifier: MIT
--- Translates the kernels of a PTX file to C: one function a kernel, its registers as locals, an instruction a
--- statement. runtime.h holds what the C needs; forms.lua the instructions that compute registers from registers.
local FORMS = require "forms".FORMS
local M = {}

local WIDTH = { b8 = 1, u8 = 1, s8 = 1, b16 = 2, u16 = 2, s16 = 2, b32 = 4, u32 = 4, s32 = 4, f32 = 4, b64 = 8,
  u64 = 8, s64 = 8, f64 = 8 }
local SPECIAL = { ["%tid.x"] = "t->tid",
  ["%ctaid.x"] = "t->ctaid", ["%ntid.x"] = "t->ntid", ["%nctaid.x"] = "t->nctaid",
  ["%laneid"] = "(t->tid % 32)" }

-- A body in translation: { file, line, scopes = { { name = type } }, symbols = { name = C expression of its address },
-- out = { lines }, used = { names of functions and variables of the file } }.
local function stop(b, what, ...)
  error(("%s:%d: %s"):format(b.file, b.line, what:format(...)), 0)
end

local function c_name(name) return (name:gsub("^%%", "r_"):gsub("[%$%%]", "_")) end

local function type_of(b, name)
  for k = #b.scopes, 1, -1 do
    local found = b.scopes[k][name] or b.scopes[k][name:match "^(.-)%d+$" or name]
    if found then return found end
  end
end

local function is_float(t) return t == "f32" or t == "f64" end

-- The value of an operand, as an expression of type t.
local function value(b, text, t)
  local of = type_of(b, text)
  if of then
    local name = c_name(text)
    if of == t then return name end
    if is_float(of) and not is_float(t) then return ("(%s)bits_%s(%s)"):format(t, of, name) end
    if is_float(t) and not is_float(of) then return ("as_%s(%s)"):format(t, name) end
    return ("(%s)%s"):format(t, name)
  end
  local bits = text:match "^0[fF](%x+)$"
  if bits then return t == "f32" and ("as_f32(0x%su)"):format(bits) or ("(%s)0x%su"):format(t, bits) end
  bits = text:match "^0[dD](%x+)$"
  if bits then return t == "f64" and ("as_f64(0x%sull)"):format(bits) or ("(%s)0x%sull"):format(t, bits) end
  if text:match "^%-?%d+$" or text:match "^0x%x+$" then
    if text == "-9223372036854775808" then return "INT64_MIN" end
    return ("(%s)%s%s"):format(t, text, text:find "^%-" and "ll" or "ull")
  end
  if SPECIAL[text] then return ("(%s)%s"):format(t, SPECIAL[text]) end
  local name, plus = text:match "^([%a_%$][%w_%$]*)%+?(%-?%d*)$"
  local address = name and b.symbols[name]
  if not address and name and b.globals[name] then
    b.used[name] = true
    address = "(u64)" .. c_name(name)
  end
  if address then return ("(%s)(%s + %s)"):format(t, address, plus == "" and "0" or plus) end
  stop(b, "operand '%s' is unknown", text)
end

-- Assigns an expression of type t to a register; "_" discards it.
local function assign(b, text, t, expression)
  if text == "_" then return ("(void)(%s);"):format(expression) end
  local of = type_of(b, text)
  if not of then stop(b, "register '%s' is unknown", text) end
  if is_float(of) and not is_float(t) then expression = ("as_%s(%s)"):format(of, expression)
  elseif is_float(t) and not is_float(of) then expression = ("bits_%s(%s)"):format(t, expression)
  elseif of ~= t then expression = ("(%s)(%s)"):format(t, expression) end
  return ("%s = %s;"):format(c_name(text), expression)
end

-- Splits operands at commas outside of brackets.
local function split(text)
  local out, depth, from = {}, 0, 1
  for at, c in text:gmatch "()([%[%]{}(),])" do
    if c == "[" or c == "{" or c == "(" then depth = depth + 1
    elseif c ~= "," then depth = depth - 1
    elseif depth == 0 then
      out[#out + 1], from = text:sub(from, at - 1):match "^%s*(.-)%s*$", at + 1
    end
  end
  out[#out + 1] = text:sub(from):match "^%s*(.-)%s*$"
  if out[1] == "" then out = {} end
  return out
end

local function vector(text)
  local inner = text:match "^{(.*)}$"
  return inner and split(inner) or { text }
end

-- An address "[x+8]", as an expression of type u64.
local function address(b, text)
  local base, plus = text:match "^%[%s*([%w_%$%%%.]+)%s*%+?%s*(%-?%d*)%s*%]$"
  if not base then stop(b, "address '%s' is unknown", text) end
  if base:find "^%d" then return base .. "ull" end
  local at = value(b, base, type_of(b, base) == "b32" and "u32" or "u64")
  return plus == "" and at or ("(%s + %s)"):format(at, plus)
end

-- ---- instructions other than those of forms.lua: { opcode pattern = function(b, operands, captures) } ----

local OTHERS = {}

local SPACES = { global = "global", shared = "shared", ["local"] = "local", param = "param" }
local function access(b, op, operands)
  local write = op:find "^st" ~= nil
  local space, n, t = "generic", 1, op:match "%.(%a%d+)$"
  for part in op:match "^%a+%.(.*)%.%a%d+$" and (op:match "^%a+%.(.*)%.%a%d+$"):gmatch "[^.]+" or function() end do
    if SPACES[part] then space = part
    elseif part:find "^v[24]$" then n = tonumber(part:sub(2))
    elseif not ((" nc wb ca cg cs "):find(" " .. part .. " ", 1, true) or part == "volatile" and write) then
      stop(b, "instruction '%s' is unknown", op)
    end
  end
  local where, data = operands[write and 1 or 2], vector(operands[write and 2 or 1])
  if #data ~= n or not WIDTH[t] then stop(b, "instruction '%s' is unknown", op) end
  -- A volatile store is a relaxed operation of the memory model: it races with others no more than atomics do.
  local kind = space == "local" and (b.depot or stop(b, "local memory is not declared")) or
    write and (op:find "%.volatile" and 3 or 1) or 0
  local out = { ("void *at = %s_at(t, %s, %d, %s, %d);"):format(space, address(b, where), n * WIDTH[t], kind, b.line) }
  for k, d in ipairs(data) do
    out[#out + 1] = write and ("STORE(%s, at, %d, %s);"):format(t, k - 1, value(b, d, t)) or nil
  end
  if not write then
    -- The registers may be those of the address: all are loaded first.
    for k = 1, n do out[#out + 1] = ("%s v%d = LOAD(%s, at, %d);"):format(t, k, t, k - 1) end
    for k, d in ipairs(data) do out[#out + 1] = assign(b, d, t, "v" .. k) end
  end
  return "{ " .. table.concat(out, " ") .. " }"
end
OTHERS["^ld%."] = access
OTHERS["^st%."] = access

-- Packs or unpacks a vector of registers.
local function move(b, op, operands)
  local t = op:match "^mov%.(b%d+)$"
  local to, from = vector(operands[1]), vector(operands[2])
  if not t or #to * #from ~= 2 then stop(b, "instruction '%s' is unknown", op) end
  local half = "b" .. WIDTH[t] * 4
  if #from == 2 then
    return assign(b, to[1], t, ("%s | (%s)%s << %d"):format(value(b, from[1], half), t, value(b, from[2], half), WIDTH[t] * 4))
  end
  return ("{ %s v = %s; %s %s }"):format(t, value(b, from[1], t), assign(b, to[1], half, ("(%s)v"):format(half)),
    assign(b, to[2], half, ("(%s)(v >> %d)"):format(half, WIDTH[t] * 4)))
end

local function label(name) return "L" .. name:gsub("%W", "_") end
OTHERS["^bra$"] = function(_, _, operands) return ("goto %s;"):format(label(operands[1])) end
OTHERS["^bra%.uni$"] = OTHERS["^bra$"]
OTHERS["^ret$"] = function() return "return;" end
OTHERS["^trap$"] = function() return "__builtin_trap();" end
OTHERS["^bar%.sync$"] = function(b, op, operands)
  if operands[1] ~= "0" or operands[2] then stop(b, "%s: only barrier 0 of all threads is known", op) end
  return ("t->machine->barrier(%d);"):format(b.line)
end
OTHERS["^bar%.warp%.sync$"] = function(b, op, operands)
  if operands[1] ~= "-1" then stop(b, "%s: only the barrier of all lanes is known", op) end
  return ("t->machine->warp_barrier(%s, %d);"):format(value(b, operands[1], "b32"), b.line)
end
OTHERS["^shfl%.sync%.%a+%.b32$"] = function(b, op, operands)
  local to, valid = operands[1]:match "^([^|]+)|?(.*)$"
  local call = ("shuffle(t, '%s', &valid, %s, %s, %s, %s, %d)"):format(op:match "sync%.(%a)", value(b, operands[2], "b32"),
    value(b, operands[3], "b32"), value(b, operands[4], "b32"), value(b, operands[5], "b32"), b.line)
  return ("{ pred valid; %s %s }"):format(assign(b, to, "b32", call),
    valid ~= "" and assign(b, valid, "pred", "valid") or "")
end
local function list(b, text, t)
  local out = {}
  for k, v in ipairs(vector(text)) do out[k] = value(b, v, t) end
  return table.concat(out, ", ")
end
OTHERS["^mma%.sync%.aligned%.m16n8k16%.row%.col%.f32%.b?f16%.b?f16%.f32$"] = function(b, op, operands)
  local out = { ("f32 d[4] = { %s }; const u32 x[4] = { %s }, y[2] = { %s };"):format(list(b, operands[4], "f32"),
    list(b, operands[2], "b32"), list(b, operands[3], "b32")),
    ("t->machine->mma(%d, d, x, y, %d);"):format(op:find "bf16" and 1 or 0, b.line) }
  for k, d in ipairs(vector(operands[1])) do out[#out + 1] = assign(b, d, "f32", ("d[%d]"):format(k - 1)) end
  return "{ " .. table.concat(out, " ") .. " }"
end
OTHERS["^ldmatrix%.sync%.aligned%.m8n8%.x[124]%.?%a*%.shared%.b16$"] = function(b, op, operands)
  local n, to = op:match "%.x(%d)", vector(operands[1])
  if #to ~= tonumber(n) then stop(b, "instruction '%s' is unknown", op) end
  local out = { ("u32 m[4]; void *at = shared_at(t, %s, 16, 0, %d); t->machine->load_matrices(%s, %d, m, at, %d);"):format(
    address(b, operands[2]), b.line, n, op:find "%.trans%." and 1 or 0, b.line) }
  for k, d in ipairs(to) do out[#out + 1] = assign(b, d, "b32", ("m[%d]"):format(k - 1)) end
  return "{ " .. table.concat(out, " ") .. " }"
end
OTHERS["^cp%.async%.c[ag]%.shared%.global$"] = function(b, _, operands)
  local read = operands[4] and value(b, operands[4], "s32") or operands[3]
  return ("t->machine->copy(shared_at(t, %s, %s, 1, %d), global_at(t, %s, %s, 0, %d), %s, %s, %d);"):format(
    address(b, operands[1]), operands[3], b.line, address(b, operands[2]), read, b.line, operands[3], read, b.line)
end
OTHERS["^cp%.async%.commit_group$"] = function() return "t->machine->commit();" end
OTHERS["^cp%.async%.wait_group$"] = function(_, _, operands) return ("t->machine->wait(%s);"):format(operands[1]) end
OTHERS["^atom%.global%.cas%.b32$"] = function(b, _, operands)
  return ("{ u32 was = %s; __atomic_compare_exchange_n((u32 *)global_at(t, %s, 4, 2, %d), &was, %s, 0, 5, 5); %s }"):format(
    value(b, operands[3], "b32"), address(b, operands[2]), b.line, value(b, operands[4], "b32"),
    assign(b, operands[1], "b32", "was"))
end
OTHERS["^atom%.global%.and%.b32$"] = function(b, _, operands)
  return assign(b, operands[1], "b32", ("__atomic_fetch_and((u32 *)global_at(t, %s, 4, 2, %d), %s, 5)"):format(
    address(b, operands[2]), b.line, value(b, operands[3], "b32")))
end
OTHERS["^call%.uni$"] = function(b, _, operands)
  local to, name, from = operands[1]:match "^%(%s*(.-)%s*%)$", operands[2], operands[3]
  if not to or not b.functions[name] then stop(b, "call of '%s' is unknown", tostring(name)) end
  b.called[name] = true
  local arguments = { "t", c_name(to) }
  for _, a in ipairs(split(from:match "^%(%s*(.-)%s*%)$")) do arguments[#arguments + 1] = c_name(a) end
  return ("%s(%s);"):format(c_name(name), table.concat(arguments, ", "))
end

-- The patterns by the first word of an opcode.
local BY_WORD = {}
for pattern, f in pairs(OTHERS) do
  local word = pattern:match "%a+"
  BY_WORD[word] = BY_WORD[word] or {}
  table.insert(BY_WORD[word], { pattern, f })
end

local function instruction(b, text)
  local guard, rest = text:match "^@(!?%%[%w_]+)%s+(.*)$"
  local op, tail = (rest or text):match "^([%w_.:]+)%s*(.*)$"
  if not op then stop(b, "'%s' is no instruction", text) end
  local operands, form = split(tail), FORMS[op]
  local c
  b.opcodes[op] = (b.opcodes[op] or 0) + 1
  if op:find "^mov%.b" and tail:find "{" then c = move(b, op, operands)
  elseif form then
    local with = {}
    for k, t in ipairs(form.from) do
      if not operands[k + 1] then stop(b, "'%s' has too few operands", text) end
      with[("abcd"):sub(k, k)] = "(" .. value(b, operands[k + 1], t) .. ")"
    end
    if #operands ~= #form.from + 1 then stop(b, "'%s' has too many operands", text) end
    local of = form.c:gsub("%f[%w_][abcd]%f[^%w_]", with)
    -- A division of 64-bit numbers whose upper halves are 0 is one of 32 bits; WIDE takes the other branch.
    if operands[3] == "-4294967296" and op == "and.b64" then b.upper = operands[1]
    elseif op == "setp.eq.s64" and operands[2] == b.upper and operands[3] == "0" then
      of, b.upper = ("%s && !WIDE(%d)"):format(of, b.line), nil
    end
    c = assign(b, operands[1], form.to, of)
    b.carries = b.carries or form.c:find "cc" ~= nil
  else
    for _, p in ipairs(BY_WORD[op:match "^%a+"] or {}) do
      if op:find(p[1]) then c = p[2](b, op, operands) break end
    end
    if not c then stop(b, "instruction '%s' is unknown", op) end
  end
  if not guard then return c end
  local jumps = op:find "^bra" ~= nil
  b.block = jumps
  if not jumps then c = ("{ RAN(%d); %s }"):format(b.line, c) end
  return ("if (%s%s) %s"):format(guard:sub(1, 1) == "!" and "!" or "", c_name(guard:match "%%.*"), c)
end

-- ---- declarations ----

-- What a register holds before it is written: no number that a kernel would begin a sum with.
local function unwritten(t)
  if t == "pred" then return 1 end
  return t:find "^f" and '__builtin_nan("")' or "(" .. t:gsub("^[us](%d)", "b%1") .. ")0xbadbadbadbadbadb"
end

local function declare(b, text)
  local t, names = text:match "^%.reg%s+%.(%a+%d*)%s+(.*)$"
  if t then
    for name in names:gmatch "[^,%s]+" do
      local prefix, n = name:match "^(.-)<(%d+)>$"
      b.scopes[#b.scopes][prefix or name] = t:gsub("^[us](%d)", "b%1")
      local registers = {}
      if n then
        for k = 0, tonumber(n) - 1 do
          if b.occurs[prefix .. k] then registers[#registers + 1] = c_name(prefix .. k) .. " = " .. unwritten(t) end
        end
      else
        registers[1] = c_name(name) .. " = " .. unwritten(t)
      end
      if registers[1] then b.out[#b.out + 1] = ("%s %s;"):format((t:gsub("^[us](%d)", "b%1")), table.concat(registers, ", ")) end
    end
    return
  end
  local space, rest = text:match "^%.(%a+)%s+(.*)$"
  if space == "pragma" then return end
  local align = tonumber(rest:match "%.align%s+(%d+)" or 8)
  local name, count = rest:match "([%w_%$]+)%[(%d+)%]$"
  if not name then name = rest:match "([%w_%$]+)$" end
  local element = rest:match "%.([bsuf]%d+)%s+[%w_%$]+%[?%d*%]?$"
  if not element then stop(b, "declaration '%s' is unknown", text) end
  local bytes = WIDTH[element] * tonumber(count or 1)
  if space == "shared" then
    b.shared = math.ceil(b.shared / align) * align
    b.symbols[name] = ("(u64)%d"):format(b.shared)
    b.shared = b.shared + bytes
  elseif space == "local" or space == "param" then
    b.out[#b.out + 1] = ("_Alignas(%d) char %s[%d];"):format(align, c_name(name), bytes)
    b.symbols[name] = "(u64)" .. c_name(name)
    if space == "local" then b.depot = ("%s, %d"):format(c_name(name), bytes) end
  else
    stop(b, "declaration '%s' is unknown", text)
  end
end

-- Translates the text between the braces of a kernel or function into b.out. Lines are counted from b.line.
local function translate_body(b, body)
  b.occurs, b.block = {}, true                                          -- occurs: the registers that the body mentions
  for name in body:gmatch "%%%a+%d+" do b.occurs[name] = true end
  local at, find = 1, string.find
  local line = b.line
  while true do
    local _, to = find(body, "^[ \t]*", at)
    at = to + 1
    local c = body:sub(at, at)
    if c == "" then break end
    if c == "\n" then line, at = line + 1, at + 1
    elseif c == "{" then
      b.out[#b.out + 1], b.scopes[#b.scopes + 1], at = "{", {}, at + 1
    elseif c == "}" then
      b.out[#b.out + 1], b.scopes[#b.scopes], at = "}", nil, at + 1
    else
      b.line = line
      local _, last, name = find(body, "^([%$%w_]+):", at)
      if name then
        b.out[#b.out + 1], at, b.block = label(name) .. ":;", last + 1, true
      else
        local stopped = find(body, ";", at, true) or stop(b, "no ';' ends the instruction")
        local text = body:sub(at, stopped - 1)
        local _, newlines = text:gsub("\n", " ")
        line, at = line + newlines, stopped + 1
        text = text:gsub("%s+", " "):gsub(" $", "")
        if text:sub(1, 1) == "." then declare(b, text)
        else
          -- A line marks that its block ran: up to the next label or branch.
          if b.block then b.out[#b.out + 1], b.block = ("RAN(%d);"):format(line), false end
          b.out[#b.out + 1] = instruction(b, text)
        end
      end
    end
  end
end

-- Parameters "(.param .u64 a, .param .align 8 .b8 b[16])": { { name, bytes } }.
local function parameters(text)
  local out = {}
  for piece in (text or ""):gmatch "[^,]+" do
    local element, name, count = piece:match "%.([bsuf]%d+)%s+([%w_%$]+)%[?(%d*)%]?%s*$"
    if element then out[#out + 1] = { name, WIDTH[element] * (tonumber(count) or 1) } end
  end
  return out
end

local function new_body(module, line, params)
  local b = { file = module.file, line = line, scopes = { {} }, symbols = {}, globals = module.globals,
    functions = module.functions, used = {}, called = {}, out = {}, shared = 0, opcodes = module.opcodes }
  for k, p in ipairs(params) do b.symbols[p[1]] = ("(u64)%s"):format(params.kernel and ("arguments[%d]"):format(k - 1) or c_name(p[1])) end
  return b
end

local function finish(b, head)
  local cc = b.carries and "u32 cc = 0;\n" or ""
  return ("%s\n{\n%s%s\n}\n"):format(head, cc, table.concat(b.out, "\n"))
end

--- Translates a PTX file.
---@param text string  the PTX
---@param file string  its name, for errors
---@return table[] kernels  each with name, sizes (bytes of each parameter), shared (bytes of static shared memory),
---   threads (the most of a block, or nil) and c
---@return table opcodes  how often each opcode occurs
function M.translate(text, file)
  text = text:gsub("//[^\n]*", "")
  local module = { file = file, globals = {}, functions = {}, opcodes = {} }
  local _, lines = text:gsub("\n", "")
  for align, element, name, count, values in
    text:gmatch "\n%.global%s+%.align%s+(%d+)%s+%.(%a%d+)%s+([%w_%$]+)%[?(%d*)%]?%s*=?%s*{?([^;}]*)}?;" do
    module.globals[name] = ("static _Alignas(%s) const %s %s[%s] = { %s };\n"):format(align, element, c_name(name),
      count == "" and 1 or count, values:gsub("%d+", "%0u"))
  end
  local dynamic = text:match "\n%.extern%s+%.shared%s+%.align%s+%d+%s+%.b8%s+([%w_%$]+)%[%];"
  local line_at, counted = 1, 1
  local function line_of(at)
    local _, n = text:sub(counted, at - 1):gsub("\n", "")
    line_at, counted = line_at + n, at
    return line_at
  end
  local entries = {}
  for at, returned, name, params, start, body in
    text:gmatch "\n()%.func%s+(%b())%s+([%w_%$]+)%s*(%b())%s*\n{()(.-)\n}" do
    module.functions[name] = { at = at, returned = parameters(returned:sub(2, -2)), params = parameters(params:sub(2, -2)),
      start = start, body = body }
  end
  for name, params, bounds, start, body in text:gmatch "%.entry%s+([%w_%$]+)(%b())([^{]*){()(.-)\n}" do
    entries[#entries + 1] = { name = name, params = parameters(params:sub(2, -2)), start = start, body = body,
      threads = tonumber(bounds:match "%.maxntid (%d+)") }
  end
  -- A function's C: translated once, on its first call.
  local function function_c(name)
    local f = module.functions[name]
    if f.c then return f end
    f.params.kernel = nil
    counted, line_at = 1, 1
    local b = new_body(module, line_of(f.start), f.params)
    local head = { "struct ptx_thread *t", ("char *%s"):format(c_name(f.returned[1][1])) }
    b.symbols[f.returned[1][1]] = "(u64)" .. c_name(f.returned[1][1])
    for _, p in ipairs(f.params) do head[#head + 1] = "const char *" .. c_name(p[1]) end
    translate_body(b, f.body)
    f.c = finish(b, ("static __attribute__((unused)) void %s(%s)"):format(c_name(name), table.concat(head, ", ")))
    f.called, f.used = b.called, b.used
    return f
  end
  local function needs(name, seen, out, used)
    if seen[name] then return end
    seen[name] = true
    local f = function_c(name)
    for u in pairs(f.used) do used[u] = true end
    for other in pairs(f.called) do needs(other, seen, out, used) end
    out[#out + 1] = f.c
  end
  for _, e in ipairs(entries) do
    e.params.kernel = true
    if counted > e.start then counted, line_at = 1, 1 end
    local b = new_body(module, line_of(e.start), e.params)
    if dynamic then b.symbols[dynamic] = "(u64)DYNAMIC" end
    translate_body(b, e.body)
    local functions, seen = {}, {}
    for name in pairs(b.called) do needs(name, seen, functions, b.used) end
    -- The functions may stand behind the kernel.
    local out, globals = { '#include "runtime.h"\n', ("MARKS(%d)\n"):format(lines) }, {}
    for name in pairs(b.used) do globals[#globals + 1] = module.globals[name] end
    table.sort(globals)
    out[#out + 1] = ("#define DYNAMIC %d\n"):format(math.ceil(b.shared / 128) * 128)
    out[#out + 1] = table.concat(globals)
    out[#out + 1] = table.concat(functions)
    out[#out + 1] = finish(b, "void kernel(struct ptx_thread *t, const void *const *arguments)")
    e.c, e.shared, e.sizes = table.concat(out), b.shared, {}
    for k, p in ipairs(e.params) do e.sizes[k] = p[2] end
    e.body = nil
  end
  return entries, module.opcodes
end

return M
