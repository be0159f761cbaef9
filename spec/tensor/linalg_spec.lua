-- SPDX-License-Identifier: MIT
--- ms.linalg beyond PyTorch's numbers: what results satisfy, gradients by finite differences, empty matrices, errors,
--- and a machine without LAPACK.
local ms = require "moonshard"
local process = require "spec.support.process"
local L = ms.linalg

local function f64(...)
  ms.manual_seed(7)
  return ms.randn(..., { dtype = "float64" })
end
local function near(a, b, tolerance)
  local largest = a:numel() == 0 and 0 or (a - b):abs():max():item()
  assert(largest <= (tolerance or 1e-10), ("differ by %g"):format(largest))
end
local function shape(t) return table.concat(t.shape, " ") end

describe("linalg", function()
  it("puts factors together to the matrix, for tall, wide and square ones", function()
    for _, size in ipairs { { 7, 4 }, { 3, 6 }, { 5, 5 }, { 1, 1 } } do
      local a = f64({ 2, 3, size[1], size[2] })
      for _, full in ipairs { false, true } do
        local u, s, vh = L.svd(a, { full_matrices = full })
        local k = s.shape[3]
        near((u:narrow(-1, 1, k) * s:unsqueeze(-2)):matmul(vh:narrow(-2, 1, k)), a)
        near(u:transpose(-1, -2):matmul(u), ms.eye(u.shape[4], { dtype = "float64" }))
        near(vh:matmul(vh:transpose(-1, -2)), ms.eye(vh.shape[3], { dtype = "float64" }))
      end
      for _, mode in ipairs { "reduced", "complete" } do
        local q, r = L.qr(a, { mode = mode })
        near(q:matmul(r), a)
        near(r:triu(), r, 0)
        near(q:transpose(-1, -2):matmul(q), ms.eye(q.shape[4], { dtype = "float64" }))
      end
      local p = L.pinv(a)
      near(a:matmul(p):matmul(a), a)
      near(p:matmul(a):matmul(p), p)
    end
  end)

  it("solves large systems, of views that are not contiguous", function()
    local a = f64({ 60, 60 }):t()
    local b = f64({ 5, 60 }):t()
    near(a:matmul(L.solve(a, b)), b, 1e-9)
    near(a:matmul(L.inv(a)), ms.eye(60, { dtype = "float64" }), 1e-9)
    local values, vectors = L.eigh(a + a:t())
    near((a + a:t()):matmul(vectors), vectors * values, 1e-9)
  end)

  it("gives eigenvectors a symmetric gradient, which agrees with finite differences of symmetric matrices", function()
    local a, weights = f64({ 2, 4, 4 }), f64({ 2, 4, 4 })
    a = a + a:transpose(-1, -2)
    local function loss(m)
      local values, vectors = L.eigh(m)
      return (vectors * vectors * weights):sum() + (values * values * weights[1][1]):sum()      -- without the signs of vectors
    end
    local leaf = a:clone():requires_grad_()
    loss(leaf):backward()
    near(leaf.grad, leaf.grad:transpose(-1, -2), 1e-12)
    local along = f64({ 2, 4, 4 })
    along = along + along:transpose(-1, -2)
    local difference = (loss(a + along * 1e-6) - loss(a - along * 1e-6)):item() / 2e-6
    assert.near(difference, (leaf.grad * along):sum():item(), 1e-5 * math.abs(difference))
  end)

  it("broadcasts batches", function()
    local a, b = f64({ 2, 1, 3, 3 }), f64({ 4, 3, 2 })
    assert.are.equal("2 4 3 2", shape(L.solve(a, b)))
    near(a:matmul(L.solve(a, b)), b:expand(2, 4, 3, 2))
    assert.are.equal("2 4 3 2", shape((L.lstsq(a, b))))
  end)

  it("has the gradients of finite differences through several functions", function()
    local a = f64({ 2, 3, 3 }):requires_grad_(true)
    local function check(fn) assert.is_true(ms.testing.gradcheck(fn, a)) end
    check(function(t) return L.matrix_exp(t * 0.3) end)
    check(function(t) return L.cholesky(t:matmul(t:transpose(-1, -2)) + ms.eye(3, { dtype = "float64" })):square() end)
    check(function(t) return L.svdvals(t):log() end)
    check(function(t) return (L.lstsq(t:narrow(-1, 1, 2), t:narrow(-1, 3, 1), { driver = "gelsd" })) end)
    check(function(t) return L.cond(t) end)
  end)

  it("gives the determinant of a singular matrix the gradient of its cofactors", function()
    local a = ms.tensor({ { 1, 2, 3 }, { 2, 4, 6 }, { 1, 0.5, -1 } }, { dtype = "float64", requires_grad = true })
    local d = L.det(a)
    d:backward()
    near(d, ms.zeros(1, { dtype = "float64" }))
    near(a.grad, ms.tensor({ { -7, 8, -3 }, { 3.5, -4, 1.5 }, { 0, 0, 0 } }, { dtype = "float64" }))
  end)

  it("gives the residuals of least squares only if every matrix has full rank", function()
    local full = ms.tensor({ { 1, 2 }, { 2, 1 }, { 3, 6 } }, { dtype = "float64" })
    local deficient = ms.tensor({ { 1, 2 }, { 2, 4 }, { 3, 6 } }, { dtype = "float64" })
    local b = ms.tensor({ { 1 }, { 0 }, { 2 } }, { dtype = "float64" })
    for _, driver in ipairs { "gelsy", "gelsd" } do
      local function residuals(a) return select(2, L.lstsq(a, b, { driver = driver })) end
      near(residuals(full), ms.tensor({ 0.1 }, { dtype = "float64" }))
      assert.are.equal("0", shape(residuals(deficient)))
      assert.are.equal("0", shape(residuals(ms.stack { full, deficient })))
    end
  end)

  it("accepts empty matrices and batches", function()
    local none = ms.zeros(0, 0)
    assert.are.equal(1, L.det(none):item())
    assert.are.equal(0, select(2, L.slogdet(none)):item())
    assert.are.equal("0 0", shape(L.inv(none)))
    assert.are.equal("0 3 3", shape(L.cholesky(ms.zeros(0, 3, 3))))
    assert.are.equal("0 2", shape(L.solve(none, ms.zeros(0, 2))))
    near(L.svd(ms.zeros(3, 0)), ms.eye(3), 0)
    near(L.qr(ms.zeros(3, 0), { mode = "complete" }), ms.eye(3), 0)
    near(L.lstsq(ms.zeros(0, 2), ms.zeros(0, 3)), ms.zeros(2, 3), 0)
    assert.are.equal("2 0", shape(L.eigvalsh(ms.zeros(2, 0, 0))))
    assert.are.equal("2", shape(L.matrix_rank(ms.zeros(2, 3, 0))))
  end)

  it("runs in float32 under autocast, and refuses half types otherwise", function()
    local a = ms.tensor({ { 2, 0 }, { 0, 4 } }, { dtype = "bfloat16" })
    assert.are.equal("float32", ms.amp.autocast("bfloat16", function() return L.inv(a).dtype end))
    assert.has.error(function() L.inv(a) end)
  end)

  it("runs in a captured step", function()
    local a = f64({ 2, 4, 4 })
    local step = ms.capture(function(x)
      local values = L.eigvalsh(x + x:transpose(-1, -2))
      return L.inv(x):sum(), values
    end)
    for k = 1, 3 do
      local x = a * k + ms.eye(4, { dtype = "float64" })
      local sum, values = step(x)
      near(sum, L.inv(x):sum())
      near(values, L.eigvalsh(x + x:transpose(-1, -2)))
    end
    step:release()
  end)

  it("names what is wrong", function()
    local a = ms.eye(3)
    local wrong = {
      { function() L.inv(ms.zeros(2, 3, 3)) end, "linalg.inv: matrix 1 of the batch is singular: pivot 1 is 0" },
      { function() L.inv(ms.ones(2, 3)) end, "linalg.inv: A is float32 [2, 3] cpu, expected square matrices" },
      { function() L.inv(ms.ones(3)) end, "linalg.inv: A has shape [3], expected a matrix or a batch of matrices" },
      { function() L.inv(a:half()) end, "linalg.inv: A is float16 [3, 3] cpu, expected float32 or float64: LAPACK has no half" },
      { function() L.inv(a:long()) end, "linalg.inv: A is int64 [3, 3] cpu, expected float32 or float64" },
      { function() L.inv(5) end, "linalg.inv: A is a number (5), expected a tensor" },
      { function() L.cholesky(-a) end, "linalg.cholesky: the matrix is not positive-definite: its leading minor of order 1" },
      { function() L.solve(a, ms.ones(4, 2)) end, "linalg.solve: A has shape [3, 3] and B has shape [4, 2]" },
      { function() L.solve(a, ms.ones(3):double()) end, "linalg.solve: the right side is float64 [3, 1] cpu, expected the matrices' dtype" },
      { function() L.solve_triangular(a, a) end, "linalg.solve_triangular: option 'upper' is missing" },
      { function() L.svd(a / 0) end, "linalg.svd: the matrix has values that are inf or nan" },
      { function() L.qr(a, { mode = "full" }) end, "linalg.qr: option 'mode' is 'full', expected one of 'reduced'" },
      { function() L.norm(a, 7) end, "linalg.norm: ord is a number (7), expected 'fro', 'nuc', 1" },
      { function() L.matrix_power(a, 0.5) end, "linalg.matrix_power: n is a number (0.5), expected a whole number" },
      { function() return L.eig end, "unknown name in linalg: 'eig'; did you mean 'eigh'?" },
    }
    for _, case in ipairs(wrong) do
      local _, text = pcall(case[1])
      assert(text:find(case[2], 1, true), text)
      assert(text:find("linalg_spec.lua:", 1, true), text)
    end
  end)

  it("takes the next library where one lacks a function, and names the function where none is left", function()
    local script = [[
      local ms = require "moonshard"
      print(ms.linalg.is_available() and ms.linalg.inv(ms.full({ 1, 1 }, 4)):item(), ms.linalg.why_unavailable())
      for line in io.lines "/proc/self/maps" do
        local path = line:match "(/%S+lapack%S+)$" or line:match "(/%S+openblas%S+)$"
        if path then return print(path) end
      end]]
    local out = process.script(script, { MOONSHARD_LAPACK = false }).stdout
    local real = assert(out:match "0%.25\tnil\n(%S+)\n", out)
    local folder = process.temp_folder()
    process.write(folder .. "/one.c", "void sgemm_(void) {}\n")
    assert.are.equal(0, os.execute(("cd '%s' && cc -shared -o libopenblas.so.0 one.c && cp '%s' liblapack.so.3")
      :format(folder, real)))
    local env = { MOONSHARD_LAPACK = false, LD_LIBRARY_PATH = folder }
    local next_one = process.script(script, env).stdout
    os.remove(folder .. "/liblapack.so.3")
    process.write(folder .. "/liblapack.so.3", "")
    local none = process.script(script, env).stdout
    process.remove_folder(folder)
    assert(next_one:find("0.25\tnil\n" .. folder .. "/liblapack.so.3", 1, true), next_one)
    assert(none:find("ms.linalg needs LAPACK: libopenblas.so.0 has no function sgetrf_; ", 1, true), none)
    assert(none:find("liblapack.so.3: file too short; install Debian's", 1, true), none)
  end)

  it("says which package is missing where LAPACK is", function()
    local script = [[
      local ms = require "moonshard"
      print(ms.linalg.is_available(), ms.linalg.why_unavailable())
      print(pcall(ms.linalg.inv, ms.ones(1, 1)))
      print(ms.linalg.norm(ms.ones(4)):item())]]
    local out = process.script(script, { MOONSHARD_LAPACK = "/nowhere/liblapack.so" }).stdout
    assert(out:find("false\tms.linalg needs LAPACK: /nowhere/liblapack.so: cannot open", 1, true), out)
    assert(out:find("install Debian's libopenblas0-pthread or liblapack3", 1, true), out)
    assert(out:find("false\tlinalg.inv needs LAPACK", 1, true), out)
    assert(out:find("\n2", 1, true), out)
  end)
end)
