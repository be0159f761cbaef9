-- SPDX-License-Identifier: MIT
--- nn.F.ctc_loss: connectionist temporal classification (kernels/formulas/ctc.h).
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local a_in, a_i, args, ffi = engine.a_in, engine.a_i, engine.args, engine.ffi
local a_tensor, raise = tensor.a_tensor, errors.raise
local CTC = engine.op "ctc_loss"

local M = {}

-- Lengths as int64 [N] on the device of the log probabilities, and the largest of them.
local function lengths(what, given, n, device)
  local label = "ctc_loss: " .. what
  if type(given) == "number" then given = { given } end
  local t
  if opts.is_plain(given) then
    for k, v in ipairs(given) do opts.expect(v, opts.whole_from(0), "%s %d", label, k) end
    t = create.tensor(given, { dtype = "int64", device = device })
  else
    t = opts.expect(given, a_tensor, "%s", label):to("int64"):to(device)
    if #t.shape == 0 then t = t:reshape(1) end
  end
  if #t.shape ~= 1 or t.shape[1] ~= n then
    raise("%s have shape %s, expected [%d]: one for each sample", label, tostring(t.shape), n)
  end
  if n == 0 then return t, 0 end
  if t:min():item() < 0 then raise("%s contains %d, expected numbers from 0", label, t:min():item()) end
  return t, t:max():item()
end

-- Checks classes and lengths on the host, as the CPU's kernel does (cpu/special/ctc.c): kernels of a GPU cannot stop
-- the call. The host waits for the device in any case, to read the lengths.
local function check_values(ids, sizes, blank, classes)
  local flat, rows = ids:to("cpu"):contiguous(), #ids.shape == 2 and ids.shape[2]
  local room, text = flat:numel(), ("%s [%s] %s"):format(ids.dtype, table.concat(ids.shape, ", "), ids.device)
  local all, used = ffi.cast("const int64_t *", engine.lib.ms_data_ptr(flat.id)), 0
  for n, length in ipairs(sizes:tolist()) do
    if not rows and used + length > room then
      raise("ctc_loss: the target length of sample %d is %d, expected 0 to %d, the number of targets left for it in %s", n,
        length, room - used, text)
    end
    local first = rows and (n - 1) * rows or used
    for k = first, first + length - 1 do
      local class = tonumber(all[k])
      if class < 0 or class >= classes or class == blank then
        raise("ctc_loss: target %d of sample %d is %d, expected 0 to %d except the blank, %d", k - first + 1, n, class,
          classes - 1, blank)
      end
    end
    used = used + length
  end
end

local OPTIONS = { blank = opts.option(opts.whole_from(0), 0), zero_infinity = false,
  reduction = opts.one_of({ "mean", "sum", "none" }, "mean") }

--- Connectionist temporal classification (Graves et al. 2006): minus the logarithm of the probability that the target
--- comes out when repeated classes and then blanks are dropped. "mean" divides each loss by the target's length, at
--- least 1, and takes the mean. The gradient is exact for any log_probs; PyTorch's adds exp(log_probs), which makes no
--- difference if they come from log_softmax. On a GPU the call waits for the targets. Errors: a length that does not
--- fit; a class that does not exist or is the blank.
---@param log_probs Tensor  [T, N, C], log probabilities; or [T, C] for one sample
---@param targets Tensor  classes from 0: int64 [N, S], or all targets one after the other; [S] for one sample
---@param input_lengths Tensor|integer[]|integer  [N], at most T
---@param target_lengths Tensor|integer[]|integer  [N], at most S
---@param given? { blank: integer, reduction: "mean"|"sum"|"none", zero_infinity: boolean }
---   blank: the class of the blank (default: 0); zero_infinity: a loss that is infinite, because the input is too short
---   for the target, counts as 0, and so does its gradient (default: false)
---@return Tensor  [], or [N] with "none"
function M.ctc_loss(log_probs, targets, input_lengths, target_lengths, given)
  local o = opts("ctc_loss", given, OPTIONS)
  opts.expect(log_probs, a_tensor, "ctc_loss: log_probs")
  opts.expect(targets, a_tensor, "ctc_loss: targets")
  return scope.run("ctc_loss", function()
    local single, x = #log_probs.shape == 2, log_probs
    if single then x = x:unsqueeze(2) end
    if #x.shape ~= 3 then
      raise("ctc_loss: log_probs have shape %s, expected [T, N, C] or [T, C]", tostring(log_probs.shape))
    end
    local n, device = x.shape[2], x.device
    local times, longest_input = lengths("input_lengths", input_lengths, n, device)
    local sizes, longest = lengths("target_lengths", target_lengths, n, device)
    local ids = targets:to("int64"):to(device)
    local room = ids.shape[#ids.shape] or 0
    if longest_input > x.shape[1] then
      raise("ctc_loss: input_lengths contains %d, expected at most %d, the first size of log_probs", longest_input,
        x.shape[1])
    end
    if longest > room then
      raise("ctc_loss: target_lengths contains %d, expected at most %d, the last size of targets", longest, room)
    end
    if not device:find "^cpu" and device ~= "meta" then check_values(ids, sizes, o.blank, x.shape[3]) end
    a_i[0], a_i[1], a_i[2] = o.blank, o.zero_infinity and 1 or 0, longest
    args.n_in, args.n_i, args.n_f = 4, 3, 0
    for k, t in ipairs { x, ids, times, sizes } do a_in[k - 1] = tensor.id_of(t, "ctc_loss") end
    local loss = tensor.wrap(tensor.call(CTC, x, ids, times))
    if o.reduction == "mean" then
      return (loss / sizes:to(loss.dtype):clamp_min(1)):mean()
    elseif o.reduction == "sum" then
      return loss:sum()
    end
    return single and loss:squeeze(1) or loss
  end)
end

return M
