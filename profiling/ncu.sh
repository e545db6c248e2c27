#!/usr/bin/env bash
# Nsight Compute: the counters of each kernel in the warm, named calls of the techniques.
usage='usage: profiling/ncu.sh [--brief] [--seconds N] SCRIPT [TECHNIQUE ...] [--quick | --full] [--seed N]

  --brief      count only what the table shows: some times faster; ncu-ui then has no sections
  --seconds N  what each technique may take of the profiler, 120 by default; calls after that are left out and named

  profiling/ncu.sh triton_examples.py softmax
  profiling/ncu.sh --brief triton_examples.py vector_add softmax --full

Each kernel is replayed for the counters of these sections, with L2 emptied before, at the clocks the card has; the
report opens in ncu-ui. For some kernels alone call ncu yourself, with --kernel-name regex:PATTERN (docs/running.md): a
@triton.jit kernel has the name of its function, and those that Inductor generates begin with triton_. Exit status: 0 profiled,
1 nothing profiled or a technique failed, 2 wrong usage.'
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

brief='' seconds=120 arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --brief) brief=yes ;;
        --seconds) [ $# -gt 1 ] || refuse "$1 needs a number"; seconds=$2; shift ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
[[ $seconds =~ ^[1-9][0-9]*$ ]] || refuse "--seconds needs a number, got $seconds"
read_arguments ${arguments[@]+"${arguments[@]}"}
find_tool ncu NCU '/opt/nvidia/nsight-compute/*' "${HOME:-}/nsight-compute" ||
    missing ncu "it comes with the CUDA toolkit (Nsight Compute), or from developer.nvidia.com" \
        "profiling/torch_profile.sh, which has times, registers and occupancy, and no counters"
tool_is "Nsight Compute"

# Sections are what ncu-ui shows; the metrics are what the table below is made of.
sections=(SpeedOfLight MemoryWorkloadAnalysis ComputeWorkloadAnalysis Occupancy LaunchStats)
if [ -n "$brief" ]; then sections=(); fi
metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,launch__registers_per_thread
metrics+=,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
rm -f "$out"{,.[0-9]*}.ncu{-rep,.json,.csv,.left,.txt}
# A process that is ended, since ncu did not come back from a kernel, takes its technique with it; another goes on.
left=(${techniques[@]+"${techniques[@]}"}) tables=() part=1
while true; do
    stem=$out.ncu
    if [ "$part" -gt 1 ]; then stem=$out.$part.ncu; fi
    say_and_run env PROFILING_SECONDS="$seconds" "$tool" --profile-from-start off --clock-control none --nvtx \
        --target-processes application-only ${sections[@]+"${sections[@]/#/--section=}"} --metrics "$metrics" \
        --force-overwrite --export "$stem-rep" \
        "$python" -m profiling.run bounded "$stem.left" "$script" ${left[@]+"${left[@]}"} --profile \
        ${options[@]+"${options[@]}"} --json "$stem.json" || echo "ncu ended with status $?" >&2
    if [ -f "$stem-rep" ]; then
        echo "report: $stem-rep"
        "$tool" --import "$stem-rep" --page raw --csv --print-units base --print-kernel-base function >"$stem.csv" ||
            echo "ncu cannot read its report $stem-rep" >&2
    else
        : >"$stem.csv"
    fi
    tables+=("$stem.json" "$stem.csv")
    mapfile -t left < <("$python" -m profiling.read rest "$stem.json" "$script" ${techniques[@]+"${techniques[@]}"})
    [ ${#left[@]} -gt 0 ] || break
    echo "going on after the technique that ended the process: ${left[*]}" >&2
    part=$((part + 1))
done
"$python" -m profiling.read ncu "${tables[@]}"
