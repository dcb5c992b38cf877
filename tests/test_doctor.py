"""The doctor on this very machine, and on the troubles it knows, made with real files."""

import io
import json
import os
import resource
import sys
from pathlib import Path

import pytest

from z2all_ds import doctor
from z2all_ds.doctor import Finding, examine, has_failures, judge_interpreter_path, judge_package, render, to_json


def found(name: str, folder: Path) -> Finding:
    return next(finding for finding in examine(folder) if finding.name == name)


@pytest.fixture(autouse=True)
def own_extension_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own cache may hold locks of builds that are running right now."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    return tmp_path / "ops"


def test_everything_is_looked_at(tmp_path: Path) -> None:
    findings = examine(tmp_path)
    names = {finding.name for finding in findings}
    expected = {"python", "torch", "deepspeed", "GPU", "C++ compiler", "ninja", "op cpu_adam", "build locks", "disk"}
    assert names >= expected | {"shared memory", "open files", "hostname -I", "interpreter path"}
    for finding in findings:
        assert finding.status in ("ok", "warn", "fail")
        assert finding.value
        assert bool(finding.fix) == (finding.status != "ok")


def test_table_and_json_tell_the_same(tmp_path: Path) -> None:
    findings = [Finding("disk [x]", "fail", "[full]", "Free some."), Finding("python", "ok", "3.11.7")]
    printed = io.StringIO()
    render(findings, file=printed)
    assert "disk [x]" in printed.getvalue()
    assert "[full]" in printed.getvalue()
    assert "disk [x]: Free some." in printed.getvalue()
    assert "1 ok, 0 warn, 1 fail" in printed.getvalue()
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
def test_versions(version: str | None, status: str) -> None:
    assert judge_package("torch", version, "2.11", "2.13").status == status


def test_an_optional_package_may_be_missing() -> None:
    assert judge_package("wandb", None, "0.31", "0.31").status == "warn"
    assert judge_package("deepspeed", "0.19.9", "0.19.8", "0.19.8").status == "warn"


def test_the_other_apex_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "apex").mkdir(parents=True)
    (site / "apex" / "__init__.py").touch()
    (site / "apex-0.9.10.dist-info").mkdir()
    (site / "apex-0.9.10.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    monkeypatch.syspath_prepend(str(site))
    assert found("apex", tmp_path).status == "warn"
    (site / "apex" / "optimizers").mkdir()
    assert found("apex", tmp_path).value == "0.9.10 (NVIDIA's)"


def test_interpreter_paths() -> None:
    assert judge_interpreter_path("/" + "x" * 124).status == "ok"
    assert judge_interpreter_path("/" + "x" * 125).status == "warn"
    assert judge_interpreter_path("/my files/bin/python").status == "warn"


def test_missing_compiler_is_a_failure_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = found("C++ compiler", tmp_path)
    assert finding.status == "fail"
    assert "apt install g++" in finding.fix


def test_another_ninja_first_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_bin = Path(sys.executable).parent
    if not (own_bin / "ninja").exists():
        pytest.skip("ninja is not in the interpreter's own folder")
    (tmp_path / "ninja").write_text("#!/bin/sh\n")
    (tmp_path / "ninja").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{own_bin}:{os.environ['PATH']}")
    assert found("ninja", tmp_path).status == "warn"
    monkeypatch.setenv("PATH", f"{own_bin}:{tmp_path}:{os.environ['PATH']}")
    assert found("ninja", tmp_path).status == "ok"


def test_ops_and_locks(tmp_path: Path, own_extension_folder: Path) -> None:
    assert found("op cpu_adam", tmp_path).value.startswith("not built")
    (own_extension_folder / "cpu_adam").mkdir()
    (own_extension_folder / "cpu_adam" / "cpu_adam.so").touch()
    lock = own_extension_folder / "cpu_adam" / "lock"
    lock.touch()
    assert found("op cpu_adam", tmp_path).value == "built"
    finding = found("build lock", tmp_path)
    assert finding.status == "warn"
    assert f"rm {lock}" in finding.fix


def test_low_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        finding = found("open files", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.status == "warn"
    assert "ulimit -n" in finding.fix


def test_no_address_and_no_home_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostname").write_text("#!/bin/sh\n")
    (tmp_path / "hostname").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", "/dev/null/nonexistent")
    assert found("hostname -I", tmp_path).status == "warn"
    assert found("home folder", tmp_path).status == "warn"


def test_a_full_disk_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 10**18)
    assert has_failures(examine(tmp_path))
