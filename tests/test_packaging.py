"""Packaging: a real wheel is built from a copy of the tree, inspected, and run from another folder."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from z2all_ds import __version__

ROOT = Path(__file__).resolve().parents[1]

FIND_FROM_THE_WHEEL = """
from pathlib import Path
import z2all_ds
from z2all_ds.base.config import load_run_config
from z2all_ds.corpus.converters.builtin import CHINESE_TEXTS
from z2all_ds.base.resources import find_named_file

home = Path(z2all_ds.__file__).parent
found = [find_named_file("zero2", "DeepSpeed JSON", "ds_configs", ".json"), CHINESE_TEXTS]
found.append(find_named_file("z2all_tiny", "preset", "presets", ".yaml"))
print(*[path.relative_to(home) for path in found if path.is_file()])
print(load_run_config("z2all_tiny").model.hidden_size)
print(home)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that pip builds from a copy of the checkout, without network access."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip(f"the files of the tree are not known here: {listing.stderr.strip()}")
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():  # listed by git, but may be deleted in the working tree
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    assert (copy / "tests" / Path(__file__).name).is_file()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(out),
    ]
    answer = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (built,) = out.iterdir()
    return built


def test_the_wheel_contains_all_needed_files_and_no_others(wheel: Path) -> None:
    assert wheel.name == f"z2all_ds-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"z2all_ds/py.typed", "z2all_ds/corpus/converters/chinese_texts.txt"}
    expected |= {f"z2all_ds/ds_configs/{path.name}" for path in (ROOT / "ds_configs").glob("*.json")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "z2all_ds/presets").glob("*.yaml")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "z2all_ds").rglob("*.py")}
    assert len([name for name in expected if name.endswith(".json")]) >= 6
    assert expected - names == set()
    assert {name.split("/")[0] for name in names} == {"z2all_ds", f"z2all_ds-{__version__}.dist-info"}
    assert [name for name in names if "test" in name.lower() or name.endswith(".pyc")] == []


def test_files_in_the_wheel_match_the_source_tree(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    assert archive.read("z2all_ds/ds_configs/zero2.json") == (ROOT / "ds_configs/zero2.json").read_bytes()
    assert archive.read("z2all_ds/presets/z2all_1b.yaml") == (ROOT / "z2all_ds/presets/z2all_1b.yaml").read_bytes()
    assert b"z2all = z2all_ds.__main__:main" in archive.read(f"z2all_ds-{__version__}.dist-info/entry_points.txt")


def test_shipped_files_are_found_in_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "unpacked 包", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(place)
    elsewhere.mkdir()
    own = {**os.environ, "PYTHONPATH": str(place)}
    answer = subprocess.run(
        [sys.executable, "-c", FIND_FROM_THE_WHEEL], cwd=elsewhere, env=own, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == [
        "ds_configs/zero2.json corpus/converters/chinese_texts.txt presets/z2all_tiny.yaml",
        "128",
        str(place / "z2all_ds"),
    ]
    command = [sys.executable, "-m", "z2all_ds", "plan", "--model", "z2all_7b"]
    assert subprocess.run(command, cwd=elsewhere, env=own, capture_output=True).returncode == 0


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return CORE and EXTRAS of setup.py without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    found = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("CORE", "EXTRAS")
    }
    return found["CORE"], found["EXTRAS"]


def package(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match
    return match[0].lower()


def test_setup_py_lists_all_requirements() -> None:
    core, extras = requirements()
    needed = {"torch", "deepspeed", "transformers", "tokenizers", "safetensors", "pyarrow", "wandb", "pydantic"}
    needed |= {"pyyaml", "numpy", "orjson", "rich", "typer", "matplotlib", "ninja", "setuptools"}
    assert needed - set(map(package, core)) == set()
    assert set(extras) == {"gpu", "corpus", "tokenizer", "ray", "eval", "board", "tensorboard", "fonts", "dev"}
    by_extra = {name: set(map(package, listed)) for name, listed in extras.items()}
    assert {"flash-attn", "xformers", "liger-kernel", "torchao"} <= by_extra["gpu"]
    assert {"zstandard", "datasketch"} <= by_extra["corpus"]
    assert {"sentencepiece"} <= by_extra["tokenizer"]
    assert {"ray"} <= by_extra["ray"]
    assert {"lm-eval"} <= by_extra["eval"]
    assert {"starlette", "uvicorn", "plotly"} <= by_extra["board"]
    assert {"tensorboard"} <= by_extra["tensorboard"]
    assert {"mplfonts"} <= by_extra["fonts"]
    assert {"pytest", "hypothesis", "ruff", "mypy"} <= by_extra["dev"]
    # The package named apex on PyPI is not NVIDIA's.
    assert "apex" not in set.union(set(map(package, core)), *by_extra.values())


def test_every_imported_third_party_package_is_required() -> None:
    """Every imported third-party package is in CORE or EXTRAS, or comes with another package.

    bench/peers is excluded: its files run in separate environments, with the packages that environments.py installs.
    """
    core, extras = requirements()
    required = {package(one).replace("-", "_") for listed in (core, *extras.values()) for one in listed}
    installed_as = {"yaml": "pyyaml", "pynvml": "nvidia_ml_py"}
    brought_along = {"huggingface_hub"}  # installed with transformers
    brought_along |= {"triton"}  # installed with the GPU builds of torch
    brought_along |= {"apex", "fused_layer_norm_cuda"}  # NVIDIA's Apex, which is in no package index
    imported = set()
    for path in (ROOT / "z2all_ds").rglob("*.py"):
        if path.parent.name == "peers":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            imported |= {name.partition(".")[0] for name in names}
    outside = imported - set(sys.stdlib_module_names) - {"z2all_ds"} - brought_along
    assert {installed_as.get(name, name) for name in outside} - required == set()


def test_the_tested_versions_are_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert "deepspeed==0.19.8" in pins
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9.]*", pin)] == []
    core, _ = requirements()
    assert set(map(package, core)) - set(map(package, pins)) == set()
