"""`z2all bench step --ablate`: the table of rows, two of which are measured through the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import one_line, z2all
from tests.helpers.training import MICRO_OVERRIDES
from tests.ops.comparing import on_gpu
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import to_json
from z2all_ds.bench.step import COMMON, HEAD, MIN_STEPS, REFERENCES, ROWS, AblationRow, ablate, measure_row, to_line
from z2all_ds.ops.registry import OP_NAMES, backends_of

COSTS = {
    "seconds_per_step": 1.5,
    "tokens_per_second": 43690.6,
    "mfu_origin": 0.382,
    "mfu_exact": 0.3456,
    "hfu": 0.4,
    "peak_memory_bytes": 2**31,
}


def config_of(name: str) -> RunConfig:
    return load_run_config(None, [*COMMON, *ROWS[name]])


def test_references_are_the_last_backends_in_the_registry() -> None:
    assert {op: list(backends_of(op))[-1] for op in OP_NAMES} == REFERENCES


def test_every_row_is_a_valid_config() -> None:
    assert list(ROWS)[:2] == ["naive", "use_all"]
    assert all(config_of(name).deepspeed == "zero1" for name in ROWS)
    assert config_of("naive").ops.model_dump() == REFERENCES
    assert (config_of("naive").train.cuda_graphs, config_of("graphs_off").train.cuda_graphs) == ("never", "never")
    plain = config_of("use_all")
    assert set(plain.ops.model_dump().values()) == {"auto"} and plain.train.cuda_graphs == "auto"
    assert config_of("compile_layers").train.compile == "layers"


@pytest.mark.parametrize("op", [op for op in OP_NAMES if op != "linear"])
def test_each_without_row_replaces_only_its_op_by_the_reference(op: str) -> None:
    expected = {**dict.fromkeys(OP_NAMES, "auto"), op: REFERENCES[op]}
    assert config_of(f"without_{op}").ops.model_dump() == expected


def test_invalid_arguments_are_refused_before_the_first_run() -> None:
    with pytest.raises(ConfigError, match=r"row 'naif': no such row\. Known: naive, use_all, "):
        ablate(None, [], 1, MIN_STEPS, ["naif"])
    with pytest.raises(ConfigError, match="steps=3"):
        ablate(None, [], 1, MIN_STEPS - 1)
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        ablate(None, ["train.stepz=3"], 1, MIN_STEPS)


def test_rows_as_lines_and_as_json() -> None:
    measured = AblationRow("use_all", (), costs=COSTS)
    failed = AblationRow("naive", ("ops.rope=torch",), failed="OutOfMemoryError: CUDA out of memory")
    assert HEAD.split() == ["row", "s/iter", "tok/s", "MFU", "exact", "HFU", "peak"]
    assert to_line(measured).split() == ["use_all", "1.500", "43,691", "38.2%", "34.6%", "40.0%", "2.0", "GiB"]
    assert to_line(failed).split(maxsplit=1) == ["naive", "OutOfMemoryError: CUDA out of memory"]
    first, second = json.loads(to_json({"rows": [measured, failed]}))["rows"]
    assert first["costs"]["tokens_per_second"] == 43690.6 and first["costs"]["hfu"] == 0.4
    assert (second["failed"], second["costs"], second["overrides"]) == (failed.failed, None, ["ops.rope=torch"])


@pytest.mark.extended
def test_the_command_measures_two_rows(small_corpus: Path, small_tokenizer: Path) -> None:
    folders = (f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    options = ["--ablate", "--rows", "use_all,naive", "--ranks", "1", "--steps", str(MIN_STEPS), "--json"]
    command = [sys.executable, "-m", "z2all_ds", "bench", "step", *options, "--config", "z2all_tiny"]
    result = subprocess.run([*command, *MICRO_OVERRIDES, *folders], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    naive, use_all = json.loads(result.stdout)["rows"]
    assert (naive["name"], use_all["name"]) == ("naive", "use_all")
    assert (naive["failed"], use_all["failed"]) == ("", "")
    assert naive["costs"]["ops"] == REFERENCES
    assert use_all["costs"]["ops"]["attention"] == "sdpa"
    for row in (naive, use_all):
        costs = row["costs"]
        assert (costs["deepspeed"], costs["steps"], costs["ranks"]) == ("zero1", MIN_STEPS, 1)
        assert costs["tokens_per_second"] == pytest.approx(8 * 32 / costs["seconds_per_step"])
        assert (costs["mfu_exact"], costs["hfu"]) == (None, None)  # no peak is known for a CPU
    # Data and initial weights are the same, so the losses differ only by rounding.
    assert naive["costs"]["last_loss"] == pytest.approx(use_all["costs"]["last_loss"], abs=1e-4)
    lines = [line.split()[0] for line in result.stderr.splitlines() if "..." not in line]
    assert lines == ["row", "naive", "use_all"]


@pytest.mark.extended
def test_a_failed_row_has_a_one_line_reason(small_corpus: Path, small_tokenizer: Path) -> None:
    folders = (f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    changes = ("ops.rope=liger",)
    result = measure_row("liger", changes, None, [*MICRO_OVERRIDES, *folders, *changes], 1, MIN_STEPS)
    assert (result.name, result.overrides, result.costs) == ("liger", changes, None)
    assert result.failed.startswith("ConfigError: ops.rope=liger: needs a GPU, the model is on cpu.")


@pytest.mark.parametrize("marked", [pytest.param("cuda", marks=on_gpu)])
def test_a_row_is_measured_on_a_gpu(marked: str, small_corpus: Path, small_tokenizer: Path) -> None:
    heads = ("model.hidden_size=128", "model.num_attention_heads=2", "model.num_key_value_heads=1")
    folders = (f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    changes = ("ops.cross_entropy=chunked",)
    overrides = [*COMMON, *MICRO_OVERRIDES, *heads, *folders, *changes]
    result = measure_row("chunked", changes, None, overrides, 1, MIN_STEPS)
    assert result.failed == "" and result.costs is not None
    assert result.costs["ops"]["cross_entropy"] == "chunked" and result.costs["ops"]["rms_norm"] == "triton"
    exact = result.costs["mfu_exact"] or pytest.skip("no peak known for this GPU")
    assert result.costs["hfu"] > exact > 0


def test_options_that_cannot_be_combined_are_refused(tmp_path: Path) -> None:
    line = one_line(z2all("bench", "step", "--ablate", "--floor", cwd=tmp_path), ConfigError.exit_code)
    assert line == "ConfigError: --ablate: cannot be combined with --floor or --peer. Leave these out."
    line = one_line(z2all("bench", "step", "--rows", "naive", cwd=tmp_path), ConfigError.exit_code)
    assert line == "ConfigError: --rows naive: needs --ablate. Give --ablate too."
