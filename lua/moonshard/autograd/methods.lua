-- SPDX-License-Identifier: MIT
--- Loads every method of tensors. For modules that scripts may require first.
require "moonshard.tensor.ops"
require "moonshard.tensor.functions"
require "moonshard.tensor.shape"
require "moonshard.tensor.rearrange"
require "moonshard.tensor.products"
require "moonshard.tensor.reduce"
require "moonshard.tensor.summaries"
require "moonshard.tensor.class"
require "moonshard.tensor.create"
require "moonshard.tensor.print"
require "moonshard.autograd"
require "moonshard.autograd.sparse"
