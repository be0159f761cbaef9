-- SPDX-License-Identifier: MIT
--- Ten steps of each optimizer, and clipping with four norms, compared with PyTorch's results.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local nn, optim = ms.nn, ms.optim

local cases = {
  sgd = { "SGD", { lr = 0.05 } },
  sgd_momentum = { "SGD", { lr = 0.05, momentum = 0.9, dampening = 0.1 } },
  sgd_nesterov_wd = { "SGD", { lr = 0.05, momentum = 0.9, nesterov = true, weight_decay = 0.02 } },
  sgd_maximize = { "SGD", { lr = 0.005, momentum = 0.5, weight_decay = 0.1, maximize = true } },
  adam = { "Adam", { lr = 0.01 } },
  adam_l2 = { "Adam", { lr = 0.01, weight_decay = 0.02 } },
  adam_maximize = { "Adam", { lr = 0.01, weight_decay = 0.02, maximize = true } },
  adamw = { "AdamW", { lr = 0.01, weight_decay = 0.1 } },
  adamw_amsgrad = { "AdamW", { lr = 0.01, weight_decay = 0.1, amsgrad = true } },
  rmsprop = { "RMSprop" },
  rmsprop_centered = { "RMSprop",
    { lr = 0.02, alpha = 0.9, eps = 1e-6, weight_decay = 0.1, momentum = 0.5, centered = true } },
  rmsprop_momentum = { "RMSprop", { lr = 0.02, momentum = 0.8, maximize = true } },
  adagrad = { "Adagrad" },
  adagrad_decay = { "Adagrad",
    { lr = 0.1, lr_decay = 0.3, weight_decay = 0.1, initial_accumulator_value = 0.2, eps = 1e-6 } },
  adadelta = { "Adadelta" },
  adadelta_wd = { "Adadelta", { lr = 0.5, rho = 0.8, eps = 1e-3, weight_decay = 0.1 } },
  adamax = { "Adamax" },
  adamax_wd = { "Adamax", { lr = 0.05, betas = { 0.8, 0.9 }, eps = 1e-3, weight_decay = 0.1 } },
  nadam = { "NAdam" },
  nadam_l2 = { "NAdam", { lr = 0.02, betas = { 0.8, 0.95 }, weight_decay = 0.1, momentum_decay = 0.1 } },
  nadam_decoupled = { "NAdam", { lr = 0.02, weight_decay = 0.1, decoupled_weight_decay = true } },
  radam = { "RAdam" },
  radam_l2 = { "RAdam", { lr = 0.02, betas = { 0.8, 0.9 }, weight_decay = 0.1 } },
  radam_decoupled = { "RAdam", { lr = 0.02, weight_decay = 0.1, decoupled_weight_decay = true } },
  lion = { "Lion" },
  lion_wd = { "Lion", { lr = 0.01, betas = { 0.8, 0.9 }, weight_decay = 0.1 } },
  rprop = { "Rprop" },
  rprop_limits = { "Rprop", { lr = 0.1, etas = { 0.4, 1.5 }, step_sizes = { 0.05, 0.2 } } },
  asgd = { "ASGD" },
  asgd_averaged = { "ASGD", { lr = 0.05, lambd = 0.1, alpha = 0.5, t0 = 3, weight_decay = 0.1 } },
  muon = { "Muon", { ns_dtype = "float64" } },
  muon_plain = { "Muon",
    { lr = 0.02, weight_decay = 0, momentum = 0.8, nesterov = false, ns_steps = 3, ns_dtype = "float64" } },
  muon_rms = { "Muon", { lr = 0.02, adjust_lr_fn = "match_rms_adamw", ns_dtype = "float64" } },
  adafactor = { "Adafactor" },
  adafactor_options = { "Adafactor",
    { lr = 0.05, beta2_decay = -0.5, eps = { 1e-8, 1e-2 }, weight_decay = 0.1, maximize = true } },
  lamb = { "LAMB" },
  lamb_decay = { "LAMB", { lr = 0.05, betas = { 0.8, 0.9 }, weight_decay = 0.1 } },
  lbfgs = { "LBFGS", { lr = 0.5 }, 1e-7 },
  lbfgs_wolfe = { "LBFGS", { line_search_fn = "strong_wolfe", history_size = 3, max_iter = 6 }, 1e-7 },
}

if golden.folder then
  describe("golden optimizers", function()
    local reference = golden.load "optimizers"
    for name in ms.sorted_pairs(cases) do
      local case = reference.cases[name]
      it("take PyTorch's steps: " .. name, function()
        golden.phase, golden.dtype = reference.phase, "float64"
        local shape, bound = case.shape, cases[name][3] or 1e-10
        local p = nn.Parameter(golden.x_of(shape))
        golden.close_list("start", case.start, p, 1e-12, 1e-14)
        local opt = optim[cases[name][1]]({ p }, cases[name][2])
        for step, expected in ipairs(case.params_by_step) do
          local function closure()
            opt:zero_grad()
            local d = p - golden.x_of(shape, 3, step - 1)
            local loss = (d * d):sum()
            if #shape == 2 then loss = (d * d * d * d):sum() + loss end
            loss:backward()
            return loss
          end
          opt:step(closure)
          golden.close_list("step " .. step, expected, p, bound, bound / 100)
        end
        for state, expected in pairs(case.state) do
          golden.close_list(state, expected, opt:state_of(p)[state], bound, bound / 100)
        end
      end)
    end
  end)

  describe("golden SparseAdam", function()
    local reference = golden.load "optimizers"
    local options = { default = {}, options = { lr = 0.05, betas = { 0.8, 0.9 }, eps = 1e-4 } }
    for name, given in ms.sorted_pairs(options) do
      it("takes PyTorch's steps on rows: " .. name, function()
        golden.phase, golden.dtype = reference.phase, "float64"
        local layer = nn.Embedding(6, 3, { sparse = true, dtype = "float64" })
        ms.no_grad(function() layer.weight:copy_(golden.x_of { 6, 3 }) end)
        local opt = optim.SparseAdam(layer:parameters(), given)
        for step, expected in ipairs(reference.sparse[name]) do
          local k = step - 1
          local ids = ms.tensor({ k % 6, (2 * k + 1) % 6, k % 6 }, { dtype = "int64" })
          opt:zero_grad()
          local d = layer(ids) - golden.x_of({ 3, 3 }, 3, k);
          (d * d):sum():backward()
          opt:step()
          golden.close_list("step " .. step, expected, layer.weight, 1e-10, 1e-12)
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
