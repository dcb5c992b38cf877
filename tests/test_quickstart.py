"""The quickstart as a user runs it, also interrupted and killed: the losses stay bit-identical."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.training import losses
from z2all_ds.base.errors import ConfigError, TrainingError
from z2all_ds.base.machine import extensions_dir
from z2all_ds.quickstart.walk import MARK, check_learning, prepare_folder

SHORT = ("train.steps=24", "checkpoint.every_steps=4", "schedule.warmup_steps=4", "train.log_every=1")
PATIENCE_SECONDS = 120


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "z2all_ds", "quickstart", "--out", str(out), *SHORT]


def processes_of(out: Path) -> list[str]:
    """Return the command lines of all live processes that mention the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
            dead = "Z" in (entry / "stat").read_text().rpartition(")")[2].split()[:1] if line else True
        except OSError:  # ended in the meantime
            continue
        if str(out) in line and not dead:
            found.append(line)
    return found


def wait_for(condition: object, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


def start_and_wait_for_step(
    out: Path, step: int, log: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        process = subprocess.Popen(command(out), stdout=file, stderr=file, env=environment)
    metrics = out / "run" / "metrics.jsonl"
    wait_for(
        lambda: process.poll() is not None or (metrics.exists() and len(losses(metrics.parent)) >= step), f"step {step}"
    )
    assert process.poll() is None, log.read_text()
    return process


def resumed_from(output: str) -> int:
    """Return the step of the first resume that the output reports."""
    found = re.search(r"resumed from step_(\d+)", output)
    assert found, output
    return int(found.group(1))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the output folder and stdout of an uninterrupted run.

    The path contains spaces and Chinese characters, there is no home folder, and `hostname -I` prints no address.
    """
    root = tmp_path_factory.mktemp("路径 with blanks")
    (root / "bin").mkdir()
    (root / "bin" / "hostname").write_text("#!/bin/sh\n")
    (root / "bin" / "hostname").chmod(0o755)
    environment = {
        **os.environ,
        "HOME": "/dev/null/nonexistent",
        "PATH": f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(extensions_dir()),  # contains the ops that the test script has built
    }
    out = root / "输出 out"
    result = subprocess.run(command(out), capture_output=True, text=True, env=environment, cwd=root)
    assert result.returncode == 0, result.stderr
    assert processes_of(out) == []
    return out, result.stdout


@pytest.fixture
def prepared(unbroken: tuple[Path, str], tmp_path: Path) -> Path:
    """Return a quickstart folder that already has its corpus and tokenizer."""
    out = tmp_path / "out"
    out.mkdir()
    (out / MARK).touch()
    for name in ("corpus", "tokenizer"):
        shutil.copytree(unbroken[0] / name, out / name)
    return out


@pytest.mark.extended
def test_the_quickstart_reports_its_results(unbroken: tuple[Path, str]) -> None:
    out, table = unbroken
    for word in ("loss of chinese", "loss of code", "loss of english", "tokens/s", "loss.png", "hf_model"):
        assert word in table
    assert str(out) in table.replace("\n", "")
    assert (out / "run" / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (out / "hf_model").iterdir()}
    events = [json.loads(line) for line in (out / "run" / "events.jsonl").read_text().splitlines()]
    ends = [e["event"] for e in events if e["event"] not in ("checkpoint", "saved", "first_step")]
    assert ends == ["started", "stopped", "started", "done"]
    assert [e["step"] for e in events if e["event"] == "started"] == [0, 12]  # stopped halfway and resumed from there
    assert losses(out / "run")[-1] < losses(out / "run")[0]


@pytest.mark.extended
def test_a_second_call_has_nothing_to_train(unbroken: tuple[Path, str]) -> None:
    out = unbroken[0]
    before = (out / "run" / "events.jsonl").read_text()
    result = subprocess.run(command(out), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (out / "run" / "events.jsonl").read_text() == before


@pytest.mark.extended
def test_ctrl_c_leaves_no_process_and_the_resumed_losses_are_identical(
    unbroken: tuple[Path, str], prepared: Path, tmp_path: Path
) -> None:
    process = start_and_wait_for_step(prepared, 6, tmp_path / "log")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 130
    assert processes_of(prepared) == []
    assert "Traceback" not in (tmp_path / "log").read_text()
    again = subprocess.run(command(prepared), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert resumed_from(again.stderr) >= 6  # saved after Ctrl-C
    assert losses(prepared / "run") == losses(unbroken[0] / "run")


@pytest.mark.extended
def test_a_kill_also_ends_the_ranks_and_the_resumed_losses_are_identical(
    unbroken: tuple[Path, str], prepared: Path, tmp_path: Path
) -> None:
    """The run is killed in its second half. Before the second call, a killed op build has left its lock."""
    extensions = tmp_path / "extensions"
    shutil.copytree(extensions_dir() / "deepspeed_shm_comm", extensions / "deepspeed_shm_comm")
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions)}
    process = start_and_wait_for_step(prepared, 14, tmp_path / "log", environment)
    process.kill()
    process.wait()
    wait_for(lambda: not processes_of(prepared), "the end of the orphaned ranks")
    lock = extensions / "deepspeed_shm_comm" / "lock"
    lock.touch()
    an_hour_ago = time.time() - 3600
    os.utime(lock, (an_hour_ago, an_hour_ago))
    again = subprocess.run(command(prepared), capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    assert f"removed the lock of a killed build: {lock}" in again.stderr
    assert resumed_from(again.stderr) in (12, 16, 20)
    assert losses(prepared / "run") == losses(unbroken[0] / "run")


def test_a_folder_that_the_quickstart_did_not_create_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="was not created by the quickstart"):
            prepare_folder(tmp_path, fresh)
    assert (tmp_path / "thesis.txt").read_text() == "ten years of work"


def test_fresh_deletes_the_previous_results(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_folder(out, fresh=False)
    (out / "corpus").mkdir()
    prepare_folder(out, fresh=False)
    assert (out / "corpus").exists()
    prepare_folder(out, fresh=True)
    assert not (out / "corpus").exists()


def test_a_loss_that_does_not_fall_is_an_error() -> None:
    flat = [{"step": step, "loss": 7.0} for step in range(1, 10)]
    with pytest.raises(TrainingError, match="must fall"):
        check_learning(flat, 0.0)
    falling = [{"step": step, "loss": 7.0 - step / 4} for step in range(1, 10)]
    check_learning(falling, 1.0)
    with pytest.raises(TrainingError, match="more than 2"):
        check_learning(falling, 2.0)
    with pytest.raises(TrainingError, match="nan"):
        check_learning([*falling, {"step": 10, "loss": float("nan")}], 0.0)
