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

--- 2^t, element by element.
---@return Tensor
function Tensor:exp2() end

--- In-place version of exp2.
---@return Tensor self
function Tensor:exp2_() end

--- e^t - 1, element by element, accurate near 0.
---@return Tensor
function Tensor:expm1() end

--- In-place version of expm1.
---@return Tensor self
function Tensor:expm1_() end

--- Logarithm to base 2, element by element.
---@return Tensor
function Tensor:log2() end

--- In-place version of log2.
---@return Tensor self
function Tensor:log2_() end

--- Logarithm to base 10, element by element.
---@return Tensor
function Tensor:log10() end

--- In-place version of log10.
---@return Tensor self
function Tensor:log10_() end

--- log(1 + t), element by element, accurate near 0.
---@return Tensor
function Tensor:log1p() end

--- In-place version of log1p.
---@return Tensor self
function Tensor:log1p_() end

--- Error function, element by element.
---@return Tensor
function Tensor:erf() end

--- In-place version of erf.
---@return Tensor self
function Tensor:erf_() end

--- 1 - erf(t), element by element, accurate for large t.
---@return Tensor
function Tensor:erfc() end

--- In-place version of erfc.
---@return Tensor self
function Tensor:erfc_() end

--- Inverse of the error function, element by element; nan outside of [-1, 1].
---@return Tensor
function Tensor:erfinv() end

--- In-place version of erfinv.
---@return Tensor self
function Tensor:erfinv_() end

--- Tangent, element by element.
---@return Tensor
function Tensor:tan() end

--- In-place version of tan.
---@return Tensor self
function Tensor:tan_() end

--- Inverse sine, element by element; nan outside of [-1, 1].
---@return Tensor
function Tensor:asin() end

--- In-place version of asin.
---@return Tensor self
function Tensor:asin_() end

--- Inverse cosine, element by element; nan outside of [-1, 1].
---@return Tensor
function Tensor:acos() end

--- In-place version of acos.
---@return Tensor self
function Tensor:acos_() end

--- Inverse tangent, element by element.
---@return Tensor
function Tensor:atan() end

--- In-place version of atan.
---@return Tensor self
function Tensor:atan_() end

--- Hyperbolic sine, element by element.
---@return Tensor
function Tensor:sinh() end

--- In-place version of sinh.
---@return Tensor self
function Tensor:sinh_() end

--- Hyperbolic cosine, element by element.
---@return Tensor
function Tensor:cosh() end

--- In-place version of cosh.
---@return Tensor self
function Tensor:cosh_() end

--- Inverse hyperbolic sine, element by element.
---@return Tensor
function Tensor:asinh() end

--- In-place version of asinh.
---@return Tensor self
function Tensor:asinh_() end

--- Inverse hyperbolic cosine, element by element; nan below 1.
---@return Tensor
function Tensor:acosh() end

--- In-place version of acosh.
---@return Tensor self
function Tensor:acosh_() end

--- Inverse hyperbolic tangent, element by element; nan outside of [-1, 1].
---@return Tensor
function Tensor:atanh() end

--- In-place version of atanh.
---@return Tensor self
function Tensor:atanh_() end

--- The logarithm of the absolute value of the gamma function, element by element.
---@return Tensor
function Tensor:lgamma() end

--- In-place version of lgamma.
---@return Tensor self
function Tensor:lgamma_() end

--- The derivative of lgamma, element by element.
---@return Tensor
function Tensor:digamma() end

--- In-place version of digamma.
---@return Tensor self
function Tensor:digamma_() end

--- The largest whole number that is at most t, element by element. The gradient is 0.
---@return Tensor
function Tensor:floor() end

--- In-place version of floor.
---@return Tensor self
function Tensor:floor_() end

--- The smallest whole number that is at least t, element by element. The gradient is 0.
---@return Tensor
function Tensor:ceil() end

--- In-place version of ceil.
---@return Tensor self
function Tensor:ceil_() end

--- The whole part of t (towards 0), element by element. The gradient is 0.
---@return Tensor
function Tensor:trunc() end

--- In-place version of trunc.
---@return Tensor self
function Tensor:trunc_() end

