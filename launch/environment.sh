# Sourced by quickstart.sh and test.sh: makes .venv in the checkout and installs the package into it.
# Safe to run again at any time: a finished install is recognised by a stamp, an unfinished one is completed.
#
#   PYTHON=/path/to/python3.11   the interpreter to build .venv with (default: the first of 3.12, 3.11, 3.10, python3)
#   Z2ALL_PIP_ARGS="..."         further arguments for pip, e.g. an index that has CPU builds of torch
#   Z2ALL_VENV=/path             where the environment goes (default: .venv in the checkout)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${Z2ALL_VENV:-$root/.venv}

say() { printf '%s\n' "$*" >&2; }

# One line: what, rule, fix; exit code 6 is MachineError's.
fail() { say "MachineError: $*"; exit 6; }

find_python() {
    # One that was asked for is taken or refused, never passed over.
    local candidate candidates=(python3.12 python3.11 python3.10 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python: ${candidates[*]}: none is version 3.10 or newer. Install one, or set PYTHON=/path/to/it."
}

require_compiler() {
    local compiler compilers=(c++ g++)
    [ -z "${CXX:-}" ] || compilers=("${CXX%% *}") # it may carry options
    for compiler in "${compilers[@]}"; do
        command -v "$compiler" >/dev/null 2>&1 && return
    done
    fail "C++ compiler: DeepSpeed compiles ops at first use and finds none (${compilers[*]}). Install g++ (Debian: apt install g++)."
}

require_disk() { # megabytes
    local free folder=$venv
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free=$(df -Pm "$folder" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$1" ] || fail "$free MB free at $folder: the install needs $1 MB. Free some space, or set Z2ALL_VENV=/path on another disk."
}

# Runs a long command with its output in a file and a line every ten seconds; shows the file's end if it fails.
quietly() { # label, command...
    local label=$1 log status=0 started=$SECONDS
    shift
    log=$(mktemp "${TMPDIR:-/tmp}/z2all-install.XXXXXX")
    say "$label ..."
    "$@" >"$log" 2>&1 &
    local child=$!
    # Ctrl-C must not leave pip running behind us.
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
        fail "$label: failed with code $status (its last lines are above). Put that right and run the same command again."
    fi
    rm -f "$log"
}

# What an install depends on: if any of it changes, pip runs again.
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
        # Missing, or left half made by a kill.
        rm -rf "$venv"
        "$python" -m venv "$venv" >/dev/null 2>&1 || {
            rm -rf "$venv"
            fail "$python -m venv: does not work. Install it (Debian: apt install python3-venv), or set PYTHON to another interpreter."
        }
    fi
    # Its own python -m pip, not the pip script: a path with blanks or of over 127 bytes breaks a script's first line.
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c "$root/constraints.txt")
    # shellcheck disable=SC2206  # words are meant to split
    pip+=(${Z2ALL_PIP_ARGS:-})
    target="$root${extras:+[$extras]}"
    quietly "installing torch" "${pip[@]}" torch setuptools wheel
    quietly "installing z2all_ds${extras:+ with $extras} and what it needs" "${pip[@]}" -e "$target"
    stamp_of "$extras" "$python" >"$stamp"
}
