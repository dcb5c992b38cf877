#!/usr/bin/env bash
# From nothing to a proven Hugging Face checkpoint: makes .venv, installs, runs `z2all quickstart` (a few minutes on two
# cores). Run it again after any interruption: it goes on. Arguments go to the command, e.g. --fresh to start over.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

require_compiler
prepare_environment ""
cd "$root"
# exec: this shell becomes the command, so that a signal to it reaches the one process that looks after all others.
exec "$venv/bin/python" -m z2all_ds quickstart "$@"
