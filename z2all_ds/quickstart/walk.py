"""`z2all quickstart`: the main job once, on what every machine has, in a few minutes on two CPU cores.

Each stage leaves a complete result or none, so running it again after a Ctrl-C, a kill or a power cut goes on where it
was and ends with the same loss. Everything lies in one folder.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import human_seconds, say
from z2all_ds.base.errors import ConfigError, TrainingError
from z2all_ds.base.machine import gpu_count, require_free_disk
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.corpus import SourceSpec, build_corpus
from z2all_ds.track.fields import LOSS_PREFIX
from z2all_ds.track.goodput import goodput
from z2all_ds.track.plots import plot_loss
from z2all_ds.track.writer import last_outcome, read_records
from z2all_ds.train.command import train_on_this_machine
from z2all_ds.train.processes.local_ranks import deepspeed_command

PRESET = "z2all_tiny"
DEEPSPEED = "zero2"
RANKS = 2
SOURCES = (
    SourceSpec("code", "python_code", max_bytes=5_000_000),
    SourceSpec("english", "python_docstrings", max_bytes=1_500_000),
    SourceSpec("chinese", "chinese_sample", max_bytes=1_500_000),
)
WEIGHTS = {"chinese": 0.3, "code": 0.4, "english": 0.3}
TEXT_VOCAB_SIZE = 2048
TOKENIZER_BYTES = 4_000_000
DISK_BYTES = 500_000_000
MIN_LOSS_DROP_NATS = 2.0
"""Guessing evenly among 2112 tokens costs 7.66 nats; the preset's 300 steps ended at 4.9, 5.3, 5.4 and 5.4 for four
draws of documents. Less of a fall is broken."""
MARK = ".z2all_quickstart"
"""Only a folder with this file is ever deleted by --fresh."""


@dataclass(frozen=True)
class Folders:
    """Everything below the output folder."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.root / "run")

    @property
    def export(self) -> Path:
        return self.root / "hf_model"


def run_quickstart(out: Path, fresh: bool, user_overrides: list[str]) -> None:
    """All stages, each skipped where its result is there already; then the table."""
    started = time.monotonic()
    folders = Folders(out.expanduser().resolve())
    prepare_folder(folders.root, fresh)
    overrides = [*run_overrides(folders), *user_overrides]
    total_steps = load_run_config(None, overrides).train.steps
    ranks = min(RANKS, gpu_count()) or RANKS

    say("[1/5] corpus: Python's own sources, its docstrings, and Chinese text of ours")
    build_corpus(folders.corpus, SOURCES)
    say(f"[2/5] tokenizer: byte-level BPE, {TEXT_VOCAB_SIZE} text tokens")
    from z2all_ds.tokenizer import train_tokenizer

    train_tokenizer(folders.corpus, folders.tokenizer, TEXT_VOCAB_SIZE, TOKENIZER_BYTES)
    half = total_steps // 2
    if _steps_done(folders.run) < half:
        say(f"[3/5] training on {ranks} ranks by the deepspeed launcher with {DEEPSPEED}, to be stopped at step {half}")
        # Started as on many nodes, while what follows starts its ranks itself: both ways are shown to work here.
        stopped_half_way = [*overrides, f"train.stop_at_step={half}"]
        train_on_this_machine(load_run_config(None, stopped_half_way), ranks, command=deepspeed_command)
    if last_outcome(folders.run) != "done":
        say("[4/5] training: resumed from its checkpoint")
        train_on_this_machine(load_run_config(None, overrides), ranks)
    records = list(read_records(folders.run.metrics))
    # With fewer steps asked for, it is enough that the loss falls at all.
    is_whole = total_steps >= load_run_config(PRESET).train.steps
    check_learning(records, MIN_LOSS_DROP_NATS if is_whole else 0.0)
    say("[5/5] export: Hugging Face folder, proven by a process without this package")
    from z2all_ds.export.to_hf import export_checkpoint

    report = export_checkpoint(folders.run.root, folders.export, dtype="fp32")
    png = plot_loss([folders.run.root], folders.run.plots / "loss.png")
    for prompt, continuation in report.verdict.generated.items():
        say(f"generated: {prompt!r} -> {continuation!r}")
    proof = f"logits within {report.verdict.max_relative_difference:.0e} of the training weights"
    print_table(records, folders, png, proof)
    say(f"quickstart finished in {human_seconds(time.monotonic() - started)}")


