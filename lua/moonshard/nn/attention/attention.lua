-- SPDX-License-Identifier: MIT
--- MultiheadAttention.
---
--- Masks have the meaning of PyTorch's layer of this name: a bool mask is true where attention is NOT allowed (the
--- opposite of F.scaled_dot_product_attention); a floating point mask is added to the scores.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local shape = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local functional = require "moonshard.nn.functional"
local init = require "moonshard.nn.initial".init
local Linear = require "moonshard.nn.linear.linear".Linear
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.module.parameter".empty
local a_tensor = tensor.a_tensor

local raise, is_tensor = errors.raise, tensor.is_tensor
local linear, F = ops.linear, functional.F
local rawequal = rawequal

local function sizes_text(...) return "[" .. table.concat({ ... }, ", ") .. "]" end

--- Attention of `heads` heads over d channels, [T, N, d] (or [N, T, d] with batch_first, or [T, d]). Calling it gives
--- the output and the weights (nil without need_weights), averaged over heads unless average_attn_weights is false
--- (Vaswani et al. 2017). A bool mask is true where attention is not allowed. Errors: d is not divisible by heads.
---@class MultiheadAttention: Module
---@field in_proj_weight Parameter?  [3 d, d]: query, key, value; nil if kdim or vdim is not d
---@field q_proj_weight Parameter?  [d, d]; this and the next two are nil if kdim and vdim are d
---@field k_proj_weight Parameter?  [d, kdim]
---@field v_proj_weight Parameter?  [d, vdim]
---@field in_proj_bias Parameter?  [3 d]; nil without bias
---@field bias_k Parameter?  [1, 1, d]; nil without add_bias_kv
---@field bias_v Parameter?  [1, 1, d]; nil without add_bias_kv
---@field out_proj Linear  [d, d]; maps the concatenated heads to the output
---@overload fun(d: integer, heads: integer, opts?: { dropout: number, bias: boolean, add_bias_kv: boolean, add_zero_attn: boolean, kdim: integer, vdim: integer, batch_first: boolean, dtype: string, device: string }): MultiheadAttention
---   dropout: probability, in training, of setting an attention weight to 0 (default: 0); add_bias_kv: adds a learned
---   key and value; add_zero_attn: adds a key and value of zeros; kdim: channels of key
---   (default: d); vdim: channels of value (default: d)
local MultiheadAttention = Module:extend("MultiheadAttention")

---@param d integer  channels of query, output, and, without kdim and vdim, of key and value
---@param heads integer  divides d
function MultiheadAttention:init(d, heads, given)
  local o = opts("MultiheadAttention", given, {
    dropout = 0, bias = true, add_bias_kv = false, add_zero_attn = false, kdim = opts.number, vdim = opts.number,
    batch_first = false, dtype = opts.string, device = opts.any,
  })
  opts.expect(d, opts.whole, "MultiheadAttention: argument 1, embed_dim,")
  opts.expect(heads, opts.whole, "MultiheadAttention: argument 2, num_heads,")
  if d <= 0 or heads <= 0 then
    raise("embed_dim and num_heads must be greater than 0, got embed_dim=%d and num_heads=%d instead", d, heads)
  end
  if d % heads ~= 0 then
    raise("embed_dim must be divisible by num_heads, got embed_dim=%d and num_heads=%d instead", d, heads)
  end
  local kind = { dtype = o.dtype, device = o.device }
  self.d, self.heads, self.head_dim, self.dropout, self.batch_first = d, heads, d / heads, o.dropout, o.batch_first
  self.kdim, self.vdim, self.add_zero_attn = o.kdim or d, o.vdim or d, o.add_zero_attn
  self.packed = self.kdim == d and self.vdim == d
  if self.packed then
    self.in_proj_weight = empty({ 3 * d, d }, kind)
  else
    self.q_proj_weight = empty({ d, d }, kind)
    self.k_proj_weight = empty({ d, self.kdim }, kind)
    self.v_proj_weight = empty({ d, self.vdim }, kind)
  end
  if o.bias then self.in_proj_bias = empty({ 3 * d }, kind) end
  self.out_proj = Linear(d, d, { bias = o.bias, dtype = o.dtype, device = o.device })
  if o.add_bias_kv then
    self.bias_k = empty({ 1, 1, d }, kind)
    self.bias_v = empty({ 1, 1, d }, kind)
  end
  self:_draw()
end

