-- SPDX-License-Identifier: MIT
--- Rotary positions (Su et al. 2021), with the scalings of long contexts that configurations ask for: linear, dynamic,
--- that of Llama 3.1, YaRN (Peng et al. 2023) and LongRoPE (Ding et al. 2024). The cosines and sines of a call's
--- positions are computed once and shared by all layers.
local create = require "moonshard.tensor.create"
local Config = require "moonshard.hf.config"
local nn = require "moonshard.nn"
local ops = require "moonshard.nn.ops"
local opts = require "moonshard.core.opts"

local M = {}

local positive = Config.positive

-- ---- the angle by which each pair of features turns from one position to the next ----------------

local kinds = {}

function kinds.default(rate) return rate end

function kinds.linear(rate, o) return rate / o.factor end

-- Frequencies whose wavelength is beyond the original context are divided by the factor; between two wavelengths the
-- division fades in.
function kinds.llama3(rate, o)
  local wavelength = 2 * math.pi / rate
  local long, short = o.context / o.low, o.context / o.high
  if wavelength < short then return rate end
  if wavelength > long then return rate / o.factor end
  local smooth = (o.context / wavelength - o.low) / (o.high - o.low)
  return (1 - smooth) * rate / o.factor + smooth * rate
end

-- The division fades in between the pairs that turn beta_fast and beta_slow times in the original context.
function kinds.yarn(rate, o, pair)
  local function pair_of(turns) return o.d * math.log(o.context / (turns * 2 * math.pi)) / (2 * math.log(o.base)) end
  local low, high = pair_of(o.fast), pair_of(o.slow)
  if o.truncate then low, high = math.floor(low), math.ceil(high) end
  low, high = math.max(low, 0), math.min(high, o.d - 1)
  if low == high then high = high + 0.001 end
  local ramp = math.max(0, math.min(1, (pair - 1 - low) / (high - low)))
  return rate / o.factor * ramp + rate * (1 - ramp)
end

-- Each pair has its own divisor, and another one for texts beyond the original context.
function kinds.longrope(rate, o, pair, is_long) return rate / (is_long and o.long or o.short)[pair] end

function kinds.dynamic(rate) return rate end             -- until the context ends; then `dynamic_base`

-- The base with which a text of `last` positions fits into the context.
local function dynamic_base(o, last)
  return o.base * (o.factor * last / o.context - (o.factor - 1)) ^ (o.d / (o.d - 2))
end

local rope_kind = opts.one_of { "default", "dynamic", "linear", "llama3", "longrope", "yarn" }

-- ---- configurations ------------------------------------------------------------------------------

local function attention_scale(p, default) return p:maybe("attention_factor", positive) or default end

local readers = {}

function readers.linear(p, o) o.factor = p:get("factor", positive) end

function readers.dynamic(p, o, most)
  o.factor, o.context = p:get("factor", Config.positive), most
  if o.factor < 1 then p:fail("factor", "is %g, expected 1 or more", o.factor) end
  if o.d < 4 then p:fail("rope_type", "is 'dynamic', which needs 4 features to turn, not %d", o.d) end
end

function readers.llama3(p, o)
  o.factor, o.low, o.high = p:get("factor", positive), p:get("low_freq_factor", positive), p:get("high_freq_factor",
    positive)
  if o.low == o.high then p:fail("high_freq_factor", "is %g, as low_freq_factor, expected another number", o.high) end
end

function readers.yarn(p, o, most)
  o.factor = p:maybe("factor", positive) or most / o.context
  o.fast, o.slow = p:get("beta_fast", positive, 32), p:get("beta_slow", positive, 1)
  o.truncate = p:get("truncate", opts.boolean, true)
  local a, b = p:maybe("mscale", opts.number), p:maybe("mscale_all_dim", opts.number)
  local function scale_of(m) return o.factor <= 1 and 1 or 0.1 * m * math.log(o.factor) + 1 end
  local both = a and b and a ~= 0 and b ~= 0
  o.scale = attention_scale(p, both and scale_of(a) / scale_of(b) or scale_of(1))
  if o.base <= 1 then p:fail("rope_theta", "is %g, expected more than 1", o.base) end
end

function readers.longrope(p, o, most)
  local divisors = opts.kind(("a list of %d numbers > 0"):format(o.d / 2), function(list)
    for k = 1, o.d / 2 do
      if type(list) ~= "table" or not positive.test(list[k]) then return false end
    end
    return #list == o.d / 2
  end)
  o.short, o.long = p:get("short_factor", divisors), p:get("long_factor", divisors)
  local factor = p:maybe("factor", positive) or most / o.context
  o.scale = attention_scale(p, factor <= 1 and 1 or math.sqrt(1 + math.log(factor) / math.log(o.context)))
