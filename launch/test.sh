#!/usr/bin/env bash
# Run the checks: ruff, mypy, pytest. Creates .venv and installs what they need.
#
#   launch/test.sh          the everyday tests: all subpackages, and one training from raw text to a verified export
#   launch/test.sh --all    everything; continuous integration runs this
#
# Other arguments go to pytest. Z2ALL_TEST_WORKERS sets the number of tests to run in parallel (default: one per core).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Debian packages for the tests, detected by a command or file. Without root, tests that need a missing one are skipped.
install_debian_packages() {
    local missing=() pair wanted=(g++:g++ hostname:hostname /usr/include/libaio.h:libaio-dev)
    # A browser for the board, and a font with Chinese characters for its pictures and the plots.
    wanted+=(chromium:chromium /usr/share/fonts/truetype/wqy:fonts-wqy-microhei)
    # For several nodes on this machine. Under systemd, installing sshd would also start it, so it is not installed there.
    [ -d /run/systemd/system ] || wanted+=(sshd:openssh-server ssh:openssh-client pdsh:pdsh ip:iproute2 iptables:iptables tini:tini mpirun:openmpi-bin slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge)
    for pair in "${wanted[@]}"; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || [ -e "${pair%%:*}" ] || missing+=("${pair##*:}")
    done
    if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        quietly "installing Debian packages ${missing[*]}" \
            sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"' sh "${missing[@]}"
    fi
}

# Build the given ops, or all that this machine supports. This takes minutes; ruff and mypy run meanwhile. Because of
# `exec`, the trap below ends Python and not only a shell around it.
build_ops() {
    exec "$venv/bin/python" -c 'import sys
from z2all_ds.zero.op_builds import buildable_ops, prebuild
prebuild(sys.argv[1:] or buildable_ops())' "$@"
}

ops=(deepspeed_shm_comm cpu_adam) tier="not extended and not slow" profile=everyday
if [ "${1:-}" = --all ]; then
    shift
    ops=() tier="not slow" profile=thorough
fi
for path in "$root" "$venv"; do
    [[ $path != *[[:space:]]* ]] ||
        fail "$path: has a blank, and tools that some tests use (pdsh, DeepSpeed's op builder) fail there. Use a clone (and a Z2ALL_VENV, if you set one) in a path without blanks."
done
install_debian_packages
require_compiler
prepare_environment dev
cd "$root"
build_ops "${ops[@]}" &
builds=$!
trap 'kill "$builds" 2>/dev/null || true' EXIT
"$venv/bin/python" -m ruff check .
"$venv/bin/python" -m ruff format --check .
"$venv/bin/python" -m mypy
wait "$builds"
trap - EXIT
workers=${Z2ALL_TEST_WORKERS:-$(nproc)}
exec "$venv/bin/python" -m pytest -n "$workers" --dist loadfile --max-worker-restart 1 --no-loadscope-reorder \
    --hypothesis-profile="$profile" -m "$tier" "$@"
