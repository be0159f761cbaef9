-- SPDX-License-Identifier: MIT
--- Names, fields, operators and options of the API that scripts rely on, as data: a missing one fails.
local ms = require "moonshard"
local nn, dist, fsdp, optim = ms.nn, ms.dist, ms.fsdp, ms.optim

local function words(text)
  local list = {}
  for word in text:gmatch "%S+" do list[#list + 1] = word end
  return list
end

-- The value of a path such as "nn.F.linear"; nil if part of it is missing. Classes give methods.
local function look(path)
  local value = ms
  for name in path:gmatch "[^.:]+" do
    if name ~= "ms" then
      local ok, v = pcall(function() return value[name] end)
      value = ok and v or nil
      if value == nil then return nil end
    end
  end
  return value
end

-- { title, prefix of the names, names }
local sections = {
  { "entry", "", [[version nn dist fsdp optim amp data testing warn log catch_warnings sorted_pairs]] },
  { "making tensors", "", [[
    tensor empty zeros ones rand randn full arange randint eye empty_like zeros_like ones_like rand_like randn_like
    full_like
    from_pointer deepcopy cat stack where sparse_coo is_tensor Tensor ]] },
  { "dtypes and devices", "", [[
    default_dtype set_default_dtype default_device set_default_device with_device
    cuda.is_available cuda.why_unavailable cuda.device_count cuda.current_device cuda.set_device cuda.synchronize]] },
  { "tensor methods", "Tensor:", [[
    size numel stride is_contiguous data_ptr item tolist clone detach contiguous to float double half bfloat16 long
    zero_ fill_ copy_
    view reshape flatten transpose t permute narrow select split chunk expand squeeze unsqueeze tile index_select
    gather scatter_
    masked_fill tril triu isa add sub mul div pow add_ sub_ mul_ div_ pow_ matmul relu gelu silu tanh sigmoid exp log
    sqrt rsqrt abs clamp
    sum mean prod all any std var max min norm softmax log_softmax logsumexp cumsum argmax eq ne lt le gt ge isfinite
    isnan allclose equal
    backward requires_grad_ register_hook register_post_accumulate_grad_hook keep release is_released extend]] },
  { "operators", "Tensor.", [[__add __sub __mul __div __pow __unm __lt __le __tostring]] },
  { "autograd", "", [[
    grad no_grad enable_grad is_grad_enabled Function checkpoint testing.assert_close testing.gradcheck scope steps]] },
  { "random numbers, files, memory", "", [[manual_seed save load memory_stats reset_peak_memory_stats memory_report
    record_memory_history]] },
  { "modules", "nn.Module:", [[
    extend parameters named_parameters named_modules named_children named_buffers modules children buffers train eval
    zero_grad to
    to_empty apply requires_grad_ state_dict load_state_dict register_buffer register_parameter
    register_forward_pre_hook
    register_forward_hook register_full_backward_hook get_submodule get_parameter class_name isa]] },
  { "layers", "nn.", [[
    Module Parameter Sequential ModuleList ModuleDict Linear Embedding LayerNorm RMSNorm BatchNorm1d BatchNorm2d Conv2d
    Dropout Identity
    ReLU GELU SiLU Tanh Sigmoid MultiheadAttention TransformerEncoderLayer TransformerDecoderLayer Transformer
    CrossEntropyLoss MSELoss
    DDP DDP:no_sync DDP:register_comm_hook utils.clip_grad_norm_
    Sequential:append Sequential:insert ModuleList:append ModuleList:insert Linear:reset_parameters
    Embedding:reset_parameters
    LayerNorm:reset_parameters]] },
  { "functions", "nn.F.", [[
    linear relu gelu silu tanh sigmoid softmax log_softmax dropout embedding layer_norm rms_norm batch_norm conv2d
    cross_entropy mse_loss
    scaled_dot_product_attention]] },
  { "initialisation", "nn.init.", [[
    normal_ uniform_ trunc_normal_ xavier_uniform_ kaiming_uniform_ zeros_ ones_ constant_]] },
  { "dist", "dist.", [[
    init rank world_size local_rank default_group is_initialized barrier finalize new_group self_group all_reduce
    all_gather reduce_scatter
    broadcast reduce gather scatter all_to_all send recv all_gather_object broadcast_object set_debug_level debug_level
    record
    init_device_mesh mesh_from_group]] },
  { "fsdp", "fsdp.", [[
    FSDP FSDP:check_is_root FSDP:register_comm_hook FSDP:no_sync FSDP:clip_grad_norm_ CPUOffload MixedPrecision
    fsdp_modules
    summon_full_params state_dict load_state_dict optim_state_dict load_optim_state_dict save load
    wrap.module_wrap_policy wrap.size_based_auto_wrap_policy wrap.transformer_auto_wrap_policy
    wrap.lambda_auto_wrap_policy
    wrap.custom_policy wrap.always_wrap_policy wrap.or_policy wrap.enable_wrap wrap.wrap
    comm_hooks.allreduce_hook comm_hooks.reduce_scatter_hook comm_hooks.fp16_compress_hook comm_hooks.bf16_compress_hook
    comm_hooks.DefaultState comm_hooks.LowPrecisionState
    fully_shard FSDPModule MixedPrecisionPolicy CPUOffloadPolicy Shard Replicate register_fsdp_forward_method
    check_sharded_parity record]] },
  { "modules of fully_shard", "fsdp.FSDPModule:", [[
    unshard reshard set_requires_gradient_sync set_is_last_backward set_reshard_after_forward set_reshard_after_backward
    set_requires_all_reduce set_modules_to_forward_prefetch set_modules_to_backward_prefetch
    set_gradient_divide_factor set_all_reduce_hook]] },
  { "amp", "amp.", [[
    GradScaler ShardedGradScaler autocast GradScaler:scale GradScaler:unscale_ GradScaler:unscale_grads_
    GradScaler:step GradScaler:update
    GradScaler:get_scale GradScaler:get_growth_factor GradScaler:get_backoff_factor GradScaler:get_growth_interval
    GradScaler:is_enabled
    GradScaler:state_dict GradScaler:load_state_dict]] },
  { "optim", "optim.", [[
    SGD Adam AdamW Adam:step Adam:zero_grad Adam:state_dict Adam:load_state_dict
    lr_scheduler.linear_warmup lr_scheduler.cosine lr_scheduler.linear lr_scheduler.constant lr_scheduler.lambda]] },
}

describe("the API's names", function()
  for _, section in ipairs(sections) do
    local title, prefix, names = section[1], section[2], words(section[3])
    it("are there: " .. title, function()
      local missing = {}
      for _, name in ipairs(names) do
        local path = prefix .. name
        if look(path) == nil then missing[#missing + 1] = path end
      end
      assert.are.equal("", table.concat(missing, " "))
    end)
  end


  it("can be required as modules", function()
    for _, name in ipairs(words "nn dist fsdp optim amp data") do
      assert.are.equal(ms[name], require("moonshard." .. name))
    end
  end)

  it("are closed: an unknown one is an error with the nearest", function()
    for _, row in ipairs { { ms, "tensr", "tensor" }, { nn, "Linaer", "Linear" }, { nn.F, "sofmax", "softmax" },
      { nn.init, "zeors_", "zeros_" },
      { dist, "all_redcue", "all_reduce" }, { fsdp, "fuly_shard", "fully_shard" }, { optim, "Adma", "Adam" },
      { ms.data, "batchs", "batches" } } do
      local ok, message = pcall(function() return row[1][row[2]] end)
      assert.is_false(ok)
      assert.matches("did you mean '" .. row[3] .. "'", message, 1, true)
    end
  end)
end)

-- ---- fields -------------------------------------------------------------------------------------

describe("the API's fields", function()
  it("are there: tensors", function()
    local t = ms.ones(2, 3, { requires_grad = true })
    t:sum():backward()
    for _, name in ipairs(words "shape ndim dtype device grad requires_grad is_leaf is_sparse") do
      assert.is_not_nil(t[name], name)
    end
  end)

  it("are there: sparse tensors, of which one may be a grad", function()
    local e = nn.Embedding(3, 2, { sparse = true })
    e(ms.tensor({ 1, 1 }, { dtype = "int64" })):sum():backward()
    local g = e.weight.grad
    assert.is_true(g.is_sparse)
    for _, name in ipairs(words "indices values coalesce to_dense clone to half float") do
      assert.is_function(g[name], name)
    end
    assert.are.same({ 2, 2 }, (g:coalesce() / 1):half():values()[1]:tolist())
  end)

  it("are there: the context of a Function, and what tensor classes define", function()
    local seen
    local f = ms.Function {
      forward = function(ctx, a, b, k)
        assert.are.same({ true, false }, { ctx.needs_grad[1], ctx.needs_grad[2] })
        ctx:save(b)
        ctx.mine = k
        return a * b
      end,
      backward = function(ctx, g)
        seen = ctx.mine
        return g * ctx:saved()
      end,
    }
    f(ms.ones(2, { requires_grad = true }), ms.ones(2), "k"):sum():backward()
    assert.are.equal("k", seen)
    local Box = ms.Tensor:extend "Box"
    function Box:init(part) self.part = part end
    function Box:inner_tensors() return { self.part } end
    function Box.from_inner(list) return Box(list[1]) end
    local names = {}
    function Box.dispatch(op, a, b)
      names[#names + 1] = op.name
      return Box(op(a.part, b))
    end
    assert.is_true((Box(ms.ones(2)) * 2):isa(Box))
    assert.is_true(#names == 1 and type(names[1]) == "string")
  end)

  it("are there: statistics of memory, collectives recorded, phases of units recorded", function()
    local stats = ms.memory_stats()
    for _, name in ipairs(words "allocated peak_allocated reserved peak_reserved live_tensors") do
      assert.is_number(stats[name], name)
    end
    local list, result = dist.record(function()
      dist.all_reduce(ms.ones(3))
      return 7
    end)
    assert.are.equal(7, result)
    for _, name in ipairs(words "op dtype input_numel output_numel bytes group") do
      assert.is_not_nil(list[1][name], name)
    end
    local m = fsdp.fully_shard(nn.Linear(2, 2))
    local events = fsdp.record(function() m(ms.ones(1, 2)):sum():backward() end)
    for _, name in ipairs(words "event unit prefetched") do assert.is_not_nil(events[1][name], name) end
  end)

  it("are there: gradient scalers, hooks of FSDP", function()
    local scaler = ms.amp.GradScaler()
    assert.is_nil(scaler.scale_tensor)
    scaler:scale(ms.ones(1))
    assert.are.equal(1, scaler.scale_tensor:numel())
    local _, m = ms.catch_warnings(fsdp.FSDP, nn.Linear(2, 2))
    assert.is_nil(m.comm_hook_state)
    m.comm_hook_state = 3
    assert.are.equal(3, m.comm_hook_state)
    assert.matches("^flat_param$", (m:named_parameters()()))
  end)

  it("are there: modules, optimizers, schedules", function()
    local m = nn.Linear(2, 2)
    assert.is_true(m.training)
    local o = optim.SGD(m:parameters(), { lr = 1 })
    assert.are.equal("table", type(o.param_groups))
    local s = optim.lr_scheduler.constant(o)
    s:step()
    assert.is_not_nil(s.last_lr)
  end)

  it("are there: groups and meshes", function()
    local mesh = dist.init_device_mesh("cpu", { dist.world_size() }, { names = { "dp" } })
    for _, name in ipairs(words "size rank get_group ndim names dp") do assert.is_not_nil(mesh[name], name) end
    local handle = ms.ones(1, { requires_grad = true }):register_hook(function() end)
    assert.is_function(handle.remove)
    local work = dist.all_reduce(ms.ones(1), { async = true })
    assert.is_function(work.wait)
    assert.is_function(work.done)
    work:wait()
  end)

  it("are there: instances of FSDP", function()
    local warnings, m = ms.catch_warnings(fsdp.FSDP, nn.Linear(4, 4))
    assert.are.same({ "FSDP is switching to use `NO_SHARD` instead of full_shard since the world size is 1." },
      warnings)
    for _, name in ipairs(words "module params check_is_root register_comm_hook no_sync clip_grad_norm_ weight") do
      assert.is_not_nil(m[name], name)
    end
  end)

  it("are there: parameters of fully_shard", function()
    local m = fsdp.fully_shard(nn.Linear(4, 4))
    local p = m.weight
    for _, name in ipairs(words "to_local full_tensor placements device_mesh") do assert.is_not_nil(p[name], name) end
  end)
end)

-- ---- options ------------------------------------------------------------------------------------

local t = ms.ones(2, 2)
local function unknown() return { no_such_option = 1 } end
local function with(o, name)
  o[name] = 0
  return o
end

-- Functions with options: name, a call of the function with the given options, and options that it must accept.
local takes = {
  { "tensor", function(o) ms.tensor(1, o) end, "dtype device requires_grad" },
  { "zeros", function(o) ms.zeros(2, o) end, "dtype device requires_grad" },
  { "full", function(o) ms.full({ 2 }, 1, o) end, "dtype device requires_grad" },
  { "arange", function(o) ms.arange(0, 2, o) end, "dtype device requires_grad" },
  { "randint", function(o) ms.randint(0, 2, { 2 }, o) end, "dtype device requires_grad" },
  { "eye", function(o) ms.eye(2, o) end, "dtype device requires_grad" },
  { "ones_like", function(o) ms.ones_like(t, o) end, "dtype device requires_grad" },
  { "add", function(o) t:add(1, o) end, "alpha" },
  { "sum", function(o) t:sum(1, o) end, "keepdim" },
  { "std", function(o) t:std(1, o) end, "keepdim correction" },
  { "var", function(o) t:var(o) end, "keepdim correction" },
  { "max", function(o) t:max(1, o) end, "keepdim" },
  { "norm", function(o) t:norm(2, 1, o) end, "keepdim" },
  { "allclose", function(o) t:allclose(t, o) end, "rtol atol" },
  { "assert_close", function(o) ms.testing.assert_close(t, t, o) end, "rtol atol" },
  { "backward", function(o) t:backward(nil, o) end, "retain_graph" },
  { "grad", function(o) ms.grad(t, t, o) end, "retain_graph allow_unused grad_outputs" },
  { "steps", function(o) ms.steps(2, o) end, "from" },
  { "save", function(o) ms.save("/nowhere/x", {}, o) end, "metadata" },
  { "load", function(o) ms.load("/nowhere/x", o) end, "device names" },
  { "Linear", function(o) nn.Linear(2, 2, o) end, "bias" },
  { "Embedding", function(o) nn.Embedding(2, 2, o) end, "padding_idx sparse" },
  { "LayerNorm", function(o) nn.LayerNorm(2, o) end, "eps elementwise_affine bias" },
  { "RMSNorm", function(o) nn.RMSNorm(2, o) end, "eps" },
  { "GELU", function(o) nn.GELU(o) end, "approximate" },
  { "Parameter", function(o) nn.Parameter(t, o) end, "requires_grad" },
  { "parameters", function(o) nn.ReLU():parameters(o) end, "recurse" },
  { "named_parameters", function(o) nn.ReLU():named_parameters(o) end, "prefix recurse" },
  { "zero_grad", function(o) nn.ReLU():zero_grad(o) end, "set_to_none" },
  { "load_state_dict", function(o) nn.ReLU():load_state_dict({}, o) end, "strict assign count_from" },
  { "register_buffer", function(o) nn.ReLU():register_buffer("x", nil, o) end, "persistent" },
  { "cross_entropy", function(o) nn.F.cross_entropy(t, ms.zeros(2, { dtype = "int64" }), o) end,
    "reduction ignore_index label_smoothing weight" },
  { "mse_loss", function(o) nn.F.mse_loss(t, t, o) end, "reduction" },
  { "gelu", function(o) nn.F.gelu(t, o) end, "approximate" },
  { "dropout", function(o) nn.F.dropout(t, 0.5, o) end, "training" },
  { "layer_norm", function(o) nn.F.layer_norm(t, 2, nil, nil, o) end, "eps" },
  { "rms_norm", function(o) nn.F.rms_norm(t, nil, o) end, "eps" },
  { "attention", function(o) nn.F.scaled_dot_product_attention(t, t, t, o) end, "attn_mask is_causal dropout_p" },
  { "xavier_uniform_", function(o) nn.init.xavier_uniform_(t, o) end, "gain" },
  { "kaiming_uniform_", function(o) nn.init.kaiming_uniform_(t, o) end, "a mode nonlinearity" },
  { "clip_grad_norm_", function(o) nn.utils.clip_grad_norm_({}, 1, o) end, "norm_type" },
  { "all_reduce", function(o) dist.all_reduce(t, o) end, "op group async" },
  { "reduce_scatter", function(o) dist.reduce_scatter(t, t, o) end, "op group async" },
  { "all_gather", function(o) dist.all_gather(t, t, o) end, "group async" },
  { "broadcast", function(o) dist.broadcast(t, with(o, "src")) end, "src group async" },
  { "reduce", function(o) dist.reduce(t, with(o, "dst")) end, "dst op group" },
  { "gather", function(o) dist.gather(t, with(o, "dst")) end, "dst group" },
  { "scatter", function(o) dist.scatter(t, { t }, with(o, "src")) end, "src group" },
  { "broadcast_object", function(o) dist.broadcast_object(1, with(o, "src")) end, "src group" },
  { "init_device_mesh", function(o) dist.init_device_mesh("cpu", { 1 }, o) end, "names" },
  { "fully_shard", function(o) fsdp.fully_shard(nn.Linear(2, 2), o) end,
    "mesh reshard_after_forward shard_placement_fn mp_policy offload_policy ignored_params" },
  { "FSDP", function(o) fsdp.FSDP(nn.Linear(2, 2), o) end,
    "process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch mixed_precision ignored_modules ignored_states "
    .. "param_init_fn device_id sync_module_states forward_prefetch limit_all_gathers use_orig_params device_mesh" },
  { "MixedPrecision", function(o) fsdp.MixedPrecision(o) end,
    "param_dtype reduce_dtype buffer_dtype keep_low_precision_grads cast_forward_inputs cast_root_forward_inputs" },
  { "summon_full_params", function(o)
    fsdp.summon_full_params(fsdp.FSDP(nn.Linear(2, 2), { sharding_strategy = "no_shard" }), o, function() end)
  end,
    "recurse writeback rank0_only offload_to_cpu with_grads" },
  { "fsdp_modules", function(o) fsdp.fsdp_modules(nn.ReLU(), o) end, "root_only" },
  { "state_dict", function(o) fsdp.state_dict(fsdp.fully_shard(nn.Linear(2, 2)), o) end,
  "type offload_to_cpu rank0_only" },
  { "load_state_dict", function(o) fsdp.load_state_dict(fsdp.fully_shard(nn.Linear(2, 2)), {}, o) end,
  "strict broadcast_from_rank0 assign count_from" },
  { "unshard", function(o) fsdp.fully_shard(nn.Linear(2, 2)):unshard(o) end, "async" },
  { "set_requires_gradient_sync", function(o) fsdp.fully_shard(nn.Linear(2, 2)):set_requires_gradient_sync(true, o) end,
  "recurse" },
  { "size_based_auto_wrap_policy", function(o) fsdp.wrap.size_based_auto_wrap_policy(o) end, "min_num_params" },
  { "LowPrecisionState", function(o) fsdp.comm_hooks.LowPrecisionState(dist.default_group(), o) end, "parameter_type" },
  { "DDP", function(o) nn.DDP(nn.Linear(2, 2), o) end,
  "process_group bucket_cap_mb find_unused_parameters gradient_as_bucket_view" },
  { "Transformer", function(o) nn.Transformer(o) end,
    "d_model nhead num_encoder_layers num_decoder_layers dim_feedforward dropout activation "
    .. "layer_norm_eps batch_first norm_first bias" },
  { "MixedPrecisionPolicy", function(o) fsdp.MixedPrecisionPolicy(o) end,
  "param_dtype reduce_dtype output_dtype cast_forward_inputs" },
  { "CPUOffloadPolicy", function(o) fsdp.CPUOffloadPolicy(o) end, "pin_memory" },
  { "GradScaler", function(o) ms.amp.GradScaler(o) end,
  "init_scale growth_factor backoff_factor growth_interval enabled" },
  { "ShardedGradScaler", function(o) ms.amp.ShardedGradScaler(o) end,
    "init_scale growth_factor backoff_factor growth_interval enabled process_group" },
  { "SGD", function(o) optim.SGD({ t }, o) end, "lr momentum dampening nesterov weight_decay" },
  { "Adam", function(o) optim.Adam({ t }, o) end, "lr betas eps weight_decay amsgrad" },
  { "AdamW", function(o) optim.AdamW({ t }, o) end, "lr betas eps weight_decay amsgrad" },
}

describe("the API's options", function()
  for _, row in ipairs(takes) do
    it("are accepted by " .. row[1], function()
      local ok, message = pcall(row[2], unknown())
      assert.is_false(ok, "an unknown option was taken")
      local accepted = message:match "accepted: (.-)%)"
      assert.is_truthy(accepted, message)
      local have = {}
      for name in accepted:gmatch "[%w_]+" do have[name] = true end
      local missing = {}
      for _, name in ipairs(words(row[3])) do
        if not have[name] then missing[#missing + 1] = name end
      end
      assert.are.equal("", table.concat(missing, " "))
    end)
  end
end)

describe("a module of the API", function()
  it("that is required first gives tensors all their methods", function()
    local process = require "spec.support.process"
    for _, name in ipairs { "nn", "dist", "fsdp", "optim", "amp", "data", "models.gpt" } do
      local line = ([[luajit -e "package.path = '@/lua/?.lua;@/lua/?/init.lua;' .. package.path require 'moonshard.%s'
        io.write(require('moonshard.tensor.create').ones({ 2, 3 }):view(6):softmax(1):max(1):add(1):sum():item())"]])
      local out = process.shell((line:gsub("@", function() return process.root end)):format(name))
      assert.are.equal(1, math.floor(tonumber(out) or -1), name .. ": " .. out)
    end
  end)
end)
