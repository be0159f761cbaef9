-- SPDX-License-Identifier: MIT
--- Checks the format of a benchmark's output: `luajit format.lua FILE`; prints the reason and exits with 1 if it is
--- wrong. The output has one or more parts (one per job): `machine:` first, then `case:` and `bar:` lines with numbers,
--- and last `N bars, N met, N missed` with the right counts. Lines that begin with # are comments.
--- A part may be the single line `not measured: …`, where a tool is missing.
--- Lines `rank N: dist: ...` list collectives (dist.set_debug_level); they are skipped.
local function wrong(text, ...)
  io.stderr:write("bench format: ", text:format(...), "\n")
  os.exit(1)
end

local part                          -- the counts of the current part; nil between parts
local parts = 0
for line in io.lines(arg[1]) do
  if not part then
    if line:find "^machine: copy [%d.]+ GB/s, fma float32 [%d.]+ GF/s" then
      part = { cases = 0, bars = 0, met = 0 }
    elseif line:find "^not measured: " then
      parts = parts + 1
    elseif line:find "%S" and not line:find "^#" and not line:find "^rank %d+: dist: " then
      wrong("a part does not begin with `machine: …`: %s", line)
    end
  elseif line:find "^case: " then
    if not line:find "best +[%d.e+-]+ %S+ +median +[%d.e+-]+ %S+" then
      wrong("expected `case: NAME best NUMBER UNIT median NUMBER UNIT`: %s", line)
    end
    part.cases = part.cases + 1
  elseif line:find "^bar: " then
    local verdict = line:match " [%d.e+-]+ [<>]= [%d.e+-]+.-  (%u?%l*%u*)$"
    if verdict ~= "met" and verdict ~= "MISSED" then
      wrong("expected `bar: NAME NUMBER <= LIMIT  met` (or >=, MISSED): %s", line)
    end
    part.bars = part.bars + 1
    if verdict == "met" then part.met = part.met + 1 end
  elseif line:find "^%d+ bars, " then
    local n, met, missed = line:match "^(%d+) bars, (%d+) met, (%d+) missed$"
    if tonumber(n) ~= part.bars or tonumber(met) ~= part.met or tonumber(missed) ~= part.bars - part.met then
      wrong("%d bars, %d of them met, but the last line says: %s", part.bars, part.met, line)
    end
    if part.cases == 0 then wrong("part %d has no line that begins with 'case: '", parts + 1) end
    if part.bars == 0 then wrong("part %d has no line that begins with 'bar: '", parts + 1) end
    part, parts = nil, parts + 1
  elseif line:find "%S" and not line:find "^#" and not line:find "^rank %d+: dist: " then
    wrong("expected `case: ...`, `bar: ...` or `# comment`, got %s", line)
  end
end
if part then wrong "the last line is not `N bars, N met, N missed`" end
if parts == 0 then wrong "the file has no line of a benchmark" end
