"""Turns a corpus folder and a tokenizer into packed batches in a reproducible order.

The docstring of `stream` explains the whole path. Only `stream` and `loader` need torch.

    documents   domains as sequences of tokenized documents     tokens/     token shards, read instead of the text
    order       the computed shuffle                            mixture     the domain of each sample
    packing     documents -> samples -> columns of a batch      stages      mixture, length and skips over time
    data_plan   the spec with its corpus opened, and lanes      state       the cursors as JSON
    stream      the samples of a rank                           loader      micro-batches, worker processes
    prefetch    a background thread                             trace       the documents of a sample
    run_spec    the data settings of a run config               corpus_stats  figures per domain

Usage: create a `PackedStream` from a `StreamSpec`, wrap it in a `BatchLoader`, save `merge_states` of all ranks'
`state_dict()` with the checkpoint, and pass it to `load_state_dict` at any later world size.
"""

from typing import TYPE_CHECKING

from z2all_ds.base.lazy import lazy_names

if TYPE_CHECKING:
    from z2all_ds.data.data_plan import StreamSpec
    from z2all_ds.data.loader import BatchLoader
    from z2all_ds.data.packing import Batch
    from z2all_ds.data.stages import StageSpec
    from z2all_ds.data.state import StreamState, merge_states
    from z2all_ds.data.stream import PackedStream

__all__ = ["Batch", "BatchLoader", "PackedStream", "StageSpec", "StreamSpec", "StreamState", "merge_states"]

__getattr__ = lazy_names(
    __name__,
    {
        "data_plan": "StreamSpec",
        "loader": "BatchLoader",
        "packing": "Batch",
        "stages": "StageSpec",
        "state": "StreamState merge_states",
        "stream": "PackedStream",
    },
)
