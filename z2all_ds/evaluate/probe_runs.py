"""Runs the probes of one file on models: exports, checkpoints, or every checkpoint of a run, the oldest first."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import CheckpointError, DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.layout import find_latest, is_step_name, step_folders
from z2all_ds.evaluate.loading import LoadedModel, load_model
from z2all_ds.evaluate.probe_kept import KeptAnswers
from z2all_ds.evaluate.probe_report import Answer, AskedModels, ModelAnswers
from z2all_ds.evaluate.probe_rows import ask, read
from z2all_ds.evaluate.probes import DEFAULT_FILE, FormatProbe, Probe, load_probes
from z2all_ds.evaluate.token_scores import log_probabilities, losses_of

PADDING_ID = 0
"""Not visible to any scored token, so any valid id will do; the tokenizer's own padding id may not be one."""


@dataclass(frozen=True)
class _PlainTokenizer:
    """A transformers tokenizer that adds nothing, and does not parse control tokens in a text."""

    whole: Any

    def encode(self, text: str, /) -> list[int]:
        ids: list[int] = self.whole(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], /) -> str:
        text: str = self.whole.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def begin_ids(self) -> list[int]:
        """The ids it puts before every text by default: none, or a begin-of-text."""
        begin = self.whole.bos_token_id
        return [begin] if begin is not None and self.whole("a")["input_ids"][:1] == [begin] else []


@dataclass
class _Line:
    """A model, or the checkpoints of a run."""

    path: Path
    checkpoints: list[Path] = field(default_factory=list)
    """Only for a run folder."""

    @property
    def models(self) -> list[Path]:
        return self.checkpoints or [self.path]


def ask_models(
    paths: Iterable[Path], file: str | None, all_checkpoints: bool, dtype: str, rows_per_batch: int
) -> AskedModels:
    """Evaluate the models one after the other, one in memory at a time. Results of a run are written to its folder."""
    lines = [_line(path, all_checkpoints) for path in paths]
    file = file or next((own for own in (_own_file(line.path) for line in lines) if own), DEFAULT_FILE)
    file = str(Path(file).expanduser().resolve()) if Path(file).expanduser().is_file() else file
    probes = load_probes(file)
    kept = [KeptAnswers(one.path, file, probes) if one.checkpoints and all_checkpoints else None for one in lines]
    found: list[list[ModelAnswers]] = []
    for line, kept_of_line in zip(lines, kept, strict=True):
        of_line = []
        for path in line.models:
            try:
                loaded = load_model(path, dtype)
            except CheckpointError as error:
                if len(line.models) == 1:
                    raise
                say(f"skipped: {error.what}: {error.rule}")
                continue
            of_line.append(ask_model(loaded, probes, rows_per_batch))
            del loaded  # before the next is loaded
        if not of_line:
            raise CheckpointError(f"run folder {line.path}", "none of its checkpoints can be read", "Check them.")
        found.append(of_line)
        if kept_of_line:
            kept_of_line.write(of_line)
    return AskedModels(file, probes, found)


def ask_model(loaded: LoadedModel, probes: Sequence[Probe], rows_per_batch: int) -> ModelAnswers:
    tokenizer = _PlainTokenizer(loaded.tokenizer)
    asked = ask(probes, tokenizer, tokenizer.begin_ids, loaded.max_tokens)
    rows = [row for one in asked for row in one.rows]
    loaded.require_token(max(max(row.ids) for row in rows))
    answers: dict[str, Answer] = {}
    with progress(f"probes of {loaded.label}", len(probes), "probes") as advance:
        scored = log_probabilities(rows, losses_of(loaded.model, loaded.device), rows_per_batch, PADDING_ID)
        for one in asked:
            reading = read(one, [next(scored) for _ in one.rows])
            details: dict[str, Any] = dict(reading.details)
            if isinstance(one.probe, FormatProbe) and one.probe.asks_for_text:
                details["answer"] = _greedy_answer(loaded, tokenizer, one.probe)
                details["form_kept"] = form_is_kept(one.probe, details["answer"])
            passed = _passed(one.probe, reading.value, loaded.step, details.get("form_kept"))
            answers[one.probe.name] = Answer(reading.value, passed, details)
            advance(1)
    return ModelAnswers(loaded.label, loaded.step, answers)


def form_is_kept(probe: FormatProbe, answer: str) -> bool:
    """Return whether the greedy answer has the required form; text after the form does not matter."""
    if probe.matches is not None and not re.match(probe.matches, answer):
        return False
    if not probe.as_json:
        return True
    try:
        found, _ = json.JSONDecoder().raw_decode(answer.lstrip())
    except ValueError:
        return False
    return isinstance(found, dict | list)


def _passed(probe: Probe, value: float, step: int | None, form_kept: bool | None) -> bool | None:
    """Return whether the probe is met; None if nothing is expected, or not yet."""
    if step is not None and step < probe.from_step:
        return None
    if not probe.is_judged(step):
        return form_kept
    return math.isfinite(value) and probe.is_met(value) and form_kept is not False


def _greedy_answer(loaded: LoadedModel, tokenizer: _PlainTokenizer, probe: FormatProbe) -> str:
    import torch

    ids = [*tokenizer.begin_ids, *tokenizer.encode(probe.prompt)]
    room = min(probe.new_tokens, loaded.max_tokens - len(ids))
    input_ids = torch.tensor([ids], device=loaded.device)
    mask = torch.ones_like(input_ids)
    made = loaded.model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=room, do_sample=False)
    text: str = loaded.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)
    return text


def _line(path: Path, all_checkpoints: bool) -> _Line:
    path = path.expanduser()
    is_run = (path / "checkpoints").is_dir() and not (path / "config.json").is_file()
    if not is_run:
        return _Line(path)
    folder = RunFolder(path)
    if all_checkpoints:
        checkpoints = step_folders(folder.checkpoints)
    else:
        newest, skipped = find_latest(folder.checkpoints)
        for line in skipped:
            say(line)
        checkpoints = [newest.path] if newest else []
    if not checkpoints:
        raise DataError(f"run folder {path}", "has no checkpoint yet", "Train it for longer first.")
    return _Line(path, checkpoints)


def _own_file(path: Path) -> str:
    """Return the probe file configured in the run of this folder or checkpoint; '' if there is none."""
    root = path.resolve().parent.parent if is_step_name(path.resolve().name) else path
    config = RunFolder(root).config
    return load_run_config(str(config)).probes.file if config.is_file() else ""
