"""Settings of sinks, the methods of an adapter, and where W&B's records go: to its server or into the run folder."""

import configparser
import netrc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

WANDB, TENSORBOARD = "wandb", "tensorboard"
LABELS = {WANDB: "W&B", TENSORBOARD: "TensorBoard"}
HANG_SECONDS = 30.0
"""A session that gives no sign of life for so long is ended."""
PUBLIC_SERVER = "https://api.wandb.ai"


@dataclass(frozen=True)
class SinkSettings:
    """Settings of a session, passed as JSON on its command line."""

    wandb: str = "disabled"
    """disabled, offline or online; `auto` is resolved before."""
    tensorboard: bool = False
    project: str = "z2all"
    finish_seconds: float = 15.0
    hang_seconds: float = HANG_SECONDS

    @property
    def sinks(self) -> list[str]:
        return [*([WANDB] if self.wandb != "disabled" else []), *([TENSORBOARD] if self.tensorboard else [])]

    def place(self, sink: str, environment: Mapping[str, str] = os.environ) -> str:
        """Returns the name of a sink's marks: W&B's offline folder and each project of a server have their own."""
        if sink == TENSORBOARD:
            return "files"
        if self.wandb != "online":
            return self.wandb
        return "/".join([_server(environment), environment.get("WANDB_ENTITY", ""), self.project])


class SinkFailure(Exception):
    """A sink cannot continue, and why. `for_good`: another try is useless."""

    def __init__(self, why: str, for_good: bool = False) -> None:
        self.for_good = for_good
        super().__init__(why)


class Sink(Protocol):
    """An adapter for one session; whatever it raises ends the session."""

    def open(self) -> str:
        """Returns where the curves can be seen."""

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        """Takes lines of metrics.jsonl and events.jsonl, in order of time; only events have the field `event`."""

    def settle(self) -> bool:
        """Returns when the tracker has taken everything so far; True if it is also delivered."""

    def close(self) -> None:
        """Returns when everything is delivered."""


def resolve_wandb_mode(asked: str, environment: Mapping[str, str] = os.environ) -> str:
    """`auto` is what WANDB_MODE says, else online if there is a key, else offline."""
    if asked != "auto":
        return asked
    wanted = environment.get("WANDB_MODE", "")
    if wanted in ("disabled", "offline", "online"):
        return wanted
    return "online" if has_wandb_key(environment) else "offline"


def has_wandb_key(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether W&B will find a login. Looks where W&B looks, without importing it."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(_server(environment)).hostname or ""
    named, home = environment.get("NETRC"), _home(environment)
    for path in [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc.netrc(path).hosts.get(host):
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or os.path.expanduser("~"))


def _server(environment: Mapping[str, str]) -> str:
    if url := environment.get("WANDB_BASE_URL"):
        return url
    folder = environment.get("WANDB_CONFIG_DIR") or _home(environment) / ".config" / "wandb"
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(Path(folder) / "settings")
    except (configparser.Error, UnicodeDecodeError):
        return PUBLIC_SERVER
    return settings.get("default", "base_url", fallback=PUBLIC_SERVER)
