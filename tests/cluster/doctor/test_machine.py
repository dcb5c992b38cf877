"""Tests of the doctor on this machine, and of its findings about problems created with real files."""

import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.built_ops import pretend_built
from z2all_ds.base import machine
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.cluster.doctor import (
    Finding,
    describe,
    examine,
    examine_further,
    has_failures,
    installation,
    require_folder,
    resources,
)
from z2all_ds.cluster.doctor.building import gpu_architectures, judge_nvcc
from z2all_ds.cluster.doctor.installation import (
    built_for_another_torch,
    interpreter_path,
    judge_loading,
    judge_package,
    unmet_requirements,
)


def found(name: str, folder: Path) -> Finding:
    return next(finding for finding in examine(folder) if finding.name == name)


@pytest.fixture(autouse=True)
def own_extension_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the user's extension folder, which may contain locks of running builds, and return the new one."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    return tmp_path / "ops"


def test_all_fast_checks_run(tmp_path: Path) -> None:
    findings = examine(tmp_path)
    names = {finding.name for finding in findings}
    expected = {"python", "torch", "deepspeed", "GPU", "C++ compiler", "ninja", "op cpu_adam", "build locks", "disk"}
    assert names >= expected | {
        *("shared memory", "main memory", "open files", "processes and threads", "locked memory"),
        *("hostname -I", "NCCL and gloo settings", "interpreter path", "packages together"),
    }
    for finding in findings:
        assert finding.status in ("ok", "warn", "fail")
        assert finding.value
        assert bool(finding.fix) == (finding.status != "ok")


def test_slow_checks_run_and_all_packages_load(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in examine_further(tmp_path)}
    assert list(findings)[:3] == ["packages load", "disk speed", "Hugging Face hub"]
    assert findings["packages load"].status == "ok"
    assert findings["packages load"].value.startswith("torch and deepspeed")


def test_findings_are_printed_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("disk [x]", "fail", "[full]", "Free some.", measured={"bytes_per_second": 5.5}),
        Finding("python", "ok", "3.11.7"),
    ]
    print_lines(describe(findings))
    printed = capsys.readouterr().out
    assert "fail  disk [x]  [full]" in printed
    assert "fail  disk [x]: Free some." in printed
    assert "1 ok, 0 warn, 1 fail" in printed
    assert [Finding(**entry) for entry in json.loads(to_json(findings))] == findings
    assert has_failures(findings)
    assert not has_failures(findings[1:])


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("2.12.1+cu130", "ok"),
        ("2.10.9", "warn"),
        ("2.14.0", "warn"),
        ("3.0", "warn"),
        (None, "fail"),
    ],
)
def test_an_untested_version_is_a_warning_and_a_missing_package_a_failure(version: str | None, status: str) -> None:
    assert judge_package("torch", version, "2.11", "2.13").status == status


def test_an_optional_package_may_be_missing() -> None:
    assert judge_package("wandb", None, "0.31", "0.31").status == "warn"
    assert judge_package("deepspeed", "0.19.9", "0.19.8", "0.19.8").status == "warn"


