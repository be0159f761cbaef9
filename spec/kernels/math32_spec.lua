-- SPDX-License-Identifier: MIT
--- The float functions of kernels/formulas/math32.h compared with libm's in float64: errors in units in the last place
--- (ulp), over a sample of all magnitudes. libm has no erfinv: the float64 one of spec/golden is the reference.
local ffi = require "ffi"
local ms = require "moonshard"

ffi.cdef "double erf(double); double erfc(double);"

-- The ulp of a float of that value; all subnormal numbers have the smallest one.
local function ulp(x)
  local _, exponent = math.frexp(x)
  return 2 ^ math.max(exponent - 24, -149)
end

-- range: log10 of the largest argument; the smallest is 1e-30.
local FUNCTIONS = {
  { "exp", signed = true, range = 1.9, bound = 1 },
  { "log", range = 38, bound = 1 },
  { "tanh", signed = true, range = 1.5, bound = 3 },
  { "sin", signed = true, range = 38, bound = 3 },
  { "cos", signed = true, range = 38, bound = 3 },
  { "tan", signed = true, range = 38, bound = 4 },
  { "erf", signed = true, range = 1, bound = 1.03, of = ffi.C.erf },
  { "erfc", signed = true, range = 1.2, bound = 5, of = ffi.C.erfc },
  { "erfinv", signed = true, range = -0.001, bound = 4,
    of = function(x) return ms.erfinv(ms.tensor(x, { dtype = "float64" })):item() end },
}

describe("float32", function()
  for _, f in ipairs(FUNCTIONS) do
    local name = f[1]
    it(("%s is within %g units in the last place"):format(name, f.bound), function()
      ms.manual_seed(11)
      ms.scope(function()
        local exponents = ms.rand(20000, { dtype = "float64" }) * (30 + f.range) - 30
        local x = ((exponents * math.log(10)):exp()):float()
        if f.signed then x = x * (ms.rand(20000):gt(0.5):float() * 2 - 1) end
        local arguments, got = x:double():tolist(), x[name](x):double():tolist()
        local worst, at = 0, nil
        for k = 1, #got do
          local wanted = (f.of or math[name])(arguments[k])
          local off = math.abs(got[k] - wanted) / ulp(wanted)
          if not (off <= worst) then worst, at = off, arguments[k] end
        end
        assert.is_true(worst <= f.bound, ("%.2f units at %.9g"):format(worst, at or 0))
        assert.is_true(worst > 0.3)                     -- a smaller error would mean that both were computed alike
      end)
    end)
  end

  it("sine, cosine and tangent near multiples of pi / 2 keep their digits", function()
    -- 16367173 * 2^72 is very near to a multiple of pi / 2; the two reductions meet at 2^20.
    for _, v in ipairs { 16367173 * 2 ^ 72, 1e5, 2 ^ 20, 2 ^ 20 + 1, 2 ^ 21, 3.4e38, -1e30 } do
      local x = ms.tensor { v }
      for _, name in ipairs { "sin", "cos", "tan" } do
        local wanted = math[name](x:double():item())
        assert.near(wanted, x[name](x):double():item(), 4 * ulp(wanted), ("%s of %.9g"):format(name, v))
      end
    end
  end)

  it("sine and cosine of other elements have the same bits beside a large one, in gradients too", function()
    local x = ms.randn(1000) * 100
    local both = ms.cat({ x, ms.tensor { 1e30, math.huge, 0 / 0 } }, 1)
    for _, name in ipairs { "sin", "cos", "tan" } do
      local y = both[name](both)
      assert.is_true(y:narrow(1, 1, 1000):equal(x[name](x)))
      assert.is_true(y:narrow(1, 1002, 2):isnan():all():item())
      local a, b = x:clone():requires_grad_(), both:clone():requires_grad_()
      a[name](a):sum():backward()
      b[name](b):sum():backward()
      assert.is_true(b.grad:narrow(1, 1, 1000):equal(a.grad))
    end
  end)
end)
