-- SPDX-License-Identifier: MIT
--- mutants.lua [--seed N] [--count N] [SPEC FILE]...: changes one instruction of a kernel that nvcc compiled, at random,
--- and runs the spec files that launch the kernel, with all checks. Do they notice? Prints a line for each mutant, and
--- the share that was found. Stores, barriers, waits, predicates, addresses, masks and orders of operands take turns.
package.path = "./?.lua;" .. package.path
local planted = require "spec.support.cuda.ptx.planted"
local process = require "spec.support.process"

local seed, count, files = 1, 40, {}
do
  local k = 1
  while arg[k] do
    if arg[k] == "--seed" then seed, k = tonumber(arg[k + 1]), k + 1
    elseif arg[k] == "--count" then count, k = tonumber(arg[k + 1]), k + 1
    else files[#files + 1] = arg[k] end
    k = k + 1
  end
end
if #files == 0 then files = { "spec/cuda/rows_spec.lua", "spec/cuda/folds_spec.lua", "spec/cuda/flash_spec.lua", "spec/cuda/layers_spec.lua" } end

-- Numbers below 2^53 in a sequence drawn from the seed.
local state = seed * 2 + 1
local function draw(n)
  state = (state * 1103515245 + 12345) % 2147483648
  return math.floor(state / 2147483648 * n) + 1
end

--- Kinds of mutants: { name, pattern of an instruction, its change }.
local FLIP = { lt = "le", le = "lt", gt = "ge", ge = "gt", eq = "ne", ne = "eq" }
local WIDTH = { ["8"] = 1, ["16"] = 2, ["32"] = 4, ["64"] = 8 }
local KINDS = {
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
    return (text:gsub(", (%d+);$", function(n) return (", %d;"):format(tonumber(n) == 0 and 1 or math.floor(tonumber(n) / 2)) end))
  end },
  { "order", "sub%.[rsf][^;]*;", function(text)
    return (text:gsub("^(%S+%s+%S+,) ([^,]+), ([^;]+);", "%1 %3, %2;"))
  end },
}

--- A kernel's body with one instruction of this kind changed, and what was changed; nil if there is none.
local function mutant(body, kind)
  local at = {}
  for from, to in body:gmatch("()" .. kind[2] .. "()") do at[#at + 1] = { from, to } end
  while #at > 0 do
    local k = table.remove(at, draw(#at))
    local old = body:sub(k[1], k[2] - 1)
    local new = kind[3](old)
    if new and new ~= old then
      local _, line = body:sub(1, k[1]):gsub("\n", "")
      return body:sub(1, k[1] - 1) .. new .. body:sub(k[2]), ("line %d of its body, %s -> %s"):format(line + 1, old, new)
    end
  end
end

local function busted(file, settings)
  local begun = process.now()
  local rc = os.execute(("%s MOONSHARD_CUDA=ptx timeout 600 busted %s >/dev/null 2>&1"):format(settings, file))
  return rc == 0, process.now() - begun
end

assert(planted.prepare())
local launches, kernels = {}, {}                                    -- files by kernel; kernels that a file launches
local times = {}
for _, file in ipairs(files) do
  local log = os.tmpname()
  local passed, seconds = busted(file, "MOONSHARD_EMULATOR=check MOONSHARD_PTX_LAUNCHED=" .. log)
  if not passed then error(file .. " fails without a mutant") end
  times[file] = seconds
  local of_file = {}
  for line in io.lines(log) do of_file[line] = true end
  os.remove(log)
  for line in pairs(of_file) do
    launches[line] = launches[line] or {}
    table.insert(launches[line], file)
  end
end
for _, k in ipairs(planted.kernels()) do
  local list = launches[k.symbol .. " " .. k.module]
  if list then
    table.sort(list, function(a, b) return times[a] < times[b] end)
    k.files = list
    kernels[#kernels + 1] = k
  end
end
print(("%d kernels launched by %d spec files"):format(#kernels, #files))

local folder = os.tmpname()
os.remove(folder)
local found, made, tries = 0, 0, 0
while made < count and tries < 100 * count do
  tries = tries + 1
  local kernel, kind = kernels[draw(#kernels)], KINDS[made % #KINDS + 1]
  local _, body = planted.ptx_of(kernel)
  local changed, what = mutant(body, kind)
  if changed then
    made = made + 1
    planted.plant(folder, kernel, changed)
    local by
    for _, file in ipairs(kernel.files) do
      if not busted(file, ("MOONSHARD_EMULATOR=check MOONSHARD_PTX_FOLDER='%s'"):format(folder)) then
        by = file
        break
      end
    end
    found = found + (by and 1 or 0)
    print(("%2d %-9s %s: %s %s: %s"):format(made, kind[1], by and "found by " .. by or "NOT FOUND", kernel.module,
      kernel.symbol, what))
    io.stdout:flush()
  end
end
os.execute(("rm -rf '%s'"):format(folder))
print(("%d of %d mutants found, seed %d"):format(found, made, seed))
