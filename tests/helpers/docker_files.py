"""Parsers for the files of launch/docker, limited to the syntax that these files use; no docker engine is needed."""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "launch" / "docker"
REFERENCE = re.compile(r"\$\{(\w+)(?::-([^{}]*))?\}")


class Instruction(NamedTuple):
    """An instruction of a Dockerfile, with its lines joined."""

    name: str
    rest: str


def read_dockerfile(path: Path) -> list[Instruction]:
    """Return the instructions; comment lines are also skipped between continued lines, as docker does."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    instructions = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        instructions.append(Instruction(name.upper(), " ".join(rest.split())))
    return instructions


def assigned(instructions: list[Instruction], kind: str) -> dict[str, str]:
    """Return the names and values of all ARG or ENV instructions."""
    pairs = [
        word.partition("=")
        for instruction in instructions
        if instruction.name == kind
        for word in shlex.split(instruction.rest)
    ]
    return {name: value for name, _, value in pairs}


def copied(instructions: list[Instruction]) -> list[str]:
    """Return the sources of all COPY instructions."""
    return [source for one in instructions if one.name == "COPY" for source in shlex.split(one.rest)[:-1]]


def debian_packages(instructions: list[Instruction]) -> list[str]:
    """Return the packages that apt-get installs."""
    found = []
    for instruction in instructions:
        for command in instruction.rest.split("&&"):
            _, install, words = command.partition("apt-get install")
            found += [word for word in words.split() if not word.startswith("-")] if install else []
    return found


class _Loader(yaml.SafeLoader):
    pass


class _Reset:
    """The value of compose's `!reset`, which removes a setting of the base file."""


RESET = _Reset()
_Loader.add_constructor("!reset", lambda loader, node: RESET)


def read_compose(name: str, **variables: str) -> dict[str, Any]:
    """Return a compose file with anchors and variables resolved; `variables` must have those without a default."""
    text = (DOCKER / name).read_text(encoding="utf-8")

    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            assert match[2] is not None, f"{name}: {match[0]} has no default"
        return variables.get(match[1]) or match[2]

    while REFERENCE.search(text):  # innermost first
        text = REFERENCE.sub(value, text)
    return yaml.load(text, _Loader)  # a SafeLoader


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return the mounts of a service as path in the container -> (source, whether it is read-only)."""
    found = {}
    for entry in service.get("volumes", []):
        if isinstance(entry, dict):
            found[entry["target"]] = (entry["source"], entry.get("read_only", False))
        else:
            source, target, *mode = entry.split(":")
            found[target] = (source, mode == ["ro"])
    return found


def published_ports(service: dict[str, Any]) -> dict[int, int]:
    """Return the published ports of a service as port of the machine -> port of the container."""
    pairs = [entry.split(":") for entry in service.get("ports", [])]
    return {int(outside): int(inside) for outside, inside in pairs}


def commands_in(text: str) -> list[list[str]]:
    """Return the words after `z2all` of every such command in a document, a script or a YAML file."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = [match[1] for match in re.finditer(r"(?<![\w/.$-])z2all ((?=[a-z])[^`\n]*)", joined)]
    return [shlex.split(line, comments=True) for line in found]
