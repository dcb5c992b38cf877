"""Tests of the command `z2all doctor`: errors of one line, `--fix` with `--json`, and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.built_ops import pretend_built
from tests.helpers.training import run_arguments
from z2all_ds.zero import op_builds


def doctor(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "z2all_ds", "doctor", *map(str, words)]
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **offline, **environment}
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["file"], "ConfigError: folder file: "),
        (["--config", "none.yaml"], "ConfigError: run config 'none.yaml': neither a file nor one of the shipped ones"),
        (["--config", "file.yaml"], "ConfigError: folder "),
        (["--exclude-slow"], "ConfigError: --exclude-slow: needs --hostfile. Give --hostfile H, or leave"),
        (
            ["--hostfile", "h", "--prebuild"],
            "ConfigError: --prebuild: works on one machine, not with --hostfile.",
        ),
    ],
)
def test_invalid_input_gives_a_one_line_error(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file.yaml").write_text("run_dir: file\n")
    answer = doctor(*words, "--json", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    (line,) = answer.stderr.splitlines()
    assert line.startswith(said)


def test_fix_removes_a_stale_lock_and_a_failed_check_sets_the_exit_code(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    lock = tmp_path / "ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (1e9, 1e9))  # old enough to be stale even if another container might hold it
    settings: dict[str, dict[str, object]] = {}
    for word in run_arguments(tmp_path / "run", small_corpus, small_tokenizer, "model.vocab_size=512"):
        key, _, value = word.partition("=")
        section, _, name = key.rpartition(".")
        settings.setdefault(section, {})[name] = value if section == "data" or not section else float(value)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({**settings.pop(""), **settings}))  # JSON is valid YAML
    answer = doctor("--fix", "--json", "--config", config, cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
    assert answer.stderr == f"removed {lock}\n" and not lock.exists()
    findings = json.loads(answer.stdout)
    assert [finding["name"] for finding in findings if finding["name"].startswith("build lock")] == ["build locks"]
    (failed,) = [finding for finding in findings if finding["status"] == "fail"]
    assert failed["value"] == "does not fit model.vocab_size=512"
    assert answer.returncode == 6
    (disk,) = [finding for finding in findings if finding["name"] == "disk speed"]
    assert str(tmp_path) in disk["value"] and disk["measured"]["bytes_per_second"] > 0  # at the config's run_dir


def test_prebuild_reports_each_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second call builds and prints nothing. A stub replaces the real build, which takes minutes."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def build(command: list[str], environment: dict[str, str], log: Path, stderr_to_log: bool) -> int:
        log.touch()
        pretend_built(tmp_path, command[-1])
        return 0

    monkeypatch.setattr(op_builds, "run_group", build)
    op_builds.prebuild(["deepspeed_shm_comm", "cpu_adam"])
    assert capsys.readouterr().err.splitlines() == [
        "building DeepSpeed op deepspeed_shm_comm, 1 of 2 (once, a minute or more) ...",
        "built DeepSpeed op deepspeed_shm_comm, 1 of 2, in 0s",
        "building DeepSpeed op cpu_adam, 2 of 2 (once, a minute or more) ...",
        "built DeepSpeed op cpu_adam, 2 of 2, in 0s",
    ]
    op_builds.prebuild(["deepspeed_shm_comm", "cpu_adam"])
    assert capsys.readouterr().err == ""
