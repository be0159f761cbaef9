-- SPDX-License-Identifier: MIT
--- Products at sizes that the generic specs do not reach: panels, blocks, oneDNN; the memory of products, attention and
--- fused losses; heads of projections; masks that are recomputed.
local F = require "moonshard.core.ffi"
local ms = require "moonshard"
local nn = ms.nn
local ffi, lib = F.ffi, F.lib

local function read(t)
  local id, n = t.id, t:numel()
  local buffer = ffi.new("double[?]", math.max(n, 1))
  assert(lib.ms_read(id, buffer, n) == 0)
  return buffer
end

--- The bytes that fn allocates at most beyond those held before, with its kernels' scratch memory, and its results.
local function peak(fn)
  local m = ffi.new "ms_memory[1]"
  lib.ms_reset_peak_memory(0)
  lib.ms_memory_stats(0, m)
  local before = m[0].allocated
  local result = fn()
  lib.ms_memory_stats(0, m)
  return m[0].peak_allocated - before + m[0].peak_scratch, result
end

local TOLERANCE = { float32 = 2e-6, float64 = 1e-14, bfloat16 = 2 ^ -8, float16 = 2 ^ -11 }

describe("products:", function()
  before_each(function() ms.manual_seed(5) end)

  -- { m, n, k }: edges of tiles and panels, several depths of panel, several blocks of rows and of columns.
  local SIZES = { { 1, 100, 64 }, { 3, 50, 700 }, { 130, 100, 200 }, { 257, 1000, 193 }, { 64, 97, 401 },
    { 5, 300, 2000 }, { 46, 421, 1300 }, { 35, 29, 40 }, { 1025, 1030, 1024 } }

  for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
    it(("matmul of %s is the sum of products, whichever sides are transposed"):format(dtype), function()
      ms.no_grad(function()
        for _, size in ipairs(SIZES) do
          local m, n, k = unpack(size)
          if k ~= 1024 or dtype == "float32" or dtype == "bfloat16" then
            for turn = 0, 3 do
              ms.scope(function()
                local left, right = turn % 2 == 1, turn >= 2
                local a = (left and ms.randn(k, m) or ms.randn(m, k)):to(dtype)
                local b = (right and ms.randn(n, k) or ms.randn(k, n)):to(dtype)
                local va, vb = read(a), read(b)
                local got = read((left and a:transpose(1, 2) or a):matmul(right and b:transpose(1, 2) or b))
                for probe = 0, 150 do
                  local i, j = (probe * 37) % m, (probe * 101) % n
                  if probe == 0 then i, j = m - 1, n - 1 end
                  local sum, size_of = 0, 0
                  for p = 0, k - 1 do
                    local term = va[left and p * m + i or i * k + p] * vb[right and j * k + p or p * n + j]
                    sum, size_of = sum + term, size_of + math.abs(term)
                  end
                  local away = math.abs(got[i * n + j] - sum)
                  if not (away <= TOLERANCE[dtype] * math.max(math.abs(sum), size_of / 8)) then
                    error(("%d x %d x %d, turn %d: element %d, %d is %.9g, expected %.9g"):format(m, n, k, turn, i, j,
                      got[i * n + j], sum))
                  end
                end
              end)
            end
          end
        end
      end)
    end)
  end

  it("have equal bits with any number of threads, and in float32 and float64 also for operands in any order of memory", function()
    local threads = lib.ms_num_threads()
    local ok, message = pcall(ms.no_grad, function()
      for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
        -- The last two: parts of C for each thread, of rows and of columns, the last of them smaller.
        for _, size in ipairs { { 17, 900, 700 }, { 700, 50, 530 }, { 333, 1100, 600 }, { 1370, 260, 90 },
          { 40, 2700, 1050 } } do
          ms.scope(function()
            local m, n, k = unpack(size)
            local a, b, first = ms.randn(m, k):to(dtype), ms.randn(n, k):to(dtype):transpose(1, 2), nil
            local row = ms.randn(n):to(dtype)
            for turn = 0, 3 do
              if turn % 2 == 1 then b = turn == 1 and b:contiguous() or b:t():contiguous():t() end
              if turn == 2 then a = a:t():contiguous():t() end
              if a:element_size() == 2 then first = nil end     -- oneDNN may sum in another order
              for _, t in ipairs { 1, 2, 5 } do
                ms.set_num_threads(t)
                local y = ms.cat({ a:matmul(b), nn.F.linear(a, b:t(), row) })
                local bits = ffi.string(lib.ms_data_ptr(y.id), y:numel() * y:element_size())
                first = first or bits
                assert(bits == first, ("%s %d x %d x %d, turn %d: other bits with %d threads"):format(dtype, m, n, k,
                  turn, t))
              end
            end
          end)
        end
      end
    end)
    ms.set_num_threads(threads)
    assert(ok, message)
  end)

  it("make no float32 copy of half-precision tensors", function()
    -- Large compared with the blocks that two threads convert at a time, whose size is the same for all products.
    local threads = lib.ms_num_threads()
    finally(function() lib.ms_set_num_threads(threads) end)
    lib.ms_set_num_threads(math.min(threads, 2))
    local x, w = ms.randn(8192, 512):to "bfloat16", ms.randn(512, 512):to "bfloat16"
    local ids = ms.randint(0, 512, { 8192 }, { dtype = "int64" })
    local copy = 8192 * 512 * 4
    ms.no_grad(function()
      for name, fn in pairs {
        linear = function() return nn.F.linear(x, w) end,
        softmax = function() return nn.F.softmax(x, 2) end,
        layer_norm = function() return nn.F.layer_norm(x, { 512 }) end,
        cross_entropy = function() return nn.F.cross_entropy(x, ids) end,
        attention = function()
          local q = x:view(32, 256, 8, 64):transpose(2, 3)
          return nn.F.scaled_dot_product_attention(q, q, q, { is_causal = true })
        end,
      } do
        ms.scope(function()
          local bytes = peak(fn)
          assert.is_true(bytes < copy / 2 + copy / 4, ("%s held %d bytes beyond its inputs; a copy has %d"):format(name,
            bytes, copy))
        end)
      end
    end)
  end)
end)

