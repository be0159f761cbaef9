-- SPDX-License-Identifier: MIT
--- Loads the methods of tensors except those of tensor/special/linalg.lua. Modules that scripts may load first require
--- this one.
require "moonshard.tensor.ops"
require "moonshard.tensor.functions"
require "moonshard.tensor.shape"
require "moonshard.tensor.rearrange"
require "moonshard.tensor.products"
require "moonshard.tensor.summaries"
require "moonshard.tensor.draws"
require "moonshard.tensor.positions"
require "moonshard.tensor.index"
require "moonshard.tensor.order"
require "moonshard.tensor.diagonals"
require "moonshard.tensor.class"
require "moonshard.tensor.create"
require "moonshard.tensor.print"
require "moonshard.autograd"
require "moonshard.autograd.sparse"
