-- SPDX-License-Identifier: MIT
--- The tokenizers of spec/golden/data, by file name. The models of SentencePiece are compressed there.
local ms = require "moonshard"
local process = require "spec.support.process"

local FOLDER = process.root .. "/spec/golden/data/tokenizers/"

local data = {}

--- The contents of a file.
function data.read(name)
  if not name:find "%.model$" then return process.read(FOLDER .. name) end
  return (process.shell(("gunzip -c '%s%s.gz'"):format(FOLDER, name)))
end

--- The tokenizer that a file holds.
function data.open(name)
  local folder = process.temp_folder()
  process.write(folder .. "/" .. name, data.read(name))
  local t = ms.text.tokenizer(folder .. "/" .. name)
  process.remove_folder(folder)
  return t
end

return data
