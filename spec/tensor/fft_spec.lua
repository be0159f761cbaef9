-- SPDX-License-Identifier: MIT
--- ms.fft beyond PyTorch's numbers: sums of the definition for many lengths, long and prime ones, views, errors.
local ms = require "moonshard"
local fft = ms.fft

local F64 = { dtype = "float64" }
local function near(a, b, tolerance)
  local largest = (a - b):abs():max():item()
  assert(largest <= (tolerance or 1e-11), ("differ by %g"):format(largest))
end

-- The transform by its definition, a product with a matrix.
local function slow(z, sign)
  local n = z.shape[1]
  local j = ms.arange(0, n, 1, F64)
  local angle = (j:unsqueeze(2) * j:unsqueeze(1)):remainder(n) * (sign * 2 * math.pi / n)
  local c, s = angle:cos(), angle:sin()
  local x, y = fft.real(z), fft.imag(z)
  return fft.complex(c:mv(x) - s:mv(y), c:mv(y) + s:mv(x))
end

describe("fft", function()
  it("equals the sums of its definition, for every length to 40 and some beyond", function()
    ms.manual_seed(5)
    local sizes = {}
    for n = 1, 40 do sizes[n] = n end
    for _, n in ipairs { 64, 97, 121, 169, 210, 256, 323, 360 } do sizes[#sizes + 1] = n end
    for _, n in ipairs(sizes) do
      ms.scope(function()
        local z = ms.randn(n, 2, F64)
        near(fft.fft(z), slow(z, -1), 1e-9)
        near(fft.ifft(z, { norm = "forward" }), slow(z, 1), 1e-9)
        local x = ms.randn(n, F64)
        local whole = slow(fft.complex(x), -1)
        near(fft.rfft(x), whole:narrow(1, 1, math.floor(n / 2) + 1), 1e-9)
        near(fft.irfft(fft.rfft(x), { n = n }), x)
      end)
    end
  end)

  it("returns what it transformed, for long lines, primes and powers, in both dtypes", function()
    for _, n in ipairs { 4096, 10007, 30030, 2 ^ 17 } do
      ms.scope(function()
        local z = ms.randn(n, 2, F64)
        local there = fft.fft(z)
        near(fft.ifft(there), z)
        near(there:square():sum() / n, z:square():sum(), 1e-7)                -- Parseval
        near(fft.ifft(fft.fft(z:float())), z:float(), 2e-5)
      end)
    end
  end)

  it("transforms many lines, along any dimension, of views", function()
    local z = ms.randn(37, 12, 3, 2, F64)
    local moved = z:transpose(1, 3)
    near(fft.fft(z, { dim = 1 }), fft.fft(moved, { dim = 3 }):transpose(1, 3))
    near(fft.fft(z, { dim = 2 })[5]:select(2, 2), slow(z[5]:select(2, 2):contiguous(), -1))
    near(fft.rfft(fft.real(z), { dim = 2 }), fft.fft(fft.complex(fft.real(z)), { dim = 2 }):narrow(2, 1, 7))
    assert.are.equal(0, fft.fft(ms.zeros(0, 8, 2)):numel())
  end)

  -- Lines of 256 and more are transformed as matrices, shorter ones and columns 16 at a time.
  it("transforms lines and columns of every layout, complex and real, with gradients", function()
    for _, case in ipairs {
      { { 3, 256 }, 2 }, { { 2, 300 }, 2 }, { { 1, 1000 }, 2 }, { { 300, 19 }, 1 }, { { 19, 24 }, 2 },
      { { 33, 25 }, 2 }, { { 5, 24, 7 }, 2 }, { { 2, 300, 3 }, 2 }, { { 3, 338 }, 2 }, { { 2, 514 }, 2 },
      { { 514, 2 }, 1 }, { { 40, 300 }, 2, 21 }, { { 300, 40 }, 1, 21 }, { { 24, 40 }, 1, 17 },
      { { 40, 24 }, 2, 1 },
    } do
      ms.scope(function()
        local shape, d, kept = unpack(case)
        local x = ms.randn(shape, F64)
        if kept then x = x:narrow(3 - d, 3, kept) end                       -- a view
        local n, whole = x.shape[d], fft.fft(fft.complex(x), { dim = d })
        local lines = whole:transpose(d, #shape):reshape(-1, n, 2)
        local reals = x:transpose(d, #shape):reshape(-1, n)
        for _, k in ipairs { 1, math.ceil(lines.shape[1] / 2), lines.shape[1] } do
          near(lines[k], slow(fft.complex(reals[k]), -1), 1e-9)
        end
        local half = fft.rfft(x, { dim = d })
        near(half, whole:narrow(d, 1, math.floor(n / 2) + 1), 1e-10)
        near(fft.irfft(half, { dim = d, n = n }), x)
        near(fft.ifft(whole, { dim = d }), fft.complex(x))
        -- The gradient of a linear function's product with g, times its argument, is that product.
        for _, of in ipairs { { fft.rfft, x }, { function(h) return fft.irfft(h, { dim = d, n = n }) end, half } } do
          local z = of[2]:clone():requires_grad_(true)
          local result = of[1](z, of[1] == fft.rfft and { dim = d } or nil)
          local product = (result * ms.randn(result.shape, F64)):sum()
          product:backward()
          near((z.grad * z):sum():detach(), product:detach(), 1e-9)
        end
      end)
    end
  end)

  it("turns convolutions into products, with gradients", function()
    local x, k = ms.randn(8, F64):requires_grad_(true), ms.randn(8, F64):requires_grad_(true)
    local function circular(a, b) return fft.irfft(fft.mul(fft.rfft(a), fft.rfft(b)), { n = 8 }) end
    local expected = {}
    for i = 1, 8 do
      local sum = 0
      for j = 1, 8 do sum = sum + x[j]:item() * k[(i - j) % 8 + 1]:item() end
      expected[i] = sum
    end
    near(circular(x, k):detach(), ms.tensor(expected, F64))
    assert.is_true(ms.testing.gradcheck(circular, { x, k }))
    assert.is_true(ms.testing.gradcheck(function(a)
      return fft.abs(fft.fft2(fft.complex(a:reshape(2, 4), a:reshape(2, 4) + 1)))
    end, x))
  end)

  it("names what is wrong", function()
    local wrong = {
      { function() fft.fft(ms.ones(4)) end, "fft.fft: argument has shape [4], expected complex numbers: pairs (real, imaginary) in a last dimension of size 2" },
      { function() fft.fft(ms.ones(4, 3)) end, "as ms.fft.complex makes them" },
      { function() fft.fft(ms.ones(4, 2):half()) end, "fft.complex: the input is float16 [4, 2] cpu, expected float32 or float64" },
      { function() fft.rfft(ms.ones(4, { dtype = "int64" })) end, "fft.real: the input is int64 [4] cpu, expected float32 or float64" },
      { function() fft.fft(ms.ones(4, 2), { dim = 2 }) end, "fft.fft: dimension 2 is out of range, expected -1 to 1" },
      { function() fft.fft(ms.ones(4, 2), { n = 0 }) end, "fft.fft: option 'n' is a number (0), expected a whole number from 1" },
      { function() fft.fft(ms.ones(4, 2), { norm = "orto" }) end, "did you mean 'ortho'?" },
      { function() fft.fftn(ms.ones(4, 4, 2), { dim = { 1, -2 } }) end, "fft.fftn: option 'dim' names dimension 1 twice" },
      { function() fft.fftn(ms.ones(4, 4, 2), { dim = { 1 }, s = { 2, 2 } }) end, "fft.fftn: the length of option 's' is 2, expected the length of option 'dim', 1" },
      { function() fft.fft(ms.ones(0, 2)) end, "fft.fft: dimension 1 of [0, 2] has no elements" },
      { function() return fft.fft3 end, "unknown name in fft: 'fft3'; did you mean 'fft" },
    }
    for _, case in ipairs(wrong) do
      local ok, text = pcall(case[1])
      assert.is_false(ok)
      assert(text:find(case[2], 1, true), text)
      assert(text:find("fft_spec.lua:", 1, true), text)
    end
  end)
end)
