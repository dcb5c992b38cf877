"""One training from raw text to a verified export, with the commands that a user types.

The run trains on two ranks, is killed, resumes with another ZeRO JSON, and has the losses of an uninterrupted run.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.command import COMMAND, z2all
from tests.helpers.marked import marked, new_mark, wait_until
from tests.helpers.training import losses, metrics, run_arguments, train

STEPS, KILLED_AFTER = 24, 9
SETTINGS = (f"train.steps={STEPS}", "checkpoint.every_steps=4", "optimizer.lr=0.01")


def test_training_from_raw_text_to_a_verified_export_survives_a_kill(tmp_path: Path) -> None:
    corpus, tokenizer, run = tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "run"
    rows = [{"text": f"第{number}篇。 A document of some words, number {number}. " * 9} for number in range(400)]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for words in (
        ("corpus", "build", f"notes=jsonl:{tmp_path / 'raw.jsonl'}", "--out", corpus),
        ("tokenizer", "train", corpus, "--out", tokenizer, "--vocab-size", "400"),
    ):
        answer = z2all(*words, cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr

    kill_after_some_steps(run, run_arguments(run, corpus, tokenizer, *SETTINGS, "deepspeed=zero2"))
    trained = metrics(run)[-1]["step"]
    assert KILLED_AFTER <= trained < STEPS
    resumed = train(run, corpus, tokenizer, *SETTINGS, "deepspeed=zero3")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from step_" in resumed.stderr and "saved by 2 ranks under zero2" in resumed.stderr

    unbroken = train(tmp_path / "unbroken", corpus, tokenizer, *SETTINGS, "deepspeed=zero1")
    assert unbroken.returncode == 0, unbroken.stderr
    wanted = losses(tmp_path / "unbroken")
    assert [record["step"] for record in metrics(run)] == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(wanted, rel=2e-6)
    assert wanted[-1] < 0.9 * wanted[0]

    exported = z2all("export", run, "--dtype", "fp32", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    folder = run / "exports" / f"step_{STEPS:08d}"
    assert exported.stdout.startswith(f"{folder}: step {STEPS}, ") and " logits within " in exported.stdout
    model, reader = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = reader(rows[7]["text"][:100], return_tensors="pt")["input_ids"]
    assert model(ids, labels=ids).loss.item() < wanted[0]


def kill_after_some_steps(run: Path, arguments: list[str]) -> None:
    """Start the training, wait for some steps, then SIGKILL the command and all processes it has started."""
    mark = new_mark()
    process = subprocess.Popen(
        [*COMMAND, "train", "--ranks", "2", *arguments], env={**os.environ, **mark}, stderr=subprocess.DEVNULL
    )
    wait_until(
        lambda: process.poll() is not None or ((run / "metrics.jsonl").exists() and len(metrics(run)) >= KILLED_AFTER),
        f"step {KILLED_AFTER}",
    )
    for number in marked(mark):
        os.kill(number, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
