"""Tests of the checks of NCCL settings, interface names and hubs."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from z2all_ds.cluster.doctor import network
from z2all_ds.cluster.doctor.network import hubs, judge_settings, names_interface, why_unreachable

HUB_VARIABLES = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "WANDB_MODE", "WANDB_BASE_URL", "HTTPS_PROXY", "https_proxy")


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HUB_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("eth0", True),
        ("eth", True),
        ("ib,eth", True),
        ("=eth0", True),
        ("=eth", False),
        ("ib", False),
        ("^lo,docker", True),
        ("^lo,eth", False),
        ("^=eth", True),
    ],
)
def test_interface_names_are_matched_as_nccl_matches_them(value: str, named: bool) -> None:
    assert names_interface(value, ["lo", "eth0"]) is named


@pytest.mark.parametrize(
    ("setting", "status"),
    [
        (("NCCL_P2P_DISABLE", "1"), "warn"),
        (("NCCL_P2P_DISABLE", "0"), "ok"),
        (("NCCL_DEBUG", "info"), "warn"),
        (("NCCL_DEBUG", "WARN"), "ok"),
        (("NCCL_ALGO", "Ring"), "warn"),
        (("NCCL_IB_DISABLE", "1"), "warn"),
        (("CUDA_LAUNCH_BLOCKING", "1"), "warn"),
        (("GLOO_SOCKET_IFNAME", "eth9"), "fail"),
        (("NCCL_SOCKET_IFNAME", "eth"), "ok"),
        (("NCCL_TOPO_FILE", "/no/such/file.xml"), "warn"),
        (("HOME", "/root"), "ok"),
    ],
)
def test_harmful_settings_are_reported(setting: tuple[str, str], status: str) -> None:
    (finding,) = judge_settings(dict([setting]), ["lo", "eth0"], has_infiniband=True)
    assert finding.status == status
    assert finding.name == ("NCCL and gloo settings" if status == "ok" else "=".join(setting))
    assert bool(finding.fix) == (status != "ok")


def test_ib_settings_are_fine_without_infiniband() -> None:
    (finding,) = judge_settings({"NCCL_IB_DISABLE": "1"}, ["lo"], has_infiniband=False)
    assert finding.status == "ok"


def test_an_unreachable_hub_is_reported_but_not_a_problem(listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening}")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    hugging_face, wandb = hubs()
    assert hugging_face.value == f"http://127.0.0.1:{listening}"
    assert "not reachable (127.0.0.1: Connection refused)" in wandb.value
    assert hugging_face.status == wandb.status == "ok"  # training works offline


@pytest.mark.parametrize("address", ["http://hub:abc", "huggingface.co", "ftp://hub", "https://", "http://[::1"])
def test_an_invalid_hub_address_is_a_warning(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("WANDB_BASE_URL", address)
    found = hubs()
    assert [finding.name for finding in found] == [f"HF_ENDPOINT={address}", f"WANDB_BASE_URL={address}"]
    for finding in found:
        assert finding.status == "warn" and finding.fix.endswith("or unset it.")


def test_offline_mode_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(network, "why_unreachable", lambda *_: pytest.fail("asked"))
    assert [finding.value for finding in hubs()] == ["offline, by HF_HUB_OFFLINE", "offline, by WANDB_MODE"]


def test_the_proxy_is_tried_instead_of_the_hub(listening: int) -> None:
    proxy = {"https_proxy": f"http://127.0.0.1:{listening}"}
    assert why_unreachable("https://no.such.host.invalid", proxy) == ""
    assert why_unreachable("https://no.such.host.invalid", {"HTTPS_PROXY": f"127.0.0.1:{listening}"}) == ""
    secret = why_unreachable("https://no.such.host.invalid", {"HTTPS_PROXY": "http://me:secret@host:port"})
    assert secret == "HTTPS_PROXY is not a valid address"
    assert "no.such.host.invalid" in why_unreachable("https://no.such.host.invalid", {})


def test_an_interface_that_does_not_exist_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    assert "fail" in [finding.status for finding in network.settings()]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert "fail" not in [finding.status for finding in network.settings()]
    assert Path("/sys/class/net/lo").exists()
