-- SPDX-License-Identifier: MIT
--- Buckets of nn.DDP: parameters whose gradients share one flat buffer and one reduction
--- (docs/semantics.md#ddp-buckets).
local capture = require "moonshard.autograd.capture"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local hooks = require "moonshard.parallel.ddp.hooks"
local is_tensor = require "moonshard.tensor".is_tensor

local M = {}

---@class Bucket
---@field flat Tensor            the gradients, concatenated, 1-d
---@field parameters Parameter[]  in the order of their gradients in flat
---@field gradients Tensor[]     views of flat, one per parameter
---@field index integer          position in the order of reduction, from 1
---@field last boolean  whether it is reduced last in its backward
local Bucket = {}
Bucket.__index = Bucket
Bucket.__name = "Bucket"

function Bucket.__tostring(b)
  return ("Bucket(%d, %s, %s)"):format(b.index, errors.count(#b.parameters, "parameter"),
    errors.count(b.whole:numel(), "element"))
end

local function bucket_of(params, index, last, dtype)
  local n = 0
  for _, p in ipairs(params) do n = n + p:numel() end
  local flat = create.empty(n, { dtype = dtype, device = params[1].device }):keep()
  local views, offsets, at = {}, {}, 1
  for k, p in ipairs(params) do
    offsets[k] = at
    views[k] = flat:narrow(1, at, p:numel()):view(p.shape):keep()
    at = at + p:numel()
  end
  return setmetatable({
    whole = flat, flat = flat, parameters = params, gradients = views, offsets = offsets, index = index, last = last,
    pending = #params, launched = false,
  }, Bucket)
end

--- Makes one bucket per list.
---@param lists Parameter[][]  the parameters of each bucket
---@param dtype_of? fun(p: Parameter): string  the dtype of a bucket (default: that of its parameters)
---@return Bucket[]
function M.build(lists, dtype_of)
  local out = {}
  for k, list in ipairs(lists) do
    out[k] = bucket_of(list, k, k == #lists, dtype_of and dtype_of(list[1]) or list[1].dtype)
  end
  return out
end

function M.free(buckets)
  for _, b in ipairs(buckets) do
    for _, v in ipairs(b.gradients) do v:release() end
    b.whole:release()
  end
end

--- Registers fn(ok), to be called once: with true when all reductions of the iteration have succeeded, with false when
--- the iteration was given up. Hooks commit or restore their own state in fn, so that a failed step does not change it.
---@param fn fun(ok: boolean)
function Bucket:on_end(fn)
  self.ends = self.ends or {}
  table.insert(self.ends, fn)
end

--- Calls the functions that on_end has registered.
---@param ok boolean
function Bucket:ended(ok)
  local list = self.ends
  self.ends = nil
  for _, fn in ipairs(list or {}) do fn(ok) end
end

function Bucket:reset()
  self:ended(false)
  self.pending, self.launched, self.skipped, self.work, self.flat = #self.parameters, false, false, nil, self.whole
end

-- Whether a gradient is a view of the bucket: buckets share memory only with the gradients of their parameters.
local function is_view(grad, view) return engine.lib.ms_same_storage(grad.id, view.id) ~= 0 end

--- Copies the gradient of p, parameter k, into the bucket (a sparse one densely), or zeros if p has no gradient.
function Bucket:take(k, p)
  local view, grad = self.gradients[k], p.grad
  if not grad then
    view:zero_()
  elseif grad.is_sparse then
    view:copy_(grad:to_dense())
  elseif not is_view(grad, view) then
    view:copy_(grad)
  end
end

--- Stores the reduced gradient of the bucket's k-th parameter in its grad, in the parameter's dtype. as_view: the
--- gradient shares the bucket's memory if both have the same dtype.
function Bucket:give(k, as_view)
  local p, view = self.parameters[k], self.gradients[k]
  local grad = p.grad
  if grad and grad.is_sparse then grad = nil end          -- the mean of sparse gradients of several ranks is dense
  if as_view and view.dtype == p.dtype then
    if not grad or not is_view(grad, view) then
      p.grad = self.whole:narrow(1, self.offsets[k], p:numel()):view(p.shape)
    end
  elseif grad then
    grad:detach():copy_(view)
  elseif view.dtype == p.dtype then
    p.grad = view:clone()
  else
    p.grad = view:to(p.dtype)
  end
  errors.check(engine.lib.ms_grad_set_local(p.id, 0), p)
end

--- Starts the reduction: the communication hook or, if there is none, the sum over the group divided by `world`.
function Bucket:launch(group, world, hook, state)
  self.launched = true
  if hook then
    capture.refuse_hook("a communication hook of DDP", hook)
    local value = hook(state, self)
    -- Bucket:finish reads the value after this scope has ended.
    if is_tensor(value) and value ~= self.whole then value:keep() end
    self.work = value
  else
    -- "avg" divides the sum once, as fully_shard does. Inside DDP:join the divisor may differ from the number of ranks;
    -- each rank then divides its own gradients before the sum.
    local mean = world == dist.world_size(group)
    if not mean then self.whole:div_(world) end
    self.work = dist.all_reduce(self.whole, { group = group, async = true, op = mean and "avg" or "sum" })
  end
end

--- Waits for the reduction; afterwards `flat` contains the result. Raises if a hook's result is neither nil nor a
--- tensor of flat's size.
function Bucket:finish(hook)
  local value = self.work
  self.work = nil
  if not hook then
    value:wait()
    return
  end
  local out = hooks.result_of(value)
  if out == nil then out = self.flat end
  if not is_tensor(out) or out:numel() ~= self.whole:numel() then
    errors.raise("DDP: the communication hook returned %s for bucket %d, expected a tensor of %d elements or nothing",
      errors.kind(out), self.index, self.whole:numel())
  end
  if out ~= self.whole then
    self.whole:copy_(out:reshape(-1))
    if out == value then out:release() end
  end
  self.flat = self.whole
end

return M
