-- SPDX-License-Identifier: MIT
--- coverage.lua [--lines PATTERN] [SPEC FILE]...: runs spec files, those of planted.lua, with the kernels that nvcc
--- compiled. Prints what they do not run: kernels; of each other kernel the share of its instructions, the least
--- covered last; and the share of what mutants.lua may change. --lines: the PTX that does not run, of the kernels whose
--- symbol has this pattern. A first file `+` adds to the last run; `-` as the only file runs nothing, and reads it.
package.path = "./?.lua;" .. package.path
local planted = require "spec.support.cuda.ptx.planted"
local mutations = require "spec.support.cuda.ptx.mutations"
local process = require "spec.support.process"

local marks, files, pattern = process.build .. "/ptx/ran", {}, nil
do
  local k = 1
  while arg[k] do
    if arg[k] == "--lines" then pattern, k = arg[k + 1], k + 1 else files[#files + 1] = arg[k] end
    k = k + 1
  end
end
if #files == 0 then files = planted.SUITES end
assert(planted.prepare())
if files[1] == "+" or files[1] == "-" then table.remove(files, 1) else os.execute(("rm -rf '%s'"):format(marks)) end
os.execute(("mkdir -p '%s'"):format(marks))
for _, file in ipairs(files) do
  local status = os.execute(("MOONSHARD_PTX_RAN='%s' MOONSHARD_CUDA=ptx MOONSHARD_EMULATOR=wide busted %s"):format(marks, file))
  if status ~= 0 then print(file .. " fails") end
end

--- The marks of a kernel's library: a byte for each line of its PTX; nil if no spec launches it.
local function marks_of(kernel)
  local f = io.open(("%s/%s"):format(marks, kernel.rest:match "%S+$"))
  local text = f and f:read "*a"
  if f then f:close() end
  return text
end

local rows, never, total, of_mutants = {}, {}, { 0, 0 }, {}
for _, kernel in ipairs(planted.kernels()) do
  local ran = marks_of(kernel)
  if not ran then
    never[#never + 1] = ("%s %s"):format(kernel.module, kernel.symbol)
    ran = ""
  end
  local body, first = planted.body_of(kernel)
  local _, n = body:gsub("\n", "")
  local runs = mutations.lines_run(process.read(("%s/ptx/%s.c"):format(process.build, kernel.rest:match "%S+$")), first, n + 1, ran)
  local row = { kernel = kernel, all = 0, missed = 0, lines = {} }
  local line = 0
  for text in body:gmatch "([^\n]*)\n" do
    line = line + 1
    if text:find "^%s+[@%a].*;" then
      row.all = row.all + 1
      if not runs[line] then
        row.missed = row.missed + 1
        row.lines[#row.lines + 1] = ("%6d  %s"):format(first + line - 1, text)
      end
    end
  end
  for _, kind in ipairs(mutations.KINDS) do
    local of = of_mutants[kind[1]] or { 0, 0 }
    of_mutants[kind[1]] = of
    local possible, run = 0, 0
    for _, c in ipairs(mutations.candidates(body, kind)) do
      if c.new then possible, run = possible + 1, run + (runs[c.line] and 1 or 0) end
    end
    if possible > 0 then of[1], of[2] = of[1] + 1, of[2] + run / possible end
  end
  total[1], total[2] = total[1] + row.all, total[2] + row.missed
  if ran ~= "" then rows[#rows + 1] = row end
  if pattern and kernel.symbol:find(pattern) then
    print(("%s %s"):format(kernel.module, kernel.symbol))
    print(table.concat(row.lines, "\n"))
  end
end
table.sort(rows, function(a, b) return a.missed / a.all < b.missed / b.all end)
for _, row in ipairs(rows) do
  if row.missed > 0 then
    print(("%5.1f %% of %5d do not run: %s %s"):format(100 * row.missed / row.all, row.all, row.kernel.module, row.kernel.symbol))
  end
end
for _, name in ipairs(never) do print("not launched: " .. name) end
print(("instructions: %d, of which %d (%.1f %%) do not run"):format(total[1], total[2], 100 * total[2] / total[1]))
for _, kind in ipairs(mutations.KINDS) do
  local of = of_mutants[kind[1]]
  print(("of mutants of a %s run: %.1f %%"):format(kind[1], 100 * of[2] / math.max(1, of[1])))
end
