"""What the quickstart shows of its model at the end."""

from pathlib import Path

import pytest
import torch

from tests.helpers.memorised import untrained
from z2all_ds.evaluate import loading
from z2all_ds.quickstart.walk import CONTINUED, EXPECTED_AFTER, learned_lines


def test_text_of_the_model_is_shown_next_to_text_of_the_untrained_one(
    small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = untrained(small_tokenizer)
    torch.nn.init.constant_(model.model.lm_head.weight, 0.0)  # it repeats the first tokens
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: model)
    lines = list(learned_lines(Path("model")))
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        *["learned"] * len(EXPECTED_AFTER),
        *["before training", "after training"] * len(CONTINUED),
    ]
    for prompt, before, after in zip(CONTINUED, lines[3::2], lines[4::2], strict=False):
        assert before.startswith(f"before training: {prompt!r} -> ")
        assert after.startswith(f"after training: {prompt!r} -> ")
        assert before.partition("->")[2] != after.partition("->")[2]
