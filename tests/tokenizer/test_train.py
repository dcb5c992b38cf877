import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.corpora import SMALL_TEXT_VOCAB, train_small_tokenizer
from tests.helpers.processes import ended
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus import load_manifest, parse_record
from z2all_ds.tokenizer import folder as folder_module
from z2all_ds.tokenizer import load_tokenizer, train_tokenizer


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_training_report_matches_the_tokenizer(small_corpus: Path, small_tokenizer: Path) -> None:
    report = train_small_tokenizer(small_corpus, small_tokenizer)  # the folder exists, so nothing is trained
    assert (report.text_vocab_size, report.size) == (SMALL_TEXT_VOCAB, SMALL_TEXT_VOCAB + 12)
    assert report.folder == small_tokenizer
    manifest = load_manifest(small_corpus)
    texts: dict[str, list[str]] = {domain: [] for domain in manifest.domains}
    for shard in manifest.shards:
        for line in (small_corpus / shard.path).read_bytes().splitlines(keepends=True):
            texts[shard.domain].append(parse_record(line, "x").content)
    tokenizer = load_tokenizer(small_tokenizer)
    assert report.trained_bytes == sum(len(text.encode()) for some in texts.values() for text in some)
    assert report.fingerprint == tokenizer.fingerprint
    assert list(report.bytes_per_token) == ["code", "en", "zh"]
    for domain in ("en", "zh"):  # smaller than the sample, so all of it is measured
        tokens = sum(map(len, tokenizer.encode_batch(texts[domain])))
        size = sum(len(text.encode()) for text in texts[domain])
        assert report.bytes_per_token[domain] == round(size / tokens, 4)
        assert report.bytes_per_token[domain] > 1.5


