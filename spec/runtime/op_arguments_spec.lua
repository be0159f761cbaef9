-- SPDX-License-Identifier: MIT
--- What rows of operators state of their integers and numbers (`takes` of ms_op_row): samples fit, other counts are
--- refused, and a default is what the operator uses.
local samples = require "spec.support.samples"
local lib = require("moonshard.core.ffi").lib
local ffi = require "ffi"

-- Calls fn(row, op, sample) for each sample of each operator that states what it takes.
local function each_sample(fn)
  for _, op in ipairs(samples.operators()) do
    local row = lib.ms_op_at(op.op)
    if not op.name:find "_backward$" then
      for _, sample in ipairs(op.samples) do fn(row, op, sample) end
    end
  end
end

-- Adds to a sample's list the defaults of the entries of "dim=-1, keepdim?" that it leaves out: 0 for keepdim?.
local function with_defaults(given, text)
  local list, k = { unpack(given) }, 0
  for entry in text:gmatch "[^,%s]+" do
    k = k + 1
    local default = tonumber(entry:match "=(.*)$" or entry:find "%?$" and 0)
    if k > #list and not default then break end
    list[k] = list[k] or default
  end
  return list
end

describe("what a row says of integers and numbers", function()
  it("fits its samples", function()
    local checked = 0
    each_sample(function(row, op, sample)
      local n_i, n_f = #sample.i, #sample.f
      assert.is_true(n_i >= row.integers and n_i <= row.most_integers, op.name .. " " .. sample.text)
      assert.is_true(n_f >= row.numbers and n_f <= row.most_numbers, op.name .. " " .. sample.text)
      checked = checked + 1
    end)
    assert.is_true(checked > 300)
  end)

  for _, case in ipairs {
    { "narrow", 2, 0, "narrow: integer 3, 'length', is missing; the operator takes: dim, first, length" },
    { "narrow", 4, 0, "narrow: got 4 integers, expected at most 3; the operator takes: dim, first, length" },
    { "norm", 1, 0, "norm: number 1, 'p', is missing; the operator takes: keepdim?, dim...; p" },
    { "layer_norm", 1, 0, "layer_norm: number 1, 'eps', is missing; the operator takes: weight?, bias? | dims; eps" },
    { "var", 1, 2, "var: got 2 numbers, expected at most 1; the operator takes: keepdim?, dim...; correction=1" },
    { "exp", 1, 0, "exp: got 1 integers, expected at most 0; the operator takes: none" },
  } do
    it(("is checked: %s with %d and %d"):format(unpack(case)), function()
      local id = samples.tensor(ffi.C.MS_F32, { 2, 3 }, { 1, 2, 3, 4, 5, 6 })
      local out, _, text = samples.call(case[1], { id }, { 0, 1, 1, 1 }, { 1, 1 }, case[2], case[3])
      lib.ms_release(id)
      assert.is_nil(out)
      assert.are.equal(case[4], text)
    end)
  end

  it("is checked in calls without a list of arguments", function()
    local id = samples.tensor(ffi.C.MS_F32, { 2 }, { 1, 2 })
    assert.are.equal(0, tonumber(lib.ms_call1(lib.ms_op_find "unsqueeze", id)))
    assert.are.equal("unsqueeze: integer 1, 'dim', is missing; the operator takes: dim", ffi.string(lib.ms_error()))
    assert.are.equal(0, tonumber(lib.ms_call1f(lib.ms_op_find "exp", id, 2)))
    assert.are.equal("exp: got 1 numbers, expected at most 0; the operator takes: none", ffi.string(lib.ms_error()))
    lib.ms_release(id)
  end)

  it("has the defaults that the operator uses", function()
    local compared = 0
    each_sample(function(row, op, sample)
      local i, f = ffi.string(row.takes):gsub("^.*|%s*", ""):match "^([^;]*);?(.*)$"
      local whole = { inputs = sample.inputs, i = with_defaults(sample.i, i), f = with_defaults(sample.f, f) }
      if #whole.i + #whole.f == #sample.i + #sample.f then return end
      local values = samples.values(sample)
      local left_out, stated = samples.evaluate(op, sample, { values = values }), samples.evaluate(op, whole,
        { values = values })
      assert.are.same(left_out.out, stated.out, op.name .. " " .. sample.text)
      compared = compared + 1
    end)
    assert.is_true(compared > 30)
  end)

  it("comes with a sentence", function()
    each_sample(function(row, op) assert.are_not.equal("", ffi.string(row.doc), op.name) end)
  end)
end)
