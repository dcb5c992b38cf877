"""Environment of the sink tests: W&B has no login, and no server unless a test names one."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.fed_runs import sink_processes


@pytest.fixture(autouse=True)
def _nobodys_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    nobody_listens = "http://127.0.0.1:9"
    own = {"WANDB_BASE_URL": nobody_listens, "NETRC": str(tmp_path / "no_netrc"), "WANDB_ERROR_REPORTING": "false"}
    own |= {f"WANDB_{kind}_DIR": str(tmp_path / f"wandb_{kind}") for kind in ("CONFIG", "CACHE", "DATA")}
    own |= {"WANDB_X_DISABLE_STATS": "true", "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    yield
    for pid, _ in sink_processes(os.getpid()).values():  # left by a failed test
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
