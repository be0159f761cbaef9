-- SPDX-License-Identifier: MIT
--- results.lua --expected FILE: runs SPECS on the executor of the kernels' PTX (MOONSHARD_CUDA=ptx) and writes what each
--- operator computes, and by which kernels, to FILE. results.lua FILE: runs them on the device that MOONSHARD_CUDA
--- names, and compares. With two files, compares these. An operator whose inputs have the same bits must give the same
--- bits, unless one of its kernels uses what the executor cannot foresee: approximate instructions, tensor cores. Then
--- its error, relative to the largest number of its output, has a bound. Prints the first difference, each operator
--- that differs, and how many kernels give the executor's bits. Status 1: an operator is at fault.
package.path = (arg[0]:match "^(.*)scripts/support/" or "./") .. "?.lua;" .. package.path
local ffi = require "ffi"
local planted = require "spec.support.cuda.ptx.planted"
local process = require "spec.support.process"
local M = {}

--- Specs that run in one process: kernels of all kinds, without libraries.
M.SPECS = { "spec/cuda/copies_spec.lua", "spec/cuda/rows_spec.lua", "spec/cuda/folds_spec.lua",
  "spec/cuda/layers_spec.lua", "spec/cuda/flash_spec.lua", "spec/cuda/optimizers_spec.lua", "spec/cuda/clip_spec.lua",
  "spec/cuda/instances_spec.lua", "spec/kernels/ops_spec.lua" }
--- Relative errors of approximations and of sums by tensor cores, by dtype.
local MOST = { float64 = 1e-13, float32 = 1e-5, bfloat16 = 2e-2, float16 = 2e-3 }

--- A line of MOONSHARD_CUDA_RESULTS: the operator and the hash of its inputs, the whole line, its outputs { dtype,
--- shape, hash, hexadecimal }.
local function parse(line)
  local call = { key = line:match "^%S+ %S+", op = line:match "^%S+", text = line }
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

