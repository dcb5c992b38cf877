"""Tests of an export under a memory limit of a third of its weights, too little to read all weights at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_run
from tests.helpers.command import environment
from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.run_folder import RunFolder

MODEL = ModelSection(
    vocab_size=1024,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=12,
    num_key_value_heads=12,
    max_position_embeddings=64,
)
"""129 million weights, 516 MB of fp32 masters; a layer has 28 MB."""
TIMES_LARGER = 3


@pytest.fixture(scope="module")
def run(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("large") / "run", MODEL, small_corpus, small_tokenizer)


def weight_bytes(run: RunFolder) -> int:
    return sum(file.stat().st_size for file in run.checkpoints.rglob("*.safetensors"))


def under_limit(way: str, run: RunFolder, allowed: int) -> "subprocess.CompletedProcess[str]":
    """Run the script under the limit.

    Two allocators reserve more memory than they use, which the limit would count: that of torch (on ARM) reserves a
    gigabyte at once, and that of glibc keeps freed memory. Both are configured not to. Thread stacks count too.
    """
    frugal = {"MIMALLOC_ARENA_EAGER_COMMIT": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "2"}
    script = Path(__file__).with_name("limited_export.py")
    command = [sys.executable, str(script), way, str(run.root), str(allowed)]
    return subprocess.run(command, env=environment(**frugal), capture_output=True, text=True, timeout=300)


def test_reading_all_weights_fails_under_the_limit(run: RunFolder) -> None:
    allowed = weight_bytes(run) // TIMES_LARGER
    result = under_limit("all_at_once", run, allowed)
    assert result.returncode != 0
    reached = int(result.stdout.splitlines()[-1])
    assert allowed // 4 < reached <= allowed  # some weights were read before the limit was reached


def test_an_export_needs_at_most_a_third_of_the_size_of_its_weights(run: RunFolder) -> None:
    allowed = weight_bytes(run) // TIMES_LARGER
    result = under_limit("stream", run, allowed)
    assert result.returncode == 0, result.stderr[-2000:]
    figures = json.loads(result.stdout)
    print({name: f"{value / 2**20:.0f} MiB" for name, value in figures.items() if name.endswith("bytes")})
    assert figures["how"] == "layer by layer"
    assert figures["difference"] <= 1e-4
    peak = max(figures["peak_resident_bytes"], figures["peak_of_the_check_bytes"])
    assert peak - figures["baseline_resident_bytes"] <= allowed
    assert figures["reported_peak_bytes"] == pytest.approx(peak, rel=0.01)
    assert len(list(run.exports.glob("*/model-*.safetensors"))) == 18
