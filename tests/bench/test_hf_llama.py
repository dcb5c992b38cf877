"""The peer of `z2all bench step`, Hugging Face's Llama, trained through the command and compared with our model."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.training import MICRO_OVERRIDES
from tests.ops.comparing import on_gpu
from z2all_ds.base.config import load_run_config
from z2all_ds.bench.peers import hf_llama
from z2all_ds.bench.step import add_peer


def check_peer(corpus: Path, tokenizer: Path, *changes: str) -> dict[str, Any]:
    """Run `bench step --peer`, compare the peer's figures with ours, and return them."""
    folders = (f"data.corpus={corpus}", f"data.tokenizer={tokenizer}", "deepspeed=zero1")
    command = [sys.executable, "-m", "z2all_ds", "bench", "step", "--ranks", "1", "--steps", "4", "--peer", "--json"]
    result = subprocess.run([*command, *MICRO_OVERRIDES, *folders, *changes], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    costs = json.loads(result.stdout)
    peer: dict[str, Any] = costs["peer"]
    assert peer, result.stderr
    assert (peer["steps"], peer["parameters"]) == (4, costs["parameters"])
    assert peer["tokens_per_second"] == pytest.approx(8 * 32 / peer["seconds_per_step"])
    assert costs["times_peer"] == pytest.approx(costs["tokens_per_second"] / peer["tokens_per_second"])
    assert peer["peak_memory_bytes"] > 0
    # An untrained model has a loss of about log(1024). The same batches are repeated, so training must lower it.
    assert 0 < peer["last_loss"] < math.log(1024)
    return peer


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the peer is another one, tested below")
def test_the_peer_on_a_cpu_uses_sdpa_and_fp32(small_corpus: Path, small_tokenizer: Path) -> None:
    peer = check_peer(small_corpus, small_tokenizer)
    assert peer["name"] == "Hugging Face Llama, SDPA, DeepSpeed zero1 fp32"
    assert set(peer["packages"]) == {"torch", "transformers", "deepspeed"}


@pytest.mark.parametrize("marked", [pytest.param("cuda", marks=on_gpu)])
def test_the_peer_on_a_gpu_uses_liger_kernels_and_bf16(marked: str, small_corpus: Path, small_tokenizer: Path) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    heads = ("model.hidden_size=128", "model.num_attention_heads=2", "model.num_key_value_heads=1")
    peer = check_peer(small_corpus, small_tokenizer, *heads)
    assert peer["name"] == "Hugging Face Llama + Liger, SDPA, DeepSpeed zero1 bf16"
    assert "liger-kernel" in peer["packages"]


def test_a_failed_peer_measurement_is_reported_and_skipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    costs: dict[str, Any] = {"ranks": 1}
    add_peer(costs, None, ["--steps", "4", "train.stepz=5"], tmp_path / "peer.log")
    assert costs == {"ranks": 1}
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "no peer: ConfigError: train.stepz: no such setting. Did you mean train.steps?"


def test_the_hugging_face_config_has_the_shape_of_our_model() -> None:
    run = load_run_config(None, [*MICRO_OVERRIDES, "model.tie_word_embeddings=true", "model.attention_bias=true"])
    config = hf_llama.llama_config(run)
    assert type(config).__name__ == "LlamaConfig"
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 88, 1024)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert config.tie_word_embeddings and config.attention_bias


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert hf_llama.main(["--steps", "1", *MICRO_OVERRIDES]) == 2
    assert capsys.readouterr().err == "ConfigError: steps=1: must be at least 2. Give more.\n"
