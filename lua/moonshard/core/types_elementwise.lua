-- SPDX-License-Identifier: MIT
---@meta
-- luacheck: ignore (declarations for editors)
--- Annotations of methods that are made of kernels/rows/elementwise.def. Written by scripts/docs; never loaded.

---@class Tensor
local Tensor = {}

---@class moonshard.nn
local nn = { F = {} }

--- -t, element by element.
---@return Tensor
function Tensor:neg() end

--- neg in place.
---@return Tensor self
function Tensor:neg_() end

--- |t|, element by element.
---@return Tensor
function Tensor:abs() end

--- abs in place.
---@return Tensor self
function Tensor:abs_() end

--- e^t, element by element.
---@return Tensor
function Tensor:exp() end

--- exp in place.
---@return Tensor self
function Tensor:exp_() end

--- Natural logarithm, element by element.
---@return Tensor
function Tensor:log() end

--- log in place.
---@return Tensor self
function Tensor:log_() end

--- Square root, element by element.
---@return Tensor
function Tensor:sqrt() end

--- sqrt in place.
---@return Tensor self
function Tensor:sqrt_() end

--- 1 / square root, element by element.
---@return Tensor
function Tensor:rsqrt() end

--- rsqrt in place.
---@return Tensor self
function Tensor:rsqrt_() end

--- Sine, element by element.
---@return Tensor
function Tensor:sin() end

--- sin in place.
---@return Tensor self
function Tensor:sin_() end

--- Cosine, element by element.
---@return Tensor
function Tensor:cos() end

--- cos in place.
---@return Tensor self
function Tensor:cos_() end

--- max(t, 0), element by element.
---@return Tensor
function Tensor:relu() end

--- relu in place.
---@return Tensor self
function Tensor:relu_() end

--- max(t, 0), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.relu(t) end

--- t * sigmoid(t), element by element.
---@return Tensor
function Tensor:silu() end

--- silu in place.
---@return Tensor self
function Tensor:silu_() end

--- t * sigmoid(t), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.silu(t) end

--- Hyperbolic tangent, element by element.
---@return Tensor
function Tensor:tanh() end

--- tanh in place.
---@return Tensor self
function Tensor:tanh_() end

--- Hyperbolic tangent, element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.tanh(t) end

--- 1 / (1 + e^-t), element by element.
---@return Tensor
function Tensor:sigmoid() end

--- sigmoid in place.
---@return Tensor self
function Tensor:sigmoid_() end

--- 1 / (1 + e^-t), element by element.
---@param t Tensor  of any shape
---@return Tensor
function nn.F.sigmoid(t) end

--- -1, 0 or 1, element by element.
---@return Tensor
function Tensor:sign() end

--- sign in place.
---@return Tensor self
function Tensor:sign_() end

--- 1 / t, element by element.
---@return Tensor
function Tensor:reciprocal() end

--- reciprocal in place.
---@return Tensor self
function Tensor:reciprocal_() end

--- Neither infinite nor nan? A bool tensor.
---@return Tensor
function Tensor:isfinite() end

--- Not a number? A bool tensor.
---@return Tensor
function Tensor:isnan() end

--- Zero or false? A bool tensor.
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

--- Are both true (not 0)? A bool tensor.
---@param u Tensor  broadcasts with t
---@return Tensor
function Tensor:logical_and(u) end

--- Is one of them true (not 0)? A bool tensor.
---@param u Tensor  broadcasts with t
---@return Tensor
function Tensor:logical_or(u) end
