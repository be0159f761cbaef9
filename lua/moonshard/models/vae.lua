-- SPDX-License-Identifier: MIT
--- VAE: a variational autoencoder (Kingma & Welling 2014) of vectors with values from 0 to 1, such as grey images.
--- `vae(x)` returns the logits of the reconstruction, and mean and log variance of the code; `vae:loss(x)` their loss.
require "moonshard.autograd.methods"
local create = require "moonshard.tensor.create"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"

---@class VAE: Module
---@overload fun(opts?: { input: integer, hidden: integer, latent: integer, dtype: string, device: string }): VAE
---   input: size of a vector (default: 784); hidden: size of the hidden layers (default: 400); latent: size of the code
---   (default: 20)
local VAE = nn.Module:extend "VAE"

function VAE:init(given)
  local o = opts("VAE", given, { input = 784, hidden = 400, latent = 20, dtype = opts.string, device = opts.any })
  local kind = { dtype = o.dtype, device = o.device }
  self.latent = o.latent
  self.encoder = nn.Linear(o.input, o.hidden, kind)
  self.mean = nn.Linear(o.hidden, o.latent, kind)
  self.log_var = nn.Linear(o.hidden, o.latent, kind)
  self.decoder = nn.Sequential(nn.Linear(o.latent, o.hidden, kind), nn.ReLU(), nn.Linear(o.hidden, o.input, kind))
end

--- Mean and log variance of the code of x.
---@param x Tensor  [B, input]
---@return Tensor mean  [B, latent]
---@return Tensor log_var  [B, latent]
function VAE:encode(x)
  local h = nn.F.relu(self.encoder(x))
  return self.mean(h), self.log_var(h)
end

--- In training the code is drawn from its distribution (Kingma & Welling, section 2.4: the reparametrisation trick); in
--- evaluation it is the mean.
---@param x Tensor  [B, input]
---@return Tensor logits  [B, input]
---@return Tensor mean  [B, latent]
---@return Tensor log_var  [B, latent]
function VAE:forward(x)
  local mean, log_var = self:encode(x)
  local code = mean
  if self.training then code = mean + (log_var * 0.5):exp() * create.randn_like(mean) end
  return self.decoder(code), mean, log_var
end

--- The negative evidence lower bound, per example: the cross-entropy of the reconstruction plus beta times the
--- Kullback-Leibler divergence of the code's distribution from the standard normal one (Kingma & Welling, appendix B).
---@param x Tensor  [B, input], values from 0 to 1
---@param given? { beta: number }  beta: weight of the divergence (default: 1)
---@return Tensor  []
function VAE:loss(x, given)
  local beta = opts("VAE: loss", given, { beta = 1 }).beta
  local logits, mean, log_var = self(x)
  local reconstruction = nn.F.binary_cross_entropy_with_logits(logits, x, { reduction = "sum" })
  local divergence = (mean * mean + log_var:exp() - log_var - 1):sum() * 0.5
  return (reconstruction + divergence * beta) / x:size(1)
end

--- Draws n examples.
---@param n integer  number of examples
---@return Tensor  [n, input], values from 0 to 1
function VAE:sample(n)
  local p = self.mean.weight
  return nn.F.sigmoid(self.decoder(create.randn(n, self.latent, { dtype = p.dtype, device = p.device })))
end

return VAE
