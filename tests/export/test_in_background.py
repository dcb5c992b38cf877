"""Tests for background exports: they run one at a time, the newest request wins, and none outlives its owner."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.checkpoints import checkpoint_of, write_run
from tests.helpers.command import environment
from tests.helpers.marked import marked, new_mark, wait_until
from tests.helpers.models import TINY
from tests.helpers.processes import ended
from z2all_ds.base.atomic_folder import UNFINISHED
from z2all_ds.base.parent_watch import OWNER_VARIABLE, owner_mark
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.export.in_background import NICENESS, BackgroundExport

OWNER = """
import sys, time
from pathlib import Path
from z2all_ds.export.in_background import BackgroundExport
from z2all_ds.base.run_folder import RunFolder

exports = BackgroundExport(RunFolder(Path(sys.argv[1])))
print(exports.start(Path(sys.argv[2])), flush=True)
assert "torch" not in sys.modules
time.sleep(120)
"""


@pytest.fixture
def run(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "run", TINY, small_corpus, small_tokenizer, 5, 6, 7)


@pytest.fixture
def exports(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundExport]:
    monkeypatch.setenv("RANK", "3")
    exports = BackgroundExport(run, "fp32", "llama")
    yield exports
    exports.close()


def half_written(run: RunFolder) -> list[Path]:
    return list(run.exports.glob(f".*{UNFINISHED}/tokenizer.json"))


def test_exports_run_one_at_a_time_and_the_newest_request_wins(exports: BackgroundExport, run: RunFolder) -> None:
    (checkpoint_of(run, 5) / "trainer.json").write_text("{}")  # damaged, so its export fails
    assert exports.poll() == []
    assert exports.start(checkpoint_of(run, 5)) == "export of step_00000005 started in the background"
    assert exports.start(checkpoint_of(run, 6)) == "export of step_00000006 waits for that of step_00000005"
    line = "export of step_00000007 waits for that of step_00000005 and replaces step_00000006"
    assert exports.start(checkpoint_of(run, 7)) == line
    assert exports.poll() == []
    failed, begun, done = exports.finish()
    assert failed.startswith("export of step_00000005 failed (exit code 4: CheckpointError: checkpoint ")
    assert failed.endswith(f"Give a complete checkpoint.); training continues, see {run.root / 'logs' / 'export.log'}")
    assert "trainer.json has 2 bytes instead of" in failed
    assert begun == "export of step_00000007 started in the background"
    folder = run.exports / "step_00000007"
    assert done.startswith(f"exported step_00000007: {folder}: step 7, 88,736 parameters, logits within ")
    assert (folder / "model.safetensors").stat().st_size > 4 * 88_736
    assert [path.name for path in run.exports.iterdir()] == ["step_00000007"]
    log = exports.log.read_text()
    assert log.count("== export of step_") == 2 and "comparing logits" in log
    assert exports.finish() == exports.poll() == []


def test_an_export_has_low_priority_and_close_leaves_no_files(exports: BackgroundExport, run: RunFolder) -> None:
    exports.start(checkpoint_of(run, 6))
    exports.start(checkpoint_of(run, 7))
    assert exports._running
    process = exports._running.process
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    assert os.getsid(process.pid) == process.pid
    wait_until(lambda: bool(half_written(run)), "a half-written export")
    surroundings = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
    assert "CUDA_VISIBLE_DEVICES=" in surroundings
    assert f"{OWNER_VARIABLE}={owner_mark()}" in surroundings
    assert not [variable for variable in surroundings if variable.startswith("RANK=")]
    exports.close()
    assert process.returncode == 128 + signal.SIGTERM  # it ended on SIGTERM and deleted its files
    assert list(run.exports.iterdir()) == []
    assert exports.poll() == exports.finish() == []


def test_an_export_ends_when_its_owner_is_killed(run: RunFolder) -> None:
    mark = new_mark()
    command = [sys.executable, "-c", OWNER, str(run.root), str(checkpoint_of(run, 7))]
    with ended(subprocess.Popen(command, env=environment(**mark), stdout=subprocess.PIPE, text=True)) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "export of step_00000007 started in the background\n"
        # Wait for the grandchild process, which loads the folder.
        wait_until(lambda: any(b"standalone_check" in words for words in marked(mark).values()), "the check")
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        wait_until(lambda: not marked(mark), "the end of all that it had started", 20)


def test_an_export_fails_with_one_line_if_its_log_cannot_be_written(exports: BackgroundExport, run: RunFolder) -> None:
    (run.root / "logs").touch()
    line = exports.start(checkpoint_of(run, 7))
    assert line.startswith("export of step_00000007 failed (") and "logs" in line
    assert exports.finish() == []
