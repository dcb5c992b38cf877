"""One rank of `z2all bench checkpoint`: saves one engine by several methods, with training steps between and during
them. Rank 0 prints one JSON line.

python -m z2all_ds.bench.checkpoint_ranks --dir /disk/scratch --config z2all_1b deepspeed=zero1
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed

from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import say
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.bench.in_ranks import rank_main
from z2all_ds.checkpoint.layout import find_latest
from z2all_ds.checkpoint.rng import seed_everything
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.model.recompute import set_recompute
from z2all_ds.ops import Situation, resolve_ops
from z2all_ds.zero import engine as ds
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.process_group import from_rank_0, gathered
from z2all_ds.zero.state.engine_state import rank_state, read_state
from z2all_ds.zero.state.manager import CheckpointManager
from z2all_ds.zero.state.optimizer_shards import optimizer_shards_of

WARMUP_STEPS = 3
STEPS_ALONE = 12
BLOCK_BYTES = 1 << 26
MAX_WAIT_SECONDS = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Measure in one rank; return the exit code."""
    parser = argparse.ArgumentParser(description="Measure saves and restores of one engine.")
    parser.add_argument("--dir", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3, help="saves per method")
    return rank_main(parser, arguments, lambda run, options, world: Measurement(run, world, options).all_figures())


