"""Which ZeRO JSON, with which micro-batch: all that fit in order, and why the first is first."""

from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.base.config import RunConfig
from z2all_ds.base.errors import ConfigError
from z2all_ds.plan.estimate import Estimate, estimate
from z2all_ds.plan.fleet import Fleet

SHIPPED = (
    *("zero0", "zero1", "zero1_fp16", "zero2", "zero3", "zero3_hpz"),
    *("zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_nvme"),
)
"""In ds_configs/, the plainest first."""
AS_FAST = 0.02
"""Differences in step time below this are less than runs differ by."""


@dataclass(frozen=True)
class Candidates:
    """The JSONs that can be, each with the config's own micro-batch; and those that cannot, with the reason."""

    rows: tuple[Estimate, ...]
    left_out: tuple[str, ...]


def candidates(run: RunConfig, fleet: Fleet) -> Candidates:
    """A mistake that all of them meet, such as a batch that cannot be dealt out, is an error."""
    names = SHIPPED if run.deepspeed in SHIPPED else (*SHIPPED, run.deepspeed)
    rows: list[Estimate] = []
    left_out: list[str] = []
    refusals: list[ConfigError] = []
    _check_batch(run, fleet)
    for name in names:
        reason = _senseless(name, fleet) if name != run.deepspeed else None
        if reason:
            left_out.append(f"{name} is left out: {reason}.")
            continue
        try:
            row = estimate(with_json(run, name), fleet)
            if runs_on(row):
                rows.append(row)
            else:
                left_out.append(f"{name} is left out: this GPU has no bf16.")
        except ConfigError as error:
            refusals.append(error)
            left_out.append(f"{name} is left out: {error.what}: {error.rule}.")
    if not rows:
        if run.train.precision == "bf16" and not fleet.has_bf16:
            raise ConfigError("train.precision=bf16", "the GPU that --gpu names has no bf16", "Leave it out.")
        raise refusals[0]
    return Candidates(tuple(rows), tuple(left_out))


def _check_batch(run: RunConfig, fleet: Fleet) -> None:
    batch, each = run.train.global_batch, run.train.micro_batch
    once = each * fleet.gpus
    if batch % once == 0:
        return
    fix = f"Give train.global_batch={max(1, round(batch / once)) * once}, or another --gpus."
    if batch % fleet.gpus == 0:
        share = batch // fleet.gpus
        smaller = max(size for size in range(1, min(each, share) + 1) if share % size == 0)
        fix = f"Give train.micro_batch={smaller}, train.global_batch={-(-batch // once) * once}, or another --gpus."
    rule = f"cannot be dealt out to {fleet.gpus:,} GPUs in micro-batches of {each}"
    raise ConfigError(f"train.global_batch={batch}", rule, fix)


def runs_on(row: Estimate) -> bool:
    """Whether the fleet's GPUs have the dtype."""
    return row.fleet.has_bf16 or row.resolved.dtype != "bf16"


def _senseless(name: str, fleet: Fleet) -> str | None:
    if name == "zero1_fp16" and fleet.has_bf16:
        return "it is for GPUs without bf16"
    if name == "zero3_hpz" and fleet.nodes == 1:
        return "with one machine there is nothing between groups to be spared"
    return None


def with_json(run: RunConfig, name: str, micro_batch: int | None = None) -> RunConfig:
    train = run.train.model_copy(update={"micro_batch": micro_batch}) if micro_batch else run.train
    return run.model_copy(update={"deepspeed": name, "train": train})


def micro_batches(run: RunConfig, gpus: int) -> list[int]:
    """All that divide what falls to a GPU."""
    each = run.train.global_batch // gpus
    return [size for size in range(1, each + 1) if each % size == 0]


