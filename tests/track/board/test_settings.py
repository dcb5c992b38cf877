"""Settings of runs as flat keys, and their differences."""

from pathlib import Path

import pytest

from z2all_ds.track.board.run import WatchedRun
from z2all_ds.track.board.settings import Settings, differences, flattened, parse
from z2all_ds.track.files import Files


def test_nested_settings_become_flat_keys() -> None:
    value = {
        "train": {"steps": 5, "betas": [0.9, 0.95], "empty": {}},
        "stages": [{"name": "a"}, {"name": "b"}],
        3: None,
    }
    assert flattened(value) == {
        "train.steps": 5,
        "train.betas": [0.9, 0.95],
        "train.empty": {},
        "stages.0.name": "a",
        "stages.1.name": "b",
        "3": None,
    }
    assert flattened({}) == flattened([]) == flattened(None, "ds_config.") == {}


def test_missing_and_incomplete_files_are_ignored(tmp_path: Path) -> None:
    config, ds_config = tmp_path / "run.yaml", tmp_path / "ds_config.json"
    settings = Settings(Files(), str(config), str(ds_config))

    def look() -> None:
        settings.update(Files().stats([str(config), str(ds_config)])[1])

    look()
    assert settings.flat == {}
    config.write_text("train:\n  steps: 5\n")
    ds_config.write_text('{"zero_optimization": {"stage":')
    look()
    assert settings.flat == {"train.steps": 5}
    ds_config.write_text('{"zero_optimization": {"stage": 2}}')
    look()
    assert settings.flat == {"train.steps": 5, "ds_config.zero_optimization.stage": 2}
    assert parse(b"\xff\xfe: [") == {}
    assert parse(b"note: 2026-13-45") == {"note": "2026-13-45"}  # a date is text


def test_a_linked_file_and_yaml_aliases_are_not_shown(tmp_path: Path) -> None:
    """Both could show or become more than the run folder holds."""
    (tmp_path / "secret.json").write_text('{"password": "geheim"}')
    run = tmp_path / "run"
    run.mkdir()
    (run / "ds_config.json").symlink_to("../secret.json")
    (run / "run.yaml").write_text("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n")
    watched = WatchedRun(0, Files(), str(run), str(run))
    with pytest.raises(OSError, match="a symbolic link"):
        watched.update()
    assert watched.settings.flat == {}


def test_differences_come_first() -> None:
    rows = differences([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}, {"a": 1}])
    assert rows == [
        {"key": "b", "values": [2, 3, None], "differs": True},
        {"key": "a", "values": [1, 1, 1], "differs": False},
        {"key": "c", "values": [None, None, None], "differs": False},
    ]
