"""Mode and destination of W&B, which depend on the available login."""

from pathlib import Path

import pytest

from z2all_ds.track.sinks.settings import SinkSettings, has_wandb_key, resolve_wandb_mode


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("NETRC", "WANDB_BASE_URL", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_list_of_enabled_sinks() -> None:
    assert SinkSettings("offline", True).sinks == ["wandb", "tensorboard"]
    assert SinkSettings().sinks == []


def test_each_online_project_is_a_separate_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    online, other = SinkSettings("online", project="a"), SinkSettings("online", project="b")
    assert online.destination("wandb") != other.destination("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    assert online.destination("wandb") == "https://wandb.example.org/team/a"
    offline = [SinkSettings("offline", project=project).destination("wandb") for project in "ab"]
    assert offline[0] == offline[1]


@pytest.mark.parametrize("mode", ["disabled", "offline", "online"])
def test_an_explicit_mode_is_kept(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert resolve_wandb_mode(mode) == mode


@pytest.mark.usefixtures("home")
def test_auto_is_offline_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert resolve_wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_wandb_mode("auto") == "disabled"


def test_a_login_belongs_to_a_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert has_wandb_key()
    with monkeypatch.context() as other_server:
        other_server.setenv("WANDB_BASE_URL", "https://wandb.example.org")
        assert not has_wandb_key()
    with monkeypatch.context() as other_file:
        other_file.setenv("NETRC", str(home / "other"))
        assert not has_wandb_key()
    folder = home / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert not has_wandb_key()
    (home / ".netrc").write_text("machine wandb.example.org login user password secret\n")
    assert has_wandb_key()
    (home / ".netrc").write_text("machine\n")
    assert not has_wandb_key()
