-- SPDX-License-Identifier: MIT
---@meta
-- luacheck: ignore (declarations for editors)
--- Annotations of what the engine's tables define. Written by scripts/docs; never loaded.

---@class Tensor
local Tensor = {}

---@class moonshard.nn
local nn = { F = {} }

--- -t, element by element.
---@return Tensor
function Tensor:neg() end

--- In-place version of neg.
---@return Tensor self
function Tensor:neg_() end

--- |t|, element by element.
---@return Tensor
function Tensor:abs() end

--- In-place version of abs.
---@return Tensor self
function Tensor:abs_() end

--- e^t, element by element.
---@return Tensor
function Tensor:exp() end

--- In-place version of exp.
---@return Tensor self
function Tensor:exp_() end

--- Natural logarithm, element by element.
---@return Tensor
function Tensor:log() end

--- In-place version of log.
---@return Tensor self
function Tensor:log_() end

--- Square root, element by element.
---@return Tensor
function Tensor:sqrt() end

--- In-place version of sqrt.
---@return Tensor self
function Tensor:sqrt_() end

--- 1 / square root, element by element.
---@return Tensor
function Tensor:rsqrt() end

--- In-place version of rsqrt.
---@return Tensor self
function Tensor:rsqrt_() end

--- Sine, element by element.
---@return Tensor
function Tensor:sin() end

--- In-place version of sin.
---@return Tensor self
function Tensor:sin_() end

--- Cosine, element by element.
---@return Tensor
function Tensor:cos() end

--- In-place version of cos.
---@return Tensor self
function Tensor:cos_() end

--- max(t, 0), element by element.
---@return Tensor
function Tensor:relu() end

--- In-place version of relu.
---@return Tensor self
function Tensor:relu_() end

--- max(t, 0), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.relu(t) end

--- t * sigmoid(t), element by element.
---@return Tensor
function Tensor:silu() end

--- In-place version of silu.
---@return Tensor self
function Tensor:silu_() end

--- t * sigmoid(t), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.silu(t) end

--- Hyperbolic tangent, element by element.
---@return Tensor
function Tensor:tanh() end

--- In-place version of tanh.
---@return Tensor self
function Tensor:tanh_() end

--- Hyperbolic tangent, element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.tanh(t) end

--- 1 / (1 + e^-t), element by element.
---@return Tensor
function Tensor:sigmoid() end

--- In-place version of sigmoid.
---@return Tensor self
function Tensor:sigmoid_() end

--- 1 / (1 + e^-t), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.sigmoid(t) end

--- The sign of each element: -1, 0 or 1.
---@return Tensor
function Tensor:sign() end

--- In-place version of sign.
---@return Tensor self
function Tensor:sign_() end

--- 1 / t, element by element.
---@return Tensor
function Tensor:reciprocal() end

--- In-place version of reciprocal.
---@return Tensor self
function Tensor:reciprocal_() end

--- Whether each element is neither infinite nor nan: a bool tensor.
---@return Tensor
function Tensor:isfinite() end

--- Whether each element is nan: a bool tensor.
---@return Tensor
function Tensor:isnan() end

--- Whether each element is 0 or false: a bool tensor.
---@return Tensor
function Tensor:logical_not() end

--- t * u, element by element; u broadcasts.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:mul(u) end

--- t / u, element by element; u broadcasts.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:div(u) end

--- t ^ u, element by element; u broadcasts.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:pow(u) end

--- The larger of both, element by element.
---@param u Tensor  broadcasts with t
---@return Tensor
function Tensor:maximum(u) end

--- The smaller of both, element by element.
---@param u Tensor  broadcasts with t
---@return Tensor
function Tensor:minimum(u) end

--- t * u in place.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:mul_(u) end

--- t / u in place.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:div_(u) end

--- t == u, element by element: a bool tensor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:eq(u) end

--- t ~= u, element by element: a bool tensor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:ne(u) end

--- t < u, element by element: a bool tensor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:lt(u) end

--- t <= u, element by element: a bool tensor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:le(u) end

--- t > u, element by element: a bool tensor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:gt(u) end

--- t >= u, element by element: a bool tensor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:ge(u) end

--- Whether both elements are true (not 0): a bool tensor.
---@param u Tensor  broadcasts with t
---@return Tensor
function Tensor:logical_and(u) end

--- Whether at least one of the two elements is true (not 0): a bool tensor.
---@param u Tensor  broadcasts with t
---@return Tensor
function Tensor:logical_or(u) end

--- Stochastic gradient descent with momentum (Sutskever et al. 2013, in PyTorch's form): v = momentum v + (1 -
--- dampening) g; p = p - lr v, or with nesterov p - lr (g + momentum v). weight_decay adds weight_decay p to g. Errors:
--- nesterov without momentum or with dampening.
---@class SGD: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, momentum: number, dampening: number, nesterov: boolean, weight_decay: number }): SGD
---   lr: learning rate; momentum: share of the last step that is kept; dampening: share of the gradient that is left
---   out of the momentum; nesterov: looks ahead by one step of momentum; weight_decay: this times p is added to the
---   gradient
local SGD = {}

--- Adam (Kingma & Ba 2015, algorithm 1); amsgrad keeps the largest second moment (Reddi et al. 2018). weight_decay adds
--- weight_decay p to the gradient.
---@class Adam: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, betas: number[], eps: number, weight_decay: number, amsgrad: boolean }): Adam
---   lr: learning rate; betas: decay of the first and second moment, from 0 to below 1; eps: added to the root of the
---   second moment; weight_decay: this times p is added to the gradient; amsgrad: divides by the largest second moment
---   so far
local Adam = {}

--- Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2): lr weight_decay p is subtracted from p,
--- too.
---@class AdamW: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, betas: number[], eps: number, weight_decay: number, amsgrad: boolean }): AdamW
---   lr: learning rate; betas: decay of the first and second moment, from 0 to below 1; eps: added to the root of the
---   second moment; weight_decay: lr times this times p is subtracted from p; amsgrad: divides by the largest second
---   moment so far
local AdamW = {}