def test_the_same_corpus_gives_the_same_files(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    """Holds in a new process with a different hash seed and the opposite parallelism setting."""
    parallel = "true" if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else "false"
    code = (
        "import sys; from pathlib import Path; from tests.helpers.corpora import train_small_tokenizer; "
        "train_small_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    arguments = [sys.executable, "-c", code, str(small_corpus), str(tmp_path / "t")]
    subprocess.run(arguments, check=True, capture_output=True, env={**os.environ, "TOKENIZERS_PARALLELISM": parallel})
    assert files(tmp_path / "t") == files(small_tokenizer)


def test_a_folder_with_the_earlier_split_is_kept(small_corpus: Path, tmp_path: Path) -> None:
    report = train_tokenizer(small_corpus, tmp_path / "t", 300, 60_000, split="four_characters")
    assert '"split"' not in (tmp_path / "t" / "training.json").read_text("utf-8")  # as before there was a choice
    assert train_tokenizer(small_corpus, tmp_path / "t", 300, 60_000) == report
    with pytest.raises(ConfigError, match="something else"):
        train_tokenizer(small_corpus, tmp_path / "t", 300, 60_000, split="by_script")
    with pytest.raises(ConfigError, match=r"split 'x': must be one of by_script, four_characters, llama3"):
        train_tokenizer(small_corpus, tmp_path / "new", 300, split="x")


def test_an_error_for_too_little_text_gives_the_largest_possible_vocabulary(small_corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only enough repeated text for") as caught:
        train_tokenizer(small_corpus, tmp_path / "t", 60_000, max_bytes=60_000)
    assert not (tmp_path / "t").exists()
    reachable = int(caught.value.rule.rsplit(" ", 1)[1])
    assert 256 < reachable < 60_000
    assert train_tokenizer(small_corpus, tmp_path / "t", reachable, max_bytes=60_000).size == reachable + 12


def test_the_smallest_vocabulary_consists_of_the_256_bytes(small_corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 256"):
        train_tokenizer(small_corpus, tmp_path / "t", 255)
    with pytest.raises(ConfigError, match="must be positive"):
        train_tokenizer(small_corpus, tmp_path / "t", 256, max_bytes=0)
    train_tokenizer(small_corpus, tmp_path / "t", 256, max_bytes=10_000)
    tokenizer = load_tokenizer(tmp_path / "t")
    assert (tokenizer.size, tokenizer.eot_id) == (268, 257)
    assert len(tokenizer.encode("字")) == 3


def test_a_folder_with_other_contents_is_refused_and_not_changed(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "t")
    with pytest.raises(ConfigError, match="something else"):
        train_tokenizer(small_corpus, tmp_path / "t", SMALL_TEXT_VOCAB + 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(ConfigError, match="something else"):
        train_tokenizer(small_corpus, tmp_path / "mine", SMALL_TEXT_VOCAB)
    assert files(tmp_path / "t") == files(small_tokenizer)
    assert files(tmp_path / "mine") == {"notes": b"keep"}


def test_an_interrupt_while_writing_leaves_no_files(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.tmp").mkdir()
    (tmp_path / "t.tmp" / "notes").write_text("of the user")

    def die(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "force_to_disk", die)
        with pytest.raises(KeyboardInterrupt):
            train_tokenizer(small_corpus, tmp_path / "t", 300, max_bytes=50_000)
    assert [path.name for path in tmp_path.iterdir()] == ["t.tmp"]
    train_tokenizer(small_corpus, tmp_path / "t", 300, max_bytes=50_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t.tmp"]
    assert (tmp_path / "t.tmp" / "notes").read_text() == "of the user"


def test_a_shard_with_other_text_of_the_same_size_is_refused(small_corpus: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(small_corpus, tmp_path / "corpus")
    shard = corpus / next(shard.path for shard in load_manifest(corpus).shards if shard.domain == "en")
    shard.write_bytes(shard.read_bytes().replace(b"the ", b"THE "))
    with pytest.raises(DataError, match=rf"{shard.name}: its SHA-256 differs from the manifest"):
        train_tokenizer(corpus, tmp_path / "t", 300, 60_000)
    assert not (tmp_path / "t").exists()
    train_tokenizer(corpus, tmp_path / "t", 300, 60_000, weights={"zh": 1.0})  # which does not read the shard


def test_training_on_text_files_with_domain_weights(tmp_path: Path) -> None:
    (tmp_path / "en.txt").write_text("the cat sat on the mat\n" * 3000, "utf-8")
    (tmp_path / "zh.jsonl").write_text('{"text": "今天下雨，出门要带伞。"}\n' * 3000, "utf-8")
    inputs: list[str | Path] = [tmp_path / "en.txt", f"chinese={tmp_path / 'zh.jsonl'}"]
    only_english = train_tokenizer(inputs, tmp_path / "a", 268, weights={"en": 1.0})
    assert list(only_english.bytes_per_token) == ["en"]
    assert len(load_tokenizer(tmp_path / "a").encode("雨")) == 3
    both = train_tokenizer(inputs, tmp_path / "b", 268, 60_000, weights={"en": 1, "chinese": 3})
    assert both.bytes_per_token.keys() == {"en", "chinese"}
    assert train_tokenizer(inputs, tmp_path / "b", 268, 60_000, weights={"en": 1, "chinese": 3}) == both
    with pytest.raises(ConfigError, match="something else"):
        train_tokenizer(inputs, tmp_path / "b", 268, 60_000)
    with pytest.raises(ConfigError, match="Did you mean 'chinese'"):
        train_tokenizer(inputs, tmp_path / "c", 268, weights={"chines": 1.0})
    with pytest.raises(ConfigError, match="algorithm 'wordpiece': must be one of bbpe, spm"):
        train_tokenizer(inputs, tmp_path / "c", 268, algorithm="wordpiece")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("algorithm", ["bbpe", "spm"])
def test_training_refuses_text_that_is_invalid_or_blank(tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "bad.txt").write_bytes(b"fine\n" * 100_000 + b"\xff\n")
    with pytest.raises(DataError, match=r"bad\.txt: not UTF-8"):
        train_tokenizer(tmp_path / "bad.txt", tmp_path / "t", 300, algorithm=algorithm)
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n{"text": "  "}\n')
    with pytest.raises(DataError, match="no text found"):
        train_tokenizer(tmp_path / "blank.jsonl", tmp_path / "t", 300, algorithm=algorithm)
    assert not list(tmp_path.glob("t*"))


@pytest.mark.parametrize("algorithm", ["bbpe", "spm"])
def test_ctrl_c_stops_the_merging_and_leaves_no_files(tmp_path: Path, algorithm: str) -> None:
    """Holds while the library merges in native code, where Python cannot handle the signal."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 12))) for _ in range(100_000)]
    (tmp_path / "words.txt").write_text("\n".join(" ".join(words[at : at + 10]) for at in range(0, 100_000, 10)))
    code = (
        "import sys; from z2all_ds.tokenizer import train_tokenizer; "
        "train_tokenizer(sys.argv[1], sys.argv[2], 20_000, algorithm=sys.argv[3])"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "words.txt"), str(tmp_path / "t"), algorithm]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    with ended(process):
        for line in process.stderr:
            if line.startswith(("counting", "merging")):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.wait(timeout=300)
        process.stderr.close()
    assert process.returncode == -signal.SIGINT
    assert rest.rstrip().endswith("KeyboardInterrupt")
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]
