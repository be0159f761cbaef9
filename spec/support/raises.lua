-- SPDX-License-Identifier: MIT
--- raises(text, fn, …): fn(…) fails with exactly this message, behind file and line.
local assert = require "luassert"
local message = require "spec.support.message"

return function(text, fn, ...) assert.equal(text, message(fn, ...)) end
