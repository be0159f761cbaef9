# SPDX-License-Identifier: MIT
# Completion of `moonshard` for fish; and, if this file is sourced from a source tree, of the programs in its scripts/.
# The candidates come from the usage texts (scripts/support/usage.lua).
set -g __moonshard_command moonshard
set -l tree (path resolve (status dirname)/../..)
if test -e $tree/scripts/setup
    set -g __moonshard_command $tree/scripts/moonshard
    for program in $tree/scripts/* $tree/scripts/bench/*
        if test -f $program -a -x $program
            complete --path '*'(string replace $tree/ '' $program) --no-files --arguments '(__moonshard_complete)'
        end
    end
end
complete --command moonshard --no-files --arguments '(__moonshard_complete)'

function __moonshard_complete
    set -l lines ($__moonshard_command complete (commandline --cut-at-cursor --tokenize --current-process) \
        (commandline --cut-at-cursor --current-token) 2>/dev/null)
    if test $status = 0
        printf '%s\n' $lines
    else
        __fish_complete_path (commandline --cut-at-cursor --current-token)
    end
end
