-- SPDX-License-Identifier: MIT
--- Operators on rows for scripts/bench/kernels: 4096 rows of 1024 float32, one thread, beside exp or a copy of the same
--- bytes and, where it is installed, PyTorch (support/kernels/peer_rows.py).
local F = require "moonshard.core.ffi"
local engine = require "kernels.engine"
local ffi, lib = F.ffi, F.lib
local C = ffi.C

---@param bench Bench
return function(bench)
  local rows, cols = bench.quick and 64 or 4096, 1024
  local function f32(...) return engine.random(C.MS_F32, ...) end
  local x, g, w, b, stats = f32(rows, cols), f32(rows, cols), f32(cols), f32(cols), f32(rows, 2)
  local ids = engine.call "randint_" ({ engine.empty(C.MS_I64, rows) }, nil, { 0, cols })
  local lse = engine.call "logsumexp" ({ x }, { 1, 0 })
  local p, log_p = engine.call "softmax" ({ x }, { 1 }), engine.call "log_softmax" ({ x }, { 1 })
  local one = engine.call "select" ({ f32(1) }, { 0, 0 })
  local list = {}
  -- of, most: the bar, this case takes at most `most` times the time of case `of`.
  local function case(name, inputs, i, f, of, most)
    local fn = engine.caller(name)
    list[#list + 1] = { name, function()
      local a = fn(inputs, i, f)
      for j = 0, a.n_out - 1 do
        if a.out[j] ~= 0 then lib.ms_release(a.out[j]) end
      end
    end, of = of, most = most }
  end
  case("clone", { x })
  case("exp", { x })
  case("softmax", { x }, { 1 }, nil, "exp", 1.4)
  case("log_softmax", { x }, { 1 }, nil, "exp", 1.4)
  case("cross_entropy", { x, ids }, { 1, -100 }, { 0 }, "exp", 1.4)
  case("layer_norm", { x, w, b }, { 1 }, { 1e-5 }, "clone", 1.25)
  case("rms_norm", { x, w }, { 1 }, { 1e-5 }, "clone", 1.25)
  case("softmax_backward", { g, p }, { 1 })
  case("log_softmax_backward", { g, log_p }, { 1 })
  case("layer_norm_backward", { g, x, w, stats }, { 1, 7 }, { 1e-5 })
  case("rms_norm_backward", { g, x, w, stats }, { 1, 3 }, { 1e-5 })
  case("cross_entropy_backward", { one, x, ids, w, lse }, { 1, -100 }, { 0 })

  local results = bench:alternate(list, { runs = 9, warm = true })
  local peer = not bench.quick and bench:peer "kernels/peer_rows.py"
  local theirs = {}
  for seconds, name in (peer and peer { rows, cols } or ""):gmatch "seconds (%S+) (%S+)" do
    theirs[name] = tonumber(seconds)
  end
  for _, c in ipairs(list) do
    local name, best = c[1], results[c[1]].best
    if c.of then bench:bar(("%s / %s"):format(name, c.of), best / results[c.of].best, "<=", c.most) end
    if theirs[name] then bench:bar("PyTorch / " .. name, theirs[name] / best, ">=", 1.2) end
  end
end
