-- SPDX-License-Identifier: MIT
--- The table of scripts/bench/kernels: every kernel of the CPU.
local F = require "moonshard.core.ffi"
local engine = require "kernels.engine"
local ffi, lib = F.ffi, F.lib
local C = ffi.C
local call, random = engine.call, engine.random

-- The operands of kernels/cpu.lua, by name.
local function tensors(rows, cols)
  local n, side, images = rows * cols, 32, rows / 64
  local function integers(high, ...) return call "randint_" ({ engine.empty(C.MS_I64, ...) }, nil, { 0, high }) end
  local function f32(...) return random(C.MS_F32, ...) end
  local function half(...) return random(C.MS_BF16, ...) end
  local x, wide = f32(rows, cols), f32(rows, 2 * cols)
  local share = call "sigmoid" ({ x })
  local t = {
    dtype = { float32 = C.MS_F32, float64 = C.MS_F64, bfloat16 = C.MS_BF16, float16 = C.MS_F16, int64 = C.MS_I64,
      int32 = C.MS_I32, uint8 = C.MS_U8, bool = C.MS_BOOL },
    x = x, y = f32(rows, cols), h = half(rows, cols), k = half(rows, cols), q = random(C.MS_F16, rows, cols),
    d = random(C.MS_F64, rows / 2, cols), e = random(C.MS_F64, rows / 2, cols), target = f32(rows, cols), line = f32(n),
    x_half = f32(rows / 2, cols), h_half = half(rows / 2, cols),
    whole = integers(1000, rows / 2, cols), whole_target = integers(9, rows, cols),
    mask = call "gt_scalar" ({ x }, nil, { 0 }), mask_none = call "gt_scalar" ({ x }, nil, { 1e9 }),
    share = share, positive = call "add_scalar" ({ share }, nil, { 0.5 }),
    above = call "add_scalar" ({ share }, nil, { 1 }), inside = call "mul_scalar" ({ share }, nil, { 0.9 }),
    halves = call "slice" ({ wide }, { 1, 0, cols, 2 }), turned = call "transpose" ({ f32(cols, rows) }, { 0, 1 }),
    turned_half = call "transpose" ({ half(cols, rows) }, { 0, 1 }),
    permuted = call "transpose" ({ f32(rows / 64, 64, cols) }, { 1, 2 }),
    w = f32(cols), b = f32(cols), w_half = half(cols), b_half = half(cols), w_wide = random(C.MS_F64, cols),
    column = f32(rows, 1), stats = f32(rows, 2), lse = call "mul_scalar" ({ f32(rows) }, nil, { 0.1 }),
    ids = integers(cols, rows), table = f32(cols, cols), row_ids = integers(rows, rows),
    row_positions = call "expand" ({ integers(rows, rows, 1) }, { rows, cols }),
    ids_of_columns = integers(cols, cols), positions = integers(cols, rows, cols),
    sorted = call "arange_" ({ f32(1024) }, nil, { -2, 1 / 256 }),
    leaf = f32(rows, cols), images = f32(images, 64, side, side), channels = f32(64), side = side,
    one = call "select" ({ f32(1) }, { 0, 0 }), one_half = call "select" ({ half(1) }, { 0, 0 }),
  }
  lib.ms_set_requires_grad(t.leaf, 1)
  return t
end

-- A function that runs a case of kernels/cpu.lua once.
local function runs(c, leaf_id)
  if not c.gradient then
    local fn = engine.caller(c.op)
    return function()
      local a = fn(c.inputs, c.i, c.f)
      for j = 0, a.n_out - 1 do
        if a.out[j] ~= 0 and a.out[j] ~= c.inputs[1] then lib.ms_release(a.out[j]) end
      end
    end
  end
  local root = ffi.new("ms_id[1]", engine.check(lib.ms_call1(lib.ms_op_find(c.op), c.inputs[1])))
  local gradient, leaf, event = ffi.new("ms_id[1]", c.gradient), ffi.new("ms_id[1]", leaf_id), ffi.new "ms_event"
  return function()
    local run = lib.ms_grad(1, root, gradient, 1, leaf, 1, 0)
    if run == nil or lib.ms_run_next(run, event) ~= C.MS_RUN_DONE then error(ffi.string(lib.ms_error()), 0) end
    lib.ms_release(lib.ms_run_result(run, 0))
    lib.ms_run_free(run)
  end
end

--- Prints the table. Returns the seconds of PyTorch's cases by name; none where it is not installed.
---@param bench Bench
---@return table<string, number>
return function(bench)
  local rows, cols = bench.quick and 64 or 8192, 1024
  local t, isa = tensors(rows, cols), ffi.string(lib.ms_cpu_isa())
  local list, measured, n = require("kernels.cpu").cases(t, rows, cols, isa), {}, rows * cols
  for k, c in ipairs(list) do
    measured[k] = { c.name, runs(c, t.leaf) }
    c.bytes, c.ops = n * c.bytes, n / 16 * (c.ops or 0)
  end
  for _, c in ipairs(require("kernels.layers").cases(bench.quick, isa)) do
    list[#list + 1] = c
    measured[#measured + 1] = { c.name, c.run }
  end
  bench.silent = true
  local results = bench:alternate(measured, { runs = 4, least = 3e-3, warm = true })
  bench.silent = false

  local copy, instructions = 8 * n / results.clone.best, bench.fma_float32 / 2 / 16  -- instructions of 16 lanes
  local peer, theirs = not bench.quick and bench:peer "kernels/peer_rows.py", {}
  for seconds, name in (peer and peer { rows, cols } or ""):gmatch "seconds (%S+) ([^\n]+)" do theirs[name] = tonumber(seconds) end
  bench:print(("# %-42s %10s %10s %-6s %6s%s"):format("kernel", "ms", "limit, ms", "by", "times",
    peer and "  PyTorch, ms" or ""))
  local unexplained = 0
  for _, c in ipairs(list) do
    local time, bytes, ops = results[c.name].best, c.bytes / copy, c.ops / instructions
    local limit = math.max(bytes, ops)
    local times = time / limit
    local above = times > 1.5 and not c.why
    if above then unexplained = unexplained + 1 end
    bench:print(("# %-42s %10.3f %10.3f %-6s %6.2f%s%s"):format(c.name, time * 1e3, limit * 1e3, bytes >= ops and "bytes"
      or "ops", times, theirs[c.name] and ("  %11.3f"):format(theirs[c.name] * 1e3) or "", above and "  ABOVE"
      or times > 1.5 and "  " .. c.why or ""))
  end
  bench:bar("kernels above 1.5 times their limit", unexplained, "<=", 0)
  return theirs
end
