"""Tests that task folders run no code unless they are allowed to."""

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.helpers.memorised import TASKS, load
from z2all_ds.base.errors import ConfigError, DataError, Z2allError
from z2all_ds.evaluate.harness.task_code import contained
from z2all_ds.evaluate.harness.tasks import load_tasks

TASK = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: %s
doc_to_target: "{{answer}}"
metric_list: [{metric: %s}]
"""


def write_task(folder: Path, template: str, metric: str = "exact_match") -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 3)
    (folder / "mine.yaml").write_text(TASK % (template, metric))
    (folder / "helpers.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\ndef text(doc): return doc['question']\n")
    return folder


@pytest.fixture(autouse=True)
def _data_cache() -> None:
    load("sums")  # enables offline mode and a data cache for tests


def test_a_function_of_a_task_folder_needs_the_flag(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_task(tmp_path / "tasks", "!function helpers.text")
    with pytest.raises(ConfigError, match=r"runs code: !function helpers\.text.*--allow-task-code"):
        load_tasks(["mine"], folder)
    assert not (folder / "ran").exists()
    task = load_tasks(["mine"], folder, allow_code=True)["tasks"]["mine"]
    assert (folder / "ran").exists() and task.doc_to_text({"question": "q"}) == "q"
    assert f"warning: running code of {folder}" in capfd.readouterr().err


def test_a_function_of_any_installed_module_needs_the_flag(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks", "!function os.system")
    with pytest.raises(ConfigError, match=r"!function os\.system"):
        load_tasks(["mine"], folder)


def test_a_program_as_metric_needs_the_flag(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks", '"{{question}}"', str(tmp_path / "tasks" / "helpers.py"))
    with pytest.raises(ConfigError, match="runs code: metric"):
        load_tasks(["mine"], folder)
    assert not (folder / "ran").exists()


def test_a_metric_of_anyone_on_the_hub_needs_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.api.task.get_metric", lambda name, *_: pytest.fail(f"{name} was loaded"))
    with pytest.raises(ConfigError, match="runs code: metric someone/count"):
        load_tasks(["mine"], write_task(tmp_path / "tasks", '"{{question}}"', "someone/count"))


@pytest.mark.parametrize(("path", "shown"), [("./rows", ".*/rows"), ("pandas", "pandas"), ("sql", "sql")])
def test_data_that_run_code_when_loaded_need_the_flag(tmp_path: Path, path: str, shown: str) -> None:
    folder = write_task(tmp_path / "tasks", '"{{question}}"')
    (folder / "rows").mkdir()
    (folder / "helpers.py").rename(folder / "rows" / "rows.py")
    (folder / "mine.yaml").write_text((folder / "mine.yaml").read_text().replace("path: json", f"path: {path}"))
    with pytest.raises(ConfigError, match=f"runs code: data {shown}"):
        load_tasks(["mine"], folder)
    assert not (folder / "ran").exists()


def test_prompt_files_make_no_objects(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks", '"{{question}}"')
    (folder / "prompts.yaml").write_text("prompts: {a: {doc_to_text: b, doc_to_target: !!python/name:os.system }}\n")
    with open(folder / "mine.yaml", "a") as file:
        file.write(f"use_prompt: '{folder}/prompts.yaml:a'\n")
    with pytest.raises(DataError, match="python/name"):
        fill_in(folder)


def test_a_fifo_among_the_tasks_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks", '"{{question}}"')
    os.mkfifo(folder / "other.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_tasks(["mine"], folder)


def fill_in(folder: Path) -> str:
    with contained():
        task = load_tasks(["mine"], folder)["tasks"]["mine"]
        return str(task.doc_to_text(task.eval_docs[0]))


def test_code_of_a_tokenizer_that_a_task_names_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Mine", null]}}')
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with contained(), pytest.raises(ValueError, match="trust_remote_code"):
        AutoTokenizer.from_pretrained(str(tmp_path), trust_remote_code=True)
    assert not (tmp_path / "ran").exists()


def test_templates_cannot_reach_python(tmp_path: Path) -> None:
    code = f"{{{{ cycler.__init__.__globals__.os.popen('touch {tmp_path}/ran').read() }}}}"
    with pytest.raises(Z2allError):
        fill_in(write_task(tmp_path / "bad", f'"{code}"'))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(DataError):
        fill_in(write_task(tmp_path / "wrong", '"{{ missing }}"'))
    assert fill_in(write_task(tmp_path / "good", '"{{question}} ="')) == "1 + 1 ="


def test_plain_tasks_are_unchanged() -> None:
    task = load_tasks(["zh_school"], TASKS)["tasks"]["zh_school"]
    before = [task.doc_to_text(doc) for doc in task.eval_docs]
    with contained():
        assert [task.doc_to_text(doc) for doc in task.eval_docs] == before
