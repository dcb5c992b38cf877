"""Addresses of this machine, harmful settings of NCCL and gloo, and reachability of the hubs."""

import os
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from z2all_ds.base.url_passwords import without_passwords
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Check, Finding
from z2all_ds.cluster.doctor.installation import version_of
from z2all_ds.cluster.doctor.resources import has_infiniband

HUB_SECONDS = 3.0
HARMFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs communicate through main memory instead of NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs without P2P use the network even within a machine"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "NCCL prints thousands of lines"),
    "NCCL_ALGO": ((), "NCCL no longer chooses by message size"),
    "NCCL_PROTO": ((), "NCCL no longer chooses by message size"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "communication does not overlap with computation"),
    "NCCL_BLOCKING_WAIT": (("1",), "communication does not overlap with computation"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("0",), "a rank that lost another waits forever"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is preceded by another one that checks it"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "the host waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor is allocated by the driver"),
}
"""Variable -> harmful values (empty: any), and their effect. Useful for debugging, harmful in a shell profile."""
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def addresses() -> Finding:
    """Check `hostname -I`, from which the deepspeed launcher takes the default master address."""
    try:
        answer = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10)
        found = answer.stdout.split() if answer.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        found = []
    if not found:
        fix = "Give the deepspeed launcher --master_addr (127.0.0.1 on one machine); its default is this address."
        return Finding("hostname -I", WARN, "no address", fix)
    return Finding("hostname -I", OK, " ".join(found))


def settings() -> list[Finding]:
    interfaces = [name for _, name in socket.if_nameindex()]
    return judge_settings(os.environ, interfaces, has_infiniband())


def judge_settings(environment: Mapping[str, str], interfaces: list[str], has_infiniband: bool) -> list[Finding]:
    """Report harmful variables of NCCL, gloo and torch that ranks would inherit."""
    findings = []
    for name, (values, effect) in HARMFUL.items():
        value = environment.get(name, "")
        if value and (not values or value.upper() in values):
            findings.append(Finding(f"{name}={value}", WARN, effect, f"Unset {name}, unless it is intended."))
    for name, value in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")) if has_infiniband else ():
        if environment.get(name) == value:
            effect = "this machine has InfiniBand, but NCCL will not use it"
            findings.append(Finding(f"{name}={value}", WARN, effect, f"Unset {name}, unless it is intended."))
    for name in INTERFACE_VARIABLES:
        value = environment.get(name, "")
        if value and not names_interface(value, interfaces):
            fix = f"Set {name} to one of {', '.join(interfaces)}, or unset it."
            findings.append(Finding(f"{name}={value}", FAIL, "no such interface on this machine", fix))
    topology = environment.get("NCCL_TOPO_FILE", "")
    if topology and not Path(topology).is_file():
        findings.append(Finding(f"NCCL_TOPO_FILE={topology}", WARN, "no such file", "Unset it."))
    return findings or [Finding("NCCL and gloo settings", OK, "none is harmful")]


def names_interface(value: str, interfaces: list[str]) -> bool:
    """Parse as NCCL does: comma-separated prefixes, `=` before exact names, `^` before names to exclude."""
    excludes, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    names = [name for name in value.split(",") if name]

    def is_named(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return any(is_named(interface) != excludes for interface in interfaces)


def hubs() -> list[Finding]:
    """Try both hubs in parallel. Offline is fine: training needs neither."""
    with ThreadPoolExecutor() as pool:
        return [
            finding for found in pool.map(lambda hub: hub(os.environ), (_hugging_face, _wandb)) for finding in found
        ]


def _hugging_face(environment: Mapping[str, str]) -> list[Finding]:
    name = "Hugging Face hub"
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return [Finding(name, OK, "offline, by HF_HUB_OFFLINE")]
    url = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    return [_reach(name, "HF_ENDPOINT", url, environment, "training and export do not need it")]


def _wandb(environment: Mapping[str, str]) -> list[Finding]:
    if version_of("wandb") is None:
        return []
    name, mode = "Weights & Biases", environment.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        return [Finding(name, OK, f"{mode}, by WANDB_MODE")]
    url = environment.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    return [_reach(name, "WANDB_BASE_URL", url, environment, "runs keep their own metrics and continue")]


def _reach(name: str, variable: str, url: str, environment: Mapping[str, str], consequence: str) -> Finding:
    shown = without_passwords(url)
    if not is_address(url):
        fix = f"Set {variable} to an address such as https://hub.example.org, or unset it."
        return Finding(f"{variable}={shown}", WARN, "is not a valid address", fix)
    reason = why_unreachable(url, environment)
    return Finding(name, OK, f"not reachable ({reason}): {consequence}" if reason else shown)


def is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is not a number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def why_unreachable(url: str, environment: Mapping[str, str]) -> str:
    """Return why no connection to the host, or to its proxy, can be opened; empty if it can."""
    proxy = (environment.get("HTTPS_PROXY") or environment.get("https_proxy") or "") if url.startswith("https") else ""
    proxy = f"http://{proxy}" if proxy and "://" not in proxy else proxy  # as curl reads it
    if proxy and not is_address(proxy):
        return "HTTPS_PROXY is not a valid address"  # its value may contain a password
    parts = urlsplit(proxy or url)
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=HUB_SECONDS).close()
    except OSError as error:
        return f"{parts.hostname}: {error.strerror or error}"
    return ""


CHECKS: tuple[Check, ...] = (addresses, settings)
