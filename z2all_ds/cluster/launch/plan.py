"""The plan of a launch as plain data: the orders of every node, the files, and equivalent commands to type by hand.

nodes + data addresses (preflight) + arguments of the ranks ─▶ LaunchPlan ─▶ run (`remote.py`) or shown (--dry-run)
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.child_process import package_environment
from z2all_ds.base.config import RunConfig, dump_yaml
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.machine import COMPILE_CACHE, default_environment
from z2all_ds.base.paths import full_path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.url_passwords import without_passwords
from z2all_ds.cluster import ssh
from z2all_ds.cluster.launch import slurm
from z2all_ds.cluster.launch.node import Orders, hostfile_text, launcher_command
from z2all_ds.cluster.launch.remote import MODULE
from z2all_ds.cluster.nodes import DataAddress, Node, forwarded, inside_port, rendezvous
from z2all_ds.train.processes.local_ranks import RANK_MODULE

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(PASS|PAT|AUTH)(_|$)", re.IGNORECASE)
NEEDS_NO_QUOTES = re.compile(r"[A-Za-z0-9_./+@=:,-]+")
# DeepSpeed puts other values of variables into double quotes. With pdsh a shell removes these, and pdsh replaces %h and
# the like; mpirun passes them on as part of the value.
ARRIVES_AS_IT_IS = {"pdsh": re.compile(r'[^"$%\\`]*'), "openmpi": re.compile(r"[\w@%+=:,./-]*")}
LAUNCHERS = ("ssh", "pdsh", "openmpi", "slurm")


@dataclass(frozen=True)
class LaunchPlan:
    """One launch on these nodes."""

    nodes: list[Node]
    orders: dict[str, Orders]
    folder: str
    """Working directory of commands on every node."""
    run_folder: RunFolder
    run: RunConfig
    extra: Mapping[str, str]
    """Variables of this start only, such as its name. Files and commands for the user do not have them."""

    @property
    def ssh_config(self) -> Path:
        return self._file("ssh_config")

    @property
    def hostfile(self) -> Path:
        return self._file("hostfile")

    @property
    def environment_file(self) -> Path:
        return self._file("deepspeed_env")

    @property
    def own_environment_file(self) -> Path:
        """The same with `extra`, for the launcher that we start."""
        return self._file("deepspeed_env_of_launch")

    @property
    def tasks(self) -> Path:
        """The node of every rank, for srun."""
        return self._file("tasks")

    @property
    def rank_script(self) -> Path:
        """The script that srun starts."""
        return self._file("rank.py")

    @property
    def ranks(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def _set_by_hostfile(self) -> set[str]:
        return {name for node in self.nodes for name in node.environment}

    @property
    def _master(self) -> Orders:
        return self.orders[self.nodes[0].name]

    def _file(self, name: str) -> Path:
        return self.run_folder.launch_config.with_name(name)

    def files(self, launcher: str) -> dict[Path, str]:
        """Return path and text of the files that a launcher needs."""
        hosts = {self.hostfile: hostfile_text({node.name: node.slots for node in self.nodes})}
        if launcher == "slurm":  # no ssh
            return {**hosts, self.tasks: slurm.tasks_text(self.nodes), self.rank_script: slurm.RANK_SCRIPT}
        environment = self.deepspeed_environment()
        repeatable = {name: value for name, value in environment.items() if name not in self.extra}
        texts = {self.environment_file: environment_text(repeatable)}
        if launcher != "ssh" and self.extra:
            texts[self.own_environment_file] = environment_text(environment)
        return {self.ssh_config: ssh.config_text(self.nodes), **hosts, **texts}

    def write(self, launcher: str) -> None:
        """Write the files, readable only by their owner, and the run config."""
        for path, text in self.files(launcher).items():
            ssh.write_private(path, text)
        write_whole(self.run_folder.launch_config, dump_yaml(self.run))

    def common_environment(self, with_secrets: bool) -> dict[str, str]:
        """Return the variables that are the same on all nodes. Secrets must not appear on command lines."""
        first, *others = [self.orders[node.name].environment for node in self.nodes]
        return {
            name: value
            for name, value in first.items()
            if all(other.get(name) == value for other in others) and (with_secrets or not is_secret(name, value))
        }

    def deepspeed_environment(self) -> dict[str, str]:
        """Return the environment of ranks that DeepSpeed's multi-node launchers start: what `node.py` would set on
        each node, taken from this machine."""
        ours = default_environment(self.nodes[0].slots)
        for name in ("GLOO_SOCKET_IFNAME", COMPILE_CACHE):  # for one machine only
            ours.pop(name, None)
        # DeepSpeed puts the current folder on PYTHONPATH; a value in its environment file replaces that.
        common = package_environment({**ours, **self.common_environment(with_secrets=False)})
        # mpirun gives ranks no master; pdsh's launcher sets the same values.
        return {**common, **self._master_variables()}

    def _master_variables(self) -> dict[str, str]:
        return {"MASTER_ADDR": self._master.master_address, "MASTER_PORT": str(self._master.master_port)}

    def unsupported_settings(self, launcher: str = "pdsh") -> list[str]:
        """Return settings that DeepSpeed's multi-node launchers cannot pass on: those that differ between nodes,
        secrets, and another interpreter than the one that runs the launcher: a path in a hostfile must not start a
        program here. srun passes its own environment on: secrets too, but a hostfile must not set variables here."""
        uses_srun = launcher == "slurm"
        common = self.common_environment(with_secrets=uses_srun)
        names = {name for orders in self.orders.values() for name in orders.environment if name not in common}
        names |= self._set_by_hostfile if uses_srun else set()
        has_own_python = any(node.interpreter != sys.executable for node in self.nodes)
        masters = {(orders.master_address, orders.master_port) for orders in self.orders.values()}
        return [*sorted(names), *(["python"] if has_own_python else []), *(["outside"] if len(masters) > 1 else [])]

    def deepspeed_command(self, launcher: str = "pdsh") -> list[str]:
        """Return the command of one of DeepSpeed's multi-node launchers."""
        target = ["--module", RANK_MODULE]
        if launcher == "slurm":
            target = [f"--launcher_args={slurm.srun_options(self.tasks)}", str(self.rank_script)]
        return [
            *(sys.executable, "-m", "deepspeed.launcher.runner"),
            *("--hostfile", str(self.hostfile), "--launcher", launcher, "--no_ssh_check", "--force_multi"),
            *("--master_addr", self._master.master_address, "--master_port", str(self._master.master_port)),
            *("--log_level", "error", *target, *self._master.arguments),
        ]

    def words_to_quote(self, launcher: str = "pdsh") -> list[str]:
        """Return words that a shell on the nodes would not take as they are: DeepSpeed gives some of them to ssh
        without quotes, also the current folder, and pdsh splits its ssh options at blanks."""
        if launcher not in ("pdsh", "openmpi"):
            return []
        words = [self.folder, str(self.ssh_config), *self.deepspeed_command(launcher)]
        allowed, variables = ARRIVES_AS_IT_IS[launcher], self.deepspeed_environment().items()
        return [
            *(word for word in dict.fromkeys(words) if not NEEDS_NO_QUOTES.fullmatch(word)),
            *(f"{name}={value}" for name, value in variables if not allowed.fullmatch(value)),
        ]

    def require_supported(self, launcher: str) -> None:
        """Refuse what one of DeepSpeed's launchers cannot pass on."""
        unsupported = [] if launcher == "ssh" else self.unsupported_settings(launcher)
        if unsupported:
            kind, fix = "secret", "Use --launcher ssh (the default)."
            if launcher == "slurm":
                kind, fix = "variables of the hostfile", "Export variables before the launch, or use --launcher ssh."
            rule = f"has one value for all nodes, but these settings differ or are {kind}: {', '.join(unsupported)}"
            raise ClusterError(f"launcher {launcher}", rule, fix)
        for word in self.words_to_quote(launcher):
            rule = "has characters that a shell interprets, and DeepSpeed does not quote them correctly"
            fix = "Use --launcher ssh (the default), or only letters, digits and _./+@=:,- there."
            raise ClusterError(f"launcher {launcher}: {word!r}", rule, fix)

    def deepspeed_variables(self, launcher: str = "pdsh") -> dict[str, str]:
        """Return the variables that this command needs, without `extra`."""
        if launcher == "slurm":
            # Ranks inherit srun's environment (--export=ALL), which overrides what DeepSpeed writes on srun's command
            # line, where values end at a comma. So the environment file is empty.
            common = self.common_environment(with_secrets=True).items()
            known = {*self.extra, *self._set_by_hostfile}
            new = {name: value for name, value in common if os.environ.get(name) != value and name not in known}
            return {**new, **self._master_variables(), "DS_ENV_FILE": os.devnull}
        file = {"DS_ENV_FILE": str(self.environment_file)}
        if launcher == "openmpi":
            root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
            return {"OMPI_MCA_plm_rsh_args": f"-F {self.ssh_config}", **file, **root}
        return {"PDSH_SSH_ARGS_APPEND": f"-F {self.ssh_config}", **file}

    def own_variables(self, launcher: str) -> dict[str, str]:
        """Return the variables of the command as this launch runs it."""
        own = self.extra if launcher == "slurm" else {"DS_ENV_FILE": str(self.own_environment_file)}
        return {**self.deepspeed_variables(launcher), **own}

    def describe(self, launcher: str = "ssh") -> str:
        """Return all files and commands as text, with secrets masked."""
        parts = [f"# file {file}\n{text}" for file, text in self.files(launcher).items()]
        for node in self.nodes if launcher != "slurm" else []:
            orders = self.orders[node.name]
            connection = shlex.join(ssh.module_command(node, self.ssh_config, self.folder, MODULE))
            command = shlex.join(launcher_command(orders, self.hostfile, node.interpreter))
            remote = f"{assignments(orders.environment)} {command}"
            parts.append(f"# {node.name}\n{connection}\n# runs there\n{remote}".strip())
        if launcher == "ssh" and self.words_to_quote():
            return "\n\n".join(parts)
        title = "DeepSpeed's launcher" if launcher == "slurm" else "the same with DeepSpeed's launcher"
        return "\n\n".join([*parts, f"# {title}\n{self.command_line(launcher)}"])

    def command_line(self, launcher: str = "ssh") -> str:
        """Return the shell line of DeepSpeed's launcher; pdsh stands for our own ssh launcher."""
        launcher = "pdsh" if launcher == "ssh" else launcher
        return f"{assignments(self.deepspeed_variables(launcher))} {shlex.join(self.deepspeed_command(launcher))}"


