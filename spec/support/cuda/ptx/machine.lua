-- SPDX-License-Identifier: MIT
--- machine.lua [MODULE]...: counts, in each kernel of the plugin's library and for each of its architectures, the
--- machine instructions that store, synchronize, multiply tiles and copy, beside those of the PTX: of all files of
--- kernels/cuda, or of these. Prints where they differ, and spills. Unrolled loops have more of them, merged branches
--- and accesses fewer; a kernel without one where the PTX has some is a fault, as is a spill. Status 1: faults; 3:
--- there is no cuobjdump (CUDA's toolkit has it, and PyPI: nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm).
package.path = "./?.lua;" .. package.path
local process = require "spec.support.process"
local output = process.output
local M = {}

--- The kinds: patterns of their opcodes in PTX and in machine code; `own`: ptxas has uses of its own for them.
M.KINDS = {
  { "store", { "^st%.global", "^st%.[vbufs]%d" }, { "^STG?%.E" } },
  { "shared store", { "^st%.shared" }, { "^STS" } },
  { "barrier", { "^bar%.sync" }, { "^BAR%.SYNC", "^BAR%.RED" } },
  { "shuffle", { "^shfl%.sync" }, { "^SHFL" } },
  { "mma", { "^mma%.sync" }, { "^HMMA" } },
  { "ldmatrix", { "^ldmatrix" }, { "^LDSM" } },
  { "cp.async", { "^cp%.async%.c[ag]" }, { "^LDGSTS" } },
  { "commit", { "^cp%.async%.commit" }, { "^LDGDEPBAR" } },
  { "wait", { "^cp%.async%.wait" }, { "^DEPBAR%.LE" }, own = true },
  { "atomic", { "^atom%.", "^red%." }, { "^ATOM", "^RED[GS]?%." } },
}

local function count(counts, op, column)
  for _, kind in ipairs(M.KINDS) do
    for _, pattern in ipairs(kind[column]) do
      if op:find(pattern) then
        counts[kind[1]] = (counts[kind[1]] or 0) + 1
        return
      end
    end
  end
  if column == 3 and op:find "^STL" then counts.spill = (counts.spill or 0) + 1 end
end

--- The kernels of lines of PTX: { symbol = { kind = number, depot = whether it, or a function that it calls, declares
--- local memory } }.
function M.of_ptx(lines)
  local kernels, functions, current = {}, {}, nil
  for line in lines do
    local symbol = line:match "%.entry%s+([%w_$]+)"
    local name = line:match "^%.func.*%)%s*([%w_$]+)"
    if symbol then
      current = {}
      kernels[symbol] = current
    elseif name then
      functions[name] = functions[name] or {}
      current = functions[name]
    elseif line:find "^}" then current = nil
    elseif current then
      if line:find "^%s*%.local" then current.depot = true end
      local called = line:match "^%s*([%a_][%w_$]*)%s*,%s*$"
      if functions[called] then current[called] = true end
      count(current, line:gsub("^%s*{?%s*", ""):gsub("^@!?%%[%w_]+%s+", ""), 2)
    end
  end
  for _, k in pairs(kernels) do
    for name, f in pairs(functions) do k.depot = k.depot or k[name] and f.depot end
  end
  return kernels
end

--- The kernels of lines of `cuobjdump -sass`: { symbol = { kind = number, spill = stores to local memory } }.
function M.of_machine(lines)
  local kernels, current = {}, nil
  for line in lines do
    local symbol = line:match "^%s*Function : (%S+)"
    if symbol then
      current = {}
      kernels[symbol] = current
    elseif current then
      local text = line:match "^%s*/%*%x+%*/%s+(%S.*)"
      if text then count(current, text:gsub("^@!?%w+%s+", ""), 3) end
    end
  end
  return kernels
end

--- What differs between a kernel's PTX and its machine code: faults, and other differences, as texts.
function M.compare(ptx, machine)
  local faults, others = {}, {}
  for _, kind in ipairs(M.KINDS) do
    local a, b = ptx[kind[1]] or 0, machine[kind[1]] or 0
    local text = ("%s %d -> %d"):format(kind[1], a, b)
    if (a == 0) ~= (b == 0) and not (a == 0 and kind.own) then faults[#faults + 1] = text
    elseif a ~= b then others[#others + 1] = text end
  end
  if machine.spill and not ptx.depot then faults[#faults + 1] = ("%d spills"):format(machine.spill) end
  return faults, others
end

--- The command cuobjdump, or nil.
function M.tool() return output("PATH=$PATH:/usr/local/cuda/bin command -v cuobjdump"):match "%S+" end

--- The machine code of these modules: { module = { architecture = kernels } }. ptx: { module = kernels }
local function read_machine(library, ptx)
  local folder, out = output "mktemp -d":match "%S+", {}
  for module in pairs(ptx) do out[module] = {} end
  local command = ("cd '%s' && '%s' -xelf all '%s' >/dev/null"):format(folder, M.tool(), library)
  assert(os.execute(command) == 0, command)
  for file in output(("ls '%s'"):format(folder)):gmatch "%S+" do
    local arch, module = file:match "%.(sm_%d+)%.cubin$", nil
    -- A cubin is of one file; kernels of a header may be in several.
    local symbols = {}
    for symbol in output(("strings -n 8 '%s/%s'"):format(folder, file)):gmatch "%.text%.([%w_$]+)" do
      symbols[symbol] = true
    end
    for name, kernels in pairs(ptx) do
      local all = next(kernels) ~= nil
      for symbol in pairs(kernels) do all = all and symbols[symbol] end
      if all then module = name end
    end
    if module then
      local f = assert(io.popen(("'%s' -sass '%s/%s'"):format(M.tool(), folder, file)))
      out[module][arch] = M.of_machine(f:lines())
      f:close()
    end
  end
  os.execute(("rm -r '%s'"):format(folder))
  return out
end

--- Compares these modules, or all. Calls line(text) for each difference. Returns how many kernels have faults, and how
--- many were compared, over all architectures.
function M.run(build, modules, line)
  local ptx = {}
  for path in output(("ls '%s'/sm_90/*.ptx"):format(build)):gmatch "[^\n]+" do
    local name = path:match "([%w_]+)%.ptx$"
    local wanted = #modules == 0
    for _, m in ipairs(modules) do wanted = wanted or m == name end
    if wanted then ptx[name] = M.of_ptx(io.lines(path)) end
  end
  local machine, faulty, compared = read_machine(build .. "/libmoonshard_cuda.so", ptx), 0, 0
  local names = {}
  for name, kernels in pairs(ptx) do if next(kernels) then names[#names + 1] = name end end
  table.sort(names)
  for _, name in ipairs(names) do
    for _, arch in ipairs { "sm_80", "sm_90" } do
      local found, symbols = machine[name][arch] or {}, {}
      for symbol in pairs(ptx[name]) do symbols[#symbols + 1] = symbol end
      table.sort(symbols)
      for _, symbol in ipairs(symbols) do
        local faults, others = { "missing" }, {}
        if found[symbol] then faults, others = M.compare(ptx[name][symbol], found[symbol]) end
        compared = compared + 1
        faulty = faulty + (#faults > 0 and 1 or 0)
        if #faults > 0 then line(("FAULT %s %s %s: %s"):format(arch, name, symbol, table.concat(faults, ", "))) end
        if #others > 0 then line(("%s %s %s: %s"):format(arch, name, symbol, table.concat(others, ", "))) end
      end
    end
  end
  return faulty, compared
end

if arg and arg[0] and arg[0]:find "machine%.lua$" then
  if not M.tool() then
    io.stderr:write "machine.lua: there is no cuobjdump\n"
    os.exit(3)
  end
  local faulty, compared = M.run(process.build, arg, print)
  print(("%d kernels compared, %d faults"):format(compared, faulty))
  os.exit(faulty == 0 and compared > 0 and 0 or 1)
end
return M
