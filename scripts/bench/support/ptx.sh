#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# ptx.sh FOLDER [NAME]: compiles every file of kernels/cuda, or NAME.cu alone, for sm_90; writes FOLDER/NAME.ptx, and
# the report of `ptxas -v` to FOLDER/NAME.log. A file is compiled again when it, or anything that it includes, has
# changed. Fails with the compiler's text; with status 3 where there is no nvcc.
set -euo pipefail
unset LD_PRELOAD  # nvcc does not run with a sanitizer's library
PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || { echo "there is no nvcc" >&2; exit 3; }
mkdir -p "${1:?usage: ptx.sh FOLDER [NAME]}"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
# The options of CMakeLists.txt. -fmad=false: the compiler must not contract a*b + c to an fma.
options=(-std=c++20 -O3 -fmad=false -arch=compute_80 -Xcompiler=-fPIC -Ikernels -Iruntime)

# Prints everything that the PTX of a .cu file depends on: the compiler, its options, and the content of the included
# files of this repository.
key() {
    nvcc --version
    echo "${options[@]}"
    tr ' \\' '\n\n' <"$out/$1.d" | grep -E '^(kernels|runtime)/' | sort -u | xargs cat
}
one() {
    local at=$out/$1
    if [ -f "$at.key" ] && [ "$(key "$1" 2>/dev/null | sha256sum)" = "$(cat "$at.key")" ]; then return; fi
    rm -f "$at.key"
    nvcc "${options[@]}" -ptx -MD -MF "$at.d" -o "$at.ptx" "$(find kernels/cuda -name "$1.cu")"
    ptxas -arch=sm_90 -v -o /dev/null "$at.ptx" 2>"$at.log" || { cat "$at.log" >&2; return 1; }
    key "$1" | sha256sum >"$at.key"
}
if [ $# = 2 ]; then
    one "$2"
else
    exec 9>"$out/lock"
    flock 9                 # one run at a time, which compiles several files at once
    # The largest first: two of them take most of the time.
    find kernels/cuda -name '*.cu' -printf '%s %f\n' | sort -rn | sed 's,.* ,,; s,\.cu$,,' |
        xargs -P "$(nproc)" -n 1 "scripts/bench/support/ptx.sh" "$out"
fi
