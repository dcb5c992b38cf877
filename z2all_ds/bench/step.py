"""`z2all bench step`: what a training step costs here, on a short real run.

Figures are medians over the second half of the steps: the first ones pay for allocation, autotuning and caches.
"""

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from z2all_ds.base.accounting import count_parameters, mfu, operations_per_token, peak_flops
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.console import human_bytes, say
from z2all_ds.base.reports import Shown
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.bench.in_ranks import figures_of_ranks
from z2all_ds.bench.shared import require_at_least, run_process, scratch_folder
from z2all_ds.track.writer import read_records
from z2all_ds.train.command import default_ranks, train_on_this_machine
from z2all_ds.train.fallback_data import prepare_data

MIN_STEPS = 4
PEER_MODULE = "z2all_ds.bench.peers.hf_llama"


@dataclass(frozen=True)
class StepCosts:
    """Medians, with everything needed to run it again.

    `mfu_origin`: 6N + 12·L·d·S, embeddings counted. `mfu_exact`: products only, causal attention counted half. `hfu`:
    as `mfu_exact`, with what is computed a second time. The floor is what products and attention alone allow, on all
    devices together. `peer`: Hugging Face's Llama with Liger under the same DeepSpeed JSON, measured right after ours.
    """

    device: str
    ranks: int
    deepspeed: str
    parameters: int
    sequence_length: int
    global_batch: int
    micro_batch: int
    steps: int
    seconds_per_step: float
    tokens_per_second: float
    mfu_origin: float | None
    mfu_exact: float | None
    peak_memory_bytes: int
    last_loss: float
    packages: dict[str, str]
    ops: dict[str, str]
    floor_tokens_per_second: float | None = None
    share_of_floor: float | None = None
    peer: dict[str, Any] | None = None
    times_peer: float | None = None
    hfu: float | None = None


def bench_step(
    config: str | None,
    overrides: list[str],
    ranks: int | None,
    steps: int,
    with_floor: bool = False,
    with_peer: bool = False,
) -> StepCosts:
    """Trains `steps` steps in a temporary folder, on the text every machine has unless data.corpus says otherwise."""
    require_at_least(MIN_STEPS, steps=steps)
    ranks = default_ranks() if ranks is None else ranks
    with scratch_folder() as folder:
        chosen = [f"run_dir={folder / 'run'}", f"train.steps={steps}", "checkpoint.at_end=false"]
        run = load_run_config(config, [*overrides, *prepare_data(config, overrides, folder), *chosen])
        train_on_this_machine(run, ranks)
        # Right after the run, so that all meet the same warm machine.
        peer = peer_in_own_processes(config, overrides, ranks, steps, folder / "peer.log") if with_peer else None
        floor = floor_in_own_process(config, overrides) if with_floor else None
        costs = summarise(run, RunFolder(folder / "run"), ranks)
    costs = beside_peer(costs, peer) if peer else costs
    return beside_floor(costs, floor) if floor else costs


def peer_in_own_processes(
    config: str | None, overrides: list[str], ranks: int, steps: int, log: Path
) -> dict[str, Any] | None:
    """The peer's figures, started in the same way; None where it does not run, which costs a line as with the floor."""
    arguments = ["--steps", str(steps), *overrides]
    found = figures_of_ranks(PEER_MODULE, config, arguments, ranks, log, "measuring the peer")
    if isinstance(found, str):
        say(f"no peer: {found}")
        return None
    return found


def beside_peer(costs: StepCosts, peer: dict[str, Any]) -> StepCosts:
    """The same with the peer's figures and the ratio to them."""
    return replace(costs, peer=peer, times_peer=costs.tokens_per_second / peer["tokens_per_second"])


def floor_in_own_process(config: str | None, overrides: list[str]) -> dict[str, Any] | None:
    """What `z2all bench floor` says; None where it cannot be measured, which costs a line and not the run's figures."""
    named = ["--config", config] if config else []
    done = run_process(["-m", "z2all_ds", "bench", "floor", "--json", *named, *overrides])
    if done.returncode:
        say(f"no floor: `z2all bench floor` ended with code {done.returncode}")
        return None
    floor: dict[str, Any] = json.loads(done.stdout)
    return floor


def beside_floor(costs: StepCosts, floor: dict[str, Any]) -> StepCosts:
    """The same with its distance to the floor. A GPU rank has a device of its own; CPU ranks share the machine."""
    devices = costs.ranks if "cuda" in floor["measured_on"] else 1
    allowed = devices * floor["tokens_per_second"]
    return replace(costs, floor_tokens_per_second=allowed, share_of_floor=costs.tokens_per_second / allowed)


def summarise(run: RunConfig, folder: RunFolder, ranks: int) -> StepCosts:
    """Returns the figures that the run itself has written down."""
    records = list(read_records(folder.metrics))
    environment = json.loads(folder.environment.read_text(encoding="utf-8"))
    seconds = statistics.median(record["step_seconds"] for record in records[len(records) // 2 :])
    train, shape = run.train, run.model.shape
    tokens_per_second = train.global_batch * train.sequence_length / seconds
    ops = {choice["op"]: choice["backend"] for choice in environment["ops"]}
    operations = operations_per_token(
        shape, train.sequence_length, train.activation_checkpointing, train.recompute, ops["cross_entropy"]
    )
    peak = peak_flops(environment["device"])
    shares = {name: mfu(tokens_per_second, flops, peak and peak * ranks) for name, flops in operations.items()}
    return StepCosts(
        device=environment["device"],
        ranks=ranks,
        deepspeed=run.deepspeed,
        parameters=count_parameters(shape).total,
        sequence_length=train.sequence_length,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        steps=len(records),
        seconds_per_step=seconds,
        tokens_per_second=tokens_per_second,
        mfu_origin=shares["origin"],
        mfu_exact=shares["exact"],
        peak_memory_bytes=max(record["peak_memory_bytes"] for record in records),
        last_loss=records[-1]["loss"],
        packages=environment["packages"],
        ops=ops,
        hfu=shares["executed"],
    )


def describe(costs: StepCosts) -> Shown:
    """Yields one line, and a second one about the peer where it was measured."""
    shares = {"MFU": costs.mfu_origin, "MFU exact": costs.mfu_exact, "HFU": costs.hfu}
    yield " | ".join(
        [
            f"{costs.device} × {costs.ranks}",
            f"{costs.deepspeed} {costs.micro_batch}/{costs.global_batch} × {costs.sequence_length}",
            f"{costs.parameters / 1e6:,.1f} M parameters",
            *_speed(costs.seconds_per_step, costs.tokens_per_second),
            *(f"{name} {share:.1%}" for name, share in shares.items() if share is not None),
            *([] if costs.share_of_floor is None else [f"{costs.share_of_floor:.1%} of the floor"]),
            f"peak {human_bytes(costs.peak_memory_bytes)}",
        ]
    )
    if costs.peer is not None:
        speed = _speed(costs.peer["seconds_per_step"], costs.peer["tokens_per_second"])
        peak = f"peak {human_bytes(costs.peer['peak_memory_bytes'])}"
        yield " | ".join([f"peer: {costs.peer['name']}", *speed, peak, f"ours is {costs.times_peer:.2f} times as fast"])


def _speed(seconds_per_step: float, tokens_per_second: float) -> tuple[str, str]:
    return f"{seconds_per_step:.3f} s/step", f"{tokens_per_second:,.0f} tok/s"
