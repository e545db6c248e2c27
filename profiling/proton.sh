#!/usr/bin/env bash
# Proton, Triton's profiler, over the warm, named calls of the techniques.
usage='usage: profiling/proton.sh SCRIPT [TECHNIQUE ...] [--quick | --full] [--seed N]

  profiling/proton.sh triton_examples.py softmax

The tree that it writes is also what `proton-viewer -m time/us` shows. Exit status: 0 profiled, 1 nothing profiled or
a technique failed, 2 wrong usage.'
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read_arguments "$@"
rm -f "$out".proton*
say_and_run "$python" -m profiling.run proton "$out.proton" "$script" ${techniques[@]+"${techniques[@]}"} \
    --profile ${options[@]+"${options[@]}"} --json "$out.proton.json" || echo "the script ended with status $?" >&2
[ -f "$out.proton.hatchet" ] || exit 1
echo "tree: $out.proton.hatchet"
"$python" -m profiling.read proton "$out.proton.json" "$out.proton.hatchet"
