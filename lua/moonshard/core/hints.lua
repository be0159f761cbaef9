-- SPDX-License-Identifier: MIT
--- Hints for unknown names: the table that has the name (x:relu(), nn.Linear), Moonshard's name for the same thing
--- (learning_rate: lr), or what to write instead.
local M = {}

-- Maps names of other libraries to Moonshard's names.
local synonyms = {
  learning_rate = "lr", wd = "weight_decay", decay = "weight_decay", l2 = "weight_decay", epsilon = "eps",
  beta = "betas", beta1 = "betas",
  beta2 = "betas", functional = "F", utils = "utils", axis = "dim", keepdims = "keepdim", use_bias = "bias",
  numpy = "tolist", len = "size", get_lr = "get_last_lr", result = "compute", close = "finish", show = "text",
  num_workers = "workers", collate_fn = "collate", prefetch_factor = "prefetch", generator = "seed",
  clip = "clamp", clip_ = "clamp_", greater = "gt", greater_equal = "ge", less = "lt", less_equal = "le",
  not_equal = "ne", concat = "cat", concatenate = "cat", ravel = "flatten",
  mean = "avg", gpu = "cuda",
  long = "int64", int = "int32", short = "int16", char = "int8", byte = "uint8", boolean = "bool",
  double = "float64", float = "float32", half = "float16", fp64 = "float64", fp32 = "float32", fp16 = "float16",
  bf16 = "bfloat16", f64 = "float64", f32 = "float32", f16 = "float16", i64 = "int64", i32 = "int32", u8 = "uint8",
  r = "rank", lora_alpha = "alpha", lora_dropout = "dropout", target_modules = "target", modules_to_save = "trainable",
}

-- Maps options of PyTorch to advice for functions of Moonshard that lack them.
local options = {
  dim = "a dimension is given by position, before the options",
  p = "it is given by position, before the options",
  size = "sizes are given by position, before the options",
  shape = "sizes are given by position, before the options",
  dims = "dimensions are given by position, before the options",
  inplace = "leave it out: the result is a new tensor",
  fused = "leave it out: a step is one pass over the parameters",
  foreach = "leave it out: a step is one pass over the parameters",
  capturable = "leave it out: ms.capture captures every optimizer of the engine",
  unbiased = "write correction = 0 for unbiased=False",
  generator = "leave it out: ms.manual_seed sets the one generator",
  eta_min = "write min_factor, a share of the initial learning rate",
  last_epoch = "leave it out: schedule:load_state_dict continues a schedule",
  dropout_p = "write dropout",
}

-- Names of PyTorch's arguments that Moonshard's functions take by position.
local positional = {}
for name in ([[dim dim0 dim1 start_dim end_dim p k size num_classes in_features out_features input_size
  hidden_size in_channels out_channels num_embeddings embedding_dim kernel_size num_features num_channels num_groups
  normalized_shape negative_slope embed_dim num_heads d_model nhead start end high low repeats max_norm dataset
  output_size threshold loc scale rate concentration]]):gmatch "%S+" do
  positional[name] = true
end

