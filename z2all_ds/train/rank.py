"""The training of one rank, part by part: data, device, engine, loop.

checked inputs ─▶ torch is loaded ─▶ device ─▶ process group, model, engine ─▶ trainer ─▶ steps
"""

import json
import os
import platform
from typing import Any, NamedTuple

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.config import RunConfig, dump_yaml
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.data.run_spec import stream_spec
from z2all_ds.train.hooks import garbage
from z2all_ds.train.inputs import RunData
from z2all_ds.train.processes.logs import RankOutput
from z2all_ds.train.processes.progress import Progress
from z2all_ds.train.processes.startup import Startup
from z2all_ds.train.speed import determinism
from z2all_ds.train.speed.unused_libraries import left_unloaded
from z2all_ds.train.summary import ops_lines, start_lines
from z2all_ds.zero.ds_config import ResolvedDeepSpeed, resolve
from z2all_ds.zero.first_weights import FirstWeights, is_new_run, load_first_weights


class Inputs(NamedTuple):
    """Inputs of a rank that are available before torch is loaded."""

    expected_device: str
    resolved: ResolvedDeepSpeed
    data: RunData
    first_weights: FirstWeights | None


class Rank(NamedTuple):
    """Objects shared by all parts of a rank's training."""

    run: RunConfig
    resume: str
    folder: RunFolder
    world: World
    inputs: Inputs
    output: RankOutput
    startup: Startup
    progress: Progress


def train_rank(rank: Rank) -> str:
    """Build data, engine and trainer, restore the checkpoint if there is one, and train. Return the outcome."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Expandable segments, so that batches of other shapes do not fragment memory; torch reads this once.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    determinism.prepare(rank.run.train.deterministic)
    rank.output.say("loading torch and DeepSpeed")
    with garbage.loading(), left_unloaded():
        from z2all_ds.data import PackedStream
        from z2all_ds.zero import engine as ds  # noqa: F401  the rest below finds it loaded
    rank.startup.done("imports")
    data, world = rank.inputs.data, rank.world
    resumes = not is_new_run(rank.run, rank.resume)
    stream = PackedStream(stream_spec(rank.run), data.tokenizer, world.rank, world.world_size, data.documents, resumes)
    rank.startup.done("data")
    device, resolved = take_device(rank)
    engine, ops = build_engine(rank, device, resolved)
    trainer = build_trainer(rank, resolved, engine, ops, stream)
    if world.is_main:
        shares = [stage.shares for stage in stream.plan.schedule.stages]
        for line in start_lines(rank.run, world.world_size, run_stages(rank.run), shares, data):
            rank.output.say(line)
        for line in [] if resumes else stream.plan.describe_orders():
            rank.output.say(line)
        trainer.state.on_accepted = lambda: write_run_files(rank, resolved, device, ops)
    try:
        trainer.restore(rank.resume)
        stream.plan.prepare(rank.progress.beat)  # of a resumed run only now, as its state decides what is needed
        rank.startup.done("restore")
        for line in stream.plan.describe_shares():
            rank.output.say(line)
        outcome: str = trainer.run_steps()
        return outcome
    except Exception as error:
        if not isinstance(error, ClusterError):  # otherwise another rank is gone, and its part of a save too
            trainer.state.let_saves_arrive()
        trainer.recorder.fail(trainer.state.step, error)
        raise
    finally:
        trainer.close()


def take_device(rank: Rank) -> tuple[Any, ResolvedDeepSpeed]:
    """Return this rank's device (GPU or CPU) and the settings for it."""
    from z2all_ds.train.speed.cpu_binding import bind_to_gpu
    from z2all_ds.zero import engine as ds

    run, resolved = rank.run, rank.inputs.resolved
    determinism.enforce(run.train.deterministic)
    device = ds.pick_device(rank.world)
    if run.train.bind_cpus:
        bind_to_gpu(device, rank.output.say)
    rank.startup.done("device")
    if device.type != rank.inputs.expected_device:
        # torch may be built without CUDA, or for GPUs of another vendor
        resolved = resolve(run, rank.world.world_size, device.type)
    for note in resolved.notes:
        rank.output.say(note)
    rank.output.say(f"dtypes: {resolved.dtypes}")
    return device, resolved


