"""Checks of launch/docker without a Docker engine: its files match each other, the package and the checkout."""

import ast
import ipaddress
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.helpers.docker_files import (
    DOCKER,
    RESET,
    ROOT,
    assigned,
    commands_in,
    copied,
    debian_packages,
    mounts,
    published_ports,
    read_compose,
    read_dockerfile,
)
from z2all_ds.base.errors import MachineError
from z2all_ds.cli import app
from z2all_ds.cluster.launch.plan import SECRET
from z2all_ds.cluster.nodes import read_nodes
from z2all_ds.train.pretrain import parse

DOCKERFILE = read_dockerfile(DOCKER / "Dockerfile")
ENTRYPOINT = (DOCKER / "entrypoint.sh").read_text(encoding="utf-8")
SHAPES = ("host_network", "mapped_ports")
NODES = ("node1", "node2")
TEXTS = sorted(path for path in DOCKER.iterdir() if path.is_file())
COMMANDS = [(path.name, words) for path in TEXTS for words in commands_in(path.read_text(encoding="utf-8"))]


def compose_of(shape: str) -> dict[str, Any]:
    return read_compose(f"compose.{shape}.yaml", HOME="/home/someone")


def services_of(shape: str) -> dict[str, Any]:
    return compose_of(shape)["services"]


def pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(line.split("==") for line in text.splitlines() if "==" in line)


# The Dockerfile


def test_the_dockerfile_parser_joins_lines_and_skips_comments(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("# head\nARG A=1\nRUN one \\\n    # between\n    && two\nCOPY a b ./\n")
    found = read_dockerfile(file)
    assert found == [("ARG", "A=1"), ("RUN", "one && two"), ("COPY", "a b ./")]
    assert assigned(found, "ARG") == {"A": "1"}
    assert copied(found) == ["a", "b"]


def test_the_dockerfile_has_only_known_instructions() -> None:
    known = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "EXPOSE", "ENTRYPOINT"}
    assert {instruction.name for instruction in DOCKERFILE} == known


def test_the_base_image_is_pinned_to_a_cuda_13_devel_image() -> None:
    (base,) = [one.rest for one in DOCKERFILE if one.name == "FROM"]
    assert base == "${BASE_IMAGE}"
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d+-devel-ubuntu24\.04", assigned(DOCKERFILE, "ARG")["BASE_IMAGE"])


def test_every_build_argument_is_used_and_defined_before_its_use() -> None:
    defined = {"PATH"}  # set by the base image
    for instruction in DOCKERFILE:
        used = set(re.findall(r"\$\{?(\w+)", instruction.rest))
        assert used <= defined, instruction
        if instruction.name in ("ARG", "ENV"):
            defined |= set(assigned([instruction], instruction.name))
    everything = " ".join(one.rest for one in DOCKERFILE if one.name != "ARG")
    assert {name for name in assigned(DOCKERFILE, "ARG") if f"${{{name}}}" not in everything} == set()


def test_copied_files_exist_and_are_allowed_by_the_dockerignore() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = [rule[1:] for rule in rules if rule.startswith("!")]
    assert sorted(let_in) == sorted(copied(DOCKERFILE))
    assert [source for source in let_in if not (ROOT / source).exists()] == []


def test_the_files_that_setup_py_reads_are_copied() -> None:
    sources = set(copied(DOCKERFILE))
    assert {"setup.py", "README.md", "z2all_ds", "ds_configs", "constraints.txt"} <= sources


def test_the_image_contains_no_secret() -> None:
    names = {**assigned(DOCKERFILE, "ARG"), **assigned(DOCKERFILE, "ENV")}
    assert [name for name in names if SECRET.search(name)] == []
    (install,) = [one.rest for one in DOCKERFILE if "openssh-server" in one.rest]
    assert re.search(r"&& rm -rf .*/etc/ssh/ssh_host_\*", install), "its own host keys would be everybody's"


def test_every_pip_install_uses_the_tested_versions() -> None:
    installs = [one.rest for one in DOCKERFILE if "pip install" in one.rest]
    assert len(installs) == 3
    assert all("-c constraints.txt" in install for install in installs)
    assert installs[0].endswith("torch setuptools wheel")


def test_extras_and_gpu_packages_match_setup_py() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (extras,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "EXTRAS"
    ]
    values = assigned(DOCKERFILE, "ARG")
    assert set(values["EXTRAS"].split(",")) <= set(extras)
    gpu = {requirement.partition(">")[0] for requirement in extras["gpu"]}
    assert set(values["GPU_PACKAGES"].split()) == gpu - {"flash-attn", "xformers"}


