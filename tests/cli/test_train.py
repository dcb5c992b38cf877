"""`z2all train`, which trains unless the name of a subcommand follows."""

from pathlib import Path

from tests.helpers.command import one_line, z2all


def test_help_of_train_and_of_its_subcommand(tmp_path: Path) -> None:
    train, parity = z2all("train", "--help", cwd=tmp_path), z2all("train", "parity", "--help", cwd=tmp_path)
    assert (train.returncode, parity.returncode) == (0, 0)
    assert "train [OPTIONS] [overrides]..." in train.stdout and "--resume" in train.stdout
    assert "z2all train parity --help" in train.stdout
    assert "train parity [OPTIONS] [overrides]..." in parity.stdout and "--stages" in parity.stdout


def test_a_word_that_is_not_a_subcommand_is_read_as_an_override(tmp_path: Path) -> None:
    for word in ("parities", "run"):
        line = one_line(z2all("train", word, cwd=tmp_path), 2)
        assert line.startswith(f"ConfigError: override '{word}': must be section.key=value.")
    assert one_line(z2all("train", cwd=tmp_path), 2).startswith("ConfigError: data.corpus: is not set.")
    line = one_line(z2all("train", "parity", "--stages", "4", cwd=tmp_path), 2)
    assert line == "ConfigError: --stages 4: '4' is not a ZeRO stage. Use some of 0,1,2,3."
