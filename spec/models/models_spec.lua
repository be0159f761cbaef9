-- SPDX-License-Identifier: MIT
--- The models of spec/support/models: interface, sizes, determinism.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"

local function model(name) return require("spec.support.models." .. name) end

local function count(m)
  local n = 0
  for _, p in ipairs(m:parameters()) do n = n + p:numel() end
  return n
end

local zoo = { "nested_wrapped_module", "always_wrap_nested_wrapped_module", "non_uniform_req_grad", "module_with_delay",
  "mixture_of_experts",
  "transformer_with_shared_params", "mlp", "mlp_stack", "double_linear", "skip_model", "net", "exec_order",
  "transformer",
  "nested_model", "dummy_model", "linear_mixed_precision" }

describe("the model zoo", function()
  it("has the element counts of the reference", function()
    assert.are.equal(496, count(model("nested_wrapped_module").init(nil, "no_fsdp", "before")))
    assert.are.equal(496, count(model("non_uniform_req_grad").init(nil, "no_fsdp", "before")))
    local lm = model "transformer"
    local meta = lm.Transformer { n_layers = 3, vocab_size = 32, dim = 768, n_heads = 12, weight_tying = false,
      device = "meta" }
    assert.are.equal(21317376, count(meta))
    for _, block in ipairs(meta.layers) do assert.are.equal(7084800, count(block)) end
    assert.are.equal(62976, count(meta) - 3 * count(meta.layers[1]))
  end)

  it("refuses modes it does not know", function()
    for _, name in ipairs(zoo) do
      local ok, e = pcall(model(name).init, nil, "sometimes", "before")
      assert.is_false(ok)
      assert.truthy(e:find("Unsupported FSDP init mode: sometimes", 1, true), e)
    end
  end)

  for _, name in ipairs(zoo) do
    it(("builds %s the same each time, and runs it"):format(name), function()
      local a = model(name).init(nil, "no_fsdp", "before", { deterministic = true })
      local b = model(name).init(nil, "no_fsdp", "never", { deterministic = true })
      local names = {}
      for path, p in a:named_parameters() do
        names[#names + 1] = path
        assert.is_true(p:equal(b:get_parameter(path)))
      end
      assert.is_true(#names > 0)
      local input, again = a:get_input "cpu", a:get_input "cpu"
      for k, t in ipairs(input) do assert.is_true(t:equal(again[k])) end
      local loss = a:get_loss(input, a(unpack(input)))
      assert.are.equal("[]", tostring(loss.shape))
      a:run_backward(loss)
      local grads = 0
      for _, p in ipairs(a:parameters()) do
        assert.are.equal(p.requires_grad, p.grad ~= nil)
        if p.grad then grads = grads + 1 end
      end
      assert.is_true(grads > 0)
    end)
  end

  it("freezes all of NonUniformReqGradNWM but its last Linear", function()
    local open = {}
    for name, p in model("non_uniform_req_grad").init(nil, "no_fsdp", "before"):named_parameters() do
      if p.requires_grad then open[#open + 1] = name end
    end
    assert.are.same({ "module.3.2.weight", "module.3.2.bias" }, open)
  end)

  it("ties the embedding of TransformerWithSharedParams to its head", function()
    local m = model("transformer_with_shared_params").init(nil, "no_fsdp", "before", { deterministic = true })
    assert.are.equal(m.embed_tokens.weight, m.output_proj.weight)
    assert.is_false(m.training)
    assert.are.equal("int64", m.long_buffer.dtype)
    assert.are.equal("BatchNorm1d", m.bn:class_name())
    assert.are.equal("Identity", model("transformer_with_shared_params").init(nil, "no_fsdp", "before",
      { add_bn = false }).bn:class_name())
    assert.are.equal(m.transformer, m:get_ignored_modules()[1])
  end)

  it("delays losses", function()
    local lib = require("moonshard.core.ffi").lib
    local m = model("module_with_delay").init(nil, "no_fsdp", "before", { delay_after_loss_ms = 30 })
    local input = m:get_input "cpu"
    local output = m(unpack(input))
    local begun = lib.ms_time()
    m:get_loss(input, output)
    assert.is_true(lib.ms_time() - begun >= 0.03)
  end)

  it("has stacks and pairs of layers", function()
    local stack = model("mlp_stack").MLPStack(8, { with_seq_parallel = true })
    assert.are.equal(4, #stack)
    assert.is_nil(stack[4].bias)
    assert.are.same({ 24, 8 }, { unpack(stack[1].in_proj.weight.shape) })
    assert.are.same({ 32, 8 }, { unpack(stack[2].in_proj.weight.shape) })
    local mlp = model("mlp").MLP(4, { with_buffer = true, bias = false })
    local before = mlp.buffer:clone()
    mlp:reset_parameters()
    assert.is_false(before:equal(mlp.buffer))
    assert.are.equal(2, #mlp:parameters())
    local double = model("double_linear").DoubleLinear
    assert.are.equal(2, select("#", double(4)(ms.ones(1, 4))))
    assert.are.equal(1, select("#", double(4, { use_second_linear = false })(ms.ones(1, 4))))
    assert.are.equal(ms.nn.Linear, getmetatable(model("dummy_ddp").DummyDDP(ms.nn.Linear(1, 1)).module))
  end)

  it("checkpoints its Transformer's blocks on request, for the same gradients", function()
    local Transformer = model("transformer").Transformer
    ms.manual_seed(4)
    local plain = Transformer { dtype = "float64", dropout_p = 0 }
    local checkpointed = Transformer { dtype = "float64", dropout_p = 0, checkpoint_activations = true }
    checkpointed:load_state_dict(plain:state_dict())
    local ids = ms.randint(0, 8, { 2, 7 })
    for _, m in ipairs { plain, checkpointed } do m(ids):sum():backward() end
    for name, p in plain:named_parameters() do
      ms.testing.assert_close(checkpointed:get_parameter(name).grad, p.grad)
    end
  end)
end)

ranks.describe(2, "the model zoo over ranks", function()
  it("gives every rank its own input and its own expert", function(rank, world)
    local m = model("mixture_of_experts").init(nil, "no_fsdp", "before", { deterministic = true })
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

  it("delays the reductions of a backward", function()
    local lib = require("moonshard.core.ffi").lib
    local m = model("module_with_delay").init(nil, "no_fsdp", "before", { delay_before_reduction_ms = 40 })
    ms.fsdp.fully_shard(m.module)
    local input = m:get_input "cpu"
    local loss = m:get_loss(input, m(unpack(input)))
    local begun = lib.ms_time()
    m:run_backward(loss)
    assert.is_true(lib.ms_time() - begun >= 0.04)
  end)

  -- The number of FSDP instances in each model, including the model itself if its init wraps it.
  local units = {
    nested_wrapped_module = 3, always_wrap_nested_wrapped_module = 8, non_uniform_req_grad = 3, module_with_delay = 3,
    mixture_of_experts = 2,
    transformer_with_shared_params = 5, mlp = 1, mlp_stack = 3, double_linear = 2, skip_model = 3, net = 2,
    exec_order = 2, transformer = 2,
    nested_model = 6, dummy_model = 7, linear_mixed_precision = 2,
  }
  for _, name in ipairs(zoo) do
    it(("wraps %s as documented, for the same loss and the mean of the gradients"):format(name), function(_, world)
      local given = { deterministic = true }
      if name == "mixture_of_experts" then given.fsdp = { use_orig_params = true } end
      ms.catch_warnings(function()                    -- the expert's group has one rank: FSDP warns
        local plain = model(name).init(nil, "no_fsdp", "before", given)
        local wrapped = model(name).init(ms.dist.default_group(), "recursive", "before", given)
        assert.are.equal(units[name], #ms.fsdp.fsdp_modules(wrapped))
        if not ms.fsdp.fsdp_modules(wrapped)[1]:check_is_root() then error "the first instance is not the root" end
        local losses = {}
        for k, m in ipairs { plain, wrapped } do
          local input = m:get_input "cpu"
          local loss = m:get_loss(input, m(unpack(input)))
          m:run_backward(loss)
          losses[k] = loss:item()
        end
        assert.near(losses[1], losses[2], 1e-4 * math.abs(losses[1]))
      end)
      assert.are.equal(2, world)
    end)
  end

  it("keeps linear_skip out of SkipModel's units", function()
    for double_nest, n in pairs { [true] = 3, [false] = 2 } do
      local m = model("skip_model").wrapped(double_nest)
      assert.are.equal(n, #ms.fsdp.fsdp_modules(m))
      assert.are.same({ 10, 10 }, { unpack(m.linear_skip.lin.weight.shape) })
      m(ms.randn(1, 10)):sum():backward()
      assert.is_not_nil(m.linear_skip.lin.weight.grad)
    end
  end)
end)
