-- SPDX-License-Identifier: MIT
--- Attention against plain loops in float64: edges of tiles, few queries over many keys, masks, shared keys, windows,
--- soft caps, caches, threads.
local F = require "moonshard.core.ffi"
local ms = require "moonshard"
local lib, sdpa = F.lib, ms.nn.F.scaled_dot_product_attention

local TOLERANCE = { float32 = 4e-6, float64 = 1e-13, bfloat16 = 2 ^ -7, float16 = 2 ^ -10 }

--- softmax(q k^T / sqrt(d) + mask) v of lists of rows. A row without allowed keys gives zeros. given: the options
--- is_causal, causal_offset, window and softcap.
local function loops(q, k, v, mask, given)
  local out, d = {}, #q[1]
  for i, row in ipairs(q) do
    local s, top, sum, o = {}, -math.huge, 0, {}
    for j = 1, #k do
      local x = 0
      for c = 1, d do x = x + row[c] * k[j][c] end
      x = x / math.sqrt(d)
      if given.softcap then x = given.softcap * (1 - 2 / (math.exp(2 * x / given.softcap) + 1)) end
      local m, last = mask and mask[i][j], given.is_causal and i + (given.causal_offset or 0) or #k
      if j > last or j <= last - (given.window or math.huge) or m == false then m = -math.huge end
      s[j] = m == -math.huge and m or x + (tonumber(m) or 0)
      top = math.max(top, s[j])
    end
    for c = 1, d do o[c] = 0 end
    for j = 1, #k do
      local e = s[j] == -math.huge and 0 or math.exp(s[j] - top)
      sum = sum + e
      for c = 1, d do o[c] = o[c] + e * v[j][c] end
    end
    for c = 1, d do o[c] = sum > 0 and o[c] / sum or 0 end
    out[i] = o
  end
  return out
end

--- A mask of T x S: "float", "bool", or "bool by key", the same for all queries. Rows 1 and T - 1 allow no key.
local function mask_of(kind, T, S)
  if kind == "bool by key" then return ms.rand(1, S):lt(0.7):expand { T, S } end
  local m = kind == "bool" and ms.rand(T, S):lt(0.7) or ms.randn(T, S)
  for _, row in ipairs { 1, T - 1 } do
    if row >= 1 then m:narrow(1, row, 1):fill_(kind == "bool" and 0 or -math.huge) end
  end
  return m
end

