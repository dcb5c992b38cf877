"""Who may import whom (the layout's rules), read from the sources, and checked once more in real processes."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "z2all_ds"
HEAVY = {"torch", "deepspeed", "transformers"}
KERNEL_LIBRARIES = {"flash_attn", "liger_kernel", "apex", "xformers", "torchao", "bitsandbytes"}
NOT_BASE = {"cli", "__main__", "quickstart"}
MAY_KNOW_DEEPSPEED = (
    *("train/engine.py", "train/op_builds.py", "train/optimizers/", "checkpoint/", "export/"),
    "bench/peers/",  # other people's ways of training
)
MAY_KNOW_KERNELS = (f"{PACKAGE}.ops.", f"{PACKAGE}.train.optimizers.", f"{PACKAGE}.bench.peers.")


@dataclass(frozen=True)
class Import:
    """One imported module. `at_start`: it is loaded with the file, not later inside a function."""

    module: str
    at_start: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


class _Collector(ast.NodeVisitor):
    def __init__(self, package: str) -> None:
        self.package, self.inside_function, self.found = package, False, set[Import]()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        outside, self.inside_function = self.inside_function, True
        self.generic_visit(node)
        self.inside_function = outside

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.orelse:
                self.visit(child)
            return
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        self._add(module)
        for alias in node.names:  # perhaps a module of that package; those that are none are dropped later
            self._add(f"{module}.{alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self._add(str(node.args[0].value))
        self.generic_visit(node)

    def _add(self, module: str) -> None:
        self.found.add(Import(module, at_start=not self.inside_function))


def imports_of_source(source: str, package: str = PACKAGE) -> set[Import]:
    collector = _Collector(package)
    collector.visit(ast.parse(source))
    return collector.found


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of the whole package."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(module: str) -> frozenset[Import]:
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(imports_of_source(path.read_text(encoding="utf-8"), package))


def tops(module: str) -> set[str]:
    return {found.top for found in imports_of(module)}


def own_modules(module: str, at_start_only: bool) -> set[str]:
    """Modules of this package that `module` imports, and the packages around them, which are loaded too."""
    found = set()
    for one in imports_of(module):
        if one.module in modules() and (one.at_start or not at_start_only):
            parts = one.module.split(".")
            found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found


def loaded_with(module: str) -> set[str]:
    """Everything of this package that importing `module` loads."""
    parts = module.split(".")
    todo = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    seen: set[str] = set()
    while todo:
        current = todo.pop()
        seen.add(current)
        todo |= own_modules(current, at_start_only=True) - seen
    return seen


def room(module: str) -> str:
    """The room a module is in; '' for a top-level file."""
    parts = modules()[module].relative_to(ROOT / PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def is_base(module: str) -> bool:
    return room(module) == "" and module.rpartition(".")[2] not in NOT_BASE


def in_rooms(*names: str) -> list[str]:
    found = [module for module in modules() if room(module) in names]
    assert found, f"no room called {names}"
    return found


BASE = [module for module in modules() if is_base(module)]
WITHOUT_TORCH = [*in_rooms("corpus", "cluster", "plan", "doctor"), *BASE]


# The reader of imports itself


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", {Import("torch.nn", True)}),
        ("def f():\n    import torch", {Import("torch", False)}),
        ("f = lambda: __import__('torch')", {Import("torch", False)}),
        ("class A:\n    import torch", {Import("torch", True)}),
        ("try:\n    import apex\nexcept ImportError:\n    apex = None", {Import("apex", True)}),
        ("import importlib\nimportlib.import_module('apex')", {Import("importlib", True), Import("apex", True)}),
        ("async def f():\n    def g():\n        import a", {Import("a", False)}),
        ("from torch import nn", {Import("torch", True), Import("torch.nn", True)}),
        ("from . import x", {Import("z2all_ds.room", True), Import("z2all_ds.room.x", True)}),
        ("from ..cli import x", {Import("z2all_ds.cli", True), Import("z2all_ds.cli.x", True)}),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy", {Import("numpy", True)}),
    ],
)
def test_imports_are_seen(source: str, expected: set[Import]) -> None:
    assert imports_of_source(source, "z2all_ds.room") == expected


def test_what_is_loaded_is_followed_through_packages() -> None:
    assert {"z2all_ds", "z2all_ds.model", "z2all_ds.model.modeling_z2all"} <= loaded_with("z2all_ds.model.stock_keys")
    assert "torch" in tops("z2all_ds.model.modeling_z2all")
    assert {f"{PACKAGE}.config", f"{PACKAGE}.errors", f"{PACKAGE}.world", PACKAGE} <= set(BASE)


# The rules


@pytest.mark.parametrize("module", BASE)
def test_base_files_stand_on_the_standard_library(module: str) -> None:
    for found in imports_of(module):
        if found.top == PACKAGE:
            target = found.module if found.module in modules() else found.module.rpartition(".")[0]
            assert is_base(target), f"{module} imports {found.module}"
        elif found.top in {"rich", "fsspec"}:
            assert not found.at_start, f"{module} imports {found.top} before it is needed"
        else:
            assert found.top in {*sys.stdlib_module_names, "pydantic", "yaml"}, f"{module} imports {found.module}"


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_rooms_for_login_nodes_never_need_torch(module: str) -> None:
    assert not tops(module) & HEAVY
    for imported in own_modules(module, at_start_only=False):
        for loaded in loaded_with(imported):
            at_start = {found.top for found in imports_of(loaded) if found.at_start}
            assert not at_start & HEAVY, f"{module} -> {imported} -> {loaded}"


def test_data_and_model_never_meet() -> None:
    for here, there in (("data", "model"), ("model", "data")):
        for module in in_rooms(here):
            reached = own_modules(module, at_start_only=False)
            for imported in set(reached):
                reached |= loaded_with(imported)
            assert not [target for target in reached if room(target) == there], module


def test_only_few_files_know_deepspeed() -> None:
    knowing = {str(path.relative_to(ROOT / PACKAGE)) for name, path in modules().items() if "deepspeed" in tops(name)}
    assert "train/engine.py" in knowing
    assert [file for file in sorted(knowing) if not file.startswith(MAY_KNOW_DEEPSPEED)] == []


def test_kernel_libraries_are_imported_late_and_in_their_ops_alone() -> None:
    seen = set()
    for module in modules():
        for found in imports_of(module):
            if found.top in KERNEL_LIBRARIES:
                seen.add(found.top)
                assert module.startswith(MAY_KNOW_KERNELS), f"{module} imports {found.module}"
                assert not found.at_start, f"{module} imports {found.module} when it is loaded"
    assert "liger_kernel" in seen


def test_triton_is_known_to_our_kernels_alone_and_they_are_loaded_late() -> None:
    kernels = f"{PACKAGE}.ops.kernels"
    knowing = {module for module in modules() for found in imports_of(module) if found.top == "triton"}
    assert {module for module in knowing if module.startswith(f"{kernels}.")} == knowing
    assert f"{kernels}.rms_norm" in knowing
    for module in modules():
        loaded = {found.module for found in imports_of(module) if found.at_start}
        assert module.startswith(kernels) or not any(name.startswith(f"{kernels}.") for name in loaded), module


def test_nothing_imports_the_command() -> None:
    command = {module for module in modules() if room(module) == "cli"}
    importers = [m for m in modules() if m not in command and command & own_modules(m, at_start_only=False)]
    assert importers == [f"{PACKAGE}.__main__"]


def test_what_measures_is_used_by_the_command_alone() -> None:
    bench = {module for module in modules() if room(module) == "bench"}
    importers = {m for m in modules() if m not in bench and bench & own_modules(m, at_start_only=False)}
    assert {room(module) for module in importers} == {"cli"}


def test_the_command_imports_its_rooms_late() -> None:
    command = {module for module in modules() if room(module) == "cli"}
    assert len(command) > 3
    for module in command:
        assert own_modules(module, at_start_only=True) - command <= {PACKAGE, f"{PACKAGE}.errors"}
        outside = {found.top for found in imports_of(module) if found.at_start} - {PACKAGE}
        assert outside - set(sys.stdlib_module_names) == {"typer"}


# The same in real processes: what is loaded in the end, other people's packages included


def loaded_by(code: str) -> set[str]:
    """Names of the top-level modules in a fresh interpreter after `code`."""
    report = "import atexit, sys; atexit.register(lambda: print('LOADED', *{m.partition('.')[0] for m in sys.modules}))"
    answer = subprocess.run([sys.executable, "-c", f"{report}\n{code}"], capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    last = answer.stdout.splitlines()[-1].split()
    assert last[0] == "LOADED"
    return set(last[1:])


def test_the_bare_package_is_light() -> None:
    loaded = loaded_by("import z2all_ds")
    assert PACKAGE in loaded
    assert not loaded & {*HEAVY, "numpy", "pydantic", "yaml", "rich", "typer"}


def test_help_is_light() -> None:
    loaded = loaded_by(
        "import runpy, sys; sys.argv = ['z2all', '--help']; runpy.run_module('z2all_ds', run_name='__main__')"
    )
    assert "typer" in loaded
    assert not loaded & {*HEAVY, "numpy", "pydantic", "tokenizers", "matplotlib", "wandb"}


def test_rooms_for_login_nodes_are_light() -> None:
    names = [f"{PACKAGE}.{name}" for name in ("config", "corpus", "plan", "cluster", "cluster.launch", "doctor")]
    names += [f"{PACKAGE}.{name}" for name in ("track.writer", "track.plots", "checkpoint.layout")]
    names += [f"{PACKAGE}.track.sinks.{name}" for name in ("feed", "keeper", "session", "sync")]
    names += WITHOUT_TORCH
    loaded = loaded_by("\n".join(f"import {name}" for name in names))
    assert not loaded & {*HEAVY, "wandb", "matplotlib", "tensorboard"}


def test_what_train_checks_before_the_launch_is_light() -> None:
    assert not loaded_by("import z2all_ds.train.command") & HEAVY
