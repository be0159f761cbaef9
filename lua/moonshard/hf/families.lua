-- SPDX-License-Identifier: MIT
--- The families of decoders: what each makes of its config.json, and how it names parameters. A row has
---   architecture  the class of transformers
---   options       a function that reads the configuration and returns the options of decoder.lua and block.lua
---   names         parts of our names of parameters and of the files' names, both counting layers from 0; the first
---                 that fits is replaced. "#": a number. Those with transposed = true are [in, out] in files.
local Config = require "moonshard.hf.config"
local opts = require "moonshard.core.opts"
local rotary = require "moonshard.hf.rotary"

local M = {}

local size, positive, share, acts = Config.size, Config.positive, Config.share, Config.act

-- ---- layers with a window -----------------------------------------------------------------------

local layer_types = opts.kind("a list of 'full_attention' and 'sliding_attention'", function(list)
  if type(list) ~= "table" then return false end
  for _, t in ipairs(list) do
    if t ~= "full_attention" and t ~= "sliding_attention" then return false end
  end
  return #list > 0
end)

-- Which layers have the window: those of layer_types; without, those for which by_default(k) is true.
local function windows(c, o, by_default, absent)
  local window = c:maybe("sliding_window", size, absent)
  local types = c:maybe("layer_types", layer_types)
  if types and #types ~= o.layers then
    c:fail("layer_types", "has %d elements, expected one for each of the %d layers", #types, o.layers)
  end
  if not window then return end
  o.window, o.windows = window, {}
  for k = 1, o.layers do
    if types then o.windows[k] = types[k] == "sliding_attention" else o.windows[k] = by_default(k) end
  end
end

-- ---- what the descendants of Llama share --------------------------------------------------------

-- d: what a file without a key means, where that is not what it means to Llama: act_key, act, eps, pad, partial, and
-- positions and context (rotary.lua).
local function llama_like(c, d)
  local o = {
    vocab = c:get("vocab_size", size), dim = c:get("hidden_size", size), layers = c:get("num_hidden_layers",
      Config.layers),
    heads = c:get("num_attention_heads", size), mlp_dim = c:get("intermediate_size", size),
    act = c:get(d.act_key or "hidden_act", acts, d.act or "silu"), gated = true, attention_dropout = c:get("attention_dropout",
      share, 0),
    norm = { kind = "rms", eps = c:get("rms_norm_eps", positive, d.eps or 1e-6) }, tied = c:get("tie_word_embeddings",
      opts.boolean, false),
  }
  o.padding_row = c:padding_row(o.vocab, d.pad)
  o.kv_heads = c:get("num_key_value_heads", size, o.heads)
  if o.heads % o.kv_heads ~= 0 then
    c:fail("num_key_value_heads", "is %d, expected a divisor of num_attention_heads, %d", o.kv_heads, o.heads)
  end
  local head_dim = c:maybe("head_dim", Config.head)
  if not head_dim and o.dim % o.heads ~= 0 then
    c:fail("hidden_size", "is %d, expected a multiple of num_attention_heads, %d", o.dim, o.heads)
  end
  o.head_dim = head_dim or o.dim / o.heads
  if o.head_dim % 2 ~= 0 then c:fail("head_dim", "is %d, expected an even number", o.head_dim) end
  o.rotary = rotary.read(c, o.head_dim, d)
  c:only("pretraining_tp", 1)
  return o
end

local LLAMA = {
  { "model.embed.", "model.embed_tokens." },
  { "model.layers.#.attn.q.", "model.layers.#.self_attn.q_proj." },
  { "model.layers.#.attn.k.", "model.layers.#.self_attn.k_proj." },
  { "model.layers.#.attn.v.", "model.layers.#.self_attn.v_proj." },
  { "model.layers.#.attn.qkv.", "model.layers.#.self_attn.qkv_proj." },
  { "model.layers.#.attn.out.", "model.layers.#.self_attn.o_proj." },
  { "model.layers.#.attn.q_norm.", "model.layers.#.self_attn.q_norm." },
  { "model.layers.#.attn.k_norm.", "model.layers.#.self_attn.k_norm." },
  { "model.layers.#.mlp.gate.", "model.layers.#.mlp.gate_proj." },
  { "model.layers.#.mlp.up.", "model.layers.#.mlp.up_proj." },
  { "model.layers.#.mlp.gate_up.", "model.layers.#.mlp.gate_up_proj." },
  { "model.layers.#.mlp.down.", "model.layers.#.mlp.down_proj." },
  { "model.layers.#.attn_norm.", "model.layers.#.input_layernorm." },
  { "model.layers.#.mlp_norm.", "model.layers.#.post_attention_layernorm." },
}

M.llama = { architecture = "LlamaForCausalLM", names = LLAMA, options = function(c)
  local o = llama_like(c, {})
  local attention = c:get("attention_bias", opts.boolean, false)
  o.bias = { qkv = attention, out = attention, mlp = c:get("mlp_bias", opts.boolean, false) }
  return o
end }

M.mistral = { architecture = "MistralForCausalLM", names = LLAMA, options = function(c)
  local o = llama_like(c, { positions = 131072 })
  windows(c, o, function() return true end, 4096)
  return o
end }

-- Qwen's window begins after max_window_layers layers, and only if use_sliding_window is set.
local function qwen(c)
  local o = llama_like(c, { positions = 32768 })
  local from = c:get("max_window_layers", opts.whole_from(0), 28)
  if c:get("use_sliding_window", opts.boolean, false) then
    windows(c, o, function(k) return k > from end, 4096)
  else
    c:ignore("sliding_window", "layer_types")
  end
  return o
end

M.qwen2 = { architecture = "Qwen2ForCausalLM", names = LLAMA, options = function(c)
  local o = qwen(c)
  o.bias = { qkv = true }
  return o
end }

M.qwen3 = { architecture = "Qwen3ForCausalLM", names = LLAMA, options = function(c)
  local o = qwen(c)
  local attention = c:get("attention_bias", opts.boolean, false)
  o.bias, o.qk_norm = { qkv = attention, out = attention }, true
  return o
end }

M.phi3 = { architecture = "Phi3ForCausalLM", names = LLAMA, options = function(c)
  local o = llama_like(c, { partial = true, pad = 32000, eps = 1e-5, positions = 4096, context = 4096 })
  o.renews = o.rotary.kind == "longrope"
  o.fused, o.dropout, o.embed_dropout = true, c:get("resid_pdrop", share, 0), c:get("embd_pdrop", share, 0)
  windows(c, o, function() return true end)
  return o
end }

local function gemma(c, act_key)
  local o = llama_like(c, { act_key = act_key, act = "gelu_pytorch_tanh", pad = 0, positions = 8192 })
  c:only("use_bidirectional_attention", false)
  o.norm.kind, o.embed_scale = "rms1", o.dim ^ 0.5
  local attention = c:get("attention_bias", opts.boolean, false)
  o.bias = { qkv = attention, out = attention }
  if c.values.tie_word_embeddings == nil then o.tied = true end
  return o
end

M.gemma = { architecture = "GemmaForCausalLM", names = LLAMA, options = function(c)
  local o = gemma(c)
  if o.act == "gelu" then o.act = "gelu_pytorch_tanh" end      -- old files say the one and mean the other
  c:only("hidden_activation", o.act)
  return o
end }

local GEMMA2 = {
  { "model.layers.#.attn_after.", "model.layers.#.post_attention_layernorm." },
  { "model.layers.#.mlp_norm.", "model.layers.#.pre_feedforward_layernorm." },
  { "model.layers.#.mlp_after.", "model.layers.#.post_feedforward_layernorm." },
}
for _, row in ipairs(LLAMA) do
  if row[1] ~= "model.layers.#.mlp_norm." then GEMMA2[#GEMMA2 + 1] = row end
end

M.gemma2 = { architecture = "Gemma2ForCausalLM", names = GEMMA2, options = function(c)
  local o = gemma(c, "hidden_activation")
  c:ignore "hidden_act"
  o.sandwich, o.scale = true, c:get("query_pre_attn_scalar", positive, 256) ^ -0.5
  o.softcap, o.final_softcap = c:maybe("attn_logit_softcapping", positive, 50),
    c:maybe("final_logit_softcapping", positive, 30)
  c:ignore "cache_implementation"
  windows(c, o, function(k) return k % 2 == 1 end, 4096)
  return o
end }

-- ---- GPT-2 ---------------------------------------------------------------------------------------

M.gpt2 = {
  architecture = "GPT2LMHeadModel", prefix = "transformer.",
  names = {
    { "model.embed.", "transformer.wte." }, { "model.positions.", "transformer.wpe." },
    { "model.layers.#.attn_norm.", "transformer.h.#.ln_1." },
    { "model.layers.#.attn.qkv.", "transformer.h.#.attn.c_attn.", transposed = true },
    { "model.layers.#.attn.out.", "transformer.h.#.attn.c_proj.", transposed = true },
    { "model.layers.#.mlp_norm.", "transformer.h.#.ln_2." },
    { "model.layers.#.mlp.up.", "transformer.h.#.mlp.c_fc.", transposed = true },
    { "model.layers.#.mlp.down.", "transformer.h.#.mlp.c_proj.", transposed = true },
    { "model.norm.", "transformer.ln_f." },
  },
  options = function(c)
    local o = {
      vocab = c:get("vocab_size", size), dim = c:get("n_embd", size), layers = c:get("n_layer", Config.layers),
      heads = c:get("n_head", size), learned = c:get("n_positions", size, 1024), fused = true,
      act = c:get("activation_function", acts, "gelu_new"), norm = { kind = "layer", bias = true,
        eps = c:get("layer_norm_epsilon", positive, 1e-5) },
      bias = { qkv = true, out = true, mlp = true }, tied = c:get("tie_word_embeddings", opts.boolean, true),
      dropout = c:get("resid_pdrop", share, 0.1), embed_dropout = c:get("embd_pdrop", share, 0.1),
      attention_dropout = c:get("attn_pdrop", share, 0.1),
    }
    o.mlp_dim = c:maybe("n_inner", size) or 4 * o.dim
    if o.dim % o.heads ~= 0 then c:fail("n_embd", "is %d, expected a multiple of n_head, %d", o.dim, o.heads) end
    c:only("scale_attn_weights", true)
    c:only("scale_attn_by_inverse_layer_idx", false)
    c:only("add_cross_attention", false)
    c:ignore("reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
      "summary_type", "summary_use_proj")
    return o
  end,
}

return M
