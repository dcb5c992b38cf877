"""run.yaml and ds_config.json as flat keys, and where runs differ in them."""

import json
from typing import Any

import yaml

from z2all_ds.track.board.files import Files

LONGEST_BYTES = 4 << 20
MISSING = None


class Settings:
    """Both files of one run; read again where they have changed."""

    def __init__(self, files: Files, config: str, ds_config: str) -> None:
        self._files, self._paths = files, (config, ds_config)
        self._seen: list[list[float]] = [[], []]
        self._flat: list[dict[str, Any]] = [{}, {}]

    def look(self, signs: list[list[float]]) -> None:
        for number, sign in enumerate(signs):
            if sign != self._seen[number]:
                content = self._files.read(self._paths[number], 0, LONGEST_BYTES)
                self._flat[number] = flattened(parse(content), "ds_config." if number else "")
                self._seen[number] = sign

    @property
    def flat(self) -> dict[str, Any]:
        return {**self._flat[0], **self._flat[1]}


def parse(content: bytes) -> Any:
    """JSON or YAML; nothing where the file is half-written."""
    try:
        return json.loads(content)
    except ValueError:
        pass
    try:
        # The C loader reads a run's YAML in a tenth of the time, where PyYAML was built with it.
        return yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError):  # also what is not UTF-8, and a date that is none
        return {}


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. Lists stay whole, unless they hold sections."""
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
    """Every key of any run, those that differ first."""
    keys = dict.fromkeys(key for flat in settings for key in flat)
    rows = []
    for key in sorted(keys):
        values = [flat.get(key, MISSING) for flat in settings]
        rows.append({"key": key, "values": values, "differs": any(value != values[0] for value in values[1:])})
    return sorted(rows, key=lambda row: not row["differs"])
