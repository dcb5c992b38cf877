"""Real runs of entrypoint.sh: its one-line errors, the sshd it starts, and `doctor` and `launch` on two such nodes."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.docker_files import DOCKER
from tests.helpers.docker_nodes import (
    ISOLATED,
    DockerNode,
    both_nodes,
    docker_node,
    settings,
    why_no_nodes,
    z2all,
)
from tests.helpers.ssh_server import make_key
from tests.helpers.training import losses, run_arguments
from z2all_ds.base.errors import MachineError
from z2all_ds.base.machine import free_port

VENV = "/opt/z2all/venv/bin"
needs_nodes = pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes() or "they can be started")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why_no_nodes():
        pytest.skip(why_no_nodes())
    return make_key(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture(scope="module")
def node(key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerNode]:
    variables = {
        "PATH": f"{VENV}:{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": "/var/cache/some ops",
        "DS_ACCELERATOR": "cpu",
        "WANDB_API_KEY": "not-for-files",
    }
    with docker_node(tmp_path_factory.mktemp("node"), free_port(), key, **variables) as started:
        yield started


def entrypoint(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run entrypoint.sh without namespaces; only for cases that end before it creates any file."""
    own = {**settings(folder, 2222, folder / "authorized_keys"), "Z2ALL_SSHD_FOLDER": str(folder / "run"), **variables}
    command = ["bash", str(DOCKER / "entrypoint.sh"), *words]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)


def one_line(answer: "subprocess.CompletedProcess[str]") -> str:
    assert answer.returncode == MachineError.exit_code, answer.stderr
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    return line.removeprefix("MachineError: ")


# Before sshd starts


def test_a_given_command_runs_instead_of_sshd(tmp_path: Path) -> None:
    answer = entrypoint(tmp_path, "bash", "-c", 'echo "$# $1"; exit 7', "name", "two words")
    assert (answer.returncode, answer.stdout, answer.stderr) == (7, "1 two words\n", "")
    assert list(tmp_path.iterdir()) == []


def test_missing_authorized_keys_are_reported_with_the_mount_option(tmp_path: Path) -> None:
    file = tmp_path / "authorized_keys"
    assert one_line(entrypoint(tmp_path)) == (
        f"{file}: is missing, so nobody could log in. Mount your public key: -v ~/.ssh/z2all_docker.pub:{file}:ro"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_created_by_docker_instead_of_the_key_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "authorized_keys").mkdir()
    assert "is a folder, which docker creates if the file to mount is missing" in one_line(entrypoint(tmp_path))


@pytest.mark.parametrize("text", ["", "# only words\n", "not a key\n"])
def test_an_authorized_keys_file_without_a_key_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "authorized_keys").write_text(text)
    assert "contains no public key. Create one with ssh-keygen" in one_line(entrypoint(tmp_path))


def test_a_private_key_is_refused_and_not_shown(key: Path, tmp_path: Path) -> None:
    (tmp_path / "authorized_keys").write_text(key.read_text())
    line = one_line(entrypoint(tmp_path))
    assert "is a private key, which must not be on a node" in line
    assert not any(part in line for part in key.read_text().splitlines()[1:-1])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"Z2ALL_SSH_PORT": "0"}, "Z2ALL_SSH_PORT=0: must be 1 to 65535."),
        ({"Z2ALL_SSH_PORT": "65536"}, "Z2ALL_SSH_PORT=65536: must be 1 to 65535."),
        ({"Z2ALL_SSH_PORT": "22 22"}, "Z2ALL_SSH_PORT=22 22: must be 1 to 65535."),
        ({"Z2ALL_SSH_ADDRESS": "::1\nPermitEmptyPasswords yes"}, ""),
        ({"Z2ALL_SSH_ADDRESS": "node1"}, "Z2ALL_SSH_ADDRESS=node1: must be a numeric address."),
        ({"Z2ALL_OVERLAY": "yes"}, "Z2ALL_OVERLAY=yes: must be 0 or 1."),
    ],
)
def test_invalid_settings_are_refused(variables: dict[str, str], expected: str, tmp_path: Path) -> None:
    answer = entrypoint(tmp_path, **variables)
    assert answer.returncode == MachineError.exit_code
    assert expected in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_variable_that_would_break_the_sshd_config_is_refused(key: Path, tmp_path: Path) -> None:
    (tmp_path / "authorized_keys").write_text(key.with_name("key.pub").read_text())
    assert one_line(entrypoint(tmp_path, MAX_JOBS='1" "PATH=/evil')) == (
        "MAX_JOBS: contains a quote, a backslash or a line break. Remove it."
    )


# The running sshd


