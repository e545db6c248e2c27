#!/usr/bin/env bash
# Compute Sanitizer over every Triton kernel of the techniques named, at small sizes; one command for a whole topic.
usage='usage: profiling/sanitize.sh [--tool TOOL,...] [--parallel] [--seconds N] [--all-kernels] SCRIPT [TECHNIQUE ...]

  --tool         memcheck, racecheck, initcheck, synccheck, with commas between; all of them by default
  --parallel     all tools at the same time, each with a process of its own
  --seconds N    end a tool that takes longer
  --all-kernels  look at the kernels of torch and of libraries as well; slow

  profiling/sanitize.sh triton_tma_blackwell.py
  profiling/sanitize.sh --tool memcheck,racecheck triton_examples.py softmax

Exit status: 0 nothing found, 1 something found (or a tool, or a technique, failed), 2 wrong usage.'
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tools=memcheck,racecheck,initcheck,synccheck all_kernels='' parallel='' limit=() arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --tool | --tools) [ $# -gt 1 ] || refuse "$1 needs the name of a tool"; tools=$2; shift ;;
        --tool=* | --tools=*) tools=${1#*=} ;;
        --all-kernels) all_kernels=yes ;;
        --parallel) parallel=yes ;;
        --seconds)
            [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || refuse "$1 needs a number"
            limit=(timeout --kill-after=10 "$2") && shift
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
IFS=, read -ra tools <<<"$tools"
[ ${#tools[@]} -gt 0 ] || refuse "--tool needs the name of a tool"
for one in "${tools[@]}"; do
    case $one in
        memcheck | racecheck | initcheck | synccheck) ;;
        *) refuse "$one is not a tool of compute-sanitizer" ;;
    esac
done
read_arguments ${arguments[@]+"${arguments[@]}"}
[[ " ${options[*]:-} " != *" --full "* ]] || refuse "--full: everything is a hundred times slower here; only small sizes"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
# That of the environment first: somebody installed it because the toolkit's is older.
for found in "$packages"/*/bin/compute-sanitizer; do
    if [ -x "$found" ]; then COMPUTE_SANITIZER=${COMPUTE_SANITIZER:-$found}; fi
done
find_tool compute-sanitizer COMPUTE_SANITIZER ||
    missing compute-sanitizer "it comes with the CUDA toolkit, or: pip install nvidia-cuda-sanitizer-api" \
        "python $(basename "$script") --check-only, whose outputs are poisoned and have guarded edges"
tool_is "Compute Sanitizer"
# Seen on an H200: 2025.3, of CUDA 13.0, reports races where warps of several roles start, and breaks library kernels.
version=$("$tool" --version 2>/dev/null | sed -n 's/^Version \([0-9]*\).*/\1/p' || true)
if [ "${version:-2026}" -lt 2026 ] && [[ " ${tools[*]} " == *" racecheck "* ]]; then
    echo "this compute-sanitizer is of $version, whose racecheck errs on warp-specialized kernels of Hopper and later:" \
        "pip install -U nvidia-cuda-sanitizer-api" >&2
fi

mapfile -t kernels < <("$python" -m profiling.read kernels "$script" ${techniques[@]+"${techniques[@]}"})
[ -n "${kernels[*]:-}" ] || { kernels=() all_kernels=yes; echo "no Triton kernel of their own: looking at all kernels"; }
help=$("$tool" --help 2>&1 || true)
knows() { [[ $help == *"$1"* ]]; }

look() { # TOOL: runs it, and leaves $out.TOOL.*
    local one=$1 flags watcher cached which kernel code started
    echo "$one: $(basename "$script") ${techniques[*]:-}"
    # A child is a compiler, or looks for bugs of its own. Waiting takes as long as importing torch does. What CUDA's
    # API says no to, torch asks and deals with; that a technique fails is in its record.
    flags=(--tool "$one" --target-processes application-only --launch-timeout 0 --check-exit-code no --error-exitcode 99
        --print-limit 10000 --show-backtrace no --port "$port" --log-file "$out.$one.log")
    watcher=launches cached=()
    case $one in
        # Each tensor in an allocation of its own, with something between them: its bounds are then known. What TMA reads
        # and writes is not looked at: --check-tensor-ops of 2026.4 took boxes that pass the end of a matrix, as they
        # may, for misaligned accesses on an H200. The techniques' own checks guard the edges of their outputs.
        memcheck)
            watcher=unguarded cached=(PYTORCH_NO_CUDA_MEMORY_CACHING=1)
            flags+=(--report-api-errors no --padding 1024)
            ;;
        initcheck) # memory that was used before counts as initialized
            watcher=unguarded cached=(PYTORCH_NO_CUDA_MEMORY_CACHING=1)
            ;;
    esac
    # The float64 references are torch's, and slow to look into. But initcheck must see who initializes what.
    which=all
    if [ -z "$all_kernels" ] && { [ "$one" != initcheck ] || knows --initcheck-track-filtered-global-memory; }; then
        which=ours
        for kernel in "${kernels[@]}"; do flags+=(--kernel-name "kernel_name=$kernel"); done
    fi
    rm -f "$out.$one".{log,json,launches,txt,status}
    code=0 started=$SECONDS
    say_and_run ${limit[@]+"${limit[@]}"} env ${cached[@]+"${cached[@]}"} "$tool" "${flags[@]}" \
        "$python" -m profiling.run "$watcher" "$out.$one.launches" "$script" ${techniques[@]+"${techniques[@]}"} \
        ${options[@]+"${options[@]}"} --check-only --quick --json "$out.$one.json" >"$out.$one.txt" || code=$?
    echo "$code $((SECONDS - started)) $which" >"$out.$one.status"
}

port=49152 # where a tool waits for its process: a range for each
for one in "${tools[@]}"; do
    if [ -n "$parallel" ]; then look "$one" & else look "$one"; fi
    port=$((port + 100))
done
wait
"$python" -m profiling.read sanitizer "$out" "${tools[@]}" -- ${kernels[@]+"${kernels[@]}"}
