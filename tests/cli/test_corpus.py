"""`z2all corpus`, and commands that read a corpus, as users type them."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.command import one_line, z2all
from z2all_ds.corpus import parse_record
from z2all_ds.tokenizer import load_tokenizer

RAW = Path(__file__).parents[1] / "assets" / "raw"
PLUGIN = '''
from z2all_ds.corpus.converters import source
from z2all_ds.corpus.draft import Draft


@source("my_forum", form="jsonl")
def my_forum(row):
    """Threads of my forum."""
    return Draft(row.pop("subject"), row.pop("body"), others=row)
'''


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Return a small JSON-lines file."""
    path = tmp_path / "raw 文本.jsonl"
    lines = [
        {"text": f"第{number}篇。 A document of some words, number {number}.", "n": number} for number in range(60)
    ]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_corpus_is_built_and_audited_and_a_tokenizer_is_trained_on_it(raw: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    answer = z2all("corpus", "build", f"notes=jsonl:{raw}", "--out", corpus, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    manifest = json.loads((corpus / "MANIFEST.json").read_text())
    (shard,) = manifest["shards"]
    size = (corpus / shard["path"]).stat().st_size
    assert answer.stdout == f"notes: 60 documents, {size / 1024:.1f} KiB\n"
    assert "corpus notes: " in answer.stderr

    answer = z2all("corpus", "audit", corpus, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, f"{corpus}: 60 documents in 1 shards, no problems found\n")

    answer = z2all("tokenizer", "train", corpus, "--out", tmp_path / "tok", "--vocab-size", "300", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    first, second = answer.stdout.splitlines()[:2]
    assert first == f"{tmp_path / 'tok'}: 312 ids"
    assert second.startswith("notes: ")
    assert "bytes per token" in second
    tokenizer = load_tokenizer(tmp_path / "tok")
    assert tokenizer.size == 312
    assert tokenizer.decode(tokenizer.encode("第7篇。 words")) == "第7篇。 words"

    answer = z2all("corpus", "stats", corpus, "--tokenizer", tmp_path / "tok", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert '"documents": 60' in answer.stdout

    content = bytearray((corpus / shard["path"]).read_bytes())
    content[content.index("第".encode())] ^= 1
    (corpus / shard["path"]).write_bytes(content)
    answer = z2all("corpus", "audit", corpus, cwd=tmp_path)
    assert answer.returncode == 3
    assert shard["path"] in answer.stdout
    assert answer.stderr.splitlines()[-1].startswith(f"DataError: corpus {corpus}: ")
    assert "Traceback" not in answer.stderr


def test_a_corpus_is_converted_cleaned_sampled_and_split(tmp_path: Path) -> None:
    corpus = tmp_path / "语料"
    for source, file in (("baike2018qa", "baike_qa.json"), ("wikipedia_cn", "wiki_00")):
        shutil.copy(RAW / file, tmp_path / file)
        with open(tmp_path / file, "ab") as stream:
            stream.write(b"{broken\n")
        arguments = ("corpus", "convert", source, tmp_path / file, "--out", corpus, "--clean", "control_characters")
        answer = z2all(*arguments, cwd=tmp_path)
        assert answer.returncode == 3
        last = answer.stderr.splitlines()[-1]
        assert last.startswith(f"DataError: {tmp_path / file}:")
        assert "not JSON" in last
        answer = z2all(*arguments, "--on-error", "skip", "--max-bad-share", "0.5", cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        assert f"  1 x not JSON, e.g. {tmp_path / file}:" in answer.stdout
        assert "  control_characters: " in answer.stdout

    answer = z2all("corpus", "report", corpus, "--json", cwd=tmp_path)
    assert list(json.loads(answer.stdout)) == ["baike2018qa", "wikipedia_cn"]
    answer = z2all("corpus", "report", corpus, cwd=tmp_path)
    assert f"    json: {tmp_path / 'baike_qa.json'}:" in answer.stdout

    answer = z2all("corpus", "sample", corpus, "--domain", "baike2018qa", "-n", "2", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    first = parse_record((corpus / "baike2018qa-00000.jsonl").read_bytes().splitlines()[0], "x")
    answer = z2all("corpus", "sample", corpus, "--gid", "0", cwd=tmp_path)
    assert first.content.splitlines()[0] in answer.stdout

    answer = z2all("corpus", "stats", corpus, "--plot", tmp_path / "长.png", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "wikipedia_cn" in answer.stdout
    with Image.open(tmp_path / "长.png") as picture:
        picture.load()
        assert picture.width > 300

    answer = z2all("corpus", "split", corpus, "--out", tmp_path / "split", "--share", "0.3", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    for side in ("train", "validation"):
        assert z2all("corpus", "audit", tmp_path / "split" / side, cwd=tmp_path).returncode == 0


def test_a_plugin_file_adds_a_converter(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "a.jsonl").write_text('{"subject": "s", "body": "b", "likes": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"subject": "t", "body": "c", "likes": 4}\n')
    answer = z2all("corpus", "sources", "--plugin", "mine.py", cwd=tmp_path)
    assert "my_forum             Threads of my forum." in answer.stdout
    arguments = ("a.jsonl", "b.jsonl", "--out", "c", "--plugin", "mine.py", "--workers", "2")
    answer = z2all("corpus", "convert", "my_forum", *arguments, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    first, second = (tmp_path / "c" / "my_forum-00000.jsonl").read_bytes().splitlines()
    assert parse_record(first, "x").others == {"likes": 3}
    assert parse_record(second, "x").title == "t"


def test_sources_are_listed(tmp_path: Path) -> None:
    answer = z2all("corpus", "sources", cwd=tmp_path)
    assert answer.returncode == 0
    names = [line.split()[0] for line in answer.stdout.splitlines()]
    assert names == sorted(names)
    known = {"baike2018qa", "news2016zh", "webtext2019zh", "wikipedia_cn", "zhihu_kol", "wudao", "wikipedia_en"}
    assert known | {"github_python", "generic", "jsonl", "text", "python_code"} <= set(names)
    assert all(len(line.split()) > 3 for line in answer.stdout.splitlines())


@pytest.mark.parametrize(
    ("source", "code", "start"),
    [
        (
            "notes",
            2,
            "ConfigError: source 'notes': must have the form DOMAIN=CONVERTER[:PATH,...]. E.g. code=python_code.",
        ),
        ("notes=", 2, "ConfigError: source 'notes=': must have the form DOMAIN=CONVERTER"),
        ("notes=jsonlines:x", 2, "ConfigError: converter 'jsonlines': must be one of "),
        ("a/b=jsonl:x", 2, "ConfigError: domain 'a/b': "),
        ("notes=jsonl:missing.jsonl", 3, "DataError: missing.jsonl: does not exist."),
    ],
)
def test_invalid_sources_are_refused(source: str, code: int, start: str, tmp_path: Path) -> None:
    answer = z2all("corpus", "build", source, "--out", tmp_path / "corpus", cwd=tmp_path)
    assert one_line(answer, code).startswith(start)
    assert list(tmp_path.iterdir()) == []


def test_build_composes_the_content(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"title": "T", "text": "words"}\n')
    answer = z2all("corpus", "build", "x=jsonl:x.jsonl", "--out", "c", "--compose", r"{title}\n{content}", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert '"content":"T\\nwords"' in (tmp_path / "c/x-00000.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--clean", "near_dups"], "ConfigError: "),
        (["--fields", "contents=x"], "ConfigError: "),
        (["--form", "xml"], "ConfigError: form 'xml' of domain generic: the forms are "),
        (["--on-error", "ignore"], "ConfigError: --on-error ignore: must be stop or skip."),
        (["--compose", "{titel}"], "ConfigError: template '{titel}': there is no field 'titel'."),
        (["--workers", "0"], "ConfigError: workers 0: must be at least 1."),
    ],
)
def test_invalid_settings_are_refused(arguments: list[str], start: str, raw: Path, tmp_path: Path) -> None:
    answer = z2all("corpus", "convert", "generic", raw, "--out", "c", *arguments, cwd=tmp_path)
    assert one_line(answer, 2).startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [raw.name]


@pytest.mark.parametrize("verb", [["corpus", "audit", "nowhere"], ["tokenizer", "train", "nowhere", "--out", "tok"]])
def test_a_missing_corpus_is_refused(verb: list[str], tmp_path: Path) -> None:
    assert one_line(z2all(*verb, cwd=tmp_path), 3).startswith("DataError: nowhere")
    assert list(tmp_path.iterdir()) == []
