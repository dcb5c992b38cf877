"""The nodes of a launch, read from DeepSpeed's plain hostfile or from a YAML file with more settings.

    all:                                    # defaults for every node
      slots: 8
      ssh: {port: 2222, user: trainer, key: ~/.ssh/cluster}
      interface: eth0
    nodes:                                  # the first one is the master, where rank 0 runs
      node1: {inside: {address: 172.17.0.2, port: 9527}, outside: {address: 192.0.2.11, port: 30846}}
      node2: {ssh: {address: 192.0.2.12, port: 30022}, environment: {NCCL_IB_DISABLE: 1}}

Both give a list of `Node`. Errors name the line.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator

from z2all_ds.base.config import merge_nested
from z2all_ds.base.config.section_errors import first_problem
from z2all_ds.base.config.sections import Section
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.paths import expanded
from z2all_ds.base.yaml_text import BadYaml, load_yaml_tree
from z2all_ds.cluster.hostfile import HOST_NAME, parse_hostfile_text, read_text

YAML_SUFFIXES = (".yaml", ".yml")
SET_BY_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CROSS_RANK", "CROSS_SIZE"),
)
FORWARDED = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "WANDB_", "HF_", "OMP_", "MKL_", "PYTHON", "DS_ACCELERATOR", "AWS_")
"""Prefixes of the launcher's environment variables that processes on the nodes get, too."""
NOT_FORWARDED = ("TORCH_EXTENSIONS_DIR", "PYTHONSTARTUP")
EXAMPLES = "See hostfiles/ for examples."


def _to_text(value: Any) -> Any:
    """Convert numbers to text. Refuse `yes` and `null`, whose spelling YAML does not keep."""
    if isinstance(value, bool) or value is None:
        raise ValueError("must be text: put it in quotes")
    return str(value) if isinstance(value, int | float) else value


def _matching(pattern: str, rule: str) -> AfterValidator:
    """Return a check of the whole value. Values go into ssh configs and command lines, where a line break or a quote
    would begin another setting."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is not {rule}")
        return value

    return AfterValidator(check)


Text = Annotated[str, BeforeValidator(_to_text)]
Address = Annotated[str, _matching(HOST_NAME.pattern, "a host name or address (no user, no port)")]
User = Annotated[str, _matching(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*", "a login name")]
FilePath = Annotated[
    str, _matching(r'(?!-)[^\x00-\x1f\x7f"\\]+', "a path without control characters, quotes, backslashes")
]
Interface = Annotated[str, _matching(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*", "the name of a network interface")]
Port = Annotated[int, Field(ge=1, le=65535)]


class SshAccess(Section):
    """How to connect to a node. Unset values come from ~/.ssh/config."""

    address: Address | None = None
    """Address of its sshd; default: the node's name."""
    port: Port | None = None
    """Port of its sshd."""
    user: User | None = None
    """Login name there."""
    key: FilePath | None = None
    """File of the private key."""


class Endpoint(Section):
    """An address and a port on it."""

    address: Address
    """Host name or IP address."""
    port: Port | None = None
    """Rendezvous port of the ranks, if this is the master; default: the launch picks one."""


class Outside(Endpoint):
    """Where other nodes reach a node."""

    ssh_port: Port | None = None
    """Port of its sshd for other nodes, if it differs from the launcher's; for the overlay."""


