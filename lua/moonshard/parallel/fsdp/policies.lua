-- SPDX-License-Identifier: MIT
--- Value types of the sharding interface: policies and placements. They are printed with their contents; placements
--- with equal contents are equal.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local precision = require "moonshard.parallel.precision"

local M = { MixedPrecision = precision.MixedPrecision, is_precision = precision.is_precision }

---@class MixedPrecisionPolicy
---@field param_dtype string?   dtype of gathered parameters and of computation
---@field reduce_dtype string?  dtype of gradient reductions
---@field output_dtype string?  dtype of the module's floating point outputs
---@field cast_forward_inputs boolean  casts floating point inputs to param_dtype
local Policy = { __name = "MixedPrecisionPolicy" }
Policy.__index = Policy

--- Sets the dtypes of a unit's parameters, reductions and outputs. A dtype that is not given does
--- not change; without reduce_dtype, gradients are reduced in param_dtype.
---@param given? {param_dtype: string, reduce_dtype: string, output_dtype: string, cast_forward_inputs: boolean}
---   param_dtype: dtype of gathered parameters and of computation; reduce_dtype: dtype of gradient reductions (default:
---   param_dtype); output_dtype: dtype of the module's floating point outputs; cast_forward_inputs: casts floating
---   point inputs to param_dtype
---@return MixedPrecisionPolicy
function M.MixedPrecisionPolicy(given)
  local o = opts("MixedPrecisionPolicy", given,
    { param_dtype = opts.string, reduce_dtype = opts.string, output_dtype = opts.string, cast_forward_inputs = true })
  for _, name in ipairs { "param_dtype", "reduce_dtype", "output_dtype" } do
    precision.floating(o[name], name, "MixedPrecisionPolicy")
  end
  return setmetatable(o, Policy)
end

function Policy.__tostring(p)
  return ("MixedPrecisionPolicy(param_dtype = %s, reduce_dtype = %s, output_dtype = %s, cast_forward_inputs = %s)"):format(
    tostring(p.param_dtype), tostring(p.reduce_dtype), tostring(p.output_dtype), tostring(p.cast_forward_inputs))
end

function M.is_policy(x) return getmetatable(x) == Policy end

local ClassicOffload = { __name = "CPUOffload" }
ClassicOffload.__index = ClassicOffload

--- With offload_params, an FSDP instance keeps shards, gradients and therefore the optimizer's state on the CPU. Has no
--- effect if the CPU is the compute device.
---@param given? {offload_params: boolean}  offload_params: keeps shards on the CPU
function M.CPUOffload(given)
  return setmetatable(opts("CPUOffload", given, { offload_params = false }), ClassicOffload)
end

function ClassicOffload.__tostring(p) return ("CPUOffload(offload_params = %s)"):format(tostring(p.offload_params)) end

function M.is_classic_offload(x) return getmetatable(x) == ClassicOffload end

local Offload = { __name = "CPUOffloadPolicy" }
Offload.__index = Offload

--- Keeps a unit's shards, gradients and therefore the optimizer's state on the CPU; parameters are gathered into the
--- memory of the compute device. Has no effect if the CPU is the compute device.
---@param given? {pin_memory: boolean}  pin_memory: pins the shards and gradients of 256 KiB and more, so that a GPU
---   copies from and to them directly; false: the driver stages copies (default: true)
function M.CPUOffloadPolicy(given)
  return setmetatable(opts("CPUOffloadPolicy", given, { pin_memory = true }), Offload)
end

function Offload.__tostring(p) return ("CPUOffloadPolicy(pin_memory = %s)"):format(tostring(p.pin_memory)) end

function M.is_offload(x) return getmetatable(x) == Offload end

---@class DataParallelMeshDims
---@field shard string  the dimension over whose ranks parameters are sharded
---@field replicate string?  the dimension over whose ranks the shards are replicated
local MeshDims = { __name = "DataParallelMeshDims" }
MeshDims.__index = MeshDims

--- Names the dimensions of a mesh that fully_shard uses, if the mesh has others, too, for example for tensor or
--- pipeline parallelism.
---@param given { shard: string, replicate: string }
---   shard: the dimension over whose ranks parameters are sharded; replicate: the one over whose ranks the shards are
---   replicated (default: none)
---@return DataParallelMeshDims
function M.DataParallelMeshDims(given)
  local o = opts("DataParallelMeshDims", given or {}, { shard = opts.option(opts.string, opts.required),
    replicate = opts.string })
  return setmetatable(o, MeshDims)
end

function MeshDims.__tostring(d)
  return ("DataParallelMeshDims(shard = '%s', replicate = %s)"):format(d.shard, errors.show(d.replicate))
end

function M.is_mesh_dims(x) return getmetatable(x) == MeshDims end

---@class Placement
---@field dim integer?  the dimension of a Shard, from 1; negative from the end
local Shard, Replicate = { __name = "Shard" }, { __name = "Replicate" }
Shard.__index, Replicate.__index = Shard, Replicate

--- Placement: sharded along a dimension (from 1; negative numbers count from the end).
---@param dim integer  from 1; negative from the end
---@return Placement
function M.Shard(dim)
  opts.need(opts.whole.test(dim) and dim ~= 0, dim, "a whole number other than 0 (dimensions count from 1, negative ones from the end)", "Shard: dimension")
  return setmetatable({ dim = dim }, Shard)
end

function Shard.__tostring(s) return ("Shard(%d)"):format(s.dim) end
function Shard.__eq(a, b) return a.dim == b.dim end

--- Placement: replicated, with a copy on every rank.
---@return Placement
function M.Replicate() return setmetatable({}, Replicate) end

function Replicate.__tostring() return "Replicate()" end
function Replicate.__eq() return true end

function M.is_shard(x) return getmetatable(x) == Shard end

return M
