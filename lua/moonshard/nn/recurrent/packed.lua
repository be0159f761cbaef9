-- SPDX-License-Identifier: MIT
--- nn.utils.rnn: sequences of different lengths as one padded tensor, and packed for RNN, LSTM and GRU.
---
--- A packed sequence has the rows of all sequences without padding, first those of step 1, the longest sequence first;
--- and the number of rows of each step. It passes through modules, scopes and files as a plain table of tensors does
--- (opts.printing); a table with its fields, such as ms.load returns, is a packed sequence, too. Packing and padding
--- compute positions of rows on the CPU, from lengths, and move rows by index_select.
local capture = require "moonshard.autograd.capture"
local class = require "moonshard.core.class"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local methods = require "moonshard.core.methods"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local shape = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"

local a_tensor, is_tensor, raise = tensor.a_tensor, tensor.is_tensor, errors.raise
local M = {}

--- Sequences of different lengths without padding, made by pack_sequence and pack_padded_sequence; RNN, LSTM and GRU
--- take one and return one. `x:isa(nn.utils.rnn.PackedSequence)` tests for one.
---@class PackedSequence
---@overload fun(data: Tensor, batch_sizes: Tensor, sorted_indices?: Tensor, unsorted_indices?: Tensor): PackedSequence
---   data: [rows, ...]; batch_sizes: int64 [T], on the CPU; sorted_indices: int64 [N]; unsorted_indices: int64 [N]
---   (default: the inverse of sorted_indices)
---@field data Tensor  [rows, ...]: the rows of all sequences, step by step
---@field batch_sizes Tensor  int64 [T] on the CPU: the number of rows of each step
---@field sorted_indices Tensor?  int64 [N]: positions (from 0) of the sequences in the order of their lengths; nil if they came sorted
---@field unsorted_indices Tensor?  int64 [N]: the positions that restore the original order
local PackedSequence = opts.printing(class.new "PackedSequence")
PackedSequence.__for_a_tensor = "its rows are packed.data, and nn.utils.rnn.pad_packed_sequence(packed) is a tensor"
M.PackedSequence = PackedSequence       -- a field of M, because data/packing.lua sends classes to workers by name

local rnn = { PackedSequence = PackedSequence }

-- ---- packed sequences -------------------------------------------------------------------------------

--- Whether x is a packed sequence.
function M.is_packed(x) return opts.is_plain(x) and is_tensor(x.data) and is_tensor(x.batch_sizes) end

--- Raises unless x is a packed sequence. who: named in messages.
function M.check(x, who)
  if not opts.is_plain(x) then opts.wrong(x, "a packed sequence", "%s", who) end
  opts.expect(x.data, a_tensor, "%s: field 'data' of a packed sequence", who)
  opts.expect(x.batch_sizes, a_tensor, "%s: field 'batch_sizes' of a packed sequence", who)
  if x.batch_sizes.dtype ~= "int64" or x.batch_sizes.ndim ~= 1 or x.batch_sizes:numel() == 0 then
    raise("%s: batch_sizes is %s %s, expected int64 [steps] with at least one step", who, x.batch_sizes.dtype,
      tostring(x.batch_sizes.shape))
  end
  if x.data.ndim < 1 then raise("%s: data has shape [], expected [rows, ...]", who) end
end

local function made(data, batch_sizes, sorted_indices, unsorted_indices)
  return setmetatable({ data = data, batch_sizes = batch_sizes, sorted_indices = sorted_indices,
    unsorted_indices = unsorted_indices }, PackedSequence)
end

--- A packed sequence of the same lengths as x, with other data.
function M.with_data(x, data) return made(data, x.batch_sizes, x.sorted_indices, x.unsorted_indices) end

function PackedSequence:init(data, batch_sizes, sorted_indices, unsorted_indices)
  self.data, self.batch_sizes, self.sorted_indices = data, batch_sizes, sorted_indices
  self.unsorted_indices = unsorted_indices
  M.check(self, "PackedSequence")
  if unsorted_indices == nil then self.unsorted_indices = rnn.invert_permutation(sorted_indices) end
end

function PackedSequence:__tostring()
  local sizes = self.batch_sizes
  if self.data:is_released() or sizes:is_released() then return "PackedSequence(released)" end
  local n, steps = sizes[1]:item(), sizes:numel()
  return ("PackedSequence(%s of up to %s, data %s %s %s)"):format(errors.count(n, "sequence"),
    errors.count(steps, "step"), self.data.dtype, tostring(self.data.shape), self.data.device)
end

