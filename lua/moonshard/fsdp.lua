-- SPDX-License-Identifier: MIT
--- ms.fsdp by the name that scripts require.
return require "moonshard.parallel.fsdp"
