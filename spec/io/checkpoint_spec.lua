-- SPDX-License-Identifier: MIT
--- fsdp.save and fsdp.load: load returns what save wrote, on any number of ranks; bad checkpoints are refused, each
--- with its reason.
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"

local function load() return require "moonshard" end

local failure = require "spec.support.message"

local support = require "spec.support.checkpoint_model"
local make, train, contents = support.make, support.train, support.contents

local columns = function(_, p) return #p.shape == 2 and p.shape[2] % 3 == 0 and load().fsdp.Shard(2) or nil end

local KINDS = {
  { "rows", function() return {} end },
  { "columns", function() return load().dist.world_size() == 3 and { shard_placement_fn = columns }
  or { reshard_after_forward = false } end },
  { "no sharding", function() return nil end },
}
-- Options of fsdp.FSDP, which divides a unit's flat parameter at any element.
local CLASSIC = {
  { "flat parameters", { } }, { "original parameters", { use_orig_params = true } },
  { "no_shard", { sharding_strategy = "no_shard" } },
}

local function make_classic(options)
  local ms = load()
  local model = make()
  for _, name in ipairs { "a", "b" } do model[name] = ms.fsdp.FSDP(model[name], options) end
  model = ms.fsdp.FSDP(model, options)
  return model, ms.optim.AdamW(model:parameters(), { lr = 1 / 3, amsgrad = true })
end

