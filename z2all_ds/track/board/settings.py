"""run.yaml and ds_config.json as flat keys, and the keys in which runs differ."""

import json
from typing import Any

from z2all_ds.base.url_passwords import without_passwords
from z2all_ds.base.yaml_text import BadYaml, load_yaml
from z2all_ds.track.files import Files

LONGEST_BYTES = 4 << 20


class Settings:
    """Both files of one run; read again when they change."""

    def __init__(self, files: Files, config: str, ds_config: str) -> None:
        self._files, self._paths = files, (config, ds_config)
        self._stats: list[list[float]] = [[], []]
        self._flat: list[dict[str, Any]] = [{}, {}]

    def update(self, stats: list[list[float]]) -> None:
        for number, stat in enumerate(stats):
            if stat != self._stats[number]:
                content = self._files.read(self._paths[number], 0, LONGEST_BYTES)
                self._flat[number] = flattened(parse(content), "ds_config." if number else "")
                self._stats[number] = stat

    @property
    def flat(self) -> dict[str, Any]:
        return {**self._flat[0], **self._flat[1]}


def parse(content: bytes) -> Any:
    """Parse JSON or YAML, without passwords in URLs; return {} for a file that is only half written."""
    text = content.decode("utf-8", "replace")
    try:
        return without_passwords(json.loads(text))
    except (ValueError, RecursionError):
        pass
    try:
        return without_passwords(load_yaml(text))
    except (BadYaml, RecursionError):
        return {}


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"a.b": 1} for {"a": {"b": 1}}. Lists are kept as values unless they contain dicts."""
    if isinstance(value, dict) and value:
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        items = [(str(number), inner) for number, inner in enumerate(value)]
    else:
        return {prefix.rstrip("."): value} if prefix.rstrip(".") not in ("", "ds_config") else {}
    flat: dict[str, Any] = {}
    for key, inner in items:
        flat.update(flattened(inner, f"{prefix}{key}."))
    return flat


def differences(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every key of any run with its values, those that differ first."""
    rows = []
    for key in sorted({key for flat in settings for key in flat}):
        values = [flat.get(key) for flat in settings]
        rows.append({"key": key, "values": values, "differs": any(value != values[0] for value in values[1:])})
    return sorted(rows, key=lambda row: not row["differs"])
