-- SPDX-License-Identifier: MIT
--- Sizes that the generic specs do not reach: tiles, segments, strips and threads of the CPU kernels, compared with
--- plain loops in double.
local F = require "moonshard.core.ffi"
local samples = require "spec.support.samples"
local ffi, lib = F.ffi, F.lib
local E = ffi.C
local one = samples.one

local DTYPES = { float32 = E.MS_F32, float64 = E.MS_F64, bfloat16 = E.MS_BF16, float16 = E.MS_F16, int64 = E.MS_I64,
  int32 = E.MS_I32, uint8 = E.MS_U8 }

local function empty(dtype, shape)
  return samples.must(lib.ms_empty(dtype, 0, #shape, ffi.new("int64_t[?]", #shape + 1, shape)), "ms_empty")
end

--- Small whole numbers, whose sums are exact in every dtype except the half ones.
local function whole(dtype, shape)
  return one("randint_", { empty(dtype, shape) }, nil, { 0, 8 })
end

--- All elements as a double array (from 0), and their number.
local function read(id)
  local n = samples.info(id).numel
  local buffer = ffi.new("double[?]", math.max(n, 1))
  samples.must(lib.ms_read(id, buffer, n) == 0, "ms_read")
  return buffer, n
end

local function same(got_id, expected, what, rtol)
  local got, n = read(got_id)
  for k = 0, n - 1 do
    if got[k] ~= expected[k] then
      local away = math.abs(got[k] - expected[k]) / math.max(1, math.abs(expected[k]))
      if away ~= away or away > (rtol or 0) then
        error(("%s: element %d is %.17g, expected %.17g"):format(what, k, got[k], expected[k]), 2)
      end
    end
  end
end

--- Strides of a row-major shape.
local function row_major(shape)
  local stride, n = {}, 1
  for d = #shape, 1, -1 do
    stride[d] = n
    n = n * shape[d]
  end
  return stride, n
end

--- For each element of a permuted view its position in the tensor (from 0), and their number; equal for all dtypes.
local known = {}
local function permuted(of, dims)
  local key = table.concat(of, " ") .. ", " .. table.concat(dims, " ")
  if known[key] then return unpack(known[key]) end
  local shape, stride = {}, row_major(of)
  for d, from in ipairs(dims) do shape[d] = of[from + 1] end
  local _, n = row_major(shape)
  local positions, index = ffi.new("int32_t[?]", n), {}
  for d = 1, #shape do index[d] = 0 end
  for k = 0, n - 1 do
    local at = 0
    for d = 1, #shape do at = at + index[d] * stride[dims[d] + 1] end
    positions[k] = at
    for d = #shape, 1, -1 do
      index[d] = index[d] + 1
      if index[d] < shape[d] then break end
      index[d] = 0
    end
  end
  known[key] = { positions, n }
  return positions, n
end

describe("large tensors:", function()
  -- With one thread, because a second one would spin when the machine is busy; the blocks are the same with more
  -- threads (see bits, below).
  local scope
  local threads = lib.ms_num_threads()
  before_each(function()
    lib.ms_set_num_threads(1)
    scope = lib.ms_scope_open "large_spec"
    lib.ms_rng_set(11, 0)
  end)
  after_each(function()
    lib.ms_set_num_threads(threads)
    lib.ms_scope_close(scope, nil, 0)
  end)

  for _, name in ipairs { "float32", "float64", "bfloat16", "int32", "uint8" } do
    local dtype = DTYPES[name]
    it(("a copy of a permuted %s tensor has its elements in their places"):format(name), function()
      for _, case in ipairs { { { 300, 257 }, { 1, 0 } }, { { 33, 70, 41 }, { 2, 0, 1 } },
        { { 33, 70, 41 }, { 0, 2, 1 } },
                              { { 17, 3, 5, 331 }, { 3, 1, 0, 2 } }, { { 40000, 3 }, { 1, 0 } },
                                { { 5, 16000 }, { 1, 0 } } } do
        local x = whole(dtype, case[1])
        local values = read(x)
        local view = one("permute", { x }, case[2])
        local from, n = permuted(case[1], case[2])
        local expected = ffi.new("double[?]", n)
        for k = 0, n - 1 do expected[k] = values[from[k]] end
        same(one("contiguous", { view }), expected, "contiguous")
        same(one("cast", { view }, { E.MS_F32 }), expected, "cast")
        local back = empty(dtype, case[1])
        one("copy_", { one("permute", { back }, case[2]), one("contiguous", { view }) })
        same(back, values, "copy into a permuted view")
      end
    end)
  end

  it("sums of strided, broadcast and mixed operands are those of the elements", function()
    for _, shapes in ipairs { { { 300, 257 }, { 257 } }, { { 300, 257 }, { 300, 1 } }, { { 40000, 3 }, { 40000, 1 } },
      { { 7, 1, 600 }, { 23, 1 } } } do
      local in_a, in_b                                    -- the positions of each element's operands
      for _, pair in ipairs { { "float32", "float32" }, { "float32", "bfloat16" }, { "bfloat16", "bfloat16" },
        { "int32", "int64" }, { "float64", "float32" } } do
        local a, b = whole(DTYPES[pair[1]], shapes[1]), whole(DTYPES[pair[2]], shapes[2])
        local va, vb = read(a), read(b)
        local sum = one("add", { a, b })
        local shape = samples.info(sum).shape
        local _, n = row_major(shape)
        local expected = ffi.new("double[?]", n)
        local sa, sb = row_major(shapes[1]), row_major(shapes[2])
        local first = not in_a
        if first then in_a, in_b = ffi.new("int32_t[?]", n), ffi.new("int32_t[?]", n) end
        for k = 0, first and n - 1 or -1 do
          local rest, i, j = k, 0, 0
          for d = #shape, 1, -1 do
            local at = rest % shape[d]
            rest = math.floor(rest / shape[d])
            local da, db = d - #shape + #shapes[1], d - #shape + #shapes[2]
            if da > 0 and shapes[1][da] ~= 1 then i = i + at * sa[da] end
            if db > 0 and shapes[2][db] ~= 1 then j = j + at * sb[db] end
          end
          in_a[k], in_b[k] = i, j
        end
        for k = 0, n - 1 do expected[k] = va[in_a[k]] + vb[in_b[k]] end
        same(sum, expected, pair[1] .. " + " .. pair[2])
      end
    end
  end)

  local reductions = {
    sum = function(list) local s = 0 for _, x in ipairs(list) do s = s + x end return s end,
    max = function(list) return math.max(unpack(list)) end,
    var = function(list)
      local m, v = 0, 0
      for _, x in ipairs(list) do m = m + x / #list end
      for _, x in ipairs(list) do v = v + (x - m) ^ 2 end
      return v / (#list - 1)
    end,
    norm = function(list) local s = 0 for _, x in ipairs(list) do s = s + x * x end return math.sqrt(s) end,
    logsumexp = function(list) local s = 0 for _, x in ipairs(list) do s = s + math.exp(x) end return math.log(s) end,
  }
  for _, name in ipairs { "sum", "max", "var", "norm", "logsumexp" } do
    it(name .. " over each dimension, however it lies in memory", function()
      for _, dtype in ipairs { "float32", "bfloat16" } do
        for _, shape in ipairs { { 70, 600 }, { 1100, 17 }, { 3, 5000 }, { 13, 20, 33 } } do
          local x = whole(DTYPES[dtype], shape)
          for turn = 1, 2 do
            local order, s = {}, {}
            for d = 1, #shape do order[d] = turn == 1 and d - 1 or #shape - d end
            local view = one("permute", { x }, order)
            for d = 1, #shape do s[d] = shape[order[d] + 1] end
            local values = read(view)
            for d = 1, #s do
              local after, before = 1, 1
              for k = d + 1, #s do after = after * s[k] end
              for k = 1, d - 1 do before = before * s[k] end
              local expected, list = ffi.new("double[?]", before * after), {}
              for o = 0, before - 1 do
                for i = 0, after - 1 do
                  for k = 0, s[d] - 1 do list[k + 1] = values[(o * s[d] + k) * after + i] end
                  for k = #list, s[d] + 1, -1 do list[k] = nil end
                  expected[o * after + i] = reductions[name](list)
                end
              end
              local i, f = { 0, d - 1 }, nil
              if name == "max" or name == "logsumexp" then i = { d - 1, 0 } end
              if name == "norm" then f = { 2 } end
              local got = one(name, { view }, i, f)
              same(got, expected, ("%s of %s over %d of %s"):format(name, dtype, d, table.concat(s, "x")),
                dtype == "bfloat16" and 0x1p-8 or 1e-6)
            end
          end
        end
      end
    end)
  end

  it("max gives the first position of its value", function()
    for _, shape in ipairs { { 300, 257 }, { 5000, 3 }, { 2, 20000 } } do
      local x = whole(E.MS_F32, shape)
      local values = read(x)
      for d = 1, 2 do
        local out = samples.call("max", { x }, { d - 1, 0 })
        local best, at = read(out[1]), (read(out[2]))
        for m = 0, shape[3 - d] - 1 do
          local function element(k) return d == 2 and values[m * shape[2] + k] or values[k * shape[2] + m] end
          local first = 0
          while element(first) ~= best[m] do first = first + 1 end
          assert.are.equal(first, at[m])
        end
      end
    end
    local flat = whole(E.MS_F32, { 100000 })
    one("copy_", { one("narrow", { flat }, { 0, 70001, 1 }), samples.tensor(E.MS_F32, {}, { 0 / 0 }) })
    assert.are.equal(70001, samples.read(one("argmax", { flat }))[1])              -- NaN is the largest
  end)

  it("whole sums are exact: 300,001 integers, half types through float32", function()
    for _, dtype in ipairs { "int64", "int32", "uint8", "float64", "float32", "bfloat16", "float16" } do
      local x = whole(DTYPES[dtype], { 300001 })
      local values, n = read(x)
      local s, most = 0, -1
      for k = 0, n - 1 do s = s + values[k] most = math.max(most, values[k]) end
      local got = samples.read(one("sum", { x }))[1]
      local slack = dtype == "bfloat16" and s / 256 or dtype == "float16" and math.huge or 0
      assert.is_true(math.abs(got - s) <= slack, dtype .. " " .. got .. " " .. s)
      assert.are.equal(most, samples.read(one("max_all", { x }))[1])
    end
  end)

  it("cumsum, gather, scatter_add_, index_select and its gradient on many lines", function()
    local x, ids = whole(E.MS_F32, { 700, 90 }), one("randint_", { empty(E.MS_I64, { 5000 }) }, nil, { 0, 700 })
    local values, where = read(x), read(ids)
    local expected = ffi.new("double[?]", 5000 * 90)
    for d = 0, 1 do
      for r = 0, 699 do
        for c = 0, 89 do
          local k = r * 90 + c
          local before = d == 0 and (r > 0 and expected[k - 90] or 0) or d == 1 and (c > 0 and expected[k - 1] or 0)
          expected[k] = before + values[k]
        end
      end
      same(one("cumsum", { x }, { d }), expected, "cumsum")
    end
    for r = 0, 4999 do
      for c = 0, 89 do expected[r * 90 + c] = values[where[r] * 90 + c] end
    end
    local picked = one("index_select", { x, ids }, { 0 })
    same(picked, expected, "index_select")
    local wide = one("expand", { one("unsqueeze", { ids }, { 1 }) }, { 5000, 90 })
    same(one("gather", { x, wide }, { 0 }), expected, "gather")
    local total = ffi.new("double[?]", 700 * 90)
    for r = 0, 4999 do
      for c = 0, 89 do
        local k = where[r] * 90 + c
        total[k] = total[k] + expected[r * 90 + c]
      end
    end
    local into = one("zero_", { empty(E.MS_F32, { 700, 90 }) })
    same(one("scatter_add_", { into, wide, picked }, { 0 }), total, "scatter_add_")
    assert.is_nil((samples.call("index_select", { x, samples.tensor(E.MS_I64, { 1 }, { 700 }) }, { 0 })))
  end)

  it("a part is filled with the random numbers of its place in the whole", function()
    for _, case in ipairs { { "rand_", { -1, 3 } }, { "randn_", { 0, 1 } }, { "trunc_normal_", { 0, 1, -2, 2 } },
      { "randint_", { 0, 1000 } } } do
      lib.ms_rng_set(5, 9)
      local all = read(one(case[1], { empty(E.MS_F32, { 40003 }) }, nil, case[2]))
      for _, part in ipairs { { 0, 7 }, { 1, 40002 }, { 12345, 20000 }, { 40002, 1 } } do
        lib.ms_rng_set(5, 9)
        local got = read(one(case[1], { empty(E.MS_F32, { part[2] }) }, { part[1] }, case[2]))
        for k = 0, part[2] - 1 do
          if got[k] ~= all[part[1] + k] then error(("%s: place %d"):format(case[1], part[1] + k)) end
        end
      end
    end
  end)

  it("half types never reach the upper bound of a uniform fill", function()
    for _, dtype in ipairs { "float16", "bfloat16" } do
      local values, n = read(one("rand_", { empty(DTYPES[dtype], { 100000 }) }, nil, { 0, 1 }))
      for k = 0, n - 1 do assert(values[k] >= 0 and values[k] < 1) end
    end
  end)
end)
