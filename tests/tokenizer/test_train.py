import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from tests.helpers.corpora import SMALL_TEXT_VOCAB, train_small_tokenizer
from z2all_ds.corpus import load_manifest, parse_record
from z2all_ds.errors import ConfigError, DataError
from z2all_ds.tokenizer import load_tokenizer, train_tokenizer
from z2all_ds.tokenizer import train as train_module
from z2all_ds.tokenizer.train import PRE_SPLIT


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def split(text: str) -> list[str]:
    cut = pre_tokenizers.Split(Regex(PRE_SPLIT), behavior="isolated")
    return [piece for piece, _ in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("今天的天气真不错，我们出去走走", ["今天的天", "气真不错", "，", "我们出去", "走走"]),
        ("in 20241231 or 3.14", ["in", " ", "202", "412", "31", " or", " ", "3", ".", "14"]),
        ("def f_x(a):\n        return a", ["def", " f", "_x", "(a", "):\n", "       ", " return", " a"]),
        ("a  \n\n\tb", ["a", "  \n\n", "\tb"]),
        ("<|endoftext|>", ["<|", "endoftext", "|>"]),
        ("x" * 30, ["x" * 24, "x" * 6]),
        ("用Python写", ["用", "Python", "写"]),
        ("東京タワーへ", ["東京タワ", "ー", "へ"]),
    ],
)
def test_pre_split(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


def test_report(small_corpus: Path, small_tokenizer: Path) -> None:
    report = train_small_tokenizer(small_corpus, small_tokenizer)  # returned at once: it is there
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
    for domain in ("en", "zh"):  # smaller than the sample, so measured whole
        tokens = sum(map(len, tokenizer.encode_batch(texts[domain])))
        size = sum(len(text.encode()) for text in texts[domain])
        assert report.bytes_per_token[domain] == round(size / tokens, 4)
        assert report.bytes_per_token[domain] > 1.5


def test_same_corpus_same_files(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    """In a fresh process, as hash seeds differ from one to the next, and with the other kind of parallelism."""
    parallel = "true" if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else "false"
    code = (
        "import sys; from pathlib import Path; from tests.helpers.corpora import train_small_tokenizer; "
        "train_small_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    arguments = [sys.executable, "-c", code, str(small_corpus), str(tmp_path / "t")]
    subprocess.run(arguments, check=True, capture_output=True, env={**os.environ, "TOKENIZERS_PARALLELISM": parallel})
    assert files(tmp_path / "t") == files(small_tokenizer)


def test_too_little_text_names_the_reachable_number(small_corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only enough repeated text for") as caught:
        train_tokenizer(small_corpus, tmp_path / "t", 60_000, max_bytes=60_000)
    assert not (tmp_path / "t").exists()
    reachable = int(caught.value.rule.rsplit(" ", 1)[1])
    assert 256 < reachable < 60_000
    assert train_tokenizer(small_corpus, tmp_path / "t", reachable, max_bytes=60_000).size == reachable + 12


def test_the_smallest_vocabulary_is_the_bytes(small_corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 256"):
        train_tokenizer(small_corpus, tmp_path / "t", 255)
    with pytest.raises(ConfigError, match="must be positive"):
        train_tokenizer(small_corpus, tmp_path / "t", 256, max_bytes=0)
    train_tokenizer(small_corpus, tmp_path / "t", 256, max_bytes=10_000)
    tokenizer = load_tokenizer(tmp_path / "t")
    assert (tokenizer.size, tokenizer.eot_id) == (268, 257)
    assert len(tokenizer.encode("字")) == 3


def test_other_folders_are_left_alone(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "t")
    with pytest.raises(ConfigError, match="something else"):
        train_tokenizer(small_corpus, tmp_path / "t", SMALL_TEXT_VOCAB + 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(ConfigError, match="something else"):
        train_tokenizer(small_corpus, tmp_path / "mine", SMALL_TEXT_VOCAB)
    assert files(tmp_path / "t") == files(small_tokenizer)
    assert files(tmp_path / "mine") == {"notes": b"keep"}


def test_a_death_while_writing_leaves_nothing(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.tmp").mkdir()
    (tmp_path / "t.tmp" / "old").write_text("of a killed training")

    def die(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "force_to_disk", die)
        with pytest.raises(KeyboardInterrupt):
            train_tokenizer(small_corpus, tmp_path / "t", 300, max_bytes=50_000)
    assert list(tmp_path.iterdir()) == []
    train_tokenizer(small_corpus, tmp_path / "t", 300, max_bytes=50_000)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.fixture(scope="module")
def hugging_face(small_tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(small_tokenizer))


def real_texts(corpus: Path) -> list[str]:
    texts = []
    for shard in load_manifest(corpus).shards:
        with open(corpus / shard.path, "rb") as stream:
            texts += [parse_record(line, "x").content[:4000] for line, _ in zip(stream, range(12), strict=False)]
    return texts


def test_auto_tokenizer_gives_our_ids_on_real_text(
    hugging_face: Any, small_tokenizer: Path, small_corpus: Path
) -> None:
    ours = load_tokenizer(small_tokenizer)
    texts = real_texts(small_corpus)
    assert len(texts) > 40
    assert hugging_face(texts)["input_ids"] == ours.encode_batch(texts)
    assert [hugging_face.decode(ids) for ids in ours.encode_batch(texts)] == texts
    assert len(hugging_face) == ours.size


def test_auto_tokenizer_parses_control_text_unless_told(hugging_face: Any, small_tokenizer: Path) -> None:
    """What holds outside: AutoTokenizer reads control tokens by default, as chat templates need; ours never does."""
    ours = load_tokenizer(small_tokenizer)
    text = "a<|endoftext|>b"
    assert hugging_face.encode(text) == [*ours.encode("a"), ours.eot_id, *ours.encode("b")]
    assert hugging_face.encode(text, split_special_tokens=True) == ours.encode(text)
    assert ours.eot_id not in ours.encode(text)


def test_auto_tokenizer_roles_and_chat(hugging_face: Any) -> None:
    names = (hugging_face.bos_token, hugging_face.eos_token, hugging_face.pad_token, hugging_face.unk_token)
    assert names == ("<|beginoftext|>", "<|endoftext|>", "<|PAD|>", "<|UNK|>")
    messages = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "Hi"}]
    chat = hugging_face.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = hugging_face.encode(chat)
    assert ids.count(hugging_face.convert_tokens_to_ids("<|im_start|>")) == 3
    assert hugging_face.decode(ids, skip_special_tokens=True) == "user\n你好\nassistant\nHi\nassistant\n"


def test_beside_a_llama_model_it_stays_the_same(
    hugging_face: Any, small_tokenizer: Path, small_corpus: Path, tmp_path: Path
) -> None:
    """An exported model folder has a config.json of type llama; it must not bring in Llama's way of splitting."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(small_tokenizer, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    texts = real_texts(small_corpus)
    assert AutoTokenizer.from_pretrained(str(folder))(texts)["input_ids"] == hugging_face(texts)["input_ids"]
