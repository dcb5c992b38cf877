"""`z2all plan` as users run it: its output, the files it writes, and its one-line errors.

The errors are tested with the command's `main` in this process, since starting a process for each would take a minute.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.command import ROOT, environment, one_line, z2all
from z2all_ds import cli
from z2all_ds.base.config import load_run_config

Answer = tuple[int, str, str]


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Answer]]:
    """Yield a function that runs the command in this process, in an empty folder; it returns (exit code, stdout,
    stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("Z2ALL_DEBUG", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # set by the command
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["z2all", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    yield run
    signal.signal(signal.SIGTERM, before)


# Real processes


def test_plan_prints_a_table_on_a_login_node_without_torch(tmp_path: Path) -> None:
    """Importing torch, deepspeed or transformers raises an error, as on a machine without them."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("torch", "deepspeed", "transformers"):
        (bare / f"{name}.py").write_text(f"raise ImportError('there is no {name} here')\n")
    own = {"PYTHONPATH": f"{bare}:{ROOT}"}
    answer = z2all("plan", "--gpus", "64", "--gpu", "h100", cwd=tmp_path, **own)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "GB per GPU" in answer.stdout and "to spare." in answer.stdout and "…" not in answer.stdout
    assert answer.stdout.index("Assumed:") > answer.stdout.index("tokens/s")
    answer = z2all("plan", "--gpu", "h100", "--sweep", "gpus=8,64", "--json", cwd=tmp_path, **own)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert set(json.loads(answer.stdout)["sending_takes_over_at"]) == {"zero1", "zero2", "zero3", "zero3_hpz"}
    command = [sys.executable, "-c", "import torch"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment(**own), cwd=tmp_path)
    assert "ImportError: there is no torch here" in shown.stderr  # so these imports do fail


def test_a_sweep_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    sizes = "gpus=8,64,512,4096"
    answer = z2all("plan", "--gpu", "h100", "--sweep", sizes, "--out", "new/curve.png", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "drew new/curve.png\n")
    assert "4,096" in answer.stdout and "zero2: sending takes longer than computing from 64 GPUs on." in answer.stdout
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_best_choice_is_written_as_a_config_that_plan_accepts(tmp_path: Path) -> None:
    line = ["plan", "--model", "z2all_7b", "--gpus", "64", "--gpu", "h100", "--write", "run.yaml"]
    answer = z2all(*line, "--json", cwd=tmp_path)
    assert answer.returncode == 0
    first = json.loads(answer.stdout)["ranked"][0]
    assert answer.stderr.startswith(f"wrote run.yaml: {first['deepspeed']}, micro-batches of {first['micro_batch']}")
    written = load_run_config(str(tmp_path / "run.yaml"))
    assert (written.deepspeed, written.train.micro_batch) == (first["deepspeed"], first["micro_batch"])
    assert "is there already" in one_line(z2all(*line, cwd=tmp_path), 2)
    again = z2all("plan", "--config", "run.yaml", "--gpus", "64", "--gpu", "h100", "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["ranked"][0] == first


def test_an_unknown_gpu_is_refused_with_one_line_in_a_real_process(tmp_path: Path) -> None:
    line = one_line(z2all("plan", "--gpu", "nosuch", cwd=tmp_path), 2)
    assert line.startswith("ConfigError: GPU 'nosuch': is not known; known are: h200, h100")


# In this process


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("--gpus 0", "--gpus 0: must be at least 1."),
        ("--gpus -4", "--gpus -4: must be at least 1."),
        ("--gpus 6", "train.global_batch=512: cannot be split over 6 GPUs in micro-batches of 8."),
        ("--gpus 100000", "train.global_batch=512: cannot be split over 100,000 GPUs in micro-batches of 8. Give"),
        ("--gpus 12 --gpu h100", "--gpus 12: must be whole machines of 8."),
        ("--gpu-memory 80X", "memory size '80X': must be a number with a unit"),
        ("--gpu-memory -1GB", "memory size '-1GB': must be more than zero."),
        ("--gpu-memory 0", "memory size '0': must be more than zero."),
        ("--gpus-per-node 0", "--gpus-per-node 0: must be at least 1."),
        ("--adapters 0", "--adapters 0: must be at least 1."),
        ("--peak-tflops -3", "--peak-tflops -3.0: must be above 0"),
        ("--reached 2", "--reached 2.0: must be above 0 and at most 1."),
        ("--tokens none", "--tokens 'none': must be a positive number"),
        ("--tokens=", "--tokens '': must be a positive number"),
        ("--sweep gpus=0", "--sweep gpus=0: must read gpus=N,N,..."),
        ("--sweep layers=3", "--sweep layers=3: must read gpus=N,N,..."),
        ("--sweep=", "--sweep : must read gpus=N,N,..."),
        ("--sweep gpus=8,64", "--sweep: needs the speed of a GPU."),
        ("--sweep gpus=8,12 --gpu h100", "--sweep gpus=12: must be whole machines of 8."),
        ("--sweep gpus=8 --gpu h100 --out x.pdf", "--out x.pdf: must end in .png or .svg."),
        ("--sweep gpus=8 --gpu h100 --write x.yaml", "--sweep: cannot be combined with --write."),
        ("--sweep gpus=8 --gpu h100 --fit", "--sweep: cannot be combined with --fit."),
        ("--sweep gpus=8 --gpu h100 --gpus 8", "--sweep: cannot be combined with --gpus."),
        ("--out x.png", "--out x.png: needs --sweep."),
        ("--restart-seconds -1", "--restart-seconds -1.0: must be 0 or more."),
        ("--gpu-hours-per-failure 0", "--gpu-hours-per-failure 0.0: must be above 0."),
        ("--network warp", "link 'warp': is not known; known are: nvlink4"),
        ("--link -5GB/s", "speed '-5GB/s': must be a positive number with a unit"),
        ("--disk-speed 0GB/s", "speed '0GB/s': must be a positive number with a unit"),
        ("--measured missing.json", "file missing.json: cannot be read"),
        ("--write x.txt", "--write x.txt: must end in .yaml."),
        ("--model nosuch", "run config 'nosuch': neither a file nor one of the shipped ones"),
        ("train.stepz=5", "train.stepz: no such setting. Did you mean train.steps?"),
        ("--fit --gpus 8", "--fit: runs on the GPUs of this machine and cannot be combined with --gpus."),
        (
            "--fit --write x.yaml --tokens 3B",
            "--fit: runs on the GPUs of this machine and cannot be combined with --tokens, --write.",
        ),
    ],
)
def test_invalid_options_are_refused_with_one_line(line: str, start: str, here: Callable[..., Answer]) -> None:
    code, out, err = here(*line.split())
    assert (code, out, list(Path().iterdir())) == (2, "", [])
    (message,) = err.splitlines()
    assert message.startswith(f"ConfigError: {start}")
    assert message.count(": ") >= 2 and message[-1] in ".?"  # value, rule, fix


def test_fit_is_refused_without_a_gpu(here: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("z2all_ds.bench.fit.gpu_count", lambda: 0)
    code, out, err = here("--fit")
    assert (code, out, len(err.splitlines())) == (6, "", 1)
    assert err.startswith("MachineError: --fit: tries micro-batches on a GPU, and none is visible.")


def test_a_memory_size_without_a_unit_is_in_gigabytes(here: Callable[..., Answer]) -> None:
    bare, decimal, binary = (json.loads(here("--gpu-memory", size, "--json")[1]) for size in ("80", "80GB", "80GiB"))
    assert bare == decimal
    assert (bare["gpu_memory_bytes"], binary["gpu_memory_bytes"]) == (80 * 10**9, 80 * 2**30)


def test_extreme_but_valid_numbers_are_accepted(here: Callable[..., Answer]) -> None:
    code, out, _ = here("--gpu", "h100", "--tokens", "1", "--json")
    assert (code, json.loads(out)["outlook"]["tokens"]) == (0, 1)
    code, out, _ = here("--gpu", "h100", "--tokens", "1000000T", "--gpu-hours-per-failure", "0.000001", "--json")
    assert (code, json.loads(out)["outlook"]["goodput"]) == (0, 0.0)
    batch = ["train.global_batch=100000", "train.micro_batch=1"]
    code, out, _ = here("--gpus", "100000", "--gpu", "h100", *batch, "--json")
    assert code == 0 and {row["accumulation"] for row in json.loads(out)["ranked"]} == {1}


def test_no_config_is_written_if_nothing_fits(here: Callable[..., Answer]) -> None:
    code, out, err = here("--model", "z2all_7b", "--gpu", "rtx4090", "--gpu-memory", "4GB", "--write", "x.yaml")
    assert code == 2 and "Nothing fits: the least is" in out
    assert err.startswith("ConfigError: --write x.yaml: nothing fits") and len(err.splitlines()) == 1
    assert not Path("x.yaml").exists()
