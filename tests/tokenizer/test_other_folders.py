"""Tokenizers of other models, used as they are."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.tokenizer.test_folder import open_plain
from tests.tokenizer.test_spm_model import other_model
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.model import Z2allConfig
from z2all_ds.tokenizer import import_tokenizer, load_tokenizer

TEXT = "Hello, wörld! 今天 def f(x):\n    return x"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder like those of Llama: begin and end of text in the vocabulary, no padding, a begin put before texts."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 20, trainer)
    backend.add_special_tokens(["<|eot|>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_of_another_model_is_a_tokenizer_as_it_is(theirs: Path) -> None:
    ours, plain = load_tokenizer(theirs), Tokenizer.from_file(str(theirs / "tokenizer.json"))
    plain.no_truncation()
    assert ours.encode(TEXT) == plain.encode(TEXT, add_special_tokens=False).ids
    assert ours.size == plain.get_vocab_size()
    assert (ours.eot_id, ours.pad_id) == (2, 2)
    assert ours.begins_texts
    assert ours.model_token_ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    section = load_run_config(None, ["model.vocab_size=auto", f"data.tokenizer={theirs}"]).model
    config = Z2allConfig.from_section(section, **ours.model_token_ids)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)


def test_another_end_of_documents_is_another_fingerprint(theirs: Path) -> None:
    before = load_tokenizer(theirs).fingerprint
    (theirs / "tokenizer_config.json").write_text('{"eos_token": "<|eot|>"}')
    assert load_tokenizer(theirs).fingerprint != before


def test_a_tokenizer_without_an_end_of_text_is_refused_with_its_tokens(theirs: Path, tmp_path: Path) -> None:
    renamed = (theirs / "tokenizer.json").read_text("utf-8").replace("</s>", "<stop>")
    (tmp_path / "tokenizer.json").write_text(renamed, "utf-8")
    with pytest.raises(DataError, match=r"no end-of-text token .* of <unk>, <s>, <stop>, <\|eot\|> tokens.*--eos NAME"):
        load_tokenizer(tmp_path)
    import_tokenizer(tmp_path / "tokenizer.json", tmp_path / "out", eos="<stop>")
    assert load_tokenizer(tmp_path / "out").eot_id == 2


def test_an_import_as_it_is_changes_only_the_end_of_documents(theirs: Path, tmp_path: Path) -> None:
    report = import_tokenizer(theirs, tmp_path / "out", eos="<|eot|>")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    assert report.size == report.text_vocab_size == load_tokenizer(theirs).size
    plain = open_plain(tmp_path / "out")
    assert (plain.bos_token, plain.eos_token, plain.chat_template) == ("<s>", "<|eot|>", "{{ messages }}")
    assert load_tokenizer(tmp_path / "out").eot_id == plain.eos_token_id
    assert import_tokenizer(theirs, tmp_path / "out", eos="<|eot|>") == report
    with pytest.raises(ConfigError, match="the tokenizer has no such token"):
        import_tokenizer(theirs, tmp_path / "other", eos="<none>")
    with pytest.raises(ConfigError, match="no tokens are added"):
        import_tokenizer(theirs, tmp_path / "other", as_is=True, special_start=500)


def test_a_sentencepiece_model_is_imported_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(other_model())
    report = import_tokenizer(tmp_path / "x.model", tmp_path / "out", as_is=True)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert report.size == tokenizer.size == report.text_vocab_size
    assert tokenizer.eot_id == tokenizer.special_id("</s>") == open_plain(tmp_path / "out").eos_token_id


def test_the_vocabulary_size_comes_from_the_tokenizer(theirs: Path, tmp_path: Path) -> None:
    overrides = ["model.vocab_size=auto", f"data.tokenizer={theirs}"]
    size = load_tokenizer(theirs).size
    assert load_run_config(None, overrides).model.vocab_size == -(-size // 64) * 64
    for rows, expected in ((size + 1, size + 1), (size - 1, -(-size // 64) * 64)):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows}))
        run = load_run_config(None, [*overrides, f"train.init_from={tmp_path}"])
        assert run.model.vocab_size == expected
    with pytest.raises(ConfigError, match=r"model\.vocab_size=auto: needs a tokenizer"):
        load_run_config(None, overrides[:1])
    with pytest.raises(ConfigError, match="its ids cannot be counted"):
        load_run_config(None, ["model.vocab_size=auto", f"data.tokenizer={tmp_path}"])
