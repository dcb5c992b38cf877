"""Folders opened by fsspec, on real fsspec file systems, one of which raises errors on request."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.stores import FlakyStore, flaky_store, put
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.storage import folders, open_folder


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FIRST_WAIT_SECONDS", 0.001)


@pytest.fixture
def flaky() -> Iterator[type[FlakyStore]]:
    with flaky_store() as store:
        yield store


@pytest.mark.parametrize("location", ["memory://corpus", "memory://a/b/c", "file://{}/new"])
def test_written_files_are_read_back(tmp_path: Path, location: str) -> None:
    location = location.format(tmp_path)
    folder = open_folder(location)
    folder.write_whole("deep/x.bin", bytes(range(100)))
    folder.write_whole("y", b"")
    assert folder.where("deep/x.bin") == f"{location}/deep/x.bin"
    assert folder.read("deep/x.bin") == bytes(range(100))
    assert folder.read_range("deep/x.bin", 10, 20) == bytes(range(10, 20))
    assert folder.read_range("deep/x.bin", 90, 200) == bytes(range(90, 100))
    assert folder.read_range("deep/x.bin", 5, 5) == b""
    assert folder.list_files() == {"deep/x.bin": 100, "y": 0}
    assert [folder.exists(name) for name in ("y", "z", "deep", "y/z")] == [True, False, True, False]
    with pytest.raises(FileNotFoundError):
        folder.stamp("z")
    with pytest.raises(IsADirectoryError):
        folder.stamp("deep")


@pytest.mark.parametrize("location", ["memory://stamps", "file://{}"])
def test_stamps_change_with_the_file(tmp_path: Path, location: str) -> None:
    folder = open_folder(location.format(tmp_path))
    folder.write_whole("x", b"one")
    first = folder.stamp("x")
    assert first == open_folder(location.format(tmp_path)).stamp("x")
    assert first.size == 3 and 0 < first.version < 2**63
    folder.write_whole("x", b"two")
    assert folder.stamp("x").size == 3
    assert folder.stamp("x").version != first.version


@pytest.mark.parametrize(
    "error",
    [OSError("connection lost"), TimeoutError(), ConnectionResetError(), OSError(5, "EIO"), RuntimeError("http")],
)
def test_temporary_errors_of_a_store_are_retried(flaky: type[FlakyStore], error: Exception) -> None:
    put("flaky://c", {"x": b"12345"})
    folder = open_folder("flaky://c")
    for ask in (lambda: folder.read_range("x", 1, 3), lambda: folder.read("x")[1:3]):
        flaky.calls.clear()
        flaky.errors[:] = [error] * 4
        assert ask() == b"23"
        assert flaky.calls == ["cat_file"] * 5
    flaky.errors[:] = [error] * 4
    assert folder.stamp("x").size == 5
    flaky.errors[:] = [error] * 4
    folder.write_whole("y", b"abc")
    assert folder.read("y") == b"abc"


@pytest.mark.parametrize("error", [OSError("connection lost"), RuntimeError("http 503")])
def test_an_error_that_persists_is_raised_after_five_tries(flaky: type[FlakyStore], error: Exception) -> None:
    put("flaky://c", {"x": b"12345"})
    flaky.errors[:] = [error] * 5
    with pytest.raises(OSError, match=str(error)):
        open_folder("flaky://c").read("x")
    assert flaky.calls == ["cat_file"] * 5


@pytest.mark.parametrize("error", [PermissionError("403"), FileNotFoundError("404"), NotImplementedError("no")])
def test_permanent_errors_of_a_store_are_not_retried(flaky: type[FlakyStore], error: Exception) -> None:
    put("flaky://c", {"x": b"12345"})
    flaky.errors[:] = [error]
    with pytest.raises(OSError, match=str(error)):
        open_folder("flaky://c").read("x")
    assert flaky.calls == ["cat_file"]


DRIVERS = {"s3": "s3fs", "abfs": "adlfs", "gs": "gcsfs", "oss": "ossfs"}
MISSING = [protocol for protocol, package in DRIVERS.items() if find_spec(package) is None]


@pytest.mark.skipif(not MISSING, reason="every driver is installed here")
def test_a_missing_driver_names_its_package() -> None:
    for protocol in MISSING:
        rule = rf"driver for {protocol}:// is not installed.*pip install {DRIVERS[protocol]}\."
        with pytest.raises(MachineError, match=rule):
            open_folder(f"{protocol}://bucket/corpus")


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere://x.*Protocol not known"):
        open_folder("nowhere://x")
