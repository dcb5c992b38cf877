"""Answers of the board's server, access to it, and the real command: its start, its port and its end."""

import json
import math
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from starlette.testclient import TestClient

from tests.helpers.board_page import served
from tests.helpers.command import COMMAND, environment, one_line, z2all
from tests.helpers.processes import ended
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.bench.board import logged_in
from z2all_ds.cli.board import board
from z2all_ds.track.board import connections
from z2all_ds.track.board.serve import TOKEN_VARIABLE, address, bind, chosen_token, is_loopback, serve
from z2all_ds.track.board.server import json_response, make_app
from z2all_ds.track.board.watch import Watch

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs: a real one, and a small one with unusual names and all kinds of records."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "real").mkdir()
    for kind in ("metrics", "events"):
        content = (RESULTS / f"2026-11-16_h200_training_{kind}.jsonl").read_bytes()
        (folder / "real" / f"{kind}.jsonl").write_bytes(content)
    (folder / "small").mkdir()
    moment = time.time() - 5
    start = {"time_unix": moment, "event": "started", "step": 0, "world_size": 2, "steps": 5, "hosts": ["甲", "乙"]}
    start["mixture"] = [{"name": "only", "first_step": 1, "shares": {"百科,": 0.5, "zh": 0.5}}]
    record = {
        "step": 1,
        "tokens_seen": 9,
        "loss": None,
        "loss_of_百科,": 2.5,
        "tokens_of_百科,": 9,
        "time_unix": moment + 1,
    }
    health = {"step": 1, "time_unix": moment + 1, "work_seconds": [1.0, 2.0], "data_wait_seconds": [0, 0]}
    (folder / "small" / "events.jsonl").write_text(json.dumps(start) + "\n")
    (folder / "small" / "metrics.jsonl").write_text(json.dumps({**record, "probe_首都": 0.1}) + "\n")
    (folder / "small" / "health.jsonl").write_text(json.dumps(health) + "\n")
    (folder / "small" / "run.yaml").write_text("train: {steps: 5}\n")
    return folder


@pytest.fixture(scope="module")
def watch(runs: Path) -> Iterator[Watch]:
    watch = Watch([str(runs)])
    watch.start()
    try:
        deadline = time.monotonic() + 30
        while not all(run.curves.records for run in watch.runs()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield watch
    finally:
        watch.stop()


@pytest.fixture(scope="module")
def client(watch: Watch) -> TestClient:
    client = TestClient(make_app(watch, "geheim", 8765), base_url="http://127.0.0.1:8765")
    client.get("/?token=geheim")
    return client


def test_the_list_of_runs(client: TestClient) -> None:
    real, small = client.get("/api/runs").json()["runs"]
    assert (real["name"], real["status"], real["step"]) == ("real", "done", 720)
    assert (small["name"], small["status"], small["loss"]) == ("small", "running", None)
    assert (small["domains"], small["probes"]) == (["百科,"], ["首都"])
    assert (small["events"], small["health_records"], small["history"]) == (1, 1, 0)


def test_curves_of_a_run(client: TestClient) -> None:
    answer = client.get("/api/curves", params={"run": "0", "names": "loss,lr", "points": "100", "from": "101"}).json()
    assert set(answer) == {"history", "records", "x", "weight", "series"}
    assert 1 < len(answer["x"]) <= 100
    assert sum(answer["weight"]) == 620
    assert all(len(values) == len(answer["x"]) for line in answer["series"].values() for values in line.values())
    named = client.get("/api/curves", params={"run": "1", "name": ["loss_of_百科,", "loss"], "x": "time"}).json()
    assert named["x"] == pytest.approx([1.0], abs=1e-6)
    assert named["series"]["loss_of_百科,"] == {"mean": [2.5], "min": [2.5], "max": [2.5]}
    assert named["series"]["loss"] == {"mean": [None], "min": [None], "max": [None]}


def test_events_health_mixture_probes_and_differences(client: TestClient) -> None:
    events = client.get("/api/events?run=0").json()["events"]
    assert [event["event"] for event in events] == ["started", "checkpoint", "done"]
    assert set(events[0]) == {"number", "event", "step", "tokens_seen", "seconds", "title", "details"}
    health = client.get("/api/health?run=1").json()
    assert [(rank["host"], rank["verdict"]) for rank in health["ranks"]] == [("甲", "ok"), ("乙", "slow")]
    mixture = client.get("/api/mixture?run=1").json()
    assert {domain["name"]: domain["realised"] for domain in mixture["domains"]} == {"百科,": 1.0, "zh": 0.0}
    (probe,) = client.get("/api/probes?run=1").json()["probes"]
    assert (probe["name"], probe["kind"], probe["value"], probe["step"], probe["passed"]) == (
        "首都",
        None,
        0.1,
        1,
        None,
    )
    keys = client.get("/api/differences?runs=1,0").json()["keys"]
    assert keys == [{"key": "train.steps", "values": [5, None], "differs": True}]


def test_what_has_no_json_is_sent_as_text() -> None:
    """One such value in a file of one run must not keep the others from the page."""
    deep: list = []
    for _ in range(400):
        deep = [deep]
    content = {"\ud800": ["na\udcefve", 10**30, -(2**62), True, math.nan], "deep": deep, "x": np.array([1.5])}
    answer = json.loads(bytes(json_response(content).body))
    assert answer.pop("\\ud800") == ["na\\udcefve", "integer of 100 bits", -(2**62), True, None]
    assert answer.pop("x") == [1.5]
    assert str(answer["deep"]).count("[") == 99


@pytest.mark.parametrize(
    ("path", "code", "word"),
    [
        ("/api/curves?run=9", 404, "run=9"),
        ("/api/events", 404, "no such run"),
        ("/api/differences?runs=0,x", 404, "run=x"),
        ("/api/curves?run=0&x=phase", 400, "step, tokens, time"),
        ("/api/curves?run=0&from=a", 400, "from=a"),
        ("/api/curves?run=0&to=nan", 400, "to=nan"),
        ("/page/server.py", 404, "no such file"),
        ("/page/..%2Fserver.py", 404, "Not Found"),
        ("/nowhere", 404, "Not Found"),
    ],
)
def test_invalid_requests_get_an_error_message(client: TestClient, path: str, code: int, word: str) -> None:
    answer = client.get(path)
    assert answer.status_code == code
    assert list(answer.json()) == ["error"] and word in answer.json()["error"]


def test_security_headers_and_the_chart_library_are_sent(client: TestClient) -> None:
    answer = client.get("/api/runs", headers={"origin": "http://evil.example"})
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe-eval" not in answer.headers["content-security-policy"]
    assert not [name for name in answer.headers if name.startswith("access-control")]
    for encoding in ("gzip", "identity"):
        library = client.get("/plotly.js", headers={"accept-encoding": encoding})
        assert library.headers["content-type"].startswith("text/javascript")
        assert "plotly.js v" in library.text[:200]


@pytest.mark.parametrize("host", ["box.example", "127.0.0.1", "localhost"])
def test_a_token_is_required_once_and_kept_as_a_cookie(watch: Watch, host: str) -> None:
    app = make_app(watch, token="geheim", port=8765)
    client = TestClient(app, base_url=f"http://{host}:8765")
    refused = client.get("/api/runs")
    assert refused.status_code == 403 and "token" in refused.json()["error"]
    assert client.get("/?token=falsch").status_code == 403
    assert client.get("/").text.startswith("token missing or wrong: open the address")
    assert client.get("/plotly.js").status_code == 403
    welcome = client.get("/?token=geheim", follow_redirects=False)
    assert (welcome.status_code, welcome.headers["location"]) == (307, "/")
    cookie = welcome.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie
    assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("token", ["a+b", "a&b=c", "a#b", "a%41", '密码 ;"x'])
def test_the_printed_address_works_with_any_token(watch: Watch, token: str) -> None:
    client = TestClient(make_app(watch, token, 8765), base_url="http://box.example:8765")
    assert client.get(address("box.example", 8765, token)).status_code == 200
    assert client.get("/api/runs").status_code == 200


def test_the_token_of_the_environment_must_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("", "a\nb", b"\xff".decode(errors="surrogateescape")):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE}: must "):
            chosen_token()
    monkeypatch.setenv(TOKEN_VARIABLE, "密码")
    assert chosen_token() == "密码"
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert len(chosen_token()) >= 20 and chosen_token() != chosen_token()


