"""The command as users run it: real processes, their exit codes, and their output on stdout and stderr."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.helpers.command import COMMAND, environment, one_line, z2all
from tests.helpers.processes import ended
from z2all_ds import __version__
from z2all_ds.base.config import RunConfig, dump_yaml, load_run_config
from z2all_ds.base.config.explain import explained_yaml

# The command itself


def test_help_and_version(tmp_path: Path) -> None:
    answer = z2all("--help", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    verbs = ["quickstart", "config", "train", "export", "generate", "plot", "plan", "doctor", "corpus", "tokenizer"]
    assert [verb for verb in verbs if f" {verb} " not in answer.stdout] == []
    panels = [line.split()[1] for line in answer.stdout.splitlines() if line.startswith("╭─ ")]
    assert panels == ["Options", "Start", "Data", "Training", "Watching", "Using", "Measuring"]
    assert "--install-completion" in answer.stdout
    for arguments in (["--help"], ["corpus", "--help"], ["train", "parity", "--help"]):
        answer = z2all(*arguments, cwd=tmp_path)
        assert "<bool>" not in answer.stdout
        assert z2all(*arguments[:-1], "-h", cwd=tmp_path).stdout == answer.stdout
    answer = z2all("--version", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, f"{__version__}\n")


@pytest.mark.parametrize("verb", [["train"], ["plan"], ["train", "parity"], ["bench", "step"]])
def test_an_option_that_is_a_setting_is_answered_with_the_override(verb: list[str], tmp_path: Path) -> None:
    line = one_line(z2all(*verb, "--global-batch", "8", cwd=tmp_path), 2)
    assert line == "ConfigError: --global-batch: is a setting, not an option. Write train.global_batch=8."


def test_the_shell_completes_the_names_of_settings(tmp_path: Path) -> None:
    asked = {"_Z2ALL_COMPLETE": "complete_bash", "COMP_WORDS": "z2all train train.st", "COMP_CWORD": "2"}
    script = "import sys; sys.argv = ['z2all']; from z2all_ds.cli import main; main()"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env={**environment(), **asked}
    )
    assert answer.stdout.split() == ["train.steps=", "train.stop_at_step="]


@pytest.mark.parametrize("arguments", [["no_such_verb"], ["plan", "--gpus", "many"], ["corpus", "build", "a=text"]])
def test_an_invalid_command_line_prints_the_usage(arguments: list[str], tmp_path: Path) -> None:
    answer = z2all(*arguments, cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "Usage:" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_user_error_is_one_line_and_debug_adds_the_traceback(tmp_path: Path) -> None:
    expected = "ConfigError: train.stepz: no such setting. Did you mean train.steps?"
    assert one_line(z2all("config", "train.stepz=5", cwd=tmp_path), 2) == expected
    for shown in (
        z2all("--debug", "config", "train.stepz=5", cwd=tmp_path),
        z2all("config", "train.stepz=5", cwd=tmp_path, Z2ALL_DEBUG="1"),
    ):
        assert shown.returncode == 2
        assert shown.stderr.startswith("Traceback (most recent call last):\n")
        assert "load_run_config" in shown.stderr
        assert shown.stderr.splitlines()[-1] == expected


def test_a_pipe_that_is_closed_early_is_not_an_error(tmp_path: Path) -> None:
    line = f"{sys.executable} -m z2all_ds config | head -n 1"
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, env=environment())
    assert (answer.stdout, answer.stderr) == ("preset: null\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_exits_with_the_code_of_the_signal(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    command = [*COMMAND, "corpus", "build", "code=python_code", "--out", str(corpus)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=tmp_path
    )
    with ended(process):
        while not list(corpus.glob(".building/units/*.lines.tmp")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.stdout
        said = process.stdout.read()
        assert process.wait(30) == code
    assert "Traceback" not in said
    assert [path.name for path in corpus.iterdir()] == [".building"]


INTERRUPTED_IMPORT = """
import os, signal, sys
from importlib.abc import MetaPathFinder
from z2all_ds.__main__ import main

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
main()
"""


@pytest.mark.parametrize(("module", "code"), [("z2all_ds.cli.bench", -2), ("z2all_ds.base.paths", 130)])
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(module: str, code: int, tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (code, "", "")


# config


def test_config_prints_the_resolved_config(tmp_path: Path) -> None:
    (tmp_path / "跑.yaml").write_text("preset: z2all_tiny\ntrain: {steps: 7}\n", encoding="utf-8")
    answer = z2all("config", "--config", "跑.yaml", "optimizer.lr=3e-4", "run_dir=a b/它's", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    expected = load_run_config(str(tmp_path / "跑.yaml"), ["optimizer.lr=3e-4", "run_dir=a b/它's"])
    assert answer.stdout == dump_yaml(expected)
    content = yaml.safe_load(answer.stdout)
    assert (content["train"]["steps"], content["optimizer"]["lr"], content["run_dir"]) == (7, 3e-4, "a b/它's")
    assert RunConfig(**content) == expected


def test_config_explains_every_setting(tmp_path: Path) -> None:
    answer = z2all("config", "--explain", "train.steps=7", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == explained_yaml(load_run_config(None, ["train.steps=7"]))


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--config", "missing.yaml"], "run config 'missing.yaml': neither a file nor one of the shipped ones"),
        (["preset=z2all_2b"], "preset 'z2all_2b': neither a file nor one of the shipped ones"),
        (["train.steps=0"], "train.steps=0: Input should be greater than 0."),
        (["train"], "override 'train': must be section.key=value."),
    ],
)
def test_config_reports_an_error_in_one_line(arguments: list[str], start: str, tmp_path: Path) -> None:
    assert one_line(z2all("config", *arguments, cwd=tmp_path), 2).startswith(f"ConfigError: {start}")


# plan, doctor, plot


def test_plan_as_json(tmp_path: Path) -> None:
    answer = z2all("plan", "--model", "z2all_1b", "--gpus", "8", "--gpu-memory", "80GB", "--json", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    plan = json.loads(answer.stdout)
    assert plan["parameters"] == 1_255_499_776
    assert (plan["gpus"], plan["gpu_memory_bytes"]) == (8, 80 * 10**9)
    rows = {row["deepspeed"]: row["memory"] for row in plan["rows"]}
    assert rows["zero2"]["weights"] == 2 * 1_255_499_776
    assert rows["zero1"]["moments"] == 8 * 1_255_499_776 // 8
    assert rows["zero0"]["total"] > rows["zero1"]["total"] > rows["zero3"]["total"]
    assert one_line(z2all("plan", "--gpu-memory", "much", cwd=tmp_path), 2).startswith("ConfigError: ")


def test_doctor_as_json(tmp_path: Path) -> None:
    answer = z2all("doctor", tmp_path, "--json", cwd=tmp_path)
    findings = json.loads(answer.stdout)
    assert {"python", "torch", "deepspeed", "disk"} <= {finding["name"] for finding in findings}
    assert {frozenset(finding) for finding in findings} == {frozenset({"name", "status", "value", "fix", "measured"})}
    failed = [finding for finding in findings if finding["status"] == "fail"]
    assert answer.returncode == (6 if failed else 0)


def test_doctor_fails_where_training_cannot_work(tmp_path: Path) -> None:
    answer = z2all("doctor", tmp_path, "--json", cwd=tmp_path, CXX="no_such_compiler")
    assert answer.returncode == 6
    (failed,) = [finding for finding in json.loads(answer.stdout) if finding["status"] == "fail"]
    assert failed["name"] == "CXX=no_such_compiler"
    assert answer.stderr == ""


def test_plot_makes_a_picture(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    records = [{"step": step, "loss": 8 / step, "loss_of_中文": 7 / step} for step in range(1, 50)]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    (tmp_path / "one" / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    answer = z2all("plot", "one", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "one/plots/loss.png\n")
    with Image.open(tmp_path / "one" / "plots" / "loss.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (960, 540))
        picture.load()
    assert (
        one_line(z2all("plot", "one", "three", cwd=tmp_path), 3)
        == "DataError: three: no such folder. Correct the path."
    )
    assert one_line(z2all("plot", "one", "--out", "x.doc", cwd=tmp_path), 2).startswith("ConfigError: --out x.doc: ")


# The checks of train: each error is reported before ranks are started or ops are built


def test_train_reports_errors_before_it_creates_folders_or_builds_ops(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    run_dir, extensions = tmp_path / "run", tmp_path / "extensions"
    corpus, tokenizer = f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}"
    cases: list[tuple[list[str], int, str]] = [
        ([], 2, "ConfigError: data.corpus: is not set. Give its folder: data.corpus=PATH (made by"),
        ([corpus], 2, "ConfigError: data.tokenizer: is not set. Give its folder: data.tokenizer=PATH"),
        (["data.corpus=/no where"], 3, "DataError: data.corpus=/no where: no such folder. Correct the path, or make"),
        ([corpus, "data.tokenizer=/no where", "--ranks", "3"], 3, "DataError: data.tokenizer=/no where: no such"),
        ([corpus, tokenizer, "--deepspeed", "zero7"], 2, "ConfigError: DeepSpeed JSON 'zero7': neither a file nor"),
        ([corpus, tokenizer, "--ranks", "0"], 5, "ClusterError: ranks=0: must be at least 1."),
        ([corpus, tokenizer, "--ranks", "3"], 2, "ConfigError: train.global_batch=32: must be a multiple of"),
        ([corpus, tokenizer, "model.vocab_size=1024", "--resume", "no"], 4, "CheckpointError: checkpoint no: no such"),
    ]
    for arguments, code, start in cases:
        own = {"TORCH_EXTENSIONS_DIR": str(extensions)}
        line = one_line(z2all("train", *arguments, f"run_dir={run_dir}", cwd=tmp_path, **own), code)
        assert line.startswith(start)
        assert not run_dir.exists()
        assert not extensions.exists()


def test_quickstart_refuses_a_folder_that_it_did_not_create(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    line = one_line(z2all("quickstart", "--out", tmp_path, "--fresh", cwd=tmp_path), 2)
    assert line == f"ConfigError: --out {tmp_path}: exists and was not created by the quickstart. Give a new folder."
    assert (tmp_path / "precious.txt").read_text() == "mine"
    line = one_line(z2all("quickstart", "--out", "/dev/null/x", cwd=tmp_path), 2)
    assert line.startswith("ConfigError: --out /dev/null/x: cannot be written")
