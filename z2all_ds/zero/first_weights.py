"""Loads the initial weights from a Hugging Face folder (`train.init_from`) directly into the fp32 master weights.

Every rank reads the parameters it updates, one at a time, so no rank holds the whole model, and the master weights have
the full precision of the folder even if the model computes in 16 bits. Ignored when a run resumes from a checkpoint.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from z2all_ds.base.config import RunConfig
from z2all_ds.base.json_text import load_json
from z2all_ds.base.llama_folder import LlamaFolder
from z2all_ds.base.paths import expanded, full_path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.base.vocabulary_rows import VocabularyRows, match_rows, tokens_in
from z2all_ds.checkpoint import layout
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
    ours = expanded(run.data.tokenizer) / TOKENIZER_FILE
    tokens = tokens_in(load_json(read_regular(ours)))
    return FirstWeights(folder, match_rows(tokens, run.model.vocab_size, folder.tokens, folder.vocab_size))


def is_new_run(run: RunConfig, resume: str) -> bool:
    """Return whether there is no checkpoint on disk to resume from. Snapshots in memory do not count: if they turn out
    to be damaged, the run starts at step 0."""
    if resume != "auto":
        return resume == "never"
    return not layout.newest_step(RunFolder(full_path(run.run_dir)).checkpoints)


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
