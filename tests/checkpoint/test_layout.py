"""Checkpoint folders, which count only if complete: sealing, damage, and a process killed at random times."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.making import FILES, make, names, seal, write_temporary
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.layout import Checkpoint, find_latest, open_checkpoint, remove_leftovers

# Sealing and finding


def test_a_sealed_checkpoint_is_found_and_read(tmp_path: Path) -> None:
    older, newer = make(tmp_path, 9, 10)
    assert names(tmp_path) == ["step_00000009", "step_00000010"]
    assert find_latest(tmp_path) == (Checkpoint(newer, 10), [])
    assert Checkpoint(newer, 10).trainer == {"step": 10, "dtype": "fp32"}
    assert Checkpoint(older, 9).data_state == {"lanes": [9]}
    manifest = json.loads((newer / layout.MANIFEST).read_text())
    assert manifest["step"] == 10
    assert sorted(manifest["files"]) == sorted([*FILES, "state/index.json", "trainer.json", "data_state.json"])
    assert manifest["files"]["rng_rank_0000.pt"] == {
        "bytes": 2,
        "checksum": "fcfc282496b4d1c0f46d166d828dd9ea3c5ce2e1245af10baa97f121ea5433b2",
    }


def test_a_folder_without_checkpoints_is_no_error(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "missing") == (None, [])
    assert find_latest(tmp_path) == (None, [])
    for other in ("step_x", "stepping", "step_1.bak"):
        (tmp_path / other).mkdir()
    (tmp_path / "step_00000001").write_text("a file")
    assert find_latest(tmp_path) == (None, [])


def test_unsealed_folders_are_not_checkpoints(tmp_path: Path) -> None:
    write_temporary(tmp_path, 1).rename(tmp_path / "step_00000001")
    write_temporary(tmp_path, 2)
    line = "checkpoint step_00000001 skipped: no MANIFEST.json: it was never finished"
    assert find_latest(tmp_path) == (None, [line])


def test_sealing_a_step_again_replaces_the_leftovers_of_a_crash(tmp_path: Path) -> None:
    (tmp_path / "step_00000005" / "state").mkdir(parents=True)
    (torn,) = make(tmp_path, 5)
    (torn / layout.MANIFEST).unlink()
    (torn / "rng_rank_0007.pt").touch()
    (again,) = make(tmp_path, 5)
    assert again == torn
    assert not (again / "rng_rank_0007.pt").exists()
    assert find_latest(tmp_path) == (Checkpoint(again, 5), [])


# Damage


def tear(path: Path) -> str:
    (path / layout.MANIFEST).unlink()
    return "no MANIFEST.json: it was never finished"


def lose_a_file(path: Path) -> str:
    (path / "state/rank_00000.safetensors").unlink()
    return "state/rank_00000.safetensors is missing"


def lengthen(path: Path) -> str:
    with (path / "rng_rank_0000.pt").open("ab") as file:
        file.write(b"more")
    return "rng_rank_0000.pt has 5 bytes instead of 1"


def flip(path: Path) -> str:
    content = bytearray((path / "state/rank_00000.safetensors").read_bytes())
    content[17] ^= 1
    (path / "state/rank_00000.safetensors").write_bytes(content)
    return "state/rank_00000.safetensors does not match its checksum"


def empty_manifest(path: Path) -> str:
    (path / layout.MANIFEST).write_bytes(b"")
    return "MANIFEST.json is not readable (JSONDecodeError)"


def foreign_manifest(path: Path) -> str:
    (path / layout.MANIFEST).write_text('{"files": {"trainer.json": {"size": 5}}}')
    return "MANIFEST.json is not readable (KeyError)"


def manifest_of_another_kind(path: Path) -> str:
    (path / layout.MANIFEST).write_text('["files"]')
    return "MANIFEST.json is not readable (TypeError)"


def change_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((path / layout.MANIFEST).read_text())
    change(content)
    (path / layout.MANIFEST).write_text(json.dumps(content))


def strike_an_altered_file(path: Path) -> str:
    flip(path)
    change_manifest(path, lambda content: content["files"].pop("state/rank_00000.safetensors"))
    return "state/rank_00000.safetensors is not in MANIFEST.json"


def strike_a_required_file(path: Path) -> str:
    (path / "trainer.json").unlink()
    change_manifest(path, lambda content: content["files"].pop("trainer.json"))
    return "MANIFEST.json does not list trainer.json"


def hollow_out(path: Path) -> str:
    """Remove the state and random generators of a rank, and strike them from the manifest."""
    gone = ("state/rank_00000.safetensors", "rng_rank_0000.pt")
    for name in gone:
        (path / name).unlink()
    change_manifest(path, lambda content: [content["files"].pop(name) for name in gone])
    return "MANIFEST.json does not list state/rank_00000.safetensors"


def copy_of_another_step(path: Path) -> str:
    shutil.rmtree(path)
    (other,) = make(path.parent / "other", 3)
    shutil.copytree(other, path)
    change_manifest(path, lambda content: content.update(step=4))
    return "trainer.json is of step 3"


def strike_all_files(path: Path) -> str:
    change_manifest(path, lambda content: content["files"].clear())
    return "MANIFEST.json does not list trainer.json"


def claim_another_step(path: Path) -> str:
    change_manifest(path, lambda content: content.update(step=99))
    return "MANIFEST.json is of step 99"


def list_a_file_outside(path: Path) -> str:
    (path.parent / "outside").write_text("outside")
    entry = {"bytes": 7, "checksum": "0"}
    change_manifest(path, lambda content: content["files"].update({"../outside": entry}))
    return "MANIFEST.json lists ../outside, which is not a file of a checkpoint"


def replace_a_file_by_a_link(path: Path) -> str:
    (path / "trainer.json").rename(path.parent / "elsewhere")
    (path / "trainer.json").symlink_to(path.parent / "elsewhere")
    return "trainer.json is missing"


DAMAGES = [
    *(tear, lose_a_file, lengthen, flip, empty_manifest, foreign_manifest, manifest_of_another_kind),
    *(strike_an_altered_file, strike_a_required_file, strike_all_files, claim_another_step, list_a_file_outside),
    *(replace_a_file_by_a_link, hollow_out, copy_of_another_step),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    damage: Callable[[Path], str], tmp_path: Path
) -> None:
    before, newest = make(tmp_path, 3, 4)
    what = damage(newest)
    assert find_latest(tmp_path) == (Checkpoint(before, 3), [f"checkpoint step_00000004 skipped: {what}"])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(newest)
    assert str(caught.value) == f"checkpoint {newest}: {what}. Give a complete checkpoint."


@pytest.mark.parametrize(
    ("trainer", "missing"),
    [
        ({}, None),
        ({"world_size": 1}, None),
        ({"world_size": 2}, "rng_rank_0001.pt"),
        ({"world_size": 2, "imported_from": "global_step4"}, None),
        ({"ranks": 3, "imported_from": "global_step4"}, "state/rank_00002.safetensors"),
        ({"ranks": 3, "world_size": 1}, "state/rank_00002.safetensors"),
        ({"world_size": -1}, None),
    ],
)
def test_the_files_of_every_rank_are_required(trainer: dict[str, Any], missing: str | None, tmp_path: Path) -> None:
    write_temporary(tmp_path, 4, **trainer)
    problem = layout.why_damaged(seal(tmp_path, 4), verify_checksums=True)
    assert problem == (f"MANIFEST.json does not list {missing}" if missing else None)


def test_without_checksums_only_sizes_are_compared(tmp_path: Path) -> None:
    before, newest = make(tmp_path, 3, 4)
    flip(newest)
    assert find_latest(tmp_path, verify_checksums=False) == (Checkpoint(newest, 4), [])
    lengthen(newest)
    found, skipped = find_latest(tmp_path, verify_checksums=False)
    assert found == Checkpoint(before, 3)
    assert len(skipped) == 1


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not tear])
def test_only_damaged_checkpoints_are_an_error_and_not_a_new_start(
    damage: Callable[[Path], str], tmp_path: Path
) -> None:
    older, newer = make(tmp_path, 3, 4)
    lose_a_file(older)
    what = damage(newer)
    with pytest.raises(CheckpointError) as caught:
        find_latest(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: none of 2 checkpoints can be loaded (checkpoint step_00000004 skipped: {what})."
        " Restore one from a copy, or set another run_dir to start over."
    )


def test_an_unfinished_newest_checkpoint_does_not_hide_damaged_older_ones(tmp_path: Path) -> None:
    older, newer = make(tmp_path, 3, 4)
    lose_a_file(older)
    tear(newer)
    with pytest.raises(CheckpointError, match=r"none of 1 checkpoints can be loaded"):
        find_latest(tmp_path)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    make(folder, 3, 4)
    return folder


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_detected(two_checkpoints: Path, data: st.DataObject) -> None:
    newest = two_checkpoints / "step_00000004"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) == 7
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(whole)
    changed[place] ^= 1 << bit
    file.write_bytes(changed)
    try:
        found, skipped = find_latest(two_checkpoints)
        assert found
        if file.name != layout.MANIFEST:
            assert (found.step, len(skipped)) == (3, 1)
        elif found.step == 4:  # the flip changed nothing that is read, such as white space
            assert json.loads(changed)["files"] == json.loads(whole)["files"]
    finally:
        file.write_bytes(whole)
    assert find_latest(two_checkpoints) == (Checkpoint(newest, 4), [])


# Opening by path


def test_only_complete_checkpoints_with_a_step_name_open_by_path(tmp_path: Path) -> None:
    (path,) = make(tmp_path, 7)
    assert open_checkpoint(path) == Checkpoint(path, 7)
    with pytest.raises(CheckpointError, match=r"step_00000008: no such folder\. Give a complete checkpoint\."):
        open_checkpoint(tmp_path / "step_00000008")
    with pytest.raises(CheckpointError, match=r"no MANIFEST\.json"):
        open_checkpoint(tmp_path)
    renamed = path.rename(tmp_path / "best")
    with pytest.raises(CheckpointError, match=r"best: not a step_NNNNNNNN folder\."):
        open_checkpoint(renamed)


# Leftovers


def test_leftovers_of_interrupted_saves_are_removed(tmp_path: Path) -> None:
    (sealed,) = make(tmp_path, 1)
    write_temporary(tmp_path, 2)
    write_temporary(tmp_path, 3)
    early = [layout.temporary_path(tmp_path, 4, "0123abcd"), layout.temporary_path(tmp_path, 5, "0123abcd")]
    early[0].mkdir()  # killed before the first file
    (early[1] / "state").mkdir(parents=True)
    (tmp_path / "step_00000006" / "state").mkdir(parents=True)
    (tmp_path / "step_00000006" / "state" / "opaque_rank_00000.pt").touch()
    found = [*(path.name for path in early), ".tmp_step_00000002", ".tmp_step_00000003", "step_00000006"]
    assert remove_leftovers(tmp_path) == sorted(found)
    assert names(tmp_path) == [sealed.name]
    assert remove_leftovers(tmp_path) == []


def test_folders_of_other_programs_are_no_leftovers(tmp_path: Path) -> None:
    files = [("step_1000", "model.bin"), ("step_00000007", "notes.txt"), (".tmp_step_00000008", "x.pt")]
    files += [("step_00001000/state", name) for name in ("params.msgpack", "pytorch_model.bin", "part_0.pt")]
    for name, file in files:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_text("precious")
    for name in ("step_00002000", "step_00003000/state", ".tmp_step_other", ".tmp_step_00000008_new"):
        (tmp_path / name).mkdir(parents=True)
    write_temporary(tmp_path / "elsewhere", 9)
    (tmp_path / "step_00000009").symlink_to(layout.temporary_path(tmp_path / "elsewhere", 9))
    before = names(tmp_path)
    assert remove_leftovers(tmp_path) == [] and names(tmp_path) == before
    write_temporary(tmp_path, 7)
    with pytest.raises(CheckpointError, match="is not a checkpoint of ours"):
        seal(tmp_path, 7)
    assert (tmp_path / "step_00000007" / "notes.txt").read_text() == "precious"


# Kills of a real process


SAVE_FOR_EVER = """
import json, os, sys
from pathlib import Path
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.disk_file import text
from z2all_ds.checkpoint.retention import Retention, prune
from z2all_ds.checkpoint.writer import Job, write_checkpoint

