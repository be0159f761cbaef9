-- SPDX-License-Identifier: MIT
--- Wrong calls, as data: the call, and the beginning of its message. Each raises at the script's line an error that
--- names the function, the argument and what was expected; none ends the process, and the next correct call works.
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"
local nn, dist, optim, fsdp = ms.nn, ms.dist, ms.optim, ms.fsdp

-- x [2, 3], y [2, 2]; w a leaf, g computed from it; m a Linear(3 -> 2), s a sharded one; o an optimizer; r released.
local lists = { require "spec.support.wrong_tensor_calls", {
  { "nn.Linear(2)", "Linear: argument 2, the size of its output, is nil, expected a whole number" },
  { "nn.Linear(2, -1)", "Linear: argument 2, the size of its output, is a number (-1), expected a whole number" },
  { [[nn.Linear("a", 2)]], "Linear: argument 1, the size of its input, is a string ('a'), expected a whole number" },
  { "nn.Linear(2, 2, {bais = true})",
  "Linear: unknown option 'bais'; did you mean 'bias'? (accepted: bias, device, dtype)" },
  { "nn.Linear(2, 2, {bias = 1})", "Linear: option 'bias' is a number (1), expected a boolean" },
  { "ms.zeros(nil)", "zeros: size is nil, expected a whole number" },
  { [[ms.zeros({2, 3, dtype = "int64"})]],
  "zeros: options are mixed with the sizes; pass them in a separate table after the sizes" },
  { [[ms.zeros(2, {device = "cuda:99999999999999"})]], "zeros: device 'cuda:99999999999999' does not exist" },
  { "ms.manual_seed(2^64)", "manual_seed: argument is 1.84467e+19, expected a whole number from -2^53 to 2^53" },
  { "ms.set_num_threads(2^40)",
  "set_num_threads: argument is a number (1099511627776), expected a whole number from 1 to 1024" },
  { [[ms.save("", {a = x})]], "save: the path is empty" },
  { [[ms.save("/tmp/never", {["a\0b"] = x})]], "save: the name \"a\\0b\" contains a zero byte" },
  { "ms.warn({})", "warn: message is a table, expected a string" },
  { [[ms.zeros(0, 3):index_select(1, ms.tensor({0}, {dtype = "int64"}))]],
    "index_select: position 0 is not inside dimension 1 of float32 [0, 3] cpu, which has size 0" },
  { [[ms.where(x:gt(0), x:long(), 2.5)]], "where: 2.5 is not a whole number, but the tensor is int64 [2, 3]" },
  { "x[x]", "index: the tensor for dimension 1 is float32 [2, 3], expected bool (a mask) or int64 (positions from 0)" },
  { "(function() x[{1, 4}] = 0 end)()", "index: position 4 is not inside dimension 2 (expected 1 to 3, or -1 to -3)" },
  { "x:expand(-1, 2, 3)",
  "expand: float32 [2, 3] cpu does not expand to [-1, 2, 3]: dimension 1 is new and needs a size" },
  { "ms.no_grad(function() local s = (w * 2):sum() s:backward() end)",
    "backward: root 1, float32 [] cpu, does not require grad, and was not computed from a tensor that does (no graph is recorded here" },
  { "dist.broadcast(x, 0)", "broadcast: options are a number (0), expected a table: { src = RANK }" },
  { "dist.reduce(x, 0)", "reduce: options are a number (0), expected a table: { dst = RANK }" },
  { "optim.SGD({w}, {lr = 0/0})", "SGD: lr is a number (" },
  { "optim.Adam({w}, {betas = {0/0, 0.9}})", "Adam: betas[1] is a number (" },
  { "(function() local a = optim.SGD({w}, {lr = 1}) a.param_groups[1].lr = 'x' w.grad = w * 1 a:step() end)()",
    "SGD: lr is a string ('x'), expected a number" },
  { "(function() local a = optim.Adam({w}) local d = a:state_dict() d.state[1] = {step = 'x'} a:load_state_dict(d) end)()",
    "Adam: load_state_dict: step of parameter 1 is a string ('x'), expected a number" },
  { "nn.utils.clip_grad_norm_({w}, -1)", "clip_grad_norm_: max_norm is a number (-1), expected a number from 0" },
  { "nn.Dropout(0/0)", "Dropout: dropout probability has to be between 0 and 1, but got" },
  { "nn.Sequential(nn.ReLU)", "Sequential: element 1 is the class ReLU, expected an instance: ReLU(…)" },
  { "nn.DDP(fsdp.FSDP(nn.Linear(2, 2), { sharding_strategy = 'no_shard' }))",
  "DDP: parameter 'flat_param' is already sharded, so no parameter is left for DDP to reduce" },
  { "nn.Linear(2, 2)(x)",
  "linear: the input's last dimension must be the weight's 2 columns: input [2, 3], weight [2," },
  { "nn.Linear(3, 2)()", "linear: argument is nil, expected a tensor" },
  { "nn.Linear(3, 2)(5)", "linear: argument is a number (5), expected a tensor" },
  { "nn.Linear(3, 2)(x:long())",
  "linear: all arguments must have the same dtype, got int64 [2, 3] cpu and, as argument 2, float32 [2," },
  { "nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2))(x)",
    "sequential.3: linear: the input's last dimension must be the weight's 5 columns: input [2, 4]," },
  { "nn.Sequential(1)", "Sequential: element 1 is a number (1), expected a module" },
  { [[nn.Sequential(nn.ReLU(), nil, "x")]], "Sequential: element 2 is nil, expected a module" },
  { "nn.ModuleList{nn.ReLU()}(x)", "ModuleList has no forward, so it cannot be called" },
  { "nn.ModuleDict{a = 1}", "ModuleDict: 'a' is a number (1), expected a module" },
  { "nn.Embedding(4)", "Embedding: argument 2, the size of a row, is nil, expected a whole number" },
  { "nn.Embedding(4, 2)(x)", "embedding: ids must be int64 or int32, got float32 [2, 3] cpu" },
  { [[nn.Embedding(4, 2)(ms.tensor({4}, {dtype = "int64"}))]],
  "embedding: id 4 (element 1) is out of range, expected 0 or more and below the weight's 4 rows" },
  { [[nn.Embedding(4, 2)(ms.tensor({-1}, {dtype = "int64"}))]],
  "embedding: id -1 (element 1) is out of range, expected 0 or more and below the weight's 4 rows" },
  { "nn.LayerNorm(4)(x)", "layer_norm: the weight must be [3], the normalised dimensions of the input, got [4]" },
  { "nn.LayerNorm()", "LayerNorm: argument 1 is nil, expected the sizes to normalise over" },
  { "nn.RMSNorm(4)(x)", "rms_norm: the weight must be [3], the normalised dimensions of the input, got [4]" },
  { "nn.Dropout(1.5)", "Dropout: dropout probability has to be between 0 and 1, but got 1.5" },
  { [[nn.Dropout("a")]], "Dropout: dropout probability has to be between 0 and 1, but got a" },
  { [[nn.GELU{approximate = "tan"}]],
  "GELU: option 'approximate' is 'tan', expected one of 'none', 'tanh'; did you mean 'tanh'?" },
  { [[nn.CrossEntropyLoss{reduction = "men"}]],
  "CrossEntropyLoss: option 'reduction' is 'men', expected one of 'mean', 'sum', 'none'; did you mean" },
  { [[nn.F.cross_entropy(x, ms.tensor({0, 3}, {dtype = "int64"}))]],
  "cross_entropy: id 3 (row 2) is neither in 0 .. 2 nor ignore_index -100" },
  { [[nn.F.cross_entropy(x, ms.tensor({0}, {dtype = "int64"}))]],
  "cross_entropy: ids must be [2] for logits [2, 3], got [1]" },
  { "nn.F.cross_entropy(x, ms.ones(2))", "cross_entropy: ids must be int64 or int32, got float32 [2] cpu" },
  { "nn.F.cross_entropy(x, y)", "cross_entropy: a target of probabilities must have the logits' shape [2, 3], got [2, 2]" },
  { "nn.F.cross_entropy(x, x, {ignore_index = 1})",
  "cross_entropy: ignore_index is not supported for a target of probabilities" },
  { "nn.F.cross_entropy(x, x, {weight = ms.ones(4)})",
  "cross_entropy: weight must have 3 elements, one per class; its shape is [4]" },
  { "nn.F.cross_entropy(x, x, {weight = 3})", "cross_entropy: weight is a number (3), expected a tensor" },
  { "nn.F.cross_entropy(x, x, {label_smoothing = 0 / 0})", "cross_entropy: label_smoothing must be from 0 to 1, got " },
  { "nn.F.cross_entropy(x, x, {label_smoothing = 2})", "cross_entropy: label_smoothing must be from 0 to 1, got 2" },
  { "nn.F.cross_entropy(3, x)", "cross_entropy: logits is a number (3), expected a tensor" },
  { "nn.F.cross_entropy(x)", "cross_entropy: ids is nil, expected a tensor" },
  { "nn.F.batch_norm()", "batch_norm: argument 1 is nil, expected a tensor" },
  { "nn.BatchNorm1d(3)()", "BatchNorm1d: argument is nil, expected a tensor" },
  { "nn.F.layer_norm(3, {4})", "layer_norm: argument 1 is a number (3), expected a tensor" },
  { "nn.F.layer_norm(x, m)", "layer_norm: argument 2 is a Linear, expected a size or a list of sizes" },
  { [[nn.F.cross_entropy(x, ms.tensor({0, 1}, {dtype = "int64"}), {label_smoothing = 2})]],
  "cross_entropy: label_smoothing must be from 0 to 1, got 2" },
  { "nn.F.mse_loss(x, y)", "mse_loss: both arguments must have the same shape, got [2, 3] and [2, 2]" },
  { "nn.F.linear(x, y)",
  "linear: the input's last dimension must be the weight's 2 columns: input [2, 3], weight [2, 2]" },
  { "nn.F.softmax(x, 9)",
  "softmax: dimension 9 is out of range for a tensor of 2 dimensions (expected -2 to 2 except 0)" },
  { "nn.F.layer_norm(x, {4})", "layer_norm: input [2, 3] does not end in the normalised sizes [4]" },
  { "nn.F.scaled_dot_product_attention(x, y, x)",
  "attention: expected query [..., t, d] and key, value [..., s, d], got [2, 3], [2, 2], [2, 3]" },
  { "nn.F.dropout(x, -1)", "dropout: dropout probability has to be between 0 and 1, but got -1" },
  { [[nn.F.gelu(x, {approximate = "no"})]], "gelu: option 'approximate' is 'no', expected one of 'none', 'tanh'" },
  { "nn.init.normal_(1)", "normal_: argument 1 is a number (1), expected a tensor" },
  { "nn.init.normal_(x, 0, -1)", "normal_: std is a number (-1), expected a number from 0" },
  { "nn.init.uniform_(x:long())", "uniform_: fills floating point tensors, got int64 [2, 3]" },
  { "nn.init.kaiming_uniform_(ms.ones(2))",
  "kaiming_uniform_: fan in and fan out need at least 2 dimensions, got [2]" },
  { "nn.init.xavier_uniform_(ms.ones(2))", "xavier_uniform_: fan in and fan out need at least 2 dimensions, got [2]" },
  { "nn.utils.clip_grad_norm_(3, 1)", "clip_grad_norm_: argument 1 is a number (3), expected a list of tensors" },
  { [[nn.utils.clip_grad_norm_({x}, "a")]], "clip_grad_norm_: max_norm is a string ('a'), expected a number" },
  { "nn.utils.clip_grad_norm_({3}, 1)", "clip_grad_norm_: parameter 1 is a number (3), expected a tensor" },
  { "nn.Parameter(3)", "Parameter: argument 1 is a number (3), expected a tensor" },
  { "nn.Parameter(x:long())",
  "Parameter: dtype int64 cannot require gradients; floating point expected (or requires_grad = false)" },
  { "nn.Module:extend()", "extend: argument 1 is nil, expected a class name" },
  { [[nn.Module:extend("A")()(x)]], "A has no forward, so it cannot be called" },
  { "m:load_state_dict({})",
  [[Error(s) in loading state_dict for Linear: | Missing key(s) in state_dict: "weight", "bias". ]] },
  { "m:load_state_dict({weight = ms.ones(1), bias = ms.ones(2)})",
    "Error(s) in loading state_dict for Linear: | size mismatch for weight: copying a param with shape [1] from checkpoint, the" },
  { [[m:state_dict({prefix = "net."})]], "state_dict: unknown option 'prefix' (accepted: none)" },
  { [[dist.new_group({0}, {timeout = 3})]], "dist.new_group: unknown option 'timeout' (accepted: none)" },
  { "m:load_state_dict(3)", "load_state_dict: argument 1 is a number (3), expected a table of tensors" },
  { [[m:get_submodule("a.b")]], "get_submodule: Linear: unknown child 'a'" },
  { [[m:get_parameter("wieght")]], "get_parameter: Linear: unknown parameter 'wieght'; did you mean 'weight'?" },
  { [[m:register_buffer("a.b", x)]], "register buffer: name 'a.b' contains a dot" },
  { [[m:register_buffer("weight", x)]], "register_buffer: Linear already has a field 'weight'" },
  { [[m:register_parameter("p", x)]],
  "register_parameter: cannot assign a Tensor to parameter 'p': an nn.Parameter or nil expected" },
  { "m:register_forward_hook(3)", "register_forward_hook: hook is a number (3), expected a function" },
  { [[m:to("int64")]], "to: a module can only be converted to floating point dtypes, got 'int64'" },
  { [[m:to("tpu")]], "to: unknown device 'tpu'; did you mean 'cpu'?" },
  { [[m:train("yes")]], "train: argument 1 is a string ('yes'), expected a boolean" },
  { "m:apply(3)", "apply: argument 1 is a number (3), expected a function" },
  { "m:parameters{recurs = true}", "parameters: unknown option 'recurs'; did you mean 'recurse'? (accepted: recurse)" },
  { "m.weight = x", "Linear: cannot assign a Tensor to parameter 'weight': an nn.Parameter or nil expected" },
  { "m.parameters = 3", "Linear: 'parameters' is a method of Module; choose another name for the field" },
  { "optim.SGD({})", "SGD: the list of parameters is empty" },
  { "optim.SGD({x + 0, 3})", "SGD: parameter 2 is a number (3), expected a tensor" },
  { "optim.SGD(m)", "SGD: argument 1 is a Linear, expected a list of leaves or groups" },
  { "optim.SGD(w)", "SGD: argument 1 is a Tensor, expected a list of leaves or groups" },
  { "optim.SGD({w}, {lr = -1})", "SGD: lr is a number (-1), expected a number from 0" },
  { [[optim.SGD({w}, {lr = "a"})]], "SGD: option 'lr' is a string ('a'), expected a number" },
  { "optim.SGD({w}, {learning_rate = 1})",
  "SGD: unknown option 'learning_rate'; did you mean 'lr'? (accepted: dampening, lr, master_weights" },
  { "optim.SGD({w, w}, {lr = 1})", "SGD: parameter 2 is in the list twice" },
  { "optim.SGD({g}, {lr = 1})", "SGD: parameter 1 is the result of an operation; only leaves can be optimized" },
  { "optim.SGD({w}, {lr = 1, nesterov = true})", "SGD: Nesterov momentum requires a momentum and zero dampening" },
  { "optim.AdamW({w}, {betas = {2, 3}})", "AdamW: betas[1] is a number (2), expected a number from 0 to below 1" },
  { "optim.AdamW({w}, {betas = 0.9})", "AdamW: option 'betas' is a number (0.9), expected a table" },
  { "optim.AdamW({w}, {eps = -1})", "AdamW: eps is a number (-1), expected a number from 0" },
  { "optim.AdamW({w}):load_state_dict({})",
  "AdamW: load_state_dict: argument 1 is a table, expected a table with state and param_groups" },
  { "optim.AdamW({w}):load_state_dict(3)",
  "AdamW: load_state_dict: argument 1 is a number (3), expected a table with state and param_groups" },
  { "optim.AdamW({{params = {w}, lrr = 1}})", "AdamW: unknown option of group 1 'lrr'; did you mean 'lr'?" },
  { "optim.AdamW({w}):step(3)", "AdamW: step: closure is a number (3), expected a function" },
  { "optim.AdamW({w}):zero_grad(1)", "zero_grad: options are a number (1), expected a table" },
  { "optim.lr_scheduler.cosine(1, {steps = 2})",
  "lr_scheduler.cosine: argument 1 is a number (1), expected an optimizer" },
  { "optim.lr_scheduler.cosine(o, {})", "lr_scheduler.cosine: option 'steps' is missing" },
  { "optim.lr_scheduler.cosine(o, {steps = 2, warmup = 5})",
  "lr_scheduler.cosine: option 'warmup' is 5, expected at most option 'steps', 2" },
  { [[optim.lr_scheduler.cosine(o, {steps = "a"})]],
  "lr_scheduler.cosine: option 'steps' is a string ('a'), expected a whole number from 0" },
  { "optim.lr_scheduler.lambda(o, 2)", "lr_scheduler.lambda: argument 2 is a number (2), expected a function" },
  { "dist.all_reduce(3)", "all_reduce: the tensor is a number (3), expected a tensor" },
  { [[dist.all_reduce(x, {op = "summ"})]],
  "all_reduce: option 'op' is 'summ', expected one of 'sum', 'avg', 'max', 'min', 'prod'; did you mean" },
  { "dist.all_reduce(x, {grup = 1})",
  "all_reduce: unknown option 'grup'; did you mean 'group'? (accepted: async, group, op)" },
  { "dist.all_reduce(x, {group = 3})", "all_reduce: the group is a number (3), expected a group made by dist.new_group" },
  { "dist.all_gather(x, y)",
  "all_gather: out must have a block of in's size per rank: out is float32 [2, 3] cpu, in is float32 [2, 2] cpu, for 1 rank" },
  { "dist.all_gather(x:long(), x)", "all_gather: dtypes differ: out is int64 [2, 3] cpu, in is float32 [2, 3] cpu" },
  { "dist.reduce_scatter(x, y)",
  "reduce_scatter: in must have a block of out's size per rank: out is float32 [2, 3] cpu, in is float32 [2, 2] cpu, for 1 rank" },
  { "dist.broadcast(x, {src = 5})", "broadcast: rank 5 is not a member of the group" },
  { "dist.broadcast(x, {src = 0.5})", "broadcast: rank is 0.5, expected a whole number" },
  { [[dist.broadcast(x, {src = "a"})]], "broadcast: option 'src' is a string ('a'), expected a number" },
  { "dist.send(x, 0)", "send: rank 0 is this rank itself" },
  { "dist.recv(x, 7)", "recv: there is no rank 7 in the world of 1 ranks" },
  { "dist.gather(x, {dst = -1})", "gather: rank -1 is not a member of the group" },
  { "dist.scatter(x, 3)", "scatter: option 'src' is missing, expected a rank of the world" },
  { "dist.scatter(x, {x, x})", "scatter: option 'src' is missing, expected a rank of the world" },
  { "dist.new_group(3)", "dist.new_group: argument 1 is a number (3), expected a list of ranks" },
  { "dist.new_group({0, 0})", "dist.new_group: 2 ranks given, expected 1 to 1, the size of the world" },
  { "dist.new_group({5})", "dist.new_group: rank 5 is not in the world of 1 ranks" },
  { "dist.rank(3)", "dist.rank: the group is a number (3), expected a group made by dist.new_group" },
  { [[dist.set_debug_level("loud")]], "set_debug_level: level is 'loud', expected 'off', 'info' or 'detail'" },
  { [[dist.init{backend = "gloo"}]],
  "dist.init: option 'backend' is 'gloo', expected one of 'auto', 'mpi', 'nccl', 'self'" },
  { [[dist.init_device_mesh("cpu", {3})]], "init_device_mesh: shape [3] has 3 ranks, but the world has 1" },
  { [[dist.init_device_mesh("cpu", {1}, {names = {"a", "b"}})]], "init_device_mesh: got 2 names, expected one for each of 1 dimensions" },
  { "dist.all_gather_object(print)", "all_gather_object: the value is a function, which cannot be sent to another rank" },
  { "fsdp.fully_shard(3)", "fully_shard: argument 1 is a number (3), expected a module or a list of modules" },
  { "fsdp.fully_shard(x)", "fully_shard: argument 1 is a Tensor, expected a module or a list of modules" },
  { [[fsdp.fully_shard(m, {reshard_after_forward = "yes"})]],
    "reshard_after_forward should be a bool or an int representing the group size to reshard to, not" },
  { "fsdp.fully_shard(m, {ignored_params = 3})",
  "fully_shard: option 'ignored_params' is a number (3), expected a list of parameters" },
  { "fsdp.fully_shard(m, {ignored_params = m.weight})",
  "fully_shard: option 'ignored_params' is a Parameter, expected a list of parameters" },
  { "fsdp.fully_shard(m, {ignored_params = {3}})",
  "fully_shard: ignored_params[1] is a number (3), expected a parameter" },
  { "fsdp.FSDP(m, {device_id = -4})", "FSDP: option 'device_id' is a number (-4), expected an index from 0 or a device" },
  { "fsdp.wrap.wrap(3)", "wrap: argument 1 is a number (3), expected a module" },
  { "fsdp.optim_state_dict(m, 3)", "optim_state_dict: argument 2 is a number (3), expected an optimizer" },
  { "fsdp.load_optim_state_dict(m, nil, {})", "load_optim_state_dict: argument 2 is nil, expected an optimizer" },
  { [[fsdp.register_fsdp_forward_method(3, "x")]],
  "register_fsdp_forward_method: argument 1 is a number (3), expected a module" },
  { [[fsdp.register_fsdp_forward_method(s, "encode")]], "FSDPLinear does not have a method encode" },
  { "ms.testing.gradcheck(3, {w})", "gradcheck: argument 1 is a number (3), expected a function" },
  { "ms.testing.gradcheck(print)", "gradcheck: argument 2 is nil, expected a list of tensors" },
  { "ms.catch_warnings(3)", "catch_warnings: argument 1 is a number (3), expected a function" },
  { "m:requires_grad_(3)", "requires_grad_: argument 1 is a number (3), expected a boolean" },
  { "ms.amp.ShardedGradScaler{process_group = 3}",
  "ShardedGradScaler: option 'process_group' is a number (3), expected a group" },
  { "fsdp.fully_shard(m, {mesh = 3})", "fully_shard expects a 1D or 2D DeviceMesh but got 3" },
  { "fsdp.fully_shard(m, {mp_policy = 3})",
  "fully_shard: option 'mp_policy' is a number (3), expected an fsdp.MixedPrecisionPolicy" },
  { [[fsdp.MixedPrecisionPolicy{param_dtype = "int64"}]],
  "MixedPrecisionPolicy: option 'param_dtype' is 'int64', expected a floating point dtype" },
  { [[fsdp.MixedPrecisionPolicy{params = "float16"}]],
  "MixedPrecisionPolicy: unknown option 'params' (accepted: cast_forward_inputs, output_dtype," },
  { "fsdp.FSDP(3)", "FSDP: argument 1 is a number (3), expected a module" },
  { [[fsdp.FSDP(m, {sharding_strategy = "fully"})]],
  "FSDP: option 'sharding_strategy' is 'fully', expected one of 'full_shard', 'shard_grad_op'," },
  { "fsdp.state_dict(3)", "state_dict: argument 1 is a number (3), expected a module" },
  { "s.weight + 1", "add: parameter 'weight' is sharded; use to_local() for this rank's part or full_tensor() for the" },
  { "s.weight:view(-1)",
  "view: parameter 'weight' is sharded; use to_local() for this rank's part or full_tensor() for the" },
  { "s.weight:copy_(x)",
  "copy_: the tensor, shape [2, 3], is sharded; use to_local() for this rank's part or full_tensor() for" },
  { "s.weight[1]", "select: parameter 'weight' is sharded; use to_local() for this rank's part or full_tensor() for the" },
  { "ms.deepcopy(s)", "FSDP does not support deepcopy. Please use state dict for serialization." },
  { [[ms.load("/no/such/file")]], "load: cannot open '/no/such/file': No such file or directory" },
  { "ms.load(3)", "load: path is a number (3), expected a string" },
  { [[ms.load("README.md")]],
  "load: 'README.md' is not a valid safetensors file: the header has 7526480827153981475 bytes, the file" },
  { [[ms.load(".")]], "load: '.' is not a regular file" },
  { [[ms.save("/no/such/dir/x.safetensors", {a = x})]], "save: cannot create '/no/such/dir/x.safetensors" },
  { [[ms.save(folder .. "/x.safetensors", x)]], "save: tensors are a Tensor, expected a table of name -> tensor" },
  { [[ms.save(folder .. "/x.safetensors", {a = print})]],
  "save: 'a' is a function, expected a tensor, a number, a string, a boolean or a table of these" },
  { [[ms.save(folder .. "/x.safetensors", {a = {m = m}})]],
  "save: 'a.m' is a Linear, expected a tensor, a number, a string, a boolean or a table of these; write its state_dict()" },
  { [[ms.save(folder .. "/x.safetensors", {[true] = x})]],
  "save: the table has a key that is a boolean (true), expected a string or a number" },
  { [[ms.save(folder .. "/x.safetensors", {a = x}, {metadata = 3})]],
  "save: option 'metadata' is a number (3), expected a table" },
  { [[ms.save(folder .. "/x.safetensors", {a = s.weight})]],
  "save: tensor 'a' is sharded over ranks; use full_tensor() or to_local()" },
  { [[ms.load(folder .. "/ok.safetensors", {names = {"b"}})]],
  "load: 'FOLDER/ok.safetensors': unknown tensor 'b'; did you mean 'a'?" },
  { [[ms.load(folder .. "/ok.safetensors", {device = "tpu"})]],
  "to: unknown dtype or device 'tpu'; did you mean 'cpu'?" },
  { "ms.data.batches(3, {context = 2, batch = 2})", "batches: argument 1 is a number (3), expected a corpus" },
  { "ms.data.batches(3)", "batches: argument 1 is a number (3), expected a corpus" },
  { "ms.data.batches({train_count = 9}, {context = -1, batch = 2})",
  "batches: option 'context' is a number (-1), expected a whole number from 1" },
  { "ms.data.batches({train_count = 9}, {context = 2, batch = 2.5})",
  "batches: option 'batch' is a number (2.5), expected a whole number from 1" },
  { "ms.data.batches({train_count = 9}, {context = 2, batch = 2, rank = 2, world = 2})",
  "batches: option 'rank' is 2, expected less than option 'world', 2" },
  { "ms.data.batches({train_count = 9}, {context = 2, batch = 2, seed = 0.5})",
  "batches: option 'seed' is a number (0.5), expected a whole number" },
  { [[ms.data.corpus("/", {validaton = 0.5})]],
  "corpus: unknown option 'validaton'; did you mean 'validation'? (accepted: validation, vocab)" },
  { [[ms.data.corpus("/", {validation = -1})]],
  "corpus: option 'validation' is a number (-1), expected a number from 0 to below 1" },
  { [[ms.data.corpus("/", {vocab = 0.5})]],
  "corpus: option 'vocab' is a number (0.5), expected a whole number from 1" },
  { [[ms.data.corpus("/nowhere")]], "corpus: there is no file or folder '/nowhere'" },
  { "ms.data.corpus(nil)", "corpus: argument 1 is nil, expected the path of a file or folder, or a list of them" },
  { "ms.data.corpus({3})", "corpus: path 1 is a number (3), expected a string" },
  { "r + 1", "tensor was released with its scope; return it, or keep() it (made " },
  { "r:item()", "tensor was released with its scope; return it, or keep() it (made " },
  { "r.shape", "tensor was released with its scope; return it, or keep() it (made " },
  { "r:backward()", "tensor was released with its scope; return it, or keep() it (made " },
  { "r:keep()", "tensor was released with its scope; return it, or keep() it (made " },
  { "nn.Linear(3, 2)(r)", "tensor was released with its scope; return it, or keep() it (made " },
  { "ms.cat({x, r})", "tensor was released with its scope; return it, or keep() it (made " },
  { "optim.SGD({r}, {lr = 1})", "tensor was released with its scope; return it, or keep() it (made " },
  { "dist.all_reduce(r)", "tensor was released with its scope; return it, or keep() it (made " },
  { [[ms.save(folder .. "/x.safetensors", {a = r})]],
  "tensor was released with its scope; return it, or keep() it (made " },
  { "ms.sparse_coo(x, y, {2})", "sparse_coo: indices are float32 [2, 3], expected int64 [dimensions, values]" },
  { "ms.from_pointer(nil, {2})", "from_pointer: the pointer is NULL, but shape [2] has elements" },
  { [[ms.from_pointer(1, {2}, {dtype = "no"})]],
  "from_pointer: argument 1 is a number (1), expected a pointer of the FFI" },
  { [[ms.amp.autocast("int8", print)]], "autocast: dtype is 'int8', expected one of 'bfloat16', 'float16'" },
  { "ms.amp.GradScaler{init_scal = 2}",
  "GradScaler: unknown option 'init_scal'; did you mean 'init_scale'? (accepted: backoff_factor," },
  { "ms.amp.GradScaler{growth_factor = 0.5}", "The growth factor must be > 1.0." },
  { "nn.Conv2d(1, 2)", "Conv2d: argument 3, the kernel, is nil, expected a whole number or a pair of them" },
  { "nn.Conv2d(1, 2, 3)(x)", "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: [2, 3]" },
  { "nn.BatchNorm1d(4)(x)",
  "batchnorm1d: batch_norm: the weight must be [3], one number per channel of the input [2, 3], got [4]" },
  { "nn.MultiheadAttention(5, 2)",
  "embed_dim must be divisible by num_heads, got embed_dim=5 and num_heads=2 instead" },
  { "nn.Transformer{d_model = 5, nhead = 2}",
  "embed_dim must be divisible by num_heads, got embed_dim=5 and num_heads=2 instead" },
  { "nn.DDP(3)", "DDP: argument 1 is a number (3), expected a module" },
  -- constructors and calls as in other libraries
  { "function Net:__init() end", "Net: the constructor of a Module is init: function Net:init(...)" },
  { "function Net:__init__() end", "Net: the constructor of a Module is init: function Net:init(...)" },
  { "function Net:_init() end", "Net: the constructor of a Module is init: function Net:init(...)" },
  { "function Net:new() end", "Net: the constructor of a Module is init: function Net:init(...)" },
  { "function Net:__new() end", "Net: the constructor of a Module is init: function Net:init(...)" },
  { "function Net:constructor() end", "Net: the constructor of a Module is init: function Net:init(...)" },
  { "function Net:__call() end Net()",
    "Net: a call of a module runs its forward; define function Net:forward(...) in place of __call" },
  { "Net:new(3)", "new: a module is made by calling its class, as in Net(...)" },
  { "m.forward(x)", "forward: called on a Tensor; write model(x) or model:forward(x)" },
  { "m.parameters()", "parameters: called on nil; write model:parameters()" },
  { "optim.SGD({}, {lr = 1})",
  "SGD: the list of parameters is empty; modules register what is assigned to their fields (layers, nn.Parameter), not the contents of plain tables" },
  { "optim.AdamW(m)", "AdamW: argument 1 is a Linear, expected a list of leaves or groups; write model:parameters()" },
  { "optim.AdamW(m:named_parameters())",
  "AdamW: argument 1 is a function, expected a list of leaves or groups; write model:parameters()" },
  { "optim.AdamW({w}, 0.5)", "AdamW: options are a number (0.5), expected a table; write { lr = 0.5 }" },
  { "optim.AdamW({{params = {w}, learning_rate = 1}})",
  "AdamW: unknown option of group 1 'learning_rate'; did you mean 'lr'?" },
  { "optim.AdamW({w}, {wd = 1})", "AdamW: unknown option 'wd'; did you mean 'weight_decay'? (accepted:" },
  { "ms.save(m)", "save: path is a Linear, expected a string; write ms.save(path, model:state_dict())" },
  { "ms.save({a = x}, 'f')", "save: path is a table, expected a string; write ms.save(path, tensors)" },
  { "ms.save('f', m)", "save: tensors are a Linear, expected a table of name -> tensor; write ms.save(path, model:state_dict())" },
  { "ms.load(folder .. '/torch.pt')",
  "load: 'FOLDER/torch.pt' is a file of torch.save; write it as safetensors: python3 -c" },
  { "ms.gelu(x)", "unknown name in moonshard: 'gelu'; did you mean x:gelu() or nn.F.gelu?" },
  { "ms.Linear(2, 3)", "unknown name in moonshard: 'Linear'; did you mean nn.Linear?" },
  { "ms.float32", "unknown name in moonshard: 'float32'; dtypes are strings: 'float32'" },
  { "nn.gelu(x)", "unknown name in nn: 'gelu'; did you mean x:gelu() or nn.F.gelu?" },
  { "nn.functional.relu(x)", "unknown name in nn: 'functional'; did you mean 'F'?" },
  { "nn.LazyLinear(2)", "unknown name in nn: 'LazyLinear'; write nn.Linear(size_in, size_out): the size of a layer's input is that of the layer before it" },
  { "nn.F.max_pool2d_with_indices(x, 2)",
    "unknown name in nn.F: 'max_pool2d_with_indices'; use nn.F.max_pool2d(x, kernel, { return_indices = true })" },
  { "nn.MaxPooling2d(2)", "unknown name in nn: 'MaxPooling2d'; did you mean 'MaxPool2d'?" },
  { "optim.lr_scheduler.CosineAnnealingLR(o)",
    "unknown name in optim.lr_scheduler: 'CosineAnnealingLR'; use optim.lr_scheduler.cosine" },
  { "nn.utils.clip_grad_norm({}, 1)", "unknown name in nn.utils: 'clip_grad_norm'; did you mean 'clip_grad_norm_'?" },
  { "nn.utils.clip_grad_norm_(m, 1)",
    "clip_grad_norm_: argument 1 is a Linear, expected a list of tensors; write model:parameters()" },
  { "dist.get_rank()", "unknown name in moonshard.dist: 'get_rank'; use dist.rank()" },
  { "'loss ' .. x", "concat: the tensor has 6 elements, shape [2, 3]; expected 1 (tostring(t) gives the text of a larger one)" },
  { "ms.ones(1) .. {}", "concat: operand is a table, expected a string, a number or a tensor" },
} }

