"""Connections to the nodes: one ssh config for all of them, and commands on them whose failures are classified.

The config does not change ~/.ssh/config but includes it, for everything that the hostfile does not set. Keys only; an
unknown host key is accepted on first contact (accept-new), a changed one never. ssh itself detects a dead connection
after about ten seconds.
"""

import os
import shlex
from pathlib import Path

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.child_process import SAFE_PATH, JsonProcess, checkout_folder
from z2all_ds.base.paths import expanded
from z2all_ds.base.ssh_errors import recognise
from z2all_ds.cluster.nodes import Node

CONNECT_SECONDS = 8
ALIVE_EVERY_SECONDS, ALIVE_TRIES = 5, 2
IGNORE_SIGNALS = ("sh", "-c", 'trap "" INT TERM USR1; exec "$@"', "sh")
"""Prefix of a command that ignores these signals. ssh keeps signals ignored that it finds ignored (client_loop)."""
SSH_FAILED = 255
"""Exit code of ssh itself; a remote command's code is passed on."""
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
    """Return an ssh config for these nodes. Ours comes before the user's: ssh takes the first value of a setting."""
    blocks = []
    for node in nodes:
        settings = {
            "HostName": node.ssh.address,
            "Port": node.ssh.port,
            "User": node.ssh.user,
            "IdentityFile": f'"{expanded(node.ssh.key)}"' if node.ssh.key else None,
            "IdentitiesOnly": "yes" if node.ssh.key else None,
        }
        lines = [f"    {name} {value}\n" for name, value in settings.items() if value is not None]
        if lines:
            blocks.append(f"Host {node.name}\n{''.join(lines)}")
    return "\n".join([*blocks, COMMON])


def write_private(path: Path, text: str) -> Path:
    """Write a file that only its owner can read, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text, mode=0o600)
    return path


def write_config(nodes: list[Node], path: Path) -> Path:
    """Write the ssh config; it names users, ports and keys."""
    return write_private(path, config_text(nodes))


class NoAnswer(Exception):
    """A node that ssh cannot connect to, or whose agent failed, ended or did not answer in time."""

    def __init__(self, kind: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.kind, self.message, self.fix = kind, message, fix
        self.title = TITLES.get(kind, kind)

    @classmethod
    def late(cls, seconds: float) -> "NoAnswer":
        return cls("no answer", f"no answer within {seconds:.0f} s", "Check whether the node or its disk hangs.")


TITLES = {
    "name": "ssh: unknown name",
    "host_key": "ssh: changed host key",
    "key": "ssh: key not accepted",
    "key_file": "ssh: key not accepted",
    "port": "ssh: connection refused",
    "unreachable": "ssh: not reachable",
    "other": "ssh",
}
FIXES = {
    "name": "Correct the name, or give `ssh: {{address: ...}}` for {name} in the hostfile.",
    "host_key": "{address} is a different machine than before, or was reinstalled. If that is expected, remove the old"
    " key with `ssh-keygen -R {known_as}`.",
    "key": "Put your public key into ~/.ssh/authorized_keys there, or set the right user and key under `ssh` for"
    " {name}.",
    "key_file": "Give the path of a private key that only you can read.",
    "port": "The machine is up, but no sshd answers on port {port}: start it, or set `ssh: {{port: ...}}` for {name}.",
    "unreachable": "Check that {name} is up, that {address} is reachable from here and that no firewall drops port"
    " {port}.",
    "other": "Try `ssh {name}` by hand.",
}


def ssh_failure(node: Node, stderr: str) -> NoAnswer:
    """Return the failure that ssh's stderr describes, with its fix for this node."""
    port = node.ssh.port or 22
    known_as = node.ssh_address if port == 22 else f"[{node.ssh_address}]:{port}"
    kind, line = recognise(stderr)
    fix = FIXES[kind].format(name=node.name, address=node.ssh_address, port=port, known_as=f"'{known_as}'")
    return NoAnswer(kind, line or "ssh printed nothing", fix)


def module_command(node: Node, config: Path, folder: str, module: str) -> list[str]:
    """Return the ssh command that runs a module on a node. It must not contain secrets.

    The module runs in the same folder as here, so that relative paths mean the same, with the programs of its
    environment first on PATH. It imports nothing from that folder.
    """
    path = f'PATH={shlex.quote(os.path.dirname(node.interpreter))}:"$PATH"'
    if checkout := checkout_folder():
        path += f" PYTHONPATH={shlex.quote(checkout)}${{PYTHONPATH:+:$PYTHONPATH}}"
    path += f" {SAFE_PATH}={shlex.quote(os.environ.get(SAFE_PATH, '1'))}"
    command = f"cd {shlex.quote(folder)} && {path} exec {shlex.quote(node.interpreter)} -m {module}"
    return ["ssh", "-F", str(config), node.name, "--", command]


def start_module(node: Node, config: Path, folder: str, module: str, *, shows_errors: bool = False) -> JsonProcess:
    """Start a module on a node, to exchange messages with it.

    Schedulers and `docker stop` signal every process. Only the launcher acts on it; the connections stay open until it
    closes them.
    """
    # `recognise` knows ssh's messages in the C locale.
    environment = {**os.environ, "LC_ALL": "C"}
    command = [*IGNORE_SIGNALS, *module_command(node, config, folder, module)]
    return JsonProcess(command, environment, shows_errors=shows_errors)
