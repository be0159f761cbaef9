-- SPDX-License-Identifier: MIT
--- Edge values, as in PyTorch, which tensor/walk_spec does not draw: limits, rounding, gradients (also semantics_spec).
local ms = require "moonshard"

local F = ms.nn.F
local nan, inf = 0 / 0, math.huge

local function tensor(values, dtype) return ms.tensor(values, { dtype = dtype }) end

--- The elements as text, so that NaN equals NaN.
local function text(t)
  local function each(x)
    if type(x) == "table" then
      local list = {}
      for k, v in ipairs(x) do list[k] = each(v) end
      return "[" .. table.concat(list, " ") .. "]"
    end
    if type(x) == "boolean" then return tostring(x) end
    if x ~= x then return "nan" end
    return ("%.6g"):format(x)
  end
  local value = t.ndim == 0 and t:item() or t:tolist()
  return t.dtype .. " " .. each(value)
end

local function check(rows)
  for _, row in ipairs(rows) do
    it(row[1], function() assert.are.equal(row[2], text(row[3]())) end)
  end
end

describe("elementwise values:", function()
  check {
    { "exp of the largest and the smallest", "float32 [inf 0 3.4028e+38 1.4013e-45]",
      function() return tensor({ 89, -104, 88.72283, -103 }):exp() end },
    { "log of a subnormal", "float32 [-102.586]", function() return tensor({ 2.8e-45 }):log() end },
    { "clamp to a limit that is NaN", "float32 [nan nan nan]", function() return tensor({ -1, 0, inf }):clamp(nan, 1) end },
    { "clamp to an upper limit that is NaN", "float64 [nan nan]", function() return tensor({ -1, 0 }, "float64"):clamp_max(nan) end },
    { "clamp to tensors", "float32 [[1 2 3] [4 4 nan]]", function()
      local low, high = tensor({ { 1, 1, 1 }, { 1, 1, nan } }), tensor({ { 3 }, { 4 } })
      return tensor({ { 0, 2, 9 }, { 9, 5, 0 } }):clamp(low, high)
    end },
    { "clamp to a number and a tensor, the upper of which is lower", "float32 [0 1]",
    function() return tensor({ 5, -5 }):clamp(2, tensor({ 0, 1 })) end },
    { "clamp of integers to a tensor of real numbers", "float32 [0.5 2]",
    function() return tensor({ 0, 2 }, "int64"):clamp(tensor({ 0.5, 0.5 })) end },
    { "logit", "float32 [nan -inf inf 0 nan]", function() return tensor({ nan, 0, 1, 0.5, 1.5 }):logit() end },
    { "polygamma at infinity", "float32 [0 nan inf]", function() return tensor({ inf, -inf, 0 }):polygamma(1) end },
    { "float16 overflows to infinity", "float16 [inf -inf 65504]",
    function() return tensor({ 60000, -60000, 32752 }, "float16") * 2 end },
    { "float16 rounds to even and keeps subnormals", "float16 [2048 2052 5.96046e-08]",
      function() return tensor({ 2049, 2051, 6e-8 }):to "float16" end },
    { "bfloat16 rounds to even and keeps NaN", "bfloat16 [256 258 nan inf]",
      function() return tensor({ 256.5, 257.5, nan, 3.4e38 }):to "bfloat16" end },
  }
end)

describe("types of results:", function()
  check {
    { "functions of integers are real", "float32 [1 2.71828]", function() return tensor({ 0, 1 }, "int64"):exp() end },
    { "integer powers", "int64 [8 -27 1 0]", function() return tensor({ 2, -3, 5, 2 },
    "int64") ^ tensor({ 3, 3, 0, -1 }, "int64") end },
    { "a sum of bools counts those that are true", "int64 2", function() return tensor({ true, true, false }):sum() end },
    { "uint8 wraps around", "uint8 [0 254]",
    function() return tensor({ 255, 0 }, "uint8") + tensor({ 1, 254 }, "uint8") end },
  }
end)

