-- SPDX-License-Identifier: MIT
--- Attention against plain loops in float64: edges of tiles, few queries over many keys, masks, shared keys, threads.
local F = require "moonshard.core.ffi"
local ms = require "moonshard"
local lib, sdpa = F.lib, ms.nn.F.scaled_dot_product_attention

local TOLERANCE = { float32 = 4e-6, float64 = 1e-13, bfloat16 = 2 ^ -7, float16 = 2 ^ -10 }

--- softmax(q k^T / sqrt(d) + mask) v of lists of rows. A row without allowed keys gives zeros.
local function loops(q, k, v, mask, causal)
  local out, d = {}, #q[1]
  for i, row in ipairs(q) do
    local s, top, sum, o = {}, -math.huge, 0, {}
    for j = 1, #k do
      local x = 0
      for c = 1, d do x = x + row[c] * k[j][c] end
      local m = mask and mask[i][j]
      if causal and j > i or m == false then m = -math.huge end
      s[j] = m == -math.huge and m or x / math.sqrt(d) + (tonumber(m) or 0)
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
                mask and mask:tolist(), causal)
              ms.testing.assert_close(got:to "float64", ms.tensor(want, { dtype = "float64" }),
                { rtol = TOLERANCE[dtype], atol = TOLERANCE[dtype] })
            end)
          end
        end
      end)
    end
  end

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
    for _, size in ipairs { { 2, 3, 130, 130, 64 }, { 1, 2, 1, 3000, 64 }, { 2, 1, 4, 1100, 80 } } do
      local B, H, T, S, D = unpack(size)
      local q, k, v = ms.randn(B, H, T, D), ms.randn(B, H, S, D), ms.randn(B, H, S, D)
      local first
      for threads = 1, 4 do
        lib.ms_set_num_threads(threads)
        local leaves = {}
        for i, t in ipairs { q, k, v } do leaves[i] = t:clone():requires_grad_(true) end
        local out = sdpa(leaves[1], leaves[2], leaves[3])
        out:square():sum():backward()
        local all = { out:detach(), leaves[1].grad, leaves[2].grad, leaves[3].grad }
        first = first or all
        for i = 1, 4 do assert.is_true(all[i]:equal(first[i]), ("%d threads, number %d"):format(threads, i)) end
      end
    end
  end)
end)