--- The sequence with its data on another device or in another dtype, and its indices on the device of the data; the
--- same object if nothing changes. batch_sizes stays on the CPU.
---@param ... any  as for Tensor:to
---@return PackedSequence
function PackedSequence:to(...)
  local data = self.data:to(...)
  local function there(t) return t and t:to(data.device) end
  local sorted, unsorted = there(self.sorted_indices), there(self.unsorted_indices)
  if data == self.data and sorted == self.sorted_indices and unsorted == self.unsorted_indices then return self end
  return made(data, self.batch_sizes, sorted, unsorted)
end

--- The sequence on the CPU, as to("cpu").
---@return PackedSequence
function PackedSequence:cpu() return self:to "cpu" end
--- The sequence on the current CUDA device, as to("cuda").
---@return PackedSequence
function PackedSequence:cuda() return self:to "cuda" end

--- The sequence with data of dtype float32.
---@return PackedSequence
function PackedSequence:float() return self:to "float32" end
--- The sequence with data of dtype float64.
---@return PackedSequence
function PackedSequence:double() return self:to "float64" end
--- The sequence with data of dtype float16.
---@return PackedSequence
function PackedSequence:half() return self:to "float16" end
--- The sequence with data of dtype bfloat16.
---@return PackedSequence
function PackedSequence:bfloat16() return self:to "bfloat16" end
--- The sequence with data of dtype int64.
---@return PackedSequence
function PackedSequence:long() return self:to "int64" end
--- The sequence with data of dtype int32.
---@return PackedSequence
function PackedSequence:int() return self:to "int32" end
--- The sequence with data of dtype int16.
---@return PackedSequence
function PackedSequence:short() return self:to "int16" end
--- The sequence with data of dtype int8.
---@return PackedSequence
function PackedSequence:char() return self:to "int8" end
--- The sequence with data of dtype uint8.
---@return PackedSequence
function PackedSequence:byte() return self:to "uint8" end

--- Pins the memory of the sequence's tensors for copies to a GPU (see Tensor:pin_memory). Errors: data that is not on
--- the CPU.
---@return PackedSequence self
function PackedSequence:pin_memory()
  for _, t in pairs { self.data, self.batch_sizes, self.sorted_indices, self.unsorted_indices } do t:pin_memory() end
  return self
end

--- Whether data is on the CPU in pinned memory.
---@return boolean
function PackedSequence:is_pinned() return self.data:is_pinned() end

methods.guard(PackedSequence, "packed")
local MAY_BE_NIL = { sorted_indices = true, unsorted_indices = true }

methods.close(PackedSequence, function(key)
  if MAY_BE_NIL[key] or type(key) == "string" and key:sub(1, 1) == "_" then return end
  errors.raise("a PackedSequence has no field %s; it has data, batch_sizes, sorted_indices and unsorted_indices, and "
    .. "nn.utils.rnn.pad_packed_sequence(packed) returns a padded tensor and the lengths", errors.show(key))
end)

--- The permutation that undoes another.
---@param permutation Tensor?  int64 [N], the numbers from 0 to N - 1
---@return Tensor?  int64 [N]; nil if permutation is nil
function rnn.invert_permutation(permutation)
  if permutation == nil then return nil end
  opts.expect(permutation, a_tensor, "invert_permutation: argument 1")
  return permutation:argsort()
end

-- ---- lengths ----------------------------------------------------------------------------------------

--- Refuses a captured step, because Lua computes positions of rows from lengths or batch_sizes.
---@param who string  the function or the layer, for the message
---@param what string  "lengths" or "batch_sizes"
function M.refuse_captured(who, what)
  capture.refuse(("%s reads the values of %s, and a captured step repeats its work without the script; leave packed "
    .. "sequences outside of the step"):format(who, what))
end

