-- SPDX-License-Identifier: MIT
--- The step of GPT-2 that scripts/bench/gpt2 predicts and measures: forward, backward, clipping, AdamW, in bfloat16 on
--- device cuda. The results of GELU are computed again in backward.
local M = {}

--- Shapes by name; "tiny" is for trying the script. batch: sequences per step, each as long as the context.
M.SHAPES = {
  ["124M"] = { vocab = 50304, context = 1024, layers = 12, heads = 12, dim = 768, batch = 8 },
  ["350M"] = { vocab = 50304, context = 1024, layers = 24, heads = 16, dim = 1024, batch = 8 },
  tiny = { vocab = 64, context = 16, layers = 1, heads = 2, dim = 16, batch = 2 },
}

--- Operations per token (Chowdhery et al. 2022, appendix B): 6 x the parameters that take part in products (the head,
--- but no embedding table) + 12 x layers x dim x context. Causal attention computes half of the last term.
function M.flops_per_token(shape)
  local products = 12 * shape.layers * shape.dim ^ 2 + shape.vocab * shape.dim
  return 6 * products + 12 * shape.layers * shape.dim * shape.context
end

--- Returns a function that runs one step of a GPT.
---@param model Module
---@param shape? table  a value of M.SHAPES (default: M.SHAPES["124M"])
function M.of(model, shape)
  local ms = require "moonshard"
  shape = shape or M.SHAPES["124M"]
  local parameters = model:parameters()
  local optimizer = ms.optim.AdamW(parameters, { lr = 1e-4 })
  local ids = ms.randint(0, shape.vocab, { shape.batch, shape.context }, { device = "cuda" })
  return function()
    ms.scope(function()
      model(ids, ids):backward()
      optimizer:step_clipped(1)
      optimizer:zero_grad()
    end)
  end
end

--- The model of a shape, sharded by fully_shard: every block is a unit, the other parameters are the root's. It
--- computes in bfloat16 and keeps float32 master weights. Call dist.init before.
---@param name? string  a key of M.SHAPES (default: "124M")
function M.sharded(name)
  local ms = require "moonshard"
  local s = M.SHAPES[name or "124M"]
  local model = require "moonshard.models.gpt" { vocab = s.vocab, context = s.context, layers = s.layers, heads = s.heads,
    dim = s.dim, device = "cuda", recompute = true }
  local policy = { mp_policy = ms.fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16" } }
  for _, block in ipairs(model.blocks) do ms.fsdp.fully_shard(block, policy) end
  ms.fsdp.fully_shard(model, policy)
  return model
end

--- Makes the model of a shape in bfloat16, and returns a function that runs one step of it.
---@param name? string  a key of M.SHAPES (default: "124M")
function M.new(name)
  local s = M.SHAPES[name or "124M"]
  return M.of(require "moonshard.models.gpt" { vocab = s.vocab, context = s.context, layers = s.layers, heads = s.heads,
    dim = s.dim, device = "cuda", dtype = "bfloat16", recompute = true }, s)
end

return M