checkpoints = Path(sys.argv[1])
latest, _ = layout.find_latest(checkpoints)
layout.remove_leftovers(checkpoints)
step = latest.step if latest else 0
while True:
    step += 1
    part = lambda file: file.write(os.urandom(20_000))
    files = {f"state/opaque_rank_{number:05d}.pt": part for number in range(3)}
    names = (*layout.REQUIRED, "state/rank_00000.safetensors", "rng_rank_0000.pt")
    files |= dict.fromkeys(names, text(json.dumps({"step": step})))
    assert write_checkpoint(Job(str(checkpoints), step), files) is None
    os.write(1, f"{step}\\n".encode())
    prune(checkpoints, Retention(keep_last=2), step)
"""


def test_a_kill_at_any_time_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(20240229)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    sealed_so_far = 0
    for _ in range(15):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(checkpoints)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            reported = [process.stdout.readline() for _ in range(moments.randint(0, 3))]
            time.sleep(moments.uniform(0, 0.02 if reported else 0.15))  # somewhere inside the next save
            process.send_signal(signal.SIGKILL)
            reported += process.stdout.readlines()
        assert process.returncode == -signal.SIGKILL
        steps = [int(line) for line in reported if line.endswith("\n")]
        assert steps == list(range(sealed_so_far + 1, sealed_so_far + 1 + len(steps)))
        sealed_so_far += len(steps)

        # A folder with a manifest never has missing or incomplete files.
        finished = [path.parent for path in checkpoints.glob(f"step_*/{layout.MANIFEST}")]
        assert [layout.why_damaged(path, verify_checksums=True) for path in finished] == [None] * len(finished)
        latest, _ = find_latest(checkpoints)
        if latest is None:
            assert sealed_so_far == 0
            continue
        # Sealed and reported, or sealed just before the process could report it.
        assert latest.step in (sealed_so_far, sealed_so_far + 1)
        sealed_so_far = latest.step
        assert latest.trainer == {"step": latest.step}
        assert names(latest.path) == ["MANIFEST.json", "data_state.json", "rng_rank_0000.pt", "state", "trainer.json"]
        assert open_checkpoint(latest.path) == latest
        if latest.step > 1:
            assert open_checkpoint(checkpoints / layout.step_name(latest.step - 1)).step == latest.step - 1
    assert sealed_so_far > 10


def test_a_start_from_a_step_before_existing_checkpoints_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 2, 4)
    layout.require_no_later(tmp_path, 4)
    with pytest.raises(CheckpointError, match="step_00000004"):
        layout.require_no_later(tmp_path, 2)
    with pytest.raises(CheckpointError, match="start from step 0"):
        layout.require_no_later(tmp_path, 0)
    (tmp_path / "step_00000004" / layout.MANIFEST).unlink()
    layout.require_no_later(tmp_path, 2)
    assert remove_leftovers(tmp_path) == ["step_00000004"]
    assert names(tmp_path) == ["step_00000002"]
