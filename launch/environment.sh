# Sourced by quickstart.sh and test.sh: creates .venv in the checkout and installs the package into it.
# Safe to run again at any time: a stamp file marks a finished install; an unfinished one is completed.
#
#   PYTHON=/path/to/python3.11   the interpreter for .venv (default: the first of 3.12, 3.11, 3.10, python3)
#   Z2ALL_PIP_ARGS="..."         extra arguments for pip, e.g. an index that has CPU builds of torch
#   Z2ALL_VENV=/path             where the environment goes (default: .venv in the checkout)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${Z2ALL_VENV:-$root/.venv}

say() { printf '%s\n' "$*" >&2; }

# One line: value, rule, fix. Exit code 6 is that of MachineError.
fail() { say "MachineError: $*"; exit 6; }

find_python() {
    # An interpreter set with PYTHON is used or refused, never skipped.
    local candidate candidates=(python3.12 python3.11 python3.10 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python: none of ${candidates[*]} is version 3.10 or newer. Install one, or set PYTHON=/path/to/python3."
}

require_compiler() {
    local compiler compilers=(c++ g++)
    [ -z "${CXX:-}" ] || compilers=("${CXX%% *}") # CXX may include options
    for compiler in "${compilers[@]}"; do
        command -v "$compiler" >/dev/null 2>&1 && return
    done
    fail "C++ compiler: ${compilers[*]} not found, and DeepSpeed compiles ops at first use. Install g++ (Debian: apt install g++)."
}

require_disk() { # megabytes
    local free folder=$venv
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free=$(df -Pm "$folder" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$1" ] || fail "$free MB free at $folder: the install needs $1 MB. Free some space, or set Z2ALL_VENV=/path on another disk."
}

# Run a long command with its output in a file; print a line every ten seconds, and the end of the file if it fails.
quietly() { # label, command...
    local label=$1 log status=0 started=$SECONDS
    shift
    log=$(mktemp "${TMPDIR:-/tmp}/z2all-install.XXXXXX")
    say "$label ..."
    "$@" >"$log" 2>&1 &
    local child=$!
    # Ctrl-C must not leave pip running.
    trap 'kill "$child" 2>/dev/null; wait "$child" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
    local waited=0
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.5
        waited=$((waited + 1))
        [ $((waited % 20)) -ne 0 ] || say "$label ... $((SECONDS - started)) s"
    done
    wait "$child" || status=$?
    trap - INT TERM
    if [ "$status" -ne 0 ]; then
        tail -n 25 "$log" >&2
        rm -f "$log"
        fail "$label: failed with code $status (see the last lines of its output above). Fix that and run the same command again."
    fi
    rm -f "$log"
}

# A hash of everything the install depends on: if it changes, pip runs again.
stamp_of() { # extras, python
    { cat "$root/setup.py" "$root/constraints.txt"; echo "$1 $root"; "$2" -V; } | cksum
}

prepare_environment() { # extras, e.g. "dev" or ""
    local extras=$1 python stamp target
    python=$(find_python)
    stamp="$venv/.z2all_installed_${extras:-core}"
    if [ -x "$venv/bin/python" ] && [ "$(stamp_of "$extras" "$python")" = "$(cat "$stamp" 2>/dev/null)" ] &&
        "$venv/bin/python" -c 'import z2all_ds, torch' 2>/dev/null; then
        return
    fi
    require_disk 3000
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        # Missing, or incomplete after a kill.
        rm -rf "$venv"
        "$python" -m venv "$venv" >/dev/null 2>&1 || {
            rm -rf "$venv"
            fail "$python -m venv: failed. Install the venv module (Debian: apt install python3-venv), or set PYTHON to another interpreter."
        }
    fi
    # python -m pip, not the pip script: a path with blanks or longer than 127 bytes breaks a script's first line.
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c "$root/constraints.txt")
    # shellcheck disable=SC2206  # words are meant to split
    pip+=(${Z2ALL_PIP_ARGS:-})
    target="$root${extras:+[$extras]}"
    quietly "installing torch" "${pip[@]}" torch setuptools wheel
    quietly "installing z2all_ds${extras:+ with $extras} and its dependencies" "${pip[@]}" -e "$target"
    stamp_of "$extras" "$python" >"$stamp"
}
