-- SPDX-License-Identifier: MIT
--- The programs of docs/extending.md: the `lua` blocks of a section, in order, are one script; it runs alone, or over
--- as many ranks as `lua ranks=N` says, and prints the section's `text` block. `lua nodes=2` runs in two processes that
--- the section's `c` block, a transport, connects.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local text = process.read(process.root .. "/docs/extending.md")

-- The transport stands where the engine looks for the MPI plugin: beside a copy of the engine.
local function over_nodes(transport, script)
  local folder = process.temp_folder()
  local build = os.getenv "MOONSHARD_BUILD" or "build"
  if build:sub(1, 1) ~= "/" then build = process.root .. "/" .. build end
  process.write(folder .. "/plugin.c", transport)
  process.write(folder .. "/script.lua", script)
  local code = os.execute((("cd @ && mkdir messages && cp #/libmoonshard.so #/moonshard_cdef.h . && env -u LD_PRELOAD "
    .. "cc -std=gnu11 -Wall -Wextra -Werror -shared -fPIC -I%/runtime plugin.c -o libmoonshard_mpi.so"):gsub("[@#%%]",
    { ["@"] = folder, ["#"] = build, ["%"] = process.root })))
  assert.are.equal(0, code)
  local children = {}
  for rank = 0, 1 do
    children[rank] = process.start({ "luajit", folder .. "/script.lua" }, {
      stdout = folder .. "/out" .. rank, stderr = folder .. "/err" .. rank,
      env = { PMI_RANK = rank, PMI_SIZE = 2, MPI_LOCALRANKID = rank, MPI_LOCALNRANKS = 2, MOONSHARD_COMM_NODES = 2,
        MESSAGES = folder .. "/messages", MOONSHARD_LIB = folder .. "/libmoonshard.so",
        LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;;"):gsub("@", process.root) } })
  end
  local job = { code = 0, stdout = "", stderr = "" }
  for rank = 0, 1 do
    local ended = children[rank]:wait(60) or children[rank]:stop()
    if job.code == 0 then job.code = ended end
    job.stdout = job.stdout .. process.read(folder .. "/out" .. rank)
    job.stderr = job.stderr .. process.read(folder .. "/err" .. rank)
  end
  process.remove_folder(folder)
  return job
end

describe("docs/extending.md", function()
  local run = 0
  for heading, section in (text:gsub("\n## ", "\n\1") .. "\1"):gmatch "\1([^\n]+)([^\1]*)" do
    local script, world, nodes = {}, nil, false
    for info, block in section:gmatch "\n```lua([^\n]*)\n(.-)\n```" do
      script[#script + 1] = block
      world = world or tonumber(info:match "ranks=(%d+)")
      nodes = nodes or info:find("nodes=2", 1, true)
    end
    if #script > 0 and not section:find("\n```diff", 1, true) then           -- those: extending_engine_spec.lua
      run = run + 1
      it(("has a program for '%s' that prints what it says"):format(heading), function()
        local printed = section:match "\n```text\n(.-)```"
        assert.is_string(printed)
        local text_of = table.concat(script, "\n")
        local job = nodes and over_nodes(section:match "\n```c\n(.-)```", text_of) or ranks.run(world, text_of)
        assert.are.equal(0, job.code, job.stderr)
        assert.are.equal(printed, job.stdout)
        assert.are.equal("", job.stderr)
      end)
    end
  end

  it("has a program for each recipe that needs no C", function()
    assert.is_true(run >= 5)
  end)
end)