-- Maps names of PyTorch and other libraries that Moonshard lacks to what a script must write instead.
local instead = {
  DataParallel = "write nn.DDP(model) and start one process per device: mpirun -n N luajit train.lua",
  DistributedDataParallel = "use nn.DDP",
  LazyLinear = "write nn.Linear(size_in, size_out): the size of a layer's input is that of the layer before it",
  CrossMapLRN2d = "use nn.LocalResponseNorm",
  FractionalMaxPool2d = "use nn.AdaptiveMaxPool2d, whose windows have nearly equal sizes",
  max_pool2d_with_indices = "use nn.F.max_pool2d(x, kernel, { return_indices = true })",
  multi_head_attention_forward = "use nn.MultiheadAttention, or nn.F.scaled_dot_product_attention(q, k, v)",
  convert_sync_batchnorm = "use nn.SyncBatchNorm.convert_sync_batchnorm(model)",
  from_pretrained = "use nn.Embedding.from_pretrained(weights); require moonshard.models.gpt, or another, for models",
  upsample_nearest = "use nn.F.interpolate(x, { scale_factor = 2 })",
  upsample_bilinear = 'use nn.F.interpolate(x, { scale_factor = 2, mode = "bilinear", align_corners = true })',
  FullyShardedDataParallel = "use fsdp.FSDP",
  init_process_group = "use dist.init(), which the first use of ms.dist calls",
  get_rank = "use dist.rank()",
  TCPStore = "use dist.broadcast_object or dist.all_gather_object: the launcher makes ranks known to each other",
  FileStore = "use dist.broadcast_object or dist.all_gather_object: the launcher makes ranks known to each other",
  memory_allocated = "use ms.memory_stats(device).allocated",
  max_memory_allocated = "use ms.memory_stats(device).peak_allocated",
  CUDAGraph = "use ms.capture(fn)",
  get_world_size = "use dist.world_size()",
  StepLR = "use optim.lr_scheduler.step",
  MultiStepLR = "use optim.lr_scheduler.multistep",
  ExponentialLR = "use optim.lr_scheduler.exponential",
  PolynomialLR = "use optim.lr_scheduler.polynomial",
  OneCycleLR = "use optim.lr_scheduler.one_cycle",
  CyclicLR = "use optim.lr_scheduler.cyclic",
  CosineAnnealingWarmRestarts = "use optim.lr_scheduler.cosine_warm_restarts",
  ReduceLROnPlateau = "use optim.lr_scheduler.reduce_on_plateau",
  SequentialLR = "use optim.lr_scheduler.sequential",
  ChainedScheduler = "use optim.lr_scheduler.chained",
  MultiplicativeLR = "use optim.lr_scheduler.multiplicative",
  CosineAnnealingLR = "use optim.lr_scheduler.cosine",
  LambdaLR = "use optim.lr_scheduler.lambda",
  LinearLR = "use optim.lr_scheduler.linear",
  LRScheduler = "use optim.lr_scheduler.lambda(optimizer, fn) for a schedule of your own",
  get_ema_multi_avg_fn = "use optim.EMA, or the option decay of optim.swa_utils.AveragedModel",
  get_ema_avg_fn = "use optim.EMA, or the option decay of optim.swa_utils.AveragedModel",
  Generator = "use ms.manual_seed, which sets the one generator",
  ConstantLR = "use optim.lr_scheduler.constant",
  Lambda = "a transform is a function: write function(x) ... end",
  ConvertImageDtype = "use data.transforms.ToTensor",
  ImageFolder = "write a data.Dataset whose get reads a file with data.read_image",
  SubsetRandomSampler = "use data.RandomSampler with a data.Subset",
  MultiLabelSoftMarginLoss = "use nn.BCEWithLogitsLoss: its mean is the same",
  multilabel_soft_margin_loss = "use nn.F.binary_cross_entropy_with_logits: its mean is the same",
  MSE = "use metrics.Mean: update((predictions - targets):pow(2))",
  MeanSquaredError = "use metrics.Mean: update((predictions - targets):pow(2))",
  MAE = "use metrics.Mean: update((predictions - targets):abs())",
  MeanAbsoluteError = "use metrics.Mean: update((predictions - targets):abs())",
  R2Score = "use metrics.R2",
  F1Score = "use metrics.F1",
  ReduceOp = 'write the option { op = "sum" }, or "avg", "max", "min", "prod"',
  parallel = "use nn.DDP(model), or ms.fsdp to shard a model",
  models = "models are modules of Lua: require moonshard.models.gpt, or mlp, llama, lstm_lm, resnet, vit, vae, unet",
  summary = "print(model) writes its layers and their sizes",
  vmap = "functions are not transformed: give the operations a dimension for the batch",
  func = "functions are not transformed: give the operations a dimension for the batch",
  jit = "models are not compiled: ms.capture(fn) records the work of a step and repeats it",
  compile = "models are not compiled: ms.capture(fn) records the work of a step and repeats it",
  onnx = "ms.save(path, model:state_dict()) writes the weights, as a safetensors file",
  export = "ms.save(path, model:state_dict()) writes the weights, as a safetensors file",
  hub = "ms.load(path) reads the weights of a file",
  save_image = "use data.write_png(path, data.make_grid(images))",
  train_test_split = "use data.random_split(dataset, { 0.8, 0.2 })",
  RandomChoice = "a transform is a function: write function(x) ... end, which calls one of them",
  RandomOrder = "a transform is a function: write function(x) ... end, which calls them",
  from_numpy = "read a file with ms.load, or wrap memory with ms.from_pointer",
}
-- PyTorch's distributions that Moonshard lacks.
for name, text in pairs {
  HalfCauchy = "take x:abs() of the samples of Cauchy(0, scale), and add math.log(2) to its log_prob",
  Binomial = "sum the samples of Bernoulli",
  Multinomial = "sum the samples of OneHotCategorical",
  NegativeBinomial = "sample a Poisson whose rate is a sample of Gamma",
  Weibull = "write scale * x ^ (1 / concentration), with x a sample of Exponential(1)",
  Pareto = "write scale * x:exp(), with x a sample of Exponential(alpha)",
  InverseGamma = "write 1 / x, with x a sample of Gamma",
  FisherSnedecor = "write (x / df1) / (y / df2), with x and y samples of Chi2(df1) and Chi2(df2)",
  LogisticNormal = "write x:softmax(-1), with x a sample of Normal",
  LowRankMultivariateNormal = "use distributions.MultivariateNormal",
  RelaxedOneHotCategorical = "use nn.F.gumbel_softmax(logits, { tau = temperature })",
  OneHotCategoricalStraightThrough = "use nn.F.gumbel_softmax(logits, { hard = true })",
  TransformedDistribution = "use LogNormal, or subtract the logarithm of the derivative from the base's log_prob",
  ContinuousBernoulli = "", VonMises = "", Wishart = "", Kumaraswamy = "", LKJCholesky = "", GeneralizedPareto = "",
  RelaxedBernoulli = "", LogitRelaxedBernoulli = "", ExponentialFamily = "",
} do
  instead[name] = (text == "" and "" or text .. ", or ") .. "extend distributions.Distribution for a class of your own"
