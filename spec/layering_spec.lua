-- SPDX-License-Identifier: MIT
--- The house's order: a file includes or requires only what stands left of it, or beside it.
local lfs = require "lfs"
local process = require "spec.support.process"

--- One row a layer, left to right. Names are patterns on the path without its ending.
local engine = {
  { "runtime/moonshard", "cuda_shim" },
  { "runtime/base/.*", "runtime/tensor/dtype" },
  { "runtime/device/.*" },
  { "runtime/tensor/.*" },
  { "runtime/ops/.*", "kernels/.*" },
  { "runtime/autograd/.*" },
  { "runtime/comm/.*" },
  { "runtime/shard/.*" },
  { "runtime/train/.*" },
  { "runtime/io/.*" },
}
local front = {
  { "core/.*" },
  { "tensor", "tensor/.*", "autograd", "autograd/.*", "tools/testing", "tools/profiler" },
  { "dist", "dist/.*" },
  { "nn", "nn/.*", "parallel/precision" },
  { "optim", "optim/.*", "amp", "amp/.*", "data", "data/.*", "io/files" },
  { "parallel/.*", "io/.*" },
  { "fsdp", "init" },
  { "tools/.*", "models/.*", "run/.*" },
}

--- Calls against the order that are there on purpose, each with its reason. A row that no file needs any more fails
--- too.
local upward = {
  ["runtime/tensor/tensor -> runtime/ops/op"] = "a contiguous copy is the copy operator",
  ["runtime/tensor/tensor -> runtime/autograd/graph"] = "a tensor that dies drops its node and its leaf",
  ["runtime/tensor/ids -> runtime/ops/op"] = "filling from Lua's numbers casts by the operator",
  ["runtime/ops/op -> runtime/autograd/graph"] = "dispatch ends by recording the call",
  ["runtime/base/trace -> runtime/device/pool"] = "a trace has the bytes that are allocated",
  ["runtime/tensor/api -> runtime/autograd/graph"] = "tensors re-pointed at others lose their node",
  ["nn -> parallel/ddp/hooks"] = "nn.DDP stands among the layers",
  ["optim/zero -> parallel/ddp/buckets"] = "an optimizer over ranks cuts parameters as DDP does",
}

local function files_under(folder, ending, list)
  list = list or {}
  local path = process.root .. "/" .. folder
  if lfs.attributes(path, "mode") ~= "directory" then return list end
  local names = {}
  for name in lfs.dir(path) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    if name:sub(1, 1) ~= "." then
      if lfs.attributes(path .. "/" .. name, "mode") == "directory" then
        files_under(folder .. "/" .. name, ending, list)
      elseif name:match(ending) then
        list[#list + 1] = folder .. "/" .. name
      end
    end
  end
  return list
end

local function layer_of(layers, name)
  for depth, row in ipairs(layers) do
    for _, pattern in ipairs(row) do
      if name:match("^" .. pattern .. "$") then return depth end
    end
  end
end

--- Every use of one of our files by another: { file, user, used }, names without ending.
local function uses()
  local list = {}
  local here = {}
  for _, folder in ipairs { "runtime", "kernels" } do
    for _, file in ipairs(files_under(folder, "%.[chu]+$")) do here[#here + 1] = file end
  end
  for _, file in ipairs(here) do
    local folder = file:match "^(.*)/"
    for included in process.read(process.root .. "/" .. file):gmatch '#%s*include%s+"([^"]+)"' do
      local found
      for _, base in ipairs { "runtime", "kernels" } do
        local path = base .. "/" .. included
        while path:find "[^/]+/%.%./" do path = path:gsub("[^/]+/%.%./", "", 1) end
        if not found and lfs.attributes(process.root .. "/" .. path) then found = path end
      end
      list[#list + 1] = { layers = engine, file = file, user = file:match "^(.*)%.",
        used = (found or included):match "^(.*)%." }
    end
  end
  for _, file in ipairs(files_under("lua/moonshard", "%.lua$")) do
    local user = file:match "^lua/moonshard/(.*)%.lua$":gsub("/init$", "")
    local code = process.read(process.root .. "/" .. file):gsub("%-%-[^\n]*", "")
    for name in code:gmatch 'require%s*%(?%s*["\']moonshard([%w_.]*)["\']%s*[^%s.]' do
      local used = name == "" and "init" or name:sub(2):gsub("%.", "/")
      list[#list + 1] = { layers = front, file = file, user = user, used = used }
    end
  end
  return list
end

describe("layering", function()
  it("gives every file of the engine and the front end a place", function()
    local homeless = {}
    for _, folder in ipairs { "runtime", "kernels" } do
      for _, file in ipairs(files_under(folder, "%.[chu]+$")) do
        if not layer_of(engine, file:match "^(.*)%.") then homeless[#homeless + 1] = file end
      end
    end
    for _, file in ipairs(files_under("lua/moonshard", "%.lua$")) do
      local name = file:match "^lua/moonshard/(.*)%.lua$":gsub("/init$", "")
      if not layer_of(front, name) then homeless[#homeless + 1] = file end
    end
    assert.are.equal("", table.concat(homeless, " "))
  end)

  it("goes left only", function()
    local wrong, needed, seen = {}, {}, 0
    for _, use in ipairs(uses()) do
      seen = seen + 1
      local from, to = layer_of(use.layers, use.user), layer_of(use.layers, use.used)
      local pair = use.user .. " -> " .. use.used
      if from and to and to > from then
        needed[pair] = true
        if not upward[pair] then
          wrong[#wrong + 1] = ("%s uses %s, which stands right of it"):format(use.file, use.used)
        end
      elseif not to then
        wrong[#wrong + 1] = ("%s uses %s, which has no place"):format(use.file, use.used)
      end
    end
    for pair in require("pl.tablex").sort(upward) do
      if not needed[pair] then wrong[#wrong + 1] = "no longer needed among the exceptions: " .. pair end
    end
    assert.is_true(seen > 10)
    assert.are.equal("", table.concat(wrong, "\n"))
  end)

  it("keeps one public header, without callbacks or structs by value", function()
    local text = process.read(process.root .. "/runtime/moonshard.h"):gsub("//[^\n]*", ""):gsub("/%*.-%*/", "")
    assert.is_nil(text:match "%(%s*%*%s*[%w_]*%s*%)%s*%(", "a function pointer in moonshard.h")
    for _, name in ipairs { "ms_info", "ms_args", "ms_event", "ms_memory", "ms_owner", "ms_state" } do
      assert.is_nil(text:match("MS_API[^;]-[(,]%s*" .. name .. "%s+[%w_]+%s*[,)]"), name .. " by value")
      assert.is_nil(text:match("MS_API%s+" .. name .. "%s+[%w_]+%s*%("), name .. " by value")
    end
  end)
end)
