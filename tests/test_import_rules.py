"""Rules for imports between subpackages, checked in the sources and in real processes."""

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
LAYERS = (
    ("cli",),
    ("bench", "quickstart"),
    ("cluster", "plan"),
    ("train",),
    ("evaluate",),
    ("export",),
    ("zero",),
    ("checkpoint",),
    ("track", "data", "model"),
    ("tokenizer", "ops"),
    ("corpus",),
    ("base",),
)
"""Subpackages from the highest layer to the lowest. Each imports only from lower layers, also inside functions."""
MAY_KNOW_DEEPSPEED = ("zero/", "bench/peers/")
MAY_KNOW_KERNELS = (f"{PACKAGE}.ops.", f"{PACKAGE}.zero.optimizers.", f"{PACKAGE}.bench.peers.")
TORCH_ON_NODES = f"{PACKAGE}.cluster.preflight.health_worker"
"""The only module of `cluster` that imports torch: it runs on nodes where torch is installed."""
MAX_FILES_IN_TRAIN = 15


@dataclass(frozen=True)
class Import:
    """One imported module. `at_start`: imported when the file is loaded, not inside a function."""

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
        for alias in node.names:  # may be a module of that package; other names are dropped later
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
    """Return the dotted name and the file of every module in the package."""
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
    """Return the modules of this package that `module` imports, and their parent packages, which are loaded too."""
    found = set()
    for one in imports_of(module):
        if one.module in modules() and (one.at_start or not at_start_only):
            parts = one.module.split(".")
            found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found


def named_modules(module: str) -> set[str]:
    """Return the modules of this package that the imports in `module` name, without their parent packages."""
    named = {found.module for found in imports_of(module) if found.module in modules()}
    return {name for name in named if not any(other.startswith(f"{name}.") for other in named)}


def loaded_with(module: str) -> set[str]:
    """Return all modules of this package that importing `module` loads."""
    parts = module.split(".")
    todo = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    seen: set[str] = set()
    while todo:
        current = todo.pop()
        seen.add(current)
        todo |= own_modules(current, at_start_only=True) - seen
    return seen


def subpackage(module: str) -> str:
    """Return the subpackage that contains a module; '' for modules directly in the package."""
    parts = modules()[module].relative_to(ROOT / PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def modules_in(*names: str) -> list[str]:
    found = [module for module in modules() if subpackage(module) in names]
    assert found, f"no subpackage called {names}"
    return found


BASE = modules_in("base")
WITHOUT_TORCH = [module for module in modules_in("corpus", "cluster", "plan", "base") if module != TORCH_ON_NODES]


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of nodes that reach each other, by Tarjan's algorithm."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = len(numbers)
        stack.append(node)
        for target in graph[node]:
            if target not in numbers:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == numbers[node]:
            group = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(group)

    for node in graph:
        if node not in numbers:
            visit(node)
    return found


# The import collector itself


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
        ("from . import x", {Import("z2all_ds.data", True), Import("z2all_ds.data.x", True)}),
        ("from ..cli import x", {Import("z2all_ds.cli", True), Import("z2all_ds.cli.x", True)}),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy", {Import("numpy", True)}),
    ],
)
def test_imports_of_a_source_are_collected(source: str, expected: set[Import]) -> None:
    assert imports_of_source(source, "z2all_ds.data") == expected


def test_loaded_modules_are_followed_through_packages() -> None:
    assert {"z2all_ds", "z2all_ds.model", "z2all_ds.model.modeling_z2all"} <= loaded_with("z2all_ds.model.stock_keys")
    assert "torch" in tops("z2all_ds.model.modeling_z2all")
    assert {f"{PACKAGE}.base.config.sections", f"{PACKAGE}.base.errors"} <= set(BASE)


# The rules