describe("attention of", function()
  before_each(function() ms.manual_seed(8) end)
  after_each(function() lib.ms_set_num_threads(2) end)

  for _, T in ipairs { 1, 3, 17, 65 } do
    for _, S in ipairs { 1, 3, 11, 65, 600 } do
      it(("%d queries over %d keys is that of plain loops, for widths 1, 5, 64 and 80"):format(T, S), function()
        for n, D in ipairs { 1, 5, 64, 80 } do
          for m, kind in ipairs { "none", "float", "bool", "bool by key" } do
            -- every width meets every mask; the dtypes take turns
            local causal, dtype = m < 3, ({ "float32", "float64", "bfloat16", "float16" })[(n + m + S) % 4 + 1]
            ms.scope(function()
              local x = {}
              for i, rows in ipairs { T, S, S } do x[i] = ms.randn(rows, D):to(dtype) end
              local mask = kind ~= "none" and mask_of(kind, T, S) or nil
              local got = sdpa(x[1], x[2], x[3], { attn_mask = mask, is_causal = causal })
              local want = loops(x[1]:to("float64"):tolist(), x[2]:to("float64"):tolist(), x[3]:to("float64"):tolist(),
                mask and mask:tolist(), { is_causal = causal })
              ms.testing.assert_close(got:to "float64", ms.tensor(want, { dtype = "float64" }),
                { rtol = TOLERANCE[dtype], atol = TOLERANCE[dtype] })
            end)
          end
        end
      end)
    end
  end

  -- Options beside the sizes: batch, heads, heads of keys, queries, keys, width.
  for _, case in ipairs {
    { 2, 4, 2, 1, 700, 16, {} }, { 1, 3, 1, 2, 70, 5, { causal_offset = 68 } }, { 2, 8, 1, 1, 1100, 64, {} },
    { 1, 16, 2, 4, 530, 33, { causal_offset = 526 } }, { 1, 71, 1, 1, 40, 8, {} },
    { 1, 20, 1, 7, 90, 16, { softcap = 1.5 } },
    { 2, 6, 3, 37, 37, 20, { is_causal = true } }, { 1, 4, 4, 70, 130, 24, { causal_offset = 60 } },
    { 1, 2, 1, 66, 66, 7, { window = 1 } }, { 1, 2, 2, 150, 150, 16, { window = 70 } },
    { 1, 4, 2, 3, 1400, 16, { causal_offset = 1300, window = 600, softcap = 2 } },
    { 1, 2, 1, 20, 9, 8, { causal_offset = -5, softcap = 0.5 } }, { 1, 2, 1, 3, 40, 8, { causal_offset = -3 } },
    { 1, 2, 1, 3, 40, 8, { causal_offset = 500 } }, { 1, 2, 1, 3, 40, 8, { causal_offset = 500, window = 9 } },
    { 3, 8, 1, 5, 3, 1, {} }, { 0, 4, 2, 3, 3, 4, {} }, { 1, 0, 2, 3, 3, 4, {} }, { 1, 4, 2, 0, 3, 4, {} },
    { 1, 4, 2, 3, 0, 4, {} },
  } do
    local B, H, K, T, S, D, given = unpack(case)
    local names = {}
    for name, value in pairs(given) do names[#names + 1] = (", %s %s"):format(name, tostring(value)) end
    table.sort(names)
    given.enable_gqa, given.is_causal = true, given.is_causal or given.causal_offset ~= nil or given.window ~= nil
    local more = table.concat(names)
    it(("%d x %d heads that share %d, %d queries, %d keys of %d%s"):format(B, H, K, T, S, D, more), function()
      for m, kind in ipairs { "none", "bool", "float" } do
        ms.scope(function()
          local dtype = ({ "float64", "float32", "bfloat16" })[(m + T + D) % 3 + 1]
          local q, k, v = ms.randn(B, H, T, D):to(dtype), ms.randn(B, K, S, D):to(dtype), ms.randn(B, K, S, D):to(dtype)
          given.attn_mask = kind ~= "none" and T * S > 0 and mask_of(kind, T, S) or nil
          local got, mask = sdpa(q, k, v, given), given.attn_mask and given.attn_mask:tolist()
          for b = 1, B do
            for h = 1, H do
              local kv = math.ceil(h * K / H)
              local function rows(x, at) return x:select(1, b):select(1, at):to("float64"):tolist() end
              local have, wide = got:select(1, b):select(1, h):to "float64", { dtype = "float64" }
              local want = T * S > 0 and ms.tensor(loops(rows(q, h), rows(k, kv), rows(v, kv), mask, given), wide)
                or ms.zeros({ T, D }, wide)
              ms.testing.assert_close(have, want, { rtol = TOLERANCE[dtype], atol = TOLERANCE[dtype] })
            end
          end
          -- the gradients: those of copies of the heads
          local leaves, copies = {}, {}
          for i, x in ipairs { q, k, v } do
            leaves[i] = x:to("float64"):detach():requires_grad_(true)
            copies[i] = x:to("float64"):detach():requires_grad_(true)
          end
          local weight, times = ms.randn({ B, H, T, D }, { dtype = "float64" }), H > 0 and H / K or 1
          ;(sdpa(leaves[1], leaves[2], leaves[3], given) * weight):sum():backward()
          if H > 0 then
            local x, y = copies[2]:repeat_interleave(times, 2), copies[3]:repeat_interleave(times, 2)
            ;(sdpa(copies[1], x, y, given) * weight):sum():backward()
            for i = 1, 3 do ms.testing.assert_close(leaves[i].grad, copies[i].grad, { rtol = 1e-12, atol = 1e-12 }) end
          else
            for i = 1, 3 do assert.are.equal(0, leaves[i].grad:abs():sum():item()) end
          end
        end)
      end
      given.attn_mask = nil
    end)
  end

  it("of NaN is NaN, for any number of queries", function()
    for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
      for _, n in ipairs { 1, 4, 15, 16, 70 } do
        local q, k = ms.full({ 1, 1, n, 8 }, 0 / 0):to(dtype), ms.randn(1, 1, 300, 8):to(dtype)
        assert.is_true(ms.nn.F.scaled_dot_product_attention(q, k, k):isnan():all():item(), dtype .. " " .. n)
      end
    end
  end)

  it("600 queries and keys has the values and gradients of softmax(q k^T) v", function()
    local results, x = {}, {}
    for k = 1, 4 do x[k] = ms.randn(2, 600, 32, { dtype = "float64" }) end
    for turn = 1, 2 do
      local q, k, v = x[1]:clone():requires_grad_(), x[2]:clone():requires_grad_(), x[3]:clone():requires_grad_()
      local scores = q:matmul(k:transpose(2, 3)) / math.sqrt(32)
      scores = scores:masked_fill(ms.ones(600, 600):triu(1):bool(), -math.huge)
      local out = turn == 1 and sdpa(q, k, v, { is_causal = true }) or scores:softmax(3):matmul(v)
      ;(out * x[4]):sum():backward()
      results[turn] = { out:detach(), q.grad, k.grad, v.grad }
    end
    for k = 1, 4 do ms.testing.assert_close(results[1][k], results[2][k], { rtol = 1e-10, atol = 1e-11 }) end
  end)

  it("a window, a soft cap and an offset has the gradients of finite differences", function()
    local o = { dtype = "float64", requires_grad = true }
    for _, size in ipairs { { 3, 17, 5, 14, 4 }, { 19, 21, 3, 2, 6 }, { 9, 70, 2, 50, 20 } } do
      local T, S, D, offset, window = unpack(size)
      ms.scope(function()
        local inputs = { ms.randn(2, T, D, o), ms.randn(1, S, D, o), ms.randn(1, S, D, o), ms.randn(T, S, o) }
        assert.is_true(ms.testing.gradcheck(function(q, k, v, mask)
          return sdpa(q, k, v, { attn_mask = mask, is_causal = true, causal_offset = offset, window = window,
            softcap = 1.5, enable_gqa = true })
        end, inputs))
      end)
    end
  end)

  it("the first rows of a cache is that of copies, and the rest is not read", function()
    for _, dtype in ipairs { "float32", "bfloat16", "float16" } do
      local cache = ms.full({ 2, 2, 2, 900, 32 }, 0 / 0, { dtype = dtype })
      local k, v = cache:select(1, 1):narrow(3, 1, 600), cache:select(1, 2):narrow(3, 1, 600)
      k:copy_(ms.randn(2, 2, 600, 32))
      v:copy_(ms.randn(2, 2, 600, 32))
      for _, T in ipairs { 1, 3, 40 } do
        local q = ms.randn(2, 4, T, 32):to(dtype)
        local given = { is_causal = true, causal_offset = 600 - T, enable_gqa = true }
        local want = sdpa(q, k:contiguous(), v:contiguous(), given)
        assert.is_true(sdpa(q, k, v, given):equal(want), dtype)
        assert.is_true(sdpa(q, cache:select(1, 1), cache:select(1, 2), given):equal(want), dtype)
      end
    end
  end)

  it("wrong options says which", function()
    local q, k = ms.randn(1, 4, 3, 8), ms.randn(1, 2, 5, 8)
    for why, given in pairs {
      ["causal_offset needs is_causal"] = { causal_offset = 2 }, ["window needs is_causal"] = { window = 2 },
      ["softcap must be greater than 0, got %-1"] = { softcap = -1 },
      ["'window' is a number %(0%), expected a whole number from 1"] = { window = 0 },
      ["'causal_offset' is a number %(0.5%), expected a whole number"] = { is_causal = true, causal_offset = 0.5 },
      ["enable_gqa lets keys and values have fewer heads than queries: got %[1, 4, 3, 8%], %[1, 2, 5, 8%]"] =
        { enable_gqa = false },
    } do
      if given.enable_gqa == nil then given.enable_gqa = true end
      local ok, text = pcall(sdpa, q, k, k, given)
      assert.is_false(ok)
      assert.matches(why, text)
    end
    assert.has_error(function() sdpa(q, ms.randn(1, 3, 5, 8), ms.randn(1, 3, 5, 8), { enable_gqa = true }) end)
  end)

  it("odd sizes has the gradients of finite differences, with and without masks", function()
    for _, size in ipairs { { 3, 17, 5 }, { 17, 3, 1 }, { 34, 9, 3 }, { 9, 66, 2 } } do
      local T, S, D = unpack(size)
      for m, kind in ipairs { "none", "float", "bool" } do
        ms.scope(function()
          local o = { dtype = "float64", requires_grad = true }
          local q, k, v = ms.randn(T, D, o), ms.randn(S, D, o), ms.randn(S, D, o)
          local mask, inputs = kind ~= "none" and mask_of(kind, T, S) or nil, { q, k, v }
          if kind == "float" then
            mask = ms.randn(T, S, o)
            inputs[4] = mask
          end
          assert.is_true(ms.testing.gradcheck(function(a, b, c, e)
            return sdpa(a, b, c, { attn_mask = e or mask, is_causal = m == 2 })
          end, inputs), ("%d queries, %d keys, mask %s"):format(T, S, kind))
        end)
      end
    end
  end)

  it("keys that are strided, shared or transposed is that of copies", function()
    local whole = ms.randn(2, 70, 3, 2, 48)
    for _, T in ipairs { 3, 70 } do
      local x = {}
      for i = 1, 3 do x[i] = whole:select(3, i):transpose(2, 3) end
      x[1] = x[1]:narrow(3, 1, T)
      local mask = ms.randn(70, T):transpose(1, 2)
      assert.is_true(sdpa(x[1], x[2], x[3], { attn_mask = mask }):equal(sdpa(x[1]:contiguous(), x[2]:contiguous(),
        x[3]:contiguous(), { attn_mask = mask:contiguous() })))
      local k = ms.randn(2, 1, 70, 48)
      local shared, copies = k:expand { 2, 2, 70, 48 }, k:expand({ 2, 2, 70, 48 }):contiguous()
      ms.testing.assert_close(sdpa(x[1], shared, shared), sdpa(x[1], copies, copies))
    end
  end)

  it("any size gives the same bits with 1, 2, 3 and 4 threads", function()
    for _, size in ipairs { { 2, 3, 3, 130, 130, 64 }, { 1, 2, 2, 1, 3000, 64 }, { 2, 1, 1, 4, 1100, 80 },
      { 1, 8, 2, 2, 1100, 64 }, { 1, 6, 3, 90, 90, 64 } } do
      local B, H, K, T, S, D = unpack(size)
      local q, k, v = ms.randn(B, H, T, D), ms.randn(B, K, S, D), ms.randn(B, K, S, D)
      local first
      for threads = 1, 4 do
        lib.ms_set_num_threads(threads)
        local leaves = {}
        for i, t in ipairs { q, k, v } do leaves[i] = t:clone():requires_grad_(true) end
        local out = sdpa(leaves[1], leaves[2], leaves[3], { enable_gqa = true })
        out:square():sum():backward()
        local all = { out:detach(), leaves[1].grad, leaves[2].grad, leaves[3].grad }
        first = first or all
        for i = 1, 4 do assert.is_true(all[i]:equal(first[i]), ("%d threads, number %d"):format(threads, i)) end
      end
    end
  end)
end)
