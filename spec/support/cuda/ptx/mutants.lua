-- SPDX-License-Identifier: MIT
--- mutants.lua [--seed N] [--count N] [--from K] [SPEC FILE]...: changes one instruction of a kernel that nvcc compiled,
--- drawn from the seed, and runs the spec files that launch the kernel, with each access checked and its results
--- compared with those of g++'s kernel. Do they notice? Prints a line for each mutant, and the share that was found.
--- Stores, barriers, waits, predicates, addresses, masks and orders of operands take turns. --from K: the first K - 1
--- are not run. --count 0 only lists the kernels that no file launches: status 1 if there are any.
package.path = "./?.lua;" .. package.path
local planted = require "spec.support.cuda.ptx.planted"
local mutations = require "spec.support.cuda.ptx.mutations"
local process = require "spec.support.process"

local numbers, files = { seed = 1, count = 40, from = 1 }, {}
do
  local k = 1
  while arg[k] do
    local name = arg[k]:match "^%-%-(%a+)$"
    if name then numbers[name], k = tonumber(arg[k + 1]), k + 1 else files[#files + 1] = arg[k] end
    k = k + 1
  end
end
if #files == 0 then files = planted.SUITES end

local state = numbers.seed + 1
local function draw(n)
  state = state * 16807 % 2147483647
  return state % n + 1
end

--- A kernel's body with one instruction of this kind changed: { kind, kernel, body, trapped, equal, old, new, line, before,
--- after }; nil if there is none. trapped: the body with `trap` in its place; equal: with a trap where `<` and `<=` differ,
--- if it is one of those; before, after: the text around it.
local function mutant(kernel, kind)
  local body = planted.body_of(kernel)
  local all = mutations.candidates(body, kind)
  while #all > 0 do
    local c = table.remove(all, draw(#all))
    if c.new then
      local before, after = body:sub(1, c.from - 1), body:sub(c.to)
      local predicated = before:match "@!?%%%w+%s*$" or ""             -- of the instruction: it would also guard the trap
      local start, rest = before:sub(1, -1 - #predicated), predicated .. body:sub(c.from)
      local type, operands = c.old:match "^setp%.[lg][te]%.(%w+)$", after:match "^%s+%S+,([^;]+;)"
      return { kind = kind[1], kernel = kernel, before = before, body = before .. c.new .. after, old = c.old,
        new = c.new, line = c.line, after = after, trapped = start .. predicated .. "trap; " .. rest,
        equal = type and (".reg .pred %%meets; %ssetp.eq.%s %%meets,%s @%%meets trap; %s"):format(start,
          (type:gsub("^u", "b")), operands, rest) }
    end
  end
end

--- Runs a spec file, or some of its tests: whether it passes, its output, seconds, and whether time was up.
local function busted(file, tests, settings, limit)
  local begun, log, filters = process.now(), os.tmpname(), {}
  for k, name in ipairs(tests) do filters[k] = ("--filter='^%s$'"):format(name:gsub("%W", ".")) end
  local rc = os.execute(("%s MOONSHARD_CUDA=ptx timeout %d busted %s %s >%s 2>&1"):format(settings, limit, file,
    table.concat(filters, " "), log))
  local text = process.read(log)
  os.remove(log)
  return rc == 0, text, process.now() - begun, rc == 124 * 256
end

local folder = os.tmpname()

--- What a spec file launches: { { test, { "symbol module" = true } } }, kept while file and kernels are the same; and
--- the seconds that a test takes.
local function launches_of(file)
  local key = planted.lines(("(cut -d' ' -f1-3 build/ptx/index; cat '%s') | sha256sum"):format(file))[1]:sub(1, 16)
  local kept = ("build/ptx/launched/%s"):format(key)
  local f = io.open(kept)
  if not f then
    os.execute "mkdir -p build/ptx/launched"
    local log = os.tmpname()
    planted.plant(folder, nil, nil, nil, true)
    local passed, text, seconds = busted(file, {}, ("MOONSHARD_PTX_FOLDER='%s' MOONSHARD_PTX_LAUNCHED='%s'"):format(folder, log), 3000)
    if not passed then error(file .. " fails without a mutant:\n" .. text) end
    os.execute(("(echo %.1f; uniq %s) > %s.new && mv %s.new %s; rm %s"):format(seconds, log, kept, kept, kept, log))
    f = assert(io.open(kept))
  end
  local seconds, tests = f:read "*n", {}
  f:read "*l"
  for line in f:lines() do
    if line:sub(1, 2) == "# " then tests[#tests + 1] = { line:sub(3), {} }
    elseif tests[1] then tests[#tests][2][line] = true end
  end
  f:close()
  return tests, seconds / math.max(1, #tests)
end

assert(planted.prepare())
local launches, kernels = {}, {}              -- launches: { { file, tests, seconds } } of each kernel
for _, file in ipairs(files) do
  local tests, seconds = launches_of(file)
  local of = {}
  for _, t in ipairs(tests) do
    for line in pairs(t[2]) do
      if not of[line] then
        of[line] = { file = file, tests = {}, seconds = 0 }
        launches[line] = launches[line] or {}
        table.insert(launches[line], of[line])
      end
      table.insert(of[line].tests, t[1])
      of[line].seconds = of[line].seconds + seconds
    end
  end
end
local all, missing = planted.kernels(), {}
for _, k in ipairs(all) do
  local list = launches[k.symbol .. " " .. k.module]
  if list then
    table.sort(list, function(a, b) return a.seconds < b.seconds end)
    k.files = list
    kernels[#kernels + 1] = k
  else
    missing[#missing + 1] = ("%s %s"):format(k.module, k.symbol)
  end
end
print(("launched by specs: %d of %d kernels"):format(#kernels, #all))
for _, name in ipairs(missing) do print("not launched: " .. name) end

--- Runs the tests of a file that launch a kernel, with this body: nil if they pass, or a message.
local function fails(kernel, body, run)
  planted.plant(folder, kernel, body, nil, true)
  local passed, text, _, late = busted(run.file, run.tests,
    ("MOONSHARD_EMULATOR=check,compare,wide MOONSHARD_PTX_FOLDER='%s'"):format(folder), 120 + 10 * run.seconds)
  if passed then return end
  return late and "does not end" or text:match "emulated GPU: ([^\n]*)" or "an expectation"
end

--- The spec file that finds a change of a kernel, and the check's message; nil: none.
local function finder(kernel, body)
  for _, run in ipairs(kernel.files) do
    local message = fails(kernel, body, run)
    if message then return run.file, message end
  end
end

local found, made = 0, 0
while made < numbers.count do
  local m = mutant(kernels[draw(#kernels)], mutations.KINDS[made % #mutations.KINDS + 1])
  local nothing = m and mutations.changes_nothing(m)
  if nothing then print(("-- drawn again: %s %s: line %d, %s: %s"):format(m.kernel.module, m.kernel.symbol, m.line, m.old, nothing)) end
  if m and not nothing then
    made = made + 1
    if made >= numbers.from then
      local file, by = finder(m.kernel, m.body)
      found = found + (file and 1 or 0)
      local said = file and ("found by %s / %s"):format(file, by) or
        not finder(m.kernel, m.trapped) and "SURVIVED, no spec runs the instruction" or
        m.equal and (finder(m.kernel, m.equal) and "SURVIVED, also where both are equal" or "SURVIVED, both are never equal") or
        "SURVIVED"
      print(("%2d %-9s %s %s: line %d of its body, %s -> %s: %s"):format(made, m.kind, m.kernel.module, m.kernel.symbol, m.line,
        m.old, m.new, said))
      io.stdout:flush()
    end
  end
end
os.execute(("rm -rf '%s'"):format(folder))
if numbers.count == 0 then os.exit(#missing == 0 and 0 or 1) end
print(("%d of %d mutants found, seed %d"):format(found, made - numbers.from + 1, numbers.seed))
