-- SPDX-License-Identifier: MIT
--- The reference in docs/api: what scripts/docs --check finds. The pages themselves are checked by scripts/test.
local process = require "spec.support.process"
package.path = process.root .. "/scripts/support/?.lua;" .. package.path
local annotations = require "moonshard.tools.annotations"
local collect = require "docs.collect"
local examples = require "docs.examples"
local write = require "docs.write"
local interface = require "docs.interface"
local engine = require "moonshard.core.ffi"
local opts = require "moonshard.core.opts"

-- Functions with annotations, in a file of their own.
local source = [[
local opts = require "moonshard.core.opts"
local M = {}
--- Twice a number.
---@param x number
---@param given? { extra: number }
---@return number
function M.twice(x, given) return 2 * x + opts("twice", given, { extra = 0 }).extra end
function M.bare(x) return x end
return M
]]

local root

local function put(path, text) process.write(root .. "/" .. path, text) end

local files = 0
-- The functions of a source, from a file that was not read before.
local function functions_of(text)
  files = files + 1
  local name = ("source%d.lua"):format(files)
  put(name, text)
  return dofile(root .. "/" .. name)
end

-- The faults that scripts/docs finds on a page of these functions (default: `twice` of `source`) with this example.
local function faults_of(example, functions)
  put("docs/api/examples/planted.txt", example)
  local of = functions or { twice = functions_of(source).twice }
  package.loaded["docs.pages"] = { { file = "planted", title = "planted", intro = "",
    sections = { { title = "Functions", prefix = "planted.", of = of } } } }
  local pages, faults = collect.pages(), {}
  local function fault(...) faults[#faults + 1] = (...):format(select(2, ...)) end
  rawset(_G, "planted", of)
  examples.read(root, pages, fault)
  examples.run(root, pages, fault)
  collect.check(pages, fault)
  rawset(_G, "planted", nil)
  return table.concat(faults, "\n"), pages
end

describe("the reference", function()
  setup(function()
    root = process.temp_folder()
    assert(os.execute("mkdir -p '" .. root .. "/docs/api/examples'") == 0)
  end)
  teardown(function()
    process.remove_folder(root)
    package.loaded["docs.pages"] = nil
  end)

  it("takes a name with its description, arguments, options and example", function()
    assert.are.equal("", (faults_of "# planted.twice\nplanted.twice(3, { extra = 1 })    --> 7\n"))
  end)

  for _, row in ipairs {
    { "a name without an example", "", "planted.twice (planted) has no example" },
    { "an example with another result", "# planted.twice\nplanted.twice(3)    --> 5\n", "gives 6, not 5" },
    { "an example that fails", "# planted.twice\nplanted.twice({})\n", "attempt to perform arithmetic" },
    { "an example of no public name", "# planted.thrice\n1\n", "'planted.thrice' is not a public name" },
    { "an example that stops in the middle", "# planted.twice\nfunction f()\n", "ends in the middle" },
  } do
    it("refuses " .. row[1], function() assert.matches(row[3], (faults_of(row[2])), 1, true) end)
  end

  it("refuses a name without a description, and an argument without one", function()
    local bare = { bare = functions_of(source).bare }
    assert.matches("planted.bare (planted) has no description", faults_of("# planted.bare\nplanted.bare(1)\n", bare), 1,
      true)
    local without = { twice = functions_of((source:gsub("%-%-%-@param x number\n", ""))).twice }
    assert.matches("does not describe argument 'x'", faults_of("# planted.twice\nplanted.twice(3)    --> 6\n", without),
      1, true)
  end)

  it("refuses an argument without a meaning", function()
    local faults = {}
    local function fault(...) faults[#faults + 1] = (...):format(select(2, ...)) end
    local table_of = "# planted\n\n| `x` | `number` | %s |\n| `y` | `number` | the second |\n"
    write.check({ name = "planted", text = table_of:format "" }, fault)
    write.check({ name = "planted", text = table_of:format "the first" }, fault)
    assert.are.same({ "docs/api/planted: 'x' has no description" }, faults)
  end)

  it("refuses options that the function does not take, and leaves none out", function()
    local other = { twice = functions_of((source:gsub("extra: number", "other: number"))).twice }
    local faults = faults_of("# planted.twice\nplanted.twice(3, {})    --> 6\n", other)
    assert.matches("does not name option 'extra'", faults, 1, true)
    assert.matches("names option 'other', which the function does not accept", faults, 1, true)
  end)

  it("refuses a default that the function does not have", function()
    local other = { twice = functions_of((source:gsub("extra: number }", "%0  extra: is added (default: 1)"))).twice }
    assert.matches("gives 1 as the default of option 'extra', which is 0",
      faults_of("# planted.twice\nplanted.twice(3, {})    --> 6\n", other), 1, true)
  end)

  it("is not written from an engine that is older than its sources", function()
    local folder = process.temp_folder()
    assert(os.execute(("cp '%s' '%s/moonshard_cdef.h' '%s' && touch -d 2001-01-01 '%s/libmoonshard.so'"):format(engine.path,
      engine.folder, folder, folder)) == 0)
    local output, status = process.shell(("MOONSHARD_LIB='%s/libmoonshard.so' scripts/docs --check"):format(folder))
    process.remove_folder(folder)
    assert.matches("^docs: the engine, [^\n]*, is older than [^\n]*/kernels/formulas/[^\n]*; build it first: scripts/setup "
      .. "%-%-engine\n$", output)
    assert.are.equal(1, status)
  end)

  it("refuses a module or class that stands on no page", function()
    local faults = {}
    local function fault(...) faults[#faults + 1] = (...):format(select(2, ...)) end
    local inner = { f = function() end }
    local of = { g = function() end, inner = inner }
    collect.check_owners({ { sections = { { of = of } } } }, "planted", of, fault)
    assert.are.same({ "planted.inner is on no page of scripts/support/docs/pages.lua; its public names: f" }, faults)
  end)

  it("writes arguments, options with their defaults, results and the example", function()
    local _, pages = faults_of "# planted.twice\nplanted.twice(3, { extra = 1 })    --> 7\n"
    local text = write.files(pages)[2].text
    for _, part in ipairs { "`planted.twice(x, opts?)`", "Twice a number.", "| `opts.extra` | `number` | default `0` |",
      "Returns `number`.", "planted.twice(3, { extra = 1 })    --> 7" } do
      assert.matches(part, text, 1, true)
    end
  end)

  it("writes a default once, if the annotation names it", function()
    local named = { twice = functions_of((source:gsub("extra: number }", "%0  extra: is added (default: 0)"))).twice }
    local _, pages = faults_of("# planted.twice\nplanted.twice(3, { extra = 1 })    --> 7\n", named)
    assert.matches("| `opts.extra` | `number` | is added (default: 0) |", write.files(pages)[2].text, 1, true)
  end)

  it("has every function of moonshard.h, with a line that calls it", function()
    local faults = {}
    local page = interface.page(process.root, function(...) faults[#faults + 1] = (...):format(select(2, ...)) end)
    local count = 0
    for _ in process.read(process.root .. "/runtime/moonshard.h"):gmatch "\nMS_API " do count = count + 1 end
    assert.are.same({}, faults)
    assert.are.equal(count, #page.entries)
  end)
end)

describe("annotations", function()
  it("are split at commas outside of brackets", function()
    local list = annotations.fields_of "a: number, b?: fun(x: T, y: U): V, c: { d: integer, e: string }"
    local names = {}
    for k, field in ipairs(list) do names[k] = field.name .. (field.optional and "?" or "") .. "=" .. field.type end
    assert.are.same({ "a=number", "b?=fun(x: T, y: U): V", "c={ d: integer, e: string }" }, names)
  end)

  it("of a wrapped function are those of the inner function", function()
    local wrapped = require "moonshard".cat
    assert.is_not_nil(opts.original[wrapped])
    assert.matches("Concatenates tensors along d", annotations.of(wrapped).text, 1, true)
  end)
end)
