"""The inputs of the fuzzer."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.cases import warm_up
from tests.fuzz.inputs import make_inputs
from tests.fuzz.stand_ins import stand_ins
from tests.fuzz.verbs import LINES


@pytest.fixture(scope="session")
def inputs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # cases run as another user
        (folder / "inputs").mkdir()
        with stand_ins():
            make_inputs(folder / "inputs")
            warm_up(LINES, folder / "inputs", folder)
        yield folder / "inputs"


@pytest.fixture(autouse=True)
def _stand_ins(inputs: Path) -> Iterator[None]:
    with stand_ins():
        yield
