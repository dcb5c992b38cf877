"""Weights & Biases: not even imported when off, real when offline, one warning when it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

START = """
import json, sys
from z2all_ds.config import load_run_config
from z2all_ds.track.sinks import WandbSink

run = load_run_config(None, [f"track.wandb={sys.argv[1]}", "run_dir='run 一'", "track.project=attempts"])
warnings = []
sink = WandbSink(run.track, run, warnings.append)
"""
REPORT = """
print(json.dumps({"warnings": warnings, "imported": "wandb" in sys.modules}))
"""


def run_sink(mode: str, body: str, folder: Path, **environment: str) -> tuple[list[str], bool]:
    """Runs a sink in a process of its own, in a folder of its own, without anybody's login; -> (warnings, imported)."""
    (folder / "run 一").mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    # Nothing may leave the machine: were W&B to try, nobody listens at this address.
    own |= {"HOME": str(folder), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_CACHE_DIR": str(folder / "cache")}
    own |= {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).resolve().parents[2])]), **environment}
    command = [sys.executable, "-c", START + body + REPORT, mode]
    answer = subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout.splitlines()[-1])
    return report["warnings"], report["imported"]


def test_disabled_costs_nothing(tmp_path: Path) -> None:
    body = "sink.metric({'step': 1})\nsink.close()\n"
    assert run_sink("disabled", body, tmp_path) == ([], False)


def test_offline_writes_the_run_into_the_run_folder_and_a_failure_later_warns_once(tmp_path: Path) -> None:
    body = """
for step in (1, 2, 3):
    sink.metric({"step": step, "loss": 1 / step, "loss_of_中文": 2.0})
sink._run.finish()  # somebody else ended the run, so that W&B refuses the next record
for step in (4, 5):
    sink.metric({"step": step})
sink.close()
"""
    warnings, imported = run_sink("offline", body, tmp_path)
    assert imported
    assert len(warnings) == 1
    assert warnings[0].startswith("W&B switched off for this run: UsageError: Run (")
    (record,) = (tmp_path / "run 一" / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for word in ("loss_of_中文", "attempts", "num_hidden_layers"):  # metrics, project, config
        assert word.encode() in content


def test_online_without_a_login_warns_once_and_is_silent(tmp_path: Path) -> None:
    warnings, imported = run_sink("online", "sink.metric({'step': 1})\nsink.close()\n", tmp_path)
    assert imported
    assert len(warnings) == 1
    assert "API key" in warnings[0]


def test_a_broken_installation_warns_once_and_is_silent(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise OSError('half of it is missing')\n")
    warnings, imported = run_sink("offline", "sink.metric({'step': 1})\nsink.close()\n", tmp_path)
    assert warnings == ["W&B switched off for this run: OSError: half of it is missing"]
    assert not imported
