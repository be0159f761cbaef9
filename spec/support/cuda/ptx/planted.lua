-- SPDX-License-Identifier: MIT
--- Changes an instruction of a kernel that nvcc compiled, for the specs of the checks and for mutants.lua.
local process = require "spec.support.process"
local M = {}

--- The spec files that launch the kernels.
M.SUITES = {}
for name in ([[cuda/copies cuda/instances cuda/folds cuda/rows cuda/layers cuda/flash cuda/device cuda/clip cuda/scaler
    cuda/distributions cuda/nccl cuda/capture cuda/offload_rows cuda/slab cuda/cublaslt cuda/sharded nn/ctc
    tensor/functions tensor/order kernels/ops]]):gmatch "%S+" do
  M.SUITES[#M.SUITES + 1] = ("spec/%s_spec.lua"):format(name)
end
M.source = process.root .. "/spec/support/cuda/ptx"
local ptx = process.build .. "/ptx"

local function read(path)
  local f = assert(io.open(path))
  local text = f:read "*a"
  f:close()
  return text
end
local function write(path, text)
  local f = assert(io.open(path, "w"))
  f:write(text)
  f:close()
end

--- The lines that a command prints.
function M.lines(command)
  local out, f = {}, assert(io.popen(command))
  for line in f:lines() do out[#out + 1] = line end
  f:close()
  return out
end

--- The translator, translate.lua.
function M.translator()
  local path = package.path
  package.path = M.source .. "/?.lua;" .. path
  local translator = require "translate"
  package.path = path
  return translator
end

--- Whether nvcc compiled the kernels.
function M.built() return io.open(process.build .. "/libmoonshard_cuda.so") ~= nil end

--- Translates the build's PTX, where it is not.
function M.prepare() return os.execute(("luajit '%s/prepare.lua' '%s'"):format(M.source, ptx)) == 0 end

--- The kernels of the build: { symbol, module, the rest of the line }.
function M.kernels()
  local out = {}
  for line in io.lines(ptx .. "/index") do
    local symbol, module, rest = line:match "^(%S+) (%S+) (.*)$"
    out[#out + 1] = { symbol = symbol, module = module, rest = rest }
  end
  return out
end

local files = {}
--- A kernel's PTX: the text before its body, and the body.
function M.ptx_of(kernel)
  local file = ("%s/../sm_90/%s.ptx"):format(ptx, kernel.module)
  files[file] = files[file] or read(file)
  local text = files[file]
  local _, start = text:find(".entry " .. kernel.symbol .. "(", 1, true)
  local open = assert(text:find("\n{\n", start, true))
  local close = assert(text:find("\n}\n", open, true))
  -- The rest of the file without its other kernels: translating elementwise.ptx takes seconds.
  local first = text:find("\n[^\n]*%.entry ") or 1
  local functions = text:sub(first):gsub("\n[^\n]*%.entry [^\n]*%(.-\n}\n", "\n")
  return text:sub(1, first) .. functions .. text:sub(text:sub(1, start):find "[^\n]*$", open + 2), text:sub(open + 3, close)
end

--- Makes a folder for MOONSHARD_PTX_FOLDER in which one kernel differs.
---@param folder string  is made
---@param kernel table?  of M.kernels; nil: none
---@param body string?  its changed body
---@param rest string?  its changed line of the index, after symbol and module
---@param alone boolean?  the other kernels are g++'s
function M.plant(folder, kernel, body, rest, alone)
  assert(os.execute(("rm -rf '%s' && mkdir -p '%s'"):format(folder, folder)) == 0)
  if not alone then os.execute(("ln -s '%s/'*.c '%s/'*.so '%s' 2>/dev/null"):format(ptx, ptx, folder)) end
  rest = rest or kernel and kernel.rest
  if body then
    local head = M.ptx_of(kernel)
    local found = M.translator().translate(head .. body .. "\n}\n", kernel.module .. ".ptx")
    local changed = found[#found]
    assert(changed.name == kernel.symbol)
    write(folder .. "/planted.c", changed.c)
    rest = rest:gsub("%S+$", "planted")
  end
  local lines = {}
  for _, k in ipairs(M.kernels()) do
    local is = kernel and k.symbol == kernel.symbol and k.module == kernel.module
    local of = is and rest or alone and k.rest:gsub("%S+$", "-") or k.rest
    lines[#lines + 1] = ("%s %s %s\n"):format(k.symbol, k.module, of)
  end
  write(folder .. "/index", table.concat(lines))
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

-- Instructions that no launch reaches: { kernel, instruction, text that ends before it, why }.
local EQUIVALENT = {
  { "dense_rows_kernel", "st%.global%.[us]8", "cvt%.rzi%.s64%.f64[^;]*;[^;]*;[^;]*$", "a fold of real numbers gives no integers" },
  { "read_id", "^shl%.b32", "ld%.global%.u16[^;]*;[^;]*$", "positions are integers, never bfloat16" },
  { "read_place", "^shl%.b32", "ld%.global%.u16[^;]*;[^;]*$", "positions are integers, never bfloat16" },
  { "int8_", "^setp%.eq", "setp%.eq%.s32[^,]*, %%r%d+, 4;[^;]*;[^;]*$", "int8_linear takes scales of floats only" },
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
    for p, q in m.after:sub(1, 300):gmatch "selp%.%w+%s+%S+, (%S+), (%S+), " do
      if (p == x and q == y) or (p == y and q == x) then return "of two equal numbers either is taken" end
    end
  end
  local before = m.before:sub(-400)
  for _, e in ipairs(EQUIVALENT) do
    if m.kernel.symbol:find(e[1]) and m.old:find(e[2]) and before:find(e[3]) then return e[4] end
  end
end

return M