for _, world in ipairs { 1, 2, 3, 4 } do
  ranks.describe(world, ("a sharded checkpoint of %d ranks"):format(world), function(rank)
    -- Equal on every rank, and different from other jobs.
    local mine = ("moonshard-checkpoint-%d"):format(process.parent())
    local path = "/tmp/" .. mine
    local lfs = require "lfs"

    local function clean()
      if rank ~= 0 then return end
      for _, p in ipairs { path } do
        if lfs.attributes(p, "mode") == "directory" then
          for name in lfs.dir(p) do if name:sub(1, 1) ~= "." then os.remove(p .. "/" .. name) end end
          lfs.rmdir(p)
        end
      end
    end
    setup(clean)
    teardown(clean)

    for _, from in ipairs(KINDS) do
      for _, to in ipairs(KINDS) do
        it(("is saved from %s and loaded into %s, to the bit"):format(from[1], to[1]), function()
          local ms = load()
          local model, optim = make(from[2]())
          train(model, optim, 1, 3)
          ms.fsdp.save(path, model, optim, { extra = { step = 3, text = "é", list = { 1, 0.1 }, on = true } })
          local want = contents(model, optim)
          train(model, optim, 4, 5)
          local later = contents(model, optim)
          local other, its = make(to[2]())
          ms.no_grad(function() for _, p in ipairs(other:parameters()) do p:fill_(0) end end)
          local extra, missing, unexpected = ms.fsdp.load(path, other, its)
          assert.same({ step = 3, text = "é", list = { 1, 0.1 }, on = true }, extra)
          assert.same({ {}, {} }, { missing, unexpected })
          assert.same(want, contents(other, its))
          train(other, its, 4, 5)
          if from[1] == to[1] then assert.same(later, contents(other, its)) end
          local files = {}
          for name in lfs.dir(path) do
            if name:sub(1, 1) ~= "." then files[#files + 1] = name end
          end
          assert.equal(world + 1, #files)
        end)
      end
    end

    for _, kind in ipairs(CLASSIC) do
      it(("is loaded from FSDP's %s into rows and back, to the bit"):format(kind[1]), function()
        local ms = load()
        local model, optim = make_classic(kind[2])
        train(model, optim, 1, 2)
        ms.fsdp.save(path, model, optim)
        local want = contents(model, optim)
        local rows, its = make {}
        ms.fsdp.load(path, rows, its)
        assert.same(want, contents(rows, its))
        ms.fsdp.save(path, rows, its)
        local other, optim_2 = make_classic(kind[2])
        ms.fsdp.load(path, other, optim_2)
        assert.same(want, contents(other, optim_2))
      end)
    end

    it("keeps a gradient scaler's state beside them, from which the scaler continues", function()
      local ms = load()
      for _, class in ipairs { "GradScaler", "ShardedGradScaler" } do
        local function step(scaler, model, optim, factor)
          scaler:scale(model(ms.ones(2, 6)):sum() * factor):backward()
          local done = scaler:step(optim)
          scaler:update()
          optim:zero_grad()
          return done
        end
        local function train_with(scaler, model, optim, from, to)
          local told = {}
          for n = from, to do
            told[#told + 1] = { step(scaler, model, optim, n == 4 and math.huge or 1) or false, scaler:get_scale() }
          end
          return told
        end
        local options = { init_scale = 64, growth_interval = 2, backoff_factor = 0.25 }
        local model, optim = make {}
        local scaler = ms.amp[class](options)
        train_with(scaler, model, optim, 1, 3)                      -- the scale has grown once, one step ago
        ms.fsdp.save(path, model, optim, { extra = { scaler = scaler:state_dict() } })
        local want = train_with(scaler, model, optim, 4, 7)
        assert.is_false(want[1][1])
        local other, its = make {}
        local again = ms.amp[class]()
        again:load_state_dict(ms.fsdp.load(path, other, its).scaler)
        assert.equal(128, again:get_scale())
        assert.same(want, train_with(again, other, its, 4, 7))
        assert.same(contents(model, optim), contents(other, its))
      end
    end)

    it("replaces the previous checkpoint, and nothing else", function()
      local ms = load()
      local model = make {}
      ms.fsdp.save(path, model)
      ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:fill_(2) end end)
      ms.fsdp.save(path, model)
      local other = make {}
      ms.fsdp.load(path, other)
      assert.is_true(other.a.weight:full_tensor():equal(ms.full({ 9, 6 }, 2)))
      local around = {}
      for name in lfs.dir "/tmp" do
        if name:find(mine .. ".tmp", 1, true) then around[#around + 1] = name end
      end
      assert.same({}, around)
      local message = failure(ms.fsdp.save, "/tmp", model)
      assert.matches("the folder '/tmp' exists and is not a checkpoint", message)
      assert.matches("cannot create '/nowhere/x'", failure(ms.fsdp.save, "/nowhere/x", model))
      assert.matches("cannot open '/nowhere/x/index.json'", failure(ms.fsdp.load, "/nowhere/x", model))
    end)

    it("reports what is missing, unexpected or of another shape", function()
      local ms = load()
      local model = make {}
      ms.fsdp.save(path, model)
      local other = make()
      other.d = ms.nn.Parameter(ms.ones(2))
      ms.fsdp.fully_shard(other)
      assert.matches("lacks 'd', which the model has$", failure(ms.fsdp.load, path, other))
      local _, missing = ms.fsdp.load(path, other, nil, { strict = false })
      assert.same({ "d" }, missing)
      other = make()
      other.c = ms.nn.Linear(12, 1, { bias = false })
      assert.matches("has 'c.bias', which the model lacks$", failure(ms.fsdp.load, path, other))
      other = make()
      other.c = ms.nn.Linear(12, 2)
      assert.matches("'c.weight' has shape %[1, 12%] in '.*', but %[2, 12%] in the model",
        failure(ms.fsdp.load, path, other))
      local again, optim = make {}
      assert.matches("has no optimizer state; fsdp.save stores it", failure(ms.fsdp.load, path, again, optim))
    end)

    it("holds shared parameters once and gives them to every name", function()
      local ms = load()
      local function tied()
        ms.manual_seed(rank + 1)
        local m = ms.nn.Sequential(ms.nn.Linear(4, 4), ms.nn.Linear(4, 4))
        m[2].weight = m[1].weight
        return ms.fsdp.fully_shard(m, { check_values = false })
      end
      local a, b = tied(), tied()
      ms.fsdp.save(path, a)
      ms.no_grad(function() b[1].weight:fill_(0) end)
      ms.fsdp.load(path, b)
      assert.is_true(b[2].weight:full_tensor():equal(a[1].weight:full_tensor()))
    end)

    it("converts to the dtype that the model has", function()
      local ms = load()
      local a = make {}
      ms.fsdp.save(path, a)
      local b = make {}
      b:to "float64"
      ms.fsdp.load(path, b)
      assert.is_true(b.a.weight:full_tensor():equal(a.a.weight:full_tensor():double()))
    end)
  end)
end

describe("a sharded checkpoint", function()
  local cjson = require "cjson"
  local checkpoint_index
  local lfs = require "lfs"
  local ms, base, work

  local JOB = [[
    local ms, support = require "moonshard", require "spec.support.checkpoint_model"
    local what, path, out = os.getenv "CHECKPOINT_DOES", os.getenv "CHECKPOINT_PATH", os.getenv "CHECKPOINT_OUT"
    local model, optim = support.make {}
    if what == "save" then
      support.train(model, optim, 1, 3)
      ms.fsdp.save(path, model, optim)
    else
      ms.fsdp.load(path, model, optim)
    end
    local all = support.contents(model, optim)
    local lines = {}
    local function flatten(name, x)
      if type(x) ~= "table" then lines[#lines + 1] = ("%s %.17g"):format(name, x) return end
      for k, v in ms.sorted_pairs(x) do flatten(name .. " " .. k, v) end
    end
    flatten("", all)
    if ms.dist.rank() == 0 then
      local f = io.open(out, "w")
      f:write(table.concat(lines, "\n"))
      f:close()
    end
  ]]

  setup(function()
    ms = require "moonshard"
    checkpoint_index = require "moonshard.io.checkpoint_index"
    work = process.temp_folder()
    base = work .. "/base"
    local model, optim = make {}
    train(model, optim, 1, 2)
    ms.fsdp.save(base, model, optim)
  end)
  teardown(function() process.remove_folder(work) end)

  local saved = {}                        -- the contents of a checkpoint, by number of ranks
  for _, pair in ipairs { { 4, 1 }, { 4, 3 }, { 1, 4 }, { 3, 2 } } do
    it(("of %d ranks is read by %d, to the bit"):format(pair[1], pair[2]), function()
      local from, to = pair[1], pair[2]
      local function contents_after(world, what)
        local out = ("%s/%d-%d-%s"):format(work, from, to, what)
        local r = ranks.run(world, JOB, { env = { CHECKPOINT_DOES = what, CHECKPOINT_PATH = work .. "/of" .. from,
          CHECKPOINT_OUT = out } })
        assert.equal(0, r.code, r.stderr)
        return process.read(out)
      end
      saved[from] = saved[from] or contents_after(from, "save")
      assert.is_true(#saved[from] > 1000)
      -- Losses are summed over ranks in different orders; the saved state is equal.
      assert.equal(saved[from], contents_after(to, "load"))
    end)
  end

  -- Loads a copy of the base checkpoint that change(path) has damaged. Returns the message after the path, and whether
  -- the model is unchanged.
  local function broken(change)
    local path = work .. "/broken"
    if lfs.attributes(path, "mode") then process.remove_folder(path) end
    lfs.mkdir(path)
    for name in lfs.dir(base) do
      if name:sub(1, 1) ~= "." then process.write(path .. "/" .. name, process.read(base .. "/" .. name)) end
    end
    change(path)
    local model, optim = make {}
    local before = model.a.weight:full_tensor()
    local message = failure(ms.fsdp.load, path, model, optim)
    assert.equal("load: '" .. path, message:sub(1, #path + 7))
    return message:sub(#path + 8), before:equal(model.a.weight:full_tensor())
  end

  local function index(change)
    return function(path)
      local t = cjson.decode(process.read(path .. "/index.json"))
      change(t)
      t.sum = nil
      process.write(path .. "/index.json", checkpoint_index.seal(cjson.encode(t)))
    end
  end

  local function index_text(change)
    return function(path) process.write(path .. "/index.json", change(process.read(path .. "/index.json"))) end
  end

  it("refuses an index of which any one byte differs", function()
    local model, optim = make {}
    local text = process.read(base .. "/index.json")
    finally(function() process.write(base .. "/index.json", text) end)
    for at = 1, #text do
      local flipped = string.char(bit.bxor(text:byte(at), 2 ^ (at % 8)))
      process.write(base .. "/index.json", text:sub(1, at - 1) .. flipped .. text:sub(at + 1))
      local ok, message = pcall(ms.fsdp.load, base, model, optim)
      if ok then error(("byte %d of %d makes no difference"):format(at, #text), 0) end
      assert.is_truthy(tostring(message):find("load: '" .. base, 1, true), message)
    end
  end)

  local FILE = "rank-00000.safetensors"
  local cases = {
    { "an index that is no JSON", function(path) process.write(path .. "/index.json", "{") end,
    "is not a valid checkpoint: index.json is not valid JSON" },
    { "an index of another format", index(function(t) t.format = "x" end),
    "its format is 'x', expected 'moonshard checkpoint 2'" },
    { "no list of files", index(function(t) t.files = nil end), "index.json lacks the list 'files' or the object 'tensors'" },
    { "another number of files", index(function(t) t.world = 2 end), "lists 1 files for 2 ranks" },
    { "a file outside", index(function(t) t.files[1].name = "../x" end), "file 1 is named '../x'" },
    { "a file without size", index(function(t) t.files[1].bytes = -1 end), "has %-1 bytes" },
    { "a hash that is none", index(function(t) t.files[1].hash = "zz" end), "has the hash 'zz'" },
    { "a tensor without shape", index(function(t) t.tensors["model.a.weight"].shape = nil end),
    "tensor 'model.a.weight' lacks its shape" },
    { "a fraction in a shape", index(function(t) t.tensors["model.a.weight"].shape[1] = 1.5 end), "size 1 is 1.5" },
    { "no pieces", index(function(t) t.tensors["model.a.weight"].pieces = {} end), "'model.a.weight' has no pieces" },
    { "a piece of 3 numbers", index(function(t) t.tensors["model.a.weight"].pieces[1][4] = nil end),
    "is not a list of 4 numbers" },
    { "a piece in no file", index(function(t) t.tensors["model.a.weight"].pieces[1][1] = 9 end), "is in file 9, but there are 1 files" },
    { "a piece cut along no dimension", index(function(t) t.tensors["model.a.weight"].pieces[1][2] = 3 end),
    "is cut along dimension 3" },
    { "a gap", index(function(t) t.tensors["model.a.weight"].pieces[1][3] = 1 end),
    "begins at 1, but the piece before it ends at 0" },
    { "too few rows", index(function(t) t.tensors["model.a.weight"].pieces[1][4] = 5 end), "end at position 5, expected 9" },
    { "a tensor that no file has",
    index(function(t) t.tensors["optim.b.weight.more"] = t.tensors["model.b.weight"] end),
      "lacks tensor 'optim.b.weight.more'" },
    { "another dtype", index(function(t) t.tensors["model.b.weight"].dtype = "float64" end),
    "is float32 %[12, 9%], but float64" },
    { "a missing tensor", index(function(t) t.tensors["model.b.weight"] = nil end), "lacks 'b.weight'" },
    { "an index whose sum is missing", index_text(function(text) return "{" .. text:match '^[^,]*,\n(.*)$' end),
    "index.json is damaged" },
    { "an index whose sum has another name", index_text(function(text) return (text:gsub('"sum"', '"sun"')) end),
    "index.json is damaged" },
    { "an index with a sum that says it is of the version before",
    index_text(function(text) return (text:gsub("checkpoint 2", "checkpoint 1")) end),
      "index.json is damaged" },
    { "another learning rate", index_text(function(text) return (text:gsub('"lr":0.3', '"lr":0.4')) end),
    "index.json is damaged" },
    { "aliases that are a number", index(function(t) t.aliases = 3 end), "aliases are a number" },
    { "an optimizer that is a text", index(function(t) t.optimizer = "x" end), "its optimizer is a string" },
    { "a state that is a number", index(function(t) t.optimizer.state = 1 end), "the optimizer's state is a number" },
    { "a state's step that is a list", index(function(t) t.optimizer.state["a.weight"].step = {} end),
    "'step' of 'a.weight' is a table" },
    { "no param_groups", index(function(t) t.optimizer.param_groups = nil end), "param_groups is nil" },
    { "param_groups of numbers", index(function(t) t.optimizer.param_groups = { 1, 2 } end),
    "group 1 of param_groups has no list of params" },
    { "a group without params", index(function(t) t.optimizer.param_groups[1].params = nil end),
    "group 1 of param_groups has no list of params" },
    { "a parameter that is a number", index(function(t) t.optimizer.param_groups[1].params[2] = 5 end),
    "parameter 2 of group 1 is a number" },
    { "an option that is an object", index(function(t) t.optimizer.param_groups[1].lr = { x = 1 } end),
    "option 'lr' of group 1 is a table" },
    { "an option of another kind", index(function(t) t.optimizer.param_groups[1].lr = "x" end),
    ": AdamW: lr is a string" },
    { "a file of another save", function(path)
      local other, its = make {}
      train(other, its, 1, 3)
      ms.fsdp.save(work .. "/other", other, its)
      process.write(path .. "/" .. FILE, process.read(work .. "/other/" .. FILE))
    end, "file 'rank%-00000.safetensors' is not the one that was saved: its checksum is %x+, but %x+ in the index" },
    { "a missing file", function(path) os.remove(path .. "/" .. FILE) end, "file '" .. FILE:gsub("%p", "%%%0")
    .. "' is missing" },
    { "a cut file", function(path) process.write(path .. "/" .. FILE, process.read(path .. "/" .. FILE):sub(1, -2)) end,
    "bytes, but %d+ in the index" },
  }
  for _, case in ipairs(cases) do
    it("is refused with " .. case[1] .. ", and nothing changes", function()
      local message, same = broken(case[2])
      assert.matches(case[3], message)
      assert.is_true(same)
    end)
  end

  it("is refused by an optimizer of another kind, and nothing changes", function()
    local model = make {}
    local before = model.a.weight:full_tensor()
    local message = failure(ms.fsdp.load, base, model, ms.optim.SGD(model:parameters(), { lr = 1, momentum = 0.9 }))
    assert.matches("SGD: load: 'a%.[%w.]+' has 'exp_avg' in the state, which SGD does not keep; was the state made by another optimizer%?", message)
    assert.is_true(before:equal(model.a.weight:full_tensor()))
  end)

  it("is refused with one bit flipped in the data", function()
    local message = broken(function(path)
      local text = process.read(path .. "/" .. FILE)
      local at = #text - 5
      process.write(path .. "/" .. FILE, text:sub(1, at - 1) .. string.char((text:byte(at) + 64) % 256)
        .. text:sub(at + 1))
    end)
    assert.matches("^/rank%-00000.safetensors' is damaged: tensor '[%w_.]+' is not what was written", message)
    local model = make {}
    ms.fsdp.load(work .. "/broken", model, nil, { verify = false })
  end)

  it("of the previous version, without checksums, is read; a hash of its files is compared", function()
    local path = work .. "/before"
    lfs.mkdir(path)
    local function copy(name, change)
      local text = process.read(process.root .. "/spec/golden/data/before_sums/checkpoint/" .. name)
      process.write(path .. "/" .. name, change and change(text) or text)
    end
    copy "index.json"
    copy "rank-00000.safetensors"
    copy "rank-00001.safetensors"
    local function load_it()
      local model = ms.nn.Sequential(ms.nn.Linear(3, 4), ms.nn.Linear(4, 2))
      local optim = ms.optim.AdamW(model:parameters(), { lr = 1 })
      return ms.fsdp.load(path, model, optim), model, optim
    end
    local extra, model, optim = load_it()
    assert.same({ step = 7 }, extra)
    for k, p in ipairs(model:parameters()) do assert.is_true(p:equal(ms.full(p.shape, k))) end
    assert.equal(1 / 3, optim.param_groups[1].lr)
    copy("rank-00001.safetensors", function(text) return text:sub(1, -2) .. "x" end)
    assert.matches("have the hash %x+, but %x+ in the index", failure(load_it))
    copy "rank-00001.safetensors"
    -- Such a folder can be replaced like any checkpoint.
    ms.fsdp.save(path, model, optim, { extra = { step = 8 } })
    assert.same({ step = 8 }, (load_it()))
  end)

  it("has XXH64 of its files' headers and blocks", function()
    -- Two tensors, the second one written first, so that the file is not written in order.
    local function file_of(bytes)
      local path = work .. "/sum"
      local both = { { name = "x", dtype = "uint8", shape = { bytes } },
        { name = "y", dtype = "uint8", shape = { 3 } } }
      local saver = require("moonshard.io.files").saver(path, both)
      saver:write("y", ms.ones(3, { dtype = "uint8" }))
      saver:write("x", ms.zeros(bytes, { dtype = "uint8" }))
      return saver:commit(), process.read(path)
    end
    local ffi = require "ffi"
    local known = {}                       -- most blocks are equal
    local function xxh64(text)             -- implemented from the specification
      if known[text] then return known[text] end
      local P1, P2, P3, P4, P5 = 0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
        0x85EBCA77C2B2AE63ULL, 0x27D4EB2F165667C5ULL
      local function rotl(x, r) return bit.bor(bit.lshift(x, r), bit.rshift(x, 64 - r)) end
      local function round(acc, x) return rotl(acc + x * P2, 31) * P1 end
      local data, n, at = ffi.cast("const uint8_t *", text), #text, 0
      local function word() at = at + 8 return ffi.cast("const uint64_t *", data + at - 8)[0] end
      local h = P5
      if n >= 32 then
        local v = { P1 + P2, P2, 0ULL, 0ULL - P1 }
        while at + 32 <= n do for k = 1, 4 do v[k] = round(v[k], word()) end end
        h = rotl(v[1], 1) + rotl(v[2], 7) + rotl(v[3], 12) + rotl(v[4], 18)
        for k = 1, 4 do h = bit.bxor(h, round(0ULL, v[k])) * P1 + P4 end
      end
      h = h + n
      while at + 8 <= n do h = rotl(bit.bxor(h, round(0ULL, word())), 27) * P1 + P4 end
      if at + 4 <= n then
        h = rotl(bit.bxor(h, ffi.cast("const uint32_t *", data + at)[0] * P1), 23) * P2 + P3
        at = at + 4
      end
      while at < n do
        h = rotl(bit.bxor(h, data[at] * P5), 11) * P1
        at = at + 1
      end
      h = bit.bxor(h, bit.rshift(h, 33)) * P2
      h = bit.bxor(h, bit.rshift(h, 29)) * P3
      known[text] = bit.tohex(bit.bxor(h, bit.rshift(h, 32)), 16)
      return known[text]
    end
    for _, bytes in ipairs { 0, 1, 5, 40, 1000, 5 * 2 ^ 20 + 3, 17 * 2 ^ 20 } do
      local sum, text = file_of(bytes)
      local length = ffi.cast("const uint32_t *", text)[0]
      local before, own, blocks, after = text:sub(1, 8 + length):match '^(.-xxh64 1048576 )(%x+) (%x+)(".*)$'
      assert.equal(own, sum)
      assert.equal(xxh64(before .. ("0"):rep(16) .. " " .. blocks .. after), own)
      local expected = {}
      for at = 1, bytes, 2 ^ 20 do
        expected[#expected + 1] = xxh64(text:sub(8 + length + at, 8 + length + math.min(at + 2 ^ 20 - 1, bytes)))
      end
      expected[#expected + 1] = xxh64 "\1\1\1"
      assert.equal(table.concat(expected), blocks)
    end
  end)
end)
