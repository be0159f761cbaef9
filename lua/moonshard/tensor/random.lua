-- SPDX-License-Identifier: MIT
--- The random number generator. It is counter-based, so numbers do not depend on device (except for the last place of
--- normally distributed float64 numbers), number of threads or world size.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

local M = {}

--- Sets the seed of this process's generator. The generator is counter-based (Philox): a seed gives the same numbers on
--- every device (float64 up to the last place) and for any number of threads and world size.
---@param n integer  -2^53 to 2^53
function M.manual_seed(n)
  opts.expect(n, opts.whole, "manual_seed: argument")
  if n < -2 ^ 53 or n > 2 ^ 53 then
    errors.raise("manual_seed: argument is %g, expected a whole number from -2^53 to 2^53", n)
  end
  engine.lib.ms_manual_seed(n)
end

--- Sets a seed that differs from run to run, from the system's random numbers.
---@return integer  the seed
function M.seed()
  local file = assert(io.open("/dev/urandom", "rb"))
  local n = 0
  for _, byte in ipairs { file:read(6):byte(1, 6) } do n = n * 256 + byte end
  file:close()
  M.manual_seed(n)
  return n
end

--- The seed of this process's generator.
---@return integer
function M.initial_seed() return M.get_rng_state()[1] end

local pair = engine.ffi.new "double[2]"

--- The generator's state, for set_rng_state.
---@return number[]  {seed, offset}
function M.get_rng_state()
  engine.lib.ms_rng_get(pair, pair + 1)
  return { pair[0], pair[1] }
end

--- Restores the generator's state.
---@param s number[]  {seed, offset} from get_rng_state
function M.set_rng_state(s)
  opts.need(type(s) == "table" and type(s[1]) == "number" and type(s[2]) == "number", s, "{seed, offset}",
    "set_rng_state: argument")
  engine.lib.ms_rng_set(s[1], s[2])
end

opts.fix(M, { "manual_seed" })

return M
