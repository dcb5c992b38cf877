"""Turns a corpus folder and a tokenizer into packed batches in a reproducible order.

`stream` tells the whole way at its head. Every other file is one part of it; only `stream` and `loader` need torch:

    tokens/       token shards, read instead of the text               lane_documents what one lane reads of a domain
    documents     a domain as a row of tokenized documents
    order         the shuffle, computed                                stages         mixture, length, skips over time
    mixture       which domain comes next                              lanes          one endless row of samples
    packing       documents -> samples -> columns of a batch           state          the cursors as JSON
    spec          what decides the order                               data_plan      that, with its corpus opened
    stream        the samples of a rank                                trace          what was in a sample
    loader        workers, pinned memory                               prefetch       a thread that works ahead

For users: build a `PackedStream` from a `StreamSpec`, wrap it in a `BatchLoader`, save `merge_states` of all ranks'
`state_dict()` with the checkpoint, and give it to `load_state_dict` at whatever world size comes next.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from z2all_ds.data.loader import BatchLoader
    from z2all_ds.data.packing import Batch
    from z2all_ds.data.spec import StreamSpec
    from z2all_ds.data.stages import StageSpec
    from z2all_ds.data.state import StreamState, merge_states
    from z2all_ds.data.stream import PackedStream

__all__ = ["Batch", "BatchLoader", "PackedStream", "StageSpec", "StreamSpec", "StreamState", "merge_states"]

_HOMES = {
    "Batch": "packing", "BatchLoader": "loader", "PackedStream": "stream", "StageSpec": "stages",
    "StreamSpec": "spec", "StreamState": "state", "merge_states": "state",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loads torch only for those who want a stream."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"z2all_ds.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