-- Initialises all parameters except out_proj.weight. The caller initialises that one first, so that random numbers are
-- drawn in the order of PyTorch's constructor.
function MultiheadAttention:_draw()
  for _, name in ipairs { "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight" } do
    if self[name] then init.xavier_uniform_(self[name]) end
  end
  if self.in_proj_bias then
    init.zeros_(self.in_proj_bias)
    init.zeros_(self.out_proj.bias)
  end
  if self.bias_k then
    init.xavier_normal_(self.bias_k)
    init.xavier_normal_(self.bias_v)
  end
end

--- Initialises all parameters again: the projections of query, key and value xavier-uniform, out_proj.weight as that of
--- a Linear, bias_k and bias_v xavier-normal, the other biases 0.
function MultiheadAttention:reset_parameters()
  self.out_proj:reset_parameters()
  self:_draw()
end

-- Blocks k .. k + n - 1 of the packed projection, each with d rows.
local function part(t, k, n, d) return t and t:narrow(1, (k - 1) * d + 1, n * d) end

-- The three projections [..., d]. With one packed weight, inputs that are the same tensor (all three, or key and value)
-- share one matrix product.
local function project(self, q, k, v)
  local slots, d = self._slots, self.d
  local w, b = slots.in_proj_weight, slots.in_proj_bias
  if not w then
    return linear(q, slots.q_proj_weight, part(b, 1, 1, d)), linear(k, slots.k_proj_weight, part(b, 2, 1, d)),
      linear(v, slots.v_proj_weight, part(b, 3, 1, d))
  end
  if rawequal(q, k) and rawequal(k, v) then
    local all = linear(q, w, b):chunk(3, -1)
    return all[1], all[2], all[3]
  end
  local first = linear(q, part(w, 1, 1, d), part(b, 1, 1, d))
  if rawequal(k, v) then
    local rest = linear(k, part(w, 2, 2, d), part(b, 2, 2, d)):chunk(2, -1)
    return first, rest[1], rest[2]
  end
  return first, linear(k, part(w, 2, 1, d), part(b, 2, 1, d)), linear(v, part(w, 3, 1, d), part(b, 3, 1, d))
end

-- Converts a mask to a tensor that can be added to scores of like's dtype.
local function additive(mask, what, like)
  opts.expect(mask, a_tensor, "MultiheadAttention: %s", what)
  if mask.dtype == "bool" then
    return create.zeros(mask.shape, { dtype = like.dtype, device = like.device }):masked_fill(mask, -math.huge)
  end
  if not mask.dtype:find "float" then
    raise("only bool and floating types of %s are supported, got %s", what, mask.dtype)
  end
  return mask:to(like.dtype)
end

-- Combines attn_mask, or the mask of is_causal, with key_padding_mask into one tensor that is added to the scores:
-- [B or 1, heads or 1, T or 1, S + extra]; nil without masks. The extra columns (bias_k, zeros) are not masked.
local function merge(self, o, like, B, T, S, extra)
  local mask, pad = o.attn_mask, o.key_padding_mask
  if mask then
    mask = additive(mask, "attn_mask", like)
    local n = mask.ndim
    if n ~= 2 and n ~= 3 then raise("attn_mask has %s, expected 2 or 3", errors.count(n, "dimension")) end
    local text, expected = tostring(mask.shape), n == 2 and sizes_text(T, S) or sizes_text(B * self.heads, T, S)
    if text ~= expected then raise("The shape of the %dD attn_mask is %s, but should be %s.", n, text, expected) end
    mask = n == 2 and mask:reshape(1, 1, T, S) or mask:reshape(B, self.heads, T, S)
  elseif o.is_causal then
    mask = additive(create.ones({ T, S }, { dtype = "bool", device = like.device }):triu(1), "attn_mask",
      like):reshape(1, 1, T, S)
  end
  if pad then
    pad = additive(pad, "key_padding_mask", like)
    if pad.ndim == 1 then pad = pad:unsqueeze(1) end
    if tostring(pad.shape) ~= sizes_text(B, S) then
      raise("expecting key_padding_mask shape of %s, but got %s", sizes_text(B, S), tostring(pad.shape))
    end
    pad = pad:reshape(B, 1, 1, S)
    mask = mask and mask + pad or pad
  end
  if mask and extra > 0 then
    local sizes = mask.shape
    sizes[4] = extra
    mask = shape.cat({ mask, create.zeros(sizes, { dtype = like.dtype, device = like.device }) }, 4)
  end
  return mask
end

local forward_options = {
  key_padding_mask = opts.any, need_weights = true, attn_mask = opts.any, average_attn_weights = true,
  is_causal = false,
}

