"""Passwords in URLs: recognised, hidden, and refused wherever they would be kept."""

from pathlib import Path

import pytest

from z2all_ds.base.config import anchored, dump_yaml, load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.storage import open_folder
from z2all_ds.base.url_passwords import text_without_passwords, without_passwords
from z2all_ds.cluster.launch.multi_node import LaunchOptions, launch
from z2all_ds.cluster.launch.plan import assignments, is_secret
from z2all_ds.track.board.remote import parse_remote
from z2all_ds.track.board.settings import parse
from z2all_ds.track.sinks.settings import SinkSettings
from z2all_ds.track.sinks.wandb_sink import run_config

URL = "https://me:geheim@host:8080/corpus"
NAMES = [
    "key", "auth", "pass", "code", "Authorization", "pwd", "db_pwd", "jwt", "credential", "X-Amz-Credential",
    "credentials", "api-key", "tok%65n", "%4BEY", "api%5Fkey",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, "https://me:***@host:8080/corpus"),
        ("simplecache::s3://key:a+b:c@bucket/x", "simplecache::s3://key:***@bucket/x"),
        ("ftp://:geheim@host", "ftp://:***@host"),
        ("https://me:ge@heim@host/x", "https://me:***@host/x"),
        ('https://me:it\'s a "word"@host/x', "https://me:***@host/x"),
        ("https://me:ge/heim@host/x", "https://me:***@host/x"),
        ("https://me:1234@host:80/x", "https://me:***@host:80/x"),
        ("https://host/x?a=1&access_token=geheim&b=2#c", "https://host/x?a=1&access_token=***&b=2#c"),
        ("abfs://box/x?sv=1&sig=geheim", "abfs://box/x?sv=1&sig=***"),
        ("s3://box/x?X-Amz-Signature=geheim", "s3://box/x?X-Amz-Signature=***"),
        ("http://ghp_geheim@host/x", "http://***@host/x"),
        ("simplecache::HTTPS://geheim:@host", "simplecache::HTTPS://***:@host"),
        ("https://ge@heim@host", "https://***@host"),
        ("https:///me:geheim@host", "https:///me:***@host"),
        ("https:////geheim@host", "https:////***@host"),
        ("https://me:1234/5@host/x", "https://me:***@host/x"),
        ("https://me:123456/x@host", "https://me:***@host"),
        ("https://m e:12 34@host", "https://m e:***@host"),
        *((f"https://host/x?a=1&{name}=ge;heim&b=2", f"https://host/x?a=1&{name}=***&b=2") for name in NAMES),
        ("https://host/x;a=1;token=geheim", "https://host/x;a=1;token=***"),
        ("https://host/x#access_token=geheim&b=2", "https://host/x#access_token=***&b=2"),
        ("http://host/x?tokens=5&signal=2", None),
        ("http://host/x?page=2&monkey=1&sort_key=a&zip_code=1&compass=n&author=me#a=b", None),
        ("http://host:8080/x@y", None),
        ("hf://datasets/a@main/x", None),
        ("s3://bucket@point/x", None),
        ("sftp://me@host/x", None),
        ("file:///a:b@c", None),
        ("http://[::1]:8080/me@x", None),
        ("ssh://me@host:22/a:b@c", None),
        ("http://host:80/me:you@x", None),
        ("http://host?a:b@c", None),
        ("s3://bucket/x", None),
        ("me:you@host", None),
    ],
)
def test_passwords_are_hidden(text: str, shown: str | None) -> None:
    assert without_passwords(text) == (text if shown is None else shown)


def test_passwords_in_nested_settings_are_hidden() -> None:
    shown = "https://me:***@host:8080/corpus"
    assert without_passwords({"a": [URL, 1], "b": {"c": URL}}) == {"a": [shown, 1], "b": {"c": shown}}


