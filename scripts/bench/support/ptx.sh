#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# ptx.sh FOLDER [NAME]: makes FOLDER/NAME.ptx, and NAME.log and NAME.sm_80.log, the reports of `ptxas -v` for sm_90
# and sm_80, of every file of kernels/cuda, or of NAME.cu alone. A file is compiled again when it, or anything that it
# includes, has changed. Fails with the compiler's text; with status 3 where there is no nvcc.
# ptx.sh FOLDER --build NVCC ARGUMENT...: compiles as the build asks, and keeps the PTX and the report that arise.
set -euo pipefail
unset LD_PRELOAD  # nvcc does not run with a sanitizer's library
PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || { echo "there is no nvcc" >&2; exit 3; }
mkdir -p "${1:?usage: ptx.sh FOLDER [NAME | --build NVCC ARGUMENT...]}"
out=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# The options of CMakeLists.txt. -fmad=false: the compiler must not contract a*b + c to an fma.
options=(-std=c++20 -O3 -fmad=false -arch=compute_80 -Xcompiler=-fPIC -Ikernels -Iruntime)

# Prints everything that the PTX of a .cu file depends on: the compiler, its options, and the content of the included
# files of this repository.
key() {
    nvcc --version
    echo "${options[@]}"
    tr ' \\' '\n\n' <"$out/$1.d" | sed "s,^$root/,,; s,^\(\.\./\)*,," | grep -E '^(kernels|runtime|spec)/' | sort -u | (cd "$root" && xargs cat)
}
one() {
    local at=$out/$1
    if [ -f "$at.key" ] && [ "$(key "$1" 2>/dev/null | sha256sum)" = "$(cat "$at.key")" ]; then return; fi
    rm -f "$at.key"
    cd "$root"
    nvcc "${options[@]}" -ptx -MD -MF "$at.d" -o "$at.ptx" "$(find kernels/cuda spec/support/cuda/ptx -name "$1.cu")"
    ptxas -arch=sm_90 -v -o /dev/null "$at.ptx" 2>"$at.log" || { cat "$at.log" >&2; return 1; }
    ptxas -arch=sm_80 -v -o /dev/null "$at.ptx" 2>"$at.sm_80.log"
    key "$1" | sha256sum >"$at.key"
}
# The key of all files together, of everything that any of them can depend on. The keys of the files take a second.
key_of_all() {
    (
        cd "$root"
        nvcc --version
        echo "${options[@]}"
        find kernels runtime -type f | sort | xargs sha256sum
    ) | sha256sum
}
# Whether every file has its key, which is removed when the file is compiled.
complete() {
    local name
    while IFS= read -r name; do [ -f "$out/$name.key" ] || return 1; done < <(
        find "$root/kernels/cuda" -name '*.cu' -printf '%f\n' | sed 's,\.cu$,,')
}
# Runs the compiler's command in the folder of the build. With a compiler cache, the command may make no PTX, only the
# object.
build() {
    local arguments=("$@") at status=0 i
    for ((i = 0; i < $#; i++)); do
        case "${arguments[i]}" in
            -MF) depends=${arguments[i + 1]} ;;
            *.cu) name=$(basename "${arguments[i]}" .cu) ;;
        esac
    done
    at=$out/$name
    rm -rf "$at.key" "$at.kept"
    mkdir "$at.kept"
    "$@" --keep "--keep-dir=$at.kept" -Xptxas=-v 2>"$at.text" || status=$?
    grep -v '^ptxas info' "$at.text" | grep -vE '^ +[0-9]+ bytes' >&2 || true
    if [ $status = 0 ] && [ -f "$at.kept/$name.ptx" ]; then
        mv "$at.kept/$name.ptx" "$at.ptx"
        cp "$depends" "$at.d"
        awk '/for .sm_/ { of = /sm_90/ } of' "$at.text" >"$at.log"
        awk '/for .sm_/ { of = /sm_80/ } of' "$at.text" >"$at.sm_80.log"
        key "$name" | sha256sum >"$at.key" || rm "$at.key"
    fi
    rm -r "$at.kept" "$at.text"
    return $status
}
if [ "${2-}" = --build ]; then
    build "${@:3}"
elif [ $# = 2 ]; then
    one "$2"
else
    exec 9>"$out/lock"
    flock 9                 # two runs of this script do not compile at the same time
    before=$(key_of_all)
    if [ "$before" = "$(cat "$out/all.key" 2>/dev/null)" ] && complete; then exit 0; fi
    # The largest first: two of them take most of the time.
    find "$root/kernels/cuda" -name '*.cu' -printf '%s %f\n' | sort -rn | sed 's,.* ,,; s,\.cu$,,' |
        xargs -P "$(nproc)" -n 1 "$root/scripts/bench/support/ptx.sh" "$out"
    echo "$before" >"$out/all.key"
fi
