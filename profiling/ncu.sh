#!/usr/bin/env bash
# Nsight Compute: the counters of each kernel in the warm, named calls of the techniques.
usage='usage: profiling/ncu.sh SCRIPT [TECHNIQUE ...] [--quick | --full] [--seed N]

  profiling/ncu.sh triton_examples.py softmax

Each kernel is replayed for the counters of these sections, with L2 emptied before, at the clocks the card has; the
report opens in ncu-ui. Exit status: 0 profiled, 1 nothing profiled or a technique failed, 2 wrong usage.'
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read_arguments "$@"
find_tool ncu NCU '/opt/nvidia/nsight-compute/*' "${HOME:-}/nsight-compute" ||
    missing ncu "it comes with the CUDA toolkit (Nsight Compute), or from developer.nvidia.com" \
        "profiling/torch_profile.sh, which has times, registers and occupancy, and no counters"

# Sections are what ncu-ui shows; the metrics are what the table below is made of.
sections=(SpeedOfLight MemoryWorkloadAnalysis ComputeWorkloadAnalysis Occupancy LaunchStats)
metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,launch__registers_per_thread
metrics+=,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
rm -f "$out".ncu{-rep,.json,.csv}
say_and_run "$tool" --profile-from-start off --clock-control none --nvtx --target-processes application-only \
    "${sections[@]/#/--section=}" --metrics "$metrics" --force-overwrite --export "$out.ncu-rep" \
    "$python" "$script" ${techniques[@]+"${techniques[@]}"} --profile ${options[@]+"${options[@]}"} \
    --json "$out.ncu.json" || echo "ncu ended with status $?" >&2
if [ -f "$out.ncu-rep" ]; then
    echo "report: $out.ncu-rep"
    "$tool" --import "$out.ncu-rep" --page raw --csv --print-units base --print-kernel-base function >"$out.ncu.csv"
else
    : >"$out.ncu.csv"
fi
"$python" -m harness.profile_read ncu "$out.ncu.json" "$out.ncu.csv"
