"""The choice of a ZeRO JSON and a micro-batch: all that fit in order, and the reasons in words."""

from collections.abc import Sequence

from z2all_ds.base.config import RunConfig
from z2all_ds.base.errors import ConfigError
from z2all_ds.plan.estimate import Estimate, estimate
from z2all_ds.plan.fleet import Fleet

SHIPPED = (
    *("zero0", "zero1", "zero1_fp16", "zero2", "zero3", "zero3_hpz"),
    *("zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_nvme"),
)
"""JSONs in ds_configs/, the simplest first."""
AS_FAST = 0.02
"""Smaller differences in step time are below the differences between equal runs."""


def candidates(run: RunConfig, fleet: Fleet) -> tuple[list[Estimate], list[str]]:
    """Return (the possible JSONs with the config's own micro-batch, a line with the reason for each other JSON).

    Raises an error that all JSONs share, such as a batch that is no multiple of the GPUs.
    """
    _check_batch(run, fleet)
    rows: list[Estimate] = []
    left_out: list[str] = []
    refusals: list[ConfigError] = []
    for name in SHIPPED if run.deepspeed in SHIPPED else (*SHIPPED, run.deepspeed):
        reason = _useless(name, fleet) if name != run.deepspeed else None
        if reason is None:
            try:
                row = estimate(with_json(run, name), fleet)
                if runs_on(row):
                    rows.append(row)
                else:
                    reason = "this GPU has no bf16"
            except ConfigError as error:
                refusals.append(error)
                reason = f"{error.what}: {error.rule}"
        if reason:
            left_out.append(f"{name} is left out: {reason}.")
    if not rows:
        if run.train.precision == "bf16" and not fleet.has_bf16:
            raise ConfigError("train.precision=bf16", "the GPU that --gpu names has no bf16", "Leave it out.")
        raise refusals[0]
    return rows, left_out


def _check_batch(run: RunConfig, fleet: Fleet) -> None:
    batch, each = run.train.global_batch, run.train.micro_batch
    once = each * fleet.gpus
    if batch % once == 0:
        return
    fix = f"Give train.global_batch={max(1, round(batch / once)) * once}, or another --gpus."
    if batch % fleet.gpus == 0:
        smaller = max(size for size in micro_batches(run, fleet.gpus) if size <= each)
        fix = f"Give train.micro_batch={smaller}, train.global_batch={-(-batch // once) * once}, or another --gpus."
    rule = f"cannot be split over {fleet.gpus:,} GPUs in micro-batches of {each}"
    raise ConfigError(f"train.global_batch={batch}", rule, fix)


def runs_on(row: Estimate) -> bool:
    """Return whether the GPU has the dtype."""
    return row.fleet.has_bf16 or row.resolved.dtype != "bf16"


def _useless(name: str, fleet: Fleet) -> str | None:
    if name == "zero1_fp16" and fleet.has_bf16:
        return "it is for GPUs without bf16"
    if name == "zero3_hpz" and fleet.nodes == 1:
        return "with one machine there is nothing between groups to be spared"
    return None


def with_json(run: RunConfig, name: str, micro_batch: int | None = None) -> RunConfig:
    train = run.train.model_copy(update={"micro_batch": micro_batch}) if micro_batch else run.train
    return run.model_copy(update={"deepspeed": name, "train": train})


def micro_batches(run: RunConfig, gpus: int) -> list[int]:
    """Return all divisors of a GPU's samples per step."""
    each = run.train.global_batch // gpus
    return [size for size in range(1, each + 1) if each % size == 0]


