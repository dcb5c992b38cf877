"""Tests of imports from DeepSpeed's own save_checkpoint with several ranks: folders of any stage and offload, in fp32
or bf16, are imported bit for bit and resume, in fp32 under another shape."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zero.state.states import assert_same_state
from tests.zero.state.test_shapes import JSONS, SAVED_AFTER, launch
from z2all_ds.base.resources import find_named_file
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.state_files import StateReader
from z2all_ds.zero.op_builds import prebuild
from z2all_ds.zero.state.deepspeed_folders import DeepSpeedFolder
from z2all_ds.zero.state.import_deepspeed import import_folder

pytestmark = pytest.mark.extended

RANKS = [2, 3]
"""test_deepspeed_folders.py tests one rank."""
BF16 = {"overrides": ["train.precision=bf16"]}
SAVED: dict[str, dict[str, Any]] = {
    **{name: {"deepspeed": name} for name in JSONS},
    "zero1_bf16": {"deepspeed": "zero1", **BF16},
    "zero2_bf16": {"deepspeed": "zero2", **BF16},
    "zero3_bf16": {"deepspeed": "zero3", **BF16},
}
CHANGED = {
    # Round-robin order, several shards per group, and gaps change the positions of parameters in the files.
    "zero2_in_turn": ("zero2", {"round_robin_gradients": True}),
    "zero3_in_parts": ("zero3", {"sub_group_size": 1000}),
    "zero2_with_gaps_bf16": ("zero2", {"parameter_alignment": True}),
}
CASES = [
    (name, ranks)
    for name in (*SAVED, *CHANGED)
    for ranks in RANKS
    if ranks < 3 or (name in ("zero2", "zero3", *CHANGED) and not name.endswith("bf16"))
]  # fmt: skip
RESUMED_UNDER = dict(zip(JSONS, JSONS[3:] + JSONS[:3], strict=True))
RESUMED_UNDER |= {"zero2_in_turn": "zero0", "zero3_in_parts": "zero1"}
"""Cases in bf16 resume under their own shape, where all later losses are bit-identical."""


def label(name: str, ranks: int) -> str:
    return f"{name}_on_{ranks}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Save with two and three ranks in both formats, import, resume with two ranks; return the folder and outcomes."""
    folder = tmp_path_factory.mktemp("imported")
    prebuild(["deepspeed_shm_comm", "cpu_adam"])
    settings = dict(SAVED)
    for name, (shipped, changes) in CHANGED.items():
        content = json.loads(find_named_file(shipped, "DeepSpeed JSON", "ds_configs", ".json").read_text())
        content["zero_optimization"] |= changes
        (folder / f"{name}.json").write_text(json.dumps(content))
        settings[name] = {"deepspeed": str(folder / f"{name}.json"), **(BF16 if name.endswith("bf16") else {})}
    found: dict[str, Any] = {}
    for ranks in RANKS:
        tasks = [
            {"name": label(name, ranks), "save_after": SAVED_AFTER, "by_deepspeed": True, **settings[name]}
            for name, of_case in CASES
            if of_case == ranks
        ]
        found |= launch(folder, ranks, "save", tasks)
    continued = []
    for name, ranks in CASES:
        saved = folder / found[label(name, ranks)]["saved"]
        source = DeepSpeedFolder(folder / label(name, ranks) / "by_deepspeed")
        place, data_state = folder / "imported" / label(name, ranks), layout.Checkpoint(saved, SAVED_AFTER).data_state
        made = import_folder(source, place, StateReader(saved).shapes, data_state, seed=3)
        under = settings[name] if name.endswith("bf16") else {"deepspeed": RESUMED_UNDER[name]}
        continued.append({"name": f"after_{label(name, ranks)}", "start": str(made.relative_to(folder)), **under})
    return folder, found | launch(folder, 2, "continue", continued)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_imported_state_is_bit_identical(name: str, ranks: int, outcomes: tuple[Path, dict[str, Any]]) -> None:
    folder, found = outcomes
    saved = folder / found[label(name, ranks)]["saved"]
    imported = folder / "imported" / label(name, ranks) / saved.name
    assert layout.why_damaged(imported, verify_checksums=True) is None
    assert_same_state(saved, imported)
    assert_same_state(saved, folder / f"after_{label(name, ranks)}" / "again" / saved.name)
    index, trainer = StateReader(imported).index, layout.open_checkpoint(imported).trainer
    assert index["steps_taken"] == [SAVED_AFTER] * 2
    assert index["optimizer"] == ("ds_cpu_adam" if "offload" in name else "adamw")
    partitions = 1 if name == "zero0" else ranks
    assert (index["ranks"], trainer["world_size"]) == (partitions, partitions)
    assert trainer["zero_stage"] == int(name.removeprefix("zero")[0])
    assert trainer["offload_optimizer"] == ("offload" in name)
    assert trainer["dtype"] == ("bf16" if name.endswith("bf16") else "fp32")


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_an_imported_run_continues_like_the_uninterrupted_one(
    name: str, ranks: int, outcomes: tuple[Path, dict[str, Any]]
) -> None:
    _, found = outcomes
    unbroken = found[label(name, ranks)]["losses"][SAVED_AFTER:]
    after = found[f"after_{label(name, ranks)}"]
    if name.endswith("bf16"):  # resumed under the same shape
        assert after["losses"] == unbroken
    else:
        assert after["losses"] == pytest.approx(unbroken, rel=1e-6)
    assert after["counts"] == found[label(name, ranks)]["counts"]


def test_the_data_state_is_written_and_unknown_values_are_left_out(
    outcomes: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = outcomes
    source = DeepSpeedFolder(folder / "zero1_on_2" / "by_deepspeed" / f"global_step{SAVED_AFTER}")  # tag folder
    made = import_folder(source, tmp_path, source.shapes, {"position": 24}, seed=3)
    checkpoint = layout.open_checkpoint(made)
    assert (checkpoint.step, checkpoint.data_state) == (SAVED_AFTER, {"position": 24})
    assert json.loads((made / "trainer.json").read_text())["imported_from"] == f"global_step{SAVED_AFTER}"
    assert not {"probe", "guard", "lr_of_last_step"} & checkpoint.trainer.keys()
