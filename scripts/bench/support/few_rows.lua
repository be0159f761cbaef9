-- SPDX-License-Identifier: MIT
--- scripts/bench/gemm --rows: y = x W^T with few rows of x, as in decoding. Such a product reads W once, so its bar is
--- a share of the rate at which this machine reads memory. Each run goes over as many copies of W as fill BYTES, so
--- that W comes from memory, not from a cache, and the read rate is measured over the same bytes with as many threads
--- in the same run. (A processor with a larger third-level cache serves both partly from there.) Above some number of
--- rows the limit is arithmetic, not memory: then the bar is a share of that. A vector of halves or int8 also takes two
--- instructions to convert (widen, and shift or convert), on AVX-512 on the ports that multiply: the share of the roof
--- of all these operations is printed as a comment.
---
--- Where PyTorch is installed (python3, or the interpreter that MOONSHARD_PEER_PYTHON names), its products over as many
--- copies follow (support/peer_products.py).
local support = require "bench"
local ms = require "moonshard"
local ffi = require "ffi"

local BYTES = 512 * 2 ^ 20
local SHAPES = { { 768, 3072 }, { 4096, 4096 } }       -- columns of x, columns of y
local SIZE = { float32 = 4, bfloat16 = 2, float16 = 2, int8 = 1 }   -- int8: of W; x is bfloat16

local function words(text)
  local list = {}
  for word in text:gmatch "[^,]+" do list[#list + 1] = tonumber(word) or word end
  return list
end

---@param bench Bench
---@param peer_seconds fun(names: string[], copies: integer): table<string, number>  seconds of the cases in PyTorch
return function(bench, peer_seconds)
  local given, bytes = bench.given, bench.quick and 2 ^ 21 or BYTES
  for _, threads in ipairs(words(given.threads)) do
    ms.set_num_threads(threads)
    for _, shape in ipairs(SHAPES) do
      local k, n = unpack(shape)
      for _, dtype in ipairs(words(given.types)) do
        local copies = math.max(1, math.floor(bytes / (k * n * SIZE[dtype])))
        local all, used = ms.empty(copies, n, k, { dtype = dtype }), copies * k * n * SIZE[dtype]
        local one, q, scale = ms.randn(1, n, k) / math.sqrt(k), nil, nil
        if dtype == "int8" then q, scale = ms.nn.utils.quantize_rows(one:select(1, 1)) end
        all:copy_(q or one:to(dtype))
        local from, views = ffi.cast("const char *", support.pointer(all)), {}
        for c = 1, copies do views[c] = all:select(1, c) end
        local names, cases = {}, { { ("read %s %d x %d, %d threads"):format(dtype, k, n, threads),
          function() support.read(from, used, threads) end, bytes = used } }
        for _, rows in ipairs(words(given.rows)) do
          local x = ms.randn(rows, k):to(scale and "bfloat16" or dtype)
          local function product(w) return scale and ms.nn.F.int8_linear(x, w, scale) or ms.nn.F.linear(x, w) end
          names[#names + 1] = ("%s,%d,%d,%d,NT,%d"):format(dtype, rows, k, n, threads)
          cases[#cases + 1] = { ("%s %d rows, %d x %d, %d threads"):format(dtype, rows, k, n, threads), bytes = used,
            flops = 2 * rows * k * n * copies, rows = rows, function()
              for c = 1, copies do ms.scope(product, views[c]) end
            end }
        end
        local results = bench:alternate(cases, { runs = 7 })
        local peer = peer_seconds(names, copies)
        local memory = results[cases[1][1]].best
        for c = 2, #cases do
          local own = results[cases[c][1]]
          local limit = math.max(memory, cases[c].flops / (bench.fma_float32 * threads))
          bench:bar(cases[c][1] .. ", limit / time", limit / own.best, ">=", 0.8)
          local rows = cases[c].rows
          local operations = cases[c].flops / (bench.fma_float32 * threads) * (rows + (dtype == "float32" and 0 or 2)) / rows
          bench:print(("# %.2f of the memory's rate; %.2f of the roof of operations, conversions included"):format(
            memory / own.best, operations / own.best))
          local theirs = peer[names[c - 1]]
          if theirs then bench:bar(cases[c][1] .. ", PyTorch's time / ours", theirs / own.best, ">=", 1.2) end
        end
        all:release()
      end
    end
  end
end
