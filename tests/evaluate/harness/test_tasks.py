"""Tests for finding and loading tasks with local data; missing data raises one-line errors."""

import logging
import shutil
import sys
from pathlib import Path

import lm_eval.api.task
import pytest

from tests.helpers.memorised import TASKS, load
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.evaluate.harness.tasks import (
    list_tasks,
    load_tasks,
    matching,
    quiet,
    require_harness,
    resolve_data_paths,
    task_manager,
)


def test_data_paths_are_relative_to_the_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load("sums")  # enables offline mode and a data cache for tests
    folder = tmp_path / "任务 one"
    shutil.copytree(TASKS, folder)
    monkeypatch.chdir(tmp_path)
    task = load_tasks(["zh_school"], folder)["tasks"]["zh_school"]
    assert len(task.eval_docs) == 24
    assert len(task.sampler.df) == 4
    assert task.eval_docs[0]["question"].startswith("水在标准大气压下")


def test_only_data_paths_that_exist_next_to_the_yaml_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "a.jsonl").touch()
    files = {"test": ["a.jsonl", "b.jsonl"], "dev": "*.jsonl", "far": "/x/a.jsonl"}
    config = {
        "dataset_path": "./here",
        "dataset_kwargs": {"data_files": files, "data_dir": "there", "field": "a.jsonl"},
    }
    resolve_data_paths(config, tmp_path)
    assert config == {
        "dataset_path": f"{tmp_path}/here",
        "dataset_kwargs": {
            "data_files": {
                "test": [f"{tmp_path}/a.jsonl", "b.jsonl"],
                "dev": f"{tmp_path}/*.jsonl",
                "far": "/x/a.jsonl",
            },
            "data_dir": "there",
            "field": "a.jsonl",
        },
    }


def test_tasks_of_a_folder_are_listed() -> None:
    require_harness()
    listed = {one.name: one for one in list_tasks(TASKS)}
    assert {"zh_school", "en_school", "science", "sums", "school"} <= set(listed)
    assert listed["school"].kind == "group" and listed["sums"].kind == "task"
    assert Path(listed["sums"].file) == TASKS / "sums.yaml"


def test_tasks_are_selected_by_group_and_pattern() -> None:
    loaded = load("school", "s?ms")
    assert set(loaded["tasks"]) == {"zh_school", "en_school", "sums"}
    assert set(loaded["groups"]) == {"school"}
    assert set(load("*_school")["tasks"]) == {"zh_school", "en_school"}


def test_data_missing_from_the_cache_is_reported() -> None:
    with pytest.raises(DataError) as caught:
        load("hub_only")
    message = str(caught.value)
    assert "z2all-nobody/not-there are not on this machine" in message and "--include" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("data/zh_test.jsonl", "data/gone.jsonl"), "gone.jsonl"),
        (("{{question.strip()}}", "{{question.strip("), "Template"),
        (('"{{question.strip()}}', '"{{frage.strip()}}'), "frage"),
        (("output_type: multiple_choice", "output_type: guess"), "guess"),
    ],
)
def test_a_task_that_does_not_load_is_reported_with_its_file(
    tmp_path: Path, change: tuple[str, str], reason: str
) -> None:
    load("sums")
    yaml = (TASKS / "zh_school.yaml").read_text(encoding="utf-8")
    assert change[0] in yaml
    (tmp_path / "broken.yaml").write_text(yaml.replace(*change), encoding="utf-8")
    shutil.copytree(TASKS / "data", tmp_path / "data")
    with pytest.raises(DataError) as caught, quiet():
        load_tasks(["zh_school"], tmp_path)
    message = str(caught.value)
    assert message.startswith("task zh_school: does not load (") and reason in message
    assert str(tmp_path / "broken.yaml") in message


def test_unknown_tasks_and_folders_are_refused() -> None:
    with pytest.raises(ConfigError, match="similar: zh_school"):
        matching(["zh_scool"], task_manager(TASKS, with_defaults=False))
    with pytest.raises(ConfigError, match="names no task"):
        load()
    with pytest.raises(ConfigError, match="is not a folder"):
        list_tasks(TASKS / "nowhere")


def test_a_missing_extra_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MachineError, match=r"pip install 'z2all_ds\[eval\]'"):
        require_harness()


def test_quiet_restores_logging_and_progress_bars() -> None:
    bars, level = lm_eval.api.task.tqdm, logging.getLogger("lm_eval").level
    with quiet():
        assert list(lm_eval.api.task.tqdm([1, 2])) == [1, 2]
        assert not logging.getLogger("lm_eval").isEnabledFor(logging.WARNING)
    assert lm_eval.api.task.tqdm is bars
    assert logging.getLogger("lm_eval").level == level
