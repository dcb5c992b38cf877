"""`z2all evaluate harness`: benchmarks with lm-evaluation-harness on any supported model, plain and reshaped.

Tasks are loaded first, so that a wrong name fails before the weights are loaded; then one run of the harness does the
plain tasks and their reshaped copies together, and the scores are compared question by question.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from z2all_ds import __version__
from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import Shown
from z2all_ds.evaluate.harness_layouts import parse_fields
from z2all_ds.evaluate.harness_report import (
    ALL_TASKS,
    ScoreRow,
    compare,
    mean_and_error,
    row_content,
    score_table,
    sentences,
)
from z2all_ds.evaluate.harness_tasks import load_tasks, quiet, require_harness
from z2all_ds.evaluate.harness_variants import Variants, make_variants
from z2all_ds.evaluate.loading import LoadedModel, load_model
from z2all_ds.evaluate.reshaping import RESHAPINGS

BOOTSTRAPS = 1000
"""For standard errors of metrics without a formula; the harness's default of 100,000 takes minutes on some."""
Keep = Callable[[dict[str, Any]], None]
"""Receives the plain scores as soon as they exist, so that a later error does not lose the run."""


def _keep_nothing(scores: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class HarnessSettings:
    """The options of the command line."""

    tasks: tuple[str, ...]
    include: str | None = None
    shots: int | None = None
    limit: int | None = None
    batch: int = 8
    reshape: tuple[str, ...] = ()
    shuffles: int = 3
    seed: int = 1234
    chat: bool = False
    fields: str | None = None
    others_wrong_text: str | None = None

    def __post_init__(self) -> None:
        at_least = {"shots": (self.shots, 0), "limit": (self.limit, 1), "batch": (self.batch, 1)}
        for name, (value, least) in {**at_least, "shuffles": (self.shuffles, 1)}.items():
            if value is not None and value < least:
                raise ConfigError(f"--{name} {value}", f"must be at least {least}", "Use a larger number.")
        parse_fields(self.fields)


@dataclass(frozen=True)
class HarnessReport:
    """Rows of the table, reasons for empty cells, and further data for the JSON."""

    rows: list[ScoreRow]
    notes: list[str]
    settings: HarnessSettings
    about: dict[str, Any]

    def content(self) -> dict[str, Any]:
        """Returns everything, for JSON."""
        told = {"rows": [row_content(row) for row in self.rows], "notes": self.notes, "verdicts": sentences(self.rows)}
        return {**self.about, "settings": asdict(self.settings), **told}


def describe(report: HarnessReport) -> Shown:
    """Yields the table of scores, notes, and verdicts in words."""
    yield score_table(report.rows, report.settings.reshape)
    yield from (*report.notes, *sentences(report.rows))


def parse_reshapings(text: str) -> tuple[str, ...]:
    """Parse `all`, `none`, or comma-separated names."""
    if text in ("all", "none", ""):
        return RESHAPINGS if text == "all" else ()
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in RESHAPINGS:
            raise ConfigError(
                f"--reshape {name}", "there is no such reshaping", f"Known: {', '.join(RESHAPINGS)}, all."
            )
    return names


def run_harness(
    model: str | Path, settings: HarnessSettings, dtype: str = "auto", keep: Keep = _keep_nothing
) -> HarnessReport:
    """Load tasks and model, and evaluate."""
    with heartbeat("loading lm-evaluation-harness"):
        require_harness()
        with quiet():
            loaded = load_tasks(list(settings.tasks), Path(settings.include) if settings.include else None)
    with quiet():
        ready = load_model(model, dtype)
    return judge(ready, loaded, settings, keep)


def judge(
    model: LoadedModel, loaded: Mapping[str, Any], settings: HarnessSettings, keep: Keep = _keep_nothing
) -> HarnessReport:
    """Evaluate a model on tasks that `load_tasks` has loaded, and on their reshaped copies."""
    if settings.chat and not model.tokenizer.chat_template:
        raise ConfigError("--chat", f"the tokenizer of {model.label} has no chat template", "Omit --chat.")
    notes: list[str] = []
    with quiet():
        for name, task in loaded["tasks"].items():
            notes += _set_shots(name, task, settings.shots)
        variants = {name: _variants(task, settings) for name, task in loaded["tasks"].items()}
        results = _run(model, loaded, variants, settings)
    keep({"model": model.label, "settings": asdict(settings), "scores": results["results"]})
    for name, made in variants.items():
        notes += [f"{name}: no {kinds} ({reason})" for reason, kinds in _by_reason(made.reasons).items()]
        notes += [
            f"{name}: {left} of {len(made.tasks[kind][0].eval_docs)} questions cannot be reshaped by {kind}: "
            "they are asked unchanged"
            for kind, left in made.left.items()
            if left
        ]
    rows = _rows(results, loaded, variants)
    versions = {name: version(name) for name in ("lm_eval", "datasets", "transformers", "torch")}
    about = {
        "model": model.label,
        "step": model.step,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "time_unix": time.time(),
        "versions": {"z2all_ds": __version__, **versions},
        "task_versions": {name: results["versions"].get(name) for name in loaded["tasks"]},
        "shots": {name: results["n-shot"].get(name) for name in loaded["tasks"]},
        "higher_is_better": {name: results["higher_is_better"].get(name) for name in loaded["tasks"]},
    }
    return HarnessReport(rows, notes, settings, about)


def _by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return reason -> the reshapings unavailable for that reason, comma-separated."""
    return {reason: ", ".join(name for name, why in reasons.items() if why == reason) for reason in reasons.values()}


def _set_shots(name: str, task: Any, shots: int | None) -> list[str]:
    """Set the number of shots as the harness does: a task that sets 0 itself keeps it."""
    own = task.get_config("num_fewshot")
    if shots is not None and own == 0 and shots > 0:
        return [f"{name}: no examples before the question, as the task sets 0 itself (--shots {shots} is ignored)"]
    task.set_config(key="num_fewshot", value=(own or 0) if shots is None else shots)
    return []


def _variants(task: Any, settings: HarnessSettings) -> Variants:
    fields = parse_fields(settings.fields)
    wanted, wording = settings.reshape, settings.others_wrong_text
    return make_variants(task, wanted, settings.seed, settings.shuffles, fields, wording, settings.limit)


def _run(
    model: LoadedModel, loaded: Mapping[str, Any], variants: Mapping[str, Variants], settings: HarnessSettings
) -> dict[str, Any]:
    import torch
    from lm_eval.evaluator import evaluate

    from z2all_ds.evaluate.harness_model import HarnessModel

    tasks = dict(loaded["tasks"])
    for made in variants.values():
        tasks.update({task.config.task: task for copies in made.tasks.values() for task in copies})
    for task in tasks.values():
        task.set_fewshot_seed(seed=settings.seed)
    torch.manual_seed(settings.seed)
    with ExitStack() as until_first:
        until_first.enter_context(heartbeat("writing prompts"))
        language_model = HarnessModel(
            model.model, model.tokenizer, model.device, settings.batch, before_first=until_first.close
        )
        results: dict[str, Any] = evaluate(
            lm=language_model,
            task_dict={"tasks": tasks, "groups": loaded["groups"], "group_map": loaded["group_map"]},
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=True,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
        )
    language_model.say_what_was_cut()
    return results


# Conversion of the harness's results to rows


def _rows(results: Mapping[str, Any], loaded: Mapping[str, Any], variants: Mapping[str, Variants]) -> list[ScoreRow]:
    rows, pooled = [], dict[str, list[tuple[str, ScoreRow]]]()
    for name in loaded["tasks"]:
        for row in _rows_of(name, results, variants[name], loaded["tasks"][name]):
            rows.append(row)
            if row.drops:
                pooled.setdefault(row.metric, []).append((name, row))
    rows += [_pooled(metric, results, variants, members) for metric, members in pooled.items() if len(members) > 1]
    for name in loaded["groups"]:
        rows += _rows_of(name, results, Variants())
    return rows


def _rows_of(name: str, results: Mapping[str, Any], variants: Variants, task: Any = None) -> list[ScoreRow]:
    """Return one row per metric of a task, or of a group (then without `task`)."""
    scores = results["results"].get(name, {})
    rows = []
    for key, score in scores.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(score, int | float):
            continue
        error = scores.get(f"{metric}_stderr,{filtered}")
        plain = _by_question(results, name, key)
        drops = {}
        if plain and abs(sum(plain) / len(plain) - score) < 1e-9:  # a mean over questions can be compared by question
            drops = {
                reshaping: compare(plain, [_by_question(results, copy.config.task, key) for copy in copies])
                for reshaping, copies in variants.tasks.items()
            }
        shown = metric if filtered == "none" else f"{metric} ({filtered})"
        count = len(plain) or scores.get("sample_len", 0)
        is_choice = task and task.OUTPUT_TYPE == "multiple_choice" and metric.startswith("acc")
        chance = _chance(results["samples"][name]) if is_choice else None
        rows.append(ScoreRow(name, shown, count, score, error if isinstance(error, float) else None, chance, drops))
    return rows


def _pooled(
    metric: str, results: Mapping[str, Any], variants: Mapping[str, Variants], members: Sequence[tuple[str, ScoreRow]]
) -> ScoreRow:
    """Pool all questions of the reshaped tasks; a reshaping is included if every task has it."""
    key = metric if "(" in metric else f"{metric},none"
    key = key.replace(" (", ",").rstrip(")")
    plain = [score for name, _ in members for score in _by_question(results, name, key)]
    score, error = mean_and_error(plain)
    drops = {}
    for reshaping in members[0][1].drops:
        if all(reshaping in row.drops for _, row in members):
            copies = zip(*(variants[name].tasks[reshaping] for name, _ in members), strict=True)
            reshaped = [[s for one in ones for s in _by_question(results, one.config.task, key)] for ones in copies]
            drops[reshaping] = compare(plain, reshaped)
    chances = [row.chance * row.questions for _, row in members if row.chance is not None]
    chance = sum(chances) / len(plain) if len(chances) == len(members) else None
    return ScoreRow(ALL_TASKS, metric, len(plain), score, error, chance, drops)


def _chance(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the accuracy of guessing; None if there is nothing to choose from."""
    counts = [len({arguments[-1] for arguments in one["arguments"]}) for one in samples]
    return sum(1 / count for count in counts) / len(counts) if min(counts) > 1 else None


def _by_question(results: Mapping[str, Any], name: str, key: str) -> list[float]:
    """Return the metric of every question in order; empty if it is not a number per question."""
    metric, _, filtered = key.partition(",")
    samples = [one for one in results["samples"].get(name, ()) if one["filter"] == filtered]
    values = [one.get(metric) for one in sorted(samples, key=lambda one: int(one["doc_id"]))]
    if not all(isinstance(value, int | float) for value in values):
        return []
    return [float(value) for value in values if value is not None]
