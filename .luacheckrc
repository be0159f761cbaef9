-- SPDX-License-Identifier: MIT
std = "luajit"
max_line_length = false      -- scripts/format looks at that
ignore = { "581" }   -- `not (x <= y)` is not `x > y`: NaN
files["spec"] = { std = "luajit+busted" }
exclude_files = { "build*" }
