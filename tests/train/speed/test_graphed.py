"""Micro-batches as CUDA graphs: the losses are those of kernels launched one by one."""

import threading

import pytest
import torch

from tests.ops.comparing import on_gpu
from tests.zero.engines import tiny_engine, train
from z2all_ds.base.errors import ConfigError
from z2all_ds.model.recompute import set_recompute
from z2all_ds.train.speed.graphed import GraphedForward, graph_micro_batches

GRAPHABLE = ("deepspeed=zero1", "model.hidden_size=128")
"""The heads have 64 dimensions, which every attention kernel supports."""
CHECKPOINTING = {
    "none": (),
    "full": ("train.activation_checkpointing=full",),
    "selective": ("train.activation_checkpointing=selective", "train.recompute=[attention, mlp]"),
}


@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=CHECKPOINTING)
@on_gpu[0]
@on_gpu[1]
def test_losses_match_those_without_graphs(documents: bool, checkpointing: str) -> None:
    found = []
    for wanted in ("never", "always"):
        overrides = (*GRAPHABLE, *CHECKPOINTING[checkpointing], f"train.cuda_graphs={wanted}")
        with tiny_engine("cuda", *overrides) as (engine, (run, ops)):
            set_recompute(engine.module, run.train.activation_checkpointing, run.train.recompute)
            graphs = graph_micro_batches(engine, run, ops, print)
            assert (graphs is not None) == (wanted == "always")
            found.append(train(engine, 4, documents=documents))
    # Both run the same kernels on the same numbers, but cuDNN's backward pass has no fixed order of sums.
    assert found[1] == pytest.approx(found[0], rel=2e-3)
    assert found[0][-1] < found[0][0]


@on_gpu[0]
@on_gpu[1]
def test_after_forget_graphs_are_captured_again() -> None:
    with tiny_engine("cuda", *GRAPHABLE, "train.cuda_graphs=always") as (engine, (run, ops)):
        graphs = graph_micro_batches(engine, run, ops, print)
        assert isinstance(graphs, GraphedForward)
        first = train(engine, 1)
        graphs.forget()
        engine.module.set_rope_theta(500.0)
        assert train(engine, 1)[0] < first[0]


@on_gpu[0]
@on_gpu[1]
def test_other_threads_may_pin_memory_during_a_capture() -> None:
    ended, kept, went_wrong = threading.Event(), [], []

    def pin() -> None:
        try:
            while not ended.is_set():
                kept.append(torch.empty(1 << 16, pin_memory=True))  # kept, so that each one is allocated by the driver
        except RuntimeError as error:
            went_wrong.append(error)

    with tiny_engine("cuda", *GRAPHABLE, "train.cuda_graphs=always") as (engine, (run, ops)):
        graphs = graph_micro_batches(engine, run, ops, print)
        assert isinstance(graphs, GraphedForward)
        thread = threading.Thread(target=pin)
        thread.start()
        try:
            first = train(engine, 2)
            for _ in range(5):
                graphs.forget()
                last = train(engine, 2)
        finally:
            ended.set()
            thread.join()
    assert not went_wrong and len(kept) > 10
    assert last[0] < first[0]


@on_gpu[0]
@on_gpu[1]
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("deepspeed=zero2",), "needs ZeRO-1"),
        (("deepspeed=zero1", "train.micro_batch=8"), "several micro-batches"),
        (("deepspeed=zero1", "ops.rms_norm=torch"), "rms_norm torch"),
        (
            ("deepspeed=zero1", "train.activation_checkpointing=full", "model.dropout1=0.1"),
            "activation checkpointing with dropout",
        ),
        (("deepspeed=zero1", "model.rope_scaling={rope_type: dynamic, factor: 2.0}"), "dynamic rope"),
    ],
    ids=["zero2", "one-micro-batch", "torch-norm", "dropout", "dynamic-rope"],
)
def test_unsupported_settings_are_refused_or_reported(overrides: tuple[str, ...], named: str) -> None:
    with tiny_engine("cuda", *GRAPHABLE, *overrides, "train.cuda_graphs=always") as (engine, (run, ops)):
        with pytest.raises(ConfigError, match=named):
            graph_micro_batches(engine, run, ops, print)
        lines: list[str] = []
        auto = run.model_copy(update={"train": run.train.model_copy(update={"cuda_graphs": "auto"})})
        assert graph_micro_batches(engine, auto, ops, lines.append) is None
        assert named in lines[0]


def test_cuda_graphs_always_is_refused_on_a_cpu() -> None:
    with tiny_engine("cpu", "train.cuda_graphs=always") as (engine, (run, ops)):
        with pytest.raises(ConfigError, match=r"cuda_graphs=always: needs a GPU"):
            graph_micro_batches(engine, run, ops, print)
