"""What sinks are told, what they tell, and where a run's W&B records go: to the server or into the run folder."""

import configparser
import json
import netrc
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

WANDB, TENSORBOARD = "wandb", "tensorboard"
LABELS = {WANDB: "W&B", TENSORBOARD: "TensorBoard"}
HANG_SECONDS = 30.0
"""A session that does not answer for so long is ended."""
PUBLIC_SERVER = "https://api.wandb.ai"


@dataclass(frozen=True)
class SinkSettings:
    """Given to the keeper and its sessions on their command lines."""

    wandb: str = "disabled"
    """disabled, offline or online: `auto` is resolved before."""
    tensorboard: bool = False
    project: str = "z2all"
    finish_seconds: float = 15.0
    hang_seconds: float = HANG_SECONDS

    @property
    def sinks(self) -> list[str]:
        return [*([WANDB] if self.wandb != "disabled" else []), *([TENSORBOARD] if self.tensorboard else [])]

    def place(self, sink: str, environment: Mapping[str, str] = os.environ) -> str:
        """Name of the marks of a sink: W&B's offline folder and each project of a server have their own records."""
        if sink == TENSORBOARD:
            return "files"
        if self.wandb != "online":
            return self.wandb
        return "/".join([_server(environment), environment.get("WANDB_ENTITY", ""), self.project])

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> "SinkSettings":
        return cls(**json.loads(text))


class SinkFailure(Exception):
    """A sink cannot go on, and why. `for_good`: another try would end alike."""

    def __init__(self, why: str, for_good: bool = False) -> None:
        self.for_good = for_good
        super().__init__(why)


class Sink(Protocol):
    """One session's connection; whatever it raises ends the session."""

    def open(self) -> str:
        """Returns where its curves can be seen."""

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        """Of metrics.jsonl and events.jsonl, in the order of their times; those of the latter have `event`."""

    def settle(self) -> bool:
        """Returns when everything so far was taken; True where it is surely delivered, too."""

    def close(self) -> None:
        """Everything is delivered when it returns."""


def resolve_wandb_mode(asked: str, environment: Mapping[str, str] = os.environ) -> str:
    """`auto`: what WANDB_MODE says, else online where there is a key, else offline."""
    if asked != "auto":
        return asked
    wanted = environment.get("WANDB_MODE", "")
    if wanted in ("disabled", "offline", "online"):
        return wanted
    return "online" if has_wandb_key(environment) else "offline"


def has_wandb_key(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether W&B will find a login, looked for where it looks, without importing it."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = _home(environment)
    host = urlsplit(_server(environment)).hostname or ""
    named = environment.get("NETRC")
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
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(
            Path(environment.get("WANDB_CONFIG_DIR") or _home(environment) / ".config" / "wandb") / "settings"
        )
    except (configparser.Error, UnicodeDecodeError):
        return PUBLIC_SERVER
    return settings.get("default", "base_url", fallback=PUBLIC_SERVER)