--- t - trunc(t), element by element.
---@return Tensor
function Tensor:frac() end

--- In-place version of frac.
---@return Tensor self
function Tensor:frac_() end

--- Mish (Misra 2019): t * tanh(softplus(t)), element by element.
---@return Tensor
function Tensor:mish() end

--- In-place version of mish.
---@return Tensor self
function Tensor:mish_() end

--- Mish (Misra 2019): t * tanh(softplus(t)), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.mish(t) end

--- clamp(t + 3, 0, 6) / 6, element by element.
---@return Tensor
function Tensor:hardsigmoid() end

--- In-place version of hardsigmoid.
---@return Tensor self
function Tensor:hardsigmoid_() end

--- clamp(t + 3, 0, 6) / 6, element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.hardsigmoid(t) end

--- t * hardsigmoid(t) (Howard et al. 2019), element by element.
---@return Tensor
function Tensor:hardswish() end

--- In-place version of hardswish.
---@return Tensor self
function Tensor:hardswish_() end

--- t * hardsigmoid(t) (Howard et al. 2019), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.hardswish(t) end

--- t / (1 + |t|), element by element.
---@return Tensor
function Tensor:softsign() end

--- In-place version of softsign.
---@return Tensor self
function Tensor:softsign_() end

--- t / (1 + |t|), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.softsign(t) end

--- log(sigmoid(t)), element by element, without overflow.
---@return Tensor
function Tensor:logsigmoid() end

--- In-place version of logsigmoid.
---@return Tensor self
function Tensor:logsigmoid_() end

--- log(sigmoid(t)), element by element, without overflow.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.logsigmoid(t) end

--- Whether each element is neither infinite nor nan: a bool tensor.
---@return Tensor
function Tensor:isfinite() end

--- Whether each element is nan: a bool tensor.
---@return Tensor
function Tensor:isnan() end

--- Whether each element is infinite: a bool tensor.
---@return Tensor
function Tensor:isinf() end

--- Whether each element is 0 or false: a bool tensor.
---@return Tensor
function Tensor:logical_not() end

--- t * u, element by element; u broadcasts.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:mul(u) end

--- t * u in place.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:mul_(u) end

--- t ^ u, element by element; u broadcasts.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:pow(u) end

--- The larger of both, element by element; nan where one is nan.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:maximum(u) end

--- The smaller of both, element by element; nan where one is nan.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:minimum(u) end

--- The remainder of t / u with the sign of t, element by element. For integers 0 where u is 0.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:fmod(u) end

--- In-place version of fmod.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:fmod_(u) end

--- The remainder of t / u with the sign of u, element by element, as t % u. For integers 0 where u is 0.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:remainder(u) end

--- In-place version of remainder.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:remainder_(u) end

--- The angle of the point (u, t) in [-pi, pi], element by element.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:atan2(u) end

--- In-place version of atan2.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:atan2_(u) end

--- sqrt(t^2 + u^2), element by element, without overflow.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:hypot(u) end

--- In-place version of hypot.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:hypot_(u) end

--- |t| with the sign of u, element by element.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:copysign(u) end

--- In-place version of copysign.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:copysign_(u) end

--- t * log(u), element by element; 0 where t is 0.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:xlogy(u) end

--- In-place version of xlogy.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:xlogy_(u) end

--- log(e^t + e^u), element by element, without overflow.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:logaddexp(u) end

--- floor(t / u), element by element. For integers 0 where u is 0.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:floor_divide(u) end

--- In-place version of floor_divide.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:floor_divide_(u) end

--- The bits that are 1 in both integers; for bools as logical_and.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:bitwise_and(u) end

--- In-place version of bitwise_and.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:bitwise_and_(u) end

--- The bits that are 1 in at least one of the two integers; for bools as logical_or.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:bitwise_or(u) end

--- In-place version of bitwise_or.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:bitwise_or_(u) end

--- The bits that are 1 in exactly one of the two integers; for bools as logical_xor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:bitwise_xor(u) end

--- In-place version of bitwise_xor.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:bitwise_xor_(u) end

