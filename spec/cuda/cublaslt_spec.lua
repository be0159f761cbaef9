-- SPDX-License-Identifier: MIT
--- Products on the emulated GPU through the stand-in for cuBLASLt (spec/support/cuda/cublaslt.cpp), and what the
--- stand-in refuses.
local ffi = require "ffi"
local process = require "spec.support.process"
local it_built = require "spec.support.it_built"("standin/libcublasLt_standin.so.13",
  "this build has no emulated GPU: there is no g++")

local build = process.build
local library = build .. "/standin/libcublasLt_standin.so.13"

--- Runs a script on the emulated GPU in a process of its own; returns its output and errors. In the script, `standin`
--- is the stand-in's library, which counts its calls.
local function script(source, env)
  local given = { MOONSHARD_CUDA = process.gpu, MOONSHARD_CUBLAS = "on", LD_LIBRARY_PATH = build .. "/standin" }
  for name, value in pairs(env or {}) do given[name] = value end
  local job = process.script(([[
    local ms, ffi = require "moonshard", require "ffi"
    ffi.cdef "struct counts { double heuristics, products, refused; } *ms_standin_counts(); void ms_standin_plant(int, int);"
    %s
    %s]]):format(source:find "standin%." and ('local standin = ffi.load "%s"'):format(library) or "", source), given)
  assert.are.equal(0, job.code, job.stderr)
  return job.stdout, job.stderr
end

