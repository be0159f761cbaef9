-- SPDX-License-Identifier: MIT
--- busted's own output, followed by `N passed, N failed` alone on the last line. An error in a describe, a file that
--- does not load, and a run without tests count as failed. On a terminal prints a dot per test; elsewhere (CI) a line
--- per file with tests, with its time.
return function(options)
  local busted = require "busted"
  local terminal = io.type(io.stdout) == "file" and require("term").isatty(io.stdout)
  options.deferPrint = options.deferPrint or not terminal
  local handler = require("busted.outputHandlers." .. (terminal and "utfTerminal" or "plainTerminal"))(options)

  local function counts()
    return handler.successesCount, handler.failuresCount + handler.errorsCount
  end

  local passed_before, failed_before = 0, 0
  busted.subscribe({ "file", "end" }, function(file)
    if not terminal then
      local passed, failed = counts()
      if passed + failed > passed_before + failed_before then
        io.write(("%6d passed, %d failed  %7.2f s  %s\n"):format(passed - passed_before, failed - failed_before,
          file.duration, file.name))
        io.flush()
      end
      passed_before, failed_before = passed, failed
    end
    return nil, true
  end)
  busted.subscribe({ "suite", "end" }, function()
    io.write(("\n%d passed, %d failed\n"):format(counts()))
    io.flush()
    return nil, true
  end)
  return handler
end