def rank(run: RunConfig, fleet: Fleet, rows: Sequence[Estimate]) -> list[Estimate]:
    """Every JSON with its best micro-batch, if one fits: the fastest first, among equally fast ones the plainest.

    Where two micro-batches are equally fast, the config's own goes first, then the one that needs less. A run with
    stages keeps its micro-batch, which theirs follow. fp32 is nobody's choice for speed: such rows are left to who asks
    for it by train.precision.
    """
    sizes = [run.train.micro_batch] if _keeps_micro_batch(run) else micro_batches(run, fleet.gpus)
    in_fp32 = all(row.resolved.dtype == "fp32" for row in rows)
    best = []
    for row in rows:
        if row.resolved.dtype == "fp32" and not in_fp32:
            continue
        fitting = [one for size in sizes if (one := estimate(with_json(run, row.name, size), fleet)).fits]
        if fitting:
            own = run.train.micro_batch
            best.append(min(fitting, key=lambda one: (_cost(one, fitting), one.micro_batch != own, one.memory.total)))
    return sorted(best, key=lambda one: (_cost(one, best), _plainness(one)))


def _keeps_micro_batch(run: RunConfig) -> bool:
    return bool(run.stages or run.train.batch_warmup_from)


def _cost(one: Estimate, among: Sequence[Estimate]) -> tuple[float, ...]:
    """What is not slower by more than AS_FAST costs the same. Without times, what is sent and offloaded decides."""
    times = [other.time.most for other in among if other.time]
    if one.time and times:
        return (max(0.0, round((one.time.most / min(times) - 1) / AS_FAST - 0.5)),)
    over_bus = one.offload.to_host + one.offload.to_gpu + one.offload.disk_read
    return (over_bus, one.sent, -one.micro_batch if one.fleet.memory else 0)


def _plainness(one: Estimate) -> int:
    return SHIPPED.index(one.name) if one.name in SHIPPED else len(SHIPPED)


def explain(ranked: Sequence[Estimate], rows: Sequence[Estimate]) -> list[str]:
    """Why the first is first, in words."""
    if not ranked:
        smallest = [_smallest(row) for row in rows]
        if any((row.left or 0) >= 0 for row in smallest):
            least = min((row for row in smallest if (row.left or 0) >= 0), key=lambda row: row.host_bytes)
            more = gigabytes(least.host_bytes - (least.fleet.host_memory or 0))
            return [f"Nothing fits: {least.name} takes {more} more of main memory than a machine has."]
        least = min(smallest, key=lambda row: row.memory.total)
        return [
            f"Nothing fits: the least is {least.name}, {gigabytes(-(least.left or 0))} too large with micro-batches of"
            f" {least.micro_batch}. Take more GPUs, train.activation_checkpointing=full, or a larger GPU."
        ]
    first = ranked[0]
    accumulation = first.resolved.accumulation
    told = f"{first.name} (ZeRO-{first.resolved.stage}), micro-batches of {first.micro_batch}"
    told += f", {accumulation} a step" if accumulation > 1 else ", one a step"
    told += f": fits with {gigabytes(first.left)} to spare." if first.left is not None else ": sends least."
    lines = [told]
    plainer = [row for row in rows if not _smallest(row).fits and _plainness(row) < _plainness(first)]
    if plainer:
        lines.append(f"{', '.join(row.name for row in plainer)} would not fit with any micro-batch.")
    for other in ranked[1:4]:
        lines.append(f"{other.name} would {_compared(other, first)}.")
    return lines


def _smallest(row: Estimate) -> Estimate:
    """With the smallest micro-batch that `rank` may take."""
    run = row.run
    return row if _keeps_micro_batch(run) else estimate(with_json(run, row.name, 1), row.fleet)


def _compared(other: Estimate, first: Estimate) -> str:
    parts = []
    if first.sent:
        parts.append(f"send {other.sent / first.sent:.1f} times the bytes")
    if other.time and first.time:
        parts.append(f"take {other.time.most / first.time.most:.2f} times as long")
    bus = other.offload.to_host + other.offload.to_gpu
    if bus:
        parts.append(f"move {gigabytes(bus)} a step between GPU and host")
    if other.left is not None and first.left is not None:
        parts.append(f"leave {gigabytes(other.left)} (micro-batches of {other.micro_batch})")
    return ", ".join(parts) if parts else "do as well"


def gigabytes(count: float | None) -> str:
    return f"{(count or 0) / 1e9:.1f} GB"
