-- SPDX-License-Identifier: MIT
--- Changes an instruction of a kernel that nvcc compiled, for the specs of the checks and for mutants.lua.
local process = require "spec.support.process"
local M = {}

--- The spec files that launch the kernels.
M.SUITES = {}
for name in ([[cuda/copies cuda/instances cuda/folds cuda/rows cuda/layers cuda/flash cuda/device cuda/clip cuda/scaler
    cuda/distributions cuda/nccl cuda/node cuda/capture cuda/offload_rows cuda/slab cuda/cublaslt cuda/sharded
    cuda/sweep cuda/optimizers nn/ctc tensor/functions tensor/order kernels/ops]]):gmatch "%S+" do
  M.SUITES[#M.SUITES + 1] = ("spec/%s_spec.lua"):format(name)
end
M.source = process.root .. "/spec/support/cuda/ptx"
local ptx = process.build .. "/ptx"

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

local files, ends = {}, {}
--- A kernel's body, its first line in the file of PTX, and that file's text with the positions of the entry and of the
--- body.
function M.body_of(kernel)
  local file = ("%s/../sm_90/%s.ptx"):format(ptx, kernel.module)
  files[file] = files[file] or process.read(file)
  local text = files[file]
  local _, start = text:find(".entry " .. kernel.symbol .. "(", 1, true)
  local _, open = assert(text:find("\n{\n", start, true))
  local close = assert(text:find("\n}\n", open, true))
  -- A file's kernels are asked for in their order: the lines before the last one's body are counted.
  local last = ends[file] and ends[file][1] <= open and ends[file] or { 0, 0 }
  local _, lines = text:sub(last[1] + 1, open):gsub("\n", "")
  ends[file] = { open, last[2] + lines }
  return text:sub(open + 1, close), last[2] + lines + 1, text, start, open
end

--- A kernel's PTX: the text before its body, and the body.
function M.ptx_of(kernel)
  local body, _, text, start, open = M.body_of(kernel)
  -- The rest of the file without its other kernels: translating elementwise.ptx takes seconds.
  local first = text:find("\n[^\n]*%.entry ") or 1
  local functions = text:sub(first):gsub("\n[^\n]*%.entry [^\n]*%(.-\n}\n", "\n")
  return text:sub(1, first) .. functions .. text:sub(text:sub(1, start):find "[^\n]*$", open), body
end

--- Makes a folder for MOONSHARD_PTX_FOLDER in which one kernel differs.
---@param folder string  is made
---@param kernel table?  of M.kernels; nil: none
---@param body string?  its changed body
---@param rest string|false|nil  its changed line of the index, after symbol and module; false: it has none
---@param alone boolean?  the other kernels are g++'s
function M.plant(folder, kernel, body, rest, alone)
  assert(os.execute(("rm -rf '%s' && mkdir -p '%s'"):format(folder, folder)) == 0)
  if not alone then os.execute(("ln -s '%s/'*.c '%s/'*.so '%s' 2>/dev/null"):format(ptx, ptx, folder)) end
  if rest == nil then rest = kernel and kernel.rest end
  if body then
    local head = M.ptx_of(kernel)
    local found = M.translator().translate(head .. body .. "\n}\n", kernel.module .. ".ptx")
    local changed = found[#found]
    assert(changed.name == kernel.symbol)
    process.write(folder .. "/planted.c", changed.c)
    rest = rest:gsub("%S+$", "planted")
  end
  local lines = {}
  for _, k in ipairs(M.kernels()) do
    local is = kernel and k.symbol == kernel.symbol and k.module == kernel.module
    local of = alone and k.rest:gsub("%S+$", "-") or k.rest
    if is then of = rest end
    if of then lines[#lines + 1] = ("%s %s %s\n"):format(k.symbol, k.module, of) end
  end
  process.write(folder .. "/index", table.concat(lines))
end

return M
