-- SPDX-License-Identifier: MIT
--- results.lua --expected FILE: runs SPECS on the executor of the kernels' PTX (MOONSHARD_CUDA=ptx) and writes what each
--- operator computes to FILE. results.lua FILE: runs them on the device that MOONSHARD_CUDA names, and compares. With
--- two files, compares these. An operator whose inputs have the same bits and whose outputs have not is at fault, or
--- uses what the executor cannot foresee: approximate instructions, tensor cores. Prints the first difference, then
--- each such operator with its largest error, relative to the largest number of its output. Status 1: an error beyond
--- those of approximations.
package.path = (arg[0]:match "^(.*)scripts/support/" or "./") .. "?.lua;" .. package.path
local ffi = require "ffi"
local process = require "spec.support.process"
local M = {}

--- Specs that run in one process: kernels of all kinds, without libraries.
M.SPECS = { "spec/cuda/copies_spec.lua", "spec/cuda/rows_spec.lua", "spec/cuda/folds_spec.lua",
  "spec/cuda/layers_spec.lua", "spec/cuda/flash_spec.lua" }
--- Relative errors of approximations and of sums by tensor cores, by dtype.
local MOST = { float64 = 1e-13, float32 = 1e-5, bfloat16 = 2e-2, float16 = 2e-3 }

--- A line of MOONSHARD_CUDA_RESULTS: the operator, its inputs' hashes, its outputs { dtype, shape, hash, hexadecimal }.
local function parse(line)
  local head = line:match "^[^|]*"
  local call = { op = head:match "^%S+", inputs = head:match "^%S+(.*)" }
  for dtype, shape, hash, bytes in line:gmatch "| (%S+) (%S+) (%S+) (%x*)" do
    call[#call + 1] = { dtype = dtype, shape = shape, hash = hash, bytes = bytes }
  end
  return call
end

local CTYPE = { float64 = "double", float32 = "float", int64 = "int64_t", int32 = "int32_t", int16 = "int16_t",
  int8 = "int8_t", uint8 = "uint8_t", bool = "uint8_t" }
local function numbers(output)
  local raw = output.bytes:gsub("%x%x", function(b) return string.char(tonumber(b, 16)) end)
  local out = {}
  if CTYPE[output.dtype] then
    local size = ffi.sizeof(CTYPE[output.dtype])
    local p = ffi.new(CTYPE[output.dtype] .. "[?]", math.max(#raw / size, 1))
    ffi.copy(p, raw, #raw)
    for k = 0, #raw / size - 1 do out[k + 1] = tonumber(p[k]) end
    return out
  end
  for low, high in raw:gmatch "(.)(.)" do
    local bits = low:byte() + 256 * high:byte()
    local fraction, bias = 10, 15
    if output.dtype == "bfloat16" then fraction, bias = 7, 127 end
    local sign, e, m = bits >= 32768 and -1 or 1, math.floor(bits % 32768 / 2 ^ fraction), bits % 2 ^ fraction
    out[#out + 1] = e == 2 * bias + 1 and (m > 0 and 0 / 0 or sign * math.huge)
      or sign * math.ldexp((e > 0 and 2 ^ fraction or 0) + m, math.max(e, 1) - bias - fraction)
  end
  return out
end

--- The largest error of two outputs, relative to the largest number, and what differs first, as text.
local function difference(want, got)
  local a, b = numbers(want), numbers(got)
  local most, off, first = 0, 0, nil
  for k = 1, #a do
    if a[k] == a[k] and math.abs(a[k]) < math.huge then most = math.max(most, math.abs(a[k])) end
    if a[k] ~= b[k] and (a[k] == a[k] or b[k] == b[k]) then
      local d = math.abs(a[k] - b[k])
      off = math.max(off, d == d and d or math.huge)
      first = first or ("element %d is %.17g, expected %.17g"):format(k, b[k], a[k])
    end
  end
  if not first then return 0, "elements that the file does not show differ, or signs of zeros, or bits of NaNs" end
  return most > 0 and off / most or math.huge, first
end

--- Compares two files. Returns the number of calls, and the operators that differ though their inputs do not, in the
--- order of their first calls: { op, calls, error, beyond, first }; or nil and where the sequences of calls part.
function M.compare(expected, found)
  local next_line, n, by_op, list = io.lines(found), 0, {}, {}
  for line in io.lines(expected) do
    local other = next_line()
    n = n + 1
    local a, b = parse(line), parse(other or "nothing")
    if a.op ~= b.op or #a ~= #b then return nil, ("call %d is %s, expected %s"):format(n, b.op, a.op) end
    for k, want in ipairs(a) do
      if want.shape ~= b[k].shape or want.dtype ~= b[k].dtype then
        return nil, ("call %d, %s, gives %s %s, expected %s %s"):format(n, a.op, b[k].dtype, b[k].shape, want.dtype,
          want.shape)
      end
      if a.inputs == b.inputs and want.hash ~= b[k].hash then
        local off, text = difference(want, b[k])
        local o = by_op[a.op]
        if not o then
          local where = ("call %d, output %d, %s %s"):format(n, k, want.dtype, want.shape)
          o = { op = a.op, calls = 0, error = 0, first = where .. ": " .. text }
          by_op[a.op], list[#list + 1] = o, o
        end
        o.calls, o.error = o.calls + 1, math.max(o.error, off)
        o.beyond = o.beyond or off > (MOST[want.dtype] or 0)
      end
    end
  end
  if next_line() then return nil, ("there are more than %d calls"):format(n) end
  return n, list
end

--- Runs the specs and writes the operators' results to a file.
local function run(file, device)
  local child = process.start({ "busted", unpack(M.SPECS) }, { stdout = file .. ".log", stderr = file .. ".err",
    env = { MOONSHARD_CUDA_RESULTS = file, MOONSHARD_CUBLAS = "off", MOONSHARD_CUDNN = "off", MOONSHARD_CUDA = device } })
  if child:wait(600) ~= 0 then
    print(process.read(file .. ".log") .. process.read(file .. ".err") .. "results.lua: the specs failed, or did not end")
  end
  os.remove(file .. ".log")
  os.remove(file .. ".err")
end

if arg[0]:find "results%.lua$" then
  if arg[1] == "--expected" then
    run(arg[2], "ptx")
    os.exit(io.open(arg[2]) and 0 or 1)
  end
  local found = arg[2] or os.tmpname()
  if not arg[2] then run(found) end
  local calls, list = M.compare(arg[1], found)
  if not arg[2] then os.remove(found) end
  if not calls then
    print("the calls differ: " .. list)
    os.exit(1)
  end
  local beyond = 0
  for k, o in ipairs(list) do
    if k == 1 then print(("first difference: %s, %s"):format(o.op, o.first)) end
    print(("%-40s %5d calls differ, relative error %.3g%s"):format(o.op, o.calls, o.error, o.beyond and ", TOO MUCH: " .. o.first or ""))
    beyond = beyond + (o.beyond and 1 or 0)
  end
  print(("%d calls compared, %d operators differ, %d of them too much"):format(calls, #list, beyond))
  os.exit(beyond == 0 and 0 or 1)
end
return M
