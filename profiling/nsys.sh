#!/usr/bin/env bash
# Nsight Systems: the timeline of the warm, named calls of the techniques, host and GPU.
usage='usage: profiling/nsys.sh SCRIPT [TECHNIQUE ...] [--quick | --full] [--seed N]

  profiling/nsys.sh triton_examples.py softmax

There is one report for each call, which opens in nsys-ui. Exit status: 0 profiled, 1 nothing profiled or a technique
failed, 2 wrong usage.'
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read_arguments "$@"
find_tool nsys NSYS '/opt/nvidia/nsight-systems/*/bin' '/opt/nvidia/nsight-systems-cli/*/bin' ||
    missing nsys "it is Nsight Systems, from developer.nvidia.com, or the package nsight-systems-cli of NVIDIA" \
        "profiling/torch_profile.sh, whose traces show the same timeline in ui.perfetto.dev"

tool_is "Nsight Systems"
rm -f "$out".nsys*
# Capturing starts and stops with each call: what is between them, an autotuner's launches too, is in no report.
say_and_run "$tool" profile --trace cuda,nvtx --sample none --cpuctxsw none \
    --capture-range cudaProfilerApi --capture-range-end repeat --force-overwrite true --output "$out.nsys" \
    "$python" "$script" ${techniques[@]+"${techniques[@]}"} --profile ${options[@]+"${options[@]}"} \
    --json "$out.nsys.json" || echo "nsys ended with status $?" >&2
tables=()
for report in "$out".nsys*.nsys-rep; do
    if [ -f "$report" ]; then
        "$tool" stats --quiet --force-export true --report nvtx_kern_sum --format csv --output - "$report" \
            >"${report%.nsys-rep}.csv" || true
        tables+=("${report%.nsys-rep}.csv")
    fi
done
if [ ${#tables[@]} -gt 0 ]; then echo "reports: $out.nsys*.nsys-rep (${#tables[@]})"; fi
"$python" -m profiling.read nsys "$out.nsys.json" ${tables[@]+"${tables[@]}"}