describe("the stand-in for cuBLASLt", function()
  if not pcall(ffi.typeof, "lt_result") then
    ffi.cdef [[
      typedef struct { uint64_t algo[8]; size_t room; int state; float waves; int reserved[4]; } lt_result;
      int cublasLtCreate(void **);
      int cublasLtDestroy(void *);
      int cublasLtMatmulDescDestroy(void *);
      int cublasLtMatrixLayoutDestroy(void *);
      int cublasLtMatmulPreferenceDestroy(void *);
      int cublasLtMatmulDescCreate(void **, int, int);
      int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
      int cublasLtMatrixLayoutCreate(void **, int, uint64_t, uint64_t, int64_t);
      int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t);
      int cublasLtMatmulPreferenceCreate(void **);
      int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t);
      int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, lt_result *,
        int *);
      int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *,
        const void *, void *, void *, void *, const void *, void *, size_t, void *);
    ]]
  end
  local OK, NOT_INITIALIZED, INVALID, UNSUPPORTED = 0, 1, 7, 15
  local F32, F64, F16, BF16, COMPUTE_32F, COMPUTE_64F = 0, 1, 2, 14, 68, 70

  local held = ffi.new("char[?]", 5 * 4096 + 2 ^ 20 + 64)
  local base = ffi.cast("char *", ffi.cast("uintptr_t", held) + 63 - (ffi.cast("uintptr_t", held) + 63) % 64)

  --- Multiplies two 8 x 8 matrices of ones with a bias of ones, with one fault; returns the statuses of the attributes'
  --- setters (the first that is not 0), of the heuristic and of the product, and the first result.
  local function multiply(fault)
    local f = setmetatable(fault, { __index = { types = { F32, F32, F32, F32 }, compute = COMPUTE_32F, scale = F32,
      rows = { 8, 8, 8, 8 }, cols = { 8, 8, 8, 8 }, ld = { 8, 8, 8, 8 }, batch = { 1, 1, 1, 1 },
      stride = { 0, 0, 0, 0 }, epilogue = 4, bias = 0, align = { 16, 16, 16, 16 }, off = { 0, 0, 0, 0 },
      room = 1048576, room_given = 1048576, handle = true, word = 4, attribute = 7, want = 1, n = 8, alpha = true } })
    local lt = ffi.load(library)
    local made = ffi.new "void *[1]"
    local function new(fn, ...)
      assert.are.equal(OK, fn(made, ...))
      return made[0]
    end
    local first = OK
    local function set(fn, thing, what, ctype, value, bytes)
      local v = ffi.new(ctype .. "[1]", value)
      local status = fn(thing, what, v, bytes or ffi.sizeof(v))
      if first == OK then first = status end
    end
    for i = 0, 5 * 1024 - 1 do ffi.cast("float *", base)[i] = 1 end
    local memory = {}
    for k = 1, 5 do memory[k] = base + (k - 1) * 4096 end
    local handle = f.handle and new(lt.cublasLtCreate) or nil
    local desc = new(lt.cublasLtMatmulDescCreate, f.compute, f.scale)
    set(lt.cublasLtMatmulDescSetAttribute, desc, f.attribute, "int32_t", f.epilogue, f.word)
    set(lt.cublasLtMatmulDescSetAttribute, desc, 8, "void *", f.bias and memory[5] + f.bias or nil)
    if f.aux then
      set(lt.cublasLtMatmulDescSetAttribute, desc, 11, "void *", memory[3] + f.aux)
      set(lt.cublasLtMatmulDescSetAttribute, desc, 12, "int64_t", f.aux_ld)
    end
    local layout = {}
    for k = 1, 4 do
      layout[k] = new(lt.cublasLtMatrixLayoutCreate, f.types[k], f.rows[k], f.cols[k], f.ld[k])
      set(lt.cublasLtMatrixLayoutSetAttribute, layout[k], 5, "int32_t", f.batch[k])
      set(lt.cublasLtMatrixLayoutSetAttribute, layout[k], 6, "int64_t", f.stride[k])
    end
    local pref = new(lt.cublasLtMatmulPreferenceCreate)
    set(lt.cublasLtMatmulPreferenceSetAttribute, pref, 1, "uint64_t", f.room)
    for k = 1, 4 do set(lt.cublasLtMatmulPreferenceSetAttribute, pref, 4 + k, "uint32_t", f.align[k]) end
    local result, found = ffi.new "lt_result[1]", ffi.new "int[1]"
    local heuristic = lt.cublasLtMatmulAlgoGetHeuristic(handle, desc, layout[1], layout[2], layout[3], layout[4], pref,
      f.want, result, found)
    local wide = f.compute == COMPUTE_64F
    local one, zero = ffi.new(wide and "double[1]" or "float[1]", 1), ffi.new(wide and "double[1]" or "float[1]", 0)
    if f.after then f.after(lt, desc, layout) end
    local product = lt.cublasLtMatmul(handle, desc, f.alpha and one or nil, memory[1] + f.off[1], layout[1],
      memory[2] + f.off[2], layout[2], zero, memory[4] + f.off[3], layout[3], memory[4] + f.off[4], layout[4],
      result[0].algo, base + 5 * 4096, f.room_given, nil)
    assert(held ~= nil)
    lt.cublasLtMatmulPreferenceDestroy(pref)
    for k = 1, 4 do lt.cublasLtMatrixLayoutDestroy(layout[k]) end
    lt.cublasLtMatmulDescDestroy(desc)
    if handle then lt.cublasLtDestroy(handle) end
    return first, heuristic, product, ffi.cast("float *", memory[4])[0]
  end

  it_built("multiplies what the library multiplies", function()
    assert.same({ OK, OK, OK, 9 }, { multiply {} })
    assert.same({ OK, OK, OK, 8 }, { multiply { epilogue = 1, bias = false } })
    for _, case in ipairs { { F16, F16, F16, F16 }, { BF16, BF16, BF16, BF16 }, { BF16, BF16, F32, F32 } } do
      assert.same({ OK, OK, OK }, { unpack({ multiply { types = case } }, 1, 3) })
    end
    assert.same({ OK, OK, OK }, { unpack({ multiply { types = { F64, F64, F64, F64 }, compute = COMPUTE_64F,
      scale = F64 } }, 1, 3) })
    assert.same({ OK, OK, OK, 9 }, { multiply { batch = { 2, 2, 2, 2 }, stride = { 0, 64, 64, 64 } } })
    assert.same({ OK, OK, OK, 8 }, { multiply { epilogue = 512 } })
  end)

  -- The expected statuses of the setters, the heuristic and the product; nil: any.
  for _, case in ipairs {
    { "inputs of two types", { types = { F16, BF16, F16, F16 } }, OK, UNSUPPORTED, UNSUPPORTED },
    { "half results of float32 inputs", { types = { F32, F32, F16, F16 } }, OK, UNSUPPORTED, UNSUPPORTED },
    { "float32 added to a half result", { types = { F16, F16, F32, F16 } }, OK, UNSUPPORTED, UNSUPPORTED },
    { "float64 computed in float32", { types = { F64, F64, F64, F64 } }, OK, UNSUPPORTED, UNSUPPORTED },
    { "a scale of another type than the sums", { scale = F64 }, OK, UNSUPPORTED, UNSUPPORTED },
    { "a leading dimension below the rows", { ld = { 7, 8, 8, 8 } }, OK, INVALID, INVALID },
    { "inner dimensions that differ", { cols = { 7, 8, 8, 8 } }, OK, INVALID, INVALID },
    { "a result of another shape", { rows = { 8, 8, 8, 7 } }, OK, INVALID, INVALID },
    { "no rows", { rows = { 0, 8, 0, 0 } }, OK, INVALID, INVALID },
    { "batches of different sizes", { batch = { 2, 1, 2, 2 }, stride = { 64, 64, 64, 64 } }, OK, INVALID, INVALID },
    { "results of a batch that overlap", { batch = { 2, 2, 2, 2 }, stride = { 64, 64, 64, 32 } }, OK, INVALID, INVALID },
    { "a batch stride below zero", { batch = { 2, 2, 2, 2 }, stride = { -64, 64, 64, 64 } }, OK, INVALID, INVALID },
    { "an epilogue that does not exist", { epilogue = 5 }, OK, INVALID, INVALID },
    { "a bias epilogue without a bias", { bias = false }, OK, INVALID, INVALID },
    { "the gradient of a bias without room for it", { epilogue = 512, bias = false }, OK, INVALID, INVALID },
    { "GELU without a matrix to keep", { epilogue = 160, types = { F16, F16, F16, F16 } }, OK, INVALID, INVALID },
    { "GELU of float32", { epilogue = 164, aux = 0, aux_ld = 8 }, OK, UNSUPPORTED, UNSUPPORTED },
    { "GELU that keeps a matrix whose leading dimension is no multiple of 8",
      { epilogue = 164, aux = 0, aux_ld = 12, types = { F16, F16, F16, F16 } }, OK, UNSUPPORTED, UNSUPPORTED },
    { "GELU that keeps a matrix of too few rows",
      { epilogue = 160, aux = 0, aux_ld = 4, types = { F16, F16, F16, F16 } }, OK, INVALID, INVALID },
    { "GELU that keeps a matrix which is not aligned", { epilogue = 160, aux = 8, aux_ld = 8,
      types = { F16, F16, F16, F16 } }, OK, OK, UNSUPPORTED },
    { "the gradient of GELU with that of a bias, without room for the latter",
      { epilogue = 208, aux = 0, aux_ld = 8, bias = false, types = { F16, F16, F16, F16 } }, OK, INVALID, INVALID },
    { "the gradient of a bias in a batch", { epilogue = 512, batch = { 2, 2, 2, 2 }, stride = { 64, 64, 64, 64 } }, OK,
      UNSUPPORTED, UNSUPPORTED },
    { "the gradient of a bias less aligned than asked for", { epilogue = 512, bias = 4 }, OK, OK, UNSUPPORTED },
    { "an attribute of the wrong size", { word = 8 }, INVALID },
    { "an attribute that does not exist", { attribute = 99 }, INVALID },
    { "a handle that was not created", { handle = false }, OK, NOT_INITIALIZED, NOT_INITIALIZED },
    { "no room for results of the heuristic", { want = 0 }, OK, INVALID, INVALID },
    { "an alignment below the element's", { align = { 2, 16, 16, 16 } }, OK, UNSUPPORTED },
    { "a left matrix less aligned than asked for", { off = { 4, 0, 0, 0 } }, OK, OK, UNSUPPORTED },
    { "a right matrix less aligned than asked for", { off = { 0, 8, 0, 0 } }, OK, OK, UNSUPPORTED },
    { "a result less aligned than asked for", { off = { 0, 0, 0, 4 } }, OK, OK, UNSUPPORTED },
    { "a bias less aligned than asked for", { bias = 4 }, OK, OK, UNSUPPORTED },
    { "less workspace than the algorithm needs", { room_given = 16 }, OK, OK, INVALID },
    { "no scale", { alpha = false }, OK, OK, INVALID },
    { "an algorithm of another problem", { after = function(lt, desc)
      lt.cublasLtMatmulDescSetAttribute(desc, 3, ffi.new("int32_t[1]", 1), 4)
    end }, OK, OK, INVALID },
  } do
    it_built("refuses " .. case[1], function()
      local got = { multiply(case[2]) }
      for k = 1, 3 do
        if case[2 + k] then assert.are.equal(case[2 + k], got[k], ({ "setter", "heuristic", "product" })[k]) end
      end
    end)
  end

  it_built("accepts a matrix, or a bias, with the requested alignment", function()
    assert.same({ OK, OK, OK }, { unpack({ multiply { off = { 4, 0, 0, 0 }, align = { 4, 16, 16, 16 } } }, 1, 3) })
    assert.same({ OK, OK, OK, 9 }, { multiply { bias = 4, align = { 16, 16, 16, 4 } } })
  end)
