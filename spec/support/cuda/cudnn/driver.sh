#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# driver.sh FOLDER [OPTION]...: makes FOLDER/libcuda.so.1 from driver.c, compiled with these options, and the function
# names of the toolkit's stub. A function that driver.c does not have returns 999, CUDA_ERROR_UNKNOWN.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
out=${1:?driver.sh: which folder}
stub=$(ls /usr/local/cuda/{lib64,lib,targets/*/lib}/stubs/libcuda.so 2>/dev/null | head -n 1)
[ -n "$stub" ] || { echo "no stub of libcuda under /usr/local/cuda" >&2; exit 3; }
{
    echo .text
    nm -D --defined-only "$stub" | awk '$2 ~ /[TW]/ { sub(/@.*/, "", $3); print $3 }' | sort -u |
        awk '{ printf ".weak %s\n.type %s, @function\n%s:\n", $1, $1, $1 }'
    case $(uname -m) in
        aarch64) printf 'mov w0, 999\nret\n' ;;
        *) printf 'mov $999, %%eax\nret\n' ;;
    esac
    echo '.section .note.GNU-stack, "", %progbits'
} >"$out/rest.s"
gcc -shared -fPIC -Wall -Wextra -Wno-unused-parameter "${@:2}" -Wl,-soname,libcuda.so.1 -Wl,-Bsymbolic \
    -o "$out/libcuda.so.1" "$here/driver.c" "$out/rest.s" -ldl
