"""Queries of the machine, with real processes, files and environment variables."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.processes import ended
from z2all_ds.base import machine
from z2all_ds.base.errors import MachineError

WITHOUT_HOME = {"HOME": "/dev/null/nonexistent", "PATH": os.environ["PATH"]}


def executable(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


# Compiler and disk


def test_the_compiler_is_cxx_then_cplusplus_then_gplusplus(tmp_path: Path) -> None:
    gxx = executable(tmp_path / "g++")
    assert machine.require_compiler({"PATH": str(tmp_path)}) == str(gxx)
    cxx = executable(tmp_path / "c++")
    assert machine.require_compiler({"PATH": str(tmp_path)}) == str(cxx)
    clang = executable(tmp_path / "clang++")
    assert machine.require_compiler({"PATH": str(tmp_path), "CXX": "clang++ -O2"}) == str(clang)


def test_the_error_for_a_missing_compiler_says_how_to_install_one(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"apt install g\+\+.*dnf install gcc-c\+\+.*conda install gxx"):
        machine.require_compiler({"PATH": str(tmp_path)})
    with pytest.raises(MachineError, match=r"CXX=icpx.*unset CXX"):
        machine.require_compiler({"PATH": str(tmp_path), "CXX": "icpx"})


def test_free_disk_is_measured_where_a_folder_will_be_created(tmp_path: Path) -> None:
    assert machine.require_free_disk(tmp_path / "not" / "yet", 1, "a test") > 0
    with pytest.raises(MachineError, match=rf"GB free at {tmp_path}: the corpus needs 1000000000.00 GB. Free some"):
        machine.require_free_disk(tmp_path / "not" / "yet", 10**18, "the corpus")


# Folders and environment


def test_the_extension_folder_is_the_default_of_torch(tmp_path: Path) -> None:
    """Ask torch in a child process in which TORCH_EXTENSIONS_DIR is not set."""
    program = "from torch.utils.cpp_extension import _get_build_directory as f; print(f('an_op', False))"
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    answer = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert str(machine.extensions_dir(environment) / "an_op") == answer.strip()


def test_torch_extensions_dir_sets_the_extension_folder(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    assert machine.extensions_dir({"TORCH_EXTENSIONS_DIR": str(wanted)}) == wanted
    assert wanted.is_dir()
    with pytest.raises(MachineError, match="TORCH_EXTENSIONS_DIR=/dev/null/x"):
        machine.extensions_dir({"TORCH_EXTENSIONS_DIR": "/dev/null/x"})


def test_without_a_home_folder_caches_go_to_a_private_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = machine.default_environment(1, WITHOUT_HOME)
    private = tmp_path / f"z2all-{os.getuid()}"
    assert private.stat().st_mode & 0o777 == 0o700
    for name in ("TORCH_EXTENSIONS_DIR", "HF_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR"):
        assert Path(environment[name]).is_relative_to(private)
    assert Path(environment["TORCH_EXTENSIONS_DIR"]).is_dir()


def test_a_private_temporary_folder_that_is_a_symlink_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"z2all-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MachineError, match="belongs to another user"):
        machine.extensions_dir(WITHOUT_HOME)


def test_code_of_torch_compile_is_cached_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    private = tmp_path / f"z2all-{os.getuid()}"
    assert machine.default_environment(1, WITHOUT_HOME)["TORCHINDUCTOR_CACHE_DIR"] == f"{private}/torchinductor"
    assert "TORCHINDUCTOR_CACHE_DIR" not in machine.default_environment(1, dict(os.environ))
    machine.set_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == ""  # set by the user
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    machine.set_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{private}/torchinductor"
    private.chmod(0o777)
    with pytest.raises(MachineError, match=f"can be written to by other users. Run `chmod 700 {private}`"):
        machine.default_environment(1, WITHOUT_HOME)


@pytest.mark.parametrize("place", [".", "cpu_adam"])
def test_ops_that_others_may_have_written_are_refused(tmp_path: Path, place: str) -> None:
    chosen, environment = tmp_path / place, {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    chosen.mkdir(exist_ok=True)
    for mode in (0o700, 0o755, 0o775):
        chosen.chmod(mode)
        assert machine.extensions_dir(environment) == tmp_path
    chosen.chmod(0o777)
    with pytest.raises(MachineError, match=f"^TORCH_EXTENSIONS_DIR={tmp_path}: {chosen} can be written to by"):
        machine.extensions_dir(environment)
    chosen.chmod(0o755)
    if os.geteuid() == 0:  # only root can give a folder to another user
        os.chown(chosen, 1234, -1)
        with pytest.raises(MachineError, match=f"{chosen} belongs to another user"):
            machine.extensions_dir(environment)


def test_default_environment_on_a_cpu_machine(tmp_path: Path) -> None:
    before = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    result = machine.default_environment(2, before)
    assert result["DS_ACCELERATOR"] == "cpu"
    assert result["TOKENIZERS_PARALLELISM"] == "false"
    assert int(result["OMP_NUM_THREADS"]) == max(1, machine.usable_cores() // 2)
    assert machine.default_environment(10**6, before)["OMP_NUM_THREADS"] == "1"
    own_bin = str(Path(sys.executable).parent)
    assert result["PATH"] == f"{own_bin}:/usr/bin:/bin"
    assert machine.default_environment(2, before | {"PATH": result["PATH"]})["PATH"] == result["PATH"]
    assert ("GLOO_SOCKET_IFNAME" in result) == ("lo" in [name for _, name in socket.if_nameindex()])
    assert not {"HF_HOME", "TRITON_CACHE_DIR"} & result.keys()


def test_variables_set_by_the_user_are_not_overridden(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth7", "DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "-1"}
    result = machine.default_environment(2, own | {"HOME": str(tmp_path), "PATH": "/bin"})
    assert not own.keys() & result.keys()


def test_cxx_is_set_if_only_gplusplus_is_installed(tmp_path: Path) -> None:
    gxx = executable(tmp_path / "g++")
    assert machine.default_environment(1, {"HOME": str(tmp_path), "PATH": str(tmp_path)})["CXX"] == str(gxx)


# Processes, ports, GPUs


def test_child_processes_lists_only_direct_children_that_still_run() -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    with ended(shell):
        assert shell.stdout
        grandchild = int(shell.stdout.readline())
        start = machine.process_start_time(grandchild)
        try:
            assert machine.child_processes(shell.pid) == [(grandchild, start)]
            assert grandchild not in dict(machine.child_processes(os.getpid()))
            assert shell.pid in dict(machine.child_processes(os.getpid()))
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert shell.pid not in dict(machine.child_processes(os.getpid()))


def test_a_process_is_identified_by_pid_and_start_time() -> None:
    with ended(subprocess.Popen(["sleep", "60"], text=True)) as process:
        started = machine.process_start_time(process.pid)
        assert started is not None
        assert machine.process_is_alive(process.pid, started)
        assert machine.process_is_alive(process.pid, None)
        assert not machine.process_is_alive(process.pid, started - 1)  # a later process with the same pid
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead but not yet reaped: a zombie
        assert not machine.process_is_alive(process.pid, started)
    assert not machine.process_is_alive(process.pid, started)
    assert machine.process_start_time(process.pid) is None
    assert not machine.process_is_alive(0, None)
    assert not machine.process_is_alive(-1, None)


def test_the_start_time_is_found_for_process_names_with_parentheses_and_spaces(tmp_path: Path) -> None:
    odd = tmp_path / "a) S (b"
    odd.symlink_to(sys.executable)
    program = "print(1, flush=True); import time; time.sleep(60)"
    with ended(subprocess.Popen([odd, "-S", "-c", program], stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout
        process.stdout.readline()
        own_start = machine.process_start_time(os.getpid())
        assert own_start is not None
        assert (machine.process_start_time(process.pid) or 0) >= own_start


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        port = machine.free_port()
        probe.bind(("127.0.0.1", port))
        assert probe.getsockname()[1] == port


def test_hidden_gpus_are_not_counted() -> None:
    assert machine.gpu_count({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert machine.gpu_count({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert machine.gpu_count({"DS_ACCELERATOR": "cpu"}) == 0
    present = machine.gpu_count({})
    assert machine.gpu_count({"CUDA_VISIBLE_DEVICES": "0"}) == min(1, present)
    assert machine.gpu_count({"CUDA_VISIBLE_DEVICES": "9999"}) == 0


def test_packages_in_a_folder_with_a_blank_get_a_link_without_blanks(tmp_path: Path) -> None:
    plain = tmp_path / "site-packages" / "torch"
    assert machine.blank_free_packages(plain) is None
    assert machine.blank_free_packages(None) is None
    odd = tmp_path / "a 目录" / "site-packages" / "torch"
    odd.mkdir(parents=True)
    link = machine.blank_free_packages(odd)
    assert link is not None
    assert " " not in str(link)
    assert (link / "torch").resolve() == odd.resolve()
    assert machine.blank_free_packages(odd) == link
    link.unlink()


def test_one_thread_each_limits_only_variables_that_the_user_did_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with machine.one_thread_each():
        said = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "OPENBLAS_NUM_THREADS=1" in said
    assert "OMP_NUM_THREADS=7" in said  # set by the user
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "7"
