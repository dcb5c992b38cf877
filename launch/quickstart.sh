#!/usr/bin/env bash
# From nothing to a verified Hugging Face checkpoint: creates .venv, installs, runs `z2all quickstart` (a few minutes on
# two cores). After an interruption, run it again to continue. Arguments go to the command, e.g. --fresh to start over.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

require_compiler
prepare_environment ""
cd "$root"
# exec replaces this shell, so that a signal reaches the process that manages all others.
exec "$venv/bin/python" -m z2all_ds quickstart "$@"
