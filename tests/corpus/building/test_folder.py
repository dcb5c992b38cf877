"""Tests that unfinished builds, which a corpus folder of somebody else may contain, delete nothing of the user."""

import json
import os
from pathlib import Path

import pytest

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus import SourceSpec, build_corpus
from z2all_ds.corpus.building.folder import BUILDING_NAME, BuildingFolder, build_lock
from z2all_ds.corpus.building.report import keys_file, read_report, report_file
from z2all_ds.corpus.manifest import Manifest


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the user outside the corpus."""
    path = tmp_path / "home" / "work.tmp"
    path.parent.mkdir()
    path.write_text("precious")
    return path


@pytest.mark.parametrize("content", [{"new": [], "old": ["{path}"]}, {"new": [["{path}", "a", "b"]], "old": []}])
@pytest.mark.parametrize("path", ["{absolute}", "../../home/work.tmp"])
def test_a_list_of_files_cannot_lead_out_of_the_corpus(
    content: dict[str, list], path: str, precious: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "some" / "corpus"
    (corpus / BUILDING_NAME).mkdir(parents=True)
    named = json.dumps(content).replace("{path}", path.replace("{absolute}", str(precious)))
    (corpus / BUILDING_NAME / "PUBLISHING.json").write_text(named)
    with pytest.raises(DataError, match=r"PUBLISHING\.json: is not a file of a build"):
        BuildingFolder(corpus).recover(Manifest(1, ()))
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("link", [BUILDING_NAME, f"{BUILDING_NAME}/units"])
def test_links_are_not_followed_to_delete_leftovers(link: str, precious: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / link).parent.mkdir(parents=True)
    (corpus / link).symlink_to(precious.parent)
    with pytest.raises(ConfigError, match="is a link, but unfinished work is a folder"), build_lock(corpus):
        BuildingFolder(corpus).recover(Manifest(1, ()))
    assert precious.read_text() == "precious"


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def build(tmp_path: Path, replace: bool = False) -> Manifest:
    raw = tmp_path / "raw.txt"
    raw.write_text("some text\n")
    return build_corpus(tmp_path / "corpus", [SourceSpec("en", "text", (raw,))], replace=replace)


@pytest.mark.parametrize(
    "name", ["en-00000.jsonl", "en-00007.jsonl", "reports/en.json", "reports/en.keys", ".building/mine/code.py"]
)
@pytest.mark.parametrize("replace", [False, True])
def test_files_of_the_user_are_neither_replaced_nor_deleted(name: str, replace: bool, tmp_path: Path) -> None:
    file = tmp_path / "corpus" / name
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    with pytest.raises(ConfigError, match=r"is not of (this corpus|a build), .* Move it elsewhere"):
        build(tmp_path, replace=replace)
    assert contents(tmp_path / "corpus") == {name: "precious"}
    file.unlink()
    if file.parent.name == "mine":
        file.parent.rmdir()
    build(tmp_path)
    assert not (tmp_path / "corpus" / BUILDING_NAME).exists()


def test_files_that_appear_during_a_build_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, real = tmp_path / "corpus", BuildingFolder.shards

    def shards(self: BuildingFolder, domain: str, key: str) -> Path:
        for name in ("en-00000.jsonl", ".building/mine.tmp"):
            (corpus / name).write_text("precious")
        return real(self, domain, key)

    monkeypatch.setattr(BuildingFolder, "shards", shards)
    with pytest.raises(ConfigError, match="is not of this corpus"):
        build(tmp_path)
    monkeypatch.undo()
    (corpus / "en-00000.jsonl").rename(tmp_path / "en-00000.jsonl")
    build(tmp_path)
    assert (tmp_path / "en-00000.jsonl").read_text() == (corpus / ".building/mine.tmp").read_text() == "precious"
    assert "some text" in (corpus / "en-00000.jsonl").read_text()


def test_only_shards_are_removed_or_moved(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / BUILDING_NAME).mkdir(parents=True)
    for name in ("README.md", "old-00000.jsonl"):
        (corpus / name).write_text("precious")
    publishing = corpus / BUILDING_NAME / "PUBLISHING.json"
    publishing.write_text(json.dumps({"new": [["README.md", "a", f"{0:032d}-0"]], "old": []}))
    with pytest.raises(DataError, match=r"PUBLISHING\.json: is not a file of a build"):
        BuildingFolder(corpus).recover(Manifest(1, ()))
    publishing.write_text(json.dumps({"new": [], "old": ["README.md", "old-00000.jsonl"]}))
    BuildingFolder(corpus).recover(Manifest(1, ()))
    assert contents(corpus) == {"README.md": "precious"}


def test_a_link_instead_of_reports_is_refused(precious: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "reports").symlink_to(precious.parent)
    with pytest.raises(ConfigError, match="reports: is a link"):
        build(tmp_path)
    assert contents(precious.parent) == {"work.tmp": "precious"}


def test_a_link_instead_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus" / BUILDING_NAME).mkdir(parents=True)
    (tmp_path / "corpus" / BUILDING_NAME / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(ConfigError, match="is not a lock file"):
        build(tmp_path)
    assert not (tmp_path / "made").exists()


def test_other_users_cannot_hold_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / BUILDING_NAME / "lock"
    lock.parent.mkdir()
    lock.touch(mode=0o644)  # as by earlier versions
    with build_lock(tmp_path):
        assert lock.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("domain", ["../../x", "/x", "a/b"])
def test_a_domain_whose_files_would_be_elsewhere_is_refused(domain: str, tmp_path: Path) -> None:
    for file in (report_file, keys_file):
        with pytest.raises(DataError, match="is not a plain name"):
            file(tmp_path, domain)


def test_fifos_are_refused(tmp_path: Path) -> None:
    (tmp_path / BUILDING_NAME).mkdir()
    os.mkfifo(tmp_path / BUILDING_NAME / "PUBLISHING.json")
    with pytest.raises(DataError, match=r"PUBLISHING\.json: is not a file of a build"):
        BuildingFolder(tmp_path).recover(Manifest(1, ()))
    (tmp_path / "reports").mkdir()
    os.mkfifo(report_file(tmp_path, "en"))
    with pytest.raises(DataError, match=r"en\.json: not readable"):
        read_report(tmp_path, "en")