end)

describe("products on the emulated GPU through cuBLASLt", function()
  it_built("equal the CPU's, and none is refused", function()
    local out, err = script [[
      local bound = { float32 = 1e-5, float64 = 1e-12, float16 = 4e-3, bfloat16 = 4e-2 }
      ms.manual_seed(3)
      local worst, cases = 0, 0
      local function compare(name, dtype, gpu, cpu)
        local there, here = gpu:cpu():to "float64", cpu:to "float64"
        local off = (there - here):abs():max():item() / (1 + here:abs():max():item())
        cases = cases + 1
        if not (off <= bound[dtype]) then print(name, dtype, off) end
      end
      for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
        for _, size in ipairs { { 5, 7, 9 }, { 16, 32, 8 }, { 1, 64, 3 }, { 33, 1, 17 } } do
          local m, n, k = unpack(size)
          local a, b = ms.randn(m, k, { dtype = dtype }), ms.randn(k, n, { dtype = dtype })
          local ga, gb = a:to "cuda", b:to "cuda"
          compare("matmul", dtype, ga:matmul(gb), a:matmul(b))
          compare("left turned", dtype, ga:t():contiguous():t():matmul(gb), a:matmul(b))
          compare("right turned", dtype, ga:matmul(gb:t():contiguous():t()), a:matmul(b))
          local x, y = ms.randn(3, 2, m, k, { dtype = dtype }), ms.randn(3, 2, k, n, { dtype = dtype })
          compare("batched", dtype, x:to "cuda":matmul(y:to "cuda"), x:matmul(y))
          compare("one matrix for a batch", dtype, x:to "cuda":matmul(gb), x:matmul(b))
          compare("one left matrix", dtype, ga:matmul(y:to "cuda"), a:matmul(y))
          local flat = ms.randn(1 + k * n + n + 1, { dtype = dtype })
          local there = flat:to "cuda"
          for shift = 0, 1 do
            local w, bias = flat:narrow(1, 1 + shift, k * n):view(n, k), flat:narrow(1, 1 + shift + k * n, n)
            local gw, gbias = there:narrow(1, 1 + shift, k * n):view(n, k), there:narrow(1, 1 + shift + k * n, n)
            compare("linear", dtype, ms.nn.F.linear(ga, gw, gbias), ms.nn.F.linear(a, w, bias))
          end
        end
      end
      local count = standin.ms_standin_counts()
      print(cases, count.products, count.refused)
    ]]
    assert.are.equal("", err)
    assert.are.equal("128\t128\t0\n", out)
  end)

  -- The descriptors of 1024 kinds of products are kept, so 1600 kinds replace each other's.
  it_built("ask for the algorithm of a kind of product once, and again after others have taken its place", function()
    local out, err = script [[
      ms.manual_seed(7)
      local count, worst = standin.ms_standin_counts(), 0
      local function compare(rows, ins)
        local given = { ms.randn(rows, ins), ms.randn(3, ins), ms.randn(3) }
        local there = {}
        for k = 1, 3 do there[k] = given[k]:to "cuda" end
        local off = ms.nn.F.linear(unpack(there)):cpu() - ms.nn.F.linear(unpack(given))
        worst = math.max(worst, off:abs():max():item())
      end
      for _ = 1, 5 do compare(2, 4) end
      print(count.heuristics)
      for rows = 1, 40 do
        for ins = 1, 40 do compare(rows, ins) end
      end
      local before = count.heuristics
      for ins = 40, 1, -1 do compare(2, ins) end
      print(count.heuristics > before, count.refused, worst < 1e-5)
    ]]
    assert.are.equal("", err)
    assert.are.equal("1\ntrue\t0\ttrue\n", out)
  end)

  -- In float64 the stand-in, unlike cuBLASLt, cannot compute the bias gradient in the product; a kernel computes it.
  it_built("give linear's gradients, with the bias's in the product that computes the weight's", function()
    local out, err = script [[
      local bound = { float32 = 1e-5, float64 = 1e-12, float16 = 4e-3, bfloat16 = 4e-2 }
      ms.manual_seed(5)
      local count = standin.ms_standin_counts()
      for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
        local products, refused = count.products, count.refused
        for _, size in ipairs { { 2, 3, 5 }, { 4, 16, 8 }, { 1, 1, 33 } } do
          local rows, ins, outs = unpack(size)
          local flat = ms.randn(1 + outs, { dtype = dtype })                -- the bias is not aligned to 16 bytes
          local given = { ms.randn(rows, 2, ins, { dtype = dtype }), ms.randn(outs, ins, { dtype = dtype }),
            flat:narrow(1, 2, outs), ms.randn(rows, 2, outs, { dtype = dtype }) }
          local grads = {}
          for k, device in ipairs { "cpu", "cuda" } do
            local x, w, b = unpack(given, 1, 3)
            local function leaf(t) return t:detach():to(device):requires_grad_() end
            x, w, b = leaf(x), leaf(w), leaf(b)
            ms.nn.F.linear(x, w, b):backward(given[4]:to(device))
            grads[k] = { x.grad, w.grad, b.grad }
          end
          for k = 1, 3 do
            local here, there = grads[1][k]:to "float64", grads[2][k]:cpu():to "float64"
            local off = (there - here):abs():max():item() / (1 + here:abs():max():item())
            if not (off <= bound[dtype]) then print(dtype, rows, ins, outs, k, off) end
          end
        end
        print(dtype, count.products - products, count.refused - refused)
      end
    ]]
    assert.are.equal("", err)
    assert.are.equal("float32\t9\t0\nfloat64\t9\t3\nfloat16\t9\t0\nbfloat16\t9\t0\n", out)
  end)

  -- An mlp of hidden sizes that are a multiple of 8 (GELU in the products) and are not. float32 and float64, which the
  -- stand-in refuses with GELU, take a pass of their own.
  for _, lt in ipairs { "on", "off" } do
    it_built("give an mlp and its gradients, with GELU in the products: cuBLASLt " .. lt, function()
      local out, err = script([[
        local F = ms.nn.F
        local bound = { float32 = 2e-5, float64 = 1e-12, float16 = 6e-3, bfloat16 = 5e-2 }
        ms.manual_seed(6)
        local count = standin and standin.ms_standin_counts()
        for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
          local products, refused = count and count.products or 0, count and count.refused or 0
          for _, size in ipairs { { 3, 4, 16, 8 }, { 2, 5, 7, 3 }, { 1, 5, 7, 3 } } do
            local rows, ins, hidden, outs = unpack(size)
            local function random(...) return ms.randn(..., { dtype = dtype }) end
            local given = { random { rows, 2, ins }, random { hidden, ins }, random { hidden }, random { outs, hidden },
              random { outs }, random { rows, 2, outs } }
            for _, again in ipairs { false, true } do
              local all = {}
              for k, device in ipairs { "cpu", "cuda" } do
                local leaves = {}
                for i = 1, 5 do leaves[i] = given[i]:to(device):detach():requires_grad_() end
                local y = F.gelu_mlp(leaves[1], leaves[2], leaves[3], leaves[4], leaves[5], { recompute = again })
                y:backward(given[6]:to(device))
                all[k] = { y:detach() }
                for i = 1, 5 do all[k][i + 1] = leaves[i].grad end
              end
              for i = 1, 6 do
                local here, there = all[1][i]:to "float64", all[2][i]:cpu():to "float64"
                local off = (there - here):norm():item() / here:norm():item()
                if not (off <= bound[dtype]) then print(dtype, hidden, i, off) end
              end
            end
          end
          print(dtype, count and count.products - products or 0)
        end
      ]], lt == "off" and { MOONSHARD_CUBLAS = false } or nil)
      assert.are.equal("", err)
      local n = lt == "on" and 36 or 0
      assert.are.equal(("float32\t%d\nfloat64\t%d\nfloat16\t%d\nbfloat16\t%d\n"):format(n, n, n, n), out)
    end)

    it_built("add gradients to those that weights already have: cuBLASLt " .. lt, function()
      local out, err = script([[
        local F = ms.nn.F
        ms.manual_seed(7)
        local x, w, b = ms.randn(6, 16, { device = "cuda" }), ms.randn(8, 16, { device = "cuda" }):requires_grad_(),
          ms.randn(8, { device = "cuda" }):requires_grad_()
        local v = ms.randn(16, 8, { device = "cuda" }):requires_grad_()
        local function pass(k)
          F.gelu_mlp(F.linear(x * k, w, b), v, nil, w, nil):sum():backward()
          F.linear(x * k, w, b):sum():backward()
        end
        local sums = {}
        for k = 1, 3 do
          pass(k)
          for i, p in ipairs { w, b, v } do
            sums[i] = sums[i] and sums[i] + p.grad:cpu() or p.grad:cpu()
            p.grad = nil
          end
        end
        for k = 1, 3 do pass(k) end
        for i, p in ipairs { w, b, v } do
          print((p.grad:cpu() - sums[i]):norm():item() <= 1e-5 * sums[i]:norm():item())
        end
        -- A hook sees each contribution alone.
        local seen = {}
        b.grad, w.grad = nil, nil
        w:register_hook(function(g) seen[#seen + 1] = g:cpu():keep() end)
        for _ = 1, 2 do F.linear(x, w, b):sum():backward() end
        print(#seen, seen[1]:equal(seen[2]), (w.grad:cpu() - seen[1] * 2):abs():max():item() < 1e-5)
      ]], lt == "off" and { MOONSHARD_CUBLAS = false } or nil)
      assert.are.equal("", err)
      assert.are.equal("true\ntrue\ntrue\n2\ttrue\ttrue\n", out)
    end)
  end

  local once = [[
    local w, x = ms.randn(8, 16, { device = "cuda" }), ms.randn(4, 16, { device = "cuda" })
    local function product() return (x:matmul(w:t()):cpu() - x:cpu():matmul(w:cpu():t())):abs():max():item() < 1e-4 end
  ]]
  for _, case in ipairs {
    { "the heuristic", "standin.ms_standin_plant(15, 0)", "cublasLtMatmulAlgoGetHeuristic", 15 },
    { "the product as not supported", "standin.ms_standin_plant(0, 15)", "cublasLtMatmul", 15 },
    { "the product as of another architecture", "standin.ms_standin_plant(0, 8)", "cublasLtMatmul", 8 },
  } do
    it_built("run our own kernel when cuBLASLt refuses " .. case[1] .. ", and warn once", function()
      local out, err = script(once .. case[2] .. [[
        print(product(), product())
        print(ms.ones(3, 5, { device = "cuda" }):matmul(ms.ones(5, 2, { device = "cuda" })):sum():item())
        print(standin.ms_standin_counts().refused)]])
      assert.are.equal("true\ttrue\n30\n2\n", out)
      assert.are.equal(("moonshard: matmul: cuda:0: %s does not support the product (status %d; m 4, n 8, k 16): "
        .. "Moonshard's own kernel computes it. Later products are not reported\n"):format(case[3], case[4]), err)
    end)
  end

  it_built("fail with the status when cuBLASLt fails otherwise", function()
    local out = script(once .. [[standin.ms_standin_plant(0, 13) print(pcall(product))]])
    assert.is_truthy(out:find("matmul: cuda:0: cublasLtMatmul failed with cuBLAS status 13 (m 4, n 8, k 16)", 1, true),
      out)
  end)

  for _, case in ipairs {
    { "the toolkit named by CUDA_HOME", "CUDA_HOME", "/lib64" },
    { "the toolkit named by CUDA_PATH", "CUDA_PATH", "/targets/x86_64-linux/lib" },
    { "the packages of a Python environment", "VIRTUAL_ENV", "/lib/python3.11/site-packages/nvidia/cublas/lib" },
    { "the packages of a Python environment, as from CUDA 13", "VIRTUAL_ENV",
      "/lib/python3.13/site-packages/nvidia/cu13/lib" },
    { "a Conda environment", "CONDA_PREFIX", "/lib" },
    { "the user's packages of Python", "HOME", "/.local/lib/python3.12/site-packages/nvidia/cublas/lib" },
  } do
    it_built("find cuBLASLt in " .. case[1], function()
      local folder = process.temp_folder()
      assert.are.equal(0, os.execute(("mkdir -p '%s%s' && cp '%s' '%s%s'"):format(folder, case[3], library, folder,
        case[3])))
      local out, err = script([[
        print(ms.ones(3, 5, { device = "cuda" }):matmul(ms.ones(5, 2, { device = "cuda" })):sum():item())
        for line in io.lines "/proc/self/maps" do
          if line:find("r%-xp.*libcublasLt_standin") and line:find(os.getenv "FOLDER", 1, true) then print "there" end
        end]], { [case[2]] = folder, FOLDER = folder, LD_LIBRARY_PATH = "" })
      process.remove_folder(folder)
      assert.are.equal("", err)
      assert.are.equal("30\nthere\n", out)
    end)
  end

  it_built("run our own kernel and list the places searched when cuBLASLt is not there", function()
    local out, err = script([[
      print(ms.ones(3, 5, { device = "cuda" }):matmul(ms.ones(5, 2, { device = "cuda" })):sum():item())]],
      { LD_LIBRARY_PATH = "", CUDA_HOME = "/nowhere", VIRTUAL_ENV = false, CONDA_PREFIX = false, HOME = "/nobody" })
    assert.are.equal("30\n", out)
    assert.is_truthy(err:find("^moonshard: cannot load libcublasLt_standin%.so%.13: products on cuda use Moonshard's "
      .. "own kernel, which is many times slower%. Install it, or name its folder in LD_LIBRARY_PATH%. Searched: the "
      .. "loader's path,\n"), err)
    for _, place in ipairs { "/nowhere/{lib64,lib,targets/*/lib}", "/usr/local/{cuda,cuda-13*}/{lib64,lib,targets/*/lib}",
      "/nobody/.local/lib/python3*/site-packages/nvidia/*/lib" } do
      assert.is_truthy(err:find("\n  " .. place .. "\n", 1, true), err)
    end
    assert.is_nil(err:find("site-packages/nvidia/*/lib\n  /lib", 1, true))
  end)
end)
