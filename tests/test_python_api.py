"""The examples of docs/python_api.md, run one after the other."""

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.processes]

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "python_api.md"


def test_the_examples_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    printed = capsys.readouterr().out
    assert "attention: " in printed
    assert re.search(r"logits differ by [-+0-9.e]+ at most", printed)
    assert (tmp_path / "hf_model" / "config.json").is_file()
