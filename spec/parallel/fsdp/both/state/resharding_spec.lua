-- SPDX-License-Identifier: MIT
--- State moves between all ways to shard a model, and between numbers of ranks, exactly: sharded and full state dicts
--- of models and optimizers, fsdp.save and fsdp.load, also of hybrid strategies (docs/semantics.md#state-dicts).
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"
local kinds = require "spec.support.state_kinds"

for world = 1, 4 do
  ranks.describe(world, ("state on %d ranks"):format(world), function()
    local differs = {}
    for k, from in ipairs(kinds.kinds(world)) do
      for _, kind in ipairs { "full", "sharded" } do
        -- Full state dicts hold whole tensors in every wrapping, and 1 or 2 ranks cut tensors at fewer places than 3
        -- or 4. In these cases each state is loaded into every third wrapping; each wrapping still loads a third of the
        -- states.
        local sparse = kind == "full" or world < 3
        it(("is loaded into other wrappings, %s: %s"):format(kind, from[1]), function()
          local ms = require "moonshard"
          local model, optim = kinds.make(from, 1)
          kinds.train(model, optim, 1, 2)
          local want = kinds.contents(model, optim)
          assert.is_true(#want > 1000)
          local sd, osd = ms.fsdp.state_dict(model, { type = kind }),
            ms.fsdp.optim_state_dict(model, optim, { type = kind })
          local last
          for j, to in ipairs(kinds.kinds(world)) do
            if sparse and (k + j) % 3 ~= 0 then goto continue end
            local other, other_optim = kinds.make(to, 2)
            kinds.train(other, other_optim, 5, 5)
            if not differs[j] then                      -- the same model in every test
              assert.are_not.equal(want, kinds.contents(other, other_optim))
              differs[j] = true
            end
            local missing, unexpected = ms.fsdp.load_state_dict(other, sd)
            assert.same({ {}, {} }, { missing, unexpected })
            ms.fsdp.load_optim_state_dict(other, other_optim, osd)
            assert.equal(want, kinds.contents(other, other_optim), to[1])
            -- The loaded model continues training like the others.
            kinds.train(other, other_optim, 3, 3)
            last = last or ms.fsdp.state_dict(other)
            for name, t in pairs(ms.fsdp.state_dict(other)) do ms.testing.assert_close(t, last[name]) end
            ::continue::
          end
        end)
      end
    end

    it("of another shape is refused, by every rank alike", function()
      local ms = require "moonshard"
      local a, b = ms.fsdp.FSDP(ms.nn.Linear(4, 3), { use_orig_params = true }), ms.fsdp.fully_shard(ms.nn.Linear(3, 4))
      local ok, message = pcall(ms.fsdp.load_state_dict, b, ms.fsdp.state_dict(a, { type = "sharded" }))
      assert.is_false(ok)
      assert.truthy(message:find(
        "size mismatch for weight: copying a param with shape [3, 4] from checkpoint, the shape in current model is [4, 3]",
        1, true), message)
      ok, message = pcall(ms.fsdp.load_state_dict, a, { weight = ms.zeros(4, 3), bias = ms.zeros(3) })
      assert.is_false(ok)
      assert.truthy(message:find(
        "copying a param with shape [4, 3] from checkpoint, the shape in current model is [3, 4]", 1, true), message)
    end)
  end)
end

-- One job saves the model in every way possible with its number of ranks, twice: by fsdp.save, and full state dicts by
-- ms.save. Another job loads what those of other numbers of ranks have saved, and prints each number that it has read.
local JOB = [[
  local ms, kinds, process = require "moonshard", require "spec.support.state_kinds", require "spec.support.process"
  local what, folder = os.getenv "RESHARD_DOES", os.getenv "RESHARD_FOLDER"
  local rank, world = ms.dist.rank(), ms.dist.world_size()

  local function full_file(model, optim)
    local all = {}
    for name, t in pairs(ms.fsdp.state_dict(model)) do all["model." .. name] = t:contiguous() end
    for name, entry in pairs(ms.fsdp.optim_state_dict(model, optim).state) do
      for key, v in pairs(entry) do
        all["optim/" .. name .. "/" .. key] = ms.is_tensor(v) and v:contiguous() or ms.tensor({ v }, { dtype = "float64" })
      end
    end
    return all
  end

  local function load_full(path, model, optim)
    local sd, osd = {}, { state = {}, param_groups = ms.fsdp.optim_state_dict(model, optim).param_groups }
    for name, t in pairs(ms.load(path)) do
      local of, key = name:match "^optim/(.*)/(.-)$"
      if of then
        osd.state[of] = osd.state[of] or {}
        osd.state[of][key] = key == "step" and t:item() or t
      else
        sd[name:match "^model%.(.*)$"] = t
      end
    end
    ms.fsdp.load_state_dict(model, sd)
    ms.fsdp.load_optim_state_dict(model, optim, osd)
  end

  if what == "save" then
    for k, kind in ipairs(kinds.kinds(world)) do
      local model, optim = kinds.make(kind, k)
      kinds.train(model, optim, 1, 2)
      local path = ("%s/%d-%d"):format(folder, world, k)
      ms.fsdp.save(path, model, optim, { extra = { kind = kind[1] } })
      local all, text = full_file(model, optim), kinds.contents(model, optim)
      if rank == 0 then
        ms.save(path .. ".safetensors", all)
        process.write(path .. ".txt", text)
      end
    end
    return
  end
  local function read(from, k, saved)
    local path = ("%s/%d-%d"):format(folder, from, k)
    local want = process.read(path .. ".txt")
    -- Each saved way is loaded in three ways; over all pairs of jobs, most pairs of ways occur.
    local ways = kinds.kinds(world)
    for n, load in ipairs {
      function(model, optim) assert(ms.fsdp.load(path, model, optim).kind == saved[1]) end,
      function(model, optim) assert(ms.fsdp.load(path, model, optim).kind == saved[1]) end,
      function(model, optim) load_full(path .. ".safetensors", model, optim) end,
    } do
      local kind = ways[(k * 2 + from + 3 * world + 4 * n) % #ways + 1]
      local model, optim = kinds.make(kind, 20)
      load(model, optim)
      local got = kinds.contents(model, optim)
      if got ~= want then error(("%s of %d ranks into %s of %d: other numbers"):format(saved[1], from, kind[1], world), 0) end
      kinds.train(model, optim, 3, 3)
    end
  end
  for from = 1, 4 do
    if from ~= world then
      for k, saved in ipairs(kinds.kinds(from)) do read(from, k, saved) end
      ms.dist.barrier()
      if rank == 0 then print("read " .. from) end
    end
  end
]]

describe("state of every way to shard", function()
  local folder
  local loaded = {}                                     -- the jobs that load, by number of ranks

  local function run(world, what)
    return ranks.run(world, JOB, { env = { RESHARD_DOES = what, RESHARD_FOLDER = folder } })
  end

  setup(function()
    folder = process.temp_folder()
    for world = 1, 4 do
      local r = run(world, "save")
      assert.equal(0, r.code, r.stderr)
    end
  end)
  teardown(function() process.remove_folder(folder) end)

  for to = 1, 4 do
    for from = 1, 4 do
      if from ~= to then
        it(("of %d ranks is read by %d, in any other way, to the bit"):format(from, to), function()
          loaded[to] = loaded[to] or run(to, "load")
          assert.is_truthy(loaded[to].stdout:find(("read %d\n"):format(from), 1, true), loaded[to].stderr)
          if from == (to == 4 and 3 or 4) then assert.equal(0, loaded[to].code, loaded[to].stderr) end
        end)
      end
    end
  end
end)
