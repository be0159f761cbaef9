-- SPDX-License-Identifier: MIT
--- Entries of the reference: every public name of the live library with its annotation.
local annotations = require "moonshard.tools.annotations"
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"

local M = {}

--- The first source of the engine's tables that is newer than the engine; nil if there is none. With an old engine the
--- reference would describe old sources.
---@param root string  the source tree
---@return string?
function M.newer_source(root)
  local places = ("'%s/kernels/rows' '%s/kernels/formulas' '%s/runtime/moonshard.h'"):format(root, root, root)
  local pipe = io.popen(("find %s -type f -newer '%s' | LC_ALL=C sort"):format(places, engine.path))
  local path = pipe:read "*l"
  pipe:close()
  return path
end

-- Whether value is a table of public names that has its own section.
local function is_module(value)
  return type(value) == "table" and not class.is_class(value) and not (getmetatable(value) or {}).__call
end

-- Methods that a class defines for the library, or that belong to its constructor.
local hidden = { init = true, new = true, extra_repr = true, forward = true, methods = true }

local function public_names(of)
  local names = {}
  for name in pairs(of) do
    if type(name) == "string" and name:sub(1, 1) ~= "_" and not hidden[name] and not is_module(of[name]) then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end

local function words(text)
  local list = {}
  for word in text:gmatch "%S+" do list[#list + 1] = word end
  return list
end

-- The comment of a class, with the arguments of its init and of its forward.
local function class_annotation(cls)
  local a = annotations.of_class(cls)
  if not a then return nil end
  local init, forward = cls.init and annotations.of(cls.init), rawget(cls, "forward") and annotations.of(cls.forward)
  local overload = (a.overload or ""):match "^fun(%b())"
  a.arguments, a.returns = init and init.arguments or {}, {}
  -- The overload in the class's comment gives types and meanings to arguments that init does not describe.
  local list, names = annotations.fields_of(overload and overload:sub(2, -2) or ""), {}
  for _, p in ipairs(list) do
    names[p.name] = p.name ~= "opts" or nil
    for _, option in ipairs(annotations.fields_of(p.type:match "^{(.*)}$" or "")) do names[option.name] = true end
  end
  local meanings = annotations.meanings_of(a.overload_text, names)
  for _, p in ipairs(list) do
    p.text, p.meanings = meanings[p.name] or "", meanings
    local name = init and p.name == "opts" and "given" or p.name
    if not init then a.arguments[#a.arguments + 1] = name end
    a.params[name] = a.params[name] or p
  end
  if init then
    for name, p in pairs(init.params) do a.params[name] = p end
    if init.text ~= "" then a.text = a.text .. "\n" .. init.text end
  end
  a.forward = forward
  return a
end

-- The annotation of a field of the library or of tensors: its @field line in the class to which it belongs.
local function field_annotation(entry)
  local class_name = entry.section.prefix == "ms." and "moonshard" or entry.section.prefix == "Tensor." and "Tensor"
  for _, field in ipairs(class_name and annotations.declared_class(class_name).fields or {}) do
    if field.name == entry.key then
      return { head = entry.name, text = field.text, arguments = {}, params = {}, fields = {},
        returns = { { type = field.type, text = "" } } }
    end
  end
end

local function annotation_of(entry)
  local value = entry.value
  if type(value) ~= "function" and not class.is_class(value) then return field_annotation(entry) end
  if class.is_class(value) then return class_annotation(value) end
  local declared = annotations.declared()[entry.name]
  if declared then return declared end
  return type(value) == "function" and annotations.of(value, entry.key) or nil
end

-- The arguments that a caller writes: without the object of a method, and without `more`, which is present only in order
-- to refuse options.
local function arguments_of(entry)
  local list = {}
  for k, name in ipairs(entry.annotation.arguments) do
    local self = k == 1 and entry.method and not entry.annotation.head:find ":[%w_]+%("
    if not self and name ~= "self" and name ~= "more" and name ~= "_" then list[#list + 1] = name end
  end
  return list
end

--- The entries of one section; `taken` contains names of the section's table that earlier sections have listed.
local function entries_of(section, taken)
  local list = {}
  for _, name in ipairs(section.names and words(section.names) or public_names(section.of)) do
    if section.names or not taken[name] and not (section.without and section.without[name]) then
      taken[name] = true
      local value = rawget(section.of, name)
      local entry = { name = section.prefix .. name, key = name, value = value, lacks = {},
        method = section.prefix:sub(-1) == ":", section = section }
      entry.is_class = class.is_class(value)
      entry.annotation = annotation_of(entry)
      if entry.annotation then entry.arguments = arguments_of(entry) end
      list[#list + 1] = entry
    end
  end
  return list
end

--- The pages of pages.lua, with their entries. Entries of a function that has an earlier entry refer to it (same_as).
function M.pages()
  local pages, taken = require "docs.pages", {}
  local seen = {}
  for _, page in ipairs(pages) do
    page.entries = {}
    for _, section in ipairs(page.sections) do
      taken[section.of] = taken[section.of] or {}
      section.entries = entries_of(section, taken[section.of])
      for _, entry in ipairs(section.entries) do
        entry.page = page
        local fn = entry.value
        if type(fn) == "function" then
          if seen[fn] then entry.same_as = seen[fn] else seen[fn] = entry end
        end
        page.entries[#page.entries + 1] = entry
      end
    end
  end
  return pages
end

--- Reports modules and classes in `of`, and in these in turn, whose public names are on no page.
function M.check_owners(pages, name, of, fault)
  local owners, seen = {}, {}
  for _, page in ipairs(pages) do
    for _, section in ipairs(page.sections) do owners[section.of] = true end
  end
  local function walk(path, t)
    if seen[t] then return end
    seen[t] = true
    local names = public_names(t)
    if not owners[t] and #names > 0 then
      fault("%s is on no page of scripts/support/docs/pages.lua; its public names: %s", path, table.concat(names, ", "))
    end
    for key, value in pairs(t) do
      local open = type(key) == "string" and key:sub(1, 1) ~= "_" and key ~= "methods"
      if open and (class.is_class(value) or is_module(value)) then walk(path .. "." .. key, value) end
    end
  end
  walk(name, of)
end

--- Reports what an entry lacks. One example is enough for all names of a function.
function M.check(pages, fault)
  local shown = {}
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do
      if entry.example then shown[entry.value] = true end
    end
  end
  for _, page in ipairs(pages) do
    for _, section in ipairs(page.sections) do
      for _, entry in ipairs(section.entries) do
        local a, lacks = entry.annotation, entry.lacks
        local function lack(...) lacks[#lacks + 1] = (...):format(select(2, ...)) end
        if entry.value == nil then lack "is not in the library" end
        if not a or a.text == "" then
          lack "has no description"
        else
          for _, name in ipairs(entry.arguments) do
            if not a.params[name] then lack("does not describe argument '%s'", name) end
          end
        end
        if not (entry.example or entry.value ~= nil and shown[entry.value]) then lack "has no example" end
        for _, text in ipairs(entry.option_faults or {}) do lack("%s", text) end
        for _, text in ipairs(lacks) do fault("%s (%s) %s", entry.name, page.file, text) end
      end
    end
  end
end

return M
