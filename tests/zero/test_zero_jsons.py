"""Training on two real ranks with every shipped DeepSpeed JSON except zero3_nvme, unchanged: equal losses, bitwise
resume, verified export."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.checkpoints import read_weights
from tests.helpers.training import launch_script, losses, metrics, run_arguments, train, train_many
from z2all_ds.base.resources import resource_dir
from z2all_ds.checkpoint.layout import open_checkpoint
from z2all_ds.export.to_hf import export_checkpoint
from z2all_ds.track.writer import read_records
from z2all_ds.train.schedules import LAST_RATE

JSONS = ["zero0", "zero1", "zero1_fp16", "zero2", "zero2_offload"]
JSONS += ["zero3", "zero3_hpz", "zero3_offload", "zero3_offload_param"]
CHANGES = list(zip(JSONS, [*JSONS[1:], JSONS[0]], strict=True))
NEEDS_LIBAIO = "zero3_nvme"
"""Tested in test_offload_disk.py."""
STEPS = 20
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain.py"
LAST_CHECKPOINT = f"step_{STEPS:08d}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    """Train all runs and return their folder: NAME runs 20 steps without interruption, NAME_stopped stops after 10 and
    resumes, and A_to_B continues the checkpoint of A at step 10 with the JSON of B."""
    folder = tmp_path_factory.mktemp("zero_runs")

    def arguments(run: str, name: str, *more: str) -> list[str]:
        return run_arguments(
            folder / run, small_corpus, small_tokenizer, f"deepspeed={name}", f"train.steps={STEPS}", *more
        )

    plan = []
    for name in JSONS:
        plan += [arguments(name, name)]
        plan += [arguments(f"{name}_stopped", name, "train.stop_at_step=10"), arguments(f"{name}_stopped", name)]
    # The checkpoint of each JSON at step 10 is continued with the next JSON of the list.
    for name, other in CHANGES:
        start = folder / f"{name}_stopped" / "checkpoints" / "step_00000010"
        plan += [[*arguments(f"{name}_to_{other}", other), f"--resume={start}"]]
    # Only two short bf16 runs: bf16 products are very slow on a CPU.
    plan += [arguments("bf16", "zero2", "train.precision=bf16", "train.steps=2", "schedule.warmup_steps=1")]
    plan += [arguments("bf16_zero1", "zero1", "train.precision=bf16", "train.steps=2", "schedule.warmup_steps=1")]
    assert train_many(folder, plan) == [0] * len(plan)
    return folder


def test_all_shipped_jsons_are_tested() -> None:
    assert sorted(path.stem for path in resource_dir("ds_configs").glob("*.json")) == sorted([*JSONS, NEEDS_LIBAIO])


@pytest.mark.parametrize("name", JSONS)
def test_losses_match_those_of_plain_data_parallelism(name: str, runs: Path) -> None:
    assert [record["step"] for record in metrics(runs / name)] == list(range(1, STEPS + 1))
    # Each stage sums over the two ranks in a different order, and DeepSpeed's CPU Adam uses a different formula:
    # fp32 rounding differences, 6e-8 of the loss, which grow over the steps.
    assert losses(runs / name) == pytest.approx(losses(runs / "zero0"), rel=2e-6)
    assert losses(runs / name)[-1] < losses(runs / name)[0] - 0.05
    resolved = json.loads((runs / name / "ds_config.json").read_text())
    assert resolved["gradient_accumulation_steps"] == 2
    assert "bf16" not in resolved and "fp16" not in resolved  # fp32 on a CPU


@pytest.mark.parametrize("name", JSONS)
def test_a_stop_and_resume_leaves_the_metrics_bit_identical(name: str, runs: Path) -> None:
    whole, stopped = metrics(runs / name), metrics(runs / f"{name}_stopped")
    for key in ("step", "loss", "loss_of_code", "loss_of_en", "loss_of_zh", "lr", "grad_norm"):
        assert [record.get(key) for record in stopped] == [record.get(key) for record in whole], key
    events = [record["event"] for record in read_records(runs / f"{name}_stopped" / "events.jsonl")]
    assert (
        "loss on fixed tokens differs by 0.0e+00" in (runs / f"{name}_stopped" / "logs" / "rank_0000.log").read_text()
    )
    words = [event for event in events if event in ("started", "stopped", "done")]
    assert words[:4] == ["started", "stopped", "started", "done"]


@pytest.mark.parametrize("name", JSONS)
def test_communication_takes_less_time_than_the_parts_of_a_step(name: str, runs: Path) -> None:
    for record in metrics(runs / name):
        parts = sum(record[f"{part}_seconds"] for part in ("forward", "backward", "optimizer"))
        assert 0 < record["communication_seconds"] < parts


@pytest.mark.parametrize("name", ["zero0", "zero2", "zero3"])
def test_the_logits_of_an_export_match_the_model(name: str, runs: Path) -> None:
    """One JSON for each layout of DeepSpeed: replicas, flat partitions, partitions of each parameter."""
    report = export_checkpoint(runs / name, dtype="bf16" if name == "zero2" else "fp32")
    assert report.step == STEPS
    assert report.verdict.max_relative_difference <= 1e-4
    assert len(report.verdict.generated) == 3
    assert report.folder == runs / name / "exports" / LAST_CHECKPOINT


@pytest.mark.parametrize("name", JSONS)
def test_weights_read_from_a_checkpoint_are_close_to_the_reference(name: str, runs: Path) -> None:
    ours = read_weights(runs / name / "checkpoints" / LAST_CHECKPOINT)
    reference = read_weights(runs / "zero0" / "checkpoints" / LAST_CHECKPOINT)
    assert ours.keys() == reference.keys()
    for key, tensor in reference.items():
        # Adam divides by the root of tiny second moments: if a gradient is mostly rounding error, so is the update of
        # its weight. Therefore norms are compared instead of single weights (measured: at most 1.4e-5).
        assert (ours[key] - tensor).norm() < 1e-4 * tensor.norm(), key


@pytest.mark.parametrize(("name", "other"), CHANGES)
def test_a_run_continues_with_another_json(name: str, other: str, runs: Path) -> None:
    changed = metrics(runs / f"{name}_to_{other}")
    assert [record["step"] for record in changed] == list(range(11, STEPS + 1))
    assert losses(runs / f"{name}_to_{other}") == pytest.approx(losses(runs / name)[10:], rel=2e-6)
    log = (runs / f"{name}_to_{other}" / "logs" / "rank_0000.log").read_text()
    assert "resumed from step_00000010" in log


@pytest.mark.parametrize("run", ["bf16", "bf16_zero1"])
def test_forced_bf16_accumulates_every_micro_batch_once_in_fp32(run: str, runs: Path) -> None:
    resolved = json.loads((runs / run / "ds_config.json").read_text())
    assert resolved["bf16"]["enabled"] is True
    assert resolved["data_types"]["grad_accum_dtype"] == "fp32"
    assert resolved["communication_data_type"] == "fp32"
    dtypes = {"compute": "bf16", "accumulation": "fp32", "communication": "fp32", "master": "fp32"}
    assert json.loads((runs / run / "environment.json").read_text())["dtypes"] == dtypes
    line = "dtypes: compute bf16, accumulation fp32, communication fp32, master weights fp32"
    assert line in (runs / run / "logs" / "rank_0000.log").read_text()
    first, reference = metrics(runs / run)[0], metrics(runs / "zero0")[0]
    assert first["loss"] == pytest.approx(reference["loss"], rel=2e-3)
    # bf16 has 8 bits of mantissa: products are off by up to 0.4 %, sums by less. A micro-batch that is added twice
    # would change the norm by half.
    assert first["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2e-2)


def test_a_bf16_checkpoint_of_stage_1_can_be_exported(runs: Path) -> None:
    """DeepSpeed uses BF16_Optimizer in this case."""
    report = export_checkpoint(runs / "bf16_zero1", dtype="bf16")
    assert report.verdict.max_relative_difference <= 1e-4


def test_one_rank_gives_the_same_losses_as_two(
    runs: Path, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    result = train(tmp_path, small_corpus, small_tokenizer, "deepspeed=zero1", f"train.steps={STEPS}", ranks=1)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path) == pytest.approx(losses(runs / "zero0"), rel=2e-6)
    assert {record["communication_seconds"] for record in metrics(tmp_path)} == {0.0}


def test_one_rank_resumes_from_a_checkpoint_of_two(
    runs: Path, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    start = runs / "zero2_stopped" / "checkpoints" / "step_00000010"
    more = ("deepspeed=zero3", f"train.steps={STEPS}", "--resume", str(start))
    result = train(tmp_path / "run", small_corpus, small_tokenizer, *more, ranks=1)
    assert result.returncode == 0, result.stderr
    assert "resumed from step_00000010, saved by 2 ranks under zero2 (fp32)" in result.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(runs / "zero2")[10:], rel=2e-6)
    ends = [open_checkpoint(run / "checkpoints" / LAST_CHECKPOINT) for run in (tmp_path / "run", runs / "zero2")]
    assert ends[0].data_state == ends[1].data_state
    assert [end.trainer[LAST_RATE] for end in ends] == [ends[0].trainer[LAST_RATE]] * 2


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_plain_launchers_can_start_the_script(
    launcher: str, runs: Path, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    """Test `deepspeed --hostfile H launch/pretrain.py --deepspeed zero2 ...`, without `z2all train`."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("127.0.0.1 slots=2\n")
    this_node = ["--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]  # the only node
    commands = {
        "deepspeed": ["-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), *this_node],
        "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2"],
    }
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, f"train.steps={STEPS}")
    command = [sys.executable, *commands[launcher]]
    result = launch_script(SCRIPT, "--deepspeed", "zero2", *arguments, launcher=command)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "run") == losses(runs / "zero2")
