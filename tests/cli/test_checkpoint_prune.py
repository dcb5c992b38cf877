"""`z2all checkpoint prune` in real processes: deleted and kept checkpoints, the reasons, and refusal during a job."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.making import make_validated, names, write_temporary
from tests.helpers.command import one_line, z2all
from tests.helpers.training import train
from z2all_ds.base.console import human_bytes
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout, memory
from z2all_ds.checkpoint.pruning import describe, prune_run
from z2all_ds.checkpoint.retention import held

LOSSES = {100: 3.0, 200: 2.31, 300: None, 400: 2.9, 500: None, 600: 2.8}
RUN_YAML = "checkpoint: {keep_last: 2, keep_every: 300, keep_best: 1}\nvalidation: {corpus: held_out}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    make_validated(folder.checkpoints, LOSSES)
    folder.config.write_text(RUN_YAML)
    return folder


def steps(folder: RunFolder) -> list[int]:
    return [layout.step_of(path) for path in layout.step_folders(folder.checkpoints)]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_prune_deletes_checkpoints_and_says_why_the_others_are_kept(run: RunFolder, tmp_path: Path) -> None:
    going = sum(size_of(run.checkpoints / layout.step_name(step)) for step in (100, 400))
    leftover = write_temporary(run.checkpoints, 700)
    going += size_of(leftover)
    dry = z2all("checkpoint", "prune", run.root, "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    head, *rows, left, summary = dry.stdout.splitlines()
    assert head.split() == ["step", "size"]
    assert [(row.split()[0], row.split("  ")[-1]) for row in rows] == [
        ("100", "delete"),
        ("200", "keep: best 2.31"),
        ("300", "keep: every 300"),
        ("400", "delete"),
        ("500", "keep: last"),
        ("600", "keep: last, every 300"),
    ]
    assert left == ".tmp_step_00000700: delete, the remains of an interrupted save"
    assert summary == f"{going / 1024:.1f} KiB would be freed by deleting 2 of 6 checkpoints"
    assert steps(run) == list(LOSSES) and leftover.is_dir()
    assert not (run.root / ".lock").exists()

    done = z2all("checkpoint", "prune", run.root, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:-1] == dry.stdout.splitlines()[:-1]
    assert done.stdout.splitlines()[-1] == f"{going / 1024:.1f} KiB freed: deleted 2 of 6 checkpoints"
    assert names(run.checkpoints) == [layout.step_name(step) for step in (200, 300, 500, 600)]
    again = json.loads(z2all("checkpoint", "prune", run.root, "--json", cwd=tmp_path).stdout)
    assert (again["freed_bytes"], again["leftovers"], len(again["checkpoints"])) == (0, [], 4)


def test_options_override_the_settings_of_the_run(run: RunFolder, tmp_path: Path) -> None:
    asked = ("--keep-last", "3", "--keep-every", "0", "--keep-best", "2", "--json")
    answer = json.loads(z2all("checkpoint", "prune", run.root, *asked, cwd=tmp_path).stdout)
    assert answer["retention"] == {"keep_last": 3, "keep_every": 0, "keep_best": 2}
    fates = {one["step"]: one["reasons"] for one in answer["checkpoints"]}
    assert fates == {100: [], 200: ["best 2.31"], 300: [], 400: ["last"], 500: ["last"], 600: ["last", "best 2.8"]}
    assert [one["step"] for one in answer["checkpoints"] if not one["stays"]] == [100, 300]
    assert answer["freed_bytes"] == sum(one["size_bytes"] for one in answer["checkpoints"] if not one["stays"]) > 0
    assert steps(run) == [200, 400, 500, 600]


def test_without_run_yaml_the_defaults_are_used(run: RunFolder, tmp_path: Path) -> None:
    run.config.unlink()
    answer = z2all("checkpoint", "prune", run.root, "--keep-best", "0", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert steps(run) == [500, 600]
    answer = z2all("checkpoint", "prune", run.root, "--keep-best", "1", "--keep-last", "1", cwd=tmp_path)
    assert answer.returncode == 2 and "--keep-last" in answer.stderr


def test_keep_best_without_validation_losses_is_reported(run: RunFolder, tmp_path: Path) -> None:
    shutil.rmtree(run.checkpoints)
    make_validated(run.checkpoints, {700: None, 800: None})
    answer = z2all("checkpoint", "prune", run.root, cwd=tmp_path)
    assert "keep_best=1: no checkpoint has a validation loss" in answer.stdout.splitlines()


def test_prune_is_refused_while_a_job_holds_the_lock(run: RunFolder, tmp_path: Path) -> None:
    lock = run.acquire_lock()
    try:
        line = one_line(z2all("checkpoint", "prune", run.root, cwd=tmp_path), 4)
        assert line.endswith("another job is writing to it. Stop that job or set a different run_dir.")
        assert steps(run) == list(LOSSES)
        assert z2all("checkpoint", "prune", run.root, "--dry-run", cwd=tmp_path).returncode == 0  # a dry run is allowed
    finally:
        os.close(lock)


def test_a_checkpoint_that_is_being_read_is_kept_until_the_next_prune(run: RunFolder, tmp_path: Path) -> None:
    with held(run.checkpoints / "step_00000100"):
        answer = json.loads(z2all("checkpoint", "prune", run.root, "--json", cwd=tmp_path).stdout)
    first = answer["checkpoints"][0]
    assert (first["stays"], first["reasons"]) == (True, ["another process is reading it, or it cannot be deleted"])
    assert answer["freed_bytes"] == answer["checkpoints"][3]["size_bytes"]
    assert steps(run) == [100, 200, 300, 500, 600]
    z2all("checkpoint", "prune", run.root, cwd=tmp_path)
    assert steps(run) == [200, 300, 500, 600]


def test_older_checkpoints_are_kept_if_the_newest_ones_have_flipped_bits(run: RunFolder, tmp_path: Path) -> None:
    """A check of file sizes would not notice the flipped bits and would leave no checkpoint that can be loaded."""
    for step in (500, 600):
        file = run.checkpoints / layout.step_name(step) / "state" / "rank_00000.safetensors"
        content = bytearray(file.read_bytes())
        content[5] ^= 1
        file.write_bytes(content)
    asked = ("--keep-every", "0", "--keep-best", "0", "--json")
    answer = json.loads(z2all("checkpoint", "prune", run.root, *asked, cwd=tmp_path).stdout)
    assert steps(run) == [300, 400, 500, 600]
    assert answer["checkpoints"][-1]["reasons"] == ["later than step_00000400"]


def test_prune_fails_and_deletes_nothing_if_no_checkpoint_can_be_loaded(run: RunFolder, tmp_path: Path) -> None:
    for path in layout.step_folders(run.checkpoints):
        (path / "trainer.json").unlink()
    answer = z2all("checkpoint", "prune", run.root, cwd=tmp_path)
    assert answer.returncode == 4 and "none of 6 checkpoints can be loaded" in answer.stderr
    assert steps(run) == list(LOSSES)


def test_a_missing_run_folder_is_refused_and_not_created(tmp_path: Path) -> None:
    line = one_line(z2all("checkpoint", "prune", tmp_path / "nothing", cwd=tmp_path), 4)
    assert line.endswith("has no checkpoints. Give a run folder.")
    assert not (tmp_path / "nothing").exists()


def test_a_real_run_keeps_the_checkpoints_that_its_settings_require(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "real")
    more = ("deepspeed=zero1", "train.steps=6", "checkpoint.every_steps=1", "checkpoint.keep_every=3")
    result = train(folder.root, small_corpus, small_tokenizer, *more, ranks=1)
    assert result.returncode == 0, result.stderr
    assert steps(folder) == [3, 5, 6]
    answer = z2all("checkpoint", "prune", folder.root, "--keep-every", "0", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert steps(folder) == [5, 6]
    verified = z2all("checkpoint", "verify", folder.root, cwd=tmp_path)
    assert verified.returncode == 0, verified.stderr


def test_snapshots_of_a_killed_run_whose_folder_was_moved_are_freed(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "memory")
    memory.SHARED_MEMORY.mkdir()
    snapshots, of_another = memory.SnapshotFolder("1"), memory.SnapshotFolder("2")
    snapshots.create(run.root)
    of_another.create(tmp_path)
    memory.write_lineage(run, snapshots)
    moved = run.root.rename(tmp_path / "moved")
    size = snapshots.size_bytes
    assert size > 0 and prune_run(moved, dry_run=False, keep_last=6).freed_memory_bytes == 0
    dry = prune_run(moved, dry_run=True, memory_too=True, keep_last=6)
    assert (dry.freed_bytes, dry.freed_memory_bytes) == (size, size) and snapshots.path.exists()
    done = prune_run(moved, dry_run=False, memory_too=True, keep_last=6)
    assert (done.freed_bytes, done.freed_memory_bytes) == (size, size) and not snapshots.path.exists()
    *_, line = describe(done)
    assert line == f"{human_bytes(size)} freed: deleted 0 of 6 checkpoints and {human_bytes(size)} of snapshots"
    assert of_another.path.exists()
    assert prune_run(moved, dry_run=False, memory_too=True, keep_last=6).freed_memory_bytes == 0


def test_in_memory_snapshots_of_a_killed_run_are_listed_and_freed(run: RunFolder, tmp_path: Path) -> None:
    line = memory.SnapshotFolder(memory.new_lineage())
    try:
        line.create(run.root)
        shutil.copytree(run.checkpoints / layout.step_name(600), line.slot(0), dirs_exist_ok=True)
        line.finish(0, 650, {})
        memory.write_lineage(run, line)
        listed = json.loads(z2all("checkpoint", "list", run.root, "--json", cwd=tmp_path).stdout)
        assert [(one["step"], one["in_memory"]) for one in listed][-2:] == [(600, False), (650, True)]
        verified = json.loads(z2all("checkpoint", "verify", run.root, "--json", cwd=tmp_path).stdout)
        assert verified[-1]["problem"] == "READY does not list trainer.json"
        assert z2all("checkpoint", "prune", run.root, cwd=tmp_path).returncode == 0
        assert z2all("checkpoint", "prune", run.root, "--memory", "--dry-run", cwd=tmp_path).returncode == 0
        assert [snapshot.step for snapshot in line.snapshots()] == [650]
        assert z2all("checkpoint", "prune", run.root, "--memory", cwd=tmp_path).returncode == 0
        assert not line.path.exists()
    finally:
        line.remove()
