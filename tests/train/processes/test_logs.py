"""Real trainings on a pseudo-terminal: a panel, the usual log, a usable terminal afterwards. Logs on a full disk."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.screen import Terminal, lines_on_screen
from tests.helpers.training import run_arguments
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.train import pretrain
from z2all_ds.train.processes.progress import STACKS_SIGNAL, Progress

ENDLESS = ("train.steps=1000000", "checkpoint.every_steps=1000000")


ON_A_FULL_DISK = """
import os, sys
from pathlib import Path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.train.processes.logs import RankOutput
from z2all_ds.base.world import World

output = RankOutput(RunFolder(Path(sys.argv[1])), World.take_from_environment())
output.say("loss of \\x1b[2J")
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
output.say("the run goes on")
output.fail("and says why it ends", show=True)
"""


@contextmanager
def training(terminal: Terminal, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    environment = {key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "z2all_ds", "train", "--ranks", "1", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=terminal.theirs, env={**environment, "TERM": "xterm-256color"}
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def rank_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in children if "z2all_ds.train.pretrain" in child.cmdline()[:5])


def assert_usable(terminal: Terminal) -> None:
    assert "?25l" not in terminal.seen, "the cursor was hidden"
    assert "\x1b[?1049h" not in terminal.seen, "the screen was put away"
    assert lines_on_screen(terminal.seen)[-1] == ""


def test_a_run_asked_to_stop_leaves_its_panel_and_a_usable_terminal(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    terminal = Terminal(100, 40)
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *ENDLESS)
    with training(terminal, arguments) as process:
        terminal.wait_for(r"step [\d,]{2,}/1,000,000")
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            terminal.read(0.05)
    terminal.read(0.1)
    lines = lines_on_screen(terminal.seen)
    assert_usable(terminal)
    assert [line for line in lines if line.startswith("SIGINT: the run will save a checkpoint")]
    end = next(i for i, line in enumerate(lines) if re.match(r"stopped on request at step \d+", line))
    assert lines[end + 1].startswith("╭─ run ")
    step = int(lines[end].split()[-1])
    assert f"step {step:,}/1,000,000" in lines[end + 2]
    assert "ETA" in lines[end + 2]
    assert "loss" in lines[end + 3]
    assert not [line for line in lines if " | loss " in line], "lines of steps are on the terminal"
    log = (tmp_path / "run" / "logs" / "rank_0000.log").read_text(encoding="utf-8")
    assert re.search(rf"^\d\d:\d\d:\d\d step {step}/1000000 \| 0% \| loss ", log, re.MULTILINE)
    assert "╭" not in log
    terminal.close()


def test_a_killed_rank_leaves_a_usable_terminal_and_an_error_line(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    terminal = Terminal(40, 24)
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *ENDLESS)
    with training(terminal, arguments) as process:
        terminal.wait_for(r"step [1-9][\d,]*/1,000,000")
        rank_of(process).kill()
        while process.poll() is None:
            terminal.read(0.05)
    terminal.read(0.1)
    lines = lines_on_screen(terminal.seen)
    assert process.returncode == 128 + signal.SIGKILL
    assert_usable(terminal)
    foot = max(i for i, line in enumerate(lines) if line.startswith("╰─"))
    assert [line for line in lines[foot:] if line.startswith("RanksFailed: training in ")]
    terminal.close()


def test_logs_that_are_links_end_a_rank_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank's log and the file for its stacks lead to a file outside of the run folder."""
    (tmp_path / "target").write_text("kept")
    folder, world = RunFolder(tmp_path / "run"), World(0, 1, 0, 1)
    for path in (folder.rank_log(0), folder.stacks(0)):
        path.parent.mkdir(parents=True)
        path.symlink_to(tmp_path / "target")
    assert pretrain.main([f"run_dir={folder.root}"]) == ConfigError.exit_code
    assert f"ConfigError: {folder.rank_log(0)}: is a link" in capsys.readouterr().err
    previous = signal.getsignal(STACKS_SIGNAL)
    try:
        with pytest.raises(ConfigError, match=r"stacks/rank_0000\.txt: is a link"):
            Progress(folder, world, 60.0)
    finally:
        signal.signal(STACKS_SIGNAL, previous)
    assert (tmp_path / "target").read_text() == "kept"


def test_a_full_disk_loses_log_lines_but_does_not_end_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", ON_A_FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "loss of \\x1b[2J\nthe run goes on\nand says why it ends\n")
    assert RunFolder(tmp_path).rank_log(0).read_text().endswith(" loss of \\x1b[2J\n")
