#compdef moonshard
# SPDX-License-Identifier: MIT
# Completion of `moonshard` for zsh; and, if this file is sourced from a source tree (after compinit), of the programs in
# its scripts/. The candidates come from the usage texts (scripts/support/usage.lua).
_moonshard() {
    local text
    local -a lines
    if text=$("${_moonshard_tree:+$_moonshard_tree/scripts/}moonshard" complete "${(@)words[1,CURRENT]}" 2>/dev/null); then
        lines=("${(@f)${text//$'\t'/:}}")              # NAME:DESCRIPTION
        [[ -z $text ]] || _describe candidate lines
    else
        _files
    fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _moonshard "$@"
else
    typeset -g _moonshard_tree=${${(%):-%x}:A:h:h:h}
    if [[ -e $_moonshard_tree/scripts/setup ]]; then
        for _moonshard_program in $_moonshard_tree/scripts/*(*.) $_moonshard_tree/scripts/bench/*(*.); do
            compdef -p _moonshard "(|*/)${_moonshard_program#$_moonshard_tree/}"
        done
        unset _moonshard_program
    else
        _moonshard_tree=
    fi
    compdef _moonshard moonshard
fi
