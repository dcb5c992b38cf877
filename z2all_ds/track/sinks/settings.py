"""Settings of sinks, the interface of an adapter, and W&B's mode: online or offline."""

import configparser
import netrc
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from z2all_ds.base.url_passwords import without_passwords

WANDB, TENSORBOARD = "wandb", "tensorboard"
LABELS = {WANDB: "W&B", TENSORBOARD: "TensorBoard"}
HANG_SECONDS = 30.0
"""A session that reports nothing for this long is killed."""
PUBLIC_SERVER = "https://api.wandb.ai"


@dataclass(frozen=True)
class SinkSettings:
    """Settings of a session, passed as JSON on its command line."""

    wandb: str = "disabled"
    """disabled, offline or online; `auto` must be resolved before."""
    tensorboard: bool = False
    project: str = "z2all"
    finish_seconds: float = 15.0
    hang_seconds: float = HANG_SECONDS

    @property
    def sinks(self) -> list[str]:
        return [*([WANDB] if self.wandb != "disabled" else []), *([TENSORBOARD] if self.tensorboard else [])]

    def destination(self, sink: str) -> str:
        """Return the key of a sink's progress: W&B's offline folder and each project of a server have their own."""
        if sink == TENSORBOARD:
            return "files"
        if self.wandb != "online":
            return self.wandb
        return "/".join([without_passwords(_server()), os.environ.get("WANDB_ENTITY", ""), self.project])


class SinkFailure(Exception):
    """A sink cannot continue. `is_permanent`: another attempt is useless."""

    def __init__(self, why: str, is_permanent: bool = False) -> None:
        self.is_permanent = is_permanent
        super().__init__(why)


class Sink(Protocol):
    """An adapter for one session; any exception it raises ends the session."""

    def open(self) -> str:
        """Return where the curves can be seen."""

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        """Take lines of metrics.jsonl and events.jsonl, in order of time; only events have the field `event`."""

    def settle(self) -> bool:
        """Return when the tracker has taken everything so far; True if it is also delivered."""

    def close(self) -> None:
        """Return when everything is delivered."""


def resolve_wandb_mode(mode: str) -> str:
    """Resolve `auto`: the value of WANDB_MODE, else online if there is a key, else offline."""
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE", "")
    if wanted in ("disabled", "offline", "online"):
        return wanted
    return "online" if has_wandb_key() else "offline"


def has_wandb_key() -> bool:
    """Return whether W&B will find a login. Check the same variables and files as W&B, without importing it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host, named = urlsplit(_server()).hostname or "", os.environ.get("NETRC")
    for path in [Path(os.path.expanduser(named))] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if netrc.netrc(path).hosts.get(host):
                return True
    return False


def _server() -> str:
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(Path(folder) / "settings")
    except (configparser.Error, UnicodeDecodeError):
        return PUBLIC_SERVER
    return settings.get("default", "base_url", fallback=PUBLIC_SERVER)
