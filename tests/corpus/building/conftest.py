from collections.abc import Iterator

import pytest

from z2all_ds.corpus.building import build as build_module


@pytest.fixture
def a_unit_for_each_slice() -> Iterator[None]:
    """Make every slice its own unit; otherwise all small files of a test would be grouped into one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "_grouped", lambda slices, _: [[piece] for piece in slices])
        yield
