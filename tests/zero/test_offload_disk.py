"""Tests of offload to disk: requirements are checked before anything is loaded, and training gives the same losses as
in memory."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import one_line, z2all
from tests.helpers.training import losses, run_arguments, train_many
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.export.to_hf import export_checkpoint
from z2all_ds.zero.ds_config import ResolvedDeepSpeed, resolve
from z2all_ds.zero.offload_disk import disk_folders, require_disk, require_libaio
from z2all_ds.zero.op_builds import needed_ops, prebuild

WITHOUT_HEADERS = "c++ -nostdinc"
"""A compiler command that finds no headers, like on a machine without libaio-dev."""


def resolved_in(folder: Path, *overrides: str) -> ResolvedDeepSpeed:
    return resolve(load_run_config(None, ["deepspeed=zero3_nvme", f"run_dir={folder}", *overrides]), 2, "cpu")


def libaio_is_here() -> bool:
    try:
        require_libaio()
    except MachineError:
        return False
    return True


def test_the_offload_folder_is_created_and_left_empty(tmp_path: Path) -> None:
    resolved = resolved_in(tmp_path / "run")
    assert disk_folders(resolved.config) == [tmp_path / "run" / "nvme"]
    require_disk(resolved)
    assert list((tmp_path / "run" / "nvme").iterdir()) == []
    plain = resolve(load_run_config(None, ["deepspeed=zero3_offload_param"]), 2, "cpu")
    assert disk_folders(plain.config) == []


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", Path("/proc/none")):
        resolved = resolved_in(tmp_path / "run", f"train.nvme_folder={bad}")
        with pytest.raises(ConfigError) as caught:
            require_disk(resolved)
        assert str(caught.value).startswith(f"nvme_path {bad}/run-")
        assert str(caught.value).endswith("Set train.nvme_folder to a writable folder on a fast disk.")


def test_the_train_command_refuses_the_folder_before_it_starts_ranks(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    (tmp_path / "file").write_text("")
    more = ("deepspeed=zero3_nvme", f"train.nvme_folder={tmp_path / 'file'}")
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *more)
    line = one_line(z2all("train", "--ranks", "2", *arguments, cwd=tmp_path), 2)
    assert "cannot be written (Not a directory)" in line
    assert not (tmp_path / "run" / "logs").exists()


def test_missing_libaio_is_reported_in_one_line_before_any_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", WITHOUT_HEADERS)
    with pytest.raises(MachineError) as caught:
        prebuild(needed_ops(resolved_in(tmp_path), "cuda"))
    assert str(caught.value).startswith("offload to nvme: DeepSpeed's async_io needs libaio")
    assert "libaio-dev" in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_libaio_in_a_custom_folder_is_found(tmp_path: Path) -> None:
    """The compiler's variables CPATH and LIBRARY_PATH apply to the check as they do to the build."""
    (tmp_path / "libaio.h").write_text('extern "C" int io_submit(void *, long, void *);\n')
    (tmp_path / "aio.c").write_text("int io_submit(void *a, long b, void *c) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libaio.so", tmp_path / "aio.c"], check=True)
    bare = {**os.environ, "CXX": WITHOUT_HEADERS}
    with pytest.raises(MachineError):
        require_libaio(bare)
    require_libaio({**bare, "CPATH": str(tmp_path), "LIBRARY_PATH": str(tmp_path)})


def test_async_io_is_among_the_ops_to_build(tmp_path: Path) -> None:
    assert needed_ops(resolved_in(tmp_path), "cpu") == ["deepspeed_shm_comm", "cpu_adam", "async_io"]
    assert needed_ops(resolved_in(tmp_path), "cuda") == ["cpu_adam", "async_io"]


ON_DISK = ("model.hidden_size=128", "model.intermediate_size=352", "train.steps=10")
"""Large enough that states go to disk: DeepSpeed keeps tensors below 1 MiB in memory."""
IN_MEMORY = "zero3"
ON_DISK_JSONS = ["zero3_nvme", "weights_too", "pipelined"]
CHANGES = [
    ("zero3_nvme", "zero1"),
    ("zero3", "zero3_nvme"),
    ("weights_too", "zero3_nvme"),
    ("zero3_nvme", "weights_too"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    """Train all runs and return their folder: NAME runs without interruption, NAME_stopped stops after 5 steps and
    resumes, and A_to_B continues the stopped run of A with the JSON of B."""
    if not libaio_is_here():
        pytest.skip("libaio and its headers are not installed")
    prebuild(["async_io", "cpu_adam"])
    folder = tmp_path_factory.mktemp("disk_runs")
    on_disk = {"device": "nvme", "buffer_size": 1_000_000, "max_in_cpu": 0}
    pipeline = {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 8}
    offloads: dict[str, dict[str, Any]] = {
        "weights_too": {"offload_optimizer": {"device": "nvme"}, "offload_param": on_disk},
        "pipelined": {"offload_optimizer": pipeline},
    }
    for name, offload in offloads.items():
        (folder / f"{name}.json").write_text(json.dumps({"zero_optimization": {"stage": 3, **offload}}))

    def arguments(run: str, name: str, *more: str) -> list[str]:
        json_of_it = folder / f"{name}.json" if name in offloads else name
        return run_arguments(folder / run, small_corpus, small_tokenizer, *ON_DISK, f"deepspeed={json_of_it}", *more)

    plan = []
    for name in (IN_MEMORY, "zero1", *ON_DISK_JSONS):
        plan += [arguments(name, name)]
        plan += [arguments(f"{name}_stopped", name, "train.stop_at_step=5"), arguments(f"{name}_stopped", name)]
    for name, other in CHANGES:
        start = folder / f"{name}_stopped" / "checkpoints" / "step_00000005"
        plan += [[*arguments(f"{name}_to_{other}", other), f"--resume={start}"]]
    assert train_many(folder, plan) == [0] * len(plan)
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("name", ON_DISK_JSONS)
def test_states_on_disk_give_the_same_losses_as_in_memory(name: str, runs: Path) -> None:
    # DeepSpeed's CPU Adam uses a different formula: fp32 rounding differences, which grow over the steps.
    assert losses(runs / name) == pytest.approx(losses(runs / IN_MEMORY), rel=2e-6)
    states = list((runs / name / "nvme").rglob("exp_avg-*.swp"))
    assert {file.parent.name for file in states} == {"rank0", "rank1"}


@pytest.mark.extended
@pytest.mark.parametrize("name", ON_DISK_JSONS)
def test_a_stop_and_resume_leaves_the_losses_bit_identical(name: str, runs: Path) -> None:
    assert losses(runs / f"{name}_stopped") == losses(runs / name)
    assert len(losses(runs / name)) == 10


@pytest.mark.extended
@pytest.mark.parametrize(("name", "other"), CHANGES)
def test_losses_continue_after_a_change_of_the_offload(name: str, other: str, runs: Path) -> None:
    assert losses(runs / f"{name}_to_{other}") == pytest.approx(losses(runs / name)[5:], rel=2e-6)


@pytest.mark.extended
def test_the_logits_of_an_export_match_the_model(runs: Path) -> None:
    assert export_checkpoint(runs / "zero3_nvme", dtype="fp32").verdict.max_relative_difference <= 1e-4
