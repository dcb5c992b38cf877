"""Every option that names a file for output, on real inputs: only an empty file and our own are ever replaced."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import typer

from tests.corpus.making import write_corpus
from tests.helpers.memorised import TASKS, untrained
from z2all_ds.base.errors import ConfigError
from z2all_ds.cli import app
from z2all_ds.cluster.overlay import command as overlay

FOREIGN = b"# written by z2all_ds, which may replace this file\nmine: 1\n"


@dataclass(frozen=True)
class Writer:
    """A command line, the option and the file that it writes, and the function that does its long work."""

    line: str
    option: str
    out: str
    work: str
    has_mark: bool = True
    """Its own file is replaced, too."""


PLAN, OVERLAY = "plan --model z2all_7b --gpu h100", "cluster overlay up --hostfile hosts.yaml"
SCORE = "evaluate harness model --tasks sums --limit 1 --include"
WRITERS = [
    Writer("plot run --out new/x.png", "--out", "new/x.png", "z2all_ds.track.plots.read_run"),
    Writer("plot run --out x.svg", "--out", "x.svg", "z2all_ds.track.plots.read_run"),
    Writer("plot run", "--out", "run/plots/loss.png", "z2all_ds.track.plots.read_run"),
    Writer("plot run --what loss,lr --out x/", "--out", "x/lr.png", "z2all_ds.track.plots._figure"),
    Writer("corpus stats corpus --plot x.png", "--plot", "x.png", "z2all_ds.data.corpus_stats.corpus_stats"),
    Writer(f"{PLAN} --sweep gpus=8 --out x.svg", "--out", "x.svg", "z2all_ds.plan.scaling.sweep"),
    Writer(f"{PLAN} --gpus 64 --write x.yaml", "--write", "x.yaml", "z2all_ds.plan.make_plan", has_mark=False),
    Writer(f"{SCORE} {TASKS} --out x.json", "--out", "x.json", "z2all_ds.evaluate.harness.run.run_harness"),
    Writer(
        "generate model -p a --max-new-tokens 1 --out x.jsonl",
        "--out", "x.jsonl", "z2all_ds.evaluate.loading.load_model", has_mark=False,
    ),
    Writer(f"{OVERLAY} --out x.yaml", "--out", "x.yaml", "z2all_ds.cluster.overlay.command._agents_on"),
]  # fmt: skip
FOLDERS = {
    "corpus convert", "corpus build", "corpus split", "corpus tokenize", "tokenizer train", "tokenizer import",
    "export", "quickstart",
}  # fmt: skip
"""Verbs whose --out is a folder."""


@pytest.fixture(scope="module")
def inputs(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    (root / "run").mkdir()
    records = [{"step": step, "loss": 8 / step, "lr": 1 / step} for step in range(1, 9)]
    (root / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_corpus(root / "corpus", {"en": ["word " * n for n in range(9)]})
    loaded = untrained(small_tokenizer)
    loaded.model.save_pretrained(root / "model")
    loaded.tokenizer.save_pretrained(root / "model")
    (root / "hosts.yaml").write_text("nodes: {a: {slots: 1}, b: {slots: 1}}")
    return root


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.line.replace(str(TASKS), "TASKS"))
def writer(request: pytest.FixtureRequest, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """Return a writer, in a folder with its inputs."""
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    (tmp_path / request.param.out).parent.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    @contextmanager
    def no_agents(nodes: object) -> Iterator[None]:
        yield

    # The nodes of the overlay; that of real ones is tested in tests/cluster/overlay/test_nat.py.
    monkeypatch.setattr(overlay, "_agents_on", no_agents)
    monkeypatch.setattr(overlay, "_check", lambda plan, agents: dict.fromkeys("ab"))
    monkeypatch.setattr(overlay, "_works", lambda *_: True)
    return request.param


def call(writer: Writer) -> None:
    app(shlex.split(writer.line), standalone_mode=False)


def assert_refused(writer: Writer, content: bytes) -> None:
    """The command is refused, and the file has this content."""
    with pytest.raises(ConfigError, match=f"^{writer.option} {re.escape(writer.out)}: is there already and carries no"):
        call(writer)
    assert Path(writer.out).read_bytes() == content


def test_a_file_of_others_is_refused_before_the_work(writer: Writer) -> None:
    Path(writer.out).write_bytes(FOREIGN)
    with patch(writer.work, side_effect=AssertionError("the work has begun")):
        assert_refused(writer, FOREIGN)


def test_a_file_that_appears_during_the_work_stays(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, name = writer.work.rpartition(".")
    original = getattr(import_module(module), name)

    def work(*arguments: Any, **named: Any) -> Any:
        Path(writer.out).write_bytes(FOREIGN)
        return original(*arguments, **named)

    with patch(writer.work, work):
        assert_refused(writer, FOREIGN)
    assert not list(Path(writer.out).parent.glob(".z2all_*"))
    if writer.line.startswith("generate"):
        assert json.loads(capsys.readouterr().out)["text"]  # not lost


def test_an_empty_file_and_our_own_are_replaced(writer: Writer) -> None:
    out = Path(writer.out)
    out.touch()
    call(writer)
    first = out.read_bytes()
    assert first
    if writer.has_mark:
        os.utime(out, (0, 0))
        call(writer)
        assert out.stat().st_mtime and out.stat().st_size
    else:
        assert_refused(writer, first)


def test_every_option_that_names_an_output_is_tested() -> None:
    found, expected = set[tuple[str, str]](), {(verb, "--out") for verb in FOLDERS}

    def look(command: Any, words: tuple[str, ...]) -> None:
        for name, below in getattr(command, "commands", {}).items():
            look(below, (*words, name))
        options = {option for parameter in command.params for option in parameter.opts}
        found.update(
            (" ".join(words), option) for option in options & {"--out", "--output", "--plot", "--save", "--write"}
        )

    look(typer.main.get_command(app), ())
    for one in WRITERS:
        verb = next(verb for verb, option in found if one.line.startswith(f"{verb} ") and option == one.option)
        expected.add((verb, one.option))
    assert found == expected