--- Each integer with all its bits inverted; for bools as logical_not.
---@return Tensor
function Tensor:bitwise_not() end

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
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:logical_and(u) end

--- In-place version of logical_and.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:logical_and_(u) end

--- Whether at least one of the two elements is true (not 0): a bool tensor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:logical_or(u) end

--- In-place version of logical_or.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:logical_or_(u) end

--- Whether exactly one of the two elements is true (not 0): a bool tensor.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:logical_xor(u) end

--- In-place version of logical_xor.
---@param u Tensor|number  broadcasts to t's shape
---@return Tensor self
function Tensor:logical_xor_(u) end

--- Stochastic gradient descent with momentum (Sutskever et al. 2013, in PyTorch's form): v = momentum v + (1 -
--- dampening) g, but v = g at the first step and without momentum; p = p - lr v, or with nesterov p - lr (g + momentum
--- v). weight_decay adds weight_decay p to g. Errors: nesterov without momentum or with dampening.
---@class SGD: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, momentum: number, dampening: number, nesterov: boolean, weight_decay: number, maximize: boolean, master_weights: boolean }): SGD
---   lr: learning rate; momentum: share of the last step that is kept; dampening: share of the gradient that is left
---   out of the momentum; nesterov: looks ahead by one step of momentum; weight_decay: weight_decay times the parameter
---   is added to the gradient; maximize: maximizes instead of minimizing: negates the gradient; master_weights:
---   parameters of half types keep a float32 copy as state `master`, which is stepped in their place; each step stores
---   its rounded values in the parameter
local SGD = {}

--- Adam (Kingma & Ba 2015, algorithm 1); amsgrad keeps the largest second moment (Reddi et al. 2018). weight_decay adds
--- weight_decay p to the gradient of parameter p.
---@class Adam: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, betas: number[], eps: number, weight_decay: number, amsgrad: boolean, maximize: boolean, master_weights: boolean }): Adam
---   lr: learning rate; betas: decay of the first and second moment, from 0 to below 1; eps: added to the root of the
---   second moment; weight_decay: weight_decay times the parameter is added to the gradient; amsgrad: divides by the
---   largest second moment so far; maximize: maximizes instead of minimizing: negates the gradient; master_weights:
---   parameters of half types keep a float32 copy as state `master`, which is stepped in their place; each step stores
---   its rounded values in the parameter
local Adam = {}

--- Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2): each step also subtracts lr weight_decay p
--- from parameter p.
---@class AdamW: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, betas: number[], eps: number, weight_decay: number, amsgrad: boolean, maximize: boolean, master_weights: boolean }): AdamW
---   lr: learning rate; betas: decay of the first and second moment, from 0 to below 1; eps: added to the root of the
---   second moment; weight_decay: the parameter is reduced by lr times weight_decay times itself; amsgrad: divides by
---   the largest second moment so far; maximize: maximizes instead of minimizing: negates the gradient; master_weights:
---   parameters of half types keep a float32 copy as state `master`, which is stepped in their place; each step stores
---   its rounded values in the parameter
local AdamW = {}

--- RMSprop (Tieleman & Hinton 2012): divides the gradient by the root of a moving average of its squares; centered
--- (Graves 2013) subtracts the square of the average gradient from it.
---@class RMSprop: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, alpha: number, eps: number, weight_decay: number, momentum: number, centered: boolean, maximize: boolean }): RMSprop
---   lr: learning rate; alpha: share of the averages that is kept; eps: added to the root; weight_decay: weight_decay
---   times the parameter is added to the gradient; momentum: share of the last step that is kept; centered: divides by
---   an estimate of the variance; maximize: maximizes instead of minimizing: negates the gradient
local RMSprop = {}

--- Adagrad (Duchi, Hazan & Singer 2011): divides the gradient by the root of the sum of all its squares so far.
---@class Adagrad: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, lr_decay: number, weight_decay: number, initial_accumulator_value: number, eps: number, maximize: boolean }): Adagrad
---   lr: learning rate; lr_decay: step k uses lr / (1 + (k - 1) lr_decay); weight_decay: weight_decay times the
---   parameter is added to the gradient; initial_accumulator_value: the sum's value before the first step; eps: added
---   to the root; maximize: maximizes instead of minimizing: negates the gradient
local Adagrad = {}