-- Returns lengths, a list or a tensor, as a list of whole numbers.
local function list_of_lengths(who, lengths, n, most)
  if is_tensor(lengths) then
    if not lengths.dtype:find "^u?int" then
      raise('%s: lengths must be integers, got %s %s; write lengths:long(), make them with ms.tensor(..., { dtype = "int64" }), or give a list of numbers',
        who, lengths.dtype, tostring(lengths.shape))
    end
    if lengths.ndim ~= 1 then
      raise("%s: lengths is %s %s, expected integers [%d], one for each sequence", who, lengths.dtype,
        tostring(lengths.shape), n)
    end
    M.refuse_captured(who, "lengths")
    lengths = lengths:tolist()
  end
  opts.need(opts.is_plain(lengths), lengths, "a list or a tensor of whole numbers", "%s: lengths", who)
  if #lengths ~= n then
    raise("%s: Expected `len(lengths)` to be equal to batch_size, but got %d (batch_size=%d)", who, #lengths, n)
  end
  for k, length in ipairs(lengths) do
    if type(length) ~= "number" or length % 1 ~= 0 or length < 1 or length > most then
      raise("%s: lengths[%d] is %s, expected a whole number from 1 to %d, the number of steps", who, k,
        tostring(length), most)
    end
  end
  return lengths
end

local function largest(list)
  local most = 0
  for _, x in ipairs(list) do most = math.max(most, x) end
  return most
end

-- bool [T, N]: whether sequence n has step t.
local function present(lengths, T)
  return create.arange(T):reshape(T, 1):lt(create.tensor(lengths, { dtype = "int64" }))
end

-- The positions of the true elements of mask, from 0, on the device of `like`.
local function positions(mask, like) return mask:reshape(-1):nonzero():reshape(-1):to(like.device) end

-- Rows of data for the true elements of mask, in order, and rows of `value` for the others: [sizes of mask, ...].
local function spread(data, mask, value)
  local rows, sizes = data:size(1), { unpack(mask.shape) }
  local row_sizes = { 1 }
  for d = 2, data.ndim do row_sizes[d], sizes[#sizes + 1] = data:size(d), data:size(d) end
  local flat = mask:reshape(-1)
  local from = flat:to("int64"):cumsum(1):sub(1):where(flat, rows):to(data.device)
  local padding = create.full(row_sizes, value, { dtype = data.dtype, device = data.device })
  return shape.cat { data, padding }:index_select(1, from):reshape(sizes)
end

-- ---- padded and packed ------------------------------------------------------------------------------

local pack_spec = { batch_first = false, enforce_sorted = true }

-- The positions (from 0) of the sequences sorted by length, the longest first; equal lengths keep their order.
local function by_length(lengths)
  local order = {}
  for k = 1, #lengths do order[k] = k - 1 end
  table.sort(order, function(a, b)
    local la, lb = lengths[a + 1], lengths[b + 1]
    return la > lb or la == lb and a < b
  end)
  return order
end

local function is_sorted(lengths)
  for k = 2, #lengths do
    if lengths[k] > lengths[k - 1] then return false, k end
  end
  return true
end

--- Packs a padded batch of sequences. Errors: with enforce_sorted, a sequence longer than the one before it.
---@param input Tensor  [T, N, ...], or [N, T, ...] with batch_first
---@param lengths Tensor|integer[]  [N]: the number of steps of each sequence, from 1 to T
---@param given? { batch_first: boolean, enforce_sorted: boolean }  enforce_sorted: the sequences come sorted by length,
---   the longest first (default: true)
---@return PackedSequence
function rnn.pack_padded_sequence(input, lengths, given)
  local who = "pack_padded_sequence"
  local o = opts(who, given, pack_spec)
  opts.expect(input, a_tensor, "%s: input", who)
  if input.ndim < 2 then
    raise("%s: input has shape %s, expected %s", who, tostring(input.shape), o.batch_first and "[N, T, ...]" or "[T, N, ...]")
  end
  M.refuse_captured(who, "lengths")
  return scope.scope(function()
    if o.batch_first then input = input:transpose(1, 2) end
    local n = input:size(2)
    lengths = list_of_lengths(who, lengths, n, input:size(1))
    if n == 0 then raise("%s: input has shape %s, expected at least one sequence", who, tostring(input.shape)) end
    local sorted, at = is_sorted(lengths)
    local order, inverse
    if not o.enforce_sorted then
      local list, given_lengths = by_length(lengths), lengths
      lengths = {}
      for k, from in ipairs(list) do lengths[k] = given_lengths[from + 1] end
      order = create.tensor(list, { dtype = "int64", device = input.device })
      inverse = order:argsort()
      input = input:index_select(2, order)
    elseif not sorted then
      raise("%s: lengths[%d] is %d, after %d: lengths must be sorted in decreasing order when enforce_sorted is true; "
        .. "enforce_sorted = false sorts them", who, at, lengths[at], lengths[at - 1])
    end
    local T, sizes = lengths[1], { -1 }
    for d = 3, input.ndim do sizes[#sizes + 1] = input:size(d) end
    sizes[1] = T * n
    local mask = present(lengths, T)
    local rows = input:narrow(1, 1, T):reshape(sizes):index_select(1, positions(mask, input))
    return made(rows, mask:sum(2), order, inverse)
  end)
end

--- Pads a packed sequence. Errors: a total_length below the length of the longest sequence.
---@param sequence PackedSequence  such as a layer's output
---@param given? { batch_first: boolean, padding_value: number, total_length: integer }  padding_value: value of the
---   elements after a sequence's end (default: 0); total_length: T of the result (default: the longest length)
---@return Tensor  [T, N, ...], or [N, T, ...] with batch_first
---@return Tensor lengths  int64 [N], on the CPU
function rnn.pad_packed_sequence(sequence, given)
  local who = "pad_packed_sequence"
  local o = opts(who, given, { batch_first = false, padding_value = 0, total_length = opts.whole_from(1) })
  M.check(sequence, who .. ": argument 1")
  M.refuse_captured(who, "batch_sizes")
  return scope.scope(function()
    local sizes = sequence.batch_sizes:to "cpu"
    local longest = sizes:numel()
    local T = o.total_length or longest
    if T < longest then
      raise("%s: Expected total_length to be at least the length of the longest sequence in input, but got "
        .. "total_length=%d and max sequence length being %d", who, T, longest)
    end
    local n = sizes[1]:item()
    local mask = create.arange(n):lt(sizes:reshape(longest, 1))
    local lengths = mask:sum(1)
    if T > longest then mask = shape.cat { mask, create.zeros({ T - longest, n }, { dtype = "bool" }) } end
    local y = spread(sequence.data, mask, o.padding_value)
    if sequence.unsorted_indices ~= nil then
      y = y:index_select(2, sequence.unsorted_indices)
      lengths = lengths:index_select(1, sequence.unsorted_indices:to "cpu")
    end
    return o.batch_first and y:transpose(1, 2) or y, lengths
  end)
end

local function check_list(who, sequences)
  opts.need(opts.is_plain(sequences) and #sequences > 0, sequences, "a list of at least one tensor", "%s: argument 1", who)
  local first = sequences[1]
  for k, t in ipairs(sequences) do
    opts.expect(t, a_tensor, "%s: sequence %d", who, k)
    local fits = t.ndim == first.ndim and t.ndim > 0
    for d = 2, fits and t.ndim or 0 do fits = fits and t:size(d) == first:size(d) end
    if not fits then
      raise("%s: sequence %d has shape %s, expected [length, ...], with all sizes but the length as in sequence 1, %s",
        who, k, tostring(t.shape), tostring(first.shape))
    end
  end
end

--- Pads sequences to the length of the longest.
---@param sequences Tensor[]  each [length, ...]
---@param given? { batch_first: boolean, padding_value: number, padding_side: "right"|"left" }  padding_value: value
---   of the elements beside a sequence (default: 0)
---@return Tensor  [T, N, ...], or [N, T, ...] with batch_first
function rnn.pad_sequence(sequences, given)
  local o = opts("pad_sequence", given, { batch_first = false, padding_value = 0,
    padding_side = opts.one_of({ "right", "left" }, "right") })
  check_list("pad_sequence", sequences)
  return scope.scope(function()
    local lengths = {}
    for k, t in ipairs(sequences) do lengths[k] = t:size(1) end
    local T = largest(lengths)
    local mask = present(lengths, T):transpose(1, 2)
    if o.padding_side == "left" then mask = mask:flip(2) end
    local y = spread(shape.cat(sequences), mask, o.padding_value)
    return o.batch_first and y or y:transpose(1, 2)
  end)
end

--- The sequences of a padded batch, without the padding.
---@param padded_sequences Tensor  [T, N, ...], or [N, T, ...] with batch_first
---@param lengths Tensor|integer[]  [N]
---@param given? { batch_first: boolean }
---@return Tensor[]  each [length, ...]
function rnn.unpad_sequence(padded_sequences, lengths, given)
  local who = "unpad_sequence"
  local o = opts(who, given, { batch_first = false })
  opts.expect(padded_sequences, a_tensor, "%s: argument 1", who)
  if padded_sequences.ndim < 2 then
    raise("%s: padded_sequences has shape %s, expected %s", who, tostring(padded_sequences.shape),
      o.batch_first and "[N, T, ...]" or "[T, N, ...]")
  end
  return scope.scope(function()
    local x = o.batch_first and padded_sequences or padded_sequences:transpose(1, 2)
    lengths = list_of_lengths(who, lengths, x:size(1), x:size(2))
    local list = {}
    for k, length in ipairs(lengths) do list[k] = x:select(1, k):narrow(1, 1, length) end
    return list
  end)
end

--- Packs a list of sequences.
---@param sequences Tensor[]  each [length, ...]
---@param given? { enforce_sorted: boolean }  as in pack_padded_sequence
---@return PackedSequence
function rnn.pack_sequence(sequences, given)
  local o = opts("pack_sequence", given, { enforce_sorted = true })
  check_list("pack_sequence", sequences)
  local lengths = {}
  for k, t in ipairs(sequences) do lengths[k] = t:size(1) end
  return scope.scope(function()
    return rnn.pack_padded_sequence(rnn.pad_sequence(sequences), lengths, { enforce_sorted = o.enforce_sorted })
  end)
end

--- The sequences of a packed sequence, in their original order.
---@param sequence PackedSequence  such as a layer's output
---@return Tensor[]  each [length, ...]
function rnn.unpack_sequence(sequence)
  M.check(sequence, "unpack_sequence: argument 1")
  return scope.scope(function() return rnn.unpad_sequence(rnn.pad_packed_sequence(sequence)) end)
end

M.rnn = rnn
return M
