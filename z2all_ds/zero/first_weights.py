"""Loads the initial weights from a Hugging Face folder (`train.init_from`) directly into the fp32 master weights.

Every rank reads the parameters it updates, one at a time, so no rank holds the whole model, and the master weights have
the full precision of the folder even if the model computes in 16 bits. Ignored when a run resumes from a checkpoint.
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
    """The source folder and the mapping of vocabulary rows."""

    folder: LlamaFolder
    rows: VocabularyRows


def first_weights(run: RunConfig, resume: str) -> FirstWeights | None:
    """Check the folder completely, without torch; None if the run has no `init_from` or resumes from a checkpoint."""
    if not run.train.init_from or not is_new_run(run, resume):
        return None
    folder = LlamaFolder(run.train.init_from)
    folder.require_same_model(run.model)
    folder.require_tensors()
    ours = Path(run.data.tokenizer).expanduser() / TOKENIZER_FILE
    tokens = tokens_in(json.loads(ours.read_text(encoding="utf-8")))
    return FirstWeights(folder, match_rows(tokens, run.model.vocab_size, folder.tokens, folder.vocab_size))


def is_new_run(run: RunConfig, resume: str) -> bool:
    """Return whether there is no checkpoint to resume from."""
    if resume != "auto":
        return resume == "never"
    folder = RunFolder(Path(run.run_dir).expanduser().resolve())
    line = memory.snapshot_folder(folder)
    return not (layout.newest_step(folder.checkpoints) or (line and line.snapshots()))


def load_first_weights(engine: Any, found: FirstWeights | None, seed: int, say: Callable[[str], None]) -> None:
    """Load them into a new engine with any sharding. Collective; rank 0 decides, in case other ranks' disks differ."""
    import torch

    from z2all_ds.model.llama_weights import LlamaWeights
    from z2all_ds.zero.process_group import from_rank_0
    from z2all_ds.zero.state.optimizer_shards import optimizer_shards_of, weights_changed

    found = from_rank_0(found)
    if found is None:
        return
    weights = LlamaWeights(found.folder, found.rows, seed)
    with weights_changed(engine), torch.no_grad():
        for shard in optimizer_shards_of(engine):
            with shard.resident(True):
                for piece in shard.pieces:
                    parameter = weights.parameter(piece.name).view(-1)
                    piece.of(shard.tensor.view(-1)).copy_(parameter[piece.start : piece.start + piece.length])
                shard.after_change()
    say(f"weights from {found.folder.path.name}; {found.rows.words()}")
