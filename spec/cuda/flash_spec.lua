-- SPDX-License-Identifier: MIT
--- Attention in tiles on the GPU (kernels/cuda/attention/flash.cu): its results compared with the CPU's in float64, the
--- tiles that it visits, and the memory that it takes.
local ms = require "moonshard"
local on_gpu = require "spec.support.on_gpu"()

local function relative(got, expected)
  expected = expected:to "cpu"
  return ((got:to("cpu"):to "float64" - expected):norm() / expected:norm()):item()
end

--- Output and gradients of attention for q, k, v and the output's gradient. given.attn_mask is copied to the device.
local function attend(tensors, device, dtype, given)
  local x = {}
  local options = {}
  for name, value in pairs(given) do options[name] = name == "attn_mask" and value:to(device) or value end
  given = options
  ms.manual_seed(7)
  for k = 1, 3 do
    x[k] = tensors[k]:to(device):to(dtype):detach()
    x[k].requires_grad = true
  end
  local out = ms.nn.F.scaled_dot_product_attention(x[1], x[2], x[3], given)
  out:backward(tensors[4]:to(device):to(dtype))
  return { out:detach(), x[1].grad, x[2].grad, x[3].grad }
end
--- q [B, H, T, D], k and v [B, K or H, S, D], and a gradient like q; in memory heads follow T or S.
local function random(B, H, T, S, D, dtype, K)
  local out = {}
  for k, length in ipairs { T, S, S, T } do
    out[k] = ms.randn({ B, length, (k == 2 or k == 3) and K or H, D }):to(dtype):transpose(2, 3)
  end
  return out
end

