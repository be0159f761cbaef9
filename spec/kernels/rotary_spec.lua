-- SPDX-License-Identifier: MIT
--- Rotary positions, alone and after an RMSNorm, in one pass: the numbers of the operators that they replace.
local F = require "moonshard.core.ffi"
local ms = require "moonshard"
local ops = require "moonshard.nn.ops"
local ffi, lib = F.ffi, F.lib

local function bits(t)
  t = t:contiguous()
  return ffi.string(lib.ms_data_ptr(t.id), t:numel() * t:element_size())
end

local function turned(x, cos, sin)
  local half, D = cos:size(-1), x:size(-1)
  local a, b = x:narrow(-1, 1, half), x:narrow(-1, half + 1, half)
  local parts = { a * cos - b * sin, b * cos + a * sin }
  if 2 * half < D then parts[3] = x:narrow(-1, 2 * half + 1, D - 2 * half) end
  return ms.cat(parts, -1)
end

-- Inputs and the shape of their angles: a row, odd sizes, many pairs, views of a projection, angles for each text.
local CASES = {
  { function(kind) return ms.randn({ 1, 2 }, kind) end, { 1, 1 } },
  { function(kind) return ms.randn({ 2, 3, 5, 9 }, kind) end, { 5, 3 } },
  { function(kind) return ms.randn({ 3, 40, 130 }, kind) end, { 40, 65 } },
  { function(kind) return ms.randn({ 2, 7, 5 * 16 }, kind):reshape(2, 7, 5, 16):transpose(2, 3):narrow(2, 2, 3) end,
    { 2, 1, 7, 8 } },
  { function(kind) return ms.randn({ 2, 3, 8, 5 }, kind):transpose(3, 4) end, { 5, 4 } },
  { function(kind) return ms.randn({ 2, 1, 2, 3, 4, 6 }, kind) end, { 4, 2 } },
}

describe("rotary", function()
  before_each(function() ms.manual_seed(4) end)

  for _, dtype in ipairs { "float32", "float64" } do
    it("has the bits of products and sums, on any number of threads: " .. dtype, function()
      local threads = ms.get_num_threads()
      for _, case in ipairs(CASES) do
        local kind = { dtype = dtype }
        local x, angles = case[1](kind), ms.rand(case[2], kind) * 6
        local cos, sin, w = angles:cos(), angles:sin(), ms.rand({ x:size(-1) }, kind) + 0.5
        local want = bits(turned(x, cos, sin))
        local normed = bits(turned(ms.nn.F.rms_norm(x, w, { eps = 1e-6 }), cos, sin))
        for _, t in ipairs { 1, 2, 3 } do
          ms.set_num_threads(t)
          assert.is_true(bits(ops.rotary(x, cos, sin)) == want)
          assert.is_true(bits(ops.rotary(x, cos, sin, w, 1e-6)) == normed)
        end
        ms.set_num_threads(threads)
      end
    end)
  end

  for _, dtype in ipairs { "bfloat16", "float16" } do
    it("rounds once: " .. dtype, function()
      for _, case in ipairs(CASES) do
        local x, angles = case[1] { dtype = "float32" }, ms.rand(case[2]) * 6
        x = x:to(dtype)
        local want = turned(x:float(), angles:cos(), angles:sin()):to(dtype)
        assert.is_true(bits(ops.rotary(x, angles:cos(), angles:sin())) == bits(want))
      end
    end)
  end

  it("turns gradients back, through the norm", function()
    local x, w = ms.randn(2, 3, 5, 8, { requires_grad = true }), ms.rand(8, { requires_grad = true })
    local angles, weights = ms.rand(5, 4) * 6, ms.randn(2, 3, 5, 8)
    local function gradients(y)
      x.grad, w.grad = nil, nil
      (y * weights):sum():backward()
      return x.grad:clone(), w.grad:clone()
    end
    local dx, dw = gradients(ops.rotary(x, angles:cos(), angles:sin(), w, 1e-6))
    local want_dx, want_dw = gradients(turned(ms.nn.F.rms_norm(x, w, { eps = 1e-6 }), angles:cos(), angles:sin()))
    ms.testing.assert_close(dx, want_dx)
    ms.testing.assert_close(dw, want_dw)
  end)

  it("says what does not fit", function()
    local x, a = ms.ones(2, 5, 8), ms.ones(5, 4)
    for text, arguments in pairs {
      ["sine must be"] = { x, a, ms.ones(5, 3) },
      ["cosine must be .* %[4, 4%]"] = { x, ms.ones(4, 4), ms.ones(4, 4) },
      ["at most 4 pairs"] = { x, ms.ones(5, 5), ms.ones(5, 5) },
      ["cosine must be float32"] = { x, a:double(), a:double() },
      ["weight must be float32 %[8%]"] = { x, a, a, ms.ones(7), 1e-6 },
    } do
      local ok, message = pcall(ops.rotary, unpack(arguments))
      assert.is_false(ok)
      assert.matches(text, message)
    end
  end)
end)
