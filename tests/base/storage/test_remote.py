"""Folders opened by fsspec, on real fsspec file systems, one of which raises errors on request."""

import errno
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.stores import FlakyStore, flaky_store, put
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.storage import folders, open_folder, reason


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
    folder.stamp("x")
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


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A web server for the files in tmp_path that, like `python -m http.server`, knows no byte ranges and no PUT."""
    pytest.importorskip("aiohttp")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_web_server_without_byte_ranges_is_refused(
    tmp_path: Path, web: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "empty").write_bytes(b"")
    folder = open_folder(web)
    assert [folder.read_range("x", *ends) for ends in ((0, 5), (0, 9), (5, 10), (7, 8))] == [b"12345"] * 2 + [b""] * 2
    assert folder.read_range("empty", 0, 9) == b""
    for begin, end in ((0, 4), (1, 6), (4, 5), (2, 100)):
        with pytest.raises(OSError, match="ignores byte ranges") as caught:
            folder.read_range("x", begin, end)
        assert (caught.value.errno, caught.value.filename) == (errno.EOPNOTSUPP, f"{web}/x")
        assert reason(caught.value) == (
            "the server ignores byte ranges; use a server that supports them, or copy the folder to a disk"
        )
    with pytest.raises(OSError, match="Unsupported method"):
        folder.write_whole("y", b"abc")
    assert " try " not in capfd.readouterr().err


def test_ranges_of_a_file_that_grows_or_shrinks_end_with_the_file(flaky: type[FlakyStore]) -> None:
    folder = open_folder("flaky://c")
    put("flaky://c", {"x": b"12345"})
    assert folder.read_range("x", 0, 9) == b"12345"
    put("flaky://c", {"x": b"1234567"})
    assert folder.read_range("x", 5, 9) == b"67"
    put("flaky://c", {"x": b"123"})
    flaky.calls.clear()
    assert [folder.read_range("x", *ends) for ends in ((0, 7), (3, 7))] == [b"123", b""]
    assert flaky.calls == ["cat_file", "info"]


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
