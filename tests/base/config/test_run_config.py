"""The run config: its layers, presets and overrides, and the messages for invalid values."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.config import RunConfig, anchored, dump_yaml, load_run_config, merge_nested
from z2all_ds.base.config.sections import StageSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.resources import resource_dir

PRESETS = sorted(path.stem for path in resource_dir("presets").glob("*.yaml"))


def written(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def sections(model: type[BaseModel], above: str = "") -> list[tuple[str, type[BaseModel]]]:
    """Return the config's classes with their dotted names; the outermost is called ''."""
    found = [(above, model)]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += sections(field.annotation, f"{above}.{name}".lstrip("."))
    return found


SECTIONS = sections(RunConfig)


# Layers


def test_each_config_layer_overrides_the_one_below(tmp_path: Path) -> None:
    defaults, preset = load_run_config(), load_run_config("z2all_tiny")
    assert (defaults.train.steps, defaults.train.micro_batch, defaults.train.log_every) == (1000, 2, 1)
    assert (preset.train.steps, preset.train.micro_batch, preset.train.log_every) == (300, 4, 10)
    path = written(tmp_path, "preset: z2all_tiny\ntrain: {steps: 7, log_every: 8}\noptimizer: {weight_decay: 0.5}\n")
    run = load_run_config(path, ["train.steps=9", "optimizer.eps=1e-6"])
    assert run.train.steps == 9  # command line
    assert run.train.log_every == 8  # file
    assert run.train.micro_batch == 4  # preset
    assert run.train.gradient_clipping == 1.0  # default
    assert (run.optimizer.lr, run.optimizer.weight_decay, run.optimizer.eps) == (0.006, 0.5, 1e-6)


def test_a_preset_on_the_command_line_replaces_the_preset_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "preset: z2all_tiny\ntrain: {steps: 7}\n")
    run = load_run_config(path, ["preset=z2all_120m"])
    assert (run.preset, run.model.hidden_size, run.train.steps) == ("z2all_120m", 768, 7)


def test_a_preset_may_be_a_file_of_the_user(tmp_path: Path) -> None:
    own = tmp_path / "small.yaml"
    own.write_text("train: {steps: 3}\n", encoding="utf-8")
    assert load_run_config(None, [f"preset={own}"]).train.steps == 3


def test_the_last_of_two_overrides_wins() -> None:
    assert load_run_config(None, ["train.steps=1", "train={steps: 2, seed: 5}", "train.steps=3"]).train.steps == 3


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_run_config(written(tmp_path, "# nothing\n")) == RunConfig()


