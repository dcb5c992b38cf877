"""Keeps task folders from running code: a task is data unless the user says otherwise.

A YAML of lm-evaluation-harness can name Python functions (`!function`), a program as its metric (a file, or one that
the `evaluate` library downloads), data whose loading runs code, and Jinja templates, which reach any Python object.
Templates always run in Jinja's sandbox. Code next to a YAML runs only with `--allow-task-code`; code of the installed
harness itself is trusted, but not the code of tokenizers that a task names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, DataError

FIX = "Read that code; if you trust it, add --allow-task-code."
UNSAFE_FORMATS = ("pandas", "sql")
"""Formats of the `datasets` library: pickles (in older versions), and statements to any database."""


@contextmanager
def contained(allow_code: bool = False) -> Iterator[None]:
    """Apply the rules to tasks that are loaded or evaluated in the block."""
    import datasets
    import jinja2
    import lm_eval.api.task
    import lm_eval.tasks
    import yaml
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils
    from lm_eval.tasks import _yaml_loader
    from transformers import AutoTokenizer

    own_folder = Path(lm_eval.tasks.__file__).resolve().parent
    import_function, find_metric = _yaml_loader._import_func_in_yml, lm_eval.api.task.get_metric
    load_data, load_tokenizer = datasets.load_dataset, AutoTokenizer.from_pretrained

    def ask(what: str, folder: Path) -> None:
        if not allow_code:
            raise ConfigError(f"{folder}", f"a task there runs code: {what}", FIX)
        say(f"warning: running code of {folder}: {what}")

    def checked_function(name: str, folder: Path) -> Any:
        if not folder.resolve().is_relative_to(own_folder):
            ask(f"!function {name}", folder)
        return import_function(name, folder)

    def checked_metric(name: str, *arguments: Any, **options: Any) -> Any:
        # The `evaluate` library runs a file, or OWNER/NAME of anyone. A plain name is one of its authors' own metrics.
        if "/" in name or Path(name).exists():
            ask(f"metric {name}", Path(name).absolute().parent)
        return find_metric(name, *arguments, **options)

    def checked_data(path: str, *arguments: Any, **options: Any) -> Any:
        place = Path(path)
        if path in UNSAFE_FORMATS or place.suffix == ".py" or (place / f"{place.name}.py").exists():
            ask(f"data {path}", place.absolute().parent)
        if "trust_remote_code" in options:
            options["trust_remote_code"] = options["trust_remote_code"] and allow_code
        return load_data(path, *arguments, **options)

    def checked_tokenizer(path: str, *arguments: Any, **options: Any) -> Any:
        # Tasks of the harness (RULER) trust the code of any tokenizer, which another task that includes them can name.
        options["trust_remote_code"] = options.get("trust_remote_code", False) and allow_code
        return load_tokenizer(path, *arguments, **options)

    templates = SandboxedEnvironment(
        loader=utils.env.loader, undefined=utils.env.undefined, keep_trailing_newline=utils.env.keep_trailing_newline
    )
    templates.filters.update(utils.env.filters)
    with (
        patch.object(_yaml_loader, "_import_func_in_yml", checked_function),
        # Without libyaml, and for files of prompts, the harness would make objects of any module (!!python/name).
        patch.object(_yaml_loader, "_Base", getattr(yaml, "CSafeLoader", yaml.SafeLoader)),
        patch.object(yaml, "full_load", yaml.safe_load),
        patch.object(lm_eval.api.task, "get_metric", checked_metric),
        patch.object(datasets, "load_dataset", checked_data),
        patch.object(AutoTokenizer, "from_pretrained", checked_tokenizer),
        patch.object(utils, "env", templates),
    ):
        try:
            yield
        except jinja2.TemplateError as error:  # also what the sandbox refuses
            rule = f"a template cannot be filled in ({error})"
            raise DataError("tasks", rule, "Correct the template in the task's YAML.") from error