local folder

local function surroundings()
  local env = { ms = ms, nn = nn, dist = dist, optim = optim, fsdp = fsdp, print = print, folder = folder }
  env.x, env.y, env.w = ms.ones(2, 3), ms.ones(2, 2), ms.ones(3, { requires_grad = true })
  env.g, env.m, env.s = env.w * 2, nn.Linear(3, 2), fsdp.fully_shard(nn.Linear(3, 2))
  env.o = optim.SGD({ ms.ones(1, { requires_grad = true }) }, { lr = 1 })
  env.Net = nn.Module:extend "Net"
  ms.scope(function() env.r = ms.ones(2, 3) + 1 end)
  return env
end

-- The message without its position, which must be the line of the call.
local function message_of(call, env)
  local fn = loadstring("local _ = " .. call, "=wrong") or assert(loadstring(call, "=wrong"))
  local ok, message = pcall(setfenv(fn, env))
  assert.is_false(ok, "no error")
  local text, n = tostring(message):gsub("^wrong:1: ", "")
  assert.are.equal(1, n, "not at the caller's line: " .. tostring(message))
  text = text:gsub("\n\t", " | ")
  local at, last = text:find(folder or "\0", 1, true)
  return at and text:sub(1, at - 1) .. "FOLDER" .. text:sub(last + 1) or text