--- The largest error of two outputs, relative to the largest number, and what differs first, as text. Numbers below
--- 1e-300 are as good as 0. Of a large output the file has some elements, at equal distances.
local function difference(want, got)
  local a, b, numel = numbers(want), numbers(got), 1
  for n in want.shape:gmatch "%d+" do numel = numel * n end
  local most, off, first = 1e-300, 0, nil
  for k = 1, #a do
    if a[k] == a[k] and math.abs(a[k]) < math.huge then most = math.max(most, math.abs(a[k])) end
    if a[k] ~= b[k] and (a[k] == a[k] or b[k] == b[k]) then
      local d = math.abs(a[k] - b[k])
      off = math.max(off, d == d and d or math.huge)
      first = first or ("element %d is %.17g, expected %.17g"):format(math.floor((k - 1) * numel / #a) + 1, b[k], a[k])
    end
  end
  if first then return off / most, first end
  return 0, "signs of zeros differ, or elements that the file does not have"
end

local function same_kind(a, b)
  for k = 1, math.max(#a, #b) do
    if not a[k] or not b[k] or a[k].dtype ~= b[k].dtype or a[k].shape ~= b[k].shape then return false end
  end
  return true
end

--- Whether a kernel, or a function that it calls, has instructions of which the executor cannot foresee the last bits.
local function approximate(kernel)
  local function has(text) return text:find "%.approx" or text:find("div.full", 1, true) or text:find("mma.sync", 1, true) end
  local body, _, file = planted.body_of(kernel)
  if has(body) then return true end
  for name in body:gmatch "call%.uni[^;]-([%w_$]+),%s*%(" do
    local text = file:match("%.func[^\n]*%f[%w_$]" .. name:gsub("%$", "%%$") .. "%s*%([^;]-%)%s*{(.-)\n}\n")
    if not text or has(text) then return true end
  end
  return false
end

--- Rewrites what the executor wrote, operators' lines among those of the kernels that they launched: first a line
--- "kernel exact SYMBOL" or "kernel approximate SYMBOL" for each kernel, then the operators' lines, with " by " and the
--- numbers of their kernels at the end.
function M.name_kernels(file)
  local names, number_of, heads, lines, by = {}, {}, {}, {}, {}
  for _, k in ipairs(planted.kernels()) do names[k.symbol .. " " .. k.module] = k end
  for line in io.lines(file) do
    local k = names[line]
    if k then
      if not number_of[k] then
        heads[#heads + 1] = ("kernel %s %s"):format(approximate(k) and "approximate" or "exact", k.symbol)
        number_of[k] = #heads
      end
      by[#by + 1] = number_of[k]
    elseif line:find "^[^#]%S* %x+" then
      lines[#lines + 1], by = line .. (#by > 0 and " by " .. table.concat(by, " ") or ""), {}
    end
  end
  process.write(file, table.concat(heads, "\n") .. "\n" .. table.concat(lines, "\n") .. "\n")
end

--- Compares two files. Calls belong together if operator and inputs are the same, so the specs may run in any order.
---@param expected string  a file of M.name_kernels, or one without kernels: then no operator must give the same bits
---@param found string
---@param bitwise boolean  calls whose kernels are exact must give the same bits
---@return table  { compared =, alone = }: how many calls have a counterpart, and how many have none, because their inputs
---  differ
---@return table[]  the operators that differ, in the order of their first calls: { op, calls, error, beyond, first, by },
---  by: the kernels of the call that `first` describes
---@return table[]  the kernels: { symbol, approximate, same, other }, same, other: calls with and without the same bits
function M.compare(expected, found, bitwise)
  local known, counts, by_op, list, kernels = {}, { compared = 0, alone = 0 }, {}, {}, {}
  for text in io.lines(expected) do
    local kind, symbol = text:match "^kernel (%S+) (%S+)$"
    if kind then kernels[#kernels + 1] = { symbol = symbol, approximate = kind == "approximate", same = 0, other = 0 }
    else
      local line, by = text:match "^(.*) by ([%d ]+)$"
      line = line or text
      local key = line:match "^%S+ %S+"
      known[key] = known[key] or {}
      known[key][line] = by or ""
    end
  end
  for line in io.lines(found) do
    local call, want, by = parse(line), nil, nil
    for text, launched in pairs(known[call.key] or {}) do
      local other = parse(text)
      if text == line or not want and same_kind(call, other) then want, by = other, launched end
      if text == line then break end
    end
    local which = want and "compared" or "alone"
    counts[which] = counts[which] + 1
    local names, exact = {}, bitwise and #kernels > 0     -- a call without kernels copies, or computes nothing
    for number in (by or ""):gmatch "%d+" do
      local k = kernels[tonumber(number)]
      if not names[number] then
        local same = want.text == line and "same" or "other"
        k[same] = k[same] + 1
        names[#names + 1], names[number] = k.symbol, true
        exact = exact and not k.approximate
      end
    end
    for k, output in ipairs(want and want.text ~= line and call or {}) do
      if output.hash ~= want[k].hash then
        local off, text = difference(want[k], output)
        local o = by_op[call.op]
        if not o then
          o = { op = call.op, calls = 0, error = 0 }
          by_op[call.op], list[#list + 1] = o, o
        end
        o.calls, o.error = o.calls + 1, math.max(o.error, off)
        local beyond = exact or off > (MOST[output.dtype] or 0)
        if not o.first or beyond and not o.beyond then
          o.first = ("output %d, %s %s: %s"):format(k, output.dtype, output.shape, text)
          o.by = names[1] and table.concat(names, ", ") or "none"
        end
        o.beyond = o.beyond or beyond
      end
    end
  end
  return counts, list, kernels
end

--- Runs the specs and writes the operators' results to a new file. Returns whether they passed within `limit` seconds.
local function run(file, limit, device)
  os.remove(file)
  -- Errors that a kernel finds are raised at once here, not as that spec expects; copysign takes the sign of a NaN.
  local child = process.start({ "busted", "--filter-out=out.of.range", "--filter-out=copysign", unpack(M.SPECS) }, { stdout = file .. ".log", stderr = file .. ".err",
    env = { MOONSHARD_CUDA_RESULTS = file, MOONSHARD_PTX_LAUNCHED = device == "ptx" and file or false,
      MOONSHARD_CUBLAS = "off", MOONSHARD_CUDNN = "off", MOONSHARD_CUDA = device } })
  local passed = child:wait(limit) == 0
  if not passed then
    print(process.read(file .. ".log") .. process.read(file .. ".err") .. "results.lua: the specs failed, or did not end")
  end
  os.remove(file .. ".log")
  os.remove(file .. ".err")
  return passed
end

if arg[0]:find "results%.lua$" then
  if arg[1] == "--expected" then
    if run(arg[2], 3600, "ptx") then M.name_kernels(arg[2])
    else os.remove(arg[2]) end                                       -- some calls' results are missing
    os.exit(io.open(arg[2]) and 0 or 1)
  end
  local found = arg[2] or os.tmpname()
  if not arg[2] then run(found, 600) end
  -- The emulated GPU's own kernels call the C library's functions.
  local counts, list, kernels = M.compare(arg[1], found, os.getenv "MOONSHARD_CUDA" ~= "emulated")
  if not arg[2] then os.remove(found) end
  local beyond, exact, rounded = 0, 0, 0
  for k, o in ipairs(list) do
    if k == 1 then print(("first difference: %s, %s"):format(o.op, o.first)) end
    print(("%-40s %5d calls differ, relative error %.3g%s"):format(o.op, o.calls, o.error,
      o.beyond and (", TOO MUCH: %s (kernels %s)"):format(o.first, o.by) or ""))
    beyond = beyond + (o.beyond and 1 or 0)
  end
  for _, k in ipairs(kernels) do
    if k.same > 0 and k.other == 0 then exact = exact + 1
    elseif k.approximate and k.other > 0 then rounded = rounded + 1 end
  end
  print(("%d calls compared, %d have other inputs; %d operators differ, %d of them too much"):format(counts.compared,
    counts.alone, #list, beyond))
  print(("%d kernels: %d give the executor's bits in each call, %d with approximate instructions do not"):format(#kernels,
    exact, rounded))
  os.exit(beyond == 0 and counts.compared > counts.alone and 0 or 1)
end
return M
