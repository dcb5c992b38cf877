"""Verifies an export: a separate process loads the folder as a user would, and its logits must equal ours.

For the Llama format that process cannot import z2all_ds. Neither process holds the whole model: this one computes layer
by layer, and so does the other one if the model is large for this machine.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from z2all_ds.base.errors import ExportError
from z2all_ds.base.process_memory import available_bytes
from z2all_ds.data.data_plan import open_documents
from z2all_ds.export.layerwise_logits import layerwise_logits

if TYPE_CHECKING:
    from z2all_ds.export.weights import WeightReader
    from z2all_ds.model import Z2allConfig
    from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer

MAX_RELATIVE_DIFFERENCE = 1e-4
"""Both sides compute in fp32 with the same values, so only the order of sums differs (observed: 0 to 1e-6)."""
CHARACTERS_PER_TEXT = 400
MEMORY_FRACTION = 1 / 4
"""A model that takes less than this fraction of the free memory in fp32 is loaded with `from_pretrained`."""
WHOLE, LAYERWISE = "from_pretrained", "layer by layer"

Logits = Callable[[list[list[int]]], Iterator[Tensor]]
"""From the token ids of several texts to the logits [T, V] of each."""


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison."""

    max_relative_difference: float
    tokens_compared: int
    generated: dict[str, str]
    """Greedy continuation of each prompt; empty if computed layer by layer."""
    how: str
    """How the folder was loaded: WHOLE or LAYERWISE."""


def real_texts(corpus_dir: str | Path, tokenizer: "Z2allTokenizer") -> dict[str, str]:
    """Return the beginning of one document per domain, decoded from tokens, since a corpus may contain only tokens."""
    texts = {}
    for name, domain in open_documents(corpus_dir, tokenizer).domains.items():
        middle = domain.num_documents // 2
        *ids, _end = domain.open_block(middle, middle + 1).tokens(0).tolist()
        texts[name] = tokenizer.decode(ids)[:CHARACTERS_PER_TEXT]
    return texts


def reference_logits(reader: "WeightReader", config: "Z2allConfig", dtype: torch.dtype) -> Logits:
    """Return the logits function of our own model: weights rounded to the export's dtype, computed in fp32."""
    from z2all_ds.model import Z2allForCausalLM

    with torch.device("meta"):
        model = Z2allForCausalLM(config)
    return lambda texts: layerwise_logits(model, lambda name: reader.read_rounded(name, dtype), texts)


def fits_whole(num_parameters: int) -> bool:
    return num_parameters * torch.float32.itemsize < MEMORY_FRACTION * available_bytes()


def compare_with_folder(
    reference: Logits,
    tokenizer: "Z2allTokenizer",
    folder: Path,
    texts: dict[str, str],
    max_tokens: int,
    whole: bool,
    model_format: str = "llama",
) -> Verdict:
    """Raise ExportError unless tokens are equal and logits agree on every text."""
    with tempfile.TemporaryDirectory(prefix="z2all-verify-") as scratch:
        request = {"folder": str(folder), "texts": texts, "max_tokens": max_tokens, "out": scratch, "whole": whole}
        answer = _run_standalone_check(request, model_format)
        ids = {name: tokenizer.encode(text)[:max_tokens] for name, text in texts.items()}
        for name in texts:
            if answer["ids"][name] != ids[name]:
                raise ExportError(
                    f"{folder}", f"its tokenizer encodes the {name} text differently", "Report this as a bug."
                )
        worst = 0.0
        for number, (name, ours) in enumerate(zip(ids, reference(list(ids.values())), strict=True)):
            theirs = torch.load(Path(scratch) / f"{number}.pt", weights_only=True)
            difference = ((ours - theirs).abs().max() / ours.abs().max()).item()
            if not difference <= MAX_RELATIVE_DIFFERENCE:  # NaN fails too
                raise ExportError(
                    f"{folder}",
                    f"logits on the {name} text differ by {difference:.2e} (allowed {MAX_RELATIVE_DIFFERENCE:.0e})",
                    "The export is discarded; the checkpoint is intact. Report this as a bug.",
                )
            worst = max(worst, difference)
    tokens_compared = sum(map(len, ids.values()))
    return Verdict(worst, tokens_compared, answer["generated"], WHOLE if whole else LAYERWISE)


def _run_standalone_check(request: dict[str, Any], model_format: str) -> dict[str, Any]:
    script, scratch = Path(__file__).with_name("standalone_check.py"), request["out"]
    command = [sys.executable, str(script), model_format]
    # In our own process group, so that it ends with us: it cannot import the package to watch its owner.
    result = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, cwd=scratch)
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}, no message"])[-1]
        without = " without this package" if model_format == "llama" else ""
        raise ExportError(request["folder"], f"does not load{without} ({last_line})", "Report this as a bug.")
    answer: dict[str, Any] = json.loads((Path(scratch) / "answer.json").read_text(encoding="utf-8"))
    return answer