describe("attention in tiles", function()
  for _, case in ipairs {
    { 1, 2, 70, 70, 64, "bfloat16", true }, { 1, 1, 70, 130, 64, "float16", false },
    { 2, 1, 130, 70, 32, "bfloat16", true }, { 1, 1, 65, 131, 40, "bfloat16", true },
    { 1, 1, 65, 67, 128, "bfloat16", false }, { 1, 2, 67, 65, 96, "float16", true },
    { 1, 1, 1, 1, 8, "bfloat16", true }, { 1, 1, 3, 64, 64, "bfloat16", false },
    { 1, 1, 64, 128, 128, "float16", false },
  } do
    local B, H, T, S, D, dtype, causal = unpack(case)
    on_gpu(("is right for %d x %d heads, %d queries, %d keys of %d, %s%s"):format(B, H, T, S, D, dtype,
      causal and ", causal" or ""), function()
      local x = random(B, H, T, S, D, dtype)
      local got = attend(x, "cuda", dtype, { is_causal = causal })
      local expected = attend(x, "cpu", "float64", { is_causal = causal })
      for k, name in ipairs { "the output", "dq", "dk", "dv" } do
        -- The gradients of q and k for one key are rounding errors around 0.
        if T * S > 1 or k == 1 or k == 4 then
          local e = relative(got[k], expected[k])
          assert.is_true(e < (dtype == "bfloat16" and 4e-3 or 6e-4), ("%s: %g"):format(name, e))
        end
      end
    end)
  end

  local function some(n)                   -- each query sees its own key, and about half of the others
    return ms.rand({ n.T, n.S }):gt(0.5):logical_or(ms.eye(n.T, n.S):to "bool")
  end
  local altered = {
    { "a bool mask", 1, 2, 70, 131, 64, function(n) return { attn_mask = some(n) } end },
    { "a mask of padded keys", 2, 2, 66, 70, 128, function(n)
      local keys = ms.ones({ n.B, 1, 1, n.S }, { dtype = "bool" })
      keys:narrow(1, 2, 1):narrow(4, 41, n.S - 40):fill_(false)
      return { attn_mask = keys, is_causal = true }
    end },
    { "distances added to the scores of each head", 1, 3, 67, 67, 32, function(n)
      local i, j = ms.arange(0, n.T):reshape(n.T, 1), ms.arange(0, n.S):reshape(1, n.S)
      local slope = ms.tensor { 0.5, 0.25, 0.125 }:reshape(n.H, 1, 1)
      return { attn_mask = (j - i):to "float32":reshape(1, n.T, n.S) * slope, is_causal = true, scale = 0.3 }
    end },
    { "the most negative number for whole rows", 1, 1, 65, 70, 64, function(n)
      local mask = ms.zeros { n.T, n.S }
      mask:narrow(1, 10, 3):fill_(-3.4028234663852886e38)
      return { attn_mask = mask }
    end, true },
    { "rows without an allowed key", 1, 1, 65, 70, 64, function(n)
      local mask = ms.ones({ n.T, n.S }, { dtype = "bool" })
      mask:narrow(1, 10, 3):fill_(false)
      return { attn_mask = mask }
    end },
    { "dropout", 1, 2, 70, 131, 64, function() return { dropout_p = 0.3 } end },
    { "dropout of all", 1, 1, 70, 70, 64, function() return { dropout_p = 1 } end },
    { "dropout, a mask and causality", 2, 1, 130, 130, 96, function(n)
      return { dropout_p = 0.1, attn_mask = some(n), is_causal = true }
    end },
  }
  for _, kind in ipairs { "float32", "float64", "float16", "bfloat16" } do
    for _, D in ipairs { 64, 96 } do
      altered[#altered + 1] = { ("a mask of %s, heads of %d"):format(kind, D), 1, 1, 20, 66, D,
        function(n) return { attn_mask = ms.randn(n.T, n.S):to(kind) } end }
    end
  end
  for _, case in ipairs(altered) do
    local what, B, H, T, S, D, options, forward_only = unpack(case)
    for _, dtype in ipairs { "bfloat16", "float16" } do
      on_gpu(("is right with %s, %s"):format(what, dtype), function()
        ms.manual_seed(3)
        local x = random(B, H, T, S, D, dtype)
        local given = options { B = B, H = H, T = T, S = S }
        local got, expected = attend(x, "cuda", dtype, given), attend(x, "cpu", "float64", given)
        for k, name in ipairs { "the output", "dq", "dk", "dv" } do
          if k == 1 or not forward_only then
            if given.dropout_p == 1 then
              assert.are.equal(0, got[k]:to("float32"):abs():max():item(), name)
            else
              local e = relative(got[k], expected[k])
              assert.is_true(e < (dtype == "bfloat16" and 5e-3 or 8e-4), ("%s: %g"):format(name, e))
            end
          end
        end
      end)
    end
  end

  -- float32 takes the path of products and rows of scores, the others tiles. K: heads of keys.
  for _, case in ipairs {
    { 2, 6, 2, 70, 130, 64, { is_causal = true, causal_offset = 60 } }, { 1, 4, 1, 65, 65, 96, {} },
    { 1, 4, 2, 1, 200, 64, { is_causal = true, causal_offset = 199 } },
    { 1, 2, 2, 150, 150, 64, { is_causal = true, window = 70 } },
    { 1, 2, 1, 150, 150, 128, { is_causal = true, window = 40, softcap = 1.5 } },
    { 1, 3, 1, 66, 70, 32, { softcap = 0.7, dropout_p = 0.2 } },
    { 1, 2, 1, 70, 66, 64, { is_causal = true, causal_offset = -3, softcap = 2, attn_mask = "bool" } },
    { 1, 2, 1, 20, 66, 64, { is_causal = true, causal_offset = 10, softcap = 2, attn_mask = "float" } },
    { 1, 2, 1, 70, 40, 64, { is_causal = true, causal_offset = -30 } },
    { 1, 2, 1, 3, 40, 8, { is_causal = true, causal_offset = -3 } },
    { 1, 2, 1, 3, 40, 8, { is_causal = true, causal_offset = 500, window = 9 } },
    -- Edges of windows, and tiles that attend to nothing, in each instance of the kernels: narrow and wide, altered or
    -- not.
    { 1, 2, 1, 100, 100, 96, { is_causal = true, window = 40 } },
    { 1, 2, 1, 100, 100, 64, { is_causal = true, window = 40, softcap = 1 } },
    { 1, 2, 1, 70, 9, 8, { is_causal = true, causal_offset = -70 } },
    { 1, 2, 1, 70, 9, 8, { is_causal = true, causal_offset = -70, softcap = 1 } },
    { 1, 2, 1, 70, 9, 96, { is_causal = true, causal_offset = -70 } },
    { 1, 2, 1, 70, 9, 96, { is_causal = true, causal_offset = -70, softcap = 1 } },
  } do
    local B, H, K, T, S, D, options = unpack(case)
    local names = {}
    for name, value in pairs(options) do names[#names + 1] = (", %s %s"):format(name, tostring(value)) end
    table.sort(names)
    local more = table.concat(names)
    on_gpu(("is right for %d heads that share %d, %d queries, %d keys of %d%s"):format(H, K, T, S, D, more), function()
      for dtype, most in pairs { bfloat16 = 5e-3, float16 = 8e-4, float32 = 2e-6 } do
        ms.manual_seed(5)
        local x, given = random(B, H, T, S, D, dtype, K), { enable_gqa = true }
        for name, value in pairs(options) do given[name] = value end
        if given.attn_mask == "float" then given.attn_mask = ms.randn(T, S) end
        if given.attn_mask == "bool" then given.attn_mask = ms.rand(T, S):gt(0.3) end
        local got, expected = attend(x, "cuda", dtype, given), attend(x, "cpu", "float64", given)
        for k, name in ipairs { "the output", "dq", "dk", "dv" } do
          if expected[k]:norm():item() == 0 then
            assert.are.equal(0, got[k]:to("float32"):abs():max():item(), name)
          else
            local e = relative(got[k], expected[k])
            assert.is_true(e < most, ("%s, %s: %g"):format(dtype, name, e))
          end
        end
      end
    end)
  end

  on_gpu("takes no memory for scores with a mask and dropout", function()
    local T = 256
    local q = ms.randn({ 2, T, 64 }):to "bfloat16":to "cuda"
    local mask = ms.ones({ T, T }, { dtype = "bool", device = "cuda" })
    q.requires_grad = true
    ms.reset_peak_memory_stats "cuda"
    local before = ms.memory_stats "cuda".allocated
    local out = ms.nn.F.scaled_dot_product_attention(q, q, q, { attn_mask = mask, dropout_p = 0.1 })
    out:backward(ms.ones({ 2, T, 64 }, { dtype = "bfloat16", device = "cuda" }))
    -- 2 * 256 * 256 scores of float32 would take 512 KiB; each tensor takes 64 KiB.
    assert.is_true(ms.memory_stats "cuda".peak_allocated - before <= 7 * 65536 + 32768)
  end)

  on_gpu("reads views of one product in place, with a scale, without dimensions of heads", function()
    local qkv = ms.randn({ 66, 3 * 16 }):to "bfloat16"
    local function views(t)
      return ms.nn.F.scaled_dot_product_attention(t:narrow(2, 1, 16), t:narrow(2, 17, 16), t:narrow(2, 33, 16),
        { is_causal = true, scale = 0.7 })
    end
    assert.is_true(relative(views(qkv:to "cuda"), views(qkv:to "float64")) < 4e-3)
  end)

  on_gpu("gives misaligned views the same result up to rounding", function()
    local x = random(1, 1, 66, 66, 16, "bfloat16")
    local wide = ms.zeros({ 1, 1, 66, 17 }, { dtype = "bfloat16", device = "cuda" })
    local q = wide:narrow(4, 2, 16)
    q:copy_(x[1])
    local out = ms.nn.F.scaled_dot_product_attention(q, x[2]:to "cuda", x[3]:to "cuda")
    assert.is_true(relative(out, attend(x, "cpu", "float64", {})[1]) < 6e-3)
  end)

  on_gpu("repeats its gradients bit by bit", function()
    local x = random(1, 2, 130, 130, 64, "bfloat16")
    local first, second = attend(x, "cuda", "bfloat16", { is_causal = true }), attend(x, "cuda", "bfloat16", { is_causal = true })
    for k = 1, 4 do assert.are.equal(0, (first[k] - second[k]):abs():max():item()) end
  end)

  on_gpu("does not visit tiles that causality hides", function()
    -- The last 64 values are NaN. Queries before them give them probability 0, and 0 times NaN is NaN: their results
    -- are finite only if hidden tiles are not visited.
    local q = ms.randn({ 1, 192, 64 }):to "bfloat16":to "cuda"
    local v = q:clone()
    v:narrow(2, 129, 64):fill_(0 / 0)
    local out = ms.nn.F.scaled_dot_product_attention(q, q, v, { is_causal = true }):to "float32"
    local visible, hidden = out:narrow(2, 1, 128):sum():item(), out:narrow(2, 192, 1):sum():item()
    assert.is_true(visible == visible and hidden ~= hidden)
  end)

  on_gpu("takes one number per query beside its outputs", function()
    local T, bytes = 256, 2 * 256 * 64 * 2
    local q = ms.randn({ 2, T, 64 }):to "bfloat16":to "cuda"
    q.requires_grad = true
    local g = ms.ones({ 2, T, 64 }, { dtype = "bfloat16", device = "cuda" })
    local function extra(fn)
      ms.reset_peak_memory_stats "cuda"
      local before = ms.memory_stats "cuda".allocated
      fn()
      return ms.memory_stats "cuda".peak_allocated - before
    end
    local out
    local forward = extra(function() out = ms.nn.F.scaled_dot_product_attention(q, q, q) end)
    assert.is_true(forward <= bytes + 16384, forward)
    local backward = extra(function() out:backward(g) end)
    -- The memory of dq, dk, dv, and the sums of these that become q's gradient. The scores of both heads would take 512
    -- KiB.
    assert.is_true(backward <= 5 * bytes + 16384, backward)
  end)
end)
