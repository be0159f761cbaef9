std = "luajit"
max_line_length = 160
ignore = { "581" }   -- `not (x <= y)` is not `x > y`: NaN
files["spec"] = { std = "luajit+busted" }
exclude_files = { "build*" }