def test_the_folder_of_compiled_ops_names_the_versions_of_torch_and_deepspeed() -> None:
    folder = Path(assigned(DOCKERFILE, "ENV")["TORCH_EXTENSIONS_DIR"])
    assert folder.name == f"torch-{pins()['torch']}_deepspeed-{pins()['deepspeed']}"


def test_the_debian_packages_exist() -> None:
    packages = debian_packages(DOCKERFILE)
    assert {"g++", "python3-dev", "python3-venv", "libaio-dev", "openssh-server", "pdsh", "tini"} <= set(packages)
    if not shutil.which("apt-cache"):
        pytest.skip("no apt-cache on this machine")
    answer = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True)
    known = set(answer.stdout.split())
    if "linux-libc-dev" not in known or len(known) < 10_000:
        pytest.skip("apt-cache knows few packages here: apt-get update was not run")
    assert set(packages) - known == set()


# The compose files and their hostfiles


@pytest.mark.parametrize("shape", SHAPES)
def test_compose_builds_use_the_checkout_and_the_dockerfile(shape: str) -> None:
    services = services_of(shape)
    assert set(services) == {*NODES, "launch"}
    for service in services.values():
        context = (DOCKER / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]) == DOCKER / "Dockerfile"


@pytest.mark.parametrize("shape", SHAPES)
def test_mounts_match_the_paths_in_the_image_and_in_the_hostfile(shape: str) -> None:
    compose, interpreter = compose_of(shape), "/opt/z2all/venv/bin/python"
    assert interpreter in " ".join(one.rest for one in DOCKERFILE)
    ops = assigned(DOCKERFILE, "ENV")["TORCH_EXTENSIONS_DIR"]
    for name, service in compose["services"].items():
        found = mounts(service)
        assert found["/training"] == ("work", False)
        named = {source for source, _ in found.values() if not source.startswith((".", "/"))}
        assert named <= set(compose["volumes"])
        if name == "launch":
            assert found["/root/.ssh/z2all_docker"] == ("/home/someone/.ssh/z2all_docker", True)
            assert found["/etc/z2all/nodes.yaml"] == (f"./{shape}.yaml", True)
        else:
            assert found["/etc/z2all/authorized_keys"] == ("/home/someone/.ssh/z2all_docker.pub", True)
            assert {"/etc/z2all/host_keys", "/var/cache/z2all/ops"} <= set(found)
            assert [target for target in found if target.startswith("/root")] == [], "a private key on a node"
    assert ops.startswith("/var/cache/z2all/ops/")
    assert ":-/etc/z2all/authorized_keys}" in ENTRYPOINT
    assert ":-/etc/z2all/host_keys}" in ENTRYPOINT
    for node in read_nodes(DOCKER / f"{shape}.yaml"):
        assert (node.python, node.ssh.user, node.ssh.key) == (interpreter, "root", "~/.ssh/z2all_docker")


@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_share_only_the_work_volume_and_the_public_key(shape: str) -> None:
    first, second = (services_of(shape)[name] for name in NODES)
    shared = {source for source, _ in mounts(first).values()} & {source for source, _ in mounts(second).values()}
    assert shared == {"work", "/home/someone/.ssh/z2all_docker.pub"}
    for service in (first, second):
        assert {"ipc", "pid", "privileged"} & set(service) == set()
        assert (service["shm_size"], service["ulimits"]["memlock"]) == ("8g", -1)
    assert [_gpus_of(first), _gpus_of(second)] == [["0"], ["1"]]


def _gpus_of(service: dict[str, Any]) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    return device["device_ids"]


def test_host_network_ports_match_the_hostfile() -> None:
    services, nodes = services_of("host_network"), read_nodes(DOCKER / "host_network.yaml")
    assert [node.name for node in nodes] == list(NODES)
    assert len({node.ssh.port for node in nodes}) == len(nodes)
    for node in nodes:
        service = services[node.name]
        assert service["network_mode"] == "host"
        assert service["environment"]["Z2ALL_SSH_PORT"] == node.ssh.port
        assert service["environment"]["Z2ALL_SSH_ADDRESS"] == node.ssh.address == "127.0.0.1"
        assert node.interface == "lo"


