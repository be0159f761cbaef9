-- SPDX-License-Identifier: MIT
--- ms.memory_report(): which lines of the script, modules and kinds hold memory, now and at the peak; as a table, as
--- text and as a page with flame graphs. The places of allocations are known while ms.record_memory_history() records
--- them.
local cjson = require "cjson"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local page = require "moonshard.run.page"
local places = require "moonshard.core.places"
local ranges = require "moonshard.core.ranges"
local tensor = require "moonshard.tensor"

local lib, ffi = engine.lib, engine.ffi

local M = {}

---@class MemoryRow
---@field name string         the line "train.lua:12", the module "blocks.1.attn (Attention)", or the kind
---@field bytes integer       live now
---@field blocks integer      number of live allocations
---@field peak_bytes integer  live at the peak
---@field peak_blocks integer  number of allocations that are live at the peak
---@field what string?        the operator or purpose of the row's largest stack at the peak; nil for a kind

---@class MemoryReport
---@field device string      name of the device
---@field allocated integer  bytes that tensors hold now
---@field peak integer       most bytes since the history began (without a history: since the script began), or since
---   the last call of ms.reset_peak_memory_stats
---@field recorded integer   bytes now held by allocations whose place is known
---@field peak_recorded integer  the same at the peak
---@field kinds MemoryRow[]    parameters, gradients, optimizer, gathered, other; without peak_bytes if there is no history
---@field lines MemoryRow[]    by the script's innermost line, the largest at the peak first
---@field modules MemoryRow[]  by the module in whose forward or backward the memory was allocated
---@field stacks { lines: string[], what: string, module: string?, kind: string, bytes: integer, blocks: integer, peak_bytes: integer, peak_blocks: integer }[]
---   the records themselves; lines: the outermost first
local Report = { __name = "MemoryReport" }
Report.__index = Report

local function bytes_text(n)
  if not n then return "-" end
  if n >= 2 ^ 30 then return ("%.2f GiB"):format(n / 2 ^ 30) end
  if n >= 2 ^ 20 then return ("%.2f MiB"):format(n / 2 ^ 20) end
  if n >= 2 ^ 10 then return ("%.2f KiB"):format(n / 2 ^ 10) end
  return ("%d B"):format(n)
end

local holders

--- From now on records where the script makes each allocation, and the peak, for ms.memory_report; and an out-of-memory
--- error names the lines that hold most. Costs some microseconds per allocation, and nothing while it is off.
---@param on? boolean  false: ends it; what it recorded stays (default: true)
function M.record_memory_history(on)
  if on == nil then on = true end
  opts.expect(on, opts.boolean, "record_memory_history: argument")
  errors.on_no_memory(on and holders or nil)
  if not on then places.mark() end
  tensor.record_memory(on)
  ranges.follow_modules(on and places.enter or nil)
  engine.state.memory_module = 0
end

-- ---- the records ---------------------------------------------------------------------------------

local now, at_peak = ffi.new "ms_memory", ffi.new "ms_memory"