describe("reductions at the edges:", function()
  check {
    { "var with a correction that is no whole number", "float64 [2.7451 2.7451]", function()       -- 14/3 / 1.7
      return tensor({ { 1, 2, 4 }, { 5, 6, 8 } }, "float64"):var(2, { correction = 1.3 })
    end },
    { "std with a correction of half an element", "float32 [1.36626]",
    function() return tensor({ 1, 2, 4 }):std(1, { correction = 0.5, keepdim = true }) end },
    { "var with too large a correction", "float32 inf", function() return tensor({ 1, 2, 4 }):var { correction = 3.5 } end },
    { "diff of order 0", "int64 [1 2 4]", function() return tensor({ 1, 2, 4 }, "int64"):diff(0, { append = tensor({ 9 }, "int64") }) end },
    { "histc of large equal numbers", "float32 [0 0 2 0]", function() return tensor({ 1e17, 1e17 }):histc(4) end },
    { "histc between equal ends counts from the lowest to the highest element", "float32 [2 0 1]",
    function() return tensor({ 1, 1.5, 4 }):histc(3, 2, 2) end },
    { "histc of numbers from one end of float32 to the other", "float32 [1 1 0 1]",
    function() return tensor({ 3.4e38, -3.4e38, -1e38 }):histc(4) end },
    { "histc of numbers from one end of float64 to the other", "float64 [1 0 0 1]",
    function() return tensor({ 1.7e308, -1.7e308 }, "float64"):histc(4) end },
    { "histc of whole numbers at the edges of bins", "float32 [1 1 1 2]", function() return tensor({ 0, 1, 2, 3, 4 }):histc(4) end },
    { "histc counts beyond the whole numbers of float16", "float16 [4096]", function() return ms.ones({ 4096 }, { dtype = "float16" }):histc(1) end },
    { "std is computed in two passes, so a large mean loses no digits", "float32 0.5",
    function() return tensor({ 1e6, 1e6 + 1 }):std { correction = 0 } end },
    { "logsumexp does not overflow", "float32 1000.69", function() return tensor({ 1000, 1000 }):logsumexp() end },
    { "the norm of half types accumulates in float32", "float16 300",
    function() return ms.full({ 90000 }, 1, { dtype = "float16" }):norm() end },
    { "the sum of half types accumulates in float32", "bfloat16 4096", function() return ms.full({ 4096 }, 1, { dtype = "bfloat16" }):sum() end },
  }
end)