def test_every_subpackage_is_in_one_layer() -> None:
    folders = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert {name for layer in LAYERS for name in layer} == folders
    assert {path.name for path in (ROOT / PACKAGE).glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("module", [module for module in modules() if subpackage(module)])
def test_imports_go_from_higher_layers_to_lower_ones(module: str) -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    here = subpackage(module)
    for target in own_modules(module, at_start_only=False):
        there = subpackage(target)
        assert there in ("", here) or level[there] > level[here], f"{module} imports {target}"


def test_the_architecture_guide_lists_the_layers() -> None:
    guide = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = guide.partition("## Layers")[2].split("```")[1]
    assert tuple(tuple(line.split()) for line in block.split("\n") if line) == LAYERS


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [{"b", "c"}]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_there_are_no_import_cycles() -> None:
    graph = {module: named_modules(module) - {module} for module in modules()}
    assert cycles(graph) == []


def test_folders_of_train_have_few_files() -> None:
    for folder in (ROOT / PACKAGE / "train").rglob("*"):
        assert not folder.is_dir() or len(list(folder.glob("*.py"))) <= MAX_FILES_IN_TRAIN, folder


@pytest.mark.parametrize("module", BASE)
def test_base_imports_few_libraries(module: str) -> None:
    for found in imports_of(module):
        if found.top in {"rich", "fsspec"}:
            assert not found.at_start, f"{module} imports {found.top} before it is needed"
        else:
            assert found.top in {*sys.stdlib_module_names, "pydantic", "yaml", PACKAGE}, f"{module}: {found.module}"


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_subpackages_for_login_nodes_never_import_torch(module: str) -> None:
    assert not tops(module) & HEAVY
    for imported in own_modules(module, at_start_only=False):
        for loaded in loaded_with(imported):
            at_start = {found.top for found in imports_of(loaded) if found.at_start}
            assert not at_start & HEAVY, f"{module} -> {imported} -> {loaded}"


def test_data_and_model_do_not_import_each_other() -> None:
    for here, there in (("data", "model"), ("model", "data")):
        for module in modules_in(here):
            reached = own_modules(module, at_start_only=False)
            for imported in set(reached):
                reached |= loaded_with(imported)
            assert not [target for target in reached if subpackage(target) == there], module


def test_only_zero_and_the_bench_peers_import_deepspeed() -> None:
    knowing = {str(path.relative_to(ROOT / PACKAGE)) for name, path in modules().items() if "deepspeed" in tops(name)}
    assert "zero/engine.py" in knowing
    assert [file for file in sorted(knowing) if not file.startswith(MAY_KNOW_DEEPSPEED)] == []


def test_kernel_libraries_are_imported_inside_functions_and_only_where_allowed() -> None:
    seen = set()
    for module in modules():
        for found in imports_of(module):
            if found.top in KERNEL_LIBRARIES:
                seen.add(found.top)
                assert module.startswith(MAY_KNOW_KERNELS), f"{module} imports {found.module}"
                assert not found.at_start, f"{module} imports {found.module} when it is loaded"
    assert "liger_kernel" in seen


def test_only_our_kernels_import_triton_and_they_are_imported_inside_functions() -> None:
    kernels = f"{PACKAGE}.ops.kernels"
    knowing = {module for module in modules() for found in imports_of(module) if found.top == "triton"}
    assert {module for module in knowing if module.startswith(f"{kernels}.")} == knowing
    assert f"{kernels}.rms_norm" in knowing
    for module in modules():
        loaded = {found.module for found in imports_of(module) if found.at_start}
        assert module.startswith(kernels) or not any(name.startswith(f"{kernels}.") for name in loaded), module


def test_the_command_line_imports_other_subpackages_inside_functions() -> None:
    command = {module for module in modules() if subpackage(module) == "cli"}
    assert len(command) > 3
    allowed = {PACKAGE, *(f"{PACKAGE}.{name}" for name in ("base", "base.console", "base.errors", "base.reports"))}
    for module in command:
        assert own_modules(module, at_start_only=True) - command <= allowed
        outside = {found.top for found in imports_of(module) if found.at_start} - {PACKAGE}
        assert outside - set(sys.stdlib_module_names) == {"typer"}


# The same rules in real processes: all modules that are loaded, including third-party packages


def loaded_by(code: str) -> set[str]:
    """Return the names of the top-level modules that a new interpreter has loaded after running `code`."""
    report = "import atexit, sys; atexit.register(lambda: print('LOADED', *{m.partition('.')[0] for m in sys.modules}))"
    answer = subprocess.run([sys.executable, "-c", f"{report}\n{code}"], capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    last = answer.stdout.splitlines()[-1].split()
    assert last[0] == "LOADED"
    return set(last[1:])


def test_importing_the_package_loads_no_large_library() -> None:
    loaded = loaded_by("import z2all_ds")
    assert PACKAGE in loaded
    assert not loaded & {*HEAVY, "numpy", "pydantic", "yaml", "rich", "typer"}


def test_help_loads_no_large_library() -> None:
    loaded = loaded_by(
        "import runpy, sys; sys.argv = ['z2all', '--help']; runpy.run_module('z2all_ds', run_name='__main__')"
    )
    assert "typer" in loaded
    assert not loaded & {*HEAVY, "numpy", "pydantic", "tokenizers", "matplotlib", "wandb"}


def test_importing_subpackages_for_login_nodes_loads_no_large_library() -> None:
    names = [f"{PACKAGE}.{name}" for name in ("base.config", "corpus", "plan", "cluster", "train.command")]
    names += [f"{PACKAGE}.{name}" for name in ("track.writer", "track.plots", "checkpoint.layout")]
    names += [f"{PACKAGE}.track.sinks.{name}" for name in ("feed", "session", "sync")]
    names += WITHOUT_TORCH
    loaded = loaded_by("\n".join(f"import {name}" for name in names))
    assert not loaded & {*HEAVY, "wandb", "matplotlib", "tensorboard"}


def test_checks_of_train_before_the_launch_load_no_large_library() -> None:
    assert not loaded_by("import z2all_ds.train.command") & HEAVY
