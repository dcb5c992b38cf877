"""Where W&B's records go, by the login that is there."""

from pathlib import Path

import pytest

from z2all_ds.track.sinks.settings import SinkSettings, has_wandb_key, resolve_wandb_mode


def test_sinks_that_are_wanted() -> None:
    assert SinkSettings("offline", True).sinks == ["wandb", "tensorboard"]
    assert SinkSettings().sinks == []


def test_each_place_has_its_own_records() -> None:
    online = SinkSettings("online", project="a")
    entity = {"WANDB_BASE_URL": "https://wandb.example.org", "WANDB_ENTITY": "team"}
    assert online.place("wandb", entity) == "https://wandb.example.org/team/a"
    other = SinkSettings("online", project="b")
    assert len({online.place("wandb"), online.place("wandb", entity), other.place("wandb")}) == 3
    assert SinkSettings("offline", project="a").place("wandb") == SinkSettings("offline", project="b").place("wandb")


@pytest.mark.parametrize("asked", ["disabled", "offline", "online"])
def test_what_is_asked_for_is_done(asked: str) -> None:
    assert resolve_wandb_mode(asked, {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}) == asked


def test_auto_is_offline_without_a_key(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert resolve_wandb_mode("auto", home) == "offline"
    assert resolve_wandb_mode("auto", {**home, "WANDB_API_KEY": "k"}) == "online"
    assert resolve_wandb_mode("auto", {**home, "WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}) == "disabled"


def test_a_login_is_that_of_the_server(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert has_wandb_key(home)
    assert not has_wandb_key({**home, "WANDB_BASE_URL": "https://wandb.example.org"})
    assert not has_wandb_key({**home, "NETRC": str(tmp_path / "other")})
    folder = tmp_path / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert not has_wandb_key(home)
    (tmp_path / ".netrc").write_text("machine wandb.example.org login user password secret\n")
    assert has_wandb_key(home)
    (tmp_path / ".netrc").write_text("machine\n")
    assert not has_wandb_key(home)
