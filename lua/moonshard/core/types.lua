-- SPDX-License-Identifier: MIT
---@meta
-- luacheck: ignore (declarations for editors)
--- Declarations of functions that are made in loops, for editors, `? name` and docs/api. Never loaded.

--- Elements of one dtype in a row-major array on one device. `t[i]` is the part at position i of the first dimension,
--- and `t[i] = v` fills it. `+ - * / ^` and unary `-` work element by element, with numbers too.
---@class Tensor
---@field shape integer[]        sizes; an array that prints as [2, 3]
---@field ndim integer           number of dimensions
---@field dtype string           'float32' 'float64' 'float16' 'bfloat16' 'int64' 'int32' 'uint8' 'bool'
---@field device string          'cpu', 'cuda:0', 'meta'
---@field grad Tensor?           the gradient of a leaf, nil until there is one; assignable on leaves
---@field requires_grad boolean  whether backward computes its gradient; assignable on leaves
---@field is_leaf boolean        made by the script, not by an operation that records
---@field is_sparse boolean      made by ms.sparse_coo, or the gradient of a sparse embedding
---@operator add(Tensor|number): Tensor
---@operator sub(Tensor|number): Tensor
---@operator mul(Tensor|number): Tensor
---@operator div(Tensor|number): Tensor
---@operator pow(Tensor|number): Tensor
---@operator unm: Tensor
local Tensor = {}

-- ---- dtypes (functions of elements: types_engine.lua) --------------------------------------------

--- The tensor as float32; itself when it is.
---@return Tensor
function Tensor:float() end

--- The tensor as float64; itself when it is.
---@return Tensor
function Tensor:double() end

--- The tensor as float16; itself when it is.
---@return Tensor
function Tensor:half() end

--- The tensor as bfloat16; itself when it is.
---@return Tensor
function Tensor:bfloat16() end

--- The tensor as int64; itself when it is.
---@return Tensor
function Tensor:long() end

--- The tensor as int32; itself when it is.
---@return Tensor
function Tensor:int() end

--- The tensor as bool; itself when it is.
---@return Tensor
function Tensor:bool() end

-- ---- shapes of others ----------------------------------------------------------------------------------

--- t in u's shape, without copying.
---@param u Tensor  its shape is taken
---@return Tensor  shares t's storage
function Tensor:view_as(u) end

--- t expanded to u's shape, without copying.
---@param u Tensor  its shape is taken
---@return Tensor  shares t's storage
function Tensor:expand_as(u) end

-- ---- reductions ---------------------------------------------------------------------------------------

--- Sum over dimensions. Integers and bools add up to int64.
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimensions with size 1
---@return Tensor
function Tensor:sum(d, opts) end

--- Mean over dimensions. Errors: a dtype that is not floating point.
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimensions with size 1
---@return Tensor
function Tensor:mean(d, opts) end

--- Product over dimensions. Integers and bools multiply to int64.
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimensions with size 1
---@return Tensor
function Tensor:prod(d, opts) end

--- Is every element true (not 0)?
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimensions with size 1
---@return Tensor  bool
function Tensor:all(d, opts) end

--- Is at least one element true (not 0)?
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimensions with size 1
---@return Tensor  bool
function Tensor:any(d, opts) end

--- Variance over dimensions: the squared distances from the mean, divided by n - correction.
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param opts? { keepdim: boolean, correction: integer }
---   keepdim: leaves the dimensions with size 1; correction: subtracted from the number of elements, 1
---@return Tensor
function Tensor:var(d, opts) end

--- Standard deviation over dimensions, the square root of var.
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param opts? { keepdim: boolean, correction: integer }
---   keepdim: leaves the dimensions with size 1; correction: subtracted from the number of elements, 1
---@return Tensor
function Tensor:std(d, opts) end

--- The largest element; along d the largest ones and their places. With a tensor instead of d: maximum.
---@param d? integer  from 1, negative from the end (default: all elements)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor values
---@return Tensor? indices  int64, from 0; only along d
function Tensor:max(d, opts) end

--- The smallest element; along d the smallest ones and their places. With a tensor instead of d: minimum.
---@param d? integer  from 1, negative from the end (default: all elements)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor values
---@return Tensor? indices  int64, from 0; only along d
function Tensor:min(d, opts) end

--- The places of the largest elements along d; of equal ones the first.
---@param d? integer  -1
---@param opts? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor  int64, from 0
function Tensor:argmax(d, opts) end

--- The places of the smallest elements along d; of equal ones the first.
---@param d? integer  -1
---@param opts? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor  int64, from 0
function Tensor:argmin(d, opts) end

--- Exponentials that add up to 1 along d: `e^t / sum(e^t)`.
---@param d? integer  -1
---@return Tensor
function Tensor:softmax(d) end

--- The logarithm of softmax along d, computed without overflow.
---@param d? integer  -1
---@return Tensor
function Tensor:log_softmax(d) end

--- Running sums along d.
---@param d? integer  -1
---@return Tensor
function Tensor:cumsum(d) end

-- ---- making tensors -----------------------------------------------------------------------------------

---@class moonshard
---@field version string  the release, such as "1.1.0"; "1.1.0-dev" on the way to it
local ms = {}

---@alias TensorOptions {dtype: string, device: string, requires_grad: boolean}

--- A tensor whose elements are not set. dtype: the default one; device: the default one.
---@param ... integer|integer[]|TensorOptions  sizes, as numbers or one list, then options
---@return Tensor
function ms.empty(...) end

--- An uninitialised tensor with the shape, dtype and device of t.
---@param t Tensor  gives shape, dtype and device
---@param opts? TensorOptions  dtype and device, where they differ from t's; requires_grad
---@return Tensor
function ms.empty_like(t, opts) end

--- A tensor of zeros.
---@param ... integer|integer[]|TensorOptions  sizes, as numbers or one list, then options
---@return Tensor
function ms.zeros(...) end

--- A tensor of zeros with the shape, dtype and device of t.
---@param t Tensor  gives shape, dtype and device
---@param opts? TensorOptions  dtype and device, where they differ from t's; requires_grad
---@return Tensor
function ms.zeros_like(t, opts) end

--- A tensor of ones.
---@param ... integer|integer[]|TensorOptions  sizes, as numbers or one list, then options
---@return Tensor
function ms.ones(...) end

--- A tensor of ones with the shape, dtype and device of t.
---@param t Tensor  gives shape, dtype and device
---@param opts? TensorOptions  dtype and device, where they differ from t's; requires_grad
---@return Tensor
function ms.ones_like(t, opts) end

--- Numbers drawn evenly from [0, 1).
---@param ... integer|integer[]|TensorOptions  sizes, as numbers or one list, then options
---@return Tensor
function ms.rand(...) end

--- Numbers drawn evenly from [0, 1), with the shape, dtype and device of t.
---@param t Tensor  gives shape, dtype and device
---@param opts? TensorOptions  dtype and device, where they differ from t's; requires_grad
---@return Tensor
function ms.rand_like(t, opts) end

--- Numbers drawn from the normal distribution of mean 0 and standard deviation 1.
---@param ... integer|integer[]|TensorOptions  sizes, as numbers or one list, then options
---@return Tensor
function ms.randn(...) end

--- Numbers drawn from the normal distribution of mean 0 and standard deviation 1, with the shape, dtype and device of
--- t.
---@param t Tensor  gives shape, dtype and device
---@param opts? TensorOptions  dtype and device, where they differ from t's; requires_grad
---@return Tensor
function ms.randn_like(t, opts) end
