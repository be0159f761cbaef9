-- SPDX-License-Identifier: MIT
--- luajit save_once.lua KIND PATH VALUE: saves once; every element is VALUE. For durability_spec, which kills it or
--- makes a system call fail. KIND: `file` (ms.save), `folder` (fsdp.save of a model), `large` (a file that is
--- written without the page cache), `inside` (as folder, but strace makes renameat2 fail). Two attempts to open files
--- that do not exist mark the beginning and the end of the save. Prints when the save begins, and its result. As a
--- module it returns `save(kind, path, value)`, which prepares such a save.
local root = arg and arg[0] and arg[0]:match "^(.*)spec/support/save_once%.lua$"
if root then package.path = ("@lua/?.lua;@lua/?/init.lua;"):gsub("@", root) .. package.path end
local ms = require "moonshard"

local M = {}

function M.save(k, to, v)
  if k == "folder" or k == "inside" then
    local model = ms.nn.Sequential(ms.nn.Linear(3, 4), ms.nn.Linear(4, 2))
    if ms.dist.world_size() > 1 then ms.fsdp.fully_shard(model) end
    ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:fill_(v) end end)
    return function() ms.fsdp.save(to, model, nil, { extra = { value = v } }) end
  end
  local tensors = { x = ms.full({ k == "large" and 2 ^ 21 or 5 }, v), y = ms.full({ 3 }, v) }
  return function() ms.save(to, tensors, { metadata = { value = tostring(v) } }) end
end

if not root then return M end
local kind, path, value = arg[1], arg[2], tonumber(arg[3])
-- Saves once before the marks, so that the traced save loads no modules. A large save would start a thread, in which
-- strace counts system calls from 1 again: a small one loads the same modules.
M.save(kind == "large" and "file" or kind, path .. ".other", value)()
local save = M.save(kind, path, value)
io.write "begins\n"
io.flush()
io.open "/moonshard-save-begins"
local ok, message = pcall(save)
io.open "/moonshard-save-ends"
io.write(ok and "saved" or "failed: " .. tostring(message), "\n")
io.flush()
os.exit(ok and 0 or 3, true)
