# SPDX-License-Identifier: MIT
# The parts of scripts/test --arm64, which sources this file: specs in an arm64 Debian (scripts/support/arm64), then
# bits and packages. The functions have the names and the order of those for sanitizers (tools.sh).
inside=scripts/support/arm64

tool_start() {
    given=${#specs[@]}          # spec files of the command line: then only these
    watch=("$inside" run)
    busted=(busted --filter-out=cuda)       # suites for both devices: this one's emulated GPU is not built for arm64
    export MOONSHARD_TOOL=qemu
    export MOONSHARD_SPEC_PATIENCE=${MOONSHARD_SPEC_PATIENCE:-20} MOONSHARD_SPEC_TIMEOUT=${MOONSHARD_SPEC_TIMEOUT:-1800}
}

tool_check() {
    if [ "$("$inside" run luajit -e 'io.write(jit.arch)')" = arm64 ]; then pass 1; else fail 1 "LuaJIT on arm64"; fi
}

# What depends on the processor. Left out:
#   spec/cuda               its emulated GPU is not built for arm64
#   spec/dist, but for collectives and groups; spec/run, spec/tools, spec/data/workers …: they kill, trace and time
#                           processes, whose signals and /proc are those of qemu
#   spec/io/durability_spec stops saves at their system calls by strace, which sees those of qemu
#   spec/docs, examples …   Lua alone, or minutes of training
tool_specs() {
    specs=(spec/tensor spec/autograd spec/nn spec/optim spec/io/{files,states,checkpoint,checkpoint_folder}_spec.lua
           spec/core spec/kernels spec/runtime spec/golden spec/reference spec/distributions spec/amp
           spec/dist/{collectives,groups}_spec.lua spec/parallel/fsdp/fully_shard/parity_spec.lua)
}

# Compares the bits of every operator, of large tensors and of training with those of this machine, which needs fused
# multiply-adds for that, as arm64 has them.
same_bits() {
    local program
    scripts/setup --engine || return 1
    for program in spec/support/bits.lua spec/kernels/bits_probe.lua; do
        MOONSHARD_LIB=$PWD/build/libmoonshard.so MOONSHARD_BUILD=build luajit $program "$PWD" >"$build/bits.here" &&
            "$inside" run luajit $program "$PWD" >"$build/bits.there" &&
            diff "$build/bits.here" "$build/bits.there" || return 1
        echo "test: $(wc -l <"$build/bits.here") lines of $program are the same here and on arm64"
    done
}

# Makes the packages, installs them, trains on 2 ranks with the installed command, and removes them.
packages_run() {
    echo "test: packages for arm64"
    "$inside" run sh -ec '
        export DEBEMAIL=nobody@localhost OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        cd "$1"
        rm -rf packages
        cpack
        trap "dpkg -P libmoonshard-dev moonshard" EXIT
        dpkg -i packages/*_arm64.deb
        cd /tmp
        unset MOONSHARD_LIB MOONSHARD_BUILD
        moonshard train --ranks 2 --steps 3 --dim 16 --heads 2 --layers 1 --context 16 --batch 4 --sample 0 \
            --out /tmp/arm64-run
        rm -r /tmp/arm64-run' sh "$build" >"$build/packages.log" 2>&1 || { tail -n 30 "$build/packages.log"; return 1; }
}

tool_reports() {
    [ "$given" = 0 ] || return
    local what
    for what in same_bits packages_run; do
        if $what; then pass 1; else fail 1 "$what"; fi
    done
}