class Measurement:
    """One engine, trained on random tokens, and its saves."""

    def __init__(self, run: RunConfig, world: World, options: argparse.Namespace) -> None:
        self.run, self.world, self.folder, self.rounds = run, world, options.dir, options.rounds
        self.device = ds.pick_device(world)
        self.resolved = resolve(run, world.world_size, self.device.type)
        ds.start_process_group(world, self.device)
        seed_everything(run.train.seed)
        situation = Situation(self.device.type, self.resolved.dtype, run.model.shape.head_dim)
        ops = resolve_ops(run.ops.model_dump(), situation)
        config = Z2allConfig.from_section(run.model)
        model = ds.build_model(lambda: Z2allForCausalLM(config, ops), run, self.resolved, self.device)
        set_recompute(model, run.train.activation_checkpointing, run.train.recompute)
        model.train()
        self.engine = ds.build_engine(model, run, self.resolved)
        size = (run.train.micro_batch, run.train.sequence_length + 1)
        self._ids = torch.randint(run.model.vocab_size, size, device=self.device)
        self._positions = torch.arange(run.train.sequence_length, device=self.device).expand(size[0], -1)

    def all_figures(self) -> dict[str, Any]:
        for _ in range(WARMUP_STEPS):
            self.step()
        alone = statistics.median(self.step() for _ in range(STEPS_ALONE))
        size = sum(gathered(sum(entry.num_bytes for entry in rank_state(self.engine).entries)))
        return {
            "step_seconds_alone": alone,
            "state_bytes": size,
            "disk_bytes_per_second": self.disk_speed(size),
            "z2all": self.ours(),
            "z2all_waiting": self.ours_waiting(),
            "deepspeed": self.deepspeed(),
            **self.torch_dcp(),
            "ranks": self.world.world_size,
            "deepspeed_json": self.resolved.name,
            "dtype": self.resolved.dtype,
            "device": ds.device_name(self.device),
            "packages": {name: version(name) for name in ("torch", "deepspeed")},
        }

    def step(self) -> float:
        """Train one optimizer step and return its seconds."""
        started = time.perf_counter()
        for _ in range(self.resolved.accumulation):
            outputs = self.engine(
                input_ids=self._ids[:, :-1], position_ids=self._positions, next_tokens=self._ids[:, 1:]
            )
            self.engine.backward(outputs.loss)
            self.engine.step()
        self.wait_for_device()
        return time.perf_counter() - started

    def wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any]) -> float:
        """Return the seconds until `work` is done on all ranks."""
        self.wait_for_device()
        distributed.barrier()
        started = time.perf_counter()
        work()
        self.wait_for_device()
        distributed.barrier()
        return time.perf_counter() - started

    def disk_speed(self, size: int) -> float:
        """Return the bytes per second of plain writes by rank 0, with one sync at the end."""
        blocks, block, file = max(1, size // BLOCK_BYTES), os.urandom(BLOCK_BYTES), self.folder / "plain"

        def write() -> None:
            if self.world.is_main:
                with file.open("wb", buffering=0) as stream:
                    for _ in range(blocks):
                        stream.write(block)
                    os.fsync(stream.fileno())

        seconds = self.timed(write)
        file.unlink(missing_ok=True)
        return blocks * BLOCK_BYTES / seconds

    def ours(self) -> dict[str, Any]:
        """Measure snapshots that are written during the steps that follow."""
        with self.scratch("ours") as folder, self.manager(folder) as manager:
            manager.prepare(self.engine)
            for _ in range(STEPS_ALONE):
                self.step()  # while the memory is being prepared
            blocked, totals, steps_during = [], [], []
            for number in range(1, self.rounds + 1):
                save = partial(manager.save, self.engine, number, {}, {}, to_disk=True)
                blocked.append(self.timed(save))
                while (seconds := from_rank_0(next((s.seconds for s in manager.completed_saves()), None))) is None:
                    steps_during.append(self.step())
                totals.append(seconds)

            def newest_on_disk() -> Any:  # rank 0 compares the checksums, as in a run
                return from_rank_0(find_latest(folder.checkpoints)[0] if self.world.is_main else None)

            from_memory = self.timed(lambda: read_state(self.engine, manager.newest_in_memory(self.engine).path))
            from_disk = self.timed(lambda: read_state(self.engine, newest_on_disk().path))
        return {
            "blocked_seconds": blocked,
            "total_seconds": totals,
            "step_seconds_beside": statistics.median(steps_during) if steps_during else None,
            "restore_from_memory_seconds": from_memory,
            "restore_seconds": from_disk,
        }

    def ours_waiting(self) -> dict[str, Any]:
        """Measure saves of the same files for which training waits."""
        with self.scratch("waiting") as folder, self.manager(folder) as manager:
            saves = (partial(manager.save, self.engine, n, {}, {}, wait=True) for n in range(1, self.rounds + 1))
            seconds = [self.timed(save) for save in saves]
        return {"blocked_seconds": seconds, "total_seconds": seconds}

    def deepspeed(self) -> dict[str, Any]:
        """Measure engine.save_checkpoint and load_checkpoint, which do not sync to disk."""
        with self.scratch("deepspeed") as folder:
            seconds = []
            for number in range(self.rounds):
                seconds.append(self.timed(partial(self.engine.save_checkpoint, str(folder.root), tag=f"tag{number}")))
                self.remove(folder.root / f"tag{number - 1}")
            restored = self.timed(lambda: self.engine.load_checkpoint(str(folder.root)))
        return {"blocked_seconds": seconds, "total_seconds": seconds, "restore_seconds": restored}

    def torch_dcp(self) -> dict[str, Any]:
        """Measure dcp.save and dcp.async_save on this rank's optimizer shards, without names, index or checksums."""
        state = {
            f"{self.world.rank}:{number}:{key}": value.detach()
            for number, shard in enumerate(optimizer_shards_of(self.engine))
            for key, value in {"weight": shard.tensor, **shard.state}.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        group = distributed.new_group(backend="gloo")
        waiting, blocked, totals = [], [], []
        with self.scratch("dcp") as folder:
            path = folder.root / "saved"
            for _ in range(self.rounds):
                waiting.append(self.timed(partial(dcp.save, state, checkpoint_id=str(path))))
                self.remove(path)
            for _ in range(self.rounds):
                pending: list[Any] = []
                started = time.perf_counter()
                begin = partial(dcp.async_save, state, checkpoint_id=str(path), process_group=group)
                blocked.append(self.timed(lambda begin=begin, pending=pending: pending.append(begin())))  # type: ignore[misc]
                pending[0].result(timeout=MAX_WAIT_SECONDS)
                distributed.barrier()
                totals.append(time.perf_counter() - started)
                self.remove(path)
        return {
            "torch_dcp": {"blocked_seconds": waiting, "total_seconds": waiting},
            "torch_dcp_async": {"blocked_seconds": blocked, "total_seconds": totals},
        }

    def remove(self, path: Path) -> None:
        """Remove a save, so that the disk need not hold all of them."""
        if self.world.is_main:
            shutil.rmtree(path, ignore_errors=True)
        distributed.barrier()

    @contextmanager
    def scratch(self, name: str) -> Iterator[RunFolder]:
        folder = RunFolder(self.folder / name)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
            distributed.barrier()
        finally:
            if self.world.is_main:
                shutil.rmtree(folder.root, ignore_errors=True)

    @contextmanager
    def manager(self, folder: RunFolder) -> Iterator[Any]:
        section = self.run.checkpoint.model_copy(update={"disk_patience_seconds": MAX_WAIT_SECONDS})
        manager = CheckpointManager(folder, section, self.world, self.device, say)
        try:
            manager.begin_lineage(resumes_from_memory=False)
            yield manager
        finally:
            manager.close(keeps_memory=False)


if __name__ == "__main__":
    sys.exit(main())
