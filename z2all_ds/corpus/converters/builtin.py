"""Built-in sources of text: Python's standard library, its docstrings, and the Chinese texts of this package.

The order of documents depends only on the Python version, and the first documents are a fair sample of all.
"""

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from z2all_ds.corpus.converters.chinese_generator import generate_documents
from z2all_ds.corpus.converters.registry import built_in
from z2all_ds.corpus.draft import Draft
from z2all_ds.corpus.schema import without_lone_surrogates

SHORTEST_DOCSTRING = 80
"""In characters; shorter docstrings mostly repeat the signature ("Return the value.")."""
CHINESE_TEXTS = Path(__file__).with_name("chinese_texts.txt")
CHINESE_SAMPLE_BYTES = 2_000_000
"""Size of `chinese_sample` without a limit in the build; the generator itself has no end."""
CHINESE_SEED = 20230717

_LEFT_OUT_FOLDERS = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3",
    "encodings", "pydoc_data",  # generated tables, not written by people
}  # fmt: skip


@built_in("python_code", is_code=True)
def python_code(wanted_bytes: int | None) -> Iterator[Draft]:
    """Code: the sources of the standard library of the running Python."""
    for name in _spread(_library_files()):
        content = _library_text(name)
        if content.strip():
            yield Draft(name, content, "code", "Source of a module of the Python standard library.")


@built_in("python_docstrings")
def python_docstrings(wanted_bytes: int | None) -> Iterator[Draft]:
    """English: docstrings of the standard library, one document per module, and help topics."""
    topics = _help_topics()
    for name in _spread([*_library_files(), *topics]):
        if name in topics:
            yield Draft(f"Help on {name}", topics[name], "english", "A topic of the built-in help of Python.")
            continue
        try:
            tree = ast.parse(_library_text(name))
        except (SyntaxError, ValueError):  # templates and files for other Python versions
            continue
        sections = list(_docstring_sections(tree, ""))
        if sections:
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            content = without_lone_surrogates(f"The module {module}\n\n" + "\n\n".join(sections) + "\n")
            yield Draft(f"Documentation of {module}", content, "english", "Docstrings of a standard library module.")


@built_in("chinese_sample")
def chinese_sample(wanted_bytes: int | None) -> Iterator[Draft]:
    """Chinese: essays and stories of this package, then generated texts."""
    size = 0
    for title, content in read_chinese_texts():
        size += len(content.encode())
        yield Draft(title, content, "prose", "随包附带的原创短文。")
    wanted = CHINESE_SAMPLE_BYTES if wanted_bytes is None else wanted_bytes
    for category, title, content in generate_documents(CHINESE_SEED, max(0, wanted - size)):
        yield Draft(title, content, category, "由程序按种子生成的中文短文。", {"seed": CHINESE_SEED})


def read_chinese_texts() -> list[tuple[str, str]]:
    """Return (title, text with its title) of the shipped essays, which lines of === separate."""
    texts = CHINESE_TEXTS.read_text("utf-8").split("\n===\n")
    return [(whole.strip().split("\n", 1)[0], whole.strip() + "\n") for whole in texts]


def _spread(names: list[str]) -> list[str]:
    """Sort names by a hash: the order is always the same and mixes the whole alphabet."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def _library_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _library_files() -> list[str]:
    """Return paths relative to the standard library."""
    root, files = _library_root(), []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT_FOLDERS]  # large folders
        # _sysconfigdata has paths and flags of the machine that built Python
        wanted = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        files += [(Path(folder) / name).relative_to(root).as_posix() for name in wanted]
    return files


def _library_text(name: str) -> str:
    """Return the text of a file, "" for the few that are not UTF-8."""
    try:
        return (_library_root() / name).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""


def _help_topics() -> dict[str, str]:
    """Return name -> text that `help("NAME")` prints; {} in distributions without them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {name: without_lone_surrogates(content) for name, content in topics.items()}


def _docstring_sections(node: ast.AST, prefix: str) -> Iterator[str]:
    """Yield the long docstrings of a module, class or function and of its members, each with a heading."""
    kinds = {ast.ClassDef: "Class", ast.FunctionDef: "Function", ast.AsyncFunctionDef: "Function"}
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text and len(text) >= SHORTEST_DOCSTRING:
            yield text if isinstance(node, ast.Module) else f"## {kinds[type(node)]} {prefix}{node.name}\n\n{text}"
        if not isinstance(node, ast.Module):
            prefix = f"{prefix}{node.name}."
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _docstring_sections(child, prefix)
