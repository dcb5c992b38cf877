"""What each rank runs: `deepspeed launch/pretrain.py --config run.yaml --deepspeed zero2 train.steps=100`.

Prepares everything in the order in which it can fail cheaply (config, data, shape), then hands over to the loop.
Each rank's whole output goes to logs/rank_NNNN.log; rank 0 also speaks on the terminal.
"""

import argparse
import json
import logging
import os
import platform
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from z2all_ds.atomic import write_whole
from z2all_ds.cluster.progress import Progress
from z2all_ds.config import RunConfig, anchored, dump_yaml, load_run_config
from z2all_ds.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE, ClusterError, ConfigError, Z2allError
from z2all_ds.fault_records import BUG, LOST_PEER, OUT_OF_MEMORY, Fault, family_of, forget_fault, write_fault
from z2all_ds.lifeline import follow_owner
from z2all_ds.machine import device_type
from z2all_ds.run_folder import RunFolder
from z2all_ds.run_stages import run_stages
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer
from z2all_ds.train import determinism, garbage
from z2all_ds.train.ds_config import ResolvedDeepSpeed, resolve
from z2all_ds.train.init_from import FirstWeights, first_weights, load_first_weights
from z2all_ds.train.inputs import check_data, stream_spec
from z2all_ds.train.logs import RankOutput
from z2all_ds.train.offload_disk import require_disk
from z2all_ds.train.peers import LostPeer
from z2all_ds.train.startup import Startup
from z2all_ds.train.unused_libraries import left_unloaded
from z2all_ds.world import World


def main(arguments: list[str] | None = None) -> int:
    """Entry of a rank; returns the exit code."""
    startup = Startup()
    options, run = parse(sys.argv[1:] if arguments is None else arguments)
    world = World.take_from_environment()
    folder = RunFolder(Path(run.run_dir).expanduser().resolve())
    output = RankOutput(folder, world)
    follow_owner()
    lock, inputs, progress = None, None, None
    try:
        lock = folder.acquire_lock() if world.is_main else None
        forget_fault(folder, world.rank)
        progress = Progress(folder, world, run.train.hang_seconds)
        startup.on_phase = progress.beat
        startup.done("imports")
        inputs = check_inputs(run, world, options.resume)
        startup.done("data")
        outcome = train_rank(run, options.resume, folder, world, inputs, output, startup, progress)
    except Z2allError as error:
        kind = LOST_PEER if isinstance(error, LostPeer) else family_of(error)
        leave_fault(folder, world, kind, f"{type(error).__name__}: {error}", error.exit_code)
        # All ranks meet a user's mistake alike: rank 0 says it. Files that are missing are missing for all ranks of a
        # machine: its first one says it. What one rank alone meets later (its shard, its disk) is said by that rank.
        speaks = (world.local_rank == 0 or inputs is not None) and not isinstance(error, ConfigError)
        output.fail(f"{type(error).__name__}: {error}", show=world.is_main or speaks)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # a bug of ours, on one rank perhaps: its log and the terminal get all of it
        kind = OUT_OF_MEMORY if "OutOfMemory" in type(error).__name__ else BUG
        leave_fault(folder, world, kind, " ".join(f"{type(error).__name__}: {error}".split()), EXIT_BUG)
        output.fail(traceback.format_exc(), show=True)
        return EXIT_BUG
    finally:
        if progress is not None:
            progress.end()
        if lock is not None:
            os.close(lock)
    return EXIT_REQUEUE if outcome == "requeue" else EXIT_OK


def leave_fault(folder: RunFolder, world: World, kind: str, line: str, code: int) -> None:
    """For whoever launched the ranks of all nodes."""
    weight = 1 if f"rank {world.rank}:" in line else 0
    write_fault(folder, Fault(kind, world.rank, socket.gethostname(), line, code, weight))


