"""Addresses, settings of NCCL and gloo that hurt, and whether the hubs can be reached."""

import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Finding
from z2all_ds.cluster.doctor.installation import version_of
from z2all_ds.cluster.doctor.resources import has_infiniband

HUB_SECONDS = 3.0
HURTS: dict[str, tuple[tuple[str, ...], str]] = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs talk through main memory instead of NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs without P2P talk over the network even inside a machine"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "NCCL writes thousands of lines"),
    "NCCL_ALGO": ((), "NCCL no longer chooses the way by the size of a message"),
    "NCCL_PROTO": ((), "NCCL no longer chooses the way by the size of a message"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "nothing is sent while something is computed"),
    "NCCL_BLOCKING_WAIT": (("1",), "nothing is sent while something is computed"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("0",), "a rank that lost another waits for ever"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked by another one"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "the host waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor asks the driver for memory"),
}
"""Variable -> values that hurt (none named: any), and how. Good for an hour of debugging, forgotten in a profile."""
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def addresses() -> list[Finding]:
    """The deepspeed launcher takes the first word of `hostname -I` for the master's address when it is given none."""
    try:
        answer = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10)
        found = answer.stdout.split() if answer.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        found = []
    if not found:
        fix = "Give the deepspeed launcher --master_addr (127.0.0.1 on one machine): it takes the address from there."
        return [Finding("hostname -I", WARN, "no address", fix)]
    return [Finding("hostname -I", OK, " ".join(found))]


def settings() -> list[Finding]:
    interfaces = [name for _, name in socket.if_nameindex()]
    return judge_settings(os.environ, interfaces, has_infiniband())


def judge_settings(environment: Mapping[str, str], interfaces: list[str], has_infiniband: bool) -> list[Finding]:
    """Of NCCL, gloo and torch, by variables that ranks will inherit."""
    findings = []
    for name, (values, effect) in HURTS.items():
        value = environment.get(name, "")
        if value and (not values or value.upper() in values):
            findings.append(Finding(f"{name}={value}", WARN, effect, f"Unless you mean it: unset {name}"))
    without = [f"NCCL_IB_DISABLE={environment.get('NCCL_IB_DISABLE')}", f"NCCL_NET={environment.get('NCCL_NET')}"]
    for setting in {"NCCL_IB_DISABLE=1", "NCCL_NET=Socket"} & set(without) if has_infiniband else ():
        fix = f"Unless you mean it: unset {setting.partition('=')[0]}"
        findings.append(Finding(setting, WARN, "this machine has InfiniBand, and NCCL will not use it", fix))
    for name in INTERFACE_VARIABLES:
        value = environment.get(name, "")
        if value and not names_interface(value, interfaces):
            fix = f"Set {name} to one of {', '.join(interfaces)}, or unset it."
            findings.append(Finding(f"{name}={value}", FAIL, "there is no such interface here", fix))
    topology = environment.get("NCCL_TOPO_FILE", "")
    if topology and not Path(topology).is_file():
        findings.append(Finding(f"NCCL_TOPO_FILE={topology}", WARN, "there is no such file", "unset NCCL_TOPO_FILE"))
    return findings or [Finding("NCCL and gloo settings", OK, "none that hurts")]


def names_interface(value: str, interfaces: list[str]) -> bool:
    """As NCCL reads it: prefixes with commas, `=` before exact names, `^` before those to leave out."""
    excludes, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    names = [name for name in value.split(",") if name]

    def is_named(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return any(is_named(interface) != excludes for interface in interfaces)


def hubs() -> list[Finding]:
    """Offline is fine: training needs neither. Both are tried at once."""
    with ThreadPoolExecutor() as pool:
        return [
            finding for found in pool.map(lambda look: look(os.environ), (_hugging_face, _wandb)) for finding in found
        ]


def _hugging_face(environment: Mapping[str, str]) -> list[Finding]:
    name = "Hugging Face hub"
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return [Finding(name, OK, "offline, by HF_HUB_OFFLINE")]
    url = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    if not is_address(url):
        return [_no_address("HF_ENDPOINT", url)]
    refusal = why_unreachable(url, environment)
    return [Finding(name, OK, f"not reachable ({refusal}): training and export need no hub" if refusal else url)]


def _wandb(environment: Mapping[str, str]) -> list[Finding]:
    if version_of("wandb") is None:
        return []
    mode = environment.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        return [Finding("Weights & Biases", OK, f"{mode}, by WANDB_MODE")]
    url = environment.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if not is_address(url):
        return [_no_address("WANDB_BASE_URL", url)]
    refusal = why_unreachable(url, environment)
    if refusal:
        return [Finding("Weights & Biases", OK, f"not reachable ({refusal}): a run keeps its own metrics, and goes on")]
    return [Finding("Weights & Biases", OK, url)]


def is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # read here, and refused if it is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _no_address(variable: str, url: str) -> Finding:
    fix = f"Set {variable} to an address such as https://hub.example.org, or unset it."
    return Finding(f"{variable}={url}", WARN, "is no address of a server", fix)


def why_unreachable(url: str, environment: Mapping[str, str]) -> str:
    """Empty where a connection can be opened: to the host, or to the proxy that stands for it."""
    proxy = (environment.get("HTTPS_PROXY") or environment.get("https_proxy") or "") if url.startswith("https") else ""
    proxy = f"http://{proxy}" if proxy and "://" not in proxy else proxy  # as curl reads it
    if proxy and not is_address(proxy):
        return "HTTPS_PROXY is no address"  # and not shown: it may hold a password
    parts = urlsplit(proxy or url)
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=HUB_SECONDS).close()
    except OSError as error:
        return f"{parts.hostname}: {error.strerror or error}"
    return ""


CHECKS: tuple[Callable[[], list[Finding]], ...] = (addresses, settings)
