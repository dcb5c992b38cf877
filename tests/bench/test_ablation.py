"""The table of rows, and two of them measured for real through the command; nothing is held against the clock."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.command import one_line, z2all
from tests.helpers.training import MICRO_OVERRIDES
from tests.ops.comparing import on_gpu
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import to_json
from z2all_ds.bench.ablation import (
    COMMON,
    HEAD,
    REFERENCES,
    ROWS,
    AblationResult,
    AblationRow,
    ablate,
    chosen_rows,
    run_row,
    to_line,
)
from z2all_ds.bench.step import MIN_STEPS, StepCosts
from z2all_ds.ops.registry import OP_NAMES, backends_of

COSTS = StepCosts("H200", 1, "zero1", 1, 32, 8, 2, 6, 1.5, 43690.6, 0.382, 0.3456, 2**31, 1.0, {}, {})


def config_of(name: str) -> RunConfig:
    (row,) = chosen_rows([name])
    return load_run_config(None, [*COMMON, *row.overrides])


def test_references_are_those_of_the_registry() -> None:
    assert {op: list(backends_of(op))[-1] for op in OP_NAMES} == REFERENCES


def test_every_row_is_a_config_that_can_be_meant() -> None:
    names = [row.name for row in ROWS]
    assert names[:2] == ["naive", "use_all"] and len(names) == len(set(names))
    assert all(config_of(name).deepspeed == "zero1" for name in names)
    assert config_of("naive").ops.model_dump() == REFERENCES
    assert (config_of("naive").train.cuda_graphs, config_of("graphs_off").train.cuda_graphs) == ("never", "never")
    plain = config_of("use_all")
    assert set(plain.ops.model_dump().values()) == {"auto"} and plain.train.cuda_graphs == "auto"
    assert config_of("compile_layers").train.compile == "layers"


@pytest.mark.parametrize("op", [op for op in OP_NAMES if op != "linear"])
def test_without_an_op_that_op_alone_is_its_reference(op: str) -> None:
    expected = {**dict.fromkeys(OP_NAMES, "auto"), op: REFERENCES[op]}
    assert config_of(f"without_{op}").ops.model_dump() == expected


def test_rows_come_in_the_tables_order_and_unknown_ones_are_named() -> None:
    assert [row.name for row in chosen_rows(["use_all", "naive"])] == ["naive", "use_all"]
    assert chosen_rows([]) == list(ROWS)
    with pytest.raises(ConfigError, match=r"row 'naif': no such row\. Known: naive, use_all, "):
        chosen_rows(["naif"])


def test_mistakes_are_said_before_the_first_run() -> None:
    with pytest.raises(ConfigError, match="steps=3"):
        ablate(None, [], 1, MIN_STEPS - 1)
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        ablate(None, ["train.stepz=3"], 1, MIN_STEPS)


def test_lines_for_people() -> None:
    measured = AblationResult("use_all", (), costs=replace(COSTS, hfu=0.4))
    failed = AblationResult("naive", ("ops.rope=torch",), failed="OutOfMemoryError: CUDA out of memory")
    assert HEAD.split() == ["row", "s/iter", "tok/s", "MFU", "exact", "HFU", "peak"]
    assert to_line(measured).split() == ["use_all", "1.500", "43,691", "38.2%", "34.6%", "40.0%", "2.0", "GiB"]
    assert to_line(failed).split(maxsplit=1) == ["naive", "OutOfMemoryError: CUDA out of memory"]
    first, second = json.loads(to_json({"rows": [measured, failed]}))["rows"]
    assert first["costs"]["tokens_per_second"] == 43690.6 and first["costs"]["hfu"] == 0.4
    assert (second["failed"], second["costs"], second["overrides"]) == (failed.failed, None, ["ops.rope=torch"])


@pytest.mark.extended
def test_two_rows_through_the_command(small_corpus: Path, small_tokenizer: Path) -> None:
    folders = (f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    options = ["--ablate", "--rows", "naive,use_all", "--ranks", "1", "--steps", str(MIN_STEPS), "--json"]
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
    # The same data and the same weights: only rounding differs.
    assert naive["costs"]["last_loss"] == pytest.approx(use_all["costs"]["last_loss"], abs=1e-4)
    lines = [line.split()[0] for line in result.stderr.splitlines() if "..." not in line]
    assert lines == ["row", "naive", "use_all"]


@pytest.mark.extended
def test_a_row_that_fails_says_why_in_one_line(small_corpus: Path, small_tokenizer: Path) -> None:
    folders = (f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    row = AblationRow("liger", ("ops.rope=liger",))
    result = run_row(row, None, [*MICRO_OVERRIDES, *folders, *row.overrides], 1, MIN_STEPS)
    assert (result.name, result.overrides, result.costs) == ("liger", row.overrides, None)
    assert result.failed.startswith("ConfigError: ops.rope=liger: needs a GPU, the model is on cpu.")


@pytest.mark.parametrize("marked", [pytest.param("cuda", marks=on_gpu)])
def test_a_row_on_a_gpu(marked: str, small_corpus: Path, small_tokenizer: Path) -> None:
    heads = ("model.hidden_size=128", "model.num_attention_heads=2", "model.num_key_value_heads=1")
    folders = (f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    row = AblationRow("chunked", ("ops.cross_entropy=chunked",))
    overrides = [*COMMON, *MICRO_OVERRIDES, *heads, *folders, *row.overrides]
    result = run_row(row, None, overrides, 1, MIN_STEPS)
    assert result.failed == "" and result.costs is not None
    assert result.costs.ops["cross_entropy"] == "chunked" and result.costs.ops["rms_norm"] == "triton"
    exact = result.costs.mfu_exact or pytest.skip("no peak known for this GPU")
    assert result.costs.hfu is not None and result.costs.hfu > exact > 0


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    line = one_line(z2all("bench", "step", "--ablate", "--floor", cwd=tmp_path), ConfigError.exit_code)
    assert line == "ConfigError: --ablate: cannot be combined with --floor or --peer. Leave these out."
    line = one_line(z2all("bench", "step", "--rows", "naive", cwd=tmp_path), ConfigError.exit_code)
    assert line == "ConfigError: --rows naive: needs --ablate. Give --ablate too."
