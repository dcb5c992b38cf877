import subprocess
import sys
from itertools import islice

from z2all_ds.corpus.converters import BuiltIn, find_converter
from z2all_ds.corpus.converters.builtin import read_chinese_texts
from z2all_ds.corpus.draft import Draft


def drafts(name: str, count: int = 10_000, wanted: int | None = None) -> list[Draft]:
    found = find_converter(name)
    assert isinstance(found, BuiltIn)
    return list(islice(found.generate(wanted), count))


def test_code_samples_are_spread_over_the_standard_library_and_deterministic() -> None:
    first = drafts("python_code", 60)
    assert first == drafts("python_code", 60)
    assert len({draft.title[0] for draft in first}) > 10
    parts = {part for draft in drafts("python_code") for part in draft.title.split("/")[:-1]}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "lib2to3"}


def test_docstrings_become_deterministic_prose_with_headings() -> None:
    some = drafts("python_docstrings", 20)
    assert some == drafts("python_docstrings", 20)
    modules = [draft for draft in some if draft.title.startswith("Documentation of ")]
    assert any("\n\n## Function " in draft.content or "\n\n## Class " in draft.content for draft in modules)
    assert all(draft.content.startswith("The module ") for draft in modules)


def test_chinese_samples_start_with_the_essays_and_continue_to_the_requested_size() -> None:
    essays = read_chinese_texts()
    assert len({title for title, _ in essays}) == len(essays) == 50
    assert sum(len(content) for _, content in essays) > 24_000
    found = drafts("chinese_sample", wanted=120_000)
    assert [(d.title, d.content) for d in found[: len(essays)]] == essays
    assert 120_000 <= sum(len(d.content.encode()) for d in found) < 125_000


def test_importing_the_corpus_package_does_not_import_torch_or_transformers() -> None:
    code = "import sys, z2all_ds.corpus; print([m for m in ('torch', 'transformers', 'deepspeed') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