end

--- What a configuration says about the positions of heads with d features. transformers 5 writes rope_parameters; 4
--- wrote rope_theta and rope_scaling.
---@param c HFConfig
---@param d integer
---@param family { partial?: boolean, positions?: integer, context?: integer }  partial: partial_rotary_factor counts, as
---   in Phi-3; other families of transformers leave it out. positions, context: defaults of max_position_embeddings and
---   original_max_position_embeddings
---@return table  for `rates`
function M.read(c, d, family)
  if not family.partial then c:only("partial_rotary_factor", 1) end
  local base, portion = c:get("rope_theta", positive, 10000), c:get("partial_rotary_factor", Config.share, 1)
  local most = c:get("max_position_embeddings", Config.size, family.positions or 2048)
  local context = c:maybe("original_max_position_embeddings", positive, family.context)
  local p = c:part "rope_parameters" or c:part "rope_scaling"
  if not p then return { d = 2 * math.floor(d * portion / 2), base = base, kind = "default", scale = 1 } end
  if not family.partial then p:only("partial_rotary_factor", 1) end
  local o = { base = p:get("rope_theta", positive, base), scale = 1 }
  o.d = 2 * math.floor(d * p:get("partial_rotary_factor", Config.share, portion) / 2)
  local own = p:maybe("original_max_position_embeddings", positive)
  o.kind, o.context = p:get("rope_type", rope_kind, p:get("type", rope_kind, "default")), context or own or most
  if readers[o.kind] then readers[o.kind](p, o, most) end
  p:finish()
  return o
end

--- The angles of all pairs of features: { [false] = angles, [true] = those beyond the original context }.
---@param o table  from `read`
---@return table
function M.rates(o)
  local limited = o.kind == "longrope" or o.kind == "dynamic"
  local all = { scale = o.scale, context = limited and o.context or math.huge }
  if o.kind == "dynamic" then
    function all.beyond(last)
      local rates, base = {}, dynamic_base(o, last)
      for k = 1, o.d / 2 do rates[k] = base ^ (-2 * (k - 1) / o.d) end
      return rates
    end
  end
  for _, is_long in ipairs { false, o.kind == "longrope" and true or nil } do
    local rates = {}
    for k = 1, o.d / 2 do rates[k] = kinds[o.kind](o.base ^ (-2 * (k - 1) / o.d), o, k, is_long) end
    all[is_long] = rates
  end
  return all
end

-- ---- calls ---------------------------------------------------------------------------------------

--- The cosines and sines of positions, computed in float32 and rounded to the model's dtype, as in transformers.
---@param rates table  from `rates`
---@param positions Tensor  int64 [T], or [B, T]
---@param dtype string
---@param last integer  the last position, from 1
---@return { cos: Tensor, sin: Tensor }  [T, d / 2], or [B, 1, T, d / 2]
function M.table(rates, positions, dtype, last)
  local kind = { dtype = dtype == "float64" and "float64" or "float32", device = positions.device }
  local is_long = last > rates.context
  local list = is_long and rates.beyond and rates.beyond(last) or rates[is_long]
  local angles = positions:to(kind.dtype):unsqueeze(-1) * create.tensor(list, kind)
  if angles.ndim == 3 then angles = angles:unsqueeze(2) end
  local cos, sin = angles:cos(), angles:sin()
  if rates.scale ~= 1 then cos, sin = cos * rates.scale, sin * rates.scale end
  return { cos = cos:to(dtype):to(kind.dtype), sin = sin:to(dtype):to(kind.dtype) }
end

--- Turns the first features of queries or keys, of which i and i + d / 2 form a pair.
---@param x Tensor  [B, H, T, D]
---@param at { cos: Tensor, sin: Tensor }
---@param norm? Module  of the features, which goes before; an RMSNorm is computed in the same pass
---@return Tensor
function M.turn(x, at, norm)
  if norm and (getmetatable(norm) ~= nn.RMSNorm or norm._hooked or norm.weight.dtype ~= x.dtype) then
    x, norm = norm(x), nil
  end
  local cos, sin = at.cos, at.sin
  -- Mixed precision of FSDP casts what a layer is called with.
  if cos.dtype == "bfloat16" or cos.dtype == "float16" then cos, sin = cos:float(), sin:float() end
  return ops.rotary(x, cos, sin, norm and norm.weight, norm and norm.eps)
end

return M