describe("attention:", function()
  before_each(function() ms.manual_seed(6) end)

  it("holds memory linear in T, backward too", function()
    local function bytes(T)
      return (peak(function()
        return ms.scope(function()
          local q = ms.randn(1, 2, T, 32):requires_grad_(true)
          nn.F.scaled_dot_product_attention(q, q, q, { is_causal = true }):sum():backward()
        end)
      end))
    end
    lib.ms_set_num_threads(1)
    local short, long = bytes(1024), bytes(4096)
    assert.is_true(long < 4.1 * short, ("%d and %d bytes"):format(short, long))
    assert.is_true(long < 4096 * 4096 * 4, ("%d bytes: the scores alone have %d"):format(long, 4096 * 4096 * 4))
  end)

  it("splits a projection into heads, and merges them again", function()
    local x = ms.randn(2, 5, 24, { dtype = "float64", requires_grad = true })
    for _, in_scope in ipairs { false, true } do
      local function split_and_merge()
        local parts = { nn.F.split_heads(x, 2) }
        for k, part in ipairs(parts) do
          assert.are.same({ 2, 2, 5, 4 }, { unpack(part.shape) })
          parts[k] = nn.F.merge_heads(part)
        end
        return ms.cat(parts, 3)
      end
      local y = in_scope and ms.scope(split_and_merge) or split_and_merge()
      assert.is_true(y:equal(x))
      assert.is_true(ms.testing.gradcheck(function() return in_scope and ms.scope(split_and_merge)
        or split_and_merge() end, { x }))
    end
  end)

  for _, heads in ipairs { 1, 2 } do
    it(("gives a projection the gradient of its %d head%s, as if they were tensors of their own"):format(heads,
      heads == 1 and "" or "s"), function()
      local sdpa, x, weight = nn.F.scaled_dot_product_attention, ms.randn(2, 5, 24), ms.randn(2, heads, 5, 8 / heads)
      for name, use in pairs {
        alone = function(q, k, v) return sdpa(q, k, v, { is_causal = true }) end,
        ["with a part that is used twice"] = function(q, k, v) return sdpa(q, k, v) + k end,
        ["with parts in another order"] = function(q, k, v) return sdpa(v, q, k) end,
        ["with a part that is used for two"] = function(q, _, v) return sdpa(q, v, v) end,
        ["with a hook on a part"] = function(q, k, v)
          v:register_hook(function(g) return g * 2 end)
          return sdpa(q, k, v)
        end,
      } do
        local function gradient(separate)
          local leaf = x:clone():requires_grad_(true)
          local parts = { nn.F.split_heads(leaf, heads) }
          for k = 1, 3 do parts[k] = separate and parts[k]:clone() or parts[k] end
          for _ = 1, 2 do (use(unpack(parts)) * weight):sum():backward { retain_graph = true } end
          return leaf.grad
        end
        assert.is_true(gradient(false):equal(gradient(true)), name)
      end
    end)
  end

  it("gives leaves that lie in one tensor gradients of their own", function()
    local whole, weight = ms.randn(2, 5, 24), ms.randn(2, 1, 5, 8)
    local leaves = { {}, {} }
    for k = 1, 3 do
      local part = whole:narrow(3, 8 * k - 7, 8):unsqueeze(2)
      leaves[1][k], leaves[2][k] = part:detach():requires_grad_(true), part:clone():detach():requires_grad_(true)
    end
    for _, parts in ipairs(leaves) do
      for _ = 1, 2 do (nn.F.scaled_dot_product_attention(unpack(parts)) * weight):sum():backward() end
      parts[1].grad:zero_()
    end
    for k = 1, 3 do assert.is_true(leaves[1][k].grad:equal(leaves[2][k].grad), "part " .. k) end
  end)

  for _, width in ipairs { 1, 3, 9 } do
    it(("takes values of %d numbers for queries of 5"):format(width), function()
      local o = { dtype = "float64", requires_grad = true }
      local q, k, v = ms.randn(2, 6, 5, o), ms.randn(2, 4, 5, o), ms.randn(2, 4, width, o)
      local want = nn.F.softmax(q:matmul(k:transpose(-1, -2)) / math.sqrt(5), -1):matmul(v)
      ms.testing.assert_close(nn.F.scaled_dot_product_attention(q, k, v), want, { rtol = 1e-12, atol = 1e-12 })
      assert.is_true(ms.testing.gradcheck(function(a, b, c) return nn.F.scaled_dot_product_attention(a, b, c,
        { is_causal = true }) end, { q, k, v }))
    end)
  end

  it("names the given shapes if values of another width do not fit", function()
    local q, k = ms.randn(2, 3, 4), ms.randn(2, 5, 4)
    for _, v in ipairs { ms.randn(2, 6, 7), ms.randn(1, 5, 7), ms.randn(2, 6, 3) } do
      local why = select(2, pcall(nn.F.scaled_dot_product_attention, q, k, v))
      assert.matches(", got [2, 3, 4], [2, 5, 4], " .. tostring(v.shape), why, 1, true)
    end
  end)

  it("takes a scale of 0: every key counts the same", function()
    for _, width in ipairs { 4, 7 } do
      local q, k, v = ms.randn(2, 3, 4), ms.randn(2, 5, 4), ms.randn(2, 5, width)
      ms.testing.assert_close(nn.F.scaled_dot_product_attention(q, k, v, { scale = 0 }),
        v:mean(2, { keepdim = true }):expand(2, 3, width))
    end
  end)

  it("drops a share p of the probabilities, and scales the others", function()
    local q, v = ms.zeros(1, 200, 16), ms.ones(1, 300, 16)
    local out = nn.F.scaled_dot_product_attention(q, ms.zeros(1, 300, 16), v, { dropout_p = 0.25 })
    local mean = out:mean():item()
    assert.is_true(math.abs(mean - 1) < 0.01, tostring(mean))
    assert.is_true(out:std():item() > 0.01)
  end)
end)

