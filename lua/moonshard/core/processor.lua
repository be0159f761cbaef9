-- SPDX-License-Identifier: MIT
--- What to say, at the start and by the doctor, of a processor without FMA: float32 functions that all processors
--- compute with the same bits call libm's fma there, an element at a time.
local M = {}

M.without_fma = "exponentials, softmax and like functions take about 40 times as long without FMA"

--- The warning at the start; nil if there is none. A level that MOONSHARD_ISA asks for gives none.
---@param architecture string  jit.arch
---@param isa string  ms_cpu_isa()
---@param asked string?  MOONSHARD_ISA
---@param rank integer  only rank 0 warns
---@return string?
function M.warning(architecture, isa, asked, rank)
  if architecture ~= "x64" or isa ~= "v1" or asked or rank ~= 0 then return nil end
  return "this processor has no AVX2 and FMA: " .. M.without_fma
end

return M
