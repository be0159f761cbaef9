-- SPDX-License-Identifier: MIT
std = "luajit"
max_line_length = false      -- scripts/format checks it
ignore = { "581" }   -- allows `not (x <= y)`: it is not `x > y` if x is NaN
files["spec"] = { std = "luajit+busted" }
exclude_files = { "build*" }
