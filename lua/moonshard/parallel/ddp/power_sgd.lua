-- SPDX-License-Identifier: MIT
--- PowerSGD for nn.DDP (Vogels, Karimireddy & Jaggi 2019; docs/semantics.md#ddp-hooks): sends a gradient matrix M as
--- two low-rank factors, P and Q.
---
---   local state = nn.ddp_hooks.PowerSGDState(group, { matrix_approximation_rank = 2, start_powerSGD_iter = 100 })
---   ddp:register_comm_hook(state, nn.ddp_hooks.powerSGD_hook)
---
--- Q is the previous iteration's Q, or random and equal on all ranks. P = M Q is summed over ranks and
--- orthonormalized, Q = Mᵀ P is averaged, and the gradient becomes P Qᵀ. The approximation error of a rank's own
--- gradient is added to its next gradient. Vectors, and matrices that would not shrink by min_compression_rate, are
--- averaged uncompressed, in one collective per bucket.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local initial = require "moonshard.nn.initial".init
local opts = require "moonshard.core.opts"
local ops = require "moonshard.tensor.ops"
local shape = require "moonshard.tensor.shape"

local lib, ffi = engine.lib, engine.ffi

local M = {}

local TINY = 1e-30                      -- smallest divisor

---@class PowerSGDState
---@field iter integer  number of iterations that the hook has counted
local State = { __name = "PowerSGDState" }
State.__index = State

--- Makes the state of powerSGD_hook, one for each model. A gradient matrix N x M is sent as (N + M)
--- matrix_approximation_rank numbers; a matrix that would not shrink by min_compression_rate is averaged uncompressed.
---@param group Group?  nil: all ranks
---@param given? { matrix_approximation_rank: integer, start_powerSGD_iter: integer, min_compression_rate: number, use_error_feedback: boolean, warm_start: boolean, orthogonalization_epsilon: number, random_seed: integer }
---   matrix_approximation_rank: columns of each factor, P and Q; start_powerSGD_iter: first iteration that compresses;
---   min_compression_rate: a matrix that shrinks less is sent whole; use_error_feedback: adds a rank's approximation
---   error to its next gradient; warm_start: starts from the last iteration's Q; orthogonalization_epsilon: added to
---   norms of columns, against division by 0; random_seed: seed of random Qs
---@return PowerSGDState
function M.PowerSGDState(group, given)
  local o = opts("PowerSGDState", given, {
    matrix_approximation_rank = opts.option(opts.whole_from(1), 1),
    start_powerSGD_iter = 1000, min_compression_rate = 2, use_error_feedback = true, warm_start = true,
    orthogonalization_epsilon = 0, random_seed = 0,
  })
  if group ~= nil then opts.expect(group, dist._a_group, "PowerSGDState: argument 1") end
  if (o.use_error_feedback or o.warm_start) and o.start_powerSGD_iter <= 1 then
    errors.raise("Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, because PowerSGD can only be applied "
      .. "after the first two iterations in DDP.")
  end
  o.group, o.iter, o.memory, o.draws, o.before, o.after = group, 0, {}, 0, 0, 0
  return setmetatable(o, State)
end

function State.__tostring(s)
  return ("PowerSGDState(rank %d, from iteration %d)"):format(s.matrix_approximation_rank, s.start_powerSGD_iter)
end

--- The compression rate (0 before the first compression), and the number of elements before and after compression.
---@return number rate, number before, number after
function State:compression_stats() return self.after > 0 and self.before / self.after or 0, self.before, self.after end

-- Relative rounding error. A column whose norm shrinks below this share when earlier columns are subtracted lies in
-- their span and is set to 0.
local ROUNDING = { float32 = 1e-5, float64 = 1e-13 }

-- Makes the columns of q orthonormal, by Gram-Schmidt with two projections per column; linearly dependent columns
-- become 0. Half types are computed in float32.
local function orthogonalize(q, epsilon)
  local dtype = ROUNDING[q.dtype] and q.dtype or "float32"
  local work = q.dtype == dtype and q:clone() or q:to(dtype)
  for k = 1, q:size(2) do
    local column = work:narrow(2, k, 1)
    local least = (column * column):sum():sqrt() * ROUNDING[dtype]
    for _ = 1, k > 1 and 2 or 0 do
      local done = work:narrow(2, 1, k - 1)
      column:sub_(done:matmul(done:t():matmul(column)))
    end
    local norm = (column * column):sum():sqrt()
    local scaled = column / (epsilon > 0 and norm + epsilon or norm:clamp(TINY))
    column:copy_(ops.where(norm:gt(least), scaled, create.zeros_like(column)))
  end
  q:copy_(work)
end

local rng = ffi.new "double[2]"

-- Fills q with the same random numbers on every rank, without changing the state of the script's generator.
local function draw(state, q)
  lib.ms_rng_get(rng, rng + 1)
  local seed, offset = rng[0], rng[1]
  state.draws = state.draws + 1
  lib.ms_manual_seed(state.random_seed * 1000003 + state.draws)
  initial.normal_(q)
  lib.ms_rng_set(seed, offset)
end

-- Views of flat as consecutive matrices [n, m].
local function matrices(flat, sizes)
  local out, at = {}, 1
  for k, s in ipairs(sizes) do
    out[k] = flat:narrow(1, at, s[1] * s[2]):view(s[1], s[2])
    at = at + s[1] * s[2]
  end
  return out
end

local function total(sizes)
  local n = 0
  for _, s in ipairs(sizes) do n = n + s[1] * s[2] end
  return n
end

-- Plans a bucket: the matrices to compress with the sizes of their factors, and the ranges to send uncompressed.
local function split(state, bucket)
  local plan = { m = {}, p = {}, q = {}, at = {}, rest = {} }
  for k, p in ipairs(bucket.parameters) do
    local numel = p:numel()
    local n = p.ndim > 1 and p:size(1) or 0
    local m = n > 0 and numel / n or 0
    local rank = math.min(n, m, state.matrix_approximation_rank)
    if rank > 0 and (n + m) * rank * state.min_compression_rate < n * m then
      local at = #plan.m + 1
      plan.m[at], plan.p[at], plan.q[at], plan.at[at] = { n, m }, { n, rank }, { m, rank }, bucket.offsets[k]
    else
      plan.rest[#plan.rest + 1] = { bucket.offsets[k], numel }
    end
  end
  return plan
end

-- For batched_powerSGD_hook: treats the whole bucket as one square matrix, padded with zeros.
local function square(state, bucket)
  local numel = bucket.flat:numel()
  local n = math.ceil(math.sqrt(numel))
  local flat = create.zeros(n * n, { dtype = bucket.flat.dtype, device = bucket.flat.device }):keep()
  flat:narrow(1, 1, numel):copy_(bucket.flat)
  local rank = math.min(n, state.matrix_approximation_rank)
  return flat, { m = { { n, n } }, p = { { n, rank } }, q = { { n, rank } }, at = { 1 }, rest = {} }
end

-- Stores the approximation error of a bucket's compression and, with warm_start, its right factors, Q, for the next
-- iteration; drops both if the iteration was given up, because the error must not contain gradients of a failed step.
local function settle(state, run, ok)
  local memory = run.memory
  local fresh = { error = run.error, q = state.warm_start and run.q or nil }
  for _, name in ipairs { "error", "q" } do
    local old = ok and fresh[name] and memory[name]
    if old then old:release() end
    if ok then memory[name] = fresh[name] or memory[name] elseif fresh[name] then fresh[name]:release() end
  end
  if not state.warm_start and run.q then run.q:release() end
end

-- Waits for the collectives that `begin` started, without computing their result.
local function give_up(run)
  for _, work in ipairs { run.rest_work or false, run.p_work or false } do
    if work then pcall(work.wait, work) end
  end
end

-- Begins to compress a bucket: does everything up to the all-reduce of the left factors, P. Returns a table from which
-- `finish` continues.
local function begin(state, bucket, batched)
  local flat, world = bucket.flat, dist.world_size(state.group)
  local plan
  if batched then flat, plan = square(state, bucket) else plan = split(state, bucket) end
  local memory = state.memory[bucket.index]
  if not memory or memory.numel ~= flat:numel() or memory.dtype ~= flat.dtype then
    memory = { numel = flat:numel(), dtype = flat.dtype }
    state.memory[bucket.index] = memory
  end
  local run = { plan = plan, memory = memory, flat = flat, world = world, whole = batched and bucket.flat }
  bucket:on_end(function(ok) settle(state, run, ok) end)
  if state.use_error_feedback and memory.error then flat:add_(memory.error) end
  if #plan.rest > 0 then
    local parts = {}
    for k, r in ipairs(plan.rest) do parts[k] = flat:narrow(1, r[1], r[2]) end
    run.rest = (#parts == 1 and parts[1]:clone() or shape.cat(parts, 1)):keep()
    run.rest_work = dist.all_reduce(run.rest, { group = state.group, async = true })
  end
  local options = { dtype = flat.dtype, device = flat.device }
  local known = state.warm_start and memory.q
  run.p = create.empty(total(plan.p), options):keep()
  run.q = (known and known:clone() or create.empty(total(plan.q), options)):keep()
  local ps, qs = matrices(run.p, plan.p), matrices(run.q, plan.q)
  if not known and run.q:numel() > 0 then draw(state, run.q) end
  for k, q in ipairs(qs) do
    orthogonalize(q, state.orthogonalization_epsilon)
    local size = plan.m[k]
    ps[k]:copy_(flat:narrow(1, plan.at[k], size[1] * size[2]):view(size[1], size[2]):matmul(q))
  end
  if #plan.m > 0 then run.p_work = dist.all_reduce(run.p, { group = state.group, async = true }) end
  state.before = state.before + bucket.flat:numel()
  state.after = state.after + (run.rest and run.rest:numel() or 0) + run.p:numel() + run.q:numel()
  return run
end

local function finish(state, run)
  local plan, flat = run.plan, run.flat
  local ps, qs = matrices(run.p, plan.p), matrices(run.q, plan.q)
  local function matrix(k)
    return flat:narrow(1, plan.at[k], plan.m[k][1] * plan.m[k][2]):view(plan.m[k][1], plan.m[k][2])
  end
  if run.rest then
    run.rest_work:wait()
    run.rest:div_(run.world)
  end
  if run.p_work then
    run.p_work:wait()
    for k, p in ipairs(ps) do
      orthogonalize(p, state.orthogonalization_epsilon)
      -- If a column of P is zero, Q keeps its column as the direction for later gradients.
      local alive = (p * p):sum(1, { keepdim = true }):gt(0)
      qs[k]:copy_(ops.where(alive, matrix(k):t():matmul(p), qs[k]))
    end
    dist.all_reduce(run.q, { group = state.group })
    run.q:div_(run.world)
  end
  if state.use_error_feedback then run.error = flat:clone():keep() end
  if run.p_work then
    for k, p in ipairs(ps) do matrix(k):copy_(p:matmul(qs[k]:t())) end
  end
  if run.error then
    run.error:sub_(flat)
    -- Uncompressed ranges have no approximation error.
    for _, r in ipairs(plan.rest) do run.error:narrow(1, r[1], r[2]):zero_() end
  end
  local at = 1
  for _, r in ipairs(plan.rest) do
    flat:narrow(1, r[1], r[2]):copy_(run.rest:narrow(1, at, r[2]))
    at = at + r[2]
  end
  if run.whole then
    run.whole:copy_(flat:narrow(1, 1, run.whole:numel()))
    flat:release()
  end
  if run.rest then run.rest:release() end
  run.p:release()
end

local function hook_of(name, batched)
  return function(state, bucket)
    if getmetatable(state) ~= State then opts.wrong(state, "a PowerSGDState", "%s: the state", name) end
    local compresses, iter, draws = state.iter >= state.start_powerSGD_iter, state.iter, state.draws
    if bucket.last then state.iter = state.iter + 1 end
    bucket:on_end(function(ok)
      if not ok then state.iter, state.draws = math.min(state.iter, iter), math.min(state.draws, draws) end
    end)
    if not compresses then
      bucket.flat:div_(dist.world_size(state.group))
      return dist.all_reduce(bucket.flat, { group = state.group, async = true })
    end
    local run = autograd.no_grad(begin, state, bucket, batched)
    return {
      wait = function() autograd.no_grad(finish, state, run) end,
      drop = function() give_up(run) end,
    }
  end
end

--- Averages gradients until iteration start_powerSGD_iter, and from then on approximates their mean by P Q^T (Vogels,
--- Karimireddy & Jaggi 2019, algorithm 1).
---@param state table  one for each model
---@param bucket Bucket  given by DDP; its gradients are replaced
---@type fun(state: PowerSGDState, bucket: Bucket): any
M.powerSGD_hook = hook_of("powerSGD_hook", false)

--- As powerSGD_hook, with the whole bucket as one square matrix: fewer and larger products, a coarser approximation.
---@param state table  one for each model
---@param bucket Bucket  given by DDP; its gradients are replaced
---@type fun(state: PowerSGDState, bucket: Bucket): any
M.batched_powerSGD_hook = hook_of("batched_powerSGD_hook", true)

return M
