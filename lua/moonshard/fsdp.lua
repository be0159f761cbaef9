-- SPDX-License-Identifier: MIT
--- Makes ms.fsdp available as `require "moonshard.fsdp"`.
return require "moonshard.parallel.fsdp"
