"""Loads tasks of lm-evaluation-harness without network: your own YAMLs, or the harness's names with local data.

The Hugging Face hub is never contacted. In your own YAML, `data_files` (and a folder as `dataset_path` or `data_dir`)
are relative to the YAML's folder, so that tasks and data can be moved together. Only `evaluate harness` loads this.
"""

import difflib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.evaluate.harness.task_code import contained

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")
NOISY = ("lm_eval", "datasets", "huggingface_hub", "filelock", "fsspec")


def require_harness() -> None:
    """Raise an error if the extra is not installed; set the process offline from here on."""
    for name in OFFLINE:
        os.environ[name] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import datasets
        import huggingface_hub.constants
        import lm_eval.tasks._factory  # noqa: F401 - missing in older versions
    except ImportError as error:
        raise MachineError(
            f"lm-evaluation-harness ({error})", "is not installed, or too old", "Run pip install 'z2all_ds[eval]'."
        ) from error
    # All read the environment when imported, which may have happened before.
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    if loaded := sys.modules.get("evaluate.config"):
        loaded.HF_EVALUATE_OFFLINE = True  # type: ignore[attr-defined]


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the harness's log lines and bars: progress is shown by this package."""
    import datasets
    import lm_eval.api.task as task_file

    levels = {name: logging.getLogger(name).level for name in NOISY}
    bars, has_bars = task_file.tqdm, not datasets.are_progress_bars_disabled()
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    task_file.tqdm = partial(bars, disable=True)
    try:
        yield
    finally:
        task_file.tqdm = bars
        if has_bars:
            datasets.enable_progress_bars()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@dataclass(frozen=True)
class ListedTask:
    """A task or group found under --include."""

    name: str
    kind: str
    file: str


def list_tasks(include: Path) -> list[ListedTask]:
    """Return all tasks, groups and tags of the YAML files under `include`."""
    index = task_manager(include, with_defaults=False).task_index
    return [
        ListedTask(name, entry.kind.name.lower(), str(entry.yaml_path or "")) for name, entry in sorted(index.items())
    ]


def load_tasks(names: list[str], include: Path | None, allow_code: bool = False) -> dict[str, Any]:
    """Return `{"tasks": {name: task}, "groups": {name: group}, ...}` of the harness. Names may contain * and ?."""
    if not names:
        raise ConfigError("--tasks", "names no task", "Set comma-separated names, or use --list to see them.")
    manager = task_manager(include, with_defaults=False)
    if any(not manager.match_tasks([name]) for name in names):
        manager = task_manager(include, with_defaults=True)  # about 10,000 files, which takes seconds
    wanted = matching(names, manager)
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    with contained(allow_code):
        for name in wanted:
            for kind, members in _load(manager, name).items():
                loaded[kind].update(members)
    for name, task in loaded["tasks"].items():
        _refuse_unsupported(name, task)
    return loaded


def matching(names: list[str], manager: Any) -> list[str]:
    """Return the matching tasks, groups and tags without duplicates."""
    wanted: list[str] = []
    for name in names:
        found = manager.match_tasks([name])
        if not found:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            known = f"similar: {', '.join(near)}" if near else "list those of a folder with --include DIR --list"
            raise ConfigError(f"--tasks {name}", f"there is no such task ({known})", "Fix the name.")
        wanted += [one for one in found if one not in wanted]
    return wanted


def task_manager(include: Path | None, with_defaults: bool) -> Any:
    """Return the harness's index of the YAML files under `include` and, `with_defaults`, of its own."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._factory import TaskFactory

    if include is not None and not include.is_dir():
        raise ConfigError(f"--include {include}", "is not a folder", "Use a folder with the tasks' YAML files.")
    for file in include.rglob("*.yaml") if include is not None else ():
        if not file.is_file() and not file.is_dir():  # the harness would wait for a FIFO, and never end with a device
            raise ConfigError(f"{file}", "is not a regular file", "Remove it.")

    class LocalDataFactory(TaskFactory):
        def _load_full_config(self, entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
            config: dict[str, Any] = super()._load_full_config(entry, overrides)
            if include is not None and entry.yaml_path:
                resolve_data_paths(config, Path(entry.yaml_path).resolve().parent)
            return config

    with explain_content(DataError, f"--include {include}", "a YAML in it is not valid", "Correct it."):
        manager = TaskManager(include_path=None if include is None else str(include), include_defaults=with_defaults)
    manager._factory = LocalDataFactory()
    return manager


def resolve_data_paths(config: dict[str, Any], folder: Path) -> None:
    """Make relative data paths that exist next to the YAML absolute; others are not changed."""

    def absolute(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: absolute(one) for key, one in value.items()}
        if isinstance(value, list):
            return [absolute(one) for one in value]
        if isinstance(value, str) and not os.path.isabs(value) and any(folder.glob(value)):
            return str(folder / value)
        return value

    kwargs = config.get("dataset_kwargs") or {}
    for key in ("data_files", "data_dir"):
        if kwargs.get(key):
            kwargs[key] = absolute(kwargs[key])
    path = config.get("dataset_path")
    if isinstance(path, str) and path.startswith(".") and (folder / path).is_dir():
        config["dataset_path"] = str(folder / path)


def _load(manager: Any, name: str) -> Any:
    import jinja2
    import yaml
    from datasets.exceptions import DatasetsError

    entry = manager.task_index[name]
    wrong_yaml = (jinja2.TemplateError, yaml.YAMLError, LookupError, TypeError, AttributeError, SyntaxError, ValueError)
    try:
        return manager.load([name])
    except (OSError, DatasetsError, *wrong_yaml) as error:
        line = str(error).strip().partition("\n")[0]
        if _is_missing_from_cache(error):
            source = (entry.cfg or {}).get("dataset_path") or "..."
            raise DataError(
                f"task {name}",
                f"its data {source} are not on this machine, and the hub is not contacted ({line})",
                f"Download them with network access (datasets.load_dataset('{source}', ...)) and copy the cache here, "
                "or write a YAML with local data_files and use --include.",
            ) from error
        reason = f"{type(error).__name__}: {line}"
        raise DataError(f"task {name}", f"does not load ({reason})", f"Check {entry.yaml_path}.") from error


def _is_missing_from_cache(error: BaseException) -> bool:
    """Return whether data missing from the hub's cache are the cause, anywhere in the chain of causes."""
    seen: BaseException | None = error
    while seen is not None:
        text = f"{type(seen).__name__} {seen}"
        if isinstance(seen, ConnectionError) or "ffline" in text or "the Hub" in text or "find cache" in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _refuse_unsupported(name: str, task: Any) -> None:
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"--tasks {name}", "needs images or sound, but the model reads only text", "Omit it.")
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(
            f"--tasks {name}", "executes programs written by the model, which is not supported", "Use lm_eval itself."
        )
