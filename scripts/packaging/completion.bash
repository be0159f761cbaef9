# SPDX-License-Identifier: MIT
# Completion of `moonshard` for bash; and, if this file is sourced from a source tree, of the programs in its scripts/.
# The candidates come from the usage texts (scripts/support/usage.lua).
_moonshard() {
    local moonshard=moonshard current=${COMP_WORDS[COMP_CWORD]} before=() lines
    [ -z "$_moonshard_tree" ] || moonshard=$_moonshard_tree/scripts/moonshard
    [ "$COMP_CWORD" = 0 ] || before=("${COMP_WORDS[@]:0:COMP_CWORD}")
    COMPREPLY=()
    if lines=$("$moonshard" complete "${before[@]}" "$current" 2>/dev/null); then
        [ -z "$lines" ] || mapfile -t COMPREPLY < <(cut -f 1 <<<"$lines")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}
_moonshard_tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ -e "$_moonshard_tree/scripts/setup" ]; then
    for _moonshard_program in "$_moonshard_tree"/scripts/* "$_moonshard_tree"/scripts/bench/*; do
        if [ -f "$_moonshard_program" ] && [ -x "$_moonshard_program" ]; then
            complete -F _moonshard "$_moonshard_program" "${_moonshard_program#"$_moonshard_tree"/}" \
                "./${_moonshard_program#"$_moonshard_tree"/}"
        fi
    done
    unset _moonshard_program
else
    _moonshard_tree=
fi
complete -F _moonshard moonshard
