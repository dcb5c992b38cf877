"""`z2all generate`: pipes, files, errors, and a conversation at a pseudo-terminal."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner

from tests.evaluate.conftest import model_folder
from tests.helpers.command import COMMAND, environment
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.cli import app
from z2all_ds.cli.generate import _answer_all
from z2all_ds.evaluate.converse import write_now
from z2all_ds.evaluate.generate import Generator
from z2all_ds.evaluate.prompts import Answer, explain_blanks

__all__ = ["model_folder"]  # a fixture of tests/evaluate


class Terminal:
    """The command with a pseudo-terminal as its stdin and stdout."""

    def __init__(self, *arguments: str | Path) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.DEVNULL,
            env=environment(TERM="dumb"),
            preexec_fn=os.setsid,
        )
        os.close(slave)

    def read_until(self, wanted: str, seconds: float = 60) -> str:
        found, deadline = b"", time.monotonic() + seconds
        while wanted not in found.decode(errors="replace"):
            assert time.monotonic() < deadline, found.decode(errors="replace")
            if select.select([self._master], [], [], 0.2)[0]:
                found += os.read(self._master, 4096)
        return found.decode(errors="replace").replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ends_by_ctrl_d(self, seconds: float = 30) -> int | None:
        """Type Ctrl-D until the command ends, and return its exit code. A character that is typed between two prompts,
        while readline does not control the terminal, is lost."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.type("\x04")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_a_conversation_at_a_terminal(model_folder: Path) -> None:
    """Lines are answered unless they are empty; Ctrl-C does not end the conversation, Ctrl-D does."""
    terminal = Terminal("generate", model_folder, "--max-new-tokens", "6", "--chat")
    try:
        terminal.read_until("> ", 90)
        terminal.type("\n")
        terminal.read_until("> ")
        terminal.type("今天\n")
        echo, _, answer = terminal.read_until("\n> ").partition("\n")
        assert "今天" in echo and answer.removesuffix("\n> ")
        terminal.type("/new\n")
        terminal.read_until("\n> ")
        terminal.type("今天\n")
        assert terminal.read_until("\n> ").partition("\n")[2] == answer  # /new made it forget the first line
        terminal.process.send_signal(signal.SIGINT)
        terminal.type("\n")  # readline may have checked for signals just before this one arrived
        terminal.read_until("\n> ")
        assert terminal.process.poll() is None
        assert terminal.ends_by_ctrl_d() == 0
    finally:
        terminal.close()


def here(*arguments: str | Path, stdin: str | bytes | None = None) -> str:
    """Run the command in this process, since starting another one takes longer than its work; return its stdout."""
    answer = CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin, catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.stdout


def test_prompts_are_read_from_a_file_and_answers_are_written_to_a_file(model_folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "new" / "folder" / "out.jsonl"
    file.write_text('{"id": 1, "prompt": "今天"}\n{"id": 2, "prompt": "def"}\n', encoding="utf-8")
    printed = here(model_folder, "--file", file, "--out", out, "--max-new-tokens", "4", "--num", "2", "--json")
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert json.loads(printed) == found
    assert [one["id"] for one in found] == [1, 1, 2, 2]
    assert list(out.parent.iterdir()) == [out]


def test_the_output_path_is_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "config.json").touch()  # not a model, but taken for one
    for out, words in ((tmp_path, "--out .*: is a folder"), (tmp_path / "file/x.jsonl", "folder .* cannot be created")):
        with pytest.raises(ConfigError, match=words):
            here(tmp_path, "-p", "x", "--out", out)


@pytest.mark.parametrize(("options", "stdin"), [(("-p", "\udcff"), None), ((), b"\xff"), (("--file", "-"), b"\xff\n")])
def test_a_prompt_that_is_not_utf_8_is_refused(tmp_path: Path, options: tuple[str, ...], stdin: bytes | None) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(DataError, match=r"^(a prompt|stdin): not .*UTF-8"):
        here(tmp_path, *options, stdin=stdin)


def test_a_missing_model_is_reported_before_a_missing_prompt(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^model .*/nope: no such folder"):
        here(tmp_path / "nope", stdin="")
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=r"^stdin: is empty, and no prompt was given"):
        here(tmp_path, stdin="")


@pytest.mark.parametrize("option", ["--num", "--batch"])
def test_num_and_batch_must_be_at_least_one(tmp_path: Path, option: str) -> None:
    answer = CliRunner().invoke(app, ["generate", str(tmp_path), "-p", "x", option, "0"])
    assert answer.exit_code == ConfigError.exit_code and "equal to 1" in answer.output


def test_piped_text_is_one_prompt_and_streaming_gives_the_same_text(model_folder: Path) -> None:
    streamed, whole = (
        here(model_folder, "--max-new-tokens", "8", option, stdin="今天\n天气\n")
        for option in ("--stream", "--no-stream")
    )
    assert streamed == whole
    assert whole.startswith("今天\n天气") and len(whole) > 8
    two = here(model_folder, "--max-new-tokens", "8", "--file", "-", "--json", stdin="今天\n天气\n")
    assert [one["prompt"] for one in json.loads(two)] == ["今天", "天气"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--greedy", "--top-k", "5", "-p", "x"), "--greedy with --top-k: greedy decoding does not sample"),
        (("--temperature", "0", "--num", "2", "-p", "x"), "--temperature 0 with --num above 1: greedy decoding"),
        (("--stream", "--json", "-p", "x"), "--stream: streams text, not JSON"),
        (("-p", "x", "--file", "y"), "-p and --file: cannot be combined"),
        (("-p", ""), "-p '': a prompt must have at least one character"),
        ((), "stdin: is empty, and no prompt was given"),
    ],
)
def test_invalid_options_are_refused(model_folder: Path, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        here(model_folder, *options)


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "\\x1b[2J\ta\n"), (False, "\x1b[2J\ta\n")])
def test_answers_cannot_control_the_terminal(
    is_terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Answer("", "\x1b[2J\ta", "length", 1)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    write_now("\x1b[2J\ta\n")
    assert capsys.readouterr().out == shown
    fake = SimpleNamespace(is_chat=True, answer_all=lambda *_: [answer])
    _answer_all(cast(Generator, fake), [{"prompt": ""}], 1, 1, None, as_json=False)
    assert capsys.readouterr().out == shown


def test_blank_answers_are_explained_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    explain_blanks([Answer("a", " \n", "length", 2), Answer("a", "b", "length", 1)])
    said = "1 of 2 answers are blank: common after little training; try --temperature 0.8\n"
    assert capsys.readouterr() == ("", said)
    explain_blanks([Answer("a", "b", "length", 1)])
    assert capsys.readouterr() == ("", "")
