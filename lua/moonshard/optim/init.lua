--- optim: SGD, Adam, AdamW over the engine's fused step, and learning rate schedules.
local errors = require "moonshard.errors"

---@class moonshard.optim
local optim = {
  lr_scheduler = require "moonshard.optim.lr_scheduler",
}
for name, class in pairs(require "moonshard.optim.optimizer") do optim[name] = class end

local function guard(t, what)
  return setmetatable(t, { __index = function(_, name)
    if type(name) ~= "string" or name:sub(1, 1) == "_" then return nil end
    local names = {}
    for known in pairs(t) do names[#names + 1] = known end
    table.sort(names)
    errors.raise("%s", errors.unknown("name in " .. what, name, names))
  end })
end
guard(optim.lr_scheduler, "optim.lr_scheduler")

return guard(optim, "optim")
