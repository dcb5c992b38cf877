"""What a launch will do, as plain data: the orders of every node, the files, and the commands that a person could type.

nodes + where they are (preflight) + the ranks' arguments ─▶ LaunchPlan ─▶ run (`remote.py`), or shown (--dry-run)
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.config import RunConfig, dump_yaml
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.machine import default_environment
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.cluster import ssh
from z2all_ds.cluster.forwarded import forwarded
from z2all_ds.cluster.launch import slurm
from z2all_ds.cluster.launch.node import Orders, hostfile_text, launcher_command
from z2all_ds.cluster.launch.remote import MODULE
from z2all_ds.cluster.launch.rendezvous import DataAddress, inside_port, meeting_point
from z2all_ds.cluster.nodes import Node
from z2all_ds.train.processes.local_ranks import RANK_MODULE

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
LAUNCHERS = ("ssh", "pdsh", "openmpi", "slurm")


@dataclass(frozen=True)
class LaunchPlan:
    """For one launch on these nodes."""

    nodes: list[Node]
    orders: dict[str, Orders]
    folder: str
    """Where commands run on every node."""
    run_folder: RunFolder
    run: RunConfig

    @property
    def files(self) -> Path:
        """Where the files of the launch are written."""
        return self.run_folder.launch_config.parent

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
    def tasks(self) -> Path:
        """The node of every rank, for srun."""
        return self.files / "tasks"

    @property
    def rank_script(self) -> Path:
        """For srun."""
        return self.files / "rank.py"

    @property
    def ranks(self) -> int:
        return sum(node.slots for node in self.nodes)

    def write(self) -> None:
        """Only for their owner's eyes: the environment may hold keys."""
        self.files.mkdir(parents=True, exist_ok=True)
        ssh.write_config(self.nodes, self.ssh_config)
        write_whole(self.hostfile, hostfile_text({node.name: node.slots for node in self.nodes}))
        write_whole(self.environment_file, environment_text(self.deepspeed_environment()))
        write_whole(self.tasks, slurm.tasks_text(self.nodes))
        write_whole(self.rank_script, slurm.RANK_SCRIPT)
        write_whole(self.run_folder.launch_config, dump_yaml(self.run))
        for file in (self.hostfile, self.environment_file, self.tasks, self.rank_script):
            file.chmod(0o600)

    def same_environment(self) -> dict[str, str]:
        """What all nodes have alike."""
        first, *others = [self.orders[node.name].environment for node in self.nodes]
        return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}

    def common_environment(self) -> dict[str, str]:
        """What DeepSpeed's own way can say: the same for all nodes; nothing secret, as it stands on command lines."""
        return {name: value for name, value in self.same_environment().items() if not SECRET.search(name)}

    def deepspeed_environment(self) -> dict[str, str]:
        """For ranks that DeepSpeed's own way starts: what `node.py` would set there, taken from this machine."""
        ours = default_environment(self.nodes[0].slots)
        ours.pop("GLOO_SOCKET_IFNAME", None)  # for one machine alone
        orders = self.orders[self.nodes[0].name]
        # mpirun tells ranks nothing of a master; pdsh's launcher sets the same values.
        meeting = {"MASTER_ADDR": orders.master_address, "MASTER_PORT": str(orders.master_port)}
        return {**ours, **self.common_environment(), **meeting}

    def told_apart(self, launcher: str = "pdsh") -> list[str]:
        """Settings that differ between nodes, which DeepSpeed's own way cannot say; srun at least takes secrets along,
        and not on a command line."""
        common = self.same_environment() if launcher == "slurm" else self.common_environment()
        names = {name for orders in self.orders.values() for name in orders.environment if name not in common}
        pythons = {node.interpreter for node in self.nodes}
        masters = {(orders.master_address, orders.master_port) for orders in self.orders.values()}
        return [*sorted(names), *(["python"] if len(pythons) > 1 else []), *(["outside"] if len(masters) > 1 else [])]

    def deepspeed_command(self, launcher: str = "pdsh") -> list[str]:
        """The plain launch over all nodes."""
        orders = self.orders[self.nodes[0].name]
        what = ["--module", RANK_MODULE]
        if launcher == "slurm":
            what = [f"--launcher_args={slurm.srun_options(self.tasks)}", str(self.rank_script)]
        return [
            *(self.nodes[0].interpreter, "-m", "deepspeed.launcher.runner"),
            *("--hostfile", str(self.hostfile), "--launcher", launcher, "--no_ssh_check", "--force_multi"),
            *("--master_addr", orders.master_address, "--master_port", str(orders.master_port)),
            *("--log_level", "error", *what, *orders.arguments),
        ]

    def deepspeed_variables(self, launcher: str = "pdsh") -> dict[str, str]:
        """That the plain launch needs."""
        file = {"DS_ENV_FILE": str(self.environment_file)}
        if launcher == "openmpi":  # which also wants to be told twice before it runs as root
            root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
            return {"OMPI_MCA_plm_rsh_args": f"-F {self.ssh_config}", **file, **root}
        if launcher == "slurm":
            return self.slurm_variables()
        return {"PDSH_SSH_ARGS_APPEND": f"-F {self.ssh_config}", **file}

    def slurm_variables(self) -> dict[str, str]:
        """Ranks have the environment that srun is started in (--export=ALL): what is in it wins over what DeepSpeed
        writes on srun's command line, where values end at a comma. So the environment file has nothing to say."""
        orders = self.orders[self.nodes[0].name]
        new = {name: value for name, value in self.same_environment().items() if os.environ.get(name) != value}
        meeting = {"MASTER_ADDR": orders.master_address, "MASTER_PORT": str(orders.master_port)}
        return {**new, **meeting, "DS_ENV_FILE": os.devnull}

    def shown(self, launcher: str = "ssh") -> str:
        """Everything, with secrets masked."""
        hosts = (self.hostfile, hostfile_text({node.name: node.slots for node in self.nodes}))
        files = [
            (self.ssh_config, ssh.config_text(self.nodes)),
            hosts,
            (self.environment_file, environment_text(self.deepspeed_environment())),
        ]
        if launcher == "slurm":  # no ssh, and no launcher on the nodes
            files = [hosts, (self.tasks, slurm.tasks_text(self.nodes)), (self.rank_script, slurm.RANK_SCRIPT)]
        parts = [f"# file {file}\n{text}" for file, text in files]
        if launcher == "slurm":
            return "\n\n".join([*parts, f"# by DeepSpeed's own launcher\n{self.plain_line(launcher)}"])
        for node in self.nodes:
            orders = self.orders[node.name]
            connection = shlex.join(
                ssh.command_on(node, self.ssh_config, ssh.python_command(node, self.folder, MODULE))
            )
            variables = assignments({name: masked(name, value) for name, value in orders.environment.items()})
            command = shlex.join(launcher_command(orders, self.hostfile, node.interpreter))
            parts.append(f"# {node.name}\n{connection}\n# which there runs\n{variables} {command}".strip())
        parts.append(f"# the same by DeepSpeed's own launcher\n{self.plain_line(launcher)}")
        return "\n\n".join(parts)

    def plain_line(self, launcher: str = "pdsh") -> str:
        """For a launch of ours, too: by pdsh."""
        launcher = "pdsh" if launcher == "ssh" else launcher
        variables = {name: masked(name, value) for name, value in self.deepspeed_variables(launcher).items()}
        return f"{assignments(variables)} {shlex.join(self.deepspeed_command(launcher))}"


def make_plan(
    nodes: list[Node],
    places: Mapping[str, DataAddress],
    run: RunConfig,
    resume: str,
    port: int,
    ops: list[str],
    extra: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """`places` may be empty, where nodes were not looked at: then names are trusted and interfaces left to gloo."""
    master, folder = nodes[0], RunFolder(Path(run.run_dir).expanduser().resolve())
    place = places.get(
        master.name, DataAddress(master.inside.address if master.inside else master.address_for_others, "")
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
            arguments=["--config", str(folder.launch_config), "--resume", resume],
            log=str(folder.root / "logs" / f"launcher_{node.name}.log"),
            run_dir=str(folder.root),
            ops=ops,
        )
    return LaunchPlan(nodes, orders, os.getcwd(), folder, run)


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
