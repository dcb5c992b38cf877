"""Proof of an export: a fresh process that cannot import z2all_ds loads the folder and must give the same logits."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from z2all_ds.data.spec import open_documents
from z2all_ds.errors import ExportError

if TYPE_CHECKING:
    from z2all_ds.model import Z2allForCausalLM
    from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer

MAX_RELATIVE_DIFFERENCE = 1e-4
"""fp32 on both sides from the same values: only the order of sums differs (seen: 0 to 1e-6)."""
CHARACTERS_PER_TEXT = 400


@dataclass(frozen=True)
class Verdict:
    """What the comparison found."""

    max_relative_difference: float
    tokens_compared: int
    generated: dict[str, str]
    """Prompt -> what the exported model made of it, greedily."""


def real_texts(corpus_dir: str | Path, tokenizer: "Z2allTokenizer") -> dict[str, str]:
    """The beginning of one document per domain, out of its tokens: a corpus may hold nothing else."""
    texts = {}
    for name, domain in open_documents(corpus_dir, tokenizer).domains.items():
        middle = domain.num_documents // 2
        *ids, _end = domain.open_block(middle, middle + 1).tokens(0).tolist()
        texts[name] = tokenizer.decode(ids)[:CHARACTERS_PER_TEXT]
    return texts


def compare_with_folder(
    model: "Z2allForCausalLM", tokenizer: "Z2allTokenizer", folder: Path, texts: dict[str, str]
) -> Verdict:
    """Raises ExportError unless tokens are equal and logits agree on every text."""
    limit = model.config.max_position_embeddings
    with tempfile.TemporaryDirectory(prefix="z2all-verify-") as scratch:
        answer = _ask_fresh_process(folder, texts, limit, Path(scratch))
        worst, compared = 0.0, 0
        for name, text in texts.items():
            ids = tokenizer.encode(text)[:limit]
            if answer["ids"][name] != ids:
                raise ExportError(
                    f"{folder}", f"its tokenizer reads the {name} text differently", "Report this as a bug."
                )
            with torch.no_grad():
                ours = model(torch.tensor([ids])).logits[0].float()
            theirs = torch.load(Path(scratch) / f"{name}.pt", weights_only=True)
            difference = ((ours - theirs).abs().max() / ours.abs().max()).item()
            # `not <=` rather than `>`: a NaN fails too.
            if not difference <= MAX_RELATIVE_DIFFERENCE:
                raise ExportError(
                    f"{folder}",
                    f"logits on the {name} text differ by {difference:.2e} (allowed {MAX_RELATIVE_DIFFERENCE:.0e})",
                    "The export is discarded; the checkpoint is intact. Report this as a bug.",
                )
            worst, compared = max(worst, difference), compared + len(ids)
    return Verdict(worst, compared, answer["generated"])


def _ask_fresh_process(folder: Path, texts: dict[str, str], limit: int, scratch: Path) -> dict[str, dict[str, str]]:
    script = Path(__file__).with_name("standalone_check.py")
    request = {"folder": str(folder), "texts": texts, "max_tokens": limit, "out": str(scratch)}
    result = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(request), capture_output=True, text=True, cwd=scratch
    )
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ExportError(f"{folder}", f"does not load without this package ({last_line})", "Report this as a bug.")
    answer: dict[str, dict[str, str]] = json.loads((scratch / "answer.json").read_text(encoding="utf-8"))
    return answer
