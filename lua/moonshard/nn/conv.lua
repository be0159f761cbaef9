--- Conv2d.
local errors = require "moonshard.errors"
local opts = require "moonshard.opts"
local functional = require "moonshard.nn.functional"
local init = require "moonshard.nn.initial".init
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.parameter".empty

local raise, show = errors.raise, errors.kind

---Images [N, in, H, W] (or [in, H, W]) to [N, out, H', W']. weight [out, in / groups, KH, KW], bias [out].
---Options: stride, padding (numbers, pairs, "same", "valid"), dilation, groups, bias, padding_mode ("zeros"), dtype, device.
---@class Conv2d: Module
---@field weight Parameter
---@field bias Parameter?
---@overload fun(size_in: integer, size_out: integer, kernel: integer|integer[], opts?: table): Conv2d
local Conv2d = Module:extend("Conv2d")

function Conv2d:init(size_in, size_out, kernel, given)
  local o = opts("Conv2d", given, {
    stride = opts.any, padding = opts.any, dilation = opts.any, groups = 1, bias = true, padding_mode = opts.one_of({ "zeros" }, "zeros"),
    dtype = opts.string, device = opts.any,
  })
  for _, n in ipairs { size_in or false, size_out or false } do
    if type(n) ~= "number" or n < 0 or n % 1 ~= 0 then raise("Conv2d: sizes are whole numbers, got %s", show(n or nil)) end
  end
  o.stride, o.padding, o.dilation = o.stride or 1, o.padding or 0, o.dilation or 1
  if o.groups < 1 or o.groups % 1 ~= 0 then raise("groups must be a positive integer") end
  if size_in % o.groups ~= 0 then raise("in_channels must be divisible by groups") end
  if size_out % o.groups ~= 0 then raise("out_channels must be divisible by groups") end
  local kind = { dtype = o.dtype, device = o.device }
  local k = functional.pair("Conv2d", "kernel", kernel)
  self.size_in, self.size_out, self.kernel, self.padding = size_in, size_out, { k[1], k[2] }, o.padding
  self.how = functional.conv_options("Conv2d", o, k)
  self.weight = empty({ size_out, size_in / o.groups, k[1], k[2] }, kind)
  if o.bias then self.bias = empty({ size_out }, kind) end
  self:reset_parameters()
end

---Draws weight and bias anew, uniform in +-1/sqrt(inputs of an output).
function Conv2d:reset_parameters()
  init.kaiming_uniform_(self.weight, { a = math.sqrt(5) })
  if self.bias then
    local inputs = self.size_in / self.how.groups * self.kernel[1] * self.kernel[2]
    local bound = inputs > 0 and 1 / math.sqrt(inputs) or 0
    init.uniform_(self.bias, -bound, bound)
  end
end

local conv2d = functional.conv2d
function Conv2d:forward(x)
  local slots = self._slots
  return conv2d(x, slots.weight, slots.bias, slots.how)
end

local function text(v)
  if type(v) == "string" then return v end
  return v[1] == v[2] and tostring(v[1]) or v[1] .. "x" .. v[2]
end

function Conv2d:extra_repr()
  local how, out = self.how, { ("%d -> %d, kernel %s"):format(self.size_in, self.size_out, text(self.kernel)) }
  local padding = type(self.padding) == "string" and self.padding or { how.padding[1], how.padding[2] }
  if text(how.stride) ~= "1" then out[#out + 1] = "stride " .. text(how.stride) end
  if text(padding) ~= "0" then out[#out + 1] = "padding " .. text(padding) end
  if text(how.dilation) ~= "1" then out[#out + 1] = "dilation " .. text(how.dilation) end
  if how.groups ~= 1 then out[#out + 1] = "groups " .. how.groups end
  if self.bias then out[#out + 1] = "bias" end
  return table.concat(out, ", ")
end

return { Conv2d = Conv2d }