describe("dropout:", function()
  it("keeps 1 - p of the elements, scaled, and the same ones in backward", function()
    ms.manual_seed(8)
    local x = ms.ones(100003, { requires_grad = true })
    local y = nn.F.dropout(x, 0.3, { training = true })
    y:sum():backward()
    assert.is_true(x.grad:equal(y:detach()))
    local kept = y:ne(0):to("float32"):mean():item()
    assert.is_true(math.abs(kept - 0.7) < 0.005, tostring(kept))
    assert.is_true(math.abs(y:max():item() - 1 / 0.7) < 1e-6)
  end)
end)

describe("cross_entropy:", function()
  it("keeps one number per row; its gradient is the only large tensor that backward makes", function()
    local logits = ms.randn(512, 1000, { requires_grad = true })
    local ids = ms.randint(0, 1000, { 512 }, { dtype = "int64" })
    local whole = 512 * 1000 * 4
    lib.ms_set_num_threads(1)
    local forward, loss = peak(function() return nn.F.cross_entropy(logits, ids) end)
    assert.is_true(forward < whole / 20, ("forward held %d bytes"):format(forward))
    local backward = peak(function() loss:backward() end)
    assert.is_true(backward < 1.05 * whole, ("backward held %d bytes, the gradient has %d"):format(backward, whole))
  end)
end)
