-- SPDX-License-Identifier: MIT
--- Views, splitting, joining, indexing.
local ms = require "moonshard"

local failure = require "spec.support.message"
local function shape(t) return tostring(t.shape) end

describe("views", function()
  local t
  before_each(function() t = ms.arange(24):view(2, 3, 4) end)

  it("change shapes", function()
    assert.are.equal("[6, 4]", shape(t:view(6, -1)))
    assert.are.equal("[6, 4]", shape(t:view { 6, -1 }))
    assert.are.equal("[24]", shape(t:flatten()))
    assert.are.equal("[2, 12]", shape(t:flatten(2)))
    assert.are.equal("[6, 4]", shape(t:flatten(1, 2)))
    assert.are.equal("[]", shape(ms.ones(1):reshape {}))
    assert.are.equal("[2, 4, 3]", shape(t:transpose(2, 3)))
    assert.is_true(t.mT:equal(t:transpose(2, 3)))
    assert.is_true(t[1].T:equal(t[1]:transpose(1, 2)))
    assert.are.equal("[4, 2, 3]", shape(t:permute(3, 1, 2)))
    assert.are.equal("[2, 1, 3, 4]", shape(t:unsqueeze(2)))
    assert.are.equal("[2, 3, 4, 1]", shape(t:unsqueeze(-1)))
    assert.are.equal("[2, 3, 4]", shape(t:unsqueeze(1):squeeze(1)))
    assert.are.equal("[2, 3, 4]", shape(t:unsqueeze(1):unsqueeze(-1):squeeze()))
    assert.are.equal("[5, 3]", shape(ms.ones(1, 3):expand(5, -1)))
    assert.are.equal("[3, 2]", shape(ms.ones(2, 3):t()))
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

  it("count from 1 and from the end", function()
    assert.are.same({ { 4, 5 }, { 8, 9 } }, t[1]:narrow(1, 2, 2):narrow(2, 1, 2):tolist())
    assert.are.same({ 20, 21, 22, 23 }, t:select(1, -1):select(1, 3):tolist())
    assert.are.equal("[2, 0, 4]", shape(t:narrow(2, 1, 0)))
  end)

  it("refuse positions out of range", function()
    assert.matches("view", failure(t.view, t, 5, 5))
    assert.matches("reshape", failure(t.reshape, t, 7, -1))
    assert.matches("dimension 4 is out of range; the tensor has 3", failure(t.size, t, 4))
    assert.matches("position 4 is out of range for size 3", failure(t.select, t, 2, 4))
    assert.matches("3 elements from position 2 exceed size 3", failure(t.narrow, t, 2, 2, 3))
    assert.matches("dimension is a number %(0%)", failure(t.transpose, t, 0, 1))
    assert.matches("t: the tensor has 3 dimensions", failure(function() return t.T end))
    assert.matches("mT: the shape is %[2%]; at least 2 dimensions expected",
      failure(function() return ms.ones(2).mT end))
    assert.matches("expected at most 2; transpose%(d1, d2%) swaps two dimensions", failure(t.t, t))
    assert.matches("not a whole number", failure(t.view, t, 2.5, -1):gsub("expected a whole number",
      "not a whole number"))
  end)
end)

describe("cutting and joining", function()
  local t = ms.arange(10):view(5, 2)
  it("splits", function()
    local parts = t:split(2)
    assert.are.equal(3, #parts)
    assert.are.same({ { 8, 9 } }, parts[3]:tolist())
    parts = t:split({ 1, 4 }, 1)
    assert.are.equal("[4, 2]", shape(parts[2]))
    assert.are.equal(2, #t:chunk(2, -1))
    assert.are.equal("[3, 2]", shape(t:chunk(2)[1]))
    assert.are.equal(100, #ms.arange(100):split(1))
    assert.are.equal(57, ms.arange(100):split(1)[58]:item())
    assert.are.equal(5, #t:unbind())
    assert.matches("add up to 4, but dimension 1 has size 5", failure(t.split, t, { 1, 3 }))
    assert.matches("size is 0, expected a whole number from 1", failure(t.split, t, 0))
  end)
  it("joins", function()
    assert.is_true(ms.cat(t:split(2)):equal(t))
    assert.is_true(ms.cat(t:split(1, 2), 2):equal(t))
    assert.are.equal("[2, 5, 2]", shape(ms.stack { t, t }))
    assert.are.equal("[5, 2, 3]", shape(ms.stack({ t, t, t }, -1)))
    assert.is_true(ms.cat(ms.arange(200):split(1)):equal(ms.arange(200)))
    assert.are.equal("[70, 5, 2]", shape(ms.stack((function()
      local list = {}
      for k = 1, 70 do list[k] = t end
      return list
    end)())))
    assert.matches("the list is empty", failure(ms.cat, {}))
    assert.matches("element 2 is a number", failure(ms.cat, { t, 3 }))
  end)
  it("tiles and takes triangles", function()
    assert.are.same({ 1, 2, 1, 2 }, ms.tensor({ 1, 2 }):tile(2):tolist())
    assert.are.equal("[6, 4]", shape(ms.ones(2, 2):tile(3, 2)))
    assert.are.same({ { 1, 0 }, { 1, 1 } }, ms.ones(2, 2):tril():tolist())
    assert.are.same({ { 0, 1 }, { 0, 0 } }, ms.ones(2, 2):triu(1):tolist())
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

describe("indexing by tensors", function()
  local t = ms.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
  local function ids(list) return ms.tensor(list, { dtype = "int64" }) end
  it("counts from 0 inside them", function()
    assert.are.same({ { 3, 1 }, { 6, 4 } }, t:index_select(2, ids { 2, 0 }):tolist())
    assert.are.same({ { 1 }, { 6 } }, t:gather(2, ids { { 0 }, { 2 } }):tolist())
    local u = ms.zeros(2, 3):scatter_(2, ids { { 1 }, { 2 } }, ms.tensor { { 7 }, { 8 } })
    assert.are.same({ { 0, 7, 0 }, { 0, 0, 8 } }, u:tolist())
    assert.are.same({ { 0, 1, 0 }, { 0, 0, 1 } }, ms.zeros(2, 3):scatter_(2, ids { { 1 }, { 2 } }, 1):tolist())
    assert.are.same({ 2, 1 }, ms.zeros(2):scatter_add_(1, ids { 0, 0, 1 }, ms.ones(3)):tolist())
    failure(t.index_select, t, 2, ids { 3 })
    failure(t.index_select, t, 2, ms.tensor { 1.5 })
  end)
end)
