"""Options that would have no effect are refused, before anything is read or started."""

import shlex
from pathlib import Path

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.cli import app
from z2all_ds.cluster.launch import multi_node

CASES = [
    ("config --from-hf x --explain", "--explain: without effect: --from-hf prints what that folder has"),
    ("config --from-hf x train.steps=5", "overrides: without effect"),
    ("train --deepspeed zero1 deepspeed=zero2", "--deepspeed: without effect: deepspeed= is given too"),
    ("train --profile 2:4 train.profile=[2,4]", "--profile: without effect"),
    ("corpus convert jsonl x --out y --max-bad-share 0.5", "--max-bad-share: without effect: the first invalid row"),
    ("corpus build a=jsonl:x --out y --max-bad-share 0.5 --on-error stop", "--max-bad-share: without effect"),
    ("corpus build a=jsonl:x --out y --workers 2 --ray auto", "workers: a Ray cluster decides how many"),
    ("corpus sample x --gid 5 -n 2", "--count: without effect: --gid names the document"),
    ("corpus sample x --gid 5 --domain a --seed 1", "--domain, --seed: without effect"),
    ("tokenizer import FILE --out y --as-is --safe-by-default", "safe by default: a tokenizer as it is is not changed"),
    ("evaluate harness x --include y --list --out z.json", "model, --out: without effect: --list only lists tasks"),
    ("evaluate harness x --tasks a --shuffles 5", "--shuffles: without effect: needs --reshape shuffled"),
    ("evaluate harness x --tasks a --reshape letters --others-wrong-text b", "--others-wrong-text: without effect"),
    ("evaluate harness x --tasks a --fields question=q", "--fields: without effect: needs --reshape"),
    ("plot x --out a.png --format svg", "--format: without effect: the name of --out gives the format"),
    ("launch --hostfile x --no-preflight --min-nodes 2", "--min-nodes: without effect: --no-preflight checks no nodes"),
    ("launch --hostfile x --no-health --exclude-slow", "--exclude-slow: without effect: --no-health finds no slow"),
    ("doctor --hostfile x --no-health --exclude-slow", "--exclude-slow: without effect: --no-health finds no slow"),
    ("bench memory --case zero1 --ranks 2", "--ranks: without effect: --case has its own run"),
    ("bench memory --case zero1 train.steps=5", "overrides: without effect"),
    ("bench memory --ranks 2", "--ranks: without effect: it is for your own run"),
    ("bench corpus --clean all", "--clean: without effect: it is for runs with --workers"),
    ("bench data --no-peers --peers x", "--peers: without effect: --no-peers measures none"),
    ("bench data --shards 0 --shard-megabytes 5", "--shard-megabytes: without effect"),
    ("quickstart --out x run_dir=y", "run_dir=y: the quickstart makes these itself, below --out"),
]


def call(line: str) -> None:
    app(shlex.split(line), standalone_mode=False)


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_an_option_without_effect_is_refused(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("{}")
    (tmp_path / "y").mkdir()
    with pytest.raises(ConfigError) as caught:
        call(line)
    assert str(caught.value).startswith(message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE", "y"]


@pytest.mark.parametrize("options", ["--restarts -1", "--min-nodes 0", "--master-port 0", "--master-port 65536"])
def test_numbers_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(Exception, match=r"range|or equal to"):
        call(f"launch --hostfile x {options}")


def test_a_launch_on_this_machine_names_the_options_that_it_does_not_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    call(f"launch --hostfile {tmp_path}/hosts --dry-run --restarts 5 --master-port 5000 -- run_dir={tmp_path}/run")
    assert "without effect on this machine: --restarts, --master-port\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_does_not_touch_the_files_of_a_launch_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr("z2all_ds.base.run_folder.LOCK_PATIENCE_SECONDS", 0.0)
    options = multi_node.LaunchOptions(str(tmp_path / "hosts"), preflight=False, dry_run=True)
    with folder.launching(), pytest.raises(Exception, match="another job is writing to it"):
        multi_node.launch(options, [f"run_dir={folder.root}"])
    assert not folder.launch_config.exists()
    multi_node.launch(options, [f"run_dir={folder.root}"])
    assert folder.launch_config.exists()
