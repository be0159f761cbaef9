-- SPDX-License-Identifier: MIT
--- What stands on which page of the reference: owners of public names, taken from the live library. A section lists
--- names in the order of the page, or takes what no earlier section of its owner has.
local ms = require "moonshard"
for _, name in ipairs { "save", "load", "amp", "data", "profiler", "testing" } do assert(ms[name]) end   -- loaded when first named

local methods = ms.Tensor.methods

-- A section: title, prefix of its names, the table they are in, and a list of them (all that are left without it).
local function section(title, prefix, of, names) return { title = title, prefix = prefix, of = of, names = names } end

return {
  {
    file = "tensor", title = "Tensor methods",
    intro = "Dimensions and positions count from 1, and from the end with negative numbers; ids inside tensors "
      .. "count from 0. "
      .. "A method whose name ends in `_` changes its tensor and returns it; every other one returns a new tensor or a view.",
    sections = {
      section("Arithmetic", "Tensor:", methods, "add add_ sub sub_ mul mul_ div div_ pow pow_ matmul mm bmm"),
      section("Functions of each element", "Tensor:", methods, [[neg neg_ abs abs_ exp exp_ log log_ sqrt sqrt_ rsqrt
        rsqrt_ reciprocal reciprocal_ sin cos tanh tanh_ sigmoid sigmoid_ relu relu_ silu silu_ gelu sign clamp clamp_]]),
      section("Comparison and choice", "Tensor:", methods, [[eq ne lt le gt ge maximum minimum isfinite isnan
        logical_and logical_or logical_not where masked_fill masked_fill_ equal allclose]]),
      section("Reductions", "Tensor:", methods, [[sum mean prod var std max min argmax argmin all any norm softmax
        log_softmax logsumexp cumsum]]),
      section("Shape", "Tensor:", methods, [[size dim numel nelement stride is_contiguous reshape view view_as flatten
        squeeze unsqueeze transpose t permute expand expand_as tile repeat narrow select split chunk unbind tril triu]]),
      section("By index", "Tensor:", methods, "index_select gather scatter scatter_ scatter_add_"),
      section("Filling and copying", "Tensor:", methods, "fill_ zero_ copy_ clone contiguous"),
      section("Dtype and device", "Tensor:", methods, [[to float double half bfloat16 long int bool type cpu cuda
        element_size]]),
      section("Autograd", "Tensor:", methods, [[backward requires_grad_ detach register_hook
        register_post_accumulate_grad_hook]]),
      section("Values and lifetime", "Tensor:", methods, "item tolist data_ptr keep release is_released"),
      section("Classes", "Tensor:", methods),
    },
  },
}
