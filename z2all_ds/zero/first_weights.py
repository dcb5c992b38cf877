"""A run's first weights out of a Hugging Face folder (`train.init_from`), straight into the fp32 masters.

Every rank reads the parameters it steps, one at a time, so that no rank holds the model whole, and the masters have
every bit that the folder has, also where the model computes in 16 bits. A run that goes on from a checkpoint never
looks at the folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from z2all_ds.base.config import RunConfig
from z2all_ds.base.llama_folder import LlamaFolder, tokens_in
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.vocabulary_rows import VocabularyRows, match_rows
from z2all_ds.checkpoint import layout, memory
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE


class FirstWeights(NamedTuple):
    """Where they come from, and which row of the vocabulary is which."""

    folder: LlamaFolder
    rows: VocabularyRows


def first_weights(run: RunConfig, resume: str) -> FirstWeights | None:
    """Checked in full, without torch; None where the run draws its weights or goes on from a checkpoint."""
    if not run.train.init_from or not begins_anew(run, resume):
        return None
    folder = LlamaFolder(run.train.init_from)
    folder.require_same_model(run.model)
    folder.require_tensors()
    ours = Path(run.data.tokenizer).expanduser() / TOKENIZER_FILE
    tokens = tokens_in(json.loads(ours.read_text(encoding="utf-8")))
    return FirstWeights(folder, match_rows(tokens, run.model.vocab_size, folder.tokens, folder.vocab_size))


def begins_anew(run: RunConfig, resume: str) -> bool:
    """Whether there is no checkpoint to go on from."""
    if resume != "auto":
        return resume == "never"
    folder = RunFolder(Path(run.run_dir).expanduser().resolve())
    line = memory.line_of(folder)
    return not (layout.newest_step(folder.checkpoints) or (line and line.snapshots()))


def load_first_weights(engine: Any, found: FirstWeights | None, seed: int, say: Callable[[str], None]) -> None:
    """Into a new engine of any shape. Collective; rank 0 decides whether, should others see another disk."""
    import torch

    from z2all_ds.model.llama_weights import LlamaWeights
    from z2all_ds.zero.collective import from_rank_0
    from z2all_ds.zero.state.optimizer_shards import optimizer_shards_of, weights_changed

    found = from_rank_0(found)
    if found is None:
        return
    weights = LlamaWeights(found.folder, found.rows, seed)
    with weights_changed(engine), torch.no_grad():
        for flat in optimizer_shards_of(engine):
            with flat.resident(True):
                values = flat.tensor.view(-1)
                for piece in flat.pieces:
                    whole = weights.parameter(piece.name).view(-1)
                    part = whole[piece.start : piece.start + piece.length]
                    values[piece.offset : piece.offset + piece.length].copy_(part)
                flat.after_change()
    say(f"weights from {found.folder.path.name}; {found.rows.words()}")
