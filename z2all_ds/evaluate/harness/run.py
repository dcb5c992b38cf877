"""`z2all evaluate harness`: benchmarks with lm-evaluation-harness on any supported model, plain and reshaped.

Tasks are loaded first, so that a wrong name fails before the weights are loaded; then one run of the harness does the
plain tasks and their reshaped copies together, and the scores are compared question by question.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from z2all_ds import __version__
from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import Shown
from z2all_ds.evaluate.harness.report import ScoreRow, compare, mean_and_error, score_table, verdicts
from z2all_ds.evaluate.harness.settings import HarnessSettings
from z2all_ds.evaluate.harness.task_code import contained
from z2all_ds.evaluate.harness.tasks import load_tasks, quiet, require_harness
from z2all_ds.evaluate.harness.variants import Variants, make_variants
from z2all_ds.evaluate.loading import LoadedModel, load_model

BOOTSTRAPS = 1000
"""For standard errors of metrics without a formula; the harness's default of 100,000 takes minutes on some."""
ALL_TASKS = "all"
Results = Mapping[str, Any]
"""As returned by the harness."""
Keep = Callable[[dict[str, Any]], None]
"""Receives the plain scores as soon as they exist, so that a later error does not lose the run."""


@dataclass(frozen=True)
class HarnessReport:
    """Rows of the table, reasons for empty cells, and further data for the JSON."""

    rows: list[ScoreRow]
    notes: list[str]
    settings: HarnessSettings
    about: dict[str, Any]

    def content(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        found = {"rows": self.rows, "notes": self.notes, "verdicts": verdicts(self.rows)}
        return {**self.about, "settings": self.settings, **found}


def describe(report: HarnessReport) -> Shown:
    """Yield the table of scores, notes, and verdicts."""
    yield score_table(report.rows, report.settings.reshape)
    yield from (*report.notes, *verdicts(report.rows))


def run_harness(
    model: str | Path, settings: HarnessSettings, dtype: str = "auto", keep: Keep | None = None
) -> HarnessReport:
    """Load tasks and model, and evaluate."""
    with heartbeat("loading lm-evaluation-harness"):
        require_harness()
        with quiet():
            include = Path(settings.include) if settings.include else None
            loaded = load_tasks(list(settings.tasks), include, settings.allow_task_code)
    with quiet():
        ready = load_model(model, dtype)
    return evaluate_tasks(ready, loaded, settings, keep)


def evaluate_tasks(
    model: LoadedModel, loaded: Mapping[str, Any], settings: HarnessSettings, keep: Keep | None = None
) -> HarnessReport:
    """Evaluate a model on tasks that `load_tasks` has loaded, and on their reshaped copies."""
    if settings.chat and not model.tokenizer.chat_template:
        raise ConfigError("--chat", f"the tokenizer of {model.label} has no chat template", "Omit --chat.")
    notes: list[str] = []
    with quiet(), contained(settings.allow_task_code):
        for name, task in loaded["tasks"].items():
            notes += _set_shots(name, task, settings.shots)
        variants = {name: make_variants(task, settings) for name, task in loaded["tasks"].items()}
        results = _run(model, loaded, variants, settings)
    if keep:
        keep({"model": model.label, "settings": settings, "scores": results["results"]})
    for name, made in variants.items():
        for reason in dict.fromkeys(made.reasons.values()):
            missing = ", ".join(reshaping for reshaping, why in made.reasons.items() if why == reason)
            notes.append(f"{name}: no {missing} ({reason})")
        for reshaping, count in made.unchanged.items():
            if count:
                questions = f"{count} of {len(made.tasks[reshaping][0].eval_docs)} questions"
                notes.append(f"{name}: {questions} cannot be reshaped by {reshaping}: they are asked unchanged")
    versions = {name: version(name) for name in ("lm_eval", "datasets", "transformers", "torch")}
    about = {
        "model": model.label,
        "step": model.step,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "time_unix": time.time(),
        "versions": {"z2all_ds": __version__, **versions},
    }
    for key, source in (("task_versions", "versions"), ("shots", "n-shot"), ("higher_is_better", "higher_is_better")):
        about[key] = {name: results[source].get(name) for name in loaded["tasks"]}
    return HarnessReport(_rows(results, loaded, variants), notes, settings, about)


def _set_shots(name: str, task: Any, shots: int | None) -> list[str]:
    """Set the number of shots as the harness does: a task that sets 0 itself keeps it. Return a note if so."""
    own = task.get_config("num_fewshot")
    if shots is not None and own == 0 and shots > 0:
        return [f"{name}: no examples before the question, as the task sets 0 itself (--shots {shots} is ignored)"]
    task.set_config(key="num_fewshot", value=(own or 0) if shots is None else shots)
    return []


def _run(
    model: LoadedModel, loaded: Mapping[str, Any], variants: Mapping[str, Variants], settings: HarnessSettings
) -> Results:
    import torch
    from lm_eval.evaluator import evaluate

    from z2all_ds.evaluate.harness.model import HarnessModel

    tasks = dict(loaded["tasks"])
    for made in variants.values():
        tasks.update({task.config.task: task for copies in made.tasks.values() for task in copies})
    for task in tasks.values():
        task.set_fewshot_seed(seed=settings.seed)
    torch.manual_seed(settings.seed)
    with ExitStack() as until_first:
        until_first.enter_context(heartbeat("writing prompts"))
        language_model = HarnessModel(model, settings.batch, before_first=until_first.close)
        results: Results = evaluate(
            lm=language_model,
            task_dict={"tasks": tasks, "groups": loaded["groups"], "group_map": loaded["group_map"]},
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=True,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
        )
    language_model.report_cut_prompts()
    return results


# Conversion of the harness's results to rows


def _rows(results: Results, loaded: Mapping[str, Any], variants: Mapping[str, Variants]) -> list[ScoreRow]:
    """Return one row per metric of each task, of all reshaped tasks together, and of each group."""
    rows, pooled = [], dict[str, dict[str, ScoreRow]]()
    for name, task in loaded["tasks"].items():
        for key, row in _task_rows(name, results, variants[name], task).items():
            rows.append(row)
            if row.reshaped:
                pooled.setdefault(key, {})[name] = row
    rows += [_pooled_row(key, results, variants, members) for key, members in pooled.items() if len(members) > 1]
    for name in loaded["groups"]:
        rows += _task_rows(name, results, Variants()).values()
    return rows


def _task_rows(name: str, results: Results, variants: Variants, task: Any = None) -> dict[str, ScoreRow]:
    """Return one row per metric (by the harness's key) of a task, or of a group (then without `task`)."""
    scores = results["results"].get(name, {})
    rows = {}
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
        rows[key] = ScoreRow(name, shown, count, score, error if isinstance(error, float) else None, chance, drops)
    return rows


def _pooled_row(
    key: str, results: Results, variants: Mapping[str, Variants], members: Mapping[str, ScoreRow]
) -> ScoreRow:
    """Pools all questions of the reshaped tasks; a reshaping is included if every task has it."""
    rows = list(members.values())
    plain = [score for name in members for score in _by_question(results, name, key)]
    score, error = mean_and_error(plain)
    drops = {}
    for reshaping in rows[0].reshaped:
        if all(reshaping in row.reshaped for row in rows):
            copies = zip(*(variants[name].tasks[reshaping] for name in members), strict=True)
            reshaped = [[s for one in ones for s in _by_question(results, one.config.task, key)] for ones in copies]
            drops[reshaping] = compare(plain, reshaped)
    chances = [row.chance * row.questions for row in rows if row.chance is not None]
    chance = sum(chances) / len(plain) if len(chances) == len(rows) else None
    return ScoreRow(ALL_TASKS, rows[0].metric, len(plain), score, error, chance, drops)


def _chance(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the accuracy of guessing; None if there is nothing to choose from."""
    counts = [len({arguments[-1] for arguments in one["arguments"]}) for one in samples]
    return sum(1 / count for count in counts) / len(counts) if min(counts) > 1 else None


def _by_question(results: Results, name: str, key: str) -> list[float]:
    """Return the metric of every question in order; empty if it is not a number per question."""
    metric, _, filtered = key.partition(",")
    samples = [one for one in results["samples"].get(name, ()) if one["filter"] == filtered]
    values = [one.get(metric) for one in sorted(samples, key=lambda one: int(one["doc_id"]))]
    return [float(value) for value in values] if all(isinstance(value, int | float) for value in values) else []
