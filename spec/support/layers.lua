-- SPDX-License-Identifier: MIT
--- Finds which files use which others, from symbols of object files, includes, declarations, and Lua's requires and
--- assignments; compares these uses with an order of layers. Functions that read sources take a root folder, so that
--- specs can plant faults in another one.
local lfs = require "lfs"
local process = require "spec.support.process"
local read = process.read

local M = {}

--- Files under root/folder whose names match, sorted, by their path from root.
function M.files(root, folder, pattern, list)
  list = list or {}
  local path = root .. "/" .. folder
  if lfs.attributes(path, "mode") ~= "directory" then return list end
  for _, name in ipairs(process.names(path, "^[^.]")) do
    if lfs.attributes(path .. "/" .. name, "mode") == "directory" then
      M.files(root, folder .. "/" .. name, pattern, list)
    elseif (folder .. "/" .. name):match(pattern) then
      list[#list + 1] = folder .. "/" .. name
    end
  end
  return list
end

--- Files of runtime and kernels under a root whose paths match.
function M.sources(root, pattern)
  local list = M.files(root, "runtime", pattern)
  return M.files(root, "kernels", pattern, list)
end

-- ---- C -------------------------------------------------------------------------------------------

--- C code without comments, strings and preprocessor lines; lines keep their numbers.
local function plain_c(text)
  local function lines_of(s) return (s:gsub("[^\n]", "")) end
  text = text:gsub("/%*.-%*/", lines_of):gsub("//[^\n]*", "")
  text = text:gsub('"[^"\n]*"', '""'):gsub("'[^'\n]*'", "0"):gsub("\\\n", " \n")
  return (("\n" .. text):gsub("\n[ \t]*#[^\n]*", "\n"):sub(2))
end

--- The symbols of the object files whose sources still exist under root: defined (symbol -> source), needed (source ->
--- symbols), weak (list of { source, symbol }), objects (their number). objects: the folder that mirrors the tree.
function M.symbols(root, objects)
  local found = { defined = {}, needed = {}, weak = {}, objects = 0 }
  local pipe = io.popen(("cd '%s' && find . -name '*.o' | sort | xargs -r nm -A"):format(objects))
  for line in pipe:lines() do
    local source, kind, symbol = line:match "^%./(.-)%.o:%x* *(%a) ([^.%s]+)"
    if source and lfs.attributes(root .. "/" .. source) then
      if not found.needed[source] then
        found.needed[source], found.objects = {}, found.objects + 1
      end
      if kind == "U" or kind == "w" or kind == "v" then
        table.insert(found.needed[source], symbol)
      elseif kind:match "[TDBRVWi]" then
        found.defined[symbol] = source
      end
      -- The compiler's own names (sanitizers, resolvers) begin with two underscores.
      if kind:match "[wvWV]" and symbol:sub(1, 2) ~= "__" then
        table.insert(found.weak, { source = source, symbol = symbol })
      end
    end
  end
  pipe:close()
  return found
end

--- Lists uses by symbol as { user, used, by }, where user and used are paths of files.
function M.calls(symbols)
  local uses = {}
  for user, names in pairs(symbols.needed) do
    for _, name in ipairs(names) do
      local used = symbols.defined[name]
      if used and used ~= user then uses[#uses + 1] = { user = user, used = used, by = name } end
    end
  end
  return uses
end

--- Uses by #include "...", looked up in runtime/, kernels/ and the folder of the file that includes.
function M.includes(root)
  local uses = {}
  for _, user in ipairs(M.sources(root, "%.[chu]+$")) do
    for included in read(root .. "/" .. user):gmatch '#%s*include%s+"([^"]+)"' do
      for _, base in ipairs { "runtime/", "kernels/", user:match "^(.*/)" } do
        if lfs.attributes(root .. "/" .. base .. included) then
          uses[#uses + 1] = { user = user, used = base .. included, by = included }
          break
        end
      end
    end
  end
  return uses
end

--- Headers that declare a symbol which is not defined in the .c file of the same name: { header, symbol, source }. A
--- header without such a file may declare symbols of any file of its layer. layer_of(path): the layer of a file.
function M.misplaced(root, symbols, layer_of)
  local wrong, seen = {}, 0
  for _, header in ipairs(M.sources(root, "/.*/.*%.h$")) do          -- not moonshard.h, which declares functions of all files
    local text = plain_c(read(root .. "/" .. header)):gsub("extern%s+\"\"%s+{", "")
    local own = header:gsub("%.h$", ".c")
    local has_own = lfs.attributes(root .. "/" .. own) ~= nil
    -- Remove bodies of inline functions and of structs; declarations remain.
    local flat = text:gsub("%b{}", "{}")
    for statement in flat:gmatch "[^;{}]+;" do
      local names = {}
      local called = statement:match "([%w_]+)%s*%b()[^()]*;$" or statement:match "([%w_]+)%s*%b()%s*__attribute__.*;$"
      if statement:match "%f[%w]typedef%f[%W]" then called = nil end
      if called and not statement:match "[%w_%)]%s*=" then names[1] = called end
      if not called and statement:match "%f[%w]extern%f[%W]" then
        for name in statement:gsub("^.-extern", ""):gmatch "([%w_]+)%s*[%[%],;]" do names[#names + 1] = name end
      end
      for _, name in ipairs(names) do
        local source = symbols.defined[name]
        if source then
          seen = seen + 1
          local wanted = has_own and source == own or not has_own and layer_of(source) == layer_of(header)
          if not wanted then wrong[#wrong + 1] = { header = header, symbol = name, source = source } end
        end
      end
    end
  end
  return wrong, seen
end

local function commas(text) return select(2, text:gsub("%b()", ""):gsub("%b<>", ""):gsub(",", "")) end

-- The number of fields between the braces of a struct, including the fields of structs and unions inside it.
local function fields(body)
  local n = 0
  for _, kind in ipairs { "struct", "union" } do
    for inner in body:gmatch("%f[%w]" .. kind .. "%s*(%b{})") do n = n + fields(inner:sub(2, -2)) end
  end
  for declaration in body:gsub("union%s*%b{}%s*;", ""):gsub("%b{}", ""):gmatch "[^;]+;" do
    n = n + 1 + commas(declaration)
  end
  return n
end

-- Keywords that, like the name of a function, may stand before parentheses and a brace.
local statement = { ["if"] = true, ["for"] = true, ["while"] = true, ["switch"] = true, ["return"] = true }

--- Lists structs with their numbers of fields, and functions with their numbers of parameters, as { path, name, n }:
--- in C, CUDA and macros, templates, kernels, members and lambdas ("[]") too.
function M.sizes(root)
  local structs, functions = {}, {}
  for _, path in ipairs(M.sources(root, "%.[chu]+$")) do
    local text = plain_c(read(root .. "/" .. path))
    for head, body, tail in text:gmatch "%f[%w]struct%s*([%w_]*)%s*(%b{})%s*([%w_]*)" do
      structs[#structs + 1] = { path = path, name = head ~= "" and head or tail, n = fields(body:sub(2, -2)) }
    end
    text = text:gsub("__attribute__%s*%b()", ""):gsub("__launch_bounds__%s*%b()", "")
    for at in text:gmatch "()%(" do
      -- Matches `NAME(...) {`, `R(NAME)(...) {` and `[...](...) {`, also with words such as const or -> T before {.
      local parameters, after = text:match("^(%b())([%w_%s]*){", at)
      if not parameters then parameters, after = text:match("^(%b())%s*([%w_%s]*)%->[%w_%s:<>,%*&]+{", at) end
      local before = parameters and text:sub(math.max(1, at - 99), at - 1)
      local name = before and (before:match "%]%s*$" and "[]" or before:match "[%w_]+%s*%(([%w_#]+)%)%s*$"
        or before:match "[^%)%s]%s*%f[%w_]([%a_][%w_]*)%s*$")
      if name and not statement[name] and not after:gsub("mutable", ""):gsub("const", ""):match "%S" then
        local list = parameters:sub(2, -2)
        local n = (list:match "^%s*$" or list:match "^%s*void%s*$") and 0 or 1 + commas(list)
        functions[#functions + 1] = { path = path, name = name, n = n }
      end
    end
  end
  return structs, functions
end

-- ---- Lua -----------------------------------------------------------------------------------------

--- A list of the modules under root/folder: the path of each, its name ("nn.linear"; "" is folder/init.lua) and its
--- code without comments.
local function modules(root, folder)
  local list = {}
  for _, path in ipairs(M.files(root, folder, "%.lua$")) do
    local name = path:sub(#folder + 2):gsub("%.lua$", ""):gsub("/", "."):gsub("%.?init$", "")
    list[#list + 1] = { path = path, name = name,
      code = read(root .. "/" .. path):gsub("%-%-%[%[.-%]%]", ""):gsub("%-%-[^\n]*", "") }
  end
  return list
end

--- Lists uses by require "moonshard.NAME" as { user, used, by }, where user and used are names of modules.
function M.requires(root, folder)
  local uses, count = {}, 0
  for _, module in ipairs(modules(root, folder)) do
    count = count + 1
    for name in module.code:gmatch 'require%s*%(?%s*["\']moonshard([%w_.]*)["\']' do
      uses[#uses + 1] = { user = module.name, used = name:sub(2), by = "require" }
    end
  end
  return uses, count
end

--- Lists fields of a module that another module assigns, as { user, used, by }. A field that is assigned repeatedly is
--- state; `state` lists such fields: ["core.context"] = "now".
function M.late(root, folder, state)
  local uses = {}
  for _, module in ipairs(modules(root, folder)) do
    local code = "\n" .. module.code
    local whole = 'local%s+([%w_]+)%s*=%s*require%s*%(?%s*["\']moonshard%.?([%w_.]*)["\']%s*%)?%s*\n'
    for variable, name in code:gmatch(whole) do
      local function found(field)
        if field ~= state[name] then uses[#uses + 1] = { user = module.name, used = name, by = field } end
      end
      for field in code:gmatch("\n%s*function%s+" .. variable .. "[.:]([%w_]+)") do found(field) end
      for field, sign in code:gmatch("\n%s*" .. variable .. "%.([%w_]+)[%w_.]*%s*=(.)") do
        if sign ~= "=" then found(field) end
      end
    end
  end
  return uses
end

-- ---- checking the uses -----------------------------------------------------------------------------

--- Returns the uses of a higher layer, as text, and the number of uses between different layers. place_of(name) returns
--- the layer of a file or module, and the height of the layer.
function M.upward(uses, place_of)
  local wrong, between, told = {}, 0, {}
  for _, use in ipairs(uses) do
    local from, low = place_of(use.user)
    local to, high = place_of(use.used)
    if not from then
      wrong[#wrong + 1] = use.user .. " belongs to no layer"
    elseif not to then
      wrong[#wrong + 1] = use.used .. " belongs to no layer"
    elseif from ~= to then
      between = between + 1
      if high > low then wrong[#wrong + 1] = ("%s uses %s (%s)"):format(use.user, use.used, use.by) end
    end
  end
  local list = {}
  table.sort(wrong)
  for _, text in ipairs(wrong) do
    if not told[text] then list[#list + 1] = text end
    told[text] = true
  end
  return list, between
end

--- The uses within one layer.
function M.within(uses, place_of)
  local list = {}
  for _, use in ipairs(uses) do
    if place_of(use.user) == place_of(use.used) then list[#list + 1] = use end
  end
  return list
end

--- Cycles between layers: a list of texts "a -> b -> a".
function M.circles(uses, place_of)
  local next_of, layers = {}, {}
  for _, use in ipairs(uses) do
    local from, to = place_of(use.user), place_of(use.used)
    if from and to and from ~= to then
      if not next_of[from] then
        next_of[from] = {}
        layers[#layers + 1] = from
      end
      next_of[from][to] = true
    end
  end
  table.sort(layers)
  local found, state, path = {}, {}, {}
  local function visit(layer)
    state[layer] = "open"
    path[#path + 1] = layer
    local after = {}
    for to in pairs(next_of[layer] or {}) do after[#after + 1] = to end
    table.sort(after)
    for _, to in ipairs(after) do
      if state[to] == "open" then
        local at = #path
        while path[at] ~= to do at = at - 1 end
        found[#found + 1] = table.concat(path, " -> ", at) .. " -> " .. to
      elseif not state[to] then
        visit(to)
      end
    end
    path[#path] = nil
    state[layer] = "done"
  end
  for _, layer in ipairs(layers) do
    if not state[layer] then visit(layer) end
  end
  return found
end

--- The names of the variables that the text of a C file keeps between calls: static, at file scope, not constant.
---@param text string
---@return string[]
function M.variables(text)
  local list, inside = {}, false
  for line in text:gmatch "[^\n]+" do
    local code = line:gsub("//.*", "")
    if inside then
      local name = code:match "^}[%s*]*([%w_]+)"
      if name then list[#list + 1], inside = name, false end
    elseif code:find "^static [%w_ ]*struct [%w_ ]*{" then
      inside = not code:find "const struct"
    elseif code:find "^static " and not (code:find "^static const " or code:find "%*const " or code:find "inline") then
      local head = code:match "^(.-)[=;]" or code
      if not head:find "%(" then list[#list + 1] = head:gsub("%[.*", ""):match "([%w_]+)%s*$" end
    end
  end
  return list
end

--- Static functions of runtime and kernels by name: a list of the files that define it. Names that a macro makes, such
--- as R(sum), and ms__ names of inline functions are left out.
function M.statics(root)
  local found = {}
  for _, path in ipairs(M.sources(root, "%.[chu]+$")) do
    for line in read(root .. "/" .. path):gmatch "[^\n]+" do
      local name = line:gsub("__attribute__%s*%b()", ""):match "^static [^%(=;]-([%w_]+)%("
      if name and not line:find ";%s*$" and name:find "%l" and not name:find "^ms__" then
        local list = found[name] or {}
        if list[#list] ~= path then list[#list + 1] = path end
        found[name] = list
      end
    end
  end
  return found
end

return M
