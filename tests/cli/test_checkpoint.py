"""`z2all checkpoint list`, `show` and `verify` on the checkpoints of a real run."""

import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.making import seal
from tests.helpers.command import one_line, z2all
from tests.helpers.training import train
from z2all_ds.checkpoint import layout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("looked_at") / "run"
    more = ("deepspeed=zero1", "train.steps=4", "checkpoint.every_steps=2")
    assert train(folder, small_corpus, small_tokenizer, *more, ranks=1).returncode == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, which the test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_list_and_show_describe_the_checkpoints_of_a_run(run: Path, tmp_path: Path) -> None:
    answer = z2all("checkpoint", "list", str(run), cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    head, *rows = answer.stdout.splitlines()
    assert head.split() == ["step", "size", "saved", "by", "optimizer", "sample", "health"]
    assert [row.split()[0] for row in rows] == ["2", "4"]
    assert all("1 x zero1, fp32" in row and "adamw" in row and row.endswith("complete") for row in rows)
    newest = json.loads(z2all("checkpoint", "show", "--json", str(run), cwd=tmp_path).stdout)[0]
    assert (newest["step"], newest["sample"], newest["states"]) == (4, 32, ["exp_avg", "exp_avg_sq"])
    path = run / "checkpoints" / "step_00000004"
    assert newest["size_bytes"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    # fp32 master weights and two moments; all other files are small
    assert 12 * newest["parameters"] < newest["size_bytes"] < 12 * newest["parameters"] + 60_000
    shown = z2all("checkpoint", "show", str(run / "checkpoints" / "step_00000002"), cwd=tmp_path).stdout
    assert "states          exp_avg, exp_avg_sq" in shown and "step            2" in shown


def test_list_shows_validation_losses(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "validated")
    temporary = (copy / "checkpoints" / "step_00000002").rename(layout.temporary_path(copy / "checkpoints", 2))
    (temporary / layout.MANIFEST).unlink()
    trainer = json.loads((temporary / "trainer.json").read_text())
    (temporary / "trainer.json").write_text(json.dumps({**trainer, "validation_loss": 2.3125}))
    seal(copy / "checkpoints", 2)
    head, validated, other = z2all("checkpoint", "list", str(copy), cwd=tmp_path).stdout.splitlines()
    assert head.split("  ")[-2:] == ["validation loss", "health"]
    assert (validated.split()[-2:], other.split()[-2:]) == (["2.3125", "complete"], ["-", "complete"])
    listed = json.loads(z2all("checkpoint", "list", "--json", str(copy), cwd=tmp_path).stdout)
    assert [one["validation_loss"] for one in listed] == [2.3125, None]


def test_verify_finds_a_flipped_bit_that_list_does_not_notice(run: Path, tmp_path: Path) -> None:
    assert z2all("checkpoint", "verify", str(run), cwd=tmp_path).returncode == 0
    file = run / "checkpoints" / "step_00000002" / "state" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert z2all("checkpoint", "list", str(run), cwd=tmp_path).stdout.count("complete") == 2
    answer = z2all("checkpoint", "verify", str(run), cwd=tmp_path)
    assert answer.returncode == 4
    line = "step_00000002: state/rank_00000.safetensors does not match its checksum"
    assert line in answer.stderr.splitlines()[-1]
    assert [row.rsplit("  ", 1)[-1] for row in answer.stdout.splitlines()[1:]] == [line.split(": ")[1], "complete"]


def test_an_unfinished_checkpoint_is_listed(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step_00000009").mkdir()
    last = z2all("checkpoint", "list", str(run), cwd=tmp_path).stdout.splitlines()[-1]
    assert last.startswith("9 ") and last.endswith("no MANIFEST.json: it was never finished")


def test_a_folder_without_checkpoints_is_refused_with_one_line(tmp_path: Path) -> None:
    line = one_line(z2all("checkpoint", "list", str(tmp_path / "nothing"), cwd=tmp_path), 4)
    assert line.endswith("has no checkpoints. Give a run folder or a step_NNNNNNNN folder in it.")
