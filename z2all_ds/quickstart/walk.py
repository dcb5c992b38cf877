"""`z2all quickstart`: every stage once, with data that every machine has, in a few minutes on two CPU cores.

Each stage leaves a complete result or none. Running it again after a Ctrl-C, a kill or a power failure therefore
continues where it stopped and ends with the same loss. All output is in one folder.
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import human_seconds, say
from z2all_ds.base.errors import ConfigError, TrainingError
from z2all_ds.base.machine import gpu_count, require_free_disk
from z2all_ds.base.paths import full_path
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
"""A uniform guess over 2112 tokens costs 7.66 nats; the preset's 300 steps ended at 4.9, 5.3, 5.4 and 5.4 for four
different document samples. A smaller drop indicates a bug."""
EXPECTED_AFTER = ("    return self", "    if not", "小明")
CONTINUED = ("读作", "        self.")
"""Numbers in Chinese characters, and code."""
OWN_SETTINGS = ("run_dir", "data.corpus", "data.tokenizer")
MARK = ".z2all_quickstart"
"""--fresh only deletes a folder that contains this file."""


@dataclass(frozen=True)
class Folders:
    """The paths below the output folder."""

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
    """Run all stages, skip those that are already done, and print the table."""
    started = time.monotonic()
    folders = Folders(full_path(out))
    for override in user_overrides:
        if override.partition("=")[0].strip() in OWN_SETTINGS:
            rule = "the quickstart makes these itself, below --out"
            raise ConfigError(override, rule, "Leave it out, or run `z2all train` yourself.")
    overrides = [*run_overrides(folders), *user_overrides]
    total_steps = load_run_config(None, overrides).train.steps  # reports a mistake before --fresh deletes anything
    prepare_folder(folders.root, fresh)
    ranks = min(RANKS, gpu_count()) or RANKS

    say("[1/5] corpus: Python's sources, its docstrings, and a Chinese sample")
    build_corpus(folders.corpus, SOURCES)
    say(f"[2/5] tokenizer: byte-level BPE, {TEXT_VOCAB_SIZE} text tokens")
    from z2all_ds.tokenizer import train_tokenizer

    train_tokenizer(folders.corpus, folders.tokenizer, TEXT_VOCAB_SIZE, TOKENIZER_BYTES)
    half = total_steps // 2
    if _steps_done(folders.run) < half:
        say(f"[3/5] training: {ranks} ranks, deepspeed launcher, {DEEPSPEED}; stops at step {half}")
        # This part uses the deepspeed launcher, as on several nodes; the next part starts its ranks directly.
        stopped_half_way = [*overrides, f"train.stop_at_step={half}"]
        train_on_this_machine(load_run_config(None, stopped_half_way), ranks, command=deepspeed_command)
    if last_outcome(folders.run) != "done":
        say("[4/5] training: resuming from the checkpoint")
        train_on_this_machine(load_run_config(None, overrides), ranks)
    records = list(read_records(folders.run.metrics))
    # With fewer steps, any drop of the loss is enough.
    is_whole = total_steps >= load_run_config(PRESET).train.steps
    check_learning(records, MIN_LOSS_DROP_NATS if is_whole else 0.0)
    say("[5/5] export: Hugging Face folder, verified by a process without this package")
    from z2all_ds.export.to_hf import export_checkpoint

    report = export_checkpoint(folders.run.root, folders.export, dtype="fp32")
    png = plot_loss([folders.run.root], folders.run.plots / "loss.png")
    for prompt, continuation in report.verdict.generated.items():
        say(f"generated: {prompt!r} -> {continuation!r}")
    verification = f"logits within {report.verdict.max_relative_difference:.0e} of the training weights"
    print_table(records, folders, png, verification)
    for line in learned_lines(folders.export):
        say(line)
    say(f"quickstart finished in {human_seconds(time.monotonic() - started)}")


def prepare_folder(root: Path, fresh: bool) -> None:
    """Accept a new or empty folder, or one of an earlier quickstart; refuse any other."""
    if root.exists() and (not root.is_dir() or (any(root.iterdir()) and not (root / MARK).exists())):
        raise ConfigError(f"--out {root}", "exists and was not created by the quickstart", "Give a new folder.")
    if fresh and root.exists():
        shutil.rmtree(root)
    require_free_disk(root, DISK_BYTES, "the quickstart")
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / MARK).touch()
    except OSError as error:
        raise ConfigError(f"--out {root}", f"cannot be written ({error.strerror})", "Give another folder.") from None


def run_overrides(folders: Folders) -> list[str]:
    """Return the overrides of the quickstart's run config, as on the command line."""
    return [
        f"preset={PRESET}",
        f"deepspeed={DEEPSPEED}",
        f"run_dir={_quoted(folders.run.root)}",
        f"data.corpus={_quoted(folders.corpus)}",
        f"data.tokenizer={_quoted(folders.tokenizer)}",
        f"data.weights={WEIGHTS}",
    ]


