"""Everything that a plan rests on and that nobody has said: the lines under its table."""

from collections.abc import Sequence

from z2all_ds.base.config import RunConfig
from z2all_ds.plan.estimate import Estimate
from z2all_ds.plan.fleet import Fleet
from z2all_ds.plan.gpu_memory import CUDA_CONTEXT, HOLES, HOLES_IN_GRAPHS, HOLES_WHERE_GATHERED, NCCL
from z2all_ds.plan.outlook import MOST_FAILURES, SIMULATED_RUNS, Risks


def assumptions(
    run: RunConfig, fleet: Fleet, rows: Sequence[Estimate], looks_ahead: bool, risks: Risks
) -> tuple[str, ...]:
    told = [*_of_memory(run, rows), *fleet.assumptions]
    if fleet.memory is None:
        told.append("No GPU or --gpu-memory was given: nothing is said about what fits.")
    if fleet.peak is None:
        told.append("No GPU was named (--gpu, --peak-tflops): nothing is said about time.")
    else:
        told += _of_time(rows)
    if looks_ahead:
        told.append(
            f"A failure every {risks.gpu_hours_per_failure:,.0f} GPU hours (Llama 3 saw 50,000),"
            f" {risks.restart_seconds:.0f} s to start again, checkpoints to one disk that all machines share."
            f" Simulated: {SIMULATED_RUNS} runs, of up to {MOST_FAILURES:,} failures."
        )
    return tuple(told)


def _of_memory(run: RunConfig, rows: Sequence[Estimate]) -> list[str]:
    train = run.train
    asked = [f"{op}={backend}" for op, backend in run.ops.model_dump().items() if backend != "auto"]
    ops = ", ".join(asked) or "those that auto takes on a GPU"
    optimizers = ", ".join(sorted({one.resolved.optimizer.kind for one in rows}))
    packed = "documents masked apart" if run.data.document_mask else "no document mask"
    dtypes = {str(one.resolved.dtypes): one.name for one in reversed(rows)}
    return [
        "GB are 10^9 bytes. Parts are those of the fullest moment: gradients made while activations go are not in it.",
        f"{train.micro_batch} x {train.sequence_length} tokens a micro-batch, {train.global_batch} samples a step,"
        f" checkpointing {train.activation_checkpointing}, {packed}; ops: {ops}; optimizer: {optimizers}.",
        *(f"Dtypes from {name} on: {words}." for words, name in reversed(dtypes.items())),
        f"CUDA takes {CUDA_CONTEXT / 1e9:.1f} GB, NCCL {NCCL / 1e9:.1f} with several ranks. Holes, of what is"
        f" allocated: {HOLES_IN_GRAPHS:.0%} with CUDA graphs, {HOLES:.0%} without, {HOLES_WHERE_GATHERED:.0%} at ZeRO-3"
        " over several ranks or with offload.",
    ]


def _of_time(rows: Sequence[Estimate]) -> list[str]:
    shares = ", ".join(f"{one.name} {one.reached:.0%}" for one in rows if one.reached)
    told = [
        f"Share of the peak that is computed at: {shares} (measured on an H200; --reached gives another).",
        "Attention is computed over whole samples; documents masked apart need less of it.",
        "Step times are from sending wholly beside computing, where DeepSpeed can, to one after the other.",
    ]
    if any(one.resolved.dtype == "fp32" for one in rows):
        told.append("No time is told for fp32: what a GPU computes in it depends on TF32.")
    return told
