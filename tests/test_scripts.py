"""The shell scripts up to the install, in real shells with few tools on their PATH."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("launch/**/*.sh"))
TOOLS = ("bash", "dirname", "df", "awk", "cat", "cksum", "mktemp", "rm", "sleep", "tail", "id", "uname", "env")


def folder_of_tools(folder: Path, *further: str) -> Path:
    """Create a folder for PATH that contains only the usual tools."""
    folder.mkdir()
    for name in (*TOOLS, *further):
        found = shutil.which(name)
        if not found:
            pytest.skip(f"this machine has no {name}")
        (folder / name).symlink_to(found)
    return folder


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the files that the scripts need, so that a mistake cannot damage the .venv of the checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run_script(tree: Path, name: str, tools: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    bash = tools / "bash"
    own = {"PATH": str(tools), "HOME": str(tree), **variables}
    return subprocess.run([bash, tree / "launch" / name], env=own, capture_output=True, text=True, timeout=300)


def one_line(answer: "subprocess.CompletedProcess[str]") -> str:
    assert answer.returncode == 6, answer.stderr
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    return line


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_shell(script: Path) -> None:
    answer = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_all_scripts_are_found() -> None:
    assert {"environment.sh", "quickstart.sh", "test.sh"} <= {script.name for script in SCRIPTS}


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
@pytest.mark.parametrize("variables", [{}, {"CXX": "no_such_compiler"}], ids=["no CXX", "a CXX that is not there"])
def test_without_a_compiler_nothing_is_installed(name: str, variables: dict[str, str], tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    tools = folder_of_tools(tmp_path / "bin")
    (tools / "python3").symlink_to(sys.executable)
    if name == "test.sh" and os.geteuid() == 0:
        (tools / "id").unlink()  # root would install a compiler; this one reports a normal user
        (tools / "id").write_text("#!/bin/sh\necho 1000\n")
        (tools / "id").chmod(0o755)
    line = one_line(run_script(tree, name, tools, **variables))
    assert line == (
        f"MachineError: C++ compiler: {variables.get('CXX', 'c++ g++')} not found, and DeepSpeed compiles ops at first"
        " use. Install g++ (Debian: apt install g++)."
    )
    assert not (tree / ".venv").exists()


@pytest.mark.parametrize("in_name", ["tree", "environment"])
def test_the_tests_refuse_a_path_with_a_blank(in_name: str, tmp_path: Path) -> None:
    paths = {name: tmp_path / (f"my {name}" if name == in_name else name) for name in ("tree", "environment")}
    tree, environment = copy_of_the_tree(paths["tree"]), paths["environment"]
    tools = folder_of_tools(tmp_path / "bin", "g++")
    line = one_line(run_script(tree, "test.sh", tools, Z2ALL_VENV=str(environment)))
    assert line.startswith(f"MachineError: {paths[in_name]}: has a blank")
    assert not environment.exists()


@pytest.mark.parametrize("python", ["", "/no/such/python", "bash"])
def test_without_a_usable_python_nothing_is_installed(python: str, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    tools = folder_of_tools(tmp_path / "bin", "g++")
    line = one_line(run_script(tree, "quickstart.sh", tools, **({"PYTHON": python} if python else {})))
    assert line == (
        f"MachineError: Python: none of {python or 'python3.12 python3.11 python3.10 python3'} is version 3.10 or"
        " newer. Install one, or set PYTHON=/path/to/python3."
    )
    assert not (tree / ".venv").exists()


def test_an_old_python_is_not_used(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    tools = folder_of_tools(tmp_path / "bin", "g++")
    for name in ("python3", "python3.12"):  # the version check fails, as with an old Python
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
        (tools / name).chmod(0o755)
    assert "is version 3.10 or newer" in one_line(run_script(tree, "quickstart.sh", tools))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a mounted file system of 20 MB."""
    place = tmp_path / "small disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(place)]
    try:
        answer = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if answer.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {answer.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_too_little_disk_space_is_reported_before_the_install(small_disk: Path, tmp_path: Path) -> None:
    tree = copy_of_the_tree(small_disk / "tree")
    tools = folder_of_tools(tmp_path / "bin", "g++")
    line = one_line(run_script(tree, "quickstart.sh", tools, PYTHON=sys.executable))
    free, _, rest = line.removeprefix("MachineError: ").partition(" ")
    assert 0 < int(free) <= 20
    assert rest == (
        f"MB free at {tree}: the install needs 3000 MB. Free some space, or set Z2ALL_VENV=/path on another disk."
    )
    assert not (tree / ".venv").exists()


def test_the_disk_of_the_virtual_environment_is_checked(small_disk: Path, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    tools = folder_of_tools(tmp_path / "bin", "g++")
    environment = small_disk / "some" / "where" / "venv"
    line = one_line(run_script(tree, "quickstart.sh", tools, PYTHON=sys.executable, Z2ALL_VENV=str(environment)))
    assert f" MB free at {small_disk}: the install needs 3000 MB." in line
    assert not environment.exists()
