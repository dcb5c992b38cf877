"""Tests of the orders of every node, and of the files and the description of a launch."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.command import ROOT
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.errors import ClusterError
from z2all_ds.cluster.launch.plan import LAUNCHERS, LaunchPlan, environment_text, is_secret, make_plan
from z2all_ds.cluster.nodes import DataAddress, Node, parse_nodes_text

MAPPED = """\
all: {slots: 2, ssh: {user: root}}
nodes:
  box1: {inside: {address: 172.17.0.2, port: 9527}, outside: {address: 192.0.2.11, port: 30846}}
  box2: {inside: {address: 172.17.0.2}, outside: {address: 192.0.2.12}, environment: {HF_TOKEN: hush, ONLY: here}}
"""
PLACES = {"box1": DataAddress("172.17.0.2", "eth0"), "box2": DataAddress("172.17.0.2", "ens3")}
EQUAL = {"n1": DataAddress("10.0.0.1", "eth0"), "n2": DataAddress("10.0.0.2", "eth0")}


def plan(nodes: list[Node], places: dict[str, DataAddress], tmp_path: Path, **environment: str) -> LaunchPlan:
    run = RunConfig(run_dir=str(tmp_path))
    return make_plan(nodes, places, run, "never", 29501, ["cpu_adam"], {"EXTRA": "1"}, environment)


def equal_nodes() -> list[Node]:
    return [Node(name="n1", slots=1), Node(name="n2", slots=3)]


def test_the_master_has_its_inside_address_and_other_nodes_its_outside_address(tmp_path: Path) -> None:
    orders = plan(parse_nodes_text(MAPPED, "f"), PLACES, tmp_path).orders
    assert (orders["box1"].master_address, orders["box1"].master_port) == ("172.17.0.2", 9527)
    assert (orders["box2"].master_address, orders["box2"].master_port) == ("192.0.2.11", 30846)
    assert [orders[name].environment["GLOO_SOCKET_IFNAME"] for name in orders] == ["eth0", "ens3"]
    assert [orders[name].environment["NCCL_SOCKET_IFNAME"] for name in orders] == ["eth0", "ens3"]
    assert [orders[name].node_rank for name in orders] == [0, 1]
    assert orders["box2"].environment["ONLY"] == "here"
    assert "ONLY" not in orders["box1"].environment


def test_without_a_preflight_the_names_of_nodes_are_used(tmp_path: Path) -> None:
    orders = plan(equal_nodes(), {}, tmp_path).orders
    assert {(order.master_address, order.master_port) for order in orders.values()} == {("n1", 29501)}
    assert all("GLOO_SOCKET_IFNAME" not in order.environment for order in orders.values())


def test_only_selected_variables_are_forwarded_to_the_nodes(tmp_path: Path) -> None:
    given = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "hush", "HOME": "/x", "TORCH_EXTENSIONS_DIR": "/y", "SSH_TTY": "z"}
    found = plan(equal_nodes(), EQUAL, tmp_path, **given).orders["n2"].environment
    assert {name: found.get(name) for name in given} == {
        **dict.fromkeys(given),
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "hush",
    }


def test_files_are_private_to_their_owner_and_deepspeed_reads_them(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    made = plan(equal_nodes(), EQUAL, tmp_path, NCCL_DEBUG="INFO", WANDB_API_KEY="hush")
    made.write("ssh")
    files = (made.ssh_config, made.hostfile, made.environment_file)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    assert dict(fetch_hostfile(str(made.hostfile))) == {"n1": 1, "n2": 3}
    lines = made.environment_file.read_text().splitlines()
    assert all("=" in line and line.strip() == line for line in lines)
    assert "NCCL_DEBUG=INFO" in lines
    assert "hush" not in "".join(file.read_text() for file in files)
    assert load_run_config(str(tmp_path / "launch" / "run.yaml")) == RunConfig(run_dir=str(tmp_path))


def test_ranks_of_deepspeeds_launchers_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    found = plan(equal_nodes(), EQUAL, tmp_path, PYTHONPATH="/mine").deepspeed_environment()
    assert "TORCHINDUCTOR_CACHE_DIR" not in found  # that of this machine; ranks choose their own
    assert (found["PYTHONSAFEPATH"], found["PYTHONPATH"]) == ("1", f"{ROOT}:/mine")


def test_the_description_hides_secrets(tmp_path: Path) -> None:
    shown = plan(parse_nodes_text(MAPPED, "f"), PLACES, tmp_path, WANDB_API_KEY="hush").describe()
    assert "hush" not in shown
    assert "WANDB_API_KEY='***'" in shown
    assert "--master_addr 192.0.2.11 --master_port 30846" in shown
    assert "StrictHostKeyChecking accept-new" in shown


def test_settings_that_deepspeeds_launchers_do_not_support_are_listed(tmp_path: Path) -> None:
    assert plan(equal_nodes(), EQUAL, tmp_path, NCCL_DEBUG="INFO").unsupported_settings() == []
    differing = plan(parse_nodes_text(MAPPED, "f"), PLACES, tmp_path).unsupported_settings()
    assert differing == ["GLOO_SOCKET_IFNAME", "HF_TOKEN", "NCCL_SOCKET_IFNAME", "ONLY", "outside"]


def test_an_interpreter_of_a_hostfile_is_not_started_on_this_machine(tmp_path: Path) -> None:
    nodes = parse_nodes_text("all: {slots: 1, python: /tmp/theirs}\nnodes: {node1: {}, node2: {}}", "f")
    made = plan(nodes, EQUAL, tmp_path)
    assert made.unsupported_settings() == ["python"]
    assert made.deepspeed_command()[0] == sys.executable


def test_the_command_line_is_valid_shell(tmp_path: Path) -> None:
    words = shlex.split(plan(equal_nodes(), EQUAL, tmp_path / "a b").command_line())
    assert words[-4:] == ["--config", f"{tmp_path}/a b/launch/run.yaml", "--resume", "never"]
    assert f"DS_ENV_FILE={tmp_path}/a b/launch/deepspeed_env" in words


@pytest.mark.parametrize("value", ["1\n2", "1\rB=2"])
def test_a_line_break_in_a_value_is_refused(value: str) -> None:
    with pytest.raises(ClusterError, match="variable A: contains a line break"):
        environment_text({"A": value})


def test_a_hostfile_sets_no_variable_of_a_process_on_this_machine(tmp_path: Path) -> None:
    text = "all: {slots: 1, environment: {PYTHONWARNINGS: 'all:0:antigravity.x', LD_PRELOAD: /tmp/theirs.so}}"
    made = plan(parse_nodes_text(f"{text}\nnodes: {{n1: {{}}, n2: {{}}}}", "f"), EQUAL, tmp_path)
    for launcher in LAUNCHERS[1:]:
        assert not {"PYTHONWARNINGS", "LD_PRELOAD"} & {*made.own_variables(launcher)}, launcher
        assert "antigravity" not in made.command_line(launcher)
    made.require_supported("pdsh")  # in a file, for the nodes
    assert "LD_PRELOAD=/tmp/theirs.so\n" in made.files("pdsh")[made.environment_file]
    line = "launcher slurm: has one value .* are variables of the hostfile: LD_PRELOAD, PYTHONWARNINGS. Export var"
    with pytest.raises(ClusterError, match=line):
        made.require_supported("slurm")


def test_commands_and_files_for_the_user_do_not_name_this_launch(tmp_path: Path) -> None:
    """Ranks with its name would rely on it to record their end."""
    made = plan(equal_nodes(), EQUAL, tmp_path)
    assert made.orders["n1"].environment["EXTRA"] == "1"
    assert made.own_variables("slurm")["EXTRA"] == "1"
    for launcher in LAUNCHERS:
        files = made.files(launcher)
        own = files.pop(made.own_environment_file, "")
        assert ("EXTRA=1\n" in own) == (launcher in ("pdsh", "openmpi"))
        assert "EXTRA" not in "".join(files.values()) + made.command_line(launcher)
        assert not own or made.own_variables(launcher)["DS_ENV_FILE"] == str(made.own_environment_file)
    assert made.own_environment_file not in replace(made, extra={}).files("pdsh")  # a dry run


def test_paths_that_deepspeed_would_have_to_quote_are_refused(tmp_path: Path) -> None:
    made = plan(equal_nodes(), EQUAL, tmp_path / "a;touch x")
    for launcher in ("pdsh", "openmpi"):
        rule = "DeepSpeed does not quote them correctly. Use --launcher ssh"
        with pytest.raises(ClusterError, match=f"^launcher {launcher}: '{tmp_path}/a;touch x/launch.*{rule}"):
            made.require_supported(launcher)
        plan(equal_nodes(), EQUAL, tmp_path).require_supported(launcher)
    for launcher in ("ssh", "slurm"):
        made.require_supported(launcher)
    assert "DeepSpeed's launcher" not in made.describe()
    assert replace(made, folder="/$(x)").words_to_quote() == ["/$(x)", *made.words_to_quote()]


@pytest.mark.parametrize(
    ("value", "refused_by"),
    [
        ("=mlx5_0:1,mlx5_1", []),
        ("", []),
        ("^docker0 lo;(x)", ["openmpi"]),  # arrives in double quotes, which pdsh removes and mpirun keeps
        ("%h", ["pdsh"]),
        *((value, ["pdsh", "openmpi"]) for value in ("$(touch x)", "`touch x`", 'a"; touch x; "', "a\\")),
    ],
)
def test_values_that_a_shell_of_a_node_would_interpret_are_refused(
    value: str, refused_by: list[str], tmp_path: Path
) -> None:
    nodes = [node.model_copy(update={"environment": {"A": value}}) for node in equal_nodes()]
    made = plan(nodes, EQUAL, tmp_path)
    assert [launcher for launcher in LAUNCHERS if made.words_to_quote(launcher)] == refused_by
    for launcher in refused_by:
        with pytest.raises(ClusterError, match=f"^launcher {launcher}: {re.escape(repr(f'A={value}'))}: has "):
            made.require_supported(launcher)


@pytest.mark.parametrize("name", ["DB_PASSWD", "REDIS_PASS", "GITHUB_PAT", "PROXY_AUTH", "AUTH_HEADER"])
def test_a_variable_is_secret_by_its_name(name: str) -> None:
    assert is_secret(name, "x")
    assert not any(is_secret(other, "x") for other in ("PATH", "PYTHONPATH", "NCCL_COMPASS", "XAUTHORITY"))
