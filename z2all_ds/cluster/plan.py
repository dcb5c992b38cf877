"""What a launch will do, as plain data: the orders of every node, the files, and the commands that a person could type.

nodes + where they are (preflight) + the ranks' arguments ─▶ LaunchPlan ─▶ run (`remote.py`), or shown (--dry-run)
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.atomic import write_whole
from z2all_ds.cluster import ssh
from z2all_ds.cluster.forwarded import forwarded
from z2all_ds.cluster.launch import RANK_MODULE
from z2all_ds.cluster.node import Orders, hostfile_text, launcher_command
from z2all_ds.cluster.nodes import Node
from z2all_ds.cluster.places import DataPlace, inside_port, meeting_point
from z2all_ds.cluster.remote import MODULE
from z2all_ds.errors import ClusterError
from z2all_ds.machine import default_environment

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
LAUNCHERS = ("ssh", "pdsh", "openmpi")


@dataclass(frozen=True)
class LaunchPlan:
    """For one launch on these nodes."""

    nodes: list[Node]
    orders: dict[str, Orders]
    folder: str
    """Where commands run on every node."""
    files: Path
    """Where the files of the launch are written."""

    @property
    def ssh_config(self) -> Path:
        return self.files / "ssh_config"

    @property
    def hostfile(self) -> Path:
        return self.files / "hostfile"

    @property
    def environment_file(self) -> Path:
        return self.files / "deepspeed_env"

    @property
    def ranks(self) -> int:
        return sum(node.slots for node in self.nodes)

    def write(self) -> None:
        """Only for their owner's eyes: the environment may hold keys."""
        self.files.mkdir(parents=True, exist_ok=True)
        ssh.write_config(self.nodes, self.ssh_config)
        write_whole(self.hostfile, hostfile_text({node.name: node.slots for node in self.nodes}))
        write_whole(self.environment_file, environment_text(self.deepspeed_environment()))
        for file in (self.hostfile, self.environment_file):
            file.chmod(0o600)

    def common_environment(self) -> dict[str, str]:
        """What DeepSpeed's own way can say: the same for all nodes; nothing secret, as it stands on command lines."""
        first, *others = [self.orders[node.name].environment for node in self.nodes]
        same = {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
        return {name: value for name, value in same.items() if not SECRET.search(name)}

    def deepspeed_environment(self) -> dict[str, str]:
        """For ranks that DeepSpeed's own way starts: what `node.py` would set there, taken from this machine."""
        ours = default_environment(self.nodes[0].slots)
        ours.pop("GLOO_SOCKET_IFNAME", None)  # for one machine alone
        orders = self.orders[self.nodes[0].name]
        # mpirun tells ranks nothing of a master; pdsh's launcher sets the same values.
        meeting = {"MASTER_ADDR": orders.master_address, "MASTER_PORT": str(orders.master_port)}
        return {**ours, **self.common_environment(), **meeting}

    def told_apart(self) -> list[str]:
        """Settings that differ between nodes, which DeepSpeed's own way cannot say."""
        common = self.common_environment()
        names = {name for orders in self.orders.values() for name in orders.environment if name not in common}
        pythons = {node.interpreter for node in self.nodes}
        masters = {(orders.master_address, orders.master_port) for orders in self.orders.values()}
        return [*sorted(names), *(["python"] if len(pythons) > 1 else []), *(["outside"] if len(masters) > 1 else [])]

    def deepspeed_command(self, launcher: str = "pdsh") -> list[str]:
        """The plain launch over all nodes."""
        orders = self.orders[self.nodes[0].name]
        return [
            *(self.nodes[0].interpreter, "-m", "deepspeed.launcher.runner"),
            *("--hostfile", str(self.hostfile), "--launcher", launcher, "--no_ssh_check", "--force_multi"),
            *("--master_addr", orders.master_address, "--master_port", str(orders.master_port)),
            *("--log_level", "error", "--module", RANK_MODULE, *orders.arguments),
        ]

    def deepspeed_variables(self) -> dict[str, str]:
        """That the plain launch needs."""
        return {"PDSH_SSH_ARGS_APPEND": f"-F {self.ssh_config}", "DS_ENV_FILE": str(self.environment_file)}

    def openmpi_variables(self) -> dict[str, str]:
        """The same for mpirun, which also wants to be told twice before it runs as root."""
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
        return {"OMPI_MCA_plm_rsh_args": f"-F {self.ssh_config}", "DS_ENV_FILE": str(self.environment_file), **root}

    def shown(self) -> str:
        """Everything, with secrets masked."""
        parts = []
        for file, text in (
            (self.ssh_config, ssh.config_text(self.nodes)),
            (self.hostfile, hostfile_text({node.name: node.slots for node in self.nodes})),
            (self.environment_file, environment_text(self.deepspeed_environment())),
        ):
            parts.append(f"# file {file}\n{text}")
        for node in self.nodes:
            orders = self.orders[node.name]
            connection = shlex.join(
                ssh.command_on(node, self.ssh_config, ssh.python_command(node, self.folder, MODULE))
            )
            variables = assignments({name: masked(name, value) for name, value in orders.environment.items()})
            command = shlex.join(launcher_command(orders, self.hostfile, node.interpreter))
            parts.append(f"# {node.name}\n{connection}\n# which there runs\n{variables} {command}".strip())
        parts.append(f"# the same by DeepSpeed's own launcher\n{self.plain_line()}")
        return "\n\n".join(parts)

    def plain_line(self) -> str:
        return f"{assignments(self.deepspeed_variables())} {shlex.join(self.deepspeed_command())}"


def make_plan(
    nodes: list[Node],
    places: Mapping[str, DataPlace],
    arguments: list[str],
    port: int,
    run_dir: Path,
    ops: list[str],
    extra: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """`places` may be empty, where nodes were not looked at: then names are trusted and interfaces left to gloo."""
    master = nodes[0]
    place = places.get(
        master.name, DataPlace(master.inside.address if master.inside else master.address_for_others, "")
    )
    outside_address, outside_port = meeting_point(master, place, port)
    ours = forwarded(environment)
    orders = {}
    for number, node in enumerate(nodes):
        interface = places[node.name].interface if node.name in places else node.interface or ""
        network = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        is_master = number == 0
        orders[node.name] = Orders(
            name=node.name,
            node_rank=number,
            slots={other.name: other.slots for other in nodes},
            master_address=place.address if is_master else outside_address,
            master_port=inside_port(master, port) if is_master else outside_port,
            environment={**ours, **network, **extra, **node.environment},
            arguments=arguments,
            log=str(run_dir / "logs" / f"launcher_{node.name}.log"),
            run_dir=str(run_dir),
            ops=ops,
        )
    return LaunchPlan(nodes, orders, os.getcwd(), run_dir / "launch")


def environment_text(environment: Mapping[str, str]) -> str:
    """As DeepSpeed's parser wants it: no comment, no blank line, no line break in a value."""
    for name, value in environment.items():
        if "\n" in value:
            raise ClusterError(
                f"variable {name}", "has a line break in it", "DeepSpeed cannot pass that on: shorten it."
            )
    return "".join(f"{name}={value}\n" for name, value in environment.items())


def assignments(variables: Mapping[str, str]) -> str:
    """As a shell takes them before a command."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def masked(name: str, value: str) -> str:
    return "***" if SECRET.search(name) else value
