"""Verifies an export: a separate process loads the folder as a user would. Its logits must equal ours, and its loss on
fixed tokens must be the one that the training measured when it saved the checkpoint.

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
from z2all_ds.checkpoint.fixed_tokens import FP8, Probe, fixed_tokens, stored_probe
from z2all_ds.checkpoint.layout import Checkpoint
from z2all_ds.data.data_plan import open_documents
from z2all_ds.export.layerwise_logits import layerwise_logits

if TYPE_CHECKING:
    from z2all_ds.export.weights import WeightReader
    from z2all_ds.model import Z2allConfig
    from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer

MAX_RELATIVE_DIFFERENCE = 1e-4
"""Both sides compute in fp32 with the same values, so only the order of sums differs (observed: 0 to 1e-6)."""
MAX_LOSS_DIFFERENCE, MAX_LOSS_DIFFERENCE_16_BIT, MAX_LOSS_DIFFERENCE_8_BIT = 1e-4, 2e-3, 3e-2
"""Relative, to the loss that the training measured: of fp32 exports of fp32 trainings (observed: 1e-7), of all others,
which round weights or computed in 16 bits (observed: 1e-4), and of trainings that multiplied in 8 bits, whose factors
have errors of 3 to 5 percent."""
CHARACTERS_PER_TEXT = 400
DOCUMENTS_TRIED = 100
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
    loss_difference: float | None = None
    """Relative difference from the loss that the training measured; None if the checkpoint has none."""


@dataclass(frozen=True)
class TrainedLoss:
    """The loss on fixed tokens that the training measured."""

    ids: list[int]
    probe: Probe
    allowed: float
    """Relative difference."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, vocab_size: int, dtype: str) -> "TrainedLoss | None":
        """Return the loss that a checkpoint stores, for an export in `dtype`; None if it has none."""
        probe = stored_probe(checkpoint)
        if probe is None:
            return None
        allowed = MAX_LOSS_DIFFERENCE if probe.dtype == dtype == "fp32" else MAX_LOSS_DIFFERENCE_16_BIT
        allowed = MAX_LOSS_DIFFERENCE_8_BIT if probe.dtype == FP8 else allowed
        return cls(fixed_tokens(vocab_size, probe.tokens)[0].tolist(), probe, allowed)

    def require(self, folder: Path, logits_TV: Tensor) -> float:
        """Return the relative difference of the loss of these logits; raise if it is too large."""
        loss = torch.nn.functional.cross_entropy(logits_TV, torch.tensor(self.ids[1:])).item()
        off = self.probe.difference(loss)
        if off <= self.allowed:
            return off
        raise ExportError(
            f"{folder}",
            f"its loss on fixed tokens is {loss:.7g}, and {self.probe.loss:.7g} was measured when the checkpoint was"
            f" saved (allowed {self.allowed:.0e})",
            "The export is discarded: its weights or model settings are not those of the training.",
        )


def real_texts(corpus_dir: str | Path, tokenizer: "Z2allTokenizer") -> dict[str, str]:
    """Return the beginning of one document per domain, decoded from tokens, since a corpus may contain only tokens.

    Invalid records count as empty ones; the first document with text from the middle of the domain on is taken. Not one
    that spells out a control token: transformers makes that token of the text of some tokenizers (unigram models have
    "</s>" in their vocabulary), which this package never does.
    """
    texts = {}
    for name, domain in open_documents(corpus_dir, tokenizer, on_bad_record="skip").domains.items():
        middle = domain.num_documents // 2
        for number in range(middle, min(middle + DOCUMENTS_TRIED, domain.num_documents)):
            *ids, _end = domain.open_block(number, number + 1).tokens(0).tolist()
            text = tokenizer.decode(ids)[:CHARACTERS_PER_TEXT]
            if text and tokenizer.encode(text, "all") == tokenizer.encode(text):
                texts[name] = text
                break
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
    trained: TrainedLoss | None = None,
) -> Verdict:
    """Raise ExportError unless tokens are equal, logits agree on every text, and the loss is that of the training."""
    fixed = [trained.ids[:-1]] if trained else []
    with tempfile.TemporaryDirectory(prefix="z2all-verify-") as scratch:
        request = {"folder": str(folder), "texts": texts, "max_tokens": max_tokens, "out": scratch, "whole": whole}
        answer = _run_standalone_check({**request, "fixed_ids": fixed}, model_format)
        ids = {name: tokenizer.encode(text)[:max_tokens] for name, text in texts.items()}
        for name in texts:
            if answer["ids"][name] != ids[name]:
                raise ExportError(
                    f"{folder}", f"its tokenizer encodes the {name} text differently", "Report this as a bug."
                )
        compared = [*ids.values(), *fixed]
        theirs = (torch.load(Path(scratch) / f"{number}.pt", weights_only=True) for number in range(len(compared)))
        worst, loss_difference = 0.0, None
        names = [*(f"the {name} text" for name in ids), *("fixed tokens" for _ in fixed)]
        for name, their_logits, our_logits in zip(names, theirs, reference(compared), strict=True):
            difference = ((our_logits - their_logits).abs().max() / our_logits.abs().max()).item()
            if not difference <= MAX_RELATIVE_DIFFERENCE:  # NaN fails too
                raise ExportError(
                    f"{folder}",
                    f"logits on {name} differ by {difference:.2e} (allowed {MAX_RELATIVE_DIFFERENCE:.0e})",
                    "The export is discarded; the checkpoint is intact. Report this as a bug.",
                )
            worst = max(worst, difference)
        if trained:
            loss_difference = trained.require(folder, their_logits)
    tokens_compared = sum(map(len, compared))
    return Verdict(worst, tokens_compared, answer["generated"], WHOLE if whole else LAYERWISE, loss_difference)


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
