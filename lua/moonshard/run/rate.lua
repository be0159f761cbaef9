-- SPDX-License-Identifier: MIT
--- The rate of this machine, for the model FLOPs utilization (MFU): the best of several products of two square matrices
--- of the run's dtype on its device, on all ranks at once, summed over the ranks. The size of the matrices is doubled
--- until a product takes 5 ms, or to 8192. The rate is measured once for each host, processor, device, dtype, number of
--- ranks and of threads, and kept in $XDG_CACHE_HOME/moonshard/rates.json (~/.cache if the variable is not set); remove
--- the file to measure again. A rate that a run exceeds is forgotten: other processes were busy when it was measured.
local read_json = require("moonshard.core.json").decode
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local json = require "moonshard.run.json"
local lfs = require "lfs"
local lib = require("moonshard.core.ffi").lib
local scope = require "moonshard.tensor.scope".scope
local util = require "moonshard.tensor.util"
require "moonshard.autograd.methods"

local M = {}

local ENOUGH, TOTAL, LARGEST = 5e-3, 0.1, 8192          -- seconds per product, total seconds, rows

--- Operations per second of this rank in products of two square matrices: the best of several. Reading an element of
--- the result waits for a GPU.
---@param device string
---@param dtype string
---@return number
function M.measure(device, dtype)
  local function seconds(n)
    return scope(function()
      local a = create.ones(n, n, { dtype = dtype, device = device })
      local best, began = math.huge, lib.ms_time()
      for k = 0, 100 do
        local before = lib.ms_time()
        scope(function() a:matmul(a):select(1, 1):select(1, 1):item() end)
        local now = lib.ms_time()
        if k > 0 then best = math.min(best, now - before) end   -- the first one warms up
        if k >= 3 and (best < ENOUGH or now - began > TOTAL) then break end
      end
      return best
    end)
  end
  return autograd.no_grad(function()
    local n = 256
    while true do
      local best = seconds(n)
      if best >= ENOUGH or n >= LARGEST then return 2 * n ^ 3 / best end
      n = n * 2
    end
  end)
end

local function cache_file()
  local cache, home = os.getenv "XDG_CACHE_HOME", os.getenv "HOME"
  if cache and cache:sub(1, 1) == "/" then return cache .. "/moonshard/rates.json" end
  return home and home ~= "" and home .. "/.cache/moonshard/rates.json"
end

local function read_cache(path)
  local file = path and io.open(path, "r")
  if not file then return {} end
  local ok, rates = pcall(read_json, file:read "*a")
  file:close()
  return ok and type(rates) == "table" and rates or {}
end

-- If the cache cannot be written, the next run measures again.
local function write_cache(path, rates)
  if not path then return end
  local folder = path:match "^(.*)/"
  lfs.mkdir(folder:match "^(.*)/")
  lfs.mkdir(folder)
  local temporary = ("%s.%.0f"):format(path, lib.ms_time() * 1e9)
  local file = io.open(temporary, "w")
  if not file then return end
  local ok = file:write(json(rates, nil, { separator = ",\n " }), "\n")
  if file:close() and ok then os.rename(temporary, path) else os.remove(temporary) end
end

local function key_of(facts, dtype)
  return ("%s, %s, %s, %s, %d ranks, %d threads"):format(facts.host or "?", facts.processor or "?",
    table.concat(facts.devices, "+"), dtype, facts.ranks, facts.threads)
end

--- Forgets a rate, so that the next run measures it.
---@param facts table  the facts of environment.lua
---@param dtype string
function M.forget(facts, dtype)
  local path = cache_file()
  local rates = read_cache(path)
  rates[key_of(facts, dtype)] = nil
  write_cache(path, rates)
end

--- Operations per second of all ranks together. Collective.
---@param facts table  the facts of environment.lua
---@param dtype string
---@param dist? table  moonshard.dist if there are several ranks
---@return number
function M.of(facts, dtype, dist)
  local rank = dist and dist.rank() or 0
  local path = cache_file()
  local key = key_of(facts, dtype)
  local known = rank == 0 and read_cache(path)[key] or nil
  if dist then known = dist.broadcast_object(known, { src = 0 }) end
  if type(known) == "number" and known > 0 then return known end
  local device = facts.devices[rank + 1]:match "^%S+"
  local sum = 0
  local peak = util.memory_stats(device).peak_allocated
  if dist then dist.barrier() end
  local mine = M.measure(device, dtype)
  for _, rate in ipairs(dist and dist.all_gather_object(mine) or { mine }) do sum = sum + rate end
  -- The measurement must not count as the run's peak memory.
  if util.memory_stats(device).peak_allocated > peak then util.reset_peak_memory_stats(device) end
  if rank == 0 then
    local rates = read_cache(path)
    rates[key] = sum
    write_cache(path, rates)
  end
  return sum
end

return M
