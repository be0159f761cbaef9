-- SPDX-License-Identifier: MIT
--- The static table of the CUDA kernels: what ptxas and the PTX report about each, for an H100 or H200 (sm_90),
--- without a GPU; and the limits that kernels must meet.
local cjson = require "cjson"
local ptx = require "ptx"
local M = {}

-- Limits of a multiprocessor (SM) of compute capability 9.0 (CUDA C++ Programming Guide, tables "Technical
-- Specifications per Compute Capability"; allocation units: CUDA Occupancy Calculator): registers are allocated by the
-- warp in units of 256, warps by the block in units of 4; a block takes 1 KiB of shared memory besides its own, in
-- units of 128 bytes.
local SM = { registers = 65536, warps = 64, blocks = 32, shared = 228 * 1024, processors = 132 }
M.SM = SM
M.FLIGHT = 20e3                -- bytes in flight that an SM needs to reach the full bandwidth

--- The number of blocks of `threads` threads that one SM holds.
function M.blocks_per_sm(threads, registers, shared)
  local warps = math.ceil(threads / 32)
  local each = math.ceil(math.max(registers, 1) * 32 / 256) * 256
  local by_registers = math.floor(math.floor(SM.registers / each / 4) * 4 / (math.ceil(warps / 4) * 4))
  local by_shared = math.floor(SM.shared / (math.ceil(shared / 128) * 128 + 1024))
  return math.min(SM.blocks, math.floor(SM.warps / warps), by_registers, by_shared)
end

-- The number of threads of a block if the kernel has no __launch_bounds__: BLOCK of kernels/cuda/cuda.h.
local THREADS = 256

local function set(text)
  local out = {}
  for word in text:gmatch "%S+" do out[word] = true end
  return out
end

local function read(path)
  local f = assert(io.open(path))
  local text = f:read "*a"
  f:close()
  return text
end

-- Shortens a kernel's signature: "void norm_kernel<float>(norm, int, …)" gives "norm_kernel<float>".
local function short(name)
  name = name:gsub("^void ", "")
  local depth = 0
  for at = 1, #name do
    local c = name:sub(at, at)
    if c == "<" then depth = depth + 1 elseif c == ">" then depth = depth - 1
    elseif c == "(" and depth == 0 and name:sub(at, at + 10) ~= "(anonymous " then return name:sub(1, at - 1) end
  end
  return name
end

-- Bytes that each kernel of a report of ptxas spills: { symbol = bytes }.
local function spilled(path)
  local out, symbol = {}, nil
  for line in io.lines(path) do
    symbol = line:match "Compiling entry function '([^']+)'" or symbol
    local stores, loads = line:match "(%d+) bytes spill stores, (%d+) bytes spill"
    if stores and symbol then out[symbol] = stores + loads end
  end
  return out
end

-- The rows of the table, from the PTX and the reports in a folder; stems: the names of the files of kernels/cuda.
local function read_rows(folder, stems)
  local rows = {}
  for _, stem in ipairs(stems) do
    local bodies = ptx.kernels(read(("%s/%s.ptx"):format(folder, stem)))
    local row
    local on_80 = spilled(("%s/%s.sm_80.log"):format(folder, stem))
    for line in io.lines(("%s/%s.log"):format(folder, stem)) do
      local symbol = line:match "Compiling entry function '([^']+)'"
      if symbol then
        row = ptx.analyse(bodies[symbol])
        row.file, row.symbol, row.threads = stem, symbol, row.threads or THREADS
        rows[#rows + 1] = row
      end
      local stack, stores, loads = line:match "(%d+) bytes stack frame, (%d+) bytes spill stores, (%d+) bytes spill"
      if stack and row then row.stack, row.spills = tonumber(stack), stores + loads + (on_80[row.symbol] or 0) end
      if row and line:find "Used %d+ registers" then
        row.registers = tonumber(line:match "Used (%d+) registers")
        row.shared = tonumber(line:match "(%d+) bytes smem" or 0)
        row.blocks = M.blocks_per_sm(row.threads, row.registers, row.shared)
        row = nil
      end
    end
  end
  local symbols = os.tmpname()
  local f = assert(io.open(symbols, "w"))
  for _, row in ipairs(rows) do f:write(row.symbol, "\n") end
  f:close()
  local names = assert(io.popen(("c++filt <'%s'"):format(symbols)))
  for _, row in ipairs(rows) do row.name = row.file .. ": " .. short(names:read "*l") end
  names:close()
  os.remove(symbols)
  table.sort(rows, function(a, b) return a.name < b.name end)
  local float = {}
  for _, row in ipairs(rows) do if row.name:find "<float" then float[row.name:match "^[^<]*"] = true end end
  for _, row in ipairs(rows) do
    row.exact = row.name:find "<long" ~= nil or row.name:find "<short" ~= nil
      or row.name:find "<double" ~= nil and float[row.name:match "^[^<]*"] == true
  end
  return rows
end

--- Compiles the kernels that have changed and reads the table. Returns nil and the reason where there is no nvcc;
--- raises if a kernel does not compile.
---@param root string   the repository, with a slash at its end
---@param build string  the build folder; PTX, logs and the table are kept in its folder sm_90
---@return table[]?  rows sorted by name: file, name, registers, stack, spills (also those on sm_80), shared, threads,
---  blocks (per SM), mma, classes, exact (an instance for integers, or for doubles if there is one for float32)
---@return string?
function M.rows(root, build)
  local folder = build .. "/sm_90"
  local log = os.tmpname()
  local status = os.execute(("'%sscripts/bench/support/ptx.sh' '%s' 2>'%s'"):format(root, folder, log))
  local text = read(log)
  os.remove(log)
  if status ~= 0 and status ~= true then
    if text:find "there is no nvcc" then return nil, "there is no nvcc" end
    error("the kernels cannot be compiled for sm_90:\n" .. text, 0)
  end
  local stems = {}
  local files = assert(io.popen(("find '%skernels/cuda' -name '*.cu' -printf '%%f\\n' | sort"):format(root)))
  for file in files:lines() do stems[#stems + 1] = file:match "^(.*)%.cu$" end
  files:close()
  -- It takes seconds to analyse the PTX, so the table is kept, with what it depends on: the keys of ptx.sh, and the
  -- texts of ptx.lua and of this file.
  local of = { read(root .. "scripts/bench/support/ptx.lua"), read(root .. "scripts/bench/support/kernel_table.lua") }
  for _, stem in ipairs(stems) do of[#of + 1] = stem .. " " .. read(("%s/%s.key"):format(folder, stem)) end
  of = table.concat(of, "\n")
  local kept = folder .. "/table.json"
  local f = io.open(kept)
  if f then
    local table_of = cjson.decode(f:read "*a")
    f:close()
    if table_of.of == of then return table_of.rows end
  end
  local rows = read_rows(folder, stems)
  local unique = os.tmpname()                           -- other processes may write the table, too
  local fresh = folder .. unique:match "/[^/]*$"
  f = assert(io.open(fresh, "w"))
  f:write(cjson.encode { of = of, rows = rows })
  f:close()
  assert(os.rename(fresh, kept))
  os.remove(unique)
  return rows
end

-- Kernels whose data of half types come with float32 numbers, loaded at the same time: states, statistics of rows.
local WITH_STATES = set "optim:optim_kernel norm:norm_rows_kernel"

-- The key of a row in the lists of kernels: "optim:optim_kernel" for "optim: optim_kernel<1>".
local function base_of(row) return (row.name:match "^[^<]*":gsub(" ", "")) end

--- Bytes in flight on one SM for a class of data: the bytes of one thread times the threads that the SM holds.
function M.flight(row, class)
  local half, float, bytes = row.classes.half, row.classes.float32, row.classes[class].flight
  if half and float and WITH_STATES[base_of(row)] then bytes = half.flight + float.flight end
  return bytes * row.threads * row.blocks
end

-- ---- limits -------------------------------------------------------------------------------------

--- Kernels that a step of GPT-2 launches, which must have no stack frame. spec/cuda/null_spec.lua checks that none is
--- missing here.
--- sort_scan_kernel is listed twice, because two files include it under one symbol.
M.MAIN = set [[
  flash:flash_kernel flash_backward:flash_queries_kernel flash_backward:flash_keys_kernel
  elementwise:dense_kernel elementwise:dense_any_kernel copy:fill_kernel copy:move_wide_kernel copy:arange_kernel
  embedding:take_rows_kernel embedding:add_rows_kernel embedding:sort_alone_kernel embedding:sort_count_kernel
  embedding:sort_scan_kernel sort:sort_scan_kernel embedding:sort_place_kernel
  optim:norm_kernel optim:norm_join_kernel optim:optim_kernel
  reduce:dense_columns_kernel reduce:join_kernel product:gelu_kernel
  norm:norm_kernel norm:norm_rows_kernel norm:norm_join_kernel
  loss:cross_kernel loss:cross_total_kernel loss:cross_finish_kernel loss:cross_backward_kernel
  loss:cross_chunk_kernel
]]

--- Kernels that move little data, that compute more than they move, or whose accesses depend on the data: no limits on
--- width and bytes in flight.
--- embedding:index_kernel and place_kernel move elements that each have a position of their own, or are not adjacent.
--- int8_dots and int8_widen read int8, which is in neither class.
M.SMALL = set [[
  reduce:begin_kernel reduce:join_kernel elementwise:truth_kernel elementwise:gamma_kernel
  norm:norm_join_kernel loss:cross_total_kernel loss:cross_finish_kernel mse:mse_join_kernel optim:norm_join_kernel
  loss:cross_rows_kernel loss:cross_join_kernel
  batch_norm:bn_scale_kernel batch_norm:bn_finish_kernel conv:bias_join_kernel embedding:sort_alone_kernel
  embedding:sort_count_kernel embedding:sort_scan_kernel embedding:sort_place_kernel embedding:index_kernel
  embedding:place_kernel product:product_kernel
  sort:sort_alone_kernel sort:sort_count_kernel sort:sort_scan_kernel sort:sort_place_kernel sort:write_sorted_kernel
  search:search_kernel search:count_kernel search:place_kernel
  recurrent:forward_kernel recurrent:leave_kernel recurrent:backward_kernel recurrent:unproject_kernel
  recurrent:cell_kernel
  fft:roots_kernel fft:chirp_kernel optim:adapt_kernel optim:choose_kernel optim:adapt_by_kernel
  ctc:loss_kernel ctc:gradient_kernel
  draws:gamma_kernel draws:poisson_kernel draws:slope_kernel
  int8:int8_dots int8:int8_widen int8:int8_finish
]]

--- Kernels for operands whose elements are not adjacent. A GPU moves at least 32 bytes for each element, so the bytes
--- that these kernels ask for say nothing about the bytes in flight.
--- Kernels that are neither in SMALL nor in STRIDED are streaming kernels, except for their instances for doubles and
--- integers (`exact`).
M.STRIDED = set [[
  elementwise:strided_kernel elementwise:all_kernel copy:move_kernel rows:softmax_kernel rows:softmax_backward_kernel
  reduce:rows_kernel reduce:columns_kernel reduce:find_kernel reduce:scan_lines_kernel scan:scan_lines_kernel
  scan:scan_block_kernel pooling:pool_kernel pooling:pool_backward_kernel
  resample:resample_kernel resample:resample_backward_kernel
  fft:read_kernel fft:pass_kernel fft:write_kernel
]]

--- Whether the kernel of a row combines partial results.
function M.joins(row) return row.name:find "_join_kernel" ~= nil or row.name:find ": join_kernel" ~= nil end

--- The limits that a kernel fails, sorted: "spills"; "stack" (kernels in MAIN); for streaming kernels "width CLASS" (no
--- access of 16 bytes) and "flight CLASS" (under 20 KB in flight on an SM), where CLASS is float32 or half.
function M.failures(row)
  local out = {}
  local base = base_of(row)
  if row.spills > 0 then out[#out + 1] = "spills" end
  if row.stack > 0 and M.MAIN[base] then out[#out + 1] = "stack" end
  if not M.SMALL[base] and not M.STRIDED[base] and not row.exact then
    for _, class in ipairs { "float32", "half" } do
      local c = row.classes[class]
      if c and c.width < 16 then out[#out + 1] = "width " .. class end
      if c and c.flight > 0 and M.flight(row, class) < M.FLIGHT then out[#out + 1] = "flight " .. class end
    end
  end
  table.sort(out)
  return out
end

--- Compares the table with a list of known exceptions { [kernel] = "limit, limit" }; keys are kernels without template
--- arguments, values the limits that at least one instance fails. Returns two lists of lines "kernel: limit": failures
--- that the list lacks, and entries that no longer fail.
function M.against(rows, known)
  local new, gone, listed, failing = {}, {}, {}, {}
  for name, limits in pairs(known) do
    for limit in limits:gmatch "[^,]+" do listed[("%s: %s"):format(name, limit:match "^%s*(.-)%s*$")] = true end
  end
  for _, row in ipairs(rows) do
    for _, limit in ipairs(M.failures(row)) do failing[("%s: %s"):format(row.name:match "^[^<]*", limit)] = true end
  end
  for line in pairs(failing) do if not listed[line] then new[#new + 1] = line end end
  for line in pairs(listed) do if not failing[line] then gone[#gone + 1] = line end end
  table.sort(new)
  table.sort(gone)
  return new, gone
end

return M
