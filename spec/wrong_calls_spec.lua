--- Wrong calls, as data: what a script does wrong and how the message begins. Each is an error at the script's line that
--- names what was called, what it was given and what it takes; none ends the process, and the next right call works.
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"
local nn, dist, optim, fsdp = ms.nn, ms.dist, ms.optim, ms.fsdp

-- x [2, 3], y [2, 2]; w a leaf, g made of it; m a Linear(3 -> 2), s one that is sharded; o an optimizer; r released.
local calls = {
  { "ms.zeros(-1)", "zeros: size -1 is negative" },
  { "ms.zeros(2.5)", "zeros: size is 2.5, expected a whole number" },
  { [[ms.zeros("a")]], "zeros: size is 'a', expected a whole number" },
  { [[ms.zeros(2, {dtype = "float31"})]], "zeros: unknown dtype 'float31'; did you mean 'float32'?" },
  { [[ms.zeros(2, {device = "gpu"})]], "zeros: unknown device 'gpu'; did you mean 'cpu'?" },
  { [[ms.zeros(2, {dtpye = "float32"})]], "zeros: unknown option 'dtpye'; did you mean 'dtype'? (accepted: device, dtype, requires_grad)" },
  { "ms.zeros(2, {requires_grad = 1})", "zeros: option 'requires_grad' is a number (1), expected a boolean" },
  { "ms.zeros(1e18)", "zeros: shape [1000000000000000000] has more elements than memory can hold" },
  { "ms.zeros(2^62, 2^62)", "zeros: shape [4611686018427387904, 4611686018427387904] has more elements than memory can hold" },
  { [[ms.ones(2, {requires_grad = true, dtype = "int64"})]], "requires_grad: dtype int64 cannot require gradients; floating point expected" },
  { [[ms.full({2}, "x")]], "full: value is a string ('x'), expected a number" },
  { "ms.full({2})", "full: value is nil, expected a number" },
  { [[ms.arange("a")]], "arange: argument 2 is a string ('a'), expected a number" },
  { "ms.arange(0, 10, 0)", "arange: step is 0" },
  { "ms.arange(0, 10, -1)", "arange: from 0, steps of -1 never come to 10" },
  { "ms.randint(5, 5, {2})", "randint: no whole number lies in [5, 5)" },
  { "ms.eye(-1)", "eye: size -1 is negative" },
  { [[ms.tensor("x")]], "tensor: element 1 is a string ('x'), expected a number or a boolean" },
  { "ms.tensor({{1, 2}, {3}})", "tensor: rows differ in length: 1 elements where the first has 2 (dimension 2)" },
  { [[ms.tensor({1, "x"})]], "tensor: element 2 is a string ('x'), expected a number or a boolean" },
  { "ms.tensor(nil)", "tensor: argument 1 is nil, expected a number, a boolean or a nested table of them" },
  { [[ms.tensor({300}, {dtype = "uint8"})]], "tensor: 300 at position 1 is beyond what uint8 holds" },
  { "ms.tensor({1, ms.ones(1)})", "tensor: element 2 is a Tensor, expected a number or a boolean" },
  { "ms.empty_like(3)", "empty_like: argument is a number (3), expected a tensor" },
  { [[ms.zeros_like(x, {dtype = "no"})]], "zeros_like: unknown dtype 'no'" },
  { "x + y", "add: shapes [2, 3] and [2, 2] do not broadcast: dimension 2 is 3 and 2" },
  { [[x - "a"]], "sub: argument is a string ('a'), expected a tensor" },
  { "x * {}", "mul: argument is a table, expected a tensor" },
  { "x + nil", "add: argument is nil, expected a tensor" },
  { "x < x", "tensors are not ordered: use lt, le, gt, ge, which give a tensor, or item()" },
  { "x:add(x, {alhpa = 2})", "add: unknown option 'alhpa'; did you mean 'alpha'? (accepted: alpha)" },
  { [[x:add(x, {alpha = "b"})]], "add: option 'alpha' is a string ('b'), expected a number" },
  { "x:view(4)", "view: shape [4] has 4 elements, but float32 [2, 3] cpu has 6" },
  { "x:view(-1, -1)", "view: shape [-1, -1] is not valid for float32 [2, 3] cpu: sizes must be >= 0, one may be -1" },
  { "x:view(2, 2.5)", "view: size is 2.5, expected a whole number" },
  { "x:reshape(5)", "reshape: shape [5] has 5 elements, but float32 [2, 3] cpu has 6" },
  { [[x:reshape("a")]], "reshape: size 1 is 'a', expected a whole number" },
  { "x:transpose(1, 3)", "transpose: dimension 3 is out of range for a tensor of 2 dimensions (expected -2 to 2)" },
  { "x:transpose(0, 1)", "transpose: dimension is 0, expected a whole number from 1, or from -1 backwards" },
  { "x:permute(1, 1)", "permute: dimension 1 is named twice" },
  { "x:permute(1)", "permute: 1 dimensions given for float32 [2, 3] cpu" },
  { "x:narrow(1, 2, 5)", "narrow: 5 elements from position 2 do not fit size 2" },
  { "x:narrow(3, 1, 1)", "narrow: dimension 3 is out of range; the tensor has 2 ([2, 3])" },
  { [[x:narrow(1, "a", 1)]], "narrow: position is 'a', expected a whole number" },
  { "x:select(1, 3)", "select: position 3 is out of range for size 2" },
  { "x:select(3, 1)", "select: dimension 3 is out of range; the tensor has 2 ([2, 3])" },
  { "x[5]", "select: position 5 is out of range for size 2" },
  { "x:split(0, 1)", "split: size 0 is not positive" },
  { "x:split({1, 5}, 1)", "split: sizes [1, 5] add up to 6, dimension 1 has 2" },
  { "x:chunk(0)", "chunk: number of pieces is 0, expected at least 1" },
  { "x:expand(5, 3)", "expand: float32 [2, 3] cpu does not expand to [5, 3]: dimension 1 is 2" },
  { "x:squeeze(5)", "squeeze: dimension 5 is out of range for a tensor of 2 dimensions (expected -2 to 2)" },
  { "x:unsqueeze(9)", "unsqueeze: dimension 9 is out of range; the tensor has 2" },
  { "x:tile(-1)", "tile: -1 repetitions: must not be negative" },
  { "x:index_select(1, x)", "index_select: positions must be int64 or int32, got float32 [2, 3] cpu" },
  { [[x:index_select(1, ms.tensor({7}, {dtype = "int64"}))]], "index_select: position 7 is not inside dimension 1 of float32 [2, 3] cpu (expected 0 to 1)" },
  { "x:gather(1, ms.zeros(2, 3))", "gather: positions must be int64 or int32, got float32 [2, 3] cpu" },
  { [[x:gather(1, ms.full({2, 3}, 9, {dtype = "int64"}))]], "gather: position 9 is not inside dimension 1 of float32 [2, 3] cpu (expected 0 to 1)" },
  { [[x:scatter_(1, ms.full({2, 3}, 9, {dtype = "int64"}), x)]], "scatter_: position 9 is not inside dimension 1 of float32 [2, 3] cpu (expected 0 to 1)" },
  { "x:masked_fill(x, 0)", "masked_fill: the mask must be a bool tensor, got float32 [2, 3] cpu" },
  { "x:masked_fill(ms.ones(5):gt(0), 0)", "masked_fill: shapes [2, 3] and [5] do not broadcast: dimension 2 is 3 and 5" },
  { "x:matmul(y)", "matmul: inner dimensions differ: [2, 3] has 3 columns, [2, 2] has 2 rows" },
  { "x:matmul(3)", "matmul: argument is a number (3), expected a tensor" },
  { [[x:matmul(ms.ones(3, 2, {dtype = "float64"}))]], "matmul: all arguments need one dtype, got float32 [2, 3] cpu and, as argument 2, float64 [3, 2] cpu" },
  { "ms.ones(2, 3, 4):matmul(ms.ones(5, 4, 2))", "matmul: batch dimensions of [2, 3, 4] and [5, 4, 2] do not broadcast" },
  { "x:sum(3)", "sum: dimension 3 is out of range for a tensor of 2 dimensions (expected -2 to 2)" },
  { [[x:sum("a")]], "sum: dimension is a string ('a'), expected a position or a list of them" },
  { "x:sum(1, {kepdim = true})", "sum: unknown option 'kepdim'; did you mean 'keepdim'? (accepted: keepdim)" },
  { [[x:mean(1, {keepdim = "yes"})]], "mean: option 'keepdim' is a string ('yes'), expected a boolean" },
  { "x:long():mean()", "mean: needs a real tensor, got int64 [2, 3] cpu; cast it first" },
  { "x:max(4)", "max: dimension 4 is out of range for a tensor of 2 dimensions (expected -2 to 2)" },
  { [[x:norm("x")]], "norm: p is a string ('x'), expected a number" },
  { "x:softmax(7)", "softmax: dimension 7 is out of range for a tensor of 2 dimensions (expected -2 to 2)" },
  { "x:argmax(3)", "argmax: dimension 3 is out of range for a tensor of 2 dimensions (expected -2 to 2)" },
  { "x:cumsum(0)", "cumsum: dimension is 0, expected a whole number from 1, or from -1 backwards" },
  { [[x:clamp("a", 2)]], "clamp: bounds are a string ('a') and a number (2), expected numbers or nil" },
  { [[x:pow("a")]], "pow: argument is a string ('a'), expected a tensor" },
  { "x:item()", "item: the tensor has 6 elements, shape [2, 3]; exactly 1 expected" },
  { [[x:to("float31")]], "to: unknown dtype or device 'float31'; did you mean 'float32'?" },
  { [[x:to("tpu")]], "to: unknown dtype or device 'tpu'; did you mean 'cpu'?" },
  { "x:to()", "to: argument is nil, expected a dtype, a device or a tensor" },
  { "x:to(5)", "to: argument is a number (5), expected a dtype, a device or a tensor" },
  { "x:copy_(y)", "copy_: float32 [2, 2] cpu does not broadcast to float32 [2, 3] cpu" },
  { "x:copy_(1)", "copy_: argument is a number (1), expected a tensor" },
  { [[x:fill_("a")]], "fill_: operand is a string ('a'), expected a tensor or a number" },
  { "x:stride(3)", "stride: dimension 3 is out of range; the tensor has 2 ([2, 3])" },
  { "x:size(0)", "size: dimension is 0, expected a whole number from 1, or from -1 backwards" },
  { "ms.cat({})", "cat: the list is empty" },
  { "ms.cat({x, y}, 1)", "cat: tensor 2 is [2, 2] and the first [2, 3]: all sizes but dimension 1 must agree" },
  { "ms.cat({x, 3})", "cat: element 2 is a number (3), expected a tensor" },
  { "ms.cat({x, x}, 5)", "cat: dimension 5 is out of range for a tensor of 2 dimensions (expected -2 to 2)" },
  { "ms.cat(x)", "cat: argument 1 is a Tensor, expected a list of tensors" },
  { "ms.stack({x, y})", "stack: tensor 2 is [2, 2] and the first [2, 3]: they must have one shape" },
  { "ms.where(x, x, x)", "where: the condition must be a bool tensor, got float32 [2, 3] cpu" },
  { "ms.where(x:gt(0), x, y)", "where: shapes [2, 3] and [2, 2] do not broadcast: dimension 2 is 3 and 2" },
  { "x:backward()", "backward: root 1, float32 [2, 3] cpu, does not require grad and was made by no operator on one that" },
  { "g:backward(ms.ones(7))", "backward: gradient 1 has shape [7], expected [3]" },
  { "g:backward()", "backward: root 1 has shape [3]; a gradient can be left out for one element only" },
  { "x:register_hook(1)", "register_hook: hook is a number (1), expected a function" },
  { "w:register_hook(1)", "register_hook: hook is a number (1), expected a function" },
  { "x:register_hook(print)", "register_hook: the tensor does not require grad, so no gradient will reach it" },
  { "g:register_post_accumulate_grad_hook(print)", "register_post_accumulate_grad_hook: the tensor is the result of an operator; leaves only" },
  { "ms.grad({g}, {w})", "grad: root 1 has shape [3]; a gradient can be left out for one element only" },
  { "ms.grad({g:sum()}, {x})", "grad: input 1, float32 [2, 3] cpu, does not require grad" },
  { "ms.grad({}, {w})", "grad: 0 roots; 1 to 64 are supported" },
  { "ms.no_grad(1)", "no_grad: argument is a number (1), expected a function" },
  { "ms.scope(1)", "scope: argument is a number (1), expected a function" },
  { [[ms.steps("a")]], "steps: argument 1 is a string ('a'), expected a number of steps" },
  { "ms.steps(1.5)", "steps: argument 1 is 1.5, expected a whole number of steps" },
  { "ms.steps(2, {form = 1})", "steps: unknown option 'form'; did you mean 'from'? (accepted: from)" },
  { "ms.checkpoint(1)", "checkpoint: argument 1 is a number (1), expected a function or a module" },
  { "ms.Function{forward = 1}", "Function: option 'forward' is a number (1), expected a function" },
  { "ms.Function{forward = print}", "Function: needs forward and backward" },
  { "w:add_(1)", "add_: a leaf that requires grad cannot be changed in place; do it under no_grad or on its detach()" },
  { "w.grad = y", "grad: float32 [2, 2] cpu given, the tensor is float32 [3] cpu: shape, dtype and device must be equal" },
  { "w.grad = 3", "grad: value is a number (3), expected a tensor" },
  { "g.requires_grad = false", "requires_grad: the tensor is the result of an operator; only leaves can be changed (use detach())" },
  { "x.requires_grad = 1", "requires_grad: value is a number (1), expected a boolean" },
  { [[ms.tensor({1}, {dtype = "int64"}):requires_grad_()]], "requires_grad: dtype int64 cannot require gradients; floating point expected" },
  { "x.shape = 3", "a tensor's 'shape' cannot be assigned" },
  { "x.view = 3", "'view' is a method of tensors; choose another name for your field" },
  { [[ms.manual_seed("a")]], "manual_seed: argument is a string ('a'), expected a whole number" },
  { [[ms.set_default_dtype("int64")]], "set_default_dtype: dtype 'int64' is not floating point" },
  { [[ms.set_default_device("xpu")]], "set_default_device: unknown device 'xpu'; did you mean 'cpu'?" },
  { [[ms.with_device("cpu")]], "with_device: argument 2 is nil, expected a function" },
  { [[ms.memory_stats("tpu")]], "memory_stats: unknown device 'tpu'; did you mean 'cpu'?" },
  { "ms.no_such", "unknown name in moonshard: 'no_such'" },
  { "ms.nn.Lineer", "unknown name in nn: 'Lineer'; did you mean 'Linear'?" },
  { "ms.testing.assert_close(x, y)", "assert_close: shapes differ: [2, 3] against [2, 2]" },
  { "ms.testing.assert_close(x, x + 1)", "assert_close: 6 of 6 elements of float32 [2, 3] differ; worst at [1, 1]: 1 against 2, difference 1," },
  { "nn.Linear(2)", "Linear: sizes are whole numbers, got nil" },
  { "nn.Linear(2, -1)", "Linear: sizes are whole numbers, got a number (-1)" },
  { [[nn.Linear("a", 2)]], "Linear: sizes are whole numbers, got a string ('a')" },
  { "nn.Linear(2, 2, {bais = true})", "Linear: unknown option 'bais'; did you mean 'bias'? (accepted: bias, device, dtype)" },
  { "nn.Linear(2, 2, {bias = 1})", "Linear: option 'bias' is a number (1), expected a boolean" },
  { "nn.Linear(2, 2)(x)", "linear: linear: the input's last dimension must be the weight's 2 columns: input [2, 3], weight [2," },
  { "nn.Linear(3, 2)()", "linear: linear: argument is nil, expected a tensor" },
  { "nn.Linear(3, 2)(5)", "linear: linear: argument is a number (5), expected a tensor" },
  { "nn.Linear(3, 2)(x:long())", "linear: linear: all arguments need one dtype, got int64 [2, 3] cpu and, as argument 2, float32 [2," },
  { "nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2))(x)",
    "sequential.3: linear: the input's last dimension must be the weight's 5 columns: input [2, 4]," },
  { "nn.Sequential(1)", "Sequential: element 1 is a number (1): a Module expected" },
  { [[nn.Sequential(nn.ReLU(), nil, "x")]], "Sequential: element 2 is nil: a Module expected" },
  { "nn.ModuleList{nn.ReLU()}(x)", "ModuleList has no forward" },
  { "nn.ModuleDict{a = 1}", "ModuleDict: 'a' is a number (1): a Module expected" },
  { "nn.Embedding(4)", "Embedding: sizes are whole numbers, got nil" },
  { "nn.Embedding(4, 2)(x)", "embedding: embedding: ids must be int64 or int32, got float32 [2, 3] cpu" },
  { [[nn.Embedding(4, 2)(ms.tensor({4}, {dtype = "int64"}))]], "embedding: embedding: id 4 (element 1) is not in 0 .. 3, the rows of the weight" },
  { [[nn.Embedding(4, 2)(ms.tensor({-1}, {dtype = "int64"}))]], "embedding: embedding: id -1 (element 1) is not in 0 .. 3, the rows of the weight" },
  { "nn.LayerNorm(4)(x)", "layernorm: layer_norm: the weight must be [3], the normalised dimensions of the input, got [4]" },
  { "nn.LayerNorm()", "LayerNorm: sizes to normalise over expected, got none" },
  { "nn.RMSNorm(4)(x)", "rmsnorm: rms_norm: the weight must be [3], the normalised dimensions of the input, got [4]" },
  { "nn.Dropout(1.5)", "Dropout: dropout probability has to be between 0 and 1, but got 1.5" },
  { [[nn.Dropout("a")]], "Dropout: dropout probability has to be between 0 and 1, but got a" },
  { [[nn.GELU{approximate = "tan"}]], "GELU: option 'approximate' is 'tan', expected one of 'none', 'tanh'; did you mean 'tanh'?" },
  { [[nn.CrossEntropyLoss{reduction = "men"}]], "CrossEntropyLoss: option 'reduction' is 'men', expected one of 'mean', 'sum', 'none'; did you mean" },
  { [[nn.F.cross_entropy(x, ms.tensor({0, 3}, {dtype = "int64"}))]], "cross_entropy: id 3 (row 2) is not in 0 .. 2 and not ignore_index -100" },
  { [[nn.F.cross_entropy(x, ms.tensor({0}, {dtype = "int64"}))]], "cross_entropy: ids must be [2] for logits [2, 3], got [1]" },
  { "nn.F.cross_entropy(x, x)", "cross_entropy: ids must be int64 or int32, got float32 [2, 3] cpu" },
  { [[nn.F.cross_entropy(x, ms.tensor({0, 1}, {dtype = "int64"}), {label_smoothing = 2})]], "cross_entropy: label_smoothing must be from 0 to 1, got 2" },
  { "nn.F.mse_loss(x, y)", "mse_loss: both arguments need one shape, got [2, 3] and [2, 2]" },
  { "nn.F.linear(x, y)", "linear: the input's last dimension must be the weight's 2 columns: input [2, 3], weight [2, 2]" },
  { "nn.F.softmax(x, 9)", "softmax: dimension 9 is out of range for a tensor of 2 dimensions (expected -2 to 2)" },
  { "nn.F.layer_norm(x, {4})", "layer_norm: input [2, 3] does not end in the normalised sizes [4]" },
  { "nn.F.scaled_dot_product_attention(x, y, x)", "attention: query [..., t, d] and key, value [..., s, d] do not fit: [2, 3], [2, 2], [2, 3]" },
  { "nn.F.dropout(x, -1)", "dropout: dropout probability has to be between 0 and 1, but got -1" },
  { [[nn.F.gelu(x, {approximate = "no"})]], "gelu: option 'approximate' is 'no', expected one of 'none', 'tanh'" },
  { "nn.init.normal_(1)", "normal_: argument 1 is a number (1), expected a tensor" },
  { "nn.init.normal_(x, 0, -1)", "randn: std -1 is negative" },
  { "nn.init.kaiming_uniform_(ms.ones(2))", "kaiming_uniform_: fan in and fan out need at least 2 dimensions, got [2]" },
  { "nn.init.xavier_uniform_(ms.ones(2))", "xavier_uniform_: fan in and fan out need at least 2 dimensions, got [2]" },
  { "nn.utils.clip_grad_norm_(3, 1)", "clip_grad_norm_: argument 1 is a number (3), expected a list of tensors" },
  { [[nn.utils.clip_grad_norm_({x}, "a")]], "clip_grad_norm_: max_norm is a string ('a'), expected a number" },
  { "nn.utils.clip_grad_norm_({3}, 1)", "clip_grad_norm_: parameter 1 is a number (3), expected a tensor" },
  { "nn.Parameter(3)", "Parameter: argument 1 is a number (3), expected a tensor" },
  { "nn.Parameter(x:long())", "Parameter: dtype int64 cannot require gradients; floating point expected (or requires_grad = false)" },
  { "nn.Module:extend()", "extend: a class name expected, got nil" },
  { [[nn.Module:extend("A")()(x)]], "A has no forward" },
  { "m:load_state_dict({})", [[Error(s) in loading state_dict for Linear: | Missing key(s) in state_dict: "weight", "bias". ]] },
  { "m:load_state_dict({weight = ms.ones(1), bias = ms.ones(2)})",
    "Error(s) in loading state_dict for Linear: | size mismatch for weight: copying a param with shape [1] from checkpoint, the" },
  { "m:load_state_dict(3)", "load_state_dict: a table of tensors expected, got a number (3)" },
  { [[m:get_submodule("a.b")]], "get_submodule: Linear: unknown child 'a'" },
  { [[m:get_parameter("wieght")]], "get_parameter: Linear: unknown parameter 'wieght'; did you mean 'weight'?" },
  { [[m:register_buffer("a.b", x)]], "register buffer: name 'a.b' contains a dot" },
  { [[m:register_buffer("weight", x)]], "register_buffer: Linear has a field 'weight' already" },
  { [[m:register_parameter("p", x)]], "register_parameter: cannot assign a Tensor to parameter 'p': an nn.Parameter or nil expected" },
  { "m:register_forward_hook(3)", "register_forward_hook: hook is a number (3), expected a function" },
  { [[m:to("int64")]], "to: a module is moved to floating dtypes only, got 'int64'" },
  { [[m:to("tpu")]], "to: unknown device 'tpu'; did you mean 'cpu'?" },
  { [[m:train("yes")]], "train: true or false expected, got a string ('yes')" },
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
  { "optim.SGD({w}, {learning_rate = 1})", "SGD: unknown option 'learning_rate' (accepted: dampening, lr, momentum, nesterov, weight_decay)" },
  { "optim.SGD({w, w}, {lr = 1})", "SGD: parameter 2 is in the list twice" },
  { "optim.SGD({g}, {lr = 1})", "SGD: parameter 1 is the result of an operation; only leaves can be optimized" },
  { "optim.SGD({w}, {lr = 1, nesterov = true})", "SGD: Nesterov momentum requires a momentum and zero dampening" },
  { "optim.AdamW({w}, {betas = {2, 3}})", "AdamW: betas[1] is a number (2), expected a number from 0 to below 1" },
  { "optim.AdamW({w}, {betas = 0.9})", "AdamW: option 'betas' is a number (0.9), expected a table" },
  { "optim.AdamW({w}, {eps = -1})", "AdamW: eps is a number (-1), expected a number from 0" },
  { "optim.AdamW({w}):load_state_dict({})", "AdamW: load_state_dict: a table with state and param_groups expected, got a table" },
  { "optim.AdamW({w}):load_state_dict(3)", "AdamW: load_state_dict: a table with state and param_groups expected, got a number (3)" },
  { "optim.AdamW({{params = {w}, lrr = 1}})", "AdamW: unknown option of group 1 'lrr'; did you mean 'lr'?" },
  { "optim.AdamW({w}):step(3)", "AdamW: step: closure is a number (3), expected a function" },
  { "optim.AdamW({w}):zero_grad(1)", "zero_grad: options are a number (1), expected a table" },
  { "optim.lr_scheduler.cosine(1, {steps = 2})", "lr_scheduler.cosine: argument 1 is a number (1), expected an optimizer" },
  { "optim.lr_scheduler.cosine(o, {})", "lr_scheduler.cosine: option 'steps' is missing" },
  { "optim.lr_scheduler.cosine(o, {steps = 2, warmup = 5})", "lr_scheduler.cosine: warmup of 5 steps is longer than all 2 steps" },
  { [[optim.lr_scheduler.cosine(o, {steps = "a"})]], "lr_scheduler.cosine: option 'steps' is a string ('a'), expected a whole number from 0" },
  { "optim.lr_scheduler.lambda(o, 2)", "lr_scheduler.lambda: argument 2 is a number (2), expected a function" },
  { "dist.all_reduce(3)", "all_reduce: the tensor is a number (3), expected a tensor" },
  { [[dist.all_reduce(x, {op = "summ"})]], "all_reduce: option 'op' is 'summ', expected one of 'sum', 'avg', 'max', 'min', 'prod'; did you mean" },
  { "dist.all_reduce(x, {grup = 1})", "all_reduce: unknown option 'grup'; did you mean 'group'? (accepted: async, group, op)" },
  { "dist.all_reduce(x, {group = 3})", "all_reduce: the group is a number (3), expected one of dist.new_group" },
  { "dist.all_gather(x, y)", "all_gather: sizes don't fit: out is float32 [2, 3] cpu, in is float32 [2, 2] cpu, for 1 ranks" },
  { "dist.all_gather(x:long(), x)", "all_gather: out is int64 [2, 3] cpu, in is float32 [2, 3] cpu" },
  { "dist.reduce_scatter(x, y)", "reduce_scatter: sizes don't fit: out is float32 [2, 3] cpu, in is float32 [2, 2] cpu, for 1 ranks" },
  { "dist.broadcast(x, {src = 5})", "broadcast: rank 5 is not a member of the group" },
  { "dist.broadcast(x, {src = 0.5})", "broadcast: rank 0.5 is no whole number" },
  { [[dist.broadcast(x, {src = "a"})]], "broadcast: option 'src' is a string ('a'), expected a number" },
  { "dist.send(x, 0)", "send: rank 0 is this rank itself" },
  { "dist.recv(x, 7)", "recv: there is no rank 7 in the world of 1" },
  { "dist.gather(x, {dst = -1})", "gather: rank -1 is not a member of the group" },
  { "dist.scatter(x, 3)", "scatter: option 'src' is missing: a rank of the world" },
  { "dist.scatter(x, {x, x})", "scatter: option 'src' is missing: a rank of the world" },
  { "dist.new_group(3)", "dist.new_group: expected a list of ranks, got a number (3)" },
  { "dist.new_group({0, 0})", "dist.new_group: 2 ranks of a world of 1" },
  { "dist.new_group({5})", "dist.new_group: rank 5 is not in the world of 1" },
  { "dist.rank(3)", "dist.rank: the group is a number (3), expected one of dist.new_group" },
  { [[dist.set_debug_level("loud")]], "set_debug_level: 'loud' is none of 'off', 'info', 'detail'" },
  { [[dist.init{backend = "gloo"}]], "dist.init: option 'backend' is 'gloo', expected one of 'auto', 'mpi', 'nccl', 'self'" },
  { [[dist.init_device_mesh("cpu", {3})]], "init_device_mesh: [3] is 3 ranks, the world has 1" },
  { [[dist.init_device_mesh("cpu", {1}, {names = {"a", "b"}})]], "init_device_mesh: 2 names for 1 dimensions" },
  { "dist.all_gather_object(print)", "all_gather_object: the value is a function; it means nothing to another rank" },
  { "fsdp.fully_shard(3)", "fully_shard: argument 1 is a number (3), expected a module or a list of modules" },
  { "fsdp.fully_shard(x)", "fully_shard: argument 1 is a Tensor, expected a module or a list of modules" },
  { [[fsdp.fully_shard(m, {reshard_after_forward = "yes"})]],
    "reshard_after_forward should be a bool or an int representing the group size to reshard to, not" },
  { "fsdp.fully_shard(m, {mesh = 3})", "fully_shard expects a 1D or 2D DeviceMesh but got 3" },
  { "fsdp.fully_shard(m, {mp_policy = 3})", "fully_shard: option 'mp_policy' is a number (3), expected a fsdp.MixedPrecisionPolicy" },
  { [[fsdp.MixedPrecisionPolicy{param_dtype = "int64"}]], "MixedPrecisionPolicy: option 'param_dtype' is 'int64', expected a floating dtype" },
  { [[fsdp.MixedPrecisionPolicy{params = "float16"}]], "MixedPrecisionPolicy: unknown option 'params' (accepted: cast_forward_inputs, output_dtype," },
  { "fsdp.FSDP(3)", "FSDP: argument 1 is a number (3), expected a module" },
  { [[fsdp.FSDP(m, {sharding_strategy = "fully"})]], "FSDP: option 'sharding_strategy' is 'fully', expected one of 'full_shard', 'shard_grad_op'," },
  { "fsdp.state_dict(3)", "state_dict: argument 1 is a number (3), expected a module" },
  { "s.weight + 1", "add: parameter 'weight' is sharded; use to_local() for this rank's part or full_tensor() for the" },
  { "s.weight:view(-1)", "view: parameter 'weight' is sharded; use to_local() for this rank's part or full_tensor() for the" },
  { "s.weight:copy_(x)", "copy_: [2, 3] is sharded; use to_local() for this rank's part or full_tensor() for the whole, or" },
  { "s.weight[1]", "select: parameter 'weight' is sharded; use to_local() for this rank's part or full_tensor() for the" },
  { "ms.deepcopy(s)", "FSDP does not support deepcopy. Please use state dict for serialization." },
  { [[ms.load("/no/such/file")]], "load: cannot open '/no/such/file': No such file or directory" },
  { "ms.load(3)", "load: path is a number (3), expected a string" },
  { [[ms.load("README.md")]], "load: 'README.md' is no valid safetensors file: a header of 7526480827153981475 bytes in a file of" },
  { [[ms.load(".")]], "load: '.' is no regular file" },
  { [[ms.save("/no/such/dir/x.safetensors", {a = x})]], "save: cannot create '/no/such/dir/x.safetensors" },
  { [[ms.save(folder .. "/x.safetensors", x)]], "save: tensors are a Tensor, expected a table of name -> tensor" },
  { [[ms.save(folder .. "/x.safetensors", {a = 3})]], "save: 'a' is a number (3), expected a tensor" },
  { [[ms.save(folder .. "/x.safetensors", {[1] = x})]], "save: the name 1 is a number (1), expected a string" },
  { [[ms.save(folder .. "/x.safetensors", {a = x}, {metadata = 3})]], "save: option 'metadata' is a number (3), expected a table" },
  { [[ms.save(folder .. "/x.safetensors", {a = s.weight})]], "save: tensor 'a' is sharded over ranks; use full_tensor() or to_local()" },
  { [[ms.load(folder .. "/ok.safetensors", {names = {"b"}})]], "load: 'FOLDER/ok.safetensors': unknown tensor 'b'; did you mean 'a'?" },
  { [[ms.load(folder .. "/ok.safetensors", {device = "tpu"})]], "to: unknown dtype or device 'tpu'; did you mean 'cpu'?" },
  { "ms.data.batches(3, {context = 2, batch = 2})", "batches: argument 1 is a number (3), expected a corpus" },
  { "r + 1", "tensor was released with its scope; return it, or keep() it (made " },
  { "r:item()", "tensor was released with its scope; return it, or keep() it (made " },
  { "r.shape", "tensor was released with its scope; return it, or keep() it (made " },
  { "r:backward()", "tensor was released with its scope; return it, or keep() it (made " },
  { "r:keep()", "tensor was released with its scope; return it, or keep() it (made " },
  { "nn.Linear(3, 2)(r)", "tensor was released with its scope; return it, or keep() it (made " },
  { "ms.cat({x, r})", "tensor was released with its scope; return it, or keep() it (made " },
  { "optim.SGD({r}, {lr = 1})", "tensor was released with its scope; return it, or keep() it (made " },
  { "dist.all_reduce(r)", "tensor was released with its scope; return it, or keep() it (made " },
  { [[ms.save(folder .. "/x.safetensors", {a = r})]], "tensor was released with its scope; return it, or keep() it (made " },
  { "ms.sparse_coo(x, y, {2})", "sparse_coo: indices are float32 [2, 3], expected int64 [dimensions, values]" },
  { "ms.from_pointer(nil, {2})", "from_pointer: the pointer is NULL, shape is [2]" },
  { [[ms.from_pointer(1, {2}, {dtype = "no"})]], "from_pointer: argument 1 is a number (1), expected a pointer of the FFI" },
  { [[ms.amp.autocast("int8", print)]], "autocast: dtype is 'int8', expected 'bfloat16', 'float16' or nil" },
  { "ms.amp.GradScaler{init_scal = 2}", "GradScaler: unknown option 'init_scal'; did you mean 'init_scale'? (accepted: backoff_factor," },
  { "ms.amp.GradScaler{growth_factor = 0.5}", "The growth factor must be > 1.0." },
  { "nn.Conv2d(1, 2)", "Conv2d: option 'kernel' is nil, expected a whole number or a pair of them" },
  { "nn.Conv2d(1, 2, 3)(x)", "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: [2, 3]" },
  { "nn.BatchNorm1d(4)(x)", "batchnorm1d: batch_norm: the weight must be [3], one number a channel of the input [2, 3], got [4]" },
  { "nn.MultiheadAttention(5, 2)", "embed_dim must be divisible by num_heads" },
  { "nn.Transformer{d_model = 5, nhead = 2}", "embed_dim must be divisible by num_heads" },
  { "nn.DDP(3)", "DDP: argument 1 is a number (3), expected a module" },
}