def test_pypis_apex_is_distinguished_from_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "apex").mkdir(parents=True)
    (site / "apex" / "__init__.py").touch()
    (site / "apex-0.9.10.dist-info").mkdir()
    (site / "apex-0.9.10.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    monkeypatch.syspath_prepend(str(site))
    assert found("apex", tmp_path).status == "warn"
    (site / "apex" / "optimizers").mkdir()
    assert found("apex", tmp_path).value == "0.9.10 (NVIDIA's)"


def test_unmet_requirements_are_reported() -> None:
    installed = {"torch": "2.13.0+cpu", "triton": "3.5.0", "flash-attn": "2.8.3"}
    demands = {
        "torch": ["triton==3.6.0; platform_system == 'Linux'", "numpy>=9; extra == 'x'", "sympy>=1.13"],
        "flash-attn": ["torch>=2.0", "Flash_Attn>2.8", "torch (>=9.*, what"],
    }
    (finding,) = unmet_requirements(installed, demands)
    assert finding.status == "warn"
    assert finding.value == "torch 2.13.0+cpu needs triton==3.6.0, installed is 3.5.0"
    assert unmet_requirements({**installed, "triton": "3.6.0"}, demands) == []


def test_conflicting_requirements_of_two_packages_are_one_finding() -> None:
    installed = {"a": "1", "b": "2", "Some_C": "3"}
    (finding,) = unmet_requirements(installed, {"a": ["some-c<3"], "b": ["some.c>3"]})
    assert finding.value == "a 1 needs Some_C<3; b 2 needs Some_C>3, installed is 3"
    assert "`pip install -c constraints.txt a b Some_C`" in finding.fix


def test_a_conflicting_version_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizers-0.19.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: tokenizers\nVersion: 0.19.1\n"
    (tmp_path / "tokenizers-0.19.1.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = [finding for finding in (*installation.packages(), *installation.together()) if finding.status != "ok"]
    assert finding.name == "packages together" and finding.value.endswith(", installed is 0.19.1")


@pytest.mark.parametrize(
    ("name", "version", "torch", "cuda", "fits"),
    [
        ("flash-attn", "2.8.3+cu12torch2.6cxx11abiTRUE", "2.6.0+cu124", "12.4", True),
        ("flash-attn", "2.8.3+cu12torch2.6cxx11abiTRUE", "2.11.0", "12.8", False),
        ("flash-attn", "2.8.3+cu12torch2.1", "2.11.0", "12.8", False),
        ("flash-attn", "2.8.3+cu12torch2.11cxx11abiTRUE", "2.11.0", "13.0", False),
        ("flash-attn", "2.8.3", "2.11.0", "13.0", True),  # built from source
        ("xformers", "0.0.35+cu128", "2.11.0", "13.0", False),
        ("xformers", "0.0.35+cu128", "2.11.0", "12.8", True),
        ("xformers", "0.0.35+cu128", "2.11.0+cpu", None, True),  # a CPU build of torch loads no kernels
    ],
)
def test_kernels_built_for_another_torch_or_cuda_are_reported(
    name: str, version: str, torch: str, cuda: str | None, fits: bool
) -> None:
    found = built_for_another_torch({"torch": torch, name: version}, cuda)
    assert (found == []) == fits


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "raise ImportError('libcudart.so.13: cannot open')",
            "torch does not (ImportError: libcudart.so.13: cannot open)",
        ),
        ("import os; os._exit(7)", "torch does not (its process ended with code 7)"),
        ("", "deepspeed does not (ModuleNotFoundError: No module named 'torch.distributed')"),
    ],
)
def test_a_package_that_cannot_be_imported_is_a_failure(
    module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub of torch precedes the installed package on the import path."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(module)
    if not module:
        (tmp_path / "deepspeed").mkdir()
        (tmp_path / "deepspeed" / "__init__.py").write_text("import torch.distributed")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = installation.loading()
    assert (finding.name, finding.status, finding.value) == ("packages load", "fail", said)
    assert "--force-reinstall" in finding.fix


def test_torch_must_see_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_build_name", lambda: "py311_cu130")
    finding = judge_loading(0, "loading torch\nloading deepspeed\ngpus 0\n", "", visible=8)
    assert (finding.status, finding.value) == ("fail", "torch can use 0 of 8 GPUs")
    assert judge_loading(0, "gpus 8\n", "", visible=8).value == "torch and deepspeed, with 8 GPU(s)"
    monkeypatch.setattr(machine, "torch_build_name", lambda: "py311_cpu")  # a CPU build is reported by `gpus.check`
    assert judge_loading(0, "gpus 0\n", "", visible=8).status == "ok"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.48", "ok"),
        ("Cuda compilation tools, release 13.1, V13.1.1", "ok"),
        ("Cuda compilation tools, release 12.8, V12.8.93", "warn"),
        ("nothing of the kind", "warn"),
    ],
)
def test_nvcc_of_another_major_version_than_torchs_cuda_is_a_warning(said: str, status: str) -> None:
    assert judge_nvcc("/usr/local/cuda/bin/nvcc", said, "13.0").status == status
    assert judge_nvcc(None, "", "13.0").status == "ok"