def test_weights_are_replaced_not_merged(tmp_path: Path) -> None:
    path = written(tmp_path, "data: {corpus: here, weights: {code: 0.5, english: 0.5}}\n")
    run = load_run_config(path, ["data.weights={chinese: 1.0}"])
    assert run.data.weights == {"chinese": 1.0}
    assert run.data.corpus == "here"
    assert load_run_config(path, ["data.weights=null"]).data.weights is None
    assert merge_nested({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}


# Presets and fields


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loads(preset: str) -> None:
    run = load_run_config(None, [f"preset={preset}"])
    assert run.preset == preset
    assert load_run_config(preset) == run.model_copy(update={"preset": None})
    documented = RunConfig.model_fields["preset"].description
    assert documented
    assert preset in documented


def test_the_shape_of_the_one_billion_model() -> None:
    run = load_run_config("z2all_1b")
    shape = run.model
    assert (shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads) == (2048, 22, 32)
    assert (shape.num_key_value_heads, shape.intermediate_size, shape.vocab_size) == (8, 5632, 64320)
    assert (run.train.sequence_length, shape.max_position_embeddings) == (2048, 2048)
    assert shape.tie_word_embeddings is False
    per_layer = 2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 5632 + 2 * 2048
    assert count_parameters(shape.shape).total == 2 * 64320 * 2048 + 22 * per_layer + 2048


@pytest.mark.parametrize(("name", "section"), [*SECTIONS, ("stages.0", StageSection)])
def test_every_field_has_a_description(name: str, section: type[BaseModel]) -> None:
    assert section.__doc__
    for field, info in section.model_fields.items():
        assert info.description, f"{name}.{field} has no docstring"


def test_the_number_of_lanes_depends_on_the_batch_unless_set() -> None:
    assert load_run_config(None, ["train.global_batch=48"]).num_lanes == 96
    assert load_run_config(None, ["train.global_batch=512"]).num_lanes == 512
    assert load_run_config(None, ["data.num_lanes=12"]).num_lanes == 12


def test_a_loaded_config_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_run_config().train.steps = 5  # type: ignore[misc]


# Overrides


@pytest.mark.parametrize(
    ("override", "dotted", "expected"),
    [
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("optimizer.lr=3E-4", "optimizer.lr", 3e-4),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("train.steps=1e3", "train.steps", 1000),
        ("optimizer.betas=[0.9, 0.98]", "optimizer.betas", (0.9, 0.98)),
        ("model.tie_word_embeddings=true", "model.tie_word_embeddings", True),
        ("train.stop_at_step=null", "train.stop_at_step", None),
        (" train.steps =5", "train.steps", 5),
        ("run_dir=runs/一次 试验", "run_dir", "runs/一次 试验"),
        ("run_dir=it's here", "run_dir", "it's here"),
        ("run_dir='it''s: a #1'", "run_dir", "it's: a #1"),
        ('run_dir="say \\"hi\\" = 5"', "run_dir", 'say "hi" = 5'),
        ('run_dir="two\\nlines: [1"', "run_dir", "two\nlines: [1"),
        ("run_dir=a=b", "run_dir", "a=b"),
        ("run_dir='2024'", "run_dir", "2024"),
        ("run_dir=2e runs", "run_dir", "2e runs"),
        ("data.weights={中文: 3e-1, code: 0.7}", "data.weights", {"中文": 0.3, "code": 0.7}),
        ("data.packing=best_fit", "data.packing", "best_fit"),
        ("data.num_workers=3", "data.num_workers", 3),
        ("data.skip_samples=[[51200, 52224], [1, 2]]", "data.skip_samples", ((51200, 52224), (1, 2))),
        ("data.skip_samples=[]", "data.skip_samples", ()),
        (
            "stages=[{name: 长, steps: 100, rope_theta: 1e6, weights: {code: 1}}, {name: '2'}]",
            "stages",
            (StageSection(name="长", steps=100, rope_theta=1e6, weights={"code": 1.0}), StageSection(name="2")),
        ),
    ],
)
def test_override_values_are_parsed_with_the_right_type(override: str, dotted: str, expected: object) -> None:
    value: object = load_run_config(None, [override])
    for part in dotted.split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


def test_a_file_may_use_exponent_notation_for_the_learning_rate(tmp_path: Path) -> None:
    assert load_run_config(written(tmp_path, "optimizer: {lr: 3e-4}\n")).optimizer.lr == 3e-4


# Errors


def refusal(path: str | None = None, overrides: list[str] | None = None) -> str:
    """Load an invalid config and return its one-line error message."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, overrides)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert caught.value.__cause__ is None  # nothing for a traceback to show
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return line


@pytest.mark.parametrize(("name", "section"), SECTIONS)
def test_an_unknown_key_suggests_the_closest_one_at_every_level(
    name: str, section: type[BaseModel], tmp_path: Path
) -> None:
    prefix = f"{name}." if name else ""
    for field in section.model_fields:
        wrong = field + "z"
        expected = f"{prefix}{wrong}: no such setting. Did you mean {prefix}{field}?"
        assert refusal(None, [f"{prefix}{wrong}=1"]) == expected
    known = ", ".join(section.model_fields)
    content: dict[str, Any] = {"QQQQ": 1}
    path = written(tmp_path, yaml.safe_dump({name: content} if name else content))
    assert refusal(path) == f"{prefix}QQQQ: no such setting. Known here: {known}."


def test_an_unknown_key_of_a_stage_suggests_the_closest_one() -> None:
    for field in StageSection.model_fields:
        line = refusal(None, [f"stages=[{{name: a}}, {{name: b, {field}z: 1}}]"])
        assert line == f"stages.1.{field}z: no such setting. Did you mean stages.1.{field}?"
    known = ", ".join(StageSection.model_fields)
    assert refusal(None, ["stages=[{name: a, QQQQ: 1}]"]) == f"stages.0.QQQQ: no such setting. Known here: {known}."


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["by=tokens", "warmup_steps=5"],
            "schedule.warmup_steps=5: schedule.by=tokens counts tokens."
            " Set schedule.warmup_tokens instead, and schedule.warmup_steps=null.",
        ),
        (
            ["warmup_tokens=5"],
            "schedule.warmup_tokens=5: schedule.by=steps counts steps."
            " Set schedule.warmup_steps instead, and schedule.warmup_tokens=null.",
        ),
        (
            ["kind=wsd", "by=tokens", "warmup_tokens=5", "decay_steps=7"],
            "schedule.decay_steps=7: schedule.by=tokens counts tokens."
            " Set schedule.decay_tokens instead, and schedule.decay_steps=null.",
        ),
        (
            ["by=tokens"],
            "schedule.warmup_tokens: is not set, and schedule.by=tokens with schedule.kind=cosine needs it."
            " Set schedule.warmup_tokens=...",
        ),
        (
            ["kind=wsd"],
            "schedule.decay_steps: is not set, and schedule.by=steps with schedule.kind=wsd needs it."
            " Set schedule.decay_steps=...",
        ),
        (
            ["decay_steps=7"],
            "schedule.decay_steps=7: schedule.kind=cosine has no separate decay length."
            " Set schedule.kind=wsd, or omit it.",
        ),
    ],
)
def test_a_schedule_with_the_wrong_unit_or_a_missing_length_is_refused(overrides: list[str], line: str) -> None:
    assert refusal(None, [f"schedule.{override}" for override in overrides]) == line


def test_a_schedule_by_tokens_survives_a_round_trip_through_yaml(tmp_path: Path) -> None:
    chosen = ["kind=wsd", "by=tokens", "warmup_tokens=0", "decay_tokens=10"]
    run = load_run_config(None, [f"schedule.{override}" for override in chosen])
    assert (run.schedule.warmup_steps, run.schedule.warmup, run.schedule.decay) == (None, 0, 10)
    written = tmp_path / "run.yaml"
    written.write_text(dump_yaml(run))
    assert load_run_config(str(written)) == run
    # The preset sets warmup_steps, which must be set to null.
    preset = ["schedule.by=tokens", "schedule.warmup_tokens=1000", "schedule.warmup_steps=null"]
    assert load_run_config("z2all_1b", preset).schedule.warmup == 1000


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("train.steps=0", "train.steps=0: Input should be greater than 0."),
        ("train.steps=many", "train.steps='many': Input should be a valid integer"),
        ("train.steps=1.5", "train.steps=1.5: Input should be a valid integer"),
        ("train=5", "train=5: Input should be a valid dictionary"),
        ("optimizer.lr=-3e-4", "optimizer.lr='-3e-4': Input should be greater than 0."),
        ("optimizer.lr=.inf", "optimizer.lr=inf: Input should be a finite number."),
        ("optimizer.lr=1e999", "optimizer.lr=inf: Input should be a finite number."),
        ("schedule.min_ratio=.nan", "schedule.min_ratio=nan: Input should be a finite number."),
        ("data.weights={code: .nan}", "data.weights.code=nan: Input should be a finite number."),
        ("data.weights={code:1}", "data.weights: {code:1} has no value. Write {code: 1}, with a space."),
        ("optimizer.betas=[0.9]", "optimizer.betas.1="),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1=1.0: Input should be less than 1."),
        ("train.precision=fp8", "train.precision='fp8': must be auto, fp32 or bf16. Choose one of these."),
        (
            "train.precision=fp16",
            "train.precision=fp16: fp16 needs a loss scale, which only a DeepSpeed JSON sets."
            " Leave it out and set deepspeed=zero1_fp16",
        ),
        ("run_dir={a: b}", "run_dir={'a': 'b'}: Input should be a valid string."),
        ('track.wandb="a\\nb"', r"track.wandb='a\nb': must be disabled, auto, offline or online."),
        ("checkpoint.keep_last=1", "checkpoint.keep_last=1: Input should be greater than or equal to 2."),
        ("checkpoint.keep_every=-1", "checkpoint.keep_every=-1: Input should be greater than or equal to 0."),
        ("checkpoint.keep_best=2", "config: checkpoint.keep_best=2 must have a validation.corpus to rank checkpoints."),
        ("model.num_attention_heads=30", "model: num_attention_heads=30 must divide hidden_size=2048."),
        ("model.num_key_value_heads=5", "model: num_key_value_heads=5 must divide num_attention_heads=32."),
        ("model.num_attention_heads=2048", "model: head size 1 (hidden_size / num_attention_heads) must be even"),
        ("train.micro_batch=3", "config: train.global_batch=32 must be a multiple of train.micro_batch=3."),
        (
            "train.sequence_length=4096",
            "config: train.sequence_length=4096 must not exceed model.max_position_embeddings=2048.",
        ),
        (
            "stages=[{name: a, steps: 5}, {name: b, sequence_length: 4096}]",
            "config: stages.1.sequence_length=4096 must not exceed model.max_position_embeddings=2048.",
        ),
        ("stages=[{steps: 5}]", "stages.0.name={'steps': 5}: Field required."),
        ("stages=[{name: a, steps: 0}]", "stages.0.steps=0: Input should be greater than 0."),
        ("stages=[{name: a, rope_theta: .inf}]", "stages.0.rope_theta=inf: Input should be a finite number."),
        ("stages=[{name: a, weights: {code: x}}]", "stages.0.weights.code='x': Input should be a valid number"),
        ("stages=[long]", "stages.0='long': Input should be a valid dictionary."),
        ("stages={name: a}", "stages={'name': 'a'}: Input should be a valid list."),
        ("stages.0.steps=5", "stages={'0': {'steps': 5}}: Input should be a valid list."),
        ("data.packing=worst_fit", "data.packing='worst_fit': must be cut or best_fit."),
        ("data.num_workers=-1", "data.num_workers=-1: Input should be greater than or equal to 0."),
        ("data.skip_samples=[[8, 8]]", "config: data.skip_samples: [8, 8] must be ascending and not negative."),
        ("data.skip_samples=[[-8, 8]]", "config: data.skip_samples: [-8, 8] must be ascending and not negative."),
        ("data.skip_samples=[8, 16]", "data.skip_samples.0=8: Input should be a valid list."),
        ("data.skip_samples=[[8]]", "data.skip_samples.0.1=[8]: Field required."),
        ("data.skip_samples=[[8, 16.5]]", "data.skip_samples.0.1=16.5: Input should be a valid integer"),
        ("train.steps", "override 'train.steps': must be section.key=value."),
        ("=5", "override '=5': must be section.key=value."),
        ("run_dir=[a", "override 'run_dir=[a': value is not valid YAML ("),
        ("tra\nin.steps=1", "tra in: no such setting. Did you mean train?"),
        ("preset=z2all_2b", "preset 'z2all_2b': neither a file nor one of the shipped ones ("),
    ],
)
def test_an_invalid_value_is_refused_with_one_line(override: str, start: str) -> None:
    assert refusal(None, [override]).startswith(start)


def test_an_override_inside_a_section_that_is_a_plain_value_is_refused() -> None:
    line = refusal(None, ["train=5", "train.steps=5"])
    assert line == "override 'train.steps=5': train is a value, not a section. Remove one of them."


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"train: [1, 2", "not valid YAML ("),
        (b"a:\n\t- b", "not valid YAML ("),
        (b"run_dir: \xff\xfe", "not valid YAML ("),
        (b"- train\n- data\n", "must contain key: value sections."),
        (b"just words", "must contain key: value sections."),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(content: bytes, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert refusal(str(path)).startswith(f"{path}: {rule}")


@pytest.mark.parametrize("content", ["1: 2\n", "null: 2\n", "train: {1: 2}\n", "train:\n"])
def test_unusual_keys_and_empty_sections_are_refused_as_user_errors(content: str, tmp_path: Path) -> None:
    assert "`z2all config --explain`" in refusal(written(tmp_path, content))


WORDS = st.text(max_size=3) | st.sampled_from(
    [
        *"=.:[]{},'\"#&*!|>%@~- \n\t",
        "train",
        "steps",
        "data",
        "weights",
        "preset",
        "run_dir",
        "betas",
        "optimizer",
        "stages",
        "name",
        "skip_samples",
        "1e",
        "=1",
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, max_size=8).map("".join))
@example("model.=1")
@example("model..x=1")
@example(".=")
@example("data.weights.code=1")
@example("stages=[{}]")
@example("stages=[{name: a, b: {c: d}}]")
@example("stages=[[{name: a, b: 1}]]")
@example("stages.name=1")
@example("data.weights.code=x")
@example("train.steps=!!python/object:os.system x")
@example("train.steps=&a [*a]")
def test_no_override_text_causes_a_traceback(text: str) -> None:
    try:
        load_run_config(None, [text])
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017  # any valid override may pass


# The resolved config


POSITIVE = st.integers(1, 10**9)
FRACTION = st.floats(1e-12, 1e6)
# Three rare line breaks are excluded, since PyYAML does not preserve them.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85\u2028\u2029"))
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "run_dir": TEXT,
    "data.corpus": TEXT,
    "data.weights": st.none() | st.dictionaries(TEXT, FRACTION),
    "data.num_lanes": st.none() | POSITIVE,
    "data.skip_samples": st.lists(st.tuples(POSITIVE, POSITIVE).map(lambda pair: [pair[0], sum(pair)]), max_size=3),
    "data.packing": st.sampled_from(["cut", "best_fit"]),
    "model.vocab_size": POSITIVE,
    "model.rms_norm_eps": FRACTION,
    "model.tie_word_embeddings": st.booleans(),
    "train.steps": POSITIVE,
    "train.stop_at_step": st.none() | POSITIVE,
    "train.precision": st.sampled_from(["auto", "fp32", "bf16"]),
    "optimizer.lr": FRACTION,
    "optimizer.betas": st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
    "preset": st.none() | st.sampled_from(PRESETS),
    "track.project": TEXT,
}


def _as_lists(value: Any) -> Any:
    return [_as_lists(part) for part in value] if isinstance(value, tuple) else value


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional=CHOICES))
def test_a_written_config_loads_as_the_same_config(chosen: dict[str, Any]) -> None:
    overrides = []
    for name, value in chosen.items():
        text = yaml.safe_dump(value, default_style='"' if isinstance(value, str) else None, default_flow_style=True)
        overrides.append(f"{name}={text.removesuffix('...' + chr(10))}")
    run = load_run_config(None, overrides)
    for name, value in chosen.items():
        found: object = run
        for part in name.split("."):
            found = getattr(found, part)
        assert _as_lists(found) == value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(dump_yaml(run), encoding="utf-8")
        again = load_run_config(str(path))
    assert again == run
    assert dump_yaml(again) == dump_yaml(run)


def test_stages_are_written_with_every_field(tmp_path: Path) -> None:
    run = load_run_config(None, ["stages=[{name: a, steps: 5, weights: {中文: 1}}, {name: b, rope_theta: 5e5}]"])
    content = yaml.safe_load(dump_yaml(run))
    assert [list(stage) for stage in content["stages"]] == [list(StageSection.model_fields)] * 2
    assert load_run_config(written(tmp_path, dump_yaml(run))) == run


def test_stages_on_the_command_line_replace_the_stages_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "stages: [{name: a, steps: 5}, {name: b}]\n")
    assert [stage.name for stage in load_run_config(path).stages] == ["a", "b"]
    assert [stage.name for stage in load_run_config(path, ["stages=[{name: c}]"]).stages] == ["c"]
    assert load_run_config(path, ["stages=[]"]).stages == ()


def test_the_written_config_has_every_field_and_unescaped_chinese() -> None:
    text = dump_yaml(load_run_config(None, ["run_dir=跑"]))
    assert "run_dir: 跑\n" in text
    content = yaml.safe_load(text)
    assert list(content) == list(RunConfig.model_fields)
    for name, section in SECTIONS[1:]:
        assert list(content[name]) == list(section.model_fields)


def test_anchored_makes_the_paths_of_a_config_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = ["run_dir=runs/a", "data.corpus=~/corpus", "data.tokenizer=/else/where", "validation.corpus=held/out"]
    run = anchored(load_run_config(None, folders))
    assert run.run_dir == str(tmp_path / "runs" / "a")
    assert run.data.corpus == str(Path.home() / "corpus")
    assert run.data.tokenizer == "/else/where"
    assert run.validation.corpus == str(tmp_path / "held" / "out")
    assert anchored(load_run_config()).data.corpus == ""


def test_export_every_steps_must_be_a_multiple_of_checkpoint_every_steps() -> None:
    run = load_run_config(None, ["checkpoint.every_steps=50", "export.every_steps=100", "export.format=z2all"])
    assert (run.export.every_steps, run.export.dtype, run.export.format) == (100, "bf16", "z2all")
    assert load_run_config().export.every_steps == 0
    rule = r"export.every_steps=75 must be a multiple of checkpoint.every_steps=50"
    with pytest.raises(ConfigError, match=rule):
        load_run_config(None, ["checkpoint.every_steps=50", "export.every_steps=75"])
