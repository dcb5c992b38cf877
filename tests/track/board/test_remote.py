"""Runs on another machine, over a real sshd: reading, following, reconnecting, and each kind of failed login."""

import getpass
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.own_sshd import OwnSshd, own_sshd, why_no_sshd
from tests.helpers.warm_python import FRESH
from z2all_ds.base.errors import ConfigError
from z2all_ds.bench.board import started_board
from z2all_ds.track.board import remote
from z2all_ds.track.board.remote import RemoteFiles, RemoteFolder, parse_remote
from z2all_ds.track.board.watch import Watch

PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnSshd]:
    if why_no_sshd():
        pytest.skip(why_no_sshd())
    with own_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def _with_its_ssh(far: OwnSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", far.path_variable)


def line(step: int, moment: float = 0.0) -> str:
    return json.dumps({"step": step, "tokens_seen": step, "loss": 1.0, "time_unix": moment or float(step)}) + "\n"


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("me@box:runs/first", RemoteFolder("me@box", None, "runs/first")),
        ("box:/data/run/", RemoteFolder("box", None, "/data/run")),
        ("box:", RemoteFolder("box", None, ".")),
        ("me@[fe80::1]:x", RemoteFolder("me@fe80::1", None, "x")),
        ("ssh://me@box:2222/data/run", RemoteFolder("me@box", 2222, "/data/run")),
        ("ssh://box/~/runs/a%20b", RemoteFolder("box", None, "~/runs/a b")),
        ("runs/first", None),
        ("./odd:name", None),
        ("/data/odd:name", None),
    ],
)
def test_locations_are_parsed(given: str, place: RemoteFolder | None) -> None:
    assert parse_remote(given) == place


@pytest.mark.parametrize("given", ["ssh://", "ssh://box", "ssh://box:x/run", "-oProxyCommand=x:run", "ssh://-x/run"])
def test_invalid_locations_are_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        parse_remote(given)


def test_a_local_folder_with_a_colon_is_not_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd:name").mkdir()
    assert parse_remote("odd:name") is None


@pytest.mark.usefixtures("_with_its_ssh")
def test_files_of_another_machine_are_read(tmp_path: Path) -> None:
    run = tmp_path / "它的 'run'"
    run.mkdir()
    metrics = run / "metrics.jsonl"
    metrics.write_text(line(1) + line(2))
    files = RemoteFiles(RemoteFolder("far", None, str(tmp_path)))
    try:
        assert files.run_folders(str(tmp_path)) == [str(run)]
        now, (sign, missing) = files.stats([str(metrics), str(run / "missing")])
        assert sign[0] == metrics.stat().st_size and missing == [0, 0, 0]
        assert abs(now - time.time()) < 60
        assert files.read(str(metrics), 2, 4) == b"step"
        assert files.read(str(run / "missing"), 0, 4) == b""
        assert [found for _, found in files.lines_at(str(metrics), [0, 5])] == metrics.read_bytes().splitlines()
        assert len(files.lines_with(str(metrics), ['"step": 2'], 0, 1000)) == 1
        assert files.file_names(str(run)) == ["metrics.jsonl"]
        assert files.file_names(str(run / "missing")) == []
        with pytest.raises(OSError, match="directory"):
            files.read(str(run), 0, 4)
        assert files.read(str(metrics), 2, 4) == b"step"  # an error there does not close the connection
    finally:
        files.close()


