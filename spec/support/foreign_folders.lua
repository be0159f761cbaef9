-- SPDX-License-Identifier: MIT
--- A user's files and folders at the path where a checkpoint is to be saved: for checkpoint_folder_spec and
--- scripts/bench/durability.
local lfs = require "lfs"
local process = require "spec.support.process"

local M = {}

local function shell(command, ...) assert(os.execute(command:format(...)) == 0) end

--- Everything below a folder as one text: names, kinds, targets of links, modes, times, contents.
function M.everything(folder)
  return (process.shell(("cd '%s' && find . -printf '%%p %%y %%l %%m %%T@\\n' | sort && find . -type f | sort | xargs -r md5sum"):format(folder)))
end

-- A folder with a user's file `x`, and an index with this content and a correct checksum.
local function sealed(at, content)
  lfs.mkdir(at)
  process.write(at .. "/x", "mine")
  process.write(at .. "/index.json", require("moonshard.io.checkpoint_index").seal(
    '{"format":"moonshard checkpoint 2",' .. content .. "}"))
end

--- Things that a save refuses to replace: the name, a function that makes the thing at a path (with `save(path,
--- value)`), and the expected message.
M.list = {
  { "a file", function(at) process.write(at, "mine") end, "is not a folder" },
  { "a pipe", function(at) shell("mkfifo '%s'", at) end, "is not a folder" },
  { "a link to nothing", function(at) lfs.link("nothing", at, true) end,
  "is a symbolic link whose target cannot be reached" },
  { "a link to itself", function(at) lfs.link("checkpoint", at, true) end,
  "is a symbolic link whose target cannot be reached: Too many levels" },
  { "a link to a file", function(at)
    process.write(at .. ".mine", "mine")
    lfs.link("checkpoint.mine", at, true)
  end, "checkpoint.mine' is not a folder" },
  { "a link to a folder of other files", function(at)
    lfs.mkdir(at .. ".mine")
    process.write(at .. ".mine/thesis.txt", "mine")
    lfs.link("checkpoint.mine", at, true)
  end, "checkpoint.mine' exists and is not a checkpoint: it contains 'thesis.txt'" },
  { "a folder of other files", function(at)
    lfs.mkdir(at)
    process.write(at .. "/thesis.txt", "mine")
  end, "exists and is not a checkpoint: it contains 'thesis.txt'" },
  { "a folder with another program's index.json", function(at)
    lfs.mkdir(at)
    process.write(at .. "/index.json", '{"format": "theirs", "files": []}')
    process.write(at .. "/page.html", "mine")
  end, "exists and is not a checkpoint: it contains 'index.json'" },
  { "a folder with an index.json that is no JSON", function(at)
    lfs.mkdir(at)
    process.write(at .. "/index.json", "mine")
  end, "exists and is not a checkpoint" },
  { "a folder with a pipe as index.json", function(at)
    lfs.mkdir(at)
    shell("mkfifo '%s/index.json'", at)
  end, "exists and is not a checkpoint" },
  { "a checkpoint whose index is a link", function(at, save)
    save(at, 1)
    os.rename(at .. "/index.json", at .. ".index")
    lfs.link("../checkpoint.index", at .. "/index.json", true)
  end, "exists and is not a checkpoint" },
  { "a checkpoint with an extra file", function(at, save)
    save(at, 1)
    process.write(at .. "/notes.txt", "mine")
  end, "contains 'notes.txt', which its index does not list" },
  { "a checkpoint with an extra rank's file", function(at, save)
    save(at, 1)
    process.write(at .. "/rank-00001.safetensors", "mine")
  end, "contains 'rank%-00001.safetensors', which its index does not list" },
  { "a checkpoint with an extra folder", function(at, save)
    save(at, 1)
    lfs.mkdir(at .. "/logs")
  end, "contains 'logs', which its index does not list" },
  { "a checkpoint whose file is a link", function(at, save)
    save(at, 1)
    os.rename(at .. "/rank-00000.safetensors", at .. ".data")
    lfs.link("../checkpoint.data", at .. "/rank-00000.safetensors", true)
  end, "contains 'rank%-00000.safetensors'" },
  { "a lone file with the name of a rank's file", function(at)
    lfs.mkdir(at)
    process.write(at .. "/rank-00000-0123456789abcdef.safetensors", "mine")
  end, "exists and is not a checkpoint: it contains 'rank%-00000%-0123456789abcdef.safetensors'" },
  { "a checkpoint with a file named like those that a save moves into it", function(at, save)
    save(at, 1)
    process.write(at .. "/rank-00000-0123456789abcdef.safetensors", "mine")
  end, "contains 'rank%-00000%-0123456789abcdef.safetensors', which its index does not list" },
  { "a checkpoint whose index has a wrong checksum", function(at, save)
    save(at, 1)
    local text = process.read(at .. "/index.json")
    process.write(at .. "/index.json", (text:gsub('"bytes":%d', '"bytes":9')))
  end, "index.json in '.*checkpoint' is damaged: its checksum differs" },
  { "an index without a checksum that lists the user's file", function(at)
    lfs.mkdir(at)
    process.write(at .. "/x", "mine")
    process.write(at .. "/index.json", '{"format":"moonshard checkpoint 2","files":[{"name":"x","bytes":4}]}')
  end, "is damaged: its checksum differs" },
  { "an index of format 1 that lists the user's file", function(at)
    lfs.mkdir(at)
    process.write(at .. "/rank-00000.safetensors", "mine")
    process.write(at .. "/index.json",
      '{"format":"moonshard checkpoint 1","files":[{"name":"rank-00000.safetensors"}]}')
  end, "'rank%-00000.safetensors' in '.*' is not the file that its index.json lists" },
  { "an index with a correct checksum that lists the user's file", function(at) sealed(at, '"files":[{"name":"x","bytes":4}],"replaces":[]') end,
  "lists 'x', which is not the name of a checkpoint file" },
  { "an index with a correct checksum that lists a file of another rank",
  function(at) sealed(at, '"files":[{"name":"rank-00001.safetensors"}]') end,
  "lists 'rank%-00001.safetensors', which is not the name" },
  { "an index with a correct checksum that replaces the user's file", function(at) sealed(at, '"files":[],"replaces":["x"]') end,
  "has 'x' under 'replaces', which is not the name of a checkpoint file" },
  { "an index with a correct checksum that replaces a file outside",
  function(at) sealed(at, '"files":[],"replaces":["rank-00000.safetensors/../x"]') end, "which is not the name" },
}

return M
