-- SPDX-License-Identifier: MIT
--- Batch and group norm, convolution, losses, products and reads by position on the (emulated) GPU against the CPU:
--- sizes that are no multiple of 16 bytes, channels whose elements are not adjacent, views not aligned to 16 bytes.
local ms = require "moonshard"
local gpu = require "spec.support.gpu_pair"
local on_gpu = require "spec.support.on_gpu"(13)
local F = ms.nn.F

local bounds = { float64 = 1e-11, float32 = 2e-5, bfloat16 = 2e-2, float16 = 3e-3 }
local DTYPES = { "float32", "bfloat16", "float16", "float64" }

--- Leaves with the same random numbers on the GPU, from `skip` elements into their storage, and on the CPU.
local function leaves(dtype, shape, skip, twin)
  local host, there = gpu.pair(ms.randn(gpu.numel(shape) + skip):to(dtype), shape, skip, twin)
  return there:detach():requires_grad_(true), host:detach():requires_grad_(true)
end

local function near(got, want, dtype, text) gpu.near(got, want, bounds[dtype], text) end
local function same(got, want, text) assert.is_true(want:detach():equal(got:detach():to "cpu"), text) end

for _, dtype in ipairs(DTYPES) do
  local stats = dtype == "float64" and dtype or "float32"

  describe("on a GPU, in " .. dtype .. ",", function()
    for _, shape in ipairs { { 5, 3 }, { 70, 16 }, { 4, 3, 5, 7 }, { 3, 8, 8, 8 }, { 2, 5, 49 }, { 2, 2, 2049 },
      { 700, 132, 3 } } do                                 -- a block computes a channel, in several rounds
      on_gpu("batch_norm of " .. table.concat(shape, " x "), function()
        for skip = 0, shape[1] < 700 and 2 or 0 do
          for _, training in ipairs { true, false } do
            local text = ("from %d, training %s: "):format(skip, training)
            local x, x64 = leaves(dtype, shape, skip, "float64")
            local w, w64 = leaves(stats, { shape[2] }, skip, "float64")
            local b, b64 = leaves(dtype, { shape[2] }, 0, "float64")
            local g, g64 = leaves(dtype, shape, skip % 2, "float64")
            local m, m64 = leaves(stats, { shape[2] }, 1, "float64")
            m, m64 = m:detach(), m64:detach()
            local v, v64 = m:abs() + 1, m64:abs() + 1
            local y = F.batch_norm(x, m, v, w, b, { training = training })
            local y64 = F.batch_norm(x64, m64, v64, w64, b64, { training = training })
            y:backward(g)
            y64:backward(g64)
            near(y, y64, dtype, text .. "y")
            near(m, m64, dtype, text .. "running mean")
            near(v, v64, dtype, text .. "running variance")
            for name, pair in pairs { dx = { x, x64 }, dw = { w, w64 }, db = { b, b64 } } do
              near(pair[1].grad, pair[2].grad, dtype, text .. name)
            end
          end
        end
      end)
    end

    for _, case in ipairs { { { 3, 6, 7, 5 }, 2 }, { { 2, 8, 3 }, 1 }, { { 2, 70, 2 }, 35 }, { { 1, 4, 2049 }, 2 },
      { { 1, 300, 2 }, 2 } } do
      local shape, groups = unpack(case)
      on_gpu(("group_norm of %s in %d groups"):format(table.concat(shape, " x "), groups), function()
        for skip = 0, 1 do
          local x, x64 = leaves(dtype, shape, skip, "float64")
          local w, w64 = leaves(stats, { shape[2] }, skip, "float64")
          local b, b64 = leaves(dtype, { shape[2] }, 0, "float64")
          local g, g64 = leaves(dtype, shape, 1, "float64")
          local y, y64 = F.group_norm(x, groups, w, b), F.group_norm(x64, groups, w64, b64)
          y:backward(g)
          y64:backward(g64)
          near(y, y64, dtype, "y")
          for name, pair in pairs { dx = { x, x64 }, dw = { w, w64 }, db = { b, b64 } } do
            near(pair[1].grad, pair[2].grad, dtype, name)
          end
        end
      end)
    end

    for _, case in ipairs {
      { "conv2d", { 2, 4, 9, 9 }, { 6, 2, 3, 3 }, { groups = 2, padding = 1 } },
      { "conv2d", { 3, 3, 16, 16 }, { 8, 3, 5, 5 }, { stride = 2, padding = 2 } },
      { "conv2d", { 2, 3, 7, 11 }, { 4, 3, 3, 2 }, { dilation = 2, padding = 2 } },
      { "conv2d", { 1, 2, 24, 24 }, { 3, 2, 3, 3 }, { padding = 1 } },
      { "conv2d", { 2, 8, 6, 6 }, { 4, 8, 1, 1 }, {} },
      { "conv2d", { 2, 3, 13, 13 }, { 2, 3, 3, 3 }, { stride = 3, padding = 1 } },
      { "conv2d", { 2, 4, 12, 20 }, { 6, 2, 4, 4 }, { stride = 4, groups = 2 } },
      { "conv2d", { 2, 2, 20, 21 }, { 3, 2, 2, 7 }, { stride = { 1, 3 }, padding = { 0, 5 } } },
      { "conv2d", { 1, 2, 9, 31 }, { 2, 2, 2, 3 }, { stride = { 2, 5 }, dilation = { 1, 2 }, padding = 2 } },
      -- Long lines: a few fit into shared memory, or not even one.
      { "conv2d", { 1, 1, 7, 1500 }, { 2, 1, 2, 5 }, { stride = { 1, 4 }, padding = { 1, 2 } } },
      { "conv2d", { 1, 1, 1, 8300 }, { 2, 1, 1, 4 }, { stride = 3 } },
      { "conv2d", { 1, 1, 5, 72 }, { 8, 1, 2, 9 }, { padding = { 0, 4 } } },
      { "conv3d", { 2, 4, 3, 5, 9 }, { 6, 2, 2, 3, 3 }, { groups = 2, padding = 1 } },
      { "conv3d", { 1, 2, 5, 4, 17 }, { 3, 2, 3, 1, 3 }, { stride = { 2, 1, 2 }, padding = { 1, 0, 2 } } },
      { "conv1d", { 3, 2, 37 }, { 3, 2, 4 }, { stride = 2, padding = 3 } },
      { "conv3d", { 2, 2, 5, 6, 13 }, { 3, 2, 2, 3, 5 }, { stride = { 2, 1, 3 }, padding = { 1, 0, 4 } } },
      { "conv_transpose1d", { 3, 4, 7 }, { 4, 2, 9 }, { stride = 4, padding = 3, output_padding = 2, groups = 2 } },
      { "conv_transpose1d", { 3, 4, 19 }, { 4, 2, 4 }, { stride = 2, padding = 1, output_padding = 1, groups = 2 } },
      { "conv_transpose2d", { 2, 3, 7, 9 }, { 3, 4, 3, 3 }, { stride = 2, padding = 1, output_padding = 1 } },
      { "conv_transpose2d", { 2, 3, 5, 8 }, { 3, 4, 1, 1 }, {} },
      { "conv_transpose3d", { 2, 2, 3, 3, 5 }, { 2, 3, 2, 3, 2 }, { stride = { 1, 2, 2 }, dilation = { 2, 1, 1 } } },
    } do
      local name, shape, kernel, options = unpack(case)
      local transposed = name:find "transpose"
      local out = transposed and kernel[2] * (options.groups or 1) or kernel[1]
      on_gpu(("%s of %s by %s"):format(name, table.concat(shape, " x "), table.concat(kernel, " x ")), function()
        for skip = 0, 1 do
          local x, x64 = leaves(dtype, shape, skip, "float64")
          local w, w64 = leaves(dtype, kernel, skip, "float64")
          local b, b64 = leaves(dtype, { out }, skip, "float64")
          local y, y64 = F[name](x, w, b, options), F[name](x64, w64, b64, options)
          near(y, y64, dtype, "y")
          near(F[name](x, w, nil, options), F[name](x64, w64, nil, options), dtype, "y without a bias")
          local g, g64 = leaves(dtype, { unpack(y.shape) }, skip, "float64")
          y:backward(g)
          y64:backward(g64)
          for text, pair in pairs { dx = { x, x64 }, dw = { w, w64 }, db = { b, b64 } } do
            near(pair[1].grad, pair[2].grad, dtype, text)
          end
        end
      end)
    end

    on_gpu("mse_loss", function()
      for _, n in ipairs { 0, 1, 7, 8, 2049, 16384 * 2 + 5 } do
        for skip = 0, 2 do
          for _, reduction in ipairs { n == 0 and "sum" or "mean", "none" } do
            local text = ("%d elements from %d, %s"):format(n, skip, reduction)
            local a, a64 = leaves(dtype, { n }, skip, "float64")
            local b, b64 = leaves(dtype, { n }, skip % 2, "float64")
            local y = F.mse_loss(a, b, { reduction = reduction })
            local y64 = F.mse_loss(a64, b64, { reduction = reduction })
            near(y, y64, dtype, text)
            local g, g64 = leaves(dtype, { unpack(y.shape) }, 0, "float64")
            y:backward(g)
            y64:backward(g64)
            near(a.grad, a64.grad, dtype, text .. ", gradient")
            same(a.grad, -b.grad:to "cpu", text .. ", gradient of the target")
          end
        end
      end
    end)

    on_gpu("the gradient of prod, with zeros", function()
      for _, shape in ipairs { { 1, 9 }, { 5, 8 }, { 20, 33 }, { 3, 20, 5 } } do
        for skip = 0, 1 do
          for dim = 0, #shape do
            for zeros = 0, 2 do
              local text = ("%s from %d, dimension %d, %d zeros"):format(table.concat(shape, " x "), skip, dim, zeros)
              local x, x64 = leaves(dtype, shape, skip, "float64")
              for _, t in ipairs { x, x64 } do
                for k = 1, zeros do t:detach():view(gpu.numel(shape)):narrow(1, 3 * k, 1):fill_(0) end
                local y = dim == 0 and t:prod() or t:prod(dim)
                y:backward(ms.ones_like(y) * 3)
              end
              near(x.grad, x64.grad, dtype, text)
            end
          end
        end
      end
    end)

    on_gpu("reads and sums by position, with the CPU's bits", function()
      for _, case in ipairs { { 10, 5, 7 }, { 30, 8, 40 }, { 3, 24, 100 }, { 12, 33, 9 }, { 1, 16, 0 } } do
        local rows, width, n = unpack(case)
        for skip = 0, 2 do
          local text = ("%d of %d x %d from %d"):format(n, rows, width, skip)
          for _, ids in ipairs { "int64", "int32" } do
            local x, host = leaves(dtype, { rows, width }, skip)
            local at = ms.randint(0, rows, { n }, { dtype = ids })
            local g, g_host = leaves(dtype, { n, width }, skip)
            for _ = 1, 2 do                                  -- the second time adds to a gradient
              local y, want = F.embedding(at:to "cuda", x), F.embedding(at, host)
              same(y, want, "embedding " .. text)
              y:backward(g)
              want:backward(g_host)
              same(x.grad, host.grad, "gradient of embedding " .. text)
            end
          end
          for dim = 1, 3 do
            local shape = { rows, 3, width }
            local x, host = leaves(dtype, shape, skip)
            local at = ms.randint(0, shape[dim], { n })
            local y, want = x:index_select(dim, at:to "cuda"), host:index_select(dim, at)
            same(y, want, "index_select " .. text)
            local g, g_host = leaves(dtype, { unpack(y.shape) }, skip)
            y:backward(g)
            want:backward(g_host)
            same(x.grad, host.grad, "gradient of index_select " .. text)
            local turned, turned_host = x:detach():transpose(1, 3), host:detach():transpose(1, 3)
            same(turned:index_select(4 - dim, at:to "cuda"), turned_host:index_select(4 - dim, at), "turned " .. text)
            local many = ms.randint(0, shape[dim], shape)
            same(x:gather(dim, many:to "cuda"), host:gather(dim, many), "gather " .. text)
          end
        end
      end
    end)
  end)
end