def test_a_token_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--token: command lines are visible .* Z2ALL_BOARD_TOKEN"):
        board(["runs"], token="geheim")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nope", "file"):
        with pytest.raises(DataError, match=f"{name}: no such folder"):
            serve([str(tmp_path / name)], "127.0.0.1", 0)


def test_addresses_are_formatted() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "box")] == [True] * 3 + [
        False
    ] * 2
    assert address("127.0.0.1", 8765, "a b") == "http://127.0.0.1:8765/?token=a%20b"
    assert address("::", 80, "t") == "http://[::]:80/?token=t"


def test_half_open_connections_do_not_stop_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many file handles as these connections would need, the board still answers; requests in work are kept."""
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 16)
    with served(tmp_path) as url, ExitStack() as stack:
        port = urlsplit(url).port
        half_open = []
        for number in range(100):
            half_open.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)))
            half_open[-1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" if number % 2 else b"")
        with logged_in(url).open(url, timeout=30) as page:
            assert b"z2all board" in page.read()
        for connection in half_open[:50]:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_a_used_port_is_refused_and_the_default_is_the_next_free_one() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"--port {port} on 127.0.0.1: Address already in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", None) as first, bind("127.0.0.1", None) as second:
        assert second.getsockname()[1] > first.getsockname()[1] >= 8765


def test_the_board_command_refuses_a_used_port_and_ends_on_ctrl_c(runs: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "board", str(runs), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path)
    assert process.stderr
    with ended(process):
        said = process.stderr.readline().strip()
        port, token = said.removeprefix("board: http://0.0.0.0:").split("/?token=")
        assert len(token) >= 20
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=30)
        line = one_line(z2all("board", str(runs), "--port", port, cwd=tmp_path), MachineError.exit_code)
        assert line.startswith(f"MachineError: --port {port} on 127.0.0.1: ")
        with socket.create_connection(("127.0.0.1", int(port)), 30) as idle:  # an open page does not delay the end
            idle.sendall(b"GET /api/runs HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(1) == b"H"  # the server has accepted the connection
            idle.sendall(b"GET /api/runs HTTP/1.1\r\n")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        assert process.stderr.read().strip() in ("", "Aborted.")
        assert not psutil.pid_exists(process.pid) or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        process.stderr.close()
    assert list(tmp_path.iterdir()) == []


def test_the_address_with_a_token_leads_to_the_same_server(client: TestClient) -> None:
    answer = client.get("http://127.0.0.1:8765//elsewhere.example/a?token=geheim&b=1", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/elsewhere.example/a?b=1")