---@param query Tensor  [T, N, d], [N, T, d] with batch_first, or [T, d]
---@param key Tensor  [S, N, kdim], [N, S, kdim] with batch_first, or [S, kdim]
---@param value Tensor  [S, N, vdim], [N, S, vdim] with batch_first, or [S, vdim]
---@param given? { key_padding_mask: Tensor, need_weights: boolean, attn_mask: Tensor, average_attn_weights: boolean, is_causal: boolean }
---   key_padding_mask: [N, S], or [S]; true: the key is not attended to; need_weights: returns the weights, too
---   (default: true); attn_mask: [T, S] or [N * heads, T, S]; average_attn_weights: averages weights over heads
---   (default: true); is_causal: position t attends to positions up to t; a mask given with is_causal must do the same
---@return Tensor out
---@return Tensor? weights
function MultiheadAttention:forward(query, key, value, given)
  local o = opts("MultiheadAttention", given, forward_options)
  for i, t in ipairs { query or false, key or false, value or false } do
    if not is_tensor(t) then
      opts.wrong(t or nil, "a tensor", "MultiheadAttention: %s", ({ "query", "key", "value" })[i])
    end
  end
  local single = query.ndim == 2
  if query.ndim ~= 2 and query.ndim ~= 3 then
    raise("query should be unbatched 2D or batched 3D tensor but received %d-D query tensor", query.ndim)
  end
  if key.ndim ~= query.ndim or value.ndim ~= query.ndim then
    raise("For %s `query`, expected `key` and `value` to be %d-D but found %d-D and %d-D tensors respectively",
      single and "unbatched (2-D)" or "batched (3-D)", query.ndim, key.ndim, value.ndim)
  end
  if query:size(-1) ~= self.d then
    raise("was expecting embedding dimension of %d, but got %d", self.d, query:size(-1))
  end
  local first = self.batch_first and not single
  if key:size(1) ~= value:size(1) or not single and key:size(2) ~= value:size(2) then
    raise("key shape %s does not match value shape %s", tostring(key.shape), tostring(value.shape))
  end
  if not single and key:size(first and 1 or 2) ~= query:size(first and 1 or 2) then
    raise("key shape %s has another batch size than query shape %s", tostring(key.shape), tostring(query.shape))
  end
  local q, k, v = project(self, query, key, value)
  if single then q, k, v = q:unsqueeze(2), k:unsqueeze(2), v:unsqueeze(2) end
  local batch, time = first and 1 or 2, first and 2 or 1
  local B, T, S, H, D = q:size(batch), q:size(time), k:size(time), self.heads, self.head_dim
  local extra = 0
  local function append(more_k, more_v)
    k, v, extra = shape.cat({ k, more_k }, time), shape.cat({ v, more_v }, time), extra + 1
  end
  local sizes = first and { B, 1, self.d } or { 1, B, self.d }
  if self.bias_k then append(self.bias_k:expand(sizes), self.bias_v:expand(sizes)) end
  if self.add_zero_attn then
    local zeros = create.zeros(sizes, { dtype = q.dtype, device = q.device })
    append(zeros, zeros)
  end
  local columns = S + extra
  local function heads(t, length)                 -- a view [B, H, length, D]
    if first then return t:reshape(B, length, H, D):transpose(2, 3) end
    return t:reshape(length, B, H, D):permute(2, 3, 1, 4)
  end
  q, k, v = heads(q, T), heads(k, columns), heads(v, columns)
  local p = self.training and self.dropout or 0

  local out, weights
  if not o.need_weights and o.is_causal and not o.key_padding_mask and extra == 0 and T == S then
    out = ops.attention(q, k, v, nil, { is_causal = true, dropout_p = p })
  else
    local mask = merge(self, o, q, B, T, S, extra)
    if o.need_weights then
      local scores = (q * (1 / math.sqrt(D))):matmul(k:transpose(-2, -1))
      weights = ops.softmax(mask and scores + mask or scores, -1)
      if p > 0 then weights = F.dropout(weights, p) end
      out = weights:matmul(v)
      if o.average_attn_weights then weights = weights:mean(2) end
      if single then weights = weights:squeeze(1) end
    else
      out = ops.attention(q, k, v, nil, { attn_mask = mask, dropout_p = p })
    end
  end
  out = first and out:transpose(2, 3):reshape(B, T, self.d) or out:permute(3, 1, 2, 4):reshape(T, B, self.d)
  if single then out = out:squeeze(2) end
  return self.out_proj(out), weights
end

function MultiheadAttention:extra_repr()
  return ("%d, heads %d%s%s"):format(self.d, self.heads, self.dropout > 0 and (", dropout %g"):format(self.dropout)
    or "", self.batch_first and ", batch first" or "")
end

return { MultiheadAttention = MultiheadAttention }
