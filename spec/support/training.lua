-- SPDX-License-Identifier: MIT
--- Helpers for specs of scripts/train.lua: runs with a tiny model, and the contents of their folders.
local cjson = require "cjson"
local lfs = require "lfs"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local M = {}

M.TINY = { "--dim", 16, "--heads", 2, "--layers", 2, "--context", 16, "--batch", 4, "--sample", 0, "--eval-every",
  0, "--warmup", 3 }

--- Runs train.lua over n ranks (0: plain luajit) with a tiny shape and further options.
function M.train(n, name, options, opts)
  local args, base = {}, { unpack(M.TINY) }
  for _, a in ipairs { "--data", M.folder .. "/text", "--out", M.folder .. "/" .. name } do base[#base + 1] = a end
  for k = 1, #base, 2 do
    local said = false
    for _, a in ipairs(options or {}) do said = said or a == base[k] end
    if not said then
      args[#args + 1] = base[k]
      args[#args + 1] = base[k + 1]
    end
  end
  for _, a in ipairs(options or {}) do args[#args + 1] = a end
  opts = opts or {}
  opts.args = args
  return ranks.run(n, process.root .. "/scripts/train.lua", opts)
end

function M.metrics(name)
  local steps, validations = {}, {}
  for line in io.lines(M.folder .. "/" .. name .. "/metrics.jsonl") do
    local object = cjson.decode(line)
    local list = object.val_loss and validations or steps
    list[#list + 1] = object
    object.line = line
  end
  return steps, validations
end

function M.losses(name)
  local list = {}
  for k, m in ipairs((M.metrics(name))) do list[k] = m.line:match '"loss": ([^,]+)' end
  return list
end

function M.checkpoint(name, step)
  return process.read(("%s/%s/step-%06d.safetensors"):format(M.folder, name, step))
end

function M.ok(job)
  assert(job.code == 0, job.stderr)
  return job
end

-- A text with some regularity, so that its loss decreases.
function M.sentences(n)
  local words, seed, parts = { "the", "moon", "shard", "turns", "slowly", "over", "a", "quiet", "sea" }, 7, {}
  for k = 1, n do
    seed = (seed * 1103515245 + 12345) % 2 ^ 31
    parts[k] = words[math.floor(seed / 65536) % #words + 1]
  end
  return table.concat(parts, " ")
end

--- Makes M.folder, in which each run has its folder, with a text to train on; returns its path.
function M.begin()
  M.folder = process.temp_folder()
  lfs.mkdir(M.folder .. "/text")
  process.write(M.folder .. "/text/a", M.sentences(400))
  process.write(M.folder .. "/text/b", M.sentences(100):upper())
  return M.folder
end

return M
