# SPDX-License-Identifier: MIT
# The tools of scripts/test --sanitize, --tsan and --valgrind: how specs run under them, the planted faults they must
# detect first, and their reports. scripts/test sources this file, and sets $tool and $build. tool_start sets $watch,
# the words before a command that runs under the tool.
#
# Reports go to separate files, $reports/*, so reports of all processes that the specs start are found, at any depth,
# even where a spec expects the process to fail.
here=$PWD/spec/support/sanitizers
reports=

library() { gcc -print-file-name="$1"; }

tool_start() {
    reports=$PWD/$build/reports
    rm -rf "$reports"
    mkdir -p "$reports"
    busted=(busted)
    export MOONSHARD_TOOL=$tool
    case "$tool" in
        sanitize)
            gcc -O1 -shared -fPIC -o "$build/preload.so" "$here/preload.c" || fail 1 "preload.c"
            # Do not set fast_unwind_on_malloc=0: libgcc's unwinder deadlocks where LuaJIT has registered its machine
            # code with libgcc. The default one uses frame pointers.
            # intercept_tls_get_addr=0: with glibc 2.25 or newer, GCC up to 13 may mistake the words before a thread's
            # variables for a header with their address, and LeakSanitizer crashes when it reads that address at exit
            # (github.com/google/sanitizers/issues/1322).
            export ASAN_OPTIONS="exitcode=99:log_path=$reports/asan:intercept_tls_get_addr=0"
            export LSAN_OPTIONS="suppressions=$here/leaks.supp:print_suppressions=0:use_poisoned=1"
            export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:log_path=$reports/asan" MOONSHARD_REPORTS=$reports
            export \
                MOONSHARD_SPEC_PATIENCE=${MOONSHARD_SPEC_PATIENCE:-6}
            watch=(env "LD_PRELOAD=$(library libasan.so):$PWD/$build/preload.so:$(library libubsan.so)")
            ;;
        tsan)
            gcc -O1 -shared -fPIC -o "$build/jumps.so" "$here/jumps.c" || fail 1 "jumps.c"
            # Only Moonshard's library is checked: LuaJIT, Open MPI, oneDNN and libgomp are not instrumented.
            export TSAN_OPTIONS="exitcode=66:log_path=$reports/tsan:ignore_noninstrumented_modules=1:history_size=4"
            export MOONSHARD_SPEC_PATIENCE=${MOONSHARD_SPEC_PATIENCE:-10}
            watch=(env "LD_PRELOAD=$PWD/$build/jumps.so:$(library libtsan.so)")
            ;;
        valgrind)
            # Valgrind 3.19 does not support AVX-512, and runs one thread at a time.
            export MOONSHARD_ISA=v3 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1
            export MOONSHARD_SPEC_PATIENCE=${MOONSHARD_SPEC_PATIENCE:-40}
            watch=(valgrind --quiet "--log-file=$reports/valgrind.%p" "--suppressions=$here/valgrind.supp" --error-exitcode=97
                   --num-callers=24 --fair-sched=try --leak-check=full --show-leak-kinds=definite
                   --errors-for-leak-kinds=definite)
            # --ignore-lua runs the specs in this process, under valgrind; otherwise busted would start another luajit.
            busted=(luajit "$(command -v busted)" --ignore-lua)
            ;;
    esac
}

