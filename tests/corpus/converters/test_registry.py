import re
from pathlib import Path

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.converters import Source, describe_converters, find_converter, load_plugin

NAMES = [
    "baike2018qa", "chinese_sample", "generic", "github_python", "jsonl", "news2016zh", "python_code",
    "python_docstrings", "text", "webtext2019zh", "wikipedia_cn", "wikipedia_en", "wudao", "zhihu_kol",
]  # fmt: skip


def test_every_converter_has_a_description() -> None:
    # Other tests in this process may have loaded plugins.
    words = {name: line for name, line in describe_converters().items() if is_ours(name)}
    assert list(words) == NAMES
    assert all(re.fullmatch(r".{20,110}\.", line) for line in words.values())


def is_ours(name: str) -> bool:
    """Return whether a converter belongs to the package, not to a plugin."""
    found = find_converter(name)
    function = found.convert if isinstance(found, Source) else found.generate
    return function.__module__.startswith("z2all_ds.")


def test_an_unknown_name_gives_the_list_of_converters_and_the_closest_match() -> None:
    words = "'baike2018'.*baike2018qa, chinese_sample, generic, .*Did you mean baike2018qa"
    with pytest.raises(ConfigError, match=words):
        find_converter("baike2018")


def test_a_plugin_that_is_loaded_twice_registers_once(tmp_path: Path) -> None:
    plugin = tmp_path / "forum.py"
    plugin.write_text(
        "from z2all_ds.corpus.converters import source\n"
        "from z2all_ds.corpus.draft import Draft\n\n"
        "@source('plugged_forum', form='jsonl', revision=3)\n"
        "def forum(row):\n"
        "    '''Threads.'''\n"
        "    return Draft(row.pop('subject'), row.pop('body'), others=row)\n"
    )
    load_plugin(plugin)
    load_plugin(tmp_path / "." / "forum.py")
    found = find_converter("plugged_forum")
    assert isinstance(found, Source)
    assert (found.form, found.revision) == ("jsonl", 3)
    draft = found.convert({"subject": "s", "body": "b", "n": 1})
    assert (draft.title, draft.content, draft.others) == ("s", "b", {"n": 1})


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "importing it failed .*ZeroDivisionError"),
        ("def", "importing it failed .*SyntaxError"),
        ("from z2all_ds.corpus.converters import source\nsource('wudao', form='x')(print)", "already registered"),
    ],
)
def test_plugins_that_cannot_be_imported_are_reported(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(ConfigError, match=words):
        load_plugin(tmp_path / "bad.py")


def test_a_missing_plugin_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such Python file"):
        load_plugin(tmp_path / "none.py")