def parse(arguments: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """The command line of a rank; the launcher puts --local_rank first."""
    parser = argparse.ArgumentParser(description="Train one rank. Started by the deepspeed launcher or torchrun.")
    parser.add_argument("--config", help="run YAML, or the name of a preset")
    parser.add_argument("--deepspeed", help="name of a shipped DeepSpeed JSON, or a path")
    parser.add_argument("--resume", default="auto", help="auto, never, or the path of a checkpoint")
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    overrides = [*options.overrides, *([f"deepspeed={options.deepspeed}"] if options.deepspeed else [])]
    try:
        return options, anchored(load_run_config(options.config, overrides))
    except Z2allError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


class Inputs(NamedTuple):
    """What a rank knows before torch is loaded."""

    expected_device: str
    resolved: ResolvedDeepSpeed
    tokenizer: Z2allTokenizer
    first_weights: FirstWeights | None


def check_inputs(run: RunConfig, world: World, resume: str) -> Inputs:
    """Mistakes end here, on all ranks at once."""
    expected = device_type()
    resolved = resolve(run, world.world_size, expected)
    require_disk(resolved)
    tokenizer = check_data(run, world.world_size)
    return Inputs(expected, resolved, tokenizer, first_weights(run, resume))


def train_rank(
    run: RunConfig,
    resume: str,
    folder: RunFolder,
    world: World,
    inputs: Inputs,
    output: RankOutput,
    startup: Startup,
    progress: Progress,
) -> str:
    """Builds model, data and engine, restores the checkpoint if there is one, trains. Returns how it ended."""
    expected_device, resolved, tokenizer, start = inputs
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Memory in segments that grow, so that batches of other shapes do not leave holes; torch reads this once.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    determinism.prepare(run.train.deterministic)
    output.say("loading torch and DeepSpeed")
    with garbage.loading(), left_unloaded():
        from z2all_ds.data import BatchLoader, PackedStream
        from z2all_ds.train import engine as ds
    from z2all_ds.train.cpu_binding import bind_to_gpu

    startup.done("imports")
    stream = PackedStream(stream_spec(run), tokenizer, rank=world.rank, world_size=world.world_size)
    startup.done("data")
    determinism.enforce(run.train.deterministic)
    device = ds.pick_device(world)
    if run.train.bind_cpus:
        bind_to_gpu(device, output.say)
    startup.done("device")
    if device.type != expected_device:  # torch knows better: it may be built without CUDA, or for GPUs of another maker
        resolved = resolve(run, world.world_size, device.type)
    for note in resolved.notes:
        output.say(note)
    output.say(f"dtypes: {resolved.dtypes}")

    from z2all_ds.model import Z2allConfig, Z2allForCausalLM
    from z2all_ds.model.recompute import set_recompute
    from z2all_ds.ops import Situation, resolve_ops
    from z2all_ds.train.compiling import compile_layers, ops_to_compile, require_inductor
    from z2all_ds.train.dry_run import dry_run
    from z2all_ds.train.graphed import graph_micro_batches
    from z2all_ds.train.loop import Trainer
    from z2all_ds.train.validation import Validation

    startup.done("imports")
    compiled = run.train.compile == "layers"
    if compiled:
        require_inductor(device.type)
    if device.type == "cuda":
        progress.record_flight(folder)
    ds.start_process_group(world, device)
    startup.done("process_group")
    situation = Situation(device.type, resolved.dtype, run.model.shape.head_dim)
    ops = (ops_to_compile if compiled else resolve_ops)(run.ops.model_dump(), situation)
    for choice in ops.choices:
        output.say(f"op {choice.op}: {choice.backend} ({choice.reason})")
    output.say(f"optimizer: {resolved.optimizer.kind} ({resolved.optimizer.reason})")
    ds.seed_everything(run.train.seed)
    config = Z2allConfig.from_section(run.model, **tokenizer.model_token_ids)
    model = ds.build_model(lambda: Z2allForCausalLM(config, ops), run, resolved, device)
    set_recompute(model, run.train.activation_checkpointing, run.train.recompute)
    if world.is_main:
        facts = {
            "device": ds.device_name(device),
            "ops": [vars(choice) for choice in ops.choices],
            "optimizer": vars(resolved.optimizer),
            "dtypes": vars(resolved.dtypes),
        }
        write_run_files(run, folder, resolved.config, facts, world)
    startup.done("model")
    engine = ds.build_engine(model, run, resolved)
    ds.limit_waiting(run.train.hang_seconds)
    if run.train.init_from:
        load_first_weights(engine, start, run.train.seed, output.say)
    startup.done("engine")
    if run.train.dry_run:
        dry_run(engine, run, resolved, output.say)
    startup.done("dry_run")
    micro_batches = [stage.micro_batch for stage in run_stages(run)]
    loader = BatchLoader(stream, micro_batches, run.data.num_workers, pin_memory=device.type == "cuda")
    startup.done("data")
    graphs = None if compiled else graph_micro_batches(engine, run, ops, output.say)
    if compiled:
        compile_layers(engine.module, ops, len(micro_batches), output.say)
    validation = Validation(run, tokenizer, world, engine) if run.validation.corpus else None
    trainer = Trainer(run, folder, world, resolved, engine, loader, graphs, validation, output, startup, progress)
    startup.done("engine")
    try:
        trainer.restore(resume)
        startup.done("restore")
        return trainer.run_steps()
    except ClusterError:  # another rank is gone, and with it its part of a save
        raise
    except Exception:
        trainer.state.let_saves_arrive()
        raise
    finally:
        trainer.close()


def write_run_files(
    run: RunConfig, folder: RunFolder, ds_config: dict[str, Any], facts: dict[str, Any], world: World
) -> None:
    """The resolved inputs of the run, beside its results."""
    import importlib.metadata

    write_whole(folder.config, dump_yaml(run))
    write_whole(folder.ds_config, json.dumps(ds_config, indent=2))
    packages = ("z2all_ds", "torch", "deepspeed", "transformers", "tokenizers", "numpy")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    environment = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "world_size": world.world_size,
        "packages": versions,
        **facts,
    }
    write_whole(folder.environment, json.dumps(environment, indent=2))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.exit(code)
