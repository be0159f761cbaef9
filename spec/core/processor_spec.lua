-- SPDX-License-Identifier: MIT
--- The warning about a processor without FMA.
describe("A processor without FMA", function()
  local warning = require "moonshard.core.processor".warning

  it("is named once, by rank 0, unless MOONSHARD_ISA asks for that level", function()
    assert.matches("^this processor has no AVX2 and FMA: ", warning("x64", "v1", nil, 0))
    assert.is_nil(warning("x64", "v1", nil, 1))
    assert.is_nil(warning("x64", "v1", "v1", 0))
    assert.is_nil(warning("x64", "v3", nil, 0))
    assert.is_nil(warning("arm64", "v1", nil, 0))
  end)
end)
