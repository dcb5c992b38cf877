import json
from pathlib import Path

import pytest

from tests.helpers.command import one_line, z2all


def test_every_format_is_measured(tmp_path: Path) -> None:
    answer = z2all("bench", "corpus", "--megabytes", "1", "--repeats", "1", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    costs = json.loads(answer.stdout)
    forms = {cost["form"]: cost for cost in costs["forms"]}
    packed = {"jsonl.gz", "jsonl.zst", "jsonl.zip", "jsonl.tar.gz"}
    assert set(forms) == {"jsonl", "json_array", "parquet", "lines", "jsonl, cleaned", *packed}
    for cost in forms.values():
        assert cost["text_bytes"] >= 1_000_000
        assert cost["text_mb_per_cpu_second"] == pytest.approx(cost["text_bytes"] / 1e6 / cost["cpu_seconds"])
        assert 20_000_000 < cost["peak_memory_bytes"] < 1_000_000_000
    for name in packed:
        assert forms[name]["raw_bytes"] < forms["jsonl"]["raw_bytes"]
    assert costs["orjson_mb_per_cpu_second"] > forms["jsonl"]["text_mb_per_cpu_second"]
    assert list(tmp_path.iterdir()) == []


def test_one_format_with_several_worker_counts_is_printed_as_text(tmp_path: Path) -> None:
    scaling = ("--workers", "1", "--workers", "2", "--clean", "exact_duplicates")
    answer = z2all("bench", "corpus", "--megabytes", "1", "--form", "jsonl", *scaling, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    first, head, second, *by_workers = answer.stdout.splitlines()
    assert [line.split()[:2] for line in by_workers] == [["1", "workers"], ["2", "workers"]]
    assert first.startswith("orjson only: ")
    assert second.startswith("jsonl ")
    assert head.startswith("format ") and " MB/s per core" in head


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--form", "xml"], "ConfigError: form 'xml': no such form. Known: jsonl, json_array, "),
        (["--megabytes", "0"], "ConfigError: megabytes=0: must be at least 1."),
        (["--repeats", "0"], "ConfigError: repeats=0: must be at least 1."),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, arguments: list[str], start: str) -> None:
    assert one_line(z2all("bench", "corpus", *arguments, cwd=tmp_path), 2).startswith(start)
