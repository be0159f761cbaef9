-- SPDX-License-Identifier: MIT
---@meta
-- luacheck: ignore (declarations for editors)
--- Declarations of functions that are made in loops, for editors, `? name` and docs/api. Never loaded. Those with the
--- line @family stand for others, which tools/families.lua makes of them.

--- An array of elements of one dtype on one device. `t[i]` is the part at position i of the first
--- dimension, `t[{ {1, 3}, 2 }]` positions 1 to 3 of the first and 2 of the second one, `t[mask]` the elements where a
--- bool tensor is true, and `t[key] = v` assigns to them; docs/lua.md has all keys (Parts of a tensor). `+ - * / ^` and
--- unary `-` work element by element, also with numbers.
---@class Tensor
---@field shape integer[]        sizes; an array that prints as [2, 3]
---@field ndim integer           number of dimensions
---@field dtype string           'float32' 'float64' 'float16' 'bfloat16' 'int64' 'int32' 'int16' 'int8' 'uint8' 'bool'
---@field device string          'cpu', 'cuda:0', 'meta'
---@field grad Tensor?           the gradient of a leaf, nil until there is one; assignable on leaves
---@field requires_grad boolean  whether backward computes its gradient; assignable on leaves
---@field is_leaf boolean        made by the script, not by an operation that records
---@field T Tensor               the transpose of a matrix, as t:t()
---@field mT Tensor              the last two dimensions swapped, as t:transpose(-2, -1); at least 2 dimensions
---@field is_sparse boolean      an instance of SparseTensor, such as the gradient of a sparse embedding
---@operator add(Tensor|number): Tensor
---@operator sub(Tensor|number): Tensor
---@operator mul(Tensor|number): Tensor
---@operator div(Tensor|number): Tensor
---@operator pow(Tensor|number): Tensor
---@operator unm: Tensor
local Tensor = {}

-- ---- dtypes (functions of elements: types_engine.lua) --------------------------------------------

--- Converts to float32; returns t itself if it has that dtype.
---@return Tensor
---@family Tensor:float()

-- ---- shapes of other tensors --------------------------------------------------------------------

--- t in u's shape, without copying.
---@param u Tensor  its shape is taken
---@return Tensor  shares t's storage
function Tensor:view_as(u) end

--- t expanded to u's shape, without copying.
---@param u Tensor  its shape is taken
---@return Tensor  shares t's storage
function Tensor:expand_as(u) end

-- ---- reductions ---------------------------------------------------------------------------------------

--- The largest element; with d, the largest elements along d and their positions. With a tensor in place of d, the
--- same as maximum.
---@param d? integer  from 1, negative from the end (default: all elements)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor values
---@return Tensor? indices  int64, from 0; only along d
---@family Tensor:max(d, opts)

--- The positions of the largest elements along d; if several are equal, the first.
---@param d? integer  from 1; negative from the end (default: -1)
---@param opts? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor  int64, from 0
---@family Tensor:argmax(d, opts)

--- div by its other name: t / u, element by element. Integers give the default dtype.
---@param u Tensor|number  broadcasts with t
---@return Tensor
function Tensor:true_divide(u) end

--- cumsum in place.
---@param d? integer  from 1; negative from the end (default: -1)
---@return Tensor self
function Tensor:cumsum_(d) end

--- cumprod in place.
---@param d? integer  from 1; negative from the end (default: -1)
---@return Tensor self
function Tensor:cumprod_(d) end

--- The largest element so far, along d; of equal ones, the last.
---@param d? integer  from 1; negative from the end (default: -1)
---@return Tensor values
---@return Tensor indices  int64: where each of them is, from 0
---@family Tensor:cummax(d)

-- ---- making tensors -----------------------------------------------------------------------------------

---@class moonshard
---@field version string  the release, such as "1.1.0"; "1.1.0-dev" before that release
local ms = {}

---@alias TensorOptions {dtype: string, device: string, requires_grad: boolean}

--- A tensor of zeros.
---@param ... integer|integer[]|TensorOptions  sizes, as numbers or one list, then options: dtype and device (default:
---   the default ones), requires_grad
---@return Tensor
---@family ms.zeros(...)

--- A tensor of zeros with the shape, dtype and device of t.
---@param t Tensor  gives shape, dtype and device
---@param opts? TensorOptions  dtype and device, where they differ from t's; requires_grad
---@return Tensor
---@family ms.zeros_like(t, opts)