local folder

local function surroundings()
  local env = { ms = ms, nn = nn, dist = dist, optim = optim, fsdp = fsdp, print = print, folder = folder }
  env.x, env.y, env.w = ms.ones(2, 3), ms.ones(2, 2), ms.ones(3, { requires_grad = true })
  env.g, env.m, env.s = env.w * 2, nn.Linear(3, 2), fsdp.fully_shard(nn.Linear(3, 2))
  env.o = optim.SGD({ ms.ones(1, { requires_grad = true }) }, { lr = 1 })
  ms.scope(function() env.r = ms.ones(2, 3) + 1 end)
  return env
end

-- The message without its place, which must be the call's line.
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
  end)
  teardown(function() process.remove_folder(folder) end)

  for _, case in ipairs(calls) do
    it(case[1], function()
      local text = message_of(case[1], surroundings())
      assert.are.equal(case[2], text:sub(1, #case[2]))
      assert.are.equal(0, require("moonshard.ffi").state.run_depth)
      assert.is_true(ms.is_grad_enabled())
      assert.are.equal(3, (ms.ones(2) + 2)[1]:item())
    end)
  end

  it("is one of more than 100 here", function() assert.is_true(#calls > 250) end)

  it("names the module that it happened in, however deep", function()
    local deep = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(), nn.Linear(5, 2)))
    assert.matches("^sequential%.2%.2: linear: the input's last dimension must be the weight's 5 columns: input %[2, 3%]",
      message_of("m(x)", { m = deep, x = ms.ones(2, 3) }))
  end)
end)

ranks.describe(2, "a wrong call on two ranks", function(rank)
  local wrong = {
    { "dist.broadcast(x, {src = 2})", "broadcast: rank 2 is not a member of the group" },
    { "dist.all_gather(x, x)", "all_gather: sizes don't fit: out is float32 [2, 3] cpu, in is float32 [2, 3] cpu, for 2 ranks" },
    { "dist.reduce_scatter(x, x)", "reduce_scatter: sizes don't fit" },
    { "dist.send(x, rank)", "send: rank %d is this rank itself" },
    { "dist.recv(x, 9)", "recv: there is no rank 9 in the world of 2" },
    { "dist.new_group({0, 0})", "dist.new_group: " },
    { "dist.init_device_mesh('cpu', {3})", "init_device_mesh: [3] is 3 ranks, the world has 2" },
    { "fsdp.fully_shard(m, {reshard_after_forward = 'no'})", "reshard_after_forward should be a bool or an int" },
    { "s.weight + 1", "add: parameter 'weight' is sharded; use to_local() for this rank's part or full_tensor() for the whole" },
    { "nn.Linear(3, 2)(r)", "tensor was released with its scope; return it, or keep() it (made " },
  }
  for _, case in ipairs(wrong) do
    it(case[1] .. " is an error on each, and they go on together", function()
      local env = surroundings()
      env.rank = rank
      local begun = ms.time()
      local expected = case[2]:format(rank)
      assert.are.equal(expected, message_of(case[1], env):sub(1, #expected))
      assert.is_true(ms.time() - begun < 5)
      local t = ms.ones(3)
      dist.all_reduce(t)
      assert.are.same({ 2, 2, 2 }, t:tolist())
    end)
  end
end)