end

-- Unknown names whose hint depends on the table in which they were read: table -> name -> what to write instead.
local within = { distributions = {
  constraints = "d.support is a distribution's constraint of values: d.support:check(x)",
  constraint_registry = "d.support is a distribution's constraint of values: d.support:check(x)",
  transforms = "use LogNormal, or subtract the logarithm of the derivative from the base's log_prob",
  biject_to = "apply a function such as F.softplus or x:exp() to what a layer computes",
  transform_to = "apply a function such as F.softplus or x:exp() to what a layer computes",
  kl = "use distributions.kl_divergence(p, q)",
}, fsdp = {
  ShardingStrategy = "a strategy is a string: fsdp.FSDP(model, { sharding_strategy = 'full_shard' })",
  BackwardPrefetch = "it is a string: fsdp.FSDP(model, { backward_prefetch = 'pre' })",
  no_sync = "write model:no_sync(fn) of an fsdp.FSDP instance, model:set_requires_gradient_sync(false) after fully_shard",
  get_model_state_dict = "use fsdp.state_dict(model)", set_model_state_dict = "use fsdp.load_state_dict(model, state)",
  get_optimizer_state_dict = "use fsdp.optim_state_dict(model, optimizer)",
  set_optimizer_state_dict = "use fsdp.load_optim_state_dict(model, optimizer, state)",
  unshard = "write model:unshard() after fully_shard", reshard = "write model:reshard() after fully_shard",
}, ["nn.utils"] = {
  parametrizations = "use nn.utils.spectral_norm(layer) or nn.utils.weight_norm(layer)",
} }

for _, name in ipairs { "StateDictType", "state_dict_type", "set_state_dict_type", "FullStateDictConfig",
  "ShardedStateDictConfig", "LocalStateDictConfig" } do
  within.fsdp[name] = "use fsdp.state_dict(model, { type = 'full', offload_to_cpu = true, rank0_only = true })"
end

for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
  "bool" } do
  instead[dtype] = ("dtypes are strings: '%s'"):format(dtype)
end
for _, name in ipairs { "long", "int", "short", "double", "float", "half" } do
  instead[name] = ("dtypes are strings: '%s'; x:%s() converts a tensor"):format(synonyms[name], name)
end

-- Maps fields of PyTorch's tensors that Moonshard's lack to what a script must write instead.
local fields = {
  data = "write t:copy_(values), t:clamp_(...) and the like inside of ms.no_grad(function() ... end) to change elements, t:detach() to read them",
  grad_fn = "write t.requires_grad, which is true if a gradient flows through t",
  is_cuda = "write t.device ~= 'cpu'",
  is_cpu = "write t.device == 'cpu'",
  is_meta = "write t.device == 'meta'",
  nbytes = "write t:numel() * t:element_size()",
  itemsize = "write t:element_size()",
  retains_grad = "call t:retain_grad(), then read t.grad after backward",
  H = "write t.T: there are no complex numbers",
  mH = "write t.mT: there are no complex numbers",
}

