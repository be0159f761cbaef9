-- SPDX-License-Identifier: MIT
--- The layers of the code: a file calls, includes, requires and assigns only in its own layer and in lower ones.
local layers = require "spec.support.layers"
local lfs = require "lfs"
local process = require "spec.support.process"

-- The layers, the lowest first. Folders of one layer may use each other, as kernels and the dispatch of operators do.
local engine = {
  { "base", "public" }, { "device" }, { "tensor" }, { "ops", "kernels" }, { "autograd" }, { "comm" }, { "shard" },
  { "train" }, { "io" },
}
local front = {
  { "core" }, { "tensor" }, { "autograd" }, { "dist" }, { "nn" }, { "optim", "amp", "data", "distributions" },
  { "parallel" }, { "io", "text" },
  { "doors" }, { "models", "run", "plot", "tools", "hf" }, { "all" },
}
-- Modules that only collect others under the name that scripts use; no lower layer requires them.
local doors = { ["nn"] = "doors", ["parallel.fsdp"] = "doors", ["fsdp"] = "doors", [""] = "all" }

local function heights(rows)
  local of, layer = {}, {}
  for height, row in ipairs(rows) do
    for _, name in ipairs(row) do
      -- Folders of one layer count as one: cycles among them are allowed.
      of[name], layer[name] = height, row[1]
    end
  end
  return of, layer
end

local engine_height, engine_layer = heights(engine)
local function engine_folder(path)
  return path:match "^runtime/([%w_]+)/" or path:match "^(kernels)/"
    or path == "runtime/moonshard.h" and "public" or nil
end
local function engine_place(path)
  local folder = engine_folder(path)
  return engine_layer[folder], engine_height[folder]
end
local function itself(path) return path end

-- The floors of runtime/comm; "" is what stands in no folder of its own.
local floors = {
  { "" }, { "transport" }, { "world" }, { "memory" }, { "process" }, { "watch" }, { "movers" }, { "agree" },
  { "issue" }, { "job" }, { "script" },
}
local floor_height, floor_name = heights(floors)
local function comm_place(path)
  local folder = path:match "^runtime/comm/([%w_]+)/" or path:match "^runtime/comm/[%w_]+%.[ch]$" and "" or nil
  return floor_name[folder], floor_height[folder]
end

local front_height = heights(front)
local function front_place(module)
  local layer = doors[module] or module:match "^[%w_]+"
  if not front_height[layer] then return nil end
  return layer, front_height[layer]
end

-- Fields that other modules may assign: they hold that module's state.
local state = { ["core.context"] = "now", ["core.ffi"] = "state" }

local function names(list) return table.concat(list, "\n") end
local function count(...) io.write(("        counted: " .. (...) .. "\n"):format(select(2, ...))) end

local objects = process.build .. "/CMakeFiles/moonshard.dir"
local symbols

