# What the scripts of this folder share: sourced by them, not run. Each has set `usage`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out_folder="${PROFILING_OUT:-$root/profiling/out}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
PROFILING_COMMAND="profiling/$(basename "$0")${*:+ $*}" # for the head of a table's text file
export PROFILING_COMMAND

refuse() { # bad usage: what is wrong, and the usage
    [ $# -eq 0 ] || printf 'error: %s\n' "$*" >&2
    printf '%s\n' "$usage" >&2
    exit 2
}

# The Python of the techniques: PYTHON, the environment that is active, the one that `make` sets up, the system's.
for python in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$root/.venv/bin/python" python3 python; do
    if [ -n "$python" ] && command -v "$python" >/dev/null; then break; fi
done
python=$(command -v "$python") || { echo "error: no Python found; set PYTHON=/path/to/python" >&2; exit 1; }

"$python" -c 'import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, ("torch", "rich"))))' || {
    echo "error: $python has no torch, or no rich: \`make setup\`, then this finds .venv; or set PYTHON=/path/to/python" >&2
    exit 1
}

# read_arguments SCRIPT [TECHNIQUE ...] [--quick | --full] [--seed N]: sets script, techniques, options, and out, the
# beginning of the names of all files that are written.
read_arguments() {
    script='' techniques=() options=()
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) printf '%s\n' "$usage"; exit 0 ;;
            --quick | --full) options+=("$1") ;;
            --seed) [ $# -gt 1 ] || refuse "--seed needs a number"; options+=("$1" "$2"); shift ;;
            -*) refuse "unknown option $1" ;;
            *) if [ -z "$script" ]; then script=$1; else techniques+=("$1"); fi ;;
        esac
        shift
    done
    [ -n "$script" ] || refuse "which script? One of: $(cd "$root" && grep -l '^TECHNIQUES = ' ./*.py | sed 's,^\./,,' | paste -sd' ' -)"
    if [ ! -f "$script" ] && [ -f "$root/$script" ]; then script=$root/$script; fi
    [ -f "$script" ] || refuse "$script: no such script"
    script=$(cd "$(dirname "$script")" && pwd)/$(basename "$script")
    "$python" -m profiling.read kernels "$script" ${techniques[@]+"${techniques[@]}"} >/dev/null || exit 2
    local name
    name=$(basename "$script" .py)
    if [ ${#techniques[@]} -gt 3 ]; then
        name="$name-${techniques[0]}-and-$((${#techniques[@]} - 1))-more"
    elif [ ${#techniques[@]} -gt 0 ]; then
        name="$name-$(IFS=-; printf '%s' "${techniques[*]}")"
    fi
    mkdir -p "$out_folder"
    out="$out_folder/$name"
}

# find_tool NAME VARIABLE [FOLDER ...]: sets `tool` to $VARIABLE, or NAME on the PATH, in a CUDA toolkit, in FOLDERs.
# FOLDERs are patterns; of several the last, which is the newest. Without one: returns 1.
find_tool() {
    local name=$1 chosen=${!2:-} folder folders=()
    if [ -n "$chosen" ]; then
        tool=$(command -v "$chosen") || { echo "error: $2=$chosen: no such program" >&2; exit 1; }
        return
    fi
    if tool=$(command -v "$name"); then return; fi
    shift 2
    folders=("${CUDA_HOME:+$CUDA_HOME/bin}" "${CUDA_PATH:+$CUDA_PATH/bin}" /usr/local/cuda/bin "$@")
    for folder in "${folders[@]}"; do
        # shellcheck disable=SC2086  # patterns
        for found in $folder/$name; do if [ -x "$found" ]; then tool=$found; fi; done
        if [ -n "$tool" ]; then return; fi
    done
    return 1
}

missing() { # MISSING_TOOL HOW_TO_GET_IT ALTERNATIVE: one line
    echo "$1 is not here: $2. Without it: $3" >&2
    exit 1
}

# tool_is NAME: keeps the name and the version of `tool` for the head of a table's text file.
tool_is() {
    local version
    version=$("$tool" --version 2>/dev/null | sed -n 's/.*[Vv]ersion \([0-9][0-9.]*\).*/\1/p' | head -n 1 || true)
    export PROFILING_TOOL="$1${version:+ $version}"
}

say_and_run() { # what is run, so that it can be copied
    printf '+' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
    "$@"
}