def _quoted(path: Path) -> str:
    """Return a path as a YAML string, with any characters."""
    return "'" + str(path).replace("'", "''") + "'"


def _steps_done(run: RunFolder) -> int:
    return max((record["step"] for record in read_records(run.events) if record["event"] == "checkpoint"), default=0)


def check_learning(records: list[dict[str, Any]], min_drop_nats: float) -> None:
    """Raise unless the loss falls by more than `min_drop_nats`."""
    first, last = records[0]["loss"], _last_mean(records, "loss")
    if not first - last > min_drop_nats:
        raise TrainingError(
            f"loss {first:.3f} -> {last:.3f}",
            f"must fall by more than {min_drop_nats} nats",
            "Run it again with --fresh; if it fails again, report a bug.",
        )


def _last_mean(records: list[dict[str, Any]], key: str, window: int = 5) -> float:
    """Return the mean of the last few values of `key`: one step of 16 samples is noisy."""
    values = [record[key] for record in records if key in record][-window:]
    return float(sum(values) / len(values))


def learned_lines(model: Path) -> Iterator[str]:
    """Yield what the model expects after a few prompts, and text of it next to text of the same model untrained.

    After its few steps, so small a model writes no sentences, but it knows what follows common tokens, and which
    tokens belong together.
    """
    import torch

    from z2all_ds.evaluate.generate import Generator, Sampling
    from z2all_ds.evaluate.loading import load_model
    from z2all_ds.export.whole_characters import without_cut_end

    trained = load_model(model, "fp32", quiet=True)
    for prompt in EXPECTED_AFTER:
        ids = trained.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits_V = trained.model(input_ids=torch.tensor([ids], device=trained.device)).logits[0, -1]
        most = logits_V.float().softmax(-1).topk(3)
        expected = [
            f"{trained.tokenizer.decode([token])!r} {100 * share:.0f}%"
            for share, token in zip(most.values.tolist(), most.indices.tolist(), strict=True)
        ]
        before = f"before training: {100 / len(logits_V):.2f}% each"
        yield f"learned: after {prompt!r} it expects {', '.join(expected)} ({before})"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = type(trained.model)(trained.model.config).to(trained.device).eval()
    fresh.generation_config = trained.model.generation_config
    sampling = Sampling(max_new_tokens=24, temperature=0.8, top_k=8)
    models = (replace(trained, model=fresh), trained)
    for answers in zip(*(Generator(one, sampling, chat=False).answer_all(CONTINUED) for one in models), strict=True):
        for label, answer in zip(("before training", "after training"), answers, strict=True):
            yield f"{label}: {answer.prompt!r} -> {without_cut_end(answer.text)!r}"
    yield "longer training makes sentences of it: a larger preset, more text, more train.steps"


def print_table(records: list[dict[str, Any]], folders: Folders, png: Path, verification: str) -> None:
    """Print the final table to stdout."""
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
    table.add_row("goodput", "", f"{100 * used.share:.0f}% of {human_seconds(used.wall_seconds)}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    places = {
        "corpus": folders.corpus,
        "tokenizer": folders.tokenizer,
        "run (config, metrics, logs, checkpoints)": folders.run.root,
        "Hugging Face model": f"{folders.export} ({verification})",
        "loss curve": png,
    }
    for name, place in places.items():
        console.print(f"{name}: {place}", markup=False)