@needs_nodes
def test_the_key_logs_in_and_the_session_has_the_environment_of_the_image(node: DockerNode) -> None:
    answer = node.ssh('echo "$TORCH_EXTENSIONS_DIR|$DS_ACCELERATOR|${WANDB_API_KEY-none}"; echo "$PATH"')
    assert answer.returncode == 0, answer.stderr
    variables, path = answer.stdout.splitlines()
    assert variables == "/var/cache/some ops|cpu|none"
    assert VENV in path.split(":"), "a ~/.bashrc may add to it"


@needs_nodes
def test_process_1_is_tini_and_leaves_no_zombies(node: DockerNode) -> None:
    """Process 1 adopts the orphaned processes of a session and reaps them."""
    assert node.ssh("cat /proc/1/comm").stdout.strip() == "tini"
    assert node.ssh("(setsid sleep 0.2 &) ; exit 0").returncode == 0
    assert node.ssh("sleep 0.5; cat /proc/[0-9]*/stat | grep -c ') Z '").stdout.strip() == "0"


@needs_nodes
def test_another_key_and_passwords_are_rejected(node: DockerNode, tmp_path: Path) -> None:
    other = node.ssh("true", key=make_key(tmp_path / "other"))
    assert other.returncode == 255
    assert "Permission denied (publickey)." in other.stderr
    without = node.ssh("true", "-o", "PubkeyAuthentication=no", "-o", "PreferredAuthentications=password")
    assert "Permission denied (publickey)." in without.stderr


@needs_nodes
def test_files_are_private_to_root_and_contain_no_secret(node: DockerNode) -> None:
    assert "PermitTunnel no" in node.config
    made = node.ssh("cd /run/z2all && stat -c '%U %a %n' . *").stdout.splitlines()
    assert made == ["root 700 .", "root 600 authorized_keys", "root 600 sshd_config"]
    (private, public) = sorted((node.folder / "host_keys").iterdir())
    assert (private.name, private.stat().st_mode & 0o777) == ("ssh_host_ed25519_key", 0o600)
    assert len(public.read_text().split()) == 2, "its comment would name the machine"
    assert node.ssh("grep -rl not-for-files /run/z2all").stdout == ""
    assert "not-for-files" not in (node.folder / "log").read_text()


@needs_nodes
def test_a_restarted_node_keeps_its_host_key_and_tunnels_are_opt_in(key: Path, tmp_path: Path) -> None:
    port = free_port()
    with docker_node(tmp_path / "node", port, key) as first:
        assert first.ssh("true").returncode == 0
    with docker_node(tmp_path / "node", port, key, Z2ALL_OVERLAY="1") as again:
        assert again.ssh("true", "-o", "StrictHostKeyChecking=yes").returncode == 0
        assert "PermitTunnel yes" in again.config
    with docker_node(tmp_path / "other", port, key) as stranger:
        (stranger.folder / "known_hosts").write_text((tmp_path / "node" / "known_hosts").read_text())
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in stranger.ssh("true").stderr


@needs_nodes
def test_a_damaged_host_key_is_reported(key: Path, tmp_path: Path) -> None:
    (tmp_path / "host_keys").mkdir()
    (tmp_path / "host_keys" / "ssh_host_ed25519_key").write_text("damaged")
    own = settings(tmp_path, 2222, key.with_name("key.pub"))
    script = f"mount --make-rprivate /; mount -t tmpfs -o mode=755 tmpfs /run; exec bash {DOCKER / 'entrypoint.sh'}"
    answer = subprocess.run([*ISOLATED, "bash", "-c", script], env=own, capture_output=True, text=True, timeout=120)
    assert answer.returncode == MachineError.exit_code
    assert answer.stderr.splitlines()[-1].startswith("MachineError: sshd: rejects its settings")


# Two nodes together


@needs_nodes
def test_the_doctor_finds_both_nodes_and_all_connections_between_them(key: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with both_nodes(tmp_path, key) as hostfile:
        answer = z2all("doctor", str(tmp_path / "runs"), "--hostfile", str(hostfile), "--json")
    findings = json.loads(answer.stdout)["findings"]
    assert [one for one in findings if one["status"] == "fail"] == []
    assert answer.returncode == 0
    values = {one["name"]: one["value"] for one in findings}
    assert values["node1: data interface"] == values["node2: data interface"] == "lo 127.0.0.1"
    assert {"node2 -> master", "run_dir"} <= set(values)


@pytest.mark.extended
@needs_nodes
def test_a_launch_trains_on_both_nodes(key: Path, tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, "train.steps=4")
    with both_nodes(tmp_path, key) as hostfile:
        answer = z2all("launch", "--hostfile", str(hostfile), "--", *arguments)
    assert answer.returncode == 0, answer.stderr
    assert len(losses(tmp_path / "run")) == 4
    assert {path.name for path in (tmp_path / "run" / "logs").glob("rank_*.log")} == {
        "rank_0000.log",
        "rank_0001.log",
    }
    assert {"launcher_node1.log", "launcher_node2.log"} <= {path.name for path in (tmp_path / "run/logs").iterdir()}
