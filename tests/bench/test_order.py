"""`z2all bench order` on a small corpus."""

import json
from pathlib import Path

import pytest

from tests.helpers.command import one_line, z2all
from z2all_ds.base.errors import ConfigError


def test_the_share_of_unread_tokens_is_reported(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    options = ("--epochs", "1", "--epochs", "3", "--length", "32", "--lanes", "4")
    done = z2all("bench", "order", small_corpus, "--tokenizer", small_tokenizer, *options, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {(one["domain"], one["packing"], one["epochs"]): one for one in report["rows"]}
    assert {key[1:] for key in rows} == {(packing, n) for packing in ("cut", "best_fit") for n in (1, 3)}
    assert {key[0] for key in rows} == report["corpus"].keys()
    for one in rows.values():
        tokens = report["corpus"][one["domain"]]["tokens"]
        assert one["order"] == "tokens"
        assert 0 <= one["unread"] <= 4 * 32 * 2 / tokens  # two samples per lane
        assert one["padding"] == 0 if one["packing"] == "cut" else one["padding"] < 0.2


@pytest.mark.parametrize(
    "options", [("--packing", "tight"), ("--epochs", "0"), ("--lanes", "0"), ("--epochs", "99999999999999999999")]
)
def test_invalid_options_are_refused(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, options: tuple[str, str]
) -> None:
    answer = z2all("bench", "order", small_corpus, "--tokenizer", small_tokenizer, *options, cwd=tmp_path)
    assert options[1] in one_line(answer, ConfigError.exit_code)
