"""The nodes of a launch: from DeepSpeed's plain hostfile, or from a YAML that says what such a file cannot.

    all:                                    # holds for every node that does not say otherwise
      slots: 8
      ssh: {port: 2222, user: trainer, key: ~/.ssh/cluster}
      interface: eth0
    nodes:                                  # the first one is the master, where rank 0 runs
      node1: {inside: {address: 172.17.0.2, port: 9527}, outside: {address: 192.0.2.11, port: 30846}}
      node2: {ssh: {address: 192.0.2.12, port: 30022}, environment: {NCCL_IB_DISABLE: 1}}

Both give the same list of `Node`. A mistake is named with its line.
"""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator

from z2all_ds.base.config import merge_nested
from z2all_ds.base.config.section_errors import first_problem
from z2all_ds.base.config.sections import Section
from z2all_ds.base.errors import ClusterError
from z2all_ds.cluster.hostfile import HOST_NAME, parse_hostfile_text, read_text

YAML_SUFFIXES = (".yaml", ".yml")
SET_BY_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CROSS_RANK", "CROSS_SIZE"),
)
MORE = "See hostfiles/ for examples."


def _as_written(value: Any) -> Any:
    """1 and 0.5 are meant as text; of `yes` and `null` YAML has made something whose spelling is lost."""
    if isinstance(value, bool) or value is None:
        raise ValueError("is text: put it in quotes")
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_as_written)]
Port = Annotated[int, Field(ge=1, le=65535)]


class SshAccess(Section):
    """How to get into a node. What is not set is left to ~/.ssh/config."""

    address: str | None = None
    """Where its sshd is reached; the node's name by default."""
    port: Port | None = None
    """Port of its sshd."""
    user: str | None = None
    """Who to be there."""
    key: str | None = None
    """File of the private key."""


class Endpoint(Section):
    """An address and a port on it."""

    address: str
    """Name or number."""
    port: Port | None = None
    """Where ranks meet, if this is the master; by default the launch picks one."""


class Outside(Endpoint):
    """A node as the others reach it."""

    ssh_port: Port | None = None
    """Where other nodes reach its sshd, if that is another port than the launcher's; for the overlay."""


class NodeSettings(Section):
    """All that can be said of a node beside its name."""

    slots: int | None = Field(None, ge=1)
    """Processes to start there, one per GPU."""
    ssh: SshAccess = SshAccess()
    """How the launcher gets in."""
    inside: Endpoint | None = None
    """What the node itself calls its address; ranks on it meet the master there. By default as `outside`."""
    outside: Outside | None = None
    """Where the other nodes reach it, through a mapped port perhaps. By default the ssh address."""
    interface: str | None = None
    """Network interface of gloo and NCCL; by default the one that has the inside address."""
    environment: dict[str, Text] = Field(default_factory=dict)
    """Variables for its ranks alone. They travel in a file that only its owner can read, on no command line."""
    python: str | None = None
    """Interpreter there; by default the path of the one that launches."""

    @field_validator("environment")
    @classmethod
    def _names_are_free(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of a variable")
            if name in SET_BY_LAUNCHERS:
                raise ValueError(f"{name} is set by the launcher")
        return environment


class Node(NodeSettings):
    """One machine or container."""

    name: str
    """As in DeepSpeed's hostfile and in all messages."""
    slots: int = Field(ge=1)
    """Processes to start there, one per GPU."""

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable

    @property
    def ssh_address(self) -> str:
        return self.ssh.address or self.name

    @property
    def address_for_others(self) -> str:
        """Where other nodes reach it."""
        return self.outside.address if self.outside else (self.inside.address if self.inside else self.ssh_address)


class NodesFile(Section):
    """The YAML as a whole."""

    all: NodeSettings = NodeSettings()
    """Holds for every node that does not say otherwise."""
    nodes: dict[str, NodeSettings]
    """By name, in the order of their ranks."""


def read_nodes(path: str | os.PathLike[str]) -> list[Node]:
    """The nodes in the order of the file; the first one is where rank 0 runs."""
    file = Path(path).expanduser()
    text = read_text(file)
    if file.suffix in YAML_SUFFIXES:
        return parse_nodes_text(text, str(file))
    return [Node(name=host.name, slots=host.slots) for host in parse_hostfile_text(text, str(file))]


def parse_nodes_text(text: str, source: str) -> list[Node]:
    """The same for YAML already read; `source` names it in errors."""
    try:
        tree = yaml.compose(text, yaml.SafeLoader)
        _refuse_repeated_keys(tree, source)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error)
        raise ClusterError(where, f"not valid YAML ({problem})", "Correct the file.") from None
    if not isinstance(content, dict):
        raise ClusterError(source, "must hold a section `nodes`", MORE)
    if isinstance(content.get("nodes"), dict):  # a name alone is a node, too
        content["nodes"] = {name: {} if said is None else said for name, said in content["nodes"].items()}
    try:
        file = NodesFile.model_validate(content)
    except ValidationError as error:
        problem_found = first_problem(error, NodesFile, MORE)
        line = _line_at(tree, problem_found.location)
        what, rule, fix = problem_found.what, problem_found.rule, problem_found.fix or MORE
        raise ClusterError(f"{source}, line {line}: {what}", rule, fix) from None
    return _nodes_of(file, content, tree, source)


def _nodes_of(file: NodesFile, content: dict[str, Any], tree: Any, source: str) -> list[Node]:
    if not file.nodes:
        raise ClusterError(source, "lists no node", "Add one under `nodes`, e.g. `node1: {slots: 8}`.")
    nodes = []
    for name in file.nodes:
        where = f"{source}, line {_line_at(tree, ['nodes', name])}: {name!r}"
        if not HOST_NAME.fullmatch(name):
            raise ClusterError(where, "is no host name or address", "Use letters, digits, '.', '-' and '_'.")
        merged = merge_nested(content.get("all") or {}, content["nodes"][name])
        if merged.get("slots") is None:
            raise ClusterError(where, "the number of slots is missing", "Add `slots: N`, here or under `all`.")
        nodes.append(Node.model_validate({**merged, "name": name}))
    return nodes


def _refuse_repeated_keys(tree: Any, source: str) -> None:
    """YAML readers take the last of two equal keys and say nothing."""
    if isinstance(tree, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in tree.value:
            if not isinstance(key, yaml.ScalarNode):
                mark = key.start_mark
                raise yaml.constructor.ConstructorError(problem="a key must be a plain value", problem_mark=mark)
            if key.value in lines:
                line = key.start_mark.line + 1
                rule = f"already there in line {lines[key.value]}"
                raise ClusterError(f"{source}, line {line}: {key.value}", rule, "Keep one of the two.")
            lines[key.value] = key.start_mark.line + 1
            _refuse_repeated_keys(value, source)
    elif isinstance(tree, yaml.SequenceNode):
        for value in tree.value:
            _refuse_repeated_keys(value, source)


def _line_at(tree: Any, location: list[str]) -> int:
    """The line where the way through the file ends, or stops being there."""
    line = 1
    for part in location:
        found = [pair for pair in tree.value if pair[0].value == part] if isinstance(tree, yaml.MappingNode) else []
        if not found:
            break
        key, tree = found[0]
        line = key.start_mark.line + 1
    return line
