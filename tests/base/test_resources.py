"""Files found by shipped name or by path, and the error for an unknown name."""

from pathlib import Path

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.resources import find_named_file, resource_dir

ROOT = Path(__file__).resolve().parents[2]


def find_json(wanted: str) -> Path:
    return find_named_file(wanted, "DeepSpeed JSON", "ds_configs", ".json")


def test_shipped_files_are_found_by_name_with_and_without_suffix() -> None:
    assert find_json("zero2") == ROOT / "ds_configs" / "zero2.json"
    assert find_json("zero2.json") == ROOT / "ds_configs" / "zero2.json"
    assert find_named_file("z2all_1b", "preset", "presets", ".yaml") == ROOT / "z2all_ds/presets/z2all_1b.yaml"


def test_a_file_of_the_user_takes_precedence_over_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "我的 config.json"
    own.write_text("{}")
    assert find_json(str(own)) == own
    monkeypatch.chdir(tmp_path)
    assert find_json(own.name) == own
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_json("~/" + own.name) == own
    (tmp_path / "zero2.json").write_text("{}")
    assert find_json("zero2.json") == tmp_path / "zero2.json"


def test_an_unknown_name_lists_the_shipped_files_and_suggests_the_closest() -> None:
    with pytest.raises(ConfigError) as caught:
        find_json("zero_2")
    shipped = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))
    assert str(caught.value) == (
        f"DeepSpeed JSON 'zero_2': neither a file nor one of the shipped ones ({', '.join(shipped)})."
        " Did you mean zero2? Give one of these names or the path of your own .json file."
    )


@pytest.mark.parametrize("wanted", ["somewhere/zero2", "./nothing.json", "", "."])
def test_a_path_is_never_used_as_a_shipped_name(wanted: str) -> None:
    with pytest.raises(ConfigError, match="neither a file nor one of the shipped ones"):
        find_json(wanted)


def test_a_folder_that_was_not_installed_is_a_bug_not_a_user_error() -> None:
    with pytest.raises(FileNotFoundError, match="the installation is incomplete"):
        resource_dir("no_such_folder")