def test_mapped_ports_match_the_hostfile() -> None:
    compose, nodes = compose_of("mapped_ports"), read_nodes(DOCKER / "mapped_ports.yaml")
    (network,) = compose["networks"]["nodes"]["ipam"]["config"]
    assert [node.name for node in nodes] == list(NODES)
    everywhere: list[int] = []
    for number, node in enumerate(nodes):
        service = compose["services"][node.name]
        sshd = service["environment"]["Z2ALL_SSH_PORT"]
        expected = {node.ssh.port: sshd}
        assert node.inside
        if number == 0:  # the master node, where the ranks rendezvous
            assert node.outside
            assert node.outside.address == network["gateway"]
            expected[node.outside.port] = node.inside.port
        assert published_ports(service) == expected
        everywhere += published_ports(service)
        assert service["networks"]["nodes"]["ipv4_address"] == node.inside.address
        assert ipaddress.ip_address(node.inside.address) in ipaddress.ip_network(network["subnet"])
    assert len(set(everywhere)) == len(everywhere)
    assert compose["services"]["launch"]["network_mode"] == "host"


def test_only_nodes_behind_mapped_ports_may_create_tunnels() -> None:
    for name in NODES:
        mapped, plain = services_of("mapped_ports")[name], services_of("host_network")[name]
        assert mapped["cap_add"] == ["NET_ADMIN"]
        assert mapped["devices"] == ["/dev/net/tun:/dev/net/tun"]
        assert mapped["environment"]["Z2ALL_OVERLAY"] == 1
        assert {"cap_add", "devices"} & set(plain) == set()
        assert "Z2ALL_OVERLAY" not in plain["environment"]


def test_the_cpu_compose_file_overrides_the_services_of_both_others() -> None:
    services = read_compose("compose.cpu.yaml")["services"]
    for shape in SHAPES:
        assert set(services) == set(services_of(shape))
    for name, service in services.items():
        assert set(service["build"]["args"]) <= set(assigned(DOCKERFILE, "ARG"))
        if name != "launch":
            assert service["deploy"] is RESET
            assert service["environment"] == {"DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize("file", ["compose.host_network.yaml", "compose.mapped_ports.yaml", "compose.cpu.yaml"])
def test_compose_variables_are_known_to_the_entrypoint_and_not_secret(file: str) -> None:
    for service in read_compose(file, HOME="/home/someone")["services"].values():
        for name in service.get("environment", {}):
            assert not SECRET.search(name)
            assert name in ENTRYPOINT


# Documentation and commands


def test_the_entrypoint_documents_all_its_variables() -> None:
    explained = set(re.findall(r"^#   (Z2ALL_\w+)", ENTRYPOINT, re.MULTILINE))
    assert explained == set(re.findall(r"\$\{?(Z2ALL_\w+)", ENTRYPOINT))
    assert f"exit {MachineError.exit_code}; }}" in ENTRYPOINT
    assert "EXPOSE 2222" in (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert "Z2ALL_SSH_PORT:-2222}" in ENTRYPOINT


def test_z2all_commands_are_found_in_the_docker_files() -> None:
    assert {("README.md", "launch"), ("README.md", "doctor"), ("compose.host_network.yaml", "doctor")} <= {
        (name, words[0]) for name, words in COMMANDS
    }


@pytest.mark.parametrize(("file", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else value[0])
def test_documented_commands_use_existing_subcommands_and_options(
    file: str, words: list[str], small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer").symlink_to(small_tokenizer)
    monkeypatch.chdir(tmp_path)
    verbs: Any = typer.main.get_command(app)
    if words[0] == "cluster" and "cluster" not in verbs.commands:
        pytest.skip("this version has no verb `cluster`")
    command, rest = verbs, list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    assert command is not verbs, f"{file}: z2all {words[0]} is no verb"
    mine = rest[: rest.index("--")] if "--" in rest else rest
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in mine if word.startswith("-")} <= known
    if "--" in rest:
        options, run = parse(rest[rest.index("--") + 1 :])
        assert options.config == "z2all_tiny"
        assert run.run_dir.endswith("runs/first")


def test_files_that_the_readme_names_exist() -> None:
    text = (DOCKER / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:launch/docker|hostfiles)/[\w.]+\w", text))
    assert len(named) >= 3
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    assert {path.name for path in DOCKER.glob("*.yaml")} - set(re.findall(r"`([\w.]+\.yaml)`", text)) == set()
