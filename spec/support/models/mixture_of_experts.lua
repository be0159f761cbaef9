-- SPDX-License-Identifier: MIT
--- MixtureOfExperts: a shared Linear, and an expert that differs between ranks and is a unit over the group of this
--- rank alone. Unwrapped it is the reference: its run_backward reduces all gradients except the expert's.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nested = require "spec.support.models.nested_wrapped_module"
local nn, dist = ms.nn, ms.dist

local MixtureOfExperts = nested.NestedWrappedModule:extend("MixtureOfExperts")

function MixtureOfExperts:init(o)
  common.begin(self, o)
  self.group, self.wrapped = o.group, o.wrap_fsdp
  local d_expert, d_shared, d_input = 23, 12, 8
  if o.deterministic then ms.manual_seed(42 + self.rank) end
  local expert = common.place(nn.Linear(d_expert, d_shared), o)
  self.num_expert_params = 0
  for _, p in ipairs(expert:parameters()) do
    p.expert = true
    self.num_expert_params = self.num_expert_params + p:numel()
  end
  if o.deterministic then ms.manual_seed(0) end
  local shared = common.place(nn.Linear(d_shared, d_expert), o)
  local wrap = common.wrapper(o)
  expert = wrap(expert, dist.self_group())
  shared = wrap(shared)
  local first, last = common.place(nn.Linear(d_input, d_shared), o), common.place(nn.Linear(d_shared, d_input), o)
  self.module = nn.Sequential(first, shared, expert, last)
end

function MixtureOfExperts:run_backward(loss)
  loss:backward()
  if self.wrapped then return end
  ms.no_grad(function()
    for _, p in ipairs(self:parameters()) do
      if not p.expert and p.grad then
        p.grad:div_(self.world_size)
        dist.all_reduce(p.grad, { group = self.group })
      end
    end
  end)
end

-- One process that replaces all ranks: it has every rank's expert, and `rank` selects one. The caller divides each
-- rank's loss by the number of ranks, so that shared gradients are means; the expert's gradients are multiplied by that
-- number, because on a rank they are not averaged.
local Alone = MixtureOfExperts:extend("MixtureOfExpertsAlone")

function Alone:init(o)
  MixtureOfExperts.init(self, o)
  self.experts = { [self.rank] = self.module[3] }
  self.others = nn.ModuleList {}
  for r = 0, self.world_size - 1 do
    if r ~= self.rank then
      ms.manual_seed(42 + r)
      self.experts[r] = common.place(nn.Linear(23, 12), o)
      self.others:append(self.experts[r])
    end
  end
end

function Alone:forward(x)
  local m = self.module
  return m[4](self.experts[self.rank](m[2](m[1](x))))
end

function Alone:run_backward(loss)
  loss:backward()
  ms.no_grad(function()
    for _, p in ipairs(self.experts[self.rank]:parameters()) do p.grad:mul_(self.world_size) end
  end)
end

return {
  MixtureOfExperts = MixtureOfExperts,
  --- Makes a model for one process that replaces all ranks: module[3] is this rank's expert, `others` has the others.
  alone = function(...) return Alone(common.options(...)) end,
  init = function(...) return MixtureOfExperts(common.options(...)) end,
}