def test_a_gpu_architecture_with_a_letter_is_reported() -> None:
    (finding,) = gpu_architectures({"TORCH_CUDA_ARCH_LIST": "8.0;9.0a"})
    assert "'8.0;9.0'" in finding.fix
    assert gpu_architectures({"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}) == gpu_architectures({}) == []


def test_a_too_long_interpreter_path_or_one_with_a_blank_is_a_warning() -> None:
    assert interpreter_path("/" + "x" * 124).status == "ok"
    assert interpreter_path("/" + "x" * 125).status == "warn"
    assert interpreter_path("/my files/bin/python").status == "warn"


def test_missing_compiler_is_a_failure_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = found("C++ compiler", tmp_path)
    assert finding.status == "fail"
    assert "apt install g++" in finding.fix


def test_another_ninja_first_on_the_path_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_bin = Path(sys.executable).parent
    if not (own_bin / "ninja").exists():
        pytest.skip("ninja is not in the interpreter's own folder")
    (tmp_path / "ninja").write_text("#!/bin/sh\n")
    (tmp_path / "ninja").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{own_bin}:{os.environ['PATH']}")
    assert found("ninja", tmp_path).status == "warn"
    monkeypatch.setenv("PATH", f"{own_bin}:{tmp_path}:{os.environ['PATH']}")
    assert found("ninja", tmp_path).status == "ok"


def test_built_ops_and_build_locks_are_reported(tmp_path: Path, own_extension_folder: Path) -> None:
    assert found("op cpu_adam", tmp_path).value.startswith("not built")
    pretend_built(own_extension_folder, "cpu_adam", Path("/other/venv/deepspeed"))
    assert found("op cpu_adam", tmp_path).value.startswith("not built")
    plan = pretend_built(own_extension_folder, "cpu_adam") / "build.ninja"
    os.utime(plan, (time.time() + 60,) * 2)  # newer than the op: the build was killed
    assert found("op cpu_adam", tmp_path).value.startswith("not built")
    pretend_built(own_extension_folder, "cpu_adam")
    lock = own_extension_folder / "cpu_adam" / "lock"
    lock.touch()
    assert found("op cpu_adam", tmp_path).value == "built"
    finding = found("build lock", tmp_path)
    assert finding.status == "warn"
    assert f"rm {lock}" in finding.fix


def test_an_invalid_folder_for_ops_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    (failure,) = [finding for finding in examine(tmp_path) if finding.status == "fail"]
    assert failure.name == f"TORCH_EXTENSIONS_DIR={tmp_path / 'file'}"


@pytest.mark.parametrize(
    ("limits", "status", "fix"),
    [
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", ""),
        ((4096, 4096), "ok", ""),
        ((1024, resource.RLIM_INFINITY), "warn", "Run `ulimit -n 65536` before"),
        ((1024, 20000), "warn", "Run `ulimit -n 20000` before"),
        ((500, 1000), "warn", "`--ulimit nofile=65536`"),  # the hard limit is too low
    ],
)
def test_a_low_limit_is_a_warning_with_a_fix_within_the_hard_limit(
    limits: tuple[int, int], status: str, fix: str
) -> None:
    finding = resources.judge_limit("open files", limits, 4096, "-n", "nofile")
    assert finding.status == status and fix in finding.fix


def test_a_low_limit_of_locked_memory_is_a_warning_only_with_infiniband(tmp_path: Path) -> None:
    assert not resources.has_infiniband(tmp_path / "none") and not resources.has_infiniband(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert resources.has_infiniband(tmp_path)
    low = resources.judge_locked_memory(8 * 2**20, infiniband=True)
    assert (low.status, low.value) == ("warn", "at most 8.0 MiB") and "memlock=-1" in low.fix
    assert resources.judge_locked_memory(8 * 2**20, infiniband=False).status == "ok"
    assert resources.judge_locked_memory(resource.RLIM_INFINITY, infiniband=True).value == "no limit"


def test_small_or_full_shared_memory_is_a_warning() -> None:
    small = resources.judge_shared_memory(64 * 2**20, 64 * 2**20)
    full = resources.judge_shared_memory(8 * 2**30, 2**20)
    assert (small.status, small.value) == ("warn", "64.0 MiB") and "--shm-size" in small.fix
    assert (full.status, full.value) == ("warn", "1.0 MiB free of 8.0 GiB") and "ls -lS /dev/shm" in full.fix
    assert resources.judge_shared_memory(8 * 2**30, 4 * 2**30).status == "ok"


def test_little_free_main_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, status in ((3 * 10**9, "warn"), (5 * 10**9, "ok")):
        monkeypatch.setattr(resources, "available_bytes", lambda free=free: free)
        finding = resources.main_memory()
        assert finding.status == status and bool(finding.fix) == (status == "warn")


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    assert require_folder(tmp_path / "not" / "made" / "yet") == tmp_path
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"is a file\. Give the folder"):
            require_folder(folder)
        (failure,) = [finding for finding in examine(folder) if finding.status == "fail"]
        assert failure.name == f"folder {folder}"
    with pytest.raises(ConfigError, match=r"cannot be accessed \(File name too long"):
        require_folder(tmp_path / ("x" * 300))


def test_a_low_limit_of_open_files_is_a_warning(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        finding = found("open files", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.status == "warn"
    assert "ulimit -n" in finding.fix


def test_disk_speed_is_measured_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = resources.disk_speed(tmp_path / "not" / "made" / "yet")
    assert finding.name == "disk speed" and f"/s written and synced at {tmp_path}" in finding.value
    assert list(tmp_path.iterdir()) == []
    shown = float(finding.value.split()[0]) * {"MiB/s": 2**20, "GiB/s": 2**30}[finding.value.split()[1]]
    assert finding.measured == {"bytes_per_second": pytest.approx(shown, rel=0.05)}
    assert resources.disk_speed(Path("/proc/self")) == []  # no free space there, which `disk` reports
    monkeypatch.setattr(resources, "MIN_DISK_BYTES", 0)
    (finding,) = resources.disk_speed(Path("/proc/self"))
    assert finding.status == "fail" and "cannot write at /proc/self" in finding.value
    assert finding.measured == {}


def test_a_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "SLOW_DISK", 1e18)
    monkeypatch.setattr(resources, "SPEED_BYTES", 2**20)
    (finding,) = resources.disk_speed(tmp_path)
    assert finding.status == "warn" and "write runs to another disk" in finding.fix and finding.measured


def test_two_numa_nodes_are_listed_with_their_processors(tmp_path: Path) -> None:
    found = []
    for node, processors in (("node0", "0-15"), ("node1", "16-31")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{processors}\n")
        found.append(resources.numa(tmp_path))
    assert found[0] == []  # a single node is not reported
    (finding,) = found[1]
    assert finding.value == "0: processors 0-15; 1: processors 16-31"


def test_a_missing_address_and_a_missing_home_folder_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostname").write_text("#!/bin/sh\n")
    (tmp_path / "hostname").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", "/dev/null/nonexistent")
    assert found("hostname -I", tmp_path).status == "warn"
    assert found("home folder", tmp_path).status == "warn"


def test_a_full_disk_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "MIN_DISK_BYTES", 10**18)
    assert has_failures(examine(tmp_path))
