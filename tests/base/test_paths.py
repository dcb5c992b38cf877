"""Tests of paths that users write, and of system errors as one line."""

import errno
import os
from pathlib import Path

import pytest

from z2all_ds.base.atomic import explain_disk_errors, write_whole
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.paths import expanded, explain_system_errors, full_path


def test_an_unknown_user_is_named() -> None:
    with pytest.raises(ConfigError, match=r"~nouser/x: there is no user nouser"):
        expanded("~nouser/x")
    assert expanded("~/x") == Path.home() / "x"
    assert expanded("./~nouser") == Path("./~nouser")


def test_a_loop_of_links_has_a_full_path(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert full_path(tmp_path / "loop" / "x").is_absolute()


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("loop", ConfigError, "symbolic links"),
        ("a" * 300, ConfigError, "name too long"),
        ("x/y", ConfigError, "No such"),
    ],
)
def test_a_system_error_is_one_line_with_the_path(tmp_path: Path, name: str, kind: type, reason: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(kind, match=reason) as caught, explain_system_errors():
        (tmp_path / name).read_bytes()
    assert len(str(caught.value)) < 600 and str(tmp_path)[:20] in str(caught.value)


def test_errors_of_rust_libraries_are_recognized(tmp_path: Path) -> None:
    full = Exception("No space left on device (os error 28)")
    with pytest.raises(MachineError, match="No space left"), explain_system_errors():
        raise full
    with pytest.raises(MachineError, match="disk or the quota is full"), explain_disk_errors(tmp_path):
        raise full
    ours = ConfigError("x", "cannot be read (os error 2)", "Fix it.")
    for other in (ValueError("other"), ours):
        with pytest.raises(type(other)) as caught, explain_system_errors():
            raise other
        assert caught.value is other


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "x.png", b"content")
    assert not list(tmp_path.iterdir())
