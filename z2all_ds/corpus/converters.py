"""Converters: generators that turn one kind of raw text into drafts of records, found by name.

A converter gets the raw files (none for the built-in sources) and the number of bytes the build wants, and yields
drafts in an order that depends on nothing but them. One that is `already_spread` promises that any beginning of its
stream is a fair sample of the whole, so a build with a byte limit can stop early; of the others, the build reads
everything first and then takes documents from all over.
"""

import ast
import difflib
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.corpus.chinese_generator import generate_documents
from z2all_ds.corpus.schema import without_lone_surrogates
from z2all_ds.errors import ConfigError, DataError

SHORTEST_DOCSTRING = 80
"""In characters: shorter docstrings are mostly signatures in words ("Return the value.")."""
CHINESE_TEXTS = Path(__file__).with_name("chinese_texts.txt")
CHINESE_SAMPLE_BYTES = 2_000_000
"""What `chinese_sample` gives when the build sets no limit: it could go on for ever."""
CHINESE_SEED = 20230717

_LEFT_OUT_FOLDERS = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3",
    "encodings", "pydoc_data",  # generated tables, not code that anyone wrote
}  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A record without its numbers."""

    title: str
    content: str
    category: str = ""
    desc: str = ""
    others: dict[str, Any] = field(default_factory=dict)


Convert = Callable[[list[Path], int | None], Iterator[Draft]]


@dataclass(frozen=True)
class Converter:
    """A registered converter."""

    name: str
    convert: Convert
    already_spread: bool
    needs_raw: bool
    revision: int
    """Raise it when the output changes, so that corpora of the old kind are not taken for new ones."""


_REGISTRY: dict[str, Converter] = {}


def converter(
    name: str, *, already_spread: bool = False, needs_raw: bool = True, revision: int = 1
) -> Callable[[Convert], Convert]:
    """Registers a generator function under a name."""

    def register(convert: Convert) -> Convert:
        assert name not in _REGISTRY, f"two converters are called {name}"
        _REGISTRY[name] = Converter(name, convert, already_spread, needs_raw, revision)
        return convert

    return register


def describe_converters() -> dict[str, str]:
    """Name -> first line of its docstring, for those who look for one."""
    return {name: (found.convert.__doc__ or "").splitlines()[0] for name, found in sorted(_REGISTRY.items())}


def find_converter(name: str) -> Converter:
    """The converter of that name; a miss lists those there are."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    near = difflib.get_close_matches(name, _REGISTRY, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    rule = f"the converters are {', '.join(sorted(_REGISTRY))}"
    raise ConfigError(f"converter {name!r}", rule, f"{guess}Choose one of these.")


@converter("python_code", already_spread=True, needs_raw=False)
def python_code(raw: list[Path], wanted_bytes: int | None) -> Iterator[Draft]:
    """The sources of the standard library of the running Python."""
    for name in _spread(_library_files()):
        content = _library_text(name)
        if content.strip():
            yield Draft(name, content, "code", "Source of a module of the Python standard library.")


@converter("python_docstrings", already_spread=True, needs_raw=False)
def python_docstrings(raw: list[Path], wanted_bytes: int | None) -> Iterator[Draft]:
    """English: the docstrings of each standard library module, as one document with headings, and help topics."""
    topics = _help_topics()
    for name in _spread([*_library_files(), *topics]):
        if name in topics:
            yield Draft(f"Help on {name}", topics[name], "english", "A topic of the built-in help of Python.")
            continue
        try:
            tree = ast.parse(_library_text(name))
        except (SyntaxError, ValueError):  # templates and files for other versions
            continue
        sections = list(_docstring_sections(tree, ""))
        if sections:
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            content = without_lone_surrogates(f"The module {module}\n\n" + "\n\n".join(sections) + "\n")
            yield Draft(f"Documentation of {module}", content, "english", "Docstrings of a standard library module.")