def test_variables_with_passwords_in_urls_are_secret() -> None:
    """They are masked in printed commands, and not passed on by launchers that write them on command lines."""
    assert assignments({"NCCL_A": "1", "HF_ENDPOINT": URL}) == "NCCL_A=1 HF_ENDPOINT='***'"
    assert is_secret("HF_ENDPOINT", URL) and not is_secret("HF_ENDPOINT", "https://host")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"model {URL}: no such folder", "model https://me:***@host:8080/corpus: no such folder"),
        (str(Path(URL)), "https:/me:***@host:8080/corpus"),
        ("override 'a=[http://me:ge@heim@host'", "override 'a=[http://me:***@host'"),
        ("http://host/x?token=geheim is wrong", "http://host/x?token=*** is wrong"),
        ("http://geheim@host is wrong", "http://***@host is wrong"),
        (str(Path("http://geheim@host")), "http:/***@host"),
        ("https:///me:geheim@host is wrong", "https:///me:***@host is wrong"),
        ("(https://me:1234/5@host) is wrong", "(https://me:***@host) is wrong"),
        ("https://me:ge/heim@host is wrong", "https://me:***@host is wrong"),
        ("gpu1:/data:x/y@z; key=5", None),
        ("http://host:8080/x@y and hf://datasets/a@main/x?page=2", None),
        ("gpu1:/data: no such folder; log in as me@gpu1", None),
        ("http://host:80/x: me@host", None),
        ("ssh://me@host/x: a:b@c", None),
    ],
)
def test_messages_show_no_passwords(text: str, shown: str | None) -> None:
    assert text_without_passwords(text) == (text if shown is None else shown)
    assert str(ConfigError(text, "wrong", "Fix it.")) == f"{text if shown is None else shown}: wrong. Fix it."


def test_a_start_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for override in (f"run_dir={URL}", f"train.init_from={URL}", "run_dir=s3://bucket/run"):
        with pytest.raises(ConfigError, match=r"a password in a URL|not to a URL"):
            anchored(load_run_config(None, [override]))
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    options = LaunchOptions(str(tmp_path / "hosts"), preflight=False, dry_run=True)
    with pytest.raises(SystemExit):
        launch(options, [f"data.corpus={URL}", "run_dir=run"])
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


def test_a_url_with_a_password_is_refused(tmp_path: Path) -> None:
    """By whatever opens it, and by whatever writes a run config, such as the start of a run."""
    with pytest.raises(ConfigError, match="a password in a URL") as caught:
        open_folder(URL)
    assert str(caught.value).startswith("https://me:***@host") and "geheim" not in str(caught.value)
    with pytest.raises(ConfigError, match="a password in a URL") as caught:
        dump_yaml(load_run_config(None, [f"data.corpus={URL}"]))
    assert str(caught.value).startswith("data.corpus=https://me:***@host") and "geheim" not in str(caught.value)
    with pytest.raises(ConfigError, match="a password in a URL"):
        dump_yaml(load_run_config(None, ['validation.corpus="https://me:it\'s@host/x"']))
    with pytest.raises(ConfigError) as caught:
        parse_remote("ssh://me:geheim@[host/runs")
    assert "geheim" not in str(caught.value)
    with pytest.raises(ConfigError, match="of others over ssh") as caught:
        parse_remote(URL)
    assert "geheim" not in str(caught.value)
    with pytest.raises(ConfigError, match="a password on the command line") as caught:
        parse_remote("ssh://me:geheim@host/runs")
    assert "geheim" not in str(caught.value)
    assert "sftp://me@host/corpus" in dump_yaml(load_run_config(None, ["data.corpus=sftp://me@host/corpus"]))


def test_passwords_in_older_run_folders_are_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = f"data:\n  corpus: {URL}\n"
    (tmp_path / "run.yaml").write_text(content)
    assert load_run_config(str(tmp_path / "run.yaml")).data.corpus == URL
    assert run_config(RunFolder(tmp_path)) == {"data": {"corpus": "https://me:***@host:8080/corpus"}}
    assert parse(content.encode()) == {"data": {"corpus": "https://me:***@host:8080/corpus"}}
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:geheim@wandb.example")
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    assert SinkSettings(wandb="online").destination("wandb") == "https://me:***@wandb.example//z2all"