def rank(run: RunConfig, fleet: Fleet, rows: Sequence[Estimate]) -> list[Estimate]:
    """Return every JSON that fits with its best micro-batch: the fastest first, the simplest of equally fast ones.

    Of equally fast micro-batches the config's own comes first, then the one that needs less memory. A run with stages
    keeps its micro-batch, because the stages depend on it. fp32 is ranked only if all rows are fp32.
    """
    own = run.train.micro_batch
    sizes = [own] if _keeps_micro_batch(run) else micro_batches(run, fleet.gpus)
    in_fp32 = all(row.resolved.dtype == "fp32" for row in rows)
    best = []
    for row in rows:
        if row.resolved.dtype == "fp32" and not in_fp32:
            continue
        fitting = [one for size in sizes if (one := estimate(with_json(run, row.name, size), fleet)).fits]
        if fitting:
            best.append(min(fitting, key=lambda one: (_cost(one, fitting), one.micro_batch != own, one.memory.total)))
    return sorted(best, key=lambda one: (_cost(one, best), _complexity(one)))


def _keeps_micro_batch(run: RunConfig) -> bool:
    return bool(run.stages or run.train.batch_warmup_from)


def _cost(one: Estimate, among: Sequence[Estimate]) -> tuple[float, ...]:
    """Return the step time in units of AS_FAST; without times the bytes offloaded and sent."""
    times = [other.time.most for other in among if other.time]
    if one.time and times:
        return (max(0.0, round((one.time.most / min(times) - 1) / AS_FAST - 0.5)),)
    return (one.over_bus + one.offload.disk_read, one.sent, -one.micro_batch if one.fleet.memory else 0)


def _complexity(one: Estimate) -> int:
    return SHIPPED.index(one.name) if one.name in SHIPPED else len(SHIPPED)


def explain(ranked: Sequence[Estimate], rows: Sequence[Estimate]) -> list[str]:
    """Return the reasons for the first choice, or why nothing fits."""
    if not ranked:
        return [_why_nothing_fits([_smallest(row) for row in rows])]
    first = ranked[0]
    accumulation = first.resolved.accumulation
    choice = f"{first.name} (ZeRO-{first.resolved.stage}), micro-batches of {first.micro_batch}"
    choice += f", {accumulation} per step" if accumulation > 1 else ", one per step"
    choice += f": fits with {gigabytes(first.left)} to spare." if first.left is not None else ": sends least."
    lines = [choice]
    simpler = [row for row in rows if _complexity(row) < _complexity(first) and not _smallest(row).fits]
    if simpler:
        lines.append(f"{', '.join(row.name for row in simpler)} would not fit with any micro-batch.")
    return lines + [f"{other.name} would {_compared(other, first)}." for other in ranked[1:4]]


def _why_nothing_fits(smallest: Sequence[Estimate]) -> str:
    on_gpu = [row for row in smallest if (row.left or 0) >= 0]
    if on_gpu:
        least = min(on_gpu, key=lambda row: row.host_bytes)
        more = gigabytes(least.host_bytes - (least.fleet.host_memory or 0))
        return f"Nothing fits: {least.name} takes {more} more of main memory than a machine has."
    least = min(smallest, key=lambda row: row.memory.total)
    return (
        f"Nothing fits: the least is {least.name}, {gigabytes(-(least.left or 0))} too large with micro-batches of"
        f" {least.micro_batch}. Take more GPUs, train.activation_checkpointing=full, or a larger GPU."
    )


def _smallest(row: Estimate) -> Estimate:
    """Return the row with the smallest micro-batch that `rank` may choose."""
    return row if _keeps_micro_batch(row.run) else estimate(with_json(row.run, row.name, 1), row.fleet)


def _compared(other: Estimate, first: Estimate) -> str:
    parts = []
    if first.sent:
        parts.append(f"send {other.sent / first.sent:.1f} times the bytes")
    if other.time and first.time:
        parts.append(f"take {other.time.most / first.time.most:.2f} times as long")
    if other.over_bus:
        parts.append(f"move {gigabytes(other.over_bus)} per step between GPU and host")
    if other.left is not None and first.left is not None:
        parts.append(f"leave {gigabytes(other.left)} (micro-batches of {other.micro_batch})")
    return ", ".join(parts) if parts else "do as well"


def gigabytes(count: float | None) -> str:
    return f"{(count or 0) / 1e9:.1f} GB"