@converter("chinese_sample", already_spread=True, needs_raw=False)
def chinese_sample(raw: list[Path], wanted_bytes: int | None) -> Iterator[Draft]:
    """Chinese: the essays and stories that come with the package, then generated texts."""
    size = 0
    for title, content in read_chinese_texts():
        size += len(content.encode())
        yield Draft(title, content, "prose", "随包附带的原创短文。")
    wanted = CHINESE_SAMPLE_BYTES if wanted_bytes is None else wanted_bytes
    for category, title, content in generate_documents(CHINESE_SEED, max(0, wanted - size)):
        yield Draft(title, content, category, "由程序按种子生成的中文短文。", {"seed": CHINESE_SEED})


@converter("jsonl")
def jsonl(raw: list[Path], wanted_bytes: int | None) -> Iterator[Draft]:
    """Raw files with one JSON object a line: `text` or `content`, if there is one `title`; the rest goes to others."""
    fix = "Repair or remove that line; each needs its text under `text` or `content`."
    for path in raw:
        with open(path, "rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    values = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}:{number}", f"not JSON in UTF-8 ({error})", fix) from None
                if not isinstance(values, dict):
                    raise DataError(f"{path}:{number}", f"a JSON object is wanted, not {type(values).__name__}", fix)
                key = "text" if "text" in values else "content"
                text, title = values.pop(key, None), values.pop("title", "")
                if not isinstance(text, str) or not isinstance(title, str):
                    raise DataError(f"{path}:{number}", "text (or content) and title must be strings", fix)
                # through JSON, so that escaped surrogates deep in `others` are mended too
                others = json.loads(without_lone_surrogates(json.dumps(values, ensure_ascii=False)))
                yield Draft(without_lone_surrogates(title), without_lone_surrogates(text), "text", "", others)


@converter("text")
def text(raw: list[Path], wanted_bytes: int | None) -> Iterator[Draft]:
    """Plain text files in UTF-8, each one document, titled by its name."""
    for path in raw:
        try:
            content = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            fix = f"Convert it first, for example `iconv -f GB18030 -t UTF-8 {path.name}`."
            raise DataError(str(path), f"not UTF-8 ({error.reason} at byte {error.start})", fix) from None
        yield Draft(path.stem, content, "text")


def read_chinese_texts() -> list[tuple[str, str]]:
    """(title, text with its title) of the shipped essays; lines of === stand between them."""
    texts = CHINESE_TEXTS.read_text("utf-8").split("\n===\n")
    return [(whole.strip().split("\n", 1)[0], whole.strip() + "\n") for whole in texts]


def _spread(names: list[str]) -> list[str]:
    """In the order of a hash: always the same, and any beginning of it comes from all over the alphabet."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def _library_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _library_files() -> list[str]:
    """Paths within the standard library."""
    root, files = _library_root(), []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT_FOLDERS]  # not even looked into: they are large
        # _sysconfigdata holds the paths and flags of the machine Python was built on
        wanted = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        files += [(Path(folder) / name).relative_to(root).as_posix() for name in wanted]
    return files


def _library_text(name: str) -> str:
    """Empty for the few files that are not UTF-8."""
    try:
        return (_library_root() / name).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""


def _help_topics() -> dict[str, str]:
    """name -> text of what `help("NAME")` prints; {} where a distribution leaves them out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {name: without_lone_surrogates(content) for name, content in topics.items()}


def _docstring_sections(node: ast.AST, prefix: str) -> Iterator[str]:
    """The long docstrings of a module, a class or a function and of what is inside, each under its heading."""
    kinds = {ast.ClassDef: "Class", ast.FunctionDef: "Function", ast.AsyncFunctionDef: "Function"}
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        words = ast.get_docstring(node)
        if words and len(words) >= SHORTEST_DOCSTRING:
            yield words if isinstance(node, ast.Module) else f"## {kinds[type(node)]} {prefix}{node.name}\n\n{words}"
        if not isinstance(node, ast.Module):
            prefix = f"{prefix}{node.name}."
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _docstring_sections(child, prefix)
