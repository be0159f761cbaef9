-- SPDX-License-Identifier: MIT
--- The contents of the pages of the reference. A section describes public names of one table or class of the loaded
--- library: the names in a list, in its order, or all names that no earlier section has listed.
local ms = require "moonshard"
for _, name in ipairs { "save", "load", "amp", "data", "profiler", "run", "plot", "metrics", "testing", "doctor",
  "memory_report", "record_memory_history", "lr_range_test", "cuda", "distributions", "text", "hf" } do assert(ms[name]) end   -- loads each

local nn, dist, fsdp, optim = ms.nn, ms.dist, ms.fsdp, ms.optim
local engine = require "moonshard.core.ffi"
local is_class = require("moonshard.core.class").is_class

local methods, lib, ffi = ms.Tensor.methods, engine.lib, engine.ffi
local made = require "moonshard.tensor.rows".made

-- Names of the tensor methods that the operator table defines. functions: true for those that are differentiable
-- functions of one tensor, with their in-place versions; false for all others.
local function listed(functions)
  local names = {}
  for op = 0, lib.ms_op_count() - 1 do
    local row = lib.ms_op_at(op)
    local name, flags = ffi.string(row.name), row.flags
    local is_function = row.inputs == 1 and bit.band(flags, ffi.C.MS_OP_DIFFERENTIABLE) ~= 0
    if bit.band(flags, ffi.C.MS_OP_METHOD) ~= 0 and is_function == functions and not made[name] then
      names[#names + 1] = name
      if is_function then names[#names + 1] = name .. "_" end
    end
  end
  return table.concat(names, " ") .. " "
end

-- A section: title, prefix of its names, the table that contains them, and a list of them (default: all remaining
-- ones, without the keys of `without`).
local function section(title, prefix, of, names, without)
  return { title = title, prefix = prefix, of = of, names = names, without = without or {} }
end

-- A section without names, for a class whose methods are all described at its base class.
local function unlisted(class) return section("", "", class, "") end

-- Adds a section for each class of a table that is described by none of these.
local function with_classes(of, sections)
  local owned = {}
  for _, one in ipairs(sections) do owned[one.of] = not one.prefix:find "%.$" end
  for name, class in ms.sorted_pairs(of) do
    if is_class(class) and not owned[class] then sections[#sections + 1] = section("Methods of " .. name, name .. ":", class) end
  end
  return sections
end

-- The methods of an object's class.
local function methods_of(object)
  local class = getmetatable(object)
  return type(class.__index) == "table" and class.__index or class
end

local sparse = ms.sparse_coo(ms.zeros(1, 1, { dtype = "int64" }), ms.ones(1), { 1 })
local sharded = fsdp.fully_shard(nn.Linear(1, 1)).weight
local hooked = ms.ones(1, { requires_grad = true })
local work = dist.all_reduce(ms.ones(1), { async = true })
work:wait()
local context
ms.Function { forward = function(ctx, x)
  context = methods_of(ctx)
  return x * 1
end, backward = function(_, g) return g end }(hooked)

local captured = methods_of(ms.capture(function() end))

-- Makes a corpus of one short file, because only objects lead to the classes of corpora and of their batches.
local path = os.tmpname()
do
  local file = assert(io.open(path, "w"))
  file:write(("to be or not to be "):rep(20))
  file:close()
end
local corpus = ms.data.corpus(path)
local batches = ms.data.batches(corpus, { context = 4, batch = 1 })
os.remove(path)

local causal_model = ms.hf.create({ model_type = "gpt2", vocab_size = 2, n_embd = 2, n_layer = 1, n_head = 1 })
local tokenizer = ms.text.train_bpe("", { vocab_size = 256 })
local text_rows = ms.text.pack({ { ids = { 1, 2 }, learned = { true, true } } }, { length = 2 })
local profile = ms.profiler.start()
profile:stop()
local steps_class
ms.profiler.profile({ schedule = function() return "none" end }, function(p) steps_class = methods_of(p) end)
local folder = os.tmpname() .. ".run"
local run = ms.run.start { out = folder, quiet = true }
run:finish()
for _, name in ipairs { "/config.json", "/metrics.jsonl", "", "" } do os.remove((folder .. name)) end
os.remove((folder:gsub("%.run$", "")))
local mesh, own_mesh = dist.init_device_mesh("cpu", { dist.world_size() }), {}
for _, name in ipairs { "size", "rank", "get_group" } do own_mesh[name] = mesh[name] end

-- Functions of ms that are also methods of tensors; only the methods have entries.
local free, free_names = require "moonshard.tensor.free", {}
for name in ms.sorted_pairs(free) do free_names[#free_names + 1] = "`" .. name .. "`" end

local own_sparse, own_sharded, fields = {}, {}, {}
for _, field in ipairs(require "moonshard.tools.annotations".declared_class "Tensor".fields) do
  fields[field.name] = field.type
end
for _, name in ipairs { "indices", "values", "coalesce", "is_coalesced", "to_dense" } do
  own_sparse[name] = sparse[name]
end
for _, name in ipairs { "to_local", "full_tensor" } do own_sharded[name] = sharded[name] end

return {
  {
    file = "ms", title = "ms", intro = "The library itself: `local ms = require \"moonshard\"`. "
      .. "These [methods of tensors](tensor.md) are functions of `ms`, too, with the tensor as first argument: "
      .. table.concat(free_names, " ") .. ".",
    sections = {
      section("Making tensors", "ms.", ms, [[tensor empty zeros ones full rand randn normal randint arange linspace
        logspace eye empty_like zeros_like ones_like full_like rand_like randn_like from_pointer sparse_coo cat stack
        hstack vstack dstack block_diag tril_indices triu_indices meshgrid broadcast_tensors atleast_1d atleast_2d
        atleast_3d einsum where deepcopy]]),
      section("Dtypes and devices", "ms.", ms, [[default_dtype set_default_dtype default_device set_default_device
        with_device device finfo iinfo can_cast result_type promote_types]]),
      section("CUDA", "ms.cuda.", ms.cuda, nil, { amp = true, nvtx = true }),
      section("", "CudaEvent:", ms.cuda.Event),
      section("", "CudaStream:", ms.cuda.Stream),
      section("", "CUDAGraph:", ms.cuda.CUDAGraph),
      section("", "ms.cuda.nvtx.", ms.cuda.nvtx),
      section("Autograd", "ms.", ms, [[grad no_grad inference_mode enable_grad is_grad_enabled set_grad_enabled checkpoint
        Function detect_anomaly set_detect_anomaly]]),
      section("Context of a Function", "Context:", context),
      section("Captured steps", "ms.", ms, "capture"),
      section("", "CapturedStep:", captured),
      section("Scopes", "ms.", ms, "scope steps keep"),
      section("Random numbers", "ms.", ms, "randperm manual_seed seed initial_seed get_rng_state set_rng_state"),
      section("Files", "ms.", ms, "save load"),
      section("Memory, threads, time", "ms.", ms, [[memory_stats reset_peak_memory_stats empty_cache
        record_memory_history memory_report lr_range_test num_threads get_num_threads set_num_threads
        use_deterministic_algorithms time doctor]]),
      section("Warnings and tables", "ms.", ms, "warn log catch_warnings sorted_pairs is_tensor"),
      section("More", "ms.", ms, nil, free),
    },
  },
  {
    file = "tensor", title = "Tensor methods",
    intro = "Dimensions and positions count from 1, and from the end with negative numbers; ids inside tensors "
      .. "count from 0. "
      .. "A method whose name ends in `_` changes its tensor and returns it; every other one returns a new tensor or a view.",
    sections = {
      section("Fields", "Tensor.", fields),
      section("Arithmetic", "Tensor:", methods, "add add_ sub sub_ mul mul_ div div_ pow pow_ matmul mm bmm"),
      section("Functions of each element", "Tensor:", methods, listed(true) .. "gelu clamp clamp_"),
      section("Comparison and choice", "Tensor:", methods,
        listed(false) .. "where masked_fill masked_fill_ equal allclose"),
      section("Reductions", "Tensor:", methods, [[sum mean prod var std max min argmax argmin all any norm softmax
        log_softmax logsumexp cumsum cumsum_ cumprod cumprod_ cummax cummin logcumsumexp]]),
      section("Shape", "Tensor:", methods, [[size dim numel nelement stride is_contiguous reshape view view_as flatten
        squeeze unsqueeze transpose t permute expand expand_as tile repeat narrow select split chunk
        unfold as_strided unbind tril triu]]),
      section("Products and distances", "Tensor:", methods, "outer dot mv addmm baddbmm kron tensordot cdist dist renorm renorm_ cross"),
      section("Linear algebra", "Tensor:", methods, [[inverse det slogdet logdet svd qr cholesky cholesky_solve
        cholesky_inverse pinverse matrix_power matrix_exp]]),
      section("Counts and differences", "Tensor:", methods, [[amax amin aminmax nansum nanmean count_nonzero diff histc
        bincount]]),
      section("Rearrangement", "Tensor:", methods, [[flip roll rot90 movedim moveaxis swapaxes swapdims broadcast_to unflatten
        reshape_as type_as tensor_split diagonal diag diag_embed fill_diagonal_ trace repeat_interleave
        take_along_dim]]),
      section("Order", "Tensor:", methods, [[sort argsort msort topk kthvalue median nanmedian quantile nanquantile mode
        unique unique_consecutive searchsorted bucketize]]),
      section("By index", "Tensor:", methods, [[index_select index_add index_add_ index_copy index_copy_ index_fill
        index_fill_ index_put index_put_ gather scatter scatter_ scatter_add scatter_add_ scatter_reduce
        scatter_reduce_ take put put_ nonzero argwhere masked_select masked_scatter masked_scatter_]]),
      section("Filling and copying", "Tensor:", methods, "fill_ zero_ copy_ clone contiguous to_dense to_sparse"),
      section("Random numbers", "Tensor:", methods, "uniform_ normal_ random_ exponential_ bernoulli bernoulli_ multinomial"),
      section("Dtype and device", "Tensor:", methods, [[to float double half bfloat16 long int short char byte bool type cpu cuda
        get_device element_size is_floating_point]]),
      section("Autograd", "Tensor:", methods, [[backward requires_grad_ retain_grad detach register_hook
        register_post_accumulate_grad_hook]]),
      section("Values and lifetime", "Tensor:", methods, "item tolist data_ptr keep release is_released"),
      section("Classes", "Tensor:", methods),
      section("Tensor classes", "Tensor:", ms.Tensor, "extend"),
      section("Sparse tensors", "SparseTensor:", own_sparse),
      section("Parameters of fully_shard", "ShardedParameter:", own_sharded),
      section("Handles of hooks", "Handle:", methods_of(hooked:register_hook(function() end))),
    },
  },
  {
    file = "linalg", title = "linalg", intro = "Linear algebra of matrices, or of the matrices of a batch: the last two "
      .. "dimensions. Matrices are float32 or float64. LAPACK computes, on the CPU and on one thread; it is loaded at "
      .. "the first use: Debian's `libopenblas0-pthread` (faster) or `liblapack3`, or the library that "
      .. "`MOONSHARD_LAPACK` names. Tensors on a GPU are copied to the CPU, and the results back. PyTorch's `eig` and "
      .. "`eigvals` are not there, because their results are complex; nor are `inv_ex`, `cholesky_ex` and others, "
      .. "because an error can be caught, and `lu`, `ldl` and `householder_product`, which the functions here contain.",
    sections = {
      section("Systems and inverses", "linalg.", ms.linalg, "inv solve solve_triangular lstsq pinv det slogdet"),
      section("Factorizations", "linalg.", ms.linalg, "cholesky qr svd svdvals eigh eigvalsh"),
      section("Norms", "linalg.", ms.linalg, "norm vector_norm matrix_norm cond matrix_rank"),
      section("Products", "linalg.", ms.linalg, "matrix_power matrix_exp multi_dot matmul vecdot cross"),
      section("LAPACK", "linalg.", ms.linalg, "is_available why_unavailable"),
    },
  },
  {
    file = "fft", title = "fft", intro = "Fourier transforms of any length, on the CPU and on GPUs, of float32 and "
      .. "float64. There is no complex dtype: a complex number is a pair, its real and its imaginary part, in a last "
      .. "dimension of size 2, as PyTorch's `torch.view_as_real` gives it. Options that name dimensions do not count "
      .. "that one: -1 is the one before the pairs. `fft`, `ifft` and others take pairs, real numbers only after "
      .. "`ms.fft.complex(x)`; `rfft` and `ihfft` take real numbers. A gradient is a pair, too: that of the real part "
      .. "and that of the imaginary part.",
    sections = {
      section("One dimension", "fft.", ms.fft, "fft ifft rfft irfft hfft ihfft"),
      section("Several dimensions", "fft.", ms.fft, "fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn"),
      section("Frequencies", "fft.", ms.fft, "fftfreq rfftfreq fftshift ifftshift"),
      section("Complex numbers", "fft.", ms.fft, "complex real imag abs angle conj mul"),
    },
  },
  {
    file = "nn", title = "nn",
    intro = "Modules, layers and wrappers. Arguments, initialisation, formulas and names of parameters are PyTorch's; "
      .. "sizes are positional arguments, all others options.",
    sections = with_classes(nn, {
      section("Modules", "nn.", nn, "Module Parameter"),
      section("Methods of Module", "Module:", nn.Module),
      section("Methods of every class", "Module:", require "moonshard.core.class".root, "isa class_name"),
      section("Containers", "nn.", nn, "Sequential ModuleList ModuleDict ParameterList ParameterDict"),
      section("Methods of Sequential", "Sequential:", nn.Sequential),
      section("Methods of ModuleList", "ModuleList:", nn.ModuleList),
      section("Methods of ParameterList", "ParameterList:", nn.ParameterList),
      section("Methods of ParameterDict", "ParameterDict:", nn.ParameterDict),
      section("Layers", "nn.", nn, [[Linear Embedding Conv2d LayerNorm RMSNorm BatchNorm1d BatchNorm2d Dropout Identity
        ReLU GELU SiLU Tanh Sigmoid MultiheadAttention TransformerEncoderLayer TransformerDecoderLayer
        TransformerEncoder TransformerDecoder Transformer CrossEntropyLoss MSELoss]]),
      section("More of nn", "nn.", nn),
      section("Functions of classes", "nn.Embedding.", nn.Embedding, "from_pretrained"),
      section("", "nn.EmbeddingBag.", nn.EmbeddingBag, "from_pretrained"),
      section("", "nn.SyncBatchNorm.", nn.SyncBatchNorm, "convert_sync_batchnorm"),
      section("", "nn.Int8Linear.", nn.Int8Linear, "from_linear convert_linear"),
      section("Methods of LoRA", "LoRA:", methods_of(nn.lora(nn.Sequential(nn.Linear(1, 1)), { target = "1" }))),
      section("nn.utils", "nn.utils.", nn.utils),
      section("", "nn.utils.parametrize.", nn.utils.parametrize),
      section("", "nn.utils.prune.", nn.utils.prune),
      section("", "nn.utils.stateless.", nn.utils.stateless),
      section("", "nn.utils.rnn.", nn.utils.rnn),
      section("Methods of PackedSequence", "PackedSequence:", nn.utils.rnn.PackedSequence),
    }),
  },
  {
    file = "functional", title = "nn.F", intro = "Functions of layers, without parameters of their own.",
    sections = { section("Functions", "nn.F.", nn.F) },
  },
  {
    file = "init", title = "nn.init",
    intro = "Functions that fill a tensor in place and return it; no graph is recorded. A shard gets the numbers "
      .. "of its part of the whole parameter.",
    sections = { section("Functions", "nn.init.", nn.init) },
  },
  {
    file = "ddp_hooks", title = "nn.ddp_hooks",
    intro = "Communication hooks of `nn.DDP`, for `ddp:register_comm_hook(state, hook)`, and their states.",
    sections = { section("Hooks", "nn.ddp_hooks.", nn.ddp_hooks) },
  },
  {
    file = "optim", title = "optim", intro = "Optimizers: most are one fused pass over all parameters of a group.",
    sections = {
      section("Optimizers", "optim.", optim),
      section("Methods of Optimizer", "Optimizer:", optim.Optimizer),
      section("Methods of LBFGS", "LBFGS:", optim.LBFGS, "step"),
      section("Averages", "optim.swa_utils.", optim.swa_utils),
      section("Methods of EMA", "EMA:", optim.EMA),
      section("Methods of AveragedModel", "AveragedModel:", optim.swa_utils.AveragedModel),
      section("Methods of ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer:", optim.ZeroRedundancyOptimizer),
      section("Schedules", "optim.lr_scheduler.", optim.lr_scheduler),
      section("Methods of schedules", "Schedule:",
        methods_of(optim.lr_scheduler.constant(optim.SGD({ hooked }, { lr = 1 })))),
    },
  },
  {
    file = "amp", title = "amp", intro = "Mixed precision.",
    sections = {
      section("Functions and classes", "amp.", ms.amp),
      section("Methods of GradScaler", "GradScaler:", ms.amp.GradScaler),
    },
  },
  {
    file = "data", title = "data",
    intro = "Datasets, samplers and loaders, and token files and batches for language models: sharded by rank, seeded and "
      .. "resumable. Positions in datasets count from 1, epochs from 0.",
    sections = {
      section("Datasets", "data.", ms.data, [[Dataset TensorDataset IterableDataset ConcatDataset Subset random_split]]),
      section("Methods of Dataset", "Dataset:", ms.data.Dataset),
      section("Methods of IterableDataset", "IterableDataset:", ms.data.IterableDataset),
      section("Methods of TensorDataset", "TensorDataset:", ms.data.TensorDataset, "batch"),
      unlisted(ms.data.ConcatDataset), unlisted(ms.data.Subset),
      section("Loaders", "data.", ms.data, "DataLoader default_collate"),
      section("Methods of DataLoader", "DataLoader:", ms.data.DataLoader),
      section("Samplers", "data.", ms.data, [[SequentialSampler RandomSampler WeightedRandomSampler DistributedSampler
        BatchSampler BucketBatchSampler Sampler]]),
      section("Methods of Sampler", "Sampler:", ms.data.Sampler),
      section("Methods of DistributedSampler", "DistributedSampler:", ms.data.DistributedSampler, "set_epoch"),
      unlisted(ms.data.SequentialSampler), unlisted(ms.data.RandomSampler), unlisted(ms.data.WeightedRandomSampler),
      unlisted(ms.data.BatchSampler), unlisted(ms.data.BucketBatchSampler),
      section("Files", "data.", ms.data, [[read_image write_png make_grid read_npy write_npy read_npz read_idx read_csv
        read_json_lines read_lines read_wav]]),
      section("data.transforms", "data.transforms.", ms.data.transforms),
      section("Token files", "data.", ms.data),
      section("Methods of Corpus", "Corpus:", methods_of(corpus)),
      section("Methods of Batches", "Batches:", methods_of(batches)),
    },
  },
  {
    file = "text", title = "text", intro = "Tokenizers of pretrained models, and byte-level BPE of your own.",
    sections = {
      section("Functions", "text.", ms.text),
      section("Methods of TextTokenizer", "TextTokenizer:", methods_of(tokenizer)),
      section("Methods of TextStream", "TextStream:", methods_of(tokenizer:stream())),
      section("Methods of TextChat", "TextChat:", methods_of(ms.text.chat(causal_model, tokenizer, { chat = "llama2", eos_token_id = 0 }))),
      section("Methods of TextRows", "TextRows:", methods_of(text_rows), "step each"),
    },
  },
  {
    file = "hf", title = "hf", intro = "Models of Hugging Face's folders, in and out.",
    sections = {
      section("Functions", "hf.", ms.hf),
      section("Methods of HFCausalLM", "HFCausalLM:", methods_of(causal_model), "forward generate stream"),
      section("Methods of HFSeq2Seq", "HFSeq2Seq:", require "moonshard.hf.seq2seq", "generate"),
    },
  },
  {
    file = "dist", title = "dist",
    intro = "Ranks, groups and collectives. Every rank of a group makes the same calls in the same order; sizes, dtypes and "
      .. "devices are compared before anything is sent. Ranks in arguments are ranks of the world, from 0.",
    sections = {
      section("The job", "dist.", dist, [[init is_initialized finalize rank world_size local_rank backend barrier
        debug_level set_debug_level record]]),
      section("Collectives", "dist.", dist, [[all_reduce all_gather reduce_scatter broadcast reduce gather scatter
        all_to_all send recv all_gather_object broadcast_object]]),
      section("Groups and meshes", "dist.", dist, [[default_group self_group new_group free_group group_ranks is_group
        init_device_mesh mesh_from_group is_mesh]]),
      section("More", "dist.", dist),
      section("Methods of Work", "Work:", methods_of(work)),
      section("Methods of Coalescing", "Coalescing:", methods_of(dist.coalescing_manager(function(c) return c end))),
      section("Methods of DeviceMesh", "DeviceMesh:", own_mesh),
    },
  },
  {
    file = "fsdp", title = "fsdp",
    intro = "Sharded data parallelism: `fsdp.fully_shard` shards parameter by parameter, `fsdp.FSDP` by units of flat "
      .. "parameters.",
    sections = {
      section("Wrapping", "fsdp.", fsdp, [[fully_shard FSDP FSDPModule MixedPrecisionPolicy CPUOffloadPolicy Shard Replicate
        register_fsdp_forward_method MixedPrecision CPUOffload fsdp_modules summon_full_params]]),
      section("Methods of FSDP", "FSDP:", fsdp.FSDP),
      section("Methods of FSDPModule", "FSDPModule:", fsdp.FSDPModule),
      section("Methods of UnshardHandle", "UnshardHandle:", fsdp.UnshardHandle),
      section("State and checkpoints", "fsdp.", fsdp, [[state_dict load_state_dict optim_state_dict load_optim_state_dict
        save load catch_checkpoint_signals checkpoint_wanted]]),
      section("Observation", "fsdp.", fsdp),
      section("fsdp.wrap", "fsdp.wrap.", fsdp.wrap),
      section("fsdp.comm_hooks", "fsdp.comm_hooks.", fsdp.comm_hooks),
    },
  },
  {
    file = "profiler", title = "profiler", intro = "Where the time of a training step goes.",
    sections = {
      section("Functions", "profiler.", ms.profiler),
      section("Methods of Profile", "Profile:", methods_of(profile)),
      section("Methods of ProfileSteps", "ProfileSteps:", steps_class),
      section("Methods of ProfileAverages", "ProfileAverages:", methods_of(profile:key_averages())),
    },
  },
  {
    file = "run",
    title = "run",
    intro = "The record of a training run in a folder: metrics, images, texts, checkpoints, and progress. Every rank makes "
      .. "the same calls; rank 0 writes.",
    sections = { section("Functions", "run.", ms.run), section("Methods of Run", "Run:", methods_of(run)) },
  },
  {
    file = "plot", title = "plot", intro = "Plots of numbers, as SVG and as text for the terminal.",
    sections = {
      section("Functions", "plot.", ms.plot),
      section("Methods of Plot", "Plot:", methods_of(ms.plot.line { 1 })),
    },
  },
  {
    file = "metrics", title = "metrics", intro = "Metrics of evaluations over ranks, and early stopping.",
    sections = {
      section("Metrics", "metrics.", ms.metrics),
      section("Methods of a metric", "Metric:", methods_of(ms.metrics.Mean())),
      section("Methods of EarlyStopping", "EarlyStopping:", methods_of(ms.metrics.EarlyStopping())),
    },
  },
  {
    file = "distributions", title = "distributions",
    intro = "Random variables: their samples, densities, moments, entropies and divergences. Parameters are numbers or "
      .. "tensors, by position; they broadcast to `batch_shape`. Class ids count from 0.",
    sections = {
      section("Distributions", "distributions.", ms.distributions, [[Normal LogNormal HalfNormal MultivariateNormal
        Uniform Beta Dirichlet Exponential Gamma Chi2 Laplace Cauchy Gumbel StudentT Bernoulli Geometric Poisson
        Categorical OneHotCategorical Independent MixtureSameFamily]]),
      section("Divergences", "distributions.", ms.distributions, "kl_divergence register_kl"),
      section("Distributions of your own", "distributions.", ms.distributions, "Distribution"),
      section("Methods of all distributions", "Distribution:", ms.distributions.Distribution),
      section("The support of a distribution", "Constraint:", methods_of(ms.distributions.Normal(0, 1).support)),
    },
  },
  {
    file = "testing", title = "testing", intro = "Assertions for tests.",
    sections = { section("Functions", "testing.", ms.testing) },
  },
}