def make_plan(
    nodes: list[Node],
    addresses: Mapping[str, DataAddress],
    run: RunConfig,
    resume: str,
    port: int,
    ops: list[str],
    extra: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """Plan a launch. Without preflight, `addresses` is empty: names are used as they are, and gloo and NCCL choose
    their interface."""
    master, folder = nodes[0], RunFolder(full_path(run.run_dir))
    own_address = master.inside.address if master.inside else master.address_for_others
    data = addresses.get(master.name, DataAddress(own_address, ""))
    inside, outside = (data.address, inside_port(master, port)), rendezvous(master, data, port)
    orders = {}
    for number, node in enumerate(nodes):
        interface = addresses[node.name].interface if node.name in addresses else node.interface or ""
        network = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        address, master_port = outside if number else inside
        orders[node.name] = Orders(
            name=node.name,
            node_rank=number,
            slots={other.name: other.slots for other in nodes},
            master_address=address,
            master_port=master_port,
            environment={**forwarded(environment), **network, **node.environment, **extra},
            arguments=["--config", str(folder.launch_config), "--resume", resume],
            log=str(folder.root / "logs" / f"launcher_{node.name}.log"),
            run_dir=str(folder.root),
            ops=ops,
        )
    return LaunchPlan(nodes, orders, os.getcwd(), folder, run, extra)


def environment_text(environment: Mapping[str, str]) -> str:
    """Return the text of DeepSpeed's environment file, which has no comments, blank lines or line breaks in values."""
    for name, value in environment.items():
        if "\n" in value or "\r" in value:
            rule = "contains a line break, which DeepSpeed cannot pass on"
            raise ClusterError(f"variable {name}", rule, "Unset it, or remove the line break.")
    return "".join(f"{name}={value}\n" for name, value in environment.items())


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable is secret by its name, or contains a URL with a password."""
    return bool(SECRET.search(name)) or without_passwords(value) != value


def assignments(variables: Mapping[str, str]) -> str:
    """Return `A=1 B=2` for a shell, with secrets masked."""
    return " ".join(f"{name}={shlex.quote('***' if is_secret(name, v) else v)}" for name, v in variables.items())
