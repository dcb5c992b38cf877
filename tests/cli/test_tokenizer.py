"""`z2all tokenizer` and `z2all bench tokenizer`, as users type them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.helpers.command import one_line, z2all
from z2all_ds.cli import app
from z2all_ds.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two domains: a text file and a JSON-lines file."""
    folder = tmp_path_factory.mktemp("texts")
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "the",
        "lazy",
        "dog",
        "while",
        "the",
        "other",
        "fox",
        "sleeps",
    ]
    lines = [" ".join(words[(n * k) % len(words)] for k in range(1, 12)) for n in range(400)]
    (folder / "en.txt").write_text("\n".join(lines), "utf-8")
    signs = "今天的天气真不错我们出去走走吧河边有很多人在钓鱼"
    rows = [{"text": "".join(signs[(n * k) % len(signs)] for k in range(1, 30))} for n in range(400)]
    (folder / "zh.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return folder


def test_a_sentencepiece_tokenizer_is_trained_imported_and_reported(texts: Path, tmp_path: Path) -> None:
    inputs = (f"zh={texts / 'zh.jsonl'}", f"en={texts / 'en.txt'}")
    settings = ("--algorithm", "spm", "--vocab-size", "330", "--weights", "zh=0.6,en=0.4")
    answer = z2all("tokenizer", "train", *inputs, "--out", "spm", *settings, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    first, *domains, last = answer.stdout.splitlines()
    assert first == "spm: 342 ids"
    assert [line.split(":")[0] for line in domains] == ["en", "zh"]
    assert last == "for a model with this tokenizer: model.vocab_size=auto"

    arguments = ("--special-start", "400", "--special", "<|PAD|>=500", "--strict")
    answer = z2all("tokenizer", "import", "spm/sentencepiece.model", "--out", "imported", *arguments, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "500 <|PAD|>" in answer.stdout
    assert "400 <|beginoftext|>" in answer.stdout
    own, imported = load_tokenizer(tmp_path / "spm"), load_tokenizer(tmp_path / "imported")
    assert own.encode("今天 the fox") == imported.encode("今天 the fox")

    answer = z2all("tokenizer", "report", "spm", "imported", "--corpus", inputs[0], "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert [one["folder"] for one in figures] == ["spm", "imported"]
    assert figures[0]["domains"] == figures[1]["domains"]
    answer = z2all("tokenizer", "report", "spm", "--corpus", inputs[0], cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "zh" in answer.stdout


def test_names_in_reports_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(
        folder="out", size=9, text_vocab_size=8, bytes_per_token={"a\x1b[2J": 1.0}, special_ids={"<\x1b[2J>": 8}
    )
    split = SimpleNamespace(train={"a\x1b[2J": (1, 2)}, validation={}, warnings=[])
    adopted = SimpleNamespace(domains={"a\x1b[2J": (1, 2)}, shards=[])
    monkeypatch.setattr("z2all_ds.tokenizer.train_tokenizer", lambda *_, **__: report)
    monkeypatch.setattr("z2all_ds.tokenizer.import_tokenizer", lambda *_, **__: report)
    monkeypatch.setattr("z2all_ds.corpus.split.split_corpus", lambda *_: split)
    monkeypatch.setattr("z2all_ds.corpus.adopt.adopt_corpus", lambda *_, **__: adopted)
    for verb in ("tokenizer train", "tokenizer import", "corpus split", "corpus adopt"):
        done = CliRunner().invoke(app, [*verb.split(), "in", *(["--out", "out"] if verb != "corpus adopt" else [])])
        assert done.exit_code == 0 and "\x1b" not in done.output and "\\x1b[2J" in done.output, (verb, done.output)


def test_bench_measures_the_default_trainers(texts: Path, tmp_path: Path) -> None:
    arguments = (str(texts / "en.txt"), "--bytes", "20000", "--vocab-size", "280", "--json")
    answer = z2all("bench", "tokenizer", *arguments, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    costs = json.loads(answer.stdout)
    assert [one["trainer"] for one in costs["trainers"]] == ["bbpe", "hf_default"]
    for one in costs["trainers"]:
        assert one["failed"] == ""
        assert one["seconds"] > 0 < one["peak_memory_bytes"]


@pytest.mark.parametrize(
    ("arguments", "code", "start"),
    [
        (["train", "nowhere.txt", "--out", "t"], 3, "DataError: "),
        (["train", "EN", "--out", "t", "--algorithm", "wordpiece"], 2, "ConfigError: algorithm 'wordpiece': "),
        (["train", "EN", "--out", "t", "--weights", "fr=1"], 2, "ConfigError: weight of 'fr': no such domain"),
        (["train", "EN", "--out", "t", "--weights", "en"], 2, "ConfigError: weights 'en': "),
        (["train", "EN", "--out", "t", "--vocab-size", "100"], 2, "ConfigError: vocabulary size 100: "),
        (["train", "EN", "--out", "t", "--vocab-size", "9" * 20], 2, f"ConfigError: vocabulary size {'9' * 20}: "),
        (["import", "EN", "--out", "t"], 3, "DataError: "),
        (["import", "EN", "--out", "t", "--special", "PAD"], 2, "ConfigError: special 'PAD': not NAME=ID."),
    ],
)
def test_invalid_arguments_are_refused_with_one_line(
    texts: Path, tmp_path: Path, arguments: list[str], code: int, start: str
) -> None:
    given = [str(texts / "en.txt") if one == "EN" else one for one in arguments]
    assert one_line(z2all("tokenizer", *given, cwd=tmp_path), code).startswith(start)
    assert list(tmp_path.iterdir()) == []