def build_engine(rank: Rank, device: Any, resolved: ResolvedDeepSpeed) -> tuple[Any, Any]:
    """Join the other ranks and wrap the model; return the engine and the ops."""
    from z2all_ds.checkpoint.rng import seed_everything
    from z2all_ds.model import Z2allConfig, Z2allForCausalLM
    from z2all_ds.model.recompute import set_recompute
    from z2all_ds.ops import Situation, resolve_ops
    from z2all_ds.train.speed.compiling import ops_to_compile, require_inductor
    from z2all_ds.train.speed.dry_run import dry_run
    from z2all_ds.zero import engine as ds

    run, startup, say = rank.run, rank.startup, rank.output.say
    startup.done("imports")
    compiled = run.train.compile == "layers"
    if compiled:
        require_inductor(device.type)
    if device.type == "cuda":
        rank.progress.record_flight(rank.folder)
    ds.start_process_group(rank.world, device)
    startup.done("process_group")
    situation = Situation(device.type, resolved.dtype, run.model.shape.head_dim)
    ops = (ops_to_compile if compiled else resolve_ops)(run.ops.model_dump(), situation)
    for line in ops_lines(ops.choices, run.ops.model_dump(), device.type == "cpu"):
        say(line)
    say(f"optimizer: {resolved.optimizer.kind} ({resolved.optimizer.reason})")
    seed_everything(run.train.seed)
    config = Z2allConfig.from_section(run.model, **rank.inputs.data.tokenizer.model_token_ids)
    model = ds.build_model(lambda: Z2allForCausalLM(config, ops), run, resolved, device)
    set_recompute(model, run.train.activation_checkpointing, run.train.recompute)
    startup.done("model")
    engine = ds.build_engine(model, run, resolved)
    ds.limit_waiting(run.train.hang_seconds)
    if run.train.init_from:
        load_first_weights(engine, rank.inputs.first_weights, run.train.seed, say)
    startup.done("engine")
    if run.train.dry_run:
        dry_run(engine, run, resolved, say)
    startup.done("dry_run")
    return engine, ops


def build_trainer(rank: Rank, resolved: ResolvedDeepSpeed, engine: Any, ops: Any, stream: Any) -> Any:
    """Build the loop with batches, held-out data, and graphs or compiled layers."""
    from z2all_ds.data import BatchLoader
    from z2all_ds.train.context import TrainContext
    from z2all_ds.train.forward import ForwardPass
    from z2all_ds.train.guard.guarded_steps import GuardedSteps
    from z2all_ds.train.loop import Trainer
    from z2all_ds.train.meters.channel_loss import ChannelLoss
    from z2all_ds.train.recorder import Recorder
    from z2all_ds.train.run_state import RunState
    from z2all_ds.train.speed.compiling import compile_layers
    from z2all_ds.train.speed.graphed import graph_micro_batches

    run, world, say = rank.run, rank.world, rank.output.say
    rank.startup.done("imports")
    micro_batches = [stage.micro_batch for stage in run_stages(run)]
    loader = BatchLoader(stream, micro_batches, run.data.num_workers, pin_memory=engine.device.type == "cuda")
    rank.startup.done("data")
    compiled = run.train.compile == "layers"
    graphs = None if compiled else graph_micro_batches(engine, run, ops, say)
    if compiled:
        compile_layers(engine.module, ops, len(micro_batches), say)
    recorder = Recorder(run, rank.folder, world, rank.output, rank.startup)
    skips = run.data.on_bad_record == "skip"
    channel_loss = ChannelLoss(stream.domain_names, engine.device, world, counts_bad_records=skips)
    steps = GuardedSteps(engine, channel_loss, run.guard, scales_loss=resolved.dtype == "fp16")
    context = TrainContext(
        run=run,
        folder=rank.folder,
        world=world,
        data=rank.inputs.data,
        engine=engine,
        loader=loader,
        graphs=graphs,
        forward=ForwardPass(engine, run.data.document_mask, rank.progress),
        channel_loss=channel_loss,
        steps=steps,
        state=RunState(run, rank.folder, world, resolved, engine, loader, steps.guard, recorder),
        recorder=recorder,
        progress=rank.progress,
    )
    trainer = Trainer(context)
    rank.startup.done("engine")
    return trainer


def write_run_files(rank: Rank, resolved: ResolvedDeepSpeed, device: Any, ops: Any) -> None:
    """Write the resolved inputs of an accepted run into its folder."""
    import importlib.metadata

    from z2all_ds.zero.engine import device_name

    folder = rank.folder
    write_whole(folder.config, dump_yaml(rank.run))
    write_whole(folder.ds_config, json.dumps(resolved.config, indent=2))
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
        "world_size": rank.world.world_size,
        "packages": versions,
        "device": device_name(device),
        "ops": [vars(choice) for choice in ops.choices],
        "optimizer": vars(resolved.optimizer),
        "dtypes": vars(resolved.dtypes),
    }
    write_whole(folder.environment, json.dumps(environment, indent=2))