-- Maps fields of PyTorch's results to what a script must write instead: Moonshard's functions return several values. A
-- script may have fields of its own by these names, so only reading one that is not set is an error.
local results = {}
for names, call in pairs {
  ["values indices"] = "values, indices = t:max(2)",
  ["eigenvalues eigenvectors"] = "eigenvalues, eigenvectors = ms.linalg.eigh(t)",
  ["U S Vh"] = "U, S, Vh = ms.linalg.svd(t)", ["Q R"] = "Q, R = ms.linalg.qr(t)",
  ["logabsdet"] = "sign, logabsdet = ms.linalg.slogdet(t)",
  ["solution residuals"] = "solution, residuals, rank = ms.linalg.lstsq(a, b)",
} do
  for name in names:gmatch "%a+" do
    results[name] = "a function of several results returns them beside each other: " .. call
  end
end
results.real = "there are no complex numbers; ms.fft has pairs in a last dimension: t:select(-1, 1) are the real parts"
results.imag = "there are no complex numbers; ms.fft has pairs in a last dimension: t:select(-1, 2) are the imaginary parts"

-- Maps methods of PyTorch's and other libraries' modules to what a script must write instead.
local methods = {
  copy = "write ms.deepcopy(model)", clone = "write ms.deepcopy(model)", deepcopy = "write ms.deepcopy(model)",
  save = "write ms.save(path, model:state_dict())", load = "write model:load_state_dict(ms.load(path))",
  print_trainable_parameters = "print(lora) shows their number",
}

-- Tables to search for a name, as scripts write them. They are looked up when an error occurs, because this module is
-- loaded before all of them.
local places = { "ms", "ms.nn", "ms.nn.F", "ms.nn.init", "ms.nn.utils", "ms.optim", "ms.optim.lr_scheduler", "ms.dist",
  "ms.fsdp", "ms.amp", "ms.linalg", "ms.fft", "ms.distributions", "ms.data", "ms.data.transforms", "ms.nn.utils.rnn",
  "ms.nn.utils.parametrize", "ms.nn.utils.prune", "ms.metrics" }

--- The name in `names` that corresponds to another library's `name`; nil if there is none.
---@param name any  the unknown name
---@param names string[]  the known names
---@return string?
function M.synonym(name, names)
  local ours = synonyms[name]
  for _, known in ipairs(ours and names or {}) do
    if known == ours then return ours end
  end
end

--- What to write instead of an unknown option of PyTorch's; nil if nothing is known.
---@param name any  the unknown option
---@return string?
function M.option(name) return options[name] end

--- Whether PyTorch has an argument of this name that Moonshard's functions take by position.
---@param name any  a key of a table that a script gave
---@return boolean
function M.is_positional(name) return positional[name] == true end

--- What to write instead of a field that PyTorch's tensors have; nil if nothing is known.
---@param name string  the unknown field
---@return string?
function M.field(name) return fields[name] end

--- What to write instead of a method that a class lacks; nil if nothing is known.
---@param name string  the unknown method
---@return string?
function M.method(name) return methods[name] end

--- What to write instead of a field of a PyTorch result, such as .values of max; nil if nothing is known.
---@param name string  the unknown field
---@return string?
function M.result(name) return results[name] end

--- Text for the end of an error message about an unknown name: what to write instead, or the tables in which the name
--- exists. nil if there is neither.
---@param name string  the unknown name
---@param where? string  the table in which the name is unknown, such as "nn"
---@return string?
function M.elsewhere(name, where)
  if within[where] and within[where][name] then return within[where][name] end
  if instead[name] then return instead[name] end
  local ms = package.loaded.moonshard
  if not ms then return nil end
  local found = {}
  if rawget(ms.Tensor.methods, name) then found[1] = ("x:%s()"):format(name) end
  for _, path in ipairs(places) do
    local place = ms
    for field in path:gmatch "%.([%w_]+)" do place = place[field] end
    if rawget(place, name) ~= nil then found[#found + 1] = path:gsub("^ms%.", "") .. "." .. name end
  end
  return found[1] and "did you mean " .. table.concat(found, " or ") .. "?"
end

return M