-- Takes a snapshot of a device's memory, with the lines of each record. One call of the engine fills `now`, `at_peak`
-- and all records, because the garbage collector may free memory between two calls. If there was too little room for
-- the records, the call is repeated with more.
local function stacks_of(device)
  local room, list = 64, {}
  local n, records
  repeat
    room = 2 * (n or room)
    records = ffi.new("ms_memory_record[?]", room)
    n = lib.ms_memory_snapshot(device, now, at_peak, records, room)
  until n <= room
  for k = 0, n - 1 do
    local r = records[k]
    local lines = places.lines(r.site)
    local stack = { what = ffi.string(r.what), kind = ffi.string(lib.ms_name_of(ffi.C.MS_NAME_MEMORY, r.kind)),
      module = places.module(r.module), bytes = r.bytes, blocks = r.blocks, peak_bytes = r.peak_bytes,
      peak_blocks = r.peak_blocks, lines = {} }
    for i = #lines, 1, -1 do
      local line = lines[i]
      stack.lines[#stack.lines + 1] = line.name and ("%s (%s)"):format(line.line, line.name) or line.line
    end
    stack.line = lines[1] and lines[1].line
    list[#list + 1] = stack
  end
  table.sort(list, function(a, b)
    if a.peak_bytes ~= b.peak_bytes then return a.peak_bytes > b.peak_bytes end
    if a.bytes ~= b.bytes then return a.bytes > b.bytes end
    return table.concat(a.lines, ";") .. a.what .. a.kind < table.concat(b.lines, ";") .. b.what .. b.kind
  end)
  return list
end

-- Sums of the stacks by name, the largest at the peak first. name(stack) returns nil for a stack that does not count.
local function rows_of(stacks, name)
  local rows, by_name = {}, {}
  for _, s in ipairs(stacks) do
    local key = name(s)
    local row = key and by_name[key]
    if key and not row then
      -- The first stack of a name is the largest at the peak; the row takes its `what`.
      row = { name = key, bytes = 0, blocks = 0, peak_bytes = 0, peak_blocks = 0, what = s.what }
      by_name[key], rows[#rows + 1] = row, row
    end
    if row then
      row.bytes, row.blocks = row.bytes + s.bytes, row.blocks + s.blocks
      row.peak_bytes, row.peak_blocks = row.peak_bytes + s.peak_bytes, row.peak_blocks + s.peak_blocks
    end
  end
  table.sort(rows, function(a, b)
    if a.peak_bytes ~= b.peak_bytes then return a.peak_bytes > b.peak_bytes end
    if a.bytes ~= b.bytes then return a.bytes > b.bytes end
    return a.name < b.name
  end)
  return rows
end

-- The lines that hold most of a device's memory, for the message of an allocation that failed there.
function holders(device)
  places.mark()
  local rows = rows_of(stacks_of(dtypes.present_device(device, "memory_report")), function(r) return r.bytes > 0 and r.line end)
  table.sort(rows, function(a, b) return a.bytes > b.bytes end)
  local words = {}
  for k = 1, math.min(3, #rows) do
    local r = rows[k]
    words[k] = ("%s (%s in %d block%s, mostly %s)"):format(r.name, bytes_text(r.bytes), r.blocks,
      r.blocks == 1 and "" or "s", r.what)
  end
  return words[1] and "; most is held by " .. table.concat(words, ", ")
end

local KINDS = { "parameters", "gradients", "optimizer", "gathered" }

-- A row for each kind. A block that became a gradient or a parameter only after the peak counts as other in the
-- engine's totals at the peak; the records give its present kind. So the peak of a kind is the larger of the two sums.
local function kinds_of(self)
  local rows, recorded = { { name = "other", bytes = self.allocated, peak_bytes = self.peak } }, {}
  local other, with_peak = rows[1], at_peak.allocated > 0
  for _, s in ipairs(self.stacks) do recorded[s.kind] = (recorded[s.kind] or 0) + s.peak_bytes end
  for k, kind in ipairs(KINDS) do
    local row = { name = kind, bytes = now[kind] }
    if with_peak then row.peak_bytes = math.max(at_peak[kind], recorded[kind] or 0) end
    table.insert(rows, k, row)
    other.bytes, other.peak_bytes = other.bytes - row.bytes, with_peak and other.peak_bytes - row.peak_bytes or nil
  end
  return rows
end

-- ---- the page ------------------------------------------------------------------------------------

local PAGE = debug.getinfo(1, "S").source:match "^@(.*)%.lua$" .. ".html"

-- A tree of frames for one flame graph: each node has a name, its bytes and its children.
local function tree_of(self, field, total, recorded)
  local root = { name = "all", bytes = total, children = {} }
  local function add(node, name, bytes, kind)
    node.by_name = node.by_name or {}
    local next_node = node.by_name[name]
    if not next_node then
      next_node = { name = name, bytes = 0, kind = kind, children = {} }
      node.by_name[name], node.children[#node.children + 1] = next_node, next_node
    end
    next_node.bytes = next_node.bytes + bytes
    return next_node
  end
  for _, s in ipairs(self.stacks) do
    if s[field] > 0 then
      local node = root
      for _, line in ipairs(s.lines) do node = add(node, line, s[field]) end
      if s.module then node = add(node, s.module, s[field]) end
      add(node, s.kind == "other" and s.what or ("%s: %s"):format(s.kind, s.what), s[field], s.kind)
    end
  end
  if total > recorded then add(root, "not recorded", total - recorded) end
  local function finish(node)
    node.by_name = nil
    table.sort(node.children, function(a, b) return a.bytes > b.bytes end)
    for _, child in ipairs(node.children) do finish(child) end
    if not node.children[1] then node.children = nil end
  end
  finish(root)
  return root
end

local function write_page(self, path)
  local data = { device = self.device, rank = self.rank, text = tostring(self), kinds = self.kinds, graphs = {
    { title = "Now", root = tree_of(self, "bytes", self.allocated, self.recorded) },
    { title = "At the peak", root = tree_of(self, "peak_bytes", self.peak, self.peak_recorded) } } }
  local ok, why = page.write(path, PAGE, { data = page.safe(cjson.encode(data)) })
  if not ok then errors.raise("memory_report: cannot write '%s': %s", path, why) end
end

-- ---- the report ----------------------------------------------------------------------------------

local function section(out, title, rows, limit)
  if not rows[1] then return end
  out[#out + 1] = ("%-44s %12s %12s"):format(title, "at the peak", "now")
  for k = 1, math.min(#rows, limit) do
    local r = rows[k]
    local name = #r.name > 44 and "..." .. r.name:sub(-41) or r.name
    out[#out + 1] = ("%-44s %12s %12s%s"):format(name, bytes_text(r.peak_bytes), bytes_text(r.bytes),
      r.blocks and ("  %s%s"):format(errors.count(r.peak_bytes > 0 and r.peak_blocks or r.blocks, "block"),
        title == "line" and ", mostly " .. r.what or "") or "")
  end
  if #rows > limit then out[#out + 1] = ("... and %d more"):format(#rows - limit) end
end

function Report:__tostring()
  local out = { ("MemoryReport of %s: %s now, %s at the peak"):format(self.device, bytes_text(self.allocated),
    bytes_text(self.peak)) }
  section(out, "kind", self.kinds, #self.kinds)
  section(out, "line", self.lines, 20)
  section(out, "module", self.modules, 20)
  if self.recorded < self.allocated then
    out[#out + 1] = ("not recorded: %s at the peak, %s now%s"):format(bytes_text(self.peak - self.peak_recorded),
      bytes_text(self.allocated - self.recorded),
      self.stacks[1] and "" or "; ms.record_memory_history() records the lines of allocations that follow it")
  end
  return table.concat(out, "\n")
end

-- The path of a rank's page: with several ranks it has the rank's number.
local function of_rank(path, rank, world)
  if world <= 1 then return path end
  local stem, ending = path:match "^(.*)(%.[^./]*)$"
  return ("%s.rank%d%s"):format(stem or path, rank, ending or "")
end

local a_path = opts.kind("a path", function(x) return type(x) == "string" and x ~= "" and not x:find "%z" end)

--- The memory of this rank on a device, by kind, by the lines of the script that made it, and by module; now and at the
--- peak. Prints as text. Lines, modules and the peak are those since ms.record_memory_history(). Errors: a file that
--- cannot be written.
---@param given? { device: string, html: string }
---   device: name of the device (default: the default device); html: writes a page with two flame graphs, of the memory
---   now and at the peak, to this file; with several ranks memory.html becomes memory.rank0.html and so on
---@return MemoryReport
function M.memory_report(given)
  local o = opts("memory_report", given, { device = opts.string, html = opts.option(a_path) })
  local number = o.device and dtypes.present_device(o.device, "memory_report") or dtypes.device_now()
  places.mark()
  local rank, world = log.rank()
  local self = setmetatable({ device = dtypes.device_name(number), rank = rank, stacks = stacks_of(number),
    recorded = 0, peak_recorded = 0 }, Report)
  -- Without a history, at_peak.allocated is 0. After a history has ended, memory may have grown beyond its peak.
  self.allocated = now.allocated
  self.peak = math.max(at_peak.allocated > 0 and at_peak.allocated or now.peak_allocated, now.allocated)
  for _, s in ipairs(self.stacks) do
    self.recorded, self.peak_recorded = self.recorded + s.bytes, self.peak_recorded + s.peak_bytes
  end
  self.kinds = kinds_of(self)
  self.lines = rows_of(self.stacks, function(s) return s.line end)
  self.modules = rows_of(self.stacks, function(s) return s.module end)
  if o.html then write_page(self, of_rank(o.html, rank, world)) end
  return self
end

return M
