-- SPDX-License-Identifier: MIT
--- Views, splitting, joining, orders of memory (edges: semantics_spec).
local ms = require "moonshard"

local failure = require "spec.support.message"
local function shape(t) return tostring(t.shape) end

describe("views", function()
  local t
  before_each(function() t = ms.arange(24):view(2, 3, 4) end)

  it("change shapes", function()
    assert.are.equal("[6, 4]", shape(t:view(6, -1)))
    assert.are.equal("[6, 4]", shape(t:view { 6, -1 }))
    assert.is_true(t.mT:equal(t:transpose(2, 3)))
    assert.is_true(t[1].T:equal(t[1]:transpose(1, 2)))
    assert.are.equal("[2, 3, 4]", shape(t:unsqueeze(1):unsqueeze(-1):squeeze()))
    assert.matches("t: the tensor has 3 dimensions", failure(function() return t.T end))
    assert.matches("mT: the shape is %[2%]; at least 2 dimensions expected",
      failure(function() return ms.ones(2).mT end))
  end)

  it("share storage, and copies do not", function()
    t:view(24):narrow(1, 1, 2):fill_(100)
    assert.are.equal(100, t[1][1][2]:item())
    local u = t:transpose(1, 2):reshape(24)
    u:fill_(0)
    assert.are.equal(100, t[1][1][1]:item())
    t:clone():zero_()
    t:transpose(1, 2):contiguous():zero_()
    assert.are.equal(100, t[1][1][1]:item())
    assert.is_true(rawequal(t, t:contiguous()))
    assert.are.equal(t:data_ptr(), t:detach():data_ptr())
  end)
end)

describe("cutting and joining", function()
  it("are inverse", function()
    local t = ms.arange(10):view(5, 2)
    assert.are.equal("[3, 2]", shape(t:chunk(2)[1]))
    assert.are.equal(5, #t:unbind())
    assert.is_true(ms.stack(t:unbind()):equal(t))
    assert.is_true(ms.cat(t:split(2)):equal(t))
    assert.is_true(ms.cat(t:split(1, 2), 2):equal(t))
    assert.is_true(ms.cat(ms.arange(200):split(1)):equal(ms.arange(200)))
    assert.matches("element 2 is a number", failure(ms.cat, { t, 3 }))
  end)
end)

-- A 4-d view of n elements: `order` is the order of its dimensions in memory, of which one may have gaps.
local function view_of(wanted, order, skip, dtype)
  local sizes = {}
  for k, d in ipairs(order) do sizes[k] = wanted[d] + (d == skip and 2 or 0) end
  local n = sizes[1] * sizes[2] * sizes[3] * sizes[4]
  local t, back = ms.zeros(n, { dtype = dtype }):view(unpack(sizes)), {}
  for k, d in ipairs(order) do back[d] = k end
  t = t:permute(unpack(back))
  return skip and t:narrow(skip, 2, wanted[skip]) or t
end

local orders = { { 1, 2, 3, 4 }, { 1, 3, 2, 4 }, { 3, 1, 2, 4 }, { 4, 3, 2, 1 }, { 2, 1, 4, 3 }, { 1, 2, 4, 3 },
  { 3, 4, 1, 2 } }

describe("memory in any order", function()
  for _, dtype in ipairs { "float32", "float64", "bfloat16", "uint8" } do
    it("is copied to memory in any other, " .. dtype, function()
      for _, wanted in ipairs { { 2, 3, 4, 5 }, { 1, 9, 10, 64 }, { 3, 1, 17, 2 } } do
        local values = ms.randint(0, 251, wanted):to(dtype)
        for _, from in ipairs(orders) do
          for _, to in ipairs(orders) do
            for skip = 0, 4 do
              local a, b = view_of(wanted, from, skip > 0 and skip or nil, dtype),
                view_of(wanted, to, skip > 0 and 5 - skip or nil, dtype)
              a:copy_(values)
              b:copy_(a)
              assert.is_true(b:equal(values))
            end
          end
        end
      end
    end)
  end

  it("keeps gradients of pieces of a transposed tensor in its order of memory, whichever of them exist", function()
    for present = 1, 7 do
      local x = ms.randn(2, 5, 9, 4, { dtype = "float64", requires_grad = true })
      local parts = x:transpose(2, 3):split(3, 2)
      local loss, expected = 0, ms.zeros(2, 5, 9, 4, { dtype = "float64" })
      for k = 1, 3 do
        if math.floor(present / 2 ^ (k - 1)) % 2 == 1 then
          local w = ms.randn(2, 5, 3, 4, { dtype = "float64" })
          loss = loss + (parts[k] * w:transpose(2, 3)):sum()
          expected:narrow(3, 3 * k - 2, 3):copy_(w)
        end
      end
      loss:backward()
      assert.is_true(x.grad:equal(expected))
    end
  end)
end)
