"""Runs the probes of one file on models: exports, checkpoints, or every checkpoint of a run, the oldest first."""

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import CheckpointError, DataError
from z2all_ds.base.paths import expanded, full_path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.layout import is_step_name, step_folders
from z2all_ds.evaluate.encoding import text_ids
from z2all_ds.evaluate.loading import LoadedModel, load_model
from z2all_ds.evaluate.probe_report import ModelAnswers, ProbeAnswer, ProbeResults, StoredAnswers
from z2all_ds.evaluate.probe_rows import encode_probes, read_value
from z2all_ds.evaluate.probes import DEFAULT_FILE, FormatProbe, Probe, load_probes
from z2all_ds.evaluate.scoring import score
from z2all_ds.evaluate.windows import AUTO, Window, bos_id_of


@dataclass(frozen=True)
class PlainTokenizer:
    """A transformers tokenizer that adds nothing, and does not parse control tokens in a text."""

    tokenizer: Any

    def encode(self, text: str, /) -> list[int]:
        return text_ids(self.tokenizer, text)

    def decode(self, ids: Sequence[int], /) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def begin_ids(self) -> list[int]:
        """The ids that the tokenizer puts before every text by default: none, or a begin-of-text."""
        bos_id = bos_id_of(self.tokenizer, AUTO)
        return [] if bos_id is None else [bos_id]


def run_probes(paths: Iterable[Path], file: str | None, all_checkpoints: bool, dtype: str, batch: int) -> ProbeResults:
    """Evaluate the models one after the other, one in memory at a time. Results of a run are stored in its folder."""
    paths = [expanded(path) for path in paths]
    models = [_models(path, all_checkpoints) for path in paths]
    file = file or next(filter(None, map(_configured_file, paths)), DEFAULT_FILE)
    file = str(full_path(file)) if expanded(file).is_file() else file
    probes = load_probes(file)
    # Created before the first model is loaded, so that a conflict with stored results is reported at once.
    stored = [StoredAnswers(path, file, probes) if _is_run(path) and all_checkpoints else None for path in paths]
    found: list[list[ModelAnswers]] = []
    for path, checkpoints, storage in zip(paths, models, stored, strict=True):
        series = []
        for checkpoint in checkpoints:
            try:
                loaded = load_model(checkpoint, dtype)
            except CheckpointError as error:
                if len(checkpoints) == 1:
                    raise
                say(f"skipped: {error.what}: {error.rule}")
                continue
            series.append(ask_model(loaded, probes, batch))
            del loaded  # before the next is loaded
        if not series:
            raise CheckpointError(f"run folder {path}", "none of its checkpoints can be read", "Check them.")
        found.append(series)
        if storage:
            storage.write(series)
    return ProbeResults(file, probes, found)


def ask_model(loaded: LoadedModel, probes: Sequence[Probe], batch: int) -> ModelAnswers:
    """Return the answers of one model; `batch` texts are processed at a time.

    Probes that are too long for the model are left out; raise if all are.
    """
    tokenizer = PlainTokenizer(loaded.tokenizer)
    encoded = encode_probes(probes, tokenizer, tokenizer.begin_ids, sys.maxsize)
    too_long = {one.probe.name: one.num_tokens for one in encoded if one.num_tokens > loaded.max_tokens}
    kept = [probe for probe in probes if probe.name not in too_long]
    encoded = encode_probes(kept or probes, tokenizer, tokenizer.begin_ids, loaded.max_tokens)
    windows = [
        Window(row.ids, [position >= row.first_scored for position in range(len(row.ids))])
        for one in encoded
        for row in one.rows
    ]
    answers: dict[str, ProbeAnswer] = {}
    with progress(f"probes of {loaded.label}", len(encoded), "probes") as advance:
        losses = dict(score(loaded, windows, batch))
        log_probabilities = ((-losses[number]).tolist() for number in range(len(windows)))
        for one in encoded:
            reading = read_value(one, [next(log_probabilities) for _ in one.rows])
            details: dict[str, Any] = dict(reading.details)
            if isinstance(one.probe, FormatProbe) and one.probe.asks_for_text:
                details["answer"] = _greedy_answer(loaded, tokenizer, one.probe)
                details["form_kept"] = has_form(one.probe, details["answer"])
            passed = _passed(one.probe, reading.value, loaded.step, details.get("form_kept"))
            answers[one.probe.name] = ProbeAnswer(reading.value, passed, details)
            advance(1)
    return ModelAnswers(loaded.label, loaded.step, answers, too_long)


def has_form(probe: FormatProbe, answer: str) -> bool:
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


def _greedy_answer(loaded: LoadedModel, tokenizer: PlainTokenizer, probe: FormatProbe) -> str:
    import torch

    ids = [*tokenizer.begin_ids, *tokenizer.encode(probe.prompt)]
    room = min(probe.new_tokens, loaded.max_tokens - len(ids))
    input_ids = torch.tensor([ids], device=loaded.device)
    mask = torch.ones_like(input_ids)
    made = loaded.model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=room, do_sample=False)
    text: str = loaded.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)
    return text


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() and not (path / "config.json").is_file()


def _models(path: Path, all_checkpoints: bool) -> list[Path]:
    """Return all checkpoints of a run folder if requested; else the path itself, as `load_model` opens the newest."""
    if not all_checkpoints or not _is_run(path):
        return [path]
    checkpoints = step_folders(RunFolder(path).checkpoints)
    if not checkpoints:
        raise DataError(f"run folder {path}", "has no checkpoint yet", "Train it for longer first.")
    return checkpoints


def _configured_file(path: Path) -> str:
    """Return the probe file in the config of this run folder or checkpoint; '' if there is none."""
    root = full_path(path).parent.parent if is_step_name(full_path(path).name) else path
    config = RunFolder(root).config
    return load_run_config(str(config)).probes.file if config.is_file() else ""