describe("gradients at the edges:", function()
  local function grad(values, fn)
    local x = ms.tensor(values, { requires_grad = true })
    fn(x):sum():backward()
    return x.grad
  end
  check {
    { "std of equal elements", "float32 [0 0]", function() return grad({ 3, 3 }, function(x) return x:std() end) end },
    { "std of one element is NaN, as its value is", "float32 nan",
    function() return grad({ 3 }, function(x) return x:std() end):sum() end },
    { "logsumexp at infinity", "float32 [1 0]", function() return grad({ inf, 1 },
    function(x) return x:logsumexp(1) end) end },
    { "logsumexp of minus infinities", "float32 [0 0]",
    function() return grad({ -inf, -inf }, function(x) return x:logsumexp(1) end) end },
    { "clamp outside", "float32 [0 1 0]", function() return grad({ -2, 0, 2 },
    function(x) return x:clamp(-1, 1) end) end },
    { "clamp of infinities and of NaN", "float32 [1 0 0]", function() return grad({ inf, -inf, nan }, function(x) return x:clamp(0) end) end },
    { "clamp to tensors", "float32 [0 0.5 1 0.5 0]", function()
      return grad({ -2, -1, 0, 2, 3 }, function(x) return x:clamp(tensor({ -1 }), tensor({ 2 })) end)
    end },
    { "limits of clamp, which are broadcast", "float32 [1.5 2]", function()
      return grad({ -1, 4 }, function(low) return tensor({ { -2, 0 }, { -1, 1 } }):clamp(low) end)
    end },
    { "relu and threshold pass on that of NaN", "float32 [2]",
    function() return grad({ nan }, function(x) return x:relu() + F.threshold(x, 0, 1) end) end },
    { "hardtanh and hardshrink stop that of NaN", "float32 [0]",
    function() return grad({ nan }, function(x) return F.hardtanh(x) + F.hardshrink(x) end) end },
    { "maximum with NaN", "float32 [1 1]", function() return grad({ nan, 2 }, function(x) return x:maximum(tensor({ 0, nan })) end) end },
    { "prelu at 0 is the slope", "float32 [0.25 0.25 1]",
    function() return grad({ -1, 0, 1 }, function(x) return F.prelu(x, tensor({ 0.25 })) end) end },
    { "the slope of prelu, beside an infinity", "float32 [-2]",
    function() return grad({ 0.25 }, function(w) return F.prelu(tensor({ -2, 0, 5, inf }), w) end) end },
    { "atan2 at the origin, and of huge and tiny numbers", "float32 [0 1e-30 1e+30]",
    function() return grad({ 0, 0, 0 }, function(y) return y:atan2(tensor({ 0, 1e30, 1e-30 })) end) end },
    { "the second number of atan2 at the origin", "float32 [0 -1e+30]",
    function() return grad({ 0, 0 }, function(x) return tensor({ 0, 1e-30 }):atan2(x) end) end },
    { "0 ^ a", "float32 [-inf 0 0 0 nan]", function() return grad({ -1, 0, 1, 2, nan }, function(a) return 0 ^ a end) end },
    { "zeros ^ a", "float32 [0 0 0]", function() return grad({ 0, 1, 2 }, function(a) return ms.zeros(3) ^ a end) end },
    { "a quotient's divisor whose square overflows", "float32 [-1e-10]",
    function() return grad({ 1e20 }, function(b) return tensor({ 1e30 }) / b end) end },
    { "logit at 0, 1 and outside", "float32 [inf inf 4 nan]", function() return grad({ 0, 1, 0.5, 2 }, function(x) return x:logit() end) end },
    { "logit beyond its limits", "float32 [0 4 0]", function() return grad({ 0, 0.5, 1 }, function(x) return x:logit { eps = 0.1 } end) end },
    { "amax of infinities", "float32 [0.5 0 0.5]", function() return grad({ inf, 1, inf }, function(x) return x:amax() end) end },
    { "the value of masked_fill", "float32 [2]", function()
      return grad({ 5 }, function(v) return tensor({ { 1, 2 }, { 3, 4 } }):masked_fill(tensor({ true, false }), v) end)
    end },
    { "the elements that masked_fill_ replaces by a tensor", "float32 [0 1]", function()
      local v = ms.tensor(5, { requires_grad = true })
      return grad({ 1, 2 }, function(x) return (x * 1):masked_fill_(tensor({ true, false }), v) end)
    end },
    { "the value of index_fill at a position that occurs twice", "float32 [2]", function()
      return grad({ 5 }, function(v) return ms.zeros(2, 3):index_fill(2, tensor({ 1, 1 }, "int64"), v:reshape {}) end)
    end },
    { "the place of a quantile", "float32 [3 6 0]", function()        -- 3 times the distance of the neighbours
      return grad({ 0.2, 0.4, 0.5 }, function(q)
        local y = tensor({ 1, 2, 4, 8 }):quantile(q)
        return y:narrow(1, 1, 2)
      end)
    end },
    { "the place of a lower quantile", "float32 [0]", function()
      return grad({ 0.4 }, function(q) return tensor({ 1, 2 }):quantile(q, 1, { interpolation = "lower" }) + q * 0 end)
    end },
    { "var with a correction that is no whole number", "float32 [-1.56863 -0.392157 1.96078]",
    function() return grad({ 1, 2, 4 }, function(x) return x:var { correction = 1.3 } end) end },
    { "where ignores NaN in the branch not taken", "float32 [0 1]", function()
      return grad({ -1, 1 }, function(x) return ms.where(x:gt(0), x, ms.zeros(2)) end)
    end },
  }
end)
