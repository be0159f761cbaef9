-- SPDX-License-Identifier: MIT
--- MixtureOfExperts, the reference that reduces its own gradients (other models: parallel/fsdp/both/parity).
local ms = require "moonshard"
local ranks = require "spec.support.ranks"

ranks.describe(2, "the mixture of experts", function()
  it("gives every rank its own input and its own expert", function(rank, world)
    local m = require("spec.support.models.mixture_of_experts").init(nil, "no_fsdp", "before", { deterministic = true })
    local all = ms.dist.all_gather_object(m:get_input "cpu"[1]:tolist()[1][1])
    assert.are_not.equal(all[1], all[2])
    local experts = ms.dist.all_gather_object(m.module[3].weight:detach():tolist()[1][1])
    local shared = ms.dist.all_gather_object(m.module[2].weight:detach():tolist()[1][1])
    assert.are_not.equal(experts[1], experts[2])
    assert.are.equal(shared[1], shared[2])
    -- The reference reduces every gradient except the expert's.
    local input = m:get_input "cpu"
    m:run_backward(m:get_loss(input, m(unpack(input))))
    local mine = ms.dist.all_gather_object { m.module[2].weight.grad:tolist()[1][1],
      m.module[3].weight.grad:sum():item() }
    assert.are.equal(mine[1][1], mine[2][1])
    assert.are_not.equal(mine[1][2], mine[2][2])
    assert.are.equal(2, world)
    assert.are.equal(rank, m.rank)
  end)
end)
