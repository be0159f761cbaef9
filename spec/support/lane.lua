-- SPDX-License-Identifier: MIT
--- Several runs of busted beside each other share the spec files: a run takes each file that no other took before.
--- scripts/test starts the runs, with MOONSHARD_SPEC_LANES naming an empty folder that is theirs.
local busted = require "busted"
local lfs = require "lfs"

return function(folder)
  busted.subscribe({ "file", "start" }, function(file)
    -- Only one of the runs can make the folder named like the file. In the other runs the file does nothing, but the
    -- fields of file.run stay: busted reads the fields of the first file for all files.
    if not lfs.mkdir(("%s/%s"):format(folder, (file.name:gsub("/", ".")))) then
      getmetatable(file.run).__call = function() end
    end
    return nil, true
  end, { priority = 1 })
end
