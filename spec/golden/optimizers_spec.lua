-- SPDX-License-Identifier: MIT
--- Ten steps of each optimizer, and clipping with four norms, compared with PyTorch's results.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local nn, optim = ms.nn, ms.optim

local cases = {
  sgd = { optim.SGD, { lr = 0.05 } },
  sgd_momentum = { optim.SGD, { lr = 0.05, momentum = 0.9, dampening = 0.1 } },
  sgd_nesterov_wd = { optim.SGD, { lr = 0.05, momentum = 0.9, nesterov = true, weight_decay = 0.02 } },
  adam = { optim.Adam, { lr = 0.01 } },
  adam_l2 = { optim.Adam, { lr = 0.01, weight_decay = 0.02 } },
  adamw = { optim.AdamW, { lr = 0.01, weight_decay = 0.1 } },
  adamw_amsgrad = { optim.AdamW, { lr = 0.01, weight_decay = 0.1, amsgrad = true } },
}

if golden.folder then
  describe("golden optimizers", function()
    local reference = golden.load "optimizers"
    for name, case in ms.sorted_pairs(reference.cases) do
      it("take PyTorch's steps: " .. name, function()
        golden.phase, golden.dtype = reference.phase, "float64"
        local make, given = cases[name][1], cases[name][2]
        local p = nn.Parameter(golden.x_of { 5 })
        golden.close_list("start", case.start, p, 1e-12, 1e-14)
        local opt = make({ p }, given)
        for step, expected in ipairs(case.params_by_step) do
          opt:zero_grad()
          local d = p - golden.x_of({ 5 }, 3, step - 1);
          (d * d):sum():backward()
          opt:step()
          golden.close_list("step " .. step, expected, p, 1e-10, 1e-12)
        end
      end)
    end
  end)

  describe("golden clip_grad_norm_", function()
    local reference = golden.load "clip_grad_norm"
    for name, case in ms.sorted_pairs(reference.cases) do
      it("clips by the norm of order " .. name, function()
        golden.phase, golden.dtype = reference.phase, "float64"
        local params = { nn.Parameter(ms.zeros(4, 3, { dtype = "float64" })),
          nn.Parameter(ms.zeros(5, { dtype = "float64" })) }
        for i, p in ipairs(params) do p.grad = golden.x_of(p.shape, i - 1) * 3 end
        local order = name == "inf" and math.huge or tonumber(name)
        local total = nn.utils.clip_grad_norm_(params, case.max_norm, { norm_type = order })
        assert.are.equal("[]", tostring(total.shape))
        golden.close("total", case.total_norm, total:item(), 1e-12)
        for i, p in ipairs(params) do golden.close_list("grad " .. i, case.grads[i], p.grad, 1e-10, 1e-14) end
      end)
    end
  end)
else
  describe("golden optimizers", function()
    pending("needs reference data, which is missing (MOONSHARD_GOLDEN names its folder)")
  end)
end