@pytest.mark.usefixtures("_with_its_ssh")
def test_a_remote_run_is_followed_through_a_lost_connection_and_a_restart(
    far: OwnSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LONGEST_PAUSE_SECONDS", 1.0)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(line(step) for step in range(1, 11)))
    watch = Watch([f"far:{tmp_path}"])
    watch.start()
    try:
        until(lambda: bool(watch.runs()) and watch.runs()[0].curves.records == 10)
        (run,) = watch.runs()
        assert run.summary("x")["location"] == f"far:{tmp_path}"
        with metrics.open("a") as file:
            file.write(line(11))
        until(lambda: run.curves.records == 11)

        far.cut()
        with metrics.open("a") as file:
            file.write(line(12))
        until(lambda: run.curves.records == 12)

        far.stop()
        until(lambda: run.summary("x")["status"] == "unreachable")
        assert run.summary("x")["note"] and "\n" not in run.summary("x")["note"]
        assert run.curves.records == 12  # the records read so far are still shown
        until(lambda: "Connection refused" in run.summary("x")["note"])
        # The run went back and continued.
        metrics.write_text("".join(line(step) for step in range(1, 6)) + line(6, 99.0))
        far.start()
        until(lambda: run.curves.records == 6)
        assert run.curves.history == 1
        until(lambda: run.summary("x")["status"] != "unreachable")
        assert run.curves.points(["loss"], "step", None, None, 100)["x"].tolist() == [1, 2, 3, 4, 5, 6]
    finally:
        watch.stop()
    until(lambda: not far.has_session())


def trouble(place: RemoteFolder) -> str:
    files = RemoteFiles(place)
    try:
        with pytest.raises(remote.Unreachable) as caught:
            files.run_folders(".")
    finally:
        files.close()
    (only,) = str(caught.value).splitlines()
    return only


@pytest.mark.usefixtures("_with_its_ssh")
def test_failed_connections_and_logins_are_explained(far: OwnSshd) -> None:
    assert "Could not resolve hostname" in trouble(RemoteFolder("nowhere.invalid", None, "run"))
    assert "Connection refused" in trouble(RemoteFolder("127.0.0.1", 1, "run"))
    denied = trouble(RemoteFolder("nobody-here@far", None, "run"))
    assert "Permission denied" in denied and "without a password" in denied
    known = far.folder / "known_hosts"
    right = known.read_text()
    known.write_text(f"[127.0.0.1]:{far.port} {(far.folder / 'key.pub').read_text()}")
    try:
        assert "Check the host key" in trouble(RemoteFolder("far", None, "run"))
    finally:
        known.write_text(right)


@contextmanager
def instead(far: OwnSshd, command: str) -> Iterator[None]:
    """Make every login run this command instead of the requested one."""
    config = far.folder / "sshd_config"
    right = config.read_text()
    config.write_text(f"{right}ForceCommand {command}\n")
    far.stop()
    far.start()
    try:
        yield
    finally:
        config.write_text(right)
        far.stop()
        far.start()


@pytest.mark.usefixtures("_with_its_ssh")
def test_a_missing_python_is_reported(far: OwnSshd, tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    with instead(far, f'exec /usr/bin/env -i PATH={tmp_path} sh -c "$SSH_ORIGINAL_COMMAND"'):
        assert "no python3" in trouble(RemoteFolder("far", None, "run"))


@pytest.mark.usefixtures("_with_its_ssh")
def test_a_login_that_never_starts_python_is_reported(
    far: OwnSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LOGIN_SECONDS", 1.0)
    with instead(far, "echo Welcome; sleep 600"):
        watch = Watch([f"far:{tmp_path}"])
        watch.start()
        try:
            (run,) = watch.shown_runs()  # before the first answer
            assert run.summary("x")["note"] == "no answer yet"
            until(lambda: run.summary("x")["status"] == "unreachable")
            note = run.summary("x")["note"]
            assert note.startswith("far: the login did not start python3 within 1 s. `ssh far ")
        finally:
            watch.stop()


@pytest.mark.usefixtures("_with_its_ssh")
def test_the_board_ends_its_ssh_process(far: OwnSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FRESH, "1")  # a new process, because its children are counted
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").write_text(line(1))
    place = f"ssh://{getpass.getuser()}@127.0.0.1:{far.port}{tmp_path}"
    with started_board(place) as board:
        until(lambda: any(run["records"] for run in board.get("/api/runs")[0]["runs"]))
        (run,) = board.get("/api/runs")[0]["runs"]
        assert (run["name"], run["location"]) == ("first", f"{place}/first")
        children = psutil.Process(board.process.pid).children(recursive=True)
        assert [child.name() for child in children] == ["ssh"]
    until(lambda: not any(child.is_running() for child in children))
    until(lambda: not far.has_session())
    assert os.path.exists(tmp_path / "first")
