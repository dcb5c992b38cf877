"""Ways into the nodes: one ssh config for all of them, and commands there whose failures are told apart.

The config is ours, not changes to ~/.ssh/config, which it includes for all that the hostfile does not say. Keys only;
an unknown host key is taken at the first meeting (accept-new) and never if it has changed. A link that goes dead is
noticed by ssh itself after some ten seconds.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.child_process import JsonProcess
from z2all_ds.base.ssh_errors import recognise
from z2all_ds.cluster.nodes import Node

CONNECT_SECONDS = 8
ALIVE_EVERY_SECONDS, ALIVE_TRIES = 5, 2
SSH_FAILED = 255
"""ssh's own exit code; a command's code is passed on as it is."""
COMMON = f"""\
Host *
    BatchMode yes
    PasswordAuthentication no
    StrictHostKeyChecking accept-new
    ConnectTimeout {CONNECT_SECONDS}
    ServerAliveInterval {ALIVE_EVERY_SECONDS}
    ServerAliveCountMax {ALIVE_TRIES}
    Include ~/.ssh/config
    Include /etc/ssh/ssh_config
"""


def config_text(nodes: list[Node]) -> str:
    """What ssh reads with -F. The first value that it finds for a setting counts, so ours come first."""
    blocks = []
    for node in nodes:
        said = {
            "HostName": node.ssh.address,
            "Port": node.ssh.port,
            "User": node.ssh.user,
            "IdentityFile": f'"{Path(node.ssh.key).expanduser()}"' if node.ssh.key else None,
            "IdentitiesOnly": "yes" if node.ssh.key else None,
        }
        lines = [f"    {name} {value}\n" for name, value in said.items() if value is not None]
        if lines:
            blocks.append(f"Host {node.name}\n{''.join(lines)}")
    return "\n".join([*blocks, COMMON])


def write_config(nodes: list[Node], path: Path) -> Path:
    """Readable by its owner alone: it names users, ports and keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, config_text(nodes))
    path.chmod(0o600)
    return path


@dataclass(frozen=True)
class Trouble:
    """Why a node could not be entered."""

    kind: str
    """One of TITLES."""
    said: str
    """ssh's own line."""
    fix: str

    @property
    def title(self) -> str:
        return TITLES.get(self.kind, self.kind)


TITLES = {
    "name": "ssh: unknown name",
    "host_key": "ssh: changed host key",
    "key": "ssh: key not accepted",
    "key_file": "ssh: key not accepted",
    "port": "ssh: nobody on that port",
    "unreachable": "ssh: not reached",
    "other": "ssh",
    "package": "package missing",
    "python": "python missing",
    "folder": "folder missing",
    "late": "no answer",
}
FIXES = {
    "name": "Correct the name, or give `ssh: {{address: ...}}` for {name} in the hostfile.",
    "host_key": "The machine at {address} is another than last time, or was set up anew. If that is right, forget the"
    " old key with `ssh-keygen -R {known_as}`.",
    "key": "Put your public key into ~/.ssh/authorized_keys there, or name the right user and key under `ssh` for"
    " {name}.",
    "key_file": "Give the path of a private key that only you can read.",
    "port": "The machine is there, but no sshd answers on port {port}: start it, or set `ssh: {{port: ...}}` for"
    " {name}.",
    "unreachable": "Is {name} up, and {address} reached from here? See that no firewall drops port {port}.",
    "other": "Try `ssh {name}` by hand.",
}


def trouble_of(node: Node, stderr: str) -> Trouble:
    """What ssh's words mean for this node."""
    port = node.ssh.port or 22
    known_as = node.ssh_address if port == 22 else f"[{node.ssh_address}]:{port}"
    kind, line = recognise(stderr)
    fix = FIXES[kind].format(name=node.name, address=node.ssh_address, port=port, known_as=f"'{known_as}'")
    return Trouble(kind, line or "ssh said nothing", fix)


def command_on(node: Node, config: Path, command: str) -> list[str]:
    """What runs a line of shell on a node; nothing secret belongs into it."""
    return ["ssh", "-F", str(config), node.name, "--", command]


def python_command(node: Node, folder: str, module: str) -> str:
    """A line of shell that runs a module there: in the same folder as here, so that paths mean the same, and with the
    environment's own programs first."""
    path = f'PATH={shlex.quote(os.path.dirname(node.interpreter))}:"$PATH"'
    return f"cd {shlex.quote(folder)} && {path} exec {shlex.quote(node.interpreter)} -m {module}"


def start_module(node: Node, config: Path, folder: str, module: str, *, shows_errors: bool = False) -> JsonProcess:
    """Starts a module there that we exchange messages with."""
    command = command_on(node, config, python_command(node, folder, module))
    # In the C locale ssh says what `recognise` knows.
    return JsonProcess(command, {**os.environ, "LC_ALL": "C"}, shows_errors=shows_errors)
