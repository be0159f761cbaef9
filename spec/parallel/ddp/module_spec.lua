-- SPDX-License-Identifier: MIT
--- nn.DDP as a module (docs/semantics.md#ddp): construction, what it refuses, errors, the end of its life.
local collected = require "spec.support.collected"
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"

ranks.describe(2, "DDP #mpi", function()
  it("gives access to its module's fields, and does not appear in names", function()
    local ms, nn = load()
    local Net = nn.Module:extend "Net"
    function Net:init()
      self.lin, self.scale = nn.Linear(2, 2), 3
    end
    function Net:forward(x) return self.lin(x) * self.scale end
    function Net:who(a) return self:class_name() .. tostring(a) end
    local m = Net()
    local ddp = nn.DDP(m)
    assert.are.equal(m, ddp.module)
    assert.are.equal(3, ddp.scale)
    assert.are.equal("Net7", ddp:who(7))
    assert.are.equal(m.lin, ddp.lin)
    assert.is_nil(ddp.nothing)
    ddp.scale = 5
    assert.are.equal(3, m.scale)
    local list = nn.DDP(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert.are.equal("ReLU", list[2]:class_name())
    assert.are.equal("ReLU", list[-1]:class_name())
    local keys = {}
    for key in ms.sorted_pairs(ddp:state_dict()) do keys[#keys + 1] = key end
    assert.are.same({ "lin.bias", "lin.weight" }, keys)
    ddp:load_state_dict(m:state_dict())
    for name in ddp:named_parameters() do assert.truthy(name:match "^lin%.") end
    assert.are.equal(m.lin.weight, ddp:get_parameter "lin.weight")
    ddp:eval()
    assert.is_false(m.training)
    assert.are.equal("DDP(", tostring(ddp):sub(1, 4))
    assert.is_true(ddp:isa(nn.DDP) and ddp:isa(nn.Module))
    assert.truthy(message(ms.deepcopy, ddp):find("DDP does not support deepcopy", 1, true))
  end)

  it("refuses invalid arguments at construction", function(rank)
    local ms, nn, dist = load()
    local frozen = nn.Linear(2, 2):requires_grad_(false)
    assert.are.equal("DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.", message(nn.DDP, frozen))
    assert.are.equal("device_ids can only be nil or contain a single element.",
      message(nn.DDP, nn.Linear(2, 2), { device_ids = { 0, 1 } }))
    local mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, { device = "meta" }))
    assert.are.equal("DistributedDataParallel's input module must be on the same type of devices, but input module parameters locate in "
      .. "['cpu', 'meta'].", message(nn.DDP, mixed))
    assert.truthy(message(nn.DDP, nn.Linear(2, 2, { device = "meta" })):find("is on the meta device", 1, true))
    assert.truthy(message(nn.DDP, 3):find("DDP: argument 1 is a number", 1, true))
    assert.truthy(message(nn.DDP, nn.Linear(2, 2), { bucket_cap = 1 }):find("did you mean 'bucket_cap_mb'?", 1, true))
    assert.truthy(message(nn.DDP, nn.Linear(2, 2), { process_group = 3 }):find("option 'process_group'", 1, true))
    -- Every rank detects that models differ.
    assert.are.equal("DDP expects same model across all ranks, but Rank 1 has 2 params, while rank 0 has inconsistent 1 params.",
      message(nn.DDP, nn.Linear(2, 2, { bias = rank == 1 })))
    assert.are.equal("[1]: params[1] in this process with sizes [2, 3] appears not to match sizes of the same param in process 0.",
      message(nn.DDP, nn.Linear(2 + rank, 2, { bias = false })))
    assert.are.equal("[1]: params[1] in this process with dtype float64 appears not to match dtype of the same param in process 0.",
      message(nn.DDP, nn.Linear(2, 2, { bias = false, dtype = rank == 1 and "float64" or "float32" })))
    ms.manual_seed(0)                                   -- the ranks have drawn different models
    local sharded = ms.fsdp.fully_shard(nn.Linear(2, 2))
    assert.truthy(message(nn.DDP, sharded):find("parameter 'weight' is already sharded", 1, true))
    local Two = ms.Tensor:extend "Two"
    function Two:init(a, b) self.a, self.b = a, b end
    function Two:inner_tensors() return { self.a, self.b } end
    local two = nn.Linear(2, 2, { bias = false })
    two.weight = nn.Parameter(Two(ms.ones(2, 2), ms.ones(2, 2)))
    assert.truthy(message(nn.DDP,
      two):find("^DDP: parameter 'weight' is a .*, expected a plain tensor; DDP does not reduce gradients of tensor classes"))
    dist.barrier()
  end)

  it("names the parameters that a backward did not reach", function(rank)
    local ms, nn = load()
    local m = require("spec.support.models.double_linear").DoubleLinear(3, { use_second_linear = false })
    local ddp = nn.DDP(m)
    ddp(ms.ones(1, 3)):sum():backward()
    local text = message(function() ddp(ms.ones(1, 3)) end)
    assert.are.equal("Expected to have finished reduction in the prior iteration before starting a new one. ",
      text:sub(1, 86))
    assert.truthy(text:find(("Parameters which did not receive grad for rank %d: lin2.weight, lin2.bias. "):format(rank)
      .. ("Parameter indices which did not receive grad for rank %d: 3 4"):format(rank), 1, true))
    -- Forwards in no_sync and eval mode still run.
    ddp:no_sync(function() ddp(ms.ones(1, 3)) end)
    ms.no_grad(function() ddp(ms.ones(1, 3)) end)
  end)

  it("finishes with the backward in which the last gradient arrives", function(rank)
    local ms, nn, dist = load()
    local m = require("spec.support.models.double_linear").DoubleLinear(3)
    local ddp = nn.DDP(m)
    for _ = 1, 2 do
      ddp:zero_grad()
      local a, b = ddp(ms.ones(1, 3) * (rank + 1))
      a:sum():backward()
      b:sum():backward()
      local all = dist.all_gather_object { m.lin1.weight.grad:tolist(), m.lin2.weight.grad:tolist() }
      assert.are.same(all[1], all[2])
    end
  end)

  it("refuses a second gradient in an iteration that waits for others", function()
    local ms, nn = load()
    local m = require("spec.support.models.double_linear").DoubleLinear(3)
    local ddp = nn.DDP(m)
    local a = ddp(ms.ones(1, 3))
    a:sum():backward(nil, { retain_graph = true })
    local text = message(function() a:sum():backward() end)
    assert.truthy(text:find("^Expected to mark a variable ready only once%."))
  end)

  it("warns if find_unused_parameters finds none", function()
    local ms, nn = load()
    local ddp = nn.DDP(nn.Linear(2, 2), { find_unused_parameters = true })
    local function run() ddp(ms.ones(1, 2)):sum():backward() end
    local warnings = ms.catch_warnings(function()
      run()
      run()
    end)
    assert.are.equal(1, #warnings)
    assert.truthy(warnings[1]:find(
      "^find_unused_parameters=true was specified in DDP constructor, but did not find any unused parameters"))
  end)

  it("takes one hook, before the first backward", function()
    local ms, nn = load()
    local ddp = nn.DDP(nn.Linear(2, 2))
    assert.are.equal("Communication hook must be callable.", message(ddp.register_comm_hook, ddp, nil, 3))
    ddp:register_comm_hook(nil, function() end)
    assert.are.equal("register_comm_hook or register_builtin_comm_hook can only be called once.",
      message(ddp.register_comm_hook, ddp, nil, function() end))
    ddp = nn.DDP(nn.Linear(2, 2))
    ddp(ms.ones(1, 2)):sum():backward()
    assert.are.equal("Communication hook can only be registered before calling backward.",
      message(ddp.register_comm_hook, ddp, nil, function() end))
    ddp = nn.DDP(nn.Linear(2, 2))
    ddp:register_comm_hook(nil, function() return ms.ones(3) end)
    assert.truthy(message(function() ddp(ms.ones(1, 2)):sum():backward() end)
      :find("the communication hook returned a Tensor for bucket 1, expected a tensor of 6 elements", 1, true))
  end)

  it("does not reduce or broadcast ignored parameters and buffers", function(rank)
    local ms, nn = load()
    ms.manual_seed(rank + 1)
    local m = nn.Sequential(nn.Linear(2, 2, { bias = false }), nn.Linear(2, 2, { bias = false }))
    local mine = m[2].weight:tolist()
    m._ddp_params_and_buffers_to_ignore = { "2.weight" }
    local ddp = nn.DDP(m)
    assert.are.same(mine, m[2].weight:tolist())
    ddp(ms.ones(1, 2) * (rank + 1)):sum():backward()
    local all = ms.dist.all_gather_object { m[1].weight.grad:tolist(), m[2].weight.grad:tolist() }
    assert.are.same(all[1][1], all[2][1])
    assert.are_not.same(all[1][2], all[2][2])
  end)

  it("reduces over a group of its own", function(rank)
    local ms, nn, dist = load()
    local m = nn.Linear(2, 2)
    local ddp = nn.DDP(m, { process_group = dist.self_group() })
    local list = dist.record(function() ddp(ms.ones(1, 2) * (rank + 1)):sum():backward() end)
    assert.are.same({ "all_reduce" }, { list[1].op, list[2] and list[2].op })
    assert.near(rank + 1, m.weight.grad:tolist()[1][1], 1e-6)
  end)

  it("fails on every rank if one rank's backward fails, and continues afterwards", function(rank)
    local ms, nn, dist = load()
    local lib = require("moonshard.core.ffi").lib
    local m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    local ddp = nn.DDP(m, { bucket_cap_mb = 1e-6 })
    for _ = 1, 2 do ddp(ms.ones(1, 3)):sum():backward() end
    local least = math.huge                       -- seconds; a busy machine may delay one run, but not all three
    for _ = 1, 3 do
      local handle = rank == 1 and m[1].weight:register_hook(function() error("no more of this", 0) end)
      local begun = lib.ms_time()
      local text = message(function() ddp(ms.ones(1, 3)):sum():backward() end)
      assert.truthy(text:find("no more of this", 1, true), text)
      if rank == 0 then assert.truthy(text:find("rank 1", 1, true), text) end
      least = math.min(least, lib.ms_time() - begun)
      if handle then handle:remove() end
      dist.recover()
      ddp:zero_grad()
      ddp(ms.ones(1, 3) * (rank + 1)):sum():backward()
      local all = dist.all_gather_object(m[1].weight.grad:tolist())
      assert.are.same(all[1], all[2])
    end
    assert.is_true(least < 20, ("the others heard of it after %.1f s"):format(least))
  end)

  it("is collected after its last reference, and its parameters stay", function()
    local ms, nn, dist = load()
    local m = nn.Linear(2, 2)
    local weak = setmetatable({ nn.DDP(m) }, { __mode = "v" })
    collected()
    assert.is_nil(weak[1])
    local list = dist.record(function() m(ms.ones(1, 2)):sum():backward() end)
    assert.are.equal(0, #list)
    -- The module's hooks do not keep it alive either.
    local parameters = setmetatable(m:parameters(), { __mode = "v" })
    m = nil
    collected()
    assert.is_nil(m)
    assert.is_nil(next(parameters))
  end)

  it("reduces during backward: only the last bucket's time shows", function()
    local _, nn = load()
    local overlap = require "spec.support.overlap"
    local layers, naps = overlap.layers()
    overlap.check(nn.DDP(nn.Sequential(unpack(layers)), { bucket_cap_mb = 1e-6 }), layers, naps, 0, 1)
  end)
end)