# planted FAULT EXPECTED [RANKS]: runs planted.lua under the tool, and checks that a report contains EXPECTED; if
# EXPECTED is empty, that there is no report.
planted() {
    local fault=$1 expected=$2 ranks=${3:-} out=$build/planted.log run=("${watch[@]}" luajit)
    if [ -n "$ranks" ]; then
        run=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
            mpirun -n "$ranks" "${watch[@]}" luajit)
    fi
    rm -f "$reports"/*
    timeout 600 "${run[@]}" "$here/planted.lua" "$PWD" "$PWD/$build/libplanted.so" "$fault" $ranks >"$out" 2>&1
    found $? "$fault${ranks:+ on $ranks ranks}"
}

# planted_in_spec FAULT EXPECTED [RANKS]: as `planted`, but runs planted_fault.lua, a spec, with the command for all
# specs.
planted_in_spec() {
    local fault=$1 expected=$2 ranks=${3:-} out=$build/planted.log
    rm -f "$reports"/*
    MOONSHARD_PLANTED=$PWD/$build/libplanted.so:$fault MOONSHARD_PLANTED_RANKS=$ranks \
        run_specs "$here/planted_fault.lua" >"$out" 2>&1
    found $? "$fault in a spec${ranks:+ on $ranks ranks}"
}

# found STATUS WHAT: checks the result of a planted fault, for the two functions above, whose $expected and $out it
# reads.
found() {
    local status=$1 what=$2 said
    said=$(cat "$reports"/* 2>/dev/null)
    rm -f "$reports"/*
    if [ -z "$expected" ]; then
        if [ "$status" = 0 ] && [ -z "$said" ]; then pass 1; return; fi
        cat "$out"
        fail 1 "$tool reports a fault in a script without faults ($what, status $status): $said"
    elif [[ "$said" == *"$expected"* ]] && { [ "$status" != 0 ] || [ "$tool" = valgrind ]; }; then
        pass 1
    else
        cat "$out"
        fail 1 "$tool does not find the planted fault '$what' (status $status): $said"
    fi
}

tool_check() {
    local flags
    case "$tool" in
        sanitize) flags=-fsanitize=address,undefined ;;
        tsan) flags=-fsanitize=thread ;;
        *) flags=-g ;;
    esac
    # shellcheck disable=SC2086
    gcc -g -O0 $flags -fvisibility=hidden -shared -fPIC -o "$build/libplanted.so" "$here/planted.c" -lpthread \
        || fail 1 "planted.c"
    echo "test: planted faults for $tool"
    planted none ""
    case "$tool" in
        sanitize)
            planted none "" 2
            planted leak "detected memory leaks"
            planted leak "detected memory leaks" 2
            planted engine_leak "ms_loader_open"
            planted engine_leak "ms_loader_open" 2
            planted overflow "heap-buffer-overflow"
            planted use_after_free "heap-use-after-free"
            planted undefined "shift-exponent"
            planted tensor_overflow "use-after-poison"
            planted tensor_after_release "use-after-poison"
            planted tensor_overflow "use-after-poison" 2
            planted_in_spec overflow "heap-buffer-overflow"
            planted_in_spec overflow "heap-buffer-overflow" 2
            ;;
        tsan)
            planted none "" 2
            planted race "data race"
            planted race "data race" 2
            planted_in_spec race "data race"
            planted_in_spec race "data race" 2
            ;;
        valgrind)
            planted leak "definitely lost"
            planted engine_leak "ms_loader_open"
            planted overflow "Invalid read"
            planted use_after_free "Invalid read"
            planted uninitialised "uninitialised value"
            planted tensor_overflow "Invalid write"
            planted tensor_after_release "Invalid write"
            planted_in_spec overflow "Invalid read"
            ;;
    esac
}

# The default specs under a tool: all that are neither too slow for it nor irrelevant to it.
tool_specs() {
    local f
    case "$tool" in
        tsan)
            specs=(spec/runtime spec/cuda spec/io/files_spec.lua spec/data/data_spec.lua spec/dist/collectives_spec.lua
                   spec/dist/groups_spec.lua spec/parallel/fsdp/fully_shard/parity_spec.lua
                   spec/parallel/fsdp/both/faults/interrupted_backward_spec.lua
                   spec/parallel/fsdp/both/schedule/gathers_and_reductions_spec.lua
                   spec/parallel/fsdp/both/schedule/overlap_spec.lua
                   spec/parallel/fsdp/fully_shard/accumulation_spec.lua
                   spec/io/checkpoint_spec.lua spec/parallel/fsdp/classic/comm_hooks_spec.lua
                   spec/parallel/fsdp/classic/schedule_spec.lua)
            ;;
        valgrind)
            # The specs that start no process, without kernels/product, whose tests of a billion multiplications take
            # minutes (--sanitize runs them), and without folders in which valgrind has nothing to find.
            specs=()
            while IFS= read -r f; do specs+=("$f"); done < <(
                grep -rLE 'spec\.support\.(ranks|process|pty)|io\.popen|os\.execute' spec --include='*_spec.lua' |
                    grep -vE '^spec/(cuda|layering|api|run/text|kernels/product)' | sort)
            ;;
    esac
}

# Every report counts as a failed test; the first few are shown.
tool_reports() {
    local f n=0
    for f in "$reports"/*; do
        [ -s "$f" ] || continue
        n=$((n + 1))
        [ $n -gt 5 ] || { echo "test: report $f"; head -n 60 "$f"; }
    done
    if [ $n = 0 ]; then
        echo "test: $tool: 0 reports"
        pass 1
    else
        fail "$n" "$n reports of $tool in $reports"
    fi
}
