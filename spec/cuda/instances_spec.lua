-- SPDX-License-Identifier: MIT
--- Instances of kernels that the other specs do not reach on the (emulated) GPU: other dtypes, long rows, large primes.
--- spec/support/cuda/ptx/mutants.lua --count 0 names those that no spec launches.
local ms = require "moonshard"
local nn, F = ms.nn, ms.nn.F
local process = require "spec.support.process"

-- Fewer layouts on g++'s kernels.
local TURNED = (process.gpu == "ptx" or os.getenv "MOONSHARD_LONG") and { false, true } or { false }
local BOUNDS = { float16 = 4e-3, bfloat16 = 3e-2, float32 = 2e-5, float64 = 1e-11 }
local FLOATS = { "float32", "float16", "bfloat16", "float64" }

--- Calls fn with copies of the tensors on each device, and compares what it returns: numbers within the dtype's bound,
--- integers exactly. Gradients of `leaves` tensors (all of floats) are compared, too, if fn's first result has one.
--- odd: that of the result is at an odd offset.
local function same(dtype, tensors, fn, odd)
  local results = {}
  for k, device in ipairs { "cpu", "cuda" } do
    local x = {}
    for i, t in ipairs(tensors) do
      x[i] = t:to(device):detach()
      if t:is_floating_point() then x[i]:requires_grad_(true) end
    end
    local out = { fn(device, unpack(x)) }
    if out[1].requires_grad then
      ms.manual_seed(9)
      local n, first = out[1]:numel(), odd and 2 or 1          -- nothing lies behind the gradient
      local g = ms.randn(n + first - 1):to(out[1].dtype):to(device):narrow(1, first, n)
      out[1]:backward(g:reshape(out[1].shape))
      for _, t in ipairs(x) do out[#out + 1] = t.grad end
    end
    results[k] = out
  end
  assert.is_true(#results[1] > 0 and #results[1] == #results[2])
  for k, want in ipairs(results[1]) do
    local got = results[2][k]:detach():to "cpu"
    want = want:detach()
    assert.same({ unpack(want.shape) }, { unpack(got.shape) })
    if not want:is_floating_point() then
      assert.is_true(want:equal(got), "result " .. k)
    else
      local off = (got:double() - want:double()):norm():item() / math.max(want:double():norm():item(), 1e-3)
      assert.is_true(off <= BOUNDS[dtype], ("result %d: relative error %g"):format(k, off))
    end
  end
end

local function case(name, fn)
  it(name, function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    ms.manual_seed(4)
    ms.scope(fn)
  end)
end

describe("on a GPU #cuda", function()
  for _, dtype in ipairs(FLOATS) do
    local function random(...) return ms.randn(...):to(dtype) end
    case("attention, rotations and pooling have the CPU's numbers in " .. dtype, function()
      -- 9 features fit no tile.
      same(dtype, { random(1, 2, 5, 9), random(1, 2, 6, 9), random(1, 2, 6, 9) },
        function(_, q, k, v) return F.scaled_dot_product_attention(q, k, v) end)
      -- Rows of masks, and those of scores, begin at different places of a pack.
      for _, mask in ipairs { ms.randn(5, 27), ms.rand(5, 27):gt(0.3) } do
        same(dtype, { random(1, 2, 5, 9), random(1, 2, 27, 9), random(1, 2, 27, 9), mask }, function(_, q, k, v, m)
          return F.scaled_dot_product_attention(q, k, v, { attn_mask = m:detach() })
        end)
      end
      -- A row of the gradient does not lie in one piece; heads of more features than a warp reads at once.
      same(dtype, { random(1, 2, 5, 9), random(1, 2, 6, 9), random(1, 2, 6, 300) },
        function(_, q, k, v) return F.scaled_dot_product_attention(q, k, v):transpose(3, 4) end)
      same(dtype, { random(1, 2, 5, 9), random(1, 2, 6, 9), random(1, 2, 6, 300) },
        function(_, q, k, v) return F.scaled_dot_product_attention(q, k, v) end)
      same(dtype, { random(2, 3, 5, 8) }, function(_, x) return F.rotary_embedding(x) end)
      same(dtype, { random(2, 3, 6, 7) }, function(_, x) return F.max_pool2d(x, 3, { stride = 2, padding = 1 }) end)
      same(dtype, { random(2, 3, 6, 7) }, function(_, x) return F.avg_pool2d(x, 2) end)
      same(dtype, { random(2, 3, 9) }, function(_, x) return F.max_pool1d(x, 3, { stride = 1 }) end)
      same(dtype, { random(1, 2, 5, 6, 7) }, function(_, x) return F.max_pool3d(x, 2, { stride = 1, padding = 1 }) end)
    end)
    case("an LSTM with a projection has the CPU's numbers and gradients in " .. dtype, function()
      local model = nn.LSTM(5, 8, { proj_size = 3 }):to(dtype)
      local there = nn.LSTM(5, 8, { proj_size = 3 }):to(dtype):to "cuda"
      there:load_state_dict(model:state_dict())
      same(dtype, { random(4, 2, 5), random(1, 2, 3), random(1, 2, 8) }, function(device, x, h, c)
        return ((device == "cpu" and model or there)(x, h, c))
      end)
    end)
    for _, kind in ipairs { "RNN", "GRU", "LSTM" } do
      case(kind .. " has the CPU's numbers where tanh changes its formula, in " .. dtype, function()
        for _, size in ipairs(kind == "LSTM" and { 0, 3 } or { 0 }) do
          local models = {}
          for k, device in ipairs { "cpu", "cuda" } do
            local model = nn[kind](5, 8, size > 0 and { proj_size = size } or {}):to(dtype):to(device)
            for name, p in model:named_parameters() do p:detach():fill_(name:find "bias_ih" and 0.625 or 0) end
            models[k] = model
          end
          local cells = kind == "LSTM"
          local c0 = cells and ms.full({ 1, 2, 8 }, 0.625):to(dtype) or nil
          same(dtype, { random(4, 2, 5), random(1, 2, size > 0 and size or 8), c0 }, function(device, x, h, c)
            local model = models[device == "cpu" and 1 or 2]
            if cells then                           -- the forget gate is 1, the others but the output's 0: c stays
              local b = model.bias_ih_l0:detach()
              b:narrow(1, 1, 8):fill_(-200)
              b:narrow(1, 9, 8):fill_(100)
            end
            return (model(x, h, c))
          end)
        end
      end)
      case(kind .. " has the CPU's numbers in " .. dtype, function()
        local model = nn[kind](5, 8):to(dtype)
        local there = nn[kind](5, 8):to(dtype):to "cuda"
        there:load_state_dict(model:state_dict())
        same(dtype, { random(4, 2, 5) }, function(device, x) return (device == "cpu" and model or there)(x) end)
        local cells = kind == "LSTM"
        same(dtype, { random(4, 2, 5), random(1, 2, 8), cells and random(1, 2, 8) or nil }, function(device, x, h, c)
          local y, hn = (device == "cpu" and model or there)(x, h, c)
          return y * hn
        end)
        -- Rows that end earlier, with states and the gradients of the last ones.
        same(dtype, { random(4, 3, 5), random(1, 3, 8), cells and random(1, 3, 8) or nil }, function(device, x, h, c)
          local packed = nn.utils.rnn.pack_padded_sequence(x, { 4, 2, 1 })
          local y, hn, cn = (device == "cpu" and model or there)(packed, h, c)
          local last = hn:sum() + (cn and cn:sum() or 0)
          return nn.utils.rnn.pad_packed_sequence(y) * last
        end)
      end)
    end
    case("convolutions of many images, and long rows of a norm, have the CPU's numbers in " .. dtype, function()
      same(dtype, { random(40, 3, 7, 7), random(4, 3, 3, 3) },
        function(_, x, w) return F.conv2d(x, w, nil, { padding = 1 }) end)
      same(dtype, { random(200, 3, 3, 3), random(4, 3, 3, 3) }, function(_, x, w) return F.conv2d(x, w) end)
      same(dtype, { random(40, 1, 4, 4), random(4, 1, 3, 3) }, function(_, x, w) return F.conv2d(x, w) end)
      same(dtype, { random(80, 1, 1, 7), random(5, 1, 1, 3) }, function(_, x, w) return F.conv2d(x, w) end)
      for n = 1, 9 do                     -- the second: three images to a run of parts
        same(dtype, { random(79, 1, 1, 12), random(1, 1, 1, n) }, function(_, x, w) return F.conv2d(x, w) end)
        same(dtype, { random(170, 1, 1, 3), random(n + 2, 1, 1, 3) }, function(_, x, w) return F.conv2d(x, w) end)
      end
      same(dtype, { random(2, 12, 20) }, function(_, x) return F.fold(x, { 5, 6 }, 2) end)
      same(dtype, { random(2, 34, 75) }, function(_, x) return F.fold(x, { 4, 41 }, { 2, 17 }) end)
      same(dtype, { random(2, 3, 5, 6) }, function(_, x) return F.unfold(x, 2) end)
      -- 64 lines, as many as a block may copy.
      same(dtype, { random(1, 1, 65, 256 / ms.zeros({ 1 }, { dtype = dtype }):element_size()) },
        function(_, x) return F.unfold(x, { 2, 4 }, { stride = { 1, 3 } }) end)
      same(dtype, { random(2048, 8), random(8), random(8) },          -- sums of 64 segments
        function(_, x, w, b) return F.layer_norm(x, { 8 }, w, b) end)
      for _, n in ipairs { 500, 1000 } do
        same(dtype, { random(30, n), random(n), random(n) },
          function(_, x, w, b) return F.layer_norm(x, { n }, w, b) end)
        same(dtype, { random(3, n) }, function(_, x) return F.layer_norm(x, { n }) end)
        same(dtype, { random(3, n), random(n) }, function(_, x, w) return F.rms_norm(x, { n }, w) end)
      end
    end)
    case("norms, softmax, losses and rotations of rows of many lengths, at odd offsets, have the CPU's numbers in " .. dtype,
      function()
      -- An odd offset allows no wide loads; rows are of a thread's, a warp's and several blocks' elements.
      for _, n in ipairs { 3, 24, 121, 260, 523, 1000, 1030, 1032, 2051, 4100, 9001 } do
        local rows = n > 2000 and 2 or 40
        for _, odd in ipairs { 0, 1 } do
          local function part(x) return odd == 1 and x:narrow(1, 2, n) or x:narrow(1, 1, n) end
          local function wide(x)
            return odd == 1 and x:reshape(-1):narrow(1, 2, rows * n):reshape(rows, n) or x:narrow(1, 1, rows)
          end
          local x = random(rows + 1, n)
          same(dtype, { x, random(n + 1), random(n + 1) }, function(_, t, w, b)
            return F.layer_norm(wide(t), { n }, part(w), part(b))
          end)
          same(dtype, { x, random(n + 1) }, function(_, t, w) return F.layer_norm(wide(t), { n }, part(w)) end)
          same(dtype, { x, random(n + 1) }, function(_, t, w) return F.rms_norm(wide(t), { n }, part(w)) + wide(t) end)
          same(dtype, { x }, function(_, t) return F.rms_norm(wide(t), { n }) end)
          same(dtype, { x }, function(_, t) return wide(t):softmax(2) end)
          same(dtype, { x }, function(_, t) return wide(t):log_softmax(2) end)
          same(dtype, { x }, function(_, t) return wide(t):t():softmax(1) end)
          for _, reduction in ipairs { "none", "mean", "sum" } do
            same(dtype, { x, ms.randint(0, n, { rows }), random(n + 1):abs() }, function(_, t, at, w)
              local options = { reduction = reduction, weight = part(w):detach(), label_smoothing = 0.1 }
              return F.cross_entropy(wide(t), at, options)
            end)
          end
        end
        local half = math.floor(n / 2) * 2
        same(dtype, { random(1, 2, 3, half) }, function(_, t) return F.rotary_embedding(t) end)
      end
    end)
    case("gradients at an odd offset, a block a row, and distant numbers give the CPU's numbers in " .. dtype, function()
      -- Every row of x begins at a multiple of 16 bytes, and none of the gradient's.
      for _, n in ipairs { 264, 896, 1032 } do
        same(dtype, { random(40, n), random(n) }, function(_, t, w) return F.layer_norm(t, { n }, w) end, true)
        same(dtype, { random(40, n), random(n) }, function(_, t, w) return F.layer_norm(t, { n }, w) end)
      end
      same(dtype, { random(140, 1031) }, function(_, t) return F.layer_norm(t, { 1031 }) end)   -- a block a row
      -- Exponentials of numbers so far below the largest that they are subnormal, or 0.
      for _, n in ipairs { 24, 400, 4000 } do
        local falling = ms.arange(0, n, { dtype = "float32" }):unsqueeze(2) * (-2000 / n)
        local ids = ms.randint(0, n, { 3 })
        local x = (ms.randn(3, n) + falling:t()):to(dtype)
        same(dtype, { x }, function(_, t) return t:softmax(2) end)
        same(dtype, { x }, function(_, t) return t:log_softmax(2) end)
        same(dtype, { x, ids }, function(_, t, at) return F.cross_entropy(t, at) end)
        same(dtype, { ms.ones(3, 1):to(dtype), falling:to(dtype), ids },
          function(_, t, w, at) return F.linear_cross_entropy(t, w, at) end)
      end
    end)
    if dtype == "float64" then
      case("exponentials that are subnormal, in every place of a pack, have the CPU's numbers in float64", function()
        for _, n in ipairs { 24, 400, 4100 } do
          local rows = n > 2000 and 2 or 40
          -- The first of a row is its largest; exponentials of the others are below the smallest normal number.
          local x = (ms.rand(rows, n) * -35 - 709.5):double()
          x:narrow(2, 1, 1):fill_(0)
          local ids = ms.randint(0, n, { rows })
          for _, name in ipairs { "softmax", "log_softmax", "logsumexp", "logcumsumexp" } do
            for d = 1, 2 do
              same(dtype, { x }, function(_, t) return t[name](t, d) end)
              same(dtype, { x }, function(_, t) return t[name](t:t(), d) end)
            end
          end
          same(dtype, { x, ids }, function(_, t, at) return F.cross_entropy(t, at, { label_smoothing = 0.1 }) end)
          same(dtype, { ms.ones(2, 1):double(), x:narrow(1, 1, 1):t():contiguous(), ids:narrow(1, 1, 2) },
            function(_, t, w, at) return F.linear_cross_entropy(t, w, at) end)
        end
        local keys = (ms.rand(1, 2, 40, 9) * -10 - 236):double()
        keys:narrow(3, 1, 1):fill_(0)
        same(dtype, { ms.ones(1, 2, 5, 9):double(), keys, random(1, 2, 40, 9) },
          function(_, q, k, v) return F.scaled_dot_product_attention(q, k, v) end)
        for n = 17, 25 do
          local signs = (ms.randint(0, 2, { n }) * 2 - 1):double()
          same(dtype, { ms.ones(1, 1):double(), signs:unsqueeze(2) * 21.35, random(3, n) }, function(_, t, w, v)
            return F.gelu_mlp(t, w, ms.zeros({ n }, { dtype = dtype, device = t.device }), v)
          end)
          for _, f in ipairs { "sigmoid", "silu", "mish", "softplus", "logsigmoid", "elu", "selu", "tanh" } do
            same(dtype, { signs * 720 }, function(_, t) return F[f](t) end)
          end
        end
        for _, kind in ipairs { "RNN", "GRU", "LSTM" } do
          local model = nn[kind](1, 8):double()
          local there = nn[kind](1, 8):double():to "cuda"
          there:load_state_dict(model:state_dict())
          for _, m in ipairs { model, there } do
            for _, p in m:named_parameters() do p:detach():mul_(1000):clamp_(-720, 720) end
          end
          same(dtype, { ms.tensor({ { { 1 } }, { { -1 } } }, { dtype = dtype }), ms.ones(1, 1, 8):double(),
            kind == "LSTM" and ms.ones(1, 1, 8):double() or nil }, function(device, t, h, c)
            return ((device == "cpu" and model or there)(t, h, c))
          end)
        end
      end)
    end
    case("rests of packs, at odd offsets, have the CPU's numbers in " .. dtype, function()
      for n = 17, 25 do
        for odd = 1, 2 do
          local function part(x) return x:narrow(1, odd, n) end
          same(dtype, { random(n + 1), random(n + 1) }, function(_, x, y) return F.mse_loss(part(x), part(y)) end)
          same(dtype, { random(n + 1) }, function(_, x)
            ms.manual_seed(3)
            return F.dropout(part(x), 0.4)
          end)
          same(dtype, { random(1, 3), random(n + 1, 3), random(n + 1), random(3, n) }, function(_, x, w, b, v)
            return F.gelu_mlp(x, part(w), part(b), v)
          end)
          same(dtype, { random(3, 5), random(n + 1, 5), random(n + 1), random(3, n) }, function(_, x, w, b, v)
            return F.gelu_mlp(x * 20, part(w), part(b), v, nil, { recompute = true })   -- also exponentials of 0
          end)
          same(dtype, { random(2, n + 1), ms.randint(-127, 128, { 20, n }):to "int8", ms.rand(20) * 0.02 },
            function(_, x, w, scale) return F.int8_linear(x:narrow(2, odd, n), w, scale:detach()) end)
          same(dtype, { random(2, 3, n, 3), random(4, 3, 3, 3), random(4) },
            function(_, x, w, b) return F.conv2d(x, w, b, { padding = 1 }) end)
        end
      end
    end)
    case("views of images, and gradients that are views, have the CPU's numbers in " .. dtype, function()
      local views = { function(x) return x end, function(x) return x:transpose(3, 4) end,
        function(x) return x:narrow(4, 2, 16) end, function(x) return x:permute(2, 4, 1, 3) end }
      local halves = dtype:find "16" ~= nil
      for _, view in ipairs(views) do
        for _, turned in ipairs(TURNED) do
          local function of(fn)
            same(dtype, { random(2, 4, 10, 18) }, function(_, t)
              local y = fn(view(t))
              return turned and y:transpose(3, 4) or y
            end)
          end
          of(function(t) return F.max_pool2d(t, 3, { stride = 2, padding = 1 }) end)
          of(function(t) return F.max_pool2d(t, 2, { stride = 1 }) end)
          of(function(t) return F.avg_pool2d(t, 3, { stride = 2, padding = 1 }) end)
          if view(ms.zeros(2, 4, 10, 18)):size(4) % 2 == 0 then of(function(t) return F.rotary_embedding(t) end) end
          of(function(t) return F.layer_norm(t, { t:size(4) }) end)
          of(function(t) return t:softmax(2) end)
          of(function(t) return t:log_softmax(4) end)
          of(function(t) return t:cumsum(2) end)
          of(function(t) return t:cumsum(4) end)
          of(function(t) return t:prod(3):unsqueeze(3) end)
          of(function(t) return t:logcumsumexp(1) end)
          if not halves then
            of(function(t) return F.interpolate(t, { size = { 7, 23 }, mode = "bilinear", antialias = true }) end)
            of(function(t) return F.interpolate(t, { size = { 13, 5 }, mode = "bicubic" }) end)
          end
          for _, weighted in ipairs { false, true } do
            of(function(t)
              local ones = ms.ones({ t:size(2) }, { dtype = dtype, device = t.device })
              local w, b = weighted and ones * 3 or nil, weighted and ones or nil
              return F.batch_norm(t, nil, nil, w, b, { training = true })
            end)
            of(function(t)
              local ones = ms.ones({ t:size(2) }, { dtype = dtype, device = t.device })
              return F.batch_norm(t, ones * 0.5, ones * 2, weighted and ones * 3 or nil, weighted and ones or nil)
            end)
          end
        end
      end
    end)
    case("rows are taken by position from views, and their gradients added to them, in " .. dtype, function()
      local ids = ms.randint(0, 7, { 40, 3 })
      for _, at in ipairs { ids, ids:t(), ids:narrow(2, 2, 2), ids:to "int32":t() } do
        for _, n in ipairs(#TURNED == 1 and { 1, 5, 8, 24 } or { 1, 2, 3, 4, 5, 6, 7, 8, 9, 24 }) do
          local views = { function(w) return w end, function(w) return w:narrow(2, 2, n) end,
            function(w) return w:t():contiguous():t() end }
          for _, view in ipairs(views) do
            for _, turned in ipairs(TURNED) do
              same(dtype, { random(9, n + 1), at }, function(_, w, k)
                local y = F.embedding(k, view(w))
                return turned and y:transpose(1, 3) or y
              end)
            end
            same(dtype, { random(9, n + 1), at:reshape(-1):contiguous():narrow(1, 2, 50) }, function(_, w, k)
              return view(w):index_select(1, k):t()
            end)
          end
          same(dtype, { random(2, 3, 9, n), at:reshape(-1):contiguous():narrow(1, 1, 20) },
            function(_, w, k) return w:index_select(3, k) end)
          same(dtype, { random(2, 3, 9, n), at:reshape(-1):contiguous():narrow(1, 1, 20) },
            function(_, w, k) return w:permute(2, 3, 1, 4):index_select(2, k) end)
        end
      end
    end)
    if not dtype:find "16" then
      case("ctc_loss has the CPU's numbers and gradients in " .. dtype, function()
        for _, reduction in ipairs { "none", "mean", "sum" } do
          for k, view in ipairs { function(x) return x end, function(x) return x:transpose(2, 3) end } do
            local x = random(20, 6, 6)
            local targets = ms.randint(1, 6, k == 1 and { 6, 7 } or { 17 })          -- side by side
            same(dtype, { x, targets, ms.tensor({ 20, 19, 12, 20, 5, 1 }, { dtype = "int64" }),
              ms.tensor({ 7, 3, 0, 1, 4, 2 }, { dtype = "int64" }) }, function(_, t, at, n, m)
              return F.ctc_loss(view(t):log_softmax(3), at, n, m, { reduction = reduction, zero_infinity = true })
            end)
          end
        end
      end)
    end
    case("kernels that begin up to 9 places before an image have the CPU's numbers in " .. dtype, function()
      for padding = 0, 9 do
        for _, stride in ipairs { 1, 2 } do
          same(dtype, { random(1, 2, 3, 21) }, function(_, x)
            return F.unfold(x, { 1, 3 }, { padding = { 0, padding }, stride = { 1, stride } })
          end)
        end
      end
    end)
    case("rests of packs of rows have the CPU's numbers in " .. dtype, function()
      -- A row is a warp's, a block's, or divided into segments.
      for _, size in ipairs(#TURNED == 1 and { { 2, 57, 65 }, { 23, 57, 65 } } or
        { { 2, 57, 65 }, { 23, 57, 65 }, { 4, 601, 608 }, { 24, 345, 352 }, { 24, 601, 608 }, { 24, 857, 864 },
          { 2, 2105, 2112 }, { 4, 2105, 2112 } }) do
        for n = size[2], size[3] do
          local offset = n > 65 and (n < size[2] + 4 and 1 or 2)         -- so that rows end in each place of a pack
          for odd = offset or 1, offset or 2 do
            local rows = size[1]
            local function part(x) return x:narrow(1, odd, n) end
            local function wide(x) return x:narrow(1, odd, rows * n):reshape(rows, n) end
            -- Nothing lies behind the last row.
            local x, r = random(rows * n + odd - 1), random(rows * n + odd - 1)
            local w1, w2 = random(n + odd - 1), random(n + odd - 1)
            local ids = ms.randint(0, n, { rows })
            ids[1], ids[rows] = 0, n - 1
            same(dtype, { x, w1, w2 }, function(_, t, w, b)
              local h = wide(t)
              local y = F.layer_norm(h, { n }, part(w), part(b))
              return y + h * 2                      -- the norm's gradient is added to that of the product
            end)
            if rows == 4 or rows == 24 then break end    -- as many as a thread of a norm's gradient, and a block, takes
            same(dtype, { x, w1 }, function(_, t, w) return F.rms_norm(wide(t), { n }, part(w)) end, true)
            same(dtype, { x, r, w1 }, function(_, t, s, w)
              local y, h = F.layer_norm(wide(t), { n }, part(w), nil, { residual = wide(s) })
              return y + h
            end)
            for _, name in ipairs { "softmax", "log_softmax" } do
              same(dtype, { x }, function(_, t) return wide(t)[name](wide(t), 2) end)
              same(dtype, { x }, function(_, t) return wide(t)[name](wide(t), 2) end, true)
            end
            same(dtype, { x }, function(_, t) return wide(t):cumsum(2) end)
            same(dtype, { x }, function(_, t)
              t = wide(t:detach())
              return t:sum(2), t:argmax(2)
            end)
            same(dtype, { x, ids, w1:abs() }, function(_, t, at, w)
              local options = { weight = part(w):detach(), label_smoothing = 0.1 }
              return F.cross_entropy(wide(t), at, options)
            end)
          end
        end
      end
    end)
    case("rows of 32 and 33 segments, each of other magnitude, have the CPU's numbers in " .. dtype, function()
      -- A block computes a segment of 4 KiB, and a warp joins them.
      local least = 4096 / ms.zeros({ 1 }, { dtype = dtype }):element_size()
      for _, n in ipairs { 32 * least, 33 * least - 3 } do
        local x = ms.randn(2, n) + ms.tensor { { 0 }, { 40 } }
        x:narrow(2, 1, least):mul_(ms.tensor { { 4 }, { 1 } })        -- the largest is in the first or last segment
        x:narrow(2, n - least + 1, least):mul_(ms.tensor { { 1 }, { 1.5 } })
        x = x:to(dtype)
        local ids = ms.tensor({ 0, n - 1 }, { dtype = "int64" })
        same(dtype, { x }, function(_, t) return t:softmax(2) end)
        same(dtype, { x, ids }, function(_, t, at) return F.cross_entropy(t, at, { reduction = "none" }) end)
        same(dtype, { x }, function(_, t) return F.layer_norm(t, { n }) end)
        -- Exponentials of differences from the largest are below the normal range, of float32 and of float64.
        local far = x:clone()
        far:narrow(2, least + 1, least):sub_(95)
        far:narrow(2, 2 * least + 1, least):sub_(728)
        same(dtype, { far }, function(_, t) return t:softmax(2) end)
        same(dtype, { far, ids }, function(_, t, at) return F.cross_entropy(t, at, { reduction = "none" }) end)
        same(dtype, { x }, function(_, t)
          t = t:detach()
          return t:max(2), t:argmin(2), t:mean(2)
        end)
      end
    end)
    if dtype:find "16" then
      case("attention in tiles has the CPU's numbers for lengths that end in each row of a warp's, in " .. dtype,
        function()
        for _, width in ipairs { 64, 128 } do
          for _, n in ipairs { 1, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 37, 46, 55, 64 } do
            for _, causal in ipairs { false, true } do
              -- The CPU rounds other intermediate results.
              local x = { random(1, 1, n, width), random(1, 1, n, width), random(1, 1, n, width) }
              same("bfloat16", x, function(_, q, k, v)
                return F.scaled_dot_product_attention(q, k, v, { is_causal = causal })
              end)
            end
          end
        end
      end)
    end
    case("the gradient of a norm over many rows and columns has the CPU's numbers in " .. dtype, function()
      -- Each group of a block's threads has rows.
      same(dtype, { random(64, 67584), random(67584), random(67584) },
        function(_, x, w, b) return F.layer_norm(x, { 67584 }, w, b) end)
    end)
    case("running sums of long lines have the CPU's numbers and gradients in " .. dtype, function()
      same(dtype, { random(2, 5000) }, function(_, x) return x:cumsum(2) end)
      same(dtype, { random(5000, 2) }, function(_, x) return x:cumsum(1) end)
      same(dtype, { random(140, 2100) }, function(_, x) return x:cumsum(2) end)     -- a block a line, in two rounds
    end)
    case("a loss over chunks, and products with int8, have the CPU's numbers in " .. dtype, function()
      local ids = ms.randint(0, 40, { 30 })
      same(dtype, { random(30, 12), random(40, 12), ids },
        function(_, x, w, at) return F.linear_cross_entropy(x, w, at, { batch_chunk_size = 8 }) end)
      same(dtype, { random(30, 12), random(40, 12), ids, random(40):abs() }, function(_, x, w, at, of_class)
        local options = { batch_chunk_size = 8, weight = of_class:detach(), label_smoothing = 0.1 }
        return F.linear_cross_entropy(x, w, at, options)
      end)
      for _, rows in ipairs { 2, 40 } do
        for _, k in ipairs { 33, 64, 300 } do
          same(dtype, { random(rows, k), ms.randint(-127, 128, { 20, k }):to "int8", ms.rand(20) * 0.02 },
            function(_, x, w, scale) return F.int8_linear(x, w, scale:detach()) end)
        end
      end
    end)
  end

  -- Kernels that read a tensor of any dtype.
  for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8" } do
    local function numbers(...) return ms.randint(1, 20, { ... }):to(dtype) end
    case("scales, padding, folds and scans have the CPU's numbers in " .. dtype, function()
      local scales = BOUNDS[dtype] and FLOATS or {}
      for _, of in ipairs(scales) do
        for _, rows in ipairs { 2, 40 } do
          same(of, { ms.randn(rows, 33):to(of), ms.randint(-127, 128, { 20, 33 }):to "int8", numbers(20) },
            function(_, x, w, scale) return F.int8_linear(x, w, scale:detach()) end)
        end
      end
      for _, mode in ipairs { "reflect", "replicate", "circular" } do
        same("float32", { numbers(2, 3, 4, 5) }, function(_, x) return F.pad(x:detach(), { 1, 2, 2, 1 }, { mode = mode }) end)
      end
      same("float32", { numbers(6, 70) }, function(_, x)
        x = x:detach()
        return x:t():max(1), x:argmin(2), x:narrow(2, 2, 60):sum(2), x:cumsum(1), x:cumsum(2), (x:sort(2))
      end)
      for n = 1, 9 do
        local x = numbers(n)
        local y = x:clone()
        y[n] = 30
        for _, name in ipairs(BOUNDS[dtype] and { "equal", "allclose" } or { "equal" }) do
          assert.is_true(x:to "cuda"[name](x:to "cuda", x:to "cuda"))
          assert.is_false(x:to "cuda"[name](x:to "cuda", y:to "cuda"))
        end
      end
      same("float32", { numbers(6, 70), numbers(6, 70) }, function(_, x, y)
        x, y = x:detach(), y:detach()
        x:narrow(2, 1, 64):fill_(3)
        y:t():narrow(1, 1, 64):fill_(3)
        return x, y
      end)
    end)
  end

  case("a sum of many losses has the CPU's number", function()
    same("float32", { ms.randn(20000, 3), ms.randint(0, 3, { 20000 }) }, function(_, x, at) return F.cross_entropy(x, at) end)
    for _, dtype in ipairs(FLOATS) do
      for _, id in ipairs { "int64", "int32" } do
        same(dtype, { ms.randn(3000, 3):to(dtype), ms.randint(0, 3, { 3000 }):to(id), ms.rand(3):to(dtype) },
          function(_, x, at, w) return F.cross_entropy(x, at, { weight = w:detach() }) end)
      end
    end
  end)
  case("transforms of lengths with the factors 11 and 13 have the CPU's numbers", function()
    for _, dtype in ipairs { "float32", "float64" } do
      for _, n in ipairs { 22, 26, 52, 143, 169 } do
        same(dtype, { ms.randn(3, n):to(dtype) }, function(_, x) return ms.fft.rfft(x) end)
      end
    end
  end)
  case("folds, scans, sorts and products of integers have the CPU's", function()
    same("int64", { ms.randint(-90, 90, { 5, 300 }) }, function(_, x)
      return x:max(2), x:argmax(2), x:sum(2), x:cumprod(2), x:narrow(2, 1, 0):sum(2), (x:matmul(x:t()))
    end)
    same("int64", { ms.randint(-90, 90, { 25000 }) }, function(_, x) return x:sort(), x:argsort() end)
    same("int64", { ms.randint(-90, 90, { 140, 2100 }) }, function(_, x) return x:cumsum(2) end)
    same("float64", { ms.randn(2, 300):double() }, function(_, x) return x:cumprod(2) end)
    same("float32", { ms.randn(3, 5000) }, function(_, x) return x:sort(2) end)
  end)
  case("an embedding's gradient adds rows of many ids", function()
    for _, id in ipairs { "int64", "int32" } do
      for n = 9001, 9003 do
        same("float32", { ms.randn(7000, 3), ms.randint(0, 7000, { n }):to(id) }, function(_, w, at) return F.embedding(at, w) end)
      end
    end
    same("float32", { ms.randn(50, 8), ms.randint(0, 50, { 25000 }) }, function(_, w, at) return F.embedding(at, w) end)
  end)
  case("a position out of range is an error that names it, and gives zeros until the error is raised", function()
    local at = ms.tensor({ 0, 7, 1 }, { dtype = "int64" }):to "cuda"
    for _, dtype in ipairs { "float32", "float16", "bfloat16", "float64" } do
      local w = ms.randn(5, 15):to(dtype):to "cuda"
      local many, beyond = ms.zeros({ 1100, 15 }, { dtype = dtype, device = "cuda" }), ms.full({ 1100 }, 21):to "int64":to "cuda"
      for _, read in ipairs {
        { 7, 5, function() return F.embedding(at, w) end },
        { 7, 5, function() return w:index_select(1, at) end },
        { 7, 5, function() return w:gather(1, at:unsqueeze(2)) end },
        { 21, 15, function() return F.cross_entropy(w:narrow(1, 1, 3), at + 14) end },
        { 21, 15, function() return F.cross_entropy(many, beyond, { weight = w:select(1, 1) }) end },
        { 21, 15, function() return F.cross_entropy(many, beyond, { reduction = "sum" }) end },
        { 8256, 8250, function() return F.cross_entropy(many:reshape(2, 8250), beyond:narrow(1, 1, 2) + 8235) end },
        { 7, 5, function() return F.linear_cross_entropy(w:narrow(1, 1, 3), w, at) end },
        { 7, 5, function() return F.linear_cross_entropy(w:narrow(1, 1, 3), w, at, { reduction = "none" }) end },
      } do
        local text = (" %d is out of range, expected 0 or more and below %d"):format(read[1], read[2])
        assert.error_matches(function() read[3]():to "cpu" end, text)
      end
    end
  end)
  case("a position out of range of a scatter is an error that names it", function()
    for _, dtype in ipairs { "float32", "float64", "int64" } do
      local x = ms.zeros(5, 6):to(dtype):to "cuda"
      local ids = ms.zeros({ 3, 6 }, { dtype = "int64" })
      ids:narrow(1, 2, 1):narrow(2, 4, 1):fill_(9)
      ids = ids:to "cuda"
      local from = ms.ones(3, 6):to(dtype):to "cuda"
      for _, put in ipairs {
        function() return x:clone():scatter_(1, ids, from) end,
        function() return x:clone():scatter_add_(1, ids, from) end,
        function() return x:scatter_reduce(1, ids, from, "amax") end,
        function() return x:gather(1, ids) end,
        function() return x:clone():index_add_(1, ids:select(2, 4), from) end,
      } do
        assert.error_matches(function() put():to "cpu" end, " 9 is out of range, expected 0 or more and below 5")
      end
    end
  end)
  case("images are resampled with few and with many weights", function()
    for _, dtype in ipairs { "float32", "float64" } do
      local x = ms.randn(1, 2, 30, 41):to(dtype)
      for _, mode in ipairs { "bilinear", "bicubic", "area", "nearest" } do
        for _, size in ipairs { { 2, 3 }, { 7, 9 }, { 29, 40 }, { 64, 50 } } do
          for _, antialias in ipairs { false, true } do
            local options = { size = size, mode = mode, antialias = antialias and mode:find "^bi" ~= nil or nil }
            same(dtype, { x }, function(_, t) return F.interpolate(t, options) end)
          end
        end
      end
    end
  end)
  case("tensors are compared, with NaN equal to NaN", function()
    for _, a in ipairs { "float32", "float16", "bfloat16" } do
      for _, b in ipairs { "float32", "float16", "bfloat16" } do
        local x = ms.tensor { 1, 0 / 0, 3, 4, 5, 6, 7, 8, 9 }:to "cuda"
        assert.is_true(ms.allclose(x:to(a), x:to(b), { equal_nan = true }))
        assert.is_false(ms.allclose(x:to(a), x:to(b)))
      end
    end
  end)
end)
