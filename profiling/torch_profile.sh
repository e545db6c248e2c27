#!/usr/bin/env bash
# torch.profiler over the warm, named calls of the techniques: a trace for each call, with or without a GPU.
usage='usage: profiling/torch_profile.sh SCRIPT [TECHNIQUE ...] [--quick | --full] [--seed N]

  profiling/torch_profile.sh triton_examples.py softmax

The traces open in ui.perfetto.dev, or in chrome://tracing. Exit status: 0 profiled, 1 nothing profiled or a technique
failed, 2 wrong usage.'
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read_arguments "$@"
rm -f "$out.torch.json"
say_and_run "$python" -m profiling.run torch "$out.torch" "$script" ${techniques[@]+"${techniques[@]}"} \
    --profile ${options[@]+"${options[@]}"} --json "$out.torch.json" || echo "the script ended with status $?" >&2
echo "traces: $out.torch/"
"$python" -m profiling.read torch "$out.torch.json" "$out.torch"