describe("layering", function()
  lazy_setup(function() symbols = layers.symbols(process.root, objects) end)

  it("has no call of a higher layer, no cycle between layers and no weak symbol", function()
    local calls = layers.calls(symbols)
    local upward, between = layers.upward(calls, engine_place)
    count("%d objects, %d uses of another file's symbols, %d of them between layers", symbols.objects, #calls, between)
    assert.is_true(symbols.objects > 50 and between > 100, "too few objects: build the engine first (scripts/setup)")
    assert.are.equal("", names(upward))
    assert.are.equal("", names(layers.circles(calls, engine_place)))
    local weak = {}
    for _, w in ipairs(symbols.weak) do weak[#weak + 1] = w.source .. ": " .. w.symbol end
    assert.are.equal("", names(weak))
  end)

  it("has no cycle between the files of a folder", function()
    local within = layers.within(layers.calls(symbols), engine_folder)
    count("%d uses of another file of the same folder", #within)
    assert.is_true(#within > 500)
    assert.are.equal("", names(layers.circles(within, itself)))
  end)

  it("has no call of a higher floor of comm", function()
    local calls = {}
    for _, use in ipairs(layers.within(layers.calls(symbols), engine_folder)) do
      if use.user:match "^runtime/comm/" then calls[#calls + 1] = use end
    end
    local upward, between = layers.upward(calls, comm_place)
    count("%d calls between floors of comm", between)
    assert.is_true(between > 200)
    assert.are.equal("", names(upward))
  end)

  it("includes only headers of its own and lower layers", function()
    local includes = layers.includes(process.root)
    local upward, between = layers.upward(includes, engine_place)
    count("%d includes, %d between layers", #includes, between)
    assert.is_true(between > 50)
    assert.are.equal("", names(upward))
    assert.are.equal("", names(layers.circles(includes, engine_place)))
  end)

  it("declares a function in the header of its own file", function()
    local wrong, seen = layers.misplaced(process.root, symbols, engine_place)
    count("%d declarations of symbols that objects define", seen)
    assert.is_true(seen > 300)
    local list = {}
    for _, w in ipairs(wrong) do
      list[#list + 1] = ("%s declares %s of %s"):format(w.header, w.symbol, w.source)
    end
    assert.are.equal("", names(list))
  end)

  it("requires in Lua only modules of its own and lower layers", function()
    local requires, modules = layers.requires(process.root, "lua/moonshard")
    -- The collecting modules may require everything.
    local uses = {}
    for _, use in ipairs(requires) do
      if not doors[use.user] then uses[#uses + 1] = use end
    end
    local upward, between = layers.upward(uses, front_place)
    count("%d modules, %d requires, %d between layers", modules, #requires, between)
    assert.is_true(modules > 100 and between > 300)
    assert.are.equal("", names(upward))
    assert.are.equal("", names(layers.circles(uses, front_place)))
  end)

  it("sets no field of another module from outside", function()
    local list = {}
    for _, use in ipairs(layers.late(process.root, "lua/moonshard", state)) do
      list[#list + 1] = ("%s sets %s.%s"):format(use.user, use.used, use.by)
    end
    assert.are.equal("", names(list))
  end)

  it("keeps folders, structs and parameter lists small", function()
    local most, folder, in_folder = 0, nil, {}
    for _, top in ipairs { "runtime", "kernels", "lua", "scripts" } do
      for _, path in ipairs(layers.files(process.root, top, "")) do
        local of = path:match "^(.*)/"
        in_folder[of] = (in_folder[of] or 0) + 1
        if in_folder[of] > most then most, folder = in_folder[of], of end
      end
    end
    local structs, functions = layers.sizes(process.root)
    local large, long = {}, {}
    for _, s in ipairs(structs) do
      if s.n > 30 then large[#large + 1] = ("%s %s (%d fields)"):format(s.path, s.name, s.n) end
    end
    for _, f in ipairs(functions) do
      if f.n >= 7 then long[#long + 1] = ("%s %s (%d parameters)"):format(f.path, f.name, f.n) end
    end
    count("at most %d files in a folder (%s); of %d structs %d above 30 fields; of %d functions %d with 7 or more parameters",
      most, folder, #structs, #large, #functions, #long)
    assert.is_true(#structs > 200 and #functions > 2000)
    assert.is_true(most <= 25)
    assert.are.equal("", names(large))
    assert.is_true(#long <= 4, "more than 4 functions have 7 or more parameters:\n" .. names(long))
  end)

  -- Roles of tables that several files fill: a layout (shard/layout), a mover, a transport, the function that runs a
  -- KERNEL of rows/elementwise.def, and a row's kernel on one device.
  local roles = { columns = true, gather_whole = true, local_shape = true, pack = true, part = true, plan = true,
    init = true, finalize = true,
    run = true, compare = true, compare_scalar = true, logic = true, test = true, run_tril = true, run_triu = true }

  it("gives a static function a name that no other file has", function()
    local shared, seen = {}, 0
    for name, paths in pairs(layers.statics(process.root)) do
      seen = seen + #paths
      if #paths > 1 and not roles[name] then shared[#shared + 1] = name .. ": " .. table.concat(paths, ", ") end
    end
    table.sort(shared)
    count("%d static functions", seen)
    assert.is_true(seen > 1500)
    assert.are.equal("", names(shared))
  end)

  it("keeps files short", function()
    -- A public header is one file, and scripts/docs writes types_engine.lua.
    local exempt = { ["runtime/moonshard.h"] = true, ["lua/moonshard/core/types_engine.lua"] = true }
    local most, longest, long, seen = 0, nil, {}, 0
    for _, top in ipairs { "runtime", "kernels", "lua", "scripts", "spec" } do
      for _, path in ipairs(layers.files(process.root, top, "")) do
        local data = path:match "%.json$" or path:match "^spec/.*/data/"
        if not data and not exempt[path] then
          local n = select(2, process.read(process.root .. "/" .. path):gsub("\n", ""))
          seen = seen + 1
          if n > most then most, longest = n, path end
          local limit = path:match "^runtime/comm/.*%.h$" and 150 or 600
          if n > limit then long[#long + 1] = ("%s (%d lines)"):format(path, n) end
        end
      end
    end
    count("%d files, of up to %d lines (%s)", seen, most, longest)
    assert.is_true(seen > 800)
    assert.are.equal("", names(long))
  end)

  it("keeps state in few places, which docs/architecture.md lists", function()
    local text, listed, found, n = process.read(process.root .. "/docs/architecture.md"), {}, {}, 0
    local section = text:match "\n## State\n(.-)\n## "
    for row in section:gmatch "\n| [^\n]+" do
      local layer = row:match "^\n| (%l+) |"
      for path in row:gmatch "`([%w_/]+%.c)`" do listed[#listed + 1] = layer .. "/" .. path end
    end
    for path in io.popen(("cd '%s' && git ls-files 'runtime/*.c'"):format(process.root)):lines() do
      local variables = layers.variables(process.read(process.root .. "/" .. path))
      if #variables > 0 then found[#found + 1] = path:match "^runtime/(.*)" end
      n = n + #variables
    end
    table.sort(listed)
    table.sort(found)
    assert.are.equal(names(found), names(listed))
    count("%d variables at file scope in %d files", n, #found)
    assert.is_true(n <= 60, n .. " variables")
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

describe("the reader of the layers", function()
  local root

  -- Writes the files to a temporary folder, compiles those in C, and returns the symbols of the objects.
  local function plant(files)
    root = process.temp_folder()
    for path, text in pairs(files) do
      local at = root
      for part in path:gmatch "([^/]+)/" do
        at = at .. "/" .. part
        lfs.mkdir(at)
      end
      process.write(root .. "/" .. path, text)
    end
    for path in pairs(files) do
      if path:match "%.c$" then
        assert.are.equal(0, os.execute(("cd '%s' && cc -Iruntime -c %s -o %s.o"):format(root, path, path)))
      end
    end
    return layers.symbols(root, root)
  end

  after_each(function()
    if root then process.remove_folder(root) end
    root = nil
  end)

  it("finds a call of a higher layer, and the cycle that it closes", function()
    local calls = layers.calls(plant {
      ["runtime/base/low.c"] = "void high(void); void low(void) { high(); }",
      ["runtime/io/high.c"] = "void low(void); void high(void) { low(); }",
    })
    assert.are.same({ "runtime/base/low.c uses runtime/io/high.c (high)" }, (layers.upward(calls, engine_place)))
    assert.are.same({ "base -> io -> base" }, layers.circles(calls, engine_place))
  end)

  it("finds a cycle between files of one folder", function()
    local calls = layers.calls(plant {
      ["runtime/io/one.c"] = "void two(void); void one(void) { two(); }",
      ["runtime/io/two.c"] = "void one(void); void two(void) { one(); }",
    })
    assert.are.same({ "runtime/io/one.c -> runtime/io/two.c -> runtime/io/one.c" },
      layers.circles(layers.within(calls, engine_folder), itself))
  end)

  it("finds a call of a higher floor of comm", function()
    local calls = layers.calls(plant {
      ["runtime/comm/watch/wait.c"] = "void issue(void); void wait(void) { issue(); }",
      ["runtime/comm/issue/issue.c"] = "void issue(void) {}",
      ["runtime/comm/coll.c"] = "void wait(void); void coll(void) { wait(); }",
    })
    assert.are.same({ "runtime/comm/coll.c uses runtime/comm/watch/wait.c (wait)",
      "runtime/comm/watch/wait.c uses runtime/comm/issue/issue.c (issue)" }, (layers.upward(calls, comm_place)))
  end)

  it("finds variables at file scope", function()
    local text = "static int a, b;  // c\nstatic const int d = 1;\nstatic struct {\n    int e;\n} f = { 1 };\nint g;\n"
      .. "static void h(int i)\n{\n    static int j;\n}\nstatic ms_t *k[8];\nstatic _Thread_local int l;\n"
    assert.are.same({ "b", "f", "k", "l" }, layers.variables(text))
  end)

  it("finds the files that define a static function", function()
    plant {
      ["runtime/base/one.c"] = "static int take(int a)\n{\n    return a;\n}\nstatic int take(int a);\n",
      ["runtime/base/two.c"] = "static __attribute__((noinline)) int *take(void) { return 0; }\n",
    }
    assert.are.same({ take = { "runtime/base/one.c", "runtime/base/two.c" } }, layers.statics(root))
  end)

  it("finds weak symbols, defined and needed", function()
    local planted = plant {
      ["runtime/base/low.c"] = "void high(void) __attribute__((weak)); void low(void) { if (high) high(); }"
        .. "__attribute__((weak)) void own(void) {}",
    }
    assert.are.equal(2, #planted.weak)
  end)

  it("finds an include of a higher layer", function()
    plant {
      ["runtime/base/low.c"] = '#include "io/high.h"\n',
      ["runtime/io/high.h"] = "",
    }
    assert.are.same({ "runtime/base/low.c uses runtime/io/high.h (io/high.h)" },
      (layers.upward(layers.includes(root), engine_place)))
  end)

  it("finds a declaration in another file's header", function()
    local planted = plant {
      ["runtime/base/one.c"] = "void one(void) {}\nint kept;\n",
      ["runtime/base/one.h"] = "void one(void);\nextern int kept;\nvoid two(int a,\n         int b);\n",
      ["runtime/base/two.c"] = "void two(int a, int b) { (void)a, (void)b; }\n",
      ["runtime/base/shared.h"] = "void one(void);\nvoid two(int a, int b);\n",
      ["runtime/io/far.h"] = "static inline int f(void) { return 1; }\nextern int kept;\n",
    }
    local wrong, seen = layers.misplaced(root, planted, engine_place)
    assert.are.equal(6, seen)
    assert.are.same({
      { header = "runtime/base/one.h", symbol = "two", source = "runtime/base/two.c" },
      { header = "runtime/io/far.h", symbol = "kept", source = "runtime/base/one.c" },
    }, wrong)
  end)

  it("finds a require of a higher layer, and one of a collecting module", function()
    plant {
      ["lua/moonshard/core/low.lua"] = 'local high = require "moonshard.io.high"\nlocal ms = require("moonshard")\n',
      ["lua/moonshard/io/high.lua"] = '-- require "moonshard.tools.repl"\nlocal low = require "moonshard.core.low"\n',
    }
    local requires = layers.requires(root, "lua/moonshard")
    assert.are.same({ "core.low uses  (require)", "core.low uses io.high (require)" },
      (layers.upward(requires, front_place)))
    assert.are.same({ "core -> io -> core" }, layers.circles(requires, front_place))
  end)

  it("finds fields that are set from outside", function()
    plant {
      ["lua/moonshard/io/high.lua"] = 'local low = require "moonshard.core.low"\nfunction low.later() end\n'
        .. "low.value = 1\nif low.value == 1 then return low.now end\nlow.now.device = 2\n",
    }
    local found = {}
    for _, use in ipairs(layers.late(root, "lua/moonshard", { ["core.low"] = "now" })) do found[#found + 1] = use.by end
    assert.are.same({ "later", "value" }, found)
  end)

  for _, case in ipairs {
    { "declarators", "struct one { int a, b; int (*f)(int, int); };", 3 },
    { "an anonymous struct inside it", "typedef struct { int a; struct { int x, y; struct { int z; } d; } c; } one;", 6 },
    { "an anonymous union inside it", "struct one { int a; union { int x; float y; }; };", 3 },
    { "without those of another type", "struct one { int a; struct two { int x, y; } c; };", 2 },
  } do
    it("counts the fields of a struct: " .. case[1], function()
      plant { ["runtime/base/one.h"] = case[2] .. "\n" }
      assert.are.equal(case[3], (layers.sizes(root))[1].n)
    end)
  end

  for _, case in ipairs {
    { "a pointer to a function", "static int f(int a, int (*g)(int, int),\n             char *c)\n{\n", "f 3" },
    { "none", "int f(void)\n{\n", "f 0" },
    { "a brace in the same line", "static inline int f(int a, int b) { return a; }\n", "f 2" },
    { "a template", "template <class T, int N>\nstatic T f(pair<T, N> a, T b)\n{\n", "f 2" },
    { "a template in one line", "template <class... P> static void f(void (*g)(P...), int b)\n{\n", "f 2" },
    { "a kernel", "__global__ void f(int64_t n, const void *x)\n{\n", "f 2" },
    { "a kernel with bounds", "template <class T>\n__global__ void __launch_bounds__(BLOCK, 2)\n    f(T n, T x)\n{\n", "f 2" },
    { "a function of the device", "static __device__ __forceinline__ float f(float x, float y)\n{\n", "f 2" },
    { "an attribute", "static inline __attribute__((always_inline)) void f(int a,\n    int b)\n{\n", "f 2" },
    { "a name made by a macro", "static MS_KERNEL void R(f)(int a, int b)\n{\n", "f 2" },
    { "a body of a macro", "#define F(NAME) \\\n    static void f_##NAME(int a, int b) \\\n    { \\\n    }\n", "NAME 2" },
    { "a member", "struct s {\n    explicit f(int a, int b)\n    {\n    }\n    int g(int c) const { return c; }\n};\n", "f 2 g 1" },
    { "a lambda", "    auto f = [&](int a, int b) { return a; };\n", "[] 2" },
    { "a lambda with a type", "    auto f = [=](int a) mutable -> std::pair<int, int> {\n", "[] 1" },
    { "no statement, call or value", "    if (a(b, c)) {\n    F(x, y)\n    z = (s) { 1, 2 };\n    for (;;) {\n", "" },
  } do
    it("counts the parameters of a function: " .. case[1], function()
      plant { ["kernels/cuda/one.cu"] = case[2] }
      local found, _, functions = {}, layers.sizes(root)
      for _, f in ipairs(functions) do found[#found + 1] = f.name .. " " .. f.n end
      assert.are.equal(case[3], table.concat(found, " "))
    end)
  end
end)