class NodeSettings(Section):
    """All settings of a node except its name."""

    slots: int | None = Field(None, ge=1)
    """Processes to start there, one per GPU."""
    ssh: SshAccess = SshAccess()
    """How the launcher connects."""
    inside: Endpoint | None = None
    """The node's own address; its ranks find the master there. Default: `outside`."""
    outside: Outside | None = None
    """Where other nodes reach it, e.g. through a published port. Default: the ssh address."""
    interface: Interface | None = None
    """Network interface for gloo and NCCL; default: the one with the inside address."""
    environment: dict[str, Text] = Field(default_factory=dict)
    """Variables for the ranks of this node only; the launcher and the programs that it runs do not get them."""
    python: FilePath | None = None
    """Interpreter there; default: the path of the one that launches."""

    @field_validator("environment")
    @classmethod
    def _check_names(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not a valid variable name")
            if name in SET_BY_LAUNCHERS:
                raise ValueError(f"{name} is set by the launcher")
            if "\0" in environment[name]:
                raise ValueError(f"the value of {name} contains a zero byte")
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
        """Address at which other nodes reach it."""
        return self.outside.address if self.outside else (self.inside.address if self.inside else self.ssh_address)


class NodesFile(Section):
    """The YAML file."""

    all: NodeSettings = NodeSettings()
    """Defaults for every node."""
    nodes: dict[str, NodeSettings]
    """Nodes by name, in rank order."""


@dataclass(frozen=True)
class DataAddress:
    """Address and interface of a node on which ranks of other nodes reach its ranks."""

    address: str
    interface: str


def rendezvous(master: Node, data: DataAddress, port: int) -> tuple[str, int]:
    """Return the address and port at which ranks of other nodes reach the master. `port`: where the hostfile gives
    none."""
    if master.outside:
        return master.outside.address, master.outside.port or port
    return data.address, inside_port(master, port)


def inside_port(master: Node, port: int) -> int:
    """Return the port that the master itself listens on; a published port may differ from it."""
    return (master.inside.port if master.inside else None) or port


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that processes on the nodes get from the launcher's environment."""
    wanted = (name for name in environment if name.startswith(FORWARDED) and name not in NOT_FORWARDED)
    return {name: environment[name] for name in wanted}


# Parsing


def read_nodes(path: str | os.PathLike[str]) -> list[Node]:
    """Read the nodes in rank order; rank 0 runs on the first one."""
    file = expanded(path)
    text = read_text(file)
    if file.suffix in YAML_SUFFIXES:
        return parse_nodes_text(text, str(file))
    return [Node(name=name, slots=slots) for name, slots in parse_hostfile_text(text, str(file)).items()]


def parse_nodes_text(text: str, source: str) -> list[Node]:
    """Parse the YAML format. `source` names the file in errors."""
    try:
        content, tree = load_yaml_tree(text)
    except BadYaml as error:
        where = f"{source}, line {error.line}" if error.line else source
        raise ClusterError(where, f"not valid YAML ({error.problem})", "Correct the file.") from None
    if not isinstance(content, dict):
        raise ClusterError(source, "must have a section `nodes`", EXAMPLES)
    if isinstance(content.get("nodes"), dict):  # `node1:` without settings is a node, too
        content["nodes"] = {name: {} if found is None else found for name, found in content["nodes"].items()}
    try:
        file = NodesFile.model_validate(content)
    except ValidationError as error:
        location, what, rule, fix = first_problem(error, NodesFile, EXAMPLES)
        raise ClusterError(f"{source}, line {_line_at(tree, location)}: {what}", rule, fix or EXAMPLES) from None
    if not file.nodes:
        raise ClusterError(source, "lists no node", "Add one under `nodes`, e.g. `node1: {slots: 8}`.")
    nodes = []
    for name in file.nodes:
        where = f"{source}, line {_line_at(tree, ['nodes', name])}: {name!r}"
        if not HOST_NAME.fullmatch(name):
            raise ClusterError(where, "is not a host name or address", "Use letters, digits, '.', '-' and '_'.")
        merged = merge_nested(content.get("all") or {}, content["nodes"][name])
        if merged.get("slots") is None:
            raise ClusterError(where, "the number of slots is missing", "Add `slots: N`, here or under `all`.")
        nodes.append(Node.model_validate({**merged, "name": name}))
    return nodes


def _line_at(tree: Any, location: list[str]) -> int:
    """Return the line of a setting, or of the innermost section around it that is in the file."""
    line = 1
    for part in location:
        found = [pair for pair in tree.value if pair[0].value == part] if isinstance(tree, yaml.MappingNode) else []
        if not found:
            break
        key, tree = found[0]
        line = key.start_mark.line + 1
    return line
