-- SPDX-License-Identifier: MIT
--- Opens pages in Debian's Chromium without a display: to read the page as it is after its script ran, or to use it
--- with mouse and keyboard. The browser is driven by the DevTools protocol, JSON texts over two pipes.
local cjson = require "cjson"
local fcntl, poll, unistd = require "posix.fcntl", require "posix.poll", require "posix.unistd"
local process = require "spec.support.process"

local M = {}

M.is_there = os.execute "command -v chromium >/dev/null 2>&1" == 0

--- The reason to append to the title of a spec that is pending without Chromium; "" if Chromium is installed.
M.missing = M.is_there and "" or ": there is no chromium; scripts/setup --with chromium"

-- ---- the protocol ----------------------------------------------------------------------------------------

local Page = {}
Page.__index = Page

local function receive(self, seconds)
  local limit = process.now() + seconds * process.patience
  while true do
    local at = self.text:find("%z")
    if at then
      local message = cjson.decode(self.text:sub(1, at - 1))
      self.text = self.text:sub(at + 1)
      return message
    end
    if process.now() > limit then return nil end
    if poll.rpoll(self.from, 100) == 1 then
      self.text = self.text .. unistd.read(self.from, 2 ^ 20)
    elseif self.child:poll() then
      error("chromium ended: " .. process.read(self.folder .. "/err"):sub(-2000), 0)
    end
  end
end

