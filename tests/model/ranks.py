"""Helper that runs scripts of this folder as real ranks with the deepspeed launcher."""

import os
from pathlib import Path

import pytest

from tests.helpers.command import ROOT
from tests.helpers.training import launch_script


def run_ranks(script: str, *arguments: str, ranks: int) -> None:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # the scripts import from tests
        result = launch_script(Path(__file__).with_name(script), *arguments, ranks=ranks)
    assert result.returncode == 0, result.stderr