end

describe("a wrong call", function()
  setup(function()
    folder = process.temp_folder()
    ms.save(folder .. "/ok.safetensors", { a = ms.ones(1) })
    local archive = assert(io.open(folder .. "/torch.pt", "wb"))
    archive:write("PK\3\4", ("\0"):rep(60))
    archive:close()
  end)
  teardown(function() process.remove_folder(folder) end)

  for _, calls in ipairs(lists) do
    for _, case in ipairs(calls) do
      it(case[1], function()
        local text = message_of(case[1], surroundings())
        assert.are.equal(case[2], text:sub(1, #case[2]))
        assert.are.equal(0, require("moonshard.core.ffi").state.run_depth)
        assert.is_true(ms.is_grad_enabled())
        assert.are.equal(3, (ms.ones(2) + 2)[1]:item())
      end)
    end
    it("is one of more than 100 in each list", function() assert.is_true(#calls > 100) end)
  end

  it("names the module in which it happened, at any depth", function()
    local deep = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(), nn.Linear(5, 2)))
    assert.matches("^sequential%.2%.2: linear: the input's last dimension must be the weight's 5 columns: input %[2, 3%]",
      message_of("m(x)", { m = deep, x = ms.ones(2, 3) }))
  end)
end)

ranks.describe(2, "a wrong call on two ranks", function(rank)
  local wrong = {
    { "dist.broadcast(x, {src = 2})", "broadcast: rank 2 is not a member of the group" },
    { "dist.all_gather(x, x)",
    "all_gather: out must have a block of in's size per rank: out is float32 [2, 3] cpu, in is float32 [2, 3] cpu, for 2 ranks" },
    { "dist.reduce_scatter(x, x)", "reduce_scatter: in must have a block of out's size per rank: " },
    { "dist.send(x, rank)", "send: rank %d is this rank itself" },
    { "dist.recv(x, 9)", "recv: there is no rank 9 in the world of 2 ranks" },
    { "dist.new_group({0, 0})", "dist.new_group: " },
    { "dist.init_device_mesh('cpu', {3})", "init_device_mesh: shape [3] has 3 ranks, but the world has 2" },
    { "fsdp.fully_shard(m, {reshard_after_forward = 'no'})", "reshard_after_forward should be a bool or an int" },
    { "s.weight + 1", "add: parameter 'weight' is sharded; use to_local() for this rank's part or full_tensor() for the whole" },
    { "nn.Linear(3, 2)(r)", "tensor was released with its scope; return it, or keep() it (made " },
  }
  for _, case in ipairs(wrong) do
    it(case[1] .. " is an error on each, and they continue together", function()
      local env = surroundings()
      env.rank = rank
      local expected, least = case[2]:format(rank), math.huge
      for _ = 1, 3 do
        local begun = ms.time()
        assert.are.equal(expected, message_of(case[1], env):sub(1, #expected))
        least = math.min(least, math.max(unpack(dist.all_gather_object(ms.time() - begun))))
        if least < 5 * process.patience then break end
      end
      assert.is_true(least < 5 * process.patience)
      local t = ms.ones(3)
      dist.all_reduce(t)
      assert.are.same({ 2, 2, 2 }, t:tolist())
    end)
  end
end)
