#!/usr/bin/env bash
# All checks: ruff, mypy, pytest. Makes .venv and installs what they need. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Debian packages the tests need, by the command or file that shows they are there. Without root the tests in need skip.
install_debian_packages() {
    local missing=() pair wanted=(g++:g++ hostname:hostname /usr/include/libaio.h:libaio-dev)
    # A browser for the board, and a font with Chinese characters for its pictures and the plots.
    wanted+=(chromium:chromium /usr/share/fonts/truetype/wqy:fonts-wqy-microhei)
    # For several nodes on this one machine. Where systemd runs, installing an sshd would also start one: not ours to do.
    [ -d /run/systemd/system ] || wanted+=(sshd:openssh-server ssh:openssh-client pdsh:pdsh ip:iproute2 iptables:iptables tini:tini mpirun:openmpi-bin slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge)
    for pair in "${wanted[@]}"; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || [ -e "${pair%%:*}" ] || missing+=("${pair##*:}")
    done
    if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        quietly "installing Debian packages ${missing[*]}" \
            sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"' sh "${missing[@]}"
    fi
}

install_debian_packages
require_compiler
prepare_environment dev
cd "$root"
# Before ruff and mypy, so that a machine that cannot build ops says so first; a no-op when they are built.
"$venv/bin/python" -m z2all_ds doctor --prebuild --fix
"$venv/bin/python" -m ruff check .
"$venv/bin/python" -m ruff format --check .
"$venv/bin/python" -m mypy
exec "$venv/bin/python" -m pytest "$@"
