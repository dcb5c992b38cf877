"""The run config: one YAML file plus dotted overrides; precedence: defaults < preset < file < command line.

This module only reads the files it is given; it uses no network or torch. DeepSpeed keys are set only in
ds_configs/*.json; `deepspeed:` below selects one of these files.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator

from z2all_ds.base.config.section_errors import first_problem
from z2all_ds.base.config.sections import (
    CheckpointSection,
    DataSection,
    ExportSection,
    GuardSection,
    ModelSection,
    OpsSection,
    OptimizerSection,
    ProbesSection,
    ScheduleSection,
    Section,
    StageSection,
    TrackSection,
    TrainSection,
    ValidationSection,
)
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.paths import expanded, refuse_passwords
from z2all_ds.base.resources import find_named_file
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.base.vocabulary_rows import AUTO, automatic_size
from z2all_ds.base.yaml_text import BadYaml, load_yaml

MIN_DEFAULT_LANES = 64
_VOCABULARY = ("model", "data", "train")
"""Sections that `model.vocab_size: auto` is computed from."""
WHOLE_VALUES = ("weights", "rope_scaling")
"""Settings of type dict that are one value each: a later layer replaces them completely."""


class RunConfig(Section):
    """All settings of a run."""

    preset: str | None = None
    """Name of a shipped preset (z2all_tiny, z2all_120m, z2all_1b, z2all_7b) or path to one; the lowest layer."""
    run_dir: str = "runs/default"
    """Folder for all output of the run."""
    deepspeed: str = "zero2"
    """Name of a shipped DeepSpeed JSON (zero0, zero1, zero2, zero3, ...) or path to your own."""
    model: ModelSection = ModelSection()
    """The model's shape."""
    ops: OpsSection = OpsSection()
    """Implementations of the ops."""
    data: DataSection = DataSection()
    """Corpus, tokenizer, mixture."""
    train: TrainSection = TrainSection()
    """Steps, batch, precision."""
    stages: tuple[StageSection, ...] = ()
    """Consecutive stages, e.g. pretrain, long context, anneal; empty: the whole run is one stage."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer."""
    schedule: ScheduleSection = ScheduleSection()
    """Learning rate."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints."""
    export: ExportSection = ExportSection()
    """Exports during training."""
    validation: ValidationSection = ValidationSection()
    """Validation on held-out text."""
    probes: ProbesSection = ProbesSection()
    """Test questions during training."""
    guard: GuardSection = GuardSection()
    """Handling of bad steps."""
    track: TrackSection = TrackSection()
    """Metric sinks."""

    @model_validator(mode="after")
    def _sections_fit(self) -> "RunConfig":
        if self.train.global_batch % self.train.micro_batch:
            raise ValueError(
                f"train.global_batch={self.train.global_batch} must be a multiple of"
                f" train.micro_batch={self.train.micro_batch}"
            )
        lengths = {f"stages.{number}.sequence_length": s.sequence_length for number, s in enumerate(self.stages)}
        for name, length in {"train.sequence_length": self.train.sequence_length, **lengths}.items():
            if length is not None and length > self.model.max_position_embeddings:
                raise ValueError(
                    f"{name}={length} must not exceed"
                    f" model.max_position_embeddings={self.model.max_position_embeddings}"
                )
        if self.export.every_steps % self.checkpoint.every_steps:
            raise ValueError(
                f"export.every_steps={self.export.every_steps} must be a multiple of"
                f" checkpoint.every_steps={self.checkpoint.every_steps}"
            )
        for first, end in self.data.skip_samples:
            if not 0 <= first < end:
                raise ValueError(f"data.skip_samples: [{first}, {end}] must be ascending and not negative")
        if self.checkpoint.keep_best and not self.validation.corpus:
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} must have a validation.corpus to rank checkpoints"
            )
        return self

    @property
    def writes_checkpoints(self) -> bool:
        """Return whether the run saves a checkpoint to disk, on the way or at its end."""
        return self.checkpoint.at_end or self.checkpoint.every_steps <= self.train.last_step

    @property
    def num_lanes(self) -> int:
        """Return the setting or its default. Few lanes could all be in long documents of one domain for many steps."""
        global_batch = self.train.global_batch
        return self.data.num_lanes or -(-MIN_DEFAULT_LANES // global_batch) * global_batch


def load_run_config(path: str | None = None, overrides: list[str] | None = None) -> RunConfig:
    """Read all layers, merge them and validate the result. Every RunConfig is created here."""
    from_file: dict[str, Any] = _read_yaml(find_named_file(path, "run config", "presets", ".yaml")) if path else {}
    from_line: dict[str, Any] = {}
    for override in overrides or []:
        _set_dotted(from_line, override)
    preset_name = from_line.get("preset", from_file.get("preset"))
    layers = [from_file, from_line]
    if preset_name:
        layers.insert(0, _read_yaml(find_named_file(str(preset_name), "preset", "presets", ".yaml")))
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge_nested(merged, layer)
    _fill_in_vocabulary(merged)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise _config_error(error) from None


def _fill_in_vocabulary(merged: dict[str, Any]) -> None:
    """Replace `model.vocab_size: auto` by its number."""
    model, data, train = (section if isinstance(section := merged.get(name), dict) else {} for name in _VOCABULARY)
    if model.get("vocab_size") == AUTO:
        size = automatic_size(str(data.get("tokenizer") or ""), str(train.get("init_from") or ""))
        merged["model"] = {**model, "vocab_size": size}


def anchored(config: RunConfig) -> RunConfig:
    """Return the config with absolute paths, so that the written file is valid from any working directory. Refuse what
    must not be written."""
    refuse_passwords(config.model_dump(mode="json"))
    if "://" in config.run_dir:
        rule = "a run writes to a folder of this machine, not to a URL"
        raise ConfigError(f"run_dir={config.run_dir}", rule, "Give a path.")

    def absolute(path: str) -> str:
        return str(expanded(path).absolute()) if path and "://" not in path else path

    def named(file: str) -> str:
        """Make an existing file's path absolute; anything else is the name of a shipped file."""
        return absolute(file) if file and expanded(file).is_file() else file

    data = config.data.model_copy(
        update={"corpus": absolute(config.data.corpus), "tokenizer": absolute(config.data.tokenizer)}
    )
    nvme_folder = config.train.nvme_folder and absolute(config.train.nvme_folder)
    init_from = absolute(config.train.init_from)
    train = config.train.model_copy(update={"nvme_folder": nvme_folder, "init_from": init_from})
    validation = config.validation.model_copy(update={"corpus": absolute(config.validation.corpus)})
    probes = config.probes.model_copy(update={"file": named(config.probes.file)})
    files = {"preset": config.preset and named(config.preset), "deepspeed": named(config.deepspeed)}
    sections = {"data": data, "train": train, "validation": validation, "probes": probes}
    return config.model_copy(update={"run_dir": absolute(config.run_dir), **files, **sections})


def dump_yaml(config: RunConfig) -> str:
    """Return the resolved config as YAML with every field, as it is written to the run folder."""
    fields = config.model_dump(mode="json")
    refuse_passwords(fields)
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def dump_model_yaml(fields: dict[str, Any]) -> str:
    """Return these settings as the `model` section of a run YAML; settings not given keep their defaults."""
    try:
        checked = ModelSection.model_validate(fields).model_dump(mode="json")
    except ValidationError as error:
        raise _config_error(error) from None
    return yaml.safe_dump({"model": {name: checked[name] for name in fields}}, sort_keys=False)


def merge_nested(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Merge `high` over `low`, section by section; WHOLE_VALUES are replaced, not merged."""
    merged = dict(low)
    for key, value in high.items():
        both_sections = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in WHOLE_VALUES
        merged[key] = merge_nested(merged[key], value) if both_sections else value
    return merged


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = load_yaml(read_regular(path))
    except BadYaml as error:
        raise ConfigError(str(path), f"not valid YAML ({error})", "Fix the file.") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})", "Use a readable file.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), "must contain key: value sections", "See `z2all_ds/presets/` for examples.")
    return content


def _set_dotted(target: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"override {override!r}", "must be section.key=value", "For example train.steps=100.")
    try:
        value = load_yaml(text)
    except BadYaml as error:
        raise ConfigError(f"override {override!r}", f"value is not valid YAML ({error})", "Quote it.") from None
    if isinstance(value, str) and text.strip()[:1] not in ("'", '"'):
        value = text.strip()  # YAML would read a # in a path as the start of a comment
        # YAML 1.1 reads 3e-4 as a string, but it is a common notation for learning rates. Quoted values stay strings.
        with suppress(ValueError):
            value = float(value) if value[:1].isdigit() else value
    *sections, key = name.strip().split(".")
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {override!r}", f"{section} is a value, not a section", "Remove one of them.")
    target[key] = value


def _config_error(error: ValidationError) -> ConfigError:
    problem = first_problem(
        error, RunConfig, "See `z2all config --explain`: every setting with its choices and default."
    )
    return ConfigError(problem.what or "config", problem.rule, problem.fix or "Change one of the two.")