--- Adadelta (Zeiler 2012): scales the gradient by the root of average squared steps over average squared gradients.
---@class Adadelta: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, rho: number, eps: number, weight_decay: number, maximize: boolean }): Adadelta
---   lr: learning rate; rho: share of the averages that is kept; eps: added to both averages; weight_decay:
---   weight_decay times the parameter is added to the gradient; maximize: maximizes instead of minimizing: negates the
---   gradient
local Adadelta = {}

--- Adamax (Kingma & Ba 2015, section 7.1): Adam with a decaying maximum of |g| in place of the second moment.
---@class Adamax: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, betas: number[], eps: number, weight_decay: number, maximize: boolean }): Adamax
---   lr: learning rate; betas: decay of the first moment and of the maximum, from 0 to below 1; eps: added to |g|;
---   weight_decay: weight_decay times the parameter is added to the gradient; maximize: maximizes instead of
---   minimizing: negates the gradient
local Adamax = {}

--- NAdam (Dozat 2016, with PyTorch's schedule of the momentum): Adam with Nesterov momentum.
---@class NAdam: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, betas: number[], eps: number, weight_decay: number, momentum_decay: number, decoupled_weight_decay: boolean, maximize: boolean }): NAdam
---   lr: learning rate; betas: decay of the first and second moment, from 0 to below 1; eps: added to the root of the
---   second moment; weight_decay: weight_decay times the parameter is added to the gradient; momentum_decay: speed at
---   which the momentum grows to betas[1]; decoupled_weight_decay: reduces the parameter by lr times weight_decay times
---   itself instead; maximize: maximizes instead of minimizing: negates the gradient
local NAdam = {}

--- RAdam (Liu et al. 2020, algorithm 2): Adam whose first steps do without the second moment, until its variance is
--- small enough.
---@class RAdam: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, betas: number[], eps: number, weight_decay: number, decoupled_weight_decay: boolean, maximize: boolean }): RAdam
---   lr: learning rate; betas: decay of the first and second moment, from 0 to below 1; eps: added to the root of the
---   second moment; weight_decay: weight_decay times the parameter is added to the gradient; decoupled_weight_decay:
---   reduces the parameter by lr times weight_decay times itself instead; maximize: maximizes instead of minimizing:
---   negates the gradient
local RAdam = {}

--- Lion (Chen et al. 2023, algorithm 2): steps by the sign of an average gradient, and subtracts lr weight_decay p from
--- parameter p.
---@class Lion: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, betas: number[], weight_decay: number, maximize: boolean }): Lion
---   lr: learning rate; betas: share of the average in the step, and its decay, from 0 to below 1; weight_decay: the
---   parameter is reduced by lr times weight_decay times itself; maximize: maximizes instead of minimizing: negates the
---   gradient
local Lion = {}

--- Rprop (Riedmiller & Braun 1993, in PyTorch's form): each element has a step size of its own, which grows while the
--- sign of its gradient stays. For gradients of all data, not of batches.
---@class Rprop: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, etas: number[], step_sizes: number[], maximize: boolean }): Rprop
---   lr: the first step's size; etas: factors of the step size where the sign has changed, and where it has not;
---   step_sizes: the smallest and largest step; maximize: maximizes instead of minimizing: negates the gradient
local Rprop = {}

--- Averaged stochastic gradient descent (Polyak & Juditsky 1992, in PyTorch's form): state ax is the average of the
--- parameter from step t0 on.
---@class ASGD: Optimizer
---@overload fun(params: Tensor[]|table[], opts?: { lr: number, lambd: number, alpha: number, t0: number, weight_decay: number, maximize: boolean }): ASGD
---   lr: learning rate; lambd: decay of the parameter, and of the learning rate; alpha: power of the learning rate's
---   decay; t0: the step at which averaging begins; weight_decay: weight_decay times the parameter is added to the
---   gradient; maximize: maximizes instead of minimizing: negates the gradient
local ASGD = {}
