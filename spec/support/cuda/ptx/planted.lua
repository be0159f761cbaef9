-- SPDX-License-Identifier: MIT
--- Changes an instruction of a kernel that nvcc compiled, for the specs of the checks and for scripts/mutants.
local process = require "spec.support.process"
local M = {}

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
---@param kernel table  of M.kernels
---@param body string?  its changed body
---@param rest string?  its changed line of the index, after symbol and module
function M.plant(folder, kernel, body, rest)
  assert(os.execute(("rm -rf '%s' && mkdir -p '%s' && ln -s '%s/'*.c '%s'"):format(folder, folder, ptx, folder)) == 0)
  os.execute(("ln -s '%s/'*.so '%s' 2>/dev/null"):format(ptx, folder))
  rest = rest or kernel.rest
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
    local is = k.symbol == kernel.symbol and k.module == kernel.module
    lines[#lines + 1] = ("%s %s %s\n"):format(k.symbol, k.module, is and rest or k.rest)
  end
  write(folder .. "/index", table.concat(lines))
end

return M
