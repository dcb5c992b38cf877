"""Tests for the model card: it contains the figures that the run folder has, and leaves out the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import STEP, checkpoint_of, write_run
from tests.helpers.models import TINY
from z2all_ds.base.config import load_run_config
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.layout import open_checkpoint
from z2all_ds.export.model_card import model_card
from z2all_ds.export.verify import LAYERWISE, WHOLE, Verdict
from z2all_ds.track.writer import RunWriter

BEGAN = 1_700_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "run", TINY, tmp_path, tmp_path)


def record(step: int, **figures: Any) -> dict[str, Any]:
    common = {"loss": 7.0 - step / 10, "step_seconds": 1.0, "time_unix": BEGAN + 10 + step, "step_taken": True}
    return {"step": step, **common, "tokens_per_second": 1000.0 * step, "mfu": 0.4, **figures}


def card(run: RunFolder, how: str = WHOLE, model_format: str = "llama", **generated: str) -> str:
    config, checkpoint = load_run_config(str(run.config)), open_checkpoint(checkpoint_of(run))
    return model_card(config, run, checkpoint, "bf16", model_format, 88_736, Verdict(2e-7, 192, generated, how))


def test_a_run_without_metrics_has_a_card(run: RunFolder) -> None:
    text = card(run)
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n")
    assert "AutoModelForCausalLM.from_pretrained" in text and "z2all_ds.model" not in text
    for row in (
        "step | 7 of 10",
        "tokens seen | 3,584",
        "parameters | 88,736",
        "dtype of these files | bf16",
        "domains, shares of tokens | code 50%, en 25%, zh 25%",
        "DeepSpeed JSON | zero2",
        "largest learning rate | 0.0003, cosine",
        "trained on | 2 ranks in fp32",
    ):
        assert f"| {row} |\n" in text, row
    assert "within 2.0e-07 (relative) on 192 tokens" in text
    for missing in ("## Loss", "tokens/s", "MFU", "goodput", "versions", "optimizer", "continuations", "None", "nan"):
        assert missing not in text, missing


def test_figures_are_taken_at_the_step_of_the_checkpoint(run: RunFolder) -> None:
    writer = RunWriter(run)
    for step in range(1, STEP + 3):  # training continued after the checkpoint
        held_out = {"validation_loss": 6.25, "validation_loss_of_en": 6.125, "validation_perplexity_of_en": 457.1}
        writer.metric(record(step, loss_of_en=6.5 - step / 10, loss_of_zh=8.0, **(held_out if step == 4 else {})))
    writer.close()
    events = [
        {"time_unix": BEGAN, "event": "started", "step": 0},
        {"time_unix": BEGAN + 17, "event": "saved", "seconds": 2.0},
        {"time_unix": BEGAN + 500, "event": "saved", "seconds": 400.0},
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    versions = {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "optimizer": {"kind": "adamw"}, "device": "H200"}
    run.environment.write_text(json.dumps(versions))
    text = card(run, how=LAYERWISE, model_format="z2all", Hello="world")
    for row in (
        "all | 6.3 | 6.25 | ",
        "en | 5.8 | 6.125 | 457.1",
        "zh | 8 |  | ",
        "tokens/s (median) | 4,000",
        "MFU (median) | 40.0%",
        "goodput | 41.2% of 17s (checkpoints 2s, lost 8s)",
        "optimizer | adamw",
        "versions | python 3.11.7, torch 2.13.0",
    ):
        assert f"| {row} |\n" in text, (row, text)
    assert "Z2allForCausalLM.from_pretrained" in text
    assert "Loaded layer by layer in a fresh process with z2all_ds" in text
    assert "- `'Hello'` → `'world'`" in text