-- Notes what the page writes to the console, and errors of its script.
local function note(self, message)
  local p = message.params
  if message.method == "Runtime.exceptionThrown" then
    self.console[#self.console + 1] = p.exceptionDetails.exception and p.exceptionDetails.exception.description
      or p.exceptionDetails.text
  elseif message.method == "Runtime.consoleAPICalled" then
    for _, part in ipairs(p.args) do self.console[#self.console + 1] = tostring(part.value or part.description) end
  elseif message.method == "Log.entryAdded" then
    self.console[#self.console + 1] = p.entry.text
  end
end

--- Calls a method of the protocol and returns its result.
---@param method string  such as "Page.reload"
---@param params? table
---@return table
function Page:call(method, params)
  self.id = self.id + 1
  local text = cjson.encode { id = self.id, method = method, params = params or {}, sessionId = self.session } .. "\0"
  local at = 1
  while at <= #text do at = at + assert(unistd.write(self.to, text:sub(at, at + 32767))) end
  while true do
    local message = receive(self, 60)
    if not message then error(("chromium: no answer to %s within 60 s"):format(method), 2) end
    if message.id == self.id then
      if message.error then error(("%s: %s"):format(method, message.error.message), 2) end
      return message.result
    end
    self.seen[message.method or ""] = true
    note(self, message)
  end
end

local function wait_for(self, event)
  while not self.seen[event] do
    local message = receive(self, 60)
    if not message then error(("chromium: the page has no event %s within 60 s"):format(event), 2) end
    self.seen[message.method or ""] = true
    note(self, message)
  end
end

-- ---- pages -----------------------------------------------------------------------------------------------

--- Opens a file in a new browser and waits until it is loaded. The page must be closed.
---@param path string  absolute
---@param given? {width: integer, height: integer, dark: boolean}
---@return table page
function M.page(path, given)
  local folder = process.temp_folder()
  assert(os.execute(("mkfifo '%s/in' '%s/out'"):format(folder, folder)) == 0)
  local self = setmetatable({ folder = folder, text = "", id = 0, console = {}, seen = {} }, Page)
  -- Opened for reading and writing, because opening one end of a named pipe waits until the other is opened.
  self.to, self.from = assert(fcntl.open(folder .. "/in", fcntl.O_RDWR)), assert(fcntl.open(folder .. "/out",
    fcntl.O_RDWR))
  -- Chromium does not run with a sanitizer's library.
  self.child = process.start({ "sh", "-c", ("cd / && unset LD_PRELOAD && HOME=%s exec chromium --headless --no-sandbox "
    .. "--disable-gpu --disable-dev-shm-usage --user-data-dir=%s/data --remote-debugging-pipe 3<%s/in 4>%s/out")
    :format(folder, folder, folder, folder) }, { stdout = "/dev/null", stderr = folder .. "/err" })
  local target = self:call("Target.createTarget", { url = "about:blank" }).targetId
  self.session = self:call("Target.attachToTarget", { targetId = target, flatten = true }).sessionId
  for _, domain in ipairs { "Page", "Runtime", "Log" } do self:call(domain .. ".enable") end
  given = given or {}
  self:size(given.width or 1280, given.height or 1600)
  if given.dark then self:media("", "dark") end
  self:open(path)
  return self
end

--- Opens another file in the page's place, and waits until it is loaded. Its console begins empty.
---@param path string  absolute
function Page:open(path)
  self.seen, self.console = {}, {}
  self:call("Page.navigate", { url = "file://" .. path })
  wait_for(self, "Page.loadEventFired")
  self:frame()
end

function Page:size(width, height)
  self:call("Emulation.setDeviceMetricsOverride", { width = width, height = height, deviceScaleFactor = 1,
    mobile = false })
end

--- Sets what media queries see.
---@param media string  "print", or "" for a screen
---@param scheme? "light"|"dark"
function Page:media(media, scheme)
  self:call("Emulation.setEmulatedMedia", { media = media,
    features = { { name = "prefers-color-scheme", value = scheme or "light" } } })
end

--- The value of an expression in the page, which may be a promise.
---@param script string
---@return any
function Page:value(script)
  local result = self:call("Runtime.evaluate", { expression = script, returnByValue = true, awaitPromise = true })
  if result.exceptionDetails then
    error((result.exceptionDetails.exception or {}).description or result.exceptionDetails.text, 2)
  end
  return result.result.value
end

--- Waits until the page has been drawn.
function Page:frame() self:value "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))" end

local SHIFT, CONTROL = 8, 2

local function modifiers(words)
  return ((words or ""):find "shift" and SHIFT or 0) + ((words or ""):find "control" and CONTROL or 0)
end

--- Presses the mouse's button at one place and releases it at another.
---@param held? string  "shift", "control"
function Page:drag(x1, y1, x2, y2, held)
  local function event(kind, x, y, button)
    self:call("Input.dispatchMouseEvent", { type = kind, x = x, y = y, button = button or "left", clickCount = 1,
      buttons = kind == "mouseReleased" and 0 or 1, modifiers = modifiers(held) })
  end
  event("mousePressed", x1, y1)
  event("mouseMoved", (x1 + x2) / 2, (y1 + y2) / 2)
  event("mouseMoved", x2, y2)
  event("mouseReleased", x2, y2)
  self:frame()
end

function Page:hover(x, y)
  self:call("Input.dispatchMouseEvent", { type = "mouseMoved", x = x, y = y })
  self:frame()
end

--- Turns the mouse's wheel at (x, y) by a distance in pixels; positive: down.
---@param held? string  "shift", "control"
function Page:wheel(x, y, by, held)
  self:call("Input.dispatchMouseEvent", { type = "mouseWheel", x = x, y = y, deltaX = 0, deltaY = by,
    modifiers = modifiers(held) })
  self:frame()
end

---@param key string  its name in the DOM, such as "ArrowLeft" or "+"
---@param held? string  "shift", "control"
function Page:key(key, held)
  for _, kind in ipairs { "keyDown", "keyUp" } do
    self:call("Input.dispatchKeyEvent", { type = kind, key = key, text = #key == 1 and kind == "keyDown" and key or nil,
      windowsVirtualKeyCode = key == "Tab" and 9 or key == "Enter" and 13 or nil, modifiers = modifiers(held) })
  end
  self:frame()
end

--- What a screen reader gets: the nodes of the accessibility tree that have a role and are not ignored, in order.
---@return { role: string, name: string, properties: table<string, any> }[]
function Page:accessible()
  local list = {}
  for _, node in ipairs(self:call("Accessibility.getFullAXTree").nodes) do
    if not node.ignored and node.role then
      local properties = {}
      for _, p in ipairs(node.properties or {}) do properties[p.name] = p.value.value end
      list[#list + 1] = { role = node.role.value, name = node.name and node.name.value or "",
        description = node.description and node.description.value, properties = properties }
    end
  end
  return list
end

local function save(base64, path)
  process.write(path .. ".base64", base64)
  assert(os.execute(("base64 -d '%s.base64' >'%s' && rm '%s.base64'"):format(path, path, path)) == 0)
end

--- Writes a picture (PNG) of the window, or of the whole page.
---@param whole? boolean
function Page:picture(path, whole)
  save(self:call("Page.captureScreenshot", { format = "png", captureBeyondViewport = whole or false }).data, path)
end

--- Writes the page as it is printed (PDF).
function Page:print(path) save(self:call("Page.printToPDF", { printBackground = true }).data, path) end

function Page:close()
  pcall(self.call, self, "Browser.close")
  self.child:stop()
  unistd.close(self.to)
  unistd.close(self.from)
  -- Chromium's own children write in its profile until they notice that it has ended.
  os.execute(("for k in $(seq 50); do rm -rf '%s' 2>/dev/null && break; sleep 0.1; done"):format(self.folder))
end

--- The elements of the page after its script ran, and what was written to the console.
---@return string dom
---@return string console
function Page:result()
  return self:value "document.documentElement.outerHTML", table.concat(self.console, "\n")
end

--- What Page:result returns, of a file that is opened in a new browser.
---@param path string  absolute
---@return string dom
---@return string console
function M.open(path)
  local page = M.page(path)
  local dom, console = page:result()
  page:close()
  return dom, console
end

return M