def prepare_folder(root: Path, fresh: bool) -> None:
    """Takes a new, an empty or an earlier quickstart's folder; nothing else is touched."""
    if root.exists() and (not root.is_dir() or (any(root.iterdir()) and not (root / MARK).exists())):
        raise ConfigError(f"--out {root}", "exists and was not made by the quickstart", "Give a new folder.")
    if fresh and root.exists():
        shutil.rmtree(root)
    require_free_disk(root, DISK_BYTES, "the quickstart")
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / MARK).touch()
    except OSError as error:
        raise ConfigError(f"--out {root}", f"cannot be written ({error.strerror})", "Give another folder.") from None


def run_overrides(folders: Folders) -> list[str]:
    """The run config of the quickstart, as a user would write it on the command line."""
    return [
        f"preset={PRESET}",
        f"deepspeed={DEEPSPEED}",
        f"run_dir={_quoted(folders.run.root)}",
        f"data.corpus={_quoted(folders.corpus)}",
        f"data.tokenizer={_quoted(folders.tokenizer)}",
        f"data.weights={WEIGHTS}",
    ]


def _quoted(path: Path) -> str:
    """A path as a YAML value, whatever characters it has."""
    return "'" + str(path).replace("'", "''") + "'"


def _steps_done(run: RunFolder) -> int:
    return max((record["step"] for record in read_records(run.events) if record["event"] == "checkpoint"), default=0)


def check_learning(records: list[dict[str, Any]], min_drop_nats: float) -> None:
    """The loss must really fall."""
    first, last = records[0]["loss"], _last_mean(records, "loss")
    if not first - last > min_drop_nats:
        raise TrainingError(
            f"loss {first:.3f} -> {last:.3f}",
            f"must fall by more than {min_drop_nats} nats",
            "Run it again with --fresh; if it stays so, report it as a bug.",
        )


def _last_mean(records: list[dict[str, Any]], key: str, window: int = 5) -> float:
    """Mean over the last few steps in which the value occurs: one step of 16 samples is noisy."""
    values = [record[key] for record in records if key in record][-window:]
    return float(sum(values) / len(values))


def print_table(records: list[dict[str, Any]], folders: Folders, png: Path, proof: str) -> None:
    """The one table at the end, on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "start", "end", title=f"z2all quickstart: {records[-1]['step']} steps")
    keys = sorted({key for record in records for key in record if key.startswith(LOSS_PREFIX)})
    for key in ["loss", *keys]:
        name = "loss" if key == "loss" else f"loss of {key.removeprefix(LOSS_PREFIX)}"
        start = next(record[key] for record in records if key in record)
        table.add_row(name, f"{start:.3f}", f"{_last_mean(records, key):.3f}")
    table.add_row("tokens/s", "", f"{records[-1]['tokens_per_second']:,.0f}")
    table.add_row("tokens seen", "", f"{records[-1]['tokens_seen']:,}")
    used = goodput(read_records(folders.run.events), records)
    table.add_row("time in steps that counted", "", f"{100 * used.share:.0f}% of {human_seconds(used.wall_seconds)}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    places = {
        "corpus": folders.corpus,
        "tokenizer": folders.tokenizer,
        "run (config, metrics, logs, checkpoints)": folders.run.root,
        "Hugging Face model": f"{folders.export} ({proof})",
        "loss curve": png,
    }
    for name, place in places.items():
        console.print(f"{name}: {place}", markup=False)
