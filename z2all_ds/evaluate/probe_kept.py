"""Probe results of a run, kept in its folder. They remain when checkpoints are deleted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import make_folder, write_whole
from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.evaluate.probe_report import ModelAnswers, as_file
from z2all_ds.evaluate.probes import Probe, file_stem


class KeptAnswers:
    """Answers of one run to the probes of one file."""

    def __init__(self, run: Path, file: str, probes: Sequence[Probe]) -> None:
        """Refuse a different file of the same name: its rows would be overwritten."""
        self._file, self._probes = file, probes
        self._path = RunFolder(run).evaluations / f"probes_{file_stem(file)}.json"
        before = _read(self._path)
        asked_before = before.get("questions")
        self._rows = [row for row in before.get("rows", []) if isinstance(row, dict)]
        if not before or asked_before == [probe.question for probe in probes]:
            return
        other = before.get("file")
        if isinstance(other, str) and Path(other).resolve() != Path(file).resolve():
            rule = f"holds the results of {other}"
            raise ConfigError(f"file {self._path}", rule, "Rename one of the two probe files.")
        self._rows = []
        say(f"{self._path.name} starts over: the probes of {file} have changed")

    def write(self, found: Sequence[ModelAnswers]) -> None:
        """Write the answers, together with the rows of steps whose checkpoints no longer exist."""
        content = as_file(self._file, self._probes, found)
        rows = {row["step"]: row for row in [*self._rows, *content["rows"]] if isinstance(row.get("step"), int)}
        content["rows"] = [rows[step] for step in sorted(rows)]
        make_folder(self._path.parent)
        write_whole(self._path, json.dumps(content, indent=1, ensure_ascii=False))


def _read(path: Path) -> dict[str, Any]:
    """Return the content; empty if the file is missing or unreadable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("rows", []), list) else {}
