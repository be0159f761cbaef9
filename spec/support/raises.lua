-- SPDX-License-Identifier: MIT
--- raises(text, fn, …): fn(…) must fail with exactly this message after file and line.
local assert = require "luassert"
local message = require "spec.support.message"

return function(text, fn, ...) assert.equal(text, message(fn, ...)) end
